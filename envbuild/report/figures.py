"""The parts of the page about one receipt that have charts, and the charts: numbers to SVG.

Widths are per cent, so that a chart fits any page while its text keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envbuild.base.text import human_size
from envbuild.base.toml import table_at
from envbuild.report.data import (
    ReportEntry,
    SizedPackage,
    evidence,
    number_of,
    numbers_of,
    objects,
    packages_of,
    part,
    step_seconds,
    text_of,
)
from envbuild.report.sections import Html, Shared, download, evidence_html, folded, h, joined, pairs, table

_HEIGHT, _TOP, _BOTTOM = 240, 12, 30
_TICKS = 5
_ROW, _BAR, _TALL = 30, 16, 44
_DENSE = 30  # points of a line, whose dots are then small
# Below this, floats have too few digits for an axis.
_LEAST = 1e-290
# Check, class in the style sheet, name.
_LAUNCHES = (
    ("reference", "reference", "one process"),
    ("launch", "launch", "distributed"),
    ("relaunch", "resumed", "resumed"),
)
# Rows of a timeline; with more ranks, a node has one row.
_MOST_RANKS = 16
_FEW = 15  # packages whose list is unfolded


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
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [step * count for count in range(first, last + 1)]


def line_chart(
    series: Sequence[Series], title: str, x_labels: Sequence[tuple[float, str]], x_name: str, y_name: str
) -> Html:
    """Return lines over a common axis; `x_labels` are (place, text)."""
    points = [point for line in series for point in line.points]
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
    dense = " dense" if any(len(_dots(line)) > _DENSE for line in series) else ""
    for drawn in series:
        # One path for all points: elements of their own would be most of a page. Its units are stretched to the width.
        way = "L".join(f"{place(x):.2f} {up(y):.6g}" for x, y in drawn.points)
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
            h("circle", h("title", f"{drawn.name}, {x_name} {short(x)}: {short(y)}"), cx=across(x), cy=up(y), r="4")
            for x, y in _dots(drawn)
        ]
        parts.append(h("g", line if len(drawn.points) > 1 else None, dots, class_=drawn.look + dense))
    legend = [(line.look, line.name) for line in series if line.points]
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
    labels = list(dict.fromkeys(span.label for span in spans))
    most = max((span.end for span in spans), default=0.0) or 1.0
    levels = [level for level in ticks(0.0, most) if level <= most * 1.001]
    height = len(labels) * _ROW + 30
    parts: list[Html] = []
    for level in levels:
        at = _percent(96 * level / most)
        anchor = "start" if level == 0 else "middle"
        parts.append(h("line", x1=at, x2=at, y1="0", y2=height - 24, class_="grid"))
        parts.append(h("text", f"{short(level)} s", x=at, y=height - 6, text_anchor=anchor))
    for span in spans:
        parts.append(
            h(
                "rect",
                h("title", span.title),
                x=_percent(96 * span.start / most),
                y=labels.index(span.label) * _ROW + 6,
                width=_percent(max(0.4, 96 * (span.end - span.start) / most)),
                height=_BAR,
                rx="2",
                class_=span.look,
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


def training(entry: ReportEntry) -> Html | None:
    """Return the loss of the distributed, the resumed and the one-process run over their steps."""
    curve = evidence(entry.receipt, "curve")
    losses = numbers_of(curve.get("losses")) or numbers_of(evidence(entry.receipt, "loss").get("losses"))
    alone, tolerance = numbers_of(curve.get("one_process")), number_of(curve, "tolerance")
    if not losses and not alone:
        return None
    resumed = number_of(evidence(entry.receipt, "resume"), "start_epoch")
    half = int(resumed) if resumed is not None and 0 < resumed <= len(losses) else len(losses)
    points, single = _points(losses, curve.get("steps")), _points(alone, curve.get("one_process_steps"))
    killed = evidence(entry.receipt, "restart")
    start = int(min(1e6, max(0.0, number_of(killed, "start_epoch") or 0)))
    # That job runs longer than the others, so that it can be killed in the middle: only their epochs are drawn.
    end = max(len(losses), len(alone))
    after = _points(numbers_of(killed.get("losses")), killed.get("steps"), start)
    before = sum(place <= half for place, _ in points)
    series = [
        # A dot at the end of each epoch; the values of all steps are in the evidence of the checks.
        Series(name, drawn, look, [point for point in drawn if point[0] == int(point[0])])
        for name, look, drawn in (
            ("one process (reference)", "alone", single),
            ("after a killed rank", "killed", [point for point in after if point[0] <= end]),
            ("distributed", "spread", points[:before]),
            ("resumed from the snapshot", "resumed", points[max(0, before - 1) :] if before < len(points) else []),
        )
    ]
    worst = max((_relative(a, b) for a, b in zip(losses, alone, strict=False)), default=None)
    comment = "" if worst is None else f" The largest relative difference to one process is {short(worst)}."
    comment += f" At most {short(tolerance)} is allowed." if worst is not None and tolerance is not None else ""
    first, last = (losses or alone)[0], (losses or alone)[-1]
    title = f"Loss over {end} epochs: from {short(first)} to {short(last)}.{comment}"
    labels = [(float(epoch), str(epoch)) for epoch in range(1, min(end, 1000) + 1)]
    rows = [
        (
            epoch,
            "distributed" if epoch < half else "resumed",
            f"{loss:.9g}",
            f"{alone[epoch]:.9g}" if epoch < len(alone) else "—",
            short(_relative(loss, alone[epoch])) if epoch < len(alone) else "—",
        )
        for epoch, loss in enumerate(losses[:200])
    ]
    columns = ("Epoch", "Run", "Loss", "One process", "Relative difference")
    return joined(
        line_chart(series, title, labels, "epochs", "Mean loss of a step" if curve.get("steps") else "Mean loss"),
        h("p", comment.strip()) if comment else None,
        folded("Figures", table("Loss of each epoch", columns, rows, numbers=(2, 3, 4))) if rows else None,
    )


def _points(losses: Sequence[float], steps: object, first: int = 0) -> list[tuple[float, float]]:
    """Return (epochs until then, loss) of each step, or of each epoch in receipts without steps."""
    rows = [numbers_of(row) for row in steps] if isinstance(steps, list) else []
    if len(rows) != len(losses) or not all(rows):
        rows = [[loss] for loss in losses]
    return [
        (first + epoch + (at + 1) / len(row), loss) for epoch, row in enumerate(rows) for at, loss in enumerate(row)
    ]


def _relative(value: float, other: float) -> float:
    return min(1e99, abs(value - other) / max(abs(other), 1e-12))


def bandwidth(entry: ReportEntry) -> Html | None:
    """Return the all-reduce bus bandwidth by size, against the floor."""
    details = evidence(entry.receipt, "bandwidth")
    rows = [
        (_binary(size), busbw, number_of(row, "algbw"), number_of(row, "seconds"))
        for row in objects(details.get("table"))
        if (size := number_of(row, "bytes")) is not None and (busbw := number_of(row, "busbw")) is not None
    ][:64]
    if not rows:
        return None
    floor = max(0.0, number_of(details, "floor") or 0.0)
    floor_text = f"the floor is {short(floor)} GB/s" if floor else "no floor is set"
    title = f"Bus bandwidth of all-reduce: {short(rows[-1][1])} GB/s at {rows[-1][0]}; {floor_text}."
    backend = text_of(details, "backend")
    note = f"Bus bandwidth by size{f', {backend}' if backend else ''}; {floor_text}"
    columns = ("Size", "Bus bandwidth, GB/s", "Algorithm bandwidth, GB/s", "Seconds")
    figures = [(size, *("—" if figure is None else short(figure) for figure in rest)) for size, *rest in rows]
    return joined(
        bar_chart([(size, busbw) for size, busbw, *_ in rows], title, "GB/s", floor, note),
        folded("Figures", table("All-reduce by size", columns, figures, numbers=(1, 2, 3))),
    )


def _binary(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{short(count)} {unit}"
        count /= 1024
    return ""


def launches(entry: ReportEntry) -> Html | None:
    """Return when each rank of each launch ran."""
    worlds = objects(evidence(entry.receipt, "world").get("worlds"))
    ranks = objects(worlds[0].get("ranks")) if worlds else []
    spans: list[Span] = []
    rows: list[tuple[object, ...]] = []
    known = True
    for name, look, title in _LAUNCHES:
        details = evidence(entry.receipt, name)
        took = next(iter(numbers_of(details.get("seconds"))), None)
        if took is None or took < 0:
            continue
        # Receipts before `performance` have the import and the step of each launch in its evidence.
        start, imported = number_of(details, "started_s"), number_of(details, "import_s")
        if imported is None and name == "launch":
            imported = number_of(entry.receipt, "performance.import_s")
        known = known and start is not None
        start, codes = max(0.0, start or 0.0), details.get("returncodes")
        step = step_seconds(entry.receipt) if name == "launch" else number_of(details, "step_s")
        rows.append(
            (
                title,
                f"{start:.2f}" if known else "—",
                f"{took:.2f}",
                "—" if imported is None else f"{imported:.2f}",
                "—" if step is None else f"{step * 1000:.3g}",
                str(codes[0]) if isinstance(codes, list) and codes else "—",
            )
        )
        for label in _labels(name, ranks, entry.receipt):
            end = start + took
            if imported is not None and 0 < imported < took:
                spans.append(
                    Span(label, start, start + imported, "import", f"{title}: import of torch, {imported:.2f} s")
                )
                spans.append(Span(label, start + imported, end, look, f"{title}: {took:.2f} s in all"))
            else:
                spans.append(Span(label, start, end, look, f"{title}: {took:.2f} s"))
    if not spans:
        return None
    summary = "; ".join(f"{row[0]} {row[2]} s" for row in rows)
    note = "Seconds since the first launch. The import is rank 0's."
    if any(span.look == "resumed" for span in spans):
        note += " The resumed launch may prepare beside the first; it is timed from the end of the first."
    if not known:
        note = "The receipt does not say when the launches started: each is drawn from 0. The import is rank 0's."
    looks = [("import", "import of torch")] + [
        (look, name) for _, look, name in _LAUNCHES if any(s.look == look for s in spans)
    ]
    columns = ("Launch", "Start, s", "Took, s", "Import of torch, s", "Training step, ms", "Exit codes")
    return joined(
        timeline(spans, f"Timeline of the launches: {summary}.", looks, note),
        folded("Figures", table("Launches", columns, rows, numbers=(1, 2, 3, 4))),
    )


def _labels(name: str, ranks: Sequence[Mapping[str, Any]], receipt: Mapping[str, Any]) -> list[str]:
    """Return the rows of a launch: one for each rank, or each node if there are many."""
    if name == "reference":
        return ["one process"]
    if name == "relaunch":
        size = int(min(1e6, max(1.0, number_of(evidence(receipt, "resume"), "world_size") or 1.0)))
        return [f"resumed rank {rank}" for rank in range(size)] if size <= _MOST_RANKS else [f"resumed, {size} ranks"]
    labels = [(text_of(rank, "group_rank"), text_of(rank, "rank")) for rank in ranks]
    if not 0 < len(labels) <= _MOST_RANKS:
        nodes = list(dict.fromkeys(node for node, _ in labels))[:_MOST_RANKS]
        return [f"node {node}" for node in nodes] or ["all ranks"]
    return [f"node {node}, rank {rank}" for node, rank in labels]


def packages(entry: ReportEntry, shared: Shared) -> Html | None:
    """Return the packages with versions, their sizes if the artifact is there, and the SBOM."""
    sized_packages = list(entry.packages)
    if not sized_packages:
        sized_packages = [SizedPackage(name, version, "") for name, version in packages_of(entry.receipt).items()]
    if not sized_packages and not entry.sbom:
        return None
    sized_packages.sort(key=lambda package: (-package.size, package.name, package.version))
    sized = sum(package.size for package in sized_packages)
    parts: list[object] = []
    if sized:
        count = sum(package.size > 0 for package in sized_packages)
        sizes_text = f", {count} of them with sizes" if count < len(sized_packages) else ""
        more = f"; the artifact has {entry.files} files, {human_size(entry.size)}" if entry.files is not None else ""
        parts.append(h("p", f"{len(sized_packages)} packages{sizes_text}, {human_size(sized)}{more}."))
    elif sized_packages:
        parts.append(
            h("p", f"{len(sized_packages)} packages. Sizes are shown where the artifact lies beside its receipt.")
        )
    if sized_packages:
        several = len({package.kind for package in sized_packages}) > 1
        rows = [
            [
                package.name,
                package.version or "—",
                *([human_size(package.size) if package.size else "—"] if sized else []),
                *([package.kind] if several else []),
            ]
            for package in sized_packages[:3000]
        ]
        columns = ("Package", "Version", *(["Size"] if sized else []), *(["Kind"] if several else []))
        listed = table("Packages", columns, rows, numbers=(2,) if sized else ())
        parts.append(folded(f"All {len(sized_packages)} packages", listed, is_open=len(sized_packages) <= _FEW))
    if entry.sbom:
        parts.append(h("p", download(entry, "the SBOM (CycloneDX 1.6)", ".cdx.json", entry.sbom, shared)))
    return joined(parts)


def libraries(entry: ReportEntry) -> Html | None:
    """Return the libraries that the ranks loaded, and the needs of the artifact's libraries."""
    loaded, linkage = evidence(entry.receipt, "libraries"), evidence(entry.receipt, "linkage")
    versions = evidence(entry.receipt, "versions")
    rows = [
        ("Interpreter", text_of(versions, "executable")),
        ("torch", text_of(versions, "torch_file")),
        ("Backend", text_of(versions, "backend")),
    ]
    needs = {name: value for name, value in table_at(linkage, "base").items() if text_of(value)}
    if needs:
        rows.append(("Needs at least", ", ".join(f"{name} {text_of(value)}" for name, value in needs.items())))
    own = part(entry.receipt, "layers")
    layers = [
        (text_of(row, "name"), text_of(row, "version"), text_of(row, "path") or "in the artifact")
        for row in objects(own)
    ]
    if not any(value for _, value in rows) and not loaded and not layers:
        return None
    return joined(
        pairs(rows),
        table("Source layers", ("Layer", "Version", "From"), layers) if layers else None,
        evidence_html(loaded) if loaded else None,
    )
