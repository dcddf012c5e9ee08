"""What a stream shows of running tasks: a live part on a terminal, elsewhere lines and a sign of life."""

from __future__ import annotations

import io
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.terminal import Recording, record

from envbuild.base.progress import Display, Task, _wrapped, display, reuse
from envbuild.base.text import human_time
from envbuild.cli import report as summary
from envbuild.verify.launch import Running, TrainingJob


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Screen(io.TextIOWrapper):
    """A stream that says that it is a terminal of 80 columns."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), "utf-8")

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Screen()


def passing(shown: Display, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1
        shown.tick()


def test_without_a_terminal_a_silent_step_is_named_every_15_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    shown = Display(stream, clock)
    with shown.task("building"), shown.task("resolving …"):
        passing(shown, clock, 46)
        shown.print("a message")
        passing(shown, clock, 14)
        assert stream.getvalue().endswith("a message\n")
        passing(shown, clock, 1)
    assert stream.getvalue().splitlines() == [
        "building",
        "resolving …",
        "resolving: 15 s",
        "resolving: 30 s",
        "resolving: 45 s",
        "a message",
        "resolving: 1 min 1 s",
    ]
    assert not shown.tick(), "nothing runs"


def test_without_a_terminal_a_transfer_tells_its_bytes() -> None:
    stream, clock = io.StringIO(), Clock()
    shown = Display(stream, clock)
    with shown.task("fetching", total=9_000_000, counts=True) as task:
        task.advance(3_000_000)
        passing(shown, clock, 15)
    assert stream.getvalue() == "fetching (9.0 MB)\nfetching: 15 s, 3.0 MB of 9.0 MB\n"


def test_a_step_that_was_told_is_not_printed_but_gives_signs_of_life() -> None:
    stream, clock = io.StringIO(), Clock()
    shown = Display(stream, clock)
    with shown.task("  layer: torch 2.7", printed=True):
        passing(shown, clock, 15)
    assert stream.getvalue() == "layer: torch 2.7: 15 s\n"


def test_quiet_prints_warnings_alone_and_verbose_the_time_of_each_step() -> None:
    for verbosity, expected in ((-1, "warning: w\n"), (1, "step\nm\nwarning: w\nstep (2.0 s)\n")):
        stream, clock = io.StringIO(), Clock()
        shown = Display(stream, clock)
        shown.verbosity = verbosity
        with shown.task("step"):
            clock.now += 2
            shown.print("m")
            shown.print("warning: w")
            shown.tick()
        assert stream.getvalue() == expected


@pytest.mark.parametrize("term", ["dumb", "unknown", ""])
def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    term: str, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    clock = Clock()
    shown = Display(screen, clock)
    with shown.task("step"):
        passing(shown, clock, 16)
    assert screen.text() == "step\nstep: 15 s\n"


def on_screen(screen: Screen, columns: int = 80) -> Recording:
    return Recording(0, columns, [(0.0, screen.text().replace("\n", "\r\n").encode())])


def test_a_terminal_shows_bytes_rate_time_left_and_notes_and_then_the_end(screen: Screen) -> None:
    clock = Clock()
    shown = Display(screen, clock)
    with shown.task("verifying", printed=True, note=lambda: "node 0: epoch 3/6\nnode 1: epoch 2/6"):
        with shown.task("fetching …", total=9_000_000, counts=True) as task:
            for _ in range(3):
                task.advance(1_000_000)
                passing(shown, clock, 1)
            lines = on_screen(screen).screens()[-1]
            assert [line[2:] for line in lines[:3]] == [
                f"verifying{'0:03':>69}",
                "node 0: epoch 3/6",
                "node 1: epoch 2/6",
            ]
            assert lines[3][2:] == f"fetching{'0:03':>70}"
            assert lines[4].split("━ ")[-1] == "3.0 MB of 9.0 MB  6 s left  1.0 MB/s"
        assert "fetching (3.0 MB in 3.0 s)" in on_screen(screen).screens()[-1]
    assert on_screen(screen).screens()[-1] == ["fetching (3.0 MB in 3.0 s)"], "the live part is gone"


def test_how_a_step_ended_is_said(screen: Screen) -> None:
    clock = Clock()
    shown = Display(screen, clock)
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), shown.task("step"):
            clock.now += 1
            shown.tick()
            raise error
    assert on_screen(screen).screens()[-1] == ["step (interrupted after 1.0 s)", "step (failed after 1.0 s)"]


@pytest.mark.parametrize("columns", [80, 60, 40, 20])
def test_no_line_is_wider_than_the_terminal(columns: int, screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    clock = Clock()
    shown = Display(screen, clock)
    long = "a title of many words " * 9
    with shown.task(long, note=lambda: long), shown.task("t" * 200, total=10**12, counts=True) as task:
        task.advance(10**11)
        passing(shown, clock, 3)
        shown.print(long)
    lines = [line for line in on_screen(screen, columns).lines() if "tttt" not in line or "…" in line]
    assert len(lines) > 12 and max(map(len, lines)) <= columns


def test_no_color_leaves_no_colour(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    clock = Clock()
    shown = Display(screen, clock)
    with shown.task("fetching", total=9, counts=True):
        passing(shown, clock, 1)
    assert "\x1b[3" not in screen.text() and "\x1b[1m" in screen.text()


def test_messages_of_threads_are_not_torn_by_the_live_part(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import threading, time
        from envbuild.base.progress import guard_streams
        guard_streams()
        from envbuild.base.progress import log, step
        def talk(number):
            for line in range(40):
                log(f"thread {number} says line {line} in one piece")
                time.sleep(0.02)
        with step("working", note=lambda: "a note"):
            threads = [threading.Thread(target=talk, args=(n,)) for n in range(3)]
            [one.start() for one in threads]
            [one.join() for one in threads]
            time.sleep(0.6)
        print("the result")
        """)
    )
    seen = record([sys.executable, script], rows=200)
    assert seen.returncode == 0 and b"\x1b[?25h" in seen.output, "the cursor is visible again"
    said = [line for line in seen.lines() if line.startswith("thread")]
    assert sorted(said) == sorted(f"thread {n} says line {i} in one piece" for n in range(3) for i in range(40))
    last = seen.screens()[-1]
    assert last[-2].startswith("working (") and last[-1] == "the result"
    assert not [line for line in last if "a note" in line or ("working" in line and "(" not in line)]


