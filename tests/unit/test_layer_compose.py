"""Which layers an image has, what decides them, and that each is made once."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lab.wheels import make_wheel

from envbuild.base.errors import BuildError
from envbuild.base.packages import record_digest
from envbuild.cache.hashed import read_note, write_note
from envbuild.contract.installed import check_files
from envbuild.contract.state import FIXED_TIME, PREFIX
from envbuild.image.entry import DIR, FILE, Entry, Tree
from envbuild.interpreter import read_python
from envbuild.layers.bytecode import Compiler, compiler_of
from envbuild.layers.compose import LARGE, environment_part, wheel_parts
from envbuild.layers.compose import alone as dedicated
from envbuild.layers.layer_cache import LayerRequest, TarCache
from envbuild.layers.wheel import Scheme, WheelFile
from envbuild.store.entry import key_of
from envbuild.store.store import Store

SCHEME = Scheme(PREFIX, "3.11")
SITE = SCHEME.site_packages
COMPILER = compiler_of(read_python(sys.executable))


def located(path: Path, size: int | None = None) -> WheelFile:
    name, version = path.name.split("-")[:2]
    data = path.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    return WheelFile(name.replace("_", "-"), version, path, sha256, len(data) if size is None else size)


def pretend(name: str, size: int) -> WheelFile:
    return WheelFile(name, "1.0", Path("/gone"), hashlib.sha256(name.encode()).hexdigest(), size)


def parts(wheels: Sequence[WheelFile], **changed: Any) -> list[LayerRequest]:
    inputs = {"scheme": SCHEME, "compiler": COMPILER, "mtime": FIXED_TIME, **changed}
    return wheel_parts(wheels, **inputs, alone=dedicated(wheels)[0])


def content(tree: Tree) -> dict[str, tuple[Entry, bytes]]:
    return {entry.path: (entry, stream.read() if stream else b"") for entry, stream in tree}


def test_large_wheels_come_first_by_size_and_the_small_ones_together() -> None:
    sizes = {
        "small-b": LARGE - 1,
        "huge": 10 * LARGE,
        "exact": LARGE,
        "tie-b": 2 * LARGE,
        "tie-a": 2 * LARGE,
        "small-a": 1,
    }
    wheels = [pretend(name, size) for name, size in sizes.items()]
    titles = [part.title for part in parts(wheels)]
    assert titles == ["huge 1.0", "tie-a 1.0", "tie-b 1.0", "exact 1.0", "2 packages: small-a 1.0, small-b 1.0"]
    assert [p.key for p in parts(wheels[::-1])] == [p.key for p in parts(wheels)]
    assert [p.title for p in parts(wheels[:1])] == ["small-b 1.0"] and parts([]) == []


def test_a_layers_key_changes_when_and_only_when_what_decides_it_does() -> None:
    wheels = [pretend("big", LARGE), pretend("a", 1), pretend("b", 2)]
    known = [part.key for part in parts(wheels)]
    other = dataclasses.replace(COMPILER, version="3.11.99")
    tag = dataclasses.replace(COMPILER, tag="cpython-399")
    magic = dataclasses.replace(COMPILER, magic=b"abcd")
    alone: list[dict[str, Any]] = [
        {"mtime": 0},
        {"compiler": None},
        {"compiler": other},
        {"compiler": tag},
        {"compiler": magic},
        {"scheme": Scheme("opt/other", "3.11")},
        {"scheme": Scheme(PREFIX, "3.12")},
    ]
    for changed in alone:
        assert not {part.key for part in parts(wheels, **changed)} & set(known)
    # where things lie decides nothing
    moved = [dataclasses.replace(wheel, place=Path("/elsewhere")) for wheel in wheels]
    same = dataclasses.replace(COMPILER, python="/another/python")
    assert [part.key for part in parts(moved, compiler=same)] == known
    for field in ("name", "version", "sha256"):
        value: dict[str, Any] = {field: "c"}
        changed_one = dataclasses.replace(wheels[1], **value)
        keys = [part.key for part in parts([wheels[0], changed_one, wheels[2]])]
        assert keys[0] == known[0] and keys[1] != known[1]


def script_wheel(folder: Path, name: str, files: Mapping[str, bytes]) -> WheelFile:
    points = f"[console_scripts]\nshared = {name}:main\nof-{name} = {name}:main\n".encode()
    return located(make_wheel(folder, name, files={**files, f"{name}-1.0.dist-info/entry_points.txt": points}))


def test_of_a_file_that_several_wheels_have_the_last_ones_stays(tmp_path: Path) -> None:
    one = script_wheel(tmp_path, "one", {"shared.py": b"of = 'one'", "shared/x": b"1"})
    two = script_wheel(tmp_path, "two", {"shared.py": b"of = 'two, later'", "shared/x": b"22"})
    (part,) = parts([two, one])
    made = content(part.tree())
    assert made[f"{SITE}/shared.py"][1] == b"of = 'two, later'"
    assert made[f"{SITE}/shared/x"][1] == b"22"
    assert b"from two import" in made["opt/env/bin/shared"][1]
    assert {"opt/env/bin/of-one", "opt/env/bin/of-two"} <= made.keys()
    pyc = made[f"{SITE}/__pycache__/shared.{COMPILER.tag}.pyc"][1]
    assert b"two, later" in pyc
    result = TarCache(Store(tmp_path / "store"), print).part(part)
    assert [(name, version) for name, version, _ in result.distributions] == [("one", "1.0"), ("two", "1.0")]


def environment(trainer: WheelFile, **changed: Any) -> LayerRequest:
    inputs: dict[str, Any] = {
        "scheme": SCHEME,
        "interpreter": "/usr/bin/python3.11",
        "python_version": "3.11.2",
        "state": '{"a": 1}',
        "compiler": COMPILER,
        "mtime": FIXED_TIME,
        "system_packages": False,
        "folders": ["/workspace"],
        **changed,
    }
    return environment_part([trainer], **inputs)


def test_own_code_is_in_the_last_layer_after_the_trainer(tmp_path: Path) -> None:
    trainer, own = located(make_wheel(tmp_path, "ddp-train")), located(make_wheel(tmp_path, "own"))
    other = located(make_wheel(tmp_path / "other", "own", files={"own/more.py": b"1"}))
    inputs: dict[str, Any] = {
        "scheme": SCHEME,
        "interpreter": "/usr/bin/python3.11",
        "python_version": "3.11.2",
        "state": "{}",
        "compiler": None,
        "mtime": FIXED_TIME,
        "system_packages": False,
    }
    alone, with_own, with_other = (environment_part([trainer, *more], **inputs) for more in ([], [own], [other]))
    assert len({alone.key, with_own.key, with_other.key}) == 3
    assert with_own.title == "ddp-train 1.0, own 1.0 and envbuild.json"
    paths = [entry.path for entry, _ in with_own.tree()]
    site_packages = SCHEME.site_packages
    assert paths.index(f"{site_packages}/own/__init__.py") > paths.index(f"{site_packages}/ddp_train/__init__.py")
    assert paths[-1] == "opt/env/envbuild.json"


def test_the_frame_is_an_environment_that_python_takes_as_one(tmp_path: Path) -> None:
    """The layer is unpacked and its prefix given to the interpreter that runs this test."""
    interpreter = os.path.realpath(sys.executable)
    version = ".".join(map(str, sys.version_info[:2]))
    scheme = Scheme(os.fspath(tmp_path / "root").strip("/"), version)
    trainer = located(make_wheel(tmp_path, "ddp-train"))
    part = environment(trainer, scheme=scheme, interpreter=interpreter, folders=[])
    store = Store(tmp_path / "store")
    made = TarCache(store, print).part(part)
    with tarfile.open(store.blobs.path(made.layer.blob.digest)) as archive:
        archive.extraction_filter = lambda member, _: member  # Python 3.11.2 knows no other way
        archive.extractall("/")
    code = "import sys, ddp_train; print(sys.prefix, sys.base_prefix != sys.prefix, ddp_train.__cached__)"
    for name in ("python", "python3", f"python{version}"):
        told = subprocess.run([f"/{scheme.prefix}/bin/{name}", "-I", "-B", "-c", code], capture_output=True, text=True)
        assert told.stdout.split()[:2] == [f"/{scheme.prefix}", "True"], told.stderr
    report = check_files(Path("/", scheme.site_packages))
    assert (report.missing, report.altered, report.unowned) == ([], [], [])
    assert (tmp_path / "root/envbuild.json").read_text() == '{"a": 1}'


def test_the_frame_says_where_the_interpreter_is_and_what_it_sees(tmp_path: Path) -> None:
    trainer = located(make_wheel(tmp_path, "ddp-train"))
    made = content(environment(trainer).tree())
    config = dict(line.split(" = ") for line in made["opt/env/pyvenv.cfg"][1].decode().splitlines())
    assert config == {
        "home": "/usr/bin",
        "include-system-site-packages": "false",
        "version": "3.11.2",
        "executable": "/usr/bin/python3.11",
    }
    assert made["opt/env/bin/python"][0].target == "/usr/bin/python3.11"
    assert made["workspace"][0].kind == "dir"
    assert "opt/env/bin/torchrun" not in made
    seeing = content(environment(trainer, system_packages=True).tree())
    assert b"include-system-site-packages = true" in seeing["opt/env/pyvenv.cfg"][1]
    entry, text = seeing["opt/env/bin/torchrun"]
    assert entry.mode == 0o755 and text.startswith(b"#!/opt/env/bin/python\n")
    compile(text, "torchrun", "exec")
    at_root = content(environment(trainer, interpreter="/python").tree())
    assert b"home = /\n" in at_root["opt/env/pyvenv.cfg"][1]


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/", {}),
        ("/tmp", {"tmp": 0o1777}),
        ("/root/work", {"root": 0o700, "root/work": 0o755}),
        ("/var/tmp/", {"var": 0o755, "var/tmp": 0o1777}),
        ("//data//a/../b/", {"data": 0o755, "data/b": 0o755}),
        ("/opt/env/share", {"opt/env/share": 0o755}),
    ],
)
def test_a_workdir_that_every_base_has_keeps_its_mode(folder: str, expected: dict[str, int], tmp_path: Path) -> None:
    trainer = located(make_wheel(tmp_path, "ddp-train"))
    without = content(environment(trainer, folders=[]).tree())
    made = content(environment(trainer, folders=[folder]).tree())
    assert {path: made[path][0].mode for path in made.keys() - without.keys()} == expected


def test_the_last_layer_has_the_folders_around_as_they_were(tmp_path: Path) -> None:
    trainer = located(make_wheel(tmp_path, "ddp-train"))
    around = [Entry("root", DIR, 0o755), Entry("root/a", DIR, 0o700, uid=1000)]
    one = environment(trainer, folders=["/root/a/b"], parents=around)
    made = content(one.tree())
    assert [made[path][0] for path in ("root", "root/a")] == around
    assert made["root/a/b"][0].mode == 0o755
    assert one.key != environment(trainer, folders=["/root/a/b"]).key


def test_the_environments_key_covers_all_that_decides_it(tmp_path: Path) -> None:
    trainer = located(make_wheel(tmp_path, "ddp-train"))
    known = environment(trainer).key
    assert environment(dataclasses.replace(trainer, place=Path("/gone"))).key == known
    changes: list[dict[str, Any]] = [
        {"interpreter": "/usr/bin/python3"},
        {"python_version": "3.11.9"},
        {"state": "{}"},
        {"compiler": None},
        {"mtime": 1},
        {"system_packages": True},
        {"folders": ["/w"]},
        {"folders": []},
        {"scheme": Scheme("opt/env2", "3.11")},
        {"scheme": Scheme(PREFIX, "3.12")},
    ]
    keys = [environment(trainer, **changed).key for changed in changes]
    keys.append(environment(dataclasses.replace(trainer, sha256="0")).key)
    assert len({known, *keys}) == len(keys) + 1
    assert key_of("a", [1]) != key_of("b", [1])


def simple(text: str = "1", title: str = "a layer") -> LayerRequest:
    def tree() -> Tree:
        yield Entry("a", FILE, 0o644, len(text)), io.BytesIO(text.encode())

    return LayerRequest(title, key_of("test", text), tree)


def test_a_layer_is_made_once_and_then_taken_from_the_store(tmp_path: Path) -> None:
    store, said = Store(tmp_path), list[str]()
    first = TarCache(store, said.append).part(simple())
    assert TarCache(store, said.append).part(simple()) == first
    assert said == ["  layer: a layer"]
    assert TarCache(store, said.append).part(simple("2")) != first
    long = TarCache(store, said.append).part(simple("3", "x" * 200))
    assert len(said[-1]) < 110 and long.title == "x" * 200
    assert not list(tmp_path.rglob("*.lock")) and not list(tmp_path.rglob(".*"))


def blob(store: Store, key: str) -> Path:
    note = json.loads((store.folder("layers") / f"{key}.json").read_text())
    return store.blobs.path(note["digest"])


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"7",
        b'"x"',
        b"\xff\xfe",
        b"{}",
        b'{"digest": 5}',
        b'{"media_type": 1, "digest": 2, "size": 3, "diff_id": 4, "unpacked": 5, "distributions": []}',
        b'{"media_type": "m", "digest": "../../etc/passwd", "size": 3, "diff_id": "x", "unpacked": 5,'
        b' "distributions": []}',
    ],
)
def test_a_damaged_note_is_made_again(note: bytes, tmp_path: Path) -> None:
    store, said = Store(tmp_path), list[str]()
    first = TarCache(store, print).part(simple())
    place = store.folder("layers") / f"{simple().key}.json"
    good = place.read_bytes()
    place.write_bytes(note)
    assert TarCache(store, said.append).part(simple()) == first and said
    assert place.read_bytes() == good


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", 5),
        ("digest", "sha256:" + "0" * 64),
        ("distributions", [["a"]]),
        ("diff_id", None),
        ("distributions", 5),
        ("media_type", "text/plain"),
        ("unpacked", "many"),
        ("size", "5"),
    ],
)
def test_a_note_with_one_wrong_value_is_made_again(field: str, value: object, tmp_path: Path) -> None:
    store, said = Store(tmp_path), list[str]()
    first = TarCache(store, print).part(simple())
    place = store.folder("layers") / f"{simple().key}.json"
    write_note(place, {**read_note(place), field: value})
    assert TarCache(store, said.append).part(simple()) == first and said


@pytest.mark.parametrize("change", ["other layer's", "edited"])
def test_another_note_in_the_place_of_a_layer_s_is_found(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, said, rest = Store(tmp_path), list[str](), simple("2")
    cache = TarCache(store, said.append)
    first, place = cache.part(simple()), store.folder("layers") / f"{simple().key}.json"
    cache.part(rest)
    before = place.stat()
    other = place.with_name(f"{rest.key}.json").read_text()
    good = place.read_text()
    diff_id = json.loads(good)["diff_id"]
    place.write_text(other if change == "other layer's" else good.replace(diff_id, "sha256:" + "0" * 64))
    os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert place.stat().st_size == before.st_size
    assert cache.part(simple()) == first and len(said) == 3
    assert f"{place}: damaged" in capsys.readouterr().err
    assert place.read_text() == good


def test_a_missing_or_cut_blob_is_made_again(tmp_path: Path) -> None:
    store, said = Store(tmp_path), list[str]()
    first = TarCache(store, print).part(simple())
    path = blob(store, simple().key)
    whole = path.read_bytes()
    for damage in (path.unlink, lambda: path.write_bytes(whole[:-1])):
        damage()
        assert TarCache(store, said.append).part(simple()) == first
        assert path.read_bytes() == whole
    assert len(said) == 2


def slowly(root: Path, made: Path, start: Any) -> None:
    def tree() -> Tree:
        with made.open("a") as stream:
            stream.write("made\n")
        time.sleep(0.3)
        yield Entry("a", FILE, 0o644, 1), io.BytesIO(b"1")

    start.wait()
    TarCache(Store(root), lambda _: None).part(LayerRequest("slow", "0" * 64, tree))


def test_several_processes_make_a_layer_once(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    start, made = fork.Barrier(4), tmp_path / "made"
    workers = [fork.Process(target=slowly, args=(tmp_path / "s", made, start)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert made.read_text() == "made\n"
    assert not list(tmp_path.rglob("*.lock"))


def test_a_layer_that_failed_is_not_kept_and_can_be_made_again(tmp_path: Path) -> None:
    def broken() -> Tree:
        yield Entry("a", FILE, 0o644, 5), io.BytesIO(b"1")

    store, part = Store(tmp_path), simple()
    with pytest.raises(BuildError, match="not 5 bytes"):
        TarCache(store, print).part(dataclasses.replace(part, tree=broken))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert TarCache(store, print).part(part).title == "a layer"


@pytest.mark.parametrize("inside", ["layers", "blobs", "blobs/sha256"])
def test_a_store_that_cannot_be_written_is_told_with_what_to_do(inside: str, tmp_path: Path) -> None:
    """A file where the store has a folder: no permission stops root, who runs this in containers."""
    place = tmp_path / inside
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("")
    with pytest.raises(BuildError, match=f"cannot write {tmp_path}/") as told:
        TarCache(Store(tmp_path), print).part(simple())
    assert told.value.hint and "ENVBUILD_STORE" in told.value.hint


def test_a_lock_that_cannot_be_made_is_the_stores_fault(tmp_path: Path) -> None:
    (tmp_path / "layers" / f"{simple().key}.lock").mkdir(parents=True)
    with pytest.raises(BuildError, match=r"cannot write .*\.lock: Is a directory"):
        TarCache(Store(tmp_path), print).part(simple())


def test_a_damaged_wheel_is_not_blamed_on_the_store(tmp_path: Path) -> None:
    wheel = located(make_wheel(tmp_path, "cut", files={"cut/data": os.urandom(100_000)}))
    whole = wheel.path.read_bytes()
    wheel.path.write_bytes(whole[:5000] + bytes(20) + whole[5020:])
    with pytest.raises(BuildError, match=r"cut-1\.0-py3-none-any\.whl: not a wheel, or damaged"):
        TarCache(Store(tmp_path / "store"), print).part(parts([wheel])[0])
    wheel.path.unlink()
    with pytest.raises(BuildError, match=r"cannot be read: No such file"):
        TarCache(Store(tmp_path / "store"), print).part(parts([wheel])[0])


def test_what_a_layer_installs_is_told_by_its_records(tmp_path: Path) -> None:
    vendored = {
        "big_one/_vendor/six-1.0.dist-info/RECORD": b"vendored",
        "big_one/site-packages/x-2.dist-info/RECORD": b"vendored",
    }
    wheel = located(make_wheel(tmp_path, "Big.One", "2.0+cpu", files=vendored))
    (part,) = parts([wheel], compiler=None)
    store = Store(tmp_path / "store")
    made = TarCache(store, print).part(part)
    with tarfile.open(store.blobs.path(made.layer.blob.digest)) as archive:
        (name,) = [n for n in archive.getnames() if n.startswith(f"{SITE}/Big") and n.endswith("RECORD")]
        stream = archive.extractfile(name)
        assert stream is not None
        record = stream.read()
    assert made.distributions == (("big-one", "2.0+cpu", record_digest(record)),)
    assert TarCache(store, print).part(part).distributions == made.distributions


def test_layers_are_the_same_from_one_run_and_store_to_the_next(tmp_path: Path) -> None:
    wheels = [
        located(make_wheel(tmp_path, name, files={f"{name}/m{n}.py": b"x = {'a', 'b', 1}" for n in range(9)}))
        for name in ("aa", "bb")
    ]
    (part,) = parts(wheels)
    one = TarCache(Store(tmp_path / "one"), print).part(part)
    (again,) = parts(wheels[::-1])
    assert TarCache(Store(tmp_path / "two"), print).part(again) == one
    with zipfile.ZipFile(wheels[0].path, "a") as archive:  # what is not a wheel's content is not a layer's
        archive.comment = b"another file"
    (other,) = parts([located(wheels[0].path), wheels[1]])
    assert other.key != part.key
    assert TarCache(Store(tmp_path / "one"), print).part(other).layer == one.layer


def test_a_compilers_identity_is_all_but_its_place() -> None:
    one = Compiler("/a", "3.11.2", "cpython-311", b"\xa7\r\r\n")
    assert one.identity == "cpython-311 3.11.2 a70d0d0a 3"
    assert dataclasses.replace(one, python="/b").identity == one.identity


def test_blobs_and_notes_lie_where_the_store_says(tmp_path: Path) -> None:
    TarCache(Store(tmp_path), print).part(simple())
    assert Store(tmp_path).blobs.root == tmp_path / "blobs"
    assert blob(Store(tmp_path), simple().key).stat().st_mode & 0o777 == 0o644
