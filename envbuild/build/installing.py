"""Common parts of environments in folders, which venv.py and conda.py build: host, wheels, source layers, state."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from envbuild.base import atomic, host, process
from envbuild.base.errors import BuildError
from envbuild.base.files import sha256_of, walk_stats
from envbuild.base.host import link_mode
from envbuild.base.progress import step
from envbuild.base.text import normalise, normalise_version
from envbuild.contract.installed import Distribution, distributions, record_rows
from envbuild.contract.kinds import FolderPrograms
from envbuild.contract.layer_lists import LayerList, list_files, parse_list
from envbuild.contract.manifest import Manifest, Stat, is_bytecode, other_code, seal, shown, write_manifest
from envbuild.contract.state import FILE, LAYER_LISTS, BuiltLayer, State, list_path, site_packages
from envbuild.environment import Environment, uv_hint
from envbuild.layers.wheel import INSTALLER_NOTES, Scheme, Trainer, WheelFile, wheel_programs, wheel_record
from envbuild.layers.wheels import pinned
from envbuild.plan import Plan, state_of
from envbuild.recipe.sources import SourceLayer


@dataclass(frozen=True, slots=True)
class FolderBuild:
    """The build of an environment in the empty folder `staged`, for the final absolute path `final`.

    `layers` returns the plan's source layers; it is called with the environment's interpreter after all packages are
    installed. `python` is the path or version of an interpreter of this host, None for the recipe's version; kinds that
    contain their own interpreter ignore it.
    """

    plan: Plan
    trainer: Trainer
    environment: Environment
    staged: Path
    final: Path
    offline: bool
    layers: Callable[[Path], Sequence[LayerFolder]] = lambda _python: ()
    python: str | None = None


class InstalledFilesDiffer(BuildError):
    """Installed files differ from the lock. uv's cache, to which they may be linked, was emptied."""


class FolderModule(FolderPrograms, Protocol):
    """A module that builds environments of one kind and starts programs in them."""

    # Whether the environment at `path` matches its `state`, by a quick check; `python` as in `FolderBuild`.
    def is_current(self, path: Path, state: State, python: str | None = None) -> bool: ...
    def build(self, folder_build: FolderBuild) -> State: ...


def interpreter(path: Path) -> Path:
    """Return the python of the environment at `path`."""
    return path / "bin" / "python"


def program_file(path: Path, program: str) -> str:
    """Return the path of `program` in the environment at `path`; other programs of the host are found on PATH."""
    file = path.absolute() / "bin" / program
    own = program in ("python", "torchrun") or os.path.lexists(file)
    return os.fspath(file) if own else program


def install_wheels(build: FolderBuild, wheels: Sequence[WheelFile], own: Sequence[WheelFile], *options: str) -> None:
    """Install the `wheels` of the plan, and the wheels of `own` code, with uv. Raises BuildError."""
    environment, staged = build.environment, build.staged
    listed = staged / ".requirements.txt"
    with atomic.writing(staged):
        listed.write_text(pinned((*wheels, *own)))
    command: list[str | Path] = [environment.uv, "pip", "install", "--no-deps", "--require-hashes", "--no-index"]
    command += ["--offline", "--no-config", "--quiet", "--python", interpreter(staged), "--requirements", listed]
    command += ["--link-mode", link_mode(environment.store.uv_cache, staged), *options]
    for source in dict.fromkeys(wheel.path.parent.absolute().as_uri() for wheel in (*wheels, *own)):
        command += ["--find-links", source]  # of a path, uv would split "," and cut off "#"
    with step(f"installing {len(wheels) + len(own)} wheels"):
        done = process.run(command, env=environment.uv_environment(), check=False)
    if done.returncode != 0:
        raise BuildError(
            f"{build.final}: uv could not install the locked wheels ({process.ending(done.returncode)}):\n"
            f"{process.tail(done)}",
            uv_hint(done.stderr, done.returncode),
        )
    with atomic.writing(staged):
        _apply_umask(staged, site_packages(staged, build.plan.python), stat.S_IMODE(listed.stat().st_mode))
        listed.unlink()
    (staged / ".lock").unlink(missing_ok=True)  # uv's; it is there or not, as uv could write it


