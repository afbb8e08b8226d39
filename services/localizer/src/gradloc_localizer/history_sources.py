"""Where a run's findings are: files of them, or the reporter's REST.

A file holds JSON or lines of JSON: findings as `gradloc localize --json` prints them, messages as `gradloc tail
--json` does, or answers of the REST. Nothing read is believed before it was validated; sizes are bounded.
"""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gradloc_localizer.history import Found, RunHistory, history_of
from gradloc_proto.messages import Finding

FILE_BYTES_MAX = 1 << 30
ANSWER_BYTES_MAX = 64 << 20
INCIDENTS_MAX = 2_000  # of one run
PAGE = 200
TIMEOUT_S = 30.0


class SourceRejected(ValueError):
    """A file or an answer that holds no findings as expected; the text is one line for the user."""


def from_file(path: Path) -> list[RunHistory]:
    """The histories of the runs in a file, by first appearance; what names no run is the file's. Raises
    SourceRejected or OSError."""
    if path.stat().st_size > FILE_BYTES_MAX:
        raise SourceRejected(f"{path} has more than {FILE_BYTES_MAX >> 30} GB; cut it to the findings")
    text = path.read_text(encoding="utf-8", errors="replace")
    found: dict[str, list[Found]] = {}
    last_steps: dict[str, int] = {}
    labels: dict[str, dict[str, str]] = {}
    for document in _documents(path, text):
        run_id = str(document.get("run_id") or path.stem)
        step = document.get("step")
        if document.get("type") == "step_observed" and isinstance(step, int):
            last_steps[run_id] = max(step, last_steps.get(run_id, 0))
        if document.get("type") == "run_started" and isinstance(document.get("labels"), dict):
            labels[run_id] = {str(name): str(value) for name, value in document["labels"].items()}
        finding = document if "verdict" in document and "fidelity" in document else document.get("finding")
        if isinstance(finding, dict):
            attempt = document.get("attempt")
            one = Found(run_id, attempt if isinstance(attempt, int) else 0, _finding(finding, str(path)))
            found.setdefault(run_id, []).append(one)
    if not found and not last_steps:
        raise SourceRejected(
            f"{path} holds no finding; expected what `gradloc localize --json` or `gradloc tail --json` prints"
        )
    runs = dict.fromkeys([*labels, *last_steps, *found])
    return [history_of(run, found.get(run, ()), last_step=last_steps.get(run), labels=labels.get(run)) for run in runs]


def _documents(path: Path, text: str) -> Iterator[dict[str, Any]]:
    try:
        whole = [json.loads(text)]
    except RecursionError:
        raise SourceRejected(f"{path} is not JSON that can be read: it nests too deep") from None
    except ValueError:
        whole = []
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    whole.append(json.loads(line))
                except (ValueError, RecursionError):
                    raise SourceRejected(f"{path}, line {number}: not JSON; expected one finding a line") from None
    for document in whole:
        yield from (one for one in (document if isinstance(document, list) else [document]) if isinstance(one, dict))


def _finding(document: dict[str, Any], where: str) -> Finding:
    try:
        return Finding.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise SourceRejected(f"{where}: a finding that is none: {place[:80]}: {first['msg'][:120]}") from None


class Reporter:
    """The reporter's REST, read only."""

    def __init__(self, url: str, token: str | None = None) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise SourceRejected(f"--reporter is {url[:80]!r}; expected http://HOST:PORT or https://HOST")
        self._url = url.rstrip("/")
        self._token = token

    def history(self, run_id: str) -> RunHistory:
        """Raises SourceRejected, also where the reporter knows no such run."""
        run = self._get(f"/api/v1/runs/{urllib.parse.quote(run_id, safe='')}")
        found: list[Found] = []
        cursor: str | None = None
        for _ in range(INCIDENTS_MAX // PAGE):
            query = {"run": run_id, "limit": str(PAGE)} | ({} if cursor is None else {"cursor": cursor})
            page = self._get("/api/v1/incidents?" + urllib.parse.urlencode(query))
            for incident in page["incidents"]:
                detail = self._get(f"/api/v1/incidents/{urllib.parse.quote(incident['incident_id'], safe='')}")
                if detail.get("finding") is not None:
                    found.append(Found(run_id, int(detail["attempt"]), _finding(detail["finding"], "the reporter")))
            cursor = page["next_cursor"]
            if cursor is None:
                break
        return history_of(run_id, found, last_step=run.get("last_step"), labels=run.get("labels"))

    def _get(self, path: str) -> dict[str, Any]:
        request = urllib.request.Request(self._url + path, headers={"Accept": "application/json"})
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                document = json.loads(reply.read(ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            with error:
                raise SourceRejected(_refusal(error, path)) from None
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise SourceRejected(f"no answer from the reporter at {self._url}: {str(error)[:120]}") from None
        if not isinstance(document, dict):
            raise SourceRejected(f"{self._url}{path[:80]} does not answer as a reporter does")
        return document


def _refusal(error: urllib.error.HTTPError, path: str) -> str:
    if error.code == 401:
        return "the reporter wants a token: set GRADLOC_TOKEN to one with the scope read"
    if error.code == 404:
        return f"the reporter knows nothing at {path[:120]}; `gradloc history --reporter` takes run ids"
    return f"the reporter answered {error.code} to {path[:120]}"
