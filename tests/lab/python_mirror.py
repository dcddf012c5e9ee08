"""A mirror of uv's Pythons for tests: one archive in the layout of python-build-standalone, made from a Python here."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path

from lab.patchelf import set_rpath

# Parts of the library that no test needs.
_WITHOUT = shutil.ignore_patterns(
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "tkinter",
    "EXTERNALLY-MANAGED",
    "sitecustomize.py",
    "config-3*",
    "_test*",
    "_tkinter*",
    "*.a",
)
# What each Linux has: these belong to the host's C library.
_OF_HOST = re.compile(r"(linux-vdso|ld-linux.*|libc|libm|libdl|libpthread|librt|libutil|libresolv|libnsl)\.so.*")


@dataclass(frozen=True)
class PythonMirror:
    """The folder with an archive of Python `version` ("3.11.2"), and uv's list of downloads that names it alone."""

    folder: Path
    version: str

    @property
    def variables(self) -> dict[str, str]:
        """The variables that make uv download this archive."""
        return {"UV_PYTHON_DOWNLOADS_JSON_URL": str(self.folder / "downloads.json")}


def python_mirror(folder: Path) -> PythonMirror:
    """Make the mirror, of the Python that runs the tests, in the empty `folder`; its Python runs on any Linux."""
    work, version, short = folder / "python", platform.python_version(), "{}.{}".format(*sys.version_info)
    program = work / "bin" / f"python{short}"
    program.parent.mkdir(parents=True)
    shutil.copy2(Path(sys._base_executable).resolve(), program)  # type: ignore[attr-defined]
    for name in ("python3", "python"):
        (work / "bin" / name).symlink_to(program.name)
    library = work / "lib" / program.name
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=_WITHOUT)
    shutil.copytree(sysconfig.get_path("include"), work / "include" / program.name)
    modules = sorted((library / "lib-dynload").glob("*.so"))
    libraries = _libraries([program, *modules], work / "lib")
    set_rpath([program], "$ORIGIN/../lib")
    set_rpath(modules, "$ORIGIN/../..")
    if libraries:
        set_rpath(libraries, "$ORIGIN")
    machine = platform.machine()
    key = f"cpython-{version}-linux-{machine}-gnu"
    archive = folder / f"{key}.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(work, "python")
    shutil.rmtree(work)
    major, minor, patch = map(int, version.split("."))
    row = {
        "name": "cpython",
        "arch": {"family": machine, "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": major,
        "minor": minor,
        "patch": patch,
        "prerelease": "",
        "url": archive.as_uri(),
        "variant": None,
        "build": "20261126",
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
    }
    (folder / "downloads.json").write_text(json.dumps({key: row}))
    return PythonMirror(folder, version)


def _libraries(programs: list[Path], folder: Path) -> list[Path]:
    """Copy the libraries of `programs` that are not the C library's into `folder`, and return the copies."""
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True).stdout
    found = {Path(path).name: path for path in re.findall(r"=> (/\S+)", said)}
    wanted = {name: path for name, path in found.items() if not _OF_HOST.fullmatch(name)}
    return [Path(shutil.copy2(path, folder / name)) for name, path in wanted.items()]
