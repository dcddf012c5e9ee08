"""inspect and diff on real artifacts: images in a daemon, a registry and files, and those of other tools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import artifacts as made
from lab.dockerd import Lab
from real.conftest import Command

from envbuild.image.blobs import Blobs

STATUS = "Package: bash\nStatus: install ok installed\nArchitecture: amd64\nVersion: 5.2-1\n"
