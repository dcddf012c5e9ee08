"""`envbuild enroot` and `envbuild apptainer` as users run them: what they make, what they refuse, who can start it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lab import apptainer
from lab.apptainer import FLAGS, Apptainer
from lab.dockerd import Lab
from lab.wheels import make_recipe, make_wheel

from envbuild.base.packages import digest_of
from envbuild.contract.image_manifest import FILE_NAME
from envbuild.contract.receipt import receipt_path
from envbuild.image.entry import CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Entry
from envbuild.image.layer import Layer, write_layer
from envbuild.image.layout import Blobs, fill_layout
from envbuild.image.model import GOARCH, OCI_CONFIG, OCI_MANIFEST, Descriptor, canonical
from envbuild.run_environment import load_environment
from envbuild.verify.image_file import open_image_file, own_manifest
from envbuild.verify.image_runtime import open_file_subject
from envbuild.verify.static_checks import check_installed

from .conftest import Command, link_store, tiny_site, use_base_of_pt_minimal
from .test_docker_out import AS_NOBODY, NOBODY

ARCH = os.uname().machine
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}[ARCH]
TRAIN = ["torchrun", "--nproc-per-node", "1", "-m", "ddp_train", "2", "1"]
# What enroot and Apptainer need, and no image has by itself: docs/howto/squashfs.md.
ADDED = {"etc/rc", "etc/rc.local", "etc/environment", "etc/fstab", "singularity", "environment"}
ADDED |= {".run", ".exec", ".shell", ".test", ".singularity.d"}


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(p) for p in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def sha256(path: str | Path) -> str:
    with open(path, "rb") as stream:
        return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()


def test_both_artifacts_of_one_build_are_verified_and_hold_one_squashfs(tiny_squash: dict[str, Any]) -> None:
    for kind, suffix in (("enroot", ".sqsh"), ("apptainer", ".sif")):
        made = tiny_squash[kind]
        assert made["path"].endswith(f"build/tiny_image/cpu-{ARCH}/tiny_image{suffix}")
        assert made["verified"] and made["digest"] == sha256(made["path"])
        receipt = json.loads(Path(made["receipt"]).read_text())
        assert receipt["passed"] and receipt["artifact"]["digest"] == made["digest"]
        manifest = receipt["artifact"].pop("manifest")
        assert receipt["artifact"] == {"kind": kind, "path": made["path"], "digest": made["digest"]}
        assert manifest == own_manifest(open_image_file(Path(made["path"])))
        assert receipt["runtime"].startswith(("own:", "apptainer", "singularity"))
        checks = {check["name"]: check["status"] for check in receipt["checks"]}
        assert checks["installed"] == checks["imports"] == "pass"
    sqsh = Path(tiny_squash["enroot"]["path"]).read_bytes()
    assert Path(tiny_squash["apptainer"]["path"]).read_bytes().endswith(sqsh)


def test_both_kinds_train(squash: dict[str, Any]) -> None:
    for kind, nodes in (("enroot", 1), ("apptainer", 2)):
        receipt = json.loads(Path(squash[kind]["receipt"]).read_text())
        assert receipt["passed"] and receipt["artifact"]["digest"] == squash[kind]["digest"]
        assert receipt["runtime"].startswith("own:" if kind == "enroot" or apptainer.missing() else "apptainer 1.")
        assert receipt["settings"]["nodes"] == nodes and not receipt["settings"]["quick"]
        tried = {check["name"]: check["status"] for check in receipt["checks"]}
        assert {name for name, status in tried.items() if status != "pass"} == {"command", "restart"}
        assert {"launch", "allreduce", "resume", "loss"} <= tried.keys()


def test_built_again_by_each_command_alone_the_files_are_the_same_and_not_verified_again(
    squash: dict[str, Any],
) -> None:
    command: Command = squash["command"]
    for kind in ("enroot", "apptainer"):
        again = command.json(kind, "pt_cpu", "--locked")
        assert again["digest"] == squash[kind]["digest"] and not again["verified"]
        assert again["receipt"] == squash[kind]["receipt"]


def test_a_file_that_was_added_to_an_image_is_named(
    tiny_squash: dict[str, Any], session_store: Path, tmp_path: Path
) -> None:
    changed, plants = tmp_path / "changed.sqsh", tmp_path / "planted"
    shutil.copy(tiny_squash["enroot"]["path"], changed)
    shutil.copy(tiny_squash["enroot"]["receipt"], receipt_path(changed))
    plants.mkdir()
    (plants / "libc10.so").write_bytes(b"x")
    run("mksquashfs", plants, changed, "-keep-as-directory", "-no-progress", "-quiet")
    environment = load_environment({**os.environ, "ENVBUILD_STORE": str(session_store)})
    subject = open_file_subject(changed, environment, "own")
    check = check_installed(subject, subject.survey(600))
    assert check.status == "fail" and check.evidence["unowned"] == ["/planted", "/planted/libc10.so"]
    # With a manifest that lists it, the image is still not the one of the receipt.
    receipt = json.loads(receipt_path(changed).read_text())
    receipt["artifact"]["manifest"] = "sha256:" + "0" * 64
    receipt_path(changed).write_text(json.dumps(receipt))
    subject = open_file_subject(changed, environment, "own")
    assert f"/{FILE_NAME} (another one" in check_installed(subject, subject.survey(600)).seen


def test_a_user_without_privileges_gets_a_verified_image_from_a_store_of_their_own_and_runs_it(
    tiny_squash: dict[str, Any], session_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A program writes a file in the image; no training runs. Other commands of such users are in test_exec.py."""
    command, folder = tiny_squash["command"], tmp_path_factory.mktemp("nobody")
    for name in ("recipes", "wheels"):
        shutil.copytree(command.folder / name, folder / name)
    # What lies in the session's store is read where it is; the folders are theirs to write in.
    link_store(session_store, folder / "store")
    for here, folders, _ in os.walk(folder):
        for path in (here, *(os.path.join(here, name) for name in folders)):
            if not os.path.islink(path):
                os.chown(path, NOBODY, NOBODY)
    for above in folder.parents[:3]:
        above.chmod(above.stat().st_mode | 0o011)
    env = {
        **command.variables({}),
        "HOME": str(folder),
        "ENVBUILD_STORE": str(folder / "store"),
        "PIP_FIND_LINKS": str(folder / "wheels"),
        "TMPDIR": str(folder),
    }
    line = ["enroot", "tiny_image", "--out", "tiny.sqsh", "--locked", "--json"]
    line = [*AS_NOBODY, *Command(folder).line(*line)]
    done = run(*line, cwd=folder, env=env)
    made = json.loads(done.stdout)
    assert made["digest"] == tiny_squash["enroot"]["digest"] and made["receipt"], done.stderr
    receipt = json.loads(Path(made["receipt"]).read_text())
    assert receipt["passed"] and receipt["runtime"].startswith("own:")
    assert os.stat(folder / "tiny.sqsh").st_uid == NOBODY
    program = "import tiny; open('seen', 'w').write(tiny.__version__)"
    line = Command(folder).line("run", "--bind", folder, made["path"], "python", "-c", program)
    run(*AS_NOBODY, *line, cwd=folder, env=env)
    assert (folder / "seen").read_text() == "1.0" and os.stat(folder / "seen").st_uid == NOBODY
    assert not list(folder.glob(".tiny*")) and not list((folder / "store/launched").iterdir())


