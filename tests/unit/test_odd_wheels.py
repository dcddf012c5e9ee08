"""Valid wheels that are rare: what an environment of them is compared with."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lab.wheels import make_wheel

from envbuild.base.errors import BuildError
from envbuild.build.folder import make_environment
from envbuild.build.image_layers import _environment_layer
from envbuild.build.installing import _apply_umask, _check_installed, locked_files
from envbuild.contract.installed import check_files
from envbuild.contract.kinds import VENV
from envbuild.layers.wheel import Scheme, WheelFile, wheel_record
from envbuild.run_environment import load_environment

SITE = "lib/python3.11/site-packages"


def installed(root: Path, record: bytes, info: str) -> Path:
    """A venv's folder with one RECORD."""
    place = root / SITE / info
    place.mkdir(parents=True)
    (place / "RECORD").write_bytes(record)
    (root / "lib64").symlink_to("lib")
    return root


def rows(record: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(record.decode())))


def rendered(lines: Sequence[Sequence[str]]) -> bytes:
    return "".join(",".join(line) + "\n" for line in lines).encode()


def test_a_signed_wheel_is_as_installers_record_it(tmp_path: Path) -> None:
    """No RECORD lists its signatures: uv leaves them out, pip has no digest of them."""
    info = "demo-1.0.dist-info"
    signed = {f"{info}/RECORD.jws": b"{}", f"{info}/RECORD.p7s": b"\0"}
    wheel = make_wheel(tmp_path, "demo", files=signed)
    whole = rows(wheel_record(wheel, Scheme("prefix", "3.11")))
    assert {path for path, *_ in whole} >= signed.keys()
    by_uv = rendered([row for row in whole if row[0] not in signed])
    found = locked_files([WheelFile("demo", "1.0", wheel, "", 0)], "3.11", installed(tmp_path / "venv", by_uv, info))
    assert f"{SITE}/demo/__init__.py" in found
    for path in signed:
        (tmp_path / "venv" / SITE / path).write_bytes(b"")
    assert check_files(tmp_path / "venv" / SITE).unowned == []


def test_files_of_a_wheel_in_lib64_are_those_in_lib(tmp_path: Path) -> None:
    """lib64 of a venv is a link."""
    files = {"demo-1.0.data/data/lib64/a.so": b"a", "demo-1.0.data/data/lib/b.so": b"b"}
    wheel = make_wheel(tmp_path, "demo", files=files)
    record = wheel_record(wheel, Scheme("prefix", "3.11"))
    venv = installed(tmp_path / "venv", record, "demo-1.0.dist-info")
    found = locked_files([WheelFile("demo", "1.0", wheel, "", 0)], "3.11", venv)
    assert found["lib/a.so"] == {hashlib.sha256(b"a").hexdigest()}
    assert found["lib/b.so"] == {hashlib.sha256(b"b").hexdigest()}
    assert not any(path.startswith("lib64") for path in found)


def test_programs_are_compared_unless_installers_write_them(tmp_path: Path) -> None:
    """uv links a program to its cache, so that a change of one environment's would come into the next."""
    scripts = "demo-1.0.data/scripts"
    files = {
        f"{scripts}/compiled": b"\x7fELF",
        f"{scripts}/shell": b"#!/bin/sh\n",
        f"{scripts}/python": b"#!python\nx\n",
        "demo-1.0.data/data/bin/other": b"#!python",
        f"{scripts}/both": b"\x7fELF",
        f"{scripts}/theirs": b"\x7fELF",
        "demo-1.0.dist-info/entry_points.txt": b"[console_scripts]\nmade = demo:main\nboth = demo:main\n",
    }
    wheel = make_wheel(tmp_path, "demo", files=files)
    points = {"more-1.0.dist-info/entry_points.txt": b"[console_scripts]\ntheirs = more:main\n"}
    wheels = [WheelFile(one.name[:4], "1.0", one, "", 0) for one in (wheel, make_wheel(tmp_path, "more", files=points))]
    env = installed(tmp_path / "env", wheel_record(wheel, Scheme("prefix", "3.11")), "demo-1.0.dist-info")
    installed(tmp_path / "more", wheel_record(wheels[1].path, Scheme("prefix", "3.11")), "more-1.0.dist-info")
    (tmp_path / "more" / SITE / "more-1.0.dist-info").rename(env / SITE / "more-1.0.dist-info")
    found = locked_files(wheels, "3.11", env)
    programs = {path: sha256 for path, sha256 in found.items() if path.startswith("bin/")}
    contents = {"bin/compiled": b"\x7fELF", "bin/shell": b"#!/bin/sh\n", "bin/other": b"#!python"}
    assert programs == {path: {hashlib.sha256(data).hexdigest()} for path, data in contents.items()}


