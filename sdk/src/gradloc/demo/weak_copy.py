"""Nothing planted: an inference copy with eight bits a weight, four steps behind, until a spike comes by itself.

The run learns five times as fast as the demo's others, so that four steps matter.
The copy reports truthfully what it computes. Sooner or later it samples a token that the trainer's
policy thinks much likelier than the copy did, or the other way round, in an answer with a bad reward.
"""

from collections import deque
from pathlib import Path
from typing import Any

import torch

from gradloc.demo.moment import Fault, MicroBatches
from gradloc.demo.rollout import InferenceCopy
from gradloc.demo.testimony import write_batch, write_planted, write_weights

STEPS_BEHIND = 4  # of the copies below
LEARNING_RATE = 5e-4  # the whole run's: what makes four steps matter
STEPS_AFTER = 20  # that training goes on is part of what is shown


class LateCopy(InferenceCopy):
    """A copy of the weights of some steps ago, as where sampling and training overlap."""

    def __init__(self, model: Any, seed: int) -> None:
        super().__init__(model, seed)
        self._waiting: deque[list[torch.Tensor]] = deque()

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight as the copy keeps it."""
        return weight.to(torch.bfloat16)

    @torch.no_grad()
    def sync(self, model: torch.nn.Module) -> None:
        self._waiting.append([self.rounded(parameter.detach()) for parameter in model.parameters()])
        weights = self._waiting[0]
        if len(self._waiting) > STEPS_BEHIND:
            self._waiting.popleft()
        for own, theirs in zip(self.model.parameters(), weights, strict=True):
            own.copy_(theirs.to(own.dtype))


class WeakCopy(LateCopy):
    """As far behind, and each weight rounded to eight bits."""

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(torch.float8_e4m3fn)


class NaturalSpike(Fault):
    """Keeps for the judge the first step that the watcher wanted to keep."""

    def __init__(self, seed: int, world_size: int, judge_dir: Path) -> None:
        self._judge_dir = judge_dir

    def inference_copy(self, model: Any, seed: int) -> InferenceCopy:
        return WeakCopy(model, seed)

    def learning_rate(self, step: int) -> float:
        return LEARNING_RATE

    def observed(self, step: int, decision: str, rank: int, model: torch.nn.Module, parts: MicroBatches) -> None:
        if decision == "go" or self.struck_at is not None:
            return
        self.struck_at = step
        write_batch(self._judge_dir, rank, parts)
        if rank == 0:
            write_weights(self._judge_dir, model)
            write_planted(self._judge_dir, {"step": step, "kind": "token"})

    def is_over(self, step: int) -> bool:
        return self.struck_at is not None and step >= self.struck_at + STEPS_AFTER
