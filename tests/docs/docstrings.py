"""Examples in the docstrings of public names: literal blocks, which follow ``::``."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT

PACKAGE = ROOT / "megatron_rl_patches"
PUBLIC = ("", ".reentry", ".inference", ".losses", ".testing")
_LITERAL = re.compile(r"::\n\n((?:[ ]+.*\n|\n)+)")


@cache
def public_names() -> set[str]:
    """Return the names that the public packages offer."""
    packages = (importlib.import_module(f"megatron_rl_patches{name}") for name in PUBLIC)
    return {name for package in packages for name in package.__all__}


def examples() -> dict[str, str]:
    """Return the code of each example by the name of the function or class that it belongs to."""
    known = public_names()
    return {
        name: code
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, text in _docstrings(path)
        if name.partition(".")[0] in known
        for code in _literal_blocks(text)
    }


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, ast.get_docstring(node) or ""
            for member in ast.iter_child_nodes(node):
                if isinstance(node, ast.ClassDef) and isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}", ast.get_docstring(member) or ""


def _literal_blocks(docstring: str) -> Iterator[str]:
    for block in _LITERAL.finditer(docstring + "\n"):
        code = textwrap.dedent(block[1])
        if re.search(r"^return ", code, re.MULTILINE):  # the reader's own function ends here
            code = f"def example():\n{textwrap.indent(code, '    ')}\nexample()\n"
        yield code
