"""Changes of an environment since its manifest was written: each one is found and named, and nothing else is."""

from __future__ import annotations

import errno
import json
import marshal
import os
import py_compile
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_train.preflight.files import FileCheck, changed_files
from envbuild.base import process
from envbuild.base.errors import BuildError, VerificationError
from envbuild.build import venv
from envbuild.contract import manifest
from envbuild.contract.manifest import FILE, changes, check, read_manifest, scan, seal, sealed, shown, write_manifest
from envbuild.contract.receipt import manifest_of, passing_receipt, receipt_path
from envbuild.contract.state import State
from envbuild.recipe.targets import host_arch
from envbuild.run_environment import load_environment
from envbuild.store.store import Store
from envbuild.verify.host import folder_subject
from envbuild.verify.survey import survey

STATE = State("venv", "r", "", "", "", "cpu-x86_64", "3.11", "3.11.0", sys.executable, ())
SITE = "lib/python3.11/site-packages"
MODULE = f"{SITE}/pkg/mod.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An environment with its manifest."""
    root = tmp_path / "env"
    for path, text in {
        MODULE: "answer = 42\n",
        f"{SITE}/pkg/__init__.py": "",
        f"{SITE}/pkg-1.dist-info/RECORD": "pkg/mod.py,,\n",
        "bin/tool": "#!/bin/sh\n",
        "pyvenv.cfg": "include-system-site-packages = false\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "bin/tool").chmod(0o755)
    (root / "bin/python").symlink_to(sys.executable)
    write_manifest(root, 2)
    return root


def compiled(root: Path, code: str | None = None, level: int = 0) -> Path:
    """Bytecode of MODULE where Python looks for it; with `code`, of that text instead."""
    path = Path(py_compile.compile(str(root / MODULE), optimize=level) or "")
    if code is not None:
        head = path.read_bytes()[:16]
        path.write_bytes(head + marshal.dumps(compile(code, str(root / MODULE), "exec")))
    return path


@pytest.mark.parametrize("file", [FILE, "bin/tool", "env.receipt.json"])
def test_a_file_that_the_disk_does_not_return_is_neither_changed_nor_missing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """With a receipt that nobody could read, a verification compared an environment with its own manifest alone."""
    receipt_path(root).write_text("{}")
    (root / "bin/tool").write_text("#!/bin/sh -e\n")
    opened = os.open

    def fail(path: str, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith(f"/{file}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(OSError, match=rf"Input/output error: .*{file}"):
        if file == "env.receipt.json":
            assert manifest_of(root) and passing_receipt(root, "")
        changes(root, STATE, "", Store(tmp_path / "store"), 1)


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:16] + b"\xe3" * 9)


def add(path: str, data: bytes = b"x") -> Callable[[Path], object]:
    def plant(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).unlink(missing_ok=True)
        (root / path).write_bytes(data)

    return plant


def linked_package(root: Path) -> None:
    (root / SITE / "pkg").rename(root.parent / "elsewhere")
    (root / SITE / "pkg").symlink_to(root.parent / "elsewhere")


PLANTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "poisoned bytecode": (lambda root: compiled(root, code="answer = 41"), []),
    "poisoned bytecode of python -O": (lambda root: compiled(root, code="answer = 41", level=1), []),
    "bytecode that is none": (lambda root: damage(compiled(root)), []),
    "a package folder that is a link": (linked_package, [f"{SITE}/pkg", f"{SITE}/pkg/__init__.py", MODULE]),
    "bin/python is a wrapper": (add("bin/python", b"#!/bin/sh\nexec python\n"), ["bin/python"]),
    "another program in bin": (add("bin/torchrun"), ["bin/torchrun"]),
    "a changed program": (add("bin/tool", b"#!/bin/sh\nfalse\n"), ["bin/tool"]),
    "the system's packages": (add("pyvenv.cfg", b"include-system-site-packages = true\n"), ["pyvenv.cfg"]),
    "a library beside site-packages": (add("lib/libc10.so"), ["lib/libc10.so"]),
    "a path file": (add(f"{SITE}/x.pth"), [f"{SITE}/x.pth"]),
    "a module and its RECORD": (
        lambda root: [add(MODULE)(root), add(f"{SITE}/pkg-1.dist-info/RECORD")(root)],
        [f"{SITE}/pkg-1.dist-info/RECORD", MODULE],
    ),
    "a file that nobody may read": (lambda root: (root / MODULE).chmod(0), [MODULE]),
    "a lost file": (lambda root: (root / MODULE).unlink(), [MODULE]),
    "a fifo": (lambda root: os.mkfifo(root / SITE / "pipe"), [f"{SITE}/pipe"]),
    "a fifo in a file's place": (lambda root: [(root / MODULE).unlink(), os.mkfifo(root / MODULE)], [MODULE]),
    "setuid": (lambda root: (root / "bin/tool").chmod(0o4755), ["bin/tool"]),
}


