"""Rules for the environment of a job's programs: files, folders, modules, images, containers, secrets, other hosts."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from itertools import pairwise

from envbuild.base.masking import looks_secret, sounds_secret
from envbuild.jobcheck.lint.directives import option_values
from envbuild.jobcheck.lint.faults import command_text
from envbuild.jobcheck.lint.launch import TRAINS, before_program, starts_training
from envbuild.jobcheck.lint.script import Fault, ParsedScript
from envbuild.jobcheck.lint.shell import CONTAINERS, LAUNCHERS, SUBMITS, Command

_HERE = re.compile(r"\$\{?PWD\b|\$\(pwd\)|^\./")
# The script's own path: where a scheduler runs a copy of it, that of the copy.
_OWN_PATH = re.compile(
    r"(?:dirname|realpath|readlink)\b[^|;)]{0,40}\$\{?(?:0|BASH_SOURCE)\b|\$\{(?:0|BASH_SOURCE(?:\[0\])?)%/"
)
_ITSELF = re.compile(r"\bbasename\b[^|;)]{0,20}\$\{?(?:0|BASH_SOURCE)\b")  # the copy is there, too
_DEFAULT = re.compile(r"\W?\$\{\w+:?-")
_WRITES = re.compile(r"(?<![>&\d])>\s*+(?!/dev/)([\w./-]++)\s*+(?:2>\s*+&1)?\s*+&?\s*+$")
_WRITTEN = re.compile(
    r"(?:(?<!<)[>&]>?|\btee(?: -a)?)[ ]?['\"]?(?:\./)?([A-Za-z][\w-]{0,40}|\$\{?[A-Za-z]\w*\}?)/[\w.${}%/-]{1,100}"
)
_MAKES = frozenset(["mkdir", "install", "cd", "tar", "git", "unzip", "cp", "rsync"])
# Parts of a log's name that differ by task, and by run. PBS does not expand $(date …) in directives.
_OF_TASK = re.compile(r"%\d*[ajJI]|\$|\^array|\{")
_LOG = re.compile(r"[^/]\.(?:log|out|err|txt|[oe])$")
_OF_RUN = re.compile(r"%\d*A")
_ARRAY = re.compile(r"(?:--array|-a|-J)[= ]?(?:[^\s\[]{0,100}\[)?\d{1,9}[-,]\d")
_USES = frozenset(["bash", "sh", "zsh", "source", ".", "cd", "pushd"])
_MOST_FOLDERS = 50  # folders that are looked for
_GPUS_IN_DOCKER = re.compile(r"--gpus|--runtime|--device|--privileged|nvidia|rocm")
_KEYS = re.compile(r"(?:key|token|secret)s?(?:\.sh)?$")
# A name that users of a guide replace with their own.
_PLACEHOLDER = re.compile(r"(?:[\w.-]+/)*(?:<[\w -]+>|your(?:[-_]|registry|org|repo|user|name))", re.IGNORECASE)
_GIVEN_SECRET = re.compile(
    r"\b(wandb login) (?:--\S{1,80} ){0,3}[0-9a-f]{40}\b"
    r"|(?<![\w-])(--?[\w-]{0,40}(?:api[_-]?key|(?:access|hf|auth)[_-]?token|password|passwd|secret))[= ]['\"]?"
    r"(?=\S{0,80}\d)(?=\S{0,80}[A-Za-z])[\w-]{16,80}(?=['\"\s]|$)"
)
_IMAGE = re.compile(r"^(?:docker|dockerd|podman|oras)://(.+)$")

_MOST = 50  # names that are looked for
_COPIES = frozenset(["cp", "rsync", "tar", "unzip", "rclone", "sbcast", "mpicopy"])
_MEANT = re.compile(r"MASTER_(?:ADDR|PORT)$|WORLD_SIZE$|NCCL_|PYTHONPATH$")
_OF_JOB_ON_NODE = re.compile(
    r"/(?:l?scratch|local|localscratch|ssd|nvme|jobfs)/\$\{?(?:SLURM_JOB_?ID|PBS_JOBID|JOB_?ID)\}?"
)
_OF_NODE = re.compile(
    r"\$\{?(?:SLURM_TMPDIR|TMPDIR|PBS_JOBFS|LOCAL_SCRATCH|LOCALSCRATCH)\}?|/(?:tmp|dev/shm|mnt/bb)(?:/[\w.$-]+)?"
)
# Launchers that start programs in a login's environment, and the words of a command that sets up its own.
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


def of_output(script: ParsedScript) -> Iterator[Fault]:
    """Find relative folders of the job's output, which no scheduler creates."""
    names = script.facts.output if script.facts else ()
    if any(re.match(r"# envbuild \S+: .*(?:;| of) site ", line) for line in script.lines):
        return  # --submit makes it
    comments = "\n".join(line for line in script.lines if line.startswith("#") and "mkdir" in line)
    seen = set()
    makes = {
        posixpath.normpath(word) for command in script.commands if command.program == "mkdir" for word in command.words
    }
    late = script.facts is not None and bool(script.facts.delivers) and not script.directive(*script.facts.delivers)
    late |= any(command.program in SUBMITS for command in script.commands)  # it makes them, and then submits itself
    for line, words in script.directives:
        for value in option_values(words, names):
            folder = posixpath.normpath(posixpath.dirname(value) or ".")
            if folder in seen or folder == "." or (late and folder in makes):
                continue
            # The author of an absolute folder may have it, and nobody can create one with the job's number in its name.
            numbered = folder[0] in "/~<" and re.search(r"%\d*[jA]", folder)
            absolute = folder[0] in "/~" and folder.count("/") > 2 and not script.moves_to(folder)
            own = folder in comments or _has_files(script, folder)
            if (numbered or absolute or folder[0] not in "/$~<{") and not own:
                seen.add(folder)
                yield Fault("output-folder", line, folder, level="hint" if absolute and not numbered else "")
    texts = [command.texts for command in script.commands if command.program in _MAKES]
    made = " ".join(" ".join(script.variables.expanded(words)) for words in texts)
    for number, text in script.code_lines if script.facts else ():
        match = _WRITTEN.search(text)
        name = match[1].strip("${}") if match else ""
        target = " ".join(script.variables.expanded([match[1]])) if match else ""
        known = name in script.values and not re.search("pwd", target, re.IGNORECASE)
        if match and target not in f"{made} {seen}" and (known or name == match[1]) and not _has_files(script, name):
            yield Fault("output-folder", number, match[1], level="hint")
            return


