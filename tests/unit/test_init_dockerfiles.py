"""`envbuild init` reads Dockerfiles as a builder does: variables, copied files, working directories, stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.drafts import draft_of

from envbuild.imports import read_source
from envbuild.imports.compose import compose
from envbuild.imports.statement import Draft
from envbuild.recipe.model import Recipe


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / ".git").mkdir()
    (tmp_path / "requirements.txt").write_text("wrong\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/train.txt").write_text("right\n-r more.txt\n")
    (tmp_path / "sub/more.txt").write_text("more\n")
    return tmp_path


def read(context: Path, text: str, name: str = "Dockerfile") -> tuple[Draft, Recipe]:
    (context / name).parent.mkdir(exist_ok=True)
    (context / name).write_text(text)
    return draft_of(context / name)


@pytest.mark.parametrize(
    "text",
    [
        "COPY sub/train.txt requirements.txt\nRUN pip install -r requirements.txt\n",
        "WORKDIR /app\nCOPY sub/train.txt requirements.txt\nRUN pip install -r requirements.txt\n",
        "WORKDIR /app\nCOPY sub/train.txt requirements.txt\nRUN cd / && pip install -r app/requirements.txt\n",
        "COPY sub/train.txt /tmp/x.txt\nRUN pip install -r /tmp/x.txt\n",
        "COPY sub/train.txt /tmp/\nRUN pip install -r/tmp/train.txt\n",
        "ADD sub /opt/code\nRUN cd /opt/code && pip install -r train.txt\n",
        "COPY . .\nRUN pip install --requirement=sub/train.txt\n",
        "COPY . /src\nWORKDIR /src/sub\nRUN pip install -r ./train.txt\n",
        "WORKDIR /src\nRUN --mount=type=bind,source=sub/train.txt,target=r.txt pip install -r r.txt\n",
        "RUN --mount=type=cache,target=/root/.cache --mount=type=bind,src=sub,dst=/s pip install -r /s/train.txt\n",
        'COPY ["sub/train.txt", "/r.txt"]\nRUN ["pip", "install", "-r", "/r.txt"]\n',
        "ARG DIR=sub\nCOPY ${DIR}/train.txt /r.txt\nRUN pip install -r /r.txt\n",
        "COPY requirements.txt /r.txt\nCOPY sub/train.txt /r.txt\nRUN pip install -r /r.txt\n",
        "COPY <<EOF /r.txt\nright\nmore\nEOF\nRUN pip install -r /r.txt\n",
        "RUN export A=right && B=more; pip install $A ${B} ${C:-}\n",
    ],
)
def test_the_files_of_a_run_are_those_of_the_image(context: Path, text: str) -> None:
    _, recipe = read(context, f"FROM python:3.11\n{text}")
    assert recipe.requirements == ("right", "more")
    if "<<EOF" not in text and "export" not in text:
        _, recipe = read(context, f"FROM python:3.11\n{text}", "docker/Dockerfile-gpu")
        assert recipe.requirements == ("right", "more"), "the context is the folder above"


@pytest.mark.parametrize("name", ["requirements.txt", "/HOST/x.txt", "../x.txt", "sub/train.txt"])
def test_a_file_that_no_instruction_copies_is_not_read(context: Path, name: str) -> None:
    (context / "x.txt").write_text("host\n")
    name = name.replace("/HOST", str(context))
    draft, recipe = read(context, f"FROM python:3.11\nRUN pip install -r {name} tqdm\n")
    assert recipe.requirements == ("tqdm",)
    assert [entry.reason for entry in draft.lost] == [
        "no such file here: name it, or what a command makes it from, with --from"
    ]


def test_two_possible_contexts_are_not_guessed(context: Path) -> None:
    (context / "docker").mkdir()
    (context / "docker/requirements.txt").write_text("inner\n")
    text = "FROM python:3.11\nCOPY requirements*.txt ./\nRUN pip install -r requirements.txt tqdm\n"
    draft, recipe = read(context, text, "docker/Dockerfile")
    assert recipe.requirements == ("tqdm",)
    assert any("cannot tell the build context" in entry.reason for entry in draft.lost)
    assert read(context, text)[1].requirements == ("wrong", "tqdm")


_STAGES = """\
ARG BASE_NAME=builder
ARG VERSION
FROM python:3.12 AS tools
ENV TOOL=1
RUN pip install ruff
FROM python:3.11 AS builder
ARG VERSION
RUN apt-get install -y gcc && python -m venv /opt/venv && /opt/venv/bin/pip install numpy==${VERSION:-2.2.6}
ENV BUILD=1
"""


def test_the_packages_of_a_stage_whose_environment_is_copied(context: Path) -> None:
    draft, recipe = read(
        context, f"{_STAGES}FROM python:3.11-slim\nCOPY --from=builder /opt/venv /opt/venv\nRUN pip install einops\n"
    )
    assert recipe.requirements == ("numpy==2.2.6", "einops") and recipe.image.env == {} and recipe.image.packages == ()
    lost = {entry.text: entry.reason for entry in draft.lost}
    assert lost["ruff"] == lost["gcc"] == lost["TOOL=1"] == "of a stage that is not in the final image"
    _, recipe = read(context, f"{_STAGES}FROM python:3.11-slim\nCOPY --from=1 /opt/venv/lib /usr/local/lib\n")
    assert recipe.requirements == ("numpy==2.2.6",)
    draft, recipe = read(context, f"{_STAGES}FROM python:3.11-slim\nCOPY --from=builder /app/x.bin /usr/bin/\n")
    assert recipe.requirements == ()


def test_a_stage_by_a_variable_is_the_image(context: Path) -> None:
    for given in ("${BASE_NAME}", "$BASE_NAME", "${MISSING:-builder}"):
        _, recipe = read(context, f"{_STAGES}FROM {given} AS app\nRUN pip install einops\n")
        assert recipe.requirements == ("numpy==2.2.6", "einops") and recipe.image.env == {"BUILD": "1"}
        assert recipe.image.packages == ("gcc",) and recipe.python == "3.11"


def test_variables_of_other_stages_are_unknown(context: Path) -> None:
    text = "ARG G=1\nFROM python:3.11 AS a\nENV X=2\nFROM python:3.11\nRUN pip install a==$X b==$G c==1\n"
    draft, recipe = read(context, text)
    assert recipe.requirements == ("c==1",)
    assert {"a==$X", "b==$G"} <= {entry.text for entry in draft.lost}


def test_variables_in_packages_of_conda_and_apt(context: Path) -> None:
    text = """\
