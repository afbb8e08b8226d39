"""Which flags are about one step's gradient, so that replaying it can explain them: the one place that says so."""

from collections.abc import Iterable

from gradloc_proto.messages import Flag

# Faults of the run over many steps, or of what the loss is made of: no token of one step is their culprit.
RULES_OF_THE_RUN = frozenset(
    {
        "ratio-drift",
        "kl-drift",
        "vanished",
        "dead",
        "growth",
        "oscillation",
        "reward-cliff",
        "accuracy-cliff",
        "skip-streak",
    }
)


def is_about_gradient(flags: Iterable[Flag]) -> bool:
    """Whether some flag asks which token, sequence or layer did it; unknown rules do: better one job too many."""
    return any(flag.rule.removeprefix("trainer:") not in RULES_OF_THE_RUN for flag in flags)
