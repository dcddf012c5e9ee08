"""Trees that pass through unchanged while their distributions or the digests of their files are noted."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from typing import Any

from envbuild.base.packages import conda_digest, record_digest
from envbuild.base.text import normalise
from envbuild.contract.state import PREFIX
from envbuild.image.entry import FILE, Tree, closing
from envbuild.image.squashfs.segment import of_entry
from envbuild.image.tar import Member
from envbuild.layers.contents import HashedContent

# Only in a site-packages folder itself, not in one that a package vendors.
_CONDA = re.compile(re.escape(f"{PREFIX}/conda-meta/") + r"[^/]+\.json")
_RECORD = re.compile(r"(?:(?!site-packages/)[^/]+/)+site-packages/([^/]+)\.dist-info/RECORD")


def recorded(tree: Tree, found: list[tuple[str, str, str]]) -> Tree:
    """Yield `tree` unchanged, and add its distributions to `found`.

    A distribution is a Python distribution with a RECORD. In a layer of conda packages, `found` has the conda packages
    instead: their records list all of their files, those of Python distributions included.
    """
    conda: list[tuple[str, str, str]] = []
    with closing(tree):
        for entry, content in tree:
            record, is_conda = _RECORD.fullmatch(entry.path), _CONDA.fullmatch(entry.path)
            if content is not None and (record or is_conda):
                data = content.read(entry.size)
                content = io.BytesIO(data)
                if record:
                    name, _, version = record[1].rpartition("-")
                    found.append((normalise(name), version, record_digest(data)))
                else:
                    conda.append(_conda(json.loads(data)))
            yield entry, content
    if conda:
        found[:] = conda


def hashed(tree: Tree, listed: list[Member]) -> Tree:
    """Yield `tree` unchanged, and add its entries to `listed`, with the sha256 of each file."""
    with closing(tree):
        for entry, content in tree:
            member = of_entry(entry)
            listed.append(member)
            if content is not None and not isinstance(content, HashedContent):
                content = HashedContent(content)
            yield entry, content
            if entry.kind == FILE:
                member.sha256 = (content or HashedContent(io.BytesIO())).digest().hex()


def _conda(record: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return (name, version, digest) of a conda package from its record, as a survey reports them."""
    rows = [
        # Scripts of entry points are generated, so the package has no digest of them.
        (row["_path"], "" if row["path_type"].startswith("unix_") else row.get("sha256", ""))
        for row in record["paths_data"]["paths"]
        if not row["_path"].endswith(".pyc")
    ]
    return record["name"], record["version"], conda_digest(rows)
