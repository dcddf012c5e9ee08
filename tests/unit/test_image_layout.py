"""OCI layouts: written, read back, and each way in which one can be wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of
from envbuild.image.layout import Blobs, fill_layout, read_layout, same_tag
from envbuild.image.model import DOCKER_INDEX, OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST, Descriptor, canonical


def image(blobs: Blobs, note: str, arch: str = "amd64", **manifest: Any) -> Descriptor:
    """An image of one layer, which is `note`, in `blobs`."""
    layer = Descriptor(OCI_LAYER, blobs.add(note.encode()), len(note))
    config = canonical({"architecture": arch, "rootfs": {"diff_ids": [layer.digest]}})
    return keep(
        blobs,
        OCI_MANIFEST,
        arch,
        config=Descriptor(OCI_CONFIG, blobs.add(config), len(config)).as_json(),
        layers=manifest.get("layers", [layer.as_json()]),
    )


def keep(blobs: Blobs, kind: str, arch: str, **data: Any) -> Descriptor:
    raw = canonical({"schemaVersion": 2, "mediaType": kind, **data})
    return Descriptor(kind, blobs.add(raw), len(raw), arch)


def index(blobs: Blobs, *images: Descriptor, kind: str = OCI_INDEX) -> Descriptor:
    return keep(blobs, kind, "", manifests=[item.as_json() for item in images])


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")


def layout(tmp_path: Path, blobs: Blobs, *images: tuple[Descriptor, str | None]) -> Path:
    folder = tmp_path / "layout"
    folder.mkdir()
    fill_layout(folder, blobs, images)
    return folder


def layer_of(folder: Path, tag: str | None, arch: str | None, blobs: Blobs) -> str:
    pulled = read_layout(folder, blobs, tag, arch)
    assert blobs.has(pulled.manifest.config) and blobs.read(pulled.manifest.digest)
    return blobs.read(pulled.manifest.layers[0].digest).decode()


def test_an_image_is_read_back_from_its_layout(tmp_path: Path, blobs: Blobs) -> None:
    one, two = image(blobs, "one"), image(blobs, "two")
    folder = layout(tmp_path, blobs, (one, "v1"), (two, "v2"), (one, "latest"))
    read = Blobs(tmp_path / "read")
    assert layer_of(folder, "v1", "x86_64", read) == "one"
    assert layer_of(folder, "v2", None, read) == "two"
    assert read_layout(folder, read, "latest", "x86_64").manifest.digest == one.digest
    # Linked where they were made, copied where they are read: a layout belongs to its user.
    name = one.digest.removeprefix("sha256:")
    assert (folder / "blobs" / "sha256" / name).samefile(blobs.path(one.digest))
    assert not read.path(one.digest).samefile(blobs.path(one.digest))


def test_a_layout_has_the_same_bytes_each_time_and_nothing_else(tmp_path: Path, blobs: Blobs) -> None:
    one = image(blobs, "one")
    blobs.add(b"not of this image")
    folder = layout(tmp_path, blobs, (one, "v1"))
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert len(files) == 5 and files[-2:] == ["index.json", "oci-layout"]
    assert json.loads((folder / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads((folder / "index.json").read_text())["manifests"]
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": "v1"}


def test_the_sole_image_needs_no_tag(tmp_path: Path, blobs: Blobs) -> None:
    one = image(blobs, "one")
    folder = layout(tmp_path, blobs, (one, None))
    assert layer_of(folder, None, "x86_64", blobs) == "one"


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", [OCI_INDEX, DOCKER_INDEX])
def test_the_image_of_the_architecture_is_read(nested: bool, kind: str, tmp_path: Path, blobs: Blobs) -> None:
    images = [image(blobs, arch, arch) for arch in ("amd64", "arm64")]
    listed = [(index(blobs, *images, kind=kind), "v1")] if nested else [(i, "v1") for i in images]
    folder = layout(tmp_path, blobs, *listed)
    for tag in ("v1", None):
        assert layer_of(folder, tag, "x86_64", blobs) == "amd64"
        assert layer_of(folder, tag, "aarch64", blobs) == "arm64"
    with pytest.raises(BuildError, match="images for 2 platforms, but one is needed"):
        read_layout(folder, blobs, "v1", None)


def refuse(folder: Path, tmp_path: Path, tag: str | None = "v1", arch: str = "x86_64") -> str:
    shutil.rmtree(tmp_path / "read", ignore_errors=True)
    with pytest.raises(BuildError) as caught:
        read_layout(folder, Blobs(tmp_path / "read"), tag, arch)
    assert not list((tmp_path / "read").rglob(".*"))  # nothing half written stays
    assert str(folder) in caught.value.message
    return caught.value.message


def test_a_tag_that_is_missing_or_unclear_is_told_with_those_there_are(tmp_path: Path, blobs: Blobs) -> None:
    folder = layout(tmp_path, blobs, (image(blobs, "one"), "v1"), (image(blobs, "two"), "v2"))
    (folder / "index.json").write_text((folder / "index.json").read_text().replace("amd64", ""))
    assert "no image with the tag 'v3'; it has v1, v2" in refuse(folder, tmp_path, "v3")
    assert "2 images, but exactly one is needed; it has v1, v2" in refuse(folder, tmp_path, None)
    (folder / "index.json").write_bytes(canonical({"schemaVersion": 2, "manifests": []}))
    assert "no images, but exactly one is needed" in refuse(folder, tmp_path, None)


def test_an_image_for_another_architecture_is_refused(tmp_path: Path, blobs: Blobs) -> None:
    """Also where the index does not say it and the configuration does."""
    folder = layout(tmp_path, blobs, (image(blobs, "one", "arm64"), "v1"))
    assert "is for arm64, not for amd64" in refuse(folder, tmp_path)


def damage(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def longer(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data + b"x")


@pytest.mark.parametrize(
    ("harm", "says"), [(damage, "damaged"), (longer, "damaged"), (os.unlink, "No such file or directory")]
)
def test_each_blob_is_checked(harm: Callable[[Path], None], says: str, tmp_path: Path, blobs: Blobs) -> None:
    folder = layout(tmp_path, blobs, (image(blobs, "one"), "v1"))
    for blob in sorted((folder / "blobs" / "sha256").iterdir()):
        whole = blob.read_bytes()
        harm(blob)
        message = refuse(folder, tmp_path)
        assert says in message and blob.name in message
        blob.unlink(missing_ok=True)
        blob.write_bytes(whole)
    assert layer_of(folder, "v1", "x86_64", Blobs(tmp_path / "read")) == "one"


@pytest.mark.parametrize(
    ("file", "data", "says"),
    [
        ("oci-layout", None, "No such file"),
        ("oci-layout", b"{}", "of unknown version None"),
        ("oci-layout", b'{"imageLayoutVersion": "2.0.0"}', "of unknown version '2.0.0'"),
        ("oci-layout", b"\xff", "not JSON"),
        ("index.json", None, "No such file"),
        ("index.json", b"{", "not JSON"),
        ("index.json", b" " * (9 << 20), "larger than"),
        ("index.json", canonical({"schemaVersion": 2, "layers": [], "config": {}}), "'manifests' is missing"),
    ],
)
def test_a_folder_that_is_no_layout_is_refused(
    file: str, data: bytes | None, says: str, tmp_path: Path, blobs: Blobs
) -> None:
    folder = layout(tmp_path, blobs, (image(blobs, "one"), "v1"))
    (folder / file).unlink()
    if data is not None:
        (folder / file).write_bytes(data)
    assert says in refuse(folder, tmp_path)


def test_what_an_index_leads_to_is_checked(tmp_path: Path, blobs: Blobs) -> None:
    odd = Descriptor("application/vnd.cncf.helm.config", blobs.add(b"chart"), 5).as_json()
    long = Descriptor(OCI_LAYER, blobs.add(b"long"), 5).as_json()
    listed = [
        (image(blobs, "one", layers=[]), "few"),
        (image(blobs, "long", layers=[long]), "long"),
        (image(blobs, "one", layers=[odd]), "odd"),
        (Descriptor(OCI_MANIFEST, digest_of(b"big"), 9 << 20), "big"),
    ]
    deep = image(blobs, "one")
    for _ in range(5):
        deep = Descriptor(OCI_INDEX, index(blobs, deep).digest, index(blobs, deep).size, "amd64")
    listed.append((deep, "deep"))
    folder = tmp_path / "layout"
    shutil.copytree(blobs.root, folder / "blobs")
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    entries = [
        Descriptor(
            item.media_type, item.digest, item.size, annotations={"org.opencontainers.image.ref.name": tag}
        ).as_json()
        for item, tag in listed
    ]
    (folder / "index.json").write_bytes(canonical({"schemaVersion": 2, "manifests": entries}))
    assert "lists 0 layers, the configuration 1" in refuse(folder, tmp_path, "few")
    assert "a layer is application/vnd.cncf.helm.config" in refuse(folder, tmp_path, "odd")
    assert "damaged: its content" in refuse(folder, tmp_path, "long")
    assert "of 9437184 bytes" in refuse(folder, tmp_path, "big")
    assert "indexes within indexes" in refuse(folder, tmp_path, "deep")


def test_a_layout_of_blobs_that_are_missing_is_not_made(tmp_path: Path, blobs: Blobs) -> None:
    one = image(blobs, "one")
    blobs.path(digest_of(b"one")).unlink()
    with pytest.raises(BuildError, match=f"{digest_of(b'one').removeprefix('sha256:')}: missing"):
        layout(tmp_path, blobs, (one, "v1"))
    assert not (tmp_path / "layout" / "index.json").exists()


@pytest.mark.parametrize(
    ("wanted", "name", "same"),
    [
        ("v1", "v1", True),
        ("v1", "lab/image:v1", True),
        ("image", "image:latest", True),
        ("debian:12", "docker.io/library/debian:12", True),
        ("docker.io/library/debian:12", "debian:12", True),
        ("docker.io/debian", "debian:latest", True),
        ("registry:5000/image:v1", "registry:5000/image:v1", True),
        ("image:v1", "lab/image:v1", False),
        ("v1", "v11", False),
        ("image", "image:v1", False),
        ("", "image:v1", False),
    ],
)
def test_a_tag_is_meant_by_its_usual_forms(wanted: str, name: str, same: bool) -> None:
    assert same_tag(wanted, name) is same


def test_of_several_images_for_one_architecture_none_is_guessed(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs")
    listed: list[tuple[Descriptor, str | None]] = []
    for name in ("one", "two"):
        config = canonical(
            {"architecture": "amd64", "os": "linux", "author": name, "rootfs": {"type": "layers", "diff_ids": []}}
        )
        head = Descriptor(OCI_CONFIG, blobs.add(config), len(config))
        raw = canonical({"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": head.as_json(), "layers": []})
        item = Descriptor(OCI_MANIFEST, blobs.add(raw), len(raw), "amd64", "linux")
        listed.append((item, name))
    (tmp_path / "layout").mkdir()
    fill_layout(tmp_path / "layout", blobs, listed)
    with pytest.raises(BuildError, match="2 images, but exactly one is needed; it has one, two"):
        read_layout(tmp_path / "layout", Blobs(tmp_path / "other"), None, "x86_64")
    two = read_layout(tmp_path / "layout", Blobs(tmp_path / "other"), "two", "x86_64")
    assert two.config["author"] == "two"
