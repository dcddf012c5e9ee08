"""Reader of container images in all their forms: layouts, archives, a daemon, registries.

Each layer is listed in one pass, and no file is unpacked. The store caches the listing of a layer by the digest of the
layer's tar.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from envbuild.base.errors import BuildError, UsageError
from envbuild.base.progress import transfer
from envbuild.image.entry import DIR, FILE, SYMLINK
from envbuild.image.layer import checked_tar, decompressed
from envbuild.image.layout import REF_NAME, Blobs, Pulled, layout_image
from envbuild.image.limits import Quota
from envbuild.image.model import (
    GOARCH,
    MAX_MANIFEST,
    OCI_INDEX,
    OCI_LAYER,
    Descriptor,
    ImageIndex,
    check_image,
    parse,
    parse_config,
)
from envbuild.image.reference import folder_and_tag
from envbuild.image.tar import Member, packed, read_table, unpacked, write_table
from envbuild.image.tree import MergedTree, Node
from envbuild.inspect.facts import (
    IMAGE,
    ArtifactReader,
    Description,
    Inventory,
    Item,
    LayerFact,
    ReadAccess,
    ReadStore,
    Request,
)
from envbuild.inspect.metadata import MAX_SIZE, Note, digested, extra_of, interest, root_inventory
from envbuild.recipe.targets import host_arch

# Fetches layers, by the digests of their tars, to this machine, and returns the file of each.
Bring = Callable[[Mapping[str, Descriptor]], Mapping[str, Path]]

# Increase it when the cached data changes its form or meaning.
FORMAT = 5
_CHUNK = 1 << 20
_ROW = 256  # bytes of memory for a Debian package
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayerListing:
    """The members of a layer in their order, with the sha256 of each file's content.

    By member number: the files that begin with `#!`, and the notes of `interest`.
    """

    members: Sequence[Member]
    scripts: frozenset[int]
    notes: Mapping[int, Note]


def about_image(
    config: Mapping[str, Any], identity: str, digest: str, layers: Sequence[Descriptor], name: str, place: Path | None
) -> Description:
    """Return the description of an image from its configuration (OCI image specification 1.1, config.md)."""
    run = _table(config.get("config"))
    labels = {str(k): str(v) for k, v in _table(run.get("Labels")).items()}
    diff_ids = config["rootfs"]["diff_ids"]
    titles = _titles(config, len(diff_ids))
    system, arch = config.get("os") or "linux", config.get("architecture") or "unknown"
    return Description(
        kind=IMAGE,
        spelling=name,
        identity=identity,
        digest=digest,
        place=place,
        recipe=labels.get("org.envbuild.recipe", ""),
        recipe_digest=labels.get("org.envbuild.recipe.digest", ""),
        lock_digest=labels.get("org.envbuild.lock.digest", ""),
        base_lock_digest=labels.get("org.envbuild.base.digest", ""),
        plan_digest=labels.get("org.envbuild.plan.digest", ""),
        target=labels.get("org.envbuild.target", ""),
        platform=f"{system}/{arch}",
        base=labels.get("org.opencontainers.image.base.name", ""),
        base_digest=labels.get("org.opencontainers.image.base.digest", ""),
        envbuild=labels.get("org.envbuild.version", ""),
        created=labels.get("org.opencontainers.image.created") or str(config.get("created") or ""),
        stored=sum(layer.size for layer in layers),
        layers=tuple(
            LayerFact(layer.digest, diff_id, layer.size, title)
            for layer, diff_id, title in zip(layers, diff_ids, titles, strict=True)
        ),
        labels=labels,
        env=dict(pair.partition("=")[::2] for pair in _words(run.get("Env"))),
        entrypoint=_words(run.get("Entrypoint")),
        cmd=_words(run.get("Cmd")),
        workdir=str(run.get("WorkingDir") or ""),
        user=str(run.get("User") or ""),
    )


def _titles(config: Mapping[str, Any], count: int) -> list[str]:
    """Return the command that made each layer, from the history; "" for all if the history does not match."""
    history = config.get("history")
    steps = [
        " ".join(str(step.get("created_by") or step.get("comment") or "").removeprefix("envbuild: ").split())
        for step in (history if isinstance(history, list) else ())
        if isinstance(step, dict) and not step.get("empty_layer")
    ]
    return steps if len(steps) == count else [""] * count


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _words(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def image_artifact(
    about: Description, layers: Sequence[Descriptor], bring: Bring, access: ReadAccess
) -> ArtifactReader:
    """Return an image for reading. The store caches the listing of each layer with its digests."""
    limits = access.site.limits

    def contents(_: bool) -> Inventory:
        return _contents(about, _listings(about, layers, bring, access.store, Quota(limits)), Quota(limits))

    def files() -> list[Path]:
        ids = [fact.diff_id for fact in about.layers]
        brought = bring(dict(zip(ids, layers, strict=True)))
        return [brought[diff_id] for diff_id in ids]

    return ArtifactReader(about, contents, files)


def _listings(
    about: Description, layers: Sequence[Descriptor], bring: Bring, store: ReadStore, quota: Quota
) -> list[LayerListing]:
    ids = [fact.diff_id for fact in about.layers]
    known = {diff_id: remembered(diff_id, store) for diff_id in ids}
    missing = {diff_id: layer for diff_id, layer in zip(ids, layers, strict=True) if known[diff_id] is None}
    files = bring(missing) if missing else {}
    for diff_id, layer in missing.items():
        name = f"{about.spelling}: layer {layer.digest}"
        try:
            with decompressed(files[diff_id].open("rb"), name) as stream:
                made = known[diff_id] = read_listing(stream, name, diff_id, quota)
        except OSError as error:
            raise BuildError(f"{name}: cannot be read: {error.strerror}") from error
        # If the store is not writable, the layer is read again next time.
        with contextlib.suppress(OSError, BuildError):
            store.folder("listings")
            notes = {"scripts": sorted(made.scripts), "notes": list(made.notes.items())}
            write_table(_place(store, diff_id), {"format": FORMAT, **packed(made.members), **notes})
    return [listing for diff_id in ids if (listing := known[diff_id]) is not None]


def _contents(about: Description, listings: Sequence[LayerListing], quota: Quota) -> Inventory:
    root = MergedTree(quota)
    for layer, fact in zip(listings, about.layers, strict=True):
        root.begin()
        for number, member in enumerate(layer.members):
            root.apply(member, number, fact.digest)
    nodes = {path: node for path, node in root.walk() if path}
    files = {path: _item(node, listings) for path, node in nodes.items()}
    notes = {
        path: listings[node.layer].notes[node.ordinal]
        for path, node in nodes.items()
        if node.member is not None and node.ordinal in listings[node.layer].notes
    }
    return root_inventory(files, notes, about.env)


def _item(node: Node, listings: Sequence[LayerListing]) -> Item:
    member = node.member
    if member is None:
        return Item(DIR, 0o755)
    layer = listings[node.layer]
    return Item(
        member.kind,
        0o777 if member.kind == SYMLINK else member.mode,
        member.size if member.kind == FILE else 0,
        member.sha256,
        member.link if member.kind == SYMLINK else "",
        member.uid,
        member.gid,
        node.ordinal in layer.scripts,
        extra_of(member.device, member.xattrs),
    )


def read_listing(stream: BinaryIO, name: str, diff_id: str, quota: Quota) -> LayerListing:
    """Read a layer's tar, `name` for messages, from start to end.

    Raises BuildError if its digest is not `diff_id`, or it exceeds the `quota` of its image.
    """
    listed: list[Member] = []
    scripts: set[int] = set()
    notes: dict[int, Note] = {}
    with contextlib.closing(checked_tar(stream, name, diff_id, quota)) as items:
        for number, (member, content) in enumerate(items):
            listed.append(member)
            if content is None:
                continue
            reader = interest(member.name.removeprefix("./").lstrip("/")) if member.size <= MAX_SIZE else None
            member.sha256, script, note = digested(iter(partial(content.read, _CHUNK), b""), reader)
            if script:
                scripts.add(number)
            if reader:
                notes[number] = note
                text, rows = isinstance(note, str), isinstance(note, list)
                quota.text(name, note if text else "", more=_ROW * len(note) if rows else 0)
    return LayerListing(listed, frozenset(scripts), notes)


def remembered(diff_id: str, store: ReadStore) -> LayerListing | None:
    """Return the cached listing of the layer whose tar has the digest `diff_id`, None if it was never read."""
    try:
        data = read_table(_place(store, diff_id), FORMAT)
        notes = {int(number): note for number, note in data["notes"]}
        return LayerListing(unpacked(data), frozenset(data["scripts"]), notes)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None  # missing or damaged: it is only a cache


def _place(store: ReadStore, diff_id: str) -> Path:
    return store.root / "listings" / f"{diff_id.rpartition(':')[2]}.members"


def open_layout(request: Request) -> ArtifactReader:
    """Open `DIR[:TAG]`: an image of an OCI layout, whose blobs are read in place."""
    folder, tag = folder_and_tag(request.rest)
    _check_layout(folder, tag)
    pulled = _of_any(request.arch, lambda arch: layout_image(folder, tag, arch))
    return _opened(request, pulled, pulled.manifest.digest, folder)


def open_archive(request: Request) -> ArtifactReader:
    """Open `FILE[:TAG]`: an image of an archive; its layers are unpacked into the store while it is open."""
    from envbuild.image.archive import read_archive

    file, tag = folder_and_tag(request.rest)
    if not file.exists():
        raise UsageError(f"{file} does not exist", "give the file of an image archive")
    folder = request.stack.enter_context(request.access.store.working("opened"))
    pulled = _of_any(request.arch, lambda arch: read_archive(file, Blobs(folder), tag, arch))
    return _opened(request, pulled, "", file)


def open_daemon(request: Request) -> ArtifactReader:
    """Open an image of the docker daemon by its name or id.

    The daemon sends its content only if one of its layers was never read.
    """
    from docker.errors import APIError, ImageNotFound

    from envbuild.image.archive import read_daemon
    from envbuild.image.daemon import connect

    store, name = request.access.store, request.rest
    client = request.stack.enter_context(connect(request.access.variables))
    try:
        config, identity = _daemon_config(client, name)
    except ImageNotFound:
        problem = f"the docker daemon has no image {name}"
        if request.spelling == name:  # it could also be the path of a file
            problem = f"{name} is no file or folder, and {problem}"
        hint = f"see `docker images`; a registry's image is docker://{name}"
        raise UsageError(problem, hint) from None
    except APIError as error:
        raise BuildError(f"docker image {name}: {error.explanation or error}") from error
    arch = config["architecture"]
    if request.arch and arch not in ("", GOARCH[request.arch]):
        raise UsageError(f"{request.spelling} is for {arch}, not for {GOARCH[request.arch]}")
    layers = tuple(Descriptor(OCI_LAYER, d, 0) for d in config["rootfs"]["diff_ids"])

    def bring(_: Mapping[str, Descriptor]) -> Mapping[str, Path]:
        folder = request.stack.enter_context(store.working("opened"))
        pulled = read_daemon(identity, Blobs(folder), client)
        ids = pulled.config["rootfs"]["diff_ids"]
        paths = (pulled.blobs.path(layer.digest) for layer in pulled.manifest.layers)
        return dict(zip(ids, paths, strict=True))

    about = about_image(config, identity, "", layers, request.spelling, None)
    return image_artifact(about, layers, bring, request.access)


def _daemon_config(client: Any, name: str) -> tuple[dict[str, Any], str]:
    """Return an image's configuration, as far as a daemon shows it, and its id."""
    image = client.api.inspect_image(name)
    ids = list(image["RootFS"].get("Layers") or ())
    steps = list(reversed(client.api.history(image["Id"])))
    if len(steps) != len(ids):  # the history also lists steps that made no layer
        steps = [step for step in steps if step.get("Size")]
    return {
        "architecture": str(image.get("Architecture") or ""),
        "os": image.get("Os"),
        "created": image.get("Created"),
        "config": image.get("Config"),
        "rootfs": {"type": "layers", "diff_ids": ids},
        "history": [{"created_by": step.get("CreatedBy")} for step in steps],
    }, str(image["Id"])


