"""The parts of the page about one receipt that have charts: training, bandwidth, launches, packages, libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envbuild.base.progress import human_size
from envbuild.report.charts import Series, Span, bar_chart, line_chart, short, timeline
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
from envbuild.report.evidence import evidence_html
from envbuild.report.markup import Html, folded, h, joined, pairs, table
from envbuild.report.sections import Shared, download
from envbuild.report.treemap import squarify

# Check, class in the style sheet, name.
_LAUNCHES = (
    ("reference", "reference", "one process"),
    ("launch", "launch", "distributed"),
    ("relaunch", "resumed", "resumed"),
)
# Rows of a timeline; with more ranks, a node has one row.
_MOST_RANKS = 16
_MOST_TILES, _WIDE, _HIGH, _FEW = 40, 100.0, 42.0, 15


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
    told = "" if worst is None else f" The largest relative difference to one process is {short(worst)}."
    told += f" At most {short(tolerance)} is allowed." if worst is not None and tolerance is not None else ""
    first, last = (losses or alone)[0], (losses or alone)[-1]
    title = f"Loss over {end} epochs: from {short(first)} to {short(last)}.{told}"
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
        h("p", told.strip()) if told else None,
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


def _relative(one: float, other: float) -> float:
    return min(1e99, abs(one - other) / max(abs(other), 1e-12))


def bandwidth(entry: ReportEntry) -> Html | None:
    """Return the all-reduce bus bandwidth by size, against the floor."""
    found = evidence(entry.receipt, "bandwidth")
    rows = [
        (_binary(size), busbw, number_of(one, "algbw"), number_of(one, "seconds"))
        for one in objects(found.get("table"))
        if (size := number_of(one, "bytes")) is not None and (busbw := number_of(one, "busbw")) is not None
    ][:64]
    if not rows:
        return None
    floor = max(0.0, number_of(found, "floor") or 0.0)
    said = f"the floor is {short(floor)} GB/s" if floor else "no floor is set"
    title = f"Bus bandwidth of all-reduce: {short(rows[-1][1])} GB/s at {rows[-1][0]}; {said}."
    backend = text_of(found, "backend")
    note = f"Bus bandwidth by size{f', {backend}' if backend else ''}; {said}"
    columns = ("Size", "Bus bandwidth, GB/s", "Algorithm bandwidth, GB/s", "Seconds")
    figures = [(size, *("—" if one is None else short(one) for one in rest)) for size, *rest in rows]
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
        found = evidence(entry.receipt, name)
        took = next(iter(numbers_of(found.get("seconds"))), None)
        if took is None or took < 0:
            continue
        # Receipts before `performance` have the import and the step of each launch in its evidence.
        start, imported = number_of(found, "started_s"), number_of(found, "import_s")
        if imported is None and name == "launch":
            imported = number_of(entry.receipt, "performance.import_s")
        known = known and start is not None
        start, codes = max(0.0, start or 0.0), found.get("returncodes")
        step = step_seconds(entry.receipt) if name == "launch" else number_of(found, "step_s")
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
    told = "; ".join(f"{row[0]} {row[2]} s" for row in rows)
    note = "Seconds since the first launch. The import is rank 0's."
    if any(one.look == "resumed" for one in spans):
        note += " The resumed launch may prepare beside the first; it is timed from the end of the first."
    if not known:
        note = "The receipt does not say when the launches started: each is drawn from 0. The import is rank 0's."
    looks = [("import", "import of torch")] + [
        (look, name) for _, look, name in _LAUNCHES if any(s.look == look for s in spans)
    ]
    columns = ("Launch", "Start, s", "Took, s", "Import of torch, s", "Training step, ms", "Exit codes")
    return joined(
        timeline(spans, f"Timeline of the launches: {told}.", looks, note),
        folded("Figures", table("Launches", columns, rows, numbers=(1, 2, 3, 4))),
    )


def _labels(name: str, ranks: Sequence[Mapping[str, Any]], receipt: Mapping[str, Any]) -> list[str]:
    """Return the rows of a launch: one for each rank, or each node if there are many."""
    if name == "reference":
        return ["one process"]
    if name == "relaunch":
        size = int(min(1e6, max(1.0, number_of(evidence(receipt, "resume"), "world_size") or 1.0)))
        return [f"resumed rank {rank}" for rank in range(size)] if size <= _MOST_RANKS else [f"resumed, {size} ranks"]
    told = [(text_of(one, "group_rank"), text_of(one, "rank")) for one in ranks]
    if not 0 < len(told) <= _MOST_RANKS:
        nodes = list(dict.fromkeys(node for node, _ in told))[:_MOST_RANKS]
        return [f"node {node}" for node in nodes] or ["all ranks"]
    return [f"node {node}, rank {rank}" for node, rank in told]


def packages(entry: ReportEntry, shared: Shared) -> Html | None:
    """Return the packages with versions and sizes, as a map of areas if the artifact is there, and the SBOM."""
    found = list(entry.packages)
    if not found:
        found = [SizedPackage(name, version, "") for name, version in packages_of(entry.receipt).items()]
    if not found and not entry.sbom:
        return None
    found.sort(key=lambda one: (-one.size, one.name, one.version))
    sized = sum(one.size for one in found)
    parts: list[object] = []
    if sized:
        count = sum(one.size > 0 for one in found)
        told = f", {count} of them with sizes" if count < len(found) else ""
        more = f"; the artifact has {entry.files} files, {human_size(entry.size)}" if entry.files is not None else ""
        parts.append(h("p", f"{len(found)} packages{told}, {human_size(sized)}{more}."))
        parts.append(_treemap(found, sized, max(0, entry.size - sized)))
    elif found:
        parts.append(h("p", f"{len(found)} packages. Sizes are shown where the artifact lies beside its receipt."))
    if found:
        several = len({one.kind for one in found}) > 1
        rows = [
            [
                one.name,
                one.version or "—",
                *([human_size(one.size) if one.size else "—"] if sized else []),
                *([one.kind] if several else []),
            ]
            for one in found[:3000]
        ]
        columns = ("Package", "Version", *(["Size"] if sized else []), *(["Kind"] if several else []))
        listed = table("Packages", columns, rows, numbers=(2,) if sized else ())
        parts.append(folded(f"All {len(found)} packages", listed, is_open=len(found) <= _FEW))
    if entry.sbom:
        parts.append(h("p", download(entry, "the SBOM (CycloneDX 1.6)", ".cdx.json", entry.sbom, shared)))
    return joined(parts)


def _treemap(found: Sequence[SizedPackage], sized: int, other: int) -> Html:
    """Return an area for each of the largest packages, the others together, and the files of none."""
    large, rest = found[:_MOST_TILES], found[_MOST_TILES:]
    tiles = [(one.name, one.version, one.size, one.kind) for one in large if one.size]
    tiles.append((f"{len(rest)} smaller packages", "", sum(one.size for one in rest), "rest"))
    tiles.append(("all other files", "", other, "rest"))
    tiles = sorted((one for one in tiles if one[2] > 0), key=lambda one: -one[2])
    total = sum(size for _, _, size, _ in tiles)
    areas = squarify([float(size) for _, _, size, _ in tiles], _WIDE, _HIGH)
    drawn = [
        h(
            "div",
            h("span", h("b", name), " ", h("span", human_size(size))),
            class_=f"tile k{_KINDS.get(kind, 0)}",
            title=f"{name} {version}: {human_size(size)}, {100 * size / total:.1f} %",
            style=f"left:{x:.3f}%;top:{100 * y / _HIGH:.3f}%;width:{w:.3f}%;height:{100 * tall / _HIGH:.3f}%",
        )
        for (name, version, size, kind), (x, y, w, tall) in zip(tiles, areas, strict=True)
    ]
    largest = ", ".join(f"{name} {human_size(size)}" for name, _, size, _ in tiles[:3])
    title = f"Sizes of {len(found)} packages, {human_size(total)}. The largest: {largest}."
    return h(
        "figure", h("figcaption", "Areas are sizes"), h("div", drawn, class_="treemap", role="img", aria_label=title)
    )


_KINDS = {"Python": 1, "conda": 2, "source layer": 3, "rest": 4}


def libraries(entry: ReportEntry) -> Html | None:
    """Return the libraries that the ranks loaded, and what the artifact's libraries need."""
    loaded, linkage = evidence(entry.receipt, "libraries"), evidence(entry.receipt, "linkage")
    versions = evidence(entry.receipt, "versions")
    base = linkage.get("base")
    told = [
        ("Interpreter", text_of(versions, "executable")),
        ("torch", text_of(versions, "torch_file")),
        ("Backend", text_of(versions, "backend")),
    ]
    needs = {name: value for name, value in base.items() if text_of(value)} if isinstance(base, Mapping) else {}
    if needs:
        told.append(("Needs at least", ", ".join(f"{name} {text_of(value)}" for name, value in needs.items())))
    own = part(entry.receipt, "layers")
    layers = [
        (text_of(one, "name"), text_of(one, "version"), text_of(one, "path") or "in the artifact")
        for one in objects(own)
    ]
    if not any(value for _, value in told) and not loaded and not layers:
        return None
    return joined(
        pairs(told),
        table("Source layers", ("Layer", "Version", "From"), layers) if layers else None,
        evidence_html(loaded) if loaded else None,
    )
