"""Known vulnerabilities of locked packages, from an offline export in OSV's form."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from lab.wheels import make_recipe
from packaging.version import Version

from envbuild.base.errors import RecipeError, UsageError, VerificationError
from envbuild.cli.commands import cli
from envbuild.cli.lock import LockRun
from envbuild.debian.control import compare_versions
from envbuild.debian.lock import DebianLock, LockedDeb
from envbuild.lock.advisories import (
    AuditedPackage,
    Exemption,
    LockChange,
    UpgradeReport,
    VerifiedUpgrade,
    advisories,
    audit,
    audited,
    exemptions_of,
    read_database,
)
from envbuild.lock.conda import CondaLock, CondaPackage
from envbuild.lock.format import Lock
from envbuild.lock.image import ImageLock
from envbuild.recipe.load import load_recipe
from envbuild.recipe.sources import LockedPackage
from envbuild.site.settings import load_site
from envbuild.site.tables import AuditTable
from envbuild.store.store import Store

NOW = datetime(2026, 11, 24, tzinfo=UTC)
DAY = "2026-11-20T10:00:00Z"
# Records in the form of OSV's exports; jinja2's and glibc's are shortened from the real ones.
JINJA = {
    "id": "GHSA-h5c8-rqwp-cp95",
    "modified": "2025-02-21T05:40:19Z",
    "aliases": ["CVE-2024-22195"],
    "summary": "Jinja vulnerable to HTML attribute injection when passing user input as keys to xmlattr filter",
    "affected": [
        {
            "package": {"ecosystem": "PyPI", "name": "Jinja2"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "3.1.3"}]}],
            "versions": ["2.0", "3.1.2"],
        }
    ],
}
GLIBC = {
    "id": "DEBIAN-CVE-2024-2961",
    "modified": DAY,
    "upstream": ["CVE-2024-2961"],
    "details": "The iconv() function in the GNU C Library may overflow\nthe output buffer.",
    "affected": [
        {
            "package": {"ecosystem": "Debian:12", "name": "glibc"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.36-9+deb12u6"}]}],
        },
        {
            "package": {"ecosystem": "Debian:13", "name": "glibc"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}],
        },
    ],
}
WITHDRAWN = {**JINJA, "id": "GHSA-gone", "withdrawn": DAY, "modified": DAY}


def export(folder: Path, kind: str, *records: dict[str, Any]) -> Path:
    (folder / kind).mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / kind / "all.zip", "w") as out:
        for one in records:
            out.writestr(f"{one['id']}.json", json.dumps(one))
    return folder


def wheels(**versions: str) -> Lock:
    packages = tuple(LockedPackage(name, version, ("0" * 64,)) for name, version in versions.items())
    return Lock("r", "cpu-x86_64", "3.11", "manylinux", "sha256:0", packages)


def image(version: str, suite: str = "bookworm") -> ImageLock:
    deb = LockedDeb("libc6", version, "amd64", "pool/main/g/glibc/libc6_x.deb", "0" * 64, 1)
    return ImageLock("r", "cpu-x86_64", "sha256:0", DebianLock(suite, DAY, (deb,)))


def exempt(name: str = "GHSA-h5c8-rqwp-cp95", expires: date | None = None, recipe: str = "") -> Exemption:
    return Exemption(name, "no HTML here", expires, "site.toml", recipe)


@pytest.fixture
def database(tmp_path: Path) -> AuditTable:
    export(tmp_path, "PyPI", JINJA, WITHDRAWN)
    return AuditTable(str(export(tmp_path, "Debian", GLIBC)))


def test_what_is_affected_is_found_and_what_is_mended_is_not(database: AuditTable) -> None:
    done = audit([wheels(jinja2="3.1.2", numpy="2.1.0"), image("2.36-9+deb12u4")], database, NOW)
    assert [(one.package.name, one.id, one.aliases, one.fixed) for one in done.advisories] == [
        ("glibc", "DEBIAN-CVE-2024-2961", ("CVE-2024-2961",), ("2.36-9+deb12u6",)),
        ("jinja2", "GHSA-h5c8-rqwp-cp95", ("CVE-2024-22195",), ("3.1.3",)),
    ]
    assert done.advisories[0].summary == "The iconv() function in the GNU C Library may overflow"
    assert done.judged == 3 and done.unknown == 0
    assert audit([wheels(jinja2="3.1.3"), image("2.36-9+deb12u6+b1")], database, NOW).advisories == ()
    assert audit([wheels(jinja2="3.1.3rc1+cpu")], database, NOW).advisories  # before 3.1.3, by PEP 440
    assert audit([image("2.41-1", "trixie")], database, NOW).advisories[0].fixed == ()  # no version mends it yet


def test_what_does_not_concern_a_site_is_told_apart(database: AuditTable) -> None:
    for name in ("CVE-2024-22195", "GHSA-h5c8-rqwp-cp95"):
        exemption = exempt(name)
        done = audit([wheels(jinja2="3.1.2")], database, NOW, [exemption])
        assert done.advisories == () and [(one.id, by) for one, by in done.accepted] == [
            ("GHSA-h5c8-rqwp-cp95", exemption)
        ]
        assert done.expired == () and done.unused == ()


@pytest.mark.parametrize(
    ("expires", "counts"), [(None, True), (NOW.date(), True), (NOW.date() - timedelta(days=1), False)]
)
def test_an_exception_counts_to_its_last_day(database: AuditTable, expires: date | None, counts: bool) -> None:
    exemption = exempt(expires=expires)
    done = audit([wheels(jinja2="3.1.2")], database, NOW, [exemption])
    assert (len(done.advisories), len(done.accepted)) == ((0, 1) if counts else (1, 0))
    assert done.expired == (() if counts else (exemption,)) and done.unused == ()
    # Another one that counts accepts it.
    valid = exempt("CVE-2024-22195")
    assert audit([wheels(jinja2="3.1.2")], database, NOW, [exemption, valid]).advisories == ()


def test_an_exception_of_a_recipe_is_for_its_locks_alone(database: AuditTable) -> None:
    locks = [wheels(jinja2="3.1.2"), replace(wheels(jinja2="3.1.2"), recipe="other")]
    done = audit(locks, database, NOW, [exempt(recipe="other"), exempt("GHSA-none")])
    assert len(done.advisories) == 1 and len(done.accepted) == 1
    assert [one.id for one in done.unused] == ["GHSA-none"]
    assert audit(locks[:1], database, NOW, [exempt(recipe="other")]).unused == (exempt(recipe="other"),)


def test_exceptions_are_written_in_recipe_and_site_with_reason_and_day(tmp_path: Path) -> None:
    table = '[audit.exceptions.GHSA-h5c8-rqwp-cp95]\nreason = "no HTML here"\nexpires = "2026-12-31"\n'
    (tmp_path / "site.toml").write_text(table)
    site = load_site({"ENVBUILD_SITE": str(tmp_path / "site.toml"), "HOME": str(tmp_path)}, etc=tmp_path / "etc")
    (of_site,) = exemptions_of(site)
    assert (of_site.reason, of_site.expires, of_site.recipe) == ("no HTML here", date(2026, 12, 31), "")
    assert str(tmp_path / "site.toml") in of_site.place
    recipe = make_recipe(tmp_path, "r", ["jinja2"], targets=f"[targets.cpu-x86_64]\n{table}") / "recipe.toml"
    loaded = load_recipe(recipe)
    of_both = exemptions_of(site, [loaded, loaded])
    of_recipe = of_both[1]
    assert of_both == [of_site, of_recipe]
    assert of_recipe == replace(of_site, recipe="r", place=f"{recipe}:7:19")
    plain = load_recipe(
        make_recipe(tmp_path / "plain", "r", ["jinja2"], targets="[targets.cpu-x86_64]") / "recipe.toml"
    )
    assert plain.digest == loaded.digest, "no artifact changes"
    for bad, said in (
        ('expires = "2026-12-31"', "missing key 'reason' in [audit.exceptions.X]"),
        ('reason = "r"', "missing key 'expires' in [audit.exceptions.X]"),
        ('reason = "r"\nexpires = "soon"', "'soon' is not a day: write YYYY-MM-DD"),
        ('reason = "r"\nexpires = "2026-02-30"', "'2026-02-30' is not a day"),
        ('reason = " "\nexpires = "2026-12-31"', "'reason' in [audit.exceptions.X]"),
    ):
        text = f"[targets.cpu-x86_64]\n[audit.exceptions.X]\n{bad}\n"
        with pytest.raises(RecipeError) as caught:
            load_recipe(make_recipe(tmp_path / "bad", "r", ["jinja2"], targets=text) / "recipe.toml")
        assert said in caught.value.message and "recipe.toml:" in caught.value.message


def test_conda_packages_with_a_distribution_are_audited_and_others_counted() -> None:
    def package(name: str, version: str, *depends: str) -> CondaPackage:
        url = f"https://c/linux-64/{name}-{version}-0.conda"
        return CondaPackage(name, version, "0", "linux-64", url, "0" * 32, "0" * 64, depends)

    packages = (
        package("jinja2", "3.1.2", "python >=3.9"),
        package("pytorch", "2.12.0", "python"),
        package("openssl", "3.6"),
    )
    lock = CondaLock("r", "cpu-x86_64", "sha256:0", packages, wheels(einops="0.8.1"))
    found, others = audited(lock)
    assert {(one.ecosystem, one.name, one.version) for one in found} == {
        ("PyPI", "jinja2", "3.1.2"),
        ("PyPI", "torch", "2.12.0"),
        ("PyPI", "einops", "0.8.1"),
    }
    assert others == 1


def test_what_cannot_be_looked_up_is_not_said_to_be_good(database: AuditTable, tmp_path: Path) -> None:
    lock = wheels(jinja2="3.1.3")
    with pytest.raises(UsageError, match="no vulnerability database"):
        audit([lock], AuditTable(), NOW)
    with pytest.raises(VerificationError, match=r"PyPI/all.zip is too old: its newest record is of 2026-11-20"):
        audit([lock], database, NOW + timedelta(days=11))
    assert audit([lock], database, NOW + timedelta(days=10)).judged == 1
    with pytest.raises(VerificationError, match=r"Debian/all.zip does not exist") as failed:
        audit([image("2.36-9")], AuditTable(str(export(tmp_path / "half", "PyPI", JINJA))), NOW)
    assert "Debian/all.zip" in str(failed.value.hint)
    for content in (b"", b"no zip", (tmp_path / "PyPI/all.zip").read_bytes()[:-30]):
        (tmp_path / "PyPI/all.zip").write_bytes(content)
        with pytest.raises(VerificationError, match="cannot be read"):
            audit([lock], database, NOW)


@pytest.mark.parametrize(
    "record",
    [
        {"id": "x"},
        {"id": "x", "modified": "yesterday"},
        {"id": "x", "modified": DAY, "affected": [1]},
        {"id": "x", "modified": 5},
        *(
            {"id": "x", "modified": DAY, "affected": [{"package": {"ecosystem": "PyPI", "name": "jinja2"}, **rest}]}
            for rest in ({"versions": 5}, {"ranges": [1]}, {"ranges": [{"type": "ECOSYSTEM", "events": [None]}]})
        ),
        {**JINJA, "modified": DAY, "aliases": 5, "affected": [{**JINJA["affected"][0], "versions": ["3.1.3"]}]},
    ],
)
def test_a_record_of_another_form_fails_closed(record: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="cannot be read"):
        audit([wheels(jinja2="3.1.3")], AuditTable(str(export(tmp_path, "PyPI", record))), NOW)


def test_null_is_what_is_not_there(tmp_path: Path) -> None:
    # In OSV's JSON Schema, `affected` and `aliases` may be null.
    [row] = JINJA["affected"]
    records = {
        "a": {"affected": None},
        "b": {"affected": [{**row, "package": None}]},
        "c": {"affected": [{**row, "versions": None}], "aliases": None},
        "d": {"affected": [{**row, "ranges": None}]},
    }
    rows = [{**JINJA, "id": name, "modified": DAY, **changes} for name, changes in records.items()]
    found = audit([wheels(jinja2="3.1.2")], AuditTable(str(export(tmp_path, "PyPI", *rows))), NOW).advisories
    assert [(one.id, one.fixed) for one in found] == [("c", ("3.1.3",)), ("d", ())]


VERSIONS = st.builds(
    "{}.{}{}".format, st.integers(0, 3), st.integers(0, 3), st.sampled_from(["", "rc1", ".post1", ".dev2"])
)
DEBIAN = st.builds(
    "{}.{}-{}{}".format,
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(1, 2),
    st.sampled_from(["", "~bpo1", "+deb12u1"]),
)


def hit(folder: Path, ecosystem: str, version: str, events: list[dict[str, str]]) -> bool:
    affected = [{"package": {"ecosystem": ecosystem, "name": "p"}, "ranges": [{"type": "ECOSYSTEM", "events": events}]}]
    kind = ecosystem.partition(":")[0]
    package = AuditedPackage(ecosystem, "p", version)
    record = {"id": "x", "modified": DAY, "affected": affected}
    return bool(advisories([package], read_database(export(folder, kind, record), [package])))


@given(
    version=VERSIONS, introduced=VERSIONS | st.just("0"), end=VERSIONS, kind=st.sampled_from(["fixed", "last_affected"])
)
def test_ranges_are_those_of_pep_440(
    tmp_path_factory: pytest.TempPathFactory, version: str, introduced: str, end: str, kind: str
) -> None:
    mine, start, last = Version(version), Version(introduced), Version(end)
    if start > last:
        return
    begun = introduced == "0" or mine >= start
    if introduced != "0" and start == last and kind == "fixed":
        return  # an empty range: OSV's schema does not allow it
    inside = begun and (mine < last if kind == "fixed" else mine <= last)
    # In any order: the schema does not ask for one.
    for events in ([{"introduced": introduced}, {kind: end}], [{kind: end}, {"introduced": introduced}]):
        assert hit(tmp_path_factory.mktemp("x"), "PyPI", version, events) is inside


@given(version=DEBIAN, fixed=DEBIAN)
def test_ranges_of_debian_are_those_of_dpkg(tmp_path_factory: pytest.TempPathFactory, version: str, fixed: str) -> None:
    found = hit(tmp_path_factory.mktemp("x"), "Debian:12", version, [{"introduced": "0"}, {"fixed": fixed}])
    assert found is (compare_versions(version, fixed) < 0)


def test_a_version_that_cannot_be_understood_mends_nothing(tmp_path: Path) -> None:
    assert hit(tmp_path, "PyPI", "1.0", [{"introduced": "0"}, {"fixed": "unknown"}])
    assert hit(tmp_path, "PyPI", "1.0", [{"introduced": "what"}, {"fixed": "2.0"}])


def test_packages_of_no_database_are_counted() -> None:
    assert audited(image("1", "sid"))[1] == 1
    assert audited(object()) == (set(), 1)
    assert audited(wheels(torch="2.13.0+cpu"))[0] == {AuditedPackage("PyPI", "torch", "2.13.0")}


def test_a_report_says_what_changed_and_what_that_mends(
    database: AuditTable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return NOW

    monkeypatch.setattr("envbuild.lock.advisories.datetime", Clock)
    store = Store(tmp_path / "store")
    new = wheels(jinja2="3.1.3")
    (sha256,) = new.packages[0].hashes
    (store.folder("wheels", sha256) / "jinja2-3.1.3-py3-none-any.whl").write_bytes(b"x" * 2000)
    monkeypatch.setattr(type(store.digests), "keep", lambda *_: True)
    lines = ["~ jinja2 3.1.2 -> 3.1.3", "+ new 1.0", "- old 2.0", "~ same 1.0 (other files: 1 -> 2 hashes)"]
    change = LockChange("pt", "cpu-x86_64", "wheels", lines, wheels(jinja2="3.1.2"), new)
    text = UpgradeReport(
        [change, LockChange("pt", "cpu-x86_64", "image", [], image("2.36-1"), image("2.36-1"))]
    ).render(database, store)
    assert (
        "## pt, cpu-x86_64: wheels\n\n| package | before | after | size |\n| --- | --- | --- | --- |\n"
        "| jinja2 | 3.1.2 | 3.1.3 | 2.0 kB |\n" in text
    )
    assert "| new |  | 1.0 |  |\n| old | 2.0 |  |  |\n" in text and "image" not in text
    assert "**Mended: 1**\n\n- jinja2 3.1.2: GHSA-h5c8-rqwp-cp95 (CVE-2024-22195)" in text
    assert "**New: 0**" in text and "**Left: 1**\n\n- glibc" in text
    assert "not looked up" in UpgradeReport([]).render(AuditTable(), store)
    back = [LockChange("r", "cpu-x86_64", "wheels", ["~ jinja2 3.1.3 -> 3.1.2"], new, wheels(jinja2="3.1.2"))]
    accepted = UpgradeReport(back).render(database, store, [exempt(expires=date(2099, 1, 1))])
    assert "**New: 0**" in accepted and "**Exceptions: 1**\n\n- jinja2: GHSA-h5c8-rqwp-cp95 is accepted" in accepted
    expired = UpgradeReport(back).render(database, store, [exempt(expires=date(2020, 1, 1))])
    assert (
        "**New: 1**" in expired and "- the exception of GHSA-h5c8-rqwp-cp95 expired on 2020-01-01: no HTML" in expired
    )


def test_a_report_is_written_without_a_database_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, report = tmp_path / "site.toml", tmp_path / "upgrade.md"
    site.write_text(f'[audit]\ndatabase = "{tmp_path}/gone"\n')
    monkeypatch.setenv("ENVBUILD_SITE", str(site))
    monkeypatch.setenv("ENVBUILD_STORE", str(tmp_path / "store"))
    new, old = wheels(jinja2="3.1.3"), wheels(jinja2="3.1.2")

    def upgraded(run: LockRun, *_: object) -> None:
        run.report.changes.append(LockChange("pt", "cpu-x86_64", "wheels", ["~ jinja2 3.1.2 -> 3.1.3"], old, new))

    monkeypatch.setattr(LockRun, "lock_wheels", upgraded)
    options = ["--target", "cpu-x86_64", "--wheels", "--report", str(report), "--upgrade"]
    done = CliRunner().invoke(cli, ["lock", "pt_minimal", *options])
    assert isinstance(done.exception, VerificationError) and "all.zip does not exist" in done.exception.message
    assert "| jinja2 | 3.1.2 | 3.1.3 |" in report.read_text()
    assert "could not be looked up: " in report.read_text()


def test_a_report_compares_receipts(tmp_path: Path) -> None:
    def receipt(status: str, losses: list[float], step_s: float) -> dict[str, Any]:
        checks = [{"name": "curve", "status": status, "evidence": {"losses": losses}}]
        figures = {"import_s": 0.75, "step_s": step_s}
        return {"passed": status == "pass", "checks": checks, "performance": figures}

    good, bad = (receipt("pass", [2.0, 1.5], 0.002), 1_000_000), (receipt("fail", [2.0, 3.25], 0.0041), 2_000_000)
    found = UpgradeReport([], [VerifiedUpgrade("pt", "cpu-x86_64", good, bad)]).render(AuditTable(), Store(tmp_path))
    assert "## pt, cpu-x86_64: verified\n\n| | before | after |\n" in found
    assert "| verification | passed | **failed**: curve |\n| loss by epoch | 2, 1.5 | 2, 3.25 |\n" in found
    assert "| size of all files | 1.0 MB | 2.0 MB |\n| one step | 2.0 ms | 4.1 ms |\n" in found
    assert "| import of torch | 750.0 ms | 750.0 ms |\n\n" in found and "bandwidth" not in found
    first = UpgradeReport([], [VerifiedUpgrade("pt", "cpu-x86_64", None, good)]).render(AuditTable(), Store(tmp_path))
    assert "| verification |  | passed |\n" in first


def test_the_command_ends_with_5_for_a_vulnerability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVBUILD_STORE", str(tmp_path / "store"))
    now = datetime.now(UTC).isoformat()
    clean = export(tmp_path / "clean", "PyPI", {**JINJA, "modified": now})
    export(clean, "Debian", {**GLIBC, "modified": now, "affected": []})
    line = ["audit", "pt_cpu", "--target", "cpu-x86_64", "--json"]
    done = CliRunner().invoke(cli, [*line, "--database", str(clean)])
    # pt_cpu's own Jinja2 is newer.
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["found"] == [] and told["judged"] > 30
    torch = {
        "package": {"ecosystem": "PyPI", "name": "torch"},
        "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}]}],
    }
    export(clean, "PyPI", {"id": "X-1", "modified": now, "affected": [torch], "summary": "all of it"})
    done = CliRunner().invoke(cli, [*line, "--database", str(clean)])
    assert isinstance(done.exception, VerificationError) and json.loads(done.stdout)["found"][0]["id"] == "X-1"
    done = CliRunner().invoke(cli, [*line, "--database", str(clean), "--ignore", "X-1"])
    assert done.exit_code == 0
    row = {"package": "torch", "advisory": "X-1", "id": "X-1", "reason": "option", "expires": None, "place": "--ignore"}
    # The conda lock has another torch than the wheel lock.
    of_conda, of_wheels = json.loads(done.stdout)["accepted"]
    assert of_conda == {**row, "version": "2.12.0"} and of_wheels == {**row, "version": "2.13.0"}
    # Exceptions of a site: one expired, one matches nothing.
    (tmp_path / "site.toml").write_text(
        '[audit.exceptions.X-1]\nreason = "waits"\nexpires = "2020-01-01"\n'
        '[audit.exceptions.X-2]\nreason = "gone"\nexpires = "2099-01-01"\n'
    )
    monkeypatch.setenv("ENVBUILD_SITE", str(tmp_path / "site.toml"))
    done = CliRunner().invoke(cli, [*line, "--database", str(clean)])
    assert isinstance(done.exception, VerificationError)
    assert "\n  the exception of X-1 expired on 2020-01-01: waits ([audit] exceptions of " in done.exception.message
    told = json.loads(done.stdout)
    assert [row["id"] for row in told["expired"]] == ["X-1"] and [row["id"] for row in told["unused"]] == ["X-2"]
    assert "note: the exception of X-2 matches no locked package" in done.stderr
