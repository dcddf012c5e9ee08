"""`envbuild run`: what a program sees of image and host, how it ends, and that nothing of it stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from envbuild.verify.image_runtime import WAYS

from .conftest import REPOSITORY
from .test_runtimes import NOBODY, PATH, images, place, pytestmark, tree, wait_for

__all__ = ["images", "place", "pytestmark", "tree"]

TRAP = "trap 'echo got >>{0}{2}' TERM; echo up >>{0}; i=0; while [ $i -lt {1} ]; do sleep 0.1; i=$((i+1)); done; exit 5"
# Of this run of the tests alone.
SLEEP = f"sleep 976{os.getpid()}"


@pytest.fixture
def line(tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of `envbuild run`, its options given; tmp_path is bound."""

    def make(image: Path, *command: str | Path, options: tuple[str, ...] = ()) -> list[str]:
        own = [sys.executable, "-m", "envbuild", "run", "--bind", str(tmp_path), *options]
        return [*own, str(image), "--", *map(str, command)]

    return make


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[Callable[[], list[str]]]:
    """The processes that name the test's folder in their arguments, or its image's."""

    def find() -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if entry.name != str(os.getpid()) and str(tmp_path).encode() in b" ".join(words):
                    found.append(entry.name)
            except OSError:
                continue
        return found

    yield find
    for pid in find():
        os.kill(int(pid), signal.SIGKILL)


