"""Manifests of jobs: what they say, that Kubernetes' and Kubeflow's types take them, that no text changes on its way.

There is no cluster here. ENVBUILD_WRITE_GOLDEN=1 writes the golden table anew.
"""

from __future__ import annotations

import copy
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from lab.golden import assert_golden_case
from lab.manifests import container_of, expanded, faults
from lab.shellcheck import shellcheck
from ruamel.yaml import YAML

from envbuild.base.errors import UsageError
from envbuild.jobs.kubernetes_pod import dump, job_name
from envbuild.jobs.model import JobArtifact, JobPlan, seconds
from envbuild.jobs.schedulers.kubernetes import render_kubernetes
from envbuild.site.jobs import KubernetesTable, NodeTable, SchedulerTable
from envbuild.site.settings import Site
from examples import examples

GOLDEN = Path(__file__).parent / "data" / "jobs" / "kubernetes.txt"
DIGEST = "sha256:" + "8e1884d0" * 8
CPU = JobArtifact(
    kind="docker",
    path=f"registry.example.org/ml/pt_cpu@{DIGEST}",
    digest=DIGEST,
    recipe="pt_cpu",
    target="cpu-x86_64",
    python="/opt/env/bin/python",
    verified_at="2026-11-21T10:00:00Z",
)
EFA = replace(
    CPU,
    recipe="pt_efa",
    target="cu130-aarch64",
    fabric="efa",
    provider="efa",
    chips=("sm_90",),
    path=f"registry.example.org/ml/pt_efa@{DIGEST}",
    verified_at="",
)
SITE = Site(
    "aws-eks",
    scheduler=SchedulerTable(kind="kubernetes"),
    node=NodeTable(cpus=4, memory="8G"),
    kubernetes=KubernetesTable(
        claim="fsx-pv", mount="/fsx", shm="1Gi", node_selector={"node.kubernetes.io/instance-type": "c5.4xlarge"}
    ),
)
GPUS = replace(
    SITE,
    node=NodeTable(gpus=8, cpus=180, memory="1900G"),
    scheduler=SchedulerTable(kind="kubernetes", requeue=False, exclusive=False),
    kubernetes=replace(
        SITE.kubernetes,
        namespace="ml",
        pull_secret="ecr",
        shm="64Gi",
        resources={"vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5120Mi"},
    ),
)
PLAN = JobPlan(
    name="pt_cpu",
    scheduler="kubernetes",
    artifact=CPU,
    site=SITE,
    runtime="pod",
    launcher="srun",
    strategy="ddp",
    nodes=2,
    nproc_per_node=4,
    command=("-m", "ddp_train", "50", "10"),
    work="/fsx",
    cpus_per_node=4,
    run_files=(("--checkpoint_path", "snapshot.pt"), ("--report", "report.json")),
    variables=(("OMP_NUM_THREADS", "1"), ("https_proxy", "http://proxy.example.org:3128")),
)
ON_GPUS = replace(
    PLAN,
    name="pt_efa",
    artifact=EFA,
    site=GPUS,
    nproc_per_node=8,
    gpus_per_node=8,
    cpus_per_node=180,
    preflight=True,
    command=("/fsx/train.py", "--lr", "1e-3"),
    run_files=(),
    work="/fsx/someone",
    time="2-03:00:00",
    variables=(("NCCL_NET", "AWS Libfabric"),),
    library_path=("/opt/env/lib",),
    max_restarts=0,
)


def second(plan: JobPlan) -> JobPlan:
    return replace(plan, site=replace(plan.site, kubernetes=replace(plan.site.kubernetes, api="v2")))


SINGLE = replace(PLAN, strategy="single", nodes=1, nproc_per_node=1)


def queued(plan: JobPlan, queue: str, qos: str = "", **kubernetes: Any) -> JobPlan:
    """`plan` in a queue."""
    scheduler = replace(plan.site.scheduler, partition=queue, qos=qos)
    table = replace(plan.site.kubernetes, **kubernetes)
    return replace(plan, site=replace(plan.site, scheduler=scheduler, kubernetes=table))


# The names of the queue and the runtime are those of kubeflow/trainer v2.3.0, examples/yaml/03-kueue-integration.yaml
# and 04-volcano-integration.yaml.
KUEUE: dict[str, Any] = {
    "labels": {"team": "ml-platform", "example.org/cost-center": "42"},
    "annotations": {"kueue.x-k8s.io/podset-preferred-topology": "cloud.provider.com/topology-block"},
    "tolerations": ("training-workload=true:NoSchedule", "spot"),
    "service_account": "training-sa",
    "volumes": {"/datasets": "claim:imagenet:ro", "/scratch": "empty:500Gi", "/config": "configmap:nccl"},
    "secrets": {"HF_TOKEN": "huggingface/token", "/etc/wandb": "wandb"},
}
PLANS = {
    "pytorchjob": PLAN,
    "pytorchjob-etcd": replace(PLAN, rendezvous="etcd-v2"),
    "pytorchjob-gpus-efa": ON_GPUS,
    "trainjob": second(PLAN),
    "trainjob-etcd": second(replace(PLAN, rendezvous="etcd-v2")),
    "trainjob-gpus-efa": second(ON_GPUS),
    "job": SINGLE,
    "pytorchjob-kueue": queued(PLAN, "training-queue", "high", ttl=86400, retries=5, grace=120, **KUEUE),
    "trainjob-kueue": queued(second(PLAN), "training-queue", "high", **KUEUE),
    "job-kueue": queued(SINGLE, "training-queue", ttl=0, priority_class="batch", grace=60, **KUEUE),
    "pytorchjob-volcano": queued(PLAN, "high-priority-queue", priority_class="training"),
    "trainjob-volcano": queued(second(PLAN), "high-priority-queue", runtime="torch-distributed-volcano"),
    "pytorchjob-module": replace(PLAN, command=("-m", "pkg.train", "--lr", "0.1"), run_files=()),
}


