"""From logs to causes: every rule with a log of what it is about, most of them made by really provoking it."""
# ruff: noqa: E501  (lines of logs stand on one line)

from __future__ import annotations

import bz2
import functools
import gzip
import json
import lzma
import os
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import each_case
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.golden import assert_golden_table

from envbuild.cli.diagnose import diagnose_command
from envbuild.jobcheck.diagnose import engine, read
from envbuild.jobcheck.diagnose.engine import Diagnosis, LineShapes, TextIndex, _Reader, diagnose
from envbuild.jobcheck.diagnose.read import job_number, read_logs
from envbuild.jobcheck.diagnose.rules import PLACES, DiagnosisRule, LinePattern, load_rules, needles
from examples import examples

DATA = Path(__file__).parent / "data"
DOCS = Path(__file__).parents[2] / "docs/reference/diagnoses.md"
RULES = {rule.id: rule for rule in load_rules()}
EVERYWHERE = [rule for place in PLACES for rule in load_rules(place)]
# NCCL's own logs are kept with the tests of jobcheck/diagnose/nccl_log.py.
NCCL = {
    "efa-absent": "efa_no_device",
    "cxi-domain": "cxi_no_domain",
    "network-missing": "network_not_found",
    "sockets-fallback": "socket",
    "plugin-missing": "no_plugin",
    "plugin-failed": "efa_endpoint_failed",
}
GOOD_NCCL = ["cxi", "efa", "ib", "efa_no_channels"]


# The logs by their names, which those of several nodes of a job share.
LOGS: dict[str, list[Path]] = {}
for _path in sorted((DATA / "logs").glob("*.log")):
    LOGS.setdefault(re.sub(r"-n\d$", "", _path.stem), []).append(_path)


def logs_of(name: str) -> list[Path]:
    """The log, or the logs of the nodes, called `name`."""
    return [DATA / "nccl" / f"{NCCL[name]}.log"] if name in NCCL else LOGS.get(name, [])


@functools.cache
def matches() -> dict[str, frozenset[LinePattern]]:
    """Each line of the logs, and the patterns that match it."""
    patterns = {pattern for rule in EVERYWHERE for pattern in rule.patterns}
    lines = dict.fromkeys(line for path in sorted(DATA.glob("*/*.log")) for line in path.read_text().splitlines())
    return {line: frozenset(pattern for pattern in patterns if pattern.regex.search(line)) for line in lines}


def of(*paths: Path) -> Diagnosis:
    return diagnose(read_logs([str(path) for path in paths]), load_rules())


def told(*lines: str) -> list[str]:
    return [one.id for one in diagnose([("log", lines)], load_rules()).findings]


def follows(rule: DiagnosisRule) -> bool:
    """Whether a rule is about what follows from any failure, and comes first in no log of its own."""
    return rule.kind == "symptom" and rule.rank <= engine._CONSEQUENCE


def rules(*, provoked: bool) -> list[DiagnosisRule]:
    return [rule for rule in RULES.values() if rule.provoked is provoked and not follows(rule)]


def is_first_in_its_log(rule: DiagnosisRule) -> None:
    found = of(*logs_of(rule.id)).findings
    assert [one.id for one in found][:1] == [rule.id]
    assert found[0].evidence and "?" not in found[0].evidence[0].file
    assert not re.search(r"\{\w+\}", found[0].cause + found[0].hint)


@each_case("rule", rules(provoked=True), ids=lambda rule: rule.id)
def test_the_cause_that_was_provoked_is_found_first(rule: DiagnosisRule) -> None:
    is_first_in_its_log(rule)


@each_case("rule", rules(provoked=False), ids=lambda rule: rule.id)
def test_the_cause_is_found_first_in_lines_from_its_source_not_provoked_here(rule: DiagnosisRule) -> None:
    is_first_in_its_log(rule)
    first = logs_of(rule.id)[0].read_text().splitlines()[0]
    assert first.startswith("# ")


@each_case("path", sorted((DATA / "logs").glob("*.*.log")), ids=lambda path: path.stem)
def test_the_cause_is_found_first_in_what_other_programs_print(path: Path) -> None:
    found = of(path).findings
    assert [one.id for one in found][:1] == [path.stem.partition(".")[0]]
    assert "?" not in found[0].cause + found[0].hint
    assert path.read_text().startswith("# ")


def test_a_message_shows_no_value_that_no_line_told() -> None:
    """What a pattern may leave unsaid stands in [[…]], which goes where a value of it is missing."""
    for rule in EVERYWHERE:
        told = {name for pattern in rule.all for name in pattern.regex.groupindex}
        told |= {name for one in rule.counts if one.at_least for name in one.line.regex.groupindex}
        told |= {"count"} if rule.counts else set()
        told |= {"is"} if rule.every else set()
        if rule.any:
            told |= set.intersection(*(set(one.regex.groupindex) for one in rule.any))
        for text in (rule.cause, rule.hint, rule.pod_hint):
            always = re.sub(r"\[\[.*?\]\]", "", text).replace("{{", "").replace("}}", "")
            assert set(re.findall(r"\{(\w+)\}", always)) <= told, rule.id


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['The following module(s) are unknown: "cuda/99"'], "no module cuda/99 is found"),
        (["1: The following module(s) are unknown:", '1: "cuda/99"'], "no module cuda/99 is found"),
        (["The following module(s) are unknown:"], "no module of that name is found"),
        (["srun: error: n1: task 0: Segmentation fault"], "a process crashed (Segmentation fault) in compiled"),
        (["failed (exitcode: -11) local_rank: 0"], "a process crashed (signal 11) in compiled"),
        (["CUDA error: out of memory"], "the GPU's memory is full"),
        (["srun: error: n1: task 0: Exited with exit code 3"], "an error (exit code 3)"),
        (["slurmctld: Killing job 7 on failed node n2"], "a node of the job failed"),
    ],
)
def test_a_message_tells_what_is_known_and_no_question_mark(lines: list[str], says: str) -> None:
    cause = diagnose([("log", lines)], load_rules()).findings[0].cause
    assert says in cause
    assert "?" not in cause


def test_a_sigterm_is_the_cause_of_what_follows_it_and_not_of_what_was_before() -> None:
    """As the end of a pod by a deadline: the head's store goes with it."""
    head, other = logs_of("sigterm")
    found = [one.id for one in of(head, other).findings]
    assert found[0] == "sigterm"
    assert "store-unreachable" in found[1:]
    assert "sigterm" not in [one.id for one in of(other, head).findings]
    ended = head.read_text().splitlines()
    assert "sigterm" not in told("E failed (exitcode: 1) local_rank: 0", *ended)
    assert told(*ended, "*** STEP 1.0 ON n1 CANCELLED AT 2026-11-21T20:50:40 DUE TO TIME LIMIT ***")[0] == "time-limit"


def test_a_job_that_trained_after_a_node_failed_failed_for_another_reason() -> None:
    failed = logs_of("node-failure")[0].read_text().splitlines()
    lines = [*failed, *[_EPOCH] * 12, "CUDA out of memory. Tried to allocate 2.00 GiB", *_TORCHRUN]
    assert told(*lines)[0] == "gpu-memory"
    assert told(*failed)[0] == "node-failure"


def test_a_job_that_a_later_attempt_ended_well_has_no_cause() -> None:
    failed = logs_of("node-failure")[0].read_text().splitlines()
    tail = [
        "srun: error: n2: task 1: Killed",
        "RuntimeError: [1] is setting up NCCL communicator: Broken pipe",
        *_TORCHRUN,
    ]
    good = ["I torch/distributed/elastic/agent/server/api.py:889] [default] worker group successfully finished."]
    assert told(*failed, *tail, *good) == []
    assert told(*failed, *tail, *[_EPOCH] * 12) == []
    assert told("*** JOB 1 ON n1 CANCELLED AT 2026 DUE TO JOB REQUEUE ***", *tail, *good) == []
    # Of the attempt that ended the job, each line counts.
    assert told(*failed, *[_EPOCH] * 12, *tail)[0] == "worker-killed"
    assert told(*failed, _EPOCH, *tail, _EPOCH)[0] == "node-failure"


@pytest.mark.parametrize(
    ("pod", "slurm"),
    [
        ("[pod/ddp-worker-0/pytorch] ", "srun: error: n1: task 0: Exited with exit code 1"),
        ("Controlled By:  PyTorchJob/ddp\n", "sbatch: Submitted batch job 7"),
        ("envbuild: pod start: 1b2c at 2026-11-26T10:00:00Z\n", ""),
    ],
)
@pytest.mark.parametrize(
    "cause",
    [
        "failed (exitcode: -9) local_rank: 1",
        "Out of memory: Killed process 12 (python)",
        "CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_the_advice_fits_the_place(pod: str, slurm: str, cause: str) -> None:
    hints = [diagnose([("log", [f"{begin}{cause}"])], load_rules()).findings[0].hint for begin in (pod, f"{slurm}\n")]
    assert all(word not in hints[0] for word in ("dmesg", "sacct", "--mem", "sbatch"))
    assert any(word in hints[1] for word in ("sacct", "--mem", "sbatch"))


def test_a_name_server_that_does_not_answer_is_told_from_an_unknown_name() -> None:
    lines = [
        "[c10d] The IPv4 network addresses of (ddp-master-0, 29500) cannot be retrieved (gai error: {} - x)",
        "DistNetworkError",
    ]
    silent, unknown = (
        diagnose(
            [("log", [f"[pod/ddp-worker-0/pytorch] {line.format(code)}" for line in lines])], load_rules()
        ).findings[0]
        for code in (-3, -2)
    )
    assert "ddp-master-0 cannot be looked up on a node (error -3: no name server answers)" in silent.cause
    assert "error" not in unknown.cause and "headless service" in unknown.hint


def test_every_symptom_follows_from_a_cause_in_some_log() -> None:
    seen = {one.id for rule in rules(provoked=True) for one in of(*logs_of(rule.id)).findings if one.kind == "symptom"}
    assert {rule.id for rule in RULES.values() if follows(rule)} <= seen


def test_every_log_belongs_to_a_rule_and_a_readme_says_how_it_was_made() -> None:
    readme = (DATA / "logs/README.md").read_text()
    for path in sorted((DATA / "logs").glob("*.log")):
        name = re.sub(r"-n\d$", "", path.stem)
        assert name.partition(".")[0] in RULES or name.startswith("good")
        assert f"| {name} |" in readme
        assert not re.search(r"/root\b|/tmp/(?!torchelastic)", path.read_text())


@pytest.mark.parametrize(
    "paths",
    [
        *map(logs_of, ("good", "good-head-gone", "good-late-name")),
        *([DATA / "nccl" / f"{name}.log"] for name in GOOD_NCCL),
    ],
)
def test_logs_of_jobs_that_went_well_yield_nothing(paths: list[Path]) -> None:
    assert of(*paths).findings == ()


_ASKING = "[W socket.cpp:601] [c10d] The IPv6 network addresses of (n1, 29500) cannot be retrieved (gai error: -2 - x)."
_NO_WAY = "[W socket.cpp:663] [c10d] The client socket has failed to connect to [::ffff:10.1.96.108]:29500 (errno: 101 - Network is unreachable)."
_BOUND = (
    "[W socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use)."
)
_EPOCH = "[rank0]: Epoch 1 | loss 1.9"


@each_case(
    "lines",
    [
        [_ASKING, _NO_WAY, _BOUND, _EPOCH],
        [_ASKING, _NO_WAY, _BOUND],
        ["[W] [c10d] The client socket has timed out after 60000ms", _ASKING, _NO_WAY, _EPOCH],
        ["TensorBoard could not bind to port 6006: Address already in use; using 6007"],
        ["Error: listen EADDRINUSE: address already in use :::6006"],
        ["qsub: waiting for job 1234.pbs01 to start", "qsub: job 1234.pbs01 ready", "qsub: job 1234.pbs01 completed"],
        ["ModuleNotFoundError: No module named 'apex'", "apex not available", _EPOCH],
        ["bash: line 3: docker: command not found", _EPOCH],
        ["bash: module: command not found", "OSError: [Errno 30] Read-only file system: '/home/u/.config'", _EPOCH],
        ["rpc error: code = DeadlineExceeded desc = context deadline exceeded"],
        ['Warning  FailedScheduling  9s  default-scheduler  persistentvolumeclaim "a" not found', _EPOCH],
        ["pod evicted: 0", "Evicted 12 entries from the cache", "Reason: the quota is not exceeded"],
        ["    State:  Terminated", "      Exit Code:    0", "step 137 exit code 1370", "exited with exit code 13"],
        ["OSError: [Errno 116] Stale file handle: '/scratch/a'", _EPOCH],
        ["INFO looking for an image: No such file or directory: /a/b", "lookup table host: no such host type"],
        ["    Reason:  PyTorchJobCreated", "    Reason:  PyTorchJobRunning"],
        ["    Reason:  PyTorchJobCreated", "    Reason:  PyTorchJobSucceeded"],
        ["WARNING: Connection reset by peer while talking to wandb", "BrokenPipeError: [Errno 32] Broken pipe", _EPOCH],
    ],
)
def test_what_a_job_got_over_is_no_cause(lines: list[str]) -> None:
    assert told(*lines) == []


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            [_ASKING, "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms"],
            "name-unknown",
        ),
        (["ssh: Could not resolve hostname n7: Name or service not known"], "name-unknown"),
        ([_NO_WAY, "…RendezvousConnectionError"], "no-route"),
        ([_BOUND, "RuntimeError: The server socket has failed to listen on any local network address."], "port-in-use"),
        (["RuntimeError: Address already in use"], "port-in-use"),
        (["qsub: Unknown queue"], "submission-refused"),
        (["qsub: job rejected by all possible destinations"], "submission-refused"),
        # Other ranks write a little more before they are ended.
        (
            [_EPOCH, "ModuleNotFoundError: No module named 'apex'", _EPOCH, "E failed (exitcode: 1) local_rank: 0"],
            "no-module",
        ),
    ],
)
def test_what_ended_a_job_is_its_cause(lines: list[str], cause: str) -> None:
    assert told(*lines)[0] == cause


def test_the_name_of_an_error_that_begins_like_another_ones_is_not_its() -> None:
    lines = [
        "RuntimeError: HIP error: invalid device function",
        "Search for `hipErrorInvalidDeviceFunction' in its docs.",
    ]
    assert told(*lines) == ["gpu-architecture"]
    assert told("RuntimeError: CUDA_ERROR_INVALID_DEVICE") == ["gpu-ordinal"]


_QUOTED = "[rank0]: Last error:"


