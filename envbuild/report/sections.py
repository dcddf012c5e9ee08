"""The parts of the page about one receipt: its verdict, checks, provenance and changes.

HTML is made from values: every text is escaped, unless it is `Html` already; the evidence of any check becomes tables.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from envbuild.base.toml import table_at
from envbuild.inspect.compare import Change
from envbuild.report.data import (
    BLOCKED,
    FAILED,
    OPEN,
    PASSED,
    WORDS,
    ReportEntry,
    checks_of,
    counts,
    has_passed,
    moment,
    number_of,
    part,
    text_of,
)
from envbuild.store.history import METRICS

_VOID = ("meta", "br")
_MARKED = re.compile(r"`([^`\n]{1,200})`|https?://[\w.-]+(?:[\w./?=&%#+~@:-]*[\w/#=&~-])?", re.ASCII)
_MOST_ROWS, _MOST_TEXT, _MOST_COLUMNS = 200, 4000, 12


class Html(str):
    """Text that is HTML."""

    __slots__ = ()


def visible(text: str) -> str:
    """Return `text` with control, bidirectional and other invisible characters as escapes: `\\u202e`."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\u{ord(c):04x}" for c in text)


def h(tag: str, *children: object, **attributes: object) -> Html:
    """Return an element; None is left out. The attribute `class_` is `class`, `aria_label` is `aria-label`."""
    attributes_text = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_escaped(value)}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in _VOID:
        return Html(f"<{tag}{attributes_text}>")
    return Html(f"<{tag}{attributes_text}>{joined(*children)}</{tag}>")


def joined(*children: object) -> Html:
    """Return `children`, which may be lists of children, one after the other."""
    return Html("".join(map(_escaped, children)))


def prose(text: str) -> Html:
    """Return a text with `code` set as such, and http and https addresses as links, which send no referrer."""
    parts: list[object] = []
    end = 0
    for match in _MARKED.finditer(text):
        parts.append(text[end : match.start()])
        parts.append(h("code", match[1]) if match[1] else h("a", match[0], href=match[0], rel="noreferrer"))
        end = match.end()
    return joined(parts, text[end:])


def table(
    caption: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[object]],
    numbers: Iterable[int] = (),
    look: str | None = None,
) -> Html:
    """Return a table whose first column heads its rows; a wide table scrolls by itself.

    `numbers` are the places of columns with figures, `look` is its class in the style sheet.
    """
    right = set(numbers)
    head = [h("th", name, scope="col", class_="n" if place in right else None) for place, name in enumerate(columns)]
    body = []
    for row in rows:
        first, *rest = row
        cells = [h("td", cell, class_="n" if place in right else None) for place, cell in enumerate(rest, start=1)]
        body.append(h("tr", h("th", first, scope="row"), cells))
    inner = h("table", h("caption", caption), h("thead", h("tr", head)), h("tbody", body), class_=look)
    # Who has no mouse scrolls it with the keyboard.
    return h("div", inner, class_="wide", role="group", aria_label=caption, tabindex="0")


def pairs(rows: Iterable[tuple[str, object]]) -> Html:
    """Return names and values; rows without a value are left out."""
    entries = [h("div", h("dt", name), h("dd", value)) for name, value in rows if value not in (None, "", [])]
    return h("dl", entries) if entries else Html()


def folded(summary: object, *children: object, is_open: bool = False) -> Html:
    """Return children that unfold below their summary."""
    return h("details", h("summary", summary), h("div", *children, class_="inner"), open=is_open)


