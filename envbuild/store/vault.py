"""The vault: inputs of builds by their sha256, in a repository of a registry or in a folder (an OCI image layout).

It is one more source of locked files, asked after the store and before indexes and mirrors. A registry serves a blob by
its digest alone, so a read needs no tag and no manifest, and a file with another content is refused by its digest. The
entries that keep the blobs, one for each lock, are defined in store/entry.py.
"""

from __future__ import annotations

import re
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.base.atomic import file_lock, write_atomically
from envbuild.base.errors import BuildError
from envbuild.base.files import link_or_copy, parse_json
from envbuild.base.packages import digest_of
from envbuild.base.progress import OnProgress, log
from envbuild.base.system_errors import file_error
from envbuild.base.text import normalise
from envbuild.cache.download import open_download
from envbuild.cache.hashed import Digests
from envbuild.cache.http import Mismatch, NotFound, RequestFailed, TooSlow
from envbuild.image.layout import REF_NAME, BlobFiles, Blobs
from envbuild.image.limits import Quota
from envbuild.image.model import OCI_INDEX, OCI_MANIFEST, Descriptor, canonical
from envbuild.image.registry import Registry, download_blob, manifest_of
from envbuild.image.registry_upload import has_blob
from envbuild.store.entry import FILE_TYPE

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer

# Requests that may fail before the vault is not asked any more in a run.
_FAILURES = 3
_MOST_METADATA = 1 << 20
_ABOUT = re.compile(r"(?P<name>[^/]+)-(?P<version>[^/-]+)\.dist-info/WHEEL")
# Errors of zipfile for a damaged archive, and of a WHEEL file of another form.
_NO_WHEEL = (OSError, ValueError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error)


