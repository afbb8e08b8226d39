"""How long the HTML report of a long sequence takes to open.

    python benchmarks/report_page.py --json            16,384 tokens, 24 layers, 7 times in Chromium; a minute
    python benchmarks/report_page.py --json --quick    once
    python benchmarks/report_page.py --picture FILE    what was seen, as a PNG

The finding is made up (every token has a share, so that every one is coloured); the page is the one that `gradloc
localize --html` writes. Each time a fresh browser context opens the file; opened means: loaded, laid out, and the first
screen painted (two animation frames after `load`). Beside it the same for a page of one word, which is what the
browser itself costs on this machine at this time; CPU seconds (of the thread that parses, lays out and paints) do not
depend on who else is there.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gradloc_localizer.html_report import html_report
from gradloc_localizer.picture import browser as chromium
from gradloc_proto.messages import Certificate, Cost, Culprit, Fidelity, Finding, Profile, SequenceView

NUM_TOKENS, NUM_LAYERS, NUM_TIMES = 16_384, 24, 7
TIMEOUT_MS = 180_000  # a machine that is busy with other things
WORDS = ("So", " the", " answer", " is", " 3", " +", " 4", " =", " 7", ".", "\n", " therefore", " carry", " one")
PAINTED = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"


def finding_of(num_tokens: int, num_layers: int) -> Finding:
    culprit = num_tokens - 7
    shares = tuple(math.exp(-abs(at - culprit) / 2_000) * (-0.2) ** (at % 2) for at in range(num_tokens))
    layers = tuple(f"layers.{layer}.mlp" for layer in range(num_layers))
    return Finding(
        verdict="token",
        strategy="attribution",
        step=1204,
        summary="token: made up",
        culprits=(Culprit(rank=3, micro_batch=0, sequence=2, token=culprit, share=0.9),),
        certificate=Certificate(grad_norm=640.0, norm_without=0.43, limit=1.6, holds=True, num_culprits=1),
        fidelity=Fidelity(reported_norm=640.0, replayed_norm=640.0, rel_error=0.0, tolerance=1e-3, reproduced=True),
        healthy_norm=0.41,
        profile=Profile(
            layers=layers,
            first_position=0,
            values=tuple(tuple(share / (1 + layer) for share in shares) for layer in range(num_layers)),
        ),
        sequence_view=SequenceView(
            rank=3,
            micro_batch=0,
            sequence=2,
            first_position=0,
            token_ids=tuple(range(num_tokens)),
            token_texts=tuple(WORDS[at % len(WORDS)] for at in range(num_tokens)),
            shares=shares,
        ),
        cost=Cost(steps=1.7),
    )


def opened(browser: Any, page: Path, picture: Path | None = None) -> tuple[float, float]:
    """Seconds from asking for the page to its first screen, and CPU seconds of the page's own thread."""
    context = browser.new_context(viewport={"width": 1120, "height": 900})
    try:
        tab = context.new_page()
        inside = context.new_cdp_session(tab)
        inside.send("Performance.enable", {"timeDomain": "threadTicks"})
        started = time.perf_counter()
        tab.goto(page.as_uri(), wait_until="load", timeout=TIMEOUT_MS)
        tab.evaluate(PAINTED)
        seconds = time.perf_counter() - started
        metrics = {one["name"]: one["value"] for one in inside.send("Performance.getMetrics")["metrics"]}
        if picture is not None:
            tab.screenshot(path=picture)
        return seconds, metrics["TaskDuration"]
    finally:
        context.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line for machines")
    parser.add_argument("--quick", action="store_true", help="once instead of several times")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help=f"of the sequence (default {NUM_TOKENS})")
    parser.add_argument("--picture", type=Path, help="write what was seen there")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="gradloc-page-") as folder, sync_playwright() as playwright:
        page, empty = Path(folder) / "page.html", Path(folder) / "empty.html"
        made = time.perf_counter()
        page.write_text(html_report(finding_of(arguments.tokens, NUM_LAYERS)))
        made = time.perf_counter() - made
        empty.write_text("<!doctype html><title>one word</title>word")
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        num_times = 1 if arguments.quick else NUM_TIMES
        pairs = [(opened(browser, page, arguments.picture), opened(browser, empty)) for _ in range(num_times)]
        version = browser.version
        browser.close()
        result = {
            "tokens": arguments.tokens,
            "layers": NUM_LAYERS,
            "page_mb": round(page.stat().st_size / 1e6, 2),
            "seconds_to_write": round(made, 2),
            "seconds_to_open": [round(own[0], 3) for own, _ in pairs],
            "seconds_to_open_median": round(statistics.median(own[0] for own, _ in pairs), 3),
            "cpu_seconds_median": round(statistics.median(own[1] for own, _ in pairs), 3),
            "seconds_of_an_empty_page_median": round(statistics.median(bare[0] for _, bare in pairs), 3),
            "load": round(os.getloadavg()[0], 1),
            "chromium": version,
            "commit": _commit(),
        }
    sys.stdout.write((json.dumps(result) if arguments.json else json.dumps(result, indent=1)) + "\n")
    return 0


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
