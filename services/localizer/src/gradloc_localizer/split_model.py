"""A snapshot's model with every parameter cut over the processes of a split, built without any of them holding it all.

Parameters are made on "meta" as the model's class makes them, one after the other, and cut by FSDP2, a block at a
time; then each process reads the weights piece by piece and keeps its rows of them. A pass gathers a block's
parameters while it runs and no longer, so a process holds 1/K of all and a block. Knows no Ray.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.modules.module import register_module_parameter_registration_hook

from gradloc.layers import is_block
from gradloc.manifest import Manifest
from gradloc.shards import first_row, local
from gradloc.split import Split
from gradloc.weight_files import WeightFiles
from gradloc_localizer.model_source import ModelRejected, dtype_of, empty_model, trainable


def build_split_model(
    manifest: Manifest,
    files: WeightFiles,
    split: Split,
    *,
    allowed_factories: Collection[str] = (),
    device: str = "cpu",
) -> nn.Module:
    """This process's part of the model. Raises ModelRejected, SnapshotRejected or StoreUnavailable."""
    with _without_parameters():
        model = trainable(empty_model(manifest, allowed_factories, files.shapes()))
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    formats = {name: parameter.dtype for name, parameter in model.named_parameters()}
    if manifest.compute_dtype is not None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype_of(manifest.compute_dtype))
    mesh = init_device_mesh(torch.device(device).type, (split.size,))
    groups = [*_blocks(model), model]
    _check_groups(model, groups)
    for group in groups:
        group.register_forward_hook(_touch_all)
        dtype = next((one.dtype for one in group.parameters() if one.is_floating_point()), torch.float32)
        # Gradients are added up over processes in 32 bits at least, as they are over micro-batches.
        reduced = MixedPrecisionPolicy(reduce_dtype=torch.promote_types(dtype, torch.float32))
        fully_shard(group, mesh=mesh, reshard_after_forward=True, mp_policy=reduced)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    _fill(model, files, formats)
    return model


@contextlib.contextmanager
def _without_parameters() -> Iterator[None]:
    """Inside, parameters lose their values as soon as a module has them; buffers, which no file may hold, stay."""

    def emptied(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(cast(Any, emptied))  # torch says None, and takes another
    try:
        yield
    finally:
        handle.remove()


def _blocks(model: nn.Module) -> list[nn.Module]:
    """What is gathered at a time: transformer blocks, the outermost ones."""
    names = [name for name, _ in model.named_modules() if is_block(name)]
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    return [part for name in outermost for part in _that_run(model.get_submodule(name))]


def _that_run(module: nn.Module) -> list[nn.Module]:
    """The module, or what it contains where it is a mere container, which never runs itself."""
    if type(module).forward is not nn.Module.forward:
        return [module] if any(True for _ in module.parameters()) else []
    return [part for child in module.children() for part in _that_run(child)]


def _check_groups(model: nn.Module, groups: list[nn.Module]) -> None:
    owner: dict[int, int] = {}
    formats: dict[int, set[torch.dtype]] = {}
    inner = {id(module) for group in groups[:-1] for module in group.modules()}
    for number, group in enumerate(groups):
        modules = group.modules() if group is not model else (m for m in model.modules() if id(m) not in inner)
        for module in modules:
            for name, parameter in module.named_parameters(recurse=False):
                if owner.setdefault(id(parameter), number) != number:
                    raise ModelRejected(
                        f"a {type(model).__name__} shares the parameter {name[:60]!r} between blocks, which a split "
                        "model cannot; localize it without --split"
                    )
                if parameter.requires_grad:
                    formats.setdefault(number, set()).add(parameter.dtype)
    mixed = next((found for found in formats.values() if len(found) > 1), None)
    if mixed:
        raise ModelRejected(
            f"a block of this {type(model).__name__} has parameters in {' and '.join(sorted(map(str, mixed)))}, which "
            "a split model cannot; localize it without --split"
        )


def _fill(model: nn.Module, files: WeightFiles, formats: dict[str, torch.dtype]) -> None:
    """Copies this process's rows. Second names of tied parameters are the same parameter."""
    places: dict[str, Callable[[int, Tensor], None]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        whole_row = parameter.numel() // max(1, parameter.shape[0]) if parameter.dim() else 1
        places[name] = _taker(local(parameter.detach()), first_row(parameter) * whole_row, formats.get(name))
    for name, buffer in model.named_buffers():
        places.setdefault(name, _taker(buffer, 0, None))
    with torch.no_grad():
        for name, at, flat in files.pieces():
            places[name](at, flat)


def _taker(own: Tensor, first: int, through: torch.dtype | None) -> Callable[[int, Tensor], None]:
    """Takes what it needs of a run of elements. first: number of the own part's first element; through: the format
    that a value has before it gets its own."""
    place, end = own.view(-1), first + own.numel()

    def take(at: int, flat: Tensor) -> None:
        low, high = max(at, first), min(at + flat.numel(), end)
        if low < high:
            values = flat[low - at : high - at]
            place[low - first : high - first] = values if through is None else values.to(through)

    return take


def _touch_all(module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Gives every parameter of the group a gradient, if only zeros: FSDP2 exchanges those that are there, and processes
    whose tokens chose other experts would exchange different ones."""
    own = [
        parameter
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
        if parameter.requires_grad and type(parameter) is nn.Parameter  # gathered: those of this group
    ]
    if not torch.is_grad_enabled() or not own:
        return None
    if isinstance(output, Tensor):
        return _Touched.apply(output, *own)  # type: ignore[no-untyped-call]
    if isinstance(output, tuple):
        return (_Touched.apply(output[0], *own), *output[1:])  # type: ignore[no-untyped-call]
    output.logits = _Touched.apply(output.logits, *own)  # type: ignore[no-untyped-call]
    return output


class _Touched(torch.autograd.Function):
    """A copy of the first argument, that depends on the others as on nothing."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(one.shape, one.dtype, one.device) for one in parameters]
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *(
            torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like
        )
