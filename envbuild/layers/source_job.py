"""One source layer on its way through the steps of source_steps.py, and where everything lies meanwhile."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from envbuild.layers.workshop import Workshop
    from envbuild.recipe.sources import SourceLayer

# Where every layer is told that it will be: what a layer compiles in must not depend on where it is built.
PREFIX = "/opt/env"
# Seconds since 1970 for what writes the time into its output: 1980-01-01, the earliest that zip files know.
EPOCH = 315532800
# A place in an option; "${x}" is a shell's or a Makefile's.
PLACE = re.compile(r"(?<!\$)\{([a-z0-9][a-z0-9_.+-]*)\}")
_QUIET = ("programs", "strip")


class StepError(Exception):
    """A command that failed: which step, its exit status, what it printed, and logs that say more."""

    def __init__(
        self, step: str, command: Sequence[str], status: int, log: Path, more: Sequence[Path] = ()
    ) -> None:
        super().__init__(step)
        self.step, self.command, self.status, self.log, self.more = step, command, status, log, more


@dataclass(frozen=True, slots=True)
class SourceBuild:
    """One layer to be made in `workshop`.

    `places` says where the layers that it requires, hosts' folders and CUDA ("cuda") are, as commands see them.
    `patches` are files on this host, in order. `jobs` is how many compilers may run at once. `say` takes one line for
    the reader.
    """

    layer: SourceLayer
    archive: Path
    workshop: Workshop
    places: Mapping[str, PurePath] = field(default_factory=dict)
    patches: Sequence[Path] = ()
    jobs: int = 1
    say: Callable[[str], None] = lambda _line: None

    @property
    def log(self) -> Path:
        """What all commands printed."""
        return self.workshop.work / "build.log"

    @property
    def source(self) -> Path:
        """The unpacked source, as this host sees it."""
        return self.workshop.work / "source"

    @property
    def stage(self) -> PurePath:
        """DESTDIR, as commands see it."""
        return self.workshop.inside / "stage"

    @property
    def staged(self) -> Path:
        """What lies below the prefix after the install, as this host sees it."""
        return self.workshop.work / "stage" / PREFIX.lstrip("/")

    def options(self) -> list[str]:
        """The layer's options with all places filled in."""
        known = {"prefix": PREFIX, "install": f"{self.stage}{PREFIX}"}
        known |= {name: str(place) for name, place in self.places.items()}
        return [
            PLACE.sub(lambda match: known.get(match[1], match[0]), option)
            for option in self.layer.configure
        ]

    def run(
        self,
        step: str,
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        more: Sequence[str] = (),
    ) -> None:
        """Run one step in the source's folder. Raises StepError when it fails; `more` names its own logs there."""
        inside = self.workshop.inside
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
        begun = time.monotonic()
        if step not in _QUIET:
            self.say(f"{self.layer.name} {self.layer.version}: {step}")
        status = self.workshop.run(
            command, inside / "source", {**self.variables(), **(variables or {})}, self.log
        )
        if status:
            logs = [self.source / name for name in more if (self.source / name).is_file()]
            raise StepError(step, command, status, self.log, logs)
        seconds = time.monotonic() - begun
        if seconds >= 2:
            self.say(f"{self.layer.name} {self.layer.version}: {step} took {seconds:.0f} s")

    def variables(self) -> dict[str, str]:
        """The variables for every command: nothing that differs from build to build gets into the result."""
        inside = self.workshop.inside
        required = [place for name, place in self.places.items() if name != "cuda"]
        return {
            "LC_ALL": "C",
            "TZ": "UTC",
            "HOME": str(inside),
            "TMPDIR": str(inside / "tmp"),
            "SOURCE_DATE_EPOCH": str(EPOCH),
            "CONFIG_SITE": "/dev/null",
            "NOCONFIGURE": "1",
            "CPPFLAGS": f"-ffile-prefix-map={inside}=/usr/src/{self.layer.name}",
            # It is a digest of what the linker wrote, with the build's folder where relocate.py writes over it.
            "LDFLAGS": "-Wl,--build-id=none",
            "PKG_CONFIG_PATH": ":".join(
                str(place / folder / "pkgconfig") for place in required for folder in ("lib", "lib64")
            ),
        }  # fmt: skip
