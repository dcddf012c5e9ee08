"""Locked files at the sources that builds ask after the store and the vault: which have vanished or changed.

The fetchers of builds look for each file, and ask for its headers where they would download it. So each page of an
index is read once, and it states hashes. The archives of source layers and of commits are downloaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from envbuild.base.errors import BuildError, LockError
from envbuild.base.progress import OnProgress
from envbuild.cache.http import RequestFailed
from envbuild.debian.base import download_debs
from envbuild.debian.lock import DebianLock
from envbuild.debian.release import debian_client
from envbuild.environment import Environment
from envbuild.layers.source_build import fetch_source
from envbuild.lock.base import site_archives
from envbuild.lock.offers import ReleaseAges
from envbuild.plan import Plan
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target
from envbuild.store.client import Client
from envbuild.store.fetch import (
    CondaArchive,
    WantedWheel,
    WheelSources,
    download_archives,
    download_wheels,
    local_wheel,
)
from envbuild.store.sources import PackageSource, local_files
from envbuild.store.store import Store

if TYPE_CHECKING:
    from envbuild.build.bundle import LockedPlan

THERE = "there"
# The state of a file, by words in the answer of any source; and words of sources that do not have it.
_STATES = {"yanked": "is yanked", "changed": "other files:|hash mismatch|bytes, not"}
_GONE = re.compile(r"not there|HTTP 4(04|10)")
_LOCAL = ("oci:", "docker-archive:", "docker-daemon:")
# Files of one kind, each by its name and sha256, and a function that returns the answers for those that no source has.
_Group = tuple[str, dict[tuple[str, str], Any], Callable[[list[Any]], dict[Any, list[str]]]]


class _AskingClient(Client):
    """A client that asks for the headers of a file where others download it, and writes zeros in its place."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._down: dict[str, RequestFailed] = {}

    def download(
        self, url: str, partial: Path, hashes: frozenset[str], on_progress: OnProgress, size: int | None = None
    ) -> str:
        """Ask for the file at `url`, and return the hash that its page states. Raises RequestFailed."""
        if (host := urlsplit(url).netloc) in self._down:
            raise self._down[host]
        try:
            stated = self.size(url)
        except RequestFailed as error:
            if error.is_down:
                self._down[host] = error
            raise
        if None not in (size, stated) and size != stated:
            raise RequestFailed(f"it has {stated} bytes, not {size}", answered=True)
        with partial.open("wb") as stream:
            stream.truncate(size or 0)
        return next(iter(hashes))


def check_upstream(
    work: Iterable[tuple[LoadedRecipe, Sequence[LockedPlan]]], environment: Environment
) -> list[dict[str, Any]]:
    """Return a row for each locked file of the plans of recipes, with its `state`, and in `of` who needs it.

    The state is THERE if any source has the file with its hash. Else it is "yanked", "changed", "gone" or "unreached",
    and `answers` has the answers of the sources.
    """
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    with environment.temporary_folder("upstream-") as folder:
        # An empty store without a vault: files of this host do not count.
        upstream = _Upstream(replace(environment, store=Store(folder)))
        for loaded, (plan, builder) in ((loaded, plan) for loaded, plans in work for plan in plans):
            bases = [lock.base for lock in (plan.base, builder) if lock is not None]
            for kind, items, lacking in (*upstream.packages(loaded, plan), *map(upstream.base, bases)):
                new = {key: item for key, item in items.items() if (kind, *key) not in rows}
                answers = lacking(list(new.values())) if new else {}
                for (name, sha256), item in new.items():
                    texts = list(dict.fromkeys(answers.get(item, ())))
                    about = {"state": _state(texts) if item in answers else THERE, "answers": texts}
                    rows[kind, name, sha256] = {"kind": kind, "name": name, "sha256": sha256, **about, "of": []}
                for key in items:
                    of = rows[kind, *key]["of"]
                    of += {f"{plan.recipe} {plan.target}"} - set(of)
    return list(rows.values())


def _state(answers: Sequence[str]) -> str:
    for state, words in _STATES.items():
        if any(re.search(words, answer) for answer in answers):
            return state
    return "gone" if all(map(_GONE.search, answers)) else "unreached"


