"""The web page as people see it: in a real browser where it matters, as text elsewhere."""

import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from gradloc_proto import messages as m
from gradloc_proto.memory_bus import MemoryBus
from gradloc_reporter import Reporter
from gradloc_reporter.access import Tokens, Viewer, digest

Start = Callable[..., Reporter]
NASTY = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture
def url(start: Start) -> str:
    return start().url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1180, "height": 900})
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()
    assert complaints == [], "the browser complains, for instance of the security policy"


def shown(kit: Any, url: str, words: str) -> str:
    page = kit.until(lambda: kit.ask(url), lambda answer: answer.status == 200 and words in answer.text, words)
    return str(page.text)


def keep(page: Page, name: str) -> None:
    """Screenshots stay where GRADLOC_SCREENSHOTS says, for people to look at."""
    folder = os.environ.get("GRADLOC_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


# --- in the browser ----------------------------------------------------------------------------


def test_the_culprit_is_found_from_the_overview_by_clicking(
    kit: Any, told: Any, bus: MemoryBus, url: str, page: Page
) -> None:
    opened = told.opened()
    kit.tell(
        bus, told.started(), told.step(1203, 0.4), told.step(1204, 640.0), opened, told.finished(opened.incident_id)
    )
    shown(kit, url, "culprit found")
    page.goto(url)
    page.locator(".incidents").get_by_role("link", name="Step 1,204").click()
    culprit = page.locator(".tok.culprit")
    assert culprit.inner_text() == "<th"
    assert culprit.get_attribute("title") == "token 358 · id 13708 · 99.9 % of the norm²"
    assert culprit.is_visible()
    links = page.locator(".chain li").all_inner_texts()
    assert [link.split("\n")[:2] for link in links] == [
        ["Step", "1,204"],
        ["Rank", "3"],
        ["Micro-batch", "0"],
        ["Sequence", "2"],
        ["Token", '358 "<th"'],
    ]
    assert "Without this token the norm is 0.43" in page.locator("main").inner_text()
    assert "TokenClip [0.5, 5]" in page.locator(".fix").inner_text()
    assert page.locator(".map rect").count() > 50
    keep(page, "incident")


@pytest.mark.parametrize(("width", "scheme"), [(375, "dark"), (375, "light"), (1180, "dark")])
def test_the_culprit_is_found_by_keyboard_alone_whatever_the_width_and_light(
    kit: Any, told: Any, bus: MemoryBus, url: str, browser: Browser, width: int, scheme: Any
) -> None:
    opened = told.opened()
    kit.tell(bus, told.started(), opened, told.finished(opened.incident_id))
    shown(kit, url, "culprit found")
    context = browser.new_context(viewport={"width": width, "height": 740}, color_scheme=scheme)
    page = context.new_page()
    page.goto(url)
    for _ in range(20):
        page.keyboard.press("Tab")
        focused = page.evaluate("document.activeElement.getAttribute('href')")
        if focused and focused.startswith("/incidents/"):
            break
    page.keyboard.press("Enter")
    page.wait_for_url("**/incidents/*")
    assert page.locator(".tok.culprit").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = max(int(part) for part in paper[4:-1].split(","))
    assert bright < 60 if scheme == "dark" else bright > 200, "as light as the system is"
    keep(page, f"incident-{width}-{scheme}")
    context.close()


def test_the_page_follows_the_localization_without_a_reload(
    kit: Any, told: Any, bus: MemoryBus, url: str, page: Page
) -> None:
    opened = told.opened()
    kit.tell(bus, told.started(), opened)
    shown(kit, f"{url}/incidents/{opened.incident_id}", "Waiting for localization")
    page.goto(f"{url}/incidents/{opened.incident_id}")
    page.evaluate("window.same = true")
    progressed = told.of(
        m.LocalizationProgressed, opened.incident_id, localization_attempt=1, stage="verify", fraction=0.6
    )
    kit.tell(bus, progressed)
    page.get_by_text("Looking for the culprit").wait_for()
    kit.tell(bus, told.finished(opened.incident_id))
    page.locator(".tok.culprit").wait_for()
    assert page.evaluate("window.same") is True


@pytest.mark.parametrize(("width", "scheme"), [(375, "dark"), (1180, "light")])
def test_axe_finds_no_violation_on_any_page(
    kit: Any, told: Any, bus: MemoryBus, start: Start, browser: Browser, width: int, scheme: Any
) -> None:
    token = "operator-token"
    tokens = Tokens({digest(token): Viewer("oncall", "operate")})
    url = start(tokens=tokens).url
    opened, waiting = told.opened(), told.opened(2000, math.nan)
    again = kit.Told(run_id="again", ts=told.ts - 4000)
    before = again.opened()
    norms = {f"layers.{layer}.{kind}": 0.1 * (1 + layer) for layer in range(12) for kind in ("attention", "mlp")}
    steps = [
        told.step(
            step,
            640.0 if step == 1204 else 0.4,
            layer_norms={
                name: norm * (500 if step == 1204 and "layers.1." in name else 1) for name, norm in norms.items()
            },
            ratio_max=2.1e5 if step == 1204 else 1.3,
            ratio_min=0.4,
        )
        for step in range(1100, 1300)
    ]
    kit.tell(bus, told.started(), *steps, opened, told.finished(opened.incident_id), waiting)
    kit.tell(bus, again.started(), before, again.finished(before.incident_id))
    kit.tell(bus, again.of(m.IncidentResolved, before.incident_id, step=9, reason="calm"))
    bearer = {"Authorization": f"Bearer {token}"}
    kit.until(lambda: kit.ask(url, headers=bearer).text, lambda text: text.count("culprit found") > 0, "told")
    silence = {"by": "ada", "matchers": [{"name": "run", "value": told.run_id}], "hours": 8, "reason": "known"}
    kit.ask(f"{url}/api/v1/silences", "POST", silence, bearer)
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{url}/incidents/{opened.incident_id}")
    found = {"sign-in": Axe().run(page).response["violations"]}
    page.get_by_label("Token").fill(token)
    page.keyboard.press("Enter")
    page.wait_for_url("**/incidents/*")
    for name, path in (
        ("incident", f"/incidents/{opened.incident_id}"),
        ("incident-waiting", f"/incidents/{waiting.incident_id}"),
        ("run", f"/runs/{told.run_id}"),
        ("overview", "/"),
        ("nowhere", "/nowhere"),
    ):
        page.goto(url + path)
        found[name] = Axe().run(page).response["violations"]
        keep(page, f"{name}-{width}-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name}: nothing sticks out"
    said = [
        f"{name}: {each['id']}: {node['html'][:160]}"
        for name in found
        for each in found[name]
        for node in each["nodes"]
    ]
    assert not said, "\n".join(said[:20])
    page.goto(url)
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="Sign in").wait_for()
    context.close()


def test_a_person_resolves_silences_and_opens_again_on_the_page(
    kit: Any, told: Any, bus: MemoryBus, url: str, page: Page
) -> None:
    opened = told.opened()
    kit.tell(bus, told.started(), opened)
    shown(kit, f"{url}/incidents/{opened.incident_id}", "Waiting for localization")
    page.goto(f"{url}/incidents/{opened.incident_id}")
    page.get_by_label("Your name").fill("ada")
    page.get_by_label("Remark or reason").fill("row removed")
    page.get_by_role("button", name="Resolve").click()
    page.locator(".log").get_by_text("Resolved by ada: row removed").wait_for()
    page.get_by_role("button", name="Open again").click()
    page.locator(".log").get_by_text("Opened again by ada").wait_for()
    page.get_by_role("button", name="Keep snapshots").click()
    page.locator(".log").get_by_text("Snapshots pinned by ada").wait_for()
    page.get_by_role("button", name="Let snapshots go").click()
    page.locator(".log").get_by_text("Snapshots unpinned by ada").wait_for()
    page.get_by_role("button", name="Keep snapshots").wait_for()
    page.get_by_role("button", name="Silence this run").click()
    page.get_by_text("Silenced by ada until").wait_for()


def test_wishes_can_be_sent_from_the_page(kit: Any, told: Any, bus: MemoryBus, url: str, page: Page) -> None:
    opened = told.opened()
    kit.tell(bus, told.started(), opened)
    shown(kit, f"{url}/incidents/{opened.incident_id}", "Waiting for localization")
    page.goto(f"{url}/incidents/{opened.incident_id}")
    page.get_by_label("Your name").fill("ada")
    page.get_by_role("button", name="Acknowledge").click()
    page.locator(".log").get_by_text("Acknowledged by ada").wait_for()
    page.get_by_role("button", name="Localize again").click()
    page.get_by_text("ada asked for another localization").wait_for()


def test_text_from_outside_stays_text(kit: Any, bus: MemoryBus, url: str, page: Page) -> None:
    told = kit.Told()
    opened = told.opened(labels={"team": NASTY})
    view = m.SequenceView(
        rank=3,
        micro_batch=0,
        sequence=2,
        first_position=357,
        token_ids=(1, 2),
        token_texts=(NASTY, NASTY),
        shares=(0.1, 0.9),
    )
    finding = told.finished(
        opened.incident_id,
        culprits=(kit.a_culprit(token_text=NASTY, layer=NASTY),),
        causes=(m.Cause(name="x", confidence="low", summary=NASTY, evidence={NASTY: NASTY}),),
        fix=m.Fix(name=NASTY, norm_after=1, holds=True),
        sequence_view=view,
        profile=m.Profile(layers=(NASTY,), first_position=0, values=((1.0,),)),
    )
    failed = told.of(m.LocalizationFailed, opened.incident_id, localization_attempt=2, reason=NASTY)
    kit.tell(bus, told.started(labels={"team": NASTY}, model=NASTY, framework=NASTY), opened, finding, failed)
    addresses = [url, f"{url}/runs/{told.run_id}", f"{url}/incidents/{opened.incident_id}"]
    shown(kit, addresses[2], "failed")
    for address in addresses:
        html = kit.ask(address).text
        assert "<script>document" not in html and "<img" not in html
        page.goto(address)
        page.wait_for_timeout(200)
        assert page.title() != "owned"
    assert NASTY in page.locator("main").inner_text()
    assert page.locator(".tok.culprit").inner_text() == NASTY


def test_a_long_sequence_is_shown_whole_with_the_culprit_in_view(
    kit: Any, told: Any, bus: MemoryBus, url: str, page: Page
) -> None:
    opened = told.opened()
    count = 16_384
    view = m.SequenceView(
        rank=3,
        micro_batch=0,
        sequence=2,
        first_position=0,
        token_ids=tuple(range(count)),
        token_texts=tuple(f" word{index}" for index in range(count)),
        shares=tuple(0.999 if index == 9000 else 1e-7 for index in range(count)),
    )
    kit.tell(bus, told.started(), opened)
    kit.tell(bus, told.finished(opened.incident_id, culprits=(kit.a_culprit(token=9000),), sequence_view=view))
    shown(kit, f"{url}/incidents/{opened.incident_id}", "token-9000")
    page.goto(f"{url}/incidents/{opened.incident_id}")
    assert page.locator(".tok").count() == count
    page.wait_for_function(
        "() => { const box = document.querySelector('.tokens').getBoundingClientRect();"
        " const token = document.querySelector('.tok.culprit').getBoundingClientRect();"
        " return token.top >= box.top && token.bottom <= box.bottom; }"
    )


# --- as text -----------------------------------------------------------------------------------


def test_the_empty_page_says_how_to_begin(kit: Any, url: str) -> None:
    html = kit.ask(url).text
    assert "No run yet" in html and "gradloc.watch(model, optimizer" in html


def test_runs_without_incidents_are_called_healthy(kit: Any, told: Any, bus: MemoryBus, url: str) -> None:
    kit.tell(bus, told.started(), told.step(1, 0.4))
    html = shown(kit, url, told.run_id)
    assert "No spike so far" in html and "healthy" in html


def test_the_run_page_draws_norm_limit_and_spikes(kit: Any, told: Any, bus: MemoryBus, url: str) -> None:
    opened, nan = told.opened(50), told.opened(60, math.nan)
    steps = [told.step(step, 640.0 if step == 50 else math.nan if step == 60 else 0.4) for step in range(100)]
    kit.tell(bus, told.started(), *steps, opened, nan)
    html = shown(kit, f"{url}/runs/{told.run_id}", "100 steps")
    assert html.count("<circle") == 1 and 'class="nan"' in html
    assert f'href="/incidents/{opened.incident_id}"' in html and f'href="/incidents/{nan.incident_id}"' in html
    assert 'class="limit" d="M' in html and "nan" not in html.split('class="norm" d="')[1].split('"')[0]


def test_the_origin_is_marked_in_the_sequence_and_the_proof_shows_both_norms(
    kit: Any, told: Any, bus: MemoryBus, url: str
) -> None:
    proof = m.Certificate(
        grad_norm=640, norm_without=620, limit=1.64, holds=False, num_culprits=1, norm_without_relossed=1.35
    )
    opened = told.opened()
    origin = kit.a_culprit(token=300, token_text=" so", ratio=1.6e5)
    kit.tell(bus, told.started(), opened, told.finished(opened.incident_id, certificate=proof, origins=(origin,)))
    html = shown(kit, f"{url}/incidents/{opened.incident_id}", "How sure")
    assert html.count('origin" title="token 300 ') == 1 and "its ratio weighs the others" in html
    assert "And without their ratios" in html and "it would be 1.35" in html
    assert '<tr class="origin">' in html and "The last row is the origin" in html


@pytest.mark.parametrize(
    ("page", "linked"),
    [
        ("https://wandb.ai/team/project/runs/x?a=1&b=2", "https://wandb.ai/team/project/runs/x?a=1&amp;b=2"),
        ("http://mlflow.local:5000/#/experiments/1/runs/2", "http://mlflow.local:5000/#/experiments/1/runs/2"),
        ("javascript:alert(1)", None),
        ("javascript://wandb.ai/%0aalert(1)", None),
        ("//evil.example/x", None),
        ("https://", None),
        ("http://[::1", None),
        ("trackio", None),
    ],
)
def test_the_runs_own_page_is_linked_where_it_is_an_address_of_the_web(
    kit: Any, told: Any, bus: MemoryBus, url: str, page: str, linked: str | None
) -> None:
    opened = told.opened()
    kit.tell(bus, told.started(labels={"page": page}), opened)
    for address in (f"{url}/incidents/{opened.incident_id}", f"{url}/runs/{told.run_id}"):
        html = shown(kit, address, told.run_id)
        hrefs = {part.split('"')[0] for part in html.split('href="')[1:]}
        outside = {each for each in hrefs if not each.startswith(("/", "#")) or each.startswith("//")}
        assert outside == (set() if linked is None else {linked})


def test_what_was_never_seen_before_is_one_sentence(kit: Any, told: Any, bus: MemoryBus, url: str) -> None:
    first, again = told.opened(), kit.Told(run_id="again", ts=told.ts + 10)
    kit.tell(bus, told.started(), first, told.finished(first.incident_id))
    address = f"{url}/incidents/{first.incident_id}"
    html = shown(kit, address, "How sure")
    assert "Neither its token nor" in html and "seen here only" not in html and "times in" not in html
    second = again.opened()
    kit.tell(bus, again.started(), second, again.finished(second.incident_id))
    html = shown(kit, address, "times in")
    assert "seen 2 times in 2 runs" in html and "Neither its token" not in html


@pytest.mark.parametrize("verdict", m.VERDICTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, None])
def test_every_verdict_has_a_page_even_with_odd_numbers_or_no_parts(
    kit: Any, told: Any, bus: MemoryBus, url: str, verdict: str, bad: float | None
) -> None:
    full = kit.a_finding()
    parts: dict[str, Any] = {"summary": "", "fidelity": full.fidelity, "cost": full.cost}
    if bad is not None:
        parts |= {
            "culprits": (kit.a_culprit(share=bad, ratio=bad, token_text=None),),
            "share": bad,
            "checksum": bad,
            "healthy_norm": bad,
            "certificate": m.Certificate(grad_norm=bad, norm_without=bad, limit=bad, holds=False, num_culprits=2),
            "causes": (m.Cause(name="x", confidence="low", summary="", evidence={"a": bad, "b": None}),),
            "profile": m.Profile(layers=("a", "b"), first_position=3, values=((bad, 1.0), (bad,)), residual_rms=(bad,)),
            "sequence_view": m.SequenceView(
                rank=3, micro_batch=0, sequence=2, first_position=358, token_ids=(1, 2), shares=(bad, bad)
            ),
            "shares_by_sequence": ((3, 0, 2, bad),),
        }
    finding = m.Finding(verdict=verdict, strategy="bisect", step=1204, **parts)
    opened = told.opened(1204, 640.0 if bad is None else bad)
    finished = told.of(m.LocalizationFinished, opened.incident_id, localization_attempt=1, finding=finding)
    kit.tell(bus, told.started(), opened, finished)
    html = shown(kit, f"{url}/incidents/{opened.incident_id}", "How sure")
    assert "nan%" not in html and "inf%" not in html


def test_unknown_pages_are_pages_that_lead_back(kit: Any, url: str) -> None:
    for path, status in (("/runs/nobody", 404), ("/incidents/nothing", 404), ("/nowhere", 404), ("/runs/%20", 422)):
        answer = kit.ask(url + path)
        assert answer.status == status
        assert answer.headers["content-type"].startswith("text/html")
        assert "Back to the overview" in answer.text


def test_nothing_comes_from_elsewhere_and_nothing_inline_may_run(kit: Any, url: str) -> None:
    for path in ("/", "/nowhere", "/api/v1/runs", "/static/gradloc.css"):
        policy = kit.ask(url + path).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    html = kit.ask(url).text
    assert "http://" not in html.replace("http-equiv", "") and "https://" not in html
    assert "style=" not in html and "onclick" not in html
    assert kit.ask(url + "/static/../page.py").status == 404
