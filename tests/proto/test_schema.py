"""The generated schemas and the sample bytes of each released version."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import gradloc_proto.schema
from gradloc_proto.codec import decode, encode
from gradloc_proto.messages import MESSAGE_TYPES, SCHEMA_VERSION, type_name
from gradloc_proto.schema import drift, schemas, write
from gradloc_proto.schema.samples import sample

SCHEMAS = Path(gradloc_proto.schema.__file__).parent
GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(folder.name for folder in GOLDEN.iterdir())


def run_schema(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "gradloc_proto.schema", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class TestDrift:
    def test_the_schemas_in_the_tree_are_those_of_the_messages(self):
        assert drift(SCHEMAS) == []

    def test_a_missing_an_altered_and_a_left_over_schema_are_named(self, tmp_path):
        write(tmp_path)
        assert drift(tmp_path) == []
        (tmp_path / "tick.json").unlink()
        (tmp_path / "run_ended.json").write_text("{}")
        (tmp_path / "of_old.json").write_text("{}")
        assert drift(tmp_path) == [
            "tick.json: missing",
            "of_old.json: no such message any more",
            "run_ended.json: differs",
        ]
        result = run_schema("--check", str(tmp_path))
        assert result.returncode == 1
        assert "make schema" in result.stdout
        write(tmp_path)
        assert drift(tmp_path) == []

    def test_the_command_writes_and_checks(self, tmp_path):
        assert run_schema("--write", str(tmp_path)).returncode == 0
        assert run_schema("--check", str(tmp_path)).returncode == 0
        assert {path.name for path in tmp_path.iterdir()} == set(schemas())

    @pytest.mark.parametrize("arguments", [(), ("--write",), ("--check", "a", "--write", "b"), ("--nonsense",)])
    def test_misuse_ends_with_exit_code_2(self, arguments):
        assert run_schema(*arguments).returncode == 2


@pytest.mark.parametrize("message_type", MESSAGE_TYPES, ids=type_name)
class TestSchema:
    def validator(self, message_type):
        schema = json.loads((SCHEMAS / f"{type_name(message_type)}.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        return jsonschema.Draft202012Validator(schema)

    def test_it_accepts_what_is_sent(self, message_type):
        self.validator(message_type).validate(json.loads(encode(sample(message_type))))

    def test_it_refuses_another_type_or_none(self, message_type):
        data = json.loads(encode(sample(message_type)))
        validator = self.validator(message_type)
        assert not validator.is_valid({**data, "type": "another"})
        assert not validator.is_valid({key: value for key, value in data.items() if key != "type"})

    def test_it_refuses_a_run_id_that_is_none(self, message_type):
        data = json.loads(encode(sample(message_type)))
        assert not self.validator(message_type).is_valid({**data, "run_id": "a/b"})


@pytest.mark.parametrize("version", VERSIONS)
class TestGolden:
    """Bytes as released: whoever reads this major version reads them for ever."""

    def files(self, version):
        return sorted((GOLDEN / version).glob("*.json"))

    def test_all_are_read_and_say_the_same_again(self, version):
        for path in self.files(version):
            data = json.loads(path.read_bytes())
            message = decode(path.read_bytes())
            assert type_name(type(message)) == path.stem
            again = json.loads(encode(message))
            assert contains(again, data), path

    def test_some_numbers_are_not_finite(self, version):
        text = "".join(path.read_text() for path in self.files(version))
        assert all(f'"{number}"' in text for number in ("NaN", "Infinity", "-Infinity"))


def contains(larger, smaller):
    """Whether `larger` holds all of `smaller`: a later version may add, never drop or alter."""
    if isinstance(smaller, dict):
        return isinstance(larger, dict) and all(
            key in larger and contains(larger[key], smaller[key]) for key in smaller
        )
    if isinstance(smaller, list):
        return len(larger) == len(smaller) and all(map(contains, larger, smaller))
    return bool(larger == smaller)


def test_the_current_version_has_golden_bytes_of_every_message_with_every_field():
    """Fails when a field was added: raise the minor version once the last one is released, then `make schema`."""
    for message_type in MESSAGE_TYPES:
        path = GOLDEN / SCHEMA_VERSION / f"{type_name(message_type)}.json"
        assert path.exists(), f"{path.name} is missing: run `make schema`"
        assert path.read_bytes() == encode(sample(message_type)), f"{path.name} is behind: see CONTRIBUTING.md"
