"""Hardlinks only where they are safe."""

from pathlib import Path

import pytest

from envbuild.artifacts.links import file_system, link_mode

MOUNTS = """22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:40 / {home} rw,relatime shared:1 - {kind} server:/export rw
31 22 0:41 / /some\\040where rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("ext4", "hardlink"), ("xfs", "hardlink"), ("lustre", "hardlink"), ("nfs4", "copy"), ("btrfs", "clone")],
)
def test_the_mode_follows_the_file_system(tmp_path: Path, kind: str, mode: str) -> None:
    mounts = MOUNTS.format(home=tmp_path, kind=kind)
    assert file_system(tmp_path / "x", mounts) == kind
    assert link_mode(tmp_path, tmp_path, mounts) == mode


def test_across_devices_files_are_copied(tmp_path: Path) -> None:
    assert link_mode(Path("/proc"), tmp_path) == "copy"


def test_a_later_mount_covers_an_earlier_one_and_spaces_are_unescaped() -> None:
    mounts = MOUNTS.format(home="/some where", kind="nfs")
    assert file_system(Path("/some where/x"), mounts) == "tmpfs"
    assert file_system(Path("/some whereelse"), mounts) == "ext4"
