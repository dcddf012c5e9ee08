"""A tree of environment modules for the real Lmod."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

INIT = Path("/etc/profile.d/lmod.sh")
"""What a batch script sources to have `module`."""


def missing() -> str | None:
    """Why Lmod cannot be had here; None when it can."""
    return None if INIT.exists() else "not installed: lmod (Debian: lmod)"


def module_tree(folder: Path, modules: Mapping[str, Mapping[str, str]]) -> Path:
    """Write modules such as "python/3.11" with the variables they set into `folder`, which is their MODULEPATH.

    A variable whose name ends in PATH is prepended to, others are set; "conflict" names a module, or a family of them,
    that cannot be loaded beside. In `cluster.modules` they are found without any MODULEPATH being set.
    """
    for name, variables in modules.items():
        file = folder / f"{name}.lua"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(_line(key, value) for key, value in variables.items()))
    return folder


def _line(key: str, value: str) -> str:
    if key == "conflict":
        return f"conflict({_lua(value)})\n"
    change = "prepend_path" if key.endswith("PATH") else "setenv"
    return f"{change}({_lua(key)}, {_lua(value)})\n"


def _lua(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
