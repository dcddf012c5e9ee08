"""The lab's conda channel is one that conda's own tools take: rattler solves it, installs it, and it runs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import os
import platform
import stat
import struct
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import rattler
import rattler.exceptions
from lab.conda_channel import Channel
from lab.conda_package import PLACEHOLDER
from lab.conda_server import Fault, Server, serve
from lab.conda_wheels import wheel_package
from lab.wheels import make_wheel
from rattler.package import BuildString
from rattler.package_streaming import extract

SPECS = ["python 3.11.*", "pytorch >=2.7,<3 cpu*", "numpy", "tqdm"]
HOST = "linux-64" if platform.machine() == "x86_64" else "linux-aarch64"
ELF_MACHINE = {"linux-64": 62, "linux-aarch64": 183}
IMPORTS = "torch, numpy, PIL.Image, yaml, ssl, sqlite3, ctypes, lzma, bz2, zlib, uuid, readline, curses, crypt"


def solve(
    channel: str, cache: Path, subdir: str, specs: Sequence[str], cuda: str | None = None
) -> dict[str, rattler.RepoDataRecord]:
    """What rattler chooses for `subdir`, by name."""
    versions = {"__glibc": "2.28", "__linux": "5.10", **({"__cuda": cuda} if cuda else {})}
    virtual = [
        rattler.GenericVirtualPackage(rattler.PackageName(name), rattler.Version(v), BuildString("0"))
        for name, v in versions.items()
    ]
    found = asyncio.run(
        rattler.solve(
            [rattler.Channel(channel)],
            list(specs),
            rattler.Gateway(cache_dir=cache),
            [subdir, "noarch"],  # type: ignore[list-item]
            virtual_packages=virtual,
        )
    )
    return {record.name.normalized: record for record in found}


def install(records: dict[str, Any], prefix: Path, cache: Path, subdir: str) -> dict[str, Any]:
    """Install into `prefix`; returns its conda-meta records by name."""
    asyncio.run(
        rattler.install(list(records.values()), prefix, cache, platform=rattler.Subdir(subdir), show_progress=False)
    )
    metas = [json.loads(path.read_text()) for path in (prefix / "conda-meta").glob("*.json")]
    return {meta["name"]: meta for meta in metas}


@dataclass(frozen=True)
class Installed:
    """A prefix and its conda-meta records by name."""

    prefix: Path
    metas: dict[str, Any]

    def run(self, *command: str, **env: str) -> str:
        """What a program of the prefix prints."""
        done = subprocess.run(
            [self.prefix / "bin" / command[0], *command[1:]],
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **env},
            cwd="/",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=["linux-64", "linux-aarch64"])
def installed(
    request: pytest.FixtureRequest, conda_channel: Channel, tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    """An environment with all kinds of packages, for the parameter's platform."""
    folder = tmp_path_factory.mktemp(request.param)
    with serve(conda_channel.folder) as running:
        records = solve(
            running.url, folder / "repodata", request.param, [*SPECS, "pillow", "pyyaml", "labtool", "labdata"]
        )
        prefix = folder / "prefix"
        return Installed(prefix, install(records, prefix, folder / "packages", request.param))


@pytest.mark.parametrize(("subdir", "pytorch"), [("linux-64", "2.13.0"), ("linux-aarch64", "2.10.0")])
def test_a_recipe_for_conda_forge_resolves(conda_server: Server, tmp_path: Path, subdir: str, pytorch: str) -> None:
    records = solve(conda_server.url, tmp_path, subdir, SPECS)
    assert str(records["pytorch"].version) == pytorch
    assert str(records["pytorch"].build).startswith("cpu_")
    assert {r.subdir for r in records.values()} == {subdir, "noarch"}
    assert {"typing_extensions", "jinja2", "markupsafe", "sympy", "mpmath", "libgcc"} <= set(records)
    assert ("setuptools" in records) == (subdir == "linux-64")
    for record in records.values():
        assert record.sha256 is not None and record.md5 is not None and record.license
        assert record.url.startswith(conda_server.url)
    assert any(path.startswith(f"/conda-forge/{subdir}/") for path in conda_server.requests)


