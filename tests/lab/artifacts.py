"""Small venvs and images made by hand, for tests that look into artifacts."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envbuild.base.packages import digest_of
from envbuild.contract.state import State
from envbuild.image.archive import archive_pieces
from envbuild.image.entry import DIR, FILE, SYMLINK, Entry
from envbuild.image.layer import Layer, write_layer
from envbuild.image.layout import Blobs, fill_layout
from envbuild.image.model import OCI_CONFIG, OCI_MANIFEST, Descriptor, ImageIndex, canonical, parse

SITE = "lib/python3.11/site-packages"
# What stands for the place of a conda environment in files of a conda package, as long as conda-build's.
PLACEHOLDER = "/opt/" + "placehold_" * 24 + "placehold"
# path → content; str ending in "/" is a folder, a value "-> target" a symbolic link
Files = Mapping[str, bytes | str]


def package(
    name: str, version: str, files: Files, *, site: str = SITE, installer: str = "uv", extra: str = ""
) -> dict[str, bytes | str]:
    """An installed distribution with a RECORD; a script of its name in bin names `installer`."""
    info = f"{name}-{version}.dist-info"
    text = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{extra}\nLong text\nName: no\n"
    script = f"#!/{installer}/python\n"
    own: dict[str, bytes | str] = {**files, f"{info}/METADATA": text}
    own |= {f"{info}/INSTALLER": installer, f"../../../bin/{name}": script}
    rows = [f"{path},{_hash(content)}" for path, content in own.items()]
    own[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    return {os.path.normpath(f"{site}/{path}"): content for path, content in own.items()}


def state(**more: Any) -> str:
    """envbuild.json of an environment."""
    made = State(
        "venv", "lab", "sha256:r", "sha256:l", "sha256:p", "cpu-x86_64", "3.11", "3.11.7", "/usr/bin/python3.11", ()
    )
    return dataclasses.replace(made, **more).render()


def frame(**more: Any) -> dict[str, bytes | str]:
    """What a venv has besides packages."""
    config = "home = /usr/bin\nversion_info = 3.11.7\ninclude-system-site-packages = false\n"
    return {"pyvenv.cfg": config, "bin/python": "-> /usr/bin/python3.11", "envbuild.json": state(**more)}


def conda_package(
    name: str, version: str, files: Files, place: str, *, build: str = "h0_0", entry_point: bool = False, **more: Any
) -> dict[str, bytes | str]:
    """A conda package installed in an environment at `place`, with its record; `more` are fields of that.

    In `files`, which may hold PLACEHOLDER, bytes are binary. An `entry_point` has the package's name.
    """
    own: dict[str, bytes | str] = {}
    rows: list[dict[str, Any]] = []
    for path, content in files.items():
        own[path] = installed = _replaced(content, place)
        row: dict[str, Any] = {"_path": path, "path_type": "hardlink", "sha256": _hex(content)}
        if isinstance(content, str) and content.startswith("-> "):
            row |= {"path_type": "softlink", "sha256_in_prefix": _hex("the path of the link")}
        elif installed != content:
            mode = "text" if isinstance(content, str) else "binary"
            row |= {"file_mode": mode, "prefix_placeholder": PLACEHOLDER}
            row |= {"sha256_in_prefix": _hex(installed)}
        rows.append(row)
    if entry_point:
        own[f"bin/{name}"] = script = f"#!{place}/bin/python3.11\nimport {name}\n"
        kind = "unix_python_entry_point"
        rows.append({"_path": f"bin/{name}", "path_type": kind, "sha256": _hex(script)})
    stem = f"{name}-{version}-{build}"
    channel = "https://conda.anaconda.org/conda-forge"
    record = {
        "name": name,
        "version": version,
        "build": build,
        "subdir": "linux-64",
        "channel": f"{channel}/",
        "fn": f"{stem}.conda",
        "url": f"{channel}/linux-64/{stem}.conda",
        "sha256": _hex(stem),
        "license": "BSD-3-Clause",
        "files": [row["_path"] for row in rows],
        "paths_data": {"paths_version": 1, "paths": rows},
        "link": {"source": f"{place}/../{stem}"},
    }
    own[f"conda-meta/{stem}.json"] = json.dumps({**record, **more}, indent=1)
    return own


def make_venv(folder: Path, files: Files) -> Path:
    """A folder with `files` in it; those in bin can be executed."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str) and content.startswith("-> "):
            path.symlink_to(content[3:])
        else:
            path.write_bytes(_bytes(content))
            path.chmod(0o755 if name.startswith("bin/") else 0o644)
    return folder