def _has_files(script: ParsedScript, folder: str) -> bool:
    """Return whether the script uses files from its own folder: programs and configurations."""
    words = [word for command in script.commands for word in command.texts]
    uses = re.compile(rf"(?:^|[/=]){re.escape(folder)}/[\w./-]{{1,200}}\.(?:py|sh|toml|ya?ml)$")
    return any(uses.search(word) for word in script.variables.expanded(words))


def of_array_output(script: ParsedScript) -> Iterator[Fault]:
    """Find files that every task of an array overwrites."""
    asks = " ".join(word for _, row in script.directives for word in row)
    slurm = script.has_steps
    names = script.facts.output if script.facts and (slurm or script.facts.chunks) else ()
    array = _ARRAY.search(asks)
    for line, words in script.directives:
        for value in option_values(words, names):
            own = _OF_TASK.search(value) or (not array and _OF_RUN.search(value)) or value == "/dev/null"
            if not own and (slurm or _LOG.search(value)):  # PBS adds a name to a folder
                sure = slurm and array and "append" not in asks
                kind = "array-output" if slurm and array else "output-fixed"
                yield Fault(kind, line, value, level="" if sure else "hint")
                break
    if re.search(r"\bcd .*(?:TASK|INDEX)", script.text) or not script.facts:
        return
    for command in script.trainings:
        end = command.line
        while end < len(script.lines) and script.lines[end - 1].endswith("\\"):
            end += 1
        text = "\n".join(script.lines[command.line - 1 : end])
        if (name := _WRITES.search(text)) and not command.file:
            yield Fault("array-output" if array else "output-fixed", end, name[1])
            return


def of_folder(script: ParsedScript) -> Iterator[Fault]:
    """Find paths relative to the folder of the submission in scripts that start in the home folder."""
    here = [command for command in script.commands if not command.started_by]
    inside = any(command.program == "cd" and command.started_by for command in script.commands)
    moves = [command.words[1] for command in here if command.program in ("cd", "pushd") and command.words[1:]]
    moved = any(folder.startswith(("/", "$", "~", "`")) or folder.isupper() for folder in moves)
    options = script.facts.folder if script.facts else ()
    for command in here if options and moved and not script.directive(*options) else ():
        if command.program in ("cd", "pushd"):
            break
        file = command.words[1] if command.program in ("source", ".") and len(command.words) > 1 else "/"
        if "/" in file and file[0] not in "/$~":
            yield Fault("home-folder", command.line)
            return
    if not options or moved or script.submits or script.directive(*options):
        return
    # Some scripts mean the home folder: they name a folder in it both ways.
    own = sorted(set(re.findall(r"\$\{?HOME\}?/([\w.-]{3,40})", script.text)))[:_MOST_FOLDERS]
    if any(re.search(rf"(?<![\w/.~}}-]){re.escape(name)}/", script.text) for name in own):
        return
    for command in here if inside else script.commands:
        words = command.words[1:] if starts_training(command) else ()
        programs = [word for word in words if word.endswith((".py", ".sh")) and " " not in word]
        relative = any(word[0] not in "/$~" for word in programs[:1])
        if any(_HERE.search(text) for text in command.texts) or relative or command.words[:2] == ("cd", ".."):
            yield Fault("home-folder", command.line)
            return