def documents(plan: JobPlan) -> list[dict[str, Any]]:
    """As a reader of YAML 1.2 sees the manifest."""
    return documents_of(render_kubernetes(plan))


def documents_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(one)) for one in YAML(typ="safe", pure=True).load_all(text)]


def job_of(plan: JobPlan) -> dict[str, Any]:
    return documents(plan)[-1]


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    if job["kind"] == "TrainJob":
        jobs = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
        found: dict[str, Any] = jobs["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    elif job["kind"] == "Job":
        found = job["spec"]["template"]["spec"]
    else:
        found = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    return found


def with_site(plan: JobPlan, **kubernetes: Any) -> JobPlan:
    return replace(plan, site=replace(plan.site, kubernetes=replace(plan.site.kubernetes, **kubernetes)))


@pytest.mark.parametrize("name", PLANS)
def test_a_manifest_is_what_its_golden_file_says(name: str) -> None:
    assert_golden_case(name, {case: render_kubernetes(plan) for case, plan in PLANS.items()}, GOLDEN)


@pytest.mark.parametrize("name", PLANS)
def test_the_types_of_kubernetes_and_kubeflow_take_each_document(name: str) -> None:
    for document in documents(PLANS[name]):
        assert faults(document) == []


# Below these a key is the user's, and so is one with a slash: any is right.
FREE = {"annotations", "labels", "matchLabels", "nodeSelector", "limits"}


def keys(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict):
        for key, one in value.items():
            if not (at and at[-1] in FREE) and "/" not in key:
                yield (*at, key)
            yield from keys(one, (*at, key))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from keys(one, (*at, number))


@pytest.mark.parametrize(
    "name", ["pytorchjob-etcd", "pytorchjob-gpus-efa", "trainjob-gpus-efa", "job-kueue", "trainjob-kueue"]
)
def test_every_misspelt_field_is_found_by_the_check_wherever_it_is(name: str) -> None:
    tried = 0
    for document in documents(PLANS[name]):
        for path in keys(document):
            wrong = copy.deepcopy(document)
            place: Any = wrong
            for step in path[:-1]:
                place = place[step]
            place[f"{path[-1]}x"] = place.pop(path[-1])
            tried += 1
            assert faults(wrong) != [], path
    assert tried > 40


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "elasticPolicy", "rdzvBackend"), "cd10"),
        (("spec", "runPolicy", "cleanPodPolicy"), "running"),
        (("spec", "pytorchReplicaSpecs", "Worker", "restartPolicy"), "onFailure"),
        (("spec", "elasticPolicy", "minReplicas"), "2"),
        (("spec", "nprocPerNode"), 4),
    ],
)
def test_the_check_finds_values_that_are_not_of_the_type(path: tuple[str, ...], value: Any) -> None:
    job = job_of(PLAN)
    place = job
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert faults(job) != []


# What text meets on its way to a process: YAML, kubelet's $(NAME), and our few lines of shell.

HARD = [
    "no",
    "yes",
    "On",
    "y",
    "null",
    "~",
    "",
    "1e3",
    "0x1",
    "0o7",
    "017",
    "1_000",
    "1:30",
    ".5",
    "2026-11-21",
    "<<",
    "=",
    "- a",
    "a: b",
    "a #b",
    "'",
    '"',
    "\\",
    "%",
    "@a",
    "`id`",
    "$(id)",
    "$$",
    "$",
    "$(",
    "${HOME}",
    "$(ENVBUILD_RUN)",
    "two\nlines\n",
    "\n",
    "  spaces  ",
    "\ttab",
    "--",
    "-x",
    "é ü 漢 🙂",
    "{{ a }}",
    "*a",
    "&a",
    "!!python/object:os.system",
]
TEXT = st.one_of(
    st.sampled_from(HARD), st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"))
)


def through_torchrun(words: list[str]) -> list[str]:
    """What torchrun makes of the script's arguments; test_job_torchrun.py asks a real one."""
    return [Template(word).safe_substitute(local_rank="0") for word in words]


def carried(*texts: str) -> bool:
    """Whether a manifest can carry all of `texts`."""
    try:
        render_kubernetes(replace(PLAN, command=("x.py", *texts)))
    except UsageError as error:
        assert "cannot carry the character" in error.message
        return False
    return True


@given(words=st.lists(TEXT, min_size=1, max_size=5), value=TEXT)
@examples(50)
def test_readers_of_yaml_1_1_and_1_2_see_the_same_text_unchanged(words: list[str], value: str) -> None:
    if not carried(*words, value):
        return
    for plan in (PLAN, second(PLAN)):
        made = replace(plan, command=("train.py", *words), variables=(("NAME", value),))
        text = render_kubernetes(made)
        old = list(yaml.load_all(text, yaml.CSafeLoader))  # libyaml, which kubectl's reader is a port of
        assert old == documents_of(text)
        container = container_of(old[-1])
        args = [expanded(one, {"ENVBUILD_RUN": "wrong"}) for one in container["args"]]
        start = args.index("train.py") + 1
        assert through_torchrun(args[start : start + len(words)]) == words
        environment = {one["name"]: one.get("value") for one in container["env"]}
        assert expanded(environment["NAME"], {"ENVBUILD_RUN": "wrong"}) == value


