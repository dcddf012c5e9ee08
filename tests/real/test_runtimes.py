"""Image files started for real: by the kernel, squashfuse, unpacked, by Apptainer; as root and as nobody."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.apptainer import Apptainer
from lab.small_image import PATH, write_tree

from envbuild.base.errors import HostError
from envbuild.environment import Environment
from envbuild.image.sif import finish_sif, write_sif_front
from envbuild.run_environment import load_environment
from envbuild.verify.image_file import ImageFile, open_image_file
from envbuild.verify.image_runtime import WAYS, StartedRuntime, own_runtime, runtime_for

from .conftest import REPOSITORY

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", "-i", "PATH=/usr/bin:/bin"]

pytestmark = pytest.mark.skipif(
    not shutil.which("mksquashfs") or not Path("/usr/bin/python3").exists(),
    reason="mksquashfs or Debian's python3 is not installed",
)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="runtimes-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def tree(place: Path) -> Path:
    """A shell, some tools and a Python, with the variables of an image as enroot and Apptainer have them."""
    root = place / "tree"
    write_tree(root)
    scripts = root / ".singularity.d/env"
    scripts.mkdir(parents=True)
    (root / "etc/environment").write_text(f"PATH={PATH}\nOF_IMAGE=of image\n")
    (scripts / "10-docker2singularity.sh").write_text(
        f'#!/bin/sh\nexport PATH="{PATH}"\nexport OF_IMAGE="${{OF_IMAGE:-"of image"}}"\n'
    )
    for name in ("90-environment.sh", "99-base.sh", "99-runtimevars.sh"):
        (scripts / name).write_text("#!/bin/sh\n")
    for name in ("proc", "sys", "dev", "tmp", "var/tmp"):
        (root / name).mkdir(parents=True)
    (root / "secret").touch(mode=0o600)
    return root


@pytest.fixture(scope="module")
def images(place: Path, tree: Path) -> dict[str, Path]:
    """The tree as .sqsh and as .sif."""
    squashfs, sif = place / "image.sqsh", place / "image.sif"
    options = ["-comp", "gzip", "-Xcompression-level", "1", "-noappend", "-quiet", "-no-progress"]
    subprocess.run(["mksquashfs", tree, squashfs, *options, "-root-mode", "0755"], check=True)
    arch = os.uname().machine
    with sif.open("w+b") as out:
        start = write_sif_front(out, b"# none\n", [], arch)
        out.write(squashfs.read_bytes())
        size = out.tell() - start
        finish_sif(out, b"# none\n", [], arch, partition_size=size, mtime=0)
    return {"sqsh": squashfs, "sif": sif}


@pytest.fixture
def known(tmp_path: Path) -> Environment:
    return load_environment({**os.environ, "ENVBUILD_STORE": str(tmp_path / "store"), "HOST": "x"})


def own(image: ImageFile, way: str, known: Environment) -> StartedRuntime:
    try:
        return own_runtime(image, way, known)
    except HostError as error:
        if "/dev/fuse" in error.message or "loop device" in error.message:
            pytest.skip(error.message)
        raise


def say(runtime: StartedRuntime, work: Path, script: str, **extra: str) -> str:
    """What a shell in the image prints."""
    with runtime.open(work) as launch:
        command, variables = launch("sh", ["-c", script], extra)
        done = subprocess.run(command, env=dict(variables), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


INSIDE = """
echo "$PATH|$OF_IMAGE|${HOST-none}|$GIVEN|$(cat input)"
echo out >output; echo scratch >/tmp/x; ls /proc/self/exe >/dev/null; echo x >/dev/null
if (echo x >/opt/x) 2>/dev/null; then echo the image was written; fi
cat /etc/hosts /etc/resolv.conf >hosts; ls -d /home /root 2>/dev/null; cat /proc/self/mountinfo >mounts
"""


@pytest.mark.parametrize("form", ["sqsh", "sif"])
@pytest.mark.parametrize("way", WAYS)
def test_a_program_sees_the_image_its_variables_and_the_work_folder_alone(
    images: dict[str, Path], known: Environment, tmp_path: Path, form: str, way: str
) -> None:
    runtime = own(open_image_file(images[form]), way, known)
    assert runtime.name.startswith(f"own:{way}")
    work = tmp_path / "a work,folder:"
    work.mkdir()
    (work / "input").write_text("of host")
    said = say(runtime, work, INSIDE, GIVEN='it\'s "given" $HOME')
    assert said == f'{PATH}|of image|none|it\'s "given" $HOME|of host\n'
    assert (work / "output").read_text() == "out\n"
    of_host = [Path("/etc/hosts"), Path("/etc/resolv.conf")]
    here = "".join(path.read_text() for path in of_host if path.is_file())
    assert (work / "hosts").read_text() == here
    # No mount of this host is to be seen, and no mount of the image here.
    points = {line.split()[4] for line in (work / "mounts").read_text().splitlines()}
    assert {"/", "/opt", "/tmp", runtime.work} <= points
    assert not [point for point in points if point.startswith(("/tmp/", "/home", "/root"))]
    assert str(known.store.root) not in Path("/proc/self/mountinfo").read_text()
    assert list((known.store.root / "launched").iterdir()) == []
    loops = [p.read_text().strip() for p in Path("/sys/block").glob("loop*/loop/backing_file")]
    assert str(images[form]) not in loops


def test_exit_codes_and_signals_reach_the_program_itself(
    images: dict[str, Path], known: Environment, tmp_path: Path
) -> None:
    runtime = own(open_image_file(images["sqsh"]), "extract", known)
    with runtime.open(tmp_path) as launch:
        for program, script, code in (("sh", "exit 7", 7), ("absent", "", 1)):
            command, variables = launch(program, ["-c", script], {})
            done = subprocess.run(command, env=dict(variables), capture_output=True, text=True)
            assert done.returncode == code
        assert done.stderr == "absent: not found in the image\n"
        script = "trap 'echo trapped; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
        command, variables = launch("sh", ["-c", script], {})
        child = subprocess.Popen(command, env=dict(variables), stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        child.terminate()
        assert (child.communicate()[0], child.returncode) == ("trapped\n", 5)


KILLED = """
import sys, time
from pathlib import Path
from envbuild.base import process
from envbuild.run_environment import load_environment
from envbuild.verify.image_file import open_image_file
from envbuild.verify.image_runtime import runtime_for
runtime = runtime_for(open_image_file(Path(sys.argv[1])), sys.argv[2], load_environment())
with runtime.open(Path(sys.argv[3])) as launch:
    command, variables = launch("sh", ["-c", "echo started; exec sleep 987"], {})
    out = open(Path(sys.argv[3], "log"), "wb")
    process.start(command, env=variables, stdout=out, death_signal=15)
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_runs_or_stays_mounted_after_a_kill_or_ctrl_c(
    images: dict[str, Path], known: Environment, tmp_path: Path, how: signal.Signals
) -> None:
    runtime = own(open_image_file(images["sif"]), "extract", known)
    command = [sys.executable, "-c", KILLED, str(images["sif"]), "own:extract", str(tmp_path)]
    child = subprocess.Popen(
        command,
        env={**known.variables, "PYTHONPATH": str(REPOSITORY)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    log = tmp_path / "log"
    wait_for(lambda: log.exists() and log.read_text() == "started\n")
    wait_for(lambda: bool(sleepers()))
    started = sleepers()
    child.send_signal(how)
    child.wait()
    wait_for(lambda: not set(started) & set(sleepers()))
    assert str(known.store.root) not in Path("/proc/self/mountinfo").read_text()
    say(runtime, tmp_path, "true")  # removes what the killed one could not
    assert list((known.store.root / "launched").iterdir()) == []


def sleepers() -> list[str]:
    """The processes of KILLED's program."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == b"sleep\x00987\x00":
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.05)


def test_an_image_that_the_kernel_cannot_read_is_said_with_the_way_out(
    images: dict[str, Path], known: Environment, tmp_path: Path
) -> None:
    own(open_image_file(images["sqsh"]), "mount", known)
    lzma = tmp_path / "lzma.sqsh"
    data = bytearray(images["sqsh"].read_bytes())
    struct.pack_into("<H", data, 20, 2)  # a compressor that no kernel has
    lzma.write_bytes(data)
    with pytest.raises(HostError, match="squashfs with lzma perhaps") as caught:
        own_runtime(open_image_file(lzma), "mount", known)
    assert "--compression gzip" in str(caught.value.hint)


def test_a_host_without_namespaces_is_an_error_that_names_the_setting(
    images: dict[str, Path], known: Environment, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", KILLED, str(images["sqsh"]), "own:extract", str(tmp_path)]
    forbid = "echo 0 >/proc/sys/user/max_mnt_namespaces || exit 42\n"
    variables = {**known.variables, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbid + 'exec "$@"', "sh", *command],
        env=variables,
        capture_output=True,
        text=True,
    )
    if done.returncode == 42:
        pytest.skip("a user namespace may not set limits of its own here")
    assert "HostError" in done.stderr and "user.max_mnt_namespaces = 0" in done.stderr


AS_NOBODY = """
import json, subprocess, sys
from pathlib import Path
from envbuild.run_environment import load_environment
from envbuild.verify.image_file import open_image_file
from envbuild.verify.image_runtime import runtime_for
runtime = runtime_for(open_image_file(Path(sys.argv[1])), None, load_environment())
script = 'echo "$PATH|$OF_IMAGE"; cat /etc/hosts >/dev/null; echo x >out; '
script += 'if (echo >/opt/x) 2>/dev/null; then echo written; fi'
with runtime.open(Path(sys.argv[2])) as launch:
    command, variables = launch("sh", ["-c", script], {})
    done = subprocess.run(command, env=dict(variables), capture_output=True, text=True)
print(json.dumps([runtime.name, done.returncode, done.stdout, done.stderr]))
"""


@pytest.mark.parametrize("form", ["sqsh", "sif"])
def test_a_user_without_any_right_starts_it_too(images: dict[str, Path], place: Path, form: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    package, home = place / "package", place / f"home-{form}"
    if not package.exists():
        shutil.copytree(REPOSITORY / "envbuild", package / "envbuild")
    home.mkdir()
    os.chown(home, 65534, 65534)
    # This interpreter may lie where nobody may go; Debian's does not.
    variables = [f"HOME={home}", f"ENVBUILD_STORE={home}/store", f"PYTHONPATH={package}"]
    command = [*NOBODY, *variables, "/usr/bin/python3", "-c", AS_NOBODY, str(images[form]), str(home)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    name, code, out, err = json.loads(done.stdout)
    assert (code, out, err) == (0, f"{PATH}|of image\n", "")
    assert name.startswith(("own:extract", "own:squashfuse"))
    assert (home / "out").stat().st_uid == 65534
    assert list((home / "store/launched").iterdir()) == []


def test_apptainer_starts_a_sif_with_the_jobs_variables_and_the_work_folder(
    real_apptainer: Apptainer, images: dict[str, Path], tmp_path: Path
) -> None:
    store = {"ENVBUILD_STORE": str(tmp_path / "store"), "HOST": "x", "NCCL_DEBUG": "INFO"}
    known = load_environment(real_apptainer.environment(**store))
    runtime = runtime_for(open_image_file(images["sif"], "apptainer"), None, known)
    assert runtime.name.startswith("apptainer 1.4."), runtime.name
    (tmp_path / "input").write_text("of host")
    given = 'it\'s "given", a=b'  # a `$` in it Apptainer takes for a variable
    script = f'cd {runtime.work}; echo "$PATH|$OF_IMAGE|${{HOST-none}}|$GIVEN|$(cat input)|$NCCL_DEBUG"'
    said = say(runtime, tmp_path, f"{script}; echo out >output", GIVEN=given)
    path, _, rest = said.partition("|")
    assert path.startswith(PATH) and rest == f"of image|none|{given}|of host|INFO\n"
    assert (tmp_path / "output").read_text() == "out\n"
    with pytest.raises(HostError, match="cannot show"), runtime.open(tmp_path / "a:b"):
        pass
