"""request + artifact + site → JobPlan: decide each value, and refuse combinations that cannot work."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath, PurePosixPath
from typing import Any

from envbuild.base.errors import UsageError
from envbuild.base.files import absolute_path
from envbuild.base.text import size
from envbuild.contract.kinds import Artifact, file_kind, kinds_of
from envbuild.data.schedulers import LAUNCHERS
from envbuild.fabrics import fabric_variables, find_fabric, plugin_variable, plugin_variables
from envbuild.jobs.model import JobArtifact, JobInputs, JobPlan, JobRequest
from envbuild.jobs.plan_checks import IN_IMAGE, check_exclusion, check_nodes, check_rendezvous, check_strategy
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.runtimes import FOLDER, OWN, POD, RUNTIMES, starting
from envbuild.runtimes.base import Runtime
from envbuild.site.jobs import time_problem
from envbuild.site.settings import Site

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_EPOCHS = 10


def scheduler_of(request: JobRequest, site: Site) -> str:
    """Return the scheduler of a job. Raises UsageError when neither the request nor the site names one."""
    if request.scheduler is not None:
        return request.scheduler
    if site.scheduler.kind == "none":
        raise UsageError(
            f"site {site.name} names no scheduler",
            "name a cluster's site with --site, or write [scheduler] kind with `envbuild site init`; to build on this "
            "host, leave out --job",
        )
    return site.scheduler.kind


def wanted_kinds(scheduler: str, site: Site) -> tuple[str, ...]:
    """Return the kinds of artifacts that a job of a recipe may use, best first."""
    if SCHEDULERS[scheduler].pods:
        return kinds_of("registry")
    runtime = RUNTIMES.get(site.container.runtime)
    return (*(runtime.kinds if runtime else ()), *kinds_of("folder"))


def plan_job(request: JobRequest, opened: JobInputs, site: Site) -> JobPlan:
    """Decide every value of the job.

    Raises UsageError for values that conflict, with a hint about the one to change.
    """
    artifact = opened.artifact
    scheduler = scheduler_of(request, site)
    origins: dict[str, str] = {
        "scheduler": "--scheduler" if request.scheduler else site.origin("scheduler", "kind"),
        "artifact": f"receipt of {artifact.verified_at}" if artifact.verified_at else "--unverified",
    }
    runtime_name = _runtime(artifact.of_kind, scheduler, site)
    runtime = RUNTIMES[runtime_name]
    by_kind = runtime.host_files or runtime.pods
    origins["runtime"] = f"{artifact.kind} artifact" if by_kind else site.origin("container", "runtime")
    single = request.strategy == "single"
    nodes, origins["nodes"] = _first(
        ("--nodes", request.nodes),
        ("strategy single", 1 if single else None),
        ("[verify] nodes of the recipe", opened.verify and opened.verify.nodes),
        ("default", 2),
    )
    nproc, origins["nproc_per_node"] = _ranks(request, opened, site)
    if single and (nodes, nproc) != (1, 1):
        raise UsageError("strategy single starts one process on one node", "leave out --nodes and --nproc-per-node")
    gpus = 0
    if artifact.accelerator.gpu:
        gpus = site.node.gpus or nproc
        if nproc > gpus:
            raise UsageError(
                f"{nproc} ranks on a node that has {gpus} GPUs ({site.origin('node', 'gpus')})",
                "choose a smaller --nproc-per-node",
            )
        origins["gpus_per_node"] = site.origin("node", "gpus") if site.node.gpus else "one for each rank"
    cpus, origins["cpus_per_node"] = _cpus(nproc, scheduler, site)
    launcher = _launcher(request, scheduler, site, origins)
    name, origins["name"] = _first(("--name", request.name), ("recipe", artifact.recipe))
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a valid job name", "up to 63 letters, digits, dots, dashes and underscores")
    work, origins["work"] = _first(
        ("--work", request.work),
        (site.origin("paths", "shared"), site.paths.shared or None),
        (site.origin("kubernetes", "mount"), site.kubernetes.mount if SCHEDULERS[scheduler].pods else None),
        ("current folder", str(request.current.absolute())),
    )
    work = str(absolute_path(request.current / work))
    command, run_files, origins["command"] = command_of(request, opened, pods=SCHEDULERS[scheduler].pods)
    time, origins["time"] = _first(("--time", request.time), (site.origin("scheduler", "time"), site.scheduler.time))
    if problem := time_problem(time):
        raise UsageError(f"--time: {problem}")
    check_strategy(request, opened, scheduler, site, nodes * nproc)
    check_rendezvous(request, opened, scheduler)
    script = command[0] if origins["command"] == "--script" else ""
    check_nodes(artifact, script, scheduler, site)
    variables, library_path = job_env(opened, site, runtime, nproc, cpus, origins)
    if request.exclude_slow:
        check_exclusion(scheduler, site)
    stage, origins["stage"] = _stage(artifact, runtime, nodes, site)
    max_restarts, origins["max_restarts"] = _first(("--max-restarts", request.max_restarts), ("default", 3))
    origins["rendezvous"] = "--rendezvous" if request.rendezvous != "c10d" else "default"
    return JobPlan(
        name=name,
        scheduler=scheduler,
        artifact=artifact,
        site=site,
        runtime=runtime_name,
        launcher=launcher,
        strategy=request.strategy,
        nodes=nodes,
        nproc_per_node=nproc,
        command=command,
        work=work,
        gpus_per_node=gpus,
        cpus_per_node=cpus,
        run_files=run_files,
        variables=variables,
        library_path=library_path,
        mounts=container_mounts(script or None, runtime, work, site),
        modules=site.modules.run,
        time=time,
        max_restarts=max_restarts,
        rendezvous=request.rendezvous,
        rendezvous_endpoint=request.endpoint,
        preflight=request.preflight or request.exclude_slow,
        speed=request.speed or request.exclude_slow,
        exclude_slow=request.exclude_slow,
        exact=request.exact,
        stage=stage,
        stage_bytes=size(site.stage.keep) or 0,
        envbuild=request.envbuild,
        origins=origins,
    )


def _stage(artifact: JobArtifact, runtime: Runtime, nodes: int, site: Site) -> tuple[str, str]:
    """Return the folder on nodes' disks to which the artifact is brought, and who chose it; "" for the shared one."""
    if artifact.of_kind.form == "registry":
        return "", "nodes pull images"
    if runtime.host_files and not artifact.manifest:
        return "", "no receipt tells the files of the environment"
    if nodes == 1:
        return "", "one node"
    if site.scheduler.auto_resume:
        return "", "a node that replaces another has no copy"
    if not site.stage.enabled:
        return "", site.origin("stage", "enabled")
    if site.stage.dir:
        return site.stage.dir, site.origin("stage", "dir")
    return site.paths.scratch, site.origin("paths", "scratch")