def test_apptainer_itself_trains_in_the_sif_and_lists_what_is_in_it(
    squash: dict[str, Any], real_apptainer: Apptainer, tmp_path: Path
) -> None:
    sif = squash["apptainer"]["path"]
    clean = [*FLAGS, "--cleanenv", "--no-home", "--pwd", "/workspace"]
    trained = real_apptainer("exec", *clean, "--bind", f"{tmp_path}:/workspace", sif, *TRAIN)
    assert "epoch" in (trained.stdout + trained.stderr).lower()
    run_ = real_apptainer("run", *clean, sif, "python", "-c", "import sys; print(sys.prefix)")
    assert run_.stdout.strip() == "/opt/env"
    listed = real_apptainer("sif", "list", sif).stdout
    assert "FS (Squashfs/*System/" in listed and listed.count("JSON") == 2
    labels = json.loads(real_apptainer("inspect", "--json", "--labels", sif).stdout)
    assert labels["data"]["attributes"]["labels"]["org.envbuild.recipe"] == "pt_cpu"
    assert "PYTORCH_VERSION" in real_apptainer("inspect", "--environment", sif).stdout
    assert "envbuild apptainer pt_cpu" in real_apptainer("inspect", "--deffile", sif).stdout
    unsigned = real_apptainer("verify", sif, check=False)
    assert unsigned.returncode != 0 and "signature not found" in unsigned.stderr


