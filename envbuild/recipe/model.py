"""Data model of a recipe; docs/reference/recipe.md explains it, docs/recipe.schema.json describes it to editors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from envbuild.base.text import INDEX_NAME, normalise
from envbuild.base.toml import Document, Keys, Problem, form, json_schema, key, list_at, nearest, required, table_at
from envbuild.contract.verification import VerifySettings
from envbuild.fabrics import fabric_names
from envbuild.gpus import GPU_PATTERN, chips_named, gpu_problem
from envbuild.recipe import checks
from envbuild.recipe.checks import reference_of
from envbuild.recipe.project import ProjectTable
from envbuild.recipe.targets import Target, target_problem
from envbuild.site import AuditException
from envbuild.slim import file_rules

layer_name_problem = form(r"[a-z0-9][a-z0-9_.+-]*", "is not a layer's name: lower-case letters, digits and . _ + -")
option_problem = form(r"\S[^\n\x00]*", "is not one option on one line")


def patch_problem(text: str) -> str | None:
    """Return why `text` is not a file below the recipe's folder, or None."""
    bad = not text or text.startswith("/") or ".." in text.split("/") or not text.isprintable()
    return f"{text!r} is not a file below the recipe's folder" if bad else None


@dataclass(frozen=True)
class LayerTable:
    """`[layers.NAME]`: one layer that is built from source, replaced by a wheel, or provided by the host."""

    version: str = required(
        "The version, as its project writes it.", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$", example="2.1.0"
    )
    kind: Literal["default", "source", "wheel", "host"] = key(
        "default",
        "`source`: built from source; `wheel`: PyPI's, in place of the one that torch pins (nccl);"
        " `host`: what the nodes have at `path`. Default: wheel for nccl, else source.",
        example="source",
    )
    url: str = key(
        "",
        "Where the source's archive is: http(s) or file. Default: where its project releases it."
        " A site may have a mirror of it ([mirrors] in site.toml).",
        pattern=r"^(https?://\S+|file:///\S+)?$",
        example="https://example.org/libfoo-1.0.tar.gz",
    )
    sha256: str = key(
        "", "The archive's sha256, in hexadecimal. Default: as known for this version.", pattern=r"^([0-9a-f]{64})?$"
    )
    system: Literal["default", "autotools", "make", "wheel"] = key(
        "default",
        "How it is built: `./configure && make install`, `make` alone, or a wheel from its"
        " pyproject.toml or setup.py. Default: as known for this name, else autotools.",
        example="autotools",
    )
    configure: tuple[str, ...] = key(
        (),
        "Options after those that are known to be needed: of configure, or variables of make."
        " {prefix} is the artifact's environment, {libfabric} where that layer is.",
        check=option_problem,
        example=["--enable-efa=no"],
    )
    patches: tuple[str, ...] = key(
        (),
        "Patch files below the recipe's folder, applied in this order with -p1.",
        check=patch_problem,
        example=["patches/fix.patch"],
    )
    requires: tuple[str, ...] = key(
        (),
        "Layers that must be there before, besides those known to be needed.",
        check=layer_name_problem,
        example=["libfabric"],
    )
    path: str = key(
        "",
        'Where the nodes have it (kind = "host"): the folder with lib/ and include/.',
        pattern=r"^(/\S*)?$",
        example="/opt/cray/libfabric/1.22.0",
    )
    targets: tuple[str, ...] = key(
        (), "The targets that get this layer. Default: all.", check=target_problem, example=["cu126-aarch64"]
    )

    def for_target(self, target: str) -> bool:
        """Return whether `target` gets this layer."""
        return not self.targets or target in self.targets


def layer_kind(name: str, table: LayerTable) -> str:
    """Return the kind of the layer `name`: "source", "wheel" or "host"."""
    if table.kind != "default":
        return table.kind
    return "wheel" if name == "nccl" else "source"


