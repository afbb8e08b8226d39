"""Which code a result is of."""

import subprocess
from pathlib import Path


def commit() -> str:
    """The commit that the scripts lie in, "-dirty" where something was changed since; "" outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    folder = Path(__file__).parent
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout.strip()
