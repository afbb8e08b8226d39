"""Planted faults of the policy layer."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gradloc.checks import losses, number_formats, token_count
from gradloc.checks.advantages import check_advantages
from gradloc.checks.documents import check_document
from gradloc.checks.finding import CheckFinding
from gradloc.checks.planted import Garden
from gradloc.checks.ratios import TokenBatch, check_tokens

GARDEN = Garden()
NUM_ROWS, NUM_TOKENS = 4, 40
BAD = (2, 17)


def healthy_tokens() -> dict[str, Tensor]:
    """A batch whose inference copy differs by number format only; the last columns of one row are masked."""
    generator = torch.Generator().manual_seed(0)
    logp_BR = -torch.rand(NUM_ROWS, NUM_TOKENS, generator=generator, dtype=torch.float64) * 3 - 0.01
    noise_BR = 0.005 * torch.randn(NUM_ROWS, NUM_TOKENS, generator=generator, dtype=torch.float64)
    mask_BR = torch.ones(NUM_ROWS, NUM_TOKENS, dtype=torch.bool)
    mask_BR[1, 30:] = False
    return {
        "logp_BR": logp_BR,
        "mask_BR": mask_BR,
        "rollout_logp_BR": logp_BR + noise_BR,
        "old_logp_BR": logp_BR.clone(),
    }


def _tokens(change: Callable[[dict[str, Tensor]], None] | None, **settings: Any) -> Iterable[CheckFinding]:
    tensors = healthy_tokens()
    if change is not None:
        change(tensors)
    return check_tokens(TokenBatch(**tensors), **settings)


def _plant(code: str, name: str, change: Callable[[dict[str, Tensor]], None], **settings: Any) -> None:
    GARDEN.plant(code, name)(lambda faulty: _tokens(change if faulty else None, **settings))


def _set(tensor: str, place: tuple[int, int], value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[tensor][place] = value

    return change


def _drifting(tensors: dict[str, Tensor]) -> None:
    tensors["rollout_logp_BR"][BAD[0]] -= 0.03


def _rare(tensors: dict[str, Tensor]) -> None:
    tensors["logp_BR"][BAD] -= math.log(30.0)
    tensors["old_logp_BR"][BAD] -= math.log(30.0)


def _hotter(tensors: dict[str, Tensor]) -> None:
    """What logp at another temperature look like: nearly all tokens off, the likely ones least."""
    tensors["rollout_logp_BR"] = tensors["rollout_logp_BR"] * 0.6


_plant("policy.token-mismatch", "one stale rollout logp", _set("rollout_logp_BR", BAD, -91.0))
_plant("policy.token-mismatch", "one ratio of 1/30", _rare)
_plant("policy.sequence-mismatch", "every token of an answer off by 3 %", _drifting)
_plant("policy.ratio-bias", "rollout logp at another temperature", _hotter)
_plant("policy.ratio-before-update", "ratios off with no update yet", _hotter, fresh=True)
_plant("policy.logp-non-finite", "a trained token without probability", _set("logp_BR", BAD, -math.inf))
_plant("policy.logp-non-finite", "a NaN rollout logp in the mask", _set("rollout_logp_BR", BAD, math.nan))
_plant("policy.logp-positive", "a logp of .7", _set("logp_BR", BAD, 0.7))
_plant(
    "policy.masked-non-finite", "NaN behind the mask, harmless", _set("old_logp_BR", (1, 35), math.nan), grad_norm=0.4
)


@GARDEN.plant("policy.mask-fault", "NaN behind the mask, gradient NaN")
def _mask_fault(faulty: bool) -> Iterable[CheckFinding]:
    change = _set("old_logp_BR", (1, 35), math.nan) if faulty else None
    return _tokens(change, grad_norm=math.nan if faulty else 0.4)


@GARDEN.plant("policy.mask-fault", "a ratio that overflows behind the mask, gradient NaN")
def _overflow(faulty: bool) -> Iterable[CheckFinding]:
    change = _set("rollout_logp_BR", (1, 35), -120.0)
    # The same ratio is no one's fault where the gradient is finite.
    return _tokens(change, grad_norm=math.nan if faulty else 0.4)


@GARDEN.plant("policy.temperature", "rollout at .6, training at 1")
def _temperature(faulty: bool) -> Iterable[CheckFinding]:
    document = {"temperature": 0.6, "trained_temperature": 1.0 if faulty else 0.6}
    return check_document("policy", document).findings


# --- loss -------------------------------------------------------------------------------------------


@GARDEN.plant("policy.loss-non-finite", "a NaN KL part")
def _non_finite(faulty: bool) -> Iterable[CheckFinding]:
    return losses.check_loss_parts({"policy": 0.02, "kl": math.nan if faulty else 0.001, "entropy": -0.003})


@GARDEN.plant("policy.loss-sum", "a term of the loss that no part shows")
def _sum(faulty: bool) -> Iterable[CheckFinding]:
    return losses.check_loss_parts({"policy": 0.02, "kl": 0.001}, total=0.5 if faulty else 0.021)


@GARDEN.plant("policy.loss-share", "KL outweighs all")
def _share(faulty: bool) -> Iterable[CheckFinding]:
    return losses.check_loss_parts({"policy": 0.02, "kl": 40.0 if faulty else 0.01})


@GARDEN.plant("policy.kl-range", "3 nats a token from the reference")
def _kl_range(faulty: bool) -> Iterable[CheckFinding]:
    return losses.check_kl(3.0 if faulty else 0.0)


@GARDEN.plant("policy.kl-sign", "arguments of the KL swapped or unmasked")
def _kl_sign(faulty: bool) -> Iterable[CheckFinding]:
    return losses.check_kl(-0.4 if faulty else -0.01, estimator="k1")


@GARDEN.plant("policy.entropy-sign", "an entropy of 14 over 1,000 tokens")
def _entropy_sign(faulty: bool) -> Iterable[CheckFinding]:
    return losses.check_entropy(14.0 if faulty else 0.8, 1_000)


@GARDEN.plant("policy.entropy-sign", "the loss term logged as entropy")
def _entropy_negative(faulty: bool) -> Iterable[CheckFinding]:
    return losses.check_entropy(-0.8 if faulty else 0.8, 1_000)


@GARDEN.plant("policy.entropy-collapse", "one answer only")
def _entropy_collapse(faulty: bool) -> Iterable[CheckFinding]:
    return losses.check_entropy(1e-4 if faulty else 0.2, 1_000)


@GARDEN.plant("policy.entropy-uniform", "logits lost")
def _entropy_uniform(faulty: bool) -> Iterable[CheckFinding]:
    return losses.check_entropy(6.9 if faulty else 2.0, 1_000)


@GARDEN.plant("policy.kl-coef", "a coefficient a hundred times too large")
def _kl_coef(faulty: bool) -> Iterable[CheckFinding]:
    return losses.check_kl_coefficient(10.0 if faulty else losses.kl_coefficient(1.0, 1.0), 1.0, 1.0)


@GARDEN.plant("policy.clip-range", ".02 instead of .2")
def _clip_range(faulty: bool) -> Iterable[CheckFinding]:
    return losses.check_clipping(0.02 if faulty else 0.2, 0.05, clip_range_high=0.28)


@GARDEN.plant("policy.clip-fraction", "two thirds of the tokens clipped")
def _clip_fraction(faulty: bool) -> Iterable[CheckFinding]:
    return losses.check_clipping(0.2, 0.66 if faulty else 0.05)


# --- advantages -------------------------------------------------------------------------------------


def healthy_advantages() -> list[float]:
    """Of four groups of eight with 0/1 rewards; the last group has none."""
    made: list[float] = []
    for num_right in (1, 4, 6):
        rewards = torch.tensor([1.0] * num_right + [0.0] * (8 - num_right))
        made += ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
    return made + [0.0] * 8


def _advantages(faulty: bool, at: int, value: float) -> Iterable[CheckFinding]:
    made = healthy_advantages()
    if faulty:
        made[at] = value
    return check_advantages(made, group_size=8)


@GARDEN.plant("policy.advantage-non-finite", "0/0 in a group")
def _advantage_nan(faulty: bool) -> Iterable[CheckFinding]:
    return _advantages(faulty, 9, math.nan)


@GARDEN.plant("policy.advantage-outlier", "an advantage of 9,500")
def _advantage_outlier(faulty: bool) -> Iterable[CheckFinding]:
    return _advantages(faulty, 9, 9_500.0)


@GARDEN.plant("policy.advantage-not-normalised", "rewards used as advantages")
def _advantage_raw(faulty: bool) -> Iterable[CheckFinding]:
    return check_advantages([1.0] * 8 + [0.0] * 8 if faulty else healthy_advantages(), group_size=8)


# --- formats and counts -----------------------------------------------------------------------------


@GARDEN.plant("policy.logp-half", "log_softmax in bfloat16")
def _logp_half(faulty: bool) -> Iterable[CheckFinding]:
    return number_formats.check_logp_format(torch.zeros(2, dtype=torch.bfloat16 if faulty else torch.float32))


@GARDEN.plant("policy.fill-overflow", "the guide's masked_fill(1e9)")
def _fill(faulty: bool) -> Iterable[CheckFinding]:
    return number_formats.check_fill_value(1e9 if faulty else torch.finfo(torch.bfloat16).min, torch.bfloat16)


@GARDEN.plant("policy.fill-overflow", "-1e9 in float16")
def _fill_half(faulty: bool) -> Iterable[CheckFinding]:
    return number_formats.check_fill_value(-1e9 if faulty else -1e4, torch.float16)


def _parameters(*dtypes: torch.dtype) -> list[tuple[str, Tensor]]:
    return [(f"layers.{i}.weight", torch.zeros(2, dtype=dtype, requires_grad=True)) for i, dtype in enumerate(dtypes)]


@GARDEN.plant("policy.no-loss-scaling", "float16 autocast without a scaler")
def _no_scaling(faulty: bool) -> Iterable[CheckFinding]:
    return number_formats.check_formats(_parameters(torch.float32), autocast=torch.float16, scaler=not faulty)


@GARDEN.plant("policy.mixed-formats", "a float32 adapter on a bfloat16 base")
def _mixed(faulty: bool) -> Iterable[CheckFinding]:
    return number_formats.check_formats(_parameters(torch.bfloat16, torch.float32 if faulty else torch.bfloat16))


@GARDEN.plant("policy.compile-drift", "a compiled part in another precision")
def _compiled(faulty: bool) -> Iterable[CheckFinding]:
    def eager(inputs: Tensor) -> Tensor:
        return torch.log_softmax(inputs, dim=-1)

    def compiled(inputs: Tensor) -> Tensor:
        return torch.log_softmax(inputs.bfloat16(), dim=-1).float() if faulty else eager(inputs)

    return number_formats.check_compiled(eager, compiled, torch.linspace(-8, 8, 64).view(2, 32))


@GARDEN.plant("policy.token-count", "no valid tokens reported")
def _token_count(faulty: bool) -> Iterable[CheckFinding]:
    return token_count.check_token_count(0 if faulty else 100_000, 100_000)


@GARDEN.plant("policy.token-count", "one rank's count for all ranks' tokens")
def _token_count_rank(faulty: bool) -> Iterable[CheckFinding]:
    return token_count.check_token_count(12_500 if faulty else 100_000, 100_000)


@GARDEN.plant("policy.token-count", "a sum where a mean is meant")
def _sum_for_mean(faulty: bool) -> Iterable[CheckFinding]:
    weight = torch.linspace(0.1, 2.0, 64)
    return token_count.check_coefficients(-weight if faulty else -weight / 64, weight)
