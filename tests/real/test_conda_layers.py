"""Image layers of conda packages, beside what rattler makes of the same packages; foreign bases and architectures."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lab import artifacts
from lab.conda_channel import Channel
from lab.conda_package import PLACEHOLDER
from lab.conda_trees import (
    MTIME,
    SCHEME,
    Item,
    Located,
    Node,
    install,
    linked,
    located,
    nodes_below,
    nodes_of,
    package,
    record_rows,
)
from lab.wheels import make_wheel

from envbuild.base.errors import BuildError
from envbuild.build import conda_install
from envbuild.build.conda_layers import conda_parts
from envbuild.build.image_layers import check_paths
from envbuild.contract.conda_meta import conda_packages
from envbuild.image.layout import Blobs
from envbuild.image.limits import ImageLimits
from envbuild.image.squashfs.model import codec_of
from envbuild.interpreter import read_python
from envbuild.layers.bytecode import Compiler, compiler_of
from envbuild.layers.layer_cache import TarCache, recorded
from envbuild.layers.segment_cache import SegmentCache
from envbuild.layers.wheel import WheelFile
from envbuild.store.store import Store

from .conftest import NO_DAEMON, Command, link_tree
from .test_conda import conda_recipe, site
from .test_docker_out import run, under_qemu

PLATFORMS = ["linux-64", "linux-aarch64"]


def packages(channel: Channel, platform: str) -> list[Located]:
    """The newest of each package that has files, without pytorch: it is most of the bytes, and numpy's package
    has files of the same kinds."""
    found = {}
    for path in sorted(p for sub in (platform, "noarch") for p in channel.folder.glob(f"{sub}/*")):
        if path.name.endswith((".conda", ".tar.bz2")) and not path.name.startswith("pytorch-"):
            found[path.name.rsplit("-", 2)[0]] = path
    return [located(path) for path in found.values()]


def in_layers(
    files: Sequence[Located], store: Store, compiler: Compiler | None = None
) -> tuple[dict[str, Node], dict[str, bytes]]:
    """The files of `files` in layers, a layer each, and their records."""
    ours: dict[str, Node] = {}
    records: dict[str, bytes] = {}
    with linked(files, store) as found:
        for part in conda_parts(found, SCHEME, compiler, MTIME, len(files)):
            nodes, own = nodes_of(part.tree())
            assert not ours.keys() & nodes.keys(), "two layers have one path"
            ours |= {path: node for path, node in nodes.items() if path not in own}
            records |= own
    return ours, records


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_packages_of_a_channel_lie_as_rattler_installs_them(
    conda_channel: Channel, tmp_path: Path, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rattler

    files = packages(conda_channel, platform)
    ours, records = in_layers(files, Store(tmp_path / "store"))
    install(files, tmp_path / "prefix", tmp_path / "cache", platform)
    assert ours == nodes_below(tmp_path / "prefix") and len(ours) > 4_500
    # The records too, but for bytecode and for what names places of the host.
    metas = {f"conda-meta/{path.name}": path for path in tmp_path.glob("prefix/conda-meta/*.json")}
    assert records.keys() == metas.keys() and len(records) == len(files)
    rows = {
        path: row
        for path, row in record_rows(p.read_bytes() for p in metas.values()).items()
        if "__pycache__" not in path
    }
    assert record_rows(records.values()) == rows
    for name, data in records.items():
        place = tmp_path / Path(name).name
        place.write_bytes(data)
        record, other = rattler.PrefixRecord.from_path(place), json.loads(metas[name].read_bytes())
        told = json.loads(data)
        same = ("name", "version", "build", "build_number", "depends", "sha256", "size", "fn")
        assert {key: told[key] for key in same} == {key: other[key] for key in same}
        assert record.name.normalized == told["name"] and str(record.url).startswith("https://")
        assert str(tmp_path) not in data.decode() and str(conda_channel.folder) not in data.decode()


# ---- packages made by hand


def by_hand(folder: Path) -> list[Located]:
    """A python, and a tool that replaces a file of it and has one of each kind of thing."""
    script = f"#!{PLACEHOLDER}/bin/python\n".encode()
    binary = f"\x7fELF{PLACEHOLDER}/lib:{PLACEHOLDER}/x\0end".encode()
    python = [
        Item("bin/python3.11", b"#!", 0o755),
        Item("lib/python3.11/os.py", b"x = 1\n"),
        Item("lib/python3.11/__pycache__/os.cpython-311.pyc", b"stale"),
        Item("bin/x", b"python's"),
        Item("lib/x.so.1", binary, 0o775, prefix="binary"),
        Item("lib/x.so", link="x.so.1", kind=tarfile.SYMTYPE),
        Item("lib/x.pc", f"prefix={PLACEHOLDER}".encode(), prefix="text"),
        Item("lib/a", b"same", 0o775),
        Item("lib/b", link="lib/a", kind=tarfile.LNKTYPE),
    ]
    tool = [
        Item("site-packages/tool/cli.py", b"class App: pass\n"),
        Item("site-packages/only.pyc", b"no source"),
        Item("site-packages/lab-1.0.dist-info/RECORD", b"a.py,,\n"),
        Item("python-scripts/old-tool", script, 0o775, prefix="text"),
        Item("share/doc.txt", b"doc", 0o600),
        Item("bin/x", b"the tool's"),
        Item("etc/conda/activate.d/m.sh", b""),
    ]
    made = [
        package(folder, python, name="python"),
        package(folder, tool, noarch="python", depends=["python"], entry_points=["tool = tool.cli:App.run"]),
    ]
    return [located(path) for path in made]


@pytest.mark.parametrize("mode", ["hardlink", "copy"])
def test_files_have_fixed_modes_and_records_name_what_the_image_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(conda_install, "link_mode", lambda *_: mode)
    files = by_hand(tmp_path)
    nodes, records = in_layers(files, Store(tmp_path / "store"))
    assert {path: node.mode for path, node in nodes.items() if node.kind == "file"} == {
        "bin/python3.11": 0o755,
        "lib/python3.11/os.py": 0o644,
        "lib/x.so.1": 0o755,
        "lib/x.pc": 0o644,
        "lib/a": 0o755,
        "lib/b": 0o755,
        "lib/python3.11/site-packages/tool/cli.py": 0o644,
        "lib/python3.11/site-packages/only.pyc": 0o644,
        "lib/python3.11/site-packages/lab-1.0.dist-info/RECORD": 0o644,
        "bin/old-tool": 0o755,
        "bin/tool": 0o755,
        "bin/x": 0o644,
        "share/doc.txt": 0o644,
        "etc/conda/activate.d/m.sh": 0o644,
    }
    assert nodes["lib/x.so"] == Node("symlink", 0, "x.so.1")
    assert record_rows(records.values()).keys() == nodes.keys()
    assert "variables that conda's scripts of lab set" in capfd.readouterr().err
    python, archive = files[0]
    record = json.loads(records["conda-meta/python-3.11.2-0.json"])
    assert record["url"] == python.url and record["channel"] == python.channel
    assert (record["md5"], record["sha256"], record["size"]) == (python.md5, python.sha256, archive.stat().st_size)
    assert record["link"] == {"source": "", "type": 1} and "bin/x" not in record["files"]
    for data in records.values():
        assert str(tmp_path).encode() not in data and b"file:" not in data
        for row in json.loads(data)["paths_data"]["paths"]:
            if nodes[row["_path"]].kind == "file":
                assert nodes[row["_path"]].what == (
                    row.get("sha256_in_prefix") or row.get("sha256", nodes[row["_path"]].what)
                )
    # A link of either kind, and another host, make the same bytes.
    again, others = in_layers(files, Store(tmp_path / "other"))
    assert (again, others) == (nodes, records)


def test_modules_of_the_standard_library_and_of_packages_get_bytecode(tmp_path: Path) -> None:
    compiler = compiler_of(read_python(sys.executable))
    nodes, _ = in_layers(by_hand(tmp_path), Store(tmp_path / "store"), compiler)
    assert sorted(path for path in nodes if re.search("__pycache__", path)) == [
        f"lib/python3.11/__pycache__/os.{compiler.tag}.pyc",
        f"lib/python3.11/site-packages/tool/__pycache__/cli.{compiler.tag}.pyc",
    ]


def test_the_digest_of_a_package_is_that_which_a_survey_finds_by_its_record(tmp_path: Path) -> None:
    found: list[tuple[str, str, str]] = []
    with linked(by_hand(tmp_path), Store(tmp_path / "store")) as packages:
        (part,) = conda_parts(packages, SCHEME, None, MTIME, 0)
        _, records = nodes_of(recorded(part.tree(), found))
    surveyed = conda_packages([json.loads(data) for data in records.values()])
    # The Python distribution in the tool is the conda package's.
    assert sorted(found) == sorted((one.name, one.version, one.record) for one in surveyed)
    assert {name for name, _, _ in found} == {"lab", "python"}


def test_layers_that_the_store_has_need_no_archive(tmp_path: Path) -> None:
    store, files = Store(tmp_path / "store"), by_hand(tmp_path)
    made = []
    for _ in range(2):
        with linked(files, store) as packages:
            parts = conda_parts(packages, SCHEME, None, MTIME, 1)
            made.append([TarCache(store, lambda _: None).part(part) for part in parts])
        for _, path in files:
            path.unlink(missing_ok=True)
        shutil.rmtree(store.root / "conda/pkgs", ignore_errors=True)
    assert made[0] == made[1]


def test_a_file_that_changed_in_the_store_is_unpacked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, files = Store(tmp_path / "store"), by_hand(tmp_path)
    with linked(files, store) as packages:
        (part,) = conda_parts(packages, SCHEME, None, MTIME, 0)
    changed = store.root / "conda/pkgs/lab-1.0-0/share/doc.txt"
    before, data = changed.stat(), changed.read_bytes()
    changed.write_bytes(b"DOC")
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a failing disk changes it
    with linked(files, store) as packages:
        (part,) = conda_parts(packages, SCHEME, None, MTIME, 0)
        TarCache(store, lambda _: None).part(part)
    assert changed.read_bytes() == data
    assert "lab-1.0-0: damaged in the store" in capsys.readouterr().err


def test_a_wheel_that_would_replace_a_file_of_conda_is_refused_and_both_named(tmp_path: Path) -> None:
    wheels = [WheelFile("tool", "2.0", make_wheel(tmp_path, "tool", "2.0"), "0" * 64, 1)]
    item = Item("lib/python3.11/site-packages/tool/__init__.py", b"")
    store = Store(tmp_path / "store")
    with (
        linked([located(package(tmp_path, [item], name="conda-tool"))], store) as packages,
        pytest.raises(BuildError, match=r"tool 2.0, installed by pip.* package conda-tool: /opt/env/lib"),
    ):
        check_paths([], wheels, packages.packages, SCHEME, store)


def test_packages_that_cannot_be_in_an_image_are_refused_by_name(tmp_path: Path) -> None:
    index = {
        "name": "python",
        "version": "3.11.2",
        "build": "0",
        "build_number": 0,
        "depends": [],
        "subdir": "linux-64",
    }
    index["python_site_packages_path"] = "lib/python3.11t/site-packages"
    info = {"index.json": json.dumps(index).encode()}
    refused = [
        (package(tmp_path, [], name="python", info=info), r"python3\.11t"),
        (package(tmp_path, [], rows=[Item("lib/a", b"content").row()]), r"lib/a"),
        (package(tmp_path, [Item("../../evil", b"")], name="outside"), r"outside"),
    ]
    for number, (path, said) in enumerate(refused):
        with pytest.raises(BuildError, match=said), linked([located(path)], Store(tmp_path / f"store{number}")):
            pass
    assert not list(tmp_path.rglob("evil"))


# ---- layers of them, and images


def test_layers_are_the_same_with_one_processor_and_in_both_forms_hold_the_same(
    conda_channel: Channel, tmp_path: Path
) -> None:
    compiler = compiler_of(read_python(sys.executable))
    files = [located(conda_channel.package(name)) for name in ("tqdm", "jinja2")]
    files.append(located(conda_channel.package("python", "linux-64")))
    made = []
    allowed = os.sched_getaffinity(0)
    for number, processors in enumerate([allowed, {min(allowed)}]):
        store = Store(tmp_path / str(number))
        os.sched_setaffinity(0, processors)
        try:
            with linked(files, store) as packages:
                parts = conda_parts(packages, SCHEME, compiler, MTIME, 2)
                tars = [TarCache(store, lambda _: None).part(part) for part in parts]
                shutil.rmtree(store.root / "layers")  # so that the segments come from the packages
                maker = SegmentCache(store, codec_of("zstd"), len(processors), lambda _: None, ImageLimits())
                segments = [maker.part(part) for part in parts]
        finally:
            os.sched_setaffinity(0, allowed)
        assert [t.distributions for t in tars] == [s.distributions for s in segments]
        digests = [s.segment.path.read_bytes() for s in segments]
        made.append(([t.layer for t in tars], digests))
    assert made[0] == made[1]


@pytest.fixture
def at_site(tmp_path: Path, session_store: Path, conda_channel: Channel) -> Command:
    """The command at a site whose conda-forge is the lab's channel, as a folder."""
    variables = site(tmp_path, conda_channel.folder.as_uri())
    return Command(tmp_path, {"ENVBUILD_STORE": str(session_store), **variables, **NO_DAEMON})


