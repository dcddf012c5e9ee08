"""The lab's Slurm cluster: what its nodes share and what they do not, how they fail, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import etcd as lab_etcd
from lab import lmod, slurm
from lab.slurm import Cluster, JobEnd, slurm_cluster

TESTS = Path(__file__).resolve().parents[1]
MPIRUN = "mpirun --allow-run-as-root --bind-to none --map-by ppr:1:node"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    reason = slurm.missing(pbs=True)
    if reason is not None:
        pytest.skip(reason)
    with slurm_cluster(tmp_path / "cluster", pbs=True, second_network=True) as running:
        yield running


def write(cluster: Cluster, *lines: str, shell: str = "/bin/bash") -> Path:
    script = cluster.shared / "job.sh"
    script.write_text("\n".join([f"#!{shell}", *lines, ""]))
    return script


def log(cluster: Cluster) -> list[str]:
    return (cluster.shared / "log").read_text().splitlines()


def test_a_job_runs_on_both_nodes_by_srun_mpirun_and_ssh(cluster: Cluster) -> None:
    script = write(
        cluster,
        "#SBATCH -N 2 -o log",
        "set -e",
        "srun --label hostname | sort",
        f"{MPIRUN} hostname | sort",
        'for host in $(scontrol show hostnames); do ssh "$host" hostname; done',
        "exit 3",
    )
    assert cluster.wait(cluster.sbatch(script)) == JobEnd("FAILED", 3, 0)
    assert log(cluster) == ["0: n1", "1: n2", "n1", "n2", "n1", "n2"]


def test_a_submission_that_slurm_refuses_is_raised_with_its_words(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError, match="invalid partition specified: nosuch"):
        cluster.sbatch(write(cluster, "true"), "--partition=nosuch")


def test_a_job_that_does_not_end_is_cancelled(cluster: Cluster) -> None:
    job = cluster.sbatch(write(cluster, "sleep 100"), "-o", "log")
    with pytest.raises(TimeoutError, match="did not end in"):
        cluster.wait(job, 0.5)
    assert cluster.wait(job).state == "CANCELLED"


def test_nodes_have_their_own_network_names_and_temporary_files(cluster: Cluster) -> None:
    listen = "import socket as s; l = s.create_server(('', 5000)); print(1, flush=True); [l.accept() for _ in '12']"
    server = cluster.popen(["python3", "-c", listen], on="n1")
    assert server.stdout is not None
    server.stdout.readline()
    reach = ["timeout", "3", "bash", "-c", 'exec 3<>"/dev/tcp/$0/5000"']
    assert cluster.run([*reach, "n1"], on="n2").returncode == 0
    assert cluster.run([*reach, cluster.address("n1", 1)], on="n2").returncode == 0
    assert cluster.run([*reach, "127.0.0.1"], on="n2").returncode == 1
    route = cluster.run(["ip", "-o", "route", "get", cluster.address("n1", 1)], on="n2").stdout
    assert "dev eth1 src 10.89.8.12" in route

    cluster.set_hosts("n2", "127.0.0.1 localhost\n127.0.1.1 n2\n")
    name = ["getent", "ahostsv4", "n2"]
    assert "127.0.1.1" in cluster.run(name, on="n2").stdout
    assert cluster.address("n2") in cluster.run(name, on="n1").stdout
    assert cluster.run(["getent", "hosts", "n1"], on="n2").returncode == 2
    cluster.set_hosts("n2")
    assert cluster.run(["getent", "hosts", "n1"], on="n2").returncode == 0

    for folder in ("/tmp", "/dev/shm", str(cluster.shared)):
        cluster.run(["touch", f"{folder}/own"], on="n1", check=True)
    seen = [(cluster.run(["ls", folder], on="n2").stdout) for folder in ("/tmp", "/dev/shm")]
    assert "own" not in "".join(seen)
    assert (cluster.shared / "own").exists()


def test_a_firewall_drops_what_comes_for_a_port_or_from_a_node(cluster: Cluster) -> None:
    ssh = ["ssh", "-o", "ConnectTimeout=1", "n1", "hostname"]
    cluster.block("n1", port=22)
    assert "timed out" in cluster.run(ssh, on="n2").stderr
    cluster.unblock("n1")
    cluster.block("n1", source="n2", reject=True)
    assert "refused" in cluster.run(ssh, on="n2").stderr
    assert cluster.run(ssh, on="ctl").stdout == "n1\n"
    cluster.unblock("n1")
    assert cluster.run(ssh, on="n2").stdout == "n1\n"


def test_a_job_whose_node_loses_power_starts_again_and_ends(cluster: Cluster) -> None:
    script = write(
        cluster,
        "#SBATCH -N 2 -o log --requeue --open-mode=append",
        "echo start ${SLURM_RESTART_COUNT:-0}",
        '[ "${SLURM_RESTART_COUNT:-0}" = 1 ] || srun bash -c "echo step; sleep 100"',
    )
    job = cluster.sbatch(script)
    cluster.until(lambda: (cluster.shared / "log").exists() and log(cluster).count("step") == 2)
    cluster.kill_node("n2")
    assert cluster.states()["n2"].startswith("DOWN")
    assert cluster.run(["hostname"], on="n1").stdout == "n1\n"
    cluster.start_node("n2")
    cluster.resume_now(job)
    assert cluster.wait(job) == JobEnd("COMPLETED", 0, 1)
    assert [line for line in log(cluster) if line.startswith("start")] == ["start 0", "start 1"]


def test_modules_load_and_purge_in_a_batch_script(cluster: Cluster) -> None:
    if reason := lmod.missing():
        pytest.skip(reason)
    awkward = 'it\'s "q" \\ $HOME'
    modules = {"python/3.11": {"PATH": "/opt/py311/bin", "LAB_NOTE": awkward}, "cuda/12.6": {}}
    lmod.module_tree(cluster.modules, modules)
    script = write(
        cluster,
        "#SBATCH -o log",
        "module load python/3.11 cuda/12.6",
        'echo "${PATH%%:*}"; echo "$LAB_NOTE"; echo "$LOADEDMODULES"',
        "module load nosuch 2>/dev/null; echo $?",
        'module purge; echo "${LAB_NOTE-gone}"',
        shell="/bin/bash -l",
    )
    assert cluster.wait(cluster.sbatch(script)).state == "COMPLETED"
    assert log(cluster) == ["/opt/py311/bin", awkward, "python/3.11:cuda/12.6", "1", "gone"]


def test_qsub_takes_pbs_directives_and_the_job_sees_pbs_alone(cluster: Cluster) -> None:
    script = write(
        cluster,
        "#PBS -N named",
        "#PBS -q main",
        "#PBS -l select=2:ncpus=2:mpiprocs=2",
        "#PBS -l walltime=00:05:00",
        "#PBS -j oe",
        "#PBS -o log",
        'sort "$PBS_NODEFILE"',
        'echo "$PBS_JOBID $PBS_JOBNAME $PBS_O_WORKDIR" $(compgen -e | grep -c "^SLURM")',
        'ssh "$(tail -n 1 "$PBS_NODEFILE")" ls "$PBS_NODEFILE"',
        f'{MPIRUN} --hostfile "$PBS_NODEFILE" hostname | sort',
    )
    job = cluster.qsub(script)
    assert cluster.wait(job).state == "COMPLETED"
    rows = log(cluster)
    assert rows[:5] == ["n1", "n1", "n2", "n2", f"{job}.ctl named {cluster.shared} 0"]
    assert "No such file" in rows[5]
    assert rows[6:] == ["n1", "n2"]
    assert cluster.job(job)["TimeLimit"] == "00:05:00"


def test_an_etcd_on_one_node_is_reached_from_the_other(cluster: Cluster) -> None:
    if reason := lab_etcd.missing():
        pytest.skip(reason)
    get = "import urllib.request as u; print(u.urlopen('{}/v2/keys/', timeout=5).read().decode())"
    with lab_etcd.etcd(cluster.shared, cluster.address("n1"), cluster=cluster, on="n1") as url:
        answer = cluster.run(["python3", "-c", get.format(url)], on="n2", check=True).stdout
        assert json.loads(answer)["node"]["dir"] is True
    cluster.until(lambda: cluster.run(["pgrep", "etcd"], on="n1").returncode == 1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_tests_are_ended(tmp_path: Path, how: signal.Signals) -> None:
    if reason := slurm.missing():
        pytest.skip(reason)
    folder = tmp_path / "cluster"
    program = (
        "import sys, time; from pathlib import Path; from lab.slurm import slurm_cluster\n"
        "with slurm_cluster(Path(sys.argv[1])) as cluster:\n"
        "    cluster.popen(['sleep', '1000'], on='n1'); cluster.popen(['sleep', '1000'])\n"
        "    cluster.kill_node('n2'); cluster.start_node('n2')\n"
        "    print('up', flush=True); time.sleep(1000)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, folder],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    assert len(using(folder)) > 8
    process.send_signal(how)
    process.wait(30)
    deadline = time.monotonic() + 10
    while using(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert using(folder) == []


def using(folder: Path) -> list[str]:
    """The processes in whose namespace something of `folder` is mounted."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{folder} " in (entry / "mountinfo").read_text():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
