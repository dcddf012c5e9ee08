"""The description of an artifact that `envbuild inspect --json` prints.

docs/reference/inspect.md documents its fields.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from envbuild.base import host
from envbuild.base.files import MISSING
from envbuild.base.masking import masked, masked_text, masked_words
from envbuild.contract.kinds import ARTIFACTS, DOCKER, Artifact, FolderArtifact, read_folder
from envbuild.contract.manifest import changes
from envbuild.contract.receipt import read_receipt, receipt_path
from envbuild.environment import Environment
from envbuild.inspect.facts import ArtifactReader, Description, Inventory, completed
from envbuild.run_environment import load_environment

FORMAT = 1


def describe(about: Description, contents: Inventory | None, *, exact: bool = False) -> dict[str, Any]:
    """Return the description of an artifact, with secrets masked.

    Without `contents` (the artifact was not read), every field about its content is None. For `exact`, see
    `receipt_of`.
    """
    about = completed(about, contents)
    python = {"version": about.python, "full": about.python_version or None, "interpreter": about.interpreter or None}
    return {
        "format": FORMAT,
        "artifact": about.spelling,
        "kind": about.kind,
        "digest": about.digest or about.identity or None,
        "image_id": about.identity if about.layers else None,
        "recipe": {"name": about.recipe, "digest": about.recipe_digest or None} if about.recipe else None,
        "locks": {"packages": about.lock_digest or None, "base": about.base_lock_digest or None},
        "plan": about.plan_digest or None,
        "target": about.target or None,
        "platform": about.platform or None,
        "python": python if about.python else None,
        "base": _base(about, contents),
        "envbuild": about.envbuild or None,
        "created": about.created or None,
        **_packages(contents),
        "layers": [
            asdict(layer) | {"size": layer.size or None, "title": masked_text(layer.title)} for layer in about.layers
        ],
        "labels": masked(about.labels),
        "env": masked(about.env),
        "entrypoint": masked_words(about.entrypoint),
        "cmd": masked_words(about.cmd),
        "workdir": about.workdir or None,
        "user": about.user or None,
        "files": len(contents.files) if contents else None,
        "size": contents.size if contents else None,
        "stored": about.stored or None,
        "filesystem": about.filesystem or None,
        "receipt": receipt_of(about, exact=exact),
    }


def receipt_of(about: Description, *, exact: bool = False) -> dict[str, Any] | None:
    """Return the receipt of an artifact, None without one; `matches` is whether it is for exactly this artifact.

    With `exact`, all files of an environment are read again to find those that changed since it was verified. Raises
    OSError for a file that cannot be read.
    """
    # That of an artifact without a path is beside the default path of `envbuild docker`.
    if about.place is not None:
        path = receipt_path(about.place.absolute())
    elif about.recipe and about.target:
        path = receipt_path(DOCKER.default_path(about.recipe, about.target).absolute())
    else:
        return None
    try:
        receipt = read_receipt(path)
    except (*MISSING, ValueError):
        return None
    try:
        digest, plan = receipt["artifact"]["digest"], receipt["plan"]["digest"]
        # Daemons and docker archives do not keep the manifest, whose digest is in the receipt.
        matches = digest == about.digest if about.digest else plan == about.plan_digest
        kind, changed = ARTIFACTS.get(about.kind), list[str]()
        if matches and kind is not None and about.place is not None:
            changed = changed_files(about.place, kind, receipt["artifact"].get("manifest", ""), exact=exact)
        return {
            "path": str(path),
            "passed": bool(receipt["passed"]),
            "matches": matches and not changed,
            "changed": changed,
            "verified_at": receipt.get("verified_at"),
            "pushed": receipt["artifact"].get("pushed"),
        }
    except (ValueError, KeyError):
        return None


def changed_files(path: Path, kind: Artifact, manifest: str, *, exact: bool = False) -> list[str]:
    """Return the files of the artifact at `path` that differ from its manifest, whose sha256 is `manifest`.

    "" stands for the manifest inside of the artifact. With `exact`, files with an unchanged stat are read again, too.
    The digest of an image covers all of it, so none of its files is named. Raises BuildError for a damaged manifest.
    """
    built = read_folder(path) if isinstance(kind, FolderArtifact) else None
    if built is None:
        return []
    environment = load_environment()
    workers = host.workers(environment.variables)
    return changes(path, built.state, manifest, environment.store, workers, exact=exact)


def bill_of_materials(opened: ArtifactReader, contents: Inventory, environment: Environment) -> str:
    """Return the CycloneDX bill of materials of an artifact, with the time of SOURCE_DATE_EPOCH if that is set."""
    from envbuild.inspect.sbom import cyclonedx

    date = environment.source_date if "SOURCE_DATE_EPOCH" in environment.variables else None
    return cyclonedx(opened.about, contents, date)


def _base(about: Description, contents: Inventory | None) -> dict[str, Any] | None:
    release = contents.os if contents else {}
    if not about.base and not release:
        return None
    return {
        "name": about.base or None,
        "digest": about.base_digest or None,
        "os": release.get("ID"),
        "suite": release.get("VERSION_CODENAME") or release.get("VERSION_ID"),
        "title": release.get("PRETTY_NAME"),
    }


def _packages(contents: Inventory | None) -> dict[str, Any]:
    """Return the fields about packages, None for an artifact that was not read."""
    if contents is None:
        names = ("conda_packages", "python_packages", "debian_packages", "source_built", "host_layers", "fabric")
        return dict.fromkeys((*names, "project"))
    optional = ("sha256", "license", "record")
    layers, project = contents.state.get("layers"), contents.state.get("project")
    return {
        "conda_packages": [
            {k: v or None if k in optional else v for k, v in asdict(package).items()} for package in contents.conda
        ],
        "python_packages": [
            {"name": p.name, "version": p.version, "record": p.record or None, "location": p.location}
            for p in contents.python
        ],
        "debian_packages": [asdict(package) for package in contents.debian],
        "source_built": [
            {**asdict(built), "source": built.source or None, "licences": list(built.licences)}
            for built in contents.built
        ],
        # Layers that the environment takes from the nodes.
        "host_layers": [
            {name: layer.get(name) for name in ("name", "version", "path")}
            for layer in (layers if isinstance(layers, list) else ())
            if isinstance(layer, dict) and layer.get("path")
        ],
        "fabric": contents.state.get("fabric"),
        "project": project if isinstance(project, dict) else None,
    }