def open_registry_image(request: Request) -> ArtifactReader:
    """Open an image of a registry; only layers that were never read are fetched, into the store."""
    store = request.access.store
    registry = request.access.registry(request.rest)
    request.stack.callback(registry.close)
    manifest = _of_any(request.arch, registry.image)
    blobs = store.blobs
    registry.fetch_blob(manifest.config, blobs, lambda _count: None)
    config = parse_config(blobs.read(manifest.config.digest), request.spelling)
    check_image(manifest.layers, config, request.arch, request.spelling)
    Quota(request.access.site.limits).content(request.spelling, sum(layer.size for layer in manifest.layers))

    def bring(descriptors: Mapping[str, Descriptor]) -> Mapping[str, Path]:
        total = sum(layer.size for layer in descriptors.values())
        with transfer(f"fetching {len(descriptors)} layers of {request.rest}", total) as on_progress:
            files = registry.fetch_blobs(list(descriptors.values()), blobs, on_progress)
        return dict(zip(descriptors, files, strict=True))

    return _opened(request, Pulled(manifest, config, blobs), manifest.digest, None, bring)


def _opened(
    request: Request, pulled: Pulled, digest: str, place: Path | None, bring: Bring | None = None
) -> ArtifactReader:
    layers = pulled.manifest.layers
    about = about_image(pulled.config, pulled.manifest.config.digest, digest, layers, request.spelling, place)

    def here(descriptors: Mapping[str, Descriptor]) -> Mapping[str, Path]:
        return {diff_id: pulled.blobs.path(layer.digest) for diff_id, layer in descriptors.items()}

    return image_artifact(about, layers, bring or here, request.access)


