"""Rules of `envbuild lint-job` for requested nodes, tasks, CPUs and GPUs, and for the ranks that use them."""

from __future__ import annotations

import posixpath
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import dropwhile, takewhile
from typing import Literal

from envbuild.jobcheck.lint.directives import option_values, whole_number
from envbuild.jobcheck.lint.launch import (
    ASKS,
    PREPARES,
    RANK_OPTIONS,
    STARTS,
    TRAINS,
    Launch,
    before_program,
    is_plain_training,
    is_program,
    starts_training,
)
from envbuild.jobcheck.lint.script import NOUNSET, PER_NODE, Fault, ParsedScript, option_set
from envbuild.jobcheck.lint.shell import CONTAINERS, LAUNCHERS, WORDS, Command

# Bindings that leave a task more than one core.
_FREE = r"(?:quiet,|verbose,|[qv],)?(?:no|map_|mask_|rank|sockets|ldoms|boards)"
_BOUND = re.compile(rf"(?:^| )(?:--cpus-per-task|--cpus-per-gpu|-c ?[\d$]|--cpu[-_]bind[= ]{_FREE})")
_UNBOUND = re.compile(_FREE, re.IGNORECASE)
_EMPTY = re.compile(r"\$(?:(SLURM_\w+)|\{(SLURM_\w+)\}|\(\(\s*(SLURM_\w+))")
_COUNTS = ("-n", "-np", "--np", "--ntasks")
_MPIRUN = frozenset(["mpirun", "mpiexec", "orterun"])
_ALL_GPUS = re.compile(r"\b(?:tf|tensorflow|keras|jax)\b", re.IGNORECASE)  # one process takes all GPUs
_COUNT = re.compile(
    r"(?:--gres[= ](?:\S{0,60},)?gpu:|--gpu[= ]|-gpu num=)(?:[a-zA-Z][\w.-]{0,40}:)?(\d{1,4}(?:/\w{1,9})?)"
)
_MOST = 10_000  # characters of a job's directives
_OTHER_STEPS = re.compile(r"eval|test|infer|predict|prep|process|convert|download|gen|setup", re.IGNORECASE)
_COMPUTES = re.compile(r"torch|horovod|cuda|nccl|deepspeed|ddp", re.IGNORECASE)
_TASKS = re.compile("|".join(sorted(WORDS["task_starts"])), re.MULTILINE)
_OPEN_MPI = re.compile(r"open-?mpi|\bompi|OMPI_|orterun|--(?:map-by|bind-to)\b|--?(?:mca|npernode)\b", re.IGNORECASE)
_SLOTS = re.compile(r"host|machinefile|oversubscribe|rankfile|:ppn", re.IGNORECASE)


def of_steps(script: ParsedScript) -> Iterator[Fault]:
    """Find srun steps without the job's CPUs."""
    asked = script.directive("--cpus-per-task", "-c")
    several = asked is not None and (whole_number(asked[1]) or 2) > 1
    free = any(_UNBOUND.match(value) for _, value in script.exported("SLURM_CPU_BIND"))
    if not (several and script.has_steps) or "SRUN_CPUS_PER_TASK" in script.text or free:
        return
    steps: list[Command] = []
    others: list[Command] = []
    for command in script.commands:
        if command.program.startswith("$") and len(command.words) == 1:  # eval $CMD
            command = replace(command, words=tuple(script.variables.expanded(command.words)) or command.words)
        serves = {"ray", "start"} <= set(command.words)
        step = (
            command.program == "srun"
            and not (command.started_by or command.file)
            and (serves or starts_training(command))
        )
        words = script.variables.expanded(command.words[1:])
        options = takewhile(lambda word: not STARTS.fullmatch(posixpath.basename(word)), words)
        step = step and "docker" not in words  # its daemon starts the container, which srun's options do not reach
        if step and "[@]}" not in "".join(command.words[:2]) and not _BOUND.search(" ".join(options)):
            steps.append(command)
        # A program of any other name may be the training.
        elif command.program == "srun" and _is_step(command) and not _BOUND.search(" ".join(words)):
            others.append(command)
    # Steps before the training often need one core.
    trainings = [
        command for command in steps if any(TRAINS.fullmatch(posixpath.basename(word)) for word in command.words)
    ]
    for srun in (trainings or steps or others)[-1:]:
        yield Fault("cpus-not-passed", srun.line)