@pytest.mark.parametrize(("is_conda", "folder"), [(False, "include/site/python3.11"), (True, "include/python3.11")])
def test_headers_are_where_installers_put_them(tmp_path: Path, is_conda: bool, folder: str) -> None:
    """uv and pip: beside Python's own headers if the environment has its own Python."""
    wheel = make_wheel(tmp_path, "demo", files={"demo-1.0.data/headers/demo.h": b"a"})
    record = wheel_record(wheel, Scheme("prefix", "3.11", is_conda))
    assert f"../../../{folder}/demo/demo.h" in {path for path, *_ in rows(record)}
    env = installed(tmp_path / "env", record, "demo-1.0.dist-info")
    found = locked_files([WheelFile("demo", "1.0", wheel, "", 0)], "3.11", env, conda=is_conda)
    assert f"{folder}/demo/demo.h" in found


def test_a_wheel_may_spell_its_version_in_another_way_than_the_lock(tmp_path: Path) -> None:
    plan = SimpleNamespace(packages=[SimpleNamespace(name="demo", version="2020.1.1")], conda=())
    wanted = cast(Any, SimpleNamespace(plan=plan))
    _check_installed(wanted, [], [], {"demo": "2020.01.01"})
    with pytest.raises(BuildError, match=r"locked 2020.1.1, installed 2020.01.02"):
        _check_installed(wanted, [], [], {"demo": "2020.01.02"})
    made = SimpleNamespace(distributions=[("demo", "2020.01.02", "")])
    with pytest.raises(BuildError, match=r"demo 2020.01.02, demo 2020.1.1"):
        _environment_layer(cast(Any, wanted), cast(Any, None), [], cast(Any, [made]), [], [], [])
    made.distributions = [("demo", "2020.01.01", "")]
    with pytest.raises(AttributeError, match="python"):  # beyond the comparison
        _environment_layer(cast(Any, wanted), cast(Any, None), [], cast(Any, [made]), [], [], [])


def test_an_environment_s_path_that_is_a_link_to_itself_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / "venv"
    place.symlink_to(place)
    environment = load_environment({"HOME": str(tmp_path), "ENVBUILD_STORE": str(tmp_path / "store")})
    nothing = cast(Any, None)
    with pytest.raises(BuildError, match="symbolic links"):
        make_environment(VENV, nothing, nothing, environment, place, offline=True)


def test_files_from_uv_s_cache_have_the_permissions_of_this_run(tmp_path: Path) -> None:
    """The cache has them by the umask of the run that filled it; files that no RECORD of uv names are left."""
    root, cached, outside = tmp_path / "venv", tmp_path / "cached", tmp_path / "outside"
    record = b"demo.py,,\ndemo.sh,,\n../../../../outside,,\ndemo-1.dist-info/RECORD,,\n"
    packages = installed(root, record, "demo-1.dist-info") / SITE
    (packages / "demo-1.dist-info" / "INSTALLER").write_text("uv")
    for path, mode in (
        (cached, 0o600),
        (packages / "demo.sh", 0o711),
        (packages / "other.py", 0o666),
        (outside, 0o600),
    ):
        path.write_text(path.name)
        path.chmod(mode)
    (packages / "demo.py").hardlink_to(cached)
    _apply_umask(root, packages, 0o644)
    found = {path.name: path.stat().st_mode & 0o777 for path in packages.iterdir() if path.is_file()}
    assert found == {"demo.py": 0o644, "demo.sh": 0o755, "other.py": 0o666}
    assert (packages / "demo.py").read_text() == "cached"
    assert cached.stat().st_mode & 0o777 == outside.stat().st_mode & 0o777 == 0o600
    same = (packages / "demo.py").stat().st_ino
    _apply_umask(root, packages, 0o664)
    assert (packages / "demo.py").stat().st_ino == same
    (packages / "demo.sh").chmod(0o777)
    _apply_umask(root, packages, 0o600)  # nobody else may write; the folders, which are 0700 then, may not be entered
    assert [(packages / name).stat().st_mode & 0o777 for name in ("demo.py", "demo.sh")] == [0o644, 0o711]
