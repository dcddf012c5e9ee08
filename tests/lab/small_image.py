"""A small tree that programs run in: Debian's shell, some tools and its Python, and an enroot image made of it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from envbuild.contract.state import State

PROGRAMS = ("/bin/sh", "/bin/cat", "/bin/sleep", "/bin/ls", "/bin/grep", "/usr/bin/env")
LEFT_OUT = ("test", "idlelib", "ensurepip", "lib2to3", "distutils", "__pycache__", "dist-packages")
PATH = "/opt/env/bin:/usr/bin:/bin"
WORKSPACE = "/workspace"
_RC = f"""\
export PATH={PATH}
mkdir -p {WORKSPACE} 2>/dev/null
cd {WORKSPACE} || exit 1
if [ -s /etc/rc.local ]; then . /etc/rc.local; fi
exec "$@"
"""


def write_tree(root: Path, *more: str) -> Path:
    """Copy PROGRAMS, `more` and Python into `root`, with /opt/env/bin/python; the folder of Python's library."""
    python = Path(os.path.realpath("/usr/bin/python3"))
    for program in (*PROGRAMS, *more, str(python)):
        said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        found = [word for word in said.split() if word.startswith("/")]
        for path in (program, *found):
            here = root / path.lstrip("/")
            here.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, here)
    library = f"usr/lib/{python.name}"
    shutil.copytree(f"/{library}", root / library, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
    (root / "opt/env/bin").mkdir(parents=True)
    (root / "opt/env/bin/python").symlink_to(f"/{python.relative_to('/')}")
    (root / f"opt/env/lib/{python.name}/site-packages").mkdir(parents=True)
    (root / "etc").mkdir(exist_ok=True)
    return root / library


def write_image(root: Path, image: Path, **environment: str) -> Path:
    """The tree `root`, of write_tree, as an enroot image in which /workspace is the folder where programs begin."""
    (root / "etc/rc").write_text(_RC)
    (root / "etc/rc.local").touch()
    rows = {"PATH": PATH, **environment}
    (root / "etc/environment").write_text("".join(f"{name}={rows[name]}\n" for name in rows))
    state = State(
        "squashfs",
        "small",
        *("sha256:0",) * 3,
        f"cpu-{os.uname().machine}",
        "3.11",
        "3.11.2",
        "python3",
        (("torch", "2.13.0", "0" * 64),),
    )
    (root / "opt/env/envbuild.json").write_text(state.render())
    options = ["-comp", "gzip", "-Xcompression-level", "1", "-noappend", "-quiet", "-no-progress"]
    subprocess.run(["mksquashfs", root, image, *options, "-root-mode", "0755"], check=True)
    return image
