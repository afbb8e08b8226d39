"""What else a model was called with, pictures above all, and which sequence each part of it is of.

Models lay these tensors out in four ways (`Layout`). Only in two of them does the first dimension count sequences: a
picture may be one entry, or a thousand, and a sequence have none or many of them. Whose an entry is is read off the
placeholders that stand for pictures in the ids, after the training loop went on: counting them would make the loop wait
for the device. What cannot be read off is asked for by name; nothing is guessed. Knows no snapshot.
Shapes: B sequences, T positions, N entries.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

Layout = Literal["sequences", "positions", "axis-positions", "entries"]
BYTES_MAX = 256 << 20  # of a rank's step; pictures of the last steps are kept as well, within the same
_NAME = re.compile(r"^[a-z][a-z0-9_]{0,63}$")
# What a replay sets itself, or what no trainer passes as a tensor of its batch.
RESERVED = frozenset(
    {"input_ids", "attention_mask", "labels", "use_cache", "logits_to_keep", "return_dict", "inputs_embeds"}
    | {"past_key_values", "cache", "cache_position", "num_items_in_batch", "encoder_outputs", "mm_encoder_outputs"}
)
_MODALITIES = {"video": ("video", "second_per_grid"), "audio": ("audio", "input_features", "feature_attention")}


@dataclass(frozen=True)
class Belonging:
    """How a tensor's entries belong to sequences.

    sequences: [B, ...]. positions: [B, T, ...]. axis-positions: [axes, B, T], as of rotary positions in three
    dimensions. entries: [N, ...], of which the first counts[0] are the first sequence's, and so on.
    """

    layout: Layout
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelInputs:
    """Further inputs of one micro-batch's forward pass, by the names that the model gives them.

    given: counts of entries, where the trainer said them. placeholders: ids that stand for pictures, by modality.
    belongs: empty until `attributed`. unusable: why there is nothing to replay with; the tensors are gone then.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    given: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    placeholders: Mapping[str, int] = field(default_factory=dict)
    belongs: Mapping[str, Belonging] = field(default_factory=dict)
    unusable: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def without_tensors(self, reason: str) -> "ModelInputs":
        return ModelInputs(unusable=reason)

    def moved(self, device: torch.device | str, *, copy: bool = False) -> "ModelInputs":
        tensors = {name: tensor.detach().to(device, copy=copy) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors)

    def attributed(self, ids_BT: Tensor) -> "ModelInputs":
        """The same, knowing which entries are whose. Raises ValueError where that cannot be told."""
        if self.belongs or not self.tensors:
            return self
        return replace(self, belongs=_Attribution(self, ids_BT).belongings())

    def cut(self, rows: Tensor, end: int) -> "ModelInputs":
        """The parts of these sequences, and of their positions before `end`; what has no entry left is not there."""
        kept: dict[str, Tensor] = {}
        belongs: dict[str, Belonging] = {}
        for name, own in self.belongs.items():
            tensor, counts = self.tensors[name], own.counts
            if own.layout == "entries":
                first = [0, *torch.tensor(counts).cumsum(0).tolist()]
                chosen = [at for row in rows.tolist() for at in range(first[row], first[row + 1])]
                if not chosen:
                    continue
                tensor = tensor[chosen]
                counts = tuple(counts[row] for row in rows.tolist())
            elif own.layout == "axis-positions":
                tensor = tensor[:, rows, :end]
            else:
                tensor = tensor[rows]
                tensor = tensor[:, :end] if own.layout == "positions" else tensor
            kept[name], belongs[name] = tensor, replace(own, counts=counts)
        if _is_padding(kept, belongs):
            for name in [name for name in kept if name.startswith("pixel")]:
                del kept[name], belongs[name]
        return replace(self, tensors=kept, belongs=belongs)

    def end_needed(self, ids_BT: Tensor, end: int) -> int:
        """The first end, not before `end`, that leaves every picture its placeholders and something after them."""
        if not any(own.layout in ("sequences", "entries") for own in self.belongs.values()):
            return end
        if not self.placeholders:
            return ids_BT.shape[1]  # who knows where they stand
        at = self.stand_in(ids_BT).any(dim=0).nonzero()
        return end if not len(at) else max(end, min(int(at[-1]) + 2, ids_BT.shape[1]))

    def stand_in(self, ids_BT: Tensor) -> Tensor:
        """Where ids stand for pictures: bool [B, T]."""
        known = torch.tensor(list(self.placeholders.values()), dtype=ids_BT.dtype, device=ids_BT.device)
        return torch.isin(ids_BT, known)

    def fed(self, num_positions: int, device: torch.device) -> dict[str, Tensor]:
        """As the model takes them when it is fed so many positions."""
        return {
            name: _within(tensor, self.belongs[name].layout, num_positions).to(device)
            for name, tensor in self.tensors.items()
        }

    def print_of(self, row: int) -> tuple[float, ...]:
        """Differs between sequences whose pictures differ, but for chance."""
        own = self.cut(torch.tensor([row]), 0)
        pictures = [own.tensors[name].double() for name, one in own.belongs.items() if "positions" not in one.layout]
        return tuple(float(value) for one in pictures for value in (one.sum(), one.square().sum(), one.numel()))


