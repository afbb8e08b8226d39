"""A telling as Slack's blocks, within their limits. Knows slack_sdk's models, not its client."""

from typing import Any

from slack_sdk.models.blocks import ActionsBlock, Block, ButtonElement, ContextBlock, MarkdownTextObject, SectionBlock

from gradloc_proto.messages import Finding
from gradloc_reporter.rendering import escaped, mrkdwn, mrkdwn_line
from gradloc_reporter.text import Telling, details

SECTION_MAX = 3000  # characters of a section's text
CONTEXT_MAX = 2000
URL_MAX = 3000  # of a button
TEXT_MAX = 4000  # Slack's advice for the fallback text
BLOCKS_MAX = 50


def text_of(telling: Telling) -> str:
    """The whole message as one text: notifications, and clients without blocks."""
    lines = [mrkdwn(telling), escaped(telling.status)]
    if telling.url:
        lines.append(f"<{escaped(telling.url)}|Open the incident>")
    return clipped("\n".join(line for line in lines if line), TEXT_MAX)


def blocks_of(telling: Telling) -> list[dict[str, Any]]:
    """Headline and figures; what was found; where it stands; a button that is a link."""
    head = f"*{escaped(telling.headline)}*" + (f"\n{escaped(telling.figures)}" if telling.figures else "")
    blocks: list[Block] = [_section(head)]
    if telling.lines:
        blocks.append(_section("\n".join(mrkdwn_line(line) for line in telling.lines)))
    foot = clipped(escaped(telling.status), CONTEXT_MAX)
    blocks.append(ContextBlock(elements=[MarkdownTextObject(text=foot, verbatim=True)]))
    if telling.url and len(telling.url) <= URL_MAX:
        button = ButtonElement(text="Open the incident", url=telling.url, action_id="gradloc_open")
        blocks.append(ActionsBlock(elements=[button]))
    assert len(blocks) <= BLOCKS_MAX
    return [block.to_dict() for block in blocks]


def _section(text: str) -> SectionBlock:
    # verbatim: Slack must not turn names and addresses inside foreign text into mentions and links.
    return SectionBlock(text=MarkdownTextObject(text=clipped(text, SECTION_MAX), verbatim=True))


def clipped(text: str, limit: int) -> str:
    """`text` cut to `limit` characters, never inside an entity or a link."""
    if len(text) <= limit:
        return text
    cut = text[: limit - 1]
    for opening, closing in (("&", ";"), ("<", ">")):
        start = cut.rfind(opening)
        if start != -1 and closing not in cut[start:]:
            cut = cut[:start]
    return cut + "…"


def thread_text(finding: Finding) -> str:
    """The numbers behind a finding, for the thread."""
    return clipped("\n".join(mrkdwn_line(line) for line in details(finding)), TEXT_MAX)
