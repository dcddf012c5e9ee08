"""The regular expressions of envbuild take time in proportion to a text, whatever is in it."""

from __future__ import annotations

import importlib
import pkgutil
import re
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import islice
from pathlib import Path
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import envbuild
from envbuild.base import masking
from envbuild.imports import signs as gpu_signs
from envbuild.jobcheck.diagnose.nccl_log import load_patterns
from envbuild.jobcheck.diagnose.rules import PLACES, load_rules
from envbuild.jobcheck.lint.faults import load_faults
from examples import SHARE

_REPEATS = (code.MAX_REPEAT, code.MIN_REPEAT, code.POSSESSIVE_REPEAT)
# Characters, and the slowdown that is too much. The short one is for expressions that are worse than quadratic; those
# with a repetition of up to 500 characters become linear beyond it.
_SIZES = {512: 6, 2048: 3, 8192: 3}
# Of `tests/run --fast`: the longest text takes most of the time.
_OWN_SIZES = {size: limit for size, limit in _SIZES.items() if SHARE == 1 or size < 8192}
_MEASURABLE = 0.003  # seconds


def expressions() -> dict[str, re.Pattern[str]]:
    """Every expression of a rule that sees text of users."""
    logs = tomllib.loads((resources.files("envbuild.data") / "diagnoses.toml").read_text(encoding="utf-8"))
    nccl = tomllib.loads((resources.files("envbuild.data") / "nccl_log.toml").read_text(encoding="utf-8"))
    found = [pattern.regex for place in PLACES for rule in load_rules(place) for pattern in rule.patterns]
    found += [re.compile(text) for key in ("attempts", "progress", "failures") for text in logs[key]]
    found += [pattern for _, pattern, _ in load_patterns()] + [re.compile(nccl["harmless"])]
    for fault in load_faults().values():
        found += fault.patterns.values()
        # These have to match a whole value.
        found += [re.compile(rf"\A(?:{one.pattern})", one.flags) for one in fault.variables.values()]
    found += [row.pattern for row in gpu_signs._rows()]
    found += [masking._forms(), *constants()]
    return {one.pattern: one for one in found}


# They read the tables of envbuild itself.
OWN = ("envbuild.jobcheck.diagnose.rules._PART", "envbuild.jobcheck.diagnose.engine._EITHER")


_METHOD = r"(match|fullmatch|search|sub|split|find\w+)"