def model_inputs(
    tensors: Mapping[str, Tensor],
    given: Mapping[str, Sequence[int]] | None,
    placeholders: Mapping[str, int],
) -> ModelInputs:
    """Inputs of a forward pass as a trainer hands them over. Raises ValueError."""
    for name, tensor in tensors.items():
        check_name(name)
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            raise ValueError(f"model input {name} is a {type(tensor).__name__}; expected a tensor of one or more rows")
    unknown = sorted(set(given or {}) - set(tensors))
    if unknown:
        raise ValueError(f"entries of {unknown[0]!r}, which is not among model_inputs; expected {sorted(tensors)}")
    counts = {name: tuple(int(one) for one in own) for name, own in (given or {}).items()}
    return ModelInputs({name: tensor.detach() for name, tensor in tensors.items()}, counts, dict(placeholders))


def check_name(name: str) -> None:
    """Raises ValueError for a name that is no model's input, or one of those that a replay sets itself."""
    if not _NAME.match(name) or name in RESERVED:
        raise ValueError(f"model input {name[:64]!r}; expected a name such as pixel_values, and none that gradloc sets")


def placeholders_of(config: Mapping[str, Any] | None) -> dict[str, int]:
    """Ids that stand for pictures, videos and sounds, by modality, as a Hugging Face configuration tells them."""
    found: dict[str, int] = {}
    for modality in ("image", "video", "audio"):
        for ending in ("token_id", "token_index"):
            value = (config or {}).get(f"{modality}_{ending}")
            if isinstance(value, int) and not isinstance(value, bool):
                found.setdefault(modality, value)
    return found


def check(inputs: ModelInputs, num_rows: int, num_positions: int) -> None:
    """Raises ValueError for tensors that are not laid out as said."""
    for name, tensor in inputs.tensors.items():
        own = inputs.belongs[name]
        shape = tuple(tensor.shape)
        expected: tuple[int, ...] = (num_rows,)
        found = shape[:1]
        if own.layout == "positions":
            expected, found = (num_rows, num_positions), shape[:2]
        elif own.layout == "axis-positions":
            expected, found = (num_rows, num_positions), shape[1:3]
        elif own.layout == "entries":
            if len(own.counts) != num_rows or min(own.counts, default=0) < 0:
                raise ValueError(
                    f"{name} has counts of {len(own.counts)} sequences; expected one of each of {num_rows}"
                )
            expected = (sum(own.counts),)
        if found != expected:
            raise ValueError(f"{name} has shape {shape}, laid out by {own.layout}; expected {expected} there")
    for name, patches, grid in _grids(inputs.tensors):
        # A grid alone could ask a model for any amount of memory.
        if patches is None:
            raise ValueError(f"{name} without the pictures that it is of; expected both")
        if _sizes(name, grid) and sum(_sizes(name, grid)) != inputs.tensors[patches].shape[0]:
            raise ValueError(
                f"{name} is of {sum(_sizes(name, grid))} patches; {patches} has shape "
                f"{tuple(inputs.tensors[patches].shape)}"
            )