def run(
    line: list[str], code: int = 0, *, cwd: Path | None = None, given: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(line, input=given, capture_output=True, text=True, cwd=cwd, env={**os.environ, **env})
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def usable(way: str) -> None:
    if way == "squashfuse" and not (shutil.which("squashfuse") and os.access("/dev/fuse", os.W_OK)):
        pytest.skip("squashfuse is not installed or /dev/fuse cannot be opened")
    if way == "mount" and (os.geteuid() != 0 or not Path("/dev/loop-control").exists()):
        pytest.skip("only root may mount, and only where there are loop devices")


SEEN = """
echo "$PATH|$OF_IMAGE|${LD_LIBRARY_PATH-none}|$SLURM_PROCID|$NCCL_DEBUG|$SECRET|$GIVEN|$HOME"
cat; pwd; echo out >output; cat /data/new/one; ls -l /proc/self/ns/net; ls /dev/shm/$MARK
(echo x >/data/new/two) 2>/dev/null || echo read-only
cat /etc/site.conf /etc/hosts; exit 9
"""


@pytest.mark.parametrize("form", ["sqsh", "sif"])
@pytest.mark.parametrize("way", WAYS)
def test_a_program_has_the_images_files_and_the_hosts_network_and_what_was_bound(
    images: dict[str, Path], tmp_path: Path, line: Callable[..., list[str]], form: str, way: str
) -> None:
    usable(way)
    data, conf = tmp_path / "a data,folder", tmp_path / "site.conf"
    data.mkdir()
    (data / "one").write_text("one\n")
    conf.write_text("of site\n")
    mark = Path(f"/dev/shm/{tmp_path.parent.name}-{tmp_path.name}")
    mark.touch()
    value = 'it\'s "given" $HOME \\ ü'
    options = ("--runtime", f"own:{way}", "--env", f"GIVEN={value}", "--env", "SECRET", "--env", "NONE")
    options += ("--env", f"MARK={mark.name}", "--bind", f"{data}:/data/new:ro", "--bind", f"{conf}:/etc/site.conf")
    try:
        done = run(
            line(images[form], "sh", "-c", SEEN, options=options),
            9,
            cwd=tmp_path,
            given="typed\n",
            LD_LIBRARY_PATH="/host",
            SLURM_PROCID="3",
            NCCL_DEBUG="INFO",
            SECRET="s3cret",
            OF_HOST="x",
            PYTHONPATH=str(REPOSITORY),
            TMPDIR=str(tmp_path),
        )
    finally:
        mark.unlink()
    rows = done.stdout.splitlines()
    assert rows[0] == f"{PATH}|of image|none|3|INFO|s3cret|{value}|/tmp"
    assert rows[1:4] == ["typed", str(tmp_path), "one"]
    assert rows[4].endswith(f"-> {os.readlink('/proc/self/ns/net')}")
    assert rows[5:8] == [f"/dev/shm/{mark.name}", "read-only", "of site"]
    assert rows[8:] == Path("/etc/hosts").read_text().splitlines()
    assert (tmp_path / "output").read_text() == "out\n" and not (data / "two").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a data,folder", "output", "site.conf"]
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_what_does_not_fit_is_said_before_the_program_starts(
    images: dict[str, Path], tmp_path: Path, line: Callable[..., list[str]]
) -> None:
    image = images["sqsh"]
    file = tmp_path / "file"
    file.touch()
    for options, code, says in (
        (("--bind", f"{tmp_path}:/dev/new"), 2, "/dev is the host's own"),
        (("--bind", f"{tmp_path}:/"), 2, "instead of the image"),
        (("--bind", f"{file}:/opt"), 2, "/opt of the image is a folder"),
        (("--bind", f"{tmp_path}:/secret/x"), 2, "/secret of the image is a file"),
        (("--bind", f"{tmp_path}/absent"), 2, "there is no"),
        (("--bind", f"{tmp_path}:relative"), 2, "is not HOST[:PLACE][:ro]"),
        (("--workdir", "/absent"), 2, "the image does not have this working folder: /absent"),
        (("--runtime", "docker"), 2, "unknown runtime 'docker'"),
        (("--env", "=x"), 2, "is not NAME or NAME=VALUE"),
    ):
        done = run(line(image, "sh", "-c", "echo started", options=options), code)
        assert says in done.stderr and done.stdout == "", options
    for words, code, says in (
        (["absent"], 127, "absent: not found in the image"),
        (["/etc/environment"], 126, "Permission denied"),
    ):
        assert says in run(line(image, *words), code).stderr
    assert "no squashfs image" in run(line(file, "true"), 2).stderr


@pytest.mark.parametrize("whom", ["launcher", "group"])
def test_a_signal_reaches_the_program_once_and_its_exit_code_comes_back(
    images: dict[str, Path], tmp_path: Path, line: Callable[..., list[str]], whom: str
) -> None:
    log = tmp_path / "log"
    child = subprocess.Popen(line(images["sqsh"], "sh", "-c", TRAP.format(log, 8, "")), start_new_session=True)
    wait_for(lambda: log.exists() and "up" in log.read_text())
    if whom == "launcher":
        child.terminate()
    else:
        os.killpg(child.pid, signal.SIGTERM)  # as a scheduler does: every process of the step
    assert child.wait(20) == 5
    assert log.read_text() == "up\ngot\n"


def test_a_program_that_a_signal_ends_is_seen_to_end_by_it(
    images: dict[str, Path], line: Callable[..., list[str]]
) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGABRT):
        run(line(images["sqsh"], "sh", "-c", f"kill -{int(number)} $$"), -number)