@pytest.mark.parametrize("word", HARD)
def test_text_that_looks_like_something_else_stays_text_as_key_and_value(word: str) -> None:
    text = dump("comment", [{"a": {word: [word]}}])
    assert yaml.safe_load(text) == {"a": {word: [word]}}
    assert YAML(typ="safe", pure=True).load(text) == {"a": {word: [word]}}


@given(comment=st.text())
def test_no_comment_ends_its_line(comment: str) -> None:
    assert yaml.safe_load(dump(comment, [{"a": "b"}])) == {"a": "b"}


@pytest.mark.parametrize("character", ["\0", "\x1b", "\x85", "\u2028", "\ud800", "\ufeff"])
def test_characters_that_readers_of_yaml_change_or_refuse_are_refused(character: str) -> None:
    assert not carried(f"a{character}b")


RECORDER = """\
import json, os, sys
open(os.environ["ENVBUILD_RUN"] + "/seen", "w").write(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))
"""


def started(plan: JobPlan, folder: Path, more: dict[str, str]) -> tuple[list[str], dict[str, str], str]:
    """Run what the pod would run, in real sh, with an interpreter that writes down what it was given."""
    recorder = folder / "recorder"
    recorder.write_text(f"#!{sys.executable}\n{RECORDER}")
    recorder.chmod(recorder.stat().st_mode | stat.S_IXUSR)
    made = replace(plan, work=str(folder), artifact=replace(plan.artifact, python=str(recorder)))
    container = container_of(job_of(with_site(made, mount=str(folder))))
    environment = {
        "PATH": os.environ["PATH"],
        "ENVBUILD_ADDRESS": "10.1.2.3",
        "ENVBUILD_NODE": "0",
        "ENVBUILD_POD_UID": "1-2",
        **more,
    }
    for one in container["env"]:
        if "value" in one:
            environment[one["name"]] = expanded(one["value"], environment)
    line = [expanded(one, environment) for one in (*container["command"], *container["args"])]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads((Path(environment["ENVBUILD_RUN"]) / "seen").read_text())
    return seen[0], seen[1], seen[2]


@given(words=st.lists(TEXT, max_size=4), value=TEXT)
@examples(25)
def test_a_recording_interpreter_gets_every_argument_and_variable_unchanged_through_sh(
    words: list[str], value: str
) -> None:
    if not carried(*words, value):
        return
    plan = replace(PLAN, command=("train.py", *words), run_files=(), variables=(("NAME", value),))
    with tempfile.TemporaryDirectory() as folder:
        seen, environment, _ = started(plan, Path(folder), {})
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "--local-addr", "10.1.2.3"]
    assert through_torchrun(seen) == [*torchrun, "-m", "ddp_train.launch.rank", "3600", "train.py", *words]
    assert environment["NAME"] == value


@pytest.mark.parametrize(("rank", "is_host"), [("0", "1"), ("1", "0"), ("10", "0")])
def test_a_trainjob_tells_torch_which_pod_is_the_host_of_the_rendezvous(
    rank: str, is_host: str, tmp_path: Path
) -> None:
    operator = {"PET_NODE_RANK": rank, "PET_MASTER_ADDR": "a-node-0-0.a", "PET_MASTER_PORT": "29500"}
    seen, environment, _ = started(second(PLAN), tmp_path, operator)
    conf = f"is_host={is_host},join_timeout=900,read_timeout=300"
    assert environment["PET_RDZV_CONF"] == conf
    assert seen[seen.index("--rdzv-endpoint") + 1] == "a-node-0-0.a:29500"


def test_the_runs_folder_is_made_and_the_image_keeps_its_library_path(tmp_path: Path) -> None:
    plan = replace(PLAN, library_path=("/opt/env/lib", "/opt/x"))
    seen, environment, folder = started(plan, tmp_path, {"LD_LIBRARY_PATH": "/usr/local/lib"})
    assert folder == str(tmp_path)
    assert (tmp_path / "pt-cpu").is_dir()
    run = f"{tmp_path}/pt-cpu"
    assert seen[-4:] == ["--checkpoint_path", f"{run}/snapshot.pt", "--report", f"{run}/report.json"]
    assert environment["LD_LIBRARY_PATH"] == "/opt/env/lib:/opt/x:/usr/local/lib"


