"""Values in scripts: each is quoted as one shell word or one directive value, or refused."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from envbuild.base.errors import UsageError

# Batch systems refuse or cut scripts with carriage returns, NUL and other control characters.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
# Slurm and PBS do not read all characters alike in a directive; Slurm also expands %.
_DIRECTIVE = re.compile(r"[^\s\"'\\#%`\x00-\x1f\x7f]+")
_OPTIONS = re.compile(r"[a-z-]+(,[a-z-]+)*")
_MOUNT = re.compile(r"/[^\s:,\"'\\\x00-\x1f\x7f]*")


def word(value: str, name: str = "a value") -> str:
    """Return `value` as one word for POSIX shells. `name` names it in errors.

    Raises UsageError for text that no script can contain: control characters except tab and newline, and text
    that is not Unicode.
    """
    if control := _CONTROL.search(value):
        raise UsageError(
            f"{name} has the control character {control.group()!r}: {value!r}",
            "job scripts hold text, tabs and newlines",
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not Unicode: {value!r}", "rename it") from error
    return shlex.quote(value)


def path_word(value: str, name: str) -> str:
    """Return `value`, a path or a name, like `word`. Raises UsageError also for newlines and tabs."""
    if not value or not value.isprintable():
        raise UsageError(f"{name} is not one line of text: {value!r}", "rename it")
    return word(value, name)


def words(values: Iterable[str], name: str = "a value") -> str:
    """Return `values` as words, separated by spaces."""
    return " ".join(word(value, name) for value in values)


def fill(template: str, **values: str | int) -> str:
    """Return `template` with each @NAME@ replaced. Inserted values are not searched again."""
    return re.sub(r"@([A-Z]+)@", lambda match: str(values[match[1].lower()]), template)


def heredoc(command: str, text: str, end: str) -> str:
    """Return `command` with `text` as its standard input; `end` marks the end, lengthened until no line equals it."""
    lines = set(text.splitlines())
    while end in lines:
        end += "_"
    return f"{command} <<'{end}'\n{text.rstrip()}\n{end}"


def directive(option: str, value: str, name: str) -> str:
    """Return `option` and `value` for a directive; `name` names the value's setting.

    Raises UsageError for a value that schedulers would cut or expand.
    """
    if not _DIRECTIVE.fullmatch(value):
        raise UsageError(
            f"{name} cannot be part of a directive: {value!r}", "no spaces, quotes, backslashes, # or % there"
        )
    return f"{option}{value}"


def directive_line(line: str) -> str:
    """Return a line that the site adds. Raises UsageError unless it is one line."""
    if not line or not line.isprintable():
        raise UsageError(f"[scheduler] directives: {line!r} is not one line of text")
    return line


def mount(host: str, container: str) -> tuple[str, str, tuple[str, ...]]:
    """Return a mount's two paths and its options (`container` may have options: `/data:ro`).

    Raises UsageError for paths with characters at which container runtimes split them.
    """
    place, _, options = container.partition(":")
    for path in (host, place):
        if not _MOUNT.fullmatch(path):
            raise UsageError(
                f"containers cannot mount {path!r}",
                "only absolute paths without spaces, colons, commas and quotes; choose another --work",
            )
    if options and not _OPTIONS.fullmatch(options):
        raise UsageError(f"{options!r} are not options of a mount", "such as ro; change [container] mounts")
    return host, place, tuple(filter(None, options.split(",")))


def inside(path: str, mounts: Sequence[tuple[str, str]]) -> str:
    """Return the path in a container for the host's `path`, by the longest of `mounts`.

    Raises UsageError if none covers it.
    """
    best: tuple[str, str] | None = None
    for host, container in mounts:
        root = host.rstrip("/")
        shows = path == host or path.startswith(f"{root}/")
        if shows and (best is None or len(root) > len(best[0])):
            best = (root, container.partition(":")[0].rstrip("/"))
    if best is None:
        raise UsageError(f"containers do not see {path}: it is in no mount", "add it to [container] mounts of the site")
    return best[1] + path[len(best[0]) :] or "/"
