"""Rules for the environment of a job's programs: files and folders, modules, images, containers, exposed secrets."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from itertools import pairwise

from envbuild.base.masking import looks_secret, sounds_secret
from envbuild.jobcheck.lint.directives import option_values
from envbuild.jobcheck.lint.faults import command_text
from envbuild.jobcheck.lint.launch import TRAINS, starts_training
from envbuild.jobcheck.lint.script import Found, ParsedScript
from envbuild.jobcheck.lint.shell import CONTAINERS, LAUNCHERS, SUBMITS, Command

_HERE = re.compile(r"\$\{?PWD\b|\$\(pwd\)|^\./")
# The script's own path: where a scheduler runs a copy of it, that of the copy.
_OWN_PATH = re.compile(
    r"(?:dirname|realpath|readlink)\b[^|;)]{0,40}\$\{?(?:0|BASH_SOURCE)\b|\$\{(?:0|BASH_SOURCE(?:\[0\])?)%/"
)
_ITSELF = re.compile(r"\bbasename\b[^|;)]{0,20}\$\{?(?:0|BASH_SOURCE)\b")  # the copy is there, too
_DEFAULT = re.compile(r"\W?\$\{\w+:?-")
_WRITES = re.compile(r"(?<![>&\d])>\s*+(?!/dev/)([\w./-]++)\s*+(?:2>\s*+&1)?\s*+&?\s*+$")
_ARRAY = re.compile(r"(?:--array|-a|-J)[= ]?(?:[^\s\[]{0,100}\[)?\d{1,9}[-,]\d")
_USES = frozenset(["bash", "sh", "zsh", "source", ".", "cd", "pushd"])
_MOST_FOLDERS = 50  # folders that are looked for
_GPUS_IN_DOCKER = re.compile(r"--gpus|--runtime|--device|--privileged|nvidia|rocm")
_KEYS = re.compile(r"(?:key|token|secret)s?(?:\.sh)?$")
# A name that users of a guide replace with their own.
_PLACEHOLDER = re.compile(r"(?:[\w.-]+/)*(?:<[\w -]+>|your(?:[-_]|registry|org|repo|user|name))", re.IGNORECASE)
_IMAGE = re.compile(r"^(?:docker|dockerd|podman|oras)://(.+)$")


def of_output(script: ParsedScript) -> Iterator[Found]:
    """Find relative folders of the job's output, which no scheduler creates."""
    names = script.facts.output if script.facts else ()
    if any(re.match(r"# envbuild \S+: .*(?:;| of) site ", line) for line in script.lines):
        return  # --submit makes it
    told = "\n".join(line for line in script.lines if line.startswith("#") and "mkdir" in line)
    seen = set()
    makes = {
        posixpath.normpath(word) for command in script.commands if command.program == "mkdir" for word in command.words
    }
    late = script.facts is not None and bool(script.facts.delivers) and not script.directive(*script.facts.delivers)
    late |= any(command.program in SUBMITS for command in script.commands)  # it makes them, and then submits itself
    for line, words in script.directives:
        for value in option_values(words, names):
            folder = posixpath.normpath(posixpath.dirname(value) or ".")
            # Users rarely forget to create an absolute folder, or one that the script's own head tells to create.
            # Nobody can create one with the job's number in its name.
            numbered = folder[0] in "/~<" and re.search(r"%\d*[jA]", folder)
            if folder in seen or folder == "." or (late and folder in makes):
                continue
            if numbered or (folder[0] not in "/$~<{" and folder not in told and not _has_files(script, folder)):
                seen.add(folder)
                yield Found("output-folder", line, folder)


def _has_files(script: ParsedScript, folder: str) -> bool:
    """Return whether the script uses files from its own folder: programs and configurations."""
    words = [word for command in script.commands for word in command.texts]
    uses = re.compile(rf"(?:^|[/=]){re.escape(folder)}/[\w./-]{{1,200}}\.(?:py|sh|toml|ya?ml)$")
    return any(uses.search(word) for word in script.variables.expanded(words))


def of_array_output(script: ParsedScript) -> Iterator[Found]:
    """Find files that every task of an array overwrites."""
    asks = " ".join(word for _, row in script.directives for word in row)
    if not _ARRAY.search(asks) or re.search(r"\bcd .*(?:TASK|INDEX)", script.text):
        return
    for command in script.commands:
        end = command.line
        while end < len(script.lines) and script.lines[end - 1].endswith("\\"):
            end += 1
        text = "\n".join(script.lines[command.line - 1 : end])
        name = _WRITES.search(text) if starts_training(command) and not command.file else None
        if name:
            yield Found("array-output", end, name[1])
            return