def pod_process(plan: JobPlan, folder: Path, interpreter: str, check: int = 0) -> subprocess.Popen[str]:
    """The process of a pod of `plan`, whose interpreter is a script for sh; `check` is the exit code of the check that
    its trainer is not too old."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ "$*" != "-c import ddp_train.launch.rank" ] || exit {check}\n{interpreter}\n')
    python.chmod(0o755)
    made = replace(plan, work=str(folder), artifact=replace(plan.artifact, python=str(python)))
    container = container_of(job_of(with_site(made, mount=str(folder))))
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    operator = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "1"}
    kubelet = {"ENVBUILD_NODE": "1", "ENVBUILD_ADDRESS": "10.1.2.3", "ENVBUILD_POD_UID": "1-2"}
    return subprocess.Popen(
        [*container["command"], *container["args"]],
        env={"PATH": os.environ["PATH"], **kubelet, **operator, **given},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def copied(log: Path) -> list[str]:
    """The lines of a pod's output in the run's folder; START stands for the line that tells pods apart."""
    start = r"^envbuild: pod start: 1-2 at \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"
    return re.sub(start, "START", log.read_text(), flags=re.MULTILINE).splitlines()


@pytest.mark.parametrize("plan", [PLAN, second(PLAN), SINGLE], ids=["v1", "v2", "single"])
def test_what_a_pod_prints_stays_in_the_runs_folder_and_its_exit_code_is_the_trainings(
    plan: JobPlan, tmp_path: Path
) -> None:
    """The operator removes a failed job's pods, and then kubectl has no logs."""
    log = tmp_path / ("pt-cpu/pod-0.log" if plan is SINGLE else "pt-cpu/pod-1.log")
    for times in (1, 2):  # a pod that starts again goes on with its log
        pod = pod_process(plan, tmp_path, "echo out; echo err >&2; exit 7")
        printed, _ = pod.communicate(timeout=20)
        assert (pod.returncode, printed) == (7, "out\nerr\n")
        assert copied(log) == ["START", "out", "err"] * times


def test_a_pods_checks_are_in_its_log_too(tmp_path: Path) -> None:
    pod = pod_process(replace(PLAN, preflight=True), tmp_path, "echo no GPU >&2; exit 3")
    pod.communicate(timeout=20)
    assert pod.returncode == 5
    assert copied(tmp_path / "pt-cpu/pod-1.log") == ["START", "no GPU"]


def test_a_pod_that_is_told_to_end_tells_the_training_and_waits_for_its_last_words(tmp_path: Path) -> None:
    training = "trap 'sleep 1; echo saved; exit 9' TERM; echo begun; while :; do sleep 0.1; done"
    with pod_process(PLAN, tmp_path, training) as pod:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "begun\n"
        pod.terminate()
        assert pod.wait(20) == 9
    assert copied(tmp_path / "pt-cpu/pod-1.log") == ["START", "begun", "saved"]


def test_without_a_claim_nothing_stands_between_the_pod_and_the_training(tmp_path: Path) -> None:
    pod = pod_process(with_site(SINGLE, claim=""), tmp_path, "exit 4")
    pod.communicate(timeout=20)
    assert pod.returncode == 4
    assert not list(tmp_path.glob("*/pod-*"))


def test_an_image_without_python_etcd_ends_and_says_so(tmp_path: Path) -> None:
    plan = replace(PLAN, rendezvous="etcd-v2", rendezvous_endpoint="127.0.0.1:1")
    pod = pod_process(plan, tmp_path, f'exec {sys.executable} -I -S "$@"')
    printed, _ = pod.communicate(timeout=20)
    assert pod.returncode == 1
    assert "lacks python-etcd" in printed and "waiting for" not in printed


@pytest.mark.parametrize("name", PLANS)
def test_the_shell_in_manifests_passes_shellcheck(name: str, tmp_path: Path) -> None:
    script = tmp_path / "start.sh"
    for document in documents(PLANS[name]):
        if document["kind"] in ("PyTorchJob", "TrainJob", "Job"):
            script.write_text("#!/bin/sh\n" + container_of(document)["command"][2])
    # 2006: backquotes instead of $(…), which is kubelet's.
    assert shellcheck("--exclude=SC2006,SC2154", script) == ""


# What the operators do with a manifest.


@pytest.mark.parametrize("plan", [PLAN, second(PLAN)], ids=["PyTorchJob", "TrainJob"])
def test_variables_that_the_operator_sets_are_not_set_by_the_manifest(plan: JobPlan) -> None:
    names = [one["name"] for one in container_of(job_of(plan))["env"]]
    assert len(names) == len(set(names))
    assert not [one for one in names if one.startswith("PET_")]
    args = container_of(job_of(plan))["args"]
    assert not {"--nnodes", "--node-rank"} & set(args)
    # Version 1.7 of the training operator leaves PET_NPROC_PER_NODE out; the command line wins over it in all.
    assert (args[args.index("--nproc-per-node") + 1] == "4") if plan is PLAN else "--nproc-per-node" not in args


def test_a_pytorchjob_leaves_the_rendezvous_to_the_operator_and_meets_by_the_first_pods_name() -> None:
    spec = job_of(PLAN)["spec"]
    assert spec["elasticPolicy"]["rdzvBackend"] == "c10d"
    assert "rdzvHost" not in spec["elasticPolicy"]
    assert (spec["elasticPolicy"]["minReplicas"], spec["elasticPolicy"]["maxReplicas"]) == (2, 2)
    assert not [one for one in container_of(job_of(PLAN))["args"] if "rdzv" in one]


def restarts(backoff_limit: int, pods: int) -> int:
    """How often each pod starts again when all always fail: the controllers give up when the sum reaches the limit."""
    times = 0
    while (times + 1) * pods < backoff_limit:
        times += 1
    return times


@pytest.mark.parametrize("nodes", [1, 2, 64])
def test_each_pod_starts_again_three_times_where_the_controller_compares_with_at_least(nodes: int) -> None:
    limit = job_of(replace(PLAN, nodes=nodes))["spec"]["runPolicy"]["backoffLimit"]
    assert (limit, restarts(limit, nodes)) == (3 * nodes + 1, 3)
    assert restarts(job_of(SINGLE)["spec"]["backoffLimit"], 1) == 3


