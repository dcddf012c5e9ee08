"""What a CI does with envbuild, for tests: commits, matrices, and the schemas of the services' files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def matrix(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "envbuild", "matrix", *arguments],
        capture_output=True, text=True, cwd=cwd, env={**os.environ, **env},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done


def write_recipe(root: Path, name: str, *targets: str) -> Path:
    path = root / "recipes" / name / "recipe.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = "".join(f"[targets.{target}]\n" for target in targets or ("cpu-x86_64",))
    path.write_text(
        f'name = "{name}"\ndescription = "d"\npython = "3.11"\nrequirements = ["torch==2.10.0"]\n{tables}'
    )
    return path


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
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}",
         "--default-filetype", "yaml", "-"],
        input=text, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 1) and "validation" in (done.stdout + done.stderr), done.stderr
    return done.returncode == 0
