"""The table of schedulers: it agrees with the names that sites and options accept, and each has what others need."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from lab.lint import lint, read_script
from unit.job_plans import PLAN, Stage, executable, recorder

from envbuild.cli.job import job_command
from envbuild.data.schedulers import LAUNCHER_NAMES, LAUNCHERS, SCHEDULER_NAMES, TITLES
from envbuild.doctor import batch
from envbuild.doctor.batch import contradictions
from envbuild.doctor.probe import Host
from envbuild.jobs.model import JobPlan
from envbuild.jobs.schedulers import SCHEDULERS, render
from envbuild.jobs.schedulers.base import minutes
from envbuild.jobs.submit import default_script, find_allocation, submit
from envbuild.site.jobs import NodeTable, PathsTable, SchedulerTable
from envbuild.site.settings import Site

TOP = Path(__file__).parents[2]


def test_the_table_has_the_schedulers_and_launchers_of_the_data() -> None:
    assert tuple(SCHEDULERS) == SCHEDULER_NAMES == tuple(TITLES)
    assert {name: tuple(one.launchers) for name, one in SCHEDULERS.items()} == LAUNCHERS
    (schedulers,) = (one.type for one in job_command.params if one.name == "scheduler")
    (launchers,) = (one.type for one in job_command.params if one.name == "launcher")
    assert tuple(schedulers.choices) == SCHEDULER_NAMES  # type: ignore[attr-defined]
    assert tuple(launchers.choices) == LAUNCHER_NAMES  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name, one in SCHEDULERS.items() if not one.pods])
def test_what_lint_job_knows_of_a_scheduler_is_true_of_its_own_scripts(name: str) -> None:
    chosen = SCHEDULERS[name]
    plan = replace(PLAN, scheduler=name, launcher=LAUNCHERS[name][0], nodes=3)
    assert chosen.directives is not None and chosen.script is not None and chosen.host is not None
    lines = [line for line in chosen.directives(plan) if line.startswith(chosen.script.marker)]
    words = [(at, tuple(line.split()[1:])) for at, line in enumerate(lines, start=1)]
    unquoted = [(at, tuple(word.strip('"') for word in row)) for at, row in words]
    found = chosen.script.nodes(unquoted)
    assert found is not None and found[1] == 3
    options = [" ".join(row) for _, row in words if row[0] not in ("-j", "-r", "-R")]
    own = [one for one in options if chosen.own_option(one)]
    assert len(own) > len(options) // 2


@pytest.mark.parametrize("name", [name for name, one in SCHEDULERS.items() if not one.pods])
def test_the_scheduler_writes_its_output_into_the_folder_of_the_logs_where_that_is_absolute(name: str) -> None:
    site = Site("lab", paths=PathsTable(shared="/fsx", logs="/var/logs"))
    text = render(replace(PLAN, scheduler=name, launcher=LAUNCHERS[name][0], site=site))
    (output,) = [line for line in text.splitlines() if line.startswith("#") and "/var/logs/" in line]
    assert output.partition("/var/logs/")[0].endswith((" ", "="))
    assert "\nlog=/var/logs/pt_cpu_$job.out\n" in text


def test_only_the_table_names_schedulers() -> None:
    """Whoever adds one finds no other list to add it to."""
    names = "|".join(f'"{name}"' for name in SCHEDULERS)
    done = subprocess.run(
        ["git", "grep", "-nE", f"(==|!=|in \\() ?({names})", "--", "envbuild"], cwd=TOP, capture_output=True, text=True
    )
    assert done.stdout == ""


def _plan(stage: Stage, name: str) -> JobPlan:
    artifact = replace(PLAN.artifact, python=recorder(stage.folder / "env" / "python"))
    plan = replace(PLAN, scheduler=name, launcher=LAUNCHERS[name][0], work=str(stage.folder))
    # A node is called as the table of nodes says; only this machine's name is known.
    line = "n${SLURM_NODEID-${FLUX_TASK_RANK-${FAKE_NODE-0}}}"
    executable(stage.bin / "uname", f"#!/bin/sh\necho {line}\n")
    text = (stage.bin / "blaunch").read_text()
    told = 'os.environ["FAKE_NODE"] = arguments[1][1:]\nif tool == "blaunch":'
    executable(stage.bin / "blaunch", text.replace('if tool == "blaunch":', told))
    return replace(plan, artifact=artifact)


@pytest.mark.parametrize("name", ["slurm", "lsf", "flux"])
def test_every_node_starts_one_torchrun_by_the_schedulers_own_launcher(tmp_path: Path, name: str) -> None:
    """The programs of LSF and Flux are stand-ins that do what their documentation says."""
    stage = Stage(tmp_path, 2)
    (tmp_path / "hosts").write_text("n0\nn0\nn1\n")  # a line for each slot
    done, recorded = stage.run(render(_plan(stage, name)), env={"SLURM_JOB_ID": "77"})
    log = tmp_path / "logs" / "pt_cpu_77.out"
    assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    started = sorted(
        (one[2]["ENVBUILD_NODE"], one[2]["ENVBUILD_HOSTS"], one[2]["ENVBUILD_RUN_ID"])
        for one in recorded
        if one[0] == "python"
    )
    assert started == [(number, "n0 n1", "pt_cpu-77-0") for number in "01"]


@pytest.mark.parametrize("name", ["pbs", "lsf", "flux"])
def test_a_script_ends_its_training_before_the_time_limit_where_the_scheduler_signals_all(
    tmp_path: Path, name: str
) -> None:
    stage = Stage(tmp_path)
    saving = f"trap 'touch {tmp_path}/saved; exit 0' TERM; while :; do sleep 0.1; done"
    python = recorder(tmp_path / "env/python", saving)
    plan = replace(
        PLAN,
        scheduler=name,
        launcher="flux" if name == "flux" else "ssh",
        nodes=1,
        work=str(tmp_path),
        artifact=replace(PLAN.artifact, python=python),
    )
    script = render(plan)
    assert "sleep $((3480 > SECONDS ? 3480 - SECONDS : 0)) &" in script
    if name != "flux":  # its stand-in signals nobody
        done, _ = stage.run(script.replace("3480", "4"))
        assert done.returncode == 143 and (tmp_path / "saved").exists(), done
    # The site's own limit is not known to the script.
    own = {"pbs": "-l walltime=02:00:00", "lsf": "-W 120", "flux": "-t 2h"}[name]
    site = replace(plan.site, scheduler=SchedulerTable(kind=name, directives=(own,)))
    assert "timer" not in render(replace(plan, site=site))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_all_signals_of_lsf_end_the_training_in_order(tmp_path: Path, number: signal.Signals) -> None:
    stage = Stage(tmp_path, 1)
    plan = replace(_plan(stage, "lsf"), nodes=1)
    recorder(
        Path(plan.artifact.python),
        "trap 'echo ended >\"$ENVBUILD_RUN/ended\"; exit 3' TERM\n"
        'echo $$ >"$ENVBUILD_RUN/started"\nwhile :; do sleep 0.1; done\n',
    )
    script = tmp_path / "job.sh"
    script.write_text(render(plan))
    run = tmp_path / "pt_cpu_77"
    process = subprocess.Popen(["bash", str(script)], env=stage.environment({}), cwd=tmp_path, start_new_session=True)
    try:
        for _ in range(300):
            if (run / "started").exists():
                break
            time.sleep(0.1)
        if number == signal.SIGUSR2:  # LSF tells all processes of the job
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        assert process.wait(30) in (3, 143), (tmp_path / "logs/pt_cpu_77.out").read_text()
        assert (run / "ended").read_text() == "ended\n"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "program", "answer", "job"),
    [
        ("lsf", "bsub", "Job <3856> is submitted to default queue <normal>.", "3856"),
        ("flux", "flux", "ƒM7Zq9AKHno", "ƒM7Zq9AKHno"),
        ("slurm", "sbatch", "7;cluster", "7"),
        ("pbs", "qsub", "7.server", "7.server"),
    ],
)
def test_the_schedulers_answer_names_the_job(tmp_path: Path, name: str, program: str, answer: str, job: str) -> None:
    (tmp_path / "bin").mkdir()
    fake = f'#!/bin/sh\n{{ cat; echo "$@"; }} >"$HOME/told"\necho "{answer}"\n'
    executable(tmp_path / "bin" / program, fake)
    plan = replace(PLAN, scheduler=name, work=str(tmp_path))
    script = default_script(plan, tmp_path)
    script.write_text("the script\n")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    assert submit(plan, script, {"PATH": path, "HOME": str(tmp_path)}) == job
    told = (tmp_path / "told").read_text()
    assert ("the script" in told) == (name == "lsf")
    assert (str(script) in told) == (name != "lsf")


def test_a_time_limit_in_minutes_is_not_less_than_what_was_asked_for() -> None:
    assert [minutes(text) for text in ("00:00:01", "01:30:00", "1-02:00:59")] == [1, 90, 1561]


# As the documentation of bqueues(1) and flux-queue(1) shows them.
_BQUEUES = """\
QUEUE_NAME      PRIO STATUS          MAX JL/U JL/P JL/H NJOBS  PEND   RUN  SUSP
night            30  Open:Active       -    -    -    -     0     0     0     0
normal           30  Open:Active       -    -    -    -     0     0     0     0
"""


def test_doctor_and_site_check_ask_a_scheduler_by_the_facts_of_its_module(tmp_path: Path) -> None:
    executable(tmp_path / "bsub", "#!/bin/sh\necho IBM Spectrum LSF 10.1\n")
    executable(tmp_path / "bqueues", f"#!/bin/sh\ncat <<'END'\n{_BQUEUES}END\n")
    executable(tmp_path / "flux", '#!/bin/sh\n[ "$1" = queue ] && echo pdebug || echo libflux-core: 0.66\n')
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "LSB_JOBID": "7"}
    lsf, allocation = batch.scheduler("lsf", Host(env))
    assert (lsf.name, lsf.status) == ("LSF", "ok")
    assert lsf.summary == "IBM Spectrum LSF 10.1; queues night, normal"
    assert allocation.summary == "job 7 of LSF"
    (flux,) = batch.scheduler("flux", Host(env))
    assert flux.summary == "libflux-core: 0.66; queues pdebug"


@pytest.mark.parametrize(
    ("directives", "kind", "nodes"),
    [
        ('#BSUB -n 8\n#BSUB -R "span[ptile=4]"', "lsf", 2),
        ("#BSUB -n 8", "lsf", None),
        ("#flux: -N4 -n4", "flux", 4),
        ("# FLUX: --nodes=3", "flux", 3),
        ("#SBATCH -N 2", "slurm", 2),
        ("# BSUB -n 8", "shell", None),
        ("#SBATCH -N " + "9" * 5000, "slurm", None),
        ("#flux: -N " + "9" * 5000, "flux", None),
        ('#BSUB -n 8\n#BSUB -R "span[ptile=' + "9" * 5000 + ']"', "lsf", None),
        ("#PBS -l select=" + "9" * 5000, "pbs", 1),
    ],
)
def test_lint_job_reads_the_directives_of_each(directives: str, kind: str, nodes: int | None) -> None:
    script = read_script(f"#!/bin/bash\n{directives}\n")
    assert (script.kind, script.nodes and script.nodes[1]) == (kind, nodes)


@pytest.mark.parametrize("start", ["blaunch", "flux run -N2 -n2", "srun"])
def test_lint_job_knows_the_launchers(start: str) -> None:
    text = f"#BSUB -n 2\n#BSUB -R span[ptile=1]\nset -e\n{start} torchrun --nnodes 2 x.py\n"
    assert "head-only" not in {one.fault.id for one in lint(text, "job.sh")}
    alone = {one.fault.id for one in lint(text.replace(start, ""), "job.sh")}
    assert alone & {"head-only", "started-here"}


def test_an_allocation_of_lsf_is_found(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n0\nn0\nn1\n")
    found = find_allocation([], {"LSB_JOBID": "9", "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")})
    assert (found.scheduler, found.nodes, found.job) == ("lsf", 2, "9")


@pytest.mark.parametrize(
    ("scheduler", "directive", "replaced"),
    [
        ("slurm", "--gres=gpu:h100:8", "--gpus-per-node=8"),
        ("slurm", "-G 16", "--gpus-per-node=8"),
        ("slurm", "--gres=nvme:1", ""),
        ("slurm", "--mem-per-cpu=4G", "--mem=480G"),
        ("slurm", "--signal=B:USR1@600", "--signal=B:USR1@120"),
        ("slurm", "--no-requeue", "--requeue"),
        ("slurm", "-t 02:00:00", "--time=01:00:00"),
        ("slurm", "--mail-type=END", ""),
        ("pbs", "-l walltime=02:00:00", "-l walltime=01:00:00"),
        ("pbs", "-l nodes=2:ppn=96", "-l select=2:ncpus=96:mpiprocs=1:ngpus=8:mem=480gb"),
        ("pbs", "-W umask=027", ""),
        ("pbs", "-oe.log", "-o logs/pt_cpu.pbs"),
        ("lsf", "-gpu num=8:mode=shared", '-gpu "num=8/host"'),
        ("lsf", '-R "span[hosts=1]"', '-R "span[ptile=96]"'),
        ("lsf", "-oo other.log", "-o /fsx/me/logs/pt_cpu.lsf"),
        ("lsf", "-alloc_flags smt4", ""),
        ("flux", "-t 30m", "--time-limit=60m"),
        ("flux", "--setattr=bank=other", "--setattr=bank=p1"),
        ("flux", "--setattr=user.note=x", ""),
    ],
)
def test_a_line_of_the_site_replaces_the_jobs_own_for_the_same_thing(
    scheduler: str, directive: str, replaced: str
) -> None:
    def lines(*more: str) -> list[str]:
        table = SchedulerTable(kind=scheduler, account="p1", directives=more)
        site = replace(Site("lab"), scheduler=table, node=NodeTable(gpus=8, cpus=96, memory="480G"))
        launcher = LAUNCHERS[scheduler][0]
        plan = replace(PLAN, scheduler=scheduler, launcher=launcher, site=site, gpus_per_node=8, cpus_per_node=96)
        chosen = SCHEDULERS[scheduler]
        assert chosen.directives is not None and chosen.script is not None
        found = (line for line in chosen.directives(plan) if line.startswith(chosen.script.marker))
        return [line.removeprefix(chosen.script.marker).strip() for line in found]

    before, after = lines(), lines(directive)
    assert {*before} - {*after} == ({replaced} if replaced else set())
    assert {*after} - {*before} == {directive}


def test_site_check_names_keys_without_a_meaning_and_options_that_jobs_set() -> None:
    scheduler = SchedulerTable(kind="flux", qos="q", directives=("-N4", "--urgency=20"))
    site = Site("lab", scheduler=scheduler, node=NodeTable(memory="4G"))
    found = {(one.name, one.summary) for one in contradictions(site)}
    assert ("[scheduler] qos", "is not used with flux") in found
    assert ("[node] memory", "is not used with flux") in found
    assert ("[scheduler] directives", "'-N4' replaces --nodes of jobs") in found
    assert not [what for _, what in found if "urgency" in what]
