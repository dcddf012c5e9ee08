"""The manifest of an image: made from its layers, written into it, compared with what is read from outside."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.gpu_files import fatbin

from envbuild.base.errors import BuildError, VerificationError
from envbuild.base.packages import digest_of
from envbuild.build.image_layers import rows_of_layers, without_stale_bytecode
from envbuild.build.squash_files import composed, write_sqsh
from envbuild.contract.image_manifest import (
    FILE_NAME,
    OCI,
    SQUASHFS,
    FileManifest,
    PathRow,
    compare,
    parse,
    render,
)
from envbuild.image.entry import CHAR, DIR, FILE, HARDLINK, SYMLINK, Entry, Tree
from envbuild.image.layer import with_parents
from envbuild.image.limits import ImageLimits
from envbuild.image.squashfs.model import codec_of
from envbuild.image.squashfs.read import SquashfsImage
from envbuild.image.squashfs.segment import of_entry
from envbuild.image.squashfs.unpack import unpack
from envbuild.image.tar import Member
from envbuild.interpreter import read_python
from envbuild.layers.bytecode import Compiler, compiler_of, with_bytecode
from envbuild.layers.layer_cache import LayerRequest, TarCache
from envbuild.layers.segment_cache import SegmentCache
from envbuild.store.store import Store
from envbuild.verify.outside import read_squashfs
from envbuild.verify.survey import survey

SITE = "opt/env/lib/python3.11/site-packages"
ELF = b"\x7fELF\x02\x01" + bytes(12) + (62).to_bytes(2, "little") + bytes(40)
BASE = {
    "usr/lib/python3.11/os.py": b"import sys\n",
    "usr/lib/python3.11/__pycache__/os.cpython-311.pyc": b"code of os",
    "usr/bin/su": b"su",
    "usr/bin/python3.11": ELF,
}
ENVIRONMENT = {
    f"{SITE}/numpy/__init__.py": b"__version__ = '2.0'\n",
    f"{SITE}/numpy/core.so": ELF + fatbin("compute_80", "sm_80"),
    f"{SITE}/numpy-2.0.dist-info/RECORD": b"numpy/__init__.py,,\nnumpy/core.so,,\nnumpy-2.0.dist-info/RECORD,,\n",
    "opt/env/bin/torchrun": b"#!/opt/env/bin/python\n",
    "opt/env/pyvenv.cfg": b"home = /usr/bin\n",
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def row(data: bytes, mode: int = 0o644) -> PathRow:
    return PathRow(FILE, mode, size=len(data), value=sha256(data))


def members(files: Mapping[str, bytes], *others: Entry) -> list[Member]:
    found = [of_entry(entry) for entry in others]
    for path, data in files.items():
        member = of_entry(Entry(path, FILE, 0o755 if "/bin/" in path else 0o644, len(data)))
        member.sha256 = sha256(data)
        found.append(member)
    return found


LINK = Entry("bin", SYMLINK, target="usr/bin")
ROWS = rows_of_layers([members(BASE, LINK), members(ENVIRONMENT)], None)
MANIFEST = parse(render(OCI, ROWS), "manifest")


def test_rows_are_those_of_the_merged_layers() -> None:
    assert ROWS["usr/bin/su"] == row(b"su", 0o755) and ROWS["bin"] == PathRow(SYMLINK, 0o777, value="usr/bin")
    assert ROWS["usr"] == PathRow(DIR) and "" not in ROWS
    upper = members({"usr/bin/.wh.su": b"", "usr/lib/python3.11/os.py": b"other"}, Entry("dev", DIR, 0o700, uid=3))
    upper.append(of_entry(Entry("usr/bin/again", HARDLINK, target="usr/bin/python3.11")))
    now = rows_of_layers([members(BASE), upper], None)
    assert "usr/bin/su" not in now and now["usr/lib/python3.11/os.py"] == row(b"other")
    assert now["usr/bin/again"] == now["usr/bin/python3.11"] and now["dev"] == PathRow(DIR, 0o700, 3)


# Every plant of a hostile image, and how the report names it.
PLANTS: dict[str, tuple[Mapping[str, PathRow | None], str, str]] = {
    "poisoned bytecode": (
        {"usr/lib/python3.11/__pycache__/os.cpython-311.pyc": row(b"evil of os")},
        "altered",
        "/usr/lib/python3.11/__pycache__/os.cpython-311.pyc",
    ),
    "added bytecode": (
        {f"{SITE}/numpy/__pycache__/__init__.cpython-311.pyc": row(b"x")},
        "unowned",
        f"/{SITE}/numpy/__pycache__/__init__.cpython-311.pyc",
    ),
    "edited standard library": (
        {"usr/lib/python3.11/os.py": row(b"evil    s\n")},
        "altered",
        "/usr/lib/python3.11/os.py",
    ),
    "sitecustomize of the base": (
        {"usr/lib/python3.11/sitecustomize.py": row(b"x")},
        "unowned",
        "/usr/lib/python3.11/sitecustomize.py",
    ),
    "a library folder": ({"usr/local/lib/libc10.so": row(ELF)}, "unowned", "/usr/local/lib/libc10.so"),
    "another torchrun in PATH": ({"usr/local/bin/torchrun": row(b"x", 0o755)}, "unowned", "/usr/local/bin/torchrun"),
    "a linked package": (
        {
            f"{SITE}/numpy": PathRow(SYMLINK, 0o777, value="/tmp/numpy"),
            f"{SITE}/numpy/__init__.py": None,
            f"{SITE}/numpy/core.so": None,
        },
        "altered",
        f"/{SITE}/numpy",
    ),
    "a setuid shell": ({"usr/bin/su": row(b"su", 0o4755)}, "altered", "/usr/bin/su"),
    "another owner": ({"usr/bin/su": replace(row(b"su", 0o755), uid=1000)}, "altered", "/usr/bin/su"),
    "capabilities": (
        {"usr/bin/su": replace(row(b"su", 0o755), xattrs=(("security.capability", b"\1"),))},
        "altered",
        "/usr/bin/su",
    ),
    "a device": ({"srv/mem": PathRow(CHAR, 0o666, value="1,1")}, "unowned", "/srv/mem"),
    "a missing file": ({f"{SITE}/numpy/core.so": None}, "missing", f"/{SITE}/numpy/core.so"),
    "another interpreter": ({"opt/env/pyvenv.cfg": row(b"home = /usr/sbin")}, "altered", "/opt/env/pyvenv.cfg"),
    "a start-up file": ({f"{SITE}/a.pth": row(b"import os")}, "unowned", f"/{SITE}/a.pth"),
}


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("form", [OCI, SQUASHFS])
def test_each_plant_is_named(plant: str, form: str) -> None:
    changes, kind, name = PLANTS[plant]
    planted = {path: one for path, one in {**ROWS, **changes}.items() if one is not None}
    report = compare(replace(MANIFEST, form=form), planted, form)
    assert name in getattr(report, kind)
    clean = compare(replace(MANIFEST, form=form), ROWS, form)
    assert not (clean.missing or clean.altered or clean.unowned) and clean.files == 9


def test_what_a_daemon_adds_to_each_container_is_no_difference() -> None:
    added = {".dockerenv": row(b""), "etc/hosts": row(b"x"), "dev/console": PathRow(CHAR), "proc": PathRow(DIR, 0o555)}
    report = compare(MANIFEST, {**ROWS, **added}, OCI)
    assert not (report.missing or report.altered or report.unowned)
    assert compare(replace(MANIFEST, form=SQUASHFS), {**ROWS, **added}, SQUASHFS).unowned == [
        "/.dockerenv",
        "/dev/console",
        "/etc/hosts",
        "/proc",
    ]


def test_a_squashfs_of_another_tool_may_change_owners_and_modes_and_nothing_else() -> None:
    theirs = {path: replace(one, uid=5, mode=one.mode | 0o200) for path, one in ROWS.items()}
    theirs |= {".singularity.d/env/90-environment.sh": row(b"x", 0o755), "etc/rc": row(b"x")}
    report = compare(MANIFEST, theirs, SQUASHFS)
    assert not (report.missing or report.altered or report.unowned)
    for path, changed in {
        "usr/bin/su": row(b"su", 0o4755),
        "usr/lib/python3.11/os.py": row(b"import sys\n", 0o755),
        "opt/env/pyvenv.cfg": row(b"x"),
        "bin": PathRow(SYMLINK, 0o777, value="/tmp"),
    }.items():
        assert compare(MANIFEST, {**theirs, path: changed}, SQUASHFS).altered == [f"/{path}"]


rows = st.builds(
    PathRow,
    st.sampled_from([FILE, DIR, SYMLINK]),
    st.integers(0, 0o7777),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 1 << 60),
    st.text(max_size=9),
    st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=3)), max_size=2, unique_by=lambda x: x[0]).map(
        lambda some: tuple(sorted(some))
    ),
)
paths = st.text(st.characters(codec="utf-8") | st.just("\udcff"), min_size=1, max_size=9)


@given(st.dictionaries(paths, rows, max_size=6), st.sampled_from([OCI, SQUASHFS]))
def test_what_is_written_is_read_back(some: dict[str, PathRow], form: str) -> None:
    text = render(form, some)
    assert parse(text, "x") == FileManifest(form, some, digest_of(text))
    assert render(form, dict(reversed(some.items()))) == text


@given(st.binary(max_size=80) | st.integers(2, 99).map(lambda at: render(OCI, ROWS)[:-at]))
def test_a_damaged_manifest_is_an_error_that_names_it(text: bytes) -> None:
    with pytest.raises(BuildError, match=r"^/opt/x: invalid"):
        parse(text, "/opt/x")


def layer(files: Mapping[str, bytes], *others: Entry) -> LayerRequest:
    def tree() -> Tree:
        folders = sorted({str(parent) for path in files for parent in list(Path(path).parents)[:-1]})
        for path in folders:
            yield Entry(path, DIR, 0o755), None
        for path, data in files.items():
            yield Entry(path, FILE, 0o755 if "/bin/" in path else 0o644, len(data)), io.BytesIO(data)
        for entry in others:
            yield entry, None

    return LayerRequest("a layer", sha256(repr((sorted(files.items()), others)).encode()), tree)


def test_both_caches_know_the_digest_of_each_file_of_a_layer(tmp_path: Path) -> None:
    part = layer({**BASE, "empty": b"", "large": bytes(300_000)}, LINK)
    wanted = {
        **{path: sha256(data) for path, data in BASE.items()},
        "empty": sha256(b""),
        "large": sha256(bytes(300_000)),
    }
    tars = TarCache(Store(tmp_path / "tars"), print)
    segments = SegmentCache(Store(tmp_path / "segments"), codec_of("zstd"), 1, print, ImageLimits())
    for _ in range(2):  # written, and found again
        for found in (tars.members(tars.part(part)), segments.members(segments.part(part))):
            assert {one.name: one.sha256 for one in found if one.kind == FILE} == wanted
    # A layer of an existing image is read for its digests.
    made = tars.part(part)
    base = TarCache(tars.store, print).blob(made.layer, "layer 1 of 1")
    assert {one.name.rstrip("/"): one.sha256 for one in tars.members(base) if one.kind == FILE} == wanted


def test_a_list_of_members_that_was_replaced_is_not_used(tmp_path: Path) -> None:
    store, part = Store(tmp_path / "store"), layer(BASE)
    tars = TarCache(store, print)
    tars.part(part)
    (table,) = (tmp_path / "store/layers").glob("*.members")
    good = table.read_bytes()
    table.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert {one.sha256 for one in tars.members(tars.part(part)) if one.kind == FILE} == set(map(sha256, BASE.values()))
    assert table.read_bytes() == good


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A squashfs of two layers; the upper one has a manifest, which the one of the tree replaces."""
    store = Store(tmp_path / "store")
    maker = SegmentCache(store, codec_of("zstd"), 1, lambda _: None, ImageLimits())
    hardlink = Entry(f"{SITE}/numpy/same.so", HARDLINK, target=f"{SITE}/numpy/core.so")
    python = Entry("opt/env/bin/python", SYMLINK, target="../../../bin/python3.11")
    upper = layer({**ENVIRONMENT, FILE_NAME: b"old"}, hardlink, python)
    layers = [maker.part(layer(BASE, LINK)), maker.part(upper)]
    config = {"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/opt/env/bin"]}}
    path = tmp_path / "image.sqsh"
    with composed(layers, maker, config, provenance="x", definition="y", arch="x86_64", mtime=7) as tree:
        with path.open("x+b") as out:
            write_sqsh(tree, out, lambda _: None)
        (path.with_suffix(".digest")).write_text(tree.file_manifest)
    return path


