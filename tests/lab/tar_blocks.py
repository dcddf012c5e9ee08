"""Blocks of tar archives, made one by one, which may be wrong."""

from __future__ import annotations

import tarfile

END = bytes(1024)


def pax(*records: tuple[str, bytes], kind: bytes = b"x") -> bytes:
    """An extended header of these records."""
    body = b""
    for key, value in records:
        rest = b" " + key.encode() + b"=" + value + b"\n"
        size = len(rest) + 1
        while size != len(str(size)) + len(rest):
            size += 1
        body += str(size).encode() + rest
    return special(kind, body)


def special(kind: bytes, body: bytes, size: int | None = None) -> bytes:
    info = tarfile.TarInfo("special")
    info.type, info.size = kind, len(body) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT) + body + bytes(-len(body) % 512)


def plain(name: str = "f", kind: bytes = tarfile.REGTYPE, data: bytes = b"", **more: object) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    for key, value in more.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)
