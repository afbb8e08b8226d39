"""Geometry of the page's pictures: where things are, in per cent of the drawing's box. Pure.

Shapes are stretched to the box while texts and marks keep their size, so that a phone shows the
same picture as a desk. Colours are classes (heat levels 0 to 9): the page's security policy allows
no inline styles. Values that are not finite have their own marks; they never enter a scale.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradloc_proto.messages import Certificate, Culprit, Finding, Profile, SequenceView
from gradloc_proto.plain_text import visible
from gradloc_reporter.figures import number, percent

LEVELS = 9
MAP_COLUMNS_MAX, MAP_ROWS_MAX = 160, 64
SPARK_FLOOR = 4.0  # per cent of the height kept free above and below


@dataclass(frozen=True, slots=True)
class Tick:
    at: float  # per cent
    text: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A spike in a chart. `x`, `y` in per cent."""

    x: float
    y: float
    text: str
    href: str | None
    finite: bool


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines as SVG paths in a box of 1000 x 1000."""

    norm: str
    limit: str
    marks: tuple[Mark, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: str
    width: float  # per cent; 0 for a value that is not finite
    kind: str  # class of the bar


@dataclass(frozen=True, slots=True)
class Bars:
    rows: tuple[Bar, ...]
    limit_at: float | None  # per cent


class Token(NamedTuple):
    """Sixteen thousand of them are a page: a named tuple is made in a third of a dataclass's time."""

    position: int
    text: str
    level: int
    negative: bool
    culprit: bool
    origin: bool  # its ratio weighs the others of its row
    breaks_line: bool
    title: str


@dataclass(frozen=True, slots=True)
class Cell:
    column: int
    row: int
    level: int
    negative: bool
    title: str


@dataclass(frozen=True, slots=True)
class Map:
    """Layers (rows) by positions (columns), thinned to what a screen shows."""

    cells: tuple[Cell, ...]
    num_columns: int
    rows: tuple[tuple[str, str], ...]  # layer, its share of the whole
    x_ticks: tuple[Tick, ...]
    culprit_at: float | None  # per cent
    positions_per_column: int


@dataclass(frozen=True, slots=True)
class Link:
    """One link of the chain from the step down to the token."""

    name: str
    value: str
    share: float | None
    text: str | None = None

    @property
    def width(self) -> float:
        """Of the share's bar, in per cent."""
        share = 0.0 if self.share is None or not math.isfinite(self.share) else self.share
        return 100 * min(max(share, 0.0), 1.0)


# --- scales ------------------------------------------------------------------------------------


def log_scale(values: Iterable[float | None]) -> tuple[Callable[[float], float], tuple[Tick, ...]] | None:
    """From a positive value to per cent from below, with ticks; None without positive values."""
    positive = [value for value in values if value is not None and math.isfinite(value) and value > 0]
    if not positive:
        return None
    low, high = math.log10(min(positive)), math.log10(max(positive))
    margin = max(0.06 * (high - low), 0.08)
    low, high = low - margin, high + margin

    def scale(value: float) -> float:
        exponent = math.log10(value) if value > 0 else low
        return 100 * min(max((exponent - low) / (high - low), 0.0), 1.0)

    return scale, tuple(Tick(100 - scale(value), number(value)) for value in _nice(low, high))


def _nice(low: float, high: float) -> list[float]:
    """Three to seven round numbers between two exponents."""
    low, high = max(low, -300.0), min(high, 308.0)  # what a float can say
    every = max(1, math.ceil((high - low) / 6))
    decades = [10.0**exponent for exponent in range(math.ceil(low), math.floor(high) + 1) if exponent % every == 0]
    if len(decades) >= 3:
        return decades
    fine = [
        mantissa * 10.0**exponent
        for exponent in range(math.floor(low), math.ceil(high) + 1)
        for mantissa in ((1, 2, 5) if high - low > 0.7 else (1, 1.5, 2, 3, 4, 5, 6, 8))
        if low <= math.log10(mantissa) + exponent <= high
    ]
    return fine[:: max(1, math.ceil(len(fine) / 6))] or [10.0 ** ((low + high) / 2)]


