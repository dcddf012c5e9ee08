"""Rules of `envbuild lint-job` for a job's exit code."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Literal

from envbuild.jobcheck.lint.launch import ASKS, is_inside, is_plain_training, is_program, starts_training
from envbuild.jobcheck.lint.script import ERREXIT, PIPEFAIL, Fault, ParsedScript, option_set
from envbuild.jobcheck.lint.shell import LAUNCHERS, SUBMITS, WORDS, Command

# A server's jobs end with their time; jswait has the exit code of what it waits for.
_ENDS_WITH = re.compile(r"jswait\b|sleep (?:\d{4,}|\d+[hd]|inf)")
_ON_EXIT = frozenset(["EXIT", "ERR", "0"])
_MESSAGES = frozenset(["echo", "printf", "date", "hostname"])
_FAILED = re.compile("|".join(sorted(WORDS["error_messages"])), re.IGNORECASE)
_FIRST_STEPS = re.compile("|".join(sorted(WORDS["first_steps"])), re.IGNORECASE)
_LOOP = re.compile(r"\s*for\b(?! \w+ in [\w.'\"-]+ *(?:;|$))")  # of more than one run
_RUNS = re.compile(r"\btorchrun\b|-m torch\.distributed\.(?:run|launch)\b|^(?:accelerate launch|deepspeed) ")
_STARTS_RANKS = re.compile(
    r"\b(?:torchrun|torch\.distributed\.\w+|deepspeed|accelerate launch|srun|mpirun|mpiexec|jsrun) "
)
_ASKED = re.compile(r"^\s*(?:if|elif|while|until|for|case)\b|\$\?|PIPESTATUS")
_BRANCH = re.compile(r"^\s*(?:else|elif|esac|;;)|\$\?|\|\||PIPESTATUS", re.MULTILINE)
_OPTION = re.compile(r"-|\W?$|[A-Za-z_]\w*=|wandb (?:offline|online|login|sync|off|on)\b")
_OPTIONS = re.compile(r"(\.(?:py|sh)\b(?: [a-z]\w*)?) .*", re.DOTALL)  # behind a program and its command
_SCRIPT = re.compile(r"(?:(?:ba)?sh )?[\w./${}-]{1,200}\.sh(?: |$)")
# The exit code of the training is asked for, and only a message follows a bad one.
_COMPARED = re.compile(
    r"^\s*(?:if|elif)? ?\[{1,2} \"?\$(?:\?|\{?(?i:\w*(?:exit|status|code|ret|rc)\w*)\}?)\"? *(?:-eq|-ne|==|=|!=) ",
    re.MULTILINE,
)
_LEAVES = re.compile(
    r"\b(?:exit|return) (?!0\b)\S|\b(?:exit|return)\s*$|kill|scontrol requeue|\bfalse\b|wait", re.MULTILINE
)
_TEED = re.compile(r"\b(?:python[\d.]*|torchrun|deepspeed|accelerate) [^|]{1,4000}\|&? *tee\b[^|;&]*$")
_CHECKS = re.compile(r"\$\?|\|\||&&|\b(?:exit|break|wait|trap|PIPESTATUS)\b|&$", re.MULTILINE)


def of_status(script: ParsedScript) -> Iterator[Fault]:
    """Find scripts whose exit code is not the training's, and scripts that end before the training."""
    yield from (
        list(_outer_status(script))
        or list(_inner_status(script))
        or list(_loop_status(script))
        or list(_first_of_two(script))
        or list(_last_step(script))
        or _printed_status(script)
    )


def _printed_status(script: ParsedScript) -> Iterator[Fault]:
    """Find scripts that check an exit code only to print a message."""
    asked = _COMPARED.search(script.code) if script.facts and not script.submits else None
    conda = "__conda_setup" in script.code  # of `conda init`
    if asked and not (conda or _LEAVES.search(script.code) or option_set(script, ERREXIT)):
        yield Fault("status-lost", script.where(asked[0].strip()), "the message behind it", level="hint")


