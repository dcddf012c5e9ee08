"""Layers that are built from source, by real compilers: built once, moved, refused, cut off."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pip
import pytest
from lab import sources
from lab.sources import SourceArchive, layer, pack, patch

from envbuild.base.elf import read_elf
from envbuild.base.errors import BuildError, EnvbuildError
from envbuild.environment import Environment
from envbuild.layers.local_build_host import host_identity, local_build_host
from envbuild.layers.source_build import build_layer
from envbuild.layers.source_files import read_manifest
from envbuild.layers.source_job import BuildPython
from envbuild.layers.source_known import source_layers
from envbuild.recipe.load import load_recipe
from envbuild.recipe.sources import SourceLayer
from envbuild.recipe.targets import Target, host_arch
from envbuild.run_environment import load_environment

from .conftest import keep_layer

TESTS = Path(__file__).resolve().parents[1]
# `python -c BUILD STORE DESCRIPTION`: one process that builds, as a command of envbuild does.
BUILD = """
import os, pathlib, pickle, sys
from envbuild.run_environment import load_environment
from envbuild.layers.local_build_host import local_build_host
from envbuild.layers.source_build import build_layer
environment = load_environment({**os.environ, "ENVBUILD_STORE": sys.argv[1]})
layer = pickle.loads(pathlib.Path(sys.argv[2]).read_bytes())
say = lambda line: print(line, flush=True)
print(build_layer(layer, {}, lambda work: local_build_host(work, os.environ), environment, say, offline=False))
"""
# configure of a project whose make has nothing to do.
QUICK = """#!/bin/sh
printf 'install:\\n\\tmkdir -p $(DESTDIR)/opt/env/bin && cp COPYING $(DESTDIR)/opt/env/bin/greet\\n' >Makefile
"""
SLOW = "all:\n\t@sh -c 'sleep 61.7 & sleep 61.7; wait'\ninstall:\n\tmkdir -p $(DESTDIR)@prefix@/bin\n"


@dataclass
class Builder:
    """`build_layer` on a store of its own; `said` has what it told, `greet` a project of ours as an archive."""

    folder: Path
    said: list[str] = field(default_factory=list)

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def environment(self) -> Environment:
        return load_environment({**os.environ, "ENVBUILD_STORE": str(self.store)})

    def pack(self, edits: dict[str, str | None] | None = None, name: str = "greet") -> SourceArchive:
        return pack(name, self.folder, edits)

    def layer(self, archive: SourceArchive, name: str = "greet", **other: object) -> SourceLayer:
        return layer(archive, name, host_arch(), **other)

    def __call__(
        self,
        what: SourceLayer,
        requires: dict[str, Path] | None = None,
        hosts: dict[str, str] | None = None,
        offline: bool = False,
        python: BuildPython | None = None,
        **variables: str,
    ) -> Path:
        return build_layer(
            what,
            requires or {},
            lambda work: local_build_host(work, {**os.environ, **variables}),
            self.environment,
            self.said.append,
            offline=offline,
            hosts=hosts or {},
            python=python,
        )

    def left(self) -> list[str]:
        """What builds left in the store besides archives and layers."""
        folders = ("building", "partial")
        return sorted(str(p) for f in folders if (self.store / f).is_dir() for p in (self.store / f).iterdir())


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    absent = [tool for tool in ("cc", "make", "patch") if shutil.which(tool) is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}")
    return Builder(tmp_path)


def _run(program: Path, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, env={"PATH": os.defpath})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _libraries(program: Path) -> dict[str, str]:
    """What the dynamic linker finds for `program`, by name."""
    return dict(re.findall(r"(\S+) => (.+) \(0x", _run(Path("/usr/bin/ldd"), str(program))))


def test_a_layer_is_built_once_and_works_wherever_its_files_are(builder: Builder, tmp_path: Path) -> None:
    one = builder.layer(builder.pack(), configure=("--with-word=moin",))
    tree = builder(one)
    assert any("make install" in line for line in builder.said)
    builder.said.clear()
    assert builder(one, offline=True) == tree and builder.said == []
    moved = tmp_path / "some where/else"
    shutil.copytree(tree, moved, symlinks=True)
    shutil.rmtree(builder.store)
    for program in ("bin/greet", "libexec/greet/helper"):
        assert _run(moved / program) == "moin"
        # ldd says the path with the parts that the RUNPATH has.
        assert os.path.realpath(_libraries(moved / program)["libgreet.so.1"]) == str(moved / "lib/libgreet.so.1")
    found = {path.relative_to(moved).as_posix() for path in moved.rglob("*") if not path.is_dir()}
    assert found == {
        "bin/greet",
        "libexec/greet/helper",
        "lib/libgreet.so",
        "lib/libgreet.so.1",
        "lib/pkgconfig/greet.pc",
        "include/greet.h",
        "share/licenses/greet/COPYING",
    }


def test_two_builds_in_different_folders_are_equal_to_the_byte(tmp_path: Path) -> None:
    found = []
    for name in ("first", "other"):
        (tmp_path / name).mkdir()
        builder = Builder(tmp_path / name)
        manifest = read_manifest(builder(builder.layer(builder.pack())))
        assert manifest is not None and manifest.files
        found.append(manifest)
    assert found[0].digest == found[1].digest


def test_each_input_makes_another_layer(builder: Builder) -> None:
    archive = builder.pack()
    one = builder.layer(archive)
    trees = {
        builder(one),
        builder(replace(one, configure=("--with-word=servus",))),
        builder(replace(one, environment="another compiler")),
        builder(replace(one, patches=(patch(builder.folder / "w.patch", _WORD),))),
    }
    assert len(trees) == 4
    assert sorted(_run(tree / "bin/greet") for tree in trees) == ["HELLO!", "hello", "hello", "servus"]


_WORD = """--- a/greet.c
+++ b/greet.c
@@ -1,4 +1,4 @@
 #include "greet.h"
 
