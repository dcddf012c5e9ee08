"""The Python of a build: one of this host, one in the store, or one that uv downloads into the store.

`choose_python` decides for every build, and for every command that predicts a build. Downloaded Pythons are uv's
(python-build-standalone). They are in `interpreters/` of the store, each beside a list of the environments that link to
it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from envbuild.base import atomic, process
from envbuild.base.errors import BuildError, HostError
from envbuild.base.files import parse_json
from envbuild.base.masking import redact
from envbuild.base.progress import log, step
from envbuild.base.workers import run_parallel
from envbuild.cache.http import RequestFailed
from envbuild.environment import Environment, uv_hint
from envbuild.interpreter import HostPython, ask_program, minor_of, read_python
from envbuild.recipe.model import PYTHONS
from envbuild.site.pip_config import uv_environment
from envbuild.store.archives import KIND as SOURCES
from envbuild.store.archives import unpack, write_tar
from envbuild.store.client import Client, SourceAnswer, from_vault, path_of
from envbuild.store.store import Store

# Folders of the store: downloaded Pythons, and the environments that use each.
FOLDER, USERS = "interpreters", "interpreters/.users"
_VERSION = re.compile(r"\d+\.\d+(\.\d+)?")
_BUILD = re.compile(r"cpython-(\d+\.\d+\.\d+)-linux-(\w+)-gnu")
# In the addresses of python-build-standalone's archives, all mirrors have what follows.
_RELEASES = "/releases/download/"
_STANDALONE = f"https://github.com/astral-sh/python-build-standalone{_RELEASES}"
# A server that takes longer counts as one that cannot be reached.
_PATIENCE_S = 3.0


# Version and path of Pythons.
Installed = list[tuple[str, str]]


class _NotOffered(HostError):
    """The reason why uv cannot download a Python."""


@dataclass(frozen=True, slots=True)
class OfferedPython:
    """A Python that this host lacks and that uv can download: its version, uv's name of it, and its address.

    `mirror` is the address that uv gets in place of its own, "" for none. One that the vault at `url` keeps has the
    sha256 of its archive (hexadecimal) as `kept`; uv is not asked for it.
    """

    version: str
    build: str
    url: str
    mirror: str = ""
    kept: str = ""

    @property
    def minor(self) -> str:
        """The version as recipes have it: 3.11."""
        return minor_of(self.version)

    def __str__(self) -> str:
        if self.kept:
            return f"Python {self.version}, which the vault keeps ({self.build})"
        return f"Python {self.version}, which uv downloads ({self.build} from {redact(self.url).rpartition('/')[0]})"


def choose_python(
    version_or_path: str, environment: Environment, *, offline: bool = False, installed: Installed | None = None
) -> HostPython | OfferedPython:
    """Return the Python of a version, or at a path: this host's, else the store's, else one that uv downloads.

    Nothing is written but a note of the answer. `installed` are this host's Pythons if they are known already. Raises
    HostError without any Python, in less than five seconds.
    """
    if os.sep in version_or_path:
        return read_python(version_or_path)
    here = installed is None or any(f"{version}.".startswith(f"{version_or_path}.") for version, _ in installed)
    if here and (python := find_python(version_or_path, environment)):
        return python
    try:
        return _offer(version_or_path, environment, offline)
    except _NotOffered as error:
        listed = ", ".join(f"{version} ({path})" for version, path in installed or installed_pythons(environment))
        raise HostError(
            f"this host has no Python {version_or_path}, it has {listed}; {error.message}", error.hint
        ) from None


def find_python(version: str, environment: Environment) -> HostPython | None:
    """Return the Python of this version on this host, else in the store, None without one."""
    here = _known(version, environment) or _on_host(version, environment)
    return here or next(_stored(version, environment.store), None)


def own_python(version: str) -> HostPython | None:
    """Return the Python that runs envbuild if it has this `version`, else None."""
    return read_python(sys.executable) if _is_own(version) else None


def _is_own(version: str) -> bool:
    return f"{platform.python_version()}.".startswith(f"{version}.") and sys.implementation.name == "cpython"


def provide_python(version: str, environment: Environment, *, offline: bool = False) -> HostPython:
    """Return the Python `version` as `choose_python` chooses it; uv downloads it if need be, which is announced.

    Raises HostError, and BuildError when the store cannot be written.
    """
    chosen = choose_python(version, environment, offline=offline)
    if isinstance(chosen, OfferedPython):
        return _download(chosen, environment)
    if chosen.build:
        environment.store.note_use(path := _home(chosen, environment.store), path)
    return chosen


def installed_pythons(environment: Environment, patience_s: float | None = None) -> Installed:
    """Return version and path of the Pythons of this host and of the store, one of each version.

    Raises HostError when uv needs more than `patience_s` for them.
    """
    command = [environment.uv, "python", "list", "--only-installed", "--output-format", "json", "--no-config"]
    done = ask_program(command, _variables(environment), patience_s)
    rows = json.loads(done.stdout) if done.returncode == 0 else []
    rows_found = [(str(row["version"]), str(row["path"])) for row in rows if row["implementation"] == "cpython"]
    rows_found.append((platform.python_version(), sys.executable))
    rows_found += [
        (python.version, python.path) for version in PYTHONS for python in _stored(version, environment.store)
    ]
    return list(dict(reversed(rows_found)).items())[::-1]


def keep_python(build: str, path: Path, store: Store) -> None:
    """Record that the environment at `path` uses the Python `build` of the store ("" for none)."""
    if not build:
        return
    place = os.path.realpath(path)
    with contextlib.suppress(OSError, BuildError):  # a store that cannot be written is not pruned either
        note = store.folder(USERS, build) / hashlib.sha256(os.fsencode(place)).hexdigest()
        if not note.is_file():
            atomic.write_atomically(note, place)


def _variables(environment: Environment) -> dict[str, str]:
    """Return the environment of uv for queries; it does not create the store."""
    root = environment.store.root
    if root.exists():
        return environment.uv_environment()
    return {**uv_environment(environment.pip, environment.variables, root / "uv"), "UV_NO_CACHE": "1"}


def _known(version: str, environment: Environment) -> HostPython | None:
    """Return the Python of this host that was found last time, which saves 0.1 s, if it is unchanged."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        size, time, fields = parse_json(_note(version, environment).read_bytes())
        python = HostPython(**fields)
        stat = os.stat(python.path)
        if (stat.st_size, stat.st_mtime_ns) == (size, time):
            return python
    return None


