"""The messages that this package can raise or log, read from its sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.docs.pages import ROOT

HOLE = "…"
# Raised for those who program this package, or what a message is looked up by; never told to a user.
_SILENT = {"AttributeError", "NotImplementedError", "Exit", "KeyError", "TypeError"}
_LOGS = {"warning", "error", "_say"}


class Message(NamedTuple):
    """What is told, with ``…`` where a value goes."""

    place: str
    text: str


@cache
def all_messages() -> tuple[Message, ...]:
    """What is raised or logged in words of its own."""
    return tuple(
        Message(f"{path.relative_to(ROOT)}:{node.lineno}", text)
        for path, node in _nodes()
        if isinstance(node, ast.Call) and _tells(node) and (text := _first_text(node))
    )


@cache
def all_texts() -> tuple[str, ...]:
    """Every string of the sources: messages that are put together, or handed on, are among them."""
    kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
    return tuple({one_line(text_of(node)) for _, node in _nodes() if isinstance(node, kinds)} - {"", HOLE})


def begins_as(text: str, quoted: str) -> bool:
    """Is ``quoted``, with ``…`` for anything, how the text begins?"""
    pieces = map(re.escape, quoted.rstrip(f"{HOLE} ").split(HOLE))
    return re.match(".*".join(pieces), text) is not None


def raised_as(text: str) -> list[Message]:
    """The messages that this text is, with values filled in."""
    return [
        message
        for message in all_messages()
        if len(message.text) > 20
        and re.fullmatch(".*".join(map(re.escape, message.text.split(HOLE))), one_line(text))
    ]


def one_line(text: str) -> str:
    return " ".join(text.split())


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdr]", HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return HOLE


def _nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in [
        *sorted((ROOT / "megatron_rl_patches").rglob("*.py")),
        ROOT / "_megatron_rl_patches_startup.py",
    ]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            yield path, node


def _tells(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _LOGS or (name.endswith("Error") and name not in _SILENT)


def _first_text(call: ast.Call) -> str:
    texts = (one_line(text_of(argument)) for argument in call.args)
    return next((text for text in texts if text.strip(f"{HOLE}: ,.()")), "")
