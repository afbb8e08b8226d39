"""Exhibits: what a finding shows of its culprits and their sequence, in the words of messages.

Cuts everything to windows, so that a finding stays a small message. Knows no verdict.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradloc import culprits
from gradloc.attribution import Attribution
from gradloc.culprits import CulpritSet, Scene
from gradloc.gradient_profile import GradientProfile, profile_row
from gradloc.policy import PlacedBatch, active_part, cut
from gradloc.verification import ExactToken, Place
from gradloc.whatif import log_ratio
from gradloc_proto.messages import Culprit, Profile, SequenceView

NUM_CULPRITS_MAX = 8
NUM_SUSPECTS = 3  # shown where no set explains the spike
WINDOW_POSITIONS = 256  # of a sequence shown around its culprit
SHARES_BY_SEQUENCE_MAX = 512
PROFILE_VALUES_MAX = 40_000  # about 400 kB of a message
_TEXT_LENGTH_MAX = 64

Texts = Callable[[int], str]


@dataclass(frozen=True)
class Shown:
    """The exhibits of one localization; `leading` is the token of the largest exact share."""

    culprits: tuple[Culprit, ...] = ()
    leading: Place | None = None
    share: float | None = None
    profile: Profile | None = None
    view: SequenceView | None = None
    by_sequence: tuple[tuple[int, int, int, float], ...] = ()
    residual_ratio: float | None = None
    residual_block: str | None = None
    is_suspicion: bool = False


class Exhibits:
    """Reads facts about places out of the batches."""

    def __init__(self, batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor], texts: Texts | None) -> None:
        self._batches = batches
        self._coefficients = coefficients
        self._texts = texts

    def culprit(self, place: Place, share: float, exact: ExactToken | None, layer: str | None) -> Culprit:
        placed = self._batches[place.batch]
        batch = placed.batch
        position = batch.first_position + place.column
        token_id = int(batch.ids_BT[place.row, position])
        ratios = log_ratio(placed)
        return Culprit(
            rank=placed.rank,
            micro_batch=placed.index,
            sequence=place.row,
            token=position,
            token_id=max(token_id, 0),
            token_text=self._text(token_id),
            uid=batch.uids[place.row][:512] if place.row < len(batch.uids) else None,
            share=share if exact is None else exact.share,
            norm=None if exact is None else exact.norm,
            share_is_exact=exact is not None,
            layer=layer,
            coefficient=float(self._coefficients[place.batch][place.row, place.column]),
            logp=float(batch.logp_BR[place.row, place.column]),
            ratio=None if ratios is None else exp(float(ratios[place.row, place.column])),
            advantage=value_at(batch.advantage_BR, place),
        )

    def view(self, place: Place, shares: Mapping[int, float], num_positions: int | None = None) -> SequenceView:
        """The culprit's sequence around it; `shares` by position of the row. `num_positions`: as in `show`."""
        placed = self._batches[place.batch]
        ids = placed.batch.ids_BT[place.row].tolist()
        first, end = window(placed.batch.first_position + place.column, len(ids), num_positions or WINDOW_POSITIONS)
        texts = () if self._texts is None else tuple(self._text(token_id) or "" for token_id in ids[first:end])
        return SequenceView(
            rank=placed.rank,
            micro_batch=placed.index,
            sequence=place.row,
            first_position=first,
            token_ids=tuple(ids[first:end]),
            token_texts=texts,
            shares=tuple(rounded(shares.get(position, 0.0)) for position in range(first, end)),
        )

    def _text(self, token_id: int) -> str | None:
        return None if self._texts is None else self._texts(token_id)[:_TEXT_LENGTH_MAX]

    def by_sequence(self, attribution: Attribution) -> tuple[tuple[int, int, int, float], ...]:
        sums = sorted(culprits.row_shares(attribution.shares), key=lambda entry: -abs(entry[1]))
        return tuple(
            (self._batches[batch].rank, self._batches[batch].index, row, rounded(share))
            for (batch, row), share in sums[:SHARES_BY_SEQUENCE_MAX]
        )


def show(
    scene: Scene,
    texts: Texts | None,
    sizes: Sequence[Tensor],
    found: CulpritSet | None,
    exact: Mapping[Place, ExactToken],
    attribution: Attribution | None,
    num_positions: int | None = None,
) -> Shown:
    """Culprits (or, without a set, suspects), with the profile and view of the leading one's sequence.

    `sizes`: residual rms of the whole step's forward passes, as `residual_sizes` collected them. `num_positions`
    of the sequence are shown around the culprit; None: as many as a message should hold.
    """
    exhibits = Exhibits(scene.batches, scene.coefficients, texts)
    shares = dict(culprits.ranked(attribution.shares, culprits.NUM_SHOWN)) if attribution is not None else {}
    shares.update({place: token.share for place, token in exact.items()})
    by_sequence = () if attribution is None else exhibits.by_sequence(attribution)
    places = _places_to_show(found, shares, attribution)
    if not places:
        return Shown(by_sequence=by_sequence)
    leading = places[0]
    whole_row = found is not None and bool(found.rows)
    same_row = [p for p in (found.places if found is not None else places) if p[:2] == leading[:2]]
    profile = _profile(scene, leading, same_row if not whole_row else culprits.places_of(scene, leading[:2]))
    profile_shown, layer, block, ratio = _read_profile(scene, profile, sizes, num_positions)
    total = None
    if found is not None:
        of_tokens = sum(shares[p] for p in found.places if p in shares)
        total = _rows_share(found, attribution) if whole_row else of_tokens
    row_shares = _row_shares(scene, leading, attribution, exact)
    return Shown(
        culprits=tuple(
            exhibits.culprit(p, shares.get(p, math.nan), exact.get(p), layer if p[:2] == leading[:2] else None)
            for p in places[:NUM_CULPRITS_MAX]
        ),
        leading=leading,
        share=total,
        profile=profile_shown,
        view=exhibits.view(leading, row_shares, num_positions),
        by_sequence=by_sequence,
        residual_ratio=ratio,
        residual_block=block,
        is_suspicion=found is None,
    )


