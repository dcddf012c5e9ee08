"""Image archives: each form that tools write is read, from a stream that cannot seek; ours are deterministic."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of
from envbuild.image.archive import archive_at, archive_pieces, read_archive, read_stream
from envbuild.image.layer import kind_of
from envbuild.image.layout import Blobs, Pulled
from envbuild.image.model import (
    COMPRESSION,
    OCI_LAYER,
    OCI_LAYER_GZIP,
    OCI_LAYER_ZSTD,
    OCI_LAYERS,
    Descriptor,
    canonical,
)

LAYERS = [b"lower " * 3000, b"upper " * 200]
CONFIG = canonical(
    {"architecture": "amd64", "rootfs": {"type": "layers", "diff_ids": [digest_of(data) for data in LAYERS]}}
)
ID = digest_of(CONFIG).removeprefix("sha256:")
Files = dict[str, bytes | str]  # a text is where a symbolic link points


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def pack(files: Files) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            if isinstance(data, str):
                info.type, info.linkname = tarfile.SYMTYPE, data
                archive.addfile(info)
            else:
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def listing(*layers: str, config: str = f"{ID}.json", tags: list[str] | None = None) -> bytes:
    tags = ["lab/image:v1"] if tags is None else tags
    return json.dumps([{"Config": config, "RepoTags": tags, "Layers": list(layers)}]).encode()


def blob(data: bytes) -> str:
    return "blobs/sha256/" + digest_of(data).removeprefix("sha256:")


OLD: Files = {
    "aa/VERSION": b"1.0",
    "aa/json": b"{}",
    "aa/layer.tar": LAYERS[0],
    "bb/layer.tar": LAYERS[1],
    f"{ID}.json": CONFIG,
    "manifest.json": listing("aa/layer.tar", "bb/layer.tar"),
    "repositories": b"{}",
}
FORMS: dict[str, Files] = {
    "docker before 25": OLD,
    "manifest first": {"manifest.json": OLD["manifest.json"], **OLD},
    "links for layers": {
        **OLD,
        "aa/layer.tar": "../cc/layer.tar",
        "cc/layer.tar": LAYERS[0],
        "bb/layer.tar": "../dd.tar",
        "dd.tar": LAYERS[1],
    },
    "names with ./": {f"./{name}": data for name, data in OLD.items()},
    "docker since 25": {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": b"{}",
        blob(CONFIG): CONFIG,
        **{blob(data): data for data in LAYERS},
        "manifest.json": listing(*map(blob, LAYERS), config=blob(CONFIG)),
    },
}


def read(data: bytes, folder: Path, tag: str | None = None, arch: str | None = None) -> Pulled:
    class Dribble(io.RawIOBase):
        """A stream as a socket gives it: short reads, no seeking."""

        def read(self, size: int = -1, /) -> bytes:
            return whole.read(min(size, 700) if size >= 0 else 700)

    whole = io.BytesIO(data)
    return read_stream(cast(BinaryIO, Dribble()), "lab", Blobs(folder), tag, arch)


def contents(pulled: Pulled) -> list[bytes]:
    return [pulled.blobs.read(layer.digest) for layer in pulled.manifest.layers]


@pytest.mark.parametrize("packed", [bytes, gzip.compress, zstd])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_one_and_the_same_image(form: str, packed: Callable[[bytes], bytes], tmp_path: Path) -> None:
    pulled = read(packed(pack(FORMS[form])), tmp_path, arch="x86_64")
    assert contents(pulled) == LAYERS
    assert pulled.blobs.read(pulled.manifest.config.digest) == CONFIG
    assert pulled.blobs.read(pulled.manifest.digest) == pulled.manifest.raw
    assert pulled.manifest.digest == read(pack(OLD), tmp_path / "other").manifest.digest
    assert [layer.media_type for layer in pulled.manifest.layers] == [OCI_LAYER, OCI_LAYER]


@pytest.mark.parametrize("pack_layer", [gzip.compress, zstd])
def test_compressed_layers_stay_as_they_are(pack_layer: Callable[[bytes], bytes], tmp_path: Path) -> None:
    kind = OCI_LAYER_GZIP if pack_layer is gzip.compress else OCI_LAYER_ZSTD
    stored = pack_layer(LAYERS[1])
    pulled = read(pack({**OLD, "bb/layer.tar": stored}), tmp_path)
    assert contents(pulled) == [LAYERS[0], stored]
    assert [layer.media_type for layer in pulled.manifest.layers] == [OCI_LAYER, kind]


def test_the_image_is_found_by_its_tag(tmp_path: Path) -> None:
    config = canonical({"rootfs": {"diff_ids": [digest_of(LAYERS[1])]}})
    both = [
        *json.loads(listing("aa/layer.tar", "bb/layer.tar", tags=["lab/image:v1", "other:v2"])),
        *json.loads(listing("bb/layer.tar", config="c.json", tags=["lab/image:v3"])),
    ]
    data = pack({**OLD, "c.json": config, "manifest.json": json.dumps(both).encode()})
    for tag in ("v1", "lab/image:v1", "docker.io/library/other:v2"):
        assert contents(read(data, tmp_path, tag)) == LAYERS
    assert contents(read(data, tmp_path, "v3", "aarch64")) == LAYERS[1:]
    with pytest.raises(BuildError, match="no image with the tag 'v4'; it has lab/image:v1, lab"):
        read(data, tmp_path, "v4")
    with pytest.raises(BuildError, match="2 images, but exactly one is needed"):
        read(data, tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bb/layer.tar": b"other"}, "layer sha256:.* is not sha256:.*, which the configuration"),
        ({"bb/layer.tar": gzip.compress(b"other")}, "is not sha256:.*, which the configuration"),
        ({"bb/layer.tar": gzip.compress(LAYERS[1])[:-3]}, "the gzip data is cut short"),
        ({"bb/layer.tar": "bb/layer.tar"}, "'bb/layer.tar' is listed but not in the archive"),
        ({"manifest.json": listing("aa/layer.tar")}, "lists 1 layers, the configuration 2"),
        ({"manifest.json": listing("x.tar", "y.tar")}, "'x.tar' is listed but not in the archive"),
        ({"manifest.json": listing(config="../../c")}, "'../../c' is listed but not in"),
        ({"manifest.json": b"[]"}, "no images, but exactly one is needed"),
        ({"manifest.json": b"{"}, "not what `docker save` writes"),
        ({"manifest.json": b"[" * 9999}, "not what `docker save` writes"),
        ({"manifest.json": b'[{"Config": 1, "Layers": []}]'}, "not what `docker save` writes"),
        ({"manifest.json": b" " * (9 << 20)}, "9437184 bytes are too many for a JSON file"),
        ({f"{ID}.json": b"[]"}, "not a JSON object"),
        ({f"{ID}.json": b'{"rootfs": {}}'}, "without rootfs.diff_ids"),
        ({f"{ID}.json": CONFIG.replace(b"amd64", b"arm64")}, "damaged: its digest is"),
        (
            {"c.json": CONFIG.replace(b"amd64", b"arm64"), "manifest.json": listing(config="c.json")},
            "for arm64, not for amd64",
        ),
        ({blob(b"x"): b"y"}, "blobs/sha256/.*: damaged"),
    ],
)
def test_an_archive_that_is_wrong_is_refused(change: Files, says: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=says) as caught:
        read(pack({**OLD, **change}), tmp_path, arch="x86_64")
    assert caught.value.message.startswith("lab: ")
    assert not list(tmp_path.rglob(".*"))  # nothing half written stays


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "neither manifest.json nor index.json"),
        (pack({"etc/passwd": b"root"}), "neither manifest.json nor index.json"),
        (pack(OLD)[:3000], "the tar archive is cut short"),
        (gzip.compress(pack(OLD))[:-5], "the gzip data is cut short"),
        (b"PK\3\4" + bytes(1000), "not a tar archive"),
    ],
)
def test_what_is_no_archive_is_refused(data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(data)
    with pytest.raises(BuildError, match=says) as caught:
        read_archive(path, Blobs(tmp_path / "read"), None, "x86_64")
    assert str(path) in caught.value.message


@pytest.mark.parametrize("form", FORMS)
def test_an_archive_is_read_in_place(form: str, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(pack(FORMS[form]))
    image = archive_at(path, "x86_64")
    assert image is not None and image.image_id == f"sha256:{ID}"
    opened = [opens() for opens in image.layers]
    assert [stream.read(7) + stream.read() for stream in opened] == LAYERS
    for stream in opened:
        stream.close()
    with pytest.raises(BuildError, match="for amd64, not for arm64"):
        archive_at(path, "aarch64")


@pytest.mark.parametrize("data", [gzip.compress(pack(OLD)), pack({"index.json": b"{}"})])
def test_an_archive_that_cannot_be_read_in_place_is_left_to_the_other_reader(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(data)
    assert archive_at(path, "x86_64") is None


def test_an_archive_from_a_pipe_is_left_to_the_other_reader_whole() -> None:
    reader, writer = os.pipe()  # as of <(docker save IMAGE), and of /dev/stdin
    try:
        os.write(writer, b"some")
        assert archive_at(Path(f"/dev/fd/{reader}"), "x86_64") is None
        assert os.read(reader, 10) == b"some"
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"manifest.json": listing("aa/layer.tar")}, "lists 1 layers, the configuration 2"),
        ({"manifest.json": listing("x.tar", "y.tar")}, "'x.tar' is listed but not in the archive"),
        ({"manifest.json": b" " * (9 << 20)}, "9437184 bytes are too many for a JSON file"),
        ({f"{ID}.json": CONFIG.replace(b"amd64", b"arm64")}, "damaged: its digest is"),
    ],
)
def test_a_wrong_archive_is_refused_in_place(change: Files, says: str, tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    path.write_bytes(pack({**OLD, **change}))
    with pytest.raises(BuildError, match=says) as caught:
        archive_at(path, "x86_64")
    assert caught.value.message.startswith(str(path))


def test_an_archive_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"none\.tar: No such file"):
        read_archive(tmp_path / "none.tar", Blobs(tmp_path), None, None)


def store(blobs: Blobs, *packed: bytes) -> list[Descriptor]:
    return [Descriptor(OCI_LAYERS[kind_of(data)], blobs.add(data), len(data)) for data in packed]


def written(*arguments: Any, **more: Any) -> bytes:
    return b"".join(archive_pieces(*arguments, **more))


@pytest.mark.parametrize("pack_layer", [bytes, gzip.compress, zstd])
def test_what_we_write_is_read_back_and_does_not_depend_on_compression(
    pack_layer: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    blobs = Blobs(tmp_path / "blobs")
    layers = store(blobs, *map(pack_layer, LAYERS))
    data = written(CONFIG, layers, blobs, ["lab/image:v1"])
    assert data == written(CONFIG, store(blobs, *LAYERS), blobs, ["lab/image:v1"])
    assert contents(read(data, tmp_path / "read", "lab/image:v1", "x86_64")) == LAYERS
    as_stored = written(CONFIG, layers, blobs, [], stored=[COMPRESSION[layers[0].media_type]])
    assert contents(read(as_stored, tmp_path / "read")) == [pack_layer(item) for item in LAYERS]
    assert written(CONFIG, layers, blobs, ["lab/image:v1"], stored=["other"]) == data
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        infos = archive.getmembers()
    assert {(i.mtime, i.uid, i.gid, i.mode, i.uname) for i in infos} == {(0, 0, 0, 0o644, "")}
    assert len(data) % 512 == 0


def test_a_layer_that_comes_twice_is_written_once_and_one_left_out_is_named(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs")
    ids = [digest_of(data) for data in (LAYERS[0], LAYERS[1], LAYERS[0])]
    config = canonical({"rootfs": {"diff_ids": ids}})
    layers = store(blobs, LAYERS[0], LAYERS[1], LAYERS[0])
    data = written(config, layers, blobs, ["a:b"])
    assert contents(read(data, tmp_path / "read")) == [LAYERS[0], LAYERS[1], LAYERS[0]]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert len(archive.getnames()) == 4
    with tarfile.open(fileobj=io.BytesIO(written(config, layers, blobs, ["a:b"], known=2))) as archive:
        assert len(archive.getnames()) == 3
        listed = json.load(cast(BinaryIO, archive.extractfile("manifest.json")))
    assert listed[0]["Layers"] == [f"{i.removeprefix('sha256:')}.tar" for i in ids]


def test_layers_that_are_not_the_configuration_s_are_not_written(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    layers = store(blobs, *LAYERS)
    with pytest.raises(BuildError, match="2 layers whose configuration lists 1"):
        written(canonical({"rootfs": {"diff_ids": [layers[0].digest]}}), layers, blobs, [])
    with pytest.raises(BuildError, match="not the layer sha256:"):
        written(CONFIG, layers[::-1], blobs, [])
    short = [Descriptor(OCI_LAYER, item.digest, item.size - 1) for item in layers]
    with pytest.raises(BuildError, match="changed while it was read"):
        written(CONFIG, short, blobs, [], stored=["none"])
    blobs.path(layers[1].digest).unlink()
    with pytest.raises(BuildError, match="missing"):
        written(CONFIG, layers, blobs, [])


@given(st.integers(0, len(pack(OLD)) - 1), st.integers(1, 255))
def test_a_changed_byte_never_gives_another_image(tmp_path_factory: pytest.TempPathFactory, at: int, flip: int) -> None:
    data = bytearray(pack(OLD))
    data[at] ^= flip
    try:
        pulled = read(bytes(data), tmp_path_factory.mktemp("blobs"))
    except BuildError as error:
        assert error.message.startswith("lab: ")
    else:
        assert contents(pulled) == LAYERS
        assert pulled.manifest.config.digest == digest_of(CONFIG)
