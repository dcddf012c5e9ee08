"""Names of images to convert, in the syntax of enroot, Apptainer and skopeo.

Sources: enroot's doc/cmd/import.md (`docker://[USER@][REGISTRY#]IMAGE[:TAG]`, `dockerd://IMAGE[:TAG]`), and
containers-transports(5) (`oci:`, `docker-archive:`, `docker-daemon:`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from envbuild.errors import UsageError
from envbuild.image.reference import parse_reference

_HINT = "docker://[USER@][REGISTRY#]IMAGE[:TAG], dockerd://IMAGE[:TAG], docker-archive:FILE or oci:DIR[:TAG]"
_USER = re.compile(r"[^@/#:\s]+(?=@)")


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

    def provenance(self, image_id: str) -> str:
        """Return the provenance that a converted image records.

        It is the full name of an image in a registry, else the image's ID. A local path or name is not recorded: it is
        specific to this host and has several spellings.
        """
        if self.form == "docker":
            return f"docker://{parse_reference(self.rest)}"
        return f"image {image_id}"

    @property
    def url(self) -> str:
        """The image's URL for messages, without the user."""
        return f"docker://{self.rest}" if self.form == "docker" else self.name

    @property
    def place(self) -> tuple[Path, str | None]:
        """The folder of a layout and the tag of the image in it; both may contain colons."""
        return folder_and_tag(self.rest)

    @property
    def words(self) -> tuple[str, ...]:
        """The parts of an output file's name: the image's path and tag, or the stem of the archive's file name."""
        if self.form in ("docker", "docker-daemon"):
            reference = parse_reference(self.rest)
            path = reference.repository.removeprefix("library/")
            return (*path.split("/"), reference.tag or "latest")
        path = str(self.place[0]) if self.form == "oci" else self.rest
        stem = re.sub(r"(\.tar)?(\.[a-z0-9]+)?$", "", os.path.basename(path.rstrip("/")))
        return (stem or "image",)


def parse_source(text: str) -> ImageSource:
    """Parse the name of an image to convert. Raises UsageError with a hint about the syntax."""
    scheme, slashes, rest = text.partition("://")
    if not slashes:
        form, colon, path = text.partition(":")
        if colon and form in ("oci", "docker-archive", "docker-daemon"):
            return _of_form(form, path, text)
        if os.path.isdir(text):
            return ImageSource("oci", text)
        if os.path.isfile(text):
            return ImageSource("docker-archive", text)
        scheme, rest = "docker", text
    if scheme == "docker":
        return _of_registry(rest, text)
    if scheme == "dockerd":
        return _of_form("docker-daemon", rest, text)
    if scheme in ("oci", "docker-archive", "docker-daemon"):
        return _of_form(scheme, rest, text)
    if scheme == "podman":
        raise UsageError(
            f"--from {text!r}: podman's store is not read",
            "podman save --format docker-archive -o image.tar IMAGE, then --from docker-archive:image.tar",
        )
    raise UsageError(f"--from {text!r}: unknown kind of source {scheme!r}", f"write {_HINT}")


def _of_form(form: str, rest: str, text: str) -> ImageSource:
    if not rest:
        raise UsageError(f"--from {text!r}: nothing follows {form}:", f"write {_HINT}")
    if form == "docker-daemon":
        parse_reference(rest)
    elif not (folder_and_tag(rest)[0] if form == "oci" else Path(rest)).exists():
        raise UsageError(f"--from {text!r}: {rest} does not exist", f"write {_HINT}")
    return ImageSource(form, rest)


def folder_and_tag(text: str) -> tuple[Path, str | None]:
    """Split `text` into a path and a tag, which both may contain colons.

    The path is the longest one that exists.
    """
    parts = text.split(":")
    for count in range(len(parts), 0, -1):
        path = Path(":".join(parts[:count]))
        if path.exists():
            return path, ":".join(parts[count:]) or None
    return Path(text), None


def _of_registry(rest: str, text: str) -> ImageSource:
    user = ""
    match = _USER.match(rest)
    # A digest also follows an @; a name with a colon or a slash before the @ has no user.
    if match and not rest.partition("@")[2].startswith("sha256:"):
        user, rest = match[0], rest[match.end() + 1 :]
    registry, hash_, image = rest.partition("#")
    if hash_:
        rest = f"{registry}/{image}" if registry else image
        if registry and "." not in registry and ":" not in registry and registry != "localhost":
            raise UsageError(f"--from {text!r}: {registry!r} before # is no registry's host", f"write {_HINT}")
    try:
        parse_reference(rest)
    except UsageError as error:
        raise UsageError(f"--from {error.message}", f"write {_HINT}") from None
    return ImageSource("docker", rest, user)
