"""Launch trials of tiny images, one after the other, in a separate process.

The doctor's checks run in threads. Launches run code between fork and exec, which is not safe in a process with
threads.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

from envbuild.environment import Environment
from envbuild.errors import EnvbuildError
from envbuild.site.pip_config import PipConfig
from envbuild.site.settings import Site
from envbuild.store.store import Store

# Numbers of fs/squashfs/squashfs_fs.h.
COMPRESSORS = {"gzip": 1, "lzo": 3, "xz": 4, "lz4": 5, "zstd": 6}
ANSWERS = "answers"
_NOTHING = 0xFFFFFFFFFFFFFFFF
# Imports only envbuild and Python's own modules, independent of the caller's variables and current folder.
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from envbuild.doctor.launch_trials import main; main()"
START = (sys.executable, "-I", "-c", _BOOT, str(Path(__file__).parents[2]))


def main() -> None:
    """Write each result to FOLDER/answers (FOLDER is the first argument), one line each, as soon as it is known."""
    folder = Path(sys.argv[1])
    with (folder / ANSWERS).open("w", encoding="utf-8") as answers:
        for way, compressor in _trials():
            said = [way, compressor, *attempt(folder, way, compressor)]
            answers.write(json.dumps(said) + "\n")
            answers.flush()


def _trials() -> list[tuple[str, str]]:
    from envbuild.verify.own_runtime import EXTRACT, MOUNT, SQUASHFUSE

    mounts = [(MOUNT, name) for name in COMPRESSORS] if os.geteuid() == 0 else []
    return [(EXTRACT, "gzip"), (SQUASHFUSE, "gzip"), *mounts]


def attempt(folder: Path, way: str, compressor: str) -> tuple[bool, str, str]:
    """Return (success, reason of a failure, hint) of a launch of a tiny image by the method `way`."""
    from envbuild.verify.image_file import ENROOT, ImageFile
    from envbuild.verify.own_runtime import own_runtime

    image = folder / f"{compressor}.sqsh"
    image.write_bytes(tiny_image(compressor))
    store = folder / "store"
    environment = Environment(dict(os.environ), Site(store=store), PipConfig(), Store(store))
    try:
        own_runtime(ImageFile(image, ENROOT, 0, compressor), way, environment)
    except EnvbuildError as error:
        return False, error.message.splitlines()[0], error.hint or ""
    return True, "", ""


def tiny_image(compressor: str) -> bytes:
    """Return an empty squashfs whose blocks are stored uncompressed.

    Only its superblock names the compressor, which the kernel must support to mount it. Source:
    Documentation/filesystems/squashfs.rst.
    """
    inode = struct.pack("<HHHHII", 1, 0o755, 0, 0, 0, 1) + struct.pack("<IIHHI", 0, 2, 3, 0, 2)
    # Only lz4 requires compressor options: version 1, no flags.
    options = struct.pack("<HII", 0x8008, 1, 0) if compressor == "lz4" else b""
    parts = [struct.pack("<H", 0x8000 | len(inode)) + inode, struct.pack("<HB", 0x8001, 0)]
    inodes = 96 + len(options)
    directories = inodes + len(parts[0])
    owners = directories + len(parts[1])
    parts.append(struct.pack("<HI", 0x8004, 0))
    index = owners + len(parts[2])
    parts.append(struct.pack("<Q", owners))
    # Uncompressed, no fragments, no xattrs; 0x400 if there are compressor options.
    flags = 0x1 | 0x2 | 0x8 | 0x10 | 0x200 | (0x400 if options else 0)
    head = struct.pack(
        "<IIIIIHHHHHHQQQQQQQQ",
        0x73717368, 1, 0, 1 << 17, 0, COMPRESSORS[compressor], 17, flags, 1, 4, 0,
        0, index + 8, index, _NOTHING, inodes, directories, _NOTHING, _NOTHING,
    )  # fmt: skip
    return (head + options + b"".join(parts)).ljust(4096, b"\0")