def _escaped(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return joined(*value)
    return value if isinstance(value, Html) else html.escape(visible(str(value)))


def evidence_html(content: Mapping[str, Any]) -> Html:
    """Return a list of the plain values, and a table or text for each other one."""
    plain = {name: value for name, value in content.items() if _is_plain(value)}
    rest = {name: value for name, value in content.items() if name not in plain}
    return joined(
        pairs((titled(name), _text(value)) for name, value in plain.items()),
        [_evidence_part(name, value) for name, value in rest.items()],
    )


def titled(name: object) -> str:
    """Return a key of JSON as words."""
    return str(name).replace("_", " ")


def dumped(value: Any) -> str:
    """Return a value as JSON."""
    try:
        return json.dumps(value, indent=1, ensure_ascii=False, default=str)
    except RecursionError:  # what could just be parsed may be too deep to be written
        return '"nested too deeply"'


def _evidence_part(name: str, value: Any) -> Html:
    title = titled(name)
    if isinstance(value, Mapping):
        if all(map(_is_plain, value.values())):
            return _cut(title, ("name", "value"), [(key, _text(item)) for key, item in value.items()])
    elif value and all(isinstance(row, Mapping) for row in value):
        columns = list(dict.fromkeys(key for row in value for key in row))
        if 0 < len(columns) <= _MOST_COLUMNS and all(_is_plain(cell) for row in value for cell in row.values()):
            rows = [[_text(row.get(key)) for key in columns] for row in value]
            return _cut(title, [titled(key) for key in columns], rows)
    return joined(h("p", title, class_="name"), h("pre", _limited(dumped(value))))


def _cut(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Html:
    """Return a table of the first rows, and how many more there are."""
    left = len(rows) - _MOST_ROWS
    more = h("p", f"… and {left} more rows, in the receipt") if left > 0 else None
    return joined(table(title, columns, rows[:_MOST_ROWS]), more)


def _is_plain(value: Any) -> bool:
    """Return whether a value fits on a line or two: a scalar, or a list of scalars or of rows of scalars."""
    if isinstance(value, Mapping):
        return not value
    if not isinstance(value, list):
        return True
    return not any(isinstance(item, Mapping) or (isinstance(item, list) and not _is_row(item)) for item in value)


def _is_row(value: list[Any]) -> bool:
    return not any(isinstance(item, (Mapping, list)) for item in value)


def _text(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        texts = [" ".join(map(str, item)) if isinstance(item, list) else str(item) for item in value[:_MOST_ROWS]]
        left = len(value) - len(texts)
        return _limited(", ".join(texts) + (f" … and {left} more" if left else ""))
    return _limited(dumped(value) if isinstance(value, Mapping) else str(value))


def _limited(text: str) -> str:
    left = len(text) - _MOST_TEXT
    return text if left <= 0 else f"{text[:_MOST_TEXT]} … and {left} more characters, in the receipt"


_LOOKS = {PASSED: "good", FAILED: "bad", BLOCKED: "warn", OPEN: "none", "good": "good", "bad": "bad", "unknown": "warn"}
_PATHS = {"good": "M3.5 8.5l3 3 6-7", "bad": "M4 4l8 8M12 4l-8 8", "warn": "M8 3v6M8 12v1", "none": "M4 8h8"}
_WORTH = 300  # characters of a part that is worth a link instead
_DIGESTS = (
    ("artifact", "artifact.digest"),
    ("manifest", "artifact.manifest"),
    ("pushed as", "artifact.pushed"),
    ("plan", "plan.digest"),
    ("lock", "lock.digest"),
    ("recipe", "recipe.digest"),
)


class Shared:
    """The parts that a page of `several` receipts has already: another receipt with an equal part gets a link to it."""

    def __init__(self, several: bool) -> None:
        self.several = several
        self._places: dict[str, tuple[str, str]] = {}

    def once(self, part: Html, entry: ReportEntry, place: str) -> Html:
        """Return `part` of `entry`, whose anchor is `place`, or the link to the same part of an earlier receipt."""
        if not self.several or len(part) < _WORTH:
            return part
        first, title = self._places.setdefault(part, (place, entry.path))
        return part if first == place else h("p", "The same as in ", h("a", title, href=f"#{first}"), ".")


def badge(status: object, word: str = "") -> Html:
    """Return a status as a word with its sign and colour."""
    look = _LOOKS.get(str(status), "none")
    return h("span", icon(look), word or WORDS.get(str(status), str(status)), class_=f"badge {look}")


def icon(look: str) -> Html:
    """Return the sign of a status, which repeats the word beside it."""
    return h("svg", h("use", href=f"#x-{look}"), class_="icon", aria_hidden="true")


def icons() -> Html:
    """Return the drawings of all signs, which a page has once."""
    drawn = [
        h(
            "symbol",
            h("path", d=path, fill="none", stroke="currentColor", stroke_width="2.2", stroke_linecap="round"),
            id=f"x-{look}",
            viewBox="0 0 16 16",
        )
        for look, path in _PATHS.items()
    ]
    return h("svg", drawn, class_="symbols", aria_hidden="true")


def name_of(receipt: Mapping[str, Any]) -> str:
    """Return the recipe, kind and target of a receipt."""
    kind, target = text_of(receipt, "artifact.kind"), text_of(receipt, "target")
    return f"{text_of(receipt, 'recipe.name') or 'an artifact'}, {kind or 'of an unknown kind'}" + (
        f" for {target}" if target else ""
    )


def time_of(receipt: Mapping[str, Any]) -> Html | None:
    """Return the time of the verification for people and machines."""
    time = moment(receipt)
    if time is None:
        return None
    return h("time", f"{time.day} {time:%b %Y, %H:%M} UTC", datetime=time.isoformat(timespec="seconds"))


def verdict(entry: ReportEntry, heading: str, title: object) -> Html:
    """Return the verdict on one artifact under its title."""
    receipt = entry.receipt
    numbers, good = counts(receipt), has_passed(receipt)
    seconds = number_of(receipt, "seconds")
    summary = ", ".join(f"{number} {WORDS[status]}" for status, number in numbers.items() if number)
    kind = " ".join(filter(None, (text_of(receipt, "artifact.kind"), "for", text_of(receipt, "target"))))
    facts = pairs(
        [
            ("Artifact", kind.removesuffix(" for").removeprefix("for ") or None),
            ("Checks", summary or "none"),
            ("Trained on", _shape(receipt)),
            ("Verified", time_of(receipt)),
            ("Took", f"{seconds:.1f} s" if seconds is not None else None),
            ("torch", text_of(receipt, "versions.torch")),
            ("Digest", h("code", text_of(receipt, "artifact.digest")) if part(receipt, "artifact.digest") else None),
        ]
    )
    word = "Passed" if good else "Failed"
    return h(
        "div",
        h("p", icon("good" if good else "bad"), word, class_="word"),
        h(heading, title),
        facts,
        [h("p", prose(note), class_="note") for note in entry.notes],
        class_=f"verdict {'good' if good else 'bad'}",
    )


def _shape(receipt: Mapping[str, Any]) -> str | None:
    nodes, ranks = (number_of(receipt, f"settings.{name}") for name in ("nodes", "nproc_per_node"))
    if nodes is None or ranks is None or part(receipt, "settings.trainer") is False:
        return None
    return f"{nodes:g} simulated node{'s' if nodes != 1 else ''} × {ranks:g} rank{'s' if ranks != 1 else ''}"


def failures(entry: ReportEntry) -> Html | None:
    """Return the failed checks with their reasons, for the top of the page."""
    bad = [row for row in checks_of(entry.receipt) if row.get("status") == FAILED]
    if not bad:
        return None
    rows = [h("li", h("p", text_of(row, "title") or text_of(row, "name"), class_="fault"), _told(row)) for row in bad]
    return h("ul", rows, class_="faults")


def _told(check: Mapping[str, Any], seen_above: bool = False) -> Html:
    seen, cause = (text_of(check, name) for name in ("seen", "cause"))
    body = None if seen_above else h("pre", seen) if "\n" in seen else prose(seen)
    return pairs([("Seen", body), ("Expected", text_of(check, "expected")), ("Usually", prose(cause) if cause else "")])


def checks(entry: ReportEntry, shared: Shared, prefix: str) -> Html:
    """Return every check; its evidence unfolds. `prefix` begins the anchors of this receipt."""
    rows = []
    for number, row in enumerate(checks_of(entry.receipt), start=1):
        name, seen = text_of(row, "name"), text_of(row, "seen")
        proof_data = row.get("evidence")
        head = [
            badge(row.get("status")),
            h("span", text_of(row, "title") or name, class_="title"),
            h("span", prose(_first_line(seen)), class_="seen"),
        ]
        proof = (
            evidence_html(proof_data)
            if isinstance(proof_data, Mapping) and proof_data
            else h("p", "No evidence was recorded.")
        )
        body = joined(_told(row, "\n" not in seen), proof, h("p", "Check ", h("code", name), class_="small"))
        failed, place = row.get("status") == FAILED, f"{prefix}check-{number}"
        body = body if failed else shared.once(body, entry, place)
        rows.append(h("li", folded(joined(head), body, is_open=failed), id=place if shared.several else None))
    return h("ol", rows, class_="checks") if rows else h("p", "The receipt has no checks.")


def _first_line(text: str) -> str:
    line, _, more = text.partition("\n")
    return f"{line} …" if more else line


def changes(entry: ReportEntry) -> Html | None:
    """Return the changes since another artifact or an earlier receipt."""
    changes_found = entry.changes
    if changes_found is None:
        return None
    rows = [_change(title, change) for title, several in changes_found.groups.items() for change in several]
    shown_table = table("Differences", ("What", "Part", "Change", "Before", "Now"), rows)
    return joined(
        h("p", "Compared with ", changes_found.before, "."),
        shown_table if rows else h("p", "Nothing that was compared differs."),
        [h("p", prose(note), class_="small") for note in changes_found.notes],
    )


def _change(part: str, change_row: Change) -> list[object]:
    change = "other content" if change_row.before == change_row.after else change_row.kind
    return [change_row.name, part, change, change_row.before or "—", change_row.after or "—"]


def provenance(entry: ReportEntry, shared: Shared) -> Html:
    """Return the artifact's origin, the host and the settings of its verification, and the receipt."""
    receipt = entry.receipt
    groups: list[Html] = []
    for title, place in (("Versions", "versions"), ("Host", "host"), ("Settings", "settings"), ("Own code", "project")):
        if content := table_at(receipt, place):
            groups.append(folded(title, evidence_html(content)))
    digests = [(name, h("code", text_of(receipt, place))) for name, place in _DIGESTS if text_of(receipt, place)]
    own = {
        "receipt": entry.path,
        "verified path": text_of(receipt, "artifact.path"),
        "runtime": text_of(receipt, "runtime"),
        "fabric": text_of(receipt, "fabric"),
        "logs of the nodes": text_of(receipt, "logs"),
    }
    file = download(entry, "the receipt", ".receipt.json", dumped(receipt), shared)
    return joined(pairs([*own.items(), *digests]), groups, h("p", file))


def performance(entry: ReportEntry) -> Html | None:
    """Return the measurements of the receipt, if it has some."""
    content = table_at(entry.receipt, "performance")
    if not content:
        return None
    numbers = {name: number_of(content, name) for name in METRICS}
    known = [(METRICS[name].title, METRICS[name].show(value)) for name, value in numbers.items() if value is not None]
    others = {name: value for name, value in content.items() if numbers.get(name) is None}
    return joined(pairs(known), evidence_html(others) if others else None)


def slim(entry: ReportEntry) -> Html | None:
    """Return the parts that [slim] of the recipe removed from wheels."""
    content = table_at(entry.receipt, "slim")
    if not content:
        return None
    return joined(
        h("p", "The wheels of this artifact are without code or files that it never uses, by these rules:"),
        evidence_html(content),
    )


def download(entry: ReportEntry, subject: str, ending: str, text: str, shared: Shared) -> Html:
    """Return a link that saves `text`, which the page contains, as a file named after the artifact.

    On a page of several receipts it is compressed, because files would be the larger part of the page.
    """
    data, form = text.encode("utf-8", "backslashreplace"), "json"
    if shared.several:
        data, form, ending = gzip.compress(data, mtime=0), "gzip", ending + ".gz"
    about = (text_of(entry.receipt, place) for place in ("recipe.name", "target", "artifact.kind"))
    name = re.sub(r"[^\w.-]+", "-", "-".join(filter(None, about))[:100]) + ending
    link = Html(f"data:application/{form};base64,{base64.b64encode(data).decode()}")
    return h("a", f"Download {subject}: {name}", href=link, download=name, class_="button")


def chain(entry: ReportEntry) -> Html | None:
    """Return the links of `envbuild check`, each with its source."""
    if entry.chain is None:
        return None
    if not entry.chain:
        return h("p", "Nothing to judge: the target has no CUDA or ROCm, and the recipe no layers.")
    rows = [
        h(
            "li",
            h("span", finding.subject, class_="subject"),
            badge(finding.status, finding.status),
            h("p", prose(finding.text)),
            h("p", "Fix: ", prose(finding.fix), class_="small") if finding.fix and finding.status != "good" else None,
            h("p", "Source: ", prose(finding.source), f" ({finding.date})", class_="small") if finding.source else None,
            class_=_LOOKS.get(finding.status, "none"),
        )
        for finding in entry.chain
    ]
    return joined(h("p", f"Judged {entry.basis}."), h("ol", rows, class_="chain"))
