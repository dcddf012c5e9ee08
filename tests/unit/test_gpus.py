"""Whether code for GPUs runs on a chip: names, rules, the check on files, and jobs on a site with other GPUs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab.artifacts import frame, make_venv
from unit.gpu_files import bundle, fatbin

from envbuild.base.errors import RecipeError, VerificationError
from envbuild.base.toml import Document
from envbuild.build.commit import check_unverified_gpus
from envbuild.compat.judge import gpu_findings
from envbuild.compat.stack import Stack
from envbuild.contract.receipt import recorded_gpu_code
from envbuild.contract.verification import VerifySettings
from envbuild.data import load_table
from envbuild.doctor import machine
from envbuild.doctor.probe import Host
from envbuild.gpus import (
    NATIVE,
    PTX,
    UNREADABLE,
    Containers,
    chips_named,
    gpu_faults,
    gpu_of,
    gpu_problem,
    library_runs,
    load_chips,
    runs,
)
from envbuild.job_inputs import check_gpus as check_site
from envbuild.jobs.model import JobArtifact, JobInputs
from envbuild.jobs.schedulers.slurm import _partitions
from envbuild.recipe.load import decode_recipe
from envbuild.recipe.targets import Target
from envbuild.site.jobs import NodeTable
from envbuild.site.settings import Site
from envbuild.verify.elf_files import folder_gpu_code, scan_elf
from envbuild.verify.static_checks import check_gpus

ELF = b"\x7fELF\x02\x01" + bytes(12) + (62).to_bytes(2, "little") + bytes(40)
GPUS = Path(__file__).parents[2] / "docs/reference/gpus.md"
TORCH = "lib/python3.11/site-packages/torch/lib/libtorch_cuda.so"
# The codes of a library → the GPU → how it runs there.
PLANTED = [
    (fatbin("sm_80", "sm_86", "sm_90"), "h100", NATIVE),
    (fatbin("sm_80", "sm_86"), "h100", ""),  # no code for it
    (fatbin("sm_80", "compute_80"), "h100", PTX),  # PTX only
    (fatbin("compute_90"), "sm_90", PTX),
    (fatbin("sm_80", "compute_100"), "gh200", ""),  # its PTX is too new
    (fatbin("sm_80"), "rtx3090", NATIVE),  # an older minor version
    (fatbin("sm_86"), "a100", ""),  # a newer one
    (fatbin("sm_90a"), "h200", NATIVE),
    (fatbin("sm_100a"), "sm_103", ""),  # for one architecture
    (fatbin("sm_100f"), "b300", NATIVE),  # for a family
    (fatbin("sm_103f"), "b200", ""),
    (fatbin("sm_100f"), "rtx5090", ""),
    (fatbin("compute_90a"), "b200", ""),
    (fatbin("compute_100f"), "sm_103", PTX),
    (fatbin("compute_100f"), "sm_120", ""),
    (fatbin("sm_80", "sm_90") * 378 + fatbin("sm_120a") * 3, "rtx5090", ""),  # only some kernels
    (bundle("gfx90a:xnack-", "gfx1100"), "mi250x", NATIVE),
    (bundle("gfx90a"), "mi210", NATIVE),
    (bundle("gfx90a:xnack+"), "mi250x", ""),
    (bundle("gfx90a:xnack+"), "gfx90a:xnack+", NATIVE),
    (bundle("gfx942", "gfx1100"), "mi250x", ""),
    (bundle("gfx9-4-generic"), "mi300x", NATIVE),
    (bundle("gfx11-generic"), "gfx1101", NATIVE),  # a chip without a row
    (bundle("gfx12-generic"), "gfx1101", ""),
    (bundle("gfx90a:sramecc-:xnack+"), "gfx90a:xnack+", ""),  # the mode that is not named is the driver's
    (bundle("gfx90a:sramecc-:xnack+"), "gfx90a:sramecc-:xnack+", NATIVE),
]


def subject(target: str = "cu126-x86_64") -> Any:
    return SimpleNamespace(target=Target.parse(target))


def environment(root: Path, library: bytes) -> Path:
    make_venv(root, {**frame(target="cu126-x86_64"), TORCH: ELF + library, "lib/libplain.so": ELF})
    return root


@pytest.mark.parametrize(("library", "gpu", "way"), PLANTED)
def test_planted_libraries(tmp_path: Path, library: bytes, gpu: str, way: str) -> None:
    report = scan_elf(environment(tmp_path, library), 62, gpu=True)
    (chip,) = chips_named(gpu)
    (containers,) = report.gpu_code.values()
    assert library_runs(containers, chip) == way
    survey: Any = SimpleNamespace(elf=report)
    check = check_gpus(subject(), survey, (gpu,))
    assert check.status == ("pass" if way else "fail")
    assert (f"1 libraries {way}" if way else f"no code for {chip.name}") in check.seen
    assert recorded_gpu_code({"checks": [{"name": "gpus", "evidence": check.evidence}]}) == report.gpu_code


def test_the_check_says_what_a_library_has(tmp_path: Path) -> None:
    report = scan_elf(environment(tmp_path, fatbin("sm_120", "sm_80", "compute_120")), 62, gpu=True)
    survey: Any = SimpleNamespace(elf=report)
    check = check_gpus(subject(), survey, ("hopper", "a100"))
    has = "it has sm_80, compute_120, sm_120; its PTX is for others"
    assert check.seen.endswith(f"libtorch_cuda.so has no code for sm_90 (hopper): {has}")
    assert "no GPUs are named" in check_gpus(subject(), survey, ()).seen
    report.gpu_code = {"t/libtorch_cuda_linalg.so": Containers({("sm_80",): 1})}
    check = check_gpus(subject(), survey, ("t4",))
    assert check.status == "pass" and "not all need these: t/libtorch_cuda_linalg.so has no code" in check.seen
    report.gpu_code = {"libbitsandbytes_rocm64.so": Containers({("gfx90a",): 1})}
    assert check_gpus(subject(), survey, ("h100",)).status == "pass"
    report.gpu_code = {"a": Containers({(UNREADABLE,): 1}), "b": Containers({("sm_80",): 381, ("sm_90a",): 3})}
    assert check_gpus(subject(), survey, ("h100",)).seen == (
        "b has no code for sm_90 (h100): it has some in only 3 of 384 parts"
    )
    check = check_gpus(subject(), survey, ("a100",))
    assert check.seen.endswith("not read, because their code is compressed: a")
    recorded = recorded_gpu_code({"checks": [{"name": "gpus", "evidence": check.evidence}]})
    assert recorded == report.gpu_code and not gpu_faults(recorded, ["a100"])


def test_a_target_for_cpus_is_not_read(tmp_path: Path) -> None:
    assert scan_elf(environment(tmp_path, fatbin("sm_80")), 62).gpu_code == {}


# ---- names
def test_gpus_that_nvlink_may_join_across_nodes_are_gpus_of_the_table() -> None:
    row = load_table("gpus")["multi_node_nvlink"]
    assert set(row["racks"]) < set(row["names"]) <= {name for chip in load_chips().values() for name in chip.names}


def test_names_stand_for_chips() -> None:
    assert [one.name for one in chips_named("blackwell")] == ["sm_100", "sm_103", "sm_120", "sm_121"]
    assert gpu_problem("gh200") is gpu_problem("sm_200") is gpu_problem("gfx1151") is None
    assert "did you mean 'h100'" in str(gpu_problem("H100")) and gpu_problem("sm90")
    names = [name for chip in load_chips().values() for name in {chip.family, *chip.names}]
    assert all(re.fullmatch("[a-z0-9]+", name) for name in names)
    own = [name for chip in load_chips().values() for name in chip.names]
    assert len(own) == len(set(own)) and not {chip.family for chip in load_chips().values()} & set(own)
    assert all(runs(chip.name, chip) == NATIVE for chip in load_chips().values())


@pytest.mark.parametrize(
    ("name", "gpu"), [("nvidia_h100_80gb_hbm3", "h100"), ("a100", "a100"), ("MI250X", "mi250x"), ("tesla", None)]
)
def test_names_of_schedulers(name: str, gpu: str | None) -> None:
    assert gpu_of(name) == gpu


def test_the_page_has_every_chip() -> None:
    text = GPUS.read_text()
    for chip in load_chips().values():
        assert f"| `{chip.name}` | `{chip.family}` | {', '.join(f'`{name}`' for name in chip.names)} |" in text


# ---- recipes and sites
RECIPE = """\
name = "lab"
description = "For the lab"
python = "3.11"
requirements = ["torch==2.9.1+cu126"]
[targets.cpu-x86_64]
[targets.cu126-x86_64]
"""


def loaded(text: str) -> Any:
    import tomllib

    return decode_recipe(Document(Path("lab.toml"), text, tomllib.loads(text)))


def test_gpus_of_a_recipe_count_in_its_digest_only_if_it_names_some() -> None:
    named = loaded(f'{RECIPE}gpus = ["h100"]\n')
    assert named.recipe.targets["cu126-x86_64"].gpus == ("h100",) and named.digest != loaded(RECIPE).digest
    assert loaded(RECIPE).digest == "sha256:557273d8923a4eee49b3380540bbb4f1218821b45ff77944db8352e5fd9a9bbd"


@pytest.mark.parametrize(
    ("gpus", "said"),
    [('["mi250x"]', "'mi250x' is no GPU of target 'cu126-x86_64'"), ('["h1000"]', "did you mean 'h100'")],
)
def test_gpus_of_a_recipe_that_it_cannot_have(gpus: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        loaded(f"{RECIPE}gpus = {gpus}\n")


def test_gpus_are_in_the_settings_of_the_verification() -> None:
    settings = replace(loaded(RECIPE).recipe.verify, gpus=("h100",))
    assert settings.as_state()["gpus"] == ("h100",) and "gpus" not in replace(settings, gpus=()).as_state()


def test_the_gpus_of_this_host_and_of_a_partition(tmp_path: Path) -> None:
    bin = tmp_path / "bin"
    bin.mkdir()
    tool = bin / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$*" in *compute_cap*) echo 9.0; echo 9.0;; *) echo "NVIDIA H100, 570.1, 8 MiB";; esac\n'
    )
    tool.chmod(0o755)
    (found,) = machine.gpus(Host({"PATH": f"{bin}:/usr/bin:/bin"}, root=tmp_path))
    assert found.facts["chips"] == ["sm_90"]
    (queue,) = _partitions("gpu*|1:00:00|8|1000|gpu:h100:4(S:0-1),gpu:a100:2|3\n")
    assert (queue.gpus, queue.gpu_types) == (6, ("a100", "h100"))


def test_the_chip_of_an_amd_gpu(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    for number, text in enumerate(["simd_count 0\ngfx_target_version 0\n", "simd_count 4\ngfx_target_version 90010\n"]):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text(text)
    (found,) = machine.gpus(Host({"PATH": "/nonexistent"}, root=tmp_path))
    assert found.facts["chips"] == ["gfx90a"]


# ---- envbuild check
@pytest.mark.parametrize(
    ("torch", "cuda", "gpus", "said"),
    [
        ("2.11.0", "13.0", (), "note: PyPI's torch 2.11.0 runs natively on sm_75, sm_80, sm_86, sm_87, sm_89, sm_90"),
        ("2.9.1", "12.8", ("volta",), "good: PyPI's torch 2.9.1 runs natively on sm_70, sm_75"),
        ("2.7.1+cu126", "12.6", ("b200",), "bad: PyPI's torch 2.7.1: libtorch_cuda.so has no code for sm_100 (b200)"),
        ("2.11.0", "13.0", ("v100",), "bad: PyPI's torch 2.11.0: libtorch_cuda.so has no code for sm_70 (v100)"),
        ("2.9.1+cu126", "12.6", ("h100",), "note: whether it runs on h100"),
        ("2.9.1+cu126", "12.6", (), None),
    ],
)
def test_check_says_on_which_gpus_torch_runs(torch: str, cuda: str, gpus: tuple[str, ...], said: str | None) -> None:
    stack = Stack("x86_64", "3.11", "2.28", cuda=cuda, torch=torch, torch_origin="lock")
    found = [f"{one.status}: {one.text}" for one in gpu_findings(stack, gpus, {})]
    assert not found if said is None else found[0].startswith(said)


def test_check_says_what_an_artifact_has() -> None:
    built = {"a": Containers({("sm_80", "compute_80"): 9}), "b": Containers({("sm_90",): 1, ("compute_75",): 1})}
    built |= {"lib/libcusparseLt.so.0": Containers({("sm_120",): 1}), "c": Containers({(UNREADABLE,): 1})}
    (found,) = gpu_findings(Stack("x86_64", "3.11", "2.28", cuda="13.0"), (), built)
    assert found.text.startswith("its artifact here runs by PTX on sm_80, sm_86, sm_87, sm_89, sm_90, sm_100")
    (found,) = gpu_findings(Stack("x86_64", "3.11", "2.28", cuda="13.0"), ("h100",), built)
    assert found.status == "good" and "not all need this: lib/libcusparseLt.so.0 has no code" in found.text
    (found,) = gpu_findings(Stack("x86_64", "3.11", "2.28", rocm="6.4"), (), {"a": Containers({("gfx942",): 1})})
    assert found.text == "its artifact here runs natively on gfx942"


# ---- jobs, and builds without verification
def opened(path: Path, receipt: dict[str, Any] | None, target: str = "cu126-x86_64") -> JobInputs:
    artifact = JobArtifact("venv", str(path), "sha256:0", "lab", target, "/python")
    return JobInputs(artifact, receipt=receipt)


def site(*gpus: str) -> Site:
    return Site("lab", node=NodeTable(gpu_types=gpus))


def receipt(*codes: str) -> dict[str, Any]:
    return {"checks": [{"name": "gpus", "evidence": {"libraries": {"libtorch_cuda.so": {" ".join(codes): 378}}}}]}


def test_a_job_on_other_gpus_is_refused(tmp_path: Path) -> None:
    nothing = tmp_path / "venv"
    check_site(opened(nothing, receipt("sm_80", "sm_90")), site("h100", "ampere"))
    check_site(opened(nothing, receipt("sm_80")), site())
    check_site(opened(nothing, receipt("sm_80"), "cpu-x86_64"), site("h100"))
    check_site(opened(nothing, {"checks": []}), site("h100"))  # of an earlier version
    with pytest.raises(VerificationError, match=r"no code for sm_90 \(h100\)") as caught:
        check_site(opened(nothing, receipt("sm_80")), site("h100"))
    assert caught.value.exit_code == 5 and "[node] gpu_types" in str(caught.value.hint)
    with pytest.raises(VerificationError, match="is for cu126-x86_64, and the GPUs of site lab are mi250x"):
        check_site(opened(nothing, receipt("sm_80")), site("mi250x"))


def test_without_a_receipt_its_files_are_read(tmp_path: Path) -> None:
    root = environment(tmp_path, fatbin("sm_80"))
    check_site(opened(root, None), site("a100"))
    with pytest.raises(VerificationError, match=f"{TORCH} has no code for sm_90"):
        check_site(opened(root, None), site("h100"))


@pytest.mark.parametrize("where", ["recipe", "site"])
def test_a_build_without_verification_is_refused_too(tmp_path: Path, where: str) -> None:
    root = environment(tmp_path, fatbin("sm_80"))
    state: Any = SimpleNamespace(
        target="cu126-x86_64",
        artifact="venv",
        recipe="lab",
        verify=VerifySettings(gpus=("h100",) if where == "recipe" else ()),
    )

    def read(target: Target) -> dict[str, Containers]:
        return folder_gpu_code(root, target)

    with pytest.raises(VerificationError, match=r"the venv of lab does not run on h100: .*no code for sm_90"):
        check_unverified_gpus(state, site("a100" if where == "recipe" else "h100"), read)
    check_unverified_gpus(state, site("a100"), read) if where == "site" else None


@pytest.mark.parametrize(
    "evidence", [None, {}, {"libraries": []}, {"libraries": {"a": 1}}, {"libraries": {"a": {"x": "y"}}}]
)
def test_a_receipt_that_is_no_evidence(evidence: Any) -> None:
    assert recorded_gpu_code({"checks": [{"name": "gpus", "evidence": evidence}]}) == {}
