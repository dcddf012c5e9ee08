"""Parser of shell scripts to a list of commands, as the rules need them: words, assignments, nested scripts.

Commands in another shell (`srun bash -c '…'`, a here-document for `ssh`) are parsed as well, with the commands
that start them. Control flow is ignored: both branches of an `if` count.

Source: the Shell Command Language of POSIX.1-2024 (2.2, 2.6, 2.7, 2.10), and Bash's manual for arrays.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from envbuild.data import load_table
from envbuild.data.schedulers import LAUNCHER_NAMES

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=")
_HEREDOC = re.compile(r"<<(-?)\s*(['\"\\]?)([A-Za-z_!%@+.:][\w!%@+.:-]*)['\"]?")
# Placeholders in guides: /home/<your-name>/env.
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w-]*(?: [A-Za-z][\w-]*){0,4}>")
_ANSI_C = re.compile(r"\$'([^'\\]*+(?:\\.[^'\\]*+)*+)'", re.DOTALL)
_DEEPEST_EXPANSION = 16
_BEFORE_COMMAND = frozenset(["for", "if", "elif", "while", "until", "then", "else", "do", "!", "{", "time"])
_BLOCKS = {"for": "done", "select": "done", "while": "done", "until": "done", "if": "fi", "case": "esac", "{": "}"}
_BEFORE_BLOCK = frozenset(
    ["if", "elif", "while", "until", "then", "else", "do", "!", "{", "time", "function", "done", "fi", "esac", "}"]
)
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>\||>&|<&|<<<|<>|>|<)(?:&?\d+-?)?")
WORDS = {name: frozenset(words) for name, words in load_table("job_words").items()}
LAUNCHERS = WORDS["launchers"].union(LAUNCHER_NAMES)
CONTAINERS, SUBMITS = WORDS["containers"], WORDS["submits"]
_OTHERS = re.compile(r"python|perl|ruby|julia|Rscript|node$|\$\{?\w{0,20}(?:PYTHON|python)")
# Words between a program that starts another one and that one.
_OPERAND = re.compile(r"-.*|[\d.]\S*|[A-Z]{1,8}|\$\{?\w{0,40}(?:time|TIME|limit|LIMIT|dur|DUR)\w*\}?")
# Programs that write a here-document, or take it as a job.
_WRITES = SUBMITS | {"cat", "tee"}
_DEEPEST_SHELL = 6
_AROUND = 200  # words before a nested command that are kept
_DEEPEST_VALUE = 6
# Characters of one variable's value, and of all expansions in one script.
_LONGEST_VALUE, _MOST_EXPANDED = 1 << 16, 1 << 26
_WHOLE = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")
_WORDS = re.compile(r"(?:\$\([^()]{0,200}\)|\S)+")
_PART = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*0]\])?\})")


@dataclass(slots=True)
class Reader:
    """Reader at a position in a script.

    With `late`, an outer shell has already expanded the text: only expansions behind a backslash (`\\$(…)`) are
    left for this shell, and the others are not commands of this script. `deep` counts the expansions and arrays around
    the position; deeper than _DEEPEST_EXPANSION, they are text. `comments` are the lines of the comments that
    were read, and `documents` the first and last lines of here-documents, with whether the shell leaves their text as
    it is. `blocks` are the compound commands and quotes that are open at the position, each with its line.
    """

    text: str
    line: int
    at: int = 0
    late: bool = False
    deep: int = 0
    pending: list[tuple[str, bool, bool]] = field(default_factory=list)
    comments: set[int] = field(default_factory=set)
    documents: list[tuple[int, int, bool]] = field(default_factory=list)
    blocks: list[tuple[str, int]] = field(default_factory=list)

    def take(self, size: int = 1) -> str:
        piece = self.text[self.at : self.at + size]
        self.line += piece.count("\n")
        self.at += size
        return piece

    def take_until(self, end: str) -> str:
        """Skip and return the text before the next `end`, else all that is left."""
        at = self.text.find(end, self.at)
        return self.take((len(self.text) if at < 0 else at) - self.at)

    def closing(self, opening: str, closing: str, deep: int = 0) -> str:
        """Return the text up to the `closing` that matches the `opening` before this position, and skip past it."""
        start, depth, begun = self.at, 1, self.line
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == "\\":
                self.take(2)
                continue
            if here == "'" and opening not in '"`':
                self.take()
                self.take_until("'")
            elif here == '"' and opening not in '"`':
                self.take()
                while self.at < len(self.text) and self.text[self.at] != '"':
                    if deep < _DEEPEST_EXPANSION and self.text.startswith("$(", self.at):
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
        self.ends(f"${opening}", begun)
        return inside

    def ends(self, opening: str, begun: int) -> None:
        """Skip the closing character of `opening` in line `begun`; at the end of the text, record it as unclosed."""
        if self.at >= len(self.text):
            self.blocks.append((opening, begun))
        self.take()

    def nest(self, begun: int, words: list[tuple[str, bool]]) -> None:
        """Record the compound commands that a simple command in line `begun` opens and closes."""
        for number, (word, _) in enumerate(words):
            if word in _BLOCKS:
                self.blocks.append((word, begun))
            elif word in _BLOCKS.values():
                if not self.blocks or _BLOCKS.get(self.blocks[-1][0]) != word:
                    self.blocks.append((word, begun))
                    return
                self.blocks.pop()
            if word not in _BEFORE_BLOCK and not (words[0][0] == "function" and number < 2):
                return


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
            reader.take_until("\n")
        elif match := _HEREDOC.match(reader.text, reader.at):
            reader.take(match.end() - match.start())
            reader.pending.append((match[3], bool(match[2]), bool(match[1])))
        elif here == "\n":
            reader.take()
            bodies += _bodies(reader, subs)
            return words, subs, bodies, operator or here
        elif match := _REDIRECTION.match(reader.text, reader.at):
            reader.take(match.end() - match.start())
            while reader.at < len(reader.text) and reader.text[reader.at] in " \t":
                reader.take()
            if not match[0][-1].isdigit():
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
    bodies = []
    for name, literal, tabs in reader.pending:
        begun, lines = reader.line, []
        while reader.at < len(reader.text):
            line = reader.take_until("\n") + reader.take()
            if (line.lstrip("\t") if tabs else line).rstrip("\n") == name:
                break
            lines.append(line)
        reader.documents.append((begun, begun + len(lines) - 1, literal))
        body = "".join(lines)
        bodies.append((begun, body if literal else _double(Reader(body, begun), subs, ""), literal))
    reader.pending.clear()
    return bodies


def _word(reader: Reader, subs: list[tuple[int, str]]) -> tuple[str, bool]:
    out: list[str] = []
    quoted = plain = False
    while reader.at < len(reader.text):
        here = reader.text[reader.at]
        if out and (match := _PLACEHOLDER.match(reader.text, reader.at)):
            out.append(reader.take(match.end() - match.start()))
            continue
        if here in " \t\n;|&)<>" or (here == "(" and not out):
            break
        if here == "(":
            if reader.deep < _DEEPEST_EXPANSION and ASSIGNMENT.fullmatch("".join(out)):
                reader.take()
                out += ["\0", "\0".join(_array(reader, subs))]
                break
            break
        if here == "'":
            begun = reader.line
            reader.take()
            out.append(reader.take_until("'"))
            reader.ends("'", begun)
            quoted = True
        elif here == '"':
            reader.take()
            out.append(_double(reader, subs))
            plain = True
        elif match := _ANSI_C.match(reader.text, reader.at):
            reader.take(match.end() - match.start())
            out.append(match[1])
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
    out, begun = [], reader.line
    while reader.at < len(reader.text) and reader.text[reader.at] != quote:
        here = reader.text[reader.at]
        if here == "\\" and not _escaped(reader):
            reader.take()
            piece = reader.take()
            gone = piece == "\n" and quote
            out.append("" if gone else piece if piece in f"{quote}\\`" else f"\\{piece}")
        else:
            out.append(_expansion(reader, subs) if here in "$`\\" else reader.take())
    if quote:
        reader.ends(quote, begun)
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
        if reader.deep < _DEEPEST_EXPANSION:
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
            reader.take_until("\n")
        elif here in "(;|&<>":
            reader.take()
        else:
            words.append(_word(reader, subs)[0])
    reader.deep -= 1
    return words


@dataclass(frozen=True, slots=True)
class Command:
    """Simple command.

    `words` are without quotes, with unexpanded variables; `assignments` (name, words) precede the command or
    stand alone. `started_by` are the enclosing launchers and containers, outermost first, and `around` the
    words of these commands. `per_node` means that its text is expanded on the node and not in the batch script;
    `file` that it is only written into a file. `end` is the operator behind it, and `background` tells whether
    that or an enclosing command's is `&`; `captured` that it runs in `$(…)`.
    """

    line: int
    words: tuple[str, ...]
    assignments: tuple[tuple[str, tuple[str, ...]], ...] = ()
    started_by: tuple[str, ...] = ()
    per_node: bool = False
    file: bool = False
    function: str = ""
    around: tuple[str, ...] = ()
    end: str = ""
    background: bool = False
    captured: bool = False

    @property
    def program(self) -> str:
        """Name of its program, without a folder; "" for assignments alone."""
        return posixpath.basename(self.words[0]) if self.words else ""

    @property
    def texts(self) -> tuple[str, ...]:
        """Its words, and the words of the values that it assigns."""
        return (*self.words, *(word for _, words in self.assignments for word in words))


@dataclass(frozen=True, slots=True)
class _CommandPlace:
    """Context of commands: the fields of Command with these names, and the nesting depth of shells."""

    started_by: tuple[str, ...] = ()
    around: tuple[str, ...] = ()
    per_node: bool = False
    file: bool = False
    background: bool = False
    captured: bool = False
    depth: int = 0


_HERE = _CommandPlace()


def commands_of(reader: Reader, place: _CommandPlace = _HERE) -> Iterator[Command]:
    """Yield the commands from the reader's position on; the reader records comments and here-documents."""
    function, braces = "", 0
    while reader.at < len(reader.text):
        begun = reader.line
        words, subs, bodies, end = simple_command(reader)
        if not place.depth:
            reader.nest(begun, words)
        if end in ("|", "&") and reader.text[reader.at : reader.at + 1] in (end, "&"):
            end += reader.take()
        if (
            end == "("
            and words
            and len(words) <= 1 + (words[0][0] == "function")
            and reader.text[reader.at : reader.at + 1] == ")"
        ):
            reader.take()
            function, braces = words[-1][0], 0
            continue
        if words and words[0] == ("function", False):
            function, braces = "".join(word for word, _ in words[1:2]), 0
        if function:
            braces += sum((w == "{") - (w == "}") for w, _ in words)
        command, rest = _made(begun, words, place, function)
        if command is not None:
            command = replace(command, end=end, background=place.background or end == "&")
            yield command
        if function and braces <= 0 and any(w == "}" for w, _ in words):
            function = ""
        if place.depth >= _DEEPEST_SHELL:
            continue
        deeper = replace(place, depth=place.depth + 1)
        late = replace(deeper, per_node=place.per_node or reader.late, captured=True)
        for at, inner in subs:
            yield from commands_of(Reader(inner, at), late)
        if command is not None:
            yield from _nested(command, rest, bodies, deeper, reader.late)


