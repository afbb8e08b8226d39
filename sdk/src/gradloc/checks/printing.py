"""Reports of checks for people: rich text. Prints codes, places, numbers and what to do; no prompt, no answer."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from gradloc.checks.doctor import Diagnosis
from gradloc.checks.finding import CheckFinding, Report, Skipped
from gradloc.checks.healthy_step import Comparison
from gradloc.checks.self_test import SelfTest
from gradloc.checks.triage import Triage
from gradloc_proto.plain_text import visible

_STYLE = {"error": "bold red", "warning": "yellow"}


def finding_lines(found: CheckFinding) -> RenderableType:
    # Names and excerpts are the data's: an escape sequence in them must not reach the terminal.
    place = visible(", ".join(f"{name} {value}" for name, value in found.where.items()))
    more = f" and {found.num_places - 1:,} more" if found.num_places > 1 else ""
    lines = Text()
    lines.append(f"{found.severity:>7} ", style=_STYLE[found.severity])
    lines.append(found.code, style="bold")
    if place:
        lines.append(f"  {place}{more}", style="cyan")
    lines.append(f"\n        {visible(found.what)}\n        -> {found.todo}")
    if found.excerpt is not None:
        lines.append(f"\n        text: {visible(found.excerpt)}", style="dim")
    return lines


def report_lines(report: Report, title: str) -> RenderableType:
    counts = ", ".join(f"{value:,.6g} {name}" for name, value in report.counts.items())
    head = Text(title, style="bold")
    head.append(f"  {counts}" if counts else "", style="dim")
    body: list[RenderableType] = [head, *(finding_lines(one) for one in report.findings)]
    if not report.findings:
        body.append(Text("        nothing found", style="green"))
    return Group(*body, *_skipped(report.skipped))


def _skipped(skipped: Iterable[Skipped]) -> list[RenderableType]:
    return [Text(f"not made {one.what}: {one.why}", style="dim") for one in skipped]


def triage_lines(found: Triage, title: str) -> RenderableType:
    style = {"healthy": "green", "unknown": "yellow"}.get(found.branch, "bold red")
    lines = Text(f"{title}: ", style="bold")
    lines.append(found.branch, style=style)
    lines.append(f" ({found.layer} layer)" if found.layer else "")
    place = [f"line {found.line:,}" if found.line else "", f"step {found.step:,}" if found.step is not None else ""]
    lines.append("".join(f", {one}" for one in place if one), style="cyan")
    lines.append(f"\n        {visible(found.why)}\n        -> {found.todo}")
    for command in found.checks:
        lines.append(f"\n           {command}", style="dim")
    if found.also:
        lines.append(f"\n        also seen: {', '.join(found.also)}", style="dim")
    return lines


def diagnosis_lines(found: Diagnosis) -> RenderableType:
    body: list[RenderableType] = [triage_lines(one, escape(name)) for name, one in found.logs.items()]
    body += [report_lines(report, name) for name, report in found.reports.items()]
    body += _skipped(found.skipped)
    verdict = "well" if found.is_well else f"{found.num_findings} findings, {len(found.failed_logs)} logs of failures"
    body.append(Text(f"{verdict}, in {found.seconds:.1f} s", style="bold green" if found.is_well else "bold red"))
    return Group(*body)


def comparison_lines(made: Iterable[Comparison], skipped: Iterable[Skipped]) -> RenderableType:
    lines: list[RenderableType] = []
    for one in made:
        style = "green" if one.is_back else "bold red"
        mark = "back  " if one.is_back else "OUTSIDE"
        lines.append(
            Text(f"{mark:>8}  {one.name:<28} {one.now:>12.5g}  in [{one.low:.5g}, {one.high:.5g}]", style=style)
        )
    return Group(*lines, *_skipped(skipped))


def self_test_lines(found: SelfTest) -> RenderableType:
    style = "bold green" if found.passed else "bold red"
    head = f"{found.num_caught} of {found.num_planted} planted faults caught, "
    head += f"{len(found.false_findings)} false findings in as many healthy counterparts and {found.num_clean} set-ups"
    lines: list[RenderableType] = [Text(head, style=style)]
    lines += [Text(f"missed {one}", style="red") for one in found.missed]
    lines += [Text(f"false  {one}", style="red") for one in found.false_findings]
    lines += [Text(f"no fault planted for {one}", style="red") for one in found.kinds_without_fault]
    return Group(*lines)
