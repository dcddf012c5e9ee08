"""Extensions against the torch of a lock: wheels of small compiled libraries, and what the real loader says of them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from lab.wheels import make_recipe, make_wheel

from envbuild.base.elf import MACHINES
from envbuild.cli.commands import cli
from envbuild.compat.rows import CompatFinding
from envbuild.data import load_table
from envbuild.extensions import Extensions, WheelTables, _loadable
from envbuild.lock.format import Lock, render
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target
from envbuild.run_environment import load_environment

ARCH = os.uname().machine
CPU = Target("cpu", ARCH)
TAG = f"cp311-cp311-manylinux_2_28_{ARCH}"
# The mangled names of c10::f(), at::g(), torch::h() and at::cuda::k().
F, G, H, K = "_ZN3c101fEv", "_ZN2at1gEv", "_ZN5torch1hEv", "_ZN2at4cuda1kEv"

pytestmark = pytest.mark.skipif(ARCH not in MACHINES, reason="no target for this processor")


@dataclass
class Shelf:
    """Wheels of compiled libraries in a folder; `locked` are the packages of the lock."""

    root: Path
    locked: list[LockedPackage] = field(default_factory=list)
    index: str = ""
    targets: str = f"[targets.{CPU}]\n"

    def library(self, name: str, *options: str, defines: str = "", calls: str = "", wants: str = "") -> bytes:
        """Compile a library; `wants` are names of libraries, compiled before, that it is linked with."""
        lines = [f"int {one}(void) {{ return 1; }}" for one in defines.split()]
        names = [one.removeprefix("?") for one in calls.split()]
        weak = {one[1:] for one in calls.split() if one.startswith("?")}
        lines += [f"extern int {one}(void){' __attribute__((weak))' if one in weak else ''};" for one in names]
        lines.append(
            f"int use_{re.sub(r'[^a-z0-9]', '_', name)}(void) {{ return 0 {' '.join(f'+ {one}()' for one in names)}; }}"
        )
        folder = self.root / "libraries"
        folder.mkdir(parents=True, exist_ok=True)
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(folder / name)]
        others = ["-Wl,--no-as-needed", *(str(folder / one) for one in wants.split()), f"-Wl,-soname,{name}", *options]
        subprocess.run([*command, *others], input="\n".join(lines), text=True, check=True)
        return (folder / name).read_bytes()

    def wheel(
        self,
        name: str,
        version: str,
        files: dict[str, bytes],
        *,
        requires: tuple[str, ...] = ("torch==2.8.0",),
        lock: bool = True,
    ) -> Path:
        path = make_wheel(self.root / "wheels" / name, name, version, requires=requires, files=files, tag=TAG)
        if lock:
            self.locked = [package for package in self.locked if package.name != name]
            self.locked.append(LockedPackage(name, version, (hashlib.sha256(path.read_bytes()).hexdigest(),)))
        self._page(name)
        return path

    def torch(self, version: str = "2.8.0", *, cpu: str = f"{G} {H}", cuda: str = "") -> None:
        """Write torch's wheel with the libraries that define these symbols, and lock it."""
        files = {"torch/lib/libc10.so": self.library("libc10.so", defines=F)}
        files["torch/lib/libtorch_cpu.so"] = self.library("libtorch_cpu.so", defines=cpu, wants="libc10.so")
        if cuda:
            files["torch/lib/libtorch_cuda.so"] = self.library(
                "libtorch_cuda.so", defines=cuda, wants="libtorch_cpu.so"
            )
        self.wheel("torch", version, files, requires=())

    def _page(self, name: str) -> None:
        links = "".join(
            f'<a href="{path.name}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}">{path.name}</a>\n'
            for path in sorted((self.root / "wheels" / name).glob("*.whl"))
        )
        (self.root / "wheels" / name / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")

    @property
    def variables(self) -> dict[str, str]:
        index = self.index or (self.root / "wheels").as_uri()
        given = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "PIP_RETRIES": "0", "PIP_NO_INDEX": "0"}
        given |= {"ENVBUILD_STORE": str(self.root / "store"), "ENVBUILD_SITE": "", "HOME": str(self.root)}
        return {"PATH": os.environ["PATH"], **given}

    @property
    def recipe(self) -> LoadedRecipe:
        folder = make_recipe(self.root / "recipes", "lab", ["torch==2.8.0"], targets=self.targets)
        return load_recipe(folder / "recipe.toml")

    def lock(self) -> Lock:
        digest = self.recipe.resolution_digest(CPU)
        return Lock("lab", CPU.name, "3.11", f"{ARCH}-manylinux_2_28", digest, tuple(self.locked))

    def extensions(self, *, offline: bool = False, most: float = math.inf) -> Extensions:
        return Extensions(self.recipe, CPU, self.lock(), load_environment(self.variables), offline, most)

    def finding(self, *, suggest: bool = False) -> CompatFinding:
        (found,) = self.extensions().findings(suggest=suggest)
        return found


