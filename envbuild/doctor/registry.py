"""All checks of the doctor, in the order of the report."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from envbuild.doctor import batch, connectivity, fabric, kernel, machine, storage, tools
from envbuild.doctor.probe import Host, HostProbe
from envbuild.environment import Environment, load_environment
from envbuild.errors import EnvbuildError
from envbuild.site.pip_config import PipConfig, redact
from envbuild.site.schedulers import TITLES
from envbuild.site.settings import Site
from envbuild.store.store import Store

# Schedulers with checks of more than their version and queues.
_OWN_CHECKS = {"slurm": batch.slurm, "kubernetes": batch.kubernetes}

CHECKS = (
    HostProbe("envbuild", "envbuild", tools.envbuild_itself),
    HostProbe("envbuild", "configuration", tools.configuration),
    HostProbe("envbuild", "uv", tools.uv),
    HostProbe("tools", "programs", tools.programs),
    HostProbe("tools", "modules", tools.modules),
    HostProbe("tools", "docker daemon", batch.docker_daemon),
    HostProbe("kernel", "own launch", kernel.launching),
    HostProbe("kernel", "/dev/fuse", kernel.fuse),
    HostProbe("kernel", "subuid", kernel.subordinate_ids),
    HostProbe("machine", "user", machine.who),
    HostProbe("machine", "processors", machine.processors),
    HostProbe("machine", "memory", machine.memory),
    HostProbe("machine", "/dev/shm", machine.shared_memory),
    HostProbe("machine", "GPU", machine.gpus),
    HostProbe("machine", "clock", machine.clock),
    HostProbe("machine", "locale", machine.locale),
    HostProbe("file systems", "store", storage.store),
    HostProbe("file systems", "home", storage.home),
    HostProbe("file systems", "tmp", storage.temporary),
    HostProbe("file systems", "current folder", storage.current),
    HostProbe("network", "own name", machine.own_name),
    HostProbe("network", "interfaces", fabric.network),
    HostProbe("network", "adapters", fabric.adapters),
    HostProbe("network", "libfabric", fabric.libfabric),
    *(
        HostProbe("jobs", title, _OWN_CHECKS.get(name) or partial(batch.scheduler, name))
        for name, title in TITLES.items()
    ),
    HostProbe("sources", "proxies", connectivity.proxies),
    HostProbe("sources", "authorities", connectivity.certificates),
    HostProbe("sources", "package index", connectivity.package_index),
    HostProbe("sources", "recipes' sources", connectivity.sources),
)


def this_host(variables: Mapping[str, str], *, offline: bool = False) -> Host:
    """Return the host as input of the checks, even if its site.toml or pip's configuration is faulty."""
    try:
        return Host(variables, load_environment(variables), offline=offline)
    except EnvbuildError as error:
        problem, hint = redact(error.message), error.hint or ""
    except (OSError, RuntimeError) as error:  # Path.home() raises RuntimeError without a home
        problem, hint = f"{type(error).__name__}: {error}", "set HOME to a folder of yours"
    # Defaults, so that the other checks can run.
    fallback = Path(variables.get("ENVBUILD_STORE") or "/nonexistent/envbuild")
    environment = Environment(variables, Site(store=fallback), PipConfig(), Store(fallback))
    return Host(variables, environment if "ENVBUILD_STORE" in variables else None, problem, hint, offline)
