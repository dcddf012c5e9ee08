"""Bytecode beside its modules: the same each time, used by the interpreter, never a reason to fail."""

from __future__ import annotations

import io
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from envbuild.base.errors import BuildError, HostError
from envbuild.image.entry import FILE, Entry, Readable, Tree
from envbuild.image.layer import with_parents, write_layer
from envbuild.image.layout import Blobs
from envbuild.interpreter import read_python
from envbuild.layers.bytecode import Compiler, compiler_of, with_bytecode

SITE = "opt/env/lib/python3.11/site-packages"
TIME = 1577836800
COMPILER = compiler_of(read_python(sys.executable))
PYC = f"{COMPILER.tag}.pyc"

# Ways of writing that leave traces in marshalled code: shared constants, interned names, sets, encodings.
MODULES = {
    "pkg/__init__.py": b"import os\nX = frozenset({'a', 'b', None, 1.5, (2, 'a')})\n",
    "pkg/shared.py": b"def f(os=None): return 'a b c', ('a b c', 257), 'pkg'\nclass os: os = 'os'\n",
    "pkg/latin.py": "# coding: latin-1\nname = 'é'\n".encode("latin-1"),
    "pkg/idna.py": b"# coding: idna\nname = 1\n",
    "pkg/warns.py": b"assert (1, 'always')\nx = 1 is 1\ny = '\\d'\n",
    "pkg/bom.py": b"\xef\xbb\xbfx = 1\n",
    "pkg/sets.py": b"y = 1\nz = y in {'x', 'y', 'z', 1, 2, b'b', None, True}\n",
    "pkg/empty.py": b"",
    "pkg/a.b.py": b"dotted = 1\n",
    "pkg/zażółć.py": "ż = 'ż'\n".encode(),
    "pkg/lines.py": b"x = 1\r\ny = 2\r\n",
    "pkg/deep/er/m.py": b"def g():\n    def h(): return lambda: [i for i in range(9)]\n    return h\n",
}
# Each of these is in some published wheel, in its like.
HOPELESS = {
    "bad/syntax.py": b"def f(:\n",
    "bad/template.py": b"class {{ name }}:\n    pass\n",
    "bad/null.py": b"x = 1\0\n",
    "bad/encoding.py": b"# coding: klingon\n",
    "bad/not_text.py": b"# coding: rot13\nk = 1\n",
    "bad/undefined.py": b"# coding: undefined\nk = 1\n",
    "bad/not_utf8.py": b"x = '\xff\xfe'\n",
    "bad/utf16.py": "x = 1\n".encode("utf-16"),
    "bad/python2.py": b"print 'x'\nexec 'y' in {}\nraise E, 'z'\n",
    "bad/tabs.py": b"if 1:\n\tx = 1\n        y = 2\n",
    "bad/brackets.py": b"x = " + b"(" * 5000 + b")" * 5000,
    "bad/indented.py": b"".join(b" " * i + b"if x:\n" for i in range(200)) + b" " * 200 + b"pass\n",
    "bad/digits.py": b"x = " + b"9" * 20_000 + b"\n",
    "bad/binary.py": bytes(range(256)) * 40,
    "bad/sum.py": b"x = " + b"+".join([b"y"] * 200_000),
    "bad/attributes.py": b"x = y" + b".z" * 200_000,
    "bad/not.py": b"x = " + b"not " * 50_000 + b"y",
}
HEAVY = {
    "ok/constant.py": b"x = '" + b"a" * (3 << 20) + b"'\n",
    "ok/table.py": b"x = [" + b"1234567, " * 100_000 + b"]\n",
    "ok/power.py": b"x = 10 ** 10 ** 10\ny = 'a' * 10 ** 12\nz = ((1,) * 10**9,)\n",
}


def tree_of(files: dict[str, bytes]) -> Tree:
    for path, data in files.items():
        yield Entry(f"{SITE}/{path}", FILE, 0o644, len(data), mtime=TIME), io.BytesIO(data)


