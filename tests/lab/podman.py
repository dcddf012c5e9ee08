"""podman without root in the lab's cluster: what it needs, and a small image as an OCI layout."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

PROGRAMS = ("podman", "crun", "newuidmap", "fusermount3", "squashfuse", "skopeo", "docker-registry")


def missing() -> str | None:
    """Why podman cannot run as a user in the lab; None when it can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    packages = "podman, crun, uidmap, fuse3, squashfuse, skopeo, docker-registry"
    return f"not installed: {', '.join(absent)} (Debian: {packages})" if absent else None


def write_layout(tree: Path, folder: Path, variables: dict[str, str]) -> str:
    """Write the tree as an image of one layer into the OCI layout `folder`; the digest of its manifest."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(tree, arcname=".")
    layer = blob(packed.getvalue(), "layer.v1.tar")
    arch = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "amd64")
    config = {
        "architecture": arch,
        "os": "linux",
        "config": {"Env": [f"{name}={value}" for name, value in variables.items()], "WorkingDir": "/workspace"},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
    }
    described = blob(json.dumps(config).encode(), "config.v1+json")
    parts = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json"}
    manifest = blob(json.dumps({**parts, "config": described, "layers": [layer]}).encode(), "manifest.v1+json")
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(manifest["digest"])
