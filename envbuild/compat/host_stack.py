"""The nodes' own network libraries and an artifact's: whether one process can load what meets. Pure.

The artifact's libraries are looked up by functions, the nodes' in an inventory (base/libraries.py), so that a stack is
judged on any host.
"""

from __future__ import annotations

import functools
import json
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envbuild.base.elf import Elf
from envbuild.base.errors import UsageError
from envbuild.base.libraries import FABRIC, FORMAT, MPI, Find, LoadFault, Process, Processor
from envbuild.compat.rows import LOOK_IT_UP, CompatFinding, finding, load_rows, row_of
from envbuild.site.jobs import HostStackTable

_DRIVER = "libcuda.so.1"
_OF_DRIVER = re.compile("lib(?:cuda|nvidia)")
_PLUGIN = re.compile(r"/lib(?:nccl|rccl)-net[\w-]*\.so\Z")
_ANY_MPI = re.compile(r"libmpi[\w.-]*\.so\.\d+")
# Libraries of an MPI itself: programs in C++ and Fortran load them, or the MPI does, which goes on without them.
_PART_OF_MPI = re.compile(r"/(?:libmpi|libmca_|mca_|liboshmem)[^/]*\Z")
_TORCH = re.compile(r"/site-packages/torch/lib/libtorch_(?:cuda|hip|python)\.so\Z")
_API = re.compile(r"ncclNet(?:Plugin)?_v(\d+)")
# Where an artifact says the version of its NCCL: the file of a source layer, a wheel, a conda package.
_NCCL = re.compile(
    r"/libnccl\.so\.(\d+\.\d+\.\d+)\Z|/nvidia_nccl_cu\d+-([\d.]+)\.dist-info/|/conda-meta/nccl-([\d.]+)-"
)
_VERSION = re.compile(r"(.+)_([0-9]+(?:\.[0-9]+)*)")


@dataclass(frozen=True)
class HostInventory:
    """The inventory of a node: its libraries by their real paths, `links` to them, and the loader's `folders`."""

    libraries: Mapping[str, Elf]
    links: Mapping[str, str] = field(default_factory=dict)
    folders: Sequence[str] = ()
    processor: Processor = field(default_factory=Processor)

    def find(self, path: str) -> Elf | None:
        """Return the library at `path`, None for any other path."""
        return self.libraries.get(self.links.get(path, path))


def parse_inventory(text: str, where: str) -> HostInventory:
    """Return the inventory in `text`. Raises UsageError for any other text, with `where`, its file."""
    try:
        value: dict[str, Any] = json.loads(text)
        if value["format"] != FORMAT:
            raise ValueError
        libraries = {path: Elf(**row) for path, row in value["libraries"].items()}
        processor = Processor(**value.get("processor", {}))
        return HostInventory(libraries, dict(value["links"]), list(value["folders"]), processor)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{where} is no inventory of a node's libraries", "write it again on a node") from error


@dataclass(frozen=True)
class ArtifactLibraries:
    """The files of an artifact whose environment is in the folder `root`.

    `find` returns the library at a path, `paths` are the files below `root`. With `isolated`, as in images, all paths
    are the artifact's and those that a job mounts; else what is outside of `root`, and of `base`, the folder of the
    Python of a venv, is the nodes'. `library_path` is LD_LIBRARY_PATH of the artifact itself, `folders` are those in
    which its loader searches at last.
    """

    root: str
    machine: int
    find: Find
    paths: Collection[str]
    isolated: bool
    program: str = ""
    base: str = ""
    library_path: Sequence[str] = ()
    folders: Sequence[str] = ()


def judge_stack(table: HostStackTable, host: HostInventory, artifact: ArtifactLibraries) -> list[CompatFinding]:
    """Return a finding for each part of the stack that ranks of `artifact` would load with the mode of `table`."""
    seen = _Meeting(table, host, artifact)
    findings = [*seen.start(), *seen.plugin(), *seen.fabric(), *seen.mpi(), *seen.driver()]
    once = {row.text: row for row in reversed(findings)}  # the part that has a fault, not all that load it
    return [row for row in findings if once[row.text] is row] or [
        finding("note", "stack", "neither the nodes nor the artifact have libraries of this kind")
    ]


