"""pip's configuration on this machine, and the configuration of uv that makes it resolve from the same sources.

pip's settings come from configuration files and PIP_* variables. pip's documentation ("Configuration" topic guide)
defines the files, their order and the rule that `[install]` overrides `[global]` and an environment variable overrides
every file.
"""

from __future__ import annotations

import locale
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from envbuild.base.errors import RecipeError
from envbuild.base.files import home_folder, read_small
from envbuild.base.masking import redact as redact
from envbuild.base.process import of_caller
from envbuild.base.toml import toml_pairs, toml_value

T = TypeVar("T")
# Sections that affect downloads, in ascending precedence; the environment overrides them.
_SECTIONS = ("global", "download", "install")
_ALIASES = {"pypi-url": "index-url", "default-timeout": "timeout"}
_SWITCHES = dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True)
_SWITCHES |= dict.fromkeys(("n", "no", "f", "false", "off", "0"), False)
# uv's variables that are kept: they affect how uv works (speed, credentials, links, the location of its
# Pythons), but not the resolution. Any other UV_* variable (UV_INDEX, UV_PYTHON, UV_EXCLUDE_NEWER,
# UV_PRERELEASE, UV_CONFIG_FILE, ...) could give two users different locks of one recipe.
_KEPT = (
    "UV_CREDENTIALS_DIR",
    "UV_HTTP_RETRIES",
    "UV_HTTP_TIMEOUT",
    "UV_KEYRING_PROVIDER",
    "UV_LINK_MODE",
    "UV_NATIVE_TLS",
    "UV_REQUEST_TIMEOUT",
    "UV_SYSTEM_CERTS",
)
_KEPT_PREFIXES = ("UV_CONCURRENT_", "UV_PYTHON_")
# The caller's active environment must not affect the interpreter that uv inspects; nor may its Python's settings.
_DROPPED = ("VIRTUAL_ENV", "CONDA_PREFIX")


@dataclass(frozen=True, repr=False)
class PipConfig:
    """pip's settings about sources of files; `index_url` None: the client's own default. `repr()` hides credentials."""

    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    cert: str | None = None
    client_cert: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    proxy: str | None = None
    timeout_s: float | None = None
    retries: int | None = None

    def __repr__(self) -> str:
        return redact(f"PipConfig({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})")


@dataclass(frozen=True)
class _Setting:
    value: str
    where: str  # a file with the line, or the name of a variable


def load_pip_config(env: Mapping[str, str], *, prefix: str = sys.prefix, etc: Path = Path("/etc")) -> PipConfig:
    """Read pip's configuration as pip does with `env` and the Python at `prefix`. RecipeErrors name file and line."""
    settings = _merged(env, prefix, etc)
    home = home_folder(env)

    def text(name: str) -> str | None:
        return settings[name].value.strip() if name in settings else None

    def words(name: str) -> tuple[str, ...]:
        return tuple(settings[name].value.split()) if name in settings else ()

    def path(name: str) -> str | None:
        value = text(name)
        return _local_path(value, home) if value else None

    def parsed(name: str, kind: str, parse: Callable[[str], T | None]) -> T | None:
        value = text(name)
        parsed_value = parse(value) if value is not None else None
        if value is not None and parsed_value is None:
            raise RecipeError(f"{settings[name].where}: {name} takes {kind}, not {value!r:.100}")
        return parsed_value

    return PipConfig(
        index_url=text("index-url"),
        extra_index_urls=words("extra-index-url"),
        find_links=tuple(
            word if "://" in word or word.startswith("file:") else _local_path(word, home)
            for word in words("find-links")
        ),
        no_index=parsed("no-index", "true or false", lambda value: _SWITCHES.get(value.lower())) or False,
        cert=path("cert"),
        client_cert=path("client-cert"),
        trusted_hosts=words("trusted-host"),
        proxy=text("proxy"),
        timeout_s=parsed("timeout", "seconds", _seconds),
        retries=parsed("retries", "a count", lambda value: int(value) if re.fullmatch("[0-9]{1,6}", value) else None),
    )


