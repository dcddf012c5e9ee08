"""Images that mksquashfs and tar2sqfs made, looked into without mounting them: unpacked, inspected, compared."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from lab import artifacts as made

from envbuild.base.errors import BuildError
from envbuild.image.entry import FILE, HARDLINK
from envbuild.image.layout import Blobs
from envbuild.image.sif import finish_sif, write_sif_front
from envbuild.image.squashfs.read import SquashfsImage
from envbuild.image.squashfs.unpack import unpack

from .conftest import REPOSITORY, Command

TOOLS = [name for name in ("mksquashfs", "tar2sqfs", "setpriv") if shutil.which(name) is None]
pytestmark = pytest.mark.skipif(bool(TOOLS), reason=f"not installed: {', '.join(TOOLS)}")
SPARSE = (4 << 30) + 5  # more than 32 bits count
COMPRESSORS = ("gzip", "xz", "lz4", "zstd")
MAKERS = {
    **{name: ["-comp", name] for name in COMPRESSORS},
    "small blocks, nothing compressed": ["-b", "4096", "-noI", "-noD", "-noF", "-noX", "-no-exports"],
    "large blocks, all tails in fragments": ["-b", "1M", "-comp", "xz", "-Xbcj", "x86", "-always-use-fragments"],
    "no fragments": ["-no-fragments", "-no-duplicates"],
}


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path, {"ENVBUILD_STORE": str(tmp_path / "store")})


def mksquashfs(tree: Path, image: Path, *options: str) -> Path:
    line = ["mksquashfs", str(tree), str(image), "-noappend", "-quiet", "-no-progress", *options]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    return image


def tar2sqfs(tree: Path, image: Path, *options: str) -> Path:
    tar = ["tar", "-c", "--sparse", "--xattrs", "--xattrs-include=*", "-C", str(tree), "."]
    with subprocess.Popen(tar, stdout=subprocess.PIPE) as sent:
        line = ["tar2sqfs", "-q", "-f", *options, str(image)]
        subprocess.run(line, stdin=sent.stdout, check=True)
    return image


def write_sif(image: Path, sif: Path, run: dict[str, Any], labels: dict[str, str]) -> Path:
    told = {"data": {"attributes": {"labels": labels}}, "type": "container"}
    parts = (
        b"Bootstrap: docker\nFrom: lab\n",
        [("inspect-metadata.json", json.dumps(told).encode()), ("oci-config.json", json.dumps(run).encode())],
        "x86_64",
    )
    with sif.open("w+b") as out:
        write_sif_front(out, *parts)
        size = out.write(image.read_bytes())
        finish_sif(out, *parts, partition_size=size, mtime=1577836800)
    return sif


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with all that a file system can hold."""
    chance = random.Random(7)
    root = tmp_path_factory.mktemp("tree") / "t"
    (root / "deep/er/still").mkdir(parents=True)
    (root / "many").mkdir()
    for number in range(2000):
        (root / f"many/{'n' * (number % 60)}{number}").write_text(str(number) * (number % 40))
    for number in range(20):
        size = chance.choice([0, 1, 4095, 4096, 4097, 131072, 131073, 700000])
        (root / f"deep/{number}").write_bytes(chance.randbytes(size // 2) + bytes(size - size // 2))
    (root / os.fsdecode(b"odd\xff\n name")).write_text("odd")
    (root / "empty").mkdir()
    (root / "link").symlink_to("../" * 40 + "etc/passwd")
    os.link(root / "deep/7", root / "hard")
    os.link(root / "deep/7", root / "many/hard")
    os.mkfifo(root / "fifo")
    os.mknod(root / "device", 0o600 | stat.S_IFBLK, os.makedev(259, 70001))
    for number, path in enumerate(("deep/3", "deep/4", "empty")):
        for name in ("user.note", "trusted.lab"):
            os.setxattr(root / path, name, bytes([number]) * 300 * number)
    os.chown(root / "deep/5", 4000000000, 1234)
    os.chmod(root / "deep/5", 0o6755)
    os.chmod(root / "empty", 0o1555)
    with (root / "sparse").open("wb") as out:
        out.seek(30_000_000)
        out.write(b"end")
    for number, place in enumerate(sorted(root.rglob("*"))):
        os.utime(place, (number * 1000, number * 1000), follow_symlinks=False)
    return root


def seen(root: Path) -> dict[str, tuple[Any, ...]]:
    """All that stat, readlink, listxattr and the content tell of each path below `root`."""
    found = {}
    inodes: dict[int, str] = {}
    for path in sorted(root.rglob("*")):
        about, content = path.lstat(), ""
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file() and about.st_size < 1 << 30:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        name = str(path.relative_to(root))
        xattrs = [
            (key, os.getxattr(path, key, follow_symlinks=False))
            for key in sorted(os.listxattr(path, follow_symlinks=False))
        ]
        size = 0 if path.is_dir() and not path.is_symlink() else about.st_size
        first = name if stat.S_ISDIR(about.st_mode) else inodes.setdefault(about.st_ino, name)
        found[name] = (
            about.st_mode,
            about.st_uid,
            about.st_gid,
            about.st_mtime,
            size,
            about.st_rdev,
            first,
            content,
            xattrs,
        )
    return found


@pytest.mark.parametrize("maker", [*MAKERS, "tar2sqfs"])
def test_an_unpacked_image_is_the_tree_it_was_made_of(maker: str, tree: Path, tmp_path: Path) -> None:
    image = tmp_path / "image.sqsh"
    if maker == "tar2sqfs":
        tar2sqfs(tree, image, "-c", "zstd")
    else:
        mksquashfs(tree, image, *MAKERS[maker])
    start = time.monotonic()
    with image.open("rb") as stream:
        opened = SquashfsImage(stream, 0, "lab")
        entries = {entry.path: entry for entry, _ in opened.entries()}
        unpack(opened, tmp_path / "out")
    found, expected = seen(tmp_path / "out"), seen(tree)
    assert found.keys() == expected.keys()
    for path, (mode, uid, gid, *rest) in expected.items():
        entry = entries[path] if entries[path].kind != HARDLINK else entries[entries[path].target]
        assert (entry.mode, entry.uid, entry.gid) == (stat.S_IMODE(mode), uid, gid), path
        assert found[path] == (mode & ~0o6000, os.getuid(), os.getgid(), *rest), path
    assert (tmp_path / "out/sparse").stat().st_blocks < 1 << 12
    print(f"{maker}: {time.monotonic() - start:.1f} s")
    shutil.rmtree(tmp_path / "out")


SCRIPT = """
    import sys
    from pathlib import Path
    from envbuild.image.squashfs.read import SquashfsImage
    from envbuild.image.squashfs.unpack import unpack
    with open(sys.argv[1], "rb") as stream:
        unpack(SquashfsImage(stream, 0, "lab"), Path(sys.argv[2]))
    # getrusage(2) would tell of the process that started this one, too
    status = Path("/proc/self/status").read_text()
    print(int(status.partition("VmHWM:")[2].split()[0]) >> 10)
"""


def unpack_elsewhere(image: Path, into: Path, *before: str, code: Path = REPOSITORY) -> int:
    """Unpack in a process of its own; the most memory that it had, in MiB."""
    line = [*before, sys.executable, "-c", textwrap.dedent(SCRIPT), str(image), str(into)]
    env = {**os.environ, "PYTHONPATH": str(code), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(line, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_who_is_not_root_unpacks_all_but_devices(tree: Path, tmp_path: Path) -> None:
    if not os.access("/proc/self/exe", os.R_OK) or Path(sys.executable).resolve().stat().st_uid:
        pytest.skip("another user cannot run this interpreter")
    # gzip needs nothing but Python, where this one's packages are root's alone
    image = mksquashfs(tree, tmp_path / "image.sqsh", "-comp", "gzip")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as home:
        os.chmod(home, 0o755)
        shutil.copy(image, f"{home}/image")
        Path(home, "own").mkdir(0o700)
        os.chown(f"{home}/own", 65534, 65534)
        user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        # The checkout may be below a folder that only root can read, as /root.
        shutil.copytree(REPOSITORY / "envbuild", f"{home}/envbuild", ignore=shutil.ignore_patterns("__pycache__"))
        unpack_elsewhere(Path(home, "image"), Path(home, "own/out"), *user, code=Path(home))
        found, expected = seen(Path(home, "own/out")), seen(tree)
        assert expected.keys() - found.keys() == {"device"}
        for path, (mode, uid, gid, mtime, size, _, first, content, xattrs) in found.items():
            wanted = expected[path]
            assert (mtime, size, first, content) == (wanted[3], wanted[4], *wanted[6:8]), path
            assert (mode, uid, gid) == (wanted[0] & ~0o6000, 65534, 65534), path
            assert xattrs == [pair for pair in wanted[8] if pair[0].startswith("user.")], path


def test_files_of_any_size_take_little_memory(tmp_path: Path) -> None:
    tree = tmp_path / "t"
    tree.mkdir()
    (tree / "sparse").touch()
    os.truncate(tree / "sparse", SPARSE)
    (tree / "large").write_bytes(random.Random(3).randbytes(1 << 20) * 180)
    for number in range(2_000):
        (tree / f"{number}").write_bytes(b"%d" % number * 20)
    image = tar2sqfs(tree, tmp_path / "image.sqsh", "-c", "lz4", "-b", "1M")
    assert unpack_elsewhere(image, tmp_path / "out") < 150
    assert (tmp_path / "out/sparse").stat().st_size == SPARSE
    assert (tmp_path / "out/sparse").stat().st_blocks == 0
    shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("maker", MAKERS)
def test_damaged_images_of_every_maker_are_errors_and_never_worse(maker: str, tmp_path: Path) -> None:
    chance = random.Random(maker)
    tree = tmp_path / "t"
    (tree / "some/where").mkdir(parents=True)
    for number in range(150):
        (tree / f"some/{number}").write_bytes(chance.randbytes(number % 7) * (number * 9))
    (tree / "some/link").symlink_to("where")
    os.link(tree / "some/77", tree / "hard")
    os.setxattr(tree / "hard", "user.note", b"text")
    whole = mksquashfs(tree, tmp_path / "image.sqsh", *MAKERS[maker]).read_bytes()
    whole = whole[: int.from_bytes(whole[40:48], "little")]  # without what pads it
    errors, slowest = 0, 0.0
    for _ in range(120):
        image = bytearray(whole)
        for _ in range(chance.choice((1, 1, 2, 6))):
            tables = chance.randrange(len(image) * 6 // 10, len(image))
            at = chance.choice((chance.randrange(96), chance.randrange(len(image)), tables, tables))
            flipped = image[at] ^ 1 << chance.randrange(8)
            image[at] = chance.choice((0, 255, chance.randrange(256), flipped))
        if chance.random() < 0.1:
            del image[chance.randrange(len(image)) :]
        start = time.monotonic()
        try:
            into = tmp_path / "out"
            (tmp_path / "damaged").write_bytes(image)
            with (tmp_path / "damaged").open("rb") as stream:
                opened = SquashfsImage(stream, 0, "lab")
                if chance.random() < 0.1:
                    unpack(opened, into)
                else:
                    for entry, handle in opened.entries():
                        if entry.kind == FILE and entry.size < 1 << 28:
                            opened.content(handle, entry.size)
        except BuildError as error:
            errors += 1
            assert error.message.startswith(("lab: ", str(into))), error.message
        shutil.rmtree(into, ignore_errors=True)
        slowest = max(slowest, time.monotonic() - start)
    assert errors > 20 and slowest < 3
    assert sorted(os.listdir(tmp_path)) == ["damaged", "image.sqsh", "t"]


STATUS = "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9\n\n"
CODE: dict[str, bytes | str] = {"numpy/__init__.py": "1", "numpy/x.so": b"\x7fELF"}
ENV = {**made.frame(), **made.package("numpy", "2.1", CODE)}
ROOT: dict[str, bytes | str] = {
    "bin/": "",
    "dev/": "",
    "etc/hostname": "lab\n",
    "etc/empty/": "",
    "opt/": "",
    "usr/lib/os-release": 'ID=debian\nVERSION_CODENAME=bookworm\nPRETTY_NAME="Debian 12"\n',
    "var/lib/dpkg/status": STATUS,
    **made.under("opt/env", ENV),
}
VARIABLES = {"PATH": "/opt/env/bin:/bin", "VIRTUAL_ENV": "/opt/env", "HF_TOKEN": "hunter2"}
VARIABLES |= {"TWO": "a b='c'", "EMPTY": ""}
RC = "# enroot-provenance: lab\n# org.envbuild.recipe lab\n# note of several words\n\nexec sh\n"


@pytest.fixture
def forms(command: Command) -> dict[str, str]:
    """One environment as a venv, an image, a .sqsh with enroot's files, and a .sif around the same."""
    folder = command.folder
    blobs = Blobs(folder / "blobs")
    layer = made.layer(blobs, ROOT, mtime=1577836800)
    env = [f"{name}={value}" for name, value in VARIABLES.items()]
    run = {"Env": env, "Cmd": ["sh", "-c", "true"], "WorkingDir": "/srv"}
    descriptor, _ = made.image(blobs, [layer], **run)
    made.layout(folder / "image", blobs, [(descriptor, "lab")])
    made.make_venv(folder / "venv", ENV)
    root = folder / "root"
    root.mkdir()
    tar = ["tar", "-xp", "-f", str(blobs.path(layer.blob.digest)), "-C", str(root)]
    subprocess.run(tar, check=True)
    mksquashfs(root, folder / "plain.sqsh", "-root-mode", "0755", "-comp", "gzip")
    lines = "".join(f"{name}={value}\n" for name, value in VARIABLES.items())
    for name, text in {"rc": RC, "rc.local": "", "environment": lines}.items():
        (root / "etc" / name).write_text(text)
    mksquashfs(root, folder / "lab.sqsh", "-root-mode", "0755", "-comp", "zstd")
    labels = {"org.envbuild.recipe": "lab", "note": "of several words"}
    write_sif(folder / "lab.sqsh", folder / "lab.sif", run, labels)
    return {"venv": "venv", "image": "image", "sqsh": "lab.sqsh", "sif": "lab.sif"}


def test_a_squashfs_and_a_sif_tell_what_an_image_tells(command: Command, forms: dict[str, str]) -> None:
    found = {form: command.json("inspect", forms[form]) for form in forms}
    image, sqsh, sif = found["image"], found["sqsh"], found["sif"]
    same = ("python_packages", "debian_packages", "python", "plan", "target")
    for key in (*same, "env", "recipe", "platform"):
        assert sqsh[key] == sif[key], key
    for key in (*same, "env"):
        assert sqsh[key] == image[key] is not None, key
    assert sqsh["env"] == {**VARIABLES, "HF_TOKEN": "****"}
    assert sqsh["base"]["suite"] == "bookworm" and sqsh["platform"] == "linux/amd64"
    assert sqsh["labels"] == sif["labels"] == {"org.envbuild.recipe": "lab", "note": "of several words"}
    assert (sif["cmd"], sif["workdir"]) == (["sh", "-c", "true"], "/srv")
    assert (sqsh["kind"], sif["kind"]) == ("squashfs", "sif")
    assert sqsh["filesystem"] == "squashfs, zstd, blocks of 128 KiB"
    for form in ("sqsh", "sif"):
        data = (command.folder / forms[form]).read_bytes()
        assert found[form]["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
        assert found[form]["stored"] == len(data)
        bom = json.loads(command("inspect", forms[form], "--sbom", "cyclonedx").stdout)
        assert bom["metadata"]["component"]["type"] == "container"
        assert [c["purl"] for c in bom["components"]] == [
            "pkg:deb/debian/libc6@2.36-9?arch=amd64&distro=bookworm",
            "pkg:pypi/numpy@2.1",
        ]
        shown = command("inspect", f"{form}:{forms[form]}").stdout
        assert "numpy" in shown and "hunter2" not in shown


@pytest.mark.parametrize(
    "script",
    [
        "#!/bin/sh\nexport PATH='/a b:/c'\n[ -n \"${NOTE:-}\" ] || NOTE='it'\\''s\n\"two\"'\nexport NOTE\n",
        '#!/bin/sh\nexport PATH="/a b:/c"\nexport NOTE="${NOTE:-"it\'s\n\\"two\\""}"\n',
    ],
    ids=["ours", "Apptainer's"],
)
def test_variables_are_read_from_what_sets_them(command: Command, script: str) -> None:
    place = command.folder / "root/.singularity.d/env/10-docker2singularity.sh"
    place.parent.mkdir(parents=True)
    place.write_text(script)
    (command.folder / "root/etc").mkdir()
    (command.folder / "root/etc/environment").write_text("PATH=/other\n")
    mksquashfs(command.folder / "root", command.folder / "image.sqsh")
    found = command.json("inspect", "image.sqsh")
    assert found["env"] == {"PATH": "/a b:/c", "NOTE": 'it\'s\n"two"'}
    mksquashfs(command.folder / "root/etc", command.folder / "image.sqsh")
    assert command.json("inspect", "image.sqsh")["env"] == {}
    place.write_text("export NOTE='without an end")
    mksquashfs(command.folder / "root", command.folder / "image.sqsh")
    assert command.json("inspect", "image.sqsh")["env"] == {"PATH": "/other"}


def test_differences_are_those_of_content_whatever_holds_the_files(command: Command, forms: dict[str, str]) -> None:
    assert command("diff", forms["sqsh"], forms["sif"]).stdout == "equal\n"
    assert command("diff", forms["venv"], forms["sqsh"]).stdout == "equal\n"
    assert command("diff", "plain.sqsh", forms["image"]).stdout == "equal\n"
    done = command("diff", forms["image"], forms["sif"], "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and not found["settings"]
    assert not found["python_packages"] and not found["debian_packages"]
    added = [(change["change"], change["name"]) for change in found["files"]]
    assert added == [("added", f"etc/{name}") for name in ("environment", "rc", "rc.local")]
    # another compressor is no difference, another content is
    root = command.folder / "root"
    mksquashfs(root, command.folder / "other.sqsh", "-root-mode", "0755", "-comp", "xz")
    assert command("diff", forms["sif"], "other.sqsh").stdout == "equal\n"
    (root / "opt/env" / made.SITE / "numpy/__init__.py").write_text("2")
    os.chmod(root / "etc/hostname", 0o600)
    shutil.rmtree(root / "opt/env" / made.SITE / "numpy-2.1.dist-info")
    mksquashfs(root, command.folder / "other.sqsh", "-root-mode", "0755")
    for one in ("sqsh", "sif", "venv", "image"):
        found = json.loads(command("diff", forms[one], "other.sqsh", "--json", "--all").stdout)
        assert [(c["change"], c["name"]) for c in found["python_packages"]] == [("removed", "numpy")]
        names = {change["name"]: change for change in found["files"]}
        code = f"{made.SITE}/numpy/__init__.py"
        assert names[code if one == "venv" else f"opt/env/{code}"]["change"] == "changed"
        assert one == "venv" or names["etc/hostname"]["what"] == {"mode": ["0644", "0600"]}


def test_what_cannot_be_read_is_said_and_is_no_traceback(command: Command, forms: dict[str, str]) -> None:
    folder = command.folder
    whole = (folder / forms["sif"]).read_bytes()
    (folder / "cut.sif").write_bytes(whole[:-100])
    (folder / "cut.sqsh").write_bytes((folder / forms["sqsh"]).read_bytes()[:1000])
    mksquashfs(folder / "root", folder / "lzo.sqsh", "-comp", "lzo")
    for name, code, said in [
        ("cut.sif", 4, "cut.sif: damaged: object 4 lies outside of the file"),
        ("cut.sqsh", 4, "cut.sqsh: cut short: 1000 bytes"),
        ("lzo.sqsh", 4, "compressor lzo"),
        ("sqsh:lab.sif", 2, "not a squashfs image"),
        ("sif:lab.sqsh", 2, "not a SIF"),
        ("sqsh:nowhere", 2, "does not exist"),
        ("sqsh:root", 2, "not a file"),
    ]:
        done = command("inspect", name)
        assert (done.returncode, done.stdout) == (code, ""), (name, done.stderr)
        assert said in done.stderr, done.stderr
    done = command("inspect", forms["sif"], "--target", "cpu-aarch64")
    assert done.returncode == 2 and "is for x86_64, not for aarch64" in done.stderr
