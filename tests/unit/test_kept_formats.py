"""Locks and receipts that older versions wrote are read as they were. No format has had another number than 1 yet."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from envbuild.contract import receipt, state
from envbuild.lock import conda_format, image
from envbuild.lock import format as wheels

KEPT = Path(__file__).parent / "data/kept.tar.xz"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and image lock are of commit 5800ef7e, the conda lock of b14d236f, the environment of 5af1420d."""
    folder = tmp_path_factory.mktemp("kept")
    subprocess.run(["tar", "-xf", KEPT, "-C", folder], check=True)
    return folder


def test_a_wheel_lock_of_format_1(kept: Path) -> None:
    lock = wheels.read(kept / "locks/cpu-x86_64.requirements.txt")
    # As the version that wrote it computed it; so of the image lock.
    assert lock and lock.digest == "sha256:8b8bc5d76d3b9a1641cbde537962c9c4a929015a5c265508801d7117a0b651be"
    assert wheels.parse(wheels.render(lock), "x") == lock


def test_an_image_lock_of_format_1(kept: Path) -> None:
    lock = image.read_image(kept / "locks/cpu-x86_64.image.toml")
    assert lock and lock.digest == "sha256:00f65a96f22da06cf73ffc963e3daff77f0ce11218ac4de80b0dc2efceec9d4e"
    assert image.parse_image(image.render_image(lock), "x") == lock


def test_a_conda_lock_of_format_1(kept: Path) -> None:
    text = (kept / "locks/cpu.conda-lock.yml").read_text()
    parts = conda_format.parse(text, "x")
    assert {target: len(part.packages) for target, part in parts.items()} == {"cpu-x86_64": 81, "cpu-aarch64": 77}
    assert conda_format.parse(conda_format.render(parts.values()), "y") == parts


def test_a_receipt_and_a_state_of_format_1(kept: Path) -> None:
    written = receipt.read_receipt(kept / "old_tiny/env.receipt.json")
    assert written["format"] == receipt.FORMAT and written["passed"] and written["recipe"]["name"] == "old_tiny"
    read = state.read_state(kept / "old_tiny/env")
    assert read and read.plan_digest == written["plan"]["digest"] and read.lock_digest == written["lock"]["digest"]


def test_a_new_number_of_a_format_needs_a_kept_file_of_the_old_one() -> None:
    """Keep one of the old number here before you change one of these."""
    numbers = wheels.FORMAT, image.FORMAT, conda_format.FORMAT, receipt.FORMAT, state.FORMAT
    assert numbers == (1, 1, "1", 1, 1)
