"""A decided job, which a renderer turns into a script or a manifest. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from envbuild.contract.kinds import ARTIFACTS, Artifact
from envbuild.contract.verification import VerifySettings
from envbuild.data import load_table
from envbuild.recipe.targets import CPU, Accelerator, accelerator_of
from envbuild.runtimes import RUNTIMES
from envbuild.runtimes.base import Runtime
from envbuild.site.settings import Site

if TYPE_CHECKING:
    from envbuild.contract.state import BuiltLayer

# The beginning of the names of images in OCI layouts on a file system, as containers-transports(5) has it.
LAYOUT = "oci:"
Strategy = Literal["ddp", "accelerate", "deepspeed", "horovod", "single"]


@dataclass(frozen=True, slots=True)
class JobArtifact:
    """The artifact that a job runs.

    `path` is the artifact as nodes find it: a folder, a file, NAME@sha256:… in a registry, or oci:FOLDER@…. `python` is
    its interpreter as its own processes see it, `digest` is the digest of its content (or manifest), `manifest` that of
    the manifest of a verified environment's files, and `verified_at` is the time of its receipt, "" without a passing
    one. `chips` are the chips for which a slim artifact has code, () for no limit.
    """

    kind: str
    path: str
    digest: str
    recipe: str
    target: str
    python: str
    fabric: str = "any"
    provider: str = ""
    verified_at: str = ""
    manifest: str = ""
    chips: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The path that nodes must see: of the artifact, or of an OCI layout; "" for an image in a registry."""
        name, at, _ = self.path.partition("@sha256:")
        return self.path if not at else name.removeprefix(LAYOUT) if name.startswith(LAYOUT) else ""

    @property
    def of_kind(self) -> Artifact:
        """The entry of its kind in the table of artifact kinds."""
        return ARTIFACTS[self.kind]

    @property
    def accelerator(self) -> Accelerator:
        """The accelerator that its torch is built for."""
        return accelerator_of(self.target.partition("-")[0]) or CPU

    @property
    def arch(self) -> str:
        """`x86_64` or `aarch64`."""
        return self.target.partition("-")[2]


