"""A library of container images: layers, OCI layouts, archives, registries, squashfs and SIF (docs/reference/image.md).

It imports nothing but `cache/` and `base/`, and knows no recipe, site or store. A name is imported from its module when
it is first used: who reads one format does not load the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envbuild.cache.http import Transport as Transport
    from envbuild.image.archive import open_image as open_image
    from envbuild.image.archive import read_archive as read_archive
    from envbuild.image.entry import Entry as Entry
    from envbuild.image.layer import decompressed as decompressed
    from envbuild.image.layer import write_layer as write_layer
    from envbuild.image.layout import Blobs as Blobs
    from envbuild.image.layout import fill_layout as fill_layout
    from envbuild.image.layout import read_layout as read_layout
    from envbuild.image.limits import ImageLimits as ImageLimits
    from envbuild.image.registry import Registry as Registry
    from envbuild.image.registry import open_registry as open_registry
    from envbuild.image.sif import write_sif as write_sif
    from envbuild.image.squashfs.unpack import read_squashfs as read_squashfs
    from envbuild.image.squashfs.unpack import unpack as unpack
    from envbuild.image.squashfs.write import write_squashfs as write_squashfs
    from envbuild.image.tar import tar_items as tar_items
    from envbuild.image.tree import MergedTree as MergedTree

# public name → its module
_PUBLIC = {
    "Blobs": "image.layout",
    "Entry": "image.entry",
    "ImageLimits": "image.limits",
    "MergedTree": "image.tree",
    "Registry": "image.registry",
    "Transport": "cache.http",
    "decompressed": "image.layer",
    "fill_layout": "image.layout",
    "open_image": "image.archive",
    "open_registry": "image.registry",
    "read_archive": "image.archive",
    "read_layout": "image.layout",
    "read_squashfs": "image.squashfs.unpack",
    "tar_items": "image.tar",
    "unpack": "image.squashfs.unpack",
    "write_layer": "image.layer",
    "write_sif": "image.sif",
    "write_squashfs": "image.squashfs.write",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"envbuild.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
