"""An image from a plan: base layers, wheels, environment; the same bytes on every machine.

One plan serves every kind of image: docker, enroot and Apptainer artifacts consist of the same layers from `fill`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, Generic

from envbuild import __version__
from envbuild.base.atomic import write_atomically
from envbuild.base.errors import BuildError
from envbuild.base.packages import record_digest
from envbuild.base.progress import log
from envbuild.base.text import normalise_version
from envbuild.build.installing import LayerFolder, check_free
from envbuild.contract.image_manifest import FILE_NAME, FORMAT, OCI, PathRow, render, row_of
from envbuild.contract.manifest import is_bytecode, source_of
from envbuild.contract.state import PREFIX, State, list_path
from envbuild.environment import Environment
from envbuild.image.entry import DIR, FILE, SYMLINK, Entry, Tree, path_parts
from envbuild.image.layer import with_parents
from envbuild.image.layout import Blobs
from envbuild.image.limits import ImageLimits, Quota
from envbuild.image.model import GOARCH, OCI_CONFIG, OCI_MANIFEST, Descriptor, ImageManifest, canonical, new_manifest
from envbuild.image.tar import Member
from envbuild.image.tree import MergedTree
from envbuild.layers.base import BaseImage, base_image
from envbuild.layers.bytecode import Compiler, with_bytecode
from envbuild.layers.compose import alone, environment_part, wheel_parts
from envbuild.layers.layer_cache import CachedLayer, LayerCache, LayerRequest, M, TarCache, hashed
from envbuild.layers.requested import RequestedLayers
from envbuild.layers.wheel import Scheme, Trainer, WheelFile, wheel_paths, wheel_record
from envbuild.layers.wheels import known_wheels, own_wheels
from envbuild.lock.image import ImageLock, OciLock
from envbuild.plan import Plan, state_of
from envbuild.recipe.targets import Target
from envbuild.site.tables import LimitsTable
from envbuild.store.entry import key_of
from envbuild.store.store import Store

if TYPE_CHECKING:
    from envbuild.build.conda_layers import LinkedPackage, LinkedPackages

# PATH of images whose base sets none.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image to build; `compiler` compiles its bytecode, `builder` is the lock of its layers' builder image."""

    plan: Plan
    trainer: Trainer
    compiler: Compiler | None
    target: Target
    builder: ImageLock | None = None

    @property
    def requested(self) -> RequestedLayers:
        """The source layers that the plan requests."""
        return RequestedLayers(self.plan.sources, self.plan.host_layers, self.builder)


@dataclass(frozen=True, slots=True)
class AssembledImage:
    """An assembled image: its manifest, configuration, layers from the lowest up, and the store of their blobs.

    `file_manifest` is the digest of the manifest of all its files (contract/image_manifest.py).
    """

    plan: Plan
    manifest: ImageManifest
    config: bytes
    layers: tuple[CachedLayer, ...]
    state: State
    base_name: str
    blobs: Blobs
    file_manifest: str

    @property
    def digest(self) -> str:
        """The manifest's digest, by which a registry knows the image."""
        return self.manifest.digest

    @property
    def image_id(self) -> str:
        """The configuration's digest, by which a docker daemon knows the image."""
        return self.manifest.config.digest

    @property
    def descriptor(self) -> Descriptor:
        """The manifest with its platform, for an index."""
        return replace(self.manifest.descriptor, arch=GOARCH[Target.parse(self.plan.target).arch], os="linux")


@dataclass(frozen=True)
class Filled(Generic[M]):
    """The layers of a plan's image from the lowest up, and the state and manifest that the last one contains.

    `file_manifest` is the digest of the manifest, "" if the last layer has only an empty file at its path.
    """

    layers: tuple[M, ...]
    state: State
    base: BaseImage[M]
    file_manifest: str


