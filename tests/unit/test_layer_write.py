"""Layers as files: the same bytes each time, readable by everyone, whole or not there at all."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import BuildError
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry, Readable, Tree
from envbuild.image.layer import Layer, header, open_layer, with_parents, write_layer
from envbuild.image.layout import Blobs
from examples import examples

KINDS = {
    tarfile.REGTYPE: FILE,
    tarfile.DIRTYPE: DIR,
    tarfile.SYMTYPE: SYMLINK,
    tarfile.LNKTYPE: HARDLINK,
    tarfile.CHRTYPE: CHAR,
    tarfile.BLKTYPE: BLOCK,
    tarfile.FIFOTYPE: FIFO,
}


class Dribble:
    """A content that gives a few bytes at a time, as pipes do."""

    def __init__(self, data: bytes, step: int) -> None:
        self._stream, self._step = io.BytesIO(data), step

    def read(self, size: int = -1, /) -> bytes:
        return self._stream.read(self._step if size < 0 else min(size, self._step))


def file(path: str, data: bytes, mode: int = 0o644) -> tuple[Entry, Readable]:
    return Entry(path, FILE, mode, len(data), mtime=1577836800), io.BytesIO(data)


def write(tree: Tree, folder: Path) -> tuple[Layer, Path]:
    blobs = Blobs(folder)
    layer = write_layer(tree, blobs)
    return layer, blobs.path(layer.blob.digest)


def read_back(path: Path) -> list[tuple[Entry, bytes]]:
    """The layer's entries and contents as Python's tarfile has them."""
    found = []
    with tarfile.open(path, "r:gz", errorlevel=2) as archive:
        for member in archive:
            kind = KINDS[member.type]
            xattrs = tuple(
                (name.removeprefix("SCHILY.xattr."), value.encode("utf-8", "surrogateescape"))
                for name, value in member.pax_headers.items()
                if name.startswith("SCHILY.xattr.")
            )
            device = (member.devmajor, member.devminor) if kind in (CHAR, BLOCK) else (0, 0)
            size = member.size if kind == FILE else 0
            entry = Entry(
                member.name,
                kind,
                member.mode,
                size,
                member.linkname,
                member.uid,
                member.gid,
                int(member.mtime),
                device,
                xattrs,
            )
            stream = archive.extractfile(member) if kind == FILE else None
            found.append((entry, stream.read() if stream else b""))
    return found


def nothing_is_left(folder: Path) -> bool:
    return not [path for path in folder.rglob("*") if not path.is_dir()]


LONG = "d" * 90 + "/" + "n" * 250
ENTRIES: list[tuple[Entry, bytes]] = [
    (Entry("opt", DIR, 0o755), b""),
    (Entry("opt/sticky", DIR, 0o1777, uid=1000, gid=1001, mtime=5), b""),
    (Entry("opt/empty", FILE, 0o4755, mtime=1577836800), b""),
    (Entry("opt/" + LONG, FILE, 0o600, 3), b"abc"),
    (Entry("opt/zażółć 中.txt", FILE, 0o644, 1, uid=3_000_000, gid=4_000_000), b"x"),
    (Entry(os.fsdecode(b"opt/not-utf8-\xff\xfe"), FILE, 0o644, 2), b"xy"),
    (
        Entry(
            "opt/attributes",
            FILE,
            0o755,
            1,
            xattrs=(("security.capability", b"\x01\0\0\x02\xff\0"), ("user.ü", "ż".encode())),
        ),
        b"c",
    ),
    (Entry("opt/link", SYMLINK, 0o777, target="../" + LONG), b""),
    (Entry("opt/dangling", SYMLINK, 0o777, target="/no/ż where"), b""),
    (Entry("opt/hard", HARDLINK, 0o644, target="opt/empty"), b""),
    (Entry("opt/hard-long", HARDLINK, 0o644, target="opt/" + LONG), b""),
    (Entry("opt/tty", CHAR, 0o666, device=(5, 1)), b""),
    (Entry("opt/disk", BLOCK, 0o660, device=(259, 70_000)), b""),
    (Entry("opt/pipe", FIFO, 0o600), b""),
    (Entry("opt/block", FILE, 0o644, 512), b"b" * 512),
    (Entry("opt/old", FILE, 0o644, 1, mtime=-1), b"o"),
    (Entry("opt/future", FILE, 0o644, 1, mtime=1 << 34), b"f"),
]


def tree_of(entries: list[tuple[Entry, bytes]], step: int = 1 << 30) -> Tree:
    return ((e, Dribble(data, step) if e.kind == FILE else None) for e, data in entries)


def test_tarfile_reads_back_every_kind_of_entry(tmp_path: Path) -> None:
    layer, path = write(tree_of(ENTRIES), tmp_path)
    assert read_back(path) == ENTRIES
    tar = gzip.decompress(path.read_bytes())
    assert layer.unpacked == len(tar)
    assert layer.diff_id == f"sha256:{hashlib.sha256(tar).hexdigest()}"
    assert layer.blob.size == path.stat().st_size
    assert layer.blob.digest == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    listed = subprocess.run(["tar", "-tzf", path], capture_output=True, check=True)
    assert listed.stdout.count(b"\n") == len(ENTRIES)


def test_an_empty_tree_is_an_empty_archive(tmp_path: Path) -> None:
    layer, path = write([], tmp_path)
    assert gzip.decompress(path.read_bytes()) == bytes(1024) and layer.unpacked == 1024


CHUNK = 4 << 20


@pytest.mark.parametrize("size", [0, 1, CHUNK - 2048, CHUNK - 1536, CHUNK, 3 * CHUNK + 17])
def test_bytes_do_not_depend_on_processors_place_or_how_content_comes(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    entries = [*ENTRIES, (Entry("big", FILE, 0o644, size), data[:size])]
    layers = []
    for count, step in [(1, 1 << 30), (64, 7919), (3, 65536)] if size > 1 else [(1, 1 << 30), (3, 1)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=count: set(range(n)))
        layer, path = write(tree_of(entries, step), tmp_path / f"place {count}")
        layers.append((layer, path.read_bytes()))
    assert all(other == layers[0] for other in layers)
    tar = gzip.decompress(layers[0][1])
    with open_layer(path, "it") as stream:  # envbuild's own reader takes all gzip members too
        assert stream.read() == tar
    assert read_back(path)[-1] == (entries[-1][0], data[:size])


def test_bytes_are_what_they_were(tmp_path: Path) -> None:
    """Layers are known by digest everywhere: another digest here means another FORMAT in compose.py."""
    layer, _ = write(tree_of(ENTRIES), tmp_path)
    assert layer.diff_id == "sha256:e41c0756a430725a72beed840999d10bb2952b9cde331030973880e808ca0cae"


names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=120).filter(
    lambda name: name not in (".", "..")
)
paths = st.lists(names, min_size=1, max_size=4).map("/".join)


@examples(60)
@given(files=st.dictionaries(paths, st.binary(max_size=2000), max_size=5), step=st.integers(1, 700))
def test_any_names_and_contents_are_read_back(
    files: dict[str, bytes], step: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    entries = [(Entry(path, FILE, 0o640, len(data)), data) for path, data in files.items()]
    _, path = write(tree_of(entries, step), tmp_path_factory.mktemp("any"))
    assert read_back(path) == entries


class Endless:
    def read(self, size: int = -1, /) -> bytes:
        return bytes(size)


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ((Entry("a", FILE, 0o644, 5), io.BytesIO(b"1234")), "a: not 5 bytes"),
        ((Entry("a", FILE, 0o644, 5), io.BytesIO(b"123456")), "a: not 5 bytes"),
        ((Entry("a", FILE, 0o644, 0), io.BytesIO(b"1")), "a: not 0 bytes"),
        ((Entry("a", FILE, 0o644, 9 << 20), io.BytesIO(bytes(9 << 20) + b"1")), "a: not 9437184"),
        ((Entry("a", FILE, 0o644, 6 << 20), Endless()), "a: not 6291456"),
        ((Entry("a", FILE, 0o644, 5), None), "a: a file without content"),
        ((Entry("first", DIR, 0o755), None), "/first is in one layer twice"),
    ],
)
def test_a_wrong_entry_is_refused_and_nothing_is_left(
    item: tuple[Entry, Readable | None], told: str, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match=told):
        write_layer([file("first", bytes(5 << 20)), item], Blobs(tmp_path))
    assert nothing_is_left(tmp_path)


FULL = """
import pathlib, resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
sys.path.insert(0, {repository!r})
import io, random
from envbuild.image.layout import Blobs
from envbuild.image.entry import Entry
from envbuild.image.layer import write_layer
data = random.Random(1).randbytes({size})
try:
    write_layer([(Entry("a", size=len(data)), io.BytesIO(data))], Blobs(pathlib.Path({folder!r})))