FROM condaforge/miniforge3:25.3.1-0
ARG CUDA_VERSION=12.6
ENV PY=3.12
RUN conda install -y -c conda-forge cuda-version=${CUDA_VERSION} nvidia::cuda-nvcc=$MISSING python=$PY
"""
    draft, recipe = draft_of_gpu(context, text)
    assert list(recipe.targets) == ["cu126-x86_64"] and recipe.python == "3.12"
    assert recipe.conda.dependencies == ("cuda-version=12.6",)
    assert "holds a variable" in {entry.text: entry.reason for entry in draft.lost}["cuda-nvcc=$MISSING"]
    draft, recipe = read(
        context,
        "FROM ubuntu:24.04\nRUN apt-get install -y python3.12 python3.12-venv python3-pip git\nRUN pip install a\n",
    )
    assert recipe.python == "3.12" and "git" not in str(draft.data.get("python"))
    assert {entry.text: entry.reason for entry in draft.lost}["python3-pip"] == "the recipe's Python"


def draft_of_gpu(context: Path, text: str) -> tuple[Draft, Recipe]:
    (context / "Dockerfile").write_text(text)
    return draft_of(context / "Dockerfile", target=None)


_ENVIRONMENT = """\
name: theirs
channels: [nvidia, conda-forge]
dependencies: [python=3.12, numpy=2.1, pytorch-cuda=12.4, {pip: [einops==0.8.1]}]
"""


@pytest.mark.parametrize(
    "text",
    [
        "COPY sub/env.yml /tmp/e.yml\nRUN conda env create -n a -f /tmp/e.yml && conda clean -a\n",
        "COPY sub/env.yml /tmp/e.yml\nRUN mamba env update -n base --file /tmp/e.yml\n",
        "COPY sub/env.yml /tmp/e.yml\nRUN micromamba install -y -n base -f /tmp/e.yml && micromamba clean -a\n",
        "COPY sub/env.yml /tmp/environment.yml\nWORKDIR /tmp\nRUN conda env create\n",
    ],
)
def test_the_environment_file_that_conda_reads_is_followed(context: Path, text: str) -> None:
    (context / "sub/env.yml").write_text(_ENVIRONMENT)
    (context / "Dockerfile").write_text(f"FROM condaforge/miniforge3:25.3.1-0\n{text}")
    _, recipe = draft_of(context / "Dockerfile", target=None)
    assert recipe.python == "3.12" and recipe.conda.channels == ("nvidia", "conda-forge") and recipe.name == "lab"
    assert recipe.conda.dependencies == ("numpy=2.1", "pytorch-cuda=12.4")
    assert recipe.conda.requirements == ("einops==0.8.1",)
    assert [target.partition("-")[0] for target in recipe.targets] == ["cu124"]


def test_conda_run_and_files_that_are_not_here(context: Path) -> None:
    (context / "sub/specs.txt").write_text("# specs\nscipy=1.15\n")
    text = "COPY sub/specs.txt /s.txt\nRUN conda install -y --file /s.txt --file /gone.txt\n"
    text += "RUN conda run --no-capture-output -n base pip install tqdm==4.67.1\n"
    draft, recipe = read(context, f"FROM condaforge/miniforge3:25.3.1-0\n{text}")
    assert recipe.conda.dependencies == ("scipy=1.15",) and recipe.conda.requirements == ("tqdm==4.67.1",)
    lost = {one.text: one.reason for one in draft.lost}
    assert lost["--file /gone.txt"] == "no such file here: name it, or what a command makes it from, with --from"


def test_a_builders_own_arguments_choose_the_stage(context: Path) -> None:
    text = "ARG OS=ubi8\n"
    for arch in ("amd64", "arm64"):
        text += f"FROM nvidia/cuda:12.6.3-runtime-ubi8 AS {arch}ubi8\nRUN pip install {arch}-only\n"
    text += "FROM ${TARGETARCH}${OS} AS final\nARG TARGETPLATFORM\nRUN pip install on-${TARGETPLATFORM#*/}\n"
    (context / "Dockerfile").write_text(text)
    _, recipe = draft_of(context / "Dockerfile", target=None)
    (target,) = recipe.targets
    assert target.startswith("cu126-") and len(recipe.requirements) == 1
    assert recipe.requirements[0] == f"{'amd64' if target.endswith('x86_64') else 'arm64'}-only"


def test_branches_of_the_shell_are_taken_or_listed(context: Path) -> None:
    text = """\