def _nested(
    command: Command,
    words: list[tuple[str, bool]],
    bodies: list[tuple[int, str, bool]],
    place: _CommandPlace,
    late: bool,
) -> Iterator[Command]:
    """Yield the commands that a command passes to other shells: strings after -c, here-documents, ssh's last word."""
    names = [posixpath.basename(word) for word, _ in words]
    by = starters(command, [word for word, _ in words])
    texts = command.around + command.words[:_AROUND]
    place = replace(place, background=command.background)
    for number, (word, literal) in enumerate(words):
        before = next((name for name in reversed(names[: max(number - 1, 0)]) if not name.startswith("-")), "")
        shell = number and not _OTHERS.match(before)
        given = shell and re.fullmatch(r"-\w*c", words[number - 1][0])
        if " " in word and (given or names[0] in ("ssh", "pdsh", "clush")):
            around = texts[: min(len(command.around) + number, _AROUND)]
            there = literal and not late
            inner = replace(place, started_by=by, around=around, per_node=there or place.per_node)
            yield from commands_of(Reader(word, command.line, late=not there), inner)
    runs = any(program in WORDS["shells"] or program in LAUNCHERS for program in names)
    for line, body, literal in bodies:
        if runs or _WRITES & {*names}:
            there = literal and not late
            inner = replace(place, started_by=by, around=texts[:_AROUND], per_node=there or place.per_node)
            inner = replace(inner, file=place.file or not runs)
            yield from commands_of(Reader(body, line, late=not there), inner)


