"""Our merge of layers against `umoci unpack`, and our layouts and archives read by umoci and skopeo."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import docker
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lab.dockerd import dockerd, missing
from lab.merged import Merged, merge

from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of
from envbuild.image.archive import archive_pieces, read_archive, read_daemon
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.layer import header, open_layer
from envbuild.image.layout import Blobs, fill_layout, read_layout
from envbuild.image.model import GOARCH, OCI_CONFIG, OCI_LAYER, OCI_MANIFEST, Descriptor, canonical

pytestmark = [
    pytest.mark.skipif(not shutil.which("umoci"), reason="umoci is not installed"),
    pytest.mark.skipif(not shutil.which("skopeo"), reason="skopeo is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="umoci keeps owners and devices for root only"),
]
ARCH = "x86_64"
LATEST = 1_700_000_000  # of all times in these layers, in seconds since 1970
Stack = list[list[Entry]]


def tar_of(layer: Sequence[Entry], number: int) -> bytes:
    """A layer's tar; each file says which member it was, so that no other can stand for it."""
    data = b""
    for ordinal, entry in enumerate(layer):
        filled = entry.kind == FILE and ".wh." not in entry.path
        content = f"{number}.{ordinal}".encode() * 100 if filled else b""
        data += header(dataclasses.replace(entry, size=len(content)))
        data += content + bytes(-len(content) % 512)
    return data + bytes(1024)


def image_of(tars: Sequence[bytes], blobs: Blobs) -> tuple[Descriptor, bytes]:
    """The manifest of an image of these layers, stored, and its configuration."""
    layers = [Descriptor(OCI_LAYER, blobs.add(data), len(data)) for data in tars]
    config = canonical(
        {
            "architecture": GOARCH[ARCH],
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        }
    )
    manifest = canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": Descriptor(OCI_CONFIG, blobs.add(config), len(config)).as_json(),
            "layers": [layer.as_json() for layer in layers],
        }
    )
    return Descriptor(OCI_MANIFEST, blobs.add(manifest), len(manifest)), config


def run(*line: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in line], capture_output=True, text=True)


def unpacked(folder: Path) -> dict[str, dict[str, Any]]:
    """What is on disk below `folder`, the root as ""."""
    found: dict[str, dict[str, Any]] = {}
    groups: dict[int, list[str]] = defaultdict(list)
    todo = [folder]
    while todo:
        path = todo.pop()
        about = path.lstat()
        name = "" if path == folder else str(path.relative_to(folder))
        kind = KINDS[stat.S_IFMT(about.st_mode)]
        found[name] = {
            "kind": kind,
            "mode": stat.S_IMODE(about.st_mode),
            "owner": (about.st_uid, about.st_gid),
            "mtime": about.st_mtime_ns // 10**9,
            "content": path.read_bytes() if kind == FILE else b"",
            "target": os.readlink(path) if kind == SYMLINK else "",
            "device": (os.major(about.st_rdev), os.minor(about.st_rdev)),
            "xattrs": tuple(
                (key, os.getxattr(path, key, follow_symlinks=False))
                for key in sorted(os.listxattr(path, follow_symlinks=False))
                if key.startswith("user.")
            ),
        }
        if kind == DIR:
            todo += path.iterdir()
        else:
            groups[about.st_ino].append(name)
    for names in groups.values():
        for name in names:
            found[name]["names"] = sorted(names)
    return found


KINDS = {
    stat.S_IFREG: FILE,
    stat.S_IFDIR: DIR,
    stat.S_IFLNK: SYMLINK,
    stat.S_IFIFO: FIFO,
    stat.S_IFCHR: CHAR,
    stat.S_IFBLK: BLOCK,
}