def test_the_rate_is_that_of_the_last_seconds() -> None:
    task = Task("t", 0.0, 100_000_000, counts=True)
    for second in range(1, 31):
        task.advance(1_000_000 if second <= 15 else 2_000_000)
        rate = task.rate(second)
    assert rate == 2_000_000
    assert task.figures(30.0, 100) == "45.0 MB of 100.0 MB  27 s left  2.0 MB/s"
    assert task.figures(30.0, 30) == "45.0 MB of 100.0 MB  27 s left"
    assert task.figures(30.0, 3) == "45.0 MB of 100.0 MB"


def test_a_duration_is_told_in_minutes_from_the_first_on() -> None:
    assert [human_time(s) for s in (0.4, 59.9, 60, 200)] == ["0 s", "59 s", "1 min 0 s", "3 min 20 s"]


@given(st.lists(st.text("ab/. ", min_size=0, max_size=60), max_size=8), st.integers(20, 100))
def test_wrapping_keeps_words_whole(parts: list[str], columns: int) -> None:
    message = "\n".join(parts)
    wrapped = _wrapped(message, columns)
    assert wrapped.split() == message.split()
    assert all(len(line) <= columns or len(line.split()) <= 1 for line in wrapped.splitlines())


def test_the_last_epoch_of_each_node_is_read_from_its_log(tmp_path: Path) -> None:
    line = "[RANK 0] Epoch {} | Batchsize: 32 | Steps: 16 | Loss: {}\n"
    log = ["rank table\n", line.format(0, 0.693147), line.format(1, 0.5), "Epoch 1 | Training snapshot saved at x\n"]
    (tmp_path / "train-node0.log").write_text("".join(log))
    running = Running(TrainingJob("train", ("6",), 10, 2, 1.0), "id", tmp_path, 0.0, None)  # type: ignore[arg-type]
    running.children += [None] * 10  # type: ignore[list-item]
    lines = running.epochs().splitlines()
    assert lines[:2] == ["node 0: epoch 2/6  loss 0.5", "node 1: starting"] and lines[-1] == "and 2 more nodes"


def test_the_summary_names_what_was_reused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x.sqsh").write_bytes(bytes(2000))
    new = [reuse("layers", name, there) for name, there in (("a", True), ("b", False), ("b", True))]
    assert new == [0, 1, 1], "what this run made is not reused when it is read again"
    made = {
        "path": str(tmp_path / "x.sqsh"),
        "target": "cpu-x86_64",
        "digest": f"sha256:{'0' * 64}",
        "receipt": None,
        "seconds": 70.2,
    }
    summary.summarise("enroot of r", made)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "built    enroot of r for cpu-x86_64" and max(map(len, lines[3:])) == 80
    assert [line.split(maxsplit=1)[1] for line in lines[3:]] == [
        "2.0 kB",
        f"sha256:{'0' * 64}",
        "not verified",
        "1 min 10 s",
        "1 of 2 layers",
    ]


def test_a_stream_has_one_display_for_all_threads() -> None:
    found: list[Display] = []
    threads = [threading.Thread(target=lambda: found.append(display())) for _ in range(3)]
    first = display()
    for thread in threads:
        thread.start()
        thread.join()
    assert found == [first] * 3
