"""Slim wheels: copies of wheels, with a new RECORD, without the files and code that `[slim]` of a recipe excludes.

In libraries, zeros replace the code for other GPUs and the debug sections, so sizes and offsets do not change; file
systems and compression store zeros almost for free. The headers of the code remain: the driver selects code by them,
and never reads code for other GPUs. `envbuild-slim.json` in the .dist-info folder lists the changes.

Source of ELF's section headers: System V ABI, "Sections". The wheel is stored, not deflated, so that its bytes do not
depend on the zlib of the Python build.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from envbuild.base.atomic import file_lock, new_file
from envbuild.base.packages import SLIM_FILE, record_row
from envbuild.base.progress import log
from envbuild.base.text import human_size
from envbuild.cache.hashed import read_note, write_note
from envbuild.gpus import CudaEntry, all_chips, read_gpu_code
from envbuild.layers.contents import open_member, reading
from envbuild.layers.wheel import recorded_rows, render_record
from envbuild.slim import SlimRules, unused
from envbuild.store.entry import key_of
from envbuild.store.store import Store

_STEP = 1 << 20
_SECTION = struct.Struct("<IIQQQQIIQQ")
_NOBITS = 8
Ranges = list[tuple[int, int]]


def slim_wheel(wheel: Path, sha256: str, name: str, rules: SlimRules, store: Store) -> tuple[Path, str]:
    """Apply `rules` to `wheel`; return the new wheel and its sha256, or `wheel` itself if nothing changes.

    `sha256` is the digest of `wheel`, `name` its normalised distribution. The result is kept in the store. Raises
    BuildError for a file that is not a wheel.
    """
    note = store.folder("facts") / f"slim-{key_of('slim', [sha256, name, rules.as_json()])}.json"
    try:
        with file_lock(note.with_suffix(".lock"), remove=True):
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
                    made = store.file_digest(temporary)
                    wheel, sha256 = store.adopt(temporary, made, wheel.name), made
                    log(f"  slim: {wheel.name}: {human_size(did['bytes'])} left out")
            write_note(note, {"sha256": sha256})
    except OSError as error:
        raise store.unwritable(error) from error
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
