"""Arguments of torchrun's command line."""

from __future__ import annotations


def literal(word: str) -> str:
    """Return `word`, the script's path or one of its arguments, escaped so that the script gets it unchanged.

    torchrun applies string.Template to them (torch/distributed/elastic/utils/api.py): `$$` becomes `$`, and
    `$local_rank` a number.
    """
    return word.replace("$", "$$")
