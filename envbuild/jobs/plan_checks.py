"""Checks of a planned job against its artifact and its site."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from envbuild.base.errors import UsageError
from envbuild.base.masking import looks_secret
from envbuild.jobs.kubernetes_pod import lost_log
from envbuild.jobs.model import JobArtifact, JobInputs, JobPlan, JobRequest
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.site.jobs import DEFAULT_RUNTIME, UNLIMITED, unlimited
from envbuild.site.settings import Site

# Who set the command of a job: --script with a path inside the image.
IN_IMAGE = "--script, in the image"
# That of a Job which names none: kubernetes/kubernetes, pkg/apis/batch/v1/defaults.go.
_JOB_BACKOFF_LIMIT = 6
# Folders that are local to each node (Filesystem Hierarchy Standard 3.0, 3.15, 3.18, 5.15).
_OWN = ("/tmp", "/var/tmp", "/dev/shm", "/run")


# The package that a strategy starts or imports, which has the strategy's name: its title, and the way to get it.
_PACKAGES = {
    "accelerate": ("Accelerate", 'add "accelerate" to the recipe\'s requirements'),
    "deepspeed": (
        "DeepSpeed",
        'add "deepspeed" to the recipe\'s requirements, and [build.deepspeed] (docs/howto/jobs.md)',
    ),
    "horovod": ("Horovod", "build one of the recipe `horovod`, or of one with [layers.horovod]"),
}


def check_strategy(request: JobRequest, opened: JobInputs, scheduler: str, site: Site, ranks: int) -> None:
    """Raise UsageError for a strategy whose package the artifact lacks, or that cannot run this job of `ranks`."""
    strategy = request.strategy
    if strategy not in _PACKAGES:
        return
    title, hint = _PACKAGES[strategy]
    packages = opened.packages
    # An image that brings torch may bring a package that was built with it, which is not recorded.
    if packages is not None and "torch" in packages and strategy not in packages:
        raise UsageError(
            f"{opened.artifact.path} has no {title}, which --strategy {strategy} needs",
            f"{hint}; or use the default, --strategy ddp",
        )
    if strategy == "horovod":
        return
    if SCHEDULERS[scheduler].pods:
        raise UsageError(
            f"strategy {strategy} is not rendered for Kubernetes: its operators tell each pod its place in variables "
            f"that torchrun reads, and {title}'s launcher does not",
            f"use --strategy ddp: a script that uses {title} runs under torchrun too",
        )
    if strategy == "accelerate" and ranks < 2:
        raise UsageError("strategy accelerate starts two ranks or more", "use --strategy single for one process")
    if strategy == "deepspeed" and request.max_restarts:
        raise UsageError("DeepSpeed's launcher does not restart failed ranks", "leave out --max-restarts")
    if strategy == "deepspeed" and site.scheduler.auto_resume:
        raise UsageError(
            "strategy deepspeed needs a fixed head node, and [scheduler] auto_resume may replace it",
            "use --strategy ddp: a script that uses DeepSpeed runs under torchrun too",
        )


def check_rendezvous(request: JobRequest, opened: JobInputs, scheduler: str) -> None:
    """Raise UsageError for a rendezvous that cannot work."""
    if request.rendezvous == "c10d":
        if request.endpoint:
            raise UsageError("--endpoint is for --rendezvous etcd-v2", "c10d uses the head node as its endpoint")
        return
    if request.strategy != "ddp":
        raise UsageError(f"strategy {request.strategy} has no rendezvous", "leave out --rendezvous")
    if not request.endpoint and not SCHEDULERS[scheduler].pods:
        raise UsageError("--rendezvous etcd-v2 needs --endpoint", "HOST:PORT of the etcd server")
    if opened.packages is not None and "python-etcd" not in opened.packages:
        raise UsageError(
            f"{opened.artifact.path} lacks python-etcd, which torch's etcd rendezvous imports",
            'add "python-etcd" to the recipe\'s requirements, or use the default, c10d',
        )


def check_nodes(artifact: JobArtifact, script: str, scheduler: str, site: Site) -> None:
    """Raise UsageError for an artifact of another architecture than the nodes', or files that nodes cannot see.

    These files are the artifact and `script` ("" for none).
    """
    arch = site.node.arch
    if arch is not None and artifact.arch != arch:
        accelerator = artifact.target.partition("-")[0]
        raise UsageError(
            f"{artifact.path} is for {artifact.arch}, and the nodes of site {site.name} are {arch}",
            f"build for them (--target {accelerator}-{arch}), or correct [node] arch of the site file",
        )
    if SCHEDULERS[scheduler].pods or not site.paths.shared:
        return
    for path in filter(None, (artifact.place, script)):
        if own := _own_of_a_node(path, site):
            raise UsageError(
                f"nodes do not see {path}: each has its own {own}",
                f"copy it to {site.paths.shared}, or build it there (--out); if nodes do see it, add it to "
                "[paths] shared of the site file, and set the folder of runs with --work",
            )


def possible_faults(plan: JobPlan, host: str) -> Iterator[str]:
    """Yield a sentence for each possible fault that cannot be checked on this host; `host` is its architecture."""
    artifact, site = plan.artifact, plan.site
    if any(looks_secret(argument) for argument in plan.command):
        yield (
            "an argument of the training looks like a secret: others can read job scripts and the command lines of "
            "processes; let the program read it from a file that only you may read"
        )
    if SCHEDULERS[plan.scheduler].pods:  # Kubernetes selects nodes of the artifact's architecture
        yield from _pod_faults(plan)
        return
    if site.node.arch is None and artifact.arch != host:
        yield (
            f"{artifact.path} is for {artifact.arch}, this host is {host}, and site {site.name} does not say what its "
            "nodes are: write [node] arch into the site file"
        )
    script = plan.command[0] if plan.origins.get("command") == "--script" else ""
    if script and not Path(script).is_file():
        yield f"there is no {script} on this host: the job fails where nodes do not see it"
    for path in filter(None, (artifact.place, script)):
        if any(_below(path, folder) for folder in _seen(site)):
            continue
        if site.paths.shared:
            yield f"{path} is outside of {site.paths.shared} ([paths] shared): the job fails where nodes do not see it"
        elif own := _own_of_a_node(path, site):
            yield (
                f"nodes may not see {path}: as a rule each node has its own {own}; say in [paths] shared of the site "
                "file what they all see"
            )


def _pod_faults(plan: JobPlan) -> Iterator[str]:
    site = plan.site
    if lost := lost_log(plan):
        yield lost
    limits = {*site.kubernetes.resources} | ({"cpu"} if plan.cpus_per_node else set())
    if site.host_stack.injected:
        yield "pods get none of the nodes' libraries in [host_stack]: mount them by [kubernetes] volumes, host:/PATH:ro"
    if missing := unlimited(limits | ({"memory"} if site.node.memory else set())):
        yield f"pods of site {site.name} ask for no {missing}: {UNLIMITED}. Set [node] cpus and memory in the site file"
    default = site.kubernetes.api == "v2" and site.kubernetes.runtime == DEFAULT_RUNTIME
    if default and plan.strategy != "single" and plan.nodes > _JOB_BACKOFF_LIMIT:
        yield (
            f"one lost pod probably ends this TrainJob: all {plan.nodes} pods start again, and the runtime "
            f"{DEFAULT_RUNTIME} allows {_JOB_BACKOFF_LIMIT} restarts in all. Have a ClusterTrainingRuntime with "
            f"backoffLimit {3 * plan.nodes + 1} made, and name it in [kubernetes] runtime of the site file"
        )


def _seen(site: Site) -> list[str]:
    """Return the folders that all nodes see, according to the site; a mounted /tmp is still local to each node."""
    hosts = (mount.partition(":")[0] for mount in site.container.mounts)
    more = [folder for folder in (site.paths.cache, *hosts) if folder and not _around(folder, site)]
    return [folder for folder in (site.paths.shared, *more) if folder]


def _own_of_a_node(path: str, site: Site) -> str:
    """Return the folder around `path` that is local to each node, "" for none or if the site shares files in it."""
    own = _around(path, site)
    shares = own and site.paths.shared and _below(site.paths.shared, own)
    return "" if shares or any(_below(path, folder) for folder in _seen(site)) else own


def _around(path: str, site: Site) -> str:
    return next((folder for folder in (*_OWN, site.paths.scratch) if folder and _below(path, folder)), "")


def _below(path: str, folder: str) -> bool:
    """Return whether `path` is in `folder`, literally or after symbolic links are resolved."""
    return Path(path).is_relative_to(folder) or Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check_exclusion(scheduler: str, site: Site) -> None:
    """Raise UsageError for a job that cannot leave out slow nodes and start again."""
    if not SCHEDULERS[scheduler].leaves_out_nodes:
        names = " or ".join(name for name, known in SCHEDULERS.items() if known.leaves_out_nodes)
        raise UsageError(
            f"--exclude-slow needs {names}, which can restart a job on other nodes; this site has {scheduler}",
            "leave it out; inside of an allocation, `envbuild preflight --speed` names slow nodes",
        )
    if not site.scheduler.requeue:
        raise UsageError(
            f"--exclude-slow starts the job again, and {site.origin('scheduler', 'requeue')} forbids that",
            "set [scheduler] requeue = true, or leave out --exclude-slow",
        )
