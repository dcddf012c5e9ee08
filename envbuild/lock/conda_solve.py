"""Solvers for a recipe's conda packages for one target: rattler, on a host of any platform, or conda-lock.

conda-lock is for sites that require the solution of conda, mamba or micromamba."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from textwrap import indent
from typing import Any
from urllib.parse import urlsplit

from envbuild.base import process
from envbuild.base.errors import HostError, LockError, RecipeError
from envbuild.base.masking import redact
from envbuild.base.packages import channel_url
from envbuild.base.progress import Log
from envbuild.environment import Environment
from envbuild.lock.conda import CondaPackage, canonical_depends, conda_platform, file_parts
from envbuild.lock.conda_format import parse_packages
from envbuild.lock.offers import ReleaseAges
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.targets import CUDA, Target
from envbuild.site.pip_config import ca_bundle
from envbuild.store.client import split_credentials

# In the solver's explanation: a package that is needed, and that no channel has.
_ABSENT = re.compile(r"^[^\w\n]*+([\w.-]+) [^\n]*, for which no candidates were found", re.MULTILINE)
_ELSEWHERE = "bring the lock of a host that reaches it: `envbuild lock RECIPE --conda` makes it for every target"
_TOKEN = re.compile(r"/t/[^/\s]+")


@dataclass(frozen=True, slots=True)
class Spec:
    """A match spec and its position in the recipe (FILE:LINE:COL)."""

    text: str
    where: str

    @property
    def name(self) -> str:
        """Name of the package."""
        return re.split(r"[^A-Za-z0-9_.-]", self.text, maxsplit=1)[0].lower()


def recipe_specs(recipe: LoadedRecipe, target: Target) -> list[Spec]:
    """Return the recipe's specs: its Python, the dependencies in [conda], and those of the target."""
    of_all, of_target = recipe.recipe.conda.dependencies, recipe.recipe.targets[target.name].conda
    return [
        Spec(f"python {recipe.recipe.python}.*", recipe.where("python")),
        *(Spec(text, recipe.where("conda", "dependencies", index)) for index, text in enumerate(of_all)),
        *(Spec(text, recipe.where("targets", target.name, "conda", index)) for index, text in enumerate(of_target)),
    ]


def virtual_packages(recipe: LoadedRecipe, target: Target) -> list[tuple[str, str, str]]:
    """Return the target's virtual packages as (name, version, build) (conda's docs, "Managing virtual packages")."""
    glibc = recipe.recipe.targets[target.name].glibc
    rows = [("__unix", "0", "0"), ("__linux", "0", "0"), ("__glibc", glibc, "0"), ("__archspec", "1", target.arch)]
    virtual = target.family.conda_virtual
    return [*rows, (virtual, target.version, "0")] if virtual and target.version else rows