def compiled(
    files: dict[str, bytes], compiler: Compiler | None = COMPILER, below: Sequence[str] = (SITE,)
) -> dict[str, bytes]:
    """Every file of the tree with bytecode, by its path below site-packages."""
    found: dict[str, bytes] = {}
    for entry, content in with_bytecode(tree_of(files), compiler, below, TIME):
        assert content is not None and entry.mode == 0o644 and entry.mtime == TIME
        data = read(content)
        path = entry.path.removeprefix(SITE + "/")
        assert len(data) == entry.size and path not in found
        found[path] = data
    return found


def read(content: Readable) -> bytes:
    parts = []
    while data := content.read(1000):
        parts.append(data)
    return b"".join(parts)


def cached(path: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{folder}/__pycache__/{name.removesuffix('.py')}.{PYC}"


def unpack(files: dict[str, bytes], folder: Path) -> None:
    for path, data in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        os.utime(place, (TIME, TIME))


def test_tests_are_not_compiled() -> None:
    files = {"a/tests/x.py": b"", "a/b/tests/y.py": b"", "a/testing/x.py": b"", "a/test.py": b"", "a/tests.py": b""}
    assert compiled(files).keys() == files.keys() | {cached(f"a/{name}.py") for name in ("testing/x", "test", "tests")}
    assert set(compiled({"lib/test/x.py": b""})) == {"lib/test/x.py", cached("lib/test/x.py")}


def python(code: str, folder: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-S", "-s", "-W", "ignore", *options, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": os.fspath(folder), "LC_ALL": "C.UTF-8"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_gets_bytecode_behind_the_tree_which_stays_as_it_is() -> None:
    files = {**MODULES, "pkg/data.txt": b"x = 1", "pkg/stub.pyi": b"x: int"}
    found = compiled(files)
    assert list(found)[: len(files)] == list(files)
    assert list(found)[len(files) :] == [cached(path) for path in MODULES]
    assert {path: found[path] for path in files} == files


def test_the_interpreter_uses_the_bytecode_and_does_not_compile_again(tmp_path: Path) -> None:
    unpack(compiled(MODULES), tmp_path)
    names = [p.removesuffix(".py").replace("/", ".") for p in MODULES if "a.b" not in p]
    code = (
        "import importlib, builtins\n"
        "def no(source, *rest, **named): raise SystemExit(f'compiled {rest[0]}')\n"
        "import importlib._bootstrap_external as b\n"
        "b.SourceLoader.source_to_code = lambda self, data, path, **named: no(data, path)\n"
        f"for name in {[n.removesuffix('.__init__') for n in names]!r}:\n"
        "    module = importlib.import_module(name)\n"
        "    print(name, module.__cached__)\n"
    )
    assert python(code, tmp_path, "-B").count(f".{PYC}\n") == len(names)
    # and an edited module is compiled anew, as in any container that someone changes something in
    (tmp_path / "pkg/empty.py").write_text("new = 1\n")
    edited = "import pkg.empty; print(pkg.empty.new)"
    assert python(edited, tmp_path, "-B") == "1\n"


def test_the_header_has_the_fixed_time_and_the_size_of_the_source() -> None:
    for path, data in MODULES.items():
        head = compiled({path: data})[cached(path)][:16]
        assert head == COMPILER.magic + struct.pack("<III", 0, TIME, len(data))


def test_bytecode_does_not_depend_on_who_makes_it_or_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {**MODULES, **HOPELESS}
    first = compiled(files)
    for number, (seed, folder) in enumerate([("1", "/"), ("77", "/tmp"), ("random", os.fspath(tmp_path))]):
        for name, value in [
            ("PYTHONHASHSEED", seed),
            ("HOME", folder),
            ("TZ", "Asia/Tokyo"),
            ("LANG", "tr_TR.UTF-8"),
            ("PYTHONOPTIMIZE", "2"),
            ("PYTHONPATH", folder),
            ("PYTHONWARNINGS", "error"),
            ("PYTHONDONTWRITEBYTECODE", "1"),
            ("PYTHONUTF8", "0"),
            ("PYTHONSTARTUP", "/gone"),
        ]:
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=number: set(range(3 * n + 1)))
        assert compiled(files) == first


def test_bytecode_does_not_depend_on_the_modules_around_it() -> None:
    alone = {path: compiled({path: data})[cached(path)] for path, data in MODULES.items()}
    for files in (MODULES, dict(reversed(MODULES.items())), {**HOPELESS, **MODULES}):
        run_parallel = compiled(files)
        assert {path: run_parallel[cached(path)] for path in MODULES} == alone


def test_many_modules_in_several_shares_come_in_their_order() -> None:
    files = {f"m{n:04}.py": f"x = {n}\n".encode() * (n % 7 + 1) for n in range(1100)}
    found = list(compiled(files))
    assert found[len(files) :] == [f"/__pycache__/{p[:-3]}.{PYC}"[1:] for p in files]


def test_what_does_not_compile_is_passed_over_and_its_neighbours_are_not() -> None:
    files = {"a.py": b"a = 1", **HOPELESS, **HEAVY, "z.py": b"z = 1"}
    made = {path for path in compiled(files) if path.endswith(".pyc")}
    assert {cached(p) for p in HEAVY} <= made
    assert {f"__pycache__/a.{PYC}", f"__pycache__/z.{PYC}"} <= made
    assert not made & {cached(p) for p in HOPELESS}


def test_modules_elsewhere_and_very_large_ones_are_left_to_the_interpreter() -> None:
    files = {"a.py": b"a = 1", "large.py": b"#" * ((4 << 20) + 1)}
    assert [p for p in compiled(files) if p.endswith(".pyc")] == [f"__pycache__/a.{PYC}"]
    assert compiled(files, below=["opt/env/lib/python3.11/site"]) == files
    assert compiled(files, None) == files


def test_a_wheels_own_bytecode_is_kept() -> None:
    own = f"pkg/__pycache__/a.{PYC}"
    assert compiled({own: b"its own", "pkg/a.py": b"a = 1"})[own] == b"its own"
    assert compiled({"pkg/a.py": b"a = 1", own: b"its own"})[own] == b"its own"


class Short:
    """A content that ends before its entry says, or gives little at a time."""

    def __init__(self, data: bytes) -> None:
        self._stream = io.BytesIO(data)

    def read(self, size: int = -1, /) -> bytes:
        return self._stream.read(min(size, 3))


def test_content_that_comes_in_pieces_or_is_cut_is_passed_on_as_it_is() -> None:
    whole, cut = b"x = 123456\n", b"y = 1"
    tree = [
        (Entry(f"{SITE}/whole.py", FILE, 0o644, len(whole)), Short(whole)),
        (Entry(f"{SITE}/cut.py", FILE, 0o644, 50), Short(cut)),
        (Entry(f"{SITE}/long.py", FILE, 0o644, 3), Short(cut)),
    ]
    found = {}
    for entry, content in with_bytecode(tree, COMPILER, [SITE], TIME):
        assert content is not None
        found[entry.path.removeprefix(SITE + "/")] = read(content)
    assert (found["whole.py"], found["cut.py"], found["long.py"]) == (whole, cut, cut)
    alone = compiled({"whole.py": whole})
    assert found[f"__pycache__/whole.{PYC}"] == alone[f"__pycache__/whole.{PYC}"]
    assert f"__pycache__/cut.{PYC}" not in found


def script(folder: Path, text: str) -> Compiler:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return Compiler(os.fspath(path), COMPILER.version, COMPILER.tag, COMPILER.magic)


@pytest.mark.parametrize("end", ["exit 3", "kill -9 $$", "head -c 100 >/dev/null; exit 1", "exit 0"])
def test_an_interpreter_that_dies_is_named_with_the_module(end: str, tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"status .* while compiling /.*/a\.py") as died:
        compiled({"a.py": b"a = 1" * 99_999, "b.py": b""}, script(tmp_path, end))
    assert died.value.hint and "--no-bytecode" in died.value.hint


def test_the_module_that_ends_the_interpreter_is_the_one_that_is_named(tmp_path: Path) -> None:
    answers = r"printf '\001\000\000\000x\000\000\000\000'; cat >/dev/null; kill -11 $$"
    files = {"first.py": b"1", "second.py": b"2", "third.py": b"3"}
    with pytest.raises(HostError, match=r"status -11 while compiling /.*/third\.py"):
        compiled(files, script(tmp_path, answers))


def test_an_interpreter_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    gone = os.fspath(tmp_path / "gone")
    with pytest.raises(HostError, match=f"cannot run {gone}: No such file"):
        compiled({"a.py": b""}, Compiler(gone, "3.11.0", "cpython-311", COMPILER.magic))
    with pytest.raises(HostError, match=f"{gone}: no such program"):
        compiler_of(read_python(gone))
    with pytest.raises(HostError, match="does not run"):
        compiler_of(read_python(script(tmp_path, "echo no; exit 1").python))


def test_no_room_for_temporary_files_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/gone")
    with pytest.raises(BuildError, match="no temporary file") as told:
        compiled({"a.py": b""})
    assert told.value.hint and "TMPDIR" in told.value.hint


def test_the_library_path_of_a_python_from_a_module_tree_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/apps/python/lib")
    compiler = script(tmp_path, f'test "$LD_LIBRARY_PATH" = /apps/python/lib && exec {sys.executable} "$@"')
    assert f"__pycache__/a.{PYC}" in compiled({"a.py": b"a = 1"}, compiler)


def test_an_abandoned_tree_ends_its_processes_at_once(tmp_path: Path) -> None:
    """As after a Ctrl-C: the compiling processes are in sessions of their own and must not be waited for."""
    marker = tmp_path / "pid"
    compiler = script(tmp_path, f"echo $$ >>{marker}; exec sleep 600")
    tree = iter(with_bytecode(tree_of({f"{n}.py": b"" for n in range(500)}), compiler, [SITE], 0))
    for _ in range(450):
        next(tree)
    while not marker.exists() or not marker.read_text().endswith("\n"):
        time.sleep(0.01)
    started = time.monotonic()
    tree.close()  # type: ignore[attr-defined]
    assert time.monotonic() - started < 5
    for pid in map(int, marker.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not [t for t in threading.enumerate() if "ThreadPool" in t.name]


INTERRUPTED = """
import io, pathlib, sys
from envbuild.image.layout import Blobs
from envbuild.image.entry import Entry
from envbuild.image.layer import with_parents, write_layer
from envbuild.layers.bytecode import Compiler, with_bytecode
files = ((Entry(f"s/{{n}}.py"), io.BytesIO()) for n in range(100_000))
compiler = Compiler({python!r}, "", "", b"")
write_layer(with_parents(with_bytecode(files, compiler, ["s"], 0), 0), Blobs(pathlib.Path({blobs!r})))
"""


def test_ctrl_c_ends_envbuild_and_the_interpreters(tmp_path: Path) -> None:
    marker, blobs = tmp_path / "pid", tmp_path / "blobs"
    stuck = script(tmp_path, f"echo $$ >>{marker}; exec sleep 600").python
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(python=stuck, blobs=os.fspath(blobs))],
        cwd=Path(__file__).resolve().parents[2],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not marker.exists() or not marker.read_text().endswith("\n"):
        assert child.poll() is None
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=20)
    assert child.returncode == -signal.SIGINT and told.rstrip().endswith("KeyboardInterrupt")
    for pid in map(int, marker.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not list((blobs / "sha256").iterdir())


def test_a_failure_behind_the_bytecode_ends_the_interpreters_at_once(tmp_path: Path) -> None:
    # What fails walks the tree in a generator of its own; its traceback keeps the tree from being collected.
    closed = []

    def files() -> Tree:
        try:
            yield from ((Entry(f"s/{n}.py"), io.BytesIO()) for n in range(1000))
        finally:
            closed.append(True)

    def broken(path: str, seen: set[str]) -> list[str]:
        if path == "s/900.py":
            raise KeyboardInterrupt
        return []

    stuck = script(tmp_path, "exec sleep 600")
    before = threading.active_count()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
        patch.setattr("envbuild.image.layer._missing", broken)
        tree = with_parents(with_bytecode(files(), stuck, ["s"], 0), 0)
        write_layer(tree, Blobs(tmp_path / "blobs"))
    assert caught.tb is not None and closed
    assert threading.active_count() == before