def test_a_squashfs_is_as_its_manifest_lists(image: Path) -> None:
    with image.open("rb") as stream:
        found = read_squashfs(stream, 0, "image", None, 60)
    manifest = parse(found.read(FILE_NAME), FILE_NAME)
    assert manifest.digest == image.with_suffix(".digest").read_text() and manifest.form == SQUASHFS
    assert manifest.rows.keys() == found.rows.keys() - {FILE_NAME}
    assert {"etc/rc", ".singularity.d/runscript", f"{SITE}/numpy/same.so"} <= manifest.rows.keys()
    report = compare(manifest, found.rows, SQUASHFS)
    assert not (report.missing or report.altered or report.unowned)


def test_an_image_has_the_survey_of_its_unpacked_files(image: Path, tmp_path: Path) -> None:
    root, inside = tmp_path / "root", Path("/opt/env")
    with image.open("rb") as stream:
        found = read_squashfs(stream, 0, "image", None, 60, gpu=True)
        unpack(SquashfsImage(stream, 0, "image"), root)
    seen = survey(inside, Path("/", SITE), 62, files=found, gpu=True)
    unpacked = survey(root / "opt/env", root / SITE, 62, gpu=True)
    numpy = f"{SITE}/numpy".removeprefix("opt/env/")
    assert seen.elf.gpu_code == {f"{numpy}/{name}": {("compute_80", "sm_80"): 1} for name in ("core.so", "same.so")}
    assert seen == unpacked and seen.elf.counts == {"x86_64": 3} and list(seen.distributions) == ["numpy"]


