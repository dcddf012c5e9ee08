"""[layers] of recipes merged with data/sources.toml: what is built, in which order, with which options."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from envbuild.base.errors import RecipeError
from envbuild.layers import source_known
from envbuild.layers.source_known import source_layers
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.sources import HostLayer, SourceLayer
from envbuild.recipe.targets import Target

_SOURCES = Path(source_known.__file__).parents[1] / "data" / "sources.toml"
_HEAD = """
name = "pt"
description = "layers"
python = "3.11"
requirements = ["torch"]
{fabric}
[targets.cpu-x86_64]
[targets.cu126-x86_64]
[targets.cu126-aarch64]
[targets.cu118-x86_64]
"""
_LIBFABRIC = '[layers.libfabric]\nversion = "2.1.0"\n'
_PLUGIN = '[layers.aws-ofi-nccl]\nversion = "1.16.3"\n'
_CUDA = "cu126-x86_64"
_SHA = "ab" * 32
# Providers of libfabric 2.1.0 that configure would look for by itself.
_PROVIDERS = [
    "psm2",
    "psm3",
    "sockets",
    "verbs",
    "efa",
    "cxi",
    "usnic",
    "udp",
    "tcp",
    "rxm",
    "mrail",
    "rxd",
    "shm",
    "sm2",
    "ucx",
    "lpp",
    "perf",
    "trace",
    "profile",
    "hook_debug",
    "hook_hmem",
    "dmabuf_peer_mem",
    "opx",
    "lnx",
]


def _recipe(folder: Path, layers: str, fabric: str = "any") -> LoadedRecipe:
    path = folder / "recipe.toml"
    path.write_text(_HEAD.format(fabric=f'fabric = "{fabric}"').lstrip() + layers)
    return load_recipe(path)


def _layers(folder: Path, layers: str, target: str = _CUDA, fabric: str = "any") -> dict[str, SourceLayer]:
    found, _ = source_layers(_recipe(folder, layers, fabric), Target.parse(target))
    return {layer.name: layer for layer in found}


def test_libfabric_is_told_of_each_provider_whether_it_is_built(tmp_path: Path) -> None:
    layer = _layers(tmp_path, _LIBFABRIC)["libfabric"]
    for provider in _PROVIDERS:
        said = {f"--enable-{provider}", f"--disable-{provider}"} & set(layer.configure)
        assert len(said) == 1, provider
    assert layer.sha256 == "97df312779e2d937246d2f46385b700e0958ed796d6fed7aae77e2d18923e19f"
    assert layer.url.endswith("/v2.1.0/libfabric-2.1.0.tar.bz2")
    assert layer.check == ("fi_info", "-p", "tcp")
    assert layer.wheels == ()


def test_efa_builds_its_provider_and_the_plugin_for_aws(tmp_path: Path) -> None:
    layers = _layers(tmp_path, _LIBFABRIC + _PLUGIN, fabric="efa")
    assert "--enable-efa" in layers["libfabric"].configure
    assert "--disable-efa" not in layers["libfabric"].configure
    assert "libibverbs-dev" in layers["libfabric"].packages
    assert "--enable-platform-aws" in layers["aws-ofi-nccl"].configure
    assert {wheel.name for wheel in layers["libfabric"].wheels} >= {"nvidia-nvml-dev-cu12"}
    without = _layers(tmp_path, _LIBFABRIC, target="cpu-x86_64", fabric="efa")
    assert without["libfabric"].wheels == ()


@pytest.mark.parametrize("fabric", ["any", "socket", "ib", "cxi", "tcp-ofi"])
def test_other_fabrics_get_a_plugin_that_is_not_for_aws(tmp_path: Path, fabric: str) -> None:
    layers = _layers(tmp_path, _LIBFABRIC + _PLUGIN, fabric=fabric)
    assert "--disable-platform-aws" in layers["aws-ofi-nccl"].configure
    assert "--disable-efa" in layers["libfabric"].configure


def test_what_a_layer_requires_comes_first_and_is_added_where_a_version_is_known(tmp_path: Path) -> None:
    layers = _layers(tmp_path, _PLUGIN + _LIBFABRIC)
    assert list(layers)[-1] == "aws-ofi-nccl"
    assert set(layers) == {"libfabric", "hwloc", "aws-ofi-nccl"}
    hwloc = layers["hwloc"]
    assert f'"{hwloc.version}" = "{hwloc.sha256}"' in _SOURCES.read_text(encoding="utf-8")


def test_a_layer_of_the_host_is_not_built_and_still_required(tmp_path: Path) -> None:
    text = '[layers.libfabric]\nversion = "1.22.0"\nkind = "host"\npath = "/opt/cray/libfabric/1.22.0"\n' + _PLUGIN
    layers, hosts = source_layers(_recipe(tmp_path, text, "cxi"), Target.parse(_CUDA))
    assert hosts == (HostLayer("libfabric", "1.22.0", "/opt/cray/libfabric/1.22.0"),)
    assert [layer.name for layer in layers] == ["hwloc", "aws-ofi-nccl"]
    assert "libfabric" in layers[-1].requires


def test_wheels_are_left_out_and_targets_choose(tmp_path: Path) -> None:
    text = '[layers.nccl]\nversion = "2.26.2"\n' + _LIBFABRIC + 'targets = ["cu126-aarch64"]\n'
    assert _layers(tmp_path, text) == {}
    assert set(_layers(tmp_path, text, "cu126-aarch64")) == {"libfabric"}


def test_processors_have_their_own_headers_and_digests(tmp_path: Path) -> None:
    text = _LIBFABRIC + _PLUGIN
    here, there = (_layers(tmp_path, text, f"cu126-{arch}")["aws-ofi-nccl"] for arch in ("x86_64", "aarch64"))
    assert here.digest != there.digest
    assert not {h for w in here.wheels for h in w.hashes} & {h for w in there.wheels for h in w.hashes}


def test_a_recipes_option_takes_the_place_of_the_known_one(tmp_path: Path) -> None:
    text = _LIBFABRIC + 'configure = ["--enable-verbs", "--with-cuda=/usr/local/cuda"]\n'
    options = _layers(tmp_path, text)["libfabric"].configure
    assert "--enable-verbs" in options and "--disable-verbs" not in options
    assert "--with-cuda=/usr/local/cuda" in options and "--without-cuda" not in options


def test_a_source_of_ones_own_needs_url_and_sha256_alone(tmp_path: Path) -> None:
    text = f'[layers.foo]\nversion = "3"\nurl = "https://example.org/foo-3.tar.gz"\nsha256 = "{_SHA}"\n'
    layer = _layers(tmp_path, text)["foo"]
    assert (layer.system, layer.sha256, layer.configure) == ("autotools", _SHA, ())
    assert {"gcc", "make"} <= set(layer.packages)


def test_a_patch_decides_the_digest_by_its_content(tmp_path: Path) -> None:
    text = _LIBFABRIC + 'patches = ["fix.patch"]\n'
    (tmp_path / "fix.patch").write_text("one")
    first = _layers(tmp_path, text)["libfabric"]
    (tmp_path / "fix.patch").write_text("two")
    assert first.digest != _layers(tmp_path, text)["libfabric"].digest


@pytest.mark.parametrize(
    ("layers", "target", "message", "hint"),
    [
        (
            '[layers.libfabric]\nversion = "9.9.9"\n',
            _CUDA,
            r"libfabric 9\.9\.9: its sha256 is not known.*2\.1\.0",
            "curl -L https://github.com/ofiwg/libfabric",
        ),
        ('[layers.foo]\nversion = "1"\n', _CUDA, "the source of foo is not known", "url"),
        (
            '[layers.foo]\nversion = "1"\nurl = "https://example.org/foo.tar"\n',
            _CUDA,
            "sha256. is missing",
            r"curl -L https://example\.org/foo\.tar",
        ),
        (_PLUGIN, _CUDA, "needs the layer 'libfabric'", r"\[layers\.libfabric\]"),
        (_LIBFABRIC + _PLUGIN, "cpu-x86_64", "cpu-x86_64 has no CUDA", "targets"),
        (_LIBFABRIC + _PLUGIN, "cu118-x86_64", r"CUDA 11\.8 are not known", r"12\.6"),
        (_LIBFABRIC + 'configure = ["--with-x={nothing}"]\n', _CUDA, r"\{nothing\}", "requires"),
        (_LIBFABRIC + 'patches = ["no.patch"]\n', _CUDA, r"no\.patch cannot be read", "below the recipe's folder"),
    ],
)
def test_what_does_not_go_together_names_the_line_and_what_to_change(
    tmp_path: Path, layers: str, target: str, message: str, hint: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        _layers(tmp_path, layers, target)
    assert re.search(r"recipe\.toml:\d+:\d+: ", caught.value.message)
    assert re.search(message, caught.value.message)
    assert re.search(hint, caught.value.hint or "")


def test_layers_that_require_each_other_are_refused(tmp_path: Path) -> None:
    text = "".join(
        f'[layers.{one}]\nversion = "1"\nurl = "https://example.org/{one}"\nsha256 = "{_SHA}"\nrequires = ["{other}"]\n'
        for one, other in (("aa", "bb"), ("bb", "aa"))
    )
    with pytest.raises(RecipeError, match="aa → bb → aa"):
        _layers(tmp_path, text)


def test_the_data_has_a_whole_hash_for_each_version_and_headers_for_each_processor() -> None:
    import envbuild.layers.source_known as module

    data = tomllib.loads((Path(module.__file__).parents[1] / "data" / "sources.toml").read_text())
    for name, source in data["sources"].items():
        assert source["versions"], name
        assert source.get("default") in (None, *source["versions"]), name
        for sha256 in source["versions"].values():
            assert re.fullmatch("[0-9a-f]{64}", sha256), name
        hashes = list(source["versions"].values())
        assert len(set(hashes)) == len(hashes), name
    for version, processors in data["cuda"].items():
        assert set(processors) == {"x86_64", "aarch64"}, version
        assert set(processors["x86_64"]) == set(processors["aarch64"]), version
        for row in [row for rows in processors.values() for row in rows.values()]:
            assert row[0].startswith(version + ".")
            assert all(re.fullmatch("[0-9a-f]{64}", one) for one in row[1:]) and len(row) > 1


def test_horovod_brings_what_builds_it_and_the_recipe_chooses_mpi(tmp_path: Path) -> None:
    plain = '[layers.horovod]\nversion = "0.28.1"\n'
    here = _layers(tmp_path, plain, "cpu-x86_64")["horovod"]
    assert here.system == "wheel" and "cmake" not in here.tools
    assert {one.name for one in here.build} >= {"pip", "setuptools", "packaging", "cmake"}
    assert "HOROVOD_WITHOUT_MPI=1" in here.configure
    mpi = _layers(tmp_path, plain + 'configure = ["HOROVOD_WITH_MPI=1"]\n', "cpu-x86_64")["horovod"]
    assert "HOROVOD_WITH_MPI=1" in mpi.configure and "HOROVOD_WITHOUT_MPI=1" not in mpi.configure
    assert "HOROVOD_WITH_GLOO=1" in mpi.configure and mpi.digest != here.digest
    other = _layers(tmp_path, plain, "cu126-aarch64")["horovod"]
    cmake = [one.hashes for one in (*here.build, *other.build) if one.name == "cmake"]
    assert len(set(cmake)) == 2, "each processor has programs of its own"
    changed = dataclasses.replace(here.build[0], version="1")
    assert dataclasses.replace(here, build=(changed, *here.build[1:])).digest != here.digest
