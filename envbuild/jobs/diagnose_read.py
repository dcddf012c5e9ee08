"""The lines of logs: files, compressed ones, standard input. Bad bytes and endless lines do no harm."""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from envbuild.errors import UsageError

STDIN = "-"
# A progress bar may write megabytes without a newline.
_LONGEST = 1 << 16


def read_logs(paths: Sequence[str]) -> Iterator[tuple[str, Iterator[str]]]:
    """(name, lines) of each log, read while they are walked through. "-" is standard input; a folder stands for the
    files in it, by name.

    Raises UsageError for what is not there or cannot be read.
    """
    for path in _files(paths):
        name = "standard input" if path == STDIN else path
        yield name, _lines(path)


def _files(paths: Sequence[str]) -> list[str]:
    files: list[str] = []
    for path in paths:
        if path != STDIN and Path(path).is_dir():
            found = sorted(str(one) for one in Path(path).iterdir() if one.is_file())
            if not found:
                raise UsageError(f"there are no logs in the folder {path}")
            files += found
        elif path == STDIN or Path(path).exists():
            files.append(path)
        else:
            raise UsageError(f"there is no log {path}")
    return files


def _lines(path: str) -> Iterator[str]:
    try:
        if path == STDIN:
            yield from _decoded(sys.stdin.buffer)
            return
        with _opened(Path(path)) as file:
            yield from _decoded(file)
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read the log {path}: {reason}") from None


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        begin = file.read(6)
    # By what is in them, whatever they are called.
    if begin.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if begin.startswith(b"BZh"):
        return bz2.open(path, "rb")
    if begin.startswith(b"\xfd7zXZ\x00"):
        return lzma.open(path, "rb")
    return path.open("rb")


def _decoded(file: IO[bytes]) -> Iterator[str]:
    """Whole lines, of a longer one its beginning and its end."""
    while piece := file.readline(_LONGEST):
        line = piece
        while not piece.endswith(b"\n") and (piece := file.readline(_LONGEST)):
            # What a progress bar left on the screen is at the end.
            line = line[:_LONGEST] + piece
        yield line.decode("utf-8", "replace").rstrip("\r\n")