@pytest.fixture
def shelf(tmp_path: Path, compiler: None) -> Shelf:
    return Shelf(tmp_path)


def loads(shelf: Shelf, name: str) -> str:
    """Return what the real loader says of a library when torch's are loaded."""
    program = "import ctypes, sys; [ctypes.CDLL(one) for one in sys.argv[1:]]"
    torch = ["libc10.so", "libtorch_cpu.so"]
    paths = [str(shelf.root / "libraries" / one) for one in (*torch, name)]
    variables = {**os.environ, "LD_LIBRARY_PATH": str(shelf.root / "libraries")}
    done = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True, env=variables)
    return done.stderr


def test_an_extension_whose_symbols_torch_has_fits(shelf: Shelf) -> None:
    shelf.torch()
    calls = f"{F} {G} ?_ZN2at5maybeEv PyObject_Repr memcpy"
    code = shelf.library("_C.so", calls=calls, wants="libtorch_cpu.so libc10.so")
    shelf.wheel("torchvision", "0.23.0", {"torchvision/_C.so": code})
    found = shelf.finding()
    text = "torchvision 0.23.0 loads with torch 2.8.0, which has the 2 symbols that 1 file of it need"
    assert (found.status, found.text) == ("good", text)
    assert found.source == f"torchvision-0.23.0-{TAG}.whl, torch-2.8.0-{TAG}.whl"


def test_a_symbol_that_torch_lacks_is_named_with_file_and_pin(shelf: Shelf) -> None:
    shelf.torch(cpu=G)
    code = shelf.library("_C.so", calls=f"{F} {H}", wants="libtorch_cpu.so libc10.so")
    shelf.wheel("torchvision", "0.23.0", {"torchvision/_C.so": code})
    found = shelf.finding()
    assert found.status == "bad" and H in loads(shelf, "_C.so")
    assert found.text.startswith("torchvision 0.23.0 does not load with torch 2.8.0: torchvision/_C.so needs ")
    assert H in found.text and found.text.endswith(", which torch 2.8.0 lacks")
    assert found.fix == "take another torchvision; `envbuild check --suggest` looks for the newest that fits"


def test_symbols_of_other_libraries_of_the_wheel_count(shelf: Shelf) -> None:
    shelf.torch(cpu=G)
    own = shelf.library("libown.so", defines=H)
    code = shelf.library("_C.so", calls=f"{G} {H}", wants="libtorch_cpu.so libown.so")
    shelf.wheel("xformers", "1", {"xformers/_C.so": code, "xformers.libs/libown.so": own})
    assert shelf.finding().status == "good" and loads(shelf, "_C.so") == ""


@pytest.mark.parametrize(
    "requires, symbol, status, said",
    [
        (("torch==2.9.0",), G, "bad", "it is built for another torch: its metadata require torch==2.9.0"),
        (("torch<2.8",), G, "bad", "its metadata require torch<2.8"),
        (("torch==2.8.1",), G, "good", ""),
        (("torch==2.9.0; extra == 'test'",), G, "unknown", "nothing says with which torch it was built"),
        (("torch>=2.4",), G, "unknown", "nothing says with which torch it was built"),
        (("torch==2.9.0",), "aoti_torch_f", "good", ""),  # the stable ABI
    ],
)
def test_an_extension_that_was_built_with_another_torch(
    shelf: Shelf, requires: tuple[str, ...], symbol: str, status: str, said: str
) -> None:
    """All symbols are there; C++ classes may differ."""
    shelf.torch(cpu=f"{G} aoti_torch_f")
    code = shelf.library("_C.so", calls=symbol, wants="libtorch_cpu.so")
    shelf.wheel("torchvision", "1", {"torchvision/_C.so": code}, requires=requires)
    found = shelf.finding()
    assert found.status == status and said in found.text


