"""Direct references in requirements (PEP 508, `NAME @ ADDRESS`): git repositories, files at URLs, files of a recipe.

Sources: PyPA "Dependency specifiers"; pip, "VCS Support" (`@REF`, `#subdirectory=`) and "Secure installs" (`#sha256=`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from envbuild.base.packages import normalise

DIRECT = re.compile(r"\s*+[A-Za-z0-9][A-Za-z0-9._-]*+\s*+(?:\[[^]]*\]\s*+)?@\s*+\S")
_SDISTS = (".tar.gz", ".zip")
_REF = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._/+-]*")
_GIT = ("git+https", "git+ssh", "git+file")


@dataclass(frozen=True, slots=True)
class DirectReference:
    """The source of a requirement that is on no index.

    `kind` is "git" (the repository at `url`, `ref` of it or its HEAD, and the project in `subdirectory`), "url" (the
    file at `url` with `sha256`) or "path" (a file; `url` is its path relative to the recipe's folder).
    """

    name: str
    kind: Literal["git", "url", "path"]
    url: str
    ref: str = ""
    subdirectory: str = ""
    sha256: str = ""

    @property
    def file_name(self) -> str:
        """Name of the file that a URL or path refers to."""
        return unquote(urlsplit(self.url).path).rpartition("/")[2]

    @property
    def is_wheel(self) -> bool:
        """Whether it refers to a wheel, which needs no build."""
        return self.kind != "git" and self.file_name.endswith(".whl")

    def source(self, folder: Path, commit: str = "") -> str:
        """Return its address for store/archives.py: of this `commit`, or of a file below the recipe's `folder`."""
        if self.kind == "git":
            return f"git+{self.url}@{commit}" + (f"#subdirectory={self.subdirectory}" if self.subdirectory else "")
        return self.url if self.kind == "url" else (folder / self.url).absolute().as_uri()


def reference_of(text: str) -> DirectReference | None:
    """Return the direct reference of the requirement `text`, None if an index provides it.

    Raises ValueError for one that a recipe cannot have. Its text never repeats the address: it may hold a password.
    """
    if DIRECT.match(text) is None:
        return None
    from packaging.requirements import Requirement

    try:
        parsed = Requirement(text)
    except ValueError:
        raise ValueError("not a direct reference: write `NAME @ ADDRESS`, with ` ; MARKER` after it") from None
    address, name = parsed.url or "", normalise(parsed.name)
    if not text.isprintable() or text != text.strip():
        raise ValueError("has blanks at its ends or unprintable characters")
    if address.startswith((".", "/")):
        return _path(name, address)
    try:
        parts = urlsplit(address)
    except ValueError:
        raise ValueError("its address is not a URL") from None
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    if password or (user and parts.scheme != "git+ssh"):
        raise ValueError("holds a user name or password; a recipe is shared: credentials belong to git, or to netrc")
    if parts.scheme in _GIT:
        return _git(name, parts)
    if parts.scheme not in ("https", "http", "file") or not (parts.netloc or parts.scheme == "file"):
        known = ", ".join(f"{scheme}://" for scheme in (*_GIT, "https", "http", "file"))
        raise ValueError(f"its address is none of {known} and ./PATH")
    return _url(name, parts)


def references(requirements: Iterable[str]) -> dict[str, DirectReference]:
    """Return the direct references among valid `requirements`, by name."""
    return {one.name: one for one in map(reference_of, requirements) if one}


def _git(name: str, parts: SplitResult) -> DirectReference:
    path, at, ref = parts.path.rpartition("@") if "@" in parts.path else (parts.path, "", "")
    if (at and not _REF.fullmatch(ref)) or parts.query or not path.strip("/"):
        raise ValueError("its git reference is not a branch, tag or commit: write git+URL@REF")
    if bool(parts.netloc) == (parts.scheme == "git+file"):
        raise ValueError("its repository is not a URL: write git+https://HOST/PATH or git+file:///PATH")
    fragment = _fragment(parts.fragment, "subdirectory")
    folder = fragment.get("subdirectory", "")
    if folder.startswith("/") or ".." in folder.split("/"):
        raise ValueError("its subdirectory is not a folder of the repository")
    url = urlunsplit((parts.scheme.removeprefix("git+"), parts.netloc, path, "", ""))
    return DirectReference(name, "git", url, ref, folder.strip("/"))


def _url(name: str, parts: SplitResult) -> DirectReference:
    sha256 = _fragment(parts.fragment, "sha256").get("sha256", "").lower()
    found = DirectReference(name, "url", urlunsplit(parts._replace(fragment="")), sha256=sha256)
    _check_file(found)
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ValueError("its URL has no sha256, so that nothing says which file is meant: append #sha256=HEX")
    return found


def _path(name: str, address: str) -> DirectReference:
    path = address.removeprefix("./")
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError("its path is not below the recipe's folder: write ./PATH")
    found = DirectReference(name, "path", path)
    _check_file(found)
    return found


def _check_file(found: DirectReference) -> None:
    if found.is_wheel:
        from packaging.utils import parse_wheel_filename

        try:
            project = parse_wheel_filename(found.file_name)[0]
        except ValueError:
            raise ValueError("its file has not the name of a wheel, NAME-VERSION-TAGS.whl") from None
        if project != found.name:
            raise ValueError(f"its wheel is one of {project}")
    elif not found.file_name.endswith(_SDISTS):
        raise ValueError("its file is neither a wheel (.whl) nor a source archive (.tar.gz or .zip)")


def _fragment(text: str, accepted: str) -> dict[str, str]:
    """Return KEY=VALUE pairs of a URL's fragment. Raises ValueError for any but `accepted`, and pip's old `egg`."""
    pairs = {key: unquote(value) for key, _, value in (one.partition("=") for one in text.split("&") if one)}
    if pairs.keys() - {accepted, "egg"}:
        raise ValueError(f"after # only {accepted}= is accepted")
    return pairs
