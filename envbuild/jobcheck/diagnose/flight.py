"""Where the ranks of a hung job were: the files of torch's flight recorder, merged into lines for the rules.

A record is a pickle of plain values that a rank wrote (ddp_train/flight.py, or NCCL's watchdog); its file's name ends
with the rank. Sources: torch, torch/csrc/distributed/c10d/FlightRecorderDetail.hpp and torch/distributed/
flight_recorder/components, which merges records, too, and needs torch.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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


class _Unpickler(pickle._Unpickler):
    """A reader for pickles of plain values. Any other opcode raises KeyError."""

    dispatch: ClassVar[Any] = {code: pickle._Unpickler.dispatch[code] for code in _OPCODES}


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that a rank entered: its number in the process group, from 1."""

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
    """What one rank recorded: its calls by process group, the ranks of each group, its stack (FILE:LINE in NAME)."""

    rank: int
    calls: Mapping[str, Sequence[Call]]
    members: Mapping[str, frozenset[int]]
    stack: tuple[str, ...]


def is_record(path: Path) -> bool:
    """Return whether `path` is a file of a flight recorder, or the stack beside one."""
    if path.name.endswith(".stack"):
        return _RANK.search(path.stem) is not None
    if not _RANK.search(path.name) or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False  # whoever reads it as a log says why


def read_record(path: Path) -> RankRecord | None:
    """Return the record in the file `path`, None if it is none. Raises OSError."""
    found = _RANK.search(path.name)
    with path.open("rb") as file:
        data = file.read(_LARGEST + 1)
    if found is None or len(data) > _LARGEST:
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
        for name, one in value.get("pg_config", {}).items():
            ranks = re.findall(r"\d{1,7}", _text(one.get("ranks", "")))
            key = _key(one.get("name") or name or _FIRST, one.get("desc") or _ALL)
            members[key] = frozenset(map(int, ranks))
    except _DAMAGED:
        return None
    return RankRecord(int(found[1]), calls, members, stack)


def _stack(path: Path) -> tuple[str, ...]:
    try:
        text = path.with_name(path.name + ".stack").read_text(encoding="utf-8", errors="replace")[:100_000]
    except OSError:
        return ()
    return tuple(line[:500] for line in text.splitlines()[:100])


def _text(value: object) -> str:
    """Return `value`, a string. Lists are refused: shown as text, nested ones may be larger than memory."""
    if not isinstance(value, str):
        raise TypeError
    return value


def _key(name: object, description: object) -> str:
    """Return the name of a process group in messages, unique in the job: several may have one description."""
    name, description = _text(name)[:80], _text(description)[:80]
    return description if name == _FIRST else f"{description} {name}"


def _call(entry: Mapping[str, Any], failed: bool) -> Call:
    sizes = [[int(one) for one in size[:8]] for size in entry.get("input_sizes", [])[:5] if size]
    shown = ", ".join("×".join(map(str, size)) for size in sizes[:4]) + (", …" if len(sizes) > 4 else "")
    kind = "".join(f" {_text(one)}" for one in entry.get("input_dtypes", [])[:1] if shown)
    # gloo marks the end alone: `retired`.
    ended = not failed and (bool(entry.get("retired")) or entry.get("state") == "completed")
    number = int(entry.get("collective_seq_id", entry.get("seq_id", 0)))
    frames = entry.get("frames", [])[:100]
    where = _where([f"{_text(one['filename'])}:{int(one['line'])} in {_text(one['name'])}" for one in frames])
    return Call(
        number, _text(entry["profiling_name"])[:80], f"{shown}{kind}"[:120], where[:300] or "an unknown line", ended
    )


def _where(frames: Sequence[str]) -> str:
    """Return the first frame, from the innermost, that is not of torch."""
    return next((one for one in frames if not _OWN.search(one.rpartition(":")[0] or one)), frames[0] if frames else "")


def merged(records: Iterable[RankRecord]) -> Iterator[str]:
    """Yield a line for each thing that the records show: `flight: KIND: TEXT`, KIND being behind, differ, all or none.

    In a process group, the ranks that wait in the collective with the highest number wait for the others. Ranks that
    are late in one group because they wait in another one are left out.
    """
    by_rank = {one.rank: one for one in records}
    waiting = {
        rank for rank, one in by_rank.items() if any(calls and not calls[-1].ended for calls in one.calls.values())
    }
    for group in dict.fromkeys(name for one in by_rank.values() for name in one.calls):
        yield from _of_group(group, by_rank, waiting)


def _of_group(group: str, by_rank: Mapping[int, RankRecord], waiting: set[int]) -> Iterator[str]:
    last = {rank: one.calls[group][-1] for rank, one in by_rank.items() if one.calls.get(group)}
    stuck = {rank: call for rank, call in last.items() if not call.ended}
    if not stuck:
        return
    members = set(last).union(*(one.members.get(group, frozenset()) for one in by_rank.values()))
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
