"""Jobs in containers of podman without root, as two users, on a real Slurm of two nodes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab import podman, slurm, small_image
from lab.jobs import Ended, Jobs
from lab.slurm import slurm_cluster
from lab.slurm_files import FIRST_USER

from envbuild.recipe.targets import host_arch

from .conftest import REPOSITORY

USERS = ("ann", "bob")
SITE = '[stage]\ndir = "/tmp"\n\n[container]\nruntime = "podman"\n'
SCRATCH = "/tmp/of-a-job-whose-folder-has-a-name-so-long-that-podman-refuses-sockets"
LONG = ("6", "1", "--dataset_size", "4000")
AWKWARD = ['it\'s "q"', "$HOME `id` \\", "*", "", "--flag=a b", "naïve\ttab", "a$$b ${local_rank}"]
TARGET = f"cpu-{host_arch()}"
# Of an image that says as a job does, and of one that the job has from its host alone.
VARIABLES = {"PATH": small_image.PATH, "OF_IMAGE": "image", "OMP_NUM_THREADS": "77"}


@dataclass
class Rootless:
    """The cluster, the image without torch in its three forms, and the number of each user."""

    jobs: Jobs
    small: Path
    layout: str
    digest: str

    def submit(self, user: str, artifact: str | Path, *options: str | Path, arguments: tuple[str, ...] = ()) -> int:
        """Submit a job as `user`; its name is the user's."""
        shared = self.jobs.cluster.shared
        script = Path(tempfile.mkdtemp(dir=shared)) / "job.sbatch"
        self.jobs.render(artifact, *options, "--name", user, "--out", script, "--", *arguments)
        home = shared / f"home-{user}"
        variables = {"HOME": str(home), "USER": user, "LOGNAME": user, "OF_HOST": "host", "CUDA_HOME": "/of/the/host"}
        return self.jobs.cluster.sbatch(script, f"--uid={user}", f"--gid={user}", env=variables)

    def single(self, user: str, text: str, *arguments: str, image: str | Path = "") -> int:
        """Submit one process of the small image, which runs the script `text`."""
        script = Path(tempfile.mkdtemp(dir=self.jobs.cluster.shared)) / "script.py"
        script.write_text(text)
        script.parent.chmod(0o755)
        options = ("--unverified", "--target", TARGET, "--strategy", "single", "--script", script)
        return self.submit(user, image or self.small, *options, arguments=arguments)

    def nothing_left(self) -> None:
        """Assert that the nodes have no process, no mount and no folder of the users' containers."""
        there = f"ps -o pid=,args= -u {','.join(USERS)}; grep fuse[.] /proc/self/mounts; "
        there += f"ls -d /tmp/envbuild-podman-*/*/ {SCRATCH}/*"
        nodes, left, deadline = self.jobs.cluster.nodes, "first", time.monotonic() + 20
        while left and time.monotonic() < deadline:
            left = "".join(self.jobs.cluster.run(["sh", "-c", there], on=node).stdout for node in nodes)
        assert not left


@pytest.fixture(scope="module")
def rootless(session_store: Path) -> Iterator[Rootless]:
    if reason := slurm.missing() or podman.missing():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="podman-", dir="/tmp"))  # where every user may go, unlike pytest's
    folder.chmod(0o755)
    tree = folder / "tree"
    ctypes = next(Path("/usr/lib").glob("python3.*/lib-dynload/_ctypes.*.so"))  # it has a library of its own
    library = small_image.write_tree(tree, "/bin/mkdir", str(ctypes))
    shutil.copytree(REPOSITORY / "ddp_train", library / "ddp_train")
    for name in ("tmp", "workspace", "proc", "sys", "dev"):
        (tree / name).mkdir()
    with slurm_cluster(folder / "cluster", users=USERS, cpus=6, share=[session_store]) as cluster:
        shared = cluster.shared
        shared.chmod(0o1777)
        (shared / "logs").mkdir(mode=0o1777)
        (shared / "logs").chmod(0o1777)
        for number, user in enumerate(USERS, start=FIRST_USER):
            (shared / f"home-{user}").mkdir()
            os.chown(shared / f"home-{user}", number, number)
        digest = podman.write_layout(tree, shared / "layout", VARIABLES)
        small = small_image.write_image(tree, shared / "small.sqsh", **VARIABLES)
        jobs = Jobs(cluster, {"ENVBUILD_STORE": str(session_store)})
        jobs.write_site(SITE)
        yield Rootless(jobs, small, f"oci:{shared / 'layout'}@{digest}", digest)
    shutil.rmtree(folder, ignore_errors=True)


