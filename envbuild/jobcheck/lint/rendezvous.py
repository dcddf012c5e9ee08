"""Rules for torchruns: the nodes that start them, their numbers, and the rendezvous endpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from envbuild.jobcheck.lint.directives import option_values, whole_number
from envbuild.jobcheck.lint.launch import RANK_OPTIONS, Launch, before_program, starts_training
from envbuild.jobcheck.lint.script import PER_NODE, Fault, ParsedScript
from envbuild.jobcheck.lint.shell import LAUNCHERS

LOCAL = re.compile(r"^\[?(localhost|127(\.\d+){3}|::1)\]?(:|$)")
OF_RENDEZVOUS = re.compile(
    r"(?:PET_)?(?:MASTER_(?:ADDR|HOST|IP|NODE)|RDZV_\w+)|HEAD_?(?:NODE|ADDR|IP|HOST)\w*", re.IGNORECASE
)
_RANK = re.compile(
    r"\$\{?(?:SLURM_(?:NODEID|PROCID|LOCALID)|PMI_RANK|PMIX_RANK|OMPI_COMM_WORLD_(?:LOCAL_)?RANK|PALS_(?:LOCAL_)?RANKID)\b"
)
_RANK_OPTION = re.compile(r"--(?:node|machine)[-_]rank(?:=(.*))?", re.DOTALL)
_RANK_NAMES = frozenset(["RANK", "LOCAL_RANK", "NODE_RANK", "MACHINE_RANK", "GROUP_RANK"])
_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_READS = frozenset(["read", "mapfile", "readarray", "source", ".", "eval"])
_ENVIRONMENT = re.compile(r"bin/activate$|^activate$|conda\.sh$|etc/profile|bashrc$|modules\.sh$")
_MOST_LINES = 100  # of one command
# Variables of schedulers and of users' environments.
GIVEN = re.compile(
    r"(?:SLURM|SALLOC|PBS|LSB|PMI|OMPI|NQSII|NQSV|COBALT|PJM|OAR|FLUX)\w*|HOSTNAME|HOME|USER|E?UID|PWD|RANDOM|SECONDS|OPTARG|PET_\w+"
)
# A list of nodes, whole or in Slurm's short form, and what takes one name out of it.
_LIST = re.compile(r"\bSLURM_(?:JOB_)?NODELIST\b|\bPBS_NODEFILE\b|scontrol show hostnames?\b")
_SHORT = re.compile(r"\bSLURM_(?:JOB_)?NODELIST\b")
_EXPANDS = re.compile(r"scontrol|hostlist|nodeset|python|sed|perl|expand|\btr\b|\\?\[")
_MOST_ARRAYS = 20
_HOSTS = re.compile(r"^\$\(\s*scontrol show hostnames?\b[^|]*\)$")
_QUOTED = re.compile(r"\s*(?:declare -a )?(\w+)=\(\s*\"(\$[^\"]*(?:\"[^\"]*\"[^\"]*)?)\"\s*\)\s*(?:#.*)?$")
_FIRST = re.compile(r"head|tail|sed|perl|awk|cut|grep|read|\[0\]|python|-m ?1")
_HOSTNAME = re.compile(r"\$\(\s*(?:hostname(?:\s+-[fs])?|uname -n)\s*\)|\$\{?HOSTNAME\b")
_RANDOM = re.compile(r"\$\{?RANDOM\b|\$\(\s*(?:date|uuidgen|openssl|od|mktemp)\b")
_LITERAL_PORT = re.compile(r":(\d{2,5})$")
_PLACES = frozenset(["rdzv-endpoint", "master-addr", "master-port", "standalone", "rdzv-conf", "config-file"])
_FUNCTION = re.compile(r"[a-z]+(?:_[a-z]+)+")
_PORTS = re.compile(r"--(?:main_process_port|main-process-port|master_port|config)|MASTER_PORT")
_PORT_OPTIONS = ("--main_process_port", "--main-process-port", "--master_port")
_LITERAL_HOST = re.compile(r"[a-z][\w.-]+(?::.*)?", re.DOTALL)


def of_variables(script: ParsedScript) -> Iterator[Fault]:
    """Find faults in the values of MASTER_ADDR, and of variables for interfaces and providers."""
    for variable in ("MASTER_ADDR", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "RDZV_ENDPOINT"):
        for command, value in script.exported(variable):
            if LOCAL.match(value) and script.several:
                yield Fault("localhost-endpoint", command.line, value, script.several, level="warning")
            elif command.per_node and script.several and re.search(r"\$\(hostname\b|\$\{?HOSTNAME\b", value):
                yield Fault("endpoint-per-node", command.line, value, level="warning")
    read = {
        name: re.search(rf"\$\{{?{name}\b|\b(?:export|declare)\b[^\n]{{0,99}}\b{name}\b", script.text)
        for name in ("MASTER_PORT", "PET_MASTER_PORT")
    }
    given = any("master-port" in launch.options for launch in script.launches)
    for variable in read:
        for command, value in script.exported(variable):
            default = re.fullmatch(r"\$\{MASTER_PORT:?-(\d+)\}", value)
            value = default[1] if default and len(script.values.get(variable, ())) == 1 else value
            alike = "SLURM_ARRAY_JOB_ID" in value and "TASK_ID" not in value  # one number for all tasks of an array
            if alike and not script.whole_nodes:
                yield Fault("fixed-port", command.line, value)
            if value.isdecimal() and not (given or script.whole_nodes) and (command.words or read[variable]):
                own = script.kind == "shell" and not script.several  # on a host of one's own
                yield Fault("fixed-port", command.line, value, level="hint" if own else script.doubtful)


def of_addresses(script: ParsedScript) -> Iterator[Fault]:
    """Find endpoints with unsuitable names or several addresses, and endpoints that are never set."""
    # enroot's hook 50-slurm-pytorch.sh sets MASTER_ADDR and MASTER_PORT in containers of pyxis.
    elsewhere = "--container-" in script.text or sets_elsewhere(script)
    loops = set(re.findall(r"\bfor (\w+) in\b|\$\{(\w+):?=", script.text))
    set_here = {name for names in loops for name in names} | script.values.keys()
    for launch in script.launches if not elsewhere and script.kind != "shell" else ():
        if "standalone" in launch.options:
            continue
        for name in ("rdzv-endpoint", "master-addr"):
            value = re.sub(r"'[^']*'", "", launch.options.get(name, ""))  # awk's own variables
            for variable in re.findall(r"\$\{?([A-Z]\w*)(?!\w|:[-=])", value):
                known = variable in set_here or GIVEN.fullmatch(variable)
                if variable.isupper() and not known:  # others are of a script that is left out here
                    yield Fault("endpoint-unset", launch.command.line, variable)


def sets_elsewhere(script: ParsedScript) -> bool:
    """Return whether the script sources a file that may set variables, other than Python's or conda's activation."""
    return any(
        command.program in _READS and not any(_ENVIRONMENT.search(word) for word in command.words[1:])
        for command in script.commands
    )


def of_endpoints(script: ParsedScript) -> Iterator[Fault]:
    """Find torchruns without an endpoint, endpoints that are lists of nodes, and endpoints set only in a comment."""
    by_hand = script.kind == "shell" and not script.everywhere
    for launch in script.launches if script.several and not (script.sets_options or script.everywhere) else ():
        number = whole_number(launch.options.get("nnodes", "").partition(":")[0]) or (script.nodes or (0, 0))[1]
        given = launch.options.keys() & {"rdzv-endpoint", "master-addr", "standalone", "config-file", "rdzv-conf"}
        if launch.options.get("rdzv-backend", "").startswith("c10d"):  # it reads no --master-addr
            given -= {"master-addr"}
        if launch.waits and number > 1 and not given and launch.complete:
            at = launch.command.line
            yield Fault("endpoint-missing", at, nodes=script.several, program=launch.program)
        numbered = launch.options.keys() & {"node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-conf"}
        static = "master-addr" in launch.options and launch.program == "torchrun" and launch.launcher and not by_hand
        if launch.waits and number > 1 and static and launch.complete and not numbered:
            yield Fault("node-rank-missing", script.where("nnodes", launch.command.line), nodes=script.several)
    for command in script.commands if script.several else ():
        for name, words in command.assignments:
            value = words[0] if len(words) == 1 else ""
            listed = OF_RENDEZVOUS.fullmatch(name) and not name.lower().endswith(("s", "list")) and _LIST.search(value)
            plain = f"{name}=(" not in "".join(script.lines[command.line - 1 : command.line]).replace(" ", "")
            wrong = not _EXPANDS.search(value) if _SHORT.search(value) else False
            parts = len(_SHORT.findall(value)) > 1  # of names that the author knows
            if listed and plain and not parts and (wrong or not (_FIRST.search(value) or "|" in value or "%" in value)):
                yield Fault("endpoint-list", command.line, name)
    yield from _quoted_lists(script)
    commented = any(re.match(r"\s*#.*\bMASTER_ADDR=", line) for line in script.lines)
    code = script.code
    named = re.search(r"MASTER_ADDR|://|\b(?:COMM|INIT|DIST|SYNC)_\w*=", code)
    provided = script.launches or named or sets_elsewhere(script)
    if script.several and commented and not provided:
        # Some programs ask Slurm themselves.
        yield from (Fault("endpoint-unset", step.line, "MASTER_ADDR", level="hint") for step in script.steps[-1:])


def _quoted_lists(script: ParsedScript) -> Iterator[Fault]:
    """Find arrays whose only element is the whole list of hosts, used as if the first element were one host."""
    lists = {name for name, words in script.values.items() if any(_HOSTS.search(word) for word in words)}
    looked = 0
    for number, line in enumerate(script.lines if script.several else (), 1):
        match = _QUOTED.match(line)
        if not match or not (_HOSTS.search(match[2]) or ((name := _NAME.fullmatch(match[2])) and name[1] in lists)):
            continue
        looked += 1
        if looked > _MOST_ARRAYS:
            return
        if re.search(rf"\$(?:\{{{match[1]}(?:\[0\])?\}}|{match[1]}\b)", "\n".join(script.lines[number:])):
            yield Fault("endpoint-list", number, match[1])


def of_numbers(script: ParsedScript) -> Iterator[Fault]:
    """Find node ranks and counts that are expanded on the batch host, and a world size unequal to the tasks."""
    # A script without a number of nodes gets it on sbatch's command line.
    if script.kind == "shell":
        return
    if script.nodes is None or script.nodes[1] > 1:
        yield from _node_ranks(script)
    nodes = script.nodes[1] if script.nodes else 1
    total = script.tasks * nodes
    steps = [command for command in script.steps if not command.file]
    if script.launches or not steps or total < 2:
        return
    for command in script.commands:
        for name, words in command.assignments:
            here = not (command.per_node or command.file or command.function) and command.line < steps[-1].line
            match = _RANK.match(" ".join(words)) if here and name in _RANK_NAMES else None
            if match and (name in ("RANK", "LOCAL_RANK") or script.several):
                # Most programs ask the scheduler's own variables.
                level: Literal["warning", "hint"] = "warning" if name in ("RANK", "LOCAL_RANK") else "hint"
                yield Fault("node-rank", command.line, match[0].strip("${"), level=level)
            sets = here and name == "WORLD_SIZE" and "export" in script.lines[command.line - 1]
            size = whole_number(" ".join(words)) if sets else None
            if size is not None and size not in (total, nodes * script.gpus):  # a task can start more ranks
                yield Fault("world-size", command.line, f"WORLD_SIZE={size}, {total} tasks", level="warning")
    plain = steps[-1].program == "srun" and "python" in " ".join(steps[-1].words) and "MASTER_ADDR" in script.values
    if plain and not re.search(r"RANK|WORLD_SIZE=|PROCID|LOCALID|lightning|\bray\b", script.text):
        yield Fault("rank-unset", steps[-1].line)


def of_order(script: ParsedScript) -> Iterator[Fault]:
    """Find torchruns that are started one after the other, although each waits for all."""
    begun = False
    for launch in script.launches:
        begun |= launch.command.background
        if script.several and launch.waits and not begun and not launch.command.file and _blocks(launch):
            yield Fault("one-after-another", launch.command.line, nodes=script.several)
            return


def _blocks(launch: Launch) -> bool:
    return (launch.launcher == "ssh" and "-f" not in launch.around) or (
        launch.launcher == "srun"
        and bool(launch.option("--nodelist", "-w"))
        and launch.option("--nodes", "-N") in ("", "1")
    )


def _node_ranks(script: ParsedScript) -> Iterator[Fault]:
    seen: set[int] = set()
    for command in script.commands:
        if command.per_node or command.file or script.everywhere:
            continue
        words = script.variables.expanded(command.words)
        for number, word in enumerate(words):
            option = _RANK_OPTION.fullmatch(word)
            value = (option[1] or "".join(words[number + 1 : number + 2])) if option else ""
            match = _RANK.search(value)
            line = script.where(word.partition("=")[0], command.line) if option else 0
            if (
                match
                and line not in seen
                and not (script.escapes(match[0]) or _kept(script, command.line, line, match[0]))
            ):
                seen.add(line)
                kind = "node-rank-unused" if "c10d" in " ".join(words) else "node-rank"
                # Without a launcher here, one may start this script on each node.
                level: Literal["", "warning"] = "" if words[0] in LAUNCHERS else "warning"
                yield Fault(kind, line, match[0].strip("${"), level="" if kind == "node-rank-unused" else level)


def _kept(script: ParsedScript, begun: int, line: int, text: str) -> bool:
    """Return whether `text` in line `line` of a command that began in line `begun` is in single quotes."""
    first = min(begun, line)
    while first > max(1, line - _MOST_LINES) and script.lines[first - 2].endswith("\\"):
        first -= 1
    at = script.lines[line - 1].find(text)
    before = "\n".join([*script.lines[first - 1 : line - 1], script.lines[line - 1][: max(at, 0)]])
    quote = ""
    for character in re.sub(r"\\.", "", before, flags=re.DOTALL) if at >= 0 else "":
        if character == quote:
            quote = ""
        elif character in "'\"" and not quote:
            quote = character
    return quote == "'"


def of_launches(script: ParsedScript) -> Iterator[Fault]:
    """Find torchruns that start on the head only or twice per node, and faults of their endpoint, run ID and port."""
    # A step on one node in a job of several, or an evaluation after the training, is intentional.
    covered = any(launch.waits and _on_nodes(script, launch) for launch in script.launches)
    elsewhere = sets_elsewhere(script)
    for launch in script.launches:
        # A function of a file that the script reads may start its words on each node.
        if not (elsewhere and _FUNCTION.fullmatch(launch.command.program) and not _on_nodes(script, launch)):
            yield from _nodes(script, launch, covered)
        yield from _endpoint(script, launch)
        if script.several and "standalone" not in launch.options:
            yield from _identity(script, launch)
        if launch.launcher == "srun":
            yield from _doubled(script, launch)
        if launch.launcher in ("mpirun", "orterun"):
            words = [*launch.around, *script.variables.expanded(launch.command.words)]
            if not re.search(r"--?bind-to[= ]none\b", " ".join(words)):
                yield Fault("mpi-binding", launch.command.line)


def _nodes(script: ParsedScript, launch: Launch, covered: bool) -> Iterator[Fault]:
    """Find nodes without a torchrun, and torchruns that do not form one job."""
    several, line, options = script.several, launch.command.line, launch.options
    # An explicit node rank means that it is started by hand on each node.
    by_hand = script.kind == "shell" and "node-rank" in options
    numbered = re.fullmatch(r"\$\{?\d\}?", options.get("node-rank", ""))  # submitted once for each node
    alone = not (launch.command.file or by_hand or _on_nodes(script, launch))
    if several and alone and launch.waits:
        fault = "head-only" if script.kind != "shell" or script.launchers_work else "started-here"
        yield Fault(fault, line, nodes=several)
    elif script.nodes and several and alone and not (covered or any(line < step.line for step in script.steps)):
        yield Fault("idle-nodes", line, nodes=several)
    step = launch.option("--nodes", "-N")
    if not launch.waits and (alone or covered or step == "1"):
        return
    if several and "standalone" in options:
        yield Fault("standalone", script.where("--standalone", line), nodes=several)
    meets = options.keys() & {"rdzv-endpoint", "master-addr"} and not {"nnodes", "standalone"} & options.keys()
    if several and meets and launch.program == "torchrun" and not script.sets_options:
        yield Fault("nodes-missing", line, nodes=several)
    own = {"nnodes", "standalone", "rdzv-endpoint", "master-addr", "rdzv-conf", "config-file"} & options.keys()
    by = launch.launcher == "srun" and launch.program == "torchrun" and script.has_steps and launch.complete
    if script.nodes and several and by and not (own or step or script.sets_options):
        yield Fault("nodes-missing", line, nodes=several, level="warning")
    nodes = options.get("nnodes", "").rpartition(":")[2]
    known_nodes = script.nodes[1] if script.nodes and not numbered and nodes not in script.choices else 0
    asked = step if whole_number(step) is not None else str(script.nodes[1] if script.nodes else "")
    if known_nodes and step != "1" and whole_number(nodes) not in (None, whole_number(asked)):
        yield Fault("nodes-differ", script.where("nnodes", line), nodes, asked)
    elif known_nodes and step == "1" and (whole_number(nodes) or 0) > known_nodes:  # a step for each node
        yield Fault("nodes-differ", script.where("nnodes", line), nodes, str(known_nodes))


def _on_nodes(script: ParsedScript, launch: Launch) -> bool:
    """Return whether a torchrun runs on nodes: by each of them, a launcher, or a function or file that one starts."""
    function = launch.command.function
    return script.everywhere or launch.launcher != "" or (bool(function) and function in script.passed)


def _endpoint(script: ParsedScript, launch: Launch) -> Iterator[Fault]:
    given = [(n, launch.options[n]) for n in ("rdzv-endpoint", "master-addr") if n in launch.options]
    ports: dict[str, int] = {}
    for name, value in given:
        raw = script.where(name.replace("-", "_"), launch.command.line)
        at = script.where(name, launch.command.line) if raw == launch.command.line else raw
        fewest, _, most = launch.options.get("nnodes", "").partition(":")
        if LOCAL.match(value) and fewest == "1" and most in ("", "1"):
            pass  # told to be a job of one node
        elif LOCAL.match(value) and script.several:
            yield Fault("localhost-endpoint", at, value, script.several)
        elif LOCAL.match(value) and most not in ("", fewest):
            yield Fault("localhost-endpoint", at, value, most, level="warning")
        elif script.several and (name_of_host := _HOSTNAME.search(value)):
            per_node = _there(script, launch, name_of_host[0])
            yield Fault("endpoint-per-node" if per_node else "hostname-endpoint", at, name_of_host[0])
        if match := _LITERAL_PORT.search(_default(script, value)):
            ports.setdefault(match[1], at)
    if not (ports or {"rdzv-endpoint", "standalone"} & launch.options.keys()):
        ports = {_default(script, launch.options.get("master-port", "")): launch.command.line}
    yield from (Fault("port-invalid", at, port) for port, at in ports.items() if (whole_number(port) or 0) > 65535)
    for port, at in ports.items() if not (script.whole_nodes or launch.command.file) else ():
        if port.isdecimal() and port != "0":
            alone = script.kind == "shell" and not script.several  # on a host of one's own
            yield Fault("fixed-port", script.where(port, at), port, level="hint" if alone else script.doubtful)
    own = launch.options.keys() & _PLACES
    alone = script.kind != "shell" and launch.program != "tune run" and not (script.several or script.whole_nodes)
    if alone and script.gpus and not own and launch.complete and not script.sets_options:
        yield Fault("fixed-port", launch.command.line, "29500 (older torchruns' default)", level=script.doubtful)


def _default(script: ParsedScript, value: str) -> str:
    """Return `value` with a variable that only the user's environment sets replaced by its default."""

    def filled(match: re.Match[str]) -> str:
        own = " ".join(script.values.get(match[1], ()))
        port = re.fullmatch(rf"\$\{{{match[1]}:?[-=](\d+)\}}", own) or re.fullmatch(r"\$\{\D\w*:?[-=](\d+)\}", match[0])
        return port[1] if port else match[0]

    return re.sub(r"\$\{?(\w+)(?::?[-=]\d+)?\}?$", filled, value)


