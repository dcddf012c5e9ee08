"""Bombs: small inputs that would take gigabytes or hours are refused, or read in time and memory like their size."""

from __future__ import annotations

import io
import os
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from lab.fake_registry import Call, fake_registry
from lab.lint import lint
from lab.tar_blocks import END, pax, plain, special
from lab.wheels import make_wheel

from envbuild.base.errors import BuildError, EnvbuildError, LockError, RecipeError, UsageError
from envbuild.base.packages import digest_of
from envbuild.debian.control import parse_control
from envbuild.image.entry import DIR
from envbuild.image.limits import ImageLimits, Quota
from envbuild.image.model import OCI_CONFIG, OCI_LAYER_GZIP, OCI_MANIFEST, Descriptor, new_manifest
from envbuild.image.squashfs.read import SquashfsImage
from envbuild.image.tar import Chunks, Member, tar_items
from envbuild.image.tree import MergedTree
from envbuild.imports import read_source
from envbuild.inspect.metadata import interest
from envbuild.layers import wheel
from envbuild.layers.wheel import Scheme, wheel_tree
from envbuild.lock import conda_format, format
from envbuild.lock.base import pull
from envbuild.lock.image import parse_image
from envbuild.recipe.load import load_recipe
from envbuild.run_environment import load_environment
from envbuild.site.tables import LimitsTable
from envbuild.verify.image_file import ImageFile
from envbuild.verify.image_runtime import extract

MIB = 1 << 20
# Below the defaults, so that the tests are quick.
LIMITS = LimitsTable(entries=5000, unpacked_bytes=1 << 30)
SQUASHFS = Path(__file__).with_name("data") / "fuzz/plain.sqsh"
HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n"
MANIFEST = "apiVersion: v1\nkind: Job\n"


def merge(blocks: Iterator[bytes], limits: ImageLimits = LIMITS) -> MergedTree:
    """The tree of one layer, whose members are all kept, as readers do."""
    stream = io.BufferedReader(Chunks(iter(blocks)), MIB)
    tree = MergedTree(Quota(limits))
    tree.add("lab", [member for member, _ in tar_items(stream, "lab", Quota(limits))])
    tree.entries()
    return tree


def xattrs() -> Iterator[bytes]:
    for number in range(400):
        yield pax(("SCHILY.xattr.user.a", b"x" * 1_000_000 + b"%d" % number)) + plain(f"f{number}")


def long_names() -> Iterator[bytes]:
    for number in range(400):
        yield special(b"L", b"%d" % number + b"/n" * 500_000) + plain()


def long_links() -> Iterator[bytes]:
    for number in range(400):
        yield special(b"K", b"%d" % number + b"/n" * 500_000) + plain(f"l{number}", kind=b"2")


def global_headers() -> Iterator[bytes]:
    for number in range(400):
        yield pax((f"SCHILY.xattr.user.{number}", b"x" * 1_000_000), kind=b"g")
    yield plain()


def global_attributes() -> Iterator[bytes]:
    yield pax(*((f"SCHILY.xattr.user.{number}", b"x") for number in range(500)), kind=b"g")
    for number in range(1000):
        yield plain(f"f{number}")


def sparse_maps() -> Iterator[bytes]:
    numbers = b",".join(b"%d,0" % number for number in range(50_000))
    for number in range(50):
        yield pax(("GNU.sparse.map", numbers), ("GNU.sparse.size", b"99999")) + plain(f"f{number}")


def hole() -> Iterator[bytes]:
    yield pax(("GNU.sparse.map", b"0,0"), ("GNU.sparse.size", b"%d" % (15 << 40))) + plain()


def small_holes() -> Iterator[bytes]:
    for number in range(20):  # 5 MiB each, of 1 GiB
        yield pax(("GNU.sparse.map", b"0,0"), ("GNU.sparse.size", b"%d" % (5 << 20))) + plain(f"f{number}")


def members() -> Iterator[bytes]:
    for number in range(6000):
        yield plain(f"f{number}")


def implied_folders() -> Iterator[bytes]:
    for number in range(200):
        yield special(b"L", b"%d" % number + b"/a" * 1500) + plain()


def long_through_a_link() -> Iterator[bytes]:
    yield special(b"K", b"b/" * 1000) + plain("s", kind=b"2")
    for number in range(3000):
        yield plain(f"s/{number}")


