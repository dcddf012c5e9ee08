"""Launches in a script: torchrun and other commands that start training."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from envbuild.jobcheck.lint.directives import option_values, whole_number
from envbuild.jobcheck.lint.shell import LAUNCHERS, WORDS, Command, Variables, starters

STARTS = re.compile("|".join(sorted(WORDS["programs"])))
TRAINS = re.compile(r"(?:python[\d.]*|torchrun|accelerate|deepspeed|horovodrun)")
_IN_SHELL = re.compile(
    r"\b(?:python|torchrun|accelerate|deepspeed)|\.(?:py|sh)\b|^\$|\$\{?\w{0,40}(?:CMD|LAUNCH|RUN|SCRIPT)"
)
# Options for the number of ranks that accelerate and deepspeed start.
RANK_OPTIONS = ("--num_processes", "--num-processes", "--num_gpus")
# Programs of steps before the training.
ASKS = WORDS["asks"]
PREPARES = re.compile(r"(?:copy|set_?up|install|download|stage|clean|extract|config|create|prepare)[\w.-]{0,60}\.sh")
# Options of `accelerate launch`, by torchrun's names. Its --num-processes counts those of all nodes.
_ACCELERATE = {
    "num-machines": "nnodes",
    "machine-rank": "node-rank",
    "main-process-ip": "master-addr",
    "main-process-port": "master-port",
}
_ACCELERATE_NODES = {"nnodes", "node-rank", "master-addr", "rdzv-backend"}
_RUNNERS = frozenset(["uv", "poetry", "pixi", "pipenv"])
_TORCHRUN = re.compile(r"torch\.distributed\.(?:run|launch)")


@dataclass(frozen=True, slots=True)
class Launch:
    """Command `torchrun`, or `accelerate launch` with torchrun's names of options.

    `options` are its own, without leading dashes and with `_` as `-`. `around` are the words before it, in its
    command and in enclosing commands; `started_by` are the enclosing launchers and containers. `rest` are the
    script and its arguments.
    """

    command: Command
    options: Mapping[str, str]
    around: tuple[str, ...]
    started_by: tuple[str, ...]
    rest: tuple[str, ...] = ()
    program: str = "torchrun"

    @property
    def launcher(self) -> str:
        """Launcher that starts it on nodes, "" for none."""
        return next((name for name in self.started_by if name in LAUNCHERS), "")

    @property
    def waits(self) -> bool:
        """Whether it waits for torchruns on other nodes, according to the script."""
        fewest = self.options.get("nnodes", "1").partition(":")[0]
        number = whole_number(fewest)
        return "standalone" not in self.options and (number is None or number > 1)

    @property
    def ranks(self) -> int:
        """Number of ranks that it starts on a node, from a number or the default of a variable, 0 if unknown."""
        return whole_number(re.sub(r"^\$\{(?!SLURM|PBS)\w+:?-|\}$", "", self.options.get("nproc-per-node", ""))) or 0

    @property
    def complete(self) -> bool:
        """Whether all its options are known: no variable from another file or the user may contain options."""
        program = "".join(self.rest[:1])
        return program != " " and (not program.startswith("$") or program.endswith(".py"))

    def option(self, *names: str) -> str:
        """Return the value of the launcher's option with one of these names, "" for none."""
        begin = [posixpath.basename(word) for word in self.around]
        words = [*self.around[begin.index(self.launcher) :]] if self.launcher in begin else []
        return next(option_values(before_program(words), names), "")


def find_launches(commands: Sequence[Command], variables: Variables, given: Mapping[str, str]) -> Iterator[Launch]:
    """Yield every torchrun of `commands`; `given` are options that variables of the script set."""
    for command in commands:
        words = variables.expanded(command.words)
        # Inside a string for another shell, it is parsed as a separate command.
        at = next((n for n, word in enumerate(words) if _is_torchrun(words, n)), None)
        if at is None and (at := _accelerate(words)) is not None:
            around = (*variables.expanded(command.around), *words[:at])
            read, rest = _options(words[at + 2 :])
            options = {_ACCELERATE.get(name, name): value for name, value in read.items()}
            # Its own default is the configuration of the user who started it.
            if options.keys() & _ACCELERATE_NODES:
                yield Launch(command, options, around, starters(command, around), rest, "accelerate launch")
            continue
        if at is None or words[0] in ("echo", "printf", "which", "-v", "type", "pkill", "cd"):
            continue
        around = (*variables.expanded(command.around), *words[:at])
        by = starters(command, around)
        options, rest = _options(words[at + 1 :])
        program = "tune run" if words[at] == "run" else "torchrun"
        yield Launch(command, {**given, **options}, around, by, rest, program)


