"""The rules of `envbuild lint-job` for scripts: each yields the faults that it finds."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator

from envbuild.jobcheck.lint.addresses import sets_elsewhere
from envbuild.jobcheck.lint.directives import option_values, whole_number
from envbuild.jobcheck.lint.faults import command_text, of_patterns
from envbuild.jobcheck.lint.launch import Launch
from envbuild.jobcheck.lint.script import PER_NODE, Found, ParsedScript
from envbuild.jobcheck.lint.shell import CONTAINERS, Command
from envbuild.jobcheck.lint.variables import LOCAL, of_fallbacks, of_variables

_HOSTNAME = re.compile(r"\$\(\s*(?:hostname(?:\s+-[fs])?|uname -n)\s*\)|\$\{?HOSTNAME\b")
_RANDOM = re.compile(r"\$\{?RANDOM\b|\$\(\s*(?:date|uuidgen|openssl|od|mktemp)\b")
_LITERAL_PORT = re.compile(r":(\d{2,5})$")
_FUNCTION = re.compile(r"[a-z]+(?:_[a-z]+)+")
_KEYS = re.compile(r"(?:key|token|secret)s?(?:\.sh)?$")
# A name that users of a guide replace with their own.
_PLACEHOLDER = re.compile(r"(?:[\w.-]+/)*(?:<[\w -]+>|your(?:[-_]|registry|org|repo|user|name))", re.IGNORECASE)
_IMAGE = re.compile(r"^(?:docker|dockerd|podman|oras)://(.+)$")


def of_launches(script: ParsedScript) -> Iterator[Found]:
    """Find a torchrun that starts on the head only or twice per node, and faults of its endpoint, run ID and port."""
    # A step on one node in a job of several, or an evaluation after the training, is intentional.
    covered = any(one.waits and _on_nodes(script, one) for one in script.launches)
    elsewhere = sets_elsewhere(script)
    for one in script.launches:
        # A function of a file that the script reads may start its words on each node.
        if not (elsewhere and _FUNCTION.fullmatch(one.command.program) and not _on_nodes(script, one)):
            yield from _nodes(script, one, covered)
        yield from _endpoint(script, one)
        if script.several and "standalone" not in one.options:
            yield from _identity(script, one)
        if one.launcher == "srun":
            yield from _doubled(script, one)
        if one.launcher in ("mpirun", "orterun") and not _words_have(script, one, "bind-to", "none"):
            yield Found("mpi-binding", one.command.line)


def _nodes(script: ParsedScript, one: Launch, covered: bool) -> Iterator[Found]:
    """Find nodes without a torchrun, and torchruns that do not form one job."""
    several, line, options = script.several, one.command.line, one.options
    # An explicit node rank means that it is started by hand on each node.
    by_hand = script.kind == "shell" and "node-rank" in options
    numbered = re.fullmatch(r"\$\{?\d\}?", options.get("node-rank", ""))  # submitted once for each node
    alone = not (one.command.file or by_hand or _on_nodes(script, one))
    if several and alone and one.waits:
        fault = "head-only" if script.kind != "shell" or script.launchers_work else "started-here"
        yield Found(fault, line, nodes=several)
    elif script.nodes and several and alone and not (covered or line < script.last_on_nodes):
        yield Found("idle-nodes", line, nodes=several)
    step = one.option("--nodes", "-N")
    if not one.waits and (alone or covered or step == "1"):
        return
    if several and "standalone" in options:
        yield Found("standalone", script.where("--standalone", line), nodes=several)
    meets = options.keys() & {"rdzv-endpoint", "master-addr"} and not {"nnodes", "standalone"} & options.keys()
    if several and meets and one.program == "torchrun" and not script.sets_options:
        yield Found("nodes-missing", line, nodes=several)
    own = {"nnodes", "standalone", "rdzv-endpoint", "master-addr", "rdzv-conf", "config-file"} & options.keys()
    by = one.launcher == "srun" and one.program == "torchrun" and script.has_steps and one.complete
    if script.nodes and several and by and not (own or step or script.sets_options):
        yield Found("nodes-missing", line, nodes=several, level="warning")
    nodes = options.get("nnodes", "").rpartition(":")[2]
    known_nodes = script.nodes[1] if script.nodes and not numbered and nodes not in script.choices else 0
    asked = step if whole_number(step) is not None else str(script.nodes[1] if script.nodes else "")
    if known_nodes and step != "1" and whole_number(nodes) not in (None, whole_number(asked)):
        yield Found("nodes-differ", script.where("nnodes", line), nodes, asked)
    elif known_nodes and step == "1" and (whole_number(nodes) or 0) > known_nodes:  # a step for each node
        yield Found("nodes-differ", script.where("nnodes", line), nodes, str(known_nodes))


def _on_nodes(script: ParsedScript, one: Launch) -> bool:
    return script.everywhere or one.launcher != "" or _carried(script, one)


def _carried(script: ParsedScript, one: Launch) -> bool:
    """Return whether a launcher starts the function or the file that contains this torchrun."""
    return bool(one.command.function) and one.command.function in script.passed


def _endpoint(script: ParsedScript, one: Launch) -> Iterator[Found]:
    given = [(n, one.options[n]) for n in ("rdzv-endpoint", "master-addr") if n in one.options]
    ports: dict[str, int] = {}
    for name, value in given:
        raw = script.where(name.replace("-", "_"), one.command.line)
        at = script.where(name, one.command.line) if raw == one.command.line else raw
        fewest, _, most = one.options.get("nnodes", "").partition(":")
        if LOCAL.match(value) and fewest == "1" and most in ("", "1"):
            pass  # told to be a job of one node
        elif LOCAL.match(value) and script.several:
            yield Found("localhost-endpoint", at, value, script.several)
        elif LOCAL.match(value) and most not in ("", fewest):
            yield Found("localhost-endpoint", at, value, most, level="warning")
        elif script.several and (name_of_host := _HOSTNAME.search(value)):
            per_node = _there(script, one, name_of_host[0])
            yield Found("endpoint-per-node" if per_node else "hostname-endpoint", at, name_of_host[0])
        if match := _LITERAL_PORT.search(_default(script, value)):
            ports.setdefault(match[1], at)
    if not (ports or {"rdzv-endpoint", "standalone"} & one.options.keys()):
        ports = {_default(script, one.options.get("master-port", "")): one.command.line}
    for port, at in ports.items() if not (script.whole_nodes or one.command.file) else ():
        if port.isdecimal() and port != "0":
            alone = script.kind == "shell" and not script.several  # on a host of one's own
            yield Found("fixed-port", script.where(port, at), port, level="hint" if alone else script.doubtful)
    own = one.options.keys() & {"rdzv-endpoint", "master-addr", "master-port", "standalone", "rdzv-conf", "config-file"}
    alone = script.kind != "shell" and one.program != "tune run" and not (script.several or script.whole_nodes)
    if alone and script.gpus and not own and one.complete and not script.sets_options:
        yield Found("fixed-port", one.command.line, "29500 (older torchruns' default)", level=script.doubtful)


def _default(script: ParsedScript, value: str) -> str:
    """Return `value` with the default of a variable in its place that only the user's environment sets."""

    def filled(match: re.Match[str]) -> str:
        own = " ".join(script.values.get(match[1], ()))
        told = re.fullmatch(rf"\$\{{{match[1]}:?[-=](\d+)\}}", own) or re.fullmatch(r"\$\{\w+:?[-=](\d+)\}", match[0])
        return told[1] if told else match[0]

    return re.sub(r"\$\{?(\w+)(?::?[-=]\d+)?\}?$", filled, value)


