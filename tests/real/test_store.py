"""The store is pruned while several builds use it: every artifact is the one that an undisturbed build gives.

PRUNE_ROUNDS=50 pytest tests/real/test_store.py
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import tarfile
import threading
from pathlib import Path

from .conftest import Command

ROUNDS = int(os.environ.get("PRUNE_ROUNDS", "4"))
BUILDS = 4


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def layer(chance: random.Random, *names: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in names:
            add(tar, name, chance.randbytes(200_000))
    return out.getvalue()


def write_archive(path: Path, layers: list[bytes]) -> None:
    """Write an image in the form of `docker save` (moby, image/tarexport)."""
    diff_ids = [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in layers]
    config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    with tarfile.open(path, "w") as tar:
        for number, one in enumerate(layers):
            add(tar, f"{number}/layer.tar", one)
        add(tar, "config.json", json.dumps(config).encode())
        names = [f"{number}/layer.tar" for number in range(len(layers))]
        add(tar, "manifest.json", json.dumps([{"Config": "config.json", "RepoTags": [], "Layers": names}]).encode())


def test_nothing_is_lost_to_builds_that_run_beside_a_prune(tmp_path: Path) -> None:
    chance = random.Random(17)
    common = layer(chance, "etc/common", "usr/lib/common")
    for number in range(BUILDS):
        write_archive(tmp_path / f"{number}.tar", [common, layer(chance, f"srv/{number}"), layer(chance, "srv/last")])

    def build(number: int, store: str, out: str) -> str:
        line = ("enroot", "--from", f"docker-archive:{number}.tar", "--target", "cpu-x86_64", "--out", out, "--json")
        done = Command(tmp_path, {"ENVBUILD_STORE": str(tmp_path / store)})(*line)
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["digest"])

    wanted = [build(number, "untouched", f"{number}.sqsh") for number in range(BUILDS)]
    pruned, faults, made = threading.Event(), [], []

    def builds(number: int) -> None:
        try:
            while not pruned.is_set():
                made.append(build(number, "pruned", f"again-{number}.sqsh") == wanted[number])
        except BaseException as fault:  # noqa: BLE001 - the test's thread raises it
            faults.append(fault)

    threads = [threading.Thread(target=builds, args=(number,)) for number in range(BUILDS)]
    for thread in threads:
        thread.start()
    prune = Command(tmp_path, {"ENVBUILD_STORE": str(tmp_path / "pruned")})
    removed = [len(prune.json("store", "prune", "--keep", "0")["removed"]) for _ in range(ROUNDS)]
    pruned.set()
    for thread in threads:
        thread.join()
    assert not faults and made and all(made), (faults, made)
    assert json.loads(prune("store", "check", "--json").stdout)["removed"] == []
    # Pruned to nothing between builds, it is filled again.
    removed.append(len(prune.json("store", "prune", "--keep", "0")["removed"]))
    assert sum(removed) > 0 and build(0, "pruned", "again.sqsh") == wanted[0]