def solve(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    ages: ReleaseAges,
    keep: Collection[CondaPackage],
    offline: bool,
    log: Log,
    specs: Sequence[Spec] | None = None,
) -> tuple[CondaPackage, ...]:
    """Return the conda packages of `target`, sorted by name; those in `keep` are kept while they fit.

    They satisfy `specs`, by default the recipe's; with (), they are the channels' own records of `keep`. Packages that
    are newer than `ages` allows, or whose age no channel states, are left out. Channels are read through the site's
    mirrors; `offline` uses indexes that earlier runs left in the store. Raises RecipeError for an invalid match spec,
    and LockError when a channel cannot be read or no packages satisfy the specs, with the solver's explanation and the
    recipe lines of the conflicting specs.
    """
    specs = recipe_specs(recipe, target) if specs is None else specs
    channels = [channel_url(name) for name in recipe.recipe.conda.channels]
    key = hashlib.sha256("\n".join(channels).encode()).hexdigest()[:16]
    request = {
        "specs": [spec.text for spec in specs],
        "channels": [
            {"url": channel, "addresses": [_address(url, environment) for url in environment.site.mirrored(channel)]}
            for channel in channels
        ],
        "platform": conda_platform(target),
        "virtual": virtual_packages(recipe, target),
        "newest": limit.timestamp() if (limit := ages.limit()) else None,
        "keep": [{"name": package.name, "sha256": package.sha256} for package in keep],
        "cache": str(environment.store.folder("conda", "repodata", key)),
        "offline": offline,
    }
    with environment.temporary_folder("conda-solve-") as folder:  # 0700: credentials
        path = folder / "request.json"
        path.write_text(json.dumps(request), encoding="utf-8")
        command: list[str | Path] = [sys.executable, "-P", Path(__file__).with_name("conda_solver.py"), path]
        done = process.run(command, env=network_variables(environment), check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise HostError(
            f"{recipe.path}: the conda solver ended without a result ({process.ending(done.returncode)}):\n"
            f"{hide(process.tail(done))}",
            process.KILLED if done.returncode < 0 else "is py-rattler whole? pip install --force-reinstall py-rattler",
        ) from None
    if "fault" in answer:
        raise _error(answer, recipe, target, specs, ages, offline)
    if untimed := answer.get("untimed"):
        log(f"note: the channels state no time for packages of {', '.join(untimed)}; those were left out")
    serving = dict(zip(answer["used"], channels, strict=True))
    return tuple(sorted((_package(row, serving) for row in answer["records"]), key=lambda package: package.name))


def _address(url: str, environment: Environment) -> dict[str, str]:
    """Return `url` without credentials, and the Authorization header (RFC 7617) from them or from netrc."""
    plain, credentials = split_credentials(url.rstrip("/"))
    credentials = credentials or _netrc(plain, environment.variables)
    encoded = base64.b64encode(":".join(credentials or ()).encode()).decode()
    return {"url": plain, "authorization": f"Basic {encoded}" if credentials else ""}


def _netrc(url: str, env: Mapping[str, str]) -> tuple[str, str] | None:
    """Return user and password for the host of `url` from $NETRC or ~/.netrc; rattler does not read them here."""
    import netrc

    path = Path(env["NETRC"]) if env.get("NETRC") else Path(env.get("HOME") or Path.home(), ".netrc")
    try:
        login = netrc.netrc(path).authenticators(urlsplit(url).hostname or "")
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return None
    return (login[0], login[2]) if login else None


def network_variables(environment: Environment) -> dict[str, str]:
    """Return the process environment with pip's certificates and proxy under the names that rattler and conda read."""
    env = dict(environment.variables)
    if bundle := ca_bundle(environment.pip, env):
        env["SSL_CERT_FILE"] = bundle
    if proxy := environment.pip.proxy:
        env |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), proxy)
    return env


def hide(text: str) -> str:
    """Return `text` without the passwords and tokens in its URLs."""
    return _TOKEN.sub("/t/****", redact(text))


def canonical_url(url: str, serving: Mapping[str, str]) -> str:
    """Return a package file's URL at its channel, whichever mirror served it. Raises LockError if it holds a token."""
    plain = split_credentials(url)[0]
    for address, channel in serving.items():
        if plain.startswith(address + "/"):
            plain = channel + plain[len(address) :]
            break
    if _TOKEN.search(plain):
        raise LockError(
            f"{hide(plain)}: a channel serves this package under a URL that holds a token",
            "name the channel without it in the recipe, and the URL with it in site.toml: [mirrors]",
        )
    return plain


