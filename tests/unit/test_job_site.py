"""The site where jobs run: which file wins, where values are from, and what is refused in them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from unit.job_plans import executable

from envbuild.base.errors import RecipeError, UsageError
from envbuild.base.toml import Document, decode
from envbuild.cli.site import EffectiveSetting, effective_settings, site_command
from envbuild.doctor.batch import contradictions, duration
from envbuild.doctor.probe import HostFinding
from envbuild.doctor.sites import check_site, site_file
from envbuild.site.settings import Site, SiteFile, find_site, load_site
from examples import examples


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def load(tmp_path: Path, text: str, **env: str) -> Site:
    file = put(tmp_path / "one.toml", text)
    return load_site({"HOME": str(tmp_path), "USER": "ada", **env}, str(file))


def rules(tmp_path: Path, text: str) -> list[HostFinding]:
    return list(contradictions(load(tmp_path, text)))


# ---- which file
def test_named_sites_are_looked_for_from_the_project_outwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = {"HOME": str(tmp_path / "home")}
    places = [tmp_path / "etc/envbuild/sites", tmp_path / "home/.config/envbuild/sites", Path("sites")]
    for place in places:  # each goes over the ones before
        put(place / "mine.toml", "")
        assert find_site("mine", env, etc=tmp_path / "etc") == place / "mine.toml"
    assert find_site("local", env, etc=tmp_path / "etc").name == "local.toml"  # a shipped one
    with pytest.raises(UsageError, match="did you mean 'mine'") as caught:
        find_site("mien", env, etc=tmp_path / "etc")
    assert "pbs-gh200" in caught.value.message and (caught.value.hint or "").startswith("Searched: sites, ")
    with pytest.raises(UsageError, match=r"no site file x/mine\.toml"):
        find_site("x/mine.toml", env)


@pytest.mark.parametrize("name", ["", ".", "..", "a\nb", "ä" * 300, "nosuch"])
def test_a_name_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        find_site(name, {"HOME": str(tmp_path)}, etc=tmp_path)


def test_the_user_s_tables_replace_the_system_s_and_origins_follow(tmp_path: Path) -> None:
    etc = put(
        tmp_path / "etc/envbuild/site.toml",
        '[scheduler]\nkind = "slurm"\npartition = "a"\n[node]\ngpus = 4\n[environment]\nA = "1"\nB = "1"\n',
    )
    own = put(tmp_path / "home/.config/envbuild/site.toml", '[scheduler]\nkind = "pbs"\n[environment]\nB = "2"\n')
    env = {"HOME": str(tmp_path / "home")}
    site = load_site(env, etc=tmp_path / "etc")
    assert (site.scheduler.kind, site.scheduler.partition, site.node.gpus) == ("pbs", "", 4)
    assert dict(site.environment) == {"A": "1", "B": "2"}
    assert site.origin("scheduler", "kind") == f"[scheduler] kind of {own}"
    assert site.origin("scheduler", "partition") == "default of [scheduler] partition"
    assert site.origin("node", "gpus") == f"[node] gpus of {etc}"
    assert site.origin("environment", "B").endswith(str(own))
    chosen = put(tmp_path / "chosen.toml", "[node]\ngpus = 1\n")
    site = load_site({**env, "ENVBUILD_SITE": str(chosen)}, etc=tmp_path / "etc")
    assert (site.scheduler.kind, site.node.gpus, site.files) == ("none", 1, (chosen,))


def test_a_user_s_name_is_filled_into_paths_and_mounts_alone(tmp_path: Path) -> None:
    text = '[paths]\nshared = "/fsx/{user}"\n[container]\nmounts = ["/fsx/{user}:/data"]\n'
    site = load(tmp_path, text + '[scheduler]\naccount = "{user}"\n')
    assert (site.paths.shared, site.container.mounts) == ("/fsx/ada", ("/fsx/ada:/data",))
    assert site.scheduler.account == "{user}"


def test_show_prints_a_file_for_all_users_to_begin_with(tmp_path: Path) -> None:
    text = '[paths]\nshared = "/fsx/{user}"\n[container]\nmounts = ["/fsx/{user}:/data"]\n'
    file = put(tmp_path / "s.toml", text)
    for options in ([], ["--all"]):
        done = CliRunner().invoke(site_command, ["show", str(file), *options])
        shown = tomllib.loads(done.output)
        assert shown["paths"]["shared"] == "/fsx/{user}"
        assert shown["container"]["mounts"] == ["/fsx/{user}:/data"]


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "TESTS_PASSED", "BYPASS_CACHE", "PROXY_BYPASS", "COMPASS_HOME", "NUM_PASSES"]
)
def test_names_that_only_contain_a_secrets_word_are_variables(tmp_path: Path, name: str) -> None:
    assert dict(load(tmp_path, f'[environment]\n{name} = "x"\n').environment) == {name: "x"}


# ---- what is refused
@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ('[scheduler]\nkind = "condor"\n', "2:1", "'condor' is not accepted"),
        ("[scheduler]\npartitions = 1\n", "2:1", "did you mean 'partition'"),
        ('[scheduler]\npartition = "a b"\n', "2:1", "does not match"),
        ('[scheduler]\ntime = "1h"\n', "2:1", "is no time limit"),
        ('[scheduler]\ntime = "0-00:00:00"\n', "2:1", "is no time at all"),
        ('[scheduler]\ndirectives = ["a\\nb"]\n', "2:15", "not one line"),
        ('[environment]\nHF_TOKEN = "x"\n', "2:1", "sounds like a secret"),
        ('[environment]\nMY_PASSWORD = "x"\n', "2:1", "sounds like a secret"),
        ('[environment]\nDB_PASS = "x"\n', "2:1", "sounds like a secret"),
        ('[environment]\nPASS_DB = "x"\n', "2:1", "sounds like a secret"),
        ('[environment]\nSSH_PASSPHRASE = "x"\n', "2:1", "sounds like a secret"),
        ('[environment]\n"a b" = "x"\n', "2:1", "not the name of a variable"),
        ('[environment]\nhttps_proxy = "http://u:geheim@p:1"\n', "2:1", "holds a password"),
        ('[container]\nmounts = ["fsx"]\n', "2:11", "is not /PATH"),
        ('[paths]\nshared = "fsx"\n', "2:1", "does not match"),
        ("[node]\ngpus = -1\n", "2:1", "at least 0"),
        ('[kubernetes]\nnamespace = "A"\n', "2:1", "is not a name in Kubernetes"),
        ('[kubernetes]\nnamespace = "a-"\n', "2:1", "is not a name in Kubernetes"),
        ('[kubernetes]\nclaim = "a..b"\n', "2:1", "is not a name in Kubernetes"),
        ('[kubernetes]\npull_secret = "-a"\n', "2:1", "is not a name in Kubernetes"),
        ('[kubernetes]\nmount = "/dev/shm"\n', "2:1", "mounts /dev/shm itself"),
        ('[kubernetes]\nmount = "/"\n', "2:1", "not an absolute path"),
        ('[kubernetes]\nmount = "/data:ro"\n', "2:1", "not an absolute path"),
        ('[kubernetes]\nmount = "/a/../b"\n', "2:1", "not an absolute path"),
        ('[kubernetes]\nrun_as = "0"\n', "2:1", "a user other than root"),
        ('[kubernetes]\nrun_as = "ada"\n', "2:1", "is not UID or UID:GID"),
        ('[kubernetes.node_selector]\n"a b" = "x"\n', "2:1", "is not the name of a label"),
        ('[kubernetes.node_selector]\n"A.org/b" = "x"\n', "2:1", "is not the name of a label"),
        ('[kubernetes.node_selector]\nzone = "a b"\n', "2:1", "is not the value of a label"),
        (f'[kubernetes.node_selector]\nzone = "{"a" * 64}"\n', "2:1", "up to 63 of"),
        ('[kubernetes.resources]\ngpu = "1"\n', "2:1", "is not a resource of Kubernetes"),
        ('[kubernetes.resources]\n"a b/gpu" = "1"\n', "2:1", "is not the name of a resource"),
        ('[kubernetes.resources]\n"vpc.amazonaws.com/efa" = "0.5"\n', "2:1", "devices are whole numbers"),
        ('[kubernetes.resources]\n"vpc.amazonaws.com/efa" = "500m"\n', "2:1", "devices are whole numbers"),
        ('[kubernetes.resources]\nmemory = "16 GB"\n', "2:1", "is not an amount of memory"),
        ('[kubernetes.resources]\nmemory = "16K"\n', "2:1", "is not an amount of memory"),
        ('[kubernetes.resources]\nmemory = "500m"\n', "2:1", "is not an amount of memory"),
        ('[kubernetes.resources]\n"hugepages-2Mi" = "3Mi"\n', "2:1", "not a multiple of 2Mi"),
        ('[kubernetes.labels]\n"a b" = "x"\n', "2:1", "is not the name of a label"),
        ('[kubernetes.labels]\nteam = "a b"\n', "2:1", "is not the value of a label"),
        ('[kubernetes.labels]\n"app.kubernetes.io/instance" = "x"\n', "2:1", "set by the job or its operator"),
        ('[kubernetes.labels]\n"training.kubeflow.org/job-name" = "x"\n', "2:1", "set by the job or its operator"),
        ('[kubernetes.annotations]\n"a/b/c" = "x"\n', "2:1", "is not the name of an annotation"),
        ('[kubernetes.annotations]\na = "x\\ny"\n', "2:1", "is not one line"),
        ('[kubernetes]\ntolerations = ["a:Never"]\n', "2:16", "is not KEY, KEY:EFFECT or KEY=VALUE:EFFECT"),
        ('[kubernetes]\ntolerations = ["a", "b c"]\n', "2:21", "is not KEY, KEY:EFFECT"),
        ('[kubernetes]\npriority_class = "High"\n', "2:1", "is not a name in Kubernetes"),
        ('[kubernetes]\nservice_account = "a_b"\n', "2:1", "is not a name in Kubernetes"),
        ('[kubernetes]\nruntime = "Mine"\n', "2:1", "is not a name in Kubernetes"),
        ('[kubernetes]\nruntime = ""\n', "2:1", "does not match"),
        ("[kubernetes]\ngrace = 0\n", "2:1", "at least 1"),
        ("[kubernetes]\nretries = -1\n", "2:1", "at least 0"),
        ('[kubernetes]\nttl = "1h"\n', "2:1", "expected an integer"),
        ('[kubernetes.volumes]\n"/dev/x" = "claim:a"\n', "2:1", "in the container's own file systems"),
        ('[kubernetes.volumes]\n"/x" = "nfs:a"\n', "2:1", "is no volume: claim:NAME"),
        ('[kubernetes.volumes]\n"/x" = "empty:ten"\n', "2:1", "is no volume"),
        ('[kubernetes.volumes]\n"/x" = "host:/proc/x"\n', "2:1", "is no volume"),
        ('[kubernetes.secrets]\nTOKEN = "hf"\n', "2:1", "is not SECRET/KEY"),
        ('[kubernetes.secrets]\n"A-B" = "hf/token"\n', "2:1", "neither the name of a variable nor"),
        ('[kubernetes.secrets]\n"/etc/hf" = "hf/token"\n', "2:1", "is not the name of a secret, whose keys become"),
    ],
)
def test_mistakes_have_their_place(tmp_path: Path, text: str, place: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text)
    assert f"one.toml:{place}: " in caught.value.message and words in caught.value.message
    assert "geheim" not in caught.value.message
    (first, *_) = check_site(str(tmp_path / "one.toml"), {"HOME": "/"}, None)
    assert first.status == "fail" and place in first.summary and "geheim" not in first.summary


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        ("kubernetes", "mount", "/fsx/"),
        ("kubernetes", "mount", "/data"),
        ("kubernetes", "claim", "fsx.pv-1"),
        ("kubernetes", "run_as", "1000"),
        ("kubernetes", "run_as", "1000:0"),
        ("kubernetes", "claim", ""),
        ("kubernetes.node_selector", "node.kubernetes.io/instance-type", "c5.4xlarge"),
        ("kubernetes.node_selector", "zone", ""),
        ("kubernetes.resources", "vpc.amazonaws.com/efa", "32"),
        ("kubernetes.resources", "cpu", "500m"),
        ("kubernetes.resources", "cpu", "1.5"),
        ("kubernetes.resources", "memory", "16Gi"),
        ("kubernetes.resources", "hugepages-2Mi", "5120Mi"),
        ("kubernetes.labels", "kueue.x-k8s.io/priority-class", "high"),
        ("kubernetes.annotations", "a.b/c", "a: ü"),
        ("kubernetes.volumes", "/x", "claim:a.b:ro"),
        ("kubernetes.volumes", "/x", "host:/mnt/nvme"),
        ("kubernetes.volumes", "/x", "empty"),
        ("kubernetes.volumes", "/x", "empty:1.5Ti"),
        ("kubernetes.secrets", "HF_TOKEN", "hf/token.txt"),
        ("kubernetes.secrets", "/etc/hf", "hf"),
        ("kubernetes.resources", "hugepages-1Gi", "2Gi"),
        ("kubernetes.resources", "ephemeral-storage", "8G"),
        ("scheduler", "time", "1-00:00:00"),
    ],
)
def test_what_kubernetes_takes_is_taken(table: str, key: str, value: str, tmp_path: Path) -> None:
    site = load(tmp_path, f'[{table}]\n"{key}" = "{value}"\n')
    first, _, inner = table.partition(".")
    found = getattr(getattr(site, first), inner or key)
    assert (found[key] if inner else found) == value


@pytest.mark.parametrize("place", ["HF_TOKEN", "/etc/hf", "not a name"])
def test_a_secrets_value_is_refused_and_never_repeated(place: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, f'[kubernetes.secrets]\n"{place}" = "hf_QxYzAbCdEf0123456789"\n')
    assert "QxYz" not in f"{caught.value.message} {caught.value.hint}"
    assert ":2:1: " in caught.value.message


@pytest.mark.parametrize(
    ("text", "key", "status"),
    [
        ('[scheduler]\nkind = "kubernetes"\nlauncher = "srun"', "[scheduler] launcher", "fail"),
        ('[scheduler]\nkind = "pbs"\nlauncher = "srun"', "[scheduler] launcher", "fail"),
        ('[scheduler]\nkind = "pbs"\nauto_resume = true', "[scheduler] auto_resume", "fail"),
        ('[scheduler]\nkind = "pbs"\nqos = "high"', "[scheduler] qos", "warn"),
        ('[scheduler]\npartition = "gpu"', "[scheduler] partition", "warn"),
        ('[scheduler]\nkind = "slurm"\ndirectives = ["#SBATCH --mail-type=END"]', "[scheduler] directives", "fail"),
        ('[scheduler]\nkind = "slurm"\ndirectives = ["--nodes=4"]', "[scheduler] directives", "warn"),
        ('[scheduler]\nkind = "slurm"\ndirectives = ["-N 4"]', "[scheduler] directives", "warn"),
        ('[scheduler]\nkind = "pbs"\ndirectives = ["-l walltime=1:00:00"]', "[scheduler] directives", "warn"),
        ('[scheduler]\nkind = "pbs"\n[container]\nruntime = "pyxis"', "[container] runtime", "fail"),
        (
            '[container]\nruntime = "pyxis"\n[scheduler]\nkind = "slurm"\nlauncher = "mpirun"',
            "[container] runtime",
            "fail",
        ),
        ('[scheduler]\nkind = "slurm"', "[paths] shared", "warn"),
        ('[scheduler]\nkind = "kubernetes"', "[kubernetes] claim", "warn"),
        ('[scheduler]\nkind = "kubernetes"', "[node]", "warn"),
        ('[scheduler]\nkind = "kubernetes"\n[kubernetes]\napi = "v2"\nttl = 5', "[kubernetes] ttl", "fail"),
        ('[scheduler]\nkind = "kubernetes"\n[kubernetes]\nruntime = "mine"', "[kubernetes] runtime", "fail"),
        ('[scheduler]\nkind = "slurm"\n[kubernetes]\nlabels = { team = "a" }', "[kubernetes]", "warn"),
        ('[scheduler]\nkind = "kubernetes"\n[modules]\nrun = ["cuda"]', "[modules]", "warn"),
        ('[kubernetes]\nclaim = "data"', "[kubernetes]", "warn"),
        ('[kubernetes]\nresources = { "nvidia.com/gpu" = "8" }', "[kubernetes] resources", "fail"),
        ('[environment]\nMASTER_ADDR = "n1"', "[environment] MASTER_ADDR", "fail"),
        ('[environment]\nhttp_proxy = "proxy:1"', "[environment] http_proxy", "warn"),
        (
            '[environment]\nNCCL_SOCKET_IFNAME = "a"\n[fabric]\ninterface = "b"',
            "[environment] NCCL_SOCKET_IFNAME",
            "warn",
        ),
    ],
)
def test_contradictions_are_found(tmp_path: Path, text: str, key: str, status: str) -> None:
    assert (key, status) in [(f.name, f.status) for f in rules(tmp_path, text)]


def test_a_sensible_site_has_no_contradiction(tmp_path: Path) -> None:
    head = '[scheduler]\nkind = "slurm"\ndirectives = ["--mail-type=END", "--comment=--nodes"]\n'
    text = f'{head}[paths]\nshared = "/fsx"\n'
    assert rules(tmp_path, text) == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("01:00:00", 3600),
        ("2-00:30:00", 174600),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("30", 1800),
        ("30:10", 1810),
        ("infinite", None),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_slurm_s_times(text: str, seconds: int | None) -> None:
    assert duration(text) == seconds


# ---- what is in force
def test_every_value_has_its_origin_and_no_password_is_shown(tmp_path: Path) -> None:
    file = put(
        tmp_path / "s.toml",
        'store = "/s"\n[mirrors]\n"https://a.org" = ["https://u:geheim@m.org"]\n'
        '[registries."docker.io"]\nmirrors = ["https://u:geheim@h.org"]\n[node]\ngpus = 2\n',
    )
    site, values = effective_settings(str(file), {"HOME": str(tmp_path)})
    given_ = [value for value in values if value.given]
    assert [(v.table, v.key, v.value) for v in given_] == [
        ("", "store", "/s"),
        ("mirrors", "https://a.org", ["https://u:****@m.org"]),
        ("registries.docker.io", "mirrors", ["https://u:****@h.org"]),
        ("registries.docker.io", "insecure", False),
        ("node", "gpus", 2),
    ]
    assert {value.origin for value in given_} == {str(file)} and site.files == (file,)
    env = {"HOME": str(tmp_path), "ENVBUILD_SITE": str(file), "ENVBUILD_STORE": "/mine"}
    assert effective_settings(None, env)[1][0] == EffectiveSetting("", "store", "/mine", "ENVBUILD_STORE")


def test_what_show_prints_is_toml_that_says_the_same(tmp_path: Path) -> None:
    text = (
        '[registries."a.org:5000"]\ninsecure = true\n[scheduler]\nkind = "slurm"\ndirectives = ["--x=\\"#\\""]\n'
        '[kubernetes]\nresources = { "vpc.amazonaws.com/efa" = "4" }\n[environment]\nA = "ü \\\\ \\""\n'
    )
    file = put(tmp_path / "s.toml", text)
    for options in ([], ["--all"]):
        done = CliRunner().invoke(site_command, ["show", str(file), *options])
        assert done.exit_code == 0, done.output
        shown = tomllib.loads(done.output)
        for table, values in tomllib.loads(text).items():
            if table == "registries":
                assert shown[table]["a.org:5000"]["insecure"] is True
            else:
                assert values.items() <= shown[table].items()


# ---- a file for this host
def decoded(text: str) -> SiteFile:
    return decode(Document(Path("site.toml"), text, tomllib.loads(text)), SiteFile)


@examples(25)
@given(
    st.dictionaries(
        st.sampled_from(["http_proxy", "HTTPS_PROXY", "no_proxy", "SSL_CERT_FILE", "LOADEDMODULES", "USER"]),
        st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40),
    )
)
def test_the_file_for_this_host_can_be_read_whatever_the_environment_holds(env: dict[str, str]) -> None:
    # No PATH of the host: asking its programs is for the real tests.
    found = decoded(site_file({"PATH": "/nonexistent", "HOME": "/nonexistent", **env}))
    loaded = env.get("LOADEDMODULES", "").split(":")
    assert set(found.modules.run) <= set(loaded)
    assert set(found.environment.values()) <= set(env.values())


def test_no_password_gets_into_the_file_for_this_host() -> None:
    env = {
        "PATH": "/nonexistent",
        "http_proxy": "http://ada:geheim@p:1",
        "HTTPS_PROXY": "http://geheim@p:1",
        "no_proxy": ".lab",
        "LOADEDMODULES": "gcc/12:cuda/12.6",
    }
    text = site_file(env)
    assert "geheim" not in text and "http_proxy is left out" in text and "HTTPS_PROXY is left out" in text
    found = decoded(text)
    assert found.environment == {"no_proxy": ".lab"} and found.modules.build == ("gcc/12", "cuda/12.6")


def test_a_file_that_exists_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    file = put(tmp_path / "site.toml", "# mine\n")
    run = CliRunner().invoke
    refused = run(site_command, ["init"])
    assert isinstance(refused.exception, UsageError) and file.read_text() == "# mine\n"
    done = run(site_command, ["init", "--force"])
    assert done.exit_code == 0 and done.stdout == "site.toml\n"
    assert decoded(file.read_text()).paths.logs == "logs"
    there = run(site_command, ["init", "--out", "new/s.toml"])
    assert there.exit_code == 0 and (tmp_path / "new/s.toml").is_file()
    own = run(site_command, ["init", "--out", ".config/envbuild/site.toml"])
    assert own.exit_code == 0 and (tmp_path / ".config/envbuild/site.toml").is_file()


# ---- the command
def test_check_says_what_is_wrong_and_fails_only_then(tmp_path: Path) -> None:
    file = put(tmp_path / "s.toml", '[fabric]\ninterface = "nosuch0"\n')
    fine = CliRunner().invoke(site_command, ["check", str(file), "--json"])
    assert fine.exit_code == 0 and json.loads(fine.stdout)["passed"] is True
    put(file, '[fabric]\ninterface = "lo"\n[environment]\nRANK = "0"\n')
    wrong = CliRunner().invoke(site_command, ["check", str(file), "--offline", "--json"])
    assert isinstance(wrong.exception, RecipeError) and "2 invalid" in wrong.exception.message
    said = json.loads(wrong.stdout)
    failed = [f["name"] for f in said["findings"] if f["status"] == "fail"]
    assert failed == ["[environment] RANK", "[fabric] interface"] and said["passed"] is False


def test_paths_are_judged_where_the_site_is_this_host(tmp_path: Path) -> None:
    text = f'[paths]\nshared = "{tmp_path}/made/later"\ncache = "{tmp_path}/cache"\n[container]\nmounts = ["/nosuch"]\n'
    file = put(tmp_path / "s.toml", text)
    variables = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    found = {f.name: f for f in check_site(str(file), variables, None, offline=True)}
    assert found["[paths] shared"].status == "fail"  # neither it nor its parent exists
    assert found["[paths] cache"].status == "warn" and "home folder" in found["[paths] cache"].summary
    assert found["[container] mounts"].status == "fail"


def test_modules_are_loaded_in_a_shell_as_jobs_have_it(tmp_path: Path) -> None:
    init = put(
        tmp_path / "an init's.sh",
        'module() { [ "$1" = purge ] || [ "$2" = good/1 ] || { echo "unknown: $2"; return 1; }; }\n',
    )
    (tmp_path / "init.sh").symlink_to(init)
    head = f'[modules]\ninit = "{tmp_path}/init.sh"\n'
    for run, status in (("good/1", "ok"), ("bad/1", "fail"), ("$(touch pwned)", "fail")):
        file = put(tmp_path / "s.toml", f'{head}run = ["{run}"]\n')
        variables = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        found = {f.name: f for f in check_site(str(file), variables, None, offline=True)}
        assert found["[modules] run"].status == status
        assert status == "ok" or re.search(r"unknown: (bad/1|\$\(touch pwned\))", found["[modules] run"].summary)
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    ("plugstack", "said"),
    [
        ("required /usr/lib/slurm/spank_pyxis.so container_scope=job runtime_path=/run/pyxis\n", None),
        ("# pyxis container_scope=job\noptional spank_pyxis.so\n", "pyxis: container_scope=global;"),
        ("", "pyxis: its container_scope is not visible on this host;"),
    ],
)
def test_check_recommends_that_slurm_removes_the_containers_of_pyxis(
    tmp_path: Path, plugstack: str, said: str | None
) -> None:
    executable(tmp_path / "bin/srun", "#!/bin/sh\necho --container-image\n")
    (tmp_path / "plugstack.conf").write_text(plugstack)
    (tmp_path / "site.toml").write_text('[scheduler]\nkind = "slurm"\n\n[container]\nruntime = "pyxis"\n')
    variables = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_CONF": str(tmp_path / "slurm.conf")}
    found = check_site(str(tmp_path / "site.toml"), variables, None, offline=True)
    told = [one for one in found if one.name == "[container] runtime" and one.status == "info"]
    assert [one.summary.startswith(said or "") for one in told] == [True] * (said is not None)
    assert all("container_scope=job" in (one.hint or "") for one in told)