def _identity(script: ParsedScript, one: Launch) -> Iterator[Found]:
    value = one.options.get("rdzv-id", "")
    name = "rdzv_id" if script.where("rdzv_id", 0) else "rdzv-id"
    at = script.where(name, one.command.line)
    random = _RANDOM.search(value)
    if random and _there(script, one, random[0]):
        yield Found("run-id-per-node", at, value)
    elif random or (value and "$" not in value):
        yield Found("run-id", at, value)
    if "rdzv-endpoint" in one.options and not one.command.file:
        told = "local-addr" in one.options or "is_host" in one.options.get("rdzv-conf", "")
        if not told and not script.launches[0].options.get("rdzv-backend", "").startswith("etcd"):
            yield Found("local-address", one.command.line)


def _there(script: ParsedScript, one: Launch, text: str) -> bool:
    """Return whether `text`, an expansion in a torchrun's words, is expanded on each node."""
    # The value of a variable that the batch script sets is the same on each node.
    own = any(text in word for word in one.command.words) or text in script.set_on_nodes
    return one.launcher != "" and ((one.command.per_node and own) or script.escapes(text))


def _doubled(script: ParsedScript, one: Launch) -> Iterator[Found]:
    tasks = one.option("--ntasks", "-n")
    nodes = one.option("--nodes", "-N") or str(script.nodes[1] if script.nodes else "")
    own = one.option("--nodes", "-N", *PER_NODE)
    every = None if tasks or own or script.directive(*PER_NODE) else script.directive("--ntasks", "-n")
    most, least = whole_number(nodes), whole_number(every[1] if every else tasks)
    if most is not None and least is not None and least <= most:
        placed = any(re.match(r"-w|--nodelist|-r$|--relative", word) for word in one.around)
        if least < most and one.waits and not placed:
            yield Found("tasks-missing", one.command.line, str(least), nodes)
        return
    # The value of another variable is unknown; variables with the number of tasks match the directive.
    if "$" in tasks and not re.search(r"SLURM_(?:NTASKS|NPROCS)", tasks):
        return
    if one.option(*PER_NODE) == "1":
        return
    given = script.directive(*PER_NODE, "--ntasks", "-n")
    if given and script.tasks > 1:
        yield Found("tasks-per-node", given[0], str(script.tasks))


def _words_have(script: ParsedScript, one: Launch, option: str, value: str) -> bool:
    words = [*one.around, *script.variables.expanded(one.command.words)]
    text = " ".join(words)
    return re.search(rf"--?{option}[= ]{value}\b", text) is not None


def of_lines(script: ParsedScript) -> Iterator[Found]:
    """Find settings that a script lacks."""
    if script.kind != "shell" or script.launches:
        options = [word for c in script.commands if c.words[:1] == ("set",) for word in c.words[1:]]
        options += script.lines[0].split()[1:] if script.lines[0].startswith("#!") else []
        if not any(re.match(r"-[a-z]*e", word) or word == "errexit" for word in options):
            yield Found("error-ignored", 1)
    real = [one for one in script.launches if not one.command.file]
    if real and "OMP_NUM_THREADS" not in script.text:
        yield Found("threads", real[0].command.line)
    text = "\n".join(line for line in script.lines if not line.startswith("#"))
    requeue = script.facts.requeue if script.facts else frozenset()
    saves = requeue and real and re.search("snapshot|checkpoint|resume", text, re.I)
    said = {word for _, words in script.directives for word in words}
    if saves and not said & requeue:
        yield Found("requeue", script.directives[0][0])


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


RULES: tuple[Callable[[ParsedScript], Iterator[Found]], ...] = (
    of_launches,
    of_variables,
    of_fallbacks,
    of_lines,
    of_commands,
    of_patterns,
)
