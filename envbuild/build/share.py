"""Artifacts in registries: `push` with their receipts, `pull` to the same bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envbuild.base import atomic
from envbuild.base.errors import BuildError, UsageError, VerificationError
from envbuild.base.files import absolute_path, parse_json, sha256_of
from envbuild.base.host import check_disk_space
from envbuild.base.packages import digest_of
from envbuild.base.progress import log, transfer
from envbuild.base.text import human_size
from envbuild.build.commit import commit
from envbuild.contract.receipt import read_receipt, receipt_path
from envbuild.environment import Environment
from envbuild.image.layout import BlobFiles
from envbuild.image.limits import Quota
from envbuild.image.model import OCI_MANIFEST, Descriptor
from envbuild.image.reference import Reference
from envbuild.image.registry import Pushed, Registry
from envbuild.image.sif import content_digest
from envbuild.site.tables import TrustTable
from envbuild.store.pieces import (
    CONFIG,
    PIECE,
    RECEIPT,
    FilePieces,
    compose,
    known_spans,
    read_manifest,
    read_pieces,
    render,
    segment_file,
    split,
    stored,
)
from envbuild.store.store import Store
from envbuild.trust.bundle import PREDICATES, bundle_path
from envbuild.trust.policy import TrustVerdict, judge
from envbuild.verify.image_file import check_image_place

# Media type → name of an attestation (trust/bundle.py).
ATTESTATIONS = {f"application/vnd.envbuild.{name or 'attestation'}.v1": name for name in PREDICATES}
MOST = 16 << 20  # bytes of a configuration, a receipt and an attestation


@dataclass(frozen=True, slots=True)
class PulledArtifact:
    """A pulled artifact: its digest, its target, its size, and how many of its bytes were downloaded."""

    path: Path
    digest: str
    target: str
    size: int
    fetched_bytes: int
    receipt: Path | None


def push_file(path: Path, kind: str, target: str, digest: str, registry: Registry, store: Store) -> tuple[str, Pushed]:
    """Push the image file at `path`, which has this digest, with its receipt and attestations, to the reference.

    Returns the digest of the manifest, and the uploads. Raises BuildError, and OSError for an unreadable file.
    """
    size, (spans, names) = path.stat().st_size, known_spans(store, digest)
    with store.working("opened") as folder:
        rest = folder / "rest"
        try:
            pieces = split(path, spans, names, rest, size)
        except EOFError as error:
            raise BuildError(f"{path}: it changed while it was read", "run it again") from error
        places = {names[name]: store.root / "segments" / f"{name}.data" for name in names}
        literal = f"sha256:{sha256_of(rest)}"
        places[literal] = rest
        whole = tuple((literal if source is None else source, start, count) for source, start, count in pieces)
        file = FilePieces(kind, path.name, target, digest, size, whole)
        blobs = [
            Descriptor(PIECE, digest, places[digest].stat().st_size) for digest in dict.fromkeys(p[0] for p in whole)
        ]
        return push_blobs(path, asdict(file), blobs, places, registry, store)


def push_blobs(
    path: Path,
    about: Mapping[str, Any],
    blobs: Sequence[Descriptor],
    places: Mapping[str, Path],
    registry: Registry,
    store: Store,
) -> tuple[str, Pushed]:
    """Push the artifact at `path`: the configuration `about`, `blobs`, its receipt and attestations.

    `places` are the files of the blobs by digest. Returns the digest of the manifest, and the uploads.
    """
    blobs, places = list(blobs), dict(places)
    with store.working("opened") as folder:
        besides = {RECEIPT: receipt_path(path)} | {
            attestation: bundle_path(path, name) for attestation, name in ATTESTATIONS.items()
        }
        for media, beside in besides.items():
            if beside.is_file():
                places[digest := f"sha256:{sha256_of(beside)}"] = beside
                blobs.append(Descriptor(media, digest, beside.stat().st_size))
        text = json.dumps(about, sort_keys=True).encode()
        (folder / "config").write_bytes(text)
        config = Descriptor(CONFIG, digest_of(text), len(text))
        places[config.digest] = folder / "config"
        manifest, pointer = render(config, blobs), registry.reference.pointer
        with transfer(f"pushing {path.name}", sum(blob.size for blob in blobs)) as on_progress:
            pushed = registry.push(
                BlobFiles(places), [config, *blobs], manifest, OCI_MANIFEST, pointer, on_progress=on_progress
            )
    return digest_of(manifest), pushed


def open_pushed(registry: Registry, store: Store) -> tuple[bytes, list[Descriptor]]:
    """Return the configuration and the blobs of the artifact in the registry; small blobs are fetched into `store`.

    Raises BuildError, also for a manifest that `push_blobs` did not write.
    """
    where = str(registry.reference)
    config, blobs = read_manifest(registry.manifest()[0], where)
    small = [config, *(blob for blob in blobs if blob.media_type in (RECEIPT, *ATTESTATIONS))]
    if len({descriptor.media_type for descriptor in small}) < len(small):
        raise BuildError(f"{where}: its manifest has several receipts, or attestations of one kind", "push it again")
    if any(descriptor.size > MOST for descriptor in small):
        raise BuildError(f"{where}: its receipt or configuration is larger than {human_size(MOST)}")
    registry.fetch_blobs(small, store.blobs, lambda _: None)
    return store.blobs.read(config.digest), blobs


def pull_file(
    data: bytes, blobs: Sequence[Descriptor], registry: Registry, out: Path, environment: Environment
) -> PulledArtifact:
    """Write the image file that a configuration describes to `out`, with its receipt and attestations.

    Segments in the store are not fetched again. Raises BuildError, UsageError for `out` of another kind or with other
    content, and VerificationError when the site requires an attestation that the file lacks.
    """
    where, store = str(registry.reference), environment.store
    pieces = [blob for blob in blobs if blob.media_type == PIECE]
    file = read_pieces(data, pieces, where)
    if out.suffix != Path(file.name).suffix:
        raise UsageError(f"{where} is {file.name!r:.80}", f"give a path that ends in {Path(file.name).suffix!r:.20}")
    check_image_place(out)
    Quota(environment.site.limits).content(where, file.size)
    final = absolute_path(out)
    with ExitStack() as stack:
        stack.enter_context(atomic.exclusive(final, log))
        staged = stack.enter_context(atomic.staged(final)) / final.name
        receipt = attested_receipt(blobs, staged, file.digest, final, registry.reference, environment)
        check_disk_space(staged.parent, file.size)
        places, missing = _here(pieces, store)
        fetched = sum(blob.size for blob in missing)
        if missing:
            with transfer(f"pulling {where}: {len(missing)} of {len(pieces)} pieces", fetched) as on_progress:
                paths = registry.fetch_blobs(missing, store.blobs, on_progress)
            places |= {blob.digest: path for blob, path in zip(missing, paths, strict=True)}
        with (
            atomic.writing(final.parent),
            staged.open("x+b") as stream,
            transfer(f"writing {final.name}", file.size) as on_progress,
        ):
            compose(file, places, stream, on_progress)
        staged.chmod(0o755 if final.suffix == ".sif" else 0o644)
        if (digest := content_digest(staged)) != file.digest:
            raise BuildError(
                f"{where}: refused: the digest of its pieces is {digest}, but its manifest says {file.digest}"
            )
        commit(staged, final, receipt)
        _beside(blobs, final, store)
    return PulledArtifact(final, file.digest, file.target, file.size, fetched, receipt_path(final) if receipt else None)


def _here(pieces: Sequence[Descriptor], store: Store) -> tuple[dict[str, Path], list[Descriptor]]:
    """Return the paths of the pieces that `store` has, as segments or from earlier pulls, and the other pieces."""
    places = {blob.digest: store.blobs.path(blob.digest) for blob in pieces if store.blobs.has(blob)}
    descriptors = {blob.digest.partition(":")[2]: blob for blob in pieces if blob.digest not in places}
    sizes = {blob.size for blob in descriptors.values()}
    for index in sorted((store.root / "segments").glob("*.index")):
        data = index.with_suffix(".data")
        if not data.is_file() or data.stat().st_size not in sizes:  # reading an index takes longer
            continue
        sha256 = stored(store, index.stem)
        if sha256 in descriptors and (path := segment_file(store, index.stem, sha256)) is not None:
            places[f"sha256:{sha256}"] = path
    return places, [blob for blob in descriptors.values() if blob.digest not in places]


def judge_pushed(registry: Registry, store: Store, trust: TrustTable, recipe: str) -> tuple[str, TrustVerdict]:
    """Return the digest of the artifact in `registry`, and the verdict of trust in its receipt.

    Only `envbuild pull` compares its content with the digest. `recipe` is the required recipe, "" for any. Raises
    BuildError, also for a manifest that `push` did not write, and VerificationError.
    """
    data, blobs = open_pushed(registry, store)
    where = registry.reference
    try:
        digest = str(parse_json(data)["digest"])
    except (ValueError, KeyError, TypeError) as error:
        raise BuildError(f"{where}: invalid configuration: {error!r:.80}") from error
    with store.working("opened") as folder:
        place = folder / "artifact"
        receipt = _receipt(blobs, place, digest, str(where), store)
        if receipt is None:
            raise VerificationError(f"{where} has no receipt", "push it with its receipt and attestation")
        return digest, judge(place, receipt, trust, datetime.now(UTC), names=where.names, recipe=recipe)


def attested_receipt(
    blobs: Sequence[Descriptor], staged: Path, digest: str, final: Path, reference: Reference, environment: Environment
) -> dict[str, Any] | None:
    """Return the receipt among `blobs` of the artifact with this digest, for its path `final`; None without one.

    Writes it and the attestations beside `staged`. Raises BuildError for a damaged receipt, and VerificationError for
    the receipt of another artifact, or one that the site does not trust for `reference`.
    """
    trust = environment.site.trust
    receipt = _receipt(blobs, staged, digest, final.name, environment.store)
    if trust.restricts:
        if receipt is None:
            raise VerificationError(f"{final.name} has no receipt", "push it with its receipt and attestation")
        names = (*reference.names, str(final))
        judge(staged, receipt, trust, datetime.now(UTC), names=names)
    if receipt is not None:
        receipt = {**receipt, "artifact": {**receipt["artifact"], "path": str(final)}}
    return receipt


def _receipt(blobs: Sequence[Descriptor], staged: Path, digest: str, where: str, store: Store) -> dict[str, Any] | None:
    """Write the receipt and the attestations among `blobs` beside `staged`; return the receipt, None without one."""
    receipt = None
    _beside(blobs, staged, store)
    for blob in blobs:
        if blob.media_type == RECEIPT:
            receipt_path(staged).write_bytes(store.blobs.read(blob.digest))
            try:
                receipt = read_receipt(receipt_path(staged))
            except (OSError, ValueError) as error:
                raise BuildError(f"{where}: invalid receipt: {error}") from error
            if receipt["artifact"]["digest"] != digest:
                raise VerificationError(f"{where}: its receipt belongs to another artifact", "push it again")
    return receipt


def _beside(blobs: Sequence[Descriptor], path: Path, store: Store) -> None:
    """Write the attestations beside the file at `path`; remove older attestations."""
    for media, name in ATTESTATIONS.items():
        place = bundle_path(path, name)
        place.unlink(missing_ok=True)
        for blob in blobs:
            if blob.media_type == media:
                atomic.write_beside(place, store.blobs.read(blob.digest).decode("utf-8", "replace"))
