"""`exclude_newer`: releases that are too new are left out of locks, by uv over an index of these tests."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from lab.wheels import make_recipe, make_wheel
from sdists import make_sdist

from envbuild.base.errors import LockError, RecipeError
from envbuild.environment import Environment
from envbuild.lock import offers
from envbuild.lock.format import Lock, parse, render
from envbuild.lock.lifecycle import Resolved
from envbuild.lock.offers import ReleaseAges, release_ages
from envbuild.lock.wheels import wheel_lock
from envbuild.recipe.checks import parse_age
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.targets import Target, host_arch
from envbuild.run_environment import load_environment, with_tmpdir

TARGET = Target.parse(f"cpu-{host_arch()}")
NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=UTC)
# The upload of each wheel. Each path of the server is an index with these; below /untimed/, it states no time.
UPLOADS = {
    "demo-1.0": "2026-10-01T08:00:00Z",
    "demo-2.0": "2026-11-25T08:00:00Z",
    "outer-1.0": "2026-10-01T08:00:00Z",
    "late-3.0": "2026-11-28T06:30:00.123456Z",
}


class Clock(datetime):
    """A clock that stands still, at `moment`."""

    moment = NOW

    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return cls.moment


class Lab:
    def __init__(self, folder: Path) -> None:
        self.folder, self.logged = folder, list[str]()
        self.url = ""

    @property
    def environment(self) -> Environment:
        (self.folder / "site.toml").write_text(f'[indexes]\ninternal = "{self.url}/internal"\n')
        return load_environment(
            {
                **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_INDEX_URL": f"{self.url}/main",
                "PIP_FIND_LINKS": str(self.folder / "links"),
                "ENVBUILD_SITE": str(self.folder / "site.toml"),
                "ENVBUILD_STORE": str(self.folder / "store"),
            }
        )

    def recipe(self, *requirements: str, extra: str = "", indexes: str = "") -> LoadedRecipe:
        targets = f"[targets.{TARGET.name}]\n{indexes}\n"
        return load_recipe(make_recipe(self.folder, "r", requirements, extra=extra, targets=targets) / "recipe.toml")

    def resolve(
        self, recipe: LoadedRecipe, old: Lock | None = None, upgrade: tuple[str, ...] | None = ()
    ) -> Resolved[Lock]:
        self.logged.clear()
        with with_tmpdir(self.environment) as environment:
            found = wheel_lock(recipe, TARGET).resolve(environment, old, upgrade, False, self.logged.append)
        assert parse(render(found.lock), "x") == found.lock
        return found

    def lock(self, *requirements: str, extra: str = "", indexes: str = "") -> Lock:
        return self.resolve(self.recipe(*requirements, extra=extra, indexes=indexes)).lock

    def fails(self, *requirements: str, extra: str = "", indexes: str = "") -> LockError:
        with pytest.raises(LockError) as caught:
            self.lock(*requirements, extra=extra, indexes=indexes)
        return caught.value


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setattr(offers, "datetime", Clock)
    monkeypatch.setattr(Clock, "moment", NOW)
    files = tmp_path / "files"
    for pin in UPLOADS:
        name, _, version = pin.partition("-")
        make_wheel(files, name, version, requires=["late>=3"] if name == "outer" else [])

    class Index(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/files/"):
                super().do_GET()
                return
            name = self.path.strip("/").rpartition("/")[2]
            timed = not self.path.startswith("/untimed/")
            rows = [
                {
                    "filename": path.name,
                    "url": f"/files/{path.name}",
                    "hashes": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
                    **({"upload-time": UPLOADS["-".join(path.name.split("-")[:2])]} if timed else {}),
                }
                for path in sorted(files.glob(f"{name}-*.whl"))
            ]
            self.send_response(200 if rows else 404)
            self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
            self.end_headers()
            self.wfile.write(json.dumps({"meta": {"api-version": "1.1"}, "name": name, "files": rows}).encode())

        def translate_path(self, path: str) -> str:
            return str(tmp_path / path.strip("/"))

        def log_message(self, *_: object) -> None:
            pass

    found = Lab(tmp_path)
    (tmp_path / "links").mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found.url = f"http://127.0.0.1:{server.server_port}"
        yield found
        server.shutdown()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7 days", timedelta(days=7)),
        ("1 day", timedelta(days=1)),
        ("36 hours", timedelta(hours=36)),
        ("2 weeks", timedelta(weeks=2)),
        ("2026-11-01", datetime(2026, 11, 2, tzinfo=UTC)),
        ("2026-11-01T12:00:00Z", datetime(2026, 11, 1, 12, tzinfo=UTC)),
        ("2026-11-01T12:00:00+02:00", datetime(2026, 11, 1, 10, tzinfo=UTC)),
    ],
)
def test_an_age_is_a_span_or_the_end_of_a_date_or_a_time(text: str, expected: timedelta | datetime) -> None:
    assert parse_age(text) == expected


@pytest.mark.parametrize(
    "text", ["7", "0 days", "7d", "-7 days", "2026-11-31", "2026-11-01T12:00:00", "off", "7 months"]
)
def test_another_text_is_refused_with_its_place_and_what_is_accepted(tmp_path: Path, text: str) -> None:
    place = make_recipe(tmp_path, "r", ["demo"], extra=f'exclude_newer = "{text}"')
    with pytest.raises(RecipeError) as caught:
        load_recipe(place / "recipe.toml")
    assert (
        f"recipe.toml:5:1: 'exclude_newer': {text!r} is neither a span nor a date: write '7 days'"
        in caught.value.message
    )


def test_an_age_of_an_index_that_the_recipe_does_not_name_is_refused(tmp_path: Path) -> None:
    table = '\n[indexes]\ndemo = "internal"\n[exclude_newer_index]\ninternl = "1 day"\ninternal = "never"\n'
    place = make_recipe(tmp_path, "r", ["demo"], extra=table)
    with pytest.raises(RecipeError) as caught:
        load_recipe(place / "recipe.toml")
    wrong, unknown = sorted(caught.value.message.splitlines())
    assert (
        "9:1: 'internl' in [exclude_newer_index] is no URL in `indexes` of a target and no name in [indexes]" in unknown
    )
    assert "did you mean 'internal'?" in unknown
    assert (
        "10:1: 'internal' in [exclude_newer_index]: 'never' is neither a span nor a date" in wrong
        and "or 'off'" in wrong
    )


def test_files_that_are_too_new_are_left_out_and_the_lock_keeps_the_time_of_a_span(lab: Lab) -> None:
    assert lab.lock("demo").versions == {"demo": "2.0"}
    lock = lab.lock("demo", extra='exclude_newer = "7 days"')
    assert lock.versions == {"demo": "1.0"} and lock.as_of == "2026-11-29T12:00:00Z"
    assert "# exclude-newer-as-of: 2026-11-29T12:00:00Z\n" in render(lock)
    assert "files uploaded from 2026-11-22T12:00:00Z on are left out (exclude_newer = 7 days)" in lab.logged
    dated = lab.lock("demo", extra='exclude_newer = "2026-11-25"')
    assert dated.versions == {"demo": "2.0"} and dated.as_of == "" and "as-of" not in render(dated)
    assert lab.lock("demo", extra='exclude_newer = "2026-11-25T08:00:00Z"').versions == {"demo": "1.0"}, "not before it"


def test_a_span_counts_from_the_time_in_the_lock_until_packages_may_move(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = lab.recipe("demo", extra='exclude_newer = "7 days"')
    old = lab.resolve(recipe).lock
    monkeypatch.setattr(Clock, "moment", NOW + timedelta(days=30))
    assert lab.resolve(recipe, old).lock == old, "the same bytes a month later"
    moved = lab.resolve(recipe, old, upgrade=None).lock
    assert moved.versions == {"demo": "2.0"} and moved.as_of == "2026-12-29T12:00:00Z"
    changed = lab.recipe("demo", extra='exclude_newer = "8 days"')
    assert lab.resolve(changed, old).lock.as_of == "2026-12-29T12:00:00Z", "a stale lock begins anew"
    # Nothing may move: what was locked before there was a limit, but is too new, moves nevertheless.
    unlimited = lab.lock("demo")
    monkeypatch.setattr(Clock, "moment", NOW)
    assert unlimited.versions == {"demo": "2.0"} and lab.resolve(recipe, unlimited).lock.versions == {"demo": "1.0"}


def test_a_pin_of_a_file_that_is_too_new_is_refused_with_the_day_from_which_it_is_allowed(lab: Lab) -> None:
    error = lab.fails("demo==2.0", extra='exclude_newer = "7 days"')
    text = "demo 2.0, uploaded on 2026-11-25 08:00 UTC, is too new: allowed from 2026-12-02 08:00 UTC on"
    assert f"recipe.toml:4:17: {text}" in error.message and "exclude-newer-package" not in error.message
    assert f"change `exclude_newer` at {lab.folder / 'r/recipe.toml'}:5:1" in (error.hint or "")
    error = lab.fails("demo==2.0", extra='exclude_newer = "2026-11-01"')
    assert "is too new: allowed by a date from 2026-11-25 on" in error.message
    # The package that another one needs is named, too.
    error = lab.fails("outer", extra='exclude_newer = "7 days"')
    assert "late 3.0, uploaded on 2026-11-28 06:30 UTC, is too new: allowed from 2026-12-05 06:30" in error.message
    # Another cause is explained as ever.
    assert "too new" not in lab.fails("demo==9", extra='exclude_newer = "7 days"').message


def test_files_without_a_time_are_left_out_and_that_is_said(lab: Lab) -> None:
    index = f'indexes = ["{lab.url}/untimed"]'
    lock = lab.lock("demo", extra='exclude_newer = "7 days"', indexes=index)
    assert lock.versions == {"demo": "1.0"}
    note = f"note: {lab.url}/untimed states no time of upload for files of demo; files without one were left out"
    assert note in lab.logged
    lab.lock("demo", indexes=index)
    assert not [line for line in lab.logged if "time of upload" in line]


@pytest.mark.parametrize(("age", "expected"), [("off", "2.0"), ("1 day", "1.0")])
def test_an_index_has_an_age_of_its_own(lab: Lab, age: str, expected: str) -> None:
    ages = f'exclude_newer = "7 days"\n[exclude_newer_index]\n"{lab.url}/untimed" = "{age}"'
    lock = lab.lock("demo", extra=ages, indexes=f'indexes = ["{lab.url}/untimed"]')
    assert lock.versions == {"demo": expected}
    assert lab.url not in render(lock)


@pytest.mark.parametrize(
    ("age", "expected", "as_of"),
    [("off", "2.0", False), ("1 day", "2.0", True), ("5 days", "1.0", True), ("2026-11-01", "1.0", False)],
)
def test_an_index_of_the_site_has_an_age_of_its_own_without_one_for_all(
    lab: Lab, age: str, expected: str, as_of: bool
) -> None:
    bound = '[indexes]\ndemo = "internal"\n[exclude_newer_index]\ninternal = '
    lock = lab.lock("demo", "late", extra=f'{bound}"{age}"')
    assert lock.versions == {"demo": expected, "late": "3.0"} and bool(lock.as_of) is as_of


def test_a_pin_on_an_index_of_the_site_is_judged_by_its_age(lab: Lab) -> None:
    bound = 'exclude_newer = "1 day"\n[indexes]\ndemo = "internal"\n[exclude_newer_index]\ninternal = "6 days"'
    assert "allowed from 2026-12-01 08:00 UTC on" in lab.fails("demo==2.0", extra=bound).message


def test_find_links_have_no_age_and_that_is_said(lab: Lab) -> None:
    make_wheel(lab.folder / "links", "local", "5.0")
    lock = lab.lock("demo", "local", extra='exclude_newer = "7 days"')
    assert lock.versions == {"demo": "1.0", "local": "5.0"}
    assert "note: exclude_newer does not concern files of find-links: local" in lab.logged


def test_build_tools_are_as_old_as_packages(lab: Lab) -> None:
    make_sdist(lab.folder / "links", "built", "1.0", build=["demo"])
    lock = lab.lock("built", extra='build = ["built"]\nexclude_newer = "7 days"')
    (built,) = lock.built
    assert {wheel.name: wheel.version for wheel in built.build}["demo"] == "1.0"


def test_the_ages_count_in_the_digest_of_a_lock_and_the_time_does_not(lab: Lab) -> None:
    plain, limited = lab.recipe("demo"), lab.recipe("demo", extra='exclude_newer = "7 days"')
    assert plain.resolution_digest(TARGET) != limited.resolution_digest(TARGET) and plain.digest != limited.digest
    assert plain.conda_digest(TARGET) != limited.conda_digest(TARGET)
    first, later = release_ages(limited, TARGET), ReleaseAges(limited.exclude_newer(TARGET), "2026-12-29T12:00:00Z")
    assert later.limit() == datetime(2026, 12, 22, 12, tzinfo=UTC) and first.limit() == NOW - timedelta(days=7)
