"""Names of images: in registries, and of images to convert, in the syntax of enroot, Apptainer and skopeo.

Sources: the grammar in github.com/distribution/reference, and Docker's rules for a short name: no host means docker.io,
a single part on docker.io is in `library`, no tag means `latest`. enroot's doc/cmd/import.md
(`docker://[USER@][REGISTRY#]IMAGE[:TAG]`, `dockerd://IMAGE[:TAG]`), and containers-transports(5) (`oci:`,
`docker-archive:`, `docker-daemon:`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from envbuild.base.errors import UsageError
from envbuild.base.packages import is_digest

DOCKER_HUB = "docker.io"
# All names of Docker Hub; credentials may be stored under any of them.
DOCKER_HUB_NAMES = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io")
_MAX_NAME = 255
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?")
_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_USER = re.compile(r"[^@/#:\s]+(?=@)")
_LOCAL = ("oci", "docker-archive", "docker-daemon")
_EXAMPLE = "write it as ubuntu:24.04, pytorch/pytorch:2.7, host:5000/name:tag or host/name@sha256:…"
_SOURCE_HINT = (
    "write docker://[USER@][REGISTRY#]IMAGE[:TAG], dockerd://IMAGE[:TAG], docker-archive:FILE or oci:DIR[:TAG]"
)


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
    def names(self) -> tuple[str, ...]:
        """The names that others may bind to something, the narrowest first: with the tag, and the repository's."""
        return (f"{self.name}:{self.tag}", self.name) if self.tag else (self.name,)

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
        raise UsageError(f"image {text!r}: give a name, not a URL", _EXAMPLE)
    rest, at, digest = rest.partition("@")
    if at and not is_digest(digest):
        raise UsageError(f"image {text!r}: {digest!r} is not a digest", "sha256: and 64 digits 0-9a-f")
    host, slash, path = rest.partition("/")
    if not slash or not is_host(host):
        host, path = DOCKER_HUB, rest
    path, colon, tag = path.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise UsageError(
            f"image {text!r}: {tag!r} is not a tag", "a tag is up to 128 letters, digits, dots, dashes and underscores"
        )
    if not _HOST.fullmatch(host):
        raise UsageError(f"image {text!r}: {host!r} is not a host", _EXAMPLE)
    host = _canonical_host(host)
    if host == DOCKER_HUB and "/" not in path:
        path = f"library/{path}"
    _check_path(path, text)
    if len(f"{host}/{path}") > _MAX_NAME:
        raise UsageError(f"image {text!r}: longer than {_MAX_NAME} characters")
    return Reference(host, path, tag or (None if digest else "latest"), digest or None)


def same_registry(first: str, second: str) -> bool:
    """Return whether two hosts are the same registry; Docker Hub has several names."""
    return _canonical_host(first) == _canonical_host(second)


def api_host(registry: str) -> str:
    """Return the host of a registry's API."""
    return "registry-1.docker.io" if registry == DOCKER_HUB else registry


def is_host(part: str) -> bool:
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
        raise UsageError(f"image {text!r}: {part!r} is not a valid part of a name", _EXAMPLE)
    if re.fullmatch(r"library/[0-9a-f]{64}", path):
        raise UsageError(f"image {text!r}: this is an image ID, not a name", _EXAMPLE)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image to convert.

    `form` is docker (an image in a registry), docker-daemon, docker-archive or oci; `rest` is the text after it. `user`
    selects the user whose credentials are sent, "" for any.
    """

    form: str
    rest: str
    user: str = ""

    @property
    def name(self) -> str:
        """The name in the form of a recipe's base: without a prefix for an image in a registry."""
        return self.rest if self.form == "docker" else f"{self.form}:{self.rest}"

    @property
    def url(self) -> str:
        """The image's URL for messages, without the user."""
        return f"docker://{self.rest}" if self.form == "docker" else self.name

    def provenance(self, image_id: str) -> str:
        """Return what a converted image records of its source: its full name in a registry, else its ID.

        A local path or name is not recorded: it is specific to this host and has several spellings.
        """
        if self.form == "docker":
            return f"docker://{parse_reference(self.rest)}"
        return f"image {image_id}"

    @property
    def words(self) -> tuple[str, ...]:
        """The parts of an output file's name: the image's path and tag, or the stem of the archive's file name."""
        if self.form in ("docker", "docker-daemon"):
            reference = parse_reference(self.rest)
            path = reference.repository.removeprefix("library/")
            return (*path.split("/"), reference.tag or "latest")
        path = str(folder_and_tag(self.rest)[0]) if self.form == "oci" else self.rest
        stem = re.sub(r"(\.tar)?(\.[a-z0-9]+)?$", "", os.path.basename(path.rstrip("/")))
        return (stem or "image",)


def parse_source(text: str) -> ImageSource:
    """Parse the name of an image to convert. Raises UsageError with a hint about the syntax."""
    scheme, slashes, rest = text.partition("://")
    if not slashes:
        scheme, colon, rest = text.partition(":")
        if not colon or scheme not in _LOCAL:
            if os.path.isdir(text):
                return ImageSource("oci", text)
            if os.path.isfile(text):
                return ImageSource("docker-archive", text)
            scheme, rest = "docker", text
    if scheme == "docker":
        return _of_registry(rest, text)
    form = "docker-daemon" if scheme == "dockerd" else scheme
    if form == "podman":
        raise UsageError(
            f"--from {text!r}: envbuild does not read podman's store",
            "podman save --format docker-archive -o image.tar IMAGE, then --from docker-archive:image.tar",
        )
    if form not in _LOCAL:
        raise UsageError(f"--from {text!r}: unknown kind of source {scheme!r}", _SOURCE_HINT)
    if not rest:
        raise UsageError(f"--from {text!r}: nothing follows {form}:", _SOURCE_HINT)
    if form == "docker-daemon":
        parse_reference(rest)
    elif not (folder_and_tag(rest)[0] if form == "oci" else Path(rest)).exists():
        raise UsageError(f"--from {text!r}: {rest} does not exist", _SOURCE_HINT)
    return ImageSource(form, rest)


def folder_and_tag(text: str) -> tuple[Path, str | None]:
    """Split `text` into the longest path that exists and a tag; both may contain colons."""
    parts = text.split(":")
    for count in range(len(parts), 0, -1):
        path = Path(":".join(parts[:count]))
        if path.exists():
            return path, ":".join(parts[count:]) or None
    return Path(text), None


def _of_registry(rest: str, text: str) -> ImageSource:
    user = ""
    # A digest also follows an @; a name with a colon or a slash before the @ has no user.
    if (match := _USER.match(rest)) and not rest.partition("@")[2].startswith("sha256:"):
        user, rest = match[0], rest[match.end() + 1 :]
    registry, hash_, image = rest.partition("#")
    if hash_:
        rest = f"{registry}/{image}" if registry else image
        if registry and not is_host(registry):
            raise UsageError(f"--from {text!r}: {registry!r} before # is no registry's host", _SOURCE_HINT)
    try:
        parse_reference(rest)
    except UsageError as error:
        raise UsageError(f"--from {error.message}", _SOURCE_HINT) from None
    return ImageSource("docker", rest, user)
