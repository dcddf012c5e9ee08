"""From logs to causes: every rule with a log of what it is about, most of them made by really provoking it."""

from __future__ import annotations

import gzip
import json
import random
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from envbuild.cli.diagnose import diagnose_command
from envbuild.jobs.diagnose import Diagnosis, diagnose
from envbuild.jobs.diagnose_read import read_logs
from envbuild.jobs.diagnose_rules import Rule, load_rules
from envbuild.jobs.needle import needle

DATA = Path(__file__).parent / "data"
DOCS = Path(__file__).parents[2] / "docs/diagnose.md"
RULES = {rule.id: rule for rule in load_rules()}
# NCCL's own logs are kept with the tests of verify/nccl_log.py.
NCCL = {
    "efa-absent": "efa_no_device", "cxi-domain": "cxi_no_domain", "network-missing": "network_not_found",
    "sockets-fallback": "socket", "plugin-missing": "no_plugin", "plugin-failed": "efa_endpoint_failed",
}  # fmt: skip
GOOD_NCCL = ["cxi", "efa", "ib", "efa_no_channels"]


def logs_of(name: str) -> list[Path]:
    """The log, or the logs of the nodes, called `name`."""
    if name in NCCL:
        return [DATA / "nccl" / f"{NCCL[name]}.log"]
    found = sorted((DATA / "logs").glob("*.log"))
    return [path for path in found if re.fullmatch(rf"{name}(-n\d)?", path.stem)]


def of(*paths: Path) -> Diagnosis:
    return diagnose(read_logs([str(path) for path in paths]), load_rules())


def told(*lines: str) -> list[str]:
    return [one.id for one in diagnose([("log", lines)], load_rules()).findings]


def rules(*, provoked: bool, kinds: tuple[str, ...] = ("cause", "note")) -> list[Rule]:
    return [rule for rule in RULES.values() if rule.provoked is provoked and rule.kind in kinds]


def is_first_in_its_log(rule: Rule) -> None:
    found = of(*logs_of(rule.id)).findings
    assert [one.id for one in found][:1] == [rule.id]
    assert found[0].evidence and "?" not in found[0].evidence[0].file
    assert not re.search(r"\{\w+\}", found[0].cause + found[0].remedy)


@pytest.mark.parametrize("rule", rules(provoked=True), ids=lambda rule: rule.id)
def test_the_cause_that_was_provoked_is_found_first(rule: Rule) -> None:
    is_first_in_its_log(rule)


@pytest.mark.parametrize("rule", rules(provoked=False), ids=lambda rule: rule.id)
def test_the_cause_is_found_first_in_lines_from_its_source_not_provoked_here(rule: Rule) -> None:
    is_first_in_its_log(rule)
    first = logs_of(rule.id)[0].read_text().splitlines()[0]
    assert first.startswith("# ")


def test_every_symptom_follows_from_a_cause_in_some_log() -> None:
    seen = {
        one.id
        for rule in rules(provoked=True)
        for one in of(*logs_of(rule.id)).findings
        if one.kind == "symptom"
    }
    assert {rule.id for rule in RULES.values() if rule.kind == "symptom"} <= seen


def test_every_log_belongs_to_a_rule_and_a_readme_says_how_it_was_made() -> None:
    readme = (DATA / "logs/README.md").read_text()
    for path in sorted((DATA / "logs").glob("*.log")):
        name = re.sub(r"-n\d$", "", path.stem)
        assert name in RULES or name == "good"
        assert f"| {name} |" in readme
        assert not re.search(r"/root\b|/tmp/(?!torchelastic)", path.read_text())


@pytest.mark.parametrize(
    "paths", [logs_of("good"), *([DATA / "nccl" / f"{name}.log"] for name in GOOD_NCCL)]
)
def test_logs_of_jobs_that_went_well_yield_nothing(paths: list[Path]) -> None:
    assert of(*paths).findings == ()


