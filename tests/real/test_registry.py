"""The registry client against a real registry: Debian's docker-registry, with skopeo as a second opinion."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
from lab.fake_registry import upload
from lab.forwarder import forwarder
from lab.registry import Lab, missing, registry

from envbuild.base.errors import BuildError, HostError
from envbuild.base.packages import digest_of
from envbuild.cache.http import Transport
from envbuild.image.layout import Blobs
from envbuild.image.model import OCI_CONFIG, OCI_LAYER_GZIP, OCI_MANIFEST, Descriptor, ImageManifest, canonical, parse
from envbuild.image.registry import Registry, open_registry
from envbuild.image.registry_upload import has_blob, mount

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

MIB = 1 << 20


@dataclass
class Progress:
    """What was told of bytes moved."""

    total: int = 0

    def __call__(self, count: int) -> None:
        self.total += count


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with registry(tmp_path_factory.mktemp("locked"), "ada", "s3cret:with colon") as running:
        yield running


def reach(address: str, repository: str, home: Path, **env: str) -> Registry:
    """A repository at `address`, as a user with `home` and these variables reaches it."""
    transport = Transport(insecure=frozenset({address}), timeout_s=5)
    variables = {"HOME": str(home), "PATH": os.environ["PATH"], **env}
    return open_registry(f"{address}/{repository}", transport, variables)


def layer(blobs: Blobs, seed: int, size: int) -> tuple[Descriptor, str]:
    """A layer with one file of `size` incompressible bytes, and its diff id."""
    content = random.Random(seed).randbytes(size)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        info = tarfile.TarInfo(f"file{seed}")
        info.size = size
        tar.addfile(info, io.BytesIO(content))
    packed = gzip.compress(archive.getvalue(), 1, mtime=0)
    return Descriptor(OCI_LAYER_GZIP, blobs.add(packed), len(packed)), digest_of(archive.getvalue())


def image(blobs: Blobs, *seeds: int, size: int = 100_000) -> ImageManifest:
    """An image of one layer a seed."""
    layers = [layer(blobs, seed, size) for seed in seeds]
    rootfs = {"type": "layers", "diff_ids": [diff for _, diff in layers]}
    config = canonical({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs})
    raw = canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": Descriptor(OCI_CONFIG, blobs.add(config), len(config)).as_json(),
            "layers": [blob.as_json() for blob, _ in layers],
        }
    )
    parsed = parse(raw, "lab")
    assert isinstance(parsed, ImageManifest)
    return parsed


def parts(manifest: ImageManifest) -> list[Descriptor]:
    return [manifest.config, *manifest.layers]


def test_what_is_pushed_is_what_skopeo_reads_and_what_is_pulled(lab: Lab, tmp_path: Path) -> None:
    blobs, there = Blobs(tmp_path / "blobs"), reach(lab.address, "round/trip", tmp_path)
    pushed, pulled = image(blobs, 1, 2), Blobs(tmp_path / "pulled")
    progress = Progress()
    done = there.push(blobs, parts(pushed), pushed.raw, OCI_MANIFEST, "v1", on_progress=progress)
    whole = sum(blob.size for blob in parts(pushed))
    assert (done.uploaded, done.mounted, done.present, done.uploaded_bytes) == (3, 0, 0, whole)
    assert progress.total == whole

    inspected = subprocess.run(
        ["skopeo", "inspect", "--tls-verify=false", f"docker://{lab.address}/round/trip:v1"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(inspected.stdout)["Digest"] == pushed.digest
    # skopeo reads and checks every blob when it copies
    subprocess.run(
        [
            "skopeo",
            "copy",
            "-q",
            "--src-tls-verify=false",
            f"docker://{lab.address}/round/trip:v1",
            f"oci:{tmp_path}/copy:v1",
        ],
        check=True,
    )

    raw, media_type = there.manifest("v1")
    assert (raw, media_type) == (pushed.raw, OCI_MANIFEST)
    assert there.manifest(pushed.digest) == (raw, media_type)
    with pytest.raises(BuildError, match="404"):
        there.manifest("v2")
    progress = Progress()
    files = there.fetch_blobs(parts(pushed), pulled, progress)
    assert [file.read_bytes() for file in files] == [blobs.read(b.digest) for b in parts(pushed)]
    assert progress.total == whole
    assert not list((tmp_path / "pulled/partial").iterdir())


def test_what_skopeo_pushed_is_pulled(lab: Lab, tmp_path: Path) -> None:
    blobs, pushed = Blobs(tmp_path / "blobs"), image(Blobs(tmp_path / "blobs"), 3)
    reach(lab.address, "first", tmp_path).push(blobs, parts(pushed), pushed.raw, OCI_MANIFEST, pushed.digest)
    subprocess.run(
        [
            "skopeo",
            "copy",
            "-q",
            "--format=v2s2",
            "--src-tls-verify=false",
            "--dest-tls-verify=false",
            f"docker://{lab.address}/first@{pushed.digest}",
            f"docker://{lab.address}/by/skopeo:1",
        ],
        check=True,
    )
    there = reach(lab.address, "by/skopeo:1", tmp_path)
    found = parse(*_named(there))
    assert isinstance(found, ImageManifest) and found.media_type.startswith("application/vnd.docker.")
    files = there.fetch_blobs(parts(found), Blobs(tmp_path / "pulled"), lambda _count: None)
    assert [digest_of(file.read_bytes()) for file in files] == [b.digest for b in parts(found)]


def _named(there: Registry) -> tuple[bytes, str, str]:
    raw, media_type = there.manifest()
    return raw, str(there.reference), media_type


def test_only_a_changed_layer_is_sent(lab: Lab, tmp_path: Path) -> None:
    blobs, there = Blobs(tmp_path), reach(lab.address, "changed", tmp_path)
    first, second = image(blobs, 10, 11, 12), image(blobs, 10, 11, 13)
    there.push(blobs, parts(first), first.raw, OCI_MANIFEST, "latest")
    before = len(lab.requests("^(PUT|PATCH|POST) .*/changed/blobs/"))
    done = there.push(blobs, parts(second), second.raw, OCI_MANIFEST, "latest")
    # the new layer and the new config, each by POST and PUT
    assert (done.uploaded, done.present) == (2, 2)
    assert len(lab.requests("^(PUT|PATCH|POST) .*/changed/blobs/")) == before + 4
    assert there.manifest("latest")[0] == second.raw
    again = there.push(blobs, parts(second), second.raw, OCI_MANIFEST, "latest")
    assert (again.uploaded, again.present, again.uploaded_bytes) == (0, 4, 0)


def test_blobs_of_another_repository_are_mounted_and_move_no_bytes(lab: Lab, tmp_path: Path) -> None:
    blobs, pushed = Blobs(tmp_path), image(Blobs(tmp_path), 20, 21)
    reach(lab.address, "origin", tmp_path).push(blobs, parts(pushed), pushed.raw, OCI_MANIFEST, "1")
    there = reach(lab.address, "sibling", tmp_path)
    done = there.push(blobs, parts(pushed), pushed.raw, OCI_MANIFEST, "1", mount_from=("nothing/here", "origin"))
    assert (done.uploaded, done.mounted, done.present) == (0, 3, 0)
    assert not lab.requests("^(PATCH|PUT) .*/sibling/blobs/")
    assert len(lab.requests("^POST .*/sibling/blobs/uploads/.*from=origin.* 201$")) == 3
    # what a failed mount began is given up
    assert len(lab.requests("^DELETE .*/sibling/blobs/uploads/.* 204$")) == 3
    assert mount(there.endpoint, pushed.config.digest, "origin", Event())
    assert has_blob(there.endpoint, pushed.config.digest, Event())
    assert not mount(there.endpoint, "sha256:" + "0" * 64, "origin", Event())


def test_a_large_blob_goes_in_chunks(lab: Lab, tmp_path: Path) -> None:
    blobs, there = Blobs(tmp_path), reach(lab.address, "chunks", tmp_path)
    blob, _ = layer(blobs, 30, 5 * MIB)
    progress = Progress()
    upload(there, blob, blobs.path(blob.digest), progress, 2 * MIB)
    assert len(lab.requests("^PATCH .*/chunks/blobs/")) == 3
    assert has_blob(there.endpoint, blob.digest, Event()) and progress.total == blob.size


def test_an_upload_that_lost_a_chunk_goes_on_where_it_was(lab: Lab, tmp_path: Path) -> None:
    blobs = Blobs(tmp_path)
    blob, _ = layer(blobs, 31, 5 * MIB)
    chunks: list[bytes] = []

    def third(data: bytes) -> bool:
        chunks.extend([data] if data.startswith(b"PATCH ") else [])
        return data.startswith(b"PATCH ") and len(chunks) == 3

    with forwarder(lab.address) as line:
        line.swallow = third
        progress = Progress()
        there = reach(line.address, "lost-chunk", tmp_path)
        upload(there, blob, blobs.path(blob.digest), progress, MIB)
        assert line.cuts == 1
    assert there.endpoint.name == line.address and progress.total == blob.size
    # one upload: asked how far it is, and gone on with
    assert len(lab.requests("^POST .*/lost-chunk/blobs/")) == 1
    assert len(lab.requests("^GET .*/lost-chunk/blobs/uploads/.* 204$")) == 1
    assert len(lab.requests("^PATCH .*/lost-chunk/blobs/.* 202$")) == 6
    assert has_blob(reach(lab.address, "lost-chunk", tmp_path).endpoint, blob.digest, Event())


@pytest.mark.parametrize("chunk", [MIB, 16 * MIB])
def test_an_upload_cut_inside_a_request_is_finished(lab: Lab, tmp_path: Path, chunk: int) -> None:
    """This registry drops an upload that was cut inside a chunk: it begins anew, and is whole in the end."""
    blobs = Blobs(tmp_path)
    blob, _ = layer(blobs, 32 + chunk, 5 * MIB)
    with forwarder(lab.address) as line:
        line.up = [int(2.5 * MIB), int(1.5 * MIB)]
        progress = Progress()
        there = reach(line.address, f"cut/{chunk}", tmp_path)
        upload(there, blob, blobs.path(blob.digest), progress, chunk)
        assert line.cuts == 2
    assert progress.total == blob.size and there.endpoint.retries == 5
    fetched = reach(lab.address, f"cut/{chunk}", tmp_path).fetch_blob(blob, Blobs(tmp_path / "pulled"), progress)
    assert fetched.read_bytes() == blobs.read(blob.digest)


def test_a_download_that_is_cut_goes_on_where_it_was(lab: Lab, tmp_path: Path) -> None:
    blobs, pulled = Blobs(tmp_path / "blobs"), Blobs(tmp_path / "pulled")
    blob, _ = layer(blobs, 40, 5 * MIB)
    upload(reach(lab.address, "cut-down", tmp_path), blob, blobs.path(blob.digest), lambda _count: None)
    with forwarder(lab.address) as line:
        # more cuts than retries: each try brings something new
        line.down = [MIB // 2] * 8
        progress = Progress()
        file = reach(line.address, "cut-down", tmp_path).fetch_blob(blob, pulled, progress)
        assert line.cuts == 8
    assert file.read_bytes() == blobs.read(blob.digest) and progress.total == blob.size
    assert len(lab.requests(f"^GET .*/cut-down/blobs/{blob.digest}.* 206$")) == 8


def test_what_an_earlier_run_got_is_used_and_checked(lab: Lab, tmp_path: Path) -> None:
    blobs, there = Blobs(tmp_path / "blobs"), reach(lab.address, "earlier", tmp_path)
    blob, _ = layer(blobs, 41, MIB)
    content = blobs.read(blob.digest)
    upload(there, blob, blobs.path(blob.digest), lambda _count: None)
    for number, start in enumerate((content[:1000], content, b"x" * 1000, content + b"more", b"x" * len(content))):
        pulled, progress = Blobs(tmp_path / f"pulled{number}"), Progress()
        pulled.partial(blob.digest).write_bytes(start)
        file = there.fetch_blob(blob, pulled, progress)
        assert file.read_bytes() == content and progress.total == blob.size
        assert not pulled.partial(blob.digest).exists()


def test_two_runs_that_fetch_one_blob_do_not_spoil_it(lab: Lab, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    blobs, pulled = Blobs(tmp_path / "blobs"), Blobs(tmp_path / "pulled")
    blob, _ = layer(blobs, 42, 3 * MIB)
    upload(reach(lab.address, "both", tmp_path), blob, blobs.path(blob.digest), lambda _count: None)
    with ThreadPoolExecutor(4) as pool:
        fetch = [
            pool.submit(reach(lab.address, "both", tmp_path).fetch_blob, blob, pulled, Progress()) for _ in range(4)
        ]
    assert {digest_of(one.result().read_bytes()) for one in fetch} == {blob.digest}
    assert len(lab.requests(f"^GET .*/both/blobs/{blob.digest}")) == 1


def write_config(home: Path, address: str, login: str = "ada:s3cret:with colon") -> None:
    coded = base64.b64encode(login.encode()).decode()
    (home / ".docker").mkdir(exist_ok=True)
    config = {"auths": {address: {"auth": coded}}}
    (home / ".docker/config.json").write_text(json.dumps(config))


def write_helper(home: Path, body: str) -> dict[str, str]:
    """docker-credential-lab on PATH, named by config.json for all registries."""
    (home / ".docker").mkdir(exist_ok=True)
    (home / ".docker/config.json").write_text('{"credsStore": "lab", "auths": {}}')
    program = home / "bin/docker-credential-lab"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return {"PATH": f"{home}/bin:{os.environ['PATH']}"}


def test_credentials_of_each_place_open_a_locked_registry(locked: Lab, tmp_path: Path) -> None:
    blobs, number = Blobs(tmp_path / "blobs"), 0

    def opens(home: Path, **env: str) -> None:
        nonlocal number
        number += 1
        pushed = image(blobs, 50, 50 + number)
        there = reach(locked.address, f"places/{number}", home, **env)
        there.push(blobs, parts(pushed), pushed.raw, OCI_MANIFEST, "1")
        assert there.manifest("1") == (pushed.raw, OCI_MANIFEST)

    homes = [tmp_path / name for name in ("config", "helper", "netrc", "podman", "variables")]
    for home in homes:
        home.mkdir()
    write_config(homes[0], locked.address)
    opens(homes[0])
    asked = homes[1] / "asked"
    answer = json.dumps({"ServerURL": "x", "Username": "ada", "Secret": "s3cret:with colon"})
    opens(homes[1], **write_helper(homes[1], f"cat >>{asked}; echo >>{asked}; echo '{answer}'"))
    assert asked.read_text() == f"{locked.address}\n"  # asked once, by the registry's name
    (homes[2] / ".netrc").write_text('machine 127.0.0.1 login ada password "s3cret:with colon"\n')
    (homes[2] / ".netrc").chmod(0o600)
    opens(homes[2])
    write_config(homes[3], locked.address)
    opens(tmp_path, REGISTRY_AUTH_FILE=str(homes[3] / ".docker/config.json"))
    opens(
        homes[4],
        ENVBUILD_REGISTRY=locked.address,
        ENVBUILD_REGISTRY_USER="ada",
        ENVBUILD_REGISTRY_PASSWORD="s3cret:with colon",
    )


def test_wrong_and_missing_passwords_are_said_without_them(locked: Lab, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="401 Unauthorized") as nobody:
        reach(locked.address, "some/thing", tmp_path).manifest("1")
    assert "docker login" in str(nobody.value.hint) and "netrc" in str(nobody.value.hint)
    write_config(tmp_path, locked.address, "ada:hunter2")
    with pytest.raises(BuildError, match=r"some/thing:1.*401 Unauthorized") as wrong:
        reach(locked.address, "some/thing", tmp_path).manifest("1")
    assert "hunter2" not in f"{wrong.value} {wrong.value.hint}"
    assert str(tmp_path / ".docker/config.json") in str(wrong.value.hint)
    blobs = Blobs(tmp_path / "blobs")
    pushed = image(blobs, 60)
    with pytest.raises(BuildError, match=r"pushing .*some/thing:1.*401"):
        reach(locked.address, "some/thing", tmp_path).push(blobs, parts(pushed), pushed.raw, OCI_MANIFEST, "1")


def test_a_helper_that_fails_or_hangs_is_named(locked: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = write_helper(tmp_path, "echo 'the keyring is locked'; exit 1")
    with pytest.raises(HostError, match=r"docker-credential-lab get failed.*keyring is locked"):
        reach(locked.address, "a", tmp_path, **env).manifest("1")
    monkeypatch.setattr("envbuild.image.credentials._HELPER_TIMEOUT_S", 0.3)
    env = write_helper(tmp_path, "sleep 60 & sleep 60")
    began = time.monotonic()
    with pytest.raises(HostError, match="did not answer within"):
        reach(locked.address, "a", tmp_path, **env).manifest("1")
    assert time.monotonic() - began < 5
    env = write_helper(tmp_path, "echo 'credentials not found in native keychain'; exit 1")
    with pytest.raises(BuildError, match="401"):
        reach(locked.address, "a", tmp_path, **env).manifest("1")


def test_a_mirror_is_asked_first_and_one_that_fails_is_passed_over(lab: Lab, locked: Lab, tmp_path: Path) -> None:
    blobs, pushed = Blobs(tmp_path / "blobs"), image(Blobs(tmp_path / "blobs"), 70, 71)
    for repository in ("hub/tools/app", "tools/only-here"):
        reach(lab.address, repository, tmp_path).push(blobs, parts(pushed), pushed.raw, OCI_MANIFEST, "1")
    transport = Transport(insecure=frozenset({lab.address}), timeout_s=5)
    env = {"HOME": str(tmp_path)}
    mirrors = ("http://127.0.0.1:9", f"http://{locked.address}", f"http://{lab.address}/hub")
    # the registry itself is not there: the third mirror serves all
    away = open_registry("registry.invalid/tools/app:1", transport, env, mirrors)
    assert away.manifest()[0] == pushed.raw
    away.fetch_blobs(parts(pushed), Blobs(tmp_path / "one"), lambda _count: None)
    # no mirror has it: the registry does
    here = open_registry(f"{lab.address}/tools/only-here:1", transport, env, mirrors)
    assert here.manifest()[0] == pushed.raw
    here.fetch_blobs(parts(pushed), Blobs(tmp_path / "two"), lambda _count: None)
    with pytest.raises(BuildError) as nowhere:
        open_registry("registry.invalid/no/such:1", transport, env, mirrors).manifest()
    for said in ("127.0.0.1:9: ", f"{locked.address}: HTTP 401", "/hub: HTTP 404", "registry.invalid"):
        assert said in nowhere.value.message


def test_an_image_that_is_not_there_is_named(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=f"{lab.address}/no/such:tag: .*404") as missing_one:
        reach(lab.address, "no/such:tag", tmp_path).manifest()
    assert "repository and tag" in str(missing_one.value.hint)
    with pytest.raises(BuildError, match="404"):
        blob = Descriptor(OCI_LAYER_GZIP, "sha256:" + "0" * 64, 5)
        reach(lab.address, "no/such", tmp_path).fetch_blob(blob, Blobs(tmp_path), Progress())
    assert not list((tmp_path / "partial").iterdir())


def test_plain_http_is_spoken_only_where_it_is_allowed(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as refused:
        open_registry(f"{lab.address}/a:1", Transport(), {"HOME": str(tmp_path)}).manifest()
    assert "insecure" in str(refused.value.hint)


def test_certificates_are_checked_by_the_sites_bundle(tmp_path: Path) -> None:
    blobs, pushed = Blobs(tmp_path / "blobs"), image(Blobs(tmp_path / "blobs"), 90)
    with registry(tmp_path / "tls", "ada", "s3cret", tls=True) as lab:
        home = tmp_path / "home"
        home.mkdir()
        write_config(home, lab.address, "ada:s3cret")

        def opened(transport: Transport) -> Registry:
            return open_registry(f"{lab.address}/a/b:1", transport, {"HOME": str(home)})

        with pytest.raises(BuildError, match="certificate") as refused:
            opened(Transport()).manifest()
        assert "CA bundle" in str(refused.value.hint)
        trusting = opened(Transport(verify=str(tmp_path / "tls/cert.pem")))
        trusting.push(blobs, parts(pushed), pushed.raw, OCI_MANIFEST, "1")
        lenient = opened(Transport(unverified=frozenset({"127.0.0.1"})))
        assert lenient.manifest()[0] == trusting.manifest()[0] == pushed.raw
        with pytest.raises(BuildError, match=r"no-bundle\.pem"):
            opened(Transport(verify=str(tmp_path / "no-bundle.pem"))).manifest()
        with pytest.raises(BuildError, match="HTTP 400"):
            opened(Transport(insecure=frozenset({lab.address}))).manifest()


def test_ctrl_c_stops_a_pull_at_once_and_keeps_what_came(lab: Lab, tmp_path: Path) -> None:
    blobs = Blobs(tmp_path / "blobs")
    blob, _ = layer(blobs, 80, 8 * MIB)
    upload(reach(lab.address, "slow", tmp_path), blob, blobs.path(blob.digest), lambda _count: None)
    script = f"""
import sys, time
from pathlib import Path
from envbuild.image.layout import Blobs
from envbuild.image.model import Descriptor
from envbuild.image.registry import open_registry
from envbuild.cache.http import Transport
there = open_registry("{lab.address}/slow", Transport(insecure=frozenset({{"{lab.address}"}})), {{}})
def moved(count):
    print("moved", flush=True)
    time.sleep(0.5)
blob = Descriptor({blob.media_type!r}, {blob.digest!r}, {blob.size})
there.fetch_blobs([blob], Blobs(Path({str(tmp_path / "pulled")!r})), moved)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert child.stdout is not None
    child.stdout.readline()
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, errors = child.communicate(timeout=20)
    assert time.monotonic() - began < 3 and "KeyboardInterrupt" in errors
    partial = tmp_path / "pulled/partial" / blob.digest.partition(":")[2]
    assert 0 < partial.stat().st_size < blob.size
    shutil.rmtree(tmp_path / "pulled/partial", ignore_errors=True)
