"""Distributions of student and teachers, in the actor of slime, vime or miles, before it trains.

Teachers are weights that the framework swaps into the actor's model, as its own reference is: there is no
second model on the device. They are forwarded by the framework's own ``forward_only``, over the microbatches
that it is about to train on, so each rank gets what belongs to its rows of the logits; nothing is gathered.
"""

from __future__ import annotations

import inspect
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from ..common.agreement import raise_on_all
from ..common.chunks import unwrap
from ..common.scopes import Scope, replaced
from ..engine.call import Call
from ..errors import InvalidInputError
from ..inference.scoring.forward import hidden_states_of, output_head
from ..losses import (
    FullDistribution,
    OutputHead,
    TopKDistribution,
    mix_teachers,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from ..losses.objectives.distributions import Distribution
from ..losses.output_layer import deferring
from ..losses.sequences import SequenceLayout
from .distillation_arguments import LOSS_PATH
from .distillation_loss import KEYS, OLD, TEACHERS, layout_of, temperature_of

_ACTOR = "actor"
#: The framework keeps a teacher's weights under its name after this prefix.
_TAG = "opd_"
#: The key of slime's rollout data with a name per sample: its ``source``, or its ``metadata["source_name"]``.
SOURCES = "source_names"
Forward = Callable[[Callable[..., Any]], Mapping[str, Sequence[Any]]]
#: Takes rows of logits, their layout and options of the losses; returns what is kept of this rank's tokens.
Score = Callable[[Tensor, SequenceLayout, dict[str, Any]], Tensor | TopKDistribution]


class TeacherScorer:
    """Finds the distributions of student and teachers for the framework's actor, which is about to train."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        #: The microbatch of the running forward step.
        self.batch: Mapping[str, Any] = {}
        self._problem: str | None = None

    @contextmanager
    def scores_in(self, rollout_data: dict[str, Any], forward: Forward) -> Iterator[None]:
        """Keep the keys that :func:`opd_loss` reads in the rollout data of this rank until the block ends.

        ``forward`` calls the framework's ``forward_only`` with a function of the logits; it returns the
        results per sample on the last pipeline stage, and nothing on the others.

        A teacher's folder that one rank does not find, or samples there that name no teacher or an unknown
        one, raise :class:`InvalidInputError` on every rank, before any forward.
        """
        raise_on_all(self._problem_of_this_rank(rollout_data))
        names = list(map(str, rollout_data[SOURCES])) if self.actor.args.opd_combine == "route" else None
        self._put_actor_in()
        try:
            if old := self._old(forward):
                rollout_data[OLD] = old
            if teachers := self._teachers(forward, names):
                rollout_data[TEACHERS] = teachers
            yield
        finally:
            for key in KEYS:
                rollout_data.pop(key, None)

    def _problem_of_this_rank(self, rollout_data: Mapping[str, Any]) -> str | None:
        args = self.actor.args
        for name, path in args.opd_teachers.items():
            if _TAG + name not in self.actor.weights_backuper.backup_tags and not os.path.isdir(path):
                return f"teacher {name!r}: {platform.node()} has no folder {path}; all nodes must see it"
        if args.opd_combine != "route":
            return None
        names = rollout_data.get(SOURCES)
        if names is None:
            return f"opd_combine=route: the rollout has no {SOURCES}, which slime v0.3.1 and later pass on"
        if unknown := sorted(set(map(str, names)) - set(args.opd_teachers)):
            return (
                f"opd_combine=route: samples name {unknown}, the teachers are {sorted(args.opd_teachers)}; "
                'the "source" of each sample, or "source_name" in its metadata, must be a teacher'
            )
        return None

    def _put_actor_in(self) -> None:
        """Make sure that the model holds the actor's weights, and that there is a copy of them.

        miles keeps no copy of a model that it never swaps. If it does not compute advantages, it does not put
        the weights back that were dropped while the memory of the actor was paused.
        """
        actor = self.actor
        if getattr(actor, "_enable_weight_backup", True):
            actor._switch_model(_ACTOR)
        else:
            actor.with_opd_teacher = True  # With this miles swaps models, and renews the copy after training.
            actor.weights_backuper.backup(_ACTOR)

    def _old(self, forward: Forward) -> Sequence[Distribution]:
        """Return the distributions of the policy that sampled, where the loss or the teachers need them."""
        args = self.actor.args
        if args.opd_top_k != "full":
            return self._collected(forward, self._topk)
        if args.opd_divergence == "importance_weighted_reverse_kl":
            return self._full(forward)
        return []

    def _teachers(self, forward: Forward, names: Sequence[str] | None) -> list[tuple[Distribution, ...]]:
        """Return the teachers' distributions of each sample; the actor's own weights are back afterwards."""
        args = self.actor.args
        is_full = args.opd_top_k == "full"
        scored: list[Sequence[Any]] = []
        try:
            for name, path in args.opd_teachers.items():
                self._switch_to_teacher(_TAG + name, path)
                values = self._full(forward) if is_full else self._collected(forward, self._at_ids)
                if names is not None and values:
                    # Copies of this teacher's samples, since a part keeps its whole microbatch in memory.
                    pairs = zip(values, names, strict=True)
                    values = [one[torch.arange(len(one))] if mine == name else None for one, mine in pairs]
                scored.append(values)
        finally:
            self.actor._switch_model(_ACTOR)
        samples = list(zip(*scored, strict=True))
        if names is not None:
            return [tuple(one for one in of_sample if one is not None) for of_sample in samples]
        if args.opd_combine == "average":
            return samples
        weights = list(args.opd_teacher_weights) or None
        return [(mix_teachers(of_sample, weights),) for of_sample in samples]

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

    def _collected(self, forward: Forward, score: Score) -> Sequence[Any]:
        """Forward; return what ``score`` makes of each sample's logits, on the last pipeline stage.

        ``forward_only`` of miles, and of slime up to v0.2.2, calls Megatron with ``collect_non_loss_data``
        and expects the values alone; later releases of slime expect a loss before them.
        """

        def collect(logits: Tensor, *, args: Any, non_loss_data: bool = False, **unused: Any) -> Any:
            layout, group = layout_of(args, self.batch, logits)
            options = {"tp_group": group, "rows": layout.response_slices, "temperature": temperature_of(args)}
            values = score(layout.rows_of(logits), layout, options).to("cpu")
            collected = {"distributions": list(values.split(list(layout.local_lengths)))}
            return collected if non_loss_data else (torch.zeros((), device=logits.device), collected)

        return forward(collect).get("distributions", [])

    def _topk(self, rows: Tensor, _: SequenceLayout, options: dict[str, Any]) -> TopKDistribution:
        return vocab_parallel_topk(rows, self.actor.args.opd_top_k, **options)

    def _at_ids(self, rows: Tensor, _: SequenceLayout, options: dict[str, Any]) -> TopKDistribution:
        indices = torch.cat([old.indices.to(rows.device) for old in self.batch[OLD]])
        with torch.no_grad():
            at_ids = vocab_parallel_log_probs_at(rows, indices, with_tail=True, **options)
        return TopKDistribution(indices, *at_ids, temperature=options["temperature"])

    def _full(self, forward: Forward) -> list[FullDistribution]:
        """Return the distributions of the weights that the model holds now, over the whole vocabulary."""
        self._problem = None
        with ExitStack() as stack:
            for chunk in self.actor.model:
                stack.enter_context(deferring(unwrap(chunk)))
            hidden = self._collected(forward, self._hidden)
        # Only the last pipeline stage can tell, and the others must not wait for it.
        raise_on_all(self._problem)
        if not hidden:
            return []
        # The model's own output layer is overwritten when the next weights are swapped in.
        head = cast("OutputHead", output_head(self.actor.model)).copied_to("cpu")
        return [FullDistribution.from_hidden(hidden_lh, head) for hidden_lh in hidden]

    def _hidden(self, rows: Tensor, layout: SequenceLayout, _: dict[str, Any]) -> Tensor:
        try:
            return hidden_states_of(rows, layout.response_rows)
        except InvalidInputError as error:
            self._problem = str(error)
            return torch.empty(len(layout.response_rows), 0)


#: The actor that trains, from ``train_actor`` to the functions that it calls.
scorer: Scope[TeacherScorer] = Scope("teacher_scorer")


def train_actor(call: Call) -> Any:
    """Train, with the actor known to :func:`train` and :func:`get_batch` if it has teachers to score.

    A teacher that comes with the rollout needs no scoring.
    """
    args = call.instance.args
    is_selected = getattr(args, "custom_loss_function_path", None) == LOSS_PATH
    if not is_selected or not getattr(args, "opd_teachers", None):
        return call()
    with scorer.enter(TeacherScorer(call.instance)):
        return call()


def train(call: Call) -> Any:
    """Forward student and teachers, then train. Before it, the framework has logged the rollout."""
    current = scorer.get()
    if current is None:
        return call()
    rollout_data = call["data_iterator"][0].rollout_data
    state = current.actor.args, call["model"], call["data_iterator"], call["num_microbatches"]
    forward_only = inspect.unwrap(call.function).__globals__["forward_only"]
    takes_rollout_id = "rollout_id" in inspect.signature(forward_only).parameters  # miles needs it
    options = {"rollout_id": call["rollout_id"]} if takes_rollout_id else {}
    with current.scores_in(rollout_data, lambda function: forward_only(function, *state, **options)):
        return call()


def get_batch(call: Call) -> Any:
    """Return a microbatch with the distributions that the rollout data holds so far."""
    current = scorer.get()
    if current is None:
        return call()
    available = [key for key in KEYS if key in call["data_iterator"].rollout_data]
    current.batch = call(keys=[*call["keys"], *available])
    return current.batch
