"""conda packages as image layers, beside what rattler makes of the same packages; foreign bases and architectures."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import artifacts
from lab.conda_channel import Channel
from lab.conda_package import PLACEHOLDER
from lab.conda_trees import MTIME, SCHEME, Item, Node, install, located, nodes_below, nodes_of, package, record_rows
from lab.wheels import make_wheel

from envbuild.environment import load_environment
from envbuild.errors import BuildError
from envbuild.image.blobs import Blobs
from envbuild.image.squashfs.codec import codec_of
from envbuild.layers.bytecode import compiler_for
from envbuild.layers.conda import conda_parts, conda_tree
from envbuild.layers.conda_files import CondaFile, Shared, shared_paths
from envbuild.layers.layer_cache import SegmentCache, TarCache
from envbuild.store.store import Store

from .conftest import NO_DAEMON, Command
from .test_conda import conda_recipe, site
from .test_docker_out import run, under_qemu

PLATFORMS = ["linux-64", "linux-aarch64"]


def packages(channel: Channel, platform: str) -> list[CondaFile]:
    """The newest of each package that has files."""
    found = {}
    for path in sorted(p for sub in (platform, "noarch") for p in channel.folder.glob(f"{sub}/*")):
        if path.name.endswith((".conda", ".tar.bz2")) and "-cuda" not in path.name:
            found[path.name.rsplit("-", 2)[0]] = path
    return [located(path) for path in found.values()]


def both(
    files: Sequence[CondaFile], folder: Path, platform: str = "linux-64"
) -> tuple[dict[str, Node], dict[str, Node], dict[str, bytes]]:
    """The environment as layers hold it, as rattler installs it, and the layers' records."""
    shared = shared_paths(files, [], SCHEME, Store(folder / "store"))
    ours: dict[str, Node] = {}
    records: dict[str, bytes] = {}
    for file in files:
        without = frozenset(shared.without.get(file.name, ()))
        nodes, own = nodes_of(conda_tree(file, SCHEME, MTIME, without))
        assert not ours.keys() & nodes.keys(), "two layers have one path"
        ours |= nodes
        records |= own
    install(files, folder / "prefix", folder / "cache", platform)
    bare = {path: node for path, node in ours.items() if path not in records}
    return bare, nodes_below(folder / "prefix"), records


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_packages_of_a_channel_lie_as_rattler_installs_them(
    conda_channel: Channel, tmp_path: Path, platform: str
) -> None:
    import rattler

    files = packages(conda_channel, platform)
    ours, theirs, records = both(files, tmp_path, platform)
    assert ours == theirs and len(ours) > 10_000
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


# ---- packages that nobody made

# Of a file and a folder of one name rattler refuses some: they are left to the unit tests.
_NAMES = st.sampled_from(["a", "b", "c.py", "d e", "ü"])
_FOLDERS = st.sampled_from(["", "share", "lib", "site-packages", "site-packages/m", "python-scripts", "etc/conda"])
_PIECES = st.sampled_from(
    [PLACEHOLDER.encode(), PLACEHOLDER[:40].encode(), b"\0", b"/lib", b":", b"\n", b"x" * 70_000, b"\xff"]
)  # fmt: skip


@st.composite
def _items(draw: st.DrawFn) -> list[Item]:
    places = st.tuples(_FOLDERS, _NAMES).map(lambda pair: "/".join(filter(None, pair)))
    items: list[Item] = []
    for path in draw(st.lists(places, max_size=6, unique=True)):
        if any(o.path.startswith(f"{path}/") or path.startswith(f"{o.path}/") for o in items):
            continue
        if draw(st.booleans()) or not path:
            data = b"".join(draw(st.lists(_PIECES, max_size=6)))
            prefix = draw(st.sampled_from(["", "text", "binary"]))
            mode = draw(st.sampled_from([0o644, 0o664, 0o755, 0o775, 0o600]))
            if prefix == "text" and data.startswith(b"#!"):
                data = b"\n" + data
            items.append(Item(path, data, mode, prefix=prefix))
        else:
            items.append(Item(path, link=draw(_NAMES), kind=tarfile.SYMTYPE))
    return items