def layer_mistakes(document: Document) -> Iterator[Problem]:
    """Yield keys of [layers.NAME] that conflict, and names of layers and targets that do not exist."""
    layers, targets = table_at(document.data, "layers"), table_at(document.data, "targets")
    for name, table in ((name, table) for name, table in layers.items() if isinstance(table, dict)):
        kind = table.get("kind", "default")
        if kind == "host" and not table.get("path"):
            yield ("layers", name), f"'path' in [layers.{name}] is missing: where do the nodes have it?"
        if kind != "host" and table.get("path"):
            yield ("layers", name, "path"), "'path': only with kind = \"host\""
        if kind == "wheel" and name != "nccl":
            yield ("layers", name, "kind"), "'wheel' is for nccl; other packages belong into requirements"
        if kind in ("wheel", "host"):
            for option in ("url", "sha256", "system", "configure", "patches", "requires"):
                if table.get(option):
                    yield ("layers", name, option), f"{option!r}: only for a layer that is built from source"
        for number, word in enumerate(list_at(table, "requires")):
            if word not in layers or word == name:
                yield ("layers", name, "requires", number), f"{word!r} is not another layer of this recipe"
        for number, word in enumerate(list_at(table, "targets")):
            if targets and word not in targets:
                yield ("layers", name, "targets", number), f"the recipe has no target {word!r}"


@dataclass(frozen=True)
class BuildTable:
    """`[build.NAME]`: a package whose wheel envbuild builds from its source archive."""

    requires: tuple[str, ...] = key(
        (),
        "Build requirements that the package does not declare.",
        check=checks.constraint_problem,
        example=["setuptools<81"],
    )
    dependencies: tuple[str, ...] | None = key(
        None,
        "Its requirements, for a package whose build back end cannot tell them without the environment's"
        " packages. Default: as it says itself.",
        check=checks.constraint_problem,
        example=["torch", "einops"],
    )
    environment: dict[str, str] = key(
        {}, "Environment variables of its build. Never secrets.", key_check=checks.variable_problem
    )
    packages: tuple[str, ...] = key(
        (),
        "Debian packages that its build in the builder image needs besides compilers.",
        pattern=r"^[a-z0-9][a-z0-9+.-]+$",
        example=["libaio-dev"],
    )
    patches: tuple[str, ...] = key(
        (),
        "Patch files below the recipe's folder, applied in this order with -p1 before the build.",
        check=patch_problem,
        example=["patches/fix.patch"],
    )
    isolation: bool = key(
        True,
        "Whether the build sees only its build requirements. `false`: it also imports the environment's"
        " packages, such as torch, and is built again when one of them changes.",
    )
    targets: tuple[str, ...] = key(
        (), "The targets for which it is built. Default: all.", check=target_problem, example=["cu126-x86_64"]
    )

    def for_target(self, target: str) -> bool:
        """Return whether the package is built for `target`."""
        return not self.targets or target in self.targets


def requirement_entries(document: Document) -> Iterator[tuple[Keys, str]]:
    """Yield each valid requirement of the recipe, of its targets and of [conda], with its keys."""
    tables: list[tuple[str, ...]] = [
        (),
        ("conda",),
        *(("targets", name) for name in table_at(document.data, "targets")),
    ]
    for keys in tables:
        for index, text in enumerate(list_at(document.data, *keys, "requirements")):
            if isinstance(text, str) and checks.requirement_problem(text) is None:
                yield (*keys, "requirements", index), text


def build_mistakes(document: Document) -> Iterator[Problem]:
    """Yield direct references to files that do not exist, and tables of [build] that conflict with others."""
    direct: dict[str, str] = {}
    for keys, text in requirement_entries(document):
        reference = reference_of(text)
        if reference is None:
            continue
        direct[reference.name] = "a wheel" if reference.is_wheel else ""
        if reference.kind == "path" and not (document.path.parent / reference.url).is_file():
            yield keys, f"{reference.name!r}: there is no file {document.path.parent / reference.url}"
    tables = table_at(document.data, "build")
    for name in tables:
        if "dependencies" in table_at(tables, name) and normalise(name) in direct:
            yield ("build", name, "dependencies"), "'dependencies': only for a package of an index"
    for table, why in (("indexes", "it is a direct reference"), ("build", "its requirement names a wheel")):
        for name in _names(document, table):
            if normalise(name) in direct and (table == "indexes" or direct[normalise(name)]):
                yield (table, name), f"{name!r} in [{table}]: {why}"
    layers, targets = _names(document, "layers"), table_at(document.data, "targets")
    for name in _names(document, "build"):
        if normalise(name) in layers:
            yield ("build", name), f"{name!r} is built as [layers.{normalise(name)}]; take one of both out"
        for number, word in enumerate(list_at(tables, name, "targets")):
            if targets and word not in targets:
                yield ("build", name, "targets", number), f"the recipe has no target {word!r}"