@pytest.mark.parametrize(
    ("bomb", "says"),
    [
        (xattrs, "bytes of names, attributes and maps"),
        (long_names, "longer than Linux|bytes of names, attributes and maps"),
        (long_links, "longer than Linux|bytes of names, attributes and maps"),
        (global_headers, "bytes of names, attributes and maps"),
        (global_attributes, "bytes of names, attributes and maps"),
        (sparse_maps, "bytes of names, attributes and maps"),
        (hole, "more than 1073741824 bytes of files"),
        (small_holes, "more than 1073741824 bytes of files"),
        (members, "more than 5000 files and folders"),
        (implied_folders, "more than 5000 files and folders"),
    ],
)
def test_a_layer_that_would_fill_memory_is_refused(bomb: Callable[[], Iterator[bytes]], says: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BuildError, match=says) as caught:
            merge(bomb())
        assert tracemalloc.get_traced_memory()[1] < 30 * MIB
    finally:
        tracemalloc.stop()
    if "more than" in caught.value.message:
        assert caught.value.hint and "[limits]" in caught.value.hint


def test_the_layers_of_an_image_share_its_limits() -> None:
    """Each was read within them before."""
    tree, quota = MergedTree(Quota(LIMITS)), LIMITS.unpacked_bytes // 3
    layer = [Member("f", "file", 0o644, 0, 0, 0, quota, "", (0, 0))]
    for name in "abc":
        tree.add(name, layer)
    with pytest.raises(BuildError, match="d: more than 1073741824 bytes of files"):
        tree.add("d", layer)


def test_what_follows_a_tar_is_a_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbuild.image.tar._MOST_PADDING", 4 * MIB)

    def padded(count: int) -> Iterator[bytes]:
        yield from (plain(), END)
        yield from (bytes(MIB) for _ in range(count))

    assert merge(padded(3)).is_file("f")
    with pytest.raises(BuildError, match="more than 4194304 bytes after the end of the tar archive"):
        merge(padded(1 << 20))


def test_a_base_keeps_to_the_limits_before_its_first_layer(tmp_path: Path) -> None:
    """One layer of 1 GB, 150 times; and a configuration that would fill memory."""
    config, layer = Descriptor(OCI_CONFIG, digest_of(b"{}"), 2), Descriptor(OCI_LAYER_GZIP, digest_of(b"x"), 1 << 30)
    manifests = {
        "many": new_manifest(OCI_MANIFEST, config, [layer] * 150).raw,
        "large": new_manifest(OCI_MANIFEST, replace(config, size=1 << 40), [layer]).raw,
    }

    def script(call: Call) -> None:
        call.reply(200, manifests[call.path.rpartition("/")[2]], Content_Type=OCI_MANIFEST)

    with fake_registry(script) as fake:
        (tmp_path / "site.toml").write_text(f'store = "store"\n[registries."{fake.address}"]\ninsecure = true\n')
        environment = load_environment({"ENVBUILD_SITE": str(tmp_path / "site.toml"), "PATH": os.environ["PATH"]})
        for tag, says in (
            ("many", "more than 137438953472 bytes of files"),
            ("large", "a configuration of 1099511627776"),
        ):
            with pytest.raises(BuildError, match=says):
                pull(f"{fake.address}/x:{tag}", None, "x86_64", environment, tmp_path)
        assert not fake.asked("GET", "/blobs/")


def test_the_largest_image_that_is_allowed_takes_less_than_500_mb() -> None:
    count = 10_000
    names = (
        f"opt/env/lib/python3.11/site-packages/package_{n // 500}/a_module_of_usual_length_{n}.py" for n in range(count)
    )
    tracemalloc.start()
    try:
        tree = merge((plain(name) for name in names), ImageLimits())
        assert len(tree.entries()) > count
        each = tracemalloc.get_traced_memory()[1] / count
    finally:
        tracemalloc.stop()
    # The sha256 of each file comes with it.
    assert ImageLimits().entries * (each + 120) < 450e6


def test_long_paths_through_links_are_refused() -> None:
    with pytest.raises(BuildError, match="too many symbolic links on the way"):
        merge(long_through_a_link())


def test_the_site_can_allow_more() -> None:
    many = [plain(f"f{number}") for number in range(20)] + [END]
    with pytest.raises(BuildError, match="more than 10 files and folders"):
        merge(iter(many), ImageLimits(entries=10))
    assert merge(iter(many), ImageLimits(entries=20)).has("f19")


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def folder(name: str) -> Member:
    return Member(name, DIR, 0o755, 0, 0, 0, 0, "", (0, 0))


def opaque(count: int) -> None:
    tree = MergedTree()
    tree.begin()
    for number in range(count):
        tree.apply(folder(f"d/{number}"), 2 * number, "lab")
        tree.apply(folder("d/.wh..wh..opq"), 2 * number + 1, "lab")
    assert len(tree.walk()) == count + 2


