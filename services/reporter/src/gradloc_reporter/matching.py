"""Which incidents a silence or a route is about: matchers over a few names. Pure.

The names of an incident are its run's labels, and over them run, severity, verdict and cause. A
value may hold `*` for anything; a name that an incident lacks counts as empty, as in Alertmanager.
"""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from gradloc_reporter.answers import Matcher

SEVERITIES = ("critical", "warning")


def names_of(
    *, run_id: str, labels: Mapping[str, str], verdict: str | None, cause: str | None, severity: str
) -> dict[str, str]:
    return {**labels, "run": run_id, "verdict": verdict or "", "cause": cause or "", "severity": severity}


def severity_of(grad_norm: float | None, healthy_norm: float | None) -> str:
    """critical: not finite, or a hundred times the healthy norm: the update may have ruined the weights."""
    if grad_norm is None:
        return "warning"
    if not math.isfinite(grad_norm):
        return "critical"
    ruinous = healthy_norm is not None and healthy_norm > 0 and grad_norm >= CRITICAL_FACTOR * healthy_norm
    return "critical" if ruinous else "warning"


CRITICAL_FACTOR = 100.0


def matches(matchers: Iterable[Matcher], names: Mapping[str, str]) -> bool:
    """Whether all of them fit."""
    return all(_fits(each, names.get(each.name, "")) for each in matchers)


def _fits(matcher: Matcher, value: str) -> bool:
    # fnmatch knows ? and [] too; only * is ours.
    pattern = matcher.value.replace("[", "[[]").replace("?", "[?]")
    return fnmatchcase(value, pattern) == (matcher.op == "=")


def in_words(matchers: Iterable[Matcher]) -> str:
    return ", ".join(f"{each.name} {each.op} {each.value}" for each in matchers)
