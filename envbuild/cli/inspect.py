"""`envbuild inspect`, `diff`, `verify` and `rebuild`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click

from envbuild.base.errors import UsageError, VerificationError
from envbuild.base.files import absolute_path, named_path
from envbuild.base.packages import channel_name
from envbuild.base.progress import log, step
from envbuild.base.text import human_size
from envbuild.build.built import find_built, unknown
from envbuild.cli import complete, layout
from envbuild.cli.common import PATH, attested_images, check_out, print_json, run_environment, show, with_options
from envbuild.cli.layout import verbosity
from envbuild.cli.report import reported
from envbuild.contract.kinds import ARTIFACTS, DOCKER, kinds_of
from envbuild.contract.manifest import shown
from envbuild.contract.receipt import check_lines, failures, read_receipt, receipt_path
from envbuild.describe import bill_of_materials, describe, receipt_of
from envbuild.environment import Environment
from envbuild.inspect.compare import Change, Comparison, compare
from envbuild.inspect.reader import open_artifact, open_artifacts, split
from envbuild.recipe.find import search_folders
from envbuild.run_environment import load_environment

_SIGNS = {"added": ("+", "green"), "removed": ("-", "red"), "changed": ("~", "yellow")}
_LINES = 40
# Fields of Comparison: name in JSON, name of one difference, of several.
_PARTS = {
    "settings": ("settings", "setting", "settings"),
    "built": ("source_built", "source-built layer", "source-built layers"),
    "conda": ("conda_packages", "conda package", "conda packages"),
    "python": ("python_packages", "Python package", "Python packages"),
    "debian": ("debian_packages", "Debian package", "Debian packages"),
    "files": ("files", "file", "files"),
}


@click.command("inspect")
@click.argument("artifact", metavar="RECIPE|ARTIFACT", shell_complete=complete.recipes_or_artifacts)
@with_options(("target", "Platform of a multi-platform image."))
@click.option("--packages", is_flag=True, help="List every package, and nothing else.")
@click.option("--layers", is_flag=True, help="List an image's layers; nothing in it is read.")
@click.option("--sbom", type=click.Choice(["cyclonedx"]), help="Write the bill of materials, CycloneDX 1.6.")
@with_options("exact", "json")
def inspect_command(
    artifact: str, target: str | None, packages: bool, layers: bool, sbom: str | None, exact: bool, as_json: bool
) -> None:
    """Show what ARTIFACT is: recipe, locks, base, packages, layers, settings, receipt.

    ARTIFACT is a RECIPE whose artifact is in ./build, or the path of a venv, conda environment, OCI layout, image
    archive, squashfs or SIF, venv:DIR, conda:DIR, oci:DIR[:TAG], docker-archive:FILE, sqsh:FILE, sif:FILE,
    docker-daemon:NAME, docker://REGISTRY/NAME, or the name of an image in the docker daemon. Artifacts of other tools
    are read too. Values of variables whose names look like secrets are hidden.

    \b
    Examples:
      envbuild inspect my_train
      envbuild inspect pt_cpu:cpu-x86_64
      envbuild inspect build/pt_cpu/cpu-x86_64/venv --json
      envbuild inspect conda:build/pt_cpu/cpu-x86_64/conda
      envbuild inspect oci:image --target cpu-aarch64 --packages
      envbuild inspect pt_cpu.sif
      envbuild inspect docker://registry.example.org/team/pt_cpu:2.13 --sbom cyclonedx >pt_cpu.cdx.json
    """
    if sbom and (as_json or packages or layers):
        raise UsageError("--sbom writes JSON of its own; it goes with no other output")
    environment = load_environment()
    with open_artifact(spelling(artifact, target, environment), environment, target) as opened:
        only_layers = layers and not packages
        contents = None if only_layers else opened.contents(hashes=False)
        if sbom and contents:
            click.echo(bill_of_materials(opened, contents, environment), nl=False)
            return
        facts_found = describe(opened.about, contents, exact=exact)
    if as_json:
        print_json(facts_found)
        return
    if not packages and not layers:
        _head(facts_found)
    if layers or not packages:
        rows = [
            [layer["digest"], human_size(layer["size"]) if layer["size"] else "-", _short(layer["title"])]
            for layer in facts_found["layers"]
        ]
        _table("" if layers else "layers", rows)
    if contents and (packages or not layers):
        built = [[p["name"], p["version"], _where(p)] for p in facts_found["source_built"]]
        built += [[p["name"], p["version"], f"the nodes' {p['path']}"] for p in facts_found["host_layers"]]
        _table(f"source-built layers ({len(built)})", built)
        conda = facts_found["conda_packages"]
        rows = [[p["name"], p["version"], p["build"], channel_name(p["channel"]), _where(p)] for p in conda]
        _table(f"conda packages ({len(rows)})", rows)
        rows = [[p["name"], p["version"], _where(p)] for p in facts_found["python_packages"]]
        _table(f"Python packages ({len(rows)})", rows)
    if packages:
        rows = [[p["name"], p["version"], p["arch"]] for p in facts_found["debian_packages"]]
        _table(f"Debian packages ({len(rows)})", rows)


def spelling(text: str | None, target: str | None, environment: Environment) -> str:
    """Return `text`, or the artifact that was built of it if it is a recipe, None for the default one."""
    with suppress(UsageError):  # of a path that is no artifact; it may be the folder of a recipe
        if text and split(text)[0] is not None:
            return text
    built = find_built(text, tuple(ARTIFACTS), target=target, site_folders=environment.site.recipe_folders)
    return (text or "") if built is None else built.spelling


def _head(facts: Mapping[str, Any]) -> None:
    python, base, receipt = facts["python"], facts["base"], facts["receipt"]
    locks, debian, project = facts["locks"], facts["debian_packages"], facts["project"]
    stored = f", {human_size(facts['stored'])} as stored" if facts["stored"] else ""
    rows: list[tuple[str, str | None]] = [
        ("artifact", f"{facts['artifact']} ({facts['kind']})"),
        ("digest", facts["digest"]),
        ("image id", facts["image_id"] if facts["image_id"] != facts["digest"] else None),
        ("recipe", facts["recipe"] and _joined(facts["recipe"]["name"], facts["recipe"]["digest"])),
        ("lock", locks["packages"]),
        ("base lock", locks["base"]),
        ("plan", facts["plan"]),
        ("target", facts["target"]),
        ("platform", facts["platform"]),
        ("fabric", facts["fabric"]),
        ("python", python and _joined(python["full"] or python["version"], python["interpreter"])),
        ("base", base and _joined(base["name"] or base["title"], base["digest"], base["suite"])),
        ("project", project and _joined(*(str(project.get(key, "")) for key in ("name", "version", "commit")))),
        ("Debian", debian and f"{len(debian)} packages; --packages lists them"),
        ("size", f"{human_size(facts['size'])} in {facts['files']} files and folders{stored}"),
        ("stored as", facts["filesystem"]),
        ("created", facts["created"]),
        ("envbuild", facts["envbuild"]),
        ("workdir", facts["workdir"]),
        ("user", facts["user"]),
        ("entrypoint", shlex.join(facts["entrypoint"])),
        ("cmd", shlex.join(facts["cmd"])),
        ("receipt", _receipt(receipt) if receipt else "none beside it"),
    ]
    _table("", [(name, value) for name, value in rows if value])
    for title in ("env", "labels"):
        own = [[k, v] for k, v in facts[title].items() if not k.startswith("org.envbuild.")]
        _table(title, own)


def _joined(*parts: str | None) -> str:
    return "  ".join(part for part in parts if part)


def _receipt(receipt: Mapping[str, Any]) -> str:
    verdict = "passed" if receipt["passed"] else "FAILED"
    if receipt["changed"]:
        verdict = f"{verdict}, but {shown(receipt['changed'])} changed since"
    elif not receipt["matches"]:
        verdict = "of another artifact"
    pushed = f", pushed as {receipt['pushed']}" if receipt["pushed"] else ""
    return f"{verdict}, {receipt['verified_at']}{pushed}  {receipt['path']}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:58]} …"


def _where(package: Mapping[str, Any]) -> str:
    location = str(package["location"])
    usual = location in ("", "opt/env") or location.startswith(("opt/env/", "lib/"))
    return "" if usual else f"/{location}"


def _table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print rows in aligned columns, below their title if there is one."""
    if title and rows:
        click.echo(f"{title}:")
    indent = max((len(row[0]) for row in rows), default=0) + (4 if title else 2)
    for line in layout.columns(rows):
        click.echo(layout.fitted(layout.printable(f"  {line}" if title else line, "?"), indent))


