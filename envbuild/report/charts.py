"""Charts: numbers to SVG. Widths are per cent, so that a chart fits any page while its text keeps its size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from envbuild.report.markup import Html, h, joined

_HEIGHT, _TOP, _BOTTOM = 240, 12, 30
_TICKS = 5
_ROW, _BAR, _TALL = 30, 16, 44
_DENSE = 30  # points of a line, whose dots are then small
# Below this, floats have too few digits for an axis.
_LEAST = 1e-290


@dataclass(frozen=True, slots=True)
class Series:
    """Points (x, y) of a line. `look` is its class in the style sheet.

    `dots` are the points that have a dot and a title, None for all of them.
    """

    name: str
    points: Sequence[tuple[float, float]]
    look: str
    dots: Sequence[tuple[float, float]] | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A bar from `start` to `end` in the row `label` of a timeline."""

    label: str
    start: float
    end: float
    look: str
    title: str


def short(value: float) -> str:
    """Return a number as a label: three digits, no exponent for usual sizes."""
    return f"{value:.3g}" if 1e-4 <= abs(value) < 1e4 or not value else f"{value:.1e}"


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten) from at most `low` to at least `high`."""
    if not high - low > _LEAST:
        high = low + (abs(low) if abs(low) > _LEAST else 1.0)
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [step * one for one in range(first, last + 1)]


def line_chart(
    series: Sequence[Series], title: str, x_labels: Sequence[tuple[float, str]], x_name: str, y_name: str
) -> Html:
    """Return lines over a common axis; `x_labels` are (place, text)."""
    points = [point for one in series for point in one.points]
    if not points:
        return Html()
    levels = ticks(min(0.0, *(y for _, y in points)), max(y for _, y in points))
    left, right = min(x for x, _ in points), max(x for x, _ in points)

    def place(x: float) -> float:
        return 2 + 96 * (x - left) / (right - left) if right > left else 50

    def across(x: float) -> str:
        return _percent(place(x))

    def up(y: float) -> float:
        share = (y - levels[0]) / (levels[-1] - levels[0])
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP), 2)

    names = [h("text", short(level), x="100%", y=up(level) + 4, text_anchor="end", dx="-8") for level in levels]
    parts = [h("line", x1="0", x2="100%", y1=up(level), y2=up(level), class_="grid") for level in levels]
    parts += [
        h("text", text, x=across(x), y=_HEIGHT - 8, text_anchor="middle")
        for x, text in _thinned(x_labels, right - left)
    ]
    dense = " dense" if any(len(_dots(one)) > _DENSE for one in series) else ""
    for one in series:
        # One path for all points: elements of their own would be most of a page. Its units are stretched to the width.
        way = "L".join(f"{place(x):.2f} {up(y):.6g}" for x, y in one.points)
        path = h("path", d=f"M{way}", class_="line", vector_effect="non-scaling-stroke")
        line = h(
            "svg",
            path,
            viewBox=f"0 0 100 {_HEIGHT}",
            preserveAspectRatio="none",
            width="100%",
            height=_HEIGHT,
            aria_hidden="true",
        )
        dots = [
            h("circle", h("title", f"{one.name}, {x_name} {short(x)}: {short(y)}"), cx=across(x), cy=up(y), r="4")
            for x, y in _dots(one)
        ]
        parts.append(h("g", line if len(one.points) > 1 else None, dots, class_=one.look + dense))
    legend = [(one.look, one.name) for one in series if one.points]
    return _figure(title, _HEIGHT, 56, names, parts, legend, f"{y_name} over {x_name}")


def _dots(series: Series) -> Sequence[tuple[float, float]]:
    return series.points if series.dots is None else series.dots


def bar_chart(rows: Sequence[tuple[str, float]], title: str, unit: str, floor: float = 0.0, note: str = "") -> Html:
    """Return one bar for each (label, value), and a line at `floor` if there is one."""
    most = max([floor, *(value for _, value in rows)], default=0.0) or 1.0
    parts = []
    for place, (label, value) in enumerate(rows):
        y = place * _TALL
        look = "bar low" if floor and place == len(rows) - 1 and value < floor else "bar"
        parts.append(h("text", f"{label}: {short(value)} {unit}", x="0", y=y + 16))
        parts.append(h("rect", x="0", y=y + 22, width=_percent(100 * max(0.0, value) / most), height=_BAR, class_=look))
    height = len(rows) * _TALL + 4
    if floor:
        at = _percent(100 * floor / most)
        parts.append(h("line", x1=at, x2=at, y1="6", y2=height, class_="floor"))
    legend = [("floor", f"floor: {short(floor)} {unit}")] if floor else []
    return _figure(title, height, 0, [], parts, legend, note)


def timeline(spans: Sequence[Span], title: str, legend: Sequence[tuple[str, str]], note: str) -> Html:
    """Return a row for each label, with its bars over seconds."""
    labels = list(dict.fromkeys(one.label for one in spans))
    most = max((one.end for one in spans), default=0.0) or 1.0
    levels = [level for level in ticks(0.0, most) if level <= most * 1.001]
    height = len(labels) * _ROW + 30
    parts: list[Html] = []
    for level in levels:
        at = _percent(96 * level / most)
        anchor = "start" if level == 0 else "middle"
        parts.append(h("line", x1=at, x2=at, y1="0", y2=height - 24, class_="grid"))
        parts.append(h("text", f"{short(level)} s", x=at, y=height - 6, text_anchor=anchor))
    for one in spans:
        parts.append(
            h(
                "rect",
                h("title", one.title),
                x=_percent(96 * one.start / most),
                y=labels.index(one.label) * _ROW + 6,
                width=_percent(max(0.4, 96 * (one.end - one.start) / most)),
                height=_BAR,
                rx="2",
                class_=one.look,
            )
        )
    names = [
        h("text", label, x="100%", y=place * _ROW + 19, text_anchor="end", dx="-10")
        for place, label in enumerate(labels)
    ]
    return _figure(title, height, 116, names, parts, legend, note)


def _figure(
    title: str,
    height: int,
    gutter: int,
    names: Sequence[Html],
    parts: Sequence[Html],
    legend: Sequence[tuple[str, str]],
    note: str,
) -> Html:
    """Return a chart whose alternative text is `title`; its names stand in a gutter at the left."""
    keys = [h("li", h("span", class_=f"key {look}", aria_hidden="true"), name) for look, name in legend]
    drawn = joined(
        h("svg", *names, width=gutter, height=height, aria_hidden="true"),
        h("svg", *parts, width="100%", height=height, aria_hidden="true"),
    )
    return h(
        "figure",
        h("figcaption", note) if note else None,
        h("ul", keys, class_="legend") if keys else None,
        h("div", drawn, class_="chart", role="img", aria_label=title),
    )


def _thinned(labels: Sequence[tuple[float, str]], width: float) -> list[tuple[float, str]]:
    """Return the labels that do not touch on a phone."""
    longest = max((len(text) for _, text in labels), default=1)
    room = width * (longest + 2) * 7 / 260
    kept: list[tuple[float, str]] = []
    for place, text in labels:
        if not kept or (place - kept[-1][0] >= room and text != kept[-1][1]):
            kept.append((place, text))
    return kept


def _percent(value: float) -> str:
    return f"{value:.2f}%"