def _note(version: str, environment: Environment) -> Path:
    names = ("PATH", "PYENV_VERSION", "UV_PYTHON_PREFERENCE", "UV_PYTHON_INSTALL_DIR")
    key = json.dumps([version, sys.executable, *(environment.variables.get(name) for name in names)])
    return environment.store.root / "pythons" / hashlib.sha256(key.encode()).hexdigest()


def _on_host(version: str, environment: Environment) -> HostPython | None:
    """Return the Python that uv finds, else envbuild's own if it has this `version`."""
    command = [environment.uv, "python", "find", "--no-project", "--no-config", version]
    done = ask_program(command, _variables(environment))
    paths = [done.stdout.strip()] if done.returncode == 0 else []
    if _is_own(version):
        paths.append(sys.executable)
    for path in paths:
        with contextlib.suppress(HostError):
            python = read_python(path)
            with contextlib.suppress(OSError):
                stat, note = os.stat(python.path), _note(version, environment)
                if environment.store.root.exists():  # a dry run makes no store
                    atomic.write_atomically(note, json.dumps([stat.st_size, stat.st_mtime_ns, asdict(python)]))
            return python
    if re.search(r"\(os error (?!2\))", done.stderr):  # such as a cache that cannot be written: any error but ENOENT
        raise BuildError(
            f"uv cannot look for Python {version}:\n{process.tail(done)}", uv_hint(done.stderr, done.returncode)
        )
    return None


def _stored(python_version: str, store: Store) -> Iterator[HostPython]:
    """Yield the Pythons of the store whose version is, or begins with, `python_version`, the newest first."""
    candidates = []
    for path in (store.root / FOLDER).glob(f"cpython-*-{platform.machine()}-*"):
        version = path.name.split("-")[1]
        if not path.is_symlink() and f"{version}.".startswith(f"{python_version}."):
            candidates.append(([int(part) if part.isdigit() else 0 for part in version.split(".")], path))
    for _, path in sorted(candidates, reverse=True):
        with contextlib.suppress(HostError):
            yield _of_store(path)


