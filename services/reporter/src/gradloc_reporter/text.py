"""What people are told of an incident, in words: the one text of Slack, the web page and `gradloc`.

Pure: no I/O, no clock, no client library. A telling is a headline and labelled lines made of
pieces; `rendering` puts them together, the page lays them out itself. Text that came from
outside (token texts, summaries) is made visible and cut here, and escaped where it is rendered.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gradloc_proto.finding import without_text
from gradloc_proto.messages import Cause, Culprit, Finding, Flag, Spike
from gradloc_proto.plain_text import visible
from gradloc_proto.rules import is_about_gradient
from gradloc_reporter.figures import factor, number, percent, token_text

CULPRITS_TOLD_MAX = 3
FREE_TEXT_MAX = 300


@dataclass(frozen=True, slots=True)
class Story:
    """All that the words need to know of an incident."""

    run_id: str
    incident_id: str
    status: str  # open, localizing, located, failed, resolved
    spike: Spike | None  # the worst one
    num_spikes: int = 1
    finding: Finding | None = None
    localization_attempt: int = 0
    finding_attempt: int = 0  # of `finding`
    localizing: bool = False
    stage: str | None = None
    fraction: float | None = None
    failure: str | None = None
    retryable: bool = False
    resolved_step: int | None = None
    resolved_reason: str | None = None
    acknowledged_by: str | None = None
    opened_at: float | None = None
    closed_by: str | None = None  # a person who said that it is over
    url: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Some words; `code` marks a token's text."""

    text: str
    code: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    label: str  # "" for a sentence that needs none
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Telling:
    headline: str
    figures: str
    lines: tuple[Line, ...]
    status: str
    url: str | None


def redacted(finding: Finding) -> Finding:
    """`finding` without any text of prompts or answers: only places, ids and numbers remain."""

    def quiet(cause: Cause) -> Cause:
        numbers = {key: value for key, value in cause.evidence.items() if not isinstance(value, str)}
        return cause.model_copy(update={"summary": "", "evidence": numbers})

    return without_text(finding).model_copy(
        update={"summary": "", "causes": tuple(quiet(cause) for cause in finding.causes)}
    )


# --- the telling -------------------------------------------------------------------------------


def tell(story: Story, *, with_link: bool = True) -> Telling:
    """Everything to say of an incident as it stands."""
    step = _step_of(story)
    headline = f"Spike · run {story.run_id}" + ("" if step is None else f" · step {step:,}")
    lines: list[Line] = []
    if story.finding is not None:
        lines = _finding_lines(story.finding, _limit_of(story))
    return Telling(headline, _figures(story), tuple(lines), status_text(story), story.url if with_link else None)


def culprit_in_short(finding: Finding | None) -> str:
    """One phrase for lists: where the spike comes from."""
    if finding is None:
        return ""
    if finding.verdict in _WITHOUT_PLACE or not finding.culprits:
        return VERDICT_NAMES[finding.verdict]
    first = finding.culprits[0]
    more = f" and {len(finding.culprits) - 1} more" if len(finding.culprits) > 1 else ""
    return text_of_pieces(_place_of(first, whole_sequence=finding.verdict in _WHOLE_ROWS)) + more


VERDICT_NAMES = {
    "token": "one token",
    "sequence": "one sequence",
    "layer": "layers exploding at one position",
    "group": "the answers to one prompt",
    "micro-batch": "one micro-batch",
    "rank": "one rank",
    "data-source": "one data source",
    "batch-wide": "the whole batch",
    "accounting": "not a token: the loss holds something else",
    "mask": "a position outside the loss mask",
    "norm-overflow": "the norm's own overflow",
    "not-reproduced": "not reproduced: hardware or nondeterminism",
    "non-finite": "a value that is not finite",
    "inconclusive": "inconclusive",
}
_WHOLE_ROWS = ("sequence", "group", "micro-batch", "rank", "data-source")
_WITHOUT_PLACE = ("batch-wide", "accounting", "norm-overflow", "not-reproduced", "inconclusive")


