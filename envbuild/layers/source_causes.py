"""The error for a failed build of a source layer: the end of its log, and a hint by the rules of diagnosis."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from envbuild.diagnose.engine import explain
from envbuild.errors import BuildError
from envbuild.layers.source_job import StepError

TAIL_LINES = 25
# The end of a log tells why; a compiler's messages may be long.
_TAIL_BYTES = 1 << 16
_CONFIG_LINES = 15


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
    hint = explain(f"exit status {error.status}\n{text}", "source-build")
    return BuildError("\n".join(shown), hint or None)


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
