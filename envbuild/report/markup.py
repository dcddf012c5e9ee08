"""HTML from values: every text is escaped, unless it is `Html` already."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_VOID = ("meta", "br")
_MARKED = re.compile(r"`([^`\n]{1,200})`|https?://[\w.-]+(?:[\w./?=&%#+~@:-]*[\w/#=&~-])?", re.ASCII)


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
