"""A command on a terminal: what it wrote and when, and the screen that its user saw."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import IO

import pyte


@dataclass(frozen=True)
class Recording:
    """Exit code and, of a terminal `columns` wide, the pieces of output with their times, from the start on."""

    returncode: int
    columns: int
    pieces: Sequence[tuple[float, bytes]]

    @property
    def longest_pause(self) -> float:
        """The longest time, in seconds, without output after the first."""
        return max(after - before for before, after in pairwise(when for when, _ in self.pieces))

    @property
    def output(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def screens(self) -> Sequence[list[str]]:
        """The lines on a screen of 50 lines, after each piece of output."""
        screen, stream = _screen(self.columns)
        shown = []
        for _, piece in self.pieces:
            stream.feed(piece)
            shown.append([line.rstrip() for line in screen.display if line.strip()])
        return shown

    def lines(self) -> list[str]:
        """Every line that was written, those that were erased too, without the commands to the terminal."""
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", re.sub(r"\x1b\[[0-9;]*m", "", self.output.decode()))
        return [line for line in re.split(r"[\r\n]+", text) if line.strip()]


def record(
    line: Sequence[str | Path],
    columns: int = 80,
    rows: int = 24,
    *,
    folder: Path | None = None,
    env: Mapping[str, str] = os.environ,
    stdout: IO[bytes] | None = None,
) -> Recording:
    """Run a command whose stderr, and stdout unless that goes to a file, is a terminal of `columns` × `rows`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    plain = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    plain |= {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
    begun = time.monotonic()
    child = subprocess.Popen(
        line,
        stdin=subprocess.DEVNULL,
        stdout=stdout or theirs,
        stderr=theirs,
        cwd=folder,
        env={"TERM": "xterm-256color", **plain},
    )
    os.close(theirs)
    pieces = []
    with suppress(OSError):  # when the other end is closed
        while piece := os.read(ours, 1 << 16):
            pieces.append((time.monotonic() - begun, piece))
    os.close(ours)
    return Recording(child.wait(), columns, pieces)


def _screen(columns: int) -> tuple[pyte.Screen, pyte.ByteStream]:
    screen = pyte.Screen(columns, 50)
    return screen, pyte.ByteStream(screen)


def _colour(name: str) -> str | None:
    """The colour's name in rich, for pyte's: "default", "brown" or hexadecimal."""
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return {"default": None, "brown": "yellow"}.get(name, name.replace("bright", "bright_"))


def picture(recording: Recording, title: str, until: int | None = None) -> str:
    """The screen after the pieces `until` there as SVG. It loads nothing from other servers."""
    from rich.console import Console
    from rich.style import Style
    from rich.text import Text

    screen, stream = _screen(recording.columns)
    for _, piece in recording.pieces[:until]:
        stream.feed(piece)
    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, width=recording.columns, record=True, force_terminal=True)
        last = max(number for number, line in enumerate(screen.display) if line.strip())
        for number in range(last + 1):
            text = Text()
            cells = (screen.buffer[number][column] for column in range(recording.columns))
            for (colour, bold), run in groupby(cells, lambda cell: (cell.fg, cell.bold)):
                text.append("".join(cell.data for cell in run), Style(color=_colour(colour), bold=bold))
            console.print(text, soft_wrap=True)
        console.print()  # the picture's clip cuts the underscores of its last line
    svg = console.export_svg(title=title, unique_id="terminal")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"
