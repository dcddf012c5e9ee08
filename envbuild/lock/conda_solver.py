"""Separate process that solves one conda environment: `python -P conda_solver.py REQUEST`.

rattler's network threads outlive a failed request and can crash the interpreter at exit; a process of its own also gets
the site's certificates and proxies in its environment. REQUEST is a private JSON file of `conda_solve.solve`;
the answer is a line of JSON: {"records": …} or {"fault": KIND, …}. This module imports nothing from envbuild.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_CONNECT_S = 15.0
_RETRIES = 2
_INDEX = ".shards-cache-v1"


class SolveFailed(Exception):
    """Failure of a solve; its argument is the JSON answer, with the kind of failure as `fault`."""


async def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Solve `request`; return the package records and the URLs that served the channels. Raises SolveFailed.

    Without specs, nothing is solved: the records of the packages to keep are returned.
    """
    from rattler import GenericVirtualPackage, MatchSpec, PackageName, Version, solve
    from rattler.channel import ChannelPriority
    from rattler.exceptions import InvalidMatchSpecError, SolverError
    from rattler.package import BuildString

    specs = []
    for index, text in enumerate(request["specs"]):
        try:
            specs.append(MatchSpec(text))  # not strict: conda takes numpy=2.2.6=py312_0 and =1.5.*, too
        except InvalidMatchSpecError as error:
            raise SolveFailed({"fault": "spec", "index": index, "text": str(error)}) from None
    gateway, channels, used = await _open(request)
    platforms = [request["platform"], "noarch"]
    kept = await _kept(gateway, channels, platforms, request["keep"])
    newest = request["newest"]
    if not specs:
        if too_new := [_too_new(record) for record in kept if _left_out(record, newest)]:
            raise SolveFailed({"fault": "too new", "packages": too_new})
        return {"records": [_row(record) for record in kept], "used": used}
    try:
        records = await solve(
            channels,
            specs,
            gateway,
            platforms=platforms,
            locked_packages=[record for record in kept if not _left_out(record, newest)],
            virtual_packages=[
                GenericVirtualPackage(PackageName(name), Version(version), BuildString(build))
                for name, version, build in request["virtual"]
            ],
            channel_priority=ChannelPriority.Strict,
            # Records from exactly this time on would be left out of wheels, too.
            exclude_newer=None if newest is None else datetime.fromtimestamp(newest - 0.001, UTC),
            channel_relations="disabled",
        )
    except SolverError as error:
        too_new = [] if newest is None else await _too_new_specs(gateway, channels, platforms, specs, newest)
        raise SolveFailed({"fault": "unsatisfiable", "text": str(error), "too_new": too_new}) from None
    untimed = [] if newest is None else await _untimed(gateway, channels, platforms, records)
    return {"records": [_row(record) for record in records], "used": used, "untimed": untimed}


async def _untimed(gateway: Any, channels: list[Any], platforms: list[str], records: list[Any]) -> list[str]:
    """Return the names of `records` of which the channels have packages without a time."""
    from rattler import MatchSpec

    specs = [MatchSpec(record.name.normalized) for record in records]
    record_lists = await gateway.query(channels, platforms, specs, recursive=False, channel_relations="disabled")
    return sorted({record.name.normalized for record in itertools.chain(*record_lists) if _time(record) is None})


async def _open(request: dict[str, Any]) -> tuple[Any, list[Any], list[str]]:
    """Return (gateway, channels, URLs in use); the first address of a channel that answers serves it."""
    from rattler import Channel

    serving: dict[str, dict[str, Any]] = {}
    channels, used = [], []
    for asked in request["channels"]:
        refusals = []
        for address in asked["addresses"]:
            url = address["url"]
            try:
                _reach(url, request["offline"])
                gateway = _gateway(request, {**serving, asked["url"]: address})
                # For rattler, a channel has its own URL, and its requests go to its mirror; or it is a local folder.
                channel = Channel(url if url.startswith("file:") else asked["url"])
                await gateway.names([channel], [request["platform"], "noarch"])
            except Exception as error:  # noqa: BLE001 - rattler's errors have no common base
                refusals.append({"url": url, "text": str(error)})
                continue
            serving[asked["url"]] = address
            channels.append(channel)
            used.append(url)
            break
        else:
            raise SolveFailed({"fault": "unreachable", "channel": asked["url"], "refusals": refusals})
    return _gateway(request, serving), channels, used


