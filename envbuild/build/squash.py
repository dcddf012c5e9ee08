"""Verified .sqsh and .sif files from a recipe or an image: both contain one squashfs, which is written once.

Each file is written beside its final path, verified, and then moved there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.base import atomic
from envbuild.base.errors import HostError, UsageError
from envbuild.base.files import absolute_path
from envbuild.base.host import check_disk_space
from envbuild.base.progress import log, transfer
from envbuild.base.text import human_size
from envbuild.build.apptainer_engine import build_with_apptainer, find_engine
from envbuild.build.commit import Result, check_unverified_gpus, commit, failed_path, has_receipt, verify_staged
from envbuild.build.runtime_files import definition, recipe_definition
from envbuild.build.squash_files import WRITERS, composed, spans_of
from envbuild.contract.kinds import ENROOT, file_kind
from envbuild.contract.receipt import is_quick, passing_receipt, receipt_path
from envbuild.contract.state import State
from envbuild.contract.verification import FULL, Thoroughness
from envbuild.environment import Environment
from envbuild.image.archive import archive_at
from envbuild.image.credentials import check_user
from envbuild.image.layout import Blobs, ImageAt, Pulled, fill_layout, layout_at, layout_image, of_pulled
from envbuild.image.model import GOARCH, Descriptor
from envbuild.image.reference import ImageSource, folder_and_tag
from envbuild.image.sif import content_digest
from envbuild.image.squashfs.model import Codec, codec_of
from envbuild.layers.layer_cache import CachedSegment
from envbuild.layers.segment_cache import MissingData, SegmentCache, segment_cache
from envbuild.recipe.targets import Target, host_arch
from envbuild.store.pieces import Span, note_spans
from envbuild.verify.image_file import check_image_place, image_state, open_image_file

if TYPE_CHECKING:  # a conversion needs nothing of recipes
    from envbuild.build.image_layers import PreparedImage
    from envbuild.build.installing import LayerFolder
    from envbuild.plan import Plan


@dataclass(frozen=True, slots=True)
class OutputFile:
    """An image file to write: the name of its kind, and its path."""

    kind: str
    path: Path


@dataclass(frozen=True, slots=True)
class ImageFileOptions:
    """Outputs requested for an image: files in the order in which they are written, compressed by `codec`.

    `runtime` starts them for verification, None for the best one on this host; `engine` writes them ("native" or
    "apptainer").
    """

    files: tuple[OutputFile, ...]
    codec: Codec
    verify: bool
    asked: Thoroughness = FULL
    runtime: str | None = None
    engine: str = "native"


@dataclass(frozen=True, slots=True)
class _Build:
    """A build of image files, begun at time.monotonic(). A conversion has no `plan`, and its state is in the file."""

    options: ImageFileOptions
    environment: Environment
    arch: str
    started: float
    state: State | None = None
    plan: Plan | None = None


def imported_file(kind: str, source: ImageSource) -> OutputFile:
    """Return the file that `enroot import` or `apptainer pull` would write for an image."""
    row = file_kind(kind)
    return OutputFile(kind, Path(row.joint.join(source.words[-row.last_words :]) + Path(row.default_name).suffix))


def check_files(options: ImageFileOptions) -> None:
    """Raise UsageError when the path of a file has content that must not be replaced."""
    for file in options.files:
        check_image_place(file.path)


@contextmanager
def _locked(options: ImageFileOptions) -> Iterator[None]:
    """Hold the locks for the paths of all files, which must be free or replaceable. Raises UsageError."""
    check_files(options)
    with ExitStack() as stack:
        held: set[Path] = set()
        for path in (absolute_path(file.path) for file in options.files):
            if path.parent in held:  # a second flock of this process would wait for the first
                atomic.recover(path)
            else:
                stack.enter_context(atomic.exclusive(path, log))
                held.add(path.parent)
        yield


def make_from_recipe(
    prepared: PreparedImage, options: ImageFileOptions, environment: Environment, *, offline: bool
) -> list[Result]:
    """Build and verify the image files of a recipe. Raises BuildError, LockError and VerificationError."""
    from envbuild.build.image import image_layers
    from envbuild.build.image_layers import assemble

    plan, arch = prepared.plan, prepared.target.arch
    log(f"{plan.recipe} for {plan.target}: {len(plan.conda) + len(plan.packages)} packages")
    with _locked(options):
        build = _Build(options, environment, arch, time.monotonic(), plan=plan)
        layers = image_layers(prepared, environment, offline=offline)
        if options.engine != "native":
            image = assemble(prepared, layers, environment, offline=offline)
            return _by_engine(replace(build, state=image.state), image.blobs, image.descriptor)
        return _with_retry(build, lambda cache: _from_layers(prepared, layers, build, cache, offline=offline))


def _from_layers(
    prepared: PreparedImage, layers: Sequence[LayerFolder], build: _Build, cache: SegmentCache, *, offline: bool
) -> list[Result]:
    from envbuild.build.image_layers import fill, run_config

    plan = prepared.plan
    # The manifest of a squashfs differs from that of the layers: composed() makes it.
    filled = fill(prepared, layers, build.environment, cache, offline=offline, with_manifest=False)
    run = run_config(plan, filled.base, filled.state.project)
    config = {"architecture": GOARCH[build.arch], "os": "linux", "config": run}
    origin = f"envbuild:{plan.recipe}:{plan.target}@{plan.digest}"
    text = recipe_definition(plan.recipe, plan.target, plan.digest)
    whole = replace(build, state=filled.state)
    return _natively(whole, filled.layers, cache, config, origin=origin, text=text, mtime=plan.mtime)


def _with_retry(build: _Build, make: Callable[[SegmentCache], list[Result]]) -> list[Result]:
    """Call `make` with layers that may still be downloading; after a failed download, again with complete layers."""
    cache = segment_cache(build.environment, build.options.codec, {})
    try:
        return make(cache)
    except MissingData as error:
        log(f"{error}; writing the image again")
        return make(replace(cache, arriving=None))


def make_from_image(
    source: ImageSource, target: Target, options: ImageFileOptions, environment: Environment
) -> list[Result]:
    """Convert an existing image for `target`; an image that envbuild built is also verified. Raises BuildError."""
    with _locked(options):
        check_user(source, environment.variables)
        build = _Build(options, environment, target.arch, time.monotonic())
        if options.engine != "native":
            pulled = _pulled(source, target.arch, environment)
            return _by_engine(build, pulled.blobs, pulled.manifest.descriptor)
        image = _image_at(source, target.arch, environment)
        return _with_retry(build, lambda cache: _converted(build, source, image, cache))


@contextmanager
def written_image(named: str, environment: Environment) -> Iterator[Path]:
    """Yield the docker image NAME@sha256:… or oci:FOLDER@sha256:… as a .sqsh file, which is removed at the end.

    Raises UsageError when the layout holds another image, and BuildError.
    """
    name, _, digest = named.rpartition("@")
    source = ImageSource("docker", named)
    if name.startswith("oci:"):
        source = ImageSource("oci", name.removeprefix("oci:"))
        actual = layout_image(Path(source.rest), None, host_arch()).manifest.digest
        if actual != digest:
            raise UsageError(f"{name} holds {actual}, not {digest}", f"name it: {name}@{actual}")
    with environment.store.working("opened") as opened:
        file = OutputFile(ENROOT.name, opened / "new" / ENROOT.default_name.format(recipe="image"))
        file.path.parent.mkdir()  # the folder itself is locked, and a build locks the one above
        options = ImageFileOptions((file,), codec_of("zstd"), verify=False)
        make_from_image(source, Target.parse(f"cpu-{host_arch()}"), options, environment)
        yield file.path


def _converted(build: _Build, source: ImageSource, image: ImageAt, cache: SegmentCache) -> list[Result]:
    count, diff_ids = len(image.layers), image.config["rootfs"]["diff_ids"]
    titles = [f"{source.name}, layer {number} of {count}" for number in range(1, count + 1)]
    layers = cache.tars(list(zip(diff_ids, titles, image.layers, strict=True)))
    origin = source.provenance(image.image_id)
    mtime = build.environment.source_date
    return _natively(build, layers, cache, image.config, origin=origin, text=definition(origin), mtime=mtime)


def _image_at(source: ImageSource, arch: str, environment: Environment) -> ImageAt:
    """Return the image: read in place from a file or folder if possible, else fetched into the store."""
    if source.form == "oci":
        folder, tag = folder_and_tag(source.rest)
        return layout_at(folder, tag, arch)
    if source.form == "docker-archive":
        image = archive_at(Path(source.rest), arch)
        if image is not None:
            return image
    return of_pulled(_pulled(source, arch, environment))


def _pulled(source: ImageSource, arch: str, environment: Environment) -> Pulled:
    from envbuild.lock.base import pull

    return pull(source.name, None, arch, environment, Path())


def _natively(
    build: _Build,
    layers: Sequence[CachedSegment],
    cache: SegmentCache,
    config: Mapping[str, Any],
    *,
    origin: str,
    text: str,
    mtime: int,
) -> list[Result]:
    """Write the files; a SIF reuses the squashfs of a .sqsh file written before it. `text` is the definition file."""
    staged: list[tuple[Path, str]] = []
    spans: list[list[Span]] = []
    squashfs: Path | None = None
    tree = composed(layers, cache, config, provenance=origin, definition=text, arch=build.arch, mtime=mtime)
    with tree as root, ExitStack() as stack:
        for file in build.options.files:
            path = _beside(file, stack)
            check_disk_space(path.parent, squashfs.stat().st_size if squashfs else root.size)
            with atomic.writing(file.path.parent), path.open("x+b") as out:
                with transfer(f"writing {file.path.name}", None) as on_progress:
                    base, digest = WRITERS[file_kind(file.kind).format](root, out, on_progress, squashfs)
                path.chmod(file_kind(file.kind).mode)
            squashfs = squashfs if base else path
            log(f"  {file.path.name}: {human_size(path.stat().st_size)}")
            staged.append((path, digest))
            spans.append(spans_of(root, base))
        return _accept(build, staged, root.file_manifest, spans)


def _beside(file: OutputFile, stack: ExitStack) -> Path:
    """Return a temporary path for writing a file before it is moved: its name in a folder that `stack` removes."""
    path = absolute_path(file.path)
    return stack.enter_context(atomic.staged(path)) / path.name


def _by_engine(build: _Build, blobs: Blobs, manifest: Descriptor) -> list[Result]:
    """Build the SIF with the installed Apptainer, from an OCI layout of the same layers."""
    find_engine(build.environment.variables)  # raises before a layout is written
    with ExitStack() as stack:
        staged = _beside(build.options.files[0], stack)
        # Beside the blobs, so that they are hard-linked and not copied.
        layout = stack.enter_context(build.environment.store.working("layouts"))
        fill_layout(layout, blobs, [(manifest, "image")])
        build_with_apptainer(f"oci:{layout}", staged, build.environment, arch=build.arch)
        return _accept(build, [(staged, content_digest(staged))])


def _accept(
    build: _Build, staged: Sequence[tuple[Path, str]], manifest: str = "", spans: Sequence[Sequence[Span]] = ()
) -> list[Result]:
    """Verify each `staged` file (path, digest) and move it; `manifest` is the digest of the manifest of its files.

    `spans` are the parts of each file from segments. Raises VerificationError after keeping a file as FILE.failed.
    """
    results, site = [], build.environment.site
    for number, (file, (path, digest)) in enumerate(zip(build.options.files, staged, strict=True)):
        if spans:
            note_spans(build.environment.store, digest, spans[number])
        state = build.state
        if state is None:
            with suppress(UsageError):  # the image is not one of envbuild's
                state = image_state(open_image_file(path))
        if build.plan is None:
            known_receipt = passing_receipt(file.path, digest)
            passed = known_receipt is not None and (build.options.asked.quick or not is_quick(known_receipt))
        else:
            passed = has_receipt(file.path, digest, build.plan, build.options.asked)
        known = build.options.verify and passed
        receipt = _verified(build, file, path, digest, state, manifest) if build.options.verify and not known else None
        if receipt is not None:
            failed_path(file.path).unlink(missing_ok=True)
        elif state is not None and not known:
            from envbuild.verify.static_checks import read_gpu_files

            check_unverified_gpus(state, site, partial(read_gpu_files, path, limits=site.limits))
        commit(path, file.path, receipt, known=known)
        seconds = time.monotonic() - build.started
        target = state.target if state else build.arch
        at = receipt_path(file.path) if known or receipt else None
        warnings = build.plan.warnings if build.plan else ()
        results.append(Result(file.path, digest, target, at, seconds, True, receipt is not None, warnings))
    return results


def _verified(
    build: _Build, file: OutputFile, path: Path, digest: str, state: State | None, manifest: str
) -> dict[str, Any] | None:
    """Verify the file at `path` and return its receipt; None, after a message, when it cannot be verified here."""
    if state is None:
        why = "the image holds no environment of envbuild's"
    elif build.arch != host_arch():
        why = f"this {host_arch()} host cannot run {build.arch}"
    else:
        from envbuild.verify.image_runtime import file_subject

        settings = state.verify.override(asdict(build.options.asked))
        runtime = build.options.runtime
        try:
            subject = file_subject(path, file.kind, state, digest, build.environment, runtime, manifest)
            return verify_staged(subject, settings, build.environment, file.path, staged=path)
        except HostError as error:
            why = error.message
    log(f"{file.path}: not verified: {why}")
    return None