def test_the_cuda_build_is_chosen_where_its_driver_is(conda_server: Server, tmp_path: Path) -> None:
    cuda = solve(conda_server.url, tmp_path, "linux-64", ["pytorch"], cuda="12.6")
    assert str(cuda["pytorch"].build) == "cuda126_lab_py311_200"
    without = solve(conda_server.url, tmp_path, "linux-64", ["pytorch"])
    assert str(without["pytorch"].build).startswith("cpu_")
    with pytest.raises(rattler.exceptions.SolverError, match="__cuda"):
        solve(conda_server.url, tmp_path, "linux-64", ["pytorch 2.13.* cuda*"], cuda="12.4")


def test_the_packages_are_of_their_architecture(installed: Installed) -> None:
    subdir = installed.metas["python"]["subdir"]
    paths = [installed.prefix / "bin/python", *installed.prefix.rglob("*.so*")]
    elf = {path: _machine(path) for path in paths if path.is_file()}
    machines = {machine for machine in elf.values() if machine is not None}
    assert machines == {ELF_MACHINE[subdir]}
    assert len(elf) > 60
    assert _machine(installed.prefix / "bin/python3.11") == ELF_MACHINE[subdir]


@pytest.mark.parametrize("installed", [HOST], indirect=True)
def test_python_and_torch_run_from_the_prefix(installed: Installed) -> None:
    prefix = str(installed.prefix)
    program = (
        f"import json, sys, sysconfig, {IMPORTS}\n"
        "assert torch.ones(2).sum() == 2 and numpy.ones(2).sum() == 2\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}\n"
        "print(json.dumps([sys.prefix, sysconfig.get_path('purelib'), sysconfig.get_config_var('prefix'),\n"
        "                  sysconfig.get_config_var('LIBDIR'), torch.__version__, sorted(maps)]))\n"
    )
    found = json.loads(installed.run("python", "-c", program))
    site_packages = f"{prefix}/lib/python3.11/site-packages"
    assert found[:4] == [prefix, site_packages, prefix, f"{prefix}/lib"]
    assert found[4].startswith(installed.metas["pytorch"]["version"])
    foreign = [path for path in found[5] if not path.startswith(prefix)]
    # What stays the host's is the C library.
    assert {Path(path).name.partition(".")[0].partition("-")[0] for path in foreign} <= {
        "ld",
        "libc",
        "libm",
        "libpthread",
        "libdl",
        "librt",
        "libutil",
    }, foreign
    assert "--nproc" in installed.run("torchrun", "--help")
    assert installed.run("labtool", "now") == "labtool 1.1 now\n"
    assert installed.run("labdata") == f"root = {prefix}/share/labdata\n"


def test_prefixes_are_replaced_in_text_and_in_binaries(installed: Installed) -> None:
    modes: dict[str, str] = {}
    for meta in installed.metas.values():
        for row in meta["paths_data"]["paths"]:
            if "file_mode" in row:
                modes[row["_path"]] = row["file_mode"]
                assert row["prefix_placeholder"] == PLACEHOLDER and len(PLACEHOLDER) == 255
    assert {"bin/torchrun", "lib/pkgconfig/python-3.11.pc", "share/labdata/settings.conf"} <= set(modes)
    assert modes["bin/python3.11"] == "binary"
    for name, mode in modes.items():
        path = installed.prefix / name
        content = path.read_bytes()
        assert b"_placehold_placehold" not in content, name
        assert str(installed.prefix).encode() in content, name
        if mode == "binary":
            rows = installed.metas["python"]["paths_data"]["paths"]
            assert next(r for r in rows if r["_path"] == name)["size_in_bytes"] == len(content)


def test_conda_meta_says_what_is_there(installed: Installed) -> None:
    for meta in installed.metas.values():
        for name in meta["files"]:
            assert os.path.lexists(installed.prefix / name), name
    kinds = {r["_path"]: r["path_type"] for r in installed.metas["labtool"]["paths_data"]["paths"]}
    assert kinds["bin/labtool"] == "unix_python_entry_point"
    assert "etc/conda/activate.d/labtool_activate.sh" in kinds
    assert (installed.prefix / "share/labdata/default.conf").readlink() == Path("settings.conf")
    assert stat.S_IMODE((installed.prefix / "bin/labdata").stat().st_mode) & 0o111 == 0o111
    assert installed.metas["labdata"]["fn"].endswith(".tar.bz2")


