"""RECORD against disk: each way a site-packages folder can differ is seen."""

import base64
import hashlib
import os
from pathlib import Path

import pytest

from envbuild.base.elf import elf_machine, file_head
from envbuild.contract.installed import check_files, distributions, names_and_versions
from envbuild.verify.elf_files import scan_elf


def install(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    rows = []
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}\n")
    rows += [f"{info.name}/uv_cache.json,,\n", f"{info.name}/RECORD,,\n"]
    (info / "uv_cache.json").write_text("{}")
    (info / "RECORD").write_text("".join(rows))
    return info


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path, "Some_Pkg", "1.0", {"some_pkg/__init__.py": b"x = 1\n", "some_pkg/data,1.bin": b"\0" * 9})
    (tmp_path / "some_pkg" / "__pycache__").mkdir()
    (tmp_path / "some_pkg" / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"pyc")
    record = tmp_path / "Some_Pkg-1.0.dist-info" / "RECORD"
    record.write_text(record.read_text().replace("some_pkg/data,1.bin,", '"some_pkg/data,1.bin",'))
    return tmp_path


def test_an_untouched_folder_is_clean(site: Path) -> None:
    report = check_files(site)
    assert (report.missing, report.altered, report.unowned) == ([], [], [])
    assert (report.files, report.bytes) == (2, 15)
    assert names_and_versions(site) == {"some-pkg": "1.0"}


def test_each_difference_is_seen(site: Path) -> None:
    (site / "some_pkg" / "__init__.py").write_bytes(b"x = 2\n")
    (site / "some_pkg" / "data,1.bin").unlink()
    (site / "stray.pth").write_text("import os")
    report = check_files(site)
    assert report.altered == ["some_pkg/__init__.py"]
    assert report.missing == ["some_pkg/data,1.bin"]
    assert report.unowned == ["stray.pth"]


def test_the_record_digest_ignores_order_and_the_installer_s_own_files(site: Path) -> None:
    before = distributions(site)["some-pkg"].record
    record = site / "Some_Pkg-1.0.dist-info" / "RECORD"
    lines = record.read_text().splitlines()
    record.write_text("\n".join(reversed([line for line in lines if "uv_cache" not in line])))
    assert distributions(site)["some-pkg"].record == before
    record.write_text(record.read_text().replace("sha256=", "sha256=A", 1))
    assert distributions(site)["some-pkg"].record != before


def test_a_second_version_of_a_package_does_not_hide(site: Path) -> None:
    install(site, "some.pkg", "2.0", {})
    assert sorted((d.name, d.version) for d in distributions(site).values()) == [
        ("some-pkg", "1.0"),
        ("some-pkg", "2.0"),
    ]
    assert len(distributions(site)) == 2


def elf(machine: int, little: bool = True) -> bytes:
    order = "little" if little else "big"
    return b"\x7fELF\x02" + (b"\x01" if little else b"\x02") + b"\0" * 12 + machine.to_bytes(2, order) + b"\0" * 40


def test_foreign_elf_files_are_found_whatever_their_name(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(elf(62))
    (tmp_path / "hidden.dat").write_bytes(elf(183))
    (tmp_path / "big").write_bytes(elf(22, little=False))
    (tmp_path / "kernel.cubin").write_bytes(elf(190))
    (tmp_path / "short").write_bytes(b"\x7fELF")
    (tmp_path / "text.py").write_text("print()")
    report = scan_elf(tmp_path, 62)
    assert report.counts == {"x86_64": 1, "aarch64": 1, "s390x": 1}
    assert sorted(report.foreign) == [(str(tmp_path / "big"), "s390x"), (str(tmp_path / "hidden.dat"), "aarch64")]
    assert elf_machine(file_head("/proc/self/exe")) in (62, 183)


def test_rows_that_are_no_text_or_too_long_cost_only_themselves(tmp_path: Path) -> None:
    info = install(tmp_path, "pkg", "1.0", {"pkg/a.py": b"a", "pkg/b.py": b"b"})
    (tmp_path / "pkg" / os.fsdecode(b"\xff.py")).write_bytes(b"c")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"c").digest()).rstrip(b"=")
    first, second, *rest = (info / "RECORD").read_bytes().splitlines(keepends=True)
    bad = b"pkg/\xff.py,sha256=" + digest + b",1\n"
    huge = b"x" * 200_000 + b",sha256=abc,1\n"
    digits = b"pkg/none.py,sha256=abc," + b"9" * 5000 + b"\n"
    (info / "RECORD").write_bytes(b"".join([first, huge, bad, digits, second, *rest]))
    report = check_files(tmp_path)
    assert (report.missing, report.altered, report.unowned) == (["pkg/none.py"], [], [])
    assert report.files == 4
