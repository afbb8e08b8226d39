"""Whatever is fed to our parsers is read, or refused in one clear line. `fuzz.py` does the same with many more."""

from pathlib import Path

import pytest
from fuzz import tried
from mutation import inputs
from parsers import parsers
from rest import rest

NUM_INPUTS = 400


def assert_no_crash(parser, seed):
    row = tried(parser, inputs(seed, parser.seeds, NUM_INPUTS))
    assert not row["kinds_of_crash"], row
    assert row["inputs"] == NUM_INPUTS


@pytest.mark.parametrize("number", range(12))
def test_what_is_nearly_valid_is_read_or_refused_in_one_clear_line(tmp_path: Path, number: int) -> None:
    found = parsers(tmp_path)
    assert len(found) == 12
    assert_no_crash(found[number], seed=7)


def test_the_seeds_are_read_or_refused_as_they_stand(tmp_path: Path) -> None:
    for parser in parsers(tmp_path):
        row = tried(parser, parser.seeds)
        assert not row["kinds_of_crash"], row
        assert row["read"] >= 1, row


def test_requests_in_the_raw_get_an_answer_that_blames_the_right_side(tmp_path: Path) -> None:
    with rest(tmp_path) as parser:
        assert_no_crash(parser, seed=7)
        assert tried(parser, parser.seeds)["read"] >= 3
