"""Runs of `uv pip compile` for one target: all requirements of the recipe, or one of them alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild import process
from envbuild.environment import Environment
from envbuild.lock.format import LockedPackage


@dataclass(frozen=True, slots=True)
class UvCompile:
    """Runs of uv that share indexes, platform and constraints; their files are in the folder `work`."""

    work: Path
    environment: Environment
    indexes: Sequence[str]
    python: str
    platform: str
    constraints: Sequence[str]
    overrides: Sequence[str] = ()
    stubs: Path | None = None
    offline: bool = False

    @property
    def pylock(self) -> Path:
        """PEP 751 file of the last successful run."""
        return self.work / "pylock.toml"

    def run(
        self, requirements: Iterable[str], pins: Iterable[str] = (), preferred: Iterable[LockedPackage] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Resolve `requirements` with `pins` as additional constraints; `preferred` versions win if they fit."""
        work, environment = self.work, self.environment
        environment.write_uv_settings(work / "uv.toml", self.indexes)
        (work / "requirements.in").write_text("\n".join(requirements) + "\n")
        (work / "constraints.txt").write_text("\n".join([*self.constraints, *pins]) + "\n")
        self.pylock.write_text(_preferences(preferred))
        command: list[str | Path] = [
            environment.uv, "pip", "compile", work / "requirements.in",
            "--config-file", work / "uv.toml", "--constraints", work / "constraints.txt",
            # Nothing is built, so any interpreter will do; otherwise uv searches the host for one of
            # --python-version.
            "--python", sys.executable, "--python-version", self.python,
            "--python-platform", self.platform, "--only-binary", ":all:",
            "--format", "pylock.toml", "--output-file", self.pylock,
            "--no-header", "--no-annotate", "--quiet",
        ]  # fmt: skip
        if self.stubs is not None:
            command += ["--find-links", self.stubs]
        if self.overrides:
            (work / "overrides.txt").write_text("\n".join(self.overrides) + "\n")
            command += ["--overrides", work / "overrides.txt"]
        if self.offline:
            command.append("--offline")
        return process.run(command, env=environment.uv_environment(), cwd=work, check=False)


def _preferences(packages: Iterable[LockedPackage]) -> str:
    """Return a PEP 751 file with versions only: uv prefers the versions in its existing output file."""
    lines = ['lock-version = "1.0"', 'created-by = "envbuild"']
    packages = list(packages)
    if not packages:
        lines.append("packages = []")
    for package in packages:
        lines += ["", "[[packages]]", f'name = "{package.name}"', f'version = "{package.version}"']
    return "\n".join(lines) + "\n"
