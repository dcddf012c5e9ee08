"""`envbuild push` and `envbuild pull`: artifacts in registries."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.base.errors import UsageError
from envbuild.base.files import absolute_path, named_path
from envbuild.base.progress import log, transfer
from envbuild.base.text import human_size
from envbuild.cli import complete
from envbuild.cli.common import check_out, open_recipe, run_environment, show
from envbuild.cli.options import PATH, with_options
from envbuild.contract.kinds import ARTIFACTS, FolderArtifact, kinds_of
from envbuild.environment import Environment
from envbuild.image.registry import Pushed, Registry
from envbuild.jobs.artifact import open_artifact
from envbuild.kinds import kind_at, read_artifact
from envbuild.kinds.built import find_built


@click.command("push")
@click.argument("named", metavar="RECIPE|ARTIFACT", shell_complete=complete.recipes_or_artifacts)
@click.argument("reference", metavar="REF")
@with_options("json")
def push_command(named: str, reference: str, as_json: bool) -> None:
    """Push ARTIFACT, with its receipt and attestations, to REF in a registry.

    ARTIFACT is a .sqsh or .sif file, the folder of a venv or conda environment, or oci:DIR, a layout that `envbuild
    docker --out` wrote; of a RECIPE, it is what was built here. It needs a passing receipt, except for a layout.

    A file goes there in the segments of its layers, an environment as what it was built from: registries keep once what
    several share, and `envbuild pull` fetches only what is not there yet. `docker pull` takes a layout from there.

    \b
    Examples:
      envbuild push pytorch.sqsh registry.example.org/team/pytorch:2.13
      envbuild push build/pt_cpu/cpu-x86_64/venv registry.example.org/team/pytorch:2.13-venv
      envbuild push oci:pytorch registry.example.org/team/pytorch:2.13-docker
    """
    environment = run_environment()
    registry = environment.registry(reference)
    if registry.reference.digest:
        raise UsageError(f"{reference}: a digest cannot be chosen", "give a tag: REGISTRY/NAME:TAG")
    content, digest, pushed = _pushed(named, registry, environment)
    where = f"{registry.reference.name}@{digest}"
    log(f"{registry.reference}: {human_size(pushed.uploaded_bytes)} uploaded, {pushed.present} pieces were there")
    value = {"path": where, "digest": content, "manifest": digest, "uploaded_bytes": pushed.uploaded_bytes}
    show(as_json, value, where)


@click.command("pull")
@click.argument("reference", metavar="REF")
@click.option("--out", type=PATH, metavar="PATH", required=True, help="The .sqsh or .sif file, or the folder.")
@click.option("--no-verify", is_flag=True, help="Only build the environment; leave no receipt.")
@with_options("json")
def pull_command(reference: str, out: Path, no_verify: bool, as_json: bool) -> None:
    """Pull what `envbuild push` pushed to REF, with its receipt and attestations.

    Only what the store lacks is fetched. A file has the same bytes as the one that was pushed. A venv or conda
    environment is built from the same packages by the same plan, and verified: it has its path in its files. Where the
    site names signers ([trust]), only what one of them attested is taken.

    \b
    Examples:
      envbuild pull registry.example.org/team/pytorch:2.13 --out /fsx/images/pytorch.sqsh
      envbuild pull registry.example.org/team/pytorch:2.13-venv --out /fsx/envs/pytorch
    """
    from envbuild.kinds.share import open_pushed, pull_file
    from envbuild.kinds.share_environment import is_environment, pull_environment

    check_out(out)
    environment = run_environment()
    registry = environment.registry(reference)
    data, blobs = open_pushed(registry, environment.store)
    if is_environment(data):
        made = pull_environment(data, blobs, registry, absolute_path(out), environment, verify=not no_verify)
    else:
        made = pull_file(data, blobs, registry, out, environment)
    log(f"{out}: {human_size(made.size)}, of which {human_size(made.fetched_bytes)} were fetched")
    value = {
        "path": str(made.path),
        "digest": made.digest,
        "target": made.target,
        "bytes": made.size,
        "fetched_bytes": made.fetched_bytes,
        "receipt": str(made.receipt) if made.receipt else None,
    }
    show(as_json, value, made.path)


def _pushed(named: str, registry: Registry, environment: Environment) -> tuple[str, str, Pushed]:
    """Push the artifact `named`; return its digest, that of its manifest, and what was uploaded."""
    if named.startswith("oci:"):
        return _push_layout(named.removeprefix("oci:"), registry, environment)
    built = find_built(named, kinds_of("folder", "file"), site_folders=environment.site.recipe_folders)
    path = named_path(Path(named)) if built is None else built.path
    kind = kind_at(path)
    if kind is None:
        raise UsageError(
            f"{named} is no artifact of envbuild", "give the file or folder that a build wrote, or oci:DIR, a layout"
        )
    artifact = open_artifact(f"{path.parent}/{path.name}", tuple(ARTIFACTS), None).artifact
    if isinstance(kind, FolderArtifact):
        from envbuild.kinds.share_environment import push_environment

        loaded = open_recipe(artifact.recipe, environment)
        done = push_environment(path, kind, read_artifact(path).state, loaded, registry, environment)
    else:
        from envbuild.kinds.share import push_file

        done = push_file(path, artifact.kind, artifact.target, artifact.digest, registry, environment.store)
    return artifact.digest, *done


def _push_layout(text: str, registry: Registry, environment: Environment) -> tuple[str, str, Pushed]:
    from envbuild.image.layout import layout_image
    from envbuild.image.reference import folder_and_tag

    folder, tag = folder_and_tag(text)
    pulled = layout_image(folder, tag)
    manifest = pulled.manifest
    wanted = [manifest.config, *manifest.layers]
    with transfer(f"pushing to {registry.reference}", sum(blob.size for blob in wanted)) as on_progress:
        pushed = registry.push(
            pulled.blobs, wanted, manifest.raw, manifest.media_type, registry.reference.pointer, on_progress=on_progress
        )
    return manifest.digest, manifest.digest, pushed
