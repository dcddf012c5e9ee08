"""Installation of locked wheels into an environment's folder by uv, from files on this host."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Sequence
from pathlib import Path

from envbuild import atomic, process
from envbuild.artifacts.links import link_mode
from envbuild.environment import Environment
from envbuild.errors import BuildError
from envbuild.layers.trainer import Trainer
from envbuild.lock.format import requirements
from envbuild.plan.plan import Plan


def install_wheels(
    plan: Plan,
    trainer: Trainer,
    wheels: Sequence[Path],
    environment: Environment,
    folder: Path,
    python: Path,
    *options: str | None,
) -> None:
    """Install the wheels of `plan` and the trainer's, all among the files `wheels`, for the interpreter `python`.

    `folder` is the environment's; `options` are further options of `uv pip install`, where None is skipped.
    Raises BuildError with uv's message.
    """
    wanted = folder / ".requirements.txt"
    digest = hashlib.sha256(trainer.wheel()).hexdigest()
    own = f"ddp-train=={trainer.version} --hash=sha256:{digest}\n"
    with atomic.writing(folder):
        wanted.write_text(requirements(plan.packages) + own)
    command: list[str | Path] = [
        environment.uv, "pip", "install", "--no-deps", "--require-hashes", "--no-index", "--offline",
        "--no-config", "--quiet", "--python", python, "--requirements", wanted,
        "--link-mode", link_mode(environment.store.uv_cache, folder),
    ]  # fmt: skip
    for source in dict.fromkeys(wheel.parent for wheel in wheels):
        command += ["--find-links", source]
    command += [option for option in options if option is not None]
    done = process.run(command, env=environment.uv_environment(), check=False)
    if done.returncode != 0:
        raise BuildError(f"uv could not install the locked wheels:\n{process.tail(done)}", tool_hint(done.stderr))
    wanted.unlink()


def tool_hint(said: str) -> str:
    """Return the hint for uv's error message `said`."""
    text = said.lower()
    if "no space left" in text or "quota" in text:
        return atomic.write_hint(errno.ENOSPC)
    if "read-only file system" in text or "permission denied" in text:
        return atomic.write_hint(errno.EROFS)
    if "hash mismatch" in text:
        return "a wheel changed since it was locked; remove it from its source, or lock again"
    return "run it again; if it persists, remove the store's uv folder (it is only a cache)"
