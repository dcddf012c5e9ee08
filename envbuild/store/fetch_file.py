"""Fetch single files into the store, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from envbuild.base.progress import OnProgress, transfer
from envbuild.base.workers import each
from envbuild.cache.download import locked_partial
from envbuild.store.client import Client
from envbuild.store.store import Store

_PARALLEL = 8

Wanted = TypeVar("Wanted")


def fetch_each(
    missing: Sequence[Wanted],
    fetch: Callable[[Wanted, OnProgress], Path | None],
    client: Client,
    title: str,
    total: int | None = None,
) -> dict[Wanted, Path]:
    """Return the file that `fetch` finds for each of `missing`, in parallel; `total` is in bytes, None if unknown."""
    with transfer(title, total) as on_progress:
        paths = each(missing, lambda item, _: fetch(item, on_progress), _PARALLEL, client.stop)
    return {item: path for item, path in zip(missing, paths, strict=True) if path is not None}


def download(
    url: str,
    name: str,
    hashes: frozenset[str],
    key: str,
    known: Callable[[], Path | None],
    client: Client,
    store: Store,
    on_progress: OnProgress,
    kind: str = "wheels",
) -> Path:
    """Download `url` into the store as `kind`/<sha256>/`name`; only one process downloads a `key` at a time.

    `known` returns the file if another process was faster. Raises the RequestFailed of `Client.download`, and
    BuildError when the store cannot be written.
    """
    try:
        with locked_partial(store.folder("partial") / key, client.stop) as path:
            if there := known():
                return there
            digest = client.download(url, path, hashes, on_progress)
            return store.adopt(path, digest, name, kind)
    except OSError as error:
        raise store.unwritable(error) from error