FROM python:3.11
ARG FLASH=false
ENV KIND=cpu
RUN if [ "${FLASH}" = "true" ]; then pip install ninja && pip install flash-attn; else pip install plain; fi
RUN if [[ "$KIND" == "gpu" ]]; then pip install gpu; elif [ -n "$KIND" ]; then pip install ${KIND}; \\
    elif [ 1 = 1 ]; then pip install no; else pip install no; fi
RUN if [ "$(uname -m)" = aarch64 ] && true; then pip install arm; fi; pip install after
RUN for one in a b; do pip install $one; done && apt-get install -y tools-$(uname -r | cut -d- -f1) git
"""
    draft, recipe = read(context, text)
    assert recipe.requirements == ("plain", "cpu", "after") and recipe.image.packages == ("git",)
    lost = {one.text: one.reason for one in draft.lost}
    assert lost["pip install flash-attn"].startswith("in a branch of the shell that the values")
    assert lost["arm"].startswith("in a branch or loop") and lost["$one"].startswith("in a branch or loop")
    assert lost["tools-$(uname -r | cut -d- -f1)"].startswith("a recipe accepts") and not draft.warning


def test_the_python_in_the_tag_of_rocms_image_is_the_recipes(context: Path) -> None:
    (context / "Dockerfile").write_text("FROM rocm/pytorch:rocm6.4.1_ubuntu24.04_py3.12_pytorch_release_2.6.0\n")
    draft, recipe = draft_of(context / "Dockerfile", target=None)
    assert recipe.python == "3.12" and [one.partition("-")[0] for one in recipe.targets] == ["rocm6.4"]
    assert any(one.text.startswith("FROM rocm/pytorch") for one in draft.lost)


def test_redirections_and_scripts_are_those_of_the_shell(context: Path) -> None:
    text = """\
