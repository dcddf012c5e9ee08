"""Locked wheels of a plan and wheels of own code on this host, checked against the plan's target.

Locks are checked when they are written, but a lock may have been edited or written elsewhere. The store and the team's
cache record facts about each wheel: its size, which decides the order of layers, its name, and torch's build. A wheel
with known facts and an existing layer is not fetched.

Slim wheels are copies of wheels, with a new RECORD, without the files and code that `[slim]` of a recipe excludes. In
libraries, zeros replace the code for other GPUs and the debug sections, so sizes and offsets do not change; file
systems and compression store zeros almost for free. The headers of the code remain: the driver selects code by them,
and never reads code for other GPUs. `envbuild-slim.json` in the .dist-info folder lists the changes.

Source of ELF's section headers: System V ABI, "Sections". A slim wheel is stored, not deflated, so that its bytes do
not depend on the zlib of the Python build.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from envbuild.base.atomic import file_lock, new_file
from envbuild.base.errors import BuildError
from envbuild.base.packages import SLIM_FILE, record_row
from envbuild.base.progress import log
from envbuild.base.text import human_size
from envbuild.cache.hashed import read_note, write_note
from envbuild.environment import Environment
from envbuild.gpus import CudaEntry, all_chips, read_gpu_code
from envbuild.layers.contents import open_member, reading
from envbuild.layers.project import project_wheel
from envbuild.layers.wheel import TRAINER_NAME, Trainer, WheelFile, recorded_rows, render_record
from envbuild.plan import Plan
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import (
    ARCHES,
    MAX_VERSION_FILE,
    VERSION_FILE,
    Target,
    accelerator_fault,
    torch_builds,
    torch_libraries,
)
from envbuild.slim import SlimRules, unused
from envbuild.store.entry import CacheEntry, fetched, key_of
from envbuild.store.store import Store

_STEP = 1 << 20
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NOBITS = 8
# Ranges [start, end) of a file.
Ranges = list[tuple[int, int]]
# sha256, size in bytes, file name, and for torch its accelerators and their libraries, as WheelFile has them.
Facts = tuple[str, int, str, tuple[dict[str, str], list[str]] | None]


def locate(
    plan: Plan, trainer: Trainer, environment: Environment, offline: bool
) -> tuple[list[WheelFile], list[WheelFile]]:
    """Return the wheels of `plan` in order, and those of own code: the trainer's, and the project's if there is one.

    The rules of the recipe's [slim] are applied. Raises BuildError for a missing or unsuitable wheel, RecipeError for a
    project with the name of another package.
    """
    wheels = published_wheels(plan, environment, offline)
    return [_slimmed(file, plan, environment) for file in wheels], own_wheels(plan, trainer, environment, offline)


def published_wheels(plan: Plan, environment: Environment, offline: bool) -> list[WheelFile]:
    """Return the wheels of `plan` in order, without [slim]. Raises BuildError as `locate`."""
    paths = fetch_wheels(plan.packages, environment, plan.indexes, plan.bound, offline=offline)
    wheels = [_wheel(p.name, p.version, path, environment) for p, path in zip(plan.packages, paths, strict=True)]
    check_wheels(Target.parse(plan.target), wheels)
    return wheels


def _slimmed(wheel: WheelFile, plan: Plan, environment: Environment) -> WheelFile:
    if plan.slim is None:
        return wheel
    path, sha256 = slim_wheel(wheel.path, wheel.sha256, wheel.name, plan.slim, environment.store)
    return replace(wheel, place=path, sha256=sha256, size=path.stat().st_size)


def _slimmed_later(wheel: WheelFile, plan: Plan, environment: Environment) -> WheelFile:
    """Return the slim wheel, which is written on first use; its `sha256` is a digest of its inputs."""
    if plan.slim is None:
        return wheel
    digest = key_of("slim", [wheel.sha256, wheel.name, plan.slim.as_json()])
    return replace(wheel, place=lambda: _slimmed(wheel, plan, environment).path, sha256=digest)


def known_wheels(plan: Plan, environment: Environment, offline: bool) -> list[WheelFile]:
    """Return the wheels of `plan` in order, for layers; a wheel whose facts are known is fetched only when needed.

    The facts come from the store or the team's cache. Raises BuildError for a missing or unsuitable wheel.
    """

    def find(locked: LockedPackage) -> Path:
        return fetch_wheels([locked], environment, plan.indexes, plan.bound, offline=offline)[0]

    store, known = environment.store, {}
    for package, facts in zip(plan.packages, wheel_facts([p.hashes for p in plan.packages], store), strict=True):
        if facts is not None:
            exact = replace(package, hashes=facts[:1])  # a lock may accept several files, and the facts are of one
            known[package.name] = WheelFile(package.name, package.version, partial(find, exact), *facts)
    missing = [locked_package for locked_package in plan.packages if locked_package.name not in known]
    paths = fetch_wheels(missing, environment, plan.indexes, plan.bound, offline=offline)
    for package, path in zip(missing, paths, strict=True):
        wheel = _wheel(package.name, package.version, path, environment)
        torch = _read_torch(path) if package.name == "torch" else None
        known[package.name] = replace(wheel, file_name=path.name, torch=torch)
        note_facts(package.hashes, known[package.name], store)
    wheels = [known[locked_package.name] for locked_package in plan.packages]
    check_wheels(Target.parse(plan.target), wheels)
    return [_slimmed_later(file, plan, environment) for file in wheels]


def own_wheels(plan: Plan, trainer: Trainer, environment: Environment, offline: bool) -> list[WheelFile]:
    """Return the wheels of own code, see `locate`."""
    own = environment.store.put("trainer", trainer.digest.partition(":")[2], trainer.file_name, trainer.wheel)
    last = [_wheel(TRAINER_NAME, trainer.version, own, environment)]
    if (project := project_wheel(plan, environment, offline=offline)) is not None:
        last.append(_wheel(*project, environment))
        check_wheels(Target.parse(plan.target), last)
    return last


def fetch_wheels(
    wheels: Sequence[LockedPackage],
    environment: Environment,
    indexes: Sequence[str] = (),
    bound: Mapping[str, str] = {},
    *,
    offline: bool,
) -> list[Path]:
    """Return the files of `wheels`, verified by hash. Raises BuildError for an unavailable wheel.

    `bound` maps names to the index of the site from which a wheel must come.
    """
    from envbuild.store.fetch import WantedWheel, locate_wheels

    wanted_wheels = [WantedWheel(package.name, package.version, frozenset(package.hashes)) for package in wheels]
    paths = locate_wheels(wanted_wheels, environment, indexes, bound=bound, offline=offline)
    return [paths[wheel] for wheel in wanted_wheels]


def _wheel(name: str, version: str, path: Path, environment: Environment) -> WheelFile:
    # A wheel in the store is in a folder named by its sha256; that of a find-links file is cached in the store.
    folder = path.parent.name
    of_store = path.parent.parent == environment.store.root / "wheels"
    known = of_store and re.fullmatch(r"[0-9a-f]{64}", folder)
    digest = folder if known else environment.store.digests.of(path)
    return WheelFile(name, version, path, digest, path.stat().st_size)


def check_wheels(target: Target, wheels: Iterable[WheelFile]) -> None:
    """Raise BuildError for a wheel for another processor, or a torch for another accelerator, than `target`'s."""
    for wheel in wheels:
        name = wheel.file_name or wheel.path.name
        other = wheel_arch(name)
        if other is not None and other != target.arch:
            raise BuildError(
                f"{name} is for {other}, and {target.name} is for {target.arch}",
                "the lock names a wheel of another platform: make it again with `envbuild lock`",
            )
        if wheel.name == "torch":
            fault = accelerator_fault(target.name, *(wheel.torch or _read_torch(wheel.path)), exact=True)
            if fault is not None:
                raise BuildError(
                    f"{name}: this torch {fault}",
                    f"correct torch's version in {target.table} and lock it again; "
                    "docs/reference/recipe.md tells which index has which build",
                )