def ca_bundle(pip: PipConfig, env: Mapping[str, str]) -> str | None:
    """Return the CA bundle of pip, else of its HTTP library's and OpenSSL's variables, or None for the client's own."""
    variables = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
    return pip.cert or next((env[name] for name in variables if env.get(name)), None)


def _merged(env: Mapping[str, str], prefix: str, etc: Path) -> dict[str, _Setting]:
    """Return the effective setting of each name.

    As in pip, files are merged per section before the sections are merged, so `[install]` of a file with low
    precedence overrides `[global]` of one with high precedence. Empty values are ignored.
    """
    rows = [row for path in _files(env, prefix, etc) for row in _read(path)]
    merged: dict[str, _Setting] = {}
    for section in _SECTIONS:
        last = {name: setting for where, name, setting in rows if where == section}
        merged |= {name: setting for name, setting in last.items() if setting.value.strip()}
    for variable, value in env.items():
        if variable.startswith("PIP_") and value.strip():
            merged[_name(variable[4:])] = _Setting(value, variable)
    return merged


def _files(env: Mapping[str, str], prefix: str, etc: Path) -> Iterator[Path]:
    """Yield the existing configuration files, in ascending precedence."""
    chosen = env.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return
    home = home_folder(env)
    shared = (env.get("XDG_CONFIG_DIRS") or str(etc / "xdg")).split(os.pathsep)
    places = [Path(folder, "pip/pip.conf") for folder in shared if folder] + [etc / "pip.conf"]
    if not (chosen and Path(chosen).exists()):  # with PIP_CONFIG_FILE, pip ignores these
        user = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
        places += [home / ".pip/pip.conf", user / "pip/pip.conf"]
    # Users configure the pip of the active environment, which may not be envbuild's own.
    places += [Path(folder, "pip.conf") for folder in (prefix, env.get("VIRTUAL_ENV")) if folder]
    places += [Path(chosen)] if chosen else []
    yield from (place for place in dict.fromkeys(places) if place.exists())


def _read(path: Path) -> Iterator[tuple[str, str, _Setting]]:
    """Yield (section, option, setting) of one file. Raises RecipeError when it is not in pip's INI dialect."""
    import configparser

    parser = configparser.RawConfigParser()
    try:
        text = read_small(path).decode(locale.getpreferredencoding(False))  # as pip does
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from error
    if "\0" in text:
        raise RecipeError(f"{path}:{text[: text.index(chr(0))].count(chr(10)) + 1}: a NUL character", "remove it")
    try:
        parser.read_string(text, str(path))
    except configparser.Error as error:
        # Not str(error): it quotes the line, which may hold a password.
        line, problem = _mistake(error)
        raise RecipeError(
            f"{path}:{line}: {problem}", "pip cannot read this file either; correct or remove it"
        ) from None
    for section in parser.sections():
        for option, value in parser.items(section):
            line = _line_of(text, section, option)
            yield section, _name(option), _Setting(value or "", f"{path}:{line}")


def _mistake(error: Exception) -> tuple[int, str]:
    import configparser

    match error:
        case configparser.MissingSectionHeaderError():
            return error.lineno, "an option before any [section]"
        case configparser.DuplicateSectionError():
            return error.lineno or 1, f"section [{error.section}] is given twice"
        case configparser.DuplicateOptionError():
            return error.lineno or 1, f"option {error.option!r} is given twice in [{error.section}]"
        case configparser.ParsingError():
            return error.errors[0][0], "neither [section] nor `option = value`"
    return 1, type(error).__name__


def _line_of(text: str, section: str, option: str) -> int:
    """Return the line at which `option` of `section` begins, which configparser does not keep."""
    current = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\[(.+)\]", line):
            current = header[1]
        elif current == section and re.split(r"[=:]", line)[0].strip().lower() == option:
            return number
    return 1


def _name(option: str) -> str:
    name = option.lower().replace("_", "-").removeprefix("--")
    return _ALIASES.get(name, name)


