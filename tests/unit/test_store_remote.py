"""A remote cache that is slow, silent or gone is left out of a run; what is made is uploaded beside the work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab.fake_registry import Call, Fake, fake_registry

from envbuild.base.packages import digest_of
from envbuild.cache.http import Transport
from envbuild.image.registry import open_registry
from envbuild.store import remote as team_cache
from envbuild.store.entry import CacheEntry, EntryFile, render_entry, shared
from envbuild.store.remote import RemoteCache
from envbuild.store.store import Store

ENTRY = CacheEntry("segment", "a" * 64 + "-0123456789ab")
DATA = {name: number.to_bytes(2, "big") * 50_000 for number, name in enumerate(ENTRY.files)}
MANIFEST = render_entry(ENTRY, [EntryFile(n, digest_of(d), len(d)) for n, d in DATA.items()], 4.0, None)


@contextmanager
def cache(folder: Path, script: Callable[[Call], None], *, writes: bool = False) -> Iterator[tuple[RemoteCache, Fake]]:
    with fake_registry(script) as fake:
        transport = Transport(timeout_s=1.0, retries=0, insecure=frozenset({fake.address}))
        opened = open_registry(f"{fake.address}/team/cache", transport, {})
        one = RemoteCache(opened, Store(folder / "store"), True, writes)
        yield one, fake
        one.close(wait=True)


def served(call: Call) -> None:
    if "/manifests/" in call.path:
        call.reply(200 if ENTRY.tag in call.path else 404, MANIFEST)
    else:
        call.reply(200, next(data for data in DATA.values() if digest_of(data) in call.path))


def test_what_is_expected_is_there_when_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cache(tmp_path, served) as (one, fake):
        one.expect([ENTRY, CacheEntry("segment", "b")])
        assert one.bring(ENTRY) and not one.bring(CacheEntry("segment", "b"))
        for name, data in DATA.items():
            path = one.store.root / name
            assert path.read_bytes() == data
            assert one.store.digests.keep(path, digest_of(data)[7:])
        assert len(fake.asked("GET", ENTRY.tag)) == 1
    assert "cache: 1 results fetched, 300.0 kB, 4 s saved, 1 missing" in capsys.readouterr().err


@pytest.mark.parametrize("comes", [True, False])
def test_a_segment_is_described_before_its_data_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], comes: bool
) -> None:
    released, data = threading.Event(), next(iter(DATA.values()))

    def late(call: Call) -> None:
        if digest_of(data) not in call.path:
            return served(call)
        assert released.wait(20)
        return served(call) if comes else call.cut()

    with cache(tmp_path, late) as (one, fake):
        assert one.bring(ENTRY, whole=False)
        paths = [one.store.root / name for name in DATA]
        assert [path.exists() for path in paths] == [False, True, True]
        released.set()
        assert one.bring(ENTRY) is comes
        assert paths[0].exists() is paths[-1].exists() is comes
        missing = CacheEntry("segment", "b")
        assert not one.bring(missing, whole=False) and not one.bring(missing)
        assert len(fake.asked("GET", "segment-b")) == 1


def test_data_are_shown_while_they_come_and_are_refused_if_they_came_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the data is here from an earlier run; the server sends the rest, or all of it if that half is wrong."""
    data = next(iter(DATA.values()))
    for right in (True, False):
        released = threading.Event()

        def late(call: Call, released: threading.Event = released, right: bool = right) -> None:
            if digest_of(data) not in call.path:
                return served(call)
            assert released.wait(20)
            if not right:
                return served(call)
            call.send_response(206)
            call.send_header("Content-Range", "bytes 50000-99999/100000")
            call.send_header("Content-Length", "50000")
            call.end_headers()
            call.wfile.write(data[50_000:])

        with cache(tmp_path / str(right), late) as (one, _):
            place = one.store.blobs.partial(digest_of(data))
            place.write_bytes(data[:50_000] if right else b"other" * 10_000)
            assert one.bring(ENTRY, whole=False)
            assert one.bring_part(ENTRY, place, 50_000)
            with place.open("rb") as stream:
                released.set()
                assert not one.bring_part(ENTRY, place, 100_001)  # there are no more
                assert one.bring(ENTRY) is right
                stream.seek(0)
                assert stream.read() == data  # the file is the same under its name
            assert (one.store.root / ENTRY.files[0]).read_bytes() == data


