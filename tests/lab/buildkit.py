"""docker's command line with BuildKit: part of it in Docker 19 to 22, the plugin buildx since then."""

from __future__ import annotations

import os
import re
import shutil
import subprocess


def find_docker() -> str:
    """Return the first `docker` in PATH that can run BuildKit. Raises FileNotFoundError if there is none."""
    for folder in os.get_exec_path():
        program = shutil.which("docker", path=folder)
        if program is None:
            continue
        if subprocess.run([program, "buildx", "version"], capture_output=True).returncode == 0:
            return program
        text = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"version (\d+)\.", text)
        if version and 19 <= int(version[1]) <= 22:
            return program
    raise FileNotFoundError("no docker with BuildKit is in PATH; Debian's packages: docker.io, docker-buildx")
