"""The shipped sites, their schema and docs/reference/site.md say what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from envbuild.base.errors import EnvbuildError
from envbuild.base.files import shipped
from envbuild.cli.site import site_command
from envbuild.doctor.batch import contradictions
from envbuild.site.settings import SiteFile, load_site

TOP = Path(__file__).parents[2]
SHIPPED = sorted((TOP / "sites").glob("*.toml"))
SCHEMA = TOP / "docs/site.schema.json"
PAGE = (TOP / "docs/reference/site.md").read_text()
ENV = {"HOME": "/home/ada", "USER": "ada"}


def test_the_schema_file_is_current_and_refuses_what_the_loader_refuses() -> None:
    command = [sys.executable, "-m", "envbuild.site.settings"]
    assert SCHEMA.read_text() == subprocess.run(command, capture_output=True, text=True, check=True).stdout
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for bad in ({"scheduler": {"knd": "slurm"}}, {"scheduler": {"kind": "condor"}}, {"node": {"gpus": -1}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_shipped_site_is_right(file: Path) -> None:
    text = file.read_text()
    jsonschema.validate(tomllib.loads(text), json.loads(SCHEMA.read_text()))
    named = re.match(r"#:schema (\S+)\n# \S", text)
    assert named and (file.parent / named[1]).resolve() == SCHEMA
    site = load_site(ENV, file.stem)
    assert site.name == file.stem
    assert list(contradictions(site)) == []
    assert file.stem == "local" or re.search(r"Never run on", text), "say what hardware it was run on"


def test_the_example_of_the_page_is_a_right_site(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "example.toml").write_text(block)
    site = load_site(ENV, str(tmp_path / "example.toml"))
    assert list(contradictions(site)) == []
    assert site.container.mounts == ("/scratch", "/data:/data")


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_what_a_shipped_site_offers_in_comments_can_be_switched_on(file: Path, tmp_path: Path) -> None:
    """Lines such as `# gpus = 8` are keys that exist, and together they are a right file."""
    text = file.read_text()
    lines = [re.sub(r"^# (?=\[\w+(\.\w+)?\]$|[\w\"./-]+ = \S)", "", line) for line in text.splitlines()]
    on = "\n".join(lines)
    assert file.stem == "pbs-gh200" or on != text
    data = tomllib.loads(on)
    jsonschema.validate(data, json.loads(SCHEMA.read_text()))
    (tmp_path / "on.toml").write_text(on)
    found = contradictions(load_site(ENV, str(tmp_path / "on.toml")))
    assert [one for one in found if one.status == "fail"] == []


def test_huge_pages_without_cpus_or_memory_are_a_fault_of_the_site(tmp_path: Path) -> None:
    text = '[scheduler]\nkind = "kubernetes"\n[kubernetes]\nclaim = "c"\nresources = {"hugepages-2Mi" = "1Gi"}\n'
    for more, count in (("", 1), ('[node]\nmemory = "8G"\n', 0)):
        (tmp_path / "pages.toml").write_text(text + more)
        found = [one for one in contradictions(load_site(ENV, str(tmp_path / "pages.toml"))) if one.status == "fail"]
        assert len(found) == count


def test_the_shipped_sites_are_those_of_the_guides() -> None:
    assert {file.stem for file in SHIPPED} == {
        "aws-eks",
        "aws-parallelcluster",
        "generic-slurm",
        "hyperpod",
        "local",
        "lumi",
        "pbs-gh200",
        "slurm-modules",
    }
    eks, aws, pbs, modules = (
        load_site(ENV, name) for name in ("aws-eks", "aws-parallelcluster", "pbs-gh200", "slurm-modules")
    )
    assert (eks.scheduler.kind, eks.kubernetes.claim, eks.kubernetes.mount) == ("kubernetes", "fsx-pv", "/fsx")
    assert (aws.scheduler.kind, aws.container.runtime, aws.container.mounts) == ("slurm", "pyxis", ("/fsx:/fsx",))
    assert (pbs.scheduler.partition, pbs.scheduler.constraint) == ("blanca", "sales_op=blanca")
    assert (pbs.modules.run, pbs.node.cpus) == (("cray-python/3.11.7", "cuda/12.6"), 288)
    assert pbs.fabric.interface == "hsn0" and pbs.modules.build == pbs.modules.run
    assert (modules.scheduler.launcher, modules.container.runtime) == ("mpirun", "apptainer")
    assert modules.fabric.variables == {"NCCL_IB_GID_INDEX": "3"} and modules.modules.purge
    assert not modules.paths.cache.startswith("/home")


def test_those_of_documentations() -> None:
    lumi, pod, plain = (load_site(ENV, name) for name in ("lumi", "hyperpod", "generic-slurm"))
    assert (lumi.scheduler.partition, lumi.node.gpus, lumi.node.cpus, lumi.node.arch) == ("standard-g", 8, 56, "x86_64")
    assert lumi.fabric.interface == "hsn0,hsn1,hsn2,hsn3" and not lumi.modules.purge
    assert pod.scheduler.auto_resume and pod.container.runtime == "pyxis" and pod.paths.shared.startswith("/fsx/")
    assert plain.scheduler.kind == "slurm" and plain.paths.shared == "/scratch/ada"


@pytest.mark.parametrize("file", SHIPPED, ids=lambda path: path.stem)
def test_a_site_is_copied_with_its_comments(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(site_command, ["show", file.stem, "--file"]).output
    lines = file.read_text().splitlines(keepends=True)
    assert shown == "".join(line for line in lines if not line.startswith("#:schema"))
    done = CliRunner().invoke(site_command, ["init", "--from", file.stem])
    assert done.exit_code == 0 and Path("site.toml").read_text() == shown
    assert load_site({**ENV, "HOME": "/home/x"}, "./site.toml").scheduler == load_site(ENV, file.stem).scheduler


def test_what_cannot_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("faulty.toml").write_text("[scheduler]\nkind = 3\n")
    for line in (["init", "--from", "nowhere"], ["init", "--from", "./faulty.toml"], ["show", "--file"]):
        assert isinstance(CliRunner().invoke(site_command, line).exception, EnvbuildError)
    assert not Path("site.toml").exists()


def test_they_are_bundled_and_listed() -> None:
    bundled = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert bundled["force-include"]["sites"] == "envbuild/_bundled/sites"
    assert shipped("sites") == TOP / "sites"
    listed = json.loads(CliRunner().invoke(site_command, ["list", "--json"]).output)["sites"]
    assert {file.stem for file in SHIPPED} <= {row["name"] for row in listed}


def test_the_page_names_every_key_of_the_job_tables() -> None:
    for table in fields(SiteFile):
        assert table.name in PAGE, table.name
        kind = table.default_factory if callable(table.default_factory) else None
        if table.name in ("debian", "fabric") or kind is None or not is_dataclass(kind):
            continue
        section = PAGE.partition(f"### [{table.name}]")[2].partition("\n### ")[0]
        for key in fields(kind):
            assert f"`{key.name}`" in section, f"[{table.name}] {key.name}"


def test_the_page_s_example_is_right() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    data = tomllib.loads(example)
    jsonschema.validate(data, json.loads(SCHEMA.read_text()))
    assert {"scheduler", "modules", "paths", "container", "node", "fabric"} <= data.keys()