-const char *greet(void) { return WORD; }
+const char *greet(void) { return "HELLO!"; }
 const char *greet_file(void) { return __FILE__; }
"""  # noqa: W293 - a blank line of context


def test_a_tags_archive_makes_its_configure_script_first_and_is_told_its_version(builder: Builder) -> None:
    configure = (sources.AUTOTOOLS / "greet/configure").read_text()
    # No "#!" line, as in aws-ofi-nccl, which asks for its version in this file.
    autogen = "set -e\ngrep -qx 1.0 .release_version\nmv real configure\n"
    archive = builder.pack({"configure": None, "real": configure, "autogen.sh": autogen})
    assert _run(builder(builder.layer(archive)) / "bin/greet") == "hello"
    assert builder.said[0] == "greet 1.0: autogen.sh"


def test_a_layer_is_linked_with_those_that_it_requires(builder: Builder, tmp_path: Path) -> None:
    greet = builder(builder.layer(builder.pack()))
    calling = builder.layer(
        builder.pack(name="caller"), "caller", system="make", configure=("GREET={greet}",), requires=("greet",)
    )
    with pytest.raises(BuildError, match=r"caller 1\.0 requires greet"):
        builder(calling)
    tree = builder(calling, {"greet": greet})
    assert not (tree / "lib").exists()
    for one in (greet, tree):
        shutil.copytree(one, tmp_path / "env", symlinks=True, dirs_exist_ok=True)
    assert _run(tmp_path / "env/bin/call") == "hello, called"


def test_a_library_of_the_host_is_used_where_it_lies(builder: Builder, tmp_path: Path) -> None:
    host = tmp_path / "opt/greet"
    shutil.copytree(builder(builder.layer(builder.pack())), host, symlinks=True)
    calling = builder.layer(
        builder.pack(name="caller"), "caller", system="make", configure=("GREET={greet}",), requires=("greet",)
    )
    tree = builder(calling, hosts={"greet": str(host)})
    elf = read_elf(tree / "bin/call")
    assert elf is not None and elf.runpath == f"$ORIGIN/../lib:{host}/lib"
    assert _run(tree / "bin/call") == "hello, called"


# A build backend in the project itself, so that nothing but pip is needed.
BACKEND = """
import os, zipfile
def build_wheel(folder, settings=None, metadata=None):
    name = "worded-1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("worded.py", "word = %r" % os.environ["WORD"])
        info = "worded-1.0.dist-info/"
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: worded\\nVersion: 1.0\\n")
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""