def assemble(
    prepared: PreparedImage, layers: Sequence[LayerFolder], environment: Environment, *, offline: bool
) -> AssembledImage:
    """Assemble the image `prepared` in the store; `layers` are its source layers. Raises BuildError and LockError."""
    filled = fill(
        prepared, layers, environment, TarCache(environment.store, log, environment.site.limits), offline=offline
    )
    plan, blobs = prepared.plan, environment.store.blobs
    history = [
        {"created": created(plan), "created_by": f"envbuild: {layer.title}", "comment": "envbuild"}
        for layer in filled.layers
    ]
    config = canonical(
        {
            "created": created(plan),
            "architecture": GOARCH[prepared.target.arch],
            "os": "linux",
            "config": run_config(plan, filled.base, filled.state.project),
            "rootfs": {"type": "layers", "diff_ids": [made.layer.diff_id for made in filled.layers]},
            "history": history,
        }
    )
    own = Descriptor(OCI_CONFIG, blobs.add(config), len(config))
    manifest = new_manifest(OCI_MANIFEST, own, [made.layer.blob for made in filled.layers])
    blobs.add(manifest.raw)
    return AssembledImage(
        plan, manifest, config, filled.layers, filled.state, filled.base.name, blobs, filled.file_manifest
    )


def fill(
    prepared: PreparedImage,
    layers: Sequence[LayerFolder],
    environment: Environment,
    cache: LayerCache[M],
    *,
    offline: bool,
    with_manifest: bool = True,
) -> Filled[M]:
    """Return all layers of the image `prepared` in the form that `cache` makes. Raises BuildError or LockError.

    `with_manifest` is False for layers that are merged into a tree with its own manifest.
    """
    plan, compiler = prepared.plan, prepared.compiler
    scheme = Scheme(PREFIX, plan.python, conda=bool(plan.conda))
    base = base_image(plan, compiler, environment, cache, offline=offline)
    wheels, own = known_wheels(plan, environment, offline), own_wheels(plan, prepared.trainer, environment, offline)
    with ExitStack() as stack:
        conda: LinkedPackages | None = None
        if plan.conda:
            from envbuild.build.conda_layers import conda_parts, link_packages
            from envbuild.layers.conda_package import locate_conda

            find = partial(locate_conda, environment=environment, offline=offline)
            conda = link_packages(plan.conda, scheme, environment.store, find, stack)
        packages = conda.packages if conda else ()
        conda_layers, wheel_layers = alone(packages, wheels)
        parts = wheel_parts(wheels, scheme, compiler, plan.mtime, wheel_layers)
        if conda:
            parts = conda_parts(conda, scheme, compiler, plan.mtime, conda_layers) + parts
        check_paths(layers, wheels, packages, scheme, environment.store)
        parts += [layer_part(layer, scheme, compiler, plan.mtime) for layer in layers]
        cache.expect(parts)
        made = [*base.layers, *(cache.part(part) for part in parts)]
    folders = [plan.image.workdir] if plan.image else []
    parents: list[Entry] = []
    if plan.image and plan.image.base != "debian":  # which may have the folder, as another user's
        below = [*map(cache.members, base.layers)]
        folders, parents = missing_folder(plan.image.workdir, below, environment.site.limits, plan.mtime)
    frame, state = _environment_layer(prepared, base, own, made, layers, folders, parents)
    frame = without_stale_bytecode(frame, made, len(base.layers), cache, environment.site.limits, plan.mtime)
    if not with_manifest:
        return Filled((*made, cache.part(_with_place(frame, plan.mtime))), state, base, "")
    last = cache.part(_with_manifest(frame, made, cache, plan.mtime, environment))
    digests = (member.sha256 for member in cache.members(last) if member.name == FILE_NAME)
    return Filled((*made, last), state, base, f"sha256:{next(digests)}")


def _with_place(part: LayerRequest, mtime: int) -> LayerRequest:
    """Return `part`, the last layer, with an empty file at the manifest's path."""

    def tree() -> Tree:
        yield from part.tree()
        yield Entry(FILE_NAME, FILE, 0o644, mtime=mtime), None

    return LayerRequest(part.title, key_of("place", [part.key]), tree)


