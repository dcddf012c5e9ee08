"""The rules of `envbuild lint-job` for what a shell does with a script's signals and names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from envbuild.jobcheck.lint.addresses import GIVEN, sets_elsewhere
from envbuild.jobcheck.lint.script import Found, ParsedScript

_WARNINGS = frozenset(["USR1", "USR2", "10", "12"])
_LOOPS = re.compile(r"\b(?:for|select|(?:read|mapfile|readarray)(?: -\w{1,9}){0,3}|getopts \S{1,99}) (\w+)")
_COMMENTED = re.compile(r"^[ \t]*#+[ \t]*(?:export[ \t]+)?([A-Z][A-Z0-9_]{3,})=", re.MULTILINE)
# What users' environments, modules and activated environments set.
_FROM_OUTSIDE = re.compile(
    r"CUDA|CONDA|NCCL|OMP|MPI|LD_|PATH$|.*(?:PATH|HOME|ROOT|DIR|SCRATCH|TMP|KEY|TOKEN)$|ROCR|HIP"
)
_IGNORES = re.compile(r"(?:-|:|true)?$|echo\b[^;&|]*$")
_OFTEN = {
    "".join(sorted(name)): name
    for name in (
        "source",
        "export",
        "module",
        "srun",
        "torchrun",
        "mpirun",
        "conda",
        "python",
        "mkdir",
        "accelerate",
        "unset",
    )
}
_UNSEEN = re.compile("[\u00a0\u200b-\u200d\u2060\ufeff]")
_HELPERS = re.compile(r"die|usage|(?:show|print)_(?:help|usage)|error_exit|fatal")
# Variables that are read. Those in upper case may come from the environment: they are compared only with names that
# differ in underscores.
_READ = re.compile(r"(?<!\\)\$(?:([a-z][a-z0-9_]*|[A-Z][A-Z0-9_]*)\b|\{([a-z][a-z0-9_]*|[A-Z][A-Z0-9_]*)\})")
_TOLD = re.compile(r"(?<![\w${\\-])[a-z][a-z0-9_]*")
_QUOTES = frozenset(["awk", "sed", "perl", "jq", "bash", "sh", "csh", "envsubst", "xargs", "find", "trap", "python"])


def of_signals(script: ParsedScript) -> Iterator[Found]:
    """Find traps for the warning before the time limit that bash never or too late runs."""
    signal = script.directive("--signal")
    waits = any(one.program == "wait" or one.end == "&" for one in script.commands)
    for one in script.commands if script.facts else ():
        names = {word.removeprefix("SIG") for word in one.words[2:]}
        handles = one.words[:1] == ("trap",) and names & _WARNINGS and not _IGNORES.match(one.words[1])
        if not handles or one.file or one.started_by:
            continue
        steps = signal is not None and not re.match(r"R?B", signal[1])
        if steps or not waits:
            yield Found("signal-late", signal[0] if signal and steps else one.line)
            return


def of_names(script: ParsedScript) -> Iterator[Found]:
    """Find commands that are misspelt or that nothing defines, and variables that only exist in other letters."""
    if not script.facts:
        return
    defined = {one.function for one in script.commands}
    elsewhere = sets_elsewhere(script)
    told = set(_TOLD.findall("\n".join(line for line in script.lines if not line.lstrip().startswith("#"))))
    others = {name.lower() for name in script.values} - script.values.keys() - told
    squeezed = {name.replace("_", "").rstrip("S"): name for name in script.values if name.isupper()}
    commented = set(_COMMENTED.findall(script.text)) - set(script.values)
    commented = {name for name in commented if not (GIVEN.fullmatch(name) or _FROM_OUTSIDE.match(name))}
    seen = set(_LOOPS.findall(script.text))
    for one in script.commands:
        if one.file or one.per_node:
            continue
        name = one.program
        meant = _OFTEN.get("".join(sorted(one.words[0])) if one.words else "", name)
        unknown = meant != name or _UNSEEN.search(name) or (_HELPERS.fullmatch(name) and not elsewhere)
        if unknown and name not in defined and name not in seen and one.end not in (")", "|"):  # a pattern of `case`
            seen.add(name)
            yield Found("command-unknown", one.line, name)
        texts = [("", one.words if name not in _QUOTES else ()), *one.assignments]  # LR=$lr takes a parameter of sbatch
        for own, match in ((own, match) for own, row in texts for match in _READ.finditer(" ".join(row))):
            read = match[1] or match[2]
            if not script.where(match[0], 0):  # $NAME\_x or "$NAME""_x": quotes end the name
                continue
            if read in commented and read not in seen and not elsewhere and _in_word(read, one.texts):
                seen.add(read)
                yield Found("variable-commented", script.where(match[0], one.line), read)
                continue
            similar = squeezed.get(read.replace("_", "").rstrip("S"), read)
            unset = not (elsewhere or read in script.values or read in seen or GIVEN.fullmatch(read))
            if unset and read.isupper() and read not in (own, similar) and len(read) > 3:
                seen.add(read)
                yield Found("variable-case", script.where(match[0], one.line), read)
            elif read in others and own.lower() != read and not read.endswith("_proxy"):
                others.remove(read)
                yield Found("variable-case", script.where(match[0], one.line), read)


def _in_word(name: str, texts: tuple[str, ...]) -> bool:
    """Return whether a variable is a part of a word: a word of its own may be meant to be empty."""
    part = rf"[\w:/-]\$\{{?{name}\b|\${name}[:/-]|\$\{{{name}\}}[\w:/-]"
    return re.search(part, " ".join(texts)) is not None