def test_a_python_project_is_built_for_the_interpreter_that_is_named(builder: Builder) -> None:
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    archive = builder.pack({"pyproject.toml": project, "backend.py": BACKEND})
    one = builder.layer(archive, system="wheel", configure=("WORD=moin",))
    env = builder.folder / ".env.envbuild-0123abcd"  # in the form of atomic.staging
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    python = str(env / "bin/python")
    version = ".".join(map(str, sys.version_info[:2]))
    # It takes seconds to install pip.
    (env / f"lib/python{version}/site-packages/pip").symlink_to(Path(pip.__file__).parent)
    tree = builder(one, python=BuildPython(python, version))
    site = tree / f"lib/python{version}/site-packages"
    told = subprocess.run(
        [sys.executable, "-c", "import worded; print(worded.word)"],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert told.stdout.strip() == "moin", told.stderr
    assert (tree / "share/licenses/greet/COPYING").is_file()
    one = builder.layer(archive, system="wheel", configure=(f"WORD={env}/lib",))
    with pytest.raises(BuildError, match=r"its file lib/python.*/worded.py names the folder in which its environment"):
        builder(one, python=BuildPython(python, version))


def test_an_archive_with_another_hash_is_refused_and_not_kept(builder: Builder) -> None:
    archive = builder.pack()
    wrong = replace(builder.layer(archive), sha256="0" * 64)
    with pytest.raises(BuildError) as caught:
        builder(wrong)
    assert archive.url in caught.value.message and f"wanted sha256:{'0' * 64}" in caught.value.message
    assert f"it has sha256:{archive.sha256}" in caught.value.message
    assert archive.sha256 in (caught.value.hint or "")
    assert not (builder.store / "sources").exists() and not (builder.store / "built").exists()


def test_an_archive_comes_from_a_mirror_and_passwords_stay_out_of_messages(builder: Builder, tmp_path: Path) -> None:
    archive = builder.pack()
    one = replace(builder.layer(archive), url="https://user:secret@127.0.0.1:9/src/greet-1.0.tar.gz")
    with pytest.raises(BuildError) as caught:
        builder(one, offline=True)
    assert "not asked, --offline" in caught.value.message
    assert "secret" not in f"{caught.value.message} {caught.value.hint}"
    site = tmp_path / "site.toml"
    site.write_text(f'[mirrors]\n"https://user:secret@127.0.0.1:9/src" = ["{archive.path.parent.as_uri()}"]\n')
    variables = {**os.environ, "ENVBUILD_STORE": str(builder.store), "ENVBUILD_SITE": str(site)}
    tree = build_layer(
        one,
        {},
        lambda work: local_build_host(work, os.environ),
        load_environment(variables),
        builder.said.append,
        offline=True,
    )
    assert _run(tree / "bin/greet") == "hello"


def test_configure_that_fails_is_shown_with_its_test_and_kept(builder: Builder) -> None:
    compiler = builder.folder / "nocc"
    compiler.write_text("#!/bin/sh\necho 'crt1.o: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(BuildError) as caught:
        builder(builder.layer(builder.pack()), CC=str(compiler))
    assert "greet 1.0: configure failed (exit 77)" in caught.value.message
    assert "crt1.o: No such file" in caught.value.message  # config.log alone has it
    assert "libc6-dev" in (caught.value.hint or "")
    (log,) = (builder.store / "logs").iterdir()
    assert str(log) in caught.value.message and "==== config.log" in log.read_text()
    assert builder.left() == [] and not (builder.store / "built").exists()


@pytest.mark.parametrize(
    ("edits", "message", "hint"),
    [
        ({"greet.c": "#include <nowhere.h>\n"}, "make failed", "header nowhere.h"),
        ({"Makefile.in": "all:\n\tno-such-compiler a\n"}, "make failed", "program no-such-compiler is missing"),
        ({"Makefile.in": "all:\n\ttrue\n"}, "make install failed", "no install target"),
        ({"Makefile.in": "all:\ninstall:\n\ttrue\n"}, "installed nothing below", "DESTDIR"),
        ({"configure": None}, "has no configure script", "system"),
        ({"greet.c": "const char *greet(void) { return WHERE; }\n"}, "folder that it was built in", "patch"),
    ],
)
def test_a_project_that_cannot_be_built_says_why_and_leaves_nothing(
    builder: Builder, edits: dict[str, str | None], message: str, hint: str
) -> None:
    if "WHERE" in str(edits):
        makefile = (sources.AUTOTOOLS / "greet/Makefile.in").read_text()
        edits["Makefile.in"] = makefile.replace("'-DWORD", "'-DWHERE=\"@srcdir@\"' '-DWORD")
    with pytest.raises(BuildError) as caught:
        builder(builder.layer(builder.pack(edits)))
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    assert builder.left() == [] and not (builder.store / "built").exists()


def test_a_patch_that_does_not_fit_is_said(builder: Builder) -> None:
    bad = patch(builder.folder / "bad.patch", _WORD.replace("return WORD", "return OTHER"))
    with pytest.raises(BuildError, match=r"patch bad\.patch failed") as caught:
        builder(replace(builder.layer(builder.pack()), patches=(bad,)))
    assert "does not fit this version" in (caught.value.hint or "")


def test_programs_and_compilers_that_are_missing_are_named(builder: Builder, tmp_path: Path) -> None:
    one = builder.layer(builder.pack(), tools=("no-such-tool", "make", "no-other"))
    with pytest.raises(BuildError, match=r"greet 1\.0: programs failed") as caught:
        builder(one)
    assert "no-such-tool, no-other are missing" in (caught.value.hint or "")
    assert builder.said == []
    (tmp_path / "bin").mkdir()
    with pytest.raises(EnvbuildError, match="no C compiler"):
        host_identity(one, {"PATH": str(tmp_path / "bin")})
    assert host_arch() in host_identity(one, os.environ)
    changed = host_identity(one, {**os.environ, "CPATH": "/opt/module/include"})
    assert changed != host_identity(one, os.environ)


def _start(builder: Builder, what: SourceLayer) -> subprocess.Popen[str]:
    description = builder.folder / "layer.pickle"
    description.write_bytes(pickle.dumps(what))
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(builder.store), str(description)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a script ignores Ctrl-C, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def _running(word: str) -> list[int]:
    """Processes whose command line has `word`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def _until(what: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def _slow(builder: Builder) -> SourceLayer:
    """A layer whose make waits for long in two processes."""
    return builder.layer(builder.pack({"Makefile.in": SLOW}))


def test_ctrl_c_stops_all_that_make_started_and_leaves_the_archive_alone(builder: Builder) -> None:
    child = _start(builder, _slow(builder))
    _until(lambda: len(_running("61.7")) >= 2)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)
    assert child.returncode != 0
    _until(lambda: not _running("61.7"), 5)
    assert builder.left() == [] and not (builder.store / "built").exists()
    assert len(list((builder.store / "sources").iterdir())) == 1


def test_a_killed_build_leaves_no_layer_and_the_next_one_cleans_up(builder: Builder) -> None:
    one = _slow(builder)
    child = _start(builder, one)
    _until(lambda: len(_running("61.7")) >= 2)
    child.kill()
    child.communicate(timeout=30)
    _until(lambda: not _running("61.7"), 10)
    assert not (builder.store / "built").exists()
    assert list((builder.store / "building").iterdir())
    tree = builder(builder.layer(builder.pack({"Makefile.in": None, "configure": QUICK})))
    assert (tree / "bin/greet").is_file()
    assert [path for path in builder.left() if not path.endswith(".lock")] == []


def test_of_two_that_want_the_same_layer_one_builds_it(builder: Builder) -> None:
    children = [_start(builder, one) for one in [builder.layer(builder.pack())] * 2]
    printed = []
    for child in children:
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        printed.append(out.splitlines())
    assert printed[0][-1] == printed[1][-1]
    assert sorted("greet 1.0: make" in lines for lines in printed) == [False, True]


def test_a_damaged_layer_is_built_again(builder: Builder) -> None:
    one = builder.layer(builder.pack())
    tree = builder(one)
    (tree / "bin/greet").unlink()
    assert _run(builder(one) / "bin/greet") == "hello"
    program = (tree / "bin/greet").read_bytes()
    (tree / "bin/greet").write_bytes(program.replace(b"hello", b"h4ll0"))  # of the same size
    assert _run(builder(one) / "bin/greet") == "hello"


def test_a_replaced_archive_in_the_store_is_fetched_again(builder: Builder) -> None:
    one = builder.layer(builder.pack())
    tree = builder(one)
    shutil.rmtree(tree.parent)
    (archive,) = (builder.store / "sources").glob("*/*")
    archive.write_bytes(archive.read_bytes()[:-1] + b"!")  # of the same size
    assert _run(builder(one) / "bin/greet") == "hello"


def test_libfabric_is_built_natively_and_finds_tcp_from_a_moved_tree(
    libfabric_source: SourceArchive, session_store: Path, tmp_path: Path
) -> None:
    absent = [tool for tool in ("cc", "make", "autoreconf", "libtoolize") if shutil.which(tool) is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}")
    arch = host_arch()
    (tmp_path / "recipe.toml").write_text(
        'name = "fabric"\ndescription = "libfabric"\npython = "3.11"\nrequirements = ["torch"]\n'
        f"[targets.cpu-{arch}]\n"
        f'[layers.libfabric]\nversion = "2.1.0"\nurl = "{libfabric_source.url}"\nsha256 = "{libfabric_source.sha256}"\n'
        'configure = ["--disable-static", "CFLAGS=-O0"]\n'
    )
    (one,), _ = source_layers(load_recipe(tmp_path / "recipe.toml"), Target("cpu", arch))
    one = replace(one, environment=host_identity(one, os.environ))
    said: list[str] = []
    tree = build_layer(
        one,
        {},
        lambda work: local_build_host(work, os.environ),
        load_environment({**os.environ, "ENVBUILD_STORE": str(session_store)}),
        said.append,
        offline=False,
    )
    moved = tmp_path / "moved"
    shutil.copytree(tree, moved, symlinks=True)
    told = _run(moved / one.check[0].join(["bin/", ""]), *one.check[1:])
    assert "provider: tcp" in told
    libraries = _libraries(moved / "bin/fi_info")
    assert os.path.realpath(libraries["libfabric.so.1"]).startswith(str(moved))
    # Nothing of the build machine besides the C library: what is not named in sources.toml must not creep in.
    base = re.compile(r"lib(?:c|m|dl|rt|pthread|atomic|gcc_s)\.so\.\d+")
    for library in set(_libraries(moved / "lib/libfabric.so.1")) | set(libraries) - {"libfabric.so.1"}:
        assert base.fullmatch(library), library
    assert "lib/libfabric.so.1" in {path.relative_to(moved).as_posix() for path in moved.rglob("*")}
    assert (moved / "share/licenses/libfabric/COPYING").is_file()
    keep_layer(session_store, "libfabric")