def of_folder(script: ParsedScript) -> Iterator[Found]:
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
            yield Found("home-folder", command.line)
            return
    if not options or moved or script.directive(*options):
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
            yield Found("home-folder", command.line)
            return


def of_own_path(script: ParsedScript) -> Iterator[Found]:
    """Find paths derived from the script's own path in a batch job, where the script is the scheduler's copy."""
    submitted = script.facts.submitted if script.facts else ""
    code = "\n".join(line for line in script.lines if not line.lstrip().startswith("#"))
    submits = script.writes or any(command.program in SUBMITS for command in script.commands)
    if not submitted or submits or submitted in code or "scontrol show job" in code:
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
                yield Found("script-folder", command.line, level="hint" if _DEFAULT.match(text) else "")
                return


def of_secrets(script: ParsedScript) -> Iterator[Found]:
    """Find secrets, also in comments: everyone who may read the script or see the job can read them."""
    yield from _in_comments(script)
    for command in script.commands:
        for name, words in command.assignments:
            value = words[0] if len(words) == 1 else ""
            literal = re.fullmatch(r"(?=.*[A-Za-z])[\w.:~+][\w.:~+-]{15,}", value)
            if (
                literal
                and not value.lower().startswith(("your", "xxx"))
                and (sounds_secret(name.rstrip("+")) or looks_secret(value))
            ):
                yield Found("secret", command.line, name)
        if command.words[:2] == ("wandb", "login") and re.fullmatch(r"[0-9a-f]{40}", command.words[-1]):
            yield Found("secret", command.line, "wandb login")


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
    for command in script.commands:
        names = [posixpath.basename(word) for word in command.words]
        at = next((n for n, name in enumerate(names) if name in ("apptainer", "singularity")), len(names))
        rest = names[at + 1 :]
        starts = any(word in ("exec", "run") for word in rest[:4]) and not any(
            word.startswith("$") for word in rest[1:2]
        )
        image = next((word for word in rest if re.search(r"\.s(?:if|img)$|\.img$|^\$|://", word)), "")
        if starts and not {"--nv", "--rocm", "--nvccli"} & set(rest) and "cpu" not in image.lower():
            yield Found("no-nv", command.line)


def of_commands(script: ParsedScript) -> Iterator[Found]:
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
                yield Found("modules-not-purged", line)
            set_up |= (
                done in ("load", "add")
                and re.search(r"conda|forge|mamba|(?:open|ibm-wml)-ce", text, re.IGNORECASE) is not None
            )
            purged |= done in ("purge", "reset", "restore", "load", "add")
        set_up |= name in ("source", ".") and not _KEYS.search(words[-1])  # of a file that is not here
        set_up |= re.search(r"shell\.(?:bash|posix) hook", text) is not None
        if words[:2] == ("conda", "activate") and not set_up:
            yield Found("conda-activate", line)
        if name == "scontrol" and (whole_script or set(command.started_by) & (CONTAINERS | {"pyxis"})):
            yield Found("scontrol-in-container", line)
        yield from _images(script, command)
    for line, words in script.directives:
        for image in option_values(words, ("--image", "--container-image")):
            if not image.startswith(("/", ".", "$")):
                yield from judged_image(image.removeprefix("docker:").replace("#", "/", 1), line)


def _images(script: ParsedScript, command: Command) -> Iterator[Found]:
    words = script.variables.expanded(command.words)
    name = posixpath.basename(words[0]) if words else ""
    for number, word in enumerate(words):
        option, equal, value = word.partition("=")
        if option == "--container-image":
            image = value if equal else "".join(words[number + 1 : number + 2])
            if not image.startswith(("/", ".", "$")):
                image = image.replace("#", "/", 1)
                yield from judged_image(image, script.where(image, command.line))
        elif match := _IMAGE.match(word):
            yield from judged_image(match[1].replace("#", "/", 1), command.line)
    # The options of `run` cannot be told from the image; for `pull`, the image is the last word.
    if name in ("docker", "podman") and words[1:2] == ["pull"] and len(words) > 2:
        yield from judged_image(words[-1], command.line)


def judged_image(image: str, line: int) -> Iterator[Found]:
    """Find faults of an image's reference in line `line`."""
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" in image or not image or (image.startswith("$") and tag != "latest"):
        return
    if _PLACEHOLDER.match(image):
        yield Found("placeholder", line, image)
    elif tag in ("", "latest"):
        yield Found("image-unpinned", line, image)
    elif not re.match(r"v?\d+\.\d+\.\d+", tag) and "$" not in tag:  # full versions rarely move
        yield Found("image-tag", line, image)
