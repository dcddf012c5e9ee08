"""The builder's lock: in which image the source-built layers of a target's images are built.

`<target>.build.toml` beside the image lock and in its format: Debian packages, those of the image and compilers, or
the digest of `build_base`, an existing image with compilers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence

from envbuild.environment import Environment
from envbuild.errors import LockError, UsageError
from envbuild.lock.base_debian import resolve_debian
from envbuild.lock.base_oci import resolve_digest
from envbuild.lock.image import ImageLock, OciLock, image_changes, read_image, render_image
from envbuild.lock.state import (
    LockState,
    how_to_make,
    inspect_lock_file,
    lock_folders,
    write_lock_file,
)
from envbuild.plan.sources import SourceLayer
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target

Say = Callable[[str], None]
# What nearly every build runs besides the programs that an image has itself.
COMPILERS = ("bzip2", "file", "g++", "gcc", "libc6-dev", "make", "patch", "pkgconf", "xz-utils")


def build_lock_name(target: str) -> str:
    """The file that holds the builder's lock of `target`, beside the recipe."""
    return f"{target}.build.toml"


def build_packages(recipe: LoadedRecipe, sources: Sequence[SourceLayer]) -> tuple[str, ...]:
    """The Debian packages that a builder of `sources` has besides those of the image's base."""
    own = {package for layer in sources for package in layer.packages}
    return tuple(sorted({*COMPILERS, *own, *recipe.recipe.image.build_packages}))


def check_build_base(recipe: LoadedRecipe, sources: Sequence[SourceLayer]) -> None:
    """Raise UsageError where there is no image in which `sources` could be built."""
    image = recipe.recipe.image
    if sources and image.base != "debian" and not image.build_base:
        names = ", ".join(layer.name for layer in sources)
        raise UsageError(
            f"{recipe.where('image')}: [image] builds on {image.base}, which need not have compilers: "
            f"nothing says in which image to build {names}",
            "name an image of the same distribution with compilers as `build_base` in [image]",
        )


def inspect_build_lock(
    recipe: LoadedRecipe, target: Target, sources: Sequence[SourceLayer]
) -> LockState[ImageLock]:
    """Read the builder's lock without changing anything. Raises LockError when it is not readable."""
    return inspect_lock_file(
        recipe, target, build_lock_name(target.name), read_image, build_digest(recipe, target, sources),
        what="lock of the builder", subject="what the layers need to be built",
    )  # fmt: skip


def ensure_build_lock(
    recipe: LoadedRecipe,
    target: Target,
    sources: Sequence[SourceLayer],
    environment: Environment,
    *,
    locked: bool,
    offline: bool,
    say: Say,
) -> ImageLock:
    """The current lock of the image in which `sources` are built; a missing or stale one is made, and said, unless
    `locked`.

    Raises LockError when `locked` and there is none, or when it cannot be made; UsageError as `check_build_base`.
    """
    check_build_base(recipe, sources)
    state = inspect_build_lock(recipe, target, sources)
    if state.fault is None and state.lock is not None:
        return state.lock
    if locked or offline:
        why = "" if locked else " and --offline forbids to resolve it"
        raise LockError(f"{state.path}: {state.fault}{why}", how_to_make(recipe, target))
    say(f"{state.path}: {state.fault}; resolving the builder of {target.name} …")
    return update_build_lock(recipe, target, sources, environment, say=say)


def update_build_lock(
    recipe: LoadedRecipe,
    target: Target,
    sources: Sequence[SourceLayer],
    environment: Environment,
    *,
    say: Say,
    write: bool = True,
) -> ImageLock:
    """Resolve the builder anew and write its lock; what changed is said line by line."""
    check_build_base(recipe, sources)
    old = inspect_build_lock(recipe, target, sources).lock
    image, digest = recipe.recipe.image, build_digest(recipe, target, sources)
    if image.base == "debian":
        packages = (*image.packages, *build_packages(recipe, sources))
        own = dataclasses.replace(image, packages=tuple(dict.fromkeys(packages)))
        base = resolve_debian(dataclasses.replace(recipe.recipe, image=own), target, environment)
        new = ImageLock(recipe.recipe.name, target.name, digest, base)
        what = f"{len(base.packages)} Debian packages of {base.suite}"
    else:
        found = resolve_digest(image.build_base, target, environment, recipe.folder)
        new = ImageLock(recipe.recipe.name, target.name, digest, OciLock(image.build_base, found))
        what = f"{image.build_base} is {found}"
    path = lock_folders(recipe, target)[-1] / build_lock_name(target.name)
    differences = image_changes(old, new)
    for line in differences if old else ():
        say(f"  {line}")
    if not write:
        say(f"{path}: not written (dry run), {len(differences)} would change")
        return new
    write_lock_file(path, render_image(new))
    say(f"{path}: {what}, {len(differences)} changed")
    return new


def build_digest(recipe: LoadedRecipe, target: Target, sources: Sequence[SourceLayer]) -> str:
    """`sha256:…` over what decides the builder's lock."""
    image = recipe.recipe.image
    what: list[object] = ["builder", recipe.image_digest(target)]
    what.append(build_packages(recipe, sources) if image.base == "debian" else image.build_base)
    return "sha256:" + hashlib.sha256(json.dumps(what).encode()).hexdigest()
