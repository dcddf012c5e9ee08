"""Archives, ELF files, logs and descriptions of source layers: what is read, refused and said."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.patchelf import patchelf

from envbuild.base.elf import MACHINES, read_elf
from envbuild.base.errors import BuildError, HostError
from envbuild.contract.installed import check_files
from envbuild.jobcheck.diagnose.engine import explain
from envbuild.layers import source_steps
from envbuild.layers.local_build_host import build_variables, local_build_host
from envbuild.layers.source_build import config_error, failure
from envbuild.layers.source_files import (
    SourceManifest,
    list_files,
    patchelf_program,
    read_manifest,
    relocate,
    run_path,
    write_manifest,
)
from envbuild.layers.source_job import SourceBuild, StepError
from envbuild.layers.source_steps import tidy, unpack_cuda, unpack_wheel
from envbuild.recipe.sources import SourceLayer
from envbuild.store.archives import unpack
from envbuild.store.store import Store
from examples import examples

_LAYER = SourceLayer("foo", "1", "cpu-x86_64", "autotools", "https://example.org/foo-1.tar", "ab" * 32)


def _tar(path: Path, members: dict[str, str], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, text in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(text), 0o755 if name.endswith(".sh") else 0o644
            if text.startswith("-> "):
                member.type, member.linkname, member.size = tarfile.SYMTYPE, text[3:], 0
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def _zip(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, text in members.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = (0o100755 if name.endswith(".sh") else 0o100644) << 16
            file.writestr(member, text)
    return path


@pytest.mark.parametrize("form", ["w", "w:gz", "w:bz2", "w:xz", "zip"])
def test_an_archive_is_unpacked_without_the_folder_that_holds_all(tmp_path: Path, form: str) -> None:
    members = {"foo-1/configure.sh": "#!/bin/sh\n", "foo-1/src/a.c": "int a;\n"}
    path = tmp_path / "foo-1.any"
    archive = _zip(path, members) if form == "zip" else _tar(path, members, form)
    unpack(archive, tmp_path / "source")
    assert (tmp_path / "source/src/a.c").read_text() == "int a;\n"
    assert (tmp_path / "source/configure.sh").stat().st_mode & 0o100
    assert not (tmp_path / "source/src/a.c").stat().st_mode & 0o100


def test_an_archive_of_several_things_is_unpacked_as_it_is(tmp_path: Path) -> None:
    unpack(_tar(tmp_path / "a.tar.gz", {"configure": "x", "src/a.c": "y"}), tmp_path / "source")
    assert (tmp_path / "source/configure").read_text() == "x"


@pytest.mark.parametrize(
    "members",
    [{"../outside": "x"}, {"a/../../outside": "x"}, {"link": "-> ../..", "link/outside": "x"}, {"a": "-> /etc/passwd"}],
)
def test_an_archive_that_leads_outside_is_refused(tmp_path: Path, members: dict[str, str]) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(BuildError, match="not unpacked"):
        unpack(_tar(tmp_path / "bad.tar.gz", members), tmp_path / "in/source")
    assert not (tmp_path / "outside").exists() and not (tmp_path / "in/outside").exists()


@pytest.mark.parametrize(
    "members",
    [
        {"e": "-> sub", "a": "-> e/../../x"},
        {"e": "-> sub/file", "./e": "through the link"},
        {"d": "-> sub", "d/file": "below the link"},
        {"/outside": "x"},
    ],
)
def test_no_link_of_an_archive_is_written_through(tmp_path: Path, members: dict[str, str]) -> None:
    with pytest.raises(BuildError, match="not unpacked"):
        unpack(_tar(tmp_path / "bad.tar.gz", members), tmp_path / "source")


def test_links_inside_an_archive_stay_as_they_are(tmp_path: Path) -> None:
    members = {"foo/lib.so": "-> lib.so.1", "foo/lib.so.1": "x", "foo/sub/up": "-> ../lib.so"}
    unpack(_tar(tmp_path / "good.tar.gz", members), tmp_path / "source")
    assert (tmp_path / "source/sub/up").read_text() == "x"


_NAMES = st.lists(st.sampled_from(["a", "b", "..", ".", ""]), min_size=1, max_size=4).map("/".join)


@examples(200)
@given(st.lists(st.tuples(_NAMES, st.sampled_from("0125"), _NAMES), max_size=5))
def test_no_archive_writes_outside_its_folder(members: list[tuple[str, str, str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        (top / "a").write_text("mine")
        (top / "in/in").mkdir(parents=True)
        with tarfile.open(top / "x.tar", "w") as tar:
            for path, kind, target in members:
                member = tarfile.TarInfo(path)
                member.type, member.linkname, member.size = kind.encode(), target, len("new")
                tar.addfile(member, io.BytesIO(b"new") if kind == "0" else None)
        with contextlib.suppress(BuildError, OSError):
            unpack(top / "x.tar", top / "in/in/source")
        assert (top / "a").read_text() == "mine"
        assert {path.name for path in top.iterdir()} == {"a", "in", "x.tar"}
        assert {path.name for path in (top / "in").iterdir()} == {"in"}
        assert {path.name for path in (top / "in/in").iterdir()} <= {"source", "source.raw"}


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside"])
def test_a_zip_file_that_leads_outside_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BuildError, match="may lead outside"):
        unpack(_zip(tmp_path / "bad.zip", {name: "x"}), tmp_path / "source")


@pytest.mark.parametrize("kind", ["encrypted", "deflate64", "xz"])
def test_an_archive_that_python_cannot_unpack_is_said(tmp_path: Path, kind: str) -> None:
    archive = tmp_path / ("lib.tar.xz" if kind == "xz" else "lib.zip")
    if kind == "xz":
        (tmp_path / "a").write_bytes(os.urandom(1 << 18))
        with tarfile.open(archive, "w:xz") as tar:
            tar.add(tmp_path / "a", "lib/a")
        data = bytearray(archive.read_bytes())
        data[len(data) // 2] ^= 255
    else:
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("lib/a", "x")
        data = bytearray(archive.read_bytes())
        central = data.index(b"PK\1\2")
        for place in (6, central + 8) if kind == "encrypted" else (8, central + 10):  # flags, method
            data[place] = 1 if kind == "encrypted" else 9
    archive.write_bytes(data)
    with pytest.raises(BuildError, match="cannot be unpacked"):
        unpack(archive, tmp_path / "source")


def test_what_is_no_archive_or_is_cut_is_said(tmp_path: Path) -> None:
    page = tmp_path / "foo.tar.gz"
    page.write_text("<html>Not found</html>")
    with pytest.raises(BuildError, match=r"foo\.tar\.gz cannot be unpacked"):
        unpack(page, tmp_path / "one")
    whole = _tar(tmp_path / "whole.tar.gz", {f"a/{n}": str(n) * 4000 for n in range(50)})
    page.write_bytes(whole.read_bytes()[:-200])
    with pytest.raises(BuildError, match="cannot be unpacked"):
        unpack(page, tmp_path / "two")


def test_wheels_of_cuda_become_one_toolkit(tmp_path: Path) -> None:
    one = _zip(
        tmp_path / "runtime.whl",
        {"nvidia/cuda_runtime/include/cuda.h": "", "nvidia/cuda_runtime/lib/libcudart.so.12": "x"},
    )
    other = _zip(tmp_path / "crt.whl", {"nvidia/cuda_nvcc/include/crt/host.h": ""})
    unpack_cuda([one, other], tmp_path / "cuda")
    assert (tmp_path / "cuda/include/cuda.h").is_file()
    assert (tmp_path / "cuda/include/crt/host.h").is_file()
    assert (tmp_path / "cuda/lib64/libcudart.so").read_text() == "x"


def test_what_a_wheel_was_built_of_is_recorded_as_it_is_after_it_was_changed(tmp_path: Path) -> None:
    tree = tmp_path / "env"
    site = tree / "lib/python3.11/site-packages"
    info = site / "foo-1.0.dist-info"
    info.mkdir(parents=True)
    for path, text in {
        site / "foo, bar.py": "x = 1",
        site / "lib.so": "stripped",
        tree / "share/licenses/foo/LICENSE": "MIT",
        info / "RECORD": "lib.so,sha256=old,5\ngone.a,sha256=x,1\n",
        info / "METADATA": "Name: foo",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (info / "entry_points.txt").write_text("[console_scripts]\nfoo = foo.cli:Main.run\n")
    (tree / "bin").mkdir()
    (tree / "bin/script").write_text("#!python -s\nprint('script')\n")
    source_steps.add_scripts(tree, "foo")
    source_steps.renew_records(tree, "foo")
    report = check_files(site)
    assert (report.missing, report.altered, report.unowned) == ([], [], []) and report.files == 7
    assert (info / "INSTALLER").read_text() == "envbuild\n"
    assert "gone.a" not in (info / "RECORD").read_text()
    # Started by the interpreter beside it, wherever that is, by whatever name and with any arguments.
    (tree / "bin/python").symlink_to(sys.executable)
    (site / "foo").mkdir()
    (site / "foo/cli.py").write_text(
        "import sys\nclass Main:\n    def run():\n        print(sys.executable, sys.argv[1:])\n"
    )
    moved = tmp_path / "else where"
    tree.rename(moved)
    (tmp_path / "link").symlink_to(moved / "bin/foo")
    env = {"PYTHONPATH": str(moved / "lib/python3.11/site-packages"), "PATH": os.environ["PATH"]}
    done = subprocess.run([tmp_path / "link", "a b", "$c"], env=env, capture_output=True, text=True)
    assert done.stdout == f"{moved}/bin/python ['a b', '$c']\n", done.stderr
    script = subprocess.run([moved / "bin/script"], env=env, capture_output=True, text=True)
    assert script.stdout == "script\n", script.stderr


def test_a_wheel_is_laid_out_for_its_python(tmp_path: Path) -> None:
    wheel = _zip(tmp_path / "h.whl", {"h/__init__.py": "", "h-1.data/scripts/hrun.sh": "x", "h-1.dist-info/RECORD": ""})
    unpack_wheel(wheel, tmp_path / "env", "3.11")
    assert (tmp_path / "env/lib/python3.11/site-packages/h/__init__.py").is_file()
    assert (tmp_path / "env/bin/hrun.sh").is_file()


def test_tidy_drops_what_only_builders_need_and_keeps_links_inside(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("lib/libfoo.so.1", "lib/libfoo.a", "lib/libfoo.la", "share/doc/foo/README", "lib/pkgconfig/foo.pc"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("x")
    (tree / "lib/libfoo.so").symlink_to("/opt/env/lib/libfoo.so.1")
    (tree / "lib/libbar.so").symlink_to("/build/stage/opt/env/lib/libfoo.so.1")
    (tree / "lib/libfoo.so.1").chmod(0o2700)
    tidy(tree, ("/build/stage/opt/env",))
    found = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if not path.is_dir())
    assert found == ["lib/libbar.so", "lib/libfoo.so", "lib/libfoo.so.1", "lib/pkgconfig/foo.pc"]
    assert (tree / "lib/libfoo.so").readlink() == (tree / "lib/libbar.so").readlink() == Path("libfoo.so.1")
    assert (tree / "lib/libfoo.so.1").stat().st_mode & 0o7777 == 0o755
    assert not (tree / "share").exists()


@pytest.mark.parametrize(
    ("name", "path"),
    [("lib/liba.so", "$ORIGIN"), ("bin/a", "$ORIGIN/../lib"), ("a", "$ORIGIN/lib"), ("lib/x/y/b.so", "$ORIGIN/../..")],
)
def test_libraries_are_found_from_where_a_file_is(name: str, path: str) -> None:
    assert run_path(name) == path
    assert run_path(name, ["/opt/host/lib"]) == f"{path}:/opt/host/lib"


@pytest.mark.parametrize(
    ("name", "before", "path"),
    [
        ("lib/liba.so", "/opt/env/lib", "$ORIGIN"),
        ("lib/a/libb.so", "$ORIGIN", "$ORIGIN:$ORIGIN/.."),
        ("lib/a/libb.so", "${ORIGIN}/../c/:/usr/lib:", "$ORIGIN/../c:$ORIGIN/.."),
        ("bin/a", "/opt/env/lib/a:/opt/environment/lib", "$ORIGIN/../lib/a:$ORIGIN/../lib"),
        ("bin/a", "/w/stage/opt/env/lib/a/:/w/source/.libs", "$ORIGIN/../lib/a:$ORIGIN/../lib"),
        ("a", "$ORIGIN/../x:$ORIGIN/y", "$ORIGIN/y:$ORIGIN/lib"),
    ],
)
def test_a_package_s_own_folders_of_libraries_stay(name: str, before: str, path: str) -> None:
    assert run_path(name, ["/opt/host/lib"], before, ["/opt/env", "/w/stage/opt/env"]) == f"{path}:/opt/host/lib"


def _an_elf() -> Path:
    """A shared library that any Python has, or Python itself."""
    extensions = sorted((Path(sysconfig.get_path("platstdlib")) / "lib-dynload").glob("_[a-z]*.so"))
    return extensions[0] if extensions else Path(sys.executable).resolve()


def test_elf_files_are_read_as_patchelf_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    shutil.copy(_an_elf(), file)
    program = patchelf()
    assert program is not None and patchelf_program() == program
    subprocess.run([program, "--set-rpath", "$ORIGIN/a:/b", "--add-needed", "libz.so.9", file], check=True)
    elf = read_elf(file)
    assert elf is not None and elf.dynamic and elf.machine in MACHINES.values()
    asked = subprocess.run([program, "--print-needed", file], capture_output=True, text=True, check=True)
    assert list(elf.needed) == asked.stdout.split()
    assert elf.runpath == "$ORIGIN/a:/b"
    assert elf.glibc > (2, 0)
    assert relocate(tmp_path, _arch(), []) == []


@examples(200)
@given(st.data())
def test_no_damage_of_an_elf_file_is_more_than_none(data: st.DataObject) -> None:
    whole = bytearray(_an_elf().read_bytes()[:65536])
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, 1024))] = data.draw(st.integers(0, 255))
    with tempfile.NamedTemporaryFile() as file:
        file.write(whole[: data.draw(st.integers(0, len(whole)))])
        file.flush()
        read_elf(Path(file.name))


def _arch() -> str:
    elf = read_elf(_an_elf())
    assert elf is not None
    return next(name for name, number in MACHINES.items() if number == elf.machine)


def test_a_library_for_another_processor_is_refused(tmp_path: Path) -> None:
    other = next(name for name in MACHINES if name != _arch())
    (tmp_path / "lib").mkdir()
    shutil.copy(_an_elf(), tmp_path / "lib/libfoo.so")
    with pytest.raises(BuildError, match=rf"lib/libfoo\.so is for {_arch()}, not for {other}"):
        relocate(tmp_path, other, [])


def test_a_library_that_names_the_folder_of_its_build_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    path = tmp_path / "lib/libfoo.so"
    shutil.copy(_an_elf(), path)
    with path.open("ab") as stream:
        stream.write(b"\0" * 3_000_000 + b"/somewhere/work/source/foo.c\0")
    with pytest.raises(BuildError, match="folder that it was built in"):
        relocate(tmp_path, _arch(), ["/somewhere/work"])
    assert relocate(tmp_path, _arch(), ["/elsewhere"]) == []


def test_pkg_config_files_find_their_own_folder_and_scripts_are_reported(tmp_path: Path) -> None:
    for name, text in {
        "lib/pkgconfig/foo.pc": "prefix=/opt/env\nRequires: bar\nLibs: -L/build/requires/bar/lib -lbar\n",
        "bin/foo-config": "#!/bin/sh\necho /opt/env/lib\n",
        "share/table": "\0/opt/env",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    named = relocate(tmp_path, _arch(), ["/build"], {"bar": PurePath("/build/requires/bar")})
    text = (tmp_path / "lib/pkgconfig/foo.pc").read_text()
    assert text == "prefix=${pcfiledir}/../..\nRequires: bar\nLibs: -L${pcfiledir}/../../lib -lbar\n"
    assert named == ["bin/foo-config"]


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("/bin/sh: 1: nvcc: not found\nmake: *** [Makefile:3: a] Error 127\n", "program nvcc is missing"),
        ("./autogen.sh: 12: autoreconf: not found\n", "program autoreconf is missing"),
        ("patch: not found\n", "program patch is missing"),
        ("a.c:1:10: fatal error: rdma/fabric.h: No such file or directory\n", "header rdma/fabric.h"),
        ("/usr/bin/ld: cannot find -lhwloc: No such file or directory\n", "library libhwloc"),
        ("cc1: error: a.s: No space left on device\n", "no space left"),
        ("g++: fatal error: Killed signal terminated program cc1plus\n", "ran out of memory"),
        ("configure: error: C compiler cannot create executables\n", "compiler does not work"),
        ("configure.ac:8: error: possibly undefined macro: AC_PROG_LIBTOOL\n", "macro AC_PROG_LIBTOOL"),
        ("patching file a.c\nHunk #1 FAILED at 3.\n1 out of 1 hunk FAILED\n", "patch does not fit"),
        ("make: *** No rule to make target 'install'.  Stop.\n", "no install target"),
        ("all.h:9:2: error: #error C++20 or later compatible compiler is required to use PyTorch.\n", "are C++20"),
        ("CMake Error at Modules/Find.cmake:233 (message):\n  Could NOT find MPI (missing: MPI_CXX_FOUND)\n", "no MPI"),
    ],
)
def test_well_known_messages_are_explained(log: str, cause: str) -> None:
    assert cause in explain(log, "source-build")


def test_what_is_not_well_known_is_not_guessed() -> None:
    assert explain("a.c:3: error: 'x' undeclared\nmake: *** [a.o] Error 1\n", "source-build") == ""


def test_a_failure_shows_the_end_of_its_log_and_what_configure_tried(tmp_path: Path) -> None:
    log, config = tmp_path / "build.log", tmp_path / "config.log"
    log.write_text("".join(f"line {n}\n" for n in range(100)) + "configure: error: no hwloc\n")
    config.write_text(
        "configure:5: checking for hwloc.h\nconfigure:5: gcc -c conftest.c\n"
        "conftest.c:9:10: fatal error: hwloc.h: No such file or directory\nconfigure: failed program was:\n"
        "| #include <hwloc.h>\nconfigure:90: error: no hwloc\n## Cache variables. ##\nac_cv_a=1\n"
    )
    error = failure("foo 1", StepError("configure", 1, log, [config]), tmp_path / "kept.log")
    assert error.message.startswith("foo 1: configure failed (exit 1):")
    assert "line 99" in error.message and "line 70" not in error.message
    assert "| #include" not in error.message and "ac_cv" not in error.message
    assert "kept.log" in error.message and "header hwloc.h" in (error.hint or "")
    assert config_error(log) == []


def test_a_layer_with_a_file_that_is_cut_or_gone_is_none(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_text("text")
    (tree / "b").symlink_to("a")
    assert read_manifest(tree) is None
    write_manifest(tmp_path, SourceManifest("foo", "1", list_files(tree)))
    made = read_manifest(tree)
    assert made is not None and made.files[1] == ("b", "-> a", 0)
    (tree / "a").write_text("tex")
    assert read_manifest(tree) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "a").write_text("tEXT"),  # of the same size
        lambda tree: [(tree / "b").unlink(), (tree / "b").symlink_to("/etc/passwd")],
        lambda tree: (tree / "more").write_text("x"),
        lambda tree: [(tree / "a").unlink(), os.mkfifo(tree / "a")],
        lambda tree: os.mkfifo(tree / "pipe"),
    ],
)
def test_a_layer_with_other_files_than_its_manifest_is_none(tmp_path: Path, change: Callable[[Path], object]) -> None:
    tree, store = tmp_path / "tree", Store(tmp_path / "store")
    tree.mkdir()
    (tree / "a").write_text("text")
    (tree / "b").symlink_to("a")
    write_manifest(tmp_path, SourceManifest("foo", "1", list_files(tree)))
    assert read_manifest(tree) and read_manifest(tree, store.digests.of)
    change(tree)
    assert read_manifest(tree) is None and read_manifest(tree, store.digests.of) is None


def test_a_build_sees_compilers_and_modules_and_no_tokens(tmp_path: Path) -> None:
    variables = {
        "PATH": "/usr/bin:/bin",
        "CPATH": "/opt/cuda/include",
        "CRAY_LIBFABRIC_VERSION": "1.22",
        "HF_TOKEN": "secret",
        "CFLAGS": "-march=native",
        "PYTHONPATH": "/x",
    }
    assert set(build_variables(variables)) == {"PATH", "CPATH", "CRAY_LIBFABRIC_VERSION"}
    (tmp_path / "source").mkdir()
    with local_build_host(tmp_path, variables) as shop:
        job = SourceBuild(_LAYER, tmp_path / "none", shop)
        job.run("look", ["env"])
        assert shop.run(["no-such-program"], shop.inside, {}, tmp_path / "log") == 127
    seen = dict(re.findall(r"^(\w+)=(.*)$", job.log_file.read_text(), re.MULTILINE))
    assert "HF_TOKEN" not in seen and "CFLAGS" not in seen and seen["LC_ALL"] == "C"
    assert seen["HOME"] == str(tmp_path) and seen["CPATH"] == "/opt/cuda/include"
    assert "no-such-program: not found" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("name", ["a,b", "a#b", "a\\b"])
def test_a_store_whose_path_make_would_read_as_syntax_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(HostError, match="its path has a blank or one of") as caught,
        local_build_host(tmp_path / name, {}),
    ):
        pass
    assert "ENVBUILD_STORE" in (caught.value.hint or "")


def test_places_are_filled_into_options_and_shell_variables_are_left(tmp_path: Path) -> None:
    layer = SourceLayer("foo", "1", "cpu-x86_64", "make", "u", "s", ("A={bar}/lib", "P={prefix}", "Q=${bar}x{install}"))
    with local_build_host(tmp_path, {}) as shop:
        job = SourceBuild(layer, tmp_path / "none", shop, {"bar": PurePath("/b")})
        assert job.options()[:2] == ["A=/b/lib", "P=/opt/env"]
        assert job.options()[2] == f"Q=${{bar}}x{tmp_path}/stage/opt/env"
