"""The variables of a conda environment, as `conda activate` sets them.

Source: conda's documentation "Managing environments" (CONDA_PREFIX, activate.d, env_vars.d, conda-meta/state).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from envbuild import process
from envbuild.errors import HostError

_DROPPED = (
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONDONTWRITEBYTECODE",
    "__PYVENV_LAUNCHER__",
    "VIRTUAL_ENV",
    "VIRTUAL_ENV_PROMPT",
)
# Runs each script, with its output kept apart from the variables. As in conda, a failing script stops nothing.
_SOURCE = """exec 3>&1 1>&2
for script in "$@"; do . "$script"; done
exec "$CONDA_PREFIX/bin/python" -I -S -c 'import os
os.write(3, b"\\0".join(k + b"=" + v for k, v in os.environb.items()))'
"""
# Variables that the shell sets for itself.
_SHELLS = frozenset({"_", "SHLVL", "PWD", "OLDPWD"})


def activated(path: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` as after `conda activate` of the environment at `path`, without a caller's Python settings.

    bash runs the environment's activation scripts (etc/conda/activate.d/*.sh). Raises HostError when there are
    some and they cannot be run.
    """
    root = path.absolute()
    result = {name: value for name, value in env.items() if name not in _DROPPED}
    result |= {
        "CONDA_PREFIX": os.fspath(root),
        # conda calls an environment in an envs folder by its name, any other by its path.
        "CONDA_DEFAULT_ENV": root.name if root.parent.name == "envs" else os.fspath(root),
        "CONDA_SHLVL": "1",
        "PATH": f"{root / 'bin'}{os.pathsep}{env.get('PATH') or os.defpath}",
    }
    result |= set_variables(root)
    scripts = sorted((root / "etc" / "conda" / "activate.d").glob("*.sh"))
    return _sourced(scripts, result) if scripts else result


def set_variables(root: Path) -> dict[str, str]:
    """Return the variables that packages and users (`conda env config vars set`) set; damaged files are skipped."""
    found: dict[str, str] = {}
    files = sorted((root / "etc" / "conda" / "env_vars.d").glob("*.json"))
    for file in [*files, root / "conda-meta" / "state"]:
        try:
            data = json.loads(file.read_bytes())
        except (OSError, ValueError):
            continue
        values = data.get("env_vars") if file.name == "state" and isinstance(data, dict) else data
        if isinstance(values, dict):
            found |= {str(name): str(value) for name, value in values.items()}
    return found


def _sourced(scripts: list[Path], env: dict[str, str]) -> dict[str, str]:
    done = process.run(
        ["bash", "--noprofile", "--norc", "-c", _SOURCE, "bash", *scripts],
        env=env, failure=HostError, what="the environment's activation (etc/conda/activate.d)",
    )  # fmt: skip
    pairs = (line.partition("=") for line in done.stdout.split("\0") if "=" in line)
    found = {name: value for name, _, value in pairs}
    own = {name: env[name] for name in _SHELLS if name in env}
    return {name: value for name, value in found.items() if name not in _SHELLS} | own
