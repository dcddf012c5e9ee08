"""Libraries as the dynamic loader links them: planted faults, and what the real loader says about the same files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab.patchelf import set_rpath

from envbuild.base import elf
from envbuild.base.elf import MACHINES, parse_elf, read_elf
from envbuild.contract.image_manifest import PathRow
from envbuild.contract.installed import HOST, Distribution, FileReport, HostFiles
from envbuild.image.entry import DIR, FILE, SYMLINK
from envbuild.recipe.targets import Target
from envbuild.verify import outside
from envbuild.verify.elf_files import ElfReport, scan_elf
from envbuild.verify.model import Check
from envbuild.verify.outside import Clock, read_once
from envbuild.verify.static_checks import check_linkage
from envbuild.verify.survey import Linkage, Survey, link, survey, symbol_families

MACHINE = MACHINES[os.uname().machine]
SITE = "lib/python3.11/site-packages"
TORCH, NCCL = f"{SITE}/torch/lib/libtorch_cuda.so", f"{SITE}/nvidia/nccl/lib/libnccl.so.2"
CUDNN = "libcudnn.so.9"
# What a file of the environment defines and calls; `wants` are libraries that it is linked with.
ORIGIN_NCCL = "-Wl,-rpath,$ORIGIN/../../nvidia/nccl/lib"


@dataclass
class Planted:
    """An environment whose libraries are compiled from lists of symbols."""

    root: Path

    def library(self, path: str, *options: str, defines: str = "", calls: str = "", wants: str = "") -> Path:
        """Compile a library; `wants` are libraries by their paths."""
        lines = [f"int {name}(void) {{ return 1; }}" for name in defines.split()]
        weak = {name for name in calls.split() if name.startswith("?")}
        names = [name.removeprefix("?") for name in calls.split()]
        lines += [f"extern int {name}(void){' __attribute__((weak))' if f'?{name}' in weak else ''};" for name in names]
        stem = re.sub(r"\W", "_", path)
        lines.append(f"int user_{stem}(void) {{ return 0 {' '.join(f'+ {name}()' for name in names)}; }}")
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        options = (f"-Wl,-soname,{place.name}", *options)
        others = [str(self.root / one) for one in wants.split()]
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(place), "-Wl,--no-as-needed"]
        subprocess.run([*command, *others, *options], input="\n".join(lines), text=True, check=True)
        return place

    def link(self, files: HostFiles = HOST) -> Linkage:
        report = scan_elf(self.root, MACHINE, files)
        return link(str(self.root), report.libraries, MACHINE, files)


def loaded(path: Path) -> str:
    """What the real loader says about a library; each in a process of its own, which has no other of the same name."""
    program = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    return subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True).stderr


@pytest.fixture
def planted(tmp_path: Path, compiler: None) -> Planted:
    return Planted(tmp_path / "env")


def torch_and_nccl(planted: Planted, lacking: str = "", where: str = NCCL) -> None:
    """torch with the NCCL that it was built with; then that NCCL lacks some symbols at its place."""
    symbols = "ncclCommRegister ncclAllReduce pncclAllReduce"
    planted.library(where, defines=symbols)
    planted.library(TORCH, ORIGIN_NCCL, calls="ncclCommRegister ncclAllReduce ?ncclMaybe", wants=where)
    if lacking:
        planted.library(where, defines=" ".join(one for one in symbols.split() if one != lacking))


def test_libraries_with_all_symbols_pass(planted: Planted) -> None:
    torch_and_nccl(planted)
    found = planted.link()
    assert not found.faults and found.libraries == 2 and found.symbols == 2 and found.absent == {}
    assert loaded(planted.root / TORCH) == ""


def test_the_path_of_the_environment_may_be_relative(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.library("lib/libfabric.so.1", defines="fi_ours")
    planted.library("bin/user.so", "-Wl,-rpath,$ORIGIN/../lib", calls="fi_ours", wants="lib/libfabric.so.1")
    monkeypatch.chdir(planted.root.parent)
    found = Planted(Path("env")).link()
    assert not found.faults and found.symbols == 1 and found.absent == {}
    monkeypatch.chdir(planted.root)
    assert Planted(Path()).link().symbols == 1


@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
def test_an_older_nccl_lacks_a_symbol_of_torch(planted: Planted, style: str) -> None:
    torch_and_nccl(planted, lacking="ncclCommRegister")
    planted.library(NCCL, f"-Wl,--hash-style={style}", defines="ncclAllReduce")
    assert planted.link().undefined == [f"{TORCH}: ncclCommRegister is not defined in {NCCL}"]
    assert "undefined symbol: ncclCommRegister" in loaded(planted.root / TORCH)


def test_a_newer_nccl_elsewhere_does_not_help_the_one_that_the_loader_takes(planted: Planted) -> None:
    torch_and_nccl(planted, lacking="ncclCommRegister")
    planted.library(f"{SITE}/other/libnccl.so.2", defines="ncclCommRegister ncclAllReduce")
    assert len(planted.link().undefined) == 1


def test_an_extension_for_another_torch(planted: Planted) -> None:
    planted.library(f"{SITE}/torch/lib/libc10.so", defines="_ZN3c105ErrorC1Ev")
    ext = f"{SITE}/flash_attn_2_cuda.so"
    planted.library(ext, calls="_ZN3c105ErrorC1Ev _ZN3c105ErrorC2ERKSs", wants=f"{SITE}/torch/lib/libc10.so")
    said = f"{ext}: _ZN3c105ErrorC2ERKSs is not defined in {SITE}/torch/lib/libc10.so"
    assert planted.link().undefined == [said]


def test_symbols_of_a_library_that_another_one_loads(planted: Planted) -> None:
    """As in a plugin without own dependencies: the extension that loads it also loads what it calls."""
    planted.library(NCCL, defines="ncclAllReduce")
    planted.library(f"{SITE}/pkg/libinner.so", calls="ncclAllReduce")
    planted.library(f"{SITE}/pkg/_C.so", wants=f"{SITE}/pkg/libinner.so {NCCL}")
    assert not planted.link().faults


def test_an_absent_library_is_told_and_its_symbols_are_not_judged(planted: Planted) -> None:
    torch_and_nccl(planted)
    (planted.root / NCCL).unlink()
    found = planted.link()
    assert not found.faults and found.absent == {"libnccl.so.2": 1}
    planted.library("lib/libplugin.so", calls="ncclAllReduce fi_other")
    assert not planted.link().faults, "its process may bring them"


def test_versions_are_those_that_the_library_of_the_base_has(planted: Planted) -> None:
    script = planted.root / "versions"
    planted.root.mkdir()
    script.write_text("GLIBCXX_3.4.999 { *; };\n")
    ours = "build/libstdc++.so.6"
    planted.library(ours, f"-Wl,--version-script={script}", defines="from_the_future")
    planted.library(f"{SITE}/ext.so", calls="from_the_future", wants=ours)
    (planted.root / ours).unlink()
    found = planted.link()
    (said,) = found.versions
    assert re.fullmatch(rf"{SITE}/ext\.so: needs GLIBCXX_3\.4\.999 of /\S+/libstdc\+\+\.so\.6", said)
    assert found.base["GLIBCXX"] == "3.4.999" and "GLIBC" in found.base
    assert "version `GLIBCXX_3.4.999' not found" in loaded(planted.root / SITE / "ext.so")


def test_the_version_of_a_symbol_counts(planted: Planted) -> None:
    (planted.root / SITE).mkdir(parents=True)
    for number in (7, 8):
        (planted.root / f"v{number}").write_text(f"FABRIC_1.{number} {{ *; }};\n")
    place = f"{SITE}/pkg/libfabric.so.1"
    planted.library(place, f"-Wl,--version-script={planted.root / 'v8'}", defines="fi_getinfo")
    plugin = f"{SITE}/pkg/libnccl-net.so"
    planted.library(plugin, "-Wl,-rpath,$ORIGIN", calls="fi_getinfo", wants=place)
    assert not planted.link().faults
    planted.library(place, f"-Wl,--version-script={planted.root / 'v7'}", defines="fi_getinfo")
    found = planted.link()
    assert found.undefined == [f"{plugin}: fi_getinfo@FABRIC_1.8 is not defined in {place}"]
    assert found.versions == [f"{plugin}: needs FABRIC_1.8 of {place}"]


def test_two_nccls_and_two_cudnns(planted: Planted) -> None:
    torch_and_nccl(planted)
    other = f"lib/{CUDNN}"
    planted.library("lib/libnccl.so.2", defines="ncclAllReduce ncclCommRegister other")
    planted.library("lib/libhorovod.so", "-Wl,-rpath,$ORIGIN", calls="ncclAllReduce", wants="lib/libnccl.so.2")
    planted.library(other, defines="cudnnCreate")
    planted.library("lib/libx.so", "-Wl,-rpath,$ORIGIN", calls="cudnnCreate", wants=other)
    found = planted.link()
    assert found.copies == [f"NCCL is there 2 times: lib/libnccl.so.2 (for lib/libhorovod.so), {NCCL} (for {TORCH})"]
    wheel = f"{SITE}/nvidia/cudnn/lib/{CUDNN}"
    planted.library(wheel, defines="cudnnCreate more")
    planted.library(f"{SITE}/torch/lib/libtorch_x.so", "-Wl,-rpath,$ORIGIN/../../nvidia/cudnn/lib", wants=wheel)
    assert [one.partition(":")[0] for one in planted.link().copies] == [
        "NCCL is there 2 times",
        "cuDNN is there 2 times",
    ]
    (planted.root / NCCL).write_bytes((planted.root / "lib/libnccl.so.2").read_bytes())
    assert len(planted.link().copies) == 1, "the same file twice is one NCCL"


def test_a_library_beside_torch_that_no_other_one_replaces(planted: Planted) -> None:
    """An extension of torch without a RUNPATH gets the NCCL that torch loaded, not the one in a folder of the base."""
    torch_and_nccl(planted)
    planted.library(f"{SITE}/hvd.so", calls="ncclAllReduce", wants=f"{TORCH} {NCCL}")
    assert not planted.link().faults


class OfImage(HostFiles):
    """Files of this host that set LD_LIBRARY_PATH, as an image does."""

    def __init__(self, *folders: str) -> None:
        self.folders = folders

    def library_path(self) -> list[str]:
        return list(self.folders)


def test_a_stub_of_the_driver(planted: Planted) -> None:
    planted.library("cuda/lib64/stubs/libcuda.so", "-Wl,-soname,libcuda.so.1", defines="cuInit")
    stubs = planted.root / "cuda/lib64/stubs"
    user = planted.library("lib/libuser.so", f"-Wl,-rpath,{stubs}", calls="cuInit", wants="cuda/lib64/stubs/libcuda.so")
    assert planted.link(OfImage(str(stubs))).stubs == [], "no file has the name for which the loader looks"
    (stubs / "libcuda.so.1").symlink_to("libcuda.so")
    said = ["cuda/lib64/stubs/libcuda.so.1 is a stub of the driver's library where the loader searches"]
    assert planted.link().stubs == said
    set_rpath([user], "/none")
    assert planted.link().stubs == [] and planted.link(OfImage(str(stubs))).stubs == said
    elsewhere = planted.root.parent / "stubs"
    elsewhere.mkdir()
    (elsewhere / "libcuda.so.1").symlink_to(stubs / "libcuda.so")
    assert planted.link(OfImage(str(elsewhere))).stubs == [], "it is of the host"
    (planted.root / "cuda/lib64/libcuda.so.1").symlink_to("stubs/libcuda.so")
    assert [one.split()[0] for one in planted.link(OfImage(str(stubs.parent))).stubs] == ["cuda/lib64/libcuda.so.1"]


def image(files: Mapping[str, bytes | str], variables: str = "") -> outside.ImageFiles:
    """Files of an image as its readers collect them; a text is the target of a link."""
    found = outside.ImageFiles(lambda path: iter(()), variables=variables)
    clock = Clock(float("inf"), 60)
    for path, content in files.items():
        parents = path.split("/")[:-1]
        for depth in range(1, len(parents) + 1):
            found.add("/".join(parents[:depth]), PathRow(DIR))
        if isinstance(content, str):
            found.add(path, PathRow(SYMLINK, 0o777, value=content))
        else:
            pieces = [content[start : start + 1000] for start in range(0, len(content), 1000)]
            seen = read_once(path, pieces, len(content), clock, gpu=False)
            found.add(path, PathRow(FILE, 0o644, size=len(content), value=seen.sha256), seen)
    return found


def test_images_are_linked_as_they_are(planted: Planted) -> None:
    torch_and_nccl(planted, lacking="ncclCommRegister")
    stub = planted.library("stubs/libcuda.so", "-Wl,-soname,libcuda.so.1", defines="cuInit").read_bytes()
    inside: dict[str, bytes | str] = {f"opt/env/{one}": (planted.root / one).read_bytes() for one in (TORCH, NCCL)}
    inside |= {"usr/local/cuda/lib64/stubs/libcuda.so": stub, "usr/local/cuda/stubs": "lib64/stubs"}
    inside |= {f"opt/env/{SITE}/torch-2.7.1.dist-info/METADATA": b"Name: torch\nRequires-Dist: nvidia-x==1\n\nabout"}
    inside |= {f"opt/env/{SITE}/torch-2.7.1.dist-info/RECORD": b""}
    root = Path("/opt/env")
    found = survey(root, root / SITE, MACHINE, files=image(inside))
    assert found.linkage.faults == [f"{TORCH}: ncclCommRegister is not defined in {NCCL}"]
    assert found.requires == ("nvidia-x==1",) and found.elf.libraries == {}
    conf: dict[str, bytes | str] = {
        "etc/ld.so.conf": b"include ld.so.conf.d/*.conf\n",
        "etc/ld.so.conf.d/a.conf": b"include more/*.conf\n",
        "etc/ld.so.conf.d/more/cuda.conf": b"# CUDA\n/usr/local/cuda/stubs\n",
    }
    (said,) = survey(root, root / SITE, MACHINE, files=image(inside | conf)).linkage.stubs
    assert said.startswith("/usr/local/cuda/stubs/libcuda.so is a stub")
    inside["usr/local/cuda/lib64/stubs/libcuda.so.1"] = "libcuda.so"
    line = "LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/cuda/lib64/stubs"
    script = 'export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-"/a:/usr/local/cuda/lib64/stubs"}"\n'
    for files, variables in (
        ({"etc/environment": f"PATH=/bin\n{line}\n".encode()}, ""),
        ({".singularity.d/env/10-docker2singularity.sh": script.encode()}, ""),
        ({}, f"A=b\n{line}"),
    ):
        found = survey(root, root / SITE, MACHINE, files=image(inside | files, variables))
        assert len(found.linkage.stubs) == 1, files


@pytest.mark.parametrize("moved", [False, True])
def test_the_ends_of_a_file_are_enough(planted: Planted, moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    (planted.root / "lib").mkdir(parents=True)
    (header := planted.root / "data.h").write_text("const char ro[1 << 20] = {1}; char rw[1 << 20] = {1};\n")
    symbols = " ".join(f"ncclSymbol{n}" for n in range(500))
    path = planted.library("lib/libnccl.so.2", "-include", str(header), defines=symbols)
    if moved:
        set_rpath([path], "/x" * 3000)  # which moves the names to the end
    content, whole = path.read_bytes(), read_elf(path, symbols=True)
    assert whole is not None and whole.given
    for end, enough in ((1 << 16, True), (1 << 12, False)):
        monkeypatch.setattr(elf, "_END", end)
        parts = elf.ElfParts(len(content))
        for start in range(0, len(content), 4096):
            parts.add(content[start : start + 4096])
        found = parse_elf(parts.read, symbols=True)
        if enough:
            assert found is not None and found.has("ncclSymbol499", "")
            assert (found.runpath, found.needs, found.soname) == (whole.runpath, whole.needs, whole.soname)
        else:
            assert found is None


def libraries() -> Iterator[Path]:
    """Libraries of this host, with versions and without."""
    for name in ("libc.so.6", "libstdc++.so.6", "libz.so.1", "libm.so.6"):
        said = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        yield Path(said.strip()).resolve()


def test_symbols_are_those_that_nm_lists(compiler: None) -> None:
    for path in [*libraries(), Path(sys.executable).resolve()]:
        found = read_elf(path, symbols=True)
        assert found is not None
        lines = subprocess.run(["nm", "-D", path], capture_output=True, text=True, check=True).stdout.splitlines()
        rows = [(line[17], *line[19:].replace("@@", "@").partition("@")[::2]) for line in lines]
        assert set(found.wanted) == {(name, version) for kind, name, version in rows if kind == "U"}
        defined = [(name, version) for kind, name, version in rows if kind not in "Uwv"]
        assert defined and all(found.has(*one) for one in defined if one[0] != one[1])
        assert not found.has("no_such_symbol", "")
        # A name without a version finds any; a version that it does not have finds none.
        versioned = next(((name, v) for name, v in defined if v and v != name), None)
        assert versioned is None or not found.has(versioned[0], "NONE_1.0")


def test_this_environment_has_no_fault() -> None:
    """No false alarm on torch and all others here, which the loader loads."""
    pytest.importorskip("torch")
    report = scan_elf(Path(sys.prefix), MACHINE)
    found = link(os.path.abspath(sys.prefix), report.libraries, MACHINE, HOST)
    assert found.faults == [] and found.symbols > 5000


def test_data_rows_have_sources_and_match_at_the_begin() -> None:
    names = {one.name: one for one in symbol_families()}
    assert names["NCCL"].symbols.match("pncclSend") and not names["NCCL"].symbols.match("my_ncclSend")
    assert names["torch"].symbols.match("_ZNK2at6Tensor3dimEv") and not names["torch"].symbols.match("_ZN3abc")


def judged(requires: tuple[str, ...], target: str = "cu126-x86_64", **installed: str) -> Check:
    found = {name.replace("_", "-"): Distribution(name, version, "") for name, version in installed.items()}
    subject: Any = type("S", (), {"target": Target.parse(target), "state": type("T", (), {"python": "3.11"})})
    return check_linkage(subject, Survey(found, FileReport(), ElfReport(), requires=requires))


PIN = 'nvidia-cudnn-cu12==9.5.1.17; platform_system == "Linux" and platform_machine == "x86_64"'
NCCL_PIN = "nvidia-nccl-cu12==2.26.2"


@pytest.mark.parametrize(
    ("requires", "installed", "said"),
    [
        ((PIN, NCCL_PIN), {"nvidia_cudnn_cu12": "9.5.1.17", "nvidia_nccl_cu12": "2.26.2"}, ""),
        ((PIN,), {"nvidia_cudnn_cu12": "9.8.0.1"}, "nvidia-cudnn-cu12==9.5.1.17, installed is 9.8.0.1"),
        ((NCCL_PIN,), {"nvidia_nccl_cu12": "2.21.5"}, "nvidia-nccl-cu12==2.26.2, installed is 2.21.5"),
        ((NCCL_PIN,), {"nvidia_nccl_cu12": "2.30.7"}, ""),  # [layers.nccl]
        ((PIN.replace("x86_64", "aarch64"),), {"nvidia_cudnn_cu12": "9.8.0.1"}, ""),
        (("sympy>=1.13.3", "not a requirement ==", 'nvidia-x==1; extra == "y"'), {"sympy": "1.0", "nvidia_x": "2"}, ""),
    ],
)
def test_pins_of_torch(requires: tuple[str, ...], installed: dict[str, str], said: str) -> None:
    check = judged(requires, **installed)
    assert check.status == ("fail" if said else "pass") and said in check.seen
    assert judged(requires, "cpu-x86_64", **installed).status == "pass"


def test_faults_fail_the_check(planted: Planted) -> None:
    torch_and_nccl(planted, lacking="ncclCommRegister")
    subject: Any = type("S", (), {"target": Target.parse("cu126-x86_64")})
    check = check_linkage(subject, Survey({}, FileReport(), ElfReport(), linkage=planted.link()))
    assert check.status == "fail" and "ncclCommRegister" in check.seen and check.evidence["faults"]
