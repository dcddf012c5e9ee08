"""A folder appears in its place whole or not at all, and killed runs leave nothing for long."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from envbuild.base import atomic
from envbuild.base.errors import BuildError


def fill(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "content").write_text(text)
    return folder


def test_a_new_folder_takes_its_place(tmp_path: Path) -> None:
    target = tmp_path / "venv"
    atomic.replace(fill(atomic.staging(target), "new"), target)
    assert (target / "content").read_text() == "new"
    assert os.listdir(tmp_path) == ["venv"]
    assert target.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("exchange", [True, False])
def test_an_old_folder_is_replaced(tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    target = fill(tmp_path / "venv", "old")
    atomic.replace(fill(atomic.staging(target), "new"), target)
    assert (target / "content").read_text() == "new"
    assert os.listdir(tmp_path) == ["venv"]


def test_a_staging_folder_is_where_the_kernel_finds_it_without_dots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "real" / "deep"
    deep.mkdir(parents=True)
    (tmp_path / "link").symlink_to(deep)
    monkeypatch.chdir(deep)
    for text, folder in {
        "v": deep,
        "../v": deep.parent,
        "./.././deep/v": deep,
        "../../link/v": tmp_path / "link",
        f"{tmp_path}/link/../v": deep.parent,
        f"{tmp_path}/link/v": tmp_path / "link",
        "missing/../v": deep,
    }.items():
        assert atomic.staging(Path(text)).parent == folder, text
        if "missing" not in text:
            assert os.path.samefile(atomic.staging(Path(text)).parent, Path(text).parent), text


def test_the_name_of_a_staging_folder_is_found_wherever_a_file_is_read_in_pieces(tmp_path: Path) -> None:
    name, file = os.fsencode(atomic.staging(tmp_path / "v").name), tmp_path / "file"
    for start in (0, 5, (1 << 20) - 30, (1 << 20) - 17, (1 << 20) - 1, 1 << 20, (1 << 20) + 1):
        file.write_bytes(bytes(start) + name + b"/bin/python")
        assert atomic.names_staging(file), start
    file.write_bytes(bytes((1 << 20) - 8) + name[:-1])
    assert not atomic.names_staging(file)
    (tmp_path / "link").symlink_to(tmp_path / os.fsdecode(name) / "bin")
    assert atomic.names_staging(tmp_path / "link")


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    target = fill(tmp_path / "venv", "old")
    fill(atomic.staging(target), "half")
    with atomic.exclusive(target, print):
        assert os.listdir(tmp_path) == ["venv"]
    assert (target / "content").read_text() == "old"


def test_a_swap_cut_in_two_is_undone(tmp_path: Path) -> None:
    target = tmp_path / "venv"
    fill(tmp_path / ".venv.envbuild-abc-old", "old")
    fill(tmp_path / ".venv.envbuild-abc", "new")
    atomic.recover(target)
    assert (target / "content").read_text() == "old"
    assert os.listdir(tmp_path) == ["venv"]


def test_another_artifact_s_leftovers_are_not_touched(tmp_path: Path) -> None:
    other = fill(tmp_path / ".venv2.envbuild-abc", "theirs")
    atomic.recover(tmp_path / "venv")
    assert other.exists()


def test_builders_take_turns(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from envbuild.base import atomic
        target = Path(sys.argv[1])
        with atomic.exclusive(target, lambda text: print(text, flush=True)):
            running = target.parent / "running"
            assert not running.exists(), "two at once"
            running.touch()
            print("in", flush=True)
            sys.stdin.readline()
            running.unlink()
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path / "venv")]

    def start(said: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout and said in child.stdout.readline()
        return child

    children = [start("in"), start("waiting"), start("waiting")]
    for child in children:
        assert child.stdin
        child.stdin.write("\n")
        child.stdin.flush()
    printed = [child.communicate(timeout=30)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert printed == ["", "in\n", "in\n"]


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="file") as caught, atomic.exclusive(tmp_path / "file" / "sub" / "venv", print):
        pass
    assert caught.value.hint


def test_a_folder_that_could_not_be_made_is_no_second_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(BuildError, match="Read-only file system"), atomic.staged(tmp_path / "venv"):
        pass
