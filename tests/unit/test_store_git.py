"""Archives of git commits: the same bytes whatever the clone, the user's settings and the time."""

from __future__ import annotations

import hashlib
import os
import tarfile
from pathlib import Path
from unittest.mock import patch

import pytest
from sdists import commit, git, sha256

from envbuild.base.errors import BuildError
from envbuild.cache.http import RequestFailed
from envbuild.run_environment import load_environment
from envbuild.store.archives import WantedArchive, git_archive, locate_archive

FILES = {"a.py": "x = 1\n", "b/run.sh": "#!/bin/sh\n", "b/é.txt": "é", "b/.gitattributes": "*.txt text eol=lf\n"}


def archive(repository: Path, name: str, of: str, folder: str = "", **env: str) -> Path:
    work = repository.parent / name
    work.mkdir()
    path = work / "archive.tar"
    digest = git_archive(repository.as_uri(), of, folder, path, work, {**os.environ, **env})
    assert digest == sha256(path)
    return path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    commit(folder, FILES)
    (folder / "b/run.sh").chmod(0o755)
    (folder / "link").symlink_to("b")
    return folder


def test_two_archives_of_a_commit_are_the_same(repository: Path, tmp_path: Path) -> None:
    first = commit(repository, {}, "v1")
    commit(repository, {"a.py": "x = 2\n"})
    path = archive(repository, "first", first)
    with tarfile.open(path) as tar:
        entries = {one.name: one for one in tar.getmembers()}
        text = tar.extractfile("source/a.py")
        assert text is not None and text.read() == b"x = 1\n", "the commit, not the branch"
    assert list(entries) == [f"source/{name}" for name in sorted([*FILES, "link"])]
    assert {one.mtime for one in entries.values()} == {315532800}
    assert {(one.uid, one.gid, one.uname, one.gname) for one in entries.values()} == {(0, 0, "", "")}
    assert entries["source/b/run.sh"].mode == 0o755 and entries["source/a.py"].mode == 0o644
    assert entries["source/link"].issym() and entries["source/link"].linkname == "b"
    # Another clone, a umask, settings that would change line ends, variables of a hook that calls envbuild.
    git(tmp_path, "clone", "--quiet", "--bare", str(repository), "bare.git")
    (tmp_path / "gitconfig").write_text("[core]\n autocrlf = true\n fileMode = false\n")
    old = os.umask(0o077)
    try:
        settings = {"GIT_CONFIG_GLOBAL": str(tmp_path / "gitconfig"), "GIT_DIR": "/nonexistent"}
        other = archive(tmp_path / "bare.git", "second", first, **settings)
    finally:
        os.umask(old)
    assert other.read_bytes() == path.read_bytes()
    assert archive(repository, "third", first, "b").read_bytes() != path.read_bytes()


def test_submodules_are_in_it_and_git_is_not(repository: Path, tmp_path: Path) -> None:
    commit(tmp_path / "part", {"part.py": "y = 1\n"})
    git(
        repository,
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "--quiet",
        "add",
        (tmp_path / "part").as_uri(),
        "sub",
    )
    found = commit(repository, {})
    settings = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "protocol.file.allow", "GIT_CONFIG_VALUE_0": "always"}
    with tarfile.open(archive(repository, "first", found, **settings)) as tar:
        names = tar.getnames()
    assert "source/sub/part.py" in names and "source/.gitmodules" in names
    assert not any(".git" in name.split("/") for name in names)


@pytest.mark.parametrize(
    ("of", "folder", "said"),
    [
        ("f" * 40, "", "git checkout failed"),
        ("HEAD", "gone", "has no folder gone"),
        ("HEAD", "out", "has no folder out"),
    ],
)
def test_what_is_not_there_is_named(repository: Path, of: str, folder: str, said: str) -> None:
    (repository / "out").symlink_to("/etc")  # a folder of this host
    of = commit(repository, {}) if of == "HEAD" else of
    with pytest.raises(RequestFailed, match=said):
        archive(repository, "work", of, folder)


def test_an_archive_that_is_another_one_is_refused(repository: Path, tmp_path: Path) -> None:
    found = commit(repository, {})
    environment = load_environment({**os.environ, "ENVBUILD_STORE": str(tmp_path / "store")})

    def locate(digest: str, *, offline: bool = False) -> Path:
        wanted = WantedArchive("demo", "1.0", f"git+{repository.as_uri()}@{found}#subdirectory=b", digest)
        return locate_archive(wanted, environment, offline=offline)

    with pytest.raises(BuildError) as caught:
        locate("0" * 64)
    assert "hash mismatch" in caught.value.message and "another one than the lock means" in (caught.value.hint or "")
    digest = caught.value.message.rpartition("sha256:")[2]
    path = locate(digest, offline=True)
    assert sha256(path) == digest and path.name == f"demo-{found[:12]}.tar"


@pytest.mark.parametrize(
    ("url", "name"),
    [("https://h/a/x.tar", "x.tar"), ("https://h/a/%2e%2e", "demo"), ("https://h/" + "x" * 300, "demo")],
)
def test_an_archive_has_the_name_in_its_url_or_its_project_s(tmp_path: Path, url: str, name: str) -> None:
    environment = load_environment({**os.environ, "ENVBUILD_STORE": str(tmp_path / "store")})
    digest = hashlib.sha256(b"archive").hexdigest()

    def fetch(_: object, __: str, path: Path, *___: object) -> str:
        path.write_bytes(b"archive")
        return digest

    with patch("envbuild.store.archives.Client.download", fetch):
        path = locate_archive(WantedArchive("demo", "1.0", url, digest), environment, offline=False)
    assert path == tmp_path / "store/sources" / digest / name
