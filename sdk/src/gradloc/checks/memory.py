"""Memory growth over steps, with the holders of graph references named.

Part of the optimizer layer. Counts live tensors by Python's garbage collector: those that keep a graph
(grad_fn) should be none between steps. Shows who holds them, as module attribute, list or local variable.
"""

import gc
import itertools
import sys
import types
import warnings
from collections import deque
from typing import Any

import torch
from torch import Tensor

from gradloc.checks.finding import CheckFinding, finding

STEPS_KEPT = 8
GROWTH_STEPS_MIN = 5
GROWTH_SHARE = 0.8  # of steps that grew
GROWTH_TENSORS_MIN = 4
HOLDERS_NAMED = 4
DEPTH_MAX = 4
REFERRERS_MAX = 64


def live_tensors() -> tuple[list[Tensor], int]:
    """Live tensors that keep a graph, and the bytes of all live tensors' storages, each counted once."""
    graphs: list[Tensor] = []
    storages: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are merely asked for their class
        for one in gc.get_objects():
            if isinstance(one, type) or not issubclass(type(one), Tensor):
                continue
            if one.grad_fn is not None:
                graphs.append(one)
            if one.layout == torch.strided and one.device.type != "meta":
                storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return graphs, sum(storages.values())


class MemoryWatch:
    """Call `after_step` between steps (after zero_grad, with no loss at hand); it costs some milliseconds."""

    def __init__(self) -> None:
        self._num_graphs: deque[int] = deque(maxlen=STEPS_KEPT)
        self._num_bytes: deque[int] = deque(maxlen=STEPS_KEPT)

    def after_step(self) -> tuple[CheckFinding, ...]:
        """Findings once there are enough steps to tell growth from a plateau."""
        gc.collect()
        graphs, num_bytes = live_tensors()
        self._num_graphs.append(len(graphs))
        self._num_bytes.append(num_bytes)
        found = []
        if _grows(self._num_graphs) and self._num_graphs[-1] - self._num_graphs[0] >= GROWTH_TENSORS_MIN:
            holders = holders_of(graphs)
            what = f"{self._num_graphs[0]} -> {len(graphs)} tensors with a graph; held by {', '.join(holders)}"
            where: dict[str, int | str] = {"holder": holders[0] if holders else "unknown"}
            found.append(finding("optimizer.graph-held", what, where, num=len(graphs)))
        elif _grows(self._num_bytes) and self._num_bytes[-1] > 1.2 * self._num_bytes[0] + (1 << 20):
            what = f"live tensors grew from {self._num_bytes[0] >> 20} to {num_bytes >> 20} MiB"
            holders = holders_of(_largest_held())
            where = {"holder": holders[0]} if holders else {}
            found.append(finding("optimizer.memory-growth", what, where, num_bytes=num_bytes))
        return tuple(found)


def _grows(series: deque[int]) -> bool:
    if len(series) < GROWTH_STEPS_MIN:
        return False
    values = list(series)
    ups = sum(b > a for a, b in itertools.pairwise(values))
    return ups >= GROWTH_SHARE * (len(values) - 1)


def _largest_held() -> list[Tensor]:
    """Tensors in the longest list of tensors: what grows is usually appended somewhere."""
    best: list[Any] = []
    for one in gc.get_objects():
        if type(one) in (list, deque) and len(one) > len(best) and all(issubclass(type(x), Tensor) for x in one):
            best = list(one)
    return best[:HOLDERS_NAMED]


def holders_of(tensors: list[Tensor]) -> list[str]:
    """Who holds these tensors, most often named first: "attribute losses of Trainer", "global history", ..."""
    counts: dict[str, int] = {}
    ignored = {id(tensors), id(counts)}
    for tensor in tensors[-32:]:
        for name in _names(tensor, ignored, DEPTH_MAX):
            counts[name] = counts.get(name, 0) + 1
    return sorted(counts, key=lambda name: -counts[name])[:HOLDERS_NAMED]


def _names(held: Any, ignored: set[int], depth: int) -> set[str]:
    """Names under which `held` is reachable, going up through containers."""
    names = _of_callers(held)
    if depth == 0:
        return names
    referrers = gc.get_referrers(held)
    ignored = ignored | {id(referrers)}
    for referrer in referrers[:REFERRERS_MAX]:
        if id(referrer) in ignored or isinstance(referrer, types.FrameType):
            continue
        if isinstance(referrer, dict):
            key = next((key for key, value in list(referrer.items()) if value is held), None)
            if isinstance(key, str):
                names |= {_of_dict(referrer, key)} if _owner(referrer) else _names(referrer, ignored, depth - 1)
            elif key is not None:
                names |= _names(referrer, ignored, depth - 1)
        elif type(referrer) in (list, tuple, set, deque):
            names |= _names(referrer, ignored, depth - 1)
        elif hasattr(referrer, "__dict__") and not isinstance(referrer, type | types.ModuleType | Tensor):
            # Instances hold their attributes directly where no one asked for __dict__.
            attribute = next((key for key, value in vars(referrer).items() if value is held), None)
            if attribute is not None:
                names.add(f"attribute {attribute} of {type(referrer).__name__}")
    return names


def _of_callers(held: Any) -> set[str]:
    """Local variables of the functions that are running; the garbage collector does not see those."""
    names: set[str] = set()
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            local = frame.f_locals if frame.f_code.co_name != "<module>" else {}
            names |= {f"variable {name} in {frame.f_code.co_name}" for name, value in local.items() if value is held}
        frame = frame.f_back
    return names


def _owner(namespace: dict[Any, Any]) -> Any:
    """The module or instance whose namespace this dict is, or None."""
    if "__name__" in namespace and "__builtins__" in namespace:
        return namespace["__name__"]
    for referrer in gc.get_referrers(namespace)[:REFERRERS_MAX]:
        if getattr(referrer, "__dict__", None) is namespace:
            return referrer
    return None


def _of_dict(namespace: dict[Any, Any], key: str) -> str:
    owner = _owner(namespace)
    return f"global {key} of {owner}" if isinstance(owner, str) else f"attribute {key} of {type(owner).__name__}"
