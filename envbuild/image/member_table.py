"""Tables of members for the caches of layers: columns as JSON with the file's name, in zstd with a checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envbuild.base.atomic import replacing
from envbuild.base.files import parse_json
from envbuild.image.tar_stream import Member

# The limit protects our memory from a damaged table; no table of a real layer comes near.
_MOST = 1 << 30
_COLUMNS = ("name", "kind", "mode", "uid", "gid", "mtime", "size", "link", "offset", "stored", "sha256")
_NAME = "name"


def packed(members: Sequence[Member]) -> dict[str, Any]:
    """Return `members` as an object for JSON."""
    return {
        "members": [[getattr(member, name) for member in members] for name in _COLUMNS],
        "devices": {i: m.device for i, m in enumerate(members) if m.device != (0, 0)},
        "pieces": {i: m.pieces for i, m in enumerate(members) if m.pieces is not None},
        "xattrs": {i: [(name, v.hex()) for name, v in m.xattrs] for i, m in enumerate(members) if m.xattrs},
    }


def unpacked(table: Mapping[str, Any]) -> tuple[Member, ...]:
    """Return the members in `table`. Raises KeyError, ValueError, TypeError or IndexError for a damaged one."""
    found = tuple(
        Member(name, kind, mode, uid, gid, mtime, size, link, (0, 0), offset, stored, sha256=sha256)
        for name, kind, mode, uid, gid, mtime, size, link, offset, stored, sha256 in zip(*table["members"], strict=True)
    )
    for ordinal, (major, minor) in table["devices"].items():
        found[int(ordinal)].device = (major, minor)
    for ordinal, pieces in table["pieces"].items():
        found[int(ordinal)].pieces = tuple((offset, length) for offset, length in pieces)
    for ordinal, xattrs in table["xattrs"].items():
        found[int(ordinal)].xattrs = tuple((name, bytes.fromhex(value)) for name, value in xattrs)
    return found


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Write `table` to `path` atomically. Raises OSError."""
    import zstandard

    text = json.dumps({**table, _NAME: path.name}, separators=(",", ":")).encode("ascii")
    data = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def read_table(path: Path) -> dict[str, Any]:
    """Return the table in `path`. Raises OSError, and ValueError for a damaged one and for one of another name."""
    import zstandard

    try:
        data = path.read_bytes()
        if not 0 < zstandard.frame_content_size(data) < _MOST:
            raise ValueError("no table")
        table = parse_json(zstandard.ZstdDecompressor().decompress(data))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if not isinstance(table, dict) or table.pop(_NAME, path.name) != path.name:
        raise ValueError("no table")
    return table
