"""rattler's installer in a child process that exits without Python's clean-up.

In one of twenty-five runs, Python's exit crashes while threads of rattler's runtime still finish (py-rattler 0.28:
segmentation fault, or abort, after all work was done). A child that exits by os._exit avoids that. A child process can
also be stopped at once, whereas threads of envbuild's own process would go on writing.

Run as a module, it takes the path of a job: JSON with `records` (index, size, sha256, md5, subdir, depends, fn,
url, channel of each package), `staged`, `prefix`, `pkgs` and `copying`. It prints `unpacked NAME` for each
package that is in the cache, then `done`, or `failed` and the reason.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import envbuild
from envbuild.base import process

_saying = threading.Lock()


def run_job(job: Path, on_line: Callable[[str], None]) -> int:
    """Run the job in the file `job` in a child process, and call `on_line` with each line that it prints.

    Returns the child's exit status.
    """
    home = os.fspath(Path(envbuild.__file__).parents[1])
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", __name__, str(job)]
    return process.follow(command, {**process.of_caller(os.environ), "PYTHONPATH": path, "PYTHONUTF8": "1"}, on_line)


def main(job: str) -> None:
    """Run the job and exit the process."""
    data = json.loads(Path(job).read_bytes())
    from rattler.exceptions import InstallerError

    try:
        asyncio.run(_install(data))
        say("done")
    except (InstallerError, OSError, ValueError) as error:
        say("failed " + " ".join(str(error).split()))
    os._exit(0)


def say(line: str) -> None:
    """Print a line in one write: threads of rattler's runtime may report packages while an error is printed."""
    with _saying:
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


async def _install(data: dict[str, Any]) -> None:
    from rattler import Config, InstallerReporter, install

    names: list[str] = []

    class Reporter(InstallerReporter):  # all other methods do nothing
        def on_populate_cache_start(self, operation: int, package_name: str) -> int:
            names.append(package_name)
            return len(names) - 1

        def on_populate_cache_complete(self, cache_entry: int) -> None:
            say(f"unpacked {names[cache_entry]}")

    copying = "allow-hard-links = false\nallow-ref-links = false\n"
    await install(
        [_record(row) for row in data["records"]],
        target_prefix=data["staged"],
        cache_dir=Path(data["pkgs"]),
        installed_packages=[],
        execute_link_scripts=False,
        show_progress=False,
        reporter=Reporter(),  # type: ignore[abstract]
        alternative_target_prefix=data["prefix"],
        config=Config.from_toml(copying if data["copying"] else ""),
    )


def _record(row: dict[str, Any]) -> Any:
    from rattler import PackageRecord, RepoDataRecord

    record = PackageRecord.from_index_json(row["index"], row["size"], row["sha256"], row["md5"])
    record.subdir = row["subdir"]
    if row["depends"]:
        record.depends = row["depends"]
    return RepoDataRecord(record, row["fn"], row["url"], row["channel"])


if __name__ == "__main__":
    main(*sys.argv[1:])
