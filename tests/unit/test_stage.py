"""Staging of images: nodes of a job, all on this host, that pass a file on."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddp_train.stage.disk as disk
import ddp_train.stage.node as node
from ddp_train.stage.disk import LEAST, MOST, Folder, Lost, piece_of, split
from ddp_train.stage.node import Node
from ddp_train.stage.tree import Packed, unpack
from envbuild.contract.manifest import write_manifest
from examples import examples

TORCH = "lib/python3.11/site-packages/torch"
TRAINER = Path(disk.__file__).parents[1]


@dataclass
class Job:
    """A job's run folder, and a folder for each node's disk."""

    top: Path
    source: Path
    nodes: int
    keep: int = 10**12
    restarts: int = 0
    manifest: str = ""
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def prepare(self) -> None:
        run = self.top / "run_7"
        run.mkdir(exist_ok=True)
        for old in run.glob(f"stage-{self.restarts}*"):
            old.unlink()
        (run / f"stage-{self.restarts}.key").write_bytes(b"k" * 32)
        (run / f"hosts-{self.restarts}").write_text(
            "".join(f"{one}\n" for one in ["127.0.0.1", *map(self.name, range(self.nodes))])
        )

    @staticmethod
    def name(number: int) -> str:
        return f"n{number}"

    def disk(self, number: int) -> Path:
        """The folder of a node's images."""
        return self.top / f"disk{number}" / f"envbuild-{os.getuid()}"

    def start(self, number: int, *, slow: float = 0, patch: str = "") -> subprocess.Popen[str]:
        """Start a node; `slow` makes it read so much slower, in seconds for each piece; `patch` is run before it."""
        about = {
            "source": str(self.source),
            "folder": str(self.disk(number).parent),
            "keep": self.keep,
            "number": ["SLURM_NODEID"],
            "interface": "",
            **({"manifest": self.manifest} if self.manifest else {}),
        }
        program = "import runpy, time, stage.node as n; old = n.Node.add; n.ORPHANS_S = 3\n"
        program += f"def add(self, *more): time.sleep({slow}); old(self, *more)\nn.Node.add = add\n"
        program += patch
        program += "runpy.run_module('stage', run_name='__main__', alter_sys=True)"
        line = [
            sys.executable,
            "-B",
            "-c",
            program,
            json.dumps(about, ensure_ascii=False),  # as in the script of a job
            "stage",
            f"{self.top}/run_7/settings-{self.restarts}.sh",
        ]
        env = {
            **os.environ,
            "PYTHONPATH": str(TRAINER),
            "SLURM_NODEID": str(number),
            "SLURMD_NODENAME": self.name(number),
        }
        started = subprocess.Popen(line, env=env, stderr=subprocess.PIPE, text=True)
        self.running.append(started)
        return started

    def run(self, **slow: float) -> list[str]:
        """Stage on all nodes; what each said."""
        self.prepare()
        started = [self.start(number, slow=slow.get(self.name(number), 0)) for number in range(self.nodes)]
        said = [one.communicate(timeout=100)[1] for one in started]
        assert [one.returncode for one in started] == [0] * self.nodes, said
        return said

    def link(self, number: int) -> Path:
        return self.disk(number) / f"run_7-{self.restarts}{self.source.suffix}"

    def staged(self) -> list[bool]:
        """Whether each node's link leads to its own copy; every link leads to the whole image."""
        for number in range(self.nodes):
            assert self.link(number).read_bytes() == self.source.read_bytes()
        return [self.link(number).resolve().parent == self.disk(number).resolve() for number in range(self.nodes)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    source = tmp_path / "image.sqsh"
    source.write_bytes(random.Random(1).randbytes(12 << 20))
    made = Job(tmp_path, source, 4)
    yield made
    for one in made.running:
        one.kill()
        one.wait()


@pytest.fixture
def venv(tmp_path: Path) -> Iterator[Job]:
    """An environment of 12 MB: small files, a large one, links, bytecode and what Python and users add to it."""
    root, some = tmp_path / "venv", random.Random(2)
    package = root / TORCH
    (package / "__pycache__").mkdir(parents=True)
    (root / "bin").mkdir()
    for number in range(300):
        (package / f"m{number:03}.py").write_bytes(some.randbytes(some.randrange(0, 9000)))
    (package / "libtorch.so").write_bytes(some.randbytes(10 << 20))
    (root / "bin/torchrun").write_text("#!/bin/sh\n")
    (root / "bin/torchrun").chmod(0o755)
    (root / "bin/python").symlink_to(sys.executable)
    (root / "lib64").symlink_to("lib")
    manifest, _ = write_manifest(root, 1)
    (package / "__pycache__/m000.cpython-311.pyc").write_bytes(b"code")
    os.utime(package / "m000.py", (10**9, 10**9))
    made = Job(tmp_path, root, 3, manifest=manifest.digest)
    yield made
    for one in made.running:
        one.kill()
        one.wait()


def files(root: Path) -> dict[str, object]:
    """Everything below a folder that is no folder: what links name, else content, mode and time in seconds (not the
    manifest's)."""
    return {
        str(path.relative_to(root)): os.readlink(path)
        if path.is_symlink()
        else (path.read_bytes(), path.stat().st_mode, path.suffix != ".manifest" and int(path.stat().st_mtime))
        for path in root.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_an_environment_is_on_every_disk_as_it_is_with_its_bytecode(venv: Job) -> None:
    said = venv.run()
    assert "the environment is on the disks of 3 of 3 nodes" in said[0], said
    for number in range(3):
        assert venv.link(number).resolve().parent == venv.disk(number)
        assert files(venv.link(number)) == files(venv.source)
    assert mb(said[0], "other nodes") == 2 * mb(said[0], "the shared file")
    venv.restarts = 1
    before = venv.link(1).with_name("run_7-0").resolve()
    assert "3 had it; 0 MB from the shared file system, 0 MB" in venv.run()[0]
    assert venv.link(1).resolve() == before, "it is not unpacked again"


def test_file_names_may_have_any_letters_where_python_knows_ascii_alone(
    venv: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.6 does where LC_ALL is C; later ones need two variables for it."""
    venv.source = venv.source.rename(venv.top / "Umgebung für x")
    package = venv.source / TORCH
    (package / "größe.py").write_text("x = 1\n")
    (package / "__pycache__/größe.cpython-311.pyc").write_bytes(b"its bytecode")
    (package / "größe").symlink_to("größe.py")
    (venv.source / "envbuild.manifest").unlink()
    venv.manifest = write_manifest(venv.source, 1)[0].digest
    for name, value in (("LC_ALL", "C"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0")):
        monkeypatch.setenv(name, value)
    said = venv.run()
    assert "the environment is on the disks of 3 of 3 nodes" in said[0], said
    assert all(files(venv.link(number)) == files(venv.source) for number in range(3))


def test_a_file_that_is_cut_while_it_is_read_is_not_passed_on(venv: Job) -> None:
    packed = Packed(str(venv.source), venv.manifest)
    packed.size()
    os.truncate(venv.source / TORCH / "libtorch.so", 5 << 20)
    with pytest.raises(Lost, match="libtorch"):
        list(iter(partial(packed.read, 1), b""))


def test_the_stream_of_an_environment_is_the_same_for_the_same_files(venv: Job) -> None:
    def stream() -> bytes:
        packed = Packed(str(venv.source), venv.manifest)
        size = packed.size()
        data = b"".join(iter(partial(packed.read, 1), b""))
        assert len(data) == size
        return data

    first = stream()
    copy = venv.top / "elsewhere"
    subprocess.run(["cp", "-a", venv.source, copy], check=True)
    venv.source = copy
    assert stream() == first


def test_of_a_new_version_only_changed_files_move(venv: Job) -> None:
    venv.run()
    shutil.copyfile(venv.source / f"{TORCH}/m001.py", venv.source / "a.py")
    for path in venv.source.rglob("*.py"):
        os.utime(path)  # as when it is built again
    (venv.source / "envbuild.manifest").unlink()
    venv.manifest = write_manifest(venv.source, 1)[0].digest
    venv.restarts = 1
    said = venv.run()
    assert [files(venv.link(number)) == files(venv.source) for number in range(3)] == [True] * 3
    assert mb(said[0], "earlier environments") >= 3 * 6 and mb(said[0], "other nodes") <= 2 * 5


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("path", [f"{TORCH}/libtorch.so", "bin/torchrun", "envbuild.manifest"])
def test_an_environment_that_is_not_the_verified_one_is_not_staged(venv: Job, path: str, cut: bool) -> None:
    with (venv.source / path).open("r+b") as file:
        file.truncate(3) if cut else file.write(b"!")
    said = venv.run()
    assert f"{path} changed since the environment was verified" in said[0]
    assert all("reads the environment from the shared file system" in one for one in said)
    assert [venv.link(number).resolve() for number in range(3)] == [venv.source] * 3
    assert not [path for number in range(3) for path in venv.disk(number).glob("*.tree")]


def test_a_copy_that_a_job_changed_is_unpacked_again_beside_it(venv: Job) -> None:
    venv.run()
    first = venv.link(1).resolve()
    (first / f"{TORCH}/__pycache__/m001.cpython-311.pyc").write_bytes(b"Python's own")
    (first / f"{TORCH}/__init__.py").write_text("import evil")
    venv.restarts = 1
    assert "3 had it" in venv.run()[0]
    assert files(venv.link(1)) == files(venv.source)
    assert venv.link(1).resolve() != first and first.exists(), "the earlier job may still run in it"


def test_a_child_of_a_killed_node_gets_the_environment_and_a_killed_unpacking_is_removed(venv: Job) -> None:
    venv.nodes = 4
    left = venv.disk(2) / "0123456789abcdef-00000000.draft"
    (left / "lib").mkdir(parents=True)
    venv.disk(2).chmod(0o700)
    venv.prepare()
    started = [venv.start(number, slow=0.2 if number == 0 else 0) for number in range(4)]
    until(lambda: any(one.stat().st_size > LEAST for one in venv.disk(3).glob("*.part")))
    started[1].send_signal(signal.SIGKILL)
    said = {number: started[number].communicate(timeout=100)[1] for number in (0, 2, 3)}
    assert "of 3 of 4 nodes" in said[0], said
    for number in (0, 2, 3):
        assert files(venv.link(number)) == files(venv.source)
    assert not left.exists()


def test_an_environment_makes_room_unless_a_job_runs_in_it(venv: Job) -> None:
    venv.nodes = 1
    venv.run()
    tree = venv.link(0).resolve()
    for path in venv.disk(0).iterdir():
        if path.suffix in (".list", ".seal"):
            os.utime(path, (time.time() - 86400,) * 2)
    held = os.open(tree, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    folder = Folder(str(venv.disk(0)), 10**6)
    folder.room(0)
    assert tree.exists() and not list(venv.disk(0).glob("*.image"))
    os.close(held)
    folder.room(0)
    assert not tree.exists() and venv.link(0).is_symlink()
    folder.room(0)
    assert {path.suffix for path in venv.disk(0).iterdir()} == {".list", ".source"}


def test_where_no_library_can_be_loaded_nothing_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, there = Folder(str(tmp_path / "d"), 10**9), os.statvfs(tmp_path)
    folder.make()
    flagged = os.statvfs_result((*there[:8], there.f_flag | os.ST_NOEXEC, there.f_namemax))
    monkeypatch.setattr(os, "statvfs", lambda path: flagged)
    with pytest.raises(Lost, match="without exec"):
        folder.tree("k" * 64, lambda image, root: None)


def test_jobs_that_start_at_one_time_on_the_same_nodes_both_get_the_environment(venv: Job) -> None:
    jobs = [replace(venv, restarts=number, running=venv.running) for number in range(3)]
    for job in jobs:
        job.prepare()
    started = [job.start(number) for job in jobs for number in range(3)]
    said = [one.communicate(timeout=100)[1] for one in started]
    assert [one.returncode for one in started] == [0] * 9, said
    for job, text in zip(jobs, said[::3], strict=True):
        assert "of 3 of 3 nodes" in text, said
        assert all(files(job.link(number)) == files(venv.source) for number in range(3))


@pytest.mark.parametrize("path", ["../out.py", "/tmp/out.py", "a/../../out.py"])
def test_no_stream_writes_outside_of_its_folder(tmp_path: Path, path: str) -> None:
    manifest = json.dumps([path, 0o644, 1, hashlib.sha256(b"x").hexdigest()]).encode() + b"\n"
    stream = io.BytesIO(json.dumps([len(manifest), [0], []]).encode() + b"\n" + manifest + b"x")
    (tmp_path / "tree").mkdir()
    with pytest.raises(Lost, match="not a path"):
        unpack(stream, str(tmp_path / "tree"), f"sha256:{hashlib.sha256(manifest).hexdigest()}")


def mb(said: str, what: str) -> int:
    """The number before `what` in node 0's summary."""
    return int(said.partition(f" MB from {what}")[0].rpartition(" ")[2])


def test_every_node_gets_the_image_and_the_shared_file_is_read_once(job: Job) -> None:
    said = job.run()
    assert job.staged() == [True] * 4
    assert "the image is on the disks of 4 of 4 nodes" in said[0] and "0 had it" in said[0]
    assert mb(said[0], "the shared file") == 13 and mb(said[0], "other nodes") == 38
    assert said[1:] == [""] * 3
    assert not list(job.disk(2).glob("*.part"))


def test_what_is_there_stays_and_a_changed_image_moves_only_what_changed(job: Job) -> None:
    job.run()
    job.restarts = 1
    said = job.run()
    assert "4 had it; 0 MB from the shared file system, 0 MB from other nodes" in said[0]
    old = job.source.read_bytes()
    job.source.write_bytes(old[: 6 << 20] + b"a wheel" * 1000 + old[(6 << 20) + 50 :])
    job.restarts = 2
    said = job.run()
    assert job.staged() == [True] * 4
    assert mb(said[0], "other nodes") <= 3 * 5 and mb(said[0], "earlier images") >= 3 * 8


def test_an_image_that_is_there_needs_no_room_for_a_second_copy(job: Job) -> None:
    """Neither is it removed to make that room."""
    job.keep = 20 << 20  # one image of 12 MiB, but not two
    job.run()
    for number in range(4):
        for path in job.disk(number).glob("*.list"):
            os.utime(path, (time.time() - 7200,) * 2)
    job.restarts = 1
    assert "4 had it; 0 MB from the shared file system, 0 MB from other nodes" in job.run()[0]


def test_a_file_that_was_changed_on_the_disk_is_fetched_again(job: Job) -> None:
    job.nodes = 2
    job.run()
    copy = next(job.disk(1).glob("*.image"))
    with copy.open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"flipped")
    job.restarts = 1
    said = job.run()
    assert "1 had it" in said[0] and job.staged() == [True] * 2


def test_children_of_a_killed_node_get_the_image_from_the_next_one(job: Job) -> None:
    """Nodes 3 and 4 are below node 1, which is killed once it has some pieces."""
    job.nodes = 5
    job.prepare()
    started = [job.start(number, slow=0.15 if number == 0 else 0) for number in range(5)]
    until(lambda: any(one.stat().st_size > LEAST for one in job.disk(3).glob("*.part")))
    started[1].send_signal(signal.SIGKILL)
    said = {number: started[number].communicate(timeout=100)[1] for number in (0, 2, 3, 4)}
    for number in (0, 2, 3, 4):
        assert started[number].returncode == 0
        assert job.link(number).read_bytes() == job.source.read_bytes()
        assert number == 0 or said[number] == ""
        assert job.link(number).resolve().parent == job.disk(number).resolve()
    assert "of 4 of 5 nodes" in said[0]
    # The image came once: nodes 3 and 4 went on where they were.
    assert mb(said[0], "other nodes") == 38

    # What the killed node had is not fetched again.
    job.restarts = 1
    assert len(list(job.disk(1).glob("*.part"))) == 1
    said_again = job.run()
    assert "4 had it" in said_again[0] and mb(said_again[0], "earlier images") >= 1
    assert not list(job.disk(1).glob("*.part"))


def test_a_node_without_room_reads_the_shared_file_and_so_do_all_where_node_0_has_none(job: Job) -> None:
    job.nodes = 3
    job.disk(1).parent.mkdir()
    job.disk(1).parent.joinpath(job.disk(1).name).mkdir(mode=0o777)
    job.disk(1).chmod(0o777)
    job.prepare()
    started = [job.start(number) for number in (0, 2)]
    refused = job.start(1)
    assert "must be a folder of this user alone" in refused.communicate(timeout=60)[1] and refused.returncode == 1
    for one in started:
        one.communicate(timeout=100)
        assert one.returncode == 0
    assert job.link(2).resolve().parent == job.disk(2).resolve()


def test_a_disk_that_is_full_for_a_moment_damages_no_copy_and_is_not_left_full(job: Job) -> None:
    """Node 3 writes half of its second piece, and could then write again, from node 0 instead of node 1."""
    full = """
class Full(__import__('io').FileIO):
    def write(self, data):
        self.times = getattr(self, "times", 0) + 1
        return super().write(data[: len(data) // 2] if self.times == 2 else data)
def begin(self, size, old=n.Node.begin):
    old(self, size)
    there = self.copy.file
    self.copy.file = Full(there.name, "r+")
    self.kept = there
n.Node.begin = begin
"""
    job.prepare()
    started = [job.start(one, patch=full if one == 3 else "") for one in range(4)]
    said = [one.communicate(timeout=100)[1] for one in started]
    assert job.staged() == [True, True, True, False], said
    assert "reads the image from the shared file system" in said[3] and "No space left" in said[3]
    assert not list(job.disk(3).glob("*.part")), "the job may need the disk, too"


def test_the_shared_file_is_the_fallback_when_node_0_cannot_read_it(job: Job) -> None:
    job.nodes = 3
    text = job.source.read_bytes()
    job.source.unlink()
    job.prepare()
    started = [job.start(number) for number in range(3)]
    said = [one.communicate(timeout=100)[1] for one in started]
    job.source.write_bytes(text)
    assert all("reads the image from the shared file" in one for one in said) and job.staged() == [False] * 3


def test_a_stranger_gets_nothing_and_disturbs_nobody(job: Job) -> None:
    job.nodes = 2
    job.prepare()
    first = job.start(0)
    row = job.top / "run_7/stage-0.0"
    until(row.exists)
    address, port, _ = row.read_text().split()
    with socket.create_connection((address, int(port)), 10) as stranger:
        stranger.sendall(b"x" * 64)
        answer = b""
        while more := stranger.recv(1 << 16):
            answer += more
    assert len(answer) == 32  # its nonce, and no word more
    second = job.start(1)
    assert second.wait(60) == 0 and first.wait(60) == 0
    assert job.staged() == [True, True]


def test_jobs_of_one_node_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ends its copy, or removes an image, while another one looks at it; and one tidies up while another begins."""
    folder = Folder(str(tmp_path / "d"), 10**9)
    folder.make()
    there = os.listdir
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", lambda path: [*there(path), "1-ended.part"])
        folder.learn()
    for kind in ("image", "list"):
        path = Path(folder.at(f"old.{kind}"))
        path.write_bytes(b"x")
        os.utime(path, (time.time() - 86400,) * 2)
    with monkeypatch.context() as patched:
        patched.setattr(disk, "locked", lambda handle: not os.unlink(folder.at("old.image")))
        Folder(folder.path, 0).room(0)

    other, before = Node(1, 2, "", Folder(folder.path, 10**9), b""), iter([True])

    def lock(handle: IO[bytes] | int) -> bool:
        if next(before, False):
            folder.tidy()
        return disk.locked(handle)

    monkeypatch.setattr(node, "lock", lock)
    other.begin(3)
    folder.tidy()
    other.add(b"abc", piece_of(b"abc"), "network")
    assert Path(folder.at(other.end() + ".image")).read_bytes() == b"abc"


def test_images_that_were_not_used_lately_make_room(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "d"), 5000)
    folder.make()
    for number, age in enumerate((3, 2, 0)):
        for kind in ("image", "list"):
            path = tmp_path / f"d/{number}.{kind}"
            path.write_bytes(b"x" * 2000)
            os.utime(path, (time.time() - age * 86400,) * 2)
    folder.link("job.sqsh", "0.image")
    folder.room(1000)
    assert {path.name for path in (tmp_path / "d").glob("*.image")} == {"1.image", "2.image"}
    folder.room(10**4)  # what was used within the hour stays, whatever the limit
    assert {path.name for path in (tmp_path / "d").glob("*.image")} == {"2.image"}
    assert not (tmp_path / "d/job.sqsh").is_symlink()
    with pytest.raises(Lost, match="no room"):
        folder.room(1 << 60)


@examples(20)
@given(
    seed=st.integers(0, 2**32), size=st.integers(0, 12 << 20), at=st.integers(0, 12 << 20), new=st.integers(0, 99999)
)
def test_pieces_are_the_file_and_meet_again_after_a_change(seed: int, size: int, at: int, new: int) -> None:
    data = random.Random(seed).randbytes(size)
    pieces = list(split(Reader(data)))
    assert b"".join(pieces) == data and all(0 < len(one) <= MOST for one in pieces)
    assert all(len(one) >= LEAST for one in pieces[:-1])
    changed = data[:at] + b"n" * new + data[at:]
    other = [piece_of(one) for one in split(Reader(changed))]
    assert sum(size for size, _ in set(other) - {piece_of(one) for one in pieces}) <= new + 6 * MOST


class Reader:
    """A file whose reads return less than was asked for."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def __call__(self, size: int) -> bytes:
        got = self.data[self.at : self.at + max(1, size - 12345)]
        self.at += len(got)
        return got


def test_the_program_is_python_3_6() -> None:
    """Syntax only; what it uses of the library was compared with Python 3.6's by vermin."""
    for path in (TRAINER / "stage").glob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 6))
        assert "from __future__" not in path.read_text()


def until(what: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)
