"""The import contracts hold on the tree, and fail where one is broken."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# Libraries that any module may use where its part installs them; each with its reason.
FREE = {
    "orjson": "JSON, faster than the json module; no state, no I/O",
    "numpy": "arrays, no I/O",
    "pydantic": "types of messages, answers and settings",
    "pydantic_core": "types of pydantic's own schemas",
    "click": "command lines",
    "rich": "text on a terminal",
    "torch": "the sdk and the localizer are about it; kept out of the other parts by a contract",
}


def lint_imports(folder: Path):
    """Run the contracts of `folder` on the packages in it, not on those installed."""
    sources = [str(path) for path in sorted(folder.glob("**/src")) if ".venv" not in path.parts]
    return subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def copy(repository: Path, distributions, tmp_path: Path) -> Path:
    shutil.copy(repository / "pyproject.toml", tmp_path)
    for name, folder in distributions.items():
        shutil.copytree(folder / "src", tmp_path / name / "src", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture(scope="session")
def contracts(repository: Path):
    return tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_all_contracts_hold(copy: Path):
    result = lint_imports(copy)
    assert result.returncode == 0, result.stdout


RULES = "proto/src/gradloc_proto/rules/judgement.py"
BREACHES = {
    "detector imports torch": ("services/detector/src/gradloc_detector/fold.py", "import torch", "torch"),
    "detector imports Ray": ("services/detector/src/gradloc_detector/dispatch.py", "import ray", "ray"),
    "detector imports the sdk": ("services/detector/src/gradloc_detector/plan.py", "import gradloc", "gradloc"),
    "detector imports the localizer": (
        "services/detector/src/gradloc_detector/plan.py",
        "import gradloc_localizer",
        "gradloc_localizer",
    ),
    "sdk imports a service": ("sdk/src/gradloc/layers.py", "import gradloc_reporter", "gradloc_reporter"),
    "sdk imports Ray": ("sdk/src/gradloc/layers.py", "import ray", "ray"),
    "proto imports the sdk": ("proto/src/gradloc_proto/streams.py", "import gradloc", "gradloc"),
    "a rule reads the clock": (RULES, "import time", "time"),
    "a rule reads a file": (RULES, "from pathlib import Path", "pathlib"),
    "the fold reads the clock": ("services/detector/src/gradloc_detector/fold.py", "import time", "time"),
    "the fold calls Redis": (
        "services/detector/src/gradloc_detector/fold.py",
        "from gradloc_proto import redis_bus",
        "redis_bus",
    ),
    "a second door to Redis": ("services/detector/src/gradloc_detector/service.py", "import redis", "redis"),
    "a second door to HTTP": ("services/detector/src/gradloc_detector/service.py", "import httpx", "httpx"),
    "a second door to the store": ("sdk/src/gradloc/layers.py", "import fsspec", "fsspec"),
    "a second door to the database": (
        "services/reporter/src/gradloc_reporter/__init__.py",
        "import sqlalchemy",
        "sqlalchemy",
    ),
    "messages know a bus": ("proto/src/gradloc_proto/messages.py", "import gradloc_proto.bus", "gradloc_proto.bus"),
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_fails(name, copy: Path):
    path, line, named = BREACHES[name]
    source = copy / path
    source.write_text(source.read_text() + f"\n{line}\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout
    assert "BROKEN" in result.stdout
    assert named in result.stdout.split("Broken contracts")[1]


def test_a_new_module_must_be_given_a_place(copy: Path):
    (copy / "proto/src/gradloc_proto/newcomer.py").write_text('"""A module nobody placed."""\n')
    result = lint_imports(copy)
    assert result.returncode == 1
    assert "newcomer" in result.stdout


def test_make_check_runs_the_contracts(repository: Path):
    makefile = (repository / "Makefile").read_text()
    recipe = makefile.split("\ncheck:", 1)[1].split("\n\n", 1)[0]
    assert [tool for tool in ("ruff check", "ruff format --check", "mypy", "lint-imports") if tool not in recipe] == []


def test_every_library_has_a_door_or_is_free(modules, contracts):
    behind_doors = {
        library
        for contract in contracts
        if contract["name"].startswith("Door: ")
        for library in contract["forbidden_modules"]
    }
    imported: dict[str, set[str]] = {}
    for path, text in modules.items():
        for node in ast.walk(ast.parse(text)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names and not top.startswith("gradloc"):
                    imported.setdefault(top, set()).add(str(path))
    without = {
        library: sorted(paths) for library, paths in imported.items() if library not in behind_doors | FREE.keys()
    }
    assert without == {}
    assert not behind_doors & FREE.keys()
