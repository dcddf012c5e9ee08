"""`python -I -m ddp_train.launch STEP SETTINGS [NUMBER]`: one node's part of a step of a job.

STEP is find (where this node is), preflight or training. SETTINGS is the file settings-RESTARTS.sh in the run's
folder, and NUMBER this node's number, found in the launcher's variables if it is left out.

Exit codes: those of the preflight or the training; 5 if this node cannot take part; 2 for a wrong command line.

Sources: torch.distributed.run's documentation; pytorch/pytorch issues 73656, 79388, 135712, 150532.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import BAD_INPUT, TrainError
from .end import run_child
from .job import Run, cpus, read_run
from .nodes import Row, meet, own_row, same_host, this_host

# The exit code for a node that a job cannot use, as envbuild's own.
UNUSABLE = 5
STEPS = ("find", "preflight", "training")
# From the host where the job was submitted, or of another environment than the verified one.
_FOREIGN = ("XDG_RUNTIME_DIR", "PYTHONHOME", "PYTHONPATH")
# pyxis and enroot's hook set these where the image has PYTORCH_VERSION: no rank has been started yet.
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Like `conda activate`; activation scripts are written for bash.
_ACTIVATE = 'for script in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do . "$script"; done >&2; exec "$0" "$@"'


def main(argv: Sequence[str]) -> int:
    """Run the step; returns its exit code, or does not return because it becomes the step's program."""
    if not (2 <= len(argv) <= 3 and argv[0] in STEPS):
        print(__doc__.partition("\n\n")[0], file=sys.stderr)
        return BAD_INPUT
    try:
        run = read_run(Path(argv[1]))
        return _step(argv[0], run, *_number(run, argv[2] if argv[2:] else "", argv[0]))
    except TrainError as error:
        print(f"envbuild: node {this_host()}: {error.message}", file=sys.stderr)
        return error.exit_code if error.exit_code == BAD_INPUT else UNUSABLE


def _number(run: Run, given: str, step: str) -> tuple[int, int]:
    """Return the numbers of this node, and of this process on the node. Raises TrainError."""
    job = run.job
    values = [given, *(os.environ.get(name, "") for name in job.number)]
    text = next((one for one in values if one), "")
    if not (text.isascii() and text.isdigit()):
        raise TrainError(f"{job.launcher} does not tell the number of this node")
    # Every other step starts one process on each node.
    each = job.nproc_per_node if job.strategy == "horovod" and step == "training" else 1
    if int(text) >= job.nodes * each:
        raise TrainError(f"{job.launcher} calls this process number {text}, and there are {job.nodes * each}")
    return int(text) // each, int(text) % each


def _step(step: str, run: Run, number: int, local: int) -> int:
    job = run.job
    rows = meet(run, number, writes=local == 0)
    if step == "find":
        return 0
    here, name = rows[number], this_host()
    if not same_host(here.name, name):
        if not job.auto_resume:
            raise TrainError(f"{job.launcher} calls this node number {number}, and that was {here.name} before")
        moved = own_row(run, number, rows[0].address)  # --auto-resume put this node in the place of another
        here = Row(name, moved.address, moved.interface)
    environment = variables(run, rows, here, number, os.environ)
    if step == "preflight":
        words = ["-m", "ddp_train.preflight", *job.check]
    else:
        environment.update(_strategy_variables(run, rows, here, number, local))
        words = training(run, rows, here, number)
    if job.library_path:
        environment["LD_LIBRARY_PATH"] = _before(job.library_path, environment.get("LD_LIBRARY_PATH"))
    os.chdir(run.folder.parent)
    command = _activated(run, environment, [job.python, *words])
    if step == "training" and job.signalled:
        return run_child(command, environment, run, number)
    os.execvpe(command[0], command, environment)
    return UNUSABLE  # for type checkers: exec does not return