def test_distributions_are_recorded_as_pip_records_them(installed: Installed) -> None:
    found = list(distributions(path=[str(installed.prefix / "lib/python3.11/site-packages")]))
    assert {"torch", "numpy", "tqdm", "labtool", "typing_extensions"} <= {d.name for d in found}
    for distribution in found:
        assert (distribution.read_text("INSTALLER") or "").strip() == "conda"
        assert distribution.files
        for item in distribution.files:
            path = Path(str(item.locate()))
            assert path.is_file(), item
            if item.hash is not None and item.size is not None and item.size < 1 << 20:
                digest = hashlib.new(item.hash.mode, path.read_bytes()).digest()
                assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == item.hash.value


def test_a_tool_is_upgraded_in_place(conda_server: Server, tmp_path: Path) -> None:
    prefix, cache = tmp_path / "prefix", tmp_path / "cache"
    activation = prefix / "etc/conda/activate.d/labtool_activate.sh"
    site_packages = prefix / "lib/python3.11/site-packages"
    for version in ("1.0", "1.1"):
        records = solve(conda_server.url, cache, HOST, ["python 3.11.*", f"labtool {version}.*"])
        metas = install(records, prefix, cache, HOST)
        environment = Installed(prefix, metas)
        assert environment.run("labtool") == f"labtool {version}\n"
        assert [p.name for p in site_packages.glob("*.dist-info")] == [f"labtool-{version}.dist-info"]
        assert activation.exists() == (version == "1.1")
    shell = f". {activation}; echo $LABTOOL_HOME"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, env={"CONDA_PREFIX": str(prefix)})
    assert done.stdout == f"{prefix}/share/labtool\n"


def test_the_newest_package_of_a_name_is_found(conda_channel: Channel) -> None:
    assert conda_channel.package("labtool").name == "labtool-1.1-pyhlab_0.conda"
    assert conda_channel.package("labdata").suffix == ".bz2"
    assert conda_channel.package("numpy", "linux-aarch64").parent.name == "linux-aarch64"
    with pytest.raises(AssertionError, match="no package torch"):
        conda_channel.package("torch")


def test_a_package_of_a_wheel_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    files = {
        "odd-1.0.data/scripts/oddly": b"#!python\nprint('odd')\n",
        "odd-1.0.data/data/share/odd/data.txt": b"data\n",
        "odd-1.0.dist-info/entry_points.txt": b"[console_scripts]\nodd = odd:main\n",
    }
    requires = ["Foo_Bar>=2,!=2.1", "tiny; sys_platform == 'win32'", "more; extra == 'all'"]
    wheel = make_wheel(tmp_path, "odd", requires=requires, files=files)
    made = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert wheel_package(folder, wheel, "linux-64") == "odd"
        made.append((folder / "noarch/odd-1.0-pyhlab_0.conda").read_bytes())
        time.sleep(2.1)  # a zip's dates are even seconds
    assert made[0] == made[1]
    extract(tmp_path / "one/noarch/odd-1.0-pyhlab_0.conda", tmp_path / "unpacked")
    index = json.loads((tmp_path / "unpacked/info/index.json").read_text())
    assert index["depends"] == ["foo-bar !=2.1,>=2", "python >=3.8"]
    link = json.loads((tmp_path / "unpacked/info/link.json").read_text())
    assert link["noarch"] == {"type": "python", "entry_points": ["odd = odd:main"]}
    script = (tmp_path / "unpacked/python-scripts/oddly").read_text()
    assert script == f"#!{PLACEHOLDER}/bin/python\nprint('odd')\n"
    assert (tmp_path / "unpacked/share/odd/data.txt").read_bytes() == b"data\n"


