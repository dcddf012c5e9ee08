"""conda-lock.yml: what is written is read back, fast and by any YAML reader; what is damaged is refused."""

import string
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rattler import MatchSpec, PackageRecord
from rattler.package import BuildString
from ruamel.yaml import YAML

from envbuild.base.errors import LockError
from envbuild.lock.conda import CondaPackage, canonical_depends, file_parts
from envbuild.lock.conda_format import CondaPart, parse, parse_packages, read_lines, render
from examples import examples

PLATFORMS = {"cpu-x86_64": "linux-64", "cpu-aarch64": "linux-aarch64"}
NAMES = st.from_regex(r"[a-z0-9_][a-z0-9_.-]{0,10}", fullmatch=True)
VERSIONS = st.from_regex(r"(1!)?[0-9]{1,3}(\.[0-9a-z_]{1,3}){0,3}(\+[a-z0-9]{1,4})?", fullmatch=True)
BUILDS = st.from_regex(r"[a-z0-9_.]{1,12}", fullmatch=True)
SPECS = st.sampled_from(["", ">=1.21", ">=3.11,<3.12.0a0", "3.11.* *_cp311", "1.*|2.*", "!=1.5"])
HEX = st.text("0123456789abcdef", min_size=64, max_size=64)
DIGESTS = HEX.map("sha256:{}".format)


@st.composite
def packages(draw: st.DrawFn, platform: str) -> CondaPackage:
    name, version, build = draw(NAMES), draw(VERSIONS), draw(BUILDS)
    subdir = draw(st.sampled_from([platform, "noarch"]))
    ending = draw(st.sampled_from([".conda", ".tar.bz2"]))
    channel = draw(st.sampled_from(["https://c.example.org/forge", "file:///srv/a"]))
    depends = draw(st.dictionaries(NAMES, SPECS, max_size=3))
    return CondaPackage(
        name,
        version,
        build,
        subdir,
        f"{channel}/{subdir}/{name}-{version}-{build}{ending}",
        draw(HEX)[:32],
        draw(HEX),
        tuple(f"{key} {depends[key]}".strip() for key in sorted(depends)),
    )


@st.composite
def parts(draw: st.DrawFn) -> dict[str, CondaPart]:
    chosen = draw(st.lists(st.sampled_from(sorted(PLATFORMS)), min_size=1, unique=True))
    found = {}
    for target in chosen:
        rows = draw(st.lists(packages(PLATFORMS[target]), max_size=5, unique_by=lambda p: p.name))
        found[target] = CondaPart(
            "pt_cpu",
            target,
            draw(DIGESTS),
            draw(st.sampled_from([("conda-forge",), ("https://c.example.org/x", "conda-forge")])),
            tuple(sorted(rows, key=lambda package: package.name)),
            draw(st.one_of(st.just(""), DIGESTS)),
        )
    return found


@given(parts())
def test_what_is_written_is_read_back(written: dict[str, CondaPart]) -> None:
    assert parse(render(list(written.values())), "x") == written


@given(parts())
@examples(30)
def test_the_reader_of_lines_sees_what_a_yaml_parser_sees(written: dict[str, CondaPart]) -> None:
    text = render(list(written.values()))
    seen = read_lines(text)
    assert seen is not None, "the slow parser would be needed"
    assert seen == YAML(typ="safe", pure=True).load(text)


@given(parts(), st.data())
def test_damage_gives_a_clear_error_or_the_same_lock(written: dict[str, CondaPart], data: st.DataObject) -> None:
    text = render(list(written.values()))
    at = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 40))
    junk = data.draw(st.text(string.printable + "\u00e9\x00\u2028", max_size=12))
    damaged = text[:at] + junk + text[at + length :]
    try:
        parse(damaged, "x")
    except LockError as error:
        assert error.message.startswith("x") and error.hint


@given(st.text(string.printable, max_size=200))
def test_any_text_is_refused_without_a_traceback(text: str) -> None:
    with pytest.raises(LockError):
        parse(text, "x")


