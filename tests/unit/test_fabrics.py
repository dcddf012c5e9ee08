"""What fabrics need, what a job is given for them, and how the checks judge what the ranks reported."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_train.preflight.host import missing_provider
from envbuild.base.errors import RecipeError, UsageError
from envbuild.base.toml import json_schema
from envbuild.compat.judge import judge
from envbuild.compat.stack import stack_of
from envbuild.contract.state import BuiltLayer, State
from envbuild.contract.verification import VerifySettings, parse_settings
from envbuild.doctor.network import adapters
from envbuild.doctor.probe import Host
from envbuild.fabrics import (
    fabric_variables,
    find_fabric,
    load_fabrics,
    plugin_variables,
    preflight_devices,
)
from envbuild.jobcheck.lint.kubernetes import lint_manifest
from envbuild.layers.source_known import source_layers
from envbuild.recipe.load import load_recipe
from envbuild.recipe.model import Recipe
from envbuild.recipe.targets import CPU, CUDA, Target
from envbuild.site.settings import load_site
from envbuild.site.tables import FabricTable
from envbuild.verify.launch import fit_to_gpus, network_of, visible_gpus
from envbuild.verify.model import Subject
from envbuild.verify.network_checks import check_bandwidth, check_gloo, check_libraries

TREE = Path(__file__).resolve().parents[2]
ROOT = Path("/env")
PLUGIN = BuiltLayer("aws-ofi-nccl", "1.21.1", "f")
OLD_PLUGIN = BuiltLayer("aws-ofi-nccl", "1.14.2", "f")
LIBFABRIC = BuiltLayer("libfabric", "2.1.0", "f")
CRAY = BuiltLayer("libfabric", "1.22.0", "", path="/opt/cray/libfabric/1.22.0")


def test_every_fabric_of_recipes_is_known_and_every_value_has_its_source() -> None:
    schema = json.loads((TREE / "docs/recipe.schema.json").read_text())
    assert list(load_fabrics()) == schema["properties"]["fabric"]["enum"]
    for fabric in load_fabrics().values():
        assert len(fabric.source) > 10 and re.fullmatch(r"20\d\d-\d\d-\d\d", fabric.date)
        assert fabric.title and fabric.by_plugin is ("ofi" in fabric.name or bool(fabric.provider))
        assert not fabric.nccl_net or fabric.nccl_net in fabric.names
        for row in fabric.rows:
            assert row.source.startswith("https://") and row.why
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", row.date)
    with pytest.raises(UsageError, match="unknown fabric 'roce'; known are any"):
        find_fabric("roce")


def test_a_missing_network_is_made_fatal_and_the_site_has_the_last_word() -> None:
    fabrics = load_fabrics()
    assert fabric_variables(fabrics["any"], FabricTable(), "cuda") == {}
    assert fabric_variables(fabrics["socket"], FabricTable(), "cuda") == {"NCCL_NET": "Socket"}
    assert fabric_variables(fabrics["ib"], FabricTable(), "cuda") == {"NCCL_NET": "IB"}
    efa = fabric_variables(fabrics["efa"], FabricTable("eth0"), "cuda")
    assert efa == {"NCCL_NET": "AWS Libfabric", "NCCL_SOCKET_IFNAME": "eth0"}
    site = FabricTable("hsn0,hsn1", variables={"FI_MR_CACHE_MONITOR": "kdreg2", "NCCL_IB_GID_INDEX": "3"})
    cxi = fabric_variables(fabrics["cxi"], site, "cuda")
    assert cxi["FI_PROVIDER"] == "cxi" and cxi["NCCL_SOCKET_IFNAME"] == "hsn0,hsn1"
    assert cxi["FI_MR_CACHE_MONITOR"] == "kdreg2" and cxi["NCCL_IB_GID_INDEX"] == "3"
    assert cxi.items() - fabric_variables(fabrics["cxi"], site, "rocm").items() == {("NCCL_NET_GDR_LEVEL", "PHB")}
    assert "FI_TCP_IFACE" not in fabric_variables(fabrics["tcp-ofi"], FabricTable(), "cuda")
    assert fabric_variables(fabrics["tcp-ofi"], FabricTable("ib0"), "cuda")["FI_TCP_IFACE"] == "ib0"


@pytest.mark.parametrize(
    ("layers", "root", "nccl", "expected"),
    [
        ((), ROOT, "2.26.2", {}),
        ((LIBFABRIC,), ROOT, "2.26.2", {}),
        ((LIBFABRIC, PLUGIN), ROOT, "2.26.2", {"NCCL_NET_PLUGIN": "/env/lib/libnccl-net-ofi.so"}),
        ((PLUGIN,), ROOT, "", {"NCCL_NET_PLUGIN": "/env/lib/libnccl-net-ofi.so"}),
        ((OLD_PLUGIN,), ROOT, "2.21.5", {"NCCL_NET_PLUGIN": "/env/lib/libnccl-net.so"}),
        ((PLUGIN,), ROOT, "2.20.5", {"NCCL_NET_PLUGIN": "ofi", "LD_LIBRARY_PATH": "/env/lib:/host"}),
        ((OLD_PLUGIN,), ROOT, "2.20.5", {"LD_LIBRARY_PATH": "/env/lib:/host"}),
        (
            (PLUGIN,),
            ROOT / ("x" * 240),
            "2.26.2",
            {"NCCL_NET_PLUGIN": "ofi", "LD_LIBRARY_PATH": f"/env/{'x' * 240}/lib:/host"},
        ),
        (
            (CRAY, PLUGIN),
            ROOT,
            "2.26.2",
            {
                "NCCL_NET_PLUGIN": "/env/lib/libnccl-net-ofi.so",
                "LD_LIBRARY_PATH": f"{CRAY.path}/lib64:{CRAY.path}/lib:/host",
            },
        ),
        (
            (dataclasses.replace(PLUGIN, files="", path="/opt/ofi"),),
            ROOT,
            "2.26.2",
            {"NCCL_NET_PLUGIN": "/opt/ofi/lib/libnccl-net-ofi.so"},
        ),
    ],
)
def test_nccl_is_told_where_its_plugin_is(
    layers: tuple[BuiltLayer, ...], root: Path, nccl: str, expected: dict[str, str]
) -> None:
    assert plugin_variables(layers, root, nccl, "/host", net_plugin="libnccl-net") == expected


def test_what_the_environment_has_otherwise_is_named() -> None:
    """Seed 003's users: FI_PROVIDER=efa in the job script of a Slingshot system."""
    theirs = {"FI_PROVIDER": "efa", "NCCL_CROSS_NIC": "1", "NCCL_SOCKET_IFNAME": "eth0", "HOME": "/h"}
    nodes: Any = Nodes("lo")
    network = network_of(subject(state(fabric="cxi")), nodes, (2, 1), theirs, FabricTable("hsn0"))
    assert network.replaced == {"FI_PROVIDER": ("efa", "cxi")}