def test_a_failed_pytorchjob_gives_its_gpus_back_and_no_pod_of_it_completes_before_all_ranks_have_finished() -> None:
    """Operator 1.9.4 removes no pod of a failed job with the policy None, and with Running it removes those that still
    save, as soon as one pod completes."""
    assert job_of(PLAN)["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"
    for plan in (PLAN, second(PLAN)):
        args = container_of(job_of(plan))["args"]
        start = args.index("ddp_train.launch.rank")
        assert args[start - 1 : start + 4] == ["-m", "ddp_train.launch.rank", "3600", "-m", "ddp_train"]
    for plan in (SINGLE, replace(PLAN, nodes=1)):  # no pod waits for itself
        assert "ddp_train.launch.rank" not in container_of(job_of(plan))["args"]


def test_an_image_whose_trainer_is_too_old_for_the_manifest_says_so(tmp_path: Path) -> None:
    pod = pod_process(PLAN, tmp_path, "echo trained", check=1)
    printed, _ = pod.communicate(timeout=20)
    assert pod.returncode == 5 and "the image has no ddp_train.launch.rank" in printed and "trained" not in printed


def test_the_pods_of_a_pytorchjob_have_its_deadline_themselves() -> None:
    """The operator's own is looked at only when something else happens."""
    job = job_of(PLAN)
    assert pod_of(job)["activeDeadlineSeconds"] == 3600
    assert job["spec"]["runPolicy"]["activeDeadlineSeconds"] == 3600


@pytest.mark.parametrize("plan", [PLAN, second(PLAN)], ids=["PyTorchJob", "TrainJob"])
def test_etcd_comes_with_the_job_pinned_and_under_its_own_name(plan: JobPlan) -> None:
    service, deployment, job = documents(replace(plan, rendezvous="etcd-v2"))
    etcd = deployment["spec"]["template"]["spec"]["containers"][0]
    assert re.fullmatch(r"quay\.io/coreos/etcd:v3\.5\.\d+", etcd["image"])
    assert "--enable-v2=true" in etcd["command"]
    # Clients go to what it advertises: never 0.0.0.0.
    assert "--advertise-client-urls=http://pt-cpu-etcd:2379" in etcd["command"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert service["metadata"]["name"] == "pt-cpu-etcd"
    assert "pt-cpu-etcd:2379" in container_of(job)["command"][2]


def test_a_site_says_which_image_of_etcd_and_the_job_which_server() -> None:
    own = with_site(replace(PLAN, rendezvous="etcd-v2"), etcd_image="mirror.example.org/etcd:v3.4.30")
    deployment = documents(own)[1]
    image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image == "mirror.example.org/etcd:v3.4.30"
    theirs = replace(PLAN, rendezvous="etcd-v2", rendezvous_endpoint="etcd.infra:12379")
    (job,) = documents(theirs)
    assert job["spec"]["elasticPolicy"]["rdzvHost"] == "etcd.infra"
    assert job["spec"]["elasticPolicy"]["rdzvPort"] == 12379


@pytest.mark.parametrize("name", PLANS)
def test_pods_ask_for_what_the_site_and_the_artifact_say(name: str) -> None:
    plan = PLANS[name]
    job = job_of(plan)
    pod, container = pod_of(job), container_of(job)
    limits = (container.get("resources") or container["resourcesPerNode"])["limits"]
    if plan.gpus_per_node:
        assert limits == {
            "cpu": "180",
            "memory": "1900Gi",
            "nvidia.com/gpu": "8",
            "vpc.amazonaws.com/efa": "32",
            "hugepages-2Mi": "5120Mi",
        }
        assert pod["nodeSelector"]["kubernetes.io/arch"] == "arm64"
        assert pod["imagePullSecrets"] == [{"name": "ecr"}]
        assert "affinity" not in pod
    else:
        assert limits == {"cpu": "4", "memory": "8Gi"}
        assert pod["nodeSelector"]["kubernetes.io/arch"] == "amd64"
        assert ("affinity" in pod) == (plan.nodes > 1)
    assert container["image"] == plan.artifact.path
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes["data"]["persistentVolumeClaim"] == {"claimName": "fsx-pv"}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": plan.site.kubernetes.shm}
    mounted = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    assert mounted.keys() == volumes.keys()
    assert (mounted["data"], mounted["shm"]) == ("/fsx", "/dev/shm")
    assert {*mounted.values()} - {"/fsx", "/dev/shm"} == (
        {"/datasets", "/scratch", "/config", "/etc/wandb"} if "kueue" in name else set()
    )


def not_restricted(pod: dict[str, Any]) -> list[str]:
    """What PodSecurity `restricted` refuses, of what our pods could have: kubernetes.io/docs/concepts/security/
    pod-security-standards."""
    whole = pod.get("securityContext", {})
    found = [] if whole.get("runAsNonRoot") is True else ["runAsNonRoot"]
    found += [] if whole.get("runAsUser") else ["runAsUser"]
    found += [] if whole.get("seccompProfile") == {"type": "RuntimeDefault"} else ["seccompProfile"]
    for one in pod["containers"]:
        own = one.get("securityContext", {})
        found += [] if own.get("allowPrivilegeEscalation") is False else ["allowPrivilegeEscalation"]
        found += [] if own.get("capabilities") == {"drop": ["ALL"]} else ["capabilities"]
    kinds = {key for volume in pod["volumes"] for key in volume if key != "name"}
    return found + sorted(kinds - {"configMap", "emptyDir", "persistentVolumeClaim", "secret"})


@pytest.mark.parametrize("name", PLANS)
def test_a_site_that_names_a_user_has_pods_that_podsecurity_restricted_takes(name: str) -> None:
    pods = [
        pod_of(one) if one["kind"] != "Deployment" else one["spec"]["template"]["spec"]
        for one in documents(with_site(PLANS[name], run_as="1000"))
        if one["kind"] != "Service"
    ]
    assert [not_restricted(pod) for pod in pods] == [[] for _ in pods]
    assert not_restricted(pod_of(job_of(PLANS[name]))) != []
    made = with_site(PLANS[name], run_as="1000:2000")
    whole = pod_of(job_of(made))["securityContext"]
    assert (whole["runAsGroup"], whole["fsGroup"]) == (2000, 2000)
    assert [fault for one in documents(made) for fault in faults(one)] == []
    home = {one["name"]: one.get("value") for one in container_of(job_of(made))["env"]}
    assert (home["HOME"], home["USER"]) == ("/tmp", "envbuild")


@pytest.mark.parametrize("name", PLANS)
def test_pods_have_no_token_of_the_api_server(name: str) -> None:
    """Training needs none. A TrainJob cannot set it: its fields are those of Trainer's PodSpecPatch."""
    for one in documents(PLANS[name]):
        if one["kind"] not in ("Service", "TrainJob"):
            pod = pod_of(one) if one["kind"] != "Deployment" else one["spec"]["template"]["spec"]
            assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", PLANS)
def test_the_logs_command_of_the_docs_finds_the_pods_of_every_kind_of_job_and_not_etcds(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs/howto/jobs.md").read_text()
    (selector,) = re.findall(r"^    kubectl logs .* -l (\S+)=pt-cpu ", page, re.MULTILINE)
    *others, job = documents(PLANS[name])
    if job["kind"] == "TrainJob":
        patch = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
        assert len(patch["name"]) <= 20, "Trainer 2.4 takes no longer names of replicated jobs"
        template = patch["template"]["spec"]["template"]
    else:
        template = (job["spec"]["pytorchReplicaSpecs"]["Worker"] if job["kind"] == "PyTorchJob" else job["spec"])[
            "template"
        ]
    assert template["metadata"]["labels"][selector] == job["metadata"]["name"]
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in others if one["kind"] == "Deployment"]
    assert all(found[selector] != job["metadata"]["name"] for found in labels)


def test_etcds_pod_may_run_where_the_jobs_pods_may() -> None:
    job = queued(replace(PLAN, rendezvous="etcd-v2"), "q", pull_secret="ecr", priority_class="high", **KUEUE)
    template = documents(job)[1]["spec"]["template"]
    pod = template["spec"]
    assert pod["tolerations"] == pod_of(job_of(job))["tolerations"]
    assert (pod["serviceAccountName"], pod["imagePullSecrets"]) == ("training-sa", [{"name": "ecr"}])
    assert pod["priorityClassName"] == "high"
    assert template["metadata"]["labels"] == {
        "app.kubernetes.io/instance": "pt-cpu-etcd",
        "team": "ml-platform",
        "example.org/cost-center": "42",
    }
    assert documents(job)[1]["spec"]["selector"]["matchLabels"] == {"app.kubernetes.io/instance": "pt-cpu-etcd"}
    assert [fault for one in documents(job) for fault in faults(one)] == []


@pytest.mark.parametrize(
    ("gpu_types", "nodes", "api", "preflight", "claims"),
    [
        (("gb200",), 4, "v1", True, True),
        (("h100", "gb300"), 2, "v1", True, True),
        (("gb200",), 1, "v1", False, False),
        (("gh200",), 4, "v1", True, False),
        (("b200",), 4, "v1", False, False),
        (("gb200",), 4, "v2", True, False),
    ],
)
def test_pods_of_a_pytorchjob_claim_a_channel_of_imex_where_the_gpus_come_in_racks_of_one_nvlink_domain(
    gpu_types: tuple[str, ...], nodes: int, api: Any, preflight: bool, claims: bool
) -> None:
    site = replace(GPUS, node=replace(GPUS.node, gpu_types=gpu_types), kubernetes=replace(GPUS.kubernetes, api=api))
    plan = replace(PLAN, artifact=EFA, site=site, nodes=nodes, gpus_per_node=8, nproc_per_node=8, preflight=True)
    *domains, job = documents(plan)
    assert faults(job) == []
    assert ("ENVBUILD_IMEX=/dev/nvidia-caps-imex-channels " in render_kubernetes(plan)) is preflight
    if not claims:
        assert domains == [] and "imex" not in json.dumps(job).replace("nvidia-caps-imex-channels", "")
        return
    name = job["metadata"]["name"]
    assert domains == [
        {
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "ComputeDomain",
            "metadata": {"name": name, "namespace": "ml", "labels": {"app.kubernetes.io/instance": name}},
            "spec": {"numNodes": nodes, "channel": {"resourceClaimTemplate": {"name": name}}},
        }
    ]
    spec = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (claim,) = spec["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == name
    resources = container_of(job)["resources"]
    assert resources["claims"] == [{"name": claim["name"]}] and resources["limits"]["nvidia.com/gpu"] == "8"


def test_a_queue_is_the_jobs_label_and_that_of_volcanos_pod_group() -> None:
    """Kueue takes the job, and would take pods with its labels a second time."""
    for name in ("pytorchjob-kueue", "trainjob-kueue", "job-kueue"):
        job = job_of(PLANS[name])
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training-queue"
        assert job["metadata"]["labels"]["team"] == "ml-platform"
        assert "suspend" not in job["spec"]  # Kueue's webhook sets it; elsewhere the job would never start
    labels = job_of(PLANS["pytorchjob-kueue"])["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"][
        "labels"
    ]
    assert labels == {"app.kubernetes.io/instance": "pt-cpu", "team": "ml-platform", "example.org/cost-center": "42"}
    gang = job_of(PLANS["pytorchjob-volcano"])["spec"]["runPolicy"]["schedulingPolicy"]
    assert gang == {"queue": "high-priority-queue", "priorityClass": "training"}
    second_job = job_of(PLANS["trainjob-volcano"])["spec"]
    assert second_job["runtimeRef"]["name"] == "torch-distributed-volcano"
    patch = second_job["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["metadata"]
    assert patch == {"annotations": {"scheduling.volcano.sh/queue-name": "high-priority-queue"}}


@pytest.mark.parametrize("name", ["pytorchjob-kueue", "trainjob-kueue", "job-kueue"])
def test_secrets_are_references_to_variables_and_files(name: str) -> None:
    job = job_of(PLANS[name])
    (token,) = [one for one in container_of(job)["env"] if one["name"] == "HF_TOKEN"]
    assert token == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "huggingface", "key": "token"}}}
    pod = pod_of(job)
    (volume,) = [one for one in pod["volumes"] if "secret" in one]
    assert volume["secret"] == {"secretName": "wandb"}
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == volume["name"]]
    assert mount == {"name": volume["name"], "mountPath": "/etc/wandb", "readOnly": True}


