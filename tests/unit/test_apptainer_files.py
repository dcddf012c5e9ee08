"""What is put into an image for Apptainer, and what its scripts do in a plain shell."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from envbuild.base.errors import BuildError
from envbuild.build.apptainer_engine import build_with_apptainer
from envbuild.build.runtime_files import (
    all_labels,
    apptainer_files,
    definition,
    inspect_metadata,
    mount_points,
    oci_config,
    recipe_definition,
)
from envbuild.image.entry import DIR, FILE, SYMLINK
from envbuild.run_environment import load_environment
from examples import examples

GOLDEN = Path(__file__).parents[1] / "golden/apptainer"
DOCKER_ENV = ".singularity.d/env/10-docker2singularity.sh"
PRINTF = ["/usr/bin/printf", "[%s]\\0"]
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20) | st.text(
    "ab $`'\"\\\n!*?~#&;|<>(){}[]=-", max_size=12
)
NAMES = st.from_regex(r"V[A-Za-z0-9_]{0,9}", fullmatch=True)
many = examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
CONFIG: dict[str, Any] = {
    "architecture": "arm64",
    "config": {
        "Env": ["PATH=/opt/env/bin:/usr/bin:/bin", "LANG=C.UTF-8", 'ODD=it\'s "q" $HOME `x`\n2', "E=", "a.b=c"],
        "Entrypoint": ["/usr/bin/tini", "--"],
        "Cmd": ["python", "-c", "print('hello')"],
        "WorkingDir": "/workspace",
        "Labels": {"org.opencontainers.image.title": "lab", "text": "two\nlines"},
    },
}


def texts(**run: Any) -> dict[str, str]:
    """The files for an image whose `config` is `run`, by path."""
    made = apptainer_files({"config": run}, "# none\n", 7)
    return {entry.path: data.decode() for entry, data in made if data is not None}


def run_script(tmp_path: Path, text: str, *arguments: str) -> list[str]:
    script = tmp_path / "script"
    script.write_text(text)
    done = subprocess.run(["sh", script, *arguments], capture_output=True)
    assert done.returncode == 0, done.stderr
    return [word[1:-1] for word in done.stdout.decode().split("\0")[:-1]]


@many
@given(st.lists(WORDS, max_size=4), st.lists(WORDS, max_size=3), st.lists(WORDS, max_size=3))
def test_run_gives_the_program_the_arguments_that_docker_would_give_it(
    tmp_path: Path, entrypoint: list[str], cmd: list[str], arguments: list[str]
) -> None:
    script = texts(Entrypoint=[*PRINTF, *entrypoint], Cmd=cmd)[".singularity.d/runscript"]
    found = run_script(tmp_path, script, *arguments)
    assert found == ([*entrypoint, *(arguments or cmd)] or [""])


@pytest.mark.parametrize(
    ("run", "arguments", "expected"),
    [
        ({"Cmd": [*PRINTF, "c"]}, [], ["c"]),
        ({"Cmd": ["false"]}, [*PRINTF, "a"], ["a"]),
        ({}, [*PRINTF, "a"], ["a"]),
        ({}, [], []),
    ],
)
def test_run_without_an_entrypoint(
    tmp_path: Path, run: dict[str, Any], arguments: list[str], expected: list[str]
) -> None:
    assert run_script(tmp_path, texts(**run)[".singularity.d/runscript"], *arguments) == expected


@many
@given(st.dictionaries(NAMES, WORDS, max_size=6))
def test_the_variables_of_the_image_are_set_once(tmp_path: Path, env: dict[str, str]) -> None:
    pairs = ["PATH=/usr/bin:/bin", *(f"{name}={value}" for name, value in env.items())]
    (tmp_path / "env.sh").write_text(texts(Env=pairs)[DOCKER_ENV])
    command = ["/bin/sh", "-euc", f". {tmp_path}/env.sh; . {tmp_path}/env.sh; exec env -0"]
    for shell in ("sh", "bash"):
        done = subprocess.run([shell, *command[1:]], env={"PATH": "/gone:/bin"}, capture_output=True)
        got = dict(pair.partition("=")[::2] for pair in done.stdout.decode().split("\0"))
        assert {name: got.get(name) for name in env} == env, done.stderr
        assert got["PATH"] == "/usr/bin:/bin"


def test_a_variable_that_is_set_stays_and_an_empty_one_is_filled(tmp_path: Path) -> None:
    script = texts(Env=["A=image", "B=image", "C=image"])[DOCKER_ENV]
    command = ["sh", "-c", f'{script}printf "%s " "$A" "$B" "$C"']
    done = subprocess.run(command, env={"A": "host", "B": ""}, capture_output=True)
    assert done.stdout == b"host image image "


@pytest.mark.parametrize("action", ["exec", "run", "shell", "start", "test"])
def test_every_script_is_one_to_a_shell(tmp_path: Path, action: str) -> None:
    made = texts(**CONFIG["config"])
    for path, text in made.items():
        if path.endswith(".sh") or "script" in path or f"actions/{action}" in path:
            assert text.startswith("#!/bin/sh\n")
            for shell in ("dash", "bash"):
                assert subprocess.run([shell, "-n"], input=text.encode()).returncode == 0, path


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
@pytest.mark.parametrize(
    ("action", "arguments", "expected"),
    [
        ("exec", ["sh", "-c", 'echo "$ODD" $1', "-", "a b"], 'it\'s "q" $HOME `x` a b'),
        ("run", ["a  b"], "ran [a  b]"),
        ("run", [], "ran [from cmd]"),
        ("shell", ["-c", 'echo "$ODD"'], 'it\'s "q" $HOME `x`'),
        ("test", [], "This image has no tests of its own."),
    ],
)
def test_the_actions_work_where_a_runtime_runs_the_files(
    small_root: Path, action: str, arguments: list[str], expected: str
) -> None:
    path = small_root / f".singularity.d/actions/{action}"
    done = subprocess.run(
        [shutil.which("chroot") or "chroot", small_root, f"/.{action}", *arguments],
        capture_output=True,
        text=True,
        env={},
    )
    assert (small_root / f".{action}").readlink() == path.relative_to(small_root)
    assert done.stdout.strip() == expected, done.stderr


@pytest.fixture(scope="module")
def small_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a shell and the files added, as a chroot can use it."""
    root = tmp_path_factory.mktemp("root")
    found = subprocess.run(["ldd", "/bin/dash"], capture_output=True, text=True, check=True)
    names = [word for word in found.stdout.split() if word.startswith("/")]
    for source, place in [("/bin/dash", "/bin/sh"), *((name, name) for name in names)]:
        target = root / place[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(source).read_bytes())
        target.chmod(0o755)
    run = {
        "Env": ["PATH=/bin", 'ODD=it\'s "q" $HOME `x`'],
        "Entrypoint": ["/bin/sh", "-c", 'echo "ran [$*]"', "-"],
        "Cmd": ["from cmd"],
    }
    for entry, data in apptainer_files({"config": run}, "# none\n", 7):
        path = root / entry.path
        if entry.kind == DIR:
            path.mkdir()
        elif entry.kind == SYMLINK:
            path.symlink_to(entry.target)
        else:
            path.write_bytes(data or b"")
            path.chmod(entry.mode)
    return root


