"""Where registry credentials are looked for, and what is said about files that are wrong."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from envbuild.base.errors import HostError, RecipeError
from envbuild.image.credentials import find_credentials


def coded(login: str) -> dict[str, str]:
    return {"auth": base64.b64encode(login.encode()).decode()}


def home(folder: Path, config: Any) -> dict[str, str]:
    """The variables of a user whose config.json is `config`."""
    (folder / ".docker").mkdir(exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / ".docker/config.json").write_text(text)
    return {"HOME": str(folder), "PATH": str(folder)}


def helper(folder: Path, name: str, body: str) -> None:
    program = folder / f"docker-credential-{name}"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("key", "registry"),
    [
        ("ghcr.io", "ghcr.io"),
        ("https://ghcr.io", "ghcr.io"),
        ("https://ghcr.io/v2/", "ghcr.io"),
        ("GHCR.io/v1/", "ghcr.io"),
        ("https://index.docker.io/v1/", "docker.io"),
        ("docker.io", "docker.io"),
        ("registry-1.docker.io", "docker.io"),
        ("host:5000", "host:5000"),
        ("http://[::1]:5000/v2", "[::1]:5000"),
    ],
)
def test_config_json_names_a_registry_in_all_the_ways_of_docker(tmp_path: Path, key: str, registry: str) -> None:
    env = home(tmp_path, {"auths": {"other.io": coded("x:y"), key: coded("ada:pass:word")}})
    found = find_credentials(registry, env)
    assert found is not None and (found.username, found.password) == ("ada", "pass:word")
    assert "pass" not in repr(found)
    assert find_credentials("nobody.io", env) is None
    assert find_credentials(registry + "1", env) is None


@pytest.mark.parametrize("key", ["ghcr.io/org/team", "https://ghcr.io/v3/", "://", "", "ghcr.io:443"])
def test_keys_for_something_else_are_passed_over(tmp_path: Path, key: str) -> None:
    assert find_credentials("ghcr.io", home(tmp_path, {"auths": {key: coded("a:b")}})) is None


def test_an_identity_token_is_kept_as_one(tmp_path: Path) -> None:
    entry = {**coded("00000000-0000-0000-0000-000000000000:"), "identitytoken": "ey.token"}
    found = find_credentials("x.azurecr.io", home(tmp_path, {"auths": {"x.azurecr.io": entry}}))
    assert found is not None and found.identity_token == "ey.token"
    assert "ey.token" not in repr(found)
    helper(tmp_path, "one", """echo '{"Username": "<token>", "Secret": "ey.other"}'""")
    found = find_credentials("x.io", home(tmp_path, {"credHelpers": {"x.io": "one"}}))
    assert found is not None and (found.identity_token, found.password) == ("ey.other", "")


def test_places_are_read_in_their_order(tmp_path: Path) -> None:
    def user(env: dict[str, str], registry: str = "x.io") -> str | None:
        found = find_credentials(registry, env)
        return found.username if found else None

    netrc = tmp_path / "netrc"
    netrc.write_text("machine x.io login from-netrc password p\ndefault login any password p\n")
    env = {"HOME": str(tmp_path), "PATH": str(tmp_path), "NETRC": str(netrc)}
    assert user(env) == "from-netrc" and user(env, "x.io:5000") == "from-netrc"
    assert user(env, "other.io") is None  # `default` is for no registry
    runtime = tmp_path / "run/containers"
    runtime.mkdir(parents=True)
    (runtime / "auth.json").write_text(json.dumps({"auths": {"x.io": coded("from-podman:p")}}))
    env["XDG_RUNTIME_DIR"] = str(tmp_path / "run")
    assert user(env) == "from-podman"
    (tmp_path / "chosen.json").write_text(json.dumps({"auths": {"x.io": coded("from-chosen:p")}}))
    env["REGISTRY_AUTH_FILE"] = str(tmp_path / "chosen.json")
    assert user(env) == "from-chosen"
    home(tmp_path, {"auths": {"x.io": {}}})  # what docker leaves where a store has the secret
    assert user(env) == "from-chosen"
    home(tmp_path, {"auths": {"x.io": coded("from-auths:p")}})
    assert user(env) == "from-auths"
    config: dict[str, Any] = {"auths": {"x.io": coded("from-auths:p")}, "credsStore": "missing"}
    home(tmp_path, config)
    assert user(env) == "from-auths"
    helper(tmp_path, "all", """echo '{"Username": "from-store", "Secret": "p"}'""")
    home(tmp_path, config | {"credsStore": "all"})
    assert user(env) == "from-store"
    helper(tmp_path, "one", """echo '{"Username": "from-helper", "Secret": "p"}'""")
    home(tmp_path, config | {"credsStore": "all", "credHelpers": {"x.io": "one"}})
    assert user(env) == "from-helper"
    helper(tmp_path, "one", "echo 'credentials not found in native keychain'; exit 1")
    assert user(env) == "from-store"
    env |= {"ENVBUILD_REGISTRY_USER": "from-env", "ENVBUILD_REGISTRY_PASSWORD": "p"}
    assert user(env) == "from-store"  # for which registry?
    env["ENVBUILD_REGISTRY"] = "y.io"
    assert user(env) == "from-store"
    env["ENVBUILD_REGISTRY"] = "X.io"
    assert user(env) == "from-env"
    env |= {"DOCKER_CONFIG": str(tmp_path / "nothing"), "ENVBUILD_REGISTRY": ""}
    assert user(env) == "from-chosen"


def test_docker_hubs_helper_is_asked_by_docker_hubs_url(tmp_path: Path) -> None:
    helper(tmp_path, "hub", """read server; echo "{\\"Username\\": \\"$server\\", \\"Secret\\": \\"p\\"}" """)
    found = find_credentials("docker.io", home(tmp_path, {"credsStore": "hub"}))
    assert found is not None and found.username == "https://index.docker.io/v1/"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"auths": {"x.io": {"auth": "aHVudGVyMg==" }}', "config.json:1: .*not JSON"),
        ("\udcff", "not JSON"),
        ("[]", "not a JSON object"),
        ({"auths": []}, None),
        ({"auths": ["x.io"]}, "'auths' is not an object"),
        ({"credHelpers": "x"}, "'credHelpers' is not an object"),
        ({"credsStore": 5}, "not a string"),
        ({"credsStore": "../../hunter"}, "not the name of a credential helper"),
        ({"auths": {"x.io": "hunter2"}}, "not in the form that docker login writes"),
        ({"auths": {"x.io": {"auth": 5}}}, "not in the form that docker login writes"),
        ({"auths": {"x.io": {"auth": "hunter2"}}}, "not base64"),
        ({"auths": {"x.io": {"auth": base64.b64encode(b"hunter2").decode()}}}, "not base64"),
        ({"auths": {"x.io": {"auth": base64.b64encode(b"\xff:\xff").decode()}}}, "not base64"),
    ],
)
def test_a_faulty_config_json_is_named_and_its_secrets_are_not(tmp_path: Path, config: Any, said: str | None) -> None:
    env = home(tmp_path, "" if config == "\udcff" else config)
    if config == "\udcff":
        (tmp_path / ".docker/config.json").write_bytes(b"\xff\xfe{")
    if said is None:
        assert find_credentials("x.io", env) is None
        return
    with pytest.raises(RecipeError, match=said) as error:
        find_credentials("x.io", env)
    assert str(tmp_path / ".docker/config.json") in error.value.message
    assert "hunter2" not in f"{error.value.message}{error.value.hint}"


@pytest.mark.parametrize(
    "body",
    [
        "echo not json",
        """echo '{"Username": "a"}'""",
        """echo '{"Username": "a", "Secret": 5}'""",
        """echo '{"Username": "a", "Secret": "hunter2"}'; exit 3""",
        "echo '[1]'",
        "exit 7",
    ],
)
def test_a_helper_that_answers_wrong_is_named_and_its_secret_is_not(tmp_path: Path, body: str) -> None:
    helper(tmp_path, "odd", body)
    with pytest.raises(HostError, match="docker-credential-odd get") as error:
        find_credentials("x.io", home(tmp_path, {"credsStore": "odd"}))
    assert "hunter2" not in f"{error.value.message}{error.value.hint}"


def test_a_faulty_netrc_is_named_with_its_line_and_no_password(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine x.io login a password b\nhunter2 is odd\n")
    with pytest.raises(RecipeError, match=r"\.netrc:2: ") as error:
        find_credentials("x.io", {"HOME": str(tmp_path)})
    assert "hunter2" not in error.value.message
