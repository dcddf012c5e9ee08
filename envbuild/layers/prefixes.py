"""The prefix of an environment put into a package's files, in place of what its builder wrote.

Source: conda's "Package specification", has_prefix; conda's own order of work is that of the tests' oracle.
Text: each placeholder is replaced. Binary: so are those in a string that ends with NUL, which keeps its length,
filled up with NULs at its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from envbuild.errors import BuildError

# A string longer than this is none: programs' strings are paths and lists of paths.
_MAX_STRING = 16 << 20


def replaced_text(
    chunks: Iterable[bytes], old: bytes, new: bytes, where: str = ""
) -> Iterator[bytes]:
    """`chunks`, with `new` for each `old`; `where` is for an error, of which there is none."""
    held = b""
    for chunk in chunks:
        # What may be the start of one more stays until its rest has come.
        *whole, held = (held + chunk).split(old)
        for piece in whole:
            yield piece + new
        keep = _start_length(held, old)
        if len(held) > keep:
            yield held[: len(held) - keep]
            held = held[len(held) - keep :]
    yield held


def replaced_binary(
    chunks: Iterable[bytes], old: bytes, new: bytes, where: str = ""
) -> Iterator[bytes]:
    """`chunks`, as long as before, with `new` for each `old` in strings that a NUL or the file's end closes.

    Raises BuildError, naming `where`, when `new` is longer than `old`, or a string has no end.
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
        if at < 0:
            # The end may be the start of a placeholder.
            end = max(done, len(held) - _start_length(held, old))
            yield held[done:end]
        else:
            yield held[done:at]
            end = at
        held = held[end:]
        if len(held) > _MAX_STRING:
            raise BuildError(
                f"{where}: a string of more than {_MAX_STRING} bytes with the prefix in it"
            )
    at = held.find(old)
    yield held if at < 0 else held[:at] + _padded(held[at:], old, new)


def _padded(string: bytes, old: bytes, new: bytes) -> bytes:
    return string.replace(old, new).ljust(len(string), b"\0")


def _start_length(data: bytes, old: bytes) -> int:
    """How many bytes at the end of `data` are a start of `old`."""
    tail = data[-(len(old) - 1) :] if len(old) > 1 else b""
    for match in re.finditer(re.escape(old[:1]), tail):
        if old.startswith(tail[match.start() :]):
            return len(tail) - match.start()
    return 0
