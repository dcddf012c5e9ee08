"""`envbuild lock` with a real uv: any target from any host, no URLs, the accelerator trap."""

from __future__ import annotations

import base64
import functools
import hashlib
import http.server
import json
import re
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.wheels import make_recipe, make_wheel

from .conftest import ARCH, REPOSITORY, Command


def lock_text(command: Command, name: str, target: str = "cpu-x86_64") -> str:
    return (command.folder / "recipes" / name / f"{target}.requirements.txt").read_text()


def pins(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if "==" in line and not line.startswith("#")]


@pytest.fixture
def two(lab: Command) -> Command:
    """alpha and beta, each in 1.0 and locked."""
    for name in ("alpha", "beta"):
        make_wheel(lab.folder / "wheels", name)
    make_recipe(lab.folder / "recipes", "two", ["alpha", "beta"])
    assert lab("lock", "two", "--wheels").returncode == 0
    for name in ("alpha", "beta"):
        make_wheel(lab.folder / "wheels", name, "1.1")
    return lab


def test_locked_versions_stay_until_they_are_upgraded(two: Command) -> None:
    assert "0 changed" in two("lock", "two", "--wheels").stderr
    one = two("lock", "two", "--wheels", "--upgrade=alpha")
    assert "~ alpha 1.0 -> 1.1" in one.stderr and "beta" not in one.stderr
    assert pins(lock_text(two, "two")) == ["alpha==1.1", "beta==1.0"]
    assert two("lock", "two", "--wheels", "--upgrade", "--dry-run").returncode == 0
    assert pins(lock_text(two, "two")) == ["alpha==1.1", "beta==1.0"]
    assert two("lock", "two", "--wheels", "--report", "upgrade.md", "--upgrade").returncode == 0
    assert pins(lock_text(two, "two")) == ["alpha==1.1", "beta==1.1"]
    report = (two.folder / "upgrade.md").read_text()
    assert "## two, cpu-x86_64: wheels" in report and "| beta | 1.0 | 1.1 |" in report and "alpha" not in report


def test_an_upgrade_is_verified_by_the_locks_before_and_after(lab: Command) -> None:
    """Without training; the report's rows of what a training measures: tests/unit/test_audit.py."""
    make_wheel(lab.folder / "wheels", "little")
    extra = "[verify]\ntrainer = false\n"
    make_recipe(lab.folder / "recipes", "up", ["little"], targets=f"[targets.cpu-{ARCH}]\n", extra=extra)
    assert lab("lock", "up", "--wheels").returncode == 0
    make_wheel(lab.folder / "wheels", "little", "2.0", files={"little/__init__.py": b"raise RuntimeError('broken')\n"})
    done = lab("lock", "up", "--wheels", "--report", "report.md", "--verify", "--upgrade=little")
    assert done.returncode == 5, done.stderr
    assert f"up cpu-{ARCH}: the upgraded locks fail verification" in done.stderr, done.stderr
    report = (lab.folder / "report.md").read_text()
    assert "| little | 1.0 | 2.0 | " in report and "| verification | passed | **failed**: imports |" in report
    assert re.search(r"\| size of all files \| [\d.]+ [kM]B \| [\d.]+ [kM]B \|", report), report
    venv = f"build/up/cpu-{ARCH}/venv"
    receipt = json.loads((lab.folder / f"{venv}.receipt.json").read_text())
    assert receipt["passed"] and re.search(r"little\s+1\.0", lab("inspect", venv, "--packages").stdout), "it stays"


def test_check_says_what_is_stale_and_changes_nothing(two: Command) -> None:
    assert two("lock", "two", "--wheels", "--check").returncode == 0
    before = lock_text(two, "two")
    make_recipe(two.folder / "recipes", "two", ["alpha"])
    done = two("lock", "two", "--wheels", "--check")
    assert done.returncode == 3 and done.stderr.count("stale") == 2
    assert lock_text(two, "two") == before


def test_a_changed_description_leaves_the_lock_current(two: Command) -> None:
    recipe = two.folder / "recipes/two/recipe.toml"
    recipe.write_text(recipe.read_text().replace("a lab recipe", "another"))
    assert two("lock", "two", "--wheels", "--check").returncode == 0


