"""Where recorded inputs lie that are no part of this repository."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No test asserts a time: on a machine that is short of one, an example takes as long as it takes.
settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("untimed")

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def cases_file() -> Path:
    """Inputs distilled from bug reports, with the right answers."""
    folder = Path(os.environ.get("GRADLOC_CASES", REPOSITORY.parent / "shared" / "cases"))
    path = folder / "cases.json"
    if not path.is_file():
        pytest.skip(f"no {path}: GRADLOC_CASES names the folder of recorded cases, which are not in this repository")
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The two minutes of the soak first: the other files fill the workers beside it."""
    items.sort(key=lambda item: item.path.name != "test_soak.py")
