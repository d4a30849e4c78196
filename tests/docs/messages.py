"""The messages that this package can raise or log, read from its sources; ``…`` stands for a value."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT

ELLIPSIS = "…"
# Errors for those who change this package, or that Python's own protocols need; no user sees their text.
_INTERNAL_ERRORS = {"AttributeError", "NotImplementedError", "Exit", "KeyError", "TypeError"}
_LOG_FUNCTIONS = {"warning", "error", "_say", "report"}


@cache
def templates() -> dict[str, str]:
    """Return each message that is raised or logged, with the file and the line where."""
    return {
        text: f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, node in _nodes()
        if isinstance(node, ast.Call) and _reports(node) and (text := _first_text(node))
    }


@cache
def strings() -> frozenset[str]:
    """Return every string of the sources, as a message may be put together elsewhere than it is raised."""
    kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
    return frozenset(one_line(_text(node)) for _, node in _nodes() if isinstance(node, kinds))


def begins_with(template: str, quote: str) -> bool:
    """Return whether ``template`` begins with ``quote``, in which ``…`` stands for anything."""
    return re.match(_pattern(quote.rstrip(f"{ELLIPSIS} ")), template) is not None


def is_quoted_from_sources(message: str) -> bool:
    """Return whether the message is a string of the sources, or a template with values filled in."""
    return message in strings() or any(
        len(template) > 20 and re.fullmatch(_pattern(template), message) for template in templates()
    )


def one_line(text: str) -> str:
    return " ".join(text.split())


def _pattern(text: str) -> str:
    return ".*".join(map(re.escape, text.split(ELLIPSIS)))


def _nodes() -> Iterator[tuple[Path, ast.AST]]:
    package = sorted((ROOT / "megatron_rl_patches").rglob("*.py"))
    for path in [*package, ROOT / "_megatron_rl_patches_startup.py"]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            yield path, node


def _reports(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _LOG_FUNCTIONS or (name.endswith("Error") and name not in _INTERNAL_ERRORS)


def _first_text(call: ast.Call) -> str:
    texts = (one_line(_text(argument)) for argument in call.args)
    return next((text for text in texts if text.strip(f"{ELLIPSIS}: ,.()")), "")


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdr]", ELLIPSIS, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ELLIPSIS