def test_four_ranks_train_and_go_on_from_their_snapshot_after_a_node_died(
    rootless: Rootless, squash: dict[str, Any]
) -> None:
    jobs, built = rootless.jobs, Path(squash["enroot"]["path"])
    image = jobs.cluster.shared / "pt_cpu.sqsh"
    shutil.copy(built, image)
    shutil.copy(f"{built}.receipt.json", f"{image}.receipt.json")
    job = rootless.submit("ann", image, "--nodes", "2", "--nproc-per-node", "2", "--preflight", arguments=LONG)
    run = jobs.cluster.shared / f"ann_{job}"
    jobs.cluster.until((run / "snapshot.pt").exists, 120)
    jobs.cluster.kill_node("n2")
    jobs.cluster.start_node("n2")
    jobs.cluster.resume_now(job)
    ended = jobs.ended(job, "ann")
    report = jobs.trained(ended, ranks=2)
    assert ended.end.restarts == 1 and 0 < report["start_epoch"] < int(LONG[0]), ended.log
    assert {rank["sys_prefix"] for rank in report["ranks"]} == {"/opt/env"}
    assert "the image is on the disks of 2 of 2 nodes" in ended.log and "preflight: " in ended.log
    assert (run / "snapshot.pt").stat().st_uid == FIRST_USER
    rootless.nothing_left()


_SEEN = """\
import json, os, pathlib, sys
seen = {"arguments": sys.argv[1:], "uid": os.getuid(), "variables": dict(os.environ), "root": os.listdir("/")}
seen["cpus"] = len(os.sched_getaffinity(0))
pathlib.Path(os.environ["ENVBUILD_RUN"], "seen").write_text(json.dumps(seen))
sys.exit(7)
"""


def seen(rootless: Rootless, job: int, user: str) -> tuple[dict[str, Any], Ended]:
    """What the script _SEEN wrote."""
    ended = rootless.jobs.ended(job, user)
    assert (ended.run / "seen").exists(), ended.log
    assert ended.end.exit_code == 7, ended.log
    return json.loads((ended.run / "seen").read_text()), ended


def judge(found: dict[str, Any]) -> None:
    """Assert what every container sees."""
    assert found["arguments"] == AWKWARD and found["uid"] == 0 and "tree" not in found["root"]
    variables = found["variables"]
    assert variables["OF_IMAGE"] == "image" and variables["SLURM_JOB_ID"] and variables["OMP_NUM_THREADS"] == "2"
    assert not {"OF_HOST", "CUDA_HOME", "XDG_RUNTIME_DIR"} & variables.keys()


def test_two_users_get_their_arguments_and_the_images_variables(rootless: Rootless) -> None:
    """At the same time, on a scratch disk. A .sqsh, and an OCI layout whose digest podman compares."""
    jobs = rootless.jobs
    for node in jobs.cluster.nodes:
        jobs.cluster.run(["mkdir", "--mode=1777", SCRATCH], on=node, check=True)
    jobs.site.write_text(jobs.site.read_text().replace("[paths]\n", f'[paths]\nscratch = "{SCRATCH}"\n'))
    small = rootless.single("ann", _SEEN, *AWKWARD)
    layout = rootless.single("bob", _SEEN, *AWKWARD, image=rootless.layout)
    other = rootless.single("bob", _SEEN, image=f"{rootless.layout.partition('@')[0]}@sha256:{'0' * 64}")
    jobs.write_site(SITE)
    for job, user in ((small, "ann"), (layout, "bob")):
        found, ended = seen(rootless, job, user)
        judge(found)
        assert (ended.run / "seen").stat().st_uid == FIRST_USER + USERS.index(user)
    refused = rootless.jobs.ended(other, "bob")
    assert refused.end.state == "FAILED" and "holds another image than sha256:0000" in refused.log, refused.log
    rootless.nothing_left()


# Saves its state in two seconds when it is asked to end.
_WRITER = """\
import os, pathlib, signal, sys, time
run = pathlib.Path(os.environ["ENVBUILD_RUN"])

def end(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(2)
    (run / "state").write_text("whole")
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
(run / "up").touch()
while True:
    time.sleep(0.1)
"""