@each_case(
    ("lines", "cause"),
    [
        ([_QUOTED, "[rank0]: Cuda failure 101 'invalid device ordinal'"], "gpu-ordinal"),
        ([_QUOTED, "[rank0]: Cuda failure 'operation not supported'"], "cuda-unusable"),
        ([_QUOTED, "[rank0]: Message truncated : received 1024 bytes instead of 256"], "nccl-truncated"),
        ([_QUOTED, "[rank0]: Bootstrap : no socket interface found"], "nccl-interface"),
        ([_QUOTED, "[rank0]: Error: network AWS Libfabric not found."], "network-missing"),
        (
            [
                _QUOTED,
                "[rank0]: Error while creating shared memory segment /dev/shm/nccl-a (size 9), error: No space left on device (28)",
            ],
            "shared-memory",
        ),
        ([_QUOTED, "[rank0]: Failed to CUDA calloc 10485760 bytes"], "nccl-allocation"),
        ([_QUOTED, "[rank0]: NET/IB: Got completion from peer 10.0.0.1<47> with status=12 opcode=0"], "ib-no-answer"),
        ([_QUOTED, "[rank0]: Call to bind failed : Cannot assign requested address"], "nccl-bind"),
        (
            [
                _QUOTED,
                "[rank0]: socketPollConnect: Connect to 10.0.0.5<40001> returned 110(Connection timed out) errno 115(Operation now in progress)",
            ],
            "nccl-no-route",
        ),
        (
            [
                "n1:1:1 [0] NCCL INFO ncclOsSocketPollConnect: connect to 10.0.0.5<40001> returned Connection refused, retrying (34/34) after sleep for 3400 msec"
            ],
            "nccl-refused",
        ),
        (
            [
                "RuntimeError: unable to open shared memory object </torch_77_1> in read-write mode: Permission denied (13)"
            ],
            "shm-denied",
        ),
        (["Failed to initialize NVML: Driver/library version mismatch"], "driver-mismatch"),
        (["RuntimeError: CUDA error: system not yet initialized"], "fabric-manager"),
        (["FloatingPointError: Minimum loss scale reached (0.0001)."], "loss-scale"),
        (["RuntimeError: Function 'MulBackward0' returned nan values in its 0th output."], "loss-nan"),
        (["RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"], "cublas-failed"),
        (
            ["torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGSEGV"],
            "worker-crashed",
        ),
        (["RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly"], "loader-worker-failed"),
        (
            [
                "[c10d] The IPv6 network addresses of ( 10.0.5.4, 29500) cannot be retrieved (gai error: -2 - x)",
                "DistNetworkError",
            ],
            "endpoint-malformed",
        ),
        (
            [
                "[c10d] The IPv4 network addresses of (tcp://n1, 29500) cannot be retrieved (gai error: -2 - x)",
                "DistNetworkError",
            ],
            "endpoint-malformed",
        ),
        (
            ["TimeoutError: The client socket has timed out after 1800s while trying to connect to (node1, 29500)."],
            "store-timeout",
        ),
        (
            ["[c10d] The client socket has timed out after 300000ms while trying to connect to (127.0.0.1, 29500)."],
            "store-local",
        ),
        (
            [
                "slurmstepd: error: container_p_join: setns failed for /cray/tmp/job_container/286704/.ns: Invalid argument"
            ],
            "job-container",
        ),
        (["srun: error: Unable to create job step: Memory required by task is not available"], "step-refused"),
        (["but OMPI was not built with SLURM support. This usually happens"], "mpi-slurm"),
        (["n2: Permission denied (publickey,password)."], "ssh-refused"),
        (["ssh: connect to host n2 port 22: Connection refused"], "ssh-unreachable"),
        (
            ["[c10d] The client socket has timed out after 1800s while trying to connect to ( 10.0.5.4, 29500)."],
            "endpoint-malformed",
        ),
        (
            ["n1:1:1 [0] NCCL WARN Net : Call to connect to 10.0.0.5<40001> failed : Connection timed out"],
            "nccl-no-route",
        ),
        (["host=n1 was not reachable via ssh. If you are running with a single node please remove n1"], "ssh-failed"),
        (
            ["salloc: error: --ntasks-per-tres and --ntasks-per-gpu are mutually exclusive"],
            "step-options",
        ),
        (
            [
                'FATAL:   container creation failed: exec: "/opt/nvidia-container-cli": stat /opt/nvidia-container-cli: no'
            ],
            "container-gpus",
        ),
        (
            [
                "sbatch: error: Your project may not use the partition belt without a wheel",
                "sbatch: error: Batch job submission failed: Unspecified error",
            ],
            "submission-refused",
        ),
        (["Reason=gres/gpu count reported lower than configured (2 < 8) [slurm@2026-01-02T03:04:05]"], "slurm-node"),
        (["=>> PBS: job killed: mem 1048576kb exceeded limit 1024kb"], "pbs-memory"),
        (["TERM_RUNLIMIT: job killed after reaching LSF run time limit."], "time-limit"),
        (["RuntimeError: can't start new thread"], "process-limit"),
        (["n1:7:7 [2] enqueue.cc:215 NCCL WARN Cuda failure 'invalid device function'"], "gpu-architecture"),
        (['Warning  Failed  3s  kubelet  Error: cannot find volume "ssh" to mount into container "mpi"'], "pod-config"),
        (
            ["ERROR YarnScheduler: Container killed by YARN for exceeding memory limits. 7 GB of 4 GB used"],
            "yarn-memory",
        ),
        (
            ["libfabric:7:1::efa:mr:efa_mr_regattr():632<warn> Unable to register MR: Cannot allocate memory"],
            "locked-memory",
        ),
        (
            [
                "Libfabric error: (-12) Cannot allocate memory",
                "EFA internal error: (4112) Failure to post internal receive buffers",
            ],
            "efa-buffers",
        ),
        (
            [
                "[proxy:0:1@n2] HYDU_sock_connect (utils/sock/sock.c:113): unable to get host address for n1",
                "unable to connect to server n1 at port 41849 (check for firewalls!)",
            ],
            "name-unknown",
        ),
        (["salloc: error: Node failure on n7"], "node-failure"),
        (["MOAB_INFO:  job exceeded wallclock limit"], "time-limit"),
        (["Job exceeded its walltime limit. Job was aborted"], "time-limit"),
        (["Job exceeded its memory limit. Job was aborted"], "pbs-memory"),
        (
            [
                "OpenBLAS blas_thread_init: pthread_create: Resource temporarily unavailable",
                "Segmentation fault (core dumped)",
            ],
            "process-limit",
        ),
        (
            [
                "n1: Test CUDA failure common.cu:892 'invalid device ordinal'",
                "a non-zero exit code. Per user-direction, the job has been aborted.",
            ],
            "gpu-ordinal",
        ),
        (["n1 [0] include/socket.h:185 WARN Call to connect failed : Connection refused"], "nccl-refused"),
        (
            [
                "sbatch: error: No partition specified, defaulting to: p1",
                "sbatch: error: Batch job submission failed: Invalid qos specification",
            ],
            "submission-refused",
        ),
        (["salloc: error: Job submit/allocate failed: Slurm backup controller in standby mode"], "slurm-unreachable"),
        (["n1:7:9 [0] NCCL WARN NET/OFI Creating new endpoint for domain 0x7f failed: Invalid argument"], "ofi-error"),
        (["WARN: Function: main Line: 66: NET/OFI OFI NCCL failure: 2"], "ofi-error"),
        (
            [
                "Warning  FailedCreatePodSandBox  3s  kubelet, n1  Failed create pod sandbox: rpc error: dial tcp 10.0.0.1:443: i/o timeout"
            ],
            "pod-sandbox",
        ),
        (["MemoryError"], "cpu-memory"),
        (["      MemoryError"], "cpu-memory"),
        (["terminate called after throwing an instance of 'std::bad_alloc'"], "cpu-memory"),
        (["found NaN in local forward loss calculation"], "loss-nan"),
        (["Fatal error in PMPI_Init_thread: Other MPI error, error stack:"], "mpi-init"),
        (["Fatal error in internal_Init: Other MPI error, error stack:"], "mpi-init"),
        (
            [
                "401 Client Error: Unauthorized for url: https://huggingface.co/meta-llama/Llama-2-7b/resolve/main/config.json"
            ],
            "model-refused",
        ),
        (["Error response from daemon: toomanyrequests: You have reached your pull rate limit."], "registry-limit"),
        (["AttributeError: 'FullyShardedDataParallel' object has no attribute 'config'"], "model-wrapped"),
        (["AttributeError: 'DistributedKRepeatSampler' object has no attribute 'sampler'"], "attribute-missing"),
        (["KeyError: 'SLURM_NODEID'"], "rank-unset"),
        (
            ["AttributeError: 'DistributedDataParallel' object has no attribute '_set_static_graph'"],
            "attribute-missing",
        ),
        (["Child process 48529 (local_rank 0) FAILED (exitcode 1)"], "rank-failed"),
        (["Child process 48529 (local_rank 0) FAILED (exitcode -9)"], "worker-killed"),
        (["Killed"], "worker-killed"),
        (
            [
                "[TensorRT-LLM][ERROR] Failed, NCCL error /src/tensorrt_llm/runtime/ncclCommunicator.cpp:122 'internal error - please report this issue to the NCCL developers'"
            ],
            "nccl-error",
        ),
        (
            ["sbatch: error: Parameter --gres=gpu:1 no longer acceptable, please switch to --gpus=1"],
            "submission-refused",
        ),
        (["srun: error: Step requested GRES (gpu:(null)) not found in the job"], "step-refused"),
        (["fastmoe: Test NCCL failure common.cu:777 'unhandled system error'"], "nccl-error"),
        (["RuntimeError: NCCL Error 2: unhandled system error (run with NCCL_DEBUG=INFO for details)"], "nccl-error"),
        (
            [
                "0/1 nodes are available: 1 Insufficient nvidia.com/gpu. preemption: 0/1 nodes are available: 1 No victims."
            ],
            "pod-pending",
        ),
        (["failed with exit code 139"], "worker-crashed"),
        (["error: _forkexec_slurmstepd: slurmstepd failed to send return code got 0: No error"], "launch-failed"),
        (["srun: error: Application launch failed: Unable to layout tasks on given cpus"], "task-layout"),
        (
            ["srun: error: failed to distribute tasks (bind_type:cores,mask_cpu) - this should never happen"],
            "task-layout",
        ),
        (["srun: error: Application launch failed: Socket timed out on send/recv operation"], "launch-failed"),
        (["/opt/openmpi/bin/orted: No such file or directory"], "mpi-starter"),
        (["prted: error while loading shared libraries: libpmix.so.2: cannot open shared object file"], "mpi-starter"),
        (["job 7.n1 exceeded MEM usage hard limit (9000 > 8192)"], "pbs-memory"),
        (["RuntimeError: cuda runtime error (2)"], "gpu-memory"),
        (["dist.sh: 行 84: torchrun：未找到命令"], "program-missing"),
        (["Permission denied (publickey,password)."], "ssh-refused"),
        (["A sequential map was requested, but not enough node entries"], "mpi-slots"),
        (["ValueError: Process number should not be larger than total available slots."], "mpi-slots"),
        (["[Rank 0] Overflow detected. Skipping step. Attempted loss scale: 1, reducing to 1"], "loss-scale-falls"),
        (["avg_loss: 4.5]:  20%|| 11/56 [00:02<00:08,  5.02it/s]Segmentation fault (core dumped)"], "worker-crashed"),
        (["Process finished with exit code 139 (interrupted by signal 11: SIGSEGV)"], "worker-crashed"),
        (["ImportError: Flash Attention 2.0 is not available. Please refer to its documentation"], "requirement-unmet"),
        (["/var/spool/slurmd/job00007/slurm_script: line 4: ml: command not found"], "module-command"),
        (["environment: /usr/share/lmod/lmod/libexec/lmod: No such file or directory"], "module-failed"),
        (["RuntimeError: storage has wrong size: expected 0 got 512"], "snapshot-damaged"),
        (["RuntimeError: write(): fd 29 failed with Input/output error"], "input-output"),
        (["9.4s: flux-shell[1]: ERROR: oom: Memory cgroup out of memory: killed 2 tasks on n1."], "cgroup-memory"),
        (["libtorch_cuda.so: undefined symbol: ncclCommRegister"], "symbol-missing"),
        (["INFO pynccl.py:17] Failed to import NCCL library: Cannot find libnccl.so.2 in the system."], "no-library"),
        (["OSError: [Errno 116] Stale file handle: '/scratch/set'"], "storage-lost"),
        (["RuntimeError: Found Tesla P100 which is too old to be supported by the triton GPU compiler"], "gpu-feature"),
        (["n1:1:1 [0] NCCL WARN Cuda failure 'invalid argument'"], "cuda-unusable"),
        (["Failed: Cuda error /src/custom_all_reduce.cuh:417 'resource already mapped'"], "cuda-report"),
        (["[n1:7:0:7] ib_mlx5_log.c:143  Transport retry count exceeded on mlx5_0:1/IB (synd 0x15)"], "ib-no-answer"),
        (["RuntimeError: more than one node have assigned same rank at General.cpp:17"], "nccl-rank-twice"),
        (["ImportError: No module named dmlc_tracker"], "no-module"),
        (["nvidia-container-cli: requirement error: unsatisfied condition: brand = tesla"], "driver-too-old"),
        (["slurmstepd: error: execve(): /tmp/slurmd/job7/slurm_script: No such file or directory"], "batch-script"),
        (
            ["sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"],
            "slurm-unreachable",
        ),
        (["RuntimeError: expected device cuda:0 but got device cuda:1"], "devices-mixed"),
        (
            [
                "RuntimeError: arguments are located on different GPUs at /pytorch/aten/src/THC/generic/THCTensorMathPointwise.cu:314"
            ],
            "devices-mixed",
        ),
        (
            ["RuntimeError: Expected object of backend CUDA but got backend CPU for argument #2 'weight'"],
            "devices-mixed",
        ),
        (["  exitcode  : 1 (pid: 22640)"], "rank-failed"),
        (["application called MPI_Abort(MPI_COMM_WORLD, 0) - process 0"], "rank-failed"),
        (["RuntimeError: Caught RuntimeError in replica 0 on device 0."], "rank-failed"),
        (["Lmod Warning: Failed to find the following module(s):"], "module-unknown"),
        (["/bin/bash: enroot-aufs2ovlfs: command not found"], "program-missing"),
        (["DistBackendError: NCCL communicator was aborted on rank 0."], "nccl-error"),
        (["RuntimeError: MPI process group does not support multi-GPU collectives"], "backend-device"),
        (
            [
                "RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed)."
            ],
            "autograd-graph",
        ),
        (["RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"], "autograd-graph"),
        (["RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x512 and 1024x10)"], "shapes-differ"),
        (
            [
                "RuntimeError: The size of tensor a (32) must match the size of tensor b (16) at non-singleton dimension 0"
            ],
            "shapes-differ",
        ),
        (["RuntimeError: Tensors must be CUDA and dense"], "backend-device"),
        (["KeyError: 'LOCAL_RANK'"], "rank-unset"),
        (["train.py: error: the following arguments are required: --data"], "program-arguments"),
        (["TypeError: cannot pickle '_thread.lock' object"], "not-picklable"),
        (
            [
                "ImportError: cannot import name 'LlamaFlashAttention2' from 'transformers.models.llama.modeling_llama' (/env/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py)"
            ],
            "package-api",
        ),
        (["AttributeError: module 'torch' has no attribute 'float8_e4m3fn'"], "package-api"),
        (["RuntimeError: Numpy is not available"], "numpy-torch"),
        (
            ["importlib.metadata.PackageNotFoundError: No package metadata was found for bitsandbytes"],
            "requirement-unmet",
        ),
        (
            [
                "ImportError: Using the `Trainer` with `PyTorch` requires `accelerate>=0.26.0`: Please run `pip install transformers[torch]`"
            ],
            "requirement-unmet",
        ),
        (
            [
                "RuntimeError: Detected that PyTorch and torchvision were compiled with different CUDA major versions. PyTorch has CUDA Version=12.1 and torchvision has CUDA Version=11.8."
            ],
            "torch-companions",
        ),
        (
            ["ValueError: Your setup doesn't support bf16/gpu. You need torch>=1.10, using Ampere GPU with cuda>=11.0"],
            "gpu-feature",
        ),
        (
            [
                "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: the package flash_attn seems to be not installed."
            ],
            "requirement-unmet",
        ),
        (
            ["OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root."],
            "cuda-toolkit",
        ),
        (
            [
                "deepspeed.ops.op_builder.builder.MissingCUDAException: CUDA_HOME does not exist, unable to compile CUDA op(s)"
            ],
            "cuda-toolkit",
        ),
        (["fatal error: Python.h: No such file or directory"], "compile-header"),
        (["wheel.cc:1:10: fatal error: 'belt/axle.h' file not found"], "compile-header"),
        (["wheel.cpp(9): fatal error C1083: Cannot open include file: 'axle.h': No such file"], "compile-header"),
        (['wheel.cu(2): catastrophic error: cannot open source file "axle.h"'], "compile-header"),
        (["#error -- unsupported clang version! clang version must be less than 16 are needed"], "compile-host"),
        (["/usr/bin/ld: cannot find -lcuda: No such file or directory"], "extension-build"),
        (["ptxas fatal   : Value 'sm_90a' is not defined for option 'gpu-name'"], "extension-build"),
        (["RuntimeError: Unable to proceed, no resources available."], "deepspeed-hosts"),
        (
            ["lightning.fabric.utilities.exceptions.MisconfigurationException: No supported gpu backend found!"],
            "no-gpu",
        ),
        (
            [
                "ValueError: You can't train a model that has been loaded with `device_map='auto'` in any distributed mode. Please rerun your script specifying `--num_processes=1`"
            ],
            "device-map",
        ),
        (
            [
                "ValueError: The checkpoint you are trying to load has model type `qwen3` but Transformers does not recognize this architecture. This could be because of an issue with the checkpoint"
            ],
            "model-type",
        ),
        (
            [
                "OSError: /models/llama does not appear to have a file named config.json. Checkout 'https://huggingface.co//models/llama/tree/None' for available files."
            ],
            "model-file-absent",
        ),
        (
            [
                "OSError: llama7b is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'"
            ],
            "model-files",
        ),
        (
            [
                "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/data/models/llama'. Use `repo_type` argument if needed."
            ],
            "model-files",
        ),
        (
            [
                "ValueError: Loading x/y requires you to execute the configuration file in that repo on your local machine. Make sure you have read the code there to avoid malicious use, then set the option `trust_remote_code=True` to remove this error."
            ],
            "remote-code",
        ),
        (
            ["datasets.exceptions.DatasetNotFoundError: Dataset 'x/y' doesn't exist on the Hub or cannot be accessed."],
            "dataset-missing",
        ),
        (
            ["datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset"],
            "dataset-missing",
        ),
        (
            [
                "ValueError: Due to a serious vulnerability issue in `torch.load`, even with `weights_only=True`, we now require users to upgrade torch to at least v2.6"
            ],
            "load-torch-old",
        ),
        (
            [
                "RuntimeError: Forward order differs across ranks: rank 0 is all-gathering 1 parameters while rank 1 is all-gathering 2 parameters"
            ],
            "collectives-differ",
        ),
        (["AssertionError: world size (4) is not divisible by tensor model parallel size (8)"], "world-misfit"),
        (["RuntimeError: Mesh should not be bigger than default world size 4, but found 8 ranks!"], "world-misfit"),
        (["torch.distributed.DistNetworkError: failed to recv, got 0 bytes"], "peer-lost"),
        (
            [
                "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank."
            ],
            "barrier-missed",
        ),
        (
            [
                "[rank3]:[F ProcessGroupNCCL.cpp:1250] [PG 0 Rank 3] [PG ID 0 PG GUID 0(default_pg) Rank 3] Terminating the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang."
            ],
            "nccl-timeout",
        ),
        (
            [
                "[PG 0 Rank 0] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives."
            ],
            "nccl-timeout",
        ),
        (
            [
                "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms, keys: /default_pg/0//cuda//0"
            ],
            "store-wait",
        ),
        (
            [
                "RuntimeError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout"
            ],
            "store-wait",
        ),
        (["NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'"], "gpu-peers"),
        (
            [
                "n1:1:1 [0] transport/nvls.cc:176 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 2 'out of memory'."
            ],
            "nccl-nvls",
        ),
        (
            ["NCCL WARN NET/IB: Got completion from peer 10.0.0.1<47> with status=13 opcode=0 len=0 vendor err 135"],
            "ib-no-answer",
        ),
        (["NCCL WARN NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129"], "ib-no-answer"),
        (["NCCL WARN Call to posix_fallocate failed : No space left on device"], "shared-memory"),
        (["NCCL WARN Error: failed to extend /dev/shm/nccl-abc to 9637892 bytes"], "shared-memory"),
        (["RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain."], "driver-too-old"),
        (["RuntimeError: CUDA error: unknown error"], "cuda-report"),
        (["RuntimeError: CUDA error: initialization error"], "cuda-init"),
        (["torch.AcceleratorError: CUDA error: an illegal instruction was encountered"], "illegal-access"),
        (["RuntimeError: CUDA error: peer mapping resources exhausted"], "gpu-peers"),
        (["RuntimeError: CUDA error: device kernel image is invalid"], "cuda-report"),
        (["RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"], "cublas-failed"),
        (["RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"], "cublas-failed"),
        (
            [
                "Could not load library libcudnn_cnn_infer.so.8. Error: libcuda.so: cannot open shared object file: No such file or directory"
            ],
            "driver-link",
        ),
        (
            ["Unable to load any of {libcudnn_cnn.so.9.1.0, libcudnn_cnn.so.9.1, libcudnn_cnn.so.9, libcudnn_cnn.so}"],
            "cudnn-versions",
        ),
        (
            [
                "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a, lda, b, ldb, &beta, c, ldc)`"
            ],
            "cublas-failed",
        ),
        (["RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"], "cublas-failed"),
        (["RuntimeError: HIP error: invalid device function"], "gpu-architecture"),
        (["OSError: [Errno 5] Input/output error: '/data/a.tar'"], "input-output"),
        (
            ["OSError: Unable to open file (truncated file: eof = 96, sblock->base_addr = 0, stored_eof = 2048)"],
            "data-damaged",
        ),
        (["PIL.UnidentifiedImageError: cannot identify image file '/data/a.jpg'"], "data-damaged"),
        (["zipfile.BadZipFile: File is not a zip file"], "data-damaged"),
        (["EOFError: Ran out of input"], "data-damaged"),
        (["tarfile.ReadError: unexpected end of data"], "data-damaged"),
        (["_pickle.UnpicklingError: pickle data was truncated"], "data-damaged"),
        (["OSError: image file is truncated (12 bytes not processed)"], "data-damaged"),
        (
            ["RuntimeError: unable to mmap 1024 bytes from file </models/a.safetensors>: Cannot allocate memory (12)"],
            "cpu-memory",
        ),
        (["FileExistsError: [Errno 17] File exists: 'runs/a'"], "file-exists"),
        (["train.sh: line 2: $'\\r': command not found"], "script-line-ends"),
        (["-bash: ./train.sh: /bin/bash^M: bad interpreter: No such file or directory"], "script-line-ends"),
        (["/env/bin/torchrun: /old/env/bin/python: bad interpreter: No such file or directory"], "interpreter-missing"),
        (["train.sh: line 7: syntax error near unexpected token `('"], "script-syntax"),
        (["bash: ./train.sh: Permission denied"], "not-executable"),
        (["/usr/bin/python3: No module named torch"], "no-module"),
        (
            [
                "/usr/bin/python3: Error while finding module specification for 'train.main' (ModuleNotFoundError: No module named 'train')"
            ],
            "no-module",
        ),
        (["train.sh: line 12: 12345 Segmentation fault      (core dumped) python train.py"], "worker-crashed"),
        (["Illegal instruction (core dumped)"], "worker-crashed"),
        (["Fatal Python error: Segmentation fault"], "worker-crashed"),
        (["ValueError: Unsupported nproc_per_node value: gpu"], "launcher-option"),
        (["ValueError: Cuda is not available."], "no-gpu"),
        (
            ["ValueError: The rendezvous backend 'etcd-v2' is not registered. Did you forget to call `register`?"],
            "launcher-option",
        ),
        (["sbatch: error: This does not look like a batch script.  The first"], "script-syntax"),
        (["srun: error: Unable to confirm allocation for job 12: Invalid job id specified"], "allocation-gone"),
        (["mpirun noticed that process rank 3 with PID 0 on node n1 exited on signal 9 (Killed)."], "worker-killed"),
        (
            ["mpirun noticed that process rank 3 with PID 0 on node n1 exited on signal 11 (Segmentation fault)."],
            "worker-crashed",
        ),
        (["=   KILLED BY SIGNAL: 9 (Killed)"], "worker-killed"),
        (["YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)"], "worker-killed"),
        (["=   EXIT CODE: 9"], "worker-killed"),
        (["=   EXIT CODE: 137"], "worker-killed"),
        (["=   EXIT CODE: 134"], "worker-crashed"),
        (["step 7", "killed"], "worker-killed"),
        (["**Killed**"], "worker-killed"),
        (["  what():  Error (gpu_run-drv.cpp:12): system not yet initialized"], "fabric-manager"),
        (
            ["mpirun was unable to find the specified executable file, and therefore did not launch the job."],
            "mpi-program",
        ),
        (["mpirun was unable to launch the specified application as it could not find an executable:"], "mpi-program"),
        (
            [
                "[proxy:0:0@n1] HYDU_create_process (utils/launch/launch.c:75): execvp error on file train (No such file or directory)"
            ],
            "mpi-program",
        ),
        (
            [
                '[proxy:0:1@n2] HYDU_sock_connect (utils/sock/sock.c:145): unable to connect from "n2" to "n1" (Connection refused)'
            ],
            "mpi-hydra",
        ),
        (
            [
                "One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds."
            ],
            "horovod-stall",
        ),
        (["ImportError: Extension horovod.torch has not been built."], "horovod-missing"),
        (
            [
                "nvidia-container-cli: initialization error: load library failed: libnvidia-ml.so.1: cannot open shared object file: no such file or directory"
            ],
            "container-gpus",
        ),
        (
            ["[ERROR] Command not found: nvidia-container-cli, see https://github.com/NVIDIA/libnvidia-container"],
            "container-gpus",
        ),
        (
            [
                'OCI runtime create failed: runc create failed: unable to start container process: exec: "torchrun": executable file not found in $PATH: unknown'
            ],
            "container-program",
        ),
        (
            [
                'docker: Error response from daemon: Conflict. The container name "/train" is already in use by container "abc".'
            ],
            "container-name",
        ),
        (
            ["permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock"],
            "docker-daemon",
        ),
        (
            [
                "docker: Error response from daemon: pull access denied for x, repository does not exist or may require 'docker login'"
            ],
            "image-access",
        ),
        (
            ["Error response from daemon: manifest for nvcr.io/nvidia/pytorch:99 not found: manifest unknown"],
            "image-access",
        ),
        (["pyxis:     [ERROR] URL https://nvcr.io/proxy_auth returned error code: 401 Unauthorized"], "image-access"),
        (["ERROR  : Failed to create user namespace: user namespace disabled"], "user-namespaces"),
        (
            [
                "FATAL:   container creation failed: mount hook function failure: mount squashfs: fuse: device not found, try 'modprobe fuse' first"
            ],
            "fuse-missing",
        ),
        (
            [
                "  Warning  FailedCreatePodSandBox  3s  kubelet  Failed to create pod sandbox: rpc error: code = Unknown desc = failed to setup network for sandbox"
            ],
            "pod-sandbox",
        ),
        (
            [
                'Error: failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: exec: "python": executable file not found in $PATH: unknown'
            ],
            "container-program",
        ),
        (
            [
                "sbatch: error: !!! slurm_job_submit ERROR: a job without an account",
                "sbatch: error: Batch job submission failed: Unspecified error",
            ],
            "submission-refused",
        ),
        (
            ["FATAL: Couldn't determine user account information: user: lookup userid 7: no such file or directory"],
            "apptainer-report",
        ),
        (
            [
                '  Warning  InspectFailed  3s  kubelet  Failed to apply default image tag "a b": couldn\'t parse image name: invalid reference format'
            ],
            "image-pull",
        ),
        (["  Warning  Failed  3s  kubelet  Error: InvalidImageName"], "image-pull"),
        (
            [
                "UnexpectedAdmissionError  3s  kubelet  Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested: 8, Available: 7, which is unexpected"
            ],
            "pod-device",
        ),
        (
            [
                "  Normal  TaintManagerEviction  3s  taint-eviction-controller  Marking for deletion Pod default/ddp-worker-0"
            ],
            "pod-taint",
        ),
        (["  Warning  NodeNotReady  3s  node-controller  Node is not ready"], "pod-node-lost"),
        (["  Normal  Preempted  3s  default-scheduler  Preempted by pod a on node n1"], "pod-preempted"),
        (
            ["  Warning  BackoffLimitExceeded  3s  job-controller  Job has reached the specified backoff limit"],
            "rank-failed",
        ),
        (["ValueError: fp16 mixed precision requires a GPU (not 'cpu')."], "no-gpu"),
        (
            [
                "ValueError: FP16 Mixed precision training with AMP or APEX (`--fp16`) and FP16 half precision evaluation (`--fp16_full_eval`) can only be used on CUDA devices"
            ],
            "no-gpu",
        ),
        (
            [
                "subprocess.CalledProcessError: Command '['/usr/bin/python3', 'train.py']' returned non-zero exit status 1."
            ],
            "rank-failed",
        ),
        (["torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:"], "compile-failed"),
        (
            [
                "RuntimeError: Cannot find a working triton installation. Either the package is not installed or it is too old."
            ],
            "requirement-unmet",
        ),
        (["OMP: Error #15: Initializing libiomp5.so, but found libiomp5.so already initialized."], "openmp-twice"),
        (["wandb.errors.CommError: Error communicating with wandb process"], "tracker-failed"),
        (["wandb: ERROR Error while calling W&B API: permission denied (<Response [403]>)"], "tracker-failed"),
        (
            [
                "ValueError: Free memory on device (10.1/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71.2 GiB)."
            ],
            "vllm-memory",
        ),
        (
            [
                "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
            ],
            "vllm-memory",
        ),
        (
            [
                "W1126 17:57:13.548749    2020 bfc_allocator.cc:598] Allocator (GPU_0_bfc) ran out of memory trying to allocate 16.00GiB (rounded to 17179869184) from the lower end requested by op "
            ],
            "gpu-memory",
        ),
        (
            [
                "'[Errno -3] Temporary failure in name resolution' thrown while requesting HEAD https://huggingface.co/bert-base-uncased/resolve/main/config.json",
                "Retrying in 1s [Retry 1/5].",
            ],
            "model-unreachable",
        ),
        (["RuntimeError: CUDA error: device-side assert triggered"], "device-assert"),
        (["ERROR: toomanyrequests: Rate exceeded"], "registry-limit"),
        (["pulling docker.io/lab/belt:1: unexpected status: 429 Too Many Requests"], "registry-limit"),
        (["Error: initializing source docker://lab/belt: unauthorized: please login to the lab"], "image-access"),
        (["lmdb.Error: belts/roll.lmdb: No such file or directory"], "file-missing"),
        (
            ["RuntimeError: replicas.size() ASSERT FAILED. Expected at least one parameter. (Reducer at x)"],
            "ddp-no-parameters",
        ),
        (
            ["OOM when allocating tensor with shape[7,30] and type half on /job:w/device:GPU:3 by allocator GPU_3_bfc"],
            "gpu-memory-tensor",
        ),
        (["make: belt: command not found", "docker: build step 3: exit code: 127"], "command-quoted"),
        (
            [
                "OSError: Consistency check failed: file should be of size 4943162336 but has size 12 (model.safetensors)."
            ],
            "download-cut",
        ),
        (["OSError: [Errno 122] Disk quota exceeded"], "disk-quota"),
        (["RuntimeError: expected scalar type Half but found Float"], "types-mixed"),
        (
            [
                "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same"
            ],
            "devices-mixed",
        ),
    ],
)
def test_the_cause_of_other_programs_words(lines: list[str], cause: str) -> None:
    assert told(*lines)[0] == cause


