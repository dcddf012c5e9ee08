"""Wheels of pure Python, from their files (PyPA binary distribution format 1.0)."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Collection, Iterable, Sequence

_WHEEL = "Wheel-Version: 1.0\nGenerator: envbuild\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def record_row(digest: bytes, size: int) -> tuple[str, str]:
    """Return (hash, size) of a file as RECORD has them, from its sha256."""
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}", str(size)


def described(files: Sequence[tuple[str, bytes]], info: str, metadata: str) -> list[tuple[str, bytes]]:
    """Return the files of a pure wheel: `files` and those of its .dist-info folder `info`."""
    own = [(f"{info}/METADATA", metadata.encode()), (f"{info}/WHEEL", _WHEEL.encode())]
    return with_record([*files, *own], info)


def with_record(entries: Sequence[tuple[str, bytes]], info: str) -> list[tuple[str, bytes]]:
    """Return the files of a wheel with their RECORD in the .dist-info folder `info`, which comes last."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    for name, data in entries:
        rows.writerow([name, *record_row(hashlib.sha256(data).digest(), len(data))])
    rows.writerow([f"{info}/RECORD", "", ""])
    return [*entries, (f"{info}/RECORD", out.getvalue().encode())]


def pack(entries: Iterable[tuple[str, bytes]], executable: Collection[str] = ()) -> bytes:
    """Return a wheel's bytes (PyPA binary distribution format 1.0), the same on every machine."""
    buffer = io.BytesIO()
    # Stored, not deflated, so that the bytes do not depend on the zlib of the Python build.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries:
            info = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
            info.external_attr = (0o100755 if name in executable else 0o100644) << 16
            archive.writestr(info, data)
    return buffer.getvalue()
