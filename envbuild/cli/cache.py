"""`envbuild cache`: the results of builds that a team shares in a registry."""

from __future__ import annotations

from typing import Any

import click

from envbuild.base.errors import BuildError, UsageError
from envbuild.base.progress import log
from envbuild.base.text import human_size
from envbuild.cli import complete, layout
from envbuild.cli.common import open_recipe, open_target, run_environment, show
from envbuild.cli.options import with_options
from envbuild.environment import Environment
from envbuild.store.remote import RemoteCache, cache_of, counted, pull_recipe, push_recipe


@click.group("cache")
def cache_command() -> None:
    """Share the results of builds in a registry: layers, segments, source-built layers and wheels.

    The key cache in the site file, or ENVBUILD_CACHE=oci://REGISTRY/NAME, names the repository. Builds then fetch what
    others made, by the digest of its inputs. With cache_mode (ENVBUILD_CACHE_MODE) write or readwrite they upload what
    they made. A cache that does not answer, and an entry that is wrong, never make a build fail.

    \b
    Examples:
      ENVBUILD_CACHE=oci://registry.example.org/team/cache envbuild cache status
      ENVBUILD_CACHE_MODE=readwrite envbuild cache warm pt_cpu
    """


@cache_command.command("status")
@with_options("json")
def status_command(as_json: bool) -> None:
    """Show the cache: its repository, mode and signers, and what it has by kind.

    \b
    Examples:
      envbuild cache status
      envbuild cache status --json
    """
    environment, remote = _opened()
    url, mode = cache_of(environment.site, environment.variables)
    kinds = dict(counted(remote.registry.tags()))
    value: dict[str, Any] = {
        "cache": url,
        "mode": mode,
        "signers": list(environment.site.trust.cache_signers),
        "signs": remote.signer is not None,
        "entries": kinds,
    }
    signers = ", ".join(value["signers"]) or "none: whoever may write to the registry is trusted"
    rows = [["cache", url], ["mode", mode], ["signers", signers]]
    rows += [[kind, str(count)] for kind, count in kinds.items()]
    show(as_json, value, *layout.columns(rows))


@cache_command.command("push")
@click.argument("recipes", metavar="RECIPE…", nargs=-1, required=True, shell_complete=complete.recipes)
@with_options("json")
def push_command(recipes: tuple[str, ...], as_json: bool) -> None:
    """Upload what builds of each RECIPE in this store have used.

    Builds in the mode write or readwrite do this for what they make; this is for a store that was filled before.

    \b
    Examples:
      envbuild cache push pt_cpu pt_cu126
    """
    from envbuild.layers.source_build import pack_built

    _, remote = _opened(writes=True)
    rows = []
    for recipe in recipes:
        count, sent = push_recipe(remote, recipe, pack_built, lambda one: log(f"  {one.tag}"))
        if not count:
            raise UsageError(f"the store has nothing of {recipe}", f"build it, or: envbuild cache warm {recipe}")
        rows.append({"recipe": recipe, "entries": count, "uploaded_bytes": sent})
        log(f"{recipe}: {count} entries, {human_size(sent)} uploaded")
    show(as_json, {"recipes": rows})


@cache_command.command("pull")
@click.argument("recipes", metavar="RECIPE…", nargs=-1, required=True, shell_complete=complete.recipes)
@with_options("json")
def pull_command(recipes: tuple[str, ...], as_json: bool) -> None:
    """Fetch what `cache push` or `cache warm` uploaded of each RECIPE, for later work without a network.

    \b
    Examples:
      envbuild cache pull pt_cpu
    """
    _, remote = _opened(reads=True)
    rows = []
    for recipe in recipes:
        count, failed = pull_recipe(remote, recipe)
        if failed:
            raise BuildError(f"{recipe}: {failed} of {count} entries could not be fetched", "run it again")
        rows.append({"recipe": recipe, "entries": count})
        log(f"{recipe}: {count} entries are here")
    show(as_json, {"recipes": rows})


@cache_command.command("warm")
@click.argument("recipes", metavar="RECIPE…", nargs=-1, required=True, shell_complete=complete.recipes)
@with_options("target", "locked", "json")
def warm_command(recipes: tuple[str, ...], target: str | None, locked: bool, as_json: bool) -> None:
    """Fetch or make every layer of the images of each RECIPE, and upload those that the cache lacks.

    Nothing is put together or verified: builds of images, .sqsh and .sif do that, with these layers.

    \b
    Examples:
      envbuild cache warm pt_cpu --target cpu-x86_64
    """
    from envbuild.artifacts.image import fill
    from envbuild.image.squashfs.model import codec_of
    from envbuild.kinds.image import image_layers, prepare_image
    from envbuild.layers.layer_cache import TarCache
    from envbuild.layers.segment_cache import segment_cache
    from envbuild.layers.source_build import pack_built
    from envbuild.store.usage import remember

    environment, remote = _opened(writes=True)
    limits, store = environment.site.limits, environment.store
    segments = segment_cache(environment, codec_of("zstd"))
    rows = []
    for name in recipes:
        loaded = open_recipe(name, environment)
        wanted = open_target(loaded, target, environment)
        image = prepare_image(
            loaded, wanted, environment, bytecode=True, locked=locked, offline=False, log=log, write=True
        )
        layers = image_layers(image, environment, offline=False)
        made = fill(image, layers, environment, TarCache(store, log, limits), offline=False)
        fill(image, layers, environment, segments, offline=False, with_manifest=False)
        rows.append({"recipe": loaded.recipe.name, "target": wanted.name, "layers": len(made.layers)})
        remember(store, loaded.recipe.name)
        remote.flush()
        push_recipe(remote, loaded.recipe.name, pack_built, lambda _: None)
    show(as_json, {"recipes": rows})


def _opened(*, reads: bool = False, writes: bool = False) -> tuple[Environment, RemoteCache]:
    environment = run_environment()
    remote = environment.store.remote
    if not isinstance(remote, RemoteCache):
        raise UsageError(
            "no cache is named", "set `cache` in site.toml, or ENVBUILD_CACHE=oci://registry.example.org/team/cache"
        )
    if (writes and not remote.writes) or (reads and not remote.reads):
        wanted = "readwrite" if writes else "read"
        raise UsageError("the cache's mode does not allow this", f"set ENVBUILD_CACHE_MODE={wanted}, or `cache_mode`")
    return environment, remote
