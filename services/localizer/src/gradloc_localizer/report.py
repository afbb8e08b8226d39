"""A finding as text for a terminal. Knows nothing of how it was found."""

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradloc_proto.messages import Culprit, Finding
from gradloc_proto.plain_text import visible

NUM_TOKENS_SHOWN = 24  # of the culprit's sequence, around it


def report(finding: Finding) -> RenderableType:
    """The finding in the order in which people ask: what, who, proof, why, what to do, at what cost."""
    parts: list[RenderableType] = [_headline(finding)]
    if finding.culprits:
        parts.append(_culprits(finding.culprits))
    if finding.sequence_view is not None:
        parts.append(_sequence(finding))
    certificate = finding.certificate
    if certificate is not None:
        word = "proved" if certificate.holds else "not enough"
        parts.append(
            Text(
                f"Proof    without {certificate.num_culprits} culprit(s) the norm is "
                f"{_number(certificate.norm_without)}, limit {_number(certificate.limit)}: {word}"
                + ("; no smaller set can explain it" if certificate.minimal else "")
            )
        )
    parts += [Text(visible(f"Cause    {cause.summary} [{cause.confidence}: {cause.name}]")) for cause in finding.causes]
    if finding.layers_exploding and len(finding.layer_growth) > len(finding.layers_exploding):
        growth = max(finding.layer_growth.values())
        layers = visible(", ".join(finding.layers_exploding))
        parts.append(Text(f"Layers   {layers} (up to {_number(growth)}x healthy)"))
    if finding.fix is not None:
        held = "would have held" if finding.fix.holds else "would not have been enough"
        if finding.fix.holds and finding.fidelity.held_at is not None and finding.fix.name == "LayerClip":
            held = "held"
        parts.append(Text(f"Fix      {visible(finding.fix.name)} {held}: norm {_number(finding.fix.norm_after)}"))
    parts.append(_footer(finding))
    return Group(*parts)


def _headline(finding: Finding) -> Text:
    held = finding.fidelity.held_at is not None
    norm, times = finding.fidelity.replayed_norm if held else finding.fidelity.reported_norm, ""
    if finding.healthy_norm:
        times = f" (healthy {_number(finding.healthy_norm)}, {_number(norm / finding.healthy_norm)}x)"
    if held:
        times += f", held to {_number(finding.fidelity.reported_norm)} by LayerClip"
    return Text(f"Step {finding.step} · grad norm {_number(norm)}{times} · verdict: {finding.verdict}")


def _culprits(culprits: tuple[Culprit, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "micro-batch", "sequence", "token", "id", "text", "share", "norm", "IS ratio", "layer", "uid"):
        table.add_column(name)
    for culprit in culprits:
        table.add_row(
            str(culprit.rank),
            str(culprit.micro_batch),
            str(culprit.sequence),
            str(culprit.token),
            "" if culprit.token_id is None else str(culprit.token_id),
            Text("" if culprit.token_text is None else repr(culprit.token_text)),
            "" if math.isnan(culprit.share) else f"{100 * culprit.share:.1f} %",
            "" if culprit.norm is None else _number(culprit.norm),
            "" if culprit.ratio is None else _number(culprit.ratio),
            Text(visible(culprit.layer or "")),
            Text(visible(culprit.uid or "")),
        )
    return table


def _sequence(finding: Finding) -> Text:
    view = finding.sequence_view
    assert view is not None
    line = Text("Context  ")
    if not view.token_texts:
        return line.append("(the snapshot holds no tokenizer)")
    centre = finding.culprits[0].token - view.first_position if finding.culprits else 0
    first = max(0, centre - NUM_TOKENS_SHOWN // 2)
    for index in range(first, min(len(view.token_texts), first + NUM_TOKENS_SHOWN)):
        line.append(visible(view.token_texts[index]), style="bold red" if index == centre else "")
        line.append(" ")
    return line


def _footer(finding: Finding) -> Text:
    fidelity, cost = finding.fidelity, finding.cost
    checksum = "" if finding.checksum is None else f", shares sum to {finding.checksum:.4f}"
    reproduced = "reproduced" if fidelity.reproduced else "NOT reproduced"
    if fidelity.held_at is not None:
        reproduced += f" above {visible(fidelity.held_at)}, where LayerClip held positions back"
    return Text(
        f"Replay   {reproduced} (relative error {fidelity.rel_error:.1e}){checksum}; "
        f"{finding.strategy}, {cost.steps:.2f} steps of work, {cost.seconds:.1f} s",
        style="dim",
    )


def _number(value: float) -> str:
    return f"{value:.4g}"