def test_no_cause_hides_behind_a_consequence() -> None:
    """Each provoked failure, with the symptoms of a killed job around it, is still named first."""
    paths = logs_of("worker-killed") + logs_of("time-limit") + logs_of("rank-failed")
    # Without torchrun's settings, which would be those of a second job.
    lines = [line for path in paths for line in path.read_text().splitlines()]
    around = [line for line in lines if "launcher/api" not in line]
    for rule in rules(provoked=True, kinds=("cause",)):
        if rule.rank > RULES["time-limit"].rank:
            own = [(str(path), path.read_text().splitlines()) for path in logs_of(rule.id)]
            found = diagnose([("around", around), *own], load_rules()).findings
            assert found[0].id == rule.id, rule.id


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["srun: error: n1: task 0: Segmentation fault"], "worker-crashed"),
        (["pyxis:     mkdir: cannot create directory '/run/user/1000': Permission denied"], "permission"),
        (["\x1b[31mRuntimeError: No CUDA GPUs are available\x1b[0m"], "no-gpu"),
        (["1: [default0]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"], "gpu-memory"),
        (["OSError: [Errno 122] Disk quota exceeded: 'x'"], "disk-full"),
        (["exec /opt/env/bin/python: exec format error"], "wrong-architecture"),
        (["ModuleNotFoundError: No module named 'torch'", "task 0: Out Of Memory"], "no-module"),
        (["/bin/sh: 1: torchrun: not found"], "program-missing"),
        (["RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible"], "shared-memory"),
    ],
)  # fmt: skip
def test_other_forms_of_a_message_are_known(lines: list[str], cause: str) -> None:
    assert told(*lines)[0] == cause


_BANNER = "I torch/distributed/launcher/api.py:254] "


def started(node: int, nodes: int, endpoint: str = "n1:29500", run: str = "7") -> list[str]:
    return [
        f"{node}: {_BANNER}Starting elastic_operator with launch configs:",
        f"{node}: {_BANNER}  min_nodes                : {nodes}",
        f"{node}: {_BANNER}  run_id                   : {run}",
        f"{node}: {_BANNER}  rdzv_endpoint            : {endpoint}",
    ]


_TIMEOUT = ["    raise RendezvousTimeoutError", "torch…RendezvousTimeoutError"]


@settings(deadline=None)
@given(st.integers(2, 40), st.data())
def test_whoever_is_missing_of_any_number_of_nodes_is_counted(
    nodes: int, data: st.DataObject
) -> None:
    here = data.draw(st.integers(1, nodes))
    lines = [line for node in range(here) for line in started(node, nodes)]
    found = diagnose([("slurm.out", [*lines, *_TIMEOUT])], load_rules()).findings
    if here == nodes:
        assert found[0].id == "rendezvous-timeout"
    else:
        assert found[0].id == "head-only"
        assert f"started {here} times for {nodes} nodes" in found[0].cause


def test_counts_begin_anew_with_each_attempt_of_a_requeued_job() -> None:
    attempt = [
        *started(0, 2),
        *_TIMEOUT,
        "*** JOB 1 ON n1 CANCELLED AT 2026 DUE TO JOB REQUEUE ***",
    ]
    assert told(*attempt, *attempt, *started(0, 2), *_TIMEOUT)[0] == "head-only"
    other = [*started(0, 2, run="7-1"), *started(1, 2, run="7-1"), *_TIMEOUT]
    assert "head-only" not in told(*attempt, *other)
    assert "rendezvous-timeout" in told(*attempt, *other)


def test_agents_that_meet_over_loopback_on_one_host_are_no_fault() -> None:
    assert told(*started(0, 2, "127.0.0.1:4000"), *started(1, 2, "127.0.0.1:4000")) == []


def test_rules_can_be_told_apart() -> None:
    rows = [(rule.kind, rule.cause) for rule in RULES.values()]
    assert len(set(rows)) == len(rows) == len(load_rules())
    for rule in RULES.values():
        assert rule.all or rule.any
        assert rule.source and rule.remedy


def test_the_documentation_lists_every_rule() -> None:
    text = DOCS.read_text()
    for rule in RULES.values():
        assert f"| `{rule.id}` |" in text


# ---- reading


