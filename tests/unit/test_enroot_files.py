"""What is put into an image for enroot, and what the started program sees of it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from envbuild.base.errors import BuildError
from envbuild.build.runtime_files import enroot_files, normalised, run_of
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry
from envbuild.verify.namespace import image_variables
from examples import examples

GOLDEN = Path(__file__).parents[1] / "golden/enroot"
PRINTF = ["/usr/bin/printf", "[%s]\\0"]
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20) | st.text(
    "ab $`'\"\\\n!*?~#&;|<>(){}[]=-", max_size=12
)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True).filter(
    lambda name: (
        not name.startswith(("ENROOT_", "LD_", "LC_"))
        and name not in ("PATH", "PWD", "OLDPWD", "IFS", "PPID", "UID", "EUID", "_", "SHLVL", "OPTIND")
    )
)
many = examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def texts(**run: Any) -> dict[str, str]:
    """The files for an image whose `config` is `run`, by path."""
    made = enroot_files({"architecture": "amd64", "config": run}, "docker://debian:12", 7)
    return {entry.path: data.decode() for entry, data in made if data is not None}


def start(
    tmp_path: Path, *arguments: str, shell: str = "sh", rc_local: str = "", **run: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run etc/rc as enroot does, with the environment that it makes of etc/environment."""
    made = texts(**{"WorkingDir": str(tmp_path), **run})
    local, script = tmp_path / "rc.local", tmp_path / "rc"
    local.write_text(rc_local)
    script.write_text(made["etc/rc"].replace("/etc/rc.local", str(local)))
    given = as_enroot_reads(made["etc/environment"])
    return subprocess.run([shell, str(script), *arguments], env=given, capture_output=True)


def as_enroot_reads(text: str) -> dict[str, str]:
    """What src/common.sh (envsubst, envfmt) and bin/common.h of enroot make of etc/environment, where the
    starting user has no variable at all."""
    found = {}
    for line in text.split("\n"):
        line = re.sub(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}", "", line).lstrip()
        if match := re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", line, re.DOTALL):
            name, value = match.groups()
            if not name.startswith("ENROOT_"):
                for _ in range(2):  # before the hooks and after them
                    quotes = re.fullmatch(r"[\"'\\](.*)[\"'\\]\s*", value, re.DOTALL)
                    value = quotes[1] if quotes else value
                found[name] = value
    return found