def without_stale_bytecode(
    part: LayerRequest, made: Sequence[M], base: int, cache: LayerCache[M], limits: LimitsTable | None, mtime: int
) -> LayerRequest:
    """Return `part`, the last layer on top of `made`, with whiteouts of bytecode whose source a higher layer replaces.

    `base` is the number of layers of the base at the beginning of `made`. All files have one time: Python would use the
    bytecode of a replaced module for a new module of the same size. New bytecode replaces the old, but tests, and
    images built with --no-bytecode or on a host without the image's Python, have none.
    """
    below = (member.name for layer in made[:base] for member in cache.members(layer))
    if not any(f"{PREFIX}/" in path and is_bytecode(path) for path in below):
        return part

    def tree() -> Tree:
        own: list[Member] = []
        yield from hashed(part.tree(), own)
        merged = MergedTree(Quota(limits))
        for number, members in enumerate([*map(cache.members, made), own], 1):
            merged.add(f"layer {number}", members)
        nodes = dict(merged.walk())
        whiteouts: list[tuple[Entry, None]] = []
        for path, node in nodes.items():
            source = nodes.get(source_of(path) or path, node)
            if node.layer < source.layer and source.layer >= base:
                folder, _, name = path.rpartition("/")
                whiteouts.append((Entry(f"{folder}/.wh.{name}", FILE, 0o644, mtime=mtime), None))
        known = {member.name for member in own}
        for entry, content in with_parents(iter(whiteouts), mtime):
            if entry.path not in known:
                yield entry, content

    return LayerRequest(part.title, key_of("whiteouts", [part.key, [layer.key for layer in made]]), tree)


def check_paths(
    layers: Sequence[LayerFolder],
    wheels: Sequence[WheelFile],
    conda: Sequence[LinkedPackage],
    scheme: Scheme,
    store: Store,
) -> None:
    """Raise BuildError when a source layer and a package, or a wheel and a conda package, have the same path.

    The store remembers a success.
    """
    if not layers and not (wheels and conda):
        return
    inputs: list[object] = [scheme.prefix, scheme.python, [folder.listed.digest for folder in layers]]
    inputs += [[file.name, file.sha256] for file in wheels]
    inputs += [[package.name, package.record] for package in conda]
    note = store.folder("layers") / f"{key_of('free', inputs)}.free"
    if note.exists():
        return
    owners = {path: package.name for package in conda for path in package.paths}
    packages = [(f"conda package {package.name} {package.package.version}", list(package.paths)) for package in conda]
    for wheel in wheels:
        paths = [path.removeprefix(f"{scheme.prefix}/") for path in wheel_paths(wheel.path, scheme)]
        packages.append((f"{wheel.name} {wheel.version}", paths))
        if both := min((path for path in paths if path in owners), default=None):
            raise BuildError(
                f"{wheel.name} {wheel.version}, installed by pip, would overwrite a file of the conda package "
                f"{owners[both]}: /{scheme.prefix}/{both}",
                f"leave {wheel.name} out of `requirements` in [conda], or take it from a channel",
            )
    check_free(layers, packages)
    write_atomically(note, "")


def layer_part(layer: LayerFolder, scheme: Scheme, compiler: Compiler | None, mtime: int) -> LayerRequest:
    """Return the image layer of `layer`: files below the prefix, owned by root, with the time `mtime`, and bytecode."""
    prefix, modules = scheme.prefix, bool(layer.distributions)
    text = layer.listed.render()

    def files() -> Tree:
        for file in layer.listed.files:
            path = f"{prefix}/{file.path}"
            if file.target:
                yield Entry(path, SYMLINK, 0o777, target=file.target, mtime=mtime), None
                continue
            with (layer.folder / file.path).open("rb") as stream:
                yield Entry(path, FILE, file.mode, file.size, mtime=mtime), stream
        place = f"{prefix}/{list_path(layer.source.name)}"
        yield Entry(place, FILE, 0o644, len(text), mtime=mtime), BytesIO(text)

    def tree() -> Tree:
        made = with_bytecode(files(), compiler if modules else None, [scheme.site_packages], mtime)
        return with_parents(made, mtime)

    key: list[object] = [prefix, mtime, layer.listed.name, layer.listed.version, text.decode()]
    key += [scheme.python, compiler and compiler.identity] if modules else []
    return LayerRequest(layer.title, key_of("source", key), tree)


