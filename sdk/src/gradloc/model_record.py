"""What a snapshot must say of a model so that it can be rebuilt elsewhere, without any code of it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class ModelRecord:
    """Hugging Face config (JSON-able), class name, factory, parameter dtype and attention kernel.

    compute_dtype: what sharded parameters are cast to for forward and backward, where that is another.
    """

    config: dict[str, Any] | None
    architecture: str
    factory: str | None
    parameter_dtype: str
    attention: str | None
    compute_dtype: str | None = None

    @classmethod
    def of(cls, module: torch.nn.Module, factory: str | None) -> "ModelRecord":
        config = getattr(module, "config", None)
        to_dict = getattr(config, "to_dict", None)
        record = json.loads(json.dumps(to_dict(), default=str)) if callable(to_dict) else None
        parameter = next(module.parameters(), None)
        return cls(
            config=record,
            architecture=_class_of(module).__name__,
            factory=factory,
            parameter_dtype=str(parameter.dtype).removeprefix("torch.") if parameter is not None else "float32",
            attention=getattr(config, "_attn_implementation", None),
            compute_dtype=None if (dtype := sharded_dtype(module)) is None else str(dtype).removeprefix("torch."),
        )


class AutocastSeen:
    """A forward pre-hook that notes what training passes compute in (the loss may be made outside the region), and
    which pictures they were given.

    Knows no probe, so that a model that is pickled or copied takes along nothing of ours but this.
    """

    def __init__(self, device_type: str) -> None:
        self.dtype: torch.dtype | None = None
        self.pictures: tuple[str, ...] = ()  # names, of the last such pass
        self._device_type = device_type

    def __call__(self, module: torch.nn.Module, args: object, kwargs: Mapping[str, object]) -> None:
        if not torch.is_grad_enabled():
            return
        self.pictures = tuple(
            name for name, value in kwargs.items() if "pixel_values" in name and isinstance(value, torch.Tensor)
        )
        if torch.is_autocast_enabled(self._device_type):
            self.dtype = torch.get_autocast_dtype(self._device_type)


def sharded_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """FSDP2's number format for parameters in forward passes, where its mixed precision sets one."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            policy = getattr(part._get_fsdp_state(), "_mp_policy", None)
            dtype: torch.dtype | None = getattr(policy, "param_dtype", None)
            return dtype
    return None


def _class_of(module: torch.nn.Module) -> type:
    """The class that a model was before `fully_shard` gave it another, named FSDP and so on."""
    own = type(module)
    return own.__bases__[-1] if issubclass(own, FSDPModule) and len(own.__bases__) > 1 else own


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile's wrapper."""
    for attribute in ("module", "_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, torch.nn.Module):
            model = inner
    return model


def tokenizer_json_of(tokenizer: object | None) -> str | None:
    """JSON of a `tokenizers.Tokenizer` or of a fast Hugging Face tokenizer. Raises ValueError otherwise."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    to_str = getattr(backend, "to_str", None)
    if not callable(to_str):
        raise ValueError(
            f"tokenizer is a {type(tokenizer).__name__}; "
            "expected a tokenizers.Tokenizer or a fast Hugging Face tokenizer"
        )
    return str(to_str())


def texts_of(tokenizer: object | None) -> Callable[[int], str] | None:
    """Text of a token id by the user's own tokenizer; None without one."""
    decode = getattr(getattr(tokenizer, "backend_tokenizer", tokenizer), "decode", None)
    if not callable(decode):
        return None
    return lambda token_id: str(decode([token_id], skip_special_tokens=False)) if token_id >= 0 else ""
