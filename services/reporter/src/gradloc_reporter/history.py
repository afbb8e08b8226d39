"""The log of an incident in words: one line for each thing that happened. Pure, as `text` is."""

from gradloc_proto.plain_text import visible
from gradloc_reporter.figures import number
from gradloc_reporter.text import FREE_TEXT_MAX, VERDICT_NAMES


def event_text(kind: str, detail: dict[str, object]) -> str:
    """What happened, in one line of the log."""

    def said(key: str, limit: int = FREE_TEXT_MAX) -> str:
        value = detail.get(key, "")
        return f"{value:,}" if isinstance(value, int) else visible(str(value), limit)

    match kind:
        case "incident_opened" | "incident_joined" | "incident_worsened":
            verb = {"incident_opened": "Spike", "incident_joined": "Another spike", "incident_worsened": "Worse spike"}
            norm = number(float(str(detail.get("grad_norm", "nan"))))
            return f"{verb[kind]} at step {said('step')}: grad norm {norm}"
        case "incident_resolved":
            return f"Resolved at step {said('step')}: {said('reason')}"
        case "localization_started":
            return f"Localization attempt {said('localization_attempt')} started"
        case "localization_failed":
            return f"Localization attempt {said('localization_attempt')} failed: {said('reason')}"
        case "localization_finished":
            verdict = VERDICT_NAMES.get(said("verdict"), said("verdict"))
            return f"Localization attempt {said('localization_attempt')} finished: {verdict}"
        case "job_reported":
            more = f": {said('detail')}" if detail.get("detail") else ""
            return f"Ray job of attempt {said('localization_attempt')} {said('status')}{more}"
        case "relocalize_requested":
            return f"{said('by', 60)} asked for another localization"
        case "acknowledged":
            return f"Acknowledged by {said('by', 60)}"
        case "commented":
            return f"{said('by', 60)}: {said('text', 2000)}"
        case "closed":
            return f"Resolved by {said('by', 60)}" + (f": {said('reason')}" if detail.get("reason") else "")
        case "reopened":
            return f"Opened again by {said('by', 60)}" + (f": {said('reason')}" if detail.get("reason") else "")
        case "pinned":
            return f"Snapshots pinned by {said('by', 60)}"
        case "unpinned":
            return f"Snapshots unpinned by {said('by', 60)}"
        case "snapshot_removed":
            return f"Snapshot of step {said('step')} removed: {said('reason')}"
        case "override_set":
            value = "back to its default" if detail.get("value") is None else f"to {said('value')}"
            return f"{said('by', 60)} set {said('name', 60)} {value}"
        case "silence_created":
            return f"Silence by {said('by', 60)}: {said('matchers')}"
        case "silence_ended":
            return f"Silence ended by {said('by', 60)}: {said('matchers')}"
        case "stream_gap_noticed":
            return f"Steps {said('first_step')} to {said('last_step')} never arrived: {said('reason')}"
        case _:
            return kind.replace("_", " ")