def _outer_status(script: ParsedScript) -> Iterator[Fault]:
    stops, pipes = option_set(script, ERREXIT), option_set(script, PIPEFAIL)
    top = _here(script)
    at = max((n for n, command in enumerate(top) if starts_training(command) or _kept(script, command)), default=-1)
    if at < 0 or (script.kind == "shell" and not (script.launches or script.everywhere)):
        return
    others = [command for command in top[:at] if command.background and command.words[:2] == top[at].words[:2]]
    if script.facts and others and not top[at].background and not re.search("wait|xargs|parallel", script.text):
        yield Fault("ends-early", others[0].line, level="warning")
        return
    for echo, then in pairwise(top[:at]):
        if echo.program == "echo" and _FAILED.search(" ".join(echo.words)) and then.words in (("exit",), ("exit", "0")):
            level: Literal["", "hint"] = "" if then.words[1:] else "hint"
            yield Fault("status-lost", then.line, "exit 0 after an error", level=level)
            return
    end = top[at].line
    while end < len(script.lines) and script.lines[end - 1].endswith("\\"):
        end += 1
    after = [command for command in top[at + 1 :] if command.words and command.line > end]
    # Commands after an exit outside of conditions never run.
    exits = (n for n, command in enumerate(after, 1) if re.fullmatch(r"exit\s*", script.lines[command.line - 1]))
    after = after[: next(exits, len(after))]
    quiet = all(command.program in _MESSAGES or command.program in ("conda", "deactivate", "exit") for command in after)
    piped_group = re.search(r"\}\s*\|", "\n".join(script.lines[top[at].line - 1 :]))  # its reader waits
    if script.kind != "shell" and top[at].background and quiet and not piped_group and "wait" not in script.text:
        yield Fault("ends-early", top[at].line)
        return
    if script.facts and top[at].background and "wait" not in script.text and not piped_group:
        yield Fault("status-lost", top[at].line, "the last command, and no wait asks for that", level="hint")
        return
    fails = any(
        command.program in ("exit", "return") and (command.words[1:2] or ("0",)) != ("0",) for command in top[at + 1 :]
    )
    waits = [command for command in after if command.program == "wait"]
    if (fails or stops) and top[at].background and waits and not any(command.words[1:] for command in waits):
        yield Fault("status-lost", waits[0].line, "wait, which is 0")
        return
    while after and after[-1].words == ("exit",):
        after.pop()
    then = top[at + 1] if at + 1 < len(top) else top[at]
    hidden = top[at].end == "||" and then.program in (_MESSAGES | {"true", ":"})
    both = [command.program in _MESSAGES for command in top[at + 1 : at + 3]] == [True, True]  # && echo … || echo …
    hidden = hidden or (both and (top[at].end, then.end) == ("&&", "||"))
    piped = then if hidden or (top[at].end in ("|", "|&") and not pipes) else None
    ends = [command for command in after if command.line == after[-1].line and not stops]
    last = piped or (ends[0] if ends else None)
    if last is not None and last.program == "wait" and last.words[1:] and not stops:
        rest = "\n".join(script.lines[last.line - 1 :])
        if re.match(r"\s*wait [^|&;\n]+(?:;\s*|\n\s*)done\s*(?:#.*)?\s*\Z", rest):
            yield Fault("status-lost", last.line, "the last of several wait")
        return
    if (
        last is None
        or (last.program in SUBMITS and script.texts)
        or (last.program == "wait" and last.words[1:])
        or _ENDS_WITH.match(" ".join(last.words))
    ):
        return
    if "=" in last.program or last.program.startswith("-"):  # an option that is not continued
        return
    asked = any("PIPESTATUS" in line or "$?" in line for line in script.lines[end - 1 :])
    trapped = any(
        _ON_EXIT & set(command.words[2:]) and _tells(script, command.words[1])
        for command in top
        if command.program == "trap"
    )
    if not (fails and (asked or not piped)) and not trapped:
        reported = script.kind == "shell" and not (piped or script.everywhere) and last.program in _MESSAGES
        yield Fault("status-lost", last.line, last.program, level="hint" if reported else "")


def _here(script: ParsedScript) -> list[Command]:
    """Return the commands of the script's own shell, outside of functions."""
    return [
        command
        for command in script.commands
        if not (command.started_by or command.function or command.file or command.per_node or command.captured)
    ]


