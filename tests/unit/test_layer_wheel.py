"""Wheels as trees. PyPI's `installer` says what is right: paths, modes and contents of what it writes."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import random
import stat
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.sources import WheelFile
from lab.wheels import make_wheel

from envbuild.base.errors import BuildError
from envbuild.base.packages import record_digest
from envbuild.contract.installed import check_files
from envbuild.image.layer import with_parents, write_layer
from envbuild.image.layout import Blobs
from envbuild.layers.wheel import Scheme, wheel_paths, wheel_record, wheel_tree
from examples import examples

SCHEME = Scheme("opt/env", "3.11")
SITE = SCHEME.site_packages
TIME = 1577836800
REGULAR, PROGRAM, LINK = stat.S_IFREG | 0o644, stat.S_IFREG | 0o755, stat.S_IFLNK | 0o777


@dataclass
class Odd:
    """A wheel written member by member. `attributes` is the mode in external_attr, `rows` alters RECORD."""

    members: Sequence[tuple[str, bytes]]
    attributes: dict[str, int] = field(default_factory=dict)
    name: str = "odd"
    info: str = "odd-1.0.dist-info"
    compression: int = zipfile.ZIP_DEFLATED
    rows: Callable[[list[list[str]]], list[list[str]]] = lambda rows: rows
    wheel: bytes = b"Wheel-Version: 1.0\nGenerator: lab\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

    def write(self, folder: Path) -> Path:
        metadata = b"Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n"
        members = [*self.members, (f"{self.info}/METADATA", metadata)]
        members += [(f"{self.info}/WHEEL", self.wheel)] if self.wheel else []
        rows = [
            [name, "sha256=" + b64(hashlib.sha256(data).digest()), str(len(data))]
            for name, data in members
            if not name.endswith(("/", ".jws"))
        ]
        text = io.StringIO()
        rows = self.rows([*rows, [f"{self.info}/RECORD", "", ""]])
        csv.writer(text, lineterminator="\n").writerows(rows)
        path = folder / f"{self.name}-1.0-py3-none-any.whl"
        with warnings.catch_warnings(), zipfile.ZipFile(path, "w", self.compression) as archive:
            warnings.simplefilter("ignore")  # of names that come twice
            for name, data in [*members, (f"{self.info}/RECORD", text.getvalue().encode())]:
                member = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
                member.external_attr = self.attributes.get(name, 0) << 16
                archive.writestr(member, data, self.compression)
        return path


def b64(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


Files = dict[str, tuple[int, bytes]]


def ours(wheel: Path) -> Files:
    return {
        entry.path: (entry.mode, stream.read(entry.size) if stream else b"")
        for entry, stream in wheel_tree(wheel, SCHEME, TIME)
    }


def installers(wheel: Path, folder: Path, headers: str = "odd") -> Files:
    """What `installer` makes of the wheel, below `folder`."""
    schemes = {
        "purelib": f"/{SITE}",
        "platlib": f"/{SITE}",
        "scripts": "/opt/env/bin",
        "data": "/opt/env",
        "headers": f"/opt/env/include/site/python3.11/{headers}",
    }
    there = SchemeDictionaryDestination(
        schemes, "/opt/env/bin/python", "posix", destdir=os.fspath(folder), overwrite_existing=True
    )
    old = os.umask(0o022)
    try:
        with WheelFile.open(wheel) as source:
            install(source, there, {"INSTALLER": b"envbuild\n"})
    finally:
        os.umask(old)
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mode & 0o7777, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def same_as_installer(wheel: Path, folder: Path, scripts: Sequence[str] = ()) -> Files:
    """Compare with `installer`; the text of `scripts`, made of entry points, is each one's own.

    The executable bit of other scripts is ours, as in pip and uv: `installer` takes the archive's.
    """
    found, wanted = ours(wheel), installers(wheel, folder)
    assert found.keys() == wanted.keys()
    for path in found:
        mode, content = wanted[path]
        if path.startswith(SCHEME.scripts + "/"):
            mode = 0o755
        assert found[path][0] == mode, path
        if not path.endswith(".dist-info/RECORD") and path.rpartition("/")[2] not in scripts:
            assert found[path][1] == content, path
    info = next(path for path in found if path.endswith(".dist-info/RECORD"))
    mine, theirs = rows_of(found[info][1]), rows_of(wanted[info][1])
    assert mine.keys() == theirs.keys()
    assert all(mine[path] == theirs[path] for path in mine if Path(path).name not in scripts)
    return found


def rows_of(record: bytes) -> dict[str, list[str]]:
    rows = list(csv.reader(io.StringIO(record.decode(), newline="")))
    assert len({row[0] for row in rows}) == len(rows)
    # Where platlib is purelib's folder `installer` names it "./".
    return {os.path.normpath(row[0]): row[1:] for row in rows}


def unpacked_is_as_recorded(wheel: Path, folder: Path) -> None:
    """The layer, read by Python's tarfile, holds what its RECORD says and nothing else."""
    blobs = Blobs(folder / "blobs")
    layer = write_layer(with_parents(wheel_tree(wheel, SCHEME, TIME), TIME), blobs)
    with tarfile.open(blobs.path(layer.blob.digest)) as archive:
        archive.extraction_filter = lambda member, _: member  # Python 3.11.2 knows no other way
        archive.extractall(folder / "root")
    report = check_files(folder / "root" / SITE)
    assert (report.missing, report.altered, report.unowned) == ([], [], [])
    outside = rows_of((next((folder / "root" / SITE).glob("*.dist-info")) / "RECORD").read_bytes())
    everything = [path for path in (folder / "root").rglob("*") if not path.is_dir()]
    assert len(outside) == len(everything)
    assert sum(not row[0] for row in outside.values()) == 1  # RECORD itself


