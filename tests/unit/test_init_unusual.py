"""`envbuild init` on text that is valid and unusual: nothing gets lost in silence, and nothing is added."""

from __future__ import annotations

from pathlib import Path

from lab.drafts import draft_of


def test_a_comment_that_ends_with_a_backslash_takes_no_requirement_with_it(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("a==1\n# b==2 \\\nc==3\nd==4 \\\n# why\ne==5\n")
    _, recipe = draft_of(tmp_path / "requirements.txt")
    assert recipe.requirements == ("a==1", "c==3", "d==4", "e==5")
