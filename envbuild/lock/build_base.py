"""Lock of the builder image, in which the source layers of a target's images are built.

The file is `<target>.build.toml` beside the image lock, in the same format. It holds Debian packages (those of the
image, and compilers) or the digest of `build_base`, an existing image with compilers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence

from envbuild.environment import Environment
from envbuild.errors import UsageError
from envbuild.lock.image import ImageLock, read_image
from envbuild.lock.image_manage import current_lock, put_image_lock, resolve_base
from envbuild.lock.state import LockState, inspect_lock_file, lock_folders
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.sources import SourceLayer
from envbuild.recipe.targets import Target

Log = Callable[[str], None]
# Packages that nearly every build needs in addition to those of the image.
COMPILERS = ("bzip2", "file", "g++", "gcc", "libc6-dev", "make", "patch", "pkgconf", "xz-utils")


def build_lock_name(target: str) -> str:
    """Return the name of the builder image's lock file for `target`, in the recipe's folder."""
    return f"{target}.build.toml"


def build_packages(recipe: LoadedRecipe, sources: Sequence[SourceLayer]) -> tuple[str, ...]:
    """Return the Debian packages that the builder image of `sources` adds to the image's base."""
    own = {package for layer in sources for package in layer.packages}
    return tuple(sorted({*COMPILERS, *own, *recipe.recipe.image.build_packages}))


def check_build_base(recipe: LoadedRecipe, sources: Sequence[SourceLayer]) -> None:
    """Raise UsageError when no image is configured in which `sources` can be built."""
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
    """Read the builder image's lock without changing anything. Raises LockError when it is not readable."""
    return inspect_lock_file(
        recipe, target, build_lock_name(target.name), read_image, build_digest(recipe, target, sources),
        part="image", what="lock of the builder", subject="what the layers need to be built",
    )  # fmt: skip


def ensure_build_lock(
    recipe: LoadedRecipe,
    target: Target,
    sources: Sequence[SourceLayer],
    environment: Environment,
    *,
    locked: bool,
    offline: bool,
    log: Log,
    write: bool = True,
) -> ImageLock:
    """Return the current lock of the image in which `sources` are built; resolve a missing or stale one.

    Each resolution is reported through `log`. Without `write` no file is written. Raises LockError when `locked`
    and the lock is missing or stale, or when it cannot be resolved; UsageError as `check_build_base`.
    """
    check_build_base(recipe, sources)
    state = inspect_build_lock(recipe, target, sources)
    current = current_lock(state, recipe, target, locked=locked, offline=offline)
    if current is not None:
        return current
    log(f"{state.path}: {state.fault}; resolving the builder of {target.name} …")
    return update_build_lock(recipe, target, sources, environment, log=log, write=write)


def update_build_lock(
    recipe: LoadedRecipe,
    target: Target,
    sources: Sequence[SourceLayer],
    environment: Environment,
    *,
    log: Log,
    write: bool = True,
) -> ImageLock:
    """Resolve the builder image again and write its lock. Each change is reported through `log`, one line each."""
    check_build_base(recipe, sources)
    old = inspect_build_lock(recipe, target, sources).lock
    image, digest = recipe.recipe.image, build_digest(recipe, target, sources)
    packages = dict.fromkeys((*image.packages, *build_packages(recipe, sources)))
    own = dataclasses.replace(
        recipe.recipe, image=dataclasses.replace(image, packages=tuple(packages))
    )
    reference = "debian" if image.base == "debian" else image.build_base
    base, what = resolve_base(own, reference, recipe.folder, target, environment)
    new = ImageLock(recipe.recipe.name, target.name, digest, base)
    path = lock_folders(recipe, target)[-1] / build_lock_name(target.name)
    put_image_lock(path, old, new, what, log=log, write=write)
    return new


def build_digest(recipe: LoadedRecipe, target: Target, sources: Sequence[SourceLayer]) -> str:
    """Return `sha256:…` over all inputs of the builder image's lock."""
    image = recipe.recipe.image
    what: list[object] = ["builder", recipe.image_digest(target)]
    what.append(build_packages(recipe, sources) if image.base == "debian" else image.build_base)
    return "sha256:" + hashlib.sha256(json.dumps(what).encode()).hexdigest()