def starters(command: Command, words: Sequence[str]) -> tuple[str, ...]:
    """Return the launchers and containers that start the command after `words` of `command`, outermost first."""
    names = (posixpath.basename(word) for word in words)
    programs = command.started_by + tuple(program for program in names if program in LAUNCHERS | CONTAINERS)
    pyxis = any(word.startswith("--container-image") for word in words)
    return tuple(dict.fromkeys((*programs, "pyxis") if pyxis else programs))


def _made(
    line: int, words: list[tuple[str, bool]], place: _CommandPlace, function: str
) -> tuple[Command | None, list[tuple[str, bool]]]:
    assignments: list[tuple[str, tuple[str, ...]]] = []
    at, options, wrapped = 0, False, False
    for at, (word, _) in enumerate([*words, ("", False)]):  # noqa: B007 - it is used behind the loop
        if (options and word.startswith("-")) or (wrapped and _OPERAND.fullmatch(word)):
            continue
        wrapped = posixpath.basename(word) in WORDS["wrappers"]
        options = word in ("export", "declare", "local", "readonly", "typeset", "env")
        if options or wrapped or word in WORDS["keywords"] or (word.endswith(")") and "(" not in word):
            continue
        if match := ASSIGNMENT.match(word):
            value = word[match.end() :]
            parts = tuple(value[1:].split("\0")) if value.startswith("\0") else (value,)
            assignments.append((match[1] + ("+" if match[3] else ""), parts))
        else:
            break
    rest = words[at:]
    if not rest and not assignments:
        return None, rest
    texts = tuple(word for word, _ in rest)
    made = Command(
        line, texts, tuple(assignments), place.started_by, place.per_node, place.file, function, place.around
    )
    return replace(made, captured=place.captured), rest