def rows_of_layers(layers: Sequence[Sequence[Member]], limits: LimitsTable | None) -> dict[str, PathRow]:
    """Return the rows of merged layers, lowest first. Raises BuildError when they cannot be merged."""
    tree = MergedTree(Quota(limits))
    for number, members in enumerate(layers, 1):
        tree.add(f"layer {number}", members)
    nodes = ((path, node.member) for path, node in tree.walk() if path)
    return {path: row_of(node, node.sha256, node.link) if node else PathRow(DIR) for path, node in nodes}


def _with_manifest(
    part: LayerRequest, made: Sequence[M], cache: LayerCache[M], mtime: int, environment: Environment
) -> LayerRequest:
    """Return `part`, the last layer, with the manifest of all files: its own and those of the layers `made`."""

    def tree() -> Tree:
        own: list[Member] = []
        yield from hashed(part.tree(), own)
        rows = rows_of_layers([*map(cache.members, made), own], environment.site.limits)
        text = render(OCI, rows)
        yield Entry(FILE_NAME, FILE, 0o644, len(text), mtime=mtime), BytesIO(text)

    return LayerRequest(part.title, key_of("manifest", [FORMAT, part.key, [layer.key for layer in made]]), tree)


def _environment_layer(
    prepared: PreparedImage,
    base: BaseImage[M],
    own: Sequence[WheelFile],
    made: list[M],
    layers: Sequence[LayerFolder],
    folders: Sequence[str],
    parents: Sequence[Entry],
) -> tuple[LayerRequest, State]:
    """Return the last layer, and the state of the whole environment, which that layer contains."""
    plan = prepared.plan
    distributions = [distribution for layer in made for distribution in layer.distributions]
    expected = {(conda.name, conda.version) for conda in plan.conda}
    expected |= {(package.name, package.version) for package in plan.packages}
    expected |= {distribution for layer in layers for distribution in layer.distributions}
    # The folder of a distribution may spell its version in another way: 2020.01.01.
    spelled = {(name, normalise_version(version)): version for name, version, _ in distributions}
    expected = {(name, spelled.get((name, normalise_version(version)), version)) for name, version in expected}
    if differing := expected ^ {(name, version) for name, version, _ in distributions}:
        names = sorted(f"{name} {version}" for name, version in differing)
        raise BuildError(f"the packages differ from the lock: {', '.join(names)}")
    scheme = Scheme(PREFIX, plan.python, conda=bool(plan.conda))
    distributions += [(file.name, file.version, record_digest(wheel_record(file.path, scheme))) for file in own]
    built = [layer.built for layer in layers]
    state = state_of(plan, base.python_version, base.interpreter, distributions, built, own)
    part = environment_part(
        own,
        scheme,
        base.interpreter,
        base.python_version,
        state.render(),
        prepared.compiler,
        plan.mtime,
        system_packages=base.system_packages,
        conda=bool(plan.conda),
        folders=folders,
        parents=parents,
    )
    return part, state


