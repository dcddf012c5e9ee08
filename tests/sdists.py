"""Source archives of tiny projects, whose build back end is in them (PEP 517, `backend-path`), and git repositories."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

BACKEND = '''\
import os, zipfile

def get_requires_for_build_wheel(config_settings=None):
    return {more!r}

def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = "{module}-" + version() + ".dist-info"
    os.mkdir(os.path.join(folder, info))
    with open(os.path.join(folder, info, "METADATA"), "w") as stream:
        stream.write(metadata())
    return info

def build_wheel(folder, config_settings=None, metadata_directory=None):
    stem = "{module}-" + version()
    info, name = stem + ".dist-info", stem + "-py3-none-any.whl"
    files = {{"{module}.py": open("{module}.py").read() + "SEEN = " + repr(seen()) + chr(10)}}
    files[info + "/METADATA"] = metadata()
    files[info + "/WHEEL"] = "Wheel-Version: 1.0\\nGenerator: lab\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files[info + "/RECORD"] = "".join(path + ",,\\n" for path in [*files, info + "/RECORD"])
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(zipfile.ZipInfo(path), text)
    return name

def version():
    return os.environ.get("SETUPTOOLS_SCM_PRETEND_VERSION") or "{version}"

def metadata():
    lines = ["Metadata-Version: 2.1", "Name: {name}", "Version: " + version()]
    return chr(10).join(lines + ["Requires-Dist: " + line for line in {requires!r}]) + chr(10)

def seen():
    """Names of the distributions that the build can import, and a variable of the recipe."""
    from importlib.metadata import distributions
    return sorted({{one.metadata["Name"] for one in distributions()}}) + [os.environ.get("LAB_OPTION", "")]

{extra}
'''


def project(
    name: str,
    version: str = "1.0",
    *,
    requires: Sequence[str] = (),
    build: Sequence[str] = (),
    more: Sequence[str] = (),
    extra: str = "",
) -> dict[str, str]:
    """The files of a project: `build` are its declared build requirements, `more` those that its back end adds."""
    module = name.replace("-", "_")
    about = {"name": name, "module": module, "version": version, "requires": list(requires), "more": list(more)}
    lines = ", ".join(f'"{one}"' for one in build)
    return {
        "pyproject.toml": f'[build-system]\nrequires = [{lines}]\nbuild-backend = "lab"\nbackend-path = ["."]\n',
        "lab.py": BACKEND.format(**about, extra=extra),
        f"{module}.py": f"NAME = {name!r}\n",
        "LICENSE": "Free\n",
    }


def make_sdist(
    folder: Path, name: str, version: str = "1.0", files: Mapping[str, str] | None = None, **how: Sequence[str]
) -> Path:
    """Write the source archive of `project` into `folder`, with `files` besides; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        about = {"PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
        for file, text in {**about, **project(name, version, **how), **(files or {})}.items():  # type: ignore[arg-type]
            entry = tarfile.TarInfo(f"{stem}/{file}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def commit(repository: Path, files: Mapping[str, str], tag: str = "") -> str:
    """Commit `files` in a repository, which is made if there is none; return the commit."""
    git(repository, "init", "--quiet")
    for name, text in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--allow-empty", "-m", "lab")
    if tag:
        git(repository, "tag", tag)
    return git(repository, "rev-parse", "HEAD")


def git(repository: Path, *words: str) -> str:
    repository.mkdir(parents=True, exist_ok=True)
    line = [
        "git",
        "-c",
        "user.name=ada",
        "-c",
        "user.email=ada@example.org",
        "-c",
        "protocol.file.allow=always",
        *words,
    ]
    return subprocess.run(line, cwd=repository, check=True, capture_output=True, text=True).stdout.strip()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
