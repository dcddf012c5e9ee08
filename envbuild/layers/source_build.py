"""Download and build of source layers, which the store keeps by a digest of their inputs.

- `sources/<sha256>/<file name>`: archives, as they were released
- `built/<digest>/tree/`: the files below an environment's root
- `built/<digest>/manifest.json`: the list of the files; the folder is renamed into place when it is complete
- `building/`: builds in progress; a later run removes the remains of a killed one
- `logs/`: logs of failed builds
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tarfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from envbuild.base.atomic import file_lock, names_staging, remove_tree, replacing
from envbuild.base.errors import BuildError
from envbuild.base.host import workers
from envbuild.base.progress import Log, reuse
from envbuild.environment import Environment
from envbuild.image.limits import ImageLimits, Quota
from envbuild.jobcheck.diagnose.engine import explain
from envbuild.layers.source_files import SourceManifest, list_files, patchelf_program, read_manifest, write_manifest
from envbuild.layers.source_job import BuildHost, BuildPython, SourceBuild, StepError
from envbuild.layers.source_steps import interpreter_in, make_layer, unpack_cuda, unpack_tools
from envbuild.layers.wheels import fetch_wheels
from envbuild.recipe.sources import SourceLayer
from envbuild.store.archives import WantedArchive, locate_archive, unpack
from envbuild.store.entry import CacheEntry, fetched
from envbuild.store.store import Store

# Increase it when the same inputs would result in other files: layers from older versions are then not used.
_ENGINE = 2
_KEPT_LOGS = 20
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
BuildHosts = Callable[[Path], AbstractContextManager[BuildHost]]


def build_layer(
    layer: SourceLayer,
    requires: Mapping[str, Path],
    build_host: BuildHosts,
    environment: Environment,
    log: Log,
    *,
    offline: bool,
    hosts: Mapping[str, str] = {},
    python: BuildPython | None = None,
) -> Path:
    """Build the layer if the store lacks it; return the folder with its files for the environment's root.

    `requires` are the folders that this function returned for layers that `layer` requires, `hosts` the nodes' folders
    for required host layers, each by name; both may contain more than the layer requires. A Python project is built for
    `python`, and may import the packages of its environment. `layer.environment` identifies them, so the interpreter's
    path does not affect the result. `build_host` opens a build host with an empty work folder. The files belong to the
    store: copy them, and never hard-link them to a place where others write.

    Raises BuildError naming the failed step, with the end of its log, and any exception of `build_host`. If another
    process builds the same layer, this call waits for it. Ctrl-C stops the build and leaves only the archive.
    """
    missing = [name for name in layer.requires if name not in requires and name not in hosts]
    if missing:
        raise BuildError(f"{layer.name} {layer.version} requires {', '.join(missing)}, not built yet")
    store = environment.store
    tree = _tree(store, layer, requires, hosts)
    digest = store.digests.of
    if read_manifest(tree, digest) is not None:
        reuse("source layers", layer.name, True)
        return tree
    with file_lock(store.folder("partial") / f"built-{tree.parent.name}.lock", remove=True):
        if read_manifest(tree, digest) is None and not _fetched(store, tree, environment.site.limits):
            begun = time.monotonic()
            with store.working("building") as folder:
                made = _build(layer, requires, hosts, python, build_host, folder, environment, log, offline)
                _put(store, made, tree.parent)
            seconds = time.monotonic() - begun
            log(f"{layer.name} {layer.version}: built in {seconds:.0f} s")
            reuse("source layers", layer.name, False)
            if store.remote is not None:
                store.remote.offer(pack_built(store, tree.parent), seconds)
    reuse("source layers", layer.name, True)
    return tree


def _fetched(store: Store, tree: Path, limits: ImageLimits) -> bool:
    """Fetch the layer into `tree` from the team's cache, within the site's `limits`; return whether this succeeded."""
    entry, quota = CacheEntry("built", tree.parent.name), Quota(limits)

    def count(name: str, size: int) -> None:
        quota.entry(name)
        quota.content(name, size)

    def unpacked() -> bool | None:
        with suppress(BuildError, OSError), store.working("building") as folder:
            unpack(store.root / entry.files[0], folder / "made", count)
            if read_manifest(folder / "made" / "tree") is not None:
                _put(store, folder / "made", tree.parent)
                return read_manifest(tree, store.digests.of) is not None or None
        return None

    return fetched(entry, store.remote, unpacked) is not None


def pack_built(store: Store, place: Path) -> CacheEntry:
    """Pack the built layer in the folder `place` into one file for the team's cache; return it. Raises BuildError."""
    entry = CacheEntry("built", place.name)
    archive = store.root / entry.files[0]
    store.folder("partial")
    with store.writing(), replacing(archive) as temporary, tarfile.open(temporary, "w:gz", compresslevel=6) as tar:
        for name in ("manifest.json", "tree"):
            tar.add(place / name, name)
    return entry


