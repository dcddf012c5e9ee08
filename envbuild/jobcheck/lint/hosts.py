"""Rules of `envbuild lint-job` for other hosts: names of hosts in a script, and the environment on these hosts."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from itertools import pairwise

from envbuild.jobcheck.lint.directives import option_values
from envbuild.jobcheck.lint.launch import before_program, starts_training
from envbuild.jobcheck.lint.script import Found, ParsedScript
from envbuild.jobcheck.lint.shell import LAUNCHERS, Command

_MOST = 50  # names that are looked for
_COPIES = frozenset(["cp", "rsync", "tar", "unzip", "rclone", "sbcast", "mpicopy"])
_MEANT = re.compile(r"MASTER_(?:ADDR|PORT)$|WORLD_SIZE$|NCCL_|PYTHONPATH$")
_OF_NODE = re.compile(
    r"\$\{?(?:SLURM_TMPDIR|TMPDIR|PBS_JOBFS|LOCAL_SCRATCH|LOCALSCRATCH)\}?|/(?:tmp|dev/shm|mnt/bb)(?:/[\w.$-]+)?"
)
# Launchers that start programs in a login's environment, and what a command does to set up its own.
_FRESH = frozenset(["pbsdsh", "ssh", "pdsh", "clush"])
_SETS_UP = re.compile(r"\b(?:export|source|module|env|activate|bashrc|profile)\b|(?:^| )-l\w*c\b|(?:^|[;&] ?)\. ")
_STARTS = re.compile(r"\b(?:python[\d.]*|torchrun|deepspeed|accelerate)\b|\.py\b")
_STARTS_FILE = re.compile(r"\bpython|torchrun|\.(?:sh|py)\b")
_OWN_PROGRAM = re.compile(r"[/}]bin/(?:python[\d.]*|torchrun|deepspeed|accelerate)\b")
_HOSTS_FILE = re.compile(r"(?:[\w.~-]+/|/)*[\w.-]+")
_HOST = r"[A-Za-z][\w.-]*(?:\[[\d,-]+\])?(?::\d+)?"
_HOSTS = re.compile(rf"(?!localhost|127\.){_HOST}(?:,{_HOST})*")
_ADDRESSES = re.compile(r"(?!127\.)\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?:,\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?)*")
_FILE_OPTIONS = ("--hostfile", "-hostfile", "-machinefile", "--machinefile", "--default-hostfile")
_HOST_OPTIONS = ("-H", "--host", "-host", "--hosts", "-hosts")
_STARTS_RANKS = frozenset(["mpirun", "mpiexec", "mpiexec.hydra", "orterun", "horovodrun", "deepspeed", "prun"])
# Values that only exist in the job: on the host that submits it, they are empty or those of that host.
_OF_JOB = re.compile(
    r"(?<![\\\w])(?:\$\{?(?:SLURM_(?!JOB_NAME)\w+|SLURMD_NODENAME|PBS_(?!O_)\w+|LSB_\w+)"
    r"|\$\((?:hostname|scontrol show hostnames?)\b)"
)
_ENDPOINT = re.compile(r"MASTER|HEAD|RDZV|_ADDR|_HOST\b|master[-_]addr|rdzv|_ip\b", re.IGNORECASE)
_OF_DOCKER = frozenset(["docker", "nvidia-docker"])


def of_other_nodes(script: ParsedScript) -> Iterator[Found]:
    """Find environments and copied data that the script prepares only on the head, so that other nodes lack them."""
    here = [command for command in script.commands if not (command.started_by or command.file or command.function)]
    yield from _environment(here) if script.facts else ()
    everywhere = any(
        command.program in (*LAUNCHERS, "sbcast", "mpicopy") and _COPIES & {*command.words} for command in here
    )
    if not script.several or script.kind == "shell" or everywhere:
        return
    later = " ".join(word for command in script.commands if starts_training(command) for word in command.words)
    later = " ".join(script.variables.expanded(later.split()))
    for command in here:
        target = next((word for word in reversed(command.words[1:]) if not word.startswith("-")), "")
        target = " ".join(script.variables.expanded([target]))
        folder = _OF_NODE.match(target)
        if command.program in _COPIES and folder and folder[0].rstrip("/") in later:
            yield Found("head-copy", command.line, folder[0])
            return


def _environment(here: list[Command]) -> Iterator[Found]:
    """Find programs started by ssh and similar tools without the variables that the script sets for them."""
    set_up: list[str] = []
    for command in here:
        set_up += [name for name, _ in command.assignments if _MEANT.match(name)]
        activates = command.program in ("source", ".") and command.words[-1].endswith("bin/activate")
        activates |= command.program == "source" and command.words[1:2] in (("activate",),)
        if activates or command.words[:2] in (("module", "load"), ("conda", "activate")):
            set_up.append(" ".join(command.words[:3]))
        set_up = list(dict.fromkeys(set_up))[-_MOST:]
        inside = " ".join(command.words[1:])
        if command.program not in _FRESH or not set_up or _SETS_UP.search(inside):
            continue
        own = any(name in inside for name in set_up)
        # A script may set up its environment itself.
        starts = (_STARTS_FILE if command.program == "pbsdsh" else _STARTS).search(inside)
        if starts and not (own or _OWN_PROGRAM.search(inside)):
            yield Found("environment-lost", command.line, f"{command.program} does not pass on {set_up[-1]}")
            return


def of_mpi_environment(script: ParsedScript) -> Iterator[Found]:
    """Find variables set for mpirun alone, which Open MPI does not pass to other hosts."""
    for command in script.commands:
        text = " ".join(command.words)
        names = [name for name, _ in command.assignments if not name.startswith(("OMPI_", "PMIX_", "PRTE_"))]
        hosts = re.search(r"--?(?:hostfile|machinefile|host)\b", text)
        open_mpi = "OMPI_" in script.text or re.search(r"--?(?:map-by|bind-to|mca)\b", text)
        if command.program in ("mpirun", "orterun") and names and hosts and open_mpi and " -x " not in text:
            yield Found("mpi-environment", command.line, names[0])


def of_remote_shells(script: ParsedScript) -> Iterator[Found]:
    """Find ssh to a node without a command."""
    for command in script.commands if script.directives else ():
        words = [word for word in command.words[1:] if not re.match(r"-[AaCfGgKkMNnqsTtVvXxYy]+$", word)]
        line = script.lines[command.line - 1]
        alone = command.program == "ssh" and not command.file and len(words) == 1 and words[0].startswith("$")
        if alone and not re.search(r"<|\||\\$", line):
            yield Found("ssh-alone", command.line, words[0])


def of_fixed_hosts(script: ParsedScript) -> Iterator[Found]:
    """Find fixed host names in a batch job, which may differ from the hosts that the scheduler allocates."""
    if not script.facts or script.writes:
        return
    words = [word for _, row in script.directives for word in row]
    pinned = script.directive("--nodelist", "-w", "-m") or any("host=" in word or "@" in word for word in words)
    for command in script.commands:
        options = script.variables.expanded(command.words)
        if command.file or not options:
            continue
        if pinned or posixpath.basename(options[0]) not in _STARTS_RANKS:
            continue
        options = before_program(options)
        named = [*option_values(options, _HOST_OPTIONS)]
        hosts = next((text for text in named if _HOSTS.fullmatch(text) or _ADDRESSES.fullmatch(text)), "")
        files = [text for text in option_values(options, _FILE_OPTIONS) if _HOSTS_FILE.fullmatch(text)]
        fixed = next((text for text in files if not _is_made(script, command, text)), "")
        if value := hosts or fixed:
            yield Found("hosts-fixed", command.line, value)
            return


def _is_made(script: ParsedScript, reader: Command, name: str) -> bool:
    """Return whether the script writes the file `name`, which `reader` reads, or calls a program that may write it."""
    base = re.escape(posixpath.basename(name))
    text = "\n".join(line for line in script.lines if not line.lstrip().startswith("#"))
    text = re.sub(r"--?(?:host|machine)file[= ]\S+", "", text)
    made = rf"[>=]\s*['\"]?[^\s|;&]{{0,200}}{base}|\b(?:tee|touch|cp|mv|ln|rm)\b[^\n]{{0,200}}{base}"
    for command in script.commands if re.search(made, text) is None else ():
        programs = " ".join(word for word in command.words if word.endswith((".sh", ".py")))
        if (
            programs
            and command.line != reader.line
            and (base in " ".join(command.words) or re.search("host|node", programs))
        ):
            return True
    return re.search(made, text) is not None


def of_terminals(script: ParsedScript) -> Iterator[Found]:
    """Find containers that require a terminal, which a batch job does not have."""
    for command in script.commands if script.kind != "shell" else ():
        names = [posixpath.basename(word) for word in command.words]
        at = next((n for n, (a, b) in enumerate(pairwise(names)) if a in _OF_DOCKER and b in ("run", "exec")), -1)
        if at < 0 or command.file or command.function or "script" in names[:at] or "--pty" in names[:at]:
            continue
        rest = command.words[at + 2 :]
        # Two words that are no options are a value or the image, and the image or its command.
        end = next((n for n, pair in enumerate(pairwise(rest)) if not any(w.startswith("-") for w in pair)), len(rest))
        options = [word for word in rest[:end] if re.fullmatch(r"-[a-zA-Z]{1,6}|--(?:interactive|tty|detach)", word)]
        short = "".join(word[1:] for word in options if not word.startswith("--"))
        wants = ("i" in short or "--interactive" in options) and ("t" in short or "--tty" in options)
        if wants and "d" not in short and "--detach" not in options:
            yield Found("terminal-missing", command.line, names[at])
            return


def of_early_expansion(script: ParsedScript) -> Iterator[Found]:
    """Find variables of a job in a here-document with its script that the submitting shell expands too early."""
    for first, last, literal in script.documents:
        for number in range(first, last + 1) if not literal else ():
            line = script.lines[number - 1]
            match = _OF_JOB.search(line) if not line.lstrip().startswith(("#", "echo ", "printf ")) else None
            host = match is not None and match[0].startswith("$(hostname")
            if match and match[0].strip("${(}") not in script.values and (not host or _ENDPOINT.search(line)):
                yield Found("expanded-early", number, match[0])
                return
