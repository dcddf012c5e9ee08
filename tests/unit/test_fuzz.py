"""Whatever bytes a reader gets, it returns or raises a documented error; tests/lab/fuzz.py tries more by hand."""

from __future__ import annotations

import json
import math
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.fuzz_inputs import grafted
from lab.fuzz_readers import READERS, fault_of, input_of, seeds_of

from examples import SHARE, examples

KEPT = Path(__file__).with_name("data") / "fuzz/kept"
# Inputs that showed a fault once: READER--WHAT.
INPUTS = sorted(path.name for path in KEPT.iterdir())
# Hypothesis finds values that nobody thought of, and the smallest that shows a fault; it is slower than mutations.
EXAMPLES = 60
# Of each reader's inputs. A run of all tests has the first quarter; a job of .github/workflows/test.yml tries all.
MUTATIONS = 1.0 if os.environ.get("FUZZ") == "all" else 0.25
OF_JSON = (
    "state",
    "receipt",
    "seal",
    "manifest",
    "conda record",
    "layer list",
    "source manifest",
    "file manifest",
    "bundle",
    "manifest of an image",
    "configuration of an image",
    "layout",
    "segment",
    "config.json of docker",
    "token",
    "JSON index page",
    "init, Pipfile.lock",
)
OF_WORDS = (
    "relation",
    "Debian versions",
    "challenge",
    "Retry-After",
    "mountinfo",
    "names",
    "Release",
    "entry points",
    "netrc",
    "apt's sources",
    "pip.conf",
    "wheel lock",
    "recipe",
    "site",
    "job script",
    "job manifest",
    "message",
    "init, requirements.txt",
    "init, Dockerfile",
    "init, pyproject.toml",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def check(name: str, data: bytes, folder: Path, what: str) -> None:
    if fault := fault_of(name, data, folder):
        raise AssertionError(f"{name}: {what}") from fault


def test_there_are_inputs_enough() -> None:
    hypothesis = EXAMPLES * len(OF_JSON + OF_WORDS)
    assert sum(reader.examples for reader in READERS.values()) + hypothesis >= 20_000


@pytest.mark.parametrize("name", READERS)
def test_mutations_are_no_traceback(name: str, tmp_path: Path) -> None:
    for number in range(math.ceil(READERS[name].examples * min(SHARE, MUTATIONS))):
        check(name, input_of(name, number), tmp_path, f"python tests/lab/fuzz.py --reader '{name}' --number {number}")


@pytest.mark.parametrize("kept", INPUTS)
def test_an_input_that_showed_a_fault_once_is_no_traceback(kept: str, tmp_path: Path) -> None:
    check(kept.partition("--")[0], (KEPT / kept).read_bytes(), tmp_path, kept)


@pytest.mark.parametrize("name", OF_JSON)
def test_values_of_any_type_are_no_traceback(name: str, tmp_path: Path) -> None:
    seeds = [json.loads(line) for seed in seeds_of(name) for line in seed.splitlines() if _is_json(line)]
    whole = [json.loads(seed) for seed in seeds_of(name) if _is_json(seed)]

    @examples(EXAMPLES)
    @given(JSON, st.integers(0, 1 << 32))
    def run(value: Any, place: int) -> None:
        rng = random.Random(place)
        document = json.loads(json.dumps(rng.choice(whole or seeds)))
        data = json.dumps(grafted(document, rng, [value])).encode()
        check(name, data, tmp_path, repr(data))

    run()


@pytest.mark.parametrize("name", OF_WORDS)
def test_words_in_any_order_are_no_traceback(name: str, tmp_path: Path) -> None:
    words = sorted({word for seed in seeds_of(name)[:5] for word in re.findall(rb"\w+|\s|[^\w\s]", seed[:3000])})

    @examples(EXAMPLES)
    @given(st.lists(st.sampled_from(words) | st.binary(max_size=3), max_size=30))
    def run(parts: list[bytes]) -> None:
        check(name, b"".join(parts), tmp_path, repr(parts))

    run()


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
