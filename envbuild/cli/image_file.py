"""`envbuild docker`, `enroot`, `apptainer` and `build`: container images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from envbuild.base.errors import UsageError
from envbuild.base.progress import log, step
from envbuild.cli import complete
from envbuild.cli.common import (
    BUILD_OPTIONS,
    PATH,
    BuildOptions,
    Decorator,
    Names,
    build_options,
    check_out,
    open_recipe,
    open_target,
    plan_lines,
    print_json,
    run_environment,
    show,
    show_plan,
    with_options,
)
from envbuild.cli.report import reported, summarise
from envbuild.contract.kinds import ARTIFACTS, kinds_of
from envbuild.recipe.targets import Target, host_arch


@click.command("docker")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@with_options(
    ("targets", "ACCELERATOR-ARCH, such as cpu-x86_64; repeatable: one multi-platform image. Default: this host's.")
)
@click.option("--tag", metavar="REF", help="Name of the image. Default: RECIPE:TARGET.")
@click.option("--push", is_flag=True, help="Push to the registry that --tag names.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["oci", "docker"]),
    default="oci",
    show_default=True,
    help="Media types for --push. docker: for `enroot import`, which accepts only Docker's.",
)
@click.option("--out", "output", metavar="FORM:PATH", help="oci:DIR or docker-archive:FILE, in place of a daemon.")
@build_options("verify", "no-verify", "faults", "no-bytecode", *BUILD_OPTIONS)
def docker_command(
    recipe: str | None,
    targets: Names,
    tag: str | None,
    push: bool,
    form: str,
    output: str | None,
    options: BuildOptions,
) -> None:
    """Build the image of RECIPE from its locks and verify it by training in two containers.

    Assembles the image without a daemon, root or emulation, for any architecture. Without --out or --push it is loaded
    into the docker daemon, which receives only the layers that it lacks. Verification needs a daemon.

    \b
    Examples:
      envbuild docker pt_cpu
      envbuild docker pt_cpu --out oci:image --target cpu-x86_64 --target cpu-aarch64
      envbuild docker pt_cpu --tag registry.example.org/team/pt_cpu:2.13 --push
      envbuild docker pt_cpu --tag registry.example.org/team/pt_cpu:2.13 --push --format docker
      docker run --rm pt_cpu:cpu-x86_64 torchrun --nproc-per-node 2 -m ddp_train 3 1
    """
    from envbuild.build.bundle import keep_built
    from envbuild.build.docker import ImageOutput, check_tag
    from envbuild.build.image import ImageOptions, check_options, make_images, prepare_image

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
    parsed = [open_target(loaded, name, environment) for name in targets or (None,)]
    if len({target.arch for target in parsed}) < len(parsed):
        raise UsageError("two targets of one architecture do not fit into one image")
    name = check_tag(tag or f"{loaded.recipe.name}:{parsed[0].name}", push=push)
    verify = not options.no_verify
    with step(f"planning the image of {loaded.recipe.name}", printed=True):
        prepared = [
            prepare_image(
                loaded, target, environment, bytecode=not options.no_bytecode, verify=verify, **options.lock_use
            )
            for target in parsed
        ]
    wish = ImageOptions(name, place, push, verify=verify, asked=options.asked, form=form)
    if not options.dry_run:
        title = f"docker of {loaded.recipe.name}"
        with (
            reported(options.report, [wish.beside(prepared_image.plan) for prepared_image in prepared], environment),
            step(f"building {title}", printed=True),
        ):
            result = make_images(prepared, wish, environment, offline=options.offline)
        keep_built(loaded, [(image.plan, image.builder) for image in prepared], environment, offline=options.offline)
        summarise(title, {**result, "target": ", ".join(prepared_image.target.name for prepared_image in prepared)})
        show(options.as_json, result, result["path"])
        return
    check_options(wish, len(prepared), environment)
    for image in prepared:
        show(options.as_json, {**image.plan.as_json(), "path": name}, *plan_lines(image.plan))
    if not options.as_json:
        click.echo(name)


def _image_options(*own: Decorator) -> Decorator:
    return build_options(
        *own,
        "target",
        click.option(
            "--compression",
            default="zstd",
            show_default=True,
            metavar="NAME[:LEVEL]",
            help="zstd, gzip, lz4 or xz. gzip for kernels without zstd in squashfs.",
        ),
        "verify",
        "no-verify",
        "faults",
        "runtime",
        "no-bytecode",
        *BUILD_OPTIONS,
    )


def _file_options(suffix: str, converter: str, *own: Decorator) -> Decorator:
    """Return the options of a command that writes one file, which `converter` would name for an existing image."""
    return _image_options(
        click.option(
            "--from",
            "source",
            metavar="IMAGE",
            help="Convert this image instead: docker://[USER@][REGISTRY#]IMAGE[:TAG], dockerd://IMAGE, "
            "docker-archive:FILE or oci:DIR[:TAG].",
        ),
        click.option(
            "--out",
            type=PATH,
            metavar="FILE",
            help=f"Path of the image. Default: build/RECIPE/TARGET/RECIPE.{suffix}; with --from that of `{converter}`.",
        ),
        *own,
    )


@click.command("enroot")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@_file_options("sqsh", "enroot import")
def enroot_command(recipe: str | None, options: BuildOptions) -> None:
    """Build the squashfs image of RECIPE for enroot and pyxis, and verify it by training in it.

    Needs neither enroot, root, nor a docker daemon, and writes for any architecture. envbuild trains in the image with
    a runtime that an unprivileged user can launch on this host (enroot, or user namespaces) before the image replaces
    an older one.

    \b
    Examples:
      envbuild enroot --out pt.sqsh
      envbuild enroot pt_cpu --target cpu-aarch64 --out pytorch-arm.sqsh
      envbuild enroot --from docker://nvcr.io#nvidia/pytorch:25.01-py3 --out pytorch.sqsh
      envbuild enroot --from dockerd://pt_cpu:cpu-x86_64 --compression gzip
      srun --container-image=./pt.sqsh --container-mounts=$PWD:/workspace torchrun --nproc-per-node 2 -m ddp_train 3 1
    """
    _build(["enroot"], recipe, options)


@click.command("apptainer")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@_file_options(
    "sif",
    "apptainer pull",
    click.option(
        "--engine",
        type=click.Choice(["native", "apptainer"]),
        default="native",
        show_default=True,
        help="apptainer: `apptainer build` of the same layers by the installed tool.",
    ),
)
def apptainer_command(recipe: str | None, options: BuildOptions) -> None:
    """Build the SIF of RECIPE for Apptainer and Singularity, and verify it by training in it.

    Needs neither Apptainer, root, nor a docker daemon, and writes for any architecture. envbuild trains in the image
    with a runtime that an unprivileged user can launch on this host (Apptainer, or user namespaces) before the image
    replaces an older one.

    \b
    Examples:
      envbuild apptainer
      envbuild apptainer pt_cpu --out pytorch.sif --faults
      envbuild apptainer --from docker-archive:image.tar --out image.sif
      envbuild apptainer pt_cpu --engine apptainer
      apptainer exec pt_cpu.sif torchrun --nproc-per-node 2 -m ddp_train 3 1
    """
    _build(["apptainer"], recipe, options)


@click.command("build")
@click.argument("recipe", required=False, shell_complete=complete.recipes)
@_image_options(
    click.option(
        "--artifact",
        "artifacts",
        required=True,
        metavar="KIND,…",
        help="enroot, apptainer or both, which then share one squashfs.",
    )
)
def build_command(recipe: str | None, artifacts: str, options: BuildOptions) -> None:
    """Build several artifacts of RECIPE in one go, each verified, below build/.

    Each kind also has its own command with more options: see `envbuild enroot --help`.

    \b
    Examples:
      envbuild build pt_cpu --artifact enroot,apptainer
      envbuild build pt_cpu --artifact enroot,apptainer --target cpu-aarch64 --json
    """
    kinds = kinds_of("file")
    chosen = list(dict.fromkeys(kind.strip() for kind in artifacts.split(",") if kind.strip()))
    unknown = [kind for kind in chosen if kind not in kinds]
    if unknown or not chosen:
        raise UsageError(
            f"--artifact {artifacts!r}: {unknown[0] if unknown else 'nothing'} is not built here",
            f"name {' or '.join(kinds)}, or both with a comma; venv and docker have commands of their own",
        )
    _build(sorted(chosen, key=kinds.index), recipe, options)


def _build(kinds: Sequence[str], recipe: str | None, options: BuildOptions) -> None:
    """Make image files of `kinds` from a recipe or an image, and print them; a dry run prints the plan."""
    from envbuild.build.apptainer_engine import find_engine
    from envbuild.build.squash import (
        ImageFileOptions,
        OutputFile,
        check_files,
        imported_file,
        make_from_image,
        make_from_recipe,
    )
    from envbuild.image.reference import parse_source
    from envbuild.image.squashfs.model import codec_of

    if options.source is not None and recipe is not None:
        raise UsageError("RECIPE and --from exclude each other: each names what to build", "name one of them")
    check_out(options.out)
    codec = codec_of(options.compression)
    environment = run_environment()
    verify = not options.no_verify
    if verify:  # before anything is built
        from envbuild.verify.image_runtime import choose

        for kind in kinds:
            choose(kind, options.runtime, environment.variables)
    if options.engine != "native":
        find_engine(environment.variables)

    def wish(default: Callable[[str], OutputFile]) -> ImageFileOptions:
        files = tuple(OutputFile(kind, options.out) if options.out else default(kind) for kind in kinds)
        return ImageFileOptions(files, codec, verify, options.asked, options.runtime, options.engine)

    if options.source is not None:
        image = parse_source(options.source)
        of_image = wish(lambda kind: imported_file(kind, image))
        if options.dry_run:
            check_files(of_image)
            for file in of_image.files:
                about = {"kind": file.kind, "from": image.url, "path": str(file.path.absolute())}
                if options.as_json:
                    print_json(about)
                else:
                    log(f"{file.kind}: {image.url} to {file.path}")
            return
        chosen = Target.parse(options.target or f"cpu-{host_arch()}")
        subject = image.url
        with (
            reported(options.report, [file.path for file in of_image.files], environment),
            step(f"converting {subject}", printed=True),
        ):
            results = make_from_image(image, chosen, of_image, environment)
    else:
        from envbuild.build.bundle import keep_built
        from envbuild.build.image import prepare_image

        loaded = open_recipe(recipe, environment)
        target = open_target(loaded, options.target, environment)
        with step(f"planning the image of {loaded.recipe.name} for {target.name}", printed=True):
            bytecode = not options.no_bytecode
            prepared_image = prepare_image(
                loaded, target, environment, bytecode=bytecode, verify=verify, **options.lock_use
            )
            plan = prepared_image.plan
        of_recipe = wish(lambda kind: OutputFile(kind, ARTIFACTS[kind].default_path(plan.recipe, plan.target)))
        if options.dry_run:
            check_files(of_recipe)
            show_plan(plan, options.as_json)
            return
        subject = plan.recipe
        with (
            reported(options.report, [file.path for file in of_recipe.files], environment),
            step(f"building {' and '.join(kinds)} of {subject} for {plan.target}", printed=True),
        ):
            results = make_from_recipe(prepared_image, of_recipe, environment, offline=options.offline)
        keep_built(loaded, [(plan, prepared_image.builder)], environment, offline=options.offline)
    rows = [result.as_json() for result in results]
    for kind, made in zip(kinds, rows, strict=True):
        summarise(f"{kind} of {subject}", made)
    show(options.as_json, rows[0] if len(rows) == 1 else {"artifacts": rows}, *(result.path for result in results))
