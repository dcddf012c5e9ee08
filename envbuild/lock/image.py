"""Image lock: the base of a target's container images, pinned by digests.

The file is `<target>.image.toml` beside the recipe. It holds Debian packages (name, version, sha256, path in the
archive's pool) or the digest of an existing image, and neither mirrors nor credentials.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envbuild.base.errors import LockError
from envbuild.base.packages import json_digest
from envbuild.base.toml import Document, decode, form, key, parse_toml, required, toml_pairs
from envbuild.debian.lock import DebianLock, checked
from envbuild.lock.lifecycle import package_changes, read_lock_file

FORMAT = 1
_HINT = "delete it and run `envbuild lock` again"
_digest_problem = form(r"sha256:[0-9a-f]{64}", "is not a sha256 digest")


@dataclass(frozen=True, slots=True)
class OciLock:
    """Existing image."""

    reference: str = required("As in the recipe.", pattern=r"[\s\S]+")
    digest: str = required("That of its manifest for this target.", check=_digest_problem)


@dataclass(frozen=True, slots=True)
class ImageLock:
    """Base of one target's images. `recipe_digest` covers every part of the recipe that affects it."""

    recipe: str
    target: str
    recipe_digest: str
    base: DebianLock | OciLock

    @property
    def digest(self) -> str:
        """sha256 of the base's contents, independent of the file's layout and of their source."""
        if isinstance(self.base, OciLock):
            content: list[Any] = ["oci", self.base.digest]
        else:
            content = ["debian", [[p.name, p.version, p.sha256] for p in self.base.packages]]
        return json_digest(content)

    @property
    def step(self) -> tuple[str, str, str]:
        """Name, version and digest of the base as a step of a plan."""
        if isinstance(self.base, OciLock):
            return self.base.reference, self.base.digest.removeprefix("sha256:")[:12], self.base.digest
        return f"debian {self.base.suite}", f"{len(self.base.packages)} packages", self.digest


def image_lock_name(target: str) -> str:
    """Return the name of the image lock file of `target`, in the recipe's folder."""
    return f"{target}.image.toml"


def render_image(lock: ImageLock) -> str:
    """Return the text of the lock; `parse_image` returns an equal lock."""
    head = {"format": FORMAT, "recipe": lock.recipe, "target": lock.target, "recipe-digest": lock.recipe_digest}
    title = f"# envbuild image lock; made by: envbuild lock {lock.recipe} --target {lock.target}"
    lines = [title, *toml_pairs(head), ""]
    if isinstance(lock.base, OciLock):
        lines += ["[oci]", *toml_pairs(asdict(lock.base))]
    else:
        table = lock.base.as_toml_table()
        packages = table.pop("package")
        # One line for each package, so that a diff lists the changed ones.
        rows = [f"  {{ {', '.join(toml_pairs(package))} }}," for package in packages]
        lines += ["[debian]", *toml_pairs(table), "package = [", *rows, "]"]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class _LockFile:
    """The contents of the file."""

    format: int = required("The version of the format.")
    recipe: str = required("The recipe's name.", pattern=".+")
    target: str = required("The target.", pattern=".+")
    recipe_digest: str = required("That of all that affects the base in the recipe.", name="recipe-digest")
    debian: DebianLock | None = key(None, "Debian packages.")
    oci: OciLock | None = key(None, "An existing image.")


def parse_image(text: str, source: str) -> ImageLock:
    """Parse a lock's text; `source` names the file in messages. Raises LockError."""
    try:
        data = parse_toml(text)
    except ValueError as error:
        raise LockError(f"{source}: not an image lock: {error}", _HINT) from None
    format_number = data.get("format")
    if type(format_number) is int and format_number != FORMAT:
        raise LockError(
            f"{source}: format {format_number}; this envbuild reads {FORMAT}",
            f"use the envbuild version that wrote it, or {_HINT}",
        )
    try:
        file = decode(Document(Path(source), text, data), _LockFile, error=LockError)
        base = checked(file.debian, source) if file.debian else file.oci
        if base is None or (file.debian and file.oci):
            raise LockError(f"{source}: it needs exactly one table, [debian] or [oci]")
    except LockError as error:
        raise LockError(error.message, _HINT) from None
    return ImageLock(file.recipe, file.target, file.recipe_digest, base)


def read_image(path: Path) -> ImageLock | None:
    """Return the lock in `path`, or None when the file does not exist. Raises LockError when it is not readable."""
    return read_lock_file(path, parse_image)


def image_changes(old: ImageLock | None, new: ImageLock) -> list[str]:
    """Return the changes of an update, one line each, sorted by name."""
    was, now = old.base if old else None, new.base
    if isinstance(now, OciLock):
        before = _kind(was)
        if isinstance(was, OciLock):
            before = was.digest if was.reference == now.reference else f"{was.reference} {was.digest}"
        return [] if was == now else [f"~ {now.reference} {before} -> {now.digest}"]
    moved = [f"~ base {_kind(was)} -> {_kind(now)}"] if was is not None and _kind(was) != _kind(now) else []
    return moved + package_changes(
        {p.name: p for p in was.packages} if isinstance(was, DebianLock) else {},
        {p.name: p for p in now.packages},
        lambda p: p.version,
        lambda before, other: "" if (before.arch, before.sha256) == (other.arch, other.sha256) else ": another file",
    )


def _kind(base: DebianLock | OciLock | None) -> str:
    if isinstance(base, OciLock):
        return base.reference
    return f"debian:{base.suite}" if base else "nothing"
