"""`envbuild init`: a sign of GPUs in the sources chooses the target, or is named in a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from lab.drafts import draft_of

from envbuild.cli.commands import cli
from envbuild.imports.signs import gpu_signs
from envbuild.imports.statement import Draft, Statement
from envbuild.recipe.model import Recipe

_CONDA = "channels: [conda-forge]\nplatforms: [linux-64]\ndependencies:\n- python=3.11\n"
_PIXI = '[workspace]\nname = "a"\nchannels = ["conda-forge"]\nplatforms = ["linux-64"]\n'
_PIXI_LOCK = """\
version: 6
environments:
  default:
    channels: [{url: https://conda.anaconda.org/conda-forge/}]
    packages: {linux-64: [{conda: URL}]}
packages:
- {conda: URL, sha256: aa}
""".replace("URL", "https://conda.anaconda.org/conda-forge/linux-64/pytorch-2.7.1-cuda126_mkl_py312_h6c01f1c_301.conda")
_CONDA_LOCK = """\
version: 1
metadata: {channels: [{url: conda-forge}], platforms: [linux-64]}
package:
- {name: pytorch, version: 2.7.1, manager: conda, platform: linux-64, url: URL, hash: {sha256: aa}, category: main}
""".replace("URL", "https://conda.anaconda.org/conda-forge/linux-64/pytorch-2.7.1-cuda126_mkl_py312_h6c01f1c_301.conda")


def imported(folder: Path, name: str, text: str, **more: object) -> tuple[Draft, Recipe]:
    (folder / name).write_text(text)
    return draft_of(folder / name, **{"target": None} | more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text", "accelerator"),
    [
        ("environment.yml", f"{_CONDA}- pytorch=2.4\n- pytorch-cuda=12.4\n", "cu124"),
        ("environment.yml", f"{_CONDA}- pytorch::pytorch-cuda =12.1\n", "cu121"),
        ("environment.yml", f"{_CONDA}- cudatoolkit=11.3\n- pytorch\n", "cu113"),
        ("environment.yml", f"{_CONDA}- cuda-version=12.6\n- pytorch\n", "cu126"),
        ("environment.yml", f"{_CONDA}- pytorch 2.7.* cuda126*\n", "cu126"),
        ("environment.yml", f"{_CONDA}- pytorch=2.1.0=py3.11_cuda12.1_cudnn8.9.2_0\n", "cu121"),
        ("environment.yml", f"{_CONDA}- pytorch[build=cuda129*]\n", "cu129"),
        ("environment.yml", f"{_CONDA}- pip:\n  - nvidia-cuda-runtime-cu12==12.6.77\n  - torch==2.7.1\n", "cu126"),
        ("conda-lock.yml", _CONDA_LOCK, "cu126"),
        ("pixi.lock", _PIXI_LOCK, "cu126"),
        ("pixi.toml", f'{_PIXI}[dependencies]\npytorch-gpu = "*"\ncuda-version = "12.8.*"\n', "cu128"),
        ("pixi.toml", f'{_PIXI}[system-requirements]\ncuda = "12.6"\n[dependencies]\npytorch = "*"\n', "cu126"),
        (
            "pixi.toml",
            f'{_PIXI}[pypi-dependencies]\ntorch = {{ version = "*", index = "https://host.example/whl/cu126" }}\n',
            "cu126",
        ),
        (
            "pixi.toml",
            f'{_PIXI}[pypi-options]\nextra-index-urls = ["https://download.pytorch.org/whl/cu128"]\n'
            '[pypi-dependencies]\ntorch = "*"\n',
            "cu128",
        ),
        ("requirements.txt", "--index-url https://download.pytorch.org/whl/nightly/cu126\ntorch\n", "cu126"),
        ("requirements.txt", "--extra-index-url https://download.pytorch.org/whl/test/cu128\ntorch\n", "cu128"),
        ("requirements.txt", "-i https://mirror.example/pytorch-wheels/cu126\ntorch\n", "cu126"),
        ("requirements.txt", "-f https://download.pytorch.org/whl/cu118\ntorch\n", "cu118"),
        ("requirements.txt", "-f https://download.pytorch.org/whl/cu118/torch_stable.html\ntorch\n", "cu118"),
        ("requirements.txt", "--index-url https://download.pytorch.org/whl/rocm6.4\ntorch\n", "rocm6.4"),
        ("requirements.txt", "torch==2.6.0\nnvidia-nccl-cu12==2.21.5\n", "cu124"),
        ("requirements.txt", "torch==2.7.1\nnvidia-cublas-cu12==12.6.4.1\n", "cu126"),
        ("requirements.txt", "torch==2.7.1\nnvidia-cuda-runtime-cu12==12.8.57\n", "cu128"),
        ("requirements.txt", "torchvision==0.22.1+cu126\n", "cu126"),
        ("requirements.txt", "cupy-cuda113\n", "cu113"),
        ("requirements.txt", "dgl-cu118\n", "cu118"),
        ("requirements.txt", "spacy[cuda118]\n", "cu118"),
        ("requirements.txt", "torch\n--find-links https://host.example/whl/cu121_full\n", "cu121"),
        ("environment.yml", f"{_CONDA}- dgl-cuda11.7\n", "cu117"),
        ("environment.yml", f"{_CONDA}- pyg=2.3.0=py39_torch_2.0.0_cu118\n", "cu118"),
        ("Dockerfile", "FROM runpod/pytorch:1.0.2-cu1281-torch280\nRUN pip install torch\n", "cu128"),
        ("Dockerfile", "FROM python:3.11\nARG TORCH=cu126\nRUN pip install torch\n", "cu126"),
        ("Dockerfile", "FROM python:3.11\nENV A=/usr/local/cuda-12.6/bin\nRUN pip install torch\n", "cu126"),
        ("Dockerfile", "FROM debian:12\nRUN apt-get install -y cuda-toolkit-12-6\n", "cu126"),
        ("Dockerfile", "FROM python:3.11\nRUN pip install torch --index-url https://host.example/whl/cu126\n", "cu126"),
        ("Dockerfile", "FROM python:3.11\nRUN uv pip install --torch-backend=cu128 torch\n", "cu128"),
        ("Dockerfile", "FROM rocm/pytorch:rocm6.2.4_ubuntu22.04_py3.10_pytorch_release_2.6\n", "rocm6.2.4"),
        ("Dockerfile", "FROM nvidia/cuda:12.4.1-devel-ubuntu22.04\nRUN pip install torch==2.6.0\n", "cu124"),
        # torch's own index counts before the base image.
        (
            "Dockerfile",
            "FROM nvidia/cuda:12.4.1-devel-ubuntu22.04\n"
            "RUN pip install torch --index-url https://download.pytorch.org/whl/cu121\n",
            "cu121",
        ),
    ],
)
def test_a_sign_of_gpus_chooses_the_target(tmp_path: Path, name: str, text: str, accelerator: str) -> None:
    draft, recipe = imported(tmp_path, name, text)
    assert {target.rpartition("-")[0] for target in recipe.targets} == {accelerator}
    assert not draft.warning
    indexes = {url for table in recipe.targets.values() for url in table.indexes}
    assert all(accelerator in url for url in indexes if "whl" in url)
    # The user's own choice counts, and is no secret.
    draft, recipe = imported(tmp_path, name, text, target="cpu-x86_64")
    assert list(recipe.targets) == ["cpu-x86_64"] and f"--target {accelerator}-x86_64" in draft.warning
    assert not any(accelerator in url for url in recipe.targets["cpu-x86_64"].indexes)


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("environment.yml", f"{_CONDA}- pytorch-gpu\n", "environment.yml:5: pytorch-gpu (CUDA)"),
        ("environment.yml", f"{_CONDA}- pytorch * cuda12*\n", "environment.yml:5: pytorch * cuda12* (CUDA 12)"),
        ("environment.yml", f"{_CONDA}- cupy>=12\n", "cupy>=12 (CUDA)"),
        ("environment.yml", f"{_CONDA}- cuda-nvcc\n", "cuda-nvcc (CUDA)"),
        ("environment.yml", f"{_CONDA}- conda-forge::rapids\n", "rapids (CUDA)"),
        ("environment.yml", "channels: [nvidia]\ndependencies: [python=3.11, numpy]\n", "nvidia (CUDA)"),
        ("requirements.txt", "cupy-cuda92\n", "cupy-cuda92 (CUDA)"),
        ("requirements.txt", "torchvision==0.5.0+cu92\n", "+cu92 (CUDA)"),
        ("requirements.txt", "nvidia_cudnn_cu12\n", "nvidia_cudnn_cu12 (CUDA 12)"),
        ("requirements.txt", "nvidia-dali-cuda120\n", "nvidia-dali-cuda120 (CUDA 12)"),
        ("requirements.txt", "--extra-index-url https://pypi.nvidia.com\nnumpy\n", "https://pypi.nvidia.com (CUDA)"),
        ("requirements.txt", "x @ git+https://github.com/a/flash-attention.git@v2\n", "flash-attention.git@v2 (CUDA)"),
        ("requirements.txt", "git+https://github.com/NVIDIA/apex\n", "https://github.com/NVIDIA/apex (CUDA)"),
        ("requirements.txt", "git+https://github.com/a/tiny-cuda-nn/#subdirectory=b\n", "(CUDA)"),
        ("requirements.txt", "https://host.example/flash_attn-2.7.4+cu12torch2.6-cp311-cp311-x.whl\n", "(CUDA 12)"),
        ("requirements.txt", "-f https://host.example/jax_cuda_releases.html\njax\n", "jax_cuda_releases.html (CUDA)"),
        ("requirements.txt", "bitsandbytes>=0.43\n", "bitsandbytes>=0.43 (CUDA)"),
        ("requirements.txt", 'llama-cpp-python -C cmake.args="-DGGML_CUDA=on"\n', "-DGGML_CUDA=on"),
        ("Dockerfile", 'FROM python:3.11\nENV CMAKE_ARGS="-DA=1 -DLLAMA_CUBLAS=ON"\n', "-DLLAMA_CUBLAS=ON (CUDA)"),
        ("Dockerfile", "FROM python:3.11\nRUN CMAKE_ARGS=-DGGML_HIP=on pip install x\n", "-DGGML_HIP=on"),
        ("requirements.txt", "tensorflow-rocm\n", "tensorflow-rocm (ROCm)"),
        ("requirements.txt", "thing[rocm]\n", "thing[rocm] (ROCm)"),
        ("Dockerfile", "FROM ghcr.io/nvidia/jax:base\nRUN pip install flax\n", "ghcr.io/nvidia/jax:base (CUDA)"),
        ("Dockerfile", "FROM scratch AS a\nARG B=vllm/vllm-openai:v1\nFROM $B\n", "vllm/vllm-openai:v1 (CUDA)"),
        ("Dockerfile", "FROM vllm/vllm-openai:v0.9\nRUN pip install rich\n", "vllm/vllm-openai:v0.9 (CUDA)"),
        ("Dockerfile", "FROM pytorch/pytorch\nRUN pip install rich\n", "pytorch/pytorch (CUDA)"),
        ("Dockerfile", "FROM pytorch/pytorch@sha256:ab\nRUN pip install rich\n", "pytorch/pytorch@sha256:ab (CUDA)"),
        ("environment.yml", "dependencies:\n- python=3.11\n- cudatoolkit=9.2\n- numpy\n", "cudatoolkit=9.2 (CUDA 9.2)"),
        (
            "pyproject.toml",
            '[tool.poetry]\nname = "a"\n[tool.poetry.dependencies]\npython = "^3.11"\nrich = "*"\n'
            '[[tool.poetry.source]]\nname = "p"\nurl = "https://host.example/whl/cu121"\npriority = "explicit"\n',
            "https://host.example/whl/cu121 (CUDA 12.1)",
        ),
        ("Dockerfile", "FROM debian:12\nRUN apt-get install -y libcudnn9-cuda-12\n", "libcudnn9-cuda-12 (CUDA)"),
        ("Dockerfile", "FROM python:3.11\nENV NVIDIA_VISIBLE_DEVICES=all\n", "NVIDIA_VISIBLE_DEVICES=all (CUDA)"),
        ("Dockerfile", "FROM python:3.11\nENV CUDA_HOME=/usr/local/cuda\n", "CUDA_HOME=/usr/local/cuda (CUDA)"),
        ("Dockerfile", "FROM python:3.11\nENV HSA_OVERRIDE_GFX_VERSION=10.3.0\n", "(ROCm)"),
        ("Dockerfile", "FROM python:3.11\nRUN uv sync --extra gpu\n", "uv sync --extra gpu (CUDA)"),
        ("Dockerfile", "FROM python:3.11\nRUN wget https://developer.download.nvidia.com/x.deb\n", "(CUDA)"),
        ("requirements.txt", "numpy\nflash-attn==2.7.4\n", "requirements.txt:2: flash-attn==2.7.4 (CUDA)"),
        ("requirements.txt", "cupy-cuda12x\n", "cupy-cuda12x (CUDA 12)"),
        ("requirements.txt", "jax[cuda12]>=0.4\n", "jax[cuda12]>=0.4 (CUDA 12)"),
        ("requirements.txt", "onnxruntime-gpu\n", "onnxruntime-gpu (CUDA)"),
        ("requirements.txt", "deepmd-kit[gpu,cu12,lmp]\n", "deepmd-kit[gpu,cu12,lmp] (CUDA 12)"),
        ("Dockerfile", "ARG CUDA_VERSION=12\nFROM python:3.11\nRUN pip install torch\n", "CUDA_VERSION=12 (CUDA 12)"),
        ("requirements.txt", "torch==2.4.0\nnvidia-nccl-cu12==2.20.5\n", "nvidia-nccl-cu12==2.20.5 (CUDA 12)"),
        (
            "Dockerfile",
            "FROM nvcr.io/nvidia/pytorch:25.03-py3\nRUN pip install einops\n",
            "nvcr.io/nvidia/pytorch:25.03-py3",
        ),
        ("Dockerfile", "FROM rocm/dev-ubuntu-22.04\nRUN pip install torch\n", "(ROCm)"),
        ("requirements.txt", "--index-url https://download.pytorch.org/whl/cpu\ntorch\nvllm\n", "vllm (CUDA)"),
    ],
)
def test_a_sign_without_a_version_is_a_warning(tmp_path: Path, name: str, text: str, named: str) -> None:
    draft, recipe = imported(tmp_path, name, text)
    assert {target.partition("-")[0] for target in recipe.targets} == {"cpu"}
    assert named in draft.warning and "--target" in draft.warning
    comment = draft.text.partition('name = "')[0]
    assert comment.startswith("# the sources name GPUs") and "--target" in comment


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("requirement", "torch==2.7.1+cpu"),
        ("requirement", "tritonclient[http]"),
        ("requirement", "numpy==1.2+local"),
        ("requirement", "cuda-is-no-package"),
        ("requirement", "gpu-is-no-accelerator"),
        ("requirement", "x @ git+https://github.com/nvidia/dllogger@v1"),
        ("package", "libcurl4"),
        ("package", "hipster"),
        ("channel", "conda-forge/label/nvidia-free"),
        ("env", "NVIDIA_VISIBLE_DEVICES=void"),
        ("env", "USE_CUDA=0"),
        ("env", "CMAKE_ARGS=-DGGML_CUDA=off"),
        ("base", "pytorch/pytorch:2.7-cpu"),
        ("base", "pytorch/pytorch-lightning-docs"),
        ("conda", "pytorch * cpu*"),
        ("conda", "cudf-free 1"),
        ("conda", "nccl-tests-docs"),
        ("conda-pin", "libtorch 2.7.1 cpu_mkl_h1"),
        ("index", "https://download.pytorch.org/whl/cpu"),
        ("base", "python:3.11"),
        ("env", "OMP_NUM_THREADS=1"),
        ("requirement", "gpuleaf"),
        ("env", "CUDA_VISIBLE_DEVICES=-1"),
        ("env", "WITHOUT_CUDA_KERNELS=1"),
        ("lost", "COPY cuda_kernels.py ."),
        ("lost", "LABEL title=the deepspeed image"),
        ("lost", "pip install --deepspeed-config x"),
        ("lost", "pip uninstall -y triton"),
        ("lost", "SKIP_CUDA_BUILD=TRUE uv sync"),
        ("index", "https://host.example/cu126x/simple"),
    ],
)
def test_what_is_no_sign(kind: str, text: str) -> None:
    assert gpu_signs([Statement(kind, text, "x:1")]) == []


def test_signs_of_other_systems_and_extras_choose_nothing(tmp_path: Path) -> None:
    draft, recipe = imported(tmp_path, "environment.yml", f"{_CONDA}- pytorch\n- cudatoolkit=11.3 # [win64]\n")
    assert list(recipe.targets) == ["cpu-x86_64"] and "cudatoolkit=11.3 (CUDA 11.3)" in draft.warning
    assert draft.warning.endswith("If it is meant for GPUs, choose --target cu113-x86_64")
    text = '[project]\nname = "a"\ndependencies = ["torch"]\n[project.optional-dependencies]\ngpu = ["flash-attn"]\n'
    draft, recipe = imported(tmp_path, "pyproject.toml", text)
    assert list(recipe.targets) == ["cpu-x86_64"]  # it chooses nothing, and is named
    assert "pyproject.toml:5:8: flash-attn (CUDA)" in draft.warning and draft.warning.endswith("--extra gpu")
    assert not imported(tmp_path, "pyproject.toml", text, target="cpu-x86_64")[0].warning
    assert imported(tmp_path, "pyproject.toml", text, groups=("gpu",))[0].warning
    draft, _ = imported(tmp_path, "pyproject.toml", f'{text}full = ["torch==2.7.1+cu126"]\n')
    assert draft.warning.endswith("choose --extra full or --extra gpu")  # what chooses a target first


@pytest.mark.parametrize(
    ("text", "accelerator"),
    [
        ("FROM nvidia/cuda:12.2.2-runtime-ubuntu22.04\nRUN pip install torch\n", "cu126"),
        ("FROM nvidia/cuda:12.2.2-runtime-ubuntu22.04\nRUN pip install torch==2.1.2\n", "cu121"),
        ("FROM nvidia/cuda:12.3.1-runtime-ubuntu22.04\nRUN pip install 'torch>=2.5,<2.6'\n", "cu124"),
        ("FROM nvidia/cuda:12.2.2-runtime-ubuntu22.04\nRUN pip install torch==2.6.0\n", "cu124"),
        ("FROM nvidia/cuda:12.4.1-runtime-ubuntu22.04\nRUN pip install torch==2.8.0\n", "cu126"),
        ("FROM nvidia/cuda:12.1.1-runtime-ubuntu22.04\nRUN pip install 'torch>=2.7'\n", "cu126"),
        ("FROM nvidia/cuda:11.4.3-runtime-ubuntu22.04\nRUN pip install torch==1.12.1\n", "cu113"),
        ("FROM rocm/dev-ubuntu-22.04:6.3.4\nRUN pip install torch\n", "rocm6.3"),
        ("FROM rocm/vllm-dev:base_ROCm-6.4.2_x\nRUN pip install torch\n", "rocm6.4"),
    ],
)
def test_a_sign_ends_in_an_accelerator_that_pytorch_publishes(tmp_path: Path, text: str, accelerator: str) -> None:
    draft, recipe = imported(tmp_path, "Dockerfile", text)
    ((target, table),) = recipe.targets.items()
    assert target.partition("-")[0] == accelerator
    assert table.indexes == (f"https://download.pytorch.org/whl/{accelerator}",)
    if "6.3.4" not in text and "6.4.2" not in text:
        assert "Dockerfile:1: FROM nvidia/cuda:1" in draft.warning and "the same drivers run" in draft.warning
        assert draft.text.startswith("# PyTorch has no build of torch for CUDA 1")


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("environment.yml", "dependencies: [cuda92]\n", "cuda92 (CUDA 9.2). For these GPUs choose a --target, such as"),
        ("requirements.txt", "# see the docs for the CUDA/XPU/CPU build\nrich\n", "build (CUDA)"),
        (
            "requirements.txt",
            "--extra-index-url https://host.example/onnxruntime-cuda-12/pypi/simple/\nonnxruntime-gpu\n",
            "--target cu129-x86_64",
        ),
        ("gpu/Pipfile", '[packages]\nrich = "*"\n', "file name: gpu/Pipfile (CUDA)"),
        ("pyproject.toml", '[project]\nname = "simulator-gpu"\n', "simulator-gpu (GPUs)"),
        ("environment.yml", "name: brian_cuda\ndependencies: [numpy]\n", "brian_cuda (CUDA)"),
        ("pyproject.toml", '[project]\nname = "a"\ndescription = "v4 for GPUs"\n', "description = v4 for GPUs (GPUs)"),
        ("requirements.txt", "# a consumer Radeon sees the GPU\nrich\n", "sees the GPU (GPUs)"),
        ("Dockerfile", "FROM nvcr.io/nvidia/l4t-ml:r36.2.0-py3\n", "such as cu130-aarch64"),
        ("Dockerfile", "FROM --platform=linux/arm64 nvidia/cuda:12.6.0-base-ubuntu22.04\n", "FROM nvidia/cuda:12.6.0"),
        ("requirements-cuda12.txt", "rich\n", "file name: requirements-cuda12.txt (CUDA)"),
        ("Dockerfile", "FROM python:3.11\nENV ONEAPI_DEVICE_SELECTOR=gpu\n", "envbuild has no target for Intel XPU"),
        ("requirements.txt", "# Install Intel GPU dependencies\nrich\n", "dependencies (Intel XPU)"),
        ("pyproject-rocm.toml", '[project]\nname = "a"\n', "file name: pyproject-rocm.toml (ROCm)"),
    ],
)
def test_signs_in_unusual_places_are_named_with_their_version(tmp_path: Path, name: str, text: str, named: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    draft, recipe = imported(tmp_path, name, text)
    if "arm64" in text:
        assert list(recipe.targets) == ["cu126-aarch64"]
    else:
        assert named in draft.warning


def test_the_owner_of_a_file_is_no_sign(tmp_path: Path) -> None:
    text = "# SPDX-FileCopyrightText: Copyright (c) 2024 NVIDIA CORPORATION & AFFILIATES. All rights reserved.\nrich\n"
    assert not imported(tmp_path, "requirements.txt", text)[0].warning


@pytest.mark.parametrize("name", ["no-gpu", "non-cuda", "gpustat-web", "cudart"])
def test_names_that_are_no_sign(tmp_path: Path, name: str) -> None:
    draft, _ = imported(tmp_path, "pyproject.toml", f'[project]\nname = "{name}"\n')
    assert not draft.warning


def test_an_address_for_a_cuda_chooses_the_target(tmp_path: Path) -> None:
    _, recipe = imported(
        tmp_path, "requirements.txt", "https://host.example/cuda101/jaxlib-0.1-cp37-none-a.whl\nrich\n"
    )
    assert list(recipe.targets) == ["cu101-x86_64"]
    _, recipe = imported(tmp_path, "requirements.txt", "jaxlib>=0.1.67+cuda110\nrich\n")  # no specifier of PEP 440
    assert list(recipe.targets) == ["cu110-x86_64"]


def test_comments_for_other_gpus_than_those_of_the_target_are_listed(tmp_path: Path) -> None:
    text = "--index-url https://download.pytorch.org/whl/cu118\n# for CUDA 12.1: cu121\n# CUDA 11.8 is tried\ntorch\n"
    draft, _ = imported(tmp_path, "requirements.txt", text)
    assert [statement.text for statement in draft.lost if statement.reason == "a comment"] == ["# for CUDA 12.1: cu121"]


@pytest.mark.parametrize("torch", ["", "torch", "torch==2.5.1", "torch>=2.0", "torch<2.6", "torch~=2.4.0"])
def test_a_published_accelerator_stays(tmp_path: Path, torch: str) -> None:
    text = f"FROM nvidia/cuda:12.4.1-runtime-ubuntu22.04\nRUN pip install numpy '{torch or 'rich'}'\n"
    draft, recipe = imported(tmp_path, "Dockerfile", text)
    assert list(recipe.targets) == ["cu124-x86_64"] and not draft.warning


def test_conda_has_builds_for_other_versions_of_cuda(tmp_path: Path) -> None:
    draft, recipe = imported(tmp_path, "environment.yml", f"{_CONDA}- cuda-version=12.2\n- pytorch\n")
    assert list(recipe.targets) == ["cu122-x86_64"] and not draft.warning


def test_packages_in_a_branch_that_is_not_evaluated_are_signs(tmp_path: Path) -> None:
    (tmp_path / "gpu.txt").write_text("onnxruntime-gpu\n")
    text = """\
FROM python:3.11
COPY gpu.txt /r/gpu.txt
RUN if [ -e /dev/nvidia0 ]; then pip install -r /r/gpu.txt; else pip install onnxruntime; fi && pip install rich
RUN poetry install --with gpu
"""
    draft, recipe = imported(tmp_path, "Dockerfile", text)
    assert recipe.requirements == ("rich",) and "gpu.txt:1: onnxruntime-gpu (CUDA)" in draft.warning
    lost = {one.text: one.reason for one in draft.lost}
    assert lost["onnxruntime"].startswith("in a branch or loop")
    assert "name these with --from" in lost["poetry install --with gpu"]


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("Dockerfile", "RUN uv sync --frozen --no-build-isolation-package mamba-ssm", "-package mamba-ssm (CUDA)"),
        ("Dockerfile", "RUN uv pip install --no-build-isolation-package flash_attn rich", "-package flash_attn (CUDA)"),
        ("Dockerfile", "RUN git clone --depth 1 https://github.com/a/causal-conv1d.git /src", "causal-conv1d.git"),
        ("Dockerfile", "RUN dnf install -y python3 cuda-toolkit-12-4", "cuda-toolkit-12-4 (CUDA 12.4)"),
        ("Dockerfile", "RUN TORCH_CUDA_ARCH_LIST=9.0 pip install rich", "TORCH_CUDA_ARCH_LIST=9.0 (CUDA)"),
        ("Dockerfile", "RUN export CUDA_HOME=/cuda && make", "CUDA_HOME=/cuda (CUDA)"),
        ("Dockerfile", "ENV HIP_VISIBLE_DEVICES=0", "HIP_VISIBLE_DEVICES=0 (ROCm)"),
        ("Dockerfile", "COPY --from=nvidia/cuda:12.4.1-base /usr/local /usr/local", "(CUDA 12.4)"),
        ("Dockerfile", "ARG ACCELERATOR=gpu", "ACCELERATOR=gpu (CUDA)"),
        ("Dockerfile", f"RUN {'true && ' * 30}pip download tensorrt", "tensorrt (CUDA)"),
        ("Dockerfile", "RUN uv pip install --torch-backend=auto rich", "--torch-backend=auto (CUDA)"),
        ("requirements.txt", "deepspeed==0.15", "deepspeed==0.15 (CUDA)"),
        ("requirements.txt", "./third_party/apex", "./third_party/apex (CUDA)"),
        ("requirements.txt", "-e submodules/simple-knn", "-e submodules/simple-knn (CUDA)"),
        (
            "requirements.txt",
            "--extra-index-url https://rocm.nightlies.example/v2/",
            "example/v2/ (ROCm)",
        ),
        (
            "requirements.txt",
            "-f https://host.example/kaolin/torch-2.5.1_cu124.html",
            "(CUDA 12.4)",
        ),
        ("pyproject.toml", '[build-system]\nrequires = ["nvidia-cuda-nvcc"]', "nvidia-cuda-nvcc (CUDA)"),
        ("pyproject.toml", '[tool.uv]\nno-build-isolation-package = ["apex", "vllm"]', "= vllm (CUDA)"),
        ("pyproject.toml", '[tool.uv]\noverride-dependencies = ["triton>=3"]', "triton>=3 (CUDA)"),
        ("pyproject.toml", '[tool.uv.extra-build-dependencies]\nflash-attn = ["torch"]', "] flash-attn = torch (CUDA)"),
        ("pyproject.toml", '[tool.uv.extra-build-variables]\nxformers = {MAX = "1"}', ".xformers] MAX = 1 (CUDA)"),
        ("pyproject.toml", '[tool.uv]\nfind-links = ["https://host.example/whl/cu124"]', "(CUDA 12.4)"),
        ("pyproject.toml", '[tool.pdm.resolution.overrides]\ncupy-cuda12x = "13"', "cupy-cuda12x==13 (CUDA 12)"),
        ("pyproject.toml", '[tool.hatch.envs.a.env-vars]\nFORCE_CUDA = "1"', "FORCE_CUDA = 1 (CUDA)"),
        ("pyproject.toml", '[tool.scikit-build.cmake.define]\nGGML_CUDA = "ON"', "GGML_CUDA = ON (CUDA)"),
        (
            "pyproject.toml",
            '[project]\nname = "a"\nclassifiers = ["Environment :: GPU :: NVIDIA CUDA"]',
            "NVIDIA CUDA (CUDA)",
        ),
        ("pixi.toml", '[activation.env]\nTORCH_CUDA_ARCH_LIST = "9.0"', "activation = {"),
        ("environment.yml", "dependencies: [python]\nvariables: {NCCL_DEBUG: INFO}", "NCCL_DEBUG=INFO (CUDA)"),
    ],
)
def test_a_sign_in_any_place_of_a_file_is_carried_or_named(tmp_path: Path, name: str, text: str, named: str) -> None:
    head = "FROM python:3.11\n" if name == "Dockerfile" else ""
    draft, _ = imported(tmp_path, name, f"{head}{text}\n", target="cpu-x86_64")
    assert named in draft.warning and f"{tmp_path / name}:" in draft.warning


def test_the_files_of_a_folder_that_init_does_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("install_requires = ['rich',\n  'flash-attn>=2',  # vllm\n]\n")
    (tmp_path / "requirements_gpu.txt").write_text("torch==2.6.0+cu124\n")
    (tmp_path / "environment-docs.yml").write_text("dependencies: [sphinx]\n")
    (tmp_path / "requirements.txt").write_text("numpy\n")
    draft, recipe = draft_of(tmp_path, target=None)
    assert list(recipe.targets) == ["cpu-x86_64"] and recipe.requirements == ("numpy",)
    assert "'flash-attn>=2', (CUDA)" in draft.warning and "requirements_gpu.txt:1: torch" in draft.warning
    assert "setup.py:2: # vllm (CUDA)" in draft.warning
    lost = {one.text: one.reason for one in draft.lost}
    assert (
        "name it with --from" in lost["environment-docs.yml"] and "name it with --from" in lost["requirements_gpu.txt"]
    )


@pytest.mark.parametrize(
    ("name", "text", "target", "named"),
    [
        ("requirements-cu126.txt", "torch\n", "cu126-x86_64", ""),
        ("gpu.txt", "rich\n", "cpu-x86_64", "file name: gpu.txt (CUDA)"),
        ("Dockerfile.cuda", "FROM python:3.11\nRUN pip install rich\n", "cpu-x86_64", "file name: Dockerfile.cuda"),
        ("requirements.txt", "-r sub/cuda-more.txt\n", "cpu-x86_64", "-r sub/cuda-more.txt (CUDA)"),
    ],
)
def test_the_name_of_a_file_is_a_sign(tmp_path: Path, name: str, text: str, target: str, named: str) -> None:
    draft, recipe = imported(tmp_path, name, text)
    assert list(recipe.targets) == [target] and named in draft.warning


def test_the_warning_names_each_sign_once(tmp_path: Path) -> None:
    names = ["vllm", "xformers", "triton", "cupy", "flashinfer-python", *(f"nvidia-x{n}" for n in range(20))]
    draft, _ = imported(tmp_path, "requirements.txt", "\n".join([*names, "vllm"]))
    assert draft.warning.count("vllm (CUDA)") == 1 and "; requirements.txt:5: flashinfer-python (CUDA)" in draft.warning
    assert "; and 13 more" in draft.warning


@pytest.mark.parametrize(
    "text",
    [
        "FROM nvidia/cuda:12.6.3-devel-ubuntu22.04 AS a\nRUN make\nFROM python:3.11\nRUN pip install torch\n",
        'FROM python:3.11\nARG GPU\nRUN if [ "$GPU" = 1 ]; then pip install torch==2.7.1+cu126; fi\n',
    ],
)
def test_a_stage_or_branch_that_is_not_taken_names_gpus(tmp_path: Path, text: str) -> None:
    draft, recipe = imported(tmp_path, "Dockerfile", text)
    assert list(recipe.targets) == ["cpu-x86_64"] and draft.warning.endswith("choose --target cu126-x86_64")
    assert not imported(tmp_path, "Dockerfile", text, target="cpu-x86_64")[0].warning.startswith("other stages")


def test_torchs_own_sign_counts_before_those_of_other_packages(tmp_path: Path) -> None:
    row = "- {{name: {0}, version: '{1}', manager: conda, platform: linux-64, url: '{2}', category: main}}\n"
    base = "https://conda.anaconda.org/pytorch/linux-64/"
    text = "version: 1\nmetadata: {channels: [{url: conda-forge}], platforms: [linux-64]}\npackage:\n"
    text += row.format("cuda-version", "12.5", f"{base}cuda-version-12.5-hd4f0392_3.conda")
    text += row.format("pytorch", "2.1.0", f"{base}pytorch-2.1.0-py3.10_cuda11.8_cudnn8.7.0_0.tar.bz2")
    draft, recipe = imported(tmp_path, "conda-lock.yml", text)
    assert list(recipe.targets) == ["cu118-x86_64"] and not draft.warning
    # An environment has one CUDA, the newest of those that packages name; other architectures have their own.
    text = "llama==1+cu124\nexllama==2+cu128\ntorch==2.7.1\n"
    text += "nvidia-cuda-runtime-cu12==12.9.37; platform_machine == 'aarch64'\n"
    assert list(imported(tmp_path, "requirements.txt", text)[1].targets) == ["cu128-x86_64"]
    text = "torch==2.8.0+cpu ; platform_machine == 'aarch64'\ntorch==2.8.0+cu128 ; platform_machine == 'x86_64'\n"
    assert list(imported(tmp_path, "requirements.txt", text)[1].targets) == ["cu128-x86_64"]


@pytest.mark.parametrize(
    ("name", "text", "family"),
    [
        ("requirements.txt", "torch-npu==2.5.1\n", "Ascend NPU"),
        ("requirements.txt", "numpy\ntriton-ascend==3.2.0\n", "Ascend NPU"),
        ("requirements.txt", "torch==2.8.0+xpu\n--extra-index-url https://download.pytorch.org/whl/xpu\n", "Intel XPU"),
        ("requirements.txt", "jax[tpu]>=0.4\n", "TPU"),
        ("requirements.txt", "./own[tpu]\n", "TPU"),
        ("requirements.txt", "thing[neuronx]>=1\n", "AWS Neuron"),
        ("Dockerfile", "FROM public.ecr.aws/neuron/pytorch:2\nRUN pip install numpy\n", "AWS Neuron"),
        ("Dockerfile", "FROM mthreads/musa:rc3.1.0-devel\nRUN pip install numpy\n", "Moore Threads MUSA"),
        ("Dockerfile", "FROM intel/oneapi-basekit:2024.2\nRUN pip install numpy\n", "Intel XPU"),
        ("Dockerfile", "FROM intel/extension:2.8-xpu\nRUN pip install numpy\n", "Intel XPU"),
        ("requirements.txt", "ipex-llm[xpu]\n", "Intel XPU"),
    ],
)
def test_accelerators_that_no_target_has_are_named(tmp_path: Path, name: str, text: str, family: str) -> None:
    draft, recipe = imported(tmp_path, name, text)
    ((target, table),) = recipe.targets.items()
    assert target == "cpu-x86_64" and not any("xpu" in url for url in table.indexes)
    assert draft.warning.endswith(f"envbuild has no target for {family}") and f"({family})" in draft.warning


def test_all_packages_of_pytorch_have_the_targets_local_version(tmp_path: Path) -> None:
    text = "torch==2.6.0+cu126\ntorchvision==0.21.0+cu126\ntorchaudio==2.6.0\nx==1+deb\n"
    _, recipe = imported(tmp_path, "requirements.txt", text, target="cpu-x86_64")
    assert recipe.targets["cpu-x86_64"].requirements == ("torch==2.6.0+cpu", "torchvision==0.21.0+cpu")
    assert recipe.requirements == ("torchaudio==2.6.0", "x==1+deb")
    _, recipe = imported(tmp_path, "requirements.txt", text, target="cpu-aarch64")
    assert recipe.targets["cpu-aarch64"].requirements == ("torch==2.6.0", "torchvision==0.21.0")
    _, recipe = imported(tmp_path, "requirements.txt", text)
    (table,) = recipe.targets.values()
    assert table.requirements == ("torch==2.6.0+cu126", "torchvision==0.21.0+cu126")


def test_builds_for_accelerators_without_a_target_change_or_are_listed(tmp_path: Path) -> None:
    text = "torch==2.8.0+xpu\ntorchaudio==2.8.0+xpu\nintel-thing==2.8.0+xpu\n"
    draft, recipe = imported(tmp_path, "requirements.txt", text)
    (table,) = recipe.targets.values()
    assert table.requirements == ("torch==2.8.0+cpu", "torchaudio==2.8.0+cpu") and recipe.requirements == ()
    assert {one.text: one.reason for one in draft.lost}["intel-thing==2.8.0+xpu"].startswith("of an accelerator for")


def test_torch_that_another_package_requires_comes_from_pytorchs_index(tmp_path: Path) -> None:
    _, recipe = imported(tmp_path, "requirements.txt", "accelerate\n", target="cpu-x86_64")
    assert recipe.targets["cpu-x86_64"].indexes == ("https://download.pytorch.org/whl/cpu",)


def test_the_index_of_another_accelerator_never_enters_a_target(tmp_path: Path) -> None:
    lines = ["cpu", "cu126", "nightly/cu128", "rocm6.4"]
    text = "".join(f"--extra-index-url https://download.pytorch.org/whl/{one}\n" for one in lines) + "torch\n"
    draft, recipe = imported(tmp_path, "requirements.txt", text, target="cu128-x86_64")
    assert recipe.targets["cu128-x86_64"].indexes == ("https://download.pytorch.org/whl/nightly/cu128",)
    assert len([one for one in draft.lost if one.reason.startswith("no target is for")]) == 3


def test_variables_with_the_name_of_cuda_do_not_contradict_rocm(tmp_path: Path) -> None:
    text = "FROM rocm/pytorch:rocm6.4_ubuntu22.04_py3.11_x\nENV NVTE_FRAMEWORK=pytorch TRITON_CACHE_DIR=/tmp/t\n"
    draft, recipe = imported(tmp_path, "Dockerfile", f"{text}RUN pip install torch\n")
    assert list(recipe.targets) == ["rocm6.4-x86_64"] and not draft.warning


def test_the_environments_of_pixi_are_named_by_their_features(tmp_path: Path) -> None:
    text = f'{_PIXI}[feature.cuda.dependencies]\ncuda-version = "12.6.*"\n[environments]\nfast = ["cuda"]\n'
    draft, _ = imported(tmp_path, "pixi.toml", text)
    assert draft.warning.startswith("extras or groups") and draft.warning.endswith("--extra cuda")
    assert "fast" not in draft.warning


def test_the_warning_is_printed_last_and_in_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requirements.txt").write_text("torch\nflash-attn\n")
    done = CliRunner().invoke(cli, ["init", "a", "--from", "requirements.txt", "--dry-run"])
    assert "warning: the sources name GPUs" in done.stderr.splitlines()[-2]
    done = CliRunner().invoke(cli, ["init", "a", "--from", "requirements.txt", "--dry-run", "--json"])
    assert "flash-attn" in json.loads(done.stdout)["warning"]


def test_the_name_of_an_extra_of_torch_is_a_sign(tmp_path: Path) -> None:
    text = '[project]\nname = "a"\n[project.optional-dependencies]\ncpu = ["torch>=2.8"]\n'
    text += 'torch-cu126 = ["torch>=2.8"]\nrocm6_4 = ["rich"]\n'
    draft, recipe = imported(tmp_path, "pyproject.toml", text)
    assert list(recipe.targets) == ["cpu-x86_64"] and draft.warning.endswith("To carry them choose --extra torch-cu126")
    draft, recipe = imported(tmp_path, "pyproject.toml", text, groups=("torch_cu126",))
    assert list(recipe.targets) == ["cu126-x86_64"] and not draft.warning
    draft, recipe = imported(tmp_path, "pyproject.toml", text, groups=("cpu",))
    assert list(recipe.targets) == ["cpu-x86_64"] and not draft.warning


def test_a_command_that_may_not_run_names_gpus_and_chooses_no_target(tmp_path: Path) -> None:
    branches = ['[ "$KIND" = gpu ]', "[ -e /dev/nvidia0 ]"]
    for branch in branches:
        text = "FROM python:3.11\nARG KIND=cpu\n"
        text += f"RUN if {branch}; then pip install -i https://host.example/whl/cu126 torch; else pip install torch; fi"
        draft, recipe = imported(tmp_path, "Dockerfile", text)
        assert list(recipe.targets) == ["cpu-x86_64"] and draft.warning.endswith("choose --target cu126-x86_64")


def test_the_local_version_of_another_index_stays(tmp_path: Path) -> None:
    text = "--index-url https://nightlies.example/v2/gfx120X/\ntorch==2.10.0+rocm7.13.0a20260513\n"
    _, recipe = imported(tmp_path, "requirements.txt", text)
    ((_, table),) = recipe.targets.items()
    assert table.requirements == ("torch==2.10.0+rocm7.13.0a20260513",)
    assert table.indexes == ("https://nightlies.example/v2/gfx120X/",)


@pytest.mark.parametrize(
    ("text", "target", "requirements", "named"),
    [
        ("torch==2.3.1+cxx11.abi", None, ["torch==2.3.1+cpu"], "torch==2.3.1+cxx11.abi"),
        ("torchvision==0.18.1+cxx11.abi\ntorch", None, ["torchvision==0.18.1+cpu", "torch"], "torchvision==0.18"),
        ("torch==2.6.0+computecanada", "cu126-x86_64", ["torch==2.6.0+cu126"], "torch==2.6.0+computecanada"),
        (
            "torch==2.6.0+cu126\ntorchaudio==2.6.0+cu124",
            None,
            ["torch==2.6.0+cu126", "torchaudio==2.6.0+cu126"],
            "cu124",
        ),
        ("torch==2.6.0+cu126", "cpu-x86_64", ["torch==2.6.0+cpu"], ""),
        ("torch==2.0.0+cu117.with.pypi.cudnn", None, ["torch==2.0.0+cu117.with.pypi.cudnn"], ""),
    ],
)
def test_a_local_version_is_carried_or_its_replacement_is_named(
    tmp_path: Path, text: str, target: str | None, requirements: list[str], named: str
) -> None:
    draft, recipe = imported(tmp_path, "requirements.txt", f"{text}\n", target=target)
    (table,) = recipe.targets.values()
    assert sorted(table.requirements) == sorted(requirements)
    replaced = [one.text for one in draft.lost if "the build for its target" in one.reason]
    assert (len(replaced) == 1 and named in replaced[0]) if named else replaced == []


def test_local_versions_of_other_packages_stay(tmp_path: Path) -> None:
    text = "torch==2.7.0+cu126\nflash-attn==2.8.0+cu12torch2.7\nnumpy==1.26.4+computecanada\n"
    _, recipe = imported(tmp_path, "requirements.txt", text, target="cu128-x86_64")
    assert recipe.requirements == ("flash-attn==2.8.0+cu12torch2.7", "numpy==1.26.4+computecanada")
    (tmp_path / "c.txt").write_text("torch==2.6.0+cu126\n")
    _, recipe = imported(tmp_path, "requirements.txt", "-c c.txt\ntorch\n", target="cpu-x86_64")
    assert recipe.constraints == ("torch==2.6.0",)


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("requirements.txt", "numpy\n# GPU dependencies (CUDA 12.1)\n", "--target cu121-x86_64"),
        ("requirements.txt", "numpy  # pip install 'jax[cuda12]' for accelerators\n", "jax[cuda12]"),
        ("pyproject.toml", '[project]\nname = "a"\ndependencies = ["rich"]  # needs an NVIDIA card\n', "NVIDIA card"),
        ("environment.yml", "dependencies:\n- numpy  # 支持GPU加速\n", "GPU"),
        (
            "Dockerfile",
            "FROM python:3.11\n# torch with ROCm 6.2 is installed by hand\nRUN pip install rich\n",
            "ROCm 6.2",
        ),
        ("requirements.txt", "numpy\n# not without a GPU-free host, no CUDA\n", ""),
        ("requirements.txt", "torch==2.6.0+cu126\n# CUDA 12.1\n", ""),
        ("requirements.txt", "numpy\n    # via cuda-python\n", ""),
    ],
)
def test_a_sign_in_a_comment_chooses_no_target_and_is_named(tmp_path: Path, name: str, text: str, named: str) -> None:
    draft, recipe = imported(tmp_path, name, text, target=None)
    if named:
        assert list(recipe.targets) == ["cpu-x86_64"]
        assert named in draft.warning and "comments of the sources name GPUs" in draft.warning
    else:
        assert draft.warning == ""


@pytest.mark.parametrize("text", ["deepspeed==0.16.0", "bitsandbytes", "flash-attn", "vllm"])
def test_packages_for_gpus_of_several_families_agree_with_each(tmp_path: Path, text: str) -> None:
    index = "--extra-index-url https://download.pytorch.org/whl/rocm6.2\n"
    assert imported(tmp_path, "requirements.txt", f"{index}torch\n{text}\n", target=None)[0].warning == ""
    assert "(CUDA)" in imported(tmp_path, "requirements.txt", f"torch\n{text}\n", target=None)[0].warning


@pytest.mark.parametrize("name", ["triton-xpu==3.0.0", "habana-torch-plugin", "torch_musa", "neuronx-cc==2.15"])
def test_packages_that_only_an_accelerators_own_index_has_are_left_out(tmp_path: Path, name: str) -> None:
    draft, recipe = imported(tmp_path, "requirements.txt", f"{name}\nnumpy\n", target=None)
    assert recipe.requirements == ("numpy",) and "envbuild has no target for" in draft.warning
    assert [one.text for one in draft.lost] == [name]
    _, recipe = imported(tmp_path, "requirements.txt", "torch-npu==2.6.0\n", target=None)
    assert recipe.requirements == ("torch-npu==2.6.0",)


@pytest.mark.parametrize(
    ("index", "pin", "carried", "reason"),
    [
        ("cu121", "torch==2.7.1", "torch==2.7.1", "no build of it for CUDA 12.1"),
        ("rocm7.2", "torch==2.2.0", "torch==2.2.0", "no build of it for ROCm 7.2"),
        ("cu113", "torch==1.13.1", "torch==1.13.1", "no build of it for CUDA 11.3"),
        ("cu126", "torch==2.7.1", "torch==2.7.1+cu126", "target's build: torch==2.7.1+cu126"),
        ("rocm6.2", "torch==2.5.1", "torch==2.5.1+rocm6.2", "target's build: torch==2.5.1+rocm6.2"),
    ],
)
def test_a_local_version_that_does_not_exist_is_not_added(
    tmp_path: Path, index: str, pin: str, carried: str, reason: str
) -> None:
    text = f"--index-url https://download.pytorch.org/whl/{index}\n{pin}\n"
    draft, recipe = imported(tmp_path, "requirements.txt", text, target=f"{index}-x86_64")
    assert recipe.targets[f"{index}-x86_64"].requirements == (carried,)
    assert [line.text for line in draft.lost if reason in line.reason] == [pin]


def test_a_patch_release_of_rocm_is_no_warning(tmp_path: Path) -> None:
    draft, _ = imported(tmp_path, "Dockerfile", "FROM rocm/dev-ubuntu-22.04:rocm7.2.3\nRUN pip install torch\n")
    assert not draft.warning and [*draft.data["targets"]] == ["rocm7.2-x86_64"]


@pytest.mark.parametrize("name", ["requirements-rocm.txt", "rocm.in"])
def test_a_file_named_for_rocm_is_a_sign(tmp_path: Path, name: str) -> None:
    assert f"file name: {name} (ROCm)" in imported(tmp_path, name, "numpy\n")[0].warning


def test_a_pyproject_with_a_name_is_read(tmp_path: Path) -> None:
    text = '[project]\nname = "a"\nrequires-python = "==3.12.9"\ndependencies = ["numpy>=2"]\n'
    draft, recipe = imported(tmp_path, "pyproject.gpu.toml", text)
    assert recipe.requirements == ("numpy>=2",) and recipe.python == "3.12"
    assert "the recipe has the minor version: 3.12" in [line.reason for line in draft.lost]


def test_builds_of_pytorchs_channel_bring_the_channel(tmp_path: Path) -> None:
    text = "dependencies: [pytorch=1.10.0=py3.9_cuda11.3_cudnn8.2.0_0, numpy]\n"
    assert imported(tmp_path, "environment.yml", text)[0].data["conda"]["channels"] == ["pytorch", "conda-forge"]


def test_an_extra_called_gpu_is_not_for_cuda_alone(tmp_path: Path) -> None:
    text = '[project]\nname = "a"\ndependencies = ["rich"]\n[project.optional-dependencies]\ngpu = ["omnivoice"]\n'
    warning = imported(tmp_path, "pyproject.toml", text, target=None)[0].warning
    assert "omnivoice (GPUs)" in warning and "CUDA" not in warning


@pytest.mark.parametrize(
    ("text", "named", "choice"),
    [
        (
            "# for boards with CUDA 12.6: install torch first\nflash-attn==2.7.4\n",
            ":1: # for boards with CUDA 12.6",
            "cu126",
        ),
        (
            "vllm\n# pip install torch --index-url https://mirror.example/whl/cu118\n",
            ":2: # pip install torch",
            "cu118",
        ),
        ("# needs CUDA 12 at least\nonnxruntime-gpu\n", ":1: # needs CUDA 12 at least (CUDA 12)", "cu129"),
        (
            "# torch is from the index of ROCm 6.3 here\nbitsandbytes  # ROCm build\n",
            "ROCm 6.3 here (ROCm 6.3)",
            "rocm6.3",
        ),
    ],
)
def test_comments_beside_other_signs_are_named_and_choose_the_advice(
    tmp_path: Path, text: str, named: str, choice: str
) -> None:
    draft, recipe = imported(tmp_path, "requirements.txt", text)
    assert list(recipe.targets) == ["cpu-x86_64"]
    assert named in draft.warning and f"choose --target {choice}-x86_64" in draft.warning


def test_a_comment_changes_no_advice_where_a_target_is_for_gpus(tmp_path: Path) -> None:
    text = "--extra-index-url https://download.pytorch.org/whl/rocm6.1\n# on CUDA 12.4 other kernels\n"
    draft, recipe = imported(tmp_path, "requirements.txt", f"{text}torch==2.5.1\npytorch_triton\n")
    assert list(recipe.targets) == ["rocm6.1-x86_64"] and draft.warning == ""
