"""Say which Python interpreters there are when the wanted one is not."""

from __future__ import annotations

import json

from envbuild import process
from envbuild.environment import Environment
from envbuild.errors import HostError


def explain_missing(wanted: str, environment: Environment, said: str) -> HostError:
    """The error for an interpreter that uv did not find, listing those that it did."""
    found = installed_pythons(environment)
    listing = "".join(f"\n  {version:<10} {path}" for version, path in found) or "\n  none"
    return HostError(
        f"no Python {wanted} on this host; found:{listing}\n  ({said.splitlines()[0]})",
        f"install Python {wanted} (your distribution's package, `uv python install`, a conda environment) or "
        "load its module, then run again; or name one with --python PATH",
    )


def installed_pythons(environment: Environment) -> list[tuple[str, str]]:
    """(version, path) of every interpreter that uv sees, newest first; empty when uv cannot tell."""
    done = process.run(
        [
            environment.uv,
            "python",
            "list",
            "--only-installed",
            "--output-format",
            "json",
            "--no-config",
        ],
        env=environment.uv_environment(),
        check=False,
    )
    if done.returncode != 0:
        return []
    return [(str(row["version"]), str(row["path"])) for row in json.loads(done.stdout)]
