"""Directives of job scripts: their options, and the facts about each scheduler's scripts that the lint needs.

The scheduler modules of `envbuild job` define these facts; callers of the lint pass them on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# A scheduler directive in a script: its line number and words.
Directive = tuple[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ScriptFacts:
    """Facts about a scheduler's job scripts, for `envbuild lint-job`.

    `marker` begins a directive, `variables` is the prefix of the scheduler's variables, and `nodes` finds (line,
    number of requested nodes) in directives. A script that saves snapshots should have one of `requeue`, unless that
    is empty. `pattern` matches markers that have several spellings. `output` are the options that name files of the
    job's output. `folder` are the options that choose the folder in which a script starts, if that is the home folder
    by default. `own_steps`: steps do not take the CPUs of their tasks from the job. `strict`: a script must begin with
    an interpreter's line. `expands` matches the variables that directives expand, None if that is unknown. `delivers`:
    the output comes at the end, unless one of these directives is there. `submitted` is the variable with the folder
    of the submission, if the scheduler runs a copy of the script elsewhere. `optional` are the variables of a job that
    only these directives set. `cpus` returns the CPUs that the directives give to one process on each node, None if
    unknown. `whole` are the directives that ask for whole nodes. `shell` is the option that names the
    interpreter, which a script's first line need not do. `chunks`: resources are requested in chunks.
    `reads_on`: it may read directives behind the first command; the documentation leaves it open.
    """

    marker: str
    variables: str
    nodes: Callable[[Iterable[Directive]], tuple[int, int] | None]
    requeue: frozenset[str] = frozenset()
    pattern: str = ""
    output: tuple[str, ...] = ()
    folder: tuple[str, ...] = ()
    own_steps: bool = False
    strict: bool = False
    expands: str | None = None
    delivers: tuple[str, ...] = ()
    submitted: str = ""
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cpus: Callable[[Sequence[Directive]], int | None] = lambda directives: None
    whole: tuple[str, ...] = ()
    shell: str = ""
    chunks: bool = False
    reads_on: bool = False


def option_values(words: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Yield the values in `words` of the options with these names: --NAME=VALUE, --NAME VALUE, -N VALUE, -NVALUE."""
    for number, word in enumerate(words):
        name, equal, value = word.partition("=")
        if name in names:
            yield value if equal else "".join(words[number + 1 : number + 2])
        elif len(word) > 2 and word[:2] in names and word[1] != "-":
            yield word[2:]


def whole_number(text: str) -> int | None:
    """Return a number of nodes or tasks, None for any other text or an unrealistic number."""
    return int(text) if text.isdecimal() and len(text) < 10 else None
