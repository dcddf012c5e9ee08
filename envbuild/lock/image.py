"""The image lock: what a target's container images are built on, by exact digests.

`<target>.image.toml` beside the recipe: Debian packages (name, version, sha256, path in the archive's pool)
or the digest of an existing image. It holds no mirror and no credential.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.debian.lock import DebianLock, from_table
from envbuild.errors import LockError
from envbuild.image.model import is_digest

FORMAT = 1


@dataclass(frozen=True, slots=True)
class OciLock:
    """An existing image: `reference` as the recipe has it, `digest` of its manifest for this target."""

    reference: str
    digest: str


@dataclass(frozen=True, slots=True)
class ImageLock:
    """The base of one target's images. `recipe_digest` covers all of the recipe that decides it."""

    recipe: str
    target: str
    recipe_digest: str
    base: DebianLock | OciLock

    @property
    def digest(self) -> str:
        """sha256 of what the base is, independent of layout and of where it comes from."""
        if isinstance(self.base, OciLock):
            content: list[Any] = ["oci", self.base.digest]
        else:
            content = ["debian", [[p.name, p.version, p.sha256] for p in self.base.packages]]
        return "sha256:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()


def image_lock_name(target: str) -> str:
    """The file that holds the image lock of `target`, beside the recipe."""
    return f"{target}.image.toml"


def render_image(lock: ImageLock) -> str:
    """The text of the lock; `parse_image` gives back an equal one."""
    lines = [
        f"# envbuild image lock; made by: envbuild lock {lock.recipe} --target {lock.target}",
        f"format = {FORMAT}",
        f"recipe = {_text(lock.recipe)}",
        f"target = {_text(lock.target)}",
        f"recipe-digest = {_text(lock.recipe_digest)}",
        "",
    ]
    if isinstance(lock.base, OciLock):
        lines += ["[oci]", f"reference = {_text(lock.base.reference)}"]
        lines += [f"digest = {_text(lock.base.digest)}"]
        return "\n".join(lines) + "\n"
    table = lock.base.as_toml_table()
    packages = table.pop("package")
    lines += ["[debian]", *(f"{key} = {_value(value)}" for key, value in table.items())]
    lines.append("package = [")
    for package in packages:  # a line each: an update is read as a list of packages
        fields = ", ".join(f"{key} = {_value(value)}" for key, value in package.items())
        lines.append(f"  {{ {fields} }},")
    lines.append("]")
    return "\n".join(lines) + "\n"


def parse_image(text: str, source: str) -> ImageLock:
    """Read a lock's text; `source` names it in messages. Raises LockError."""
    try:
        data = tomllib.loads(text)
        if data["format"] != FORMAT:
            raise LockError(f"{source}: format {data['format']}; this envbuild reads {FORMAT}")
        if "debian" in data:
            base: DebianLock | OciLock = from_table(data["debian"], source)
        else:
            base = OciLock(str(data["oci"]["reference"]), str(data["oci"]["digest"]))
            if not is_digest(base.digest):
                raise LockError(f"{source}: {base.digest!r} is not a sha256 digest")
        recipe, target, digest = (str(data[key]) for key in ("recipe", "target", "recipe-digest"))
        return ImageLock(recipe, target, digest, base)
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise LockError(
            f"{source}: not an image lock: {what}", "delete it and run `envbuild lock` again"
        ) from None


def read_image(path: Path) -> ImageLock | None:
    """The lock in `path`, None when there is no such file. Raises LockError when it cannot be read."""
    try:
        return parse_image(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"{path}: cannot be read: {error}") from error


def image_changes(old: ImageLock | None, new: ImageLock) -> list[str]:
    """What an update changed, one line each, in the order of names."""
    if isinstance(new.base, OciLock):
        was = old.base.digest if old and isinstance(old.base, OciLock) else "nothing"
        return (
            [] if was == new.base.digest else [f"~ {new.base.reference} {was} -> {new.base.digest}"]
        )
    before = (
        {p.name: p.version for p in old.base.packages}
        if old and isinstance(old.base, DebianLock)
        else {}
    )
    after = {p.name: p.version for p in new.base.packages}
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in before:
            lines.append(f"+ {name} {after[name]}")
        elif name not in after:
            lines.append(f"- {name} {before[name]}")
        elif before[name] != after[name]:
            lines.append(f"~ {name} {before[name]} -> {after[name]}")
    return lines


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _value(value: object) -> str:
    return str(value) if isinstance(value, int) else json.dumps(value, ensure_ascii=False)
