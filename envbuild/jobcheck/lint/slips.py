"""The rules of `envbuild lint-job` for what an author overlooked.

Directives that are comments, placeholders, default ports, and endpoints that are not the head node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

from envbuild.jobcheck.lint.directives import option_values, whole_number
from envbuild.jobcheck.lint.launch import RANK_OPTIONS, starts_training
from envbuild.jobcheck.lint.script import Found, ParsedScript

_SPACED = re.compile(r"#\s+(?:SBATCH|PBS)\s+(-\S+)")
_MARKER = re.compile(r"#([A-Z]{3,7}) +(-\S+)")
_MARKERS = frozenset(["SBATCH", "PBS", "BSUB"])
_SORTED = frozenset("".join(sorted(name)) for name in (*_MARKERS, "SBTCH", "SBACH", "SBATH", "SBATC", "SSBATCH"))
_WITHOUT_NAME = re.compile(r"#(--(?:gres|gpus|gpus-per-node|gpus-per-task)=\S+)")
_ANGLES = re.compile(
    r"<[A-Za-z][\w -]{0,60}>|\{\{ ?(?!id|name|jobid)[A-Za-z][\w .-]{0,60}\}\}"
    r"|(?<![${])\{(?:\d{1,2}\. ?)?[A-Za-z][a-zA-Z_ -]{2,60}\}|\[(?:replace|your|insert|fill in)\b[\w @.-]{0,60}\]"
)
_ACCOUNT = re.compile(r"[a-z]{0,8}x{5,}|X|X{3,}|[Yy]our[_-]\w+")
_PATH = re.compile(
    r"(?:^|[^-])/path/to/|^/your/|^path/to/|^path_to_\w|^[Yy]our[_A-Z-]\w+$|<(?:your|path|my)[ \w-]{1,60}>"
    r"|\{\{ ?(?:your|path|my)[ \w.-]{0,60}\}\}"
    r"|(?<!\$)\{\d{1,2}\. ?[A-Za-z]|(?<!\$)\{(?:your|path_to)[_ -][\w -]{1,60}\}"
)
_LAST_ANGLES = re.compile(r"^[^#'\"]*\s(<[A-Za-z][\w -]{1,60}>)\s*$|^\s*(?:export )?\w+=(<[A-Za-z][\w -]{1,60}>)")
_PRINTS = frozenset(["echo", "printf", ":", "cat"])
_PORTS = re.compile(r"--(?:main_process_port|main-process-port|master_port|config)|MASTER_PORT")
_MOST = 50  # values of a variable that are looked at
_PORT_OPTIONS = ("--main_process_port", "--main-process-port", "--master_port")
_DOLLAR = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
_PREFIX = re.compile(r"[A-Z_][A-Z0-9_]*=")
_HELD = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")
_OPERATOR = re.compile(r"(?<=[\w\"'/.-]) (\|&?|&&|2>&1|&?>>?) (?=[\w\"'/$.|])")
_CSH = re.compile(r"\s*set\s+([A-Z][A-Z_]*=\S+)\s*$")
_ADDRESS = re.compile(r"(?!127\.|0\.)\d{1,3}(?:\.\d{1,3}){3}")
_LITERAL_HOST = re.compile(r"[a-z][\w.-]+(?::.*)?", re.DOTALL)


def of_comments(script: ParsedScript) -> Iterator[Found]:
    """Find directives that are comments, although nothing else asks for what they ask."""
    if not script.directives:
        spaced = [(number, match[1]) for number, line in enumerate(script.lines, 1) if (match := _SPACED.match(line))]
        if len(spaced) > 1:
            yield Found("directive-comment", *spaced[0])
        return
    for number in range(1, script.directives[-1][0] + 8):
        match = _MARKER.match(script.lines[number - 1]) if number <= len(script.lines) else None
        marker = match[1] if match else ""
        if match and marker not in _MARKERS and "".join(sorted(marker)) in _SORTED:
            yield Found("directive-comment", number, f"#{marker} {match[2]}")
    asked = any(word.startswith(("--gres", "--gpu", "-G")) for _, words in script.directives for word in words)
    asked |= "python" not in script.text
    for number in range(script.directives[0][0], 0 if asked else script.directives[-1][0]):
        if match := _WITHOUT_NAME.match(script.lines[number - 1]):
            yield Found("directive-comment", number, match[1])


def of_placeholders(script: ParsedScript) -> Iterator[Found]:
    """Find names in a script copied from a guide that its user has not replaced."""
    for line, words in script.directives:
        accounts = [*option_values(words, ("--account", "-A", "--partition", "-p", "--qos", "-q"))]
        found = _ANGLES.findall(" ".join(words)) + [one for one in accounts if _ACCOUNT.fullmatch(one)]
        yield from (Found("placeholder", line, word) for word in found[:1])
    for one in script.commands:
        # The default in ${DATA:-/path/to/data} is no fault: users set DATA.
        paths = [word for word in one.texts if _PATH.search(word) and ":-" not in word]
        # As the last word, it is a syntax error: > without a file.
        if angles := _LAST_ANGLES.search(script.lines[one.line - 1]):
            paths = [angles[1] or angles[2]]
        if one.program == "cd" and re.fullmatch(r"[A-Z]+(?:_[A-Z]+)+", "".join(one.words[1:])):
            paths = [one.words[1]]
        if paths and not one.file and one.program not in _PRINTS:
            yield Found("placeholder", one.line, paths[0])
            return


def of_default_ports(script: ParsedScript) -> Iterator[Found]:
    """Find launchers that take the same port in each job, in jobs that may share their node."""
    if script.kind == "shell" or script.several or script.whole_nodes or script.gpus < 1 or script.sets_options:
        return
    known = {id(one.command) for one in script.launches}
    for one in script.commands:
        launches = one.program == "deepspeed" or (one.program == "accelerate" and one.words[1:2] == ("launch",))
        words = script.variables.expanded(one.words)
        ranks = next(option_values(words, RANK_OPTIONS), "")
        port = next(option_values(words, _PORT_OPTIONS), "")
        if launches and port.isdecimal() and port != "0" and not (one.file or id(one) in known):
            yield Found("fixed-port", one.line, port, level=script.doubtful)
            return
        told = script.gpus < 2 or _PORTS.search(" ".join(words)) or "MASTER_PORT" in script.text
        if launches and not (one.file or told or whole_number(ranks) == 1) and starts_training(one):
            yield Found("fixed-port", one.line, f"29500 ({one.program}'s default)", level=script.doubtful)
            return


def of_assignments(script: ParsedScript) -> Iterator[Found]:
    """Find lines that look like assignments and are none."""
    for one in script.commands:
        words = one.words[1:] if one.words[:1] in (("export",), ("env",)) else one.words[:1]
        for word in words:
            named = f'"{word[:2]}' in script.lines[one.line - 1]  # export "$NAME"="$VALUE" of a loop over names
            if not one.file and not named and _DOLLAR.fullmatch(word.partition("=")[0]) and "=" in word:
                yield Found("assignment-malformed", one.line, word.partition("=")[0] + "=")
                break
        started = _started(one.words) if one.program == "srun" and not one.file else ""
        if _PREFIX.match(started):
            yield Found("assignment-malformed", one.line, started.partition("=")[0] + "=")
        name = _HELD.fullmatch(one.words[0]) if one.words and "eval" not in script.lines[one.line - 1] else None
        held = script.held.get(name[1], ())[-_MOST:] if name else ()
        begins = [text.partition("=")[0] for text in held if _PREFIX.match(text)]
        if begins and not (one.file or one.around):  # in bash -c "$CMD" the other shell takes it for an assignment
            level: Literal["", "warning"] = "" if len(begins) == len(held) else "warning"
            yield Found("assignment-malformed", one.line, f"{begins[0]}=", level=level)
        spaced = one.words[1:2] == ("=",) and re.fullmatch(r"[A-Za-z_]\w*", one.words[0])
        if spaced and not (one.file or one.started_by or one.words[0] in ("test", "let", "expr", "alias", "set")):
            yield Found("assignment-malformed", one.line, f"{one.words[0]} =")
    for number, line in enumerate(script.lines if script.directives else (), 1):
        if match := _CSH.match(line):
            yield Found("assignment-set", number, match[1])


def _started(words: tuple[str, ...]) -> str:
    """Return the program that a launcher starts: the first word that is neither an option nor may be its value."""
    pairs = pairwise(words)
    return next((two for one, two in pairs if two[:1] != "-" and (one[:1] != "-" or "=" in one)), "")


def of_conflicts(script: ParsedScript) -> Iterator[Found]:
    """Find the marks of a merge that was not finished."""
    starts = [number for number, line in enumerate(script.lines, 1) if line.startswith("<<<<<<< ")]
    ends = [number for number, line in enumerate(script.lines, 1) if line.startswith(">>>>>>> ")]
    if starts and ends and "=======" in script.lines[starts[0] : ends[-1]]:
        yield Found("merge-conflict", starts[0], script.lines[starts[0] - 1][:20])


def of_operators(script: ParsedScript) -> Iterator[Found]:
    """Find operators of the shell in variables that are commands."""
    for one in script.commands:
        names = [_HELD.fullmatch(word) for word in (*one.words[:1], *(one.words[-1:] if one.program == "srun" else ()))]
        line = script.lines[one.line - 1]
        if one.file or one.around or re.search(r"\beval\b|\b(?:ba)?sh -", line):
            continue
        for name in (match[1] for match in names if match):
            held = script.held.get(name, ())[-_MOST:]
            found = [match for text in held if (match := _OPERATOR.search(text)) and "$(" not in text]
            if found and len(found) == len(held):
                yield Found("operator-quoted", one.line, found[0][1])
                return


def of_literal_hosts(script: ParsedScript) -> Iterator[Found]:
    """Find endpoints at a fixed host in jobs that look the head up and do not use it."""
    for one in script.launches if script.several and "scontrol show hostname" in script.text else ():
        for name in ("rdzv-endpoint", "master-addr"):
            host = one.options.get(name, "")
            if _LITERAL_HOST.fullmatch(host) and not host.startswith("localhost"):
                yield Found("endpoint-fixed", script.where(host[:20], one.command.line), host.partition(":")[0])
    # Where the directives name the nodes, their addresses are known.
    pinned = script.directive("--nodelist", "-w") or "host=" in script.text
    for command, value in script.exported("MASTER_ADDR") if script.several and script.facts and not pinned else ():
        if _ADDRESS.fullmatch(value) and not command.file:
            yield Found("endpoint-fixed", command.line, value)