def of_own_path(script: ParsedScript) -> Iterator[Fault]:
    """Find paths derived from the script's own path in a batch job, where the script is the scheduler's copy."""
    submitted = script.facts.submitted if script.facts else ""
    code = script.code
    if not submitted or script.submits or submitted in code or "scontrol show job" in code:
        return  # the script submits itself, or the scripts that it writes
    for command in script.commands:
        if command.file or command.per_node or command.captured:
            continue
        texts = [(name, word) for name, words in command.assignments for word in words]
        moves = command.program in _USES or command.program in LAUNCHERS or TRAINS.fullmatch(command.program)
        texts += [("", word) for flag, word in pairwise(("", *command.words)) if moves and flag not in ("-c", "-lc")]
        for name, text in ((name, text) for name, text in texts if _OWN_PATH.search(text)):
            used = not name or re.search(
                rf"^(?!\s*(?:echo|printf)\b).*\$\{{?{name.rstrip('+')}\b", script.text, re.MULTILINE
            )
            if used and not _ITSELF.search(text):
                # ${ROOT:-$(dirname …)}: users set ROOT.
                yield Fault("script-folder", command.line, level="hint" if _DEFAULT.match(text) else "")
                return


def of_secrets(script: ParsedScript) -> Iterator[Fault]:
    """Find secrets, also in comments: everyone who may read the script or see the job can read them."""
    for number, line in enumerate(script.lines, 1):
        if match := _GIVEN_SECRET.search(line):
            yield Fault("secret", number, match[1] or match[2])
        elif looks_secret(line) and not re.search(r"\b(?:basic|bearer)\b", line, re.IGNORECASE):
            yield Fault("secret", number, "a token")
    for command in script.commands:
        for name, words in command.assignments:
            value = words[0] if len(words) == 1 else ""
            literal = re.fullmatch(r"(?=.*[A-Za-z])[\w.:~+][\w.:~+-]{15,}=*|[\w+][\w+/-]{39,}=*", value)
            # A value without a digit may be just a name, as in METRIC_KEY=mean_of_losses.
            sounds = sounds_secret(name.rstrip("+")) and (re.search(r"\d", value) or "PASS" in name.upper())
            if literal and not value.lower().startswith(("your", "xxx")) and (sounds or looks_secret(value)):
                yield Fault("secret", command.line, name)


def of_gpu_containers(script: ParsedScript) -> Iterator[Fault]:
    """Find containers that see no GPU, or that have little shared memory."""
    for launch in script.launches if "gloo" not in script.text else ():
        words = " ".join(launch.around)
        if not {"docker", "podman"} & set(launch.started_by) or " run " not in words:
            continue
        if not _GPUS_IN_DOCKER.search(words):
            yield Fault("no-nv", launch.command.line)
        if not re.search(r"--(?:ipc|shm-size)|/dev/shm", words):
            yield Fault("shared-memory", launch.command.line)
    if not script.gpus or script.is_cray or re.search(r"(?:APPTAINER|SINGULARITY)_(?:NV|ROCM)\b", script.text):
        return
    for command in script.commands:
        names = [posixpath.basename(word) for word in script.variables.expanded(command.words)]
        at = next((n for n, name in enumerate(names) if name in ("apptainer", "singularity")), len(names))
        rest = names[at + 1 :]
        text = " ".join(names)
        if re.match(r"(?:docker|podman) run ", text) and starts_training(command) and not _GPUS_IN_DOCKER.search(text):
            yield Fault("no-nv", command.line)
        starts = any(word in ("exec", "run") for word in rest[:4]) and not any(
            word.startswith("$") for word in rest[1:2]
        )
        image = next((word for word in rest if re.search(r"\.s(?:if|img)$|\.img$|^\$|://", word)), "")
        if starts and not {"--nv", "--rocm", "--nvccli"} & set(rest) and "cpu" not in image.lower():
            yield Fault("no-nv", command.line)


