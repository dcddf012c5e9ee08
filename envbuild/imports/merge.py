"""Three recipes into one: the changes from the imported one to the new one, in the text that the user may have edited.

Each value of a recipe is compared alone: a key, or an entry of an array. Entries are the same if they are of one
package. The user's value stays where both sides changed it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from envbuild.base.text import normalise
from envbuild.base.toml import Keys, parse_toml
from envbuild.base.toml.edit import delete_value, set_value

# Arrays whose entries are packages.
_PACKAGES = ("requirements", "constraints", "dependencies", "conda")
# Keys of every recipe that say nothing of the sources.
_OWN = (("name",), ("description",))
# A place of a value: the keys, and for an entry of an array, which one: a package with its marker, or its text.
Place = tuple[Keys, str]


def merge(text: str, base: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return `text`, a recipe, with the changes from `base` to `new`, and a line for each that it does not get.

    Raises ValueError for a layout that cannot be edited.
    """
    mine, old, now = _flat(parse_toml(text)), _flat(base), _flat(new)
    conflicts, kept = [], set[Keys]()
    changed = [one for one in {**now, **old} if old.get(one) != now.get(one) and one[0] not in _OWN]
    gone = {one for one in changed if one not in now and mine.get(one) == old.get(one)}
    for place in changed:
        before, after, here = old.get(place), now.get(place), mine.get(place)
        if here == after or place[0][:2] in kept:
            continue
        if here != before:
            conflicts.append(_conflict(place, before, after, here))
        elif before is None and (other := _elsewhere(place, mine, gone)):
            conflicts.append(f"{_name(place)}: the sources have {after!r} now; the recipe keeps {other}")
        elif _is_target(place) and after is None and (own := _own_edits(place, mine, old)):
            conflicts.append(f"{_name(place)}: the sources have it no more; the recipe keeps it, with {own}")
            kept.add(place[0])
        else:
            text = _applied(text, place, before, after)
    return text, conflicts


def _flat(data: Mapping[str, Any], above: Keys = ()) -> dict[Place, Any]:
    """Return each value of a recipe by its place; a target has a place of its own, too."""
    found: dict[Place, Any] = {}
    for key, value in data.items():
        keys = (*above, key)
        if isinstance(value, Mapping):
            if above == ("targets",):
                found[keys, ""] = {}
            found |= _flat(value, keys)
        elif isinstance(value, list):
            for one in value:
                found.setdefault((keys, _identity(keys, str(one))), one)
        else:
            found[keys, ""] = value
    return found


def _identity(keys: Keys, entry: str) -> str:
    if keys[-1] not in _PACKAGES:
        return entry
    name, _, marker = entry.partition(";")
    return normalise(re.split(r"[^\w.-]", name.strip(), maxsplit=1)[0]) + (f" ; {marker.strip()}" if marker else "")


def _is_target(place: Place) -> bool:
    keys, _ = place
    return len(keys) == 2 and keys[0] == "targets"


def _elsewhere(place: Place, mine: Mapping[Place, Any], gone: set[Place]) -> str:
    """Return where the recipe requires the package of `place` already, "" if nowhere."""
    keys, entry = place
    if keys[-1] != "requirements" or keys[0] == "conda":
        return ""
    lists = [one for one in mine if one[0][-1] == "requirements" and one[0][0] != "conda" and one not in gone]
    # The same package may be in two targets, and not in one and for all.
    same = [one for one in lists if one[1] == entry and one[0] != keys and (len(one[0]) == 1 or len(keys) == 1)]
    return f"{mine[same[0]]!r} in {'.'.join(map(str, same[0][0]))}" if same else ""


def _own_edits(place: Place, mine: Mapping[Place, Any], old: Mapping[Place, Any]) -> str:
    """Return what the user has changed in a target."""
    keys, _ = place
    inside = [one for one in {**mine, **old} if one[0][:2] == keys and mine.get(one) != old.get(one)]
    return ", ".join(f"{_name(one)} = {mine.get(one)!r}" for one in inside)


def _applied(text: str, place: Place, before: Any, after: Any) -> str:
    """Return `text` with the value `after` (None for none) instead of `before` at `place`."""
    keys, entry = place
    data = parse_toml(text)
    if not entry:
        if after is not None:
            return set_value(text, keys, after)
        return _without(text, keys) if _has(data, keys) else text
    array = _value(data, keys)
    if after is None:
        return delete_value(text, (*keys, array.index(before))) if isinstance(array, list) and before in array else text
    if not isinstance(array, list):
        return set_value(text, keys, [after])
    return set_value(text, (*keys, array.index(before) if before in array else len(array)), after)


def _without(text: str, keys: Keys) -> str:
    """Return `text` without the key, nor a table that then has none."""
    text, table = delete_value(text, keys), keys[:-1]
    is_left = table and table[0] != "targets" and _value(parse_toml(text), table) == {}
    return _without(text, table) if is_left else text


def _value(data: Any, keys: Keys) -> Any:
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _has(data: Any, keys: Keys) -> bool:
    return _value(data, keys) is not None


def _conflict(place: Place, before: Any, after: Any, here: Any) -> str:
    now = f"have {after!r} now" if after is not None else "have it no more"
    was = f" (before: {before!r})" if before is not None else ""
    kept = f"keeps {here!r}" if here is not None else "stays without it"
    return f"{_name(place)}: the sources {now}{was}; the recipe {kept}"


def _name(place: Place) -> str:
    keys, entry = place
    return ".".join(map(str, keys)) + (f": {entry}" if entry else "")
