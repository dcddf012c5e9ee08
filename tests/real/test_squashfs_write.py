"""Images whose tables are ours, as the kernel, squashfs-tools, squashfs-tools-ng and squashfuse read them."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import stat
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab.merged import merge

from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.squashfs.model import BLOCK_SIZE, UNCOMPRESSED, Codec, Data, Fragment, codec_of
from envbuild.image.squashfs.tables import Placed, data_start, write_tables

TOOLS = {
    "unsquashfs": "squashfs-tools",
    "sqfs2tar": "squashfs-tools-ng",
    "rdsquashfs": "squashfs-tools-ng",
    "squashfuse": "squashfuse",
}
_LACKING = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="owners, devices and mounts need root"),
    pytest.mark.skipif(bool(_LACKING), reason=f"not installed: {', '.join(_LACKING)}"),
]
TYPES = {
    stat.S_IFREG: FILE,
    stat.S_IFDIR: DIR,
    stat.S_IFLNK: SYMLINK,
    stat.S_IFCHR: CHAR,
    stat.S_IFBLK: BLOCK,
    stat.S_IFIFO: FIFO,
}
LAST_SECOND = (1 << 32) - 1
# What a path shows: its entry, with the first name of its file as target of every other, and its content.
Seen = dict[str, tuple[Entry, bytes]]


def write_image(
    path: Path, tree: Iterable[tuple[Entry, bytes]], codec: Codec, base: int = 0, ends: bool = True
) -> None:
    """Blocks are stored compressed and as they are by turns; with `ends` ends of files share fragments."""
    with path.open("wb") as out:
        start = base + data_start(codec)
        out.seek(start)
        placed, fragments, tail = [], [], b""
        for entry, content in tree:
            data = None
            if entry.kind == FILE and content:
                whole = len(content) // BLOCK_SIZE * BLOCK_SIZE if ends else len(content)
                data = blocks(out, base, content[:whole], codec)
                if whole < len(content):
                    if len(tail) + len(content) - whole > BLOCK_SIZE:
                        fragments.append(fragment(out, base, tail, codec))
                        tail = b""
                    data = replace(data, fragment=len(fragments), offset=len(tail))
                    tail += content[whole:]
            placed.append(Placed(entry, data))
        if tail:
            fragments.append(fragment(out, base, tail, codec))
        length = write_tables(out, base, placed, fragments, codec, 1_600_000_000)
        assert out.tell() == base + length


def blocks(out: BinaryIO, base: int, content: bytes, codec: Codec) -> Data:
    start, words = out.tell() - base, []
    for at in range(0, len(content), BLOCK_SIZE):
        block = content[at : at + BLOCK_SIZE]
        words.append(word(out, block, codec) if any(block) else 0)
    return Data(start, tuple(words))


def word(out: BinaryIO, block: bytes, codec: Codec) -> int:
    packed = codec.compress(block)
    if len(packed) < len(block) and out.tell() % 2:
        return out.write(packed)
    return out.write(block) | UNCOMPRESSED


def fragment(out: BinaryIO, base: int, tail: bytes, codec: Codec) -> Fragment:
    return Fragment(out.tell() - base, word(out, tail, codec))


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr + done.stdout
    assert not done.stderr, done.stderr
    return done.stdout.decode("utf-8", "surrogateescape")


@contextmanager
def mounted(image: Path, offset: int = 0) -> Iterator[Path]:
    """The image as the kernel shows it."""
    folder = image.with_suffix(".kernel")
    folder.mkdir()
    command = ["mount", "-t", "squashfs", "-o", f"loop,ro,offset={offset}", str(image), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    for _ in range(9):
        if "already mounted" not in done.stderr:
            break
        time.sleep(0.1)  # another process took the loop device that was free
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        folder.rmdir()
        if _kernel_mounts(image.parent):
            pytest.fail(f"the kernel does not mount it: {done.stderr}")
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


def _kernel_mounts(folder: Path) -> bool:
    """Whether the kernel mounts what another program wrote: then it ought to mount ours."""
    if shutil.which("mksquashfs") is None:
        return False
    (folder / "probe").mkdir(exist_ok=True)
    run("mksquashfs", folder / "probe", folder / "probe.sqfs", "-noappend", "-quiet", "-no-progress")
    done = subprocess.run(["mount", "-o", "loop", folder / "probe.sqfs", folder / "probe"])
    if done.returncode == 0:
        subprocess.run(["umount", folder / "probe"], check=True)
    return done.returncode == 0


@contextmanager
def fused(image: Path) -> Iterator[Path]:
    """The image as squashfuse shows it."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("there is no /dev/fuse here")
    folder = image.with_suffix(".fuse")
    folder.mkdir()
    done = subprocess.run(["squashfuse", image, folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"squashfuse cannot mount here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


def seen(root: Path) -> Seen:
    found: Seen = {}
    first: dict[int, str] = {}
    names = [""]
    for folder, folders, files in os.walk(root):
        names += [os.path.relpath(os.path.join(folder, name), root) for name in folders + files]
    for name in sorted(names):
        path = os.path.join(root, name)
        status = os.lstat(path)
        kind = TYPES[stat.S_IFMT(status.st_mode)]
        target = os.readlink(path) if kind == SYMLINK else ""
        content = Path(path).read_bytes() if kind == FILE else b""
        attributes = tuple((key, os.getxattr(path, key, follow_symlinks=False)) for key in attributes_of(path))
        device = (os.major(status.st_rdev), os.minor(status.st_rdev))
        entry = Entry(
            name,
            kind,
            stat.S_IMODE(status.st_mode),
            len(content),
            target,
            status.st_uid,
            status.st_gid,
            int(status.st_mtime),
            device if kind in (CHAR, BLOCK) else (0, 0),
            attributes,
        )
        if kind != DIR and first.setdefault(status.st_ino, name) != name:
            entry = replace(entry, kind=HARDLINK, target=first[status.st_ino])
        found[name] = entry, content
    return found


def attributes_of(path: str | Path) -> list[str]:
    try:
        return sorted(os.listxattr(path, follow_symlinks=False))
    except OSError as error:
        # So says the kernel of every path in an image that has no table of them.
        assert error.errno == errno.EOPNOTSUPP
        return []


def expected(tree: list[tuple[Entry, bytes]]) -> Seen:
    """The tree as `seen` tells it: of names for one file the first by order is the file."""
    by_path = {entry.path: (entry, content) for entry, content in tree}
    by_path.setdefault("", (Entry("", DIR, 0o755), b""))
    first: dict[str, str] = {}
    found: Seen = {}
    for path in sorted(by_path):
        entry, content = by_path[path]
        owner = entry.target if entry.kind == HARDLINK else path
        entry, content = by_path[owner]
        entry = replace(entry, path=path, xattrs=tuple(sorted(entry.xattrs)))
        if first.setdefault(owner, path) != path:
            entry = replace(entry, kind=HARDLINK, target=first[owner])
        found[path] = entry, content
    return found


def told(tar: bytes) -> Seen:
    """The tree of what sqfs2tar wrote, which leaves the root out."""
    merged = merge([("sqfs2tar", lambda: io.BytesIO(tar))])
    contents = merged.contents()
    found: Seen = {}
    for path in set(merged.entries) - {""}:
        entry = merged.entries[path].entry
        content = contents.get(path, b"")
        found[path] = (replace(entry, size=len(content), xattrs=tuple(sorted(entry.xattrs))), content)
    return found


def as_tar(tree: Seen) -> Seen:
    """What a tar can tell: a record without a value is, there, no record."""
    return {
        path: (replace(entry, xattrs=tuple(pair for pair in entry.xattrs if pair[1])), content)
        for path, (entry, content) in tree.items()
        if path
    }


ODD = ["-rf", "a b", "\n", "\t*", "é", "e\u0301", "\udcff\udcfe", "\\", "'\"", "...", ".x", "\x7f", "\x01"]
NAMES = st.one_of(
    st.sampled_from(ODD),
    st.text("abAB.-_0é\udc80", min_size=1, max_size=60),
    st.binary(min_size=1, max_size=255)
    .map(lambda raw: raw.replace(b"/", b"_").replace(b"\0", b"_"))
    .map(lambda raw: raw.decode("utf-8", "surrogateescape")),
).filter(lambda name: name not in (".", ".."))
SIZES = st.one_of(
    st.integers(0, 300), st.sampled_from([1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 5])
)
NUMBERS = st.one_of(st.integers(0, 1000), st.sampled_from([65535, 65536, LAST_SECOND - 1]))
TIMES = st.one_of(st.integers(0, LAST_SECOND), st.sampled_from([0, 1 << 31, LAST_SECOND]))
VALUES = st.binary(max_size=200)


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[Entry, bytes]]:
    folders = [""]
    entries: dict[str, tuple[Entry, bytes]] = {}
    if draw(st.booleans()):
        entries[""] = Entry("", DIR, 0o1711, uid=5, mtime=draw(TIMES)), b""
    for _ in range(draw(st.integers(0, 25))):
        folder = draw(st.sampled_from(folders))
        path = f"{folder}/{draw(NAMES)}".removeprefix("/")
        if path in entries:
            continue
        linkable = [name for name, (entry, _) in entries.items() if entry.kind not in (DIR, HARDLINK)]
        kinds = [FILE, FILE, DIR, SYMLINK, CHAR, BLOCK, FIFO] + [HARDLINK] * bool(linkable)
        kind = draw(st.sampled_from(kinds))
        if kind == HARDLINK:
            entries[path] = Entry(path, HARDLINK, target=draw(st.sampled_from(linkable))), b""
            continue
        size = draw(SIZES) if kind == FILE else 0
        # Linux has user attributes on files and directories alone.
        spaces = ["trusted", "security"] + ["user"] * (kind in (FILE, DIR))
        keys = st.builds("{}.{}".format, st.sampled_from(spaces), st.sampled_from("xyz"))
        entry = Entry(
            path,
            kind,
            0o777 if kind == SYMLINK else draw(st.integers(0, 0o7777)),
            size,
            draw(NAMES) if kind == SYMLINK else "",
            draw(NUMBERS),
            draw(NUMBERS),
            draw(TIMES),
            (draw(st.integers(0, 4095)), draw(st.integers(0, (1 << 20) - 1))) if kind in (CHAR, BLOCK) else (0, 0),
            tuple(draw(st.dictionaries(keys, VALUES, max_size=2)).items()),
        )
        if kind == DIR and path.count("/") < 6:
            folders.append(path)
        pattern = draw(st.binary(min_size=1, max_size=3))
        entries[path] = entry, (pattern * size)[:size]
    return list(entries.values())


@pytest.mark.parametrize("name", ["gzip", "xz", "lz4", "lz4:9", "zstd"])
def test_every_reader_sees_the_tree_as_it_was_described(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    codec = codec_of(name)

    # The tables are the same with every compressor.
    @settings(max_examples=30 if name == "zstd" else 10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(trees(), st.randoms(use_true_random=False), st.booleans())
    def check(tree: list[tuple[Entry, bytes]], chance: random.Random, ends: bool) -> None:
        folder = tmp_path_factory.mktemp("tree")
        image, copy = folder / "image.sqfs", folder / "copy"
        wanted = expected(tree)
        chance.shuffle(tree)
        write_image(image, tree, codec, ends=ends)
        run("unsquashfs", "-no-progress", "-quiet", "-dest", copy, image)
        assert seen(copy) == wanted
        lines = run("unsquashfs", "-llnumeric", image)
        assert lines.count("squashfs-root") == len(wanted)
        tar = subprocess.run(["sqfs2tar", image], capture_output=True, check=True)
        assert not tar.stderr
        assert told(tar.stdout) == as_tar(wanted)
        run("rdsquashfs", "--describe", image)
        with mounted(image) as root:
            assert seen(root) == wanted
            at_top = [entry for path, (entry, _) in wanted.items() if path and "/" not in path]
            assert root.stat().st_nlink == 2 + sum(entry.kind == DIR for entry in at_top)
        shutil.rmtree(folder)

    check()


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Entry]]:
    """An image of 70,000 entries in one directory, with as many owners as fit and 1,750 sets of attributes.

    That is more than 2^16, a limit of some tables. Every thousandth is a second name of a file in another directory,
    far away in the inode table.
    """
    chance = random.Random(3)
    letters = "abcxyz_éü\udcff"
    names = {"".join(chance.choices(letters, k=chance.randint(6, 40))) + str(n) for n in range(100)}
    names |= {f"{chance.randrange(1 << 40):x}-{n}.py" for n in range(70_000 - len(names))}
    entries = {"d": Entry("d", DIR, 0o755), "e": Entry("e", DIR, 0o755)}
    for n, name in enumerate(sorted(names)):
        path = f"d/{name}"
        if n % 1000 == 500:
            entries[f"e/{n}"] = Entry(f"e/{n}", FILE, 0o600, mtime=n)
            entries[path] = Entry(path, HARDLINK, target=f"e/{n}")
            continue
        attributes: tuple[tuple[str, bytes], ...] = ()
        if n % 40 == 0:
            attributes = (("user.number", str(n % 80_000).encode()), ("trusted.all", b"equal" * 9))
        entries[path] = Entry(path, FILE, 0o644, uid=n % 65535, gid=7, mtime=n, xattrs=attributes)
    entries["large"] = Entry("large", FILE, xattrs=(("user.large", chance.randbytes(1 << 16)),))
    image = tmp_path_factory.mktemp("crowd") / "image.sqfs"
    write_image(image, ((entry, b"") for entry in entries.values()), codec_of("zstd"))
    return image, entries


def check_crowd(root: Path, entries: dict[str, Entry], space: str = "") -> None:
    listed = os.listdir(root / "d")
    assert len(listed) == len(set(listed))
    assert {f"d/{name}" for name in listed} == {path for path in entries if path.startswith("d/")}
    names = sorted(listed)
    # Look-ups go through the index.
    for name in [*names[:50], *random.Random(1).sample(names, 200), *names[-50:], *names[500::9000]]:
        wanted = entries[f"d/{name}"]
        wanted = entries.get(wanted.target, wanted)
        status = os.lstat(root / "d" / name)
        assert (status.st_uid, status.st_gid, int(status.st_mtime), status.st_mode & 0o7777) == (
            wanted.uid,
            wanted.gid,
            wanted.mtime,
            wanted.mode,
        )
        assert status.st_nlink == 1 + wanted.path.startswith("e/")
        for absent in (name[:-1], name + "0", "0" + name):
            assert os.path.lexists(root / "d" / absent) == (f"d/{absent}" in entries)
    marked = [entry for entry in entries.values() if entry.path.startswith("d/") and entry.xattrs]
    for entry in marked[::20]:
        assert len(attributes_of(root / entry.path)) == 2
        for key, value in entry.xattrs:
            assert not key.startswith(space) or os.getxattr(root / entry.path, key) == value
    key, value = entries["large"].xattrs[0]
    assert os.getxattr(root / "large", key) == value


def test_the_kernel_finds_names_among_70_000(crowd: tuple[Path, dict[str, Entry]]) -> None:
    image, entries = crowd
    with mounted(image) as root:
        check_crowd(root, entries)


def test_squashfuse_finds_names_among_70_000(crowd: tuple[Path, dict[str, Entry]]) -> None:
    image, entries = crowd
    with fused(image) as root:
        # This squashfuse takes trusted for security, whoever made the image.
        check_crowd(root, entries, space="user")


def test_tools_list_70_000_names(crowd: tuple[Path, dict[str, Entry]]) -> None:
    image, entries = crowd
    listed = run("unsquashfs", "-lc", image).splitlines()
    # -lc leaves out directories that are not empty.
    assert sorted(listed) == sorted(f"squashfs-root/{path}" for path in entries if path not in "de")
    assert len(run("rdsquashfs", "--describe", image).splitlines()) == len(entries)
    tar = subprocess.run(["sqfs2tar", image], capture_output=True, check=True)
    assert not tar.stderr
    wanted = as_tar(expected([(entry, b"") for entry in entries.values()]))
    assert told(tar.stdout) == wanted


def test_sizes_and_places_beyond_4_gib(tmp_path: Path) -> None:
    image, codec = tmp_path / "image.sqfs", codec_of("zstd")
    blocks_of_zeros = (5 << 30) // BLOCK_SIZE
    size = blocks_of_zeros * BLOCK_SIZE + 3
    with image.open("wb") as out:
        place = out.seek((4 << 30) + 4096)  # the image file itself has a hole
        out.write(b"end")
        sparse = Data(place, (0,) * blocks_of_zeros + (UNCOMPRESSED | 3,))
        placed = [
            Placed(Entry("far", FILE, 0o644, 3), Data(place, (UNCOMPRESSED | 3,))),
            Placed(Entry("sparse", FILE, 0o644, size), sparse),
            Placed(Entry("zeros", FILE, 0o644, 5 << 30), Data(place, (0,) * blocks_of_zeros)),
        ]
        assert write_tables(out, 0, placed, [], codec, 0) > place
    run("unsquashfs", "-no-progress", "-quiet", "-dest", tmp_path / "copy", image, "far", "sparse")
    with mounted(image) as root:
        for folder in (tmp_path / "copy", root):
            assert (folder / "far").read_bytes() == b"end"
            status = (folder / "sparse").stat()
            assert status.st_size == size
            assert status.st_blocks <= 16
            with (folder / "sparse").open("rb") as stream:
                assert stream.read(4096) == bytes(4096)
                stream.seek(size - 5)
                assert stream.read() == b"\0\0end"
        status = (root / "zeros").stat()
        assert (status.st_size, status.st_blocks) == (5 << 30, 0)
    with fused(image) as root:
        assert (root / "far").read_bytes() == b"end"
        assert (root / "sparse").stat().st_size == size


def test_an_image_may_lie_behind_something_else(tmp_path: Path) -> None:
    """As in SIF, where squashfs is one part of a file."""
    image = tmp_path / "image.sif"
    tree = [(Entry("d", DIR, 0o755), b""), (Entry("d/f", FILE, 0o644, 200_000), b"xyz" * 66_666 + b"xy")]
    write_image(image, tree, codec_of("gzip"), base=32768)
    run("unsquashfs", "-no-progress", "-quiet", "-offset", "32768", "-dest", tmp_path / "copy", image)
    assert seen(tmp_path / "copy") == expected(tree)
    with mounted(image, offset=32768) as root:
        assert seen(root) == expected(tree)


def test_an_image_lists_as_one_of_mksquashfs_does(tmp_path: Path) -> None:
    """The same tree, by the tool whose format it is."""
    if shutil.which("mksquashfs") is None:
        pytest.skip("not installed: squashfs-tools")
    codec, folder = codec_of("zstd"), tmp_path / "copy"
    tree = [(Entry("", DIR, 0o755, mtime=9), b""), (Entry("empty", DIR, 0o700, uid=3, mtime=8), b"")]
    tree += [(Entry(f"f{n}", FILE, 0o600 + n % 7, 3, gid=n, mtime=n), b"abc") for n in range(700)]
    tree += [(Entry("l", HARDLINK, target="f9"), b""), (Entry("p", FIFO, 0o600), b"")]
    tree += [(Entry("s", SYMLINK, 0o777, target="empty"), b""), (Entry("t", CHAR, device=(1, 7)), b"")]
    write_image(tmp_path / "ours.sqfs", tree, codec)
    run("unsquashfs", "-no-progress", "-quiet", "-dest", folder, tmp_path / "ours.sqfs")
    run("mksquashfs", folder, tmp_path / "theirs.sqfs", "-comp", "zstd", "-quiet", "-no-progress")
    ours = run("unsquashfs", "-llnumeric", tmp_path / "ours.sqfs")
    assert ours == run("unsquashfs", "-llnumeric", tmp_path / "theirs.sqfs")
    assert ours.count("\n") == len(tree)