TIME = 1577836800


def modules(version: str, names: Sequence[str], compiler: Compiler | None) -> LayerRequest:
    """A layer with modules of equal size for each version."""
    data = f"version = {version!r}\n".encode()

    def files() -> Tree:
        for name in names:
            yield Entry(f"{SITE}/{name}.py", FILE, 0o644, len(data), mtime=TIME), io.BytesIO(data)

    key = sha256(repr((version, names, compiler)).encode())
    return LayerRequest("modules", key, lambda: with_parents(with_bytecode(files(), compiler, [SITE], TIME), TIME))


@pytest.mark.parametrize("form", ["tar", "segment"])
def test_no_module_runs_by_bytecode_of_the_base(form: str, tmp_path: Path) -> None:
    """The base has bytecode of all its modules, of which upper layers replace some without bytecode."""
    compiler, store = compiler_of(read_python(sys.executable)), Store(tmp_path / "store")
    segments = SegmentCache(store, codec_of("zstd"), 1, lambda _: None, ImageLimits())
    maker = TarCache(store, lambda _: None) if form == "tar" else segments
    base = maker.part(modules("1.0", ["kept", "wheel", "compiled", "own"], compiler))
    made = [base, maker.part(modules("2.0", ["wheel"], None)), maker.part(modules("2.0", ["compiled"], compiler))]
    last = without_stale_bytecode(modules("2.0", ["own", "new"], None), made, 1, maker, None, TIME)
    layers = [*made, maker.part(last)]
    rows = rows_of_layers([*map(maker.members, layers)], None)
    assert {Path(path).name.partition(".")[0] for path in rows if path.endswith(".pyc")} == {"kept", "compiled"}
    # Segments are made of the tars in the store.
    found = [segments.part(LayerRequest(one.title, one.key, lambda: ())) for one in layers]
    path, root = tmp_path / "image.sqsh", tmp_path / "root"
    config = {"architecture": "amd64", "os": "linux", "config": {}}
    about = {"provenance": "x", "definition": "y", "arch": "x86_64"}
    with composed(found, segments, config, **about, mtime=7) as tree, path.open("x+b") as out:
        write_sqsh(tree, out, lambda _: None)
    with path.open("rb") as stream:
        unpack(SquashfsImage(stream, 0, "image"), root)
    code = "import kept, wheel, compiled, own; print(kept.version, wheel.version, compiled.version, own.version)"
    env = {"PYTHONPATH": os.fspath(root / SITE)}
    done = subprocess.run([sys.executable, "-S", "-B", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1.0 2.0 2.0 2.0\n"


def test_a_layer_that_replaces_no_compiled_module_stays_as_it_is(tmp_path: Path) -> None:
    compiler, maker = compiler_of(read_python(sys.executable)), TarCache(Store(tmp_path / "store"), lambda _: None)
    compiled = [maker.part(modules(version, ["some"], compiler)) for version in ("1.0", "2.0")]
    part = modules("2.0", ["other"], compiler)
    last = without_stale_bytecode(part, compiled, 1, maker, None, TIME)
    assert maker.part(last).layer == maker.part(part).layer
    bare = [maker.part(modules("1.0", ["some"], None)), compiled[1]]
    assert without_stale_bytecode(part, bare, 1, maker, None, TIME) is part


def test_reading_ends_at_its_time_limit(image: Path) -> None:
    with image.open("rb") as stream, pytest.raises(VerificationError, match="could not be read within 0 s") as caught:
        read_squashfs(stream, 0, "image", None, 0)
    assert "timeout_s" in str(caught.value.hint)
