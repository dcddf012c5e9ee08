"""Where an artifact comes from, in the terms of SLSA's provenance v1 (slsa.dev/spec/v1.0/provenance)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BUILD = "urn:envbuild:build:1"
# Whoever builds outside of a CI that is known here.
_ANYBODY = "urn:envbuild:builder"


def provenance(receipt: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """Return the provenance of the artifact of `receipt`, built by the CI that `env` describes.

    The signer states it: what it says of the CI is as true as the signer is honest.
    """
    digests = {name: receipt[name]["digest"] for name in ("recipe", "lock", "plan")}
    materials: list[dict[str, Any]] = [
        {"name": name, "digest": {"sha256": digest.partition(":")[2]}} for name, digest in digests.items()
    ]
    if commit := receipt.get("project", {}).get("commit"):
        materials.append({"name": receipt["project"]["name"], "digest": {"gitCommit": commit}})
    builder, invocation = _ci(env)
    parameters = {
        "recipe": receipt["recipe"]["name"],
        "target": receipt["target"],
        "artifact": receipt["artifact"]["kind"],
    }
    return {
        "buildDefinition": {
            "buildType": _BUILD,
            "externalParameters": parameters,
            "internalParameters": {},
            "resolvedDependencies": materials,
        },
        "runDetails": {
            "builder": {"id": builder, "version": {"envbuild": receipt["versions"]["envbuild"]}},
            "metadata": {**({"invocationId": invocation} if invocation else {}), "finishedOn": receipt["verified_at"]},
        },
    }


def _ci(env: Mapping[str, str]) -> tuple[str, str]:
    """Return (builder, invocation) as URIs, as GitHub's and GitLab's own provenance names them."""
    if env.get("GITHUB_ACTIONS") == "true" and "GITHUB_WORKFLOW_REF" in env:
        server, run = env.get("GITHUB_SERVER_URL", "https://github.com"), env.get("GITHUB_RUN_ID", "")
        job = f"{env.get('GITHUB_REPOSITORY', '')}/actions/runs/{run}/attempts/{env.get('GITHUB_RUN_ATTEMPT', '1')}"
        return f"{server}/{env['GITHUB_WORKFLOW_REF']}", f"{server}/{job}"
    if env.get("GITLAB_CI") == "true" and "CI_PROJECT_URL" in env:
        return f"{env['CI_PROJECT_URL']}/-/runners/{env.get('CI_RUNNER_ID', '')}", env.get("CI_JOB_URL", "")
    return _ANYBODY, ""
