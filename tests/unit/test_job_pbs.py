"""PBS's scripts: directives, and what bash makes of them with $PBS_NODEFILE."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from unit.job_plans import GH200, MODULES, PLAN, SITE, Stage, executable, recorder

from envbuild.jobs.model import JobPlan
from envbuild.jobs.schedulers import render
from envbuild.site.jobs import ModulesTable, NodeTable, SchedulerTable

PBS = replace(PLAN, scheduler="pbs", launcher="ssh")
SLEEPER = """\
trap 'echo ended >"$ENVBUILD_RUN/ended-$ENVBUILD_NODE"; exit 3' TERM
echo $$ >"$ENVBUILD_RUN/pid-$ENVBUILD_NODE"
while :; do sleep 0.1; done
"""
# Node 1 gives up when node 0 is at work.
QUITTER = """\
if [ "$ENVBUILD_NODE" = 1 ]; then
    until [ -s "$ENVBUILD_RUN/pid-0" ]; do sleep 0.05; done
    exit 9
fi
"""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, 2)


def _plan(stage: Stage, plan: JobPlan = PBS) -> JobPlan:
    artifact = replace(plan.artifact, python=recorder(stage.folder / "env" / "python"))
    return replace(plan, work=str(stage.folder), artifact=artifact)


def _directives(plan: JobPlan) -> list[str]:
    return [line.removeprefix("#PBS ") for line in render(plan).splitlines() if line.startswith("#PBS")]


def test_directives_have_the_walltime_on_a_line_of_its_own() -> None:
    plan = replace(PBS, site=GH200, gpus_per_node=4, cpus_per_node=72, time="1-02:30:00")
    assert _directives(plan) == [
        "-N pt_cpu",
        "-l select=2:ncpus=72:mpiprocs=1:ngpus=4:mem=480mb:host_arch=aarch64",
        "-l walltime=26:30:00",
        "-l place=scatter:excl",
        "-q workq",
        "-A p-1",
        "-r y",
        "-j oe",
        "-o logs/pt_cpu.pbs",
    ]


def test_a_site_may_say_shared_nodes_no_requeue_and_more_lines() -> None:
    scheduler = SchedulerTable(kind="pbs", exclusive=False, requeue=False, directives=("-W umask=027", "-m e"))
    site = replace(SITE, scheduler=scheduler, node=NodeTable(memory="2T"))
    found = _directives(replace(PBS, site=site))
    assert {"-l place=scatter", "-r n", "-l select=2:mpiprocs=1:mem=2tb"} <= set(found)
    assert found[-2:] == ["-W umask=027", "-m e"]


@pytest.mark.parametrize("launcher", ["ssh", "pbsdsh", "mpiexec", "mpirun"])
def test_torchrun_starts_on_every_node_of_the_file_whatever_launches_it(stage: Stage, launcher: str) -> None:
    # A node has a row for each of its processes.
    (stage.folder / "hosts").write_text("n0.example.org\nn0.example.org\nn1.example.org\n")
    _name_the_nodes(stage)
    plan = replace(_plan(stage), launcher=launcher)  # type: ignore[arg-type]
    done, recorded = stage.run(render(plan))
    log = (stage.folder / "logs" / "pt_cpu_77.head.out").read_text()
    assert done.returncode == 0, log
    started = sorted(
        (variables["ENVBUILD_NODE"], variables["ENVBUILD_HOSTS"], variables["ENVBUILD_RUN_ID"])
        for tool, _, *rest in recorded
        if tool == "python"
        for variables in rest
    )
    hosts = "n0.example.org n1.example.org"
    assert started == [(number, hosts, "pt_cpu-77.head-0") for number in "01"]
    # What a node says under pbsdsh, which does not carry it, is in a file of its own.
    own = [path.read_text() for path in (stage.folder / "pt_cpu_77.head").glob("output-0.1")]
    assert "node 1 is n1.example.org" in "".join([log, *own])


def _name_the_nodes(stage: Stage) -> None:
    """The machine is called as the node whose number the launcher tells."""
    executable(stage.bin / "uname", '#!/bin/sh\necho "n${OMPI_COMM_WORLD_RANK-${FAKE_NODE-0}}"\n')
    for tool, number in (("ssh", "arguments[-2][1:].split('.')[0]"), ("pbsdsh", "arguments[1]")):
        text = (stage.bin / tool).read_text()
        line = f'os.environ["FAKE_NODE"] = {number}\nif "--version"'
        executable(stage.bin / tool, text.replace('if "--version"', line))


def test_a_job_that_pbs_starts_again_meets_under_another_name(stage: Stage) -> None:
    stage.nodes = 1
    (stage.folder / "hosts").write_text("n0\n")
    plan = replace(_plan(stage), nodes=1, launcher="mpiexec")
    found = []
    for _ in range(2):
        _, recorded = stage.run(render(plan), env={"PBS_JOBID": "12[3].head.example"})
        found += [one[2]["ENVBUILD_RUN_ID"] for one in recorded if one[0] == "python"]
    assert found == ["pt_cpu-12_3_.head.example-0", "pt_cpu-12_3_.head.example-1"]
    log = stage.folder / "logs" / "pt_cpu_12_3_.head.example.out"
    assert log.read_text().count("node 0 is") == 2


@pytest.mark.parametrize(("strategy", "each"), [("ddp", 1), ("horovod", 4)])
@pytest.mark.parametrize(("scheduler", "launcher"), [("pbs", "mpiexec"), ("pbs", "mpirun"), ("lsf", "mpirun")])
def test_open_mpi_reads_the_nodes_and_their_slots_and_nothing_else(
    stage: Stage, scheduler: str, launcher: str, strategy: str, each: int
) -> None:
    (stage.folder / "hosts").write_text("n0\nn1\n")
    executable(stage.bin / "getent", "#!/bin/sh\necho 192.0.2.8 STREAM n1\n")
    # A launcher that shows the hostfile and starts nothing.
    text = '#!/bin/sh\n[ "$1" != --version ] || exec echo "$MPI"\nwhile [ "$1" != --hostfile ]; do shift; done\n'
    executable(stage.bin / launcher, f'{text}cat "$2" >"$RECORDED.slots"\n')
    row = "n0 192.0.2.7 eth0 20077\n"
    plan = replace(_plan(stage), scheduler=scheduler, launcher=launcher, strategy=strategy, nproc_per_node=4)  # type: ignore[arg-type]
    script = render(plan).replace(
        "everywhere training &", f"echo '{row}' >\"$ENVBUILD_RUN/at-0.0\"\neverywhere training &"
    )
    stage.run(script)
    assert (stage.folder / "recorded.slots").read_text() == f"n0 slots={each}\nn1 slots={each}\n"


@pytest.mark.parametrize("launcher", ["ssh", "pbsdsh"])
def test_when_one_node_gives_up_the_others_are_ended_and_its_code_is_the_jobs(stage: Stage, launcher: str) -> None:
    plan = replace(_plan(stage), launcher=launcher)  # type: ignore[arg-type]
    _name_the_nodes(stage)
    recorder(Path(plan.artifact.python), QUITTER + SLEEPER)
    done, _ = stage.run(render(plan))
    log = (stage.folder / "logs" / "pt_cpu_77.head.out").read_text()
    assert done.returncode == 9, log
    assert "failed with exit code 9" in log
    _until((stage.folder / "pt_cpu_77.head" / "ended-0").exists)


@contextlib.contextmanager
def _on_two_nodes(stage: Stage, plan: JobPlan) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start the job's script; yield it and the run's folder once both nodes have started, and end these at last."""
    script = stage.folder / "job.sh"
    script.write_text(render(plan))
    process = subprocess.Popen(["bash", script], env=stage.environment({}), start_new_session=True)
    run = stage.folder / "pt_cpu_77.head"
    try:
        _until(lambda: all((run / f"pid-{node}").exists() for node in range(2)))
        yield process, run
    finally:
        for path in run.glob("pid-*"):
            if path.read_text().strip():
                _end(int(path.read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
def test_what_ssh_started_ends_with_the_batch_script_however_that_ends(stage: Stage, number: signal.Signals) -> None:
    plan = _plan(stage)
    _name_the_nodes(stage)
    recorder(Path(plan.artifact.python), SLEEPER)
    with _on_two_nodes(stage, plan) as (process, run):
        if number == signal.SIGKILL:  # as PBS does to all that it knows of; what sshd started is not
            _kill_all_but_what_ssh_started(process.pid)
        else:
            process.send_signal(number)
        _until(lambda: all((run / f"ended-{node}").exists() for node in range(2)))
        assert process.wait(20) in (3, 143, -signal.SIGKILL)


def test_a_rank_that_ssh_started_saves_its_state_and_what_it_prints_meanwhile_arrives(stage: Stage) -> None:
    plan = _plan(stage)
    _name_the_nodes(stage)
    # As the real one: it carries the output as long as it lives, and SIGTERM ends it alone.
    text = (stage.bin / "ssh").read_text()
    carried = """proc = subprocess.Popen(["sh", "-c", arguments[-1]], stdout=subprocess.PIPE, start_new_session=True)
    for line in proc.stdout:
        os.write(1, line)
    sys.exit(proc.wait())"""
    executable(
        stage.bin / "ssh", text.replace('sys.exit(subprocess.run(["sh", "-c", arguments[-1]]).returncode)', carried)
    )
    saver = """trap 'sleep 1; echo "saving $ENVBUILD_NODE" && echo >"$ENVBUILD_RUN/saved-$ENVBUILD_NODE"; exit 0' TERM
    echo $$ >"$ENVBUILD_RUN/pid-$ENVBUILD_NODE"
    while :; do sleep 0.1; done"""
    recorder(Path(plan.artifact.python), saver)
    with _on_two_nodes(stage, plan) as (process, run):
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
        assert all((run / f"saved-{node}").exists() for node in range(2))
        log = (stage.folder / "logs" / "pt_cpu_77.head.out").read_text()
        assert "saving 0" in log and "saving 1" in log


def test_the_host_from_which_ssh_starts_a_preflight_need_not_have_the_nodes_scratch_folder(stage: Stage) -> None:
    _name_the_nodes(stage)
    plan = replace(_plan(stage), variables=(("TMPDIR", "/nodes/own/disk"),))
    done, recorded = stage.run(render(plan))
    assert done.returncode == 0, (stage.folder / "logs" / "pt_cpu_77.head.out").read_text()
    assert [one[2]["TMPDIR"] for one in recorded if one[0] == "python"] == ["/nodes/own/disk"] * 2


def _kill_all_but_what_ssh_started(batch: int) -> None:
    """The script and the shell in which it launches."""
    children = Path(f"/proc/{batch}/task/{batch}/children").read_text().split()
    for pid in [batch, *map(int, children)]:
        _end(pid)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _until(happened: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_modules_are_loaded_on_every_node_where_no_environment_travels(stage: Stage) -> None:
    init = stage.folder / "init.sh"
    init.write_text('module() { [ "$1" != load ] || export LOADED="${LOADED-}:$2"; }\n')
    modules = ModulesTable(init=str(init), run=("cuda/12.6",))
    site = replace(MODULES, modules=modules)
    _name_the_nodes(stage)
    for launcher in ("ssh", "pbsdsh", "mpiexec"):
        plan = replace(_plan(stage), site=site, modules=modules.run, launcher=launcher)
        _, recorded = stage.run(render(plan), env={"PBS_JOBID": f"77.{launcher}"})
        loaded = [one[2].get("LOADED", "") for one in recorded if one[0] == "python"]
        assert len(loaded) == 2 and all(one.endswith(":cuda/12.6") for one in loaded), launcher