@each_case(
    ("line", "cause"),
    [
        (
            "AssertionError: no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage 3",
            "zero-no-sync",
        ),
        ("AssertionError: It is illegal to call Engine.step() inside no_sync context manager", "zero-no-sync"),
        ("AssertionError: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism", "deepspeed-use"),
        (
            'AssertionError: You are using an untested ZeRO Optimizer. Please add <"zero_allow_untested_optimizer": true> in the configuration file to use it.',
            "deepspeed-use",
        ),
        (
            "deepspeed.runtime.zero.utils.ZeRORuntimeException: You are using ZeRO-Offload with a client provided optimizer (<class 'torch.optim.adamw.AdamW'>) which in most cases will yield poor performance.",
            "deepspeed-use",
        ),
        (
            "AssertionError: DeepSpeed requires the LOCAL_RANK environment variable, it is set by the deepspeed launcher",
            "deepspeed-use",
        ),
        ("AssertionError: zero stage 2 requires an optimizer", "deepspeed-use"),
        ("AssertionError: must provide optimizer during init in order to use backward", "deepspeed-use"),
        ("ValueError: Type fp16 is not supported on your device.", "deepspeed-use"),
        (
            "ValueError: AcceleratorState has already been initialized and cannot be changed, restart your runtime completely and pass `mixed_precision='bf16'` to `Accelerator()`.",
            "accelerate-state",
        ),
        (
            "AttributeError: `AcceleratorState` object has no attribute `distributed_type`. This happens if `AcceleratorState._reset_state()` was called and an `Accelerator` or `PartialState` was not reinitialized.",
            "accelerate-state",
        ),
        (
            "ValueError: When using DeepSpeed, `accelerate.prepare()` requires you to pass at least one of training or evaluation dataloaders with `batch_size` attribute",
            "accelerate-use",
        ),
        (
            "ValueError: At least one of the dataloaders passed to `accelerate.prepare()` has `None` as batch size.",
            "accelerate-use",
        ),
        ("Exception: Could not find the transformer layer class to wrap in the model.", "accelerate-use"),
        ("ValueError: Could not find the transformer layer class LlamaDecoderLayer in the model.", "accelerate-use"),
        (
            "ValueError: --load_best_model_at_end requires the save and eval strategy to match, but found",
            "trainer-settings",
        ),
        ("ValueError: At most one of fp16 and bf16 can be True, but not both", "trainer-settings"),
        ("ValueError: Can't find a valid checkpoint at /out/checkpoint-100", "checkpoint-missing"),
        ("ValueError: No valid checkpoint found in output directory (/out)", "checkpoint-missing"),
        (
            "ValueError: The model did not return a loss from the inputs, only the following keys: logits.",
            "trainer-settings",
        ),
        ("ValueError: No columns in the dataset match the model's forward method signature", "trainer-settings"),
        ("ValueError: Trainer: training requires a train_dataset.", "trainer-settings"),
        (
            "ValueError: Target modules {'q_proj', 'v_proj'} not found in the base model. Please check the target modules and try again.",
            "trainer-settings",
        ),
        (
            "ValueError: Unable to create tensor, you should probably activate truncation and/or padding with 'padding=True' 'truncation=True'",
            "batch-uneven",
        ),
        ("ValueError: Couldn't instantiate the backend tokenizer from one of:", "tokenizer-load"),
        ("ValueError: Unrecognized model in /m. Should have a `model_type` key in its config.json", "model-class"),
        ("pyo3_runtime.PanicException: called `Option::unwrap()` on a `None` value", "rust-panic"),
        (
            "safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeaderDeserialization",
            "snapshot-damaged",
        ),
        ("RuntimeError: FlashAttention forward only supports head dimension at most 256", "attention-refused"),
        ("ModuleNotFoundError: No module named 'amp_C'", "extension-absent"),
        ("ModuleNotFoundError: No module named 'fused_layer_norm_cuda'", "extension-absent"),
        (
            "ImportError: cannot import name 'helpers' from 'megatron.data' (./megatron/data/__init__.py)",
            "extension-absent",
        ),
        ("RuntimeError: apex.optimizers.FusedAdam requires cuda extensions", "extension-absent"),
        (
            "RuntimeError: Cuda extensions are being compiled with a version of Cuda that does not match the version used to compile Pytorch binaries.",
            "cuda-toolkit-version",
        ),
        ("RuntimeError: --cuda_ext was requested, but nvcc was not found.", "cuda-toolkit"),
        ("RuntimeError: flash_attn was requested, but nvcc was not found.", "cuda-toolkit"),
        ("ninja: build stopped: subcommand failed.", "package-build"),
        ("error: command 'gcc' failed with exit status 1", "package-build"),
        ("gcc: fatal error: Killed signal terminated program cc1plus", "build-compiler-killed"),
        ("c++: internal compiler error: Killed (program cc1plus)", "build-compiler-killed"),
        ("ERROR: No matching distribution found for torch==2.9.9", "package-not-found"),
        ("ERROR: ResolutionImpossible: for help visit https://pip.pypa.io", "packages-conflict"),
        ("ERROR: Failed building wheel for flash-attn", "package-build"),
        ("ERROR: Package 'x' requires a different Python: 3.8.10 not in '>=3.9'", "package-not-found"),
        ("PackagesNotFoundError: The following packages are not available from current channels:", "package-not-found"),
        ("LibMambaUnsatisfiableError: Encountered problems while solving:", "packages-conflict"),
        (
            "ValueError: Invalid user token. If you didn't pass a user token, make sure you are properly logged in",
            "hub-token",
        ),
        ("huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1-6)", "hub-entry"),
        ("huggingface_hub.errors.EntryNotFoundError: 404 Client Error.", "hub-entry"),
        ("ValueError: loaded state dict has a different number of parameter groups", "optimizer-differs"),
        ("RuntimeError: Missing key in checkpoint state_dict: optimizer.state.0.step.", "optimizer-differs"),
        (
            "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
            "checkpoint-device",
        ),
        (
            "RuntimeError: Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1.",
            "checkpoint-device",
        ),
        ("RuntimeError: unexpected EOF, expected 302 more bytes. The file might be corrupted.", "snapshot-damaged"),
        (
            "RuntimeError: aten.embedding.default: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed operators!",
            "sharded-used-outside",
        ),
        ("RuntimeError: FSDP parameters should be materialized from meta device before training", "fsdp-devices"),
        (
            "RuntimeError: An FSDP-managed module unexpectedly has parameters on cpu. Make sure to move the module to cuda:0 before training.",
            "fsdp-devices",
        ),
        ("ValueError: Must flatten tensors on the same device but got both cpu and cuda:0", "fsdp-devices"),
        (
            "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: A different number of tensors was saved during the original forward and recomputation.",
            "recompute-differs",
        ),
        (
            "RuntimeError: Modules with uninitialized parameters can't be used with `DistributedDataParallel`.",
            "parameters-none",
        ),
        ("RuntimeError: Your training graph has changed in this iteration", "ddp-graph-changed"),
        ("RuntimeError: Output 0 of BroadcastBackward is a view and is being modified inplace.", "autograd-graph"),
        ("RuntimeError: a leaf Variable that requires grad is being used in an in-place operation.", "autograd-graph"),
        ("RuntimeError: grad can be implicitly created only for scalar outputs", "autograd-graph"),
        (
            "RuntimeError: One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True",
            "autograd-graph",
        ),
        (
            "TypeError: default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found <class 'NoneType'>",
            "batch-uneven",
        ),
        ("RuntimeError: Trying to resize storage that is not resizable", "batch-uneven"),
        ("IndexError: Target 5 is out of bounds.", "index-range"),
        (
            "RuntimeError: \"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'",
            "type-unsupported",
        ),
        ("RuntimeError: value cannot be converted to type at::Half without overflow", "type-unsupported"),
        ("RuntimeError: Input type (float) and bias type (c10::Half) should be the same", "types-mixed"),
        (
            "RuntimeError: Index put requires the source and destination dtypes match, got Float for the destination and BFloat16 for the source.",
            "type-unsupported",
        ),
        ("RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16", "types-mixed"),
        ("RuntimeError: Found dtype Float but expected Half", "type-unsupported"),
        (
            "ValueError: Expected parameter logits (Tensor of shape (4, 10)) of distribution Categorical to satisfy the constraint IndependentConstraint(Real(), 1), but found invalid values:",
            "sampling-nan",
        ),
        ("RuntimeError: CUDA error: invalid argument", "kernel-refused"),
        ("RuntimeError: CUDA error: invalid configuration argument", "kernel-refused"),
        ("RuntimeError: CUDA error: invalid resource handle", "kernel-refused"),
        ("RuntimeError: CUDA error: too many resources requested for launch", "kernel-refused"),
        ("RuntimeError: CUDA error: operation failed due to a previous error during capture", "graph-capture"),
        ("RuntimeError: CUDA error: invalid device ordinal", "gpu-ordinal"),
        ("RuntimeError: CUDA error: named symbol not found", "kernel-refused"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx`", "kernel-refused"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_BAD_PARAM", "kernel-refused"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.", "kernel-refused"),
        ("RuntimeError: GET was unable to find an engine to execute this computation", "kernel-refused"),
        ("RuntimeError: FIND was unable to find an engine to execute this computation", "kernel-refused"),
        ("RuntimeError: cuFFT error: CUFFT_INTERNAL_ERROR", "kernel-refused"),
        ("RuntimeError: cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR", "kernel-refused"),
        ("RuntimeError: Triton Error [CUDA]: device kernel image is invalid", "kernel-refused"),
        (
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
            "compile-failed",
        ),
        ("triton.compiler.errors.CompilationError: at 12:11:", "compile-failed"),
        ("torch._dynamo.exc.Unsupported: Data-dependent branching", "compile-failed"),
        ("torch._dynamo.exc.InternalTorchDynamoError: 'NoneType' object", "compile-failed"),
        ("torch._dynamo.exc.TorchRuntimeError: Failed running call_function", "compile-failed"),
        ("torch._inductor.exc.LoweringException: AssertionError:", "compile-failed"),
        ("torch._dynamo.exc.FailOnRecompileLimitHit: recompile_limit reached", "compile-failed"),
        (
            "ValueError: type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')",
            "gpu-feature",
        ),
        ("CUDA driver error: out of memory", "gpu-memory"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "gpu-memory"),
        (
            "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache (66464).",
            "kv-cache",
        ),
        (
            "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).",
            "not-divisible",
        ),
        ("AssertionError: number of layers must be divisible by pipeline-model-parallel size", "not-divisible"),
        ("AssertionError: 40 is not divisible by 16", "not-divisible"),
        ("RuntimeError: Failed to infer device type", "no-gpu"),
        ("ValueError: Model architectures ['X'] are not supported for now.", "model-unsupported"),
        ("RuntimeError: CUDA Setup failed despite GPU being available.", "bitsandbytes-library"),
        (
            "RuntimeError: The installed version of bitsandbytes was compiled without GPU support.",
            "bitsandbytes-library",
        ),
        (
            "Could not find the bitsandbytes CUDA binary at PosixPath('/x/libbitsandbytes_cuda124.so')",
            "bitsandbytes-library",
        ),
        ("Required library version not found: libbitsandbytes_cuda121.so.", "bitsandbytes-library"),
        ("xFormers can't load C++/CUDA extensions. xFormers was built for:", "extension-absent"),
        (
            "NotImplementedError: No operator found for `memory_efficient_attention_forward` with inputs:",
            "attention-refused",
        ),
        ("python: a/b.cpp:125: int f(): Assertion `n_completes >= min_completes' failed.", "assertion-failed"),
        (
            "RuntimeError: Unable to JIT load the fused_adam op due to it not being compatible due to hardware/software issue.",
            "deepspeed-op",
        ),
        ("RuntimeError: Unable to JIT load the async_io op due to it not being compatible", "deepspeed-op"),
        (
            "torch.cuda.DeferredCudaCallError: CUDA call failed lazily at initialization with error: device >= 0 && device < num_gpus INTERNAL ASSERT FAILED",
            "gpu-ordinal",
        ),
        ("RuntimeError: No HIP GPUs are available", "no-gpu"),
        ("RuntimeError: expected scalar type BFloat16 but found Float", "types-mixed"),
        ("ValueError: Query/Key/Value should either all have the same dtype", "attention-refused"),
        (
            "RuntimeError: It looks like your LightningModule has parameters that were not used in producing the loss returned by training_step.",
            "ddp-unused",
        ),
        (
            "RuntimeError: The expanded size of the tensor (512) must match the existing size (1024) at non-singleton dimension 1",
            "shapes-differ",
        ),
        (
            "RuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected input[1, 1, 224, 224] to have 3 channels, but got 1 channels instead",
            "shapes-differ",
        ),
        (
            "ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 256, 1, 1])",
            "shapes-differ",
        ),
        ("ValueError: Expected input batch_size (32) to match target batch_size (31).", "shapes-differ"),
        ("AssertionError: no_sync context manager reentry is unsupported", "zero-no-sync"),
        (
            "deepspeed.runtime.pipe.engine.PipelineError: Only train_batch() is accessible in pipeline mode.",
            "deepspeed-use",
        ),
        (
            "train: /env/deepspeed/ops/csrc/aio/py_lib/deepspeed_py_aio_handle.cpp:159: void deepspeed_aio_handle_t::_stop_threads(): Assertion `0 == _num_pending_ops' failed.",
            "deepspeed-op",
        ),
        ("AttributeError: 'PartialState' object has no attribute 'distributed_type'", "accelerate-state"),
        (
            "ValueError: Please make sure to properly initialize your accelerator via `accelerator = Accelerator()` before using any functionality",
            "accelerate-state",
        ),
        (
            "ValueError: To use a `DataLoader` in `split_batches` mode, the batch size (6) needs to be a round multiple of the number of processes (4).",
            "accelerate-use",
        ),
        (
            "RuntimeError: You can't use batches of different size with `dispatch_batches=True` or when using an `IterableDataset`.",
            "accelerate-use",
        ),
        (
            "ValueError: The batch received was empty, your model won't be able to train on it. Double-check that",
            "trainer-settings",
        ),
        (
            "ValueError: The train_dataset does not implement __len__, so the number of training steps cannot be inferred",
            "trainer-settings",
        ),
        (
            "ValueError: Using --fsdp xxx together with --deepspeed is not possible, deactivate one of those flags.",
            "trainer-settings",
        ),
        (
            "KeyError: \"The `metric_for_best_model` training argument is set to 'eval_f1', which is not found in the evaluation metrics.\"",
            "trainer-settings",
        ),
        (
            "ValueError: You cannot perform fine-tuning on purely quantized models. Please attach trainable adapters",
            "trainer-settings",
        ),
        (
            "Unable to load optimizer from checkpoint /ckpt/iter_5, exiting. Specify --no-load-optim or --finetune",
            "checkpoint-state",
        ),
        (
            "ValueError: Unable to find latest file at /ckpt/latest, if trying to load latest checkpoint please pass tag",
            "checkpoint-missing",
        ),
        ("RuntimeError: Unexpected key in state_dict: state.exp_avg.", "optimizer-differs"),
        (
            'ValueError: `optim_state_dict` must have the keys "state"to be a valid optimizer state dict',
            "optimizer-differs",
        ),
        (
            "ValueError: Batch does not contain any data (`None`). At the end of all iterable data available before expected stop iteration.",
            "dataset-empty",
        ),
        ("ValueError: Unable to get the output signature because the dataset is empty.", "dataset-empty"),
        ("RuntimeError: Found 0 files in subfolders of: /data/imagenet/train", "dataset-empty"),
        (
            "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly while the future was running or pending.",
            "map-worker-gone",
        ),
        (
            "joblib.externals.loky.process_executor.TerminatedWorkerError: A worker process managed by the executor was unexpectedly terminated.",
            "map-worker-gone",
        ),
        ("Exception: unknown variant `fusion`, expected one of", "tokenizer-load"),
        (
            "ValueError: Converting from Tiktoken failed, if a converter for SentencePiece is available, provide a model path",
            "tokenizer-load",
        ),
        ("ValueError: Cannot handle batch sizes > 1 if no padding token is defined.", "tokenizer-padding"),
        (
            "ValueError: You are attempting to pad samples but the tokenizer you are using (GPT2Tokenizer) does not have a pad token.",
            "tokenizer-padding",
        ),
        (
            "ValueError: This tokenizer does not have a mask token which is necessary for masked language modeling.",
            "tokenizer-padding",
        ),
        ("ValueError: GPTBigCodeForCausalLM does not support Flash Attention 2.0 yet.", "attention-refused"),
        ("RuntimeError: FlashAttention backward for head dim > 64 requires A100 or H100 GPUs", "attention-refused"),
        ("KeyError: 'unexpected key \"sub_mean.weight\" in state_dict'", "checkpoint-differs"),
        (
            "RuntimeError: cuDNN version mismatch: PyTorch was compiled against 7005 but linked against 6021",
            "cudnn-versions",
        ),
        (
            "RuntimeError: Expected tensor for argument #1 'x' to have the same type as tensor for argument #2 'weight'; but type torch.cuda.HalfTensor does not equal torch.cuda.FloatTensor",
            "types-mixed",
        ),
        ("RuntimeError: all tensors must be on devices[0]", "devices-mixed"),
        (
            "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
            "loader-bus-error",
        ),
        ("AssertionError: data parallel group with context parallel combined is not initialized", "model-groups"),
        ("AssertionError: Expert tensor + model parallel group is already initialized", "model-groups"),
        ("ValueError: Parameter 'Linear.weight' is already managed by another FSDP", "fsdp-shared"),
        (
            "RuntimeError: Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment",
            "gradients-impossible",
        ),
        ("AttributeError: type object 'Trainer' has no attribute 'add_argparse_args'", "attribute-missing"),
        (
            "ImportError: cannot import name 'helpers_cpp' from 'megatron.core.datasets' (/src/megatron/core/datasets/__init__.py)",
            "extension-absent",
        ),
        ("ModuleNotFoundError: No module named 'causal_conv1d_cuda'", "extension-absent"),
        ("CUDA SETUP: Setup Failed!", "bitsandbytes-library"),
        ("CUDA SETUP: CUDA detection failed! Possible reasons:", "bitsandbytes-library"),
        (
            "ERROR: Cannot install -r requirements.txt (line 3) and torch==2.1.0 because these package versions have conflicting dependencies.",
            "packages-conflict",
        ),
        ("curl: (60) SSL certificate problem: self signed certificate in certificate chain", "certificate"),
        ("OSError: Invalid username or password.", "hub-token"),
        (
            "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: trying to save more tensors during recomputation than during the original forward pass.",
            "recompute-differs",
        ),
        (
            "size mismatch for model.embed_tokens.weight: the shape in current model is torch.Size([0]).",
            "parameter-empty",
        ),
        (
            "ValueError: The module has CPU parameters or buffers when `sync_module_states=True`, which requires them to be on GPU.",
            "fsdp-devices",
        ),
        (
            "RuntimeError: FSDP only supports single device modules but got params on {device(type='cuda', index=0), device(type='cpu')}",
            "fsdp-devices",
        ),
        ("ValueError: Input X contains NaN.", "sampling-nan"),
        ("ValueError: Unknown quantization method: exl3.", "model-unsupported"),
        (
            "AssertionError: num_attention_heads (12) must be a multiple of tensor_model_parallel_size (8)",
            "not-divisible",
        ),
        ("RuntimeError: Apex was installed without --cuda_ext", "extension-absent"),
        ("    which: no nvcc in (/usr/local/bin:/usr/bin)", "cuda-toolkit"),
        (
            "RuntimeError: It looks like your LightningModule has parameters that were not used in producing the loss returned by training_step.",
            "ddp-unused",
        ),
        (
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
            "snapshot-damaged",
        ),
        (
            "AssertionError: FSDP expects uniform original parameter dtype but got {torch.bfloat16, torch.float32}",
            "fsdp-dtypes",
        ),
        ("/usr/bin/ld: /opt/libtorch/lib/libtorch_cpu.so: undefined reference to `powf@GLIBC_2.27'", "old-libc"),
        ("RuntimeError: Current CUDA Device does not support bfloat16. Please switch dtype to float16.", "gpu-feature"),
        ("RuntimeError: Triton Error [CUDA]: out of memory", "gpu-memory"),
        ("(TorchTrainer pid=439, ip=10.0.0.1) *** SIGSEGV received at time=1741149596 on cpu 63 ***", "worker-crashed"),
        (
            "*** SIGABRT (@0x1d26) received by PID 7462 (TID 0x7f6beee28380) from PID 7462; stack trace: ***",
            "worker-crashed",
        ),
        ("[n1:07462] Signal: Segmentation fault (11)", "worker-crashed"),
        (
            "ValueError: Error initializing torch.distributed using tcp:// rendezvous: world_size parameter missing",
            "rank-unset",
        ),
        ("Loading checkpoint shards: 0%| | 0/2 [00:00<?, ?it/s]Killed", "worker-killed"),
        ("Training failed: [Errno 17] File exists: '/runs/a'", "file-exists"),
        ("could not start: [Errno 2] No such file or directory: '/data/a.yaml'", "file-missing"),
        ("cannot write: [Errno 13] Permission denied: '/data/out'", "permission"),
        (
            "Check the documentation of torch.load to learn more about types accepted by default with weights_only https://x",
            "load-refused",
        ),
        ("AssertionError: Unable to pre-compile sparse_attn", "deepspeed-op"),
        (
            "ERROR: Failed to build installable wheels for some pyproject.toml based projects (flash_attn)",
            "package-build",
        ),
        (
            "  Caused by: Build backend failed to build wheel through `build_wheel()` with exit status: 1",
            "package-build",
        ),
        ("| WARNING: overflow detected, setting loss scale to: 0.0001220703125", "loss-scale-falls"),
        ("[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1", "loss-scale-falls"),
        ("TypeError(\"__init__() got an unexpected keyword argument 'num_processes'\")", "argument-unknown"),
        ("socket.timeout: timed out", "host-unreachable"),
        ("httpx.ConnectTimeout: [Errno 110] Connection timed out", "host-unreachable"),
        (
            "source: hyper_util::client::legacy::Error(SendRequest, hyper::Error(Io, Os { code: 110, kind: TimedOut, message: x }))",
            "host-unreachable",
        ),
        ("ResolvePackageNotFound:", "package-not-found"),
        ("PackageNotFoundError: Packages missing in current channels:", "package-not-found"),
        ("  × No solution found when resolving dependencies:", "resolve-failed"),
        ("Parameter indices which did not receive grad for rank 0: 72 73", "ddp-unused"),
        ("FAILED: multi_tensor_adam.cuda.o", "extension-build"),
    ],
)
def test_the_cause_of_what_frameworks_raise(line: str, cause: str) -> None:
    assert told(line)[0] == cause


@each_case(
    "line",
    [
        "n1:1:1 [0] NCCL INFO socketPollConnect: connect returned Connection refused, retrying (3/34) after sleep for 300 msec",
        "n1:1:1 [0] NCCL INFO Call to connect returned Connection refused, retrying",
        "Connect to http://10.0.0.5:80 failed: Connection refused",
        "n1:1:1 [0] NCCL INFO Call to ibv_modify_qp success",
        "Last error: none",
        "WARNING config has no run_id, generated a random run_id: 17",
        "[c10d] The client socket has connected to [n1]:29500",
        "gloo: no error",
        "DataLoader worker (pid 7) exited normally",
        "exits with return code = 0",
        "process 0 terminated with exit code 0",
        "loss is 0.3, not nan",
        "the loss is nanoscopic",
        "Loss scale at 65536",
        "429 samples",
        "GET /a HTTP/1.1 200 429",
        "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)",
        "mca_base_component_repository_open: unable to open mca_belt: libbelt.so: cannot open shared object file (ignored)",
        "error 8020: x",
        "Assertion `x` passed",
        "train_batch_size is equal to micro_batch_per_gpu * gradient_acc_step * world_size",
        "No module named 'apex', going on without it",
        "lib.so: defined symbol: x",
        "Warning: Permanently added 'n2' (ED25519) to the list of known hosts.",
        'SPANK plugin "pyxis" option "container-image" registered',
        "exitcode  : -15 (pid: 7)",
        "Signal 15 (SIGTERM) received by PID 7",
        "MemoryErrorHandler installed",
        "size mismatch warning off",
        "train: the gcc: found version 12",
        "0/1 Pending",
        "ddp-worker-0  1/1  Running  0  3m",
        "nan values: 0",
        "wandb: api_key configured",
        "MPI_Init took 3 s",
        "ucp_ep_create(proc=9) done",
        "n1:1:1 [0] NCCL INFO NET/OFI Couldn't open AV",
        "gloo: address family AF_INET",
        "requests.get: Connection refused, retrying",
        "condition: cuda>=12.4 satisfied",
        "no NVIDIA GPU was busy",
        "container_p_restore: done",
        "There are enough slots available in the system",
        "Received request: HTTPSConnectionPool(host='x', port=443) created",
        "Killed 3 old processes",
        "sbatch: error messages are shown",
        "Requested GRES gpu:1",
        "NCCL error codes",
        "the DistributedDataParallel object has attributes",
        "the object has no attribute of that module",
        "FAILED (exitcode 0)",
        'a container with name "a" exists',
        "exitcode  : 0 (pid: 7)",
        "MPI_Abort is not called",
        "Caught an error in replica, going on",
        "expected device cuda:0",
        "$'a': command found",
        "the file has DOS line breaks",
        "a syntax error in the configuration",
        "bound variable: 3",
        "python interpreter: /usr/bin/python3",
        "bash: /home/u/train.sh: No such process",
        "wget: /index: Permission denied",
        "srun: Unable to say more",
        "srun: MPI plugin types are...",
        "srun: pmix",
        "prolog completed, no failure",
        "mpirun was able to find the executable",
        "docker runs as root",
        "Extension horovod.torch has been built",
        "waiting for the remainder of the division",
        "nvidia-container-cli: version 1.17",
        "the driver has capabilities: gpu",
        'The container name "a" is free',
        "connected to the Docker daemon",
        "manifest for x found",
        "created user namespace",
        "fuse: mounted",
        "Normal  SandboxChanged  3s  kubelet  Pod sandbox changed",
        "Allocate succeeded",
        "Normal NodeReady 3s kubelet Node is ready",
        "Preemption is not helpful for scheduling",
        "found no matches for kind words",
        "train.py: note: arguments are required",
        "an error: argument of mine",
        "KeyError: 'rank'",
        "environment variable RANK is set",
        "nproc_per_node value: 8",
        "no SyntaxError was found",
        "cannot import name 'x', using y in its place",
        "cannot import name (x)",
        "the function got an unexpected argument",
        "numpy is available",
        "the dtype size changed",
        "Using torch requires patience",
        "hint: pip install x",
        "operator torchvision::nms is registered",
        "FlashAttention supports this GPU",
        "CUDA_HOME=/usr/local/cuda",
        "Installed CUDA version 12.4",
        "building extension 'a'",
        "torch.compile: done",
        "Descriptors created",
        "OMP: Info #1: x",
        "FileNotFoundError is caught",
        "No such file or directory, making it",
        "File exists, going on",
        "Input/output error rate: 0",
        "lock file acquired",
        "zipfile is fine",
        "truncated to 512 tokens",
        "load key v",
        "FutureWarning: You are using `torch.load` with `weights_only=False`",
        "Dataset found",
        "Consistency check passed",
        "the model appears to have a file named config.json",
        "model type qwen3 is recognized",
        "requires you to read the file",
        "wandb: Run data is saved locally",
        "all tensors are on the same device",
        "expected scalar",
        "Ray runtime started. Next steps: to connect to this Ray cluster",
        "ray: all workers registered with GCS",
        "Version match: Ray 2.9",
        "NVML: initialized",
        "nvmlInit() succeeded",
        "GPU0000:3B:00.0: healthy",
        "NVRM: loading NVIDIA UNIX kernel module",
        "n1:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB",
        "n1:1:1 [0] NCCL INFO Call to ibv_open_device success",
        "mlx5_core 0000:3b:00.0: firmware version: 22.39",
        'n1:1:1 [0] NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!',
        "n1:1:1 [0] NCCL WARN NUMA auto balancing enabled which can lead to variability in the RCCL performance!",
        "n1:1:1 [0] NCCL WARN Could not find real path of /sys/class/x",
        "n1:1:1 [0] NCCL WARN NET/IB : mlx5_0:1 Got non-fatal async event: port active(9)",
        "pyxis: importing docker image: ubuntu",
        "pyxis: imported docker image: ubuntu",
        "[INFO] Extracting squashfs filesystem...",
        "srun: job 7 queued and waiting for resources",
        "slurmstepd: task 0 started",
        "INFO:    Mounting image",
        "docker: 24.0.7, build afdd53b",
        "Lmod: loaded gcc/12",
        "Environment modules: 4.5",
        "the CUDA errors of a run: 0",
        "cudaErrorless",
        "HSA_STATUS: fine",
        "ROCk module is loaded",
        "sched_setaffinity: 0-7",
        "Using magic number 7",
        "TERM_PROGRAM=tmux",
        "flux-job: submitted",
        "Job submitted to queue gpu.",
        "  Normal  Scheduled  3s  default-scheduler  Successfully assigned ml/x to n1",
        "conda environment: ddp",
        "a file of a large size",
        "curl 8.5.0 (x86_64-pc-linux-gnu)",
        "mount.lustre is installed",
        "nfs: server s1 OK",
        "kubectl: switched to context a",
        "x509 certificate: valid",
        "UCX  INFO  ep_cfg[0]: tag(rc_mlx5/mlx5_0:1)",
        "fi_getinfo: 3 providers",
        "slurm cgroup: created",
        "[mpiexec@n1] Launch arguments: /usr/bin/ssh -x n2",
        "MPI_Bcast took 3 s",
        "CUDA initialization took 2 s",
        "image reference: nvcr.io/nvidia/pytorch",
        "CDI: 8 devices",
        "subuid range of ada: 100000",
        "libfabric:88:1712:cxi:domain:cxip_x():99<warn> n1: Failed to find valid default rgroup and vni for cxi0",
        "the size of tensor a is 3",
        "IndexError: list index out of range",
        "UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
        "backend type nccl, device type cuda",
        "Default process group has been initialized",
        "initialize the default process group",
        "pickle: done",
        "CUDA initialized in a subprocess",
        "starting a new process before the end",
        "DataLoader took 60 seconds",
        "DistributedDataParallel is needed",
        "device_ids [0]",
        "tensors with uniform requires_grad",
        "world size 4 is divisible by 2",
        "use_libuv: True",
        "Rank 1 passed monitoredBarrier",
        "peer access is supported between these devices",
        "NET/IB : mlx5_0:1 Got async event : GID table change",
        "NCCL INFO NVLS multicast support is available",
        "cuDNN version: 90100",
        "DeepSpeed config values: auto",
        "launcher pdsh installed",
        "MisconfigurationException handled",
        "loaded with device_map='auto'",
        "copied the meta data",
        "unscale gradients",
        "tensors share memory",
        "NET/IB : Got completion from peer 10.0.0.1<49189> with error 5, opcode 0",
        "background workers are alive",
        "a NameError is caught",
        "the object has no attribute x",
        "torch.distributed has no attribute of that kind",
        "DataLoader worker exited with code 0",
        "Socket creation took 3 ms",
        "containerd task created",
        "the launch timed well",
        "param.ds_status is available",
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
        "OVERFLOW! Skipping step. Attempted loss scale: 16384.0",
        "processes: [Killed 0]",
        "[WARNING]  async_io requires the dev libaio .so object and headers but these were not found.",
        "no_sync() is entered",
        "ZeRO stage 2 is used",
        "Time to load fused_adam op: 0.3 seconds",
        "AcceleratorState is initialized",
        "accelerate.prepare() took 3 s",
        "the Trainer has a train_dataset",
        "no checkpoint was asked for, beginning anew",
        "loaded state dict of the optimizer",
        "num_samples=512",
        "each element in the batch is equal",
        "map operation: 100%",
        "the tokenizer has a pad token",
        "FlashAttention is used",
        "apex_C loaded",
        "CUDA SETUP: CUDA runtime path found: /usr/local/cuda/lib64/libcudart.so",
        "Building wheel for flash-attn (setup.py): finished",
        "recomputed values are equal",
        "materialized from meta device",
        "contains no NaN",
        "CUDA error rate: 0",
        "stream is capturing",
        "MPS daemon started",
        "max seq len 4096",
        "ray: 3 tasks were run",
        "placement group created",
        "40 is divisible by 8",
        "all assertions hold",
        "nothing panicked",
        "INFO:    fuse2fs not found, will not be able to mount EXT3 filesystems",
        "No GPU detected, falling back to CPU",
        "No GPU devices available, training on CPU",
        "  Warning  Unhealthy  2s  kubelet  Readiness probe failed: HTTP probe failed with statuscode: 503",
        "[    3.1] [drm] amdgpu kernel modesetting enabled.",
        "amdgpu 0000:2b:00.0: amdgpu: Fetched VBIOS from VFCT",
        "pcieport 0000:00:02.0: AER: Corrected error received: 0000:00:02.0",
        "PCIe Bus Error: severity=Corrected, type=Physical Layer",
        "broker.info[0]: rc1.0: /etc/flux/rc1 Exited (rc=0) 1.8s",
        "slurmd: debug:  gres/gpu: init: loaded",
        "NCCL INFO NET/IB : No device found.",
        "error: Node configuration differs from hardware: Procs=16:16(hw)",
        "this mode requires at least 40 GB",
        "Exited with exit code 0. The CPU time used is 3 seconds",
        "PSM2 is used",
        "OFI provider: cxi",
        "NVSHMEM initialization has completed",
        "Check passed: x == y",
        "a container with a name",
    ],
)
def test_a_line_that_is_like_one_of_a_failure_is_none(line: str) -> None:
    assert told(line) == []


def test_a_loader_worker_that_ended_with_a_code_was_not_killed() -> None:
    assert told("RuntimeError: DataLoader worker (pid 7) exited unexpectedly with exit code 1.") == [
        "loader-worker-failed"
    ]


def test_what_is_said_where_python_is_not_alone() -> None:
    """The text of a C++ exception decides a log without tracebacks."""
    found = diagnose(
        [("log", ["terminate called after throwing an instance of 'x::E'", "  what():  Assertion failed: y"])],
        load_rules(),
    )
    assert [line.text for line in found.exception] == ["what():  Assertion failed: y"]


def test_a_rank_that_torchrun_killed_after_another_failed_is_no_cause() -> None:
    killed = ["  exitcode  : -9 (pid: 7)", "  traceback : Signal 9 (SIGKILL) received by PID 7"]
    assert told(*killed) == ["rank-killed"]
    assert told("  exitcode  : 1 (pid: 6)", *killed) == ["rank-failed"]
    assert "rank-killed" not in told(*killed, "E failed (exitcode: 1) local_rank: 0")


def test_the_line_behind_last_error_is_nccls_in_any_block() -> None:
    text = "ncclInvalidUsage: x\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"
    for blocks in ([text], text.split("\n"), [text[:31], text[32:]]):
        assert [one.id for one in diagnose([("log", blocks)], load_rules()).findings] == ["gpu-shared"], blocks
    assert told("Last error:", "x", "Duplicate GPU detected : rank 1") == []


def test_the_port_that_is_taken_is_told_by_the_lines_of_older_torch() -> None:
    lines = [_BOUND, "RuntimeError: The server socket has failed to listen on any local network address."]
    assert "port 29500 is in use" in diagnose([("log", lines)], load_rules()).findings[0].cause


def test_no_cause_hides_behind_a_consequence() -> None:
    """Each provoked failure, with the symptoms of a killed job around it, is still named first."""
    paths = logs_of("worker-killed") + logs_of("time-limit") + logs_of("rank-failed")
    # Without torchrun's settings, which would be those of a second job.
    lines = [line for path in paths for line in path.read_text().splitlines()]
    around = [line for line in lines if "launcher/api" not in line]
    for rule in [one for one in rules(provoked=True) if one.kind == "cause"]:
        if rule.rank > RULES["time-limit"].rank:
            own = [(str(path), path.read_text().splitlines()) for path in logs_of(rule.id)]
            found = diagnose([("around", around), *own], load_rules()).findings
            assert found[0].id == rule.id, rule.id


@each_case(
    ("lines", "cause"),
    [
        (["srun: error: n1: task 0: Segmentation fault"], "worker-crashed"),
        (["pyxis:     mkdir: cannot create directory '/run/user/1000': Permission denied"], "permission"),
        (["\x1b[31mRuntimeError: No CUDA GPUs are available\x1b[0m"], "no-gpu"),
        (["1: [default0]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"], "gpu-memory"),
        (["OSError: [Errno 122] Disk quota exceeded: 'x'"], "disk-quota"),
        (["exec /opt/env/bin/python: exec format error"], "wrong-architecture"),
        (["ModuleNotFoundError: No module named 'torch'", "task 0: Out Of Memory"], "slurm-memory"),
        (["/bin/sh: 1: torchrun: not found"], "program-missing"),
        (["enroot-switchroot: failed to execute: /bin/bash: No such file or directory"], "container-program"),
        (["pyxis:     [ERROR] Invalid image format: /fsx/a.sqsh"], "squashfs-broken"),
        (
            ["pyxis:     [ERROR] No such file or directory: /fsx/a.sqsh", "pyxis: couldn't start container"],
            "image-missing",
        ),
        (
            [
                "slurmstepd: error: couldn't chdir to `/app': No such file or directory: going to /tmp instead",
                "pyxis: couldn't start container",
            ],
            "pyxis-quiet",
        ),
        (
            ["RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible"],
            "loader-bus-error",
        ),
        (
            [
                "OSError: [Errno 116] Stale file handle: '/usr/lib/python3.11/re/_compiler.py'",
                "ModuleNotFoundError: No module named 're'",
            ],
            "image-server",
        ),
        (["OSError: [Errno 107] Transport endpoint is not connected: '/scratch/data/a.tar'"], "storage-lost"),
        (
            ['docker: Error response from daemon: Get "https://nvcr.io/v2/": dial tcp: lookup nvcr.io: no such host.'],
            "host-unknown",
        ),
        (["command terminated with exit code 137"], "worker-killed"),
        (["srun: error: n1: task 0: Exited with exit code 139"], "worker-crashed"),
        (
            [
                '  Warning  FailedCreate  2s  job-controller  Error creating: pods "x-0" is forbidden: failed quota: q: must specify limits.memory'
            ],
            "pod-refused",
        ),
        (['Error creating: admission webhook "vpod.kb.io" denied the request: no'], "pod-refused"),
        (["Message: Pod was active on the node longer than the specified deadline"], "pod-deadline"),
        (["Message:  Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."], "pod-evicted"),
        (["Warning  Failed  3s  kubelet  Error: couldn't find key TOKEN in Secret ml/wandb"], "pod-config"),
        (["tee: /runs/ddp/pod-0.log: Permission denied"], "claim-not-writable"),
    ],
)
def test_other_forms_of_a_message_are_known(lines: list[str], cause: str) -> None:
    assert told(*lines)[0] == cause


_BANNER = "I torch/distributed/launcher/api.py:254] "


def started(node: int, nodes: int, endpoint: str = "n1:29500", run: str = "7") -> list[str]:
    return [
        f"{node}: {_BANNER}Starting elastic_operator with launch configs:",
        f"{node}: {_BANNER}  min_nodes                : {nodes}",
        f"{node}: {_BANNER}  run_id                   : {run}",
        f"{node}: {_BANNER}  rdzv_endpoint            : {endpoint}",
    ]


_TIMEOUT = ["    raise RendezvousTimeoutError", "torch…RendezvousTimeoutError"]


@settings(deadline=None)
@given(st.integers(2, 40), st.data())
def test_whoever_is_missing_of_any_number_of_nodes_is_counted(nodes: int, data: st.DataObject) -> None:
    here = data.draw(st.integers(1, nodes))
    lines = [line for node in range(here) for line in started(node, nodes)]
    found = diagnose([("slurm.out", [*lines, *_TIMEOUT])], load_rules()).findings
    if here == nodes:
        assert found[0].id == "rendezvous-timeout"
    else:
        assert found[0].id == "head-only"
        assert f"started {here} times for {nodes} nodes" in found[0].cause


def test_counts_begin_anew_with_each_attempt_of_a_requeued_job() -> None:
    attempt = [*started(0, 2), *_TIMEOUT, "*** JOB 1 ON n1 CANCELLED AT 2026 DUE TO JOB REQUEUE ***"]
    assert told(*attempt, *attempt, *started(0, 2), *_TIMEOUT)[0] == "head-only"
    other = [*started(0, 2, run="7-1"), *started(1, 2, run="7-1"), *_TIMEOUT]
    assert "head-only" not in told(*attempt, *other)
    assert "rendezvous-timeout" in told(*attempt, *other)


def test_agents_that_meet_over_loopback_on_one_host_are_no_fault() -> None:
    assert told(*started(0, 2, "127.0.0.1:4000"), *started(1, 2, "127.0.0.1:4000")) == []


def test_rules_can_be_told_apart() -> None:
    rows = [(rule.kind, rule.cause) for rule in RULES.values()]
    assert len(set(rows)) == len(rows) == len(load_rules())
    for rule in RULES.values():
        assert rule.all or rule.any
        assert rule.source and rule.hint


def shown(text: str) -> str:
    """A message as the documentation shows it: *group*, the first of two forms."""
    text = re.sub(r"\[\[(.*?)\]\]", lambda match: match[1].partition("|")[0], text)
    text = re.sub(r"(?<!\{)\{(\w+)\}(?!\})", r"*\1*", text)
    return text.replace("{{", "{").replace("}}", "}").replace("|", "\\|")


def test_the_table_in_the_docs() -> None:
    rows = ["| rule | cause | what to do | tested with |", "| --- | --- | --- | --- |"]
    for _, rule in sorted(RULES.items()):
        kind = "" if rule.kind == "cause" else f"{rule.kind}: "
        tested = "a real failure" if rule.provoked else "lines of its source"
        hint = shown(rule.hint) + (f"; in a pod: {shown(rule.pod_hint)}" if rule.pod_hint else "")
        rows.append(f"| `{rule.id}` | {kind}{shown(rule.cause)} | {hint} | {tested} |")
    assert_golden_table(rows, DOCS, "tests/unit/test_diagnose.py")


# ---- Open MPI's blocks of lines, general rules, and the line that decides

_RULE = "-" * 74


@pytest.mark.parametrize("prefix", ["", "[1,0]<stderr>:", "[pod/ddp-launcher/mpi] "])
def test_a_message_of_open_mpi_is_read_as_one_line(prefix: str) -> None:
    text = ["No components were able to be", "  opened in the", "", "btl framework."]
    found = diagnose([("log", [prefix + line for line in (_RULE, *text, _RULE)])], load_rules()).findings
    assert [one.id for one in found] == ["mpi-framework"]
    assert "btl framework" in found[0].cause
    assert [line.line for line in found[0].evidence] == [2]


def test_what_is_between_two_messages_of_open_mpi_or_without_an_end_is_none() -> None:
    refusal = "The specified fork agent was not found: x"
    assert told(_RULE, "a table of slots", _RULE, refusal, _RULE, "another one", _RULE) == ["mpi-help"]
    assert (
        "fork agent"
        not in diagnose([("log", [_RULE, "a table of slots", _RULE, refusal])], load_rules()).findings[0].cause
    )
    assert told(_RULE, refusal) == []
    assert told(_RULE, refusal, *["a step"] * 60, _RULE) == []
    assert told(_RULE, _RULE, refusal, _RULE) == ["mpi-help"]
    assert told(_RULE, "WARNING: Open MPI will create a shared memory file", _RULE) == []
    banner = ("distributed_backend=nccl", "All distributed processes registered. Starting with 6 processes")
    assert told(_RULE, *banner, _RULE) == []  # of Lightning


@pytest.mark.parametrize(
    ("lines", "decides"),
    [
        (["widgetd: error: no belt", "widgetd: fatal: giving up", "the crate was not found"], 1),
        (["the crate was not found", "frame #1: c10::Error::Error(c10::SourceLocation)"], 0),
        (["access was denied", "MPI_ABORT was invoked on rank 0 in communicator X, which cannot go on"], 0),
        (["the server is unreachable"], 0),
        (["the belt is not permitted here"], 0),
        (["ERROR Belt is loose"], 0),
    ],
)
def test_the_line_that_decides_is_none_of_a_launcher(lines: list[str], decides: int) -> None:
    found = diagnose([("log", lines)], load_rules())
    assert [one.line for one in found.exception] == [decides + 1]


def test_what_a_program_says_in_general_is_no_cause_beside_a_known_one() -> None:
    general = "docker: Error response from daemon: the widget is loose."
    assert told(general) == ["docker-refused"]
    assert (
        told(general, "nvidia-container-cli: initialization error: nvml error: driver not loaded")[0]
        == "container-gpus"
    )
    assert "docker-refused" not in told(general, "No CUDA GPUs are available")
    # A killed process explains less than a container that did not start.
    assert told("command terminated with exit code 137", general)[0] == "docker-refused"


@pytest.mark.parametrize(
    "hedged",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "RuntimeError: Error building extension 'fused_adam'",
        "error: command 'gcc' failed with exit status 1",
        "NameError: name 'widget' is not defined",
    ],
)
@pytest.mark.parametrize(
    ("named", "cause"),
    [
        (
            "Tensors: The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0",
            "shapes-differ",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "gpu-memory"),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_a_cause_that_may_have_many_reasons_gives_way_to_a_named_one(
    hedged: str, named: str, cause: str, later: bool
) -> None:
    lines = [hedged, named] if later else [named, hedged]
    assert told(hedged) != told(named) and told(*lines)[0] == cause


def test_a_folder_that_slurm_does_without_is_no_cause() -> None:
    warning = "slurmstepd: error: couldn't chdir to `/root/job': No such file or directory: going to /tmp instead"
    assert (
        told(warning, "pyxis: importing docker image: nvcr.io/x", "n1:1:1 [0] NCCL INFO Bootstrap : Using eth0") == []
    )


def test_an_illegal_access_after_the_network_failed_is_no_cause() -> None:
    network = "n1:1:2 [0] transport/net_ib.cc:788 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len 0"
    access = "n1:1:1 [1] init.cc:194 NCCL WARN Cuda failure 'an illegal memory access was encountered'"
    assert told(network, access)[0] == "ib-no-answer"
    assert told(access, network)[0] == "illegal-access"


# ---- the program's own failure

_TRACEBACK = """Traceback (most recent call last):
  File "/home/ada/train.py", line 61, in main
    loss = model(x)
           ^^^^^^^^
  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1553, in forward
    return self.conv(x)
ValueError: expected 4D input (got 3D input)""".splitlines()
_TORCHRUN = """E0712 10:02:20 23811 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "/env/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:""".splitlines()
_KILLED = """srun: error: n1: task 0: Exited with exit code 1
srun: Terminating StepId=5982.0
slurmstepd: error: *** STEP 5982.0 ON n1 CANCELLED AT 2025-07-12T10:02:21 ***
srun: error: n2: task 1: Terminated""".splitlines()


def exception(*lines: str) -> list[str]:
    return [one.text for one in diagnose([("log", lines)], load_rules()).exception]


def test_a_claim_says_no_more_than_the_line() -> None:
    """What a line leaves open is no claim: whose port, which memory, which file, which daemon."""
    site = "sbatch: error: Your project may not use the partition belt without a wheel"
    unspecified = "sbatch: error: Batch job submission failed: Unspecified error"
    for lines, end in [([site, unspecified], "without a wheel"), ([unspecified], "no reason")]:
        assert diagnose([("log", lines)], load_rules()).findings[0].cause.endswith(end)
    refused = "sbatch: error: Batch job submission failed: Invalid Trackable RESource (TRES) specification"
    assert told(refused) == ["submission-refused"]
    assert told("NCCL WARN Call to ibv_reg_mr_iova2 failed with error Invalid argument errno 22") == ["memory-register"]
    taken = diagnose([("log", ["RuntimeError: Address already in use"])], load_rules()).findings[0]
    assert taken.cause == "a port is in use already" and "process of this job" in taken.hint
    sent = ["    return _unpickler(io.BytesIO(buf)).load()", "EOFError: Ran out of input"]
    assert told(*sent) == ["object-of-rank"]
    keys = 'Missing key(s) in state_dict: "net.module.belt", "net.module.wheel".'
    assert "wrapper" in diagnose([("log", [keys])], load_rules()).findings[0].hint
    tool = 'exec: "/usr/bin/nvidia-container-cli": stat /usr/bin/nvidia-container-cli: no such file or directory'
    assert "step-program" not in told(tool)


@each_case(
    ("line", "rule", "unproved"),
    [
        (
            "srun: error: Unable to create step for job 7: Invalid generic resource (gres) specification",
            "step-refused",
            "more than",
        ),
        (
            "srun: error: Unable to allocate resources: Socket timed out on send/recv operation",
            "slurm-unreachable",
            "refused",
        ),
        ("run.sh: line 2: qsub: command not found", "command-missing", "scheduler"),
        ("qsub: cannot connect to server pbs01 (errno=111)", "", "refused"),
        ("job.sh: line 9: conda: command not found", "conda-missing", "activate"),
        (
            "AttributeError: partially initialized module 'belt' has no attribute 'Wheel'",
            "shadowed-module",
            "beside your script",
        ),
        ("OSError: [Errno 8] Exec format error: './start.sh'", "wrong-architecture", "processor"),
        (
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            "gpu-architecture",
            "torch",
        ),
        ("RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable", "gpu-busy", "another"),
        ("RuntimeError: CUDA error: invalid device ordinal", "gpu-ordinal", "more ranks"),
        ("THCudaCheck FAIL file=a.cu line=2 error=11 : invalid argument", "cuda-report", "initial"),
        ("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 7 PiB", "cpu-memory", "full"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "", "process"),
        (
            "n1:1:1 [0] NCCL WARN Error while creating shared memory segment /dev/shm/nccl-a (size 9), error: No such file or directory (2)",
            "nccl-segment",
            "room",
        ),
        ("Out of memory: Killed process 12 (python3) total-vm:9kB", "kernel-memory", "limit"),
        ("TERM_CPULIMIT: job killed after reaching LSF CPU usage limit.", "lsf-ended", "time limit"),
        ("raise RendezvousTimeoutError()", "rendezvous-timeout", "head only"),
        (
            "LocalEntryNotFoundError: Cannot find the requested files in the disk cache and outgoing traffic has been disabled.",
            "hub-offline",
            "reach",
        ),
        ("OSError: /m/belt does not appear to have a file named config.json.", "model-file-absent", "no model"),
        (
            "ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 88 from C header, got 96 from PyObject",
            "numpy-binary",
            "NumPy 1",
        ),
        ("_pickle.UnpicklingError: invalid load key, '<'.", "page-in-place", "LFS"),
        ("_pickle.UnpicklingError: invalid load key, 'v'.", "file-in-place", "web page"),
        (
            "RuntimeError: Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
            "types-mixed",
            "device",
        ),
        (
            "RuntimeError: Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same",
            "devices-mixed",
            "type",
        ),
        ("ValueError: Invalid rank 3, rank should be in the interval [0, 1]", "rank-invalid", "parallel"),
        ("RuntimeError: launcher 'pdsh' not installed.", "deepspeed-launcher", "hosts"),
        ("[n1:77] PML belt cannot be selected", "mpi-framework", "different"),
        (
            "FATAL:   container creation failed: while mounting: failed to find loop device: permission denied",
            "apptainer-start",
            "namespace",
        ),
        ("ray.exceptions.ObjectStoreFullError: Failed to put object 1", "ray-store-full", "node's memory"),
        ("ValueError: invalid literal for int() with base 10: 'belt'", "", "rendezvous"),
        ("Error: No such container: belt", "container-absent", "image"),
        ("RuntimeError: 'weight' must be 2-D", "embedding-weight", "FSDP"),
        (
            "RuntimeError: NCCL WARN Bootstrap Root : mismatch in rank count from procs 2 : 4",
            "nccl-world-differs",
            "same rank",
        ),
        ("AttributeError: 'Belt' object has no attribute 'module'", "model-not-wrapped", "DistributedDataParallel"),
        ("RuntimeError: Distributed package doesn't have NCCL built in", "nccl-not-built", "CPU"),
        (
            "subprocess.CalledProcessError: Command 'ssh -o x n9 hostname' returned non-zero exit status 255.",
            "ssh-failed",
            "refused",
        ),
        ("n9: Permission denied (publickey).", "ssh-refused", "connect"),
        ("srun: error: Munge decode failed: Expired credential", "slurm-munge", "controller"),
    ],
)
def test_a_cause_claims_nothing_that_its_line_does_not_prove(line: str, rule: str, unproved: str) -> None:
    found = diagnose([("log", [line])], load_rules()).findings
    assert [one.id for one in found[:1]] == ([rule] if rule else [])
    assert all(unproved not in one.cause for one in found)


@each_case(
    ("line", "words"),
    [
        ("srun: error: Unable to create step for job 7: Memory required by task is not available", "Memory required"),
        (
            "FATAL:   the image's architecture (arm64) could not run on the host's (amd64)",
            "for arm64, another processor",
        ),
        ("Memory cgroup out of memory: Killed process 9 (python3) total-vm:9kB", "limit of its cgroup"),
        ("ssh: connect to host n3 port 22: No route to host", "to n3 fails: No route to host"),
        ("enroot-mount: failed to mount: /a at /b: Permission denied", "/a at /b in the container: Permission denied"),
        (
            "RuntimeError: The detected CUDA version (9.9) mismatches the version that was used to compile PyTorch (8.8).",
            "9.9, torch 8.8",
        ),
        (
            "slurmstepd: error: couldn't chdir to `/x': Permission denied: going to /tmp instead",
            "/x: Permission denied",
        ),
        ("IndexError: Target 9 is out of bounds.", "label 9 is not below"),
        ("OSError: [Errno 30] Read-only file system: '/opt/belt'", "(/opt/belt)"),
        ("Function 'BeltBackward0' returned nan values in its 0th output.", "returned nan values in its 0th output"),
        ("[n1:9] [[1,1],1] selected pml cm, but peer [[1,1],0] on n1 selected pml ob1", "cm and ob1"),
        ("OSError: [Errno 122] Disk quota exceeded", "quota"),
    ],
)
def test_a_cause_names_what_its_line_proves(line: str, words: str) -> None:
    assert words in diagnose([("log", [line])], load_rules()).findings[0].cause


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            ['Missing key(s) in state_dict: "belt.w".', 'Unexpected key(s) in state_dict: "module.belt.w".'],
            "the checkpoint begin with `module.`",
        ),
        (
            ['Missing key(s) in state_dict: "module.belt.w".', 'Unexpected key(s) in state_dict: "belt.w".'],
            "the model begin with `module.`",
        ),
        (
            ['Missing key(s) in state_dict: "module.a".', 'Unexpected key(s) in state_dict: "module.b".'],
            "does not fit the model",
        ),
        (['Missing key(s) in state_dict: "a.module.b".'], "does not fit the model"),
    ],
)
def test_the_names_in_a_checkpoint_tell_whether_its_model_was_wrapped(keys: list[str], says: str) -> None:
    assert says in diagnose([("log", keys)], load_rules()).findings[0].cause


