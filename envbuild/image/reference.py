"""Names of images in registries.

Source: the grammar in github.com/distribution/reference, and Docker's rules for a short name: no host means docker.io,
a single part on docker.io is in `library`, no tag means `latest`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from envbuild.errors import UsageError
from envbuild.image.model import is_digest

DOCKER_HUB = "docker.io"
# All names of Docker Hub; credentials may be stored under any of them.
DOCKER_HUB_NAMES = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io")
_MAX_NAME = 255
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?")
_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_EXAMPLE = "write it as ubuntu:24.04, pytorch/pytorch:2.7, host:5000/name:tag or host/name@sha256:…"


@dataclass(frozen=True, slots=True)
class Reference:
    """The name of an image in a registry. `registry` is host[:port]; a tag, a digest or both select the image."""

    registry: str
    repository: str
    tag: str | None = None
    digest: str | None = None

    @property
    def name(self) -> str:
        """The registry and the repository."""
        return f"{self.registry}/{self.repository}"

    @property
    def pointer(self) -> str:
        """The digest if there is one, because it cannot move, else the tag."""
        return self.digest or self.tag or "latest"

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.name}{tag}" + (f"@{self.digest}" if self.digest else "")


def parse_reference(text: str) -> Reference:
    """Parse an image name and complete it as Docker does. Raises UsageError, naming the invalid part."""
    rest = text.removeprefix("docker://")
    if not rest or rest != rest.strip():
        raise UsageError(f"image {text!r}: not the name of an image", _EXAMPLE)
    if "://" in rest:
        raise UsageError(f"image {text!r}: a name, not a URL, is wanted", _EXAMPLE)
    rest, at, digest = rest.partition("@")
    if at and not is_digest(digest):
        raise UsageError(f"image {text!r}: {digest!r} is no digest", "sha256: and 64 digits 0-9a-f")
    host, slash, path = rest.partition("/")
    if not slash or not _is_host(host):
        host, path = DOCKER_HUB, rest
    path, colon, tag = path.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise UsageError(
            f"image {text!r}: {tag!r} is no tag", "a tag is up to 128 letters, digits, dots, dashes and underscores"
        )
    if not _HOST.fullmatch(host):
        raise UsageError(f"image {text!r}: {host!r} is no host", _EXAMPLE)
    host = _canonical_host(host)
    if host == DOCKER_HUB and "/" not in path:
        path = f"library/{path}"
    _check_path(path, text)
    if len(f"{host}/{path}") > _MAX_NAME:
        raise UsageError(f"image {text!r}: longer than {_MAX_NAME} characters")
    return Reference(
        host, path, tag or (None if digest else "latest"), digest or None
    )  # fmt: skip


def same_registry(one: str, other: str) -> bool:
    """Return whether two hosts are the same registry; Docker Hub has several names."""
    return _canonical_host(one) == _canonical_host(other)


def api_host(registry: str) -> str:
    """Return the host of a registry's API."""
    return "registry-1.docker.io" if registry == DOCKER_HUB else registry


def _is_host(part: str) -> bool:
    """Return whether the first of several parts is a host, by Docker's rule."""
    return "." in part or ":" in part or part == "localhost"


def _canonical_host(host: str) -> str:
    host = host.lower()
    return DOCKER_HUB if host in DOCKER_HUB_NAMES else host


def _check_path(path: str, text: str) -> None:
    for part in path.split("/"):
        if _PART.fullmatch(part):
            continue
        if part and _PART.fullmatch(part.lower()):
            raise UsageError(f"image {text!r}: {part!r} has upper case", "a repository is in lower case")
        raise UsageError(f"image {text!r}: {part!r} is no part of a name", _EXAMPLE)
    if re.fullmatch(r"library/[0-9a-f]{64}", path):
        raise UsageError(f"image {text!r}: an id of an image here, not a name", _EXAMPLE)
