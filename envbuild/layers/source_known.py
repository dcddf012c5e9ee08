"""Source layers of a recipe: its [layers] with the sources of data/sources.toml, and its packages built from source."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from envbuild.base.errors import RecipeError
from envbuild.base.toml import Keys, nearest
from envbuild.data import load_table
from envbuild.fabrics import load_fabrics
from envbuild.interpreter import minor_of
from envbuild.layers.source_job import PLACE
from envbuild.lock.built import build_variables
from envbuild.lock.conda import CondaLock
from envbuild.lock.format import Lock
from envbuild.recipe.checks import references
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.model import BuildTable, LayerTable, layer_kind
from envbuild.recipe.sources import HostLayer, LockedPackage, Patch, SourceLayer
from envbuild.recipe.targets import CUDA, Target

_NEGATED = re.compile("^--(without|disable)-")
_NEGATED_VARIABLE = re.compile("^((?:[A-Z0-9]+_)+)WITHOUT_")
_POSITIVE = {"--without-": "--with-", "--disable-": "--enable-"}
_OWN_PLACES = frozenset({"prefix", "install"})


@dataclass(frozen=True, slots=True)
class Known:
    """A known source; data/sources.toml explains each field."""

    url: str = ""
    system: str = "autotools"
    default: str = ""
    configure: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    tools: tuple[str, ...] = ("make",)
    packages: tuple[str, ...] = ()
    licences: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def source_layers(loaded: LoadedRecipe, target: Target) -> tuple[tuple[SourceLayer, ...], tuple[HostLayer, ...]]:
    """Return the source layers of `target` in topological order, and its host layers. Raises RecipeError."""
    tables = {name: table for name, table in loaded.recipe.layers.items() if table.for_target(target.name)}
    kinds = {name: layer_kind(name, table) for name, table in tables.items()}
    layer_tables = {name: table for name, table in tables.items() if kinds[name] == "source"}
    known = {name: _known(name, loaded.recipe.fabric, target) for name in layer_tables}
    # A required layer with a default version is added; it may require others.
    waiting = list(layer_tables)
    while waiting:
        name = waiting.pop()
        for required in _requires(known[name], layer_tables[name]):
            if required in tables or required in layer_tables:
                continue
            extra = _known(required, loaded.recipe.fabric, target)
            if not extra.default:
                raise RecipeError(
                    f"{_where(loaded, name)}: {name} needs the layer {required!r}, which {target} does not have",
                    f'add [layers.{required}] with a version, or kind = "host" and the path where the nodes have it',
                )
            layer_tables[required], known[required] = LayerTable(version=extra.default), extra
            waiting.append(required)
    order = _sorted({name: _requires(known[name], layer_tables[name]) for name in layer_tables}, loaded)
    layers = tuple(_layer(loaded, target, name, layer_tables[name], known[name], kinds) for name in order)
    hosts = tuple(HostLayer(name, table.version, table.path) for name, table in tables.items() if kinds[name] == "host")
    return layers, hosts


def _layer(
    loaded: LoadedRecipe, target: Target, name: str, table: LayerTable, known: Known, kinds: Mapping[str, str]
) -> SourceLayer:
    where = _where(loaded, name)
    sha256 = table.sha256 or known.versions.get(table.version, "")
    series = minor_of(table.version)
    url = table.url or known.url.replace("{version}", table.version).replace("{series}", series)
    if not url:
        known_names = ", ".join(sorted(load_table("sources")["sources"]))
        raise RecipeError(
            f"{where}: the source of {name} is not known; known are {known_names}",
            f"give `url` and `sha256` in [layers.{name}]",
        )
    if not sha256:
        versions = list(known.versions)
        known_ones = f"its sha256 is not known here; known versions: {', '.join(versions)}"
        about = known_ones if versions else "`sha256` is missing"
        fetched = url if url.startswith(("http", "file:")) else "the archive"
        raise RecipeError(
            f"{where}: {name} {table.version}: {about}{nearest(table.version, versions)}",
            f"give its archive's sha256 in [layers.{name}], from its project or from `curl -L {fetched} | sha256sum`",
        )
    requires = tuple(required for required in _requires(known, table) if kinds.get(required) != "wheel")
    configure = (*_others(known.configure, table.configure), *table.configure)
    system = known.system if table.system == "default" else table.system
    places = {place for option in configure for place in PLACE.findall(option)}
    for place in sorted(places - _OWN_PLACES - {"cuda"} - set(requires)):
        raise RecipeError(
            f"{where}: an option of {name} names {{{place}}}, which is not a layer that it requires",
            f"add {place!r} to its `requires`, or write the folder's path",
        )
    build = load_table("sources")["build"]
    return SourceLayer(
        name,
        table.version,
        target.name,
        system,
        url,
        sha256,
        configure,
        patches=patches_of(loaded, ("layers", name), table.patches),
        requires=requires,
        wheels=_cuda(where, name, target) if "cuda" in places else (),
        tools=known.tools,
        packages=tuple(dict.fromkeys([*compilers(), *known.packages])),
        licences=known.licences,
        check=known.check,
        build=_wheels(build["any"] | build[target.arch]) if system == "wheel" else (),
    )


def compilers() -> tuple[str, ...]:
    """Return the Debian packages that every build in a builder image needs."""
    return tuple(load_table("sources")["debian"]["packages"])


def front_end() -> tuple[LockedPackage, ...]:
    """Return the wheel of pip, which builds Python projects."""
    return _wheels({"pip": load_table("sources")["build"]["any"]["pip"]})


def _key(option: str) -> str:
    """Return the key by which options replace each other: --with-x for both --with-x and --without-x."""
    name = _NEGATED.sub(lambda match: _POSITIVE[match[0]], option.partition("=")[0])
    # HOROVOD_WITHOUT_MPI=1 has the subject HOROVOD_WITH_MPI.
    return _NEGATED_VARIABLE.sub(r"\1WITH_", name)


def _others(options: Sequence[str], replaced: Sequence[str]) -> list[str]:
    """Return the `options` that have no key in common with `replaced`."""
    subjects = {_key(option) for option in replaced}
    return [option for option in options if _key(option) not in subjects]


def _known(name: str, fabric: str, target: Target) -> Known:
    """Return the known source `name` with additions for this fabric and target; unknown sources have default values."""
    table = load_table("sources")["sources"].get(name)
    if table is None:
        return Known()
    lists = {key: list(table.get(key, ())) for key in ("configure", "requires", "tools", "packages")}
    family = target.family.name
    for extra in table.get("when", ()):
        if family in extra.get("accelerator", [family]) and extra.get("arch", target.arch) == target.arch:
            lists["configure"] = _others(lists["configure"], extra.get("configure", ()))
            for key, values in lists.items():
                values += extra.get(key, ())
    for row in load_fabrics()[fabric].options_of(name, family):
        # In place of the option with the same subject, or at the end.
        lists["configure"] = list({_key(option): option for option in (*lists["configure"], *row.configure)}.values())
        lists["packages"] += row.packages
    return Known(
        table["url"],
        table["system"],
        table.get("default", ""),
        versions=table["versions"],
        licences=tuple(table.get("licences", ())),
        check=tuple(table.get("check", ())),
        **{key: tuple(dict.fromkeys(values)) for key, values in lists.items()},
    )


def _requires(known: Known, table: LayerTable) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*known.requires, *table.requires]))


def patches_of(loaded: LoadedRecipe, keys: Keys, patches: Sequence[str]) -> tuple[Patch, ...]:
    """Return the `patches` of the recipe's table at `keys`. Raises RecipeError for an unreadable one."""
    patches_found = []
    for number, patch in enumerate(patches):
        path = loaded.folder / patch
        try:
            patches_found.append(Patch(str(path), hashlib.sha256(path.read_bytes()).hexdigest()))
        except OSError as error:
            raise RecipeError(
                f"{loaded.where(*keys, 'patches', number)}: the patch {path} cannot be read: {error.strerror}",
                "patches lie below the recipe's folder",
            ) from error
    return tuple(patches_found)