def _apply_umask(staged: Path, packages: Path, umask: int) -> None:
    """Set the permissions of files that uv installed to `umask`, those of a new file, and keep the right to execute.

    The files are linked from uv's cache, whose permissions follow the umask of the run that filled it. Raises OSError.
    """
    # A right to write that is lacking is no reason for a copy; the folders tell who may read at all.
    wrong = [
        (name, info.st_mode)
        for name, info in walk_stats(staged)
        if stat.S_ISREG(info.st_mode) and (umask & ~info.st_mode & 0o444 or info.st_mode & ~umask & 0o222)
    ]
    if not wrong:
        return
    owned: set[str] = set()
    for installer in packages.glob("*.dist-info/INSTALLER"):
        if installer.read_text(encoding="utf-8").strip() == "uv":
            rows = _rows(installer.with_name("RECORD").read_bytes())
            owned |= {os.path.normpath(os.path.join(packages, row[0])) for row in rows if row}
    for name, mode in wrong:
        path = staged / name
        if os.fspath(path) in owned:  # a RECORD may name files outside
            with atomic.replacing(path, umask & 0o666 | mode & 0o111) as copy:
                shutil.copyfile(path, copy)


def finish(
    build: FolderBuild,
    own: Sequence[WheelFile],
    python_version: str,
    python: str,
    locked: Mapping[str, Collection[str]],
    conda: Sequence[Distribution] = (),
    owned: Collection[str] = (),
    read: Mapping[Stat, str] = {},
    rewritten: Collection[str] = (),
    python_build: str = "",
) -> State:
    """Install the source layers into an environment that has all packages, check it, write and return its state.

    `own` are the wheels of own code, `python` is the interpreter that the state names, `python_build` uv's name of it
    if uv downloaded it. `locked` has the sha256 that a file of a package may have, by path. `conda` are the conda
    packages, `owned` their .dist-info folders, `read` the sha256 of files that were read before, by stat, and
    `rewritten` the locked files into which their installation wrote a path. Raises the errors of `layers`; BuildError
    when packages or files differ from plan, layers and trainer, or when a file contains the path of the build folder;
    InstalledFilesDiffer when locked files differ.
    """
    plan, staged, environment = build.plan, build.staged, build.environment
    layers, workers = build.layers(interpreter(staged)), host.workers(environment.variables)
    with atomic.writing(staged):
        built = install_layers(layers, staged)
        added = distributions(site_packages(staged, plan.python), owned).values()
        _check_installed(build, own, layers, {distribution.name: distribution.version for distribution in added})
        packages = [(distribution.name, distribution.version, distribution.record) for distribution in (*conda, *added)]
        state = state_of(plan, python_version, python, packages, built, own, python_build)
        (staged / FILE).write_text(state.render(), encoding="utf-8")
        manifest, files = write_manifest(staged, workers, read)
    wrong = [path for path, known in locked.items() if getattr(manifest.rows.get(path), "sha256", "") not in known]
    # A wheel may bring bytecode (numpy), which --compile-bytecode writes again.
    again = [path for path in wrong if path in manifest.rows and is_bytecode(path)] if plan.compile_bytecode else []
    if wrong := sorted({*wrong} - {*again} | {*other_code(staged, again, str(interpreter(staged)), workers)}):
        process.run([environment.uv, "cache", "clean", "--quiet"], env=environment.uv_environment(), check=False)
        raise InstalledFilesDiffer(
            f"installed files are not those of the locked packages: {shown(wrong)}",
            f"`envbuild store check` says whether the files in {environment.store.root} are as they were downloaded",
        )
    with atomic.writing(staged):
        _check_moved(build, manifest, locked.keys() - rewritten)
    seal(staged, manifest, files, environment.store)
    return state


