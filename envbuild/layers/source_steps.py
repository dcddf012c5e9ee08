"""The steps that make files of a source archive: unpack, patch, configure, make, install, tidy.

Nothing but the standard library, errors and the description of a layer is imported here, so that a stage of a
Dockerfile can run `python -m envbuild.layers.source_steps` (source_standalone.py). Sources: the GNU Coding Standards
(configure, DESTDIR, standard targets), reproducible-builds.org (SOURCE_DATE_EPOCH, -ffile-prefix-map).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from envbuild.errors import BuildError
from envbuild.layers.source_elf import is_elf

if TYPE_CHECKING:
    from envbuild.layers.workshop import Workshop
    from envbuild.plan.sources import SourceLayer

# Where every layer is told that it will be: what a layer compiles in must not depend on where it is built.
PREFIX = "/opt/env"
# Seconds since 1970 for what writes the time into its output: 1980-01-01, the earliest that zip files know.
EPOCH = 315532800
# A place in an option; "${x}" is a shell's or a Makefile's.
PLACE = re.compile(r"(?<!\$)\{([a-z0-9][a-z0-9_.+-]*)\}")
_LICENCES = ("COPYING*", "LICENSE*", "LICENCE*", "NOTICE*")
# Says which programs are missing, all of them, before anything is built.
_LOOK = (
    'for p; do command -v "$p" >/dev/null || { echo "$p: not found"; m=127; }; done; exit ${m:-0}'
)
_QUIET = ("programs", "strip")
_UNWANTED = ("share/doc", "share/info", "share/man")


class StepError(Exception):
    """A command that failed: which step, its exit status, what it printed, and logs that say more."""

    def __init__(
        self, step: str, command: Sequence[str], status: int, log: Path, more: Sequence[Path] = ()
    ) -> None:
        super().__init__(step)
        self.step, self.command, self.status, self.log, self.more = step, command, status, log, more


@dataclass(frozen=True, slots=True)
class Job:
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


def make_layer(job: Job) -> Path:
    """Build and install `job`'s layer; returns the folder with what belongs below the prefix (on this host).

    Raises StepError for a command that fails, BuildError for an archive or a result that cannot be used.
    """
    from envbuild.layers.source_unpack import unpack

    work, layer = job.workshop.work, job.layer
    (work / "tmp").mkdir()
    (work / "stage").mkdir()
    unpack(job.archive, job.source)
    programs = [*layer.tools, *(["patch"] if job.patches else [])]
    job.run("programs", ["sh", "-c", _LOOK, "sh", *programs])
    for patch in job.patches:
        # A name of our own: the program would take an option from a file's name.
        shutil.copyfile(patch, work / "patch.diff")
        job.run(
            f"patch {patch.name}",
            ["patch", "-p1", "--batch", "--forward", "--no-backup-if-mismatch", "-i",
             str(job.workshop.inside / "patch.diff")],
        )  # fmt: skip
    _SYSTEMS[layer.system](job)
    if not job.staged.is_dir() or not any(job.staged.iterdir()):
        raise BuildError(
            f"{layer.name} {layer.version}: `make install` put nothing below {PREFIX}",
            "its Makefile must honour DESTDIR and PREFIX; a variable in `configure` may name {install}, "
            "the folder to install into",
        )
    _licences(job)
    tidy(job.staged)
    _strip(job)
    return job.staged


def _autotools(job: Job) -> None:
    if not (job.source / "configure").is_file():
        # The archive of a tag does not know its version: where gnulib's git-version-gen and aws-ofi-nccl look for it.
        for name in (".tarball-version", ".release_version"):
            (job.source / name).write_text(job.layer.version + "\n", encoding="utf-8")
        if (job.source / "autogen.sh").is_file():
            # Some have no "#!" line: a shell runs them as they are, execve does not.
            text = (job.source / "autogen.sh").read_bytes()
            os.chmod(job.source / "autogen.sh", 0o755)
            job.run("autogen.sh", ["./autogen.sh"] if text[:2] == b"#!" else ["sh", "autogen.sh"])
        elif (job.source / "configure.ac").is_file():
            job.run("autoreconf", ["autoreconf", "--force", "--install"])
        else:
            raise BuildError(
                f"{job.layer.name} {job.layer.version}: its archive has no configure script",
                f'say how it is built: `system = "make"` in [layers.{job.layer.name}]',
            )
    os.chmod(job.source / "configure", 0o755)
    job.run(
        "configure",
        ["./configure", f"--prefix={PREFIX}", f"--libdir={PREFIX}/lib", "--disable-static",
         "--enable-shared", "--disable-dependency-tracking", *job.options()],
        more=("config.log",),
    )  # fmt: skip
    job.run("make", ["make", f"-j{job.jobs}"])
    job.run("make install", ["make", "install", f"DESTDIR={job.stage}"])


def _make(job: Job) -> None:
    # What comes later on a command line wins: a layer's own PREFIX={install} is for Makefiles without DESTDIR.
    named = [f"PREFIX={PREFIX}", f"DESTDIR={job.stage}", *job.options()]
    job.run("make", ["make", f"-j{job.jobs}", *named])
    job.run("make install", ["make", "install", *named])


def _wheel(job: Job) -> None:
    from envbuild.layers.source_wheel import build_wheel

    build_wheel(job)


_SYSTEMS: Mapping[str, Callable[[Job], None]] = {
    "autotools": _autotools, "make": _make, "wheel": _wheel,
}  # fmt: skip


def _licences(job: Job) -> None:
    """Keep the licence texts of the source beside what was made of it."""
    for patterns in (job.layer.licences, _LICENCES):
        found = sorted(
            {path for one in patterns for path in job.source.glob(one) if path.is_file()}
        )
        if found:
            break
    else:
        job.say(f"{job.layer.name} {job.layer.version}: no licence file in its archive")
        return
    folder = job.staged / "share" / "licenses" / job.layer.name
    folder.mkdir(parents=True, exist_ok=True)
    for path in found:
        shutil.copyfile(path, folder / path.name)


def tidy(tree: Path) -> None:
    """Drop what a running environment has no use for; modes without umask; links that hold wherever the tree is."""
    for name in _UNWANTED:
        shutil.rmtree(tree / name, ignore_errors=True)
    for here, folders, names in os.walk(tree, topdown=False):
        for name in names + [one for one in folders if os.path.islink(os.path.join(here, one))]:
            path = Path(here, name)
            if path.is_symlink():
                target = os.readlink(path)
                if target.startswith(PREFIX + "/"):
                    inner = os.path.relpath(
                        target, os.path.join(PREFIX, os.path.relpath(here, tree))
                    )
                    path.unlink()
                    path.symlink_to(inner)
            elif path.suffix in (".la", ".a"):
                path.unlink()
            else:
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        os.chmod(here, 0o755)
        if Path(here) != tree:
            with contextlib.suppress(OSError):
                os.rmdir(here)  # empty ones only


def _strip(job: Job) -> None:
    """Drop debugging information; it is most of a library's size."""
    root = job.workshop.work
    found = []
    for here, _, names in os.walk(job.staged):
        for name in names:
            path = Path(here, name)
            if is_elf(path):
                found.append(str(job.workshop.inside / path.relative_to(root)))
    if found:
        job.run("strip", ["strip", "--strip-debug", *sorted(found)])


if __name__ == "__main__":
    import sys

    from envbuild.layers.source_standalone import main

    sys.exit(main(sys.argv[1:]))