def state(**changes: Any) -> State:
    plain = State(
        "venv",
        "r",
        "d",
        "d",
        "d",
        "cu126-x86_64",
        "3.11",
        "3.11.7",
        "python",
        (("nvidia-nccl-cu12", "2.26.2", "d"), ("torch", "2.7.1+cu126", "d")),
        fabric="efa",
        layers=(LIBFABRIC, PLUGIN),
    )
    return dataclasses.replace(plain, **changes)


def subject(of: State, **changes: Any) -> Subject:
    made = Subject(ROOT, of, Target.parse(of.target), "d", "host", NotImplemented, NotImplemented)
    return dataclasses.replace(made, **changes)


class Nodes:
    def __init__(self, interface: str) -> None:
        self.interface = interface


@pytest.mark.parametrize(("gpus", "split"), [("0,1,2,3", ["0,1", "2,3"]), ("0,1", [None, None]), ("", [None, None])])
def test_simulated_nodes_are_hosts_of_their_own_with_gpus_of_their_own_where_there_are_enough(
    gpus: str, split: list[str | None]
) -> None:
    nodes: Any = Nodes("lo")
    env = {"CUDA_VISIBLE_DEVICES": gpus, "FI_PROVIDER": "tcp"}
    network = network_of(subject(state()), nodes, (2, 2), env, FabricTable())
    first, second = (network.of_node(node, "train", "/shared") for node in (0, 1))
    assert [first.get("CUDA_VISIBLE_DEVICES"), second.get("CUDA_VISIBLE_DEVICES")] == split
    assert first["NCCL_HOSTID"] != second["NCCL_HOSTID"]
    assert first["NCCL_MNNVL_ENABLE"] == "0"  # NVLink between such hosts is none of the fabric's
    assert first["NCCL_DEBUG_FILE"] != second["NCCL_DEBUG_FILE"]
    assert first["NCCL_NET"] == "AWS Libfabric" and first["NCCL_SOCKET_IFNAME"] == "=lo"
    assert first["NCCL_NET_PLUGIN"] == "/env/lib/libnccl-net-ofi.so"
    assert network.replaced == {}  # efa needs no FI_PROVIDER


