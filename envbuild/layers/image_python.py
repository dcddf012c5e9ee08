"""Compiler of an image's bytecode: a Python of this host, else the Debian base's Python, unpacked in the store."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

from envbuild.base import atomic
from envbuild.base.errors import HostError
from envbuild.base.packages import json_digest
from envbuild.base.progress import Log, step
from envbuild.debian.base import fetch_debs
from envbuild.debian.lock import DebianLock
from envbuild.debian.release import debian_client
from envbuild.debian.rootfs import merged, read_data
from envbuild.environment import Environment
from envbuild.image.entry import FILE, SYMLINK
from envbuild.interpreter import read_python
from envbuild.layers.bytecode import MAGIC, Compiler, compiler_of
from envbuild.lock.base import site_archives
from envbuild.lock.image import ImageLock
from envbuild.pythons import FOLDER, find_python, own_python
from envbuild.recipe.targets import Target, host_arch

# All that an interpreter needs that imports nothing but built-in modules.
_PACKAGES = r"(lib)?python{python}-minimal|libc6|libexpat1|zlib1g"
_FILES = re.compile(r"usr/bin/python3\.\d+|usr/lib/python3\.\d+/.*\.py|usr/lib/([^/]+/)?[^/]+\.so(\.[^/]*)?")


def image_compiler(
    lock: ImageLock, python: str, environment: Environment, *, conda: bool, offline: bool, log: Log
) -> Compiler | None:
    """Return the compiler of the bytecode of an image with the base of `lock`, None for an image without bytecode.

    It is envbuild's own or another Python of this host with the version `python`, else the base's Python if this host
    can run it. The latter is unpacked at its first use: an image of cached layers does not need it.
    """
    # Two users of one envbuild get the same bytes, whatever is on their PATH.
    if host_python := own_python(python) or find_python(python, environment):
        return compiler_of(host_python)
    base, lacking = lock.base, f"{lock.target}: this host has no Python {python}"
    runs = not conda and Target.parse(lock.target).arch == host_arch()
    if runs and isinstance(base, DebianLock) and (own := _planned(base, python)):
        log(f"{lacking}; the image's own Python compiles its bytecode")
        return replace(own, provide=lambda: _unpacked(base, own, python, environment, offline))
    log(f"{lacking} and cannot run the image's; the image gets no bytecode, so programs start slower in it")
    return None


def _planned(lock: DebianLock, python: str) -> Compiler | None:
    """Return the base's Python from the data of its lock, without a path; None if its version is unknown."""
    version = next((deb.version for deb in lock.packages if deb.name == f"python{python}-minimal"), "")
    match = re.match(r"\d+(\.\d+){2}", version)
    magic = MAGIC.get(python)
    return Compiler("", match[0], f"cpython-{python.replace('.', '')}", magic) if match and magic else None


def _unpacked(lock: DebianLock, own: Compiler, python: str, environment: Environment, offline: bool) -> Compiler:
    """Unpack the base's Python in the store; return `own` with its path. Raises BuildError or HostError."""
    pattern = re.compile(_PACKAGES.format(python=re.escape(python)))
    some = replace(lock, packages=tuple(deb for deb in lock.packages if pattern.fullmatch(deb.name)))
    digest = json_digest([[deb.name, deb.sha256] for deb in some.packages]).partition(":")[2]
    root = environment.store.folder(FOLDER) / f"debian-{digest}"
    with atomic.exclusive(root, lambda _: None):
        if not root.is_dir():
            with atomic.staged(root) as staged, step(f"unpacking the image's Python {own.version}"):
                _unpack(some, staged, environment, offline)
                atomic.replace(staged, root)
    environment.store.note_use(root, root)
    (loader,) = _loaders(root)
    folders = sorted({os.fspath(path.parent) for path in root.glob("usr/lib*/**/*.so*")})
    start = (os.fspath(loader), "--library-path", ":".join(folders))
    program, home = str(root / "usr/bin" / f"python{python}"), str(root / "usr")
    there = compiler_of(read_python(program, start, home))
    if there.identity != own.identity:
        raise HostError(f"{program} is {there.identity}, not {own.identity}", "build with --no-bytecode")
    return replace(there, python=program, start=start, home=home)


def _loaders(root: Path) -> list[Path]:
    loaders = {os.path.realpath(path) for path in root.glob("usr/lib*/**/ld-linux*.so*")}
    return [Path(path) for path in loaders]


def _unpack(lock: DebianLock, folder: Path, environment: Environment, offline: bool) -> None:
    places = [] if offline else site_archives(lock.suite, lock.date, environment)
    client = debian_client(environment.pip, environment.variables)
    files = fetch_debs(lock, environment.store.blobs, places, client)
    with atomic.writing(folder):
        for deb, file in zip(lock.packages, files, strict=True):
            for entry, content in read_data(file, deb.name):
                name = merged(entry.path)
                place = folder / name
                if not _FILES.fullmatch(name) or place.exists():
                    continue
                place.parent.mkdir(parents=True, exist_ok=True)
                if entry.kind == SYMLINK and "/" not in entry.target:
                    place.symlink_to(entry.target)
                elif entry.kind == FILE and content is not None:
                    with place.open("wb") as stream:
                        shutil.copyfileobj(content, stream)
                    place.chmod(entry.mode & 0o755)