def test_a_container_that_is_told_to_end_saves_its_state_and_a_cancelled_one_leaves_nothing(rootless: Rootless) -> None:
    """As at the time limit, by a signal to every process of the step, and by scancel."""
    jobs, cluster = rootless.jobs, rootless.jobs.cluster
    limit, told, cancelled = (rootless.single(user, _WRITER) for user in ("ann", "bob", "ann"))
    runs = [cluster.shared / f"{user}_{job}" for user, job in (("ann", limit), ("bob", told), ("ann", cancelled))]
    cluster.until(lambda: all((run / "up").exists() for run in runs))
    for job, options in ((limit, ["--batch", "--signal=USR1"]), (told, ["--signal=TERM"]), (cancelled, [])):
        cluster.run(["scancel", *options, str(job)], check=True)
    for job, user, run in ((limit, "ann", runs[0]), (told, "bob", runs[1])):
        ended = jobs.ended(job, user)
        assert (run / "state").exists(), ended.log
    assert jobs.ended(cancelled, "ann").end.state == "CANCELLED"
    rootless.nothing_left()


def test_an_image_of_a_registry_is_pulled_by_its_digest(rootless: Rootless) -> None:
    """The registry is on the host where users log in; without TLS, which registries.conf has to say."""
    cluster, folder = rootless.jobs.cluster, rootless.jobs.cluster.folder
    where = f"{cluster.address('ctl')}:5000"
    storage = f"storage: {{filesystem: {{rootdirectory: {folder}/registry}}}}"
    (folder / "registry.yml").write_text(f"version: 0.1\n{storage}\nhttp: {{addr: {where}}}\n")
    server = cluster.popen(["docker-registry", "serve", folder / "registry.yml"], stdout=None, stderr=None)
    try:
        name, layout = f"{where}/team/small", rootless.layout.partition("@")[0]
        push = [
            "skopeo",
            "copy",
            "--quiet",
            "--preserve-digests",
            "--dest-tls-verify=false",
            layout,
            f"docker://{name}:1",
        ]
        cluster.until(lambda: cluster.run(push).returncode == 0)
        conf = cluster.shared / "registries.conf"
        conf.write_text(f'[[registry]]\nlocation = "{where}"\ninsecure = true\n')
        rootless.jobs.write_site(SITE, CONTAINERS_REGISTRIES_CONF=str(conf))
        found, _ = seen(rootless, rootless.single("ann", _SEEN, *AWKWARD, image=f"{name}@{rootless.digest}"), "ann")
        rootless.jobs.write_site(SITE)
        judge(found)
    finally:
        server.terminate()
        server.wait()
    rootless.nothing_left()


_VERIFIES = """
import json, subprocess, sys
from pathlib import Path
from envbuild.run_environment import load_environment
from envbuild.verify.image_file import open_image_file
from envbuild.verify.image_runtime import runtime_for
runtime = runtime_for(open_image_file(Path(sys.argv[1])), "podman", load_environment())
script = 'echo "$PATH|$OF_IMAGE|${OF_HOST-none}|$GIVEN|$(ls -d /workspace)|$(test $$ -gt 1 && echo of the host)"; '
script += 'echo x >%s/out; exit 7' % runtime.work
with runtime.open(Path(sys.argv[2])) as launch:
    command, variables = launch("sh", ["-c", script], {"GIVEN": 'it\\'s "given" $HOME'})
    done = subprocess.run(command, env=dict(variables), capture_output=True, text=True)
print(json.dumps([runtime.name, done.returncode, done.stdout, done.stderr]))
"""


def test_a_verification_starts_programs_of_an_image_by_podman(rootless: Rootless) -> None:
    cluster = rootless.jobs.cluster
    shutil.copytree(REPOSITORY / "envbuild", cluster.shared / "package/envbuild")
    home = cluster.shared / "home-ann"
    variables = {"HOME": str(home), "USER": "ann", "OF_HOST": "x", "PYTHONPATH": str(cluster.shared / "package")}
    user = ["setpriv", f"--reuid={FIRST_USER}", f"--regid={FIRST_USER}", "--clear-groups"]
    line = [*user, "/usr/bin/python3", "-c", _VERIFIES, rootless.small, home]
    done = cluster.run(line, on="n1", env={**variables, "ENVBUILD_STORE": str(home / "store")})
    assert done.returncode == 0, done.stderr
    name, code, out, err = json.loads(done.stdout)
    assert (code, err) == (7, ""), err
    assert out == f'{small_image.PATH}|image|none|it\'s "given" $HOME|/workspace|of the host\n'
    assert name.startswith("podman ") and name.endswith(" (unpacked)")
    assert (home / "out").stat().st_uid == FIRST_USER
