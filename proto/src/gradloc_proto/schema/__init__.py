"""JSON Schemas of every message, for readers that are not written in Python.

Generated from the message types, one <type>.json beside this file; a test fails when they drift.
`python -m gradloc_proto.schema --write FOLDER` writes them, `--check FOLDER` compares.
"""

import json
from pathlib import Path

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import FloatSchema

from gradloc_proto.messages import MESSAGE_TYPES, SCHEMA_VERSION, type_name

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NOT_FINITE = {"enum": ["NaN", "Infinity", "-Infinity"]}


class _WireSchema(GenerateJsonSchema):
    """Schema of what stands in a stream: a number that is not finite is one of three strings."""

    def float_schema(self, schema: FloatSchema) -> JsonSchemaValue:
        number = super().float_schema(schema)
        return number if schema.get("allow_inf_nan") is False else {"anyOf": [number, dict(_NOT_FINITE)]}


def schemas() -> dict[str, str]:
    """File name to text of the schema of each message."""
    texts = {}
    for message_type in MESSAGE_TYPES:
        schema = message_type.model_json_schema(schema_generator=_WireSchema)
        # Readers dispatch on the type's name: it has a default in Python and is never left out on the wire.
        schema["required"] = sorted({*schema["required"], "type", "schema_version"})
        schema["$schema"] = _DIALECT
        schema["$comment"] = f"gradloc messages, version {SCHEMA_VERSION}; generated, do not edit"
        texts[f"{type_name(message_type)}.json"] = json.dumps(schema, indent=2, sort_keys=True) + "\n"
    return texts


def drift(folder: Path) -> list[str]:
    """One line for each file of `folder` that is missing, altered or left over."""
    expected = schemas()
    found = {path.name: path.read_text() for path in folder.glob("*.json")}
    return [
        *(f"{name}: missing" for name in sorted(expected.keys() - found.keys())),
        *(f"{name}: no such message any more" for name in sorted(found.keys() - expected.keys())),
        *(f"{name}: differs" for name in sorted(expected.keys() & found.keys()) if expected[name] != found[name]),
    ]


def write(folder: Path) -> None:
    """Make `folder` hold exactly the generated schemas."""
    expected = schemas()
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.json"):
        if path.name not in expected:
            path.unlink()
    for name, text in expected.items():
        (folder / name).write_text(text)
