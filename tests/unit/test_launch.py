"""ddp_train.launch, the part of a job that runs on each node: addresses, the meeting of nodes, and what it starts."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_train.errors import TrainError
from ddp_train.launch import __main__ as program
from ddp_train.launch import nodes
from ddp_train.launch.address import Address, addresses, choose, free_port, read_answer, source_of
from ddp_train.launch.job import Job, Run, read_run, read_variables
from ddp_train.launch.nodes import Row, meet
from ddp_train.launch.strategies import strategy_variables, training
from ddp_train.stage.disk import locked
from envbuild.runtimes.base import word
from examples import examples

ETH0, HSN0, IB0 = Address("eth0", "192.0.2.7"), Address("hsn0", "203.0.113.7"), Address("ib0", "2001:db8:1::7")
FOUND = [
    Address("lo", "127.0.0.1", wide=False),
    Address("docker0", "172.17.0.1"),
    Address("eth0", "2001:db8::7"),
    ETH0,
    HSN0,
    IB0,
    Address("ib0", "fe80::7", wide=False),
]
JOB = Job("pt_cpu", sys.executable, 2, 2, ("-m", "ddp_train", "10", "1"), launcher="srun", number=("SLURM_NODEID",))


def _source(answers: dict[str, str]) -> Callable[[str], str]:
    return lambda target: answers.get(target, "")


# ---- addresses
def test_the_kernel_lists_the_addresses_of_this_host() -> None:
    found = addresses()
    assert Address("lo", "127.0.0.1", wide=False) in found
    assert {one.interface for one in found} <= {name for _, name in socket.if_nameindex()}
    told = source_of("198.51.100.1")
    assert not told or told in [one.text for one in found]


def _message(kind: int, family: int, scope: int, address: bytes) -> bytes:
    attribute = struct.pack("=HH", 4 + len(address), 2) + address
    body = struct.pack("=BBBBI", family, 24, 0, scope, 7) + attribute
    return struct.pack("=IHHII", 16 + len(body), kind, 2, 1, 0) + body + bytes(-len(body) % 4)


def test_messages_of_the_kernel_are_read_to_their_end() -> None:
    end = struct.pack("=IHHII", 20, 3, 2, 1, 0) + bytes(4)
    data = _message(20, socket.AF_INET, 0, bytes([192, 0, 2, 7])) + _message(20, 99, 0, b"?" * 6)
    data += _message(20, socket.AF_INET6, 253, bytes(16)) + _message(20, socket.AF_INET, 0, b"")
    assert list(read_answer(data + end)) == [(7, "192.0.2.7", True), (7, "::", False), None]
    with pytest.raises(OSError, match="does not list"):
        list(read_answer(struct.pack("=IHHIIi", 20, 2, 2, 1, 0, -95)))


@examples(200)
@given(st.integers(0, 60), st.binary(max_size=8))
def test_a_message_that_is_cut_ends_the_reading(size: int, more: bytes) -> None:
    data = _message(20, socket.AF_INET, 0, bytes(4))[:size]
    with suppress(OSError, struct.error):
        assert len(list(read_answer(data + more))) <= 4


@pytest.mark.parametrize(
    ("wanted", "target", "routes", "chosen"),
    [
        ("", "192.0.2.9", {"192.0.2.9": "192.0.2.7"}, ETH0),
        ("", "203.0.113.9", {"203.0.113.9": "203.0.113.7"}, HSN0),
        ("", "", {"198.51.100.1": "203.0.113.7"}, HSN0),
        ("", "127.0.1.1", {"127.0.1.1": "127.0.0.1", "198.51.100.1": "192.0.2.7"}, ETH0),
        ("", "192.0.2.9", {"198.51.100.1": "192.0.2.7"}, ETH0),
        ("", "2001:db8:1::9", {"2001:db8:1::9": "2001:db8:1::7"}, IB0),
        ("", "", {}, ETH0),
        ("hsn0", "192.0.2.9", {"192.0.2.9": "192.0.2.7"}, HSN0),
        ("hsn", "", {}, HSN0),
        ("ib0", "", {}, IB0),
        ("docker0", "", {}, Address("docker0", "172.17.0.1")),
    ],
)
def test_the_address_is_that_of_the_sites_interface_or_of_the_route(
    wanted: str, target: str, routes: dict[str, str], chosen: Address
) -> None:
    assert choose(FOUND, wanted, target, alone=False, source=_source(routes)) == chosen


@pytest.mark.parametrize(
    ("wanted", "routes", "found", "message"),
    [
        ("", {}, FOUND[:2], "reach this node at none of its addresses; set"),
        ("", {"198.51.100.1": "127.0.1.1"}, FOUND, "do not reach this node at 127.0.1.1; set"),
        ("ib7", {}, FOUND, "no interface ib7; available are eth0 hsn0 ib0; change"),
        ("lo", {}, FOUND, "interface lo has no address; change"),
    ],
)
def test_a_node_that_others_cannot_reach_is_refused(
    wanted: str, routes: dict[str, str], found: list[Address], message: str
) -> None:
    with pytest.raises(TrainError) as error:
        choose(found, wanted, "", alone=False, source=_source(routes))
    assert message in error.value.message and "[fabric] interface of the site" in error.value.message


def test_a_node_without_a_network_is_enough_for_a_job_of_one() -> None:
    assert choose(FOUND[:2], "", "", alone=True, source=_source({})) == Address("lo", "127.0.0.1")


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_taken_port_is_left_to_its_owner(family: socket.AddressFamily) -> None:
    with socket.socket(family) as taken:
        taken.bind(("127.0.0.1" if family == socket.AF_INET else "::1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        other = free_port(port)
        assert other != port and 20000 <= other < 30000
        with socket.create_server(("", other)):
            pass


# ---- the settings
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="".join(map(chr, range(32))) + "\x7f"))
VALUES = st.one_of(TEXT, st.sampled_from(["a\nb", "\n", "\t", "'", "\\", "$(id)", "#x", "a=b", "export", "set -- x"]))


@examples(60)
@given(st.lists(st.tuples(st.sampled_from(["A", "B_1", "export_", "C"]), VALUES), max_size=6))
def test_python_reads_the_variables_that_a_shell_does(pairs: list[tuple[str, str]]) -> None:
    text = "".join(f"# it's a comment\nexport {name}={word(value)}\n" for name, value in pairs)
    assert read_variables(text) == pairs
    if pairs:
        name, value = pairs[-1]
        done = subprocess.run(["sh", "-c", f'{text}printf %s. "${name}"'], stdout=subprocess.PIPE)
        assert done.stdout.decode() == f"{value}."


def _run(folder: Path, job: Job = JOB, restarts: str = "0") -> Run:
    folder.mkdir(exist_ok=True)
    return Run(job, folder, restarts)


def _write(folder: Path, variables: str = "", **fields: Any) -> Path:
    """Write the settings of a job, as its script does."""
    job = {"name": "pt_cpu", "python": sys.executable, "nodes": 1, "nproc_per_node": 1, "strategy": "single", **fields}
    folder.mkdir(exist_ok=True)
    path = folder / "settings-0.sh"
    path.write_text(f"# What\n{variables}ENVBUILD_JOB={word(json.dumps(job))}\n")
    return path


def test_a_start_has_a_name_and_files_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "pt_cpu_12_3_.head").mkdir()
    run = replace(_run(tmp_path / "pt_cpu_12_3_.head"), restarts="4")
    assert run.id == "pt_cpu-12_3_.head-4" and run.first_port == 20000 + (12 + 3 * 7919) % 10000
    assert run.file("at.7").name == "at-4.7" and run.file("told").name == "told-4"


def test_the_elements_of_an_array_of_pbs_that_start_together_on_one_node_do_not_take_one_port(tmp_path: Path) -> None:
    numbers = ["12.head", "13.head", *(f"12_{element}_.head" for element in range(1, 1000))]
    ports = set()
    for number in numbers:
        _write(tmp_path / f"pt_cpu_{number}")
        ports.add(read_run(tmp_path / f"pt_cpu_{number}" / "settings-0.sh").first_port)
    assert len(ports) == len(numbers) and min(ports) >= 20000 and max(ports) < 30000


@pytest.mark.parametrize("text", ["", "ENVBUILD_JOB='{}'", "ENVBUILD_JOB='['", """ENVBUILD_JOB='{"newer": 1}'"""])
def test_settings_of_another_version_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings-0.sh"
    path.write_text(text)
    with pytest.raises(TrainError, match="does not fit this ddp_train"):
        read_run(path)


def test_a_folder_that_this_node_does_not_see_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ddp_train.launch.job._LATE_S", 0)
    assert program.main(["training", str(tmp_path / "gone/settings-0.sh")]) == 5
    assert "it must be on a file system that all nodes see" in capsys.readouterr().err


# ---- the meeting
@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "addresses", lambda: FOUND)
    monkeypatch.setattr(nodes, "choose", lambda found, wanted, target, *, alone: ETH0)


def test_nodes_wait_for_each_other_and_are_called_as_the_scheduler_does(
    tmp_path: Path, network: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path / "pt_cpu_77")
    run.file("hosts").write_text("192.0.2.8\nn0.example.org\nn1.example.org\n")
    names = threading.local()
    monkeypatch.setattr(nodes, "this_host", lambda: names.name)
    found: dict[int, list[Row]] = {}

    def node(number: int) -> None:
        names.name = f"n{number}"
        found[number] = meet(run, number)

    threads = [threading.Thread(target=node, args=(number,)) for number in (1, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    for thread in threads:
        thread.join(20)
    assert found[0] == found[1]
    assert [one.name for one in found[0]] == ["n0.example.org", "n1.example.org"]
    assert 20077 <= found[0][0].port < 30000 and found[0][1].port == 0
    assert "node 1 is n1.example.org, 192.0.2.7 on eth0" in capfd.readouterr().out


def test_a_node_that_does_not_come_is_named(tmp_path: Path, network: None) -> None:
    run = _run(tmp_path / "pt_cpu_77", replace(JOB, join_timeout_s=0))
    with pytest.raises(TrainError, match=r"node 1 wrote nothing to .*pt_cpu_77 within 0 s"):
        meet(run, 0)


def test_nobody_waits_for_a_node_without_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run(tmp_path / "pt_cpu_77", replace(JOB, interface="ib7", join_timeout_s=1))
    run.file("at.0").write_text("n0 192.0.2.7 eth0 20077\n")
    monkeypatch.setattr(nodes, "this_host", lambda: "n1")
    with pytest.raises(TrainError) as caught:
        meet(run, 1)
    for number in range(2):
        with pytest.raises(TrainError, match="node 1 cannot take part: n1: ") as told:
            meet(run, number)
        assert caught.value.message in told.value.message


def test_two_processes_on_one_node_are_noticed(tmp_path: Path) -> None:
    run = _run(tmp_path / "pt_cpu_77")
    for number in range(2):
        run.file(f"at.{number}").write_text("n0 192.0.2.7 eth0 20077\n")
    with pytest.raises(TrainError, match="srun started two processes on node n0 and none on another"):
        meet(run, 0)


@pytest.mark.parametrize(
    ("value", "message"), [(None, "does not give"), ("x", "does not give"), ("2", "number 2, but")]
)
def test_a_number_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None, message: str
) -> None:
    monkeypatch.delenv("SLURM_NODEID", raising=False)
    if value:
        monkeypatch.setenv("SLURM_NODEID", value)
    with pytest.raises(TrainError, match=message):
        program._number(_run(tmp_path), "", "training")


@pytest.mark.parametrize(("step", "number"), [("training", (1, 1)), ("preflight", (3, 0))])
def test_ranks_of_horovod_share_the_number_of_their_node(tmp_path: Path, step: str, number: tuple[int, int]) -> None:
    run = _run(tmp_path, replace(JOB, strategy="horovod", nodes=4))
    assert program._number(run, "3", step) == number


# ---- the training
ROWS = [Row("n0", "192.0.2.7", "eth0", 20077), Row("n1", "192.0.2.8", "eth0")]


def _option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_torchrun_meets_at_the_first_node(tmp_path: Path) -> None:
    run = _run(tmp_path / "pt_cpu_77", replace(JOB, run_files={"--report": "a$b.json"}))
    for number, row in enumerate(ROWS):
        words = training(run, ROWS, row, number)
        assert _option(words, "--rdzv-endpoint") == "192.0.2.7:20077"
        assert _option(words, "--rdzv-conf") == f"is_host={int(number == 0)},join_timeout=900,read_timeout=300"
        assert _option(words, "--local-addr") == row.address
        assert _option(words, "--report").endswith("/a$$b.json")  # torchrun expands $
    six = [replace(ROWS[0], address="2001:db8::7"), ROWS[1]]
    assert _option(training(run, six, six[1], 1), "--rdzv-endpoint") == "[2001:db8::7]:20077"


def test_with_etcd_no_node_is_the_host(tmp_path: Path) -> None:
    words = training(_run(tmp_path / "r", replace(JOB, endpoint="etcd:2379")), ROWS, ROWS[0], 0)
    assert _option(words, "--rdzv-backend") == "etcd-v2" and _option(words, "--rdzv-endpoint") == "etcd:2379"
    assert _option(words, "--rdzv-conf") == "timeout=900"


def test_the_head_stays_the_host_where_a_replacement_is_the_first_in_the_table(tmp_path: Path) -> None:
    run = _run(tmp_path / "r", replace(JOB, auto_resume=True))
    hosts = [
        _option(training(run, ROWS, here, number), "--rdzv-conf")[:9]
        for number, here in enumerate([Row("new", "192.0.2.9", "eth0"), ROWS[0]])
    ]
    assert hosts == ["is_host=0", "is_host=1"]


@pytest.mark.parametrize(("cpus", "threads"), [(24, "12"), (3, "1"), (1, "1")])
def test_threads_are_counted_on_the_node_where_the_site_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, threads: str
) -> None:
    monkeypatch.setattr(program, "cpus", lambda: cpus)
    environ = {"OMP_NUM_THREADS": "7", "OMP_THREAD_LIMIT": "9", "PYTHONPATH": "/login", "RANK": "0"}
    found = program.variables(_run(tmp_path / "r"), ROWS, ROWS[1], 1, environ)
    assert (found["OMP_NUM_THREADS"], found["OMP_THREAD_LIMIT"]) == (threads, "9")
    assert not {"PYTHONPATH", "RANK", "NCCL_SOCKET_IFNAME"} & set(found)
    said = replace(JOB, variables={"OMP_NUM_THREADS": "5"}, gpu=True)
    found = program.variables(_run(tmp_path / "r", said), ROWS, ROWS[1], 1, environ)
    assert (found["OMP_NUM_THREADS"], found["NCCL_SOCKET_IFNAME"]) == ("5", "eth0")


def test_a_job_takes_settings_of_python_from_its_site_and_few_from_who_submits_it(tmp_path: Path) -> None:
    environ = {"PYTHONINSPECT": "1", "PYTHONPYCACHEPREFIX": "/tmp/x", "PYTHONSTARTUP": "x", "PYTHONUTF8": "1"}
    found = program.variables(_run(tmp_path / "r"), ROWS, ROWS[1], 1, environ)
    ours = {"PYTHONUTF8", "PYTHONUNBUFFERED", "PYTHONNOUSERSITE"}
    assert {name for name in found if name.startswith("PYTHON")} == ours
    said = replace(JOB, variables={"PYTHONPYCACHEPREFIX": "/local/pycache"})  # [environment] of the site
    found = program.variables(_run(tmp_path / "r", said), ROWS, ROWS[1], 1, environ)
    assert found["PYTHONPYCACHEPREFIX"] == "/local/pycache"


def test_accelerate_meets_at_the_first_node_too(tmp_path: Path) -> None:
    run = _run(tmp_path / "pt_cpu_77", replace(JOB, strategy="accelerate", run_files={"--report": "a$b.json"}))
    six = [replace(row, address=f"2001:db8::{number}") for number, row in enumerate(ROWS)]
    for number, row in enumerate(six):
        words = training(run, six, row, number)
        assert words[:3] == ["-m", "accelerate.commands.launch", "--multi_gpu"]
        found = dict(pairwise(words))
        assert found["--num_machines"] == "2" and found["--num_processes"] == "4"
        assert found["--machine_rank"] == str(number)
        assert (found["--main_process_ip"], found["--main_process_port"]) == ("[2001:db8::0]", "20077")
        assert found["--rdzv_conf"] == f"is_host={int(number == 0)},join_timeout=900,read_timeout=300"
        assert words[-6:-1] == ["--module", "ddp_train", "10", "1", "--report"] and words[-1].endswith("/a$$b.json")
        assert strategy_variables(run, six, row, number, 0) == {
            "PET_RDZV_ID": "pt_cpu-77-0",
            "PET_RDZV_ENDPOINT": "[2001:db8::0]:20077",
            "PET_LOCAL_ADDR": row.address,
        }


@pytest.mark.parametrize(
    ("gpu", "visible", "devices"),
    [
        (True, "4,GPU-7f,6", ["4", "GPU-7f"]),
        (True, "", [0, 1]),
        (True, "4", [0, 1]),
        (True, None, [0, 1]),
        (False, "4,5", [0, 1]),
    ],
)
def test_deepspeed_is_told_all_ranks_and_the_devices_of_its_own_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, visible: str | None, devices: list[int | str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run = _run(tmp_path / "pt_cpu_77", replace(JOB, strategy="deepspeed", gpu=gpu, command=("t.py", "$x")))
    words = training(run, ROWS, ROWS[1], 1)
    world = json.loads(base64.urlsafe_b64decode(_option(words, "--world_info")))
    assert world == {"192.0.2.7": [0, 1], "192.0.2.8": devices}
    assert list(world) == ["192.0.2.7", "192.0.2.8"]  # ranks are counted in this order
    assert _option(words, "--node_rank") == "1"
    assert (_option(words, "--master_addr"), _option(words, "--master_port")) == ("192.0.2.7", "20077")
    assert words[-2:] == ["t.py", "$x"] and "--no_local_rank" not in words
    assert strategy_variables(run, ROWS, ROWS[1], 1, 0) == {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


def test_deepspeed_gives_the_bundled_trainer_no_option_that_it_lacks(tmp_path: Path) -> None:
    words = training(_run(tmp_path / "r", replace(JOB, strategy="deepspeed")), ROWS, ROWS[0], 0)
    assert words[-5:] == ["--no_local_rank", "--module", "ddp_train", "10", "1"]


# ---- the environment
_SHOW = '#!/bin/sh\necho "$CONDA_PREFIX|$VIRTUAL_ENV|$FROM_PACKAGE|$(command -v tool)|$#|$2"\n'


def _show(kind: str, folder: Path) -> list[str]:
    """What an interpreter sees that ddp_train.launch starts in the environment `folder`."""
    for name, text in (("python", _SHOW), ("tool", "#!/bin/sh\n")):
        file = folder / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    path = _write(
        folder.parent / "run",
        python=str(folder / "bin/python"),
        command=["train.py", "a $b"],
        environment=str(folder),
        conda=kind == "conda",
    )
    done = _launch(path, "training", "0", PATH="/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split("|")


def _launch(path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    step, *rest = arguments
    command = [sys.executable, "-I", "-X", "utf8", "-m", "ddp_train.launch", step, str(path), *rest]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_a_conda_environments_activation_scripts_are_run_by_bash(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    scripts = folder / "etc/conda/activate.d"
    scripts.mkdir(parents=True)
    (scripts / "a.sh").write_text("echo noise; [[ -n $CONDA_PREFIX ]] && export FROM_PACKAGE=first")
    (scripts / "b.sh").write_text('export FROM_PACKAGE="$FROM_PACKAGE+$unset_variable"; false')
    assert _show("conda", folder) == [str(folder), "", "first+", str(folder / "bin/tool"), "2", "a $b"]


def test_without_scripts_the_prefix_and_path_are_set(tmp_path: Path) -> None:
    folder = tmp_path / "it's"
    assert _show("conda", folder) == [str(folder), "", "", str(folder / "bin/tool"), "2", "a $b"]


def test_a_venv_is_first_on_the_path_of_what_a_job_starts(tmp_path: Path) -> None:
    folder = tmp_path / "venv"
    assert _show("venv", folder) == ["", str(folder), "", str(folder / "bin/tool"), "2", "a $b"]


def test_a_training_runs_in_the_working_folder_with_the_libraries_of_the_job_first(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "run",
        "export GIVEN='a b'\n",
        python="/bin/sh",
        library_path="/opt/cray",
        command=["-c", 'pwd; echo "$GIVEN|$LD_LIBRARY_PATH|$ENVBUILD_RUN|$PYTHONPATH"; exit 9'],
    )
    done = _launch(path, "training", "0", PATH="/usr/bin:/bin", LD_LIBRARY_PATH="/lib/x", PYTHONPATH="/login")
    assert done.returncode == 9
    assert done.stdout.splitlines()[-2:] == [str(tmp_path), f"a b|/opt/cray:/lib/x|{tmp_path}/run|"]


# ---- the end
_TRAINING = """\
exec 2>>"$ENVBUILD_RUN/err"
trap 'told=yes; echo told >>"$ENVBUILD_RUN/log"' TERM
told=
echo begun >>"$ENVBUILD_RUN/log"
while [ -z "$told" ]; do sleep 0.1; done
sleep 0.5
exit 7
"""


def _start(run: Path, *, exit_codes: bool) -> subprocess.Popen[bytes]:
    """Start a training under a launcher that signals all processes; what holds its image ends at SIGTERM."""
    command = ["-c", _TRAINING]
    path = _write(run, python="/bin/sh", command=command, signalled=True, exit_codes=exit_codes)
    line = [sys.executable, "-I", "-m", "ddp_train.launch", "training", str(path), "0"]
    return subprocess.Popen(line, env={"PATH": os.environ["PATH"]}, start_new_session=True)


def _until(path: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, "the training did not begin"
        time.sleep(0.02)


@pytest.mark.parametrize(("exit_codes", "code", "left"), [(True, 0, "7\n"), (False, 7, None)])
def test_a_step_that_is_told_twice_tells_the_training_once(
    tmp_path: Path, exit_codes: bool, code: int, left: str | None
) -> None:
    node = _start(tmp_path, exit_codes=exit_codes)
    _until(tmp_path / "log", "begun")
    for _ in range(2):  # as Slurm does: every process
        os.killpg(node.pid, signal.SIGURG)
        time.sleep(0.2)
    assert node.wait(20) == code
    assert (tmp_path / "log").read_text() == "begun\ntold\n"
    ended = tmp_path / "ended-0.0"
    assert (ended.read_text() if ended.exists() else None) == left


def test_a_node_whose_container_starts_after_the_signal_ends_too(tmp_path: Path) -> None:
    (tmp_path / "told-0").touch()
    assert _start(tmp_path, exit_codes=True).wait(20) == 0
    assert (tmp_path / "ended-0.0").read_text().strip() in ("7", "143")  # before or after its trap


def test_the_schedulers_own_sigterm_reaches_the_training_by_itself(tmp_path: Path) -> None:
    node = _start(tmp_path, exit_codes=True)
    _until(tmp_path / "log", "begun")
    time.sleep(0.5)  # the training may begin before its launcher knows its process
    os.killpg(node.pid, signal.SIGTERM)
    assert node.wait(20) == 0
    assert (tmp_path / "log").read_text() == "begun\ntold\n"
    assert (tmp_path / "ended-0.0").read_text() == "7\n"


@pytest.mark.parametrize("own", ["", "/site/cache"])
def test_what_torch_compiles_is_on_the_nodes_disk_and_goes_with_the_training(tmp_path: Path, own: str) -> None:
    seen, disk = tmp_path / "seen", tmp_path / "disk"
    disk.mkdir()
    show = 'touch "$TORCHINDUCTOR_CACHE_DIR/kernel"; echo "$TORCHINDUCTOR_CACHE_DIR $PWD"; pwd -P'
    variables = f"export TMPDIR={disk}\n" + (f"export TORCHINDUCTOR_CACHE_DIR={own}\n" if own else "")
    path = _write(tmp_path / "run", variables, python="/bin/sh", command=["-c", f"({show}) >{seen}"], signalled=True)
    done = _launch(path, "training", "0", PWD="/of/the/host")
    assert done.returncode == 0, done.stderr
    (cache, folder), (real,) = (line.split() for line in seen.read_text().splitlines())
    assert cache == own if own else cache.startswith(f"{disk}/envbuild-")
    assert folder == real == str(tmp_path)
    assert list(disk.iterdir()) == []


def test_the_first_node_that_fails_leaves_its_exit_code_and_one_that_was_told_to_end_does_not(tmp_path: Path) -> None:
    first = tmp_path / "failed-0"
    told = _start(tmp_path, exit_codes=True)
    _until(tmp_path / "log", "begun")
    os.killpg(told.pid, signal.SIGTERM)
    assert told.wait(20) == 0 and not first.exists()
    for code in (9, 7):
        path = _write(tmp_path, python="/bin/sh", command=["-c", f"exit {code}"], signalled=True)
        assert _launch(path, "training", "0").returncode == code
    assert first.read_text() == "9\n"


def test_a_node_that_cannot_take_part_leaves_its_exit_code(tmp_path: Path) -> None:
    path = _write(tmp_path, command=["true"])
    assert _launch(path, "training", "9").returncode == 5
    assert (tmp_path / "failed-0").read_text() == "5\n"


def test_a_training_gets_the_sigterm_that_was_ignored_where_the_container_started(tmp_path: Path) -> None:
    """enroot and its file server ignore it, and the training must save its state."""
    command = ["-c", _TRAINING]
    for signalled, code in ((True, 0), (False, 7)):
        path = _write(tmp_path, python="/bin/sh", command=command, signalled=signalled, exit_codes=signalled)
        line = ["sh", "-c", f"trap '' TERM; exec {sys.executable} -I -m ddp_train.launch training {path} 0"]
        with subprocess.Popen(line, env={"PATH": os.environ["PATH"]}, start_new_session=True) as node:
            try:
                _until(tmp_path / "log", "begun")
                os.killpg(node.pid, signal.SIGTERM)
                assert node.wait(20) == code
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)
        # The signal to the group and the launcher's own reach the training together or one after the other.
        assert set((tmp_path / "log").read_text().split()) == {"begun", "told"}
        (tmp_path / "log").unlink()


# ---- environments on the node's own disk
def test_a_job_runs_in_the_nodes_own_copy_of_its_environment_which_stays_until_its_end(tmp_path: Path) -> None:
    tree, copy = tmp_path / "0123.tree", tmp_path / "pt_cpu_7-0"
    tree.mkdir()
    copy.symlink_to(tree)
    variables = {"NCCL_NET_PLUGIN": "/fsx/env/lib/p.so", "OTHER": "/fsx/environment:/fsx/env:/data/fsx/env/x"}
    job = replace(JOB, python="/fsx/env/bin/python", environment="/fsx/env", library_path="/fsx/env/lib:/opt/lib")
    run = Run(replace(job, variables=variables), tmp_path / "pt_cpu_7", "0")
    child = (
        "import sys, pathlib, ddp_train.launch.__main__ as program; from ddp_train.launch.job import *\n"
        "job = Job('pt_cpu', '/fsx/env/bin/python', 2, 2, environment='/fsx/env')\n"
        "program._staged(Run(job, pathlib.Path('/'), '0'), sys.argv[1])\n"
        "program.os.execvp('sh', ['sh', '-c', 'echo; read x'])"
    )
    line = [sys.executable, "-c", child, copy]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        handle = os.open(tree, os.O_RDONLY)
        assert not locked(handle)
        process.communicate(b"\n")
        assert locked(handle)
        os.close(handle)
    staged = program._staged(run, str(copy)).job
    assert (staged.python, staged.environment) == (f"{copy}/bin/python", str(copy))
    assert staged.library_path == f"{copy}/lib:/opt/lib"
    assert staged.variables == {
        "NCCL_NET_PLUGIN": f"{copy}/lib/p.so",
        "OTHER": f"/fsx/environment:{copy}:/data/fsx/env/x",
    }
    assert program._staged(run, "/fsx/env") == run, "this node reads the shared one"