def level(value: float, largest: float) -> int:
    """Heat of a value: 0 (nothing to see) to 9, by the square root, so that small shares show too."""
    if not math.isfinite(value):
        return LEVELS
    if largest <= 0 or not math.isfinite(largest):
        return 0
    size = abs(value) / largest
    return 0 if size < 0.001 else max(1, round(LEVELS * math.sqrt(min(size, 1.0))))


# --- pictures ----------------------------------------------------------------------------------


def sparkline(norms: Sequence[float]) -> str:
    """A path in a box of 1000 x 1000, log scale; broken where a norm is not finite."""
    scaled = log_scale(norms)
    if scaled is None or len(norms) < 2:
        return ""
    scale = scaled[0]
    points: list[tuple[float, float | None]] = []
    for index, norm in enumerate(norms):
        y = SPARK_FLOOR + (100 - 2 * SPARK_FLOOR) * (1 - scale(norm) / 100) if math.isfinite(norm) else None
        points.append((100 * index / (len(norms) - 1), y))
    return _path(points)


def chart(
    steps: Sequence[tuple[int, float, float | None]], spikes: Sequence[tuple[int, float, str | None, str]]
) -> Chart | None:
    """`steps`: step, norm, limit. `spikes`: step, norm, address, words. None when nothing can be drawn."""
    if not steps:
        return None
    scaled = log_scale([value for _, norm, limit in steps for value in (norm, limit)])
    if scaled is None:
        scaled = log_scale([1.0])
        assert scaled is not None
    scale, y_ticks = scaled
    first, last = steps[0][0], max(steps[-1][0], steps[0][0] + 1)

    def x_of(step: int) -> float:
        return 100 * min(max((step - first) / (last - first), 0.0), 1.0)

    norm_points = [(x_of(step), 100 - scale(norm) if math.isfinite(norm) else None) for step, norm, _ in steps]
    limit_points = [
        (x_of(step), 100 - scale(limit) if limit is not None and math.isfinite(limit) else None)
        for step, _, limit in steps
    ]
    marks = tuple(
        Mark(
            x=x_of(step),
            y=100 - scale(norm) if math.isfinite(norm) else 3.0,
            text=words,
            href=href,
            finite=math.isfinite(norm),
        )
        for step, norm, href, words in spikes
        if first <= step <= last
    )
    return Chart(_path(norm_points), _path(limit_points), marks, _step_ticks(first, last), y_ticks)


def _path(points: Sequence[tuple[float, float | None]]) -> str:
    """Coordinates in tenths of a per cent; a lone point becomes a dot."""
    parts: list[str] = []
    pen_down = False
    for index, (x, y) in enumerate(points):
        if y is None:
            pen_down = False
            continue
        alone = not pen_down and (index + 1 == len(points) or points[index + 1][1] is None)
        parts.append(f"{'L' if pen_down else 'M'}{10 * x:.1f} {10 * y:.1f}" + ("h0.1" if alone else ""))
        pen_down = True
    return "".join(parts)


