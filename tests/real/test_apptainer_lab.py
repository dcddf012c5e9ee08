"""Apptainer itself with an image of its own making and with one that has our files: they must behave alike."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab.apptainer import FLAGS, Apptainer, missing

from envbuild.base.errors import BuildError, HostError
from envbuild.build.apptainer_engine import build_with_apptainer
from envbuild.build.runtime_files import apptainer_files, enroot_files, inspect_metadata, mount_points, oci_config
from envbuild.environment import Environment
from envbuild.image.entry import DIR, SYMLINK
from envbuild.image.sif import finish_sif, read_sif, write_sif_front
from envbuild.run_environment import load_environment

Done = subprocess.CompletedProcess[str]
REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
ARCH = os.uname().machine
MTIME = 315532800
# A program that says what it was given and what it sees, without reading any of it again.
SHOW = '#!/bin/sh\nprintf "[%s]" "$@"\necho\n'
ENV = {"PATH": "/opt/env/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PLAIN": "a b", "EQUALS": "a=b=c", "EMPTY": ""}
# Values that Apptainer's own build garbles, since it escapes them twice.
ODD = {"QUOTES": 'it\'s "q"', "DOLLAR": "$HOME \\n", "LINES": "one\ntwo"}
# Some of these keep its images from reading any variable at all: ours alone have them.
_dice = random.Random(7)
NASTY = {
    f"V{number}": "".join(_dice.choices("ab $`'\"\\\n!*?~#&;|<>(){}[]=-é\t", k=_dice.randrange(1, 12)))
    for number in range(200)
} | {"BACKTICK": "`date`", "TILDE": "~", "GLOB": "/*", "DASH": "-n"}


@dataclass(frozen=True)
class Images:
    """One root file system twice: `theirs` built by Apptainer, `ours` with our files; `squashfs` is ours alone."""

    run: Apptainer
    archive: Path
    theirs: Path
    ours: Path
    squashfs: Path

    def exec(self, action: str, image: Path, *arguments: str, **env: str) -> Done:
        options = [*FLAGS, "--cleanenv", "--no-home", "--pwd", "/"]
        return self.run(action, *options, image, *arguments, check=False, env=env)


@pytest.fixture(scope="module")
def images(real_apptainer: Apptainer, tmp_path_factory: pytest.TempPathFactory) -> Images:
    folder = tmp_path_factory.mktemp("images")
    root = small_root(folder / "root")
    config: dict[str, Any] = {
        "architecture": "amd64" if ARCH == "x86_64" else "arm64",
        "os": "linux",
        "config": {
            "Env": [f"{name}={value}" for name, value in {**ENV, **ODD}.items()],
            "Entrypoint": ["show", "it's $HOME"],
            "Cmd": ["default", "two words"],
            "WorkingDir": "/workspace",
            "Labels": {"org.example.one": "1", "org.example.text": 'two\nlines "q"'},
            "User": "nobody",
        },
    }
    archive = docker_archive(folder / "lab.tar", root, config)
    theirs = folder / "theirs.sif"
    real_apptainer("build", theirs, f"docker-archive:{archive}")
    config["config"]["Env"] += [f"{name}={value}" for name, value in NASTY.items()]
    text = f"Bootstrap: docker-archive\nFrom: {archive}\n"
    ours, squashfs = own_sif(folder, root, config, text)
    return Images(real_apptainer, archive, theirs, ours, squashfs)


def small_root(root: Path) -> Path:
    """A root file system with a shell and a few programs of this host, and `show`."""
    for name in ("dash", "bash", "env", "cat", "id", "pwd", "ls", "true", "mkdir"):
        program = Path(shutil.which(name) or name).resolve()
        found = subprocess.run(["ldd", program], capture_output=True, text=True, check=True)
        libraries = [word for word in found.stdout.split() if word.startswith("/")]
        for source, place in [(program, f"/bin/{name}"), *((Path(p), p) for p in libraries)]:
            target = root / place[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(0o755)
    (root / "bin/sh").symlink_to("dash")
    show = root / "opt/env/bin/show"
    show.parent.mkdir(parents=True)
    show.write_text(SHOW)
    show.chmod(0o755)
    return root


def docker_archive(file: Path, root: Path, config: dict[str, Any]) -> Path:
    """What `docker save` writes, of one layer that holds `root`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        for path in sorted(root.iterdir()):
            layer.add(path, path.name)
    data = buffer.getvalue()
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    config = {**config, "rootfs": {"type": "layers", "diff_ids": [digest]}}
    listing = [{"Config": "config.json", "RepoTags": ["lab:1"], "Layers": ["layer.tar"]}]
    with tarfile.open(file, "w") as archive:
        for name, content in (
            ("layer.tar", data),
            ("config.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps(listing).encode()),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file


def own_sif(folder: Path, root: Path, config: dict[str, Any], text: str) -> tuple[Path, Path]:
    """A SIF of `root` with what we add, and its squashfs; the squashfs is made by mksquashfs."""
    tree = folder / "tree"
    shutil.copytree(root, tree, symlinks=True)
    added = enroot_files(config, "docker://lab", MTIME) + apptainer_files(config, text, MTIME)
    paths = {entry.path for entry, _ in added}
    added += mount_points(lambda path: path in paths or os.path.lexists(tree / path), MTIME)
    for entry, data in added:
        path = tree / entry.path
        if data is not None:
            path.write_bytes(data)
        elif os.path.lexists(path):
            continue
        elif entry.kind == DIR:
            path.mkdir()
        elif entry.kind == SYMLINK:
            path.symlink_to(entry.target)
        if entry.kind != SYMLINK:
            path.chmod(entry.mode)
    squashfs, sif = folder / "ours.sqsh", folder / "ours.sif"
    command = ["mksquashfs", str(tree), str(squashfs), "-quiet", "-no-progress", "-all-root", "-comp", "zstd"]
    subprocess.run(command, check=True, capture_output=True)
    jsons = [("inspect-metadata.json", inspect_metadata(config, text)), ("oci-config.json", oci_config(config))]
    with sif.open("w+b") as stream:
        at = write_sif_front(stream, text.encode(), jsons, ARCH)
        stream.seek(at)
        stream.write(squashfs.read_bytes())
        size = squashfs.stat().st_size
        finish_sif(stream, text.encode(), jsons, ARCH, partition_size=size, mtime=MTIME)
    return sif, squashfs


def test_the_lab_installs_nothing_on_the_system(images: Images) -> None:
    assert re.fullmatch(r"apptainer version 1\.\d+\.\d+.*\n", images.run("--version").stdout)
    paths = dict(line.split("=", 1) for line in images.run("buildcfg").stdout.splitlines())
    for name in ("BINDIR", "LIBEXECDIR", "APPTAINER_CONF_FILE", "SESSIONDIR"):
        assert paths[name].startswith(f"{images.run.folder}/"), name


def shown(*words: str) -> str:
    """What `show` prints."""
    return "".join(f"[{word}]" for word in words) + "\n"


@pytest.mark.parametrize("arguments", [[], ["one", "a b"], ["-c", ""], ["*", "it's"]])
def test_run_starts_the_program_with_the_same_arguments(images: Images, arguments: list[str]) -> None:
    ours = images.exec("run", images.ours, *arguments)
    theirs = images.exec("run", images.theirs, *arguments, APPTAINER_NO_EVAL="1")
    assert (ours.returncode, ours.stdout) == (0, theirs.stdout), ours.stderr
    expected = ["it's $HOME", *(arguments or ["default", "two words"])]
    assert ours.stdout == shown(*expected)


def test_run_reads_no_argument_again_where_apptainers_own_does(images: Images) -> None:
    words = ["$PLAIN", "`echo x`", "a\nb", '"q"', "\\"]
    assert images.exec("run", images.ours, *words).stdout == shown("it's $HOME", *words)
    assert "[a b]" in images.exec("run", images.theirs, "$PLAIN").stdout


def variables(images: Images, image: Path, *options: str, **env: str) -> dict[str, str]:
    """What a program in `image` sees."""
    arguments = [*FLAGS, "--cleanenv", "--no-home", "--pwd", "/", *options, str(image), "env", "-0"]
    done = images.run("exec", *arguments, env=env)
    return dict(pair.partition("=")[::2] for pair in done.stdout.split("\0") if pair)


def test_exec_sees_the_same_variables_and_the_odd_ones_as_the_image_has_them(images: Images) -> None:
    ours, theirs = variables(images, images.ours), variables(images, images.theirs)
    for name in {*ours, *theirs} - {*ODD, *NASTY}:
        if not name.endswith(("_CONTAINER", "_NAME")):
            assert ours.get(name) == theirs.get(name), name
    assert {**ours, **ODD, **NASTY} == ours
    assert all(theirs[name] != value for name, value in ODD.items())
    assert ours["PATH"].startswith(ENV["PATH"])
    assert {**ours, **ENV, "PATH": ours["PATH"]} == ours


@pytest.mark.parametrize(
    ("options", "env", "expected"),
    [
        (["--env", "PLAIN=mine"], {}, {"PLAIN": "mine"}),
        ([], {"APPTAINERENV_PLAIN": "mine", "APPTAINERENV_NEW": "x"}, {"PLAIN": "mine", "NEW": "x"}),
        ([], {"APPTAINERENV_PREPEND_PATH": "/first"}, {"PATH": "/first:"}),
        ([], {"APPTAINERENV_APPEND_PATH": "/last"}, {"PATH": ":/last"}),
        (["--env", "LD_LIBRARY_PATH=/mine"], {}, {"LD_LIBRARY_PATH": "/mine:/.singularity.d/libs"}),
    ],
)
def test_what_the_user_sets_wins(
    images: Images, options: list[str], env: dict[str, str], expected: dict[str, str]
) -> None:
    for image in (images.ours, images.theirs):
        found = variables(images, image, *options, **env)
        for name, value in expected.items():
            assert value in found[name] if name == "PATH" else found[name] == value


def test_a_value_of_the_host_gives_way_to_the_images(images: Images) -> None:
    for image in (images.ours, images.theirs):
        env = {"PLAIN": "host", "HOSTS_OWN": "1"}
        done = images.run("exec", *FLAGS, "--no-home", "--pwd", "/", image, "env", "-0", env=env)
        found = done.stdout.split("\0")
        assert "PLAIN=a b" in found and "HOSTS_OWN=1" in found


@pytest.mark.parametrize(
    ("action", "arguments"),
    [
        ("shell", ["-c", 'echo "$0 $PLAIN $PATH"']),
        ("exec", ["sh", "-c", "exit 7"]),
        ("exec", ["no-such-program"]),
        ("exec", ["id", "-u"]),
        ("exec", ["ls", "-d", "/tmp", "/proc/self", "/dev/null", "/etc/hosts", "/home", "/var/tmp"]),
        ("exec", ["/.singularity.d/actions/exec", "show", "nested $x"]),
        ("exec", ["/.run", "by hand"]),
        ("exec", ["/singularity", "by hand"]),
        ("exec", ["sh", "-c", "echo >> /etc/hosts"]),
    ],
)
def test_actions_behave_alike(images: Images, action: str, arguments: list[str]) -> None:
    ours, theirs = (images.exec(action, image, *arguments) for image in (images.ours, images.theirs))
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout), ours.stderr


def test_an_image_without_tests_passes_them(images: Images) -> None:
    for image in (images.ours, images.theirs):
        assert images.exec("test", image).returncode == 0


def test_an_instance_starts_and_stops(images: Images) -> None:
    name = f"lab{os.getpid()}"
    images.run("instance", "start", *FLAGS, "--no-home", images.ours, name)
    try:
        found = images.run("exec", *FLAGS, "--pwd", "/", f"instance://{name}", "show", "inside")
        assert found.stdout == "[inside]\n"
    finally:
        images.run("instance", "stop", name)


def inspected(images: Images, image: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(images.run("inspect", "--all", image).stdout)
    found: dict[str, Any] = loaded["data"]["attributes"]
    return found


def test_inspect_tells_the_same_kinds_of_things(images: Images) -> None:
    ours, theirs = inspected(images, images.ours), inspected(images, images.theirs)
    assert set(ours) == set(theirs) and set(ours["environment"]) == set(theirs["environment"])
    # Their labels tell of the host and the hour.
    hosts = {"org.label-schema.build-date", "org.label-schema.usage.apptainer.version"}
    assert {k: v for k, v in theirs["labels"].items() if k not in hosts} == ours["labels"]
    assert ours["deffile"].lower() == theirs["deffile"].lower()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--labels", ["org.example.one: 1", "org.label-schema.build-arch:"]),
        ("--environment", ["10-docker2singularity.sh", "PLAIN"]),
        ("--deffile", ["ootstrap: docker-archive"]),
        ("--runscript", ["exec"]),
        ("--startscript", ["#!/bin/sh"]),
        ("--test", []),
    ],
)
def test_inspect_prints_each_part(images: Images, option: str, words: list[str]) -> None:
    for image in (images.ours, images.theirs):
        done = images.run("inspect", option, image)
        assert all(word in done.stdout for word in words), done.stdout


