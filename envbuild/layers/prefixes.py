"""Replacement of the placeholder prefix in a package's files by the prefix of an environment.

Source: conda's "Package specification", has_prefix; details follow rattler, with which the tests compare. In a text,
each placeholder is replaced. In a binary file, each placeholder in a NUL-terminated string is replaced, and the string
is padded with NULs to its old length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from envbuild.errors import BuildError

# A longer string is an error: real ones are paths and lists of paths.
_MAX_STRING = 16 << 20


def replaced_text(chunks: Iterable[bytes], old: bytes, new: bytes) -> Iterator[bytes]:
    """Yield `chunks` with `new` in place of each `old`."""
    held = b""
    for chunk in chunks:
        # A possible start of another placeholder is held back until more data arrives.
        *whole, held = (held + chunk).split(old)
        for piece in whole:
            yield piece + new
        keep = _start_length(held, old)
        if len(held) > keep:
            yield held[: len(held) - keep]
            held = held[len(held) - keep :]
    yield held


def replaced_binary(chunks: Iterable[bytes], old: bytes, new: bytes, where: str = "") -> Iterator[bytes]:
    """Yield `chunks` with `new` in place of each `old`, in strings that end at a NUL or at the end of the file.

    The length stays the same. Raises BuildError, naming `where`, when `new` is longer than `old`, or a string with the
    placeholder exceeds 16 MiB.
    """
    if len(new) > len(old):
        raise BuildError(f"{where}: its placeholder for the prefix has only {len(old)} bytes")
    held = b""
    for chunk in chunks:
        held += chunk
        done = 0
        while (at := held.find(old, done)) >= 0:
            end = held.find(b"\0", at + len(old))
            if end < 0:
                break
            yield held[done:at]
            yield _padded(held[at:end], old, new)
            done = end
        # The last bytes may be the start of a placeholder.
        end = at if at >= 0 else max(done, len(held) - _start_length(held, old))
        yield held[done:end]
        held = held[end:]
        if len(held) > _MAX_STRING:
            raise BuildError(f"{where}: a string of more than {_MAX_STRING} bytes with the prefix in it")
    at = held.find(old)
    yield held if at < 0 else held[:at] + _padded(held[at:], old, new)


def _padded(string: bytes, old: bytes, new: bytes) -> bytes:
    return string.replace(old, new).ljust(len(string), b"\0")


def _start_length(data: bytes, old: bytes) -> int:
    """Return the length of the longest end of `data` that is a proper start of `old`."""
    tail = data[1 - len(old) :] if len(old) > 1 else b""
    for match in re.finditer(re.escape(old[:1]), tail):
        if old.startswith(tail[match.start() :]):
            return len(tail) - match.start()
    return 0
