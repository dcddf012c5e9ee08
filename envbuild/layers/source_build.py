"""Source layers: downloaded, built once per inputs, kept in the store.

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
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path, PurePath

from envbuild.environment import Environment
from envbuild.errors import BuildError
from envbuild.file_lock import file_lock
from envbuild.layers.build_host import BuildHost
from envbuild.layers.relocate import Relocated, host_libraries, patchelf_program, relocate
from envbuild.layers.source_causes import failure, keep_log
from envbuild.layers.source_fetch import fetch_source, fetch_wheels
from envbuild.layers.source_job import SourceBuild, StepError
from envbuild.layers.source_manifest import SourceManifest, list_files, read_manifest, write_manifest
from envbuild.layers.source_steps import make_layer
from envbuild.layers.source_unpack import unpack_cuda
from envbuild.layers.source_wheel import environment_of, renew_records, unpack_tools
from envbuild.recipe.sources import SourceLayer
from envbuild.resources import workers
from envbuild.store.store import Store, remove_tree

# Increase it when the same inputs would result in other files: layers from older versions are then not used.
_ENGINE = 1
_KEPT_LOGS = 20
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})


def build_layer(
    layer: SourceLayer,
    requires: Mapping[str, Path],
    build_host: Callable[[Path], AbstractContextManager[BuildHost]],
    environment: Environment,
    log: Callable[[str], None],
    *,
    offline: bool,
    hosts: Mapping[str, str] = {},
) -> Path:
    """Return the store's folder with the layer's files for the environment's root; build it if it is missing.

    `requires` are the folders that this function returned for layers that `layer` requires, `hosts` the nodes' folders
    for required host layers, each by name; both may contain more than the layer requires. For a Python project,
    "python" in `hosts` is the absolute path of the interpreter that it is built for, whose environment has the packages
    that the build imports. `layer.environment` identifies them, so the interpreter's path does not affect the result.
    `build_host` opens a build host with an empty work folder. The files belong to the store: copy them, and never
    hard-link them to a place where others write.

    Raises BuildError naming the failed step, with the end of its log, and any exception of `build_host`. If another
    process builds the same layer, this call waits for it. Ctrl-C stops the build and leaves only the archive.
    """
    missing = [name for name in layer.requires if name not in requires and name not in hosts]
    if missing:
        raise BuildError(f"{layer.name} {layer.version} requires {', '.join(missing)}, not built yet")
    needed, folders = _needed(layer, requires, hosts)
    python = PurePath(hosts.get("python", "python3")) if layer.system == "wheel" else None
    store = environment.store
    tree = _place(store, layer, needed, folders)
    if read_manifest(tree) is not None:
        return tree
    archive = fetch_source(layer, environment, offline=offline)
    cuda = fetch_wheels(layer.wheels, environment, offline=offline)
    tools = fetch_wheels(layer.build, environment, offline=offline)
    lock = store.folder("partial") / f"built-{tree.parent.name}.lock"
    try:
        with file_lock(lock, remove=True):
            if read_manifest(tree) is None:
                begun = time.monotonic()
                with store.working("building") as folder:
                    made = _build(
                        layer, archive, cuda, tools, needed, folders, python, build_host, folder,
                        environment, log,
                    )  # fmt: skip
                    _put(store, made, tree.parent)
                log(f"{layer.name} {layer.version}: built in {time.monotonic() - begun:.0f} s")
    finally:
        lock.with_suffix(".lock").unlink(missing_ok=True)
    return tree


def stored_layer(
    layer: SourceLayer, requires: Mapping[str, Path], environment: Environment, hosts: Mapping[str, str]
) -> Path | None:
    """Return the folder that `build_layer` would return without a build, or None when it would build."""
    tree = _place(environment.store, layer, *_needed(layer, requires, hosts))
    return tree if read_manifest(tree) is not None else None


def _needed(
    layer: SourceLayer, requires: Mapping[str, Path], hosts: Mapping[str, str]
) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the given folders that `layer` requires: those in the store, and those on the nodes."""
    return (
        {name: requires[name] for name in layer.requires if name not in hosts},
        {name: hosts[name] for name in layer.requires if name in hosts},
    )


