"""Geometry stays inside its box, whatever the numbers."""

import math
import re

from hypothesis import example, given
from hypothesis import strategies as st

from gradloc_proto import messages as m
from gradloc_reporter.web import drawing

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


def coordinates(path: str) -> list[float]:
    assert "nan" not in path and "inf" not in path
    return [float(number) for number in re.findall(r"-?\d+\.\d+", path.replace("h0.1", ""))]


@given(st.lists(NUMBERS, max_size=50))
def test_a_sparkline_stays_in_its_box(norms: list[float]) -> None:
    assert all(0 <= value <= 1000 for value in coordinates(drawing.sparkline(norms)))


@example([(121.0, None)], 0)  # no round number is near
@given(st.lists(st.tuples(NUMBERS, st.none() | NUMBERS), max_size=50), st.integers(0, 10**9))
def test_a_chart_stays_in_its_box_and_its_ticks_too(values: list[tuple[float, float | None]], first: int) -> None:
    steps = [(first + index, norm, limit) for index, (norm, limit) in enumerate(values)]
    spikes = [(step, norm, None, "") for step, norm, _ in steps]
    chart = drawing.chart(steps, spikes)
    assert (chart is None) == (not steps)
    if chart is not None:
        assert all(0 <= value <= 1000 for path in (chart.norm, chart.limit) for value in coordinates(path))
        assert len(chart.marks) == len(steps)
        assert all(0 <= mark.x <= 100 and 0 <= mark.y <= 100 for mark in chart.marks)
        assert all(-1e-6 <= tick.at <= 100 + 1e-6 for tick in (*chart.x_ticks, *chart.y_ticks))
        assert 1 <= len(chart.y_ticks) <= 13 and len(chart.x_ticks) <= 12


@given(NUMBERS, NUMBERS)
def test_heat_is_a_level_and_grows_with_the_value(value: float, largest: float) -> None:
    assert 0 <= drawing.level(value, largest) <= drawing.LEVELS
    assert drawing.level(0.5, 1.0) <= drawing.level(0.9, 1.0) <= drawing.level(1.0, 1.0) == drawing.LEVELS


def test_the_scale_is_logarithmic() -> None:
    scaled = drawing.log_scale([0.1, 10.0])
    assert scaled is not None
    scale = scaled[0]
    assert math.isclose(scale(1.0), 50) and scale(0.0) == 0.0 and scale(1e9) == 100.0


@given(st.integers(0, 200), st.integers(0, 700), st.integers(0, 1000))
def test_a_map_is_thinned_to_a_screen_and_never_loses_its_hottest_cell(rows: int, columns: int, place: int) -> None:
    values = [[0.0] * columns for _ in range(rows)]
    if rows and columns:
        values[place % rows][place % columns] = 0.9
    profile = m.Profile(
        layers=tuple(f"layer {row}" for row in range(rows)), first_position=7, values=tuple(map(tuple, values))
    )
    found = drawing.layer_map(profile, 7 + (place % columns if columns else 0))
    if not rows or not columns:
        assert found is None
        return
    assert found is not None
    assert len(found.rows) <= drawing.MAP_ROWS_MAX and found.num_columns <= drawing.MAP_COLUMNS_MAX
    assert [cell.level for cell in found.cells] == [drawing.LEVELS]
    assert all(0 <= cell.column < found.num_columns and 0 <= cell.row < len(found.rows) for cell in found.cells)
    assert found.culprit_at is not None and 0 <= found.culprit_at <= 100


def test_blanks_and_control_characters_are_visible_in_tokens() -> None:
    view = m.SequenceView(
        rank=0,
        micro_batch=0,
        sequence=0,
        first_position=5,
        token_ids=(1, 2, 3, 4),
        token_texts=("\n", "\t", "", "\u202e"),
        shares=(0.0, -0.5, 1.0, 0.0),
    )
    fidelity = m.Fidelity(reported_norm=1, replayed_norm=1, rel_error=0, tolerance=0, reproduced=True)
    finding = m.Finding(verdict="token", strategy="bisect", step=1, summary="", fidelity=fidelity, cost=m.Cost(steps=1))
    shown = drawing.tokens(view, finding)
    assert [token.text for token in shown] == ["⏎", "⇥", "∅", "\\u202e"]
    assert [token.breaks_line for token in shown] == [True, False, False, False]
    assert (shown[1].negative, shown[2].level, shown[0].position) == (True, drawing.LEVELS, 5)