LARGE = bytes(range(256)) * (9 << 12)
ENTRY_POINTS = """\
[console_scripts]
plain = pkg:main
dotted=pkg.sub.mod:Class.method
extras = pkg:main [extra1, extra2]
spaced name = pkg : main
żółw = pkg:główny
with.dots-and_1 = pkg:main
# a comment
[gui_scripts]
window = pkg.gui:start
[odd.plugins]
not a script = anything at all
"""
SCRIPTS = ["plain", "dotted", "extras", "spaced name", "żółw", "with.dots-and_1", "window"]
D = "odd-1.0.data"
WHEELS = {
    "every part of .data": Odd(
        [
            ("pkg/__init__.py", b"x = 1\n"),
            (f"{D}/scripts/tool", b"#!python\nprint(1)\n"),
            (f"{D}/scripts/gui", b"#!pythonw -E -s\r\nprint(2)\r\n"),
            (f"{D}/scripts/shell", b"#!/bin/sh\necho\n"),
            (f"{D}/scripts/binary", b"\x7fELF\0#!python\n" + LARGE),
            (f"{D}/scripts/near", b"#!pytho"),
            (f"{D}/scripts/one-line", b"#!python"),
            (f"{D}/scripts/long-line", b"#!python " + b"x" * (1 << 18) + b"\nprint()"),
            (f"{D}/scripts/empty", b""),
            (f"{D}/scripts/sub/nested", b"#!python3\nprint(3)\n"),
            (f"{D}/data/share/odd/a.txt", b"a"),
            (f"{D}/data/etc/odd.conf", b"b"),
            (f"{D}/headers/odd.h", b"#define ODD\n"),
            (f"{D}/headers/sub/odd.h", b""),
            (f"{D}/purelib/pkg/pure.py", b"y = 1\n"),
            (f"{D}/platlib/pkg/plat.so", b"\x7fELF"),
        ]
    ),
    "modes": Odd(
        [("bin/a", b"a"), ("lib.so", b"b"), ("b.py", b""), ("link", b"lib.so"), ("bare", b"c")],
        {"bin/a": PROGRAM, "lib.so": stat.S_IFREG | 0o744, "b.py": stat.S_IFREG | 0o4600, "link": LINK, "bare": 0o755},
    ),
    "names": Odd(
        [
            ("pkg/a,b.py", b"1"),
            ('pkg/quote"d.txt', b"2"),
            ("pkg/zażółć gęślą/jaźń 中.txt", b"3"),
            ("pkg/ space ", b"4"),
            ("Pkg/A,B.py", b"5"),
            ("pkg/" + "n" * 200 + "/" + "m" * 200, b"6"),
            ("pkg.data/not-data.txt", b"7"),
            ("pkg-1.0.data/another-name", b"8"),
            ("odd-1.0.data.txt", b"9"),
            ("pkg/_vendor/other-2.0.dist-info/RECORD", b"vendored"),
            ("pkg/INSTALLER", b"a"),
            ("odd-1.0.dist-info/RECORD.txt", b"b"),
            ("odd-1.0.dist-info/licenses/LICENSE", b"c"),
            ("odd-1.0.dist-info/direct_url.json", b"{}"),
        ]
    ),
    "sizes": Odd([("a/empty", b""), ("a/large", LARGE), ("a/random", random.Random(2).randbytes(1 << 20))]),
    "namespace": Odd([("space/inner/__init__.py", b""), ("space/inner/deep/er/m.py", b"z = 1")]),
    "stored": Odd([("a.py", b"a = 1\n" * 9999)], compression=zipfile.ZIP_STORED),
    "bzip2": Odd([("a.py", b"a = 1\n" * 9999)], compression=zipfile.ZIP_BZIP2),
    "lzma": Odd([("a.py", b"a = 1\n" * 9999), ("b", LARGE)], compression=zipfile.ZIP_LZMA),
    "folders as members": Odd([("pkg/", b""), ("pkg/sub/", b""), ("pkg/sub/m.py", b"")]),
    "signed": Odd([("a.py", b""), ("odd-1.0.dist-info/RECORD.jws", b"{}")]),
    "RECORD without hashes": Odd(
        [("a.py", b"a"), (f"{D}/scripts/s", b"#!python\n")], rows=lambda r: [[x[0], "", ""] for x in r]
    ),
    "RECORD with other hashes": Odd(
        [("a.py", b"a"), ("b.py", b"b")],
        rows=lambda r: [[x[0], x[1] and "md5=" + b64(hashlib.md5(b"a").digest()), x[2]] for x in r],
    ),
    "RECORD with a wrong size": Odd(
        [("a.py", b"a"), ("b.py", b"b")], rows=lambda r: [[x[0], x[1], x[2] and "7"] for x in r]
    ),
    "RECORD without rows": Odd([("a.py", b"a")], rows=lambda r: r[-1:]),
    "RECORD with rows too many": Odd([("a.py", b"a")], rows=lambda r: [["gone.py", "sha256=AAAA", "1"], *r]),
    "a name twice": Odd([("a.py", b"first"), ("b.py", b""), ("a.py", b"the second")]),
    "an installer's own files": Odd([("odd-1.0.dist-info/INSTALLER", b"flit"), ("odd-1.0.dist-info/REQUESTED", b"")]),
    "entry points": Odd([("odd-1.0.dist-info/entry_points.txt", ENTRY_POINTS.encode())]),
    "other entry points": Odd([("odd-1.0.dist-info/entry_points.txt", b"[pytest11]\na = b\n")]),
}


