"""Dependency fields, versions and control files as Debian Policy has them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import LockError
from envbuild.debian.control import Relation, compare_versions, paragraphs, parse_control, parse_relations

names = st.from_regex(r"[a-z0-9][a-z0-9+.\-]{1,12}", fullmatch=True)
versions = st.from_regex(r"([0-9]:)?[0-9][0-9a-zA-Z.+~]{0,6}(-[0-9a-zA-Z.+~]{1,4})?", fullmatch=True)
bounds = st.tuples(st.sampled_from(["<<", "<=", "=", ">=", ">>"]), versions)
relations = st.builds(
    lambda name, qualifier, bound: Relation(name, qualifier, *bound),
    names,
    st.sampled_from(["", "any", "native", "amd64"]),
    st.one_of(st.just(("", "")), bounds),
)
groups = st.lists(st.lists(relations, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("1.0~beta1~svn1245", "1.0~beta1"),
        ("1.0~beta1", "1.0"),
        ("1.0", "1.0a"),
        ("1.0a", "1.0+b"),
        ("1.9", "1.10"),
        ("9:1", "10:0"),
        ("1-1", "1-1+b1"),
        ("1-1+deb12u1", "1-1+deb12u2"),
        ("1~~", "1~~a"),
        ("1~~a", "1~"),
        ("1~", "1"),
        ("2.36-9+deb12u9", "2.36-9+deb12u10"),
        ("1", "1-1"),
        ("1-1~", "1-1"),
        ("7.6", "7.6p2"),
        ("1.2-3-4", "1.2-3-5"),
        ("0", "0.0"),
    ],
)
def test_older_versions_come_before_newer_ones(older: str, newer: str) -> None:
    assert compare_versions(older, newer) < 0 < compare_versions(newer, older)


@pytest.mark.parametrize(
    ("one", "other"), [("1", "0:1"), ("1", "1-0"), ("1.01", "1.1"), ("1a", "1a0"), ("1-00", "1-0")]
)
def test_versions_that_are_written_differently_can_be_equal(one: str, other: str) -> None:
    assert compare_versions(one, other) == 0


@given(versions, versions, versions)
def test_the_order_of_versions_is_total(a: str, b: str, c: str) -> None:
    assert compare_versions(a, b) == -compare_versions(b, a)
    assert compare_versions(a, a) == 0
    if compare_versions(a, b) <= 0 and compare_versions(b, c) <= 0:
        assert compare_versions(a, c) <= 0


@given(versions)
def test_a_tilde_is_older_and_a_plus_newer_than_the_end(version: str) -> None:
    assert compare_versions(version + "~", version) < 0 < compare_versions(version + "+", version)


@given(groups)
def test_a_relationship_field_survives_being_written_and_read(groups: tuple[tuple[Relation, ...], ...]) -> None:
    text = ", ".join(" | ".join(map(str, group)) for group in groups)
    assert parse_relations(text, "x") == groups
    assert parse_relations(text.replace(", ", ",\n "), "x") == groups


@given(st.text(max_size=40))
def test_any_text_is_a_field_or_a_clear_error(text: str) -> None:
    try:
        parse_relations(text, "package x")
        compare_versions(text, "1")
    except LockError as error:
        assert "not a Debian version" in error.message or "package x: " in error.message


@pytest.mark.parametrize("version", ["9" * 5000, "9" * 5000 + ":1", "1-" + "9" * 5000])
def test_a_number_with_thousands_of_digits_is_no_version(version: str) -> None:
    with pytest.raises(LockError, match="is not a Debian version"):
        compare_versions("1", version)


@pytest.mark.parametrize("text", ["libc6 (> 2)", "Libc6", "a (>= 1", "a | ", "a b", "a (>= )"])
def test_a_faulty_relationship_names_its_package(text: str) -> None:
    with pytest.raises(LockError, match=r"package x: .* is not a package relationship"):
        parse_relations(text, "package x")


@pytest.mark.parametrize(
    ("bound", "version", "admitted"),
    [
        (">= 2.36", "2.36-9", True),
        (">> 2.36-9", "2.36-9", False),
        ("<< 2.36", "2.36~rc1", True),
        ("<= 1", "1.0", False),
        ("= 1:1-1", "1:1-1", True),
        ("= 1-1", "1:1-1", False),
        (">= 1", None, False),
    ],
)
def test_a_bound_admits_the_versions_of_policy(bound: str, version: str | None, admitted: bool) -> None:
    (((relation,)),) = parse_relations(f"x ({bound})", "x")
    assert relation.admits(version) is admitted


def test_a_control_file_keeps_continuations_and_names_without_case() -> None:
    text = "Package: a\nDESCRIPTION: one\n two\n .\n three\n"
    assert parse_control(text, "x") == {"package": "a", "description": "one\ntwo\n.\nthree"}
    assert list(paragraphs("\n\nA: 1\n\n \t\nB: 2\r\n\r\nC: 3")) == ["A: 1", "B: 2", "C: 3"]


@pytest.mark.parametrize(
    ("text", "message"), [("A: 1\na: 2", "line 2: the field a is given twice"), ("A: 1\nnothing", "line 2: neither")]
)
def test_a_faulty_control_file_names_its_line(text: str, message: str) -> None:
    with pytest.raises(LockError, match=message):
        parse_control(text, "x")
