"""All samples of a microbatch at once, in a host that slices the logits and scores sample by sample."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .hosts import Scoring, score

R = TypeVar("R")

_TEMPERATURE = "args.rollout_temperature"
#: What a host may ask of logits, or do with their rows, without looking at their values.
_ASKED = {"size", "shape", "dtype", "nelement", "element_size"}
_SLICING = {"squeeze", "view", "to"}


@dataclass
class Samples:
    """What a host asks for, sample by sample, to be computed at once.

    Attributes:
        logits: ``[T, V / tp]``, of which the host has the row numbers.
        rows: row numbers ``[n]`` of each sample, and
        tokens: the tokens ``[n]`` to look up there; ``group`` and ``with_entropy`` are the same for all.
        results: log-probabilities and entropies of each sample, once they are computed.
    """

    logits: Tensor
    rows: list[Tensor] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    group: dist.ProcessGroup | None = None
    with_entropy: bool = False
    results: Iterator[tuple[Tensor, Tensor | None]] | None = None

    @property
    def are_computed(self) -> bool:
        return self.results is not None

    def score(
        self, numbers: Tensor, tokens: Tensor, group: dist.ProcessGroup | None, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Of one sample, whose row numbers ``[n, 1]`` are where its logits would be."""
        if self.results is not None:
            return next(self.results)
        self.group, self.with_entropy = group, with_entropy
        self.rows.append(numbers[:, 0].long())
        self.tokens.append(tokens[: len(numbers)])  # tokens[-0:] of a sample without response are all of it
        nothing_yet = torch.zeros(len(numbers), device=numbers.device)
        return nothing_yet, nothing_yet if with_entropy else None

    def compute(self, scope: Scoring) -> None:
        """Of all samples that were asked for; with none, no rank of the group computes anything."""
        if not self.rows:
            return
        log_probs, entropies = score(
            self.logits,
            torch.cat(self.tokens),
            self.group,
            rows=torch.cat(self.rows),
            with_entropy=self.with_entropy,
            entropy_grad=scope.entropy_grad,
            temperature=scope.temperature,
        )
        sizes = [len(rows) for rows in self.rows]
        entropy_of = [None] * len(sizes) if entropies is None else torch.split(entropies, sizes)
        self.results = zip(torch.split(log_probs, sizes), entropy_of, strict=True)


def at_once(host_function: Callable[[Tensor], R], logits: Tensor, scope: Scoring) -> R:
    """A host's function that scores slices of the logits sample by sample, with all samples scored at once.

    Autograd makes of each slice's gradient one as large as all logits, and adds these up. So the function
    runs twice, over row numbers in place of the logits: first to tell which rows and tokens it asks for, then
    to get the results. Thus its layouts of sequences, and what it returns, stay its own.

    Args:
        host_function: of logits ``[B, S, V / tp]``; what it computes with asks :class:`Samples`.
            It must satisfy :func:`only_slices`.
        scope: that of the running :func:`scoring`.
    """
    batch_and_sequence = logits.shape[:-1]
    # In float32, which hosts insist on: exact up to 2 ** 24 rows.
    numbers = torch.arange(batch_and_sequence.numel(), dtype=torch.float32, device=logits.device)
    numbers_bs1 = numbers.view(*batch_and_sequence, 1)
    scope.samples = Samples(logits.reshape(-1, logits.shape[-1]))
    with torch.no_grad():
        host_function(numbers_bs1)
    scope.samples.compute(scope)
    return host_function(numbers_bs1)


@functools.lru_cache(maxsize=8)
def only_slices(get_responses: Any) -> bool:
    """Does the function do nothing to its ``logits`` but slice them, and divide them by the temperature?

    Judged from its code, and no when in doubt: anything else, it would do to row numbers unseen.
    """
    if not inspect.isfunction(get_responses) or hasattr(get_responses, "__wrapped__"):
        return False  # under somebody's wrapper, who would see them too
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(get_responses)))
    except (OSError, SyntaxError):
        return False
    tree = _DivisionsAsOperators().visit(tree)
    names = _names_of_slices(tree)
    return all(
        _leaves_values_alone(parent)
        for parent in ast.walk(tree)
        for node in ast.iter_child_nodes(parent)
        if isinstance(node, ast.Name) and node.id in names
    )


class _DivisionsAsOperators(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(value=dividend, attr="div"), args=[divisor], keywords=[]):
                return ast.BinOp(dividend, ast.Div(), divisor)
        return node


def _names_of_slices(tree: ast.AST) -> set[str]:
    names, before = {"logits"}, 0
    while len(names) > before:
        before = len(names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target, value in _pairs(node.targets[-1], node.value):
                    if isinstance(target, ast.Name) and names & _sources(value):
                        names.add(target.id)
    return names


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def _sources(value: ast.AST) -> set[str]:
    """Names of the tensors whose rows these are."""
    match value:
        case ast.Name(id=name):
            return {name}
        case ast.Subscript(value=whole):
            return _sources(whole)
        case ast.BinOp(left=left):
            return _sources(left)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch")), args=[ast.List(elts=parts), *_]):
            return set().union(*map(_sources, parts))
        case ast.Call(func=ast.Attribute(value=whole, attr=attr)) if attr not in _ASKED:
            return _sources(whole)
    return set()


def _leaves_values_alone(parent: ast.AST) -> bool:
    """Of what a slice occurs in."""
    match parent:
        case ast.Attribute(attr=attr):
            return attr in _ASKED | _SLICING
        case ast.BinOp(op=ast.Div(), right=divisor):
            return ast.unparse(divisor) == _TEMPERATURE
        case ast.Subscript(ctx=ast.Load()) | ast.Tuple() | ast.List() | ast.Assign(targets=[ast.Name()]):
            return True
    return False
