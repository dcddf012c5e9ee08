"""The parts of the page about one receipt: its verdict, checks and provenance, and what changed."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Mapping
from typing import Any

from envbuild.inspect.compare import Change
from envbuild.report.data import (
    BLOCKED,
    FAILED,
    OPEN,
    PASSED,
    WORDS,
    ReportEntry,
    checks_of,
    counts,
    has_passed,
    moment,
    number_of,
    part,
    text_of,
)
from envbuild.report.markup import Html, dumped, evidence_html, folded, h, joined, pairs, prose, table
from envbuild.store.history import METRICS

_LOOKS = {PASSED: "good", FAILED: "bad", BLOCKED: "warn", OPEN: "none", "good": "good", "bad": "bad", "unknown": "warn"}
_PATHS = {"good": "M3.5 8.5l3 3 6-7", "bad": "M4 4l8 8M12 4l-8 8", "warn": "M8 3v6M8 12v1", "none": "M4 8h8"}
_WORTH = 300  # characters of a part that is worth a link instead
_DIGESTS = (
    ("artifact", "artifact.digest"),
    ("manifest", "artifact.manifest"),
    ("pushed as", "artifact.pushed"),
    ("plan", "plan.digest"),
    ("lock", "lock.digest"),
    ("recipe", "recipe.digest"),
)


class Shared:
    """The parts that a page of `several` receipts has already: another receipt with an equal part gets a link to it."""

    def __init__(self, several: bool) -> None:
        self.several = several
        self._places: dict[str, tuple[str, str]] = {}

    def once(self, part: Html, entry: ReportEntry, place: str) -> Html:
        """Return `part` of `entry`, whose anchor is `place`, or the link to the same part of an earlier receipt."""
        if not self.several or len(part) < _WORTH:
            return part
        first, title = self._places.setdefault(part, (place, entry.path))
        return part if first == place else h("p", "The same as in ", h("a", title, href=f"#{first}"), ".")


def badge(status: object, word: str = "") -> Html:
    """Return a status as a word with its sign and colour."""
    look = _LOOKS.get(str(status), "none")
    return h("span", icon(look), word or WORDS.get(str(status), str(status)), class_=f"badge {look}")


def icon(look: str) -> Html:
    """Return the sign of a status, which says nothing that the word beside it does not say."""
    return h("svg", h("use", href=f"#x-{look}"), class_="icon", aria_hidden="true")


def icons() -> Html:
    """Return the drawings of all signs, which a page has once."""
    drawn = [
        h(
            "symbol",
            h("path", d=path, fill="none", stroke="currentColor", stroke_width="2.2", stroke_linecap="round"),
            id=f"x-{look}",
            viewBox="0 0 16 16",
        )
        for look, path in _PATHS.items()
    ]
    return h("svg", drawn, class_="symbols", aria_hidden="true")


def name_of(receipt: Mapping[str, Any]) -> str:
    """Return the recipe, kind and target of a receipt."""
    kind, target = text_of(receipt, "artifact.kind"), text_of(receipt, "target")
    return f"{text_of(receipt, 'recipe.name') or 'an artifact'}, {kind or 'of an unknown kind'}" + (
        f" for {target}" if target else ""
    )


def time_of(receipt: Mapping[str, Any]) -> Html | None:
    """Return the time of the verification for people and machines."""
    found = moment(receipt)
    if found is None:
        return None
    return h("time", f"{found.day} {found:%b %Y, %H:%M} UTC", datetime=found.isoformat(timespec="seconds"))


def verdict(entry: ReportEntry, heading: str, title: object) -> Html:
    """Return the verdict on one artifact under its title."""
    receipt = entry.receipt
    found, good = counts(receipt), has_passed(receipt)
    seconds = number_of(receipt, "seconds")
    told = ", ".join(f"{number} {WORDS[status]}" for status, number in found.items() if number)
    kind = " ".join(filter(None, (text_of(receipt, "artifact.kind"), "for", text_of(receipt, "target"))))
    facts = pairs(
        [
            ("Artifact", kind.removesuffix(" for").removeprefix("for ") or None),
            ("Checks", told or "none"),
            ("Trained on", _shape(receipt)),
            ("Verified", time_of(receipt)),
            ("Took", f"{seconds:.1f} s" if seconds is not None else None),
            ("torch", text_of(receipt, "versions.torch")),
            ("Digest", h("code", text_of(receipt, "artifact.digest")) if part(receipt, "artifact.digest") else None),
        ]
    )
    word = "Passed" if good else "Failed"
    return h(
        "div",
        h("p", icon("good" if good else "bad"), word, class_="word"),
        h(heading, title),
        facts,
        [h("p", prose(note), class_="note") for note in entry.notes],
        class_=f"verdict {'good' if good else 'bad'}",
    )


def _shape(receipt: Mapping[str, Any]) -> str | None:
    nodes, ranks = (number_of(receipt, f"settings.{name}") for name in ("nodes", "nproc_per_node"))
    if nodes is None or ranks is None or part(receipt, "settings.trainer") is False:
        return None
    return f"{nodes:g} simulated node{'s' if nodes != 1 else ''} × {ranks:g} rank{'s' if ranks != 1 else ''}"


def failures(entry: ReportEntry) -> Html | None:
    """Return what failed and why, before everything else."""
    bad = [one for one in checks_of(entry.receipt) if one.get("status") == FAILED]
    if not bad:
        return None
    rows = [h("li", h("p", text_of(one, "title") or text_of(one, "name"), class_="fault"), _told(one)) for one in bad]
    return h("ul", rows, class_="faults")


def _told(check: Mapping[str, Any], seen_above: bool = False) -> Html:
    seen, cause = (text_of(check, name) for name in ("seen", "cause"))
    body = None if seen_above else h("pre", seen) if "\n" in seen else prose(seen)
    return pairs([("Seen", body), ("Expected", text_of(check, "expected")), ("Usually", prose(cause) if cause else "")])


def checks(entry: ReportEntry, shared: Shared, prefix: str) -> Html:
    """Return every check; its evidence unfolds. `prefix` begins the anchors of this receipt."""
    rows = []
    for number, one in enumerate(checks_of(entry.receipt), start=1):
        name, seen = text_of(one, "name"), text_of(one, "seen")
        found = one.get("evidence")
        head = [
            badge(one.get("status")),
            h("span", text_of(one, "title") or name, class_="title"),
            h("span", prose(_first_line(seen)), class_="seen"),
        ]
        proof = evidence_html(found) if isinstance(found, Mapping) and found else h("p", "No evidence was recorded.")
        body = joined(_told(one, "\n" not in seen), proof, h("p", "Check ", h("code", name), class_="small"))
        failed, place = one.get("status") == FAILED, f"{prefix}check-{number}"
        body = body if failed else shared.once(body, entry, place)
        rows.append(h("li", folded(joined(head), body, is_open=failed), id=place if shared.several else None))
    return h("ol", rows, class_="checks") if rows else h("p", "The receipt has no checks.")


def _first_line(text: str) -> str:
    line, _, more = text.partition("\n")
    return f"{line} …" if more else line


def changes(entry: ReportEntry) -> Html | None:
    """Return what changed since another artifact or the receipt before."""
    found = entry.changes
    if found is None:
        return None
    rows = [_change(title, one) for title, several in found.groups.items() for one in several]
    told = table("Differences", ("What", "Part", "Change", "Before", "Now"), rows)
    return joined(
        h("p", "Compared with ", found.before, "."),
        told if rows else h("p", "Nothing that was compared differs."),
        [h("p", prose(note), class_="small") for note in found.notes],
    )


def _change(part: str, one: Change) -> list[object]:
    change = "other content" if one.before == one.after else one.kind
    return [one.name, part, change, one.before or "—", one.after or "—"]


def provenance(entry: ReportEntry, shared: Shared) -> Html:
    """Return where the artifact comes from, on which host and with which settings it was verified, and the receipt."""
    receipt = entry.receipt
    groups: list[Html] = []
    for title, place in (("Versions", "versions"), ("Host", "host"), ("Settings", "settings"), ("Own code", "project")):
        found = part(receipt, place)
        if isinstance(found, Mapping) and found:
            groups.append(folded(title, evidence_html(found)))
    digests = [(name, h("code", text_of(receipt, place))) for name, place in _DIGESTS if text_of(receipt, place)]
    own = {
        "receipt": entry.path,
        "verified path": text_of(receipt, "artifact.path"),
        "runtime": text_of(receipt, "runtime"),
        "fabric": text_of(receipt, "fabric"),
        "logs of the nodes": text_of(receipt, "logs"),
    }
    file = download(entry, "the receipt", ".receipt.json", dumped(receipt), shared)
    return joined(pairs([*own.items(), *digests]), groups, h("p", file))


def performance(entry: ReportEntry) -> Html | None:
    """Return the measurements of the receipt, if it has some."""
    found = entry.receipt.get("performance")
    if not isinstance(found, Mapping) or not found:
        return None
    numbers = {name: number_of(found, name) for name in METRICS}
    known = [(METRICS[name].title, METRICS[name].show(value)) for name, value in numbers.items() if value is not None]
    others = {name: value for name, value in found.items() if numbers.get(name) is None}
    return joined(pairs(known), evidence_html(others) if others else None)


def slim(entry: ReportEntry) -> Html | None:
    """Return what the wheels are without, by [slim] of the recipe."""
    found = entry.receipt.get("slim")
    if not isinstance(found, Mapping) or not found:
        return None
    return joined(
        h("p", "The wheels of this artifact are without code or files that it never uses, by these rules:"),
        evidence_html(found),
    )


def download(entry: ReportEntry, what: str, ending: str, text: str, shared: Shared) -> Html:
    """Return a link that saves `text`, which the page holds, as a file that is named after the artifact.

    On a page of several receipts it is compressed, because files would be the larger part of the page.
    """
    data, form = text.encode("utf-8", "backslashreplace"), "json"
    if shared.several:
        data, form, ending = gzip.compress(data, mtime=0), "gzip", ending + ".gz"
    about = (text_of(entry.receipt, place) for place in ("recipe.name", "target", "artifact.kind"))
    name = re.sub(r"[^\w.-]+", "-", "-".join(filter(None, about))[:100]) + ending
    link = Html(f"data:application/{form};base64,{base64.b64encode(data).decode()}")
    return h("a", f"Download {what}: {name}", href=link, download=name, class_="button")


def chain(entry: ReportEntry) -> Html | None:
    """Return the links of `envbuild check`, each with its source."""
    if entry.chain is None:
        return None
    if not entry.chain:
        return h("p", "Nothing to judge: the target has no CUDA or ROCm, and the recipe no layers.")
    rows = [
        h(
            "li",
            h("span", one.subject, class_="subject"),
            badge(one.status, one.status),
            h("p", prose(one.text)),
            h("p", "Fix: ", prose(one.fix), class_="small") if one.fix and one.status != "good" else None,
            h("p", "Source: ", prose(one.source), f" ({one.date})", class_="small") if one.source else None,
            class_=_LOOKS.get(one.status, "none"),
        )
        for one in entry.chain
    ]
    return joined(h("p", f"Judged {entry.basis}."), h("ol", rows, class_="chain"))