@pytest.mark.parametrize("what", WHEELS)
def test_a_wheel_is_laid_out_as_installer_does(what: str, tmp_path: Path) -> None:
    wheel = WHEELS[what].write(tmp_path)
    if what in ("a name twice", "an installer's own files"):
        # `installer` has two rows in RECORD for a path that is written twice.
        found, wanted = ours(wheel), installers(wheel, tmp_path / "theirs")
        record = f"{SITE}/odd-1.0.dist-info/RECORD"
        assert (found.pop(record), wanted.pop(record)) and found == wanted
    else:
        same_as_installer(wheel, tmp_path / "theirs", SCRIPTS)
    unpacked_is_as_recorded(wheel, tmp_path)


@pytest.mark.parametrize(
    ("name", "info", "data"),
    [
        ("Foo.Bar", "foo_bar-1.0.dist-info", "foo_bar-1.0.data"),
        ("Foo.Bar", "foo_bar-1.0.dist-info", "Foo.Bar-1.0.data"),
        ("foo_bar", "Foo.Bar-1.0.dist-info", "foo_bar-1.0.data"),
        ("foo_bar", "foo-bar-1.0.dist-info", "foo_bar-1.0.data"),
        ("foo_bar", "foo_bar-1.0.0.dist-info", "foo_bar-1.0.data"),
    ],
)
def test_dist_info_and_data_may_spell_the_name_each_its_way(name: str, info: str, data: str, tmp_path: Path) -> None:
    members = [("m.py", b""), (f"{data}/scripts/run", b"#!python\n"), (f"{data}/data/x", b"x")]
    wheel = Odd(members, name=name, info=info).write(tmp_path)
    found = ours(wheel)
    assert found["opt/env/bin/run"] == (0o755, b"#!/opt/env/bin/python\n")
    assert found["opt/env/x"] == (0o644, b"x")
    if data == f"{name}-1.0.data":  # `installer` goes by the file's name alone
        same_as_installer(wheel, tmp_path / "theirs")
    unpacked_is_as_recorded(wheel, tmp_path)


