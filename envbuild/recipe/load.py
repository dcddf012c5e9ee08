"""Loaded recipes: decode a recipe file, select one of its targets, and compute its fingerprints."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from envbuild.base.errors import RecipeError, UsageError
from envbuild.base.files import read_small
from envbuild.base.text import normalise
from envbuild.base.toml import Document, Problem, decode, nearest, read
from envbuild.contract.verification import VerifySettings
from envbuild.recipe import model
from envbuild.recipe.checks import references, requirement_parts
from envbuild.recipe.model import BuildTable, SlimTable, layer_kind, requirement_entries
from envbuild.recipe.project import OwnCode, declared_code, declared_requirements
from envbuild.recipe.targets import Target, host_arch, target_problem

# Keys of a recipe that count in its digest only if it has them.
_NEW = ("overrides", "exclude_newer", "exclude_newer_index", "indexes", "project", "build")
# Keys of [verify] that always count in it; a later one does only with a value of its own.
_VERIFY = ["nodes", "nproc_per_node", "epochs", "batch_size", "model", "timeout_s", "loss_tolerance", "busbw_floor"]
# A script's text is part of envbuild.json in the artifact and of its receipt.
_MOST_SCRIPT = 100_000


@dataclasses.dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe and its file.

    Its requirements include those of its project; `code` is the project without its files. `script` is the path and
    the text of the script of [verify]. `variant` is the Python selected by `for_python`, "" for the recipe's own.
    """

    recipe: model.Recipe
    path: Path
    document: Document = dataclasses.field(repr=False, compare=False)
    code: OwnCode | None = None
    script: tuple[Path, str] | None = None
    variant: str = ""

    @property
    def folder(self) -> Path:
        """Folder of the recipe file."""
        return self.path.parent

    @cached_property
    def digest(self) -> str:
        """`sha256:...` over the recipe's values, independent of layout and comments."""
        data, defaults = dataclasses.asdict(self.recipe), dataclasses.asdict(VerifySettings())
        data["verify"] = {
            name: value for name, value in data["verify"].items() if name in _VERIFY or value != defaults[name]
        }
        del data["audit"]  # it changes no artifact
        if self.recipe.slim == SlimTable():
            del data["slim"]
        for table in data["targets"].values():
            del table["pythons"]  # they have locks of their own
            if not table["gpus"]:
                del table["gpus"]
        if self.script is not None:
            data["verify"]["script_text"] = self.script[1]
        return _digest(**{name: value for name, value in data.items() if value or name not in _NEW})

    def for_python(self, target: Target, python: str) -> LoadedRecipe | None:
        """Return the recipe with this Python for `target`, None if the target does not list the Python."""
        if python == self.recipe.python:
            return self
        if python not in self.recipe.targets[target.name].pythons:
            return None
        return dataclasses.replace(self, recipe=dataclasses.replace(self.recipe, python=python), variant=python)

    @cached_property
    def bound(self) -> dict[str, str]:
        """Normalised name of each package in `[indexes]` → name of its index."""
        return {normalise(project): index for project, index in self.recipe.indexes.items()}

    def builds(self, target: Target, requirements: Iterable[str] = ()) -> dict[str, BuildTable]:
        """Return the tables of [build] for `target` and for sources that `requirements` name, by normalised name."""
        own = {normalise(name): table for name, table in self.recipe.build.items() if table.for_target(target.name)}
        direct = (reference for reference in references(requirements).values() if not reference.is_wheel)
        return own | {reference.name: self.build_table(reference.name) for reference in direct}

    def build_table(self, name: str) -> BuildTable:
        """Return the [build] table of a package (normalised name), or an empty table."""
        known = {normalise(package): table for package, table in self.recipe.build.items()}
        return known.get(name, BuildTable())

    def requirements(self, target: Target, conda: bool) -> tuple[str, ...]:
        """Return the requirements of `target`; with `conda`, the requirements that pip adds to the conda packages."""
        recipe = self.recipe
        return recipe.conda.requirements if conda else recipe.requirements + recipe.targets[target.name].requirements

    @property
    def has_conda(self) -> bool:
        """Whether the recipe has conda packages."""
        return bool(self.recipe.conda.dependencies)

    @property
    def has_conda_images(self) -> bool:
        """Whether the environment in its images consists of conda packages."""
        return self.recipe.environment == "conda"

    def has_wheels(self, target: Target) -> bool:
        """Return whether `target` needs a wheel lock: an image recipe with only conda packages does not."""
        recipe = self.recipe
        return recipe.environment != "conda" or bool(recipe.requirements or recipe.targets[target.name].requirements)

    def direct(self, target: Target, conda: bool) -> tuple[str, ...]:
        """Return the normalised names of the direct requirements of `target`; with `conda`, the packages of [conda]."""
        recipe, (_, table) = self.recipe, self.target(target.name)
        specs = (*recipe.conda.dependencies, *table.conda) if conda else ()
        names = [requirement_parts(text)[0] for text in self.requirements(target, conda)]
        names += [spec.split()[0] for spec in specs]
        return tuple(sorted({normalise(name) for name in names}))

    def where_build(self, name: str) -> str:
        """Return `FILE:LINE:COL` of a package (normalised name) in [build], else in a list of requirements."""
        known = self.document.data.get("build", ())
        keys = {
            normalise(package): ("build", n if isinstance(known, list) else package) for n, package in enumerate(known)
        }
        direct = {requirement_parts(text)[0]: keys_of for keys_of, text in requirement_entries(self.document)}
        return self.document.where(*(keys.get(name) or direct.get(name) or ()))

    def where(self, *keys: str | int) -> str:
        """Return `FILE:LINE:COL` of a key of the file."""
        return self.document.where(*keys)

    def target(self, name: str | None = None) -> tuple[Target, model.TargetTable]:
        """Return the target `name`; without a name, the target for this host.

        That is `cpu` on the host's architecture, else the only target with this architecture. Raises UsageError
        when the recipe has no such target.
        """
        recipe, names = self.recipe, list(self.recipe.targets)
        if name is None:
            arch = host_arch()
            fitting = [known for known in names if Target.parse(known).arch == arch]
            if f"cpu-{arch}" not in fitting and len(fitting) != 1:
                count_text = "several targets" if fitting else "no target"
                raise UsageError(
                    f"recipe {recipe.name!r} has {count_text} for this host ({arch}); its targets: {', '.join(names)}",
                    hint="Name the target.",
                )
            name = fitting[0] if len(fitting) == 1 else f"cpu-{arch}"
        if name not in recipe.targets:
            raise UsageError(
                f"recipe {recipe.name!r} has no target {name!r}{nearest(name, names)}", self._target_hint(name)
            )
        return Target.parse(name), recipe.targets[name]

    def _target_hint(self, name: str) -> str:
        """Return the hint for a target `name` that the recipe lacks."""
        if target_problem(name) is not None:
            return "a target is ACCELERATOR-ARCHITECTURE: cpu-x86_64, cu126-x86_64, cu130-aarch64, rocm6.4-x86_64"
        table = Target.parse(name).table
        return f"to add it, write the table {table} into {self.path}, and run `envbuild lock {self.recipe.name}`"

    def image_digest(self, target: Target) -> str:
        """Return `sha256:...` over exactly the inputs of the image lock of `target`."""
        recipe, image = self.recipe, self.recipe.image
        more = {"environment": "conda"} if recipe.environment == "conda" else {}  # the base then has no Python
        return _digest(
            target=target.name,
            base=image.base,
            python=recipe.python,
            suite=image.suite,
            packages=image.packages,
            **more,
        )

    def conda_digest(self, target: Target) -> str:
        """Return `sha256:...` over exactly the inputs of the conda lock of `target`."""
        recipe, (_, table) = self.recipe, self.target(target.name)
        return _digest(
            channels=recipe.conda.channels,
            dependencies=recipe.conda.dependencies + table.conda,
            **self._inputs(target, recipe.conda.requirements),
        )

    def resolution_digest(self, target: Target) -> str:
        """Return `sha256:...` over the inputs of the wheel lock of `target`. Raises UsageError if it is unknown."""
        recipe, (_, table) = self.recipe, self.target(target.name)
        nccl = self.nccl_wheel(target)
        more = {} if nccl is None else {"nccl": nccl}
        return _digest(**self._inputs(target, recipe.requirements + table.requirements), **more)

    def _inputs(self, target: Target, requirements: tuple[str, ...]) -> dict[str, object]:
        """Return the inputs of a resolution of `requirements`, which count in the digest of its lock."""
        recipe, table = self.recipe, self.recipe.targets[target.name]
        names = {requirement_parts(text)[0] for text in requirements}
        # They count only if the recipe has them.
        optional = {
            "bound": {name: index for name, index in self.bound.items() if name in names},
            "build": {
                name: [own.requires, own.dependencies, own.environment, own.isolation]
                for name, own in self.builds(target).items()
            },
            "overrides": recipe.overrides if requirements else (),
            "exclude_newer": self.exclude_newer(target),
        }
        return {
            "target": target.name,
            "python": recipe.python,
            "requirements": requirements,
            "constraints": recipe.constraints,
            "indexes": table.indexes,
            "glibc": table.glibc,
            **{key: value for key, value in optional.items() if value},
        }

    def exclude_newer(self, target: Target) -> dict[str, str]:
        """Return `exclude_newer` as "" → age, and of each index of `target` with an age of its own → that age."""
        recipe, own = self.recipe, self.recipe.targets[target.name].indexes
        ages = {"": recipe.exclude_newer} if recipe.exclude_newer else {}
        indexes = (*own, *recipe.indexes.values())
        return ages | {index: age for index, age in recipe.exclude_newer_index.items() if index in indexes}

    def nccl_wheel(self, target: Target) -> str | None:
        """Return the version of the NCCL wheel that `[layers.nccl]` uses instead of torch's pin, in PyPI's spelling.

        Returns None if the target has no separate NCCL wheel, or if the pin is not replaced. NCCL's release
        2.26.2-1 is 2.26.2 on PyPI.
        """
        table = self.recipe.layers.get("nccl")
        if table is None or not target.family.nccl_wheel or not table.for_target(target.name):
            return None
        return table.version.removesuffix("-1") if layer_kind("nccl", table) == "wheel" else None