@pytest.mark.parametrize("name", PLANTS)
def test_each_change_is_found_and_named(root: Path, tmp_path: Path, name: str) -> None:
    plant, expected = PLANTS[name]
    plant(root)
    known = read_manifest(root)
    assert known is not None
    store = Store(tmp_path / "store")
    report, good = check(root, known, scan(root), {}, sys.executable, 2, store)
    found = sorted([*report.missing, *report.altered, *report.unowned])
    assert found == sorted(expected or [path for path in scan(root) if path.endswith(".pyc")]) and found
    assert not set(good) & {*report.altered, *report.unowned}
    assert sorted(changes(root, STATE, known.digest, store, 2)) == found
    assert changes(root, STATE, known.digest, store, 2), "what is wrong is never recorded as right"


def test_reading_ends_when_its_time_is_over(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, hanging = read_manifest(root), threading.Event()
    assert known is not None
    monkeypatch.setattr(
        "envbuild.contract.manifest.file_digest", lambda _, heads=None: hanging.wait(60)
    )  # a dead file server
    with pytest.raises(TimeoutError):
        check(root, known, scan(root), {}, sys.executable, 2, Store(tmp_path / "store"), 0.1)
    hanging.set()


def test_what_python_and_users_write_is_no_change(root: Path, tmp_path: Path) -> None:
    known, store = read_manifest(root), Store(tmp_path / "store")
    assert known is not None
    seal(root, known, scan(root), store)
    compiled(root)
    compiled(root, level=2)
    for path in ("conda-meta/state", f"{SITE}/pkg/__pycache__/numba.nbi", f"{SITE}/pkg/__pycache__/mod.cpython-31.pyc"):
        add(path)(root)
    assert changes(root, STATE, known.digest, store, 2) == []
    compiled(root, code="answer = 41")
    assert shown(changes(root, STATE, known.digest, store, 2)).startswith(f"{SITE}/pkg/__pycache__/mod.")


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_bytecode_that_is_no_file_is_a_change(root: Path, tmp_path: Path, kind: str) -> None:
    path = compiled(root)
    path.rename(tmp_path / "elsewhere.pyc")
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(tmp_path / "elsewhere.pyc")
    known = read_manifest(root)
    assert known is not None
    assert changes(root, STATE, known.digest, Store(tmp_path / "store"), 2) == [str(path.relative_to(root))]


def test_files_are_read_again_only_when_their_stat_changed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, store, read = read_manifest(root), Store(tmp_path / "store"), list[str]()
    assert known is not None
    before = manifest.file_digest
    monkeypatch.setattr(
        manifest, "file_digest", lambda path, **more: (read.append(Path(path).name), before(path, **more))[1]
    )
    assert changes(root, STATE, known.digest, store, 2) == [] and len(read) == 5
    read.clear()
    os.utime(root / MODULE)
    assert changes(root, STATE, known.digest, store, 2) == [] and read == ["mod.py"]
    assert changes(root, STATE, known.digest, store, 2) == [] and read == ["mod.py"]
    # The same size and time, but another content: the change time tells.
    info = (root / MODULE).stat()
    (root / MODULE).write_text("answer = 41\n")
    os.utime(root / MODULE, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert changes(root, STATE, known.digest, store, 2) == [MODULE]


def test_an_exact_comparison_trusts_no_note(root: Path, tmp_path: Path) -> None:
    known, store = read_manifest(root), Store(tmp_path / "store")
    assert known is not None
    add(MODULE, b"answer = 41\n")(root)
    seal(root, known, scan(root), store)  # as a disk that lost a write would have it
    assert changes(root, STATE, known.digest, store, 2) == []
    assert changes(root, STATE, known.digest, store, 2, exact=True) == [MODULE]


def test_bytecode_that_comes_during_a_verification_is_compared_before_it_is_trusted(root: Path, tmp_path: Path) -> None:
    known, environment = read_manifest(root), load_environment({"ENVBUILD_STORE": str(tmp_path / "store")})
    assert known is not None
    state, copy = replace(STATE, target=f"cpu-{host_arch()}"), tmp_path / "copy"
    subject = folder_subject(root, state, venv, environment, fresh=True)
    assert subject.survey(60.0).files.altered == []
    honest, planted = compiled(root, level=2), compiled(root, code="answer = 41")
    subject.accept()
    shutil.copytree(root, copy, symlinks=True)
    for place in (root, copy, root):
        found = changes(place, state, known.digest, environment.store, 2)
        assert found == [str(planted.relative_to(root))], "the manifest's other files are as they were"
    assert str(honest.relative_to(root)) not in (sealed(root, known, environment.store) or {})
    planted.unlink()
    assert changes(root, state, known.digest, environment.store, 2) == []
    assert (sealed(root, known, environment.store) or {}).keys() == scan(root).keys()


def test_bytecode_that_changes_while_it_is_recorded_is_not_known_in_copies(root: Path, tmp_path: Path) -> None:
    known, store, copy = read_manifest(root), Store(tmp_path / "store"), tmp_path / "copy"
    assert known is not None
    compiled(root)
    compared = scan(root)
    compiled(root, code="answer = 41")
    seal(root, known, compared, store)
    shutil.copytree(root, copy, symlinks=True)
    assert changes(root, STATE, known.digest, store, 2) and changes(copy, STATE, known.digest, store, 2)


def test_an_exact_comparison_compiles_again_what_the_store_calls_known(root: Path, tmp_path: Path) -> None:
    known, store = read_manifest(root), Store(tmp_path / "store")
    assert known is not None
    planted = compiled(root, code="answer = 41")
    seal(root, known, scan(root), store)  # as somebody who can write the store
    assert changes(root, STATE, known.digest, store, 2) == []
    assert changes(root, STATE, known.digest, store, 2, exact=True) == [str(planted.relative_to(root))]


@pytest.mark.parametrize("name", [name for name, (_, expected) in PLANTS.items() if expected])
@pytest.mark.parametrize("exact", [False, True])
def test_a_node_finds_each_change_of_its_copy(root: Path, name: str, exact: bool) -> None:
    known = read_manifest(root)
    assert known is not None
    wanted = FileCheck(known.digest, exact, 9.0)
    compiled(root)
    add("conda-meta/state")(root)
    assert changed_files(root, wanted) == ""
    plant, expected = PLANTS[name]
    plant(root)
    # Without `exact`, the size tells.
    readable = (name != "a file that nobody may read" or os.geteuid() == 0) and name != "a module and its RECORD"
    assert changed_files(root, wanted) == ", ".join(sorted(expected)) or not (exact or readable)


def test_a_node_reads_files_only_for_an_exact_comparison(root: Path) -> None:
    known = read_manifest(root)
    assert known is not None
    add(MODULE, b"answer = 41\n")(root)
    wanted = FileCheck(known.digest, False, 9.0)
    assert changed_files(root, wanted) == ""
    assert changed_files(root, wanted._replace(exact=True)) == MODULE
    for number in range(9):
        add(f"bin/more-{number}")(root)
    assert changed_files(root, wanted) == ", ".join(f"bin/more-{n}" for n in range(5)) + " and 4 more files"
    (root / FILE).write_text("")
    assert changed_files(root, wanted) == FILE
    (root / FILE).unlink()
    assert changed_files(root, wanted) == FILE


@pytest.mark.parametrize("exact", [False, True])
def test_a_node_compares_bytecode_that_was_written_again_with_its_source(root: Path, exact: bool) -> None:
    bytecode = compiled(root)
    named = str(bytecode.relative_to(root))
    wanted = FileCheck(write_manifest(root, 2)[0].digest, exact, 9.0)
    os.utime(root / MODULE, (1, 1))
    compiled(root)  # another time of the source in its header
    bytecode.chmod(0o600)  # Python uses the umask of who runs it
    assert changed_files(root, wanted) == ""
    compiled(root, "answer = 41 + 2\n").chmod(0o600)
    assert changed_files(root, wanted) == named
    bytecode.write_bytes(bytecode.read_bytes()[:20])
    assert changed_files(root, wanted) == named
    bytecode.unlink()
    bytecode.symlink_to(root / MODULE)
    assert changed_files(root, wanted) == named


def test_bytecode_that_was_compared_is_known_in_copies(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, store, copy = read_manifest(root), Store(tmp_path / "store"), tmp_path / "copy"
    assert known is not None
    compiled(root)
    assert changes(root, STATE, known.digest, store, 2) == []
    shutil.copytree(root, copy, symlinks=True)
    with monkeypatch.context() as patch:
        patch.setattr(process, "run", lambda *_, **__: pytest.fail("compiled again"))
        assert changes(copy, STATE, known.digest, store, 2) == []
    (pyc,) = (copy / SITE / "pkg/__pycache__").iterdir()
    damage(pyc)
    assert changes(copy, STATE, known.digest, store, 2) == [str(pyc.relative_to(copy))]


def test_the_receipt_names_the_manifest(root: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    assert changes(root, STATE, "sha256:" + "0" * 64, store, 2) == [FILE]
    (root / FILE).unlink()
    assert changes(root, STATE, "sha256:" + "0" * 64, store, 2) == [FILE]
    assert changes(root, STATE, "", store, 2) == [], "environments of earlier versions have none"


def test_a_seal_is_of_one_manifest_and_moves_with_its_environment(root: Path, tmp_path: Path) -> None:
    known, store, final = read_manifest(root), Store(tmp_path / "store"), tmp_path / "final"
    assert known is not None
    seal(root, known, scan(root), store)
    root.rename(final)
    manifest.move_seal(root, final, store)
    assert sealed(final, known, store) == scan(final) and sealed(root, known, store) is None
    assert sealed(final, replace(known, digest="sha256:other"), store) is None


@pytest.mark.parametrize("text", ["{", "[1, 2]", '["a", 1, 2]', '["a", "1", 2, "3"]', "[" * 100_000, '"x"', "7"])
def test_a_damaged_manifest_is_refused_by_name(root: Path, text: str) -> None:
    (root / FILE).write_text(text)
    with pytest.raises(BuildError, match=FILE):
        read_manifest(root)


def test_a_survey_opens_no_named_pipe(root: Path) -> None:
    for path in (MODULE, f"{SITE}/pkg-1.dist-info/RECORD", "share/envbuild/layers/x.json"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).unlink(missing_ok=True)
        os.mkfifo(root / path)
    found = survey(root, root / SITE, 62)  # without a manifest, as in images
    assert found.distributions["pkg"].record == "missing" and found.layers == {"x": ""}


def test_an_environment_with_a_fifo_is_not_built(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(BuildError, match="pipe is neither a file nor a link"):
        write_manifest(root, 1)


@given(st.dictionaries(st.text('aéß\udc80 \n"\\', min_size=1, max_size=6), st.binary(max_size=9), max_size=6))
def test_a_manifest_reads_back_as_it_was_written(files: dict[str, bytes]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        made, found = write_manifest(Path(folder), 1)
        assert read_manifest(Path(folder)) == made and made.rows.keys() == found.keys() == files.keys()
        text = (Path(folder) / FILE).read_text()
        assert [json.loads(line)[0] for line in text.splitlines()] == sorted(files)


def test_the_receipt_of_a_replaced_environment_is_named(root: Path) -> None:
    place = root.with_name("env.receipt.json")
    place.write_text(json.dumps({"artifact": {"digest": STATE.digest, "manifest": "sha256:m"}}))
    assert manifest_of(root) == manifest_of(root, STATE.digest) == "sha256:m"
    other = replace(STATE, python_version="3.11.9").digest
    with pytest.raises(VerificationError, match=f"{place} is not the receipt of {root}") as error:
        manifest_of(root, other)
    assert "remove the receipt" in str(error.value.hint)
