"""Training on this host, for a site without a scheduler: the command for the caller to run."""

from __future__ import annotations

import shlex

from envbuild.base.errors import UsageError
from envbuild.base.process import torchrun_word
from envbuild.jobs.model import JobInputs, JobRequest
from envbuild.jobs.plan import command_of, setting
from envbuild.site.schedulers import SCHEDULER_NAMES
from envbuild.site.settings import Site


def no_scheduler_error(request: JobRequest, opened: JobInputs, site: Site) -> UsageError:
    """Return the error for a job on a site without a scheduler; its hint shows how to train on this host."""
    names = "|".join(SCHEDULER_NAMES)
    hint = f"name a cluster's site (--site SITE, `envbuild site list`) or --scheduler {names}"
    if opened.artifact.of_kind.form != "registry":
        hint = f"to train on this host: `{_command(request, opened)}`; for a cluster, {hint}"
    return UsageError(f"site {site.name} names no scheduler: nothing takes a job", hint)


def _command(request: JobRequest, opened: JobInputs) -> str:
    """Return the command for one node of the job: torchrun, or the strategy's launcher, in the artifact."""
    artifact = opened.artifact
    command, _, _ = command_of(request, opened, pods=False)
    ranks = str(request.nproc_per_node or setting(opened, "nproc_per_node") or 2)
    # Each launcher but mpirun can start a rank for each GPU.
    all_gpus = artifact.accelerator.gpu and request.nproc_per_node is None
    start = [artifact.python]
    if request.strategy == "ddp":
        ranks = "gpu" if all_gpus else ranks
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        command = tuple(torchrun_word(word) for word in command)
    if request.strategy == "accelerate":
        start += ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"]
        start += [] if all_gpus else ["--num_processes", ranks]
        command = tuple(torchrun_word(word) for word in _with_module_option(command))
    if request.strategy == "deepspeed":
        start += ["-m", "deepspeed.launcher.runner", *([] if all_gpus else ["--num_gpus", ranks])]
        start += ["--no_local_rank"] if command[:2] == ("-m", "ddp_train") else []
        command = _with_module_option(command)
    if request.strategy == "horovod":
        start = ["mpirun", "-np", ranks, *start]
    if artifact.of_kind.form == "file":
        see = ["--bind", str(request.current.absolute())]
        start = [request.envbuild, "run", *see, artifact.path, "--", *start]
    return shlex.join([*start, *command])


def _with_module_option(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return `-m MODULE …` in the form of Accelerate's and DeepSpeed's launchers, and a script as it is."""
    return ("--module", *command[1:]) if command[0] == "-m" else command