@pytest.mark.parametrize("built, status", [("2025-07-25", "good"), ("2025-07-01", "unknown"), ("2026-01-01", "good")])
def test_an_extension_without_a_pin_is_judged_by_the_day_of_its_files(
    shelf: Shelf, built: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.8.0 is of 2025-08-06; its release candidates are two weeks older."""
    shelf.torch()
    code = shelf.library("_C.so", calls=G, wants="libtorch_cpu.so")
    shelf.wheel("torchvision", "1", {"torchvision/_C.so": code}, requires=())
    monkeypatch.setattr(WheelTables, "date", property(lambda wheel: "" if wheel.name == "torch" else built))
    found, said = shelf.finding(), f"it was built on {built}, before torch 2.8, whose C++ classes may differ"
    assert found.status == status and (said in found.text) == (status == "unknown")


def test_libraries_for_accelerators_are_read_if_they_are_needed(shelf: Shelf) -> None:
    shelf.torch(cuda=K)
    code = shelf.library("_C.so", calls=f"{G} {K}", wants="libtorch_cuda.so libtorch_cpu.so")
    shelf.wheel("xformers", "1", {"xformers/_C.so": code})
    assert shelf.finding().status == "good"
    plain = shelf.library("_P.so", calls=G, wants="libtorch_cuda.so libtorch_cpu.so")
    shelf.wheel("torchvision", "1", {"torchvision/_P.so": plain})
    shelf.torch()  # a torch for CPUs
    bad = {one.text.split()[0]: one.text for one in shelf.extensions().findings()}
    assert "torchvision/_P.so needs libtorch_cuda.so, which torch 2.8.0 lacks" in bad["torchvision"]


@pytest.mark.parametrize(
    "locked, said", [("libcudart.so.13", "libcudart.so.13 (nvidia-cuda-runtime 13.0)"), ("", "none")]
)
def test_a_library_of_cuda_that_no_package_has(shelf: Shelf, locked: str, said: str) -> None:
    shelf.torch()
    cudart = shelf.library("libcudart.so.12", defines="cudaMalloc")
    code = shelf.library("_C.so", calls=G, wants="libtorch_cpu.so libcudart.so.12")
    shelf.wheel("xformers", "1", {"xformers/_C.so": code})
    if locked:
        shelf.wheel("nvidia-cuda-runtime", "13.0", {f"nvidia/cu13/lib/{locked}": cudart})
    assert f"xformers/_C.so needs libcudart.so.12; the lock has {said}" in shelf.finding().text
    shelf.wheel("nvidia-cuda-runtime-cu12", "12.8", {"nvidia/cuda_runtime/lib/libcudart.so.12": cudart})
    assert shelf.finding().status == "good"


def test_a_newer_glibc_or_libstdcxx_than_the_targets(shelf: Shelf) -> None:
    shelf.torch()
    for number, (soname, version) in enumerate((("libm.so.6", "GLIBC_2.99"), ("libstdc++.so.6", "GLIBCXX_3.4.99"))):
        script = shelf.root / "versions"
        script.write_text(f"{version} {{ *; }};\n")
        shelf.library(soname, f"-Wl,--version-script={script}", defines="newer")
        code = shelf.library(f"_{number}.so", calls=f"{G} newer", wants=f"libtorch_cpu.so {soname}")
        shelf.wheel("xformers", str(number), {"xformers/_C.so": code})
        found = shelf.finding()
        if number:
            assert found.status == "unknown" and "needs GLIBCXX_3.4.99 of libstdc++" in found.text
            assert "systems with glibc 2.28 have GLIBCXX_3.4.24" in found.text
        else:
            assert found.status == "bad" and "needs glibc 2.99, the target allows 2.28" in found.text


def test_packages_without_code_for_torch_are_no_extensions(shelf: Shelf) -> None:
    shelf.torch()
    shelf.wheel("bitsandbytes", "1", {"bitsandbytes/libx.so": shelf.library("libx.so", calls="memcpy")})
    shelf.wheel("numpy", "2", {"numpy/_core.so": shelf.library("_core.so", calls=H)})  # nothing says that it is one
    assert shelf.extensions().findings() == []
    shelf.locked = [one for one in shelf.locked if one.name != "torch"]
    shelf.wheel("torchvision", "1", {})
    assert shelf.extensions().findings() == []


def test_files_for_another_python_or_torch_are_left_out() -> None:
    paths = ["a/_C.cpython-310-x86_64-linux-gnu.so", "a/_C.cpython-311-x86_64-linux-gnu.so", "a/_B.abi3.so"]
    assert _loadable(paths, "3.11", "2.8.0") == paths[1:]
    paths = ["a/libx_torch28-cpu.so", "a/libx_torch210-cpu.so", "a/libx_torch2.9.so", "a/lib.so"]
    assert _loadable(paths, "3.11", "2.8.0+cpu") == [paths[0], paths[3]]
    assert _loadable(paths, "3.11", "2.10.1") == [paths[1], paths[3]]
    assert _loadable(paths, "3.11", "2.11.0") == paths, "none is for this torch"


# Reading


def serve(shelf: Shelf, *, ranges: bool = True) -> Iterator[list[tuple[str, str]]]:
    """Serve the wheels; yield paths and ranges of the requests."""
    asked = list[tuple[str, str]]()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Keep quiet."""

        def do_GET(self) -> None:
            place = shelf.root / "wheels" / self.path.strip("/")
            data = (place / "index.html" if place.is_dir() else place).read_bytes()
            asked.append((place.name, self.headers.get("Range", "")))
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if ranges else None
            part = data[int(match[1]) : int(match[2]) + 1] if match else data
            self.send_response(206 if match else 200)
            if match:
                self.send_header("Content-Range", f"bytes {match[1]}-{int(match[1]) + len(part) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(part)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    shelf.index = f"http://127.0.0.1:{server.server_port}"
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def served(shelf: Shelf) -> Iterator[list[tuple[str, str]]]:
    shelf.torch(cuda=K)
    code = shelf.library("_C.so", calls=G, wants="libtorch_cpu.so")
    shelf.wheel("torchvision", "1", {"torchvision/_C.so": code, "torchvision/data.bin": os.urandom(1 << 20)})
    yield from serve(shelf)


def test_wheels_are_read_by_ranges_and_once(shelf: Shelf, served: list[tuple[str, str]]) -> None:
    assert shelf.finding().status == "good"
    wheels = [(name, part) for name, part in served if name.endswith(".whl")]
    assert wheels and all(part for _, part in wheels)
    sizes = [int(end) - int(start) for _, part in wheels for start, end in [part.removeprefix("bytes=").split("-")]]
    assert sum(sizes) < 1 << 20, "torchvision/data.bin is not read"
    served.clear()
    assert shelf.finding().status == "good" and served == []
    (found,) = shelf.extensions(offline=True).findings()
    assert found.status == "good", "the tables are in the store"


def test_damaged_tables_in_the_store_are_read_again(shelf: Shelf, served: list[tuple[str, str]]) -> None:
    assert shelf.finding().status == "good"
    for path in (shelf.root / "store/symbols").glob("*/*"):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :])
    served.clear()
    assert shelf.finding().status == "good" and served


