"""Hook of mkdocs: the site has the pages alone, so links from them to source files become those files' names."""

import re

_TO_SOURCE = re.compile(r"\[([^]]*)\]\((?:\.\./)+(?:envbuild|examples|recipes|sites|tests|\.github)/[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the text without links out of docs/; test_docs_pages.py checks that those files exist."""
    return _TO_SOURCE.sub(r"\1", markdown)
