"""Command line of the schemas: write them and sample bytes, or say whether a folder still holds them."""

import argparse
import sys
from pathlib import Path

from gradloc_proto import codec, schema
from gradloc_proto.messages import SCHEMA_VERSION, type_name
from gradloc_proto.schema.samples import samples


def main(arguments: list[str]) -> int:
    """Exit code: 0, or 1 where `--check` found a difference (one line each)."""
    parser = argparse.ArgumentParser(prog="python -m gradloc_proto.schema", description=schema.__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FOLDER", help="write the schemas into FOLDER")
    action.add_argument("--check", type=Path, metavar="FOLDER", help="compare the schemas with those in FOLDER")
    action.add_argument("--samples", type=Path, metavar="FOLDER", help="write one message of each type into FOLDER")
    options = parser.parse_args(arguments)
    if options.write is not None:
        schema.write(options.write)
        return 0
    if options.samples is not None:
        folder = options.samples / SCHEMA_VERSION
        folder.mkdir(parents=True, exist_ok=True)
        for message in samples():
            (folder / f"{type_name(type(message))}.json").write_bytes(codec.encode(message))
        return 0
    differences = schema.drift(options.check)
    sys.stdout.writelines(f"{line}\n" for line in differences)
    if differences:
        sys.stdout.write("the schemas are not those of the messages: run `make schema`\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
