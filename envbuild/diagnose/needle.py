"""The constant text of a regular expression: a line without it cannot match, and `in` is much faster than `search`."""

from __future__ import annotations

import re

_QUANTIFIER = re.compile(r"[*+?]\??|\{\d*,?\d*\}\??")
_ESCAPED = re.compile(r"\\[^\w]")


def needle(regex: str) -> str:
    """The longest run of characters that every match of `regex` contains, "" where none can be told.

    Groups, classes and what may be repeated are passed over; alternatives at the top have no common text.
    """
    runs, run, at = [], "", 0
    while at < len(regex):
        here = regex[at]
        if here == "|":
            return ""
        if here in "[(":
            size, text = _skip(regex, at), ""
        elif here == "\\":
            size = 2
            text = regex[at + 1] if _ESCAPED.match(regex, at) else ""
        else:
            size, text = 1, "" if here in ".^$" else here
        at += size
        quantifier = _QUANTIFIER.match(regex, at)
        if quantifier:
            at = quantifier.end()
        if text and not quantifier:
            run += text
        else:
            runs.append(run)
            run = ""
    return max([*runs, run], key=len)


def _skip(regex: str, start: int) -> int:
    """The length of the group or class that begins at `start`."""
    depth, at, inside, opened = 0, start, False, 0
    while at < len(regex):
        here = regex[at]
        if here == "\\":
            at += 1
        elif inside:
            inside = here != "]" or at == opened + 1
        elif here == "[":
            inside, opened = True, at
        elif here == "(":
            depth += 1
        elif here == ")":
            depth -= 1
        at += 1
        if not inside and depth == 0:
            break
    return at - start