def status_text(story: Story) -> str:
    """Where the incident stands, in one sentence."""
    parts = []
    if story.status == "resolved":
        where = "" if story.resolved_step is None else f" at step {story.resolved_step:,}"
        why = f": {visible(story.resolved_reason, FREE_TEXT_MAX)}" if story.resolved_reason else ""
        who = f" by {visible(story.closed_by, 60)}" if story.closed_by else ""
        parts.append(f"Resolved{who}{where}{why}")
    if story.localizing:
        stage = "" if not story.stage else f": {visible(story.stage, 80)}"
        done = "" if story.fraction is None else f", {round(100 * min(max(story.fraction, 0.0), 1.0))} %"
        again = f" (attempt {story.localization_attempt})" if story.localization_attempt > 1 else ""
        parts.append(f"Localizing{again}{stage}{done}")
    elif story.failure is not None and story.status != "located":
        then = "it will be tried again" if story.retryable else "re-localize from the incident's page to try again"
        reason = visible(story.failure, FREE_TEXT_MAX).rstrip(".")
        parts.append(f"Localization attempt {story.localization_attempt} failed: {reason}; {then}")
    elif story.finding is not None and story.status != "resolved":
        parts.append("Located")
    elif story.status == "open":
        is_waiting = story.spike is None or is_about_gradient(story.spike.flags)
        parts.append("Waiting for localization" if is_waiting else "Not about one step's gradient: nothing to localize")
    if story.num_spikes > 1:
        parts.append(f"{story.num_spikes:,} spikes so far")
    if story.acknowledged_by:
        parts.append(f"acknowledged by {visible(story.acknowledged_by, 60)}")
    return " · ".join(parts)


def _step_of(story: Story) -> int | None:
    if story.spike is not None:
        return story.spike.step
    return None if story.finding is None else story.finding.step


def _limit_of(story: Story) -> float | None:
    if story.finding is not None and story.finding.certificate is not None:
        return story.finding.certificate.limit
    return None if story.spike is None else story.spike.limit


def _figures(story: Story) -> str:
    """grad norm 640 (healthy 0.41, 1,560x); then the worst flagged series, where the norm is not it."""
    spike = story.spike
    if spike is None:
        fidelity = None if story.finding is None else story.finding.fidelity.reported_norm
        return "" if fidelity is None else f"grad norm {number(fidelity)}"
    text = f"grad norm {number(spike.grad_norm)}{_against(spike.grad_norm, spike.healthy_norm)}"
    if any(flag.rule == "trainer:held" for flag in spike.flags):
        return text + _held(story.finding, spike.healthy_norm)
    others = [flag for flag in spike.flags if flag.series != "norm"]
    if others and all(flag.series != "norm" for flag in spike.flags):
        text += f" · {_flag_text(others[0])}"
        if len(others) > 1:
            text += f" and {len(others) - 1} more series"
    return text


def _held(finding: Finding | None, healthy_norm: float | None) -> str:
    """The norm is healthy because something was held back; what it would have been, once a replay has shown it."""
    if finding is None or finding.fidelity.held_at is None:
        return ", positions held back by LayerClip"
    norm = finding.fidelity.replayed_norm
    return f", held there by LayerClip; without it {number(norm)}{_against(norm, healthy_norm)}"


def _flag_text(flag: Flag) -> str:
    name = "layer " if flag.rule == "layer" else ""
    return f"{name}{visible(flag.series, 80)} {number(flag.value)}{_against(flag.value, flag.baseline)}"


def _against(value: float, baseline: float | None) -> str:
    if baseline is None:
        return ""
    times = factor(value, baseline)
    return f" (healthy {number(baseline)}" + (")" if times is None else f", {number(times)}x)")


def _finding_lines(finding: Finding, limit: float | None) -> list[Line]:
    lines = _culprit_lines(finding) + _origin_lines(finding)
    sentences = []
    if finding.causes:
        cause = finding.causes[0]
        sure = {"high": "", "medium": " (likely)", "low": " (a guess)"}[cause.confidence]
        sentences.append(f"{cause_text(cause).rstrip().removesuffix('.')}{sure}.")
    certificate = certificate_text(finding)
    if certificate:
        sentences.append(certificate)
    if sentences:
        lines.append(Line("Cause" if finding.causes else "", (Piece(" ".join(sentences)),)))
    fix = fix_text(finding, limit)
    if fix:
        lines.append(Line(*fix))
    return lines


def cause_text(cause: Cause) -> str:
    return visible(cause.summary, FREE_TEXT_MAX) or visible(cause.name, 80).replace("-", " ").replace("_", " ")


def certificate_text(finding: Finding) -> str:
    """The measured norm without the culprits, or "" where none was measured."""
    certificate = finding.certificate
    if certificate is None:
        return ""
    noun = "sequence" if finding.verdict in _WHOLE_ROWS else "token"
    count = certificate.num_culprits
    what = f"this {noun}" if count == 1 else f"these {count:,} {noun}s"
    norm, limit = number(certificate.norm_without), number(certificate.limit)
    left = relossed_text(finding)
    if certificate.holds:
        return f"Without {what} the norm is {norm} (limit {limit}).{left}"
    relossed = relossed_norm(finding)
    if relossed is not None and relossed <= certificate.limit:
        return f"Without the gradient of {what} alone the norm is {norm}, over the limit {limit}.{left}"
    return f"Even without {what} the norm is {norm}, over the limit {limit}: not the whole explanation.{left}"


