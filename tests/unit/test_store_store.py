"""The store on disk: finding, adopting, remembered digests, stale downloads."""

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lab.wheels import make_wheel

from envbuild.base.errors import BuildError
from envbuild.cache.hashed import write_note
from envbuild.image.model import Descriptor
from envbuild.image.squashfs.segment import Segment, save
from envbuild.image.tar import read_table, write_table
from envbuild.layers.source_files import SourceManifest, list_files, write_manifest
from envbuild.layers.store_check import check_store
from envbuild.run_environment import load_environment, with_tmpdir
from envbuild.store.store import _WORKING, Store

NAME = "demo-1.0-py3-none-any.whl"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_nothing_is_made_by_looking(store: Store, tmp_path: Path) -> None:
    assert store.find("wheels", "ab" * 32, bool) is None
    store.clean_stale()
    assert not store.root.exists()
    (tmp_path / "file").write_text("x")
    assert Store(tmp_path / "file/store").find("wheels", "ab" * 32, bool) is None


def test_an_adopted_file_is_found(store: Store, tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"wheel")
    path = store.adopt(tmp_path / "new", "ab" * 32, NAME)
    assert store.find("wheels", "ab" * 32, bool) == path == store.root / "wheels" / ("ab" * 32) / NAME
    assert path.read_bytes() == b"wheel" and not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../x.whl", "a/b.whl", "a\0b.whl", "\ud800", "x" * 256])
def test_a_file_is_kept_in_its_folder_alone(store: Store, tmp_path: Path, name: str) -> None:
    (tmp_path / "new").write_bytes(b"wheel")
    with pytest.raises(BuildError, match="is not a valid file name for the store"):
        store.adopt(tmp_path / "new", "ab" * 32, name)
    assert (tmp_path / "new").exists() and not store.root.exists()


def test_the_check_removes_a_wheel_under_another_name(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """So that the next build fetches it again: programs go by the name."""
    made = make_wheel(store.root / "made", "alpha")
    sha256 = hashlib.sha256(made.read_bytes()).hexdigest()
    names = ["aaa-0-evil.whl", "beta-1.0-py3-none-any.whl", "alpha-2.0-py3-none-any.whl", made.name]
    for name in names:
        (store.root / "new").write_bytes(made.read_bytes())
        store.adopt(store.root / "new", sha256, name)
    _, _, removed = check_store(store, 1)
    assert sorted(path.name for path in removed) == sorted(names[:-1])
    assert [path.name for path in (store.root / "wheels" / sha256).iterdir()] == [made.name]
    assert "the file contains alpha 1.0; removed" in capsys.readouterr().err
    assert check_store(store, 1)[2] == []


def test_a_store_that_cannot_be_made_says_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BuildError, match=str(tmp_path / "file/store")) as caught:
        _ = Store(tmp_path / "file/store").uv_cache
    assert "ENVBUILD_STORE" in (caught.value.hint or "")


def test_put_writes_once_and_repairs(store: Store) -> None:
    path = store.put("trainer", "cd" * 32, NAME, lambda: b"one")
    inode = path.stat().st_ino
    assert store.put("trainer", "cd" * 32, NAME, lambda: b"one") == path and path.stat().st_ino == inode
    path.write_bytes(b"0ne")
    assert store.put("trainer", "cd" * 32, NAME, lambda: b"one").read_bytes() == b"one"
    assert [p.name for p in path.parent.iterdir()] == [NAME]


