"""Slurm's scripts, run by real bash: what every process is told, and what ends a job before it trains."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.job_plans import AWS, EFA_SQSH, MODULES, MOUNTS, PLAN, SITE, SQSH, Stage, executable, recorder

from ddp_train.launch.address import source_of
from ddp_train.preflight.__main__ import parse
from envbuild.base.errors import UsageError
from envbuild.contract.manifest import write_manifest
from envbuild.jobs.model import JobPlan
from envbuild.jobs.schedulers import render
from envbuild.runtimes.enroot import TIDY
from envbuild.site.jobs import ContainerTable, ModulesTable, StageTable
from envbuild.site.tables import FabricTable, TrustTable


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, 2)


def _plan(stage: Stage, plan: JobPlan = PLAN) -> JobPlan:
    artifact = replace(plan.artifact, python=recorder(stage.folder / "env" / "python"))
    return replace(plan, work=str(stage.folder), artifact=artifact)


def _run(stage: Stage, plan: JobPlan, env: Mapping[str, str] | None = None, code: int = 0) -> tuple[str, list[Any]]:
    """What it printed, and what was called. Slurm tells the batch script the name of the node where it runs."""
    done, recorded = stage.run(render(plan), env={"SLURMD_NODENAME": "n0", **(env or {})})
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr, recorded


def _started(recorded: list[Any]) -> list[Any]:
    """Each interpreter's (arguments, variables): of each node in turn, by the nodes' numbers."""
    found = [tuple(one[1:]) for one in recorded if one[0] == "python"]
    return sorted(found, key=lambda one: one[1]["ENVBUILD_NODE"])


def _option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def _directives(plan: JobPlan) -> list[str]:
    lines = render(plan).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]


def test_every_process_is_told_the_nodes_and_where_to_meet(stage: Stage) -> None:
    said, recorded = _run(stage, _plan(stage), {"SLURM_RESTART_COUNT": "3"})
    started = _started(recorded)
    assert [variables["ENVBUILD_NODE"] for _, variables in started] == ["0", "1"]
    run = str(stage.folder / "pt_cpu_77")
    for number, (arguments, variables) in enumerate(started):
        told = {name: value for name, value in variables.items() if name.startswith("ENVBUILD_")}
        assert told == {
            "ENVBUILD_NODE": str(number),
            "ENVBUILD_NODES": "2",
            "ENVBUILD_HOSTS": "n0 n1",
            "ENVBUILD_ADDRESSES": "192.0.2.7 192.0.2.7",
            "ENVBUILD_ADDRESS": "192.0.2.7",
            "ENVBUILD_INTERFACE": "eth0",
            "ENVBUILD_PORT": "20077",
            "ENVBUILD_RUN": run,
            "ENVBUILD_RUN_ID": "pt_cpu-77-3",
        }
        assert _option(arguments, "--rdzv-endpoint") == "192.0.2.7:20077"
        assert _option(arguments, "--rdzv-id") == "pt_cpu-77-3"
        conf = f"is_host={int(number == 0)},join_timeout=900,read_timeout=300"
        assert _option(arguments, "--rdzv-conf") == conf
        assert _option(arguments, "--local-addr") == "192.0.2.7"
        assert _option(arguments, "--checkpoint_path") == f"{run}/snapshot.pt"
        assert _option(arguments, "--report") == f"{run}/report.json"
        assert variables["GLOO_SOCKET_IFNAME"] == "eth0"
        assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
        assert variables["OMP_NUM_THREADS"] == "2"
        assert not {"XDG_RUNTIME_DIR", "PYTHONPATH", "NCCL_SOCKET_IFNAME"} & set(variables)
    assert "node 1 is n1, 192.0.2.7 on eth0" in said


@pytest.mark.parametrize(
    ("interface", "found"),
    [
        ("", ("192.0.2.7", "eth0")),
        ("hsn0,hsn1", ("203.0.113.7", "hsn0")),
        ("=hsn0", ("203.0.113.7", "hsn0")),
        ("hsn", ("203.0.113.7", "hsn0")),
        ("^docker0", ("192.0.2.7", "eth0")),
        ("ib0", ("2001:db8:1::7", "ib0")),
    ],
)
def test_the_address_is_that_of_the_sites_interface_or_of_the_route(
    stage: Stage, interface: str, found: tuple[str, str]
) -> None:
    plan = replace(_plan(stage), site=replace(SITE, fabric=FabricTable(interface=interface)))
    _, recorded = _run(stage, plan)
    for arguments, variables in _started(recorded):
        assert (variables["ENVBUILD_ADDRESS"], variables["GLOO_SOCKET_IFNAME"]) == found
        host = f"[{found[0]}]" if ":" in found[0] else found[0]
        assert _option(arguments, "--rdzv-endpoint") == f"{host}:20077"


def test_without_any_route_the_first_interface_that_is_not_a_bridge_is_taken(stage: Stage) -> None:
    _, recorded = _run(stage, _plan(stage), {"SOURCE": ""})
    assert _started(recorded)[0][1]["ENVBUILD_ADDRESS"] == "192.0.2.7"


@pytest.mark.parametrize(
    ("interface", "env", "message"),
    [
        ("", {"ADDRESSES": "", "SOURCE": ""}, "reach this node at none of its addresses"),
        ("", {"SOURCE": "127.0.1.1"}, "do not reach this node at 127.0.1.1"),
        ("ib7", {}, "no interface ib7; available are eth0 hsn0 ib0; change [fabric] interface"),
    ],
)
def test_a_node_that_others_cannot_reach_is_named_before_anything_starts(
    stage: Stage, interface: str, env: dict[str, str], message: str
) -> None:
    plan = replace(_plan(stage), site=replace(SITE, fabric=FabricTable(interface=interface)))
    said, recorded = _run(stage, plan, env, code=5)
    assert message in said
    assert _started(recorded) == []


def test_one_node_without_a_network_trains(stage: Stage) -> None:
    stage.nodes = 1
    plan = replace(_plan(stage), nodes=1)
    _, recorded = _run(stage, plan, {"ADDRESSES": "", "SOURCE": ""})
    assert _started(recorded)[0][1]["ENVBUILD_ADDRESSES"] == "127.0.0.1"


def test_a_taken_port_is_left_to_its_owner(stage: Stage) -> None:
    with socket.socket() as taken:
        for number in range(1234, 9999):
            try:
                taken.bind(("127.0.0.1", 20000 + number))
                break
            except OSError:
                continue
        taken.listen()
        _, recorded = _run(stage, _plan(stage), {"SLURM_JOB_ID": f"7{number:04}"})
    assert int(_started(recorded)[0][1]["ENVBUILD_PORT"]) > 20000 + number


def test_a_preflight_that_fails_ends_the_job_before_training(stage: Stage) -> None:
    said, recorded = _run(stage, replace(_plan(stage), preflight=True), {"CODE": "1"}, code=5)
    (first, _), *_ = started = _started(recorded)
    assert first[:4] == ["-m", "ddp_train.preflight", "--arch", "x86_64"] and "--manifest" not in first
    assert all("ddp_train.preflight" in arguments for arguments, _ in started)
    assert "nothing was trained" in said


@pytest.mark.parametrize(
    ("python", "changed", "said"),
    [
        ("python3", False, "the environment is on the disks of 2 of 2 nodes"),
        ("python3", True, "reads the environment from the shared file system: envbuild.manifest changed"),
        ("/no/python3", False, "the environment is not on every node, see above: all read the shared one"),
    ],
)
def test_a_job_runs_in_the_copy_of_its_environment_or_in_the_shared_one_where_there_is_none(
    stage: Stage, python: str, changed: bool, said: str
) -> None:
    if not source_of("198.51.100.1"):
        pytest.skip("this host has no address for other nodes")
    root = stage.folder / "an env"
    artifact = replace(PLAN.artifact, path=str(root), python=recorder(root / "bin" / "python"))
    digest = write_manifest(root, 1)[0].digest
    if changed:
        (root / "envbuild.manifest").write_text("")
    site = replace(PLAN.site, stage=StageTable(python=python))
    plan = replace(
        PLAN, work=str(stage.folder), artifact=replace(artifact, manifest=digest), site=site, stage_bytes=10**9
    )
    told, recorded = _run(stage, replace(plan, stage=str(stage.folder / "a disk")))
    assert said in told
    copy = stage.folder / f"a disk/envbuild-{os.getuid()}/pt_cpu_77-0"
    where = str(copy if "of 2 nodes" in said else root)
    started = _started(recorded)
    assert len(started) == 2 and {variables["VIRTUAL_ENV"] for _, variables in started} == {where}
    assert all(variables["PATH"].startswith(f"{where}/bin:") for _, variables in started)


@pytest.mark.parametrize(("exact", "asked"), [(False, []), (True, ["--exact", "--wait", "300"])])
def test_nodes_compare_the_files_of_a_verified_environment(stage: Stage, exact: bool, asked: list[str]) -> None:
    plan = _plan(stage)
    plan = replace(plan, artifact=replace(plan.artifact, manifest="sha256:m"), preflight=True, exact=exact)
    for arguments, _ in _started(_run(stage, plan)[1]):
        if "ddp_train.preflight" in arguments:
            assert arguments[arguments.index("--manifest") :] == ["--manifest", "sha256:m", *asked]
            parse(arguments[2:])


@pytest.mark.parametrize(("code", "files"), [(0, ["/etc/site a.toml"]), (5, ["/a.toml", "/b.toml"]), (127, [])])
def test_a_site_with_signers_lets_envbuild_compare_the_artifact_before_anything_starts(
    stage: Stage, code: int, files: list[str]
) -> None:
    trusted = replace(SITE, trust=TrustTable(signers=("/ci.pub",)), files=tuple(map(Path, files)))
    asked, command = stage.folder / "asked", stage.folder / "env build"
    if code != 127:
        executable(command, f'#!/bin/sh\nprintf "%s\\n" "$@" >{shlex.quote(str(asked))}\nexit {code}\n')
    plan = replace(_plan(stage), site=trusted, envbuild=str(command), preflight=True)
    said, recorded = _run(stage, plan, code=5 if code else 0)
    if code:
        assert not _started(recorded) and "not trusted, see above; nothing was trained" in said
    if code != 127:
        site = ["--site", *files] if len(files) == 1 else []
        assert asked.read_text().splitlines() == [
            "trust",
            "--exact",
            "--recipe",
            plan.artifact.recipe,
            *site,
            plan.artifact.path,
        ]
    assert "trust" not in render(_plan(stage))


def test_a_preflight_that_passes_is_followed_by_the_training(stage: Stage) -> None:
    _, recorded = _run(stage, replace(_plan(stage), preflight=True))
    modules = [arguments[1] for tool, arguments, *_ in recorded if tool == "python"]
    assert modules == ["ddp_train.preflight"] * 2 + ["torch.distributed.run"] * 2


def test_the_exit_code_of_the_training_is_the_jobs_and_the_log_is_named(stage: Stage) -> None:
    said, _ = _run(stage, _plan(stage), {"CODE": "17"}, code=17)
    assert f"code 17: envbuild diagnose {stage.folder}/logs/pt_cpu_77.out {stage.folder}/pt_cpu_77" in said


def test_a_node_that_refuses_is_the_jobs_exit_code_and_not_the_signal_that_ended_another(stage: Stage) -> None:
    """srun ends the other nodes, and its own exit code is the largest of all."""
    srun = (stage.bin / "srun").read_text().replace("str(number)", "str(number * 9)", 1)
    executable(stage.bin / "srun", srun)
    said, _ = _run(stage, _plan(stage), code=5)
    assert "srun calls this process number 9, but the job has 2" in said
    assert "the job failed with exit code 5:" in said


def test_a_launcher_that_puts_both_processes_on_one_node_is_noticed(stage: Stage) -> None:
    srun = (stage.bin / "srun").read_text().replace('f"n{number}"', '"n0"')
    executable(stage.bin / "srun", srun)
    said, recorded = _run(stage, _plan(stage), code=5)
    assert "srun started two processes on node n0" in said
    assert _started(recorded) == []


def test_the_scheduler_gave_fewer_nodes_than_asked_for(stage: Stage) -> None:
    stage.nodes = 1
    said, recorded = _run(stage, _plan(stage), code=5)
    assert "2 nodes were asked for, and there are 1: n0" in said
    assert recorded == []


def test_pyxis_gets_image_mounts_and_variables_only_for_the_training(stage: Stage) -> None:
    mounts = ((str(stage.folder), str(stage.folder)), ("/data", "/data:ro,nosuid"))
    plan = _plan(stage, replace(PLAN, artifact=SQSH, runtime="pyxis", mounts=mounts))
    _, recorded = _run(stage, plan)
    steps = [arguments for tool, arguments, *_ in recorded if tool == "srun"]
    (training,) = (one for one in steps if one[-2] == "training")
    assert not [word for one in steps if one is not training for word in one if word.startswith("--container")]
    assert f"--container-image={SQSH.path}" in training
    both = f"{stage.folder}:{stage.folder}"
    assert f"--container-mounts={both},/data:/data:ro+nosuid" in training
    assert any(one.startswith("--container-env=SLURM_NODEID") for one in training)
    assert len(_started(recorded)) == 2


def _calls(recorded: list[Any], tool: str) -> list[list[str]]:
    return [arguments for name, arguments, *_ in recorded if name == tool]


# Says what `enroot list` would, and records what is to be removed.
_ENROOT = """\
#!{python}
import json, os, sys
with open(os.environ["RECORDED"], "a") as stream:
    print(json.dumps(["enroot", sys.argv[1:]]), file=stream)