RELOSSED_DIFFERS = 0.05  # relative: for losses by tokens both counterfactuals are the same, and one is enough


def relossed_text(finding: Finding) -> str:
    """The norm had the ratios left the loss with the tokens, as a further sentence; "" where it says no more."""
    norm = relossed_norm(finding)
    if norm is None:
        return ""
    who = ("its ratio", "the origin's ratio", "the origins' ratios")[min(len(finding.origins), 2)]
    return f" Had {who} left the loss too, it would be {number(norm)}."


def relossed_norm(finding: Finding) -> float | None:
    """That norm where it differs from the masked one; None else."""
    certificate = finding.certificate
    norm = None if certificate is None else certificate.norm_without_relossed
    if certificate is None or norm is None or math.isclose(norm, certificate.norm_without, rel_tol=RELOSSED_DIFFERS):
        return None
    return norm


def fix_text(finding: Finding, limit: float | None) -> tuple[str, tuple[Piece, ...]] | None:
    fix = finding.fix
    if fix is None:
        return None
    after = f"{visible(fix.name, 120)} → norm {number(fix.norm_after)}"
    over = "" if fix.holds or limit is None else f", still over the limit {number(limit)}"
    return fix_label(finding), (Piece(after + over),)


def fix_label(finding: Finding) -> str:
    """What is said before the fix's name; "" where there is none."""
    if finding.fix is None:
        return ""
    if not finding.fix.holds:
        return "Best remedy tried"
    is_on = finding.fidelity.held_at is not None and finding.fix.name == "LayerClip"
    return "Fix that held" if is_on else "Fix that would have held"


def _culprit_lines(finding: Finding) -> list[Line]:
    verdict = finding.verdict
    if verdict in _WITHOUT_PLACE or not finding.culprits:
        return [Line("Verdict", (Piece(_verdict_sentence(finding)),)), *_approximate(finding)]
    told = finding.culprits[:CULPRITS_TOLD_MAX]
    lines = []
    if len(finding.culprits) > 1:
        together = "" if finding.share is None else f", together {percent(finding.share)} of the norm²"
        noun = "sequences" if verdict in _WHOLE_ROWS else "tokens"
        lines.append(Line("Culprits", (Piece(f"{len(finding.culprits):,} {noun}{together}"),)))
    for index, culprit in enumerate(told):
        label = "Culprit" if len(finding.culprits) == 1 else f"{index + 1}."
        lines.append(Line(label, (*_place_of(culprit, whole_sequence=verdict in _WHOLE_ROWS), *_weight_of(culprit))))
    if len(finding.culprits) > len(told):
        lines.append(Line("", (Piece(f"and {len(finding.culprits) - len(told):,} more on the incident's page"),)))
    if verdict in ("layer", "mask", "non-finite", "group", "micro-batch", "rank", "data-source"):
        lines.append(Line("Verdict", (Piece(_verdict_sentence(finding)),)))
    return lines + _approximate(finding)


def _origin_lines(finding: Finding) -> list[Line]:
    """Whose ratio made the coefficients of the culprits: the cause, where they are but the contributors."""
    if not finding.origins:
        return []
    told = finding.origins[:CULPRITS_TOLD_MAX]
    lines = []
    for origin in told:
        ratio = "" if origin.ratio is None else f" · IS ratio {number(origin.ratio)}"
        pieces = (*_place_of(origin, whole_sequence=False), Piece(f"{ratio} · its ratio weighs the others"))
        lines.append(Line("Origin", pieces))
    if len(finding.origins) > len(told):
        lines.append(Line("", (Piece(f"and {len(finding.origins) - len(told):,} more on the incident's page"),)))
    return lines


def _approximate(finding: Finding) -> list[Line]:
    if not finding.approximate:
        return []
    return [Line("Approximate", (Piece(f"batch of step {finding.step:,}, weights of after its update"),))]


def _place_of(culprit: Culprit, *, whole_sequence: bool) -> tuple[Piece, ...]:
    where = f"rank {culprit.rank} · micro-batch {culprit.micro_batch} · sequence {culprit.sequence}"
    if whole_sequence:
        return (Piece(where),)
    pieces = [Piece(f"{where} · token {culprit.token}")]
    if culprit.token_text is not None:
        pieces += [Piece(" "), Piece(token_text(culprit.token_text), code=True)]
    if culprit.token_id is not None:
        pieces.append(Piece(f" (id {culprit.token_id})"))
    return tuple(pieces)


def _weight_of(culprit: Culprit) -> tuple[Piece, ...]:
    text = f" · {percent(culprit.share)} of the norm²" if math.isfinite(culprit.share) else ""
    if culprit.layer:
        text += f" · {visible(culprit.layer, 80)}"
    return (Piece(text),) if text else ()


