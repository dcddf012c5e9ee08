"""Find faults in handwritten job scripts: sbatch, PBS and shell scripts, Kubernetes manifests.

The rules check which programs a script starts on which nodes (shell.py); their messages are in
data/job_faults.toml. This does not replace shellcheck. A line that ends in `# lint-job: ignore` (or `ignore
ID`) is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from envbuild.base.errors import UsageError
from envbuild.base.masking import redact
from envbuild.jobcheck.lint.directives import ScriptFacts
from envbuild.jobcheck.lint.environment import (
    of_commands,
    of_folder,
    of_gpu_containers,
    of_output,
    of_own_path,
    of_secrets,
)
from envbuild.jobcheck.lint.faults import LEVELS, LintRule, load_faults, of_patterns
from envbuild.jobcheck.lint.hosts import (
    of_archives,
    of_early_expansion,
    of_fixed_hosts,
    of_mpi_environment,
    of_other_nodes,
    of_remote_shells,
    of_terminals,
)
from envbuild.jobcheck.lint.kubernetes import lint_manifest
from envbuild.jobcheck.lint.rendezvous import (
    of_addresses,
    of_default_ports,
    of_endpoints,
    of_fallbacks,
    of_launches,
    of_literal_hosts,
    of_numbers,
    of_order,
    of_variables,
)
from envbuild.jobcheck.lint.resources import (
    of_cpus,
    of_idle_nodes,
    of_optional_variables,
    of_placement,
    of_ranks,
    of_requests,
    of_single_nodes,
    of_steps,
    of_typed_counts,
)
from envbuild.jobcheck.lint.script import Found, ParsedScript, read_script
from envbuild.jobcheck.lint.slips import (
    of_assignments,
    of_comments,
    of_conflicts,
    of_directives,
    of_lines,
    of_names,
    of_operators,
    of_placeholders,
    of_shell,
    of_signals,
)
from envbuild.jobcheck.lint.status import of_checks, of_status

_LARGEST = 2 << 20
_MANIFEST = re.compile(r"^(apiVersion|kind)\s*:", re.MULTILINE)
# In this order, the first fault of a kind in a line counts.
RULES: tuple[Callable[[ParsedScript], Iterator[Found]], ...] = (
    of_launches,
    of_variables,
    of_fallbacks,
    of_lines,
    of_commands,
    of_patterns,
    of_output,
    of_folder,
    of_own_path,
    of_directives,
    of_status,
    of_checks,
    of_shell,
    of_secrets,
    of_gpu_containers,
    of_steps,
    of_cpus,
    of_ranks,
    of_requests,
    of_placement,
    of_optional_variables,
    of_typed_counts,
    of_idle_nodes,
    of_single_nodes,
    of_addresses,
    of_endpoints,
    of_numbers,
    of_order,
    of_signals,
    of_names,
    of_other_nodes,
    of_mpi_environment,
    of_fixed_hosts,
    of_terminals,
    of_early_expansion,
    of_archives,
    of_comments,
    of_placeholders,
    of_default_ports,
    of_literal_hosts,
    of_assignments,
    of_remote_shells,
    of_conflicts,
    of_operators,
)
# What a template is for.
_TEMPLATE = re.compile(r"template[^/]*$|\.(?:tmpl|tpl|mako|j2|jinja2?)$")
_OF_TEMPLATES = ("directive-variable", "placeholder")
# Files of other languages. One with a scheduler's directives is a job script all the same.
_OTHER_FILE = re.compile(r"\.(?:py|ipynb|toml|json|txt|md|log|out|err|c|cpp|cu)$")
_JOB = re.compile(r"^(?:#!.*sh\b|#(?:SBATCH|PBS|BSUB|COBALT|OAR|PJM)\b|#\s*flux:)", re.MULTILINE)
_EXPECTED = "give the script that sbatch, qsub, bsub, flux or kubectl gets"
_IGNORED = "lint-job: ignore"
_SHOWN = 500  # characters of a line, and of a value in a message


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault in a line of a script."""

    fault: LintRule
    file: str
    line: int
    text: str
    what: str
    instead: str

    def as_json(self) -> dict[str, Any]:
        """Return the fields for --json."""
        return {
            "id": self.fault.id,
            "level": self.fault.level,
            "file": self.file,
            "line": self.line,
            "text": self.text,
            "what": self.what,
            "instead": self.instead,
        }


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
    if _OTHER_FILE.search(path.name) and not _JOB.search(text):
        raise UsageError(f"{path} is neither a shell script nor a manifest", _EXPECTED)
    return lint(text, str(path), schedulers)


def lint(text: str, name: str, schedulers: Mapping[str, ScriptFacts]) -> list[Problem]:
    """Return the problems of a script or manifest, sorted by line."""
    lines = text.splitlines()
    # Carriage returns are reported once, as dos-lines, and not by each rule that meets them.
    script = None if is_manifest(text, name) else read_script(text.replace("\r\n", "\n"), schedulers)
    found = lint_manifest(text, name) if script is None else (finding for rule in RULES for finding in rule(script))
    if script is not None and "\r\n" in text:
        found = chain([Found("dos-lines", 1)], found)
    scheduler = script.scheduler if script is not None else ""
    faults = load_faults()
    problems: dict[tuple[int, str], Problem] = {}
    for one in found:
        fault = replace(faults[one.id], level=one.level or faults[one.id].level)
        if fault.level == "error" and fault.of_nodes and script is not None and script.several == "several":
            fault = replace(fault, level="hint")  # the number may be 1
        if fault.level == "error" and script is not None and script.template:
            fault = replace(fault, level="warning")  # what is filled in may change it
        at = min(max(one.line, 1), max(len(lines), 1))
        line = lines[at - 1] if lines else ""
        if _ignored(line, one.id) or (one.id in _OF_TEMPLATES and _TEMPLATE.search(name)):
            continue
        advice = fault.of_scheduler.get(scheduler) or fault.instead
        what, instead = (
            redact(text.replace("{nodes}", one.nodes).replace("{value}", one.value[:_SHOWN]))
            for text in (fault.what.replace("torchrun", one.program, 1), advice)
        )
        problem = Problem(fault, name, at, redact(line.strip())[:_SHOWN], what, instead)
        problems.setdefault((at, one.id), problem)
    return sorted(problems.values(), key=lambda p: (p.line, LEVELS.index(p.fault.level)))


def is_manifest(text: str, name: str) -> bool:
    """Return whether `text` is a Kubernetes manifest and not a script."""
    return not text.startswith("#!") and (name.endswith((".yaml", ".yml")) or len(_MANIFEST.findall(text)) > 1)


def _ignored(line: str, fault: str) -> bool:
    before, found, rest = line.rpartition(_IGNORED)
    if not found or "#" not in before:
        return False
    ids = rest.rstrip()
    return not ids or (re.fullmatch(r" [\w, -]+", ids) is not None and fault in re.split(r"[ ,]+", ids))