def _names(document: Document, table: str) -> list[str]:
    entry = document.data.get(table)
    return [name for name in entry if isinstance(name, str)] if isinstance(entry, dict | list) else []


@dataclass(frozen=True)
class SlimTable:
    """`[slim]`: what artifacts leave out of wheels."""

    gpus: bool = key(
        False,
        "Leave out code for other GPUs than the target's `gpus`, in libraries whose licence allows it.",
        example=True,
    )
    debug: bool = key(False, "Leave out debug sections of the same libraries.", example=True)
    files: tuple[str, ...] = key(
        (),
        "Leave out files that running never reads: `include`, `static`, `tests`.",
        choices=file_rules,
        example=["static", "tests"],
    )


def slim_mistakes(document: Document) -> Iterator[Problem]:
    """Yield a mistake for `gpus` in [slim] if a CUDA target does not list its GPUs."""
    if table_at(document.data, "slim").get("gpus") is not True:
        return
    for name in table_at(document.data, "targets"):
        cuda = target_problem(name) is None and Target.parse(name).family.name == "cuda"
        if cuda and not table_at(document.data, "targets", name).get("gpus"):
            yield ("slim", "gpus"), f"'gpus' in [slim] needs `gpus` in [targets.{name}]: which GPUs is it for?"


NAME_PATTERN = r"^[a-z0-9][a-z0-9_.-]*$"
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
_PACKAGE = r"^[a-z0-9][a-z0-9+.-]+$"
# manylinux levels that uv's --python-platform supports.
GLIBCS = ("2.17", "2.28", *(f"2.{minor}" for minor in range(31, 41)))


@dataclass(frozen=True)
class TargetTable:
    """`[targets.NAME]`: a target's additions to the common part."""

    requirements: tuple[str, ...] = key(
        (),
        "Packages of this target, added to the common ones.",
        check=checks.requirement_problem,
        example=["torch==2.13.0+cpu"],
    )
    indexes: tuple[str, ...] = key(
        (),
        "URLs of package indexes that this target needs besides the site's. Never with credentials.",
        check=checks.index_problem,
        pattern=r"^(https?|file)://\S+$",
        example=["https://download.pytorch.org/whl/cpu"],
    )
    glibc: str = key(
        "2.28",
        "The newest glibc that a wheel may need: the oldest that hosts may have.",
        choices=GLIBCS,
        example="2.28",
    )
    conda: tuple[str, ...] = key(
        (),
        "conda packages of this target, added to [conda]'s dependencies.",
        check=checks.spec_problem,
        example=["pytorch 2.7.* cuda126*"],
    )
    pythons: tuple[str, ...] = key(
        (),
        "Other versions of Python that have a wheel lock of this target; `envbuild venv --python` chooses one.",
        choices=PYTHONS,
        example=["3.12", "3.13"],
    )
    gpus: tuple[str, ...] = key(
        (),
        "The GPUs that it must run on: chips (sm_90, gfx90a), GPUs (h100, mi250x) or families (hopper).",
        check=gpu_problem,
        pattern=GPU_PATTERN,
        example=["sm_90"],
    )