def _places_to_show(
    found: CulpritSet | None, shares: Mapping[Place, float], attribution: Attribution | None
) -> list[Place]:
    """Leading token first: of the set, of each row of the set, or the suspects."""
    if found is None:
        return sorted(shares, key=lambda p: -shares[p])[:NUM_SUSPECTS]
    if not found.rows:
        return sorted(found.places, key=lambda p: -shares.get(p, 0.0))
    leaders = []
    for batch, row in found.rows:
        known = [p for p in shares if p[:2] == (batch, row)]
        if attribution is not None:
            known.append(Place(batch, row, int(attribution.shares[batch][row].argmax())))
        if known:
            leaders.append(max(known, key=lambda p: shares.get(p, -math.inf)))
    return sorted(leaders, key=lambda p: -shares.get(p, 0.0))


def _rows_share(found: CulpritSet, attribution: Attribution | None) -> float | None:
    if attribution is None:
        return None
    return sum(float(attribution.shares[batch][row].sum()) for batch, row in found.rows)


def _row_shares(
    scene: Scene, place: Place, attribution: Attribution | None, exact: Mapping[Place, ExactToken]
) -> dict[int, float]:
    first = scene.batches[place.batch].batch.first_position
    shares = {}
    if attribution is not None:
        row = attribution.shares[place.batch][place.row]
        shares = {first + column: share for column, share in enumerate(row.tolist())}
    shares.update({first + p.column: token.share for p, token in exact.items() if p[:2] == place[:2]})
    return shares


def _profile(scene: Scene, leading: Place, places: Sequence[Place]) -> GradientProfile:
    source = scene.batches[leading.batch].batch
    end = max(place.column for place in places) + 1
    row = cut(source, torch.tensor([leading.row]), source.first_position + end)
    coefficient_R = torch.zeros(row.logp_BR.shape[1], dtype=torch.float64)
    for place in places:
        coefficient_R[place.column] = scene.coefficients[leading.batch][leading.row, place.column]
    return profile_row(scene.policy, row, coefficient_R, scene.gradient)


def _read_profile(
    scene: Scene, profile: GradientProfile, sizes: Sequence[Tensor], num_positions: int | None
) -> tuple[Profile | None, str | None, str | None, float | None]:
    """The profile for a message, the layer of the largest share, the block after which the residual stream is
    smallest against the batch's median at the position of the largest share, and how small."""
    if not profile.share_LT.numel():
        return None, None, None, None
    by_layer = profile.share_LT.abs().sum(dim=1)
    layer = profile.layers[int(by_layer.argmax())]
    position = int(profile.share_LT.abs().sum(dim=0).argmax())
    median_K = _median_sizes(scene, sizes)
    rms_K = profile.residual_rms_KT[:, position] if profile.residual_rms_KT.numel() else torch.zeros(0)
    block, ratio = None, None
    if len(rms_K) and len(rms_K) == len(median_K):
        ratios = rms_K / median_K
        block, ratio = f"layers.{int(ratios.argmin())}", float(ratios.min())
    width = num_positions or min(WINDOW_POSITIONS, PROFILE_VALUES_MAX // max(1, len(profile.layers)))
    first, end = window(position, profile.share_LT.shape[1], width)
    shown = Profile(
        layers=profile.layers,
        first_position=first,
        values=tuple(tuple(rounded(value) for value in row[first:end]) for row in profile.share_LT.tolist()),
        residual_rms=tuple(rounded(value) for value in rms_K.tolist()),
        residual_rms_median=tuple(rounded(value) for value in median_K.tolist()),
    )
    return shown, layer, block, ratio


def _median_sizes(scene: Scene, sizes: Sequence[Tensor]) -> Tensor:
    """Median rms of the residual stream after each block over all positions that are not padding, [K]."""
    parts = [
        part
        for placed, coefficient in zip(scene.batches, scene.coefficients, strict=True)
        if (part := active_part(placed.batch, coefficient)) is not None
    ]
    seen = []
    for part, size_KBT in zip(parts, sizes, strict=False):
        attended = part.batch.attention_mask_BT
        num_computed = size_KBT.shape[2]
        if attended is None or scene.policy.replays_packed(part):
            seen.append(size_KBT.flatten(1))
        else:
            seen.append(size_KBT[:, attended[:, :num_computed].bool()])
    return torch.cat(seen, dim=1).median(dim=1).values if seen else torch.zeros(0)


def value_at(tensor: Tensor | None, place: Place) -> float | None:
    return None if tensor is None else float(tensor[place.row, place.column])


def window(centre: int, length: int, width: int = WINDOW_POSITIONS) -> tuple[int, int]:
    """First and end of at most `width` positions around `centre`."""
    width = max(1, width)
    first = max(0, min(centre - width // 2, length - width))
    return first, min(length, first + width)


def rounded(value: float) -> float:
    """Six digits: a finding is for reading."""
    return float(f"{value:.6g}") if math.isfinite(value) else value


def exp(log_value: float) -> float:
    try:
        return math.exp(log_value)
    except OverflowError:
        return math.inf
