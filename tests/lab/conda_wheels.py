"""Conda packages made of wheels, named, built and depending as conda-forge's.

PyPI's `installer` spreads the wheels: what it would write into site-packages, bin and so on goes into the package.
"""

from __future__ import annotations

import csv
import io
import os
import posixpath
import tempfile
import warnings
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator
from email.parser import HeaderParser
from os import PathLike, fspath
from pathlib import Path
from shutil import copyfileobj
from typing import IO, BinaryIO, Literal

from installer import install
from installer.destinations import WheelDestination
from installer.records import Hash, RecordEntry
from installer.scripts import Script
from installer.sources import WheelContentElement, WheelFile
from installer.utils import Scheme
from lab.conda_package import MARK, PLACEHOLDER, PLATFORMS, Metadata, Package, conda_package
from lab.patchelf import rpath, set_rpath
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

PYTHON = "3.11"
NAMES = {"torch": "pytorch", "typing-extensions": "typing_extensions"}
# Files up to this size wait in memory until their own is known, others on disk.
_SPOOL = 16 << 20
# Of torch: C++ headers, which conda-forge has in another package, and torch's own tests. No test wants them, and they
# are five of six files and a tenth of the bytes that the tests of conda environments and images handle.
_LEFT_OUT = ("torch/include/", "torch/test/", "torch/bin/test_")
# Of torch for the architecture that is not this machine's, which nothing starts: a third of a gigabyte.
_LEFT_OUT_ELSEWHERE = ("torch/lib/libtorch_cpu.so",)
_CHUNK = 1 << 20


def conda_name(distribution: str) -> str:
    """The conda package that has the files of a distribution."""
    name = canonicalize_name(distribution)
    return NAMES.get(name, name)


def wheel_package(channel: Path, wheel: Path, subdir: str) -> str:
    """Write `wheel` into `channel` as a package, noarch when it is pure; returns the package's name.

    What it depends on is what its metadata names for Python 3.11 on `subdir`.
    """
    _, version, _, tags = parse_wheel_filename(wheel.name)
    pure = all(tag.platform == "any" for tag in tags)
    with _LeanWheel.open(wheel) as source:
        if PLATFORMS[subdir] != os.uname().machine:
            source.left_out = _LEFT_OUT + _LEFT_OUT_ELSEWHERE
        headers = HeaderParser().parsestr(source.read_dist_info("METADATA"))
        name = conda_name(headers["Name"])
        depends = _depends(headers.get_all("Requires-Dist", []), subdir)
        if pure:
            depends.append(_spec("python", SpecifierSet(headers.get("Requires-Python", ">=3.8"))))
        else:
            depends += [f"python >={PYTHON},<3.12.0a0", "libgcc >=12", "libstdcxx >=12"]
            depends.append("__glibc >=2.28,<3.0.a0")
        metadata = Metadata(
            name=name,
            version=version.public,
            build=_build(name, pure, subdir),
            subdir="noarch" if pure else subdir,
            depends=sorted(depends),
            noarch="python" if pure else None,
            license=_license(headers.get("License-Expression"), headers.get("License")),
            summary=headers.get("Summary", ""),
        )
        with conda_package(channel, metadata) as package, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's wheel has bytecode, which is left out
            install(source, _Destination(package), {"INSTALLER": b"conda\n"})
    return name


def _build(name: str, pure: bool, subdir: str) -> str:
    if pure:
        return "pyhlab_0"
    return f"cpu_{MARK[subdir]}_py311_0" if name == "pytorch" else f"py311_{MARK[subdir]}_0"


def _depends(lines: Iterable[str], subdir: str) -> list[str]:
    """Match specs of what `lines`, Requires-Dist, ask for on `subdir`, without extras."""
    environment = {
        "implementation_name": "cpython",
        "implementation_version": "3.11.2",
        "os_name": "posix",
        "platform_machine": PLATFORMS.get(subdir, "x86_64"),
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": "3.11.2",
        "python_version": PYTHON,
        "sys_platform": "linux",
        "extra": "",
    }
    wanted = [Requirement(line) for line in lines]
    return [
        _spec(conda_name(item.name), item.specifier)
        for item in wanted
        if item.marker is None or item.marker.evaluate(environment)
    ]


def _spec(name: str, versions: SpecifierSet) -> str:
    return f"{name} {','.join(sorted(map(str, versions)))}".strip()


def _license(expression: str | None, text: str | None) -> str:
    if expression:
        return expression
    short = bool(text) and len(str(text)) < 40 and "\n" not in str(text)
    return str(text) if short else "LicenseRef-Unknown"