def _cuda(where: str, name: str, target: Target) -> tuple[LockedPackage, ...]:
    """Return the wheels with the headers of the target's CUDA."""
    version = target.version if target.family is CUDA else None
    known = load_table("sources")["cuda"]
    rows = known.get(version, {}).get(target.arch)
    if rows is not None:
        return _wheels(rows)
    if version is None:
        why = f"the target {target} has no CUDA"
        hint = f"leave the layer out there (`targets = [...]` in [layers.{name}])"
    else:
        why = f"headers of CUDA {version} are not known here"
        hint = f"choose one of {', '.join(known)}, or give a toolkit's folder in the layer's own `configure`"
    raise RecipeError(f"{where}: {name} is built with CUDA's headers, and {why}", hint)


def _wheels(rows: Mapping[str, Sequence[str]]) -> tuple[LockedPackage, ...]:
    return tuple(LockedPackage(name, version, tuple(hashes)) for name, (version, *hashes) in rows.items())


def _sorted(graph: Mapping[str, Sequence[str]], loaded: LoadedRecipe) -> list[str]:
    """Return the names of `graph` in topological order (requirements first), otherwise sorted by name."""
    done: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            circle = " → ".join((*path[path.index(name) :], name))
            raise RecipeError(
                f"{_where(loaded, name)}: layers require each other: {circle}", "remove one of these from `requires`"
            )
        if name not in done and name in graph:
            for required in sorted(graph[name]):
                visit(required, (*path, name))
            done.append(name)

    for name in sorted(graph):
        visit(name, ())
    return done


