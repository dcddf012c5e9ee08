"""Effective settings of a site, key by key, with the origin of each value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envbuild.site.pip_config import redact
from envbuild.site.settings import Site, SiteFile, load_site
from envbuild.site.tables import DebianTable
from envbuild.toml import decode, read

_DEFAULT = "default"
_OF_JOBS = ("scheduler", "modules", "paths", "container", "node", "kubernetes", "fabric")


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
) -> tuple[Site, list[EffectiveSetting]]:
    """Return the site called `name` (None: the effective one) and all its values, with passwords in URLs hidden.

    Raises UsageError for an unknown name, RecipeError for a faulty file.
    """
    site = load_site({**env, "USER": "{user}"}, name, etc=etc)  # {user} is shown as the files have it
    found = _of_builds(site)
    if name is None:
        given = found.get(("", "store"), (None, _DEFAULT))[1]
        found["", "store"] = (str(site.store), "ENVBUILD_STORE" if env.get("ENVBUILD_STORE") else given)
    # Keys without a table come first, as in TOML.
    found = {place: found[place] for place in sorted(found, key=lambda place: place[0] != "")}
    for table in (*_OF_JOBS, "environment"):
        values = getattr(site, table)
        for key, value in (values if table == "environment" else asdict(values)).items():
            found[table, key] = (value, str(site.said.get(f"[{table}] {key}", _DEFAULT)))
    return site, [
        EffectiveSetting(table, key, _shown(value), origin) for (table, key), (value, origin) in found.items()
    ]


def _of_builds(site: Site) -> dict[tuple[str, str], tuple[Any, str]]:
    """Return (table, key) → (value, file) of the keys about the sources of packages, as the files have them."""
    found: dict[tuple[str, str], tuple[Any, str]] = {}
    for file in site.files:
        one = decode(read(file), SiteFile)
        values: dict[tuple[str, str], Any] = {("", "store"): one.store, ("", "recipes"): one.recipes or None}
        values |= {("", "cache"): one.cache, ("", "cache_mode"): one.cache_mode} if one.cache else {}
        values |= {("mirrors", redact(url)): mirrors for url, mirrors in one.mirrors.items()}
        values |= {("indexes", name): url for name, url in one.indexes.items()}
        for host, table in one.registries.items():
            values |= {(f"registries.{host}", key): value for key, value in asdict(table).items()}
        if one.debian != DebianTable():
            values |= {("debian", key): value for key, value in asdict(one.debian).items()}
        found |= {place: (value, str(file)) for place, value in values.items() if value is not None}
    return found


def _shown(value: Any) -> Any:
    """Return `value` in JSON's types, without passwords."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _shown(one) for key, one in value.items()}
    return value