def _check_moved(folder_build: FolderBuild, manifest: Manifest, known: Collection[str]) -> None:
    """Raise BuildError for a file that contains the path of the build folder, which is renamed later.

    Files at `known` paths are those of a lock. Bytecode may contain it: Python corrects the path on loading.
    """
    wrong = [
        path
        for path in manifest.rows
        if path not in known and not is_bytecode(path) and atomic.names_staging(folder_build.staged / path)
    ]
    if wrong:
        raise BuildError(
            f"{folder_build.final}: {shown(wrong)}: names {folder_build.staged}, "
            "a folder that exists during the build only",
            "if a layer has the file, its build writes the path of its Python: give it an option or a patch that keeps "
            "that out; else it is a fault of the installer: report it",
        )


def locked_files(wheels: Sequence[WheelFile], python: str, staged: Path, *, conda: bool = False) -> dict[str, set[str]]:
    """Return the sha256 that the files of `wheels` may have, by path in the environment, without generated files.

    When several wheels have a path, installers keep any of them. Raises BuildError when no RECORD in `staged` lists a
    file: uv 0.13 ignores errors of writing it.
    """
    scheme, digests, listed = Scheme("prefix", python, conda), dict[str, set[str]](), set[str]()
    packages = site_packages(Path(), python)
    # A program is a file of uv's cache, too, unless an installer writes it: a change there would come into every build.
    programs = [wheel_programs(wheel.path, scheme) for wheel in wheels]
    written = {path for program in programs for path, copied in program.items() if not copied}
    for wheel in wheels:
        for path, digest, _ in _rows(wheel_record(wheel.path, scheme)):
            place = os.path.normpath(packages / path)
            if digest and path not in written and not INSTALLER_NOTES.fullmatch(path):
                digests.setdefault(place, set()).add(base64.urlsafe_b64decode(digest.partition("=")[2] + "=").hex())
    with atomic.writing(staged):
        for file in (staged / packages).glob("*.dist-info/RECORD"):
            listed |= {os.path.normpath(packages / row[0]) for row in _rows(file.read_bytes()) if row}
    if missing := sorted(digests.keys() - listed):
        raise BuildError(f"{staged}: uv wrote no complete RECORD: {shown(missing)} not listed", "run it again")
    if (staged / "lib64").is_symlink():  # to lib, in a venv
        for place in [place for place in digests if place.startswith("lib64/")]:
            digests.setdefault(place.replace("lib64", "lib", 1), set()).update(digests.pop(place))
    return digests


def _rows(record: bytes) -> Iterator[list[str]]:
    return record_rows(record.decode("utf-8", "surrogateescape"))


def _check_installed(
    build: FolderBuild, own: Sequence[WheelFile], layers: Sequence[LayerFolder], installed: Mapping[str, str]
) -> None:
    locked = {package.name: package.version for package in build.plan.packages}
    locked |= {wheel.name: wheel.version for wheel in own}
    locked |= {name: version for layer in layers for name, version in layer.distributions}
    # The folder of a distribution may spell its version in another way: 2020.01.01.
    same = {
        name
        for name in locked.keys() & installed
        if normalise_version(locked[name]) == normalise_version(installed[name])
    }
    wrong = sorted(
        f"{name}: locked {locked.get(name, 'nothing')}, installed {installed.get(name, 'nothing')}"
        for name in (locked.keys() | installed.keys()) - same
    )
    if wrong:
        raise BuildError("the installed packages differ from the lock:\n  " + "\n  ".join(wrong))


# ioctl_ficlone(2) makes two files share their blocks; file systems that cannot do it fail.
_FICLONE = 0x40049409
_RECORD = re.compile(r"lib/python[^/]+/site-packages/([^/-]+)-([^/]+)\.dist-info/RECORD")


