"""pip's configuration: which file wins, what each option becomes, and what a faulty file says."""

import ensurepip
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import RecipeError
from envbuild.base.masking import redact
from envbuild.site.pip_config import PipConfig, ca_bundle, load_pip_config


def load(root: Path, files: Mapping[str, str], **env: str) -> PipConfig:
    """Load with `files` (paths below `root`) in place; HOME, /etc and the prefix lie below `root`."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    variables = {"HOME": str(root / "home"), **env}
    return load_pip_config(variables, prefix=str(root / "prefix"), etc=root / "etc")


def index(url: str, section: str = "global") -> str:
    return f"[{section}]\nindex-url = {url}\n"


PLACES = ("etc/xdg/pip/pip.conf", "etc/pip.conf", "home/.pip/pip.conf", "home/.config/pip/pip.conf", "prefix/pip.conf")


def test_nothing_configured(tmp_path: Path) -> None:
    assert load(tmp_path, {}) == PipConfig()


@pytest.mark.parametrize("count", range(1, len(PLACES) + 1))
def test_a_later_file_wins(tmp_path: Path, count: int) -> None:
    found = load(tmp_path, {place: index(f"https://x/{place}") for place in PLACES[:count]})
    assert found.index_url == f"https://x/{PLACES[count - 1]}"


def test_the_order_is_pip_s_own(tmp_path: Path) -> None:
    """Asked of the pip that Python carries: the winner among the user's files and a variable."""
    config = tmp_path / "xdg/pip/pip.conf"
    legacy = tmp_path / "home/.pip/pip.conf"
    for path, text in (
        (config, "[global]\nindex_url = https://new\nretries = 7\n[download]\ntimeout = 3\n"),
        (legacy, "[global]\nindex-url = https://old\nextra-index-url =\n  https://a\n  https://b\n"),
    ):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    env = {"HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": str(tmp_path / "xdg"), "PIP_RETRIES": "2"}
    carried = Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl")  # Debian has none; pip is there
    line = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(
        line, env={**env, "PYTHONPATH": os.pathsep.join(map(str, carried))}, capture_output=True, text=True, check=True
    ).stdout
    ours = load_pip_config(env)
    assert "global.index-url='https://new'" in said and ours.index_url == "https://new"
    assert ":env:.retries='2'" in said and ours.retries == 2
    assert ours.extra_index_urls == ("https://a", "https://b") and ours.timeout_s == 3.0


def test_install_beats_global_even_of_a_later_file(tmp_path: Path) -> None:
    found = load(tmp_path, {PLACES[0]: index("https://install", "install"), PLACES[4]: index("https://global")})
    assert found.index_url == "https://install"


def test_variables_beat_files_and_empty_ones_do_not(tmp_path: Path) -> None:
    files = {PLACES[1]: index("https://file")}
    assert load(tmp_path, files, PIP_INDEX_URL="https://v").index_url == "https://v"
    assert load(tmp_path, files, PIP_INDEX_URL="").index_url == "https://file"


def test_a_chosen_file_goes_last_and_leaves_out_the_user_s(tmp_path: Path) -> None:
    files = {
        "etc/pip.conf": "[global]\nproxy = http://p\n" + "index-url = https://etc\n",
        "home/.config/pip/pip.conf": "[global]\nretries = 9\n",
        "mine": index("https://mine"),
    }
    found = load(tmp_path, files, PIP_CONFIG_FILE=str(tmp_path / "mine"))
    assert (found.index_url, found.proxy, found.retries) == ("https://mine", "http://p", None)
    assert load(tmp_path, files, PIP_CONFIG_FILE=str(tmp_path / "absent")).retries == 9
    assert load(tmp_path, files, PIP_CONFIG_FILE=os.devnull) == PipConfig()


def test_an_active_environment_s_file_is_read(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        {"venv/pip.conf": index("https://venv"), PLACES[4]: index("https://own")},
        VIRTUAL_ENV=str(tmp_path / "venv"),
    )
    assert found.index_url == "https://venv"


def test_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = """[global]
find-links = ~/wheels relative
    https://links.example.org/torch.html
    file:///srv/wheels
no_index = yes
cert = ~/ca.pem
client-cert = me.pem
trusted-host = a.example.org b.example.org:8443
default-timeout = 2.5
retries = 0
"""
    found = load(tmp_path, {PLACES[3]: text})
    assert found.find_links == (
        str(tmp_path / "home/wheels"),
        str(tmp_path / "relative"),
        "https://links.example.org/torch.html",
        "file:///srv/wheels",
    )
    assert found.no_index and (found.timeout_s, found.retries) == (2.5, 0)
    assert found.cert == str(tmp_path / "home/ca.pem")
    assert found.client_cert == str(tmp_path / "me.pem")
    assert found.trusted_hosts == ("a.example.org", "b.example.org:8443")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("index-url = https://me:hunter2@x\n", ":1: an option before any [section]"),
        ("[global]\nhunter2\n", ":2: neither [section] nor"),
        ("[global]\nproxy=hunter2\nproxy=hunter2\n", ":3: option 'proxy' is given twice in [global]"),
        ("[global]\n[install]\n[global]\n", ":3: section [global] is given twice"),
        ("[global]\nretries = 3\n[install]\nno-index = perhaps\n", ":4: no-index takes true or false"),
        ("[global]\n\ntimeout = soon\n", ":3: timeout takes seconds, not 'soon'"),
        ("[global]\nretries: -1\n", ":2: retries takes a count, not '-1'"),
        ("[global]\nretries: " + "9" * 5000, ":2: retries takes a count, not '9999"),
        ("[global]\ncert = /a\nindex-url = https://a\0b/\n", ":3: a NUL character"),
    ],
)
def test_a_faulty_file_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, {PLACES[3]: text})
    assert f"{tmp_path / PLACES[3]}{said}" in caught.value.message
    assert "hunter2" not in caught.value.message


def test_a_faulty_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="PIP_NO_INDEX: no-index takes"):
        load(tmp_path, {}, PIP_NO_INDEX="2")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"\xff\xfe[global]")
    with pytest.raises(RecipeError, match="cannot be read"):
        load(tmp_path, {}, PIP_CONFIG_FILE=str(tmp_path / "mine"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:secret@x/simple", "https://user:****@x/simple"),
        ("https://token@x/simple", "https://****@x/simple"),
        ("https://user:s@cret@x/simple", "https://user:****@x/simple"),
        ("see https://a:b@x and https://c@y.", "see https://a:****@x and https://****@y."),
        ("https://x/simple/name@1.0", "https://x/simple/name@1.0"),
        ("/wheels", "/wheels"),
    ],
)
def test_redact(text: str, shown: str) -> None:
    assert redact(text) == shown


@given(st.text("abcXYZ019-_.~%!$&'()*+,;=:@", min_size=1))
def test_no_secret_survives(secret: str) -> None:
    config = PipConfig(index_url=f"https://user:Zq{secret}@x/", proxy="http://Zq-token@p:1")
    assert "Zq" not in repr(config) and "user:****@x/" in repr(config)


def test_the_bundle_of_certificates() -> None:
    env = {"SSL_CERT_FILE": "/ssl", "REQUESTS_CA_BUNDLE": "/requests"}
    assert ca_bundle(PipConfig(cert="/pip"), env) == "/pip"
    assert ca_bundle(PipConfig(), env) == "/requests"
    assert ca_bundle(PipConfig(), {"SSL_CERT_FILE": "/ssl"}) == "/ssl"
    assert ca_bundle(PipConfig(), {}) is None