def test_only_hashes_that_fit_the_target_are_locked(lab: Command) -> None:
    digests = {}
    for tag in (
        "cp311-cp311-manylinux_2_28_x86_64",
        "cp311-cp311-manylinux_2_17_aarch64",
        "cp312-cp312-manylinux_2_28_x86_64",
        "cp311-cp311-musllinux_1_2_x86_64",
        "cp311-cp311-manylinux_2_34_x86_64",
        "cp39-abi3-manylinux2014_x86_64",
    ):
        wheel = make_wheel(lab.folder / "wheels", "native", tag=tag, files={"native/lib.so": tag.encode()})
        digests[tag] = hashlib.sha256(wheel.read_bytes()).hexdigest()
    make_recipe(lab.folder / "recipes", "n", ["native"])
    assert lab("lock", "n", "--wheels").returncode == 0
    x86, arm = lock_text(lab, "n"), lock_text(lab, "n", "cpu-aarch64")
    assert digests["cp311-cp311-manylinux_2_28_x86_64"] in x86
    assert digests["cp311-cp311-manylinux_2_17_aarch64"] in arm and arm.count("sha256:") == 2  # and the digest
    for tag in (
        "cp312-cp312-manylinux_2_28_x86_64",
        "cp311-cp311-musllinux_1_2_x86_64",
        "cp311-cp311-manylinux_2_34_x86_64",
        "cp311-cp311-manylinux_2_17_aarch64",
    ):
        assert digests[tag] not in x86, tag


def test_what_cannot_be_resolved_is_explained(lab: Command) -> None:
    make_wheel(lab.folder / "wheels", "alpha", requires=["beta>=2"])
    make_wheel(lab.folder / "wheels", "beta")
    make_recipe(lab.folder / "recipes", "bad", ["alpha", "beta<2"])
    done = lab("lock", "bad", "--wheels")
    assert done.returncode == 3 and "alpha" in done.stderr and "beta" in done.stderr
    assert "hint: loosen or correct the requirement" in done.stderr and "`overrides` of the recipe" in done.stderr
    assert not list((lab.folder / "recipes/bad").glob("*.txt"))


def test_an_override_replaces_what_packages_ask_for_in_lock_and_report(lab: Command) -> None:
    """alpha says beta<2, which is wrong; without the override, beta 1.0 is the only choice."""
    make_wheel(lab.folder / "wheels", "alpha", requires=["beta<2"])
    for version in ("1.0", "2.0", "3.0"):
        make_wheel(lab.folder / "wheels", "beta", version)
    make_recipe(lab.folder / "recipes", "over", ["alpha"])
    assert lab("lock", "over", "--wheels").returncode == 0
    assert pins(lock_text(lab, "over")) == ["alpha==1.0", "beta==1.0"] and "override" not in lock_text(lab, "over")
    make_recipe(lab.folder / "recipes", "over", ["alpha"], extra='overrides = ["beta>=2,<3", "gamma==1"]')
    assert lab("lock", "over", "--wheels", "--check").returncode == 3
    done = lab("lock", "over", "--wheels", "--report", "report.md", "--export", "pylock")
    for pylock in lab.folder.glob("pylock.*.toml"):
        assert {row["version"] for row in tomllib.loads(pylock.read_text())["packages"]} == {"1.0", "2.0"}
    assert done.returncode == 0 and "the override gamma==1 has no effect for cpu-x86_64" in done.stderr, done.stderr
    text = lock_text(lab, "over")
    assert pins(text) == ["alpha==1.0", "beta==2.0"] and "# override: beta>=2,<3\n# override: gamma==1\n" in text
    report = (lab.folder / "report.md").read_text()
    assert "| beta | 1.0 | 2.0 |" in report and "Overridden, whatever packages ask for: `beta>=2,<3`, " in report
    assert lab("lock", "over", "--wheels", "--check").returncode == 0
    built = lab("venv", "over", "--locked", "--no-verify", "--out", "v")
    assert built.returncode == 0, built.stderr


