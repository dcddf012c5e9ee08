"""The constant text of a regular expression: a line without it cannot match, and `in` is much faster than `search`."""

from __future__ import annotations

import re

_QUANTIFIER = re.compile(r"[*+?]\??|\{\d*,?\d*\}\??")
_ESCAPED = re.compile(r"\\[^\w]")


def needle(regex: str) -> str:
    """Return the longest text that every match of `regex` contains, "" if there is none to find.

    Groups, character classes and quantified characters are skipped; top-level alternatives have no common text.
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
    """Return the length of the group or character class that begins at `start`."""
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