class _LeanWheel(WheelFile):
    """A wheel without the paths that begin with one of `left_out`."""

    left_out: tuple[str, ...] = _LEFT_OUT

    def get_contents(self) -> Iterator[WheelContentElement]:
        return (item for item in super().get_contents() if not item[0][0].startswith(self.left_out))


class _Destination(WheelDestination):
    """Puts a wheel's files into a package; where, differs between noarch packages and others."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._pure = package.metadata.noarch is not None

    def _path(self, scheme: str, path: str) -> tuple[str, str]:
        """(where the package holds it, where it will lie in the prefix)."""
        site_packages = f"lib/python{PYTHON}/site-packages"
        if scheme in ("purelib", "platlib"):
            installed = f"{site_packages}/{path}"
            return (f"site-packages/{path}" if self._pure else installed), installed
        if scheme == "scripts":
            return f"{'python-scripts' if self._pure else 'bin'}/{path}", f"bin/{path}"
        if scheme == "headers":
            path = f"include/python{PYTHON}/{path}"
        return path, path

    def write_script(self, name: str, module: str, attr: str, section: Literal["console", "gui"]) -> RecordEntry:
        """In a noarch package an entry point, which the installer makes a script of; else the script."""
        if self._pure:
            self._package.entry_points.append(f"{name} = {module}:{attr}")
        else:
            script = Script(name, module, attr, section)
            _, content = script.generate("/lab/python", "posix")
            content = content.replace(b"#!/lab/python", f"#!{PLACEHOLDER}/bin/python".encode(), 1)
            self._package.file(f"bin/{name}", content, executable=True, prefix="text")
        # The prefix is yet to be put in, so that no hash holds.
        return RecordEntry(_record(f"bin/{name}"), None, None)

    def write_file(
        self, scheme: Scheme, path: str | PathLike[str], stream: BinaryIO, is_executable: bool
    ) -> RecordEntry:
        """Add a file; a script that asks for Python gets the prefix's."""
        held, installed = self._path(scheme, fspath(path))
        with tempfile.SpooledTemporaryFile(max_size=_SPOOL) as spool:
            copyfileobj(stream, spool, _CHUNK)
            size = spool.tell()
            spool.seek(0)
            if scheme == "scripts":
                self._script(held, spool.read())
                return RecordEntry(_record(installed), None, None)
            elf = not self._pure and spool.read(4) == b"\x7fELF"
            spool.seek(0)
            if elf:
                return self._elf(held, spool, is_executable)
            sha256 = self._package.file(held, spool, size=size, executable=is_executable)
        return RecordEntry(_record(installed), Hash("sha256", _base64(sha256)), size)

    def _script(self, path: str, content: bytes) -> None:
        rest = content.removeprefix(b"#!python")
        if rest == content:
            self._package.file(path, content, executable=True)
        else:
            content = f"#!{PLACEHOLDER}/bin/python".encode() + rest
            self._package.file(path, content, executable=True, prefix="text")

    def _elf(self, path: str, content: IO[bytes], executable: bool) -> RecordEntry:
        """A library of an arch package looks where it did, then into the prefix's lib, as conda-build has it."""
        with tempfile.NamedTemporaryFile() as file:
            copyfileobj(content, file, _CHUNK)
            file.flush()
            place = Path(file.name)
            own = f"$ORIGIN/{posixpath.relpath('lib', posixpath.dirname(path))}"
            set_rpath([place], ":".join(filter(None, [rpath(place), own])))
            size = place.stat().st_size
            with place.open("rb") as patched:
                sha256 = self._package.file(path, patched, size=size, executable=executable)
        return RecordEntry(_record(path), Hash("sha256", _base64(sha256)), size)

    def finalize_installation(
        self, scheme: Scheme, record_file_path: str, records: Iterable[tuple[Scheme, RecordEntry]]
    ) -> None:
        """Write RECORD. The records hold paths relative to site-packages already, whatever their scheme."""
        text = io.StringIO()
        rows = [[r.path, r.hash_ or "", r.size if r.size is not None else ""] for _, r in records]
        rows[-1][0] = record_file_path
        csv.writer(text, lineterminator="\n").writerows(rows)
        held, _ = self._path(scheme, record_file_path)
        self._package.file(held, text.getvalue().encode())


def _record(installed: str) -> str:
    return posixpath.relpath(installed, f"lib/python{PYTHON}/site-packages")


def _base64(sha256: str) -> str:
    return urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()
