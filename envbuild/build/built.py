"""Resolver of artifacts by the name of their recipe, for all commands that take an artifact."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from envbuild.base.errors import EnvbuildError, LockError, UsageError
from envbuild.base.files import build_folder, named_path
from envbuild.base.progress import log
from envbuild.base.toml import closest
from envbuild.contract.kinds import ARTIFACTS, Artifact
from envbuild.contract.receipt import read_receipt, receipt_path
from envbuild.contract.state import read_state
from envbuild.recipe.find import FILE_NAME, command_word, default_recipe, recipe_files, search_folders
from envbuild.recipe.load import load_recipe
from envbuild.recipe.targets import Target


@dataclass(frozen=True, slots=True)
class BuiltArtifactPath:
    """An artifact of `recipe` in a folder of builds.

    `path` is the artifact's path; for an image in a daemon or registry, its receipt lies beside `path`. `recipe_file`
    is None if the recipe was not found, only its artifacts.
    """

    recipe: str
    recipe_file: Path | None
    kind: Artifact
    target: str
    path: Path

    @property
    def spelling(self) -> str:
        """The artifact as `envbuild inspect` takes it. Raises UsageError for a damaged receipt."""
        if self.kind.form != "registry":
            return os.fspath(self.path)
        receipt = receipt_path(self.path)
        try:
            about = read_receipt(receipt)["artifact"]
            return f"docker://{about['pushed']}" if about.get("pushed") else f"docker-daemon:{about['path']}"
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(f"{receipt} cannot be read: {error}", "build the image again") from error

    @property
    def documented(self) -> str:
        """The artifact as `envbuild report` takes it: an image in a daemon or registry by its receipt."""
        return os.fspath(receipt_path(self.path) if self.kind.form == "registry" else self.path)


def find_built(
    text: str | None,
    kinds: Sequence[str],
    *,
    target: str | None = None,
    shared: str = "",
    prefer: bool = False,
    site_folders: Sequence[Path] = (),
) -> BuiltArtifactPath | None:
    """Return the artifact of the recipe `text` (a name or path; None for the default recipe).

    Returns None when `text` is no recipe but the path of an artifact, or its name in a registry or daemon.
    `site_folders` are searched for recipes, too. The artifact is of one of `kinds` and for `target` (None for any),
    from the project's folder of builds, or else from `shared` ([paths] shared of the site), where jobs build. With
    `prefer`, only the first of `kinds` that a target has counts.

    Raises UsageError when there is none, and when there are several.
    """
    tops = [build_folder()]
    if shared and (more := Path(shared, "build")).absolute() != tops[0].absolute():
        tops.append(more)
    recipe_and_file = _recipe_of(text, search_folders(site_folders), tops)
    if recipe_and_file is None:
        return None
    recipe, file = recipe_and_file
    tops = [top / recipe for top in tops]
    built = next(filter(None, (_built_in(top, recipe, file, kinds, target) for top in tops)), [])
    if prefer:
        built = list({path.target: path for path in reversed(built)}.values())[::-1]
    if not built:
        commands = ", ".join(_commands(recipe, file, kinds))
        of_target = f" for {target}" if target else ""
        raise UsageError(
            f"found no artifact of recipe {recipe!r}{of_target} in {' or '.join(map(str, tops))}",
            f"build it first ({commands}), or give the path of an artifact",
        )
    if len(built) > 1 and prefer:
        raise UsageError(
            f"{recipe} is built for {', '.join(artifact.target for artifact in built)}", "choose one with --target"
        )
    if len(built) > 1:
        paths = ", ".join(path.documented for path in built)
        raise UsageError(f"{len(built)} artifacts of recipe {recipe!r} match: {paths}", "give one of these paths")
    return built[0]


def _recipe_of(text: str | None, folders: Sequence[Path], tops: Sequence[Path]) -> tuple[str, Path | None] | None:
    """Return name and file of the recipe `text`, None for the name or path of an artifact.

    The file is None for a recipe that has artifacts in `tops`, but is in none of `folders`.
    """
    if text is None:
        default = default_recipe()
        return _name_in(default), default
    path = named_path(Path(text))
    if path.name == FILE_NAME and path.is_file():
        return _name_in(path), path
    if (path / FILE_NAME).is_file():
        return _name_in(path / FILE_NAME), path / FILE_NAME
    if not text or set(text) & set("/:@") or path.is_file() or (path.exists() and read_state(path) is not None):
        return None
    file = recipe_files(folders).get(text)
    return (text, file) if file or any((top / text).is_dir() for top in tops) else None


def _name_in(file: Path) -> str:
    with suppress(EnvbuildError):  # what needs the recipe reports its mistakes
        return load_recipe(file).recipe.name
    return file.resolve().parent.name


def _built_in(
    top: Path, recipe: str, file: Path | None, kinds: Sequence[str], target: str | None
) -> list[BuiltArtifactPath]:
    targets = [target] if target else sorted(path.name for path in top.glob("*-*") if path.is_dir())
    paths = []
    for name in targets:
        for kind in map(ARTIFACTS.__getitem__, kinds):
            path = top / name / kind.default_name.format(recipe=recipe)
            if (receipt_path(path) if kind.form == "registry" else path).exists():
                paths.append(BuiltArtifactPath(recipe, file, kind, name, path))
    return paths


def _commands(recipe: str, file: Path | None, kinds: Sequence[str]) -> list[str]:
    """Return the commands that build artifacts of `kinds`; kinds for which the recipe has no packages are left out."""
    if file is None:
        return [f"`envbuild {kind} {recipe}`" for kind in kinds]

    loaded = load_recipe(file)
    wheels = any(loaded.has_wheels(Target.parse(name)) for name in loaded.recipe.targets)
    word = command_word(loaded)
    return [f"`envbuild {name} {word}`" for name in kinds if _packed(ARTIFACTS[name], loaded.has_conda, wheels)]


def _packed(kind: Artifact, conda: bool, wheels: bool) -> bool:
    """Return whether the recipe has packages for `kind`: wheels or conda packages; images take either."""
    return kind.form != "folder" or (conda if kind.of_conda else wheels)


def unknown(text: str, folders: Sequence[Path]) -> UsageError:
    """Return the error for a `text` that is neither a path nor a recipe."""
    if "/" in text:
        return UsageError(
            f"{text} does not exist", "give the path that `envbuild venv` or another build printed as its last line"
        )
    near = closest(text, recipe_files(folders))
    meant = f"; did you mean the recipe {near!r}?" if near else ""
    return UsageError(
        f"{text} is neither an artifact nor a recipe{meant}",
        "give a recipe of `envbuild list`, or the path that a build printed",
    )


def check_lock(built: BuiltArtifactPath, lock_digest: str) -> None:
    """Check that an artifact built from the lock `lock_digest` has the packages of its recipe's current lock.

    Raises LockError with the command that builds it again.
    """
    from envbuild.lock.conda_kind import conda_lock  # commands that only look at artifacts need no locks
    from envbuild.locks import wheel_locks

    if built.recipe_file is None:
        log(f"{built.path}: cannot compare it with its lock: recipe {built.recipe} was not found")
        return
    loaded = load_recipe(built.recipe_file)
    command = f"build it again: `envbuild {built.kind.name} {command_word(loaded)} --target {built.target}`"
    command += ", or name its path to take it as it is"
    if built.target not in loaded.recipe.targets:
        raise LockError(f"{built.path} is for {built.target}, a target that its recipe no longer has", command)
    target = Target.parse(built.target)
    conda = built.kind.of_conda or (built.kind.form != "folder" and loaded.has_conda_images)
    if conda and not loaded.has_conda:
        raise LockError(f"{built.path} has conda packages, but its recipe no longer has any", "remove it")
    locks = [conda_lock(loaded, target)] if conda else wheel_locks(loaded, target)  # one for each Python
    states = [lock.inspect() for lock in locks]
    if any(state.fault is None and state.lock is not None and state.lock.digest == lock_digest for state in states):
        return
    lock = states[0]
    if lock.fault is not None:
        raise LockError(f"{built.path} does not have the packages of its recipe: {lock.path}: {lock.fault}", command)
    raise LockError(f"{built.path} was built before {lock.path} changed: its packages differ from the lock", command)
