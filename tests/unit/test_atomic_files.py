"""Files that are replaced in one step."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest

from envbuild.base.atomic import remove, remove_tree, replacing, write_atomically, write_beside
from envbuild.base.system_errors import file_error


def test_a_file_is_replaced_when_the_block_ends_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with replacing(path, 0o640) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_folders_above_are_made(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a/b/file", "é")
    assert (tmp_path / "a/b/file").read_bytes() == b"\xc3\xa9"


def test_a_file_that_a_killed_run_left_beside_goes_with_the_next_write(tmp_path: Path) -> None:
    path, other = tmp_path / "lock[1].txt", tmp_path / ".lock[1].txt2.envbuild-x"
    other.write_text("of another file")
    half = f"""if True:
        import os, signal
        from pathlib import Path
        from envbuild.base.atomic import write_beside
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write_beside(Path({str(path)!r}), "half")
    """
    assert subprocess.run([sys.executable, "-c", half]).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    with replacing(path, prefix=f".{path.name}.envbuild-") as under_way:
        write_beside(path, "new")
        assert under_way.exists()
    assert sorted(tmp_path.iterdir()) == [other, path]


def test_an_error_of_write_names_the_file(tmp_path: Path) -> None:
    """write(2) knows no name."""
    with pytest.raises(OSError, match=r"file") as told, replacing(tmp_path / "file"), open("/dev/full", "w") as full:
        full.write("x")
    assert file_error(told.value) == "cannot write /dev/full: No space left on device"
    assert told.value.__notes__ == [f"while writing {tmp_path / 'file'}"] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_fsync_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fsync(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        write_atomically(tmp_path / "file", "more")
    assert (tmp_path / "file").read_text() == "text"


def test_a_ctrl_c_at_any_moment_leaves_no_new_file(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write() -> None:
        with replacing(path) as temporary:
            temporary.write_text("new")

    ended, moment = False, 0
    while not ended:
        moment += 1
        left = moment

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename.endswith(("atomic.py", "tempfile.py")):
                frame.f_trace_opcodes = True
                left -= event == "opcode"
                if left == 0:
                    left = -1
                    raise KeyboardInterrupt
            return trace

        path.unlink(missing_ok=True)
        sys.settrace(trace)
        try:
            write()
            ended = left > 0
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
    gc.collect()  # what the exceptions held
    assert [one.name for one in tmp_path.iterdir()] == ["file"] and moment > 50


def test_a_tree_of_any_depth_is_removed(tmp_path: Path) -> None:
    """An image, or a program in it, can make folders that are deeper than Python's functions may call themselves."""
    top = tmp_path / "tree"
    top.mkdir()
    above = os.open(top, os.O_RDONLY)
    for number in range(1200):
        os.mkdir("a", dir_fd=above)
        if number % 100 == 0:
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=above))
            os.symlink("/etc", "link", dir_fd=above)
        inner = os.open("a", os.O_RDONLY, dir_fd=above)
        os.chmod(f"/proc/self/fd/{above}", 0o500)
        os.close(above)
        above = inner
    os.close(above)
    remove(top)
    assert not list(tmp_path.iterdir())


def test_a_link_in_the_place_of_a_folder_gets_no_rights(tmp_path: Path) -> None:
    """Another user may exchange them between the look at a folder and the change of its mode."""
    (tmp_path / "theirs").mkdir(mode=0o500)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a").symlink_to(tmp_path / "theirs")
    (tmp_path / "tree/b").mkdir(mode=0o500)
    seen = lambda top, *_: [(str(top), ["a", "b"], [], os.open(top, os.O_RDONLY))]  # noqa: E731 - a was a folder then
    with patch("os.fwalk", seen), patch("os.walk", seen), patch("os.path.islink", lambda _: False):
        remove_tree(tmp_path / "tree")
    assert stat.S_IMODE((tmp_path / "theirs").stat().st_mode) == 0o500 and not (tmp_path / "tree").exists()
