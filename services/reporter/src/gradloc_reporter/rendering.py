"""A telling put together as one text: for terminals and mail, and for Slack. Pure."""

from dataclasses import replace

from gradloc_reporter.text import Line, Piece, Telling, text_of_pieces


def plain(telling: Telling) -> str:
    """For terminals and logs."""
    head = f"{telling.headline} · {telling.figures}" if telling.figures else telling.headline
    lines = [
        head,
        *(_labelled(line, text_of_pieces(line.pieces)) for line in telling.lines),
        telling.status,
        telling.url or "",
    ]
    return "\n".join(line for line in lines if line)


def mrkdwn(telling: Telling) -> str:
    """For Slack: control characters escaped, token texts as code."""
    head = f"*{escaped(telling.headline)}*" + (f" · {escaped(telling.figures)}" if telling.figures else "")
    return "\n".join([head, *(mrkdwn_line(line) for line in telling.lines)])


def mrkdwn_line(line: Line) -> str:
    label = f"*{escaped(line.label)}*" if line.label else ""
    return _labelled(replace(line, label=label), "".join(_mrkdwn_piece(piece) for piece in line.pieces))


def escaped(text: str) -> str:
    """Slack's three control characters as entities; a backtick would open code, so it becomes a look-alike."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("`", "ˋ")


def _mrkdwn_piece(piece: Piece) -> str:
    return f"`{escaped(piece.text)}`" if piece.code else escaped(piece.text)


def _labelled(line: Line, text: str) -> str:
    if not line.label:
        return text
    return f"{line.label} {text}" if line.label.endswith(".") else f"{line.label}: {text}"
