"""The checks, in the order in which they are told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from envbuild.doctor import batch, fabric, hardware, kernel, naming, places, reach, tools
from envbuild.doctor.model import Check, Host
from envbuild.environment import Environment, load_environment
from envbuild.errors import EnvbuildError
from envbuild.site.pip_config import PipConfig, redact
from envbuild.site.settings import Site
from envbuild.store.store import Store

CHECKS = (
    Check("envbuild", "envbuild", tools.envbuild_itself),
    Check("envbuild", "configuration", tools.configuration),
    Check("envbuild", "uv", tools.uv),
    Check("tools", "programs", tools.programs),
    Check("tools", "modules", tools.modules),
    Check("tools", "docker daemon", batch.docker_daemon),
    Check("kernel", "own launch", kernel.launching),
    Check("kernel", "/dev/fuse", kernel.fuse),
    Check("kernel", "subuid", kernel.subordinate_ids),
    Check("machine", "user", naming.who),
    Check("machine", "processors", hardware.processors),
    Check("machine", "memory", hardware.memory),
    Check("machine", "/dev/shm", hardware.shared_memory),
    Check("machine", "GPU", hardware.gpus),
    Check("machine", "clock", naming.clock),
    Check("machine", "locale", naming.locale),
    Check("file systems", "store", places.store),
    Check("file systems", "home", places.home),
    Check("file systems", "tmp", places.temporary),
    Check("file systems", "current folder", places.current),
    Check("network", "own name", naming.own_name),
    Check("network", "interfaces", fabric.network),
    Check("network", "adapters", fabric.adapters),
    Check("network", "libfabric", fabric.libfabric),
    Check("jobs", "Slurm", batch.slurm),
    Check("jobs", "PBS", batch.pbs),
    Check("jobs", "Kubernetes", batch.kubernetes),
    Check("sources", "proxies", reach.proxies),
    Check("sources", "authorities", reach.certificates),
    Check("sources", "package index", reach.package_index),
    Check("sources", "recipes' sources", reach.sources),
)


def this_host(variables: Mapping[str, str], *, offline: bool = False) -> Host:
    """The host as the checks see it, whatever is wrong with its site.toml or pip's configuration."""
    try:
        return Host(variables, load_environment(variables), offline=offline)
    except EnvbuildError as error:
        problem, hint = redact(error.message), error.hint or ""
    except (OSError, RuntimeError) as error:  # no home folder: Path.home() tells so by RuntimeError
        problem, hint = f"{type(error).__name__}: {error}", "set HOME to a folder of yours"
    # Defaults, so that the rest can still be looked at.
    fallback = Path(variables.get("ENVBUILD_STORE") or "/nonexistent/envbuild")
    environment = Environment(variables, Site(fallback, ()), PipConfig(), Store(fallback))
    return Host(
        variables, environment if "ENVBUILD_STORE" in variables else None, problem, hint, offline
    )
