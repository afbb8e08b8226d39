"""What the demo hands to its trainer in a sealed envelope: which fault, and where to leave what the judge needs;
and what must be answered to each (docs/demo.md).

Names only; light enough for a command that does not load torch.
"""

from dataclasses import dataclass
from typing import Literal

FAULT_VARIABLE = "GRADLOC_DEMO_FAULT"
JUDGE_VARIABLE = "GRADLOC_DEMO_JUDGE"
TRUTH = "truth.json"  # in the judge's folder: what the judge found
WEIGHTS = "weights.safetensors"  # what GRPO starts with ...
CHECKPOINT = "checkpoint.safetensors"  # ... and the policy of long before that
NUM_STEPS = 60
NUM_STEPS_NATURAL = 200  # at most: it ends soon after its first spike

PlaceKind = Literal["token", "tokens", "sequence", "rank", "no token"]


@dataclass(frozen=True)
class Answer:
    """What a localization must say of a fault; verdict None: there must be no incident."""

    verdict: str | None
    cause: str | None = None
    place: PlaceKind = "no token"
    num_steps: int = NUM_STEPS


ANSWERS = {
    "token-mismatch": Answer("token", "token-mismatch", "token"),
    "layer": Answer("layer", "layer-heterogeneity", "token"),
    "none": Answer(None),
    "sequence-mismatch": Answer("sequence", "sequence-mismatch", "sequence"),
    "reward-outlier": Answer("sequence", "advantage-outlier", "sequence"),
    "nan": Answer("non-finite", "token-mismatch", "token"),
    "mask": Answer("mask", "mask-fault", "token"),
    "retokenized": Answer("token", "retokenization", "token"),
    "temperature": Answer("batch-wide", "systematic-mismatch"),
    "accounting": Answer("accounting", "unnormalised-loss"),
    "batch-wide": Answer("batch-wide", "learning-rate"),
    "hardware": Answer("not-reproduced", "hardware", "rank"),
    "two": Answer("token", "token-mismatch", "tokens"),
    "late": Answer("batch-wide", "reward-drop"),
    "natural": Answer("token", "token-mismatch", "token", NUM_STEPS_NATURAL),
}
FAULT_NAMES = tuple(ANSWERS)

TINY, SMOLLM2 = "tiny", "smollm2-135m"


@dataclass(frozen=True)
class Cast:
    """How a model is played: ranks, threads of each, faults it knows, and how much longer than the tiny one it takes.

    `num_steps` None: what the fault needs.
    """

    run_prefix: str
    world_size: int = 2
    num_threads: int = 1
    faults: tuple[str, ...] = FAULT_NAMES
    num_steps: int | None = None
    patience: float = 1.0
    judge_waits: bool = False  # for the localizer: both together would need more than 8 GB

    def steps_for(self, fault: str) -> int:
        return self.num_steps or ANSWERS[fault].num_steps


# One rank of SmolLM2: two would need more than 8 GB.
MODELS = {
    TINY: Cast("grpo-sort"),
    SMOLLM2: Cast("smollm2-grpo", 1, 1, ("token-mismatch", "none"), num_steps=16, patience=6.0, judge_waits=True),
}
