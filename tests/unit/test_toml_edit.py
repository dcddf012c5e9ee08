"""Edits of TOML: what is not edited stays as it is, byte for byte."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from envbuild.imports.toml_edit import delete_value, set_value
from examples import examples

TEXT = """\
# mine
name = "x"  # the name
requirements = [
  # data
  "numpy==2.2.6",  # because of old code
  "tqdm",
  "pyyaml>=6"  # last
]
short = ["a", "b"]

# CPUs
[targets.cpu-x86_64]
requirements = ["torch==2.13.0+cpu"]  # torch

# GPUs of the second rack
[targets.cu126-x86_64]
gpus = ["h100"]

# Proof
[verify]
nodes = 1
[image.env]
A = "1"
"""


@pytest.mark.parametrize(
    "keys, value, old, new",
    [
        (("requirements", 3), "rich", '  "pyyaml>=6"  # last\n', '  "pyyaml>=6",  # last\n  "rich"\n'),
        (("requirements", 0), "numpy==2.3", '"numpy==2.2.6"', '"numpy==2.3"'),
        (("short", 2), "c", '["a", "b"]', '["a", "b", "c"]'),
        (("name",), "y", 'name = "x"', 'name = "y"'),
        (("python",), "3.12", 'short = ["a", "b"]\n', 'short = ["a", "b"]\npython = "3.12"\n'),
        (("targets", "cu126-x86_64", "requirements"), ["t"], '["h100"]\n', '["h100"]\nrequirements = ["t"]\n'),
        (("targets", "cpu-x86_64", "indexes"), ["u"], "  # torch\n", '  # torch\nindexes = ["u"]\n'),
        (("targets", "cpu-aarch64"), {}, 'A = "1"\n', 'A = "1"\n\n[targets.cpu-aarch64]\n'),
        (("conda", "channels"), ["c"], 'A = "1"\n', 'A = "1"\n\n[conda]\nchannels = ["c"]\n'),
        (("image", "workdir"), "/w", 'A = "1"\n', 'A = "1"\n\n[image]\nworkdir = "/w"\n'),
        (("image", "env", "B"), "2", 'A = "1"\n', 'A = "1"\nB = "2"\n'),
    ],
)
def test_a_value_is_set(keys: tuple[str | int, ...], value: Any, old: str, new: str) -> None:
    assert TEXT.count(old) == 1
    assert set_value(TEXT, keys, value) == TEXT.replace(old, new)


@pytest.mark.parametrize(
    "keys, old",
    [
        (("requirements", 0), '  "numpy==2.2.6",  # because of old code\n'),
        (("requirements", 1), '  "tqdm",\n'),
        (("short", 0), '"a", '),
        (("verify", "nodes"), "nodes = 1\n"),
        (("targets", "cpu-x86_64"), '[targets.cpu-x86_64]\nrequirements = ["torch==2.13.0+cpu"]  # torch\n\n'),
        (("image",), '[image.env]\nA = "1"\n'),
    ],
)
def test_a_value_is_deleted(keys: tuple[str | int, ...], old: str) -> None:
    assert TEXT.count(old) == 1
    assert delete_value(TEXT, keys) == TEXT.replace(old, "")


@pytest.mark.parametrize(
    "text, new",
    [
        ("t = { a = { r = [] } }\n", "t = { a = { r = [], i = [1]} }\n"),
        ("t.a.r = []\n", "t.a.r = []\nt.a.i = [1]\n"),
        ("[t]\na.r = []\n# end\n", None),
    ],
)
def test_inline_tables_and_dotted_keys(text: str, new: str | None) -> None:
    done = set_value(text, ("t", "a", "i"), [1])
    assert tomllib.loads(done)["t"]["a"] == {"r": [], "i": [1]}
    assert new is None or done == new


def _comments(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("#")]


RECIPES = sorted(Path(__file__).parents[2].glob("recipes/*/recipe.toml"))


@examples(150, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_shipped_recipes_keep_their_comments_whatever_is_added(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(RECIPES)).read_text()
    before, here = text, tomllib.loads(text)
    for _ in range(data.draw(st.integers(1, 4))):
        tables: list[tuple[str, ...]] = [(), *(("targets", one) for one in here["targets"]), ("image",), ("conda",)]
        table = data.draw(st.sampled_from(tables))
        inside: Any = here
        for key in table:
            inside = inside.get(key, {})
        lists = [key for key, value in inside.items() if isinstance(value, list)]
        name = data.draw(st.sampled_from([*lists, "requirements", "extra key"]))
        value = data.draw(st.text(max_size=9))
        old = inside.get(name)
        if isinstance(old, list):
            text = set_value(text, (*table, name, data.draw(st.integers(0, len(old)))), value)
        else:
            text = set_value(text, (*table, name), [value])
        here = tomllib.loads(text)
    assert [one for one in _comments(text) if one in _comments(before)] == _comments(before)
