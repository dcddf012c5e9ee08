"""Print the digest of the test rig: tests/real/test_lab_*.py, and the files of tests/lab that they use."""

import hashlib
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# Also in strings: some tests start a Python process with such a line.
_IMPORT = re.compile(r"\bfrom lab(?:\.(\w+)| import ([\w, ]+))")


def rig_files() -> list[Path]:
    """Return the tests of the rig and the files of tests/lab that they import or name, directly or not, sorted."""
    lab = {path.name: path for path in (TESTS / "lab").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    pending = sorted((TESTS / "real").glob("test_lab_*.py"))
    found: set[Path] = set()
    while pending:
        path = pending.pop()
        found.add(path)
        text = path.read_text()
        modules = set()
        for module, names in _IMPORT.findall(text):
            modules |= {module} if module else {name.split()[0] for name in names.split(",")}
        used = {f"{module}.py" for module in modules} | set(re.findall(r"\w+\.(?:c|sh|py)\b", text))
        pending += [lab[name] for name in used & lab.keys() if lab[name] not in found]
    return sorted(found)


def rig_digest() -> str:
    """Return the sha256 over the names and contents of the rig's files."""
    digest = hashlib.sha256()
    for path in rig_files():
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{content}  {path.relative_to(TESTS)}\n".encode())
    return digest.hexdigest()


if __name__ == "__main__":
    print(rig_digest())