def test_containers_have_an_interface_of_their_own_and_cpu_targets_no_nccl() -> None:
    nodes: Any = Nodes("eth0")
    site = FabricTable("hsn0")
    inside = network_of(subject(state(), isolated=True), nodes, (2, 1), {}, site)
    assert inside.variables["NCCL_SOCKET_IFNAME"] == "=eth0"
    plain = network_of(subject(state(target="cpu-x86_64")), nodes, (2, 1), {}, site)
    assert plain.of_node(0, "train", "/w") == {}


def test_ranks_of_a_slim_artifact_are_told_its_chips() -> None:
    nodes: Any = Nodes("lo")
    slim = state(slim={"rules": 1, "gpus": ["sm_80", "sm_90"]})
    network = network_of(subject(slim), nodes, (2, 1), {}, FabricTable())
    assert network.of_node(0, "train", "/w")["DDP_TRAIN_CHIPS"] == "sm_80,sm_90"
    assert "DDP_TRAIN_CHIPS" not in network_of(subject(state()), nodes, (2, 1), {}, FabricTable()).variables


def test_gpus_are_counted_by_their_devices(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, CUDA, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, CUDA, tmp_path) == ["GPU-a", "GPU-b"]
    assert visible_gpus({}, CUDA, tmp_path / "none") == []


@pytest.mark.parametrize(("visible", "ranks", "said"), [("0", 1, 1), ("0,1", 2, 0), ("0,1,2", 2, 0), ("", 2, 0)])
def test_a_host_with_fewer_gpus_than_ranks_trains_with_as_many(visible: str, ranks: int, said: int) -> None:
    lines: list[str] = []
    found = fit_to_gpus(VerifySettings(), {"CUDA_VISIBLE_DEVICES": visible}, CUDA, lines.append)
    assert (found.nproc_per_node, len(lines)) == (ranks, said)
    assert found.wanted_nproc_per_node == (2 if said else 0)
    assert fit_to_gpus(VerifySettings(), {"CUDA_VISIBLE_DEVICES": visible}, CPU, lines.append) == VerifySettings()