@dataclass(frozen=True, slots=True)
class LayerFolder:
    """A source layer that was built; `listed` lists the files in `folder` that go below an environment's root."""

    source: SourceLayer
    folder: Path
    listed: LayerList

    @property
    def title(self) -> str:
        return f"{self.source.name} {self.source.version}"

    @property
    def built(self) -> BuiltLayer:
        """The layer as the environment's state records it."""
        layer = self.source
        return BuiltLayer(layer.name, layer.version, self.listed.digest, check=layer.check)

    @property
    def distributions(self) -> set[tuple[str, str]]:
        """(normalized name, version) of the Python distributions in it, if it was built as a wheel."""
        matches = (_RECORD.fullmatch(file.path) for file in self.listed.files)
        return {(normalise(match[1]), match[2]) for match in matches if match}


def layer_folder(source: SourceLayer, folder: Path, digest: Callable[[Path], str] = sha256_of) -> LayerFolder:
    """Return the source layer in `folder`; `digest` returns the sha256 of a file.

    Raises BuildError for a layer that cannot be installed.
    """
    try:
        files = list_files(folder, digest)
    except (OSError, ValueError) as error:
        raise BuildError(f"layer {source.name}: {folder}: {error}") from error
    if not files:
        raise BuildError(
            f"layer {source.name} {source.version}: its build installed nothing",
            "read its log; `make install` must honour DESTDIR",
        )
    return LayerFolder(source, folder, LayerList(source.name, source.version, source.sha256, files))


def install_layers(layers: Sequence[LayerFolder], root: Path) -> tuple[BuiltLayer, ...]:
    """Copy the layers below `root`, a new environment. Raises BuildError for a path that already exists, OSError."""
    for layer in layers:
        for file in layer.listed.files:
            place = root / file.path
            if os.path.lexists(place):
                raise _clash(layer, file.path, next(_owners(root, file.path), "the environment"))
            place.parent.mkdir(parents=True, exist_ok=True)
            if file.target:
                place.symlink_to(file.target)
            else:
                _copy(layer.folder / file.path, place)
                place.chmod(file.mode)
        layer.listed.write(root)
    return tuple(layer.built for layer in layers)


def check_free(layers: Sequence[LayerFolder], owners: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Raise BuildError when two layers, or a layer and an owner (its name, its paths), have the same path."""
    taken: dict[str, LayerFolder] = {}
    for layer in layers:
        for path in [*(file.path for file in layer.listed.files), list_path(layer.source.name)]:
            if path in taken:
                raise _clash(layer, path, f"layer {taken[path].title}")
            taken[path] = layer
    for owner, paths in owners:
        for path in paths:
            if path in taken:
                raise _clash(taken[path], path, owner)


def _copy(source: Path, place: Path) -> None:
    # Not hard-linked: a write in the environment must not change the store.
    with source.open("rb") as reading, place.open("xb") as other:
        try:
            fcntl.ioctl(other.fileno(), _FICLONE, reading.fileno())
        except OSError:
            shutil.copyfileobj(reading, other, 4 << 20)


def _clash(layer: LayerFolder, path: str, other: str) -> BuildError:
    return BuildError(
        f"layer {layer.title} and {other} both have {path}",
        f"leave one out: the layer ([layers.{layer.source.name}] in the recipe), or the other package with the file",
    )


def _owners(root: Path, path: str) -> Iterator[str]:
    """Yield the owners of `path` in the environment at `root`, for a message."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        for file in sorted((root / LAYER_LISTS).glob("*.json")):
            known = parse_list(file.read_bytes())
            if any(file.path == path for file in known.files):
                yield f"layer {known.name} {known.version}"
        for file in sorted((root / "conda-meta").glob("*.json")):
            record: Mapping[str, object] = json.loads(file.read_bytes())
            if path in record.get("files", ()):  # type: ignore[operator]
                yield f"conda package {record['name']} {record['version']}"
        for file in sorted(root.glob("lib/python*/site-packages/*.dist-info/RECORD")):
            packages = file.parents[1]
            for line in file.read_text(encoding="utf-8").splitlines():
                if os.path.normpath(packages / line.partition(",")[0]) == os.path.normpath(root / path):
                    yield file.parent.name.removesuffix(".dist-info").replace("-", " ", 1)
