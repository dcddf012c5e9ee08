"""Search path of conda, mamba and micromamba for environments by name."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from envbuild.base.errors import UsageError
from envbuild.site.pip_config import home_folder


def named_prefix(name: str, env: Mapping[str, str]) -> Path:
    """Return the folder of the environment called `name`, in the first envs folder that the variables name.

    The candidates are CONDA_ENVS_DIRS or CONDA_ENVS_PATH, the envs folder of the installation of CONDA_EXE (if
    it is writable) or of MAMBA_ROOT_PREFIX, and ~/.conda/envs. Raises UsageError for an invalid name.
    """
    if not re.fullmatch(r"[^\s/#:.][^\s/#:]*", name) or name in ("base", "root"):
        raise UsageError(
            f"--name {name!r} is not the name of a conda environment",
            "no blanks, '/', ':' or '#', and not conda's own base; or give a folder with --prefix",
        )
    for variable in ("CONDA_ENVS_DIRS", "CONDA_ENVS_PATH"):
        if first := env.get(variable, "").split(os.pathsep)[0]:
            return Path(first, name)
    if program := env.get("CONDA_EXE"):  # ROOT/bin/conda
        envs = Path(program).parent.parent / "envs"
        if os.access(envs, os.W_OK):  # the conda of a site is often read-only
            return envs / name
    if root := env.get("MAMBA_ROOT_PREFIX"):
        return Path(root, "envs", name)
    return home_folder(env) / ".conda" / "envs" / name
