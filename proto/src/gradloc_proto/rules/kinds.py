"""Which flags are about one step's gradient, so that replaying it can explain them: the one place that says so."""

from collections.abc import Iterable

from gradloc_proto.messages import Flag

# Faults of the run over many steps: no batch of one step shows what is wrong.
RULES_OF_THE_RUN = frozenset(
    {
        "ratio-drift",
        "kl-drift",
        "vanished",
        "dead",
        "growth",
        "oscillation",
        "skip-streak",
    }
)
# Faults of what the loss is made of. They last, so that any batch since shows whether tokens, rewards or ratios are
# out of line; the norm is as usual, so that no trainer keeps a batch by itself.
RULES_OF_EVERY_BATCH = frozenset({"reward-cliff", "accuracy-cliff"})

# The trainer's LayerClip held positions back: the norm is as usual because of that, and a replay, which holds nothing
# back, shows what it would have been.
HELD = "held"


def is_about_gradient(flags: Iterable[Flag]) -> bool:
    """Whether a replay can say what some flag asks; unknown rules count: better one job too many."""
    return any(_name(flag) not in RULES_OF_THE_RUN for flag in flags)


def shows_in_later_batches(flags: Iterable[Flag]) -> bool:
    """Whether the newest batch does where that of the flagged step is gone: no flag is about one step alone."""
    return all(_name(flag) in RULES_OF_THE_RUN | RULES_OF_EVERY_BATCH for flag in flags)


def _name(flag: Flag) -> str:
    return flag.rule.removeprefix("trainer:")