if sys.argv[1] == "list":
    print(os.environ["CONTAINERS"])
"""
_MINE = f"envbuild-lab-{os.getuid()}"
_OWN = [f"pyxis_{_MINE}-77-0", f"pyxis_77_{_MINE}-77-1", f"{_MINE}-77-0-n1-123"]
_ENDED = [f"pyxis_{_MINE}-7-0", f"pyxis_8_{_MINE}-8-0", f"{_MINE}-9-0-n-1-4"]
# Of another user, cluster or program, of jobs that squeue knows, or with a name that no job gives.
_OTHERS = [
    "mine",
    "pyxis_77.0",
    "pyxis_mine",
    "envbuild-7-0",
    "pyxis_envbuild-7-0",
    "pyxis_envbuild-lab-60001-7-0",
    f"pyxis_envbuild-other-{os.getuid()}-7-0",
    f"my_{_MINE}-7-0",
    f"pyxis_6_{_MINE}-7-0",
    f"pyxis_{_MINE}-x-0",
    f"pyxis_{_MINE}-7",
    f"pyxis_{_MINE}-",
    f"pyxis_{_MINE}-78-0",
    f"pyxis_{_MINE}-79-0",
    f"{_MINE}-80-0-n1-4",
]
_CONTAINERS = {"SLURM_CLUSTER_NAME": "lab", "CONTAINERS": "\n".join([*_OWN, *_ENDED, *_OTHERS])}
# Job 9 has ended and is not forgotten yet.
_SQUEUE = """\
#!/bin/sh
[ -z "${SILENT-}" ] || exit 1
case $* in
*%A*) printf '%s\\n' "77 RUNNING" "78 PENDING" "79 COMPLETING" "9 CANCELLED" "80 SUSPENDED" ;;
*) echo "$STATE" ;;
esac
"""


def _removed(recorded: list[Any]) -> list[str]:
    return [arguments[2] for arguments in _calls(recorded, "enroot") if arguments[:2] == ["remove", "--force"]]


def test_pyxis_unpacks_an_image_once_for_each_start_of_a_job_and_leaves_nothing(stage: Stage) -> None:
    executable(stage.bin / "enroot", _ENROOT)
    executable(stage.bin / "squeue", _SQUEUE)
    mounts = ((str(stage.folder), str(stage.folder)),)
    plan = replace(PLAN, artifact=SQSH, runtime="pyxis", mounts=mounts, preflight=True)
    _, recorded = _run(stage, _plan(stage, plan), {"SLURM_RESTART_COUNT": "2", **_CONTAINERS})
    calls = _calls(recorded, "srun")
    tidying = [one for one in calls if "--overlap" in one]
    preflight, training = [one for one in calls if one not in tidying]
    named = [one for one in (*preflight, *training) if one.startswith("--container-name")]
    assert named == [f"--container-name={_MINE}-77-2"] * 2
    # Beside the training, of runs before a requeue and of ended jobs; at the end, of this run.
    assert sorted(one[-1] for one in tidying) == ["earlier", "own"] and calls[-1][-1] == "own"
    assert sorted(_removed(recorded)) == sorted([*_OWN * 2, *_ENDED] * stage.nodes)
    epilog = f"--task-epilog={stage.folder}/pt_cpu_77/tidy-2.sh"
    assert epilog in preflight and epilog in training and not [one for one in tidying if epilog in one]


@pytest.mark.parametrize(
    ("step", "env", "removed"),
    [
        ((), {"STATE": "RUNNING"}, []),
        ((), {"STATE": "COMPLETING"}, _OWN),
        (("own",), {}, _OWN),
        (("earlier",), {}, [_OWN[1], *_ENDED]),
        (("earlier",), {"SILENT": "1"}, []),
        (("earlier",), {"SLURM_JOB_ID": "99"}, []),  # an answer that does not list this job
    ],
)
def test_only_containers_of_this_users_ended_jobs_are_removed(
    stage: Stage, step: tuple[str, ...], env: dict[str, str], removed: list[str]
) -> None:
    executable(stage.bin / "enroot", _ENROOT)
    executable(stage.bin / "squeue", _SQUEUE)
    tidy = stage.folder / "tidy-0.sh"
    tidy.write_text(TIDY)
    (stage.folder / "recorded").write_text("")
    variables = stage.environment({**_CONTAINERS, **env})
    subprocess.run(["sh", tidy, *step], env=variables, check=True)
    lines = (stage.folder / "recorded").read_text().splitlines()
    assert _removed([json.loads(line) for line in lines]) == removed


def test_enroots_node_program_tidies_beside_the_training_and_names_what_it_unpacks(stage: Stage) -> None:
    plan = replace(PLAN, artifact=SQSH, runtime="enroot", mounts=MOUNTS)
    script = render(plan)
    assert '[ "$1" != training ] || sh "$ENVBUILD_RUN/tidy-$restarts.sh" earlier' in script
    assert 'created="envbuild-${SLURM_CLUSTER_NAME-}-$(id -u)-$SLURM_JOB_ID-$restarts-$name-$$"' in script
    other = render(replace(plan, scheduler="pbs", launcher="ssh"))
    assert "squeue" not in other and "created=envbuild-${ENVBUILD_RUN##*/}-$restarts-$name-$$" in other


@pytest.mark.parametrize("name", ["/data/$USER", "/data/`id`"])
def test_a_mount_that_pyxis_would_give_to_a_shell_is_refused_with_who_says_it(name: str) -> None:
    said = {"[container] mounts": Path("lab.toml")}
    site = replace(SITE, container=ContainerTable(mounts=(name,)), origins=said)
    plan = replace(PLAN, artifact=SQSH, runtime="pyxis", mounts=(*MOUNTS, (name, name)), site=site)
    with pytest.raises(UsageError) as error:
        render(plan)
    assert error.value.message.startswith(f"pyxis cannot mount '{name}' ([container] mounts of lab.toml)")
    plan = replace(plan, site=SITE, work=name, origins={"work": "--work"}, mounts=((name, name),))
    with pytest.raises(UsageError, match="--work"):
        render(plan)


def test_a_process_of_its_own_does_not_see_ranks_that_pyxis_sets(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    plan = _plan(stage, replace(PLAN, strategy="single", nodes=1, nproc_per_node=1))
    half = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "1"}
    _, recorded = _run(stage, plan, half)
    assert [set(half) & set(variables) for _, variables in _started(recorded)] == [set()]


def test_hyperpod_resumes_the_training_and_a_replaced_node_tells_its_own_address(stage: Stage) -> None:
    plan = _plan(stage, replace(PLAN, site=AWS, preflight=True))
    # The step that trains runs on another node than the preflight did.
    srun = (stage.bin / "srun").read_text()
    other = 'f"n{number}" if "training" not in arguments else f"new{number}"'
    executable(stage.bin / "srun", srun.replace('f"n{number}"', other))
    _, recorded = _run(stage, plan)
    first, training = [arguments for tool, arguments, *_ in recorded if tool == "srun"]
    assert "--auto-resume=1" not in first
    assert "--auto-resume=1" in training
    assert [variables["ENVBUILD_ADDRESS"] for _, variables in _started(recorded)] == ["192.0.2.7"] * 4


def test_hyperpods_head_stays_the_host_where_the_new_node_comes_before_it(stage: Stage) -> None:
    # The second node was replaced by one whose name sorts first: numbers change, the batch script's node is the same.
    node = 'f"n{number}" if "training" not in arguments else ("a-new", "n0")[number]'
    srun = (stage.bin / "srun").read_text().replace('f"n{number}"', node)
    last = 'str(ord(told["SLURMD_NODENAME"][-1]))'
    own = f'    told |= {{one: told[one].replace(".2.7", ".2." + {last}) for one in ("ADDRESSES", "SOURCE")}}\n'
    executable(stage.bin / "srun", srun.replace("    tasks.append", f"{own}    tasks.append"))
    _, recorded = _run(stage, _plan(stage, replace(PLAN, site=AWS, preflight=True)))
    hosts = {}
    for arguments, variables in _started(recorded):
        if "ddp_train.preflight" in arguments:
            continue
        conf = _option(arguments, "--rdzv-conf").split(",")[0]
        assert _option(arguments, "--rdzv-endpoint") == "192.0.2.48:20077"  # n0's
        hosts[variables["ENVBUILD_ADDRESS"]] = conf
    assert hosts == {"192.0.2.48": "is_host=1", "192.0.2.119": "is_host=0"}


def test_elsewhere_a_node_that_is_another_than_before_is_refused(stage: Stage) -> None:
    srun = (stage.bin / "srun").read_text()
    other = 'f"n{number}" if "training" not in arguments else f"n{1 - number}"'
    executable(stage.bin / "srun", srun.replace('f"n{number}"', other))
    said, recorded = _run(stage, replace(_plan(stage), preflight=True), code=5)
    assert re.search("srun calls this node number (0, the number of n0|1, the number of n1) already", said)
    assert {arguments[1] for arguments, _ in _started(recorded)} == {"ddp_train.preflight"}


@pytest.mark.parametrize(
    ("mpi", "options"),
    [
        ("mpirun (Open MPI) 4.1.4", ["-np", "2", "--map-by", "ppr:1:node", "--bind-to", "none"]),
        ("mpiexec (OpenRTE) 4.1.4", ["-np", "2", "--map-by", "ppr:1:node", "--bind-to", "none"]),
        ("PALS version 1.2.4", ["-n", "2", "--ppn", "1", "--cpu-bind", "none"]),
        ("HYDRA build details:", ["-n", "2", "-ppn", "1"]),
    ],
)
def test_each_mpi_gets_its_own_options_for_one_process_a_node(stage: Stage, mpi: str, options: list[str]) -> None:
    _, recorded = _run(stage, replace(_plan(stage), launcher="mpirun"), {"MPI": mpi})
    calls = [arguments for tool, arguments, *_ in recorded if tool == "mpirun"]
    assert [one[: len(options)] for one in calls[1:]] == [options]
    assert len(_started(recorded)) == 2


def test_horovods_ranks_are_told_what_horovodrun_would(stage: Stage) -> None:
    plan = replace(_plan(stage), strategy="horovod", launcher="mpirun", nproc_per_node=1)
    _, recorded = _run(stage, plan)
    for number, (arguments, variables) in enumerate(_started(recorded)):
        assert arguments[:2] == ["-m", "ddp_train"]
        told = {name: value for name, value in variables.items() if name.startswith("HOROVOD_")}
        assert told == {
            "HOROVOD_RANK": str(number),
            "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_LOCAL_SIZE": "1",
            "HOROVOD_CROSS_RANK": str(number),
            "HOROVOD_CROSS_SIZE": "2",
            "HOROVOD_HOSTNAME": f"n{number}",
            "HOROVOD_GLOO_IFACE": "eth0",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "192.0.2.7",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "20077",
        }


def test_horovod_of_another_mpi_than_open_mpi_is_refused_before_it_starts(stage: Stage) -> None:
    plan = replace(_plan(stage), strategy="horovod", launcher="mpirun")
    said, recorded = _run(stage, plan, {"MPI": "HYDRA build details:"}, code=6)
    assert "Horovod is started by Open MPI" in said
    assert _started(recorded) == []


@pytest.mark.parametrize(
    ("plan", "hint"),
    [
        (replace(PLAN, strategy="horovod"), 'launcher = "mpirun"'),
        (replace(PLAN, launcher="pbsdsh"), "one of srun, mpirun, mpiexec"),
        (replace(PLAN, runtime="pyxis", launcher="mpirun"), 'launcher = "srun"'),
        (replace(PLAN, runtime="own", artifact=SQSH, mounts=(("/data", "/data"),)), "[container] mounts"),
        (replace(PLAN, name="a/b"), "--name"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_change(plan: JobPlan, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        render(plan)
    assert hint in str(error.value.hint)


@pytest.mark.parametrize("name", ["--work", "[paths] shared of lab.toml", "the current folder"])
def test_a_folder_that_cannot_be_said_is_called_as_the_one_who_chose_it_did(name: str) -> None:
    origin = "current folder" if name == "the current folder" else name
    for folder in ("/fsx/a%b", "/fsx/a\nb"):
        for scheduler in ("slurm", "pbs"):
            plan = replace(PLAN, work=folder, origins={"work": origin}, scheduler=scheduler)
            plan = plan if scheduler == "slurm" else replace(plan, launcher="ssh")
            if scheduler == "pbs" and "%" in folder:
                render(plan)  # PBS's directives do not name it
                continue
            with pytest.raises(UsageError) as error:
                render(plan)
            assert error.value.message.startswith(name), error.value.message


_PURGE = {"[modules] purge": Path("lab.toml")}


@pytest.mark.parametrize(
    ("said", "purge", "left"), [(_PURGE, True, ""), (_PURGE, False, "/login"), ({}, True, "/login")]
)
def test_without_modules_they_are_purged_only_where_the_site_file_itself_says_so(
    stage: Stage, said: Mapping[str, Path], purge: bool, left: str
) -> None:
    site = replace(SITE, modules=ModulesTable(purge=purge), origins=said)
    login = {"LD_LIBRARY_PATH": "/login", "BASH_FUNC_module%%": '() { [ "$1" != purge ] || unset LD_LIBRARY_PATH; }'}
    _, recorded = _run(stage, replace(_plan(stage), site=site), login)
    assert [one.get("LD_LIBRARY_PATH", "") for _, one in _started(recorded)] == [left] * 2
    without, _ = _run(stage, replace(_plan(stage), site=site))
    assert "module" not in without


@pytest.mark.parametrize(
    ("time", "seconds"), [("1-00:00:00", 120), ("00:20:00", 120), ("00:10:00", 60), ("00:01:00", 6)]
)
def test_every_job_is_told_to_end_before_its_time_limit(time: str, seconds: int) -> None:
    for runtime in ("folder", "pyxis", "enroot", "apptainer", "own"):
        plan = replace(PLAN, artifact=SQSH, runtime=runtime, mounts=(("/fsx", "/fsx"),), time=time)
        assert f"--signal=B:USR1@{seconds}" in _directives(plan)
        assert "told-$restarts" in render(plan) and "' TERM USR1\n" in render(plan)


def test_directives_say_what_the_site_and_the_plan_do() -> None:
    plan = replace(
        PLAN,
        site=replace(AWS, scheduler=MODULES.scheduler),
        artifact=EFA_SQSH,
        runtime="pyxis",
        mounts=(("/fsx", "/fsx"),),
        gpus_per_node=8,
        cpus_per_node=96,
    )
    assert _directives(plan) == [
        "--job-name=pt_cpu",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=96",
        "--gpus-per-node=8",
        "--mem=480G",
        "--account=a1",
        "--qos=long",
        "--constraint=icelake",
        "--time=01:00:00",
        "--signal=B:USR1@120",
        "--chdir=/fsx/me",
        "--output=logs/%x_%j.out",
        "--open-mode=append",
        "--no-requeue",
        "--exclusive",
        "--mail-type=END",
    ]
    # A number of srun's own would bind the step to so many CPUs of all that an exclusive job has.
    assert render(plan).count("--cpus-per-task=") == 1
    horovod = replace(plan, strategy="horovod", launcher="mpirun", runtime="enroot", nproc_per_node=8)
    assert {"--ntasks-per-node=8", "--cpus-per-task=12"} <= set(_directives(horovod))
