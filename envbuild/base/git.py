"""Only way to run git in envbuild: without programs that a repository names, and without prompts.

The configuration in a repository (.git/config) names programs that git runs: hooks, the file system monitor, filters,
pagers, programs for other protocols. It is untrusted: the repository may have come in an archive. The configuration of
the user and of the host stays in force, and so does git's own check of the owner (safe.directory).
Sources: git-config(1); git(1), "Environment Variables"; gitattributes(5), `filter`; safe.bareRepository.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from envbuild.base import process
from envbuild.base.errors import UsageError

# Variables that tell git which repository it works in (git rev-parse --local-env-vars), and programs that it may run.
_DROPPED = ["GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_CONFIG", "GIT_DIR", "GIT_EXTERNAL_DIFF"]
_DROPPED += ["GIT_GRAFT_FILE", "GIT_IMPLICIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_INTERNAL_SUPER_PREFIX"]
_DROPPED += ["GIT_NAMESPACE", "GIT_NO_REPLACE_OBJECTS", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX"]
_DROPPED += ["GIT_REPLACE_REF_BASE", "GIT_SHALLOW_FILE", "GIT_TEMPLATE_DIR", "GIT_WORK_TREE"]
# An empty fsmonitor is none for every git: one before 2.36 would run "false" as a program.
_SETTINGS = ("core.hooksPath=/dev/null", "core.fsmonitor=", "init.templateDir=", "safe.bareRepository=explicit")
# Commands that read no file of the work tree by way of a filter.
_WITHOUT_FILTERS = ("rev-parse", "ls-files")


def run_git(
    folder: Path,
    *words: str | Path,
    variables: Mapping[str, str],
    settings: tuple[str, ...] = (),
    fetches: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run git with the command `words` in `folder`; return its output and exit status, also after a failure.

    With `fetches`, for repositories that envbuild created, git may use the network and the repository's filters. Raises
    HostError without git, and UsageError for a repository with a filter that cannot be disabled.
    """
    env = {name: value for name, value in variables.items() if name not in _DROPPED}
    env |= {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    if not fetches:
        # A repository may lack objects, name a server that has them, and the program that talks to it.
        env |= {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
        if words[0] not in _WITHOUT_FILTERS:
            settings += _without_filters(folder, env)
    command, *rest = words
    if command == "diff":
        rest = ["--no-ext-diff", "--no-textconv", *rest]
    options = (word for setting in (*_SETTINGS, *settings) for word in ("-c", setting))
    line = ["git", "--no-pager", *options, "-C", folder, command, *rest]
    return process.run(line, env=env, check=False)


def _without_filters(folder: Path, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the settings that disable the filters defined in the repository of `folder`."""
    settings = []
    for key in sorted(_filters(folder, env) - _filters(folder, {**env, "GIT_DIR": "/dev/null"})):
        name = key.partition("\n")[0]
        if "=" in name or "\n" in name:
            raise UsageError(
                f"refusing to run git in {folder}: its configuration has a filter with an unusual name, {name!r:.80}",
                "remove it from the file config in the repository's folder .git",
            )
        settings.append(f"{name}=" + ("false" if name.endswith(".required") else ""))
    return tuple(settings)


def _filters(folder: Path, env: Mapping[str, str]) -> set[str]:
    """Return the filters in git's effective configuration in `folder`, each as KEY, newline, VALUE."""
    options = [word for setting in _SETTINGS for word in ("-c", setting)]
    done = process.run(["git", *options, "-C", folder, "config", "--null", "--list"], env=env, check=False)
    return {row for row in done.stdout.split("\0") if row.startswith("filter.")}
