"""Positions in TOML text."""

from __future__ import annotations

import re
import tomllib

Keys = tuple[str | int, ...]


class Scanner:
    """Scanner for the offset of every key and array element in a text that tomllib has accepted.

    tomllib does not report the positions of values, and no TOML package on PyPI does. The text is known to be
    valid, so only tokens and nesting need to be recognized.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.offsets: dict[Keys, int] = {}
        self.last: dict[Keys, int] = {}  # array of tables -> index of its newest element
        self.blank = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
        self.key = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""")
        self.scalar = re.compile(
            r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\]|\\.)*"|\'[^\']*\'|[^],}#\n]+', re.S
        )
        table: Keys = ()
        self.take("")
        while self.at < len(text):
            if text[self.at] == "[":
                table = self.header()
            else:
                self.pair(table)

    def take(self, token: str) -> bool:
        """Skip `token` and the blanks around it if it comes next; return whether it did."""
        self.at = self.match(self.blank).end()
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        self.at = self.match(self.blank).end()
        return True

    def match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self.text, self.at)
        assert found is not None, f"scanner lost at offset {self.at}"
        return found

    def header(self) -> Keys:
        start = self.at
        if not self.text.startswith("[[", start):
            self.take("[")
            table = self.dotted(())
            self.take("]")
            return table
        self.take("[[")
        array = self.dotted(())
        self.take("]]")
        self.last[array] = self.last.get(array, -1) + 1
        element = (*array, self.last[array])
        self.offsets[element] = start
        return element

    def pair(self, table: Keys) -> None:
        keys = self.dotted(table)
        self.take("=")
        self.value(keys)

    def dotted(self, base: Keys) -> Keys:
        while True:
            if base in self.last:
                base = (*base, self.last[base])
            found = self.match(self.key)
            name = found[0]
            if name[0] in "\"'":
                name = tomllib.loads(f"key = {name}")["key"]
            base = (*base, name)
            self.offsets.setdefault(base, self.at)
            self.at = found.end()
            if not self.take("."):
                return base

    def value(self, keys: Keys) -> None:
        if self.take("["):
            index = 0
            while not self.take("]"):
                self.offsets[(*keys, index)] = self.at
                self.value((*keys, index))
                self.take(",")
                index += 1
        elif self.take("{"):
            while not self.take("}"):
                self.pair(keys)
                self.take(",")
        else:
            self.at = self.match(self.scalar).end()
            self.take("")