@each_case(
    ("lines", "rule", "words"),
    [
        (
            [
                "sbatch: error: Memory specification can not be satisfied",
                "sbatch: error: Batch job submission failed: Requested node configuration is not available",
            ],
            "submission-refused",
            "Memory specification",
        ),
        (
            ["srun: error: Task launch for StepId=9.0 failed on node n4: Invalid job credential"],
            "job-credential",
            "(n4): Invalid",
        ),
        (
            ["pyxis: importing docker image: belt.sqsh", "slurmstepd: error: pyxis: failed to import docker image"],
            "pyxis-file-name",
            "belt.sqsh",
        ),
        (
            ["pyxis: importing docker image: lab/belt:1", "slurmstepd: error: pyxis: failed to import docker image"],
            "pyxis-quiet",
            "do not say why",
        ),
        (
            ["enroot-switchroot: failed to execute: /opt/belt: Permission denied"],
            "container-program",
            "/opt/belt: Permission denied",
        ),
        (["F belt.cc:9] Check failed: err == cudaSuccess (209 vs. 0)"], "gpu-architecture", "no code"),
        (["F belt.cc:9] Check failed: err == cudaSuccess (2 vs. 0)"], "gpu-memory", "full"),
        (["F belt.cc:9] Check failed: err == hipSuccess (100 vs. 0)"], "no-gpu", "no GPU"),
        (["F belt.cc:9] Check failed: err == hipSuccess (101 vs. 0)"], "gpu-ordinal", "number"),
        (["F belt.cc:9] Check failed: err == cudaSuccess (4 vs. 0)"], "check-failed", "(4 vs. 0)"),
        (
            ["x.cu:1: y: block: [1,0,0], thread: [2,0,0] Assertion `t >= 0 && t < n_classes` failed."],
            "label-range",
            "label",
        ),
        (
            ["x/IndexKernel.cu:1: y: block: [1,0,0], thread: [2,0,0] Assertion `-sizes[i] <= index` failed."],
            "table-index",
            "index",
        ),
        (
            ["[rank: 3] Child process with PID 9 terminated with code 2. Forcefully terminating all other"],
            "rank-failed",
            "code 2",
        ),
        (
            ["slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-01-05T10:00:00 DUE TO PREEMPTION ***"],
            "preempted",
            "for another one",
        ),
        (
            [
                "sbatch: error: QOSMaxBeltsPerUser",
                "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (x)",
            ],
            "submission-refused",
            "QOSMaxBeltsPerUser",
        ),
        (
            [
                "Warning  Pending  2s  kueue-admission  couldn't assign flavors to pod set main: insufficient quota for belts"
            ],
            "kueue-quota",
            "insufficient quota",
        ),
        (
            [
                "HTTPSConnectionPool(host='belt.io', port=443): Max retries exceeded with url: /x (Caused by ProxyError('no way'))"
            ],
            "host-unreachable",
            "ProxyError('no way')",
        ),
        (["srun: fatal: Can not execute /opt/belt"], "step-program", "/opt/belt cannot be started"),
        (["mount: /mnt: unknown filesystem type 'belt'."], "mount-failed", "unknown filesystem type"),
        (
            ["mount: /mnt: wrong fs type, bad option, bad superblock on /dev/loop7, missing codepage"],
            "squashfs-broken",
            "/dev/loop7",
        ),
        (
            ["docker: Error response from daemon: write /var/lib/docker/x: no space left on device."],
            "disk-full",
            "no space",
        ),
        (
            ["torch.cuda: NCCL WARN Error while creating shared memory segment /dev/shm/nccl-b (size 9)"],
            "nccl-segment",
            "/dev/shm/nccl-b",
        ),
        (["RuntimeError: Ninja is required to load C++ extensions"], "job-compiler", "Ninja is not found"),
        (["huggingface_hub.errors.RevisionNotFoundError: 404 Client Error."], "hub-entry", "no such Revision"),
        (["gloo/transport/tcp/address.cc:30] ss1.ss_family == ss2.ss_family. 2 vs 10"], "gloo-family", "IPv6"),
        (
            [
                "ConnectionError: Tried to launch distributed communication on port `4711`, but another process is utilizing it."
            ],
            "port-in-use",
            "4711",
        ),
        (["sbatch: error: Unable to open file belt.sbatch"], "batch-file", "belt.sbatch"),
        (
            [
                "slurmstepd: error: common_file_write_uints: write value '9' to '/sys/fs/cgroup/cpuset/belt' failed: No space left on device"
            ],
            "slurm-cgroup",
            "cgroup",
        ),
        (["Unable to run job: job rejected: the belt does not exist."], "submission-refused", "job rejected"),
        (["  Process `BELT (1)` terminated with an error exit status (137)"], "worker-killed", "SIGKILL"),
        (
            ["RuntimeError: unable to write to file </torch_9_9>: No space left on device (28)"],
            "shared-memory",
            "/dev/shm",
        ),
        (
            [
                "UserWarning: NVIDIA Belt with CUDA capability sm_99 is not compatible with the current PyTorch installation."
            ],
            "gpu-architecture",
            "not built for sm_99",
        ),
        (
            ["AssertionError:", "The NVIDIA driver on your system is too old (found version 9010)."],
            "driver-too-old",
            "9.1",
        ),
        (
            [
                "NVIDIA driver on your system is too old (found version 12080). The NVIDIA driver on your system is too old (found version 12080)"
            ],
            "driver-too-old",
            "CUDA 12.8",
        ),
        (
            [
                "The detected CUDA version (12.6) mismatches the version that was used to compile",
                "PyTorch (12.1). Please make sure to use the same CUDA versions.",
            ],
            "cuda-toolkit-version",
            "12.6, torch 12.1",
        ),
        (
            ["OSError: /env/lib/libtorch_global_deps.so: libbelt.so.3: cannot open shared object file: No such file"],
            "no-library",
            "library libbelt.so.3 is",
        ),
        (
            ["ImportError: libbelt.so.3: cannot open shared object file: No such file or directory"],
            "no-library",
            "libbelt.so.3",
        ),
        (
            [
                "a.out: error while loading shared libraries: liba.so.1: libbelt.so.3: cannot open shared object file: No"
            ],
            "no-library",
            "library libbelt.so.3 is",
        ),
        (
            [
                "[E:onnxruntime] Failed to load library /env/libonnxruntime_providers_cuda.so with error: libcublasLt.so.12: cannot open shared object file: No"
            ],
            "no-library",
            "libcublasLt.so.12",
        ),
        (
            ["Could not load library libcudnn_adv.so.9. Error: libnvrtc.so.12: cannot open shared object file: No"],
            "no-library",
            "libnvrtc.so.12",
        ),
        (
            ["Could not load library libcudnn_adv.so.9. Error: libcuda.so.1: cannot open shared object file: No"],
            "no-driver",
            "libcuda.so.1",
        ),
        (
            ["OSError: /env/libbelt.so: libcuda.so.1: cannot open shared object file: No such file or directory"],
            "no-driver",
            "libcuda.so.1",
        ),
        (
            ["ImportError: libcudnn.so.8: cannot open shared object file: No such file or directory"],
            "cudnn-absent",
            "libcudnn.so.8",
        ),
        (
            [
                "OSError: /env/libbelt.so.1: symbol belt_slack version libslack.so.2 not defined in file libslack.so.2 with link time reference"
            ],
            "symbol-missing",
            "belt_slack, which libslack.so.2, as it was loaded, lacks",
        ),
        (
            [
                "/lib/a.so: symbol belt_slack, version SLACK_2 not defined in file libslack.so.2 with link time reference"
            ],
            "symbol-missing",
            "libslack.so.2",
        ),
        (
            [
                "  what():  [enforce fail at /src/gloo/transport/tcp/pair.cc:410] optval == 0. 113 vs 0. SO_ERROR: No route to host"
            ],
            "gloo-connect",
            "No route to host",
        ),
        (
            [
                "Platform: osx-arm64",
                "ResolvePackageNotFound:",
                "  - ncurses=6.4=h6a678d5_0",
            ],
            "conda-builds",
            "for osx-arm64, as ncurses",
        ),
        (
            [
                "FATAL:   nvidia-container-cli not allowed in setuid mode",
                "ERROR  : Failed to create user namespace: user namespace disabled",
            ],
            "apptainer-nvccli",
            "namespaces: user namespace disabled",
        ),
        (
            [
                "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 80, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
            ],
            "port-of-system",
            "port 80 is in use",
        ),
        (
            [
                "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 1024, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
            ],
            "port-in-use",
            "port 1024 is in use",
        ),
        (
            [f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {2.0**-n}" for n in range(1, 9)],
            "loss-scale-falls",
            "falls: 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625",
        ),
        (
            ["tail of prepare.sh:", "beltmake: command not found", "Error: prepare.sh failed with exit code 127"],
            "command-quoted",
            "beltmake",
        ),
    ],
)
def test_a_reason_in_another_line_or_a_number_is_read(lines: list[str], rule: str, words: str) -> None:
    found = diagnose([("log", lines)], load_rules()).findings[0]
    assert found.id == rule and words in found.cause


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            [
                '{"msg":"Traceback (most recent call last):\\n  File \\"/w/a.py\\", line 2\\nBeltError: 3 mm","level":"error"}'
            ],
            "BeltError: 3 mm",
        ),
        (["AlgorithmError: ExecuteUserScriptError:", 'ErrorMessage "BeltError: 3 mm"'], "BeltError: 3 mm"),
        (["forrtl: severe (29): file not found, unit 7"], "file not found, unit 7"),
        (["thread 'main' panicked at src/belt.rs:4:5:", "belt is loose"], "belt is loose"),
        (
            [
                *_TRACEBACK[:-1],
                "pydantic.ValidationError: 1 validation error for Belt",
                "slack",
                "  Input should be 3 mm",
            ],
            "Input should be 3 mm",
        ),
        (["the belt is unreachable", "FAILED: done at Mon Jan  5 04:36:42 2026"], "the belt is unreachable"),
    ],
)
def test_words_of_other_loggers_and_languages(lines: list[str], words: str) -> None:
    found = diagnose([("log", lines)], load_rules())
    assert found.verdict == "program"
    assert any(words in one.text for one in found.exception)


