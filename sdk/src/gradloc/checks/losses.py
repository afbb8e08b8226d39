"""Checks of the loss: each part finite and in range, shares of the total, KL, entropy, clipping, KL coefficient.

Part of the policy layer. Corrections to the guide: an entropy *loss* is never positive, so "above 0" finds
nothing; a KL under .01 is healthy at the start, where it is 0; against a KL too large the coefficient is
raised, not lowered.
"""

import math
from collections.abc import Mapping

from gradloc.checks.finding import CheckFinding, finding

SUM_TOLERANCE = 1e-3
SHARE_MAX = 0.9
KL_MAX = 1.0  # nats a token: e times likelier or rarer than under the reference, on average
KL_NEGATIVE = -0.05  # the k1 estimator wobbles around 0; k2 and k3 are never below
ENTROPY_MIN = 0.005  # nats a token
UNIFORM_SHARE = 0.95  # of ln V
CLIP_FRACTION_MAX = 0.3
CLIP_RANGE = (0.05, 0.5)
SAFETY = 0.1


def check_loss_parts(
    parts: Mapping[str, float], total: float | None = None, *, main: str = "policy"
) -> tuple[CheckFinding, ...]:
    """Check weighted parts of one step's loss by name, as they were added up. `main`: the part that should lead.

    A policy part near zero is healthy (advantages are centred), so shares are judged only where an
    auxiliary part is large by itself as well.
    """
    found = [
        finding("policy.loss-non-finite", f"{name} is {value}", {"part": name}, value=value)
        for name, value in parts.items()
        if not math.isfinite(value)
    ]
    if found:
        return tuple(found)
    size = sum(abs(value) for value in parts.values())
    if total is not None and parts:
        if not math.isfinite(total):
            return (finding("policy.loss-non-finite", f"the total is {total}", {"part": "total"}, value=total),)
        added = sum(parts.values())
        if abs(added - total) > SUM_TOLERANCE * max(size, abs(total)):
            found.append(
                finding("policy.loss-sum", f"parts add up to {added:.6g}, the loss is {total:.6g}", added=added)
            )
    for name, value in parts.items():
        if name != main and main in parts and size > 1.0 and abs(value) > SHARE_MAX * size:
            what = f"{name} makes {abs(value) / size:.0%} of the parts' sizes"
            found.append(finding("policy.loss-share", what, {"part": name}, share=abs(value) / size))
    return tuple(found)


def check_kl(kl: float, *, estimator: str = "k3") -> tuple[CheckFinding, ...]:
    """Check a mean KL to the reference, nats a token. estimator: "k1" may be slightly negative, others never."""
    if not math.isfinite(kl):
        return (finding("policy.loss-non-finite", f"KL is {kl}", {"part": "kl"}, value=kl),)
    if kl < (KL_NEGATIVE if estimator == "k1" else -1e-6):
        return (finding("policy.kl-sign", f"KL is {kl:.4g} ({estimator})", kl=kl),)
    if kl > KL_MAX:
        return (finding("policy.kl-range", f"KL {kl:.4g} nats a token, usual is below {KL_MAX:g}", kl=kl),)
    return ()


def check_entropy(entropy: float, vocabulary_size: int | None = None) -> tuple[CheckFinding, ...]:
    """Check a mean entropy, nats a token (the entropy itself, not a loss of it)."""
    if not math.isfinite(entropy):
        return (finding("policy.loss-non-finite", f"entropy is {entropy}", {"part": "entropy"}, value=entropy),)
    top = math.log(vocabulary_size) if vocabulary_size is not None and vocabulary_size > 1 else math.inf
    if entropy < -1e-6 or entropy > top * (1 + 1e-6):
        what = f"entropy {entropy:.4g} outside [0, {top:.4g}]"
        return (finding("policy.entropy-sign", what, entropy=entropy, largest=top),)
    if entropy > UNIFORM_SHARE * top:
        what = f"entropy {entropy:.4g} of at most {top:.4g}"
        return (finding("policy.entropy-uniform", what, entropy=entropy, largest=top),)
    if entropy < ENTROPY_MIN:
        return (finding("policy.entropy-collapse", f"entropy {entropy:.2g} nats a token", entropy=entropy),)
    return ()


def check_clipping(
    clip_range: float | None = None, clip_fraction: float | None = None, *, clip_range_high: float | None = None
) -> tuple[CheckFinding, ...]:
    """Check PPO's clip range(s) and the share of tokens that were clipped."""
    found = []
    for name, value in (("clip_range", clip_range), ("clip_range_high", clip_range_high)):
        if value is not None and not CLIP_RANGE[0] <= value <= CLIP_RANGE[1]:
            what = f"{name} is {value:g}, usual is .2"
            found.append(finding("policy.clip-range", what, {"setting": name}, value=value))
    if clip_fraction is not None and not clip_fraction <= CLIP_FRACTION_MAX:
        found.append(finding("policy.clip-fraction", f"{clip_fraction:.1%} of the tokens", value=clip_fraction))
    return tuple(found)


def kl_coefficient(reward_std: float, kl_std: float) -> float:
    """The coefficient at which the KL term spreads a tenth as far as the reward: .1 * reward_std / kl_std.

    Where KL is a term of the loss the reward is normalised: reward_std is then that of the advantages,
    about 1. Raises ValueError where a spread is not positive and finite: before the first update the policy
    is the reference and kl_std is 0, so nothing can be calibrated.
    """
    for name, value in (("reward_std", reward_std), ("kl_std", kl_std)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}; expected a positive number, measured after some updates")
    return SAFETY * reward_std / kl_std


def check_kl_coefficient(coefficient: float, reward_std: float, kl_std: float) -> tuple[CheckFinding, ...]:
    """Check that the KL term does not spread further than the reward. Raises ValueError as kl_coefficient does."""
    advised = kl_coefficient(reward_std, kl_std)
    if math.isfinite(coefficient) and 0 <= coefficient * kl_std <= reward_std:
        return ()
    what = f"coefficient {coefficient:.3g} x KL spread {kl_std:.3g} against reward spread {reward_std:.3g}"
    return (finding("policy.kl-coef", f"{what}; about {advised:.2g} would do", value=coefficient, advised=advised),)
