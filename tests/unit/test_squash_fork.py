"""Conversions whose layers two processes make: `process.forked`, and images that are the same as those of one."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from lab import artifacts

from envbuild.base import process
from envbuild.cli.commands import cli
from envbuild.image.layout import Blobs


def working(folder: Path) -> Callable[[], None]:
    """Return work that tells its process's number, lasts a minute, and tells when it is ended."""

    def work() -> None:
        print("never seen")
        try:
            (folder / "new").write_text(str(os.getpid()))
            (folder / "new").rename(folder / "pid")
            time.sleep(60)
        finally:
            (folder / "ended").touch()

    return work


def wait_for(path: Path) -> int:
    while not path.exists():
        time.sleep(0.01)
    return int(path.read_text())


def is_gone(child: int) -> bool:
    try:
        os.kill(child, 0)  # a zombie would still be there
    except ProcessLookupError:
        return True
    return False


def test_a_fork_works_beside_its_block_in_silence_and_ends_with_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with process.forked(working(tmp_path)):
        child = wait_for(tmp_path / "pid")
    assert child != os.getpid() and is_gone(child) and (tmp_path / "ended").exists()
    assert capfd.readouterr() == ("", "")


def test_an_error_in_a_fork_or_in_its_block_leaves_nothing_running(tmp_path: Path) -> None:
    with process.forked(lambda: 1 / 0):
        pass
    with pytest.raises(KeyError), process.forked(working(tmp_path)):
        child = wait_for(tmp_path / "pid")
        raise KeyError
    assert is_gone(child)


def test_without_room_for_one_more_process_the_block_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", full)
    with process.forked(lambda: pytest.fail("it ran in this process")):
        pass


def test_an_image_of_two_processes_is_that_of_one_and_all_its_layers_are_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = Blobs(tmp_path / "blobs")
    layers = [
        artifacts.layer(blobs, {f"opt/{number}/{name}": bytes(f"{name} " * 90 * number, "ascii") for name in range(40)})
        for number in range(1, 8)
    ]
    _, config = artifacts.image(blobs, layers)
    artifacts.docker_archive(tmp_path / "i.tar", blobs, config, layers, "x:1")
    forked: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: forked.append(fork()) or forked[-1])
    digests = set()
    for number, (cpus, reused) in enumerate([(1, 0), (2, 0), (2, 7)]):
        out = tmp_path / f"{number}.sqsh"
        env = {"ENVBUILD_STORE": str(tmp_path / f"store{cpus}"), "SLURM_CPUS_PER_TASK": str(cpus)}
        line = ["enroot", "--from", f"docker-archive:{tmp_path}/i.tar", "--out", str(out), "--no-verify"]
        done = CliRunner().invoke(cli, line, env=env, catch_exceptions=False)
        assert f"{reused} of 7 layers" in done.output
        digests.add(hashlib.sha256(out.read_bytes()).hexdigest())
    # Only the second one had something to share.
    assert len(digests) == 1 and len(forked) == (os.cpu_count() != 1) and all(map(is_gone, forked))
