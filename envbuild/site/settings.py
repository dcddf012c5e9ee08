"""The site: settings of builds and jobs from one or two files `site.toml`."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from envbuild.base.errors import UsageError
from envbuild.base.files import home_folder, shipped
from envbuild.base.text import INDEX_NAME
from envbuild.base.toml import decode, form, json_schema, key, nearest, read
from envbuild.site import jobs, tables

_SINGLE = ("cache", "cache_mode", "vault", "vault_mode")
# Tables whose single entries a later file replaces.
_BY_ENTRY = ("mirrors", "indexes", "registries", "environment")
CACHE = r"^(oci://[^\s/@]+/[^\s@:]+)?$"
VAULT = r"^(oci://[^\s/@]+/[^\s@:]+|oci:(?!//)\S+)?$"


def _index_problem(url: str) -> str | None:
    if not re.fullmatch(r"(https?|file)://\S+", url):  # never repeated: it may hold a password
        return "not the URL of a package index: expected https://, http:// or file://"
    return "holds a user name or password; netrc is for these" if "@" in url.partition("://")[2] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTables:
    """The keys and tables that are the same in a site and in its files."""

    cache: str = key(
        "",
        "Repository of a registry in which builds share their results. ENVBUILD_CACHE goes over it.",
        pattern=CACHE,
        example="oci://registry.example.org/team/cache",
    )
    cache_mode: Literal["read", "write", "readwrite"] = key(
        "read", "Whether builds read what the cache has, and write what they made. ENVBUILD_CACHE_MODE goes over it."
    )
    vault: str = key(
        "",
        "Repository of a registry, or folder (oci:DIR), that keeps the inputs of builds. ENVBUILD_VAULT goes over it.",
        pattern=VAULT,
        example="oci://registry.example.org/team/vault",
    )
    vault_mode: Literal["read", "readwrite"] = key(
        "read", "Whether builds only read the vault, or also keep their inputs there. ENVBUILD_VAULT_MODE goes over it."
    )
    mirrors: dict[str, tuple[str, ...]] = key(
        {},
        "URL prefix of an index → prefixes tried before it, in this order.",
        key_check=tables.url_problem,
        check=tables.url_problem,
    )
    indexes: dict[str, str] = key(
        {},
        "Name → URL of a package index that serves only the packages that recipes bind to it.",
        key_check=form(INDEX_NAME[1:-1], "is not the name of an index: lower-case letters, digits, _ . -"),
        check=_index_problem,
    )
    registries: dict[str, tables.RegistryTable] = key({}, "Image registries by host, such as docker.io.")
    debian: tables.DebianTable = key(tables.DebianTable(), "Where Debian packages come from.")
    python: tables.PythonTable = key(tables.PythonTable(), "Where Pythons come from.")
    fabric: tables.FabricTable = key(tables.FabricTable(), "The network between nodes with GPUs.")
    limits: tables.LimitsTable = key(tables.LimitsTable(), "The size of the store, and of images that envbuild reads.")
    trust: tables.TrustTable = key(tables.TrustTable(), "Whose attestations jobs take.")
    audit: tables.AuditTable = key(tables.AuditTable(), "Known vulnerabilities.")
    scheduler: jobs.SchedulerTable = key(jobs.SchedulerTable(), "Who starts jobs.")
    modules: jobs.ModulesTable = key(jobs.ModulesTable(), "Environment modules of builds and jobs.")
    environment: dict[str, str] = key(
        {},
        "Variables of builds and jobs on nodes, such as https_proxy or SSL_CERT_FILE. Never secrets.",
        key_check=jobs.job_variable_problem,
        check=jobs.value_problem,
    )
    paths: jobs.PathsTable = key(jobs.PathsTable(), "File systems, as nodes see them.")
    stage: jobs.StageTable = key(jobs.StageTable(), "Artifacts on the nodes' own disks.")
    container: jobs.ContainerTable = key(jobs.ContainerTable(), "What starts images on nodes.")
    host_stack: jobs.HostStackTable = key(jobs.HostStackTable(), "The nodes' own network libraries.")
    node: jobs.NodeTable = key(jobs.NodeTable(), "What one node has.")
    kubernetes: jobs.KubernetesTable = key(jobs.KubernetesTable(), "Where and how pods run.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFile(SiteTables):
    """Contents of one site.toml."""

    store: str | None = key(None, "Folder of the store.", example="/scratch/envbuild")
    recipes: tuple[str, ...] = key((), "Folders with more recipes, searched in this order.")


@dataclass(frozen=True, slots=True)
class Site(SiteTables):
    """Settings of a site.

    `files` are the files that were read; `origins` maps each key that they set, as `[table] key`, to its file.
    `recipe_folders` may contain folders that do not exist.
    """

    name: str = "none"
    files: tuple[Path, ...] = ()
    store: Path = Path("/nonexistent/envbuild")
    recipe_folders: tuple[Path, ...] = ()
    origins: Mapping[str, Path] = field(default_factory=dict)

    def registry(self, host: str) -> tables.RegistryTable:
        """Return the settings for the image registry `host`."""
        return self.registries.get(host, tables.RegistryTable())

    def mirrored(self, url: str) -> list[str]:
        """Return the URLs to try for `url`, in order: the mirrors of its longest matching prefix, then `url` itself."""
        for prefix, mirrors in sorted(self.mirrors.items(), key=lambda row: -len(row[0])):
            top = prefix.rstrip("/")
            if url == prefix or url.startswith(top + "/"):
                return [*(mirror.rstrip("/") + url[len(top) :] for mirror in mirrors), url]
        return [url]

    def origin(self, table: str, key: str) -> str:
        """Return the origin of `key` in [`table`], for messages."""
        place = f"[{table}] {key}"
        file = self.origins.get(place)
        return f"{place} of {file}" if file else f"default of {place}"


def load_site(env: Mapping[str, str], name: str | None = None, *, etc: Path = Path("/etc")) -> Site:
    """Return the site called `name`, or in the file at that path; without a name, the effective site.

    A table of a later file replaces the whole table of an earlier one; of [mirrors], [indexes], [registries] and
    [environment] it replaces single entries. The store is $ENVBUILD_STORE, else that of a file; else the user's
    cache folder, but only for the effective site. `{user}` in paths and mounts becomes the user's name. Raises
    UsageError for an unknown name, RecipeError with all mistakes of a faulty file or for a missing $ENVBUILD_SITE.
    """
    files = site_files(env, etc=etc) if name is None else [find_site(name, env, etc=etc)]
    values: dict[str, Any] = {name: {} for name in _BY_ENTRY}
    recipes = [etc / "envbuild" / "recipes"]
    paths: dict[str, Path] = {}
    for file in files:
        document = read(file)
        settings = decode(document, SiteFile)
        if settings.store is not None:
            values["store"] = _path(settings.store, file, env)
        values |= {name: getattr(settings, name) for name in _SINGLE if name in document.data}
        recipes += [_path(folder, file, env) for folder in settings.recipes]
        for table, given in document.data.items():
            if not isinstance(given, dict):
                paths[f"[] {table}"] = file
                continue
            if table in _BY_ENTRY:
                values[table] |= getattr(settings, table)
            else:
                values[table] = _resolved(getattr(settings, table), file, env)
                paths = {place: path for place, path in paths.items() if not place.startswith(f"[{table}] ")}
            paths |= {f"[{table}] {key}": file for key in given}
    if chosen := env.get("ENVBUILD_STORE"):
        values["store"] = _expanded(chosen, env).absolute()
    elif "store" not in values and name is None:
        cache = Path(env.get("XDG_CACHE_HOME") or home_folder(env) / ".cache")
        values["store"] = cache.absolute() / "envbuild"
    title = files[-1].stem if files else "none"
    return Site(title, tuple(files), recipe_folders=tuple(recipes), origins=paths, **values)


def site_files(env: Mapping[str, str], *, etc: Path = Path("/etc")) -> list[Path]:
    """Return the effective files: $ENVBUILD_SITE alone, else /etc/envbuild/site.toml and the user's, if they exist."""
    if named := env.get("ENVBUILD_SITE"):
        return [_expanded(named, env)]
    places = (etc / "envbuild" / "site.toml", _user_folder(env) / "site.toml")
    return [path for path in places if path.is_file()]