def _package(row: Mapping[str, Any], serving: Mapping[str, str]) -> CondaPackage:
    url, name, version = canonical_url(row["url"], serving), row["name"], row["version"]
    for kind in ("md5", "sha256"):
        if not row[kind]:
            raise LockError(
                f"{url}: its channel publishes no {kind}; conda-lock's format needs both md5 and sha256",
                "index the channel with a current conda-index or rattler-index",
            )
    try:
        subdir, build = file_parts(url, name, version)
    except ValueError as problem:
        raise LockError(f"{url}: {problem}", "rename the file and index its channel again") from None
    if (subdir, build) != (row["subdir"], row["build"]):
        raise LockError(f"{url}: its channel lists it as build {row['build']} of {row['subdir']}")
    depends = canonical_depends(row["depends"])
    return CondaPackage(name, version, build, subdir, url, row["md5"], row["sha256"], depends, row.get("size") or 0)


def _error(
    answer: Mapping[str, Any],
    recipe: LoadedRecipe,
    target: Target,
    specs: Sequence[Spec],
    ages: ReleaseAges,
    offline: bool,
) -> LockError | RecipeError:
    text = hide(answer.get("text", "")).strip()
    if answer["fault"] == "spec":
        return bad_spec(specs[answer["index"]], text)
    if answer["fault"] == "unsatisfiable":
        too_new = [_too_new(row, specs, ages) for row in answer["too_new"]]
        return unsatisfiable(recipe, target, text, specs, too_new)
    if answer["fault"] == "too new":
        row = answer["packages"][0]
        return LockError(
            f"{recipe.path}: target {target.name}: conda-lock chose {row['package']}, {_dated(row['time'], ages)}",
            f"{_AGE_HINT}; or leave --solver out: envbuild's own solver leaves out what is too new",
        )
    if answer["fault"] == "channel":
        return LockError(
            f"{recipe.path}: target {target.name}: the channels cannot be read:\n{indent(text, '  ', bool)}",
            "try again; if it fails again, the channel's index is damaged: index the channel again",
        )
    channel = answer["channel"]
    refusals = [(hide(row["url"]), " ".join(hide(row["text"]).split())) for row in answer["refusals"]]
    text = "\n".join(reason for _, reason in refusals)
    if offline:
        hint = f"run it once without --offline, or {_ELSEWHERE}"
    elif re.search(r"\b40[137]\b", text):
        hint = (
            "credentials? they are read from netrc, and from user:password@ or /t/TOKEN/ in a mirror's URL"
            " in site.toml: [mirrors]"
        )
    elif re.search(r"\b404\b|could not find subdir|No such file", text):
        hint = "is the channel's name right? a channel has noarch/repodata.json, even if it is empty"
    else:
        hint = (
            "check the network, HTTPS_PROXY and SSL_CERT_FILE, or name a mirror of the channel in site.toml:"
            f' [mirrors] "{channel}" = ["https://…"]; or {_ELSEWHERE}'
        )
    where = recipe.where("conda", "channels", list(map(channel_url, recipe.recipe.conda.channels)).index(channel))
    lines = "".join(f"\n  {url}: {_reason(url, reason, offline)}" for url, reason in refusals)
    return LockError(f"{where}: channel {channel} cannot be read:{lines}", hint)


_AGE_HINT = "allow an older release, or change `exclude_newer`"


def _dated(time: float | None, ages: ReleaseAges) -> str:
    """Return that a package is too new, and when it will be allowed, or that its age is not known."""
    if time is None:
        return "and its channel states no time for it: `exclude_newer` leaves it out"
    built = datetime.fromtimestamp(time, UTC)
    return f"which is too new, of {built:%Y-%m-%d %H:%M} UTC: {ages.allowed_from(built)}"


def _too_new(row: Mapping[str, Any], specs: Sequence[Spec], ages: ReleaseAges) -> str:
    """Return the line for a spec whose packages are all left out by `exclude_newer`."""
    spec = specs[row["spec"]]
    return f"{spec.where}: {spec.text!r} matches {row['package']} alone, {_dated(row['time'], ages)}"


def _reason(url: str, text: str, offline: bool) -> str:
    """Return rattler's error without the causes in the middle of its chain."""
    if offline and not url.startswith("file:"):
        return "not asked, --offline, and its index is not in the store"
    causes = text.split(" Caused by: ")
    return ": ".join(dict.fromkeys((causes[0], causes[-1])))


