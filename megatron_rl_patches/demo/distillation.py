"""On-policy distillation, with no reward: the student writes, the teachers say what they would have written.

The student's distribution of each token that it wrote is drawn towards a teacher's, over the k tokens that
the student found most probable and the tail of all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..inference import forward_topk
from ..losses import TopKDistribution, mix_teachers, reverse_kl, route_teachers
from . import digits
from .objectives import distillation_loss
from .policy import answer, build, from_last_stage, generator_beside, mean_over_ranks
from .teachers import Teachers, microbatch
from .training import shuffled, train

#: How the teachers are brought together: each sample's own one, or its own one in a mixture with the other.
TARGETS = ("routed", "mixture")

_K = 8
# Of the teacher for the order that a sample asks for, and of the other one.
_OWN, _OTHER = 3.0, 1.0
# Per rank and rollout.
_PROMPTS, _STEPS, _MICROBATCHES_PER_STEP = 256, 8, 2
_EXAMPLES = 64


@dataclass(frozen=True)
class Rollout:
    """What came out of one rollout, over all ranks, per order.

    Attributes:
        divergence: reverse KL divergence from the target per token, in nats, before training on it.
        score: share of digits that the student gets right, answering with what is most probable.
        steps: optimizer steps that ``train()`` then made.
    """

    divergence: dict[str, float]
    score: dict[str, float]
    steps: int


def rollouts(count: int, seed: int, teachers: Teachers, target: str) -> Iterator[Rollout]:
    """Distil the teachers into a new student; yield after each ``train()``."""
    model, optimizer = build(seed)
    generator = generator_beside(model, seed)
    for _ in range(count):
        tokens_bs, _ = answer(model, digits.prompts(_PROMPTS, generator), generator)
        old = forward_topk(model, [microbatch(tokens_bs)], _K, output_device=tokens_bs.device, progress=False)
        targets = _targets(teachers.distributions(tokens_bs, old), tokens_bs, target)
        divergence = _divergence(tokens_bs, old, targets)
        examples = [digits.prompts(_EXAMPLES, generator, order) for order in digits.ORDERS]
        scores = [digits.score(answer(model, prompts_bp, None)[0]).mean() for prompts_bp in examples]
        score = dict(zip(digits.ORDERS, mean_over_ranks(*scores), strict=True))
        batches = _microbatches(tokens_bs, targets, generator)
        size = _PROMPTS // (_STEPS * _MICROBATCHES_PER_STEP)
        train(model, optimizer, batches, [_MICROBATCHES_PER_STEP] * _STEPS, size, distillation_loss)
        yield Rollout(divergence, score, _STEPS)


def scores_of_teachers(teachers: Teachers, seed: int) -> dict[str, float]:
    """What each teacher gets right of its own order."""
    generator = generator_beside(teachers.model, seed)
    scores = [
        teachers.score(order, digits.prompts(8 * _EXAMPLES, generator, order)) for order in digits.ORDERS
    ]
    return dict(zip(digits.ORDERS, mean_over_ranks(*scores), strict=True))


def _targets(
    of_teachers: dict[str, list[TopKDistribution]], tokens_bs: torch.Tensor, target: str
) -> list[TopKDistribution] | None:
    """What each answer is drawn towards; ``None`` but on the last pipeline stage."""
    if not of_teachers:
        return None
    first, second = digits.ORDERS
    names = [first if asked else second for asked in digits.asks_for(tokens_bs, first).tolist()]
    if target == "routed":
        return route_teachers(names, of_teachers)
    weights = {first: (_OWN, _OTHER), second: (_OTHER, _OWN)}
    pairs = zip(of_teachers[first], of_teachers[second], strict=True)
    return [mix_teachers(pair, weights[name]) for name, pair in zip(names, pairs, strict=True)]


def _divergence(
    tokens_bs: torch.Tensor, old: list[TopKDistribution] | None, targets: list[TopKDistribution] | None
) -> dict[str, float]:
    total = torch.zeros(len(digits.ORDERS), device=tokens_bs.device)
    if old is not None and targets is not None:
        student, teacher = TopKDistribution.cat(old), TopKDistribution.cat(targets)
        of_token = reverse_kl(student.log_probs, student.tail_log_prob, teacher)
        of_answer_b = of_token.view(-1, digits.DIGITS).mean(1)
        for number, order in enumerate(digits.ORDERS):
            total[number] = of_answer_b[digits.asks_for(tokens_bs, order)].mean()
    from_last_stage(total)
    return dict(zip(digits.ORDERS, mean_over_ranks(*total), strict=True))


def _microbatches(
    tokens_bs: torch.Tensor, targets: list[TopKDistribution] | None, generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    for chosen in shuffled(len(tokens_bs), _STEPS * _MICROBATCHES_PER_STEP, generator):
        of_chosen = None if targets is None else [targets[index] for index in chosen.tolist()]
        yield {"tokens": tokens_bs[chosen], "teachers": of_chosen}
