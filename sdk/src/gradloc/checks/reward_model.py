"""Checks of a reward model: its state (eval, frozen, adapters, head) and whether its scores hold still.

Part of the reward layer. The guide's `disable_adapter()` is refused: it would switch a trained adapter
off (and is a context manager that does nothing when called alone). Shapes: B rows.
"""

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gradloc.checks.finding import CheckFinding, finding
from gradloc.checks.rank_correlation import rank_correlation

Score = Callable[[Sequence[str]], Sequence[float]]
RELATIVE_TOLERANCE = 1e-3  # of the spread: float32 batching noise is far below
MOVED_SHARE = 0.5  # of the spread between prompts: as large as half a real difference
PARAPHRASE_RHO = 0.7
BIAS_OVER_SPREAD = 1.0
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def check_reward_model(model: nn.Module, *, scores_std: float | None = None) -> tuple[CheckFinding, ...]:
    """Check the model's state. scores_std: spread of its scores, for the head's bias."""
    found: list[CheckFinding] = []
    training = [name or "(model)" for name, module in model.named_modules() if module.training]
    dropouts = [
        name for name, module in model.named_modules() if isinstance(module, _DROPOUTS) and module.training and module.p
    ]
    if training:
        what = f"{len(training)} modules in training mode"
        found.append(finding("reward.model-training", what, {"module": training[0]}, num=len(training)))
    if dropouts:
        found.append(finding("reward.dropout-active", f"{len(dropouts)} dropouts", {"module": dropouts[0]}))
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if trainable:
        what = f"{len(trainable)} parameters want gradients"
        found.append(finding("reward.model-trainable", what, {"parameter": trainable[0]}, num=len(trainable)))
    found += _adapters(model)
    found += _head(model, scores_std)
    return tuple(found)


def _adapters(model: nn.Module) -> list[CheckFinding]:
    """Adapter layers by what they hold (lora_A, lora_B), whatever library made them."""
    disabled, empty = [], []
    for name, module in model.named_modules():
        if not (hasattr(module, "lora_A") and hasattr(module, "lora_B")):
            continue
        off = getattr(module, "disable_adapters", False)
        merged = bool(getattr(module, "merged", False))
        active = getattr(module, "active_adapters", None)
        if not merged and (off is True or (isinstance(active, list | tuple) and not active)):
            disabled.append(name)
        weights = [p for _, p in _named_tensors(module.lora_B)]
        if weights and all(not bool(p.any()) for p in weights):
            empty.append(name)
    found = []
    if disabled:
        what = f"{len(disabled)} adapter layers are switched off"
        found.append(finding("reward.adapter-disabled", what, {"module": disabled[0]}, num=len(disabled)))
    if empty:
        what = f"B is zero in {len(empty)} adapter layers: they add nothing"
        found.append(finding("reward.adapter-empty", what, {"module": empty[0]}, num=len(empty)))
    return found


def _named_tensors(holder: object) -> list[tuple[str, Tensor]]:
    if isinstance(holder, nn.Module):
        return [(name, parameter.detach()) for name, parameter in holder.named_parameters()]
    return [("", holder.detach())] if isinstance(holder, Tensor) else []


def _head(model: nn.Module, scores_std: float | None) -> list[CheckFinding]:
    """A constant bias cancels in group-normalised advantages; it counts against bounds and in padding rows."""
    if scores_std is None or not scores_std > 0:
        return []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.out_features == 1 and module.bias is not None:
            bias = float(module.bias.detach().abs().max())
            if bias > BIAS_OVER_SPREAD * scores_std:
                what = f"bias {bias:.3g}, scores spread {scores_std:.3g}"
                return [finding("reward.head-bias", what, {"module": name}, bias=bias, std=scores_std)]
    return []


