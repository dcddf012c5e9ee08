"""Jobs of `envbuild job` on the lab's cluster: rendered and submitted as users do it, on the host where they log in."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from lab.slurm import Cluster, JobEnd

from envbuild.base.libraries import inventory

EPOCHS = ("2", "1")
_COMMAND = """\
#!{python}
from envbuild.cli import main
main()
"""


# An image has its own C library.
_OF_IMAGES = r"(lib(c|m|dl|rt|pthread|z|gcc_s|stdc\+\+)|ld-linux\S*)\.so"


@dataclass(frozen=True)
class Fabric:
    """A copy of this host's libfabric below `place`; `needs` are the libraries that it needs of the host."""

    place: Path
    needs: tuple[str, ...]

    @property
    def path(self) -> str:
        return f"{self.place}/fabric/libfabric.so.1"

    def table(self, *needs: str) -> str:
        """[host_stack] of a site; `needs` are those that jobs mount."""
        return f'[host_stack]\nmode = "inject"\nlibfabric = "{self.place}/fabric"\nmore = {json.dumps(needs)}\n'


def copy_fabric(place: Path) -> Fabric:
    """Copy this host's libfabric and what it needs below `place`, an empty folder or none."""
    here = Path(f"/usr/lib/{os.uname().machine}-linux-gnu/libfabric.so.1")
    if not here.exists():
        pytest.skip("not installed: libfabric1")
    for folder in ("fabric", "needs"):
        (place / folder).mkdir(parents=True)
    shutil.copy(here, place / "fabric")
    for path in inventory([str(here)])["links"].keys() - {str(here)}:
        if not re.match(_OF_IMAGES, os.path.basename(path)):
            shutil.copy(path, place / "needs")
    return Fabric(place, tuple(sorted(map(str, (place / "needs").iterdir()))))


@dataclass
class Ended:
    """A job that ended: how, what it printed, and the trainer's report, empty where it wrote none."""

    number: str
    end: JobEnd
    log: str
    report: dict[str, Any]
    run: Path

    @property
    def hosts(self) -> list[str]:
        """The host of each rank."""
        return [rank["host"] for rank in self.report["ranks"]]


@dataclass
class Jobs:
    """`envbuild job` for a cluster and the site file in its folder. `env` goes over a login's environment."""

    cluster: Cluster
    env: dict[str, str] = field(default_factory=dict)

    @property
    def site(self) -> Path:
        return self.cluster.folder / "lab.toml"

    def write_site(self, text: str = "", **environment: str) -> None:
        """Two CPUs a job, so that several run beside each other; `text` are more tables, `environment` that table."""
        # Open MPI warns root off, and users of the lab's cluster are.
        variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        rows = [f'{name} = "{value}"' for name, value in (variables | environment).items()]
        self.site.write_text(
            '[scheduler]\nkind = "slurm"\npartition = "main"\ntime = "00:05:00"\nexclusive = false\n\n'
            f'[paths]\nshared = "{self.cluster.shared}"\n\n[node]\ncpus = 2\n\n[environment]\n'
            + "\n".join(rows)
            + f"\n\n{text}"
        )

    def command(self) -> Path:
        """`envbuild` as a program, which nodes find at the same path."""
        path = self.cluster.folder / "envbuild"
        path.write_text(_COMMAND.format(python=sys.executable))
        path.chmod(0o755)
        return path

    def render(self, artifact: str | Path, *options: str | Path, cwd: Path | None = None, code: int = 0) -> str:
        """Run `envbuild job` on the login host with `options`; what it printed, or its error for another `code`."""
        line = [self.command(), "job", "--site", self.site, artifact, *options]
        done = self.cluster.run(line, cwd=cwd, env=self.env)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stderr if code else done.stdout

    def submit(
        self, artifact: str | Path, *options: str | Path, ranks: int = 2, arguments: tuple[str, ...] = EPOCHS
    ) -> int:
        """Submit the bundled trainer with `ranks` on each of two nodes; the job's number."""
        world = ("--nodes", "2", "--nproc-per-node", str(ranks))
        said = self.render(artifact, *world, *options, "--submit", "--", *arguments)
        return int(said.splitlines()[-1])

    def ended(self, job: int, name: str = "pt_cpu", timeout_s: float = 180) -> Ended:
        """Wait for a job that was called `name`."""
        end = self.cluster.wait(job, timeout_s)
        run = next(iter(self.cluster.shared.glob(f"{name}_{job}*/")), Path("nowhere"))
        log = next(self.cluster.shared.glob(f"logs/{name}_{job}*.out"), None)
        report = run / "report.json"
        return Ended(
            run.name.removeprefix(f"{name}_"),
            end,
            log.read_text() if log else "",
            json.loads(report.read_text()) if report.exists() else {},
            run,
        )

    def trained(self, ended: Ended, *, ranks: int = 2, interface: str = "eth0") -> Mapping[str, Any]:
        """Assert that a job trained to its end, with `ranks` on each node, over that network of the nodes; its
        report."""
        assert ended.end.state == "COMPLETED", ended.log
        assert ended.report.get("status") == "finished", ended.log
        assert ended.report["world_size"] == ranks * len(self.cluster.nodes)
        assert {rank["local_world_size"] for rank in ended.report["ranks"]} == {ranks}
        assert sorted(set(ended.hosts)) == list(self.cluster.nodes)
        names = {rank["gloo_ifname"] for rank in ended.report["ranks"]}
        assert names == {interface}, ended.log
        assert ended.report["snapshots"] and (ended.run / "snapshot.pt").exists()
        return ended.report
