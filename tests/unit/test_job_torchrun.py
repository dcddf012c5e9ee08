"""Arguments of a training on their way through a real torchrun, as rendered jobs start it.

torchrun runs string.Template over its script's path and its arguments; nothing else on the way does, so tests with a
recording interpreter do not see it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.manifests import container_of, expanded
from ruamel.yaml import YAML
from unit.job_plans import PLAN, Stage, recorder
from unit.test_job_kubernetes import PLAN as POD
from unit.test_job_kubernetes import second, with_site

from envbuild.jobs.model import JobPlan
from envbuild.jobs.schedulers import render

HARD = ("a$$b", "$local_rank", "${local_rank}", "$LOCAL_RANK", "$", "$$$", "$5", "${", "$$local_rank", "x", "")
# Each list is one call of torchrun; torch is imported once for all of them.
TORCHRUN = """\
import json, sys
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import main
print(json.dumps(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout))
for line in json.load(sys.stdin):
    main(["--standalone", "--nproc-per-node", "1", *line])
"""
SCRIPT = """\
import json, sys
print(json.dumps([__file__, sys.argv[1:]]))
"""


def on_nodes(plan: JobPlan, folder: Path) -> list[str]:
    """What the script of a batch system gives to the interpreter, in a working folder that torchrun could change."""
    stage = Stage(folder)
    work = folder / "$$work$local_rank"
    work.mkdir(exist_ok=True)
    artifact = replace(plan.artifact, python=recorder(folder / "env" / "python"))
    made = replace(plan, nodes=1, nproc_per_node=1, work=str(work), artifact=artifact)
    done, recorded = stage.run(render(made))
    assert done.returncode == 0, done.stderr
    (python,) = [one for one in recorded if one[0] == "python"]
    found: list[str] = python[1]
    return found


def in_pod(plan: JobPlan, folder: Path) -> list[str]:
    """What a pod gives to the interpreter."""
    work = f"{folder}/$$work$local_rank"
    manifest = render(with_site(replace(plan, work=work), mount=work))
    *_, job = YAML(typ="safe", pure=True).load_all(manifest)
    return [expanded(word, {}) for word in container_of(job)["args"]][1:]


def through_torchrun(lines: list[list[str]], folder: Path) -> list[Any]:
    """What the script sees of each line, which is a command line of the job from the interpreter's first option on."""
    pytest.importorskip("torch")
    options = [line[line.index("--local-addr") + 2 :] for line in lines]
    done = subprocess.run(
        [sys.executable, "-c", TORCHRUN],
        input=json.dumps(options),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
        env={**os.environ, "ENVBUILD_RUN": str(folder), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "295"},
    )
    assert done.returncode == 0, done.stderr
    timeout, *seen = map(json.loads, done.stdout.splitlines())
    assert timeout == 295  # [kubernetes] grace: torch has the variable
    return seen


def test_a_script_gets_its_path_and_its_arguments_through_torchrun_as_they_are(tmp_path: Path) -> None:
    script = tmp_path / "$$train$local_rank.py"
    script.write_text(SCRIPT)
    (tmp_path / "seen.py").write_text(SCRIPT)
    files = (("--report", "report.json"),)
    plans = [replace(plan, command=(str(script), *HARD), run_files=files) for plan in (PLAN, POD)]
    plans.append(replace(plans[0], command=("-m", "seen", *HARD), scheduler="pbs", launcher="ssh"))
    plans.append(second(plans[1]))
    made = [in_pod(plan, tmp_path) if plan.scheduler == "kubernetes" else on_nodes(plan, tmp_path) for plan in plans]
    work = f"{tmp_path}/$$work$local_rank"
    runs = (f"{work}/pt_cpu_77", f"{work}/pt-cpu", f"{work}/pt_cpu_77.head", f"{work}/pt-cpu")
    paths = (str(script), str(script), str(tmp_path / "seen.py"), str(script))
    assert through_torchrun(made, tmp_path) == [
        [path, [*HARD, "--report", f"{run}/report.json"]] for path, run in zip(paths, runs, strict=True)
    ]


@pytest.mark.parametrize("scheduler", ["slurm", "kubernetes"])
def test_without_torchrun_nothing_is_doubled(scheduler: str, tmp_path: Path) -> None:
    alone = {"strategy": "single", "nodes": 1, "nproc_per_node": 1, "command": ("x.py", *HARD)}
    plan: JobPlan = replace(PLAN if scheduler == "slurm" else POD, run_files=(), **alone)  # type: ignore[arg-type]
    made = in_pod(plan, tmp_path) if scheduler == "kubernetes" else on_nodes(plan, tmp_path)
    assert made == ["x.py", *HARD]
