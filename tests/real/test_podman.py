"""Jobs in containers of podman without root, as two users, on a real Slurm of two nodes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab import podman, slurm, small_image
from lab.jobs import Ended, Fabric, Jobs, copy_fabric
from lab.slurm import slurm_cluster
from lab.slurm_files import FIRST_USER

from envbuild.recipe.targets import host_arch

from .conftest import REPOSITORY

USERS = ("ann", "bob")
SLOW = "cid"  # whose job runs until its time limit, beside the others
ALL = (*USERS, SLOW)
SITE = '[stage]\ndir = "/tmp"\n\n[container]\nruntime = "podman"\n'
SCRATCH = "/tmp/of-a-job-whose-folder-has-a-name-so-long-that-podman-refuses-sockets"
LIMIT = "00:01:00"  # the shortest of Slurm
LONG = ("6", "1", "--dataset_size", "4000")
AWKWARD = ['it\'s "q"', "$HOME `id` \\", "*", "", "--flag=a b", "naïve\ttab", "a$$b ${local_rank}"]
TARGET = f"cpu-{host_arch()}"
# Of an image that says as a job does, and of one that the job has from its host alone.
VARIABLES = {"PATH": small_image.PATH, "OF_IMAGE": "image", "OMP_NUM_THREADS": "77"}


@dataclass
class Rootless:
    """The cluster, the image without torch in its forms, the nodes' libfabric, and a registry without TLS on the login
    host, which registries.conf has to say."""

    jobs: Jobs
    small: Path
    layout: str
    digest: str
    fabric: Fabric
    registry: str

    @property
    def conf(self) -> str:
        return str(self.jobs.cluster.shared / "registries.conf")

    def write_site(self, **paths: str) -> None:
        """Jobs run in podman, with the nodes' libfabric; `paths` are more of that table."""
        table = SITE + self.fabric.table(*self.fabric.needs)
        self.jobs.write_site(table, CONTAINERS_REGISTRIES_CONF=self.conf)
        more = "".join(f'{name} = "{path}"\n' for name, path in paths.items())
        self.jobs.site.write_text(self.jobs.site.read_text().replace("[paths]\n", f"[paths]\n{more}"))

    def push(self, layout: str, name: str) -> str:
        """Copy the image of a layout into the registry; its name there."""
        name, line = f"{self.registry}/team/{name}", ["skopeo", "copy", "--quiet", "--preserve-digests"]
        line += ["--dest-tls-verify=false", layout, f"docker://{name}:1"]
        self.jobs.cluster.until(lambda: self.jobs.cluster.run(line).returncode == 0)
        return name

    def submit(self, user: str, artifact: str | Path, *options: str | Path, arguments: tuple[str, ...] = ()) -> int:
        """Submit a job as `user`; its name is the user's."""
        shared = self.jobs.cluster.shared
        script = Path(tempfile.mkdtemp(dir=shared)) / "job.sbatch"
        self.jobs.render(artifact, *options, "--name", user, "--out", script, "--", *arguments)
        home = shared / f"home-{user}"
        variables = {"HOME": str(home), "USER": user, "LOGNAME": user, "OF_HOST": "host", "CUDA_HOME": "/of/the/host"}
        return self.jobs.cluster.sbatch(script, f"--uid={user}", f"--gid={user}", env=variables)

    def single(
        self, user: str, text: str, *arguments: str, image: str | Path = "", options: tuple[str, ...] = ()
    ) -> int:
        """Submit one process of the small image, which runs the script `text`."""
        script = Path(tempfile.mkdtemp(dir=self.jobs.cluster.shared)) / "script.py"
        script.write_text(text)
        script.parent.chmod(0o755)
        line = ("--unverified", "--target", TARGET, "--strategy", "single", "--script", script, *options)
        return self.submit(user, image or self.small, *line, arguments=arguments)

    def nothing_left(self, *users: str) -> None:
        """Assert that the nodes have no process, no mount and no folder of the users' containers."""
        names = users or USERS
        there = f"ps -o pid=,args= -u {','.join(names)}"
        for number in (FIRST_USER + ALL.index(user) for user in names):
            there += f"; grep fuse[.].*-podman-{number} /proc/self/mounts"
            there += f"; ls -d /tmp/envbuild-podman-{number}/*/ {SCRATCH}/*-podman-{number}-*"
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
    with slurm_cluster(folder / "cluster", users=ALL, cpus=6, share=[session_store]) as cluster:
        shared = cluster.shared
        shared.chmod(0o1777)
        (shared / "logs").mkdir(mode=0o1777)
        (shared / "logs").chmod(0o1777)
        for number, user in enumerate(ALL, start=FIRST_USER):
            (shared / f"home-{user}").mkdir()
            os.chown(shared / f"home-{user}", number, number)
        digest = podman.write_layout(tree, shared / "an-_OCI layout", VARIABLES)
        small = small_image.write_image(tree, shared / "small.sqsh", **VARIABLES)
        jobs = Jobs(cluster, {"ENVBUILD_STORE": str(session_store)})
        registry = f"{cluster.address('ctl')}:5000"
        (shared / "registries.conf").write_text(f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n')
        storage = f"storage: {{filesystem: {{rootdirectory: {cluster.folder}/registry}}}}"
        (cluster.folder / "registry.yml").write_text(f"version: 0.1\n{storage}\nhttp: {{addr: {registry}}}\n")
        serve = ["docker-registry", "serve", cluster.folder / "registry.yml"]
        server = cluster.popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        fabric = copy_fabric(shared / "stack")
        made = Rootless(jobs, small, f"oci:{shared / 'an-_OCI layout'}@{digest}", digest, fabric, registry)
        made.write_site()
        yield made
        server.terminate()
        server.wait()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def limited(rootless: Rootless) -> int:
    """A job that runs until its time limit, beside those of the tests before its own."""
    return rootless.single(SLOW, _WRITER, options=("--time", LIMIT))


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
import ctypes, json, os, pathlib, sys
ctypes.CDLL("libfabric.so.1")
seen = {"arguments": sys.argv[1:], "uid": os.getuid(), "variables": dict(os.environ), "root": os.listdir("/")}
seen["cpus"] = len(os.sched_getaffinity(0))
maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
seen["fabric"] = sorted({line.split()[5] for line in maps if "libfabric" in line})
pathlib.Path(os.environ["ENVBUILD_RUN"], "seen").write_text(json.dumps(seen))
sys.exit(7)
"""


def seen(rootless: Rootless, job: int, user: str) -> tuple[dict[str, Any], Ended]:
    """What the script _SEEN wrote."""
    ended = rootless.jobs.ended(job, user)
    assert (ended.run / "seen").exists(), ended.log
    assert ended.end.exit_code == 7, ended.log
    return json.loads((ended.run / "seen").read_text()), ended


def judge(rootless: Rootless, found: dict[str, Any]) -> None:
    """Assert what every container sees."""
    assert found["fabric"] == [rootless.fabric.path]
    assert found["arguments"] == AWKWARD and found["uid"] == 0 and "tree" not in found["root"]
    variables = found["variables"]
    assert variables["OF_IMAGE"] == "image" and variables["SLURM_JOB_ID"] and variables["OMP_NUM_THREADS"] == "2"
    assert not {"OF_HOST", "CUDA_HOME", "XDG_RUNTIME_DIR"} & variables.keys()


def test_two_users_get_their_arguments_and_the_images_variables(rootless: Rootless) -> None:
    """At the same time, on a scratch disk. A .sqsh, and an OCI layout whose digest podman compares."""
    jobs = rootless.jobs
    for node in jobs.cluster.nodes:
        jobs.cluster.run(["mkdir", "--mode=1777", SCRATCH], on=node, check=True)
    rootless.write_site(scratch=SCRATCH)
    small = rootless.single("ann", _SEEN, *AWKWARD)
    layout = rootless.single("bob", _SEEN, *AWKWARD, image=rootless.layout)
    other = rootless.single("bob", _SEEN, image=f"{rootless.layout.partition('@')[0]}@sha256:{'0' * 64}")
    rootless.write_site()
    for job, user in ((small, "ann"), (layout, "bob")):
        found, ended = seen(rootless, job, user)
        judge(rootless, found)
        assert (ended.run / "seen").stat().st_uid == FIRST_USER + USERS.index(user)
    refused = rootless.jobs.ended(other, "bob")
    assert refused.end.state == "FAILED" and "holds another image than sha256:0000" in refused.log, refused.log
    rootless.nothing_left()


# Saves its state in two seconds when it is asked to end, and has nothing to do if there is one.
_WRITER = """\
import os, pathlib, signal, sys, time
run = pathlib.Path(os.environ["ENVBUILD_RUN"])

def end(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(2)
    (run / "state").write_text("whole")
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
if (run / "state").exists():
    (run / "resumed").touch()
    sys.exit(0)
(run / "up").touch()
while True:
    time.sleep(0.1)
"""


def test_a_container_that_is_told_to_end_saves_its_state_and_a_cancelled_one_leaves_nothing(rootless: Rootless) -> None:
    """By a signal to every process of the step, and by scancel."""
    jobs, cluster = rootless.jobs, rootless.jobs.cluster
    told, cancelled = (rootless.single(user, _WRITER) for user in ("bob", "ann"))
    runs = [cluster.shared / f"{user}_{job}" for user, job in (("bob", told), ("ann", cancelled))]
    cluster.until(lambda: all((run / "up").exists() for run in runs))
    for job, options in ((told, ["--signal=TERM"]), (cancelled, [])):
        cluster.run(["scancel", *options, str(job)], check=True)
    ended = jobs.ended(told, "bob")
    assert (runs[0] / "state").exists(), ended.log
    assert jobs.ended(cancelled, "ann").end.state == "CANCELLED"
    rootless.nothing_left()


def test_an_image_of_a_registry_is_pulled_by_its_digest(rootless: Rootless) -> None:
    name = rootless.push(rootless.layout.partition("@")[0], "small")
    found, _ = seen(rootless, rootless.single("ann", _SEEN, *AWKWARD, image=f"{name}@{rootless.digest}"), "ann")
    judge(rootless, found)
    rootless.nothing_left()


def test_a_job_saves_its_state_before_its_time_limit_and_goes_on_when_it_is_requeued(
    rootless: Rootless, limited: int
) -> None:
    """By Slurm's own clock."""
    jobs, cluster = rootless.jobs, rootless.jobs.cluster
    ended = jobs.ended(limited, SLOW)
    assert (ended.run / "up").exists() and (ended.run / "state").exists(), ended.log
    assert not (ended.run / "resumed").exists()
    cluster.run(["scontrol", "requeue", str(limited)], check=True)
    cluster.resume_now(limited)
    again = jobs.ended(limited, SLOW)
    assert (ended.run / "resumed").exists() and again.end.state == "COMPLETED", again.log
    rootless.nothing_left(*ALL)


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


@pytest.fixture(scope="module")
def verifier(rootless: Rootless) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python as ann on a node; she may read what is closed to others, as pytest's folders and a checkout may be."""
    home = rootless.jobs.cluster.shared / "home-ann"
    variables = {"HOME": str(home), "USER": "ann", "OF_HOST": "x", "PYTHONPATH": str(REPOSITORY)}
    variables |= {"ENVBUILD_STORE": str(home / "store"), "ENVBUILD_SITE": str(home / "site.toml")}
    (home / "site.toml").write_text(f'[registries."{rootless.registry}"]\ninsecure = true\n')
    line: list[str | Path] = ["setpriv", f"--reuid={FIRST_USER}", f"--regid={FIRST_USER}", "--clear-groups"]
    line += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", sys.executable]
    return lambda *words: rootless.jobs.cluster.run([*line, *words], on="n1", cwd=home, env=variables, timeout_s=300)


def test_a_verification_starts_programs_of_an_image_by_podman(
    rootless: Rootless, verifier: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    home = rootless.jobs.cluster.shared / "home-ann"
    done = verifier("-c", _VERIFIES, rootless.small, home)
    assert done.returncode == 0, done.stderr
    name, code, out, err = json.loads(done.stdout)
    assert (code, err) == (7, ""), err
    assert out == f'{small_image.PATH}|image|none|it\'s "given" $HOME|/workspace|of the host\n'
    assert name.startswith("podman ") and name.endswith(" (unpacked)")
    assert (home / "out").stat().st_uid == FIRST_USER


def test_an_image_of_a_layout_and_of_a_registry_is_verified_without_a_daemon(
    rootless: Rootless, verifier: Callable[..., subprocess.CompletedProcess[str]], tiny_squash: dict[str, Any]
) -> None:
    cluster, home = rootless.jobs.cluster, rootless.jobs.cluster.shared / "home-ann"
    layout = f"oci:{cluster.shared}/tiny"
    line = ("docker", "tiny_image", "--target", TARGET, "--locked", "--no-verify", "--out", layout)
    digest = tiny_squash["command"].json(*line)["digest"]
    name = rootless.push(layout, "tiny")
    receipt = home / f"build/tiny_image/{TARGET}/docker.receipt.json"
    for image, pushed in ((layout, None), (name, f"{name}@{digest}")):
        done = verifier("-m", "envbuild", "verify", f"{image}@{digest}", "--runtime", "podman")
        assert (done.returncode, done.stdout) == (0, f"{image}@{digest}\n"), done.stderr
        made = json.loads(receipt.read_text())
        assert made["passed"] and made["runtime"].startswith("podman "), made
        about = made["artifact"]
        assert (about["kind"], about["digest"], about.get("pushed")) == ("docker", digest, pushed)
    for image, code, words in ((layout, 2, f"holds {digest}, not sha256:000"), (name, 4, "404")):
        done = verifier("-m", "envbuild", "verify", f"{image}@sha256:{'0' * 64}", "--runtime", "podman")
        assert done.returncode == code and words in done.stderr, done.stderr
    key = home / "key.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    key.chmod(0o644)
    signed = verifier("-m", "envbuild", "attest", f"{layout}@{digest}", "--key", str(key))
    assert signed.returncode == 0, signed.stderr
    assert (home / signed.stdout.strip()).samefile(receipt.with_name("docker.sigstore.json"))
    assert not list((home / "store").glob("*ed/*")), "working folders"
    assert cluster.run(["sh", "-c", "ps -u ann -o args= | grep -v /usr/bin/podman"], on="n1").stdout == ""
