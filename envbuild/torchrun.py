"""What every command line of torchrun has to heed."""

from __future__ import annotations


def literal(word: str) -> str:
    """Return `word`, the script's path or one of its arguments, in the form that reaches the script unchanged.

    torchrun runs string.Template over them (torch/distributed/elastic/utils/api.py): `$$` becomes `$`, and
    `$local_rank` a number.
    """
    return word.replace("$", "$$")