@dataclass(frozen=True)
class CondaTable:
    """`[conda]`: channels and packages of `envbuild conda`."""

    channels: tuple[str, ...] = key(
        ("conda-forge",),
        "Channels, the one to be preferred first: names, or URLs without credentials.",
        check=checks.channel_problem,
        min_items=1,
        example=["conda-forge"],
    )
    dependencies: tuple[str, ...] = key(
        (),
        "Packages of every target, as conda match specs. Python comes from `python`.",
        check=checks.spec_problem,
        example=["numpy 2.2.*"],
    )
    requirements: tuple[str, ...] = key(
        (),
        "pip requirements for what no channel has; resolved against the conda packages.",
        check=checks.requirement_problem,
        example=["einops==0.8.1"],
    )


@dataclass(frozen=True)
class ImageTable:
    """`[image]`: the base and the settings of container images (docker, enroot, apptainer)."""

    base: str = key(
        "debian",
        "`debian` for a small base from Debian packages, or an existing image: a registry"
        " reference, docker-daemon:NAME, docker-archive:FILE or oci:DIR[:TAG].",
        check=checks.base_problem,
        example="docker.io/pytorch/pytorch:2.7.1-cuda12.6-cudnn9-runtime",
    )
    suite: str = key(
        "", "Debian's release. Default: the one that has the recipe's Python.", pattern=r"^[a-z]*$", example="bookworm"
    )
    packages: tuple[str, ...] = key(
        (),
        "Debian packages besides the usual ones (Python, bash, coreutils, certificates …).",
        pattern=_PACKAGE,
        example=["openssh-client"],
    )
    python: str = key(
        "",
        "The interpreter inside an existing base image, an absolute path.",
        pattern=r"^(/[^/\s]+)*$",
        example="/opt/conda/bin/python3.11",
    )
    build_base: str = key(
        "",
        "An image of the same distribution with compilers, in which [layers] are built. Needed where"
        " `base` is an existing image; else Debian's compilers are used.",
        check=checks.base_problem,
        example="docker.io/nvidia/cuda:12.6.3-devel-ubuntu22.04",
    )
    build_packages: tuple[str, ...] = key(
        (),
        "Debian packages that building [layers] needs besides compilers and make; not in the image.",
        pattern=_PACKAGE,
        example=["libhwloc-dev"],
    )
    workdir: str = key("/workspace", "The folder in which a container starts.", pattern=r"^/\S*$", example="/workspace")
    env: dict[str, str] = key(
        {},
        "Environment variables of the image, over those of its base. Never secrets.",
        key_check=checks.variable_problem,
    )


@dataclass(frozen=True)
class RecipeAudit:
    """`[audit]`: known vulnerabilities that are accepted in this environment."""

    exceptions: dict[str, AuditException] = key(
        {}, "Identifier of a vulnerability → why it is accepted, and until when."
    )


