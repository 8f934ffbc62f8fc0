"""Values between measured points."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puzzle_align.planning.costs.interpolate import Line, Sheet

SHEET = Sheet([(x, y, 2 * x + 5 * y + x * y) for x in (8, 16, 64) for y in (1, 4, 10)])


def test_a_line_is_exact_at_points_linear_between_and_flags_what_is_beyond() -> None:
    line = Line([(10, 5.0), (2, 1.0), (4, 2.0)])
    assert [line.at(x).value for x in (2, 4, 10)] == [1, 2, 5]
    assert line.at(7) == (3.5, False)
    assert line.at(12) == (6.0, True) and line.at(10.4) == (pytest.approx(5.2), False)
    assert line.at(1.5) == (0.75, True)

    # Never below a quarter of the nearest value; one point holds everywhere.
    assert Line([(10, 1.0), (20, 9.0)]).at(1) == (0.25, True)
    assert Line([(10, 9.0), (20, 1.0)]).at(100) == (0.25, True)
    line = Line([(8, 3.0)])
    assert line.at(8.2) == (3.0, False) and line.at(16) == (3.0, True)
    # Points at one place are averaged; the least of a latency and a bandwidth is the bandwidth.
    line = Line([(1, 2.0), (1, 4.0), (3, 5.0)])
    assert line.at(1).value == 3 and line.at(2).value == 4
    assert Line([(x, 5 + 2 * x) for x in (1, 10, 1000)]).least_each == pytest.approx(2)
    assert Line([(0, 5.0), (1, 1.0), (2, 4.0)]).least_each == 1  # the ratios 1 / 1 and 4 / 2
    assert Line([(1, 2.0), (2, 2.0), (4, 8.0)]).least_each == 1  # level before the first point
    # Below the first point the line falls to a quarter of its value: 0.25 at 9.0625.
    line = Line([(10, 1.0), (20, 9.0)])
    assert line.at(9.0625).value == 0.25
    assert line.least_each == pytest.approx(0.25 / 9.0625)


measured = st.lists(
    st.tuples(st.floats(1, 1e9), st.floats(1e-6, 10)),
    min_size=1,
    max_size=6,
    unique_by=lambda p: p[0],
)


@given(measured, st.floats(1e-3, 1e12))
def test_no_unit_counts_less_than_the_least(points: list[tuple[int, float]], x: float) -> None:
    line = Line(points)
    assert line.at(x).value >= x * line.least_each * (1 - 1e-9)


@given(st.floats(8, 64), st.floats(1, 10))
def test_a_sheet_is_exact_for_what_is_linear_in_each(x: float, y: float) -> None:
    found = SHEET.at(x, y)
    assert found.value == pytest.approx(2 * x + 5 * y + x * y)
    assert not found.beyond


@pytest.mark.parametrize(("x", "y"), [(4, 4), (80, 4), (16, 0.5), (16, 12)])
def test_a_sheet_flags_what_is_beyond_in_either(x: float, y: float) -> None:
    assert SHEET.at(x, y).beyond


def test_at_a_measured_size_another_sizes_range_does_not_matter() -> None:
    """Longer rows see more pairs: their points reach further, and theirs alone are asked."""
    sheet = Sheet([(s, each, s * each) for s in (1024, 2048) for each in (128, s / 2)])
    assert sheet.at(2048, 1000) == (2048 * 1000, False)
    assert sheet.at(1024, 1000).beyond and sheet.at(1536, 1000).beyond

    single = Sheet([(8, 1, 4.0), (8, 3, 8.0)])  # is taken in proportion
    assert single.at(8, 2) == (6.0, False) and single.at(16, 2) == (12.0, True)
