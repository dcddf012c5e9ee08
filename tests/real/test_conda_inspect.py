"""inspect and diff on conda environments that rattler and envbuild's layers make of the same packages."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rattler
from lab import artifacts
from lab.conda_package import PLACEHOLDER, Metadata, conda_package
from lab.conda_trees import linked
from rattler.index import index_fs

from envbuild.build.conda_layers import conda_parts
from envbuild.environment import Environment
from envbuild.image.layer import write_layer
from envbuild.image.layout import Blobs
from envbuild.inspect.compare import Comparison, compare
from envbuild.inspect.reader import open_artifact
from envbuild.layers.wheel import Scheme
from envbuild.lock.conda import CondaPackage
from envbuild.run_environment import load_environment
from envbuild.store.store import Store

SITE = "lib/python3.11/site-packages"


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return load_environment({"ENVBUILD_STORE": str(tmp_path / "store"), "HOME": str(tmp_path)})


def channel(folder: Path, tool: bytes = b"1") -> Path:
    """A channel with a python and a noarch tool in it, with all that names its place when it is installed."""
    place = PLACEHOLDER.encode()
    with conda_package(folder, Metadata("python", "3.11.9", "0_lab", "linux-64")) as package:
        package.file("bin/python3.11", b"\x7fELF" + place + b"\0end", executable=True, prefix="binary")
        package.link("bin/python", "python3.11")
        package.file("lib/python3.11/os.py", b"1")
        package.file("share/in-both", b"1")
        package.file("lib/python3.11/__pycache__/os.cpython-311.pyc", b"1")
        package.file("lib/pkgconfig/python.pc", b"prefix=" + place + b"\n", prefix="text")
    meta = Metadata("tool", "1.0", "py_0", "noarch", depends=["python"], noarch="python")
    with conda_package(folder, meta) as package:
        info = "site-packages/tool-1.0.dist-info"
        package.file("site-packages/tool/__init__.py", tool)
        package.file("share/in-both", b"2")
        package.file(f"{info}/METADATA", b"Name: tool\nVersion: 1.0\n")
        package.file(f"{info}/RECORD", b"tool/__init__.py,,\n")
        script = b"#!" + place + b"/bin/python\n"
        package.file("python-scripts/tool.sh", script, executable=True, prefix="text")
        package.entry_points.append("tool = tool:main")
    asyncio.run(index_fs(folder, force=True))
    return folder


def installed(place: Path, channel: Path, cache: Path) -> Path:
    """The environment that rattler makes of all packages of the channel."""
    records: Sequence[Any] = asyncio.run(
        rattler.solve(
            [rattler.Channel(channel.as_uri())],
            ["python", "tool"],
            rattler.Gateway(cache_dir=cache / "data"),
            ["linux-64", "noarch"],  # type: ignore[list-item]
        )
    )
    asyncio.run(
        rattler.install(
            list(records), place, cache / "packages", platform=rattler.Subdir("linux-64"), show_progress=False
        )
    )
    return place


def imaged(place: Path, channel: Path, blobs: Blobs, prefix: str) -> Path:
    """An image with the same packages in layers."""
    files = []
    for file in sorted(channel.glob("*/*.conda")):
        name, version, build = file.stem.split("-")
        data = file.read_bytes()
        package = CondaPackage(
            name,
            version,
            build,
            file.parent.name,
            f"https://conda.anaconda.org/lab/{file.parent.name}/{file.name}",
            hashlib.md5(data).hexdigest(),
            hashlib.sha256(data).hexdigest(),
            depends=("python",) if name == "tool" else (),
        )
        files.append((package, file))
    scheme = Scheme(prefix, "3.11")
    with linked(files, Store(blobs.root.parent / "store"), scheme) as packages:
        layers = [write_layer(part.tree(), blobs) for part in conda_parts(packages, scheme, None, 0, len(files))]
    run = {"Env": [f"PATH=/{prefix}/bin:/usr/bin"]}
    return artifacts.layout(place, blobs, [(artifacts.image(blobs, layers, **run)[0], None)])


def diff(one: Path, other: Path, environment: Environment) -> Comparison:
    with open_artifact(str(one), environment, None) as left, open_artifact(str(other), environment, None) as right:
        return compare(left, right, files=True)


def test_one_set_of_packages_is_the_same_wherever_and_by_whomever_it_is_installed(
    tmp_path: Path, environment: Environment
) -> None:
    packages = channel(tmp_path / "channel")
    one = installed(tmp_path / "one", packages, tmp_path / "cache")
    # Longer than a kernel reads of a script's first line: that line is another one then.
    other = installed(tmp_path / ("long" * 30), packages, tmp_path / "cache")
    images = [
        imaged(tmp_path / prefix.replace("/", "-"), packages, Blobs(tmp_path / "blobs"), prefix)
        for prefix in ("opt/env", "opt/another/conda")
    ]
    assert (other / "bin/tool.sh").read_bytes().startswith(b"#!/bin/sh\n")
    for place in (other, *images):
        found = diff(one, place, environment)
        assert found.equal and found.files == (), found
    with open_artifact(str(images[1]), environment, None) as opened:
        told = [(p.name, p.location, p.channel) for p in opened.contents(hashes=False).own_conda]
    lab = "https://conda.anaconda.org/lab"
    assert told == [(n, "opt/another/conda", lab) for n in ("python", "tool")]


@pytest.mark.parametrize(
    "path", ["bin/tool", "bin/tool.sh", "bin/python3.11", "lib/pkgconfig/python.pc", f"{SITE}/tool/__init__.py"]
)
def test_a_file_altered_after_installing_is_found(tmp_path: Path, environment: Environment, path: str) -> None:
    packages = channel(tmp_path / "channel")
    one, other = (installed(tmp_path / n, packages, tmp_path / "cache") for n in ("one", "other"))
    data = (other / path).read_bytes()
    (other / path).unlink()  # it may be a link into the cache
    (other / path).write_bytes(data[:-1] + b"!")
    (other / path).chmod(0o755 if path.startswith("bin/") else 0o644)
    found = diff(one, other, environment)
    assert [change.name for change in found.files or ()] == [path] and not found.conda


def test_a_package_rebuilt_under_its_old_name_is_found(tmp_path: Path, environment: Environment) -> None:
    one, other = (
        installed(tmp_path / f"env{n}", channel(tmp_path / f"c{n}", n.encode()), tmp_path / f"k{n}") for n in "12"
    )
    found = diff(one, other, environment)
    assert [(c.name, c.before, c.after) for c in found.conda] == [("tool", "1.0 py_0", "1.0 py_0")]
    assert [change.name for change in found.files or ()] == [f"{SITE}/tool/__init__.py"]
