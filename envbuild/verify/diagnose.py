"""From what torchrun and gloo print when a launch fails to what usually causes it."""

from __future__ import annotations

import re

from envbuild.diagnose.nccl_log import parse_nccl_log

# Order matters: the first that matches is the deeper cause. Each was seen in real runs of torch 2.13.
_KNOWN = (
    (r"No space left on device|Disk quota exceeded", "the disk is full"),
    (r"ModuleNotFoundError: No module named '([\w.]+)'", "a module is missing from the artifact: add it to the recipe"),
    (r"ImportError: .*cannot open shared object file|OSError: .*cannot open shared object file",
     "a shared library is missing on this host (libgomp, libstdc++): install it, or load its module"),
    (r"version `GLIBC\w*_[\d.]+' not found",
     "this host's C library is older than the wheels need: set `glibc` in the recipe's target and lock again"),
    (r"EADDRINUSE|[Aa]ddress already in use", "another program took the rendezvous port in between: run it again"),
    (r"RendezvousTimeoutError", "not every node joined in time: torchrun did not start on each of them, or they "
     "cannot reach the endpoint"),
    (r"gaierror|Name or service not known|failed to resolve", "a host name cannot be resolved: give addresses"),
    (r"connectFullMesh failed", "ranks advertised an address that the others cannot reach: set GLOO_SOCKET_IFNAME to "
     "the interface of the cluster's network"),
    (r"Unable to find address for: |Unable to find interface", "GLOO_SOCKET_IFNAME names no interface of this host"),
    (r"terminate called without an active exception", "torch aborted at exit: see docs/reference/verification.md"),
    (r"Killed|signal 9 \(SIGKILL\)", "a process was killed: memory limit of the job or node, or somebody's kill -9"),
    (r"ddp_train: error: unrecognized arguments: --bandwidth", "the artifact was built by an older envbuild, whose "
     "trainer cannot measure the network: build it again"),
    (r"ddp_train: error: --backend nccl:", "this host has no usable GPU for each rank of a node: verify on a node with "
     "GPUs, with --nproc-per-node no larger than their number"),
    (r"ddp_train: error: (.*)", "the trainer refused its input, see the line above"),
)  # fmt: skip


def usual_cause(log: str) -> str:
    """What usually causes a launch to end with this log."""
    nccl = parse_nccl_log(log)
    if fatal := nccl.having("fatal"):
        # A network that is not there is the end of a plugin that failed before.
        return next((f.cause for f in nccl.having("plugin failed") if f.cause), fatal[0].cause)
    for pattern, cause in _KNOWN:
        if re.search(pattern, log):
            return cause
    return "see the log: its last lines are above, all of it is in the folder named below"
