"""Image files in pieces: what was split is composed again, and no manifest makes a pull read beyond its blobs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import BuildError, UsageError
from envbuild.base.packages import digest_of
from envbuild.build.share import pull_file
from envbuild.cache.http import Transport
from envbuild.image.layout import Blobs
from envbuild.image.model import Descriptor
from envbuild.image.registry import Registry, open_registry
from envbuild.run_environment import load_environment
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
    "a blob that is written out again and again": lambda c: c.update(pieces=[[BLOB.digest, 0, 100]] * 150, size=15_000),
    "a part of a blob that is": lambda c: c.update(pieces=[[OTHER.digest, 0, 6], [OTHER.digest, 4, 6]], size=12),
    "too large a size": lambda c: c.update(size=1 << 70),
    "a digest of another form": lambda c: c.update(digest="c" * 64),
    "a name that is no text": lambda c: c.update(name=["x.sqsh"]),
    "no pieces": lambda c: c.pop("pieces"),
    "pieces of two parts": lambda c: c.update(pieces=[[BLOB.digest, 30]]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_is_refused(name: str) -> None:
    found = json.loads(json.dumps(asdict(FILE)))
    assert read_pieces(json.dumps(found).encode(), [BLOB, OTHER], "here") == FILE
    WRONG[name](found)
    with pytest.raises(BuildError, match="invalid configuration"):
        read_pieces(json.dumps(found).encode(), [BLOB, OTHER], "here")


@given(
    st.binary(max_size=100)
    | st.recursive(
        st.none() | st.integers() | st.just(ARTIFACT) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["artifactType", "layers", "config", "digest", "size", "pieces"]), inner, max_size=5
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
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
        pull_file(json.dumps(asdict(FILE)).encode(), [BLOB, OTHER], registry, place, environment)
    assert place.is_dir() if content is None else place.read_bytes() == content


def pulled(tmp_path: Path, file: FilePieces, blobs: list[Descriptor], limits: str = "") -> Any:
    (tmp_path / "site.toml").write_text(f'store = "store"\n[limits]\n{limits}\n')
    environment = load_environment({"ENVBUILD_SITE": str(tmp_path / "site.toml"), "PATH": os.environ["PATH"]})
    registry = cast(Registry, SimpleNamespace(reference="registry/x:1"))  # nothing is asked of it
    return pull_file(json.dumps(asdict(file)).encode(), blobs, registry, tmp_path / "x.sqsh", environment)


def test_a_pull_keeps_to_the_limits_before_the_first_byte(tmp_path: Path) -> None:
    large = Descriptor(PIECE, BLOB.digest, 1 << 20)
    file = replace(FILE, size=1 << 20, pieces=((BLOB.digest, 0, 1 << 20),))
    with pytest.raises(BuildError, match="registry/x:1: more than 1048575 bytes of files") as failed:
        pulled(tmp_path, file, [large], "unpacked_bytes = 1048575")
    assert "[limits]" in str(failed.value.hint)


def test_what_does_not_fit_on_the_disk_is_not_fetched(tmp_path: Path) -> None:
    huge = 1 << 70
    registry = open_registry("127.0.0.1:1/x:1", Transport(retries=0), {})  # nothing is asked of it
    for fetch in (
        lambda blob, blobs: registry.fetch_blob(blob, blobs, lambda _: None),
        lambda blob, blobs: registry.fetch_blobs([blob, OTHER], blobs, lambda _: None),
    ):
        with pytest.raises(BuildError, match="not enough disk space"):
            fetch(Descriptor(PIECE, BLOB.digest, huge), Blobs(tmp_path / "blobs"))


def test_what_is_there_needs_no_space(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    there = Descriptor(PIECE, blobs.add(b"x" * 100), 100)
    assert (blobs.lacking(there), blobs.lacking(BLOB)) == (0, 100)
    blobs.partial(BLOB.digest).write_bytes(b"x" * 60)  # an earlier run
    assert blobs.lacking(BLOB) == 40
