"""Install packages beside this interpreter by uv, from the sources that pip's configuration names.

    .venv/bin/python tests/uv_install.py ARGUMENTS OF UV PIP INSTALL

uv needs a sixth of pip's time. It does not read pip's configuration: envbuild's translation of it needs no package.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from envbuild.site.pip_config import load_pip_config, uv_environment, uv_settings

pip = load_pip_config(os.environ)
# Beside the environment, so that uv can link files out of its cache.
with tempfile.TemporaryDirectory(dir=sys.prefix) as folder:
    settings = Path(folder, "uv.toml")
    settings.write_text(uv_settings(pip, ()))
    line = [Path(sys.prefix, "bin/uv"), "pip", "install", "--config-file", settings, "--python", sys.executable]
    environment = uv_environment(pip, os.environ, Path(folder, "cache"))
    done = subprocess.run([*line, *sys.argv[1:]], env=environment)
sys.exit(done.returncode)