def test_an_entry_that_comes_too_slowly_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team_cache, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(team_cache, "SLOWEST", 1_000_000)

    def dribbled(call: Call) -> None:
        if "/manifests/" in call.path:
            return served(call)
        call.send_response(200)
        call.send_header("Content-Length", "100000")
        call.end_headers()
        data = next(data for data in DATA.values() if digest_of(data) in call.path)
        for start in range(0, 100_000, 10_000):
            call.wfile.write(data[start : start + 10_000])
            time.sleep(0.05)

    begun = time.monotonic()
    with cache(tmp_path, dribbled) as (one, _):
        assert not one.bring(ENTRY)
        assert time.monotonic() - begun < 1
        time.sleep(3)  # until it has come, which nobody waits for
    assert not list((one.store.root / "segments").glob("*"))


@pytest.mark.parametrize("made", [True, False])
def test_the_end_of_a_slow_transfer_takes_nothing_that_was_made_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    data = DATA[ENTRY.files[0]]
    ended = threading.Event()

    def dribbled(call: Call) -> None:  # the data of a segment, which come after what describes them
        if digest_of(data) not in call.path:
            return served(call)
        call.send_response(200)
        call.send_header("Content-Length", str(len(data)))
        call.end_headers()
        call.wfile.write(data[:1000])
        ended.wait(5)
        call.cut()

    with cache(tmp_path, dribbled) as (one, _):
        assert one.bring(ENTRY, whole=False)
        answer = one._expected[ENTRY.tag][1]
        monkeypatch.setattr(team_cache, "_PATIENCE_S", 0.0)
        monkeypatch.setattr(team_cache, "SLOWEST", 1 << 40)
        assert not one.bring(ENTRY)
        for name in ENTRY.files if made else ():
            (one.store.root / name).write_bytes(b"made here")
        ended.set()
        assert answer.result() is False
    left = [name for name in (ENTRY.files[0], ENTRY.files[-1]) if (one.store.root / name).exists()]
    assert left == ([ENTRY.files[0], ENTRY.files[-1]] if made else [])


@pytest.mark.parametrize("status", [None, 401])
def test_one_that_cannot_be_used_is_asked_once(
    tmp_path: Path, status: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(call: Call) -> None:
        call.reply(status or 0) if status else call.cut()

    with cache(tmp_path, refused, writes=True) as (one, fake):
        for number in range(8):
            assert not one.bring(CacheEntry("segment", f"{number}"))
        path = one.store.folder("facts") / "f.json"
        path.write_text("{}")
        one.offer(CacheEntry("wheel", "f"), 0.0)
    assert len(fake.seen) <= 4
    assert capsys.readouterr().err.count("is not used in this run") == 1


def test_what_a_cache_has_wrong_is_made_and_offered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known: list[str] = []

    def make() -> str:
        for name, data in DATA.items():
            path = one.store.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        known.append("made")
        return "made"

    taken: list[bytes] = []

    def takes(call: Call) -> None:
        if call.command == "GET":
            return served(call)
        content = call.content()
        if call.command == "HEAD":
            return call.reply(404)
        if "/manifests/" in call.path:
            taken.append(content)
        call.reply({"POST": 202}.get(call.command, 201), Location=f"{call.path}?x=1")

    with cache(tmp_path, takes, writes=True) as (one, _):
        # The caller does not find what it brought, so it is not what the key says.
        assert shared(ENTRY, one, lambda: known[0] if known else None, make) == "made"
        assert shared(ENTRY, one, lambda: known[0] if known else None, make) == "made"
    said = capsys.readouterr().err
    assert known == ["made"] and "is refused" in said and "1 uploaded" in said
    assert len(taken) == 1 and ENTRY.artifact_type.encode() in taken[0]


def test_two_who_fetch_the_same_do_not_disturb_each_other(tmp_path: Path) -> None:
    with cache(tmp_path, served) as (one, _), cache(tmp_path, served) as (other, _):
        for each in (one, other):
            each.expect([ENTRY])
        assert one.bring(ENTRY) and other.bring(ENTRY)
        assert (one.use.hits, other.use.hits) == (1, 1)
        for name, data in DATA.items():
            assert (one.store.root / name).read_bytes() == data


def test_without_a_cache_nothing_is_asked() -> None:
    assert shared(ENTRY, None, lambda: None, lambda: 5) == 5
