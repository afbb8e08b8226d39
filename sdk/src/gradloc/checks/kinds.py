"""Every kind of finding that the checks know: code, severity, meaning, what to do. The one registry.

Documents, JSON, the self-test and the checks themselves take codes from here, so they cannot differ.
"error": training on is harmful or impossible. "warning": likely wrong, or wrong under conditions named.
"""

from dataclasses import dataclass
from typing import Literal, get_args

Layer = Literal["data", "reward", "policy", "gradient", "optimizer"]
Severity = Literal["error", "warning"]
LAYERS: tuple[Layer, ...] = get_args(Layer)


@dataclass(frozen=True)
class Kind:
    """One kind of finding. `meaning` ends up in docs/checks.md, `todo` in every finding."""

    code: str
    severity: Severity
    meaning: str
    todo: str

    @property
    def layer(self) -> Layer:
        layer = self.code.split(".", maxsplit=1)[0]
        assert layer in LAYERS, self.code
        return layer


_ALL = (
    # --- data: rows of a file -----------------------------------------------------------------------
    Kind("data.row-unreadable", "error", "a row that is not a JSON object in UTF-8", "repair or drop the row"),
    Kind("data.field-missing", "error", "a field that other rows have is missing or null", "fill it or drop the row"),
    Kind("data.empty-prompt", "error", "a prompt without text", "drop the row"),
    Kind("data.empty-response", "warning", "a response without text", "drop the row, or give it the lowest reward"),
    Kind("data.too-long", "error", "prompt and response exceed the limit in tokens", "shorten or drop the row"),
    Kind("data.nul-character", "error", "a NUL character", "remove it where the data is made"),
    Kind("data.control-character", "warning", "a control character other than tab and line ends", "remove it"),
    Kind(
        "data.replacement-character", "warning", "U+FFFD: text was decoded wrongly before", "read the source as UTF-8"
    ),
    Kind("data.lone-surrogate", "error", "half a surrogate pair: cannot be encoded", "join or drop the halves"),
    Kind("data.reward-type", "error", "a reward that is no number", "write a number, or drop the row"),
    Kind("data.reward-non-finite", "error", "a reward that is NaN or infinite", "drop the row; never replace NaN by 0"),
    Kind("data.reward-range", "error", "a reward outside the declared range", "correct the label or the range"),
    Kind("data.reward-outlier", "warning", "a reward far outside what all others span", "look at these rows' labels"),
    Kind("data.duplicate-prompt", "warning", "one prompt in several groups", "remove the repetition, or share one uid"),
    Kind("data.special-token-in-text", "warning", "text that the tokenizer reads as a special token", "escape it"),
    Kind("data.text-lossy", "warning", "text -> ids -> text gives another text", "use the policy's own tokenizer"),
    Kind("data.retokenized", "error", "trained ids are not the sampled ids", "keep sampled ids; never encode the text"),
    Kind("data.id-out-of-range", "error", "a token id outside the vocabulary", "use the policy's own tokenizer"),
    Kind("data.mask-misaligned", "error", "a mask, labels or logp of another length than the ids", "cut all alike"),
    Kind("data.mask-empty", "error", "a mask without a single 1", "drop the row: it teaches nothing"),
    Kind("data.mask-values", "error", "a mask with values other than 0 and 1", "make the mask boolean"),
    Kind("data.non-finite", "error", "a number that is NaN or infinite in a row", "drop the row, repair its source"),
    Kind("data.label-on-special", "error", "padding in the loss mask or labels", "set labels to -100 there"),
    Kind("data.eos-unlabelled", "warning", "the end of text is outside the loss in all rows", "put it into the loss"),
    # --- data: a collated batch ---------------------------------------------------------------------
    Kind("data.batch-non-finite", "error", "a NaN or infinity in a batch", "look at the named row's source"),
    Kind("data.batch-shape", "error", "tensors of one batch differ in rows or positions", "pad and cut all alike"),
    Kind("data.batch-device", "error", "tensors of one batch lie on several devices", "move the whole batch at once"),
    Kind("data.batch-mask-empty", "error", "a row whose mask is all zero", "drop the row"),
    Kind("data.batch-mask-values", "error", "a mask with values other than 0 and 1", "make the mask boolean"),
    Kind("data.batch-id-range", "error", "a token id outside the vocabulary", "use the policy's own tokenizer"),
    Kind("data.batch-label-on-padding", "error", "labels or loss mask on padding", "set them to -100 or 0 there"),
    Kind("data.batch-mask-hole", "warning", "attention mask with a gap inside a row", "pad on one side only"),
    Kind("data.batch-attends-padding", "error", "padding is attended to", "set the attention mask to 0 there"),
    Kind("data.batch-dtype", "error", "ids that are no integers", "keep ids int64; float32 is exact to 2^24 only"),
    # --- reward: values -----------------------------------------------------------------------------
    Kind("reward.not-a-number", "error", "a reward that is missing or NaN", "leave the row out of its group"),
    Kind("reward.infinite", "error", "an infinite reward", "bound it (gradloc.clipping.guard_rewards)"),
    Kind("reward.out-of-bounds", "error", "a reward outside its bounds", "clamp or reject it before advantages"),
    Kind("reward.constant", "error", "all rewards are the same: nothing to learn", "look at parser and reward model"),
    Kind("reward.zero-variance-groups", "warning", "most groups have one reward only", "filter or mix difficulties"),
    Kind("reward.noise-normalised", "warning", "a group's spread is rounding noise, made size 1", "round the rewards"),
    Kind("reward.advantage-outlier", "error", "an advantage far beyond its peers", "use the group's own deviation"),
    Kind("reward.length-correlation", "warning", "reward follows length within groups", "control for the length"),
    Kind("reward.drift", "error", "scores of the same texts moved", "freeze the reward model; compare its weights"),
    Kind("reward.frozen", "warning", "mean reward has not moved for many steps", "look at recent rewards by hand"),
    Kind("reward.hacked", "warning", "reward rises while accuracy falls", "read samples; bound or replace the reward"),
    # --- reward: the model --------------------------------------------------------------------------
    Kind("reward.model-training", "error", "a module of the reward model is in training mode", "call .eval()"),
    Kind("reward.dropout-active", "error", "dropout is active while scoring", "call .eval() on the whole model"),
    Kind("reward.model-trainable", "error", "parameters of the reward model want gradients", "requires_grad_(False)"),
    Kind("reward.adapter-disabled", "error", "a trained adapter is switched off", "do not disable it; only freeze it"),
    Kind("reward.adapter-empty", "warning", "an adapter that adds nothing (B is zero)", "load the adapter's weights"),
    Kind("reward.head-bias", "warning", "the head's bias exceeds the spread of scores", "subtract a baseline"),
    Kind("reward.unstable-score", "error", "the same input scores differently twice", "eval mode, no sampling"),
    Kind("reward.padding-dependent", "error", "a score depends on the rest of the batch", "pass the attention mask"),
    Kind("reward.length-fragile", "warning", "scores jump at the length limit", "score whole answers only"),
    Kind("reward.symbol-fragile", "warning", "harmless symbols move scores", "escape special tokens before scoring"),
    Kind("reward.paraphrase-fragile", "warning", "rank of scores changes with the wording", "train it on paraphrases"),
    Kind("reward.tokenizer-vocabulary", "error", "reward model and policy read ids differently", "decode, re-encode"),
    Kind("reward.tokenizer-special", "error", "special tokens differ", "map them, or decode and encode again"),
    Kind("reward.tokenizer-padding-side", "warning", "padding sides differ", "set each where the model needs it"),
    Kind("reward.tokenizer-truncation-side", "warning", "truncation sides differ", "cut on the same side"),
    # --- policy -------------------------------------------------------------------------------------
    Kind("policy.loss-non-finite", "error", "a part of the loss is NaN or infinite", "look at that part's inputs"),
    Kind("policy.loss-sum", "error", "the parts do not add up to the loss", "log weighted parts; find the lost term"),
    Kind("policy.loss-share", "warning", "one auxiliary part outweighs the policy's", "lower its weight"),
    Kind("policy.kl-range", "warning", "far from the reference (per-token KL)", "raise the KL coefficient"),
    Kind("policy.kl-sign", "error", "a KL that cannot be: clearly negative", "check order of arguments and mask"),
    Kind("policy.entropy-sign", "error", "an entropy below 0 or above ln V", "check log base, mask and sign"),
    Kind("policy.entropy-collapse", "warning", "hardly any entropy left", "raise temperature or clip range above"),
    Kind("policy.entropy-uniform", "warning", "nearly uniform: temperature or mask error", "check logits and mask"),
    Kind("policy.kl-coef", "warning", "the KL term's spread outweighs the reward's", "use kl_coefficient()'s value"),
    Kind("policy.advantage-non-finite", "error", "a NaN or infinite advantage", "look at its group's rewards"),
    Kind("policy.advantage-not-normalised", "warning", "groups' advantages are not centred", "subtract group means"),
    Kind("policy.advantage-outlier", "error", "an advantage beyond what a group can give", "check the deviation used"),
    Kind("policy.clip-range", "warning", "a clip range outside [.05, .5]", "use .2 (DAPO: .2 below, .28 above)"),
    Kind("policy.clip-fraction", "warning", "many tokens are clipped", "fewer updates per rollout, lower lr"),
    Kind("policy.logp-half", "error", "log-probabilities in half precision", "logits.float() before log_softmax"),
    Kind(
        "policy.fill-overflow", "error", "a mask fill value that its format cannot hold", "fill with finfo.min or -inf"
    ),
    Kind("policy.no-loss-scaling", "warning", "float16 without a gradient scaler", "use GradScaler, or bfloat16"),
    Kind("policy.mixed-formats", "warning", "trainable parameters of several formats", "cast adapters and base alike"),
    Kind("policy.compile-drift", "error", "compiled and eager model differ", "do not compile the part that differs"),
    Kind("policy.token-mismatch", "error", "a token's importance ratio is absurd", "TokenClip; check rollout logp"),
    Kind("policy.sequence-mismatch", "warning", "harmless token ratios add up", "SeqClip, or length-normalised ratios"),
    Kind("policy.ratio-bias", "error", "ratios are off over the whole batch", "check temperature, weights, positions"),
    Kind("policy.ratio-before-update", "error", "the ratio is not 1 before any update", "check mask and position_ids"),
    Kind("policy.temperature", "error", "rollout and training use different temperatures", "divide logits by it"),
    Kind("policy.logp-non-finite", "error", "a trained token's logp is not finite", "check the id and masked logits"),
    Kind("policy.logp-positive", "error", "a log-probability above 0", "check normalisation and alignment"),
    Kind("policy.mask-fault", "error", "a masked token made the gradient non-finite", "where() before the product"),
    Kind("policy.masked-non-finite", "warning", "a non-finite value at a masked token", "where() before the product"),
    Kind("policy.token-count", "error", "the loss is divided by a wrong token count", "count tokens over all ranks"),
    # --- gradient -----------------------------------------------------------------------------------
    Kind("gradient.non-finite", "error", "a NaN or infinite gradient", "run anomaly mode for this step"),
    Kind("gradient.missing", "warning", "trainable parameters without a gradient", "check detach() and freezing"),
    Kind("gradient.vanished", "error", "the whole gradient is zero", "check advantages and mask"),
    Kind("gradient.spike", "error", "the norm is abnormal for its run", "gradloc localize the step's snapshot"),
    Kind("gradient.dead-layer", "warning", "a layer with hardly any gradient", "check detach(), masks, frozen parts"),
    Kind("gradient.layer-growth", "error", "a layer explodes or grows while others stay", "LayerClip; localize"),
    Kind("gradient.token-imbalance", "warning", "one token makes most of the gradient", "look at ratio and reward"),
    Kind("gradient.bad-operation", "error", "the first operation whose result is not finite", "guard its input"),
    # --- optimizer ----------------------------------------------------------------------------------
    Kind("optimizer.state-shape", "error", "state of another shape than its parameter", "make a new optimizer"),
    Kind("optimizer.state-format", "warning", "moments in half precision", "keep moments in float32"),
    Kind("optimizer.state-non-finite", "error", "NaN or infinity in the moments", "go back to a checkpoint"),
    Kind("optimizer.state-negative", "error", "a negative second moment", "go back to a checkpoint"),
    Kind("optimizer.stale-state", "error", "state of parameters that are in no group", "make a new optimizer"),
    Kind("optimizer.foreign-parameter", "error", "updates parameters that the model no longer has", "make a new one"),
    Kind("optimizer.left-out", "error", "trainable parameters in no group", "add_param_group"),
    Kind("optimizer.step-mismatch", "warning", "parameters differ in their number of updates", "reset all states"),
    Kind("optimizer.lr", "error", "a learning rate that is no number, negative or 0", "check the schedule"),
    Kind("optimizer.lr-jump", "warning", "the learning rate jumped", "check schedule and resume"),
    Kind("optimizer.update-ratio", "error", "one update changes a weight by more than 10 %", "lower lr, warm up"),
    Kind("optimizer.update-lost", "warning", "updates vanish in the weights' format", "keep float32 master weights"),
    Kind("optimizer.zero-gradients", "warning", "gradients are zeros, not None: momentum still moves", "p.grad = None"),
    Kind("optimizer.epsilon", "error", "epsilon is zero in the state's format", "raise eps above the smallest number"),
    Kind("optimizer.memory-growth", "error", "live tensors grow step by step", "see the holders; detach what is kept"),
    Kind("optimizer.graph-held", "error", "graphs of past steps are kept", "store .detach() or .item()"),
)
KINDS: dict[str, Kind] = {kind.code: kind for kind in _ALL}
assert len(KINDS) == len(_ALL), "a code is registered twice"
