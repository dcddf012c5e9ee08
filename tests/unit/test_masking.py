"""Secrets in texts that people read: URLs, variables, tools' output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lab.wheels import make_recipe

from envbuild.base import process
from envbuild.base.errors import BuildError
from envbuild.base.masking import HIDDEN, looks_secret, masked, masked_text, masked_words, redact
from envbuild.site.jobs import job_variable_problem, value_problem

TOKEN = "x1Y2" * 10


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pw@host/x", "https://me:****@host/x"),
        ("https://me:pa/ss@host/x", "https://me:****@host/x"),
        ("https://me:pa#ss?@host/x", "https://me:****@host/x"),
        ("https://me:p@s/w@host/x", "https://me:****@host/x"),
        ("https://me:12/ab@host", "https://me:****@host"),
        ("https://me:pw@host:99999/", "https://me:****@host:99999/"),
        ("http://TOKEN:@host", "http://****@host"),
        ("http://TOKEN@host:80/", "http://****@host:80/"),
        (f"https://ghp_{TOKEN}:x-oauth-basic@host/", "https://****@host/"),
        ("https://host/t/TOKEN/channel", "https://host/t/****/channel"),
        ("docker://me:pw@host:5000/x@sha256:1", "docker://me:****@host:5000/x@sha256:1"),
    ],
)
def test_no_password_of_a_url_remains(text: str, shown: str) -> None:
    assert redact(f"see {text} and me@there") == f"see {shown} and me@there"


@pytest.mark.parametrize(
    "text",
    [
        "docker://host:5000/team/image@sha256:0a",
        "docker://localhost:5000/team/image@sha256:0a",
        "https://host.org:8080/simple/@scope/package",
        "git+https://host.org/a/b@v1",
        "http://[::1]:80/a@b",
        "https://host:8080/",
        "mail me@host.org",
        "write docker://[USER@][REGISTRY#]IMAGE[:TAG], dockerd://IMAGE[:TAG]",
    ],
)
def test_urls_without_a_password_stay_as_they_are(text: str) -> None:
    assert redact(text) == text


SECRETS = [
    f"ghp_{TOKEN}",
    f"github_pat_{TOKEN}",
    f"glpat-{TOKEN}",
    f"hf_{TOKEN}",
    f"sk-proj-{TOKEN}",
    "AKIA" + "A" * 16,
    "AIza" + "a" * 35,
    f"nvapi-{TOKEN}",
    f"xoxb-{TOKEN}",
    f"pypi-{TOKEN}{TOKEN}",
    "npm_" + "a" * 36,
    f"dckr_pat_{TOKEN}",
    "eyJhbGciOiJI.eyJzdWIiOiIx.abc",
    "Bearer abcdefgh",
    "Basic dXNlcjpwYXNz",
    "-----BEGIN OPENSSH PRIVATE KEY-----",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_known_by_its_form_whatever_its_variable(secret: str) -> None:
    assert masked({"HARMLESS": secret}) == {"HARMLESS": HIDDEN}
    assert secret not in masked_text(f"RUN login {secret}")
    assert "looks like a secret" in (value_problem(secret) or "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("TOTAL_TOKENS", "2_000_000_000_000"),
        ("LLM_MAX_TOKENS", "4096"),
        ("EVAL_TOKENS", "10B"),
        ("SAVE_TOKEN", "True"),
        ("KEYBOARD_LAYOUT", "0"),
    ],
)
def test_switches_and_numbers_of_tokens_are_no_secrets(name: str, value: str) -> None:
    assert masked({name: value}) == {name: value}
    assert masked_text(f"ENV {name}={value}") == f"ENV {name}={value}"
    assert masked_words(["x", f"--{name}", value]) == ["x", f"--{name}", value]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PASSWORD", "4096"),
        ("ACCESS_KEY", "12345678"),
        ("API_TOKEN", "31337"),
        ("SECRET_TOKENS", "77"),
        ("TOKENS", "ab12"),
    ],
)
def test_numbers_may_be_secrets_where_nothing_is_counted(name: str, value: str) -> None:
    assert masked({name: value}) == {name: HIDDEN}
    assert masked_text(f"ENV {name}={value}") == f"ENV {name}={HIDDEN}"
    assert masked_words(["x", f"--{name}", value]) == ["x", f"--{name}", HIDDEN]


@pytest.mark.parametrize("value", ["basic configuration", "Bearer authentication", "sk-learn", "/opt/key", "0a" * 20])
def test_prose_paths_and_digests_are_no_secrets(value: str) -> None:
    assert not looks_secret(value) and value_problem(value) is None


@pytest.mark.parametrize("name", ["GH_PAT", "OPENAI_KEY", "KEY", "HF_TOKEN"])
def test_job_scripts_get_no_variable_with_the_name_of_a_secret(name: str) -> None:
    assert "sounds like a secret" in (job_variable_problem(name) or "")


@pytest.mark.parametrize(
    "name", ["PATH", "PATTERN", "KEYBOARD_LAYOUT", "COMPAT_MODE", "TOKENIZERS_PARALLELISM", "MAX_NEW_TOKENS"]
)
def test_job_scripts_get_the_other_variables(name: str) -> None:
    assert job_variable_problem(name) is None


@pytest.mark.parametrize("proxy", ["http://TOKEN@proxy:3128", "http://TOKEN:@proxy", "http://me:pa/ss@proxy"])
def test_job_scripts_get_no_proxy_with_a_password_or_token(proxy: str) -> None:
    assert "holds a password or token" in (value_problem(proxy) or "")


def test_the_output_of_a_failed_tool_is_shown_without_passwords_and_terminal_commands() -> None:
    code = r"import sys; sys.exit('\x1b]0;title\x07cannot read https://me:pa/ss@host/\x1b[2J now')"
    with pytest.raises(BuildError) as caught:
        process.run([sys.executable, "-c", code])
    assert caught.value.message.endswith("  cannot read https://me:****@host/ now")


@pytest.mark.parametrize("url", ["https://me:hunt/er2@host/simple", "https://me:hunt-er2@host:99999/simple"])
def test_uv_explains_a_wrong_url_without_its_password(url: str, tmp_path: Path) -> None:
    make_recipe(tmp_path, "one", ["thing"])
    done = subprocess.run(
        [sys.executable, "-m", "envbuild", "lock", tmp_path / "one", "--wheels"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "ENVBUILD_STORE": str(tmp_path / "store"),
            "PIP_INDEX_URL": url,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "",
        },
    )
    assert done.returncode == 3 and "me:****@host" in done.stderr
    assert "er2" not in done.stderr


def test_a_server_of_keys_is_no_secret() -> None:
    text = "apt-key adv --keyserver keyserver.example.org --recv-keys ABCD"
    assert masked_text(text).startswith("apt-key adv --keyserver keyserver.example.org")
    assert masked_text("--key hunter2") == "--key ****"