def config_of(layout: Path) -> dict[str, Any]:
    blobs = Blobs(layout / "blobs")
    index = json.loads((layout / "index.json").read_bytes())
    manifest = json.loads(blobs.read(index["manifests"][0]["digest"]))
    found: dict[str, Any] = json.loads(blobs.read(manifest["config"]["digest"]))
    return found


def test_an_image_of_another_architecture_runs_has_no_python_of_debians_and_is_the_same_from_another_store(
    at_site: Command, session_store: Path, tmp_path: Path
) -> None:
    """Made with nothing emulated; only this test runs its code. A .sqsh has the same layers: see above."""
    conda_recipe(tmp_path, ["numpy", "labtool"])
    line = ["docker", "tiny", "--target", "cpu-aarch64", "--out", "oci:image"]
    done = at_site(*line, "--json")
    assert done.returncode == 0, done.stderr
    assert "not activated in the image: variables that conda's scripts of labtool set" in done.stderr
    # Packages need not be fetched again; all layers are made anew.
    link_tree(session_store / "blobs", tmp_path / "store/blobs")
    again = at_site.json(*line[:-1], "oci:again", ENVBUILD_STORE=str(tmp_path / "store"))
    assert again["digest"] == json.loads(done.stdout)["digest"]
    about = at_site.json("inspect", "oci:image")
    assert about["platform"] == "linux/arm64"
    assert {package["subdir"] for package in about["conda_packages"]} - {"noarch"} == {"linux-aarch64"}
    environment = config_of(tmp_path / "image")["config"]["Env"]
    assert {"CONDA_PREFIX=/opt/env", "CONDA_DEFAULT_ENV=/opt/env", "PYTHONNOUSERSITE=1"} <= set(environment)
    assert not [text for text in environment if text.startswith("VIRTUAL_ENV")]
    tag = json.loads((tmp_path / "image/index.json").read_bytes())["manifests"][0]["annotations"]
    name = tag["org.opencontainers.image.ref.name"]
    run("umoci", "unpack", "--image", f"{tmp_path}/image:{name}", tmp_path / "bundle")
    root = tmp_path / "bundle/rootfs"
    script = "import numpy, ssl, sqlite3, platform, sys; print(platform.machine(), sys.prefix, numpy.ones(2).sum())"
    assert under_qemu(root, script).stdout.split() == ["aarch64", "/opt/env", "2.0"]
    assert not list(root.glob("usr/bin/python3*")) and not list(root.glob("usr/lib/python3*"))
    assert (root / "opt/env/conda-meta/history").read_bytes() == b""
    assert not (root / "opt/env/pyvenv.cfg").exists()
    verbose = under_qemu(root, "import json.decoder, numpy.linalg", "-B", PYTHONVERBOSE="1").stderr
    # On a host without Python 3.11 the image has no bytecode; stderr says so, and the test is skipped.
    assert "json/__pycache__/decoder.cpython-311.pyc matches" in verbose, done.stderr