def created(plan: Plan) -> str:
    """Return the time of an image's files, as its configuration has it."""
    return datetime.fromtimestamp(plan.mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def labels(plan: Plan) -> dict[str, str]:
    """Return the labels of an image with the origin of its content, whoever builds it."""
    return {
        "org.opencontainers.image.created": created(plan),
        "org.envbuild.recipe.digest": plan.recipe_digest,
        "org.envbuild.lock.digest": plan.lock_digest,
        "org.envbuild.plan.digest": plan.digest,
        "org.envbuild.version": __version__,
    }


def run_config(plan: Plan, base: BaseImage[M], project: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Return the `config` object of an image's configuration (OCI image-spec 1.1, config.md); `project` as in State."""
    assert plan.image is not None and plan.base is not None
    run = dict(base.config)
    labels_of_run = dict(run.get("Labels") or {}) | labels(plan)
    labels_of_run |= {
        "org.opencontainers.image.title": plan.recipe,
        "org.opencontainers.image.base.name": base.name,
        "org.envbuild.recipe": plan.recipe,
        "org.envbuild.base.digest": plan.base.digest,
        "org.envbuild.target": plan.target,
    }
    if plan.conda:
        labels_of_run["org.envbuild.environment"] = "conda"
    if project:
        revision = {"org.opencontainers.image.revision": project["commit"]} if project["commit"] else {}
        labels_of_run |= {"org.envbuild.project": f"{project['name']} {project['version']}", **revision}
    if base.digest:
        labels_of_run["org.opencontainers.image.base.digest"] = base.digest
    run["Env"] = [f"{name}={value}" for name, value in _variables(plan, base).items()]
    run |= {"WorkingDir": plan.image.workdir, "Labels": labels_of_run}
    if not run.get("Cmd") and not run.get("Entrypoint"):
        run["Cmd"] = ["/bin/bash"]
    return run


def _variables(plan: Plan, base: BaseImage[M]) -> dict[str, str]:
    assert plan.image is not None and plan.base is not None
    variables = dict(pair.partition("=")[::2] for pair in base.config.get("Env") or [])
    variables["PATH"] = f"/{PREFIX}/bin:{variables.get('PATH') or _PATH}"
    if plan.conda:
        variables.pop("VIRTUAL_ENV", None)
        variables |= {"CONDA_PREFIX": f"/{PREFIX}", "CONDA_DEFAULT_ENV": f"/{PREFIX}"}
    else:
        variables["VIRTUAL_ENV"] = f"/{PREFIX}"
    if plan.conda or isinstance(plan.base.base, OciLock):
        # Runtimes show the home folder: a Python with the packages of a base, and conda's, would import from ~/.local.
        variables["PYTHONNOUSERSITE"] = "1"
    variables.setdefault("LANG", "C.UTF-8")
    torch = [p.version for p in plan.packages if p.name == "torch"]
    torch += [p.version for p in plan.conda if p.name == "pytorch"]
    if torch:
        variables["PYTORCH_VERSION"] = torch[-1]
    return {**dict(Target.parse(plan.target).family.container_variables), **variables, **plan.image.env}


def missing_folder(
    path: str, layers: Sequence[Sequence[Member]], limits: ImageLimits | None, mtime: int
) -> tuple[list[str], list[Entry]]:
    """Return the entries with which a layer on top of `layers` (lowest first) makes `path` a folder: it, and its
    parents.

    There are none if the folder exists, also through links: it keeps its mode, owner and content. Existing parents are
    returned unchanged, because a folder in a layer replaces mode and owner; missing parents are not returned. Raises
    BuildError when the layers cannot be merged.
    """
    tree = MergedTree(Quota(limits))
    for number, members in enumerate(layers, 1):
        tree.add(f"layer {number}", members)
    done, node = tree.resolved(path_parts(path)), tree.node
    parents: list[Entry] = []
    for depth, part in enumerate(done, 1):
        below = node.children.get(part)
        if below is None or below.kind != DIR:
            return ["/" + "/".join(done)], parents
        if member := below.member:
            there = "/".join(done[:depth])
            parents.append(Entry(there, DIR, member.mode, 0, "", member.uid, member.gid, mtime, (0, 0), member.xattrs))
        node = below
    return [], []
