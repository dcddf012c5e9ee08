"""A Debian base from the host's own apt sources: resolved, fetched, unpacked, run, and held against
dpkg-deb, mmdebstrap and dpkg."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest

from envbuild.debian.base import fetch_debs, resolve_base
from envbuild.debian.control import compare_versions
from envbuild.debian.lock import DEBIAN_ARCH, DebianLock, default_packages, default_without, from_table, load_rules
from envbuild.debian.release import archives, debian_client, host_archives
from envbuild.debian.rootfs import debian_tree, merged
from envbuild.site.pip_config import load_pip_config
from envbuild.store.store import Store

MTIME = 1_700_000_000
TYPES = {"file": tarfile.REGTYPE, "dir": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE}
IMPORTS = (
    "import ssl, sqlite3, ctypes, lzma, bz2, readline, json, zlib, uuid, curses, pwd, hashlib, locale\n"
    "assert len(ssl.create_default_context().get_ca_certs()) > 100\n"
    "assert pwd.getpwuid(0).pw_shell == '/bin/bash'\n"
    "ctypes.CDLL('libgomp.so.1'), ctypes.CDLL('libstdc++.so.6')\n"
    "answer = sqlite3.connect(':memory:').execute('select 40 + 2').fetchone()[0]\n"
    "print(answer, locale.setlocale(locale.LC_ALL, 'C.UTF-8'))"
)

pytestmark = [
    pytest.mark.skipif(not host_archives("bookworm"), reason="apt on this host names no Debian archive"),
    pytest.mark.skipif(os.geteuid() != 0, reason="unpacking with owners and chroot need root"),
]


@dataclass(frozen=True)
class Base:
    """A base of one suite and architecture: its lock, packages, tar, and the tar unpacked."""

    lock: DebianLock
    debs: list[Path]
    tar: Path
    root: Path

    def write(self, out: Path) -> Path:
        with tarfile.open(out, "w") as archive:
            for entry, content in debian_tree(list(zip(self.lock.packages, self.debs, strict=True)), MTIME):
                item = tarfile.TarInfo(entry.path)
                item.type, item.mode, item.size = TYPES[entry.kind], entry.mode, entry.size
                item.linkname, item.uid, item.gid = entry.target, entry.uid, entry.gid
                item.mtime = entry.mtime
                archive.addfile(item, content)  # type: ignore[arg-type]
        return out

    def run(self, *command: str) -> str:
        done = subprocess.run(["chroot", self.root, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Base]:
    """Makes a base once for each suite and architecture; packages are kept in one store."""
    folder = tmp_path_factory.mktemp("debian")

    @lru_cache
    def make(suite: str, arch: str) -> Base:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        client, store = (debian_client(load_pip_config(os.environ), os.environ), Store(folder))
        began = time.monotonic()
        lock = resolve_base(
            suite,
            default_packages(suite),
            default_without(),
            arch,
            archives=archives(suite, now),
            client=client,
            store=store,
        )
        resolved = time.monotonic()
        debs = fetch_debs(lock, store, archives(suite, lock.date), client)
        fetched = time.monotonic()
        made = Base(lock, debs, folder / f"{suite}-{arch}.tar", folder / f"{suite}-{arch}")
        made.write(made.tar)
        written = time.monotonic()
        made.root.mkdir()
        subprocess.run(["tar", "-xpf", made.tar, "-C", made.root], check=True)
        print(
            f"{suite} {arch}: {len(debs)} packages, {sum(p.size for p in lock.packages) / 1e6:.1f} MB, "
            f"tree {made.tar.stat().st_size / 1e6:.1f} MB; resolve {resolved - began:.1f} s, "
            f"fetch {fetched - resolved:.1f} s, tree {written - fetched:.1f} s"
        )
        return made

    return make


Make = Callable[[str, str], Base]
HOST = os.uname().machine
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}[HOST]
TARGETS = [("bookworm", OTHER), ("trixie", HOST)]


@pytest.mark.parametrize(("suite", "arch"), TARGETS)
def test_a_base_is_small_and_the_same_twice(base: Make, suite: str, arch: str, tmp_path: Path) -> None:
    made = base(suite, arch)
    assert from_table(made.lock.as_toml_table(), "lock") == made.lock
    assert {p.arch for p in made.lock.packages} == {"all", DEBIAN_ARCH[arch]}
    assert not {p.name for p in made.lock.packages} & set(default_without())
    assert made.tar.stat().st_size < 100e6
    again = made.write(tmp_path / "again.tar")
    assert again.read_bytes() == made.tar.read_bytes()


def test_programs_run_in_a_base_of_this_architecture(base: Make) -> None:
    """Images of the other real tests run on bookworm."""
    made = base("trixie", HOST)
    assert made.run("/usr/bin/python3", "-c", IMPORTS) == "42 C.UTF-8\n"
    script = (
        "id -un; bash -c 'echo ${BASH_VERSION%%.*}'; awk 'BEGIN{print 6*7}'; which tar; "
        "getent passwd www-data | cut -d: -f1; readlink /bin/sh; find /tmp -maxdepth 0; echo a | sed s/a/b/ | grep b"
    )
    assert made.run("/bin/sh", "-c", script).split() == [
        "root",
        "5",
        "42",
        "/usr/bin/tar",
        "www-data",
        "dash",
        "/tmp",
        "b",
    ]
    # No ld.so.cache: what every program and module needs is found all the same.
    files = "/usr/bin/* /usr/lib/python3*/lib-dynload/*.so /usr/lib/**/*.so.*"
    script = f"shopt -s globstar nullglob; LC_ALL=C ldd {files} 2>/dev/null || true"
    libraries = made.run("/bin/bash", "-c", script)
    assert "libc.so.6" in libraries and "not found" not in libraries


def test_python_of_another_architecture_runs_under_emulation(base: Make) -> None:
    emulator = shutil.which(f"qemu-{OTHER}-static")
    if emulator is None:
        pytest.skip(f"qemu-{OTHER}-static is not installed (package qemu-user-static)")
    made = base("bookworm", OTHER)
    inside = made.root / "emulator"
    shutil.copy(emulator, inside)
    try:
        assert made.run("/emulator", "/usr/bin/python3", "-c", IMPORTS) == "42 C.UTF-8\n"
        assert made.run("/emulator", "/bin/sh", "-c", "echo $((6*7))") == "42\n"
    finally:
        inside.unlink()


@pytest.mark.parametrize(("suite", "arch"), TARGETS)
def test_dpkg_knows_exactly_the_locked_packages(base: Make, suite: str, arch: str) -> None:
    made = base(suite, arch)
    form = "${Package} ${Version} ${Architecture} ${db:Status-Abbrev}\n"
    query = ["dpkg-query", f"--admindir={made.root}/var/lib/dpkg", "-W", "-f", form]
    listed = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    assert sorted(listed) == sorted(f"{p.name} {p.version} {p.arch} ii " for p in made.lock.packages)
    # Every file has the content that its package says, but for those that the slim rule left out.
    verify = ["dpkg", f"--root={made.root}", "--verify"]
    faults = subprocess.run(verify, capture_output=True, text=True)
    assert not faults.stderr
    paths = [line.split()[-1].lstrip("/") for line in faults.stdout.splitlines()]
    assert all(line.startswith("missing") for line in faults.stdout.splitlines())
    assert paths and not [p for p in paths if not load_rules().drop.fullmatch(p)]


Description = tuple[str, int, str, str]


def described(tar: Path) -> dict[str, Description]:
    """Each path of a tar with its kind, mode, link target, and the digest of its content."""
    found: dict[str, Description] = {}
    with tarfile.open(tar) as archive:
        for item in archive:
            # mmdebstrap's extract variant leaves /bin, /lib and so on apart.
            path = merged(item.name.removeprefix("./").strip("/"))
            if path in (".", "") or (item.isdir() and path in ("bin", "sbin", "lib", "lib64")):
                continue
            stream = archive.extractfile(item) if item.isfile() else None
            digest = hashlib.file_digest(stream, "sha256").hexdigest() if stream else ""  # type: ignore[arg-type]
            kind = next((k for k, t in TYPES.items() if t == item.type), "other")
            if item.islnk():  # which of two names is the link is the writer's choice
                kind, digest = "file", found[merged(item.linkname.removeprefix("./"))][3]
            target = item.linkname if item.issym() else ""
            found[path] = (kind, 0o777 if item.issym() else item.mode, target, digest)
    return found


def of_packages(made: Base) -> set[str]:
    """The paths that the packages of a base have, where they really lie, less what the slim rule drops."""
    rules, paths = load_rules(), set()
    for listing in (made.root / "var/lib/dpkg/info").glob("*.list"):
        for line in listing.read_text().splitlines():
            path = merged(line.lstrip("/"))
            if line != "/." and path not in ("bin", "sbin", "lib", "lib64", "var/run", "var/lock"):
                paths.add(path)
    return {p for p in paths if not rules.drop.fullmatch(p) or rules.keep.fullmatch(p)}


@pytest.mark.parametrize(("suite", "arch"), TARGETS)
def test_dpkg_deb_unpacks_the_same_files(base: Make, suite: str, arch: str, tmp_path: Path) -> None:
    made = base(suite, arch)
    root = tmp_path / "oracle"
    for name in ("bin", "sbin", "lib", *(["lib64"] if arch == "x86_64" else [])):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    names = [package.name for package in made.lock.packages]
    for deb in sorted(made.debs, key=lambda d: names[made.debs.index(d)] != "base-files"):
        fsys = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE)
        extract = ["tar", "-xp", "--keep-directory-symlink", "-C", root]
        subprocess.run(extract, stdin=fsys.stdout, check=True)
        assert fsys.wait() == 0
    subprocess.run(["tar", "-cf", tmp_path / "oracle.tar", "-C", root, "."], check=True)
    ours, theirs = described(made.tar), described(tmp_path / "oracle.tar")
    rules = load_rules()
    for path in of_packages(made):
        assert ours[path] == theirs[path], path
    assert not [p for p in theirs if p not in ours and not rules.drop.fullmatch(p)]


def test_mmdebstrap_has_the_same_files(base: Make, tmp_path: Path) -> None:
    """The same packages by name and version; apt adds those that scripts need, which we leave out."""
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is not installed")
    made = base("trixie", "x86_64")
    wanted = ",".join(f"{p.name}={p.version}" for p in made.lock.packages)
    lines = [f"deb {a.url} {a.suite} main" for a in host_archives("trixie")]
    subprocess.run(
        [
            "mmdebstrap",
            "--variant=extract",
            "--architectures=amd64",
            "--quiet",
            f"--include={wanted}",
            "trixie",
            tmp_path / "oracle.tar",
            *lines,
        ],
        check=True,
        capture_output=True,
    )
    ours, theirs = described(made.tar), described(tmp_path / "oracle.tar")
    different = {p: (ours[p], theirs.get(p)) for p in of_packages(made) if ours[p] != theirs.get(p)}
    assert not different


def test_versions_are_ordered_as_dpkg_orders_them(base: Make) -> None:
    versions = sorted({p.version for p in base("bookworm", OTHER).lock.packages})
    versions += [v + tail for v in versions[:12] for tail in ("~", "+b1", "a", ".0", "~~x", "-0")]
    pairs = [(a, b) for number, a in enumerate(versions[::3]) for b in versions[number::7]]
    for a, b in pairs:
        relation = {-1: "lt", 0: "eq", 1: "gt"}[compare_versions(a, b)]
        done = subprocess.run(["dpkg", "--compare-versions", a, relation, b])
        assert done.returncode == 0, (a, relation, b)