def test_pods_have_the_sites_time_to_save_and_torchrun_leaves_it_to_them() -> None:
    def shutdown(plan: JobPlan) -> list[str]:
        env = container_of(job_of(plan))["env"]
        return [one["value"] for one in env if one["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]

    assert pod_of(job_of(PLAN))["terminationGracePeriodSeconds"] == 30
    assert shutdown(PLAN) == []
    for plan in (PLAN, second(PLAN)):
        longer = with_site(plan, grace=300)
        assert pod_of(job_of(longer))["terminationGracePeriodSeconds"] == 300
        assert shutdown(longer) == ["295"]
    # A field of Trainer 2.3: 2.2 refuses it.
    assert "terminationGracePeriodSeconds" not in pod_of(job_of(second(PLAN)))
    alone = with_site(SINGLE, grace=300)
    assert (pod_of(job_of(alone))["terminationGracePeriodSeconds"], shutdown(alone)) == (300, [])


@pytest.mark.parametrize(("retries", "nodes", "limit"), [(3, 2, 7), (0, 8, 1), (5, 64, 321)])
def test_a_site_says_how_often_pods_start_again(retries: int, nodes: int, limit: int) -> None:
    plan = with_site(replace(PLAN, nodes=nodes), retries=retries)
    assert job_of(plan)["spec"]["runPolicy"]["backoffLimit"] == limit


def test_the_runtime_of_the_docs_is_one_that_trainer_understands() -> None:
    from kubeflow_trainer_api.models.trainer_v1alpha1_cluster_training_runtime import (
        TrainerV1alpha1ClusterTrainingRuntime,
    )

    page = (Path(__file__).parents[2] / "docs/reference/site.md").read_text()
    block = page[page.index("    apiVersion: trainer.kubeflow.org") :].partition("\n\n")[0]
    runtime = yaml.safe_load(block)
    made = TrainerV1alpha1ClusterTrainingRuntime.from_dict(runtime)
    assert made is not None and made.to_dict() == runtime
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    core = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": copy.deepcopy(spec)}
    core["spec"]["template"]["spec"]["restartPolicy"] = "OnFailure"
    assert faults(core) == []
    assert spec["backoffLimit"] == job_of(replace(PLAN, nodes=64))["spec"]["runPolicy"]["backoffLimit"]


def test_as_many_pods_as_linux_can_tell_a_process_of_and_not_one_more() -> None:
    """execve(2) takes no string of 128 KiB or more: a pod with one would never start."""
    fits = [number for number in (2000, 2937, 2938) if renders(replace(PLAN, name="x" * 32, nodes=number))]
    assert fits == [2000, 2937]
    with pytest.raises(UsageError, match="ENVBUILD_HOSTS, the names of 9999 pods, has ") as caught:
        render_kubernetes(replace(PLAN, name="x" * 32, nodes=9999))
    assert "--nodes" in (caught.value.hint or "")
    one = f"x={'a' * (128 * 1024 - 3)}"
    assert subprocess.run(["/usr/bin/env", "-i", one, "true"]).returncode == 0
    with pytest.raises(OSError):
        subprocess.run(["/usr/bin/env", "-i", f"{one}a", "true"])


def renders(plan: JobPlan) -> bool:
    try:
        return bool(render_kubernetes(plan))
    except UsageError:
        return False


def test_a_single_pod_without_a_claim_keeps_its_files_while_it_is_restarted() -> None:
    pod = pod_of(job_of(with_site(SINGLE, claim="", shm="")))
    assert pod["volumes"] == [{"name": "data", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]


@pytest.mark.parametrize(
    ("shm", "limit", "wanted"),
    [("64K", "64k", 64000), ("2G", "2G", 2 * 10**9), ("1Ti", "1Ti", 2**40), ("12", "12", 12)],
)
def test_sizes_are_written_as_kubernetes_and_preflight_read_them(shm: str, limit: str, wanted: int) -> None:
    job = job_of(with_site(replace(PLAN, preflight=True), shm=shm))
    assert pod_of(job)["volumes"][1]["emptyDir"]["sizeLimit"] == limit
    assert f"--shm {wanted} " in container_of(job)["command"][2] + " "


DNS = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@given(name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True), nodes=st.integers(1, 1000))
@examples(30)
def test_every_name_that_a_job_can_have_becomes_names_of_pods_and_services(name: str, nodes: int) -> None:
    for plan in (PLAN, second(PLAN)):
        made = replace(plan, name=name, nodes=nodes, rendezvous="etcd-v2")
        found = [one["metadata"]["name"] for one in documents(made)]
        last = f"-worker-{nodes - 1}" if plan is PLAN else f"-node-0-{nodes - 1}-abcde"
        found.append(f"{found[-1]}{last}")
        assert all(DNS.fullmatch(one) and len(one) <= 63 for one in found), found


def test_two_long_names_that_begin_alike_stay_two() -> None:
    one, two = (job_name("x" * 60 + end, "-worker-10") for end in "ab")
    assert one != two
    assert len(one) <= 53
    assert job_name("3d_UNet.v2", "") == "job-3d-unet-v2"


@pytest.mark.parametrize(("text", "wanted"), [("01:00:00", 3600), ("2-03:04:05", 183845), ("100:00:00", 360000)])
def test_times_of_schedulers_become_seconds(text: str, wanted: int) -> None:
    assert seconds(text) == wanted


@pytest.mark.parametrize(
    ("plan", "message", "hint"),
    [
        (replace(PLAN, artifact=replace(CPU, path="ml/pt_cpu:latest")), "not an image by its digest", "--push"),
        (replace(PLAN, artifact=replace(CPU, kind="venv", path="/fsx/venv")), "not an image by its digest", "--push"),
        (replace(PLAN, strategy="horovod"), "MPIJob", "--strategy ddp"),
        (with_site(PLAN, claim=""), "share no file system", "[kubernetes] claim"),
        (replace(PLAN, work="/home/me"), "pods see /fsx, and the job's folder is /home/me", "--work"),
        (replace(PLAN, work="/fsxother"), "pods see /fsx", "--work"),
        (with_site(PLAN, node_selector={"kubernetes.io/arch": "arm64"}), "chooses arm64 nodes", "node_selector"),
        (with_site(ON_GPUS, resources={}), "needs EFA", "vpc.amazonaws.com/efa"),
        (replace(ON_GPUS, cpus_per_node=0, site=replace(GPUS, node=NodeTable(gpus=8))), "huge pages", "[node] cpus"),
        (with_site(ON_GPUS, resources={"nvidia.com/gpu": "4"}), "nvidia.com/gpu", "[kubernetes] resources"),
        (replace(PLAN, rendezvous="etcd-v2", rendezvous_endpoint="$(id):1"), "not the endpoint", "HOST:PORT"),
        (replace(PLAN, rendezvous="etcd-v2", rendezvous_endpoint="host:99999"), "not the endpoint", "HOST:PORT"),
        (replace(PLAN, variables=(("HF_TOKEN", "x"),)), "sounds like a secret", "site file"),
        (replace(PLAN, variables=(("PET_NNODES", "1"),)), "PET_NNODES is set by the job itself", "site file"),
        (replace(PLAN, variables=(("ENVBUILD_NODE", "1"),)), "ENVBUILD_NODE is set by the job itself", "site file"),
        (second(replace(PLAN, command=("train.py", *["x"] * 128))), "128 arguments", 'api = "v1"'),
        (with_site(PLAN, runtime="mine"), "[kubernetes] runtime: is for TrainJobs", 'api = "v2"'),
        (with_site(second(PLAN), ttl=60), "cannot set ttlSecondsAfterFinished", "[kubernetes] runtime"),
        (with_site(second(PLAN), priority_class="a"), "cannot set priorityClassName", "[kubernetes] runtime"),
        (with_site(second(PLAN), retries=9), "cannot set backoffLimit", "[kubernetes] runtime"),
        (queued(PLAN, "not/a/label"), "[scheduler] partition: 'not/a/label' is not the value of a label", "Kueue"),
        (queued(PLAN, "a", labels={"kueue.x-k8s.io/queue-name": "b"}), "[kubernetes] labels another", "one of them"),
        (with_site(PLAN, secrets={"OMP_NUM_THREADS": "a/b"}), "OMP_NUM_THREADS is set by the job", "one of them"),
        (with_site(PLAN, secrets={"PET_NNODES": "a/b"}), "PET_NNODES is set by the job", "one of them"),
        (
            with_site(PLAN, volumes={"/fsx/": "empty"}),
            "two volumes of site aws-eks have the mount path /fsx",
            "change a path",
        ),
        (with_site(PLAN, volumes={"/a": "empty"}, secrets={"/a": "s"}), "two volumes", "change a path"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_change(plan: JobPlan, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        render_kubernetes(plan)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
