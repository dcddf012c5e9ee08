"""Choosing what starts an image file, and what enters it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import HostError, UsageError
from envbuild.build.commit import open_subject
from envbuild.environment import Environment
from envbuild.run_environment import load_environment
from envbuild.verify import image_runtime
from envbuild.verify.image_file import ImageFile, image_kind, open_image_file
from envbuild.verify.image_runtime import cached, named, passed
from envbuild.verify.namespace import image_variables

ENROOT, APPTAINER = "enroot", "apptainer"
SUPERBLOCK = b"hsqs" + bytes(16) + struct.pack("<H", 6) + bytes(74)


def program(folder: Path, name: str, text: str = "#!/bin/sh\n") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def environment(tmp_path: Path, **more: str) -> Environment:
    return load_environment(
        {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path), **more}
        | {"ENVBUILD_STORE": str(tmp_path / "store")}
    )


@pytest.mark.parametrize(
    ("kind", "wanted", "installed", "expected"),
    [
        (ENROOT, None, [], ("own", None, None)),
        (ENROOT, None, ["enroot", "apptainer"], ("enroot", "enroot", None)),
        (ENROOT, None, ["apptainer"], ("own", None, None)),
        (APPTAINER, None, ["singularity"], ("apptainer", "singularity", None)),
        (APPTAINER, None, ["singularity", "apptainer"], ("apptainer", "apptainer", None)),
        (APPTAINER, "own", ["apptainer"], ("own", None, None)),
        (ENROOT, "own:extract", ["enroot"], ("own", None, "extract")),
    ],
)
def test_the_runtime_of_the_format_goes_first_and_ours_needs_nothing(
    tmp_path: Path, kind: str, wanted: str | None, installed: list[str], expected: tuple[str, str | None, str | None]
) -> None:
    for name in installed:
        program(tmp_path, name)
    name, path, way = image_runtime.choose(kind, wanted, {"PATH": str(tmp_path)})
    assert (name, path and path.name, way) == expected


@pytest.mark.parametrize(
    ("kind", "wanted", "error", "says"),
    [
        (ENROOT, "toyrun", UsageError, "unknown runtime 'toyrun'"),
        (ENROOT, "apptainer", HostError, "apptainer or singularity is not on PATH"),
        (APPTAINER, "enroot", UsageError, "does not start .sif"),
        (APPTAINER, "apptainer", HostError, "apptainer or singularity is not on PATH"),
    ],
)
def test_a_runtime_that_cannot_be_is_refused_by_name(kind: str, wanted: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        image_runtime.choose(kind, wanted, {"PATH": "/nowhere"})


def test_image_files_are_known_by_their_first_bytes_alone(tmp_path: Path) -> None:
    squashfs, text, damaged = tmp_path / "a.sif", tmp_path / "b.sqsh", tmp_path / "c.sqsh"
    squashfs.write_bytes(SUPERBLOCK)
    text.write_text("hello")
    damaged.write_bytes(b"hsqs")
    assert image_kind(squashfs) == ENROOT
    assert image_kind(text) is None and image_kind(tmp_path) is None
    image = open_image_file(squashfs)
    assert (image.kind, image.offset, image.compressor) == (ENROOT, 0, "zstd")
    for path, kind in ((squashfs, APPTAINER), (text, None), (damaged, None), (tmp_path, None)):
        with pytest.raises(UsageError):
            open_image_file(path, kind)


def test_verify_refuses_what_is_no_artifact_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for path in (tmp_path / "text", tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match=r"not an artifact|does not exist"):
            open_subject(path, load_environment())
    with pytest.raises(UsageError, match="no runtime to choose"):
        open_subject(tmp_path, load_environment(), "own")


def test_nothing_of_the_callers_variables_enters_but_gpus_and_networks() -> None:
    given = {"PATH": "/x", "HOME": "/y", "PYTHONPATH": "/z", "RANK": "1", "LD_PRELOAD": "l"}
    kept = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "FI_PROVIDER": "efa"}
    assert passed(given | kept) == kept


VALUES = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=20)


@given(st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True), VALUES))
def test_variables_of_an_enroot_image_are_read_as_they_were_meant(
    tmp_path_factory: pytest.TempPathFactory, variables: dict[str, str]
) -> None:
    file = tmp_path_factory.mktemp("etc") / "environment"
    lines = [f'{n}="{v}"' if v[:1] in ("'", '"') else f"{n}={v}" for n, v in variables.items()]
    file.write_bytes("\n".join(["# comment", "", "no-name=1", *lines]).encode())
    found = image_variables(str(file.parent))
    assert found.pop("PATH").startswith(variables.pop("PATH", "/opt/env/bin:"))
    assert found == variables


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"user/max_user_namespaces": "0"}, "user.max_user_namespaces=15000"),
        ({"kernel/unprivileged_userns_clone": "0"}, "kernel.unprivileged_userns_clone=1"),
        ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, "unprivileged_userns=0"),
        ({"user/max_user_namespaces": "5"}, "a surrounding container"),
        ({}, "a surrounding container"),
    ],
)
def test_a_host_that_forbids_namespaces_is_told_which_setting_does(
    tmp_path: Path, settings: dict[str, str], says: str
) -> None:
    for name, value in settings.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(value + "\n")
    error = image_runtime.forbidden("unshare: Operation not permitted", tmp_path)
    assert error.exit_code == 6 and says in str(error.hint)
    assert "Operation not permitted" in error.message


def test_a_missing_squashfuse_is_said_with_the_other_ways(tmp_path: Path) -> None:
    image = ImageFile(tmp_path / "x.sqsh", ENROOT, 0, "zstd")
    with pytest.raises(HostError, match="squashfuse is not installed") as caught:
        bare = load_environment({"PATH": "/nowhere", "ENVBUILD_STORE": str(tmp_path)})
        image_runtime.own_runtime(image, "squashfuse", bare)
    assert "own:extract" in str(caught.value.hint)


def test_a_launch_folder_in_use_stays_and_a_left_one_goes(tmp_path: Path) -> None:
    store = environment(tmp_path).store
    with store.working("launched") as folder:
        name = folder.name  # as this machine's are called
    left = store.folder("launched", f"{name}-left", "locked", "deep")
    left.parent.chmod(0o500)
    with store.working("launched") as first:
        (first / "file").touch()
        assert not left.parents[1].exists()
        with store.working("launched") as second:
            assert (first / "file").exists() and first != second
        assert not second.exists()
    assert not first.exists()


LDCONFIG = """\
412 libs found in cache `/etc/ld.so.cache'
\tlibnvidia-ml.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnvidia-ml.so.1
\tlibcuda.so.1 (libc6) => /lib/i386-linux-gnu/libcuda.so.1
\tlibcuda.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so.1
\tlibc.so.6 (libc6,x86-64, OS ABI: Linux 3.2.0) => /lib/x86_64-linux-gnu/libc.so.6
"""


def test_the_drivers_libraries_are_found_for_this_processor_and_no_others() -> None:
    assert named(cached(LDCONFIG, "x86_64")) == {
        "libcuda.so.1": "/lib/x86_64-linux-gnu/libcuda.so.1",
        "libnvidia-ml.so.1": "/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    }
    listed = ["/usr/lib64/libcuda.so.550.54.15", "/usr/lib64/libnvidia-gpucomp.so.550.54.15"]
    assert named([*listed, "/usr/lib64/libcudart.so.12"]) == {
        "libcuda.so.1": listed[0],
        "libnvidia-gpucomp.so.550.54.15": listed[1],
    }


# Answers as doc/cmd says enroot does, and writes down what it was asked; an image itself it cannot start where
# NO_IN_PLACE is set.
FAKE_ENROOT = """#!/bin/sh
printf '%s\\n' "$*" >>"$ENROOT_SAID"
case "$1" in
version) echo 4.1.2 ;;
create) test -d "$ENROOT_DATA_PATH" && mkdir "$ENROOT_DATA_PATH/$3" ;;
start)
    shift
    while [ "${1#--}" != "$1" ]; do
        case "$1" in --env) eval "test \\"\\${$2+set}\\"" || exit 9 ;; esac
        shift 2
    done
    test -f "$1" && test -n "$ENROOT_NO_IN_PLACE" && exit 1
    test -f "$1" || test -d "$ENROOT_DATA_PATH/$1" || exit 8
    shift
    test "$1" = python && exit 0
    exec "$@" ;;
esac
"""


@pytest.mark.parametrize("in_place", [True, False])
def test_an_image_is_started_by_a_fake_enroot_in_place_or_unpacked(tmp_path: Path, in_place: bool) -> None:
    program(tmp_path / "bin", "enroot", FAKE_ENROOT)
    (tmp_path / "x.sqsh").write_bytes(SUPERBLOCK)
    said, work = tmp_path / "said", tmp_path / "work"
    work.mkdir()
    known = environment(tmp_path, ENROOT_SAID=str(said), ENROOT_NO_IN_PLACE="" if in_place else "y", NCCL_DEBUG="INFO")
    runtime = image_runtime.runtime_for(open_image_file(tmp_path / "x.sqsh"), None, known)
    assert runtime.name == "enroot 4.1.2" + ("" if in_place else " (unpacked)")
    with runtime.open(work) as launch:
        command, variables = launch("sh", ["-c", "echo $A-$NCCL_DEBUG"], {"A": "a b"})
        done = subprocess.run(command, env=dict(variables), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "a b-INFO\n")
    assert f"--mount {work}:{runtime.work}:none:x-create=dir,bind,rw" in said.read_text()
    assert list((tmp_path / "store" / "launched").glob("*")) == []


@pytest.mark.parametrize("name", ["a b", "a:b", "a\\b"])
def test_enroot_is_not_given_a_folder_that_its_fstab_cannot_name(tmp_path: Path, name: str) -> None:
    program(tmp_path / "bin", "enroot", FAKE_ENROOT)
    (tmp_path / "x.sqsh").write_bytes(SUPERBLOCK)
    known = environment(tmp_path, ENROOT_SAID=str(tmp_path / "said"))
    runtime = image_runtime.runtime_for(open_image_file(tmp_path / "x.sqsh"), "enroot", known)
    with pytest.raises(HostError, match="interprets a character of its path"), runtime.open(tmp_path / name):
        pass


def test_a_wanted_runtime_that_fails_is_an_error_with_what_it_said(tmp_path: Path) -> None:
    program(tmp_path / "bin", "apptainer", "#!/bin/sh\necho 'no such thing' >&2\nexit 3\n")
    image = ImageFile(tmp_path / "x.sif", APPTAINER, 40960, "zstd")
    with pytest.raises(HostError, match=r"(?s)exit 3.*no such thing"):
        image_runtime.runtime_for(image, "apptainer", environment(tmp_path))


@pytest.mark.parametrize("reaped", [False, True])
def test_a_keeper_that_was_killed_is_named_without_a_traceback(reaped: bool) -> None:
    with subprocess.Popen(["true"]) as keeper:
        os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)
        if reaped:
            keeper.wait()
        line = [*image_runtime.START, "enter", str(keeper.pid), "squashfs", "true"]
        done = subprocess.run(line, capture_output=True, text=True)
    said = (
        f"process {keeper.pid}, which holds the image, was killed (No such file or directory): verify the image again\n"
    )
    assert (done.returncode, done.stderr) == (1, said)


def test_choosing_a_runtime_imports_nothing_heavy() -> None:
    code = (
        "import sys, envbuild.verify.image_runtime\n"
        "print([m for m in ('spython', 'docker', 'requests', 'zstandard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