def _where(loaded: LoadedRecipe, name: str) -> str:
    """Return `FILE:LINE:COL` of the layer, or the recipe's path for a layer that another layer requires."""
    return loaded.where("layers", name) if name in loaded.recipe.layers else str(loaded.path)


def expected_layers(loaded: LoadedRecipe, target: Target) -> tuple[SourceLayer, ...]:
    """Return the layers of the packages that `target` may build from source, without data that only a lock has."""
    requirements = (*loaded.requirements(target, conda=False), *loaded.requirements(target, conda=True))
    builds = loaded.builds(target, requirements)
    return tuple(_built_layer(name, target, table) for name, table in sorted(builds.items()))


def built_layers(loaded: LoadedRecipe, target: Target, lock: Lock | CondaLock) -> tuple[SourceLayer, ...]:
    """Return a layer for each source-built package of `lock`. Raises RecipeError for an unreadable patch."""
    conda = isinstance(lock, CondaLock)
    direct = references(loaded.requirements(target, conda))
    layers = []
    for package in (lock.pip if isinstance(lock, CondaLock) else lock).built:
        table, reference = loaded.build_table(package.name), direct.get(package.name)
        variables = build_variables(table, package.version, git=bool(package.commit))
        wheels = {pip.name: pip for pip in front_end()}
        wheels |= {wheel.name: wheel for wheel in package.build}
        layers.append(
            replace(
                _built_layer(package.name, target, table),
                version=package.version,
                url=reference.source(loaded.folder, package.commit) if reference else f"index:{package.name}",
                sha256=package.sha256,
                configure=tuple(f"{name}={value}" for name, value in variables.items()),
                patches=patches_of(loaded, ("build", package.name), table.patches),
                build=tuple(wheels.values()),
                indexes=loaded.recipe.targets[target.name].indexes,
            )
        )
    return tuple(layers)


def _built_layer(name: str, target: Target, table: BuildTable) -> SourceLayer:
    return SourceLayer(
        name,
        "",
        target.name,
        "wheel",
        "",
        "",
        packages=(*compilers(), *table.packages),
        isolated=table.isolation,
        locked=True,
    )
