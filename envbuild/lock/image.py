"""Image lock: the base of a target's container images, pinned by digests.

The file is `<target>.image.toml` beside the recipe. It holds Debian packages (name, version, sha256, path in the
archive's pool) or the digest of an existing image, and neither mirrors nor credentials.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envbuild.debian.lock import DebianLock, from_table
from envbuild.errors import LockError
from envbuild.fingerprint import json_digest
from envbuild.image.model import is_digest
from envbuild.lock.lifecycle import package_changes, read_lock_file
from envbuild.toml import parse_toml, toml_pairs

FORMAT = 1


@dataclass(frozen=True, slots=True)
class OciLock:
    """Existing image: `reference` as in the recipe, `digest` of its manifest for this target."""

    reference: str
    digest: str


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


def parse_image(text: str, source: str) -> ImageLock:
    """Parse a lock's text; `source` names the file in messages. Raises LockError."""
    try:
        data = parse_toml(text)
    except ValueError as error:
        raise _faulty(source, str(error)) from None
    if type(data.get("format")) is not int:
        raise _faulty(source, "`format` is not a number")
    if data["format"] != FORMAT:
        raise LockError(
            f"{source}: format {data['format']}; this envbuild reads {FORMAT}",
            "use the envbuild version that wrote it, or delete it and run `envbuild lock` again",
        )
    if unknown := data.keys() - {"format", "recipe", "target", "recipe-digest", "debian", "oci"}:
        raise _faulty(source, f"unknown key {sorted(unknown)[0]!r}")
    recipe, target, digest = (_string(data, key, source) for key in ("recipe", "target", "recipe-digest"))
    return ImageLock(recipe, target, digest, _base(data, source))


def _base(data: Mapping[str, Any], source: str) -> DebianLock | OciLock:
    kinds = sorted(data.keys() & {"debian", "oci"})
    if len(kinds) != 1:
        raise _faulty(source, "it wants one table, [debian] or [oci]")
    table = data[kinds[0]]
    if not isinstance(table, dict):
        raise _faulty(source, f"`{kinds[0]}` is not a table")
    if kinds == ["debian"]:
        return from_table(table, source)
    if unknown := table.keys() - {"reference", "digest"}:
        raise _faulty(source, f"unknown key {sorted(unknown)[0]!r} in [oci]")
    digest = _string(table, "digest", source)
    if not is_digest(digest):
        raise _faulty(source, f"{digest!r} is not a sha256 digest")
    return OciLock(_string(table, "reference", source), digest)


def _string(table: Mapping[str, Any], key: str, source: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise _faulty(source, f"`{key}` is missing" if value is None else f"`{key}` is {value!r}")
    return value


def _faulty(source: str, what: str) -> LockError:
    return LockError(f"{source}: not an image lock: {what}", "delete it and run `envbuild lock` again")


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
        lambda one, other: "" if (one.arch, one.sha256) == (other.arch, other.sha256) else ": another file",
    )


def _kind(base: DebianLock | OciLock | None) -> str:
    if isinstance(base, OciLock):
        return base.reference
    return f"debian:{base.suite}" if base else "nothing"
