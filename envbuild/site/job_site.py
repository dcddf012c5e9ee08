"""Site of a job: the tables of a site file about scheduler, nodes and paths, with the origin of each key."""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from envbuild.errors import UsageError
from envbuild.files import shipped
from envbuild.site.jobs import ContainerTable, ModulesTable, NodeTable, PathsTable, SchedulerTable
from envbuild.site.kubernetes import KubernetesTable
from envbuild.site.settings import FabricTable, SiteFile, site_files
from envbuild.toml import decode, nearest, read

TABLES = ("scheduler", "modules", "paths", "container", "node", "kubernetes", "fabric")


@dataclass(frozen=True, slots=True)
class JobSite:
    """Site of a job.

    `files` are the site files that were read; `said` maps each key that one of them sets, as `[table] key`, to
    that file.
    """

    name: str
    files: tuple[Path, ...] = ()
    scheduler: SchedulerTable = field(default_factory=SchedulerTable)
    modules: ModulesTable = field(default_factory=ModulesTable)
    paths: PathsTable = field(default_factory=PathsTable)
    container: ContainerTable = field(default_factory=ContainerTable)
    node: NodeTable = field(default_factory=NodeTable)
    kubernetes: KubernetesTable = field(default_factory=KubernetesTable)
    fabric: FabricTable = field(default_factory=FabricTable)
    environment: Mapping[str, str] = field(default_factory=dict)
    said: Mapping[str, Path] = field(default_factory=dict)

    def origin(self, table: str, key: str) -> str:
        """Return the origin of `key` in [`table`], for messages."""
        place = f"[{table}] {key}"
        file = self.said.get(place)
        return f"{place} of {file}" if file else f"default of {place}"


def site_folders(env: Mapping[str, str], *, etc: Path = Path("/etc")) -> list[Path]:
    """Return the folders to search for named sites: the project's, the user's, the system's, and the shipped one."""
    home = Path(env.get("HOME") or Path.home())
    config = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    return [Path("sites"), config / "envbuild" / "sites", etc / "envbuild" / "sites", shipped_sites()]


def shipped_sites() -> Path:
    """Return the folder of the shipped sites: inside an installed wheel, or at the top of a checkout."""
    return shipped("sites")


def find_site(name: str, env: Mapping[str, str], *, etc: Path = Path("/etc")) -> Path:
    """Return the site file `name`: a path if it has a separator or ends in .toml, else a name to search for.

    Raises UsageError when the file does not exist.
    """
    if "/" in name or name.endswith(".toml"):
        if not os.path.isfile(name):
            raise UsageError(f"there is no site file {name}")
        return Path(name)
    folders = site_folders(env, etc=etc)
    for folder in folders:
        # Not Path.is_file, which raises for a name that is too long and for an unreadable folder.
        if name and os.path.isfile(folder / f"{name}.toml"):
            return folder / f"{name}.toml"
    known = sorted({path.stem for folder in folders for path in folder.glob("*.toml")})
    raise UsageError(
        f"there is no site {name!r}{nearest(name, known)}",
        f"there are {', '.join(known)}; searched: {', '.join(map(str, folders))}",
    )


def load_job_site(name: str | None, env: Mapping[str, str], *, etc: Path = Path("/etc")) -> JobSite:
    """Return the site called `name` (see `read_job_site`), with the user's name for `{user}` in [paths] and mounts."""
    return _filled(read_job_site(name, env, etc=etc), env)


def read_job_site(name: str | None, env: Mapping[str, str], *, etc: Path = Path("/etc")) -> JobSite:
    """Return the site called `name` (or at that path), without replacements.

    For None, it is the file in $ENVBUILD_SITE, else /etc/envbuild/site.toml, overridden table by table by the
    user's file. Raises UsageError for an unknown name, RecipeError with all mistakes of a faulty file.
    """
    files = site_files(env, etc=etc) if name is None else [find_site(name, env, etc=etc)]
    tables: dict[str, Any] = {}
    environment: dict[str, str] = {}
    said: dict[str, Path] = {}
    for file in files:
        document = read(file)
        settings = decode(document, SiteFile)
        for table in TABLES:
            given = document.data.get(table)
            if isinstance(given, dict):
                # A table of a later file replaces the whole table of an earlier one.
                said = {key: path for key, path in said.items() if not key.startswith(f"[{table}] ")}
                said |= {f"[{table}] {key}": file for key in given}
                tables[table] = getattr(settings, table)
        environment |= settings.environment
        said |= {f"[environment] {key}": file for key in settings.environment}
    title = name if name and "/" not in name and not name.endswith(".toml") else None
    title = title or (files[-1].stem if files else "none")
    return JobSite(title, tuple(files), **tables, environment=environment, said=said)


def _filled(site: JobSite, env: Mapping[str, str]) -> JobSite:
    """Return `site` with the user's name in its paths."""
    try:
        user = env.get("USER") or getpass.getuser()
    except (KeyError, OSError):  # for example a container's user without a name
        user = str(os.getuid())

    def fill(text: str) -> str:
        return text.replace("{user}", user)

    paths = {one.name: fill(getattr(site.paths, one.name)) for one in fields(site.paths)}
    mounts = tuple(fill(mount) for mount in site.container.mounts)
    return replace(site, paths=PathsTable(**paths), container=replace(site.container, mounts=mounts))
