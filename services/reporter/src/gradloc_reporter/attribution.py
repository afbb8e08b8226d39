"""A finding's shares along one axis: rank, micro-batch, sequence, token or layer. Pure."""

import math

from gradloc_proto.messages import Finding
from gradloc_reporter.answers import Axis, ShareAnswer

_DEPTH = {"rank": 1, "micro-batch": 2, "sequence": 3}


def along(finding: Finding, axis: Axis) -> list[ShareAnswer]:
    """The largest first; what is not finite before everything."""
    return sorted(_shares(finding, axis), key=lambda each: -_size(each.share))


def _shares(finding: Finding, axis: Axis) -> list[ShareAnswer]:
    if axis == "token":
        view = finding.sequence_view
        if view is None:
            return [
                ShareAnswer(
                    rank=each.rank,
                    micro_batch=each.micro_batch,
                    sequence=each.sequence,
                    token=each.token,
                    share=each.share,
                )
                for each in finding.culprits
            ]
        place = {"rank": view.rank, "micro_batch": view.micro_batch, "sequence": view.sequence}
        return [
            ShareAnswer(**place, token=view.first_position + index, share=share)
            for index, share in enumerate(view.shares)
        ]
    if axis == "layer":
        profile = finding.profile
        if profile is None:
            return []
        return [
            ShareAnswer(layer=layer, share=sum(row)) for layer, row in zip(profile.layers, profile.values, strict=False)
        ]
    depth = _DEPTH[axis]
    totals: dict[tuple[int, ...], float] = {}
    for *where, share in finding.shares_by_sequence:
        key = tuple(int(part) for part in where[:depth])
        totals[key] = totals.get(key, 0.0) + share
    names = ("rank", "micro_batch", "sequence")
    return [ShareAnswer(**dict(zip(names, key, strict=False)), share=total) for key, total in totals.items()]


def _size(value: float) -> float:
    return abs(value) if math.isfinite(value) else math.inf
