"""`python -I -m ddp_train.launch STEP SETTINGS [NUMBER]`: one node's part of a step of a job.

STEP is find (where this node is), preflight or training. SETTINGS is the file settings-RESTARTS.sh in the run's
folder, and NUMBER this node's number, found in the launcher's variables if it is left out.

Exit codes: those of the preflight or the training; 5 if this node cannot take part; 2 for a wrong command line.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..chips import UNUSABLE, check_chips
from ..errors import BAD_INPUT, TrainError
from ..flight import flight_variables
from ..stage.disk import TREE
from .end import run_child, take_sigterm
from .job import Run, cpus, read_run
from .nodes import Row, meet, own_row, same_host, this_host
from .strategies import strategy_variables, training

STEPS = ("find", "preflight", "training")
# From the host where the job was submitted, or of another folder.
_FOREIGN = ("XDG_RUNTIME_DIR", "OLDPWD")
# The only settings of Python that a job takes from its surroundings, as a verification and `envbuild run` do
# (envbuild/data/caller.toml): others decide which files are imported, or run code.
PYTHON_KEPT = (
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONFAULTHANDLER",
    "PYTHONHASHSEED",
    "PYTHONIOENCODING",
    "PYTHONNOUSERSITE",
    "PYTHONUNBUFFERED",
    "PYTHONUTF8",
    "PYTHONWARNINGS",
)
# pyxis and enroot's hook set these where the image has PYTORCH_VERSION: no rank has been started yet.
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Like `conda activate`; activation scripts are written for bash.
_ACTIVATE = 'for script in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do . "$script"; done >&2; exec "$0" "$@"'


def main(argv: Sequence[str]) -> int:
    """Run the step; returns its exit code, or does not return because it becomes the step's program."""
    if not (2 <= len(argv) <= 3 and argv[0] in STEPS):
        print(__doc__.partition("\n\n")[0], file=sys.stderr)
        return BAD_INPUT
    take_sigterm()
    run = None
    try:
        run = _staged(read_run(Path(argv[1])), sys.prefix)
        return _step(argv[0], run, *_number(run, argv[2] if argv[2:] else "", argv[0]))
    except TrainError as error:
        print(f"envbuild: node {this_host()}: {error.message}", file=sys.stderr)
        code = error.exit_code if error.exit_code == BAD_INPUT else UNUSABLE
        if run is not None:
            run.failed(code)
        return code


def _staged(run: Run, here: str) -> Run:
    """Return the run in the environment at `here`, if that is this node's own copy, which then stays until its end."""
    old = run.job.environment
    if not (old and os.path.realpath(here).endswith(TREE)):
        return run
    with suppress(OSError):
        held = os.open(here, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.set_inheritable(held, True)  # by exec

    def moved(text: str) -> str:
        return ":".join(
            here + entry[len(old) :] if f"{entry}/".startswith(f"{old}/") else entry for entry in text.split(":")
        )

    python, library_path = moved(run.job.python), moved(run.job.library_path)
    variables = {name: moved(value) for name, value in run.job.variables.items()}
    job = replace(run.job, python=python, environment=here, library_path=library_path, variables=variables)
    return replace(run, job=job)


def _number(run: Run, given: str, step: str) -> tuple[int, int]:
    """Return the numbers of this node, and of this process on the node. Raises TrainError."""
    job = run.job
    values = [given, *(os.environ.get(name, "") for name in job.number)]
    text = next((value for value in values if value), "")
    if not (text.isascii() and text.isdigit()):
        raise TrainError(f"{job.launcher} does not give this node a number")
    # Every other step starts one process on each node.
    each = job.nproc_per_node if job.strategy == "horovod" and step == "training" else 1
    if int(text) >= job.nodes * each:
        raise TrainError(f"{job.launcher} calls this process number {text}, but the job has {job.nodes * each}")
    return int(text) // each, int(text) % each


def _step(step: str, run: Run, number: int, local: int) -> int:
    job = run.job
    if job.chips and step != "preflight":
        check_chips(job.chips)
    rows = meet(run, number, writes=local == 0)
    if step == "find":
        return 0
    here, name = rows[number], this_host()
    if not same_host(here.name, name):
        if not job.auto_resume:
            raise TrainError(f"{job.launcher} calls this node number {number}, the number of {here.name} already")
        moved = own_row(run, number, rows[0].address)  # --auto-resume put this node in the place of another
        here = Row(name, moved.address, moved.interface)
    environment = variables(run, rows, here, number, os.environ)
    if step == "preflight":
        words = ["-m", "ddp_train.preflight", *job.check]
    else:
        environment.update(strategy_variables(run, rows, here, number, local))
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
    environment = {
        name: value
        for name, value in environ.items()
        if name not in (*_FOREIGN, *_RANKS) and (name in PYTHON_KEPT or not name.startswith("PYTHON"))
    }
    environment.update(
        ENVBUILD_NODE=str(number),
        ENVBUILD_NODES=str(job.nodes),
        ENVBUILD_HOSTS=" ".join(row.name for row in rows),
        ENVBUILD_ADDRESSES=" ".join(row.address for row in rows),
        ENVBUILD_ADDRESS=here.address,
        ENVBUILD_INTERFACE=here.interface,
        ENVBUILD_PORT=str(rows[0].port),
        ENVBUILD_RUN=str(run.folder),
        ENVBUILD_RUN_ID=run.id,
        GLOO_SOCKET_IFNAME=here.interface,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        PWD=str(run.folder.parent),
        # torchrun's folder for its ranks' errors; by default, it leaves one in /tmp.
        PET_LOG_DIR=str(run.folder / "torchrun"),
        PYTHONUNBUFFERED="1",
        PYTHONNOUSERSITE="1",
        LOGLEVEL="INFO",
    )
    environment.update(flight_variables(f"{run.file('flight')}-", job.gpu))
    if job.gpu:
        environment["NCCL_SOCKET_IFNAME"] = here.interface
    if "OMP_NUM_THREADS" not in job.variables:  # the site does not set the number of CPUs
        environment["OMP_NUM_THREADS"] = str(max(1, cpus() // job.nproc_per_node))
    environment.update(job.variables)
    return environment


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
