"""Snapshots: round trips, older scripts' files, damaged and foreign files, generations."""

from __future__ import annotations

import errno
import os
import pickle
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from examples import examples

pytest.importorskip("torch")
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_train.errors import TrainError
from ddp_train.models import batch_loss, build_model, build_optimizer
from ddp_train.snapshot import (
    SnapshotError,
    SnapshotFile,
    apply_snapshot,
    check_snapshot,
    from_bytes,
    make_snapshot,
    read_snapshot,
    to_bytes,
)


def trained(steps: int = 3, name: str = "linear") -> tuple[Any, Any]:
    model = build_model(name, False)
    optimizer = build_optimizer(model, 0.01)
    for _ in range(steps):
        batch_loss(model(torch.ones(4, 20)), torch.zeros(4, 1), False).backward()
        optimizer.step()
    return model, optimizer


def snapshot_of(epochs: int) -> dict[str, Any]:
    return make_snapshot(*trained(), "linear", epochs)


def file_with(folder: Path, *epochs: int) -> SnapshotFile:
    store = SnapshotFile(str(folder / "snapshot.pt"))
    for each in epochs:
        store.save(snapshot_of(each))
    return store


def refusal(path: Path) -> str:
    with pytest.raises(SnapshotError) as caught:
        check_snapshot(read_snapshot(path), build_model("linear", False), "linear")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_everything_comes_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = torch.get_rng_state()
    store = SnapshotFile(str(tmp_path / "snapshot.pt"))
    store.save(make_snapshot(model, optimizer, "linear", 7))
    torch.rand(3)
    fresh = build_model("linear", False)
    found = store.find(fresh, "linear")
    assert found.snapshot is not None
    assert (found.snapshot["EPOCHS_RUN"], found.path) == (7, str(store.path))
    assert found.rejected == []
    again = apply_snapshot(from_bytes(to_bytes(found.snapshot)), fresh, 0.5)
    assert torch.equal(fresh.weight, model.weight)
    momentum = optimizer.state_dict()["state"]
    restored = again.state_dict()["state"]
    assert torch.equal(restored[0]["momentum_buffer"], momentum[0]["momentum_buffer"])
    assert again.param_groups[0]["lr"] == 0.5, "the rate is this run's, not the snapshot's"
    assert torch.equal(torch.get_rng_state(), state)


