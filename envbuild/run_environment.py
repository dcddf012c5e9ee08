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

    The run is registered in the store, so that the files that it uses are not removed meanwhile. Without `offline`, the
    store has the site's cache, whose transfers end with the run.

    TMPDIR is in the system's temporary folder, because the store may be on a network file system. Its path is short,
    because programs create sockets in it, whose paths have at most 107 bytes (unix(7)). Raises HostError.
    """
    store, site = environment.store, environment.site
    store.clean_working()
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
            store=store if offline else _with_cache(environment, stack),
        )
    if site.limits.store_bytes:
        from envbuild.store.usage import limit  # most sites have no limit

        limit(store, site.limits.store_bytes)


def _with_cache(environment: Environment, stack: contextlib.ExitStack) -> Store:
    """Return the store with the team's cache, whose transfers end with `stack`; the store alone without a cache."""
    site, store, variables = environment.site, environment.store, environment.variables
    if not variables.get("ENVBUILD_CACHE", site.cache):
        return store
    from envbuild.store.remote import open_remote  # most sites have no cache

    remote = open_remote(site, environment.pip, variables, store)
    if remote is not None:
        stack.push(lambda kind, *_: remote.close(wait=kind is None))
    return replace(store, remote=remote)