def test_data_goes_over_what_the_archive_has_at_its_root_whatever_their_order(tmp_path: Path) -> None:
    wheel = Odd([(f"{D}/purelib/a.py", b"data"), ("a.py", b"root")]).write(tmp_path)
    assert ours(wheel)[f"{SITE}/a.py"][1] == b"data"
    unpacked_is_as_recorded(wheel, tmp_path)


def test_a_file_of_the_wheel_stays_where_an_entry_point_has_its_name(tmp_path: Path) -> None:
    points = b"[console_scripts]\nrun = pkg:main\n[gui_scripts]\nrun = pkg:gui\n"
    members = [(f"{D}/scripts/run", b"own"), ("odd-1.0.dist-info/entry_points.txt", points)]
    assert ours(Odd(members).write(tmp_path))["opt/env/bin/run"] == (0o755, b"own")
    assert b"main" in ours(Odd(members[1:]).write(tmp_path))["opt/env/bin/run"][1]


def test_a_prefix_and_a_comment_around_the_archive_are_passed_over(tmp_path: Path) -> None:
    wheel = Odd([("a.py", b"a = 1")]).write(tmp_path)
    plain = ours(wheel)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.comment = b"a comment"
    wheel.write_bytes(b"#!/bin/sh\nexit\n" + wheel.read_bytes())
    assert ours(wheel) == plain == same_as_installer(wheel, tmp_path / "theirs")


def test_scripts_of_entry_points_run(tmp_path: Path) -> None:
    wheel = Odd([("odd-1.0.dist-info/entry_points.txt", ENTRY_POINTS.encode())]).write(tmp_path)
    script = ours(wheel)["opt/env/bin/dotted"][1].decode()
    assert script.startswith("#!/opt/env/bin/python\n")
    calls: list[str] = []
    module = type("module", (), {"Class": type("C", (), {"method": lambda: calls.append("here")})})
    code = script.replace("from pkg.sub.mod import Class", "Class = module.Class")
    with pytest.raises(SystemExit) as ended:
        exec(compile(code, "dotted", "exec"), {"__name__": "__main__", "module": module})
    assert ended.value.code is None and calls == ["here"]


def points(line: str) -> Odd:
    return Odd([("odd-1.0.dist-info/entry_points.txt", f"[console_scripts]\n{line}\n".encode())])


def without_record(rows: list[list[str]]) -> list[list[str]]:
    return [["x" * 200_000, "", ""], *rows]


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (Odd([("../evil.py", b"")]), "'../evil.py' is not a path"),
        (Odd([("/etc/evil", b"")]), "'/etc/evil' is not a path"),
        (Odd([("pkg/./a.py", b"")]), "is not a path"),
        (Odd([("pkg//a.py", b"")]), "is not a path"),
        (Odd([("pkg\\..\\a.py", b"")]), "is not a path"),
        (Odd([("pkg/two\nlines.py", b"")]), "is not a path"),
        (Odd([(f"{D}/data/../../evil", b"")]), "is not a path"),
        (Odd([(f"{D}/elsewhere/x", b"")]), "not a part"),
        (Odd([(f"{D}/scripts", b"")]), "not a part"),
        (Odd([(f"{D}/data/pyvenv.cfg", b"home = /elsewhere")]), "own pyvenv.cfg"),
        (Odd([("other-1.0.dist-info/METADATA", b"")]), "this has 2"),
        (Odd([], wheel=b""), "no Wheel-Version"),
        (Odd([], wheel=b"Wheel-Version: 2.0\n"), "format 2.0"),
        (Odd([], wheel=b"\xff\xfe"), "WHEEL is not UTF-8"),
        (points("../evil = a:b"), "entry point '../evil'"),
        (points(".. = a:b"), "entry point '..'"),
        (points("a\\b = a:b"), "entry point"),
        (points("a = b"), "entry point 'a' = 'b'"),
        (points("a = b:c; import os"), "entry point"),
        (points("a = b:\n  c\n  d"), "entry point"),
        (points("[no end"), "entry_points.txt"),
        (Odd([], rows=without_record), "RECORD: field larger"),
    ],
)
def test_a_wheel_that_cannot_be_laid_out_is_refused(odd: Odd, told: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"odd-1\.0-py3-none-any\.whl") as refused:
        ours(odd.write(tmp_path))
    assert told in refused.value.message


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def without_directory(data: bytes) -> bytes:
    return data.replace(b"PK\5\6", b"PK\5\7")


def flipped(data: bytes) -> bytes:
    """One byte of the first member's content is another."""
    at = 30 + len("a.bin") + 2000
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


