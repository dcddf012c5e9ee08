"""A folder in which commands of help and docs can be run: what they name lies there, small and made by hand.

Shared file systems of the guides (/fsx, /apps, /scratch, /home/users) are its `top`, in the sites that come with
envbuild too; the current folder is a user's below it, as [paths] shared has it.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import shutil
import textwrap
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from click.testing import CliRunner
from lab import artifacts
from lab.commands import TOP
from lab.golden import read_golden_cases

from envbuild.base.files import sha256_of
from envbuild.cli.commands import cli
from envbuild.contract.receipt import receipt_path
from envbuild.contract.state import State
from envbuild.image.layout import Blobs
from envbuild.lock.wheels import wheel_lock
from envbuild.recipe.find import recipe_files, shipped_folder
from envbuild.recipe.load import load_recipe
from envbuild.recipe.targets import Target

# What `./site.toml` is: the guides adjust one of these.
SITE_OF_PAGE = {"docs/seeds/pytorch-ddp-cpu.md": "aws-eks", "docs/seeds/ddp-dlc-enroot.md": "aws-parallelcluster"}
# What placeholders stand for, by page where they differ.
_PLACEHOLDERS = {
    "RECIPE": "pt_cpu",
    "SITE": "slurm-modules",
    "S": "slurm-modules",
    "SCRIPT": "train.sbatch",
    "LOG": "logs/ddp_1234.out",
    "DIR": "dir",
    "REGISTRY/NAME:TAG": "registry.example.org/team/pt_cpu:1",
    "VENV": "venvs/{page}",
    "ACCOUNT.dkr.ecr.REGION.amazonaws.com/fsdp:pytorch-cpu": "1.dkr.ecr.us-east-1.amazonaws.com/fsdp:1",
    # Of an image; a machine may have the folder, too.
    "/opt/env": "image-env",
}
_SHARED = re.compile(r"(?<![\w.])/(fsx|apps|scratch|home/users)(?=[/:\"]|$)")
_USER = "ada"
_DIGEST = f"sha256:{'ab' * 32}"
_DATA = TOP / "tests" / "unit" / "data"
_PASSED = {"format": 1, "passed": True, "verified_at": "2026-11-21T00:00:00+00:00"}


class ShownSite:
    """The folder; `here` is the current one of its commands, `env` their variables."""

    def __init__(self, top: Path) -> None:
        self.top, self.here = top, top / _USER
        self.others = top / "home/.config/envbuild/recipes"  # besides the only one of ./recipes
        self.env = {
            "HOME": str(top / "home"),
            "USER": _USER,
            "ENVBUILD_STORE": str(top / "store"),
            "COLUMNS": "",
            "ENVBUILD_SITE": str(self.here / "sites" / "slurm-modules.toml"),
            "PIP_CONFIG_FILE": "/dev/null",
        }
        for folder in ("sites", "logs", "MOUNT/NAME", "my", "dir", "venvs"):
            (self.here / folder).mkdir(parents=True)
        for folder in ("home", "envs", "bundles", "USER"):
            (top / folder).mkdir()
        for file in (TOP / "sites").glob("*.toml"):
            (self.here / "sites" / file.name).write_text(_SHARED.sub(str(top), file.read_text()))
        self._write_inputs()
        self._build()

    def words(self, page: str, arguments: Sequence[str]) -> list[str]:
        """`arguments` with what they stand for here."""
        stem = Path(page).stem
        words = [_PLACEHOLDERS.get(word, word).replace("{page}", stem) for word in arguments]
        words = [_SHARED.sub(str(self.top), word) for word in words]
        site = SITE_OF_PAGE.get(page, "slurm-modules")
        words = [re.sub(r"^~(?=/)", self.env["HOME"], word) for word in words]
        words = [f"sites/{site}.toml" if word == "./site.toml" else word for word in words]
        return [one for word in words for one in (sorted(glob(word, root_dir=self.here)) or [word])]

    def _write_inputs(self) -> None:
        here = self.here
        for name, text in (("my/recipe.toml", "my"), ("recipe.toml", _USER)):
            recipe = (TOP / "recipes" / "pt_efa" / "recipe.toml").read_text()
            (here / name).write_text(recipe.replace('name = "pt_efa"', f'name = "{text}"'))
        for lock in (TOP / "recipes" / "pt_efa").glob("cu130*"):
            shutil.copy(lock, here / "my")
        self._horovod_of_the_guide()
        self._recipe_of_the_tutorial()
        self._recipe_with_a_project()
        shutil.copytree(TOP / "recipes" / "pt_cpu", here / "B" / "recipes" / "pt_cpu")
        for script in ("train.py", "multi_gpu.py", "ddp_example.py", "base_training.py"):
            (here / script).write_text("")
        (self.top / "ddp.py").write_text("")
        (self.top / "ddp-pytorch").mkdir()
        (self.top / "ddp-pytorch" / "1.run.py").write_text("")
        log = next((_DATA / "logs").glob("gloo-timeout.log")).read_bytes()
        for name in (
            "logs/ddp_1234.out",
            "logs/pt_cpu_42.out",
            "logs/my_train_42.out",
            "node1.log",
            "MOUNT/NAME/pod-1.log",
        ):
            (here / name).write_bytes(log)
        (here / "node2.log.gz").write_bytes(gzip.compress(log))
        for table, case, name in (
            ("slurm", "venv-srun", "train.sbatch"),
            ("pbs", "gh200", "ddp.pbs"),
            ("kubernetes", "pytorchjob", "pytorchjob.yaml"),
        ):
            (here / name).write_text(read_golden_cases(_DATA / f"jobs/{table}.txt")[case])
        shutil.copytree(TOP / "tests/unit/data/init", here / "imported")  # of a project: files for `envbuild init`

    def _horovod_of_the_guide(self) -> None:
        """The recipe that docs/seeds/slurm-modules.md has its readers make."""
        page = (TOP / "docs" / "seeds" / "slurm-modules.md").read_text()
        block = page[page.index("    [targets.cu126-x86_64]") : page.index("Lock it by `envbuild lock horovod_cu126")]
        shutil.copytree(TOP / "recipes" / "horovod", self.others / "horovod_cu126")
        file = self.others / "horovod_cu126" / "recipe.toml"
        head = file.read_text().partition("[targets")[0].replace('"horovod"', '"horovod_cu126"', 1)
        file.write_text(head + textwrap.dedent(block))

    def _recipe_of_the_tutorial(self) -> None:
        """The recipe that docs/tutorial.md has its readers write: it asks for pt_cpu's packages, so that lock fits."""
        page = (TOP / "docs" / "tutorial.md").read_text()
        folder = self.others / "my_train"
        folder.mkdir()
        (folder / "recipe.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
        lock = "cpu-x86_64.requirements.txt"
        text = (TOP / "recipes" / "pt_cpu" / lock).read_text()
        (folder / lock).write_text(text.replace("pt_cpu", "my_train"))

    def _recipe_with_a_project(self) -> None:
        """The recipe of docs/howto/project.md: pt_cpu's packages and a folder two folders up."""
        folder = self.here / "recipes" / "lab"
        shutil.copytree(TOP / "recipes" / "pt_cpu", folder)
        for file in folder.iterdir():
            file.write_text(file.read_text().replace("pt_cpu", "lab"))
        with (folder / "recipe.toml").open("a") as out:
            out.write('\n[project]\npath = "../.."\nmodule = "pkg"\ninclude = ["/train.py"]\n')

    def _build(self) -> None:
        """Artifacts as builds leave them, with receipts."""
        cpu = self.here / "build" / "pt_cpu" / "cpu-x86_64"
        for folder in (cpu / "venv", self.top / "envs" / "pt_cpu", self.here / "venvs" / "pytorch-ddp-cpu"):
            self._venv(folder)
        self._venv(self.here / "build/my_train/cpu-x86_64/venv", recipe="my_train")
        self._venv(self.here / "build/lab/cpu-x86_64/venv", recipe="lab")
        self._venv(self.here / "venvs" / "gh200-pbs", recipe="gh200_cu126", target="cu126-aarch64")
        for folder in (self.here / "build/horovod/cpu-x86_64/venv", self.here / "venvs" / "slurm-modules"):
            self._venv(folder, recipe="horovod", packages=(("horovod", "0.28.1", "x"),))
        artifacts.make_venv(cpu / "conda", artifacts.conda_package("zlib", "1.3", {"lib/z": "z"}, str(cpu / "conda")))
        (cpu / "conda" / "envbuild.json").write_text(artifacts.state(artifact="conda"))
        pushed = {"digest": _DIGEST, "path": "pt_cpu:1", "pushed": f"registry.example.org/team/pt_cpu@{_DIGEST}"}
        receipt_path(cpu / "docker").write_text(
            json.dumps(
                {
                    **_PASSED,
                    "artifact": pushed,
                    "recipe": {"name": "pt_cpu"},
                    "target": "cpu-x86_64",
                    "versions": {},
                    "lock": {"digest": self._lock("pt_cpu", "cpu-x86_64")},
                    "settings": {"nodes": 2, "nproc_per_node": 2, "epochs": 3, "faults": False},
                }
            )
        )
        self._images()

    def _lock(self, recipe: str, target: str) -> str:
        """The digest of the lock that a recipe has, "" for one without."""
        files = recipe_files([self.here / "recipes", self.others, shipped_folder()])
        lock = wheel_lock(load_recipe(files[recipe]), Target.parse(target)).inspect().lock
        return lock.digest if lock else ""

    def _venv(self, folder: Path, **state: object) -> None:
        made = State("venv", "pt_cpu", "r", "l", "p", "cpu-x86_64", "3.11", "3.11.7", "/usr/bin/python3.11", ())
        made = dataclasses.replace(made, **state)  # type: ignore[arg-type]
        made = dataclasses.replace(made, lock_digest=self._lock(made.recipe, made.target))
        artifacts.make_venv(folder, {**artifacts.frame(), "envbuild.json": made.render()})
        self._receipt(folder, made.digest)

    def _images(self) -> None:
        """An OCI layout of two platforms, archives, and files of enroot and Apptainer."""
        blobs = Blobs(self.top / "blobs")
        both = []
        for arch in ("amd64", "arm64"):
            layer = artifacts.layer(blobs, artifacts.under("opt/env", artifacts.frame(recipe="pt_cpu")))
            manifest, config = artifacts.image(blobs, [layer], arch=arch)
            both.append(manifest)
            if arch == "amd64":
                for name in ("old.tar", "new.tar", "image.tar"):
                    artifacts.docker_archive(self.here / name, blobs, config, [layer], "pt_cpu:1")
        artifacts.layout(self.here / "image", blobs, [(artifacts.multi(blobs, both), "1")])
        for kind, suffix in (("enroot", "sqsh"), ("apptainer", "sif")):
            file = self.here / f"pytorch.{suffix}"
            line = [kind, "--from", f"docker-archive:{self.here}/image.tar", "--out", str(file), "--no-verify"]
            CliRunner().invoke(cli, line, env=self.env, catch_exceptions=False)
            names = ("ada/pt_cpu", "pytorch", "pt", "ddp-pytorch")
            copies = [self.top / f"{name}.{suffix}" for name in names]
            for copy in (file, *copies):
                if copy != file:
                    shutil.copy(file, copy)
                self._receipt(copy, f"sha256:{sha256_of(copy)}")

    def _receipt(self, artifact: Path, digest: str) -> None:
        told = {**_PASSED, "artifact": {"digest": digest, "path": str(artifact)}}
        receipt_path(artifact).write_text(json.dumps(told))
