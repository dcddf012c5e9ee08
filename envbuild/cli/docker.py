"""`envbuild docker`."""

from __future__ import annotations

import click

from envbuild.base.errors import UsageError
from envbuild.base.progress import step
from envbuild.cli import complete
from envbuild.cli.common import check_out, open_recipe, open_target, plan_lines, run_environment, show
from envbuild.cli.options import BuildOptions, Names, build_options
from envbuild.cli.report import reported


@click.command("docker")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="TARGET",
    shell_complete=complete.targets,
    help="ACCELERATOR-ARCH, such as cpu-x86_64; repeatable: one multi-platform image. Default: this host's.",
)
@click.option("--tag", metavar="REF", help="Name of the image. Default: RECIPE:TARGET.")
@click.option("--push", is_flag=True, help="Push to the registry that --tag names.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["oci", "docker"]),
    default="oci",
    show_default=True,
    help="Media types of what --push sends. docker: for `enroot import`, which asks for Docker's alone.",
)
@click.option("--out", "output", metavar="FORM:PATH", help="oci:DIR or docker-archive:FILE, in place of a daemon.")
@build_options("verify", "no-verify", "faults", "no-bytecode", "dry-run", "locked", "offline", "report", "json")
def docker_command(
    recipe: str | None,
    targets: Names,
    tag: str | None,
    push: bool,
    form: str,
    output: str | None,
    options: BuildOptions,
) -> None:
    """Build the image of RECIPE from its locks and prove it by training in two containers.

    It is assembled without a daemon, root or emulation, for any architecture. Without --out or --push it goes into the
    docker daemon, which is sent only the layers that it lacks. Verification needs a daemon.

    \b
    Examples:
      envbuild docker pt_cpu
      envbuild docker pt_cpu --out oci:image --target cpu-x86_64 --target cpu-aarch64
      envbuild docker pt_cpu --tag registry.example.org/team/pt_cpu:2.13 --push
      envbuild docker pt_cpu --tag registry.example.org/team/pt_cpu:2.13 --push --format docker
      docker run --rm pt_cpu:cpu-x86_64 torchrun --nproc-per-node 2 -m ddp_train 3 1
    """
    from envbuild.artifacts.docker import ImageOutput, check_tag
    from envbuild.cli.summary import summarise
    from envbuild.kinds.image import ImageOptions, check_options, make_images, prepare_image

    place = ImageOutput.parse(output) if output else None
    check_out(place.path if place else None)
    if push and tag is None:
        raise UsageError("--push needs --tag", "--tag REGISTRY/NAME:TAG")
    if push and options.verify == "quick":
        raise UsageError("--push needs a full verification", "leave --verify quick out, or --push")
    if form != "oci" and not push:
        raise UsageError(f"--format {form} is for --push", "add --tag REGISTRY/NAME:TAG --push, or leave it out")
    environment = run_environment()
    loaded = open_recipe(recipe, environment)
    wanted = [open_target(loaded, name, environment) for name in targets or (None,)]
    if len({target.arch for target in wanted}) < len(wanted):
        raise UsageError("two targets of one architecture do not fit into one image")
    name = check_tag(tag or f"{loaded.recipe.name}:{wanted[0].name}", push=push)
    verify = not options.no_verify
    with step(f"planning the image of {loaded.recipe.name}", told=True):
        prepared = [
            prepare_image(
                loaded, target, environment, bytecode=not options.no_bytecode, verify=verify, **options.lock_use
            )
            for target in wanted
        ]
    wish = ImageOptions(name, place, push, verify=verify, asked=options.asked, form=form)
    if not options.dry_run:
        what = f"docker of {loaded.recipe.name}"
        with (
            reported(options.report, [wish.beside(one.plan) for one in prepared], environment),
            step(f"building {what}", told=True),
        ):
            result = make_images(prepared, wish, environment, offline=options.offline)
        summarise(what, {**result, "target": ", ".join(one.target.name for one in prepared)})
        show(options.as_json, result, result["path"])
        return
    check_options(wish, len(prepared), environment)
    for one in prepared:
        show(options.as_json, {**one.plan.as_json(), "path": name}, *plan_lines(one.plan))
    if not options.as_json:
        click.echo(name)
