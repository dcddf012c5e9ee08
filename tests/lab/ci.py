"""What a CI does with envbuild, for tests: commits, matrices, and the schemas of the services' files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lab.forked import run_forked

from envbuild.lock.format import Lock, lock_file_name, render
from envbuild.lock.image import ImageLock, OciLock, image_lock_name, render_image
from envbuild.recipe.load import load_recipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target


def matrix(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    done = run_forked("matrix", *arguments, cwd=cwd, env={**os.environ, **env})
    assert "Traceback" not in done.stderr, done.stderr
    return done


def write_recipe(root: Path, name: str, *targets: str, locked: bool = True) -> Path:
    """A recipe at root/recipes/NAME, and its locks: of wheels and of an image base that are nowhere."""
    path = root / "recipes" / name / "recipe.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = "".join(f"[targets.{target}]\n" for target in targets or ("cpu-x86_64",))
    path.write_text(f'name = "{name}"\ndescription = "d"\npython = "3.11"\nrequirements = ["torch==2.10.0"]\n{tables}')
    if locked:
        write_locks(path)
    return path


def write_locks(path: Path) -> None:
    """Current locks of wheels and image bases beside the recipe in `path`."""
    loaded = load_recipe(path)
    for name in loaded.recipe.targets:
        target = Target.parse(name)
        packages = [LockedPackage("torch", "2.10.0", ("a" * 64,))]
        if target.family.gpu:
            cuda = f"{target.accelerator[2:4]}.{target.accelerator[4:]}.77"
            packages.append(LockedPackage("nvidia-cuda-runtime-cu12", cuda, ("b" * 64,)))
        wheels = Lock(
            loaded.recipe.name, name, "3.11", target.platform("2.28"), loaded.resolution_digest(target), tuple(packages)
        )
        base = OciLock(loaded.recipe.image.base, "sha256:" + "c" * 64)
        image = ImageLock(loaded.recipe.name, name, loaded.image_digest(target), base)
        path.with_name(lock_file_name(name)).write_text(render(wheels))
        path.with_name(image_lock_name(name)).write_text(render_image(image))


def git(folder: Path, *arguments: str) -> str:
    name = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *name, *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "m")
    return git(folder, "rev-parse", "HEAD")


def valid(schema: str, text: str) -> bool:
    """Whether `text` is what the schema that SchemaStore keeps for the service's files allows."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--builtin-schema",
            f"vendor.{schema}",
            "--default-filetype",
            "yaml",
            "-",
        ],
        input=text,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1) and "validation" in (done.stdout + done.stderr), done.stderr
    return done.returncode == 0
