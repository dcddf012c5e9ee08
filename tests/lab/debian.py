"""Debian packages and signed archives made by hand, for tests that need neither Debian nor a network."""

from __future__ import annotations

import hashlib
import io
import lzma
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pysequoia


def tar(items: Sequence[tarfile.TarInfo | tuple[str, bytes]]) -> bytes:
    """A tar archive; a pair is a file with its content."""
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as archive:
        for item in items:
            if isinstance(item, tarfile.TarInfo):
                archive.addfile(item)
            else:
                info = tarfile.TarInfo(item[0])
                info.size = len(item[1])
                archive.addfile(info, io.BytesIO(item[1]))
    return buffer.getvalue()


def info(name: str, kind: bytes = tarfile.DIRTYPE, target: str = "", mode: int = 0o755) -> tarfile.TarInfo:
    """A tar entry without content."""
    item = tarfile.TarInfo(name)
    item.type, item.linkname, item.mode = kind, target, mode
    return item


def ar(members: Mapping[str, bytes]) -> bytes:
    """An ar archive as dpkg-deb writes it."""
    parts = [b"!<arch>\n"]
    for name, data in members.items():
        parts.append(f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode())
        parts += [data, b"\n" if len(data) % 2 else b""]
    return b"".join(parts)


def deb(
    name: str,
    items: Sequence[tarfile.TarInfo | tuple[str, bytes]],
    *,
    version: str = "1",
    arch: str = "amd64",
    extra: str = "",
    conffiles: str = "",
) -> bytes:
    """A package with the files `items`; `extra` are further lines of its control file."""
    control = f"Package: {name}\nVersion: {version}\nArchitecture: {arch}\n{extra}Description: made\n"
    files = [("./control", control.encode())]
    files += [("./conffiles", conffiles.encode())] if conffiles else []
    return ar(
        {
            "debian-binary": b"2.0\n",
            "control.tar.xz": lzma.compress(tar(files)),
            "data.tar.xz": lzma.compress(tar(items)),
        }
    )


@dataclass
class Key:
    """An OpenPGP key that signs archives."""

    secret: pysequoia.Tsk = field(default_factory=lambda: pysequoia.Tsk.generate("test archive"))

    @property
    def public(self) -> pysequoia.Cert:
        return self.secret.extract_certificate()

    def clear(self, text: str) -> bytes:
        """`text` cleartext-signed."""
        mode = pysequoia.SignatureMode.CLEAR
        return pysequoia.sign(self.secret.signer(), text.encode(), mode=mode)

    def detached(self, text: str) -> bytes:
        """A signature of `text` on its own."""
        mode = pysequoia.SignatureMode.DETACHED
        return pysequoia.sign(self.secret.signer(), text.encode(), mode=mode)


def release_text(suite: str, files: Mapping[str, bytes], **fields: str) -> str:
    """A Release file over `files`, by their path below the suite's folder."""
    date = fields.pop("Date", "Sat, 11 Jul 2026 10:16:37 UTC")
    head = {"Origin": "Test", "Codename": suite, "Date": date, "Acquire-By-Hash": "yes"} | fields
    rows = [f" {hashlib.sha256(d).hexdigest()} {len(d)} {p}" for p, d in files.items()]
    return "".join(f"{k}: {v}\n" for k, v in head.items()) + "SHA256:\n" + "\n".join(rows) + "\n"


def write_archive(root: Path, suite: str, stanzas: Sequence[str], key: Key, arch: str = "amd64") -> str:
    """A signed archive of one suite below `root`; returns its URL."""
    folder = root / "dists" / suite
    name = f"main/binary-{arch}/Packages.xz"
    data = lzma.compress("\n\n".join([*stanzas, ""]).encode())
    place = folder / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    (folder / "InRelease").write_bytes(key.clear(release_text(suite, {name: data})))
    return root.as_uri()


def stanza(name: str, version: str = "1", *, data: bytes = b"", **fields: str) -> str:
    """A package's entry in a Packages file; `pre_depends` stands for Pre-Depends, and so on."""
    lines = [f"Package: {name}", f"Version: {version}", "Architecture: amd64"]
    lines += [f"{key.replace('_', '-').title()}: {value}" for key, value in fields.items()]
    lines += [
        f"Filename: pool/main/{name}_{version.replace(':', '%3a')}_amd64.deb",
        f"Size: {len(data) or 10}",
        f"SHA256: {hashlib.sha256(data).hexdigest()}",
    ]
    return "\n".join(lines)
