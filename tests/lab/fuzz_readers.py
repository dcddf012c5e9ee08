"""Every reader of text or bytes that others may have written, with seeds and the exceptions that it documents.

A reader has passed an input when it returns, or raises an EnvbuildError or one of those exceptions.
"""

from __future__ import annotations

import functools
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from lab import artifacts, conda_package, debian, fuzz_inputs, tar_blocks, wheels
from lab.drafts import draft_of
from lab.fuzz_inputs import Mutate, Seeds, mutated
from lab.golden import read_golden_cases
from lab.lint import lint_file
from securesystemslib.signer import CryptoSigner

from envbuild.base.elf import elf_machine, file_head, read_elf
from envbuild.base.errors import EnvbuildError
from envbuild.base.host import parse_mounts
from envbuild.base.masking import masked_text, redact
from envbuild.base.toml import Document
from envbuild.build import conda
from envbuild.build.bundle import read_bundle
from envbuild.cache import hashed
from envbuild.cache.http import RequestFailed, retry_after, split
from envbuild.contract import conda_meta as conda_survey
from envbuild.contract import image_manifest, installed, layer_lists, manifest, receipt, state
from envbuild.debian import base, control, release, rootfs
from envbuild.doctor.batch import pyxis_scope
from envbuild.environment import Environment
from envbuild.image import archive, credentials, layout, model, registry, registry_endpoint, sif
from envbuild.image.layer import open_layer
from envbuild.image.layout import Blobs
from envbuild.image.limits import Quota
from envbuild.image.reference import parse_reference, parse_source
from envbuild.image.squashfs.model import codec_of
from envbuild.image.squashfs.read import SquashfsImage
from envbuild.image.squashfs.segment import load, save, write_segment
from envbuild.image.tar import tar_items
from envbuild.image.tree import MergedTree
from envbuild.imports import FORMATS
from envbuild.inspect import metadata
from envbuild.inspect.images import about_image
from envbuild.inspect.reader import open_artifact
from envbuild.jobcheck.diagnose.engine import diagnose, explain
from envbuild.jobcheck.diagnose.nccl_log import parse_nccl_log
from envbuild.jobcheck.diagnose.read import job_number, merged, read_logs, read_record
from envbuild.jobcheck.diagnose.rules import load_rules
from envbuild.layers import source_files
from envbuild.layers.conda_package import read_info
from envbuild.layers.wheel import Scheme, entry_point_scripts, wheel_record, wheel_tree
from envbuild.lock import conda_format, format, image
from envbuild.lock.lifecycle import read_lock_file
from envbuild.recipe.load import load_recipe
from envbuild.recipe.project import ProjectTable, declared_code, declared_requirements
from envbuild.recipe.targets import Target
from envbuild.site.pip_config import PipConfig, load_pip_config
from envbuild.site.settings import Site, load_site
from envbuild.store.sources import matches, read_page
from envbuild.store.store import Store
from envbuild.store.vault import wheel_title
from envbuild.trust.bundle import opened, sign, statement

TOP = Path(__file__).parents[2]
DATA = TOP / "tests/unit/data"
SCHEME = Scheme("opt/env", "3.11")
_MIB = 1 << 20
_SIGNER = CryptoSigner(Ed25519PrivateKey.from_private_bytes(bytes(32)))


@dataclass(frozen=True)
class FuzzedReader:
    """A reader: `read` gets one input and a folder of its own; `seeds` get a folder to work in.

    `examples` is the number of inputs with FUZZ=all, `raises` are the documented exceptions besides EnvbuildError.
    """

    seeds: Callable[[Path], Seeds]
    read: Callable[[bytes, Path], object]
    examples: int
    raises: tuple[type[Exception], ...] = ()
    mutate: Mutate = field(default=mutated)


def file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """A reader of a file that is called `name`."""

    def run(data: bytes, folder: Path) -> object:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return read(path)

    return run


def text(read: Callable[[str], object]) -> Callable[[bytes, Path], object]:
    """A reader of a text that is decoded elsewhere."""
    return lambda data, _: read(data.decode("utf-8", "surrogateescape"))


def patterns(*names: str, top: Path = TOP, most: int = 1 << 16) -> Callable[[Path], Seeds]:
    """The recorded files that the patterns match, without their ends if they are long."""
    return lambda _: [path.read_bytes()[:most] for name in names for path in sorted(top.glob(name)) if path.is_file()]


def golden(*tables: str, most: int) -> list[bytes]:
    """The rendered jobs of the golden tables, without their ends if they are long."""
    cases = (read_golden_cases(DATA / f"jobs/{table}.txt").values() for table in tables)
    return [text.encode()[:most] for texts in cases for text in texts]


def given(*texts: bytes | str | Mapping[str, Any]) -> Callable[[Path], Seeds]:
    def made(one: bytes | str | Mapping[str, Any]) -> bytes:
        return one if isinstance(one, bytes) else (one if isinstance(one, str) else json.dumps(one)).encode()

    return lambda _: [made(one) for one in texts]


