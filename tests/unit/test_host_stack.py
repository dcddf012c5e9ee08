"""The network libraries of nodes and of an artifact: verdicts, the real loader on the same files, and jobs."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lab import artifacts as lab

from ddp_train.preflight.model import FAIL, Facts, Node, Requirements
from ddp_train.preflight.rules_node import resources
from ddp_train.preflight.stack import STACK, loaded_stack
from envbuild.base.elf import MACHINES, Elf, file_head, read_elf, refused_file
from envbuild.base.errors import RecipeError, UsageError
from envbuild.base.libraries import LoadFault, Process, Processor, configured_folders, inventory, processor
from envbuild.cli.commands import cli
from envbuild.compat.host_stack import ArtifactLibraries, HostInventory, judge_stack, parse_inventory
from envbuild.compat.rows import CompatFinding
from envbuild.doctor import sites
from envbuild.doctor.probe import Host
from envbuild.image.layout import Blobs
from envbuild.jobs import submit
from envbuild.jobs.model import JobInputs, JobRequest
from envbuild.jobs.plan import plan_job
from envbuild.jobs.schedulers import render
from envbuild.site.jobs import HostStackTable
from envbuild.site.settings import load_site
from envbuild.verify.static_checks import read_libraries

from .job_plans import SQSH, VENV

MACHINE = MACHINES[os.uname().machine]


@dataclass
class Compiled:
    """Libraries compiled into a folder."""

    root: Path

    def library(
        self, path: str, *options: str, defines: str = "", calls: str = "", wants: str = "", versions: str = ""
    ) -> str:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"int {name}(void) {{ return 1; }}" for name in defines.split()]
        lines += [f"extern int {name}(void);" for name in calls.split()]
        stem, total = place.name.split(".")[0].replace("-", "_"), " ".join(f"+ {name}()" for name in calls.split())
        lines.append(f"int use_{stem}(void) {{ return 0 {total}; }}")
        if versions:
            (self.root / "map").write_text(
                "".join(f"{version} {{ global: {defines.replace(' ', ';')}; }};" for version in versions.split())
            )
            options = (*options, f"-Wl,--version-script={self.root}/map")
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-x",
            "c",
            "-",
            "-x",
            "none",
            "-Wl,--no-as-needed",
            f"-Wl,-soname,{place.name}",
        ]
        others = [str(self.root / other) for other in wants.split()]
        command += [
            f"-Wl,-rpath-link,{self.root}/a",
            "-Wl,--allow-shlib-undefined",
            "-o",
            str(place),
            *others,
            *options,
        ]
        subprocess.run(command, input="\n".join(lines), text=True, check=True)
        return str(place)

    def judged(self, *names: str, path: str = "") -> tuple[LoadFault | None, dict[str, str]]:
        """What the library loads by our rules, its own files by their names."""
        known: dict[str, Elf | None] = {}

        def find(path: str) -> Elf | None:
            real = os.path.realpath(path)
            if real not in known:
                elf = read_elf(Path(real), symbols=True) if os.path.isfile(real) else None
                known[real] = elf or refused_file(file_head(real))
            return known[real]

        python, folders = os.path.realpath(sys.executable), inventory([])["folders"]
        process = Process(find, MACHINE, path.split(":") if path else (), folders, python, processor())
        fault = next(filter(None, map(process.load, names)), None)
        ours = {
            os.path.basename(m.path): os.path.realpath(m.path)
            for m in process.mapped
            if m.path.startswith(str(self.root))
        }
        return fault, ours

    def real(self, *names: str, path: str = "") -> tuple[str, dict[str, str]]:
        """What the real loader says, and the files that it took."""
        program = (
            "import ctypes, sys\nfor name in sys.argv[1:]: ctypes.CDLL(name)\n"
            "print(*{line.split(None, 5)[5].strip() for line in open('/proc/self/maps') if '.so' in line}, sep='\\n')"
        )
        env = {**os.environ, "LD_LIBRARY_PATH": path}
        done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, env=env)
        paths = [p for p in done.stdout.splitlines() if p.startswith(str(self.root))]
        return done.stderr, {os.path.basename(p): p for p in paths}


@pytest.fixture
def compiled(tmp_path: Path, compiler: None) -> Compiled:
    return Compiled(tmp_path / "c")


RPATH, RUNPATH = ("-Wl,--disable-new-dtags",), ("-Wl,--enable-new-dtags",)


@pytest.mark.parametrize("style", [RPATH, RUNPATH], ids=["rpath", "runpath"])
@pytest.mark.parametrize("own", [(), ("-Wl,-rpath,$ORIGIN/none",)], ids=["", "own"])
@pytest.mark.parametrize("path", ["", "b"], ids=["", "LD_LIBRARY_PATH"])
def test_each_library_is_taken_from_where_the_loader_takes_it(
    compiled: Compiled, style: tuple[str, ...], own: tuple[str, ...], path: str
) -> None:
    """A plugin has a path to one of two folders with what it needs, which needs another library there."""
    for folder in "ab":
        compiled.library(f"{folder}/libbase.so.1", defines="base")
        compiled.library(
            f"{folder}/libfab.so.1", *RUNPATH, *own, calls="base", defines="fab", wants=f"{folder}/libbase.so.1"
        )
    plugin = compiled.library("p/libplug.so", *style, "-Wl,-rpath,$ORIGIN/../a", calls="fab", wants="a/libfab.so.1")
    before = str(compiled.root / path) if path else ""
    fault, ours = compiled.judged(plugin, path=before)
    said, theirs = compiled.real(plugin, path=before)
    assert (fault is None) == (said == ""), (fault, said)
    if fault:
        assert fault.name in said and fault.name == "libbase.so.1"
    else:
        assert ours == theirs and len(ours) == 3


def test_a_loaded_library_of_the_same_name_is_taken_again(compiled: Compiled) -> None:
    first = compiled.library("a/libfab.so.1", defines="fab")
    compiled.library("b/libfab.so.1", defines="fab more")
    plugin = compiled.library("p/libplug.so", "-Wl,-rpath,$ORIGIN/../b", calls="fab more", wants="b/libfab.so.1")
    assert compiled.judged(plugin)[0] is None and compiled.real(plugin)[0] == ""
    fault, _ = compiled.judged(first, plugin)
    assert fault == LoadFault(plugin, "symbol", "more") and "undefined symbol: more" in compiled.real(first, plugin)[0]


def test_versions_symbols_and_absent_libraries(compiled: Compiled) -> None:
    old = compiled.library("b/libfab.so.1", defines="fab", versions="FABRIC_1.0")
    compiled.library("a/libfab.so.1", defines="fab", versions="FABRIC_1.8")
    plugin = compiled.library("p/libplug.so", calls="fab", wants="a/libfab.so.1")
    for folder, fault in (
        ("a", None),
        ("b", LoadFault(plugin, "version", "FABRIC_1.8", old)),
        ("c", LoadFault(plugin, "absent", "libfab.so.1")),
    ):
        path = str(compiled.root / folder)
        said = compiled.real(plugin, path=path)[0]
        assert compiled.judged(plugin, path=path)[0] == fault
        assert (fault.name in said) if fault else not said
    # A library without versions is accepted where versions are needed.
    compiled.library("b/libfab.so.1", defines="fab")
    path = str(compiled.root / "b")
    assert compiled.judged(plugin, path=path)[0] is None
    assert compiled.real(plugin, path=path)[0] == ""
    compiled.library("b/libfab.so.1", defines="other")
    assert compiled.judged(plugin, path=path)[0] == LoadFault(plugin, "symbol", "fab@FABRIC_1.8")
    assert "undefined symbol: fab" in compiled.real(plugin, path=path)[0]


@pytest.mark.parametrize("folder", [*processor().subfolders((2, 36)), "none/", "$LIB/", "$PLATFORM/"])
def test_the_loader_searches_in_folders_for_the_processor(compiled: Compiled, folder: str) -> None:
    """All that this processor has are searched by one of the loaders; `$` are the values of this host's loader."""
    for place in (folder, f"lib/{os.uname().machine}-linux-gnu/", "lib64/", f"{processor().platform}/"):
        if "$" not in place and ("$" in folder or place == folder):
            compiled.library(f"a/{place}libdep.so.1", defines="dep")
    rpath = f"$ORIGIN/{folder.rstrip('/')}" if "$" in folder else "$ORIGIN"
    compiled.library("tmp/libdep.so.1", defines="dep")
    fabric = compiled.library("a/libfab.so.1", f"-Wl,-rpath,{rpath}", calls="dep", wants="tmp/libdep.so.1")
    fault, ours = compiled.judged(fabric)
    said, theirs = compiled.real(fabric)
    assert (fault is None) == (said == ""), (fault, said)
    assert fault or ours == theirs