def _local_path(value: str, home: Path) -> str:
    """Return `value` as an absolute path: `~` is the home folder, a relative path is relative to the working folder."""
    if value == "~" or value.startswith("~/"):
        return str(home / value[2:])
    return os.path.abspath(os.path.expanduser(value))


def _seconds(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0 < number < float("inf") else None


def uv_settings(pip: PipConfig, indexes: Sequence[str], newest: Mapping[str, str | bool] = {}) -> str:
    """Return a uv.toml with a recipe's `indexes`, then pip's. It may hold credentials: no command line may show it.

    `newest` maps URLs of indexes, "" for all others, to the time up to which uv takes their files; False for any time.
    """

    def timed(url: str) -> dict[str, object]:
        return {"exclude-newer": newest[url]} if url in newest else {}

    settings = timed("") | ({"preview-features": ["index-exclude-newer"]} if newest.keys() - {""} else {})
    # pip takes the best version from all indexes together. uv's default stops at the first index that knows a name, so
    # an old copy on a recipe's index would hide every newer version. Locked hashes protect against a file from the
    # wrong index.
    settings["index-strategy"] = "unsafe-best-match"
    options = {"no-index": pip.no_index, "find-links": pip.find_links, "allow-insecure-host": pip.trusted_hosts}
    lines = toml_pairs(settings | {name: value for name, value in options.items() if value})
    urls = dict.fromkeys([*indexes, *pip.extra_index_urls])
    tables = [{"url": url} | timed(url) for url in urls if url != pip.index_url]
    if pip.index_url is not None:
        tables.append({"url": pip.index_url, "default": True} | timed(pip.index_url))
    for table in () if pip.no_index else tables:
        lines += ["", "[[index]]", *toml_pairs(table)]
    return "\n".join(lines) + "\n"


def bound_project(requirements: Sequence[str], bound: Mapping[str, str]) -> str:
    """Return a pyproject.toml with `requirements`, each of which uv takes from its index in `bound` alone.

    `bound` maps normalised names of packages to URLs of indexes, which serve nothing else. Only a project can bind
    packages (uv's documentation, "Pinning a package to an index"); uv.toml cannot.
    """
    names = {url: f"index-{number}" for number, url in enumerate(dict.fromkeys(bound.values()))}
    lines = ["[project]", 'name = "the-recipe"', 'version = "0"', f"dependencies = {toml_value(requirements)}"]
    for url, name in names.items():
        lines += ["", "[[tool.uv.index]]", f'name = "{name}"', f"url = {toml_value(url)}", "explicit = true"]
    lines += ["", "[tool.uv.sources]", *toml_pairs({project: {"index": names[url]} for project, url in bound.items()})]
    return "\n".join(lines) + "\n"


def uv_environment(pip: PipConfig, env: Mapping[str, str], cache_dir: Path) -> dict[str, str]:
    """Return the environment for uv.

    It is `env` without the variables that would change a resolution, with pip's certificates, proxy, timeout and
    retries, and with uv's cache at `cache_dir`.
    """
    result = {name: value for name, value in of_caller(env).items() if _kept(name)}
    result |= {"UV_CACHE_DIR": str(cache_dir), "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    if bundle := ca_bundle(pip, env):
        result["SSL_CERT_FILE"] = bundle
    if pip.client_cert:
        result["SSL_CLIENT_CERT"] = pip.client_cert
    if pip.proxy:
        # uv reads the lower-case names first, as curl does.
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            result[name] = pip.proxy
    if pip.timeout_s is not None:
        result.setdefault("UV_HTTP_TIMEOUT", str(max(1, round(pip.timeout_s))))
    if pip.retries is not None:
        result.setdefault("UV_HTTP_RETRIES", str(pip.retries))
    return result


def _kept(name: str) -> bool:
    if name.startswith("UV_"):
        return name in _KEPT or name.startswith(_KEPT_PREFIXES)
    return name not in _DROPPED
