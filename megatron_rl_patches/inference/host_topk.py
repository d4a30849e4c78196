"""The student's top-k and the teachers at these ids, in the actor of a slime-type host, before it trains.

Teachers are weights that the host swaps into the actor's model, as its own reference is: there is no second
model on the device. They are forwarded by the host's own ``forward_only``, over the microbatches that it is
about to train on, so each rank gets what belongs to its rows of the logits: nothing is gathered or cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..losses import TopKDistribution, mix_teachers, vocab_parallel_log_probs_at, vocab_parallel_topk
from ..losses.host_distillation import KEYS, OLD, TEACHER, layout_of, temperature_of
from ..losses.packed import rows_of

_ACTOR = "actor"
Forward = Callable[[Callable[..., Any]], Mapping[str, Sequence[TopKDistribution]]]


class Trainer:
    """The actor that trains now, and the microbatch that its running forward step is of."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.batch: Mapping[str, Any] = {}

    @contextmanager
    def scored(self, forward: Forward, rollout_data: dict[str, Any]) -> Iterator[None]:
        """For the length of the block the rollout has what :func:`topk_opd_loss` reads.

        Args:
            forward: the host's ``forward_only``, of a function of the logits; its results per sample on the
                last pipeline stage, and nothing on the others.
            rollout_data: of this data-parallel rank.
        """
        try:
            old = forward(self._topk).get("topk")
            if old is not None:
                rollout_data[KEYS[0]] = [one.indices for one in old]
                self._store(rollout_data, OLD, old)
            mixture = self._teachers(forward)
            if mixture:
                self._store(rollout_data, TEACHER, mixture)
            yield
        finally:
            for key in KEYS:
                rollout_data.pop(key, None)

    def _teachers(self, forward: Forward) -> list[TopKDistribution]:
        """Of each sample the mixture of all teachers. The actor's own weights are back afterwards."""
        args = self.actor.args
        scored = []
        try:
            for name, path in args.opd_teachers.items():
                self._become(f"opd_{name}", path)
                scored.append(forward(self._at_ids).get("topk"))
        finally:
            self.actor._switch_model(_ACTOR)
        if not scored or scored[0] is None:
            return []
        weights = list(args.opd_teacher_weights) or None
        return [mix_teachers(of_sample, weights) for of_sample in zip(*scored, strict=True)]

    def _become(self, tag: str, path: str) -> None:
        """Read from disk at the first use: when the host builds the actor its memory may be paused."""
        if tag in self.actor.weights_backuper.backup_tags:
            self.actor._switch_model(tag)
            return
        args = self.actor.args
        ckpt_step = getattr(args, "ckpt_step", None)
        args.ckpt_step = None  # the policy's, or the reference's; a teacher has an iteration of its own
        try:
            self.actor.load_other_checkpoint(tag, path)
        finally:
            args.ckpt_step = ckpt_step

    def _topk(self, logits: Tensor, *, args: Any, non_loss_data: bool = False, **unused: Any) -> Any:
        layout, options = self._options(logits, args)
        found = vocab_parallel_topk(rows_of(logits, layout), args.opd_top_k, **options)
        return self._result(found, layout.local_lengths, non_loss_data)

    def _at_ids(self, logits: Tensor, *, args: Any, non_loss_data: bool = False, **unused: Any) -> Any:
        layout, options = self._options(logits, args)
        indices = torch.cat([ids.to(logits.device) for ids in self.batch[KEYS[0]]])
        with torch.no_grad():
            log_probs = vocab_parallel_log_probs_at(
                rows_of(logits, layout), indices, with_tail=True, **options
            )
        return self._result(TopKDistribution(indices, *log_probs), layout.local_lengths, non_loss_data)

    def _options(self, logits: Tensor, args: Any) -> tuple[Any, dict[str, Any]]:
        layout, tp_group = layout_of(args, self.batch, logits)
        options = {"tp_group": tp_group, "rows": layout.response_rows, "temperature": temperature_of(args)}
        return layout, options

    @staticmethod
    def _result(found: TopKDistribution, lengths: Sequence[int], non_loss_data: bool) -> Any:
        """As hosts want it: a list by sample, in host memory until its microbatch trains; no loss.

        Up to slime v0.2.2 ``forward_only`` has Megatron collect what is no loss at all; later a pair.
        """
        collected = {"topk": found.to("cpu").split(lengths)}
        return collected if non_loss_data else (torch.zeros((), device=found.log_probs.device), collected)

    @staticmethod
    def _store(rollout_data: dict[str, Any], who: str, of_samples: Sequence[TopKDistribution]) -> None:
        rollout_data[f"{who}_log_probs"] = [one.log_probs for one in of_samples]
        rollout_data[f"{who}_tail"] = [one.tail_log_prob for one in of_samples]


_current: ContextVar[Trainer | None] = ContextVar("megatron_rl_patches_topk_trainer", default=None)


@contextmanager
def training(actor: Any) -> Iterator[None]:
    """The actor's model is to be distilled in this block."""
    token = _current.set(Trainer(actor))
    try:
        yield
    finally:
        _current.reset(token)


def current_trainer() -> Trainer | None:
    return _current.get()
