"""Manifests, indexes and configurations: what is well formed is read, all else is one clear message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import BuildError
from envbuild.base.packages import digest_of
from envbuild.image.model import (
    DOCKER_INDEX,
    DOCKER_LAYER_GZIP,
    DOCKER_MANIFEST,
    GOARCH,
    OCI_CONFIG,
    OCI_INDEX,
    OCI_LAYER_GZIP,
    OCI_MANIFEST,
    Descriptor,
    ImageIndex,
    ImageManifest,
    canonical,
    choose,
    docker_manifest,
    parse,
    parse_config,
)

DOCKER_FOREIGN_GZIP = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
BLOB = {"mediaType": "x/y", "digest": digest_of(b""), "size": 0}
MANIFEST = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": BLOB, "layers": [BLOB]}


def index_of(*platforms: tuple[str, str]) -> bytes:
    listed = [
        {**BLOB, "digest": digest_of(f"{os}/{arch}".encode())}
        | ({"platform": {"architecture": arch, "os": os}} if arch else {})
        for os, arch in platforms
    ]
    return canonical({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": listed})


def read_index(*platforms: tuple[str, str]) -> ImageIndex:
    index = parse(index_of(*platforms), "lab")
    assert isinstance(index, ImageIndex)
    return index


@pytest.mark.parametrize(
    ("drop", "served", "kind"),
    [
        ((), None, OCI_MANIFEST),
        (("mediaType",), None, OCI_MANIFEST),
        (("mediaType",), DOCKER_MANIFEST, DOCKER_MANIFEST),
        (("mediaType",), f"{DOCKER_MANIFEST}; charset=utf-8", DOCKER_MANIFEST),
        (("mediaType",), "application/json", OCI_MANIFEST),
        ((), DOCKER_MANIFEST, OCI_MANIFEST),
    ],
)
def test_a_manifest_s_kind_is_what_it_says_then_what_the_server_says_then_its_shape(
    drop: tuple[str, ...], served: str | None, kind: str
) -> None:
    raw = canonical({key: value for key, value in MANIFEST.items() if key not in drop})
    manifest = parse(raw, "lab", served)
    assert isinstance(manifest, ImageManifest)
    assert (manifest.media_type, manifest.raw) == (kind, raw)
    assert manifest.digest == manifest.descriptor.digest == digest_of(raw)
    assert len(manifest.layers) == 1


def test_an_index_without_a_media_type_is_an_index() -> None:
    raw = canonical({"schemaVersion": 2, "manifests": []})
    assert parse(raw, "lab").media_type == OCI_INDEX
    assert parse(raw, "lab", DOCKER_INDEX).media_type == DOCKER_INDEX


def test_the_first_linux_image_of_the_architecture_is_chosen() -> None:
    index = read_index(("windows", "amd64"), ("linux", "arm64"), ("linux", "amd64"))
    assert choose(index, "x86_64", "lab").digest == digest_of(b"linux/amd64")
    assert choose(index, "aarch64", "lab").digest == digest_of(b"linux/arm64")


def test_the_only_image_of_an_index_may_have_no_platform() -> None:
    one = Descriptor(OCI_MANIFEST, digest_of(b"one"), 5)
    assert choose(ImageIndex(b"", OCI_INDEX, (one,)), "x86_64", "lab") == one
    with pytest.raises(BuildError, match="no image for linux/amd64"):
        choose(ImageIndex(b"", OCI_INDEX, (one, one)), "x86_64", "lab")


@pytest.mark.parametrize(
    ("variants", "chosen"), [(("v3", ""), ""), (("v2", "v1", "v3"), "v1"), (("v9", "v8"), "v8"), (("v4", "v3"), "v3")]
)
def test_of_several_variants_the_one_for_the_most_processors_is_chosen(variants: tuple[str, ...], chosen: str) -> None:
    rows = [Descriptor(OCI_MANIFEST, digest_of(one.encode()), 5, "amd64", "linux", variant=one) for one in variants]
    parsed = parse(canonical({"schemaVersion": 2, "manifests": [row.as_json() for row in rows]}), "lab", OCI_INDEX)
    assert isinstance(parsed, ImageIndex) and [item.variant for item in parsed.manifests] == list(variants)
    assert choose(parsed, "x86_64", "lab").digest == digest_of(chosen.encode())


def test_an_architecture_that_is_missing_is_named_with_those_there_are() -> None:
    index = read_index(("windows", "amd64"), ("linux", "s390x"), ("unknown", "unknown"), ("", ""))
    with pytest.raises(BuildError) as caught:
        choose(index, "x86_64", "lab")
    assert "lab has no image for linux/amd64" in caught.value.message
    assert caught.value.message.endswith("it has linux/s390x, windows/amd64")
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "unknown media type ''"),
        ({"schemaVersion": 1, "fsLayers": []}, "unknown media type"),
        ({**MANIFEST, "manifests": []}, "both an image index and an image manifest"),
        ({**MANIFEST, "layers": {}}, "'layers' is missing or not a list"),
        ({**MANIFEST, "config": None}, "a descriptor is missing"),
        ({**MANIFEST, "config": {**BLOB, "digest": "sha512:00"}}, "not a sha256 digest"),
        ({**MANIFEST, "config": {**BLOB, "digest": f"{BLOB['digest']}\n"}}, "not a sha256 digest"),
        ({**MANIFEST, "config": {**BLOB, "digest": "sha256:../../x"}}, "not a sha256 digest"),
        ({**MANIFEST, "layers": [{**BLOB, "size": -1}]}, "lacks its media type or size"),
        ({**MANIFEST, "layers": [{**BLOB, "size": True}]}, "lacks its media type or size"),
        ({**MANIFEST, "layers": [{**BLOB, "size": 1.5}]}, "lacks its media type or size"),
        ({**MANIFEST, "mediaType": "text/html", "schemaVersion": 3}, "unknown media type"),
    ],
)
def test_what_is_no_manifest_is_refused_by_name(data: Any, says: str) -> None:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    with pytest.raises(BuildError, match=r"^lab: ") as caught:
        parse(raw, "lab")
    assert says in caught.value.message


@pytest.mark.parametrize(
    "rootfs", [None, [], {}, {"diff_ids": None}, {"diff_ids": ["x"]}, {"diff_ids": [1]}, {"diff_ids": "a"}]
)
def test_a_configuration_without_diff_ids_is_refused(rootfs: Any) -> None:
    with pytest.raises(BuildError, match=r"lab: an image configuration without rootfs\.diff_ids"):
        parse_config(canonical({"rootfs": rootfs}), "lab")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["mediaType", "digest", "size", "platform", "os", "annotations", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(
        st.sampled_from(["schemaVersion", "mediaType", "manifests", "layers", "config", "rootfs", "diff_ids"]),
        json_values | st.sampled_from([2, OCI_INDEX, OCI_MANIFEST, [BLOB], BLOB]),
    )
)
def test_any_json_object_is_read_or_refused(data: dict[str, Any]) -> None:
    """Nothing but BuildError comes out, and what is read can be chosen from and written again."""
    raw = json.dumps(data).encode()
    for arch in GOARCH:
        try:
            parsed = parse(raw, "lab")
            if isinstance(parsed, ImageIndex):
                canonical([item.as_json() for item in parsed.manifests])
                choose(parsed, arch, "lab")
        except BuildError as error:
            assert error.message.startswith("lab")
    try:
        parse_config(raw, "lab")
    except BuildError as error:
        assert error.message.startswith("lab")


@given(st.dictionaries(st.text(), st.text() | st.just("\ud800") | st.floats(allow_nan=False)))
def test_canonical_json_reads_back_and_does_not_depend_on_order(data: dict[str, Any]) -> None:
    raw = canonical(data)
    assert json.loads(raw) == data
    assert canonical(dict(reversed(data.items()))) == raw


def test_dockers_form_names_the_same_blobs_by_dockers_media_types() -> None:
    blobs = [Descriptor(kind, digest_of(kind.encode()), 7) for kind in (OCI_LAYER_GZIP, DOCKER_FOREIGN_GZIP)]
    config = Descriptor(OCI_CONFIG, digest_of(b"config"), 6, annotations={"only": "in OCI"})
    raw = canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": config.as_json(),
            "annotations": {"a": "b"},
            "layers": [blob.as_json() for blob in blobs],
        }
    )
    manifest = parse(raw, "lab")
    assert isinstance(manifest, ImageManifest)
    made = docker_manifest(manifest)
    assert json.loads(made.raw) == {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": config.digest, "size": 6},
        "layers": [
            {"mediaType": kind, "digest": blob.digest, "size": 7}
            for kind, blob in zip((DOCKER_LAYER_GZIP, DOCKER_FOREIGN_GZIP), blobs, strict=True)
        ],
    }
    assert parse(made.raw, "lab") == made and docker_manifest(made) == made
