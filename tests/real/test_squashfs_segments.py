"""Images composed of segments, unpacked by unsquashfs, against the merged view of their layers."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab.merged import merge
from real.test_umoci import Stack, described, sources, stacks, unpacked

from envbuild.base.errors import BuildError
from envbuild.base.host import check_disk_space, reserve
from envbuild.cache.hashed import Digests
from envbuild.image.entry import DIR, FILE, HARDLINK, Entry
from envbuild.image.layer import header
from envbuild.image.squashfs.model import BLOCK_SIZE, codec_of
from envbuild.image.squashfs.segment import Segment, load, save, write_segment
from envbuild.image.squashfs.write import choose, estimate, write_image
from envbuild.image.tar import tar_items

pytestmark = [
    pytest.mark.skipif(not shutil.which("unsquashfs"), reason="unsquashfs is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="unsquashfs keeps owners and devices for root only"),
]
ZSTD = codec_of("zstd")
TIME = 1_600_000_000
MANY_ZEROS = (4 << 30) + (2 << 20)  # more than 32 bits count
Layer = Sequence[tuple[Entry, bytes]]

# No digest is noted here: every file is hashed.
NOTHING_KNOWN = Digests(Path("/dev/null/none"))


def noise(size: int, seed: int) -> bytes:
    """What no compressor makes smaller, so that it can be looked for in an image."""
    return random.Random(seed).randbytes(size)


CONTENTS = [
    b"",
    b"a short text",
    *(noise(size, size) for size in (700, 60_000, 61_000, BLOCK_SIZE - 1, BLOCK_SIZE)),
    b"a line of text\n" * 5000,
    bytes(3000),
    bytes(2 * BLOCK_SIZE + 5),
    noise(BLOCK_SIZE + 1, 1),
    noise(99, 2) + bytes(3 * BLOCK_SIZE) + noise(BLOCK_SIZE, 3) + bytes(77),
    bytes(BLOCK_SIZE) + b"text at the end",
]


def tar_of(layer: Layer) -> bytes:
    parts = []
    for entry, data in layer:
        parts += [header(dataclasses.replace(entry, size=len(data))), data, bytes(-len(data) % 512)]
    return b"".join(parts) + bytes(1024)


def of_files(**files: bytes) -> bytes:
    return tar_of([(Entry(name), data) for name, data in files.items()])


def segments_of(tars: Sequence[bytes], folder: Path, workers: int = 2) -> list[Segment]:
    """The segments of these layers, in files of `folder`."""
    return [
        write_segment(tar_items(io.BytesIO(tar), f"layer {i}"), folder / f"{i}.{workers}", ZSTD, workers)
        for i, tar in enumerate(tars)
    ]


def image_of(tars: Sequence[bytes], segments: Sequence[Segment], place: Path, workers: int = 2) -> bytes:
    """The image, written behind some other bytes, which stay."""
    entries = list(merge(sources(tars)).entries.values())
    with place.open("w+b") as out:
        out.write(b"front" * 100)
        length = write_image(entries, segments, out, 500, ZSTD, TIME, workers)
    data = place.read_bytes()
    assert data[:500] == b"front" * 100 and len(data) == 500 + length
    assert length <= estimate(entries, choose(entries, segments))
    return data[500:]


def compose(tars: Sequence[bytes], folder: Path) -> bytes:
    return image_of(tars, segments_of(tars, folder), folder / "image")


def extracted(image: bytes, folder: Path) -> Path:
    (folder / "only").write_bytes(image)
    root = folder / "root"
    done = subprocess.run(
        ["unsquashfs", "-quiet", "-no-progress", "-d", root, folder / "only"], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return root


@st.composite
def crowded(draw: st.DrawFn) -> Stack:
    """Layers with many files, of which upper ones replace, remove and link some."""
    paths = [f"{folder}/{name}" for folder in "de" for name in "abcdefgh"]
    there: set[str] = set()
    stack: Stack = []
    for _ in range(draw(st.integers(1, 4))):
        layer = [Entry("d", DIR, 0o755), Entry("e", DIR, 0o755)]
        for path in draw(st.lists(st.sampled_from(paths), max_size=14, unique=True)):
            what = draw(st.integers(0, 9)) if there else 9
            other = sorted(there)[what % len(there)] if there else path
            if what == 0:
                layer.append(Entry(f"{path[0]}/.wh.{path[2]}"))
                there.discard(path)
            elif what == 1 and other != path:
                layer.append(Entry(path, HARDLINK, target=other))
                there.add(path)
            elif what == 2:
                layer.append(Entry(f"{path[0]}/.wh..wh..opq"))
                made = {entry.path for entry in layer}
                there = {each for each in there if each[0] != path[0] or each in made}
            else:
                layer.append(Entry(path))
                there.add(path)
        stack.append(layer)
    return stack


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(st.one_of(stacks(), crowded(), crowded()), st.lists(st.integers(0, len(CONTENTS) - 1), min_size=1, max_size=24))
def test_what_unsquashfs_unpacks_is_what_we_merged(stack: Stack, kinds: list[int]) -> None:
    """From any number of threads, from segments made now or kept, the same bytes."""
    count = iter(range(1000))
    tars = [
        tar_of([(entry, CONTENTS[kinds[next(count) % len(kinds)]] if entry.kind == FILE else b"") for entry in layer])
        for layer in stack
    ]
    try:
        merged = merge(sources(tars))
    except BuildError:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = []
        for workers in (1, 2, 64):
            segments = segments_of(tars, folder, workers)
            images.append(image_of(tars, segments, folder / "image", workers))
            kept: list[Segment] = []
            for segment in segments:
                save(segment, folder / "index")
                loaded = load(folder / "index", segment.path, NOTHING_KNOWN)
                assert loaded is not None
                kept.append(loaded)
            images.append(image_of(tars, kept, folder / "image", workers))
        assert len({hashlib.sha256(image).digest() for image in images}) == 1
        ours = described(merged)
        assert unpacked(extracted(images[0], folder)) == ours
        # No content that layers hide is left; nothing of the visible is there twice.
        seen = {item["content"] for item in ours.values()}
        for data in CONTENTS:
            if len(data) in (700, 60_000, 61_000, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1):
                found = images[0].count(data[:600])
                assert found == 0 if data not in seen else found >= 1, len(data)


def test_what_upper_layers_hide_is_not_in_the_image(tmp_path: Path) -> None:
    small, large = [noise(9000, i) for i in range(40)], [noise(200_000, 100 + i) for i in range(5)]
    lower = of_files(
        **{f"s{i:02}": data for i, data in enumerate(small)}, **{f"t{i}": data for i, data in enumerate(large)}
    )
    upper = tar_of([(Entry(".wh.s07"), b""), (Entry("s30"), b"new"), (Entry(".wh.t2"), b""), (Entry(".wh.t4"), b"")])
    image = compose([lower, upper], tmp_path)
    root = extracted(image, tmp_path)
    for i, data in enumerate(small):
        hidden = i in (7, 30)
        assert image.count(data[:5000]) == (0 if hidden else 1), i
        assert hidden or (root / f"s{i:02}").read_bytes() == data
    for i, data in enumerate(large):
        assert image.count(data[:5000]) == (0 if i in (2, 4) else 1), i
    assert (root / "s30").read_bytes() == b"new"


def test_equal_files_of_several_layers_are_stored_once(tmp_path: Path) -> None:
    small, large = [noise(20_000, i) for i in range(9)], noise(3 * BLOCK_SIZE, 77)
    files = {f"s{i}": data for i, data in enumerate(small)} | {"large": large, "again": large}
    # What a layer that changes owners alone holds, and the same under other names.
    layers = [of_files(**files), of_files(**files)]
    layers.append(of_files(**{f"x{name}": data for name, data in files.items()}))
    image = compose(layers, tmp_path)
    root = extracted(image, tmp_path)
    for name, data in files.items():
        assert image.count(data[:9000]) == 1
        assert (root / name).read_bytes() == (root / f"x{name}").read_bytes() == data
    assert len(image) < sum(map(len, small)) + len(large) + 8192


def test_equal_files_among_blocks_that_are_both_repacked_are_stored_once(tmp_path: Path) -> None:
    # Two of the equal files fit into no block together: there zstd would hide the second.
    same, others = noise(70_000, 1), [noise(50_000, 10 + i) for i in range(4)]
    layers = [of_files(a=same, b=others[0], c=others[1]), of_files(x=same, y=others[2], z=others[3])]
    layers.append(tar_of([(Entry(".wh.b"), b""), (Entry(".wh.y"), b"")]))
    image = compose(layers, tmp_path)
    root = extracted(image, tmp_path)
    counts = [image.count(data[:9000]) for data in (same, *others)]
    assert counts == [1, 0, 1, 0, 1]
    assert (root / "a").read_bytes() == (root / "x").read_bytes() == same


@pytest.mark.parametrize("name", ["gzip", "xz:1", "lz4", "lz4:5", "zstd:9"])
def test_parts_of_blocks_are_repacked_with_every_compressor(name: str, tmp_path: Path) -> None:
    codec = codec_of(name)
    texts = {f"f{i:03}": (f"line {i}\n" * 900).encode() for i in range(90)}
    tars = [of_files(**texts), tar_of([(Entry(f".wh.f{i:03}"), b"") for i in range(0, 90, 9)])]
    segments = [
        write_segment(tar_items(io.BytesIO(tar), "layer"), tmp_path / str(i), codec, 2) for i, tar in enumerate(tars)
    ]
    with (tmp_path / "image").open("w+b") as out:
        entries = merge(sources(tars)).entries.values()
        write_image(entries, segments, out, 0, codec, TIME, 2)
    root = extracted((tmp_path / "image").read_bytes(), tmp_path)
    assert {p.name: p.read_bytes() for p in root.iterdir()} == {
        key: data for i, (key, data) in enumerate(texts.items()) if i % 9
    }


@pytest.mark.parametrize("repacked", [False, True])
@pytest.mark.parametrize("harm", ["cut", "longer", "gone", "other bytes"])
def test_a_harmed_segment_is_told_by_its_path(harm: str, repacked: bool, tmp_path: Path) -> None:
    lower = of_files(a=b"aaa\n" * 9000, b=b"bbb\n" * 9000, c=b"c" * 300_000)
    tars = [lower, tar_of([(Entry(".wh.a"), b"")])] if repacked else [lower]
    segments = segments_of(tars, tmp_path)
    path = segments[0].path
    data = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": data[:-1], "longer": data + b"!"}.get(harm, bytes(len(data))))
    if harm == "other bytes" and not repacked:
        image_of(tars, segments, tmp_path / "image")  # copied as it is: whoever reads it is told
        return
    with pytest.raises(BuildError, match=rf"{path}: damaged: ") as error:
        image_of(tars, segments, tmp_path / "image")
    assert "remove" in str(error.value.hint)


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_an_image_for_another_file_system_is_the_same_and_a_full_one_is_told(tmp_path: Path) -> None:
    """The kernel does not copy spans between file systems of two kinds by itself."""
    tars = [of_files(a=noise(700_000, 1), b=noise(9000, 2))]
    segments = segments_of(tars, tmp_path)
    here = image_of(tars, segments, tmp_path / "image")
    with small_disk(tmp_path / "disk", "size=2m") as disk:
        assert image_of(tars, segments, disk / "image") == here
        more = [*tars, of_files(c=noise(1_500_000, 3))]
        segments = segments_of(more, tmp_path)
        with pytest.raises(BuildError, match="No space left on device") as error:
            image_of(more, segments, disk / "image")
        assert "--out" in str(error.value.hint) and "ENVBUILD_STORE" in str(error.value.hint)


def test_room_is_found_missing_before_anything_is_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=2m,nr_inodes=4") as disk:
        check_disk_space(disk, 2 << 20)
        with pytest.raises(BuildError, match=r"not enough disk space for 3\.1 MB; 2\.1 MB are free") as error:
            check_disk_space(disk, 3 << 20)
        assert error.value.exit_code == 4 and "--out" in str(error.value.hint)
        with (disk / "image").open("w+b") as out:
            out.write(b"front")
            reserve(out, 1 << 20)
            assert os.fstat(out.fileno()).st_blocks * 512 >= 1 << 20
            with pytest.raises(BuildError, match=r"not enough disk space for 3\.1 MB"):
                reserve(out, 3 << 20)
            out.truncate()
            assert os.fstat(out.fileno()).st_size == 5
            assert os.fstat(out.fileno()).st_blocks * 512 < 1 << 16
        (disk / "2").touch()
        (disk / "3").touch()
        with pytest.raises(BuildError, match="no inode is left"):
            check_disk_space(disk, 1)


def test_a_limit_of_file_sizes_is_met_before_anything_is_written(tmp_path: Path) -> None:
    """As a quota is: the file system has room, but not for us."""
    script = (
        "import resource, sys; from envbuild.base.host import reserve\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "reserve(open(sys.argv[1], 'w+b'), 1 << 21)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "image"], capture_output=True, text=True)
    assert "BuildError" in done.stderr and "a quota or a limit on file sizes" in done.stderr
    assert (tmp_path / "image").stat().st_size == 0


class Many:
    """A layer's tar that is made while it is read: no test holds it in memory or on disk."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts, self._rest = parts, b""

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (part := next(self._parts, b"")):
            self._rest = self._rest + part if self._rest else part
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