@pytest.mark.parametrize("victim", ["launcher", "keeper"])
@pytest.mark.parametrize("way", ["squashfuse", "extract"])
def test_after_kill_9_no_process_no_mount_and_no_file_is_left(
    images: dict[str, Path],
    tmp_path: Path,
    line: Callable[..., list[str]],
    alive: Callable[[], list[str]],
    way: str,
    victim: str,
) -> None:
    usable(way)
    log = tmp_path / "log"
    # One that ignores SIGTERM, as a rank that hangs may.
    script = f"(trap '' TERM; exec {SLEEP}) & {TRAP.format(log, 300, '; exit')}"
    child = subprocess.Popen(
        line(images["sif"], "sh", "-c", script, options=("--runtime", f"own:{way}")),
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    wait_for(lambda: log.exists() and "up" in log.read_text())
    keeper = next(pid for pid in below(child.pid) if b"run" in words(pid))
    wait_for(lambda: bool(sleepers()))
    os.kill(child.pid if victim == "launcher" else keeper, signal.SIGKILL)
    child.wait(20)
    wait_for(lambda: not sleepers() and not alive(), 25)
    if victim == "launcher":
        assert "got" in log.read_text()  # the program was asked first
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    wait_for(lambda: [path.name for path in tmp_path.iterdir()] == ["log"])


def test_the_next_run_removes_what_kill_9_left_but_no_image_of_a_running_program(
    images: dict[str, Path], tmp_path: Path, line: Callable[..., list[str]]
) -> None:
    log, env = tmp_path / "log", {**os.environ, "TMPDIR": str(tmp_path)}
    saves = f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done; ls -d /etc/environment >>{log}; exit"
    last = f"trap '{saves}' TERM; echo up >>{log}; while :; do sleep 0.1; done"
    for killed, said in (("launcher", "up\n/etc/environment\n"), ("both", "up\n")):
        log.unlink(missing_ok=True)
        (tmp_path / "go").unlink(missing_ok=True)
        options = ("--runtime", "own:extract")
        child = subprocess.Popen(line(images["sqsh"], "sh", "-c", last, options=options), env=env)
        wait_for(lambda: log.exists())
        keeper = next(pid for pid in below(child.pid) if b"run" in words(pid))
        for pid in (child.pid, keeper)[: 1 if killed == "launcher" else 2]:
            os.kill(pid, signal.SIGKILL)
        child.wait(20)
        assert list(tmp_path.glob("envbuild-*"))
        run(line(images["sqsh"], "sh", "-c", ":"), TMPDIR=str(tmp_path))
        (tmp_path / "go").touch()
        wait_for(lambda: not list(tmp_path.glob("envbuild-*")))
        assert log.read_text() == said


def words(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def below(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def sleepers() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == SLEEP.replace(" ", "\0").encode() + b"\0":
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_what_a_program_leaves_behind_ends_with_it(images: dict[str, Path], line: Callable[..., list[str]]) -> None:
    run(line(images["sqsh"], "sh", "-c", f"{SLEEP} >/dev/null 2>&1 & exit 3"), 3)
    assert sleepers() == []


def test_several_run_from_one_image_at_the_same_time(
    images: dict[str, Path], tmp_path: Path, line: Callable[..., list[str]]
) -> None:
    # Each waits until all four are there.
    script = f": >{tmp_path}/$SLURM_PROCID; until [ -e {tmp_path}/0 ] && [ -e {tmp_path}/1 ] "
    script += f"&& [ -e {tmp_path}/2 ] && [ -e {tmp_path}/3 ]; do sleep 0.05; done; exit $SLURM_PROCID"
    children = [
        subprocess.Popen(line(images["sif"], "sh", "-c", script), env={**os.environ, "SLURM_PROCID": str(number)})
        for number in range(4)
    ]
    assert [child.wait(30) for child in children] == [0, 1, 2, 3]


@pytest.mark.parametrize("form", ["sqsh", "sif"])
def test_a_user_without_any_right_runs_it_with_the_users_own_files(
    images: dict[str, Path], place: Path, form: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    home = place / f"exec-{form}"
    home.mkdir()
    os.chown(home, 65534, 65534)
    packages = place / "packages"
    if not packages.exists():
        # This interpreter may lie where nobody may go; Debian's does not, and click is all that it lacks.
        import click

        shutil.copytree(REPOSITORY / "envbuild", packages / "envbuild")
        shutil.copytree(Path(click.__file__).parent, packages / "click")
    script = "echo x >made; (echo x >/opt/x) 2>/dev/null && echo written; echo $OF_IMAGE; exit 4"
    command = [
        *NOBODY,
        f"HOME={home}",
        f"PYTHONPATH={packages}",
        f"TMPDIR={home}",
        "/usr/bin/python3",
        "-m",
        "envbuild",
        "run",
        "--bind",
        str(home),
        str(images[form]),
        "sh",
        "-c",
        script,
    ]
    assert run(command, 4, cwd=home).stdout == "of image\n"
    assert (home / "made").stat().st_uid == 65534
    assert [path.name for path in home.iterdir()] == ["made"]