def _is_step(command: Command) -> bool:
    """Return whether srun starts a program that is not known as a step before the training."""
    asks = {posixpath.basename(word) for word in command.words} & (
        ASKS | {"--pty", "-c", "-lc", "docker", "bash", "sh", "cd"}
    )
    return not (
        asks
        or command.started_by
        or command.file
        or command.words[-1].startswith("-")
        or "[@]}" in " ".join(command.words[1:2])
        or any(PREPARES.fullmatch(posixpath.basename(word)) for word in command.words)
    )


def of_cpus(script: ParsedScript) -> Iterator[Fault]:
    """Find torchruns with fewer CPUs than ranks."""
    cpus = script.facts.cpus(script.directives) if script.facts else None
    if cpus is None or script.undivided:
        return
    own = ("--cpus-per-task", "-c", "--cpus-per-gpu")
    started = [(launch.command, 0 if launch.option(*own) else _ranks(script, launch)) for launch in script.launches]
    # Without options they start a rank for each GPU.
    alone = {("accelerate", "launch"), ("deepspeed",)}
    known = {id(command) for command, _ in started}
    for command in script.commands:
        names = [posixpath.basename(word) for word in command.words]
        at = next((n for n in range(len(names)) if {tuple(names[n : n + 2]), (names[n],)} & alone), -1)
        begins = at == 0 or (names[:1] == ["srun"] and not _BOUND.search(" ".join(command.words[:at])))
        if at < 0 or not begins:
            continue
        asked = next(option_values(command.words, RANK_OPTIONS), "")
        started += [(command, whole_number(asked) or script.gpus)] * (id(command) not in known)
    threads = [(command.line, value) for command, value in script.exported("OMP_NUM_THREADS")]
    told_cpus = ("$SLURM_CPUS_PER_TASK", "${SLURM_CPUS_PER_TASK}", "$NCPUS")
    most = max((ranks for _, ranks in started), default=0)
    given = script.directive("--cpus-per-task", "-c") or not script.has_steps
    for line, value in threads[-1:] if given or most > 1 else ():
        each = cpus if value in told_cpus else whole_number(value) or 0
        if each > 1 and each * max(most, 1) > cpus and (most or script.gpus or script.trains):
            value = f"{most or 1} rank{'s' * (most > 1)} of {each} threads, {cpus} CPU{'s' * (cpus != 1)}"
            yield Fault("threads-many", line, value)
    for command, ranks in started:
        if ranks >= 2 * max(cpus, 1) and not command.file:
            # Sites may give each GPU some CPUs, where the job asks for none.
            certain = script.directive("--cpus-per-task", "-c", "--cpus-per-gpu") or not script.has_steps
            value = f"{ranks} ranks, {cpus} CPU{'s' * (cpus != 1)}"
            yield Fault("cpus-missing", command.line, value, level="" if certain else "hint")
            return
    trains = [command for command in script.trainings if not (command.file or _BOUND.search(" ".join(command.words)))]
    if script.gpus and cpus == 1 and trains and "num_workers=0" not in script.text:
        yield Fault("cpus-missing", trains[0].line, "1 CPU for a training and its data loaders", level="hint")


def _ranks(script: ParsedScript, launch: Launch) -> int:
    """Return the number of ranks that a torchrun starts on a node, 0 if unknown."""
    if launch.program == "accelerate launch":  # its --num-processes are those of all machines
        nodes = whole_number(launch.options.get("nnodes", "")) or (script.nodes[1] if script.nodes else 0)
        return (whole_number(launch.options.get("num-processes", "")) or 0) // nodes if nodes else 0
    value = re.sub(r":?-\w*$", "", launch.options.get("nproc-per-node", "").strip("\\${}"))
    if value in ("gpu", "auto", "SLURM_GPUS_ON_NODE"):
        return script.gpus
    if value == "SLURM_NTASKS_PER_NODE":
        return script.tasks
    return launch.ranks


