"""The command, in this process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from click.testing import CliRunner

from gradloc.command import gradloc as command


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
