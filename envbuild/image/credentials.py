"""Registry credentials from the files of other tools.

Sources: Docker's documentation of `docker login` (config.json), github.com/docker/docker-credential-helpers (their
protocol), containers-auth.json(5) for the file of the same form of Podman, Buildah and Skopeo, and netrc(5).
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.base.errors import HostError, RecipeError, UsageError
from envbuild.base.files import home_folder, parse_json, read_small
from envbuild.base.process import die_with_parent, stop
from envbuild.image.reference import DOCKER_HUB, DOCKER_HUB_NAMES, ImageSource, parse_reference, same_registry

# The hint about missing or refused credentials.
PLACES = (
    "read are ENVBUILD_REGISTRY with ENVBUILD_REGISTRY_USER and ENVBUILD_REGISTRY_PASSWORD, docker's "
    "config.json with its credential helpers, containers/auth.json, and netrc"
)
# `docker login` stores Docker Hub's credentials under this key.
_HUB_KEY = "https://index.docker.io/v1/"
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HELPER_TIMEOUT_S = 30.0
# Parts of the messages of a helper that has no credentials for a server.
_NO_CREDENTIALS = ("credentials not found", "no credentials", "not found in native keychain")


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """A user with a password, or an identity token in place of both, from the file or program `source`."""

    username: str
    password: str
    identity_token: str
    source: str

    def __repr__(self) -> str:
        return f"Credentials(username={self.username!r}, from {self.source})"


def find_credentials(registry: str, env: Mapping[str, str]) -> Credentials | None:
    """Return the credentials for `registry` (host[:port]), or None for anonymous access.

    The first source with credentials wins: ENVBUILD_REGISTRY_*, docker's config.json, $REGISTRY_AUTH_FILE,
    $XDG_RUNTIME_DIR/containers/auth.json, netrc. Raises RecipeError, naming the file, for a file that cannot be read or
    parsed; HostError when a credential helper fails.
    """
    named = env.get("ENVBUILD_REGISTRY", "")
    password = env.get("ENVBUILD_REGISTRY_PASSWORD", "")
    if named and password and same_registry(named, registry):
        user = env.get("ENVBUILD_REGISTRY_USER", "")
        return Credentials(user, password, "", "ENVBUILD_REGISTRY_PASSWORD")
    for path in _files(env):
        if credentials := _from_file(path, registry, env):
            return credentials
    return _from_netrc(registry, env)


def _files(env: Mapping[str, str]) -> Iterator[Path]:
    yield Path(env.get("DOCKER_CONFIG") or home_folder(env) / ".docker", "config.json")
    if chosen := env.get("REGISTRY_AUTH_FILE"):
        yield Path(chosen)
    if runtime := env.get("XDG_RUNTIME_DIR"):
        yield Path(runtime, "containers/auth.json")


def _from_file(path: Path, registry: str, env: Mapping[str, str]) -> Credentials | None:
    data = _load(path)
    helpers, auths = _table(data, "credHelpers", path), _table(data, "auths", path)
    # docker's own order: the helper for this registry, the helper for all, the file itself
    for helper in (_entry(helpers, registry), data.get("credsStore")):
        if not helper:
            continue
        if not isinstance(helper, str):
            raise RecipeError(f"{path}: the name of a credential helper is not a string")
        server = _HUB_KEY if registry == DOCKER_HUB else registry
        if answer := _ask_helper(helper, server, env, path):
            user, secret = answer
            login = ("", "", secret) if user == "<token>" else (user, secret, "")
            return Credentials(*login, f"docker-credential-{helper}")
    entry = _entry(auths, registry)
    return None if entry is None else _from_entry(entry, registry, path)


def _load(path: Path) -> dict[str, Any]:
    """Return the content of a file, which may be missing."""
    try:
        data = parse_json(read_small(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        # Not str(error) of a decoding error: it quotes bytes, which may be part of a secret.
        where = f":{error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else ""
        raise RecipeError(f"{path}{where}: not JSON", "correct it, or make it again with docker login") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: not a JSON object", "make it again with docker login")
    return data


def _table(data: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    table = data.get(key) or {}
    if not isinstance(table, dict):
        raise RecipeError(f"{path}: {key!r} is not an object", "make it again with docker login")
    return table


def _entry(table: Mapping[str, Any], registry: str) -> Any:
    """Return the entry for `registry`; its key is a host or, from old docker versions, a URL of its API."""
    if registry in table:
        return table[registry]
    for key, value in table.items():
        host, _, path = key.partition("://")[2].partition("/") if "://" in key else key.partition("/")
        if path.strip("/") in ("", "v1", "v2") and same_registry(host, registry):
            return value
    return None


def _from_entry(entry: Any, registry: str, path: Path) -> Credentials | None:
    hint, names = f"docker login {registry}", ("auth", "identitytoken", "username", "password")
    values = [entry.get(name) or "" for name in names] if isinstance(entry, dict) else []
    if not values or not all(isinstance(value, str) for value in values):
        raise RecipeError(f"{path}: the entry for {registry} is not in the form that docker login writes", hint)
    coded, token, user, password = values
    if coded:
        try:
            # docker pads some values with NUL
            text = base64.b64decode(coded, validate=True).decode().rstrip("\0")
        except ValueError:  # the exception's message quotes the secret
            text = ""
        user, colon, password = text.partition(":")
        if not colon:
            raise RecipeError(f"{path}: 'auth' of {registry} is not base64 of user:password", hint)
    return Credentials(user, password, token, str(path)) if token or password else None


def _from_netrc(registry: str, env: Mapping[str, str]) -> Credentials | None:
    import netrc

    path = Path(env.get("NETRC") or home_folder(env) / ".netrc")
    try:
        hosts = netrc.netrc(str(path)).hosts
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except netrc.NetrcParseError as error:
        # Not the error's message: it may quote a password.
        raise RecipeError(f"{path}:{error.lineno or 1}: not in the form of netrc(5)") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not text") from None
    # The entry `default` applies to any host. It is ignored, so that its password is sent to no registry.
    host, colon, port = registry.rpartition(":")
    hostname = host if colon and port.isdecimal() else registry
    for name in (registry, *(DOCKER_HUB_NAMES if registry == DOCKER_HUB else ()), hostname):
        login, _, password = hosts.get(name) or ("", "", "")
        if password:
            return Credentials(login or "", password, "", str(path))
    return None


def _ask_helper(name: str, server: str, env: Mapping[str, str], named_by: Path) -> tuple[str, str] | None:
    """Return the (user, secret) that the helper `name` has for `server`, or None when it has none or is not installed.

    A helper is a program docker-credential-NAME. Run with `get`, it reads the server's name from standard input. It
    writes a JSON object with Username and Secret to standard output, or a message and exits with a code other than 0.
    """
    if not _HELPER.fullmatch(name):
        raise RecipeError(f"{named_by}: {name!r} is not the name of a credential helper")
    program = shutil.which(f"docker-credential-{name}", path=env.get("PATH", os.defpath))
    if program is None:
        return None
    code, out = _run_helper(program, server, env)
    hint = f"{named_by} names this helper"
    if code != 0:
        if any(sign in out.lower() for sign in _NO_CREDENTIALS):
            return None
        reply = "" if "{" in out else out.partition("\n")[0][:200]  # JSON would contain the secret
        raise HostError(f"{program} get failed for {server}: {reply or code}", hint)
    try:
        answer = parse_json(out)
        user, secret = answer["Username"], answer["Secret"]
        if not isinstance(user, str) or not isinstance(secret, str):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise HostError(f"{program} get: not the answer of a credential helper", hint) from None
    return (user, secret) if secret else None


def _run_helper(program: str, server: str, env: Mapping[str, str]) -> tuple[int, str]:
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
        out, _ = child.communicate(server.encode(), timeout=_HELPER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise HostError(
            f"{program} get did not answer within {_HELPER_TIMEOUT_S:g} s", "it may be waiting for a locked keyring"
        ) from None
    finally:
        if child.poll() is None:
            stop([child], grace_s=0.0)  # and its children, which may hold our pipe open
    return child.returncode, out.decode(errors="replace").strip()


def check_user(source: ImageSource, env: Mapping[str, str]) -> None:
    """Raise UsageError when `source` names a user and the credentials found are not those of that user."""
    if not source.user:
        return
    registry = parse_reference(source.rest).registry
    credentials = find_credentials(registry, env)
    if credentials is None or credentials.username != source.user:
        has = f"those of {credentials.username!r} ({credentials.source})" if credentials else "none"
        raise UsageError(f"no credentials of {source.user!r} for {registry}: found {has}", PLACES)