def bad_spec(spec: Spec, why: str) -> RecipeError:
    """Return the error for an invalid match spec."""
    return RecipeError(
        f"{spec.where}: {spec.text!r} is not a match spec: {why}",
        "a match spec is NAME, NAME VERSION or NAME VERSION BUILD, such as 'pytorch >=2.7,<3 cpu*'",
    )


def unsatisfiable(
    recipe: LoadedRecipe, target: Target, explanation: str, specs: Sequence[Spec], too_new: Sequence[str] = ()
) -> LockError:
    """Return the error for unsatisfiable specs: the solver's explanation and the recipe lines of the specs in it.

    `too_new` are lines about specs whose packages `exclude_newer` leaves out.
    """
    named = set(re.findall(r"[a-z0-9_][a-z0-9_.-]*", explanation.lower()))
    lines = [f"\n  {spec.where}: asks for {spec.text!r}" for spec in specs if spec.name in named]
    if not target.family.gpu and set(_ABSENT.findall(explanation)) == {CUDA.conda_virtual}:
        hint = f"the packages are for CUDA, and {target.name} is for CPUs: ask for CPU builds, or add a target of CUDA"
    else:
        hint = "loosen one of these, or add a channel that has the missing package"
    if too_new:
        lines, hint = [f"\n  {line}" for line in too_new], f"{_AGE_HINT} at {recipe.where('exclude_newer')}"
    return LockError(
        f"{recipe.path}: target {target.name} cannot be solved:\n{indent(explanation, '  ', bool)}{''.join(lines)}",
        hint,
    )


_PROGRAMS = ("micromamba", "mamba", "conda")
_VARIABLE = "ENVBUILD_CONDA"
# conda-lock's output when the program that it calls finds no solution; the match leaves out the command line.
_REFUSAL = re.compile(
    r"Could not lock the environment for platform \S+\n(?P<text>.*?)(?:\n\s+Command: |\nTraceback|\Z)", re.S
)


def find_conda(environment: Environment) -> str:
    """Return the conda program for solving: $ENVBUILD_CONDA, else conda or a variant on PATH. Raises HostError."""
    if importlib.util.find_spec("conda_lock") is None:
        raise HostError(
            "--solver conda-lock: conda-lock is not installed",
            "pip install conda-lock, or leave the option out to use envbuild's own solver",
        )
    named = environment.variables.get(_VARIABLE)
    for program in [named] if named else _PROGRAMS:
        if path := shutil.which(program, path=environment.variables.get("PATH")):
            return path
    if named:
        raise HostError(f"{_VARIABLE}={named} is not a program", "set it to a conda, mamba or micromamba")
    raise HostError(
        f"--solver conda-lock needs one of {', '.join(_PROGRAMS)} on PATH",
        f"install one, set {_VARIABLE}, or leave the option out to use envbuild's own solver",
    )


