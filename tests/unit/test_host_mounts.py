"""The mounts that the kernel tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from envbuild.base.host import mount_of, parse_mounts, read_mounts

TEXT = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda rw,errors=remount-ro
30 22 0:40 /export/\303\251 /home\040of\134all ro,nosuid - nfs4 server:/export rw,vers=4.2
damaged - line
31 22 0:41 / /home\040of\134all/x rw master:2 propagate_from:1 - tmpfs tmpfs rw
"""


def test_paths_are_unescaped_and_damaged_lines_left_out() -> None:
    mounts = list(parse_mounts(TEXT))
    assert [mount.kind for mount in mounts] == ["ext4", "nfs4", "tmpfs"]
    assert (mounts[1].at, mounts[1].top) == ("/home of\\all", "/export/é")
    assert mounts[1].options == {"ro", "nosuid"} and "vers=4.2" in mounts[1].own_options
    assert [mount.shared for mount in mounts] == [False, True, False]


@pytest.mark.parametrize(
    ("path", "kind"), [("/home of\\all/x/y", "tmpfs"), ("/home of\\all/xy", "nfs4"), ("/home", "ext4")]
)
def test_a_path_lies_on_the_nearest_mount_above_it(path: str, kind: str) -> None:
    mount = mount_of(Path(path), parse_mounts(TEXT))
    assert mount is not None and mount.kind == kind


def test_this_machine_has_a_root() -> None:
    assert "/" in {mount.at for mount in read_mounts()}
