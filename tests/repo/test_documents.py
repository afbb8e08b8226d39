"""The documents tell what is there: every folder, every command, every message."""

import re
import subprocess
from pathlib import Path

import pytest

from gradloc_proto import streams
from gradloc_proto.messages import MESSAGE_TYPES, SCHEMA_VERSION, VERDICTS

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "STYLE.md",
    "docs/design.md",
    "docs/protocol.md",
    "docs/algorithm.md",
    "docs/reliability.md",
)


@pytest.fixture(scope="module")
def targets(repository: Path):
    """Target to description."""
    makefile = (repository / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    described = dict(re.findall(r"^([a-z-]+):[^#\n]*## (.+)$", makefile, re.MULTILINE))
    assert set(phony[1].split()) == described.keys(), "a target without a description, or one that is not phony"
    return described


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_document_is_there(name, repository: Path):
    assert len((repository / name).read_text()) > 500


def test_the_licence_is_whole(repository: Path):
    text = (repository / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "APPENDIX: How to apply the Apache License" in text


def test_the_readme_names_every_top_level_folder_and_document(repository: Path, files):
    readme = (repository / "README.md").read_text()
    folders = {path.parts[0] + "/" for path in files if len(path.parts) > 1 and not path.parts[0].startswith(".")}
    documents = {path.name for path in files if len(path.parts) == 1 and path.suffix in {".md", ""}} - {
        "README.md",
        ".gitignore",
    }
    assert sorted(name for name in folders | documents if f"`{name}`" not in readme) == []


def test_the_readme_names_only_folders_that_exist(repository: Path):
    readme = (repository / "README.md").read_text()
    named = re.findall(r"^\| `([a-z0-9_./-]+/)` \|", readme, re.MULTILINE)
    assert len(named) >= 7
    assert [name for name in named if not (repository / name).is_dir()] == []


def test_every_make_target_is_documented(repository: Path, targets):
    text = (repository / "CONTRIBUTING.md").read_text()
    assert [name for name in targets if f"`make {name}`" not in text] == []


def test_documents_name_only_make_targets_that_exist(repository: Path, targets):
    for name in DOCUMENTS:
        used = set(re.findall(r"`make ([a-z-]+)", (repository / name).read_text()))
        assert used <= targets.keys(), name


def test_make_without_a_target_lists_them(repository: Path, targets):
    listed = subprocess.run(
        ["make", "--no-print-directory"], cwd=repository, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert [name for name in targets if f"make {name}" not in listed] == []


def test_continuous_integration_does_what_people_do(repository: Path):
    script = repository / ".ci" / "run"
    assert "set -euo pipefail" in script.read_text()
    assert "make test" in script.read_text().splitlines()
    assert script.stat().st_mode & 0o111


def test_the_protocol_has_every_message_stream_and_verdict(repository: Path):
    text = (repository / "docs/protocol.md").read_text()
    assert [message.__name__ for message in MESSAGE_TYPES if f"`{message.__name__}`" not in text] == []
    assert [name for name in streams.STREAM_NAMES if f"`{name}`" not in text] == []
    assert [name for name in VERDICTS if f"`{name}`" not in text] == []
    assert f"`{SCHEMA_VERSION}`" in text


def test_the_changelog_is_one_that_people_keep(repository: Path):
    text = (repository / "CHANGELOG.md").read_text()
    assert "Keep a Changelog" in text
    assert re.search(r"^## \[Unreleased\]", text, re.MULTILINE)
