"""The bundled trainer as a wheel, so that every artifact installs it like any other package."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from envbuild import __version__
from envbuild.errors import BuildError
from envbuild.files import shipped

NAME = "ddp-train"
_DIST_INFO = f"ddp_train-{__version__}.dist-info"
_WHEEL = "Wheel-Version: 1.0\nGenerator: envbuild\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_METADATA = f"""Metadata-Version: 2.1
Name: ddp-train
Version: {__version__}
Summary: A small PyTorch DistributedDataParallel trainer, used to prove environments
License: Apache-2.0
Requires-Python: >=3.9
Requires-Dist: torch
"""


@dataclass(frozen=True, slots=True)
class Trainer:
    """The trainer's files by their paths in the wheel; `digest` is the sha256 of them all."""

    files: tuple[tuple[str, bytes], ...]

    @property
    def version(self) -> str:
        return __version__

    @property
    def file_name(self) -> str:
        return f"ddp_train-{__version__}-py3-none-any.whl"

    @property
    def digest(self) -> str:
        digest = hashlib.sha256()
        for name, content in self.files:
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
        return "sha256:" + digest.hexdigest()

    def entries(self) -> list[tuple[str, bytes]]:
        """Return the files of the wheel by their paths; the last one is its RECORD."""
        return described(self.files, _DIST_INFO, _METADATA)

    def wheel(self) -> bytes:
        """Return the wheel's bytes."""
        return pack(self.entries())


def described(files: Sequence[tuple[str, bytes]], info: str, metadata: str) -> list[tuple[str, bytes]]:
    """Return the files of a pure wheel: `files` and those of its .dist-info folder `info`."""
    own = [(f"{info}/METADATA", metadata.encode()), (f"{info}/WHEEL", _WHEEL.encode())]
    return with_record([*files, *own], info)


def with_record(entries: Sequence[tuple[str, bytes]], info: str) -> list[tuple[str, bytes]]:
    """Return the files of a wheel with their RECORD in the .dist-info folder `info`, which comes last."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    for name, data in entries:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow([name, f"sha256={digest}", len(data)])
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


def load_trainer() -> Trainer:
    """Load the trainer that is part of this envbuild. Raises BuildError when its files are missing."""
    folder = shipped("ddp_train")
    if not (folder / "__main__.py").is_file():
        raise BuildError(f"the trainer is missing from {folder}", "reinstall envbuild")
    sources = sorted(path for path in folder.rglob("*.py"))
    return Trainer(tuple((f"ddp_train/{path.relative_to(folder).as_posix()}", path.read_bytes()) for path in sources))
