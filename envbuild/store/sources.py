"""Sources of wheels: find-links folders and pages, package indexes, mirrors."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urljoin

from envbuild.base.masking import redact
from envbuild.base.text import normalise
from envbuild.cache.http import NotFound, RequestFailed
from envbuild.site.pip_config import PipConfig
from envbuild.store.client import Client, path_of, with_credentials_of

if TYPE_CHECKING:
    from envbuild.site.settings import Site
    from envbuild.store.store import Store


class FetchSettings(Protocol):
    """What fetching needs to know of this host: the Environment of a run."""

    @property
    def variables(self) -> Mapping[str, str]: ...
    @property
    def site(self) -> Site: ...
    @property
    def pip(self) -> PipConfig: ...
    @property
    def store(self) -> Store: ...
    def default_index(self) -> str:
        """Return the URL of the index that is used if pip's configuration names none."""
        ...


_BASE = re.compile(r"""<base\s[^<>]*?href\s*=\s*["']([^"']+)""", re.IGNORECASE)
_BARE_ANCHOR = re.compile(r"""(href\s*=\s*["'][^"'#]*)#[^"'=]*(?=["'])""", re.IGNORECASE)

# Errors from a page whose values have other types than the format says.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Link:
    """A file on a page: its name, its URL, and its sha256 if the page states it.

    `requires_python` is a version specifier, `uploaded` the time of the upload (ISO 8601; HTML pages have none); both
    are "" if the page does not state them. `yanked` is whether the file was yanked.
    """

    filename: str
    url: str
    sha256: str | None
    requires_python: str = ""
    uploaded: str = ""
    yanked: bool = False

    @property
    def time(self) -> datetime | None:
        """The time of the upload, None if the page states none."""
        try:
            time = datetime.fromisoformat(self.uploaded)
        except ValueError:
            return None
        return time if time.tzinfo else time.replace(tzinfo=UTC)


@dataclass
class PackageSource:
    """A source of links: one page for each project (an index), or one page for all (find-links).

    Each page is requested once and kept. A server that is down is not asked again. After a failure in spite of retries,
    each further page is tried only once, so that ten wheels do not wait ten times for one dead index. A page that is
    refused on its own does not affect other pages.
    """

    url: str
    is_index: bool
    refusal: RequestFailed | None = None
    patient: bool = True
    _pages: dict[str, list[Link]] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return redact(self.url)

    def links(self, project: str, client: Client) -> list[Link]:
        """Return the files of `project` (normalised name). Raises RequestFailed."""
        page = self._page(project)
        with self._locks.setdefault(page, threading.Lock()):
            if self.refusal is not None:
                raise self.refusal
            if page not in self._pages:
                try:
                    self._pages[page] = list(read_page(page, project, client, self.patient))
                except NotFound:
                    self._pages[page] = []
                except RequestFailed as error:
                    if error.is_down:
                        self.refusal = error
                    self.patient = False
                    raise
            return self._pages[page]

    def forget_without(self, project: str, version: str) -> bool:
        """Forget the page of `project` and return True if a server sent it and it has no wheel of `version`.

        The page is then requested again when it is next needed.
        """
        page = self._page(project)
        links = self._pages.get(page)
        if not self.is_index or page.startswith("file:") or links is None:
            return False
        if any(matches(link.filename, project, version) for link in links):
            return False
        return self._pages.pop(page, None) is not None

    def _page(self, project: str) -> str:
        return f"{self.url.rstrip('/')}/{project}/" if self.is_index else self.url


def single_file(url: str, name: str) -> PackageSource:
    """Return a source of the file at `url` alone, called `name`."""
    return PackageSource(url, is_index=False, _pages={url: [Link(name, url, None)]})


def read_page(url: str, project: str, client: Client, patient: bool = True) -> Iterator[Link]:
    """Yield the links of a project page (PEP 503 HTML or PEP 691 JSON) or of a find-links page.

    Raises NotFound, or another RequestFailed.
    """
    from mousebender import simple

    kind = "text/html"
    if url.startswith("file:"):
        folder = path_of(url)
        html = folder / "index.html" if folder.is_dir() else folder
        try:
            text = html.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise NotFound(str(error)) from None
    else:
        response = client.page(url, patient=patient)
        url, kind = with_credentials_of(response.url, url), response.headers.get("Content-Type", kind)
        text = response.content.decode("utf-8", "replace")
    try:
        if "json" not in kind:
            # pip accepts <base>, and anchors that do not link to a file; mousebender does not.
            if base := _BASE.search(text):
                url = with_credentials_of(urljoin(url, base[1]), url)
            text = _BARE_ANCHOR.sub(r"\1", text)
        page = simple.parse_project_details(text, kind, project)
        links = [_link(file, url) for file in page["files"]]
    except (simple.UnsupportedMIMEType, simple.UnsupportedAPIVersion, *_MALFORMED) as error:
        reason = str(error).partition("\n")[0]
        raise RequestFailed(f"not a package index: {reason}", answered=True) from None
    yield from links


