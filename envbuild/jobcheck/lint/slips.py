"""Rules for oversights of an author.

Misread directives and lines, misspelt names, forgotten placeholders, missing settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

from envbuild.jobcheck.lint.directives import option_values
from envbuild.jobcheck.lint.launch import TRAINS
from envbuild.jobcheck.lint.rendezvous import GIVEN, sets_elsewhere
from envbuild.jobcheck.lint.script import ERREXIT, NOUNSET, Fault, ParsedScript, guarded, option_set
from envbuild.jobcheck.lint.shell import WORDS

_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_INTERPRETER = re.compile(r"#! ?/[ -~]+")
# Directives without which a job trains the same.
_LABELS = re.compile(r"--(?:job-name|comment|mail-\w+)\b")
_FETCHES = frozenset(["curl", "wget"])
_SHELLS = frozenset(["bash", "sh", "zsh", "source", "."])
_BARE = re.compile(
    r"(?<!\+)(?<!\+:)\$(\{)?(LD_LIBRARY_PATH|PYTHONPATH|LD_PRELOAD)(?(1)\}|\b)"
)  # ${NAME:+:$NAME} is safe
_ACTIVATES = re.compile(r"^(?:(?:source|\.) \S*bashrc|conda activate)\b")
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_SETTING = re.compile(r"[a-z]\w*(?:\.\w+)+=|[\w-]+(?:/[\w-]+)+:/")
_TORCHRUNS = re.compile(r"--(?:nproc[-_]per[-_]node|rdzv[-_](?:endpoint|backend|id)|standalone)(?:=.*)?", re.DOTALL)
_SPACED = re.compile(r"(?:#[ \t]+(?:SBATCH|PBS)|[ \t]+#(?:SBATCH|PBS|BSUB))[ \t]+(-\S+)")
_MARKER = re.compile(r"#([A-Z]{3,7}) +(-\S+)")
_MARKERS = frozenset(["SBATCH", "PBS", "BSUB"])
_SORTED = frozenset("".join(sorted(name)) for name in (*_MARKERS, "SBTCH", "SBACH", "SBATH", "SBATC", "SSBATCH"))
_WITHOUT_NAME = re.compile(r"#(--(?:gres|gpus|gpus-per-node|gpus-per-task)=\S+)")
_GAPS, _WORDS, _BARE_WORDS, _NAMES, _MAILS = (
    re.compile("|".join(sorted(WORDS[f"{name}_placeholders"])))
    for name in ("line", "word", "number", "directive", "address")
)
_PRINTS = frozenset(["echo", "printf", ":", "cat", "[", "[[", "test", "read", "grep"])
# A default in ${DATA:-/path/to/data} or a usage in ${1:?usage …} is no fault: users set DATA.
_EXAMPLES = re.compile(r":[-?]|\b(?:mktemp|awk|jq|perl|sed|grep|read|[Uu]sage)\b|^\s*(?:[A-Z][a-z]+,? [a-z_]|[└├│])")
_FOLDERS = re.compile("DIR|PATH|FOLDER|PROJECT|YOUR|WORK|REPO|HERE|ROOT|CODE")
_MOST = 50  # values of a variable that are looked at
_SINGLE = WORDS["single_directives"]
_LONGEST = 200  # characters of a word with a placeholder
# Directives whose values are names.
_NAMED = (("--account", "-A", "-P"), ("--partition", "-p"), ("--qos", "-q"), ("--nodelist", "-w"), ("--reservation",))
_OTHER_SHELL = re.compile(r"#!.*(?:csh|fish|zsh|ksh)\b")
_DECLARES = re.compile(r"\b(?:declare|typeset|local|readonly)\s")
_DOLLAR = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")
_PREFIX = re.compile(r"[A-Z_][A-Z0-9_]*=")
_HELD = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")
_OPERATOR = re.compile(r"(?<=[\w\"'/.-]) (\|&?|&&|2>&1|&?>>?) (?=[\w\"'/$.|])")
_WARNINGS = frozenset(["USR1", "USR2", "10", "12"])
_LOOPS = re.compile(r"\b(?:for|select|let|(?:read|mapfile|readarray)(?: -\w{1,9}){0,3}|getopts \S{1,99}) (\w+)")
_COMMENTED = re.compile(r"^[ \t]*#+[ \t]*(?:export[ \t]+)?([A-Z][A-Z0-9_]{3,})=", re.MULTILINE)
# Variables that users' environments, modules and activated environments set.
_FROM_OUTSIDE = re.compile(
    r"CUDA|CONDA|NCCL|OMP|MPI|LD_|EBROOT|EBVERSION|NQS|MEMBERWORK|PROJWORK|LUSTRE_|TACC_|(?:STORE|FAST|ARCHIVE|LANG|TERM|SHELL)$|PATH$|.*(?:PATH|HOME|ROOT|DIR|SCRATCH|TMP|KEY|TOKEN)$|ROCR|HIP"
)
_FROM_SITE = re.compile(
    r"(?!.*DIR$)(?:CUDA|CONDA|NCCL|OMP|MPI|LD_|.*(?:PATH|HOME|ROOT|SCRATCH|TMP|KEY|TOKEN)$|ROCR|HIP)"
)
_IGNORES = re.compile(r"(?:-|:|true)?$|echo\b[^;&|]*$")
_OFTEN = {"".join(sorted(name)): name for name in WORDS["often"]}
_UNSEEN = re.compile("[\u00a0\u200b-\u200d\u2060\ufeff]")
_HELPERS = re.compile(r"die|usage|(?:show|print)_(?:help|usage)|error_exit|fatal")
# Variables that are read. Those in upper case may come from the environment: they are compared only with names that
# differ in underscores.
_READ = re.compile(r"(?<!\\)\$(?:([a-z][a-z0-9_]*|[A-Z]\w*)\b|\{([a-z][a-z0-9_]*|[A-Z]\w*)\})")
_WORDS_OF_CODE = re.compile(r"(?<![\w${\\-])[a-z][a-z0-9_]*")
# Variables that programs read, and schedulers do not set.
_OF_PROGRAMS = re.compile(
    r"(?:NCCL|GLOO|TORCH|PYTORCH|TF|XLA|TOKENIZERS|HSA|MIOPEN)_\w+|MASTER_(?:ADDR|PORT)|CUDA_(?:DEVICE_ORDER|LAUNCH_BLOCKING)"
)
_QUOTES = frozenset(["awk", "sed", "perl", "jq", "bash", "sh", "csh", "envsubst", "xargs", "find", "trap", "python"])


def of_directives(script: ParsedScript) -> Iterator[Fault]:
    """Find directives that the scheduler does not read, and environments that srun does not inherit."""
    if script.writes:  # with the values of this one, by a shell that has no first line here
        return
    lines = [line for line, words in script.directives if words[:1] and words[0].startswith("-")]
    strict = script.facts is not None and script.facts.strict
    if strict and lines and not _INTERPRETER.fullmatch(script.lines[0].rstrip()):
        yield Fault("no-interpreter", lines[0])
    bash = re.search(r"\[\[ |\(\(|<<<|<\(|\w=\(|\$\{\w+\[", script.text)
    shell = script.facts.shell if script.facts else ""
    if shell and lines and not (script.lines[0].startswith("#!") or script.directive(shell)):
        yield Fault("no-interpreter", lines[0], level="warning" if lines[0] == 1 and bash else "hint")
    expands = script.facts.expands if script.facts else None
    for line, words in script.directives if expands is not None else ():
        names = [name for name in _VARIABLE.findall(" ".join(words)) if not re.fullmatch(expands or "-", name)]
        for name in names[:1]:
            # A variable that the script does not set is one of a template.
            harms = strict and name in script.values and not re.match(r"--(?:output|error)\b|-[oe]$", words[0])
            label = _LABELS.match("".join(words[:1]))
            yield Fault("directive-variable", line, name, level="" if harms and not label else "warning")
    own = [row for row in script.directives if row[1] and script.lines[row[0] - 1].startswith("#SBATCH")]
    for line, words in own:
        option = words[0].partition("=")[0].lstrip("-") if words[0].startswith("--") else ""
        options = WORDS["sbatch_options"] if re.fullmatch(r"[a-z-]{2,30}", option) else ()
        if options and not any(name.startswith(option) for name in options):
            alike = any(_is_misspelt(option, name) or (len(name) > 2 and name in option) for name in options)
            yield Fault("option-unknown", line, f"--{option}", level="" if alike else "hint")  # or a plugin's
    asked = [(line, words, words[0].partition("=")[0]) for line, words in own]
    for number, (line, words, option) in enumerate(asked):
        if option in _SINGLE and any(row[2] == option and row[1] != words for row in asked[number + 1 :]):
            yield Fault("directive-repeated", line, option)
            break
    last = max((command.line for command in script.commands), default=0)
    for line, words in script.late:  # some keep directives for later at the end
        doubtful = line > last or _LABELS.match(words[0]) is not None
        yield Fault("directive-ignored", line, level="warning" if doubtful else "")


def of_shell(script: ParsedScript) -> Iterator[Fault]:
    """Find missing line continuations, options after the program, and unset variables under set -u."""
    for before, then in pairwise(script.commands):
        option = "".join(then.words[:1]).partition("=")[0]
        begins = _OPTION.fullmatch(option) and script.lines[then.line - 1].lstrip().startswith(option)
        # Behind an operator it is a condition of [[ … ]], before a parenthesis a pattern of `case`.
        if begins and not (then.file or then.started_by) and then.end not in (")", "|") and len(before.end) < 2:
            yield Fault("line-not-continued", then.line, option)
            break
        alone = before.program == "srun" and all(re.match(r"--?[a-z]", word) for word in before.words[1:])
        split = alone and before.end == "\n" and before.words[1:] and TRAINS.fullmatch(then.program)
        if split and not (before.file or before.started_by):
            yield Fault("line-not-continued", then.line, then.program)
            break
        # A setting of Hydra, or the rest of a list of folders: no program has such a name.
        rest = _SETTING.match("".join(then.words[:1])) if not (then.file or then.started_by) else None
        if rest and len(before.end) < 2 and script.lines[then.line - 1].lstrip().startswith(rest[0]):
            yield Fault("line-not-continued", then.line, rest[0])
            break
    for command, then in pairwise(script.commands):
        shell = then.program in _SHELLS or (then.program.startswith("python") and then.words[1:] in ((), ("-",)))
        piped = command.program in _FETCHES and command.end == "|" and shell
        read = then.program in _FETCHES and command.end == "(" and command.program in _SHELLS
        text = command.words[-1] if command.program in _SHELLS and "-c" in command.words else ""
        if piped or read or re.match(r"\$\((?:curl|wget) ", text):
            level: Literal["", "hint"] = "hint" if guarded(script, command.line) else ""
            yield Fault("remote-code", command.line, (then if read else command).program, level=level)
    for launch in script.launches:
        names = WORDS["torchrun_options"] | {name.replace("-", "") for name in WORDS["torchrun_options"]}
        wrong = [name for name in launch.options if not any(option.startswith(name) for option in names)]
        plain = [name for name in wrong if re.fullmatch(r"[a-z][a-z\d.-]*", name) and launch.program == "torchrun"]
        for name in plain[:1]:
            yield Fault("option-misplaced", script.where(name.replace("-", "_"), launch.command.line), f"--{name}")
        late = [word for word in launch.rest[1:] if _TORCHRUNS.fullmatch(word) and word in launch.command.words]
        if late and launch.rest[0].endswith(".py") and launch.program == "torchrun":
            yield Fault("options-late", script.where(late[0], launch.command.line), late[0])
        module = {"no-python", "m", "module"} & launch.options.keys()
        # A variable may hold torchrun in one branch of an `if`, and python in the other.
        own = launch.program == "torchrun" and re.search(r"torchrun|torch\.dist", " ".join(launch.command.words))
        if re.fullmatch(r"python[\d.]*", "".join(launch.rest[:1])) and own and not module:
            yield Fault("python-twice", launch.command.line, launch.rest[0])
    if not option_set(script, NOUNSET):
        return
    known = set()
    for command in script.commands:
        if command.program in ("module", "ml", "source", "."):
            known.add("LD_LIBRARY_PATH")
        if _ACTIVATES.search(" ".join(command.words)) and not command.file:
            yield Fault("unset-variable", command.line, f"a variable of {command.words[-1]}", level="hint")
        for match in () if command.file else _BARE.finditer(" ".join(command.texts)):
            name = match[2]
            if name not in known:
                known.add(name)
                yield Fault("unset-variable", command.line, name, level="" if script.facts else "hint")
        known |= {name.rstrip("+") for name, _ in command.assignments}


def of_lines(script: ParsedScript) -> Iterator[Fault]:
    """Find settings that a script lacks."""
    if (script.kind != "shell" or script.launches) and not option_set(script, ERREXIT):
        yield Fault("error-ignored", 1)
    real = [launch for launch in script.launches if not launch.command.file]
    if real and "OMP_NUM_THREADS" not in script.text:
        yield Fault("threads", real[0].command.line)
    text = "\n".join(line for line in script.lines if not line.startswith("#"))
    requeue = script.facts.requeue if script.facts else frozenset()
    saves = requeue and real and re.search("snapshot|checkpoint|resume", text, re.I)
    options = {word for _, words in script.directives for word in words}
    if saves and options and not options & requeue:
        yield Fault("requeue", script.directives[0][0])


def of_comments(script: ParsedScript) -> Iterator[Fault]:
    """Find commented-out directives whose request nothing else makes."""
    spaced = [(number, match[1]) for number, line in enumerate(script.lines, 1) if (match := _SPACED.match(line))]
    if not script.directives:
        yield from (Fault("directive-comment", *row) for row in spaced[: len(spaced) > 1])
        return
    options = {word.partition("=")[0] for _, words in script.directives for word in words[:1]}
    alone = [row for row in spaced if row[1].partition("=")[0] not in options]
    yield from (Fault("directive-comment", *row, level="hint") for row in alone[:1])
    for number in range(1, script.directives[-1][0] + 8):
        match = _MARKER.match(script.lines[number - 1]) if number <= len(script.lines) else None
        marker = match[1] if match else ""
        if match and marker not in _MARKERS and "".join(sorted(marker)) in _SORTED:
            yield Fault("directive-comment", number, f"#{marker} {match[2]}")
    asked = any(word.startswith(("--gres", "--gpu", "-G")) for _, words in script.directives for word in words)
    asked |= "python" not in script.text
    for number in range(script.directives[0][0], 0 if asked else script.directives[-1][0]):
        if match := _WITHOUT_NAME.match(script.lines[number - 1]):
            yield Fault("directive-comment", number, match[1])


def of_placeholders(script: ParsedScript) -> Iterator[Fault]:
    """Find placeholder names of a guide that the user has not replaced."""
    for line, words in script.directives:
        text = " ".join(words)
        given = [text for option in _NAMED for text in option_values(words, option)]
        gaps = [match[0] for match in (_GAPS.search(f" {text} "), _MAILS.search(text)) if match]
        placeholders = [*gaps, *(word for word in given if _NAMES.fullmatch(word) or _WORDS.search(word))]
        for word in placeholders[:1]:  # {name} is what a program fills in
            filled = re.match(r"\W*\{\{|\{\w+\}", word.strip()) and not given
            level: Literal["", "hint"] = "hint" if filled else ""
            yield Fault("placeholder", line, word.strip(), level=level)
    for number, text in script.code_lines:
        if (match := _GAPS.search(text)) and not _EXAMPLES.search(text):
            level = "hint" if match[0].startswith("{{") else ""
            yield Fault("placeholder", number, match[match.lastindex or 0].strip(), level=level)
    for command in script.commands:
        if command.file or command.program in _PRINTS or command.program in _QUOTES - {"python"}:
            continue
        texts = [text for text in command.texts if not _EXAMPLES.search(text)]
        placeholders = [text for text in texts if len(text) < _LONGEST and (_WORDS.search(text) or _MAILS.search(text))]
        if match := _BARE_WORDS.search(" ".join(texts)):
            placeholders.append(match[0])
        folder = "".join(command.words[1:]) if command.program == "cd" else ""
        if re.fullmatch(r"[A-Z]+(?:_[A-Z]+)+", folder) and _FOLDERS.search(folder):
            placeholders.append(folder)
        for text in placeholders[:1]:
            yield Fault("placeholder", script.where(text, command.line), text)


def of_blocks(script: ParsedScript) -> Iterator[Fault]:
    """Find compound commands and quotes that nothing closes, so that the shell refuses the script."""
    first = "".join(script.lines[:1])
    shell = (script.kind != "shell" or first.startswith("#!")) and not _OTHER_SHELL.match(first)
    for opening, line in script.blocks[-1:] if shell else ():
        yield Fault("syntax-error", line, opening.replace("{", "a brace"))


def of_assignments(script: ParsedScript) -> Iterator[Fault]:
    """Find lines that look like assignments but are not."""
    for command in script.commands:
        line = script.lines[command.line - 1]
        words = command.words[1:] if command.words[:1] in (("export",), ("env",)) else command.words[:1]
        for word in words:
            # export "$NAME"="$VALUE" of a loop over names; declare takes the name of its variable from another one.
            named = f'"{word[:2]}' in line or _DECLARES.search(line) is not None
            if not command.file and not named and _DOLLAR.fullmatch(word.partition("=")[0]) and "=" in word:
                yield Fault("assignment-malformed", command.line, word.partition("=")[0] + "=")
                break
        started = _started(command.words) if command.program == "srun" and not command.file else ""
        if _PREFIX.match(started):
            yield Fault("assignment-malformed", command.line, started.partition("=")[0] + "=")
        name = _HELD.fullmatch(command.words[0]) if command.words and "eval" not in line else None
        held = script.held.get(name[1], ())[-_MOST:] if name else ()
        begins = [text.partition("=")[0] for text in held if _PREFIX.match(text)]
        # In bash -c "$CMD" the other shell takes it for an assignment.
        if begins and not (command.file or command.around):
            level: Literal["", "warning"] = "" if len(begins) == len(held) else "warning"
            yield Fault("assignment-malformed", command.line, f"{begins[0]}=", level=level)
        spaced = command.words[1:2] == ("=",) and re.fullmatch(r"[A-Za-z_]\w*", command.words[0])
        spaced = spaced and re.search(rf"\b{command.words[0]}\s+=\s", line)
        if spaced and not (
            command.file or command.started_by or command.words[0] in ("test", "let", "expr", "alias", "set")
        ):
            yield Fault("assignment-malformed", command.line, f"{command.words[0]} =")


def _started(words: tuple[str, ...]) -> str:
    """Return the program that a launcher starts: the first word that is neither an option nor an option's value."""
    pairs = pairwise(words)
    return next((word for before, word in pairs if word[:1] != "-" and (before[:1] != "-" or "=" in before)), "")