def test_what_cannot_be_read_is_unknown(shelf: Shelf, served: list[tuple[str, str]]) -> None:
    (found,) = shelf.extensions(offline=True).findings()
    assert found.status == "unknown" and "is not known: --offline, and its wheel is not in the store" in found.text
    (found,) = shelf.extensions(most=100).findings()
    assert found.status == "unknown" and "more would be read; `envbuild check` reads them" in found.text
    shelf.index = "http://127.0.0.1:9"
    (found,) = shelf.extensions().findings()
    assert found.status == "unknown" and "cannot be used" in found.text


@pytest.mark.parametrize("pin, count", [("torch==2.8.0", 0), ("torch>=2.8", 1)])
def test_lock_leaves_out_large_libraries_for_an_extension_that_names_this_torch(
    shelf: Shelf, served: list[tuple[str, str]], pin: str, count: int
) -> None:
    code = shelf.library("_K.so", calls=f"{G} {K}", wants="libtorch_cuda.so libtorch_cpu.so")
    shelf.wheel("torchvision", "1", {"torchvision/_K.so": code}, requires=(pin,))
    light = ("_K.so", "libc10.so", "libtorch_cpu.so")
    size = sum((shelf.root / "libraries" / name).stat().st_size for name in light)
    assert len(shelf.extensions(most=size).findings()) == count
    assert len(shelf.extensions().findings()) == 1


def test_a_server_without_ranges_is_unknown(shelf: Shelf) -> None:
    shelf.torch()
    shelf.wheel("torchvision", "1", {"torchvision/_C.so": shelf.library("_C.so", calls=G)})
    for _ in serve(shelf, ranges=False):
        (found,) = shelf.extensions().findings()
        assert found.status == "unknown" and found.text.endswith("the server has no byte ranges")
        break


