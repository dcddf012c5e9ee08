"""The rules of `envbuild lint-job` for requested resources, output files, exit codes, ranks, endpoints and secrets."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from itertools import takewhile

from envbuild.jobs.lint_script import Found, ParsedScript
from envbuild.jobs.lint_shell import LAUNCHERS, Command
from envbuild.jobs.schedulers.base import option_values, whole
from envbuild.masking import looks_secret
from envbuild.site.jobs import job_variable_problem

_STARTS = re.compile(
    r"(?:python[\d.]*|torchrun|accelerate|deepspeed|horovodrun|lightning|bash|sh|[\w./${}-]+\.(?:sh|py))"
)
_TRAINS = re.compile(r"(?:python[\d.]*|torchrun|accelerate|deepspeed|horovodrun)")
_RANK = re.compile(r"\$\{?(?:SLURM_(?:NODEID|PROCID)|PMI_RANK|PMIX_RANK|OMPI_COMM_WORLD_RANK|PALS_RANKID)\b")
_RANK_OPTION = re.compile(r"--(?:node|machine)[-_]rank(?:=(.*))?", re.DOTALL)
_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_BOUND = re.compile(r"(?:^| )(?:--cpus-per-task|--cpu-bind|--cpus-per-gpu|-c ?[\d$])")
_HERE = re.compile(r"\$\{?PWD\b|\$\(pwd\)|^\./")
_MOST_LINES = 100  # of one command
_INTERPRETER = re.compile(r"#! ?/[ -~]+")
# Programs of steps before the training.
_ASKS = frozenset(["hostname", "nvidia-smi", "rocm-smi", "ip", "mkdir", "rm", "cp", "echo", "sleep", "env", "date"])
# Variables of schedulers and of users' environments.
_GIVEN = re.compile(r"SLURM\w*|PBS\w*|LSB\w*|PMI\w*|OMPI\w*|HOSTNAME|HOME|USER|PWD|RANDOM|PET_\w+")


def of_output(script: ParsedScript) -> Iterator[Found]:
    """Find relative folders of the job's output, which no scheduler creates."""
    names = script.facts.output if script.facts else ()
    if any(re.match(r"# envbuild \S+: .*; site ", line) for line in script.lines):
        return  # `envbuild job --submit` makes it
    for line, words in script.directives:
        for value in option_values(words, names):
            folder = posixpath.dirname(value)
            # Users rarely forget to create an absolute folder.
            if folder not in ("", ".") and folder[0] not in "/$~<":
                yield Found("output-folder", line, folder)


def of_folder(script: ParsedScript) -> Iterator[Found]:
    """Find paths relative to the folder of the submission in scripts that start in the home folder."""
    moves = [one.words[1] for one in script.commands if _program(one) in ("cd", "pushd") and one.words[1:]]
    moved = any(folder.startswith(("/", "$", "~", "`")) for folder in moves)
    options = script.facts.folder if script.facts else ()
    if not options or moved or script.directive(*options):
        return
    for one in script.commands:
        texts = [*one.words, *(word for _, words in one.assignments for word in words)]
        programs = [word for word in one.words[1:] if word.endswith((".py", ".sh"))] if _starts_training(one) else []
        relative = any(word[0] not in "/$~" for word in programs[:1])
        if any(_HERE.search(text) for text in texts) or relative or one.words[:2] == ("cd", ".."):
            yield Found("home-folder", one.line)
            return


def of_directives(script: ParsedScript) -> Iterator[Found]:
    """Find directives that the scheduler does not read, and an environment that srun does not get."""
    first = min((one.line for one in script.commands), default=0)
    lines = [line for line, _ in script.directives]
    strict = script.facts is not None and script.facts.strict
    if strict and lines and not _INTERPRETER.fullmatch(script.lines[0].rstrip()):
        yield Found("no-interpreter", lines[0])
    for line, words in script.directives if strict else ():
        if value := next(filter(_NAME.search, words), ""):
            yield Found("directive-variable", line, value)
    if lines and first and lines[0] < first:
        for line in lines:
            if line > first:
                yield Found("directive-ignored", line)
    none = script.directive("--export")
    if none and none[1].upper() in ("NONE", "NIL") and "SLURM_EXPORT_ENV" not in script.text:
        steps = [one for one in script.commands if _program(one) == "srun"]
        if steps and not any(word.startswith("--export") for one in steps for word in one.words):
            yield Found("export-none", none[0])