def pinned(wheels: Iterable[WheelFile]) -> str:
    """Return `wheels` as the lines of a requirements file."""
    return "".join(f"{file.name}=={file.version} --hash=sha256:{file.sha256}\n" for file in wheels)


def wheel_arch(name: str) -> str | None:
    """Return the processor in the platform tag (PEP 425) of the wheel file `name`; None for "any" or unknown tags."""
    platforms = name.removesuffix(".whl").rpartition("-")[2].split(".")
    arches = {arch for arch in ARCHES for platform in platforms if platform.endswith(f"_{arch}")}
    return arches.pop() if len(arches) == 1 else None


def _read_torch(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the accelerators and the accelerator libraries of the torch build in a wheel."""
    try:
        with zipfile.ZipFile(path) as archive:
            names, text = archive.NameToInfo, ""
            if VERSION_FILE in names:
                with archive.open(VERSION_FILE) as stream:
                    text = stream.read(MAX_VERSION_FILE).decode("utf-8", "replace")
            libraries = [n for n in sorted(torch_libraries()) if f"torch/lib/{n}" in names]
    except (OSError, zipfile.BadZipFile, RuntimeError) as error:
        raise BuildError(f"{path} is not a wheel that can be read: {error}") from error
    return torch_builds(text), libraries


def wheel_facts(hashes: Sequence[Sequence[str]], store: Store) -> list[Facts | None]:
    """Return the facts of each wheel, given its possible sha256, from `store` or its remote cache; None if unknown."""
    entries = [_facts_entry(those) for those in hashes]
    facts_list = [_read_facts(entry, those, store) for entry, those in zip(entries, hashes, strict=True)]
    if store.remote is not None:
        store.remote.expect([entry for entry, facts in zip(entries, facts_list, strict=True) if facts is None])
        for number, entry in enumerate(entries):
            if facts_list[number] is None:
                facts_list[number] = fetched(entry, store.remote, partial(_read_facts, entry, hashes[number], store))
    return facts_list


def note_facts(hashes: Sequence[str], wheel: WheelFile, store: Store) -> None:
    """Store the facts of `wheel`, whose sha256 is one of `hashes`, and offer them to the remote cache."""
    entry = _facts_entry(hashes)
    fields = {"sha256": wheel.sha256, "size": wheel.size, "file": wheel.file_name, "torch": wheel.torch}
    with suppress(OSError):  # a read-only store only costs time
        store.folder("facts")
        write_note(store.root / entry.files[0], fields)
        _note_use(entry, store)
        if store.remote is not None:
            store.remote.offer(entry, 0.0)


def _note_use(entry: CacheEntry, store: Store) -> None:
    place = store.root / entry.files[0]
    store.note_use(place, place)


def _facts_entry(hashes: Sequence[str]) -> CacheEntry:
    return CacheEntry("wheel", hashlib.sha256(" ".join(sorted(hashes)).encode()).hexdigest())


def _read_facts(entry: CacheEntry, hashes: Sequence[str], store: Store) -> Facts | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        note = read_note(store.root / entry.files[0])
        torch = None
        if note["torch"] is not None:
            builds, libraries = note["torch"]
            torch = {str(name): str(build) for name, build in builds.items()}, [str(name) for name in libraries]
        size, file, sha256 = note["size"], note["file"], note["sha256"]
        if type(size) is int and size > 0 and type(file) is str and "/" not in file and sha256 in hashes:
            _note_use(entry, store)
            return str(sha256), size, file, torch
    return None


def slim_wheel(wheel: Path, sha256: str, name: str, rules: SlimRules, store: Store) -> tuple[Path, str]:
    """Apply `rules` to `wheel`; return the new wheel and its sha256, or `wheel` itself if nothing changes.

    `sha256` is the digest of `wheel`, `name` its normalised distribution. The result is kept in the store. Raises
    BuildError for a file that is not a wheel.
    """
    note = store.folder("facts") / f"slim-{key_of('slim', [sha256, name, rules.as_json()])}.json"
    with store.writing(), file_lock(note.with_suffix(".lock"), remove=True):
        with suppress(OSError, ValueError, KeyError):
            made = str(read_note(note)["sha256"])
            if made == sha256:
                return wheel, sha256
            if (path := store.find("wheels", made, wheel.name.__eq__)) is not None:
                return path, made
        with new_file(store.folder("partial"), "slim-") as (_, temporary):
            did = write_slim_wheel(wheel, sha256, name, rules, temporary)
            if did:
                temporary.chmod(0o644)
                made = store.digests.of(temporary)
                wheel, sha256 = store.adopt(temporary, made, wheel.name), made
                log(f"  slim: {wheel.name}: {human_size(did['bytes'])} left out")
        write_note(note, {"sha256": sha256})
    return wheel, sha256


def write_slim_wheel(wheel: Path, sha256: str, name: str, rules: SlimRules, place: Path) -> dict[str, Any]:
    """Apply `rules` to the wheel `wheel`, write the result to `place`, and return the changes, {} for none.

    Raises BuildError for a file that is not a wheel.
    """
    removed: list[str] = []
    left_out = 0
    blanked: dict[str, dict[str, Any]] = {}
    with reading(wheel.name, "wheel"), zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        info, rows = recorded_rows(archive, wheel.name)
        if not any(rules.blanks(name, member.filename) or rules.removes(member.filename) for member in members):
            return {}
        with zipfile.ZipFile(place, "w", zipfile.ZIP_STORED) as slim:
            for member in members:
                path = member.filename
                if rules.removes(path):
                    removed.append(path)
                    left_out += member.file_size
                    rows.pop(path, None)
                elif path != f"{info}/RECORD":
                    with open_member(archive, member) as stream:
                        blanks = rules if rules.blanks(name, path) else None
                        change = _copied(stream, member, slim, blanks, place.parent)
                    if change is not None:
                        blanked[path] = change
                        rows[path] = record_row(bytes.fromhex(change["sha256"]), member.file_size)
            left_out += sum(row["bytes"] for row in blanked.values())
            did = {**rules.as_json(), "wheel": sha256, "bytes": left_out, "removed": removed, "blanked": blanked}
            text = (json.dumps(did, indent=1) + "\n").encode()
            rows[f"{info}/{SLIM_FILE}"] = record_row(hashlib.sha256(text).digest(), len(text))
            record = render_record([(path, *row) for path, row in rows.items()], info)
            for path, data in ((f"{info}/{SLIM_FILE}", text), (f"{info}/RECORD", record)):
                slim.writestr(_named(path, 0o644 << 16), data)
    return did if removed or blanked else {}


def _copied(
    stream: IO[bytes], member: zipfile.ZipInfo, slim: zipfile.ZipFile, rules: SlimRules | None, folder: Path
) -> dict[str, Any] | None:
    """Copy a member, using a file in `folder` if `rules` apply; return the blanked parts, None if there are none."""
    made = _named(member.filename, member.external_attr)
    made.date_time, made.file_size = member.date_time, member.file_size
    if rules is None:
        with slim.open(made, "w") as out:
            shutil.copyfileobj(stream, out, _STEP)
        return None
    with tempfile.TemporaryFile(dir=folder) as file:
        before, after = hashlib.sha256(), hashlib.sha256()
        while data := stream.read(_STEP):
            before.update(data)
            file.write(data)
        ranges = blank_ranges(file, rules)
        file.seek(0)
        with slim.open(made, "w") as out:
            for data in blanked_bytes(file, ranges):
                after.update(data)
                out.write(data)
    sizes = sum(end - start for start, end in ranges)
    return {"original": before.hexdigest(), "sha256": after.hexdigest(), "bytes": sizes} if ranges else None


def blank_ranges(library: IO[bytes], rules: SlimRules) -> Ranges:
    """Return the ranges [start, end) of an ELF file that `rules` blank, in order. Raises OSError."""
    ranges: Ranges = []
    chips = tuple(all_chips(rules.chips))

    def container(entries: Sequence[CudaEntry]) -> None:
        dropped = unused({code for code, _, _ in entries}, chips)
        ranges.extend((start, start + size) for code, start, size in entries if code in dropped)

    if chips:
        library.seek(0)
        read_gpu_code(library, container)
    if rules.debug:
        ranges += _debug_sections(library)
    return sorted(ranges)


def _debug_sections(library: IO[bytes]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of sections named .debug_…; nothing for files that are not 64-bit little-endian ELF files."""
    library.seek(0)
    head = library.read(64)
    if head[:6] != b"\x7fELF\2\1" or len(head) < 64:
        return
    table, size, count, names = struct.unpack_from("<40xQ10xHHH", head)
    if size != _SECTION.size:
        return
    library.seek(table)
    rows = list(_SECTION.iter_unpack(library.read(size * count)[: size * count]))
    if len(rows) <= names:
        return
    library.seek(rows[names][4])
    text = library.read(rows[names][5])
    for row in rows:
        if text.startswith(b".debug_", row[0]) and row[1] != _NOBITS and row[5]:
            yield row[4], row[4] + row[5]


def blanked_bytes(stream: IO[bytes], ranges: Ranges) -> Iterator[bytes]:
    """Yield the bytes of `stream`, with zeros in the `ranges`."""
    at, left = 0, iter(ranges)
    current = next(left, None)
    while data := stream.read(_STEP):
        end = at + len(data)
        if current is not None and current[0] < end:
            changed = bytearray(data)
            while current is not None and current[0] < end:
                start, stop = max(current[0], at), min(current[1], end)
                changed[start - at : stop - at] = bytes(max(0, stop - start))
                if current[1] > end:
                    break
                current = next(left, None)
            data = bytes(changed)
        yield data
        at = end


def _named(path: str, attributes: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(path, date_time=(2020, 1, 1, 0, 0, 0))
    info.external_attr, info.create_system = attributes, 3
    return info