def under(prefix: str, files: Files) -> dict[str, bytes | str]:
    """`files` in a folder."""
    return {f"{prefix}/{path}": content for path, content in files.items()}


def layer(blobs: Blobs, files: Files, **more: Any) -> Layer:
    """A layer; `more` are fields of every entry, as uid or mtime."""
    return write_layer([_entry(path, content, more) for path, content in files.items()], blobs)


def image(blobs: Blobs, layers: Sequence[Layer], *, arch: str = "amd64", **run: Any) -> tuple[Descriptor, bytes]:
    """An image in `blobs`: its manifest's descriptor and its configuration. `run` is the `config` object."""
    config = canonical(
        {
            "architecture": arch,
            "os": "linux",
            "config": run,
            "rootfs": {"type": "layers", "diff_ids": [one.diff_id for one in layers]},
            "history": [{"created_by": f"RUN step {number} --token=hunter2"} for number in range(len(layers))],
        }
    )
    blobs.add(config)
    manifest = canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": Descriptor(OCI_CONFIG, digest_of(config), len(config)).as_json(),
            "layers": [one.blob.as_json() for one in layers],
        }
    )
    blobs.add(manifest)
    return Descriptor(OCI_MANIFEST, digest_of(manifest), len(manifest), arch, "linux"), config


def layout(folder: Path, blobs: Blobs, images: Sequence[tuple[Descriptor, str | None]]) -> Path:
    """An OCI layout."""
    folder.mkdir(parents=True)
    fill_layout(folder, blobs, images)
    return folder


def multi(blobs: Blobs, images: Sequence[Descriptor]) -> Descriptor:
    """An index of images for several platforms."""
    raw = json.dumps({"schemaVersion": 2, "manifests": [i.as_json() for i in images]}).encode()
    index = parse(raw, "lab")
    assert isinstance(index, ImageIndex)
    blobs.add(raw)
    return index.descriptor


def docker_archive(file: Path, blobs: Blobs, config: bytes, layers: Sequence[Layer], tag: str) -> Path:
    """What `docker save` writes."""
    with file.open("wb") as stream:
        stream.writelines(archive_pieces(config, [one.blob for one in layers], blobs, [tag]))
    return file


def _entry(path: str, content: bytes | str, more: Mapping[str, Any]) -> tuple[Entry, Any]:
    if path.endswith("/"):
        return Entry(path[:-1], DIR, 0o755, **more), None
    if isinstance(content, str) and content.startswith("-> "):
        return Entry(path, SYMLINK, **{**more, "mode": 0o777, "target": content[3:]}), None
    data = _bytes(content)
    mode = 0o755 if "bin/" in path else 0o644
    return Entry(path, FILE, **{"mode": mode, "size": len(data), **more}), io.BytesIO(data)


def _bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _replaced(content: bytes | str, place: str) -> bytes | str:
    if isinstance(content, str):
        return content.replace(PLACEHOLDER, place)
    old, new = PLACEHOLDER.encode(), place.encode()
    return content.replace(old, new + bytes(len(old) - len(new)))


def _hex(content: bytes | str) -> str:
    return hashlib.sha256(_bytes(content)).hexdigest()


def _hash(content: bytes | str) -> str:
    data = _bytes(content)
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest},{len(data)}"
