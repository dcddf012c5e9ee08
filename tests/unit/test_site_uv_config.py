"""uv's configuration as rendered from pip's. That uv obeys it is in tests/real/test_fetch.py."""

import tomllib
from pathlib import Path

from envbuild.site.pip_config import PipConfig, bound_project, uv_environment, uv_settings


def test_the_order_of_indexes() -> None:
    pip = PipConfig(index_url="https://main", extra_index_urls=("https://more",))
    text = uv_settings(pip, ["https://recipe", "https://more"])
    read = tomllib.loads(text)
    assert read["index"] == [
        {"url": "https://recipe"},
        {"url": "https://more"},
        {"url": "https://main", "default": True},
    ]
    assert read["index-strategy"] == "unsafe-best-match"


def test_without_an_index_url_uv_s_own_default_stays() -> None:
    read = tomllib.loads(uv_settings(PipConfig(), []))
    assert "index" not in read and "no-index" not in read


def test_no_index_leaves_find_links_alone() -> None:
    pip = PipConfig(index_url="https://main", no_index=True, find_links=("/a b", 'C:\\"x"é\U0001f40d'))
    read = tomllib.loads(uv_settings(pip, ["https://recipe"]))
    assert read == {"index-strategy": "unsafe-best-match", "no-index": True, "find-links": list(pip.find_links)}


def test_bound_packages_have_an_explicit_index() -> None:
    bound = {"my-pkg": "https://a/simple", "other": "https://b/simple", "third": "https://a/simple"}
    read = tomllib.loads(bound_project(["My_Pkg[x]>=1", "other"], bound))
    assert read["project"]["dependencies"] == ["My_Pkg[x]>=1", "other"]
    urls = {one["name"]: one["url"] for one in read["tool"]["uv"]["index"] if one["explicit"]}
    assert {name: urls[one["index"]] for name, one in read["tool"]["uv"]["sources"].items()} == bound
    assert len(urls) == 2


def test_trusted_hosts() -> None:
    read = tomllib.loads(uv_settings(PipConfig(trusted_hosts=("a:1", "b")), []))
    assert read["allow-insecure-host"] == ["a:1", "b"]


def test_the_environment_keeps_how_uv_works_and_drops_what_it_resolves() -> None:
    kept = {
        "UV_HTTP_TIMEOUT": "9",
        "UV_CONCURRENT_DOWNLOADS": "2",
        "UV_PYTHON_PREFERENCE": "system",
        "UV_KEYRING_PROVIDER": "subprocess",
        "PATH": "/bin",
        "HTTPS_PROXY": "http://env",
    }
    dropped = {
        "UV_INDEX": "x",
        "UV_PYTHON": "3.8",
        "UV_EXCLUDE_NEWER": "2020",
        "UV_CONFIG_FILE": "x",
        "UV_OFFLINE": "1",
        "VIRTUAL_ENV": "x",
        "CONDA_PREFIX": "x",
        "PYTHONPATH": "x",
        "PYTHONHOME": "x",
    }
    env = uv_environment(PipConfig(), {**kept, **dropped}, Path("/store/uv"))
    assert env == {**kept, "UV_CACHE_DIR": "/store/uv", "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}


def test_pip_s_network_settings_reach_uv() -> None:
    pip = PipConfig(cert="/ca", client_cert="/me", proxy="http://p", timeout_s=0.4, retries=3)
    env = uv_environment(pip, {"https_proxy": "http://env", "SSL_CERT_FILE": "/env"}, Path("/c"))
    assert env["SSL_CERT_FILE"] == "/ca" and env["SSL_CLIENT_CERT"] == "/me"
    assert {env[n] for n in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")} == {"http://p"}
    assert (env["UV_HTTP_TIMEOUT"], env["UV_HTTP_RETRIES"]) == ("1", "3")
