"""What MkDocs does besides: addresses from pyproject.toml, pages at the top, tabs, search, MathML, tables.

Pages can be read where they lie, on a forge, and the site needs nothing from elsewhere: browsers draw MathML.
"""

from __future__ import annotations

import html
import os
import re
import textwrap
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import ConfigurationError
from mkdocs.structure.files import File

# By the beginning of a page's path: what its results count in the search of the site; 1 for all other pages.
SEARCH_BOOSTS = {
    "faq.md": 4,
    "install.md": 2,
    "patches/": 3,
    "production.md": 4,
    "quickstart/": 3,
    **dict.fromkeys(
        ("benchmarks/", "compatibility.md", "fault-campaign.md", "frameworks.md", "models.md"), 0.3
    ),
    "development/": 0.3,
    **dict.fromkeys(("changelog.md", "code-of-conduct.md", "contributing.md"), 0.3),
}
PROJECT = Path(__file__).parents[1] / "pyproject.toml"
#: Files beside pyproject.toml that are pages of the site, too.
AT_THE_TOP = {
    "CHANGELOG.md": "changelog.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
_OF_REPOSITORY = re.compile(r"\[([^\[\]]+)\]\((?:\.\./)+((?:examples|tests)/[^)]+|[A-Z_]+\.md)\)")
_REPOSITORY = re.compile(r'^Repository = "(.+)"$', re.MULTILINE)
_TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- end tabs -->\n", re.DOTALL | re.MULTILINE)
_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_EMPTY_HEADER = re.compile(r"<thead>\s*<tr>\s*(?:<th[^>]*>\s*</th>\s*)+</tr>\s*</thead>\s*")


def on_config(config: Any) -> Any:
    """Take the repository from pyproject.toml; the menu of versions is for builds by mike only.

    Raises:
        ConfigurationError: If the site is to be published, and pyproject.toml does not name the owner.
    """
    config.copyright = "Apache License 2.0"
    if address := repository():
        config.repo_url, config.edit_uri = address, "edit/main/docs/"
        config.copyright = f'<a href="{address}/blob/main/LICENSE">{config.copyright}</a>'
    elif os.environ.keys() & {"MIKE_DOCS_VERSION", "PUBLISH"}:
        raise ConfigurationError(
            "This site cannot be published: in [project.urls] of pyproject.toml, put the owner of the "
            "repository in the place of OWNER"
        )
    if "MIKE_DOCS_VERSION" not in os.environ:
        del config.extra["version"]
    return config


def on_files(files: Any, config: Any) -> None:
    """Add the pages that are files at the top of the repository, where a forge looks for them."""
    for name, page in AT_THE_TOP.items():
        text = re.sub(r"\]\((?!https?:|#)", "](../", (PROJECT.parent / name).read_text("utf-8"))
        files.append(File.generated(config, page, content=text.replace("](../docs/", "](")))


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Link to files of the repository, such as examples; without its address, leave their names as text."""
    for beginning, boost in SEARCH_BOOSTS.items():
        if page.file.src_uri.startswith(beginning):
            page.meta["search"] = {"boost": boost}
    markdown = _TABS.sub(_tabs, markdown)
    above, address = "../" * page.file.src_uri.count("/"), repository()

    def link(link: re.Match[str]) -> str:
        if link[2] in AT_THE_TOP:
            return f"[{link[1]}]({above}{AT_THE_TOP[link[2]]})"
        return f"[{link[1]}]({address}/blob/main/{link[2]})" if address else link[1]

    return _OF_REPOSITORY.sub(link, markdown)


def on_page_content(content: str, **kwargs: Any) -> str:
    return _EMPTY_HEADER.sub("", _EQUATION.sub(_mathml, content))


def repository() -> str:
    """Return the address of the repository, or nothing as long as pyproject.toml has OWNER in it."""
    match = _REPOSITORY.search(PROJECT.read_text("utf-8"))
    assert match
    return "" if "/OWNER/" in match[1] else match[1]


def _tabs(group: re.Match[str]) -> str:
    """Make a tab of each section of the third level; on a forge they are sections."""
    _, *parts = re.split(r"^### (.+)\n", group[1], flags=re.MULTILINE)
    tabs = zip(parts[::2], parts[1::2], strict=True)
    return "".join(f'=== "{name}"\n\n{textwrap.indent(text.strip(), "    ")}\n\n' for name, text in tabs)


def _mathml(equation: re.Match[str]) -> str:
    tex = html.unescape(equation[3]).replace("{aligned}", "{split}").strip()
    mathml = convert(tex, display="block" if equation[2] == "[" else "inline")
    # A logarithm is an operator, with a space before its argument.
    mathml = mathml.replace("<mi>log</mi>", '<mo lspace="0.17em" rspace="0.17em">log</mo>')
    return f'<{equation[1]} class="equation">{mathml}</{equation[1]}>'