def of_status(script: ParsedScript) -> Iterator[Found]:
    """Find scripts whose exit code is not that of the training."""
    stops, pipes = _option_set(script, r"-[a-z]*e|errexit"), _option_set(script, "pipefail")
    if script.kind == "shell" or (stops and pipes):
        return
    top = [one for one in script.commands if not (one.started_by or one.function or one.file or one.per_node)]
    at = max((number for number, one in enumerate(top) if _starts_training(one)), default=-1)
    end = top[at].line if at >= 0 else 0
    while end and end < len(script.lines) and script.lines[end - 1].endswith("\\"):
        end += 1
    # Commands in $(…) on the training's own lines follow it in the list, too.
    after = [one for one in top[at + 1 :] if one.line > end or _program(one) == "tee"]
    if at < 0 or not after:
        return
    kept = any("$?" in word or "PIPESTATUS" in word for one in after for _, words in one.assignments for word in words)
    kept |= any(_program(one) in ("exit", "return", "trap", "if", "[", "[[", "test") for one in after)
    last = next((one for one in reversed(after) if one.words), None)
    if last is None or kept or (_program(last) == "tee" and pipes) or (stops and _program(after[0]) != "tee"):
        return
    yield Found("status-lost", last.line, _program(last))


def _option_set(script: ParsedScript, pattern: str) -> bool:
    words = [word for one in script.commands if one.words[:1] == ("set",) for word in one.words[1:]]
    words += script.lines[0].split()[1:] if script.lines and script.lines[0].startswith("#!") else []
    return any(re.fullmatch(rf"(?:{pattern})\w*", word) for word in words)


def _program(command: Command) -> str:
    return posixpath.basename(command.words[0]) if command.words else ""


def _starts_training(command: Command) -> bool:
    name = _program(command)
    if name.startswith("$") and re.search("torchrun|launcher", name, re.IGNORECASE):
        return True
    if name == "eval":
        return any(word.startswith("$") for word in command.words[1:])
    if name in LAUNCHERS or name in ("apptainer", "singularity", "docker"):
        if set(command.words) & _ASKS or re.search(r"\b(?:pip3?|conda) install\b", " ".join(command.words)):
            return False
        return any(_STARTS.fullmatch(posixpath.basename(word)) or word.startswith("$") for word in command.words[1:])
    return bool(_TRAINS.fullmatch(name)) and (len(command.words) > 1 and "-c" not in command.words[1:2])


def of_steps(script: ParsedScript) -> Iterator[Found]:
    """Find srun steps without the job's CPUs, and node ranks that the batch host expands."""
    asked = script.directive("--cpus-per-task", "-c")
    several = asked is not None and (whole(asked[1]) or 2) > 1
    exported = re.search(r"SRUN_CPUS_PER_TASK|SLURM_CPU_BIND", script.text)
    own_steps = script.facts is not None and script.facts.own_steps
    for one in script.commands if several and not exported and own_steps else ():
        step = _program(one) == "srun" and not (one.started_by or one.file) and _starts_training(one)
        options = takewhile(lambda word: not _STARTS.fullmatch(posixpath.basename(word)), one.words[1:])
        if step and "[@]}" not in "".join(one.words[:2]) and not _BOUND.search(" ".join(options)):
            yield Found("cpus-not-passed", one.line)
    # A script without a number of nodes gets it on sbatch's command line.
    if script.kind != "shell" and (script.nodes is None or script.nodes[1] > 1):
        yield from _node_ranks(script)


def _node_ranks(script: ParsedScript) -> Iterator[Found]:
    seen: set[int] = set()
    for one in script.commands:
        if one.per_node or one.file or script.everywhere:
            continue
        words = script.variables.expanded(one.words)
        for number, word in enumerate(words):
            found = _RANK_OPTION.fullmatch(word)
            value = (found[1] or "".join(words[number + 1 : number + 2])) if found else ""
            match = _RANK.search(value)
            line = script.where(word.partition("=")[0], one.line) if found else 0
            if match and line not in seen and not (script.escapes(match[0]) or _kept(script, one.line, line, match[0])):
                seen.add(line)
                kind = "node-rank-unused" if "c10d" in " ".join(words) else "node-rank"
                yield Found(kind, line, match[0].strip("${"))


def _kept(script: ParsedScript, begun: int, line: int, text: str) -> bool:
    """Return whether `text` in line `line` of a command that began in line `begun` stands in single quotes."""
    first = min(begun, line)
    while first > max(1, line - _MOST_LINES) and script.lines[first - 2].endswith("\\"):
        first -= 1
    at = script.lines[line - 1].find(text)
    before = "\n".join([*script.lines[first - 1 : line - 1], script.lines[line - 1][: max(at, 0)]])
    quote = ""
    for one in re.sub(r"\\.", "", before, flags=re.DOTALL) if at >= 0 else "":
        if one == quote:
            quote = ""
        elif one in "'\"" and not quote:
            quote = one
    return quote == "'"


