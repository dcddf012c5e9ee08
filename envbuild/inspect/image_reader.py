"""Reader of container images: each layer is listed in one pass, and no file is unpacked.

The store caches the listing of a layer by the digest of the layer's tar.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from envbuild.base.errors import BuildError
from envbuild.image.entry import DIR, FILE, SYMLINK
from envbuild.image.layer import Hashed, decompressed
from envbuild.image.limits import Quota
from envbuild.image.model import Descriptor
from envbuild.image.tar import Member, packed, read_table, tar_items, unpacked, write_table
from envbuild.image.tree import MergedTree, Node
from envbuild.inspect.facts import IMAGE, ArtifactReader, Description, Inventory, Item, LayerFact, ReadAccess, ReadStore
from envbuild.inspect.metadata import MAX_SIZE, Note, digested, extra_of, interest, root_inventory

# Fetches layers, by the digests of their tars, to this machine, and returns the file of each.
Bring = Callable[[Mapping[str, Descriptor]], Mapping[str, Path]]

# Increase it when the cached data changes its form or meaning.
FORMAT = 5
_CHUNK = 1 << 20
_ROW = 256  # bytes of memory for a Debian package


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
    """Return an image for reading. The store caches the listing of each layer, so that digests cost nothing."""
    limits = access.site.limits

    def contents(_: bool) -> Inventory:
        return _contents(about, _listings(about, layers, bring, access.store, Quota(limits)), Quota(limits))

    return ArtifactReader(about, contents)


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
    return [found for diff_id in ids if (found := known[diff_id]) is not None]


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
    with contextlib.closing(Hashed(stream)) as hashed:
        for number, (member, content) in enumerate(tar_items(cast(BinaryIO, hashed), name, quota)):
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
        if hashed.finish() != diff_id:
            raise BuildError(f"{name}: damaged, or not the layer that the image's configuration names ({diff_id})")
    return LayerListing(listed, frozenset(scripts), notes)


def remembered(diff_id: str, store: ReadStore) -> LayerListing | None:
    """Return the cached listing of the layer whose tar has the digest `diff_id`, None if it was never read."""
    try:
        data = read_table(_place(store, diff_id))
        if data["format"] != FORMAT:
            return None
        notes = {int(number): note for number, note in data["notes"]}
        return LayerListing(unpacked(data), frozenset(data["scripts"]), notes)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None  # missing or damaged: it is only a cache


def _place(store: ReadStore, diff_id: str) -> Path:
    return store.root / "listings" / f"{diff_id.rpartition(':')[2]}.members"