@dataclass(frozen=True, slots=True)
class JobInputs:
    """An artifact and the other data that planning needs.

    `layers` are its source layers, `nccl` is the version of its NCCL ("" for the one inside torch), `verify` and
    `packages` are None if unknown. `receipt` is its passing receipt, beside `place`, or None. `lock` is the digest of
    the lock from which it was built, "" if unknown. `named_recipe` is the recipe if the user named one, else "".
    `holds_file` returns whether the artifact is an image file with a regular file at an absolute path.
    """

    artifact: JobArtifact
    layers: tuple[BuiltLayer, ...] = ()
    nccl: str = ""
    verify: VerifySettings | None = None
    packages: frozenset[str] | None = None
    receipt: dict[str, Any] | None = None
    place: Path = Path()
    lock: str = ""
    named_recipe: str = ""
    holds_file: Callable[[str], bool] = field(default=lambda path: False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the artifact that a site may bind to a recipe."""
        path = self.artifact.path
        return (path.partition("@")[0],) if "@sha256:" in path else (path, str(Path(path).resolve()))


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One job. `scheduler` and `launcher` are names of data/schedulers.toml.

    `command` follows torchrun's options (or the interpreter's, for other strategies): `-m ddp_train …` or
    `/path/train.py …`. `run_files` are options of it that name files in the run's own folder,
    `work`/NAME_JOBID, which every node sees: (("--checkpoint_path", "snapshot.pt"),).
    `variables` are exported for every process, in this order; `library_path` is prepended to LD_LIBRARY_PATH.
    `mounts` are (host, container) folders for containers, including the working folder. `modules` are loaded on
    nodes after `site.modules.init` (and purge). `speed` lets the preflight compare how fast nodes are, and
    `exclude_slow` starts the job again without the slow ones. `stage` is the folder on nodes' disks to which the
    artifact is brought first, "" to read the shared one, and `stage_bytes` the limit of copies there. `runtime` is a
    key of RUNTIMES. `envbuild` is the command on nodes, which the runtime `own` and a site with signers need. Times
    are in seconds. `origins` names who set each field (and variables.NAME).
    """

    name: str
    scheduler: str
    artifact: JobArtifact
    site: Site
    runtime: str
    launcher: str
    strategy: Strategy
    nodes: int
    nproc_per_node: int
    command: tuple[str, ...]
    work: str
    gpus_per_node: int = 0
    cpus_per_node: int = 0
    run_files: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    library_path: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()
    modules: tuple[str, ...] = ()
    time: str = "01:00:00"
    max_restarts: int = 3
    join_timeout_s: int = 900
    read_timeout_s: int = 300
    rendezvous: Literal["c10d", "etcd-v2"] = "c10d"
    rendezvous_endpoint: str = ""
    preflight: bool = False
    speed: bool = False
    exclude_slow: bool = False
    exact: bool = False
    stage: str = ""
    stage_bytes: int = 0
    envbuild: str = "envbuild"
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def logs(self) -> str:
        """The folder of the scheduler's output, relative to the working folder."""
        return self.site.paths.logs

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.nproc_per_node

    def imex(self, group: str = "names") -> str:
        """Return the folder of IMEX's channels, which ranks need if NVLink joins the nodes; "" for other GPUs."""
        row = load_table("gpus")["multi_node_nvlink"]
        joined = not set(row[group]).isdisjoint(self.site.node.gpu_types) and self.gpus_per_node and self.nodes > 1
        return str(row["devices"]) if joined and ("NCCL_MNNVL_ENABLE", "0") not in self.variables else ""


@dataclass(frozen=True, slots=True)
class Launcher:
    """A program that starts a process on every node.

    `everywhere` returns the bash function of that name for a job's script (jobs/launchers.py). `number` are the
    variables in which a process may find its number, none if the function passes the number. `carries_environment`
    means that nodes get the variables of the batch script, and so its modules. `node_lines` are added to a
    node's shell script. `signal` is the command that sends launchers.STEP_SIGNAL to every process of the training,
    "" if SIGTERM to the launcher ends it in order; `signal_note` gives the reason, as lines of a comment.
    """

    everywhere: Callable[[JobPlan], str]
    number: tuple[str, ...] = ()
    carries_environment: bool = False
    node_lines: str = ""
    signal: str = ""
    signal_note: str = ""


def seconds(time: str) -> int:
    """Return the seconds of a time limit, [D-]HH:MM:SS."""
    days, _, clock = time.rpartition("-")
    hours, minute, second = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minute) * 60 + second


def runtime_of(plan: JobPlan) -> Runtime:
    """Return the runtime that starts the plan's artifact on the nodes."""
    return RUNTIMES[plan.runtime]


def work_key(plan: JobPlan) -> str:
    """Return the name of the setting that chose the working folder, for error messages."""
    origin = plan.origins.get("work", "--work")
    return "the current folder, without --work," if origin == "current folder" else origin


@dataclass(frozen=True, slots=True)
class JobRequest:
    """The caller's request for a job; None leaves a value to the site, the recipe or the default.

    `script` is a training script, `module` a training module, None for the bundled trainer, and `arguments` are its
    arguments. `work` is the folder in which the job runs, `current` is the caller's current folder.
    """

    scheduler: str | None = None
    nodes: int | None = None
    nproc_per_node: int | None = None
    script: str | None = None
    module: str | None = None
    arguments: tuple[str, ...] = ()
    strategy: Strategy = "ddp"
    name: str | None = None
    time: str | None = None
    launcher: str | None = None
    max_restarts: int | None = None
    rendezvous: Literal["c10d", "etcd-v2"] = "c10d"
    endpoint: str = ""
    preflight: bool = False
    speed: bool = False
    exclude_slow: bool = False
    exact: bool = False
    work: str | None = None
    current: Path = Path()
    envbuild: str = "envbuild"
