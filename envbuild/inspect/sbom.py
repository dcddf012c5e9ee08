"""The bill of materials of an artifact as CycloneDX 1.6 JSON, byte for byte reproducible.

Sources: CycloneDX 1.6 (ECMA-424), package-url types `pypi`, `conda`, `deb`, `generic` and `oci`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from cyclonedx.contrib.license.exceptions import InvalidLicenseExpressionException, InvalidSpdxLicenseException
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from envbuild import __version__
from envbuild.base.packages import channel_name
from envbuild.contract.state import FIXED_TIME
from envbuild.inspect.facts import FOLDERS, IMAGE, Description, Inventory, PythonPackage

# The namespace of envbuild's serial numbers (RFC 9562, version 5).
_SPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "org.envbuild")


def cyclonedx(about: Description, contents: Inventory, source_date: int | None) -> str:
    """Return the bill of materials.

    Its timestamp is `source_date` (seconds since 1970), or the artifact's own time for None. Everything else, including
    the serial number, depends only on the artifact's content.
    """
    subject = _subject(about)
    bom = Bom(serial_number=uuid.uuid5(_SPACE, _identity(about, contents)))
    bom.metadata.component = subject
    bom.metadata.timestamp = _time(about, source_date)
    tool = Component(name="envbuild", version=__version__, type=ComponentType.APPLICATION)
    bom.metadata.tools.components.add(tool)
    parts = _parts(contents)
    bom.components.update(parts)
    bom.register_dependency(subject, parts)
    outputter = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6)
    return outputter.output_as_string(indent=1) + "\n"


def _identity(about: Description, contents: Inventory) -> str:
    """Return the artifact's digest; for an environment that envbuild did not build, the text of all its packages."""
    if about.digest or about.identity:
        return about.digest or about.identity
    conda = [(p.name, p.version, p.build, p.record) for p in contents.conda]
    built = [(layer.name, layer.version, layer.files) for layer in contents.built]
    return repr([(p.name, p.version, p.record) for p in contents.python] + conda + built)


def _subject(about: Description) -> Component:
    digest = about.digest or about.identity
    # Not the artifact's path: a copy elsewhere has the same bill of materials.
    name = about.recipe or about.labels.get("org.opencontainers.image.title") or about.kind
    return Component(
        type=ComponentType.APPLICATION if about.kind in FOLDERS else ComponentType.CONTAINER,
        name=name,
        version=digest or None,
        bom_ref=digest or name,
        hashes=_hashes(digest.rpartition(":")[2]),
        purl=PackageURL("oci", None, name.lower(), digest) if about.kind == IMAGE else None,
        properties=_properties(
            kind=about.kind,
            target=about.target,
            plan=about.plan_digest,
            lock=about.lock_digest,
            base=about.base,
            image_id=about.identity if about.kind == IMAGE else "",
        ),
    )


def _parts(contents: Inventory) -> list[Component]:
    """Return the source layers and all packages; the package-url type of source layers is `generic`."""
    parts: list[Component] = []
    seen: set[str] = set()

    def add(
        kind: str, space: str | None, name: str, version: str, qualifiers: Mapping[str, str], location: str, **more: Any
    ) -> None:
        known = {name: value for name, value in qualifiers.items() if value}
        purl = PackageURL(kind, space, name, version or None, known)
        text = f"{purl}#{location}" if location else str(purl)
        reference, number = text, 1
        while reference in seen:  # references are unique in a document
            number += 1
            reference = f"{text}#{number}"
        seen.add(reference)
        library = ComponentType.LIBRARY
        parts.append(Component(type=library, name=name, version=version or None, bom_ref=reference, purl=purl, **more))

    for layer in contents.built:
        checksum = f"sha256:{layer.source}" if layer.source else ""
        start = f"{layer.location}/" if layer.location else ""
        texts = [Property(name="envbuild:licence", value=f"{start}{path}") for path in layer.licences]
        own = [*_properties(location=layer.location, files=layer.files), *texts]
        add("generic", None, layer.name, layer.version, {"checksum": checksum}, layer.location, properties=own)
    for conda in contents.conda:
        qualifiers = {
            "build": conda.build,
            "channel": channel_name(conda.channel),
            "subdir": conda.subdir,
            "type": conda.archive,
        }
        add(
            "conda",
            None,
            conda.name,
            conda.version,
            qualifiers,
            conda.location,
            hashes=_hashes(conda.sha256),
            licenses=[LicenseFactory().make_from_string(conda.license)] if conda.license else [],
            properties=_properties(location=conda.location, record=conda.record),
        )
    for python in contents.python:
        own = _properties(location=python.location, record=python.record)
        licenses = _licenses(python)
        add("pypi", None, python.name, python.version, {}, python.location, licenses=licenses, properties=own)
    system, release = contents.os.get("ID") or "debian", contents.os.get("VERSION_ID")
    distro = f"{system}-{release}" if release else contents.os.get("VERSION_CODENAME", "")
    for debian in contents.debian:
        add("deb", system, debian.name, debian.version, {"arch": debian.arch, "distro": distro}, "")
    return parts


def _hashes(sha256: str) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if sha256 else []


def _licenses(package: PythonPackage) -> list[License]:
    """Return the licences: CycloneDX takes one SPDX expression, or any number of licences by SPDX id or by name."""
    make = LicenseFactory()
    if package.expression:
        try:
            return [make.make_with_expression(package.expression)]
        except InvalidLicenseExpressionException:
            return [make.make_with_name(package.expression)]
    licenses: list[License] = []
    for name in package.licenses:
        try:
            licenses.append(make.make_with_id(name))
        except InvalidSpdxLicenseException:
            licenses.append(make.make_with_name(name))
    return licenses


def _properties(**values: str) -> list[Property]:
    return [Property(name=f"envbuild:{name}", value=value) for name, value in values.items() if value]


def _time(about: Description, source_date: int | None) -> datetime:
    if source_date is not None:
        return datetime.fromtimestamp(source_date, UTC)
    for text in (about.created, about.created[:19]):  # the time zone may be told in other ways than in RFC 3339
        with suppress(ValueError, OverflowError):
            moment = datetime.fromisoformat(text).replace(microsecond=0)
            return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    return datetime.fromtimestamp(FIXED_TIME, UTC)
