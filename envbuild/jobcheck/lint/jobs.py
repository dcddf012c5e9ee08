"""The rules of `envbuild lint-job` for requested resources, output files, exit codes, ranks, endpoints and secrets."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from itertools import pairwise

from envbuild.base.masking import looks_secret, sounds_secret
from envbuild.jobcheck.lint.addresses import of_addresses, of_endpoints, of_numbers, of_order
from envbuild.jobcheck.lint.directives import option_values
from envbuild.jobcheck.lint.flow import of_names, of_signals
from envbuild.jobcheck.lint.hosts import (
    of_archives,
    of_early_expansion,
    of_fixed_hosts,
    of_mpi_environment,
    of_other_nodes,
    of_remote_shells,
    of_terminals,
)
from envbuild.jobcheck.lint.launch import TRAINS, starts_training
from envbuild.jobcheck.lint.resources import (
    of_cpus,
    of_idle_nodes,
    of_optional_variables,
    of_placement,
    of_ranks,
    of_requests,
    of_single_nodes,
    of_steps,
    of_typed_counts,
)
from envbuild.jobcheck.lint.script import NOUNSET, Found, ParsedScript, option_set
from envbuild.jobcheck.lint.shell import LAUNCHERS, SUBMITS
from envbuild.jobcheck.lint.slips import (
    of_assignments,
    of_comments,
    of_conflicts,
    of_default_ports,
    of_literal_hosts,
    of_operators,
    of_placeholders,
)
from envbuild.jobcheck.lint.status import of_checks, of_status

_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_HERE = re.compile(r"\$\{?PWD\b|\$\(pwd\)|^\./")
_INTERPRETER = re.compile(r"#! ?/[ -~]+")
# The script's own path: where a scheduler runs a copy of it, that of the copy.
_OWN_PATH = re.compile(
    r"(?:dirname|realpath|readlink)\b[^|;)]{0,40}\$\{?(?:0|BASH_SOURCE)\b|\$\{(?:0|BASH_SOURCE(?:\[0\])?)%/"
)
_FETCHES = frozenset(["curl", "wget"])
_SHELLS = frozenset(["bash", "sh", "zsh", "source", "."])
_USES = _SHELLS | {"cd", "pushd"}
_BARE = re.compile(r"\$(?:(LD_LIBRARY_PATH|PYTHONPATH|LD_PRELOAD)\b|\{(LD_LIBRARY_PATH|PYTHONPATH|LD_PRELOAD)\})")
# Directives without which a job trains the same.
_LABELS = re.compile(r"--(?:job-name|comment|mail-\w+)\b")
_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_MOST = 50  # folders that are looked for
_SETTING = re.compile(r"[a-z]\w*(?:\.\w+)+=|[\w-]+(?:/[\w-]+)+:/")
_TORCHRUNS = re.compile(r"--(?:nproc[-_]per[-_]node|rdzv[-_](?:endpoint|backend|id)|standalone)(?:=.*)?", re.DOTALL)
_GPUS_IN_DOCKER = re.compile(r"--gpus|--runtime|--device|--privileged|nvidia|rocm")


def of_output(script: ParsedScript) -> Iterator[Found]:
    """Find relative folders of the job's output, which no scheduler creates."""
    names = script.facts.output if script.facts else ()
    if any(re.match(r"# envbuild \S+: .*(?:;| of) site ", line) for line in script.lines):
        return  # --submit makes it
    told = "\n".join(line for line in script.lines if line.startswith("#") and "mkdir" in line)
    seen = set()
    makes = {posixpath.normpath(word) for one in script.commands if one.program == "mkdir" for word in one.words}
    late = script.facts is not None and bool(script.facts.delivers) and not script.directive(*script.facts.delivers)
    late |= any(one.program in SUBMITS for one in script.commands)  # it makes them, and then submits itself
    for line, words in script.directives:
        for value in option_values(words, names):
            folder = posixpath.normpath(posixpath.dirname(value) or ".")
            # Users rarely forget to create an absolute folder, or one that the script's own head tells to create.
            # Nobody can create one with the job's number in its name.
            numbered = folder[0] in "/~<" and re.search(r"%\d*[jA]", folder)
            if folder in seen or folder == "." or (late and folder in makes):
                continue
            if numbered or (folder[0] not in "/$~<" and folder not in told and not _has_files(script, folder)):
                seen.add(folder)
                yield Found("output-folder", line, folder)


def _has_files(script: ParsedScript, folder: str) -> bool:
    """Return whether the script uses files of the folder that come with it: programs and configurations."""
    words = [word for one in script.commands for word in one.texts]
    uses = re.compile(rf"(?:^|[/=]){re.escape(folder)}/[\w./-]{{1,200}}\.(?:py|sh|toml|ya?ml)$")
    return any(uses.search(word) for word in script.variables.expanded(words))


