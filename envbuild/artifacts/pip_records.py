"""Comparison of the packages that pip installed in an image with their wheels, and its source layers.

pip's RECORDs (PyPA "Recording installed projects") name the wheel's files with the wheel's own hashes, and also files
that pip generates: scripts and its notes. So they cannot equal the RECORDs of the native builder, and their digests
cannot be known in advance. Therefore every row that pip did not generate is compared; the digests stored for later are
those of RECORDs that passed this comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envbuild.artifacts.installed import record_rows
from envbuild.artifacts.layer_lists import LAYER_LISTS, parse_list
from envbuild.artifacts.state import BuiltLayer
from envbuild.base.errors import BuildError
from envbuild.base.files import parse_json
from envbuild.base.packages import normalise, normalise_version, record_digest
from envbuild.layers.compose import PREFIX, WheelFile
from envbuild.layers.wheel import INSTALLER_NOTES, Scheme, wheel_record
from envbuild.plan.plan import Plan

_SCRIPTS = "../../../bin/"
_SHOWN = 10
# Runs in the image, with any Python 3.
_READER = """
import json, platform, sys
from pathlib import Path
read = lambda found: [(p, p.read_text("utf-8", "surrogateescape")) for p in found]
records = {p.parent.name: text for p, text in read(Path(sys.argv[1]).glob("*.dist-info/RECORD"))}
layers = {p.stem: text for p, text in read(Path(sys.argv[2]).glob("*.json"))}
print(json.dumps([platform.python_version(), getattr(sys, "_base_executable", sys.executable), records, layers]))
"""


@dataclass(frozen=True, slots=True)
class PipEnvironment:
    """An environment in an image: its interpreter, RECORDs by .dist-info folder, and layers' file lists by name."""

    python_version: str
    interpreter: str
    records: Mapping[str, bytes]
    layers: Mapping[str, bytes] = field(default_factory=dict)


def read_installed(client: Any, image_id: str, python: str) -> PipEnvironment:
    """Read the environment of an image in `client`'s daemon. Raises BuildError when its interpreter does not run."""
    from docker.errors import DockerException

    folders = [f"/{Scheme(PREFIX, python).site_packages}", f"/{PREFIX}/{LAYER_LISTS}"]
    container = None
    try:
        container = client.containers.create(
            image_id,
            ["-B", "-I", "-c", _READER, *folders],
            entrypoint=[f"/{PREFIX}/bin/python"],
            user="0",
            network_mode="none",
        )
        # Attached before the start: logs can be read afterwards from some of the daemon's log drivers only.
        streams = container.attach(stream=True, demux=True, stdout=True, stderr=True)
        container.start()
        out, err = bytearray(), bytearray()
        for some_out, some_err in streams:
            out += some_out or b""
            err += some_err or b""
        code = container.wait()["StatusCode"]
        if code != 0:
            text = err.decode(errors="replace").strip()[-2000:]
            raise BuildError(f"the image's interpreter does not run (exit {code}):\n  {text}")
        version, interpreter, *texts = parse_json(bytes(out))
        records, layers = (
            {name: text.encode("utf-8", "surrogateescape") for name, text in one.items()} for one in texts
        )
    except (DockerException, ValueError, TypeError, AttributeError) as error:
        text = str(getattr(error, "explanation", None) or error)
        raise BuildError(f"the image cannot be read: {text}") from error
    finally:
        if container is not None:
            container.remove(force=True, v=True)
    return PipEnvironment(version, interpreter, records, layers)


def check_installed(installed: PipEnvironment, wheels: Sequence[WheelFile], python: str) -> list[tuple[str, str, str]]:
    """Return (name, version, digest of RECORD) of each distribution. Raises BuildError if they are not `wheels`."""
    scheme = Scheme(PREFIX, python)
    found: dict[tuple[str, str], bytes] = {}
    spelled: dict[tuple[str, str], str] = {}  # the folder of a distribution may have another: 2020.01.01
    for folder, record in installed.records.items():
        name, _, version = folder.removesuffix(".dist-info").partition("-")
        key = normalise(name), normalise_version(version)
        found[key], spelled[key] = record, version
    wanted = {(wheel.name, normalise_version(wheel.version)): wheel for wheel in wheels}
    wrong = [f"{name} {version} is missing" for name, version in sorted(wanted.keys() - found)]
    wrong += [f"{name} {version} is not locked" for name, version in sorted(found.keys() - wanted)]
    for key in sorted(wanted.keys() & found):
        differences = record_differences(wheel_record(wanted[key].path, scheme), found[key])
        wrong += [f"{key[0]} {key[1]}: {line}" for line in differences[:_SHOWN]]
    if wrong:
        raise BuildError(
            "the image's packages differ from the lock:\n" + "\n".join(f"  {line}" for line in wrong),
            "its base image may install packages into /opt/env, or change what pip does (PIP_* "
            "variables, pip.conf): choose another base",
        )
    return sorted((key[0], spelled[key], record_digest(record)) for key, record in found.items())


def built_layers(plan: Plan, lists: Mapping[str, bytes]) -> list[BuiltLayer]:
    """Return the source layers of `plan` in an image, by their file `lists`. Raises BuildError without a valid list."""
    found = []
    for layer in plan.sources:
        try:
            listed = parse_list(lists[layer.name])
        except (KeyError, ValueError, TypeError) as error:
            raise BuildError(
                f"the image has no layer {layer.name} {layer.version}, or its list of files is damaged",
                "a base image that has files in /opt/env cannot be built on: choose another",
            ) from error
        found.append(BuiltLayer(layer.name, layer.version, listed.digest, check=layer.check))
    return found


def record_differences(wheel: bytes, installed: bytes) -> list[str]:
    """Return how pip's RECORD differs from the native builder's of the same wheel, without files that pip generates.

    Scripts are compared by name: installers write their text, and pip records the digest of what it wrote.
    """
    wanted, found = _rows(wheel), _rows(installed)
    lines = [f"{path} is missing" for path in sorted(wanted.keys() - found)]
    lines += [f"{path} is not the wheel's" for path in sorted(found.keys() - wanted)]
    lines += [
        f"{path} has other content"
        for path in sorted(wanted.keys() & found)
        if wanted[path] != found[path] and not path.startswith(_SCRIPTS)
    ]
    return lines


def _rows(record: bytes) -> dict[str, tuple[str, ...]]:
    rows = record_rows(record.decode("utf-8", "surrogateescape"))
    return {row[0]: tuple(row[1:]) for row in rows if row and not INSTALLER_NOTES.fullmatch(row[0])}