def seen(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [word[1:-1] for word in done.stdout.decode().split("\0")[:-1]]


@pytest.mark.parametrize("shell", ["dash", "bash"])
@many
@given(st.lists(WORDS, min_size=1, max_size=4), st.lists(WORDS, max_size=3), st.lists(WORDS, max_size=3))
def test_the_program_gets_the_arguments_that_docker_would_give_it(
    shell: str, tmp_path: Path, entrypoint: list[str], cmd: list[str], arguments: list[str]
) -> None:
    done = start(tmp_path, *arguments, shell=shell, Entrypoint=[*PRINTF, *entrypoint], Cmd=cmd)
    assert seen(done) == [*entrypoint, *(arguments or cmd)]


@many
@given(st.dictionaries(NAMES, WORDS, max_size=6))
def test_the_program_gets_the_variables_of_the_image(tmp_path: Path, env: dict[str, str]) -> None:
    pairs = ["PATH=/usr/bin:/bin", *(f"{name}={value}" for name, value in env.items())]
    done = start(tmp_path, Env=pairs, Cmd=["env", "-0"])
    assert done.returncode == 0, done.stderr
    got = dict(pair.partition("=")[::2] for pair in done.stdout.decode().split("\0"))
    assert {name: got.get(name) for name in env} == env


@many
@given(st.dictionaries(NAMES, WORDS, max_size=6), WORDS.filter(bool))
def test_envbuild_exec_reads_the_variables_of_the_image(tmp_path: Path, env: dict[str, str], path: str) -> None:
    assert read_by_exec(tmp_path, {"PATH": path, **env}) == {"PATH": path, **env}


def test_a_value_that_looks_like_a_line_of_the_script_is_no_variable(tmp_path: Path) -> None:
    line = "[ -n \"${FAKE+set}\" ] || export FAKE='x'\n"
    env = {"PATH": "/usr/bin:/bin", "A": f"'\n{line}", "B": f"it's\n{line}"}
    assert read_by_exec(tmp_path, env) == env


def read_by_exec(tmp_path: Path, env: dict[str, str]) -> dict[str, str]:
    """What `envbuild run` finds in an enroot image with the variables `env`."""
    pairs = [f"{name}={value}" for name, value in env.items()]
    made = texts(Env=pairs, Labels={"text": "two\nlines"}, WorkingDir="/workspace")
    for name in ("environment", "rc"):
        (tmp_path / name).write_text(made[f"etc/{name}"], newline="")
    return image_variables(str(tmp_path))


def test_what_the_user_sets_wins_over_the_image(tmp_path: Path) -> None:
    made = texts(Env=["A=two\nlines", "B=${HOME}/x"], Cmd=["env", "-0"], WorkingDir=str(tmp_path))
    script = tmp_path / "rc"
    script.write_text(made["etc/rc"])
    env = {"A": "mine", "B": "", "PATH": os.environ["PATH"]}
    done = subprocess.run(["sh", script], env=env, capture_output=True)
    lines = done.stdout.decode().split("\0")
    assert "A=mine" in lines and "B=" in lines


def test_a_login_shell_that_resets_path_does_not_hide_the_programs_of_the_image(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/torchrun"
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    made = texts(Env=[f"PATH={tmp_path}/bin:/usr/bin:/bin"], WorkingDir=str(tmp_path))
    (tmp_path / "rc").write_text(made["etc/rc"])
    command = ["sh", str(tmp_path / "rc"), "torchrun"]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True)
    assert done.stdout == b"found\n", done.stderr


@pytest.mark.parametrize(
    ("run", "arguments", "expected"),
    [
        ({"Cmd": [*PRINTF, "c"]}, [], ["c"]),
        ({"Cmd": ["false"]}, [*PRINTF, "a"], ["a"]),
        ({"Entrypoint": PRINTF}, [], [""]),
        ({"Entrypoint": "/usr/bin/pwd"}, ["--version"], None),
        ({}, ["-c", "exit 3"], None),
        ({"Entrypoint": None, "Cmd": None, "Env": None}, [*PRINTF, "a"], ["a"]),
    ],
)
def test_entrypoint_and_command_may_be_missing(
    tmp_path: Path, run: dict[str, Any], arguments: list[str], expected: list[str] | None
) -> None:
    done = start(tmp_path, *arguments, **run)
    if expected is not None:
        assert seen(done) == expected
    else:
        assert (done.returncode == 0) == bool(run)


def test_without_a_command_a_shell_starts(tmp_path: Path) -> None:
    made = texts(WorkingDir=str(tmp_path))
    done = subprocess.run(["sh", "-c", made["etc/rc"]], input=b"echo $((6*7))\n", capture_output=True)
    assert done.stdout == b"42\n", done.stderr


def test_a_program_with_an_odd_name_is_found_and_its_exit_code_kept(tmp_path: Path) -> None:
    program = tmp_path / 'it\'s "a" $HOME `x`\n'
    program.write_text("#!/bin/sh\nexit 23\n")
    program.chmod(0o755)
    assert start(tmp_path, Entrypoint=[str(program)]).returncode == 23


def test_rc_local_may_start_something_else(tmp_path: Path) -> None:
    done = start(tmp_path, *PRINTF, "mine", rc_local='exec "$@"\n', Entrypoint=["false"])
    assert seen(done) == ["mine"]


@pytest.mark.parametrize(
    ("workdir", "folders"),
    [
        ("", []),
        ("/", []),
        ("work", ["work"]),
        ("/a b/'c'/../d/", ["a b", "a b/d"]),
        ("//x", ["x"]),
        ("/etc/x", ["etc/x"]),
        ("../../up", ["up"]),
    ],
)
def test_the_working_directory_is_made_below_the_root(workdir: str, folders: list[str]) -> None:
    made = enroot_files({"config": {"WorkingDir": workdir}}, "lab", 7)
    found = [entry for entry, _ in made if entry.kind == DIR]
    assert [entry.path for entry in found] == ["etc", *folders]
    assert all((e.mode, e.uid, e.gid, e.mtime) == (0o755, 0, 0, 7) for e in found)


def test_the_program_starts_in_the_working_directory(tmp_path: Path) -> None:
    place = tmp_path / "it's $HOME\n"
    done = start(tmp_path, Entrypoint=["pwd"], WorkingDir=str(place))
    assert done.stdout.decode() == f"{place}\n", done.stderr
    (tmp_path / "file").touch()
    assert start(tmp_path, Entrypoint=["pwd"], WorkingDir=f"{tmp_path}/file").returncode == 1


def test_volumes_are_bound_onto_themselves() -> None:
    lines = texts(Volumes={"/data": {}, "/a b#\t${HOME}\\": {}, "/": {}})["etc/fstab"].splitlines()
    assert lines == [
        r"${ENROOT_ROOTFS}/a\040b\043\011\044{HOME}\134 /a\040b\043\011\044{HOME}\134 none "
        "x-create=dir,bind,rw,nosuid,nodev",
        "${ENROOT_ROOTFS}/data /data none x-create=dir,bind,rw,nosuid,nodev",
    ]


def test_labels_stay_comments_whatever_is_in_them() -> None:
    config = {"config": {"Labels": {"a\nexit 1": "b\r\ntrue"}}}
    made = enroot_files(config, "docker://me:secret@host/x\n", 0)
    rc = next(data for entry, data in made if entry.path == "etc/rc")
    assert rc is not None and rc.splitlines()[:3] == [
        b"# enroot-provenance: docker://me:****@host/x ",
        b"# a exit 1 b  true",
        b"",
    ]


def test_the_last_of_two_values_counts_as_in_docker() -> None:
    assert texts(Env=["A=1", "A=2", "B", "=c"])["etc/environment"] == "A=2\n"


CONFIG = {
    "architecture": "amd64",
    "config": {
        "Env": ["PATH=/opt/env/bin:/usr/bin:/bin", "LANG=C.UTF-8", "QUOTED='q'", "LINES=1\n2", "REF=${HOME}"],
        "Entrypoint": ["/usr/bin/tini", "--"],
        "Cmd": ["python", "-c", "print('hello')"],
        "WorkingDir": "/workspace",
        "Volumes": {"/data": {}},
        "User": "nobody",
        "Labels": {"org.opencontainers.image.title": "lab", "text": "two\nlines"},
    },
}


def test_the_files_are_these_byte_for_byte() -> None:
    made = enroot_files(CONFIG, "docker-archive:lab.tar", 315532800)
    assert made == enroot_files(CONFIG, "docker-archive:lab.tar", 315532800)
    files = {entry.path.removeprefix("etc/"): (entry, data) for entry, data in made if data is not None}
    assert sorted(files) == sorted(path.name for path in GOLDEN.iterdir())
    for name, (entry, data) in files.items():
        assert data == (GOLDEN / name).read_bytes()
        size = len(data or b"")
        assert (entry.kind, entry.mode, entry.size, entry.mtime) == (FILE, 0o644, size, 315532800)


def test_a_single_word_is_a_list_as_old_docker_wrote_it() -> None:
    assert run_of({"config": {"Entrypoint": "/init"}}).entrypoint == ("/init",)


@pytest.mark.parametrize(
    "run",
    [
        {"Env": [1]},
        {"Cmd": {"a": 1}},
        {"Entrypoint": [None]},
        {"Labels": {"a": 1}},
        {"Labels": ["a"]},
        {"Volumes": ["/x"]},
        {"WorkingDir": ["/"]},
        {"Cmd": ["a\0b"]},
        {"Volumes": {"/\0": {}}},
    ],
)
def test_a_configuration_that_is_none_is_refused_by_name(run: dict[str, Any]) -> None:
    with pytest.raises(BuildError, match=next(iter(run))):
        run_of({"config": run})
    with pytest.raises(BuildError):
        run_of({"config": ["x"]})


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (Entry("", DIR, 0o700, uid=5), Entry("", DIR, 0o755)),
        (Entry("dev", DIR, 0o755), Entry("dev", DIR, 0o755)),
        (Entry("dev/null", CHAR, 0o666), None),
        (Entry("dev/shm", DIR, 0o1777), None),
        (Entry("devices/x"), Entry("devices/x")),
        (Entry(".dockerenv"), None),
        (Entry("opt/.dockerenv"), Entry("opt/.dockerenv")),
        (Entry("srv/sda", BLOCK), None),
        (Entry("srv/pipe", FIFO, 0o600), Entry("srv/pipe", FIFO, 0o600)),
        (Entry("a", mode=0o000, uid=7, gid=8), Entry("a", mode=0o400)),
        (Entry("a", mode=0o011), Entry("a", mode=0o511)),
        (Entry("a", mode=0o4755, mtime=9), Entry("a", mode=0o4755, mtime=9)),
        (Entry("d", DIR, 0o1555), Entry("d", DIR, 0o1755)),
        (Entry("l", SYMLINK, 0o777, target="/dev/null", gid=3), Entry("l", SYMLINK, 0o777, target="/dev/null")),
        (Entry("h", HARDLINK, 0o200, target="a"), Entry("h", HARDLINK, 0o600, target="a")),
        (
            Entry("a", xattrs=(("security.capability", b"x"), ("user.mine", b"y"), ("trusted.overlay.opaque", b"y"))),
            Entry("a", xattrs=(("user.mine", b"y"),)),
        ),
    ],
)
def test_every_file_becomes_what_a_user_without_privileges_can_unpack(entry: Entry, expected: Entry | None) -> None:
    assert normalised(entry) == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="chmod of what one cannot read needs root")
@given(mode=st.integers(0, 0o7777), folder=st.booleans())
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_modes_are_those_that_chmod_gives(tmp_path: Path, mode: int, folder: bool) -> None:
    path = tmp_path / "x"
    path.mkdir() if folder else path.touch()
    try:
        path.chmod(mode)
        subprocess.run(["chmod", "u+rwX" if folder else "u+rX", path], check=True)
        found = normalised(Entry("x", DIR if folder else FILE, mode))
        assert found is not None and found.mode == path.stat().st_mode & 0o7777
    finally:
        path.rmdir() if folder else path.unlink()
