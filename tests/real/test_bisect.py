"""`envbuild bisect` with real environments of tiny wheels: a failing one, a slow one, two that only fail together."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from lab.wheels import make_recipe, make_wheel

from envbuild.recipe.targets import host_arch

from .conftest import Command

NAMES = ("left", "pinned", "pins", "planted", "right", "slow", "steady")
BROKEN, SLEEPY = b"raise RuntimeError('planted')\n", b"import time\ntime.sleep(0.5)\n"
SLOWER = "python -c 'import time; t = time.time(); import slow; 0.5 > time.time() - t or exit(\"slow to import\")'"
PAIR = b"import left\nif left.__version__ == '2.0': raise RuntimeError('pair')\n"


@pytest.fixture
def locks(envbuild: Command) -> tuple[Path, Path]:
    """Two locks of seven packages, of which two move together."""
    files = {"planted": BROKEN, "slow": SLEEPY, "right": PAIR}
    for version in ("1.0", "2.0"):
        for name in NAMES:
            own = {f"{name}/__init__.py": files[name]} if version == "2.0" and name in files else None
            if name == "left":
                own = {"left/__init__.py": f"__version__ = '{version}'\n".encode()}
            requires = [f"pinned=={version}"] if name == "pins" else []
            make_wheel(envbuild.folder / "wheels", name, version, requires=requires, files=own)
    envbuild.env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(envbuild.folder / "wheels")}
    found = []
    for version in ("1.0", "2.0"):
        pins = [f"{name}=={version}" for name in NAMES]
        place = make_recipe(envbuild.folder / version, "tiny", pins)
        target = f"cpu-{host_arch()}"
        done = envbuild("lock", place, "--target", target, "--wheels")
        assert done.returncode == 0, done.stderr
        found.append(place / f"{target}.requirements.txt")
    return found[0], found[1]


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_planted_wheels_are_found(envbuild: Command, locks: tuple[Path, Path]) -> None:
    def found(metric: str, *more: str) -> dict[str, Any]:
        told = envbuild.json("bisect", *locks, "--metric", metric, "--offline", *more)
        assert told["reproduced"] and told["packages"] == 7 and told["groups"] == 6
        return told

    told = found("python -c 'import planted'")
    assert told["culprits"] == [[{"name": "planted", "good": "1.0", "bad": "2.0"}]]
    assert told["alone"] is True and told["builds"] <= told["bound"] == 5
    assert "RuntimeError: planted" in told["bad"]["evidence"]["output"] and told["good"]["evidence"]["exit"] == 0
    done = envbuild("bisect", *locks, "--metric", SLOWER, "--offline")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("found: slow 1.0 -> 2.0\n  bad with these alone changed\n  good without: ")
    assert "bad (exit 1, output slow to import)" in done.stdout
    told = found("python -c 'import right'")
    assert {one["name"] for group in told["culprits"] for one in group} == {"left", "right"} and told["alone"] is True
    assert not list((Path(envbuild.env["ENVBUILD_STORE"]) / "bisect").iterdir())
    # Ctrl-C leaves nothing.
    child = envbuild.start("bisect", *locks, "--metric", "echo begun > begun; sleep 60", "--offline")
    wait_for(envbuild.folder / "begun")
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 130 and not list((Path(envbuild.env["ENVBUILD_STORE"]) / "bisect").iterdir())
    child.communicate()
    # Locks that do not differ by the metric, and a metric that is none.
    done = envbuild("bisect", locks[0].parent, locks[1].parent, "--metric", "python -c 'import pins'", "--offline")
    assert done.returncode == 5 and "do not differ" in done.stderr and not done.stdout
    done = envbuild("bisect", *locks, "--metric", "no-such-program", "--offline")
    assert done.returncode == 2 and "cannot be run (exit 127)" in done.stderr
