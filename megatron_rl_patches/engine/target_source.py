"""A target as its source text shows it and, where its module is imported, the live object too."""

from __future__ import annotations

import ast
import gc
import hashlib
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partialmethod, singledispatchmethod
from types import ModuleType
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
#: Nodes that are a name, and the field that holds it.
_NAMES: dict[type, str] = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue)


@dataclass(frozen=True)
class CallNode:
    """A call in the code of a target."""

    node: ast.Call

    @property
    def name(self) -> str:
        """The name of the function or method that is called: ``step``."""
        function = self.node.func
        return str(getattr(function, _NAMES[type(function)])) if type(function) in _NAMES else ""

    @property
    def function(self) -> str:
        """What is called, as text: ``optimizer.step``."""
        return ast.unparse(self.node.func)

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments that are passed by name: constants, and ``...`` for anything else."""
        return {
            keyword.arg: keyword.value.value if isinstance(keyword.value, ast.Constant) else ...
            for keyword in self.node.keywords
            if keyword.arg
        }


@dataclass(frozen=True)
class TargetSource:
    """A target as its code shows it: what ``skip_if`` asks whether a patch has work to do.

    Attributes:
        target: ``module.qualname``.
        function, module: syntax trees of both; the function is ``None`` when the module does not define it.
        imported_from: set when the module binds the name by an import instead of defining it.
    """

    target: str
    function: FunctionNode | None = None
    imported_from: str | None = None
    module: ast.Module | None = None

    @property
    def parameters(self) -> frozenset[str]:
        if self.function is None:
            return frozenset()
        spec = self.function.args
        return frozenset(arg.arg for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs))

    @property
    def runs_when_called(self) -> bool:
        """Whether the function is neither a coroutine function nor a generator."""
        nodes: list[ast.AST] = [self.function] if isinstance(self.function, ast.FunctionDef) else []
        for node in nodes:  # what a function within it yields is not its own
            nodes += (each for each in ast.iter_child_nodes(node) if not isinstance(each, _FUNCTIONS))
        return bool(nodes) and not any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes)

    def mentions(self, name: str, in_module: bool = False) -> bool:
        """Return whether the name stands in the function (or in its module): as a variable or attribute."""
        return _mentions(self.module if in_module else self.function, name)

    def asserts(self, name: str, in_loop: bool = False) -> bool:
        """Return whether the function asserts something of the name; with ``in_loop``, in a loop."""
        scopes = _nodes(self.function, ast.For, ast.While) if in_loop else [self.function]
        return any(_mentions(node.test, name) for scope in scopes for node in _nodes(scope, ast.Assert))

    def cleans_up(self, name: str) -> bool:
        """Return whether the last statement is a ``try`` with the name in its ``finally``."""
        last = self.function and self.function.body[-1]
        return isinstance(last, ast.Try) and any(_mentions(node, name) for node in last.finalbody)

    def tests_before(self, name: str) -> list[dict[str, bool]]:
        """Return for each call of the name the tests of each ``if``, as text, whose outcome leads to it."""
        return [
            {ast.unparse(test): outcome for test, outcome in _tests_before(self.function, call.node)}
            for call in self.calls(name)
        ]

    def looks_up_unchecked(self, name: str) -> bool:
        """Return whether a ``for`` loop reads ``name[...]``, and no ``if`` about the name decides on it."""
        read = (node for loop in _nodes(self.function, ast.For) for node in _nodes(loop, ast.Subscript))
        of_reads = (_tests_before(self.function, node) for node in read if _mentions(node.value, name))
        return any(not any(_mentions(test, name) for test, _ in tests) for tests in of_reads)

    def calls(self, name: str = "", in_module: bool = False) -> list[CallNode]:
        """Return the calls of what has this name, or all calls, in the function or in its module."""
        calls = map(CallNode, _nodes(self.module if in_module else self.function, ast.Call))
        return [call for call in calls if name in ("", call.name)]

    def assigned(self, name: str) -> list[str]:
        """Return what the function assigns to the variable, as text."""
        nodes = _nodes(self.function, ast.Assign)
        return [ast.unparse(node.value) for node in nodes if [*map(ast.unparse, node.targets)] == [name]]

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits of the function's code; formatting, comments and docstring do not count."""
        if self.function is None:
            return ""
        code = self.function.body[ast.get_docstring(self.function) is not None :]
        dump = "".join(map(ast.dump, (self.function.args, *code)))
        return hashlib.sha256(dump.encode()).hexdigest()[:12]