def of_folder(script: ParsedScript) -> Iterator[Found]:
    """Find paths relative to the folder of the submission in scripts that start in the home folder."""
    here = [one for one in script.commands if not one.started_by]
    inside = any(one.program == "cd" and one.started_by for one in script.commands)
    moves = [one.words[1] for one in here if one.program in ("cd", "pushd") and one.words[1:]]
    moved = any(folder.startswith(("/", "$", "~", "`")) or folder.isupper() for folder in moves)
    options = script.facts.folder if script.facts else ()
    if not options or moved or script.directive(*options):
        return
    # Some scripts mean the home folder: they name a folder in it both ways.
    own = sorted(set(re.findall(r"\$\{?HOME\}?/([\w.-]{3,40})", script.text)))[:_MOST]
    if any(re.search(rf"(?<![\w/.~}}-]){re.escape(name)}/", script.text) for name in own):
        return
    for one in here if inside else script.commands:
        words = one.words[1:] if starts_training(one) else ()
        programs = [word for word in words if word.endswith((".py", ".sh")) and " " not in word]
        relative = any(word[0] not in "/$~" for word in programs[:1])
        if any(_HERE.search(text) for text in one.texts) or relative or one.words[:2] == ("cd", ".."):
            yield Found("home-folder", one.line)
            return


def of_own_path(script: ParsedScript) -> Iterator[Found]:
    """Find paths made from the script's own in a batch job, where they lead to the scheduler's copy."""
    submitted = script.facts.submitted if script.facts else ""
    if not submitted or any(one.program in SUBMITS for one in script.commands):
        return  # the script submits itself
    told: dict[str, bool] = {}
    for one in script.commands:
        if one.file or one.per_node:
            continue
        texts = [(name, word) for name, words in one.assignments for word in words]
        moves = one.program in _USES or one.program in LAUNCHERS or TRAINS.fullmatch(one.program)
        texts += [("", word) for flag, word in pairwise(("", *one.words)) if moves and flag not in ("-c", "-lc")]
        for name in (name for name, text in texts if _OWN_PATH.search(text)):
            if name not in told:
                others = " ".join(script.values.get(name, ()))
                told[name] = submitted in others or "scontrol show job" in others
            if not told[name] and submitted not in script.lines[one.line - 1]:
                yield Found("script-folder", one.line)
                return


def of_directives(script: ParsedScript) -> Iterator[Found]:
    """Find directives that the scheduler does not read, and an environment that srun does not get."""
    if script.writes:  # with the values of this one, by a shell that has no first line here
        return
    lines = [line for line, words in script.directives if words[:1] and words[0].startswith("-")]
    strict = script.facts is not None and script.facts.strict
    if strict and lines and not _INTERPRETER.fullmatch(script.lines[0].rstrip()):
        yield Found("no-interpreter", lines[0])
    bash = re.search(r"\[\[ |\(\(|<<<|<\(|\w=\(|\$\{\w+\[", script.text)
    shell = script.facts.shell if script.facts else ""
    if shell and lines[:1] == [1] and bash and not script.directive(shell):
        yield Found("no-interpreter", 1, level="warning")
    expands = script.facts.expands if script.facts else None
    for line, words in script.directives if expands is not None else ():
        names = [name for name in _NAME.findall(" ".join(words)) if not re.fullmatch(expands or "-", name)]
        for name in names[:1]:
            file = words[:1] and re.match(r"--(?:output|error)\b|-[oe]$", words[0])
            named = file and "$" not in posixpath.dirname(" ".join(words).partition("=")[2] or words[-1])
            harms = strict and not (_LABELS.match("".join(words[:1])) or named)
            yield Found("directive-variable", line, name, level="" if harms else "warning")
    last = max((one.line for one in script.commands), default=0)
    for line, words in script.late:  # some keep directives for later at the end
        doubtful = line > last or _LABELS.match(words[0]) is not None
        yield Found("directive-ignored", line, level="warning" if doubtful else "")
    none = script.directive("--export")
    if none and none[1].upper() in ("NONE", "NIL") and "SLURM_EXPORT_ENV" not in script.text:
        steps = [one for one in script.commands if one.program == "srun"]
        if steps and not any(word.startswith("--export") for one in steps for word in one.words):
            yield Found("export-none", none[0])


