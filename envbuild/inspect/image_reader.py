"""Reader of container images: layers are listed once, no file is unpacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from envbuild.image.compression import decompressed
from envbuild.image.entry import DIR, FILE, SYMLINK
from envbuild.image.model import Descriptor
from envbuild.image.tree import MergedTree, Node
from envbuild.inspect.facts import IMAGE, Description, Inventory, Item, LayerFact
from envbuild.inspect.listing import LayerListing, listing, remembered
from envbuild.inspect.roots import contents_of_root, extra_of
from envbuild.store.store import Store

# Fetches layers, by the digests of their tars, to this machine, and returns the file of each.
Bring = Callable[[Mapping[str, Descriptor]], Mapping[str, Path]]


@dataclass(frozen=True, slots=True)
class OpenedImage:
    """An image of any form; see `ArtifactReader`."""

    about: Description
    layers: tuple[Descriptor, ...]
    bring: Bring
    store: Store
    _kept: list[Inventory] = field(default_factory=list, repr=False)

    def contents(self, *, hashes: bool) -> Inventory:
        """Return the merged tree. The store caches the listing of each layer, so that digests cost nothing."""
        if not self._kept:
            self._kept.append(_contents(self.about, self._listings()))
        return self._kept[0]

    def _listings(self) -> list[LayerListing]:
        wanted = list(zip(self.layers, self.about.layers, strict=True))
        known = {fact.diff_id: remembered(fact.diff_id, self.store) for _, fact in wanted}
        missing = {fact.diff_id: layer for layer, fact in wanted if known[fact.diff_id] is None}
        if missing:
            files = self.bring(missing)
            for diff_id, layer in missing.items():
                name = f"{self.about.spelling}: layer {layer.digest}"
                known[diff_id] = listing(diff_id, name, _opener(files[diff_id], name), self.store)
        return [found for _, fact in wanted if (found := known[fact.diff_id]) is not None]


def about_image(
    config: Mapping[str, Any],
    identity: str,
    digest: str,
    layers: Sequence[Descriptor],
    spelling: str,
    place: Path | None,
) -> Description:
    """Return the description of an image from its configuration (OCI image specification 1.1, config.md)."""
    run = _table(config.get("config"))
    labels = {str(k): str(v) for k, v in _table(run.get("Labels")).items()}
    diff_ids = config["rootfs"]["diff_ids"]
    titles = _titles(config, len(diff_ids))
    system, arch = config.get("os") or "linux", config.get("architecture") or "unknown"
    return Description(
        kind=IMAGE,
        spelling=spelling,
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
        env=dict(str(pair).partition("=")[::2] for pair in run.get("Env") or ()),
        entrypoint=_words(run.get("Entrypoint")),
        cmd=_words(run.get("Cmd")),
        workdir=str(run.get("WorkingDir") or ""),
        user=str(run.get("User") or ""),
    )


def _titles(config: Mapping[str, Any], count: int) -> list[str]:
    """Return the command that made each layer, from the history; "" for all if the history does not match."""
    history = config.get("history")
    steps = [
        str(step.get("created_by") or step.get("comment") or "")
        for step in (history if isinstance(history, list) else ())
        if isinstance(step, dict) and not step.get("empty_layer")
    ]
    if len(steps) != count:
        return [""] * count
    return [" ".join(step.removeprefix("envbuild: ").split()) for step in steps]


def _contents(about: Description, listings: Sequence[LayerListing]) -> Inventory:
    root = MergedTree()
    for layer, fact in zip(listings, about.layers, strict=True):
        root.begin()
        for number, member in enumerate(layer.members):
            root.apply(member, number, fact.digest)
    files: dict[str, Item] = {}
    notes: dict[str, Any] = {}
    for path, node in root.walk():
        if path:
            files[path] = _item(node, listings)
            if node.member is not None and node.ordinal in listings[node.layer].notes:
                notes[path] = listings[node.layer].notes[node.ordinal]
    return contents_of_root(files, notes, about.env)


def _item(node: Node, listings: Sequence[LayerListing]) -> Item:
    member = node.member
    if member is None:
        return Item(DIR, 0o755)
    layer = listings[node.layer]
    return Item(
        member.kind,
        0o777 if member.kind == SYMLINK else member.mode,
        member.size if member.kind == FILE else 0,
        layer.sha256.get(node.ordinal, ""),
        member.link if member.kind == SYMLINK else "",
        member.uid,
        member.gid,
        node.ordinal in layer.scripts,
        extra_of(member.device, member.xattrs),
    )


def _opener(path: Path, name: str) -> Callable[[], BinaryIO]:
    return lambda: decompressed(path.open("rb"), name)


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _words(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()
