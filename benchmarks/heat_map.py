"""Claim: the page of an incident renders the heat map of a sequence of 16,384 tokens in under 1 s.

A reporter and a Chromium of its own. Time runs from the click on (the browser's own clock, so that asking,
answering, parsing and layout are all in it) until the frame after the one in which the whole sequence is in
the page and the culprit's token, in the middle of it, is in view. Medians and maxima over fresh windows.
"""

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from detection.provenance import commit
from playwright.sync_api import Browser, sync_playwright
from reporting.history import an_incident

from gradloc_proto import messages as m
from gradloc_proto import streams
from gradloc_proto.codec import encode
from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter, Settings

SEED = 0
RUN = "long-answers"
READY_S = 60.0
# Looks at every frame; what it finds was laid out in that frame and is painted before the next one begins.
WATCH = """
(() => {
  const look = () => {
    const box = document.querySelector(".tokens"), token = document.querySelector(".tok.culprit");
    const inside = () => {
      const outer = box.getBoundingClientRect(), inner = token.getBoundingClientRect();
      return inner.top >= outer.top && inner.bottom <= outer.bottom;
    };
    if (document.readyState !== "loading" && box && token && inside()) {
      requestAnimationFrame(() => { window.paintedAt = performance.now(); });
    } else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})();
"""


def messages(num_tokens: int) -> list[m.Message]:
    """An incident whose culprit is in the middle of a long sequence, every token of it with a share."""
    dice = random.Random(SEED)
    told = an_incident(RUN, 1_000, time.time(), dice)
    view = m.SequenceView(
        rank=0,
        micro_batch=0,
        sequence=2,
        first_position=0,
        token_ids=tuple(dice.randrange(50_000) for _ in range(num_tokens)),
        token_texts=tuple(f" word{number}" for number in range(num_tokens)),
        shares=tuple(dice.uniform(-0.2, 1.0) for _ in range(num_tokens)),
    )
    found: list[m.Message] = []
    for message in told:
        if isinstance(message, m.LocalizationFinished):
            first = message.finding.culprits[0].model_copy(
                update={"rank": 0, "micro_batch": 0, "sequence": 2, "token": num_tokens // 2}
            )
            finding = message.finding.model_copy(update={"culprits": (first,), "sequence_view": view})
            found.append(message.model_copy(update={"finding": finding}))
        elif not isinstance(message, m.IncidentResolved):
            found.append(message)
    return found


def publish(bus: MemoryBus, told: list[m.Message]) -> str:
    bus.append(streams.REGISTRY, [encode(m.RunStarted(run_id=RUN, ts=told[0].ts))], length_max=10)
    for message in told:
        name: streams.StreamName = "findings" if isinstance(message, m.LocalizationMessage) else "incidents"
        name = "control" if isinstance(message, m.JobReported) else name
        bus.append(streams.stream(RUN, name), [encode(message)], length_max=100)
    return str(told[0].incident_id)  # type: ignore[attr-defined]


def page_of(address: str, words: str) -> bytes:
    """The page as soon as it holds `words`."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(address, timeout=READY_S) as answer:
                body: bytes = answer.read()
            if words.encode() in body:
                return body
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"{address} did not show {words} within {READY_S:g} s")


def one(browser: Browser, address: str, width: int) -> dict[str, float]:
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.add_init_script(WATCH)
    page.goto(address, wait_until="commit")
    page.wait_for_function("() => window.paintedAt !== undefined")
    found: dict[str, float] = page.evaluate(
        "(() => { const page = performance.getEntriesByType('navigation')[0]; return {"
        " painted_s: window.paintedAt / 1000, answered_s: page.responseEnd / 1000,"
        " tokens: document.querySelectorAll('.tok').length }; })()"
    )
    page.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="3 repeats")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("benchmarks/heat_map.py: no Chromium on the PATH; make services installs one")
    bus, repeats = MemoryBus(), 3 if options.quick else options.repeats
    name = publish(bus, messages(options.tokens))
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="gradloc-heat-map-") as folder:
        settings = Settings(database=f"sqlite:///{Path(folder)}/r.sqlite", port=0)
        with Reporter(bus, settings) as reporter, sync_playwright() as playwright:
            address = f"{reporter.url}/incidents/{name}"
            body = page_of(address, f"token-{options.tokens // 2}")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            one(browser, address, 1180)  # the browser's own start is not the page's
            for _ in range(repeats):
                for kind, width in (("desk", 1180), ("phone", 375)):
                    found.setdefault(kind, []).append(one(browser, address, width))
            browser.close()
    assert all(each["tokens"] == options.tokens for times in found.values() for each in times)
    result: dict[str, Any] = {
        "benchmark": "heat_map",
        "seed": SEED,
        "commit": commit(),
        "tokens": options.tokens,
        "page_bytes": len(body),
        "repeats": repeats,
    }
    for kind, times in found.items():
        for key in ("answered_s", "painted_s"):
            values = [each[key] for each in times]
            result[f"{kind}_{key.removesuffix('_s')}_p50_s"] = statistics.median(values)
            result[f"{kind}_{key.removesuffix('_s')}_max_s"] = max(values)
    sys.stdout.write((json.dumps(result) if options.json else json.dumps(result, indent=2)) + "\n")


if __name__ == "__main__":
    main()
