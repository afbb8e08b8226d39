"""The web page: what runs and incidents look like to a person. Server-rendered, readable without script."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from html import escape
from importlib import resources
from urllib.parse import quote, urlsplit

from fastapi import APIRouter, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gradloc_reporter import answers as a
from gradloc_reporter import figures, text
from gradloc_reporter.store import Session, silences
from gradloc_reporter.store.queries import Queries, Wanted
from gradloc_reporter.web import drawing
from gradloc_reporter.web.api import Incident, Run, Seen
from gradloc_reporter.web.backend import Backend
from gradloc_reporter.web.problems import no_such

INCIDENTS_SHOWN, RUNS_SHOWN, SIMILAR_SHOWN = 50, 50, 5
TOKEN_CHUNK = 512  # a browser lays out only the chunks of a long sequence that are in view
CHART_POINTS, SPARK_POINTS = 800, 80
LIVE_S, CALM_S = 2, 10  # the page looks again this often while something is going on, and else
STATUS_NAMES = {
    "open": "spike",
    "localizing": "localizing",
    "located": "culprit found",
    "failed": "not localized",
    "resolved": "resolved",
}


class Pages:
    """Renders pages from the database; every text is escaped by the templates."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._jinja = Environment(
            loader=PackageLoader("gradloc_reporter.web"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._jinja.globals |= {"version": _static_version(), "status_names": STATUS_NAMES}
        self._jinja.filters |= {
            "number": figures.number,
            "percent": figures.percent,
            "code": figures.token_text,
            "utc": utc,
            "iso": iso,
            "bytes": in_bytes,
            "seconds": in_seconds,
        }

    def _render(self, name: str, *, refresh_s: int | None, live: str = "", **values: object) -> str:
        """`live` is where the page hears of changes; without it, it looks every `refresh_s`."""
        now = self._backend.clock()
        signed_in = self._backend.tokens is not None and name not in ("sign_in.html", "error.html")
        return self._jinja.get_template(name).render(
            refresh_s=refresh_s, live=live, signed_in=signed_in, ago=lambda ts: ago(ts, now), **values
        )

    def home(self, queries: Queries) -> str:
        with self._backend.database.reading() as session:
            incidents, more = queries.incidents(session, limit=INCIDENTS_SHOWN)
            runs = queries.newest_runs(session, limit=RUNS_SHOWN)
            sparks = {
                run.run_id: drawing.sparkline(queries.recent_norms(session, run.run_id, count=SPARK_POINTS))
                for run in runs
            }
        busy = any(incident.status in ("open", "localizing") for incident in incidents)
        return self._render(
            "home.html",
            refresh_s=LIVE_S if busy else CALM_S,
            live="/api/v1/live",
            incidents=incidents,
            more=more is not None,
            runs=runs,
            sparks=sparks,
        )

    def run(self, queries: Queries, run_id: str) -> str:
        with self._backend.database.reading() as session:
            run = queries.run(session, run_id)
            if run is None:
                raise no_such("run", run_id)
            steps = queries.steps(session, run_id, first=0, last=None, max_points=CHART_POINTS)
            incidents, more = queries.incidents(session, Wanted(run=run_id), limit=INCIDENTS_SHOWN)
            gaps = queries.gaps(session, run_id)
            chart = self._chart(queries, session, steps, run_id)
            layers = drawing.layers_by_step(queries.layer_windows(session, run_id))
        ratios = [
            (point.step, point.ratio_max, point.ratio_min) for point in steps.points if point.ratio_max is not None
        ]
        return self._render(
            "run.html",
            refresh_s=LIVE_S if run.status == "running" else None,
            live=f"/api/v1/live?run={quote(run_id, safe='')}" if run.status == "running" else "",
            layers=layers,
            ratios=drawing.chart(ratios, []),
            run=run,
            tracker=tracker_page(run.labels),
            steps=steps,
            chart=chart,
            incidents=incidents,
            more=more is not None,
            gaps=gaps,
        )

    def _chart(self, queries: Queries, session: Session, steps: a.StepsAnswer, run_id: str) -> drawing.Chart | None:
        spikes = [
            (
                spike.step,
                spike.grad_norm,
                f"/incidents/{incident_id}",
                f"step {spike.step:,}: grad norm {figures.number(spike.grad_norm)}",
            )
            for incident_id, spike in queries.run_spikes(session, run_id)
        ]
        points = [(point.step, point.grad_norm, point.limit) for point in steps.points]
        return drawing.chart(points, spikes)

    def incident(self, queries: Queries, incident_id: str) -> str:
        with self._backend.database.reading() as session:
            incident = queries.incident(session, incident_id)
            story = queries.story(session, incident_id)
            similar = queries.similar(session, incident_id, limit=SIMILAR_SHOWN)
            silence = silences.of_incident(session, incident_id, self._backend.clock())
            run = None if incident is None else queries.run(session, incident.run_id)
        if incident is None or story is None or similar is None:
            raise no_such("incident", incident_id)
        finding = incident.finding
        view = None if finding is None else finding.sequence_view
        first = finding.culprits[0] if finding is not None and finding.culprits else None
        tokens = () if view is None or finding is None else drawing.tokens(view, finding)
        busy = incident.status in ("open", "localizing")
        attempts = [each for each in incident.findings if each.localization_attempt == incident.localization_attempt]
        return self._render(
            "incident.html",
            refresh_s=LIVE_S if busy or story.localizing else CALM_S,
            live=f"/api/v1/live?incident={quote(incident_id, safe='')}",
            incident=incident,
            similar=similar,
            tracker=None if run is None else tracker_page(run.labels),
            silence=silence,
            telling=text.tell(story),
            story=story,
            finding=finding,
            attempt=attempts[0] if attempts else None,
            factor=None if incident.grad_norm is None else figures.factor(incident.grad_norm, incident.healthy_norm),
            chain=() if finding is None else drawing.chain(finding),
            tokens=tokens,
            tokens_html=tokens_html(tokens),
            map=None
            if finding is None or finding.profile is None
            else drawing.layer_map(finding.profile, None if first is None else first.token),
            bars=None
            if finding is None or finding.certificate is None
            else drawing.certificate_bars(finding.certificate, finding.healthy_norm, text.relossed_norm(finding)),
            certificate_text="" if finding is None else text.certificate_text(finding),
            fix_label="" if finding is None else text.fix_label(finding),
            cause_text=text.cause_text,
            verdict_names=text.VERDICT_NAMES,
        )

    def sign_in(self, address: str, wrong: bool) -> str:
        return self._render("sign_in.html", refresh_s=None, address=address, wrong=wrong)

    def error(self, problem: a.Problem) -> str:
        return self._render("error.html", refresh_s=None, problem=problem)


def pages_router(pages: Pages) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    def home(queries: Seen) -> Response:
        return _html(pages.home(queries))

    @router.get("/runs/{run}")
    def run_page(queries: Seen, run: Run) -> Response:
        return _html(pages.run(queries, run))

    @router.get("/incidents/{incident}")
    def incident_page(queries: Seen, incident: Incident) -> Response:
        return _html(pages.incident(queries, incident))

    return router


def _html(body: str) -> Response:
    return Response(body, media_type="text/html", headers={"Cache-Control": "no-store"})


def _static_version() -> str:
    """Changes whenever a static file does, so that browsers never mix versions."""
    digest = sha256()
    for file in sorted(resources.files("gradloc_reporter.web").joinpath("static").iterdir(), key=lambda f: f.name):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def tokens_html(tokens: Sequence[drawing.Token]) -> Markup:
    """The tokens as marked spans, in chunks where there are many: a template's loop takes several times as long."""
    spans = []
    for token in tokens:
        marks = f" h{token.level}" if token.level else ""
        marks += " neg" if token.negative else ""
        marks += " culprit" if token.culprit else ""
        marks += " origin" if token.origin else ""
        name = f'id="token-{token.position}" ' if token.culprit else ""
        end = "</span><br>" if token.breaks_line else "</span>"
        spans.append(f'<span {name}class="tok{marks}" title="{escape(token.title)}">{escape(token.text)}{end}')
    if len(spans) <= TOKEN_CHUNK:
        return Markup("".join(spans))
    chunks = ("".join(spans[start : start + TOKEN_CHUNK]) for start in range(0, len(spans), TOKEN_CHUNK))
    return Markup("".join(f'<div class="chunk">{chunk}</div>' for chunk in chunks))


def tracker_page(labels: Mapping[str, str]) -> tuple[str, str] | None:
    """(address, host) of the run's page in its tracker: the label `page`, where it is an address of the web.

    Whoever runs a trainer writes labels: no other scheme becomes a link.
    """
    try:
        parts = urlsplit(labels.get("page", ""))
        host = parts.hostname
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not host:
        return None
    return parts.geturl(), host


def _moment(ts: float | None) -> datetime | None:
    try:
        return None if ts is None else datetime.fromtimestamp(ts, UTC)
    except (ValueError, OverflowError, OSError):  # a trainer's clock may say anything
        return None


def utc(ts: float | None) -> str:
    moment = _moment(ts)
    return "unknown time" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def iso(ts: float | None) -> str:
    moment = _moment(ts)
    return "" if moment is None else moment.isoformat(timespec="seconds")


def ago(ts: float | None, now: float) -> str:
    """How long ago, in one unit."""
    if _moment(ts) is None or ts is None:
        return "at an unknown time"
    seconds = now - ts
    if seconds < 5:
        return "just now" if seconds > -60 else utc(ts)
    for size, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


def in_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def in_seconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "unknown"
    return f"{value / 60:.1f} min" if value >= 120 else f"{figures.number(value)} s"
