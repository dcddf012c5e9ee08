"""`envbuild init` as a command: what it writes, prints and refuses; environments; the dialogue on a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from lab.drafts import draft_of

from envbuild.base.errors import UsageError
from envbuild.cli import init
from envbuild.cli.commands import cli
from envbuild.doctor.probe import HostFinding
from envbuild.imports.compose import compose
from envbuild.recipe.load import load_recipe


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "requirements.txt").write_text("torch==2.7.1\nnumpy\n-e .\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(cli, ["init", *arguments], input=typed)


def test_the_recipe_is_written_and_the_rest_is_listed(folder: Path) -> None:
    done = run("lab", "--from", "requirements.txt", "--target", "cu126-x86_64")
    assert done.exit_code == 0, done.output
    assert done.stdout == "recipes/lab/recipe.toml\n"
    assert "requirements.txt:3: -e ." in done.stderr
    assert "next: envbuild show lab · envbuild lock lab · envbuild venv lab" in done.stderr
    recipe = load_recipe(folder / "recipes/lab/recipe.toml").recipe
    assert recipe.targets["cu126-x86_64"].requirements == ("torch==2.7.1+cu126",)
    assert (folder / "recipes/lab").stat().st_mode & 0o777 == 0o755
    assert [path.name for path in (folder / "recipes").iterdir()] == ["lab"]


def test_an_existing_recipe_stays(folder: Path) -> None:
    (folder / "recipes/lab").mkdir(parents=True)
    for more in ([], ["--dry-run"]):
        done = run("lab", "--from", "requirements.txt", *more)
        assert isinstance(done.exception, UsageError) and "recipes/lab exists already" in done.exception.message
    assert list((folder / "recipes/lab").iterdir()) == []


def test_a_dry_run_prints_the_recipe_and_writes_nothing(folder: Path) -> None:
    done = run("lab", "--from", "requirements.txt", "--dry-run")
    assert 'name = "lab"' in done.stdout and done.stdout.endswith("recipes/lab/recipe.toml\n")
    assert not (folder / "recipes").exists()


def test_json_lists_everything(folder: Path) -> None:
    said = json.loads(run("lab", "--from", "requirements.txt", "--json").stdout)
    assert said["path"] == "recipes/lab/recipe.toml" and said["next"][1] == "envbuild lock lab"
    assert [one["text"] for one in said["carried"]] == ["torch==2.7.1", "numpy"]
    left, build = said["not_carried"]
    assert "local version of its target's build: torch==2.7.1+" in build["reason"]
    assert left["place"] == "requirements.txt:3" and left["text"] == "-e ." and "[project]" in left["reason"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no source"),
        (["Bad", "--from", "requirements.txt"], "'Bad' is not the name of a recipe"),
        (["--from", "gone.txt"], "gone.txt: no such file or folder"),
        (["--from", "recipes"], "recipes: no such file or folder"),
        (["--from", "empty"], "no file of a known format"),
        (["--from", "requirements.txt", "--target", "cpu"], "not a target"),
    ],
)
def test_refusals(folder: Path, arguments: list[str], said: str) -> None:
    (folder / "empty").mkdir()
    done = run(*arguments)
    assert isinstance(done.exception, UsageError) and said in done.exception.message


def test_the_name_is_that_of_the_project(folder: Path) -> None:
    (folder / "pyproject.toml").write_text('[project]\nname = "My.Train"\ndependencies = ["tqdm"]\n')
    done = run("--from", "pyproject.toml")
    assert done.stdout == "recipes/my.train/recipe.toml\n" and "the recipe does not name torch" in done.stderr


@pytest.mark.parametrize(
    ("source", "name"), [("requirements.txt", "my_train"), ("deps/gpu.txt", "my_train"), ("../other/a.txt", "other")]
)
def test_else_it_is_that_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str) -> None:
    (top := tmp_path / "My Train").mkdir()
    (top / source).parent.mkdir(exist_ok=True)
    (top / source).write_text("torch\n")
    monkeypatch.chdir(top)
    assert run("--from", source, "--dry-run").stdout.endswith(f"recipes/{name}/recipe.toml\n")


def test_without_a_source_it_asks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = iter(["lab", "torch numpy>=2", "cpu-x86_64", "docker"])
    monkeypatch.setattr(init.click, "prompt", lambda *_, **__: next(prompts))
    monkeypatch.setattr(init.sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    init.init_command.main(["--json"], standalone_mode=False)
    recipe = load_recipe(folder / "recipes/lab/recipe.toml").recipe
    assert recipe.requirements == ("numpy>=2",) and recipe.targets["cpu-x86_64"].requirements == ("torch",)


@pytest.mark.parametrize(
    ("floor", "adapter", "fabric"),
    [("", "", "any"), ("", "InfiniBand", "ib"), ("", "Ethernet", "ib"), ("efa", "InfiniBand", "efa")],
)
def test_the_fabric_that_it_proposes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, floor: str, adapter: str, fabric: str
) -> None:
    if floor:
        (folder / "site.toml").write_text(f"[fabric]\nbusbw_floor = {{ {floor} = 80 }}\n")
        monkeypatch.setenv("ENVBUILD_SITE", str(folder / "site.toml"))
    kinds = [{"InfiniBand": "ib", "Ethernet": "roce"}[adapter]] if adapter else []
    found = HostFinding("adapters", "ok", "", facts={"kinds": kinds})
    monkeypatch.setattr("envbuild.doctor.network.adapters", lambda _: [found])
    answers = {"Packages, separated by blanks": "torch", "Target": "cu126-x86_64"}
    monkeypatch.setattr(init.click, "prompt", lambda text, **given: answers.get(text, given["default"]))
    _, _, _, statements = init._dialogue("lab", None)
    assert [one.text for one in statements if one.kind == "fabric"] == [fabric] * (fabric != "any")
    assert dict(compose("lab", statements, target="cu126-x86_64").data).get("fabric", "any") == fabric


def installed(site: Path, name: str, version: str, **files: str) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file, text in files.items():
        (info / file.replace("_json", ".json")).write_text(text)


def test_a_venv_is_read_without_its_python(tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.12/site-packages"
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.12.3\n")
    installed(site, "torch", "2.7.1", REQUESTED="", INSTALLER="pip\n")
    (site / "torch").mkdir()
    (site / "torch/version.py").write_text("cuda: Optional[str] = '12.6'\nhip: Optional[str] = None\n")
    installed(site, "numpy", "2.2.6", INSTALLER="pip\n")
    installed(site, "own", "1.0", REQUESTED="", direct_url_json='{"url": "file:///home/me/own", "dir_info": {}}')
    draft, recipe = draft_of(tmp_path, target=None)
    assert recipe.python == "3.12" and recipe.requirements == ()
    assert recipe.constraints == ("numpy==2.2.6", "torch==2.7.1")
    (name,) = recipe.targets
    assert name.startswith("cu126-") and recipe.targets[name].requirements == ("torch==2.7.1+cu126",)
    assert [one.text for one in draft.lost] == ["own @ file:///home/me/own", "torch==2.7.1"]


def test_a_conda_environment(tmp_path: Path) -> None:
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / "conda-meta/history").write_text("")
    for name, version, build in (("python", "3.12.11", "h0_cpython"), ("numpy", "2.2.6", "py312_0")):
        record = {
            "name": name,
            "version": version,
            "build": build,
            "subdir": "linux-64",
            "fn": f"{name}.conda",
            "url": f"https://conda.anaconda.org/conda-forge/linux-64/{name}-{version}-{build}.conda",
        }
        (tmp_path / f"conda-meta/{name}-{version}-{build}.json").write_text(json.dumps(record))
    site = tmp_path / "lib/python3.12/site-packages"
    installed(site, "numpy", "2.2.6", INSTALLER="conda\n")
    installed(site, "einops", "0.8.1", INSTALLER="pip\n", REQUESTED="")
    draft, recipe = draft_of(tmp_path)
    assert recipe.python == "3.12" and recipe.conda.channels == ("conda-forge",)
    assert recipe.conda.dependencies == ("numpy 2.2.6 py312_0", "python 3.12.11 h0_cpython")
    assert recipe.conda.requirements == ("einops",) and recipe.constraints == ("einops==0.8.1",)
    assert draft.lost == ()