def test_the_metadata_say_what_apptainer_finds_in_the_tree(images: Images) -> None:
    """Without metadata, as for a bare squashfs, `inspect` reads the tree: both must agree."""
    done = images.run("inspect", "--all", images.squashfs, env={"APPTAINER_USERNS": "1"})
    assert json.loads(done.stdout)["data"]["attributes"] == inspected(images, images.ours)


def test_the_squashfs_alone_runs_too(images: Images) -> None:
    assert images.exec("run", images.squashfs, "x").stdout == "[it's $HOME][x]\n"


def test_apptainer_builds_on_an_image_of_ours(images: Images, tmp_path: Path) -> None:
    text = f"Bootstrap: localimage\nFrom: {images.ours}\n%environment\n    export ADDED=yes\n%labels\n    added 1\n"
    (tmp_path / "more.def").write_text(text + '%runscript\n    exec show new "$@"\n')
    image = tmp_path / "more.sif"
    # A user namespace gives root the capability that Apptainer asks for here.
    program = str(images.run.bin / "apptainer")
    command = ["unshare", "--user", "--map-root-user", program, "build", str(image), str(tmp_path / "more.def")]
    subprocess.run(command, check=True, capture_output=True, env=images.run.environment())
    assert images.exec("run", image, "x").stdout == "[new][x]\n"
    assert variables(images, image)["ADDED"] == "yes"
    labels = inspected(images, image)["labels"]
    assert (labels["added"], labels["org.example.one"]) == ("1", "1")


