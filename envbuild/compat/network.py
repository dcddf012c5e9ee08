"""Compatibility checks from NCCL through its plugin and libfabric to the network."""

from __future__ import annotations

from collections.abc import Iterator

from envbuild.compat import rows as data
from envbuild.compat.finding import LOOK_IT_UP, CompatFinding
from envbuild.compat.rows import Rows
from envbuild.compat.stack import Stack
from envbuild.compat.versions import matches
from envbuild.fabrics import load_fabrics


def net_api_links(stack: Stack, rows: Rows) -> Iterator[CompatFinding]:
    if stack.plugin is None:
        return
    plugin = data.plugin_row(rows, stack.plugin)
    what = f"aws-ofi-nccl {stack.plugin}"
    if plugin is None:
        yield CompatFinding("unknown", "plugin", f"no row says which net APIs {what} has", LOOK_IT_UP)
        return
    if stack.nccl is None:
        text = f"{what} has net API {_span(plugin.apis)}; which NCCL opens it is not known"
        yield CompatFinding("unknown", "plugin", text, "pin torch, or make the lock with `envbuild lock`")
        return
    nccl = data.nccl_row(rows, stack.nccl)
    if nccl is None:
        text = f"no row says which net APIs NCCL {stack.nccl} speaks; {what} has {_span(plugin.apis)}"
        yield CompatFinding("unknown", "plugin", text, LOOK_IT_UP)
        return
    both = set(nccl.apis) & set(plugin.apis)
    source, date = f"{nccl.source}; {plugin.source}", max(nccl.date, plugin.date)
    speak = f"NCCL {stack.nccl} speaks net API {_span(nccl.apis)}, {what} has {_span(plugin.apis)}"
    if both:
        library = plugin.library if stack.rocm is None else "librccl-net-ofi.so"
        text = f"{speak}: v{max(both)} is used, from {library}"
        yield CompatFinding("good", "plugin", text, "", source, date)
    else:
        newest = max((row.versions for row in rows.plugins if set(row.apis) & set(nccl.apis)), default="")
        fix = f"take aws-ofi-nccl {newest}" if newest else "take another aws-ofi-nccl"
        text = f"{speak}: they have none in common, and NCCL falls back to sockets"
        yield CompatFinding("bad", "plugin", text, f"{fix}, or another NCCL", source, date)


def _span(apis: tuple[int, ...]) -> str:
    return f"v{min(apis)} to v{max(apis)}" if len(apis) > 1 else f"v{min(apis, default=0)}"


def libfabric_links(stack: Stack, rows: Rows) -> Iterator[CompatFinding]:
    if stack.libfabric is None:
        if stack.plugin is not None:
            text = f"aws-ofi-nccl {stack.plugin} needs libfabric, and the recipe names none"
            fix = 'add [layers.libfabric], with kind = "host" where the nodes have it'
            yield CompatFinding("unknown", "libfabric", text, fix)
        return
    what = f"libfabric {stack.libfabric}"
    row, plugin = (
        data.libfabric_row(rows, stack.libfabric),
        data.plugin_row(rows, stack.plugin) if stack.plugin else None,
    )
    if plugin is not None:
        enough = matches(stack.libfabric, plugin.libfabric)
        need = f"aws-ofi-nccl {stack.plugin} needs libfabric {plugin.libfabric}"
        if enough is False:
            fix = f"take libfabric {plugin.libfabric} ([layers.libfabric] version)"
            text = f"{need}, here is {stack.libfabric}"
            yield CompatFinding("bad", "libfabric", text, fix, plugin.source, plugin.date)
        elif enough:
            text = f"{need}: {stack.libfabric}"
            yield CompatFinding("good", "libfabric", text, "", plugin.source, plugin.date)
    if row is None:
        yield CompatFinding("unknown", "libfabric", f"no row says what {what} has", LOOK_IT_UP)
        return
    if stack.libfabric_origin == "host":
        text = (
            f"{what} is the nodes': what is built against it must run with symbol version {row.symbol}"
            " at most; build it with the headers in its own folder"
        )
        yield CompatFinding("note", "libfabric", text, "", row.source, row.date)
    else:
        text = f"{what} has symbol version {row.symbol}: what is built against it needs that where it runs"
        yield CompatFinding("note", "libfabric", text, "", row.source, row.date)


def provider_links(stack: Stack, rows: Rows) -> Iterator[CompatFinding]:
    fabric = load_fabrics().get(stack.fabric)
    if fabric is None:
        yield CompatFinding("unknown", "fabric", f"no row says what fabric {stack.fabric!r} needs", LOOK_IT_UP)
        return
    if not fabric.provider:
        if stack.plugin is None and fabric.nccl_net and stack.gpus:
            text = f"NCCL speaks {stack.fabric!r} by itself"
            yield CompatFinding("good", "fabric", text, "", fabric.source, fabric.date)
        elif stack.plugin is not None and fabric.nccl_net:
            text = f"NCCL speaks {stack.fabric!r} by itself; aws-ofi-nccl is built and not used"
            yield CompatFinding("note", "fabric", text, "", fabric.source, fabric.date)
        return
    needs = f"fabric {stack.fabric!r} is libfabric's provider {fabric.provider!r}"
    if stack.gpus and stack.plugin is None:
        fix = "add [layers.aws-ofi-nccl] and [layers.libfabric], or set another fabric"
        if stack.base:
            text = f"{needs}; whether the base image has aws-ofi-nccl is not known"
            yield CompatFinding("unknown", "fabric", text, "see that it has, or " + fix)
        else:
            text = f"{needs}, and nothing brings aws-ofi-nccl, by which NCCL reaches it"
            yield CompatFinding("bad", "fabric", text, fix, fabric.source, fabric.date)
    row = data.libfabric_row(rows, stack.libfabric) if stack.libfabric else None
    if row is None:
        return
    if fabric.provider in row.providers:
        text = f"{needs}, which libfabric {stack.libfabric} has"
        yield CompatFinding("good", "fabric", text, "", row.source, row.date)
        return
    have = [one.versions for one in rows.libfabric if fabric.provider in one.providers]
    fix = f"take libfabric {have[0]} or newer" if have else "set another fabric"
    text = f"{needs}, which libfabric {stack.libfabric} does not have"
    yield CompatFinding("bad", "fabric", text, f"{fix} ([layers.libfabric] version)", row.source, row.date)
