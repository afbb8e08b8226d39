"""The step that is localized over and over: a tiny GRPO-like batch on two ranks, two stale tokens in it."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from gradloc.layers import layer_key
from gradloc.manifest import Manifest
from gradloc.snapshot import MicroBatch, collect_parts, write_manifest, write_part, write_weights
from gradloc.store import Store

VOCABULARY = 64
NUM_RANKS, NUM_MICRO_BATCHES, NUM_ROWS, NUM_PROMPT, NUM_RESPONSE = 2, 2, 4, 6, 24
STALE = {(1, 0, 2, 3): 9.0, (0, 1, 1, 7): 8.0}  # rank, micro-batch, row, column: how far the rollout's logp was off


def write(url: str, seed: int) -> None:
    """The snapshot at `url`."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
        initializer_range=0.08, tie_word_embeddings=False,
    )  # fmt: skip
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    healthy, _ = _run(model, seed, {})
    norms, ranks = _run(model, seed, STALE)
    store = Store(url)
    for rank, batches in enumerate(ranks):
        write_part(store, rank, batches, 1.0)
    files = write_weights(store, {name: value.detach() for name, value in model.state_dict().items()})
    whole = sum(norm**2 for norm in norms.values()) ** 0.5
    usual = sum(norm**2 for norm in healthy.values()) ** 0.5
    manifest = Manifest(
        run_id="preempted",
        attempt=0,
        step=7,
        created_at=0.0,
        world_size=NUM_RANKS,
        grad_norm=whole,
        layer_norms=norms,
        limit=4 * usual,
        healthy_norm=usual,
        healthy_layer_norms=healthy,
        model_config_hf=config.to_dict(),
        architecture=type(model).__name__,
        attention="sdpa",
        parts=collect_parts(store, NUM_RANKS),
        files=files,
    )
    write_manifest(store, manifest)


def _run(
    model: nn.Module, seed: int, stale: dict[tuple[int, int, int, int], float]
) -> tuple[dict[str, float], list[tuple[MicroBatch, ...]]]:
    generator = torch.Generator().manual_seed(seed)
    model.zero_grad(set_to_none=True)
    ranks = []
    for rank in range(NUM_RANKS):
        batches = []
        for index in range(NUM_MICRO_BATCHES):
            ids_BT = torch.randint(2, VOCABULARY, (NUM_ROWS, NUM_PROMPT + NUM_RESPONSE), generator=generator)
            advantage_BR = torch.randn(NUM_ROWS, 1, generator=generator).expand(-1, NUM_RESPONSE)
            log_ratio_BR = 0.02 * torch.randn(NUM_ROWS, NUM_RESPONSE, generator=generator)
            for (at_rank, at_index, row, column), size in stale.items():
                if (at_rank, at_index) == (rank, index):
                    log_ratio_BR[row, column] = size
            logits = model(input_ids=ids_BT).logits[:, -NUM_RESPONSE - 1 : -1]
            logp_BR = torch.log_softmax(logits, -1).gather(-1, ids_BT[:, -NUM_RESPONSE:, None])[..., 0]
            rollout_BR = logp_BR.detach() - log_ratio_BR
            kept: list[torch.Tensor] = []
            logp_BR.register_hook(lambda gradient, kept=kept: kept.append(gradient.detach().clone()))
            (-(advantage_BR * torch.exp(logp_BR - rollout_BR)).mean()).backward()
            batches.append(
                MicroBatch(
                    ids_BT=ids_BT,
                    mask_BR=torch.ones(NUM_ROWS, NUM_RESPONSE, dtype=torch.bool),
                    logp_BR=logp_BR.detach(),
                    coefficient_BR=kept[0],
                    rollout_logp_BR=rollout_BR,
                    advantage_BR=advantage_BR.clone(),
                )
            )
        ranks.append(tuple(batches))
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            key = layer_key(name)
            squares[key] = squares.get(key, 0.0) + float(parameter.grad.double().square().sum())
    return {key: square**0.5 for key, square in squares.items()}, ranks
