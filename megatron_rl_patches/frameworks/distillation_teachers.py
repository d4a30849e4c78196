"""Scores of the student's top-k and of teachers at these ids, in slime's actor, before it trains.

Teachers are weights that the framework swaps into the actor's model, as its own reference is: there is no
second model on the device. They are forwarded by the framework's own ``forward_only``, over the microbatches
that it is about to train on, so each rank gets what belongs to its rows of the logits: nothing is gathered or
cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._scoped import Scope, replaced
from ..losses import TopKDistribution, mix_teachers, vocab_parallel_log_probs_at, vocab_parallel_topk
from ..losses.sequences.responses import rows_of
from .arguments import bind, call
from .distillation_loss import KEYS, OLD, TEACHER, layout_of, temperature_of

_ACTOR = "actor"
Forward = Callable[[Callable[..., Any]], Mapping[str, Sequence[TopKDistribution]]]


class TopKScorer:
    """Scores student and teachers for an actor that is about to train.

    Args:
        actor: slime's, with its model and the weights that it swaps.

    Attributes:
        batch: the microbatch of the running forward step.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.batch: Mapping[str, Any] = {}

    @contextmanager
    def scores_in(self, rollout_data: dict[str, Any], forward: Forward) -> Iterator[None]:
        """Keep the keys that :func:`topk_opd_loss` reads in the rollout data until the block ends.

        Args:
            rollout_data: of this data-parallel rank.
            forward: calls the framework's ``forward_only`` with a function of the logits; returns its results
                per sample on the last pipeline stage, and nothing on the others.
        """
        try:
            old = forward(self._topk).get("topk")
            if old is not None:
                rollout_data[KEYS[0]] = [one.indices for one in old]
                _store(rollout_data, OLD, old)
            mixture = self._score_teachers(forward)
            if mixture:
                _store(rollout_data, TEACHER, mixture)
            yield
        finally:
            for key in KEYS:
                rollout_data.pop(key, None)

    def _score_teachers(self, forward: Forward) -> list[TopKDistribution]:
        """Return the mixture of all teachers for each sample; the actor's own weights are back afterwards."""
        args = self.actor.args
        scored = []
        try:
            for name, path in args.opd_teachers.items():
                self._switch_to_teacher(f"opd_{name}", path)
                scored.append(forward(self._at_ids).get("topk"))
        finally:
            self.actor._switch_model(_ACTOR)
        if not scored or scored[0] is None:
            return []
        weights = list(args.opd_teacher_weights) or None
        return [mix_teachers(teachers, weights) for teachers in zip(*scored, strict=True)]

    def _switch_to_teacher(self, tag: str, path: str) -> None:
        """Put a teacher's weights into the model; they are read from disk when first needed.

        They are not read earlier, when the framework builds the actor, because its memory may be paused then.
        """
        if tag in self.actor.weights_backuper.backup_tags:
            self.actor._switch_model(tag)
            return
        # ckpt_step is the iteration of the policy's or the reference's checkpoint, not of a teacher's.
        with replaced(self.actor.args, ckpt_step=None):
            self.actor.load_other_checkpoint(tag, path)

    def _topk(self, logits: Tensor, *, args: Any, non_loss_data: bool = False, **unused: Any) -> Any:
        layout, options = self._options(logits, args)
        topk = vocab_parallel_topk(rows_of(logits, layout), args.opd_top_k, **options)
        return _collected(topk, layout.local_lengths, non_loss_data)

    def _at_ids(self, logits: Tensor, *, args: Any, non_loss_data: bool = False, **unused: Any) -> Any:
        layout, options = self._options(logits, args)
        indices = torch.cat([ids.to(logits.device) for ids in self.batch[KEYS[0]]])
        with torch.no_grad():
            log_probs, tail = vocab_parallel_log_probs_at(
                rows_of(logits, layout), indices, with_tail=True, **options
            )
        return _collected(TopKDistribution(indices, log_probs, tail), layout.local_lengths, non_loss_data)

    def _options(self, logits: Tensor, args: Any) -> tuple[Any, dict[str, Any]]:
        layout, tp_group = layout_of(args, self.batch, logits)
        options = {"tp_group": tp_group, "rows": layout.response_rows, "temperature": temperature_of(args)}
        return layout, options


def _collected(topk: TopKDistribution, lengths: Sequence[int], non_loss_data: bool) -> Any:
    """Return what ``forward_only`` collects: a list by sample, in host memory until its microbatch trains.

    Up to slime v0.2.2 ``forward_only`` calls Megatron with ``collect_non_loss_data`` and expects the list
    alone; later releases expect a loss before it.
    """
    collected = {"topk": topk.to("cpu").split(lengths)}
    return collected if non_loss_data else (torch.zeros((), device=topk.log_probs.device), collected)


def _store(rollout_data: dict[str, Any], who: str, samples: Sequence[TopKDistribution]) -> None:
    rollout_data[f"{who}_log_probs"] = [sample.log_probs for sample in samples]
    rollout_data[f"{who}_tail"] = [sample.tail_log_prob for sample in samples]


#: The actor that trains, from ``train_actor`` to the functions that it calls.
scorer: Scope[TopKScorer] = Scope("topk_scorer")


def train(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Score student and teachers, then train; by now slime has computed advantages and logged the rollout."""
    current = scorer.get()
    if current is None:
        return wrapped(*args, **kwargs)
    arguments = bind(wrapped, args, kwargs).arguments
    iterators = arguments["data_iterator"]
    forward_only = inspect.unwrap(wrapped).__globals__["forward_only"]

    def forward(function: Callable[..., Any]) -> Any:
        return forward_only(
            function, current.actor.args, arguments["model"], iterators, arguments["num_microbatches"]
        )

    with current.scores_in(iterators[0].rollout_data, forward):
        return wrapped(*args, **kwargs)


def get_batch(wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a microbatch with the scores that the rollout data holds so far."""
    current = scorer.get()
    if current is None:
        return wrapped(*args, **kwargs)
    bound = bind(wrapped, args, kwargs)
    available = [key for key in KEYS if key in bound.arguments["data_iterator"].rollout_data]
    current.batch = call(wrapped, bound, keys=[*bound.arguments["keys"], *available])
    return current.batch