def of_operators(script: ParsedScript) -> Iterator[Fault]:
    """Find shell operators in variables that are run as commands."""
    for command in script.commands:
        names = [
            _HELD.fullmatch(word)
            for word in (*command.words[:1], *(command.words[-1:] if command.program == "srun" else ()))
        ]
        line = script.lines[command.line - 1]
        if command.file or command.around or re.search(r"\beval\b|\b(?:ba)?sh -", line):
            continue
        for name in (match[1] for match in names if match):
            held = script.held.get(name, ())[-_MOST:]
            matches = [match for text in held if (match := _OPERATOR.search(text)) and "$(" not in text]
            if matches and len(matches) == len(held):
                yield Fault("operator-quoted", command.line, matches[0][1])
                return


def of_signals(script: ParsedScript) -> Iterator[Fault]:
    """Find traps for the signal before the time limit that bash runs never or too late."""
    signal = script.directive("--signal")
    waits = any(command.program == "wait" or command.end == "&" for command in script.commands)
    for command in script.commands if script.facts else ():
        names = {word.removeprefix("SIG") for word in command.words[2:]}
        handles = command.words[:1] == ("trap",) and names & _WARNINGS and not _IGNORES.match(command.words[1])
        if not handles or command.file or command.started_by:
            continue
        steps = signal is not None and not re.match(r"R?B", signal[1])
        if steps or not waits:
            yield Fault("signal-late", signal[0] if signal and steps else command.line)
            return