def site_folders(env: Mapping[str, str], *, etc: Path = Path("/etc")) -> list[Path]:
    """Return the folders to search for named sites: the project's, the user's, the system's, and the shipped one."""
    return [Path("sites"), _user_folder(env) / "sites", etc / "envbuild" / "sites", shipped("sites")]


def named_sites(env: Mapping[str, str], *, etc: Path = Path("/etc")) -> dict[str, Path]:
    """Return the file of every named site; of two sites with the same name, the first folder's."""
    paths: dict[str, Path] = {}
    for folder in site_folders(env, etc=etc):
        for path in sorted(folder.glob("*.toml")):
            paths.setdefault(path.stem, path)
    return paths


def find_site(name: str, env: Mapping[str, str], *, etc: Path = Path("/etc")) -> Path:
    """Return the site file `name`: a path with / or .toml, else a name to search for. Raises UsageError without one."""
    if "/" in name or name.endswith(".toml"):
        if not os.path.isfile(name):
            raise UsageError(f"there is no site file {name}")
        return Path(name)
    folders = site_folders(env, etc=etc)
    for folder in folders:
        # Not Path.is_file, which raises for a name that is too long and for an unreadable folder.
        if name and os.path.isfile(folder / f"{name}.toml"):
            return folder / f"{name}.toml"
    known = sorted(named_sites(env, etc=etc))
    raise UsageError(f"there is no site {name!r}{nearest(name, known)}", f"Searched: {', '.join(map(str, folders))}")


