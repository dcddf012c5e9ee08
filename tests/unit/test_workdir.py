"""The folder in which a container starts, on an existing image that has it, or a part of the way to it."""

from __future__ import annotations

import pytest

from envbuild.build.image_layers import missing_folder
from envbuild.image.entry import DIR, FILE, SYMLINK
from envbuild.image.tar import Member


def member(name: str, kind: str = DIR, mode: int = 0o755, owner: int = 0, link: str = "") -> Member:
    return Member(name, kind, mode, owner, owner, 0, 0, link, (0, 0))


BASE = [
    [
        member("home", DIR, 0o755, 0),
        member("home/user/", DIR, 0o700, 1000),
        member("srv/data", DIR, 0o1777, 0),
        member("gone", DIR, 0o755, 0),
        member("data", SYMLINK, 0o777, 0, link="/srv/data"),
        member("loop", SYMLINK, 0o777, 0, link="loop"),
        member("file", FILE, 0o644, 0),
    ],
    [member(".wh.gone", FILE)],
]


@pytest.mark.parametrize(
    ("path", "folders", "parents"),
    [
        ("/", [], {}),
        ("/home/user", [], {}),
        ("/data/", [], {}),
        ("/srv", [], {}),
        ("/workspace", ["/workspace"], {}),
        ("/gone", ["/gone"], {}),
        ("/file", ["/file"], {}),
        ("/loop/a", ["/loop/a"], {}),
        ("/home/user/a/b", ["/home/user/a/b"], {"home": (0o755, 0), "home/user": (0o700, 1000)}),
        ("/data/a", ["/srv/data/a"], {"srv/data": (0o1777, 0)}),
    ],
)
def test_a_folder_of_the_base_stays_as_it_is(
    path: str, folders: list[str], parents: dict[str, tuple[int, int]]
) -> None:
    added, around = missing_folder(path, BASE, None, 7)
    assert added == folders
    assert {one.path: (one.mode, one.uid) for one in around} == parents
