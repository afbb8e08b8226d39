"""Numbers and foreign text made fit for people: three digits, shares, token texts in quotes. Pure."""

import json
import math

from gradloc_proto.plain_text import visible

TOKEN_TEXT_MAX = 60


def number(value: float | None) -> str:
    """Three significant digits, readable: 640, 0.41, 1,560, 2.1e5, NaN, infinite."""
    if value is None:
        return "unknown"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 99_950 or size < 0.00095:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    digits = max(0, 2 - math.floor(math.log10(size)))
    rounded = f"{round(value, 2 - math.floor(math.log10(size))):,.{digits}f}"
    return rounded.rstrip("0").rstrip(".") if "." in rounded else rounded


def percent(share: float | None) -> str:
    """A share of the squared norm: 99.9 %, 0.4 %, < 0.1 %."""
    if share is None or not math.isfinite(share):
        return "an unknown share" if share is None else f"{number(share)} %"
    value = 100 * share
    if value != 0 and abs(value) < 0.1:
        return "< 0.1 %" if value > 0 else "> -0.1 %"
    return f"{value:.1f}".removesuffix(".0") + " %"


def factor(value: float, baseline: float | None) -> float | None:
    """How many times the baseline; None where that says nothing."""
    if baseline is None or not math.isfinite(value) or not math.isfinite(baseline) or baseline <= 0:
        return None
    return value / baseline


def token_text(text: str) -> str:
    """A token in quotes, as in a string literal: `"<th"`, `"\\n"`."""
    return visible(json.dumps(text[:TOKEN_TEXT_MAX], ensure_ascii=False), 3 * TOKEN_TEXT_MAX)
