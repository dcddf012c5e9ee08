"""A stand-in for the program conda, for conda-lock: it solves with rattler, because no conda can be had here."""

from __future__ import annotations

import sys
from pathlib import Path

_SHIM = '''\
#!{python}
"""What conda-lock asks of `conda create --dry-run --json`, answered by rattler."""
import asyncio, json, os, sys
from pathlib import Path

arguments = iter(sys.argv[1:])
command = next(arguments)
if command == "--version":
    sys.exit(print("conda 24.1.0"))
if command != "create":
    sys.exit(json.dumps({{"error": "only create"}}))
channels, specs, platform = [], [], os.environ["CONDA_SUBDIR"]
for argument in arguments:
    if argument in ("--channel", "-c"):
        channels.append(next(arguments))
    elif argument in ("--prefix", "-p"):
        next(arguments)
    elif not argument.startswith("-"):
        specs.append(argument)
import rattler

async def run():
    gateway = rattler.Gateway(cache_dir=os.environ["SHIM_CACHE"])
    return await rattler.solve(channels, specs, gateway, platforms=[platform, "noarch"],
                               channel_priority=rattler.ChannelPriority.Disabled)

try:
    records = [r for r in asyncio.run(run()) if not r.name.normalized.startswith("__")]
except Exception as error:
    print(json.dumps({{"message": str(error)}}))
    sys.stdout.flush()
    os._exit(1)
rows = [{{"name": r.name.normalized, "version": str(r.version), "build": str(r.build),
         "channel": r.url.rsplit("/", 1)[0], "url": r.url, "fn": r.file_name, "md5": r.md5.hex(),
         "sha256": r.sha256.hex(), "depends": list(r.depends), "constrains": [],
         "subdir": str(r.subdir), "timestamp": 0}} for r in records]
links = [{{"name": r["name"], "version": r["version"], "dist_name": r["fn"].removesuffix(".conda"),
          "base_url": r["channel"].rsplit("/", 1)[0], "channel": r["channel"], "platform": r["subdir"],
          "build_string": r["build"], "build_number": 0}} for r in rows]
print(json.dumps({{"actions": {{"FETCH": rows, "LINK": links}}}}))
sys.stdout.flush()
os._exit(0)
'''


def conda_shim(folder: Path) -> dict[str, str]:
    """Write the program to `folder`, and return the variables with which envbuild and conda-lock use it."""
    path = folder / "conda"
    path.write_text(_SHIM.format(python=sys.executable))
    path.chmod(0o755)
    return {"ENVBUILD_CONDA": str(path), "SHIM_CACHE": str(folder / "shim")}
