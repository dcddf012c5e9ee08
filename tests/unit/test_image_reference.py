"""Names of images: completed as Docker does, refused with a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import UsageError
from envbuild.image.reference import Reference, api_host, parse_reference, same_registry

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("ubuntu", "docker.io/library/ubuntu:latest"),
        ("ubuntu:24.04", "docker.io/library/ubuntu:24.04"),
        ("pytorch/pytorch:2.7", "docker.io/pytorch/pytorch:2.7"),
        ("docker.io/ubuntu", "docker.io/library/ubuntu:latest"),
        ("index.docker.io/a/b:1", "docker.io/a/b:1"),
        ("registry-1.docker.io/ubuntu", "docker.io/library/ubuntu:latest"),
        ("localhost/a", "localhost/a:latest"),
        ("localhost:5000/a", "localhost:5000/a:latest"),
        ("host:5000/a/b:v1", "host:5000/a/b:v1"),
        (f"host:5000/a/b@{DIGEST}", f"host:5000/a/b@{DIGEST}"),
        (f"host.site/a:t@{DIGEST}", f"host.site/a:t@{DIGEST}"),
        ("Nvcr.IO/nvidia/pytorch:24.05-py3", "nvcr.io/nvidia/pytorch:24.05-py3"),
        ("docker://ghcr.io/a/b_c/d__e-f.g", "ghcr.io/a/b_c/d__e-f.g:latest"),
        ("[::1]:5000/a:1", "[::1]:5000/a:1"),
        ("127.0.0.1:5000/a:1", "127.0.0.1:5000/a:1"),
        ("a:" + "t" * 128, "docker.io/library/a:" + "t" * 128),
    ],
)
def test_names_are_completed_as_docker_does(text: str, canonical: str) -> None:
    assert str(parse_reference(text)) == canonical


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not the name"),
        (" ubuntu", "not the name"),
        ("Ubuntu", "upper case"),
        ("Foo/bar", "upper case"),
        ("host.site/Foo/bar", "upper case"),
        ("https://host.site/a", "not a URL"),
        ("ubuntu:", "not a tag"),
        ("ubuntu:-x", "not a tag"),
        ("ubuntu:a b", "not a tag"),
        ("a:" + "t" * 129, "not a tag"),
        ("ubuntu:1:2", "not a tag"),
        ("ubuntu@sha256:abc", "not a digest"),
        ("ubuntu@md5:" + "0" * 32, "not a digest"),
        ("ubuntu@", "not a digest"),
        ("a//b", "not a valid part"),
        ("a/", "not a valid part"),
        ("/a", "not a valid part"),
        ("a/../b", "not a valid part"),
        ("-a/b", "not a valid part"),
        ("a___b", "not a valid part"),
        ("host.site/", "not a valid part"),
        ("host_x.site/a", "not a host"),
        ("host:port/a", "not a host"),
        ("0" * 64, "an image ID"),
        ("a" * 250, "longer than 255"),
        ("é", "not a valid part"),
    ],
)
def test_bad_names_are_refused_with_the_part_that_is_wrong(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_reference(text)


@given(st.text(max_size=40) | st.from_regex(r"[a-zA-Z0-9./:@_-]{0,40}", fullmatch=True))
def test_any_text_is_a_name_or_a_usage_error_and_names_stay_the_same(text: str) -> None:
    try:
        reference = parse_reference(text)
    except UsageError as error:
        assert error.message
        return
    assert parse_reference(str(reference)) == reference


def test_a_digest_goes_before_a_tag_and_docker_hub_is_one_registry() -> None:
    assert parse_reference(f"a:t@{DIGEST}").pointer == DIGEST
    assert parse_reference("a:t").pointer == "t"
    assert Reference("ghcr.io", "a/b").name == "ghcr.io/a/b"
    assert api_host("docker.io") == "registry-1.docker.io"
    assert api_host("ghcr.io:444") == "ghcr.io:444"
    assert same_registry("index.docker.io", "docker.io") and not same_registry("a:1", "a:2")