PACKAGE = CondaPackage(
    "numpy",
    "2.2.6",
    "py311_0",
    "linux-64",
    "https://conda.anaconda.org/conda-forge/linux-64/numpy-2.2.6-py311_0.conda",
    "0" * 32,
    "1" * 64,
    ("python >=3.11",),
)
PART = CondaPart("pt", "cpu-x86_64", "sha256:" + "a" * 64, ("conda-forge",), (PACKAGE,))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("https://conda.", "https://me:w0rd@conda.", "the URL of numpy holds credentials"),
        ("org/conda-forge/linux", "org/t/w0rd/conda-forge/linux", "holds credentials"),
        (f'    sha256: "{"1" * 64}"\n', "", "numpy has no sha256"),
        (f'    md5: "{"0" * 32}"', f'    md5: "{"0" * 31}"', "numpy has no md5"),
        ("version: 1\n", "version: 3\n", "version 3 of conda-lock's format is not known"),
        ('_format: "1"', '_format: "9"', "format '9' is not known"),
        ('manager: "conda"', 'manager: "pip"', "numpy is a pip package"),
        ('category: "main"', 'category: "dev"', "category 'dev'"),
        ("optional: false", "optional: true", "only main is installed"),
        ("linux-64/numpy", "linux-aarch64/numpy", "package of linux-aarch64, not of linux-64"),
        ('version: "2.2.6"', 'version: "2.2.7"', "is not that of numpy 2.2.7"),
        ('"python": ', '"python": &x ', None),  # an anchor is YAML, too
        ("metadata:", "metadata: [", "not YAML"),
        ("hash:", "hash: !!python/object/apply:os.system [true]", "x:"),
    ],
)
def test_each_fault_is_named_with_its_line(old: str, new: str, said: str | None) -> None:
    text = render([PART])
    assert old in text
    damaged = text.replace(old, new, 1)
    if said is None:
        assert parse(damaged, "x") == {"cpu-x86_64": PART}
        return
    with pytest.raises(LockError) as error:
        parse(damaged, "x")
    assert said in error.value.message and "w0rd" not in error.value.message
    if "numpy" in said:
        line = text[: text.index("- name: ")].count("\n") + 1
        assert error.value.message.startswith(f"x:{line}: ")


def test_a_package_that_stands_twice_is_refused_at_its_line() -> None:
    text = render([PART])
    entry = text[text.index("- name: ") :]
    line = text.count("\n") + 1
    with pytest.raises(LockError, match=rf"^x:{line}: numpy is listed twice for linux-64"):
        parse(text + entry, "x")


def test_a_bomb_of_aliases_and_deep_nesting_are_refused() -> None:
    levels = [f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9)}]\n" for n in range(1, 30)]
    for text in ("k0: &k0 [x]\n" + "".join(levels), "[" * 5000, "x" * (65 << 20)):
        with pytest.raises(LockError, match=r"^x:"):
            parse(text, "x")


# Laid out as conda-lock 4 writes it: unquoted texts, keys in its order, its comments.
BY_CONDA_LOCK = f"""\
# This lock file was generated by conda-lock (https://github.com/conda/conda-lock). DO NOT EDIT!
version: 1
metadata:
  content_hash:
    linux-64: {"a" * 64}
  channels:
  - url: conda-forge
    used_env_vars: []
  platforms:
  - linux-64
  sources:
  - environment.yml
package:
- name: zlib
  version: '1.3'
  manager: conda
  platform: linux-64
  dependencies:
    libzlib: 1.3 h1
    __glibc: '>=2.17,<3.0.a0'
  url: https://conda.anaconda.org/conda-forge/linux-64/zlib-1.3-h1.conda
  hash:
    md5: {"c" * 32}
    sha256: {"d" * 64}
  category: main
  optional: false
"""


def test_a_file_of_conda_lock_itself_is_read_for_its_packages_but_is_no_lock_of_ours() -> None:
    found = parse_packages(BY_CONDA_LOCK, "x")["linux-64"]
    assert [(p.stem, p.depends) for p in found] == [("zlib-1.3-h1", ("__glibc >=2.17,<3.0.a0", "libzlib 1.3 h1"))]
    with pytest.raises(LockError, match="was not made by envbuild"):
        parse(BY_CONDA_LOCK, "x")
    with pytest.raises(LockError, match="x:14: zlib is a pip package"):
        parse_packages(BY_CONDA_LOCK.replace("manager: conda", "manager: pip"), "x")