except OSError as error:
    print(error.strerror)
"""
REPOSITORY = os.fspath(Path(__file__).resolve().parents[2])


@pytest.mark.parametrize("size", [400_000, 30_000_000])
def test_a_disk_that_is_full_is_an_error_and_nothing_is_left(size: int, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk's: the failing write is the kernel's."""
    script = FULL.format(repository=REPOSITORY, folder=os.fspath(tmp_path), size=size)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "File too large\n", done.stderr
    assert nothing_is_left(tmp_path)


def test_a_layer_that_failed_leaves_no_thread_and_closes_what_it_read(tmp_path: Path) -> None:
    closed = []

    def tree() -> Iterator[tuple[Entry, Readable | None]]:
        try:
            yield file("a", b"1")
            yield file("a", b"2")
        finally:
            closed.append(True)

    before = threading.active_count()
    with pytest.raises(BuildError) as kept:  # its traceback holds the frames, and so the tree
        write_layer(with_parents(tree(), 0), Blobs(tmp_path))
    assert closed and threading.active_count() == before and kept.value.message


MEMORY = """
import pathlib, sys
sys.path.insert(0, {repository!r})
from envbuild.image.layout import Blobs
from envbuild.image.entry import Entry
from envbuild.image.layer import write_layer
import os
os.sched_getaffinity = lambda _: set(range(64))
with open({sparse!r}, "rb") as stream:
    entry = Entry("sparse", size=300_000_000)
    write_layer([(entry, stream)], Blobs(pathlib.Path({folder!r})))
status = pathlib.Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""


def test_memory_does_not_grow_with_content_or_processors(tmp_path: Path) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as stream:
        stream.truncate(300_000_000)
    script = MEMORY.format(repository=REPOSITORY, sparse=os.fspath(sparse), folder=os.fspath(tmp_path / "blobs"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150_000  # KiB


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (["a/b/c.py", "a/b/d.py", "a/e"], ["a/", "a/b/", "a/b/c.py", "a/b/d.py", "a/e"]),
        (["a/x", "b/x", "a/y"], ["a/", "a/x", "b/", "b/x", "a/y"]),
        (["a/b/", "a/b/", "a/", "a/b/c"], ["a/", "a/b/", "a/b/c"]),
        (["top"], ["top"]),
        ([], []),
    ],
)
def test_each_folder_comes_once_and_before_what_is_in_it(tree: list[str], expected: list[str]) -> None:
    given = (
        (Entry(p.rstrip("/"), DIR if p.endswith("/") else FILE, 0o700 if p.endswith("/") else 0o600), None)
        for p in tree
    )
    found = [e for e, _ in with_parents(given, 7)]
    assert [e.path + "/" * (e.kind == DIR) for e in found] == expected
    assert all(e.mtime == 7 and e.mode == 0o755 for e in found if e.path == "a")


def test_a_header_is_a_whole_number_of_blocks() -> None:
    for entry, _ in ENTRIES:
        assert len(header(entry)) % 512 == 0


def test_the_compressor_is_not_imported_before_it_is_used() -> None:
    code = textwrap.dedent("""
        import sys
        import envbuild.image.layer, envbuild.layers.wheel, envbuild.layers.bytecode
        assert "deflate" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
