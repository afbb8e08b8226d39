"""The demo's policy: a small transformer of the Qwen3 architecture. The only place that builds one.

Shapes: B rows, T positions, P prompt, R response positions (T = P + R), V vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from gradloc.demo.task import PROMPT_LENGTH, RESPONSE_LENGTH, VOCABULARY

NUM_LAYERS = 6
WIDTH = 64
EMBEDDING_STD = 0.5  # of the residual stream's own size: with 0.02 the lowest layers would take all of the gradient


def new_model(seed: int) -> Any:
    """A Qwen3ForCausalLM in float32 with random weights (a fixed function of `seed`)."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-7,
        max_position_embeddings=2 * (PROMPT_LENGTH + RESPONSE_LENGTH),
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "eager"  # differentiable twice, which the judge needs
    model: Any = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0.0, EMBEDDING_STD)
    return model


def save_weights(model: nn.Module, path: Path) -> None:
    save_model(model, str(path))  # of tied weights one


def load_weights(model: nn.Module, path: Path) -> None:
    load_model(model, path)


def response_log_probs(model: nn.Module, ids_BT: torch.Tensor, prompt_length: int = PROMPT_LENGTH) -> torch.Tensor:
    """Log-probabilities over the vocabulary at each response position: float32 [B, R, V]."""
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    return torch.log_softmax(logits_BTV[:, prompt_length - 1 : -1].float(), dim=-1)


def response_logp(model: nn.Module, ids_BT: torch.Tensor, prompt_length: int = PROMPT_LENGTH) -> torch.Tensor:
    """Log-probability of each response token: [B, R]."""
    log_probs_BRV = response_log_probs(model, ids_BT, prompt_length)
    return log_probs_BRV.gather(-1, ids_BT[:, prompt_length:, None])[..., 0]
