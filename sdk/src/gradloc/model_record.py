"""What a snapshot must say of a model so that it can be rebuilt elsewhere, without any code of it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class ModelRecord:
    """Hugging Face config (JSON-able), class name, factory, parameter dtype and attention kernel."""

    config: dict[str, Any] | None
    architecture: str
    factory: str | None
    parameter_dtype: str
    attention: str | None

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
        )


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