@cache
def _uses(path: Path) -> str:
    """The lines of a module that may call a method of an expression: names are looked for in these alone."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if re.search(rf"\.{_METHOD}\b", line))


def constants() -> Iterator[re.Pattern[str]]:
    """The expressions that are constants of a module, anchored as its text uses them."""
    whole = "".join(_uses(path) for path in Path(envbuild.__path__[0]).rglob("*.py"))
    for module in map(importlib.import_module, sorted(modules())):
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        for name, one in vars(module).items():
            if not isinstance(one, re.Pattern) or f"{name} = " not in source or f"{module.__name__}.{name}" in OWN:
                continue
            pattern = one.pattern if isinstance(one.pattern, str) else one.pattern.decode("latin-1")
            text = _uses(Path(str(module.__file__))) if name.startswith("_") else whole
            used = set(re.findall(rf"\b{name}\b[^\n]*?\.{_METHOD}\b", text))
            begin = r"\A" if used and used <= {"match", "fullmatch"} else ""
            end = r"\Z" if used == {"fullmatch"} else ""
            yield re.compile(f"{begin}(?:{pattern}){end}", one.flags & (re.IGNORECASE | re.MULTILINE | re.DOTALL))


def modules() -> Iterator[str]:
    """The modules of envbuild that define expressions."""
    for found in pkgutil.walk_packages(envbuild.__path__, "envbuild."):
        path = Path(envbuild.__path__[0], *found.name.split(".")[1:])
        text = (path / "__init__.py" if found.ispkg else path.with_suffix(".py")).read_text(encoding="utf-8")
        if re.search(r"^\w+ = re\.compile|^\w+ = \(?\n? *re\.compile", text, re.MULTILINE):
            yield found.name


def example(nodes: Sequence[tuple[Any, Any]], before: str, repeats: set[tuple[str, str]]) -> str:
    """A text that `nodes` match, which stand behind `before`; each long repetition goes to `repeats` with its start."""
    text = ""
    for kind, value in nodes:
        match kind:
            case code.LITERAL:
                text += chr(value)
            case code.ANY | code.NOT_LITERAL | code.IN:
                text += next(c for c in "x1 ./-'(`AB\"" + _literals(value) if _one(kind, value, c))
            case code.BRANCH:
                text += list(example(branch, before + text, repeats) for branch in value[1])[0]  # noqa: RUF015, C400 - all are needed
            case code.SUBPATTERN:
                text += example(value[3], before + text, repeats)
            case code.ATOMIC_GROUP:
                text += example(value, before + text, repeats)
            case code.ASSERT | code.ASSERT_NOT:
                example(value[1], before + text, repeats)
            case _ if kind in _REPEATS:
                least, most, body = value
                once = example(body, before + text, repeats)
                if most > 20:
                    repeats.add((before + text, once))
                text += once * max(least, most > 20)
    return text


def _literals(value: Any) -> str:
    rows = value if isinstance(value, list) else []
    ends = [row[1][0] if row[0] is code.RANGE else row[1] for row in rows if row[0] in (code.LITERAL, code.RANGE)]
    return "".join(map(chr, ends))


def _one(kind: Any, value: Any, character: str) -> bool:
    """Whether a class of characters has this one."""
    if kind is code.ANY:
        return character != "\n"
    if kind is code.NOT_LITERAL:
        return ord(character) != value
    negated = value[0][0] is code.NEGATE
    return any(_in(row, character) for row in value if row[0] is not code.NEGATE) != negated


def _in(row: tuple[Any, Any], character: str) -> bool:
    kind, value = row
    if kind is code.LITERAL:
        return ord(character) == value
    if kind is code.RANGE:
        return bool(value[0] <= ord(character) <= value[1])
    classes = {code.CATEGORY_DIGIT: r"\d", code.CATEGORY_SPACE: r"\s", code.CATEGORY_WORD: r"\w"}
    classes |= {code.CATEGORY_NOT_DIGIT: r"\D", code.CATEGORY_NOT_SPACE: r"\S", code.CATEGORY_NOT_WORD: r"\W"}
    return re.fullmatch(classes[value], character) is not None


# Units that almost match an expression whose alternatives hide them from `example`.
UNITS = ("://a:b", "://a:b/", "x=eyJaaaaaaaa-eyJaaaaaaaa", "TOKEN", "KEY=", "--key ", "-eyJaaaaaaaa", " ", "a ", "=a")


def attacks(pattern: str) -> Iterator[tuple[str, str]]:
    """(start, unit): texts of many units that match almost, so that a search tries every way to match."""
    yield from (("", unit) for unit in UNITS)
    repeats: set[tuple[str, str]] = set()
    whole = example(list(parser.parse(pattern)), "", repeats)
    units = {whole[:-1], whole[1:]} | {u for start, once in repeats for u in (once, start, start + once, start + " ")}
    for unit in units - {""}:
        yield "", unit
    # A start that matches once, and a long repetition behind it.
    yield from repeats


def seconds(pattern: re.Pattern[str], text: str) -> float:
    start = time.process_time()
    pattern.search(text)
    return time.process_time() - start


def slow(
    pattern: re.Pattern[str], start: str, unit: str, measurements: int = 1, sizes: Mapping[int, int] = _SIZES
) -> bool:
    """Whether a text of twice the length takes much more than twice as long, at lengths that take a measurable time.

    Of several measurements each text's shortest counts: other programs on the machine only ever add to one.
    """

    def text(size: int) -> str:
        return f"{start}{unit * (size // len(unit))}\0"

    for size, limit in sizes.items():
        short, long = text(size), text(2 * size)
        if seconds(pattern, short) > _MEASURABLE:
            rows = [(seconds(pattern, long), seconds(pattern, short)) for _ in range(measurements)]
            twice, once = (min(column) for column in zip(*rows, strict=True))
            if once > _MEASURABLE and (limit == 3 or twice > limit * once):
                return twice > limit * once
        elif limit > 3 and seconds(pattern, text(max(sizes))) <= _MEASURABLE:
            return False  # and shorter texts take less
    return False


def test_the_test_finds_expressions_that_are_slow() -> None:
    for text in (r"FAILED (?P<who>.+?): no", r"x\S*?([^\s/]+): no"):
        # Once one attack is found, the others need not be tried. On a busy machine one measurement may miss it.
        tries = ((attack, measurements) for measurements in (1, 3, 10) for attack in attacks(text))
        assert any(slow(re.compile(text), *attack, measurements) for attack, measurements in tries), text


def test_a_line_of_twice_the_length_takes_about_twice_as_long() -> None:
    found: dict[str, tuple[str, str]] = {}
    for text, pattern in sorted(expressions().items()):
        tries = (one for one in attacks(text) if all(slow(pattern, *one, count, _OWN_SIZES) for count in (1, 3, 30)))
        found.update((text, attack) for attack in islice(tries, 1))
    assert found == {}
