"""The archive of a source build, verified by hash."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from envbuild.environment import Environment
from envbuild.errors import BuildError
from envbuild.recipe.sources import SourceLayer
from envbuild.site.pip_config import redact

if TYPE_CHECKING:
    from envbuild.store.client import Client

KIND = "sources"
_INDEX = "index:"


def fetch_source(layer: SourceLayer, environment: Environment, *, offline: bool) -> Path:
    """Return the layer's archive from the store, the site's mirrors, or its URL.

    A URL "index:NAME" means pip's package index. Raises BuildError with each source that was tried and its answer.
    """
    if found := _in_store(layer, environment):
        return found
    from envbuild.cache.retry import Mismatch, RequestFailed
    from envbuild.progress import transfer
    from envbuild.store.client import Client
    from envbuild.store.fetch import download

    store, answers, found_sums = environment.store, list[str](), list[str]()
    store.folder("partial")
    store.clean_stale()
    client = Client(environment.pip, environment.variables)
    for url in _urls(layer, environment, client, answers, offline):
        shown = redact(url)
        if offline and not url.startswith("file:"):
            answers.append(f"{shown}: not asked, --offline")
            continue
        name = unquote(urlsplit(url).path).rpartition("/")[2] or layer.name
        try:
            with transfer(f"fetching {layer.name} {layer.version}", None) as on_progress:
                return download(
                    url, name, frozenset({layer.sha256}), layer.sha256, lambda: _in_store(layer, environment), client,
                    store, on_progress, KIND,
                )  # fmt: skip
        except Mismatch as error:
            answers.append(f"{shown}: hash mismatch: it has sha256:{error.sha256}")
            found_sums.append(error.sha256)
        except RequestFailed as error:
            answers.append(f"{shown}: {error}")
        except OSError as error:
            raise store.unwritable(error) from error
    raise _not_found(layer, answers, found_sums, offline)


def _in_store(layer: SourceLayer, environment: Environment) -> Path | None:
    with contextlib.suppress(OSError):
        for path in (environment.store.root / KIND / layer.sha256).iterdir():
            if path.is_file():
                return path
    return None


def _urls(
    layer: SourceLayer, environment: Environment, client: Client, answers: list[str], offline: bool
) -> Iterator[str]:
    """Yield the possible URLs of the archive, in the order in which to try them."""
    if not layer.url.startswith(_INDEX):
        yield from environment.site.mirrored(layer.url)
        return
    from envbuild.cache.retry import RequestFailed
    from envbuild.store.sources import local_files, remote_sources

    project = layer.url.removeprefix(_INDEX)
    for folder, names in local_files(environment.pip, ("",)):
        own = sorted(name for name in names if name.startswith(f"{project}-{layer.version}."))
        yield from ((folder / name).absolute().as_uri() for name in own)
    for page in remote_sources(environment.pip, environment.site, (), offline, environment.default_index):
        try:
            links = [link for link in page.links(project, client) if link.sha256 == layer.sha256]
        except RequestFailed as error:
            answers.append(f"{page.name}: cannot be used: {error}")
            continue
        if not links:
            answers.append(f"{page.name}: has no {project} with this hash")
        yield from (link.url for link in links)


def _not_found(layer: SourceLayer, answers: list[str], found: list[str], offline: bool) -> BuildError:
    lines = [f"{layer.name} {layer.version}: no place has its source archive", f"wanted sha256:{layer.sha256}"]
    lines += answers or [f"{redact(layer.url)}: not asked"]
    if offline:
        hint = (
            "run it once without --offline, or give the URL a mirror in a folder (file:///...) under [mirrors] in "
            "site.toml"
        )
    elif found:
        hint = (
            "the archive is another one than the recipe means. If you trust it (compare with its project's release), "
            f'set sha256 = "{found[0]}" in [layers.{layer.name}]'
        )
    else:
        hint = (
            "check the network and pip's proxy and cert; or give the URL a mirror under [mirrors] in site.toml, or "
            f"`url` in [layers.{layer.name}]"
        )
    return BuildError("\n    ".join(lines), hint)
