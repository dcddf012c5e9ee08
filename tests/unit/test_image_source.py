"""Images to be converted, as users of enroot, Apptainer and skopeo spell them."""

from __future__ import annotations

from pathlib import Path

import pytest

from envbuild.base.errors import UsageError
from envbuild.image.reference import ImageSource, folder_and_tag, parse_source


@pytest.mark.parametrize(
    ("text", "name", "user", "words"),
    [
        ("docker://ubuntu", "ubuntu", "", ("ubuntu", "latest")),
        ("docker://ubuntu:24.04", "ubuntu:24.04", "", ("ubuntu", "24.04")),
        ("docker://nvcr.io#nvidia/torch:25.1", "nvcr.io/nvidia/torch:25.1", "", ("nvidia", "torch", "25.1")),
        ("docker://me@nvcr.io#nvidia/cuda", "nvcr.io/nvidia/cuda", "me", ("nvidia", "cuda", "latest")),
        ("docker://$oauthtoken@nvcr.io#a/b:1", "nvcr.io/a/b:1", "$oauthtoken", ("a", "b", "1")),
        ("docker://me@localhost:5000#a:1", "localhost:5000/a:1", "me", ("a", "1")),
        ("docker://#ubuntu", "ubuntu", "", ("ubuntu", "latest")),
        ("docker://host.example/a/b:2", "host.example/a/b:2", "", ("a", "b", "2")),
        (f"docker://ubuntu@sha256:{'0' * 64}", f"ubuntu@sha256:{'0' * 64}", "", ("ubuntu", "latest")),
        ("pytorch/pytorch:2.7", "pytorch/pytorch:2.7", "", ("pytorch", "pytorch", "2.7")),
        ("dockerd://pt_cpu:cpu", "docker-daemon:pt_cpu:cpu", "", ("pt_cpu", "cpu")),
        ("docker-daemon:pt_cpu", "docker-daemon:pt_cpu", "", ("pt_cpu", "latest")),
    ],
)
def test_registries_and_daemons(text: str, name: str, user: str, words: tuple[str, ...]) -> None:
    source = parse_source(text)
    assert (source.name, source.user, source.words) == (name, user, words)
    assert not user or user not in source.url


def test_files_and_folders(tmp_path: Path) -> None:
    archive, folder = tmp_path / "my image.tar.gz", tmp_path / "a:b"
    archive.touch()
    folder.mkdir()
    for text in (str(archive), f"docker-archive:{archive}", f"docker-archive://{archive}"):
        assert parse_source(text) == ImageSource("docker-archive", str(archive))
    assert parse_source(str(archive)).words == ("my image",)
    for text in (str(folder), f"oci:{folder}"):
        assert folder_and_tag(parse_source(text).rest) == (folder, None)
    tagged = parse_source(f"oci:{folder}:x")
    assert folder_and_tag(tagged.rest) == (folder, "x") and tagged.words == ("a:b",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("docker://debian:12", "docker://docker.io/library/debian:12"),
        ("me@HOST.example#t/odd", "docker://host.example/t/odd:latest"),
        ("oci:{folder}", "image sha256:1"),
        ("{folder}/../layout:v1", "image sha256:1"),
        ("dockerd://pt_cpu", "image sha256:1"),
    ],
)
def test_an_image_says_of_its_source_what_no_spelling_and_no_folder_changes(
    tmp_path: Path, text: str, expected: str
) -> None:
    folder = tmp_path / "layout"
    folder.mkdir()
    prefix = "oci:" if text.startswith("{") else "docker://" if text.startswith("me@") else ""
    source = parse_source(prefix + text.format(folder=folder))
    assert source.provenance("sha256:1") == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "docker://",
        "docker://UPPER/case",
        "docker://a b",
        "docker://host#image",
        "podman://x",
        "ftp://x/y",
        "oci:",
        "oci:/nowhere",
        "docker-archive:/nowhere.tar",
        "dockerd://",
        "docker://me@#",
        "docker://x.y#",
    ],
)
def test_what_is_none_of_these_is_told_with_how_to_write_it(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_source(text)
    assert caught.value.hint
