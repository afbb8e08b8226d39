"""Fuzzing: inputs near to valid ones for everything of ours that reads what others wrote.

    python tests/security/fuzz.py --inputs 100000 --seed 1 --json
    python tests/security/fuzz.py --parsers codec manifest --guided     # by atheris, where it is installed

Every input must be read or refused by an error of the parser's own with one clear line. Prints a line a parser and,
with --json, one JSON object; exit code 1 where something else came out. Guided: libFuzzer looks for inputs that reach
new lines of the parser.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mutation import inputs
from parsers import Parser, assert_clear, parsers
from rest import rest

CRASHES_SHOWN_MAX = 20


def tried(parser: Parser, data: Iterable[bytes]) -> dict[str, Any]:
    """Counts of what came out, the kinds of crash with an input of each, and how many reasons differ."""
    counts: collections.Counter[str] = collections.Counter()
    crashes: dict[str, str] = {}
    reasons = set()
    began = time.monotonic()
    for one in data:
        counts["inputs"] += 1
        try:
            try:
                parser.read(one)
            except parser.rejections as error:
                assert_clear(error)
                counts["refused"] += 1
                reasons.add(hashlib.sha256(str(error)[:60].encode(errors="replace")).digest())
            else:
                counts["read"] += 1
        except Exception as error:  # noqa: BLE001 - finding these is what this is for
            counts["crashes"] += 1
            frame = traceback.extract_tb(error.__traceback__)[-1]
            name = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {str(error)[:120]}"
            if len(crashes) < CRASHES_SHOWN_MAX:
                crashes.setdefault(name, one[:400].hex())
    return {
        "parser": parser.name,
        "inputs": counts["inputs"],
        "read": counts["read"],
        "refused": counts["refused"],
        "reasons": len(reasons),
        "crashes": counts["crashes"],
        "kinds_of_crash": crashes,
        "seconds": round(time.monotonic() - began, 1),
    }


def guided(parser: Parser, count: int, seed: int, folder: Path) -> dict[str, Any]:
    """The same by atheris, in a process of its own: libFuzzer ends with it."""
    corpus = folder / f"corpus-{parser.name.replace(' ', '-')}"
    corpus.mkdir()
    for number, one in enumerate(parser.seeds):
        (corpus / str(number)).write_bytes(one)
    command = [sys.executable, str(Path(__file__)), "--guide", parser.name, str(count), str(seed), str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    number = next((line.split()[1] for line in reversed(done.stderr.splitlines()) if line.startswith("Done ")), "0")
    features = [line for line in done.stderr.splitlines() if " ft: " in line]
    return {
        "parser": parser.name,
        "inputs": int(number),
        "crashes": int(done.returncode != 0),
        "kinds_of_crash": {} if done.returncode == 0 else {done.stderr[-2_000:]: ""},
        "features": int(features[-1].split(" ft: ")[1].split()[0]) if features else 0,
    }


def _guide(name: str, count: str, seed: str, corpus: str) -> None:
    import atheris

    packages = ["gradloc", "gradloc_proto", "gradloc_detector"]
    with tempfile.TemporaryDirectory() as made, atheris.instrument_imports(include=packages):
        for module in [one for one in sys.modules if one.startswith(("gradloc", "parsers"))]:
            del sys.modules[module]  # so that they are imported again, with counters in every line
        import parsers as counted

        parser = next(one for one in counted.parsers(Path(made)) if one.name == name)

        def one(data: bytes) -> None:
            try:
                parser.read(data)
            except parser.rejections as error:
                counted.assert_clear(error)

        options = [f"-runs={count}", f"-seed={seed}", "-max_len=20000", "-rss_limit_mb=4096", "-verbosity=1", corpus]
        atheris.Setup([sys.argv[0], *options], one)
        atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="of each parser")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parsers", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--guided", action="store_true", help="by atheris (pip install atheris)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="JSON lines of finished parsers: read, added to")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    known = {}
    if options.resume is not None and options.resume.exists():
        known = {row["parser"]: row for row in map(json.loads, options.resume.read_text().splitlines())}
    rows = []
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        all_of_them = parsers(folder)
        if not options.guided:
            all_of_them.append(stack.enter_context(rest(folder)))
        for one in all_of_them:
            if options.parsers and one.name not in options.parsers:
                continue
            if one.name not in known:
                row = (
                    guided(one, options.inputs, options.seed, folder)
                    if options.guided
                    else tried(one, inputs(options.seed, one.seeds, options.inputs))
                )
                known[one.name] = row | {"seed": options.seed}
                if options.resume is not None:
                    with options.resume.open("a") as lines:
                        lines.write(json.dumps(known[one.name]) + "\n")
            row = known[one.name]
            rows.append(row)
            word = "; ".join(row["kinds_of_crash"]) or "no crash"
            sys.stderr.write(f"{row['parser']}: {row['inputs']:,} inputs, {word}\n")
            sys.stderr.flush()
    if options.json:
        sys.stdout.write(json.dumps({"fuzz": rows}) + "\n")
    sys.exit(1 if any(row["crashes"] for row in rows) else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--guide"]:
        _guide(*sys.argv[2:])
    else:
        main()
