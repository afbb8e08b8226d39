"""A finding as one HTML file that needs nothing else: no network, no script, opens from a mail.

Text of tokens, uids and summaries is the run's and is escaped; a policy in the file forbids scripts. Knows
nothing of how the finding was found. Shapes: L layer keys, T positions.
"""

import base64
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt

from gradloc_localizer.history import Comparison, Episode
from gradloc_proto.messages import Finding

NUM_LEVELS = 9  # shades of a token or a cell
SHARE_MIN = 1e-4  # of the norm²: smaller shares are not coloured
_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("gradloc_localizer"), autoescape=True, trim_blocks=True, lstrip_blocks=True
)


@dataclass(frozen=True)
class _Token:
    text: str
    title: str
    level: int
    against: bool
    is_culprit: bool


@dataclass(frozen=True)
class _Bar:
    name: str
    norm: float
    width: float  # per cent of the scale, logarithmic
    kind: str


def html_report(finding: Finding, *, run_id: str = "", where: str = "") -> str:
    """The page. `run_id` and `where` (the snapshot) go into its title."""
    return _ENVIRONMENT.get_template("finding.html").render(
        finding=finding,
        run_id=run_id,
        where=where,
        tokens=list(_tokens(finding)),
        bars=_bars(finding),
        limit_at=_limit_at(finding),
        map=_map(finding),
        growth=_growth(finding),
        number=_number,
        percent=_percent,
        levels=range(1, NUM_LEVELS + 1),
    )


def history_page(history: Comparison) -> str:
    """The findings of runs over time, one page."""
    return _ENVIRONMENT.get_template("history.html").render(
        history=history, number=_number, span=span, levels=range(1, NUM_LEVELS + 1)
    )


def span(one: Episode) -> str:
    """First to last step, with the attempt where that is not the first."""

    def named(at: tuple[int, int]) -> str:
        return f"{at[1]:,}" if at[0] == 0 else f"{at[1]:,} (attempt {at[0]})"

    return named(one.first) if one.first == one.last else f"{named(one.first)} to {named(one.last)}"


def _tokens(finding: Finding) -> Iterator[_Token]:
    view = finding.sequence_view
    if view is None:
        return
    culprits = {
        one.token
        for one in finding.culprits
        if (one.rank, one.micro_batch, one.sequence) == (view.rank, view.micro_batch, view.sequence)
    }
    for index, (token_id, share) in enumerate(zip(view.token_ids, view.shares, strict=True)):
        position = view.first_position + index
        text = view.token_texts[index] if view.token_texts else str(token_id)
        known = "" if math.isnan(share) else f", {_percent(share)} of the norm²"
        yield _Token(text, f"token {position}, id {token_id}{known}", _level(share), share < 0, position in culprits)


def _level(share: float) -> int:
    """0 (not coloured) to NUM_LEVELS, even steps of the logarithm: a thousandth is seen beside a half."""
    size = abs(share)
    if not size >= SHARE_MIN:
        return 0
    return 1 + min(NUM_LEVELS - 1, int(NUM_LEVELS * (1 + math.log10(min(size, 1.0)) / -math.log10(SHARE_MIN))))


def _scale(finding: Finding) -> tuple[float, float] | None:
    """Logarithms of the smallest and largest norm that is drawn."""
    certificate = finding.certificate
    if certificate is None:
        return None
    norms = [certificate.grad_norm, certificate.norm_without, certificate.limit, finding.healthy_norm or 0.0]
    norms += [] if finding.fix is None else [finding.fix.norm_after]
    logs = [math.log10(norm) for norm in norms if 0 < norm < math.inf]
    return (min(logs) - 0.3, max(logs) + 0.1) if logs else None


def _bars(finding: Finding) -> list[_Bar]:
    scale, certificate = _scale(finding), finding.certificate
    if scale is None or certificate is None:
        return []
    rows = [("as it was", certificate.grad_norm, "was"), ("without the culprits", certificate.norm_without, "without")]
    if finding.fix is not None:
        rows.append((finding.fix.name, finding.fix.norm_after, "fixed"))
    if finding.healthy_norm:
        rows.append(("usual", finding.healthy_norm, "usual"))
    return [_Bar(name, norm, _width(norm, scale), kind) for name, norm, kind in rows]


def _width(norm: float, scale: tuple[float, float]) -> float:
    if not norm > 0:
        return 100.0 if math.isnan(norm) else 0.0
    return 100.0 if norm == math.inf else 100 * (math.log10(norm) - scale[0]) / (scale[1] - scale[0])


def _limit_at(finding: Finding) -> float | None:
    scale = _scale(finding)
    return None if scale is None or finding.certificate is None else _width(finding.certificate.limit, scale)


def _map(finding: Finding) -> dict[str, Any] | None:
    """The layer x position profile as a picture, one pixel a cell: data URI, rows' names, first and last position."""
    profile = finding.profile
    if profile is None or not profile.values or not profile.values[0]:
        return None
    values_LT = np.array(profile.values, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        depth_LT = np.clip(1 + np.log10(np.abs(values_LT)) / -math.log10(SHARE_MIN), 0.0, 1.0)
    depth_LT = np.nan_to_num(depth_LT, nan=0.0)
    warm, cool = np.array([200, 48, 48]), np.array([64, 112, 216])  # seen on white and on black
    colour_LT3 = np.where((values_LT >= 0)[..., None], warm, cool)
    pixels_LT4 = np.concatenate([colour_LT3, 255 * depth_LT[..., None]], axis=-1)
    return {
        "uri": "data:image/png;base64," + base64.b64encode(png(pixels_LT4.astype(np.uint8))).decode(),
        "layers": profile.layers,
        "first": profile.first_position,
        "last": profile.first_position + values_LT.shape[1] - 1,
    }


def png(pixels_HW4: npt.NDArray[np.uint8]) -> bytes:
    """A PNG of 8-bit RGBA (https://www.w3.org/TR/png/): signature, header, one zlib stream of unfiltered rows, end."""
    height, width = pixels_HW4.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in pixels_HW4)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def _growth(finding: Finding) -> list[tuple[str, float, float]]:
    """Layer, times its healthy norm, width in per cent; the largest first."""
    known = [(name, times) for name, times in finding.layer_growth.items() if math.isfinite(times) and times > 0]
    top = sorted(known, key=lambda pair: -pair[1])[:12]
    most = max((math.log10(max(times, 1.0)) for _, times in top), default=0.0) or 1.0
    return [(name, times, 100 * math.log10(max(times, 1.0)) / most) for name, times in top]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "unknown" if value is None or math.isnan(value) else f"{100 * value:.3g} %"