@dataclass(frozen=True)
class Recipe:
    """A complete recipe."""

    name: str = required(
        "The recipe's name; the same as its folder's in recipes/NAME/recipe.toml.",
        pattern=NAME_PATTERN,
        example="pt_cpu",
    )
    python: str = required("Version of Python, X.Y.", choices=PYTHONS, example="3.11")
    requirements: tuple[str, ...] = required(
        "Packages of every target, as pip requirements (PEP 508), with git repositories, archives and files of the"
        " recipe as `NAME @ ADDRESS`. No options.",
        check=checks.requirement_problem,
        example=["numpy==2.2.6"],
    )
    targets: dict[str, TargetTable] = required(
        "The targets this recipe can be built for: ACCELERATOR-ARCH, cpu, cuNNN (cu126) or rocmN.N (rocm6.4), x86_64"
        " or aarch64.",
        key_check=target_problem,
        min_items=1,
    )
    description: str = key(
        "", "What the environment is for, in one line.", pattern=r"^\S([^\n]*\S)?$", example="PyTorch DDP on CPU"
    )
    constraints: tuple[str, ...] = key(
        (),
        "Versions to keep to where a dependency brings the package in; they install nothing themselves.",
        check=checks.constraint_problem,
        example=["setuptools<81"],
    )
    overrides: tuple[str, ...] = key(
        (),
        "Versions that replace those that packages of the lock ask for, where these are wrong; they install nothing"
        " themselves.",
        check=checks.override_problem,
        example=["numpy>=2"],
    )
    exclude_newer: str = key(
        "",
        "The age that files must have to be locked (7 days), or the date after which uploaded files are left out.",
        check=lambda text: checks.age_problem(text) if text else None,
        example="7 days",
    )
    exclude_newer_index: dict[str, str] = key(
        {},
        "The same for one index: URL in `indexes` of a target, or name in [indexes] → age, date, or `off`.",
        check=checks.index_age_problem,
    )
    indexes: dict[str, str] = key(
        {},
        "Package → name of the index of the site that alone may serve it, whatever other indexes have.",
        key_check=checks.project_problem,
        pattern=INDEX_NAME,
    )
    build: dict[str, BuildTable] = key(
        {},
        "Packages whose wheels envbuild builds from source, as no index has them: a list of names, or a table for each."
        " Those with the address of a source need no entry.",
        key_check=checks.project_problem,
        names=True,
    )
    environment: Literal["venv", "conda"] = key(
        "venv",
        "What container images hold: wheels on the base's Python, or the conda packages of [conda].",
        example="conda",
    )
    conda: CondaTable = key(CondaTable(), "What conda environments are made of.")
    fabric: str = key(
        "any",
        "The network between nodes that verification must see in use; `any` takes what is there.",
        choices=fabric_names,
        example="efa",
    )
    layers: dict[str, LayerTable] = key(
        {},
        "What is built from source, replaced, or taken from the host: libfabric, nccl,"
        " aws-ofi-nccl, horovod, or a name of your own.",
        key_check=layer_name_problem,
    )
    slim: SlimTable = key(SlimTable(), "What artifacts leave out of wheels.")
    image: ImageTable = key(ImageTable(), "What container images are built on.")
    verify: VerifySettings = key(VerifySettings(), "The training, imports and command that prove an artifact.")
    audit: RecipeAudit = key(RecipeAudit(), "Known vulnerabilities that are accepted.")
    project: ProjectTable | None = key(None, "Your own code, which every artifact gets last.")


def duplicate_requirements(document: Document) -> Iterator[Problem]:
    """Yield projects that a target requires twice with different specifiers. The data may have other mistakes."""
    every = list(requirement_entries(document))
    common = [entry for entry in every if entry[0][0] == "requirements"]
    of_targets = [
        [entry for entry in every if entry[0][:2] == ("targets", name)] for name in table_at(document.data, "targets")
    ]
    for entries in of_targets or [[]]:
        first: dict[str, tuple[Keys, str]] = {}
        for keys, text in common + entries:
            name, rest = checks.requirement_parts(text)
            before, earlier = first.setdefault(name, (keys, text))
            other = checks.requirement_parts(earlier)[1]
            # Two markers may exclude each other, which is pip's way to select a version.
            if rest != other and not (";" in rest and ";" in other):
                yield keys, f"{name!r} is also required by {earlier!r} at {document.where(*before)}"


def override_mistakes(document: Document) -> Iterator[Problem]:
    """Yield duplicate overrides of one project, and overrides that would replace a version in the recipe itself."""
    required = {
        name: (keys, text)
        for keys, text in requirement_entries(document)
        for name, versions in [checks.requirement_parts(text)]
        if versions and not versions.startswith(";")
    }
    seen = set[str]()
    for index, text in enumerate(list_at(document.data, "overrides")):
        name = checks.requirement_parts(str(text))[0]
        if name in seen and ";" not in str(text):
            yield ("overrides", index), f"{name!r} is overridden twice"
        elif name in required:
            keys, other = required[name]
            problem = (
                f"{text!r} would replace {other!r} at {document.where(*keys)}: write {name!r} there, without versions"
            )
            yield ("overrides", index), problem
        seen.add(name)