def of_commands(script: ParsedScript) -> Iterator[Fault]:
    """Find faults of modules, conda, containers and images."""
    first = script.lines[0] if script.lines else ""
    purged, set_up = False, re.match(r"#!\S+ .*?(?:-\w*l\b|--login)", first) is not None
    # pyxis then starts the batch script itself in the container.
    whole_script = script.directive("--container-image") is not None
    for command in script.commands:
        words, line = command.words, command.line
        text, name = command_text(command), command.program
        if name in ("module", "ml"):  # module --quiet purge
            done = next((word for word in words[1:] if not word.startswith("-")), "")
            if done in ("load", "add") and not purged and not script.is_cray:
                yield Fault("modules-not-purged", line)
            set_up |= (
                done in ("load", "add")
                and re.search(r"conda|forge|mamba|(?:open|ibm-wml)-ce", text, re.IGNORECASE) is not None
            )
            purged |= done in ("purge", "reset", "restore", "load", "add")
        set_up |= name in ("source", ".") and not _KEYS.search(words[-1])  # of a file that is not here
        set_up |= re.search(r"shell\.(?:bash|posix) hook", text) is not None
        if words[:2] == ("conda", "activate") and not set_up:
            yield Fault("conda-activate", line)
        if name == "scontrol" and (whole_script or set(command.started_by) & (CONTAINERS | {"pyxis"})):
            yield Fault("scontrol-in-container", line)
        yield from _images(script, command)
    for line, words in script.directives:
        for image in option_values(words, ("--image", "--container-image")):
            if not image.startswith(("/", ".", "$")):
                yield from judged_image(image.removeprefix("docker:").replace("#", "/", 1), line)


def _images(script: ParsedScript, command: Command) -> Iterator[Fault]:
    words = script.variables.expanded(command.words)
    name = posixpath.basename(words[0]) if words else ""
    for image in option_values(words, ("--container-image",)):
        if not image.startswith(("/", ".", "$")):
            if re.match(r"(?:docker://)?[\w-]+(?:\.[\w-]+)+/[^#]+$", image):
                yield Fault("image-registry", command.line, image)
            image = image.replace("#", "/", 1)
            yield from judged_image(image, script.where(image, command.line))
    for match in filter(None, map(_IMAGE.match, words)):
        yield from judged_image(match[1].replace("#", "/", 1), command.line)
    # The options of `run` cannot be told from the image; for `pull`, the image is the last word.
    if name in ("docker", "podman") and words[1:2] == ["pull"] and len(words) > 2:
        yield from judged_image(words[-1], command.line)


def judged_image(image: str, line: int) -> Iterator[Fault]:
    """Find faults of an image's reference in line `line`; an image in a folder or archive has none."""
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" in image or re.match(r"$|oci:|dir:|[a-z]+-archive:", image) or (image[0] == "$" and tag != "latest"):
        return
    if _PLACEHOLDER.match(image):
        yield Fault("placeholder", line, image)
    elif tag in ("", "latest"):
        yield Fault("image-unpinned", line, image)
    elif not re.match(r"v?\d+\.\d+\.\d+", tag) and "$" not in tag:  # full versions rarely move
        yield Fault("image-tag", line, image)


def of_other_nodes(script: ParsedScript) -> Iterator[Fault]:
    """Find environments and copied data that the script prepares only on the head, so that other nodes lack them."""
    here = [command for command in script.commands if not (command.started_by or command.file or command.function)]
    yield from _environment(here) if script.facts else ()
    everywhere = any(
        command.program in (*LAUNCHERS, "sbcast", "mpicopy") and _COPIES & {*command.words} for command in here
    )
    if not script.several or script.kind == "shell" or everywhere:
        return
    later = " ".join(word for command in script.trainings for word in command.words)
    later = " ".join(script.variables.expanded(later.split()))
    for command in here:
        target = next((word for word in reversed(command.words[1:]) if not word.startswith("-")), "")
        target = " ".join(script.variables.expanded([target]))
        folder = _OF_NODE.match(target)
        if command.program in _COPIES and folder and folder[0].rstrip("/") in later:
            yield Fault("head-copy", command.line, folder[0])
            return
        mine = _OF_JOB_ON_NODE.match(target)  # on some systems a folder of all nodes
        if command.program in _COPIES and mine and mine[0] in later:
            yield Fault("head-copy", command.line, mine[0], level="hint")
            return


def _environment(here: list[Command]) -> Iterator[Fault]:
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
            yield Fault("environment-lost", command.line, f"{command.program} does not pass on {set_up[-1]}")
            return


def of_fixed_hosts(script: ParsedScript) -> Iterator[Fault]:
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
            yield Fault("hosts-fixed", command.line, value)
            return


def _is_made(script: ParsedScript, reader: Command, name: str) -> bool:
    """Return whether the script writes the file `name`, which `reader` reads, or calls a program that may write it."""
    base = re.escape(posixpath.basename(name))
    text = script.code
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
