"""Hardlinks only where they are safe."""

from pathlib import Path

import pytest

from envbuild.base import host
from envbuild.base.host import mount_of, parse_mounts

MOUNTS = """22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:40 / {home} rw,relatime shared:1 - {kind} server:/export rw
31 22 0:41 / /some\\040where rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("ext4", "hardlink"), ("xfs", "hardlink"), ("lustre", "hardlink"), ("nfs4", "copy"), ("btrfs", "clone")],
)
def test_the_mode_follows_the_file_system(
    tmp_path: Path, kind: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = list(parse_mounts(MOUNTS.format(home=tmp_path, kind=kind)))
    monkeypatch.setattr(host, "read_mounts", lambda: table)
    assert host.link_mode(tmp_path, tmp_path) == mode


def test_across_devices_files_are_copied(tmp_path: Path) -> None:
    assert host.link_mode(Path("/proc"), tmp_path) == "copy"


def test_a_later_mount_covers_an_earlier_one_and_spaces_are_unescaped() -> None:
    mounts = list(parse_mounts(MOUNTS.format(home="/some where", kind="nfs")))
    kinds = [found.kind for path in ("/some where/x", "/some whereelse") if (found := mount_of(Path(path), mounts))]
    assert kinds == ["tmpfs", "ext4"]