def test_a_package_without_a_wheel_for_the_target(lab: Command) -> None:
    make_wheel(lab.folder / "wheels", "native", tag="cp311-cp311-manylinux_2_28_x86_64")
    make_recipe(lab.folder / "recipes", "n", ["native"], targets="[targets.cpu-aarch64]")
    done = lab("lock", "n", "--wheels")
    assert done.returncode == 3 and "native" in done.stderr


@pytest.fixture
def private_index(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A package index on loopback that wants a password: (URL with it, the password)."""
    password = "h1dden-w0rd"
    wanted = "Basic " + base64.b64encode(f"me:{password}".encode()).decode()
    wheel = make_wheel(tmp_path / "served/files", "gamma")
    page = tmp_path / "served/simple/gamma/index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../files/{wheel.name}">{wheel.name}</a>')

    class Guarded(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Authorization") != wanted:
                self.send_response(401)
                self.send_header("WWW-Authenticate", "Basic")
                self.end_headers()
                return
            super().do_GET()

        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Guarded, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://me:{password}@127.0.0.1:{server.server_port}/simple", password
        server.shutdown()


def test_credentials_and_addresses_stay_out_of_lock_log_and_venv(lab: Command, private_index: tuple[str, str]) -> None:
    url, password = private_index
    env = {"PIP_INDEX_URL": url, "PIP_NO_INDEX": "0"}
    (lab.folder / "pip.conf").write_text("")
    make_recipe(lab.folder / "recipes", "private", ["gamma"])
    locked = lab("lock", "private", "--wheels", "--export", "pylock", **env)
    assert locked.returncode == 0, locked.stderr
    text = lock_text(lab, "private")
    assert "http" not in text and "127.0.0.1" not in text and password not in text
    exported = (lab.folder / "pylock.private-cpu-x86_64.toml").read_text()
    assert password not in exported and tomllib.loads(exported)["packages"][0]["name"] == "gamma"
    built = lab("venv", "private", "--no-verify", "--out", "v", **env)
    assert built.returncode == 0, built.stderr
    wrong = lab(
        "lock", "private", "--wheels", "--upgrade", **{**env, "PIP_INDEX_URL": url.replace(password, "wr0ng-w0rd")}
    )
    assert wrong.returncode == 3
    for output in (locked, built, wrong):
        assert password not in output.stdout + output.stderr and "wr0ng-w0rd" not in output.stderr
    found = subprocess.run(["grep", "-rl", password, lab.folder / "v", lab.folder / "recipes"], capture_output=True)
    assert found.stdout == b""


def test_an_exported_pylock_is_read_by_uv(two: Command) -> None:
    done = two("lock", "two", "--wheels", "--target", "cpu-x86_64", "--export", "pylock", "--export-dir", "out")
    assert done.returncode == 0 and done.stdout.strip() == "out/pylock.two-cpu-x86_64.toml"
    import sys

    uv = str(Path(sys.executable).parent / "uv")
    line = [uv, "pip", "install", "--dry-run", "--no-config", "--target", "t", "-r", done.stdout.strip()]
    read = subprocess.run(line, cwd=two.folder, capture_output=True, text=True)
    assert read.returncode == 0 and "alpha==1.0" in read.stderr, read.stderr


def test_a_recipe_that_may_not_be_written_gets_its_lock_under_build(two: Command) -> None:
    sealed = two.folder / "recipes"
    bind = [["mount", "--bind", sealed, sealed], ["mount", "-o", "remount,bind,ro", sealed]]
    (sealed / "two/cpu-x86_64.requirements.txt").unlink()
    if any(subprocess.run(line, capture_output=True).returncode for line in bind):
        pytest.skip("a read-only mount needs root")
    try:
        done = two("lock", "two", "--wheels", "--target", "cpu-x86_64")
        assert done.returncode == 0, done.stderr
        place = two.folder / "build/two/cpu-x86_64/cpu-x86_64.requirements.txt"
        assert place.is_file() and "build/two" in done.stderr
        assert "resolving" not in two("plan", "two", "--target", "cpu-x86_64").stderr
    finally:
        subprocess.run(["umount", sealed], check=True)


class Served:
    """A package index on loopback; `asked` are the paths that clients asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[str]()
        asked = self.asked

        class Pages(http.server.SimpleHTTPRequestHandler):
            def log_request(self, *_: object) -> None:
                asked.append(self.path)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Pages, directory=str(folder)))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"

    def add(self, wheel: Path) -> None:
        (self.folder / "files").mkdir(parents=True, exist_ok=True)
        copy = shutil.copy(wheel, self.folder / "files")
        page = self.folder / "simple" / wheel.name.partition("-")[0] / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(Path(copy).read_bytes()).hexdigest()
        with page.open("a") as stream:
            stream.write(f'<a href="../../files/{wheel.name}#sha256={digest}">{wheel.name}</a>\n')


