"""Python for a lab channel: Debian bookworm's interpreter and the libraries it needs, as conda packages.

Debian's Python looks for its own layout (dist-packages, posix_local, /usr); it is made to look for conda's. It asks
for bookworm's C library, 2.36, though the package says 2.28, as conda-forge's does: recipes are solved for that one.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from lab import apt
from lab.conda_package import MARK, PLACEHOLDER, Metadata, Package, conda_package
from lab.patchelf import set_rpath

SUITE = "bookworm"
DEBIAN_ARCH = {"linux-64": "amd64", "linux-aarch64": "arm64"}
PYTHON = (
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libssl3",
    "libsqlite3-0",
    "libffi8",
    "zlib1g",
    "libbz2-1.0",
    "liblzma5",
    "libexpat1",
    "libreadline8",
    "libncursesw6",
    "libtinfo6",
    "libuuid1",
    "libcrypt1",
)
# conda-forge's name → Debian's
RUNTIME = {"libgcc": "libgcc-s1", "libstdcxx": "libstdc++6"}
_GPL = "GPL-3.0-only WITH GCC-exception-3.1"
_STDLIB = "lib/python3.11"
# What is Debian's alone, or needs libraries that conda's Python does without.
_DROPPED = re.compile(
    r"EXTERNALLY-MANAGED|sitecustomize\.py|_distutils_system_mod\.py|__pycache__/.*|lib-dynload/(_dbm|nis)\..*"
)
_README = b"This directory exists so that 3rd party packages can be installed here.\n"


def missing() -> str | None:
    """Why no Python can be made into a conda package on this machine, or None."""
    return apt.missing(SUITE, ["dpkg-deb"])


def python_packages(channel: Path, work: Path) -> None:
    """Write python, libgcc and libstdcxx for both architectures into `channel`; `work` is an empty folder."""
    debs = work / "debs"
    names = [*PYTHON, *RUNTIME.values()]
    wanted = [f"{name}:{arch}" for arch in DEBIAN_ARCH.values() for name in names]
    apt.download(SUITE, wanted, debs, DEBIAN_ARCH.values())
    for subdir, arch in DEBIAN_ARCH.items():
        for name, debian in RUNTIME.items():
            root = work / subdir / name
            version = _unpack(debs, [debian], arch, root)
            _runtime(channel, subdir, name, version, root)
        root = work / subdir / "python"
        version = _unpack(debs, PYTHON, arch, root)
        _python(channel, subdir, version, root)


def _runtime(channel: Path, subdir: str, name: str, version: str, root: Path) -> None:
    """A library of the compiler."""
    libraries = _patched_libraries(root)
    metadata = Metadata(
        name,
        version,
        f"{MARK[subdir]}_0",
        subdir,
        depends=["__glibc >=2.28,<3.0.a0"] + ([f"libgcc {version}"] if name != "libgcc" else []),
        license=_GPL,
        summary=f"Debian's {RUNTIME[name]}",
    )
    with conda_package(channel, metadata) as package:
        _add_libraries(package, libraries)


def _python(channel: Path, subdir: str, version: str, root: Path) -> None:
    metadata = Metadata(
        "python",
        version,
        f"0_{MARK[subdir]}_cpython",
        subdir,
        depends=["__glibc >=2.28,<3.0.a0"],
        constrains=["python_abi 3.11.* *_cp311"],
        license="Python-2.0",
        summary="General purpose programming language",
        more={"python_site_packages_path": f"{_STDLIB}/site-packages"},
    )
    usr = root / "usr"
    program = usr / "bin/python3.11"
    _relocate(program)
    # Conda's libraries find each other from where they lie. The program's own path counts for what it loads, too;
    # the placeholder in it is the string in a binary that an installer has to replace.
    set_rpath([program], f"$ORIGIN/../lib:{PLACEHOLDER}/lib")
    set_rpath((usr / _STDLIB / "lib-dynload").glob("*.so"), "$ORIGIN/../..")
    libraries = _patched_libraries(root)
    with conda_package(channel, metadata) as package:
        package.file("bin/python3.11", program.read_bytes(), executable=True, prefix="binary")
        for name in ("python3", "python"):
            package.link(f"bin/{name}", "python3.11")
        _add_libraries(package, libraries)
        for path in _stdlib(usr / _STDLIB):
            name = f"{_STDLIB}/{path.relative_to(usr / _STDLIB)}"
            if path.is_symlink():
                continue  # of two names of one module, conda's is the other's target
            if path.name.startswith("_sysconfigdata"):
                package.file(name, _sysconfig_data(path.read_bytes(), root), prefix="text")
            else:
                package.file(name, path.read_bytes())
        package.file(f"{_STDLIB}/site-packages/README.txt", _README)
        package.file("lib/pkgconfig/python-3.11.pc", _pkgconfig(version), prefix="text")


def _relocate(program: Path) -> None:
    """Make the interpreter and its library look for conda's layout. site.py is frozen into the program, so
    that what replaces a string there has its length."""
    stdlib = program.parent.parent / _STDLIB
    for path in (program, stdlib / "site.py"):
        data = path.read_bytes()
        assert b"dist-packages" in data, path
        path.write_bytes(data.replace(b"dist-packages", b"site-packages"))
    sysconfig = stdlib / "sysconfig.py"
    text = sysconfig.read_text()
    for before in ("LAYOUT', 'posix_local'", "scheme = 'posix_local'"):
        assert before in text, before
        text = text.replace(before, before.replace("posix_local", "posix_prefix"))
    sysconfig.write_text(text)


def _sysconfig_data(data: bytes, root: Path) -> bytes:
    """The build's variables with the prefix to come where Debian's is."""
    triple = _triple(root).encode()
    data = data.replace(b"/usr/lib/" + triple, b"/usr/lib")
    return re.sub(rb"'/usr(?=['/ ])(?!/bin/install)", b"'" + PLACEHOLDER.encode(), data)


def _pkgconfig(version: str) -> bytes:
    return (
        f"prefix={PLACEHOLDER}\nexec_prefix=${{prefix}}\nlibdir=${{exec_prefix}}/lib\n"
        "includedir=${prefix}/include\n\nName: Python\nDescription: Build a C extension for Python\n"
        f"Requires:\nVersion: {version.rpartition('.')[0]}\nCflags: -I${{includedir}}/python3.11\n"
    ).encode()


def _stdlib(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if not path.is_dir() and not _DROPPED.fullmatch(str(path.relative_to(folder))):
            yield path


def _triple(root: Path) -> str:
    return next(path for path in (root / "usr/lib").glob("*-linux-gnu")).name


def _patched_libraries(root: Path) -> list[Path]:
    """Shared libraries, which find each other, and their links, files first."""
    folders = [*(root / "lib").glob("*-linux-gnu"), *(root / "usr/lib").glob("*-linux-gnu")]
    found = [path for folder in folders for path in folder.glob("lib*.so*")]
    set_rpath((path for path in found if not path.is_symlink()), "$ORIGIN")
    return sorted(found, key=lambda path: (path.is_symlink(), path.name))


def _add_libraries(package: Package, libraries: Iterable[Path]) -> None:
    for path in libraries:
        if path.is_symlink():
            package.link(f"lib/{path.name}", path.resolve().name)
        else:
            package.file(f"lib/{path.name}", path.read_bytes(), executable=True)


def _unpack(debs: Path, names: Iterable[str], arch: str, root: Path) -> str:
    """Unpack packages into one folder; returns the upstream version of the first."""
    root.mkdir(parents=True)
    files = [next(debs.glob(f"{name}_*_{arch}.deb")) for name in names]
    for path in files:
        subprocess.run(["dpkg-deb", "-x", path, root], check=True)
    version = files[0].name.split("_")[1]
    return version.rpartition("%3a")[2].partition("-")[0]
