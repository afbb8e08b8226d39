"""Which step is abnormal for its run: the pure rules that trainer and detector apply alike.

    flags = judge(state, observation)           # before learning from it
    state = learn(state, observation, flags)
    limits = limits_of(state)                    # what the trainer compares its next step with

No I/O, no clock, no torch. `Sensitivity(scale=2)` is the one knob for users: it tolerates spikes twice
as large. Flags name their rule:

| rule | a step is flagged when |
|---|---|
| non-finite | the norm is NaN or infinite, or a layer's is infinite |
| norm | it stands out of its run's baseline (`baseline`) and of its neighbours |
| layer | one layer does, twice as far |
| spread | one layer sticks out of the others as it never did |
| energy, gain | the factor of norm² that made the spike; alone when twice as clear |
| ratio-drift, kl-drift | the importance ratio or the KL left its baseline for three steps |
| vanished, dead | the norm is under 1/300 of healthy for 6 steps, or exactly zero longer than its zeros explain |
| growth | the level has crept to 4 times all that was seen before |
| oscillation | the norm doubled and halved by turns for 32 steps |
| reward-cliff, accuracy-cliff | five values in a row below all of the last 64 and far below their spread |
"""

from gradloc_proto.rules.checkpoint import dump_state, load_state
from gradloc_proto.rules.judgement import (
    DEFAULT_SENSITIVITY,
    RunState,
    Sensitivity,
    breaches,
    judge,
    learn,
    limits_of,
)
from gradloc_proto.rules.kinds import (
    HELD,
    RULES_OF_EVERY_BATCH,
    RULES_OF_THE_RUN,
    is_about_gradient,
    shows_in_later_batches,
)
from gradloc_proto.rules.observation import Observation, observation_of
from gradloc_proto.rules.stretch import Lesson, Renewal, Stretch, has_settled, learn_stretch, limits_in_time
from gradloc_proto.rules.thresholds import LEVEL_FACTOR, Level, segment_limit, smallest_detectable

__all__ = [
    "DEFAULT_SENSITIVITY",
    "HELD",
    "LEVEL_FACTOR",
    "RULES_OF_EVERY_BATCH",
    "RULES_OF_THE_RUN",
    "Lesson",
    "Level",
    "Observation",
    "Renewal",
    "RunState",
    "Sensitivity",
    "Stretch",
    "breaches",
    "dump_state",
    "has_settled",
    "is_about_gradient",
    "judge",
    "learn",
    "learn_stretch",
    "limits_in_time",
    "limits_of",
    "load_state",
    "observation_of",
    "segment_limit",
    "shows_in_later_batches",
    "smallest_detectable",
]