def _machine(path: Path) -> int | None:
    head = path.read_bytes()[:20] if path.stat().st_size < 1 << 20 else path.open("rb").read(20)
    machine: int = struct.unpack("<H", head[18:20])[0]
    return machine if head.startswith(b"\x7fELF") else None


BODY = bytes(range(256)) * 40


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Server]:
    """A server of one file of 10240 bytes."""
    (tmp_path / "noarch").mkdir()
    (tmp_path / "noarch/a.conda").write_bytes(BODY)
    (tmp_path / "secret").write_text("outside")
    with serve(tmp_path / "noarch", prefix="/c/forge", user="me", password="p:w") as running:
        yield running


def ask(server: Server, path: str = "/a.conda", method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    """(status, content, headers) of an answer; `Authorization` is sent unless it is given."""
    login = "Basic " + base64.b64encode(b"me:p:w").decode()
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    request = urllib.request.Request(server.url + path, headers={"Authorization": login, **named}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def test_files_are_served_whole_in_parts_and_only_when_changed(small: Server) -> None:
    status, content, headers = ask(small)
    assert (status, content) == (200, BODY)
    assert ask(small, method="HEAD")[:2] == (200, b"")
    assert ask(small, method="HEAD")[2]["Content-Length"] == "10240"
    status, content, part = ask(small, Range="bytes=10000-", If_Range=headers["ETag"])
    assert (status, content, part["Content-Range"]) == (206, BODY[10000:], "bytes 10000-10239/10240")
    assert ask(small, Range="bytes=5-8")[:2] == (206, BODY[5:9])
    assert ask(small, Range="bytes=-3")[:2] == (206, BODY[-3:])
    assert ask(small, Range="bytes=10000-", If_Range='"other"')[:2] == (200, BODY)
    assert ask(small, Range="bytes=10240-")[0] == 416
    assert ask(small, If_None_Match=headers["ETag"])[:2] == (304, b"")
    assert ask(small, If_Modified_Since=headers["Last-Modified"])[0] == 304
    assert small.requests[0] == "/c/forge/a.conda" and len(small.requests) == 10


@pytest.mark.parametrize(
    ("path", "login", "status"),
    [
        ("/a.conda", "", 401),
        ("/a.conda", "Basic bWU6bm8=", 401),
        ("/b.conda", None, 404),
        ("/../secret", None, 404),
        ("/%2e%2e/secret", None, 404),
    ],
)
def test_nobody_else_and_nothing_else_is_served(small: Server, path: str, login: str | None, status: int) -> None:
    assert ask(small, path, **({} if login is None else {"Authorization": login}))[0] == status


@pytest.mark.parametrize("fault", ["404", "401", "500", "truncate", "drop"])
def test_faults_do_what_they_say_until_they_are_taken_away(small: Server, fault: Fault) -> None:
    small.faults["/a.conda"] = fault
    if fault == "drop":
        with pytest.raises(http.client.IncompleteRead) as caught:
            ask(small)
        assert caught.value.partial == BODY[:5120]
    else:
        status, content, headers = ask(small)
        assert status == (200 if fault == "truncate" else int(fault))
        assert content != BODY and int(headers["Content-Length"]) == len(content)
        assert fault != "truncate" or content == BODY[:5120]
    small.faults.clear()
    assert ask(small)[:2] == (200, BODY)


def test_a_server_that_is_down_refuses_and_comes_back_at_its_address(small: Server) -> None:
    url = small.url
    small.down()
    small.down()
    with pytest.raises(urllib.error.URLError, match="refused"):
        ask(small)
    small.up()
    assert small.url == url
    assert ask(small)[:2] == (200, BODY)


def test_rattler_sees_a_damaged_package(conda_server: Server, tmp_path: Path) -> None:
    records = solve(conda_server.url, tmp_path, HOST, ["labdata"])
    conda_server.faults["labdata-1.0-0.tar.bz2"] = "truncate"
    with pytest.raises(rattler.exceptions.InstallerError):
        install(records, tmp_path / "prefix", tmp_path / "packages", HOST)
    conda_server.faults.clear()
    install(records, tmp_path / "again", tmp_path / "packages", HOST)
    assert (tmp_path / "again/bin/labdata").is_file()