@pytest.mark.parametrize(
    "line",
    [
        "WARNING [_ops.py:20] Failed to import from belt._C with ModuleNotFoundError(\"No module named 'belt._C'\")",
        "W tensorflow/dso_loader.cc:64] Could not load dynamic library 'libcudart.so.11.0'; dlerror: x",
        "x.py:128: UserWarning: CUDA initialization: CUDA driver initialization failed, you might not have a CUDA gpu.",
        "/bin/sh: 1: gcc: not found",
    ],
)
def test_what_a_program_survived_is_no_cause_of_its_exception(line: str) -> None:
    found = diagnose([("log", [line, *_TRACEBACK])], load_rules())
    assert found.verdict == "program"
    assert {one.kind for one in found.findings} <= {"symptom"}
    # Without that exception, the line is all that there is.
    assert diagnose([("log", [line])], load_rules()).verdict == "cause"


def test_a_traceback_right_behind_an_error_of_another_process_is_read() -> None:
    lines = ["WARN could not import: ImportError('belt')", *(f"ERROR [core.py:5] {line}" for line in _TRACEBACK)]
    assert exception(*lines)[-1].startswith("ERROR [core.py:5] ")


@pytest.mark.parametrize(
    ("line", "unfounded"),
    [
        ("LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub", "hub-entry"),
        ("ImportError: libbelt.so.1: cannot open shared object file: Stale file handle", "no-library"),
        ("pods is forbidden: User u cannot list resource pods in the namespace belt", "pod-refused"),
        ("Port 8080 is not active", "ib-port"),
        ("mount: /mnt: wrong fs type, bad option, bad superblock on 10.0.0.1:/belt", "squashfs-broken"),
        ("pyarrow.lib.ArrowInvalid: Could not convert 'belt' with type str: tried to convert to int64", "data-damaged"),
        ("FileNotFoundError: Could not find the belt", "dataset-missing"),
        ("Error 8020: belt", "fabric-manager"),
        ("WARNING: skipping mount of /belt: mount source /belt doesn't exist", "mount-missing"),
        ("node(s) had untolerated taint {node.kubernetes.io/not-ready: }", "pod-network"),
    ],
)
def test_a_rule_does_not_hold_where_its_words_mean_something_else(line: str, unfounded: str) -> None:
    assert unfounded not in told(line)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            ["MPID_nem_init(3)......: channel initialization failed", "MPID_nem_x_init(9): no device x0"],
            "no device x0",
        ),
        (
            [
                "internal_Init(7).......: MPI_Init(argc=0) failed",
                "MPIR_y_init(8).........: ",
                "y_get(5).......: y is shut",
            ],
            "y is shut",
        ),
    ],
)
def test_the_innermost_frame_of_mpich_tells_why_it_does_not_start(lines: list[str], reason: str) -> None:
    found = diagnose([("log", ["Fatal error in internal_Init: Other MPI error, error stack:", *lines])], load_rules())
    assert found.findings[0].id == "mpi-init"
    assert found.findings[0].cause.endswith(f": {reason}")