@click.command("diff")
@click.argument("a", shell_complete=complete.recipes_or_artifacts)
@click.argument("b", shell_complete=complete.recipes_or_artifacts)
@with_options(("target", "Platform of multi-platform images."))
@click.option("--files/--no-files", default=True, help="Compare every file (default), or only packages.")
@click.option("--all", "everything", is_flag=True, help=f"List all files, not the first {_LINES}.")
@with_options("exact", "json")
def diff_command(a: str, b: str, target: str | None, files: bool, everything: bool, exact: bool, as_json: bool) -> None:
    """Compare two artifacts of any kinds: settings, packages, files. Exit code 0 equal, 1 different.

    A and B are RECIPEs whose artifacts are in ./build, paths of venvs, conda environments, OCI layouts, image archives,
    squashfs images or SIFs, venv:DIR, conda:DIR, oci:DIR[:TAG], docker-archive:FILE, sqsh:FILE, sif:FILE,
    docker-daemon:NAME, docker://REGISTRY/NAME, or names of images in the docker daemon. A venv or conda environment is
    compared with the environment in an image, and a venv with a conda environment by their site-packages; properties
    that always differ between two kinds are left out and listed. Files of a venv or conda environment that changed
    since its verification are named.

    \b
    Examples:
      envbuild diff pt_cpu:cpu-x86_64 docker://registry.example.org/team/pt_cpu:2.13
      envbuild diff build/pt_cpu/cpu-x86_64/venv oci:image
      envbuild diff oci:image pt_cpu.sqsh
      envbuild diff old.tar new.tar --no-files --json
    """
    environment = load_environment()
    a, b = (spelling(text, target, environment) for text in (a, b))
    with open_artifacts((a, b), environment, target) as (reader, other):
        comparison = compare(reader, other, files=files)
        sides: list[dict[str, Any]] = [
            {
                "artifact": text,
                "digest": side.about.digest or side.about.identity,
                "receipt": receipt_of(side.about, exact=exact),
            }
            for text, side in ((a, reader), (b, other))
        ]
    for side in sides:
        if (receipt := side["receipt"]) and receipt["changed"]:
            log(f"{side['artifact']}: its receipt: {_receipt(receipt)}")
    if as_json:
        changes = {key: getattr(comparison, name) for name, (key, _, _) in _PARTS.items()}
        row = {
            "format": 1,
            "equal": comparison.equal,
            "a": sides[0],
            "b": sides[1],
            **{key: None if part is None else [change.as_json() for change in part] for key, part in changes.items()},
            "left_out": list(comparison.left_out),
            "notes": list(comparison.notes),
        }
        print_json(row)
    else:
        _show_changes(comparison, everything)
    if not comparison.equal:
        sys.exit(1)


