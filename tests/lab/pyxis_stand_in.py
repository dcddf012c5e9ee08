"""Stands in for pyxis and enroot, which Debian does not have: what tests/lab/pyxis_stand_in.c asks for, and `enroot`.

Nothing is unpacked: a container's files are an overlay over the image, which the kernel mounts. What a job notices of
pyxis is as there: names and their collisions, whose variables win, mounts that a shell reads, the folder where the
program begins, a container that cannot be written. As a program it knows the standard library alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

DATA = Path("/run/enroot")
# One line for each time that an image was unpacked, had this been pyxis.
CREATED = Path("/run/enroot.created")
SOURCE = Path(__file__).with_suffix(".c")
_SHELL = ("PWD", "OLDPWD", "SHLVL", "_")


def install(folder: Path) -> str:
    """Compile the plugin into `folder`, with `bin/enroot` for PATH; the line of plugstack.conf. Needs gcc and
    libslurm-dev."""
    enroot = folder / "bin/enroot"
    enroot.parent.mkdir(parents=True, exist_ok=True)
    enroot.write_text(f'#!/bin/sh\nexec {sys.executable} -I {__file__} "$@"\n')
    enroot.chmod(0o755)
    plugin = folder / "pyxis_stand_in.so"
    line = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", plugin, SOURCE]
    subprocess.run(line, check=True)
    return f"required {plugin} {enroot}\n"


def missing() -> str | None:
    """Why the plugin cannot be had here; None when it can."""
    needed = {"libslurm-dev": Path("/usr/include/slurm/spank.h").exists(), "gcc": shutil.which("gcc")}
    absent = [package for package, found in needed.items() if not found]
    return f"not installed: {', '.join(absent)}" if absent else None


def main(command: str, *arguments: str) -> None:
    """`enroot list`, `enroot remove --force NAME`; `create`, `enter` and `remove` are the plugin's."""
    DATA.mkdir(exist_ok=True)
    match command:
        case "list":
            print("".join(f"{path.name}\n" for path in sorted(DATA.iterdir())), end="")
        case "create":
            _create(*arguments)
        case "enter":
            _enter(*arguments)
        case "remove":
            name = next(one for one in arguments if not one.startswith("-"))
            if not (DATA / name).is_dir():
                sys.exit(f"[ERROR] No such file or directory: {DATA / name}")
            shutil.rmtree(DATA / name)
        case _:
            sys.exit(f"[ERROR] Invalid command: {command}")


def _create(rootfs: str, image: str, name: str, *_: str) -> None:
    place = DATA / rootfs
    if place.exists():
        if name:
            return
        sys.exit(f"[ERROR] File already exists: {place}")
    if not Path(image).is_file():
        sys.exit(f"[ERROR] No such file or directory: {image}")
    for part in ("image", "files/upper", "files/work", "root"):
        (place / part).mkdir(parents=True)
    (place / "path").write_text(image)
    with CREATED.open("a") as stream:
        print(rootfs, file=stream)


def _enter(rootfs: str, _: str, __: str, mounts: str, workdir: str, named: str, writable: str) -> None:
    """Set the container up in this process's own mounts; print where its program begins, and its variables."""
    place = DATA / rootfs
    root = place / "root"
    image = (place / "path").read_text()
    _mount("-t", "squashfs", "-o", "loop,ro", image, place / "image")
    layers = f"lowerdir={place}/image,upperdir={place}/files/upper,workdir={place}/files/work"
    _mount("-t", "overlay", "-o", layers, "overlay", root)
    for folder in ("proc", "sys", "dev"):
        (root / folder).mkdir(exist_ok=True)
        _mount("--rbind", f"/{folder}", root / folder)
    (root / "tmp").mkdir(exist_ok=True)
    _mount("-t", "tmpfs", "tmpfs", root / "tmp")
    for file in ("etc/hosts", "etc/resolv.conf"):
        (root / file).touch()
        _mount("--bind", f"/{file}", root / file)
    for one in filter(None, mounts.split(",")):
        source, target, flags = [*one.split(":"), ""][:3]
        # pyxis hands mounts on in a shell's function.
        line = f'echo "{source} {target} {flags}"'
        read = subprocess.run(["/bin/sh", "-c", line], stdout=subprocess.PIPE, text=True, check=True)
        source, target, *more = read.stdout.split()
        if not Path(source).exists():
            sys.exit(f"[ERROR] mount: {source}: No such file or directory")
        at = root / target.lstrip("/")
        at.mkdir(parents=True, exist_ok=True)
        _mount("--rbind", source, at)
        if "ro" in (more or [""])[0].split("+"):
            _mount("-o", "remount,bind,ro", at)
    begin = root / "etc/rc.local"
    begin.touch()
    own = place / "rc.local"
    own.write_text('exec "$@"\n')
    _mount("--bind", own, begin)
    words = named.split(",") if named else []
    kept = {name: os.environ[name] for name in words if name in os.environ}
    rows = (root / "etc/environment").read_text().splitlines()
    variables = dict(row.split("=", 1) for row in rows if "=" in row) | kept
    # The image's own program says where it begins, and may change its variables.
    start = ["/bin/sh", "/etc/rc", "/bin/sh", "-c", "pwd; exec env -0"]
    said = subprocess.run(
        ["/usr/sbin/chroot", root, *start], env=variables, stdout=subprocess.PIPE, text=True, check=True
    )
    if not writable:
        _mount("-o", "remount,bind,ro", root)
    where, _, rest = said.stdout.partition("\n")
    found = dict(row.split("=", 1) for row in rest.split("\0") if "=" in row)
    found = {name: value for name, value in found.items() if name not in _SHELL} | kept
    if "PYTORCH_VERSION" in found:
        found |= {"RANK": os.environ["SLURM_PROCID"], "LOCAL_RANK": os.environ["SLURM_LOCALID"]}
    sys.stdout.write("\0".join([workdir or where, *(f"{name}={value}" for name, value in found.items()), ""]))


def _mount(*words: str | Path) -> None:
    done = subprocess.run(["mount", *words], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"[ERROR] {done.stderr}")


if __name__ == "__main__":
    main(*sys.argv[1:])
