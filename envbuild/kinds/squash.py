"""Verified .sqsh and .sif files from a recipe or an image: both contain one squashfs, which is written once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from envbuild import atomic, resources
from envbuild.artifacts.apptainer import definition, recipe_definition
from envbuild.artifacts.image import assemble, fill, run_config
from envbuild.artifacts.squash import SquashTree, composed, write_sif, write_sqsh
from envbuild.disk_space import check_disk_space
from envbuild.environment import Environment
from envbuild.errors import UsageError
from envbuild.image.blobs import Blobs
from envbuild.image.in_place import ImageAt, archive_at, layout_at, of_pulled
from envbuild.image.layout import fill_layout
from envbuild.image.model import GOARCH, Descriptor
from envbuild.image.source import ImageSource
from envbuild.kinds import ARTIFACTS
from envbuild.kinds.commit import Result
from envbuild.kinds.image import PreparedImage, source_date
from envbuild.kinds.image_file import ImageFileBuild, ImageFileOptions, OutputFile, accept, places
from envbuild.layers.segments import SegmentCache
from envbuild.lock.base_oci import fetch_image
from envbuild.progress import Log, human_size, transfer
from envbuild.recipe.targets import Target
from envbuild.verify.image_file import ENROOT


def imported_file(kind: str, source: ImageSource) -> OutputFile:
    """Return the file that `enroot import` or `apptainer pull` would write for an image."""
    joint = "+" if kind == ENROOT else "_"
    words = source.words if kind == ENROOT else source.words[-2:]
    return OutputFile(kind, Path(joint.join(words) + Path(ARTIFACTS[kind].place).suffix))


def make_from_recipe(
    one: PreparedImage, wish: ImageFileOptions, environment: Environment, log: Log, *, offline: bool
) -> list[Result]:
    """Build and verify the image files of a recipe.

    Each file replaces the old one only after it passed. Raises BuildError, LockError, and VerificationError
    after keeping the failed file.
    """
    plan, arch = one.plan, one.target.arch
    log(f"{plan.recipe} for {plan.target}: {len(plan.conda) + len(plan.packages)} packages")
    with places(wish, log):
        started = time.monotonic()
        layers = one.layers(environment, log, offline=offline)
        if wish.engine != "native":
            image = assemble(plan, one.trainer, one.compiler, environment, log, offline=offline, layers=layers)
            made = ImageFileBuild(arch, started, image.state, plan)
            return _by_engine(image.blobs, image.descriptor, wish, made, environment, log)
        maker = _maker(wish, environment, log)
        filled = fill(plan, one.trainer, one.compiler, environment, maker, offline=offline, layers=layers)
        run = run_config(plan, filled.base)
        with composed(
            filled.layers,
            {"architecture": GOARCH[arch], "os": "linux", "config": run},
            provenance=f"envbuild:{plan.recipe}:{plan.target}@{plan.digest}",
            definition=recipe_definition(plan.recipe, plan.target, plan.digest),
            arch=arch,
            codec=wish.codec,
            mtime=plan.mtime,
            workers=maker.workers,
            folder=environment.store.folder("segments"),
        ) as root:
            made = ImageFileBuild(arch, started, filled.state, plan)
            return _natively(root, wish, made, environment, log)


def make_from_image(
    source: ImageSource, target: Target, wish: ImageFileOptions, environment: Environment, log: Log
) -> list[Result]:
    """Convert an existing image for `target`'s architecture; one that envbuild built is also verified.

    Raises BuildError for an image that is damaged, missing, or for another architecture.
    """
    with places(wish, log):
        environment.store.clean_stale()
        _check_user(source, environment)
        made = ImageFileBuild(target.arch, time.monotonic())
        if wish.engine != "native":
            pulled = fetch_image(source.name, target.arch, environment, Path())
            manifest = pulled.manifest.descriptor
            return _by_engine(pulled.blobs, manifest, wish, made, environment, log)
        maker = _maker(wish, environment, log)
        image = _image_at(source, target.arch, environment)
        count = len(image.layers)
        layers = [
            maker.tar(layer.diff_id, f"{source.name}, layer {number} of {count}", layer.opens)
            for number, layer in enumerate(image.layers, 1)
        ]
        origin = source.provenance(image.image_id)
        with composed(
            layers,
            image.config,
            provenance=origin,
            definition=definition(origin),
            arch=target.arch,
            codec=wish.codec,
            mtime=source_date(environment),
            workers=maker.workers,
            folder=environment.store.folder("segments"),
        ) as root:
            return _natively(root, wish, made, environment, log)


def _image_at(source: ImageSource, arch: str, environment: Environment) -> ImageAt:
    """Return the image: read in place from a file or folder if possible, else fetched into the store."""
    if source.form == "oci":
        folder, tag = source.place
        return layout_at(folder, tag, arch)
    if source.form == "docker-archive":
        image = archive_at(Path(source.rest), arch)
        if image is not None:
            return image
    return of_pulled(fetch_image(source.name, arch, environment, Path()))


def _check_user(source: ImageSource, environment: Environment) -> None:
    """Raise UsageError when `source` names a user and the credentials found are not those of that user."""
    from envbuild.image.credentials import PLACES, find_credentials
    from envbuild.image.reference import parse_reference

    if not source.user:
        return
    registry = parse_reference(source.rest).registry
    found = find_credentials(registry, environment.variables)
    if found is None or found.username != source.user:
        has = f"those of {found.username!r} ({found.source})" if found else "none"
        raise UsageError(f"no credentials of {source.user!r} for {registry}: found {has}", PLACES)


def _maker(wish: ImageFileOptions, environment: Environment, log: Log) -> SegmentCache:
    workers = resources.workers(environment.variables)
    return SegmentCache(environment.store, wish.codec, workers, log)


def _natively(
    root: SquashTree, wish: ImageFileOptions, made: ImageFileBuild, environment: Environment, log: Log
) -> list[Result]:
    with ExitStack() as stack:
        staged = _written(root, wish.files, stack, log)
        return accept(staged, wish, made, environment, log)


def _written(root: SquashTree, files: Sequence[OutputFile], stack: ExitStack, log: Log) -> list[Path]:
    """Write each file into a folder beside its path; a SIF reuses the squashfs of a .sqsh file written before it."""
    staged: list[Path] = []
    squashfs: Path | None = None
    for file in files:
        path = _beside(file, stack)
        check_disk_space(path.parent, squashfs.stat().st_size if squashfs else root.size)
        with atomic.writing(file.path.parent), path.open("x+b") as out:
            with transfer(f"writing {file.path.name}", None) as on_progress:
                if file.kind == ENROOT:
                    write_sqsh(root, out, on_progress)
                    squashfs = path
                else:
                    write_sif(root, out, on_progress, squashfs)
            # A SIF is executable, as Apptainer's own are.
            path.chmod(0o644 if file.kind == ENROOT else 0o755)
        log(f"  {file.path.name}: {human_size(path.stat().st_size)}")
        staged.append(path)
    return staged


def _beside(file: OutputFile, stack: ExitStack) -> Path:
    """Return a path for writing a file before it is moved: its name in a folder that `stack` removes."""
    wanted = file.path.absolute()
    return stack.enter_context(atomic.staged(wanted)) / wanted.name


def _by_engine(
    blobs: Blobs, manifest: Descriptor, wish: ImageFileOptions, made: ImageFileBuild, environment: Environment, log: Log
) -> list[Result]:
    """Build the SIF with the installed Apptainer, from an OCI layout of the same layers."""
    from envbuild.artifacts.apptainer_engine import build_with_apptainer, find_engine

    find_engine(environment.variables)  # raises before a layout is written
    with ExitStack() as stack:
        staged = _beside(wish.files[0], stack)
        # Beside the blobs, so that they are hard-linked and not copied.
        layout = stack.enter_context(environment.store.working("layouts"))
        fill_layout(layout, blobs, [(manifest, "image")])
        build_with_apptainer(f"oci:{layout}", staged, environment, log, arch=made.arch)
        return accept([staged], wish, made, environment, log)
