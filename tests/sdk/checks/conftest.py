"""Where the cases distilled from bug reports lie, and the command as a process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def cases_file() -> Path:
    folder = Path(os.environ.get("GRADLOC_CASES", REPOSITORY.parent / "shared" / "cases"))
    path = folder / "cases.json"
    if not path.is_file():
        pytest.skip(f"no {path}: GRADLOC_CASES names the folder of recorded cases, which are not in this repository")
    return path


@pytest.fixture
def gradloc() -> Run:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gradloc", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return run