def test_a_user_without_subuid_builds_on_an_image_of_ours(images: Images, tmp_path: Path) -> None:
    text = f"Bootstrap: localimage\nFrom: {images.ours}\n%post\n    mkdir -p /data/in\n"
    (tmp_path / "mine.def").write_text(text)
    # nobody, who has no row in /etc/subuid; with the rights of whoever runs this test.
    nobody = ["unshare", "--user", "--map-user=65534", "--map-group=65534"]
    build = [images.run.bin / "apptainer", "build", "--ignore-fakeroot-command"]
    command = [*nobody, *build, tmp_path / "mine.sif", tmp_path / "mine.def"]
    done = subprocess.run(command, capture_output=True, text=True, env=images.run.environment())
    assert done.returncode == 0, done.stderr
    assert images.exec("exec", tmp_path / "mine.sif", "ls", "/data").stdout == "in\n"


def test_charliecloud_runs_the_squashfs(images: Images) -> None:
    if shutil.which("ch-run") is None:
        pytest.skip("ch-run is not installed")
    env = {"PATH": os.environ["PATH"], "USER": "root"}
    command = ["ch-run", "--set-env=/dev/null", str(images.squashfs), "--", "/opt/env/bin/show", "a b"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout == "[a b]\n", done.stderr
    started = [*command[:3], "--", "/bin/sh", "/etc/rc"]
    done = subprocess.run(started, capture_output=True, text=True, env=env)
    assert done.stdout == "[it's $HOME][default][two words]\n", done.stderr


@pytest.fixture
def engine(real_apptainer: Apptainer, tmp_path: Path) -> Environment:
    """Where Apptainer is installed under its own name alone, and keeps its files in folders that we name."""
    for name in ("cache", "tmp"):
        (tmp_path / name).mkdir()
    own = {"APPTAINER_CACHEDIR": str(tmp_path / "cache"), "SINGULARITY_TMPDIR": str(tmp_path / "tmp")}
    known = real_apptainer.environment(**own)
    del known["APPTAINER_TMPDIR"]
    return load_environment(known)


def test_the_installed_apptainer_builds(
    images: Images, engine: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out/lab.sif"
    out.parent.mkdir()
    out.write_text("old")
    build_with_apptainer(f"docker-archive:{images.archive}", out, engine, arch=ARCH)
    assert images.exec("run", out, "x").stdout == "[it's $HOME][x]\n"
    with out.open("rb") as stream:
        sif = read_sif(stream, "it")
        stream.seek(sif.partition.offset)
        assert stream.read(22)[20] == 6  # zstd, in the superblock
    said = capsys.readouterr().err
    assert "Build complete" in said
    assert "\x1b" not in said
    assert [p.name for p in out.parent.iterdir()] == ["lab.sif"]
    assert not list((tmp_path / "tmp").iterdir())
    assert "APPTAINER_TMPDIR" not in engine.variables


@pytest.mark.parametrize(
    ("source", "arch", "reason"),
    [
        ("docker-archive:no-such-file.tar", ARCH, "no-such-file.tar"),
        ("docker-archive:{archive}", "aarch64" if ARCH == "x86_64" else "x86_64", "arm64|aarch64|amd64|x86_64"),
    ],
)
def test_a_build_that_fails_says_why_and_keeps_the_old_image(
    images: Images, engine: Environment, tmp_path: Path, source: str, arch: str, reason: str
) -> None:
    out = tmp_path / "lab.sif"
    out.write_text("old")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BuildError, match=reason):
        build_with_apptainer(source.format(archive=images.archive), out, engine, arch=arch)
    assert out.read_text() == "old" and sorted(tmp_path.iterdir()) == before
    assert not list((tmp_path / "tmp").iterdir())


def test_without_apptainer_the_message_says_what_to_install(tmp_path: Path) -> None:
    nothing = load_environment({**os.environ, "PATH": str(tmp_path)})
    with pytest.raises(HostError, match="neither apptainer nor singularity") as caught:
        build_with_apptainer("oci:x", tmp_path / "x.sif", nothing, arch=ARCH)
    assert caught.value.exit_code == 6 and "install Apptainer" in (caught.value.hint or "")
    assert not list(tmp_path.iterdir())


def test_ctrl_c_leaves_nothing(images: Images, engine: Environment, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from envbuild.run_environment import load_environment\n"
        "from envbuild.build.apptainer_engine import build_with_apptainer as build\n"
        "sys.stderr = sys.stdout\n"
        "build(sys.argv[1], Path(sys.argv[2]), load_environment(), arch=sys.argv[3])\n"
    )
    (tmp_path / "out").mkdir()
    child = subprocess.Popen(
        [sys.executable, "-c", code, f"docker-archive:{images.archive}", str(tmp_path / "out/x.sif"), ARCH],
        env=dict(engine.variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.stdout is not None and child.stdout.readline()
    child.send_signal(signal.SIGINT)
    child.wait(timeout=30)
    assert child.returncode != 0
    deadline = time.monotonic() + 10
    left = ["?"]
    while left and time.monotonic() < deadline:
        left = [str(p) for name in ("out", "tmp") for p in (tmp_path / name).iterdir()]
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, 0)
        pytest.fail("something of the build is still running")
    assert left == []