FROM python:3.11
RUN pip install one>=1 two==2 > /dev/null 2>&1 && pip install three 2> log
RUN ["/bin/bash", "-i", "-c", "cd sub && pip install four"]
RUN bash -lc 'pip install five'
RUN bash script.sh -c x && sh -e "pip install no"
"""
    draft, recipe = read(context, text)
    assert recipe.requirements == ("one", "two==2", "three", "four", "five")
    lost = {one.text: one.reason for one in draft.lost}
    assert "quote a requirement" in lost["one > =1"] and "2 > log" in lost


def test_an_environment_of_conda_in_another_stage_is_the_images(context: Path) -> None:
    (context / "env.yml").write_text("channels: [conda-forge]\ndependencies: [python=3.12, numpy=2.1]\n")
    text = "FROM debian:12 AS builder\nENV HOME=/home/me\nWORKDIR $HOME\nENV FILE=env.yml\nCOPY ./$FILE .\n"
    text += "RUN ~/bin/micromamba env create --file $FILE\nRUN apt-get install -y gcc\n"
    text += "FROM debian:12\nCOPY --from=builder /home/me/micromamba /home/me/micromamba\n"
    _, recipe = read(context, text)
    assert recipe.python == "3.12" and recipe.conda.dependencies == ("numpy=2.1",)
    assert "gcc" not in recipe.image.packages


def test_values_keep_their_blanks_and_dollars(context: Path) -> None:
    text = 'ARG LIST="7.0 8.0+PTX"\nENV ARCHES=$LIST ONE=\\$LIST TWO="a b"\nENV THREE ${TWO} c\n'
    draft, recipe = read(context, f"FROM python:3.11\n{text}")
    assert recipe.image.env == {"ARCHES": "7.0 8.0+PTX", "TWO": "a b", "THREE": "a b c"}
    assert any(one.text == "ONE=$LIST" for one in draft.lost)


@pytest.mark.parametrize("name", ["pyproject.toml", "setup.py", "setup.cfg"])
def test_other_files_than_requirements_are_no_requirements_files(context: Path, name: str) -> None:
    (context / name).write_text("[project]\nflask\n")
    text = f"FROM python:3.11\nCOPY {name} /tmp/\nRUN uv pip install -r /tmp/{name} --extra gpu\n"
    draft, recipe = read(context, text)
    assert not recipe.requirements
    reasons = {one.text: one.reason for one in draft.lost}
    assert reasons[f"-r /tmp/{name}"] == f"not a requirements file: name {name} with --from"


@pytest.mark.parametrize(
    "line",
    [
        "RUN uv python install 3.12",
        "ENV UV_PYTHON=3.12.4",
        "RUN uv venv --seed --python 3.12 /opt/venv",
        "RUN python3.12 -m venv /opt/venv",
        "RUN pyenv install 3.12.7",
        "RUN dnf install -y gcc python3.12 python3.12-devel",
    ],
)
def test_the_python_that_a_command_chooses_is_the_recipes(context: Path, line: str) -> None:
    assert read(context, f"FROM debian:12\n{line}\nRUN uv pip install rich\n")[1].python == "3.12"


def test_the_requirements_of_a_project_that_pip_installs_are_the_images(context: Path) -> None:
    (context / "pyproject.toml").write_text(
        '[project]\nname = "own"\nrequires-python = ">=3.12"\ndependencies = ["rich"]\n'
        '[project.optional-dependencies]\nspeed = ["xformers"]\ndocs = ["sphinx"]\n'
    )
    text = "FROM debian:12\nWORKDIR /src\nCOPY . .\nRUN pip install -e .[speed] && pip install /other\n"
    draft, recipe = read(context, text)
    assert recipe.requirements == ("rich", "xformers") and recipe.python == "3.13"
    assert "xformers (CUDA)" in draft.warning
    reasons = {one.text: one.reason for one in draft.lost}
    assert reasons["sphinx"].endswith("--extra docs") and "own code belongs" in reasons["-e .[speed]"]
    assert read(context, text.replace("COPY . .", "COPY src src"))[1].requirements == ()


def test_the_last_pip_install_of_a_dockerfile_decides(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(
        "FROM vendor.example/tool:2.1-py310-u22\nRUN pip install 'rich>=13' attrs==22.1.0\n"
        "RUN pip install rich==12.6.0\nRUN pip install --no-deps torch==2.1.0 idna==3.1\n"
        "ENV CUDA_VERSION=12.4\n"
    )
    statements = list(read_source(path))
    assert {statement.text for statement in statements if statement.kind == "requirement" and not statement.reason} == {
        "attrs==22.1.0",
        "rich==12.6.0",
        "torch==2.1.0",
    }
    assert "rich==12.6.0" in next(statement.reason for statement in statements if statement.text == "rich>=13")
    draft = compose("x", statements, target=None)
    assert draft.data["python"] == "3.10"
    assert next(iter(draft.data["targets"])).startswith("cu121-")
    assert "PyTorch has no build of torch for CUDA 12.4" in draft.warning


def test_the_name_of_a_file_names_the_accelerator(tmp_path: Path) -> None:
    (tmp_path / "hpu.txt").write_text("triton==3.1.0\n")
    warning = compose("x", list(read_source(tmp_path / "hpu.txt"))).warning
    assert "envbuild has no target for Intel Gaudi" in warning and "choose" not in warning


def test_triton_of_an_index_that_is_left_out_is_no_requirement(tmp_path: Path) -> None:
    (tmp_path / "needs.txt").write_text("pytorch-triton-xpu==3.3.0\nattrs\n")
    draft = compose("x", list(read_source(tmp_path / "needs.txt")))
    assert draft.data["requirements"] == ["attrs"] and "Intel XPU" in draft.warning


def test_the_sources_of_a_copied_pyproject_are_carried(tmp_path: Path) -> None:
    (tmp_path / "pyproject.cuda12.toml").write_text(
        '[project]\nname = "a"\ndependencies = ["torch"]\n[tool.uv.sources]\ntorch = [{ index = "pytorch-cu121" }]\n'
        '[[tool.uv.index]]\nname = "pytorch-cu121"\nurl = "https://download.pytorch.org/whl/cu121"\nexplicit = true\n'
    )
    (tmp_path / "Dockerfile").write_text(
        "FROM nvidia/cuda:12.6.1-base-ubuntu22.04\nWORKDIR /app\nCOPY pyproject.cuda12.toml pyproject.toml\n"
        "RUN uv pip install --system .\n"
    )
    draft, recipe = draft_of(tmp_path / "Dockerfile", target=None)
    assert list(recipe.targets) == ["cu121-x86_64"] and any("pytorch-cu121" in line.text for line in draft.lost)


def test_values_of_condas_options_are_no_packages(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        "FROM pytorch/pytorch:2.2.0-cuda12.1-cudnn8-runtime\n"
        "RUN conda install -n base --revision 0 -y && conda install --rev 3 --clone x -cnvidia --strange 7 -qy"
        " --repodata-fn=a.json pytorch pytorch-cuda=12.1\n"
    )
    draft, _ = draft_of(tmp_path / "Dockerfile", target=None)
    assert draft.data["conda"]["dependencies"] == ["pytorch", "pytorch-cuda=12.1"]
    assert draft.data["conda"]["channels"] == ["nvidia", "conda-forge"] and "requirements" not in draft.data["conda"]
    lost = {line.text: line.reason for line in draft.lost}
    assert {"--revision 0", "--rev 3", "--clone x", "--strange 7", "torch==2.2.0"} <= {*lost}
    assert "does not know" in lost["--strange 7"]


@pytest.mark.parametrize(
    "before",
    [
        'RUN P=pip && $P install "numpy>=1" scipy six',
        'RUN P="python -m pip" && $P install numpy\\>=1 scipy six',
        'RUN P="pip install" && $P numpy\\>=1 scipy six',
        'RUN P="python -m pip --no-cache-dir install --upgrade" && \\\n    $P --pre numpy\\>=1 scipy six',
        'RUN P="python -m pip --no-cache-dir install --upgrade" && sudo A=1 $P "numpy>=1" scipy six',
        'RUN export P="pip  install" && ${P} "numpy>=1" scipy six',
        'ARG P="python -m pip install"\nRUN $P "numpy>=1" scipy six',
        'ENV P="python -m pip install"\nRUN ${P} "numpy>=1" scipy six',
        "ENV P pip install\nRUN ${P:-apt-get install} 'numpy>=1' scipy six",
        'RUN ${P:-pip install} "numpy>=1" scipy six',
        'ARG SUDO=\nRUN $SUDO pip install "numpy>=1" scipy six',
        'ARG ALL="scipy six"\nRUN pip install "numpy>=1" $ALL',
        'RUN P="pip install" && bash -c "$P \'numpy>=1\' scipy six"',
    ],
)
def test_an_unquoted_variable_is_split_into_words(context: Path, before: str) -> None:
    _, recipe = read(context, f"FROM python:3.11\n{before}\n")
    assert recipe.requirements == ("numpy>=1", "scipy", "six")


def test_a_quoted_variable_is_one_word(context: Path) -> None:
    draft, recipe = read(context, 'FROM python:3.11\nRUN P="pip install" && "$P" numpy && pip install six\n')
    assert recipe.requirements == ("six",)
    assert "pip install numpy" in [item.text for item in draft.lost]


@pytest.mark.parametrize(
    ("given", "image"),
    [
        ("ARG ARCH=", "nvidia/cuda:11.2.1-base"),
        ("ARG ARCH", "nvidia/cuda:11.2.1-base"),
        ("ARG ARCH=ppc64le", "nvidia/cuda-ppc64le:11.2.1-base"),
    ],
)
def test_variables_inside_of_alternatives_are_expanded(context: Path, given: str, image: str) -> None:
    base = "nvidia/cuda${ARCH:+-$ARCH}:${CUDA:-${OLD:-10.0}}.1-base"
    (context / "Dockerfile").write_text(f"{given}\nARG CUDA=11.2\nFROM {base}\nRUN pip install six\n")
    assert any(image in statement.text for statement in read_source(context / "Dockerfile"))


@pytest.mark.parametrize(
    ("word", "result"),
    [
        ("${EMPTY-old}six", "six"),
        ("${EMPTY:-old}", "old"),
        ("${NONE-old}", "old"),
        ("six${EMPTY:+==1.0}", "six"),
        ("six${EMPTY+==1.0}", "six==1.0"),
        ("six${V:+==$V}", "six==2.0"),
        ("six==${NONE:-${V}}", "six==2.0"),
        ("six==${NONE:-${EMPTY:-$V}}", "six==2.0"),
    ],
)
def test_alternatives_are_those_of_the_shell(context: Path, word: str, result: str) -> None:
    _, recipe = read(context, f"FROM python:3.11\nARG EMPTY=\nARG V=2.0\nRUN pip install {word}\n")
    assert recipe.requirements == (result,)


def test_the_tag_before_a_digest_tells_the_python(context: Path) -> None:
    image = f"ghcr.io/astral-sh/uv:python3.12-bookworm@sha256:{'a' * 64}"
    _, recipe = read(
        context, f"FROM {image} AS builder\nRUN pip install six\nFROM {image} AS runner\nRUN pip install six\n"
    )
    assert recipe.python == "3.12"
