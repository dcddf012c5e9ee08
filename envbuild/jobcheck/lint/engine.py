"""Search for faults in handwritten job scripts: sbatch, PBS and shell scripts, Kubernetes manifests.

The rules check which programs a script starts on which nodes (shell.py); their messages are in
data/job_faults.toml. This does not replace shellcheck. A line that ends in `# lint-job: ignore` (or `ignore
ID`) is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from envbuild.base.errors import UsageError
from envbuild.base.masking import redact
from envbuild.jobcheck.lint import environment, faults, rendezvous, resources, slips, status
from envbuild.jobcheck.lint.directives import ScriptFacts, whole_number
from envbuild.jobcheck.lint.faults import LEVELS, LintRule, load_faults
from envbuild.jobcheck.lint.kubernetes import lint_manifest
from envbuild.jobcheck.lint.launch import Launch, before_program
from envbuild.jobcheck.lint.rendezvous import GIVEN, sets_elsewhere
from envbuild.jobcheck.lint.script import Fault, ParsedScript, read_script

_LARGEST = 2 << 20
_MANIFEST = re.compile(r"^(apiVersion|kind)\s*:", re.MULTILINE)
# Each of_… of these modules is a rule. In this order, the first fault of a kind in a line counts.
_MODULES = (rendezvous, slips, environment, faults, status, resources)
RULES: tuple[Callable[[ParsedScript], Iterator[Fault]], ...] = tuple(
    rule for module in _MODULES for name, rule in vars(module).items() if name.startswith("of_")
)
# Names of templates, and the faults that a template has on purpose.
_TEMPLATE = re.compile(r"template[^/]*$|\.(?:tmpl|tpl|mako|j2|jinja2?)$")
_OF_TEMPLATES = ("directive-variable", "placeholder")
# Files of other languages. One with a scheduler's directives is a job script all the same.
_OTHER_FILE = re.compile(r"\.(?:py|ipynb|toml|json|txt|md|log|out|err|c|cpp|cu)$")
_JOB = re.compile(r"^(?:#!.*sh\b|#(?:SBATCH|PBS|BSUB|COBALT|OAR|PJM)\b|#\s*flux:)", re.MULTILINE)
_EXPECTED = "give the script that sbatch, qsub, bsub, flux or kubectl gets"
_IGNORED = "lint-job: ignore"
_COMPONENTS = re.compile(r"^#SBATCH\s+(?:het|pack)job|--(?:het|pack)-group|^[ \t]*srun\b.* : ", re.MULTILINE)
_OF_OTHERS = re.compile(r"\bYOUR[ _]|\b[Yy]our [\w.]+\.py|^(?:#[A-Z]+ .*@[A-Z]{3}|salloc |!\w|https?:)", re.MULTILINE)
_OPENS = re.compile(r"(?:^|[;&|{]|\b(?:then|else|do))\s*(?:if|case|while|until)\b")
_CLOSES = re.compile(r"(?:^|[;&|]|\b(?:then|else|do)\s)\s*(?:fi|esac)\b|^\s*done\b")
_LOOPS = re.compile(r"(?:^|;)\s*(?:for|select)\b")
_CONDITION = re.compile(r"^\s*(?:\[.*\]|test .*|\(\(.*\)\))\s*(?:&&|\|\|)")
_EXIT = re.compile(r"^exit\b")
_NAME = re.compile(r"\$\{?(\w+)")
_VALUE = re.compile(r"(?<!\\)\$\{?(\w+|[@*])(?:\[[^]]*\])?(:?[-=+?])?")
_LOOP_NAME = re.compile(r"\bfor (\w+) in\b")
_SHOWN = 500  # characters of a line, and of a value in a message


@dataclass(frozen=True, slots=True)
class Problem:
    """Fault in a line of a script."""

    fault: LintRule
    file: str
    line: int
    text: str
    message: str
    hint: str

    def as_json(self) -> dict[str, Any]:
        """Return the fields for --json, which calls a message `what` and a hint `instead`."""
        place = {"file": self.file, "line": self.line, "text": self.text}
        return {"id": self.fault.id, "level": self.fault.level, **place, "what": self.message, "instead": self.hint}


def lint_file(path: Path, schedulers: Mapping[str, ScriptFacts]) -> list[Problem]:
    """Return the problems of a script or manifest; `schedulers` are the facts about the scripts of each scheduler.

    Raises UsageError for a file that cannot be read, is too large, is not text or is of another language.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise UsageError(f"{path} is too large for a job script")
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text", _EXPECTED) from None
    if _OTHER_FILE.search(path.name) and not (_JOB.search(text) and path.suffix not in (".out", ".err", ".log")):
        raise UsageError(f"{path} is neither a shell script nor a manifest", _EXPECTED)
    return lint(text, str(path), schedulers)