def _check_layout(folder: Path, tag: str | None) -> None:
    """Raise UsageError without a layout, and for one with several images for one platform if no tag is given."""
    try:
        with (folder / "index.json").open("rb") as stream:
            raw = stream.read(MAX_MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{folder} is no OCI image layout" if folder.exists() else f"{folder} does not exist",
            "give a folder with oci-layout and index.json in it",
        ) from None
    except OSError as error:
        raise BuildError(f"{folder / 'index.json'}: {error.strerror}") from error
    index = parse(raw, f"{folder}: index.json", OCI_INDEX)
    if tag is None and isinstance(index, ImageIndex):
        different = {item.digest: item.arch for item in index.manifests}
        if len(set(different.values())) < len(different):
            names = sorted(item.annotations.get(REF_NAME, item.digest) for item in index.manifests)
            problem = f"{folder} holds {len(different)} images: {', '.join(names)}"
            raise UsageError(problem, f"name one: oci:{folder}:TAG")


def _of_any(arch: str | None, read: Callable[[str | None], T]) -> T:
    """Return the image that `read` gives for `arch`; for None, of the only platform, or else of this host's."""
    try:
        return read(arch)
    except BuildError as error:
        if arch is not None or host_arch() not in GOARCH:
            raise
        try:
            return read(host_arch())
        except BuildError as second:
            if second.message == error.message:  # the platform was not the reason
                raise
            raise BuildError(second.message, error.hint or "choose one with --target") from None
