"""The page: its frame, the grid of several receipts, and the sections of each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from envbuild import __version__
from envbuild.report import figures, sections
from envbuild.report.data import ReportEntry, has_passed, moment, step_seconds, text_of
from envbuild.report.figures import Series, line_chart, short
from envbuild.report.sections import Html, h, joined

# Nothing is loaded from anywhere, and nothing runs: what a receipt says can do no more than be read.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def _sections(entry: ReportEntry, shared: sections.Shared, prefix: str) -> list[tuple[str, Html]]:
    """Return the title and the content of each section about `entry` that has content."""
    parts = (
        ("Why it failed", sections.failures(entry)),
        ("What changed", sections.changes(entry)),
        ("Checks", sections.checks(entry, shared, prefix)),
        ("Training", figures.training(entry)),
        ("All-reduce bandwidth", figures.bandwidth(entry)),
        ("Performance", sections.performance(entry)),
        ("Launches", figures.launches(entry)),
        ("Packages", figures.packages(entry, shared)),
        ("Libraries as loaded", figures.libraries(entry)),
        ("Compatibility", sections.chain(entry)),
        ("Slim", sections.slim(entry)),
        ("Provenance", sections.provenance(entry, shared)),
    )
    return [(title, part) for title, part in parts if part is not None]


def report_page(entries: Sequence[ReportEntry]) -> str:
    """Return the page of one receipt, or of several with a grid before them."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    single = len(entries) == 1
    title = sections.name_of(entries[0].receipt) if single else f"{len(entries)} receipts"
    body = _single(entries[0]) if single else _several(entries)
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("meta", name="referrer", content="no-referrer"),
        h("title", f"envbuild report: {title}"),
        h("style", Html(style)),
    )
    footer = h("footer", h("p", f"envbuild {__version__}. This page is one file: it loads nothing and runs nothing."))
    return f"<!DOCTYPE html>\n{h('html', head, h('body', body, footer, sections.icons()), lang='en')}\n"


def _single(entry: ReportEntry) -> Html:
    name = text_of(entry.receipt, "recipe.name") or "artifact"
    titled = _sections(entry, sections.Shared(several=False), "")
    links = [h("li", h("a", title, href=f"#{_anchor('', title)}")) for title, _ in titled]
    return joined(
        h("header", h("p", "envbuild report", class_="brand"), sections.verdict(entry, "h1", name)),
        h("nav", h("ul", links), aria_label="On this page"),
        h("main", [_section(title, part, "", "h2") for title, part in titled]),
    )


def _several(entries: Sequence[ReportEntry]) -> Html:
    good = sum(has_passed(entry.receipt) for entry in entries)
    look = "good" if good == len(entries) else "bad"
    word = h("p", sections.icon(look), f"{good} of {len(entries)} passed", class_="word")
    parts: list[Html] = [_section("Overview", _grid(entries), "", "h2")]
    parts += [
        _section(f"Training step of {name}", drawn, f"t{number}-", "h2")
        for number, (name, drawn) in enumerate(_step_times(entries), start=1)
    ]
    shared = sections.Shared(several=True)
    for number, entry in enumerate(entries, start=1):
        prefix = f"r{number}-"
        inner = [
            _section(title, shared.once(part, entry, _anchor(prefix, title)), prefix, "h3")
            for title, part in _sections(entry, shared, prefix)
        ]
        top = sections.verdict(entry, "h2", sections.name_of(entry.receipt))
        back = h("p", h("a", "Back to the overview", href="#overview"), class_="small back")
        parts.append(h("article", top, inner, back, id=f"r{number}"))
    return joined(
        h(
            "header",
            h("p", "envbuild report", class_="brand"),
            h("div", word, h("h1", "Verification of artifacts"), class_=f"verdict {look}"),
        ),
        h("main", parts),
    )


def _section(title: str, part: Html, prefix: str, heading: str) -> Html:
    return h("section", h(heading, title), part, id=_anchor(prefix, title))


def _anchor(prefix: str, title: str) -> str:
    return prefix + "".join(c if c.isascii() and c.isalnum() else "-" for c in title.lower())


def _grid(entries: Sequence[ReportEntry]) -> Html:
    """Return recipe × target × artifact, with verdicts that link to their sections."""
    cells: dict[tuple[str, str], dict[str, list[Html]]] = {}
    newest = sorted(enumerate(entries, start=1), key=lambda item: text_of(item[1].receipt, "verified_at"), reverse=True)
    for number, entry in newest:
        receipt = entry.receipt
        row = (text_of(receipt, "recipe.name") or "—", text_of(receipt, "target") or "—")
        kind = text_of(receipt, "artifact.kind") or "unknown"
        good = has_passed(receipt)
        link = h(
            "a",
            sections.badge("good" if good else "bad", "passed" if good else "failed"),
            h("br"),
            h("span", sections.time_of(receipt), class_="small"),
            href=f"#r{number}",
        )
        cells.setdefault(row, {}).setdefault(kind, []).append(h("div", link, class_="cell"))
    kinds = sorted({kind for row in cells.values() for kind in row})
    rows = [(*row, *(verdicts.get(kind) or "—" for kind in kinds)) for row, verdicts in sorted(cells.items())]
    columns = ("Recipe", "Target", *kinds)
    return sections.table("Verdicts by recipe, target and artifact", columns, rows, look="grid-of")


def _step_times(entries: Sequence[ReportEntry]) -> list[tuple[str, Html]]:
    """Return, for each recipe with several measurements, its training step over the time of verification."""
    by_recipe: dict[str, dict[str, list[tuple[datetime, float]]]] = {}
    for entry in entries:
        at, step = moment(entry.receipt), step_seconds(entry.receipt)
        if at is not None and step is not None and step > 0:
            line = f"{text_of(entry.receipt, 'artifact.kind')} for {text_of(entry.receipt, 'target')}"
            by_recipe.setdefault(text_of(entry.receipt, "recipe.name") or "an artifact", {}).setdefault(
                line, []
            ).append((at, step))
    charts = []
    for name, lines in by_recipe.items():
        times = sorted({at for points in lines.values() for at, _ in points})
        if len(times) < 2:
            continue
        looks = ("spread", "resumed", "killed", "alone")
        series = [
            Series(line, [(at.timestamp(), step * 1000) for at, step in sorted(points)], looks[place % len(looks)])
            for place, (line, points) in enumerate(lines.items())
        ]
        same_day = times[0].date() == times[-1].date()
        labels = [(at.timestamp(), f"{at:%H:%M}" if same_day else f"{at.day} {at:%b}") for at in times]
        last = max((point for points in lines.values() for point in points), key=lambda point: point[0])
        title = f"Training step of {name} over {len(times)} verifications; the last took {short(last[1] * 1000)} ms."
        charts.append((name, line_chart(series, title, labels, "time of verification", "Milliseconds of a step")))
    return charts