def test_a_damaged_library_is_unknown(shelf: Shelf) -> None:
    shelf.torch()
    code = bytearray(shelf.library("_C.so", calls=G, wants="libtorch_cpu.so"))
    code[4096:] = b""
    shelf.wheel("torchvision", "1", {"torchvision/_C.so": bytes(code), "torchvision/text.so": b"GROUP ( libx.so )"})
    found = shelf.finding()
    assert found.status == "unknown" and "the symbols of torchvision/_C.so cannot be read" in found.text


def test_symbols_are_kept_in_the_store_and_read_again_where_they_are_damaged(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.torch()
    shelf.wheel("torchvision", "1", {"torchvision/_C.so": shelf.library("_C.so", calls=G, wants="libtorch_cpu.so")})
    first, kept = shelf.finding(), shelf.root / "store/symbols"
    (place,) = kept.glob("*/*_C.so")
    whole = place.read_bytes()
    place.write_bytes(b"damaged")
    assert shelf.finding() == first and place.read_bytes() == whole
    monkeypatch.setattr(zipfile, "ZipFile", None)
    assert shelf.finding() == first


# Commands


def releases(shelf: Shelf) -> None:
    """Lock a torchvision that does not fit; 4 fits and its metadata want another torch, 3 fits, 2 is locked."""
    shelf.torch()
    bad = shelf.library("_B.so", calls="_ZN2at4goneEv", wants="libtorch_cpu.so")
    good = shelf.library("_C.so", calls=G, wants="libtorch_cpu.so")
    for version, code, requires in (("5", bad, ()), ("4", good, ("torch==2.9.0",)), ("3", good, ("torch==2.8.0",))):
        shelf.wheel("torchvision", version, {"torchvision/_C.so": code}, requires=requires, lock=False)
    shelf.wheel("torchvision", "2", {"torchvision/_C.so": bad})


def test_the_newest_release_that_fits_is_suggested(shelf: Shelf) -> None:
    releases(shelf)
    found = shelf.finding(suggest=True)
    assert found.status == "bad"
    assert found.fix == "take torchvision 3, the newest release that fits torch 2.8.0"
    shelf.torch(cpu=H)
    assert shelf.finding(suggest=True).fix == "none of the 4 newest releases of torchvision fits; take another torch"


def test_check_ends_with_exit_code_3(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    releases(shelf)
    recipe = shelf.recipe
    (recipe.folder / f"{CPU}.requirements.txt").write_text(render(shelf.lock()))
    for name, value in shelf.variables.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(cli, ["check", str(recipe.path), "--json", "--suggest"])
    assert done.exit_code == 3, done.output
    (target,) = json.loads(done.stdout)["targets"]
    (found,) = [one for one in target["findings"] if one["subject"] == "extension"]
    assert target["verdict"] == found["status"] == "bad" and "take torchvision 3" in found["fix"]


@pytest.mark.parametrize("name", ["torchvision", "own-ops"])
def test_lock_warns_and_succeeds(shelf: Shelf, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`own-ops` is in no table: its metadata require torch."""
    shelf.torch()
    bad = shelf.library("_B.so", calls="_ZN2at4goneEv", wants="libtorch_cpu.so")
    shelf.wheel(name, "2", {"own/_C.so": bad}, requires=("torch",))
    folder = make_recipe(shelf.root / "recipes", "own", ["torch==2.8.0", name], targets=shelf.targets)
    for variable, value in shelf.variables.items():
        monkeypatch.setenv(variable, value)
    report = shelf.root / "report.md"
    arguments = ["lock", str(folder / "recipe.toml"), "--wheels", "--report", str(report)]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    said = f"{CPU}: {name} 2 does not load with torch 2.8.0: own/_C.so needs "
    assert f"warning: {said}" in done.output
    assert "## Extensions of torch" in report.read_text() and said in report.read_text()


def test_the_table_has_its_rows_in_order() -> None:
    table = load_table("linkage")["extensions"]
    versions = [[tuple(map(int, row[name].split("."))) for row in table["base"]] for name in ("glibc", "GLIBCXX")]
    assert all(rows == sorted(rows) for rows in versions) and table["source"].startswith("https://")
    cuda, names = re.compile(table["cuda"]), re.compile(table["names"])
    assert cuda.fullmatch("libcudart.so.12") and not cuda.fullmatch("libcuda.so.1")
    assert names.fullmatch("xformers") and not names.fullmatch("torch") and not names.fullmatch("torchmetrics")
