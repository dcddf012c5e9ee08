"""Digests of files, each hashed once since the boot and again when its stat changed, and notes that prove themselves.

A note says something about content that costs too much to find out again. No name states the sha256 of a note, so it
contains that of its own name and fields: a damaged note, and one of other content in its place, count as missing.

The time of a digest's note is that of the file's last use.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbuild.base.atomic import folder_lock, write_atomically
from envbuild.base.files import parse_json, sha256_of
from envbuild.base.host import this_boot
from envbuild.base.progress import log

# The field of a note with the sha256 of its name and other fields.
_SEAL = "seal"


@dataclass(frozen=True, slots=True)
class Digests:
    """Notes of files' sha256 (hexadecimal) below `root`. They are not used if users other than the owner can write.

    `seen` gets the real path of every file whose digest was asked for.
    """

    root: Path
    seen: set[str] = field(default_factory=set, compare=False, repr=False)

    def of(self, path: Path, *, again: bool = False) -> str:
        """Return the sha256 of a file, which is read `again` even if nothing changed. Raises OSError."""
        real = os.path.realpath(path)
        note = self._note(real)
        with self.using():
            key, used = _key(real), self.used(path)
            if not again and self._private():
                with suppress(OSError, ValueError):
                    known = parse_json(note.read_bytes())
                    if isinstance(known, list) and known[:-1] == key:
                        os.utime(note)
                        self.seen.add(real)
                        return str(known[-1])
        digest = sha256_of(real)
        with self.using():
            os.stat(real)  # it may have been removed as unused meanwhile
            self._write(note, [*key, digest])
            if again and used:  # a check of the store is no use
                with suppress(OSError):
                    os.utime(note, (used, used))
        self.seen.add(real)
        return digest

    def used(self, path: Path) -> float:
        """Return the time at which the digest of a file was last asked for, 0 if it is not known."""
        with suppress(OSError):
            return self._note(os.path.realpath(path)).stat().st_mtime
        return 0.0

    def forget(self, path: Path) -> None:
        """Remove the note of a file."""
        with suppress(OSError):
            self._note(os.path.realpath(path)).unlink()

    @contextmanager
    def using(self) -> Iterator[None]:
        """Exclude the removal of unused files, which locks `root`, while a file is found and its use noted."""
        with ExitStack() as stack:
            with suppress(OSError):  # nothing is stored yet
                stack.enter_context(folder_lock(self.root, shared=True))
            yield

    def record(self, path: Path, sha256: str) -> None:
        """Record the sha256 of a file that was hashed while it was written."""
        with suppress(OSError):
            real = os.path.realpath(path)
            self._write(self._note(real), [*_key(real), sha256])
            self.seen.add(real)

    def keep(self, path: Path, sha256: str, *, again: bool = False) -> bool:
        """Return whether the file `path` has this content; remove a file with other content, and say so."""
        try:
            if self.of(path, again=again) == sha256:
                return True
        except OSError:
            return False
        log(f"{path}: damaged (wrong sha256); removed, and built or fetched again")
        with suppress(OSError):
            path.unlink()
        return False

    def _note(self, real: str) -> Path:
        return self.root / hashlib.sha256(os.fsencode(real)).hexdigest()

    def _write(self, note: Path, row: list[object]) -> None:
        with suppress(OSError):  # a read-only store only costs time
            self.root.mkdir(parents=True, exist_ok=True)
            write_atomically(note, json.dumps(row), durable=False)

    def _private(self) -> bool:
        with suppress(OSError):
            info = self.root.stat()
            return info.st_uid == os.geteuid() and not info.st_mode & 0o022
        return False


def _key(real: str) -> list[object]:
    info = os.stat(real)
    return [real, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, this_boot()]


def write_note(path: Path, fields: Mapping[str, Any], *, durable: bool = False) -> None:
    """Write a note, atomically; see `write_atomically`. Raises OSError."""
    write_atomically(path, json.dumps({**fields, _SEAL: _sealed(path, fields)}), durable=durable)


def read_note(path: Path) -> dict[str, Any]:
    """Return the fields of a note; remove a damaged one, and say so. Raises OSError and ValueError."""
    fields, data = {_SEAL: ""}, path.read_bytes()
    with suppress(ValueError):
        fields = parse_json(data)
    if not isinstance(fields, dict) or _SEAL not in fields:  # older versions wrote notes without it
        raise ValueError("no note")
    if fields.pop(_SEAL) != _sealed(path, fields):
        log(f"{path}: damaged (wrong sha256); removed, and built again")
        path.unlink()
        raise ValueError("another note")
    return fields


def _sealed(path: Path, fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([path.name, fields], sort_keys=True).encode()).hexdigest()
