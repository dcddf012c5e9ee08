"""A file of the store that appears elsewhere: linked, or the same without links."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from envbuild.base.files import link_or_copy


@pytest.mark.parametrize("links", [True, False], ids=["one file system", "another file system"])
def test_content_and_mode_are_the_source_s(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not links:
        monkeypatch.setattr(os, "link", refused)
    source, place = tmp_path / "patchelf", tmp_path / "context/sources/patchelf"
    source.write_bytes(b"program")
    source.chmod(0o755)
    link_or_copy(source, place)
    assert place.read_bytes() == b"program" and os.access(place, os.X_OK)
    assert place.samefile(source) == links


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    link_or_copy(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_text() == "two"