@pytest.fixture
def internal_and_public(lab: Command, tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    """An index of the site with `mypkg` 1.0, and one of the world with a foreign `mypkg` 99.0; both have `common`."""
    internal, public = Served(tmp_path / "internal"), Served(tmp_path / "public")
    internal.add(make_wheel(tmp_path / "made", "mypkg"))
    public.add(make_wheel(tmp_path / "made", "mypkg", "99.0"))
    public.add(make_wheel(tmp_path / "made", "around", requires=["mypkg"]))
    for index in (internal, public):
        index.add(make_wheel(tmp_path / "made", "common"))
    public.add(make_wheel(tmp_path / "made", "common", "2.0"))
    (lab.folder / "pip.conf").write_text("")
    (lab.folder / "site.toml").write_text(f'[indexes]\ninternal = "{internal.url}"\n')
    lab.env |= {"PIP_INDEX_URL": public.url, "PIP_NO_INDEX": "0", "ENVBUILD_SITE": str(lab.folder / "site.toml")}
    yield internal, public
    for index in (internal, public):
        index.server.shutdown()
        index.server.server_close()


def test_a_name_on_two_indexes_is_warned_of_unless_one_is_a_copy(
    lab: Command, internal_and_public: tuple[Served, Served]
) -> None:
    internal, public = internal_and_public
    make_recipe(lab.folder / "recipes", "r", ["mypkg", "common"], targets="[targets.cpu-x86_64]\n")
    done = lab("lock", "r", "--wheels", PIP_EXTRA_INDEX_URL=internal.url)
    assert done.returncode == 0 and pins(lock_text(lab, "r")) == ["common==2.0", "mypkg==99.0"]
    said = next(line for line in done.stderr.splitlines() if line.startswith("warning: several indexes"))
    assert f"mypkg 99.0 ({public.url} and {internal.url})" in said and "[indexes]" in said and "common" not in said
    assert "several" not in lab("lock", "r", "--wheels").stderr  # one index alone


def test_a_bound_package_comes_from_its_index_alone(lab: Command, internal_and_public: tuple[Served, Served]) -> None:
    internal, public = internal_and_public
    bound, target = '[indexes]\nMyPkg = "internal"\n', "[targets.cpu-x86_64]\n"
    make_recipe(lab.folder / "recipes", "r", ["mypkg", "around", "common"], extra=bound, targets=target)
    done = lab("venv", "r", "--no-verify", "--out", "v")
    assert done.returncode == 0, done.stderr
    assert pins(lock_text(lab, "r")) == ["around==1.0", "common==2.0", "mypkg==1.0"] and "warning" not in done.stderr
    assert (lab.folder / "v/lib/python3.11/site-packages/mypkg-1.0.dist-info").is_dir()
    # Neither the resolution nor the download tells the world the name, nor takes anything else from this index.
    assert not [path for path in public.asked if "mypkg" in path]
    assert not [path for path in internal.asked if "common" in path or "around" in path]
    assert any(path.startswith("/files/mypkg") for path in internal.asked)


def test_a_binding_without_effect_is_an_error(lab: Command, internal_and_public: tuple[Served, Served]) -> None:
    first, second = "[targets.cpu-x86_64]\n", '[targets.cpu-aarch64]\nrequirements = ["mypkg"]\n'
    for index, target, said in [
        ("internl", "cpu-aarch64", "this site has no index 'internl'; did you mean 'internal'?"),
        ("internal", "cpu-x86_64", "mypkg is not bound to it: only other packages require it"),
    ]:
        extra = f'[indexes]\nmypkg = "{index}"\n'
        make_recipe(lab.folder / "recipes", "r", ["around"], extra=extra, targets=first + second)
        done = lab("lock", "r", "--wheels", "--target", target)
        assert done.returncode == 3 and f"recipe.toml:6:1: {said}" in done.stderr, done.stderr
    (lab.folder / "site.toml").write_text('[indexes]\ninternal = "http://127.0.0.1:9/simple"\n')
    done = lab("lock", "r", "--wheels", "--target", "cpu-aarch64")
    assert done.returncode == 3 and "mypkg may come only from 'internal'" in done.stderr and "refused" in done.stderr


@pytest.fixture
def dated_index(tmp_path: Path) -> Iterator[str]:
    """An index with upload times (PEP 700). New `aged` and `young` have no wheel, `outer` needs `inner`, with none."""
    files = tmp_path / "served/files"
    wheels = {"aged-1.0": "2020", "young-1.0": "2025", "outer-1.0": "2019", "outer-2.0": "2026"}
    rows: dict[str, list[dict[str, object]]] = {}
    for pin, year in {**wheels, "aged-9.0": "2026", "young-1.1": "2026", "inner-3.0": "2026"}.items():
        name, _, version = pin.partition("-")
        requires = ["inner==3.0"] if pin == "outer-2.0" else []
        path = files / f"{pin}.tar.gz"
        if pin in wheels:
            path = make_wheel(files, name, version, requires=requires)
        else:
            path.write_bytes(b"never read")
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        rows.setdefault(name, []).append(
            {
                "filename": path.name,
                "url": f"/files/{path.name}",
                "hashes": {"sha256": digest},
                "size": path.stat().st_size,
                "upload-time": f"{year}-02-01T00:00:00Z",
            }
        )

    class Index(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/").rpartition("/")[2]
            if not self.path.startswith("/simple/") or name not in rows:
                super().do_GET()
                return
            page = {"meta": {"api-version": "1.1"}, "name": name, "versions": [], "files": rows[name]}
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
            self.end_headers()
            self.wfile.write(json.dumps(page).encode())

        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Index, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


def test_newer_releases_without_a_wheel_are_not_skipped_in_silence(lab: Command, dated_index: str) -> None:
    (lab.folder / "pip.conf").write_text("")
    lab.env |= {"PIP_INDEX_URL": dated_index, "PIP_NO_INDEX": "0"}
    make_recipe(lab.folder / "recipes", "r", ["aged", "outer"], targets="[targets.cpu-x86_64]")
    done = lab("lock", "r", "--wheels")
    assert done.returncode == 3, done.stderr
    assert "aged 1.0 (2020-02-01) is locked instead of 9.0 (2026-02-01)" in done.stderr
    assert "outer 1.0 (2019-02-01) is locked instead of 2.0" in done.stderr
    assert "it needs inner==3.0, which has no wheel" in done.stderr and "hint:" in done.stderr
    assert not list((lab.folder / "recipes/r").glob("*.txt"))
    pinned = ["aged==1.0", "outer==1.0", "young"]
    make_recipe(lab.folder / "recipes", "r", pinned, targets="[targets.cpu-x86_64]")
    done = lab("lock", "r", "--wheels")
    warning = "young 1.0 (2025-02-01) is locked instead of 1.1 (2026-02-01): 1.1 has no wheel"
    assert done.returncode == 0 and done.stderr.count("warning: ") == 1, done.stderr
    assert f"warning: cpu-x86_64: {warning}" in done.stderr
    built = lab.json("venv", "r", "--target", "cpu-x86_64", "--no-verify", "--locked")
    assert len(built["warnings"]) == 1 and built["warnings"][0].startswith(warning)


@pytest.mark.parametrize(
    ("requirement", "python", "said"),
    [
        ("nunpy", "3.11", "hint: check the spelling of nunpy"),
        ("native==99.9", "3.11", "x86_64-manylinux_2_28: 1.0"),
        ("native", "3.14", "native 1.0 has wheels for Python 3.11: set `python` in the recipe"),
    ],
)
def test_a_failed_resolution_names_its_cause_and_no_index_that_would_not_help(
    lab: Command, requirement: str, python: str, said: str
) -> None:
    """With an index of PyTorch's kind out of reach, which is not the cause."""
    make_wheel(lab.folder / "wheels", "native", tag="cp311-cp311-manylinux_2_28_x86_64")
    tables = '[targets.cpu-x86_64]\nindexes = ["http://127.0.0.1:9/whl/cpu"]\n'
    place = make_recipe(lab.folder / "recipes", "r", [requirement], targets=tables)
    text = (place / "recipe.toml").read_text().replace('"3.11"', f'"{python}"')
    (place / "recipe.toml").write_text(text)
    done = lab("lock", "r", "--wheels")
    hint = " ".join(done.stderr.rpartition("hint:")[1:])
    assert done.returncode == 3 and said in " ".join(hint.split()), done.stderr
    assert "`envbuild lock" not in hint and "index in the note" not in hint


# These ask the machine's package index.


def test_a_cpu_target_that_resolves_to_cuda_is_an_error(envbuild: Command) -> None:
    make_recipe(envbuild.folder / "recipes", "trap", ["torch==2.9.1"], targets="[targets.cpu-x86_64]")
    done = envbuild("lock", "trap", "--wheels", PIP_FIND_LINKS="")
    assert done.returncode == 3, done.stderr
    assert "is for CPUs" in done.stderr and "nvidia-" in done.stderr and "whl/cpu" in done.stderr
    assert not (envbuild.folder / "recipes/trap/cpu-x86_64.requirements.txt").exists()


def test_a_cuda_target_that_resolves_to_a_cpu_torch_is_an_error(envbuild: Command) -> None:
    make_recipe(envbuild.folder / "recipes", "trap", ["torch==2.9.1"], targets="[targets.cu126-aarch64]")
    done = envbuild("lock", "trap", "--wheels")
    assert done.returncode == 3 and "CPU-only build" in done.stderr and "whl/cu126" in done.stderr, done.stderr


@pytest.mark.parametrize("target", ["cpu-x86_64", "cpu-aarch64"])
def test_a_new_requirement_moves_nothing_else(target: str, envbuild: Command) -> None:
    shutil.copytree(REPOSITORY / "recipes/pt_minimal", envbuild.folder / "recipes/pt_minimal")
    recipe = envbuild.folder / "recipes/pt_minimal/recipe.toml"
    recipe.write_text(recipe.read_text().replace("requirements = [", 'requirements = ["packaging==24.0", ', 1))
    done = envbuild("lock", "pt_minimal", "--wheels", "--target", target)
    assert done.returncode == 0, done.stderr
    changed = [line.strip() for line in done.stderr.splitlines() if line.startswith("  ")]
    assert changed == ["+ packaging 24.0"]


@pytest.fixture
def cuda(lab: Command) -> Command:
    """A torch for CUDA 12.6 that pins NCCL 2.26.2, which is there in newer and older versions, too."""
    wheels = lab.folder / "wheels"
    needs = ["nvidia-nccl-cu12==2.26.2", "nvidia-cuda-runtime-cu12==12.6.77"]
    files = {"torch/version.py": b"cuda = '12.6'\n", "torch/lib/libtorch_cuda.so": b""}
    make_wheel(wheels, "torch", "2.7.1", requires=needs, files=files)
    make_wheel(wheels, "nvidia-cuda-runtime-cu12", "12.6.77")
    for version in ("2.25.1", "2.26.2", "2.27.5"):
        make_wheel(wheels, "nvidia-nccl-cu12", version)
    return lab


def cuda_recipe(command: Command, nccl: str = "", target: str = "cu126-x86_64") -> None:
    tables = f"[targets.{target}]\n" + (f'[layers.nccl]\nversion = "{nccl}"\n' if nccl else "")
    make_recipe(command.folder / "recipes", "gpu", ["torch"], targets=tables)


def test_a_newer_nccl_takes_the_place_of_torch_s_and_is_installed(cuda: Command) -> None:
    cuda_recipe(cuda)
    assert cuda("lock", "gpu", "--wheels").returncode == 0
    plain = lock_text(cuda, "gpu", "cu126-x86_64")
    assert "nvidia-nccl-cu12==2.26.2" in pins(plain)
    cuda_recipe(cuda, "2.27.5-1")
    assert cuda("lock", "gpu", "--wheels", "--check").returncode == 3
    done = cuda("lock", "gpu", "--wheels")
    assert done.returncode == 0 and "~ nvidia-nccl-cu12 2.26.2 -> 2.27.5" in done.stderr
    wheel = cuda.folder / "wheels" / "nvidia_nccl_cu12-2.27.5-py3-none-any.whl"
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in lock_text(cuda, "gpu", "cu126-x86_64")
    assert "0 changed" in cuda("lock", "gpu", "--wheels").stderr
    made = cuda.json("venv", "gpu", "--target", "cu126-x86_64", "--no-verify", "--locked")
    site = Path(made["path"], "lib/python3.11/site-packages")
    found = [path.name for path in site.glob("nvidia_nccl*.dist-info")]
    assert found == ["nvidia_nccl_cu12-2.27.5.dist-info"]
    cuda_recipe(cuda)
    assert cuda("lock", "gpu", "--wheels").returncode == 0
    assert lock_text(cuda, "gpu", "cu126-x86_64") == plain


@pytest.mark.parametrize(
    ("nccl", "said"),
    [
        ("2.25.1", "NCCL 2.25.1 is older than 2.26.2, which torch==2.7.1 pins"),
        ("2.99.0", "no version of nvidia-nccl-cu12==2.99.0"),
    ],
)
def test_an_nccl_that_cannot_take_torch_s_place_is_refused(cuda: Command, nccl: str, said: str) -> None:
    cuda_recipe(cuda, nccl)
    done = cuda("lock", "gpu", "--wheels")
    assert done.returncode == 3 and said in " ".join(done.stderr.split()), done.stderr
    assert not list((cuda.folder / "recipes/gpu").glob("*.txt"))


def test_a_cpu_torch_under_a_lock_for_cuda_is_refused_when_it_is_built(cuda: Command) -> None:
    """What the lock says of torch is true of another wheel: of the same version, without CUDA in it."""
    cuda_recipe(cuda)
    assert cuda("lock", "gpu", "--wheels").returncode == 0
    path = cuda.folder / "recipes/gpu/cu126-x86_64.requirements.txt"
    old = cuda.folder / "wheels" / "torch-2.7.1-py3-none-any.whl"
    right = hashlib.sha256(old.read_bytes()).hexdigest()
    wheel = make_wheel(old.parent, "torch", "2.7.1", files={"torch/version.py": b"cuda = None\n"})
    wrong = hashlib.sha256(wheel.read_bytes()).hexdigest()
    path.write_text(path.read_text().replace(right, wrong))
    done = cuda("venv", "gpu", "--target", "cu126-x86_64", "--no-verify", "--locked")
    assert done.returncode == 4, done.stderr
    assert "has no CUDA in it, and cu126-x86_64 needs CUDA 12.6" in done.stderr, done.stderr
    assert not (cuda.folder / "build/gpu/cu126-x86_64/venv").exists()


def test_an_index_out_of_reach_is_named_with_the_command_for_elsewhere(cuda: Command) -> None:
    index = "http://127.0.0.1:9/whl/cu126"
    tables = f'[targets.cu126-x86_64]\nrequirements = ["torch==2.9.1+cu126"]\nindexes = ["{index}"]\n'
    make_recipe(cuda.folder / "recipes", "gpu", [], targets=tables)
    command = "`envbuild lock gpu --target cu126-x86_64"
    for arguments in (["lock", "gpu", "--wheels"], ["plan", "gpu"]):
        done = cuda(*arguments)
        assert done.returncode == 3 and command in done.stderr and index in done.stderr, done.stderr
    done = cuda("plan", "gpu", "--locked")
    assert done.returncode == 3 and command in done.stderr and index in done.stderr