# ---- recipes, sites, locks


_PYPROJECT = """[project]
name = "p"
dynamic = ["dependencies"]
[project.optional-dependencies]
more = ["numpy>=2; python_version < '4'", "p[more, x]", "a @ https://example.org/a.whl"]
x = []
[dependency-groups]
dev = ["ruff", {include-group = "dev"}]
[tool.setuptools.dynamic]
dependencies = { file = ["pyproject.toml"] }
"""


def _project(path: Path) -> None:
    table = ProjectTable(".", extras=("more",), groups=("dev",))
    document = Document(path.with_name("recipe.toml"), "", {})
    list(declared_requirements(declared_code(document, table), table, document))


def _recipe(path: Path) -> None:
    loaded = load_recipe(path)
    for name in loaded.recipe.targets:
        target, _ = loaded.target(name)
        loaded.image_digest(target), loaded.conda_digest(target), loaded.resolution_digest(target)
    loaded.digest, loaded.bound, loaded.where("name")


def _imported(path: Path) -> None:
    try:
        draft_of(path, target=None)
    except EnvbuildError as error:
        assert "recipes/lab/recipe.toml" not in error.message, error.message


def _site(path: Path) -> None:
    site = load_site({"ENVBUILD_SITE": str(path), "HOME": str(path.parent), "USER": "lab"}, etc=path.parent / "etc")
    site.mirrored("https://pypi.org/simple/x"), site.origin("limits", "entries")


def _conda_locks(_: Path) -> Seeds:
    package = conda_format.CondaPackage(
        "numpy",
        "2.1",
        "h0_0",
        "linux-64",
        "https://c.example.org/forge/linux-64/numpy-2.1-h0_0.conda",
        "0" * 32,
        "1" * 64,
        ("python >=3.11", "libblas"),
    )
    part = conda_format.CondaPart("pt_cpu", "cpu-x86_64", "sha256:" + "2" * 64, ("conda-forge",), (package,) * 1)
    own = conda_format.render([part, replace(part, target="cpu-aarch64", packages=())])
    other = own.replace('"', "'").replace("metadata:", "metadata: # of conda-lock")
    return [
        own.encode(),
        other.encode(),
        b"a: &a [x]\n" + other.encode(),
        b"{version: 1, package: &a [*a, {name: &n {}}]}",
    ]


def _conda_lock(path: Path) -> None:
    for parse in (conda_format.parse, conda_format.parse_packages):
        with suppress(conda_format.LockError):
            read_lock_file(path, parse)


def _image_locks(_: Path) -> Seeds:
    whole = (TOP / "recipes/pt_cpu/cpu-x86_64.image.toml").read_text().splitlines()
    head = '# x\nformat = 1\nrecipe = "x"\ntarget = "cpu-x86_64"\nrecipe-digest = "sha256:0"\n'
    return [
        "\n".join([*whole[:16], "]"]).encode(),
        f'{head}[oci]\nreference = "docker.io/x:1"\ndigest = "sha256:{"0" * 64}"\n'.encode(),
    ]


# ---- environments: state, receipt, manifest, RECORD, lists, records


def _receipt(path: Path) -> None:
    receipt.manifest_of(path.with_name("x"))
    receipt.passing_receipt(path.with_name("x"), "sha256:0")
    found = receipt.read_receipt(path)
    receipt.pushed_as(path.with_name("x"), found["artifact"]["digest"])


def _seal(data: bytes, folder: Path) -> None:
    store, known = Store(folder), manifest.Manifest({}, "sha256:0")
    for path in (manifest._note(folder, store), manifest._known_code(known, store)):  # what `seal` writes
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    manifest.sealed(folder, known, store)
    manifest._compiled(known, store)


_RECORD = (
    "a.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\nx/b.py,sha256=AAAA,12\n../../../bin/x,,\n"
    "a-1.dist-info/RECORD,,\n"
)


def _record(data: bytes, folder: Path) -> None:
    (folder / "a-1.dist-info").mkdir(exist_ok=True)
    (folder / "a-1.dist-info/RECORD").write_bytes(data)
    installed.check_files(folder)
    installed.distributions(folder)
    for name in ("RECORD", "METADATA"):
        reader = metadata.interest(f"lib/site-packages/a-1.dist-info/{name}")
        assert reader is not None
        reader(data)


def _notes(data: bytes, folder: Path) -> None:
    """All readers of an artifact's inventory get the same data, and their notes are put together."""
    paths = (
        "opt/env/envbuild.json",
        "opt/env/pyvenv.cfg",
        "etc/os-release",
        "var/lib/dpkg/status",
        "opt/env/lib/python3.11/site-packages/a-1.dist-info/METADATA",
        "opt/env/conda-meta/a-1-0.json",
        "opt/env/lib/python3.11/site-packages/b-1.egg-info/PKG-INFO",
        "opt/env/share/envbuild/layers/ucx.json",
    )
    notes = {path: reader(data) for path in paths if (reader := metadata.interest(path))}
    files = {path: metadata.Item("file", 0o644, len(data)) for path in paths}
    found = metadata.root_inventory(files, notes, {"PATH": "/opt/env/bin:/x"})
    json.dumps(list(notes.values()))
    assert found.files