def _first(*candidates: tuple[str, Any]) -> tuple[Any, str]:
    """Return the first value that is not None, and its origin."""
    return next((value, origin) for origin, value in candidates if value is not None)


def _runtime(kind: Artifact, scheduler: str, site: Site) -> str:
    """Return the runtime that starts an artifact of `kind` on the nodes. Raises UsageError when there is none."""
    runtime, pods = site.container.runtime, SCHEDULERS[scheduler].pods
    on_nodes = runtime in starting(kind.name)
    if kind.form == "registry" and not pods and not on_nodes:
        able = " or ".join(f'"{name}"' for name in starting(kind.name))
        raise UsageError(
            f"{scheduler} does not run images from a registry",
            f"give {' or '.join(f'a {file_kind(name).suffix} (`envbuild {name}`)' for name in kinds_of('file'))}, "
            f"or set [container] runtime = {able} if the nodes have it",
        )
    if kind.form != "registry" and pods:
        raise UsageError(
            "Kubernetes runs images from a registry",
            "push one (`envbuild docker RECIPE --tag REGISTRY/NAME:TAG --push`) and give the recipe or NAME@sha256:…",
        )
    if pods:
        return POD
    if kind.form == "folder":
        return FOLDER
    if not on_nodes:
        return OWN
    launcher = RUNTIMES[runtime].launcher
    return RUNTIMES[runtime].instead if launcher and launcher not in LAUNCHERS[scheduler] else runtime