def test_verifying_the_sif_again_by_apptainer_says_so_in_the_receipt(
    tiny_squash: dict[str, Any], real_apptainer: Apptainer, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.sif"
    os.link(tiny_squash["apptainer"]["path"], copy)
    shutil.copy(tiny_squash["apptainer"]["receipt"], receipt_path(copy))
    assert json.loads(receipt_path(copy).read_text())["runtime"].startswith("own:")
    (tmp_path / "copy.sif.sigstore.json").touch()
    done = tiny_squash["command"]("verify", copy, "--json", **real_apptainer.environment())
    assert done.returncode == 0 and "attests the receipt before this one" in done.stderr, done.stderr
    receipt = json.loads(receipt_path(copy).read_text())
    assert receipt["passed"] and receipt["runtime"].startswith("apptainer 1.")
    assert json.loads(done.stdout)["digest"] == tiny_squash["apptainer"]["digest"]


def test_an_attested_sif_is_verified_by_apptainer_and_trusted_without_any_other_file(
    tiny_squash: dict[str, Any], real_apptainer: Apptainer, tmp_path: Path
) -> None:
    sif, alone = tmp_path / "built/pt.sif", tmp_path / "alone.sif"
    sif.parent.mkdir()
    shutil.copy(tiny_squash["apptainer"]["path"], sif)
    shutil.copy(tiny_squash["apptainer"]["receipt"], receipt_path(sif))
    command: Command = tiny_squash["command"]
    for name in ("ci", "stranger"):
        run("openssl", "genpkey", "-algorithm", "ed25519", "-out", f"{name}.pem", cwd=tmp_path)
        run("openssl", "pkey", "-in", f"{name}.pem", "-pubout", "-out", f"{name}.pub", cwd=tmp_path)
    for key in ("stranger", "ci"):
        made = command.json("attest", sif, "--key", tmp_path / f"{key}.pem", "--with", "provenance")
        assert made["digest"] == tiny_squash["apptainer"]["digest"] != sha256(sif)
    os.link(sif, alone)
    assert "Verified signature" in real_apptainer("verify", "--key", tmp_path / "ci.pub", alone).stderr
    assert real_apptainer("verify", "--key", tmp_path / "stranger.pub", alone, check=False).returncode != 0
    site = tmp_path / "site.toml"
    site.write_text('[scheduler]\nkind = "slurm"\n[container]\nruntime = "apptainer"\n[trust]\nsigners = ["ci.pub"]\n')
    told = command.json("trust", alone, "--site", site)
    assert told["signer"] == str(tmp_path / "ci.pub") and told["with"] == ["provenance"]
    assert "alone.sif" in command("job", alone, "--site", site, "--nodes", "1", "--strategy", "single").stdout
    python = (*FLAGS, "--cleanenv", "--no-home", alone, "python", "-c", "import tiny; print(tiny.__version__)")
    assert real_apptainer("exec", *python).stdout.strip() == "1.0"
    again = command.json("verify", alone, ENVBUILD_SITE=str(site))
    assert again["passed"] and again["receipt"] == f"{alone}.here.receipt.json" and not receipt_path(alone).exists()
    site.write_text(site.read_text().replace("ci.pub", "stranger.pub"))
    assert command("verify", alone, ENVBUILD_SITE=str(site)).returncode == 5
    refused = command("trust", alone, "--site", site)
    assert refused.returncode == 5 and "no passing receipt" in refused.stderr, refused.stderr
    site.write_text(site.read_text().replace("stranger.pub", "ci.pub"))
    with alone.open("r+b") as stream:  # both names are of this file
        stream.seek(10_000_000)
        stream.write(bytes([stream.read(1)[0] ^ 1]))
    assert command("trust", alone, "--site", site).returncode == 5
    assert real_apptainer("verify", "--key", tmp_path / "ci.pub", alone, check=False).returncode != 0
    # Apptainer's own signature makes no other artifact of a file that has none.
    shutil.copy(tiny_squash["apptainer"]["path"], own := tmp_path / "own.sif")
    shutil.copy(tiny_squash["apptainer"]["receipt"], receipt_path(own))
    real_apptainer("sign", "--key", tmp_path / "ci.pem", own)
    site.write_text(site.read_text().partition("[trust]")[0])
    assert "own.sif" in command("job", own, "--site", site, "--nodes", "1", "--strategy", "single").stdout


@pytest.mark.skipif(not shutil.which("ch-run"), reason="charliecloud is not installed")
def test_charliecloud_trains_in_the_sqsh(squash: dict[str, Any], tmp_path: Path) -> None:
    mounted, work = tmp_path / "mnt", tmp_path / "work"
    for folder in (mounted, work):
        folder.mkdir()
    env = {**os.environ, "USER": "root", "HOME": "/root"}
    line = ["ch-run", "--unset-env=*", "--set-env=PATH=/opt/env/bin:/usr/bin:/bin"]
    line += ["--bind", f"{work}:/mnt", "--cd", "/mnt", "--mount", str(mounted)]
    # One process without torchrun, which Apptainer starts above.
    trainer = ["/opt/env/bin/python", "-m", "ddp_train", "2", "1"]
    done = run(*line, squash["enroot"]["path"], "--", *trainer, env=env)
    assert "epoch" in (done.stdout + done.stderr).lower()


def test_an_environment_and_an_image_file_of_a_recipe_have_the_same_packages(
    squash: dict[str, Any], pt_cpu: dict[str, Any]
) -> None:
    """Their files are compared in test_inspect.py. The .sif ends with the .sqsh. An image's layers make the same .sqsh:
    see below."""
    shown = [squash["command"].json("inspect", one["path"]) for one in (pt_cpu, squash["apptainer"])]
    packages = [[[one["name"], one["version"]] for one in found["python_packages"]] for found in shown]
    assert packages[0] == packages[1] and "torch" in dict(packages[0])
    sqsh = Path(squash["enroot"]["path"]).read_bytes()
    assert Path(squash["apptainer"]["path"]).read_bytes().endswith(sqsh)


# From images of any make


Content = bytes | None
Layers = Sequence[Sequence[tuple[Entry, Content]]]


def layout_of(folder: Path, layers: Layers, arch: str = ARCH, config: dict[str, Any] | None = None) -> str:
    """An OCI layout of `layers`; returns how to spell it."""
    blobs = Blobs(folder.parent / f"{folder.name}.blobs")
    made: list[Layer] = [
        write_layer(((e, None if data is None else io.BytesIO(data)) for e, data in layer), blobs) for layer in layers
    ]
    document = canonical(
        {
            "architecture": GOARCH[arch],
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in made]},
        }
    )
    blobs.add(document)
    described = Descriptor(OCI_CONFIG, digest_of(document), len(document))
    manifest = canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": described.as_json(),
            "layers": [layer.blob.as_json() for layer in made],
        }
    )
    blobs.add(manifest)
    root = Descriptor(OCI_MANIFEST, digest_of(manifest), len(manifest), GOARCH[arch], "linux")
    fill_layout(folder, blobs, [(root, "lab:1")])
    return f"oci:{folder}"


