"""The lock of the base of a target's images."""

from __future__ import annotations

from pathlib import Path

from envbuild.debian.lock import DebianLock
from envbuild.environment import Environment
from envbuild.lock.base_debian import resolve_debian
from envbuild.lock.base_oci import resolve_digest
from envbuild.lock.image import ImageLock, OciLock, image_changes, image_lock_name, read_image, render_image
from envbuild.lock.lifecycle import LockKind, Resolved, Upgrade
from envbuild.lock.state import write_lock_file
from envbuild.progress import Log
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.model import Recipe
from envbuild.recipe.targets import Target


def image_lock(recipe: LoadedRecipe, target: Target) -> LockKind[ImageLock]:
    """Return the kind of lock that holds the base of the target's images."""
    return base_lock(
        recipe, target, recipe.recipe, recipe.recipe.image.base, image_lock_name(target.name),
        recipe.image_digest(target), name="image", title="image lock", subject="the recipe's base",
    )  # fmt: skip


def base_lock(
    loaded: LoadedRecipe,
    target: Target,
    recipe: Recipe,
    reference: str,
    file: str,
    digest: str,
    *,
    name: str,
    title: str,
    subject: str,
) -> LockKind[ImageLock]:
    """Return the kind of lock that holds the base `reference`; the other arguments are those of LockKind.

    `reference` is "debian", for the Debian packages of `recipe`, or names an existing image; paths are relative to
    the folder of `loaded`.
    """

    def resolved(
        environment: Environment, _old: ImageLock | None, _upgrade: Upgrade, _offline: bool, _: Log
    ) -> Resolved[ImageLock]:
        base: DebianLock | OciLock
        if reference == "debian":
            base = resolve_debian(recipe, target, environment)
            summary = f"{len(base.packages)} Debian packages of {base.suite}"
        else:
            base = OciLock(reference, resolve_digest(reference, target, environment, loaded.folder))
            summary = f"{reference} is {base.digest}"
        return Resolved(ImageLock(recipe.name, target.name, digest, base), summary)

    def write(path: Path, lock: ImageLock) -> None:
        write_lock_file(path, render_image(lock))

    what = "base" if name == "image" else name
    return LockKind(
        loaded, target, part="image", name=name, title=title, subject=subject,
        task=f"resolving the {what} of {target.name}", file=file, digest=digest, read=read_image,
        resolve=resolved, changes=image_changes, write=write, resolves_offline=False,
        reports_first=False,
    )  # fmt: skip
