"""`envbuild store`: the store of downloads and layers."""

from __future__ import annotations

import os

import click

from envbuild import resources
from envbuild.cli.common import log, print_json
from envbuild.cli.options import with_options
from envbuild.environment import load_environment
from envbuild.errors import VerificationError
from envbuild.layers.store_check import check_store
from envbuild.progress import human_size


@click.group("store")
def store_command() -> None:
    """Check the store: wheels, packages, layers and segments, which all recipes share.

    \b
    Examples:
      envbuild store check
    """


@store_command.command("check")
@with_options("json")
def check_command(as_json: bool) -> None:
    """Read every file of the store and compare it with its sha256; remove what is damaged.

    Builds compare what they use, once after each boot. This reads everything: after a failing disk, or after others
    could write to the store. The next build fetches or makes again what was removed. Exit code 5 when something was.

    \b
    Examples:
      envbuild store check
      ENVBUILD_STORE=/fsx/envbuild envbuild store check --json
    """
    environment = load_environment()
    count, size, removed = check_store(environment.store, resources.workers(os.environ))
    if as_json:
        store = str(environment.store.root)
        print_json({"store": store, "files": count, "bytes": size, "removed": [str(path) for path in removed]})
    else:
        log(f"{count} files, {human_size(size)}: {len(removed) or 'none'} damaged")
    if removed:
        raise VerificationError(
            f"{len(removed)} files of {environment.store.root} were damaged and are removed",
            "if this comes again, check the disk, and who may write to the store",
        )
