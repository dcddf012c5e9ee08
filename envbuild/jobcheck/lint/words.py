"""The words of a shell script: quotes, expansions, arrays, redirections, here-documents.

Source: the Shell Command Language of POSIX.1-2024 (2.2, 2.6, 2.7, 2.10), and Bash's manual for arrays.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=")
_HEREDOC = re.compile(r"<<(-?)\s*(['\"\\]?)([A-Za-z_]\w*)['\"]?")
# Placeholders in guides: /home/<your-name>/env.
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w-]*(?: [A-Za-z][\w-]*){0,4}>")
_ANSI_C = re.compile(r"\$'([^'\\]*+(?:\\.[^'\\]*+)*+)'", re.DOTALL)
_DEEPEST = 16
_BEFORE_COMMAND = frozenset(["for", "if", "elif", "while", "until", "then", "else", "do", "!", "{", "time"])
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>\||>&|<&|<<<|<>|>|<)(?:&?\d+-?)?")


@dataclass(slots=True)
class Reader:
    """A position in a script.

    With `late`, an outer shell has already expanded the text: only expansions behind a backslash (`\\$(…)`) are
    left for this shell, and the others are not commands of this script. `deep` counts the expansions and arrays around
    the position; deeper than _DEEPEST, they are text. `comments` are the lines of the comments that were read,
    and `documents` the first and last lines of here-documents, with whether the shell leaves their text as it is.
    """

    text: str
    line: int
    at: int = 0
    late: bool = False
    deep: int = 0
    pending: list[tuple[str, bool, bool]] = field(default_factory=list)
    comments: set[int] = field(default_factory=set)
    documents: list[tuple[int, int, bool]] = field(default_factory=list)

    def take(self, size: int = 1) -> str:
        piece = self.text[self.at : self.at + size]
        self.line += piece.count("\n")
        self.at += size
        return piece

    def closing(self, opening: str, closing: str, deep: int = 0) -> str:
        """Return the text up to the `closing` that matches the `opening` before this position, and skip past it."""
        start, depth = self.at, 1
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == "\\":
                self.take(2)
                continue
            if here == "'" and opening != '"':
                self.take()
                while self.at < len(self.text) and self.text[self.at] != "'":
                    self.take()
            elif here == '"' and opening != '"':
                self.take()
                while self.at < len(self.text) and self.text[self.at] != '"':
                    if deep < _DEEPEST and self.text.startswith("$(", self.at):
                        self.take(2)
                        self.closing("(", ")", deep + 1)
                    else:
                        self.take(2 if self.text[self.at] == "\\" else 1)
            elif here == closing:
                depth -= 1
                if depth == 0:
                    break
            elif here == opening:
                depth += 1
            self.take()
        inside = self.text[start : self.at]
        self.take()
        return inside


def simple_command(
    reader: Reader,
) -> tuple[list[tuple[str, bool]], list[tuple[int, str]], list[tuple[int, str, bool]], str]:
    """Read one simple command.

    Return its words as (word, whether it is entirely in single quotes), the scripts in its `$(…)` with their
    lines, its here-documents, and the character that ended it.
    """
    words: list[tuple[str, bool]] = []
    subs: list[tuple[int, str]] = []
    bodies: list[tuple[int, str, bool]] = []
    operator = ""
    while reader.at < len(reader.text):
        here = reader.text[reader.at]
        if here in " \t":
            reader.take()
        elif reader.text.startswith("\\\n", reader.at):
            reader.take(2)
        elif here == "#":
            reader.comments.add(reader.line)
            while reader.at < len(reader.text) and reader.text[reader.at] != "\n":
                reader.take()
        elif found := _HEREDOC.match(reader.text, reader.at):
            reader.take(found.end() - found.start())
            reader.pending.append((found[3], bool(found[2]), bool(found[1])))
        elif here == "\n":
            reader.take()
            bodies += _bodies(reader, subs)
            return words, subs, bodies, operator or here
        elif found := _REDIRECTION.match(reader.text, reader.at):
            reader.take(found.end() - found.start())
            while reader.at < len(reader.text) and reader.text[reader.at] in " \t":
                reader.take()
            if not found[0][-1].isdigit():
                _word(reader, subs)
        elif here in ";|&()":
            reader.take()
            arithmetic = all(word in _BEFORE_COMMAND for word, _ in words) and reader.text.startswith("(", reader.at)
            if here == "(" and arithmetic:
                reader.take()
                reader.closing("(", ")")
                continue
            # The body of a here-document begins on the next line, after the rest of this one.
            if here in "|&" and reader.pending:
                operator = here
                continue
            return words, subs, bodies, here
        else:
            words.append(_word(reader, subs))
    bodies += _bodies(reader, subs)
    return words, subs, bodies, ""


def _bodies(reader: Reader, subs: list[tuple[int, str]]) -> list[tuple[int, str, bool]]:
    found = []
    for name, literal, tabs in reader.pending:
        begun, lines = reader.line, []
        while reader.at < len(reader.text):
            end = reader.text.find("\n", reader.at)
            end = len(reader.text) if end < 0 else end + 1
            line = reader.take(end - reader.at)
            if (line.lstrip("\t") if tabs else line).rstrip("\n") == name:
                break
            lines.append(line)
        reader.documents.append((begun, begun + len(lines) - 1, literal))
        body = "".join(lines)
        found.append((begun, body if literal else _double(Reader(body, begun), subs, ""), literal))
    reader.pending.clear()
    return found


def _word(reader: Reader, subs: list[tuple[int, str]]) -> tuple[str, bool]:
    out: list[str] = []
    quoted = plain = False
    while reader.at < len(reader.text):
        here = reader.text[reader.at]
        if out and (found := _PLACEHOLDER.match(reader.text, reader.at)):
            out.append(reader.take(found.end() - found.start()))
            continue
        if here in " \t\n;|&)<>" or (here == "(" and not out):
            break
        if here == "(":
            if reader.deep < _DEEPEST and ASSIGNMENT.fullmatch("".join(out)):
                reader.take()
                out += ["\0", "\0".join(_array(reader, subs))]
                break
            break
        if here == "'":
            reader.take()
            end = reader.text.find("'", reader.at)
            out.append(reader.take((end if end >= 0 else len(reader.text)) - reader.at))
            reader.take()
            quoted = True
        elif here == '"':
            reader.take()
            out.append(_double(reader, subs))
            plain = True
        elif found := _ANSI_C.match(reader.text, reader.at):
            reader.take(found.end() - found.start())
            out.append(found[1])
            plain = True
        elif here == "\\" and not _escaped(reader):
            reader.take()
            piece = reader.take()
            out.append("" if piece == "\n" else piece)
            plain = True
        else:
            out.append(_expansion(reader, subs) if here in "$`\\" else reader.take())
            plain = True
    return "".join(out), quoted and not plain


def _escaped(reader: Reader) -> bool:
    """Return whether the reader is at a `\\$(` that an outer shell leaves for this one."""
    return reader.late and reader.text.startswith("\\$(", reader.at)


def _double(reader: Reader, subs: list[tuple[int, str]], quote: str = '"') -> str:
    """Return the text in double quotes, or, with an empty `quote`, in a here-document; `\\$` stays unchanged."""
    out = []
    while reader.at < len(reader.text) and reader.text[reader.at] != quote:
        here = reader.text[reader.at]
        if here == "\\" and not _escaped(reader):
            reader.take()
            piece = reader.take()
            gone = piece == "\n" and quote
            out.append("" if gone else piece if piece in f"{quote}\\`" else f"\\{piece}")
        else:
            out.append(_expansion(reader, subs) if here in "$`\\" else reader.take())
    reader.take()
    return "".join(out)


def _expansion(reader: Reader, subs: list[tuple[int, str]]) -> str:
    """Return `$(…)`, `${…}`, `$((…))`, `…` or a lone `$` unexpanded."""
    begun = reader.line
    if reader.text[reader.at] == "\\":
        reader.take()
    elif reader.late and reader.text[reader.at] == "$":
        subs = []  # the outer shell runs them
    if reader.text.startswith("$((", reader.at):
        reader.take(3)
        inside = reader.closing("(", ")")
        reader.take()
        return f"$(({inside}))"
    if reader.text.startswith("$(", reader.at):
        reader.take(2)
        inside = reader.closing("(", ")")
        subs.append((begun, inside))
        return f"$({inside})"
    if reader.text.startswith("${", reader.at):
        reader.take(2)
        inside = reader.closing("{", "}")
        if reader.deep < _DEEPEST:
            _double(Reader(inside, begun, late=reader.late, deep=reader.deep + 1), subs, "")
        return "${" + inside + "}"
    if reader.text[reader.at] == "`":
        reader.take()
        inside = reader.closing("`", "`")
        subs.append((begun, inside))
        return f"$({inside})"
    return reader.take()


def _array(reader: Reader, subs: list[tuple[int, str]]) -> list[str]:
    """Return the words of an array up to its closing parenthesis."""
    words = []
    reader.deep += 1
    while reader.at < len(reader.text):
        here = reader.text[reader.at]
        if here == ")":
            reader.take()
            break
        if here in " \t\n" or reader.text.startswith("\\\n", reader.at):
            reader.take(2 if here == "\\" else 1)
        elif here == "#":
            while reader.at < len(reader.text) and reader.text[reader.at] != "\n":
                reader.take()
        elif here in "(;|&<>":
            reader.take()
        else:
            words.append(_word(reader, subs)[0])
    reader.deep -= 1
    return words
