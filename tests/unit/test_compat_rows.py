"""Every row of data/compatibility.toml, good and bad, and the judgement on whatever versions look like."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.compat.judge import applies, judge
from envbuild.compat.rows import (
    CompatFinding,
    CompatRule,
    Driver,
    Libfabric,
    Nccl,
    NcclPin,
    Plugin,
    Rccl,
    Release,
    TorchBuild,
    TorchRocm,
    key,
    load_rows,
    matches,
    older,
    row_of,
)
from envbuild.compat.stack import _FIELDS, EXACT, Stack
from envbuild.fabrics import Fabric, load_fabrics

ROWS = load_rows()
DATA = Path(__file__).parents[2] / "envbuild" / "data" / "compatibility.toml"
BARE = Stack(arch="x86_64", python="3.11", glibc="2.28")


def near(specifier: str) -> Iterator[str]:
    """Versions at and beside each limit of `specifier`."""
    for limit in re.findall(r"[0-9.]+", specifier):
        numbers = [int(part) for part in limit.split(".")]
        yield limit
        for at in range(len(numbers)):
            for step in (1, -1):
                moved = [*numbers[:at], numbers[at] + step]
                if moved[-1] >= 0:
                    yield ".".join(map(str, moved))


def inside(specifier: str) -> str:
    return next(version for version in near(specifier) if matches(version, specifier))


def outside(specifier: str) -> str:
    return next(version for version in near(specifier) if matches(version, specifier) is False)


def of(stack: Stack, subject: str, source: str = "") -> list[CompatFinding]:
    """The findings of `stack` about `subject`, from `source`."""
    return [one for one in judge(stack) if one.subject == subject and source in one.source]


def statuses(stack: Stack, subject: str, source: str = "") -> list[str]:
    return [one.status for one in of(stack, subject, source)]


def refused(stack: Stack, subject: str, source: str) -> CompatFinding:
    found = [one for one in of(stack, subject, source) if one.status == "bad"]
    assert len(found) == 1 and found[0].fix and found[0].date
    return found[0]


def name_of(row: object) -> str:
    return " ".join(str(getattr(row, one.name)) for one in fields(row)[2:5])  # type: ignore[arg-type]


@pytest.mark.parametrize("row", ROWS.drivers, ids=name_of)
def test_driver(row: Driver) -> None:
    stack = replace(BARE, cuda=inside(row.cuda), driver=row.minimum)
    assert statuses(stack, "driver") == ["good"]
    assert statuses(replace(stack, driver=None), "driver") == ["note"]
    old = replace(stack, driver=f"{int(row.minimum) - 1}.99.99")
    assert row.minimum in refused(old, "driver", row.source).fix


@pytest.mark.parametrize("row", ROWS.torch, ids=name_of)
def test_torch_build(row: TorchBuild) -> None:
    stack = replace(BARE, arch=row.arch, torch=inside(row.versions), torch_origin="recipe")
    for cuda in row.cuda:
        assert statuses(replace(stack, cuda=cuda), "torch", row.source) == ["good"]
    other = replace(stack, cuda="12.1")
    if row.complete:
        fix = refused(other, "torch", row.source).fix
        assert f"cu{row.cuda[0].replace('.', '')}-{row.arch}" in fix
        own = replace(other, torch=f"{other.torch}+cu121", torch_origin="lock")
        assert statuses(own, "torch") == ["unknown"], "an index of one's own may have it"
    else:
        assert statuses(other, "torch", row.source) == ["unknown"]
    if row.glibc:
        assert statuses(stack, "glibc", row.source) == ["good"]
        low = replace(stack, glibc="2.17")
        assert f'glibc = "{row.glibc}"' in refused(low, "glibc", row.source).fix
        assert statuses(replace(low, torch_origin="lock"), "glibc") == ["unknown"]
    assert row.default in (*row.cuda, "cpu")
    assert row.nccl in ("wheel", "inside", "")


@pytest.mark.parametrize("row", ROWS.torch_rocm, ids=name_of)
def test_torch_for_rocm(row: TorchRocm) -> None:
    stack = replace(BARE, torch=inside(row.versions), torch_origin="recipe")
    for rocm in row.rocm:
        assert statuses(replace(stack, rocm=rocm), "torch", row.source) == ["good"]
    assert statuses(replace(stack, rocm="5.0"), "torch") == ["unknown"]
    assert statuses(replace(stack, torch=None, rocm=row.rocm[0]), "torch") == ["unknown"]


@pytest.mark.parametrize("row", ROWS.rccl, ids=name_of)
def test_rccl(row: Rccl) -> None:
    stack = replace(BARE, torch="2.9.1", rocm=inside(row.rocm))
    assert statuses(stack, "nccl", row.source) == ["good"]
    assert statuses(replace(stack, rocm=outside(row.rocm)), "nccl", row.source) == []


@pytest.mark.parametrize("row", ROWS.nccl_pins, ids=name_of)
@pytest.mark.parametrize("origin", ["wheel", "source", "host", "lock"])
def test_nccl_pin(row: NcclPin, origin: str) -> None:
    for cuda in row.cuda:
        torch = inside(row.torch)
        assert ROWS.pin(torch, cuda) == row == ROWS.pin(f"{torch}+cu126", cuda)
        stack = replace(BARE, cuda=cuda, torch=torch, torch_origin="lock", nccl_origin=origin)
        for good in (row.nccl, f"{row.nccl}-1", "99.1"):
            assert statuses(replace(stack, nccl=good), "nccl", row.source) == ["good"]
        major, minor, _ = row.nccl.split(".")
        for bad in (f"{major}.{int(minor) - 1}.99", "2.9.9"):
            fix = refused(replace(stack, nccl=bad), "nccl", row.source).fix
            assert f'version = "{row.nccl}"' in fix and "[layers.nccl]" in fix


@pytest.mark.parametrize("row", [*ROWS.nccl, *ROWS.plugins], ids=name_of)
def test_net_apis(row: Nccl | Plugin) -> None:
    """A side that speaks what the row speaks, and one that speaks nothing of it, both made up."""
    mine = inside(row.versions)
    for apis, status in ((row.apis, "good"), ((99,), "bad")):
        if isinstance(row, Nccl):
            other = Plugin(">=1", apis, ">=1", "libx.so", source="made up", date="2026-01-01")
            rows, stack = replace(ROWS, plugins=(other,)), replace(BARE, nccl=mine, plugin="1.0")
        else:
            rows = replace(ROWS, nccl=(Nccl(">=1", apis, source="made up", date="2026-01-01"),))
            stack = replace(BARE, nccl="1.0", plugin=mine)
        found = [one for one in judge(stack, rows) if one.subject == "plugin"]
        assert [one.status for one in found] == [status]
        assert row.source in found[0].source
        if status == "good":
            assert f"v{max(row.apis)} is used" in found[0].text
        else:
            assert "take a" in found[0].fix and "falls back to sockets" in found[0].text


@pytest.mark.parametrize("row", ROWS.plugins, ids=name_of)
def test_oldest_libfabric_of_a_plugin(row: Plugin) -> None:
    stack = replace(BARE, plugin=inside(row.versions), libfabric_origin="source")
    good = replace(stack, libfabric=inside(row.libfabric))
    assert "good" in statuses(good, "libfabric", row.source)
    bad = replace(stack, libfabric=outside(row.libfabric))
    assert row.libfabric in refused(bad, "libfabric", row.source).fix
    assert re.fullmatch(r"libnccl-net(-ofi)?\.so", row.library)


@pytest.mark.parametrize("row", ROWS.libfabric, ids=name_of)
def test_providers_of_a_libfabric(row: Libfabric) -> None:
    stack = replace(BARE, plugin="1.21.1", libfabric=inside(row.versions), libfabric_origin="host")
    assert row.symbol in of(stack, "libfabric", row.source)[-1].text
    for fabric in (one for one in load_fabrics().values() if one.provider):
        if fabric.provider in row.providers:
            wanted = replace(stack, fabric=fabric.name, provider=fabric.provider)
            assert statuses(wanted, "fabric", row.source) == ["good"]
    without = replace(ROWS, libfabric=(replace(row, providers=("shm",)),))
    wanted = replace(stack, fabric="tcp-ofi", provider="tcp")
    found = [one for one in judge(wanted, without) if one.subject == "fabric"]
    assert [one.status for one in found] == ["bad"] and found[0].fix


@pytest.mark.parametrize("row", load_fabrics().values(), ids=lambda row: row.name)
def test_fabric(row: Fabric) -> None:
    stack = replace(BARE, cuda="12.6", fabric=row.name, provider=row.provider)
    have = replace(stack, plugin="1.21.1", libfabric="2.1.0", libfabric_origin="host")
    assert "bad" not in statuses(have, "fabric")
    if row.provider:
        assert "[layers.aws-ofi-nccl]" in refused(stack, "fabric", row.source).fix
        assert statuses(replace(stack, base=True), "fabric") == ["unknown"]
    else:
        assert "bad" not in statuses(stack, "fabric")


def made(rule: CompatRule, choose: Callable[[str], str]) -> Stack:
    """A stack of which `choose` says, from each specifier, which version it has."""
    stack, packages = BARE, {}
    for name, wanted in rule.when.items():
        if name == "plugin_aws":
            stack = replace(stack, plugin_aws=wanted == "true")
        elif name in EXACT:
            stack = replace(stack, **{name: wanted})
        elif name in _FIELDS:
            stack = replace(stack, **{name: choose(wanted)})
        else:
            packages[name] = choose(wanted)
    return replace(stack, packages=tuple(packages.items()))


@pytest.mark.parametrize("rule", ROWS.rules, ids=lambda rule: rule.id)
def test_rule(rule: CompatRule) -> None:
    bad = made(rule, inside)
    found = [one for one in judge(bad) if one.source == rule.source]
    assert [one.status for one in found] == [rule.status]
    assert found[0].fix == rule.fix and rule.reason in found[0].text and found[0].subject == rule.subject
    for name, wanted in rule.when.items():  # each condition counts
        if name == "plugin_aws":
            good = replace(bad, plugin_aws=False)
        elif name in EXACT:
            good = replace(bad, **{name: "another"})
        elif name in _FIELDS:
            good = replace(bad, **{name: outside(wanted)})
        else:
            good = replace(bad, packages=tuple({**dict(bad.packages), name: outside(wanted)}.items()))
        assert not applies(rule, good) and rule.source not in [one.source for one in judge(good)]


@pytest.mark.parametrize(
    ("change", "subject", "said"),
    [
        ({"plugin": "1.14.0", "libfabric": "2.1.0", "provider": "tcp", "fabric": "tcp-ofi"}, "plugin", "1.14.2"),
        ({"plugin": "1.16.3", "cuda": "13.0"}, "plugin", "1.17.1"),
        ({"torch": "2.7.1", "torch_origin": "lock", "nccl": "2.25.1", "cuda": "12.6"}, "nccl", "2.26.2"),
        ({"nccl": "2.12.12-1", "plugin": "1.21.1"}, "plugin", "aws-ofi-nccl >=1.1"),
        ({"plugin": "1.21.1", "plugin_aws": True, "libfabric": "1.21.1"}, "libfabric", "1.22.0"),
    ],
)
def test_the_pairs_that_the_field_fell_for_are_refused(change: dict[str, object], subject: str, said: str) -> None:
    found = [one for one in of(replace(BARE, **change), subject) if one.status == "bad"]  # type: ignore[arg-type]
    assert any(said in one.fix for one in found), found


def test_every_row_says_who_says_so_and_when() -> None:
    tables = tomllib.loads(DATA.read_text())
    assert set(tables) == {one.name for one in fields(ROWS)} - {"releases", "packages", "read"}
    for name, table in tables.items():
        for row in table:
            assert len(row["source"]) > 10, (name, row)
            assert datetime.date(2024, 1, 1) < row["date"] < datetime.date(2100, 1, 1)
    assert len({rule.id for rule in ROWS.rules}) == len(ROWS.rules)
    assert {rule.status for rule in ROWS.rules} <= {"bad", "unknown"}


@pytest.mark.parametrize(
    ("name", "rows"), [("nccl", ROWS.nccl), ("aws-ofi-nccl", ROWS.plugins), ("libfabric", ROWS.libfabric)]
)
def test_every_source_that_can_be_built_has_its_row(name: str, rows: Sequence[Release]) -> None:
    versions = tomllib.loads((DATA.parent / "sources.toml").read_text(encoding="utf-8"))["sources"][name]["versions"]
    assert versions and not [version for version in versions if row_of(rows, version) is None]


def test_rows_of_one_thing_do_not_overlap() -> None:
    everything = [version for row in [*ROWS.nccl, *ROWS.plugins, *ROWS.libfabric] for version in near(row.versions)]
    for table in (ROWS.nccl, ROWS.plugins, ROWS.libfabric):
        for version in everything:
            assert sum(bool(matches(version, row.versions)) for row in table) <= 1, version
    for version in {v for row in ROWS.torch for v in near(row.versions)}:
        for arch in ("x86_64", "aarch64"):
            rows = [one for one in ROWS.torch if one.arch == arch and matches(version, one.versions)]
            assert len(rows) <= 1, (version, arch)
        for cuda in {cuda for row in ROWS.nccl_pins for cuda in row.cuda}:
            pins = [one for one in ROWS.nccl_pins if cuda in one.cuda and matches(version, one.torch)]
            assert len(pins) <= 1, (version, cuda)


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        ("2.9.9", "2.10.3"),
        ("2.26.2-1", "2.26.3"),
        ("1.9", "1.22.0amzn4.0"),
        ("2.0.0rc1", "2.0.0"),
        ("2.7.0.dev20250116+cu126", "2.7.0+cu126"),
        ("525.60.13", "550.54"),
        ("v1.14.0", "1.14.1"),
    ],
)
def test_versions_are_compared_as_versions(smaller: str, larger: str) -> None:
    assert older(smaller, larger) and not older(larger, smaller)


@pytest.mark.parametrize(("one", "same"), [("2.26.2", "2.26.2-1"), ("1.22", "1.22.0amzn4.0"), ("2.7.1", "2.7.1+cu126")])
def test_what_is_not_of_the_release_does_not_count(one: str, same: str) -> None:
    assert key(one) == key(same) and matches(same, f"=={one}")


@pytest.mark.parametrize("version", ["2.9.0rc1", "2.9.0.dev20250801+cu130", "2.9.0a0+git12"])
def test_a_pre_release_is_none_of_the_release_before(version: str) -> None:
    assert older(version, "2.9") and matches(version, ">=2.8") and not matches(version, "<2.9")
    assert not matches(version, ">=2.9") and matches("2.8.1rc1", ">=2.8,<2.9")
    locked = replace(BARE, python="3.14", cuda="13.0", torch=version, torch_origin="lock")
    assert not [one for one in judge(locked) if one.status == "bad"]
    assert [one.status for one in judge(locked) if one.subject == "torch"] == ["unknown"]


@pytest.mark.parametrize(("origin", "said"), [("source", "NCCL is built from source"), ("host", "NCCL is the host's")])
def test_a_rule_names_the_nccl_that_the_recipe_has(origin: str, said: str) -> None:
    stack = replace(BARE, cuda="12.6", torch="2.7.0", torch_origin="lock", nccl="2.27.5", nccl_in="wheel")
    (found,) = [one for one in judge(replace(stack, nccl_origin=origin)) if "RPATH" in one.text]
    assert found.text.endswith(f"(torch's NCCL is a wheel of its own, {said})")


NUMBERS = st.lists(st.integers(0, 999), min_size=1, max_size=4).map(lambda numbers: ".".join(map(str, numbers)))
ANY = st.one_of(NUMBERS, NUMBERS.flatmap(lambda v: st.text(max_size=6).map(v.__add__)), st.text(max_size=12))


@given(NUMBERS, NUMBERS)
def test_order_is_that_of_pep_440(one: str, other: str) -> None:
    from packaging.version import Version

    assert older(one, other) == (Version(one) < Version(other))


@given(
    st.builds(
        Stack,
        arch=st.sampled_from(["x86_64", "aarch64", "riscv64"]),
        python=ANY,
        glibc=ANY,
        fabric=st.sampled_from([*load_fabrics(), "carrier-pigeon"]),
        provider=st.sampled_from(["", "tcp", "efa", "cxi"]),
        cuda=st.none() | st.sampled_from(["11.8", "12.6", "13.0"]) | ANY,
        rocm=st.none() | st.sampled_from(["6.2.4", "6.4"]) | ANY,
        torch=st.none() | st.sampled_from(["2.7.1", "2.9.1+cu126"]) | ANY,
        torch_origin=st.sampled_from(["", "lock", "recipe", "conda"]),
        nccl=st.none() | ANY,
        nccl_origin=st.sampled_from(["", "pin", "lock", "wheel", "source", "host", "conda"]),
        nccl_in=st.sampled_from(["", "wheel", "inside"]),
        plugin=st.none() | st.sampled_from(["1.14.0", "1.21.1"]) | ANY,
        plugin_aws=st.booleans(),
        libfabric=st.none() | st.sampled_from(["1.22.0", "2.1.0"]) | ANY,
        libfabric_origin=st.sampled_from(["", "source", "host"]),
        base=st.booleans(),
        driver=st.none() | ANY,
        packages=st.lists(st.tuples(st.sampled_from(["sympy", "setuptools", "numpy"]), ANY), max_size=3).map(tuple),
    )
)
def test_no_version_is_too_strange_to_be_judged(stack: Stack) -> None:
    for finding in judge(stack):
        assert finding.status in ("good", "bad", "unknown", "note")
        assert finding.text
        if finding.status in ("good", "bad"):
            assert finding.source and finding.date
        if finding.status == "bad":
            assert finding.fix
