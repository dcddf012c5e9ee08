"""The lines of logs: files, compressed files, standard input. Invalid bytes and endless lines do no harm."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, cast

from envbuild.base.errors import UsageError
from envbuild.jobcheck.diagnose.flight import is_record, merged, read_record

STDIN = "-"
# A progress bar may write megabytes without a newline.
_LONGEST = 1 << 14
_BLOCK = 1 << 20
_PACKED = re.compile(r"\.(?:gz|bz2|xz)$")
_OPENERS = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\x00", lzma.open))
_OF_PBS = re.compile(r"\.[oe](\d+)(?:[.\[-]|$)")
_NUMBER = re.compile(r"(?:^|(?<=[_.-]))[1-9]\d*(?=[_.-]|$)")
_OF_NODES = re.compile(r"(?:node|host|rank|worker|task|gpu|nid|attempt|ip(?:-\d+)*)[_.-]$", re.IGNORECASE)
# The folder of a run of `envbuild job` has other files, too, such as snapshots.
_OF_RUN = re.compile(r"/settings-\d+\.sh$")
_OF_POD = re.compile(r"/pod-\d+\.log$")
# The first line of a pod in the copy of its output (jobs/kubernetes_pod.py).
_POD_START = b"envbuild: pod start: "
# In a name that is not a scheduler's, a shorter number may have any meaning.
_LONG = 4


def jobs_of(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the logs of each job by its number, "" if unknown.

    A folder may contain the logs of many jobs, which the number in a log's name tells apart. Logs that are
    given one by one belong together. Raises UsageError for a path that does not exist or cannot be read.
    """
    found: dict[str, list[str]] = {}
    every: list[str] = []
    for path in paths:
        files, folder = _files(path)
        every += files
        for file in files:
            found.setdefault(job_number(Path(file).name) if folder else "", []).append(file)
    return found if len(found.keys() - {""}) > 1 else {"": every}


def job_number(name: str) -> str:
    """Return the job's number from its log's name (ddp_1234.out, slurm-1234_7.out, ddp.o1234), "" without one."""
    name = _PACKED.sub("", name)
    if match := _OF_PBS.search(name):
        return match[1]
    stem, _, kind = name.rpartition(".")
    if kind not in ("out", "err", "log", "txt"):
        return ""
    shortest = 1 if kind in ("out", "err") else _LONG
    found = [one for one in _NUMBER.finditer(stem) if not _OF_NODES.search(stem[: one.start()])]
    numbers = [one[0] for one in found if len(one[0]) >= shortest]
    # The longest number is the job's: a model's size, an array index and a task's number are shorter.
    return max(reversed(numbers), key=len, default="")


def read_logs(paths: Sequence[str]) -> Iterator[tuple[str, Iterator[str]]]:
    """Yield (name, blocks) of each log; blocks of whole lines are read lazily, without the newline at their end.

    "-" is standard input, a folder stands for its files.

    The records of torch's flight recorder are one more log, the last. Raises UsageError for a path that does not
    exist or cannot be read.
    """
    files = [file for path in paths for file in _files(path)[0]]
    records = []
    for file in files:
        if file != STDIN and is_record(Path(file)):
            records.append(Path(file))
        else:
            yield "standard input" if file == STDIN else file, _blocks(file)
    if records:
        found = (read_record(path) for path in records if not path.name.endswith(".stack"))
        yield f"{records[0].parent}/ (flight records)", merged([one for one in found if one])


def _files(path: str) -> tuple[list[str], bool]:
    """Return the logs at `path`, and whether it is a folder."""
    what = "log"
    try:
        if path == STDIN or not Path(path).is_dir():
            if path != STDIN and not Path(path).exists():
                raise UsageError(f"there is no log {path}")
            return [path], False
        what = "folder"
        found = sorted(str(one) for one in Path(path).iterdir() if one.is_file())
        if any(_OF_RUN.search(one) for one in found):
            return [one for one in found if is_record(Path(one)) or _OF_POD.search(one)], True
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}") from None
    if not found:
        raise UsageError(f"there are no logs in the folder {path}")
    return found, True


def _blocks(path: str) -> Iterator[str]:
    """Yield blocks of whole lines; a very long line is reduced to its beginning and its end."""
    try:
        with nullcontext(sys.stdin.buffer) if path == STDIN else _opened(Path(path)) as file:
            if _OF_POD.search(path):
                yield from _until_last_start(file)
            rest = b""
            while piece := file.read(_BLOCK):
                whole, newline, rest = (rest + piece).rpartition(b"\n")
                rest = _shortened(rest)
                if newline:
                    yield _decoded(_without_long_lines(whole))
            if rest:
                yield _decoded(rest)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read the log {path}: {reason}") from None


def _until_last_start(file: IO[bytes]) -> Iterator[str]:
    """Move to the line of the last pod that began in `file`; yield blocks of as many empty lines as are before it."""
    place = last = 0
    lines = before = 0
    for line in file:
        if line.startswith(_POD_START):
            last, before = place, lines
        place += len(line)
        lines += line.endswith(b"\n")
    file.seek(last)
    for done in range(0, before, _BLOCK):
        yield "\n" * (min(before - done, _BLOCK) - 1)


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def _without_long_lines(text: bytes) -> bytes:
    # A line that is longer than two parts contains one.
    parts = range(0, len(text) - _LONGEST + 1, _LONGEST)
    if all(text.find(b"\n", at, at + _LONGEST) >= 0 for at in parts):
        return text
    return b"\n".join(map(_shortened, text.split(b"\n")))


def _shortened(line: bytes) -> bytes:
    # The final state of a progress bar is at the end, and what a program says behind it.
    return line if len(line) <= 2 * _LONGEST else line[:_LONGEST] + line[-_LONGEST:]


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        begin = file.read(6)
    # Detected by content, whatever the file's name.
    opener = next((opener for magic, opener in _OPENERS if begin.startswith(magic)), open)
    return cast(IO[bytes], opener(path, "rb"))