def gloo_report(address: str = "127.0.0.1", *, links: int = 1, **changes: Any) -> dict[str, Any]:
    """Two ranks with `links` connections between them, and both with one to the rendezvous store on rank 0."""
    here = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.0.2.2"]}
    common = {"gloo_ifname": "lo", "interfaces": here, "store": "127.0.0.1:500", **changes}
    store = ["127.0.0.1:500", "127.0.0.1:77"]
    ends = [f"{address}:10", f"{address}:20"]
    return {
        "world_size": 2,
        "backend": "gloo",
        "ranks": [
            {**common, "rank": 0, "sockets": [*[ends] * links, store]},
            {**common, "rank": 1, "sockets": [*[ends[::-1]] * links, store[::-1], ["192.0.2.2:9", "203.0.113.1:443"]]},
        ],
    }


def test_gloo_on_the_interface_asked_for_passes() -> None:
    check = check_gloo("lo", gloo_report())
    assert check.status == "pass" and check.seen == "gloo over lo: 1 connections between 2 ranks"
    assert check_gloo("lo", gloo_report("127.1.2.3")).status == "pass"
    assert check_gloo("eth0", gloo_report("192.0.2.2", gloo_ifname="eth0")).status == "pass"
    one = {**gloo_report(), "world_size": 1, "ranks": [{**gloo_report()["ranks"][0], "sockets": []}]}
    assert check_gloo("lo", one).status == "pass"


@pytest.mark.parametrize(
    ("report", "seen"),
    [
        (gloo_report("192.0.2.2"), "rank 0 talks over 192.0.2.2 (eth0), not lo"),
        (gloo_report(gloo_ifname="eth0"), "rank 0: GLOO_SOCKET_IFNAME is eth0"),
        (gloo_report(gloo_ifname=None), "GLOO_SOCKET_IFNAME is not set"),
        (gloo_report(links=0), "rank 0 has no connection to another rank"),
    ],
)
def test_gloo_on_another_interface_fails(report: dict[str, Any], seen: str) -> None:
    check = check_gloo("lo", report)
    assert check.status == "fail" and seen in check.seen and check.cause


def nccl_report(nccl: str | None = "2.26.2", *more: str) -> dict[str, Any]:
    paths = ["/env/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so", *more]
    return {"ranks": [{"rank": rank, "nccl": nccl, "libraries": paths} for rank in range(2)]}


NCCL = "/env/lib/python3.11/site-packages/nvidia/nccl/lib/libnccl.so.2"
OWN_PLUGIN, OWN_FABRIC = "/env/lib/libnccl-net-ofi.so", "/env/lib/libfabric.so.1.28.0"
OWN = (OWN_PLUGIN, OWN_FABRIC)


@pytest.mark.parametrize(
    ("changes", "report", "seen"),
    [
        ({}, nccl_report("2.26.2", NCCL, *OWN), None),
        (
            {"layers": (CRAY, PLUGIN)},
            nccl_report("2.26.2", NCCL, OWN_PLUGIN, f"{CRAY.path}/lib64/libfabric.so.1"),
            None,
        ),
        ({"fabric": "any"}, nccl_report("2.26.2", NCCL), None),
        ({"packages": (("nccl", "2.26.2.1", "d"),)}, nccl_report("2.26.2", "/env/lib/libnccl.so.2.26.2", *OWN), None),
        ({"packages": ()}, nccl_report("2.20.5", *OWN), None),
        ({}, nccl_report("2.21.5", NCCL, *OWN), "NCCL 2.21.5 is loaded, 2.26.2 was locked (ranks 0, 1)"),
        ({}, nccl_report("2.26.2", "/usr/lib/libnccl.so.2", *OWN), "outside of the artifact"),
        ({}, nccl_report("2.26.2", NCCL, "/usr/lib/libnccl.so.2", *OWN), "two copies of NCCL"),
        ({}, nccl_report("2.26.2", *OWN), "no libnccl is mapped"),
        ({}, nccl_report("2.26.2", NCCL), "aws-ofi-nccl is not mapped"),
        (
            {},
            nccl_report("2.26.2", NCCL, OWN_PLUGIN, "/opt/amazon/efa/lib/libfabric.so.1"),
            "libfabric is /opt/amazon/efa/lib/libfabric.so.1, not the one built for the artifact",
        ),
        (
            {"layers": (CRAY, PLUGIN)},
            nccl_report("2.26.2", NCCL, OWN_PLUGIN, "/usr/lib64/libfabric.so.1"),
            f"not {CRAY.path}",
        ),
        (
            {"layers": (BuiltLayer("nccl", "2.29.7-1", "f"),), "fabric": "any"},
            nccl_report("2.26.2", NCCL),
            "2.29.7 was locked",
        ),
        ({}, nccl_report(None), "NCCL was not used"),
    ],
)
def test_the_libraries_must_be_the_artifact_s(
    changes: dict[str, Any], report: dict[str, Any], seen: str | None
) -> None:
    of = state(**changes)
    check = check_libraries(subject(of), load_fabrics()[of.fabric], report)
    assert check.status == ("fail" if seen else "pass"), check.seen
    assert (seen or "NCCL 2.") in check.seen


