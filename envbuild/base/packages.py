"""Python and conda packages as files: RECORD, fingerprints, and wheels of pure Python.

A distribution's fingerprint covers its RECORD (PyPA "Recording installed projects", PEP 376 and 627), a conda package's
its list of files.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

# Files that an installer adds: they describe the installation, not the distribution.
_INSTALLER_FILE = re.compile(rb"\"?[^/,]+\.dist-info/(?:uv_cache\.json|INSTALLER|REQUESTED|direct_url\.json)\"?(?:,|$)")

# In a .dist-info folder: what a slim wheel is without (layers/wheels.py).
SLIM_FILE = "envbuild-slim.json"
# conda's default `channel_alias`: the server of channels that are given by name. Sites mirror it in site.toml.
CHANNEL_ALIAS = "https://conda.anaconda.org"
# conda calls channels on these hosts by the rest of their URL.
_ALIASES = (f"{CHANNEL_ALIAS}/", "https://repo.anaconda.com/")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NO_MODULE = re.compile(r"_|(?:tests?|testing|docs?|examples?|benchmarks?)(?:\.|$)")


def digest_of(data: bytes) -> str:
    """Return `sha256:` and the hexadecimal digest of `data`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def is_digest(text: str) -> bool:
    """Return whether `text` is a sha256 digest; registries use no other algorithm."""
    return _DIGEST.fullmatch(text) is not None


def files_digest(files: Iterable[tuple[str, bytes]]) -> str:
    """Return one digest, `sha256:…`, of the names, sizes and contents of `files`, in their order."""
    digest = hashlib.sha256()
    for name, content in files:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return f"sha256:{digest.hexdigest()}"


def json_digest(value: object) -> str:
    """Return `sha256:…` of `value` as JSON."""
    return "sha256:" + hashlib.sha256(json.dumps(value).encode()).hexdigest()


def record_digest(record: bytes) -> str:
    """Return the sha256 of the sorted lines of a RECORD, without the installer's own files."""
    kept = [line for line in record.splitlines() if not _INSTALLER_FILE.match(line)]
    return "sha256:" + hashlib.sha256(b"\n".join(sorted(kept))).hexdigest()


def conda_digest(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the sha256 of a conda package's files without bytecode, from the rows of its record in conda-meta.

    It depends neither on the prefix nor on the order of the rows.
    """
    files = []
    for row in rows:
        if not row["_path"].endswith(".pyc"):
            # Scripts are generated during installation, with the prefix in them: the package does not contain them.
            generated = row.get("path_type") == "unix_python_entry_point"
            sha256 = "" if generated else str(row.get("sha256") or "")
            files.append((row.get("original_path") or row["_path"], sha256))
    return json_digest(sorted(files))


def top_level(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the importable top-level modules of a distribution, from its files' paths in site-packages, sorted.

    A namespace package, whose folder has no __init__.py (PEP 420), is replaced by the packages directly inside. Modules
    with a leading underscore, and folders that distributions install by accident (tests, docs), are left out.
    """
    modules, packages = set[str](), set[str]()
    for path in paths:
        *folders, name = path.split("/")
        module, dot, rest = name.partition(".")
        is_module = bool(dot) and (rest in ("py", "so") or rest.endswith(".so"))
        if not is_module or len(folders) > 2 or not all(part.isidentifier() for part in folders):
            continue
        if module == "__init__" and rest == "py":
            packages.add(".".join(folders))
        elif not folders and module.isidentifier():
            modules.add(module)
    # The inner one of two packages is imported by its namespace alone.
    modules |= {package for package in packages if package.partition(".")[0] not in packages - {package}}
    return tuple(sorted(module_name for module_name in modules if module_name and not _NO_MODULE.match(module_name)))


_WHEEL = "Wheel-Version: 1.0\nGenerator: envbuild\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def record_row(digest: bytes, size: int) -> tuple[str, str]:
    """Return (hash, size) of a file in the form of RECORD, from its sha256."""
    return f"sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}", str(size)


def described(files: Sequence[tuple[str, bytes]], info: str, metadata: str) -> list[tuple[str, bytes]]:
    """Return the files of a pure wheel: `files` and those of its .dist-info folder `info`."""
    own = [(f"{info}/METADATA", metadata.encode()), (f"{info}/WHEEL", _WHEEL.encode())]
    return with_record([*files, *own], info)


def with_record(entries: Sequence[tuple[str, bytes]], info: str) -> list[tuple[str, bytes]]:
    """Return the files of a wheel with their RECORD in the .dist-info folder `info`, which comes last."""
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    for name, data in entries:
        rows.writerow([name, *record_row(hashlib.sha256(data).digest(), len(data))])
    rows.writerow([f"{info}/RECORD", "", ""])
    return [*entries, (f"{info}/RECORD", out.getvalue().encode())]


def pack(entries: Iterable[tuple[str, bytes]], executable: Collection[str] = ()) -> bytes:
    """Return a wheel's bytes (PyPA binary distribution format 1.0), the same on every machine."""
    buffer = io.BytesIO()
    # Stored, not deflated, so that the bytes do not depend on the zlib of the Python build.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries:
            info = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
            info.external_attr = (0o100755 if name in executable else 0o100644) << 16
            archive.writestr(info, data)
    return buffer.getvalue()


def channel_url(channel: str) -> str:
    """Return a channel's canonical URL, whichever mirror serves its packages."""
    return channel.rstrip("/") if "://" in channel else f"{CHANNEL_ALIAS}/{channel}"


def channel_name(url: str) -> str:
    """Return a channel's name as conda shows it: `conda-forge`, `pkgs/main`, or its URL."""
    alias = next((alias for alias in _ALIASES if url.startswith(alias)), "")
    return url.removeprefix(alias)
