"""Where the cases distilled from bug reports lie, and the command."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradloc.command import gradloc as command

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def cases_file() -> Path:
    folder = Path(os.environ.get("GRADLOC_CASES", REPOSITORY.parent / "shared" / "cases"))
    path = folder / "cases.json"
    if not path.is_file():
        pytest.skip(f"no {path}: GRADLOC_CASES names the folder of recorded cases, which are not in this repository")
    return path


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def gradloc() -> Callable[..., Outcome]:
    """The command within this process: starting Python and torch anew takes seconds."""

    def run(*arguments: object) -> Outcome:
        result = CliRunner().invoke(command, [str(one) for one in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run
