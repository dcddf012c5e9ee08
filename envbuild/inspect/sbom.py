"""The bill of materials of an artifact as CycloneDX 1.6 JSON, byte for byte reproducible.

Sources: CycloneDX 1.6 (ECMA-424), package-url types `pypi`, `conda`, `deb` and `oci`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from envbuild import __version__
from envbuild.inspect.conda_meta import channel_name
from envbuild.inspect.facts import FOLDERS, IMAGE, DebianPackage, Description, Inventory, PythonPackage
from envbuild.layers.compose import FIXED_TIME

if TYPE_CHECKING:
    from cyclonedx.model.component import Component
    from cyclonedx.model.license import License

# The namespace of envbuild's serial numbers (RFC 9562, version 5).
_SPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "org.envbuild")


def cyclonedx(about: Description, contents: Inventory, source_date: int | None) -> str:
    """Return the bill of materials.

    Its timestamp is `source_date` (seconds since 1970), or the artifact's own time for None. All else, the
    serial number too, depends only on the artifact's content.
    """
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output import make_outputter
    from cyclonedx.schema import OutputFormat, SchemaVersion

    subject = _subject(about)
    bom = Bom(serial_number=uuid.uuid5(_SPACE, _identity(about, contents)))
    bom.metadata.component = subject
    bom.metadata.timestamp = _time(about, source_date)
    tool = Component(name="envbuild", version=__version__, type=ComponentType.APPLICATION)
    bom.metadata.tools.components.add(tool)
    parts = [*_built(contents), *_conda(contents), *_python(contents), *_debian(contents)]
    for part in parts:
        bom.components.add(part)
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
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    digest = about.digest or about.identity
    # Not the artifact's path: a copy elsewhere has the same bill of materials.
    name = about.recipe or about.labels.get("org.opencontainers.image.title") or about.kind
    purl = PackageURL("oci", None, name.lower(), digest) if about.kind == IMAGE else None
    return Component(
        type=ComponentType.APPLICATION if about.kind in FOLDERS else ComponentType.CONTAINER,
        name=name,
        version=digest or None,
        bom_ref=digest or name,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest.rpartition(":")[2])] if digest else [],
        purl=purl,
        properties=_properties(
            kind=about.kind,
            target=about.target,
            plan=about.plan_digest,
            lock=about.lock_digest,
            base=about.base,
            image_id=about.identity if about.kind == IMAGE else "",
        ),
    )


def _built(contents: Inventory) -> Iterator[Component]:
    """Yield the source layers; their package-url type `generic` has the checksum of the source archive."""
    from cyclonedx.model import Property
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    seen: set[str] = set()
    for layer in contents.built:
        qualifiers = {"checksum": f"sha256:{layer.source}"} if layer.source else {}
        purl = PackageURL("generic", None, layer.name, layer.version or None, qualifiers)
        start = f"{layer.location}/" if layer.location else ""
        texts = [Property(name="envbuild:licence", value=f"{start}{path}") for path in layer.licences]
        yield Component(
            type=ComponentType.LIBRARY,
            name=layer.name,
            version=layer.version or None,
            bom_ref=_reference(f"{purl}#{layer.location}".rstrip("#"), seen),
            purl=purl,
            properties=[*_properties(location=layer.location, files=layer.files), *texts],
        )


def _conda(contents: Inventory) -> Iterator[Component]:
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model import HashAlgorithm, HashType
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    seen: set[str] = set()
    for package in contents.conda:
        qualifiers = {
            "build": package.build,
            "channel": channel_name(package.channel),
            "subdir": package.subdir,
            "type": package.archive,
        }
        purl = PackageURL(
            "conda", None, package.name, package.version or None,
            {name: value for name, value in qualifiers.items() if value},
        )  # fmt: skip
        yield Component(
            type=ComponentType.LIBRARY,
            name=package.name,
            version=package.version or None,
            bom_ref=_reference(f"{purl}#{package.location}".rstrip("#"), seen),
            purl=purl,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=package.sha256)] if package.sha256 else [],
            licenses=[LicenseFactory().make_from_string(package.license)] if package.license else [],
            properties=_properties(location=package.location, record=package.record),
        )


def _python(contents: Inventory) -> Iterator[Component]:
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    seen: set[str] = set()
    for package in contents.python:
        purl = PackageURL("pypi", None, package.name, package.version or None)
        yield Component(
            type=ComponentType.LIBRARY,
            name=package.name,
            version=package.version or None,
            bom_ref=_reference(f"{purl}#{package.location}", seen),
            purl=purl,
            licenses=_licenses(package),
            properties=_properties(location=package.location, record=package.record),
        )


def _debian(contents: Inventory) -> Iterator[Component]:
    from cyclonedx.model.component import Component, ComponentType

    seen: set[str] = set()
    for package in contents.debian:
        purl = _deb_purl(package, contents)
        yield Component(
            type=ComponentType.LIBRARY,
            name=package.name,
            version=package.version or None,
            bom_ref=_reference(str(purl), seen),
            purl=purl,
        )


def _deb_purl(package: DebianPackage, contents: Inventory) -> Any:
    from packageurl import PackageURL

    system = contents.os.get("ID") or "debian"
    release = contents.os.get("VERSION_ID")
    suite = contents.os.get("VERSION_CODENAME")
    distro = f"{system}-{release}" if release else suite
    qualifiers = {"arch": package.arch} if package.arch else {}
    if distro:
        qualifiers["distro"] = distro
    return PackageURL("deb", system, package.name, package.version or None, qualifiers)


def _reference(text: str, seen: set[str]) -> str:
    """Return `text`, numbered if it is in `seen`, and add it to `seen`: references are unique in a document."""
    number = 1
    reference = text
    while reference in seen:
        number += 1
        reference = f"{text}#{number}"
    seen.add(reference)
    return reference


def _licenses(package: PythonPackage) -> list[License]:
    """Return the licences: CycloneDX takes one SPDX expression, or any number of licences by SPDX id or by name."""
    from cyclonedx.contrib.license.exceptions import InvalidLicenseExpressionException, InvalidSpdxLicenseException
    from cyclonedx.contrib.license.factories import LicenseFactory

    make = LicenseFactory()
    if package.expression:
        try:
            return [make.make_with_expression(package.expression)]
        except InvalidLicenseExpressionException:
            return [make.make_with_name(package.expression)]
    found: list[License] = []
    for name in package.licenses:
        try:
            found.append(make.make_with_id(name))
        except InvalidSpdxLicenseException:
            found.append(make.make_with_name(name))
    return found


def _properties(**values: str) -> list[Any]:
    from cyclonedx.model import Property

    return [Property(name=f"envbuild:{name}", value=value) for name, value in values.items() if value]


def _time(about: Description, source_date: int | None) -> datetime:
    if source_date is not None:
        return datetime.fromtimestamp(source_date, UTC)
    # Docker writes nanoseconds: only whole seconds are read.
    try:
        found = datetime.fromisoformat(about.created[:19])
    except ValueError:
        return datetime.fromtimestamp(FIXED_TIME, UTC)
    return found.replace(tzinfo=UTC)
