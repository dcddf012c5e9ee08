"""The real Apptainer for tests, in a folder of its own: nothing of it is installed on the system.

The packages are Debian sid's, from the mirror that this host's apt uses. They need a newer C library than the
host has, so it comes along; programs and libraries are told where it lies. Apptainer finds its own files relative to
its program, as long as no setuid starter is beside it (buildcfg/confgen/gen.go: relocatePath).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab import apt
from lab.patchelf import patchelf

SUITE = "sid"
# libc6 and what else apptainer needs that an older Debian has in older versions
LIBRARIES = ("libc6", "libseccomp2", "libsqlite3-0")
TOOLS = ("dpkg", "dpkg-deb", "mksquashfs", "unsquashfs", "unshare")
# Without privileges, as users run it, and as root may where it lacks a capability that Apptainer asks for.
FLAGS = ("--userns",)


@dataclass(frozen=True)
class Apptainer:
    """An Apptainer below `folder`; `bin` is what to put into PATH, before all else."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "usr/bin"

    def environment(self, **more: str) -> dict[str, str]:
        """This process's environment with Apptainer in PATH and its caches in the folder, then `more`."""
        own = {key: value for key, value in os.environ.items() if not key.startswith(("APPTAINER", "SINGULARITY"))}
        own["PATH"] = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        for name in ("cache", "tmp"):
            (self.folder / name).mkdir(exist_ok=True)
            own[f"APPTAINER_{name.upper()}DIR"] = str(self.folder / name)
        return {**own, **more}

    def __call__(
        self, *arguments: str | Path, check: bool = True, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `apptainer` with `arguments`; `env` goes over `environment()`."""
        done = subprocess.run(
            [self.bin / "apptainer", *arguments],
            env=self.environment(**(env or {})),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done


def missing() -> str | None:
    """Why Apptainer cannot be had on this machine, or None."""
    if sys.platform != "linux":
        return "Apptainer runs on Linux alone"
    if reason := apt.missing(SUITE, TOOLS):
        return reason
    if subprocess.run(["unshare", "--user", "--map-root-user", "true"], capture_output=True).returncode:
        return "this user may not make user namespaces"
    return None


def apptainer(folder: Path) -> Apptainer:
    """Install Apptainer below `folder`, an empty one; it takes a few seconds and 21 MB of package lists."""
    packages = folder / "packages"
    apt.download(SUITE, ["apptainer", *LIBRARIES], packages)
    own, libraries = folder / "usr", folder / "lib"
    for name in LIBRARIES:
        subprocess.run(["dpkg", "-x", _package(packages, name), folder / "unpacked"], check=True)
    subprocess.run(["dpkg", "-x", _package(packages, "apptainer"), folder], check=True)
    libraries.mkdir()
    triple = next((folder / "unpacked/usr/lib").glob("*-linux-gnu")).name
    for path in (folder / "unpacked/usr/lib" / triple).glob("*.so*"):
        shutil.copy(path, libraries / path.name)
    loader = next(libraries.glob("ld-linux-*.so.*"))
    starter = own / f"lib/{triple}/apptainer/bin/starter"
    for program in (own / "bin/apptainer", starter):
        _patch(program, libraries, "--set-interpreter", str(loader))
    for name in ("libseccomp.so.2", "libsqlite3.so.0"):
        _patch(libraries / name, libraries)
    # The starter takes the folder three above its own for what `apptainer` calls usr: it finds the same there.
    for link, target in {"etc": "../etc", "var": "../var", "bin": "../bin", "lib": "."}.items():
        (own / "lib" / link).symlink_to(target)
    for name in ("etc", "var"):
        (folder / name).rename(own / name)
    shutil.rmtree(folder / "unpacked")
    shutil.rmtree(packages)
    return Apptainer(folder)


def _package(packages: Path, name: str) -> Path:
    return next(packages.glob(f"{name}_*.deb"))


def _patch(path: Path, libraries: Path, *more: str) -> None:
    program = patchelf()
    assert program is not None
    options = [*more, "--force-rpath", "--set-rpath", str(libraries)]
    subprocess.run([program, *options, path], check=True)
