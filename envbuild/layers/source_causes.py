"""The error for a failed build of a source layer: the end of its log, and a hint by the rules of diagnosis."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from envbuild.base.errors import BuildError
from envbuild.jobcheck.diagnose.engine import explain
from envbuild.layers.source_job import StepError

_TAIL_LINES = 25
# The end of a log has the reason; compilers' messages may be long.
_TAIL_BYTES = 1 << 16
_CONFIG_LINES = 15


def failure(name: str, error: StepError, kept: Path | None) -> BuildError:
    """Return the error for a failed step of the layer `name`; `kept` is the path of the complete log."""
    text = log = _end(error.log_file)
    lines = [line for line in log.splitlines() if line.strip()][-_TAIL_LINES:]
    shown = [f"{name}: {error.step} failed (exit {error.status}):", *(f"  {line}" for line in lines)]
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
    """Return config.log's last lines before configure gave up: the failed test, and the compiler's message."""
    lines = _end(path, 1 << 20).splitlines()
    ends = [n for n, line in enumerate(lines) if re.match(r"configure:[0-9]+: error:", line)]
    if not ends:
        return []
    # The source of the failed test program, printed between the message and the error, is left out: it explains little.
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
    """Copy the log of a failed step, followed by its other logs, to `place`. Raises OSError."""
    shutil.copyfile(error.log_file, place)
    with place.open("ab") as out:
        for log in error.more:
            out.write(f"\n==== {log.name}\n".encode())
            with log.open("rb") as stream:
                shutil.copyfileobj(stream, out)
