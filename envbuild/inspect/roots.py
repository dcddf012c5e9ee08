"""Inventory of a root file system, in the layers of an image or in a squashfs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from envbuild.inspect.conda_meta import environments, recorded_files, records
from envbuild.inspect.facts import CONDA, VENV, Inventory, Item
from envbuild.inspect.metadata import (
    Note,
    debian_packages,
    os_release,
    python_packages,
    settings_of,
    source_built,
    state_of,
)
from envbuild.layers.compose import PREFIX


def contents_of_root(files: Mapping[str, Item], notes: Mapping[str, Note], env: Mapping[str, str]) -> Inventory:
    """Return the inventory of a root with these files.

    `notes` are the results of `interest`, by path. `env` holds the variables of programs in the root, of which
    VIRTUAL_ENV, CONDA_PREFIX and PATH locate the environment.
    """
    prefix, environment = _environment(env, files)
    release = notes.get("usr/lib/os-release") or notes.get("etc/os-release") or ""
    return Inventory(
        files,
        python_packages(files, notes),
        debian_packages(notes),
        prefix,
        os_release(str(release)),
        settings_of(str(notes.get(f"{prefix}/pyvenv.cfg", ""))),
        state_of(str(notes.get(f"{prefix}/envbuild.json", ""))),
        environment,
        records(notes),
        recorded_files(notes),
        source_built(notes),
    )


def extra_of(device: tuple[int, int], xattrs: tuple[tuple[str, bytes], ...]) -> str:
    """Return device numbers and extended attributes in the form of an Item's `extra`."""
    extra = "" if device == (0, 0) else "{},{} ".format(*device)
    return extra + " ".join(f"{k}={hashlib.sha256(v).hexdigest()}" for k, v in sorted(xattrs))


def _environment(env: Mapping[str, str], files: Mapping[str, Item]) -> tuple[str | None, str]:
    """Return the folder of the environment that programs in the root use, and its kind."""
    conda = set(environments(files))
    named = [env.get("VIRTUAL_ENV", ""), env.get("CONDA_PREFIX", ""), PREFIX]
    # Images that people make with conda often set only PATH.
    named += [folder.removesuffix("/bin") for folder in env.get("PATH", "").split(":")]
    for folder in (name.strip("/") for name in named):
        if folder and folder in conda:
            return folder, CONDA
        if folder and f"{folder}/pyvenv.cfg" in files:
            return folder, VENV
    return None, ""