def _identity(script: ParsedScript, launch: Launch) -> Iterator[Fault]:
    value = launch.options.get("rdzv-id", "")
    name = "rdzv_id" if script.where("rdzv_id", 0) else "rdzv-id"
    at = script.where(name, launch.command.line)
    random = _RANDOM.search(value)
    if random and _there(script, launch, random[0]):
        yield Fault("run-id-per-node", at, value)
    elif random or (value and "$" not in value):
        yield Fault("run-id", at, value)
    if "rdzv-endpoint" in launch.options and not launch.command.file:
        given = "local-addr" in launch.options or "is_host" in launch.options.get("rdzv-conf", "")
        if not given and not script.launches[0].options.get("rdzv-backend", "").startswith("etcd"):
            yield Fault("local-address", launch.command.line)


def _there(script: ParsedScript, launch: Launch, text: str) -> bool:
    """Return whether the variable in `text`, part of a torchrun's words, is expanded on each node."""
    # The value of a variable that the batch script sets is the same on each node.
    own = any(text in word for word in launch.command.words) or text in script.set_on_nodes
    return launch.launcher != "" and ((launch.command.per_node and own) or script.escapes(text))


def _doubled(script: ParsedScript, launch: Launch) -> Iterator[Fault]:
    tasks = launch.option("--ntasks", "-n")
    nodes = launch.option("--nodes", "-N") or str(script.nodes[1] if script.nodes else "")
    own = launch.option("--nodes", "-N", *PER_NODE)
    every = None if tasks or own or script.directive(*PER_NODE) else script.directive("--ntasks", "-n")
    most, least = whole_number(nodes), whole_number(every[1] if every else tasks)
    if most is not None and least is not None and least <= most:
        placed = any(re.match(r"-w|--nodelist|-r$|--relative", word) for word in launch.around)
        if least < most and launch.waits and not placed:
            yield Fault("tasks-missing", launch.command.line, str(least), nodes)
        return
    # The value of another variable is unknown; variables with the number of tasks match the directive.
    if "$" in tasks and not re.search(r"SLURM_(?:NTASKS|NPROCS)", tasks):
        return
    if launch.option(*PER_NODE) == "1":
        return
    given = script.directive(*PER_NODE, "--ntasks", "-n")
    ranks = launch.options.get("nproc-per-node", "").strip("\\${}")
    if given and script.tasks > 1:
        yield Fault("tasks-per-node", given[0], str(script.tasks))
    elif given and given[1].startswith("$") and given[1].strip("${}") == ranks:
        yield Fault("tasks-per-node", given[0], given[1], level="warning")