def test_an_image_s_plugin_must_be_the_one_that_was_built_though_all_files_are_the_image_s() -> None:
    of = state()
    image = subject(of, isolated=True)
    good = nccl_report("2.26.2", NCCL, *OWN)
    assert check_libraries(image, load_fabrics()["efa"], good).status == "pass"
    other = nccl_report("2.26.2", NCCL, "/opt/amazon/ofi-nccl/lib/libnccl-net.so", OWN_FABRIC)
    assert check_libraries(image, load_fabrics()["efa"], other).status == "fail"


def test_nccl_s_version_is_the_layer_s_or_the_package_s() -> None:
    assert state().nccl == "2.26.2"
    assert state(layers=(BuiltLayer("nccl", "2.29.7-1", "f"),)).nccl == "2.29.7"
    assert state(packages=()).nccl == ""


def test_the_largest_all_reduce_is_held_against_the_floor() -> None:
    rows = [{"bytes": 65536, "busbw": 9.0}, {"bytes": 1 << 24, "busbw": 3.0}]
    report = {"world_size": 4, "backend": "gloo", "bandwidth": rows}
    assert check_bandwidth(report, 0, "").seen == "3 GB/s at 16 MiB"
    assert check_bandwidth(report, 3.0, "the site").status == "pass"
    low = check_bandwidth(report, 3.1, "the site")
    assert low.status == "fail" and low.expected == "at least 3.1 GB/s (the site's busbw_floor)"
    assert low.evidence["table"] == rows
    assert check_bandwidth({**report, "bandwidth": []}, 0, "").status == "fail"
    assert check_bandwidth({"world_size": 1}, 5, "").status == "pass"


def test_a_recipe_s_floor_reaches_verification() -> None:
    table = VerifySettings(busbw_floor=40.0).as_state()
    assert parse_settings(json.loads(json.dumps(table))).busbw_floor == 40.0


def site_file(tmp_path: Path, text: str) -> FabricTable:
    (tmp_path / "site.toml").write_text(text)
    return load_site({"HOME": str(tmp_path), "ENVBUILD_SITE": str(tmp_path / "site.toml")}).fabric