class Variables:
    """Variables of a script; `words` are the words of all assignments to each."""

    def __init__(self, words: Mapping[str, Sequence[str]]) -> None:
        self._words = words
        self._left = _MOST_EXPANDED
        self._known: dict[tuple[str, int], tuple[list[str], int]] = {}
        self._recursive: dict[str, bool] = {}

    def expanded(self, words: Sequence[str], depth: int = 0) -> list[str]:
        """Return `words` with `$NAME`, `${NAME}` and `${NAME[@]}` replaced by the words of all their assignments."""
        out: list[str] = []
        for word in words:
            whole = _WHOLE.fullmatch(word)
            values = self._of(whole[1], depth) if whole else None
            if values is None:
                out.append(_PART.sub(partial(self._fill, depth), word))
                continue
            for value in values:
                out += _WORDS.findall(value) if not value.startswith("$(") else [value]
        return out

    def _fill(self, depth: int, match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if match[0] not in self._recursive:
            self._recursive[match[0]] = match[0] in " ".join(self._words.get(name, ()))
        values = None if self._recursive[match[0]] else self._of(name, depth)
        return match[0] if values is None else " ".join(values)

    def _of(self, name: str, depth: int) -> list[str] | None:
        """Return the words of a variable, None if it is unknown or exceeds a limit."""
        if name not in self._words or depth >= _DEEPEST_VALUE:
            return None
        if (name, depth) not in self._known:
            values = self.expanded(self._words[name], depth + 1)
            self._known[name, depth] = values, sum(len(word) + 1 for word in values)
        values, size = self._known[name, depth]
        if size > _LONGEST_VALUE or size > self._left:
            return None
        self._left -= size
        return values
