"""Reader of untrusted YAML, which may be crafted to expand to gigabytes."""

from __future__ import annotations

from typing import Any

from envbuild.base.errors import EnvbuildError

# Real documents nest below 20 levels, and a lock of 1,000 packages has 50,000 events. Each takes up to 1 KB.
_DEEPEST, _EVENTS = 64, 300_000


def parse_yaml(
    text: str, name: str, error: type[EnvbuildError], hint: str, *, typ: str, aliases: int, expanded: bool = False
) -> list[Any]:
    """Return the documents in `text`; `typ` is ruamel.yaml's type of loader.

    Raises `error` with `hint`, naming `name` and the line, for text that is not YAML. Text is refused if it is very
    large, is nested more than 64 levels deep, or has more than `aliases` aliases, each of which may repeat all text
    before it. With `expanded`, for callers that write the values, the content of every alias counts towards the size.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

    yaml = YAML(typ=typ, pure=True)
    alias_count = events = 0
    around: list[tuple[Any, int]] = []  # the anchor of each collection that is open, and the events before it
    sizes: dict[Any, int] = {}  # events of a collection, by its anchor

    class Bounded(yaml.Parser):  # type: ignore[name-defined, misc]
        def get_event(self) -> Any:
            nonlocal alias_count, events
            event = super().get_event()
            if isinstance(event, CollectionStartEvent):
                around.append((event.anchor, events))
            elif isinstance(event, CollectionEndEvent):
                anchor, before = around.pop()
                sizes[anchor] = events - before + 1
            elif isinstance(event, AliasEvent):
                alias_count += 1
                events += sizes.get(event.anchor, 0) if expanded else 0
            events += 1
            depth = len(around)
            if depth > _DEEPEST or alias_count > aliases or events > _EVENTS:
                excess = f"{_DEEPEST} levels" if depth > _DEEPEST else f"{aliases} aliases"
                excess = excess if events <= _EVENTS else f"{_EVENTS} values, keys and lists"
                raise error(f"{name}:{event.start_mark.line + 1}: more than {excess}", hint)
            return event

    yaml.Parser = Bounded
    yaml.composer.warn_double_anchors = False
    try:
        return list(yaml.load_all(text))
    except YAMLError as problem:
        mark = getattr(problem, "problem_mark", None) or getattr(problem, "context_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        reason = getattr(problem, "problem", None) or str(problem).partition("\n")[0]
        raise error(f"{name}{place}: not YAML: {reason}", hint) from None
    except (ValueError, TypeError, OverflowError, AttributeError, KeyError, IndexError, RecursionError) as problem:
        # for example a number with thousands of digits, an invalid date, a list as a key
        reason = str(problem).partition("\n")[0]
        raise error(f"{name}: YAML with a value that cannot be read: {reason[:200]}", hint) from None


def line_of(around: Any, key: Any) -> int:
    """Return the line, from 1, of the entry `key` of a table or list of the loader "rt".

    It is that of `around` if the entry's own is unknown, as for merged (`<<`) and tagged ones.
    """
    position = getattr(around, "lc", None)
    if position is None:
        return 1
    known = position.data or {}
    return int(known[key][0] if key in known else position.line or 0) + 1