def of_ranks(script: ParsedScript) -> Iterator[Fault]:
    """Find numbers of ranks that do not match the GPUs, and unused GPUs."""
    gpus, has_nproc = script.gpus, re.search("nproc", script.text, re.IGNORECASE) is not None
    shown = sorted((command.line, value) for command, value in script.exported("CUDA_VISIBLE_DEVICES"))
    for launch in script.launches:
        line = launch.command.line
        given = has_nproc or launch.program != "torchrun" or "nproc-per-node" in launch.options
        ranks = _ranks(script, launch) or int(not given)
        before = bisect_right(shown, line, key=lambda row: row[0])
        visible = shown[before - 1][1] if before else ""
        seen = len(visible.split(",")) if re.fullmatch(r"\d{1,2}(?:,\d{1,2}){0,15}", visible) else 0
        most = min(filter(None, (gpus, seen)), default=0)
        if not most:
            continue
        each = launch.option("--ppn", "-ppn", "--ntasks-per-node", "-npernode", "--npernode") == "1"
        one = (script.tasks <= 1 or not launch.launcher) and launch.launcher not in _MPIRUN
        alone = len(script.launches) == 1 and (each or one)
        if ranks > most:
            chosen: Literal["", "warning"] = "warning" if seen > gpus > 0 else ""  # GPUs of the script's own choice
            yield Fault("ranks-exceed-gpus", script.where("nproc", line), f"{ranks} ranks, {most} GPUs", level=chosen)
        elif 0 < ranks < most and (not seen or most == gpus) and alone and launch.complete:
            yield Fault("one-rank", line, f"{ranks} of {gpus}")
    tasks = [command for command in script.steps if command.program == "srun" and not command.file]
    own = re.compile(r"(?:^| )(?:-n|-N|--ntasks|--mps|--overlap|--gpu)")
    if (
        0 < gpus < script.tasks
        and not script.launches
        and tasks
        and "ntasks-per-gpu" not in script.text
        and not own.search(" ".join(tasks[-1].words))
    ):
        yield Fault("ranks-exceed-gpus", tasks[-1].line, f"{script.tasks} tasks, {gpus} GPUs", level="warning")
    for line, value in shown if script.facts and gpus > 0 and not script.whole_nodes else ():
        if re.fullmatch(r"\d{1,2}(?:,\d{1,2})*", value) and max(map(int, value.split(","))) >= gpus:
            yield Fault("device-missing", line, value, f"{gpus} GPU{'s' * (gpus > 1)}")
    fixed = [row for row in shown if script.facts and re.fullmatch(r"\d{1,2}(?:,\d{1,2})*", row[1])]
    yield from (Fault("devices-fixed", *row) for row in fixed[:1] if len({value for _, value in shown}) == 1)
    several = gpus > 1 or any(launch.ranks > 1 for launch in script.launches)
    exports = [(step.line, value) for step, value in script.exported("CUDA_VISIBLE_DEVICES") if not _for_one(step)]
    for line, value in exports if several and len({value for _, value in exports}) == 1 else ():
        if re.fullmatch(r"\d(?:,\d)*", value) and len(value.split(",")) in {1, *range(2, gpus)}:
            yield Fault("one-gpu-visible", line, value)
    if gpus > 1 and not script.launches and script.kind != "shell":
        plain = [command for command in script.commands if is_plain_training(command)]
        others = bool(script.steps)
        others |= any(command.program in ("deepspeed", "horovodrun", "accelerate") for command in script.commands)
        if script.tasks <= 1 == len(tasks) and not own.search(" ".join(tasks[0].words)):
            plain, others = [command for command in tasks if is_plain_training(_stepped(command))], False
        # With as many tasks as GPUs, a rank for each was meant; only srun would start them.
        meant = script.tasks == gpus and not tasks and not _ALL_GPUS.search(script.text)
        level: Literal["", "hint"] = "" if meant else "hint"  # else the program may take all GPUs itself
        known = plain
        plain = plain or [command for command in script.commands if is_program(command, _OTHER_STEPS)]
        if plain and not others:
            yield Fault("one-process", plain[-1].line, str(gpus), level=level if known else "hint")
    nodes = script.nodes[1] if script.nodes else 1
    steps = [step for step in script.trainings if step.program in ("srun", *_MPIRUN)]
    for command in steps if len(steps) == 1 and gpus and not (script.launches or steps[0].file) else ():
        asked = whole_number(next(option_values(before_program([*command.words]), _COUNTS), "")) or 0
        value = f"{asked} of {gpus * nodes}"
        odd = 0 < asked != gpus * nodes and (asked > 1 or command.program != "srun")
        if odd and "python" in " ".join(command.words):
            kind = "one-rank" if asked < gpus * nodes else "ranks-exceed-gpus"
            yield Fault(kind, command.line, value, program=command.program, level="hint")
    for command in script.commands:
        options = before_program([*command.words]) if command.program == "jsrun" else []
        in_set, ranks = (whole_number(next(option_values(options, (name,)), "1")) or 1 for name in ("-g", "-a"))
        if in_set > 1 and ranks == 1 and is_plain_training(_stepped(command)) and not command.file:
            yield Fault("one-process", command.line, str(in_set), level="hint")
    asked_ranks = [(step, _ranks_asked(script, step)) for step in script.commands if not step.file and script.gpus]
    for command, ranks in [row for row in asked_ranks if row[1]][:1] if not script.several else ():
        if ranks > gpus:
            yield Fault("ranks-exceed-gpus", command.line, f"{ranks} ranks, {gpus} GPUs", level="warning")
        elif ranks < gpus and sum(count > 0 for _, count in asked_ranks) == 1 and not shown:
            yield Fault("one-rank", command.line, f"{ranks} of {gpus}", program=command.program)


