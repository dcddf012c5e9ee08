"""Packages as streams and the tree that they make, with faults that nobody tuned for."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from lab.debian import ar, deb, info, tar

from envbuild.base.errors import BuildError, EnvbuildError
from envbuild.debian.lock import LockedDeb
from envbuild.debian.rootfs import debian_tree, read_control, read_data
from envbuild.image.entry import Entry

CONTROL = b"Package: demo\nVersion: 1\nArchitecture: amd64\n"
Items = Sequence[tarfile.TarInfo | tuple[str, bytes]]


def written(tmp_path: Path, data: bytes, name: str = "demo") -> Path:
    path = tmp_path / f"{name}.deb"
    path.write_bytes(data)
    return path


def content(path: Path) -> dict[str, bytes | None]:
    return {e.path: c.read() if c else None for e, c in read_data(path, "demo")}


def tree(tmp_path: Path, **packages: Items) -> dict[str, tuple[Entry, bytes]]:
    """The tree of packages by path, checked for what holds of every tree."""
    return built(tmp_path, {name: deb(name, items) for name, items in packages.items()})


def built(tmp_path: Path, packages: dict[str, bytes]) -> dict[str, tuple[Entry, bytes]]:
    debs = [
        (LockedDeb(name, "1", "amd64", f"pool/{name}.deb", "0" * 64, 1), written(tmp_path, data, name))
        for name, data in packages.items()
    ]
    found: dict[str, tuple[Entry, bytes]] = {}
    for entry, stream in debian_tree(debs, 1_700_000_000):
        assert entry.path not in found and entry.mtime == 1_700_000_000
        parent = entry.path.rpartition("/")[0]
        assert not parent or found[parent][0].kind == "dir", entry
        data = stream.read() if stream else b""
        assert len(data) == entry.size
        found[entry.path] = (entry, data)
    return found


@pytest.mark.parametrize(
    ("suffix", "pack"), [(".xz", lzma.compress), (".gz", gzip.compress), (".zst", zstandard.compress), ("", bytes)]
)
def test_every_compression_is_read(tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]) -> None:
    data = tar([info("./"), info("./usr"), ("./usr/a", b"x" * 100_000)])
    members = {
        "debian-binary": b"2.0\n",
        f"control.tar{suffix}": pack(tar([("./control", CONTROL), ("./conffiles", b"/etc/x\n/etc/y\n")])),
        f"data.tar{suffix}": pack(data),
    }
    path = written(tmp_path, ar(members))
    control = read_control(path, "demo")
    assert control.fields["version"] == "1" and control.conffiles == ("etc/x", "etc/y")
    assert content(path) == {"": None, "usr": None, "usr/a": b"x" * 100_000}


def test_unknown_members_are_passed_over(tmp_path: Path) -> None:
    control, data = lzma.compress(tar([("control", CONTROL)])), lzma.compress(tar([("a", b"1")]))
    members = {"debian-binary": b"2.1\nmore", "_odd": b"123", "control.tar.xz": control, "data.tar.xz": data}
    assert content(written(tmp_path, ar(members))) == {"a": b"1"}


GOOD = deb("demo", [info("./"), ("./usr/file", bytes(range(256)) * 4000)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no ar archive"),
        (b"PK\x03\x04" * 20, "no ar archive"),
        (GOOD[:60], "truncated or no ar"),
        (GOOD[:200], "truncated: 'control.tar.xz' is not whole"),
        (GOOD[:-40], "truncated: 'data.tar.xz' is not whole"),
        (GOOD.replace(b"2.0\n", b"3.0\n", 1), "no Debian package of format 2"),
        (ar({"control.tar.xz": b""}), "no Debian package of format 2"),
        (ar({"debian-binary": b"2.0\n"}), "no control.tar"),
        (ar({"debian-binary": b"2.0\n", "control.tar.xz": b"no xz"}), "not a tar archive"),
        (ar({"debian-binary": b"2.0\n", "control.tar.lzma": b""}), "compressed in a way"),
        (ar({"debian-binary": b"2.0\n", "control.tar": tar([("control", b"nonsense\n")])}), "neither `Field"),
        (deb("else", []), "its control file is of 'else'"),
        (deb("demo", [], extra="Package: demo\n"), "given twice"),
        (deb("demo", [], conffiles="/../etc/passwd\n"), "holds the path"),
    ],
)
def test_a_faulty_package_is_named_with_its_fault(tmp_path: Path, data: bytes, message: str) -> None:
    path = written(tmp_path, data)
    with pytest.raises(BuildError, match=message) as caught:
        read_control(path, "demo")
        content(path)
    assert "demo" in caught.value.message


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress, zstandard.compress])
@pytest.mark.parametrize("part", [0.3, 0.6, 0.99])
def test_a_stream_that_ends_early_is_an_error(tmp_path: Path, pack: Callable[[bytes], bytes], part: float) -> None:
    import random

    whole = pack(tar([("a", random.Random(1).randbytes(300_000)), ("b", b"2")]))
    suffix = {lzma.compress: "xz", gzip.compress: "gz"}.get(pack, "zst")
    members = {"debian-binary": b"2.0\n", f"data.tar.{suffix}": whole[: int(len(whole) * part)]}
    with pytest.raises(BuildError, match="demo"):
        content(written(tmp_path, ar(members)))


@pytest.mark.parametrize(
    "item",
    [
        ("/etc/passwd", b""),
        ("../evil", b""),
        ("./usr/../../evil", b""),
        info("./a/.."),
        info("./a", tarfile.LNKTYPE, "../../etc/passwd"),
        info("./a", tarfile.LNKTYPE, "/etc/passwd"),
        info("./a", b"Z"),
    ],
    ids=lambda item: item[0] if isinstance(item, tuple) else f"{item.name} {item.linkname}",
)
def test_no_path_leaves_the_root(tmp_path: Path, item: tarfile.TarInfo | tuple[str, bytes]) -> None:
    with pytest.raises(BuildError, match="the package demo cannot be unpacked"):
        content(written(tmp_path, deb("demo", [item])))


@given(st.data())
def test_a_damaged_package_never_ends_in_anything_but_a_build_error(data: st.DataObject) -> None:
    import tempfile

    whole = bytearray(deb("demo", [info("./usr"), ("./usr/a", b"abc" * 50)]))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), bytes(whole))
        try:
            read_control(path, "demo")
            content(path)
        except EnvbuildError as error:
            assert "demo" in error.message


def test_paths_below_merged_folders_are_rewritten(tmp_path: Path) -> None:
    hard = info("./usr/bin/hard", tarfile.LNKTYPE, "./bin/tool", 0o755)
    made = tree(
        tmp_path,
        one=[
            info("./bin"),
            ("./bin/tool", b"x"),
            hard,
            info("./lib64"),
            info("./lib64/ld.so", tarfile.SYMTYPE, "/lib/x.so"),
            info("./var/run"),
            ("./var/run/pid", b"1"),
        ],
        two=[info("./bin", tarfile.SYMTYPE, "usr/bin"), ("./lib/x.so", b"y"), ("./usr/lib/y.so", b"z")],
    )
    assert {p: e.target for p, (e, _) in made.items() if e.kind == "symlink" and "/" not in p} == {
        "bin": "usr/bin",
        "lib": "usr/lib",
        "sbin": "usr/sbin",
        "lib64": "usr/lib64",
    }
    assert made["usr/bin/hard"][0].target == "usr/bin/tool"
    assert made["usr/bin/hard"][0].kind == "hardlink"
    assert {"usr/bin/tool", "usr/lib64/ld.so", "usr/lib/x.so", "usr/lib/y.so", "run/pid"} <= set(made)
    assert made["usr/lib64/ld.so"][0].target == "/lib/x.so"
    assert made["var/run"][0].target == "/run"


@pytest.mark.parametrize(
    ("one", "two", "message"),
    [
        ([("./usr/x", b"1")], [("./usr/x", b"1")], "one and two both have /usr/x"),
        ([("./bin/x", b"1")], [("./usr/bin/x", b"1")], "one and two both have /usr/bin/x"),
        ([("./usr/x", b"1")], [info("./usr/x")], "one and two both have /usr/x"),
        (
            [info("./usr/x", tarfile.SYMTYPE, "/etc")],
            [("./usr/x/passwd", b"1")],
            "two: /usr/x/passwd lies below /usr/x, which is no folder but a symlink of one",
        ),
        ([info("./a", tarfile.SYMTYPE, "..")], [("./a/b", b"1")], "a symlink of one"),
        ([("./a", b"")], [("./a/b", b"1")], "a file of one"),
        ([info("./lib", tarfile.SYMTYPE, "/opt")], [], "one: its /lib is neither a folder nor a link to usr/lib"),
        ([], [("./bin", b"")], "two: its /bin is neither"),
        ([], [info("./a", tarfile.LNKTYPE, "./b")], "two: /a is a hard link to /b, which is no file"),
        ([info("./b")], [info("./a", tarfile.LNKTYPE, "./b")], "which is no file"),
    ],
)
def test_packages_that_do_not_fit_together_are_named(tmp_path: Path, one: Items, two: Items, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        tree(tmp_path, one=one, two=two)


def test_a_package_that_is_not_the_locked_one_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, deb("demo", [], version="2", arch="arm64"))
    locked = LockedDeb("demo", "1", "amd64", "pool/demo.deb", "0" * 64, 1)
    with pytest.raises(BuildError, match=r"holds demo 2 \(arm64\), but the lock names demo 1 \(amd64\)"):
        list(debian_tree([(locked, path)], 0))


def test_documentation_goes_and_licences_stay(tmp_path: Path) -> None:
    made = tree(
        tmp_path,
        demo=[
            info("./usr/share/doc"),
            info("./usr/share/doc/demo"),
            ("./usr/share/doc/demo/copyright", b"MIT"),
            ("./usr/share/doc/demo/changelog.gz", b""),
            ("./usr/share/man/man1/demo.1.gz", b""),
            ("./usr/share/locale/de/LC_MESSAGES/demo.mo", b""),
            ("./usr/lib/locale/C.utf8/LC_CTYPE", b"c"),
            ("./usr/share/common-licenses/GPL-3", b"g"),
            info("./usr/share/doc/demo-doc", tarfile.SYMTYPE, "demo"),
        ],
    )
    assert made["usr/share/doc/demo/copyright"][1] == b"MIT"
    kept = {"usr/share/doc/demo-doc", "usr/lib/locale/C.utf8/LC_CTYPE", "usr/share/common-licenses/GPL-3"}
    assert kept <= set(made)
    assert not [p for p in made if "changelog" in p or "/man/man1" in p or "usr/share/locale" in p]


def test_what_scripts_would_have_made_is_there(tmp_path: Path) -> None:
    passwd = b"root:*:0:0:root:/root:/bin/bash\nnobody:*:65534:65534::/:/usr/sbin/nologin\n"
    made = tree(
        tmp_path,
        demo=[
            ("./usr/share/base-passwd/passwd.master", passwd),
            ("./usr/share/base-passwd/group.master", b"root:*:0:\n"),
            ("./usr/share/ca-certificates/mozilla/B.crt", b"BB"),
            ("./usr/share/ca-certificates/mozilla/A.crt", b"AA\n"),
            ("./usr/bin/mawk", b""),
            ("./usr/bin/which.debianutils", b""),
            ("./usr/bin/python3.9", b""),
            ("./usr/bin/python3.11", b""),
            ("./usr/share/libc-bin/nsswitch.conf", b"passwd: files\n"),
            ("./usr/share/debianutils/shells", b"# shells\n/bin/sh\n/usr/bin/sh\n"),
            ("./usr/share/debianutils/shells.d/bash", b"/bin/bash\n"),
        ],
    )
    assert made["etc/passwd"][1].startswith(b"root:x:0:0:root:/root:/bin/bash\nnobody:x:")
    assert made["etc/shadow"][1] == b"root:*:19675:0:99999:7:::\nnobody:*:19675:0:99999:7:::\n"
    assert (made["etc/shadow"][0].mode, made["etc/shadow"][0].gid) == (0o640, 42)
    assert (made["etc/group"][1], made["etc/gshadow"][1]) == (b"root:x:0:\n", b"root:*::\n")
    assert made["etc/ssl/certs/ca-certificates.crt"][1] == b"AA\nBB\n"
    assert made["etc/ca-certificates.conf"][1] == b"mozilla/A.crt\nmozilla/B.crt\n"
    assert made["etc/shells"][1] == b"# shells\n/bin/sh\n/usr/bin/sh\n/bin/bash\n/usr/bin/bash\n"
    assert made["etc/nsswitch.conf"][1] == b"passwd: files\n"
    assert made["usr/bin/python3"][0].target == "python3.11"
    assert made["usr/bin/awk"][0].target == "/etc/alternatives/awk"
    assert made["etc/alternatives/awk"][0].target == "/usr/bin/mawk"
    assert "usr/bin/which" in made and "etc/profile" not in made
    assert "usr/bin/cc" not in made and not [p for p in made if "libblas" in p]
    modes = {p: made[p][0].mode for p in ("tmp", "var/tmp", "root", "run/lock", "proc")}
    assert modes == {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "run/lock": 0o1777, "proc": 0o755}


def test_alternatives_of_libraries_are_those_of_the_architecture(tmp_path: Path) -> None:
    folder = "usr/lib/aarch64-linux-gnu"
    items = [(f"./{folder}/{kind}/libblas.so.3", b"") for kind in ("blas", "openblas-pthread")]
    made = tree(tmp_path, demo=items)
    assert made[f"{folder}/libblas.so.3"][0].target == "/etc/alternatives/libblas.so.3"
    assert made["etc/alternatives/libblas.so.3"][0].target == f"/{folder}/openblas-pthread/libblas.so.3"
    assert not [path for path in made if "x86_64" in path]


def test_names_in_any_encoding_come_through(tmp_path: Path) -> None:
    names = ["./usr/share/ca-certificates/mozilla/F\u0151.crt", "./usr/latin-\udce9"]
    made = tree(tmp_path, demo=[(name, b"x") for name in names])
    assert {name[2:] for name in names} <= set(made)
    listing = made["var/lib/dpkg/info/demo.list"][1]
    assert "F\u0151.crt\n".encode() in listing and b"/usr/latin-\xe9\n" in listing
    assert made["etc/ca-certificates.conf"][1] == "mozilla/F\u0151.crt\n".encode()


def test_what_a_package_has_is_not_made_again(tmp_path: Path) -> None:
    made = tree(
        tmp_path, demo=[info("./tmp", mode=0o700), ("./usr/bin/python3.11", b""), ("./usr/bin/python3", b"own")]
    )
    assert made["tmp"][0].mode == 0o700 and made["usr/bin/python3"][1] == b"own"


def test_dpkgs_database_names_packages_paths_and_conffiles(tmp_path: Path) -> None:
    package = deb(
        "demo",
        [info("./"), info("./etc"), ("./etc/demo.conf", b"a=1\n"), ("./usr/share/man/x", b"")],
        extra="Multi-Arch: same\n",
        conffiles="/etc/demo.conf\n",
    )
    made = built(tmp_path, {"demo": package, "aaa": deb("aaa", [])})
    status = made["var/lib/dpkg/status"][1].decode()
    md5 = hashlib.md5(b"a=1\n").hexdigest()
    assert status.startswith("Package: aaa\nStatus: install ok installed\nVersion: 1\n")
    assert "\n\nPackage: demo\nStatus: install ok installed\n" in status
    assert status.endswith(f"Conffiles:\n /etc/demo.conf {md5}\n")
    assert made["var/lib/dpkg/info/demo:amd64.list"][1] == b"/.\n/etc\n/etc/demo.conf\n/usr/share/man/x\n"
    assert made["var/lib/dpkg/info/demo:amd64.conffiles"][1] == b"/etc/demo.conf\n"
    assert made["var/lib/dpkg/info/aaa.list"][1] == b""


def test_the_order_does_not_depend_on_that_of_the_packages(tmp_path: Path) -> None:
    items: dict[str, Items] = {
        "one": [("./usr/a", b"1")],
        "base-files": [info("./usr", mode=0o700)],
        "two": [("./b", b"2")],
    }
    first = tree(tmp_path, **items)
    again = tree(tmp_path, **dict(reversed(items.items())))
    assert list(first.items()) == list(again.items())
    # The first package wins over a folder's mode, and base-files is the first.
    assert first["usr/a"][1] == b"1" and first["b"][1] == b"2"
