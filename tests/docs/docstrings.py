"""Examples in the docstrings of public names: literal blocks, which follow ``::``."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

PUBLIC = ("", ".reentry", ".inference", ".losses", ".testing")
_LITERAL = re.compile(r"::\n\n((?:[ ]+.*\n|\n)+)")


def packages() -> list[Any]:
    return [importlib.import_module(f"megatron_rl_patches{name}") for name in PUBLIC]


def public_names() -> dict[str, Any]:
    """Return what the public packages offer."""
    return {name: getattr(package, name) for package in packages() for name in package.__all__}


def examples() -> dict[str, str]:
    """Return the code of each example by the name of the function, class or method that it belongs to."""
    return {name: code for name, text in _docstrings() for code in _literal_blocks(text)}


def _docstrings() -> Iterator[tuple[str, str]]:
    for name, value in public_names().items():
        members = vars(value).items() if isinstance(value, type) else ()
        documented = {name: value} | {
            f"{name}.{member}": function for member, function in members if isinstance(function, FunctionType)
        }
        yield from ((place, inspect.cleandoc(thing.__doc__ or "")) for place, thing in documented.items())


def _literal_blocks(docstring: str) -> Iterator[str]:
    for block in _LITERAL.finditer(docstring + "\n"):
        code = textwrap.dedent(block[1])
        if re.search(r"^return ", code, re.MULTILINE):  # the reader's own function ends here
            code = f"def example():\n{textwrap.indent(code, '    ')}\nexample()\n"
        yield code