def encrypted(data: bytes) -> bytes:
    at = data.index(b"PK\1\2")
    return data[: at + 8] + bytes([data[at + 8] | 1]) + data[at + 9 :]


def unknown_method(data: bytes) -> bytes:
    at = data.index(b"PK\1\2")
    return data[: at + 10] + b"\x63\0" + data[at + 12 :]


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("damage", [cut, without_directory, flipped, encrypted, unknown_method, lambda data: b""])
def test_a_damaged_wheel_is_a_clear_error_and_leaves_no_layer(
    damage: Callable[[bytes], bytes], compression: int, tmp_path: Path
) -> None:
    content = random.Random(1).randbytes(200_000)
    wheel = Odd([("a.bin", content)], compression=compression).write(tmp_path)
    wheel.write_bytes(damage(wheel.read_bytes()))
    with pytest.raises(BuildError, match=r"odd-1\.0.*(not a wheel|damaged)"):
        write_layer(wheel_tree(wheel, SCHEME, TIME), Blobs(tmp_path / "blobs"))
    assert not list((tmp_path / "blobs/sha256").iterdir())


@pytest.mark.parametrize("call", [wheel_paths, wheel_record, lambda w, s: list(wheel_tree(w, s, 0))])
def test_a_missing_wheel_is_named(call: Callable[[Path, Scheme], object], tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"gone\.whl: cannot be read: No such file"):
        call(tmp_path / "gone.whl", SCHEME)


def test_paths_and_record_are_those_of_the_tree(tmp_path: Path) -> None:
    for what in WHEELS.keys() - {"bzip2", "lzma"}:
        wheel = WHEELS[what].write(tmp_path)
        tree = ours(wheel)
        added = [f"{SITE}/odd-1.0.dist-info/{name}" for name in ("INSTALLER", "RECORD")]
        assert sorted([*wheel_paths(wheel, SCHEME), *added]) == sorted(tree)
        assert wheel_record(wheel, SCHEME) == tree[added[1]][1]


def test_record_is_whole_though_nobody_reads_the_files(tmp_path: Path) -> None:
    wheel = WHEELS["RECORD without hashes"].write(tmp_path)
    read = ours(wheel)[f"{SITE}/odd-1.0.dist-info/RECORD"]
    skipped = [stream for _, stream in wheel_tree(wheel, SCHEME, TIME)][-1]
    assert skipped is not None and skipped.read() == read[1]


parts = st.sampled_from(
    ["", "pkg/", "pkg/deep/er/", "ünï/", f"{D}/data/", f"{D}/scripts/", f"{D}/headers/h/", f"{D}/platlib/pkg/"]
)
names = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters="/\\\x85"),
    min_size=1,
    max_size=12,
).filter(lambda name: name not in (".", "..") and not name.endswith((".dist-info", ".data")))
contents = st.one_of(st.binary(max_size=40), st.binary(max_size=40).map(lambda rest: b"#!python" + rest))


@examples(60)
@given(
    files=st.dictionaries(
        st.builds(str.__add__, parts, names),
        st.tuples(contents, st.sampled_from([0, REGULAR, PROGRAM, LINK, 0o777])),
        max_size=6,
    ),
    compression=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
)
def test_random_wheels_are_laid_out_as_installer_does(
    files: dict[str, tuple[bytes, int]], compression: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("random")
    members = [(name, data) for name, (data, _) in files.items()]
    modes = {name: mode for name, (_, mode) in files.items()}
    wheel = Odd(members, modes, compression=compression).write(folder)
    same_as_installer(wheel, folder / "theirs")
    unpacked_is_as_recorded(wheel, folder)


def test_every_member_has_the_given_time_and_root_as_owner(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "plain-one", files={"plain_one/data.bin": b"1"})
    for entry, _ in wheel_tree(wheel, SCHEME, 1234567890):
        assert (entry.mtime, entry.uid, entry.gid, entry.kind) == (1234567890, 0, 0, "file")


def test_a_fingerprint_of_record_leaves_out_the_installers_files_and_no_others() -> None:
    rows = b"a.py,sha256=x,1\nodd-1.0.dist-info/RECORD,,\n"
    known = record_digest(rows)
    for name in ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"):
        assert record_digest(rows + f"odd-1.0.dist-info/{name},sha256=y,2\n".encode()) == known
        assert record_digest(rows + f"pkg/{name},sha256=y,2\n".encode()) != known
        assert record_digest(rows + f'"a/{name},v.py",sha256=y,2\n'.encode()) != known
    assert record_digest(b"".join(reversed(rows.splitlines(keepends=True)))) == known
