"""Every change of the file system fails once: the whole walk, by hand.

    cd tests && python -m lab.fault_walk [CASE …] [--faults EIO,kill,read:EIO] [--step 10] [--folder /dev/shm]

It prints, for each case and fault, how many calls failed and what came of it, then each broken promise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from lab.fault_cases import CASES, lab, missing
from lab.faults import FAULTS


def main() -> int:
    """Walk the cases of the command line; return 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--step", type=int, default=1, help="only every STEP-th call")
    parser.add_argument("--first", type=int, default=1, help="begin with this call")
    parser.add_argument("--folder", type=Path, help="where the lab is made")
    given = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="fault-walk-", dir=given.folder) as folder, lab(Path(folder)) as here:
        for name in given.cases or CASES:
            walk = here.walk(CASES[name])
            for fault in given.faults.split(","):
                started = time.monotonic()
                found: Counter[str] = Counter()
                calls = walk.calls_for(fault)
                for number in range(given.first, calls + 1, given.step):
                    outcome = walk.try_at(fault, number)
                    found[outcome.result] += 1
                    for text in outcome.wrong:
                        ran = outcome.ran
                        tool = " of a tool" if ran.tool else ""
                        print(f"! {name} {fault} {number}: {ran.call}{tool} {ran.path}: {text}", flush=True)
                    wrong += bool(outcome.wrong)
                results = ", ".join(f"{count} {result}" for result, count in sorted(found.items()))
                tried, seconds = sum(found.values()), time.monotonic() - started
                print(f"{name} {fault}: {tried} of {calls} calls in {seconds:.0f} s: {results}", flush=True)
    print(f"{wrong} broken promises")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
