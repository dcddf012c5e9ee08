"""`envbuild init`: which pins of a lock are for this environment is in the dependencies between its packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.drafts import draft_of

_REGISTRY = 'source = { registry = "https://pypi.example/simple" }'


def row(name: str, version: str, dependencies: str = "", registry: str = _REGISTRY) -> str:
    return f'[[package]]\nname = "{name}"\nversion = "{version}"\n{registry}\ndependencies = [{dependencies}]\n'


def edge(name: str, version: str = "", marker: str = "", index: str = "") -> str:
    parts = [f'name = "{name}"']
    parts += [f'version = "{version}"'] if version else []
    parts += [f'source = {{ registry = "{index}" }}'] if index else []
    parts += [f'marker = "{marker}"'] if marker else []
    return f"{{ {', '.join(parts)} }},"


CPU, CU126 = "https://download.pytorch.org/whl/cpu", "https://download.pytorch.org/whl/cu126"
UV = (
    'version = 1\nrequires-python = ">=3.10"\n[[package]]\nname = "my-train"\nversion = "1"\n'
    'source = { editable = "." }\ndependencies = ['
    + edge("tqdm")
    + edge("idna", "2.10", "extra == 'extra-8-my-train-old'")
    + edge("idna", "3.10", "extra != 'extra-8-my-train-old'")
    + "]\n[package.optional-dependencies]\ncpu = ["
    + edge("torch", "2.7.1+cpu", index=CPU)
    + "]\ncu126 = ["
    + edge("torch", "2.7.1+cu126", index=CU126)
    + "]\nold = []\n[package.metadata]\nrequires-dist = [\n"
    + '{ name = "tqdm" }, { name = "idna" }, { name = "torch", marker = "extra == \'cpu\'" },\n'
    + '{ name = "torch", marker = "extra == \'cu126\'" } ]\n'
    + row("tqdm", "4.67.1", edge("colorama", marker="sys_platform == 'win32'") + edge("pin", "1"))
    + row("colorama", "0.4.6")
    + row("idna", "2.10")
    + row("idna", "3.10")
    + row(
        "pin",
        "1",
        edge("only-x86", marker="platform_machine == 'x86_64'") + edge("tomli", marker="python_full_version < '3.11'"),
    )
    + row("only-x86", "2")
    + row("tomli", "2.2.1")
    + row("torch", "2.7.1+cpu", registry=f'source = {{ registry = "{CPU}" }}')
    + row(
        "torch",
        "2.7.1+cu126",
        edge("nvidia-cuda-runtime-cu12", marker="sys_platform == 'linux'") + edge("pin", "1"),
        f'source = {{ registry = "{CU126}" }}',
    )
    + row("nvidia-cuda-runtime-cu12", "12.6.77")
)


@pytest.mark.parametrize(
    ("extra", "torch", "idna"), [("cpu", "cpu", "3.10"), ("cu126", "cu126", "3.10"), ("old", "", "2.10")]
)
def test_the_pins_of_uv_are_those_of_the_extra(tmp_path: Path, extra: str, torch: str, idna: str) -> None:
    (tmp_path / "uv.lock").write_text(UV)
    draft, recipe = draft_of(tmp_path / "uv.lock", target=None, groups=(extra,))
    constraints = " ".join(recipe.constraints)
    assert f"idna=={idna}" in constraints and ("nvidia" in constraints) is (torch == "cu126")
    (target,) = recipe.targets
    assert target.startswith(f"{torch or 'cpu'}-")
    assert draft.warning.endswith("choose --extra cu126") if not torch else not draft.warning
    expected = (f"torch==2.7.1+{torch}",) if torch else ()
    assert recipe.targets[target].requirements == expected
    lost = {entry.text: entry.reason for entry in draft.lost}
    assert lost["colorama==0.4.6"].startswith("for another operating system")
    assert lost["tomli==2.2.1"] == "not for Python 3.11 on Linux"
    if torch != "cu126":
        assert lost["nvidia-cuda-runtime-cu12==12.6.77"] == "belongs to cu126: carry it with --extra cu126"
    _, recipe = draft_of(tmp_path / "uv.lock", target="cpu-aarch64", groups=("cpu",))
    assert not any("only-x86" in one for one in recipe.constraints)


def test_markers_at_the_dependents_of_a_poetry_lock(tmp_path: Path) -> None:
    rows = "".join(
        f'[[package]]\nname = "{name}"\nversion = "1.0"\ngroups = ["main"]\n[package.dependencies]\n{needs}\n'
        for name, needs in {
            "jupyter": 'pywin32 = {version = ">=300", markers = "sys_platform == \\"win32\\""}\ntraitlets = "*"',
            "pywin32": 'only-there = "*"',
            "only-there": "",
            "traitlets": 'ipython = {version = "*", optional = true}',
            "ipython": 'traitlets = "*"',
        }.items()
    )
    (tmp_path / "poetry.lock").write_text(f'{rows}[metadata]\nlock-version = "2.0"\npython-versions = ">=3.10"\n')
    draft, recipe = draft_of(tmp_path / "poetry.lock")
    assert [one.partition("=")[0] for one in recipe.requirements] == ["jupyter", "traitlets", "ipython"]
    lost = {entry.text for entry in draft.lost if entry.reason.startswith("for another operating system")}
    assert lost == {"pywin32==1.0", "only-there==1.0"}