def _ranks(request: JobRequest, opened: JobInputs, site: Site) -> tuple[int, str]:
    """Return the number of ranks per node, and who set it."""
    if request.nproc_per_node is not None:
        return request.nproc_per_node, "--nproc-per-node"
    if request.strategy == "single":
        return 1, "strategy single"
    if opened.artifact.accelerator.gpu:
        if not site.node.gpus:
            raise UsageError(
                f"the number of GPUs of a node of site {site.name} is unknown",
                "pass --nproc-per-node, or set [node] gpus in the site file",
            )
        return site.node.gpus, site.origin("node", "gpus")
    recipe = opened.verify and opened.verify.nproc_per_node
    return _first(("[verify] nproc_per_node of the recipe", recipe), ("default", 2))


def _cpus(nproc: int, scheduler: str, site: Site) -> tuple[int, str]:
    """Return the number of CPUs per node (0 for all), and who set it.

    By default, PBS gives a job one CPU in all, and so do other schedulers if jobs share nodes.
    """
    chosen = SCHEDULERS[scheduler]
    has_all = chosen.exclusive_has_cpus and site.scheduler.exclusive
    few = not chosen.pods and not has_all
    if few and not site.node.cpus:
        return nproc, "one for each rank; say [node] cpus"
    return site.node.cpus, site.origin("node", "cpus")


def _launcher(request: JobRequest, scheduler: str, site: Site, origins: dict[str, str]) -> str:
    known = LAUNCHERS[scheduler]
    if not known:
        return "srun"  # pods start by themselves
    horovod = request.strategy == "horovod" and known[0] != "mpiexec" and "mpirun" in known
    launcher: str
    launcher, origins["launcher"] = _first(
        ("--launcher", request.launcher),
        (site.origin("scheduler", "launcher"), site.scheduler.launcher),
        ("strategy horovod", "mpirun" if horovod else None),
        (f"default on {scheduler}", known[0]),
    )
    if launcher not in known:
        raise UsageError(
            f"{launcher} does not start processes under {scheduler} ({origins['launcher']})",
            f"one of {', '.join(known)}",
        )
    return launcher


def command_of(
    request: JobRequest, opened: JobInputs, *, pods: bool
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...], str]:
    """Return the command, its options that name files of the run, and who set it.

    Pods (`pods`) do not see files of this host.
    """
    if request.module is not None:
        if request.script is not None:
            raise UsageError("use --module without --script: both name the program", "leave one of them out")
        if not all(part.isidentifier() for part in request.module.split(".")):
            raise UsageError(f"--module {request.module!r} is not the name of a module, such as pkg.train")
        return ("-m", request.module, *request.arguments), (), "--module"
    if request.script is not None:
        path, origin = request.script, "--script"
        if not pods:
            if not (request.current / path).is_file():
                if not path.startswith("/"):
                    raise UsageError(f"there is no script {path}", "give the path of a file that nodes see too")
                if opened.holds_file(path):
                    origin = IN_IMAGE
            path = str(absolute_path(request.current / path))
        return (path, *request.arguments), (), origin
    if request.arguments:
        arguments, origin = request.arguments, "arguments"
    else:
        arguments = (str(opened.verify.epochs if opened.verify else _EPOCHS), "1")
        origin = "the bundled trainer, [verify] epochs of the recipe"
    given = {argument.partition("=")[0].replace("-", "_") for argument in arguments}
    files = (("--checkpoint_path", "snapshot.pt"), ("--report", "report.json"))
    extra = ("--strategy", "horovod") if request.strategy == "horovod" else ()
    return (
        ("-m", "ddp_train", *arguments, *extra),
        tuple((option, name) for option, name in files if option.replace("-", "_") not in given),
        origin,
    )