def _ranks_asked(script: ParsedScript, command: Command) -> int:
    """Return the number of ranks that accelerate, deepspeed or horovodrun is told to start, 0 if there is none."""
    if command.program not in ("accelerate", "deepspeed", "horovodrun"):
        return 0
    options = before_program(script.variables.expanded(command.words))
    return whole_number(next(option_values(options, (*RANK_OPTIONS, "-np", "--num-proc")), "")) or 0


def _for_one(command: Command) -> bool:
    """Return whether a command that sets variables only for itself is a single process."""
    return command.program.startswith("python") or command.program in ASKS


def _stepped(command: Command) -> Command:
    """Return the command that srun starts."""
    words = tuple(dropwhile(lambda word: not TRAINS.fullmatch(posixpath.basename(word)), command.words))
    return replace(command, words=words)


def of_requests(script: ParsedScript) -> Iterator[Fault]:
    """Find requests that do not give each node the resources that its ranks need."""
    words = [word for _, line in script.directives for word in line]
    nodes = script.nodes[1] if script.nodes else 1
    text = " ".join(words)
    of_job = script.directive("--gpus", "-G")
    whole_gpus = whole_number(of_job[1].rpartition(":")[2]) if of_job else None
    own = re.search(r"--(?:gpus-per-(?:node|task)|gres|exclusive|ntasks-per-gpu)|gpu:", text)
    if of_job and whole_gpus and nodes > 1 and not (own or script.undivided) and whole_gpus < 8 * nodes:
        yield Fault("gpus-uneven", of_job[0], of_job[1], str(nodes))
    asks = [(line, f"{' '.join(row)} ".replace("gpus-per-node", "gpu")) for line, row in script.directives]
    counts = {match[1]: line for line, row in asks if (match := _COUNT.search(row))}
    if len(counts) > 1:
        yield Fault("gpus-differ", max(counts.values()), " and ".join(counts))
    least = script.directive("--ntasks", "-n")
    if script.has_steps and least and 0 < (whole_number(least[1]) or 0) < nodes:
        yield Fault("nodes-reduced", least[0], least[1], str(nodes))
    total = script.directive("--ntasks", "-n") if script.has_steps else None
    many = (whole_number(total[1]) or 0) if total else 0
    if total and many > nodes > 1 and many % nodes:
        yield Fault("tasks-uneven", total[0], total[1], str(nodes))
    placed = script.directive("--nodes", "-N", *PER_NODE) or script.launchers_work
    if total and many > 1 and script.launches and not placed:
        yield Fault("tasks-spread", total[0], total[1])
    elif total and many > 1 and not placed and any(is_program(command, _OTHER_STEPS) for command in script.commands):
        yield Fault("tasks-spread", total[0], total[1], program="python", level="hint")
    given = script.directive(*PER_NODE, "--ntasks", "-n") if script.has_steps and script.trains else None
    if given and placed and script.tasks > 1 and not (_TASKS.search(script.code) or script.submits or script.texts):
        yield Fault("tasks-unused", given[0], str(script.tasks))
    chunks = re.search(r"\bselect=(\d{1,5}):\S{0,200}?\bngpus=(\d{1,3})", text)
    together = chunks is not None and int(chunks[1]) > 1 and 0 < int(chunks[2]) < 4
    starts = script.launches or script.launchers_work
    if together and starts and not re.search(r"scatter|excl|host=", text) and not script.is_cray:
        yield Fault("chunks-together", script.nodes[0] if script.nodes else 1)
    limited = (script.tasks or script.nodes) and "OMPI_MCA" not in script.text
    if script.has_steps and limited:
        every = whole_number(total[1]) if total and not script.nodes else None
        slots = every or max(script.tasks, 1) * nodes
        # Without a number of tasks, sites that give out whole nodes let each core be a slot.
        certain = every is not None or script.tasks > 0
        open_mpi = _OPEN_MPI.search(script.text)  # other launchers put several ranks on a core
        for command in script.commands:
            options = script.variables.expanded(command.words)
            asked = next(option_values(options, (*_COUNTS, "-c")), "") if command.program in _MPIRUN else ""
            if (whole_number(asked) or 0) > slots and not _SLOTS.search(" ".join(options)):
                value = f"{asked} ranks, {slots} slot{'s' * (slots != 1)}"
                yield Fault("slots-missing", command.line, value, level="" if open_mpi and certain else "warning")


