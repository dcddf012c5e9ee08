"""envbuild.image as a library: the code of its page runs, and it needs nothing of envbuild but cache/ and base/."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.fake_registry import Call, fake_registry

import envbuild.image
from envbuild.base.errors import BuildError
from envbuild.image import Blobs, Entry, ImageLimits, open_image, read_squashfs, unpack, write_layer, write_squashfs
from envbuild.image.entry import DIR, SYMLINK
from envbuild.image.model import OCI_CONFIG, OCI_MANIFEST, Descriptor, canonical, new_manifest

TOP = Path(__file__).resolve().parents[2]
PAGE = TOP / "docs/reference/image.md"
LIBRARY = TOP / "envbuild/image"
MIB = 1 << 20


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def files(size: int) -> Iterator[tuple[Entry, Any]]:
    for number in range(40):
        data = bytes([number, number // 2]) * (size // (number + 1))
        yield Entry(f"data/{number}", size=len(data), mtime=number), io.BytesIO(data)
    yield Entry("data/link", SYMLINK, target="7"), None


def test_the_first_program_of_the_page_writes_a_squashfs_and_a_sif(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = blocks()[0]
    assert len([line for line in code.splitlines() if line and not line.startswith(("import", "from"))]) <= 10
    exec(compile(code, str(PAGE), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["dir  ", "dir etc ", "file etc/motd b'Hello from the image\\n'", "dir tmp "]
    assert (tmp_path / "root.sif").read_bytes()[:19] == b"#!/usr/bin/env run-"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root.sif", "root.sqsh"]


def test_the_second_program_of_the_page_pulls_an_image_and_lists_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Blobs(tmp_path / "served")
    layers = [write_layer(tree, served) for tree in (files(500), [(Entry("upper", DIR, 0o755), None)])]
    rootfs = {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]}
    config = canonical({"architecture": "amd64", "os": "linux", "rootfs": rootfs})
    about = Descriptor(OCI_CONFIG, served.add(config), len(config))
    manifest = new_manifest(OCI_MANIFEST, about, [layer.blob for layer in layers])

    def script(call: Call) -> None:
        kind, _, name = call.path.removeprefix("/v2/team/base/").partition("/")
        if kind == "manifests":
            call.reply(200, manifest.raw, Content_Type=OCI_MANIFEST)
        else:
            call.reply(200, served.read(name))

    monkeypatch.chdir(tmp_path)
    with fake_registry(script) as fake:
        code = blocks()[1].replace("registry.example.org", fake.address)
        code = code.replace("Transport()", f'Transport(insecure=frozenset(["{fake.address}"]))')
        exec(compile(code, str(PAGE), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert {"data/0", "data/39", "data/link", "upper"} <= set(lines) and len(lines) == 44
    with pytest.raises(BuildError):
        open_image(tmp_path / "base", "aarch64")


@pytest.mark.parametrize("compression", ["zstd", "gzip:9", "lz4", "xz"])
def test_a_written_squashfs_has_the_tree_and_the_same_bytes_with_any_number_of_workers(
    compression: str, tmp_path: Path
) -> None:
    lengths = [
        write_squashfs(files(MIB), tmp_path / f"{workers}", compression=compression, mtime=7, workers=workers)
        for workers in (1, 3)
    ]
    assert (tmp_path / "1").read_bytes() == (tmp_path / "3").read_bytes()
    assert lengths == [(tmp_path / "1").stat().st_size] * 2
    with read_squashfs(tmp_path / "1") as image:
        unpack(image, tmp_path / "unpacked")
    for entry, content in files(MIB):
        if content is not None:
            assert (tmp_path / "unpacked" / entry.path).read_bytes() == content.read()
    assert (tmp_path / "unpacked/data/link").readlink() == Path("7")
    with (
        read_squashfs(tmp_path / "1", ImageLimits(entries=20)) as image,
        pytest.raises(BuildError, match="more than 20"),
    ):
        list(image.entries())


def test_a_tree_that_fails_leaves_the_existing_file(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[Entry, Any]]:
        yield Entry("file", size=9), io.BytesIO(b"short")

    path = tmp_path / "image"
    path.write_text("old")
    with pytest.raises(BuildError, match="not 9 bytes"):
        write_squashfs(broken(), path)
    assert [file.name for file in tmp_path.iterdir()] == ["image"] and path.read_text() == "old"


def test_the_library_imports_nothing_but_the_cache_and_the_base() -> None:
    rooms = set()
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            rooms |= {name.split(".")[1] for name in names if name.startswith("envbuild.")}
    assert rooms == {"base", "cache", "image"}


def test_every_public_name_exists_and_is_typed_and_documented() -> None:
    tree = ast.parse((LIBRARY / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name: f"{node.module}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    public = {name: f"envbuild.{module}" for name, module in envbuild.image._PUBLIC.items()}
    assert {name: module for name, module in typed.items() if module.startswith("envbuild.")} == public
    assert [getattr(envbuild.image, name).__name__ for name in public] == list(public)
    assert set(public) <= set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8"))) & set(dir(envbuild.image))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = envbuild.image.no_such_name


def test_a_reader_of_one_format_loads_no_client_of_registries() -> None:
    program = (
        "import sys, envbuild.image\n"
        "before = [name for name in sys.modules if name.startswith('envbuild.image.')]\n"
        "from envbuild.image import read_squashfs\n"
        "print(before, 'envbuild.image.squashfs.read' in sys.modules, "
        "[name for name in ('requests', 'docker', 'envbuild.image.registry', 'envbuild.cache.http') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=TOP)
    assert done.stdout.strip() == "[] True []"
