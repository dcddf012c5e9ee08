"""The environment in which envbuild runs, as one value for resolving, fetching and building."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.base import process
from envbuild.base.atomic import lock_failure, naming, write_hint
from envbuild.base.errors import HostError, UsageError
from envbuild.contract.state import FIXED_TIME
from envbuild.site.pip_config import PipConfig, uv_environment, uv_settings
from envbuild.store.store import Store

if TYPE_CHECKING:
    from envbuild.image.registry import Registry
    from envbuild.site.settings import Site


@dataclass(frozen=True)
class Environment:
    """The process environment, the site's settings, pip's configuration and the store."""

    variables: Mapping[str, str]
    site: Site
    pip: PipConfig
    store: Store
    allow_expired: bool = False  # whether Debian archives may be locked from whose Release file has expired

    @functools.cached_property
    def uv(self) -> str:
        """The path of the uv program that is installed with envbuild. Raises HostError when it is missing."""
        from uv import find_uv_bin

        try:
            return os.fspath(find_uv_bin())
        except FileNotFoundError as error:
            raise HostError("uv's program is missing", "install it: pip install uv") from error

    @property
    def source_date(self) -> int:
        """The time of an image's files: SOURCE_DATE_EPOCH (reproducible-builds.org), else a fixed date.

        Raises UsageError for an invalid value and for times before 1980, which zipfile refuses inside of images.
        """
        text = self.variables.get("SOURCE_DATE_EPOCH", "")
        if not text:
            return FIXED_TIME
        if not text.isascii() or not text.isdecimal() or not 315532800 <= int(text) < 1 << 32:
            raise UsageError(
                f"SOURCE_DATE_EPOCH is {text!r}, not a time that file formats can store",
                "give seconds since 1970, 315532800 (1980) or later",
            )
        return int(text)

    def registry(self, image: str) -> Registry:
        """Return the registry of `image`, with this site's mirrors, proxies and certificates."""
        from envbuild.store.remote import registry_of  # with the HTTP client, which most commands do not need

        return registry_of(image, self.site, self.pip, self.variables)

    @contextlib.contextmanager
    def temporary_folder(self, prefix: str) -> Iterator[Path]:
        """Yield a new private folder in the TMPDIR of this run. Raises OSError, which always names a file."""
        home = self.variables.get("TMPDIR")
        # The run's TMPDIR is removed as a whole later.
        with tempfile.TemporaryDirectory(prefix=prefix, dir=home, ignore_cleanup_errors=True) as folder, naming(folder):
            yield Path(folder)

    def uv_environment(self) -> dict[str, str]:
        """Return the environment variables for uv; they put its cache into the store.

        Raises HostError where uv cannot lock its cache.
        """
        cache = self.store.uv_cache
        if error := lock_failure(cache):
            raise HostError(
                f"cannot lock {cache} with flock: {error.strerror}; uv, whose cache is in the store, needs flock",
                "set ENVBUILD_STORE (or `store` in site.toml) to a folder with flock: a local disk, or Lustre that is "
                "mounted with -o flock",
            )
        return uv_environment(self.pip, self.variables, cache)

    def write_uv_settings(self, path: Path, indexes: Sequence[str], newest: Mapping[str, str | bool] = {}) -> None:
        """Write `uv_settings` to `path`, readable only by its owner: index URLs may hold passwords."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(uv_settings(self.pip, indexes, newest))

    def default_index(self) -> str:
        """Return uv's default index, which is used when pip's configuration names none.

        Raises HostError when uv does not print it.
        """
        command = [self.uv, "pip", "compile", os.devnull, "--emit-index-url", "--no-header", "--no-config"]
        command += ["--offline", "--quiet", "--python", sys.executable]
        done = process.run(command, env=self.uv_environment(), check=False)
        option, _, url = done.stdout.strip().partition(" ")
        if option != "--index-url":
            raise HostError(f"uv does not name its default index:\n{process.tail(done)}", "set pip's index-url")
        return url


def uv_hint(output: str, status: int) -> str:
    """Return the hint for uv's error message `output` and its exit status."""
    if status < 0:
        return process.KILLED
    text = output.lower()
    if "no space left" in text or "quota" in text:
        return write_hint(errno.ENOSPC)
    if "read-only file system" in text or "permission denied" in text:
        return write_hint(errno.EROFS)
    if "hash mismatch" in text:
        return "a wheel changed since it was locked; remove it from its source, or lock again"
    return "run it again; if it persists, remove the store's uv folder (it is only a cache)"


def own_command() -> str:
    """Return the path of this envbuild, with which nodes start it if they see it at the same path."""
    path = Path(sys.argv[0]).absolute()
    if path.name == "__main__.py":  # python -m envbuild
        path = Path(sys.executable).absolute().parent / "envbuild"
    return os.fspath(path)
