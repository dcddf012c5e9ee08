"""Registry credentials from the files of other tools.

Sources: Docker's documentation of `docker login` (config.json, credential helpers and their protocol),
containers-auth.json(5) for the file of the same form of Podman, Buildah and Skopeo, and netrc(5).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.errors import RecipeError
from envbuild.image.credential_helper import ask_helper
from envbuild.image.reference import DOCKER_HUB, DOCKER_HUB_NAMES, same_registry

# The hint about missing or refused credentials.
PLACES = (
    "read are ENVBUILD_REGISTRY with ENVBUILD_REGISTRY_USER and ENVBUILD_REGISTRY_PASSWORD, docker's "
    "config.json with its credential helpers, containers/auth.json, and netrc"
)
# `docker login` stores Docker Hub's credentials under this key.
_HUB_KEY = "https://index.docker.io/v1/"


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """A user with a password, or an identity token in place of both.

    `source` names the file or program they came from.
    """

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
        if found := _from_file(path, registry, env):
            return found
    return _from_netrc(registry, env)


def _files(env: Mapping[str, str]) -> Iterator[Path]:
    docker = env.get("DOCKER_CONFIG")
    yield (Path(docker) if docker else _home(env) / ".docker") / "config.json"
    if chosen := env.get("REGISTRY_AUTH_FILE"):
        yield Path(chosen)
    if runtime := env.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers/auth.json"


def _home(env: Mapping[str, str]) -> Path:
    return Path(env["HOME"]) if env.get("HOME") else Path.home()


def _from_file(path: Path, registry: str, env: Mapping[str, str]) -> Credentials | None:
    data = _load(path)
    if data is None:
        return None
    helpers, auths = _table(data, "credHelpers", path), _table(data, "auths", path)
    # docker's own order: the helper for this registry, the helper for all, the file itself
    for helper in (_entry(helpers, registry), data.get("credsStore")):
        if not helper:
            continue
        if not isinstance(helper, str):
            raise RecipeError(f"{path}: the name of a credential helper is not a string")
        server = _HUB_KEY if registry == DOCKER_HUB else registry
        if answer := ask_helper(helper, server, env, path):
            user, secret = answer
            source = f"docker-credential-{helper}"
            if user == "<token>":
                return Credentials("", "", secret, source)
            return Credentials(user, secret, "", source)
    entry = _entry(auths, registry)
    return None if entry is None else _from_entry(entry, registry, path)


def _load(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
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
    if not isinstance(entry, dict) or not all(
        isinstance(entry.get(key) or "", str) for key in ("auth", "identitytoken", "username", "password")
    ):
        raise RecipeError(
            f"{path}: the entry for {registry} is not what docker login writes", f"docker login {registry}"
        )
    user, password = entry.get("username") or "", entry.get("password") or ""
    if coded := entry.get("auth"):
        try:
            # docker pads some values with NUL
            text = base64.b64decode(coded, validate=True).decode().rstrip("\0")
        except ValueError:  # the exception's message quotes the secret
            text = ""
        user, colon, password = text.partition(":")
        if not colon:
            raise RecipeError(
                f"{path}: 'auth' of {registry} is not base64 of user:password", f"docker login {registry}"
            )
    token = entry.get("identitytoken") or ""
    return Credentials(user, password, token, str(path)) if token or password else None


def _from_netrc(registry: str, env: Mapping[str, str]) -> Credentials | None:
    import netrc

    chosen = env.get("NETRC")
    path = Path(chosen) if chosen else _home(env) / ".netrc"
    try:
        hosts = netrc.netrc(str(path)).hosts
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except netrc.NetrcParseError as error:
        # Not the error's message: it may quote a password.
        raise RecipeError(f"{path}:{error.lineno or 1}: not what netrc(5) describes") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: not text") from None
    # The entry `default` applies to any host. It is ignored, so that its password is sent to no registry.
    names = (registry, *(DOCKER_HUB_NAMES if registry == DOCKER_HUB else ()), _hostname(registry))
    for name in names:
        if found := hosts.get(name):
            login, _account, password = found
            if password:
                return Credentials(login or "", password, "", str(path))
    return None


def _hostname(registry: str) -> str:
    host, colon, port = registry.rpartition(":")
    return host if colon and port.isdecimal() else registry