def test_the_files_are_these_byte_for_byte() -> None:
    config = {**CONFIG, "config": {**CONFIG["config"], "Labels": {**CONFIG["config"]["Labels"], "added": "1"}}}
    made = apptainer_files(config, definition("docker://debian:12"), 315532800)
    assert made == apptainer_files(config, definition("docker://debian:12"), 315532800)
    files = {}
    for entry, data in made:
        assert (entry.uid, entry.gid, entry.mtime) == (0, 0, 315532800)
        if entry.kind == FILE:
            assert data is not None and entry.size == len(data)
            name = entry.path.removeprefix(".singularity.d/").replace("/", "+")
            files[name] = data
            plain = entry.path.endswith(("labels.json", "Singularity"))
            assert entry.mode == (0o644 if plain else 0o755)
    files["inspect-metadata.json"] = inspect_metadata(config, definition("docker://debian:12"))
    assert sorted(files) == sorted(path.name for path in GOLDEN.iterdir())
    for name, data in files.items():
        assert data == (GOLDEN / name).read_bytes(), name


def test_parents_come_first_and_links_lead_to_what_is_there() -> None:
    made = [entry for entry, _ in apptainer_files(CONFIG, "", 0)]
    known = {""}
    for entry in made:
        assert entry.path.rpartition("/")[0] in known
        known.add(entry.path)
        if entry.kind == SYMLINK:
            assert entry.target in known


