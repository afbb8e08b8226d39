"""Survival curves as an SVG, readable on light and dark pages. Knows only the benchmark's JSON."""

from collections.abc import Sequence
from typing import Any

WIDTH, HEIGHT = 860, 330
PANEL_WIDTH, PANEL_HEIGHT = 330, 200
LEFT, TOP, GAP = 60, 40, 80
COLOURS = ("#777777", "#d08700", "#2f7ed8", "#1a9850", "#b0479b", "#8c564b", "#17a2a2", "#9a9a00", "#e05d5d")
DASHES = ("", "", "", "", "6 3", "6 3", "6 3", "6 3", "6 3")


def survival_svg(rows: Sequence[dict[str, Any]]) -> str:
    """One panel for the planted faults, one for the natural runs."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="sans-serif" font-size="12">',
        "<title>Share of runs that have not collapsed, by step and remedy</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for panel, natural in enumerate((False, True)):
        mine = [row for row in rows if row["natural"] is natural]
        if mine:
            parts += _panel(LEFT + panel * (PANEL_WIDTH + GAP), "natural" if natural else "planted", mine)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: float, title: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    num_steps, bottom = rows[0]["num_steps"], TOP + PANEL_HEIGHT
    parts = [
        f'<text x="{left}" y="{TOP - 14}" font-weight="bold" fill="#222">{title}: share of runs still alive</text>',
        f'<path d="M{left} {TOP}V{bottom}H{left + PANEL_WIDTH}" fill="none" stroke="#444"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * PANEL_HEIGHT
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end" fill="#444">{share:g}</text>')
    for step in range(0, num_steps + 1, 50):
        x = left + step / num_steps * PANEL_WIDTH
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle" fill="#444">{step}</text>')
    for index, row in enumerate(rows):
        # A little apart, so that runs that all survive do not hide each other.
        points = [
            (left + step / num_steps * PANEL_WIDTH, bottom - share * PANEL_HEIGHT + 1.5 * (index - (len(rows) - 1) / 2))
            for step, share in row["survival_curve"]
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        x, y = left + (index % 4) * 88, bottom + 36 + (index // 4) * 16
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{row["name"]}</text>')
    return parts
