"""What `envbuild enroot`, `envbuild apptainer` and `envbuild build` share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from envbuild.cli.common import open_recipe, print_json, say
from envbuild.environment import load_environment
from envbuild.errors import UsageError

if TYPE_CHECKING:
    from envbuild.make import Result
    from envbuild.make_files import File, Wish
    from envbuild.plan.plan import Plan

DEFAULT_RECIPE = "pt_cpu"
F = TypeVar("F", bound=Callable[..., Any])

compression_option = click.option(
    "--compression", default="zstd", show_default=True, metavar="NAME[:LEVEL]",
    help="zstd, gzip, lz4 or xz. gzip for kernels without zstd in squashfs.",
)  # fmt: skip
from_option = click.option(
    "--from", "source", metavar="IMAGE",
    help="Convert this image instead: docker://[USER@][REGISTRY#]IMAGE[:TAG], dockerd://IMAGE, "
    "docker-archive:FILE or oci:DIR[:TAG].",
)  # fmt: skip
no_verify_option = click.option("--no-verify", is_flag=True, help="Only build; leave no receipt.")
faults_option = click.option(
    "--faults", is_flag=True, help="Verify too that a killed rank restarts from the snapshot."
)
no_bytecode_option = click.option(
    "--no-bytecode", is_flag=True, help="Leave compiled modules out of the image."
)
runtime_option = click.option(
    "--runtime", metavar="NAME",
    help="What launches it for verification: enroot, apptainer, or own (user namespaces). Default: the best here.",
)  # fmt: skip


def make(
    kinds: Sequence[str],
    recipe: str | None,
    *,
    source: str | None = None,
    target: str | None,
    out: Path | None = None,
    compression: str,
    verify: bool,
    faults: bool,
    runtime: str | None,
    bytecode: bool,
    dry_run: bool,
    locked: bool,
    offline: bool,
    engine: str = "native",
) -> tuple[list[Result], Plan | None]:
    """Make files of `kinds` of a recipe or an image. With `dry_run` no results, but the plan, if any."""
    from envbuild.image.source import parse_source
    from envbuild.image.squashfs.codec import codec_of
    from envbuild.make_files import File, Wish
    from envbuild.make_image import prepare_image
    from envbuild.make_squash import (
        default_file,
        imported_file,
        make_from_image,
        make_from_recipe,
    )

    if source is not None and recipe is not None:
        raise UsageError("a recipe and --from are two things to build from", "name one of them")
    codec = codec_of(compression)

    def wish(file: Callable[[str], File]) -> Wish:
        files = tuple(File(kind, out) if out else file(kind) for kind in kinds)
        return Wish(files, codec, verify, faults, runtime, engine)

    environment = load_environment()
    if verify:
        from envbuild.verify.runtimes import choose

        for kind in kinds:  # a name that does not fit is told before anything is built
            choose(kind, runtime, environment.variables)
    if source is not None:
        from envbuild.recipe.targets import Target, host_arch

        image = parse_source(source)
        of_image = wish(lambda kind: imported_file(kind, image))
        if dry_run:
            for file in of_image.files:
                say(f"{file.kind}: {image.url} to {file.path}")
            return [], None
        chosen = Target.parse(target or f"cpu-{host_arch()}")
        return make_from_image(image, chosen, of_image, environment, say), None
    loaded = open_recipe(recipe or DEFAULT_RECIPE, environment)
    one = prepare_image(
        loaded, loaded.target(target)[0], environment, locked=locked, offline=offline,
        bytecode=bytecode, say=say,
    )  # fmt: skip
    of_recipe = wish(lambda kind: default_file(kind, one.plan))
    if dry_run:
        return [], one.plan
    return make_from_recipe(one, of_recipe, environment, say, offline=offline), one.plan


def show_results(results: Sequence[Result], plan: Plan | None, *, as_json: bool) -> None:
    """Print what was made, or with nothing made the plan: paths for people, one object for programs."""
    if not results:
        if plan is not None and as_json:
            print_json(plan.as_json())
        elif plan is not None:
            from envbuild.cli.plan import show

            show(plan)
        return
    if not as_json:
        for result in results:
            click.echo(result.path)
    elif len(results) == 1:
        print_json(results[0].as_json())
    else:
        print_json({"artifacts": [result.as_json() for result in results]})
