"""Charts of reports: numbers to places."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.report.figures import Series, Span, bar_chart, line_chart, short, ticks, timeline


@given(st.floats(-1e300, 0), st.floats(0, 1e300))
def test_ticks_are_few_and_cover_the_values(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 9 and all(a < b for a, b in pairwise(found))
    slack = (found[1] - found[0]) * 1e-6
    assert found[0] <= low + slack and found[-1] >= high - slack


def test_ticks_are_round() -> None:
    assert ticks(0, 1.37) == [0, 0.5, 1, 1.5]
    assert ticks(0, 0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert [short(value) for value in (0, 0.5, 1234.5, 1e-7, 123456)] == ["0", "0.5", "1.23e+03", "1.0e-07", "1.2e+05"]


POINTS = st.lists(st.tuples(st.floats(-1e299, 1e299), st.floats(-1e299, 1e299)), max_size=20)


@given(POINTS, POINTS)
def test_lines_stay_inside_whatever_the_numbers(one: list[tuple[float, float]], two: list[tuple[float, float]]) -> None:
    drawn = line_chart([Series("a", one, "x"), Series("b", two, "y")], "t", [(x, "label") for x, _ in one], "x", "y")
    assert drawn.count("<circle") == len(one) + len(two)
    for place in re.findall(r' c?x[12]?="([^"]+)%"', drawn):
        assert 0 <= float(place) <= 100
    for place in re.findall(r' cy="([^"]+)"', drawn):
        assert 0 <= float(place) <= 240
    ways = re.findall(r'<path d="M([^"]+)"', drawn)
    assert [way.count("L") + 1 for way in ways] == [len(points) for points in (one, two) if len(points) > 1]
    for x, y in (point.split() for way in ways for point in way.split("L")):
        assert 0 <= float(x) <= 100 and 0 <= float(y) <= 240


def test_labels_that_would_touch_are_left_out() -> None:
    points = [(float(number), 1.0) for number in range(40)]
    drawn = line_chart([Series("a", points, "x")], "t", [(x, f"{x:g}") for x, _ in points], "epoch", "loss")
    shown = re.findall(r'text-anchor="middle">(\d+)<', drawn)
    assert shown[0] == "0" and 5 < len(shown) < 20


def test_bars_show_the_floor_and_whether_the_last_reaches_it() -> None:
    rows = [("64 KiB", 1.0), ("1 GiB", 4.0)]
    assert "bar low" in bar_chart(rows, "t", "GB/s", 5.0) and "floor: 5 GB/s" in bar_chart(rows, "t", "GB/s", 5.0)
    reached = bar_chart(rows, "t", "GB/s", 2.0)
    assert "bar low" not in reached and 'width="25.00%"' in reached and 'x1="50.00%"' in reached
    assert "floor" not in bar_chart(rows, "t", "GB/s")
    assert bar_chart([], "t", "GB/s") and bar_chart([("x", 0.0)], "t", "GB/s")


def test_a_timeline_has_a_row_for_each_label() -> None:
    spans = [Span("a", 0, 4, "import", "4 s"), Span("a", 4, 10, "launch", "6 s"), Span("b", 0, 0, "launch", "none")]
    drawn = timeline(spans, "t", [("launch", "distributed")], "note")
    assert drawn.count("<rect") == 3 and 'x="38.40%"' in drawn and drawn.count('y="6"') == 2
    assert timeline([], "t", [], "")
