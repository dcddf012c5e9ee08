"""The ways to start an artifact's programs on nodes, and image files on this host: one module and one line for each."""

from __future__ import annotations

from collections.abc import Mapping

from envbuild.runtimes.apptainer import APPTAINER
from envbuild.runtimes.base import NodeContainer, Runtime, bind_words, path_word
from envbuild.runtimes.enroot import ENROOT, PYXIS
from envbuild.runtimes.podman import PODMAN, PODMAN_HPC


def _envbuild_run(container: NodeContainer) -> list[str]:
    """Return the words that start a command by `envbuild run`, which needs no runtime: exec_image.py."""
    command = path_word(container.envbuild, "the command envbuild")
    return [f"{command} run", *bind_words(container), f"{container.image} --"]


def _folder_caches(cache: str, scratch: str) -> dict[str, str]:
    return {"XDG_CACHE_HOME": cache, "TMPDIR": scratch}


FOLDER, POD, OWN = "folder", "pod", "own"
RUNTIMES: Mapping[str, Runtime] = {
    FOLDER: Runtime(host_files=True, caches=_folder_caches),
    POD: Runtime(pods=True),
    OWN: Runtime(words=_envbuild_run),
    "pyxis": PYXIS,
    "enroot": ENROOT,
    "apptainer": APPTAINER,
    "podman": PODMAN,
    "podman-hpc": PODMAN_HPC,
}


def of_sites() -> tuple[str, ...]:
    """Return the possible values of [container] runtime of a site."""
    return ("none", *(name for name, runtime in RUNTIMES.items() if runtime.kinds))


def starting(kind: str) -> dict[str, Runtime]:
    """Return the runtimes that start artifacts of `kind`, by name."""
    return {name: runtime for name, runtime in RUNTIMES.items() if kind in runtime.kinds}
