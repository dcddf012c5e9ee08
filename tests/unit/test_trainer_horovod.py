"""--strategy horovod without Horovod: its messages, and the server at which ranks meet."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
from ddp_train.__main__ import main
from ddp_train.args import parse_arguments
from ddp_train.errors import TrainError
from ddp_train.horovod_backend import connect_horovod
from ddp_train.horovod_rendezvous import Rendezvous, meet


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _job(rank: int, port: int) -> dict[str, str]:
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "ENVBUILD_PORT": str(port),
        "HOROVOD_RANK": str(rank),
    }


def test_ddp_is_the_default_and_horovod_is_not_imported_for_it() -> None:
    assert parse_arguments(["1", "1"]).strategy == "ddp"
    assert parse_arguments(["1", "1", "--strategy", "horovod"]).strategy == "horovod"
    check = "import sys, ddp_train.loop; sys.exit(any('horovod' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


@pytest.mark.parametrize(
    ("variables", "code", "said"),
    [
        ({}, 1, "horovod.torch cannot be imported by"),
        ({"TORCHELASTIC_RUN_ID": "1"}, 2, "torchrun does not start Horovod's ranks"),
    ],
)
def test_what_is_missing_is_one_line(
    variables: dict[str, str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddp_train.__main__.die_with_parent", lambda _: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["1", "1", "--strategy", "horovod"]) == code
    said_all = capsys.readouterr().err.splitlines()
    assert len(said_all) == 1 and said in said_all[0]


@pytest.mark.parametrize(("given", "used"), [(None, "300"), ("45", "45")])
def test_gloo_waits_as_long_for_late_ranks_as_the_meeting_does(
    given: str | None, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own 30 s end in an abort, for which there is no except."""
    seen: list[str | None] = []

    def init() -> None:
        seen.append(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS"))
        raise ValueError("no peers")

    monkeypatch.delenv("HOROVOD_GLOO_TIMEOUT_SECONDS", raising=False)
    if given:
        monkeypatch.setenv("HOROVOD_GLOO_TIMEOUT_SECONDS", given)
    hvd = SimpleNamespace(init=init, mpi_built=lambda: False)
    monkeypatch.setattr("ddp_train.horovod_backend._horovod", lambda: hvd)
    with pytest.raises(TrainError, match="cannot join Horovod's job: no peers"):
        connect_horovod({}, "here", "gloo")
    assert seen == [used]


def test_ranks_meet_at_rank_0_which_may_come_last() -> None:
    port = _free_port()
    arrived: list[object] = []
    other = threading.Thread(target=lambda: arrived.append(meet(_job(1, port))))
    other.start()
    time.sleep(0.5)
    assert not arrived
    server = meet(_job(0, port))
    assert isinstance(server, Rendezvous)
    other.join(10)
    assert arrived == [None]
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    answers = []
    for method, path, body in (
        ("GET", "/global/1", None),
        ("PUT", "/global/1", b"\x00address"),
        ("GET", "/global/1", None),
        ("GET", "/local_n1/1", None),
        ("DELETE", "/global/1", None),
    ):
        asked.request(method, path, body)
        answer = asked.getresponse()
        answers.append((answer.status, answer.read()))
        if answer.will_close:
            asked.close()
    assert answers == [(404, b""), (200, b""), (200, b"\x00address"), (404, b""), (200, b"")]
    with pytest.raises(TrainError, match=f"rank 0 cannot listen at 127.0.0.1:{port}: Address alre"):
        meet(_job(0, port))
    server.shutdown()
    server.server_close()


def test_nobody_waits_for_ever_and_horovodrun_runs_a_server_of_its_own() -> None:
    port = _free_port()
    with pytest.raises(TrainError, match=f"rank 0 does not answer at 127.0.0.1:{port}: Conn"):
        meet(_job(1, port), patience_s=0.3)
    theirs = {**_job(0, port), "ENVBUILD_PORT": str(port + 1)}
    assert meet(theirs) is None and meet({}) is None