def of_names(script: ParsedScript) -> Iterator[Fault]:
    """Find misspelt or undefined commands, and variables that exist only in another case."""
    if not script.facts:
        return
    defined = {command.function for command in script.commands}
    outside = (_FROM_SITE if option_set(script, NOUNSET) else _FROM_OUTSIDE).match  # -u ends the job
    elsewhere = sets_elsewhere(script)
    mentioned = set(_WORDS_OF_CODE.findall(script.code))
    others = {name.lower() for name in script.values} - script.values.keys() - mentioned
    squeezed = {name.replace("_", "").rstrip("S"): name for name in script.values if name.isupper()}
    commented = set(_COMMENTED.findall(script.text)) - set(script.values)
    commented = {name for name in commented if not (GIVEN.fullmatch(name) or _FROM_OUTSIDE.match(name))}
    seen = set(_LOOPS.findall(script.text))
    for command in script.commands:
        if command.file or command.per_node:
            continue
        name = command.program
        meant = _OFTEN.get("".join(sorted(command.words[0])) if command.words else "", name)
        unknown = meant != name or _UNSEEN.search(name) or (_HELPERS.fullmatch(name) and not elsewhere)
        # Before ) or | it is a pattern of `case`.
        if unknown and name not in defined and name not in seen and command.end not in (")", "|"):
            seen.add(name)
            yield Fault("command-unknown", command.line, name)
        texts = [
            ("", command.words if name not in _QUOTES else ()),
            *command.assignments,
        ]  # LR=$lr takes a parameter of sbatch
        for own, match in ((own, match) for own, row in texts for match in _READ.finditer(" ".join(row))):
            read = match[1] or match[2]
            if not script.where(match[0], 0):  # $NAME\_x or "$NAME""_x": quotes end the name
                continue
            if read in commented and read not in seen and not elsewhere and _in_word(read, command.texts):
                seen.add(read)
                yield Fault("variable-commented", script.where(match[0], command.line), read)
                continue
            similar = squeezed.get(read.replace("_", "").rstrip("S"), read)
            unset = not (elsewhere or read in script.values or read in seen or GIVEN.fullmatch(read))
            other = read.isupper() and read not in (own, similar) and len(read) > 3
            other |= read[-1] == "_" and read.rstrip("_") in script.values  # $START_$END
            if unset and other:
                seen.add(read)
                yield Fault("variable-case", script.where(match[0], command.line), read)
            elif read in others and own.lower() != read and not read.endswith("_proxy"):
                others.remove(read)
                yield Fault("variable-case", script.where(match[0], command.line), read)
            elif (
                unset
                and len(read) > 3 + (read.islower() or read == "WORK")
                and read not in mentioned
                and own != read
                and not outside(read)
            ):
                seen.add(read)
                alike = [name for name in script.values if _is_misspelt(read, name)]
                level: Literal["warning", "hint"] = "warning" if alike and read.islower() else "hint"
                yield Fault("variable-unset", script.where(match[0], command.line), read, level=level)


