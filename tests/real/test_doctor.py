"""envbuild doctor and envbuild site on this host, on a real Slurm cluster, without rights, and where much is broken."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from lab import lmod, slurm
from lab.dockerd import Lab
from lab.slurm import Cluster, slurm_cluster

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
# The checks' own deadline and the start of Python, on a machine that others use too.
MOST_S = 30


@pytest.fixture(scope="module", autouse=True)
def _plain_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No pyenv: its programs in PATH and in the files of login shells are two thirds of the time of a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        path = os.environ["PATH"].split(os.pathsep)
        patch.setenv("PATH", os.pathsep.join(folder for folder in path if ".pyenv" not in folder))
        yield


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    """The findings of this host as it is."""
    return doctor("--offline")


def doctor(*options: str, code: int = 0, cwd: Path | None = None, **env: str | None) -> dict[str, dict[str, Any]]:
    """The findings of `envbuild doctor --json` by name, and the whole as "all". A variable that is None is unset."""
    variables = {k: v for k, v in {**os.environ, "PYTHONPATH": str(REPOSITORY), **env}.items() if v is not None}
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "envbuild", "doctor", "--json", *options],
        capture_output=True,
        text=True,
        env=variables,
        cwd=cwd,
        timeout=60,
    )
    assert time.monotonic() - begin < MOST_S
    return read(done, code)


def read(done: subprocess.CompletedProcess[str], code: int) -> dict[str, dict[str, Any]]:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    said = json.loads(done.stdout)
    assert said["usable"] is (code == 0)
    found: dict[str, dict[str, Any]] = {"all": said}
    for findings in said["areas"].values():
        for finding in findings:
            found.setdefault(finding["name"], finding)
            assert not finding["facts"].get("crashed"), finding
    return found


def test_what_is_said_of_this_host_is_so(plain: dict[str, dict[str, Any]]) -> None:
    assert plain["processors"]["facts"]["usable"] == len(os.sched_getaffinity(0))
    free = shutil.disk_usage(Path.cwd()).free
    assert abs(plain["current folder"]["facts"]["free"] - free) < 8 << 30  # other tests write meanwhile
    (eth,) = [i for i in plain["interfaces"]["facts"]["interfaces"] if i["name"] == "lo"]
    assert "127.0.0.1" in eth["addresses"]
    tool = shutil.which("mksquashfs")
    assert ("mksquashfs" in plain) == (tool is not None)
    if tool:
        said = subprocess.run([tool, "-version"], capture_output=True, text=True).stdout
        assert plain["mksquashfs"]["facts"]["version"] in said
    assert plain["package index"]["facts"]["asked"] is False
    assert plain["all"]["artifacts"]["venv"]["build"]["status"] != "fail"


def test_the_compressors_are_those_of_images_that_mksquashfs_makes_and_mount_mounts(
    plain: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    if os.geteuid() != 0 or not shutil.which("mksquashfs"):
        pytest.skip("needs root and squashfs-tools")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_text("x" * 10_000)
    (tmp_path / "at").mkdir()
    mounted = []
    for name in ("gzip", "lzo", "xz", "lz4", "zstd"):
        image = tmp_path / f"{name}.sqsh"
        subprocess.run(
            ["mksquashfs", tmp_path / "tree", image, "-comp", name, "-quiet"], check=True, capture_output=True
        )
        script = 'mount -o loop,ro "$0" "$1" && cat "$1/file"'
        done = subprocess.run(["unshare", "-m", "sh", "-c", script, image, tmp_path / "at"], capture_output=True)
        mounted += [name] if done.returncode == 0 else []
    if not mounted:
        assert plain["squashfs"]["facts"].get("by") != "mounting"
        return
    assert plain["squashfs"]["facts"] == {"kernel": mounted, "by": "mounting"}
    assert plain["own launch"]["facts"]["ways"][0] == "mount"


def test_the_table_for_people_has_no_password_and_nothing_is_written(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "ENVBUILD_STORE": str(tmp_path / "store"),
        "TMPDIR": str(tmp_path),
        "https_proxy": "http://ada:geheim@127.0.0.1:9",
        "PYTHONPATH": str(REPOSITORY),
    }
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "envbuild", "doctor", "--verbose"], capture_output=True, text=True, env=env
    )
    assert time.monotonic() - begin < MOST_S
    assert done.returncode == 0 and done.stderr == ""
    assert "geheim" not in done.stdout + done.stderr and "http://ada:****@127.0.0.1:9" in done.stdout
    rows = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("venv ", "conda ", "docker ", "enroot ", "apptainer "))
    ]
    assert len(rows) >= 5 and "artifact" in done.stdout
    assert list(tmp_path.iterdir()) == []


# ---- where much is broken
def test_nothing_on_path_no_home_no_folder(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'rmdir "{gone}"; exec "$0" -m envbuild doctor --json --offline'
    env = {"PATH": "/nonexistent", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        ["/bin/sh", "-c", script.replace("rmdir", "/bin/rmdir"), sys.executable],
        capture_output=True,
        text=True,
        env=env,
        cwd=gone,
    )
    found = read(done, 0)
    assert found["current folder"]["status"] == "fail" and found["home"]["status"] == "warn"
    assert "use --out" in found["all"]["artifacts"]["venv"]["build"]["remedy"]
    assert {v["run"]["status"] for v in found["all"]["artifacts"].values()} <= {"ok", "warn"}


@pytest.mark.parametrize(("text", "words"), [("stor = 1\n", "site.toml:1:1"), ("\udcff", "not UTF-8")])
def test_a_faulty_site_file_is_what_makes_it_fail(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "site.toml"
    file.write_bytes(os.fsencode(text))
    found = doctor("--offline", code=6, ENVBUILD_SITE=str(file))
    assert found["configuration"]["status"] == "fail" and words in found["configuration"]["what"]
    assert found["memory"]["status"] == "ok"


def test_a_faulty_pip_configuration_keeps_its_password(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://u:geheim@x\n[global]\n")
    found = doctor("--offline", code=6, PIP_CONFIG_FILE=str(tmp_path / "pip.conf"))
    assert "pip.conf:3" in found["configuration"]["what"] and "geheim" not in str(found)


def test_a_store_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = doctor("--offline", code=6, ENVBUILD_STORE=str(tmp_path / "file/store"))
    assert found["store"]["status"] == "fail"
    assert "ENVBUILD_STORE" in found["all"]["artifacts"]["docker"]["build"]["remedy"]


def test_tools_and_servers_that_never_answer(tmp_path: Path) -> None:
    """A program that sleeps, one that cannot start, mirrors and a daemon that take a connection and say nothing."""
    hangs = tmp_path / "bin/apptainer"
    hangs.parent.mkdir()
    hangs.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nexec sleep 300\n")
    broken = tmp_path / "bin/enroot"
    broken.write_text("#!/nonexistent/shell\n")
    for one in (hangs, broken):
        one.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        site = tmp_path / "site.toml"
        site.write_text(
            f'[mirrors]\n"https://download.pytorch.org/whl" = ["http://{address}/whl"]\n'
            f'[registries."docker.io"]\nmirrors = ["http://{address}"]\n[debian]\nmirror = "http://{address}/debian"\n'
        )
        found = doctor(
            PATH=f"{tmp_path}/bin:/usr/bin:/bin",
            ENVBUILD_SITE=str(site),
            DOCKER_HOST=f"tcp://{address}",
            PIP_INDEX_URL=f"http://{address}/simple",
            PIP_FIND_LINKS="",
            PIP_CONFIG_FILE=os.devnull,
        )
    assert found["apptainer"]["status"] == "warn" and "no answer" in found["apptainer"]["what"]
    assert found["enroot"]["status"] == "warn"
    # On a busy machine, a check as a whole may end before the question that it asks.
    late = {"facts": {"timeout": True}}
    index, torch = (found.get(name, late)["facts"] for name in ("package index", "PyTorch's index"))
    assert index.get("timeout") or index["reached"] == []
    assert "what the store holds" in found["all"]["artifacts"]["venv"]["build"]["what"]
    assert torch.get("timeout") or f"{address}/whl" in str(torch["refused"])
    assert found["docker daemon"]["facts"].get("timeout")
    assert "enroot" not in found["all"]["artifacts"]["enroot"]["run"]["what"].split(";")[0].split()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


_AUTHORITY = """\
[ca]
default_ca = lab
[lab]
database = index
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = own
[any]
commonName = supplied
[own]
basicConstraints = critical, CA:true
"""


def test_authorities_that_have_expired_or_are_none(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    (tmp_path / "index").write_text("")
    (tmp_path / "conf").write_text(_AUTHORITY)
    ask = "openssl req -newkey rsa:2048 -nodes -keyout key -subj /CN=lab -out request"
    sign = "openssl ca -config conf -batch -notext -selfsign -keyfile key -in request"
    for command in (
        ask,
        f"{sign} -out new.pem -days 2",
        f"{sign} -out old.pem -startdate 20200101000000Z -enddate 20200102000000Z",
    ):
        subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
        (tmp_path / "index").write_text("")

    def said(name: str, code: int) -> dict[str, Any]:
        unset = dict.fromkeys(("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))
        named = {"SSL_CERT_FILE": str(tmp_path / name), "PIP_CONFIG_FILE": os.devnull}
        return doctor("--offline", code=code, **unset, **named)["authorities"]

    assert said("new.pem", 0)["facts"]["count"] == 1
    assert "expired" in said("old.pem", 6)["what"]
    assert "No such file" in said("nosuch.pem", 6)["what"]


def test_a_user_without_any_right_and_an_installation_with_packages_missing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if os.geteuid() != 0 or not Path("/usr/bin/python3").exists():
        pytest.skip("only root can become another user")
    home = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    try:
        packages = home / "packages"
        # This interpreter may lie where nobody may go; Debian's does not.
        shutil.copytree(REPOSITORY / "envbuild", packages / "envbuild", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(Path(click.__file__).parent, packages / "click")
        os.chown(home, 65534, 65534)
        env = {"HOME": str(home), "PYTHONPATH": str(packages), "PATH": "/usr/bin:/bin", "TMPDIR": str(home)}
        command = [*NOBODY, "/usr/bin/python3", "-s", "-m", "envbuild", "doctor", "--json", "--offline"]
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=home)
        said = json.loads(done.stdout)
        found = {f["name"]: f for findings in said["areas"].values() for f in findings}
        assert "Traceback" not in done.stderr
        namespaces = subprocess.run([*NOBODY, "unshare", "-Um", "true"], capture_output=True).returncode == 0
        assert ("extract" in found["own launch"]["facts"]["ways"]) == namespaces
        assert "mount" not in found["own launch"]["facts"]["ways"]
        assert found["user"]["facts"] == {"uid": 65534} and found["store"]["facts"]["writable"] is True
        missing = found["packages"]["facts"]["missing"]
        assert (done.returncode == 6) == ("rattler" in missing and "requests" in missing and "deflate" in missing)
        left = [path.name for path in home.iterdir() if path.name.startswith("envbuild-doctor-")]
        assert left == []
    finally:
        shutil.rmtree(home)


def test_a_host_that_forbids_namespaces_is_told_with_the_settings_that_do(tmp_path: Path) -> None:
    """In a user namespace of our own, whose limits are ours to set."""
    script = "cd /proc/sys/user && echo 0 >max_mnt_namespaces && echo 0 >max_user_namespaces && cd - >/dev/null && "
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "ENVBUILD_STORE": str(tmp_path / "s")}
    command = ["unshare", "-Ur", "sh", "-c", f'{script} exec "$0" -m envbuild doctor --json --offline', sys.executable]
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode != 0:
        pytest.skip("user namespaces are forbidden here")
    found = read(subprocess.run(command, capture_output=True, text=True, env=env), 0)
    assert found["own launch"]["facts"]["forbidden"]["user.max_mnt_namespaces"] == "0"
    assert "sysctl -w" in found["own launch"]["remedy"]
    assert found["squashfs"]["facts"].get("by") != "mounting"
    steps = found["all"]["artifacts"]["apptainer"]
    assert {step["status"] for step in steps.values()} == {"warn"}
    assert steps["build"]["what"].startswith("unknown:"), "offline, with an empty store"
    assert steps["verify"]["what"].startswith("no:") and steps["run"]["what"].startswith("no:")


# ---- a daemon
def test_a_docker_daemon_is_asked(docker_daemon: Lab) -> None:
    found = doctor("--offline", **docker_daemon.environment())
    facts = found["docker daemon"]["facts"]
    assert facts["answers"] is True and facts["driver"] and facts["version"]
    assert found["all"]["artifacts"]["docker"]["verify"]["status"] == "ok"


# ---- on a cluster
@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    reason = slurm.missing(pbs=True) or lmod.missing()
    if reason is not None:
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("doctor") / "cluster", pbs=True) as running:
        lmod.module_tree(running.modules, {"python/3.11.7": {"LAB_PYTHON": "yes"}})
        yield running


def on(cluster: Cluster, *words: str | Path, before: tuple[str, ...] = (), code: int = 0) -> str:
    line = [*before, sys.executable, "-m", "envbuild", *map(str, words)]
    done = cluster.run(line, env={"PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def checked(cluster: Cluster, text: str, code: int = 0) -> dict[str, dict[str, str]]:
    (cluster.shared / "site.toml").write_text(text)
    said = json.loads(on(cluster, "site", "check", "./site.toml", "--offline", "--json", code=code))
    return {finding["name"]: finding for finding in said["findings"]}


def test_doctor_sees_the_cluster_and_inside_of_a_job_the_allocation(cluster: Cluster) -> None:
    said = json.loads(on(cluster, "doctor", "--json", "--offline"))
    jobs = {finding["name"]: finding for finding in said["areas"]["jobs"]}
    assert jobs["Slurm"]["facts"]["partitions"] == jobs["PBS"]["facts"]["queues"] == ["main"]
    assert jobs["pyxis"]["facts"] == {"there": False}
    cluster.set_hosts("n1", "127.0.0.1 localhost\n127.0.1.1 n1\n")
    inside = json.loads(on(cluster, "doctor", "--json", "--offline", before=("srun", "-N1", "-w", "n1")))
    cluster.set_hosts("n1")
    found = {finding["name"]: finding for findings in inside["areas"].values() for finding in findings}
    allocations = [f["what"] for f in inside["areas"]["jobs"] if f["name"] == "allocation"]
    assert any("of Slurm on n1" in what for what in allocations)
    assert found["own name"]["status"] == "warn" and "127.0.1.1 for n1" in found["own name"]["what"]
    (eth,) = [i for i in found["interfaces"]["facts"]["interfaces"] if i["name"] == "eth0"]
    assert eth["addresses"][0] == cluster.address("n1")


def test_a_file_for_the_cluster_is_written_and_passes_its_own_check(cluster: Cluster) -> None:
    on(cluster, "site", "init", "--out", "made.toml")
    text = (cluster.shared / "made.toml").read_text()
    assert 'kind = "slurm"' in text and 'partition = "main"' in text
    said = json.loads(on(cluster, "site", "show", "./made.toml", "--json"))
    values = {(v["table"], v["key"]): (v["value"], v["origin"]) for v in said["values"]}
    assert values["scheduler", "partition"] == ("main", "made.toml")
    assert values["node", "cpus"][0] == 4
    on(cluster, "site", "check", "./made.toml", "--offline")
    on(cluster, "site", "init", "--out", "made.toml", code=2)
    assert (cluster.shared / "made.toml").read_text() == text


def test_what_the_cluster_does_not_have_is_found(cluster: Cluster) -> None:
    head = '[scheduler]\nkind = "slurm"\n{scheduler}\n[modules]\nrun = [{run}]\nbuild = [{run}]\n'
    head += f'init = "{lmod.INIT}"\n'
    good = checked(
        cluster, head.format(scheduler="", run='"python/3.11.7"') + f'[paths]\nshared = "{cluster.shared}"\n'
    )
    assert good["[scheduler] partition"]["status"] == good["[modules] run"]["status"] == "ok"
    assert good["[paths] shared"]["status"] == "warn"  # a local file system, as far as anyone can tell
    bad = checked(
        cluster,
        head.format(scheduler='partition = "mian"', run='"python/3.12"')
        + '[paths]\nshared = "/nosuch/place"\n[container]\nruntime = "pyxis"\n[fabric]\ninterface = "hsn0"\n',
        code=2,
    )
    wrong = {name for name, finding in bad.items() if finding["status"] == "fail"}
    assert wrong == {"[scheduler] partition", "[modules] run", "[paths] shared", "[container] runtime"}
    assert "did you mean 'main'" in bad["[scheduler] partition"]["what"]
    assert "python/3.12" in bad["[modules] run"]["what"]
    assert bad["[fabric] interface"]["status"] == "info"  # nodes may have it
    much = checked(cluster, '[scheduler]\nkind = "slurm"\n[node]\ngpus = 8\ncpus = 5\nmemory = "1T"\n', code=2)
    assert {"[node] gpus", "[node] cpus", "[node] memory"} <= {n for n, f in much.items() if f["status"] == "fail"}