def from_source(module: str, qualname: str, text: str) -> TargetSource:
    """Read the target from the text of its module, which need not be importable."""
    tree = _parse(text)
    target = TargetSource(f"{module}.{qualname}", module=tree)
    scope: ast.Module | ast.ClassDef = tree
    *classes, name = qualname.split(".")
    for class_name in classes:
        definitions = [n for n in scope.body if isinstance(n, ast.ClassDef) and n.name == class_name]
        if not definitions:
            return target
        scope = definitions[-1]
    for node in _statements(scope.body):
        if isinstance(node, FunctionNode) and node.name == name:
            target = replace(target, function=node, imported_from=None)
        elif isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            target = replace(target, function=None, imported_from="." * node.level + (node.module or ""))
    return target


def resolve(module: ModuleType, qualname: str) -> tuple[Any, str]:
    """Return the owner that defines the target, and the name in it; ``AttributeError`` if there is none."""
    *owners, name = qualname.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    if name not in vars(owner):
        raise AttributeError(f"{owner!r} does not define {name!r}")
    return owner, name


def layers(function: Any) -> Iterator[Any]:
    """Yield the object itself, and what it wraps, down to the original."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:  # a cycle ends where it began
        seen.add(id(function))
        yield function
        function = getattr(function, "__wrapped__", None)


def runs_when_called(value: Any) -> bool:
    """Return whether an attribute runs when it is called, and not when it is read, as a property does."""
    descriptors = (classmethod, staticmethod, partialmethod, singledispatchmethod)
    return not hasattr(type(value), "__set__") and (callable(value) or isinstance(value, descriptors))


@lru_cache(maxsize=4)
def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        # The import of the framework gives such warnings, for instance of an invalid escape.
        warnings.simplefilter("ignore")
        # Before Python 3.12, so many new nodes set off a full collection, which with torch takes 0.2 s.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return ast.parse(text)
        finally:
            if was_enabled:
                gc.enable()


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, those under ``if`` and ``try`` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            nested = [node, *getattr(node, "handlers", [])]
            for part, field in itertools.product(nested, ("body", "orelse", "finalbody")):
                yield from _statements(getattr(part, field, []))


def _tests_before(tree: ast.AST | None, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the tests, and the outcome of each, that lead from the beginning of the tree to a node in it.

    These are the tests of each ``if`` around the node, and of each ``if`` before it that leaves the block.
    """
    for field, value in ast.iter_fields(tree) if tree else ():
        parts = value if isinstance(value, list) else [value]
        for i, part in enumerate(parts):
            if isinstance(part, ast.AST) and node in ast.walk(part):
                if isinstance(tree, ast.If | ast.IfExp) and field != "test":
                    yield tree.test, field == "body"
                for earlier in parts[:i]:
                    if isinstance(earlier, ast.If) and isinstance(earlier.body[-1], _LEAVING):
                        yield earlier.test, False
                yield from _tests_before(part, node)


def _nodes(tree: ast.AST | None, *kinds: type[Any]) -> Iterator[Any]:
    return (node for node in ast.walk(tree) if isinstance(node, kinds)) if tree else iter(())


def _mentions(tree: ast.AST | None, name: str) -> bool:
    return any(getattr(node, _NAMES[type(node)]) == name for node in _nodes(tree, *_NAMES))
