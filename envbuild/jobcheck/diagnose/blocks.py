"""Blocks of log lines: the program's own error message, and messages of Open MPI.

A log may mix the lines of many ranks. The program's error message is its first exception or, in a log without
tracebacks, its most specific line. A traceback has the format of Python (traceback.c), of rich (a box) or of IPython;
its begin or its indentation may be missing. Each line may have a prefix that names its process (`[rank0]: `, `0: `,
`[pod/ddp-worker-0/pytorch] `).

A message of Open MPI or PRRTE begins and ends with a line of 74 dashes (opal/util/show_help.c, "dash_line"); it is
read as one line of text.
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

BEGIN = "Traceback (most recent call last)"
FRAME = 'File "'
BOXED = "│ ❱ "
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line \d+')
_FRAME_IN = re.compile(r'(?P<prefix>.*?)(?:  )?File "[^"]+", line \d+, in ')
_BOX = re.compile(r"[╭+][─-]+ $")
_BOXED = re.compile(r"\s*[│|] (?P<file>\S[^:]*\.py):\d+ *(?:in |[│|]\s*$)")
_IN_NOTEBOOK = re.compile(r"(?:File )?(?P<file>[/~<\[]\S*?)(?::\d+)?,? in ")
_ARROW = re.compile(r"\s*(?:[│|] ❱|-{2,4}>)")
_HEADER = re.compile(r"\b(?P<name>[A-Z]\w*(?:Error|Exception|Interrupt|Exit))\s{3,}$")
_MARKS = re.compile(r"[\s^~]*$")
_EXCEPTION = re.compile(
    r"(?P<module>(?:\w+\.)*)(?P<name>[A-Z]\w*|(?<=\.)(?:error|timeout|gaierror))(?:\(\w+\))?(?:: |:?\s*$)"
)
# Characters of the path of an exception's class, which is no part of the line's prefix.
_OF_PATHS = string.ascii_letters + string.digits + "_."
_USUAL = ("Error", "Exception", "Warning", "Expired", "Timeout", "Failure", "Interrupt", "Exit", "Iteration")
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python3|^<frozen ")
_LAUNCHER = re.compile(r"/torch/distributed/(?:run|launch|launcher/api)\.py$|/bin/torchrun$")
_OF_TORCHRUN = "torch.distributed.elastic."
_ENDS = ("SystemExit", "KeyboardInterrupt")
_CHAINED = re.compile(r"During handling of the above exception|The above exception was the direct cause")
# Reports of Python and its logging about exceptions that do not end the program.
_IGNORED = re.compile(r"Exception ignored in|--- Logging error ---")
# NumPy prints this exception of an extension and goes on: its import may succeed.
_PRINTED = "_ARRAY_API not found"
# Exceptions that report another process' failure, or another exception that stands elsewhere in the log.
_RELAYS = re.compile(
    r"CalledProcessError|ChildFailedError|process \d{1,4} terminated with exit code|\bExceptionGroup: "
    r"|Process(?:Raised|Exited)Exception|RemoteTraceback|RayTaskError|TrainingFailedError|AlgorithmError|RuleException"
    r"|Caught \w{1,60} in (?:DataLoader worker|replica|pin memory)|is killed by signal: Terminated"
    r"|(?:Engine core|WorkerProc) initialization failed|EngineDeadError|Background loop has errored"
    r"|Engine (?:loop|process) (?:has died|failed)|One or more workers? failed|^Exception: *$|BackendCompilerFailed"
    r"|BrokenPipeError: \[Errno 32\]"
)
_FROM_PARENT = "pickle.load(from_parent)"
# Timestamps, which differ between the lines of a traceback and are removed from their prefixes.
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ][\d:.,]+|\d\d:\d\d:\d\d[\d.,]*")
# pydantic's exception names the field in the next line, and the reason behind it.
_OF_FIELDS = re.compile(r"\b\d{1,4} validation errors? for \S+\s*$")
# A line that begins a record of a logger, and is no further line of a message.
_RECORD = re.compile(r"\s*(?:\[?\d{4}-|\[?[IWEF]\d{4} |\[?(?:INFO|WARNING|ERROR|DEBUG)\b|\[rank\d|srun: )")
# The maximum of lines per traceback, of open tracebacks, and of a message after its first line.
_LONGEST = 1000
_MOST = 256
_MESSAGE = 4
# A traceback whose end is missing is given up after so many lines of all processes.
_GIVEN_UP = 50_000
NAMED_EXCEPTION = re.compile(
    r"\b(?<!raise )[A-Z]\w{0,80}(?:Error|Exception|NotFound|Refused|Expired|Failure)\b(?::(?: \S|\s*$)|\([\"'])"
)
# Lines after which scripts and programs mostly continue: a refusal of a command, or a note of a library.
REMARK = re.compile(
    r"\bslurm(?:stepd|d)\S{0,60}: error: |\b(?:ModuleNotFound|Import)Error: |\bNo module named '|was compiled without"
    r"|compiled using NumPy 1\.x|\bnvcc fatal|\bunsupported \w{3,9} version! |\bfatal error(?:: '| C1083: )"
    r"|: (?:(?:command )?not found|No such file or directory|Permission denied)\s*$|\bNCCL INFO |\bOpenBLAS |\bkernel: "
    r"|^(?:\S{1,60}: )?(?:tee|mkdir|cp|mv|ln|git|fatal|ssh|scp|rsync|curl|wget|wandb|nvidia-smi)\b.{0,40}: |^which: no "
    r"|^Host key verification failed|^Failed to initialize NVML|^No devices were found|\bslurm_\w{3,40}\b.{0,9} error: "
)
# Refusal by a shell, whose script goes on unless it has `set -e`.
OF_SHELL = re.compile(
    r"(?:: line \d{1,6}|^(?:\S{0,100}/)?(?:ba|z|da)?sh): .{1,300}"
    r": (?:(?:command )?not found|No such file or directory|Permission denied)\s*$"
    r"|^(?:tee|mkdir|cp|mv|ln|rm|rmdir|chmod|touch|find): .{1,300}|^which: no "
)
# A remark, or an exception.
SURVIVED = re.compile(rf"{NAMED_EXCEPTION.pattern}|{REMARK.pattern}")
WARNING = re.compile(r"\b(?:[A-Z]\w{0,80})?[Ww]arning: |\bWARN(?:ING)?\b|(?:^|\s)\[?W(?:\d{4})? |: W \w+/")
# Warnings of a fault: NCCL has no other word for an error, and torch goes on without a peer or GPU that it cannot use.
GRAVE = re.compile(
    r"\bNCCL WARN\b|\[c10d\]|CUDA initialization: |is not compatible with the current PyTorch|\bWARN: Function: "
)
# The program says in the same line that it continues.
GOES_ON = re.compile(
    r"\b(?:[Ss]kipping|[Ss]kipped|[Ii]gnor(?:ed|ing)|[Rr]etrying(?! \(\d+/)|[Ff]all(?:ing|s)? ?back|[Cc]ontinuing"
    r"|still trying|(?<!not )recovered|accepting this|will be unavailable|will be disabled)\b"
)
_ABORTED = re.compile(
    r"\bwhat\(\): +\S|libuv\.h:\d{1,6}\] uv_\w+: |: Assertion [`'\"].{1,300}['\"`] failed|panicked at "
)
_OF_COMPILERS = re.compile(
    r"(?::\d{1,6}|\(\d{1,6}\)): (?:fatal )?error: |\b(?:nvcc|ptxas) fatal|: undefined reference to |: cannot find -l"
    r"|^CMake Error"
)
_ERROR_LINE = re.compile(
    r"\b(?:FATAL|[Ff]atal|[Ee]rror|ERROR|panic)(?:\]?: ?|  ?: |  +\[|\]? (?=[A-Z]))\S|NCCL WARN \S|^Memory access fault"
    r"|\bforrtl: (?:severe|error) "
)
_REFUSAL = re.compile(
    r"^(?!.*(?:[Ww]arn|WARN|errno: 97 |\bINFO\b|\bDEBUG\b|NOTE: Redirects))"
    r".*\b(?:[Uu]nable to|[Cc]annot|[Cc]ould not|[Cc]ouldn't|[Cc]an't|[Ff]ailed to"
    r"|exiting\b(?! without)|[Aa]borting|must (?:be|not)|not (?:found|supported|permitted)"
    r"|has no attribute '|but current state is|[Dd]enied|[Rr]efused|No such"
    r"|[Uu]nreachable|[Tt]imed out|[Aa]borted(?! \(core))"
)
_MENTION = re.compile(
    r"^(?!.*(?:[Ww]arn|WARN|\bINFO\b|\bDEBUG\b|level=(?:info|debug)|[Ff]ailed[=:] ?0\b))"
    r".*\b(?:\w*Error|\w*Exception|ERROR|FAILED|[Ff]ailed|[Cc]rashed)\b"
)
_OF_LAUNCHERS = re.compile(
    r"ChildFailedError|^\S+ FAILED$|failed \(exitcode|srun: error: |CANCELLED AT|\berror_file: |: ?None$"
    r"|\bframe #\d|MPI_ABORT was invoked|Failed to invoke spank plugin stack|Job step aborted|Unable to register cu\w+"
    r"|^\W*(?:FAILED|ERROR|Failed)\b\W*(?:(?:done )?(?:at|on)\b.{0,60})?$"
    r"|\(ignored\)\s*$|Exception ignored in|non-zero exit code\. Per user-direction|FAILED with no error file"
    r"|_ARRAY_API not found"
)
# Each line that decides contains one of these.
SIGNS = (
    *("Error", "Exception", "what():", "Assertion", "panicked at ", "error: ", "fatal", "FATAL", "ERROR", "panic"),
    *("undefined reference to ", "cannot find -l", "exiting", "borting", "borted", "not found", "not supported"),
    *("must be", "must not", "nable to", "cannot ", "Cannot ", "ould not", "ouldn't", "can't ", "Can't ", "imed out"),
    *("NCCL WARN", "Memory access fault", "not permitted", "denied", "Denied", "efused", "No such", "nreachable"),
    *(
        "forrtl: ",
        "current state is",
        "has no attribute '",
        BOXED,
        "FAILED",
        "failed",
        "Failed",
        "crashed",
        "Crashed",
        "libuv.h",
    ),
)
RULE = "-" * 74
# Longer ones are no message, but lines between two tables.
_LONGEST_HELP = 60
_SHOWN_HELP = 1000


class Line(NamedTuple):
    """Line of a log."""

    file: str
    number: int
    text: str


class Weight(IntEnum):
    """Weight of a message as an explanation; of equal weights the first message counts, but up to ERROR the last."""

    NOTHING = 0
    MENTION = 1
    FRAME = 2
    RELAY = 3
    REFUSAL = 4
    ERROR = 5
    NAMED = 6
    COMPILER = 7
    ENDED = 8


@dataclass(slots=True)
class Words:
    """Error message of a program: its lines, the number of the decisive line, and the `marks` of the lines.

    `led` is the last exception that the one in `lines` caused, `at` the offset of the decisive text in a single line.
    """

    weight: Weight = Weight.NOTHING
    lines: tuple[Line, ...] = ()
    order: int = 0
    marks: set[Hashable] = field(default_factory=set)
    led: tuple[Line, ...] = ()
    at: int = 0


@dataclass(slots=True)
class _Open:
    """Traceback whose exception has not been read: its last frame, and the last frame in the program's own files.

    `name` is the exception in IPython's header, `boxed` whether rich's box is open, `bare` whether the previous line is
    a frame without indentation, `indent` the indentation of the last frame.
    """

    last: list[Line] = field(default_factory=list)
    own: list[Line] = field(default_factory=list)
    lines: int = 0
    framed: bool = False
    launcher: bool = False
    ignored: bool = False
    name: str = ""
    boxed: bool = False
    bare: bool = False
    indent: int = 0


@dataclass(slots=True)
class _After:
    """State after the best message: it continues in the next line if `open`, or may cause another exception."""

    prefix: str
    open: bool
    lines: int = 0
    message: bool = True
    chain: bool = False
    led: bool = False


@dataclass(slots=True)
class Exceptions:
    """Reader of log lines that finds the program's best error message, `words`, except torchrun's and ignored ones.

    The frames before an exception are its location.
    """

    best: Words = field(default_factory=Words)
    _file: str = ""
    _begun: int = 0
    _open: dict[str, _Open] = field(default_factory=dict)
    _after: _After | None = None

    @property
    def open(self) -> bool:
        """Whether every line must be read; else only lines with a text that marks a traceback or an error."""
        return self._after is not None or bool(self._open)

    @property
    def words(self) -> Words:
        """Best error message; in a log that ends within a traceback and has no other message, the last frames."""
        frames = next(
            (trace for trace in self._open.values() if trace.last and not trace.launcher | trace.ignored), None
        )
        # A program continues after its messages before a traceback.
        late = frames is not None and self.best.weight <= Weight.REFUSAL and self.best.order < self._begun
        if frames is None or (self.best.weight > Weight.FRAME and not late):
            return self.best
        # The exception of another process names the class of the one whose traceback was cut.
        relayed = self.best.lines if self.best.weight == Weight.RELAY else ()
        return Words(Weight.FRAME, tuple(dict.fromkeys((*relayed, *frames.own, *frames.last))), self._begun)

    def read(self, line: Line, before: str, order: int, marks: Collection[Hashable]) -> None:
        """Read the next line, which follows the line `before` of its file and has `marks`."""
        if line.file != self._file or order > self._begun + _GIVEN_UP:
            self._file = line.file
            self._open.clear()
            self._after = None
        plain = _TIME.sub("", line.text)
        if self._after and self._follows(self._after, line, plain, marks):
            return
        if self.best.weight == Weight.ENDED and not (self._after and self._after.led):
            self._open.clear()
            return
        # A record in JSON holds a whole traceback in one line.
        whole = f"{BEGIN}:\\n" in plain
        if BEGIN in plain and not whole:
            self._begin(plain, before, order)
        elif plain and not self._go_on(line, before, plain, order, marks) and self.best.weight < Weight.ENDED:
            self._decide(line, plain, order, marks)

    def _begin(self, plain: str, before: str, order: int) -> None:
        if len(self._open) >= _MOST:
            return
        prefix = plain[: plain.index(BEGIN)]
        trace = _Open(ignored=_IGNORED.search(before) is not None)
        if box := _BOX.search(prefix):
            trace.boxed = True
            prefix = prefix[: box.start()]
        elif header := _HEADER.search(prefix):
            trace.name = header["name"]
            prefix = prefix[: header.start()]
        if self._after and prefix != self._after.prefix and self.best.weight < Weight.ENDED:
            self._after = None
        if self._after is None or prefix == self._after.prefix:
            self._open[prefix] = trace
            self._begun = order

    def _without_bar(self, plain: str, before: str) -> None:
        """Correct the prefix of a traceback begun after a progress bar in the line before, by its first frame."""
        bar, begun, _ = _TIME.sub("", before).partition(BEGIN)
        prefix, frame, _ = plain.partition('  File "')
        known = not begun or not frame or prefix in self._open
        if not known and bar in self._open and (bar.startswith(prefix) or bar.endswith(prefix)):
            self._open[prefix] = self._open.pop(bar)

    def _go_on(self, line: Line, before: str, plain: str, order: int, marks: Collection[Hashable]) -> bool:
        """Return whether the line belongs to a traceback."""
        self._without_bar(plain, before)
        prefix = max((known for known in self._open if plain.startswith(known)), key=len, default=None)
        if prefix is None:
            # A traceback whose begin is missing.
            frame = None if self._after or len(self._open) >= _MOST else _FRAME_IN.match(plain)
            prefix, box, _ = plain.partition(BOXED)
            if frame is None and not box:
                return False
            prefix, self._begun = frame["prefix"] if frame else prefix, order
            self._open[prefix] = _Open(boxed=frame is None)
        trace = self._open[prefix]
        trace.lines += 1
        text = plain[len(prefix) :]
        match, belongs = _exception(trace, line, text, before)
        match = match or _indented_exception(trace, text, whole=prefix.isspace())
        if match is not None or trace.lines > _LONGEST:
            del self._open[prefix]
        if match is None:
            return belongs
        if trace.ignored or trace.launcher or match["name"] in _ENDS or match["module"].startswith(_OF_TORCHRUN):
            return True
        if _PRINTED in text:
            return True
        if self._after:
            self.best.led = (line,)
            self.best.marks.update(marks)
            self._after = _After(prefix, _is_open(text), chain=True)
            return True
        # A child of multiprocessing whose parent failed has its exception from that.
        relayed = _RELAYS.search(text) or any(_FROM_PARENT in row.text for row in trace.last)
        weight = Weight.RELAY if relayed else Weight.ENDED
        lines = tuple(dict.fromkeys((*trace.own, *trace.last, line)))
        self._propose(Words(weight, lines, order, set(marks)), prefix, text)
        return True

    def _propose(self, words: Words, prefix: str, text: str) -> None:
        late = words.weight in (Weight.MENTION, Weight.REFUSAL, Weight.ERROR)
        if words.weight > self.best.weight or (late and words.weight == self.best.weight):
            self.best = words
            self._after = _After(prefix, _is_open(text), chain=words.weight == Weight.ENDED)
            if words.weight == Weight.ENDED:
                self._open.clear()

    def _follows(self, after: _After, line: Line, plain: str, marks: Collection[Hashable]) -> bool:
        """Return whether `line` continues the best message, or announces another exception caused by it."""
        after.lines += 1
        if after.led:
            if after.lines > _LONGEST:
                self._after = None
            return False
        # Other processes may write in between.
        mine = plain.startswith(after.prefix.rstrip())
        text = plain[len(after.prefix) :] if mine else ""
        if mine and after.chain and _CHAINED.search(text):
            after.led, after.lines = True, 0
            return True
        if mine and after.message and text.strip():
            indented = text[:1] in (" ", "\t")
            other = BEGIN in text or _FRAME.match(text) or _RECORD.match(text) or _ABORTED.search(text)
            taken = (indented or after.open) and not other and after.lines <= _MESSAGE
            after.message = taken
            if taken:
                where = "led" if self.best.led else "lines"
                setattr(self.best, where, (*getattr(self.best, where), line))
                self.best.marks.update(marks)
                after.open = _is_open(text)
                return True
        ended = not after.message and (not after.chain or BEGIN in text)
        self._after = None if ended or after.lines > _MESSAGE else after
        return False

    def _decide(self, line: Line, plain: str, order: int, marks: Collection[Hashable]) -> None:
        """Replace the best message by a line outside of tracebacks with a higher weight."""
        if _OF_LAUNCHERS.search(plain):
            return
        # Line ends of text in JSON: an exception begins behind one.
        plain = plain.replace("\\n", " \n")
        for weight, regex in _DECISIVE:
            if weight < self.best.weight:
                return
            if match := regex.search(plain):
                relay = weight == Weight.NAMED and _RELAYS.search(plain[match.start() :])
                words = Words(Weight.RELAY if relay else weight, (line,), order, set(marks), at=match.end())
                prefix = plain[: match.start()].rstrip(_OF_PATHS) if weight == Weight.NAMED else ""
                self._propose(words, prefix, plain)
                return


_DECISIVE = (
    (Weight.ENDED, _ABORTED),
    (Weight.COMPILER, _OF_COMPILERS),
    (Weight.NAMED, NAMED_EXCEPTION),
    (Weight.ERROR, _ERROR_LINE),
    (Weight.REFUSAL, _REFUSAL),
    (Weight.MENTION, _MENTION),
)


def _is_open(text: str) -> bool:
    """Return whether the message in `text` continues in the next line."""
    return text.rstrip().endswith((":", "(")) or _OF_FIELDS.search(text) is not None


def _exception(trace: _Open, line: Line, text: str, before: str) -> tuple[re.Match[str] | None, bool]:
    """Return the match of the exception that ends the traceback `trace`, and whether `line` belongs to it.

    A frame is stored in `trace`; `text` is Python's part of the line.
    """
    if trace.boxed or trace.name:
        return _in_frame_of_others(trace, line, text, before)
    frame = _FRAME.match(text)
    if frame or text[:1] in (" ", "\t") or trace.bare:
        if frame:
            trace.launcher |= _LAUNCHER.search(frame["file"]) is not None
            trace.indent = len(text) - len(text.lstrip())
            trace.last = [line]
            if not _LIBRARY.search(frame["file"]):
                trace.own = trace.last
        elif len(trace.last) == 1 and not _MARKS.match(text):
            trace.last.append(line)
        trace.bare = frame is not None and text.startswith("File")
        trace.framed = True
        return None, True
    match = _EXCEPTION.match(text)
    # Other processes may write between its lines.
    ended = match if match and (trace.framed or match["name"].endswith(_USUAL)) else None
    if text.strip():
        trace.framed = False
    return ended, not text.strip()


def _indented_exception(trace: _Open, text: str, *, whole: bool) -> re.Match[str] | None:
    """Return the match of an exception that is indented and ends `trace`, a traceback of Python with its frames.

    An exception is indented no further than the frame before it, or has no message in a traceback that is indented as
    a `whole`; the lines of a frame's source are indented further.
    """
    stripped = text.lstrip()
    if len(trace.last) < 2 or stripped == text or trace.boxed or trace.name:
        return None
    match = _EXCEPTION.match(stripped)
    if match is None or not match["name"].endswith(_USUAL) or match["name"].endswith("Warning"):
        return None
    further = len(text) - len(stripped) > trace.indent
    return match if not further or (whole and match.end() == len(stripped)) else None


def _in_frame_of_others(trace: _Open, line: Line, text: str, before: str) -> tuple[re.Match[str] | None, bool]:
    """Read a line of a traceback of rich or IPython as _exception does."""
    if trace.boxed and text.lstrip().startswith(("╰", "+--")):
        trace.boxed, trace.framed = False, True
        return None, True
    if frame := (_BOXED if trace.boxed else _IN_NOTEBOOK).match(text):
        trace.last = [line]
        # A box may break the path into two lines.
        if not _LIBRARY.search(before + frame["file"] if trace.boxed else frame["file"]):
            trace.own = trace.last
    elif _ARROW.match(text) and len(trace.last) < 2:
        trace.last.append(line)
    match = None if trace.boxed or not text.startswith(trace.name) else _EXCEPTION.match(text)
    return match, match is not None or trace.boxed or text[:1] in (" ", "-", "\t", "~", "/", "<", "[", "F")


@dataclass(slots=True)
class HelpBlock:
    """Reader of a message block; `open` until the block ends, so that every line must be read."""

    open: bool = False
    _prefix: str = ""
    _lines: list[Line] = field(default_factory=list)

    def read(self, line: Line) -> tuple[Line, str] | None:
        """Read a line; return the first line of a block and its text if this line ends it."""
        prefix, ruled, rest = line.text.partition(RULE)
        if not ruled or rest.strip("- "):
            if self.open and line.text.removeprefix(self._prefix).strip():
                self._lines.append(line)
                if len(self._lines) > _LONGEST_HELP:
                    self.open, self._lines = False, []
            return None
        lines = self._lines
        # Two rules without text between them: the second one begins a block.
        self.open, self._prefix, self._lines = not self.open or not lines, prefix, []
        texts = (row.text.removeprefix(prefix) for row in lines)
        text = " ".join(" ".join(texts).split())
        return (lines[0], text[:_SHOWN_HELP]) if text else None