def index_mistakes(document: Document) -> Iterator[Problem]:
    """Yield packages in [indexes] that no requirement names or that appear twice, and indexes that none names."""
    known = sorted({checks.requirement_parts(text)[0] for _, text in requirement_entries(document)})
    seen = set[str]()
    for project in table_at(document.data, "indexes"):
        name = normalise(project)
        if name not in known:
            # uv binds direct requirements: a binding without effect would be dangerous.
            yield ("indexes", project), f"{project!r} in [indexes] is in no `requirements`{nearest(name, known)}"
        elif name in seen:
            yield ("indexes", project), f"{project!r} in [indexes] is there in another spelling"
        seen.add(name)
    named = [url for target in table_at(document.data, "targets").values() for url in list_at(target, "indexes")]
    named += table_at(document.data, "indexes").values()
    for index in table_at(document.data, "exclude_newer_index"):
        if index not in named:
            problem = f"{index!r} in [exclude_newer_index] is no URL in `indexes` of a target and no name in [indexes]"
            yield ("exclude_newer_index", index), problem + nearest(index, sorted({str(name) for name in named}))


def image_mistakes(document: Document) -> Iterator[Problem]:
    """Yield keys of [image] that its base does not support, and a missing interpreter of an existing base."""
    image = table_at(document.data, "image")
    if image.get("base", "debian") == "debian":
        for name in ("python", "build_base"):
            if image.get(name):
                yield ("image", name), f"{name!r} in [image]: only with an existing image as its base"
        return
    for name in ("suite", "packages", "build_packages"):
        if name in image:
            yield ("image", name), f'{name!r} in [image]: only with base = "debian"'
    if not image.get("python") and document.data.get("environment") != "conda":
        yield ("image",), "'python' in [image] is missing: where is the interpreter in the base image?"


def conda_mistakes(document: Document) -> Iterator[Problem]:
    """Yield missing conda settings, and conda settings that have no effect without others."""
    conda = table_at(document.data, "conda")
    has = bool(conda.get("dependencies"))
    if document.data.get("environment") == "conda":
        if not has:
            yield (("environment",), "'conda' needs a [conda] table with `dependencies`")
        if table_at(document.data, "image").get("python"):
            yield (("image", "python"), "'python' in [image]: with environment = \"conda\" the interpreter is conda's")
    if "conda" in document.data and not has:
        yield ("conda",), "'dependencies' in [conda] is missing"
    for name in table_at(document.data, "targets"):
        if "conda" not in document.data and table_at(document.data, "targets", name).get("conda"):
            yield ("targets", name, "conda"), "'conda' of a target needs a [conda] table"


def gpu_mistakes(document: Document) -> Iterator[Problem]:
    """Yield GPUs of a target that are for another accelerator."""
    targets = document.data.get("targets")
    for name, table in targets.items() if isinstance(targets, dict) else ():
        words = table.get("gpus") if isinstance(table, dict) and target_problem(name) is None else ()
        for number, word in enumerate(words if isinstance(words, list) else ()):
            family = Target.parse(name).family.name
            if isinstance(word, str) and any(chip.accelerator != family for chip in chips_named(word)):
                yield ("targets", name, "gpus", number), f"{word!r} is no GPU of target {name!r}"


def verify_mistakes(document: Document) -> Iterator[Problem]:
    """Yield mutually exclusive keys of [verify], and keys of [verify.expect] that need another key."""
    verify, expect = table_at(document.data, "verify"), table_at(document.data, "verify", "expect")
    if verify.get("command") and verify.get("script"):
        yield ("verify", "script"), "[verify] has `command` and `script`: leave one of them out"
    if "expect" in verify and not (verify.get("command") or verify.get("script")):
        yield ("verify", "expect"), "[verify.expect] needs `command` or `script` in [verify]"
    for name in ("trend", "last"):
        if name in expect and not expect.get("metric"):
            yield ("verify", "expect", name), f"{name!r} in [verify.expect] needs `metric`"


# Checks that concern several keys at once; the data may have other mistakes.
MISTAKES = (
    build_mistakes,
    duplicate_requirements,
    override_mistakes,
    index_mistakes,
    image_mistakes,
    conda_mistakes,
    gpu_mistakes,
    slim_mistakes,
    layer_mistakes,
    verify_mistakes,
)


if __name__ == "__main__":  # the JSON schema for editors
    import json

    print(json.dumps(json_schema(Recipe, id="urn:envbuild:recipe", title="envbuild recipe"), indent=2))
