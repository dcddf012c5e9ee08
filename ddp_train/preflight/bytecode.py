"""Compare bytecode with its source: `python -I -S -B bytecode.py FILE`.

FILE has pairs [bytecode, source] of absolute paths as JSON. The program prints each bytecode file that is not the
compiled form of its source, a JSON string per line. The interpreter must be that of the environment, because the format
depends on it (PEP 552), and runs in a separate process, because marshal may crash on invalid data.
envbuild/contract/manifest.py runs this program, too.
"""

import json
import marshal
import re
import sys
from importlib.util import MAGIC_NUMBER


def main() -> None:
    """Compare the pairs in the file that the first argument names."""
    with open(sys.argv[1], encoding="ascii") as stream:
        asked = json.load(stream)
    for pyc, source in asked:
        ((tag, level),) = re.findall(r"\A.*/[^/]+?\.([^./]+)(?:\.opt-([^./]+))?\.pyc\Z", pyc, re.DOTALL)
        if tag != sys.implementation.cache_tag or level not in ("", "1", "2"):
            continue  # this interpreter never loads it
        try:
            with open(pyc, "rb") as stream:
                data = stream.read()
            with open(source, "rb") as stream:
                text = stream.read()
            if data[:4] == MAGIC_NUMBER:
                code = marshal.loads(data[16:])
                if code != compile(text, code.co_filename, "exec", dont_inherit=True, optimize=int(level or 0)):
                    raise ValueError
        except Exception:  # noqa: BLE001 - damaged bytes can fail anywhere
            print(json.dumps(pyc))


if __name__ == "__main__":
    main()
