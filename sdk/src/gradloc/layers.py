"""Which layer and kind of module a parameter belongs to, by its name. Pure text.

A layer key is "layers.3.attention", "layers.3.mlp", "layers.3.norm", "embedding", "norm", "head" or
"other". Names of Qwen, Llama, Mistral, GPT-2, GPT-NeoX, OPT and nanoGPT-like models are known. What makes vectors of
pictures or sounds stands apart, as "vision.layers.3.attention": its blocks are not those of the language model.
"""

import re

VISION = "vision."
KINDS = ("attention", "mlp", "norm", "embedding", "head", "other")
_BLOCK = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.(.*)$")
_TOWER = re.compile(
    r"(?:^|\.)(?:visual|vision\w*|audio\w*|image_\w+|multi_modal_projector|mm_projector|connector|aligner|embed_vision)(?:\.|$)"
)
_BLOCK_ITSELF = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)$")
_ATTENTION = re.compile(r"attn|attention|(?:^|\.)[qkvo]_proj|query_key_value")
_MLP = re.compile(r"mlp|ffn|feed_forward|expert|moe|(?:^|\.)(?:gate|up|down)_proj|(?:^|\.)fc\d?\b|dense_4h|dense_h")
_NORM = re.compile(r"norm|(?:^|\.)ln_?\w*")
_EMBEDDING = re.compile(r"embed|(?:^|\.)w[tp]e\b")
_HEAD = re.compile(r"lm_head|(?:^|\.)head|score|classifier|embed_out")


def layer_key(parameter_name: str) -> str:
    """Key of the layer and kind that `parameter_name` (dotted, wrappers' prefixes allowed) belongs to."""
    return f"{VISION}{_key(parameter_name)}" if is_vision(parameter_name) else _key(parameter_name)


def is_vision(name: str) -> bool:
    """Whether a module or parameter of this name makes vectors of pictures or sounds, or adapts them."""
    return _TOWER.search(name) is not None


def _key(parameter_name: str) -> str:
    block = _BLOCK.search(parameter_name)
    if block:
        return f"layers.{int(block.group(1))}.{_kind_in_block(block.group(2))}"
    if _HEAD.search(parameter_name):
        return "head"
    if _EMBEDDING.search(parameter_name):
        return "embedding"
    if _NORM.search(parameter_name):
        return "norm"
    return "other"


def is_block(module_name: str) -> bool:
    """Whether a module of this (dotted) name is a transformer block."""
    return _BLOCK_ITSELF.search(module_name) is not None


def _kind_in_block(rest: str) -> str:
    # post_attention_layernorm is a norm although it says attention; self_attn.q_norm is part of the attention.
    module = rest.split(".", maxsplit=1)[0]
    if _NORM.search(module):
        return "norm"
    for kind, pattern in (("attention", _ATTENTION), ("mlp", _MLP), ("norm", _NORM)):
        if pattern.search(rest):
            return kind
    return "other"


def kind_of(key: str) -> str:
    """Kind of module of a layer key: one of KINDS."""
    return key.rsplit(".", maxsplit=1)[-1]


def block_of(key: str) -> str:
    """Block of a layer key: "layers.3" for "layers.3.mlp", the key itself outside blocks."""
    return key.rsplit(".", maxsplit=1)[0]


def block_index(key: str) -> int | None:
    """Number of the transformer block of a layer key, or None outside blocks."""
    parts = key.split(".")
    return int(parts[1]) if parts[0] == "layers" and len(parts) > 1 else None
