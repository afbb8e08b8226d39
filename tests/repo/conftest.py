"""The repository as its users see it: the files that git knows, and those it would add."""

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = ("proto", "sdk", "services/detector", "services/localizer", "services/reporter")


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def files(repository: Path) -> list[Path]:
    """Paths relative to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=repository,
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout.decode()
    found = [Path(name) for name in listed.split("\0") if name and (repository / name).is_file()]
    assert found, "git knows no files here"
    return found


@pytest.fixture(scope="session")
def texts(repository: Path, files: list[Path]) -> dict[Path, str]:
    """Contents of all files that are text."""
    found = {}
    for path in files:
        try:
            found[path] = (repository / path).read_text()
        except UnicodeDecodeError:
            continue
    return found


@pytest.fixture(scope="session")
def modules(texts: dict[Path, str]) -> dict[Path, str]:
    """Sources of the five packages."""
    return {path: text for path, text in texts.items() if path.suffix == ".py" and "src" in path.parts}


@pytest.fixture(scope="session")
def distributions(repository: Path) -> dict[str, Path]:
    """Folder of each distribution by its name in the tree."""
    return {name: repository / name for name in DISTRIBUTIONS}
