"""The `[layers.NAME]` tables: parts of an artifact other than packages, such as libfabric, NCCL or own sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from envbuild.base.toml import Document, Problem, form, key, list_at, required, table_at
from envbuild.recipe.targets import target_problem

layer_name_problem = form(r"[a-z0-9][a-z0-9_.+-]*", "is not a layer's name: lower-case letters, digits and . _ + -")
option_problem = form(r"\S[^\n\x00]*", "is not one option on one line")


def patch_problem(text: str) -> str | None:
    """Return why `text` is not a file below the recipe's folder, or None."""
    bad = not text or text.startswith("/") or ".." in text.split("/") or not text.isprintable()
    return f"{text!r} is not a file below the recipe's folder" if bad else None


@dataclass(frozen=True)
class LayerTable:
    """`[layers.NAME]`: one layer that is built from source, replaced by a wheel, or provided by the host."""

    version: str = required(
        "The version, as its project writes it.", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$", example="2.1.0"
    )
    kind: Literal["default", "source", "wheel", "host"] = key(
        "default",
        "`source`: built from source; `wheel`: PyPI's, in place of the one that torch pins (nccl);"
        " `host`: what the nodes have at `path`. Default: wheel for nccl, else source.",
        example="source",
    )
    url: str = key(
        "",
        "Where the source's archive is: http(s) or file. Default: where its project releases it."
        " A site may have a mirror of it ([mirrors] in site.toml).",
        pattern=r"^(https?://\S+|file:///\S+)?$",
        example="https://example.org/libfoo-1.0.tar.gz",
    )
    sha256: str = key(
        "", "The archive's sha256, in hexadecimal. Default: as known for this version.", pattern=r"^([0-9a-f]{64})?$"
    )
    system: Literal["default", "autotools", "make", "wheel"] = key(
        "default",
        "How it is built: `./configure && make install`, `make` alone, or a wheel from its"
        " pyproject.toml or setup.py. Default: as known for this name, else autotools.",
        example="autotools",
    )
    configure: tuple[str, ...] = key(
        (),
        "Options after those that are known to be needed: of configure, or variables of make."
        " {prefix} is the artifact's environment, {libfabric} where that layer is.",
        check=option_problem,
        example=["--enable-efa=no"],
    )
    patches: tuple[str, ...] = key(
        (),
        "Patch files below the recipe's folder, applied in this order with -p1.",
        check=patch_problem,
        example=["patches/fix.patch"],
    )
    requires: tuple[str, ...] = key(
        (),
        "Layers that must be there before, besides those known to be needed.",
        check=layer_name_problem,
        example=["libfabric"],
    )
    path: str = key(
        "",
        'Where the nodes have it (kind = "host"): the folder with lib/ and include/.',
        pattern=r"^(/\S*)?$",
        example="/opt/cray/libfabric/1.22.0",
    )
    targets: tuple[str, ...] = key(
        (), "The targets that get this layer. Default: all.", check=target_problem, example=["cu126-aarch64"]
    )

    def for_target(self, target: str) -> bool:
        """Return whether `target` gets this layer."""
        return not self.targets or target in self.targets


def kind_of(name: str, table: LayerTable) -> str:
    """Return the kind of the layer `name`: "source", "wheel" or "host"."""
    if table.kind != "default":
        return table.kind
    return "wheel" if name == "nccl" else "source"


def layer_mistakes(document: Document) -> Iterator[Problem]:
    """Yield keys of [layers.NAME] that conflict, and names of layers and targets that do not exist."""
    layers, targets = table_at(document.data, "layers"), table_at(document.data, "targets")
    for name, table in ((name, table) for name, table in layers.items() if isinstance(table, dict)):
        kind = table.get("kind", "default")
        if kind == "host" and not table.get("path"):
            yield ("layers", name), f"'path' in [layers.{name}] is missing: where do the nodes have it?"
        if kind != "host" and table.get("path"):
            yield ("layers", name, "path"), "'path': only with kind = \"host\""
        if kind == "wheel" and name != "nccl":
            yield ("layers", name, "kind"), "'wheel' is for nccl; other packages belong into requirements"
        if kind in ("wheel", "host"):
            for option in ("url", "sha256", "system", "configure", "patches", "requires"):
                if table.get(option):
                    yield ("layers", name, option), f"{option!r}: only for a layer that is built from source"
        for number, one in enumerate(list_at(table, "requires")):
            if one not in layers or one == name:
                yield ("layers", name, "requires", number), f"{one!r} is not another layer of this recipe"
        for number, one in enumerate(list_at(table, "targets")):
            if targets and one not in targets:
                yield ("layers", name, "targets", number), f"the recipe has no target {one!r}"
