"""What is known of a target: from its source text, and from the live object where there is one."""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Facts:
    """A target as its code shows it.

    Attributes:
        target: ``module.qualname``.
        function: syntax tree of the function; ``None`` when the module does not define it.
        imported_from: set when the module binds the name by an import instead of defining it.
        module: syntax tree of the whole module.
        original: the live function below all layers, when the module is imported.
        replaced_by: where the live function comes from, when that is not the module itself.
    """

    target: str
    function: FunctionNode | None = None
    imported_from: str | None = None
    module: ast.Module | None = None
    original: Callable[..., Any] | None = None
    replaced_by: str | None = None

    @property
    def parameters(self) -> frozenset[str]:
        if self.function is None:
            return frozenset()
        spec = self.function.args
        return frozenset(arg.arg for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs))

    @property
    def runs_when_called(self) -> bool:
        """Neither a coroutine function nor a generator."""
        return isinstance(self.function, ast.FunctionDef) and not any(
            isinstance(node, ast.Yield | ast.YieldFrom) for node in _own_nodes(self.function)
        )

    @property
    def names(self) -> frozenset[str]:
        """Every identifier and attribute in the function's body."""
        return frozenset(_names(self.function)) if self.function else frozenset()

    @property
    def module_names(self) -> frozenset[str]:
        """Every identifier and attribute in the module."""
        return frozenset(_names(self.module)) if self.module else frozenset()

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits of the function's code; formatting, comments and docstring do not count."""
        if self.function is None:
            return ""
        body = self.function.body
        code = body[1:] if ast.get_docstring(self.function) is not None else body
        dump = ast.dump(self.function.args) + "".join(ast.dump(node) for node in code)
        return hashlib.sha256(dump.encode()).hexdigest()[:12]

    def with_live(self, module: ModuleType, qualname: str) -> Facts:
        """These facts and those of the imported module's object."""
        owner, name = resolve(module, qualname)
        original = bottom_layer(vars(owner)[name])
        code = getattr(original, "__code__", None)
        file = getattr(module, "__file__", None)
        foreign = code is not None and file is not None and code.co_filename != file
        home = f"{getattr(original, '__module__', None)}.{getattr(original, '__qualname__', '?')}"
        return replace(self, original=original, replaced_by=home if foreign else None)


def from_source(module: str, qualname: str, text: str) -> Facts:
    """Facts from the text of the module; the target need not be importable."""
    tree = _parse(text)
    facts = Facts(f"{module}.{qualname}", module=tree)
    scope: ast.Module | ast.ClassDef = tree
    *classes, name = qualname.split(".")
    for class_name in classes:
        found = [node for node in scope.body if isinstance(node, ast.ClassDef) and node.name == class_name]
        if not found:
            return facts
        scope = found[-1]
    for node in _statements(scope.body):
        if isinstance(node, FunctionNode) and node.name == name:
            facts = replace(facts, function=node, imported_from=None)
        elif isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            facts = replace(facts, function=None, imported_from="." * node.level + (node.module or ""))
    return facts


def resolve(module: ModuleType, qualname: str) -> tuple[Any, str]:
    """The module or class that defines the target, and the target's name in it.

    Raises:
        AttributeError: some part of the name is not there, or is inherited.
    """
    *owners, name = qualname.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    if name not in vars(owner):
        raise AttributeError(f"{owner!r} does not define {name!r}")
    return owner, name


def layers(function: Any) -> Iterator[Any]:
    """The object itself, and what it wraps, down to the original."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def bottom_layer(function: Any) -> Any:
    for layer in layers(function):
        function = layer
    return function


@lru_cache(maxsize=16)
def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        # Of an invalid escape, say: the host's import tells of it, and it is no error where warnings are.
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a scope, those under ``if`` and ``try`` included."""
    for node in body:
        yield node
        for attribute in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, attribute, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function, those of functions in it left out."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, FunctionNode | ast.Lambda):
            yield node
            yield from _own_nodes(node)


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
