"""The start of an image's program, as the image's configuration defines it (OCI image specification 1.1, config.md)."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envbuild.base.errors import BuildError
from envbuild.image.entry import DIR, FILE, SYMLINK, Entry

# An addition to an image: an entry, and the content of a file. A file replaces an existing one; a folder or a
# symbolic link is added only if nothing has its path.
Addition = tuple[Entry, bytes | None]
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class ProgramConfig:
    """The start of an image's program; `env` has each variable once, `workdir` and `volumes` are absolute."""

    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    env: Mapping[str, str]
    workdir: str
    volumes: tuple[str, ...]
    labels: Mapping[str, str]

    @property
    def default(self) -> tuple[str, ...]:
        """The words when the user gives none: the image's, or a shell (as in enroot) if the image names no command."""
        return self.cmd if self.cmd or self.entrypoint else ("/bin/sh",)


def run_of(config: Mapping[str, Any]) -> ProgramConfig:
    """Return how an image's configuration starts its program. Raises BuildError for an invalid configuration."""
    inner = config.get("config") or {}
    if not isinstance(inner, dict):
        raise _wrong("config")
    pairs = [pair.partition("=") for pair in _words(inner, "Env")]
    return ProgramConfig(
        entrypoint=_words(inner, "Entrypoint"),
        cmd=_words(inner, "Cmd"),
        env={name: value for name, equals, value in pairs if equals},
        workdir=_absolute(_text(inner.get("WorkingDir") or "", "WorkingDir")),
        volumes=tuple(sorted({_absolute(path) for path in _table(inner, "Volumes")} - {"/"})),
        labels={k: _text(v, "Labels") for k, v in sorted(_table(inner, "Labels").items())},
    )


def quoted(text: str) -> str:
    """Return `text` as one word of a POSIX shell's command, whatever it contains.

    The shorter `'\\''` is not used, because the shell inside Apptainer 1.4 keeps its backslash.
    """
    return "'" + text.replace("'", "'\"'\"'") + "'"


def file(path: str, text: str, mtime: int, mode: int = 0o644) -> Addition:
    """Return a file with the content `text`; characters without UTF-8, which JSON allows, become question marks."""
    data = text.encode("utf-8", "replace")
    return Entry(path, FILE, mode, len(data), mtime=mtime), data


def folder(path: str, mtime: int, mode: int = 0o755) -> Addition:
    """Return a folder, which is added only if nothing has its path."""
    return Entry(path, DIR, mode, mtime=mtime), None


def link(path: str, target: str, mtime: int) -> Addition:
    """Return a symbolic link, which is added only if nothing has its path."""
    return Entry(path, SYMLINK, 0o777, target=target, mtime=mtime), None


def _words(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = data.get(key) or []
    if isinstance(value, str):  # in docker's older images
        value = [value]
    if not isinstance(value, list):
        raise _wrong(key)
    return tuple(_text(word, key) for word in value)


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key) or {}
    if not isinstance(value, dict) or any("\0" in name for name in value):
        raise _wrong(key)
    return value


def _text(value: object, key: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise _wrong(key)
    return value


def _absolute(path: str) -> str:
    # normpath keeps two leading slashes, to which POSIX allows another meaning.
    return "/" + posixpath.normpath("/" + path).lstrip("/")


def _wrong(key: str) -> BuildError:
    return BuildError(
        f"the image's configuration is not one: {key} has a form that the OCI specification does not know",
        "build or pull the image again, by a tool that writes OCI or docker images",
    )