def test_snapshot_of_an_older_script(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    layer = torch.nn.Linear(20, 1)
    torch.save({"MODEL_STATE": layer.state_dict(), "EPOCHS_RUN": 40}, path)
    model = build_model("linear", False)
    found = SnapshotFile(str(path)).find(model, "linear")
    assert found.snapshot is not None and found.snapshot["EPOCHS_RUN"] == 40
    apply_snapshot(found.snapshot, model, 0.01)
    assert torch.equal(model.weight, layer.weight)


def test_older_script_reads_our_snapshot(tmp_path: Path) -> None:
    store = file_with(tmp_path, 6)
    snapshot = torch.load(store.path, map_location="cpu")
    layer = torch.nn.Linear(20, 1)
    layer.load_state_dict(snapshot["MODEL_STATE"])
    assert snapshot["EPOCHS_RUN"] == 6


@examples(60)
@given(part=st.floats(0, 1, exclude_max=True), legacy=st.booleans())
def test_any_truncation_is_refused_in_one_line(part: float, legacy: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pt"
        torch.save(snapshot_of(3), path, _use_new_zipfile_serialization=not legacy)
        content = path.read_bytes()
        path.write_bytes(content[: int(part * len(content))])  # its length varies with addresses in memory
        assert refusal(path)


@examples(60)
@given(data=st.data())
def test_a_flipped_bit_in_a_tensor_is_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pt"
        snapshot = snapshot_of(3)
        content = bytearray(to_bytes(snapshot))
        weight = bytes(snapshot["MODEL_STATE"]["weight"].flatten().view(torch.uint8).tolist())
        at = content.index(weight) + data.draw(st.integers(0, len(weight) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        assert "damaged" in refusal(path)


@examples(100)
@given(content=st.binary(max_size=80), head=st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02"]))
def test_random_bytes_are_refused_in_one_line(content: bytes, head: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "snapshot.pt"
        path.write_bytes(head + content)
        assert refusal(path)


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("write", [torch.save, lambda o, p: p.write_bytes(pickle.dumps(o))])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write({"MODEL_STATE": Bomb(), "EPOCHS_RUN": 3}, tmp_path / "snapshot.pt")
    reason = refusal(tmp_path / "snapshot.pt")
    assert not (tmp_path / "exploded").exists()
    if write is torch.save:
        assert "could run code" in reason


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in snapshot_of(3).items() if name != key}


WEIGHT = torch.zeros(1, 20)
BIAS = torch.zeros(1)
MOMENTUM = {"state": {0: {"momentum_buffer": torch.zeros(1, 21)}}, "param_groups": []}


# A snapshot is made in the test: the first optimizer of a process imports half of torch.
@pytest.mark.parametrize(
    ("content", "word"),
    [
        ([1, 2], "holds a list"),
        (torch.zeros(3), "holds a Tensor"),
        (lambda: without("MODEL_STATE"), "MODEL_STATE is missing"),
        (lambda: without("EPOCHS_RUN"), "EPOCHS_RUN is missing"),
        (lambda: {**snapshot_of(3), "EPOCHS_RUN": -1}, "EPOCHS_RUN is -1"),
        (lambda: {**snapshot_of(3), "EPOCHS_RUN": True}, "EPOCHS_RUN is True"),
        (lambda: {**snapshot_of(3), "EPOCHS_RUN": 2.5}, "EPOCHS_RUN is 2.5"),
        (lambda: {**snapshot_of(3), "FORMAT": 2}, "format 2"),
        (lambda: {**snapshot_of(3), "MODEL": "mlp"}, "another model: mlp"),
        (lambda: {**snapshot_of(3), "MODEL_STATE": None}, "MODEL_STATE is not"),
        ({"MODEL_STATE": {"weight": WEIGHT}, "EPOCHS_RUN": 3}, "another model: it has weight"),
        (
            {"MODEL_STATE": {"weight": torch.zeros(2, 20), "bias": BIAS}, "EPOCHS_RUN": 3},
            "weight is torch.float32 of shape (2, 20)",
        ),
        ({"MODEL_STATE": {"weight": WEIGHT.double(), "bias": BIAS}, "EPOCHS_RUN": 3}, "weight is torch.float64"),
        ({"MODEL_STATE": {"weight": 1, "bias": BIAS}, "EPOCHS_RUN": 3}, "weight is not a tensor"),
        (lambda: {**snapshot_of(3), "OPTIMIZER_STATE": 5}, "OPTIMIZER_STATE is not"),
        (lambda: {**snapshot_of(3), "OPTIMIZER_STATE": MOMENTUM}, "does not fit parameter 0"),
        (lambda: {**snapshot_of(3), "OPTIMIZER_STATE": {"state": {9: {}}}}, "unexpected entry 9"),
        (lambda: {**snapshot_of(3), "RNG_STATE": torch.zeros(3)}, "RNG_STATE"),
    ],
)
def test_wrong_contents_are_named(tmp_path: Path, content: Any, word: str) -> None:
    path = tmp_path / "snapshot.pt"
    torch.save(content() if callable(content) else content, path)
    assert word in refusal(path)


def test_two_generations_and_no_leftovers(tmp_path: Path) -> None:
    store = file_with(tmp_path, 1, 2, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["snapshot.pt", "snapshot.pt.prev"]
    assert torch.load(store.path)["EPOCHS_RUN"] == 3
    assert torch.load(store.previous)["EPOCHS_RUN"] == 2


def test_bad_file_falls_back_and_never_displaces_the_good_generation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file_with(tmp_path, 1, 2)
    path = tmp_path / "snapshot.pt"
    path.write_bytes(b"my thesis")
    store = SnapshotFile(str(path))
    found = store.find(build_model("linear", False), "linear")
    assert found.snapshot is not None and found.snapshot["EPOCHS_RUN"] == 1
    assert found.path == str(store.previous)
    assert [entry["path"] for entry in found.rejected] == [str(path)]
    assert f"Snapshot {path} refused: not a file written by torch.save" in capsys.readouterr().out
    store.save(snapshot_of(5))
    assert torch.load(store.previous)["EPOCHS_RUN"] == 1
    assert (tmp_path / "snapshot.pt.refused").read_bytes() == b"my thesis"
    store.save(snapshot_of(6))
    assert torch.load(store.previous)["EPOCHS_RUN"] == 5


def test_both_generations_bad_starts_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = file_with(tmp_path, 1, 2)
    store.path.write_bytes(b"")
    store.previous.write_bytes(b"PK\x03\x04")
    found = store.find(build_model("linear", False), "linear")
    assert (found.snapshot, found.path, len(found.rejected)) == (None, None, 2)
    assert "No usable snapshot: starting at epoch 0" in capsys.readouterr().out


def test_a_crash_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    store = file_with(tmp_path, 1, 2)
    store.path.unlink()
    found = store.find(build_model("linear", False), "linear")
    assert found.snapshot is not None and found.snapshot["EPOCHS_RUN"] == 1


def test_path_exists_at_every_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = file_with(tmp_path, 1, 2)
    seen = []
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        seen.append((store.path.exists(), store.previous.exists()))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    store.save(snapshot_of(3))
    assert seen == [(True, True), (True, True)]


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_options: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = file_with(tmp_path, 1, 2)
    assert torch.load(store.path)["EPOCHS_RUN"] == 2
    assert torch.load(store.previous)["EPOCHS_RUN"] == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_without_fsync_gets_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fsync(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if number == errno.EIO:
        with pytest.raises(TrainError, match="Input/output error"):
            file_with(tmp_path, 1)
    else:
        assert torch.load(file_with(tmp_path, 1).path)["EPOCHS_RUN"] == 1


def test_full_disk_keeps_the_old_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = file_with(tmp_path, 1)

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainError, match="No space left on device") as caught:
        store.save(snapshot_of(2))
    assert caught.value.exit_code == 1
    assert [p.name for p in tmp_path.iterdir()] == ["snapshot.pt"]
    assert torch.load(store.path)["EPOCHS_RUN"] == 1


def test_prepare_cleans_up_after_a_killed_run_only(tmp_path: Path) -> None:
    store, host = file_with(tmp_path, 1), platform.node()
    with subprocess.Popen(["true"]) as child:
        child.wait()
        dead = child.pid
    left = [f"{host}.{dead}", f"{host}.{dead}.link", str(dead), f"{host}.{os.getpid()}", "far.1"]
    alive = [f"{host}.{os.getppid()}", "far.2"]
    for end in left + alive:
        (tmp_path / f".snapshot.pt.tmp.{end}").write_bytes(b"half")
    os.utime(tmp_path / ".snapshot.pt.tmp.far.1", (1e9, 1e9))
    (tmp_path / f".other.pt.tmp.{host}.{dead}").write_bytes(b"another file's")
    store.prepare()
    kept = [f".other.pt.tmp.{host}.{dead}", *(f".snapshot.pt.tmp.{end}" for end in alive)]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "snapshot.pt"])


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("absent/snapshot.pt", "does not exist"),
        ("file/snapshot.pt", "does not exist"),
        (".", "is a folder"),
        ("/dev/null", "not a regular file"),
        ("/proc/snapshot.pt", "cannot write snapshot /proc/snapshot.pt: "),
        ("a" * 300, "File name too long"),
        (f"{'a' * 300}/snapshot.pt", "cannot write snapshot"),
    ],
)
def test_unwritable_paths_are_known_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match=word) as caught:
        SnapshotFile(path).prepare()
    assert caught.value.exit_code == 1


def test_links_in_a_circle_are_no_traceback(tmp_path: Path) -> None:
    for one, other in ("ab", "ba"):
        (tmp_path / one).symlink_to(other)
    SnapshotFile(str(tmp_path / "a"))
    with pytest.raises(TrainError, match="cannot write snapshot"):
        SnapshotFile(str(tmp_path / "a/snapshot.pt")).prepare()


def test_a_link_leads_to_the_snapshot(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "snapshot.pt").symlink_to(scratch / "snapshot.pt")
    file_with(tmp_path, 1, 2)
    assert (tmp_path / "snapshot.pt").is_symlink()
    assert sorted(p.name for p in scratch.iterdir()) == ["snapshot.pt", "snapshot.pt.prev"]
