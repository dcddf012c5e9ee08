"""The evidence of checks as HTML, whatever a check recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from envbuild.report.markup import Html, h, joined, pairs, table

_MOST_ROWS, _MOST_TEXT, _MOST_COLUMNS = 200, 4000, 12


def evidence_html(found: Mapping[str, Any]) -> Html:
    """Return a list of the plain values, and a table or text for each other one."""
    plain = {name: value for name, value in found.items() if _is_plain(value)}
    rest = {name: value for name, value in found.items() if name not in plain}
    return joined(
        pairs((titled(name), _text(value)) for name, value in plain.items()),
        [_one(name, value) for name, value in rest.items()],
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


def _one(name: str, value: Any) -> Html:
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
