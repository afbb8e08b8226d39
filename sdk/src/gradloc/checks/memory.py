"""Memory growth over steps, with the holders of graph references named.

Part of the optimizer layer. Counts live tensors by Python's garbage collector: those that keep a graph
(grad_fn) should be none between steps. Shows who holds them, as module attribute, list or local variable.
"""

import contextlib
import gc
import itertools
import sys
import types
import warnings
from collections import Counter, deque
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradloc.checks.finding import CheckFinding, finding

STEPS_KEPT = 8
GROWTH_STEPS_MIN = 5
GROWTH_SHARE = 0.8  # of steps that grew
GROWTH_TENSORS_MIN = 4
HOLDERS_NAMED = 4
DEPTH_MAX = 4
TENSORS_ASKED = 32
_CONTAINERS = (dict, list, tuple, set, deque)


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
            # A DTensor has no storage: the shard in it is listed as a tensor of its own.
            if one.layout == torch.strided and one.device.type != "meta" and not isinstance(one, DTensor):
                with contextlib.suppress(RuntimeError, NotImplementedError):  # other wrappers
                    storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return graphs, sum(storages.values())


class MemoryWatch:
    """Call `after_step` between steps (after zero_grad, with no loss at hand).

    It looks at every object of the process: .1 to .2 s where torch and transformers are loaded.
    """

    def __init__(self) -> None:
        self._num_graphs: deque[int] = deque(maxlen=STEPS_KEPT)
        self._num_bytes: deque[int] = deque(maxlen=STEPS_KEPT)

    def after_step(self) -> tuple[CheckFinding, ...]:
        """Findings once there are enough steps to tell growth from a plateau."""
        graphs, num_bytes = live_tensors()
        if self._num_bytes and (len(graphs) > self._num_graphs[-1] or num_bytes > self._num_bytes[-1]):
            # Cycles that nobody holds any more are no growth; collecting them takes as long again.
            del graphs
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
    """Who holds these tensors, most often named first: "attribute losses of Trainer", "global history", ...

    Goes up level by level, all objects of a level at once: each level costs two passes over the heap.
    """
    counts: Counter[str] = Counter()
    level: list[Any] = list(tensors[-TENSORS_ASKED:])
    seen: set[int] = {id(tensors), id(counts)}
    for _ in range(DEPTH_MAX):
        if not level:
            break
        seen |= {id(level), *(id(one) for one in level)}
        held = {id(one) for one in level}
        counts.update(_of_callers(held))
        namespaces: list[tuple[dict[Any, Any], str]] = []
        above: list[Any] = []
        for referrer in gc.get_referrers(*level):
            if id(referrer) in seen or isinstance(referrer, types.FrameType | type | types.ModuleType | Tensor):
                continue
            if type(referrer) in _CONTAINERS:
                above.append(referrer)
                if isinstance(referrer, dict):
                    keys = [key for key, value in list(referrer.items()) if id(value) in held and isinstance(key, str)]
                    namespaces += [(referrer, key) for key in keys[:HOLDERS_NAMED]]
            elif hasattr(referrer, "__dict__"):
                # Instances hold their attributes directly where no one asked for __dict__.
                names = [key for key, value in vars(referrer).items() if id(value) in held]
                counts.update(f"attribute {name} of {type(referrer).__name__}" for name in names[:HOLDERS_NAMED])
        owned = _owned(namespaces)
        counts.update(owned.values())
        seen |= {id(above), id(namespaces), id(owned)}
        level = [one for one in above if id(one) not in owned][:TENSORS_ASKED]
    return [name for name, _ in counts.most_common(HOLDERS_NAMED)]


def _owned(namespaces: list[tuple[dict[Any, Any], str]]) -> dict[int, str]:
    """Names of what modules and instances hold in their namespaces, by the namespace's id."""
    if not namespaces:
        return {}
    owners = {
        id(one.__dict__): one
        for one in gc.get_referrers(*[space for space, _ in namespaces])
        if not isinstance(one, type | types.FrameType) and hasattr(one, "__dict__")
    }
    found: dict[int, str] = {}
    for space, key in namespaces:
        owner = owners.get(id(space))
        if isinstance(owner, types.ModuleType) or "__builtins__" in space:
            found[id(space)] = f"global {key} of {space.get('__name__', 'a module')}"
        elif owner is not None:
            found[id(space)] = f"attribute {key} of {type(owner).__name__}"
    return found


def _of_callers(held: set[int]) -> list[str]:
    """Local variables of the functions that are running; the garbage collector does not see those."""
    names: list[str] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__ and frame.f_code.co_name != "<module>":
            local = frame.f_locals
            names += [
                f"variable {name} in {frame.f_code.co_name}" for name, value in local.items() if id(value) in held
            ]
        frame = frame.f_back
    return names
