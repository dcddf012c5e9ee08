"""The variables of a job's processes, and the folders that its containers see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath, PurePosixPath

from envbuild.fabrics import find_fabric
from envbuild.jobs.model import JobInputs, Runtime
from envbuild.site.settings import Site
from envbuild.verify.network import fabric_variables, plugin_variables


def job_env(
    opened: JobInputs, site: Site, runtime: Runtime, nproc: int, cpus: int, origins: dict[str, str]
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the variables of every process, in order, and the folders to prepend to LD_LIBRARY_PATH.

    A node has `nproc` ranks and `cpus` CPUs. If `cpus` is 0 (unknown), the node program counts them and sets
    OMP_NUM_THREADS, and pods get no OMP_NUM_THREADS. The origin of each variable is added to `origins`.
    """
    artifact = opened.artifact
    found: dict[str, str] = {}

    def take(values: Mapping[str, str], origin: str) -> None:
        for name, value in values.items():
            found[name] = value
            origins[f"variables.{name}"] = origin

    # More threads per rank than its share of CPUs would slow each other down.
    if runtime == "pod":
        cpus = _limit(site) or cpus
    if cpus:
        threads = max(1, cpus // nproc)
        take({"OMP_NUM_THREADS": str(threads)}, f"{cpus} CPUs for {nproc} ranks")
    elif runtime != "pod":
        origins["variables.OMP_NUM_THREADS"] = f"the CPUs that a node has, for {nproc} ranks"
    library: tuple[str, ...] = ()
    if artifact.accelerator.gpu:
        fabric = find_fabric(artifact.fabric)
        take(fabric_variables(fabric, site.fabric), f"fabric {fabric.name}")
        for name in site.fabric.variables:
            origins[f"variables.{name}"] = site.origin("fabric", "variables")
        root = PurePath(artifact.python).parents[1]
        plugin = plugin_variables(opened.layers, root, opened.nccl, accelerator=artifact.accelerator)
        library = tuple(filter(None, plugin.pop("LD_LIBRARY_PATH", "").split(":")))
        take(plugin, "layer aws-ofi-nccl")
    own = artifact.of_kind.job_variables(artifact.path)
    take(own, f"the {artifact.kind} environment")
    take(_caches(site, runtime), "")
    for name in _caches(site, runtime):
        key = "scratch" if name.endswith("TMPDIR") else "cache"
        origins[f"variables.{name}"] = site.origin("paths", key)
    take(site.environment, "")
    for name in site.environment:
        origins[f"variables.{name}"] = site.origin("environment", name)
    return tuple(found.items()), library


def _limit(site: Site) -> int:
    """Return the CPU limit of a pod in [kubernetes] resources, 0 if there is none."""
    amount = re.fullmatch(r"(\d+)(\.\d+)?(m?)", site.kubernetes.resources.get("cpu", ""))
    if amount is None:
        return 0
    return max(1, int(amount[1]) // (1000 if amount[3] else 1))


def _caches(site: Site, runtime: Runtime) -> dict[str, str]:
    """Return variables for caches and temporary files outside of $HOME, as the site sets them.

    The site's paths may not exist in a container, so programs in containers do not get them; Apptainer itself
    does.
    """
    cache, scratch = site.paths.cache, site.paths.scratch
    found: dict[str, str] = {}
    if runtime == "folder":
        found = {"XDG_CACHE_HOME": cache, "TMPDIR": scratch}
    elif runtime == "apptainer":
        found = {"APPTAINER_CACHEDIR": cache and f"{cache}/apptainer", "APPTAINER_TMPDIR": scratch}
    return {name: value for name, value in found.items() if value}


def container_mounts(script: str | None, runtime: Runtime, work: str, site: Site) -> tuple[tuple[str, str], ...]:
    """Return (host, container) folders that a container sees: the site's, the working folder and the script's."""
    if runtime in ("folder", "pod"):
        return ()
    found = []
    for mount in site.container.mounts:
        host, _, inside = mount.partition(":")
        found.append((host, inside or host))
    # The job's own folders: the working folder and that of the script, which is an absolute path.
    for folder in (work, *([str(PurePosixPath(script).parent)] if script else ())):
        if not any(PurePosixPath(folder).is_relative_to(host) and host == inside for host, inside in found):
            found.append((folder, folder))
    return tuple(found)
