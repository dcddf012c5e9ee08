"""The network libraries that ranks load on this node, and the inventory of the node's own.

A child process loads them as a rank does; /proc/self/maps names the files that the loader took.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..libraries import FABRIC, MPI, inventory

# Variable in which a job's script passes [host_stack] of the site, as JSON.
STACK = "ENVBUILD_STACK"
# The file of the node's inventory in the run's folder.
FILE = "host_stack.json"
_LIMIT_S = 8.0
_LOAD = """
import ctypes, json, sys
faults = {}
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        faults[name] = str(error)
with open("/proc/self/maps") as lines:
    paths = sorted({line.split(None, 5)[5].strip() for line in lines if ".so" in line})
print(json.dumps([faults, paths]))
"""


def loaded_stack(environ: Mapping[str, str]) -> tuple[str, dict[str, str], str]:
    """Return why ranks do not load what the site says, or ""; the path of each library; the inventory's digest.

    Node 0 writes the inventory into the run's folder.
    """
    table: dict[str, Any] = json.loads(environ[STACK])
    places = table["places"]
    mpi = sorted(filter(MPI.fullmatch, map(os.path.basename, glob.glob(f"{table['mpi']}/*.so.*"))))
    names = [*filter(None, [table.get("plugin")]), *mpi, FABRIC]  # no rank loads libfabric before what needs it
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, *names],
        env={**environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    if done.returncode:
        return f"a process that loads {', '.join(names)} ended with {done.returncode}", {}, ""
    faults, paths = json.loads(done.stdout)
    loaded = {name: next((path for path in paths if _is(path, name)), "") for name in names if name not in faults}
    found = inventory(places, alone=table["alone"])
    text = json.dumps(found, sort_keys=True)
    if found["libraries"] and environ.get("ENVBUILD_NODE") == "0":
        with suppress(OSError), open(os.path.join(environ["ENVBUILD_RUN"], FILE), "w", encoding="utf-8") as file:
            file.write(text)
    same = json.dumps({**found, "processor": None}, sort_keys=True)  # the processors of nodes may differ
    digest = hashlib.sha256(same.encode()).hexdigest()[:16] if found["libraries"] else ""
    return _problem(table, names, faults, loaded), loaded, digest


def _problem(table: Mapping[str, Any], names: list[str], faults: Mapping[str, str], loaded: Mapping[str, str]) -> str:
    tops = [os.path.realpath(place) for place in table["places"]]
    for name in names:
        path = loaded.get(name, "")
        of_node = any(path == top or path.startswith(f"{top}/") for top in tops)
        named = any(os.path.exists(os.path.join(place, name)) or place == name for place in table["places"])
        if name in faults and ((named and table["mode"] == "inject") or name == table.get("plugin")):
            return f"cannot load {name}: {faults[name]}"
        if table["mode"] == "inject" and named and not of_node:
            return f"loads {name} from {path}, not from the folders of the site"
        if table["mode"] == "image" and of_node:
            return f"loads the node's {path}, and not the artifact's"
    if missing := [place for place in table["places"] if table["mode"] == "inject" and not os.path.exists(place)]:
        return f"has no {missing[0]}"
    return ""


def _is(path: str, name: str) -> bool:
    """Return whether the mapped file at `path` is the library `name`, a path or a name, of any minor version."""
    if "/" in name:
        return path == os.path.realpath(name)
    stem = name.partition(".so")[0]
    return os.path.basename(path).partition(".so")[0] == stem
