"""docs/checks.md says what the code does."""

import re
from pathlib import Path

from gradloc.checks.kinds import KINDS
from gradloc.checks.triage import Branch

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "checks.md").read_text()


def test_the_table_of_kinds_is_the_registry():
    rows = re.findall(r"^\| `([a-z]+\.[a-z-]+)` \| (\w+) \| (.+) \| (.+) \|$", TEXT, re.MULTILINE)
    assert rows == [(kind.code, kind.severity, kind.meaning, kind.todo) for kind in KINDS.values()]


def test_every_branch_of_triage_is_told():
    branches = Branch.__args__
    assert [one for one in branches if one.replace("-mismatch", "-") not in TEXT and one not in TEXT] == []