def variables(run: Run, rows: Sequence[Row], here: Row, number: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every process: it knows all nodes and asks nobody again."""
    job = run.job
    found = {name: value for name, value in environ.items() if name not in (*_FOREIGN, *_RANKS)}
    found.update(
        ENVBUILD_NODE=str(number),
        ENVBUILD_NODES=str(job.nodes),
        ENVBUILD_HOSTS=" ".join(one.name for one in rows),
        ENVBUILD_ADDRESSES=" ".join(one.address for one in rows),
        ENVBUILD_ADDRESS=here.address,
        ENVBUILD_INTERFACE=here.interface,
        ENVBUILD_PORT=str(rows[0].port),
        ENVBUILD_RUN=str(run.folder),
        ENVBUILD_RUN_ID=run.id,
        GLOO_SOCKET_IFNAME=here.interface,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        PYTHONUNBUFFERED="1",
        PYTHONNOUSERSITE="1",
        LOGLEVEL="INFO",
    )
    if job.gpu:
        found["NCCL_SOCKET_IFNAME"] = here.interface
    if "OMP_NUM_THREADS" not in job.variables:  # the site does not set the number of CPUs
        found["OMP_NUM_THREADS"] = str(max(1, cpus() // job.nproc_per_node))
    found.update(job.variables)
    return found


def training(run: Run, rows: Sequence[Row], here: Row, number: int) -> list[str]:
    """Return the interpreter's arguments for the training."""
    job = run.job
    words = list(job.command)
    for option, name in job.run_files.items():
        words += [option, str(run.folder / name)]
    if job.strategy != "ddp":
        return words
    head = rows[0].address
    endpoint = job.endpoint or f"{f'[{head}]' if ':' in head else head}:{rows[0].port}"
    if job.endpoint:
        backend, conf = "etcd-v2", f"timeout={job.join_timeout_s}"
    else:
        # The batch script runs on the head, which is never replaced; a replacement may be the first node in the table.
        host = here.address == head if job.auto_resume else number == 0
        backend = "c10d"
        conf = f"is_host={int(host)},join_timeout={job.join_timeout_s},read_timeout={job.read_timeout_s}"
    start = ["-m", "torch.distributed.run", "--nnodes", str(job.nodes), "--nproc-per-node", str(job.nproc_per_node)]
    start += ["--max-restarts", str(job.max_restarts), "--rdzv-id", run.id, "--rdzv-backend", backend]
    start += ["--rdzv-endpoint", endpoint, "--rdzv-conf", conf, "--local-addr", here.address]
    # torchrun applies string.Template to the script's path and to its arguments.
    return start + [word.replace("$", "$$") for word in words]


def _strategy_variables(run: Run, rows: Sequence[Row], here: Row, number: int, local: int) -> dict[str, str]:
    """Return what horovodrun would set; a build with MPI asks MPI instead."""
    job = run.job
    if job.strategy != "horovod":
        return {}
    return {
        "HOROVOD_RANK": str(number * job.nproc_per_node + local),
        "HOROVOD_SIZE": str(job.nodes * job.nproc_per_node),
        "HOROVOD_LOCAL_RANK": str(local),
        "HOROVOD_LOCAL_SIZE": str(job.nproc_per_node),
        "HOROVOD_CROSS_RANK": str(number),
        "HOROVOD_CROSS_SIZE": str(job.nodes),
        "HOROVOD_HOSTNAME": here.name,
        "HOROVOD_GLOO_IFACE": here.interface,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rows[0].address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rows[0].port),
    }


def _activated(run: Run, environment: dict[str, str], command: list[str]) -> list[str]:
    """Activate the job's environment in `environment`, and return `command` so that it runs activated."""
    folder = run.job.environment
    if not folder:
        return command
    environment["PATH"] = _before(os.path.join(folder, "bin"), environment.get("PATH"))
    if not run.job.conda:
        environment["VIRTUAL_ENV"] = folder
        return command
    environment.update(CONDA_PREFIX=folder, CONDA_DEFAULT_ENV=folder, CONDA_SHLVL="1")
    scripts = Path(folder, "etc/conda/activate.d")
    return ["bash", "-c", _ACTIVATE, *command] if any(scripts.glob("*.sh")) else command


def _before(first: str, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else first


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