def _place(store: Store, layer: SourceLayer, needed: Mapping[str, Path], folders: Mapping[str, str]) -> Path:
    return store.root / "built" / layer_key(layer, needed, folders) / "tree"


def layer_key(layer: SourceLayer, requires: Mapping[str, Path], hosts: Mapping[str, str]) -> str:
    """Return the name of the layer's folder in the store.

    It is a digest of the layer's inputs, the files of the built layers in `requires`, and the folders in `hosts`.
    Raises BuildError for a required folder that is damaged.
    """
    below = []
    for name, folder in sorted(requires.items()):
        manifest = read_manifest(folder)
        if manifest is None:
            raise BuildError(f"the built layer {name} in the store is damaged: {folder}", "remove that folder")
        below.append([name, manifest.digest])
    content = [_ENGINE, layer.digest, below, sorted(hosts.items())]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _build(
    layer: SourceLayer,
    archive: Path,
    cuda: list[Path],
    tools: list[Path],
    requires: Mapping[str, Path],
    hosts: Mapping[str, str],
    python: PurePath | None,
    build_host: Callable[[Path], AbstractContextManager[BuildHost]],
    folder: Path,
    environment: Environment,
    log: Callable[[str], None],
) -> Path:
    """Build the layer in `folder`, and return the folder there with tree and manifest."""
    title = f"{layer.name} {layer.version}"
    patchelf_program()  # raises now, not after minutes, when it is missing
    work = folder / "work"
    work.mkdir()
    with build_host(work) as host:
        places: dict[str, PurePath] = {name: PurePath(path) for name, path in hosts.items()}
        own = {name: host.inside / "requires" / name for name in requires}
        for name, tree in requires.items():
            shutil.copytree(tree, work / "requires" / name, symlinks=True)
        if cuda:
            unpack_cuda(cuda, work / "cuda")
            own["cuda"] = host.inside / "cuda"
        if python is not None:
            places["python"] = python
            unpack_tools(tools, work)
        patches = [Path(patch.path) for patch in layer.patches]
        _check_patches(layer)
        job = SourceBuild(layer, archive, host, {**places, **own}, patches, workers(environment.variables), log)
        try:
            staged = make_layer(job)
        except StepError as error:
            kept = _keep(environment.store, layer, error)
            raise failure(title, error, kept) from None
        except OSError as error:
            if error.errno in _UNWRITABLE:
                raise environment.store.unwritable(error) from error
            raise BuildError(f"{title} cannot be built: {error}") from error
        arch = layer.target.rpartition("-")[2]
        traces = {str(host.inside), str(work)}
        if python is not None and python.is_absolute():
            traces.add(str(environment_of(python)))
        done = relocate(staged, arch, sorted(traces), own, host_libraries(hosts.values()))
        if python is not None:
            renew_records(staged, layer.name)
    return _finish(layer, staged, done, folder, log)


def _finish(layer: SourceLayer, staged: Path, done: Relocated, folder: Path, log: Callable[[str], None]) -> Path:
    if done.named:
        log(f"{layer.name} {layer.version}: right in images alone, for their paths: {', '.join(done.named)}")
    made = folder / "made"
    made.mkdir()
    os.rename(staged, made / "tree")
    glibc = ".".join(map(str, done.glibc)) if done.glibc != (0, 0) else ""
    write_manifest(made, SourceManifest(layer.name, layer.version, list_files(made / "tree"), glibc))
    return made


def _check_patches(layer: SourceLayer) -> None:
    """Raise BuildError for a patch that changed since the plan was made: the layer's digest includes its old digest."""
    for patch in layer.patches:
        if hashlib.sha256(Path(patch.path).read_bytes()).hexdigest() != patch.sha256:
            raise BuildError(f"{patch.path} was changed while this ran", "run it again")


def _put(store: Store, made: Path, place: Path) -> None:
    """Move a built layer to its path in the store; replace a damaged layer there, keep a good one."""
    store.folder("built")
    made.chmod(0o755)
    try:
        if place.exists() and read_manifest(place / "tree") is None:
            remove_tree(place)
        os.rename(made, place)
    except OSError as error:
        if read_manifest(place / "tree") is None:
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
