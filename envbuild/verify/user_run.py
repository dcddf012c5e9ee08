"""The user's program in an artifact on simulated nodes of this host, with live output; nothing is judged."""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from envbuild.base.errors import UsageError
from envbuild.environment import Environment
from envbuild.verify.launch import Bench, Outcome, Running, TrainingJob
from envbuild.verify.model import Settings, Subject
from envbuild.verify.network import network_of

_TMP = ".envbuild-run-"
_NAME = "run"
_OF_RANK = re.compile(r"\[\d+\.\d+\]:")
# Those before which torchrun writes the rank; str.splitlines has more, such as U+2028 and the form feed.
_LINE_END = re.compile("\r\n?|\n")
# A run has no time limit of its own.
_ENDLESS_S = 10.0 * 365 * 86400


def run_program_on_nodes(
    subject: Subject,
    program: Sequence[str],
    environment: Environment,
    folder: Path,
    *,
    nodes: int,
    nproc_per_node: int,
    variables: Mapping[str, str],
    echo: Callable[[str], None],
) -> Outcome:
    """Run `program` as every rank, started by torchrun in `folder`, which images show as their work folder.

    It gets `variables`, too. Each line of output is passed to `echo` when it comes, and starts with [NODE.RANK OF THE
    NODE]. Without torch in the artifact, the program starts once on each node. Raises HostError when the artifact
    cannot run here.
    """
    settings = Settings(nodes=nodes, nproc_per_node=nproc_per_node)
    bare = not subject.isolated and not subject.state.has_torch  # the base of an image may have torch
    if bare and nproc_per_node != 1:
        raise UsageError(
            "the artifact has no torch, and so no torchrun: the program starts once on each node",
            "say --nproc-per-node 1",
        )
    job = TrainingJob(_NAME, (), nodes, nproc_per_node, _ENDLESS_S, program=tuple(program), named=True, bare=bare)
    env = environment.variables
    temporary = Path(tempfile.mkdtemp(prefix=_TMP, dir=folder))  # programs in images see no other folder
    try:
        with (
            tempfile.TemporaryDirectory(prefix="run-", dir=env.get("TMPDIR")) as logs,
            subject.nodes(folder, nodes, env) as opened,
        ):
            network = network_of(subject, opened, (nodes, nproc_per_node), env, environment.site.fabric)
            bench = Bench(opened, Path(logs), settings, subject, network, {})
            extra = {"TMPDIR": str(opened.work / temporary.name), **variables}
            with bench.launch(job, extra) as running:
                followed = _Follower(running, echo)
                outcome = running.wait(followed.poll)
                followed.poll(running)
                return outcome
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Follower:
    """The ends of the nodes' logs that were not echoed yet; torchrun's own lines are echoed after a failure alone."""

    def __init__(self, running: Running, echo: Callable[[str], None]) -> None:
        self.echo = echo
        self.read = [0] * len(running.children)
        self.own: list[str] = []

    def poll(self, running: Running) -> None:
        """Echo the whole lines that came since the last call; after the end, all that is left."""
        ended = all(child.poll() is not None for child in running.children)
        for node, start in enumerate(self.read):
            with (running.work / f"{running.job.name}-node{node}.log").open("rb") as stream:
                stream.seek(start)
                new = stream.read()
            whole = new if ended else new[: new.rfind(b"\n") + 1]
            self.read[node] += len(whole)
            lines = _LINE_END.split(whole.decode(errors="replace"))
            for line in lines if lines[-1] else lines[:-1]:
                if running.job.bare:
                    self.echo(f"[{node}]: {line}")
                elif _OF_RANK.match(line):
                    self.echo(line)
                else:
                    self.own.append(line)
        if ended and any(child.returncode for child in running.children):
            for line in self.own:
                self.echo(line)
            self.own.clear()


def exit_code(outcome: Outcome) -> int:
    """Return the exit code of a run: the first failed node's, 128 + N for a node ended by signal N, or 0."""
    failed = next((code for code in outcome.returncodes if code), 0)
    return 128 + signal.Signals(-failed) if failed < 0 else failed
