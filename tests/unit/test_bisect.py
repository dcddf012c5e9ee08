"""The search and the decision of `envbuild bisect`: pure functions, with simulated builds and recorded noise."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import UsageError
from envbuild.bisect.run import LEAST, Judge, is_faster, known_gap, spread_of
from envbuild.bisect.search import Culprits, Mix, MixState, bound, differences, grouped, mixed, search
from envbuild.cli.commands import cli
from envbuild.lock.format import Lock
from envbuild.recipe.sources import LockedPackage
from envbuild.run_environment import load_environment
from examples import examples

# Step times of launches of the trainer, one after the other, on a machine that others use, too.
STEPS: list[float] = json.loads((Path(__file__).parent / "data" / "step_times.json").read_text())


def lock_of(**versions: str) -> Lock:
    rows = tuple(
        LockedPackage(name.replace("_", "-"), version, (f"{name}{version}",)) for name, version in versions.items()
    )
    return Lock("tiny", "cpu-x86_64", "3.11", "x86_64-manylinux_2_28", "sha256:0", rows)


def test_versions_that_require_each_other_move_together() -> None:
    good = lock_of(torch="2.7", nvidia_nccl_cu12="2.26", numpy="1.26", scipy="1.11", old="1", same="1")
    bad = lock_of(torch="2.8", nvidia_nccl_cu12="2.27", numpy="2.0", scipy="1.13", new="1", same="1")
    metadata = {
        ("torch", "2.7"): ["nvidia-nccl-cu12==2.26", "old ; python_version < '3.12'", "x ; extra == 'no'"],
        ("torch", "2.8"): ["NVIDIA_nccl.cu12==2.27", "new[more]", "numpy==1 ; python_version > '3.11'", "no == line"],
        ("scipy", "1.11"): ["numpy<2"],
        ("scipy", "1.13"): ["numpy>=1.20"],
    }
    found = differences(good, bad)
    assert [str(one) for one in found if one.name in ("new", "old", "numpy")] == [
        "new none -> 1",
        "numpy 1.26 -> 2.0",
        "old 1 -> none",
    ]
    groups = grouped(found, metadata, ["same"], "3.11")
    # old goes only with the new torch, numpy 2 only with the new scipy; both come later.
    names = [tuple(one.name for one in group.members) for group in groups]
    assert names == [("new",), ("scipy",), ("numpy",), ("nvidia-nccl-cu12", "torch"), ("old",)]
    assert [sorted(group.needs) for group in groups] == [[], [], [1], [0], [0, 3]]
    both = mixed(good, found, {"torch", "nvidia-nccl-cu12", "new", "old"})
    assert "old" not in both.versions and both.versions["scipy"] == "1.11"
    assert (both.versions["torch"], both.versions["new"], both.versions["numpy"]) == ("2.8", "1", "1.26")
    assert (
        mixed(good, found, {one.name for one in found}).digest
        == replace(bad, packages=tuple(sorted(bad.packages, key=lambda one: one.name))).digest
    )


def test_an_extra_binds_if_a_package_asks_for_it() -> None:
    good, bad = lock_of(cuda="12.6", cublas="6", torch="1"), lock_of(cuda="12.8", cublas="8", torch="2")
    metadata = {
        ("cuda", "12.6"): ["cublas==6 ; extra == 'cublas'"],
        ("cuda", "12.8"): ["cublas==8 ; extra == 'cublas'"],
        ("torch", "2"): ["cuda[cublas]==12.8"],
        ("torch", "1"): ["cuda"],
    }
    names = [[one.name for one in group.members] for group in grouped(differences(good, bad), metadata, (), "3.11")]
    assert names == [["cublas", "cuda"], ["torch"]]
    alone = {key: lines for key, lines in metadata.items() if key[0] == "cuda"}
    assert len(grouped(differences(good, bad), alone, (), "3.11")) == 3


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[set[int]], set[int]]:
    """Groups with closed needs, and one or two groups that are bad together."""
    count = draw(st.integers(1, 40))
    needs: list[set[int]] = []
    for index in range(count):
        direct = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        needs.append(direct.union(*(needs[one] for one in direct)))
    return needs, draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2))


@examples(300)
@given(cases(), st.integers(0, 3))
def test_the_groups_are_found_within_the_bound(case: tuple[list[set[int]], set[int]], more: int) -> None:
    needs, planted = case
    asked: list[Mix] = []

    def test(mix: Mix) -> MixState:
        assert all(needs[one] <= mix for one in mix), "no environment that cannot be installed"
        asked.append(mix)
        return MixState.BAD if planted <= mix else MixState.GOOD

    found, packages = search(needs, len(needs) * (1 + more), test), len(needs) * (1 + more)
    assert found.reproduced and found.alone
    named = {one for group in found.groups for one in group}
    # Those that a found group needs anyway need not be named.
    assert named <= planted and planted <= named.union(*(needs[one] for one in named))
    assert len(asked) == len(set(asked))
    assert len(asked) <= bound(packages) + (len(found.groups) - 1) * (bound(packages) - 1)


@pytest.mark.parametrize(("whole", "nothing"), [(MixState.GOOD, MixState.GOOD), (MixState.BAD, MixState.BAD)])
@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_locks_that_do_not_differ_by_the_metric(whole: MixState, nothing: MixState, count: int) -> None:
    found = search([()] * count, count, lambda mix: whole if mix else nothing)
    assert not found.reproduced and "lock is not" in found.why and not found.groups


def test_untestable_mixes_widen_the_result_and_lead_to_no_wrong_one() -> None:
    def found(count: int, planted: int, untestable: range) -> Culprits:
        def test(mix: Mix) -> MixState:
            if 0 < len(mix) < count and max(mix) in untestable:
                return MixState.UNTESTABLE
            return MixState.BAD if planted in mix else MixState.GOOD

        return search([()] * count, count, test)

    assert found(9, 2, range(4, 7)).groups == (Mix({2}),)
    assert found(9, 5, range(4, 7)).groups == (Mix({4, 5, 6, 7}),)
    alone = found(4, 3, range(4))
    assert alone.groups == (Mix(range(4)),) and alone.alone is True  # only the two locks can be judged


def simulated(
    chance: random.Random, count: int, planted: int | None, slow: float, noise: float
) -> tuple[Culprits, int]:
    """Search with measurements that have the recorded noise, outliers included, scaled to a deviation of `noise`."""
    logs = [math.log(step / statistics.median(STEPS)) for step in STEPS]
    scale = noise / statistics.pstdev(logs)
    series: list[list[float]] = []
    gap, tests = math.log(1 + LEAST), 0

    def measure(mix: Mix) -> float:
        return (slow if planted in mix else 1.0) * math.exp(chance.choice(logs) * scale)

    def test(mix: Mix) -> MixState:
        nonlocal gap, tests
        tests += 1
        if len(mix) == count:
            return MixState.BAD
        ratios: list[float] = []
        series.append(ratios)
        while len(ratios) < 40:
            ratios.append(math.log(measure(Mix(range(count))) / measure(mix)))
            faster = is_faster(ratios, gap, spread_of(series))
            if faster is not None:
                gap = max(gap, known_gap(ratios, spread_of(series))) if faster else gap
                return MixState.GOOD if faster else MixState.BAD
        return MixState.UNTESTABLE

    return search([()] * count, count, test), tests


@pytest.mark.parametrize("slow", [None, 1.12, 1.3, 2.0])
def test_no_package_is_blamed_for_noise(slow: float | None) -> None:
    """Fifty runs with 5 % noise: the slow package is found in each, within the bound, and no other is blamed."""
    for seed in range(50):
        chance = random.Random(seed)
        count = chance.randint(1, 24)
        planted = None if slow is None else chance.randrange(count)
        found, tests = simulated(chance, count, planted, slow or 1.0, 0.05)
        assert tests <= bound(count)
        assert found.groups == (() if planted is None else (Mix({planted}),)), (seed, found)


def test_a_decision_needs_several_pairs() -> None:
    gap = math.log(1 + LEAST)
    assert is_faster([5.0] * 5, gap, spread_of([])) is None and is_faster([5.0] * 6, gap, spread_of([])) is True
    assert is_faster([-5.0] * 6, gap, spread_of([])) is False
    assert is_faster([gap / 2] * 1000, gap, spread_of([])) is None
    assert is_faster([], gap, spread_of([])) is None
    assert spread_of([[0.0, 0.4, 0.8], [1.0, 1.4, 1.8]]) == pytest.approx(0.4 * 1.0483)


@pytest.mark.parametrize(
    ("command", "state", "told"),
    [
        ("sleep 60 & echo done", MixState.GOOD, {"exit": 0, "output": "done"}),
        ("sleep 60 & exit 3", MixState.BAD, {"exit": 3, "output": ""}),
        ("exit 125", MixState.UNTESTABLE, {"exit": 125, "output": ""}),
        ("sleep 60", MixState.BAD, {"exit": "none after 1 s"}),
    ],
)
def test_a_command_is_judged_by_its_exit_whatever_it_left_running(
    command: str, state: MixState, told: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envbuild.bisect.run.launch_environment", lambda *_: dict(os.environ))
    judge = Judge(command, 1, load_environment(), lambda _: None)
    assert judge._command(tmp_path, 1.0) == (state, told)


def test_bisect_advises_nobody_to_delete_a_lock() -> None:
    folder = Path(__file__).parents[2] / "recipes" / "pt_minimal"
    done = CliRunner().invoke(cli, ["bisect", str(folder / "cpu-x86_64.image.toml"), str(folder)])
    assert isinstance(done.exception, UsageError) and "not an envbuild lock" in done.exception.message
    assert done.exception.hint == "give two locks of wheels, TARGET.requirements.txt, of different times"