def test_a_site_describes_its_network(tmp_path: Path) -> None:
    found = site_file(
        tmp_path,
        '[fabric]\ninterface = "hsn0"\nbusbw_floor = { cxi = 80, socket = 1.5 }\n'
        '[fabric.variables]\nNCCL_IB_GID_INDEX = "3"\n',
    )
    assert found == FabricTable("hsn0", {"cxi": 80.0, "socket": 1.5}, {"NCCL_IB_GID_INDEX": "3"})
    assert site_file(tmp_path, "") == FabricTable()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[fabric.busbw_floor]\nroce = 1", "unknown fabric 'roce'"),
        ("[fabric.busbw_floor]\nib = -1", "at least 0"),
        ('[fabric.variables]\nHTTPS_PROXY = "x"', "'HTTPS_PROXY' is no variable of NCCL"),
        ('[fabric.variables]\nLD_LIBRARY_PATH = "x"', "'LD_LIBRARY_PATH' is no variable of NCCL"),
        ('[fabric.variables]\nFI_LOG_LEVEL = "x\\ny"', "is not one line of text"),
        ('[fabric]\ninterface = "a b"', "does not match"),
        ('[fabric]\ninterfaces = "a"', "unknown key 'interfaces'"),
    ],
)
def test_mistakes_of_a_site_are_named(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        site_file(tmp_path, text)


TOY = """
[fabrics.toynet]
title = "a network of toys, by libfabric"
nccl_net = "AWS Libfabric"
names = ["AWS Libfabric"]
provider = "toy"
run_on = ""
source = "https://toys.example.org"
date = "2026-11-22"
interfaces = "toy"
signs = '\\bTOY_'

[fabrics.toynet.adapter]
called = ["ToyNet"]
sysfs = "toynet"
mounted = "/dev/toynet"
devices = "/dev/toynet/*"
resource = "toys.example.org/nic"

[[fabrics.toynet.options]]
layer = "libfabric"
configure = ["--enable-toy", "--enable-verbs"]

[[fabrics.toynet.variables]]
name = "FI_PROVIDER"
value = "toy"
why = "toys only"
source = "https://toys.example.org"
date = "2026-11-22"
"""


@pytest.fixture
def toy(more_rows: Callable[[str, str], None]) -> Iterator[None]:
    """The table with one more row."""
    more_rows("fabrics", TOY)
    load_fabrics.cache_clear()
    yield
    load_fabrics.cache_clear()


def test_a_fabric_is_one_row(toy: None, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        'name = "toys"\ndescription = "toys"\npython = "3.11"\nrequirements = ["torch==2.7.1"]\nfabric = "toynet"\n'
        '[targets.cu126-x86_64]\n[layers.libfabric]\nversion = "2.1.0"\n'
    )
    loaded, target = load_recipe(path), Target.parse("cu126-x86_64")
    assert "toynet" in json_schema(Recipe, id="a", title="b")["properties"]["fabric"]["enum"]
    # compatibility: libfabric has no such provider; source layers: its options take the places of the known ones
    refused = [one.text for one in judge(stack_of(loaded, target, None)) if one.status == "bad"]
    assert any("provider 'toy', which libfabric 2.1.0 does not have" in text for text in refused)
    (layer,) = source_layers(loaded, target)[0]
    assert "--enable-toy" in layer.configure
    assert "--enable-verbs" in layer.configure and "--disable-verbs" not in layer.configure
    # site, job, verification
    site_file = tmp_path / "site.toml"
    site_file.write_text("[fabric]\nbusbw_floor = { toynet = 3 }\n")
    site = load_site({"HOME": str(tmp_path), "ENVBUILD_SITE": str(site_file)}).fabric
    assert fabric_variables(find_fabric("toynet"), site, "cuda")["FI_PROVIDER"] == "toy"
    assert preflight_devices("toy") == "/dev/toynet/*"
    # preflight, as the job's script asks it
    assert "no toy device" in missing_provider("toy", str(tmp_path / "dev/*"), {})
    assert missing_provider("toy", str(path), {}) == ""
    # doctor and lint-job
    (tmp_path / "sys/class/toynet/toy0").mkdir(parents=True)
    (found,) = adapters(Host({}, root=tmp_path))
    assert found.status == "warn" and found.facts["kinds"] == ["toynet"]
    assert "/dev/toynet is not here" in found.summary
    variable = "env: [{name: FI_PROVIDER, value: toy}]"
    pod = f"kind: Pod\nspec: {{containers: [{{image: a, command: [torchrun, t.py], {variable}}}]}}"
    assert [one.value for one in lint_manifest(pod, "pod.yaml") if one.id == "efa-device"] == ["toys.example.org/nic"]
