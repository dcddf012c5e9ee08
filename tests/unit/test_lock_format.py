"""The lock file: what is written is read back, what is damaged is refused line by line."""

import dataclasses
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.base.errors import LockError
from envbuild.base.text import normalise
from envbuild.lock.format import BuiltPackage, Lock, changes, parse, parse_built, render
from envbuild.recipe.sources import LockedPackage

HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,12}[a-z0-9])?", fullmatch=True).map(normalise)
VERSIONS = st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,3}){0,3}(rc[0-9])?(\+[a-z0-9]{1,6})?", fullmatch=True)
PACKAGES = st.builds(LockedPackage, NAMES, VERSIONS, st.lists(HEX, min_size=1, max_size=3, unique=True).map(tuple))
LOCKS = st.builds(
    Lock,
    recipe=st.sampled_from(["pt_cpu", "a.b-c"]),
    target=st.just("cpu-x86_64"),
    python=st.just("3.11"),
    platform=st.just("x86_64-manylinux_2_28"),
    recipe_digest=HEX.map("sha256:{}".format),
    packages=st.lists(PACKAGES, max_size=6, unique_by=lambda p: p.name).map(tuple),
)


@given(LOCKS)
def test_what_is_written_is_read_back(lock: Lock) -> None:
    assert parse(render(lock), "x") == lock


@given(LOCKS, st.data())
def test_a_damaged_line_is_refused_with_its_number(lock: Lock, data: st.DataObject) -> None:
    lines = render(lock).splitlines()
    at = data.draw(st.integers(6, len(lines)))
    junk = data.draw(st.text(string.ascii_letters + " =-", min_size=1).filter(lambda t: t.strip()))
    lines.insert(at, junk)
    if at < len(lines) - 1 and lines[at - 1].endswith("\\"):
        return  # the junk continues the line before it, whose number is then the one reported
    with pytest.raises(LockError, match=rf"x:{at + 1}: "):
        parse("\n".join(lines) + "\n", "x")


def make_lock(*packages: tuple[str, str, str]) -> Lock:
    rows = tuple(LockedPackage(name, version, (digit * 64,)) for name, version, digit in packages)
    return Lock("r", "cpu-x86_64", "3.11", "x86_64-manylinux_2_28", "sha256:0", rows)


def test_every_fault_is_reported_at_once() -> None:
    text = render(make_lock(("a", "1", "a"), ("b", "1", "b")))
    text = text.replace("# python: 3.11\n", "").replace("sha256:bbbb", "md5:bbbb") + "a==2 --hash=sha256:" + "0" * 64
    with pytest.raises(LockError) as caught:
        parse(text, "t.txt")
    assert len(caught.value.message.splitlines()) == 3
    assert "'# python: …' is missing" in caught.value.message
    assert "a is locked twice" in caught.value.message


@pytest.mark.parametrize("text", ["", "torch==2.0\n", "# envbuild lock, format 9; made by: x\n"])
def test_a_foreign_file_is_refused(text: str) -> None:
    with pytest.raises(LockError):
        parse(text, "x")


def test_the_digest_ignores_comments_but_not_content() -> None:
    lock = make_lock(("a", "1", "a"))
    again = parse(render(lock).replace("\n", "\n# a comment\n", 1), "x")
    assert again.digest == lock.digest
    assert make_lock(("a", "1", "b")).digest != lock.digest
    assert make_lock(("a", "2", "a")).digest != lock.digest


def test_an_update_says_what_changed() -> None:
    old = make_lock(("a", "1", "a"), ("b", "1", "b"), ("c", "1", "c"))
    new = make_lock(("b", "2", "b"), ("c", "1", "d"), ("e", "1", "e"))
    assert changes(old, new) == ["- a 1", "~ b 1 -> 2", "~ c 1 (other files: 1 -> 1 hashes)", "+ e 1"]
    assert changes(new, new) == []


BUILT = st.builds(
    BuiltPackage,
    NAMES,
    VERSIONS,
    HEX,
    st.sampled_from(["", "0a" * 20]),
    st.sampled_from(["", "v1.0", "feature/x"]),
    st.lists(PACKAGES, max_size=3, unique_by=lambda p: p.name).map(tuple),
)


@given(LOCKS, st.lists(BUILT, min_size=1, max_size=3, unique_by=lambda p: p.name))
def test_built_packages_are_read_back_and_count_in_the_digest(lock: Lock, built: list[BuiltPackage]) -> None:
    mine = [one for one in built if one.name not in lock.versions]
    more = dataclasses.replace(lock, built=tuple(mine))
    assert parse(render(more), "x") == more
    assert (more.digest == lock.digest) == (not mine)
    assert all(more.versions[one.name] == one.version for one in mine)
    assert len(changes(lock, more)) == len(mine) and not changes(more, more)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "7",
        "{",
        '{"name": "a"}',
        '{"name": "A", "version": "1", "sha256": "x", "build": {}}',
        f'{{"name": "a", "version": "1", "sha256": "{"0" * 64}"}}',
        f'{{"name": "a", "version": "1", "sha256": "{"0" * 64}", "build": {{"b": ["1"]}}}}',
        f'{{"name": "a", "version": "1", "sha256": "{"0" * 64}", "build": {{"b": ["1", "x"]}}}}',
        f'{{"name": "a", "version": "1", "sha256": "{"0" * 64}", "commit": "x", "build": {{}}}}',
        f'{{"name": "a", "version": "1", "sha256": "{"0" * 64}", "url": "x", "build": {{}}}}',
        "[" * 5000,
    ],
)
def test_a_damaged_row_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_built(text)


def test_a_package_is_locked_once() -> None:
    row = f'{{"name": "a", "version": "1", "sha256": "{"0" * 64}", "build": {{}}}}'
    head = "# envbuild lock, format 1; made by: x\n" + "".join(
        f"# {key}: x\n" for key in ("recipe", "target", "python", "platform", "recipe-digest")
    )
    with pytest.raises(LockError, match="a is locked twice"):
        parse(f"{head}# built: {row}\n# built: {row}\n", "x")
    with pytest.raises(LockError, match="a is locked twice"):
        parse(f"{head}# built: {row}\na==1 --hash=sha256:{'0' * 64}\n", "x")
    with pytest.raises(LockError, match="x:7: not a built package"):
        parse(f"{head}# built: {{}}\n", "x")


@pytest.mark.parametrize(
    ("key", "value"), [("python", "./python"), ("python", "3"), ("platform", "x86_64"), ("platform", "../x")]
)
def test_a_value_that_becomes_a_word_of_a_command_has_its_form(key: str, value: str) -> None:
    """The lock is a file of a repository: uv would run the interpreter at a path."""
    lines = {"python": "3.11", "platform": "x86_64-manylinux_2_28", key: value}
    head = "# envbuild lock, format 1; made by: x\n# recipe: r\n# target: cpu-x86_64\n# recipe-digest: sha256:0\n"
    with pytest.raises(LockError, match=f"the header line '# {key}: .*' has another form"):
        parse(head + "".join(f"# {name}: {text}\n" for name, text in lines.items()), "x")
