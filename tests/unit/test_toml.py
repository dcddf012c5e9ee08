"""envbuild.base.toml: positions checked against tomllib on generated files, decoding, schema."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import EnvbuildError, RecipeError
from envbuild.base.toml import Document, decode, form, json_schema, key, read
from examples import examples

# --- positions -----------------------------------------------------------------------------------

BLANK = st.sampled_from(["", " ", "\t", "  "])
GAP = st.sampled_from(["", " ", "\n", "\n  ", ' # ] } = "\n', "\n# [a]\n\t"])
# Few names, so that tables meet and nest; some need quotes, some look like syntax.
KEYS = st.sampled_from(["a", "b", "a-b", "1", "_", '"a"', "'b'", '"c d"', '"]="', "'#.'", '"\\u00e9\\""', '""', "'\"'"])
SCALARS = st.sampled_from(
    [
        *("1", "-1.5e3", "true", "inf", "0xF", "1979-05-27 07:32:00", "07:32:00", '""', "''"),
        *('"]"', "'}'", '"a # b"', '"\\"]"', "'\\'", '"x = 1"', '"""\n[a]\nb = 1\n"""'),
        *('""""quoted""""', '"""\\"""" # """', "'''\n'a' = ''\n'''", "'''''a'''''"),
    ]
)


def _parses(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[str]) -> str:
    parts = [draw(GAP) + item + draw(GAP) for item in draw(st.lists(inner, max_size=3))]
    comma = draw(st.sampled_from(["", ","])) if parts else ""
    return "[" + ",".join(parts) + comma + draw(GAP) + "]"


@st.composite
def dotted(draw: st.DrawFn) -> str:
    parts = draw(st.lists(KEYS, min_size=1, max_size=3))
    return (draw(BLANK) + "." + draw(BLANK)).join(parts)


@st.composite
def inline_tables(draw: st.DrawFn, inner: st.SearchStrategy[str]) -> str:
    pairs = st.tuples(dotted(), BLANK, inner).map(lambda p: f"{p[0]}{p[1]}={p[1]}{p[2]}")
    text = ""
    for pair in draw(st.lists(pairs, max_size=3)):
        longer = f"{text}{',' if text else ''}{draw(BLANK)}{pair}{draw(BLANK)}"
        text = longer if _parses(f"x = {{{longer}}}") else text
    return "{" + text + "}"


VALUES = st.recursive(SCALARS, lambda inner: arrays(inner) | inline_tables(inner), max_leaves=6)


@st.composite
def statements(draw: st.DrawFn) -> str:
    name, blank = draw(dotted()), draw(BLANK)
    end = draw(st.sampled_from(["\n", " # [[a]] 'b'\n", "\n\n#\n"]))
    form = draw(st.sampled_from(["pair", "pair", "table", "array"]))
    if form == "pair":
        return f"{blank}{name}{blank}={draw(BLANK)}{draw(VALUES)}{end}"
    before, after = ("[[", "]]") if form == "array" else ("[", "]")
    return f"{blank}{before}{blank}{name}{blank}{after}{end}"


@st.composite
def documents(draw: st.DrawFn) -> str:
    """Valid TOML: each statement is kept if tomllib still accepts the whole."""
    text = draw(st.sampled_from(["", "# a = 1\n", "\n\n"]))
    for statement in draw(st.lists(statements(), max_size=12)):
        if _parses(text + statement):
            text += statement
    return text


def paths(value: Any, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*keys, key), inner
            yield from paths(inner, (*keys, key))


KEY_TOKEN = re.compile(r"""[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*'""")


def values_at(text: str) -> Iterator[Any]:
    """What the beginnings of `text`, from the shortest, mean as a TOML value."""
    for end in range(1, len(text) + 1):
        try:
            yield tomllib.loads(f"x = {text[:end]}\n")["x"]
        except tomllib.TOMLDecodeError:
            continue


def same(left: Any, right: Any) -> bool:
    return repr(left) == repr(right)


@examples(400)
@given(documents())
def test_every_key_and_element_has_its_own_position(text: str) -> None:
    data = tomllib.loads(text)
    document = Document(Path("x.toml"), text, data)
    lines = text.split("\n")
    seen: dict[tuple[int, int], tuple[Any, ...]] = {}
    for keys, value in paths(data):
        line, column = document.position(keys)
        assert (line, column) not in seen, (keys, seen[line, column])
        seen[line, column] = keys
        rest = "\n".join([lines[line - 1][column - 1 :], *lines[line:]])
        if isinstance(keys[-1], str):
            token = KEY_TOKEN.match(rest)
            assert token and list(tomllib.loads(f"{token[0]} = 1")) == [keys[-1]], (keys, rest)
            if isinstance(value, dict | list):
                continue
            # A scalar follows its own key, so a namesake elsewhere is told apart.
            rest = rest[token.end() :].lstrip(" \t").removeprefix("=").lstrip(" \t")
        if isinstance(value, dict) and rest.startswith("[["):
            continue
        assert any(same(found, value) for found in values_at(rest)), (keys, rest)


def at(text: str, *keys: str | int) -> tuple[int, int]:
    return Document(Path("x.toml"), text, tomllib.loads(text)).position(keys)


SAMPLE = """\
title = "x" # [no]
[ a . "b c" ]
k.l = [ 1, [
  2 ] ]
t = { u = 1, 'v' = { w = [{}] } }
[[a.list]]
n = 1
[a.list.sub]
[[a.list]]
n = 2
[a.list.sub]
deep = 3
"""


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (("title",), (1, 1)),
        (("a",), (2, 3)),
        (("a", "b c"), (2, 7)),
        (("a", "b c", "k"), (3, 1)),
        (("a", "b c", "k", "l"), (3, 3)),
        (("a", "b c", "k", "l", 1), (3, 12)),
        (("a", "b c", "k", "l", 1, 0), (4, 3)),
        (("a", "b c", "t", "v"), (5, 14)),
        (("a", "b c", "t", "v", "w", 0), (5, 27)),
        (("a", "list"), (6, 5)),
        (("a", "list", 0), (6, 1)),
        (("a", "list", 1), (9, 1)),
        (("a", "list", 1, "n"), (10, 1)),
        (("a", "list", 1, "sub", "deep"), (12, 1)),
        # What is not written falls back to what holds it.
        (("a", "list", 1, "missing", "too"), (9, 1)),
        (("a", "list", 7), (6, 5)),
        (("nothing",), (1, 1)),
        ((), (1, 1)),
    ],
)
def test_position(keys: tuple[str | int, ...], expected: tuple[int, int]) -> None:
    assert at(SAMPLE, *keys) == expected


def test_reading_does_not_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.toml"
    file.write_text("a = 1\n")
    monkeypatch.setattr("envbuild.base.toml.Scanner", None)
    assert read(file).data == {"a": 1}


# --- reading -------------------------------------------------------------------------------------


def message(file: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        read(file)
    assert caught.value.exit_code == 2
    return caught.value.message


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"a = 1\nb = = 2\n", ":2:5: Invalid value"),
        (b"a = 1\r\n\r\nb = = 2\r\n", ":3:5: Invalid value"),
        (b"[a]\nb = 1\nb = 2\n", ":3:6: Cannot overwrite a value"),
        (b"a = [1,\n  2\n\n", ":2:4: Unclosed array at the end of the file"),
        (b"\xef\xbb\xbfa = = 1", ":1:5: Invalid value"),
        (b"a = 1\nb = '\xc3\xa9\xff'", ":2:7: byte 0xff is not UTF-8"),
        (b"\xff\xfea", ":1:1: byte 0xff is not UTF-8"),
        (b"\xef\xbb\xbfa = 1\n\xff", ":2:1: byte 0xff is not UTF-8"),
        (b"a = " + b"[" * 5000, ": arrays or tables are nested too deeply"),
    ],
)
def test_what_is_not_toml(tmp_path: Path, raw: bytes, expected: str) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(raw)
    assert message(file) == f"{file}{expected}"


def test_huge_integer(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("a = " + "9" * 5000)
    assert message(file).startswith(f"{file}: ")


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    assert message(tmp_path / "no.toml") == f"{tmp_path}/no.toml: no such file"
    assert message(tmp_path) == f"{tmp_path}: a directory, where a TOML file is expected"


def test_byte_order_mark_is_not_content(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(b"\xef\xbb\xbfa = 1\r\nb = '''\r\n'''\r\n")
    document = read(file)
    assert document.data == {"a": 1, "b": ""}
    assert document.position(("a",)) == (1, 1)
    assert document.where("b") == f"{file}:2:1"


# --- decoding ------------------------------------------------------------------------------------


def _even(value: int) -> str | None:
    return f"{value} is odd" if value % 2 else None


@dataclass(frozen=True)
class Wheel:
    size: int = field(metadata={"minimum": 2, "check": _even, "doc": "In inches.", "example": 26})
    kind: Literal["steel", "carbon"] = "steel"


@dataclass(frozen=True)
class Bike:
    name: str = field(metadata={"pattern": r"^[a-z]+$"})
    wheels: dict[str, Wheel] = field(
        metadata={"min_items": 1, "key_check": lambda key: "is spare" if key == "spare" else None}
    )
    gears: tuple[int, ...] = field(default=(), metadata={"minimum": 1})
    weight: float | None = None
    electric: bool = False
    stickers: tuple[Wheel, ...] = ()
    front: Wheel = field(default_factory=lambda: Wheel(20))
    mirrors: dict[str, str] = field(default_factory=dict)


def bike(text: str, **options: Any) -> Bike:
    return decode(Document(Path("b.toml"), text, tomllib.loads(text)), Bike, **options)


def complaints(text: str, **options: Any) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        bike(text, **options)
    return caught.value.message.splitlines()


GOOD = 'name = "b"\nwheels.back = { size = 4 }\n'


def test_decode_all_shapes() -> None:
    text = GOOD + (
        'gears = [1, 2]\nweight = 9\nelectric = true\nmirrors = { left = "l" }\n'
        '[front]\nsize = 6\nkind = "carbon"\n[[stickers]]\nsize = 2\n'
    )
    assert bike(text) == Bike(
        "b", {"back": Wheel(4)}, (1, 2), 9.0, True, (Wheel(2),), Wheel(6, "carbon"), {"left": "l"}
    )
    assert isinstance(bike(text).weight, float)
    assert bike(GOOD) == Bike("b", {"back": Wheel(4)})


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("gears = [1, true]", "b.toml:3:13: 'gears[1]': expected an integer, got a boolean"),
        ("gears = 1", "b.toml:3:1: 'gears': expected an array of integers, got an integer"),
        ("gears = [3,\n 0]", "b.toml:4:2: 'gears[1]': expected at least 1, got 0"),
        ("electric = 1", "b.toml:3:1: 'electric': expected a boolean, got an integer"),
        ("weight = true", "b.toml:3:1: 'weight': expected a number, got a boolean"),
        ("weight = nan", "b.toml:3:1: 'weight': expected a finite number, got nan"),
        (f"weight = 1{'0' * 400}", "b.toml:3:1: 'weight': expected a number, got an integer"),
        ("weight = 1979-05-27", "b.toml:3:1: 'weight': expected a number, got a date or time"),
        ("stickers = 1", "b.toml:3:1: 'stickers': expected an array of tables, got an integer"),
        ("front = []", "b.toml:3:1: 'front': expected a table, got an array"),
        ("front.kind = 'steel'", "b.toml:3:1: missing key 'size' in [front]"),
        ("front.size = 3", "b.toml:3:7: 'size' in [front]: 3 is odd"),
        ("wheels.spare.size = 2", "b.toml:3:8: 'spare' in [wheels]: is spare"),
        (
            "front = { size = 2, kind = 'carbn' }",
            "b.toml:3:21: 'kind' in [front]: 'carbn' is not accepted; did you mean 'carbon'? Accepted: steel, carbon",
        ),
        (
            "[wheels.'a b']\nsize = 2\nszie = 1",
            "b.toml:5:1: unknown key 'szie' in [wheels.'a b']; did you mean 'size'? Accepted: size, kind",
        ),
        ('[front]\nsize = 2\n"x\\ny" = 1', "b.toml:5:1: unknown key 'x\\ny' in [front]; accepted: size, kind"),
    ],
)
def test_one_mistake(extra: str, expected: str) -> None:
    assert complaints(GOOD + extra) == [expected]


def test_missing_and_empty() -> None:
    assert complaints("wheels = {}\ngear = []\n") == [
        "b.toml:1:1: 'wheels': expected at least 1, got 0",
        "b.toml:1:1: missing key 'name'",
        "b.toml:2:1: unknown key 'gear' at the top level; did you mean 'gears'? Accepted: name,"
        " wheels, gears, weight, electric, stickers, front, mirrors",
    ]


def test_pattern_is_of_the_whole_value() -> None:
    assert complaints('name = "b\\n"\nwheels.back.size = 4\n') == ["b.toml:1:1: 'name': 'b\\n' does not match ^[a-z]+$"]


def test_check_of_the_whole_joins_the_others_in_order() -> None:
    found = complaints("gears = [0]\n" + GOOD + "weight = 'x'\n", check=lambda document: [(("name",), "is taken")])
    assert [line.split(": ")[0] for line in found] == ["b.toml:1:10", "b.toml:2:1", "b.toml:4:1"]


def test_keys_with_defaults_and_forms_of_values() -> None:
    @dataclass(frozen=True)
    class Rack:
        names: dict[str, str] = key({}, "Names.", key_check=form("[a-z]+", "is no name"))
        bags: tuple[str, ...] = key((), "Bags.", pattern="^[a-z]*$", min_items=1)

    first, second = Rack(), Rack()
    assert first == second and first.names is not second.names
    with pytest.raises(RecipeError) as caught:
        decode(Document(Path("r.toml"), text := "bags = []\n[names]\nA = 'x'\n", tomllib.loads(text)), Rack)
    assert caught.value.message.splitlines() == [
        "r.toml:1:1: 'bags': expected at least 1, got 0",
        "r.toml:3:1: 'A' in [names]: 'A' is no name",
    ]


def test_another_error_class(tmp_path: Path) -> None:
    class SiteError(EnvbuildError):
        pass

    with pytest.raises(SiteError):
        bike("name = 1\n", error=SiteError)
    with pytest.raises(SiteError):
        read(tmp_path / "none.toml", SiteError)


# --- schema --------------------------------------------------------------------------------------

SCHEMA = json_schema(Bike, id="urn:bike", title="Bike")


def test_schema_says_what_the_dataclass_says() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["required"] == ["name", "wheels"]
    size = SCHEMA["properties"]["front"]["properties"]["size"]
    assert size == {"type": "integer", "minimum": 2, "description": "In inches.", "examples": [26]}
    assert SCHEMA["properties"]["electric"]["default"] is False


@pytest.mark.parametrize(
    "extra",
    [
        "gears = [0]",
        "weight = 'x'",
        "electric = 1",
        "colour = 1",
        "front.kind = 'steel'",
        "front = { size = 2, kind = 'tin' }",
        "stickers = [{ size = 'a' }]",
        "mirrors.left = 1",
    ],
)
def test_schema_and_decode_reject_the_same(extra: str) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    assert validator.is_valid(tomllib.loads(GOOD))
    assert not validator.is_valid(tomllib.loads(GOOD + extra))
    assert complaints(GOOD + extra)
