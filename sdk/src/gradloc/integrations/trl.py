"""gradloc in a trainer of TRL: GRPO, RLOO, DPO, KTO, SFT.

    from gradloc.integrations.trl import attach
    attach(trainer, run="my-run", store="file:///data/gradloc")
    trainer.train()

TRL's fused head gives the log-probabilities (and entropies) that the loss uses; what only GRPO's and RLOO's
batches know (advantages, the sampler's log-probabilities, prompts) comes from the batch. See `hugging_face`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradloc.integrations.hugging_face import Attachment, left_padded, prompt_names

# Ours by TRL's: what its trainers keep under `_metrics`, reduced over ranks already.
_PER_GENERATION = {"reward_mean": "reward", "reward_std": "reward_std"}
_PER_MICRO_BATCH = {"kl": "kl", "entropy": "entropy", "clip_fraction": "clip_ratio/region_mean"}


def attach(trainer: Any, *, run: str, **watch_arguments: Any) -> "TrlAttachment":
    """Watch a trainer of TRL; call it before `trainer.train()`, on every rank. See `hugging_face.attach`."""
    if not any(base.__module__.startswith("trl.") for base in type(trainer).__mro__):
        raise ValueError(
            f"trainer is a {type(trainer).__name__}; expected one of TRL's "
            "(gradloc.integrations.hugging_face.attach takes any transformers.Trainer)"
        )
    return TrlAttachment(trainer, run, watch_arguments)


class TrlAttachment(Attachment):
    """A trainer of TRL being watched."""

    def temperature(self) -> float:
        """GRPO and RLOO score tokens at the temperature that sampled them, the others at 1."""
        return float(getattr(self._trainer, "temperature", None) or 1.0)

    def metrics(self) -> dict[str, float]:
        found = super().metrics()
        kept = getattr(self._trainer, "_metrics", {}).get("train", {})
        for name, theirs in _PER_GENERATION.items():
            if kept.get(theirs):
                found[name] = float(kept[theirs][-1])
        num_micro_batches = max(len(self._losses), 1)
        for name, theirs in _PER_MICRO_BATCH.items():
            values = list(kept.get(theirs) or ())[-num_micro_batches:]
            if values:
                found[name] = float(sum(values) / len(values))
        return found

    def row_facts(self, inputs: Mapping[str, Any], logp_BR: Tensor, mask_BR: Tensor) -> dict[str, Any]:
        num_rows, width = logp_BR.shape
        if "completion_ids" not in inputs:  # preferences and plain texts
            if "chosen_input_ids" in inputs or num_rows % 2 or not _is_preference(self._trainer):
                return {}
            names = [f"pair {row} {side}" for side in ("chosen", "rejected") for row in range(num_rows // 2)]
            return {"uid": names}
        facts: dict[str, Any] = {"uid": prompt_names(inputs["prompt_ids"], inputs["prompt_mask"])}
        if inputs.get("tool_mask") is not None:
            facts["mask"] = mask_BR & left_padded(inputs["tool_mask"], width, 0).bool()
        advantages = inputs.get("advantages")
        if isinstance(advantages, Tensor):
            facts["advantage"] = advantages if advantages.dim() == 1 else left_padded(advantages, width, 0.0)
        old, sampled = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
        if isinstance(old, Tensor):
            facts["old_logp"] = left_padded(old, width, float("nan"))
        reference = inputs.get("ref_per_token_logps")
        if isinstance(reference, Tensor):
            facts["ref_logp"] = left_padded(reference, width, float("nan")).to(logp_BR.device)
        told = sampled if isinstance(sampled, Tensor) else old
        if isinstance(told, Tensor):
            told_BR = left_padded(told, width, float("nan")).to(logp_BR.device)
            # What the sampler could not score is NaN: no mismatch is known there.
            facts["rollout_logp"] = torch.where(told_BR.isnan(), logp_BR.detach().to(told_BR.dtype), told_BR)
        return facts


def _is_preference(trainer: Any) -> bool:
    return any(base.__name__ == "DPOTrainer" for base in type(trainer).__mro__)


__all__ = ["TrlAttachment", "attach"]