def _is_misspelt(name: str, other: str) -> bool:
    """Return whether two names differ in one letter, which the shorter name may lack."""
    if len(name) == len(other):
        pairs = [(a, b) for a, b in zip(name, other, strict=True) if a != b]
        return len(pairs) == 1 and "".join(pairs[0]).isalpha()
    short, long = sorted((name, other), key=len)
    return any(short == long[:at] + long[at + 1 :] and long[at].isalpha() for at in range(len(long)))


def _in_word(name: str, texts: tuple[str, ...]) -> bool:
    """Return whether a variable is part of a longer word; a whole word may be empty on purpose."""
    part = rf"[\w:/-]\$\{{?{name}\b|\${name}[:/-]|\$\{{{name}\}}[\w:/-]"
    return re.search(part, " ".join(texts)) is not None


def of_unset(script: ParsedScript) -> Iterator[Fault]:
    """Find variables that are set but not exported."""
    for command in script.commands if script.facts or script.trains else ():
        for name, _ in command.assignments:
            line = script.lines[command.line - 1]
            alone = not command.words and line.lstrip().startswith(f"{name}=") and not line.rstrip().endswith("\\")
            once = alone and _OF_PROGRAMS.fullmatch(name) and len(re.findall(rf"\b{name}\b", script.text)) == 1
            given = name.startswith("MASTER") and script.launches  # torchrun sets them itself
            if once and not (given or command.file or "set -a" in script.text):
                yield Fault("not-exported", command.line, name)