def check_scores(
    score: Callable[[Tensor, Tensor], Tensor], ids_BT: Tensor, mask_BT: Tensor
) -> tuple[CheckFinding, ...]:
    """Score a padded batch twice, and each row alone without its padding: all must agree.

    score takes ids and attention mask [B, T] and gives [B].
    """
    with torch.inference_mode():
        first_B, second_B = score(ids_BT, mask_BT).double(), score(ids_BT, mask_BT).double()
        found = _compare("reward.unstable-score", "scored twice", first_B, second_B, first_B)
        if found:
            return found
        alone = []
        for row in range(len(ids_BT)):
            kept = mask_BT[row].bool()
            alone.append(score(ids_BT[row][kept][None], mask_BT[row][kept][None]).double().reshape(()))
        return _compare("reward.padding-dependent", "scored alone", first_B, torch.stack(alone), first_B)


def _compare(code: str, how: str, first_B: Tensor, second_B: Tensor, all_B: Tensor) -> tuple[CheckFinding, ...]:
    finite = all_B[torch.isfinite(all_B)]
    spread = float(finite.std(unbiased=False)) if len(finite) > 1 else 0.0
    spread = max(spread, 1e-3 * float(finite.abs().max()) if len(finite) else 0.0, 1e-9)
    moved_B = (first_B - second_B).abs()
    both_bad = ~torch.isfinite(first_B) & ~torch.isfinite(second_B)
    moved_B = torch.where(both_bad, torch.zeros_like(moved_B), torch.nan_to_num(moved_B, nan=math.inf))
    worst = int(moved_B.argmax())
    size = float(moved_B[worst])
    if size <= RELATIVE_TOLERANCE * spread:
        return ()
    return (
        finding(code, f"{how}, a score moved by {size:.3g}; scores spread {spread:.3g}", {"row": worst}, moved=size),
    )


def check_robustness(
    score: Score,
    texts: Sequence[str],
    *,
    variants: Sequence[tuple[str, Callable[[str], str]]] = (),
    paraphrases: Sequence[tuple[str, str]] = (),
    cuts: Sequence[int] = (),
) -> tuple[CheckFinding, ...]:
    """Three suites. variants: name and a change that should not matter (added symbols). paraphrases: pairs that
    mean the same. cuts: characters to leave off the end, where truncation would set in.

    Changes are compared with the spread of scores between texts; the guide's absolute .5 depends on scale.
    """
    if len(texts) < 2 and not paraphrases:
        raise ValueError("robustness needs at least two texts, so that a change can be compared with their spread")
    found: list[CheckFinding] = []
    plain = list(score(texts)) if texts else []
    spread = max(statistics.pstdev(plain), 1e-9) if len(plain) > 1 else 0.0
    changes = [("reward.symbol-fragile", name, change) for name, change in variants]
    changes += [("reward.length-fragile", f"{cut} characters cut", _cutter(cut)) for cut in cuts if cut > 0]
    for code, name, change in changes:
        moved = [abs(a - b) for a, b in zip(plain, score([change(text) for text in texts]), strict=True)]
        usual = statistics.median(moved)
        if not usual <= MOVED_SHARE * spread:
            what = f"{name}: scores move by {usual:.3g}, texts differ by {spread:.3g}"
            found.append(finding(code, what, {"variant": name}, moved=usual, spread=spread))
    if paraphrases:
        first = score([one for one, _ in paraphrases])
        second = score([other for _, other in paraphrases])
        rank = rank_correlation(first, second)
        if rank is not None and rank.rho < PARAPHRASE_RHO:
            what = f"Spearman {rank.rho:.2f} over {rank.num} pairs (at most {rank.upper:.2f} with 95 % confidence)"
            numbers = {"rho": rank.rho, "upper": rank.upper, "num": float(rank.num)}
            found.append(finding("reward.paraphrase-fragile", what, None, None, **numbers))
    return tuple(found)


def _cutter(num: int) -> Callable[[str], str]:
    return lambda text: text[: max(1, len(text) - num)]


SYMBOL_VARIANTS: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("[SEP] appended", lambda text: text + "[SEP]"),
    ("<|endoftext|> appended", lambda text: text + "<|endoftext|>"),
    ("an emoji appended", lambda text: text + " \N{SLIGHTLY SMILING FACE}"),
    ("a space appended", lambda text: text + " "),
)
