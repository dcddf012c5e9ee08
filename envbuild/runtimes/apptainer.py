"""Apptainer, and SingularityCE, which has the same options. Source: apptainer-exec(1)."""

from __future__ import annotations

from envbuild.runtimes.base import HostProgram, HostStart, NodeContainer, Runtime, Way, bind_words


def _words(container: NodeContainer) -> list[str]:
    """Return the words that start a command in Apptainer.

    The home folder is not mounted, as in verification: ~/.local is not part of the artifact. Apptainer passes the job's
    variables (SLURM_…, PMIX_…, CUDA_VISIBLE_DEVICES) on by itself.
    """
    flags = f"apptainer exec --no-home {container.devices.apptainer}".rstrip()
    return [flags, *bind_words(container), container.image]


def _caches(cache: str, scratch: str) -> dict[str, str]:
    return {"APPTAINER_CACHEDIR": cache and f"{cache}/apptainer", "APPTAINER_TMPDIR": scratch}


def _command(started: HostProgram) -> tuple[list[str], dict[str, str]]:
    """Return the line that starts a program. /tmp is mounted as the host's administrators configured it."""
    options = ["exec", *started.options, "--cleanenv", "--no-home"]
    options += [started.devices.apptainer] if started.devices.apptainer else []
    options += ["--bind", f"{started.folder}:{started.inside}", "--pwd", started.inside] if started.folder else []
    # Apptainer and Singularity set these in the container. Users set APPTAINERENV_… for their own runs, so the caller's
    # are not passed on.
    prefixes = ("APPTAINERENV_", "SINGULARITYENV_")
    named = {prefix + name: value for name, value in started.variables.items() for prefix in prefixes}
    return [str(started.runtime), "--quiet", "--nocolor", *options, started.image, *started.command], named


APPTAINER = Runtime(
    kinds=("apptainer", "enroot"),
    words=_words,
    caches=_caches,
    host=HostStart(
        programs=("apptainer", "singularity"),
        variables=("APPTAINER_", "SINGULARITY_", "XDG_", "SQUASHFUSE", "FUSE"),
        kinds=("apptainer",),
        ways=(Way(), Way("--userns", ("--userns",))),
        command=_command,
        splits=':,"\\',
        no_variables="it has no /.singularity.d/env/90-environment.sh",
    ),
)
