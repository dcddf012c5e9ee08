"""The stage of a Dockerfile that builds source layers: `python -m envbuild.artifacts.layers_stage DESCRIPTION …`.

With a description alone (layers.json, see layers/source_standalone.py), it prints the Debian packages that are
missing here; with ARCHIVES and PREFIX too, it builds all layers into PREFIX, each with the list of its files
that artifacts contain.

Runs in an image, beside MODULES: needs only Python 3.11.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from envbuild.artifacts.layer_lists import LayerList, list_files
from envbuild.base.errors import BuildError, EnvbuildError, UsageError
from envbuild.layers.source_standalone import build_one, read_description
from envbuild.recipe.sources import SourceLayer

# The modules that this one needs, relative to the package's folder.
MODULES = (
    "__init__.py",
    "base/elf.py",
    "base/errors.py",
    "base/files.py",
    "base/masking.py",
    "base/packages.py",
    "base/process.py",
    "base/progress.py",
    "base/terminal.py",
    "base/units.py",
    "base/unpack.py",
    "base/__init__.py",
    "artifacts/__init__.py",
    "artifacts/installed.py",
    "artifacts/layer_lists.py",
    "artifacts/layers_stage.py",
    "data/__init__.py",
    "data/diagnoses.toml",
    "data/nccl_log.toml",
    "data/secrets.toml",
    "jobcheck/__init__.py",
    "jobcheck/diagnose/__init__.py",
    "jobcheck/diagnose/engine.py",
    "jobcheck/diagnose/exception.py",
    "jobcheck/diagnose/mpi_help.py",
    "jobcheck/diagnose/nccl_log.py",
    "jobcheck/diagnose/rules.py",
    "jobcheck/diagnose/shapes.py",
    "layers/__init__.py",
    "layers/local_build_host.py",
    "layers/source_files.py",
    "layers/source_causes.py",
    "layers/source_job.py",
    "layers/source_standalone.py",
    "layers/source_steps.py",
    "recipe/__init__.py",
    "recipe/sources.py",
    "site/__init__.py",
    "site/pip_config.py",
)
# Packages for every layer; a program of the same name in PATH will do as well.
_ALWAYS = ("patchelf",)


def missing_packages(layers: Iterable[SourceLayer]) -> list[str]:
    """Return the Debian packages that `layers` need and this system lacks; [] on a system without dpkg."""
    if shutil.which("dpkg-query") is None:
        return []
    wanted = dict.fromkeys([*(one for layer in layers for one in layer.packages), *_ALWAYS])
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n", *wanted], capture_output=True, text=True
    )  # exits with 1 if it does not know one of them
    there = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("installed ")}
    return [one for one in wanted if one not in there and shutil.which(one) is None]


def build(description: Path, archives: Path, prefix: Path) -> None:
    """Build the layers of `description` from the files in `archives` into `prefix`. Raises EnvbuildError, OSError."""
    layers, hosts = read_description(description.read_text(encoding="utf-8"))
    built: dict[str, Path] = {}
    with tempfile.TemporaryDirectory(prefix="envbuild-") as work:
        for layer in layers:
            tree = build_one(layer, built, hosts, archives, Path(work, layer.name))
            files = list_files(tree)
            built[layer.name] = tree
            both = next((one.path for one in files if os.path.lexists(prefix / one.path)), None)
            if both is not None:
                raise BuildError(
                    f"layer {layer.name} {layer.version} and another one both have {both}",
                    "leave one of them out of the recipe",
                )
            shutil.copytree(tree, prefix, symlinks=True, dirs_exist_ok=True)
            LayerList(layer.name, layer.version, layer.sha256, files).write(prefix)
            print(f"{layer.name} {layer.version}: {len(files)} files", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the stage, see the module; return the exit status."""
    try:
        if len(arguments) == 1:
            text = Path(arguments[0]).read_text(encoding="utf-8")
            print(*missing_packages(read_description(text)[0]))
        elif len(arguments) == 3:
            build(*map(Path, arguments))
        else:
            raise UsageError("layers_stage DESCRIPTION [ARCHIVES PREFIX]")
    except EnvbuildError as error:
        hint = f"\nhint: {error.hint}" if error.hint else ""
        print(f"error: {error.message}{hint}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return BuildError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
