"""Install envbuild from the folder of this file: `sh install [FOLDER]` runs it by the Python beside it.

FOLDER (default: ~/.local/share/envbuild) becomes a copy of that Python with envbuild's wheels in it, and bin/envbuild.
An envbuild that this script installed there before is replaced, after the new one has started.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DEFAULT = "~/.local/share/envbuild"


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 or any(one.startswith("-") for one in arguments):
        print(f"usage: sh install [FOLDER]    (default: {DEFAULT})", file=sys.stderr)
        return 2
    folder = Path(arguments[0] if arguments else DEFAULT).expanduser().absolute()
    if folder.exists() and not (folder / "bin/envbuild").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        print(f"install: {folder} holds something else: name another folder", file=sys.stderr)
        return 2
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        print(f"install: cannot write beside {folder}: {error.strerror}", file=sys.stderr)
        return 6
    try:
        fill(staged, folder)
        replace(staged, folder)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"install: {error}. {folder} is as it was.", file=sys.stderr)
        return 4
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    print(f"Add envbuild to your PATH: export PATH={shlex.quote(str(folder / 'bin'))}:$PATH", file=sys.stderr)
    print(folder / "bin/envbuild")
    return 0


def fill(staged: Path, folder: Path) -> None:
    """Install into `staged`, which is moved to `folder` afterwards."""
    umask = os.umask(0)
    os.umask(umask)
    staged.chmod(0o777 & ~umask)
    shutil.copytree(HERE / "python", staged / "python", symlinks=True)
    python = staged / "python/bin/python3"
    (packed,) = (HERE / "wheels").glob("uv-*.whl")
    with tempfile.TemporaryDirectory(dir=staged) as work:
        with zipfile.ZipFile(packed) as wheel:
            (member,) = [name for name in wheel.namelist() if name.endswith(".data/scripts/uv")]
            uv = Path(wheel.extract(member, work))
        uv.chmod(0o755)
        line = [uv, "pip", "install", "--quiet", "--no-config", "--offline", "--no-cache", "--no-index", "--no-deps"]
        line += ["--require-hashes", "--compile-bytecode", "--link-mode=copy", "--find-links", HERE / "wheels"]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PYTHON"))}
        env.pop("VIRTUAL_ENV", None)
        subprocess.run([*line, "--python", python, "-r", HERE / "requirements.txt"], check=True, env=env)
    subprocess.run([python, "-I", "-m", "envbuild", "--version"], check=True, stdout=sys.stderr)
    program = staged / "bin/envbuild"
    program.parent.mkdir()
    start = shlex.quote(str(folder / "python/bin/python3"))
    program.write_text(f'#!/bin/sh\nexec {start} -I -m envbuild "$@"\n')
    program.chmod(0o777 & ~umask)


def replace(staged: Path, folder: Path) -> None:
    """Move `staged` to `folder`, and an older installation away."""
    old = None
    if folder.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
        folder.rename(old / "old")
    try:
        staged.rename(folder)
    except OSError:
        if old:
            (old / "old").rename(folder)
        raise
    finally:
        if old:
            shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
