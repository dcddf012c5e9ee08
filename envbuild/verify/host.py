"""Simulated nodes for an environment in a folder: processes of this host that communicate over loopback."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from envbuild.base import host, process
from envbuild.base.elf import MACHINES
from envbuild.base.errors import HostError
from envbuild.contract.installed import FileReport, ReadFiles
from envbuild.contract.kinds import FolderPrograms
from envbuild.contract.manifest import FILE as MANIFEST
from envbuild.contract.manifest import Stat, check, read_manifest, scan, seal, sealed
from envbuild.contract.receipt import manifest_of
from envbuild.contract.state import State, site_packages
from envbuild.environment import Environment
from envbuild.pythons import keep_python
from envbuild.recipe.targets import Target, check_host
from envbuild.verify.model import Subject, out_of_time
from envbuild.verify.processes import find_rank
from envbuild.verify.survey import Survey, survey

_ADDRESS = "127.0.0.1"
# Below Linux's default ip_local_port_range.
_PORTS = range(15000, 20000)
# If envbuild itself runs in a job (a Slurm step, another torchrun), these would make the ranks join that job.
_JOB = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_WORLD_SIZE")
_JOB_PREFIXES = ("PET_", "TORCHELASTIC_")
# (program, arguments, the job's variables) → the command to start on this host, and its complete environment
Launch = Callable[[str, Sequence[str], Mapping[str, str]], tuple[list[str], Mapping[str, str]]]


@dataclass(frozen=True, slots=True)
class HostNodes:
    """Nodes whose programs `launch` starts; `folder` is the work folder on this host, `work` its path for programs."""

    folder: Path
    launch: Launch
    work: PurePath
    interface: str = "lo"

    def address(self, node: int) -> str:
        return _ADDRESS

    def free_port(self) -> int:
        # torchrun listens only after it has imported torch. Until then, the kernel could give an ephemeral port
        # to a connection, so the port is taken from below that range.
        for port in random.sample(_PORTS, len(_PORTS)):
            with socket.socket() as probe, suppress(OSError):
                probe.bind((_ADDRESS, port))
                return port
        raise HostError(
            f"no TCP port of {_ADDRESS} from {_PORTS[0]} to {_PORTS[-1]} is free",
            "stop the processes that listen on them: `ss -tlnp` lists them",
        )

    def share(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            place = self.folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)

    def start(
        self, node: int, program: str, arguments: Sequence[str], extra: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        command, variables = self.launch(program, arguments, extra)
        with log.open("wb") as stream:
            output = stream.fileno()
            # SIGTERM when this process dies: torchrun passes it on to the ranks before it exits.
            return process.start(
                command, env=variables, cwd=self.folder, stdout=output, stderr=output, death_signal=signal.SIGTERM
            )

    def stop(self, agents: Sequence[Any]) -> None:
        process.stop(agents)

    def collect(self, into: Path) -> None:
        """Return at once: `into` is the work folder itself."""

    def kill_rank(self, run_id: str, rank: int) -> int | None:
        pid = find_rank(run_id, rank)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid


@contextmanager
def host_nodes(
    work: Path, command: Callable[[str, Sequence[str]], list[str]], variables: Mapping[str, str]
) -> Iterator[HostNodes]:
    """Yield nodes that run `command(program, arguments)` with `variables`, without those of an enclosing job."""
    own = {key: value for key, value in variables.items() if key not in _JOB and not key.startswith(_JOB_PREFIXES)}
    yield HostNodes(work, lambda program, arguments, extra: (command(program, arguments), {**own, **extra}), work)


def folder_subject(
    path: Path, state: State, kind: FolderPrograms, environment: Environment, *, fresh: bool = False
) -> Subject:
    """Return the subject for the environment of `kind` in `path`. Raises HostError when it cannot run on this host.

    Its files are compared with the manifest that the receipt beside it names; the files of a `fresh` environment were
    read when it was built. Raises VerificationError when the receipt is for another environment.
    """
    target = Target.parse(state.target)
    check_host(kind.TITLE, target)
    if not fresh:  # it may have been moved
        keep_python(state.python_build, path, environment.store)
    manifest, expected = read_manifest(path), "" if fresh else manifest_of(path, state.digest)
    store, workers = environment.store, host.workers(environment.variables)
    # Before a program of the environment runs: what comes later is compared by the next command, before it is used.
    stats = scan(path)
    good: dict[str, Stat] = {}
    heads: dict[str, bytes] = {}

    def surveyed(timeout_s: float) -> Survey:
        known = None
        if manifest is not None:
            read = sealed(path, manifest, store) or {}
            if not fresh:  # everything that the manifest lists is read
                read = {name: info for name, info in read.items() if name not in manifest.rows}
            try:
                known, intact = check(path, manifest, stats, read, state.interpreter, workers, store, timeout_s, heads)
            except TimeoutError as error:
                raise out_of_time(str(path), timeout_s) from error
            good.update(intact)
            if expected not in ("", manifest.digest):
                known.altered.append(f"{MANIFEST} (the receipt is of another build)")
        elif expected:
            known = FileReport(missing=[MANIFEST])
        files, gpu = ReadFiles(heads), target.family.gpu
        return survey(path, site_packages(path, state.python), MACHINES[target.arch], known, files, gpu=gpu)

    def accept() -> None:
        if manifest is not None:
            seal(path, manifest, good, store)  # bytecode that came since then is compared when it is used

    return Subject(
        path,
        state,
        target,
        state.digest,
        "host",
        survey=surveyed,
        nodes=lambda work, _, env: host_nodes(
            work, lambda program, arguments: kind.command(path, program, *arguments), kind.launch_environment(path, env)
        ),
        manifest=expected or (manifest.digest if manifest else ""),
        accept=accept,
    )
