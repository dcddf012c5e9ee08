"""What a job's values are, who decided them, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lab import artifacts

from envbuild.base.errors import UsageError, VerificationError
from envbuild.cli.commands import cli
from envbuild.cli.job import explained, job_command
from envbuild.contract.state import BuiltLayer, State
from envbuild.contract.verification import VerifySettings
from envbuild.image.layout import Blobs
from envbuild.job_inputs import open_artifact
from envbuild.jobs.model import JobArtifact, JobInputs, JobRequest
from envbuild.jobs.plan import plan_job, scheduler_of, wanted_kinds
from envbuild.jobs.plan_checks import possible_faults
from envbuild.jobs.schedulers import render
from envbuild.jobs.submit import no_scheduler_error
from envbuild.site.jobs import LAUNCHERS
from envbuild.site.settings import Site, load_site

DIGEST = "sha256:" + "ab" * 32


def _site(tmp_path: Path, text: str) -> Site:
    (tmp_path / "lab.toml").write_text(text)
    return load_site({"HOME": str(tmp_path), "USER": "ada"}, str(tmp_path / "lab.toml"))


def _opened(kind: Any = "venv", target: str = "cpu-x86_64", **more: Any) -> JobInputs:
    path = {"venv": "/e/venv", "conda": "/e/conda", "enroot": "/e/x.sqsh", "apptainer": "/e/x.sif"}
    artifact = JobArtifact(
        kind=kind,
        path=path.get(kind, f"registry.lab/x@{DIGEST}"),
        digest=DIGEST,
        recipe="pt_cpu",
        target=target,
        python="/e/venv/bin/python" if kind == "venv" else "/opt/env/bin/python",
        verified_at="2026-11-21T00:00:00+00:00",
    )
    verify = VerifySettings(nodes=2, nproc_per_node=3, epochs=7)
    return JobInputs(artifact, verify=verify, packages=frozenset({"torch"}), **more)


SLURM = '[scheduler]\nkind = "slurm"\n'
PODS = '[scheduler]\nkind = "kubernetes"\n[kubernetes]\nclaim = "c"\n'
WITH = replace(_opened(), packages=frozenset({"torch", "accelerate", "deepspeed"}))
IN_PODS = replace(WITH, artifact=_opened("docker").artifact)


def test_every_value_names_who_decided_it(tmp_path: Path) -> None:
    site = _site(
        tmp_path,
        SLURM + 'time = "02:00:00"\n[paths]\nshared = "/fsx/{user}"\n[environment]\nhttps_proxy = "http://p:3128"\n'
        "[node]\ncpus = 12\n",
    )
    plan = plan_job(JobRequest(nodes=4, current=tmp_path), _opened(), site)
    assert (plan.nodes, plan.nproc_per_node, plan.work, plan.time) == (4, 3, "/fsx/ada", "02:00:00")
    assert plan.command == ("-m", "ddp_train", "7", "1")
    assert dict(plan.run_files) == {"--checkpoint_path": "snapshot.pt", "--report": "report.json"}
    assert dict(plan.variables) == {"OMP_NUM_THREADS": "4", "https_proxy": "http://p:3128"}
    rows = {name: (value, origin) for name, value, origin in explained(plan)}
    assert rows["nodes"] == ("4", "--nodes")
    assert rows["nproc_per_node"] == ("3", "[verify] nproc_per_node of the recipe")
    assert rows["time"] == ("02:00:00", f"[scheduler] time of {tmp_path / 'lab.toml'}")
    assert rows["launcher"] == ("srun", "default on slurm")
    assert rows["https_proxy"][1] == f"[environment] https_proxy of {tmp_path / 'lab.toml'}"
    assert rows["OMP_NUM_THREADS"] == ("4", "12 CPUs for 3 ranks")
    assert rows["artifact"][1] == "receipt of 2026-11-21T00:00:00+00:00"


def test_a_container_sees_the_folder_of_a_script_beside_the_working_folder(tmp_path: Path) -> None:
    site = _site(tmp_path, SLURM + '[container]\nruntime = "apptainer"\n')
    run, scripts, deep = tmp_path / "run", tmp_path / "scripts", tmp_path / "a" / "b"
    for folder in (run, scripts, deep):
        folder.mkdir(parents=True)
    (scripts / "train.py").touch()
    (run / "link").symlink_to(deep)
    for script in ("../scripts/train.py", "link/../../scripts/train.py", f"{run}/../scripts/train.py"):
        plan = plan_job(JobRequest(script=script, current=run), _opened("apptainer"), site)
        assert plan.command == (f"{scripts}/train.py",)
        assert plan.mounts == ((str(run), str(run)), (str(scripts), str(scripts)))
    assert plan_job(JobRequest(work="../w", current=run), _opened("apptainer"), site).work == f"{tmp_path}/w"


@pytest.mark.parametrize(
    ("text", "cpus", "origin"),
    [
        ('kind = "slurm"\n', 0, "default of [node] cpus"),
        ('kind = "slurm"\nexclusive = false\n', 3, "one for each rank"),
        ('kind = "slurm"\nexclusive = false\n[node]\ncpus = 2\n', 2, "[node] cpus of "),
        ('kind = "pbs"\n', 3, "one for each rank"),
        ('kind = "pbs"\nexclusive = false\n', 3, "one for each rank"),
        ('kind = "pbs"\n[node]\ncpus = 72\n', 72, "[node] cpus of "),
    ],
)
def test_ranks_have_a_cpu_each_where_the_scheduler_would_give_them_one_in_all(
    tmp_path: Path, text: str, cpus: int, origin: str
) -> None:
    site = _site(tmp_path, f"[scheduler]\n{text}")
    plan = plan_job(JobRequest(current=tmp_path), _opened(), site)
    assert plan.cpus_per_node == cpus
    rows = {name: (value, origin) for name, value, origin in explained(plan)}
    assert rows["cpus_per_node"][0] == str(cpus)
    assert rows["cpus_per_node"][1].startswith(origin)
    asked = {"slurm": f"#SBATCH --cpus-per-task={cpus}", "pbs": f":ncpus={cpus}:"}
    script = render(plan)
    assert (asked[plan.scheduler] in script) == bool(cpus)


@pytest.mark.parametrize(
    ("runtime", "kind", "expected"),
    [
        ("none", "venv", "folder"),
        ("pyxis", "conda", "folder"),
        ("pyxis", "enroot", "pyxis"),
        ("enroot", "enroot", "enroot"),
        ("apptainer", "apptainer", "apptainer"),
        ("none", "enroot", "own"),
        ("none", "apptainer", "own"),
        ("apptainer", "enroot", "apptainer"),  # it starts a bare squashfs
        ("enroot", "apptainer", "own"),
    ],
)
def test_what_starts_an_artifact_is_what_the_site_has(tmp_path: Path, runtime: str, kind: str, expected: str) -> None:
    site = _site(tmp_path, SLURM + f'[container]\nruntime = "{runtime}"\n')
    assert plan_job(JobRequest(current=tmp_path), _opened(kind), site).runtime == expected


def test_pyxis_is_slurms_alone(tmp_path: Path) -> None:
    site = _site(tmp_path, '[scheduler]\nkind = "pbs"\n[container]\nruntime = "pyxis"\n')
    assert plan_job(JobRequest(current=tmp_path), _opened("enroot"), site).runtime == "enroot"


def test_a_container_sees_the_sites_folders_the_work_and_the_script(tmp_path: Path) -> None:
    site = _site(
        tmp_path,
        SLURM + f'[container]\nruntime = "pyxis"\nmounts = ["/fsx", "/data:/d"]\n[paths]\nshared = "{tmp_path}"\n',
    )
    (tmp_path / "train.py").write_text("")
    request = JobRequest(script="train.py", arguments=("--lr", "0.1"), work="/fsx/x", current=tmp_path)
    plan = plan_job(request, _opened("enroot"), site)
    assert plan.mounts == (("/fsx", "/fsx"), ("/data", "/d"), (str(tmp_path), str(tmp_path)))
    assert plan.command == (str(tmp_path / "train.py"), "--lr", "0.1")
    assert plan.run_files == ()


def test_a_module_of_the_artifact_is_trained_with(tmp_path: Path) -> None:
    request = JobRequest(module="pkg.train", arguments=("--lr", "0.1"), current=tmp_path)
    plan = plan_job(request, _opened("enroot"), _site(tmp_path, SLURM))
    assert (plan.command, plan.run_files, plan.origins["command"]) == (
        ("-m", "pkg.train", "--lr", "0.1"),
        (),
        "--module",
    )
    assert plan.mounts == ((str(tmp_path), str(tmp_path)),)


def test_a_script_that_only_nodes_have_is_doubted_and_one_in_the_image_is_not(tmp_path: Path) -> None:
    site = _site(tmp_path, FSX)
    plan = plan_job(JobRequest(script="/fsx/ada/t.py", current=tmp_path), _at("/fsx/ada/x.sqsh"), site)
    assert plan.command == ("/fsx/ada/t.py",)
    (doubt,) = possible_faults(plan, "x86_64")
    assert doubt == "there is no /fsx/ada/t.py on this host: the job fails where nodes do not see it"
    blobs = Blobs(tmp_path / "blobs")
    layer = artifacts.layer(blobs, {"opt/env/t.py": b"x", "opt/env/envbuild.json": artifacts.state()})
    _, config = artifacts.image(blobs, [layer])
    artifacts.docker_archive(tmp_path / "i.tar", blobs, config, [layer], "x:1")
    image = tmp_path / "x.sqsh"
    line = ["enroot", "--from", f"docker-archive:{tmp_path}/i.tar", "--out", str(image), "--no-verify"]
    CliRunner().invoke(cli, line, env={"ENVBUILD_STORE": str(tmp_path / "store")}, catch_exceptions=False)
    shared = _site(tmp_path, f'{SLURM}[paths]\nshared = "{tmp_path}"\n[container]\nruntime = "pyxis"\n')
    opened = open_artifact(str(image), ("enroot",), None, unverified=True)
    plan = plan_job(JobRequest(script="/opt/env/t.py", current=tmp_path), opened, shared)
    assert list(possible_faults(plan, "x86_64")) == []
    assert (plan.origins["command"], plan.mounts) == ("--script, in the image", ((str(tmp_path), str(tmp_path)),))
    plan = plan_job(JobRequest(script="/opt/env/none.py", current=tmp_path), opened, shared)
    assert "there is no /opt/env/none.py" in next(possible_faults(plan, "x86_64"))


def test_gpus_are_the_sites_and_a_fabric_brings_its_variables_and_plugin(tmp_path: Path) -> None:
    site = _site(
        tmp_path, SLURM + '[node]\ngpus = 4\n[fabric]\ninterface = "hsn0"\nvariables = { NCCL_IB_GID_INDEX = "3" }\n'
    )
    opened = _opened("apptainer", "cu126-aarch64", nccl="2.26.2")
    opened = replace(
        opened,
        artifact=replace(opened.artifact, fabric="efa", provider="efa"),
        layers=(BuiltLayer("aws-ofi-nccl", "1.14.0", "f"), BuiltLayer("libfabric", "1.22", "", "/opt/cray")),
    )
    plan = plan_job(JobRequest(current=tmp_path), opened, site)
    assert (plan.nproc_per_node, plan.gpus_per_node) == (4, 4)
    variables = dict(plan.variables)
    assert variables["NCCL_SOCKET_IFNAME"] == "hsn0"
    assert variables["NCCL_IB_GID_INDEX"] == "3"
    assert variables["NCCL_NET_PLUGIN"] == "/opt/env/lib/libnccl-net.so"
    assert plan.library_path == ("/opt/cray/lib64", "/opt/cray/lib")
    assert plan.origins["variables.NCCL_IB_GID_INDEX"].startswith("[fabric] variables of ")


@pytest.mark.parametrize(
    ("site", "request_", "opened", "words"),
    [
        ("", JobRequest(), _opened(), "names no scheduler"),
        (SLURM, JobRequest(), _opened("docker"), "does not run images from a registry"),
        ('[scheduler]\nkind = "kubernetes"\n', JobRequest(), _opened(), "docker RECIPE --tag"),
        (SLURM, JobRequest(), _opened(target="cu126-x86_64"), "[node] gpus"),
        (SLURM + "[node]\ngpus = 2\n", JobRequest(nproc_per_node=4), _opened(target="cu126-x86_64"), "has 2 GPUs"),
        (SLURM, JobRequest(launcher="pbsdsh"), _opened(), "one of srun, mpirun"),
        (SLURM, JobRequest(name="a b"), _opened(), "is not a valid job name"),
        (SLURM, JobRequest(time="banana"), _opened(), "is no time limit"),
        (SLURM, JobRequest(script="absent.py"), _opened(), "there is no script absent.py"),
        (SLURM, JobRequest(script="t.py", module="pkg.t"), _opened(), "without --script"),
        (SLURM, JobRequest(module="pkg/t.py"), _opened(), "such as pkg.train"),
        (SLURM, JobRequest(strategy="single", nodes=2), _opened(), "leave out --nodes"),
        (SLURM, JobRequest(rendezvous="etcd-v2"), _opened(), "needs --endpoint"),
        (SLURM, JobRequest(rendezvous="etcd-v2", endpoint="e:2379"), _opened(), "lacks python-etcd"),
        (SLURM, JobRequest(strategy="horovod"), _opened(), "/e/venv has no Horovod"),
        (SLURM, JobRequest(endpoint="e:2379"), _opened(), "--rendezvous etcd-v2"),
        (SLURM, JobRequest(strategy="accelerate"), _opened(), "has no Accelerate"),
        (SLURM, JobRequest(strategy="deepspeed"), _opened(), "has no DeepSpeed"),
        (SLURM, JobRequest(strategy="accelerate", nodes=1, nproc_per_node=1), WITH, "--strategy single"),
        (SLURM, JobRequest(strategy="accelerate", rendezvous="etcd-v2"), WITH, "leave out --rendezvous"),
        (SLURM, JobRequest(strategy="deepspeed", max_restarts=1), WITH, "leave out --max-restarts"),
        (f"{SLURM}auto_resume = true\n", JobRequest(strategy="deepspeed"), WITH, "auto_resume may replace it"),
        (PODS, JobRequest(strategy="accelerate"), IN_PODS, "is not rendered"),
        (PODS, JobRequest(strategy="deepspeed"), IN_PODS, "--strategy ddp"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_change(
    tmp_path: Path, site: str, request_: JobRequest, opened: JobInputs, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        plan_job(replace(request_, current=tmp_path), opened, _site(tmp_path, site))
    assert words in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(("site", "opened"), [(SLURM, _opened()), (PODS, IN_PODS)])
def test_an_argument_that_looks_like_a_token_is_a_doubt_that_does_not_repeat_it(
    tmp_path: Path, site: str, opened: JobInputs
) -> None:
    token = "hf_" + "aB3" * 10
    for arguments, doubts in (((f"--hf-token={token}",), 1), (("--hf-token", token), 1), (("--hf-token-file", "t"), 0)):
        request = JobRequest(module="pkg.train", arguments=arguments, current=tmp_path)
        said = list(possible_faults(plan_job(request, opened, _site(tmp_path, site)), "x86_64"))
        assert sum("looks like a secret" in one for one in said) == doubts and token not in "".join(said)


FSX = SLURM + '[paths]\nshared = "/fsx/{user}"\nscratch = "/local"\n[container]\nmounts = ["/data:/d"]\n'


def _at(path: str, target: str = "cpu-x86_64") -> JobInputs:
    opened = _opened("enroot", target)
    return replace(opened, artifact=replace(opened.artifact, path=path))


@pytest.mark.parametrize("path", ["/tmp/x.sqsh", "/var/tmp/x.sqsh", "/local/x.sqsh", "/dev/shm/x"])
def test_an_artifact_on_a_disk_that_each_node_has_for_itself_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_job(JobRequest(current=tmp_path), _at(path), _site(tmp_path, FSX))
    assert f"nodes do not see {path}" in caught.value.message
    mounted = _site(tmp_path, FSX.replace("/data:/d", "/tmp"))  # which each node's containers see
    with pytest.raises(UsageError, match="nodes do not see"):
        plan_job(JobRequest(current=tmp_path), _at(path), mounted)
    assert "/fsx/ada" in (caught.value.hint or "") and "[paths] shared" in (caught.value.hint or "")


def test_so_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    site = _site(tmp_path, FSX.replace('"/local"', f'"{tmp_path}"'))
    with pytest.raises(UsageError, match=f"nodes do not see {tmp_path}/train.py"):
        plan_job(JobRequest(script="train.py", current=tmp_path), _at("/fsx/ada/x.sqsh"), site)


@pytest.mark.parametrize(
    ("site", "path", "doubt"),
    [
        (FSX, "/fsx/ada/x.sqsh", None),
        (FSX, "/data/x.sqsh", None),
        (FSX, "/home/ada/x.sqsh", "is outside of /fsx/ada"),
        (FSX, "/fsx/adam/x.sqsh", "is outside of /fsx/ada"),
        (SLURM, "/home/ada/x.sqsh", None),
        (SLURM, "/tmp/x.sqsh", "each node has its own /tmp"),
        # Where the site's shared folder is there itself, /tmp is not a node's own.
        (SLURM + '[paths]\nshared = "/tmp/lab"\n', "/tmp/x.sqsh", "is outside of /tmp/lab"),
    ],
)
def test_a_path_that_nodes_may_not_see_is_said_aloud(tmp_path: Path, site: str, path: str, doubt: str | None) -> None:
    plan = plan_job(JobRequest(current=tmp_path), _at(path), _site(tmp_path, site))
    found = list(possible_faults(plan, "x86_64"))
    assert len(found) == (doubt is not None)
    assert all(path in one and str(doubt) in one for one in found)


def test_an_artifact_for_other_processors_than_the_nodes_is_refused(tmp_path: Path) -> None:
    site = _site(tmp_path, SLURM + '[node]\narch = "aarch64"\n')
    with pytest.raises(UsageError) as caught:
        plan_job(JobRequest(current=tmp_path), _opened(), site)
    assert caught.value.message == "/e/venv is for x86_64, and the nodes of site lab are aarch64"
    assert "--target cpu-aarch64" in (caught.value.hint or "")
    assert "[node] arch" in (caught.value.hint or "")
    plan = plan_job(JobRequest(current=tmp_path), _opened(target="cpu-aarch64"), site)
    assert list(possible_faults(plan, "x86_64")) == []


def test_where_nobody_says_what_nodes_are_another_architecture_is_a_doubt(tmp_path: Path) -> None:
    request, site = JobRequest(current=tmp_path), _site(tmp_path, SLURM)
    (doubt,) = possible_faults(plan_job(request, _opened(target="cpu-aarch64"), site), "x86_64")
    assert "/e/venv is for aarch64" in doubt and "[node] arch" in doubt
    assert list(possible_faults(plan_job(request, _opened(), site), "x86_64")) == []


HERE = {
    "venv": "/e/venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 3 -m ddp_train 7 1",
    "conda": "/opt/env/bin/python -m torch.distributed.run --standalone --nproc-per-node 3 -m ddp_train 7 1",
    "enroot": "envbuild run --bind {} /e/x.sqsh -- /opt/env/bin/python -m torch.distributed.run --standalone "
    "--nproc-per-node 3 -m ddp_train 7 1",
}


@pytest.mark.parametrize("kind", HERE)
def test_without_a_scheduler_the_command_for_this_host_is_said(tmp_path: Path, kind: str) -> None:
    site = load_site({"HOME": str(tmp_path), "USER": "ada"}, "local")
    error = no_scheduler_error(JobRequest(current=tmp_path), _opened(kind), site)
    assert error.message.startswith("site local names no scheduler")
    assert f"`{HERE[kind].format(tmp_path)}`" in (error.hint or "")


@pytest.mark.parametrize(
    ("request_", "target", "words"),
    [
        (JobRequest(script="a b.py", arguments=("$x",)), "cpu-x86_64", "--nproc-per-node 3 '{}/a b.py' '$$x'"),
        (JobRequest(arguments=("5", "1"), nproc_per_node=1), "cpu-x86_64", "--nproc-per-node 1 -m ddp_train 5 1"),
        (JobRequest(), "cu126-x86_64", "--nproc-per-node gpu -m ddp_train"),
        (JobRequest(strategy="single"), "cpu-x86_64", "`/e/venv/bin/python -m ddp_train 7 1`"),
        (
            JobRequest(strategy="accelerate", script="a b.py", arguments=("$x",)),
            "cpu-x86_64",
            "`/e/venv/bin/python -m accelerate.commands.launch --multi_gpu --num_machines 1 --num_processes 3 "
            "'{}/a b.py' '$$x'`",
        ),
        (
            JobRequest(strategy="deepspeed"),
            "cpu-x86_64",
            "`/e/venv/bin/python -m deepspeed.launcher.runner --num_gpus 3 --no_local_rank --module ddp_train 7 1`",
        ),
        (JobRequest(strategy="deepspeed"), "cu126-x86_64", "launcher.runner --no_local_rank --module ddp_train"),
        (JobRequest(strategy="horovod"), "cpu-x86_64", "`mpirun -np 3 /e/venv/bin/python -m ddp_train 7 1 --strat"),
    ],
)
def test_the_command_for_this_host_is_what_the_job_would_run(
    tmp_path: Path, request_: JobRequest, target: str, words: str
) -> None:
    (tmp_path / "a b.py").write_text("")
    site = load_site({"HOME": str(tmp_path), "USER": "ada"}, "local")
    error = no_scheduler_error(replace(request_, current=tmp_path), _opened(target=target), site)
    assert words.format(tmp_path) in (error.hint or "")


def test_a_horovod_job_is_started_by_mpirun_and_says_so_to_the_trainer(tmp_path: Path) -> None:
    plan = plan_job(
        JobRequest(strategy="horovod", arguments=("5", "1"), current=tmp_path),
        replace(_opened(), packages=frozenset({"torch", "horovod"})),
        _site(tmp_path, SLURM),
    )
    assert plan.launcher == "mpirun"
    assert plan.command == ("-m", "ddp_train", "5", "1", "--strategy", "horovod")


@pytest.mark.parametrize("packages", [None, frozenset({"tqdm"})])
def test_horovod_may_come_with_an_images_own_torch(tmp_path: Path, packages: frozenset[str] | None) -> None:
    opened = replace(_opened("enroot"), packages=packages)
    request = JobRequest(strategy="horovod", current=tmp_path)
    assert plan_job(request, opened, _site(tmp_path, SLURM)).launcher == "mpirun"


EXCLUSIVE = '[scheduler]\nkind = "slurm"\nexclusive = true\n'


@pytest.mark.parametrize(
    ("site", "threads", "origin"),
    [
        (EXCLUSIVE, None, "the CPUs that a node has, for 3 ranks"),
        (EXCLUSIVE + "[node]\ncpus = 32\n", "10", "32 CPUs for 3 ranks"),
        (EXCLUSIVE + "[node]\ncpus = 2\n", "1", "2 CPUs for 3 ranks"),
        (EXCLUSIVE + '[environment]\nOMP_NUM_THREADS = "5"\n', "5", "[environment] OMP_NUM_THREADS of"),
        (EXCLUSIVE.replace("true", "false"), "1", "3 CPUs for 3 ranks"),
        (PODS, None, None),
        (PODS + 'resources = { cpu = "12" }\n[node]\ncpus = 6\n', "4", "12 CPUs for 3 ranks"),
        (PODS + 'resources = { cpu = "6500m" }\n', "2", "6 CPUs for 3 ranks"),
        (PODS + "[node]\ncpus = 6\n", "2", "6 CPUs for 3 ranks"),
    ],
)
def test_threads_are_the_cpus_of_a_node_over_its_ranks(
    tmp_path: Path, site: str, threads: str | None, origin: str | None
) -> None:
    opened = _opened("docker" if site.startswith(PODS) else "venv")
    work = "/data" if site.startswith(PODS) else None
    plan = plan_job(JobRequest(current=tmp_path, work=work), opened, _site(tmp_path, site))
    assert dict(plan.variables).get("OMP_NUM_THREADS") == threads
    rows = {name: (value, why) for name, value, why in explained(plan)}
    if origin is None:
        assert "OMP_NUM_THREADS" not in rows
    else:
        value, why = rows["OMP_NUM_THREADS"]
        assert value == (threads or "counted on the node") and why.startswith(origin)


@pytest.mark.parametrize(("kind", "launcher"), [(kind, one) for kind, known in LAUNCHERS.items() for one in known])
def test_every_launcher_of_the_table_is_planned_and_rendered(tmp_path: Path, kind: str, launcher: str) -> None:
    site = _site(tmp_path, f'[scheduler]\nkind = "{kind}"\nlauncher = "{launcher}"\n')
    plan = plan_job(JobRequest(nodes=2, current=tmp_path), _opened(), site)
    assert plan.launcher == launcher
    code = "\n".join(line for line in render(plan).splitlines() if line.lstrip()[:1] != "#")
    assert re.search(rf"\b{launcher} ", code)


def test_the_scheduler_is_the_callers_before_the_sites(tmp_path: Path) -> None:
    site = _site(tmp_path, SLURM)
    assert scheduler_of(JobRequest(), site) == "slurm"
    assert scheduler_of(JobRequest(scheduler="pbs"), site) == "pbs"
    assert wanted_kinds("slurm", site) == ("venv", "conda")
    assert wanted_kinds("kubernetes", site) == ("docker",)


def _built(folder: Path, passed: bool | None, *, quick: bool = False) -> Path:
    """A venv as a build leaves it: its state, and a receipt unless `passed` is None."""
    state = State(
        artifact="venv",
        recipe="pt_cpu",
        recipe_digest="",
        lock_digest="",
        plan_digest="",
        target="cpu-x86_64",
        python="3.11",
        python_version="3.11.2",
        interpreter="/usr/bin/python3",
        packages=(("torch", "2.13.0", "x"),),
    )
    folder.mkdir(parents=True)
    (folder / "envbuild.json").write_text(state.render())
    if passed is not None:
        receipt = {
            "format": 1,
            "passed": passed,
            "verified_at": "2026-11-21T00:00:00+00:00",
            "artifact": {"digest": state.digest, "path": str(folder)},
            "settings": {"quick": quick},
        }
        folder.with_name(f"{folder.name}.receipt.json").write_text(json.dumps(receipt))
    return folder


def test_a_recipe_means_what_was_built_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="found no artifact of recipe 'pt_cpu'"):
        open_artifact("pt_cpu", ("venv",), None)
    folder = _built(tmp_path / "build/pt_cpu/cpu-x86_64/venv", True)
    opened = open_artifact("pt_cpu", ("enroot", "venv"), None)
    assert opened.artifact.path == str(folder)
    assert opened.artifact.python == str(folder / "bin/python")
    assert opened.packages == {"torch"}
    (tmp_path / "recipes/pt_cpu").mkdir(parents=True)
    (tmp_path / "recipes/pt_cpu/recipe.toml").write_text("")
    assert open_artifact("recipes/pt_cpu", ("venv",), None) == opened
    _built(tmp_path / "build/pt_cpu/cpu-aarch64/venv", True)
    with pytest.raises(UsageError, match="cpu-aarch64, cpu-x86_64"):
        open_artifact("pt_cpu", ("venv",), None)
    assert open_artifact("pt_cpu", ("venv",), "cpu-x86_64").artifact.target == "cpu-x86_64"


def test_a_recipe_is_looked_for_where_jobs_build_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, shared = tmp_path / "here", tmp_path / "fsx"
    here.mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(UsageError) as caught:
        open_artifact("pt_cpu", ("venv",), None, shared=str(shared))
    assert f"in build/pt_cpu or {shared}/build/pt_cpu" in caught.value.message
    built = _built(shared / "build/pt_cpu/cpu-x86_64/venv", True)
    assert open_artifact("pt_cpu", ("venv",), None, shared=str(shared)).artifact.path == str(built)
    own = _built(here / "build/pt_cpu/cpu-x86_64/venv", True)
    assert open_artifact("pt_cpu", ("venv",), None, shared=str(shared)).artifact.path == str(own)


@pytest.mark.parametrize("passed", [None, False])
def test_what_did_not_pass_is_refused_unless_the_caller_insists(tmp_path: Path, passed: bool | None) -> None:
    folder = _built(tmp_path / "venv", passed)
    with pytest.raises(VerificationError, match="no passing receipt"):
        open_artifact(str(folder), (), None)
    assert open_artifact(str(folder), (), None, unverified=True).artifact.verified_at == ""
    with pytest.raises(UsageError, match="is for cpu-x86_64"):
        open_artifact(str(folder), (), "cu126-x86_64", unverified=True)


def test_a_quick_verification_is_not_enough_unless_the_caller_says_so(tmp_path: Path) -> None:
    folder = _built(tmp_path / "venv", True, quick=True)
    with pytest.raises(VerificationError, match="was verified with --verify quick only") as caught:
        open_artifact(str(folder), (), None)
    assert caught.value.hint == f"verify it in full: `envbuild verify {folder}`"
    assert open_artifact(str(folder), (), None, quick=True).receipt is not None
    assert open_artifact(str(folder), (), None, unverified=True).receipt is not None


def test_a_receipt_of_other_content_does_not_vouch(tmp_path: Path) -> None:
    folder = _built(tmp_path / "venv", True)
    state = json.loads((folder / "envbuild.json").read_text())
    state["packages"] = [["torch", "9", "y"]]
    (folder / "envbuild.json").write_text(json.dumps(state))
    with pytest.raises(VerificationError):
        open_artifact(str(folder), (), None)


def test_an_image_is_named_by_its_digest_and_vouched_for_by_its_builds_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"registry.lab:5000/team/pt_cpu@{DIGEST}"
    with pytest.raises(VerificationError):
        open_artifact(name, ("docker",), "cpu-x86_64")
    place = tmp_path / "build/pt_cpu/cpu-x86_64/docker.receipt.json"
    place.parent.mkdir(parents=True)
    receipt = {
        "format": 1,
        "passed": True,
        "verified_at": "2026-11-21T00:00:00+00:00",
        "target": "cpu-x86_64",
        "artifact": {"digest": DIGEST, "path": "pt_cpu:cpu-x86_64", "pushed": name},
        "recipe": {"name": "pt_cpu"},
        "versions": {},
        "settings": {"nodes": 2},
    }
    place.write_text(json.dumps(receipt))
    for named in (name, "pt_cpu"):
        opened = open_artifact(named, ("docker",), None)
        assert opened.artifact.path == name
        assert opened.artifact.recipe == "pt_cpu"
    receipt["artifact"] = {"digest": DIGEST, "path": "pt_cpu:cpu-x86_64"}
    place.write_text(json.dumps(receipt))
    with pytest.raises(UsageError, match="was not pushed"):
        open_artifact("pt_cpu", ("docker",), None)
    with pytest.raises(UsageError, match="does not exist"):
        open_artifact("./nowhere", ("docker",), None)


def test_job_says_its_doubts_and_how_to_train_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = _built(tmp_path / "venv", True)
    (tmp_path / "lab.toml").write_text(SLURM + f'[paths]\nshared = "{tmp_path}/runs"\n')
    done = CliRunner().invoke(job_command, [str(folder), "--site", "./lab.toml", "--json"])
    assert done.exit_code == 0, done.output
    (doubt,) = json.loads(done.stdout)["warnings"]
    assert f"{folder} is outside of {tmp_path}/runs" in doubt
    assert f"warning: {doubt}" in done.stderr
    done = CliRunner().invoke(job_command, [str(folder), "--site", "local"])
    assert isinstance(done.exception, UsageError)
    assert f"`{folder}/bin/python -m torch.distributed.run" in (done.exception.hint or "")


@pytest.mark.parametrize(
    ("kind", "manifest", "nodes", "stage", "why"),
    [
        ("venv", DIGEST, 2, "/nvme", "[stage] dir"),
        ("conda", DIGEST, 2, "/nvme", "[stage] dir"),
        ("enroot", "", 2, "/nvme", "[stage] dir"),
        ("venv", "", 2, "", "no receipt tells the files of the environment"),
        ("venv", DIGEST, 1, "", "one node"),
    ],
)
def test_an_artifact_of_several_nodes_is_brought_to_their_disks(
    tmp_path: Path, kind: str, manifest: str, nodes: int, stage: str, why: str
) -> None:
    opened = _opened(kind)
    opened = replace(opened, artifact=replace(opened.artifact, manifest=manifest))
    plan = plan_job(JobRequest(nodes=nodes, current=tmp_path), opened, _site(tmp_path, f'{SLURM}[stage]\ndir="/nvme"'))
    assert plan.stage == stage and why in plan.origins["stage"]
