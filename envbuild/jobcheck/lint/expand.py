"""The values of a script's variables, expanded within bounds that no script of a person reaches.

A value can refer to others, each of them several times, so that a few lines stand for gigabytes of text. A variable
that exceeds a bound stays unexpanded, as one of unknown value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

_DEEPEST = 6
# Characters of one variable's value, and of all expansions in one script.
_LONGEST, _MOST = 1 << 16, 1 << 26
_WHOLE = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")
_WORDS = re.compile(r"(?:\$\([^()]{0,200}\)|\S)+")
_PART = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*0]\])?\})")


class Variables:
    """The variables of a script; `words` are the words of all assignments to each."""

    def __init__(self, words: Mapping[str, Sequence[str]]) -> None:
        self._words = words
        self._left = _MOST
        self._known: dict[tuple[str, int], tuple[list[str], int]] = {}
        self._recursive: dict[str, bool] = {}

    def expanded(self, words: Sequence[str], depth: int = 0) -> list[str]:
        """Return `words` with `$NAME`, `${NAME}` and `${NAME[@]}` replaced by the words of all their assignments."""
        out: list[str] = []
        for word in words:
            whole = _WHOLE.fullmatch(word)
            found = self._of(whole[1], depth) if whole else None
            if found is None:
                out.append(_PART.sub(partial(self._fill, depth), word))
                continue
            for value in found:
                out += _WORDS.findall(value) if not value.startswith("$(") else [value]
        return out

    def _fill(self, depth: int, match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if match[0] not in self._recursive:
            self._recursive[match[0]] = match[0] in " ".join(self._words.get(name, ()))
        found = None if self._recursive[match[0]] else self._of(name, depth)
        return match[0] if found is None else " ".join(found)

    def _of(self, name: str, depth: int) -> list[str] | None:
        """Return the words of a variable, None for one that is unknown or exceeds a bound."""
        if name not in self._words or depth >= _DEEPEST:
            return None
        if (name, depth) not in self._known:
            found = self.expanded(self._words[name], depth + 1)
            self._known[name, depth] = found, sum(len(word) + 1 for word in found)
        found, size = self._known[name, depth]
        if size > _LONGEST or size > self._left:
            return None
        self._left -= size
        return found