def _link(file: Mapping[str, Any], url: str) -> Link:
    """Return one file of the page at `url`."""
    link = with_credentials_of(urljoin(url, file["url"]).partition("#")[0], url)
    digest = file["hashes"].get("sha256")
    return Link(
        unquote(file["filename"]),
        link,
        digest.partition("&")[0].lower() if digest else None,
        str(file.get("requires-python") or ""),
        str(file.get("upload-time") or ""),
        file.get("yanked", False) is not False,
    )


def matches(filename: str, name: str, version: str) -> bool:
    """Return whether `filename` is a wheel of this project and version (binary distribution format)."""
    if not filename.endswith(".whl") or "/" in filename or "\0" in filename:
        return False
    parts = filename[: -len(".whl")].split("-")
    if len(parts) not in (5, 6) or normalise(parts[0]) != name:
        return False
    version_text = unquote(parts[1])
    if version_text == version.replace("-", "_"):
        return True
    from packaging.version import Version

    try:
        return Version(version_text.replace("_", "+", 1) if "+" not in version_text else version_text) == Version(
            version
        )
    except ValueError:  # InvalidVersion is one, and the error of int() for thousands of digits
        return False


def local_files(pip: PipConfig, suffixes: tuple[str, ...] = (".whl",)) -> list[tuple[Path, list[str]]]:
    """Return (folder, file names) of each find-links entry that is a local folder or file.

    Only files whose names end in one of `suffixes` are listed.
    """
    folders = []
    for entry in pip.find_links:
        path = _local_path(entry)
        if path is not None and path.is_dir():
            with contextlib.suppress(OSError):
                folders.append((path, [name for name in os.listdir(path) if name.endswith(suffixes)]))
        elif path is not None and path.name.endswith(suffixes) and path.is_file():
            folders.append((path.parent, [path.name]))
    return folders


def _local_path(entry: str) -> Path | None:
    if entry.startswith("file:"):
        return path_of(entry)
    return None if "://" in entry else Path(entry)


def remote_sources(
    host: FetchSettings,
    indexes: Sequence[str],
    offline: bool,
    *,
    only: str | None = None,
    last: Sequence[str] = (),
    patient: bool = True,
) -> list[PackageSource]:
    """Return all sources except local folders, in the order in which they are asked.

    The order is: find-links pages, the recipe's indexes through the site's mirrors, pip's index, pip's extra indexes,
    `last`. `only` is an index of the site that takes the place of all other indexes. With `offline`, only sources on
    local disks are returned. `patient` is whether their failed requests are retried.
    """
    sources, pip = [], host.pip
    for entry in pip.find_links:
        path = _local_path(entry)
        if path is None or (path.is_file() and path.suffix != ".whl"):
            url = entry if "://" in entry else Path(entry).absolute().as_uri()
            sources.append(PackageSource(url, is_index=False, patient=patient))
    if not pip.no_index:
        named = [only] if only else [*indexes, pip.index_url or host.default_index(), *pip.extra_index_urls, *last]
        urls = dict.fromkeys(url for index in named for url in host.site.mirrored(index))
        sources += [PackageSource(url, is_index=True, patient=patient) for url in urls]
    return [source for source in sources if not offline or source.url.startswith("file:")]


def probe_index(url: str, pip: PipConfig, env: Mapping[str, str]) -> str | None:
    """Return None when the package index at `url` answers, else the reason of the failure."""
    if url.startswith("file:") and not path_of(url).is_dir():
        return "no such folder"
    try:
        # Without retries: a resolution leaves out an index that is down, and reports it.
        PackageSource(url, is_index=True).links("torch", Client(replace(pip, retries=0), env))
    except RequestFailed as error:
        return str(error)
    return None
