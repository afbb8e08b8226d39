"""The self-test: every planted fault must be caught, and healthy set-ups must give no finding."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradloc.checks.finding import CheckFinding
from gradloc.checks.kinds import KINDS
from gradloc.checks.planted import Plant, all_plants
from gradloc.checks.planted.setups import SETUPS


@dataclass(frozen=True)
class SelfTest:
    """missed: planted faults that were not found; false_findings: what healthy situations gave."""

    num_planted: int
    num_caught: int
    missed: tuple[str, ...]
    false_findings: tuple[str, ...]
    kinds_without_fault: tuple[str, ...]
    num_clean: int

    @property
    def passed(self) -> bool:
        return not (self.missed or self.false_findings or self.kinds_without_fault)

    def to_json(self) -> dict[str, Any]:
        return {
            "planted": self.num_planted,
            "caught": self.num_caught,
            "missed": list(self.missed),
            "false_findings": list(self.false_findings),
            "clean_setups": self.num_clean,
            "kinds": len(KINDS),
            "kinds_without_fault": list(self.kinds_without_fault),
        }


def self_test(
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    *,
    plants: Sequence[Plant] | None = None,
    setups: Mapping[str, Callable[[], Iterable[CheckFinding]]] = SETUPS,
) -> SelfTest:
    """Run all of it; half a minute. Raises ValueError where a library of `gradloc[checks]` is missing.

    plants, setups: others than the known ones.
    """
    plants = all_plants() if plants is None else plants
    total = len(plants) + len(setups)
    missed: list[str] = []
    false_findings: list[str] = []
    for done, plant in enumerate(plants):
        found: list[CheckFinding] = list(plant.run(True))
        if plant.code not in {one.code for one in found}:
            missed.append(f"{plant.code}: {plant.name}")
        false_findings += [f"healthy {plant.code} ({plant.name}): {one.code}" for one in plant.run(False)]
        on_progress(done + 1, total)
    for done, (name, run) in enumerate(setups.items()):
        false_findings += [f"set-up {name!r}: {one.code} {dict(one.where)}" for one in run()]
        on_progress(len(plants) + done + 1, total)
    return SelfTest(
        num_planted=len(plants),
        num_caught=len(plants) - len(missed),
        missed=tuple(missed),
        false_findings=tuple(false_findings),
        kinds_without_fault=tuple(sorted(KINDS.keys() - {plant.code for plant in plants})),
        num_clean=len(setups),
    )
