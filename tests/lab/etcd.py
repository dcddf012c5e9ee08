"""A real etcd with its old v2 interface, which torch's etcd rendezvous speaks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lab.slurm import Cluster

START_SECONDS = 20


def missing() -> str | None:
    """Why etcd cannot be had here; None when it can."""
    return None if shutil.which("etcd") else "not installed: etcd (Debian: etcd-server)"


@contextmanager
def etcd(
    folder: Path,
    address: str = "127.0.0.1",
    *,
    port: int = 2379,
    peer_port: int = 2380,
    cluster: Cluster | None = None,
    on: str = "ctl",
) -> Iterator[str]:
    """Run etcd with its data in `folder`, on this host or on a host of `cluster`; its URL.

    Raises RuntimeError with the log's end when it does not come up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    url, peer = f"http://{address}:{port}", f"http://{address}:{peer_port}"
    command = ["etcd", "--enable-v2=true", "--data-dir", str(folder / "data")]
    command += ["--listen-client-urls", url, "--advertise-client-urls", url]
    command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    command += ["--initial-cluster", f"default={peer}"]
    log = folder / "etcd.log"
    with log.open("w") as output:
        process = _start(command, cluster, on, output.fileno())
    try:
        probe = ["bash", "-c", f"exec 3<>/dev/tcp/{address}/{port}"]
        deadline = time.monotonic() + START_SECONDS
        while _start(probe, cluster, on, subprocess.DEVNULL).wait() != 0:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"etcd did not come up:\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        yield url
    finally:
        # nsenter is only the parent; its group holds both.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _start(command: list[str], cluster: Cluster | None, on: str, output: int) -> subprocess.Popen[str]:
    if cluster is not None:
        return cluster.popen(command, on=on, stdout=output, stderr=output)
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, text=True, start_new_session=True
    )
