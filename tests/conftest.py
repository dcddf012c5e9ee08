"""Settings for all tests."""

import fcntl
import gc
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import recipe_python
from disk import spread
from hypothesis import HealthCheck, settings

from envbuild import data

# A script that starts the tests in the background has them ignore Ctrl-C, and so would every program that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are not timed: a busy machine must not fail a property. In CI they are the same each time, so that a
# change is judged by itself; elsewhere they are new each time, so that the properties keep being explored.
settings.register_profile(
    "envbuild",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# Of `tests/run --fast`.
settings.register_profile("fast", settings.get_profile("envbuild"), max_examples=25)
settings.load_profile("envbuild")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect in one worker before the others: on a fresh machine, each would compile all modules itself."""
    with Path(__file__).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        return (yield)


def pytest_collection_finish() -> None:
    """Keep tests and modules, which live until the end, out of garbage collections: a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _folders_far_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    spread(base, *([base.parent] if "PYTEST_XDIST_WORKER" in os.environ else []))


@pytest.fixture
def more_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Add rows to a table of envbuild/data for one test: called with its name and the text of the rows."""
    folder = shutil.copytree(Path(data.__file__).parent, tmp_path / "data")
    monkeypatch.setattr(data, "_FOLDER", folder)

    def add(name: str, text: str) -> None:
        with (folder / f"{name}.toml").open("a", encoding="utf-8") as table:
            table.write(text)
        data.load_table.cache_clear()

    yield add
    data.load_table.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a test that failed for want of Python 3.11 as skipped, on a host that has none."""
    report = yield
    if report.failed and recipe_python.is_missing(f"{report.longreprtext}{report.capstderr}"):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {recipe_python.MISSING}")
    return report


def _need(tool: str, package: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not on PATH (Debian: {package})")


@pytest.fixture
def compiler() -> None:
    """Skip the test where there is no C compiler; tests/run without arguments installs it."""
    _need("gcc", "gcc libc6-dev")
    _need("nm", "binutils")


@pytest.fixture
def openssh() -> None:
    """Skip the test where OpenSSH's programs are missing; tests/run without arguments installs them."""
    _need("ssh-keygen", "openssh-client")
    _need("ssh-agent", "openssh-client")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the files that each toy of tests/unit/test_extending.py had to change."""
    for report in terminalreporter.stats.get("", []):  # of set-ups and teardowns
        for name, files in report.user_properties:
            if name == "files of an addition" and report.when == "teardown":
                test = report.nodeid.rpartition("::")[2]
                terminalreporter.write_line(f"{test}: {len(files)} files: {', '.join(files)}")
