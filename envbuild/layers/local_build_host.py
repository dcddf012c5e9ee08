"""Source builds on this host, with its compilers and environment modules."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from envbuild.base import process
from envbuild.base.errors import HostError
from envbuild.recipe.sources import SourceLayer

# The variables of the caller that a build gets: search paths, and the settings of environment modules for compilers.
# Tokens, proxies and flags are excluded: they would appear in logs, or change the result unnoticed.
_KEPT = frozenset(
    {
        "PATH",
        "CC",
        "CXX",
        "CPATH",
        "C_INCLUDE_PATH",
        "CPLUS_INCLUDE_PATH",
        "LIBRARY_PATH",
        "LD_LIBRARY_PATH",
        "COMPILER_PATH",
        "GCC_EXEC_PREFIX",
        "ACLOCAL_PATH",
        "CUDA_HOME",
        "CUDA_PATH",
        "LM_LICENSE_FILE",
        "INTEL_LICENSE_FILE",
        "NVLOCALRC",
    }
)
_KEPT_PREFIXES = ("CRAY", "PE_", "PRGENV", "GCC_", "NVHPC", "EBROOT")
# Those that determine which headers and libraries are found.
_DECIDE = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CRAYPE_VERSION",
    "CRAY_CPU_TARGET",
)
# An option that makes a Python project use the host's MPI.
_MPI = re.compile(r"[A-Z0-9_]*WITH_MPI=1")
# Kills a command's whole process group when this process dies: make would forward the signal to its children alone.
_GUARD = 'trap "trap - TERM; kill -KILL 0" TERM; "$@" & wait $!'


def build_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the `variables` that are passed to a build on this host."""
    kept = {name: value for name, value in variables.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    kept.setdefault("PATH", os.defpath)
    return kept


def host_identity(layer: SourceLayer, variables: Mapping[str, str]) -> str:
    """Return the properties of this host that affect a build of `layer`.

    These are the compilers, MPI if an option asks for it, the C library, the processor, and a digest of the variables
    in `_DECIDE`. Raises HostError when there is no C compiler.
    """
    kept = build_variables(variables)
    parts = [_compiler(layer, kept, "CC", ("cc", "gcc"))]
    with contextlib.suppress(HostError):
        parts.append(_compiler(layer, kept, "CXX", ("c++", "g++")))
    if any(_MPI.fullmatch(option) for option in layer.configure):
        # "mpirun (Open MPI) 4.1.4"
        program = shutil.which("mpirun", path=kept["PATH"])
        parts.append(" ".join(_version([program], kept).stdout.split()[:4]) if program else "no MPI")
    parts += [" ".join(platform.libc_ver()), os.uname().machine]
    decide = [f"{name}={kept[name]}" for name in _DECIDE if kept.get(name)]
    if decide:
        parts.append("modules " + hashlib.sha256("\n".join(decide).encode()).hexdigest()[:16])
    return "host: " + "; ".join(dict.fromkeys(parts))


def _compiler(layer: SourceLayer, variables: Mapping[str, str], key: str, names: Sequence[str]) -> str:
    """Return the first line of a compiler's version message. Raises HostError when no compiler runs."""
    for name in [variables[key]] if variables.get(key) else names:
        words = name.split()
        program = shutil.which(words[0], path=variables["PATH"]) if words else None
        if program is None:
            continue
        done = _version([program, *words[1:]], variables)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[0]
    raise HostError(
        f"{layer.name} {layer.version} is built from source, and this host has no C compiler"
        + (f" ({key}={variables[key]})" if variables.get(key) else ""),
        "load the module of one, or install it (Debian: apt-get install gcc g++ make libc6-dev)",
    )


def _version(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return process.run([*command, "--version"], env={**variables, "LC_ALL": "C"}, check=False)


@dataclass(frozen=True, slots=True)
class LocalBuildHost:
    """This host as the build host: commands see the same paths as this process."""

    work: Path
    variables: Mapping[str, str]

    @property
    def inside(self) -> PurePath:
        return self.work

    def run(self, command: Sequence[str], cwd: PurePath, variables: Mapping[str, str], log: Path) -> int:
        everything = {**self.variables, **variables}
        program = command[0] if "/" in command[0] else shutil.which(command[0], path=everything["PATH"])
        with log.open("ab") as stream:
            if program is None:
                stream.write(f"{command[0]}: not found\n".encode())
                return 127
            child = process.start(
                ["/bin/sh", "-c", _GUARD, "sh", program, *command[1:]],
                env=everything,
                cwd=Path(cwd),
                stdout=stream.fileno(),
                stderr=subprocess.STDOUT,
                death_signal=signal.SIGTERM,
            )
        return process.finish(child)


def check_path(folder: Path) -> None:
    """Raise HostError if the path contains a character with a meaning for configure, make or the linker's options."""
    if set(str(folder)) & set("\\\"#$&'`, \t\n"):
        raise HostError(
            f"source layers cannot be compiled in {str(folder)!r}: its path has a blank or one of \\ \" # $ & ' ` ,",
            "set ENVBUILD_STORE (or `store` in site.toml) to a folder without these characters in its path",
        )


@contextlib.contextmanager
def local_build_host(work: Path, variables: Mapping[str, str]) -> Iterator[LocalBuildHost]:
    """Yield this host as the build host, with the work folder `work` and the variables for compilers and modules.

    Raises HostError if the path of `work` is unsuitable for builds.
    """
    check_path(work)
    yield LocalBuildHost(work, build_variables(variables))