@dataclass
class Vault:
    """The vault at `name` (oci://HOST/NAME, or oci:FOLDER), whose blobs are in `source`. Used by several threads.

    With `quota`, the files in its wheels are counted: of a repository that also has the lock with their digests. `keys`
    returns the keys of which one must have signed each entry, and, to write, the signer of new ones. `dead` is why it
    is not asked any more; `fetched_bytes` are those of the files that it brought.
    """

    name: str
    source: Registry | Blobs
    quota: Quota | None = None
    keys: Callable[[bool], tuple[list[Key], Signer | None]] = lambda _writes: ([], None)
    dead: RequestFailed | None = None
    fetched_bytes: int = 0
    _failures: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def close(self) -> None:
        """Close the open connections."""
        if isinstance(self.source, Registry):
            self.source.close()

    def fetch(
        self,
        sha256: str,
        partial: Path,
        digests: Digests,
        on_progress: OnProgress,
        stop: threading.Event,
        size: int | None = None,
    ) -> None:
        """Write the file with this sha256 (hexadecimal) to `partial`, which may have a part of it already.

        `digests` knows the files that were hashed. A file of more than `size` bytes is rejected. Raises RequestFailed,
        and OSError when `partial` cannot be written.
        """
        if self.dead is not None:
            raise self.dead
        if isinstance(self.source, Blobs):
            try:
                other = digests.of(file := self.source.path(f"sha256:{sha256}"))
            except FileNotFoundError:
                raise NotFound("not there") from None
            except OSError as error:
                raise RequestFailed(f"cannot be read: {error.strerror}", answered=True) from None
            if other != sha256:
                raise Mismatch(other)
            partial.unlink(missing_ok=True)
            link_or_copy(file, partial)
        else:
            with open_download(partial, frozenset({sha256}), size, on_progress, stop, exact=False) as download:
                try:
                    download_blob(self.source.endpoint, f"sha256:{sha256}", download, stop)
                except BaseException:
                    on_progress(-download.received)  # the next source counts them again
                    raise
        with self._lock:
            self.fetched_bytes += partial.stat().st_size

    def wheel_name(self, wheel: Path) -> str:
        """Return the file name of a wheel by its own metadata.

        Raises ValueError for a file that is not a wheel, and BuildError for one that exceeds the quota.
        """
        name = wheel_name(wheel)
        if self.quota is not None:
            with zipfile.ZipFile(wheel) as archive, self._lock:
                for member in archive.infolist():  # uv refuses a member that is longer than its wheel says
                    self.quota.entry(name)
                    self.quota.content(name, member.file_size)
        return name

    def entries(self, kind: str) -> list[str]:
        """Return the keys of the entries of a kind (store/entry.py). Raises BuildError."""
        tags = list(self._layout()) if isinstance(self.source, Blobs) else self.source.tags()
        return [tag.removeprefix(f"{kind}-") for tag in sorted(tags) if tag.startswith(f"{kind}-")]

    def locks(self) -> list[str]:
        """Return the digests of the locks that have an entry. Raises BuildError."""
        return [f"sha256:{key}" for key in self.entries("lock")]

    def manifest(self, tag: str) -> bytes | None:
        """Return the manifest of an entry, None if the vault does not have it. Raises BuildError."""
        if isinstance(self.source, Blobs):
            digest = self._layout().get(tag, {}).get("digest")
            return None if digest is None else self.source.read(digest)
        try:
            return manifest_of(self.source.endpoint, tag)[0]
        except NotFound:
            return None
        except RequestFailed as error:
            raise BuildError(f"{self.name}:{tag}: {error}") from error

    def lacks(self, digest: str, size: int, stop: threading.Event) -> bool:
        """Return whether the vault does not have a blob. Raises BuildError."""
        if isinstance(self.source, Blobs):
            return not self.source.has(Descriptor("", digest, size))
        try:
            return not has_blob(self.source.endpoint, digest, stop)
        except RequestFailed as error:
            raise BuildError(f"{self.name}@{digest}: {error}") from error

    def publish(self, manifest: bytes, tag: str, files: Mapping[str, Path], on_progress: OnProgress) -> int:
        """Add the blobs `files` (path by digest), and then their manifest as `tag`; return the bytes that it lacked.

        Raises BuildError.
        """
        blobs = [Descriptor(FILE_TYPE, digest, path.stat().st_size) for digest, path in files.items()]
        if isinstance(self.source, Registry):
            pushed = self.source.push(BlobFiles(files), blobs, manifest, OCI_MANIFEST, tag, on_progress=on_progress)
            if self.manifest(tag) != manifest:  # a proxy may answer for it
                raise BuildError(f"{self.name}:{tag}: the registry took it, and does not have it", "run it again")
            return pushed.uploaded_bytes
        with self._writing(self.source) as rows:
            missing = [blob for blob in blobs if not self.source.has(blob)]
            for blob in missing:
                new = self.source.partial(blob.digest)
                new.unlink(missing_ok=True)
                link_or_copy(files[blob.digest], new)  # a killed copy leaves no file under the name of a digest
                self.source.adopt(new, blob.digest)
            row = Descriptor(OCI_MANIFEST, self.source.add(manifest), len(manifest), annotations={REF_NAME: tag})
            rows[tag] = row.as_json()
        return sum(blob.size for blob in missing)

    def remove(self, tags: Sequence[str], unused: Sequence[str]) -> None:
        """Remove entries; of a folder also the blobs `unused` (digests), which only they have. Raises BuildError.

        A registry frees the blobs by its own garbage collection.
        """
        if isinstance(self.source, Registry):
            for raw in filter(None, map(self.manifest, tags)):
                self.source.delete(digest_of(raw))
            return
        with self._writing(self.source) as rows:
            if others := [tag for tag in rows if not tag.startswith(("lock-", "python-"))]:  # with the same blobs?
                raise BuildError(f"{self.name} also has {others[0]}, which is no lock", "remove it from the folder")
            gone = [row["digest"] for row in map(rows.pop, tags)]
        for digest in (*gone, *unused):
            self.source.path(digest).unlink(missing_ok=True)

    @contextmanager
    def _writing(self, blobs: Blobs) -> Iterator[dict[str, dict[str, Any]]]:
        """Yield the rows of the layout's index by their tags while no other process changes them, then write them."""
        folder = blobs.root.parent
        try:
            with file_lock(blobs.partial(":index.lock"), remove=True):
                yield (rows := self._layout())
                index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": list(rows.values())}
                write_atomically(folder / "oci-layout", '{"imageLayoutVersion":"1.0.0"}')
                write_atomically(folder / "index.json", canonical(index).decode())
        except OSError as error:
            raise BuildError(file_error(error, folder), "choose a writable folder with free disk space") from error

    def _layout(self) -> dict[str, dict[str, Any]]:
        """Return the rows of the layout's index by their tags. Raises BuildError for a damaged index."""
        assert isinstance(self.source, Blobs)
        index = self.source.root.parent / "index.json"
        try:
            return {row["annotations"][REF_NAME]: row for row in parse_json(index.read_bytes())["manifests"]}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise BuildError(f"{index}: not the index of a vault: {error!r:.80}") from error

    def failed(self, error: RequestFailed) -> None:
        """Count a failed request; after several, or if no other can succeed, the vault is not asked any more."""
        with self._lock:
            self._failures += _FAILURES if error.is_down or isinstance(error, TooSlow) else 1
            if self._failures >= _FAILURES and self.dead is None:
                self.dead = error
                log(f"the vault {self.name} is not asked any more in this run: {error}")


def wheel_title(wheel: Path) -> tuple[str, str, frozenset[str]]:
    """Return name and version of `wheel` as spelt by its .dist-info folder, and its tags (PEP 425) from its WHEEL file.

    The file name consists of these, unless the file was renamed; 4 of 997 published wheels have other platforms in the
    name. Raises ValueError for a file that is not a wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            (about,) = filter(None, map(_ABOUT.fullmatch, archive.namelist()))
            with archive.open(about[0]) as stream:
                text = stream.read(_MOST_METADATA).decode("utf-8", "replace")
    except _NO_WHEEL as error:
        raise ValueError(f"{wheel.name}: not a wheel: {error}") from None
    tags = HeaderParser().parsestr(text).get_all("Tag", [])
    return about["name"], about["version"], frozenset(str(tag).strip() for tag in tags)


def wheel_name(wheel: Path) -> str:
    """Return the file name of a wheel by its own metadata. Raises ValueError for a file that is not a wheel."""
    name, version, tags = wheel_title(wheel)
    triples = [tag.split("-") for tag in tags if tag.count("-") == 2]
    parts = [".".join(sorted(set(values))) for values in zip(*triples, strict=True)]
    return "-".join([normalise(name).replace("-", "_"), version, *parts]) + ".whl"
