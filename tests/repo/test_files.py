"""What may stand in the files of this repository, and where files may stand."""

import re
from pathlib import Path

import pytest

# Written in pieces, so that this file does not hold what it looks for.
FORBIDDEN = {
    "a path of somebody's machine": r"(?<![\w.-])/(work|root|farm|tmp|home/\w+|Users/\w+|opt/wheels)/",
    "the host of a package registry": "|".join(
        re.escape(".".join(host))
        for host in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("pytorch", "org/whl"),
            ("npmjs", "org"),
            ("debian", "org"),
            ("anaconda", "org"),
            ("proxy", "golang", "org"),
        )
    ),
    "an index of packages": r"--(extra-)?index[-]url|--find[-]links|PIP_" + "INDEX",
    "a note to do something later": r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
    "a hash of a package": r"--ha" + r"sh=sha256:",
    "a key or token": r"xox[bp]-\d{6,}|AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE" + " KEY",
}
# Names that say nothing of what a module holds.
EMPTY_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "manager", "misc", "base", "lib"}


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_no_file_names(kind, texts):
    pattern = re.compile(FORBIDDEN[kind])
    found = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("a path of somebody's machine", "see /wo" + "rk/main/x"),
        ("a path of somebody's machine", 'open("/tm' + 'p/x")'),
        ("the host of a package registry", "https://py" + "pi.org/simple"),
        ("a note to do something later", "# TO" + "DO: later"),
        ("an index of packages", "pip install --extra-" + "index-url x"),
    ],
)
def test_the_patterns_find_what_they_are_for(kind, line):
    assert re.search(FORBIDDEN[kind], line)


@pytest.mark.parametrize(
    "line", ["a / b", "services/detector/" + "work/", "file:///data/x", "https://example.org/" + "tmp/x"]
)
def test_the_path_pattern_leaves_other_text_alone(line):
    assert not re.search(FORBIDDEN["a path of somebody's machine"], line)


def test_no_module_is_named_for_nothing(modules, texts):
    named = [path for path in texts if path.suffix == ".py" and path.stem in EMPTY_NAMES]
    named += [path for path in modules if EMPTY_NAMES & set(path.parts)]
    assert named == []


def test_packages_stand_only_under_src(files):
    """A top-level package `proto` shadows proto-plus, and `services` collides with trainers' own folders."""
    stray = [path for path in files if path.name == "__init__.py" and "src" not in path.parts]
    stray += [
        path
        for path in files
        if path.name == "__init__.py" and path.parts[path.parts.index("src") + 1 :] == ("__init__.py",)
    ]
    assert stray == []


def test_every_package_says_that_it_is_typed(distributions):
    for name, folder in distributions.items():
        packages = [path for path in (folder / "src").iterdir() if (path / "__init__.py").exists()]
        assert len(packages) == 1, name
        assert (packages[0] / "py.typed").exists(), name


def test_every_module_opens_by_saying_what_it_does(modules):
    silent = [path for path, text in modules.items() if text.strip() and not re.match(r'(#![^\n]*\n)?r?"""\S', text)]
    assert silent == []


UNSAFE = re.compile(
    r"\bpickle\.load|\btorch\.load\(|trust_remote_code\s*=\s*True|(?<![\w.])(eval|exec)\(|\byaml\.load\(|\bshell\s*=\s*True"
)


def test_nothing_read_is_executed(modules):
    """Streams and stores are not trusted: docs/design.md, "Nothing is unpickled"."""
    found = [
        f"{path}:{number}: {line.strip()[:100]}"
        for path, text in modules.items()
        for number, line in enumerate(text.splitlines(), 1)
        if UNSAFE.search(line)
    ]
    assert found == []


def test_tests_patch_no_internals(texts):
    patching = re.compile(r"unittest[.]mock|monkeypatch[.]setattr|from[ ]mock import")
    found = [path for path, text in texts.items() if path.parts[0] == "tests" and patching.search(text)]
    assert found == []


def test_links_between_documents_lead_somewhere(repository: Path, texts):
    broken = []
    for path, text in texts.items():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if "://" not in target and not (repository / path.parent / target).exists():
                broken.append(f"{path}: {target}")
    assert broken == []