def stored_layer(
    layer: SourceLayer, requires: Mapping[str, Path], environment: Environment, hosts: Mapping[str, str]
) -> Path | None:
    """Return the layer's folder in the store, or None if `build_layer` would have to build it."""
    tree = _tree(environment.store, layer, requires, hosts)
    return tree if read_manifest(tree, environment.store.digests.of) is not None else None


def _tree(store: Store, layer: SourceLayer, requires: Mapping[str, Path], hosts: Mapping[str, str]) -> Path:
    """Return the store's folder for the layer's files, named by a digest of all inputs. Raises BuildError."""
    below = []
    for name in sorted(set(layer.requires) - hosts.keys()):
        manifest = read_manifest(requires[name], store.digests.of)
        if manifest is None:
            raise BuildError(f"the built layer {name} in the store is damaged: {requires[name]}", "remove that folder")
        below.append([name, manifest.digest])
    outside = {name: hosts[name] for name in layer.requires if name in hosts}
    content = json.dumps([_ENGINE, layer.digest, below, sorted(outside.items())])
    return store.root / "built" / hashlib.sha256(content.encode()).hexdigest() / "tree"


def _build(
    layer: SourceLayer,
    requires: Mapping[str, Path],
    hosts: Mapping[str, str],
    python: BuildPython | None,
    build_host: BuildHosts,
    folder: Path,
    environment: Environment,
    log: Log,
    offline: bool,
) -> Path:
    """Build the layer in `folder`, and return the folder there with tree and manifest."""
    archive = fetch_source(layer, environment, offline=offline)
    cuda = fetch_wheels(layer.wheels, environment, offline=offline)
    tools = fetch_wheels(layer.build, environment, layer.indexes, offline=offline)
    patchelf_program()  # raises now, not after minutes, when it is missing
    work, title = folder / "work", f"{layer.name} {layer.version}"
    work.mkdir()
    with build_host(work) as host:
        built = [name for name in layer.requires if name not in hosts]
        for name in built:
            shutil.copytree(requires[name], work / "requires" / name, symlinks=True)
        places = {name: host.inside / "requires" / name for name in built}
        if cuda:
            unpack_cuda(cuda, work / "cuda")
            places["cuda"] = host.inside / "cuda"
        interpreter = "python3"
        if layer.system == "wheel":
            unpack_tools(tools, work)
            if python is not None:
                interpreter = interpreter_in(host, python, isolated=layer.isolated)
        for patch in layer.patches:  # the layer's digest includes the digest that the patch had for the plan
            if hashlib.sha256(Path(patch.path).read_bytes()).hexdigest() != patch.sha256:
                raise BuildError(f"{patch.path} was changed during the build", "run it again")
        outside = {name: hosts[name] for name in layer.requires if name in hosts}
        job = SourceBuild(
            layer,
            archive,
            host,
            places,
            outside,
            [Path(patch.path) for patch in layer.patches],
            interpreter,
            workers(environment.variables),
            log,
        )
        try:
            named = make_layer(job)
        except StepError as error:
            raise failure(title, error, _keep(environment.store, layer, error)) from None
        except OSError as error:
            if error.errno in _UNWRITABLE:
                raise environment.store.unwritable(error) from error
            raise BuildError(f"{title} cannot be built: {error}") from error
    if lost := [name for name in named if names_staging(job.staged / name)]:
        raise BuildError(
            f"{title} cannot be built: its file {lost[0]} names the folder in which its environment is built, which "
            "exists during the build only",
            "its build writes the path of its Python: add an option or a patch to the layer that prevents it",
        )
    if named:
        log(f"{title}: usable only in images, because of the paths in {', '.join(named)}")
    made = folder / "made"
    made.mkdir()
    os.rename(job.staged, made / "tree")
    write_manifest(made, SourceManifest(layer.name, layer.version, list_files(made / "tree")))
    return made


