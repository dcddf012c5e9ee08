"""NCCL's logs: what each says, by shortened real ones (the first line of each names where it was posted)."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.fabrics import load_fabrics
from envbuild.jobcheck.diagnose.engine import explain
from envbuild.jobcheck.diagnose.nccl_log import NcclLog, load_patterns, parse_nccl_log
from envbuild.verify.network_checks import check_nccl

DATA = Path(__file__).parent / "data" / "nccl"
LOGS = {path.stem: path.read_text() for path in sorted(DATA.glob("*.log"))}
EMPTY = NcclLog("", (), (), (), (), ())
# What each log says: version, networks, transports, providers, kinds of faults.
SAYS = {
    "cxi": ("", ["AWS Libfabric"], ["NET/AWS Libfabric"], ["cxi"], []),
    "cxi_no_domain": ("", ["AWS Libfabric"], [], ["cxi"], ["plugin failed", "error"]),
    "efa": ("2.12.7+cuda11.4", ["AWS Libfabric"], ["NET/AWS Libfabric"], ["efa"], []),
    "efa_endpoint_failed": (
        "2.21.5+cuda12.8",
        ["Socket"],
        ["P2P"],
        [],
        ["error", "plugin failed", "error", "no adapter"],
    ),
    "efa_no_channels": ("", ["Libfabric"], [], ["efa"], []),
    "efa_no_device": (
        "2.27.3+cuda12.9",
        ["Socket"],
        ["NET/Socket"],
        [],
        ["plugin failed", "plugin failed", "error", "no adapter"],
    ),
    "h200_no_plugin": ("2.28.9+cuda13.0", [], [], [], ["plugin missing", "fatal"]),
    "h200_two_ranks": ("2.28.9+cuda13.0", ["Socket"], ["NET/Socket"], [], ["plugin missing"]),
    "ib": ("", ["IB"], ["P2P", "NET/IB"], [], ["plugin missing"]),
    "network_not_found": ("", [], [], [], ["plugin missing", "fatal"]),
    "no_plugin": ("2.21.5+cuda12.4", [], [], [], ["plugin missing"]),
    "socket": ("2.18.3+cuda12.2", ["Socket"], ["P2P", "NET/Socket"], [], ["plugin missing", "no adapter"]),
}


@pytest.mark.parametrize("name", LOGS)
def test_every_log_is_understood_and_says_where_it_is_from(name: str) -> None:
    version, networks, transports, providers, kinds = SAYS[name]
    log = parse_nccl_log(LOGS[name])
    assert (log.version, list(log.networks)) == (version, networks)
    assert (list(log.transports), list(log.providers)) == (transports, providers)
    assert [fault.kind for fault in log.faults] == kinds
    head = LOGS[name].splitlines()[0]
    assert head.startswith("# ") and ("https://" in head or "README" in head)


def test_the_probe_before_a_provider_is_no_fault() -> None:
    assert "No eligible providers were found" in LOGS["efa_no_device"]
    faults = [fault.text for fault in parse_nccl_log(LOGS["efa_no_device"]).faults]
    assert not [text for text in faults if "eligible" in text or "PROFILER" in text]


def ranks(*nodes: int) -> list[dict[str, object]]:
    return [{"rank": rank, "group_rank": node, "nccl": "2.26.2"} for rank, node in enumerate(nodes)]


def judged(fabric: str, *logs: str, nccl: str | None = "2.26.2") -> tuple[str, str, str]:
    """Status, what was seen and the cause when each rank is a node of its own and has one of `logs`."""
    entries = [{**entry, "nccl": nccl} for entry in ranks(*range(len(logs)))]
    parsed = {number: parse_nccl_log(text) for number, text in enumerate(logs) if text}
    report = {"ranks": entries, "backend": "nccl" if nccl else "gloo"}
    check = check_nccl(load_fabrics()[fabric], report, parsed, {})
    return check.status, check.seen, check.cause


def of_host(name: str, host: str) -> str:
    return "\n".join(line for line in LOGS[name].splitlines() if f"{host}:" in line)


def test_efa_in_use_on_both_ranks_passes() -> None:
    logs = [of_host("efa", "node-a"), of_host("efa", "node-b")]
    status, seen, _ = judged("efa", *logs)
    assert status == "pass" and seen == "NCCL over AWS Libfabric by provider efa on all 2 ranks"
    assert judged("any", *logs)[0] == "pass"


@pytest.mark.parametrize("fabric", ["ib", "socket", "cxi"])
def test_the_fabric_in_use_passes(fabric: str) -> None:
    assert judged(fabric, LOGS[fabric], LOGS[fabric])[0] == "pass"


@pytest.mark.parametrize(
    ("fabric", "log", "seen", "cause"),
    [
        ("efa", "efa_no_device", "NCCL used Socket, not AWS Libfabric", "found no device of the fabric"),
        ("efa", "efa_no_device", "NET/OFI Unable to find a protocol that worked", "/dev/infiniband"),
        ("efa", "efa_endpoint_failed", "NET/OFI aws-ofi-nccl initialization failed", "FI_PROVIDER"),
        ("efa", "socket", "NET/Plugin : No plugin found", "NCCL_NET_PLUGIN"),
        ("efa", "no_plugin", "NCCL's log names no network", "aws-ofi-nccl into [layers]"),
        ("efa", "efa_no_channels", "node 0 has no channel over AWS Libfabric (its channels: none)", "one host"),
        ("cxi", "efa", "libfabric's provider is efa, not cxi", "FI_PROVIDER"),
        ("tcp-ofi", "cxi", "libfabric's provider is cxi, not tcp", "FI_PROVIDER"),
        ("ib", "socket", "NCCL used Socket, not IB\n      Failed to open libibverbs", "libibverbs is missing"),
        ("socket", "ib", "NCCL used IB, not Socket", "docs/reference/fabrics.md"),
        ("any", "efa_endpoint_failed", "has no channel over Socket (its channels: P2P)", "docs/reference/fabrics.md"),
        ("any", "network_not_found", "NCCL's log names no network", "NCCL_NET_PLUGIN"),
    ],
)
def test_a_fallback_fails_with_its_line_and_its_cause(fabric: str, log: str, seen: str, cause: str) -> None:
    found = judged(fabric, LOGS[log], LOGS[log])
    assert found[0] == "fail" and seen in found[1] and cause in found[2], found


def test_where_any_network_is_good_a_plugin_that_failed_is_told() -> None:
    status, seen, _ = judged("any", LOGS["efa_no_device"], LOGS["efa_no_device"])
    assert status == "pass" and "NCCL over Socket on all 2 ranks; its plugin did not start" in seen


def test_one_rank_that_fell_back_fails_all() -> None:
    status, seen, _ = judged("efa", LOGS["efa"], LOGS["efa_no_device"])
    assert status == "fail" and seen.startswith("rank 1: NCCL used Socket")
    assert judged("efa", LOGS["efa"], "")[1] == "rank 1: NCCL's log names no network"
    assert "gloo" in judged("any", "", "", nccl=None)[1]


def test_a_launch_that_nccl_ended_tells_the_deeper_cause() -> None:
    assert "put aws-ofi-nccl into [layers]" in explain(LOGS["network_not_found"], "verification")
    both = LOGS["efa_no_device"] + "\nNCCL WARN Error: network AWS Libfabric not found."
    assert "found no device of the fabric" in explain(both, "verification")
    # Without its end, a log with fallbacks is no failed launch's cause.
    assert explain(LOGS["efa_no_device"], "verification") == ""


def test_every_pattern_names_its_source_and_every_failure_its_cause() -> None:
    table = tomllib.loads((resources.files("envbuild.data") / "nccl_log.toml").read_text())
    for row, (kind, pattern, cause) in zip(table["lines"], load_patterns(), strict=True):
        assert row["source"].startswith("src/") and "[" in row["source"] and row["date"], row
        assert (row["kind"], row["regex"]) == (kind, pattern.pattern)
        informs = kind in ("version", "network", "transport", "plugin", "provider")
        assert bool(cause) is not informs and not cause.startswith("="), row


@given(st.lists(st.text(max_size=60), max_size=8).map("\n".join))
def test_any_text_is_read(text: str) -> None:
    assert isinstance(parse_nccl_log(text), NcclLog)


@given(
    st.sampled_from(sorted(LOGS)),
    st.text(st.characters(exclude_characters="\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029"), max_size=20).filter(
        lambda text: "NCCL" not in text
    ),
)
def test_what_stands_before_a_line_does_not_matter(name: str, before: str) -> None:
    lines = [f"{before} {line}" for line in LOGS[name].splitlines()]
    assert parse_nccl_log("\n".join(lines)) == parse_nccl_log(LOGS[name])
    assert parse_nccl_log("\n".join(lines * 2)).faults == parse_nccl_log(LOGS[name]).faults


def test_an_empty_log_says_nothing() -> None:
    assert parse_nccl_log("") == EMPTY
