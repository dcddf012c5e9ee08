"""Why a build failed, from what it printed: the error that a user reads, with what to change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from envbuild.errors import BuildError
from envbuild.layers.source_job import StepError

TAIL_LINES = 25
# The end of a log tells why; a compiler's messages may be long.
_TAIL_BYTES = 1 << 16
_CONFIG_LINES = 15
_MOST_NAMES = 5

# (what the log says, what to do), most telling first. As GNU make 4.3, autoconf 2.71, gcc 12 and glibc's strerror
# say it.
_CAUSES: tuple[tuple[str, str], ...] = (
    (r"No space left on device", "there is no space left: free some, or set ENVBUILD_STORE to a folder with room"),
    (r"Disk quota exceeded", "your disk quota is used up: set ENVBUILD_STORE to a folder with room"),
    (r"(?:Killed signal terminated|virtual memory exhausted|Cannot allocate memory|out of memory)",
     "the compiler ran out of memory: build with fewer processors (taskset, or a smaller Slurm allocation)"),
    (r"C(?:\+\+)? compiler cannot create executables",
     "the compiler does not work: compile a hello world with it; libc6-dev (glibc-devel) may be missing, or a module"),
    (r"no acceptable C compiler found", "there is no C compiler: load its module or install gcc"),
    (r"possibly undefined macro: ([A-Za-z_]+)",
     "autoconf lacks the macro {0}: install libtool, pkg-config and autoconf-archive"),
    (r"(?:^|[/: ])([A-Za-z0-9_.+-]+): (?:command )?not found$",
     "the program {0} is missing: install it, load its module, or name its Debian package in [image] build_packages"),
    (r"^make(?:\[[0-9]+\])?: ([A-Za-z0-9_.+-]+): No such file or directory$",
     "the program {0} is missing: install it, load its module, or name its Debian package in [image] build_packages"),
    (r"Can't exec \"([^\"]+)\"",
     "the program {0} is missing: install it, load its module, or name its Debian package in [image] build_packages"),
    (r"fatal error: ([^:\s]+): No such file or directory",
     "the header {0} is missing: install the development package that has it, load its module, or name the package in "
     "[image] build_packages"),
    (r"#error C\+\+([0-9]+) or later compatible compiler is required",
     "torch's headers are C++{0}: say so with a patch, as recipes/horovod/patches/cxx20.patch does"),
    (r"Could NOT find MPI",
     "there is no MPI to compile with: load a module, install libopenmpi-dev, or take its option out of `configure`"),
    (r"cannot find -l([A-Za-z0-9_.+-]+)",
     "the library lib{0} is missing: install its development package, load its module, or name the package in "
     "[image] build_packages"),
    (r"(?:Reversed \(or previously applied\) patch detected|hunks? FAILED|can't find file to patch)",
     "the patch does not fit this version: make it anew from this version's source"),
    (r"No rule to make target ['`]install'",
     "its Makefile has no install target: another `system`, or a patch"),
    (r"Unsupported gpu architecture|nvcc fatal",
     "nvcc refuses: choose the architectures for this CUDA in `configure` (NVCC_GENCODE=...)"),
)  # fmt: skip


def likely_cause(text: str) -> str | None:
    """What to change, when `text` (the end of a log) has one of the well-known messages."""
    for pattern, advice in _CAUSES:
        found = re.findall(pattern, text, re.MULTILINE)
        if found and "{0}" in advice:
            names = list(dict.fromkeys(found))
            verb = "is" if len(names) == 1 else "are"
            return advice.format(", ".join(names[-_MOST_NAMES:])).replace(" is ", f" {verb} ", 1)
        if found:
            return advice
    return None


def failure(name: str, error: StepError, kept: Path | None) -> BuildError:
    """The error for a failed step of the layer `name`: the log's last lines, and where all of it is (`kept`)."""
    log = _end(error.log)
    lines = [line for line in log.splitlines() if line.strip()][-TAIL_LINES:]
    shown = [
        f"{name}: {error.step} failed (exit {error.status}):",
        *(f"  {line}" for line in lines),
    ]
    text = log
    for more in error.more:
        part = config_error(more)
        if part:
            shown += [f"  {more.name}:", *(f"    {line}" for line in part)]
            text = "\n".join([*part, log])
    if kept is not None:
        shown.append(f"  all of it: {kept}")
    if error.status in (-9, 137):
        hint: str | None = "it was killed: by you, or for want of memory (dmesg)"
    else:
        hint = likely_cause(text)
    return BuildError("\n".join(shown), hint)


def config_error(path: Path) -> list[str]:
    """The last lines of config.log before configure gave up: the test that failed, and what the compiler said."""
    lines = _end(path, 1 << 20).splitlines()
    ends = [n for n, line in enumerate(lines) if re.match(r"configure:[0-9]+: error:", line)]
    if not ends:
        return []
    # A program that did not compile is printed between the message and the error: it says little.
    before = [line for line in lines[: ends[-1]] if not line.startswith("|")]
    return [*before[-_CONFIG_LINES:], lines[ends[-1]]]


def _end(path: Path, most: int = _TAIL_BYTES) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - most))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def keep_log(error: StepError, place: Path) -> None:
    """Copy the log of a failed step, and its other logs below it, to `place`. Raises OSError."""
    logs: Sequence[Path] = [error.log, *error.more]
    with place.open("wb") as out:
        for log in logs:
            if log != error.log:
                out.write(f"\n==== {log.name}\n".encode())
            with log.open("rb") as stream:
                while piece := stream.read(1 << 20):
                    out.write(piece)
