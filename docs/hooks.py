"""Hook of mkdocs: the version and the repository's address, the changelog as a page, colours of code."""

import itertools
import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

TOP = Path(__file__).parents[1]
_SOURCE = r"\.github|benchmarks|ddp_train|envbuild|examples|recipes|sites|tests"
_TO_SOURCE = re.compile(rf"\[([^]]*)\]\((?:\.\./)+((?:{_SOURCE})/[^)]*|README\.md|LICENSE)\)")
# An indented block of code behind a blank line, in no list.
_BLOCK = re.compile(r"(?<=\n\n)((?: {4}.*\n)(?:(?: {4}.*)?\n)*)")
_LIST = re.compile(r"\s*([-*]|\d+\.) |\s+\S")
# Code in a line: a block's stands behind a span.
_CODE = re.compile(r"(?<!</span>)<code>([^<]*)</code>")
_TABLE = re.compile("<table>.*?</table>", re.DOTALL)
# A word of a table's text that is wider than its column may be: a path, a variable.
_LONG = re.compile(r"(?<![^\s>])[^\s<>&;]{22,}(?=[\s<])(?![^<]*>)")
# The language of a block, by its first line.
_LANGUAGES = {
    r"\$ ": "console",
    r"\[+[\w.\"-]+\]+$|[\w.-]+ = ": "toml",
    r"[\w.-]+:( |$)": "yaml",
    r"([A-Z_]+=\S+ )*(\S+/)?(envbuild|tests/\w+|conda|docker|export|horovodrun|kubectl|mkdir|openssl|python3?|run"
    r"|cd|torchrun|uv|uvx|pip|pipx|curl|tar|sh|git|source|man|sbatch|srun|enroot|apptainer) ": "bash",
}


def on_config(config: MkDocsConfig) -> None:
    """Take version and address from the places that the package takes them from."""
    found = re.search(r'^__version__ = "(.*)"', (TOP / "envbuild/__init__.py").read_text(), re.MULTILINE)
    assert found
    config.site_name = f"envbuild {found[1]}"
    urls = tomllib.loads((TOP / "pyproject.toml").read_text())["project"].get("urls", {})
    config.repo_url, config.site_url = urls.get("Repository"), urls.get("Documentation")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the changelog, whose links are relative to the repository's top."""
    text = (TOP / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=text))


def on_page_markdown(markdown: str, config: MkDocsConfig, **_: object) -> str:
    """Point links out of docs/ at the repository if its address is known; name the language of indented code."""
    link = rf"[\1]({config.repo_url}/blob/HEAD/\2)" if config.repo_url else r"\1"
    return _BLOCK.sub(lambda block: _fenced(block, markdown), _TO_SOURCE.sub(link, markdown))


def on_page_content(html: str, **_: object) -> str:
    """Keep an option on one line, and write its column's heading into each cell: site.css stacks them on phones."""
    return _TABLE.sub(_labelled, _CODE.sub(_unbroken, html))


def _unbroken(code: re.Match[str]) -> str:
    if re.fullmatch(r"\S{1,18}", code[1]):
        return f'<code class="word">{code[1]}</code>'
    options = re.sub(r"(?<!\S)-[\w-]{1,18}", r'<span class="word">\g<0></span>', code[1])
    return f"<code>{options}</code>"


def _labelled(table: re.Match[str]) -> str:
    headings = [re.sub("<.*?>", "", one) for one in re.findall(r"<th.*?>(.*?)</th>", table[0])]
    if len(headings) < 3:
        return table[0]
    cells = itertools.count()

    def cell(_: re.Match[str]) -> str:
        return f'<td data-heading="{headings[next(cells) % len(headings)]}"'

    text = re.sub("<td", cell, table[0]).replace("<table", "<table data-stacked", 1)
    text = re.sub("(?<=[0-9]) %", "\N{NO-BREAK SPACE}%", text)
    return _LONG.sub(lambda word: re.sub("(?<=[/_.,=:@-])(?=[^/_.,=:@-])", "<wbr>", word[0]), text)


def _fenced(block: re.Match[str], markdown: str) -> str:
    before = block.string[: block.start()].rstrip().rpartition("\n")[2]
    if _LIST.match(before):
        return block[0]
    lines = [line[4:] for line in block[0].rstrip().splitlines()]
    language = next((name for pattern, name in _LANGUAGES.items() if re.match(pattern, lines[0])), "text")
    return "\n".join([f"``` {language}", *lines, "```", "", ""])
