"""The interface of a container runtime, what it is told on nodes and on this host, and the words of shell scripts.

Each value in a script is quoted as one shell word or one directive value, or refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

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


def torchrun_word(word: str) -> str:
    """Return `word`, the script's path or one of its arguments, escaped so that the script gets it unchanged.

    torchrun applies string.Template to them (torch/distributed/elastic/utils/api.py): `$$` becomes `$`, and
    `$local_rank` a number.
    """
    return word.replace("$", "$$")


# The beginning of the names of a job's containers; clusters may share the file system that containers are on.
NAME_PREFIX = "envbuild-${SLURM_CLUSTER_NAME-}-$(id -u)-"

# A shell function of a node's script.
PRIVATE = r"""# All users of a node may write to the parent folder: refuse a folder that another user created there.
private() {
    (umask 077 && mkdir -p "$1") || true
    [ -n "$(find "$1" -prune -type d -user "$(id -u)" ! -perm -020 ! -perm -002)" ] ||
        stop "@NAME@ cannot use $1: it must be a folder of user $(id -u), no link, closed to other writers. Remove it"
}
"""


class Devices(Protocol):
    """The accelerator of an image's programs, as runtimes see it: a row of recipe/targets.py."""

    @property
    def apptainer(self) -> str: ...
    @property
    def visible(self) -> str: ...
    @property
    def kubernetes(self) -> str: ...
    @property
    def docker_request(self) -> bool: ...
    @property
    def docker_devices(self) -> tuple[str, ...]: ...
    @property
    def container_variables(self) -> tuple[tuple[str, str], ...]: ...


@dataclass(frozen=True, slots=True)
class NodeContainer:
    """The container of a job on each node.

    `path` is the image, and `image` the shell word for it: a variable for an image that is `staged` on the node's disk.
    `mounts` are (host, container), and `mounted_by` returns the setting that requests the mount of a host's folder.
    `scratch` is the word for the nodes' own disk, "" without one. `tidied`: the job removes containers of ended jobs.
    `envbuild` is the word for that command on nodes.
    """

    path: str
    image: str
    staged: bool
    mounts: tuple[tuple[str, str], ...]
    mounted_by: Callable[[str], str]
    devices: Devices
    scratch: str
    tidied: bool
    envbuild: str

    def binds(self, joint: str = ",") -> list[tuple[str, str, str]]:
        """Return (host, container, options) of each mount; options are joined by `joint`. Raises UsageError."""
        checked = (mount(host, container) for host, container in self.mounts)
        return [(host, place, joint.join(options)) for host, place, options in checked]


def bind_words(container: NodeContainer) -> list[str]:
    """Return a word --bind HOST:CONTAINER[:OPTIONS] for each mount of `container`."""
    return [words(["--bind", ":".join(filter(None, bind))]) for bind in container.binds()]


@dataclass(frozen=True, slots=True)
class HostProgram:
    """A program in an image on this host: `command`, with `variables`, started by the program `runtime`.

    `image` is the image file, or the name or folder of the unpacked image; `folder` of the host is shown at `inside`,
    where the program starts ("" for neither). `options` are those of the `Way`.
    """

    runtime: Path
    options: tuple[str, ...]
    image: str
    devices: Devices
    command: Sequence[str]
    variables: Mapping[str, str]
    folder: str = ""
    inside: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """A way in which a runtime opens an image file on this host; `title` goes into the receipt.

    `options` are for the runtime's command. An image that is `unpacked` is unpacked by envbuild, or by the runtime if
    `unpack` returns its command and variables, from the runtime's program, the image and an empty folder.
    """

    title: str = ""
    options: tuple[str, ...] = ()
    unpacked: bool = False
    unpack: Callable[[Path, Path, Path], tuple[list[str], dict[str, str], str]] | None = None


@dataclass(frozen=True, slots=True)
class HostStart:
    """The start of image files by an installed program, for verifications on this host.

    `programs` are its names, best first; they start images of `kinds` unless another runtime is asked for. `version`
    are the options that print its version. `variables` are prefixes of the caller's variables that configure it and its
    hooks; with `selects_devices`, it also gets the accelerator's container variables. `ways` are tried in this order.
    `command` returns the line that starts a program, and its variables besides those. `no_variables` is the likely
    reason if variables do not reach a program. A folder whose path has one of the characters `splits` cannot be shown.
    """

    programs: tuple[str, ...]
    variables: tuple[str, ...]
    command: Callable[[HostProgram], tuple[list[str], dict[str, str]]]
    kinds: tuple[str, ...] = ()
    ways: tuple[Way, ...] = (Way(),)
    version: tuple[str, ...] = ("--version",)
    selects_devices: bool = False
    splits: str = ""
    no_variables: str = ""


@dataclass(frozen=True, slots=True)
class Runtime:
    """A way to start the programs of an artifact; a row of RUNTIMES.

    `kinds` are the kinds of artifacts that it starts on nodes, its own first, or () if the artifact's form decides:
    with `host_files`, programs see the files of the node, and nothing is mounted; with `pods`, the cluster pulls the
    image and starts it. A site names a runtime with kinds.

    On nodes, `words` returns the words that start a command in the container, quoted for the shell. `start` returns
    the lines of a node's shell script that start a program in it, where words are not enough. `step_options` returns
    options of `launcher`, which alone starts the container then; under schedulers without it, the runtime `instead`
    does. `tidy` is a script that removes containers that ended jobs under srun left. `caches` returns variables for
    caches and temporary files, from the site's folders for both.

    `host` starts image files of this host, in a verification; None if only nodes can.
    """

    kinds: tuple[str, ...] = ()
    host_files: bool = False
    pods: bool = False
    words: Callable[[NodeContainer], list[str]] | None = None
    start: Callable[[NodeContainer, str], str] | None = None
    launcher: str = ""
    step_options: Callable[[NodeContainer], list[str]] | None = None
    instead: str = ""
    tidy: str = ""
    caches: Callable[[str, str], dict[str, str]] = lambda cache, scratch: {}
    host: HostStart | None = None
