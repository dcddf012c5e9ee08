"""Checks of faults on nodes: the run's folder, the artifact, differing versions, memory, disk space, GPUs, fabric."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .model import (
    FAIL,
    SHOWN,
    SPEED,
    UNKNOWN,
    UNLIMITED,
    WARN,
    Facts,
    Finding,
    Node,
    Requirements,
    few,
    is_nccl,
    nccl_version,
    torch_version,
)
from .speed import figures, slow

_LITTLE = 64 << 20
_PAGE = 64 << 10
# libfabric and ibverbs pin far more of a process's memory than this.
_LITTLE_MEMLOCK = 64 << 20
_BUILD_AGAIN = "build it again, or copy it to this node again; `envbuild verify` names all that changed"
_ONE_ARTIFACT = "let all nodes use one artifact, on a file system that all see, or the same copy"


def speed(nodes: Sequence[Node], required: Requirements) -> Iterator[Finding]:
    slow_nodes = slow(figures([node.known.speeds for node in nodes], [node.sent for node in nodes]))
    for number, figure in slow_nodes:
        yield Finding(
            FAIL if required.fast else WARN,
            SPEED,
            (number,),
            f"is slow: {figure}",
            "leave it out (job --exclude-slow, or the scheduler's own option), and let its administrators look at"
            " clocks, temperatures, left-over processes and the network's cable or port",
        )


def shared(nodes: Sequence[Node], required: Requirements) -> Iterator[Finding]:
    for node in nodes:
        if node.shared:
            yield Finding(
                FAIL,
                "run folder",
                (node.number,),
                node.shared,
                "the run's folder must be one that all nodes see (and containers: mount it): submit from such a folder,"
                " or set [paths] shared of the site",
            )


def same(nodes: Sequence[Node], required: Requirements) -> Iterator[Finding]:
    here = [node for node in nodes if node.facts is not None]

    def differ(status: str, check: str, title: str, value: Callable[[Facts], str], remedy: str) -> Iterator[Finding]:
        groups: dict[str, list[int]] = {}
        for node in here:
            groups.setdefault(value(node.known), []).append(node.number)
        if len(groups) > 1:
            values = "; ".join(
                f"{text or 'none'} on {few([nodes[n].host for n in numbers])}" for text, numbers in groups.items()
            )
            # The nodes outside the largest group are suspected; with two groups of equal size, none is.
            most = max(len(numbers) for numbers in groups.values())
            suspected = [n for numbers in groups.values() if len(numbers) < most for n in numbers]
            yield Finding(status, check, tuple(suspected), f"{title} differs: {values}", remedy)

    one_kind = "run jobs on nodes of one kind ([scheduler] constraint)"
    one_mtu, one_driver = "give all nodes one MTU", "NCCL wants one driver on all nodes"
    yield from differ(FAIL, "architecture", "the processor", lambda f: f.arch, one_kind)
    yield from differ(FAIL, "artifact", "the artifact", lambda f: f.digest[:19], _ONE_ARTIFACT)
    yield from differ(FAIL, "python", "Python", lambda f: f.python, _ONE_ARTIFACT)
    yield from differ(FAIL, "torch", "torch", torch_version, _ONE_ARTIFACT)
    yield from differ(FAIL, "nccl", "NCCL", nccl_version, _ONE_ARTIFACT)

    def version(name: str) -> Callable[[Facts], str]:
        return lambda facts: facts.packages.get(name, "")

    names = {name for node in here for name in node.known.packages if not is_nccl(name)}
    names -= {"torch", "conda:pytorch"}
    odd = [name for name in sorted(names) if len({version(name)(node.known) for node in here}) > 1]
    for name in odd[:SHOWN]:
        yield from differ(WARN, "packages", name, version(name), _ONE_ARTIFACT)
    if len(odd) > SHOWN:
        fault = f"{len(odd) - SHOWN} more packages differ: {', '.join(odd[SHOWN:])[:200]}"
        yield Finding(WARN, "packages", (), fault, _ONE_ARTIFACT)
    yield from differ(WARN, "driver", "NVIDIA's driver", lambda f: f.driver, one_driver)
    yield from differ(WARN, "stack", "the nodes' inventory of network libraries", lambda f: f.inventory, one_kind)
    yield from differ(WARN, "mtu", "the interface's MTU", lambda f: str(f.mtu), one_mtu)


def artifact(nodes: Sequence[Node], required: Requirements) -> Iterator[Finding]:
    for node in nodes:
        facts, at = node.known, (node.number,)
        if node.facts is None:
            continue
        if required.arch and facts.arch != required.arch:
            fault = f"is {facts.arch}, and the artifact is for {required.arch}"
            yield Finding(FAIL, "architecture", at, fault, "choose other nodes, or build for this target")
        # An image's digest is that of its file, which is unknown inside of the image.
        if required.digest and facts.artifact in ("", "venv", "conda") and facts.digest != required.digest:
            made = facts.digest[:19] or "what envbuild did not make"
            fault = f"runs {made} ({facts.executable}), not {required.digest[:19]}"
            yield Finding(
                FAIL,
                "artifact",
                at,
                fault,
                "it was rebuilt since the job was written, or this node has another copy: write the job again",
            )
        elif required.manifest and facts.changed == UNKNOWN:
            fault = "its environment's files could not be compared with the manifest in time"
            yield Finding(WARN, "files", at, fault, "the file system answers slowly: give more time with --wait")
        elif required.manifest and facts.changed:
            yield Finding(
                FAIL, "files", at, f"{facts.changed} changed since the environment was verified", _BUILD_AGAIN
            )


def resources(nodes: Sequence[Node], required: Requirements) -> Iterator[Finding]:
    for node in nodes:
        facts, at = node.known, (node.number,)
        if node.facts is None:
            continue
        # The requested size is sufficient, however small; file systems round it to whole pages.
        if facts.shm < (required.shm - _PAGE if required.shm else _LITTLE):
            fault = f"/dev/shm has {_bytes(facts.shm)}"
            if required.shm:
                has, asked = _distinct_sizes(facts.shm, required.shm)
                fault = f"/dev/shm has {has}, wanted {asked}"
            remedy = "NCCL and data loaders work in it: docker --shm-size, [kubernetes] shm"
            yield Finding(FAIL if required.shm else WARN, "shm", at, fault, remedy)
        if 0 <= facts.run_free < max(required.free, _LITTLE):
            fault = f"the run's folder has {_bytes(facts.run_free)} free"
            yield Finding(FAIL, "space", at, fault, "snapshots and logs go there: make room, or use another folder")
        if 0 <= facts.tmp_free < _LITTLE:
            fault = f"the folder for temporary files has {_bytes(facts.tmp_free)} free"
            yield Finding(WARN, "space", at, fault, "make room, or set [paths] scratch of the site")
        if facts.gpus < required.gpus:
            driver = f"driver {facts.driver}" if facts.driver else "no driver of NVIDIA"
            yield Finding(
                FAIL,
                "gpus",
                at,
                f"offers {facts.gpus} GPUs, wanted {required.gpus} ({driver})",
                "ask the scheduler for them ([node] gpus); in containers: --nv, NVIDIA_VISIBLE_DEVICES, nvidia-smi -L",
            )
        if facts.provider:
            fault = f"lacks libfabric's provider {required.provider}: {facts.provider}"
            remedy = "use nodes with this network or another fabric; containers need /dev/infiniband or /dev/cxi*"
            yield Finding(FAIL, "fabric", at, fault, remedy)
        if facts.imex:
            fault = f"lacks a channel of NVIDIA's IMEX for NVLink between the nodes: {facts.imex}"
            remedy = "NCCL fails or goes without: Slurm's switch/nvidia_imex, a ComputeDomain, or NCCL_MNNVL_ENABLE=0"
            yield Finding(WARN, "imex", at, fault, remedy)
        if facts.stack:
            remedy = "`envbuild check ARTIFACT --site SITE` says what does not fit; correct [host_stack] of the site"
            yield Finding(FAIL, "stack", at, facts.stack, remedy)
        if required.pins and UNLIMITED != facts.memlock < _LITTLE_MEMLOCK:
            fault = f"lets a process pin {_bytes(facts.memlock)} of memory"
            remedy = "ulimit -l unlimited (limits.conf, LimitMEMLOCK=infinity of slurmd): what is sent is pinned"
            yield Finding(FAIL, "memlock", at, fault, remedy)
        if facts.cores > 1 == facts.cores_allowed:
            fault = f"gives all processes together 1 of {facts.cores} cores"
            remedy = "mpirun --bind-to none, srun --cpu-bind=none, or ask for more (--cpus-per-task, ncpus)"
            yield Finding(WARN, "cores", at, fault, remedy)


def _distinct_sizes(size: int, other: int) -> tuple[str, str]:
    """Return two sizes with enough digits to show that they differ."""
    shown = ((_bytes(size, digits), _bytes(other, digits)) for digits in (1, 3, 5))
    return next((pair for pair in shown if pair[0] != pair[1]), (f"{size} bytes", f"{other} bytes"))


def _bytes(count: int, digits: int = 1) -> str:
    if count < 0:
        return "nothing"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count} bytes"