def file(path: str, data: bytes, mode: int = 0o644, **more: Any) -> tuple[Entry, bytes]:
    return Entry(path, FILE, mode, len(data), mtime=1_000_000_000, **more), data


def other(path: str, kind: str, mode: int = 0o755, **more: Any) -> tuple[Entry, None]:
    return Entry(path, kind, mode, mtime=1_000_000_000, **more), None


NOISE = os.urandom(300_000)
ODD: Layers = [
    [
        other("etc", DIR),
        file("etc/fstab", b"old"),
        other("dev", DIR),
        other("usr", DIR),
        other("usr/bin", DIR),
        other("bin", SYMLINK, 0o777, target="usr/bin"),
        file("usr/bin/su", b"su", 0o4755),
        file("usr/bin/wall", b"wall", 0o2755, gid=5),
        file("shadow", b"secret", 0o000, uid=0, gid=42),
        other("dev/null", CHAR, 0o666, device=(1, 3)),
        other("srv", DIR, 0o500, uid=33, gid=33),
        other("srv/pipe", FIFO, 0o600),
        other("tmp", DIR, 0o1777),
        file(".dockerenv", b""),
        file("hidden", NOISE),
        file("big", NOISE + bytes(400_000) + NOISE),
        file("same", NOISE + bytes(400_000) + NOISE),
        file("caps", b"caps", 0o755, xattrs=(("security.capability", b"\1\0\0\2" + bytes(16)), ("user.note", b"kept"))),
        file("caf\u00e9", b"unicode"),
        file(os.fsdecode(b"latin-\xe9"), b"not UTF-8"),
    ],
    [
        other("opt", DIR),
        other("opt/name", HARDLINK, 0o644, target="big"),
        file("hidden", b"shown"),
        file("etc/.wh.nothing", b""),
        file(".wh.shadow", b""),
        file("dup", NOISE),
    ],
]


def tree(root: Path) -> dict[bytes, tuple[Any, ...]]:
    """Every path below `root` with all that an image says of it but times; links by the first of their names."""
    found: dict[bytes, tuple[Any, ...]] = {}
    first: dict[int, bytes] = {}
    top = os.fsencode(root)
    for here, folders, names in os.walk(top):
        for name in (*folders, *names):
            path = os.path.join(here, name)
            about = os.lstat(path)
            short = os.path.relpath(path, top)
            kind = about.st_mode & 0o170000
            data: bytes | str = b""
            if kind == 0o120000:
                data = os.readlink(path)
            elif kind == 0o100000:
                data = hashlib.sha256(Path(os.fsdecode(path)).read_bytes()).hexdigest()
            notes = {n: os.getxattr(path, n, follow_symlinks=False) for n in os.listxattr(path, follow_symlinks=False)}
            links = about.st_nlink if kind != 0o040000 else 0
            first.setdefault(about.st_ino, short)
            found[short] = (
                kind,
                about.st_mode & 0o7777,
                about.st_uid,
                about.st_gid,
                data,
                links,
                notes,
                about.st_rdev if kind in (0o020000, 0o060000) else 0,
            )
    return found


