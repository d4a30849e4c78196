"""On-policy distillation without a reward: the student answers, and learns the teachers' distributions.

For each token of an answer the student's distribution is drawn towards a teacher's: over the k tokens that
the student finds most probable and the tail of all others, or over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from ..losses import TopKDistribution, mix_teachers, reverse_kl, route_teachers
from ..losses.logits.distributions import Distribution
from . import digits, policy
from .teachers import Teachers
from .training import distillation_loss, shuffled, train

#: The target of a sample: the teacher for its order, or a mixture of that teacher with the other one.
TARGETS = ("routed", "mixture")
#: What a teacher is known by: its probabilities of k tokens, or its hidden states and output layer.
WAYS = ("top-k", "full")

_K = 8
# Weights in the mixture: the teacher for a sample's order, and the other teacher.
_OWN, _OTHER = 3.0, 1.0
# Per rank and rollout: prompts, optimizer steps, and microbatches of each step.
_PROMPTS, _STEPS, _MICROBATCHES_PER_STEP = 256, 8, 2
_EXAMPLES = 64


class Rollout(NamedTuple):
    """Results of one rollout by order, averaged over all ranks, before training on it.

    ``reverse_kl`` is over the whole vocabulary, per token, in nats; ``score`` is that of the most probable
    tokens; ``bytes_per_token`` is what is kept of the targets until the loss reads them.
    """

    reverse_kl: dict[str, float]
    score: dict[str, float]
    bytes_per_token: float
    steps: int


def rollouts(count: int, seed: int, teachers: Teachers, target: str, way: str) -> Iterator[Rollout]:
    """Distill the teachers into a new student; yield after each ``train()``."""
    model, optimizer = policy.build(seed)
    generator = policy.make_generator(model, seed)
    for _ in range(count):
        tokens_bs, _ = policy.answer(model, digits.prompts(_PROMPTS, generator), generator)
        reverse_kl = _reverse_kl(model, teachers, tokens_bs, target)
        if way == "full":
            targets = _targets(teachers.full(tokens_bs), tokens_bs, target)
        else:
            student = policy.topk(model, policy.microbatch(tokens_bs), _K)
            targets = _targets(teachers.topk(tokens_bs, student), tokens_bs, target)
        sizes = torch.zeros((), device=tokens_bs.device)
        if targets is not None:
            sizes += sum(one.nbytes for one in targets) / (len(targets) * digits.DIGITS)
        policy.broadcast_from_last_stage(sizes)
        examples = [digits.prompts(_EXAMPLES, generator, order) for order in digits.ORDERS]
        scores = [digits.score(policy.answer(model, prompts_bp, None)[0]).mean() for prompts_bp in examples]
        score = dict(zip(digits.ORDERS, policy.mean_over_ranks(*scores), strict=True))
        batches = (
            {"tokens": tokens_bs[indices], "teachers": targets and [targets[i] for i in indices.tolist()]}
            for indices in shuffled(_PROMPTS, _STEPS * _MICROBATCHES_PER_STEP, generator)
        )
        size = _PROMPTS // (_STEPS * _MICROBATCHES_PER_STEP)
        train(model, optimizer, batches, [_MICROBATCHES_PER_STEP] * _STEPS, size, distillation_loss)
        yield Rollout(reverse_kl, score, float(sizes), _STEPS)


def scores_of_teachers(teachers: Teachers, seed: int) -> dict[str, float]:
    """Return the fraction of digits of its own order that each teacher gets right, by order."""
    generator = policy.make_generator(teachers.model, seed)
    examples = [digits.prompts(8 * _EXAMPLES, generator, order) for order in digits.ORDERS]
    scores = map(teachers.score, digits.ORDERS, examples)
    return dict(zip(digits.ORDERS, policy.mean_over_ranks(*scores), strict=True))


def _targets(
    distributions: dict[str, list[Any]], tokens_bs: torch.Tensor, target: str
) -> list[Distribution] | None:
    """Return what each answer is drawn towards on the last pipeline stage, ``None`` on the others."""
    if not distributions:
        return None
    names = [digits.ORDERS[index] for index in digits.order_of(tokens_bs).tolist()]
    if target == "routed":
        return route_teachers(names, distributions)
    first, second = digits.ORDERS
    weights = {first: (_OWN, _OTHER), second: (_OTHER, _OWN)}
    pairs = zip(distributions[first], distributions[second], strict=True)
    return [mix_teachers(pair, weights[name]) for name, pair in zip(names, pairs, strict=True)]


def _reverse_kl(
    model: Sequence[Any], teachers: Teachers, tokens_bs: torch.Tensor, target: str
) -> dict[str, float]:
    """Return the student's reverse KL divergence from the targets per token, in nats, by order."""
    # A top-k of as many tokens as there are is the whole distribution.
    student = policy.topk(model, policy.microbatch(tokens_bs), digits.VOCABULARY)
    targets = _targets(teachers.topk(tokens_bs, student), tokens_bs, target)
    means = torch.zeros(len(digits.ORDERS), device=tokens_bs.device)
    if student is not None and targets is not None:
        buckets = TopKDistribution.cat(student)
        whole = TopKDistribution.cat(cast("list[TopKDistribution]", targets))
        kl_n = reverse_kl(buckets.log_probs, buckets.tail_log_prob, whole)
        kl_b = kl_n.view(-1, digits.DIGITS).mean(1)
        for index in range(len(digits.ORDERS)):
            means[index] = kl_b[digits.order_of(tokens_bs) == index].mean()
    policy.broadcast_from_last_stage(means)
    return dict(zip(digits.ORDERS, policy.mean_over_ranks(*means), strict=True))
