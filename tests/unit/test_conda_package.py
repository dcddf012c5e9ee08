"""The metadata of conda packages: old and new forms, and packages that are refused."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.conda_trees import Item, package

from envbuild.base.errors import BuildError
from envbuild.layers.conda_package import read_info

FORMS = [".conda", ".tar.bz2"]


@pytest.mark.parametrize("info_first", [True, False])
def test_metadata_is_found_wherever_it_is_in_the_archive(tmp_path: Path, info_first: bool) -> None:
    made = package(tmp_path, [Item("bin/old"), Item("lib/link")], suffix=".tar.bz2", info_first=info_first)
    assert [one.path for one in read_info(made).paths] == ["bin/old", "lib/link"]


FILE = Item("lib/a", b"content")


def changed(**more: Any) -> list[dict[str, Any]]:
    return [{**FILE.row(), **more}]


@pytest.mark.parametrize("suffix", FORMS)
@pytest.mark.parametrize(
    "items, more, said",
    [
        ([FILE], {"rows": changed(_path="../a")}, r"'../a' is not a path inside"),
        ([FILE], {"rows": changed(_path="/etc/passwd")}, r"'/etc/passwd' is not a path inside"),
        ([FILE], {"rows": changed(_path=7)}, r"7 is not a path inside"),
        ([FILE], {"rows": changed(prefix_placeholder="/p", file_mode="x")}, r"unknown file_mode"),
        ([FILE], {"info": {"paths.json": b"{"}}, r"info/paths.json: not JSON"),
        ([FILE], {"info": {"paths.json": b"[]"}}, r"info/paths.json: not a JSON object"),
        ([FILE], {"info": {"paths.json": b'{"paths": 1}'}}, r"has no list of paths"),
        ([FILE], {"info": {"paths.json": None}}, r"it has no info/paths.json"),
        ([FILE], {"info": {"index.json": None}}, r"it has no info/index.json"),
        ([FILE], {"noarch": "python", "entry_points": ["../x = a:b"]}, r"entry point '../x = a:b'"),
        ([FILE], {"noarch": "python", "entry_points": ["x = a;b:c"]}, r"entry point 'x = a;b:c'"),
    ],
)
def test_a_package_that_is_not_what_it_says_is_refused_by_name(
    tmp_path: Path, items: list[Item], more: dict[str, Any], said: str, suffix: str
) -> None:
    made = package(tmp_path, items, suffix=suffix, **more)
    with pytest.raises(BuildError, match=said) as caught:
        read_info(made)
    assert caught.value.message.startswith(made.name)


@pytest.mark.parametrize("suffix", FORMS)
@given(at=st.floats(0, 1, exclude_max=True), flip=st.integers(0, 255))
def test_a_damaged_package_is_refused_or_read(suffix: str, at: float, flip: int) -> None:
    """Cut short (0) or with one byte changed: never a traceback."""
    with tempfile.TemporaryDirectory() as folder:
        made = package(Path(folder), [FILE, Item("lib/b", bytes(range(256)) * 9)], suffix=suffix)
        data = bytearray(made.read_bytes())
        place = int(at * len(data))
        if flip:
            data[place] ^= flip
        else:
            del data[place:]
        made.write_bytes(data)
        try:
            read_info(made)
        except BuildError as error:
            assert error.message.startswith(made.name)


@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"not a package at all", b"PK\5\6" + bytes(18)])
@pytest.mark.parametrize("suffix", FORMS)
def test_what_is_no_package_is_refused(tmp_path: Path, suffix: str, data: bytes) -> None:
    path = tmp_path / f"lab-1.0-0{suffix}"
    path.write_bytes(data)
    with pytest.raises(BuildError, match=r"lab-1\.0-0"):
        read_info(path)