def of_placement(script: ParsedScript) -> Iterator[Fault]:
    """Find steps that request more or fewer nodes than the job has, and ranks that no option distributes over nodes."""
    nodes = script.nodes[1] if script.nodes else 0
    computes = _COMPUTES.search(script.text) is not None
    asks = " ".join(word for _, row in script.directives for word in row)
    names = script.directive("--nodelist", "-w")
    listed = len(_expanded_hosts(names[1])) if names else 0
    if names and 0 < nodes < listed:
        yield Fault("nodelist-longer", names[0], str(listed), str(nodes))
    for command in script.commands:
        words = script.variables.expanded(command.words)
        if command.file:
            continue
        if command.program == "srun" and nodes and script.has_steps:
            asked = whole_number(next(option_values(before_program(words), ("--nodes", "-N")), "")) or 0
            if asked > nodes and not re.search(r"--(?:jobid|het-group)", " ".join(words)):
                yield Fault("step-exceeds-job", command.line, f"{asked} nodes", str(nodes))
            count = whole_number(next(option_values(words, ("--num_nodes", "--num-nodes")), ""))
            if count and count != nodes and not asked and starts_training(command):  # Lightning's, by convention
                yield Fault("nodes-differ", command.line, str(count), str(nodes), "the program", level="warning")
        if command.program == "srun" and script.has_steps and script.directives:
            yield from _step(script, command, before_program(words), asks)
        in_chunks = script.facts is not None and script.facts.chunks
        if command.program == "mpiexec" and in_chunks and nodes > 1 and len(asks) < _MOST:
            ranks = next(option_values(words, _COUNTS), "")
            placed = re.search(r"mpiprocs|ppn|perhost|ppr:|map-by|--?host|oversubscribe", f"{words}{asks}")
            each = whole_number(next(option_values(words, ("--ppn", "-ppn", "-perhost")), ""))
            if (whole_number(ranks) or 0) > nodes and starts_training(command) and script.gpus > 1 and not placed:
                yield Fault("ranks-unplaced", command.line, ranks, str(nodes))
            elif each and each > 1 and (whole_number(ranks) or each + 1) <= each and starts_training(command):
                yield Fault("idle-nodes", command.line, nodes=str(nodes), program="mpiexec")
            elif each and 1 < (whole_number(ranks) or 0) < each * nodes and starts_training(command):
                value = f"{ranks} of {each * nodes}"
                yield Fault("one-rank", command.line, value, program="mpiexec", level="hint")
        sets = next(option_values(before_program(words), ("-n", "--nrs", "-np")), "")
        alone = sets == "1" and nodes > 1 and command.program in ("jsrun", "ibrun") and not command.background
        if alone and starts_training(command):
            yield Fault("idle-nodes", command.line, nodes=str(nodes), program=command.program)
        if command.program == "jsrun" and computes:
            options = before_program(words)
            given = any(re.match(r"-g|--gpu_per_rs|-U|--erf_input|-S|--smpiargs", word) for word in options)
            trains = starts_training(command) and not set(words) & ASKS
            if trains and not given and not any(word.startswith("$") for word in options):
                yield Fault("jsrun-gpus", command.line)


def _step(script: ParsedScript, command: Command, options: list[str], asks: str) -> Iterator[Fault]:
    """Find a step of srun that asks for GPUs or tasks that the job does not have."""
    gpus = next(option_values(options, ("--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task")), "")
    # The command line may tell more, and some systems give out whole nodes.
    if re.search(r"[1-9]", gpus) and not (script.gpus or re.search(r"gpu|excl|tres|gres", asks)):
        yield Fault("step-exceeds-job", command.line, f"GPUs ({gpus})", "none", level="hint")
    tasks = whole_number(next(option_values(options, ("--ntasks", "-n")), "")) or 0
    each = whole_number((script.directive("--cpus-per-task", "-c") or (0, "1"))[1]) or 1
    most = max(script.tasks, 1) * max(1, script.nodes[1] if script.nodes else 1)
    if tasks > most * each and not re.search(r"excl|--overcommit|-O\b|--jobid", f"{asks} {options}"):
        level: Literal["warning", "hint"] = "warning" if script.tasks else "hint"
        yield Fault("step-exceeds-job", command.line, f"{tasks} tasks", str(most), level=level)