def documented(theirs: dict[bytes, tuple[Any, ...]]) -> dict[bytes, tuple[Any, ...]]:
    """What docs/howto/squashfs.md says becomes of an image's own files."""
    kept = {}
    for path, (kind, mode, _, _, data, links, notes, device) in theirs.items():
        if path.startswith(b"dev/") or path == b".dockerenv" or kind in (0o020000, 0o060000):
            continue
        if kind == 0o040000:
            mode |= 0o700
        elif kind != 0o120000:
            mode |= 0o400 | (0o100 if mode & 0o111 else 0)
        notes = {name: value for name, value in notes.items() if name.startswith("user.")}
        kept[path] = (kind, mode, 0, 0, data, links, notes, device)
    return kept


def own(found: dict[bytes, tuple[Any, ...]]) -> dict[bytes, tuple[Any, ...]]:
    """The tree without what envbuild adds to it."""
    mounts = {b"dev", b"etc", b"home", b"mnt", b"proc", b"root", b"run", b"sys", b"tmp", b"var"}
    files = {b"etc/group", b"etc/hosts", b"etc/passwd", b"etc/resolv.conf", b"var/tmp"}
    added = {os.fsencode(name) for name in (*ADDED, "work")}  # the image's WORKDIR
    return {
        path: item
        for path, item in found.items()
        if path not in added | mounts | files and not path.startswith(b".singularity.d/")
    }


@pytest.fixture
def odd(tmp_path: Path) -> str:
    config = {"Env": ["PATH=/usr/bin", "A=b c"], "Cmd": ["sh"], "WorkingDir": "/work", "Volumes": {"/data": {}}}
    return layout_of(tmp_path / "odd", ODD, config=config)


@pytest.mark.skipif(os.geteuid() != 0, reason="owners are kept for root only")
def test_the_trees_of_both_files_are_umocis_but_for_what_is_documented(
    envbuild: Command, odd: str, tmp_path: Path
) -> None:
    for kind in ("enroot", "apptainer"):
        envbuild.json(kind, "--from", odd, "--out", f"image.{kind}")
    run("umoci", "raw", "unpack", "--image", f"{odd.removeprefix('oci:')}:lab:1", tmp_path / "theirs")
    from envbuild.image.sif import read_sif

    with (tmp_path / "image.apptainer").open("rb") as stream:
        offset = read_sif(stream, "sif").partition.offset
    run("unsquashfs", "-d", tmp_path / "a", tmp_path / "image.enroot")
    run("unsquashfs", "-o", str(offset), "-d", tmp_path / "b", tmp_path / "image.apptainer")
    theirs = own(documented(tree(tmp_path / "theirs")))
    ours = tree(tmp_path / "a")
    assert own(ours) == theirs
    assert tree(tmp_path / "b") == ours
    assert set(map(os.fsencode, ADDED)) <= set(ours)
    assert ours[b"big"][4] == ours[b"opt/name"][4] and ours[b"big"][5] == 2
    assert (tmp_path / "a/etc/fstab").read_text().startswith("${ENROOT_ROOTFS}/data /data ")
    rc = (tmp_path / "a/etc/rc").read_text()
    (config,) = (blob for blob in layout_blobs(tmp_path / "odd") if b'"rootfs"' in blob)
    assert f"# enroot-provenance: image {digest_of(config)} " in f"{rc.splitlines()[0]} "
    assert "cd '/work'" in rc.replace("cd /work", "cd '/work'")


def layout_blobs(folder: Path) -> Iterator[bytes]:
    for path in (folder / "blobs/sha256").iterdir():
        yield path.read_bytes()


def test_the_bytes_do_not_depend_on_how_and_where_a_local_image_is_found(envbuild: Command, tmp_path: Path) -> None:
    layers: Layers = [[file("a", b"a")]]
    layout_of(tmp_path / "odd", layers, config={"Cmd": ["sh"]})
    (tmp_path / "img").mkdir()
    shutil.copytree(tmp_path / "odd", tmp_path / "img/even")
    made = set()
    for source in ("oci:odd", f"oci:{tmp_path}/odd:lab:1", "img/even"):
        for kind, out in (("enroot", "o.sqsh"), ("apptainer", "o.sif")):
            envbuild.json(kind, "--from", source, "--out", out)
            made.add((kind, hashlib.sha256((tmp_path / out).read_bytes()).hexdigest()))
    assert len(made) == 2
    for word in (b"odd", b"even", os.fsencode(tmp_path)):
        assert word not in (tmp_path / "o.sif").read_bytes()[:32176]  # what stands before the partition


