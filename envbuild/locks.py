"""The locks that builds of a recipe need, and whether each is current."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from envbuild.base import process
from envbuild.base.errors import BuildError, LockError, UsageError
from envbuild.base.git import run_git
from envbuild.base.progress import Log
from envbuild.compat.stack import Stack, stack_of
from envbuild.layers.requested import requested_layers
from envbuild.lock import conda_format
from envbuild.lock.base import has_base, image_lock
from envbuild.lock.conda import CondaLock
from envbuild.lock.conda_format import CondaPart
from envbuild.lock.format import FIRST_LINE, Lock, parse
from envbuild.lock.lifecycle import LockKind, LockState
from envbuild.lock.wheels import wheel_lock
from envbuild.recipe.find import command_word
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.model import PYTHONS
from envbuild.recipe.targets import Target

# Each part is an option of `envbuild lock`. With source layers, the image part is two locks.
PARTS = ("wheels", "image", "conda")
_LOCK_FILES = (".requirements.txt", ".conda-lock.yml")


def needed_locks(loaded: LoadedRecipe, target: Target, parts: Collection[str] = PARTS) -> list[LockKind[Any]]:
    """Return the locks in `parts` that builds of any kind need.

    Without a current one, a build resolves first, or fails if it runs with --locked. A Python that no Debian release
    has cannot be in an image; its image lock is only among those of the part "image" alone.
    """
    lock_kinds: list[LockKind[Any]] = []
    if loaded.has_wheels(target):
        lock_kinds += wheel_locks(loaded, target)
    if has_base(loaded.recipe) or "wheels" not in parts:
        lock_kinds.append(image_lock(loaded, target))
    image = loaded.recipe.image
    # Other images have no compilers for source layers.
    compiles = image.base == "debian" or image.build_base
    if compiles and (sources := requested_layers(loaded, target).every):
        from envbuild.lock.base import builder_lock

        lock_kinds.append(builder_lock(loaded, target, sources))
    if loaded.has_conda:
        from envbuild.lock.conda_kind import conda_lock

        lock_kinds.append(conda_lock(loaded, target))
    return [lock_kind for lock_kind in lock_kinds if lock_kind.part in parts]


def wheel_locks(loaded: LoadedRecipe, target: Target) -> list[LockKind[Lock]]:
    """Return the wheel lock of `target` for the recipe's Python, then those for the target's other `pythons`."""
    others = (loaded.for_python(target, python) for python in loaded.recipe.targets[target.name].pythons)
    return [wheel_lock(recipe, target) for recipe in (loaded, *others) if recipe]


def check_locks(work: Iterable[tuple[LoadedRecipe, Target]], parts: Collection[str], log: Log) -> None:
    """Report each needed lock in `parts` that is current.

    Raises LockError that lists all locks that are not current, with the command that updates them, or that names a
    known incompatibility in a current lock.
    """
    faults: dict[str, None] = {}
    missing: dict[str, set[str]] = {}
    for loaded, target in work:
        for needed in needed_locks(loaded, target, parts):
            state = needed.inspect()
            if state.fault is not None:
                faults[f"{state.path}: {state.fault}"] = None
                missing.setdefault(command_word(loaded), set()).add(needed.part)
                continue
            needed.judge(state.lock, str(state.path), log)
            log(f"{state.path}: current for {target.name}")
    if faults:
        commands = [
            " ".join(["envbuild lock", word, *(f"--{part}" for part in PARTS if part in parts)])
            for word, parts in missing.items()
        ]
        raise LockError("\n".join(faults), f"make them with `{' && '.join(commands)}` and commit the result")


def locked_names(recipes: Iterable[LoadedRecipe]) -> dict[str, list[str]]:
    """Return digest → "RECIPE TARGET LOCK" of each lock with it, for the current locks of packages of `recipes`."""
    names: dict[str, list[str]] = {}
    for loaded in recipes:
        for name in loaded.recipe.targets:
            for kind in needed_locks(loaded, loaded.target(name)[0], ("wheels", "conda")):
                with suppress(LockError):
                    state = kind.inspect()
                    if state.lock is not None and state.fault is None:
                        names.setdefault(state.lock.digest, []).append(f"{loaded.recipe.name} {name} {kind.label}")
    return names


def referenced_locks(repository: Path, variables: Mapping[str, str]) -> set[str]:
    """Return the digests of the locks of packages in all branches and tags of a git repository.

    Raises UsageError for a clone that may lack some, BuildError when git fails, LockError for a lock of another format.
    """

    def git(*words: str) -> str:
        done = run_git(repository, *words, variables=variables)
        if done.returncode != 0:
            raise BuildError(f"git {words[0]} failed in {repository}:\n{process.tail(done)}", "nothing was removed")
        return done.stdout

    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        raise UsageError(f"{repository} is a shallow clone, which may lack branches and tags", "clone it as a whole")
    files: dict[str, str] = {}
    for ref in git("for-each-ref", "--format=%(refname)").split():
        rows = [row.partition("\t") for row in git("ls-tree", "-r", "-z", "--full-tree", ref).split("\0")]
        files |= {about.split()[2]: path for about, _, path in rows if path.endswith(_LOCK_FILES)}
    pip, parts = dict[str, Lock](), list[CondaPart]()
    for sha, path in files.items():
        text = git("cat-file", "blob", sha).replace("\r\n", "\n")
        if text.startswith(FIRST_LINE):
            lock = parse(text, path)
            pip[lock.digest] = lock
        elif path.endswith(".yml") and conda_format.MARK in text:  # others make such files, too
            parts += conda_format.parse(text, path).values()
    digests = set(pip)
    for part in parts:  # without pip's packages, the digest has the recipe's Python
        none = [Lock(part.recipe, part.target, python, "", "", ()) for python in PYTHONS]
        for lock in [pip[part.pip_digest]] if part.pip_digest in pip else none:
            digests.add(CondaLock(part.recipe, part.target, part.recipe_digest, part.packages, lock).digest)
    return digests


def changed_locks(before: LoadedRecipe, after: LoadedRecipe) -> list[LockKind[Any]]:
    """Return the locks of `after` that an edit of the recipe `before` made stale.

    Returns the stale locks that exist; if none exists, all locks.
    """
    kinds: list[LockKind[Any]] = []
    for name in after.recipe.targets:
        target = after.target(name)[0]
        known = needed_locks(before, target) if name in before.recipe.targets else []
        digests = {kind.file: kind.digest for kind in known}
        kinds += [kind for kind in needed_locks(after, target) if digests.get(kind.file) != kind.digest]
    return [kind for kind in kinds if kind.inspect().lock is not None] or kinds


def locked_stack(loaded: LoadedRecipe, target: Target) -> tuple[Stack, str]:
    """Return the stack of `target`, and a description of its source."""
    conda = loaded.has_conda_images
    if conda:
        from envbuild.lock.conda_kind import conda_lock

        kind: LockKind[Any] = conda_lock(loaded, target)
    else:
        kind = wheel_lock(loaded, target)
    try:
        state: LockState[Any] = kind.inspect()
    except LockError as error:
        return stack_of(loaded, target, None), f"as the recipe pins it: {error.message}"
    if state.fault is not None or state.lock is None:
        return stack_of(loaded, target, None), f"as the recipe pins it: {state.path.name}: {state.fault}"
    versions = state.lock.versions if conda else {package.name: package.version for package in state.lock.packages}
    return stack_of(loaded, target, versions, conda=conda), "as locked"