def _conda_meta(data: bytes, folder: Path) -> None:
    for path in (folder / "conda-meta/a-1-0.json", folder / "conda-meta/state", folder / "etc/conda/env_vars.d/a.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "lib").mkdir(exist_ok=True)
    conda_survey.survey_conda(folder, folder / "lib")
    conda_survey.quick_names(folder, folder / "lib")
    conda.set_variables(folder)


def _layer_list(data: bytes, folder: Path) -> None:
    path = folder / state.list_path("ucx")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    layer_lists.check_layers(folder, installed.FileReport())
    reader = metadata.interest("share/envbuild/layers/ucx.json")
    assert reader is not None
    reader(data)


def _source_manifest(data: bytes, folder: Path) -> None:
    (folder / source_files._NAME).write_bytes(data)
    (folder / "tree").mkdir(exist_ok=True)
    source_files.read_manifest(folder / "tree")


# ---- images


def _drain(stream: Any) -> None:
    while stream.read(_MIB):
        pass


def _layer(path: Path) -> None:
    tree = MergedTree(Quota())
    with open_layer(path, "lab") as stream:
        for number, (member, content) in enumerate(tar_items(stream, "lab", Quota())):
            if content is not None and member.size < 64 * _MIB:
                _drain(content)
            if number < 2000:
                tree.apply(member, number, "lab")
    tree.walk()


def _tars(_: Path) -> Seeds:
    b = tar_blocks
    sparse = b.pax(
        ("GNU.sparse.major", b"1"),
        ("GNU.sparse.minor", b"0"),
        ("GNU.sparse.name", b"s"),
        ("GNU.sparse.realsize", b"2000"),
    )
    stored = b"1\n1000\n10\n".ljust(512, b"\0") + b"x" * 10
    named = b.pax(("path", b"long/" * 40 + b"x"), ("SCHILY.xattr.user.a", b"v\0"), ("mtime", b"1.5"), ("size", b"3"))
    pairs = b.pax(("GNU.sparse.offset", b"0"), ("GNU.sparse.numbytes", b"4"), ("GNU.sparse.size", b"9"))
    members = (
        (b.plain("etc/passwd", data=b"root:x:0"), b.plain("d/", b"5"), b.plain("d/l", b"2", linkname="../etc")),
        (named, b.plain("x", data=b"abc")),
        (b.special(b"L", b"n/" * 80 + b"\0"), b.special(b"K", b"t/" * 80), b.plain("x", b"2")),
        (sparse, b.plain("s", data=stored)),
        (b.pax(("GNU.sparse.map", b"0,4,100,4"), ("GNU.sparse.size", b"200")), b.plain("s", data=b"abcdefgh")),
        (pairs, b.plain("s", data=b"abcd")),
        (
            b.pax(("SCHILY.xattr.user.g", b"1"), kind=b"g"),
            b.plain("d/.wh..wh..opq"),
            b.plain("d/.wh.x"),
            b.plain("d/l/x"),
        ),
        (b.plain("d/c", b"3", devmajor=1, devminor=3), b.plain("e", b"2", linkname="d/../d"), b.plain("e/d")),
    )
    return [b"".join(rows) + b.END for rows in members]


def _squashfs(path: Path) -> None:
    with path.open("rb") as stream:
        opened = SquashfsImage(stream, 0, "lab")
        opened.find("opt/env/envbuild.json")
        for entry, handle in opened.entries():
            if entry.kind == "file" and entry.size < 64 * _MIB:
                for _ in opened.blocks(handle):
                    pass


def _image_seeds(folder: Path) -> dict[str, list[bytes]]:
    """The same small image as archives, configuration, manifest and indexes."""
    folder.mkdir(exist_ok=True, parents=True)
    blobs = Blobs(folder / "made")
    layers = [
        artifacts.layer(blobs, {**artifacts.under("opt/env", artifacts.frame()), "etc/os-release": 'ID="debian"\n'})
    ]
    found, raw = artifacts.image(
        blobs, layers, Env=["PATH=/opt/env/bin", "A=b"], Labels={"org.envbuild.target": "cpu-x86_64"}
    )
    saved = artifacts.docker_archive(folder / "saved.tar", blobs, raw, layers, "lab/image:v1").read_bytes()
    place = folder / "oci"
    if not place.exists():
        artifacts.layout(place, blobs, [(found, "v1")])
    tar = debian.tar(
        [(str(one.relative_to(place)), one.read_bytes()) for one in sorted(place.rglob("*")) if one.is_file()]
    )
    index = (place / "index.json").read_bytes()
    many = json.dumps(
        {"schemaVersion": 2, "manifests": [found.as_json(), {**found.as_json(), "platform": {"architecture": "arm64"}}]}
    )
    return {"archives": [saved, tar], "config": [raw], "manifest": [blobs.read(found.digest), index, many.encode()]}


def _file_manifest(data: bytes, _: Path) -> None:
    found = image_manifest.parse(data, "lab")
    for form in (image_manifest.OCI, image_manifest.SQUASHFS):
        image_manifest.compare(found, found.rows, form)
    image_manifest.render(image_manifest.OCI, found.rows)


def _images(kind: str) -> Callable[[Path], Seeds]:
    return lambda folder: _image_seeds(folder / "image")[kind]


def _manifest(data: bytes, _: Path) -> None:
    found = model.parse(data, "lab", model.OCI_MANIFEST)
    if isinstance(found, model.ImageIndex):
        for arch in ("x86_64", "aarch64", None):
            with suppress(model.BuildError):
                model.choose(found, arch, "lab")
    else:
        model.docker_manifest(found), found.descriptor


def _config(data: bytes, _: Path) -> None:
    found = model.parse_config(data, "lab")
    layers = tuple(model.Descriptor(model.OCI_LAYER, one, 1) for one in found["rootfs"]["diff_ids"])
    model.check_image(layers, found, None, "lab")
    about_image(found, "sha256:0", "sha256:0", layers, "lab", None)
    model.canonical(found)


def _layout(data: bytes, folder: Path) -> None:
    (folder / "oci-layout").write_bytes(b'{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_bytes(data)
    blobs = Blobs(folder / "blobs")
    for raw in (data, b"{}"):
        blobs.add(raw)
    layout.read_layout(folder, Blobs(folder / "new"), "v1", "x86_64")


def _archive(path: Path) -> None:
    for read in (
        lambda: archive.archive_at(path, "x86_64"),
        lambda: archive.read_archive(path, Blobs(path.parent / "blobs"), None, None),
    ):
        with suppress(archive.BuildError):
            read()


def _archived(seeds: Seeds, rng: Any) -> bytes:
    """An archive with one file changed inside, or changed as a whole."""
    if rng.random() < 0.4:
        return fuzz_inputs.tar_summed(mutated)(seeds, rng)
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(rng.choice(seeds))) as opened:
        items = [(one.name, cast(Any, opened.extractfile(one)).read()) for one in opened if one.isfile()]
    chosen = rng.choice([n for n, (name, _) in enumerate(items) if "json" in name] + [rng.randrange(len(items))])
    items[chosen] = items[chosen][0], mutated([items[chosen][1]], rng)
    return debian.tar(items)


def _artifact(path: Path) -> None:
    """What `inspect` and `diff` read."""
    store = path.parent / "store"
    environment = Environment({}, Site(store=store), PipConfig(), Store(store))
    with open_artifact(str(path), environment, None) as opened:
        opened.contents(hashes=True)


def _sif(path: Path) -> None:
    with path.open("rb") as stream:
        found = sif.read_sif(cast(BinaryIO, stream), "lab")
        for item in found.objects:
            sif.read_object(cast(BinaryIO, stream), item, "lab")


def _sifs(_: Path) -> Seeds:
    out, jsons = io.BytesIO(), [("oci-config.json", b'{"Env": ["A=b"]}'), ("inspect-metadata.json", b'{"data": {}}')]
    whole = (DATA / "fuzz/plain.sqsh").read_bytes()
    sif.write_sif_front(out, b"Bootstrap: docker\n", jsons, "x86_64")
    out.write(whole)
    sif.finish_sif(out, b"Bootstrap: docker\n", jsons, "x86_64", partition_size=len(whole), mtime=1)
    return [out.getvalue()]


def _segments(folder: Path) -> Seeds:
    items = tar_items(io.BytesIO(_tars(folder)[0]), "lab")
    segment = write_segment(items, folder / "segment", codec_of("zstd:1"), 1)
    save(segment, folder / "segment.index")
    return [zstandard.ZstdDecompressor().decompress((folder / "segment.index").read_bytes())]


def _segment(data: bytes, folder: Path) -> None:
    (folder / "data").write_bytes(b"x")
    (folder / "index").write_bytes(zstandard.ZstdCompressor(level=1).compress(data))
    table: Any = None
    with suppress(ValueError, RecursionError):
        table = json.loads(data)
    if isinstance(table, dict) and type(table.get("size")) is int and 0 <= table["size"] < _MIB:
        os.truncate(folder / "data", table["size"])
    load(folder / "index", folder / "data", cast(Any, SimpleNamespace(keep=lambda *_: True)))


# ---- Debian, wheels, conda packages


def _debs(_: Path) -> Seeds:
    whole = debian.deb(
        "lab", [debian.info("./usr"), ("./usr/x", b"data")], extra="Depends: libc6\n", conffiles="/etc/x\n"
    )
    items = {"debian-binary": b"2.0\n", "control.tar": debian.tar([("./control", b"Package: lab\nVersion: 1\n")])}
    return [whole, debian.ar({**items, "data.tar": debian.tar([("./usr/x", b"data"), debian.info("./l", b"2", "/x")])})]


def _deb(path: Path) -> None:
    with suppress(rootfs.BuildError):
        rootfs.read_control(path, "lab")
    for _, content in rootfs.read_data(path, "lab"):
        if content is not None:
            _drain(content)


def _packages(path: Path) -> None:
    index = base.PackageIndex()
    index.add(path, "debian")
    for package in list(index.packages.values())[:20]:
        with suppress(base.LockError):
            package.relations("depends", "pre-depends"), package.provided()


def _stanzas(_: Path) -> Seeds:
    rows = [
        debian.stanza("a", "1:2.3-4+b1", depends="b (>= 1.0~rc1) | c, d:any [amd64]", provides="x (= 1)"),
        debian.stanza("b", "2"),
    ]
    return ["\n\n".join(rows).encode()]


def _versions(words: str) -> None:
    one, _, other = words.partition(" ")
    assert control.compare_versions(one, other) == -control.compare_versions(other, one)


def _release(words: str) -> None:
    release.read_release(words, release.DebianSuite("https://x", "bookworm"))


def _apt(data: bytes, folder: Path) -> None:
    for name in ("sources.list", "sources.list.d/a.sources", "apt.conf", "apt.conf.d/b"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    release.apt_proxy(folder)
    release.archives("bookworm", "2026-01-01T00:00:00Z", etc=folder)


@functools.cache
def _key() -> debian.Key:
    return debian.Key()


def _signed(_: Path) -> Seeds:
    return [_key().clear(debian.release_text("bookworm", {"main/x": b""})), bytes(_key().public)]


def _signature(data: bytes, folder: Path) -> None:
    (folder / "keys").write_bytes(data)
    for read in (
        lambda: release.verified(data, None, [_key().public], "lab"),
        lambda: release.verified(b"x", data, [_key().public], "lab"),
        lambda: release.load_keys(folder / "keys"),
    ):
        with suppress(release.LockError):
            read()


def _wheels(folder: Path) -> Seeds:
    files = {
        "lab-1.0.dist-info/entry_points.txt": b"[console_scripts]\nlab = lab:main [x]\n",
        "lab-1.0.data/scripts/x": b"#!python\n",
        "lab/big.bin": b"x" * 70_000,
        "lab-1.0.data/data/share/x": b"1",
    }
    return [wheels.make_wheel(folder / "wheels", "lab", files=files).read_bytes()]


def _wheel(path: Path) -> None:
    for _, content in wheel_tree(path, SCHEME, 0):
        if content is not None:
            _drain(content)
    wheel_record(path, SCHEME)
    with suppress(ValueError):
        wheel_title(path)


def _conda_packages(form: Any, ending: str) -> Callable[[Path], Seeds]:
    def made(folder: Path) -> Seeds:
        about = conda_package.Metadata("lab", "1.0", "h0_0", "noarch", noarch="python")
        with form(folder / "channel", about) as package:
            package.file("bin/x", b"#!" + conda_package.PLACEHOLDER.encode(), prefix="text", executable=True)
            package.entry_points.append("lab = lab:main")
        return [(folder / f"channel/noarch/lab-1.0-h0_0{ending}").read_bytes()]

    return made


def _info_zip(seeds: Seeds, rng: Any) -> bytes:
    """A .conda whose information was changed inside, or one changed as a whole."""
    if rng.random() < 0.3:
        return fuzz_inputs.zipped(seeds, rng)
    import tarfile

    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(seeds[0])) as source, zipfile.ZipFile(out, "w") as made:
        for info in source.infolist():
            data = source.read(info)
            if info.filename.startswith("info-"):
                plain = zstandard.ZstdDecompressor().decompressobj().decompress(data)
                with tarfile.open(fileobj=io.BytesIO(plain)) as opened:
                    items = [(one.name, cast(Any, opened.extractfile(one)).read()) for one in opened]
                at = rng.randrange(len(items))
                items[at] = items[at][0], mutated([items[at][1]], rng)
                data = zstandard.ZstdCompressor(level=1).compress(debian.tar(items))
            made.writestr(info.filename, data)
    return out.getvalue()


# ---- configuration of other tools, the host, the network


def _pip(data: bytes, folder: Path) -> None:
    (folder / "pip.conf").write_bytes(data)
    env = {"PIP_CONFIG_FILE": str(folder / "pip.conf"), "HOME": str(folder), "PIP_RETRIES": data[:30].decode("latin-1")}
    for chosen in (env, {**env, "PIP_RETRIES": ""}):
        with suppress(EnvbuildError):
            repr(load_pip_config(chosen, prefix=str(folder), etc=folder))


def _netrc(data: bytes, folder: Path) -> None:
    (folder / ".netrc").write_bytes(data)
    (folder / ".netrc").chmod(0o600)
    credentials.find_credentials("x.example.org", {"HOME": str(folder)})


def _docker_config(data: bytes, folder: Path) -> None:
    (folder / ".docker").mkdir(exist_ok=True)
    (folder / ".docker/config.json").write_bytes(data)
    for host in ("x.example.org", "docker.io"):
        credentials.find_credentials(host, {"HOME": str(folder), "PATH": str(folder)})


def _page(kind: str) -> Callable[[bytes, Path], object]:
    def read(data: bytes, folder: Path) -> object:
        page = SimpleNamespace(url="https://x/simple/lab/", headers={"Content-Type": kind}, content=data)
        client = cast(Any, SimpleNamespace(page=lambda url, patient: page))
        return [matches(link.filename, "lab", "1.0") for link in read_page("https://u:p@x/simple/lab/", "lab", client)]

    return read


_HTML = (
    '<html><head><base href="https://x/"></head><body><a href="lab-1.0-py3-none-any.whl#sha256=00"'
    ' data-requires-python="&gt;=3.8" data-yanked="">lab-1.0-py3-none-any.whl</a>'
    '<a href="../x.tar.gz">x</a></body></html>'
)
_SIMPLE = {
    "meta": {"api-version": "1.1"},
    "name": "lab",
    "versions": ["1.0"],
    "files": [
        {
            "filename": "lab-1.0-py3-none-any.whl",
            "url": "a.whl",
            "hashes": {"sha256": "00"},
            "requires-python": ">=3.8",
            "yanked": False,
            "size": 1,
            "upload-time": "2024-01-01T00:00:00Z",
        }
    ],
}


def _log(path: Path) -> None:
    diagnose(read_logs([str(path)]), load_rules("job"))


def _flight(path: Path) -> None:
    record = read_record(path)
    list(merged([record] if record else []))


def _said(words: str) -> None:
    for place in ("verification", "build"):
        explain(words[:4000], cast(Any, place))
    parse_nccl_log(words)
    masked_text(words[:20_000]), redact(words), job_number(words[:200])


def _references(words: str) -> None:
    for parse in (parse_reference, parse_source, Target.parse, codec_of):
        with suppress(EnvbuildError):
            parse(words[:5000])


READERS: dict[str, FuzzedReader] = {
    "pyproject": FuzzedReader(given(_PYPROJECT), file("pyproject.toml", _project), 300),
    "recipe": FuzzedReader(patterns("recipes/*/recipe.toml"), file("recipe.toml", _recipe), 600),
    "site": FuzzedReader(patterns("sites/*.toml"), file("site.toml", _site), 600),
    **{
        f"init, {name}": FuzzedReader(patterns(f"init/{name}", top=DATA), file(name, _imported), 150)
        for name in FORMATS
    },
    "wheel lock": FuzzedReader(patterns("recipes/*/*.requirements.txt", most=4096), file("x.txt", format.read), 700),
    "conda lock": FuzzedReader(_conda_locks, file("x.yml", _conda_lock), 250),
    "image lock": FuzzedReader(_image_locks, file("x.toml", image.read_image), 700),
    "state": FuzzedReader(
        given(artifacts.state()), file("envbuild.json", lambda path: state.read_state(path.parent)), 700
    ),
    "receipt": FuzzedReader(
        given(
            {
                "format": 1,
                "passed": True,
                "artifact": {"digest": "sha256:0", "manifest": "x", "pushed": "y"},
                "recipe": {"name": "x"},
                "settings": {"nodes": 2},
                "versions": {"nccl": None},
                "packages": [],
                "layers": [{"name": "a", "version": "1"}],
            }
        ),
        file("x.receipt.json", _receipt),
        700,
        (OSError, ValueError),
    ),
    "manifest": FuzzedReader(
        given('["bin/x", 33261, 12, "00ff"]\n["lib", "lib64"]\n'),
        file("envbuild.manifest", lambda p: manifest.read_manifest(p.parent)),
        700,
    ),
    "seal": FuzzedReader(given({"manifest": "sha256:0", "compared": {"a": [1, 2, 3, 4, 5]}}), _seal, 300),
    "RECORD": FuzzedReader(given(_RECORD, '"a,b",sha256=0,1\n'), _record, 500),
    "inventory": FuzzedReader(
        lambda folder: [
            b"Metadata-Version: 2.4\nName: a\nVersion: 1\nClassifier: License :: OSI Approved :: MIT\nLicense: x\n\nl",
            b"Package: libc6\nStatus: install ok installed\nVersion: 2\nArchitecture: amd64\n\nPackage: b\n",
            b'ID=debian\nPRETTY_NAME="x"\n',
            artifacts.state().encode(),
            *_conda_records(folder),
            *_layer_lists(folder),
        ],
        _notes,
        500,
    ),
    "conda record": FuzzedReader(lambda folder: _conda_records(folder), _conda_meta, 400),
    "layer list": FuzzedReader(lambda folder: _layer_lists(folder), _layer_list, 600),
    "layer list, parsed": FuzzedReader(
        lambda folder: _layer_lists(folder),
        lambda data, _: layer_lists.parse_list(data),
        500,
        (ValueError, KeyError, TypeError),
    ),
    "source manifest": FuzzedReader(
        given({"format": 1, "name": "a", "version": "1", "glibc": "2.28", "files": [["a", "x", 1]]}),
        _source_manifest,
        300,
    ),
    "note of a layer": FuzzedReader(
        given({"media_type": "x", "seal": "0"}), file("note.json", hashed.read_note), 300, (OSError, ValueError)
    ),
    "file manifest": FuzzedReader(
        given(
            '{"format": 1, "form": "oci"}\n["a", "file", 420, 0, 0, 1, "00", {"user.x": "00"}]\n'
            '["b", "symlink", 511, 0, 0, 0, "a"]\n'
        ),
        _file_manifest,
        400,
    ),
    "bundle": FuzzedReader(
        given({"format": 1, "recipes": ["x"]}), file("bundle.json", lambda path: read_bundle(path.parent)), 300
    ),
    "layer": FuzzedReader(_tars, file("layer", _layer), 1500, mutate=fuzz_inputs.tar_summed(mutated)),
    "manifest of an image": FuzzedReader(_images("manifest"), _manifest, 700),
    "configuration of an image": FuzzedReader(_images("config"), _config, 700),
    "layout": FuzzedReader(_images("manifest"), _layout, 300),
    "archive": FuzzedReader(_images("archives"), file("image.tar", _archive), 300, mutate=_archived),
    "archive, inspected": FuzzedReader(_images("archives"), file("image.tar", _artifact), 100, mutate=_archived),
    "squashfs": FuzzedReader(patterns("fuzz/plain.sqsh", "*.sqsh", top=DATA), file("x.sqsh", _squashfs), 500),
    "squashfs, inspected": FuzzedReader(patterns("fuzz/plain.sqsh", top=DATA), file("x.sqsh", _artifact), 200),
    "SIF": FuzzedReader(_sifs, file("x.sif", _sif), 300),
    "SIF, inspected": FuzzedReader(_sifs, file("x.sif", _artifact), 150),
    "segment": FuzzedReader(_segments, _segment, 400),
    "Debian package": FuzzedReader(_debs, file("x.deb", _deb), 400),
    "Packages": FuzzedReader(
        _stanzas, file("Packages", _packages), 500, mutate=lambda s, r: fuzz_inputs.packed(mutated(s, r), r)
    ),
    "Release": FuzzedReader(
        lambda _: [
            debian.release_text(
                "bookworm", {"main/x": b"1"}, **{"Valid-Until": "Sat, 18 Jul 2026 10:16:37 UTC"}
            ).encode()
        ],
        text(_release),
        600,
    ),
    "signature": FuzzedReader(_signed, _signature, 40),
    "relation": FuzzedReader(
        given("a (>= 1:2.0-1) | b:any, c (<< 3~)"), text(lambda words: control.parse_relations(words, "lab")), 600
    ),
    "Debian versions": FuzzedReader(given("1:2.0~rc1-1+b2 1:2.0-1", "0 0~", "1.0a 1.0+"), text(_versions), 600),
    "apt's sources": FuzzedReader(
        given(
            "deb [arch=amd64] https://u:p@x/debian bookworm main\n",
            "Types: deb\nURIs: https://x\nSuites: trixie\nComponents: main\n",
            'Acquire::http::Proxy "http://x:3128";\n',
        ),
        _apt,
        250,
    ),
    "wheel": FuzzedReader(_wheels, file("lab-1.0-py3-none-any.whl", _wheel), 500, mutate=fuzz_inputs.zipped),
    "entry points": FuzzedReader(
        given("[console_scripts]\nx = a.b:c [d]\n"),
        text(lambda words: list(entry_point_scripts(words, "/bin/python", "lab"))),
        400,
    ),
    "conda package": FuzzedReader(
        _conda_packages(conda_package.conda_package, ".conda"),
        file("lab-1.0-h0_0.conda", read_info),
        300,
        mutate=_info_zip,
    ),
    "old conda package": FuzzedReader(
        lambda folder: [
            __import__("bz2").decompress(one) for one in _conda_packages(conda_package.bz2_package, ".tar.bz2")(folder)
        ],
        file("lab-1.0-h0_0.tar.bz2", read_info),
        200,
        mutate=fuzz_inputs.bzipped(mutated),
    ),
    "pip.conf": FuzzedReader(
        given("[global]\nindex-url = https://u:p@x/simple\nretries = 3\ntimeout = 1.5\n[install]\nno-index = yes\n"),
        _pip,
        500,
    ),
    "netrc": FuzzedReader(
        given("machine x.example.org login u password p\nmacdef a\n x\n\ndefault login a password b\n"), _netrc, 500
    ),
    "config.json of docker": FuzzedReader(
        given(
            {
                "auths": {"x.example.org": {"auth": "dTpw"}, "https://index.docker.io/v1/": {"identitytoken": "t"}},
                "credsStore": "none",
                "credHelpers": {"y": "z"},
            }
        ),
        _docker_config,
        600,
    ),
    "token": FuzzedReader(
        given({"token": "abc", "expires_in": 300}),
        lambda data, _: registry_endpoint._token(data, "lab"),
        500,
        (RequestFailed,),
    ),
    "challenge": FuzzedReader(
        given('Bearer realm="https://x/t",service="x", scope="a:b", Basic realm="\\"x"'),
        text(registry_endpoint.parse_challenges),
        600,
    ),
    "list of referrers": FuzzedReader(
        given({"manifests": [{"digest": "sha256:" + "0" * 64, "size": 9, "artifactType": "a", "annotations": {}}]}),
        lambda data, _: registry._of_kind(registry._index(data)["manifests"], "a"),
        300,
        (RequestFailed,),
    ),
    "attestation": FuzzedReader(
        lambda _: [sign(statement({"x": "sha256:" + "0" * 64}, "urn:x", {}), _SIGNER)],
        lambda data, _: opened(data, [_SIGNER.public_key]),
        300,
        (ValueError,),
    ),
    "address": FuzzedReader(
        given("https://u:p%40@r.example.org:5000/v2/a?b=c", "http://[fe80::1%25eth0]/x", "//a.example/\\@b", "/v2/x"),
        text(split),
        400,
        (RequestFailed,),
    ),
    "Retry-After": FuzzedReader(given("120", "Fri, 31 Dec 1999 23:59:59 GMT"), text(retry_after), 500),
    "index page": FuzzedReader(given(_HTML), _page("text/html"), 300, (RequestFailed,)),
    "JSON index page": FuzzedReader(
        given(_SIMPLE), _page("application/vnd.pypi.simple.v1+json"), 300, (RequestFailed,)
    ),
    "mountinfo": FuzzedReader(
        given("36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"),
        text(lambda words: list(parse_mounts(words))),
        500,
    ),
    "plugstack.conf": FuzzedReader(
        given("required /usr/lib/slurm/spank_pyxis.so container_scope=job\ninclude plugstack.conf.d/*\n"),
        file("plugstack.conf", lambda path: pyxis_scope({"SLURM_CONF": str(path.parent / "slurm.conf")})),
        300,
    ),
    "ELF": FuzzedReader(
        lambda _: _elfs(), file("x.so", lambda path: (_elf(path), elf_machine(file_head(str(path))))), 700
    ),
    "job script": FuzzedReader(
        lambda folder: [
            *patterns("lint/*.sh", "lint/*.pbs", top=DATA, most=4096)(folder),
            *golden("slurm", "pbs", "lsf", "flux", "builds", most=4096),
        ],
        file("job.sh", lint_file),
        200,
    ),
    "job manifest": FuzzedReader(lambda _: golden("kubernetes", most=2500), file("job.yaml", lint_file), 120),
    "log": FuzzedReader(patterns("logs/*.log", "nccl/*.log", top=DATA, most=3000), file("x.log", _log), 200),
    "flight record": FuzzedReader(patterns("flight/*/flight-0-[0-9]", top=DATA), file("rank1", _flight), 300),
    "message": FuzzedReader(patterns("logs/*.log", "nccl/*.log", top=DATA, most=600), text(_said), 300),
    "names": FuzzedReader(
        given("docker://u@r.example.org:5000#a/b:v1", "cpu-x86_64", "zstd:15", "a@sha256:" + "0" * 64),
        text(_references),
        400,
    ),
}


def _conda_records(_: Path) -> Seeds:
    files = artifacts.conda_package("numpy", "2.1", {"lib/x.py": "x"}, "/opt/env")
    return [artifacts._bytes(content) for path, content in files.items() if path.startswith("conda-meta/")]


def _layer_lists(_: Path) -> Seeds:
    files = (layer_lists.LayerFile("lib/x.so", 3, "0" * 64), layer_lists.LayerFile("lib/y", target="x.so"))
    return [layer_lists.LayerList("ucx", "1.17", "0" * 64, files).render()]


def _elf(path: Path) -> None:
    found = read_elf(path, symbols=True)
    if found is not None:
        found.has("dlopen", "GLIBC_2.34")


def _elfs() -> Seeds:
    found = [Path(os.sys.executable).resolve(), *sorted(Path("/lib/x86_64-linux-gnu").glob("libdl.so*"))]
    return [path.read_bytes()[:40_000] for path in found if path.is_file()][:2]


@functools.cache
def seeds_of(name: str) -> Seeds:
    """The seeds of a reader, made once per process."""
    with tempfile.TemporaryDirectory() as folder:
        return READERS[name].seeds(Path(folder))


def input_of(name: str, number: int) -> bytes:
    """Input `number` of the reader `name`."""
    return fuzz_inputs.of_number(seeds_of(name), READERS[name].mutate, name, number)


def fault_of(name: str, data: bytes, folder: Path) -> Exception | None:
    """Let a reader read an input; the exception that no user should see as a traceback, None if it passes."""
    try:
        READERS[name].read(data, folder)
    except (EnvbuildError, *READERS[name].raises):
        return None
    except Exception as error:  # noqa: BLE001 - any other exception is what fuzzing looks for
        return error
    return None
