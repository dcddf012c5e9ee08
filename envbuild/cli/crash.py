"""The last handler of errors: a report file about a fault of envbuild itself."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback

from envbuild import __version__
from envbuild.base.masking import HIDDEN, is_secret, looks_secret, masked_forms, masked_words
from envbuild.base.progress import clean, log

# EX_SOFTWARE of sysexits.h.
EXIT_CODE = 70
# Shorter values are words that stand everywhere in a traceback.
_SHORTEST = 4


def report(fault: BaseException) -> int:
    """Write a report about `fault` to a file in the temporary folder, print its path on one line, return EXIT_CODE.

    The report holds versions, the command line and the traceback, with secrets masked, and no variables of the
    environment. It goes to stderr if the file cannot be written.
    """
    lines = traceback.format_exception(fault)
    text = _without_secrets(
        f"envbuild {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"command: {' '.join(masked_words(sys.argv))}\n\n{''.join(lines)}"
    )
    kind = type(fault).__name__
    try:
        handle, name = tempfile.mkstemp(prefix="envbuild-report-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
    except OSError as error:
        log(f"{text}\nerror: {kind}, a fault of envbuild; the report above could not be written to a file: {error}")
        return EXIT_CODE
    log(f"error: {kind}, a fault of envbuild itself; please report it with the file {name}")
    return EXIT_CODE


def _without_secrets(text: str) -> str:
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and (is_secret(name, value) or looks_secret(value)):
            text = text.replace(value, HIDDEN)
    return clean(masked_forms(text))