def _verdict_sentence(finding: Finding) -> str:
    match finding.verdict:
        case "batch-wide":
            largest = max((share for *_, share in finding.shares_by_sequence), default=None, key=_sortable)
            most = "" if largest is None else f"; the largest sequence has {percent(largest)}"
            return f"No single culprit: the norm is spread over the whole batch{most}."
        case "accounting" if finding.rest_share is None:
            return "Not a token's fault: the whole step is scaled alike. Look at what the loss is divided by."
        case "accounting":
            return (
                f"Not a token's fault: {percent(finding.rest_share)} of the norm² belongs to no token. Look for an "
                "auxiliary loss, weight decay in the loss, or a loss that is not normalised."
            )
        case "norm-overflow":
            return "Every gradient is finite: the norm itself overflowed. Accumulate it in float64."
        case "not-reproduced":
            fidelity = finding.fidelity
            rank = finding.causes[0].evidence.get("rank") if finding.causes else None
            if isinstance(rank, float):
                return f"No token's fault: rank {rank:.0f} alone holds a gradient that the replay does not give."
            return (
                f"The replay gives norm {number(fidelity.replayed_norm)} where {number(fidelity.reported_norm)} was "
                "reported: suspect the hardware, or a step that is not deterministic."
            )
        case "inconclusive":
            checksum = "" if finding.checksum is None else f" (the shares sum to {number(finding.checksum)}, not 1)"
            return f"No verdict{checksum}: the numbers do not prove any culprit."
        case "layer":
            return f"Exploding together at this position: {_layers(finding)}."
        case "mask":
            return "This position is outside the loss mask, and yet its coefficient is not finite."
        case "non-finite":
            where = f"; first in {visible(finding.layers_exploding[0], 80)}" if finding.layers_exploding else ""
            return f"A gradient that is not a finite number starts here{where}."
        case "group" | "micro-batch" | "rank" | "data-source":
            return f"The culprit is {VERDICT_NAMES[finding.verdict]} as a whole, no single sequence of it."
        case "sequence":
            return "One sequence makes the spike, no single token of it."
        case _:
            return "One token makes the spike."


def _layers(finding: Finding) -> str:
    names = [visible(name, 60) for name in finding.layers_exploding]
    kinds = f" ({', '.join(visible(kind, 30) for kind in finding.module_kinds_exploding)})"
    kinds = kinds if finding.module_kinds_exploding else ""
    if not names:
        return f"some layers{kinds}"
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") + kinds


def _sortable(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def text_of_pieces(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


DETAILS_TOLD_MAX = 10


def details(finding: Finding) -> list[Line]:
    """The numbers behind a finding, a line each: culprits, causes with their evidence, replay, work."""
    lines = []
    told = [("Culprit", each, finding.verdict == "sequence") for each in finding.culprits[:DETAILS_TOLD_MAX]]
    told += [("Origin", each, False) for each in finding.origins[:DETAILS_TOLD_MAX]]
    for label, culprit, is_row in told:
        numbers = (("IS ratio", culprit.ratio), ("log-prob.", culprit.logp), ("advantage", culprit.advantage))
        said = "".join(f" · {name} {number(value)}" for name, value in numbers if value is not None)
        lines.append(Line(label, (*_place_of(culprit, whole_sequence=is_row), *_weight_of(culprit), Piece(said))))
    for cause in finding.causes[:DETAILS_TOLD_MAX]:
        evidence = ", ".join(
            f"{visible(name, 60)} {number(value) if isinstance(value, float) else visible(str(value), 80)}"
            for name, value in list(cause.evidence.items())[:DETAILS_TOLD_MAX]
        )
        lines.append(
            Line("Cause", (Piece(f"{cause_text(cause)} ({cause.confidence} confidence) {evidence}".rstrip()),))
        )
    fidelity = finding.fidelity
    replayed = "reproduced" if fidelity.reproduced else "not reproduced"
    off, tolerance = number(fidelity.rel_error), number(fidelity.tolerance)
    if fidelity.held_at is not None:
        replayed += f" above {visible(fidelity.held_at, 80)}, where LayerClip held positions back"
    lines.append(Line("Replay", (Piece(f"{replayed}, off by {off} (tolerance {tolerance})"),)))
    lines.append(Line("Work", (Piece(f"{number(finding.cost.steps)} steps, {number(finding.cost.seconds)} s"),)))
    return lines


def with_text_hidden(story: Story) -> Story:
    """`story` as `--redact-tokens` tells it."""
    return story if story.finding is None else replace(story, finding=redacted(story.finding))