def _is_torchrun(words: list[str], at: int) -> bool:
    word = words[at]
    if words[at - 1 : at + 1] == ["tune", "run"]:  # torchtune's
        return True
    if _TORCHRUN.fullmatch(word):
        return at > 0 and words[at - 1] == "-m"
    return posixpath.basename(word) == "torchrun" and "=" not in word


def _accelerate(words: list[str]) -> int | None:
    pairs = enumerate(pairwise(words))
    return next((n for n, (word, verb) in pairs if posixpath.basename(word) == "accelerate" and verb == "launch"), None)


def _options(words: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return torchrun's options before the training script, and the words from the script on."""
    options: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        name, equal, value = words[at].lstrip("-").partition("=")
        name = name.replace("_", "-")
        at += 1
        if name in WORDS["flags"]:
            options[name] = "yes"
            continue
        if not equal and at < len(words):
            value = words[at]
            at += 1
        options[name] = value
    return options, tuple(words[at:])


def before_program(words: list[str]) -> list[str]:
    """Return the words of a launcher up to the program that it starts."""
    return [*words[:1], *takewhile(lambda word: not STARTS.fullmatch(posixpath.basename(word)), words[1:])]


def starts_training(command: Command) -> bool:
    """Return whether a command looks like the training and not like a step before or after it."""
    name = command.program
    if name.startswith("$") and re.search("torchrun|launcher", name, re.IGNORECASE):
        return True
    if name in LAUNCHERS or name in ("apptainer", "singularity", "docker"):
        tunnel = name == "ssh" and re.search(r" -\w*N", " ".join(command.words))
        asks = [*before_program([*command.words]), command.words[-1]]
        if (
            tunnel
            or ASKS.intersection(map(posixpath.basename, asks))
            or re.search(r"\b(?:pip3?|conda) install\b", " ".join(command.words))
        ):
            return False
        texts = [text for flag, text in pairwise(command.words) if re.fullmatch(r"-\w*c", flag) and " " in text]
        if texts:
            return any(_IN_SHELL.search(text) for text in texts)
        names = [posixpath.basename(word) for word in command.words[1:]]
        if sum(name.endswith((".sh", ".py")) for name in names) == 1 and any(map(PREPARES.fullmatch, names)):
            return False
        return any(
            STARTS.fullmatch(name) or word.startswith("$") for name, word in zip(names, command.words[1:], strict=True)
        )
    prepares = command.words[1:2] == ("-m",) and "".join(command.words[2:3]) in WORDS["modules"]
    return bool(TRAINS.fullmatch(name)) and len(command.words) > 1 and "-c" not in command.words[1:2] and not prepares


def is_inside(command: Command) -> bool:
    """Return whether a command is not directly in the script, in its foreground."""
    return bool(command.started_by or command.function or command.file or command.captured or command.background)


def is_program(command: Command, others: re.Pattern[str]) -> bool:
    """Return whether a command directly in the script is a Python program of any name, except the `others`."""
    words = command.words[2:] if command.words[1:2] == ("run",) and command.program in _RUNNERS else command.words
    own = re.fullmatch(r"python[\d.]*", posixpath.basename("".join(words[:1]))) or words != command.words
    python = own and any(word.endswith(".py") for word in words[:4])
    return bool(python) and not is_inside(command) and not others.search(" ".join(words[:4]))


def is_plain_training(command: Command) -> bool:
    """Return whether the command is a training by one Python process."""
    words = command.words[1:]
    at = next((number for number, word in enumerate(words) if not word.startswith("-")), len(words))
    script = "".join(words[at : at + 1])
    mode = [word for word in words[at + 1 : at + 2] if word.isalpha()]
    text = " ".join((posixpath.basename(script), *mode))
    trains = re.search(r"train|finetun|fine_tun|main|pretrain|sft|ddp|_[cm]lm\b", text) is not None
    return (
        bool(re.fullmatch(r"python[\d.]*", command.program))
        and trains
        and (words[:1] == ("-m",) or script.endswith(".py"))
    )
