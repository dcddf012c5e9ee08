"""Image files in pieces: what was split is composed again, and no manifest makes a pull read beyond its blobs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.environment import load_environment
from envbuild.errors import BuildError, UsageError
from envbuild.image.model import Descriptor, digest_of
from envbuild.image.registry import Registry
from envbuild.kinds.share import pull_file
from envbuild.store.pieces import (
    ARTIFACT,
    CONFIG,
    PIECE,
    FilePieces,
    compose,
    read_manifest,
    read_pieces,
    render,
    split,
)

BLOB = Descriptor(PIECE, "sha256:" + "a" * 64, 100)
OTHER = Descriptor(PIECE, "sha256:" + "b" * 64, 10)
FILE = FilePieces(
    "enroot", "x.sqsh", "cpu-x86_64", "sha256:" + "c" * 64, 30, (("sha256:" + "a" * 64, 80, 20), (OTHER.digest, 0, 10))
)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=8), st.integers(0, 50), st.integers(0, 3))
def test_what_is_split_is_composed_again(
    tmp_path_factory: pytest.TempPathFactory, gaps: list[tuple[int, int]], end: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    segment = hashlib.shake_256(bytes([seed])).digest(400)
    (folder / "segment").write_bytes(segment)
    data, spans = b"", []
    for number, (gap, count) in enumerate(gaps):
        data += bytes(gap)
        start = number * 40
        spans.append((len(data), "name", start, count))
        data += segment[start : start + count]
    data += b"e" * end
    (folder / "file").write_bytes(data)
    digests = {"name": digest_of(segment)}
    pieces = split(folder / "file", spans, digests, folder / "rest", len(data))
    rest = digest_of((folder / "rest").read_bytes())
    whole = FilePieces("enroot", "x", "", "", len(data), tuple((one or rest, start, n) for one, start, n in pieces))
    with (folder / "again").open("x+b") as out:
        compose(whole, {rest: folder / "rest", digest_of(segment): folder / "segment"}, out, lambda _: None)
    assert (folder / "again").read_bytes() == data
    assert (folder / "rest").stat().st_size == len(data) - sum(count for _, count in gaps)


def test_a_blob_that_is_cut_short_is_said(tmp_path: Path) -> None:
    for name, size in (("a", 90), ("b", 10)):
        (tmp_path / name).write_bytes(bytes(size))
    with (tmp_path / "out").open("x+b") as out, pytest.raises(BuildError, match="cut short"):
        compose(FILE, {BLOB.digest: tmp_path / "a", OTHER.digest: tmp_path / "b"}, out, lambda _: None)


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "a piece beyond its blob": lambda c: c["pieces"].__setitem__(0, [BLOB.digest, 81, 20]),
    "a piece before its blob": lambda c: c["pieces"].__setitem__(0, [BLOB.digest, -1, 20]),
    "a negative count": lambda c: c["pieces"].__setitem__(0, [BLOB.digest, 50, -20]),
    "a blob that the manifest lacks": lambda c: c["pieces"].__setitem__(0, ["sha256:" + "d" * 64, 0, 20]),
    "another size": lambda c: c.update(size=31),
    "too large a size": lambda c: c.update(size=1 << 70),
    "a digest of another form": lambda c: c.update(digest="c" * 64),
    "a name that is no text": lambda c: c.update(name=["x.sqsh"]),
    "no pieces": lambda c: c.pop("pieces"),
    "pieces of two parts": lambda c: c.update(pieces=[[BLOB.digest, 30]]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_is_refused(name: str) -> None:
    found = json.loads(json.dumps(FILE.as_json()))
    assert read_pieces(json.dumps(found).encode(), [BLOB, OTHER], "here") == FILE
    WRONG[name](found)
    with pytest.raises(BuildError, match="cannot be understood"):
        read_pieces(json.dumps(found).encode(), [BLOB, OTHER], "here")


@given(st.binary(max_size=100) | st.recursive(
    st.none() | st.integers() | st.just(ARTIFACT) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["artifactType", "layers", "config", "digest", "size", "pieces"]), inner, max_size=5
    ),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_answer_is_understood_or_refused(raw: bytes) -> None:
    for read in (lambda: read_manifest(raw, "here"), lambda: read_pieces(raw, [BLOB], "here")):
        with pytest.raises(BuildError):
            read()


def test_a_manifest_says_what_it_is() -> None:
    config = Descriptor(CONFIG, "sha256:" + "e" * 64, 3)
    assert read_manifest(render(config, [BLOB, OTHER]), "here") == (config, [BLOB, OTHER])
    image = json.loads(render(config, []))
    image.pop("artifactType")
    with pytest.raises(BuildError, match="no artifact") as failed:
        read_manifest(json.dumps(image).encode(), "registry/x:1")
    assert "enroot --from docker://registry/x:1" in str(failed.value.hint)


@pytest.mark.parametrize(("content", "expected"), [(b"precious", "is left as it is"), (None, "is a folder")])
def test_a_pull_replaces_no_file_of_the_user(tmp_path: Path, content: bytes | None, expected: str) -> None:
    place = tmp_path / "mine.sqsh"
    place.mkdir() if content is None else place.write_bytes(content)
    environment = load_environment({"ENVBUILD_STORE": str(tmp_path / "store"), "PATH": os.environ["PATH"]})
    registry = cast(Registry, SimpleNamespace(reference="registry/x:1"))  # nothing is asked of it
    with pytest.raises(UsageError, match=expected):
        pull_file(json.dumps(FILE.as_json()).encode(), [BLOB, OTHER], registry, place, environment)
    assert place.is_dir() if content is None else place.read_bytes() == content
