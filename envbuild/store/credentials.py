"""Credentials in URLs."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit, urlunsplit


def split_credentials(url: str) -> tuple[str, tuple[str, str] | None]:
    """Return `url` without credentials, and the credentials as decoded (user, password), or None."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url, None
    user, _, host = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    return urlunsplit(parts._replace(netloc=host)), (unquote(name), unquote(password))


def with_credentials_of(url: str, index: str) -> str:
    """Return `url` with the credentials of `index` if both are on one server: links on a page carry none."""
    mine, theirs = urlsplit(url), urlsplit(index)
    user, at, host = theirs.netloc.rpartition("@")
    if at and "@" not in mine.netloc and (mine.scheme, mine.netloc) == (theirs.scheme, host):
        return urlunsplit(mine._replace(netloc=f"{user}@{host}"))
    return url