def test_logs_are_read_compressed_from_folders_and_with_bad_bytes(tmp_path: Path) -> None:
    raw = b"\xff\xfe\x00 junk\r\n" + b"ModuleNotFoundError: No module named 'x'\r\n"
    (tmp_path / "a.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "b.out").write_bytes(gzip.compress(raw))
    (tmp_path / "c.log").write_bytes(raw)
    (one,) = of(tmp_path).findings
    places = [(Path(line.file).name, line.line) for line in one.evidence]
    assert places == [("a.gz", 2), ("b.out", 2), ("c.log", 2)]


def test_an_endless_line_is_searched_at_its_end_and_does_not_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "bar.log"
    path.write_bytes(
        b"\r 50% |####" * 400_000 + b"RuntimeError: No CUDA GPUs are available\nnext\n"
    )
    found = of(path)
    assert (found.findings[0].id, found.findings[0].evidence[0].line, found.lines) == ("no-gpu", 1, 2)  # fmt: skip
    assert len(found.findings[0].evidence[0].text) < 300


def test_a_large_log_takes_seconds(tmp_path: Path) -> None:
    path = tmp_path / "big.log"
    line = "[RANK 3] Epoch 49 | Batchsize: 32 | Steps: 8 | Loss: 0.615954\n"
    path.write_text(line * 100_000 + "OSError: [Errno 28] No space left on device\n")
    begun = time.monotonic()
    assert of(path).findings[0].id == "disk-full"
    assert time.monotonic() - begun < 20


def test_passwords_in_logs_are_not_repeated() -> None:
    line = "qsub: cannot fetch https://ada:hunter2@example.org/x"
    found = diagnose([("log", [line])], load_rules())
    assert found.findings[0].id == "submission-refused"
    assert "hunter2" not in repr(found)


@settings(deadline=None)
@given(st.lists(st.text(), max_size=20))
def test_no_text_is_too_strange(lines: list[str]) -> None:
    diagnose([("log", lines)], load_rules())


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_every_rule_survives_lines_in_any_order(rng: random.Random) -> None:
    paths = [path for rule in RULES.values() for path in logs_of(rule.id)]
    lines = [line for path in rng.sample(paths, 4) for line in path.read_text().splitlines()]
    rng.shuffle(lines)
    found = diagnose([("log", lines[:100])], load_rules())
    kinds = [("cause", "note", "symptom").index(one.kind) for one in found.findings]
    assert kinds == sorted(kinds)


def test_the_constant_text_of_a_pattern_is_in_all_that_it_matches() -> None:
    lines = [line for path in sorted(DATA.glob("logs/*.log")) for line in path.read_text().splitlines()]  # fmt: skip
    patterns = {pattern for rule in RULES.values() for pattern in rule.patterns}
    for pattern in patterns:
        for line in lines:
            if pattern.regex.search(line):
                assert pattern.needle in line, pattern


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        (r"abc", "abc"), (r"abc?de", "ab"), (r"a(?:x|y)bcd", "bcd"), (r"ab|cd", ""), (r"\[x\] y\d+z", "[x] y"),
        (r"[]a]bc", "bc"), (r"[^]]+end", "end"), (r"\((?P<n>[^)]+)\) on", ") on"), (r"a{2}bc", "bc"), (r"^x\.$", "x."),
    ],
)  # fmt: skip
def test_the_constant_text_of_a_pattern(regex: str, text: str) -> None:
    assert needle(regex) == text


# ---- the command


def test_the_command_shows_cause_evidence_and_remedy() -> None:
    paths = [str(path) for path in logs_of("localhost-endpoint")]
    done = CliRunner().invoke(diagnose_command, paths)
    assert done.exit_code == 0
    assert "the rendezvous endpoint is localhost:29500 on 2 nodes" in done.output
    assert re.search(r"localhost-endpoint-n1\.log:\d+: .*rdzv_endpoint", done.output)
    assert "do: give the head's address" in done.output
    assert "Followed by: " not in done.stdout


def test_the_command_shows_symptoms_where_no_cause_is_known() -> None:
    paths = [str(path) for path in logs_of("rendezvous-timeout")]
    done = CliRunner().invoke(diagnose_command, paths)
    assert "1. symptom: not every node joined the rendezvous in time" in done.stdout


def test_the_command_prints_json_and_reads_standard_input() -> None:
    text = logs_of("clients-missing")[0].read_text()
    done = CliRunner().invoke(diagnose_command, ["-", "--json"], input=text)
    (one,) = json.loads(done.stdout)["findings"]
    assert (one["id"], one["kind"]) == ("clients-missing", "cause")
    assert one["evidence"][0]["file"] == "standard input"


def test_where_nothing_is_recognised_the_last_errors_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("fine\nWidgetError: the frobnicator is loose\nmore\n")
    done = CliRunner().invoke(diagnose_command, [str(log)])
    assert done.exit_code == 0
    assert "Nothing was recognised in 3 lines." in done.output
    assert "x.log:2: WidgetError: the frobnicator is loose" in done.output


@pytest.mark.parametrize("name", ["nosuch.log", "."])
def test_a_log_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(diagnose_command, [str(tmp_path / name)])
    assert getattr(done.exception, "exit_code", None) == 2
    assert str(tmp_path) in str(done.exception)


def test_a_damaged_compressed_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x\n" * 9999)[:-20])
    done = CliRunner().invoke(diagnose_command, [str(tmp_path / "cut.gz")])
    assert getattr(done.exception, "exit_code", None) == 2
    assert "cut.gz" in str(done.exception)
