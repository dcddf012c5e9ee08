"""Build of one source layer by the steps of source_steps.py: its build host, paths and commands."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Protocol

from envbuild.base import progress
from envbuild.recipe.sources import SourceLayer

# Every layer is configured for this prefix: paths that are compiled in must not depend on the build folder.
PREFIX = "/opt/env"
# The time for tools that write one into their output, in seconds since 1970: 1980-01-01, the earliest in zip files.
EPOCH = 315532800
# A placeholder in an option; "${x}" belongs to a shell or a Makefile.
PLACE = re.compile(r"(?<!\$)\{([a-z0-9][a-z0-9_.+-]*)\}")
# The folder of the wheels in SourceLayer.build, relative to the work folder.
TOOLS = "tools"
_QUIET = ("programs", "strip")


class BuildHost(Protocol):
    """Build host with compilers (this host or a builder image), and one folder that it shares with this host."""

    @property
    def work(self) -> Path:
        """Shared folder, as this host sees it; it is new and empty."""
        ...

    @property
    def inside(self) -> PurePath:
        """The shared folder, as commands see it."""
        ...

    def run(self, command: Sequence[str], cwd: PurePath, variables: Mapping[str, str], log: Path) -> int:
        """Run `command` in `cwd` (below `inside`), append its output to `log`, and return the exit status.

        `variables` override the build host's own. The status is 127 when there is no such program. Ctrl-C stops the
        command and all its children.
        """
        ...


@dataclass(frozen=True, slots=True)
class BuildPython:
    """Python that Python projects are built for: its absolute path in the build host, and its version ("3.11").

    `packages` installs the packages of the artifact's environment into a new virtual environment of this Python; None
    if the interpreter's own environment has them. `conda` installs the conda packages that contain the interpreter
    (path "") into a folder, for the path that commands see. With `system`, projects also see the packages of the
    interpreter.
    """

    interpreter: str
    version: str
    packages: Callable[[Path], None] | None = None
    conda: Callable[[Path, PurePath], None] | None = None
    system: bool = False


class StepError(Exception):
    """Failure of a command: its step, its exit status, its output, and logs with details."""

    def __init__(self, step: str, status: int, log: Path, more: Sequence[Path] = ()) -> None:
        super().__init__(step)
        self.step, self.status, self.log_file, self.more = step, status, log, more


@dataclass(frozen=True, slots=True)
class SourceBuild:
    """Build of one layer in `build_host`.

    `places` are the paths, as commands see them, of built layers and CUDA ("cuda"), `hosts` the paths of host layers.
    `patches` are files on this host, in order. `python` is the interpreter for which a Python project is built. `jobs`
    is the number of parallel compilers. `log` logs one line.
    """

    layer: SourceLayer
    archive: Path
    build_host: BuildHost
    places: Mapping[str, PurePath] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    patches: Sequence[Path] = ()
    python: str = "python3"
    jobs: int = 1
    log: Callable[[str], None] = lambda _line: None

    @property
    def title(self) -> str:
        return f"{self.layer.name} {self.layer.version}"

    @property
    def environment(self) -> PurePath:
        """The root of the environment of `python`."""
        return PurePath(self.python).parent.parent

    @property
    def log_file(self) -> Path:
        """The output of all commands."""
        return self.build_host.work / "build.log"

    @property
    def source(self) -> Path:
        """The unpacked source, as this host sees it."""
        return self.build_host.work / "source"

    @property
    def stage(self) -> PurePath:
        """DESTDIR, as commands see it."""
        return self.build_host.inside / "stage"

    @property
    def staged(self) -> Path:
        """The installed files below the prefix, as this host sees them."""
        return self.build_host.work / "stage" / PREFIX.lstrip("/")

    def options(self) -> list[str]:
        """Return the layer's options with all placeholders replaced."""
        known = {"prefix": PREFIX, "install": f"{self.stage}{PREFIX}", **self.hosts}
        known |= {name: str(place) for name, place in self.places.items()}
        return [PLACE.sub(lambda match: known.get(match[1], match[0]), option) for option in self.layer.configure]

    def run(
        self, step: str, command: Sequence[str], variables: Mapping[str, str] | None = None, more: Sequence[str] = ()
    ) -> None:
        """Run one step in the source folder; `more` are its own log files there. Raises StepError if it fails."""
        with self.log_file.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
        begun = time.monotonic()
        if step not in _QUIET:
            self.log(f"{self.title}: {step}")
        folder = self.build_host.inside / "source"
        with progress.step(f"{self.title}: {step}", printed=True):
            status = self.build_host.run(command, folder, {**self.variables(), **(variables or {})}, self.log_file)
        if status:
            logs = [self.source / name for name in more if (self.source / name).is_file()]
            raise StepError(step, status, self.log_file, logs)
        seconds = time.monotonic() - begun
        if seconds >= 2:
            self.log(f"{self.title}: {step} took {seconds:.0f} s")

    def variables(self) -> dict[str, str]:
        """Return the environment variables of all commands, which make builds reproducible."""
        inside = self.build_host.inside
        required = [*map(PurePath, self.hosts.values()), *(self.places[name] for name in self.places if name != "cuda")]
        configs = [place / folder / "pkgconfig" for place in required for folder in ("lib", "lib64")]
        return {
            "LC_ALL": "C",
            "TZ": "UTC",
            "HOME": str(inside),
            "TMPDIR": str(inside / "tmp"),
            "SOURCE_DATE_EPOCH": str(EPOCH),
            "CONFIG_SITE": "/dev/null",
            "NOCONFIGURE": "1",
            "CPPFLAGS": f"-ffile-prefix-map={inside}=/usr/src/{self.layer.name}",
            # A build ID is a digest of the linker's output, which still has the build folder that source_files.py
            # overwrites later.
            "LDFLAGS": "-Wl,--build-id=none",
            "PKG_CONFIG_PATH": ":".join(map(str, configs)),
        }