def _user_folder(env: Mapping[str, str]) -> Path:
    return Path(env.get("XDG_CONFIG_HOME") or home_folder(env) / ".config") / "envbuild"


def _path(value: str, file: Path, env: Mapping[str, str]) -> Path:
    """Return a path of site.toml: ~ is the home folder, relative paths are relative to the file's folder."""
    return file.absolute().parent / _expanded(value, env)


def _expanded(value: str, env: Mapping[str, str]) -> Path:
    """Return a path with ~ and ~NAME replaced by home folders, because shells expand neither in quotes."""
    if value == "~" or value.startswith("~/"):
        return (home_folder(env) / value[2:]).absolute()
    return Path(os.path.expanduser(value))


def _resolved(table: Any, file: Path, env: Mapping[str, str]) -> Any:
    """Return `table` with resolved paths of keys, and with the user's name in paths and mounts."""
    match table:
        case tables.DebianTable(keyring=keyring) if keyring:
            return replace(table, keyring=str(_path(keyring, file, env)))
        case tables.AuditTable(database=folder) if folder:
            return replace(table, database=str(_path(folder, file, env)))
        case tables.TrustTable():
            signers, others = ([str(_path(f, file, env)) for f in g] for g in (table.signers, table.cache_signers))
            own = str(_path(table.sigstore, file, env)) if table.sigstore else ""
            return replace(table, signers=tuple(signers), cache_signers=tuple(others), sigstore=own)
        case jobs.HostStackTable():
            name = table.inventory or f"{file.stem}.stack.json"
            return replace(table, inventory=str(_path(name, file, env)))
        case jobs.PathsTable():
            return jobs.PathsTable(**{name: _with_user(path, env) for name, path in asdict(table).items()})
        case jobs.StageTable():
            return replace(table, dir=_with_user(table.dir, env))
        case jobs.ContainerTable():
            return replace(table, mounts=tuple(_with_user(mount, env) for mount in table.mounts))
    return table


def _with_user(text: str, env: Mapping[str, str]) -> str:
    try:
        return text.replace("{user}", env.get("USER") or getpass.getuser())
    except (KeyError, OSError):  # for example a container's user without a name
        return text.replace("{user}", str(os.getuid()))


if __name__ == "__main__":  # the JSON schema for editors
    import json

    print(json.dumps(json_schema(SiteFile, id="urn:envbuild:site", title="envbuild site file"), indent=2))
