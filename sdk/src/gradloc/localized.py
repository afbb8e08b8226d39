"""What a localization is called in the end: its verdict and its one sentence. Pure; knows no tensor."""

from collections.abc import Sequence
from typing import cast

from gradloc_proto.messages import Cause, Certificate, Culprit, Fidelity, Verdict


def verdict_of(kind: str, cause: Cause) -> Verdict:
    """The likeliest cause may say more than what the culprit set is made of."""
    if cause.name == "mask-fault" and kind in ("token", "sequence"):
        return "mask"
    if cause.name == "layer-heterogeneity" and cause.confidence != "low" and kind in ("token", "sequence"):
        return "layer"
    if cause.name in ("sequence-mismatch", "advantage-outlier") and cause.confidence == "high" and kind == "token":
        return "sequence"  # what is wrong is the row's, though one of its tokens has most of the gradient
    if (
        cause.name in ("systematic-mismatch", "learning-rate")
        and cause.confidence == "high"
        and kind in ("token", "sequence")
    ):
        return "batch-wide"  # what is wrong is every token's, though a few of them have most of the gradient
    if cause.name == "layer-growth" and cause.confidence != "low" and kind in ("token", "sequence", "batch-wide"):
        return "layer"
    if cause.name == "unnormalised-loss":
        return "accounting"
    return cast(Verdict, kind)


def summary_of(
    verdict: str, found: Sequence[Culprit], share: float | None, certificate: Certificate | None, fidelity: Fidelity
) -> str:
    """One sentence for a log line; never a token's text."""
    parts = [f"{verdict}: norm {fidelity.reported_norm:.4g}"]
    if fidelity.held_at is not None:
        parts = [f"{verdict}: norm {fidelity.replayed_norm:.4g}, held to {fidelity.reported_norm:.4g} by LayerClip"]
    if found:
        first = found[0]
        where = f"rank {first.rank} micro-batch {first.micro_batch} sequence {first.sequence} token {first.token}"
        number = where if certificate is None or certificate.num_culprits == 1 else f"{where} and others"
        parts.append(number if share is None else f"{number}, {100 * share:.1f} % of the squared norm")
    if certificate is not None:
        parts.append(f"norm without {certificate.norm_without:.4g} (limit {certificate.limit:.4g})")
    if not fidelity.reproduced:
        parts.append(f"replay {fidelity.replayed_norm:.4g} does not match")
    return "; ".join(parts)[:512]
