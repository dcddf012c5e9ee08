"""Scripts that an installer generates for a wheel's entry points.

Source: PyPA "Entry points specification".
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator

from envbuild.errors import BuildError

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
            script = _SCRIPT.format(
                python=interpreter, module=match[1], first=match[2].partition(".")[0], function=match[2]
            )
            yield name, script.encode()