def of_ranks(script: ParsedScript) -> Iterator[Found]:
    """Find numbers of ranks that do not go with the GPUs, and GPUs that nobody uses."""
    gpus, told = script.gpus, re.search("nproc", script.text, re.IGNORECASE)
    for one in script.launches:
        line, ranks = one.command.line, one.options.get("nproc-per-node", "")
        if gpus and one.program == "torchrun":
            if (whole(ranks) or 0) > gpus:
                yield Found("ranks-exceed-gpus", script.where("nproc", line), f"{ranks} ranks, {gpus} GPUs")
            elif not ranks and gpus > 1 and not told:
                yield Found("one-rank", line, str(gpus))
    several = gpus > 1 or any((whole(one.options.get("nproc-per-node", "")) or 0) > 1 for one in script.launches)
    for command, value in script.exported("CUDA_VISIBLE_DEVICES") if several else ():
        if re.fullmatch(r"\d", value):
            yield Found("one-gpu-visible", command.line, value)
    if gpus > 1 and not script.launches and script.kind != "shell":
        plain = [one for one in script.commands if _plain(one)]
        others = any(_program(one) in ("deepspeed", "horovodrun", *LAUNCHERS) for one in script.commands)
        if plain and not others:
            yield Found("one-process", plain[0].line, str(gpus))


def _plain(command: Command) -> bool:
    """Return whether the command is a training by one Python process."""
    name, words = _program(command), command.words[1:]
    script = next((word for word in words if not word.startswith("-")), "")
    module = words[:1] == ("-m",)
    text = " ".join(words[:4])
    trains = re.search(r"train|finetun|fine_tun|main|pretrain|sft|ddp", text) is not None
    return bool(re.fullmatch(r"python[\d.]*", name)) and (module or script.endswith(".py")) and trains


def of_addresses(script: ParsedScript) -> Iterator[Found]:
    """Find endpoints of names and of several addresses, and endpoints that are never set."""
    for one in script.commands if script.several else ():
        if _program(one) == "srun" and "hostname" in one.words:
            after = one.words[one.words.index("hostname") :]
            if set(after) & {"-i", "-I", "--ip-address", "--all-ip-addresses"}:
                yield Found("first-address", one.line, " ".join(after))
    setting = ("read", "mapfile", "readarray", "source", ".", "eval", "module")
    elsewhere = any(_program(one) in setting for one in script.commands)
    loops = set(re.findall(r"\bfor (\w+) in\b", script.text))
    for launch in script.launches if not elsewhere and script.kind != "shell" else ():
        if "standalone" in launch.options:
            continue
        for name in ("rdzv-endpoint", "master-addr"):
            for variable in _NAME.findall(launch.options.get(name, "")):
                told = variable in script.values or variable in loops or _GIVEN.fullmatch(variable)
                if variable.isupper() and not told:  # others are of a script that is left out here
                    yield Found("endpoint-unset", launch.command.line, variable)


def of_secrets(script: ParsedScript) -> Iterator[Found]:
    """Find secrets, which everyone can read who may read the script or see the job."""
    for one in script.commands:
        for name, words in one.assignments:
            value = words[0] if len(words) == 1 else ""
            literal = re.fullmatch(r"[\w.:~+-]{16,}", value)
            if (
                literal
                and not value.lower().startswith(("your", "xxx"))
                and (job_variable_problem(name) or looks_secret(value))
            ):
                yield Found("secret", one.line, name)
        if one.words[:2] == ("wandb", "login") and re.fullmatch(r"[0-9a-f]{40}", one.words[-1]):
            yield Found("secret", one.line, "wandb login")


def of_gpu_containers(script: ParsedScript) -> Iterator[Found]:
    """Find containers that see no GPU."""
    if not script.gpus or script.is_cray or re.search(r"(?:APPTAINER|SINGULARITY)_(?:NV|ROCM)\b", script.text):
        return
    for one in script.commands:
        names = [posixpath.basename(word) for word in one.words]
        at = next((n for n, name in enumerate(names) if name in ("apptainer", "singularity")), len(names))
        rest = names[at + 1 :]
        starts = any(word in ("exec", "run") for word in rest[:4]) and not any(
            word.startswith("$") for word in rest[1:2]
        )
        if starts and not {"--nv", "--rocm", "--nvccli"} & set(rest):
            yield Found("no-nv", one.line)


JOB_RULES: tuple[Callable[[ParsedScript], Iterator[Found]], ...] = (
    of_output, of_folder, of_directives, of_status, of_steps, of_ranks, of_addresses, of_secrets, of_gpu_containers,
)  # fmt: skip
