"""Effective settings of a site, key by key, with the origin of each value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from envbuild.base.masking import redact
from envbuild.site.settings import Site, SiteTables, load_site

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
) -> tuple[Site, list[EffectiveSetting]]:
    """Return the site called `name` (None: the effective one) and all its values, with passwords in URLs hidden.

    Raises UsageError for an unknown name, RecipeError for a faulty file.
    """
    site = load_site({**env, "USER": "{user}"}, name, etc=etc)  # {user} is shown as the files have it
    # Keys without a table come first, as in TOML.
    tables: dict[str, dict[str, Any]] = {"": {"store": str(site.store), "recipes": list(map(str, site.recipe_folders))}}
    for one in (field.name for field in fields(SiteTables)):
        value: Any = getattr(site, one)
        if one == "registries":
            tables |= {f"registries.{host}": asdict(table) for host, table in value.items()}
        elif isinstance(value, Mapping):
            tables[one] = dict(value)
        elif is_dataclass(value) and not isinstance(value, type):
            tables[one] = asdict(value)
        else:
            tables[""][one] = value
    found = [
        EffectiveSetting(table, redact(key), _shown(value), _origin(site, table, key))
        for table, values in tables.items()
        for key, value in values.items()
    ]
    if name is None and env.get("ENVBUILD_STORE"):
        found[0] = replace(found[0], origin="ENVBUILD_STORE")
    # A site that is not in force has no store but that of its file.
    return site, found if name is None or found[0].given else found[1:]


def _origin(site: Site, table: str, key: str) -> str:
    head, _, host = table.partition(".")
    return str(site.said.get(f"[{head}] {host or key}", _DEFAULT))


def _shown(value: Any) -> Any:
    """Return `value` in JSON's types, without passwords."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _shown(one) for key, one in value.items()}
    return value