class _Upstream:
    """The sources of a site; the store of `environment` is empty. All plans share the pages of indexes."""

    def __init__(self, environment: Environment) -> None:
        pip, variables = environment.pip, environment.variables
        self._environment, self._pages = environment, dict[str, PackageSource]()
        self._client = _AskingClient(pip, variables)
        self._debian = _AskingClient(debian_client(pip, variables).pip, variables)

    def packages(self, loaded: LoadedRecipe, plan: Plan) -> Iterator[_Group]:
        """Yield the wheels, sources and conda packages of a plan."""
        yield self._wheels(plan.packages, plan.indexes, plan.bound)
        for layer in plan.sources:
            yield self._wheels((*layer.wheels, *layer.build), layer.indexes, {})
            key = (f"{layer.name} {layer.version}", layer.sha256)
            fetch = partial(fetch_source, environment=self._environment, offline=False)
            yield "source", {key: layer}, partial(_failing, fetch)
        archives = {(conda.stem, conda.sha256): CondaArchive(conda.url, conda.sha256) for conda in plan.conda}
        yield "conda", archives, partial(self._lacking_conda, loaded, plan)

    def base(self, base: Any) -> _Group:
        """Return the Debian packages, or the existing image, that an image begins with."""
        registry = self._environment.registry
        if isinstance(base, DebianLock):
            archives = site_archives(base.suite, base.date, self._environment)
            debs = {(str(deb), deb.sha256): deb for deb in base.packages}
            store, client = self._environment.store, self._debian
            return "debian", debs, partial(_lacking, partial(download_debs, archives, store, client))
        images = {} if base.reference.startswith(_LOCAL) else {(base.reference, base.digest[7:]): base}
        return "image", images, partial(_failing, lambda _: registry(base.reference).manifest(base.digest))

    def _wheels(self, packages: Iterable[LockedPackage], indexes: Sequence[str], bound: Any) -> _Group:
        wheels = {
            (f"{one.name} {one.version}", sha256): WantedWheel(one.name, one.version, frozenset({sha256}))
            for one, sha256 in ((package, sha256) for package in packages for sha256 in package.hashes)
        }
        return ("wheel", wheels, partial(self._lacking_wheels, WheelSources(self._environment, indexes, bound, False)))

    def _lacking_wheels(self, sources_of: WheelSources, wheels: list[WantedWheel]) -> dict[WantedWheel, list[str]]:
        store, folders = self._environment.store, local_files(self._environment.pip)
        answers: dict[WantedWheel, list[Any]] = {wheel: [] for wheel in wheels}
        sources: dict[WantedWheel, list[PackageSource]] = {}
        for wheel in wheels:
            if not local_wheel(wheel, folders, store, answers[wheel]):
                sources[wheel] = []
                with suppress(KeyError):  # an index that the site does not name
                    sources[wheel] = [self._pages.setdefault(source.url, source) for source in sources_of(wheel.name)]
        found = download_wheels(sources, answers, store, self._client)
        lacking = {wheel: list(map(str, answers[wheel])) for wheel in sources if wheel not in found}
        for wheel in found:
            links = []
            for source in sources[wheel]:
                with suppress(RequestFailed):
                    links += [link for link in source.links(wheel.name, self._client) if link.sha256 in wheel.hashes]
            if links and all(link.yanked for link in links):
                lacking[wheel] = [f"{links[0].filename} is yanked"]
        return lacking

    def _lacking_conda(
        self, loaded: LoadedRecipe, plan: Plan, archives: list[CondaArchive]
    ) -> dict[CondaArchive, list[str]]:
        from envbuild.lock.conda_solve import solve

        try:
            asked = loaded, Target.parse(plan.target), self._environment
            ages, keep = ReleaseAges(), plan.conda
            packages = solve(*asked, ages=ages, keep=keep, offline=False, log=lambda _: None, specs=())
        except LockError as error:
            return {archive: [error.message] for archive in archives}
        known = {package.sha256 for package in packages}
        listed = [item for item in archives if item.sha256 in known]
        unlisted = {item: ["not there: no channel lists it with this hash"] for item in {*archives} - {*listed}}
        return unlisted | _lacking(partial(download_archives, self._environment, self._client, False), listed)


def _lacking(download: Callable[[list[Any], Any], Mapping[Any, Path]], items: list[Any]) -> dict[Any, list[str]]:
    answers: dict[Any, list[Any]] = {item: [] for item in items}
    found = download(items, answers)
    return {item: list(map(str, texts)) for item, texts in answers.items() if item not in found}


def _failing(ask: Callable[[Any], object], items: list[Any]) -> dict[Any, list[str]]:
    lacking = {}
    for item in items:
        try:
            ask(item)
        except BuildError as error:
            lacking[item] = [error.message.splitlines()[-1].strip()]
    return lacking
