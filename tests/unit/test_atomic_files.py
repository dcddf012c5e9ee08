"""Files that are replaced in one step."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from envbuild.atomic import replacing, write_atomically


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
