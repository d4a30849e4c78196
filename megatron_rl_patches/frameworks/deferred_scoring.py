"""All samples of a microbatch in one pass, in frameworks that slice the logits and score sample by sample.

Autograd expands each slice's gradient to the size of all logits, and adds these up. So the slices are
:class:`~.logit_rows.LogitRows`, and their scores are :class:`PendingScores`. When the first value is needed,
or at the end, one function with one gradient computes them all. The framework's function runs once, and its
layouts of sequences and its results stay its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from .log_probs import log_probs_and_entropy
from .logit_rows import LogitRows, LogitsNeeded

#: Log-probabilities ``[n]``, and entropies ``[n]`` or ``None``.
Scores = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class ScoringOptions:
    """Options that all samples of one pass share; see :func:`.log_probs_and_entropy`."""

    tp_group: dist.ProcessGroup | None
    with_entropy: bool
    entropy_grad: bool
    grad_mode: bool = field(default_factory=torch.is_grad_enabled)


class PendingScores(Tensor):
    """A tensor that is computed when an operation needs its values; changes of shape or dtype wait, too."""

    _compute: Callable[[], Tensor]
    _result: Tensor | None

    @staticmethod
    def __new__(cls, compute: Callable[[], Tensor]) -> PendingScores:
        self = torch.Tensor._make_wrapper_subclass(cls, (0,))
        self._compute, self._result = compute, None
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        has_more = any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values()))
        if func not in _CAN_WAIT or has_more:
            return func(*tree_map(computed, args), **tree_map(computed, kwargs))
        grad_mode = torch.is_grad_enabled()

        def compute() -> Tensor:
            with torch.set_grad_enabled(grad_mode):
                return cast("Tensor", func(computed(args[0]), *args[1:], **kwargs))

        return PendingScores(compute)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *args: Any) -> NoReturn:
        raise LogitsNeeded(f"{func} was called past __torch_function__")


#: Operations that are deferred, unless they read a second tensor.
_CAN_WAIT = (Tensor.squeeze, Tensor.unsqueeze, Tensor.view, Tensor.reshape, Tensor.to)


def computed(value: Any) -> Any:
    """Return the values of :class:`PendingScores`, and anything else as it is."""
    if not isinstance(value, PendingScores):
        return value
    if value._result is None:
        value._result = value._compute()
    return value._result


class Samples:
    """Samples that are scored in one pass, as soon as the scores of one of them are needed."""

    def __init__(self, options: ScoringOptions) -> None:
        self._options = options
        self._rows: list[LogitRows] = []
        self._tokens: list[Tensor] = []

    def accept(self, rows: LogitRows, options: ScoringOptions) -> bool:
        """Return whether another sample can join: the pass has not run, logits and options are the same."""
        first = self._rows[0] if self._rows else rows
        return (
            "_scores" not in vars(self)
            and options == self._options
            and rows.source is first.source
            and rows.divisor == first.divisor
            and rows.requires_grad == first.requires_grad
        )

    def add(self, rows: LogitRows, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return pending log-probabilities and entropies (or ``None``) of a sample.

        Args:
            rows: its rows of the logits, ``[n, V / tp]``.
            tokens: ``[n]``, to look up there.
        """
        position = len(self._rows)
        self._rows.append(rows)
        # The tokens are read later, and the framework may reuse their buffer for the next sample.
        self._tokens.append(_tokens_of(rows, tokens).clone())
        log_probs = PendingScores(lambda: self._scores[position][0])
        with_entropy = self._options.with_entropy
        return log_probs, PendingScores(lambda: self._scores[position][1]) if with_entropy else None

    @functools.cached_property
    def _scores(self) -> list[tuple[Tensor, Any]]:
        if _has_duplicates(torch.cat([rows.rows.reshape(-1) for rows in self._rows])):
            pairs = zip(self._rows, self._tokens, strict=True)
            return [score_rows(rows, tokens, self._options) for rows, tokens in pairs]
        sizes = [len(rows) for rows in self._rows]
        all_rows = cast("LogitRows", torch.cat(cast("list[Tensor]", self._rows)))
        log_probs, entropies = score_rows(all_rows, torch.cat(self._tokens), self._options)
        no_entropies = [None] * len(sizes)
        return list(
            zip(
                _slices(log_probs, sizes),
                no_entropies if entropies is None else _slices(entropies, sizes),
                strict=True,
            )
        )


def score_rows(
    rows: LogitRows, tokens: Tensor, options: ScoringOptions, keep_mask: Tensor | None = None
) -> Scores:
    """Return log-probabilities of the tokens, and entropies or ``None``; differentiable in the logits.

    Args:
        rows: ``[..., V / tp]``.
        tokens: ``[...]``.
        keep_mask: see :func:`.vocab_parallel_log_probs`.
    """
    source, row_numbers = rows.source, rows.rows.reshape(-1)
    if _has_duplicates(row_numbers):
        rows.need("a row that occurs twice")
    with torch.set_grad_enabled(options.grad_mode):
        if not rows.is_tracked:
            rows.need("an autograd function")
        source.scored = True
        return log_probs_and_entropy(
            source.values if rows.requires_grad else source.values.detach(),
            _tokens_of(rows, tokens),
            options.tp_group,
            rows=_selection(row_numbers, source.values.device),
            with_entropy=options.with_entropy,
            entropy_grad=options.entropy_grad,
            keep_mask=keep_mask,
            temperature=rows.divisor,
        )


def _tokens_of(rows: LogitRows, tokens: Tensor) -> Tensor:
    """Return the tokens of a sample; for an empty response frameworks pass ``tokens[-0:]``, which is all."""
    return tokens[:0] if len(rows) == 0 else tokens


def _has_duplicates(row_numbers: Tensor) -> bool:
    return len(row_numbers) > 0 and bool(row_numbers.bincount().max() > 1)


def _selection(row_numbers: Tensor, device: torch.device) -> slice | Tensor:
    """Return consecutive rows as a slice, which needs no copy, and others as numbers on the device."""
    first = int(row_numbers[0]) if len(row_numbers) else 0
    if torch.equal(row_numbers, torch.arange(first, first + len(row_numbers))):
        return slice(first, first + len(row_numbers))
    return row_numbers.to(device)


def _slices(values: Tensor, sizes: list[int]) -> list[Tensor]:
    """Split a tensor into views that may be changed in place, unlike those of ``torch.split``."""
    ends = list(itertools.accumulate(sizes))
    return [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]
