"""Faults planted on purpose, each with the same situation in health: what the self-test and the tests run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gradloc.checks.finding import CheckFinding
from gradloc.checks.kinds import KINDS

Situation = Callable[[bool], Iterable[CheckFinding]]


@dataclass(frozen=True)
class Plant:
    """code: the finding that the fault must give. run(True) plants it; run(False) is the healthy counterpart,
    which must give no finding at all."""

    code: str
    name: str
    run: Situation


class Garden:
    """Plants of one layer, in order."""

    def __init__(self) -> None:
        self.plants: list[Plant] = []

    def plant(self, code: str, name: str) -> Callable[[Situation], Situation]:
        """Register a situation under the kind it must give and what the fault is."""
        assert code in KINDS, code

        def register(run: Situation) -> Situation:
            self.plants.append(Plant(code, name, run))
            return run

        return register


def all_plants() -> tuple[Plant, ...]:
    """Every planted fault. Raises ValueError where a library that the checks need is not installed."""
    from gradloc.checks.planted import data, gradient, optimizer, policy, reward

    return tuple(plant for module in (data, reward, policy, gradient, optimizer) for plant in module.GARDEN.plants)
