"""Fuzz every reader by hand, as long as wanted; tests/unit/test_fuzz.py does it in CI with fewer inputs.

    python tests/lab/fuzz.py --inputs 1000000 --processes 2
    python tests/lab/fuzz.py --reader layer --reader wheel --inputs 50000 --keep /tmp/faults
    python tests/lab/fuzz.py --reader layer --number 1234 --keep /tmp/faults

Input NUMBER of a reader is the same on every machine. Exits with 1 for a fault: an exception that is not documented,
an input that takes over 60 s, or a peak of over 500 MB of memory in one process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab import fuzz_readers

_LONGEST_S = 60
_MOST_MB = 500


@dataclass
class Tally:
    """What one process saw of one reader: `slowest` is (seconds, number), `grown` (MB of the peak, number)."""

    reader: str
    inputs: int = 0
    seconds: float = 0.0
    slowest: tuple[float, int] = (0.0, 0)
    grown: tuple[float, int] = (0.0, 0)
    faults: dict[str, list[int]] = field(default_factory=dict)


def peak_mb() -> float:
    """The largest memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def _too_long(_: int, __: FrameType | None) -> None:
    raise TimeoutError(f"over {_LONGEST_S} s")


def name_of(error: Exception) -> str:
    """The exception, and the line of envbuild that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if "/envbuild/" in one.filename and "site-packages" not in one.filename] or frames
    return f"{type(error).__name__} at {own[-1].filename.rpartition('/envbuild/')[2]}:{own[-1].lineno}: {error!s:.100}"


def run(reader: str, numbers: Iterable[int], keep: Path | None, until: float) -> Tally:
    """Let one reader read the inputs `numbers`."""
    tally = Tally(reader)
    signal.signal(signal.SIGALRM, _too_long)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        for number in numbers:
            if time.monotonic() > until:
                break
            data, before = fuzz_readers.input_of(reader, number), peak_mb()
            start = time.process_time()
            signal.alarm(_LONGEST_S)
            error = fuzz_readers.fault_of(reader, data, folder)
            signal.alarm(0)
            took, now = time.process_time() - start, peak_mb()
            tally.inputs += 1
            tally.seconds += took
            tally.slowest = max(tally.slowest, (took, number))
            if now > before:
                tally.grown = max(tally.grown, (now, number))
            if now > _MOST_MB >= before:
                error = error or MemoryError(f"a peak of {now:.0f} MB")
            if error is not None:
                tally.faults.setdefault(name_of(error), []).append(number)
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / f"{reader}--{number}").write_bytes(data)
            if number % 500 < 2:  # what readers leave, such as blobs, must not slow the next ones
                shutil.rmtree(folder)
                folder.mkdir()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tally


def work(arguments: tuple[dict[str, int], int, int, int, Path | None, float]) -> list[Tally]:
    counts, process, processes, first, keep, until = arguments
    warnings.simplefilter("error")  # a warning with a line of code is no message for users either
    return [run(name, range(first + process, first + count, processes), keep, until) for name, count in counts.items()]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="of all readers together")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--reader", action="append", choices=list(fuzz_readers.READERS), help="only this one; several times"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--number", type=int, help="only this input")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--keep", type=Path, help="folder for the inputs that show a fault")
    given = parser.parse_args(words)
    names = given.reader or list(fuzz_readers.READERS)
    if given.number is not None:
        given.first, given.inputs = given.number, len(names)
    # Readers get inputs in proportion to those in CI.
    total = sum(fuzz_readers.READERS[name].examples for name in names)
    counts = {name: -(-given.inputs * fuzz_readers.READERS[name].examples // total) for name in names}
    began, until = time.monotonic(), time.monotonic() + given.seconds
    jobs = [(counts, one, given.processes, given.first, given.keep, until) for one in range(given.processes)]
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        found = pool.map(work, jobs)
    faults = 0
    for rows in zip(*found, strict=True):
        inputs, seconds = sum(row.inputs for row in rows), sum(row.seconds for row in rows)
        slowest, grown = max(row.slowest for row in rows), max(row.grown for row in rows)
        print(
            f"{rows[0].reader:28} {inputs:8} inputs {inputs / max(seconds, 1e-9):8.0f}/s"
            f"   slowest {slowest[0]:7.3f} s (#{slowest[1]})   peak {grown[0]:4.0f} MB (#{grown[1]})"
        )
        for what, numbers in {what: n for row in rows for what, n in row.faults.items()}.items():
            faults += len(numbers)
            print(f"    FAULT {what}: #{', #'.join(map(str, numbers[:5]))}{' …' if len(numbers) > 5 else ''}")
    done, took = sum(row.inputs for rows in found for row in rows), time.monotonic() - began
    peak = max(row.grown[0] for rows in found for row in rows)
    print(f"{done} inputs in {took:.0f} s ({done / took:.0f}/s), {faults} faults, at most {peak:.0f} MB in a process")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