def of_shell(script: ParsedScript) -> Iterator[Found]:
    """Find lines that are not continued, options behind the program, and unset variables under set -u."""
    for before, one in pairwise(script.commands):
        option = "".join(one.words[:1]).partition("=")[0]
        begins = _OPTION.fullmatch(option) and script.lines[one.line - 1].lstrip().startswith(option)
        # Behind an operator it is a condition of [[ … ]], before a parenthesis a pattern of `case`.
        if begins and not (one.file or one.started_by) and one.end not in (")", "|") and len(before.end) < 2:
            yield Found("line-not-continued", one.line, option)
            break
        alone = before.program == "srun" and all(re.match(r"--?[a-z]", word) for word in before.words[1:])
        split = alone and before.end == "\n" and before.words[1:] and TRAINS.fullmatch(one.program)
        if split and not (before.file or before.started_by):
            yield Found("line-not-continued", one.line, one.program)
            break
        # A setting of Hydra, or the rest of a list of folders: no program has such a name.
        rest = _SETTING.match("".join(one.words[:1])) if not (one.file or one.started_by) else None
        if rest and len(before.end) < 2 and script.lines[one.line - 1].lstrip().startswith(rest[0]):
            yield Found("line-not-continued", one.line, rest[0])
            break
    for one, two in pairwise(script.commands):
        shell = two.program in _SHELLS or (two.program.startswith("python") and two.words[1:] in ((), ("-",)))
        piped = one.program in _FETCHES and one.end == "|" and shell
        read = two.program in _FETCHES and one.end == "(" and one.program in _SHELLS
        text = one.words[-1] if one.program in _SHELLS and "-c" in one.words else ""
        if piped or read or re.match(r"\$\((?:curl|wget) ", text):
            yield Found("remote-code", one.line, (two if read else one).program)
    for launch in script.launches:
        late = [word for word in launch.rest[1:] if _TORCHRUNS.fullmatch(word)]
        if late and launch.rest[0].endswith(".py") and launch.program == "torchrun":
            yield Found("options-late", script.where(late[0], launch.command.line), late[0])
        module = {"no-python", "m", "module"} & launch.options.keys()
        # A variable may hold torchrun in one branch of an `if`, and python in the other.
        plain = launch.program == "torchrun" and re.search(r"torchrun|torch\.dist", " ".join(launch.command.words))
        if re.fullmatch(r"python[\d.]*", "".join(launch.rest[:1])) and plain and not module:
            yield Found("python-twice", launch.command.line, launch.rest[0])
    if not option_set(script, NOUNSET):
        return
    known = set()
    for one in script.commands:
        if one.program in ("module", "ml", "source", "."):
            known.add("LD_LIBRARY_PATH")
        for match in () if one.file else _BARE.finditer(" ".join(one.texts)):
            name = match[1] or match[2]
            if name not in known:
                known.add(name)
                yield Found("unset-variable", one.line, name)
        known |= {name.rstrip("+") for name, _ in one.assignments}


def of_secrets(script: ParsedScript) -> Iterator[Found]:
    """Find secrets, which everyone can read who may read the script or see the job, also those in comments."""
    yield from _in_comments(script)
    for one in script.commands:
        for name, words in one.assignments:
            value = words[0] if len(words) == 1 else ""
            literal = re.fullmatch(r"[\w.:~+][\w.:~+-]{15,}", value)
            if (
                literal
                and not value.lower().startswith(("your", "xxx"))
                and (sounds_secret(name.rstrip("+")) or looks_secret(value))
            ):
                yield Found("secret", one.line, name)
        if one.words[:2] == ("wandb", "login") and re.fullmatch(r"[0-9a-f]{40}", one.words[-1]):
            yield Found("secret", one.line, "wandb login")


def _in_comments(script: ParsedScript) -> Iterator[Found]:
    for number, line in enumerate(script.lines, 1):
        if re.match(r"\s*#.*\bwandb login [0-9a-f]{40}\b", line):
            yield Found("secret", number, "wandb login")


def of_gpu_containers(script: ParsedScript) -> Iterator[Found]:
    """Find containers that see no GPU, or that have little shared memory."""
    for launch in script.launches if "gloo" not in script.text else ():
        words = " ".join(launch.around)
        if not {"docker", "podman"} & set(launch.started_by) or " run " not in words:
            continue
        if not _GPUS_IN_DOCKER.search(words):
            yield Found("no-nv", launch.command.line)
        if not re.search(r"--(?:ipc|shm-size)|/dev/shm", words):
            yield Found("shared-memory", launch.command.line)
    if not script.gpus or script.is_cray or re.search(r"(?:APPTAINER|SINGULARITY)_(?:NV|ROCM)\b", script.text):
        return
    for one in script.commands:
        names = [posixpath.basename(word) for word in one.words]
        at = next((n for n, name in enumerate(names) if name in ("apptainer", "singularity")), len(names))
        rest = names[at + 1 :]
        starts = any(word in ("exec", "run") for word in rest[:4]) and not any(
            word.startswith("$") for word in rest[1:2]
        )
        image = next((word for word in rest if re.search(r"\.s(?:if|img)$|\.img$|^\$|://", word)), "")
        if starts and not {"--nv", "--rocm", "--nvccli"} & set(rest) and "cpu" not in image.lower():
            yield Found("no-nv", one.line)


JOB_RULES: tuple[Callable[[ParsedScript], Iterator[Found]], ...] = (
    of_output,
    of_folder,
    of_own_path,
    of_directives,
    of_status,
    of_checks,
    of_shell,
    of_secrets,
    of_gpu_containers,
    of_steps,
    of_cpus,
    of_ranks,
    of_requests,
    of_placement,
    of_optional_variables,
    of_typed_counts,
    of_idle_nodes,
    of_single_nodes,
    of_addresses,
    of_endpoints,
    of_numbers,
    of_order,
    of_signals,
    of_names,
    of_other_nodes,
    of_mpi_environment,
    of_fixed_hosts,
    of_terminals,
    of_early_expansion,
    of_archives,
    of_comments,
    of_placeholders,
    of_default_ports,
    of_literal_hosts,
    of_assignments,
    of_remote_shells,
    of_conflicts,
    of_operators,
)