def test_inspect_says_what_is_in_the_tree() -> None:
    text = definition("docker://debian:12")
    files = {e.path: d for e, d in apptainer_files(CONFIG, text, 0) if d is not None}
    shown = json.loads(inspect_metadata(CONFIG, text))
    assert shown["type"] == "container"
    attributes = shown["data"]["attributes"]
    for name in ("runscript", "startscript"):
        assert attributes[name] == files[f".singularity.d/{name}"].decode().rstrip("\n")
    for path, script in attributes["environment"].items():
        assert script == files[path[1:]].decode().rstrip("\n")
    assert attributes["deffile"] + "\n" == files[".singularity.d/Singularity"].decode()
    assert attributes["labels"] == json.loads(files[".singularity.d/labels.json"])
    assert json.loads(oci_config(CONFIG)) == CONFIG["config"]


def test_labels_of_the_image_and_those_asked_for_come_together() -> None:
    found = all_labels(CONFIG, definition("docker://debian:12"))
    assert found == {
        "org.label-schema.build-arch": "arm64",
        "org.label-schema.schema-version": "1.0",
        "org.label-schema.usage.singularity.deffile.bootstrap": "docker",
        "org.label-schema.usage.singularity.deffile.from": "debian:12",
        "org.opencontainers.image.title": "lab",
        "text": "two\nlines",
    }
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("docker://debian:12", "Bootstrap: docker\nFrom: debian:12\n"),
        ("docker://me:secret@host:5000/x@sha256:1", "Bootstrap: docker\nFrom: me:****@host:5000/x@sha256:1\n"),
        ("docker://host:5000/t/odd:1", "Bootstrap: docker\nFrom: host:5000/t/odd:1\n"),
        ("image sha256:1", "# image sha256:1\n"),
        ("debian:12", "# debian:12\n"),
        ("docker://a\n%post\nrm", "# docker://a\n# %post\n# rm\n"),
    ],
)
def test_the_definition_names_the_source_and_no_password(source: str, expected: str) -> None:
    assert definition(source) == expected


def test_a_recipe_is_told_without_pretending_that_apptainer_built_it() -> None:
    text = recipe_definition("pt_cpu", "cpu-x86_64", "sha256:1")
    assert "envbuild apptainer pt_cpu --target cpu-x86_64" in text
    assert all(line.startswith("#") for line in text.splitlines())


def test_only_missing_mount_points_are_made_parents_first() -> None:
    everything = mount_points(lambda path: False, 7)
    paths = [entry.path for entry, _ in everything]
    assert {"dev", "proc", "sys", "tmp", "var/tmp", "home", "etc/passwd", "etc/group"} <= set(paths)
    assert all(path.rpartition("/")[0] in ("", *paths[:i]) for i, path in enumerate(paths))
    modes = {entry.path: entry.mode for entry, _ in everything}
    assert modes["tmp"] == modes["var/tmp"] == 0o1777
    assert all((data is None) == (entry.kind == DIR) for entry, data in everything)
    assert mount_points(lambda path: True, 7) == []
    assert [e.path for e, _ in mount_points(lambda p: p not in ("sys", "etc/hosts"), 7)] == ["sys", "etc/hosts"]


def test_a_failed_build_of_the_installed_tool_is_an_error_with_its_exit_code_and_output(tmp_path: Path) -> None:
    engine = tmp_path / "bin/apptainer"
    engine.parent.mkdir()
    engine.write_text(
        '#!/bin/sh\n[ "$2" != --help ] || exit 0\necho "$@"; echo "No space left: $APPTAINER_CACHEDIR" >&2\nexit 3\n'
    )
    engine.chmod(0o755)
    known = {"PATH": f"{engine.parent}:/usr/bin:/bin", "TMPDIR": str(tmp_path), "APPTAINER_CACHEDIR": "/cache"}
    environment = load_environment({**known, "HOME": str(tmp_path), "ENVBUILD_STORE": str(tmp_path / "store")})
    with pytest.raises(BuildError, match=r"apptainer did not build the image \(exit 3\)") as caught:
        build_with_apptainer("oci:layout", tmp_path / "x.sif", environment, arch=os.uname().machine)
    assert re.search(r"--nocolor build \S+/image\.sif oci:layout\n  No space left: /cache$", caught.value.message)
    assert "APPTAINER_TMPDIR" in str(caught.value.hint) and not (tmp_path / "x.sif").exists()
