"""The finding as one page: it needs nothing else, hides nothing, runs nothing, and stays fast when it is long."""

import math
import re
import shutil

import pytest
from click.testing import CliRunner

from gradloc_localizer.command import localize
from gradloc_localizer.html_report import html_report, png
from gradloc_localizer.picture import WIDTH
from gradloc_proto.messages import Finding

HOSTILE = "<script>document.title='taken'</script>"


@pytest.fixture
def snapshot(trainer, tokenizer_json, tmp_path):
    step = trainer.faulty(trainer.model(), trainer.stale(9.0))
    folder = tmp_path / "run" / "0" / "7"
    step.write(f"file://{folder}", tokenizer_json=tokenizer_json)
    return folder


@pytest.fixture
def chromium():
    """A browser of this test's own."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path is not None, "no Chromium: run `make services`"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def long_finding(num_positions, *, num_layers=24, text="w"):
    """A finding of a long answer, as `localize --html` makes it; every share is different."""
    culprit = max(0, num_positions - 7)
    shares = [math.exp(-abs(position - culprit) / 400) * (-0.2) ** (position % 2) for position in range(num_positions)]
    return Finding.model_validate(
        {
            "verdict": "token",
            "strategy": "attribution",
            "step": 1204,
            "summary": f"token: {text}",
            "culprits": [
                {
                    "rank": 3, "micro_batch": 0, "sequence": 2, "token": culprit, "share": 0.9, "token_text": text,
                    "uid": text,
                }
            ],
            "share": 0.9,
            "checksum": 1.0003,
            "certificate": {"grad_norm": 640.0, "norm_without": 0.43, "limit": 1.6, "holds": True, "num_culprits": 1},
            "fidelity": {
                "reported_norm": 640.0, "replayed_norm": 640.0, "rel_error": 1e-7, "tolerance": 1e-3,
                "reproduced": True,
            },
            "causes": [{"name": "token-mismatch", "confidence": "high", "summary": text, "evidence": {"ratio": 2.1e5}}],
            "fix": {"name": "TokenClip [0.5, 5]", "norm_after": 0.44, "holds": True},
            "healthy_norm": 0.41,
            "layer_growth": {f"layers.{layer}.mlp": 10.0 ** (layer % 4) for layer in range(num_layers)},
            "profile": {
                "layers": [f"layers.{layer}.mlp" for layer in range(num_layers)],
                "first_position": 0,
                "values": [[share / (1 + layer) for share in shares] for layer in range(num_layers)],
            },
            "sequence_view": {
                "rank": 3, "micro_batch": 0, "sequence": 2, "first_position": 0,
                "token_ids": list(range(num_positions)),
                "token_texts": [f" {text}{position}" for position in range(num_positions)],
                "shares": shares,
            },
            "cost": {"steps": 1.7},
        }
    )  # fmt: skip


def test_a_saved_step_becomes_a_page_with_its_whole_sequence(snapshot, tmp_path):
    page = tmp_path / "finding.html"
    arguments = [str(snapshot), "--html", str(page), "--threads", "1", "--device", "cpu"]
    result = CliRunner().invoke(localize, arguments, terminal_width=200)
    assert result.exit_code == 0, result.output
    text = page.read_text()
    for words in (
        "Step 7: token",
        "without the culprits",
        "TokenClip [0.5, 5]",
        "Layer by position",
        "reproduced the step",
    ):
        assert words in text
    assert "tokens 0 to 17" in text
    assert len(re.findall(r'class="[^"]*culprit"', text)) == 1
    assert not re.findall(r"(?:src|href)=.(?!data:)", text) and "url(" not in text  # nothing is fetched


def test_a_page_that_cannot_be_written_is_one_line(snapshot, tmp_path):
    page = tmp_path / "nowhere" / "finding.html"
    result = CliRunner().invoke(localize, [str(snapshot), "--html", str(page), "--threads", "1", "--device", "cpu"])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1 and "finding.html" in result.stderr


@pytest.mark.full  # a browser of its own: seconds on a machine that is free, minutes on one that is not
@pytest.mark.timeout(900)
def test_the_page_is_a_picture_too(snapshot, tmp_path, monkeypatch):
    """By a browser of the machine; where there is none, one line says so."""
    out = tmp_path / "finding.png"
    arguments = [str(snapshot), "--png", str(out), "--json", "--threads", "1", "--device", "cpu"]
    result = CliRunner().invoke(localize, arguments)
    assert result.exit_code == 0, result.output
    header = out.read_bytes()[:24]
    assert header.startswith(b"\x89PNG") and int.from_bytes(header[16:20], "big") == WIDTH
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(localize, arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1 and "needs Chromium" in result.stderr


def test_text_of_the_run_is_shown_and_never_run(chromium, tmp_path):
    page = tmp_path / "finding.html"
    page.write_text(html_report(long_finding(40, text=HOSTILE), run_id=HOSTILE, where=HOSTILE))
    tab = chromium.new_page()
    tab.goto(page.as_uri())
    assert tab.title() != "taken"
    assert HOSTILE in tab.locator(".tokens").inner_text()
    assert tab.locator("script").count() == 0
    assert tab.locator(".culprit").get_attribute("title").startswith("token 33, id 33, ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_sequence_of_16384_tokens_opens(chromium, tmp_path, scheme):
    page = tmp_path / "finding.html"
    page.write_text(html_report(long_finding(16_384)))
    tab = chromium.new_page(color_scheme=scheme)
    tab.goto(page.as_uri())
    assert tab.locator(".culprit").bounding_box() is not None  # laid out
    assert tab.locator(".map img").evaluate("image => [image.naturalWidth, image.naturalHeight]") == [16_384, 24]
    tab.screenshot(path=tmp_path / "page.png")


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_numbers_that_are_not_finite_leave_a_page_that_can_be_read(bad):
    finding = long_finding(5)
    certificate = finding.certificate.model_copy(update={"grad_norm": bad, "norm_without": bad, "limit": bad})
    view = finding.sequence_view.model_copy(update={"shares": (bad, 0.1, bad, -0.2, 0.0)})
    growth = {"layers.0.mlp": bad, "head": 3.0}
    changed = finding.model_copy(
        update={"certificate": certificate, "sequence_view": view, "layer_growth": growth, "healthy_norm": bad}
    )
    text = html_report(changed)
    assert "width: nan" not in text and "width: inf" not in text and "left: nan" not in text
    assert "Step 1204: token" in text


def test_a_bare_finding_is_a_page_too():
    finding = long_finding(3).model_copy(
        update={"certificate": None, "sequence_view": None, "profile": None, "culprits": (), "causes": (), "fix": None}
    )
    text = html_report(finding)
    assert "Before and after" not in text and "The sequence" not in text and "How far to trust this" in text


def test_a_picture_is_what_a_browser_reads_as_one():
    import numpy as np

    data = png(np.array([[[255, 0, 0, 255], [0, 255, 0, 9]]], dtype=np.uint8))
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.endswith(b"IEND\xaeB`\x82")