def mostly_zeros() -> Iterator[bytes]:
    """More than 4 GiB in one file: 1 MiB of noise in each GiB, all else zeros."""
    piece = bytes(1 << 20)
    yield header(Entry("large", size=MANY_ZEROS))
    for number in range(MANY_ZEROS >> 20):
        yield noise(1 << 20, number) if number % 1024 == 500 else piece
    yield bytes(1024)


def small_files() -> Iterator[bytes]:
    for number in range(100_000):
        data = b"%d\n" % (number // 2) * (number % 50)
        yield header(Entry(f"d{number // 1000:03}/f{number}", size=len(data)))
        yield data + bytes(-len(data) % 512)
    yield bytes(1024)


SCRIPT = """
import resource, sys
from pathlib import Path
from real.test_squashfs_segments import ZSTD, Many, mostly_zeros, small_files
from envbuild.image.tree import MergedTree
from envbuild.image.squashfs.segment import write_segment
from envbuild.image.tar import tar_items
from envbuild.image.squashfs.write import write_image
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
which = {"zeros": mostly_zeros, "files": small_files}[sys.argv[1]]
segment = write_segment(tar_items(Many(which()), "layer"), Path("segment"), ZSTD, 64)
made = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merging = MergedTree()
merging.add("layer", segment.members)
with open("image", "w+b") as out:
    write_image(merging.entries().values(), [segment], out, 0, ZSTD, 0, 64)
print(before >> 10, made >> 10)
"""


@pytest.mark.parametrize(("which", "most"), [("zeros", 150), ("files", 150)])
def test_large_layers_take_little_memory(which: str, most: int, tmp_path: Path) -> None:
    """`most` is in MiB, over what Python and its modules take; 64 workers hold the most that any do."""
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, which],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"},
    )
    assert done.returncode == 0, done.stderr
    before, made = map(int, done.stdout.split())
    assert made - before < most, (before, made)
    listing = subprocess.run(["unsquashfs", "-lls", "image"], capture_output=True, text=True, cwd=tmp_path)
    assert listing.returncode == 0, listing.stderr
    lines = listing.stdout.splitlines()
    image = (tmp_path / "image").stat().st_size
    if which == "zeros":
        assert any(str(MANY_ZEROS) in line and line.endswith("/large") for line in lines)
        assert image < 6 << 20
    else:
        assert sum("/f" in line for line in lines) == 100_000
