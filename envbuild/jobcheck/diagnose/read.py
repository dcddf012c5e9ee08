"""Reader of logs: files, compressed files, standard input, and records of torch's flight recorder.

Invalid bytes and endless lines are harmless. A record is a pickle of plain values that a rank wrote
(ddp_train/flight.py, or NCCL's watchdog); its file's name ends with the rank. The records of a hung job are merged into
lines for the rules. Sources: torch, torch/csrc/distributed/c10d/FlightRecorderDetail.hpp and
torch/distributed/flight_recorder/components, which merges records, too, and needs torch.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import re
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, cast

from envbuild.base.errors import UsageError

_MAGIC = b"\x80\x02}"  # protocol 2, a dictionary
_LARGEST = 64 << 20  # bytes of a record: 2,000 collectives have 2 MB
_RANK = re.compile(r"(\d{1,7})$")
_OWN = re.compile(r"^failed$|/torch/|/ddp_train/(?:collectives|distributed|flight)\.py$")
# The group of all ranks, which gloo does not name in pg_config.
_FIRST, _ALL = "0", "default_pg"
_NAMED = 8  # ranks in a line
# The operations whose sizes are the same on all ranks.
_EQUAL = re.compile(r"all_?reduce|broadcast|_allgather_base|all_gather_into|reduce_scatter|_reduce_scatter_base")
# The opcodes that torch's pickler writes. None of them calls or imports anything, or allocates memory in advance.
_OPCODES = b"\x80}q(XuKMJ]ea)\x85\x86\x87thrjN\x88\x89\x8a.Gs"
_DAMAGED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)
STDIN = "-"
# A progress bar may write megabytes without a newline.
_LONGEST = 1 << 14
_BLOCK = 1 << 20
# Typographic quotes of web pages and mail, in UTF-8, and the ASCII ones that programs print and rules match.
_QUOTED = b"\xe2\x80"
_QUOTES = ((b"\xe2\x80\x98", b"'"), (b"\xe2\x80\x99", b"'"), (b"\xe2\x80\x9c", b'"'), (b"\xe2\x80\x9d", b'"'))
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


class _Unpickler(pickle._Unpickler):
    """Reader for pickles of plain values. Any other opcode raises KeyError."""

    dispatch: ClassVar[Any] = {code: pickle._Unpickler.dispatch[code] for code in _OPCODES}


@dataclass(frozen=True, slots=True)
class Call:
    """Collective that a rank entered: its number in the process group, from 1."""

    number: int
    name: str
    sizes: str
    where: str
    ended: bool

    def __str__(self) -> str:
        """Return the call as messages show it."""
        return f"{self.name}{f' of {self.sizes}' if self.sizes else ''} (number {self.number})"


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Record of one rank: its calls by process group, the ranks of each group, its stack (FILE:LINE in NAME)."""

    rank: int
    calls: Mapping[str, Sequence[Call]]
    members: Mapping[str, frozenset[int]]
    stack: tuple[str, ...]


def is_record(path: Path) -> bool:
    """Return whether `path` is a record of the flight recorder, or the stack file beside a record."""
    if path.name.endswith(".stack"):
        return _RANK.search(path.stem) is not None
    if not _RANK.search(path.name) or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False  # reading it as a log reports the error


def read_record(path: Path) -> RankRecord | None:
    """Return the record in the file `path`, None for any other file. Raises OSError."""
    match = _RANK.search(path.name)
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    if match is None or len(data) > _LARGEST:
        return None
    stack = _stack(path)
    try:
        value = _Unpickler(io.BytesIO(data)).load()
        calls: dict[str, list[Call]] = {}
        entries = [entry for entry in value["entries"] if not entry.get("is_p2p")]
        for entry in entries:
            # The last one, which failed, is recorded as if it had ended.
            failed = stack[:1] == ("failed",) and entry is entries[-1]
            group = _key(*entry.get("process_group", (_FIRST, _ALL)))
            calls.setdefault(group, []).append(_call(entry, failed))
        members = {}
        for name, config in value.get("pg_config", {}).items():
            ranks = re.findall(r"\d{1,7}", _text(config.get("ranks", "")))
            key = _key(config.get("name") or name or _FIRST, config.get("desc") or _ALL)
            members[key] = frozenset(map(int, ranks))
    except _DAMAGED:
        return None
    return RankRecord(int(match[1]), calls, members, stack)


def _stack(path: Path) -> tuple[str, ...]:
    try:
        text = path.with_name(path.name + ".stack").read_text(encoding="utf-8", errors="replace")[:100_000]
    except OSError:
        return ()
    return tuple(line[:500] for line in text.splitlines()[:100])


def _text(value: object) -> str:
    """Return `value` as text. Lists are refused, because the text of nested lists may be larger than memory."""
    if not isinstance(value, str):
        raise TypeError
    return value


def _key(name: object, description: object) -> str:
    """Return the name of a process group in messages, unique in the job: several may have one description."""
    name, description = _text(name)[:80], _text(description)[:80]
    return description if name == _FIRST else f"{description} {name}"


def _call(entry: Mapping[str, Any], failed: bool) -> Call:
    sizes = [[int(number) for number in size[:8]] for size in entry.get("input_sizes", [])[:5] if size]
    shown = ", ".join("×".join(map(str, size)) for size in sizes[:4]) + (", …" if len(sizes) > 4 else "")
    kind = "".join(f" {_text(dtype)}" for dtype in entry.get("input_dtypes", [])[:1] if shown)
    # gloo marks the end alone: `retired`.
    ended = not failed and (bool(entry.get("retired")) or entry.get("state") == "completed")
    number = int(entry.get("collective_seq_id", entry.get("seq_id", 0)))
    frames = entry.get("frames", [])[:100]
    where = _where([f"{_text(frame['filename'])}:{int(frame['line'])} in {_text(frame['name'])}" for frame in frames])
    return Call(
        number, _text(entry["profiling_name"])[:80], f"{shown}{kind}"[:120], where[:300] or "an unknown line", ended
    )