def launches(count: int) -> None:
    line = "srun torchrun --nnodes=2 --rdzv-id=$RANDOM --rdzv-endpoint=$(hostname):29500 x.py\n"
    assert len(lint(HEAD + line * count, "job.sh")) > count


def assigned(count: int) -> None:
    lint(HEAD + "X=1\n" * count + "torchrun $X\n", "job.sh")


def nested_words(count: int) -> None:
    lint(HEAD + "ssh a " + "'torchrun b' " * count, "job.sh")


def fallbacks(count: int) -> None:
    lint(HEAD + "torchrun " + "${a[${a:-localhost} " * count, "job.sh")


def remarks(count: int) -> None:
    lint(HEAD + "torchrun --nnodes=2 x " + "#" * 20 * count + " lint-job: ignore" + " " * count + "!", "job.sh")


def continued(count: int) -> None:
    assert parse_control("a: x\n" + " y\n" * 10 * count, "lab")["a"].count("y") == 10 * count


def blanks(count: int) -> None:
    reader = interest("var/lib/dpkg/status")
    assert reader and reader(b"Package: x" + b" " * count + b"y\n")


@pytest.mark.parametrize(
    ("work", "count"),
    [
        (opaque, 3000),
        (launches, 300),
        (assigned, 3000),
        (nested_words, 400),
        (fallbacks, 1500),
        (remarks, 1000),
        (continued, 3000),
        (blanks, 3000),
    ],
)
def test_twice_the_input_takes_about_twice_as_long(work: Callable[[int], None], count: int) -> None:
    # A busy machine may disturb a measurement, but not three.
    assert any(seconds(lambda: work(2 * count)) < 3 * seconds(lambda: work(count)) for _ in range(3))


def test_variables_that_stand_for_gigabytes_are_not_expanded() -> None:
    names = "abcdefgh"
    rows = [f'{a}="{f"${b} " * 12}"' for a, b in pairwise(names)]
    text = "\n".join([HEAD, *rows, "h=xxxxxxxxxx", "srun torchrun $a $a"])
    tracemalloc.start()
    try:
        lint(text, "job.sh")
        assert tracemalloc.get_traced_memory()[1] < 30 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("unit", ["${", "$(", 'a=("$(" ', 'x "$(', "a=(", "$((", "`", "<<a "])
def test_deep_nesting_is_no_traceback(unit: str) -> None:
    lint(HEAD + unit * 3000, "job.sh")


@pytest.mark.parametrize("head", [HEAD, "#SBATCH --nodes=N\n", "#PBS -l select=N\n", "#BSUB -n N\n", "#flux: -N N\n"])
def test_numbers_of_thousands_of_digits_are_no_traceback(head: str) -> None:
    number = "9" * 5000
    lint(f"{head.replace('N', number)}srun -n {number} torchrun --nnodes={number} x.py\n", "job.sh")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: " + "[" * 10_000, "more than 64 levels"),
        ("a: " + "{a: " * 10_000, "more than 64 levels"),
        ("a: &a [x]\nb: [" + "*a, " * 300 + "]", "more than 256 aliases"),
        ("a: " + "1" * 10_000, "a value that cannot be read"),
    ],
)
def test_a_manifest_that_nobody_writes_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        lint(MANIFEST + text, "job.yaml")


def test_aliases_of_aliases_are_searched_once() -> None:
    rows = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 25))
    assert lint(f"{MANIFEST}a0: &a0 [x]\n{rows}", "job.yaml") == []
    assert lint(f"{MANIFEST}a: &a [*a]\n", "job.yaml") == []


def wheel_lock() -> None:
    with pytest.raises(LockError) as caught:
        format.parse("# envbuild lock, format 1; x\n" + "x\n" * 200_000, "lab")
    assert caught.value.message.count("\n") < 110


def conda_lock_of_lines() -> None:
    with pytest.raises(LockError, match="11 MiB are too many for a lock"):
        conda_format.parse("a:\n" + '- ""\n' * (9 << 20 >> 2), "lab")


def conda_lock_of_aliases() -> None:
    rows = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    text = f"a0: &a0 [x]\n{rows}version: 1\npackage: [{{name: x, version: '1', manager: *a8}}]\n"
    with pytest.raises(LockError, match="lab:2: more than 0 aliases"):
        conda_format.parse_packages(text, "lab")


def records() -> None:
    reader = interest("site-packages/a-1.dist-info/RECORD")
    assert reader and reader(b",,\n" * 600_000) is None


@pytest.mark.parametrize("work", [wheel_lock, conda_lock_of_lines, conda_lock_of_aliases, records])
def test_a_text_of_many_small_parts_takes_little_memory(work: Callable[[], None]) -> None:
    tracemalloc.start()
    try:
        work()
        assert tracemalloc.get_traced_memory()[1] < 90 * MIB
    finally:
        tracemalloc.stop()