class _Attribution:
    """Finds `Belonging` of each tensor of one micro-batch."""

    def __init__(self, inputs: ModelInputs, ids_BT: Tensor) -> None:
        self._tensors, self._given, self._ids_BT = inputs.tensors, inputs.given, ids_BT
        self._placeholders = inputs.placeholders
        self._num_rows, self._num_positions = ids_BT.shape
        self._found: dict[str, Belonging] = {}

    def belongings(self) -> dict[str, Belonging]:
        for name, counts in self._given.items():
            self._take_given(name, counts)
        for name, patches, grid in _grids(self._tensors):
            self._take_grid(name, patches, grid)
        # What holds pictures first: what tells something of them, such as their sizes, is counted as they are.
        for name in sorted(self._tensors, key=lambda name: ("pixel_values" not in name, name)):
            if name not in self._found:
                self._found[name] = self._of(name, self._tensors[name])
        return {name: self._found[name] for name in self._tensors}

    def _take_given(self, name: str, counts: tuple[int, ...]) -> None:
        num = self._tensors[name].shape[0]
        if len(counts) != self._num_rows or min(counts, default=0) < 0 or sum(counts) != num:
            raise ValueError(
                f"entries of {name} are {list(counts)[:16]} for {self._num_rows} sequences; expected one count each, "
                f"{num} in all"
            )
        self._found[name] = Belonging("entries", counts)

    def _take_grid(self, name: str, patches: str | None, grid: Tensor) -> None:
        """Qwen's: a row of the grid is a picture of t * h * w patches, and so many placeholders by a constant."""
        sizes = _sizes(name, grid)
        if name not in self._found:
            self._found[name] = Belonging("entries", self._filled(name, sizes))
        if patches is None or patches in self._found:
            return
        if sum(sizes) != self._tensors[patches].shape[0]:
            raise ValueError(
                f"{name} is of {sum(sizes)} patches, {patches} has {self._tensors[patches].shape[0]}; expected as many"
            )
        left = iter(sizes)
        own = tuple(sum(next(left) for _ in range(count)) for count in self._found[name].counts)
        self._found[patches] = Belonging("entries", own)

    def _filled(self, name: str, sizes: Sequence[int]) -> tuple[int, ...]:
        """How many pictures of these sizes fill each sequence's placeholders, in order."""
        stand_B = self._stand_in(_modality(name))
        if self._num_rows == 1:
            return (len(sizes),)
        total = sum(stand_B)
        per = sum(sizes) // total if total else 0
        counts, at = [], 0
        for wanted in stand_B:
            first, filled = at, 0
            while filled < wanted * per and at < len(sizes):
                filled, at = filled + sizes[at], at + 1
            if filled != wanted * per:
                break
            counts.append(at - first)
        if not total or per * total != sum(sizes) or len(counts) < self._num_rows or at < len(sizes):
            raise self._cannot(name, len(sizes), stand_B)
        return tuple(counts)

    def _of(self, name: str, tensor: Tensor) -> Belonging:
        shape, whole = tuple(tensor.shape), (self._num_rows, self._num_positions)
        if "pixel" not in name and shape[:2] == whole:
            return Belonging("positions")
        if name == "position_ids" and shape[1:] == whole:
            return Belonging("axis-positions")
        if self._num_rows == 1:
            return Belonging("entries", (shape[0],))
        modality = _modality(name)
        alike = [
            own
            for known, own in self._found.items()
            if _modality(known) == modality
            and own.layout in ("sequences", "entries")
            and self._tensors[known].shape[0] == shape[0]
        ]
        if alike:
            return alike[0]
        stand_B = self._stand_in(modality)
        if shape[0] == self._num_rows and self._is_by_sequence(tensor, stand_B):
            return Belonging("sequences")
        counts = self._by_runs(modality, shape[0]) or self._by_size(stand_B, shape[0])
        if counts is None:
            raise self._cannot(name, shape[0], stand_B)
        return Belonging("entries", counts)

    def _is_by_sequence(self, tensor: Tensor, stand_B: Sequence[int]) -> bool:
        """[B, ...]: where no placeholder says otherwise, or [B, pictures, C, H, W] with zeros where there is none."""
        if not sum(stand_B):
            return True
        if tensor.dim() < 5 or "image_sizes" in self._tensors:
            return False
        num_B = (tensor != 0).flatten(2).any(dim=-1).sum(dim=1).tolist()
        total, num = sum(stand_B), sum(num_B)
        return all(stand * num == own * total for stand, own in zip(stand_B, num_B, strict=True))

    def _by_runs(self, modality: str, num: int) -> tuple[int, ...] | None:
        """A picture a run of placeholders."""
        stand_BT = self._ids_BT == self._placeholders.get(modality, -1)
        starts_B = (stand_BT & ~torch.nn.functional.pad(stand_BT[:, :-1], (1, 0))).sum(dim=1)
        return tuple(starts_B.tolist()) if int(starts_B.sum()) == num else None

    def _by_size(self, stand_B: Sequence[int], num: int) -> tuple[int, ...] | None:
        """Pictures of one size, so of as many placeholders each."""
        sizes = self._tensors.get("image_sizes")
        if sizes is not None and len(torch.unique(sizes, dim=0)) > 1:
            return None
        per, rest = divmod(sum(stand_B), num) if num else (0, 0)
        if not per or rest or any(stand % per for stand in stand_B):
            return None
        return tuple(stand // per for stand in stand_B)

    def _stand_in(self, modality: str) -> list[int]:
        """Placeholders in each sequence."""
        return [int(one) for one in (self._ids_BT == self._placeholders.get(modality, -1)).sum(dim=1).tolist()]

    def _cannot(self, name: str, num: int, stand_B: Sequence[int]) -> ValueError:
        return ValueError(
            f"which of the {num} entries of {name} belong to which of {self._num_rows} sequences cannot be told: they "
            f"have {stand_B[:16]} placeholders; give probe.tokens(entries={{{name!r}: [...]}}) a count a sequence"
        )


def _is_padding(tensors: Mapping[str, Tensor], belongs: Mapping[str, Belonging]) -> bool:
    """Whether these sequences have no picture where others have some: models fail on padding alone."""
    own = belongs.get("pixel_values")
    return own is not None and own.layout == "sequences" and not bool(tensors["pixel_values"].any())


def _modality(name: str) -> str:
    return next((kind for kind, marks in _MODALITIES.items() if any(mark in name for mark in marks)), "image")


def _grids(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str | None, Tensor]]:
    """Grids, and the names of the patches that each is of."""
    for name, patches in (("image_grid_thw", "pixel_values"), ("video_grid_thw", "pixel_values_videos")):
        if name in tensors:
            yield name, patches if patches in tensors else None, tensors[name]


def _sizes(name: str, grid: Tensor) -> list[int]:
    """Patches of each picture. Raises ValueError."""
    if grid.dim() != 2 or grid.shape[1] != 3 or (grid.numel() and int(grid.min()) < 1):
        raise ValueError(f"{name} has shape {tuple(grid.shape)}; expected [pictures, 3] of positive sizes")
    return [math.prod(row) for row in grid.tolist()]


def _within(tensor: Tensor, layout: Layout, num_positions: int) -> Tensor:
    if layout == "positions":
        return tensor[:, :num_positions]
    return tensor[..., :num_positions] if layout == "axis-positions" else tensor
