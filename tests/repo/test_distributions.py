"""Five distributions, one version, one pinned set of everything they need."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import gradloc_proto

PYTHON_MIN = ">=3.11"


@pytest.fixture(scope="module")
def projects(distributions):
    return {
        name: tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for name, folder in distributions.items()
    }


@pytest.fixture(scope="module")
def pinned(repository: Path):
    lines = (repository / "constraints.txt").read_text().split()
    return dict(line.split("==") for line in lines)


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(project):
    """(name, specifier) of everything a distribution asks for, extras too."""
    lines = [
        *project["dependencies"],
        *(line for lines in project.get("optional-dependencies", {}).values() for line in lines),
    ]
    for line in lines:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(\[[^]]*\])?(.*)", line)
        assert match, line
        yield normal(match[1]), match[3].strip()


def test_all_have_one_version(projects):
    assert {project["version"] for project in projects.values()} == {gradloc_proto.__version__}


def test_folder_distribution_and_import_are_named_alike(projects, distributions):
    for folder, project in projects.items():
        expected = "gradloc" if folder == "sdk" else "gradloc-" + Path(folder).name
        assert project["name"] == expected
        assert (distributions[folder] / "src" / expected.replace("-", "_") / "__init__.py").exists()


def test_they_ask_for_each_other_by_the_same_version(projects):
    version = gradloc_proto.__version__
    asked = [
        (name, spec)
        for project in projects.values()
        for name, spec in requirements(project)
        if name.startswith("gradloc")
    ]
    assert asked
    assert {spec for _, spec in asked} == {f"=={version}"}


def test_all_need_the_same_python_and_have_the_same_licence(projects):
    assert {project["requires-python"] for project in projects.values()} == {PYTHON_MIN}
    assert {project["license"] for project in projects.values()} == {"Apache-2.0"}


def test_the_trainer_installs_no_service(projects):
    for folder in ("proto", "sdk"):
        names = {normal(re.split(r"[<>=\[~! ]", line)[0]) for line in projects[folder]["dependencies"]}
        assert not names & {"gradloc-detector", "gradloc-localizer", "gradloc-reporter", "ray", "fastapi", "sqlalchemy"}


@pytest.mark.parametrize("folder", ["services/detector", "services/reporter", "proto"])
def test_light_parts_install_neither_torch_nor_ray(folder, projects):
    assert not {name for name, _ in requirements(projects[folder])} & {
        "gradloc",
        "torch",
        "ray",
        "transformers",
        "safetensors",
    }


def test_everything_asked_for_is_pinned(projects, pinned, repository: Path):
    names = {normal(name) for name in pinned}
    asked = {
        name for project in projects.values() for name, _ in requirements(project) if not name.startswith("gradloc")
    }
    tools = [
        line
        for line in (repository / "requirements-dev.txt").read_text().splitlines()
        if line and not line.startswith("-")
    ]
    asked |= {normal(line.split("[")[0]) for line in tools}
    assert asked <= names


def test_constraints_are_versions_and_nothing_else(repository: Path):
    lines = (repository / "constraints.txt").read_text().splitlines()
    names = [normal(line.split("==")[0]) for line in lines]
    assert len(set(names)) == len(names)
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)] == []


def test_one_command_installs_all_five(repository: Path, projects):
    text = (repository / "requirements-dev.txt").read_text()
    assert "-c constraints.txt" in text
    for folder in projects:
        assert re.search(rf"^-e \./{folder}(\[[a-z,]+\])?$", text, re.MULTILINE), folder


def test_every_command_that_is_announced_exists(projects):
    announced = {
        name: target
        for project in projects.values()
        for name, target in [
            *project.get("scripts", {}).items(),
            *project.get("entry-points", {}).get("gradloc.commands", {}).items(),
        ]
    }
    assert {"gradloc", "detector", "localize", "reporter"} <= announced.keys()
    for target in announced.values():
        module, _, attribute = target.partition(":")
        assert callable(getattr(import_module(module), attribute)), target


def test_the_public_api_is_a_list_and_complete():
    gradloc = import_module("gradloc")
    assert gradloc.__all__
    assert [name for name in gradloc.__all__ if not hasattr(gradloc, name)] == []
    assert "watch" in gradloc.__all__