def test_of_metadata_the_beginning_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser of headers takes sixty times the memory of its text."""
    monkeypatch.setattr("envbuild.inspect.metadata._MAX_HEAD", 1000)
    reader = interest("site-packages/a-1.dist-info/METADATA")
    assert reader and reader(b"Name: a\n" + b"A:\n" * 1000 + b"Version: 1\n") == {
        "name": "a",
        "version": "",
        "expression": "",
        "licenses": [],
    }


def test_a_yaml_document_of_very_many_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbuild.base.yaml_reader._EVENTS", 1000)
    with pytest.raises(LockError, match=r"lab:.*more than 1000 values"):
        conda_format.parse("a: [" + "x, " * 2000 + "]", "lab")


def test_aliases_that_double_are_refused_in_an_environment(tmp_path: Path) -> None:
    """40 lines would stand for 2**40 values, which a message about them would print."""
    rows = "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    (tmp_path / "environment.yml").write_text(f"a0: &a0 [x, x]\n{rows}dependencies: [x]\n")
    with pytest.raises(UsageError, match=r"environment.yml:1\d: more than 300000 values"):
        list(read_source(tmp_path / "environment.yml"))
    (tmp_path / "environment.yml").write_text("a: &a [b, &c d]\ndependencies: [x, *c]\nother: [*a, *a, &e [*e]]\n")
    assert [one.text for one in read_source(tmp_path / "environment.yml") if one.kind == "conda"] == ["x", "d"]


def test_a_wheel_whose_record_is_of_empty_rows_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "lab-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("lab-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("lab-1.0.dist-info/RECORD", ",,\n" * 300_000)
    tracemalloc.start()
    try:
        list(wheel_tree(path, Scheme("opt/env", "3.11"), 0))
        assert tracemalloc.get_traced_memory()[1] < 25 * MIB
    finally:
        tracemalloc.stop()


def test_a_record_may_be_as_long_as_its_wheel_has_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RECORD of a wheel with 450,000 files has 40 MB: no key bounds it, but the wheel itself."""
    monkeypatch.setattr(wheel, "_MAX_RECORD", 1000)
    path = make_wheel(tmp_path, "many-files", files={f"many/{number:04}.txt": b"" for number in range(100)})
    with zipfile.ZipFile(path) as archive:
        assert next(one.file_size for one in archive.infolist() if one.filename.endswith("RECORD")) > 5000
    assert sum(entry.path.endswith(".txt") for entry, _ in wheel_tree(path, Scheme("opt/env", "3.11"), 0)) == 100
    odd = tmp_path / "lab-1.0-py3-none-any.whl"
    with zipfile.ZipFile(odd, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("lab-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("lab-1.0.dist-info/RECORD", ",,\n" * 400)
    with pytest.raises(BuildError, match="RECORD has 1200 bytes, at most 1000 are possible in this wheel") as caught:
        list(wheel_tree(odd, Scheme("opt/env", "3.11"), 0))
    assert "another release" in caught.value.hint


def test_a_key_of_thousands_of_parts_is_refused(tmp_path: Path) -> None:
    """tomllib would take gigabytes for one of 40 kB."""
    text = "a." * 20_000 + "a = 1\n"
    with pytest.raises(LockError, match="a key of more than 64 parts"):
        parse_image(text, "lab")
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(RecipeError, match="a key of more than 64 parts"):
        load_recipe(tmp_path / "recipe.toml")


def test_the_hint_of_a_limit_names_the_place_where_the_caller_set_it() -> None:
    for limits, place in ((LimitsTable(entries=20), "[limits] of site.toml"), (ImageLimits(entries=20), "ImageLimits")):
        quota = Quota(limits)
        with pytest.raises(BuildError) as caught:
            for _ in range(21):
                quota.entry("lab")
        assert place in (caught.value.hint or "") and "`entries`" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (LimitsTable(entries=5), "more than 5 files"),
        (ImageLimits(unpacked_bytes=9999), "more than 9999 bytes of files"),
    ],
)
def test_a_squashfs_keeps_to_the_limits_of_the_site(limits: ImageLimits, says: str, tmp_path: Path) -> None:
    with SQUASHFS.open("rb") as stream, pytest.raises(BuildError, match=says):
        list(SquashfsImage(stream, 0, "lab", limits).entries())
    with pytest.raises(EnvbuildError, match=says):  # as verification does where nothing can be mounted
        extract(ImageFile(SQUASHFS, "enroot", 0, "gzip"), tmp_path / "unpacked", limits)