def of_default_ports(script: ParsedScript) -> Iterator[Fault]:
    """Find launchers that use the same port in every job, in jobs that may share their node."""
    if script.kind == "shell" or script.several or script.whole_nodes or script.gpus < 1 or script.sets_options:
        return
    known = {id(launch.command) for launch in script.launches}
    for command in script.commands:
        launches = command.program == "deepspeed" or (
            command.program == "accelerate" and command.words[1:2] == ("launch",)
        )
        words = script.variables.expanded(command.words)
        ranks = next(option_values(words, RANK_OPTIONS), "")
        port = next(option_values(words, _PORT_OPTIONS), "")
        if launches and port.isdecimal() and port != "0" and not (command.file or id(command) in known):
            yield Fault("fixed-port", command.line, port, level=script.doubtful)
            return
        exempt = script.gpus < 2 or _PORTS.search(" ".join(before_program(words[1:]))) or "MASTER_PORT" in script.text
        if launches and not (command.file or exempt or whole_number(ranks) == 1) and starts_training(command):
            yield Fault("fixed-port", command.line, f"29500 ({command.program}'s default)", level=script.doubtful)
            return


def of_literal_hosts(script: ParsedScript) -> Iterator[Fault]:
    """Find endpoints at a fixed host in jobs that determine the head node but do not use it."""
    for launch in script.launches if script.several and "scontrol show hostname" in script.text else ():
        for name in ("rdzv-endpoint", "master-addr"):
            host = launch.options.get(name, "")
            if _LITERAL_HOST.fullmatch(host) and not host.startswith("localhost"):
                yield Fault("endpoint-fixed", script.where(host[:20], launch.command.line), host.partition(":")[0])