MAIN = b"int main(void) { return 0; }"


def osabi(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(7)
        file.write(b"\6")


@pytest.mark.parametrize(
    ("options", "change", "kind"),
    [
        (["-Wl,-z,nodlopen"], None, "refused"),
        (["-nostdlib"], lambda path: Path(path).write_text("/* GNU ld script */\nINPUT(libdep.so.1.0)\n"), "refused"),
        (["-nostdlib"], osabi, "refused"),
        (
            ["-nostdlib"],
            lambda path: subprocess.run(["gcc", "-xc", "-", "-o", path], input=MAIN, check=True),
            "refused",
        ),
        (["-nostdlib"], lambda path: os.truncate(path, 300), "refused"),
        (["-Wl,-z,execstack"], None, "refused"),
        (["-nostdlib"], None, "version"),
    ],
    ids=["nodlopen", "text", "osabi", "program", "truncated", "execstack", "no versions"],
)
def test_files_that_the_loader_refuses_end_the_search(
    compiled: Compiled, options: list[str], change: Callable[[str], object] | None, kind: str
) -> None:
    """A folder with a good library follows: the loader does not take it. Only new glibcs refuse executable stacks."""
    versions = "DEP_1" if kind == "version" else ""
    compiled.library("a/libdep.so.1", defines="dep", versions=versions)
    compiled.library("b/libdep.so.1", defines="dep", versions=versions)
    fabric = compiled.library(
        "c/libfab.so.1", "-Wl,-rpath,$ORIGIN/../a:$ORIGIN/../b", calls="dep", wants="a/libdep.so.1"
    )
    place = compiled.library("a/libdep.so.1", *options, defines="dep")
    if change:
        change(place)
    fault, _ = compiled.judged(fabric)
    said, _ = compiled.real(fabric)
    assert (fault is None) == (said == ""), (fault, said)
    if "execstack" not in options[0]:
        assert fault and fault.kind == kind, fault


def test_a_new_glibc_refuses_executable_stacks() -> None:
    for newest, fault in (("2.36", None), ("2.41", "it asks for an executable stack, which glibc 2.41 refuses")):
        libraries = {"/l/libc.so.6": library(defines=f"GLIBC_{newest}"), "/l/x.so": replace(library(), exec_stack=True)}
        found = Process(libraries.get, 62, (), ["/l"]).load("x.so")
        assert found == (fault and LoadFault("/l/x.so", "refused", fault))


@pytest.mark.parametrize(("machine", "executable"), [("x86_64", True), ("aarch64", False)])
def test_a_library_that_does_not_say_how_its_stack_is(compiled: Compiled, machine: str, executable: bool) -> None:
    """Old assembler code has no PT_GNU_STACK."""
    place = Path(compiled.library("libold.so", "-nostdlib"))
    content = bytearray(place.read_bytes())
    content[18:20] = struct.pack("<H", MACHINES[machine])
    (table,), (size, count) = struct.unpack_from("<Q", content, 32), struct.unpack_from("<HH", content, 54)
    for header in range(table, table + size * count, size):
        if content[header : header + 4] == struct.pack("<I", 0x6474E551):
            content[header : header + 4] = bytes(4)
    assert not read_elf(place).exec_stack  # type: ignore[union-attr]
    place.write_bytes(content)
    assert read_elf(place).exec_stack is executable  # type: ignore[union-attr]


def test_the_levels_of_processors_are_searched_by_glibcs_that_know_them() -> None:
    node = Processor(["x86-64-v3", "x86-64-v2"], "haswell", ["x86_64"])
    assert node.subfolders((2, 37)) == ["glibc-hwcaps/x86-64-v3/", "glibc-hwcaps/x86-64-v2/", ""]
    old = node.subfolders((2, 28))
    assert old[0] == "tls/haswell/x86_64/" and "tls/" in old and old[-1] == "" and len(old) == 8
    assert Processor().subfolders((2, 28)) == [""]


def test_files_of_ld_so_conf_are_read_as_ldconfig_does() -> None:
    files = {
        "/etc/ld.so.conf": b"/first # a comment\ninclude ld.so.conf.d/*.conf\n/last\n",
        "/etc/ld.so.conf.d/a.conf": b"include /etc/more/*.conf\n#/not\n",
        "/etc/ld.so.conf.d/b.txt": b"/not",
        "/etc/more/x.conf": b"/opt/x\ninclude /etc/ld.so.conf\ninclude /none/*\n",
    }

    def names(folder: str) -> list[str]:
        return [os.path.basename(path) for path in files if os.path.dirname(path) == folder]

    assert configured_folders(names, lambda path: files[path]) == ["/first", "/opt/x", "/last"]


def library(soname: str = "", needed: str = "", needs: str = "", defines: str = "", given: str = "") -> Elf:
    """A library without files: `needs` are LIBRARY:VERSION, `given` are symbols."""
    pairs, symbols = [pair.split(":") for pair in needs.split()], {name: [""] for name in given.split()}
    return Elf(62, needed=needed.split(), soname=soname, needs=pairs, defines=defines.split(), given=symbols)


LIBC = library("libc.so.6", defines="GLIBC_2.2.5 GLIBC_2.34 GLIBC_2.36")
HOST = HostInventory(
    {
        "/opt/fab/libfabric.so.1.2": library(
            "libfabric.so.1", "libcxi.so.1 libc.so.6", "libc.so.6:GLIBC_2.34", "FABRIC_1.7"
        ),
        "/usr/lib64/libcxi.so.1.5": library("libcxi.so.1", "libc.so.6"),
        "/opt/net/libnccl-net.so": library("", "libfabric.so.1", given="ncclNetPlugin_v4 ncclNetPlugin_v5"),
        "/opt/mpi/libmpi.so.12": library("libmpi.so.12", "libc.so.6"),
        "/opt/new/libmpi.so.12": library("libmpi.so.12", "libfabric.so.1", "libfabric.so.1:FABRIC_1.9"),
        "/opt/old/libm.so.6": library("libm.so.6", "libc.so.6", "libc.so.6:GLIBC_2.38"),
        "/opt/dir/1.2/libdir.so.1": library("libdir.so.1"),
        "/opt/out/1.2/libout.so.1.5": library("libout.so.1"),
        "/usr/lib64/libcuda.so.1": library("libcuda.so.1", "libc.so.6"),
    },
    {
        "/opt/fab/libfabric.so.1": "/opt/fab/libfabric.so.1.2",
        "/usr/lib64/libcxi.so.1": "/usr/lib64/libcxi.so.1.5",
        "/opt/dir/now": "/opt/dir/1.2",
        "/opt/dir/now/libdir.so.1": "/opt/dir/1.2/libdir.so.1",
        "/opt/fab/libout.so.1": "/opt/out/1.2/libout.so.1.5",
    },
    ("/usr/lib64",),
)
TABLE = HostStackTable("inject", "/opt/fab", more=("/usr/lib64/libcxi.so.1",), inventory="x")
NCCL = "/opt/env/lib/python3.11/site-packages/nvidia_nccl_cu12-2.26.2.dist-info/RECORD"


def image(libraries: Mapping[str, Elf], *paths: str) -> ArtifactLibraries:
    every = {"/usr/lib/libc.so.6": LIBC, **libraries}
    return ArtifactLibraries("/opt/env", 62, every.get, [*every, *paths], True, folders=("/usr/lib",))


def own_plugin(version: str = "FABRIC_1.7", api: int = 9) -> dict[str, Elf]:
    plugin = library("", "libfabric.so.1", f"libfabric.so.1:{version}", given=f"ncclNetPlugin_v{api}")
    return {"/opt/env/lib/libnccl-net-ofi.so": plugin}


def found(table: HostStackTable, artifact: ArtifactLibraries, subject: str) -> CompatFinding:
    return next(one for one in judge_stack(table, HOST, artifact) if one.subject == subject)


@pytest.mark.parametrize(
    ("table", "artifact", "subject", "status", "text", "fix"),
    [
        (
            TABLE,
            image(own_plugin()),
            "plugin",
            "good",
            "the artifact's lib/libnccl-net-ofi.so loads libfabric.so.1: the nodes' /opt/fab/libfabric.so.1",
            "",
        ),
        (TABLE, image({}), "libfabric", "good", "libfabric.so.1 is the nodes' /opt/fab/libfabric.so.1", ""),
        (
            TABLE,
            image(own_plugin("FABRIC_1.8")),
            "plugin",
            "bad",
            "needs FABRIC_1.8, and the nodes' /opt/fab/libfabric.so.1 has FABRIC_1.7 at most",
            "build libnccl-net-ofi.so against the nodes' libfabric.so.1",
        ),
        (
            replace(TABLE, more=()),
            image({}),
            "libfabric",
            "bad",
            "needs libcxi.so.1, which no searched folder has",
            'add "/usr/lib64/libcxi.so.1" to [host_stack] more',
        ),
        (
            TABLE,
            image({"/usr/lib/libc.so.6": library("libc.so.6", defines="GLIBC_2.2.5 GLIBC_2.31 GLIBC_2.4")}),
            "libfabric",
            "bad",
            "needs GLIBC_2.34, and the artifact's /usr/lib/libc.so.6 has GLIBC_2.31 at most",
            "take an artifact with a newer libc.so.6",
        ),
        (
            replace(TABLE, nccl_plugin="/opt/net/libnccl-net.so"),
            image({}, NCCL),
            "plugin",
            "good",
            "the nodes' /opt/net/libnccl-net.so loads libfabric.so.1: the nodes'",
            "",
        ),
        (
            replace(TABLE, mpi="/opt/mpi"),
            image({"/opt/env/lib/MPI.so": library("", "libmpi.so.40")}),
            "MPI",
            "bad",
            "MPI.so needs libmpi.so.40",
            "add a package with libmpi.so.40",
        ),
        (
            replace(TABLE, mpi="/opt/mpi"),
            image({"/opt/env/lib/MPI.so": library("", "libmpi.so.12")}),
            "MPI",
            "good",
            "the nodes' /opt/mpi/libmpi.so.12",
            "",
        ),
        (replace(TABLE, mpi="/opt/mpi"), image({}), "MPI", "good", "libmpi.so.12 is the nodes'", ""),
        (  # mpi4py's wheel has a module for each MPI, and imports the one that can be loaded
            replace(TABLE, mpi="/opt/mpi"),
            image(
                {
                    "/opt/env/m/MPI.mpich.cpython-311.so": library("", "libmpi.so.12"),
                    "/opt/env/m/MPI.openmpi.cpython-311.so": library("", "libmpi.so.40"),
                }
            ),
            "MPI",
            "good",
            "the nodes' /opt/mpi/libmpi.so.12",
            "",
        ),
        (  # no rank loads MPI's bindings for C++
            replace(TABLE, mpi="/opt/mpi"),
            image({"/usr/lib/libmpi_cxx.so.40": library("", "libmpi.so.40")}),
            "MPI",
            "good",
            "libmpi.so.12 is the nodes'",
            "",
        ),
        (  # the folder has a library of the system, which the Python loads, too
            HostStackTable("inject", "/opt/old", inventory="x"),
            replace(
                image({"/usr/bin/python3": library("", "libm.so.6 libc.so.6", "libm.so.6:GLIBC_2.29")}),
                program="/usr/bin/python3",
            ),
            "Python",
            "bad",
            "the nodes' /opt/old/libm.so.6 needs GLIBC_2.38, and the artifact's /usr/lib/libc.so.6 has GLIBC_2.36",
            "take an artifact with a newer libc.so.6",
        ),
        (  # jobs mount the folder alone, and its link leads out
            TABLE,
            image({"/opt/env/lib/libnccl-net.so": library("", "libout.so.1")}),
            "plugin",
            "bad",
            "needs libout.so.1, which no searched folder has",
            'add "/opt/out/1.2" to [host_stack] more',
        ),
        (
            replace(TABLE, more=("/opt/out/1.2", "/opt/dir/now")),
            image({"/opt/env/lib/libnccl-net.so": library("", "libout.so.1 libdir.so.1")}),
            "plugin",
            "note",
            "can be loaded",
            "",
        ),
        (
            replace(TABLE, mode="image", driver="/usr/lib64"),
            image({}),
            "driver",
            "good",
            "libcuda.so.1 is the nodes'",
            "",
        ),
        (
            replace(TABLE, mode="image"),
            image(own_plugin()),
            "plugin",
            "bad",
            "needs libfabric.so.1",
            'or set mode = "inject" in [host_stack]',
        ),
        (replace(TABLE, mode="image"), image({}), "stack", "note", "neither the nodes nor the artifact", ""),
    ],
)
def test_the_verdict_names_the_first_that_does_not_fit(
    table: HostStackTable, artifact: ArtifactLibraries, subject: str, status: str, text: str, fix: str
) -> None:
    one = found(table, artifact, subject)
    assert one.status == status and text in one.text and fix in one.fix, one


def test_the_nodes_mpi_is_judged_after_the_plugin_even_if_a_program_has_another_mpi() -> None:
    own = {
        **own_plugin(),
        "/opt/env/m/MPI.so": library("", "libmpi.so.40"),
        "/usr/lib/libmpi.so.40": library("libmpi.so.40"),
        "/usr/lib/libfabric.so.1": library("libfabric.so.1", defines="FABRIC_1.7"),
    }
    rows = judge_stack(HostStackTable("inject", mpi="/opt/new", inventory="x"), HOST, image(own))
    assert [row.status for row in rows if row.subject == "MPI"] == ["good", "bad"]
    text = (
        "the nodes' /opt/new/libmpi.so.12 needs FABRIC_1.9, and the artifact's /usr/lib/libfabric.so.1 has FABRIC_1.7"
    )
    assert text in rows[-1].text and "take an artifact with a newer libfabric.so.1" in rows[-1].fix


@pytest.mark.parametrize(("api", "status"), [(9, "good"), (4, "bad")])
def test_nccl_and_the_plugin_need_a_net_api_in_common(api: int, status: str) -> None:
    told = judge_stack(TABLE, HOST, image(own_plugin(api=api), NCCL))
    assert [one.status for one in told if "net API" in one.text] == [status]
    assert [one.status for one in judge_stack(TABLE, HOST, image(own_plugin())) if "net API" in one.text] == ["unknown"]


def test_outside_of_images_what_an_environment_lacks_is_the_nodes() -> None:
    plugin = {"/env/lib/libnccl-net.so": library("", "libfabric.so.1 libcxi.so.1")}
    host = replace(HOST, libraries={**HOST.libraries, "/usr/lib64/libc.so.6": LIBC})
    artifact = ArtifactLibraries("/env", 62, plugin.get, [*plugin], isolated=False)
    (one,) = [
        one
        for one in judge_stack(replace(TABLE, more=()), host, artifact)
        if one.subject == "plugin" and "loads" in one.text
    ]
    assert one.status == "good" and "the nodes' /opt/fab/libfabric.so.1" in one.text


def test_an_inventory_is_written_on_a_node_and_read_anywhere(compiled: Compiled) -> None:
    base = compiled.library("b/libbase.so.1", defines="base", versions="BASE_1")
    fabric = compiled.library("a/libfab.so.1.2", "-Wl,-rpath,$ORIGIN/../b", calls="base", wants="b/libbase.so.1")
    (compiled.root / "a/libfab.so.1").symlink_to("libfab.so.1.2")
    host = parse_inventory(json.dumps(inventory([str(compiled.root / "a")])), "here")
    assert host.find(str(compiled.root / "a/libfab.so.1")) is host.find(fabric) is not None
    known = host.find(base)
    assert known is not None and known.defines == ["BASE_1", "libbase.so.1"] and known.given["base"] == ["BASE_1"]
    assert any(path.endswith("/libc.so.6") for path in [*host.libraries, *host.links]) and "/usr/lib" in host.folders
    alone = parse_inventory(json.dumps(inventory([fabric], alone=True)), "here")
    assert [*alone.libraries] == [fabric] and not alone.folders
    assert host.processor == processor()
    os.chmod(fabric, 0o640)
    assert not inventory([fabric])["libraries"], "not all users can read it"
    for text in ("", "{}", '{"format": 2}', '{"format": 1, "libraries": {"/x": {}}, "links": {}, "folders": []}'):
        with pytest.raises(UsageError, match="is no inventory"):
            parse_inventory(text, "x.json")


def test_the_python_of_a_venv_is_the_artifacts() -> None:
    """Its libpython is outside of the environment, and the nodes' folder has an older libm."""
    own = {
        "/home/py/bin/python3.11": replace(library("", "libpython3.11.so.1.0"), runpath="/home/py/lib"),
        "/home/py/lib/libpython3.11.so.1.0": library("libpython3.11.so.1.0", "libm.so.6", "libm.so.6:GLIBC_2.35"),
    }
    host = replace(HOST, libraries={"/opt/fab/libm.so.6": library("libm.so.6", defines="GLIBC_2.29")})
    artifact = ArtifactLibraries("/env", 62, own.get, [], False, "/home/py/bin/python3.11", "/home/py")
    (one,) = [one for one in judge_stack(TABLE, host, artifact) if one.subject == "Python"]
    assert one.status == "bad" and "needs GLIBC_2.35, and the nodes' /opt/fab/libm.so.6 has GLIBC_2.29" in one.text


def test_a_nodes_text_file_in_place_of_a_library_ends_python() -> None:
    own = {"/usr/bin/python3": library("", "libcxi.so.1")}
    host = replace(HOST, libraries={"/usr/lib64/libcxi.so.1.5": Elf(0, fault="invalid ELF header")})
    one = judge_stack(TABLE, host, replace(image(own), program="/usr/bin/python3"))[0]
    assert (one.subject, one.status) == ("Python", "bad") and "cannot be loaded: invalid ELF header" in one.text


def test_one_cause_is_named_once() -> None:
    table = replace(TABLE, more=(), mpi="/opt/new")
    rows = judge_stack(table, HOST, image({}))
    assert [row.subject for row in rows if "libcxi.so.1" in row.text] == ["libfabric"]


def site_file(tmp_path: Path, text: str) -> Path:
    (tmp_path / "s.toml").write_text(f'[scheduler]\nkind = "slurm"\n[host_stack]\n{text}')
    return tmp_path / "s.toml"


def test_what_an_environment_loads_before_the_nodes_libraries_does_not_fit() -> None:
    """A plugin with an RPATH takes the artifact's own libfabric, whatever LD_LIBRARY_PATH says."""
    plugin = replace(library("", "libfabric.so.1"), runpath="$ORIGIN", inherited=True)
    own = {"/opt/env/lib/libnccl-net.so": plugin, "/opt/env/lib/libfabric.so.1": library("libfabric.so.1")}
    one = found(TABLE, image(own), "plugin")
    assert one.status == "bad" and "the artifact's lib/libfabric.so.1, not that in the nodes' /opt/fab" in one.text
    own["/opt/env/lib/libnccl-net.so"] = replace(plugin, inherited=False)
    assert found(TABLE, image(own), "plugin").status == "good"


def test_of_the_drivers_folder_an_image_sees_the_drivers_files_alone() -> None:
    own = {"/usr/lib64/libc.so.6": library("libc.so.6", defines="GLIBC_2.17")}
    needs = library("libcuda.so.1", "libc.so.6", "libc.so.6:GLIBC_2.34")
    host = replace(HOST, libraries={**HOST.libraries, "/usr/lib64/libc.so.6": LIBC, "/usr/lib64/libcuda.so.1": needs})
    table = HostStackTable(driver="/usr/lib64", inventory="x")
    artifact = ArtifactLibraries("/opt/env", 62, own.get, [*own], True, folders=("/usr/lib64",))
    (one,) = judge_stack(table, host, artifact)
    assert one.status == "bad" and "the artifact's /usr/lib64/libc.so.6 has GLIBC_2.17 at most" in one.text


def test_jobs_mount_and_name_what_the_mode_needs(tmp_path: Path) -> None:
    text = 'libfabric = "/opt/fab"\nnccl_plugin = "/opt/net/libnccl-net-ofi.so"\nmore = ["/usr/lib64/libcxi.so.1"]\n'
    file = site_file(tmp_path, f'mode = "inject"\n{text}[container]\nruntime = "apptainer"\n[node]\ngpus = 8\n')
    site = load_site({"HOME": str(tmp_path)}, str(file))
    gpu = replace(SQSH, target="cu126-x86_64")
    request = JobRequest(nodes=2, nproc_per_node=1, preflight=True, work="/fsx/me")
    plan = plan_job(request, JobInputs(gpu, nccl="2.26.2"), site)
    assert plan.library_path == ("/opt/fab", "/opt/net", "/usr/lib64")
    assert dict(plan.variables)["NCCL_NET_PLUGIN"] == "/opt/net/libnccl-net-ofi.so"
    script = render(plan)
    assert (
        "--bind /opt/fab:/opt/fab:ro" in script and "--bind /usr/lib64/libcxi.so.1:/usr/lib64/libcxi.so.1:ro" in script
    )
    stack = json.loads(next(line for line in script.splitlines() if STACK in line).partition("=")[2].strip("'"))
    assert stack["plugin"] == "/opt/net/libnccl-net-ofi.so" and stack["alone"] and stack["mode"] == "inject"
    old = plan_job(request, JobInputs(gpu, nccl="2.18.5"), site)
    assert dict(old.variables)["NCCL_NET_PLUGIN"] == "ofi"
    folder = plan_job(request, JobInputs(VENV), site)
    assert folder.library_path == ("/opt/fab", "/opt/net") and folder.mounts == ()
    site_file(tmp_path, f'mode = "image"\n{text}[container]\nruntime = "apptainer"\n[node]\ngpus = 8\n')
    own = plan_job(request, JobInputs(gpu, nccl="2.26.2"), load_site({"HOME": str(tmp_path)}, str(file)))
    assert own.library_path == () and "NCCL_NET_PLUGIN" not in dict(own.variables) and "/opt/fab:" not in render(own)


@pytest.mark.parametrize(
    ("runtime", "form"),
    [
        ("pyxis", "{0}:{0}:ro"),
        ("enroot", "{0}:{0}:none:x-create=auto,rbind,ro"),
        ("apptainer", "--bind {0}:{0}:ro"),
        ("podman", "--volume={0}:{0}:ro"),
        ("none", "--bind {0}:{0}:ro"),
    ],
)
def test_every_runtime_mounts_them_only_to_read(tmp_path: Path, runtime: str, form: str) -> None:
    text = 'mode = "inject"\nlibfabric = "/opt/fab"\nmore = ["/usr/lib64/libcxi.so.1"]\n'
    text += f'[container]\nruntime = "{runtime}"\n'
    site = load_site({"HOME": str(tmp_path)}, str(site_file(tmp_path, text)))
    script = render(plan_job(JobRequest(nodes=2, work="/fsx/me"), JobInputs(SQSH), site))
    assert all(form.format(place) in script for place in ("/opt/fab", "/usr/lib64/libcxi.so.1")), script
    assert '"library_path": "/opt/fab:/usr/lib64"' in script


def test_a_site_names_paths_and_its_inventory_lies_beside_it(tmp_path: Path) -> None:
    file = site_file(tmp_path, 'libfabric = "/opt/fab"\n')
    assert load_site({"HOME": str(tmp_path)}, str(file)).host_stack.inventory == str(tmp_path / "s.stack.json")
    assert load_site(
        {"HOME": str(tmp_path)}, str(site_file(tmp_path, 'inventory = "i.json"\n'))
    ).host_stack.inventory == str(tmp_path / "i.json")
    for system in ("/usr/lib64", "/lib", "/usr/lib/x86_64-linux-gnu", "/usr"):
        with pytest.raises(RecipeError, match="is a folder of the system"):
            load_site({"HOME": str(tmp_path)}, str(site_file(tmp_path, f'mpi = "{system}"\n')))
        assert load_site({"HOME": str(tmp_path)}, str(site_file(tmp_path, f'driver = "{system}"\n'))).host_stack.driver
    for wrong in ("opt/fab", "/opt/fab/", "/opt/a b", "/a:/b"):
        with pytest.raises(RecipeError, match="is not an absolute path"):
            load_site({"HOME": str(tmp_path)}, str(site_file(tmp_path, f'libfabric = "{wrong}"\n')))


def test_a_new_site_file_names_what_vendors_installed_and_the_check_what_is_gone(tmp_path: Path) -> None:
    for path in ("cray/libfabric/1.15.2.0/lib64", "cray/libfabric/1.22.0/lib64", "amazon/efa/lib"):
        (tmp_path / "opt" / path).mkdir(parents=True)
        (tmp_path / "opt" / path / "libfabric.so.1").touch()
    plugin = tmp_path / "opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"
    plugin.parent.mkdir(parents=True)
    plugin.touch()
    lines = "\n".join(sites._host_stack(Host({}, root=tmp_path)))
    table = tomllib.loads(lines)
    assert table["mode"] == "image" and table["nccl_plugin"] == "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"
    assert table["libfabric"] == "/opt/amazon/efa/lib" and "others: /opt/cray/libfabric/1.15.2.0/lib64" in lines
    (tmp_path / "none").mkdir()
    assert tomllib.loads("\n".join(sites._host_stack(Host({}, root=tmp_path / "none")))) == {"mode": "image"}
    file = site_file(tmp_path, 'libfabric = "/nonexistent/lib"\n')
    told = sites.check_site(str(file), {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}, None, offline=True)
    assert [one.summary.partition(" here")[0] for one in told if one.name == "[host_stack]"] == [
        "/nonexistent/lib does not exist"
    ]


def test_the_command_judges_an_environment_on_this_host(compiled: Compiled, tmp_path: Path) -> None:
    """The verdict is the loader's: a plugin in an environment, and a libfabric of the nodes without what it needs."""
    env = Compiled(compiled.root / "env")
    compiled.library("nodes/libfabric.so.1", defines="fab", versions="FABRIC_1.7")
    plugin = env.library("lib/libnccl-net.so", calls="fab", wants="../nodes/libfabric.so.1")
    (env.root / "pyvenv.cfg").touch()
    runner = CliRunner(env={"HOME": str(tmp_path), "XDG_CONFIG_HOME": "", "ENVBUILD_SITE": "", "COLUMNS": "300"})
    file = site_file(tmp_path, f'mode = "inject"\nlibfabric = "{compiled.root}/nodes"\n')
    words = ["check", str(env.root), "--site", str(file)]
    refused = runner.invoke(cli, words)
    assert isinstance(refused.exception, UsageError) and "there is no inventory" in refused.exception.message
    site_file(tmp_path, 'mode = "image"\nlibfabric = "/opt/fab"\n')
    refused = runner.invoke(cli, words)
    assert isinstance(refused.exception, UsageError), "an environment in a folder has the nodes' libraries in each mode"
    assert "there is no inventory" in refused.exception.message
    site_file(tmp_path, f'mode = "inject"\nlibfabric = "{compiled.root}/nodes"\n')
    for defined, code in (("FABRIC_1.7", 0), ("FABRIC_1.6", 3)):
        compiled.library("nodes/libfabric.so.1", defines="fab", versions=defined)
        made = runner.invoke(cli, ["site", "init", "--from", str(file), "--out", str(file), "--force"])
        assert made.exit_code == 0, made.output
        done = runner.invoke(cli, [*words, "--json"])
        assert done.exit_code == code, done.output
        said = compiled.real(plugin, path=str(compiled.root / "nodes"))[0]
        verdict = json.loads(done.output)
        assert (verdict["verdict"] == "good") == (said == ""), (said, verdict)
    shown = runner.invoke(cli, words)
    assert "needs FABRIC_1.7, and the nodes'" in shown.output and "fix: build libnccl-net.so against" in shown.output


def test_an_image_is_judged_as_its_layers_merge(compiled: Compiled, tmp_path: Path) -> None:
    """A plugin of the lowest layer and, in the folder of the image's LD_LIBRARY_PATH, the libfabric of the highest."""
    fabric, bare = "own/libfabric.so.1", "-nostdlib"
    compiled.library(fabric, bare, defines="fab", versions="FABRIC_1.7")
    plugin = Path(compiled.library("libnccl-net.so", bare, calls="fab", wants=fabric))
    new = (compiled.root / fabric).read_bytes()
    old = Path(compiled.library(fabric, bare, defines="fab", versions="FABRIC_1.6")).read_bytes()
    files = {"opt/env/lib/libnccl-net.so": plugin.read_bytes(), f"opt/{fabric}": old}
    blobs = Blobs(tmp_path / "blobs")
    layers = [lab.layer(blobs, rows) for rows in (files, {f"opt/{fabric}": new}, {"opt/own/.wh.libfabric.so.1": ""})]
    file = site_file(tmp_path, 'libfabric = "/nonexistent"\n')
    (tmp_path / "s.stack.json").write_text(json.dumps(inventory([])))
    variables = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": "", "ENVBUILD_SITE": "", "ENVBUILD_STORE": str(tmp_path)}
    for count, code, text in (
        (1, 3, "needs FABRIC_1.7, and the artifact's /opt/own/libfabric.so.1 has FABRIC_1.6 at most"),
        (2, 0, "the artifact's lib/libnccl-net.so loads libfabric.so.1: the artifact's /opt/own/libfabric.so.1"),
        (3, 3, "needs libfabric.so.1, which no searched folder has"),
    ):
        descriptor, _ = lab.image(blobs, layers[:count], Env=["LD_LIBRARY_PATH=/opt/own"])
        layout = lab.layout(tmp_path / f"layout{count}", blobs, [(descriptor, "lab:1")])
        words = ["check", f"oci:{layout}", "--site", str(file), "--json"]
        done = CliRunner(env=variables).invoke(cli, words)
        assert done.exit_code == code, done.output
        assert text in done.output, done.output
    (tmp_path / "s.stack.json").unlink()
    for mode, code in (("inject", 1), ("image", 3)):
        site_file(tmp_path, f'mode = "{mode}"\nlibfabric = "/nonexistent"\n')
        done = CliRunner(env=variables).invoke(cli, words)
        assert done.exit_code == code, "an image takes nothing of the nodes in the mode image"


def test_an_artifact_without_libraries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no libraries"):
        read_libraries(tmp_path, None)  # type: ignore[arg-type]


def stack(tmp_path: Path, places: list[str], mode: str = "inject", **more: Any) -> tuple[str, dict[str, str], str]:
    table = {"mode": mode, "places": places, "mpi": "", "plugin": "", "alone": True, **more}
    environ = {**os.environ, STACK: json.dumps(table), "ENVBUILD_NODE": "0", "ENVBUILD_RUN": str(tmp_path)}
    environ["LD_LIBRARY_PATH"] = ":".join(more.get("path", places))
    return loaded_stack(environ)


def test_the_preflight_says_which_file_ranks_load(compiled: Compiled, tmp_path: Path) -> None:
    base = compiled.library("b/libneeds.so.1", defines="base")
    fabric = compiled.library("a/libfabric.so.1", calls="base", wants="b/libneeds.so.1")
    a, b = str(compiled.root / "a"), str(compiled.root / "b")
    assert stack(tmp_path, [a, b])[:2] == ("", {"libfabric.so.1": fabric})
    host = parse_inventory((tmp_path / "host_stack.json").read_text(), "run")
    assert {*host.libraries} == {fabric, base}
    assert stack(tmp_path, [a])[0].startswith("cannot load libfabric.so.1: libneeds.so.1: cannot open")
    assert stack(tmp_path, [b, a], path=[b])[0].startswith(("cannot load", "loads libfabric.so.1 from"))
    assert stack(tmp_path, [a, b], "image")[0] == f"loads the node's {fabric}, and not the artifact's"
    assert stack(tmp_path, [a, b], "image", path=[])[0] == "", "an artifact need not have one"
    assert stack(tmp_path, [a, b], plugin=base)[1][base] == base
    assert stack(tmp_path, [a, b, "/nonexistent/x"])[0] == "has no /nonexistent/x"


def test_the_command_preflight_keeps_the_nodes_inventory_where_the_site_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = load_site({"HOME": str(tmp_path)}, str(site_file(tmp_path, 'mode = "inject"\nlibfabric = "/opt/fab"\n')))
    request = JobRequest(scheduler="pbs", nodes=1, work=str(tmp_path / "work"), launcher="ssh", preflight=True)
    plan = submit.alone(plan_job(request, JobInputs(VENV), site))
    allocation = submit.Allocation("pbs", 1, "1.ssh", "ssh", ("n1",))
    kept = tmp_path / "s.stack.json"
    for written, expected in (("", None), ("first", "first"), ("second", "first")):

        def run(script: Path, env: Mapping[str, str], work: Path, text: str = written) -> int:
            (work / f"{plan.name}_1.ssh").mkdir()
            if text:
                (work / f"{plan.name}_1.ssh" / "host_stack.json").write_text(text)
            return 0

        monkeypatch.setattr(submit, "_bash", run)
        assert submit.run_now(plan, allocation, {}) == 0
        assert (kept.read_text() if kept.exists() else None) == expected


def test_a_node_without_the_sites_libraries_fails_the_preflight() -> None:
    node = Node(0, "n1", "10.0.0.1", facts=Facts(hostname="n1", shm=1 << 40, stack="cannot load libfabric.so.1: x"))
    told = [one for one in resources([node], Requirements()) if one.check == "stack"]
    assert [(one.status, one.fault) for one in told] == [(FAIL, "cannot load libfabric.so.1: x")]
    assert asdict(Facts())["stack"] == "" and not [
        one for one in resources([replace(node, facts=Facts(shm=1 << 40))], Requirements()) if one.check == "stack"
    ]
