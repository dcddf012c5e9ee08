"""Locks between processes: two open files of one process exclude each other as those of two processes do."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from envbuild.base.atomic import file_lock, folder_lock
from envbuild.base.errors import HostError
from envbuild.run_environment import load_environment


def test_a_second_holder_is_told_that_it_waits_and_comes_after_the_first(tmp_path: Path) -> None:
    path, order, waits = tmp_path / "lock", [], threading.Event()

    def second() -> None:
        with file_lock(path, waits.set):
            order.append("second")

    thread = threading.Thread(target=second)
    with file_lock(path, remove=True) as held:
        assert held
        thread.start()
        assert waits.wait(10)
        order.append("first")
    thread.join(10)
    # The first removed the file while it held it: the second took a new one.
    assert order == ["first", "second"] and path.exists()


def test_a_pause_may_give_up(tmp_path: Path) -> None:
    def stop(seconds: float) -> None:
        assert 0 < seconds < 1
        raise KeyboardInterrupt

    with file_lock(tmp_path / "lock"), pytest.raises(KeyboardInterrupt):  # noqa: SIM117
        with file_lock(tmp_path / "lock", pause=stop):
            pass


def test_a_folder_that_is_held_is_refused_and_no_file_is_left(tmp_path: Path) -> None:
    with folder_lock(tmp_path), pytest.raises(BlockingIOError):  # noqa: SIM117
        with folder_lock(tmp_path, wait=False):
            pass
    with folder_lock(tmp_path, wait=False) as held:
        assert held and not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_without_flock_the_work_goes_on_but_for_uv_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    environment = load_environment({"HOME": str(tmp_path), "ENVBUILD_STORE": str(tmp_path / "store")})
    assert environment.uv_environment()["UV_CACHE_DIR"] == str(tmp_path / "store/uv")
    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(HostError, match=f"cannot lock {tmp_path}/store/uv with flock: {os.strerror(number)}") as told:
        environment.default_index()  # "uv does not tell its default index"
    assert told.value.hint and "ENVBUILD_STORE" in told.value.hint
    with file_lock(tmp_path / "lock") as held, folder_lock(tmp_path, wait=False) as both:
        assert not held and not both


def test_a_link_that_another_user_put_there_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with file_lock(tmp_path / "lock"):
        assert not (tmp_path / "elsewhere").exists() and not (tmp_path / "lock").is_symlink()