def described(merged: Merged) -> dict[str, dict[str, Any]]:
    """The same of our tree."""
    found: dict[str, dict[str, Any]] = {}
    groups: dict[str, list[str]] = defaultdict(list)
    for path, item in merged.entries.items():
        entry = item.entry
        link = entry.kind == HARDLINK
        real = merged.entries[entry.target].entry if link else entry
        found[path] = {
            "kind": real.kind,
            "mode": entry.mode,
            "owner": (entry.uid, entry.gid),
            "mtime": entry.mtime,
            "content": b"",
            "target": real.target,
            "device": entry.device,
            "xattrs": entry.xattrs,
        }
        if real.kind != DIR:
            groups[entry.target if link else path].append(path)
    for path, content in merged.contents().items():
        found[path]["content"] = content
        assert len(content) == merged.entries[path].entry.size
    for names in groups.values():
        for name in names:
            found[name]["names"] = sorted(names)
    return found


def sources(tars: Sequence[bytes]) -> list[tuple[str, Callable[[], BinaryIO]]]:
    def start(data: bytes) -> Callable[[], BinaryIO]:
        return lambda: io.BytesIO(data)

    return [(f"layer {number}", start(data)) for number, data in enumerate(tars)]


def agree(tars: Sequence[bytes], folder: Path) -> str:
    """Compare on one stack. What umoci makes, we make; what it refuses we refuse, but for one case."""
    blobs = Blobs(folder / "blobs")
    image, _ = image_of(tars, blobs)
    layout, bundle = folder / "layout", folder / "bundle"
    layout.mkdir()
    fill_layout(layout, blobs, [(image, "test")])
    done = run("umoci", "unpack", "--image", f"{layout}:test", bundle)
    try:
        merged = merge(sources(tars))
    except BuildError as error:
        assert done.returncode != 0, f"we refused: {error.message}"
        reasons = ("not a directory", "root directory", "invalid tar header")
        path = error.message.split(": ")[1]
        at_fault = path in done.stderr.replace("/./", "/") or any(reason in done.stderr for reason in reasons)
        assert at_fault, (error.message, done.stderr)
        return "both refuse"
    if done.returncode != 0:
        # umoci 0.4.7 stops where a lower layer has a file and this one has something below it; umoci from
        # 0.5 on and overlay file systems hide the file, and so do we.
        assert "not a directory" in done.stderr, done.stderr
        return "umoci 0.4.7 refuses"
    ours, theirs = described(merged), unpacked(bundle / "rootfs")
    for path, item in theirs.items():
        # umoci itself changed the time of a directory, by making or removing something below it.
        if path in ours and item["kind"] == DIR and item["mtime"] > LATEST:
            ours[path]["mtime"] = item["mtime"]
    assert ours == theirs
    return "same"


names = st.sampled_from(["a", "b", "c", "dé"])
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
whiteouts = st.builds(
    lambda parent, name: "/".join([*parent, name]),
    st.lists(names, max_size=2),
    st.one_of(names.map(".wh.{}".format), st.just(".wh..wh..opq")),
)
targets = st.one_of(
    paths,
    paths.map("/{}".format),
    st.builds("{}{}".format, st.sampled_from(["../", "../../", "./", "/../../"]), paths),
    st.sampled_from(["..", ".", "/", "/etc", "nowhere/at/all"]),
)
odd = st.one_of(paths, st.builds("{}{}".format, st.sampled_from(["./", "/", "../", "a/../", "//", "./a/.//"]), paths))
modes = st.sampled_from([0o755, 0o644, 0o700, 0o4755, 0o2755, 0o1777, 0o600, 0o000])
# No setgid: below such a directory the kernel gives it to each directory that no layer describes.
folder_modes = st.sampled_from([0o755, 0o700, 0o1777, 0o000])
owners = st.sampled_from([0, 0, 1000, 70000])
times = st.integers(0, LATEST)
xattrs = st.sampled_from([(), (), (("user.one", b"1"),), (("user.one", b"\xff\x01"), ("user.two", b"2"))])


