"""`envbuild init` on text that is valid and unusual: nothing gets lost in silence, and nothing is added."""

from __future__ import annotations

from pathlib import Path

from lab.drafts import draft_of


def test_a_comment_that_ends_with_a_backslash_takes_no_requirement_with_it(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("a==1\n# b==2 \\\nc==3\nd==4 \\\n# why\ne==5\n")
    _, recipe = draft_of(tmp_path / "requirements.txt")
    assert recipe.requirements == ("a==1", "c==3", "d==4", "e==5")


def test_a_requirement_with_its_name_and_egg(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text(
        "a[x] @ git+https://host.example/a@v1#egg=a\ngit+ssh://git@host.example/b#egg=b\n"
        "c@git+https://host.example/c#egg=c&subdirectory=py\n"
    )
    draft, recipe = draft_of(tmp_path / "requirements.txt")
    assert [text.partition("#")[0] for text in recipe.requirements] == [
        "a[x] @ git+https://host.example/a@v1", "b @ git+ssh://git@host.example/b", "c @ git+https://host.example/c",
    ]  # fmt: skip
    assert draft.lost == ()


def test_a_run_of_a_dockerfile_with_comments_and_here_documents(tmp_path: Path) -> None:
    text = r"""FROM python:3.11
RUN pip install a # why not b
RUN <<"EOF" bash -e
apt-get install -y git \
    vim  # an editor
# pip install c
pip install d git+https://host.example/e#egg=e && pip install f
EOF
RUN pip install g \

    # a comment
    h \
    && pip install i
"""
    (tmp_path / "Dockerfile").write_text(text)
    draft, recipe = draft_of(tmp_path / "Dockerfile")
    assert recipe.requirements == ("a", "d", "e @ git+https://host.example/e", "f", "g", "h", "i")
    assert recipe.image.packages == ("git", "vim")
    assert [entry.text for entry in draft.lost] == ["bash -e"]


def test_a_project_whose_extras_name_its_own_extras(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("""\
[project]
name = "My.Train"
dependencies = ["numpy"]
[project.optional-dependencies]
gpu = ["triton", "my-train[all]"]
Log_It = ["rich"]
all = ["my_train [gpu, log-it]", "my-train[gone]"]
[dependency-groups]
dev = ["pytest", "My.Train[log-it]", "my-train"]
""")
    assert draft_of(tmp_path / "pyproject.toml", groups=("all",))[1].requirements == ("numpy", "triton", "rich")
    draft, recipe = draft_of(tmp_path / "pyproject.toml", groups=("dev",))
    assert recipe.requirements == ("numpy", "pytest", "rich")
    said = {entry.text for entry in draft.lost if entry.reason.startswith("the project itself")}
    assert said == {"my-train[gone]", "my-train"}


def test_an_extra_that_is_spelled_otherwise_and_one_that_there_is_not(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("""\
[project]
name = "a"
[project.optional-dependencies]
Dev_Tools = ["rich"]
docs = ["sphinx"]
[tool.poetry.extras]
none = ["numpy"]
""")
    draft, recipe = draft_of(tmp_path / "pyproject.toml", groups=("dev-tools", "doc", "none"))
    assert recipe.requirements == ("rich",)
    said = {entry.text: entry.reason for entry in draft.lost if entry.place == "--extra"}
    assert said == {"doc": "no statement belongs to it; did you mean 'docs'? Accepted: Dev_Tools, docs, none"}
    (tmp_path / "requirements.txt").write_text("numpy\n")
    draft, _ = draft_of(tmp_path / "requirements.txt", groups=("gpu",))
    assert [(entry.text, entry.reason) for entry in draft.lost] == [("gpu", "no statement belongs to it")]


def test_a_group_that_is_included_by_another_spelling_and_one_that_there_is_not(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("""\
[dependency-groups]
Test_Tools = ["pytest"]
dev = [{include-group = "test.tools"}, "ruff", {include-group = "gone"}, {include-group = "dev"}]
""")
    draft, recipe = draft_of(tmp_path / "pyproject.toml", groups=("dev",))
    assert recipe.requirements == ("pytest", "ruff")
    said = {entry.text for entry in draft.lost if entry.reason == "no other group has this name"}
    assert said == {"{'include-group': 'gone'}", "{'include-group': 'dev'}"}


def test_a_uv_lock_whose_project_requires_its_own_extras(tmp_path: Path) -> None:
    (tmp_path / "uv.lock").write_text("""\
version = 1
[[package]]
name = "my-train"
source = { editable = "." }
[package.metadata]
requires-dist = [
    { name = "numpy" },
    { name = "my-train", extras = ["gpu"], marker = "extra == 'all'" },
    { name = "triton", marker = "extra == 'gpu'" },
]
""")
    draft, recipe = draft_of(tmp_path / "uv.lock", groups=("all", "gpu"))
    assert recipe.requirements == ("numpy", "triton")
    assert [entry.text for entry in draft.lost][:1] == ["my-train[gpu]"]


def test_the_python_of_an_exported_conda_environment(tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text(
        "dependencies:\n- numpy=1.26.4=py310hb13e2d6_0\n- python=3.10.14=hd12c33a_0_cpython\n"
    )
    draft, recipe = draft_of(tmp_path / "environment.yml")
    assert recipe.python == "3.10" and draft.lost == ()
    assert recipe.conda.dependencies == ("numpy=1.26.4=py310hb13e2d6_0", "python 3.10.14 hd12c33a_0_cpython")


def test_a_python_of_conda_by_its_major_version(tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text("dependencies:\n- python=3\n- x\n")
    draft, recipe = draft_of(tmp_path / "environment.yml")
    assert recipe.python == "3.11" and draft.lost == ()


def test_a_conda_environment_with_a_merged_table_tags_and_texts_in_the_place_of_lists(tmp_path: Path) -> None:
    (tmp_path / "environment.yml").write_text("""\
base: &base {channels: [bioconda], variables: {A: "1"}}
<<: *base
dependencies: !packages
- tqdm
- pip: einops
- pip: !more [rich]
platforms: linux-64
""")
    draft, recipe = draft_of(tmp_path / "environment.yml")
    assert recipe.conda.channels == ("bioconda",) and recipe.image.env == {"A": "1"}
    assert recipe.conda.dependencies == ("tqdm",) and recipe.conda.requirements == ("rich",)
    lost = {entry.text.partition(":")[0]: (entry.place.rpartition(":")[2], entry.reason) for entry in draft.lost}
    assert lost["{'pip'"] == ("3", "not a string") and lost["platforms"] == ("7", "not a list")
