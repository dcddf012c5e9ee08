"""Files that an installer adds to those of a wheel: scripts of entry points, INSTALLER and RECORD.

Sources: "Entry points specification" and "Recording installed projects" of the PyPA.
"""

from __future__ import annotations

import base64
import configparser
import csv
import io
import re
from collections.abc import Iterable, Iterator

from envbuild.errors import BuildError

INSTALLER = b"envbuild\n"
_VALUE = re.compile(r"([\w.]+)\s*:\s*([\w.]+)\s*(?:\[.*\])?\s*")
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f/\\]")
_SCRIPT = """#!{python}
import sys
from {module} import {first}
if __name__ == "__main__":
    sys.exit({function}())
"""


def entry_point_scripts(text: str, interpreter: str, where: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the console and GUI scripts of an entry_points.txt.

    `interpreter` is the path after `#!`. Raises BuildError, naming `where`, for a malformed file, and for a script
    whose name leads to another folder or whose entry point names no function.
    """
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise BuildError(f"{where}: entry_points.txt: {error}") from None
    for section in ("console_scripts", "gui_scripts"):
        for name, value in parser.items(section) if parser.has_section(section) else ():
            match = _VALUE.fullmatch(value)
            if not match or name in (".", "..") or _FORBIDDEN.search(name):
                raise BuildError(f"{where}: entry point {name!r} = {value!r}")
            module, function = match.groups()
            first = function.partition(".")[0]
            script = _SCRIPT.format(python=interpreter, module=module, first=first, function=function)
            yield name, script.encode()


def record_row(digest: bytes, size: int) -> tuple[str, str]:
    """Return (hash, size) of a file as RECORD has them, from its sha256."""
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}", str(size)


def render_record(rows: Iterable[tuple[str, str, str]], dist_info: str) -> bytes:
    """Return the RECORD in the folder `dist_info` with the rows (path relative to site-packages, hash, size)."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(sorted([*rows, (f"{dist_info}/RECORD", "", "")]))
    return text.getvalue().encode()