def _expanded_hosts(text: str) -> list[str]:
    """Return the hosts of a list in Slurm's short form, [] for a list with variables."""
    hosts: list[str] = []
    for name in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) if "$" not in text and len(text) < 1000 else ():
        match = re.fullmatch(r"([\w.-]+)\[([\d,-]+)\]", name)
        for part in match[2].split(",") if match else ("",):
            first, _, last = part.partition("-")
            size = int(last) - int(first) + 1 if last.isdecimal() and first.isdecimal() else 1
            hosts += [name] * min(max(size, 1), 10_000)
    return hosts


def of_optional_variables(script: ParsedScript) -> Iterator[Fault]:
    """Find variables of the scheduler that are not set, because the directive that sets them is missing."""
    optional = script.facts.optional if script.facts else {}
    unknown = WORDS["unknown_variables"] - script.values.keys() if script.has_steps else frozenset()
    for command in script.commands if unknown else ():
        names = [name for groups in _EMPTY.findall(" ".join(command.texts)) for name in groups if name in unknown]
        yield from (Fault("variable-unknown", command.line, name) for name in names[:1])
    unset = {name for name, own in optional.items() if name not in script.values and not script.directive(*own)}
    strict = option_set(script, NOUNSET)
    for command in script.commands if unset else ():
        if command.per_node or command.file or command.program in ("echo", "printf", "[", "[[", "test"):
            continue
        # OMP_NUM_THREADS and the like are then as if they were not set, unless set -u ends the job.
        rows = [row for name, row in command.assignments if strict or not name.endswith("_THREADS")]
        words = [*command.words, *(word for row in rows for word in row)]
        for match in _EMPTY.finditer(" ".join(words)):
            name = match[1] or match[2] or match[3]
            if name in unset:
                # Without any number, all of them stand on the command line.
                asks = script.nodes or script.tasks or script.gpus or script.directive("--cpus-per-task", "-c")
                value = f"{name} without {optional[name][0]}"
                yield Fault("option-variable", command.line, value, level="" if asks else "hint")
                return


def of_single_nodes(script: ParsedScript) -> Iterator[Fault]:
    """Find DeepSpeed launchers that are started on each node, so that each trains alone."""
    for command in script.commands if script.several and script.has_steps else ():
        text = " ".join(script.variables.expanded(command.words))
        started = command.program == "srun" and re.search(r"(?:^| )(?:\S*/)?deepspeed ", text)
        has_nodes = re.search(
            r"--(?:hostfile|num_nodes|no_ssh|node_rank|include|force_multi)|-H |-N ?1 |--nodes[= ]1 ", text
        )
        if started and not has_nodes and not (command.file or "DLTS_HOSTFILE" in script.text):
            yield Fault("nodes-missing", command.line, nodes=script.several, program="deepspeed", level="warning")
            return


def of_idle_nodes(script: ParsedScript) -> Iterator[Fault]:
    """Find trainings without torchrun that use only the first of several nodes."""
    if script.nodes is None or script.nodes[1] < 2 or script.launches or script.launchers_work:
        return
    for command in script.commands:
        hosts = re.search(r"(?:^| )(?:-H|--hosts?|-?-hostfile|--host-discovery-script|--mpi)", " ".join(command.words))
        alone = command.program == "horovodrun" and script.has_steps and not hosts
        alone |= command.program == "deepspeed" and not re.search(r"hostfile|-H |--launcher", script.text)
        known = alone or is_plain_training(command)
        inside = (
            CONTAINERS & {command.program} and not LAUNCHERS & {*command.words} and is_plain_training(_stepped(command))
        )
        if (known or is_program(command, _OTHER_STEPS) or inside) and not (command.file or "ray" in script.passed):
            level: Literal["", "hint"] = "" if known else "hint"
            yield Fault("idle-nodes", command.line, nodes=str(script.nodes[1]), program=command.program, level=level)
            return
