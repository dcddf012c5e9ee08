"""Effective settings of a site, key by key, with the origin of each value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from envbuild.site.job_site import TABLES, JobSite, read_job_site
from envbuild.site.pip_config import redact
from envbuild.site.settings import SiteFile, load_site
from envbuild.toml import decode, read

_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """One value of a site: its `table` ("" at the top), `key`, and `origin` (a file, a variable or "default")."""

    table: str
    key: str
    value: Any
    origin: str

    @property
    def given(self) -> bool:
        """Whether the value is set explicitly."""
        return self.origin != _DEFAULT


def effective_settings(
    name: str | None, env: Mapping[str, str], *, etc: Path = Path("/etc")
) -> tuple[JobSite, list[EffectiveSetting]]:
    """Return the site called `name` (None: the effective one) and all its values, with passwords in URLs hidden.

    Raises UsageError for an unknown name, RecipeError for a faulty file.
    """
    site = read_job_site(name, env, etc=etc)
    documents = [(file, read(file)) for file in site.files]
    settings = [(file, decode(document, SiteFile)) for file, document in documents]
    values = _top(name, env, settings, etc)
    for table in TABLES:
        held = getattr(site, table)
        for one in fields(held):
            origin = site.said.get(f"[{table}] {one.name}")
            values.append(EffectiveSetting(table, one.name, _shown(getattr(held, one.name)), _file(origin)))
    for key, text in site.environment.items():
        origin = site.said.get(f"[environment] {key}")
        values.append(EffectiveSetting("environment", key, redact(text), _file(origin)))
    return site, values


def _top(
    name: str | None, env: Mapping[str, str], settings: list[tuple[Path, SiteFile]], etc: Path
) -> list[EffectiveSetting]:
    """Return the keys about the sources of packages. A named site is one file; otherwise load_site decides."""
    found: dict[tuple[str, str], EffectiveSetting] = {}

    def log(table: str, key: str, value: Any, origin: str) -> None:
        found[table, key] = EffectiveSetting(table, key, _shown(value), origin)

    for file, one in settings:
        where = str(file)
        if one.store is not None:
            log("", "store", one.store, where)
        if one.recipes:
            log("", "recipes", one.recipes, where)
        for url, mirrors in one.mirrors.items():
            log("mirrors", redact(url), mirrors, where)
        for host, table in one.registries.items():
            log(f"registries.{host}", "mirrors", table.mirrors, where)
            log(f"registries.{host}", "insecure", table.insecure, where)
        if one.debian != type(one.debian)():
            for field in fields(one.debian):
                log("debian", field.name, getattr(one.debian, field.name), where)
    if name is None:
        site = load_site(env, etc=etc)
        given = found.get(("", "store"))
        origin = "ENVBUILD_STORE" if env.get("ENVBUILD_STORE") else given.origin if given else _DEFAULT
        log("", "store", str(site.store), origin)
    return [found[key] for key in sorted(found, key=lambda key: bool(key[0]))]


def _file(origin: Path | None) -> str:
    return str(origin) if origin else _DEFAULT


def _shown(value: Any) -> Any:
    """Return `value` in JSON's types, without passwords."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _shown(one) for key, one in value.items()}
    return value