def _of_store(path: Path) -> HostPython:
    program = path / "bin" / f"python{minor_of(path.name.split('-')[1])}"
    return replace(read_python(str(program)), path=str(program), build=path.name)


def _home(python: HostPython, store: Store) -> Path:
    return store.root / FOLDER / python.build


def _offer(version: str, environment: Environment, offline: bool) -> OfferedPython:
    """Return the Python that uv downloads for `version`. Raises _NotOffered if none is allowed, known or reachable."""
    other = f"install Python {version} (a package of the distribution, a module), or name one with --python PATH"
    if not _VERSION.fullmatch(version):
        raise _NotOffered("uv can download a version alone", "name a version (3.11), or the path of a Python")
    if forbidden := _forbidden(environment):
        raise _NotOffered(f"{forbidden} forbids to download one", other)
    if kept := _kept(version, environment):
        return kept
    rows = _listed(version, environment)
    if not rows:
        raise _NotOffered("uv offers none for this host", other)
    addresses = _addresses(rows[0], environment)
    reasons = _unreached(addresses, environment, offline)
    for python, reason in zip(addresses, reasons, strict=True):
        if reason is None:
            return python
    hint = (
        f"run `{shlex.quote(environment.uv)} python install {version}` where the network is reached (`--mirror URL` "
        "for a mirror of python-build-standalone, which may be a folder: file:///PATH), then run this again"
    )
    raise _NotOffered(f"uv cannot download one: {'; '.join(filter(None, reasons))}", hint)


def _kept(version: str, environment: Environment) -> OfferedPython | None:
    """Return the newest Python of this version that the vault has for this host, None without one."""
    from envbuild.store.remote import kept_inputs  # with the HTTP client, which few hosts need for a Python

    if (vault := environment.store.vault) is None:
        return None
    try:
        found = [match for name in vault.entries("python") if (match := _BUILD.fullmatch(name))]
        fits = [match for match in found if f"{match[1]}.".startswith(f"{version}.") and match[2] == platform.machine()]
        for match in sorted(fits, key=lambda match: [*map(int, match[1].split("."))], reverse=True):
            (file,) = kept_inputs(vault, match[0], "python")[0]
            return OfferedPython(match[1], match[0], vault.name, kept=file.digest.partition(":")[2])
    except (BuildError, ValueError) as error:
        log(f"the vault's Pythons are not used: {error}")
    return None


def pack_python(version: str, environment: Environment) -> tuple[str, Path] | None:
    """Return uv's name of the Python that this store has for a version, and its archive; None for one of the host."""
    store = environment.store
    if (python := find_python(version, environment)) is None or not python.build:
        return None
    with store.working("building") as work:
        write_tar(_home(python, store), archive := work / "python.tar")
        return python.build, store.adopt(archive, store.digests.of(archive), f"{python.build}.tar", SOURCES)


def _from_vault(offered: OfferedPython, home: Path, store: Store) -> HostPython:
    answers: list[SourceAnswer] = []
    archive = from_vault({offered.kept}, store, answers, kind=SOURCES, named=lambda _: f"{offered.build}.tar")
    if archive is None:
        raise HostError(f"Python {offered.version} is not there: {answers[0]}", "keep it again: envbuild vault push")
    with atomic.exclusive(home, log), atomic.staged(home) as staged, atomic.writing(home.parent):
        unpack(archive, staged / "python")
        atomic.replace(staged / "python", home)
    return _of_store(home)


def _forbidden(environment: Environment) -> str:
    """Return what forbids downloads of Pythons, "" if they are allowed."""
    site, variables = environment.site, environment.variables
    if site.python.downloads == "never":
        return site.origin("python", "downloads")
    if variables.get("UV_PYTHON_DOWNLOADS", "automatic") in ("never", "manual", "false"):
        return f"UV_PYTHON_DOWNLOADS={variables['UV_PYTHON_DOWNLOADS']}"
    if variables.get("UV_PYTHON_PREFERENCE") == "only-system":
        return "UV_PYTHON_PREFERENCE=only-system"
    return ""


