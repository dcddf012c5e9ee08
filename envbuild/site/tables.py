"""Tables of site.toml about builds: registries, Debian packages, the network, limits, trust and audit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar, Literal

from envbuild.base.text import AGES, seconds
from envbuild.base.toml import form, key
from envbuild.fabrics import fabric_name_problem
from envbuild.image.limits import ImageLimits
from envbuild.site import AuditException, jobs

_ARCHIVE = r"^(https?://\S+|file:///\S*)?$"


def url_problem(url: str) -> str | None:
    return None if "://" in url else "a mirror is a URL, such as https://mirror.example.org/pytorch"


# Receipts and messages name these variables: secrets (such as a proxy's password) do not belong here.
_variable_problem = form(
    r"(NCCL|FI|OFI_NCCL|UCX|TORCH_NCCL)_[A-Z0-9_]+",
    "is no variable of NCCL, libfabric, their plugin or UCX (NCCL_…, FI_…, OFI_NCCL_…, UCX_…)",
)


@dataclass(frozen=True, slots=True)
class RegistryTable:
    """`[registries.HOST]`: access to one image registry."""

    mirrors: tuple[str, ...] = key(
        (), "URLs that have the registry's images; tried before it, for pulling only.", check=url_problem
    )
    insecure: bool = key(False, "Whether it is spoken to in plain HTTP.")


@dataclass(frozen=True, slots=True)
class DebianTable:
    """`[debian]`: the site's source of Debian packages."""

    mirror: str = key(
        "", "URL of the archive (what holds dists/ and pool/). Default: the host's apt sources.", pattern=_ARCHIVE
    )
    security_mirror: str = key("", "URL of the archive of security updates.", pattern=_ARCHIVE)
    keyring: str = key("", "File with the keys that may sign releases, instead of Debian's own.")


@dataclass(frozen=True, slots=True)
class PythonTable:
    """`[python]`: the Pythons of virtual environments."""

    downloads: Literal["automatic", "never"] = key(
        "automatic", "Whether uv downloads a Python that a build needs and the host lacks, into the store."
    )


@dataclass(frozen=True, slots=True)
class FabricTable:
    """`[fabric]`: the network between this site's nodes, as verification uses it."""

    interface: str = key(
        "",
        "The interface for NCCL_SOCKET_IFNAME on GPU nodes, such as hsn0; several with commas.",
        pattern=r"^(\S*)$",
        example="hsn0,hsn1,hsn2,hsn3",
    )
    busbw_floor: dict[str, float] = key(
        {},
        "GB/s of bus bandwidth that the largest all-reduce must reach, by the recipe's fabric."
        " A recipe's own busbw_floor goes over it.",
        key_check=fabric_name_problem,
        minimum=0,
    )
    variables: dict[str, str] = key(
        {},
        "Variables of every job on GPUs, over those that the fabric needs.",
        key_check=_variable_problem,
        check=jobs.value_problem,
    )


@dataclass(frozen=True, slots=True)
class LimitsTable(ImageLimits):
    """`[limits]`: the size of the store, and that of images that envbuild reads: a larger one could fill memory."""

    SET_IN: ClassVar[str] = "[limits] of site.toml"

    entries: int = key(
        ImageLimits().entries, "The most files, folders and links in all layers of one image.", minimum=1
    )
    unpacked_bytes: int = key(
        ImageLimits().unpacked_bytes,
        "The most bytes of files in all layers of one image; those in holes of a layer's sparse files count 16 times.",
        minimum=1,
    )
    store_bytes: int = key(0, "The most bytes in the store; what was unused for longest goes. 0: no limit.", minimum=0)


_repository_problem = form(
    r"(?!(index|registry-1)\.docker\.io/)([a-z0-9-]+(\.[a-z0-9-]+)+|localhost|\[[0-9a-f:]+\]|[a-z0-9-]+(?=:))(:[0-9]+)?"
    r"(/[a-z0-9._-]+)+(:\w[\w.-]*)?",
    "is neither HOST/REPOSITORY nor HOST/REPOSITORY:TAG in lower case, nor an absolute path",
)


def _age_problem(text: str) -> str | None:
    return None if seconds(text) else f"expected {AGES}"


def _name_problem(name: str) -> str | None:
    return None if name.startswith("/") and os.path.normpath(name) == name else _repository_problem(name)


@dataclass(frozen=True, slots=True)
class TrustTable:
    """`[trust]`: which artifacts jobs take, and which entries of the cache builds do. Without signers, any."""

    signers: tuple[str, ...] = key((), "Files of public keys (PEM); one of them must have attested the receipt.")
    identities: tuple[str, ...] = key(
        (),
        "Identities that may have attested it instead, without a key: `IDENTITY ISSUER`.",
        check=lambda text: None if len(text.split()) == 2 else "expected `IDENTITY ISSUER`",
    )
    sigstore: str = key("", "File with the trust configuration of your own Sigstore, for identities.")
    checks: tuple[str, ...] = key((), "Checks that must have passed, such as faults need: restart.")
    max_age: str = key("", "The greatest age of a verification, such as 90d.", check=_age_problem)
    attestations: tuple[Literal["sbom", "provenance"], ...] = key(
        (), "What must be attested besides; what is there is checked in any case."
    )
    names: dict[str, str] = key(
        {},
        "What a name must lead to: HOST/REPOSITORY, HOST/REPOSITORY:TAG or the path of an artifact, and its recipe.",
        key_check=_name_problem,
        pattern=r"[\w.-]+",
    )
    cache_signers: tuple[str, ...] = key((), "The same for the cache; one must have signed what builds take of it.")

    @property
    def restricts(self) -> bool:
        """Whether only attested artifacts are taken."""
        return bool(self.signers or self.identities)


@dataclass(frozen=True, slots=True)
class AuditTable:
    """`[audit]`: the database of known vulnerabilities that `envbuild audit` reads."""

    database: str = key("", "Folder with OSV's exports: PyPI/all.zip and Debian/all.zip.", example="/srv/osv")
    max_age: str = key("14d", "The greatest age of its newest record.", check=_age_problem)
    exceptions: dict[str, AuditException] = key(
        {}, "Identifier of a vulnerability → why it is accepted, and until when."
    )
