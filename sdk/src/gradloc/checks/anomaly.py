"""Anomaly mode for one step, on demand: names the first operation whose result is not finite.

Part of the gradient layer. Unlike torch's detect_anomaly it sees infinities as well as NaN (check_nan is
True by default there, and nothing looks for infinities), and the forward pass as well as the backward.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradloc.checks.finding import CheckFinding, finding

NODES_MAX = 200_000  # operations watched in one graph
# These put infinities into attention masks on purpose, or leave memory as it was.
_FILLS = {"full", "full_like", "fill", "fill_", "masked_fill", "masked_fill_", "where", "scalar_tensor", "new_full"}
_FILLS |= {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_to_copy", "copy_", "detach"}


@dataclass
class _Seen:
    """Places whose result was not finite, in order: modules of the forward pass, operations of the backward."""

    forward: list[str] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    backward: list[tuple[str, str]] = field(default_factory=list)


def find_bad_operation(model: nn.Module, loss_of: Callable[[], Tensor]) -> tuple[CheckFinding, ...]:
    """Run one forward and backward of `loss_of()` and name what first was not finite.

    Gradients that were there before are restored; costs about two steps. Raises what `loss_of` raises.
    """
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    seen = _Seen()
    try:
        with _forward_watched(model, seen), _Operations(seen):
            loss = loss_of()
        if loss.requires_grad:
            handles = _watch_backward(loss, seen)
            try:
                loss.backward()  # type: ignore[no-untyped-call]
            finally:
                for handle in handles:
                    handle.remove()
        return _findings(seen, loss)
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _findings(seen: _Seen, loss: Tensor) -> tuple[CheckFinding, ...]:
    if seen.forward:
        what = f"in the forward pass, the output of {seen.forward[0]} is not finite"
        return (finding("gradient.bad-operation", what, {"module": seen.forward[0], "pass": "forward"}),)
    if not bool(torch.isfinite(loss.detach()).all()):
        operation = seen.operations[0] if seen.operations else _name(loss.grad_fn)
        what = f"all modules are finite, the loss is not: {operation} in the loss itself"
        where: dict[str, int | str] = {"pass": "forward", "operation": operation}
        return (finding("gradient.bad-operation", what, where),)
    if seen.backward:
        operation, kind = seen.backward[0]
        what = f"in the backward pass, {operation} gives {kind}; its inputs were finite"
        return (finding("gradient.bad-operation", what, {"operation": operation, "pass": "backward"}),)
    return ()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations of the forward pass whose result is not finite although their inputs are."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1] if "." in str(func) else str(func)
        if name not in _FILLS and len(self._seen.operations) < 8:
            outputs = result if isinstance(result, tuple | list) else [result]
            given = [one for one in args if isinstance(one, Tensor)]
            if any(_bad(one) for one in outputs) and not any(_bad(one) for one in given):
                self._seen.operations.append(name)
        return result


@contextlib.contextmanager
def _forward_watched(model: nn.Module, seen: _Seen) -> Iterator[None]:
    def hook_for(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def on_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple | list) else [output]
            for tensor in tensors:
                bad = isinstance(tensor, Tensor) and tensor.is_floating_point() and not _finite(tensor)
                if bad and len(seen.forward) < 8:
                    seen.forward.append(name)

        return on_forward

    leaves = [(name or "(model)", module) for name, module in model.named_modules() if not list(module.children())]
    handles = [module.register_forward_hook(hook_for(name)) for name, module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch_backward(loss: Tensor, seen: _Seen) -> list[Any]:
    """A hook on every operation of the graph: the first whose outgoing gradient is bad while its incoming is not."""

    def hook_for(name: str) -> Callable[[Any, Any], None]:
        def on_backward(outgoing: Any, incoming: Any) -> None:
            bad = [one for one in outgoing if isinstance(one, Tensor) and not _finite(one)]
            if bad and all(_finite(one) for one in incoming if isinstance(one, Tensor)) and len(seen.backward) < 8:
                kind = "NaN" if bool(torch.isnan(bad[0]).any()) else "infinity"
                seen.backward.append((name, kind))

        return on_backward

    handles: list[Any] = []
    found: set[Any] = set()
    queue: deque[Any] = deque([loss.grad_fn] if loss.grad_fn is not None else [])
    while queue and len(found) < NODES_MAX:
        node = queue.popleft()
        if node in found:
            continue
        found.add(node)
        handles.append(cast(Any, node).register_hook(hook_for(_name(node))))
        queue.extend(following for following, _ in node.next_functions if following is not None)
    return handles


def _name(node: Any) -> str:
    return "a leaf" if node is None else str(node.name())


def _bad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not _finite(value)


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