def solve_by_conda_lock(
    recipe: LoadedRecipe,
    target: Target,
    environment: Environment,
    *,
    ages: ReleaseAges,
    keep: Collection[CondaPackage],
    offline: bool,
    log: Log,
) -> tuple[CondaPackage, ...]:
    """Solve with conda-lock and return packages as `solve`. It leaves out no new packages: they are an error.

    conda reads channels through the site's first mirror, with its own credentials (.condarc and netrc).
    Raises HostError when conda-lock or conda is missing, and LockError with conda-lock's output when it fails.
    """
    program = find_conda(environment)
    canonical = [channel_url(name) for name in recipe.recipe.conda.channels]
    channels = [split_credentials(environment.site.mirrored(channel)[0].rstrip("/"))[0] for channel in canonical]
    asked = recipe_specs(recipe, target)
    env = network_variables(environment)
    if offline:
        env["CONDA_OFFLINE"] = env["MAMBA_OFFLINE"] = "true"
    # conda-lock uses the last of several specs for one name: a pin replaces the recipe's own spec.
    pins = [f"{package.name} =={package.version} {package.build}" for package in keep if not _missed(asked, package)]
    for more in [pins, []] if pins else [[]]:  # all kept packages pinned, then without pins
        with tempfile.TemporaryDirectory(prefix="conda-lock-", dir=env.get("TMPDIR")) as folder:
            work = Path(folder)
            _write_inputs(work, recipe, target, [*(spec.text for spec in asked), *more], channels)
            command: list[str | Path] = [
                sys.executable,
                "-P",
                "-m",
                "conda_lock",
                "lock",
                "--conda",
                program,
                "--file",
                work / "environment.yml",
                "--platform",
                conda_platform(target),
                "--virtual-package-spec",
                work / "virtual-packages.yml",
                "--lockfile",
                work / "conda-lock.yml",
            ]
            done = process.run(command, env=env, cwd=work, check=False)
            if done.returncode == 0:
                text = (work / "conda-lock.yml").read_text(encoding="utf-8")
                break
    else:
        printed = hide(done.stderr)
        if match := _REFUSAL.search(printed):
            raise unsatisfiable(recipe, target, match["text"].strip(), asked)
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
        raise LockError(
            f"{recipe.path}: target {target.name}: conda-lock failed (exit {done.returncode}): {last}",
            f"check that it works with {program}, or leave --solver out to use envbuild's own solver",
        )
    packages = parse_packages(text, "conda-lock's result").get(conda_platform(target), ())
    if not packages:
        raise LockError("conda-lock's result has no packages")
    for package in packages:
        for spec in _missed(asked, package):
            raise LockError(
                f"{spec.where}: conda-lock chose {package.stem}, which is not {spec.text!r}",
                "conda-lock uses only the last of several specs for one name: merge them",
            )
    # conda-lock leaves out the build strings of dependencies, so the channels' records replace its own.
    records = solve(recipe, target, environment, ages=ages, keep=packages, offline=offline, log=log, specs=())
    known = {package.sha256: package for package in records}
    for package in packages:
        if package.sha256 not in known:
            raise LockError(
                f"conda-lock chose {package.stem}, and no channel of {recipe.path} has it with its sha256",
                "the channel's mirrors differ: name one of them alone in site.toml: [mirrors]",
            )
    return tuple(known[package.sha256] for package in packages)


def _missed(specs: Sequence[Spec], package: CondaPackage) -> list[Spec]:
    """Return the `specs` that `package` does not satisfy. Raises RecipeError for an invalid match spec."""
    from rattler import MatchSpec, PackageRecord
    from rattler.exceptions import InvalidMatchSpecError
    from rattler.package import BuildString

    record = PackageRecord(package.name, package.version, BuildString(package.build), 0, package.subdir)
    missed = []
    for spec in specs:
        try:
            if spec.name == package.name and not MatchSpec(spec.text).matches(record):
                missed.append(spec)
        except InvalidMatchSpecError as error:
            raise bad_spec(spec, str(error)) from None
    return missed


def _write_inputs(folder: Path, recipe: LoadedRecipe, target: Target, specs: list[str], channels: list[str]) -> None:
    """Write environment.yml and virtual-packages.yml as JSON, which is valid YAML."""
    platform = conda_platform(target)
    environment = {"name": recipe.recipe.name, "channels": channels, "dependencies": specs, "platforms": [platform]}
    virtual = {
        name: f"{version} {build}" if name == "__archspec" else version
        for name, version, build in virtual_packages(recipe, target)
    }
    known = {"subdirs": {platform: {"packages": virtual}}}
    (folder / "environment.yml").write_text(json.dumps(environment), encoding="utf-8")
    (folder / "virtual-packages.yml").write_text(json.dumps(known), encoding="utf-8")