def _step_ticks(first: int, last: int) -> tuple[Tick, ...]:
    span = last - first
    raw = max(1.0, span / 5)
    size = 10 ** math.floor(math.log10(raw))
    every = max(1, next(int(size * m) for m in (1, 2, 5, 10) if size * m >= raw))
    start = -(-first // every) * every
    return tuple(Tick(100 * (step - first) / span, f"{step:,}") for step in range(start, last + 1, every))


def certificate_bars(certificate: Certificate, healthy: float | None, relossed: float | None = None) -> Bars:
    """Before, after, healthy, on one log scale with the limit; `relossed`: had the ratios left the loss too."""
    values = (certificate.grad_norm, certificate.norm_without, relossed, healthy, certificate.limit)
    scaled = log_scale(values)

    def bar(label: str, value: float, kind: str) -> Bar:
        width = 0.0 if scaled is None or not math.isfinite(value) else max(scaled[0](value), 0.6)
        return Bar(label, number(value), width, kind)

    count = certificate.num_culprits
    what = "Without the culprit" if count == 1 else f"Without the {count:,} culprits"
    rows = [
        bar("The step as it was", certificate.grad_norm, "bad"),
        bar(what, certificate.norm_without, "good" if certificate.holds else "bad"),
    ]
    if relossed is not None:
        rows.append(bar("And without their ratios", relossed, "good" if relossed <= certificate.limit else "bad"))
    if healthy is not None:
        rows.append(bar("Healthy", healthy, "calm"))
    finite = scaled is not None and math.isfinite(certificate.limit)
    return Bars(tuple(rows), scaled[0](certificate.limit) if scaled is not None and finite else None)


def tokens(view: SequenceView, finding: Finding) -> tuple[Token, ...]:
    """The tokens of a sequence, coloured by their share of the largest one in it."""
    place = (view.rank, view.micro_batch, view.sequence)

    def here(told: Iterable[Culprit]) -> set[int]:
        return {each.token for each in told if (each.rank, each.micro_batch, each.sequence) == place}

    culprits, origins = here(finding.culprits), here(finding.origins)
    largest = max((abs(share) for share in view.shares if math.isfinite(share)), default=0.0)
    shown = []
    for index, (token_id, share) in enumerate(zip(view.token_ids, view.shares, strict=False)):
        position = view.first_position + index
        known = index < len(view.token_texts)
        text = view.token_texts[index] if known else str(token_id)
        shown.append(
            Token(
                position=position,
                text=_shown(text) if known else text,
                level=level(share, largest),
                negative=share < 0,
                culprit=position in culprits,
                origin=position in origins,
                breaks_line=known and "\n" in text,
                title=f"token {position} · id {token_id} · {percent(share)} of the norm²"
                + (" · its ratio weighs the others" if position in origins else ""),
            )
        )
    return tuple(shown)


def _shown(text: str) -> str:
    """Blanks and control characters made visible, so that no token looks like nothing."""
    if text.isprintable():
        return text or "∅"
    text = text.replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥")
    return visible(text)


def layer_map(profile: Profile, culprit_position: int | None) -> Map | None:
    """The share of each layer at each position; None for an empty profile."""
    num_positions = max((len(row) for row in profile.values), default=0)
    if not profile.layers or not num_positions:
        return None
    per_column = -(-num_positions // MAP_COLUMNS_MAX)
    per_row = -(-len(profile.layers) // MAP_ROWS_MAX)
    largest = max((abs(v) for row in profile.values for v in row if math.isfinite(v)), default=0.0)
    num_columns = -(-num_positions // per_column)
    cells, rows = [], []
    for row, start in enumerate(range(0, len(profile.layers), per_row)):
        names = profile.layers[start : start + per_row]
        values = [v for v in profile.values[start : start + per_row] if v]
        name = visible(names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}")
        total = sum(v for each in values for v in each)
        rows.append((name, percent(total)))
        for column in range(num_columns):
            first = column * per_column
            block = [v for each in values for v in each[first : first + per_column]]
            worst = max(block, key=_size, default=0.0)
            heat = level(worst, largest)
            if heat:
                where = f"position {profile.first_position + first}"
                where += f" to {profile.first_position + first + per_column - 1}" if per_column > 1 else ""
                cells.append(Cell(column, row, heat, worst < 0, f"{name} · {where} · {percent(worst)}"))
    at = None
    if culprit_position is not None and 0 <= culprit_position - profile.first_position < num_positions:
        at = 100 * ((culprit_position - profile.first_position) // per_column + 0.5) / num_columns
    return Map(
        cells=tuple(cells),
        num_columns=num_columns,
        rows=tuple(rows),
        x_ticks=_position_ticks(profile.first_position, num_positions, per_column, num_columns),
        culprit_at=at,
        positions_per_column=per_column,
    )


LAYER_HEAT_FROM, LAYER_HEAT_TO = 2.0, 1000.0  # times the layer's own median


def layers_by_step(windows: Sequence[tuple[int, int, Mapping[str, float]]]) -> Map | None:
    """Norms of layers (rows) by windows of steps (columns), each against the layer's own median; None without any."""
    names = sorted({name for _, _, norms in windows for name in norms}, key=_natural)
    if not names:
        return None
    width = max(width for _, width, _ in windows)
    first = min(first for first, _, _ in windows) // width
    num_columns = max(start for start, _, _ in windows) // width - first + 1
    per_row = -(-len(names) // MAP_ROWS_MAX)
    medians = {name: _median([norms[name] for _, _, norms in windows if name in norms]) for name in names}
    cells, rows = [], []
    for row, start in enumerate(range(0, len(names), per_row)):
        group = names[start : start + per_row]
        label = visible(group[0] if len(group) == 1 else f"{group[0]} … {group[-1]}")
        greatest = 1.0
        for step, _, norms in windows:
            worst = max((norms[name] / medians[name] for name in group if name in norms and medians[name]), default=1.0)
            worst = math.inf if math.isnan(worst) or any(not math.isfinite(norms.get(n, 0.0)) for n in group) else worst
            greatest = max(greatest, worst)
            heat = _layer_heat(worst)
            if heat:
                where = f"step {step:,}" + (f" to {step + width - 1:,}" if width > 1 else "")
                cells.append(Cell(step // width - first, row, heat, False, f"{label} · {where} · {_times(worst)}"))
        rows.append((label, _times(greatest)))
    last = first + num_columns
    ticks = tuple(
        Tick(100 * (tick.at / 100 * (num_columns - 1) + 0.5) / num_columns, tick.text)
        for tick in _step_ticks(first * width, max((last - 1) * width, first * width + 1))
    )
    return Map(tuple(cells), num_columns, tuple(rows), ticks, None, width)


def _layer_heat(times: float) -> int:
    if not math.isfinite(times):
        return LEVELS
    if times < LAYER_HEAT_FROM:
        return 0
    part = math.log(times / LAYER_HEAT_FROM) / math.log(LAYER_HEAT_TO / LAYER_HEAT_FROM)
    return max(1, round(LEVELS * min(part, 1.0)))


def _times(value: float) -> str:
    return "not finite" if not math.isfinite(value) else f"{number(value)}x"


def _median(values: Sequence[float]) -> float:
    finite = sorted(value for value in values if math.isfinite(value))
    return finite[len(finite) // 2] if finite else 0.0


def _natural(name: str) -> list[tuple[int, str]]:
    """layers.2 comes before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _size(value: float) -> float:
    return abs(value) if math.isfinite(value) else math.inf


def _position_ticks(first: int, count: int, per_column: int, num_columns: int) -> tuple[Tick, ...]:
    ticks = _step_ticks(first, first + max(count - 1, 1))
    return tuple(
        Tick(
            100 * ((round(first + tick.at / 100 * max(count - 1, 1)) - first) // per_column + 0.5) / num_columns,
            tick.text,
        )
        for tick in ticks
    )


def chain(finding: Finding) -> tuple[Link, ...]:
    """Step -> rank -> micro-batch -> sequence -> token, each with its share of the norm²."""
    links = [Link("Step", f"{finding.step:,}", 1.0)]
    if not finding.culprits:
        return tuple(links)
    first = finding.culprits[0]
    place = (first.rank, first.micro_batch, first.sequence)
    names = ("Rank", "Micro-batch", "Sequence")
    for depth, name in enumerate(names):
        inside = [
            share for *where, share in finding.shares_by_sequence if tuple(where[: depth + 1]) == place[: depth + 1]
        ]
        links.append(Link(name, str(place[depth]), sum(inside) if inside else None))
    if finding.verdict not in ("sequence", "group", "micro-batch", "rank", "data-source"):
        links.append(Link("Token", str(first.token), first.share, first.token_text))
    return tuple(links)
