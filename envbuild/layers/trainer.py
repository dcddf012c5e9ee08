"""Wheel of the bundled trainer, so that every artifact installs it like any other package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from envbuild import __version__
from envbuild.base.errors import BuildError
from envbuild.base.files import shipped
from envbuild.base.packages import described, pack

NAME = "ddp-train"
_DIST_INFO = f"ddp_train-{__version__}.dist-info"
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
    """Files of the trainer by their paths in the wheel; `digest` is the sha256 of all files."""

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


def load_trainer() -> Trainer:
    """Load the trainer that is part of this envbuild. Raises BuildError when its files are missing."""
    folder = shipped("ddp_train")
    if not (folder / "__main__.py").is_file():
        raise BuildError(f"the trainer is missing from {folder}", "reinstall envbuild")
    sources = sorted(path for path in folder.rglob("*.py"))
    return Trainer(tuple((f"ddp_train/{path.relative_to(folder).as_posix()}", path.read_bytes()) for path in sources))
