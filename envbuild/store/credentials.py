"""Credentials in URLs."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit, urlunsplit


def split_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """`url` without its user part, and that part as (user, password), decoded."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url, None
    user, _, host = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    return urlunsplit(parts._replace(netloc=host)), (unquote(name), unquote(password))


def with_credentials_of(url: str, index: str) -> str:
    """`url` with the user part of `index` when both are on one server: links on a page carry none."""
    mine, theirs = urlsplit(url), urlsplit(index)
    user, at, host = theirs.netloc.rpartition("@")
    if at and "@" not in mine.netloc and (mine.scheme, mine.netloc) == (theirs.scheme, host):
        return urlunsplit(mine._replace(netloc=f"{user}@{host}"))
    return url
