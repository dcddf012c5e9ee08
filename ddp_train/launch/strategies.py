"""The command that starts the training on a node, for each strategy of a job.

Accelerate's and DeepSpeed's launchers are started by their modules: `accelerate launch` and `deepspeed --no_ssh` run
the same ones. `deepspeed` itself would need a hostfile for more than one node, and a SIGTERM ends it alone: it leaves
its ranks running.

Sources: torch.distributed.run's documentation; pytorch/pytorch issues 73656, 79388, 135712, 150532; accelerate 1.15,
commands/launch.py and utils/launch.py, prepare_multi_gpu_env; DeepSpeed 0.19, launcher/runner.py and
launcher/launch.py; Horovod, runner/gloo_run.py.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence

from .job import Run
from .nodes import Row

_TRAINER = ["-m", "ddp_train"]


def training(run: Run, rows: Sequence[Row], here: Row, number: int) -> list[str]:
    """Return the interpreter's arguments for the training."""
    job = run.job
    words = list(job.command)
    for option, name in job.run_files.items():
        words += [option, str(run.folder / name)]
    if job.strategy == "ddp":
        return _torchrun(run, rows, here, number) + _literal(words)
    if job.strategy == "accelerate":
        return _accelerate(run, rows, here, number) + _program(_literal(words))
    if job.strategy == "deepspeed":
        # The bundled trainer has no option --local_rank, which DeepSpeed gives to programs.
        extra = ["--no_local_rank"] if words[:2] == _TRAINER else []
        return _deepspeed(run, rows, here, number) + extra + _program(words)
    return words


def strategy_variables(run: Run, rows: Sequence[Row], here: Row, number: int, local: int) -> dict[str, str]:
    """Return the variables that the strategy's launcher or its ranks need; `local` counts processes on this node."""
    job = run.job
    if job.strategy == "accelerate":
        # torchrun's options that `accelerate launch` lacks. It reads their defaults from these.
        return {"PET_RDZV_ID": run.id, "PET_RDZV_ENDPOINT": _endpoint(rows), "PET_LOCAL_ADDR": here.address}
    if job.strategy == "deepspeed":  # its launcher does not tell ranks these two
        return {"LOCAL_WORLD_SIZE": str(job.nproc_per_node), "GROUP_RANK": str(number)}
    if job.strategy == "horovod":  # as horovodrun does; a build with MPI asks MPI instead
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
    return {}


def _torchrun(run: Run, rows: Sequence[Row], here: Row, number: int) -> list[str]:
    job = run.job
    endpoint = job.endpoint or _endpoint(rows)
    if job.endpoint:
        backend, conf = "etcd-v2", f"timeout={job.join_timeout_s}"
    else:
        backend, conf = "c10d", _conf(run, rows, here, number)
    start = ["-m", "torch.distributed.run", "--nnodes", str(job.nodes), "--nproc-per-node", str(job.nproc_per_node)]
    start += ["--max-restarts", str(job.max_restarts), "--rdzv-id", run.id, "--rdzv-backend", backend]
    return [*start, "--rdzv-endpoint", endpoint, "--rdzv-conf", conf, "--local-addr", here.address]


def _accelerate(run: Run, rows: Sequence[Row], here: Row, number: int) -> list[str]:
    """Return the options of `accelerate launch`, which runs torchrun's agent itself with --multi_gpu, on CPUs too.

    Without it, a node with one rank would train alone.
    """
    job = run.job
    start = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", str(job.nodes)]
    start += ["--num_processes", str(job.nodes * job.nproc_per_node), "--machine_rank", str(number)]
    start += ["--main_process_ip", _bracketed(rows[0].address), "--main_process_port", str(rows[0].port)]
    start += ["--max_restarts", str(job.max_restarts), "--rdzv_backend", "c10d"]
    return [*start, "--rdzv_conf", _conf(run, rows, here, number)]


def _deepspeed(run: Run, rows: Sequence[Row], here: Row, number: int) -> list[str]:
    job = run.job
    each: list[int | str] = list(range(job.nproc_per_node))
    world = {row.address: each for row in rows}
    # The launcher sets CUDA_VISIBLE_DEVICES to this list: GPUs of other jobs must not get into it.
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if job.gpu and len(given) >= job.nproc_per_node and all(given):
        world[rows[number].address] = list(given[: job.nproc_per_node])
    info = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    start = ["-m", "deepspeed.launcher.launch", "--world_info", info, "--node_rank", str(number)]
    return [*start, "--master_addr", rows[0].address, "--master_port", str(rows[0].port)]


def _program(words: list[str]) -> list[str]:
    """Return `-m MODULE …` in the form of Accelerate and DeepSpeed, and a script with its arguments as it is."""
    return ["--module", *words[1:]] if words[:1] == ["-m"] else words


def _literal(words: list[str]) -> list[str]:
    """Escape a program's path and arguments: torchrun applies string.Template to them."""
    return [word.replace("$", "$$") for word in words]


def _conf(run: Run, rows: Sequence[Row], here: Row, number: int) -> str:
    job = run.job
    # The batch script runs on the head, which is never replaced; a replacement may be the first node in the table.
    host = here.address == rows[0].address if job.auto_resume else number == 0
    return f"is_host={int(host)},join_timeout={job.join_timeout_s},read_timeout={job.read_timeout_s}"


def _endpoint(rows: Sequence[Row]) -> str:
    return f"{_bracketed(rows[0].address)}:{rows[0].port}"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
