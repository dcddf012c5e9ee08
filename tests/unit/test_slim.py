"""`[slim]`: which code a driver selects, what is left out of wheels, and that what is left in stays the same."""

from __future__ import annotations

import io
import json
import re
import struct
import tomllib
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.wheels import make_wheel
from unit.gpu_files import fatbin

from envbuild.base.errors import RecipeError
from envbuild.base.toml import Document
from envbuild.contract.installed import check_files, distributions
from envbuild.gpus import all_chips, read_gpu_code, runs
from envbuild.layers.wheels import blank_ranges, slim_wheel
from envbuild.recipe.load import decode_recipe
from envbuild.slim import SlimRules, slim_rules, unused
from envbuild.store.store import Store

H100 = SlimRules(1, ("sm_90",))
ELF = b"\x7fELF\2\1".ljust(64, b"\0")

SELECTED = [
    ({"sm_80", "sm_86", "sm_90"}, "sm_90", {"sm_90"}),
    ({"sm_80", "sm_86", "sm_90", "compute_90"}, "sm_89", {"sm_86"}),  # the highest minor version of the major one
    ({"sm_50", "sm_60", "compute_60", "compute_80"}, "sm_90", {"compute_80"}),  # no native code: the highest PTX
    ({"sm_90", "sm_90a", "compute_90"}, "sm_90", {"sm_90", "sm_90a"}),
    ({"sm_90a"}, "sm_80", set()),  # code that no declared chip can run
    ({"sm_100f", "sm_103", "sm_103a"}, "sm_103", {"sm_100f", "sm_103", "sm_103a"}),
    ({"sm_70", "compute_120"}, "sm_90", set()),
    ({"gfx90a", "sm_90"}, "sm_80", {"gfx90a"}),  # AMD's code is left alone
]


@pytest.mark.parametrize(("codes", "chip", "kept"), SELECTED)
def test_code_that_the_driver_does_not_select_is_unused(codes: set[str], chip: str, kept: set[str]) -> None:
    assert codes - unused(codes, all_chips([chip])) == kept


CODES = [f"{kind}_{number}" for kind in ("sm", "compute") for number in (70, 75, 80, 86, 89, 90, 100, 103, 120)]


@given(st.sets(st.sampled_from([*CODES, "sm_90a", "sm_100f", "sm_103a"])), st.sets(st.sampled_from(CODES[:9])))
def test_each_declared_chip_keeps_the_best_code_that_it_runs(codes: set[str], chips: set[str]) -> None:
    left = codes - unused(codes, all_chips(chips))
    for chip in all_chips(chips):
        native = [code for code in codes if runs(code, chip) == "natively"]
        fitting = native or [code for code in codes if runs(code, chip)]
        best = max((int(re.sub(r"\D", "", code)) for code in fitting), default=0)
        assert {code for code in fitting if int(re.sub(r"\D", "", code)) == best} <= left
    assert all(any(runs(code, chip) for chip in all_chips(chips)) for code in left)


