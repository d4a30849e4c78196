"""What MkDocs does besides: addresses from pyproject.toml, equations as MathML, tables without a header.

Pages can be read where they lie, on a forge, and the site needs nothing from elsewhere: browsers draw MathML.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

_OF_REPOSITORY = re.compile(r"\]\((?:\.\./)+((?:examples|tests)/[^)]+)\)")
_REPOSITORY = re.compile(r'^Repository = "(.+)"$', re.MULTILINE)
_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
_EMPTY_HEADER = re.compile(r"<thead>\s*<tr>\s*(?:<th[^>]*>\s*</th>\s*)+</tr>\s*</thead>\s*")


def on_config(config: Any) -> Any:
    """Take the repository from pyproject.toml; the menu of versions is for builds by mike only."""
    config.repo_url = repository()
    if "MIKE_DOCS_VERSION" not in os.environ:
        del config.extra["version"]
    return config


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Examples and records are files of the repository, not of the site."""
    return _OF_REPOSITORY.sub(lambda link: f"]({repository()}/blob/main/{link[1]})", markdown)


def on_page_content(content: str, **kwargs: Any) -> str:
    content = re.sub(r"(?<=git\+)REPOSITORY|(?<=<code>)REPOSITORY(?=</code>)", repository(), content)
    return _EMPTY_HEADER.sub("", _EQUATION.sub(_mathml, content))


def repository() -> str:
    found = _REPOSITORY.search((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
    assert found
    return found[1]


def _mathml(equation: re.Match[str]) -> str:
    tex = html.unescape(equation[3]).replace("{aligned}", "{split}").strip()
    mathml = convert(tex, display="block" if equation[2] == "[" else "inline")
    # A logarithm is an operator, with a space before its argument.
    mathml = mathml.replace("<mi>log</mi>", '<mo lspace="0.17em" rspace="0.17em">log</mo>')
    return f'<{equation[1]} class="equation">{mathml}</{equation[1]}>'