def test_a_digest_is_remembered_until_the_file_changes(store: Store, tmp_path: Path) -> None:
    file = tmp_path / NAME
    file.write_bytes(b"one")
    assert store.digests.of(file) == hashlib.sha256(b"one").hexdigest()
    (note,) = (store.root / "digests").iterdir()
    row = json.loads(note.read_text())
    note.write_text(json.dumps([*row[:-1], "remembered"]))
    assert store.digests.of(file) == "remembered"
    # Not in a store that others can write, nor after a boot.
    (store.root / "digests").chmod(0o775)
    assert store.digests.of(file) == hashlib.sha256(b"one").hexdigest()
    (store.root / "digests").chmod(0o755)
    note.write_text(json.dumps([*row[:-2], "another boot", "remembered"]))
    assert store.digests.of(file) == hashlib.sha256(b"one").hexdigest()
    # The same size and time, as a forger makes them: the time of the change tells.
    stat = file.stat()
    with file.open("r+b") as stream:
        stream.write(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert store.digests.of(file) == hashlib.sha256(b"two").hexdigest()
    file.rename(tmp_path / "kept")  # keeps its inode from being used again
    (tmp_path / "other").write_bytes(b"new")
    os.utime(tmp_path / "other", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (tmp_path / "other").rename(file)  # same path, size and time; another inode
    assert store.digests.of(file) == hashlib.sha256(b"new").hexdigest()


def test_what_was_replaced_under_its_digest_is_removed_and_told(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = b"locked content", b"other  content"
    sha256 = hashlib.sha256(good).hexdigest()
    blob = Descriptor("", f"sha256:{sha256}", len(good))
    (tmp_path / "new").write_bytes(good)
    wheel = store.adopt(tmp_path / "new", sha256, NAME)
    (tmp_path / "new").write_bytes(good)
    archive = store.adopt(tmp_path / "new", sha256, "x.conda", "conda/archives")
    with store.blobs.new() as new:
        new.write(good)
        layer = new.place()
    finds = {
        wheel: lambda: store.find("wheels", sha256, bool),
        archive: lambda: store.find("conda/archives", sha256, bool),
        layer: lambda: store.blobs.has(blob) or None,  # a layer or a Debian package
    }
    for path, find in finds.items():
        assert find()
        stat = path.stat()
        path.write_bytes(bad)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert find() is None and not path.exists()
        assert f"{path}: damaged" in capsys.readouterr().err


def test_a_damaged_note_is_ignored(store: Store, tmp_path: Path) -> None:
    file = tmp_path / NAME
    file.write_bytes(b"one")
    digest = store.digests.of(file)
    for text in ("", "[]", "{}", "null", "[1, 2]", '"x"'):
        for note in (store.root / "digests").iterdir():
            note.write_text(text)
        assert store.digests.of(file) == digest


def test_digests_without_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    store = Store(tmp_path / "file/store")
    assert store.digests.of(tmp_path / "file") == hashlib.sha256(b"x").hexdigest()


def test_digests_at_once(store: Store, tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.whl" for n in range(8)]
    for file in files:
        file.write_bytes(file.name.encode())
    wrong: list[Path] = []

    def ask() -> None:
        for file in files * 20:
            if store.digests.of(file) != hashlib.sha256(file.name.encode()).hexdigest():
                wrong.append(file)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(list((store.root / "digests").iterdir())) == len(files)


def test_stale_downloads_are_removed(store: Store) -> None:
    folder = store.folder("partial")
    (folder / "old").write_bytes(b"x")
    (folder / "new").write_bytes(b"x")
    week_old = time.time() - 8 * 86400
    os.utime(folder / "old", (week_old, week_old))
    store.clean_stale()
    assert [path.name for path in folder.iterdir()] == ["new"]


def test_what_killed_runs_left_goes_after_a_while_and_blobs_stay(store: Store) -> None:
    folder = store.folder("blobs", "sha256")
    partial = store.folder("blobs", "partial")
    layers, trainer = store.folder("layers"), store.folder("trainer", "ab" * 32)
    old, young, blob = folder / ".new-old", folder / ".new-young", folder / ("ab" * 32)
    more = (partial / "cd", layers / ".new-x", layers / "key.lock", trainer / ".new-x")
    for path in (old, young, blob, *more):
        path.write_bytes(b"x")
        if path != young:
            os.utime(path, (0, 0))
    store.clean_stale()
    assert not any(path.exists() for path in (old, *more))
    assert young.exists() and blob.exists()


def test_what_another_machine_works_in_goes_only_when_it_is_old(store: Store) -> None:
    """On a network file system flock on a folder says nothing of other machines."""
    theirs = [store.folder("work", name) for name in ("0badcafe-young", "0badcafe-old")]
    os.utime(theirs[1], (0, 0))
    with store.working("work") as folder:
        names = {path.name for path in folder.parent.iterdir()}
    assert names == {"0badcafe-young", folder.name}


def test_a_file_system_without_flock_gives_working_folders(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr("fcntl.flock", flock)
    with store.working("work") as first, store.working("work") as second:
        assert first.is_dir() and second.is_dir()


_WORKS = """
import sys, time
from pathlib import Path
from envbuild.run_environment import load_environment, with_tmpdir
with with_tmpdir(load_environment()) as environment, environment.store.working(*sys.argv[1:]) as folder:
    print(environment.variables["TMPDIR"], folder, sep="\\n", flush=True)
    time.sleep(60)
"""


def test_the_next_run_removes_the_temporary_folders_of_a_killed_one_and_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {**os.environ, "ENVBUILD_STORE": str(tmp_path / "store"), "TMPDIR": str(tmp_path)}
    begun = [
        subprocess.Popen([sys.executable, "-c", _WORKS, kind], env=variables, stdout=subprocess.PIPE, text=True)
        for kind in ("launched", "building")
    ]
    dead, alive = ([Path(child.stdout.readline().strip()) for _ in range(2)] for child in begun if child.stdout)
    foreign = tmp_path / "envbuild-run-of-mine"
    foreign.mkdir()
    begun[0].kill()
    begun[0].wait()
    (dead[0] / "torchelastic_x").mkdir()
    assert all(path.is_dir() for path in (*dead, *alive)) and dead[0].parent == tmp_path
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with with_tmpdir(load_environment(variables)) as environment:
        own = Path(environment.variables["TMPDIR"])
        assert own.is_dir() and own.stat().st_mode & 0o777 == 0o700
        assert environment.uv_environment()["TMPDIR"] == str(own)  # uv leaves locks of conda environments in it
        # Room for a socket: torch_shm_manager's is TMPDIR/torch-shm-dir-XXXXXX/manager.sock.
        assert len(f"/tmp/{own.name}/verify-12345678/torch-shm-dir-123456/manager.sock") < 107
    begun[1].kill()
    begun[1].communicate()
    begun[0].communicate()
    assert not any(path.exists() for path in (*dead, own)) and all(path.is_dir() for path in (*alive, foreign))


def test_all_working_folders_are_known_to_the_clean_up() -> None:
    calls = re.compile(r'\.working\(((?:"[a-z]+"(?:, )?)+)\)')
    source = Path(__file__).parents[2] / "envbuild"
    found = (text for path in source.rglob("*.py") for text in calls.findall(path.read_text()))
    assert {"/".join(re.findall(r"[a-z]+", text)) for text in found} == set(_WORKING)


def test_working_folders_of_many_callers_at_once_stay_theirs(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def use(_: int) -> None:
        for _ in range(30):
            with store.working("work") as folder:
                (folder / "file").write_text("mine")
                assert (folder / "file").read_text() == "mine"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert list((tmp_path / "work").iterdir()) == []


def test_a_check_reads_notes_tables_builders_and_built_layers(store: Store, tmp_path: Path) -> None:
    note, table = store.folder("layers") / "key.json", store.folder("layers") / "key.members"
    write_note(note, {"distributions": []})
    write_table(table, {"format": 1})
    builder = store.folder("builders") / "key.sqsh"
    builder.write_text("squashfs")
    write_note(builder.with_suffix(".json"), {"sha256": store.digests.of(builder)})
    tree = store.folder("built", "key") / "tree"
    tree.mkdir()
    (tree / "lib.so").write_text("machine code")
    write_manifest(tree.parent, SourceManifest("foo", "1", list_files(tree)))
    (store.folder("layers") / "old.json").write_text('{"of": "an older version"}')
    assert check_store(store, 2)[2] == []
    changed = {
        note: note.read_bytes().replace(b"[]", b"[[]]"),
        table: table.read_bytes()[:-1] + b"!",
        builder: b"squashFs",
        tree / "lib.so": b"Machine code",
    }
    for path, content in changed.items():
        path.write_bytes(content)
    table.with_name("empty.members").write_bytes(b"")
    (tree / "added.so").write_text("more")
    found = check_store(store, 2)[2]
    assert set(found) == {*changed, tree / "added.so", table.with_name("empty.members")}
    assert not any(path.exists() for path in found) and check_store(store, 2)[2] == []


def test_a_table_under_another_name_is_none(tmp_path: Path) -> None:
    write_table(tmp_path / "a.members", {"format": 1})
    assert read_table(tmp_path / "a.members") == {"format": 1}
    (tmp_path / "a.members").rename(tmp_path / "b.members")
    with pytest.raises(ValueError, match="no table"):
        read_table(tmp_path / "b.members")


def test_a_check_reads_everything_and_removes_what_is_damaged(store: Store, tmp_path: Path) -> None:
    paths = []
    for number, (kind, name) in enumerate([("wheels", NAME), ("conda/archives", "x.conda"), ("blobs/sha256", "")]):
        sha256 = hashlib.sha256(str(number).encode()).hexdigest()
        path = store.root / kind / sha256 / name
        path.parent.mkdir(parents=True)
        path.write_text(str(number))
        paths.append(path)
    data = store.root / "segments/key-codec.data"
    data.parent.mkdir()
    data.write_bytes(b"")
    empty = hashlib.sha256().hexdigest()
    store.digests.record(data, empty)
    save(Segment(data, 0, empty, (), {}, ()), data.with_suffix(".index"))
    (store.root / "blobs/sha256/.new-x").write_text("unfinished")
    files, size, removed = check_store(store, 2)
    assert (files, removed) == (5, []) and size == 3 + data.with_suffix(".index").stat().st_size
    for path in (*paths, data):
        # As a failing disk changes it; what is noted of it says that nothing did.
        note = store.root / "digests" / hashlib.sha256(os.fsencode(path)).hexdigest()
        row = json.loads(note.read_text())
        path.write_bytes(b"!")
        info = path.stat()
        note.write_text(
            json.dumps([str(path), info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, *row[5:]])
        )
        assert store.digests.of(path) == row[-1]
    assert check_store(store, 2)[2] == [*paths, data] and not any(path.exists() for path in (*paths, data))