def _last_step(script: ParsedScript) -> Iterator[Fault]:
    """Find programs of any name, the last ones of a script, whose exit code a message or a pipe hides."""
    rows = [command for command in _here(script) if command.words and not _ASKED.search(script.lines[command.line - 1])]
    exits = (n for n, command in enumerate(rows, 1) if re.match(r"exit\b", script.lines[command.line - 1]))
    rows = rows[: next(exits, len(rows))]
    by_hand = script.kind == "shell" and not (script.launches or any(map(is_plain_training, rows)))
    if by_hand or option_set(script, ERREXIT) or script.submits or any(command.program == "trap" for command in rows):
        return
    defined: dict[str, list[Command]] = {}
    for command in script.commands:
        if command.function and command.words and not command.captured:
            defined.setdefault(command.function, []).append(command)
    works = [n for n, command in enumerate(rows) if any(map(_is_work, defined.get(command.program, [command])))]
    if not works:
        return
    step, after = rows[works[-1]], rows[works[-1] + 1 :]
    inside = [command for command in defined.get(step.program, []) if not _ASKED.search(script.lines[command.line - 1])]
    behind = [command for n, command in enumerate(inside) if any(map(_is_work, inside[:n]))]
    tail = after or (behind if behind and not _is_work(behind[-1]) else [])
    between = "\n".join(script.lines[(step if after else inside[0]).line - 1 : tail[-1].line]) if tail else ""
    ends = [command for command in tail if command.program in ("exit", "return")]
    kept = bool(_BRANCH.search(between)) or any(end.words[1:2] not in ((), ("0",)) or len(tail) == 1 for end in ends)
    batch: Literal["", "hint"] = "" if script.facts and (script.gpus or script.trains) and after else "hint"
    kept |= step.background or step.end in ("&&", "||") or (step.end in ("|", "|&") and option_set(script, PIPEFAIL))
    kept |= bool(tail) and (tail[-1].program.startswith("-") or _ENDS_WITH.match(" ".join(tail[-1].words)) is not None)
    if tail and not kept:
        yield Fault("status-lost", tail[-1].line, tail[-1].program, level=batch)


def _is_work(command: Command) -> bool:
    """Return whether a command may be what the job is for."""
    text = " ".join(command.words)
    known = command.program in WORDS["helpers"] | ASKS | _MESSAGES or command.words[1:2] in (("-c",), ("--version",))
    known &= command.words[:2] != ("conda", "run") and command.words[0] != "jupyter"
    known |= _OPTION.match(text) is not None or _FIRST_STEPS.search(command.program) is not None
    runs = (
        command.program == "eval" and len(command.words) == 2 and command.words[1].startswith("$") and "$(" not in text
    )
    return runs or not known


def _tells(script: ParsedScript, handler: str) -> bool:
    """Return whether a trap handler may end the script with another exit code."""
    own = [command for command in script.commands if command.function and command.function in handler.split()]
    body = " ".join(" ".join(command.words) for command in own)
    return re.search(r"\bexit\b|\$\?", f"{handler} {body}") is not None


def _kept(script: ParsedScript, command: Command) -> bool:
    """Return whether a command starts ranks through a variable or a wrapper script."""
    if "".join(command.words[:1]).startswith("$"):
        return bool(_STARTS_RANKS.search(" ".join(script.variables.expanded(command.words))))
    # A wrapper that gets a launcher and what that starts.
    return command.program.endswith(".sh") and any(
        posixpath.basename(word) in LAUNCHERS for word in command.words[1:-1]
    )


def _inner_status(script: ParsedScript) -> Iterator[Fault]:
    """Find trainings in `bash -c "…"` whose exit code the inner shell loses."""
    for command in script.commands:
        for before, word in pairwise(command.words if not (command.file or command.function) else ()):
            text = " ".join(script.variables.expanded([word]))
            shell = re.fullmatch(r"-\w*c", before) or re.match(r"\s*(?:python|torchrun)", word)
            if shell and _TEED.search(text) and "pipefail" not in f"{text}{command.around}{command.words}":
                yield Fault("status-lost", command.line, "tee")
                return
    inner = [command for command in script.commands if command.around and not (command.file or command.function)]
    for around, group in groupby(inner, key=lambda command: command.around):
        row = list(group)
        at = max((number for number, command in enumerate(row) if starts_training(command)), default=-1)
        first = next((command for command in row[: max(at, 0)] if is_plain_training(command)), None)
        after = row[at + 1 :]
        options = [word for command in row if command.program == "set" for word in command.words[1:]]
        stops = any(re.match(r"-[a-z]*e|errexit", word) for word in options) or "-ec" in around
        pipes = "pipefail" in (*options, *around)
        if first is not None and first.end in (";", "\n") and not stops and not _CHECKS.search(" ".join(around)):
            yield Fault("status-lost", first.line, "the run behind it")
            return
        # The commands of $(…) in the training's own words follow it in the list.
        if at < 0 or not after or "$(" in " ".join(row[at].words):
            continue
        reported = not stops and row[at].end in (";", "\n") and all(command.program in _MESSAGES for command in after)
        if (row[at].end in ("|", "|&") and not pipes) or reported:
            last = after[-1] if reported else after[0]
            whole_text = " ".join(last.words)
            text = whole_text if script.where(whole_text, 0) else last.words[-1]  # its quotes can be lost
            yield Fault("status-lost", script.where(text, row[at].line), last.program)
            return