def test_a_lock_of_hundreds_of_packages_needs_no_yaml_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """A YAML parser takes seconds, the reader of lines 40 ms."""
    depends = tuple(f"dependency-{n} >=1.{n},<2.0a0" for n in range(6))
    rows = [
        CondaPackage(
            f"package-{n:03}",
            "1.0",
            "0",
            "noarch",
            f"https://c.org/x/noarch/package-{n:03}-1.0-0.conda",
            "0" * 32,
            "1" * 64,
            depends,
        )
        for n in range(300)
    ]
    written = {t: CondaPart("r", t, "sha256:" + "a" * 64, ("x",), tuple(rows)) for t in PLATFORMS}
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)  # its import fails
    assert parse(render(list(written.values())), "x") == written
    with pytest.raises(ImportError):
        parse(BY_CONDA_LOCK, "x")


@pytest.mark.parametrize(
    ("specs", "kept"),
    [
        (
            ["python >=3.11,<3.12.0a0", "python_abi 3.11.* *_cp311"],
            ["python >=3.11,<3.12.0a0", "python_abi 3.11.* *_cp311"],
        ),
        (["zlib", "zlib >=1.2", "alpha"], ["alpha", "zlib >=1.2"]),
        (["b >=1", "b <2"], ["b >=1,<2"]),
        (["b 1.* cpu*", "b >=1"], ["b 1.*,>=1 cpu*"]),
        (["b >=1", "b * cpu*"], ["b >=1 cpu*"]),
        (["b * *_cp311", "b"], ["b * *_cp311"]),
        (["b", "b *"], ["b *"]),
        (["b 1.*|3.*", "b >=1.5"], ["b (1.*|3.*),>=1.5"]),
        (["b 1.*|3.*"], ["b 1.*|3.*"]),
        (["b >=1, <2"], ["b >=1,<2"]),
        (["b >= 1 | ==0.5"], ["b >=1|==0.5"]),
        (["b>=1", "b =1 cpu*"], ["b >=1,==1 cpu*"]),
        (["b * cpu*", "b 1.* cpu_mkl*"], ["b 1.* cpu_mkl*"]),
        (["b * cpu_mkl*", "b 1.* cpu*"], ["b 1.* cpu_mkl*"]),
    ],
)
def test_dependencies_are_one_a_name(specs: list[str], kept: list[str]) -> None:
    assert list(canonical_depends(specs)) == kept


def test_two_build_strings_for_a_name_are_refused() -> None:
    with pytest.raises(LockError, match=r"dependencies on b have two build strings, cpu\* and cuda\*"):
        canonical_depends(["b * cpu*", "b * cuda*"])


_BOUNDS = st.sampled_from(
    ["", "*", ">=1", ">=1.5,<3", "<2.5", "!=2", "2.*", "1.*|3.*", "~=1.2", ">=3|<1.2", "=2", "==2.0"]
)


@given(st.lists(st.tuples(_BOUNDS, st.sampled_from(["", "", "*", "cpu*", "cpu_mkl*"])), min_size=1, max_size=4))
def test_merged_dependencies_accept_what_all_of_them_accept(parts: list[tuple[str, str]]) -> None:
    """rattler judges; no bound is lost and none is added."""
    specs = [" ".join(["b", version or "*" * bool(build), build]).strip() for version, build in parts]
    [merged] = canonical_depends(specs)
    assert canonical_depends([merged]) == (merged,)
    for version in ("0.9", "1", "1.2", "1.5.1", "2", "2.0", "2.4", "2.5", "3.0a1", "3", "3.1"):
        for build in ("cpu_mkl_0", "cpu_generic_1", "cuda_2"):
            record = PackageRecord("b", version, BuildString(build), 0, "noarch")
            accepted = all(MatchSpec(spec).matches(record) for spec in specs)
            assert MatchSpec(merged).matches(record) == accepted, (specs, merged, version, build)


@pytest.mark.parametrize("url", ["https://c/x/noarch/a-1.conda", "https://c/x/noarch/a-1-0.zip"])
def test_a_url_that_is_no_package_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="the URL of a"):
        file_parts(url, "a", "1")
