"""A real conda channel for tests, made on this machine: packages by conda-forge's names, for both architectures.

Its Python is Debian's, its other packages are the wheels that the recipe pt_cpu locks, and a few tiny ones are made
here for what no wheel shows. rattler writes its index.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lab.conda_package import PLACEHOLDER, PLATFORMS, TIMESTAMP_MS, Metadata, Package, bz2_package, conda_package
from lab.conda_python import missing, python_packages
from lab.conda_wheels import wheel_package

from envbuild.environment import Environment
from envbuild.lock.format import read
from envbuild.store.fetch import WantedWheel, locate_wheels

__all__ = ["Channel", "build_channel", "missing"]

_RECIPE = Path(__file__).resolve().parents[2] / "recipes/pt_cpu"
# What the locks' wheels come from where pip's configuration names no index that has them.
_INDEXES = ("https://download.pytorch.org/whl/cpu",)
_DAY_MS = 86_400_000


@dataclass(frozen=True)
class Channel:
    """A channel below `folder`, which has linux-64, linux-aarch64 and noarch."""

    folder: Path

    def package(self, name: str, subdir: str | None = None) -> Path:
        """The file of the newest package `name`, in `subdir` or wherever it is."""
        from rattler import Version

        found: dict[Path, Version] = {}
        for path in self.folder.glob(f"{subdir or '*'}/{name}-*"):
            stem = path.name.removesuffix(".conda").removesuffix(".tar.bz2")
            own, version, _ = stem.rsplit("-", 2)
            if own == name:
                found[path] = Version(version)
        assert found, f"no package {name} in {subdir or self.folder}"
        return max(sorted(found), key=lambda path: found[path])


def build_channel(folder: Path, environment: Environment) -> Channel:
    """Make the channel in `folder`; it takes about a minute. The wheels come by way of `environment`."""
    from rattler.index import index_fs

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".work-") as work:
        python_packages(folder, Path(work))
    _wheel_packages(folder, environment)
    _accelerated(folder)
    _labtool(folder)
    _labdata(folder)
    asyncio.run(index_fs(folder, force=True))
    with suppress(OSError):
        (folder / ".tmp").rmdir()  # the indexer's, empty
    return Channel(folder)


def _wheel_packages(folder: Path, environment: Environment) -> None:
    done: set[WantedWheel] = set()
    for subdir, arch in PLATFORMS.items():
        lock = read(_RECIPE / f"cpu-{arch}.requirements.txt")
        assert lock is not None
        wanted = [WantedWheel(p.name, p.version, frozenset(p.hashes)) for p in lock.packages]
        found = locate_wheels(wanted, environment, _INDEXES, offline=False)
        for wheel, path in found.items():
            if wheel not in done:  # both locks pin the same pure wheels
                wheel_package(folder, path, subdir)
        done |= found.keys()


def _accelerated(folder: Path) -> None:
    """A pytorch for CUDA without any file; like conda-forge's, it is preferred where its driver is."""
    metadata = Metadata(
        "pytorch",
        "2.13.0",
        "cuda126_lab_py311_200",
        "linux-64",
        depends=["__cuda >=12.6", "python >=3.11,<3.12.0a0"],
        number=200,
        license="BSD-3-Clause",
        summary="nothing but a name",
    )
    with conda_package(folder, metadata):
        pass


def _labtool(folder: Path) -> None:
    """Two versions of a tool, a day apart; the newer one sets a variable on activation."""
    for day, version in enumerate(("1.0", "1.1")):
        metadata = Metadata(
            "labtool",
            version,
            "pyhlab_0",
            "noarch",
            depends=["python >=3.8"],
            noarch="python",
            license="MIT",
            timestamp_ms=TIMESTAMP_MS + day * _DAY_MS,
        )
        with conda_package(folder, metadata) as package:
            package.entry_points.append("labtool = labtool:main")
            _files(
                package,
                f"site-packages/labtool-{version}.dist-info",
                {
                    "METADATA": f"Metadata-Version: 2.1\nName: labtool\nVersion: {version}\n",
                    "INSTALLER": "conda\n",
                    "RECORD": f"labtool.py,,\nlabtool-{version}.dist-info/METADATA,,\n",
                    "entry_points.txt": "[console_scripts]\nlabtool = labtool:main\n",
                },
            )
            program = f"import sys\n\n\ndef main():\n    print('labtool {version}', *sys.argv[1:])\n"
            _files(package, "site-packages", {"labtool.py": program})
            if version == "1.1":
                _files(
                    package,
                    "etc/conda",
                    {
                        "activate.d/labtool_activate.sh": 'export LABTOOL_HOME="$CONDA_PREFIX/share/labtool"\n',
                        "deactivate.d/labtool_deactivate.sh": "unset LABTOOL_HOME\n",
                    },
                )


def _labdata(folder: Path) -> None:
    """A package of the older format with a link, an executable and a file that names the prefix."""
    metadata = Metadata("labdata", "1.0", "0", "noarch", noarch="generic", license="CC0-1.0")
    with bz2_package(folder, metadata) as package:
        settings = f"root = {PLACEHOLDER}/share/labdata\n".encode()
        package.file("share/labdata/settings.conf", settings, prefix="text")
        package.link("share/labdata/default.conf", "settings.conf")
        script = f"#!/bin/sh\nexec cat {PLACEHOLDER}/share/labdata/default.conf\n".encode()
        package.file("bin/labdata", script, executable=True, prefix="text")


def _files(package: Package, folder: str, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        package.file(f"{folder}/{name}", text.encode())
