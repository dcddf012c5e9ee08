"""enroot's folders on a node that users share: each user has his own, and what another one put there is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from unit.job_plans import AWS, MOUNTS, PLAN, SQSH, executable

from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.jobs.script import node_program, settings
from envbuild.jobs.staging import container_of
from envbuild.runtimes import RUNTIMES

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")
ANN, BOB = 60001, 60002
# Stands in for enroot where it cannot mount: unpacks images into its data folder, which it makes for its user alone.
_ENROOT = """\
#!/bin/sh
set -e
mkdir -p -m 0700 "$ENROOT_DATA_PATH" "$XDG_RUNTIME_DIR/enroot"
case "$1 $*" in
*/bin/true) exit 1 ;;
create*) mkdir "$ENROOT_DATA_PATH/$4" ;;
remove*) rmdir "$ENROOT_DATA_PATH/$3" ;;
start*) ls -d "$ENROOT_DATA_PATH"/envbuild-*; ls -ldn "$ENROOT_DATA_PATH" ;;
esac
"""
_BEFORE = """\
set -eu
name=n0 restarts=1 ENVBUILD_RUN=/fsx/me/run
stop() {
    echo "$1" >&2
    exit 1
}
"""


@pytest.fixture
def node() -> Iterator[Path]:
    """A folder with `scratch` and `tmp`, which all users may write to."""
    folder = Path(tempfile.mkdtemp(prefix="node-"))
    folder.chmod(0o755)
    for name in ("scratch", "tmp"):
        (folder / name).mkdir()
        (folder / name).chmod(0o1777)
    executable(folder / "bin/enroot", _ENROOT).chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def _start(node: Path, user: int) -> subprocess.CompletedProcess[str]:
    """Start the container of a job of `user` as the node program does."""
    site = replace(AWS, paths=replace(AWS.paths, scratch=str(node / "scratch")))
    plan = replace(PLAN, artifact=SQSH, runtime="enroot", mounts=MOUNTS, site=site)
    start = RUNTIMES["enroot"].start
    assert start is not None
    return subprocess.run(
        ["sh", "-c", _BEFORE + start(container_of(plan), "/opt/env/bin/python"), "node-1.sh", "preflight"],
        env={
            "PATH": f"{node}/bin:/usr/bin:/bin",
            "TMPDIR": str(node / "tmp"),
            "SLURM_JOB_ID": "7",
            "SLURM_CLUSTER_NAME": "lab",
        },
        cwd="/",
        user=user,
        group=user,
        extra_groups=[],
        text=True,
        capture_output=True,
    )


def test_a_second_user_has_a_folder_of_his_own_and_empty_ones_are_removed(node: Path) -> None:
    kept = node / "scratch" / f"enroot-{ANN}"
    kept.mkdir(mode=0o700)
    (kept / "an image of Ann's").mkdir()
    for path in (kept, kept / "an image of Ann's"):
        os.chown(path, ANN, ANN)
    for user in (ANN, BOB):
        done = _start(node, user)
        assert done.returncode == 0, done.stderr
        assert f"scratch/enroot-{user}/envbuild-lab-{user}-7-1-n0-" in done.stdout
        mode, _links, owner, *_ = done.stdout.splitlines()[1].split()
        assert (mode, owner) == ("drwx------", str(user))
    assert list((node / "scratch").iterdir()) == [kept]
    assert [path.name for path in kept.iterdir()] == ["an image of Ann's"]
    assert not list((node / "tmp").iterdir())


# Stands in for enroot with squashfuse: a server in the same step, which ends on SIGTERM unless it inherits that the
# signal is ignored (as libfuse does), holds what the program reads.
_WITH_SERVER = """\
#!/bin/sh
case "$*" in */bin/true) exit 0 ;; esac
sleep 300 &
echo $! >"$RUN/server"
while [ "$1" != "$PROGRAM" ]; do shift; done
exec "$@"
"""
_SAVES = """\
trap 'told=yes' TERM
told=
: >"$ENVBUILD_RUN/up"
while [ -z "$told" ]; do sleep 0.1; done
sleep 0.5
readlink "/proc/$(cat "$ENVBUILD_RUN/server")/exe" || exit 135 # a bus error
: >"$ENVBUILD_RUN/state"
"""


def test_a_stand_in_of_enroot_keeps_its_file_server_until_the_training_has_saved_its_state(tmp_path: Path) -> None:
    """scancel and the time limit send SIGTERM to every process of a step."""
    run = tmp_path / "pt_cpu_7"
    run.mkdir()
    artifact = replace(SQSH, python="/bin/sh")
    plan = replace(
        PLAN,
        artifact=artifact,
        runtime="enroot",
        mounts=MOUNTS,
        nodes=1,
        strategy="single",
        nproc_per_node=1,
        command=("-c", _SAVES),
        run_files=(),
        work=str(tmp_path),
    )
    srun = SCHEDULERS["slurm"].launchers["srun"]
    (run / "settings-0.sh").write_text(settings(plan, srun))
    program = f"{sys.executable} -I -m ddp_train.launch"
    node = executable(
        run / "node-0.sh", node_program(plan, srun).replace("/bin/sh -I -X utf8 -m ddp_train.launch", program)
    )
    executable(tmp_path / "bin/enroot", _WITH_SERVER)
    variables = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "RUN": str(run),
        "PROGRAM": sys.executable,
        "SLURM_NODEID": "0",
        "TMPDIR": str(tmp_path),
        "XDG_DATA_HOME": str(tmp_path),
    }
    line = ["sh", node, "training", run / "settings-0.sh"]
    with subprocess.Popen(line, env=variables, start_new_session=True) as step:
        try:
            deadline = time.monotonic() + 20
            while not (run / "up").exists():
                assert step.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            os.killpg(step.pid, signal.SIGTERM)
            assert step.wait(20) == 0
        finally:
            os.killpg(step.pid, signal.SIGKILL)
    assert (run / "state").exists()


@pytest.mark.parametrize("place", ["scratch/enroot-{}", "tmp/envbuild-{}-run-1"])
@pytest.mark.parametrize("what", ["link", "another's", "open to all", "file"])
def test_what_another_user_put_there_is_refused(node: Path, place: str, what: str) -> None:
    path = node / place.format(BOB)
    match what:
        case "link":
            own = node / "tmp/of-bob"
            own.mkdir(mode=0o700)
            os.chown(own, BOB, BOB)
            path.symlink_to(own)
        case "file":
            path.touch()
            os.chown(path, BOB, BOB)
        case _:
            path.mkdir(mode=0o700)
            path.chmod(0o777 if what == "open to all" else 0o755)
            owner = BOB if what == "open to all" else ANN
            os.chown(path, owner, owner)
    done = _start(node, BOB)
    assert done.returncode == 1
    assert f"enroot cannot use {path}: it must be a folder" in done.stderr