def test_an_existing_base_needs_no_python_and_keeps_its_variables_and_pip_adds_its_part(
    at_site: Command, tmp_path: Path
) -> None:
    blobs = Blobs(tmp_path / "blobs")
    below = artifacts.layer(blobs, {"etc/os-release": "ID=lab\n", "usr/bin/tool": "x"})
    arch = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    variables = ["PATH=/tool/bin", "VIRTUAL_ENV=/old", "KEPT=1"]
    image, _ = artifacts.image(blobs, [below], arch=arch, Env=variables)
    extra = 'requirements = ["addon==2.0"]\n[image]\nbase = "oci:../../base:1"'
    place = conda_recipe(tmp_path, ["tqdm"], extra)
    artifacts.layout(tmp_path / "base", blobs, [(image, "1")])
    make_wheel(tmp_path / "wheels", "addon", "2.0", requires=["tqdm"])
    pip = {"PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_NO_INDEX": "1"}
    made = at_site.json("docker", "tiny", "--no-verify", "--out", "oci:image", **pip)
    config = config_of(tmp_path / "image")
    titles = [one["created_by"].removeprefix("envbuild: ") for one in config["history"]]
    assert titles[-2] == "addon 2.0" and "tqdm" in " ".join(titles[:-2]), "conda's tqdm will do"
    assert made["digest"] and config["rootfs"]["diff_ids"][0] == below.diff_id
    found = dict(text.split("=", 1) for text in config["config"]["Env"])
    assert found["PATH"] == "/opt/env/bin:/tool/bin" and found["KEPT"] == "1"
    assert found["CONDA_PREFIX"] == "/opt/env" and "VIRTUAL_ENV" not in found
    assert config["config"]["Labels"]["org.envbuild.environment"] == "conda"
    assert "python" not in (place / f"cpu-{os.uname().machine}.image.toml").read_text()
