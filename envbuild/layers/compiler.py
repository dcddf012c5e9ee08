"""Choice of the host's interpreter that compiles an image's bytecode."""

from __future__ import annotations

import os
import sys
from importlib.util import MAGIC_NUMBER

from envbuild import process
from envbuild.environment import Environment
from envbuild.errors import HostError
from envbuild.layers.bytecode import Compiler, find_compiler


def compiler_for(python: str, environment: Environment) -> Compiler:
    """Return an interpreter of version `python` ("3.11"): envbuild's own, else one that uv finds.

    Raises HostError when there is none.
    """
    if ".".join(map(str, sys.version_info[:2])) == python and sys.implementation.cache_tag:
        version = ".".join(map(str, sys.version_info[:3]))
        return Compiler(sys.executable, version, sys.implementation.cache_tag, MAGIC_NUMBER)
    done = process.run(
        [environment.uv, "python", "find", "--no-project", "--no-config", python],
        env=environment.uv_environment(),
        check=False,
    )
    path = done.stdout.strip()
    if done.returncode != 0 or not os.path.exists(path):
        raise HostError(
            f"no Python {python} on this host to make the image's bytecode with",
            f"install Python {python} (`uv python install {python}`), or build with --no-bytecode: every "
            "start in the container is slower then",
        )
    return find_compiler(path)
