"""`envbuild docker`."""

from __future__ import annotations

from functools import partial

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
    print_plan,
)
from envbuild.environment import load_environment


@click.command("docker")
@click.argument("recipe")
@click.option(
    "--target", "targets", multiple=True, metavar="TARGET",
    help="ACCELERATOR-ARCH, such as cpu-x86_64; repeatable: one multi-platform image. Default: this host's.",
)  # fmt: skip
@click.option("--tag", metavar="REF", help="Name of the image. Default: RECIPE:TARGET.")
@click.option("--push", is_flag=True, help="Push to the registry that --tag names.")
@click.option(
    "--format", "form", type=click.Choice(["oci", "docker"]), default="oci", show_default=True,
    help="Media types of what --push sends. docker: for `enroot import`, which asks for Docker's alone.",
)  # fmt: skip
@click.option("--out", metavar="FORM:PATH", help="oci:DIR or docker-archive:FILE, in place of a daemon.")
@click.option(
    "--builder", type=click.Choice(["native", "dockerfile"]), default="native", show_default=True,
    help="dockerfile: `docker build` of Dockerfile.cpu or Dockerfile.gpu with the locked requirements.",
)  # fmt: skip
@click.option("--base", metavar="IMAGE", help="For --builder dockerfile: the image to build on, with Python and venv.")
@packed(
    ImageBuildOptions, "how", no_verify_option, faults_option, no_bytecode_option, dry_run_option,
    locked_option, offline_option, json_option,
)  # fmt: skip
def docker_command(
    recipe: str,
    targets: tuple[str, ...],
    tag: str | None,
    push: bool,
    form: str,
    out: str | None,
    builder: str,
    base: str | None,
    how: ImageBuildOptions,
) -> None:
    """Build the image of RECIPE from its locks and prove it by training in two containers.

    It is assembled without a daemon, root or emulation, for any architecture. Without --out or --push it goes
    into the docker daemon, which is sent only the layers that it lacks. Verification needs a daemon.

    \b
    Examples:
      envbuild docker pt_cpu
      envbuild docker pt_cpu --out oci:image --target cpu-x86_64 --target cpu-aarch64
      envbuild docker pt_cpu --tag registry.example.org/team/pt_cpu:2.13 --push
      envbuild docker pt_cpu --tag registry.example.org/team/pt_cpu:2.13 --push --format docker
      envbuild docker pt_cpu --builder dockerfile --base registry.example.org/library/python:3.11-slim-bookworm
      docker run --rm pt_cpu:cpu-x86_64 torchrun --nproc-per-node 2 -m ddp_train 3 1
    """
    from envbuild.artifacts.docker import ImageOutput, check_tag
    from envbuild.errors import UsageError
    from envbuild.kinds.dockerfile import check_dockerfile, make_by_dockerfile, prepare_dockerfile
    from envbuild.kinds.image import ImageOptions, check_options, make_images, prepare_image
    from envbuild.verify.static_checks import check_torch

    place = ImageOutput.parse(out) if out else None
    check_out(place.path if place else None)
    if push and tag is None:
        raise UsageError("--push needs --tag", "--tag REGISTRY/NAME:TAG")
    if form != "oci" and not push:
        raise UsageError(f"--format {form} is for --push", "add --tag REGISTRY/NAME:TAG --push, or leave it out")
    environment = load_environment()
    loaded = open_recipe(recipe, environment)
    wanted = [open_target(loaded, name, environment) for name in targets or (None,)]
    if len({target.arch for target in wanted}) < len(wanted):
        raise UsageError("two targets of one architecture do not fit into one image")
    prepare = prepare_image
    if builder == "dockerfile":
        prepare = partial(prepare_dockerfile, base=base)
    elif base:
        raise UsageError("--base is for --builder dockerfile", "otherwise say `base` in the recipe's [image]")
    prepared = [
        prepare(
            loaded, target, environment, locked=how.locked, offline=how.offline,
            bytecode=not how.no_bytecode, log=log, write=not how.dry_run,
        )
        for target in wanted
    ]  # fmt: skip
    name = check_tag(tag or f"{loaded.recipe.name}:{wanted[0].name}", push=push)
    options = ImageOptions(name, place, push, verify=not how.no_verify, faults=how.faults, form=form)
    for one in prepared:
        check_torch(loaded, one.plan, verify=not how.no_verify)
    if how.dry_run:
        if builder == "native":
            check_options(options, len(prepared), environment)
        else:
            check_dockerfile(prepared, options, environment)
        for one in prepared:
            if how.as_json:
                print_json({**one.plan.as_json(), "path": name})
            else:
                print_plan(one.plan)
        if not how.as_json:
            click.echo(name)
        return
    make = make_images if builder == "native" else make_by_dockerfile
    result = make(prepared, options, environment, offline=how.offline)
    if how.as_json:
        print_json(result)
    else:
        click.echo(result["path"])