def lint(text: str, name: str, schedulers: Mapping[str, ScriptFacts]) -> list[Problem]:
    """Return the problems of a script or manifest, sorted by line."""
    lines = text.splitlines()
    # Carriage returns are reported once, as dos-lines, and not by each rule that meets them.
    script = None if is_manifest(text, name) else read_script(text.replace("\r\n", "\n"), schedulers)
    findings = lint_manifest(text, name) if script is None else chain.from_iterable(rule(script) for rule in RULES)
    if script is not None and "\r\n" in text:
        findings = chain([Fault("dos-lines", 1)], findings)
    scheduler = script.scheduler if script is not None else ""
    rows = load_faults()
    problems: dict[tuple[int, str], Problem] = {}
    for finding in findings:
        fault = replace(rows[finding.id], level=finding.level or rows[finding.id].level)
        if fault.level != "hint" and fault.of_nodes and script is not None and script.several == "several":
            fault = replace(fault, level="hint")  # the number may be 1
        if fault.level == "error" and not (_is_proven(script, finding, fault) if script else "{{" not in text):
            fault = replace(fault, level="warning")
        at = min(max(finding.line, 1), max(len(lines), 1))
        line = lines[at - 1] if lines else ""
        if _ignored(line, finding.id):
            continue
        if finding.id in _OF_TEMPLATES and _TEMPLATE.search(name):
            fault = replace(fault, level="hint")
        advice = fault.of_scheduler.get(scheduler) or fault.hint
        message, hint = (
            redact(text.replace("{nodes}", finding.nodes).replace("{value}", finding.value[:_SHOWN]))
            for text in (fault.message.replace("torchrun", finding.program, 1), advice)
        )
        problem = Problem(fault, name, at, redact(line.strip())[:_SHOWN], message, hint)
        problems.setdefault((at, finding.id), problem)
    return sorted(problems.values(), key=lambda p: (p.line, LEVELS.index(p.fault.level)))


def _is_proven(script: ParsedScript, finding: Fault, fault: LintRule) -> bool:
    """Return whether the script alone proves a finding.

    It does not if the caller, the environment, another file or a branch may change it, or if the script is a template.
    """
    if script.template or _COMPONENTS.search(script.text) or _OF_OTHERS.search(script.text):
        return False
    directive = any(line == finding.line for line, _ in script.directives)
    if not directive and _conditional(script, finding.line):
        return False
    if not (fault.of_nodes or fault.of_values):
        return True
    every = (script.directive("--ntasks", "-n") if script.has_steps else None) or (0, "")
    if not script.directives or (whole_number(every[1]) or 10**9) < (script.nodes or (0, 0))[1]:
        return False  # the number of starts is unknown, or Slurm takes fewer nodes
    begun = (command.line for command in script.commands if not command.captured)
    at = max((line for line in begun if line <= finding.line), default=0)
    own = [command for command in script.commands if directive or command.line == at]
    launches = [launch for launch in script.launches if launch.command in own]
    words = [word for launch in launches for word in _deciding(launch)]
    if not launches:
        words = [word for command in own for word in before_program(script.variables.expanded(command.words))]
    if _free(script, words) or any(command.function for command in own) or sets_elsewhere(script):
        return False
    read = {name for command in own for word in command.words for name in _NAME.findall(word)}
    return "PET_" not in script.text and all(len(set(script.values.get(name, ()))) < 2 for name in read)


def _deciding(launch: Launch) -> Iterator[str]:
    """Yield the words that decide how many torchruns and ranks a launch starts, and where."""
    yield from launch.around
    yield from (launch.options.get(name, "") for name in ("nnodes", "nproc-per-node", "node-rank"))
    yield from () if launch.complete else launch.rest[:1]


def _free(script: ParsedScript, words: Iterable[str]) -> bool:
    """Return whether words contain a variable that the script does not set, or that the caller may set."""
    loops = set(_LOOP_NAME.findall(script.text))
    for name, default in _VALUE.findall(" ".join(words)):
        if not GIVEN.fullmatch(name) and (default or name not in loops.union(script.values)):
            return True
    return False


def _conditional(script: ParsedScript, line: int) -> bool:
    """Return whether a line is in a branch, depends on a condition, or follows the end of the script."""
    depth = 0
    for text in script.lines[: line - 1]:
        code = "" if text.lstrip().startswith("#") else text
        if depth == 0 and _EXIT.match(code):
            return True
        depth += len(_OPENS.findall(code)) + len(_LOOPS.findall(code)) - len(_CLOSES.findall(code))
        depth = max(depth, 0)
    text = script.lines[line - 1] if line <= len(script.lines) else ""
    return depth > 0 or _CONDITION.match(text) is not None or _OPENS.search(text) is not None


def is_manifest(text: str, name: str) -> bool:
    """Return whether `text` is a Kubernetes manifest and not a script."""
    return not text.startswith("#!") and (name.endswith((".yaml", ".yml")) or len(_MANIFEST.findall(text)) > 1)


def _ignored(line: str, fault: str) -> bool:
    before, marker, rest = line.rpartition(_IGNORED)
    if not marker or "#" not in before:
        return False
    ids = rest.rstrip()
    return not ids or (re.fullmatch(r" [\w, -]+", ids) is not None and fault in re.split(r"[ ,]+", ids))