def job_env(
    opened: JobInputs, site: Site, runtime: Runtime, nproc: int, cpus: int, origins: dict[str, str]
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the variables of every process, in order, and the folders to prepend to LD_LIBRARY_PATH.

    A node has `nproc` ranks and `cpus` CPUs. If `cpus` is 0 (unknown), the node program counts the CPUs and sets
    OMP_NUM_THREADS, and pods get no OMP_NUM_THREADS. The origin of each variable is added to `origins`.
    """
    artifact = opened.artifact
    variables: dict[str, str] = {}

    def take(values: Mapping[str, str], origin: str) -> None:
        for name, value in values.items():
            variables[name] = value
            origins[f"variables.{name}"] = origin

    # More threads per rank than its share of CPUs would slow each other down.
    if runtime.pods:
        cpus = _limit(site) or cpus
    if cpus:
        threads = max(1, cpus // nproc)
        take({"OMP_NUM_THREADS": str(threads)}, f"{cpus} CPUs for {nproc} ranks")
    elif not runtime.pods:
        origins["variables.OMP_NUM_THREADS"] = f"the CPUs that a node has, for {nproc} ranks"
    library: tuple[str, ...] = ()
    if artifact.accelerator.gpu:
        fabric = find_fabric(artifact.fabric)
        take(fabric_variables(fabric, site.fabric, artifact.accelerator.name), f"fabric {fabric.name}")
        for name in site.fabric.variables:
            origins[f"variables.{name}"] = site.origin("fabric", "variables")
        root = PurePath(artifact.python).parents[1]
        plugin = plugin_variables(opened.layers, root, opened.nccl, net_plugin=artifact.accelerator.net_plugin)
        library = tuple(filter(None, plugin.pop("LD_LIBRARY_PATH", "").split(":")))
        take(plugin, "layer aws-ofi-nccl")
        if site.host_stack.injected and site.host_stack.nccl_plugin:
            plugin = plugin_variable(site.host_stack.nccl_plugin, opened.nccl)
            take(plugin, site.origin("host_stack", "nccl_plugin"))
    if not runtime.pods:
        library = (*site.host_stack.library_path(isolated=not runtime.host_files), *library)
    own = artifact.of_kind.job_variables(artifact.path)
    take(own, f"the {artifact.kind} environment")
    # The site's paths may not exist in a container, so programs in containers do not get them.
    for name, value in runtime.caches(site.paths.cache, site.paths.scratch).items():
        if value:
            take({name: value}, site.origin("paths", "scratch" if name.endswith("TMPDIR") else "cache"))
    for name, value in site.environment.items():
        take({name: value}, site.origin("environment", name))
    return tuple(variables.items()), library


def _limit(site: Site) -> int:
    """Return the CPU limit of a pod in [kubernetes] resources, 0 if there is none."""
    amount = re.fullmatch(r"(\d+)(\.\d+)?(m?)", site.kubernetes.resources.get("cpu", ""))
    if amount is None:
        return 0
    return max(1, int(amount[1]) // (1000 if amount[3] else 1))


def container_mounts(script: str | None, runtime: Runtime, work: str, site: Site) -> tuple[tuple[str, str], ...]:
    """Return (host, container) folders that a container sees: the site's, the working folder and the script's."""
    if runtime.host_files or runtime.pods:
        return ()
    mounts = []
    for mount in site.container.mounts:
        host, _, inside = mount.partition(":")
        mounts.append((host, inside or host))
    mounts += [(place, f"{place}:ro") for place in site.host_stack.injected]
    # The job's own folders: the working folder and that of the script, which is an absolute path.
    for folder in (work, *([str(PurePosixPath(script).parent)] if script else ())):
        if not any(PurePosixPath(folder).is_relative_to(host) and host == inside for host, inside in mounts):
            mounts.append((folder, folder))
    return tuple(mounts)