def _show_changes(comparison: Comparison, everything: bool) -> None:
    counts = []
    for name, (_, singular, several) in _PARTS.items():
        if changes := getattr(comparison, name):
            counts.append(f"{len(changes)} {singular if len(changes) == 1 else several}")
    same = "equal" if comparison.files is not None else "equal, files not compared"
    click.echo(f"different: {', '.join(counts)}" if counts else same)
    for name, (_, _, title) in _PARTS.items():
        changes = getattr(comparison, name) or ()
        shown = changes[:_LINES] if name == "files" and not everything else changes
        if shown:
            click.echo(f"{title}:")
        for change in shown:
            sign, colour = _SIGNS[change.kind]
            colon = ":" if name == "settings" else ""
            line = _file(change) if name == "files" else f"{change.name}{colon} {_value(change)}"
            click.echo(click.style(layout.fitted(f"  {sign} {line}"), fg=colour))
        if len(shown) < len(changes):
            click.echo(f"  … and {len(changes) - len(shown)} more; --all lists them")
    for note in comparison.notes:
        log(f"note: {note}")
    if comparison.left_out:
        log(f"not compared: {'; '.join(comparison.left_out)}")


def _value(change: Change) -> str:
    """Return a change of a setting or package, without its name."""
    if change.before is None or change.after is None:
        return str(change.after if change.before is None else change.before)
    if change.parts:
        return f"{change.before}, same version, other content"
    if change.before == change.after:
        return f"{change.before} (hidden, another value)"
    return f"{change.before} -> {change.after}"


