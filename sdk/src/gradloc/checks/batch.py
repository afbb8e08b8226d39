"""Checks of a collated batch, and a wrapper that makes them on every batch of a loader.

Part of the data layer. The guide's `isfinite(input_ids)` is vacuous for integers, so ids are compared
with the vocabulary instead; its "move everything in collate_fn" is refused: workers would need the
accelerator. Shapes: B rows, T positions.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gradloc.checks.finding import CheckFinding, finding

_log = logging.getLogger("gradloc.checks")
IGNORED_LABEL = -100
_IDS = ("input_ids", "ids", "prompt_ids", "completion_ids", "response_ids")
_MASKS = ("attention_mask", "mask", "loss_mask", "response_mask", "completion_mask", "prompt_mask")
_LOSS_MASKS = ("loss_mask", "response_mask", "completion_mask", "mask")


@dataclass(frozen=True)
class BatchSettings:
    """vocabulary_size: one more than the largest id. device: where tensors should be, None for "all alike"."""

    vocabulary_size: int | None = None
    pad_id: int | None = None
    eos_id: int | None = None
    device: str | None = None


class BatchRejected(ValueError):
    """A batch with findings of severity "error", which it carries."""

    def __init__(self, findings: Sequence[CheckFinding]) -> None:
        self.findings = tuple(findings)
        super().__init__("; ".join(f"{one.code} at {dict(one.where)}: {one.what}" for one in findings[:4]))


def check_batch(batch: Mapping[str, Any], settings: BatchSettings | None = None) -> tuple[CheckFinding, ...]:
    """Findings of one batch; values that are no tensors are passed over."""
    settings = settings or BatchSettings()
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    found = _shapes(tensors)
    devices = _devices(tensors, settings.device)
    if devices:
        # Tensors on several devices cannot be compared; values can wait until they can.
        return (*found, *devices)
    for name, tensor in tensors.items():
        found += _finite(name, tensor)
    for name in _IDS:
        if name in tensors:
            found += _ids(name, tensors[name], settings.vocabulary_size)
    for name in _MASKS:
        if name in tensors:
            found += _mask(name, tensors[name])
    found += _padding(tensors, settings)
    return tuple(found)


def _finite(name: str, tensor: Tensor) -> list[CheckFinding]:
    if not tensor.is_floating_point() or name in _IDS:
        return []
    bad = ~torch.isfinite(tensor)
    if not bool(bad.any()):
        return []
    place = bad.nonzero()[0].tolist()
    where: dict[str, int | str] = {"tensor": name}
    where |= dict(zip(("row", "position"), place, strict=False))
    value = float(tensor[tuple(place)])
    return [finding("data.batch-non-finite", f"{name} holds {value}", where, num=int(bad.sum()), value=value)]


def _shapes(tensors: Mapping[str, Tensor]) -> list[CheckFinding]:
    """All tensors share their rows; masks and labels share the positions of the ids."""
    found: list[CheckFinding] = []
    sized = {name: tensor for name, tensor in tensors.items() if tensor.dim() >= 1}
    rows = {name: tensor.shape[0] for name, tensor in sized.items()}
    if len(set(rows.values())) > 1:
        text = ", ".join(f"{name} {num}" for name, num in rows.items())
        found.append(finding("data.batch-shape", f"rows differ: {text}", {"dimension": 0}))
    for ids, mates in (
        ("input_ids", ("attention_mask", "labels", "position_ids")),
        ("prompt_ids", ("prompt_mask",)),
        ("completion_ids", ("completion_mask",)),
        ("response_ids", ("response_mask",)),
    ):
        for mate in mates:
            if ids in sized and mate in sized and sized[ids].shape[1:] != sized[mate].shape[1:2]:
                what = f"{mate} is {tuple(sized[mate].shape)}, {ids} {tuple(sized[ids].shape)}"
                found.append(finding("data.batch-shape", what, {"tensor": mate, "dimension": 1}))
    return found


def _devices(tensors: Mapping[str, Tensor], expected: str | None) -> list[CheckFinding]:
    devices = {name: str(tensor.device) for name, tensor in tensors.items()}
    wanted = expected or next(iter(devices.values()), "")
    stray = [name for name, device in devices.items() if device != wanted and not device.startswith(f"{wanted}:")]
    if not stray:
        return []
    what = f"{', '.join(f'{name} on {devices[name]}' for name in stray[:4])}; expected {wanted}"
    return [finding("data.batch-device", what, {"tensor": stray[0]}, num=len(stray))]


def _ids(name: str, ids_BT: Tensor, size: int | None) -> list[CheckFinding]:
    if ids_BT.is_floating_point() or ids_BT.dtype == torch.bool:
        return [finding("data.batch-dtype", f"{name} is {ids_BT.dtype}", {"tensor": name})]
    bad = (ids_BT < 0) | (ids_BT >= size) if size is not None else ids_BT < 0
    if not bool(bad.any()):
        return []
    place = bad.nonzero()[0].tolist()
    where: dict[str, int | str] = {"tensor": name}
    where |= dict(zip(("row", "position"), place, strict=False))
    value = int(ids_BT[tuple(place)])
    end = "" if size is None else f", ids end at {size - 1}"
    return [finding("data.batch-id-range", f"id {value}{end}", where, id=value, num=int(bad.sum()))]


def _mask(name: str, mask_BT: Tensor) -> list[CheckFinding]:
    if not bool(((mask_BT == 0) | (mask_BT == 1)).all()):
        return [finding("data.batch-mask-values", f"{name} has values besides 0 and 1", {"tensor": name})]
    if mask_BT.dim() != 2:
        return []
    found = []
    empty = (mask_BT != 0).sum(dim=1) == 0
    if bool(empty.any()):
        where: dict[str, int | str] = {"tensor": name, "row": int(empty.nonzero()[0])}
        found.append(finding("data.batch-mask-empty", f"{name} is all zero", where, num=int(empty.sum())))
    if name == "attention_mask":
        # One side of padding means one change from 0 to 1 and one back, at most.
        rises = ((mask_BT[:, 1:] != 0) & (mask_BT[:, :-1] == 0)).sum(dim=1) + (mask_BT[:, 0] != 0).to(torch.int64)
        holed = rises > 1
        if bool(holed.any()):
            where = {"tensor": name, "row": int(holed.nonzero()[0])}
            found.append(finding("data.batch-mask-hole", "a gap between attended tokens", where, num=int(holed.sum())))
    return found


def _padding(tensors: Mapping[str, Tensor], settings: BatchSettings) -> list[CheckFinding]:
    """Labels, loss masks and attention on padding. A pad id that is also the end of text says nothing."""
    ids = tensors.get("input_ids", tensors.get("ids"))
    if ids is None or ids.is_floating_point():
        return []
    found = []
    attention = tensors.get("attention_mask")
    known = settings.pad_id is not None and settings.pad_id != settings.eos_id
    padding: Tensor | None = torch.eq(ids, settings.pad_id) if known and settings.pad_id is not None else None
    if attention is not None and attention.shape == ids.shape:
        if padding is not None and bool((padding & (attention != 0)).any()):
            where = _place("attention_mask", padding & (attention != 0))
            found.append(finding("data.batch-attends-padding", "attention on padding", where))
        outside = torch.eq(attention, 0)
        padding = outside if padding is None else padding | outside
    if padding is None:
        return found
    labels = tensors.get("labels")
    if labels is not None and labels.shape == ids.shape:
        wrong = padding & (labels != IGNORED_LABEL)
        if bool(wrong.any()):
            found.append(finding("data.batch-label-on-padding", "a label on padding", _place("labels", wrong)))
    for name in _LOSS_MASKS:
        mask = tensors.get(name)
        if mask is not None and mask.shape == ids.shape and bool((padding & (mask != 0)).any()):
            where = _place(name, padding & (mask != 0))
            found.append(finding("data.batch-label-on-padding", f"{name} is 1 on padding", where))
    return found


def _place(name: str, bad_BT: Tensor) -> dict[str, int | str]:
    row, position = bad_BT.nonzero()[0].tolist()
    return {"tensor": name, "row": row, "position": position}


class CheckedCollate:
    """A collate function that checks what it made.

    on_error "raise": BatchRejected for findings of severity "error"; "report": `on_findings` hears of all
    and the batch goes on. Runs inside the loader's workers, on the host. A check that fails itself, such as on
    a batch that is no mapping, is logged once and the batch goes on (GRADLOC_STRICT=1 makes it raise).
    """

    def __init__(
        self,
        collate: Callable[[Any], Mapping[str, Any]],
        settings: BatchSettings | None = None,
        *,
        on_error: Literal["raise", "report"] = "raise",
        on_findings: Callable[[tuple[CheckFinding, ...]], None] | None = None,
    ) -> None:
        if on_error not in ("raise", "report"):
            raise ValueError(f"on_error is {on_error!r}; expected 'raise' or 'report'")
        self._collate = collate
        self._settings = settings
        self._on_error = on_error
        self._on_findings = on_findings
        self._has_failed = False

    def __call__(self, samples: Any) -> Mapping[str, Any]:
        batch = self._collate(samples)
        try:
            found = check_batch(batch, self._settings)
        except Exception as error:
            if os.environ.get("GRADLOC_STRICT") == "1":
                raise
            if not self._has_failed:
                self._has_failed = True
                _log.warning("a batch could not be checked: %s: %s", type(error).__name__, str(error)[:200])
            return batch
        if found and self._on_findings is not None:
            self._on_findings(found)
        errors = [one for one in found if one.severity == "error"]
        if errors and self._on_error == "raise":
            raise BatchRejected(errors)
        return batch