def _listed(version: str, environment: Environment) -> list[OfferedPython]:
    """Return the CPythons that uv offers for `version` on this host, the best first."""
    command = [environment.uv, "python", "list", version, "--only-downloads", "--output-format", "json", "--no-config"]
    # uv's list is in its program, unless UV_PYTHON_DOWNLOADS_JSON_URL names one on a server.
    done = ask_program(command, {**_variables(environment), "UV_HTTP_RETRIES": "0", "UV_HTTP_TIMEOUT": "2"})
    rows = json.loads(done.stdout) if done.returncode == 0 else []
    return [
        OfferedPython(str(row["version"]), str(row["key"]), str(row["url"]))
        for row in rows
        if row["implementation"] == "cpython" and row["variant"] == "default" and row["url"]
    ]


def _addresses(offered: OfferedPython, environment: Environment) -> list[OfferedPython]:
    """Return `offered` at each address to try: those of the site's [mirrors], then uv's, then the project's own."""
    _, releases, tail = offered.url.partition(_RELEASES)
    if not releases or environment.variables.get("UV_PYTHON_INSTALL_MIRROR"):
        return [offered]
    # Newer versions of uv ask a server of their own first, with the same files.
    own = dict.fromkeys((offered.url, _STANDALONE + tail))
    urls = [*(url for own_url in own for url in environment.site.mirrored(own_url)[:-1]), *own]
    return [
        replace(offered, url=url, mirror="" if url == offered.url else url.removesuffix(f"/{tail}")) for url in urls
    ]


def _unreached(tries: Sequence[OfferedPython], environment: Environment, offline: bool) -> list[str | None]:
    """Return for each of `tries` why its archive is not available, None if it is; all servers are asked in parallel."""
    reasons: list[str | None] = []
    asked: list[Callable[[], None]] = []
    pip = replace(environment.pip, retries=0, timeout_s=_PATIENCE_S - 1)

    def ask(number: int, url: str, server: str) -> None:
        try:
            Client(pip, environment.variables).reach(url)
            reasons[number] = None
        except RequestFailed as error:
            reasons[number] = f"{server}: {error}"

    for number, attempt in enumerate(tries):
        server = redact("/".join(attempt.url.split("/")[:3]))
        if attempt.url.startswith("file:"):
            reasons.append(None if path_of(attempt.url).is_file() else f"there is no file {path_of(attempt.url)}")
        elif offline:
            reasons.append(f"--offline forbids to ask {server}")
        else:
            reasons.append(f"{server} does not answer")
            asked.append(partial(ask, number, attempt.url, server))
    # A resolver without a server takes longer than any timeout of a connection.
    run_parallel(asked, _PATIENCE_S)
    return list(reasons)


def _download(offered: OfferedPython, environment: Environment) -> HostPython:
    """Download a Python into the store with uv, and return it. Raises HostError, and BuildError for the store."""
    store = environment.store
    folder = store.folder(FOLDER)
    if offered.kept:
        return _from_vault(offered, folder / offered.build, store)
    log(f"this host has no Python {offered.minor}: uv downloads {offered.build} from {redact(offered.url)} to {folder}")
    variables = {**environment.uv_environment(), "UV_PYTHON_DOWNLOADS": "manual"}
    if offered.mirror:
        variables["UV_PYTHON_INSTALL_MIRROR"] = offered.mirror
    with store.writing(), step(f"downloading Python {offered.version}"):
        command: list[str | Path] = [environment.uv, "python", "install", offered.version, "--install-dir", folder]
        command += ["--no-bin", "--no-config", "--quiet"]
        done = process.run(command, env=variables, check=False)
        for link in folder.glob("cpython-*"):  # to the newest of a minor version, which the next download moves
            if link.is_symlink():
                link.unlink()
    if done.returncode != 0:
        raise HostError(f"uv cannot download Python {offered.version}:\n{process.tail(done)}", "run it again")
    python = _of_store(folder / offered.build)
    store.note_use(path := folder / offered.build, path)
    return python
