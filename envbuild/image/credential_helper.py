"""Credential helpers: programs that keep registry credentials, run as `docker-credential-NAME get`.

Source: github.com/docker/docker-credential-helpers. A helper reads the server's name from standard input. It writes a
JSON object with Username and Secret to standard output, or a message and exits with a code other than 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from envbuild.errors import HostError, RecipeError
from envbuild.process import die_with_parent

_TIMEOUT_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NONE = ("credentials not found", "no credentials", "not found in native keychain")


def ask_helper(name: str, server: str, env: Mapping[str, str], named_by: Path) -> tuple[str, str] | None:
    """Return the (user, secret) that the helper `name` has for `server`, or None when it has none or is not installed.

    `named_by` is the file that names the helper. Raises RecipeError, naming that file, when `name` is not a valid
    helper name; HostError when the helper fails, writes a malformed answer, or does not answer within 30 seconds.
    """
    if not _NAME.fullmatch(name):
        raise RecipeError(f"{named_by}: {name!r} is not the name of a credential helper")
    program = shutil.which(f"docker-credential-{name}", path=env.get("PATH", os.defpath))
    if program is None:
        return None
    code, out = _run(program, server, env)
    hint = f"{named_by} names this helper"
    if code != 0:
        if any(sign in out.lower() for sign in _NONE):
            return None
        raise HostError(f"{program} get failed for {server}: {_first_line(out) or code}", hint)
    try:
        answer = json.loads(out)
        user, secret = answer["Username"], answer["Secret"]
    except (ValueError, KeyError, TypeError):
        user = secret = None
    if not isinstance(user, str) or not isinstance(secret, str):
        raise HostError(f"{program} get: not the answer of a credential helper", hint)
    return (user, secret) if secret else None


def _run(program: str, server: str, env: Mapping[str, str]) -> tuple[int, str]:
    try:
        child = subprocess.Popen(
            [program, "get"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(env),
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    except OSError as error:
        raise HostError(f"cannot run {program}: {error.strerror}") from None
    try:
        out, _ = child.communicate(server.encode(), timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise HostError(
            f"{program} get did not answer within {_TIMEOUT_S:g} s", "it may wait for a keyring that is locked"
        ) from None
    finally:
        if child.poll() is None:  # also kill its children, which may hold our pipe open
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return child.returncode, out.decode(errors="replace").strip()


def _first_line(out: str) -> str:
    """Return the first line of a helper's message; "" for JSON, which would contain the secret."""
    return "" if "{" in out else out.partition("\n")[0][:200]
