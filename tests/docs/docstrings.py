"""Examples in the docstrings of public names: literal blocks, which follow ``::``."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT

PACKAGE = ROOT / "megatron_rl_patches"
PUBLIC = ("", "reentry", "inference", "losses", "testing")
_LITERAL = re.compile(r"::\n\n((?:[ ]+.*\n|\n)+)")


def public_names() -> set[str]:
    """What the public packages offer; read, so that no test needs torch to be collected."""
    names: set[str] = set()
    for package in PUBLIC:
        for node in ast.parse((PACKAGE / package / "__init__.py").read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names.update(ast.literal_eval(node.value))
    return names


def examples() -> dict[str, str]:
    """Runnable code by the name that it is the example of."""
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
    for found in _LITERAL.finditer(docstring + "\n"):
        code = textwrap.dedent(found[1])
        if re.search(r"^return ", code, re.MULTILINE):  # the end of a function of the reader's
            code = f"def example():\n{textwrap.indent(code, '    ')}\nexample()\n"
        yield code