def _put(store: Store, made: Path, place: Path) -> None:
    """Move a built layer to its path in the store; replace a damaged layer there, keep a good one."""
    store.folder("built")
    made.chmod(0o755)
    try:
        if place.exists() and read_manifest(place / "tree", store.digests.of) is None:
            remove_tree(place)
        os.rename(made, place)
    except OSError as error:
        if read_manifest(place / "tree", store.digests.of) is None:
            raise store.unwritable(error) from error


def _keep(store: Store, layer: SourceLayer, error: StepError) -> Path | None:
    """Keep the log of a failed build, and return its path; None when it cannot be kept."""
    try:
        logs = store.folder("logs")
        place = logs / f"{layer.name}-{layer.version}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
        keep_log(error, place)
        for old in sorted(logs.glob("*.log"), key=lambda path: path.stat().st_mtime)[:-_KEPT_LOGS]:
            old.unlink(missing_ok=True)
    except (OSError, BuildError):
        return None
    return place


def fetch_source(layer: SourceLayer, environment: Environment, *, offline: bool) -> Path:
    """Return the layer's archive. Raises BuildError with each source that was tried and its answer."""
    table = "" if layer.locked else f"layers.{layer.name}"
    archive = WantedArchive(layer.name, layer.version, layer.url, layer.sha256, table, layer.indexes)
    return locate_archive(archive, environment, offline=offline)


_TAIL_LINES = 25
# The end of a log has the reason; compilers' messages may be long.
_TAIL_BYTES = 1 << 16
_CONFIG_LINES = 15


def failure(name: str, error: StepError, kept: Path | None) -> BuildError:
    """Return the error for a failed step of the layer `name`; `kept` is the path of the complete log."""
    text = log = _end(error.log_file)
    lines = [line for line in log.splitlines() if line.strip()][-_TAIL_LINES:]
    shown = [f"{name}: {error.step} failed (exit {error.status}):", *(f"  {line}" for line in lines)]
    for more in error.more:
        part = config_error(more)
        if part:
            shown += [f"  {more.name}:", *(f"    {line}" for line in part)]
            text = "\n".join([*part, log])
    if kept is not None:
        shown.append(f"  all of it: {kept}")
    hint = explain(f"exit status {error.status}\n{text}", "source-build")
    return BuildError("\n".join(shown), hint or None)


def config_error(path: Path) -> list[str]:
    """Return config.log's last lines before configure gave up: the failed test, and the compiler's message."""
    lines = _end(path, 1 << 20).splitlines()
    ends = [n for n, line in enumerate(lines) if re.match(r"configure:[0-9]+: error:", line)]
    if not ends:
        return []
    # The source of the failed test program, printed between the message and the error, is left out: it explains little.
    before = [line for line in lines[: ends[-1]] if not line.startswith("|")]
    return [*before[-_CONFIG_LINES:], lines[ends[-1]]]


def _end(path: Path, most: int = _TAIL_BYTES) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - most))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def keep_log(error: StepError, place: Path) -> None:
    """Copy the log of a failed step, followed by its other logs, to `place`. Raises OSError."""
    shutil.copyfile(error.log_file, place)
    with place.open("ab") as out:
        for log in error.more:
            out.write(f"\n==== {log.name}\n".encode())
            with log.open("rb") as stream:
                shutil.copyfileobj(stream, out)