def _file(change: Change) -> str:
    name = _printable(change.name)
    if change.parts is None:
        return f"{name} ({change.after if change.before is None else change.before})"
    parts = [
        part if part == "content" else f"{part} {before or '-'} -> {after or '-'}"
        for part, (before, after) in change.parts.items()
    ]
    return f"{name}: {', '.join(map(_printable, parts))}"


def _printable(text: str) -> str:
    """Return `text` with control characters, which could move a terminal's cursor, and invalid UTF-8 escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


_COUNT = click.IntRange(1, 64)


@click.command("verify")
@click.argument("named", metavar="RECIPE|ARTIFACT", shell_complete=complete.recipes_or_artifacts)
@click.option("--nodes", type=_COUNT, help="Simulated nodes. Default: the recipe's.")
@click.option("--nproc-per-node", type=_COUNT, help="Ranks of each node. Default: the recipe's.")
@click.option("--epochs", type=click.IntRange(2, 10000), help="Epochs to train. Default: the recipe's.")
@click.option("--faults", is_flag=True, help="Kill a rank mid-training; the job must finish from its snapshot.")
@click.option("--untrusted", is_flag=True, help="Also start an artifact that no signer of the site attested.")
@with_options("runtime", "report", "json")
@verbosity
def verify_command(
    named: str, untrusted: bool, runtime: str | None, report: str | None, as_json: bool, **overrides: Any
) -> None:
    """Train in ARTIFACT over several simulated nodes, judge it, write its receipt.

    Exit code 5 when a check fails; the receipt beside ARTIFACT then records it, and the nodes' logs are kept. If the
    site names signers ([trust]), only artifacts that one of them attested are started; the attested receipt then stays,
    and the new one is ARTIFACT.here.receipt.json.

    ARTIFACT is the folder of a venv or conda environment, a .sqsh, a .sif, or a RECIPE whose artifact is in ./build. A
    docker image needs no daemon: NAME@sha256:… of a registry, or oci:FOLDER@sha256:…, is read as a .sqsh, and its
    receipt is build/RECIPE/TARGET/docker.receipt.json, where `envbuild job` looks for it.

    \b
    Examples:
      envbuild verify pt_cpu
      envbuild verify pytorch.sif --runtime apptainer
      envbuild verify oci:image@sha256:6c3c… --runtime podman
      envbuild verify build/pt_cpu/cpu-x86_64/venv --nodes 3 --nproc-per-node 1 --faults
    """
    from envbuild.build.commit import verify_artifact
    from envbuild.build.kinds import read_artifact
    from envbuild.job_inputs import check_trust, open_artifact

    environment, image = run_environment(), named if "@sha256:" in named else ""
    trust, target = environment.site.trust, None
    with ExitStack() as stack:
        if image:
            from envbuild.build.squash import written_image

            path = stack.enter_context(written_image(image, environment))
            state = read_artifact(path).state
            target, beside = state.target, DOCKER.default_path(state.recipe, state.target)
        else:
            built = find_built(named, kinds_of("folder", "file"), site_folders=environment.site.recipe_folders)
            path = beside = named_path(Path(named)) if built is None else built.path
            if not path.exists():
                raise unknown(named, search_folders(environment.site.recipe_folders))
        if trust.restricts and not untrusted:
            fetch = attested_images(environment.site)
            artifact = image or f"{path.parent}/{path.name}"
            check_trust(open_artifact(artifact, tuple(ARTIFACTS), target, unverified=True, fetch=fetch), trust)
            beside = beside.with_name(f"{beside.name}.here")
        with reported(report, [beside], environment), step(f"verifying {image or path}", printed=True):
            state, receipt = verify_artifact(path, environment, overrides, runtime, beside, image)
    for line in check_lines(receipt):
        log(line)
    row = {
        "path": image or str(path.absolute()),
        "digest": receipt["artifact"]["digest"],
        "receipt": str(receipt_path(beside).absolute()),
        "target": state.target,
        "seconds": receipt["seconds"],
        "passed": receipt["passed"],
    }
    show(as_json, row, *([image or path] if receipt["passed"] else ()))
    if not receipt["passed"]:
        raise VerificationError(
            failures(receipt), f"the evidence is in {receipt_path(beside)}, the nodes' logs in {receipt['logs']}"
        )


@click.command("rebuild")
@click.argument("named", metavar="RECEIPT|ARTIFACT", type=PATH)
@click.option("--out", type=PATH, metavar="PATH", help="Keep the new artifact here. Default: it is removed.")
@with_options("json")
def rebuild_command(named: Path, out: Path | None, as_json: bool) -> None:
    """Build the artifact of a receipt again, from the vault alone, and compare the two.

    The vault has the recipe and the lock that the receipt names, and all files of the build: no index is asked. Says
    "identical", or lists the differences if ARTIFACT is still there, with the layer or package that made each file.
    Exit code 5 if files differ. A docker image is built as an OCI layout, and compared with that of its receipt: at its
    path, in the registry or in the daemon.

    \b
    Examples:
      envbuild rebuild pytorch.sqsh
      envbuild rebuild /fsx/envs/pt_cpu.receipt.json --out /tmp/pt_cpu
      envbuild rebuild build/pt_cpu/cpu-x86_64/docker.receipt.json
    """
    from envbuild.build.rebuild import rebuild

    check_out(out)
    environment, suffix = run_environment(), ".receipt.json"
    artifact = named.with_name(named.name.removesuffix(suffix))
    try:
        receipt = read_receipt(receipt_path(artifact))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{receipt_path(artifact)}: not a receipt: {error}", "give an artifact with a receipt"
        ) from None
    before, about = str(artifact) if artifact.exists() else "", receipt["artifact"]
    if not before and about["kind"] == DOCKER.name:
        layout_or_name = about["path"] if about["path"].startswith("/") else f"docker-daemon:{about['path']}"
        before = f"docker://{about['pushed']}" if "pushed" in about else layout_or_name
    with environment.store.working("opened") as folder:
        place = folder / "new" / artifact.name  # the folder itself is locked, and a build locks the one above
        place.parent.mkdir()
        place, wanted = absolute_path(out) if out else place, about["digest"]
        digest, titles_of = rebuild(receipt, place, environment)
        changes: list[dict[str, Any]] = []
        if digest != wanted and before:
            with open_artifacts((before, str(place)), environment, None) as opened:
                comparison = compare(*opened, files=True)
                changes = [change.as_json() for name in _PARTS for change in getattr(comparison, name) or ()]
        titles = titles_of() if changes else {}
        changes = [{**change, "layer": titles.get(change["name"])} for change in changes]
    verdict = "equal files, other container" if before and not changes else "different"
    verdict = "identical" if digest == wanted else verdict
    value = {"path": str(out.absolute()) if out else None, "digest": digest, "receipt_digest": wanted}
    rows = [[f"  {change['change']} {change['name']}", change["layer"] or ""] for change in changes[:_LINES]]
    show(as_json, {**value, "verdict": verdict, "changes": changes}, f"{named}: {verdict}", *layout.columns(rows))
    if verdict == "different":
        raise VerificationError(
            f"{named}: the receipt states {wanted}, and the new artifact is {digest}",
            "" if before else "give the artifact itself, so that its files can be compared",
        )
