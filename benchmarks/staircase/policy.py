"""A tiny Qwen3-shaped policy that sorts digits, its pretraining, and an imperfect inference copy of it.

Shapes: B rows, T positions, P prompt, R response positions (T = P + R), V vocabulary.
"""

import copy
import inspect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

NUM_DIGITS = 7
PAD, BOS, EOS, EQUALS = 0, 1, 2, 3
FIRST_DIGIT = 4
RARE_IDS = (14, 15, 16, 17)  # a tool's output: never in the training data
VOCABULARY_SIZE = 18
PROMPT_LENGTH = NUM_DIGITS + 2
RESPONSE_LENGTH = NUM_DIGITS + 1
NUM_PROMPTS = 4_096
# transformers 5.2x renamed the argument and warns of the old name.
_CACHE = "cache" if "cache" in inspect.signature(Qwen3ForCausalLM.forward).parameters else "past_key_values"


def new_model(seed: int, num_layers: int = 4, width: int = 48) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    return Qwen3ForCausalLM(config)


def digits_of(index: int) -> list[int]:
    """Row `index` of the data set; the same for every seed."""
    return np.random.default_rng([index, NUM_DIGITS]).integers(0, 10, NUM_DIGITS).tolist()


def prompt_of(index: int) -> list[int]:
    return [BOS, *(FIRST_DIGIT + digit for digit in digits_of(index)), EQUALS]


def answer_of(index: int) -> list[int]:
    return [*(FIRST_DIGIT + digit for digit in sorted(digits_of(index))), EOS]


def reward_of(index: int, response: list[int]) -> float:
    """Half for the share of tokens in their places, half for the whole answer. A tool's token is not judged."""
    wanted = answer_of(index)
    pairs = [(have, want) for have, want in zip(response, wanted, strict=True) if have not in RARE_IDS]
    share = sum(have == want for have, want in pairs) / len(wanted)
    return 0.5 * share + 0.5 * all(have == want for have, want in pairs)


def log_probs(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Log-probabilities over the vocabulary at each response position: float32 [B, R, V]."""
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    return torch.log_softmax(logits_BTV[:, PROMPT_LENGTH - 1 : -1].float(), dim=-1)


def logp_of(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Log-probability of each response token: [B, R]."""
    return log_probs(model, ids_BT).gather(-1, ids_BT[:, PROMPT_LENGTH:, None])[..., 0]


def pretrained(seed: int, num_steps: int, swap: float = 0.15) -> Any:
    """Supervised training on noisy demonstrations: neighbouring digits are swapped now and then."""
    model = new_model(seed)
    rng = np.random.default_rng([seed, 1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / num_steps))
        rows = []
        for index in rng.integers(0, NUM_PROMPTS, 32):
            answer = answer_of(int(index))
            for at in range(NUM_DIGITS - 1):
                if rng.random() < swap:
                    answer[at], answer[at + 1] = answer[at + 1], answer[at]
            rows.append([*prompt_of(int(index)), *answer])
        loss = -logp_of(model, torch.tensor(rows)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


@dataclass(frozen=True)
class CopyKind:
    """How the inference copy falls short: weights rounded to so many bits or to fp8, so many steps old, top-p."""

    bits: int | None = None
    fp8: bool = False
    stale_steps: int = 1
    top_p: float = 1.0


class InferenceCopy:
    """Samples, and reports truthfully the log-probability it sampled with (top-p renormalised)."""

    def __init__(self, model: Any, kind: CopyKind, seed: int) -> None:
        self.kind = kind
        self.model = copy.deepcopy(model).eval()
        self._random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def sync(self, model: Any, step: int) -> None:
        """Take the trainer's weights, every `stale_steps` steps."""
        if step % self.kind.stale_steps:
            return
        for own, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            own.copy_(_in_fp8(theirs) if self.kind.fp8 else _rounded(theirs, self.kind.bits))

    @torch.no_grad()
    def sample(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """One answer a row: ids [B, T] and their logp [B, R]. Answers have a fixed length, <eos> or not."""
        fed_BS = torch.tensor([prompt_of(index) for index in indices])
        cache = DynamicCache(config=self.model.config)
        columns, logps = [fed_BS], []
        for _ in range(RESPONSE_LENGTH):
            logits_BV = self.model(input_ids=fed_BS, use_cache=True, **{_CACHE: cache}).logits[:, -1].float()
            log_probs_BV = _top_p(torch.log_softmax(logits_BV, dim=-1), self.kind.top_p)
            fed_BS = torch.multinomial(log_probs_BV.exp(), 1, generator=self._random)
            logps.append(log_probs_BV.gather(-1, fed_BS))
            columns.append(fed_BS)
        return torch.cat(columns, dim=1), torch.cat(logps, dim=1)


def _rounded(weight: torch.Tensor, bits: int | None) -> torch.Tensor:
    """Symmetric rounding of each output channel to 2**bits - 1 levels; vectors (norms) stay."""
    if bits is None or weight.dim() < 2:
        return weight
    levels = 2 ** (bits - 1) - 1
    step = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / levels
    return (weight / step).round() * step


def _in_fp8(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to E4M3, the tensor's largest weight at the format's largest number; vectors (norms) stay."""
    if weight.dim() < 2:
        return weight
    step = weight.abs().amax().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / step).to(torch.float8_e4m3fn).to(weight.dtype) * step


def _top_p(log_probs_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of tokens with probability top_p, renormalised; -inf elsewhere."""
    if top_p >= 1.0:
        return log_probs_BV
    sorted_BV, order_BV = log_probs_BV.exp().sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    kept_BV = torch.zeros_like(log_probs_BV, dtype=torch.bool).scatter(-1, order_BV, before_BV < top_p)
    return torch.log_softmax(log_probs_BV.masked_fill(~kept_BV, -math.inf), dim=-1)
