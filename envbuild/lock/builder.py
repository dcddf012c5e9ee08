"""Lock of the builder image, in which the source layers of a target's images are built.

The file is `<target>.build.toml` beside the image lock, in the same format. It holds Debian packages (those of the
image, and compilers) or the digest of `build_base`, an existing image with compilers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

from envbuild.errors import UsageError
from envbuild.lock.base import base_lock
from envbuild.lock.image import ImageLock
from envbuild.lock.lifecycle import LockKind
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.sources import SourceLayer
from envbuild.recipe.targets import Target

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


def builder_lock(recipe: LoadedRecipe, target: Target, sources: Sequence[SourceLayer]) -> LockKind[ImageLock]:
    """Return the kind of lock that holds the image in which `sources` are built.

    Raises UsageError as `check_build_base`.
    """
    check_build_base(recipe, sources)
    image = recipe.recipe.image
    packages = dict.fromkeys((*image.packages, *build_packages(recipe, sources)))
    own = dataclasses.replace(recipe.recipe, image=dataclasses.replace(image, packages=tuple(packages)))
    return base_lock(
        recipe, target, own, "debian" if image.base == "debian" else image.build_base,
        build_lock_name(target.name), build_digest(recipe, target, sources),
        name="builder", title="lock of the builder", subject="what the layers need to be built",
    )  # fmt: skip


def build_digest(recipe: LoadedRecipe, target: Target, sources: Sequence[SourceLayer]) -> str:
    """Return `sha256:…` over all inputs of the builder image's lock."""
    image = recipe.recipe.image
    what: list[object] = ["builder", recipe.image_digest(target)]
    what.append(build_packages(recipe, sources) if image.base == "debian" else image.build_base)
    return "sha256:" + hashlib.sha256(json.dumps(what).encode()).hexdigest()