def test_what_slurm_ends_after_a_failure_was_not_cancelled_by_somebody() -> None:
    assert "cancelled" not in told(*_TRACEBACK, *_TORCHRUN, *_KILLED)
    assert told("*** STEP 1.0 ON n1 CANCELLED AT 2025-07-12T10:02:21 DUE TO TASK FAILURE ***") == ["rank-failed"]
    # torchrun that scancel ends: its failure comes after.
    assert told(*reversed(_KILLED))[0] == "cancelled"


def test_the_first_exception_of_the_program_is_shown_where_no_cause_is_known() -> None:
    frames = [_TRACEBACK[1].strip(), _TRACEBACK[2].strip(), _TRACEBACK[4].strip(), _TRACEBACK[5].strip()]
    assert exception(*_TRACEBACK, *_TORCHRUN, *_KILLED) == [*frames, _TRACEBACK[-1]]
    assert exception(*_TORCHRUN, *_TRACEBACK, *_KILLED)[-1] == _TRACEBACK[-1]
    assert exception(*_TORCHRUN, *_KILLED) == []
    assert exception(*_TRACEBACK, "task 0: Out Of Memory") == []
    assert exception("Exception ignored in: <function f>", *_TRACEBACK) == []
    assert exception(*_TRACEBACK, *[_EPOCH] * 12, *_TRACEBACK[:-1], "KeyError: 'x'")[-1] == "KeyError: 'x'"


@pytest.mark.parametrize(
    ("bar", "prefix"),
    [
        ("\r 10%|█         | 1/10 [00:00<00:05,  1.9it/s]", ""),
        ("\r 10%|█         | 1/10 [00:00<00:05,  1.9it/s]", "[rank0]: "),
        ("0: \r 10%|█         | 1/10 [00:00<00:05,  1.9it/s]", "0: "),
    ],
)
def test_an_exception_is_found_behind_a_progress_bar_that_did_not_end_its_line(bar: str, prefix: str) -> None:
    first, *rest = _TRACEBACK
    behind = bar + first if bar.startswith(prefix) else bar + prefix + first
    found = exception(behind, *(prefix + line for line in rest), *_KILLED)
    assert found == [(prefix + _TRACEBACK[n]).strip() for n in (1, 2, 4, 5, -1)]


def test_what_moves_the_cursor_or_colours_a_line_does_not_hide_it() -> None:
    erase = "\x1b[2K\x1b[1A"
    assert exception(erase + _TRACEBACK[0], *_TRACEBACK[1:], *_KILLED)[-1] == _TRACEBACK[-1]
    assert told("foo.sh: line 3: module: command not found", "loss: \x1b[32m2.31\x1b[0m") == []
    last = diagnose([("log", ["\x1b[31mKilled\x1b[0m"])], load_rules()).last
    assert [one.text for one in last] == ["Killed"]


def test_a_job_that_trained_on_has_no_exception_to_show() -> None:
    assert exception(*_TRACEBACK, _EPOCH) == []


@settings(deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.sampled_from(["[rank{}]: ", "{}: ", "{}: [default{}]:", "[pod/w-{}/pytorch] 2026-07-12T10:00:0{}.{}Z "]),
)
def test_an_exception_is_found_between_the_lines_of_other_ranks(rng: random.Random, form: str) -> None:
    """Each rank fails in its own way, and they write at once: the first to have written its exception is meant."""
    ranks = [
        [
            form.format(rank, rank, "12345"[: 1 + number % 4]) + line
            for number, line in enumerate([*_TRACEBACK[:-1], f"ValueError: of {rank}"])
        ]
        for rank in range(4)
    ]
    turns = [rank for rank in range(4) for _ in ranks[rank]]
    rng.shuffle(turns)
    lines = [ranks[rank].pop(0) for rank in turns]
    first = next(line for line in lines if "ValueError" in line)
    found = exception(*lines, *_TORCHRUN)
    assert found[-1] == first.strip()
    assert len(found) == 5
    assert all(re.match(rf"\D*{first[-1]}\b", line) for line in found)


_FRAMES = [
    '  File "/home/ada/train.py", line 9, in main',
    "    step()",
    '  File "/env/lib/python3.11/site-packages/x/y.py", line 3, in z',
    "    raise E",
]
_BOX = [
    "╭──────────── Traceback (most recent call last) ────────────╮",
    "│ /home/ada/train.py:9 in main                              │",
    "│   8                                                       │",
    "│ ❱ 9 │   step()                                            │",
    "│ /env/lib/python3.11/site-packages/x/y.py:3 in z           │",
    "│ ❱ 3 │   raise E                                           │",
    "╰───────────────────────────────────────────────────────────╯",
]
_NOTEBOOK = [
    "-" * 75,
    "KeyError                                  Traceback (most recent call last)",
    "<ipython-input-3-1a> in <module>",
    "      1 import x",
    "----> 2 x.z()",
    "",
    "/env/lib/python3.11/site-packages/x/y.py in z(self)",
    "----> 3     raise E",
    "",
]


@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "(Engine pid=7) ERROR 05-21 05:16:15 [core.py:48] "])
@pytest.mark.parametrize(
    ("lines", "place"),
    [
        (_FRAMES, 'File "/home/ada/train.py", line 9, in main'),
        ([line.strip() for line in _FRAMES], 'File "/home/ada/train.py", line 9, in main'),
        ([_TRACEBACK[0], *_FRAMES], 'File "/home/ada/train.py", line 9, in main'),
        ([_TRACEBACK[0], *(line.strip() for line in _FRAMES)], 'File "/home/ada/train.py", line 9, in main'),
        (_BOX, "/home/ada/train.py:9 in main"),
        (_NOTEBOOK, "<ipython-input-3-1a> in <module>"),
    ],
)
def test_an_exception_is_found_in_tracebacks_of_other_forms(prefix: str, lines: list[str], place: str) -> None:
    found = exception(*(prefix + line for line in (*lines, "KeyError: 'x'")), *_KILLED)
    assert place in found[0]
    assert found[-1] == f"{prefix}KeyError: 'x'"
    assert all("File" not in line and "y.py" not in line for line in found[1:2])


@each_case(
    ("lines", "shown"),
    [
        # Messages of several lines.
        ([*_FRAMES, "RuntimeError: ", "    CUDA Setup failed", "more"], ["RuntimeError:", "CUDA Setup failed"]),
        (
            [*_FRAMES, "X.BackendFailed: backend raised:", "", "PermissionRefused: no", "more"],
            ["X.BackendFailed: backend raised:", "PermissionRefused: no"],
        ),
        ([*_FRAMES, "ValueError: bad", "more"], ["ValueError: bad"]),
        ([*_FRAMES, "ValueError: one of:", "[rank7]: other", "WARNING: x"], ["ValueError: one of:"]),
        # The root of a chain, and its end.
        (
            [
                *_FRAMES,
                "KeyError: 'x'",
                "",
                "During handling of the above exception, another exception occurred:",
                "",
                *_TRACEBACK[:-1],
                "OSError: no",
            ],
            ["KeyError: 'x'", "OSError: no"],
        ),
        (
            [
                *_FRAMES,
                "KeyError: 'x'",
                "",
                "The above exception was the direct cause of the following exception:",
                "",
                _TRACEBACK[0],
                *_FRAMES,
                "A.E: of",
                "",
                "During handling of the above exception, another exception occurred:",
                "",
                _TRACEBACK[0],
                *_FRAMES,
                "B.E: to",
            ],
            ["KeyError: 'x'", "B.E: to"],
        ),
        ([*_FRAMES, "KeyError: 'x'", "", _TRACEBACK[0], *_FRAMES, "OSError: no"], ["KeyError: 'x'"]),
        # Exceptions that report another one.
        (
            [
                _TRACEBACK[0],
                *_FRAMES,
                "KeyError: Caught KeyError in DataLoader worker process 0.",
                "Original " + _TRACEBACK[0],
                *_FRAMES,
                "KeyError: 'y'",
            ],
            ["KeyError: 'y'"],
        ),
        (
            [
                _TRACEBACK[0],
                *_FRAMES,
                "subprocess.CalledProcessError: Command 'x' returned non-zero exit status 1.",
                "AssertionError: one",
            ],
            ["AssertionError: one"],
        ),
        (
            [
                "AssertionError: one",
                _TRACEBACK[0],
                *_FRAMES,
                "RuntimeError: Engine core initialization failed. See root cause above.",
            ],
            ["AssertionError: one"],
        ),
        # The line that decides.
        (
            ["x.cu(3): error: no operator", "x.cu(9): error: second", "RuntimeError: compiling failed"],
            ["x.cu(3): error: no operator"],
        ),
        (["error: one", "error: two"], ["error: two"]),
        (["cannot do it", "AssertionError", "it must be done"], ["it must be done"]),
        (["  what():  the queue is closed", *_TRACEBACK], ["what():  the queue is closed"]),
        # A traceback that the log cuts off.
        (["x", *_BOX[2:5]], ["│ /env/lib/python3.11/site-packages/x/y.py:3 in z           │"]),
        (["x", _TRACEBACK[0], *_FRAMES], ["raise E"]),
        (["--- Logging error ---", *_TRACEBACK, "ValueError: x"], ["ValueError: x"]),
        (["cannot open a.png", _TRACEBACK[0], *_FRAMES], ["raise E"]),
        ([_TRACEBACK[0], *_FRAMES, "socket.timeout: of a server"], ["socket.timeout: of a server"]),
        (["3 uploads failed", "an upload crashed"], ["an upload crashed"]),
        (
            ["belts.errors.BeltException: ", "        You asked for 4 belts", "        and have 1", "more"],
            ["belts.errors.BeltException:", "You asked for 4 belts", "and have 1"],
        ),
        (
            ["(w) [gloo/transport/uv/libuv.h:596] uv_listen: bad file", "RuntimeError: later"],
            ["(w) [gloo/transport/uv/libuv.h:596] uv_listen: bad file"],
        ),
        (
            ["the belt is not found", "[c10d] The server socket cannot be used on [::]:1 (errno: 97 - No family)."],
            ["the belt is not found"],
        ),
        (
            ["the belt is not found", "('local_rank %s FAILED with no error file. Decorate your entrypoint', 0)"],
            ["the belt is not found"],
        ),
    ],
)
def test_what_the_program_says_is_whole_and_its_first_failure(lines: list[str], shown: list[str]) -> None:
    assert exception(*lines)[-len(shown) :] == shown


def test_an_exception_that_no_rule_explains_comes_before_causes_that_may_follow_from_it() -> None:
    killed = "E failed (exitcode: -9) local_rank: 1"
    assert exception(*_TRACEBACK, killed)[-1] == _TRACEBACK[-1]
    assert exception(killed, *_TRACEBACK) == []
    assert exception("FileNotFoundError: [Errno 2] No such file or directory: 'a'", *_TRACEBACK)[-1] == _TRACEBACK[-1]
    assert exception("OSError: [Errno 28] No space left on device", *_TRACEBACK) == []
    # An optional module, and a warning.
    assert exception("ModuleNotFoundError: No module named 'apex'", *_TRACEBACK)[-1] == _TRACEBACK[-1]
    assert exception("bash: module: command not found", *_TRACEBACK)[-1] == _TRACEBACK[-1]
    assert exception("RuntimeError: can't start new thread", "Loading", *_TRACEBACK)[-1] == _TRACEBACK[-1]
    assert exception("pthread_create failed for thread 3 of 8: Resource temporarily unavailable", *_TRACEBACK) == []
    old = "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 10020)."
    assert exception(old, *_TRACEBACK)[-1] == _TRACEBACK[-1]


def test_what_decides_is_shown_of_a_long_line() -> None:
    (line,) = exception("x" * 300 + " OddError: the end " + "y" * 300)
    assert "OddError: the end" in line and len(line) < 260


def test_a_cause_shows_the_place_of_the_exception_that_it_explains() -> None:
    missing = "FileNotFoundError: [Errno 2] No such file or directory: 'a'"
    found = diagnose([("log", [*_TRACEBACK[:-1], missing])], load_rules())
    assert found.findings[0].id == "file-missing"
    assert found.findings[0].evidence[0].text == _TRACEBACK[1].strip()
    assert found.findings[0].evidence[-1].text == missing


@pytest.mark.parametrize(
    ("logs", "doubt"),
    [
        ([("n1", [*started(0, 2), *_TIMEOUT])], True),
        ([("n1", [*started(0, 2), *_TIMEOUT]), ("n2", ["nothing"])], False),
        ([("slurm.out", [*started(0, 3), *started(1, 3), *_TIMEOUT])], False),
    ],
)
def test_a_start_that_one_log_tells_of_leaves_a_doubt(logs: list[tuple[str, list[str]]], doubt: bool) -> None:
    found = diagnose(logs, load_rules()).findings[0]
    assert found.id == "head-only"
    assert ("if there are other nodes' logs, give them too" in found.cause) is doubt


# ---- reading