class _Meeting:
    """The libraries of both sides, as a rank finds them."""

    def __init__(self, table: HostStackTable, host: HostInventory, artifact: ArtifactLibraries) -> None:
        self.table, self.host, self.artifact, self.paths = table, host, artifact, sorted(artifact.paths)
        self.folders = [*(artifact.folders if artifact.isolated else host.folders), *filter(None, [table.driver])]
        self.own_folders = table.library_path(isolated=artifact.isolated)
        plugins = (path for path in self.paths if _PLUGIN.search(path) and artifact.find(path))
        self.find = functools.cache(self._found)
        self.plugin_path = (table.injected and table.nccl_plugin) or next(plugins, "")

    def of_host(self, path: str) -> bool:
        """Return whether a rank finds the node's file at `path`; runtimes mount single files of the driver."""
        if not self.artifact.isolated:
            tops = filter(None, (self.artifact.root, self.artifact.base))
            return not path.startswith(tuple(f"{top}/" for top in tops))
        folder, name = posixpath.split(path)
        of_driver = folder == self.table.driver and _OF_DRIVER.match(name)
        return bool(of_driver) or any(f"{path}/".startswith(f"{place}/") for place in self.table.injected)

    def _found(self, path: str) -> Elf | None:
        if not self.of_host(path):
            return self.artifact.find(path)
        return None if self._led_out(path) else self.host.find(path)

    def _led_out(self, path: str) -> str:
        """Return the node's file to which the link at `path` leads out of what a job mounts, else ""."""
        links, mounted = self.host.links, self.table.injected
        folders = tuple(f"{folder}/" for place in mounted for folder in (place, links.get(place, place)))
        target = links.get(path, path)
        of_folder = self.artifact.isolated and path.startswith(folders) and path not in mounted
        return target if of_folder and not target.startswith(folders) else ""

    def start(self) -> Iterator[CompatFinding]:
        for mapped in self._rank.mapped:
            if mapped.elf.fault and self.of_host(mapped.path):
                yield finding("bad", "Python", *self._told(LoadFault(mapped.path, "refused", mapped.elf.fault)))
                return
            for fault in self._rank.absent_versions(mapped):
                if self.of_host(fault.path) or self.of_host(fault.of):
                    yield finding("bad", "Python", *self._told(fault))
                    return

    def plugin(self) -> Iterator[CompatFinding]:
        if path := self.plugin_path:
            yield self._loaded("plugin", path, FABRIC)
            library = self.find(path)
            yield from [self._api(path, library)] if library else []

    def _api(self, path: str, library: Elf) -> CompatFinding:
        """Return whether NCCL and the plugin at `path` have a net API in common."""
        apis = {int(match[1]) for match in map(_API.match, library.given) if match}
        versions = (version for match in map(_NCCL.search, self.paths) if match for version in match.groups())
        version = next(filter(None, versions), "")
        row = row_of(load_rows().nccl, version) if version else None
        has = f"{posixpath.basename(path)} has net API {', '.join(f'v{api}' for api in sorted(apis)) or 'none'}"
        if row is None:
            return finding("unknown", "plugin", f"{has}; what the artifact's NCCL takes is not known", LOOK_IT_UP)
        if both := apis & {*row.apis}:
            return finding("good", "plugin", f"{has}, NCCL {version} takes v{max(both)}", by=row)
        text = f"{has}, and NCCL {version} takes v{min(row.apis)} to v{max(row.apis)}: it falls back to sockets"
        return finding("bad", "plugin", text, "take a plugin for this NCCL, or another NCCL", by=row)

    def fabric(self) -> Iterator[CompatFinding]:
        if (self.table.injected and self.table.libfabric) or self._rank.fork().open(FABRIC):
            yield self._loaded("libfabric", FABRIC, FABRIC)

    def mpi(self) -> Iterator[CompatFinding]:
        own = (path for path in self.paths if ".so" in posixpath.basename(path) and not _PART_OF_MPI.search(path))
        named = ((path, self.artifact.find(path)) for path in own)
        users = (
            (path, name) for path, library in named if library for name in filter(_ANY_MPI.fullmatch, library.needed)
        )
        modules: dict[str, CompatFinding] = {}
        for path, name in dict(users).items():
            # MPI.mpich.cpython-311.so and MPI.openmpi.cpython-311.so are one module: mpi4py loads the one that can be.
            module = posixpath.join(posixpath.dirname(path), posixpath.basename(path).partition(".")[0])
            if module not in modules or modules[module].status == "bad":
                modules[module] = self._loaded("MPI", path, name)
        yield from sorted(modules.values(), key=lambda row: row.status != "bad")[:1]
        if self.table.injected:  # the preflight loads it, too
            places = map(posixpath.split, sorted({*self.host.libraries, *self.host.links}))
            names = [name for folder, name in places if folder == self.table.mpi and MPI.fullmatch(name)]
            rows = [self._loaded("MPI", name, name, after=self.plugin_path) for name in names]
            yield from (row for row in rows if row.status == "bad" or not modules)

    def driver(self) -> Iterator[CompatFinding]:
        if self.table.driver and not self.host.libraries:
            yield finding("unknown", "driver", "there is no inventory of the nodes' libraries", "write it on a node")
        elif self.table.driver:
            yield self._loaded("driver", _DRIVER, _DRIVER)

    @functools.cached_property
    def _rank(self) -> Process:
        """The process of a rank that has loaded torch; what it loads next is loaded in a fork."""
        artifact, path = self.artifact, [*self.own_folders, *self.artifact.library_path]
        process = Process(self.find, artifact.machine, path, self.folders, artifact.program, self.host.processor)
        for library in filter(_TORCH.search, self.paths):
            process.open(library)
        return process

    def _loaded(self, subject: str, name: str, wanted: str, after: str = "") -> CompatFinding:
        """Return the finding about `name`, loaded by a rank `after` another, and the library `wanted` that it needs."""
        process = self._rank.fork()
        if after:
            process.open(after)
        if fault := process.load(name):
            return finding("bad", subject, *self._told(fault))
        path, title = process.loaded(wanted), self._shown(name) if "/" in name else name
        if not path:
            return finding("note", subject, f"{title} can be loaded; it does not load {wanted}")
        text = f"{title} {'is' if name == wanted else f'loads {wanted}:'} {self._shown(path)}"
        theirs = [folder for folder in self.own_folders if self.host.find(f"{folder}/{wanted}")]
        if theirs and not self.of_host(path):
            text += f", not that in the nodes' {theirs[0]}"
            fix = f'leave {wanted} out of the artifact, or set mode = "image" in [host_stack]'
            return finding("bad", subject, text, fix)
        return finding("good", subject, text)

    def _shown(self, path: str) -> str:
        """Return a path and whose it is."""
        if self.of_host(path):
            return f"the nodes' {path}"
        inside = path.startswith(f"{self.artifact.root}/")
        return f"the artifact's {posixpath.relpath(path, self.artifact.root) if inside else path}"

    def _told(self, fault: LoadFault) -> tuple[str, str]:
        """Return what does not fit, and the change that would make it fit."""
        mode = "image" if self.table.injected else "inject"
        other = f'set mode = "{mode}" in [host_stack]'
        if fault.kind == "absent":
            text = f"{self._shown(fault.path)} needs {fault.name}" if fault.path else f"there is no {fault.name}"
            text += ", which no searched folder has for this processor" if fault.path else " in the searched folders"
            known = [p for p in (*self.host.libraries, *self.host.links) if posixpath.basename(p) == fault.name]
            known = [posixpath.dirname(self._led_out(p)) or p for p in known if self.host.find(p)]
            if known and self.artifact.isolated and self.table.injected:
                return text, f'add "{known[0]}" to [host_stack] more'
            if fault.path and self.of_host(fault.path):
                return text, f"add the folder of {fault.name} on the nodes to [host_stack] more; or {other}"
            return text, f"add a package with {fault.name} to the recipe; or {other}"
        if fault.kind == "refused":
            text = f"{self._shown(fault.path)} cannot be loaded: {fault.name}"
            return text, f"replace {posixpath.basename(fault.path)} by a library for Linux and this glibc; or {other}"
        if fault.kind == "symbol":
            text = f"{self._shown(fault.path)} calls {fault.name}, which no library that it loads defines"
            return text, f"take builds of one release; or {other}"
        of, (user, name) = self.find(fault.of), map(posixpath.basename, (fault.path, fault.of))
        has = _newest(of, fault.name.rpartition("_")[0]) if of else ""
        text = f"{self._shown(fault.path)} needs {fault.name}, and {self._shown(fault.of)} has "
        text += f"{has} at most" if has else "no such version"
        if self.of_host(fault.of) and self.of_host(fault.path):
            return text, f"name libraries of one release in [host_stack]; or {other}"
        if self.of_host(fault.of):
            return text, f"build {user} against the nodes' {name} or an older one; or {other}"
        if self.of_host(fault.path):
            return text, f"take an artifact with a newer {name}, such as one on a newer base; or {other}"
        return text, f"take builds of one release; or {other}"


def _newest(library: Elf, family: str) -> str:
    """Return the newest version of `family`, such as GLIBC, that `library` defines; "" for none."""
    matches = [match for match in map(_VERSION.fullmatch, library.defines) if match and match[1] == family]
    return max(matches, key=lambda m: [int(part) for part in m[2].split(".")])[0] if matches else ""