def made(kind: str, path: st.SearchStrategy[str], **more: Any) -> st.SearchStrategy[Entry]:
    mode = folder_modes if kind == DIR else modes
    return st.builds(Entry, path, st.just(kind), mode=mode, uid=owners, gid=owners, mtime=times, **more)


members = st.one_of(
    made(FILE, odd, xattrs=xattrs),
    made(FILE, paths),
    made(DIR, odd, xattrs=xattrs),
    made(DIR, paths),
    made(SYMLINK, paths, target=targets),
    made(HARDLINK, paths, target=odd),
    made(FILE, whiteouts),
    made(FIFO, paths),
    made(CHAR, paths, device=st.just((1, 3))),
)


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    """Layers in which most hard links name a file that some member before them made."""
    stack: Stack = []
    before: list[str] = []
    for layer in draw(st.lists(st.lists(members, max_size=6), min_size=1, max_size=4)):
        stack.append([])
        for entry in layer:
            if entry.kind == HARDLINK and before and draw(st.integers(0, 15)):
                target = before[draw(st.integers(0, len(before) - 1))]
                entry = dataclasses.replace(entry, target=target)
            if entry.kind not in (DIR, HARDLINK) and ".wh." not in entry.path:
                before.append(entry.path)
            stack[-1].append(entry)
    return stack


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(stacks())
# A link whose target a later layer replaces keeps the old content.
@example([[Entry("a"), Entry("b", HARDLINK, target="a")], [Entry("a")]])
# An opaque whiteout spares what its own layer made, wherever it stands in it.
@example([[Entry("a/b/c"), Entry("a/x")], [Entry("a/b/d"), Entry("a/.wh..wh..opq")]])
# Through a link of the tree, which points out of it on any other root.
@example([[Entry("a", SYMLINK, target="/etc")], [Entry("a/x"), Entry("a/../../../b")]])
# A directory that becomes a file and a directory again is empty.
@example([[Entry("a/b")], [Entry("a")], [Entry("a", DIR)]])
@example([[Entry("a/b", DIR)], [Entry("a", DIR, 0o700), Entry("a/.wh.b"), Entry("a/b")]])
def test_what_umoci_unpacks_is_what_we_merge(stack: Stack) -> None:
    with tempfile.TemporaryDirectory() as folder:
        agree([tar_of(layer, number) for number, layer in enumerate(stack)], Path(folder))