def _loop_status(script: ParsedScript) -> Iterator[Fault]:
    """Find loops that continue after a failed training, in scripts that do not check its exit code."""
    steps = [
        command for command in script.commands if not (command.file or command.function) and _in_loop(script, command)
    ]
    if not steps or steps[-1].background or option_set(script, ERREXIT):
        return
    line = steps[-1].line
    loops = [number for number, text in enumerate(script.lines[:line], 1) if _LOOP.match(text)]
    before, rest = "\n".join(script.lines[(loops or [line])[-1] : line - 1]), "\n".join(script.lines[line - 1 :])
    inside = re.search(r"\bdone\b", before) is None and re.search(r"^\s*done\b", rest, re.MULTILINE) is not None
    if loops and inside and not _CHECKS.search(f"{before}\n{rest}"):
        yield Fault("status-lost", line, "the loop's last run", level="hint" if script.kind == "shell" else "")


def _in_loop(script: ParsedScript, command: Command) -> bool:
    words = script.variables.expanded(command.words)
    plain = bool(words) and is_plain_training(replace(command, words=tuple(" ".join(words).split())))
    return plain or (command.program in LAUNCHERS | {"singularity", "apptainer"} and starts_training(command))


def _first_of_two(script: ParsedScript) -> Iterator[Fault]:
    """Find runs whose exit code is lost, because another run follows them."""
    runs = [command for command in script.commands if _is_run(script, command)]
    piped = [command for command in runs if command.end in ("|", "|&") and not option_set(script, PIPEFAIL)]
    by_hand: Literal["", "hint"] = "hint" if script.kind == "shell" else ""
    if piped and not _CHECKS.search("\n".join(script.lines[piped[0].line : piped[0].line + 3])):
        yield Fault("status-lost", piped[0].line, "the program behind the pipe", level=by_hand)
        return
    if option_set(script, ERREXIT):
        return
    programs = [step for step in script.commands if step in runs or is_program(step, _FIRST_STEPS) or _is_script(step)]
    for step, then in pairwise(programs):
        between = "\n".join(script.lines[step.line - 1 : then.line])
        parted = re.search(r"^\s*(?:else|elif|fi|esac|done|;;|\))", between, re.MULTILINE) or _CHECKS.search(between)
        if step.end in ("\n", ";") and not parted:
            level = by_hand if step in runs else "hint"
            yield Fault("status-lost", step.line, f"the run in line {then.line}", level=level)
            return


def _is_script(command: Command) -> bool:
    """Return whether a command directly in the script runs another script that may be a training."""
    text = " ".join(command.words)
    return bool(_SCRIPT.match(text)) and not (is_inside(command) or _FIRST_STEPS.search(text))


def _is_run(script: ParsedScript, command: Command) -> bool:
    if command.started_by or command.function or command.file or command.per_node or command.background:
        return False
    text = " ".join(script.variables.expanded(command.words))
    known = posixpath.basename(text.partition(" ")[0]) in LAUNCHERS - {"ssh", "kubectl", "parallel"}
    known |= _RUNS.search(text) is not None or is_plain_training(command)
    names = {posixpath.basename(word) for word in command.words}
    return (
        known
        and " " in text
        and command.program != "which"
        and not (names & ASKS or _FIRST_STEPS.search(_OPTIONS.sub(r"\1", text)))
    )