def _gateway(request: dict[str, Any], serving: dict[str, dict[str, Any]]) -> Any:
    """Return a rattler gateway that maps each channel to its address; credentials are not cached."""
    from rattler import Gateway, SourceConfig, networking

    mirrors = {
        f"{channel}/": [address["url"] + "/"]
        for channel, address in serving.items()
        if address["url"] != channel and not address["url"].startswith("file:")
    }
    servers = [
        (urlsplit(server["url"]), server["authorization"]) for server in serving.values() if server["authorization"]
    ]

    def headers(host: str, path: str) -> dict[str, str] | None:
        for parts, value in servers:
            if parts.hostname == host and path.startswith(parts.path.rstrip("/") + "/"):
                return {"Authorization": value}
        return None

    # Without credentials of our own, rattler looks for its own: RATTLER_AUTH_FILE, keyrings.
    known = networking.AddHeadersMiddleware(headers) if servers else networking.AuthenticationMiddleware()
    mirroring = [networking.MirrorMiddleware(mirrors)] if mirrors else []
    chain = [networking.RetryMiddleware(_RETRIES), *mirroring, known]
    action = "force-cache-only" if request["offline"] else "cache-or-fetch"
    return Gateway(
        cache_dir=request["cache"],
        default_config=SourceConfig(cache_action=action),  # type: ignore[arg-type]
        client=networking.Client(chain),  # type: ignore[arg-type]
    )


def _reach(url: str, offline: bool) -> None:
    """Raise OSError quickly when no server answers; rattler itself waits for minutes."""
    parts = urlsplit(url)
    if offline or parts.scheme not in ("http", "https") or parts.hostname is None:
        return
    proxied = {parts.scheme, "all"} & urllib.request.getproxies().keys()
    if not proxied or urllib.request.proxy_bypass(parts.hostname):
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=_CONNECT_S).close()


async def _kept(gateway: Any, channels: list[Any], platforms: list[str], keep: list[dict[str, str]]) -> list[Any]:
    """Return the channels' own records of the packages to keep; packages that no channel has any more are left out."""
    if not keep:
        return []
    from rattler import MatchSpec

    kept_keys = {(row["name"], row["sha256"]) for row in keep}
    specs = [MatchSpec(row["name"]) for row in keep]
    record_lists = await gateway.query(channels, platforms, specs, recursive=False, channel_relations="disabled")
    records: dict[str, Any] = {}
    for record in itertools.chain(*record_lists):
        name = record.name.normalized
        if record.sha256 is not None and (name, record.sha256.hex()) in kept_keys:
            records.setdefault(name, record)
    return list(records.values())


def _time(record: Any) -> float | None:
    """Return the time in seconds at which a package was indexed, else built, as rattler compares it."""
    time = getattr(record, "indexed_timestamp", None) or record.timestamp
    return time.timestamp() if time else None


def _left_out(record: Any, newest: float | None) -> bool:
    """Return whether a package is too new, or of unknown age."""
    return newest is not None and ((time := _time(record)) is None or time >= newest)


def _too_new(record: Any) -> dict[str, Any]:
    return {"package": f"{record.name.normalized} {record.version} {record.build}", "time": _time(record)}


async def _too_new_specs(
    gateway: Any, channels: list[Any], platforms: list[str], specs: list[Any], newest: float
) -> list[dict[str, Any]]:
    """Return a row for each spec whose packages are all too new or of unknown age; the oldest stands for them."""
    rows = []
    for index, spec in enumerate(specs):
        record_lists = await gateway.query(channels, platforms, [spec], recursive=False, channel_relations="disabled")
        records = [record for record in itertools.chain(*record_lists) if spec.matches(record)]
        if records and all(_left_out(record, newest) for record in records):
            oldest = min(records, key=lambda record: (_time(record) is None, _time(record)))
            rows.append({"spec": index, **_too_new(oldest)})
    return rows


def _row(record: Any) -> dict[str, Any]:
    return {
        "name": record.name.normalized,
        "version": str(record.version),
        "build": str(record.build),
        "subdir": str(record.subdir),
        "url": record.url,
        "md5": record.md5.hex() if record.md5 else "",
        "sha256": record.sha256.hex() if record.sha256 else "",
        "depends": list(record.depends),
        "size": record.size,
    }


def _set_aside(cache: Path, offline: bool) -> list[tuple[Path, Path]]:
    """Rename the channel indexes of an earlier run so that rattler requests them again; return (new, old) paths.

    Many servers do not send a cache lifetime, and rattler then assumes a tenth of the index's age: if the index
    is ten days old, a new package stays invisible for a day.
    """
    for left in cache.glob("*.old-*"):  # left by a killed run
        with contextlib.suppress(OSError):
            place = left.with_suffix(_INDEX)
            left.unlink() if place.exists() else left.replace(place)
    moved = []
    for path in [] if offline else sorted(cache.glob(f"*{_INDEX}")):
        aside = path.with_suffix(f".old-{os.getpid()}")
        with contextlib.suppress(OSError):
            path.replace(aside)
            moved.append((aside, path))
    return moved


def main(path: str) -> None:
    """Read the request, write the answer, and exit without waiting for rattler's threads."""
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    moved = _set_aside(Path(request["cache"]), request["offline"])
    try:
        result = asyncio.run(answer(request))
    except Exception as error:  # noqa: BLE001 - rattler's errors have no common base
        result = error.args[0] if isinstance(error, SolveFailed) else {"fault": "channel", "text": str(error)}
        for aside, place in moved:  # --offline needs the old indexes
            with contextlib.suppress(OSError):
                aside.replace(place)
    for aside, _ in moved:
        with contextlib.suppress(OSError):
            aside.unlink()
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