def test_logs_are_read_compressed_from_folders_and_with_bad_bytes(tmp_path: Path) -> None:
    raw = b"\xff\xfe\x00 junk\r\n" + b"ModuleNotFoundError: No module named 'x'\r\n"
    (tmp_path / "a.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "b.out").write_bytes(gzip.compress(raw))
    (tmp_path / "c.log").write_bytes(raw)
    (one,) = of(tmp_path).findings
    places = [(Path(line.file).name, line.line) for line in one.evidence]
    assert places == [("a.gz", 2), ("b.out", 2), ("c.log", 2)]


def test_the_quotes_of_a_web_page_are_read_as_those_of_programs(tmp_path: Path) -> None:
    log = tmp_path / "copied.log"
    log.write_text(
        "ModuleNotFoundError: No module named \u2018belt\u2019\nsay \u201cgo\u201d: Error\n", encoding="utf-8"
    )
    found = of(log)
    assert [one.cause for one in found.findings] == ["Python does not find the module belt"]
    assert found.last[-1].text == 'say "go": Error'


def test_advice_names_what_the_kind_of_failure_needs() -> None:
    table = RULES["table-index"].hint
    assert "label" in table and "token" in table
    limit = RULES["registry-limit"].hint
    assert "log in" in limit and "mirror" in limit and "HF_HOME" not in limit
    assert "HF_HOME" in RULES["hub-limit"].hint and "not of the image" in RULES["apptainer-host-file"].hint


def test_an_endless_line_is_searched_at_its_end_and_does_not_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "bar.log"
    path.write_bytes(b"\r 50% |####" * 400_000 + b"RuntimeError: No CUDA GPUs are available\nnext\n")
    found = of(path)
    assert (found.findings[0].id, found.findings[0].evidence[0].line, found.lines) == ("no-gpu", 1, 2)
    assert len(found.findings[0].evidence[0].text) < 300


@pytest.mark.parametrize("more", [-1, -20, -39])
def test_the_end_of_an_endless_line_is_whole_wherever_it_is_cut(more: int, tmp_path: Path) -> None:
    path = tmp_path / "bar.log"
    path.write_bytes(b"#" * (3 * (1 << 14) + more) + b"\rRuntimeError: No CUDA GPUs are available\n")
    assert [one.id for one in of(path).findings] == ["no-gpu"]


def test_lines_that_differ_in_numbers_are_searched_once_and_few_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The work for a large log, counted: 100,000 lines, of which one is a cause."""
    searched, read = [], []
    marks_of, line = TextIndex._marks_of, _Reader._line
    monkeypatch.setattr(TextIndex, "_marks_of", lambda self, shape: searched.append(shape) or marks_of(self, shape))
    monkeypatch.setattr(_Reader, "_line", lambda self, one, *more: read.append(one) or line(self, one, *more))
    path = tmp_path / "big.log"
    lines = [f"[RANK {n % 8}] Step {n} of 100000 | lr {n / 7:.3e}" for n in range(100_000)]
    path.write_text("\n".join([*lines, "OSError: [Errno 28] No space left on device", *lines[:9]]))
    found = of(path)
    assert (found.findings[0].id, found.findings[0].evidence[0].line, found.lines) == ("disk-full", 100_001, 100_010)
    # The line behind the exception may belong to its message.
    assert [one.number for one in read] == [100_001, 100_002]
    assert len(searched) == 1


def test_the_shapes_of_lines_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_MOST", 100)
    some: LineShapes[str] = LineShapes(TextIndex({"a": ["needle 1"], "b": []}))
    for number in range(20):
        block = "\n".join(f"{chr(97 + number)}{chr(0x4E00 + n)}" for n in range(50))
        assert some.of(f"{block}\nthe needle 12")[-2:] == [("b",), ("a", "b")]
        assert len(some._known) <= 200


def test_a_line_has_the_marks_of_all_patterns_that_match_it() -> None:
    patterns = {pattern for rule in EVERYWHERE for pattern in rule.patterns}
    some = LineShapes(TextIndex({pattern: pattern.needles for pattern in patterns}))
    assert sum(map(len, matches().values())) > 1000
    for (line, matched), marks in zip(matches().items(), some.of("\n".join(matches())), strict=True):
        assert matched <= set(marks), line


def test_each_pattern_has_a_text_that_few_lines_contain() -> None:
    rare = {
        '^(?:\\d+: ?)?"(?P<module>[^"]+)"(?:\\s+"[^"]+")*\\s*$',
        r"^  - (?P<what>[\w.-]{1,100}==?[^\s=]{1,60}=[^\s=]{1,100})\s*$",
    }
    for rule in EVERYWHERE:
        for pattern in rule.patterns:
            assert min(map(len, pattern.needles), default=0) >= 5 or pattern.regex.pattern in rare, pattern


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) - 3, 1 << 14, 40_000])
def test_lines_are_whole_wherever_a_block_of_the_file_ends(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"x" * (size - 30) + b"\nCUDA error: out of memory\r\ny\nTraceback (most recent call last):\n")
    found = of(path)
    assert [(one.id, one.evidence[0].line) for one in found.findings] == [("gpu-memory", 2)]
    assert found.lines == 4


def test_passwords_in_logs_are_not_repeated() -> None:
    line = "qsub: cannot fetch https://ada:hunter2@example.org/x"
    found = diagnose([("log", [line])], load_rules())
    assert found.findings[0].id == "submission-refused"
    assert "hunter2" not in repr(found)


@settings(deadline=None)
@given(st.lists(st.text(), max_size=20))
def test_no_text_is_too_strange(lines: list[str]) -> None:
    diagnose([("log", lines)], load_rules())


@examples(30)
@given(st.randoms(use_true_random=False))
def test_every_rule_survives_lines_in_any_order(rng: random.Random) -> None:
    paths = [path for rule in RULES.values() for path in logs_of(rule.id)]
    lines = [line for path in rng.sample(paths, 4) for line in path.read_text().splitlines()]
    rng.shuffle(lines)
    found = diagnose([("log", lines[:100])], load_rules())
    kinds = [("cause", "symptom", "note").index(one.kind) for one in found.findings]
    assert kinds == sorted(kinds)


def test_the_constant_text_of_a_pattern_is_in_all_that_it_matches() -> None:
    for line, matched in matches().items():
        for pattern in matched:
            assert any(text in line for text in pattern.needles), pattern


@each_case(
    ("regex", "texts"),
    [
        (r"abc", ["abc"]),
        (r"abc?de", ["ab"]),
        (r"a(?:x|y)bcd", ["bcd"]),
        (r"ab|cd", ["ab", "cd"]),
        (r"\[x\] y\d+z", ["[x] y"]),
        (r"[]a]bc", ["bc"]),
        (r"[^]]+end", ["end"]),
        (r"\((?P<n>[^)]+)\) on", [") on"]),
        (r"a{2}bc", ["bc"]),
        (r"^x\.$", ["x."]),
        (r"ab|", []),
        (r"(ab)?c", ["c"]),
        (r"(ab|\d)", []),
        (r"a(?:bc)d", ["abcd"]),
        (r"a(?!xyz)b", ["a"]),
        (r"(?<=xyz)b", ["b"]),
        (r"(?:abc|de(?:f|g))\d", ["abc", "de"]),
        (r"(?:abc)+", ["abc"]),
        (r"(?:abc){0,9}d", ["d"]),
        (r"(?P<x>(?:abcd|efgh)i)j", ["abcd", "efgh"]),
        (r"\d[Aa]bc", ["Abc", "abc"]),
        (r"[Aa]b[Cc]d", ["Ab", "ab"]),
        (r"(?:[Aa]bc)d", ["Abc", "abc"]),
        (r"[Aa]?bc", ["bc"]),
    ],
)
def test_the_constant_texts_of_a_pattern(regex: str, texts: list[str]) -> None:
    assert list(needles(regex)) == texts


# ---- the command


def test_the_command_shows_cause_evidence_and_hint() -> None:
    paths = [str(path) for path in logs_of("localhost-endpoint")]
    done = CliRunner().invoke(diagnose_command, paths)
    assert done.exit_code == 0
    assert "the rendezvous endpoint is localhost:29500 on 2 nodes" in done.output
    assert re.search(r"localhost-endpoint-n1\.log:\d+: .*rdzv_endpoint", done.output)
    assert "do: give the head's address" in done.output
    assert "Also in the log: " not in done.stdout


def test_the_command_shows_symptoms_where_no_cause_is_known() -> None:
    paths = [str(path) for path in logs_of("rendezvous-timeout")]
    done = CliRunner().invoke(diagnose_command, paths)
    assert "1. symptom: not every node joined the rendezvous in time" in done.stdout


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        (["srun: error: n1: task 3: Killed"], "symptom"),
        (["srun: error: n1: task 3: Killed", "bash: line 1: nvcc: command not found"], "cause"),
        (
            ["Traceback (most recent call last):", "WidgetError: it is loose", "srun: error: n1: task 3: Killed"],
            "program",
        ),
        (["all is well"], "none"),
    ],
)
def test_a_symptom_is_not_shown_as_a_cause(lines: list[str], verdict: str, tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("\n".join(lines))
    assert json.loads(CliRunner().invoke(diagnose_command, [str(log), "--json"]).stdout)["verdict"] == verdict
    shown = CliRunner().invoke(diagnose_command, [str(log)]).stdout
    assert shown.startswith("The log does not hold the cause, or no rule knows it.") is (verdict == "symptom")


def test_the_command_prints_json_and_reads_standard_input() -> None:
    text = logs_of("clients-missing")[0].read_text()
    done = CliRunner().invoke(diagnose_command, ["-", "--json"], input=text)
    (one,) = json.loads(done.stdout)["findings"]
    assert (one["id"], one["kind"]) == ("clients-missing", "cause")
    assert one["evidence"][0]["file"] == "standard input"


def test_where_nothing_is_recognised_the_last_errors_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("fine\nWidgetError: the frobnicator is loose\nmore\n")
    done = CliRunner().invoke(diagnose_command, [str(log)])
    assert done.exit_code == 0
    assert "Nothing was recognised in 3 lines." in done.output
    assert "The program's own words:\n     " in done.stdout
    assert "x.log:2: WidgetError: the frobnicator is loose" in done.stdout
    log.write_text("fine\n3 of 7 uploads failed\n")
    done = CliRunner().invoke(diagnose_command, [str(log)])
    assert "The program's own words:\n     " in done.stdout and "x.log:2: 3 of 7 uploads failed" in done.stdout
    log.write_text("fine\nwarning: 3 of 7 uploads failed\n")
    done = CliRunner().invoke(diagnose_command, [str(log)])
    assert "The last lines that speak of an error:" in done.output
    log.write_text("\n".join(["ValueError: too many classes", "[rank1]: KeyError: 'x'", *_TORCHRUN[:1], *_KILLED]))
    done = CliRunner().invoke(diagnose_command, [str(log)])
    assert done.stdout.splitlines()[1].endswith("x.log:1: ValueError: too many classes")


@pytest.mark.parametrize("name", ["nosuch.log", "."])
def test_a_log_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(diagnose_command, [str(tmp_path / name)])
    assert getattr(done.exception, "exit_code", None) == 2
    assert str(tmp_path) in str(done.exception)


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("how", ["cut", "changed"])
def test_a_damaged_compressed_log_is_named(pack: Callable[[bytes], bytes], how: str, tmp_path: Path) -> None:
    packed = pack(random.Random(1).randbytes(9999))
    half = len(packed) // 2
    damaged = packed[:half] if how == "cut" else packed[:half] + b"\xff" * 99 + packed[half + 99 :]
    (tmp_path / "bad.gz").write_bytes(damaged)
    done = CliRunner().invoke(diagnose_command, [str(tmp_path / "bad.gz")])
    assert getattr(done.exception, "exit_code", None) == 2
    assert "bad.gz" in str(done.exception)


def test_deflated_bytes_that_make_no_sense_are_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b"".join(b"line %d\n" % n for n in range(9999))))
    packed[200:400] = b"\xff" * 200
    (tmp_path / "x.log.gz").write_bytes(packed)
    done = CliRunner().invoke(diagnose_command, [str(tmp_path / "x.log.gz")])
    assert getattr(done.exception, "exit_code", None) == 2
    assert "cannot read the log" in str(done.exception)


@pytest.mark.parametrize(("allowed", "path"), [(1, "."), (4, "sub"), (4, "sub/a.log")])
def test_a_folder_that_may_not_be_entered_or_listed_is_named(allowed: int, path: str) -> None:
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "sub").mkdir()
        (Path(name) / "sub/a.log").write_text("x\n")
        Path(name).chmod(0o700 | allowed if root else allowed << 6)
        if root:  # Nothing is forbidden to root.
            os.seteuid(65534)
        try:
            done = CliRunner().invoke(diagnose_command, [str(Path(name) / path)])
        finally:
            if root:
                os.seteuid(0)
            Path(name).chmod(0o700)
    assert getattr(done.exception, "exit_code", None) == 2, done.exception
    assert name in str(done.exception)


def test_only_the_last_pod_of_a_copied_log_is_judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The pods of an earlier job of that name, and an earlier one of this job, appended to the same file."""
    (tmp_path / "ddp").mkdir()
    start = "envbuild: pod start: {} at 2026-11-26T10:00:00Z\n"
    old = (
        start.format("a")
        + "CUDA error: out of memory\n"
        + start.format("b")
        + "OSError: [Errno 28] No space left on device\n"
    )
    (tmp_path / "ddp/pod-0.log").write_text(
        old + start.format("c") + "x\n\nModuleNotFoundError: No module named 'apex'\n"
    )
    (tmp_path / "ddp/pod-1.log").write_text("ModuleNotFoundError: No module named 'apex'\n")
    for block in (1 << 20, 2):
        monkeypatch.setattr(read, "_BLOCK", block)
        found = of(tmp_path / "ddp/pod-0.log", tmp_path / "ddp/pod-1.log")
        assert [one.id for one in found.findings] == ["no-module"]
        places = [(Path(line.file).name, line.line) for line in found.findings[0].evidence]
        assert places == [("pod-0.log", 8), ("pod-1.log", 1)]
    # The output of several pods in one stream.
    (tmp_path / "all.log").write_text(old)
    assert [one.id for one in of(tmp_path / "all.log").findings] == ["disk-full", "gpu-memory"]


# ---- several jobs in a folder


@each_case(
    ("name", "number"),
    [
        ("ddp_1001.out", "1001"),
        ("slurm-1001.out", "1001"),
        ("slurm-1001_3.out", "1001"),
        ("ddp.o1001", "1001"),
        ("ddp.e77", "77"),
        ("ddp.o77.pbs01", "77"),
        ("ddp_12345_n1.log", "12345"),
        ("slurm-12.err.gz", "12"),
        ("x-2_44.out", "44"),
        ("lr-1e-3_55.out", "55"),
        ("ddp_1001_ip-10-1-0-5.out", "1001"),
        ("12345.log", "12345"),
        ("gpu-a-001.log", ""),
        ("node-101.log", ""),
        ("node_1.out", ""),
        ("n1.log", ""),
        ("head-n1.log", ""),
        ("ip-10-1-0-5.out", ""),
        ("train.out", ""),
        ("1001", ""),
        ("attempt_0.out", ""),
    ],
)
def test_the_number_of_a_job_is_in_the_name_of_its_log(name: str, number: str) -> None:
    assert job_number(name) == number


def test_each_job_of_a_folder_is_diagnosed_by_itself(tmp_path: Path) -> None:
    good = [*started(0, 2, run="7"), *started(1, 2, run="7"), _EPOCH]
    bad = [*started(0, 2, "n3:1", "8"), *started(1, 2, "n3:1", "8"), "No CUDA GPUs are available", *_TIMEOUT]
    (tmp_path / "ddp_1001.out").write_text("\n".join(good))
    (tmp_path / "ddp_1002.out").write_text("\n".join(bad))
    (tmp_path / "ddp_1002.err").write_text("x\n")
    done = CliRunner().invoke(diagnose_command, [str(tmp_path)])
    assert "job 1001: ddp_1001.out\n" in done.stdout
    assert "job 1002: ddp_1002.err, ddp_1002.out\n1. the process has no GPU" in done.stdout
    assert "differ" not in done.stdout
    done = CliRunner().invoke(diagnose_command, [str(tmp_path), "--json"])
    rows = {row["job"]: row for row in json.loads(done.stdout)["jobs"]}
    assert {name: [one["id"] for one in row["findings"]][:1] for name, row in rows.items()} == {
        "1001": [],
        "1002": ["no-gpu"],
    }
    assert [Path(log).name for log in rows["1002"]["logs"]] == ["ddp_1002.err", "ddp_1002.out"]


def test_the_logs_of_one_job_in_a_folder_belong_together(tmp_path: Path) -> None:
    for node in (0, 1):
        lines = [*started(node, 2, run=f"id{node}"), *_TIMEOUT]
        (tmp_path / f"node-{node}.log").write_text("\n".join(lines))
    (tmp_path / "ddp_1001.out").write_text("x\n")
    done = CliRunner().invoke(diagnose_command, [str(tmp_path), "--json"])
    assert json.loads(done.stdout)["findings"][0]["id"] == "run-ids-differ"


_FULL = [
    "Traceback (most recent call last):",
    '  File "/home/ada/train.py", line 61, in main',
    "    loss = model(batch)",
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0",
]
_OUT_OF_TIME = ["item 7", "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-01-02T00:00:00 DUE TO TIME LIMIT ***"]


@pytest.mark.parametrize(
    "line",
    [
        "/etc/profile.d/site.sh: line 3: module: command not found",
        "bash: scontrol: command not found",
        "/home/ada/.bashrc: line 20: /opt/conda/bin/activate: No such file or directory",
        "which: no nvcc in (/usr/local/bin:/usr/bin)",
        "slurmstepd: error: couldn't chdir to `/home/ada/x': No such file or directory: going to /tmp instead",
        "tee: /logs/out.txt: Permission denied",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 12 of 64: Resource temporarily unavailable",
        "ssh: connect to host n2 port 22: Connection refused",
        "fatal: unable to access 'https://github.com/a/b/': Could not resolve host: github.com",
        "Failed to initialize NVML: Unknown Error",
        "No module named 'flash_attn'",
        "UserWarning: The installed version of bitsandbytes was compiled without GPU support.",
        "libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes. This will severely limit memory registrations.",
        "[1] [n1:1:0] UCX  WARN  network device 'mlx5_1:1' is not available, please use one or more of: 'eth0'(tcp)",
        "n1:1:1 [0] NCCL WARN NET/OFI Only EFA provider is supported",
        "[W socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 (errno: 13 - Permission denied).",
        "kernel: LustreError: 11-0: scratch-OST0001: operation ost_read to node failed",
        "/etc/bashrc: line 12: BASHRCSOURCED: unbound variable",
        "Error response from daemon: No such container: old_run",
        "c++: fatal error: Killed signal terminated program cc1plus",
    ],
)
def test_a_line_that_programs_survive_is_no_cause_of_another_end(line: str) -> None:
    named = _FULL[-1]
    kinds = [
        [(one.id, one.kind) for one in diagnose([("log", ["start", line, *end])], load_rules()).findings]
        for end in (_FULL, [named])
    ]
    for found in kinds:
        assert [name for name, kind in found if kind == "cause"] == ["gpu-memory"]


@pytest.mark.parametrize(
    "line",
    [
        "bash: conda: command not found",
        "ModuleNotFoundError: No module named 'apex'",
        "A module that was compiled using NumPy 1.x cannot be run in NumPy 2.0.2 as it may crash.",
    ],
)
def test_what_a_job_survived_until_its_time_limit_is_no_cause(line: str) -> None:
    assert told(line, *_OUT_OF_TIME)[0] == "time-limit"


def test_an_exception_that_lets_other_ranks_wait_comes_before_the_time_limit() -> None:
    line = "OSError: [Errno 116] Stale file handle: '/scratch/a'"
    assert told(line, *_OUT_OF_TIME)[0] == "storage-lost"
    assert told(line, "task 0: Out Of Memory")[0] == "slurm-memory"


@pytest.mark.parametrize(
    "line",
    [
        "Got NaN loss detected, skipping this step",
        "WARNING: OOM, skipping batch: CUDA out of memory. Tried to allocate 20.00 MiB",
        "WARNING:root:NaN or Inf found in input tensor.",
        "image file is truncated (4 bytes not processed), skipping",
        "kernel: nfs: server fs1 not responding, still trying",
        "amdgpu: [drm] *ERROR* ring gfx timeout, but soft recovered",
        "429 Client Error: Too Many Requests for url: https://huggingface.co/a - retrying",
        'INFO: HTTP Request: GET https://huggingface.co/a "HTTP/1.1 429 Too Many Requests"',
        "n1:1:1 [0] NCCL INFO NET/OFI No eligible providers were found",
        "n1: ib_device.c:1  UCX  DIAG  ibv_create_qp failed: Cannot allocate memory",
        "Warning:  apex was installed without --cuda_ext. Fused syncbn kernels will be unavailable.",
        "FutureWarning: `weights_only=False`: arbitrary objects, unlike types accepted by default with weights_only",
        "kernel: NVRM: Xid (PCI:0000:1a:00): 63, pid=1, Row Remapper",
        "kernel: pcieport 0000:00:01.0: AER: Uncorrected (Non-Fatal) error received",
        "wandb: Offline mode is enabled",
        "NVIDIA's fabric manager is not required on this system",
        "pip: Installed CUDA version 12.1 does not match the version torch was compiled with 12.4, accepting this combination",
        "Installed CUDA version 12.4 does not match the version torch was compiled with 11.8.Detected"
        " `DS_SKIP_CUDA_CHECK=1`: Allowing this combination of CUDA",
        "MisconfigurationException: No `val_dataloader()` method defined to run `Trainer.validate`.",
        "UserWarning: Plan failed with a cudnnException: CUDNN_STATUS_NOT_SUPPORTED",
        "MPIDI_OFI_init_local(580): OFI fi_fabric failed (ofi_init.c:580:MPIDI_OFI_init_local:Invalid argument)",
        "TERM_UNKNOWN: unknown reason",
        "W bfc_allocator.cc:310] Allocator (GPU_0_bfc) ran out of memory trying to allocate 16.00GiB. This is not a failure",
        "libibverbs: Warning: no userspace device-specific driver found for /sys/class/infiniband_verbs/uverbs0",
        "but there are no active ports detected (or Open MPI was unable to use them).",
        "slurmstepd: error: unable to add task[pid=123] to memory cg '(null)'",
        "297.7s: flux-shell[6]: stderr: flux-shell: ERROR: flux_reactor_run: No such file or directory",
        "WARNING - xFormers can't load C++/CUDA extensions. xFormers was built for:",
        'docker: Error response from daemon: starting container process caused "exit status 34": unknown',
        "n1:1:1 [0] NCCL INFO MNNVL 1 cliqueId 7ffe cliqueSize 8 cliqueRank 3",
        "n1:1:1 [0] NCCL INFO comm 0x1 rank 1 nRanks 2 nNodes 1 localRanks 2 localRank 1 MNNVL 0",
        "ErrorCode:DCGM_FR_IMEX_UNHEALTHY GPU:0 IMEX daemon status is -3 (not READY)",
        "switch/nvidia_imex: nvidia-caps-imex-channels major device not found, plugin disabled",
        "Domain State: UP",
        "cuMemCreate failed: 2",
        "cuMemImportFromShareableHandle: imported 3 handles",
        "error asserting ComputeDomain Ready: context canceled",
        "computedomain.resource.nvidia.com/ddp created",
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. a variable",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some? Error 999: unknown error",
        "THCudaCheck FAIL file=belt.cpp line=7 error=30 : unknown error",
        "RuntimeError: unable to open shared memory object </torch_9_7> in read-write mode: No such file (2)",
        "a.py:9: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11020).",
        "RuntimeError: [enforce fail at inline_container.cc:337] . unexpected pos 64 vs 0",
        "ERROR: Unexpected segmentation fault encountered in worker.",
        "W0101 07:00:00.1 8 torch/distributed/redirects.py:29] NOTE: Redirects are currently not supported in Windows.",
        "RuntimeError: CUDA error: device-side assert triggered",
        "salloc: error: Job submit/allocate failed: Unspecified error",
        "OOM when allocating tensor with shape[7,30] and type half on /job:w/device:CPU:0 by allocator cpu",
        "wandb: Network error (ConnectTimeout), entering retry loop.",
        "wandb: ERROR Run initialization has timed out after 60.0 sec.",
        "belt: command not found",
        "subprocess.CalledProcessError: Command '['belt']' returned non-zero exit status 127.",
        "AttributeError: 'NoneType' object has no attribute 'decode'",
        "Expected at least one parameter",
    ],
)
def test_a_line_without_a_reason_or_with_a_way_on_claims_no_cause(line: str) -> None:
    found = diagnose([("log", [line, "item 7"])], load_rules()).findings
    assert [one.id for one in found if one.kind == "cause"] == []


_CHECKED = "belt.cu:88: roll: block: [5,0,0], thread: [6,0,0] Assertion `slack < 3` failed."
_ASSERTED = "RuntimeError: CUDA error: device-side assert triggered"
_TOO_OLD = (
    "a.py:9: UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 11020)."
)


@pytest.mark.parametrize(
    ("lines", "ids"),
    [
        ([_TOO_OLD, "item 7"], ["driver-noted"]),
        ([_TOO_OLD, _EPOCH], []),
        ([_TOO_OLD, "RuntimeError: No CUDA GPUs are available"], ["driver-warned", "no-gpu"]),
        # The call order is the reason, not another MPI.
        (
            [
                "*** The MPI_Bcast() function was called after MPI_FINALIZE was invoked.",
                "[n1:7] Local abort after MPI_FINALIZE started completed successfully",
            ],
            ["mpi-order"],
        ),
        (
            ["Attempting to use an MPI routine (internal_Comm_size) before initializing or after finalizing MPICH"],
            ["mpi-order"],
        ),
        # The pipes of multiprocessing lead to no rank, and their ends are no damaged file.
        (["BrokenPipeError: [Errno 32] Broken pipe", "    _error_if_any_worker_fails()"], []),
        (["    reduction.dump(process_obj, to_child)", "BrokenPipeError: [Errno 32] Broken pipe"], []),
        (["[rank1]: BrokenPipeError: [Errno 32] Broken pipe"], ["peer-lost"]),
        (["    self = pickle.load(from_parent)", "EOFError: Ran out of input"], ["child-start"]),
        (["    return pickle.load(file)", "EOFError: Ran out of input"], ["data-damaged"]),
        # A package whose own way of compiling fails is installed in another way.
        (["belt.c:1:9: fatal error: axle.h: No such file or directory", "Successfully installed belt-1.0"], []),
        (
            [
                "RuntimeError: unable to open shared memory object </torch_9_7> in read-write mode: Too many open files (24)"
            ],
            ["open-files"],
        ),
        (['    raise _env_error("WORLD_SIZE")'], ["rank-unset"]),
        (["    def _env_error(var):"], []),
        (["FloatingPointError: Loss became infinite or NaN at iteration=7!"], ["loss-nan"]),
        (['    f"Loss became infinite or NaN at iteration={storage.iter}!"'], []),
        # The line of the kernel tells which check failed; a hung job then reaches its time limit.
        ([_CHECKED, _ASSERTED], ["kernel-assert"]),
        (
            [_ASSERTED, "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***"],
            ["device-assert"],
        ),
        (
            ["FATAL:   container creation failed: open /etc/belt.conf: no such file or directory"],
            ["apptainer-host-file"],
        ),
        (["FATAL:   container creation failed: open /dev/belt: no such file or directory"], ["apptainer-start"]),
        (["KeyError: Caught KeyError in DataLoader worker process 3."], []),
        # Another registry has the image.
        (["unauthorized: Please login to the lab", "Getting image source signatures"], []),
        (["belt: command not found", "prepare.sh: exit code 1"], []),
        (["bash: line 3: belt: command not found", "prepare.sh: exit code 127"], ["command-missing"]),
    ],
)
def test_what_is_alike_is_told_apart(lines: list[str], ids: list[str]) -> None:
    assert told(*lines) == ids


@pytest.mark.parametrize(
    "line",
    [
        "belt.c:1:9: fatal error: axle.h: No such file or directory",
        "belt.cc:1:9: fatal error: 'axle.h' file not found",
        "host_config.h:9:2: error: #error -- unsupported GNU version! gcc versions later than 9 are not supported!",
        "nvcc fatal   : Unsupported gpu architecture 'compute_99'",
    ],
)
def test_a_program_may_do_without_what_did_not_compile(line: str) -> None:
    found = diagnose([("log", [line, *_TRACEBACK])], load_rules())
    assert found.exception[-1].text == _TRACEBACK[-1]
    assert {one.kind for one in found.findings} == {"symptom"}
    for last in ("RuntimeError: Error building extension 'belt'", "torch._inductor.exc.CppCompileError: C++ error"):
        found = diagnose([("log", [line, *_TRACEBACK[:-1], last])], load_rules())
        assert found.verdict == "cause" and found.findings[0].id.startswith("compile-")


def test_a_child_whose_parent_failed_does_not_speak_for_the_program() -> None:
    child = [*_FRAMES[:2], '  File "/usr/lib/python3.11/multiprocessing/spawn.py", line 132, in _main']
    child += ["    self = reduction.pickle.load(from_parent)", "EOFError: Ran out of input"]
    assert exception(_TRACEBACK[0], *child, *_TRACEBACK)[-1] == _TRACEBACK[-1]


def test_a_message_says_what_each_rank_does() -> None:
    log = diagnose(read_logs([str(DATA / "logs/collectives-differ.log")]), load_rules()).findings[0]
    assert "rank 0 is in SequenceNumber=16150, OpType=ALLREDUCE, TensorShape=[497464352], rank 1 in" in log.cause
    assert log.cause.endswith("TensorShape=[344502304]")


def test_a_message_is_not_quoted_from_the_source_that_raises_it() -> None:
    raised = (
        "    raise ValueError('Expected more than 1 value per channel when training, got input size {}'.format(size))"
    )
    message = "ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 8, 1])"
    found = diagnose([("log", [raised, message])], load_rules()).findings
    assert found[0].cause.endswith("torch.Size([1, 8, 1])")


@pytest.mark.parametrize(
    ("indent", "last"),
    [
        ("", "  NotImplementedError"),
        ("", "  KeyError: 'x'"),
        ("    ", "NotImplementedError"),
        ("    ", "     NotImplementedError"),
        ("    ", "KeyError: 'x'"),
        ("\t", "NotImplementedError"),
    ],
)
def test_an_indented_exception_ends_its_traceback(indent: str, last: str) -> None:
    lines = ["Reading belts", *(indent + line for line in (_TRACEBACK[0], *_FRAMES, last)), "", "Done"]
    assert exception(*lines)[-1] == last.strip()
    source = ["    raise (", "        KeyError", "    )"]
    assert exception(_TRACEBACK[0], *_FRAMES[:3], *source, "OSError: no")[-1] == "OSError: no"


def test_a_traceback_may_begin_behind_the_figures_of_a_bar() -> None:
    bar = "Epoch 2:  40%|████      | 16/40 [00:02<00:04,  9.2batch/s, loss=0.35, val_loss=0.42]"
    assert exception(bar + _TRACEBACK[0], *_TRACEBACK[1:]) == [_TRACEBACK[n].strip() for n in (1, 2, 4, 5, -1)]


@pytest.mark.parametrize("refusal", ["/etc/belt.sh: No such file or directory", "belt: command not found"])
def test_a_script_goes_on_after_what_its_shell_does_not_find(refusal: str) -> None:
    line = f"./train.sh: line 6: {refusal}"

    def first(*lines: str) -> list[str]:
        found = diagnose([("log", lines)], load_rules())
        return [found.verdict, *(one.text for one in found.exception)]

    assert first(line, "Error: the belt is loose") == ["program", "Error: the belt is loose"]
    assert first(line, "done") == ["symptom"]
    assert first(line, "srun: error: n1: task 0: Exited with exit code 127") == ["cause"]
    assert first("start", line) == ["cause"]


def test_a_command_that_a_shell_lacks_does_not_explain_a_programs_own_error() -> None:
    lines = ["bash: line 2: module: command not found", "Error: the belt is loose"]
    found = diagnose([("log", lines)], load_rules())
    assert (found.verdict, found.findings[0].id, found.findings[0].kind) == ("program", "module-command", "symptom")
    assert diagnose([("log", lines[:1])], load_rules()).verdict == "cause"


@pytest.mark.parametrize(
    "line",
    [
        "/etc/profile.d/site.sh: line 3: module: command not found",
        "/home/ada/.bashrc: line 20: /opt/conda/bin/activate: No such file or directory",
        "bash: conda: command not found",
        "./train.sh: line 9: ./cleanup.sh: Permission denied",
        "which: no nvcc in (/usr/bin)",
        "mkdir: cannot create directory '/scratch/x': Permission denied",
        "rm: cannot remove '/data/x': Read-only file system",
    ],
)
@pytest.mark.parametrize(
    "cause", ["mpi-slots", "container-workdir", "gpu-ordinal", "nccl-interface", "endpoint-malformed"]
)
def test_a_line_of_a_shell_or_a_small_tool_is_no_cause_beside_a_later_one(line: str, cause: str) -> None:
    later = logs_of(cause)[0].read_text().splitlines()
    found = diagnose([("log", ["start", line, *later])], load_rules()).findings
    assert [one.id for one in found if one.kind == "cause"] == [cause]


def test_a_missing_command_is_the_cause_of_what_needs_it() -> None:
    module, conda = "bash: line 2: module: command not found", "bash: line 2: conda: command not found"
    missing = "ImportError: libbelt.so.3: cannot open shared object file: No such file or directory"
    assert told(module, missing)[0] == "module-command"
    assert told(conda, "train.sh: line 3: torchrun: command not found")[0] == "conda-missing"
    host = 'ValueError: invalid hostname "[2001:db8::1540]"'
    assert told("bash: line 2: scontrol: command not found", host)[0] == "scontrol-in-container"


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "AssertionError: Torch not compiled with CUDA enabled",
        "ImportError: /env/belt.so: undefined symbol: _ZN4belt5slackEv",
        "OSError: /env/libbelt.so: file too short",
        "python: can't open file '/work/check.py': [Errno 2] No such file or directory",
        "FATAL:   could not open image /images/old.sif: failed to retrieve path",
        "nvidia-container-cli: initialization error: nvml error: driver not loaded",
        "OMPI was not built with SLURM's PMI support and therefore cannot execute.",
        "launcher 'pdsh' not installed.",
    ],
)
def test_a_start_that_was_followed_by_training_did_not_fail(line: str) -> None:
    lines = [line, *[_EPOCH] * 3, *_TRACEBACK]
    found = diagnose([("log", lines)], load_rules())
    assert [one.id for one in found.findings if one.kind == "cause"] == []
    assert found.exception[-1].text == _TRACEBACK[-1]


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/a b.txt'", "whether /data/a b.txt is"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a.txt'", "a relative path"),
        ("./run.sh: line 4: data/a.txt: No such file or directory", "a relative path"),
        ("python: can't open file '/work/a.py': [Errno 2] No such file or directory", "look for /work/a.py"),
        ("python: can't open file 'a.py': [Errno 2] No such file or directory", "a relative path"),
    ],
)
def test_only_a_relative_path_is_to_be_made_a_full_one(line: str, advice: str) -> None:
    hint = diagnose([("log", [line])], load_rules()).findings[0].hint
    assert advice in hint
    assert ("relative" in hint) is ("relative" in advice)


