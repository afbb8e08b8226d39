"""The picture of a judged run: norm, limit, healthy level and flags, on a logarithmic scale; as HTML or PNG.

The HTML is one file without a script or a foreign address, for light and dark; the PNG needs Pillow.
"""

import html
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gradloc.trace_replay.judged import Judged, Verdict

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

WIDTH, HEIGHT = 1200, 520
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 56, 48
_POINTS_MAX = 6_000  # more than the pixels; the largest of each bucket is kept
_COLOURS = {"norm": "#3b6fb6", "limit": "#c77d18", "healthy": "#6b8f71", "flag": "#c22f2f"}
_NOTES_MAX = 12

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """From steps and norms to pixels."""

    first: int
    last: int
    low: float  # log10
    high: float

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - self.first) / max(1, self.last - self.first)

    def y(self, value: float) -> float:
        log = min(max(math.log10(value), self.low), self.high) if value > 0 else self.low
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - log) / (self.high - self.low)

    @property
    def decades(self) -> list[int]:
        every = max(1, round((self.high - self.low) / 8))
        return list(range(math.ceil(self.low), math.floor(self.high) + 1, every))


def scale_of(rows: tuple[Judged, ...]) -> Scale:
    values = [judged.row.norm for judged in rows if 0 < judged.row.norm < math.inf]
    values += [judged.limit for judged in rows if judged.limit is not None]
    low, high = (math.log10(min(values)), math.log10(max(values))) if values else (-1.0, 1.0)
    steps = [judged.row.step for judged in rows]
    return Scale(min(steps), max(steps), math.floor(low - 0.05), max(math.ceil(high + 0.05), math.floor(low) + 1))


def line(rows: tuple[Judged, ...], scale: Scale, value_of: Callable[[Judged], float | None]) -> list[list[Point]]:
    """Pieces of a line, cut where a value is missing, zero or not finite."""
    pieces: list[list[Point]] = [[]]
    width = max(1, math.ceil(len(rows) / _POINTS_MAX))
    for start in range(0, len(rows), width):
        bucket = [(value_of(judged), judged.row.step) for judged in rows[start : start + width]]
        drawn = [(value, step) for value, step in bucket if value is not None and 0 < value < math.inf]
        if not drawn:
            pieces.append([])
            continue
        value, step = max(drawn)
        pieces[-1].append((scale.x(step), scale.y(value)))
    return [piece for piece in pieces if piece]


def title_of(name: str, verdict: Verdict) -> str:
    num = len(verdict.flagged)
    return f"{name}: {len(verdict.rows)} steps, {num} flagged" if num else f"{name}: {len(verdict.rows)} steps, healthy"


def note_of(judged: Judged) -> str:
    flag = judged.flags[0]
    limit = "" if flag.limit is None else f", limit {flag.limit:.4g}"
    return f"step {judged.row.step}: {flag.rule} {flag.value:.4g}{limit}"


_SERIES: dict[str, Callable[[Judged], float | None]] = {
    "limit": lambda judged: judged.limit,
    "healthy": lambda judged: judged.healthy,
    "norm": lambda judged: judged.row.norm,
}


def _mark(judged: Judged, scale: Scale) -> Point:
    norm = judged.row.norm
    # What is not finite has no place on the scale: it is drawn at its top.
    return scale.x(judged.row.step), scale.y(norm) if math.isfinite(norm) else TOP


def as_html(name: str, verdict: Verdict) -> str:
    scale = scale_of(verdict.rows)
    parts = []
    for decade in scale.decades:
        y = scale.y(10.0**decade)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{decade}</text>')
    for step in (scale.first, scale.last):
        anchor = "start" if step == scale.first else "end"
        parts.append(f'<text x="{scale.x(step):.1f}" y="{HEIGHT - 18}" text-anchor="{anchor}">step {step}</text>')
    for series, value_of in _SERIES.items():
        for piece in line(verdict.rows, scale, value_of):
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)
            parts.append(f'<polyline class="{series}" points="{points}"/>')
    for _, judged in verdict.flagged:
        x, y = _mark(judged, scale)
        note = html.escape(note_of(judged))
        parts.append(f'<circle class="flag" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{note}</title></circle>')
    for index, series in enumerate((*_SERIES, "flag")):
        x = LEFT + 110 * index
        parts.append(f'<rect class="key {series}" x="{x}" y="{TOP - 22}" width="12" height="12"/>')
        parts.append(f'<text x="{x + 18}" y="{TOP - 12}">{series}</text>')
    notes = "".join(f"<li>{html.escape(note_of(judged))}</li>" for _, judged in verdict.flagged[:200])
    title = html.escape(title_of(name, verdict))
    colours = "".join(
        f".{series}{{stroke:{colour}}}.key.{series},circle.{series}{{fill:{colour}}}"
        for series, colour in _COLOURS.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>'
        ":root{color-scheme:light dark}body{font:15px system-ui,sans-serif;margin:2rem}"
        "svg{width:100%;height:auto}text{font-size:13px;fill:currentColor}"
        "polyline{fill:none;stroke-width:1.4}.limit{stroke-dasharray:6 4}.grid{stroke:currentColor;opacity:.15}"
        f"{colours}</style><h1>{title}</h1>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>'
        f"<ul>{notes}</ul></html>\n"
    )


def write_png(path: Path, name: str, verdict: Verdict) -> None:
    """Draw the picture. Raises ValueError where Pillow is not installed."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise ValueError("a PNG needs Pillow; install gradloc[plot], or write an .html") from None
    scale = scale_of(verdict.rows)
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    for decade in scale.decades:
        y = scale.y(10.0**decade)
        draw.line([(LEFT, y), (WIDTH - RIGHT, y)], fill="#e4e4e4")
        draw.text((LEFT - 8, y), f"1e{decade}", fill="#333333", anchor="rm")
    draw.text((LEFT, HEIGHT - 30), f"step {scale.first}", fill="#333333")
    draw.text((WIDTH - RIGHT, HEIGHT - 30), f"step {scale.last}", fill="#333333", anchor="ra")
    for series, value_of in _SERIES.items():
        for piece in line(verdict.rows, scale, value_of):
            if len(piece) > 1:
                draw.line(piece, fill=_COLOURS[series], width=2 if series == "norm" else 1)
    for index, (_, judged) in enumerate(verdict.flagged):
        x, y = _mark(judged, scale)
        draw.ellipse([x - 5, y - 5, x + 5, y + 5], fill=_COLOURS["flag"])
        if index < _NOTES_MAX:
            draw.text((min(x + 8, WIDTH - 190), y - 6), note_of(judged), fill=_COLOURS["flag"])
    _legend(draw, title_of(name, verdict))
    image.save(path, format="PNG")


def _legend(draw: "ImageDraw", title: str) -> None:
    draw.text((LEFT, 10), title, fill="#111111")
    for index, series in enumerate((*_SERIES, "flag")):
        x = LEFT + 110 * index
        draw.rectangle([x, TOP - 24, x + 11, TOP - 13], fill=_COLOURS[series])
        draw.text((x + 17, TOP - 25), series, fill="#333333")