def test_data_that_upper_layers_hide_is_in_no_image(envbuild: Command, tmp_path: Path) -> None:
    marker = b"a password that was removed " * 20  # stored as it is: blocks of noise do not shrink
    layers: Layers = [
        [file("secret", os.urandom(200_000) + marker), file("small", marker)],
        [file(".wh.secret", b""), file("small", b"gone")],
    ]
    envbuild.json("enroot", "--from", layout_of(tmp_path / "l", layers), "--out", "o.sqsh", "--compression", "zstd:1")
    data = (tmp_path / "o.sqsh").read_bytes()
    assert marker[:28] not in data and len(data) < 60_000


@pytest.mark.parametrize("compression", ["zstd:1", "gzip", "lz4", "xz:1"])
def test_every_compressor_gives_the_same_tree_to_the_squashfs_tools(
    envbuild: Command, odd: str, tmp_path: Path, compression: str
) -> None:
    made = envbuild.json("enroot", "--from", odd, "--out", "o.sqsh", "--compression", compression)
    assert made["receipt"] is None
    about = run("unsquashfs", "-s", tmp_path / "o.sqsh").stdout
    assert f"Compression {compression.partition(':')[0]}" in about
    run("unsquashfs", "-d", tmp_path / "tree", tmp_path / "o.sqsh")
    assert (tmp_path / "tree/big").read_bytes() == NOISE + bytes(400_000) + NOISE
    assert (tmp_path / "tree/hidden").read_bytes() == b"shown"


def test_an_image_from_a_recipes_own_layers_is_that_of_the_recipe(tiny_squash: dict[str, Any], tmp_path: Path) -> None:
    command: Command = tiny_squash["command"]
    sqsh, source = tiny_squash["enroot"]["path"], f"oci:{tmp_path / 'layout'}"
    command.json("docker", "tiny_image", "--target", f"cpu-{ARCH}", "--locked", "--no-verify", "--out", source)
    made = command.json("enroot", "--from", source, "--out", tmp_path / "f.sqsh", "--no-verify")
    found = json.loads(command("diff", sqsh, made["path"], "--json").stdout)
    assert {item["name"]: item["change"] for item in found["files"]} == {
        "etc/rc": "changed",
        ".singularity.d/Singularity": "changed",
    }
    assert command("diff", sqsh, tiny_squash["apptainer"]["path"]).stdout == "equal\n"


def test_enroots_spellings_reach_a_registry_and_name_the_file(envbuild: Command, odd: str, tmp_path: Path) -> None:
    from lab.registry import registry

    with registry(tmp_path / "registry") as lab:
        run("skopeo", "copy", "--dest-tls-verify=false", f"{odd}:lab:1", f"docker://{lab.address}/team/odd:2")
        (tmp_path / "site.toml").write_text(f'[registries."{lab.address}"]\ninsecure = true\n')
        env = {"ENVBUILD_SITE": str(tmp_path / "site.toml"), "HOME": str(tmp_path)}
        made = envbuild.json("enroot", "--from", f"docker://{lab.address}#team/odd:2", **env)
        assert Path(made["path"]).name == "team+odd+2.sqsh"
        sif = envbuild.json("apptainer", "--from", f"docker://{lab.address}/team/odd:2", **env)
        assert Path(sif["path"]).name == "odd_2.sif"
        done = envbuild("enroot", "--from", f"docker://me@{lab.address}#team/odd:2", **env)
        assert done.returncode == 2 and "no credentials of 'me'" in done.stderr


def test_an_image_is_the_same_from_wherever_it_is_read(envbuild: Command, tmp_path: Path, docker_daemon: Lab) -> None:
    # A daemon refuses links to files of other layers.
    layers = [[item for item in layer if item[0].kind != HARDLINK] for layer in ODD]
    odd = layout_of(tmp_path / "odd", layers, config={"Cmd": ["sh"]})
    archive = tmp_path / "image.tar"
    run("skopeo", "copy", f"{odd}:lab:1", f"docker-archive:{archive}:lab/odd:1")
    run("gzip", "--keep", archive)
    env = docker_daemon.environment()
    run("docker", "load", "-i", archive, env={**os.environ, **env})
    sources = [odd, f"{odd}:lab:1", str(archive), f"docker-archive:{archive}.gz"]
    sources += ["dockerd://lab/odd:1", "docker-daemon:lab/odd:1"]
    trees = []
    for number, source in enumerate(sources):
        # Segments made of one source must not hide what another does.
        store = str(tmp_path / f"store{number}")
        envbuild.json("enroot", "--from", source, "--out", "o.sqsh", ENVBUILD_STORE=store, **env)
        run("unsquashfs", "-f", "-d", tmp_path / "tree", tmp_path / "o.sqsh")
        trees.append(own(tree(tmp_path / "tree")))
        shutil.rmtree(tmp_path / "tree")
    assert all(found == trees[0] for found in trees)


