"""Commands that change files, each on a tiny recipe, and what must hold after one of them was stopped anywhere.

A case begins with the artifact of the recipe's first version, and its store; the command makes that of the second.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path

from lab import registry
from lab.conda_package import Metadata, conda_package
from lab.conda_server import serve
from lab.faults import FAULTS, READ, Commands, Ran, commands
from lab.wheels import make_recipe, make_wheel

from envbuild.base.packages import digest_of
from envbuild.cache.http import Transport
from envbuild.contract.receipt import receipt_path
from envbuild.image.entry import FILE, Entry
from envbuild.image.layer import with_parents, write_layer
from envbuild.image.layout import Blobs
from envbuild.image.model import GOARCH, OCI_CONFIG, OCI_MANIFEST, Descriptor, canonical
from envbuild.image.registry import open_registry
from envbuild.image.sif import content_digest
from envbuild.layers.store_check import check_store
from envbuild.store.store import Store

ARCH = os.uname().machine
_OUT = "out"
_DAY_S = 86400
# Exit codes that the README documents for a failure that is not envbuild's.
_CODES = {0, 2, 3, 4, 5, 6}
# Paths that have another name each time: uv's own cache, notes of digests by path and stat, and the file by which
# Python's tempfile tries a folder, which stays when it is killed there.
_NOISE = re.compile(r"store/(uv|digests|seals)(/|$)|store/conda/(pkgs|stamps|repodata)(/|$)|tmp/\w{8}$")
_VERSIONS = (["alpha==1.0", "beta==1.0"], ["alpha==2.0", "gamma==1.0"])


@dataclass(frozen=True)
class Case:
    """A command, and the path of its artifact below the work folder; "" for one in the registry.

    `kind` is the recipe's: "wheels", "image" or "conda". `relock` are commands that come after each change of the
    recipe, and the first of `before` is one that makes what the command reads. A case with `made` works on what that
    command made, and changes nothing that counts. A command that runs `once` refuses to replace its artifact.
    """

    name: str
    command: tuple[str, ...]
    artifact: str
    kind: str = "wheels"
    relock: tuple[tuple[str, ...], ...] = ()
    made: tuple[str, ...] = ()
    before: tuple[tuple[str, ...], ...] = ()
    once: bool = False


_LOCK = ("lock", "small", "--wheels")
_IMAGE_LOCK = ("lock", "small", "--wheels", "--image")
_CONDA_LOCK = ("lock", "small", "--conda")
_BUILT = ("--locked", "--no-verify", "--out")


_OCI = ("docker", "small", *_BUILT, f"oci:{_OUT}/image")


# Verified, for its receipt: without a trainer that is a matter of milliseconds.
_VENV = ("venv", "small", "--locked", "--out", f"{_OUT}/v")
_PUSHED = "REGISTRY/small:1"
# No runtime starts the images of this lab: they get the receipt of a venv with their own digest.
_RECEIPT = "receipt"


def _of_venv(name: str, command: tuple[str, ...], artifact: str, *before: tuple[str, ...]) -> Case:
    return Case(name, command, artifact, "verified", (_LOCK,), before=(_VENV, *before))


def _of_image(name: str, command: tuple[str, ...], artifact: str, kind: str, *before: tuple[str, ...]) -> Case:
    """Return a case that works on a .sqsh or .sif with a receipt."""
    image = f"{_OUT}/i.{'sqsh' if kind == 'enroot' else 'sif'}"
    made = (_VENV, (kind, "small", *_BUILT, image), (_RECEIPT, kind, image))
    return Case(name, command, artifact, "verified", (_IMAGE_LOCK,), before=(*made, *before))


def _image(name: str, command: str, out: str, path: str) -> Case:
    return Case(name, (command, "small", *_BUILT, out), path, "image", (_IMAGE_LOCK,))


CASES = {
    case.name: case
    for case in (
        Case("lock", _LOCK, f"recipes/small/cpu-{ARCH}.requirements.txt"),
        Case("lock-image", ("lock", "small", "--image"), f"recipes/small/cpu-{ARCH}.image.toml", "image"),
        Case("lock-conda", _CONDA_LOCK, "recipes/small/cpu.conda-lock.yml", "conda"),
        Case("venv", ("venv", "small", *_BUILT, f"{_OUT}/v"), f"{_OUT}/v", relock=(_LOCK,)),
        Case("conda", ("conda", "small", *_BUILT, f"{_OUT}/c"), f"{_OUT}/c", "conda", (_CONDA_LOCK,)),
        _image("oci", "docker", f"oci:{_OUT}/image", f"{_OUT}/image"),
        _image("archive", "docker", f"docker-archive:{_OUT}/image.tar", f"{_OUT}/image.tar"),
        _image("enroot", "enroot", f"{_OUT}/i.sqsh", f"{_OUT}/i.sqsh"),
        _image("apptainer", "apptainer", f"{_OUT}/i.sif", f"{_OUT}/i.sif"),
        Case(
            "push",
            ("docker", "small", "--locked", "--no-verify", "--push", "--tag", "REGISTRY/small:1"),
            "",
            "image",
            (_IMAGE_LOCK,),
        ),
        Case("bundle", ("bundle", "small", "--no-tools", "--out", f"{_OUT}/b"), f"{_OUT}/b", relock=(_LOCK,)),
        _of_venv("push-venv", ("push", f"{_OUT}/v", _PUSHED), ""),
        _of_image("push-sqsh", ("push", f"{_OUT}/i.sqsh", _PUSHED), "", "enroot"),
        _of_venv(
            "pull-venv",
            ("pull", _PUSHED, "--no-verify", "--out", f"{_OUT}/w"),
            f"{_OUT}/w",
            ("push", f"{_OUT}/v", _PUSHED),
        ),
        _of_image(
            "pull-sqsh",
            ("pull", _PUSHED, "--out", f"{_OUT}/w.sqsh"),
            f"{_OUT}/w.sqsh",
            "enroot",
            ("push", f"{_OUT}/i.sqsh", _PUSHED),
        ),
        _of_venv("report", ("report", f"{_OUT}/v", "--out", f"{_OUT}/r.html"), f"{_OUT}/r.html"),
        _of_venv("attest", ("attest", f"{_OUT}/v", "--key", "KEY", "--with", "sbom"), f"{_OUT}/v.sigstore.json"),
        _of_image("attest-sif", ("attest", f"{_OUT}/i.sif", "--key", "KEY"), f"{_OUT}/i.sif", "apptainer"),
        Case(
            "init",
            ("init", "fresh", "--from", f"recipes/small/cpu-{ARCH}.requirements.txt"),
            "recipes/fresh",
            relock=(_LOCK,),
            once=True,
        ),
        Case("check", ("store", "check"), "store/blobs", "image", (_IMAGE_LOCK,), made=_OCI),
    )
}


def missing() -> str | None:
    """Why the cases cannot run here; None when they can."""
    from lab import faults

    return faults.missing() or registry.missing()


@dataclass
class Outcome:
    """What one faulted run came to: `result` is one word, `wrong` what broke a promise."""

    result: str
    ran: Ran
    wrong: list[str] = field(default_factory=list)


@dataclass
class Walk:
    """One case, ready to be walked: `calls` of an undisturbed run, and the digests of the old and the new artifact."""

    case: Case
    lab: Lab
    calls: int = 0
    old: str = ""
    new: str = ""
    files: frozenset[str] = frozenset()

    def try_at(self, fault: str, number: int, only: str = "") -> Outcome:
        """Run the command with `fault` at call `number`, judge what is left, then run it again without a fault.

        `only` is a pattern of paths below the root: other calls do not count.
        """
        self.lab.restore(self.case.name)
        ran = self.lab.run(self.case.command, fault, number, only)
        wrong = list(_faults_of(ran, fault))
        found = self.digest()
        which = {self.old: "old", self.new: "new"}.get(found, "neither")
        # rattler copies a file where it cannot make a symbolic link: docs/reliability.md says so.
        copied = ran.status == 0 and ran.tool and ran.call == "symlink" and self.case.kind == "conda"
        if not copied and (which == "neither" or (ran.status == 0 and which != "new")):
            wrong.append(f"the artifact is {which}")
        bad = self.lab.check_store()
        if bad:
            wrong.append(f"the store had {bad}")
        self.lab.age_leftovers()
        if self.case.once and which == "new":
            shutil.rmtree(self.lab.root / self.case.artifact)
        again = self.lab.run(self.case.command)
        if again.status != 0:
            wrong.append(f"the next call ended with {again.status}: {again.said.strip()[-600:]}")
        elif not copied and self.digest() != self.new:
            wrong.append("the next call made something else")
        elif more := sorted(self.lab.files() - self.files):
            wrong.append(f"left behind: {', '.join(more[:6])}")
        if bad := self.lab.check_store():
            wrong.append(f"after the next call, the store had {bad}")
        result = "hung" if ran.status is None else "killed" if ran.status < 0 else f"exit {ran.status}"
        return Outcome(f"{result}, {which}", ran, wrong)

    def calls_for(self, fault: str) -> int:
        """Return the number of calls of an undisturbed run that `fault` can hit."""
        if not fault.startswith(READ):
            return self.calls
        self.lab.restore(self.case.name)
        return self.lab.run(self.case.command, fault, sys.maxsize).calls

    def digest(self) -> str:
        """Return the digest of the artifact as it is now."""
        return self.lab.pushed() if not self.case.artifact else tree_digest(self.lab.root / self.case.artifact)


def _faults_of(ran: Ran, fault: str) -> Iterator[str]:
    number = FAULTS[fault.removeprefix(READ)][0]
    if ran.status is None:
        yield "it hung"
    elif ran.status not in _CODES and not (fault == "kill" and ran.status == -9):
        yield f"it ended with {ran.status}: {ran.said.strip()[-600:]}"
    elif ran.status > 0 and not re.search(r"(?s)error: .*(/|small|out)", ran.said):
        yield f"its message names nothing: {ran.said.strip()[-600:]}"
    elif ran.status > 0 and number > 0 and not ran.tool and os.strerror(number) not in ran.said:
        yield f"its message does not say why: {ran.said.strip()[-600:]}"
    if "Traceback (most recent call last)" in ran.said or "panicked at" in ran.said:
        yield f"a traceback: {ran.said.strip()[-1500:]}"


@dataclass
class Lab:
    """The folder `root` in which commands run, and `start`, which keeps the folder as it is before each case."""

    root: Path
    start: Path
    run_command: Commands
    registry: registry.Lab
    channel: str
    key: Path

    def run(self, arguments: tuple[str, ...], fault: str | None = None, number: int = 0, only: str = "") -> Ran:
        names = {"REGISTRY": self.registry.address, "KEY": str(self.key)}
        words = [re.sub("REGISTRY|KEY", lambda found: names[found[0]], word) for word in arguments]
        return self.run_command(words, self.root, fault, number, only)

    def done(self, *arguments: str) -> Ran:
        """Run a command that must succeed, or write the receipt of an image."""
        if arguments[0] == _RECEIPT:
            return self._receipt(*arguments[1:])
        ran = self.run(arguments)
        assert ran.status == 0, f"{arguments}: {ran.status}: {ran.said}"
        return ran

    def walk(self, case: Case) -> Walk:
        """Prepare `case`: its start is kept, and its undisturbed run is what others are compared with."""
        self._clear()
        self._recipe(case.kind, 0)
        for command in (*case.relock, *case.before):
            self.done(*command)
        if not case.once:
            self.done(*(case.made or case.command))
        if not case.made:
            self._recipe(case.kind, 1)
            for command in (*case.relock, *case.before):
                self.done(*command)
        self._keep(case.name)
        walk = Walk(case, self)
        walk.old = walk.new = walk.digest()
        if case.before or case.once:
            self.done(*case.command)
            walk.new = walk.digest()
            assert walk.new != walk.old, case.name
        elif not case.made:  # what a fresh store gives is the measure, at the same path
            shutil.rmtree(self.root / "store")
            shutil.rmtree(self.root / _OUT)
            (self.root / _OUT).mkdir()
            self.done(*case.command)
            walk.new = walk.digest()
            assert walk.new != walk.old, case.name
        self.restore(case.name)
        walk.calls = self.done(*case.command).calls
        assert walk.digest() == walk.new, f"{case.name}: another artifact from a store that was used"
        if not case.once:
            self.done(*case.command)
        walk.files = frozenset(self.files())
        return walk

    def restore(self, name: str) -> None:
        """Make the folder what it was before the case's command."""
        for kept, used in self._folders(name):
            shutil.rmtree(used, ignore_errors=True)
            subprocess.run(["cp", "-a", kept, used], check=True)

    def check_store(self) -> list[str]:
        """Check the store as `envbuild store check` does; return the files that were damaged, which it removes."""
        with open(os.devnull, "w") as null, redirect_stderr(null):
            return [path.name for path in check_store(Store(self.root / "store"), 1)[2]]

    def age_leftovers(self) -> None:
        """Let unfinished files in the store be a month old: those that another process may still write are kept."""
        for path in (self.root / "store").rglob("*"):
            if ".new-" in path.name or path.suffix == ".lock" or "partial" in path.parts:
                with_age = path.lstat().st_mtime - 30 * _DAY_S
                os.utime(path, (with_age, with_age), follow_symlinks=False)

    def files(self) -> set[str]:
        """Return every path below the root whose name says something."""
        found = (str(path.relative_to(self.root)) for path in self.root.rglob("*"))
        return {path for path in found if not _NOISE.match(path)}

    def pushed(self) -> str:
        """Return the digest of what the tag in the registry names."""
        request = urllib.request.Request(
            f"http://{self.registry.address}/v2/small/manifests/1", headers={"Accept": OCI_MANIFEST}
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return digest_of(answer.read())

    def _folders(self, name: str) -> list[tuple[Path, Path]]:
        kept = self.start / name
        return [(kept / "root", self.root), (kept / "registry", self.registry.storage)]

    def _keep(self, name: str) -> None:
        for kept, used in self._folders(name):
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(kept, ignore_errors=True)
            subprocess.run(["cp", "-a", used, kept], check=True)

    def _clear(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        for name in ("tmp", _OUT, "recipes"):
            (self.root / name).mkdir(parents=True)

    def _receipt(self, kind: str, image: str) -> Ran:
        """Write the receipt of `image`: that of the venv, whose checks say nothing of it."""
        receipt = json.loads((self.root / _OUT / "v.receipt.json").read_text())
        place = self.root / image
        receipt["artifact"] = {"kind": kind, "path": str(place), "digest": content_digest(place)}
        receipt_path(place).write_text(json.dumps(receipt))
        return Ran(0, "", 0, "", "", False)

    def _recipe(self, kind: str, version: int) -> None:
        target = f"[targets.cpu-{ARCH}]\n"
        extra, wheels = "", _VERSIONS[version]
        if kind in ("image", "verified"):
            base = f"{self.registry.address}/base:{version}"
            extra = f'[image]\nbase = "{base}"\npython = "/usr/bin/python3.11"\n'
        if kind == "verified":
            extra += "[verify]\ntrainer = false\n"
        if kind == "conda":
            tools = ["labtool ==1.0", "labtool ==2.0"][version]
            extra = f'[conda]\nchannels = ["{self.channel}"]\ndependencies = ["python 3.11.*", "{tools}"]\n'
            extra += f"requirements = {json.dumps(wheels)}\n"
            wheels = []
        make_recipe(self.root / "recipes", "small", wheels, targets=target, extra=extra)


@contextmanager
def lab(folder: Path) -> Iterator[Lab]:
    """Yield a lab below `folder`."""
    _wheels(folder / "wheels")
    _channel(folder / "channel")
    root = folder / "root"
    for name in ("work", "start"):
        (folder / name).mkdir()
    with registry.registry(folder / "registry") as images, serve(folder / "channel") as conda:
        (folder / "site.toml").write_text(f'[registries."{images.address}"]\ninsecure = true\n')
        (folder / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {folder / 'wheels'}\n")
        for version in (0, 1):
            _push_base(folder / "base", images.address, version)
        env = {
            "ENVBUILD_STORE": str(root / "store"),
            "ENVBUILD_SITE": str(folder / "site.toml"),
            "PIP_CONFIG_FILE": str(folder / "pip.conf"),
            "PIP_FIND_LINKS": str(folder / "wheels"),
            "PIP_NO_INDEX": "1",
            "TMPDIR": str(root / "tmp"),
            "HOME": str(folder / "work"),
            "DOCKER_HOST": "unix:///nonexistent/docker.sock",
            "SLURM_CPUS_ON_NODE": "1",  # one thread: the n-th call is the same one each time
        }
        root.mkdir()
        key = folder / "key.pem"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
        with commands(folder / "work", root, env) as run:
            yield Lab(root, folder / "start", run, images, conda.url, key)


def _wheels(folder: Path) -> None:
    for name, version in (("alpha", "1.0"), ("alpha", "2.0"), ("beta", "1.0"), ("gamma", "1.0")):
        files = {f"{name}/part.py": f"x = {version}\n".encode(), f"{name}/data/noise": bytes(range(256)) * 40}
        make_wheel(folder, name, version, files=files)


def _channel(folder: Path) -> None:
    """A channel whose Python is this machine's: a program that finds its packages in the environment."""
    from rattler.index import index_fs

    python = Metadata("python", "3.11.2", "0_lab", "noarch", noarch="generic")
    with conda_package(folder, python) as package:
        program = f'#!/bin/bash\nexec -a "$0" {os.path.realpath("/usr/bin/python3.11")} "$@"\n'
        package.file("bin/python3.11", program.encode(), executable=True)
        package.link("bin/python", "python3.11")
        package.link("bin/python3", "python3.11")
        package.file("pyvenv.cfg", b"home = /usr/bin\n")
        package.file("lib/python3.11/site-packages/README.txt", b"")
    for version in ("1.0", "2.0"):
        with conda_package(folder, Metadata("labtool", version, "0", "noarch", noarch="generic")) as package:
            package.file("share/labtool/version", version.encode())
            package.file("bin/labtool", f"#!/bin/sh\necho {version}\n".encode(), executable=True)
    asyncio.run(index_fs(folder, force=True))


def _push_base(folder: Path, address: str, version: int) -> None:
    """Push the image base:`version` of a few files: nothing in it is ever started."""
    blobs = Blobs(folder)
    files = {"usr/bin/python3.11": b"\x7fELF", "bin/sh": b"\x7fELF", "etc/version": b"%d" % version}
    entries = [(Entry(path, FILE, 0o755, len(data), mtime=1), io.BytesIO(data)) for path, data in files.items()]
    layer = write_layer(with_parents(iter(entries), 1), blobs)
    config = canonical(
        {
            "architecture": GOARCH[ARCH],
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id]},
        }
    )
    described = Descriptor(OCI_CONFIG, digest_of(config), len(config))
    blobs.add(config)
    manifest = canonical(
        {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": described.as_json(), "layers": [layer.blob.as_json()]}
    )
    there = open_registry(f"{address}/base:{version}", Transport(insecure=frozenset([address])), {})
    there.push(blobs, [described, layer.blob], manifest, OCI_MANIFEST, str(version))
    there.close()


def tree_digest(root: Path) -> str:
    """Return a digest of a file or folder: paths, types, modes, contents; "" without one.

    Left out are times: conda's history, and uv's note of a wheel's, with the lines that hold their digests.
    """
    if not root.exists():
        return ""
    found = hashlib.sha256()
    for path in [root, *sorted(root.rglob("*"))]:
        about = path.lstat()
        found.update(f"{path.relative_to(root)}\0{about.st_mode:o}\0".encode())
        if path.is_symlink():
            found.update(os.fsencode(os.readlink(path)))
        elif path.is_file():
            data = path.read_bytes()
            if path.name in ("history", "uv_cache.json"):
                continue
            if path.name in ("RECORD", "envbuild.manifest"):
                data = re.sub(rb".*(history|uv_cache.json|RECORD).*", b"", data)
            found.update(hashlib.sha256(data).digest())
    return found.hexdigest()
