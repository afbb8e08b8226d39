"""The learning rate of the supervised training, left in.

Sampling and training overlap, so the inference copy is some steps behind: harmless, as long as a step
changes little. A schedule that was written for both stages goes on with the first one's rate, forty
times that of GRPO: after one update the policy is far from the copy, at every token.
"""

from typing import Any

from gradloc.demo import pretraining
from gradloc.demo.moment import CommonFault
from gradloc.demo.rollout import InferenceCopy
from gradloc.demo.settings import LEARNING_RATE
from gradloc.demo.weak_copy import LateCopy


class SupervisedRate(CommonFault):
    """From its step on the learning rate is that of the supervised training."""

    def inference_copy(self, model: Any, seed: int) -> InferenceCopy:
        return LateCopy(model, seed)

    def learning_rate(self, step: int) -> float:
        return LEARNING_RATE if self.struck_at is None else pretraining.LEARNING_RATE
