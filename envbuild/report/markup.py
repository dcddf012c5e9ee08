"""HTML from values: every text is escaped, unless it is `Html` already; the evidence of any check as tables."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
    said = "".join(
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_escaped(value)}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    )
    if tag in _VOID:
        return Html(f"<{tag}{said}>")
    return Html(f"<{tag}{said}>{joined(*children)}</{tag}>")


def joined(*children: object) -> Html:
    """Return `children`, which may be lists of children, one after the other."""
    return Html("".join(_child(child) for child in children))


def prose(text: str) -> Html:
    """Return a text with `code` set as such, and http and https addresses as links, which send no referrer."""
    parts: list[object] = []
    end = 0
    for found in _MARKED.finditer(text):
        parts.append(text[end : found.start()])
        parts.append(h("code", found[1]) if found[1] else h("a", found[0], href=found[0], rel="noreferrer"))
        end = found.end()
    return joined(parts, text[end:])


def table(caption: str, columns: Iterable[str], rows: Iterable[Iterable[object]], numbers: Iterable[int] = ()) -> Html:
    """Return a table whose first column heads its rows; it scrolls by itself where it is too wide.

    `numbers` are the places of columns with figures.
    """
    right = set(numbers)
    head = [h("th", name, scope="col", class_="n" if place in right else None) for place, name in enumerate(columns)]
    body = []
    for row in rows:
        first, *rest = row
        cells = [h("td", cell, class_="n" if place in right else None) for place, cell in enumerate(rest, start=1)]
        body.append(h("tr", h("th", first, scope="row"), cells))
    inner = h("table", h("caption", caption), h("thead", h("tr", head)), h("tbody", body))
    # Who has no mouse scrolls it with the keyboard.
    return h("div", inner, class_="wide", role="group", aria_label=caption, tabindex="0")


def pairs(rows: Iterable[tuple[str, object]]) -> Html:
    """Return names and values; rows without a value are left out."""
    told = [h("div", h("dt", name), h("dd", value)) for name, value in rows if value not in (None, "", [])]
    return h("dl", told) if told else Html()


def folded(summary: object, *children: object, is_open: bool = False) -> Html:
    """Return children that unfold below their summary."""
    return h("details", h("summary", summary), h("div", *children, class_="inner"), open=is_open)


def _child(child: object) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, (list, tuple)):
        return joined(*child)
    return _escaped(child)


def _escaped(value: object) -> str:
    return value if isinstance(value, Html) else html.escape(visible(str(value)))


def evidence_html(found: Mapping[str, Any]) -> Html:
    """Return a list of the plain values, and a table or text for each other one."""
    plain = {name: value for name, value in found.items() if _is_plain(value)}
    rest = {name: value for name, value in found.items() if name not in plain}
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
            return _cut(title, ("name", "value"), [(key, _text(one)) for key, one in value.items()])
    elif value and all(isinstance(one, Mapping) for one in value):
        columns = list(dict.fromkeys(key for one in value for key in one))
        if 0 < len(columns) <= _MOST_COLUMNS and all(_is_plain(cell) for one in value for cell in one.values()):
            rows = [[_text(one.get(key)) for key in columns] for one in value]
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
    return not any(isinstance(one, Mapping) or (isinstance(one, list) and not _is_row(one)) for one in value)


def _is_row(value: list[Any]) -> bool:
    return not any(isinstance(one, (Mapping, list)) for one in value)


def _text(value: Any) -> str:
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        told = [" ".join(map(str, one)) if isinstance(one, list) else str(one) for one in value[:_MOST_ROWS]]
        left = len(value) - len(told)
        return _limited(", ".join(told) + (f" … and {left} more" if left else ""))
    return _limited(dumped(value) if isinstance(value, Mapping) else str(value))


def _limited(text: str) -> str:
    left = len(text) - _MOST_TEXT
    return text if left <= 0 else f"{text[:_MOST_TEXT]} … and {left} more characters, in the receipt"
