"""`envbuild push` and `envbuild pull`: image files in registries."""

from __future__ import annotations

from pathlib import Path

import click

from envbuild.cli.common import check_out, log, run_environment, show
from envbuild.cli.options import PATH, with_options
from envbuild.errors import UsageError
from envbuild.kinds import ARTIFACTS
from envbuild.lock.base import registry_of
from envbuild.progress import human_size


@click.command("push")
@click.argument("named", metavar="FILE", type=PATH)
@click.argument("reference", metavar="REF")
@with_options("json")
def push_command(named: Path, reference: str, as_json: bool) -> None:
    """Push the .sqsh or .sif FILE, with its receipt and attestation, to REF in a registry.

    It goes there in the segments of its layers: registries keep those that other images share once, and `envbuild
    pull` fetches only those that are not there yet. FILE needs a passing receipt. Images of docker are pushed by
    their build, with --push.

    \b
    Examples:
      envbuild push pytorch.sqsh registry.example.org/team/pytorch:2.13
    """
    from envbuild.jobs.artifact import open_artifact
    from envbuild.kinds.share import push_file

    environment = run_environment()
    if not named.is_file():
        raise UsageError(f"{named} is no file", "give a .sqsh or .sif file that a build wrote")
    artifact = open_artifact(f"{named.parent}/{named.name}", tuple(ARTIFACTS), None).artifact
    registry = registry_of(reference, environment)
    if registry.reference.digest:
        raise UsageError(f"{reference}: a digest cannot be chosen", "give a tag: REGISTRY/NAME:TAG")
    store = environment.store
    digest, pushed = push_file(named, artifact.kind, artifact.target, artifact.digest, registry, store)
    where = f"{registry.reference.name}@{digest}"
    log(f"{registry.reference}: {human_size(pushed.uploaded_bytes)} uploaded, {pushed.present} pieces were there")
    value = {"path": where, "digest": artifact.digest, "manifest": digest, "uploaded_bytes": pushed.uploaded_bytes}
    show(as_json, value, where)


@click.command("pull")
@click.argument("reference", metavar="REF")
@click.option("--out", type=PATH, metavar="FILE", required=True, help="The .sqsh or .sif file to write.")
@with_options("json")
def pull_command(reference: str, out: Path, as_json: bool) -> None:
    """Pull what `envbuild push` pushed to REF into a file, with its receipt and attestation.

    Only the segments that the store lacks are fetched. The file has the same bytes as the one that was pushed. Where
    the site names signers ([trust]), only what one of them attested is taken.

    \b
    Examples:
      envbuild pull registry.example.org/team/pytorch:2.13 --out /fsx/images/pytorch.sqsh
    """
    from envbuild.kinds.share import pull_file

    check_out(out)
    environment = run_environment()
    made = pull_file(registry_of(reference, environment), out, environment)
    log(f"{out}: {human_size(made.size)}, of which {human_size(made.fetched_bytes)} were fetched")
    value = {
        "path": str(made.path), "digest": made.digest, "target": made.target, "bytes": made.size,
        "fetched_bytes": made.fetched_bytes, "receipt": str(made.receipt) if made.receipt else None,
    }  # fmt: skip
    show(as_json, value, made.path)