def test_a_dry_run_says_what_would_be_made_and_makes_nothing(envbuild: Command, odd: str) -> None:
    said = envbuild.json("enroot", "--from", odd, "--dry-run")
    assert said["from"] == odd and said["path"].endswith("/odd.sqsh")
    planned = envbuild.json("apptainer", "--dry-run", "--locked")
    assert planned["recipe"] == "pt_cpu" and planned["artifact"] == "image"
    assert not list(envbuild.folder.glob("**/*.s*"))


# Bad input and bad luck


def test_an_image_for_another_architecture_is_refused_unless_it_is_asked_for(envbuild: Command, tmp_path: Path) -> None:
    source = layout_of(tmp_path / "l", [[file("a", b"a")]], OTHER)
    done = envbuild("apptainer", "--from", source, "--out", "o.sif")
    assert done.returncode == 4 and GOARCH[OTHER] in done.stderr
    made = envbuild.json("apptainer", "--from", source, "--out", "o.sif", "--target", f"cpu-{OTHER}")
    assert f"{GOARCH[OTHER]}" in envbuild("inspect", made["path"]).stdout
    assert made["receipt"] is None


def test_a_damaged_layer_is_named_and_leaves_the_old_file(envbuild: Command, tmp_path: Path) -> None:
    source = layout_of(tmp_path / "l", [[file("a", os.urandom(100_000))]])
    envbuild.json("enroot", "--from", source, "--out", "o.sqsh")
    before = (tmp_path / "o.sqsh").read_bytes()
    bad = layout_of(tmp_path / "m", [[file("b", os.urandom(100_000))]])
    blob = max((tmp_path / "m/blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    for damage in (lambda data: data[:-4000], lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]):
        whole = blob.read_bytes()
        blob.write_bytes(damage(whole))
        done = envbuild("enroot", "--from", bad, "--out", "o.sqsh")
        assert done.returncode == 4 and "error:" in done.stderr
        blob.write_bytes(whole)
    assert (tmp_path / "o.sqsh").read_bytes() == before
    assert not list(tmp_path.glob(".o.sqsh*"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compression", "lzo"], "unknown compressor 'lzo'"),
        (["--compression", "zstd:40"], "no level 40"),
        (["--from", "podman://x"], "podman save"),
        (["--from", "oci:nowhere", "pt_cpu"], "name one of them"),
        (["--from", "docker-archive:nowhere.tar"], "nowhere.tar"),
        (["--from", "oci:l", "--out", "notes.txt"], "left as it is"),
        (["--from", "oci:l", "--out", "l"], "is a folder"),
        (["--from", "oci:l", "--runtime", "charliecloud"], "charliecloud"),
        (["nosuch"], "nosuch"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_way_out(
    envbuild: Command, tmp_path: Path, arguments: list[str], said: str
) -> None:
    layout_of(tmp_path / "l", [[file("a", b"a")]])
    (tmp_path / "notes.txt").write_text("mine")
    done = envbuild("enroot", *arguments)
    assert done.returncode in (2, 4) and said in done.stderr and "hint:" in done.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small disk é"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place]).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_is_told_before_anything_is_written(envbuild: Command, tmp_path: Path, small_disk: Path) -> None:
    source = layout_of(tmp_path / "l", [[file("a", os.urandom(3_000_000))]])
    done = envbuild("enroot", "--from", source, "--out", small_disk / "o.sqsh")
    assert done.returncode == 4 and "MB" in done.stderr and "--out" in done.stderr
    assert list(small_disk.iterdir()) == []
    small = layout_of(tmp_path / "m", [[file("a", b"a")]])
    made = envbuild.json("enroot", "--from", small, "--out", small_disk / "ünï code.sqsh")
    assert made["path"] == str(small_disk / "ünï code.sqsh")
    done = envbuild("enroot", "--from", source, "--out", tmp_path / "o.sqsh", ENVBUILD_STORE=str(small_disk / "store"))
    assert done.returncode == 4 and "ENVBUILD_STORE" in done.stderr


def test_a_read_only_place_is_told(envbuild: Command, tmp_path: Path, small_disk: Path) -> None:
    source = layout_of(tmp_path / "l", [[file("a", b"a")]])
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    done = envbuild("apptainer", "--from", source, "--out", small_disk / "o.sif")
    assert done.returncode == 4 and "--out" in done.stderr


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image that takes more than half a second to convert."""
    return layout_of(tmp_path_factory.mktemp("large") / "l", [[file(f"{n}", os.urandom(40_000_000)) for n in range(3)]])


def wait_for_segments(store: Path, child: subprocess.Popen[str]) -> None:
    """Wait until `child` writes segments of an image, or has ended."""
    deadline = time.monotonic() + 30
    while not list(store.glob("segments/.new-*")) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_killed_run_leaves_the_old_file_and_the_next_one_cleans_up(
    envbuild: Command, large: str, tmp_path: Path
) -> None:
    small = layout_of(tmp_path / "s", [[file("a", b"a")]])
    envbuild.json("enroot", "--from", small, "--out", "o.sqsh")
    before = sha256(tmp_path / "o.sqsh")
    after = set()
    killed = 0
    for delay in (0.0, 0.1, 0.3):
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        child = envbuild.start("enroot", "--from", large, "--out", "o.sqsh", ENVBUILD_STORE=str(tmp_path / "store"))
        wait_for_segments(tmp_path / "store", child)
        time.sleep(delay)
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            killed += 1
        child.wait()
        after.add(sha256(tmp_path / "o.sqsh"))
    assert killed
    made = envbuild.json("enroot", "--from", large, "--out", "o.sqsh", ENVBUILD_STORE=str(tmp_path / "store"))
    assert made["digest"] == sha256(tmp_path / "o.sqsh")
    assert after <= {before, made["digest"]}, "the old file or the new one, whole"
    assert not list(tmp_path.glob(".o.sqsh*"))


def test_interrupted_a_run_leaves_nothing_beside_the_file(envbuild: Command, large: str, tmp_path: Path) -> None:
    child = envbuild.start("enroot", "--from", large, "--out", "o.sqsh", ENVBUILD_STORE=str(tmp_path / "store"))
    wait_for_segments(tmp_path / "store", child)
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130
    assert not list(tmp_path.glob("*o.sqsh*"))
    assert not list(tmp_path.glob("store/segments/.new-*"))


def test_two_writers_to_one_place_take_turns(envbuild: Command, tmp_path: Path) -> None:
    source = layout_of(tmp_path / "l", [[file("a", os.urandom(20_000_000))]])
    line = ("enroot", "--from", source, "--out", "o.sqsh", "--json")
    both = [envbuild.start(*line) for _ in range(2)]
    digests = {json.loads(child.communicate()[0])["digest"] for child in both}
    assert [child.returncode for child in both] == [0, 0]
    assert digests == {sha256(tmp_path / "o.sqsh")}


@pytest.mark.parametrize("cpus", ["0", "0-1"])
def test_processors_and_the_cache_change_no_byte(envbuild: Command, odd: str, tmp_path: Path, cpus: str) -> None:
    for store in ("one", "two"):
        line = envbuild.line("enroot", "--from", odd, "--out", f"{store}.sqsh")
        env = envbuild.variables({"ENVBUILD_STORE": str(tmp_path / store)})
        prefix = ["taskset", "-c", cpus] if store == "one" else []
        for _ in range(2):
            run(*prefix, *line, cwd=tmp_path, env=env)
            (tmp_path / f"{store}.sqsh").rename(tmp_path / f"{store}.last")
            assert sha256(tmp_path / f"{store}.last")
    assert sha256(tmp_path / "one.last") == sha256(tmp_path / "two.last")


def test_a_recipe_for_another_architecture_is_built_here_and_not_verified(session_store: Path, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "tiny")
    use_base_of_pt_minimal(make_recipe(tmp_path / "recipes", "tiny_image", ["tiny"]), OTHER)
    command = tiny_site(tmp_path, session_store)
    made = command.json("apptainer", "tiny_image", "--target", f"cpu-{OTHER}")
    assert made["receipt"] is None and made["target"] == f"cpu-{OTHER}"
    about = json.loads(command("inspect", made["path"], "--json").stdout)
    assert about["platform"] == f"linux/{GOARCH[OTHER]}" and about["target"] == f"cpu-{OTHER}"
    assert {"tiny"} <= {package["name"] for package in about["python_packages"]}


def test_apptainer_as_engine_builds_an_image_that_is_verified(
    envbuild: Command, real_apptainer: Apptainer, odd: str, tmp_path: Path
) -> None:
    env = real_apptainer.environment()
    made = envbuild.json("apptainer", "--from", odd, "--out", "o.sif", "--engine", "apptainer", **env)
    assert made["digest"] == sha256(tmp_path / "o.sif")
    done = envbuild("apptainer", "--from", odd, "--engine", "apptainer", PATH="/usr/bin:/bin")
    assert done.returncode == 6 and "install Apptainer" in done.stderr
