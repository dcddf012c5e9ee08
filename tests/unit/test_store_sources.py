"""Which files are a wheel of a project and version, how index pages are read, credentials in URLs."""

from pathlib import Path

import pytest
from lab.host import Host

from envbuild.cache.http import NotFound
from envbuild.site.pip_config import PipConfig
from envbuild.site.settings import Site
from envbuild.store.client import Client, split_credentials, with_credentials_of
from envbuild.store.sources import matches, read_page, remote_sources
from envbuild.store.store import Store


@pytest.mark.parametrize(
    ("filename", "version", "expected"),
    [
        ("my_project-1.0-py3-none-any.whl", "1.0", True),
        ("My.Project-1.0-py3-none-any.whl", "1.0", True),
        ("my_project-1.0-1build-py3-none-any.whl", "1.0", True),
        ("my_project-1.0.0-py3-none-any.whl", "1.0", True),
        ("my_project-1.0+cpu-py3-none-any.whl", "1.0+cpu", True),
        ("my_project-1.0_cpu-py3-none-any.whl", "1.0+cpu", True),
        ("my_project-2024.01-py3-none-any.whl", "2024.1", True),
        ("my_project-1.0+cpu-py3-none-any.whl", "1.0", False),
        ("my_project-1.0.1-py3-none-any.whl", "1.0", False),
        ("my_project_extra-1.0-py3-none-any.whl", "1.0", False),
        ("my_project-1.0.tar.gz", "1.0", False),
        ("my_project-1.0-any.whl", "1.0", False),
        ("my_project-what-py3-none-any.whl", "1.0", False),
        (".whl", "1.0", False),
    ],
)
def test_matches(filename: str, version: str, expected: bool) -> None:
    assert matches(filename, "my-project", version) is expected


def test_a_page_on_disk(tmp_path: Path) -> None:
    page = tmp_path / "demo/index.html"
    page.parent.mkdir()
    page.write_text(
        '<!DOCTYPE html><a href="../f/demo-1.0%2Bcpu-py3-none-any.whl#sha256=AB12">demo</a>'
        '<a href="https://x.org/demo-2.0-py3-none-any.whl#md5=00">demo</a>'
    )
    links = list(read_page((tmp_path / "demo").as_uri() + "/", "demo", Client(PipConfig(), {})))
    assert [link.filename for link in links] == ["demo-1.0+cpu-py3-none-any.whl", "demo-2.0-py3-none-any.whl"]
    assert links[0].url == (tmp_path / "f/demo-1.0%2Bcpu-py3-none-any.whl").as_uri().replace("%25", "%")
    assert links[1].sha256 is None
    with pytest.raises(NotFound):
        list(read_page((tmp_path / "absent").as_uri(), "absent", Client(PipConfig(), {})))


def test_the_order_of_sources(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    pip = PipConfig(
        index_url="https://main",
        extra_index_urls=("file:///tree", "https://recipe"),
        find_links=("https://links", str(tmp_path / "folder"), (tmp_path / "folder").as_uri()),
    )
    site = Site(store=tmp_path, mirrors={"https://recipe": ("https://mirror",)})

    def urls(pip: PipConfig, offline: bool = False) -> list[str]:
        found = remote_sources(Host(Store(tmp_path), pip, site, index="https://default"), ["https://recipe"], offline)
        return [source.url for source in found]

    assert urls(pip) == ["https://links", "https://mirror", "https://recipe", "https://main", "file:///tree"]
    assert urls(pip, offline=True) == ["file:///tree"]
    assert urls(PipConfig()) == ["https://mirror", "https://recipe", "https://default"]
    assert urls(PipConfig(no_index=True)) == []


def test_credentials() -> None:
    assert split_credentials("https://a%40b:c%3Ad@x:1/s") == ("https://x:1/s", ("a@b", "c:d"))
    assert split_credentials("https://token@x/s") == ("https://x/s", ("token", ""))
    assert split_credentials("https://x/a@b") == ("https://x/a@b", None)
    assert with_credentials_of("https://x/f", "https://u:p@x/s") == "https://u:p@x/f"
    for elsewhere in ("https://y/f", "http://x/f", "https://x:8/f", "https://v:q@x/f"):
        assert with_credentials_of(elsewhere, "https://u:p@x/s") == elsewhere