def load_recipe(path: Path) -> LoadedRecipe:
    """Return the recipe in the file `path`. Raises RecipeError that lists every mistake with its line."""
    return decode_recipe(read(path))


def decode_recipe(document: Document) -> LoadedRecipe:
    """Return the recipe in `document`, whose file may not exist yet. Raises RecipeError as `load_recipe`."""
    checks = (*model.MISTAKES, _wrong_folder)
    recipe = decode(
        document, model.Recipe, check=lambda checked: [problem for check in checks for problem in check(checked)]
    )
    script = _script_of(recipe.verify, document)
    if recipe.project is None:
        return LoadedRecipe(recipe, document.path, document, script=script)
    code = declared_code(document, recipe.project)
    declared = tuple(dict.fromkeys(declared_requirements(code, recipe.project, document)))
    conda, wheels = recipe.conda, recipe.requirements
    if conda.dependencies:
        conda = dataclasses.replace(conda, requirements=conda.requirements + declared)
    if recipe.environment != "conda" or wheels:  # else the recipe has no wheel lock
        wheels += declared
    return LoadedRecipe(
        dataclasses.replace(recipe, requirements=wheels, conda=conda), document.path, document, code, script
    )


def _script_of(settings: VerifySettings, document: Document) -> tuple[Path, str] | None:
    """Return the path and the text of the script of [verify], None without one.

    Raises RecipeError for a script that cannot be read. The text is kept in the artifact, so that `envbuild verify`
    needs no recipe.
    """
    if not settings.script:
        return None
    path = document.path.parent / shlex.split(settings.script)[0]
    where = f"{document.where('verify', 'script')}: 'script' in [verify]"
    try:
        text = read_small(path).decode()
    except OSError as error:
        raise RecipeError(f"{where}: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{where}: {path} is not UTF-8: {error.reason} at byte {error.start}") from error
    if len(text) > _MOST_SCRIPT:
        raise RecipeError(
            f"{where}: {path} has {len(text)} characters; an artifact keeps at most {_MOST_SCRIPT}",
            "install it as [project], and start it with `command`",
        )
    return path, text


def _wrong_folder(document: Document) -> Iterator[Problem]:
    """Yield a mistake if the recipe's `name` differs from its folder's name, by which commands find the recipe."""
    path, name = document.path.absolute(), document.data.get("name")
    in_recipes = path.name == "recipe.toml" and path.parent.parent.name == "recipes"
    if in_recipes and isinstance(name, str) and name != path.parent.name:
        yield ("name",), f"{name!r} is not the name of its folder, {path.parent.name!r}"


def _digest(**data: Any) -> str:
    # Imported here: only commands that compare or write locks need these modules.
    import hashlib
    import json

    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()