def _where(frames: Sequence[str]) -> str:
    """Return the innermost frame that is not in torch."""
    return next(
        (frame for frame in frames if not _OWN.search(frame.rpartition(":")[0] or frame)), frames[0] if frames else ""
    )


def merged(records: Iterable[RankRecord]) -> Iterator[str]:
    """Yield a line for each result of comparing the records: `flight: KIND: TEXT`, KIND is behind, differ, all or none.

    In a process group, the ranks in the collective with the highest number wait for the others. Ranks that are late in
    one group because they wait in another group are left out.
    """
    by_rank = {record.rank: record for record in records}
    waiting = {
        rank
        for rank, record in by_rank.items()
        if any(calls and not calls[-1].ended for calls in record.calls.values())
    }
    for group in dict.fromkeys(name for record in by_rank.values() for name in record.calls):
        yield from _of_group(group, by_rank, waiting)


def _of_group(group: str, by_rank: Mapping[int, RankRecord], waiting: set[int]) -> Iterator[str]:
    last = {rank: record.calls[group][-1] for rank, record in by_rank.items() if record.calls.get(group)}
    stuck = {rank: call for rank, call in last.items() if not call.ended}
    if not stuck:
        return
    members = set(last).union(*(record.members.get(group, frozenset()) for record in by_rank.values()))
    if len(by_rank) == 1 and not members - set(by_rank):
        return
    number = max(call.number for call in stuck.values())
    ahead = {rank: call for rank, call in stuck.items() if call.number == number}
    first, call = min(ahead.items())
    for rank, other in sorted(ahead.items()):
        if other.name != call.name or (_EQUAL.search(call.name) and other.sizes != call.sizes):
            yield (
                f"flight: differ: rank {first} is in {call} at {call.where}, "
                f"and rank {rank} in {other} at {other.where}"
            )
            return
    behind = sorted(rank for rank in members - set(ahead) if rank in by_rank)
    culprits = [rank for rank in behind if rank not in waiting or rank in stuck] or behind
    wait = f"{_ranks(sorted(ahead))} of {group} {'wait' if len(ahead) > 1 else 'waits'}"
    for rank in culprits[:_NAMED]:
        before = last.get(rank)
        came = f"its last collective was {before} at {before.where}" if before else "it entered none"
        now = _where(by_rank[rank].stack)
        there = f"in which {wait} at {call.where}"
        is_at = f"; it was at {now}" if now else ""
        yield f"flight: behind: rank {rank} has not entered {call}, {there}; {came}{is_at}"
    missing = sorted(members - set(by_rank))
    if missing:
        yield f"flight: none: {_ranks(missing)} left no record, and {wait} in {call} at {call.where}"
    elif not behind:
        yield f"flight: all: {_ranks(sorted(ahead))} are all in {call} at {call.where}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_NAMED])) + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def jobs_of(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the logs of each job by its number, "" if unknown.

    A folder may contain the logs of many jobs, distinguished by the number in a log's name. Logs that are
    given as files belong to one job. Raises UsageError for a path that does not exist or cannot be read.
    """
    logs: dict[str, list[str]] = {}
    every: list[str] = []
    for path in paths:
        files, folder = _files(path)
        every += files
        for file in files:
            logs.setdefault(job_number(Path(file).name) if folder else "", []).append(file)
    return logs if len(logs.keys() - {""}) > 1 else {"": every}


def job_number(name: str) -> str:
    """Return the job's number from its log's name (ddp_1234.out, slurm-1234_7.out, ddp.o1234), "" without one."""
    name = _PACKED.sub("", name)
    if match := _OF_PBS.search(name):
        return match[1]
    stem, _, kind = name.rpartition(".")
    if kind not in ("out", "err", "log", "txt"):
        return ""
    shortest = 1 if kind in ("out", "err") else _LONG
    matches = [match for match in _NUMBER.finditer(stem) if not _OF_NODES.search(stem[: match.start()])]
    numbers = [match[0] for match in matches if len(match[0]) >= shortest]
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
        parsed = (read_record(path) for path in records if not path.name.endswith(".stack"))
        yield f"{records[0].parent}/ (flight records)", merged([record for record in parsed if record])


def _files(path: str) -> tuple[list[str], bool]:
    """Return the log files at `path`, and whether it is a folder."""
    kind = "log"
    try:
        if path == STDIN or not Path(path).is_dir():
            if path != STDIN and not Path(path).exists():
                raise UsageError(f"there is no log {path}")
            return [path], False
        kind = "folder"
        files = sorted(str(entry) for entry in Path(path).iterdir() if entry.is_file())
        if any(_OF_RUN.search(file) for file in files):
            return [file for file in files if is_record(Path(file)) or _OF_POD.search(file)], True
    except OSError as error:
        raise UsageError(f"cannot read the {kind} {path}: {error.strerror}") from None
    if not files:
        raise UsageError(f"there are no logs in the folder {path}")
    return files, True


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
    """Seek `file` to the start line of its last pod; yield blocks of empty lines that replace the lines before it."""
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
    for quote, plain in _QUOTES if _QUOTED in text else ():
        text = text.replace(quote, plain)
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
