"""Common parts of `envbuild enroot`, `envbuild apptainer` and `envbuild build`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.cli.common import (
    ImageBuildOptions,
    check_out,
    dry_run_option,
    faults_option,
    json_option,
    locked_option,
    log,
    no_bytecode_option,
    no_verify_option,
    offline_option,
    open_recipe,
    open_target,
    packed,
    print_json,
    show_plan,
    target_option,
)
from envbuild.environment import Environment, load_environment
from envbuild.errors import UsageError

if TYPE_CHECKING:
    from envbuild.kinds.commit import Result

DEFAULT_RECIPE = "pt_cpu"

runtime_option = click.option(
    "--runtime", metavar="NAME",
    help="What launches it for verification: enroot, apptainer, or own (user namespaces). Default: the best here.",
)  # fmt: skip
from_option = click.option(
    "--from", "source", metavar="IMAGE",
    help="Convert this image instead: docker://[USER@][REGISTRY#]IMAGE[:TAG], dockerd://IMAGE, "
    "docker-archive:FILE or oci:DIR[:TAG].",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices(ImageBuildOptions):
    """Values of the options that these commands share."""

    target: str | None
    compression: str
    runtime: str | None


with_choices = packed(
    Choices, "choices", target_option,
    click.option(
        "--compression", default="zstd", show_default=True, metavar="NAME[:LEVEL]",
        help="zstd, gzip, lz4 or xz. gzip for kernels without zstd in squashfs.",
    ),
    no_verify_option, faults_option, runtime_option, no_bytecode_option, dry_run_option,
    locked_option, offline_option, json_option,
)  # fmt: skip


def make(
    kinds: Sequence[str],
    recipe: str | None,
    choices: Choices,
    *,
    source: str | None = None,
    out: Path | None = None,
    engine: str = "native",
) -> None:
    """Make image files of `kinds` from a recipe or an image, and print their paths or one JSON object.

    A dry run prints the plan.
    """
    from envbuild.artifacts.apptainer_engine import find_engine
    from envbuild.image.reference import parse_source
    from envbuild.image.squashfs.codec import codec_of
    from envbuild.kinds import ARTIFACTS, squash
    from envbuild.kinds.image import prepare_image
    from envbuild.recipe.targets import Target, host_arch
    from envbuild.verify.static_checks import check_torch

    if source is not None and recipe is not None:
        raise UsageError("a recipe and --from are two things to build from", "name one of them")
    check_out(out)
    codec = codec_of(choices.compression)
    environment = load_environment()
    _check_runtime(kinds, choices, environment)
    if engine != "native":
        find_engine(environment.variables)

    def options_for(file: Callable[[str], squash.OutputFile]) -> squash.ImageFileOptions:
        files = tuple(squash.OutputFile(kind, out) if out else file(kind) for kind in kinds)
        return squash.ImageFileOptions(files, codec, not choices.no_verify, choices.faults, choices.runtime, engine)

    if source is not None:
        image = parse_source(source)
        of_image = options_for(lambda kind: squash.imported_file(kind, image))
        if choices.dry_run:
            squash.check_files(of_image)
            for file in of_image.files:
                about = {"kind": file.kind, "from": image.url, "path": str(file.path.absolute())}
                if choices.as_json:
                    print_json(about)
                else:
                    log(f"{file.kind}: {image.url} to {file.path}")
            return
        chosen = Target.parse(choices.target or f"cpu-{host_arch()}")
        show(squash.make_from_image(image, chosen, of_image, environment), choices)
        return
    loaded = open_recipe(recipe or DEFAULT_RECIPE, environment)
    one = prepare_image(
        loaded, open_target(loaded, choices.target, environment), environment, locked=choices.locked,
        offline=choices.offline, bytecode=not choices.no_bytecode, log=log, write=not choices.dry_run,
    )  # fmt: skip
    plan = one.plan
    check_torch(loaded, plan, verify=not choices.no_verify)
    of_recipe = options_for(
        lambda kind: squash.OutputFile(kind, ARTIFACTS[kind].default_path(plan.recipe, plan.target))
    )
    if choices.dry_run:
        squash.check_files(of_recipe)
        show_plan(plan, choices.as_json)
        return
    show(squash.make_from_recipe(one, of_recipe, environment, offline=choices.offline), choices)


def _check_runtime(kinds: Sequence[str], choices: Choices, environment: Environment) -> None:
    """Raise an error for an unsuitable --runtime before anything is built."""
    from envbuild.verify.runtimes import choose

    for kind in () if choices.no_verify else kinds:
        choose(kind, choices.runtime, environment.variables)


def show(results: Sequence[Result], choices: Choices) -> None:
    """Print the results."""
    if not choices.as_json:
        for result in results:
            click.echo(result.path)
    elif len(results) == 1:
        print_json(results[0].as_json())
    else:
        print_json({"artifacts": [result.as_json() for result in results]})