def test_an_exception_that_numpy_prints_and_survives_is_not_the_programs() -> None:
    printed = [
        "A module that was compiled using NumPy 1.x cannot be run in",
        "NumPy 2.1.2 as it may crash.",
        "Traceback (most recent call last):",
        '  File "/work/train.py", line 3, in <module>',
        "    import belt",
        "AttributeError: _ARRAY_API not found",
    ]
    assert [one.kind for one in diagnose([("log", printed)], load_rules()).findings] == ["cause"]
    found = diagnose([("log", [*printed, *_TRACEBACK])], load_rules())
    assert found.verdict == "program" and found.exception[-1].text == _TRACEBACK[-1]
    assert [(one.id, one.kind) for one in found.findings] == [("numpy-abi", "symptom")]


def test_a_process_that_ended_itself_for_an_exception_did_not_crash() -> None:
    thrown = ["terminate called after throwing an instance of 'belt::Loose'", "  what():  the belt is loose"]
    assert "worker-crashed" not in told(*thrown, "mpirun noticed that process rank 1 exited on signal 6 (Aborted).")
    assert "worker-crashed" in told("mpirun noticed that process rank 1 exited on signal 6 (Aborted).")


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", "--mem"),
        ("=>> PBS: job killed: mem 9kb exceeded limit 8kb", "--mem"),
        ("Container killed by YARN for exceeding memory limits. 7 GB of 4 GB used", "--mem"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.", "bsub"),
    ],
)
def test_advice_about_memory_is_that_of_the_scheduler(line: str, wrong: str) -> None:
    assert wrong not in diagnose([("log", [line])], load_rules()).findings[0].hint


def test_a_line_is_shown_once_whatever_matches_in_it() -> None:
    long = f"n1:7:9 [0] misc/shmutils.cc:132 NCCL WARN {'x' * 200} Error while creating shared memory segment /dev/shm/nccl-a (size 96), error: No space left on device (28)"
    found = diagnose(
        [("log", ["The node was low on resource: memory. " + "y" * 300 + " Reason: Evicted", long])], load_rules()
    )
    for one in found.findings:
        assert len({row.line for row in one.evidence}) == len(one.evidence)
    message = (
        "Message: The node was low on resource: memory. Threshold quantity: 1, available: 2. "
        + "Container a was using 3Gi, request is 0, " * 6
    )
    evidence = diagnose([("log", [message])], load_rules()).findings[0].evidence
    assert [row.line for row in evidence] == [1]


def test_numbers_of_files_are_no_magic_of_nccls_sockets() -> None:
    log = "n1:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>"
    assert told(log, "ImportError: bad magic number in 'train'") == []
    assert told(log, "n1:1:1 [0] NCCL WARN socketFinalizeAccept: wrong magic 1 != 2")[0] == "bootstrap-magic"


def test_a_step_that_slurm_created_later_was_not_refused() -> None:
    busy = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
    refused = "srun: error: Unable to create step for job 7: Requested nodes are busy"
    assert told(refused)[0] == "step-refused"
    assert "step-refused" not in told(busy, refused, "srun: Step created for StepId=7.1")


def test_a_job_that_went_on_long_after_a_line_did_not_fail_for_it() -> None:
    line = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert told(line, *[_EPOCH] * 12) == []
    assert told(line, *[_EPOCH] * 12, "E failed (exitcode: 1) local_rank: 0", line)[0] == "gpu-memory"


def test_one_cause_is_claimed_and_the_others_are_shown_with_it() -> None:
    lines = ["RuntimeError: NCCL version mismatch with remote peer 3", "OSError: [Errno 28] No space left on device"]
    found = diagnose([("log", lines)], load_rules()).findings
    assert [one.kind for one in found] == ["cause", "symptom"]


def test_the_exception_in_a_group_comes_first() -> None:
    group = [
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "/home/ada/serve.py", line 40, in <module>',
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
        "  +-+---------------- 1 ----------------",
        "    | Traceback (most recent call last):",
        '    |   File "/home/ada/serve.py", line 22, in worker',
        "    | ValueError: shard 3 has no rows",
        "    +------------------------------------",
    ]
    assert exception(*group)[-1] == "| ValueError: shard 3 has no rows"


@pytest.mark.parametrize(
    ("lines", "causes"),
    [
        (["SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)"], ["disk-full"]),
        (
            [
                "prog: No kernel image is available for execution on the device",
                "prog: a.c:9: die: Assertion `0' failed.",
            ],
            [],
        ),
        (
            [
                "srun: error: Munge decode failed: Expired credential",
                "srun: error: slurm_receive_msg: Zero Bytes were transmitted or received",
            ],
            ["slurm-munge"],
        ),
        (["train.sh: line 4: module: command not found", "ImportError: No module named apex"], ["module-command"]),
        (["s1: Job;12.s1;Job deleted at request of eva@login2"], ["pbs-deleted"]),
        (["Job exceeded its walltime limit", "Job deleted at request of eva@login2"], ["time-limit"]),
        (["*** JOB 8 ON n4 CANCELLED AT 2026-01-02T03:04:05 DUE TO JOB REQUEUE ***"], ["requeued"]),
        (
            [
                "srun: error: Unable to confirm allocation for job 7: Unable to contact slurm controller (connect failure)"
            ],
            ["slurm-unreachable"],
        ),
        (["Fatal error in MPI_Init: Other MPI error, error stack:", "MPIDI_OFI_x(7): OFI map of addresses failed"], []),
    ],
)
def test_a_wider_reading_of_a_line_is_no_second_cause(lines: list[str], causes: list[str]) -> None:
    found = diagnose([("log", lines)], load_rules()).findings
    assert [one.id for one in found if one.kind == "cause"] == causes


_HYDRA_ENDED = ["=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES", "=   EXIT CODE: 139"]
_HYDRA_CLEANS_UP = [
    "[proxy:0:1@n2] HYD_pmcd_pmip_control_cmd_cb (pmip_cb.c:8): assert (!closed) failed",
    "[proxy:0:1@n2] HYDT_dmxu_poll_wait_for_event (demux_poll.c:7): callback returned error status",
    "[mpiexec@n1] HYDT_bscu_wait_for_completion (bscu_wait.c:5): one of the processes terminated badly; aborting",
    "[mpiexec@n1] HYD_pmci_wait_for_completion (pmiserv_pmci.c:5): launcher returned error waiting for completion",
]


@pytest.mark.parametrize(
    ("lines", "ids"),
    [
        ([*_HYDRA_ENDED, *_HYDRA_CLEANS_UP], ["worker-crashed", "rank-failed"]),
        ([*_HYDRA_CLEANS_UP, *_HYDRA_ENDED], ["worker-crashed", "rank-failed"]),
        (_HYDRA_CLEANS_UP, []),
        (
            [*_HYDRA_ENDED, "[mpiexec@n1] control_cb (pmiserv_cb.c:2): connection to proxy 1 at host n2 failed"],
            ["worker-crashed", "rank-failed"],
        ),
        (
            ["[mpiexec@n1] control_cb (pmiserv_cb.c:2): connection to proxy 1 at host n2 failed"],
            ["mpi-hydra", "mpi-daemon"],
        ),
        (
            [
                "mpirun noticed that process rank 1 with PID 7 on node n2 exited on signal 11 (Segmentation fault).",
                "[n1:7] [[5,0],0] ORTE_ERROR_LOG: Not found in file orted_submit.c at line 5",
                "ORTE has lost communication with a remote daemon.",
            ],
            ["worker-crashed"],
        ),
        (
            [
                "srun: error: n1: task 0: Exited with exit code 1",
                "ORTE was unable to reliably start one or more daemons.",
            ],
            ["mpi-daemon", "rank-failed"],
        ),
        (
            [
                "srun: error: n2: task 3: Segmentation fault",
                "slurmstepd: error: mpi/pmix_v3: pmixp_p2p_send: n1: cannot send message, exceeded the retry limit",
            ],
            ["worker-crashed"],
        ),
        (
            [
                "ERROR:  One or more process (first noticed rank 1) terminated with signal 11",
                "Error: Remote JSM server is not responding on host b1",
            ],
            [],
        ),
        (
            [
                "Installed CUDA version 11.1 does not match the version torch was compiled with 11.7 but since the APIs"
                " are compatible, accepting this combination"
            ],
            [],
        ),
    ],
)
def test_clean_up_after_another_end_is_no_reason(lines: list[str], ids: list[str]) -> None:
    assert told(*lines) == ids


def test_the_guess_of_ray_is_told() -> None:
    line = "The actor is dead because its worker process has died. The worker may have exceeded K8s pod memory limits."
    (found,) = diagnose([("log", [line])], load_rules()).findings
    assert found.cause == "a process of Ray ended: Ray says that it may have exceeded K8s pod memory limits"


def test_an_error_rate_is_no_line_of_an_error() -> None:
    lines = ["Epoch 3 Top1 error: 98.2500 Top5 error: 91.0000 time: 2.3 s", "error: 7 of 8 shards"]
    assert [one.line for one in diagnose([("log", lines)], load_rules()).last] == [2]


def test_the_relayed_exception_is_shown_with_a_trace_that_was_cut() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "main.py", line 3, in <module>',
        "    ray.get(job)",
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::Actor.step() (pid=7)",
        '  File "actor.py", line 9, in step',
        "    self.update()",
        '  File "actor.py", line 12, in update',
    ]
    words = [one.text for one in diagnose([("log", lines)], load_rules()).exception]
    assert any("RayTaskError(OutOfMemoryError)" in text for text in words)


def test_the_command_shows_the_exception_of_the_program(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("\n".join([*_TRACEBACK, *_TORCHRUN, *_KILLED]))
    done = CliRunner().invoke(diagnose_command, [str(log)])
    assert done.stdout.startswith("No cause is known. The program's own words:\n")
    assert done.stdout.index("x.log:7: ValueError: expected 4D input") < done.stdout.index("1. symptom: ")
    assert "x.log:7: ValueError: expected 4D input" in done.stdout
    made = json.loads(CliRunner().invoke(diagnose_command, [str(log), "--json"]).stdout)
    assert made["exception"][-1]["line"] == 7
