"""The model of a snapshot, rebuilt from its configuration and weights. The only door to transformers.

Nothing of the snapshot is executed: a Hugging Face configuration names a class that this
installation ships, or the operator allows a `module:factory` by name. Never asks a hub.
"""

import importlib
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gradloc.manifest import Manifest
from gradloc.snapshot import Snapshot
from gradloc_proto.plain_text import visible

ATTENTION_KERNELS = ("eager", "sdpa", "flash_attention_2")
# Keys that would name code elsewhere, or that are set here anyway.
_DROPPED = frozenset(
    {"auto_map", "architectures", "transformers_version", "_name_or_path", "name_or_path", "dtype", "torch_dtype"}
    | {"quantization_config", "model_type", "_commit_hash", "custom_pipelines", "use_kernels"}
)
# A configuration that asks for more layers or experts than this and than there are weights cannot fit them, and
# building its modules would take all memory, even without their parameters.
_MODULES_MAX = 1_024
_COUNTS = ("layer", "expert", "block", "depth")  # in the names of what is counted
Weights = Mapping[str, torch.Tensor]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


class ModelRejected(ValueError):
    """A model that cannot be rebuilt from what the snapshot says; the text says what to do."""


def dtype_of(name: str) -> torch.dtype:
    """Number format by name. Raises ModelRejected."""
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ModelRejected(f"unknown number format {name[:40]!r}; expected one of {', '.join(_DTYPES)}")
    return dtype


def build_model(
    snapshot: Snapshot,
    *,
    allowed_factories: Collection[str] = (),
    device: str = "cpu",
    weights: Weights | None = None,
) -> nn.Module:
    """The model with the snapshot's weights, or those given, on `device`. Raises ModelRejected or SnapshotRejected."""
    manifest = snapshot.manifest
    weights = snapshot.weights() if weights is None else weights
    model = empty_model(manifest, allowed_factories, weights)
    model.load_state_dict(dict(weights), strict=False)
    if manifest.compute_dtype is not None:
        _cast_parameters(model, dtype_of(manifest.compute_dtype))
    return trainable(model).to(device)


def trainable(model: nn.Module) -> nn.Module:
    """The model, of which at least something is trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        model.requires_grad_(True)
    return model


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """As FSDP2's mixed precision does it: buffers stay what they are."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def empty_model(manifest: Manifest, allowed_factories: Collection[str], weights: Weights) -> nn.Module:
    """The model as its class makes it, which these weights fit; of them only names and shapes are looked at. Raises
    ModelRejected."""
    model = _made(manifest, allowed_factories, weights)
    _check_fit(model, weights, manifest)
    return model


def _made(manifest: Manifest, allowed_factories: Collection[str], weights: Weights) -> nn.Module:
    if manifest.model_factory is not None:
        return _from_factory(manifest.model_factory, allowed_factories)
    if manifest.model_config_hf is not None:
        with torch.device("meta"):
            # Costs no memory: a configuration of absurd sizes is refused before anything is allocated.
            _check_counts(manifest, len(weights))
            _check_fit(_from_config(manifest), weights, manifest)
        return _from_config(manifest)
    raise ModelRejected(
        "the snapshot holds neither a Hugging Face configuration nor a factory; "
        "give watch() a model with a config, or factory='module:function'"
    )


def _from_factory(name: str, allowed: Collection[str]) -> nn.Module:
    if name not in allowed:
        raise ModelRejected(
            f"the snapshot wants the factory {name[:120]!r}, which is not allowed here; "
            "allow it by name (--allow-factory MODULE:FUNCTION or GRADLOC_ALLOWED_FACTORIES) if you trust it"
        )
    module_name, _, function_name = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ModelRejected(f"factory {name[:120]!r}: {error}; install it where the localizer runs") from None
    model = factory()
    if not isinstance(model, nn.Module):
        raise ModelRejected(f"factory {name[:120]!r} gave a {type(model).__name__}, expected a torch.nn.Module")
    return model


def _from_config(manifest: Manifest) -> nn.Module:
    # Whatever a configuration says, it must not make transformers look for files elsewhere.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoConfig

    record = dict(manifest.model_config_hf or {})
    model_type = str(record.get("model_type"))
    settings: dict[str, Any] = {
        key: value
        for key, value in record.items()
        if key not in _DROPPED and not key.startswith(("_attn", "attn_implementation"))
    }
    attention = manifest.attention or "sdpa"
    if attention not in ATTENTION_KERNELS:
        raise ModelRejected(f"attention kernel {attention[:60]!r}; expected one of {', '.join(ATTENTION_KERNELS)}")
    try:
        config = AutoConfig.for_model(model_type, **settings)
        model: nn.Module = _auto_class(config, manifest.architecture).from_config(
            config,
            attn_implementation=attention,
            dtype=dtype_of(manifest.parameter_dtype),
            trust_remote_code=False,
        )
    except ModelRejected:
        raise
    except Exception as error:  # noqa: BLE001 - a hostile or newer configuration may fail anywhere in there
        reason = visible(str(error).split("\n", maxsplit=1)[0], 200)
        raise ModelRejected(
            f"transformers cannot build a {model_type[:40]!r} model from the snapshot: {reason}; "
            "install the release that trained it"
        ) from None
    expected = manifest.architecture
    if expected is not None and type(model).__name__ != expected:
        raise ModelRejected(
            f"the snapshot was taken from a {expected[:80]}, its configuration gives a {type(model).__name__}; "
            "give watch() factory='module:function' for such a model"
        )
    return model


def _auto_class(config: Any, architecture: str | None) -> Any:
    """Of those that give a model from this configuration the one that gives this class; transformers ships them
    without types."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    given = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    return AutoModelForImageTextToText if getattr(given, "__name__", "") == architecture else AutoModelForCausalLM


def _check_counts(manifest: Manifest, num_tensors: int) -> None:
    most = max(_MODULES_MAX, num_tensors)
    for name, value in _settings(manifest.model_config_hf or {}):
        is_count = any(word in name for word in _COUNTS) and isinstance(value, int) and not isinstance(value, bool)
        if is_count and value > most:
            raise ModelRejected(
                f"the snapshot's configuration wants {str(value)[:20]} of {name[:60]!r} for {num_tensors} weights; "
                f"expected at most {most}; take a new snapshot"
            )


def _settings(record: Mapping[str, Any], depth: int = 4) -> Iterator[tuple[str, Any]]:
    """Names and values, also of configurations inside this one (text_config)."""
    for name, value in record.items():
        for one in value if isinstance(value, list) else (value,):
            yield name, one
        if isinstance(value, Mapping) and depth:
            yield from _settings(value, depth - 1)


def _check_fit(model: nn.Module, weights: Weights, manifest: Manifest) -> None:
    own = model.state_dict()
    tied = _tied_names(model)
    unexpected = [name for name in weights if name not in own]
    missing = [name for name in own if name not in weights and tied.get(name) not in weights]
    wrong = [name for name, tensor in weights.items() if name in own and own[name].shape != tensor.shape]
    for names, what in ((missing, "lack"), (unexpected, "have no place for"), (wrong, "have another shape for")):
        if names:
            raise ModelRejected(
                f"the snapshot's weights do not fit {manifest.architecture or 'the model'}: they {what} "
                f"{names[0][:120]!r} and {len(names) - 1} more; use the code that trained them"
            )


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Second names of shared parameters: {name: first name}."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
            tied[first[id(parameter)]] = name
        else:
            first[id(parameter)] = name
    return tied
