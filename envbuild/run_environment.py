"""The environment of a run of envbuild: loaded from this process and the site, with a TMPDIR and the team's cache."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from envbuild.base.errors import BuildError, HostError
from envbuild.environment import Environment
from envbuild.site.pip_config import load_pip_config
from envbuild.site.settings import load_site
from envbuild.store.store import Store, working_folder

# What the names of the temporary folders of runs begin with.
RUN = "envbuild-run-"


def load_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the site's settings and pip's configuration. Raises RecipeError for a faulty file."""
    known = dict(os.environ if variables is None else variables)
    site = load_site(known)
    return Environment(known, site, load_pip_config(known), Store(site.store))


@contextlib.contextmanager
def with_tmpdir(environment: Environment, *, offline: bool = True) -> Iterator[Environment]:
    """Yield `environment` with a new TMPDIR for the children of this run; remove it, and those of killed runs.

    The run is registered in the store, so that the files that it uses are not removed meanwhile. The store has the
    site's vault and cache, whose transfers end with the run; if `offline`, only a vault in a folder.

    TMPDIR is in the system's temporary folder, because the store may be on a network file system. Its path is short,
    because programs create sockets in it, whose paths have at most 107 bytes (unix(7)). Raises HostError.
    """
    store, site = environment.store, environment.site
    store.clean_stale()
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(working_folder(Path(tempfile.gettempdir()), RUN))
        except OSError as error:
            text = f"no temporary folder in {tempfile.gettempdir()}: {error.strerror}"
            raise HostError(text, "set TMPDIR to a writable folder with free disk space") from error

        def register() -> None:
            with contextlib.suppress(BuildError):  # a store that cannot be written is not pruned either
                stack.enter_context(store.working("running"))

        if store.root.exists():
            register()
        else:  # a dry run makes no store
            store.first.append(register)
            stack.callback(store.first.clear)
        yield replace(
            environment,
            variables={**environment.variables, "TMPDIR": str(folder)},
            store=_with_remotes(environment, stack, offline=offline),
        )
    if site.limits.store_bytes:
        from envbuild.store.usage import limit  # most sites have no limit

        limit(store, site.limits.store_bytes)


def _with_remotes(environment: Environment, stack: contextlib.ExitStack, *, offline: bool) -> Store:
    """Return the store with the team's cache and vault, whose transfers end with `stack`."""
    site, store, variables = environment.site, environment.store, environment.variables
    has_cache = not offline and variables.get("ENVBUILD_CACHE", site.cache)
    if not has_cache and not variables.get("ENVBUILD_VAULT", site.vault):
        return store
    from envbuild.store.remote import open_remote, open_vault  # most sites have neither

    vault = open_vault(site, environment.pip, variables, offline=offline)
    if vault is not None:
        stack.callback(vault.close)
    store = replace(store, vault=vault)
    remote = open_remote(site, environment.pip, variables, store) if has_cache else None
    if remote is not None:
        stack.push(lambda kind, *_: remote.close(wait=kind is None))
    return replace(store, remote=remote)