@settings(max_examples=40)
@given(
    st.lists(st.tuples(_items(), st.sampled_from(["", "python", "generic"]),
                       st.sampled_from([".conda", ".tar.bz2"]), st.booleans()), min_size=1, max_size=4)
)  # fmt: skip
def test_any_packages_lie_as_rattler_installs_them(made: list[tuple[list[Item], str, str, bool]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [located(package(folder, [Item("bin/python3.11", b"#!", 0o755)], name="python"))]
        for number, (items, noarch, suffix, chained) in enumerate(made):
            depends = ["python", *([f"p{number - 1} >=1"] if chained and number else [])]
            points = [f"p{number} = m.c:main"] if noarch == "python" else []
            files.append(located(package(
                folder / str(number), items, name=f"p{number}", suffix=suffix, noarch=noarch,
                depends=depends, entry_points=points,
            )))  # fmt: skip
        ours, theirs, _ = both(files, folder)
        assert ours == theirs


# ---- layers of it, and images


def test_layers_are_the_same_with_one_processor_and_in_both_forms_hold_the_same(
    conda_channel: Channel, tmp_path: Path
) -> None:
    compiler = compiler_for("3.11", load_environment())
    files = [located(conda_channel.package(name)) for name in ("tqdm", "jinja2")]
    files.append(located(conda_channel.package("python", "linux-64")))
    made = []
    allowed = os.sched_getaffinity(0)
    for number, processors in enumerate([allowed, {min(allowed)}]):
        store = Store(tmp_path / str(number))
        os.sched_setaffinity(0, processors)
        try:
            parts = conda_parts(files, Shared({}, (), ()), SCHEME, compiler, MTIME, 2)
            tars = [TarCache(store, lambda _: None).part(part) for part in parts]
            shutil.rmtree(store.root / "layers")  # so that the segments come from the packages
            maker = SegmentCache(store, codec_of("zstd"), len(processors), lambda _: None)
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


def test_an_image_of_another_architecture_runs_and_needs_no_python_of_debians(at_site: Command, tmp_path: Path) -> None:
    """Made with nothing emulated; only this test runs its code."""
    conda_recipe(tmp_path, ["numpy", "labtool"])
    line = ["docker", "tiny", "--target", "cpu-aarch64", "--out", "oci:image"]
    done = at_site(*line, "--json")
    assert done.returncode == 0, done.stderr
    assert "not activated in the image: variables that conda's scripts of labtool set" in done.stderr
    again = at_site.json(*line)
    assert again["digest"] == json.loads(done.stdout)["digest"]
    environment = config_of(tmp_path / "image")["config"]["Env"]
    assert {"CONDA_PREFIX=/opt/env", "CONDA_DEFAULT_ENV=/opt/env"} <= set(environment)
    assert not [text for text in environment if text.startswith("VIRTUAL_ENV")]
    tag = json.loads((tmp_path / "image/index.json").read_bytes())["manifests"][0]["annotations"]
    name = tag["org.opencontainers.image.ref.name"]
    run("umoci", "unpack", "--image", f"{tmp_path}/image:{name}", tmp_path / "bundle")
    root = tmp_path / "bundle/rootfs"
    script = "import numpy, ssl, sqlite3, platform, sys; print(platform.machine(), sys.prefix, numpy.ones(2).sum())"
    assert under_qemu(root, script).stdout.split() == ["aarch64", "/opt/env", "2.0"]
    verbose = under_qemu(root, "import json.decoder, numpy.linalg", "-B", PYTHONVERBOSE="1").stderr
    assert "json/__pycache__/decoder.cpython-311.pyc matches" in verbose
    assert not list(root.glob("usr/bin/python3*")) and not list(root.glob("usr/lib/python3*"))
    assert (root / "opt/env/conda-meta/history").read_bytes() == b""
    assert not (root / "opt/env/pyvenv.cfg").exists()


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


def test_the_dockerfile_builder_says_that_it_makes_no_conda_images(at_site: Command, tmp_path: Path) -> None:
    conda_recipe(tmp_path, ["tqdm"])
    done = at_site("docker", "tiny", "--builder", "dockerfile")
    assert done.returncode == 2 and "tiny is made of conda packages" in done.stderr
    assert "--builder dockerfile" in done.stderr


def test_a_damaged_package_gives_no_layer_and_names_itself(conda_channel: Channel, tmp_path: Path) -> None:
    file = located(conda_channel.package("numpy", "linux-64"))
    bad = tmp_path / file.path.name
    data = bytearray(file.path.read_bytes())
    data[len(data) // 2] ^= 1
    bad.write_bytes(data)
    damaged = [CondaFile(file.package, bad, file.size)]
    (part,) = conda_parts(damaged, Shared({}, (), ()), SCHEME, None, MTIME, 1)
    store = Store(tmp_path / "store")
    makers: Mapping[str, Any] = {
        "tar": TarCache(store, lambda _: None),
        "segment": SegmentCache(store, codec_of("zstd"), 2, lambda _: None),
    }
    for maker in makers.values():
        with pytest.raises(BuildError, match=rf"^{file.path.name}: "):
            maker.part(part)
    left = [p for p in store.root.rglob("*") if p.is_file()]
    assert left == []
