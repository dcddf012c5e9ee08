"""The environment of a recipe, built and verified by its locks before and after an upgrade."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envbuild.artifacts.manifest import read_manifest
from envbuild.environment import Environment
from envbuild.errors import LockError, VerificationError
from envbuild.kinds import CONDA, VENV
from envbuild.kinds.commit import failed_path
from envbuild.kinds.folder import make_environment, prepare_folder
from envbuild.locks import has_wheels
from envbuild.progress import log
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import Target, host_arch
from envbuild.verify.receipt import read_receipt, receipt_path


def verified_here(
    loaded: LoadedRecipe, target: Target, environment: Environment, *, offline: bool
) -> tuple[Mapping[str, Any], int] | None:
    """Build and verify the venv, or else the conda environment, at its usual path unless it is current.

    Returns its receipt, which may be a failed one, and the bytes of its files; None without locks, or for a target of
    another architecture. Raises BuildError.
    """
    if target.arch != host_arch():
        return None
    kind = VENV if has_wheels(loaded, target) else CONDA
    path = kind.default_path(loaded.recipe.name, target.name)
    try:
        plan, trainer = prepare_folder(kind, loaded, target, environment, locked=True, offline=offline, log=log)
        make_environment(kind, plan, trainer, environment, path, offline=offline)
    except LockError as error:
        log(f"{loaded.recipe.name} {target.name}: not verified: {error.message}")
        return None
    except VerificationError as error:
        log(f"{loaded.recipe.name} {target.name}: {error.message}")
        path = failed_path(path)
    manifest = read_manifest(path)
    size = sum(row.size for row in manifest.rows.values()) if manifest else 0
    return read_receipt(receipt_path(path)), size