def raw(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", form: Literal[1, 2] = tarfile.PAX_FORMAT, **more: Any
) -> bytes:
    """A member whose header is written as asked, however odd."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    for key, value in more.items():
        setattr(info, key, value)
    return info.tobuf(form, "utf-8", "surrogateescape") + bytes(-info.size % 512 + info.size)


LINK, SYM, FOLDER = tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE
# Not here: whiteouts called ".wh.", ".wh.." and ".wh...", with which umoci 0.4.7 removes the directory they
# stand in or the one above, outside the root too. We refuse them.
ODD: dict[str, tuple[str, list[bytes]]] = {
    "no name, a file": ("both refuse", [raw("")]),
    "no name, a directory": ("same", [raw("", FOLDER, mode=0o700)]),
    "the root as a link": ("both refuse", [raw("./", SYM, "/etc")]),
    "the root from above": ("same", [raw("a/../../.", FOLDER, mode=0o711)]),
    "above the root": ("same", [raw("../../../../up"), raw("/../../x/../y/z")]),
    "a link out, and through it": ("same", [raw("l", SYM, "/../../.."), raw("l/x")]),
    "a link up, and through it": ("same", [raw("d/l", SYM, "../../../tmp"), raw("d/l/x")]),
    "through a link to nothing": ("same", [raw("l", SYM, "no/where"), raw("l/x")]),
    "through a link to a file": ("both refuse", [raw("f"), raw("l", SYM, "f"), raw("l/x")]),
    "links in a ring": ("both refuse", [raw("a", SYM, "b"), raw("b", SYM, "a"), raw("a/x")]),
    "a link to itself, replaced": ("same", [raw("a", SYM, "a"), raw("a", FOLDER), raw("a/x")]),
    "a link to no text": ("both refuse", [raw("a", SYM, "")]),
    "a hard link out": ("both refuse", [raw("a", LINK, "../../../../etc/hostname")]),
    "a hard link through a link out": ("both refuse", [raw("l", SYM, "/etc"), raw("a", LINK, "l/hostname")]),
    "a hard link to a link": ("same", [raw("l", SYM, "/etc/hostname"), raw("a", LINK, "l")]),
    "a hard link to itself": ("both refuse", [raw("a"), raw("a", LINK, "a")]),
    "a hard link to a directory": ("both refuse", [raw("d", FOLDER), raw("a", LINK, "d")]),
    "a hard link to the root": ("both refuse", [raw("a", LINK, "/")]),
    "a hard link before its target": ("both refuse", [raw("a", LINK, "b"), raw("b")]),
    "a hard link with a size": ("same", [raw("b"), raw("a", LINK, "b", size=600)[:-1024], raw("c")]),
    "a long name": ("same", [raw("n" * 255), raw("d/" * 400 + "x")]),
    "a long name, GNU": ("same", [raw("n/" * 150 + "x", form=tarfile.GNU_FORMAT)]),
    "too long a name": ("both refuse", [raw("n" * 256)]),
    "too long a path": ("both refuse", [raw("d/" * 2100 + "x")]),
    "too long a link": ("both refuse", [raw("l", SYM, "t" * 5000)]),
    "bytes that are no UTF-8": ("same", [raw("caf\udce9", form=tarfile.GNU_FORMAT)]),
    "a file called like a directory": ("same", [raw("x/", size=5)]),
    "an old directory": ("same", [raw("x/", tarfile.AREGTYPE), raw("x/y")]),
    "a kind of GNU's": ("both refuse", [raw("x", b"V")]),
    "a kind that nobody knows": ("both refuse", [raw("x", b"Z")]),
    "whiteout of nothing": ("same", [raw("no/.wh.x"), raw(".wh.y"), raw("z")]),
    "a directory as whiteout": ("same", [raw("x"), raw(".wh.x", FOLDER)]),
    "a whiteout with content": ("same", [raw("x"), raw(".wh.y", size=600)]),
    "a whiteout in a file": ("same", [raw("x"), raw("x/.wh.y"), raw("x/.wh..wh..opq")]),
    "opaque through a link": ("same", [raw("d/x"), raw("l", SYM, "d"), raw("l/.wh..wh..opq"), raw("l/y")]),
    "owners beyond 16 bits": ("same", [raw("x", uid=2**31, gid=70_000)]),
    "a time with a fraction": ("same", [raw("x", mtime=1.75), raw("y", mtime=-1.75)]),
    "a hole in the end": ("same", [raw("x") + bytes(1024) + raw("after")]),
    "one block of zeros": ("both refuse", [raw("x") + bytes(512) + raw("after")]),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_members_are_taken_as_umoci_takes_them(case: str, tmp_path: Path) -> None:
    """All in one layer, and each in a layer of its own."""
    expected, parts = ODD[case]
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    assert agree([b"".join(parts) + bytes(1024)], tmp_path / "one") == expected
    several = agree([part + bytes(1024) for part in parts], tmp_path / "many")
    assert several == expected or several.startswith("umoci 0.4.7")
    assert sorted(os.listdir(tmp_path / "one")) == sorted(os.listdir(tmp_path / "many"))


def transport(tars: Sequence[bytes], folder: Path) -> tuple[Path, Path, list[str]]:
    """A layout and an archive of one image, as we write them, and the diff_ids of its layers."""
    blobs = Blobs(folder / "blobs")
    image, config = image_of(tars, blobs)
    layout, archive = folder / "layout", folder / "archive.tar"
    layout.mkdir()
    fill_layout(layout, blobs, [(image, "v1")])
    layers = [Descriptor(OCI_LAYER, digest_of(data), len(data)) for data in tars]
    with archive.open("wb") as stream:
        stream.writelines(archive_pieces(config, layers, blobs, ["lab/image:v1"]))
    return layout, archive, [layer.digest for layer in layers]


TWO = [
    tar_of([Entry("a/b"), Entry("l", SYMLINK, target="a/b"), Entry("x" * 120)], 0),
    tar_of([Entry("a/.wh.b"), Entry("a/c")], 1),
]


def test_skopeo_reads_our_layouts_and_archives(tmp_path: Path) -> None:
    layout, archive, diff_ids = transport(TWO, tmp_path)
    for source in (f"oci:{layout}:v1", f"docker-archive:{archive}:lab/image:v1"):
        done = run("skopeo", "inspect", "--config", source)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["rootfs"]["diff_ids"] == diff_ids


@pytest.mark.parametrize("kind", ["oci", "oci-archive", "docker-archive"])
@pytest.mark.parametrize("compress", [True, False])
def test_we_read_what_skopeo_writes(kind: str, compress: bool, tmp_path: Path) -> None:
    """Compressed where the format allows: gzip'ed layers in layouts, a gzip'ed archive as a whole."""
    layout, _, diff_ids = transport(TWO, tmp_path)
    place = tmp_path / "copy"
    flags = ["--dest-compress"] if compress and kind != "docker-archive" else []
    done = run("skopeo", "copy", "--insecure-policy", *flags, f"oci:{layout}:v1", f"{kind}:{place}:lab/image:v1")
    assert done.returncode == 0, done.stderr
    blobs = Blobs(tmp_path / "read")
    if kind == "oci":
        pulled = read_layout(place, blobs, "v1", ARCH)
    else:
        if compress:
            subprocess.run(["gzip", place], check=True)
            place = place.with_suffix(".gz")
        pulled = read_archive(place, blobs, "lab/image:v1", ARCH)
    assert pulled.config["rootfs"]["diff_ids"] == diff_ids
    layers = [(item.digest, blobs.path(item.digest)) for item in pulled.manifest.layers]
    opened = [(name, partial(open_layer, path, name)) for name, path in layers]
    assert described(merge(opened)) == described(merge(sources(TWO)))


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_daemon_loads_what_we_write_and_we_read_what_it_holds(tmp_path: Path) -> None:
    """With the second load the archive leaves out the layer that the daemon has from the first."""
    _, archive, diff_ids = transport(TWO, tmp_path)
    blobs = Blobs(tmp_path / "blobs")
    more = [*TWO, tar_of([Entry("z")], 2)]
    _, config = image_of(more, blobs)
    layers = [Descriptor(OCI_LAYER, digest_of(data), len(data)) for data in more]
    rest = b"".join(archive_pieces(config, layers, blobs, ["lab/image:v2"], known=len(diff_ids)))
    assert diff_ids[0].encode() not in rest.partition(config)[2]
    with (
        dockerd(tmp_path / "docker") as lab,
        closing(docker.DockerClient(base_url=lab.environment()["DOCKER_HOST"])) as client,
    ):
        for data in (archive.read_bytes(), rest):
            client.images.load(data)
        assert client.images.get("lab/image:v2").id == digest_of(config)
        pulled = read_daemon("lab/image:v2", Blobs(tmp_path / "read"), client, ARCH)
        again = read_daemon(digest_of(config), Blobs(tmp_path / "read"), client)
        with pytest.raises(BuildError, match="lab/none: the daemon does not have it"):
            read_daemon("lab/none", blobs, client)
    assert pulled.manifest == again.manifest
    assert pulled.manifest.config.digest == digest_of(config)
    opened = [
        (item.digest, partial(open_layer, pulled.blobs.path(item.digest), item.digest))
        for item in pulled.manifest.layers
    ]
    assert described(merge(opened)) == described(merge(sources(more)))