def elf_with_sections(*sections: tuple[str, int, bytes]) -> bytes:
    """Return an ELF file with these sections (name, type, content)."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _, _ in sections) + b".shstrtab\0"
    rows, body = [bytes(64)], b""
    for name, kind, content in (*sections, (".shstrtab", 3, names)):
        place = 0, 0, 64 + len(body), len(content)
        rows.append(struct.pack("<IIQQQQIIQQ", names.index(name.encode()), kind, *place, 0, 0, 1, 0))
        body += content
    head = bytearray(ELF)
    struct.pack_into("<Q", head, 40, 64 + len(body))
    struct.pack_into("<HHH", head, 58, 64, len(rows), len(rows) - 1)
    return bytes(head) + body + b"".join(rows)


def test_debug_sections_are_found_by_name_and_others_stay() -> None:
    text, info = b"\xc3" * 100, b"D" * 333
    data = elf_with_sections((".text", 1, text), (".debug_info", 1, info), (".debug_line", 8, b""), (".data", 1, b"x"))
    start = data.index(info)
    assert blank_ranges(io.BytesIO(data), SlimRules(1, debug=True)) == [(start, start + 333)]
    assert blank_ranges(io.BytesIO(data), H100) == []


@given(st.binary(max_size=300).map(lambda rest: ELF + rest) | st.binary(max_size=200))
def test_damaged_files_have_nothing_to_blank_or_are_read_to_the_end(data: bytes) -> None:
    for start, end in blank_ranges(io.BytesIO(data), SlimRules(1, ("sm_90",), debug=True)):
        assert start < end


OLD, NEW, ALL = b"old " * 5000, b"new " * 5000, b"all " * 300_000


def torch_wheel(folder: Path) -> Path:
    library = ELF + fatbin("sm_80", payload=OLD) + fatbin("sm_90", payload=NEW) + ALL
    container = fatbin("sm_80", "sm_90", "compute_90", payload=b"kernel" * 99)
    files = {
        "torch/lib/libtorch_cuda.so": library + container,
        "torch/lib/libcudart-c3a75b33.so.12": ELF + fatbin("sm_80"),  # NVIDIA's
        "torch/lib/libempty.a": b"!<arch>\n",
        "torch/include/torch/extension.h": b"#pragma once\n",
        "torch/utils/tests/test_one.py": b"assert True\n",
        "tests/of_the_top.py": b"",
        "torch-2.0.dist-info/LICENSE": b"BSD\n",
    }
    return make_wheel(folder, "torch", "2.0", files=files, tag="cp311-cp311-linux_x86_64")


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_a_slim_wheel_has_less_and_a_record_of_its_own(tmp_path: Path) -> None:
    wheel, store = torch_wheel(tmp_path), Store(tmp_path / "store")
    sha256 = store.digests.of(wheel)
    rules = SlimRules(1, ("sm_90",), debug=True, files=("include", "static", "tests"))
    made, digest = slim_wheel(wheel, sha256, "torch", rules, store)
    assert made.name == wheel.name and made != wheel and store.digests.of(made) == digest == made.parent.name
    full, slim = unpack(wheel, tmp_path / "full"), unpack(made, tmp_path / "slim")
    names = {path.relative_to(full).as_posix() for path in full.rglob("*") if path.is_file()}
    left = {path.relative_to(slim).as_posix() for path in slim.rglob("*") if path.is_file()}
    assert names - left == {"torch/lib/libempty.a", "torch/include/torch/extension.h", "torch/utils/tests/test_one.py"}
    assert left - names == {"torch-2.0.dist-info/envbuild-slim.json"}
    library = "torch/lib/libtorch_cuda.so"
    changed = {name for name in names & left if (full / name).read_bytes() != (slim / name).read_bytes()}
    assert changed == {library, "torch-2.0.dist-info/RECORD"}
    before, after = (full / library).read_bytes(), (slim / library).read_bytes()
    assert len(before) == len(after) and NEW in after and ALL in after and OLD not in after
    with (slim / library).open("rb") as stream:
        assert read_gpu_code(stream) == {("sm_90",): 2}
    assert all(new in (old, 0) for old, new in zip(before, after, strict=True))
    report = check_files(slim)
    assert (report.altered, report.missing, report.unowned) == ([], [], [])
    found = distributions(slim)["torch"].slim
    assert found["wheel"] == sha256 and found["removed"] == 3 and found["rules"] == 1
    assert found["blanked"][library]["original"] != found["blanked"][library]["sha256"]
    told = json.loads((slim / "torch-2.0.dist-info/envbuild-slim.json").read_text())
    assert told["bytes"] == told["blanked"][library]["bytes"] + 8 + 13 + 12
    assert slim_wheel(wheel, sha256, "torch", rules, store) == (made, digest)
    again = Store(tmp_path / "again")
    assert slim_wheel(wheel, sha256, "torch", rules, again)[1] == digest  # the same on every machine
    made.write_bytes(b"damaged")
    assert slim_wheel(wheel, sha256, "torch", rules, store)[1] == digest and store.digests.of(made) == digest


def test_wheels_that_the_rules_do_not_change_are_used_as_they_are(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    library = ELF + fatbin("sm_80", "sm_90")
    for name, path in [("nvidia-cublas-cu12", "nvidia/cublas/lib/libcublas.so.12"), ("torch", "torch/lib/libtorch.so")]:
        wheel = make_wheel(tmp_path / name, name, files={path: library if name != "torch" else ELF})
        for _ in range(2):
            assert slim_wheel(wheel, "0" * 64, name, H100, store) == (wheel, "0" * 64)
    assert not list(store.root.glob("wheels/*/*")) and not list(store.root.glob("partial/*"))


RECIPE = """
name = "one"
description = "One"
python = "3.11"
requirements = []
[targets.cpu-x86_64]
[targets.cu126-x86_64]
{gpus}
[slim]
{slim}
"""


def loaded(slim: str, gpus: str = "") -> object:
    text = RECIPE.format(slim=slim, gpus=gpus)
    return decode_recipe(Document(Path("one/recipe.toml"), text, tomllib.loads(text)))


@pytest.mark.parametrize(
    ("slim", "gpus", "said"),
    [
        ("gpus = true", "", "10:1: 'gpus' in [slim] needs `gpus` in [targets.cu126-x86_64]"),
        ('files = ["headers"]', "", "'headers' is not accepted"),
        ("gpu = true", 'gpus = ["h100"]', "did you mean 'gpus'"),
    ],
)
def test_mistakes_are_named(slim: str, gpus: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        loaded(slim, gpus)
    assert said in str(caught.value)


def test_a_target_without_anything_to_leave_out_has_no_rules() -> None:
    assert slim_rules(gpus=True, debug=False, files=(), words=()) is None
    assert slim_rules(gpus=False, debug=False, files=(), words=("h100",)) is None
    assert slim_rules(gpus=True, debug=False, files=(), words=("h100", "a100", "mi250x")) == SlimRules(
        1, ("sm_80", "sm_90")
    )
