"""The two programs: reinforcement learning with teachers, and distillation without a reward.

In the first one the model answers, a checker and a teacher score, and ``train()`` learns. The teacher takes
part by on-policy distillation: ``log p_teacher - log p`` of a token is added to its advantage, with a weight.
That is the policy gradient of the reverse KL divergence from the teacher (Thinking Machines, "On-Policy
Distillation", 2025).

In the second one a student answers, and for each token of an answer its distribution is drawn towards a
teacher's: over the k tokens that the student finds most probable and the tail of all others, or over the
whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from megatron.core import parallel_state

from ..losses import TopKDistribution, mix_teachers, reverse_kl, route_teachers
from ..losses.logits.distributions import Distribution
from . import policy
from .policy import DIGITS, ORDERS, mean_over_ranks
from .teachers import Teachers
from .training import distillation_loss, policy_loss, train

# Of each train() call.
_STEPS, _MICROBATCHES_PER_STEP = 8, 2


def _shuffled(count: int, generator: torch.Generator) -> Sequence[torch.Tensor]:
    """Return the indices of ``count`` answers in random order, a piece for each microbatch."""
    indices = torch.randperm(count, generator=generator, device=generator.device)
    return indices.chunk(_STEPS * _MICROBATCHES_PER_STEP)


# --- reinforcement learning

# Numbers per rank and rollout.
_PROMPTS, _ANSWERS_PER_PROMPT = 64, 8
_DISTILLATION_WEIGHT = 0.3


class Rollout(NamedTuple):
    """Results of one rollout, averaged over all ranks; ``reverse_kl`` is per token, in nats."""

    reward: float
    exact_match: float
    reverse_kl: float
    steps: int

    def __str__(self) -> str:
        means = f"reward {self.reward:.3f}  exact match {self.exact_match:.3f}"
        return f"{means}  reverse KL (nats) {self.reverse_kl:.3f}"


def logits_bytes() -> int:
    """Return the size of a microbatch's logits in float32 on one rank of the last pipeline stage."""
    ranks: int = parallel_state.get_tensor_model_parallel_world_size()
    answers = _PROMPTS * _ANSWERS_PER_PROMPT // (_STEPS * _MICROBATCHES_PER_STEP)
    return 4 * answers * policy.LENGTH * policy.VOCABULARY // ranks


def learn(count: int, seed: int, teachers: Teachers) -> Iterator[Rollout]:
    """Learn by reinforcement on this rank; yield after each ``train()``. Megatron must be initialized."""
    model, optimizer = policy.build(seed)
    generator = policy.make_generator(model, seed)
    for _ in range(count):
        prompts_bp = policy.prompts(_PROMPTS, generator).repeat_interleave(_ANSWERS_PER_PROMPT, dim=0)
        tokens_bs, log_probs_bd = policy.answer(model, prompts_bp, generator)
        scores_bd = policy.score(tokens_bs)
        reverse_kl_bd = log_probs_bd - teachers(tokens_bs)
        # The score of each digit minus its mean over all answers to the same prompt.
        groups_pad = scores_bd.view(_PROMPTS, _ANSWERS_PER_PROMPT, DIGITS)
        advantages_bd = (groups_pad - groups_pad.mean(dim=1, keepdim=True)).view_as(scores_bd)
        advantages_bd -= _DISTILLATION_WEIGHT * reverse_kl_bd
        batch = {"tokens": tokens_bs, "log_probs": log_probs_bd, "advantages": advantages_bd}
        indices = _shuffled(len(tokens_bs), generator)
        microbatches = ({name: values[index] for name, values in batch.items()} for index in indices)
        steps = [_MICROBATCHES_PER_STEP] * _STEPS
        train(model, optimizer, microbatches, steps, len(indices[0]), policy_loss)
        exact_match_b = scores_bd.all(dim=1).float()
        means = mean_over_ranks(scores_bd.mean(), exact_match_b.mean(), reverse_kl_bd.mean())
        reward, exact_match, reverse_kl = means
        yield Rollout(reward, exact_match, reverse_kl, _STEPS)


# --- distillation

#: The target of a sample: the teacher for its order, or a mixture of that teacher with the other one.
TARGETS = ("routed", "mixture")
#: What a teacher is known by: its probabilities of k tokens, or its hidden states and output layer.
WAYS = ("top-k", "full")

_K = 8
# Weights in the mixture: the teacher for a sample's order, and the other teacher.
_OWN, _OTHER = 3.0, 1.0
# Per rank and rollout.
_DISTILLED_PROMPTS, _EXAMPLES = 256, 64


class DistillationRollout(NamedTuple):
    """Results of one rollout by order, averaged over all ranks, before training on it.

    ``reverse_kl`` is over the whole vocabulary, per token, in nats; ``score`` is that of the most probable
    tokens; ``bytes_per_token`` is what is kept of the targets until the loss reads them.
    """

    reverse_kl: dict[str, float]
    score: dict[str, float]
    bytes_per_token: float
    steps: int

    def __str__(self) -> str:
        results = (
            f"{order} {nats:.3f} nats, score {self.score[order]:.3f}"
            for order, nats in self.reverse_kl.items()
        )
        return "  ".join(results)


def distill(
    count: int, seed: int, teachers: Teachers, target: str, way: str
) -> Iterator[DistillationRollout]:
    """Distill the teachers into a new student; yield after each ``train()``."""
    model, optimizer = policy.build(seed)
    generator = policy.make_generator(model, seed)
    for _ in range(count):
        tokens_bs, _ = policy.answer(model, policy.prompts(_DISTILLED_PROMPTS, generator), generator)
        reverse_kl = _reverse_kl(model, teachers, tokens_bs, target)
        if way == "full":
            targets = _targets(teachers.full(tokens_bs), tokens_bs, target)
        else:
            student = policy.topk(model, policy.microbatch(tokens_bs), _K)
            targets = _targets(teachers.topk(tokens_bs, student), tokens_bs, target)
        size = torch.zeros((), device=tokens_bs.device)
        if targets is not None:
            size += sum(one.nbytes for one in targets) / (len(targets) * DIGITS)
        policy.broadcast_from_last_stage(size)
        examples = [policy.prompts(_EXAMPLES, generator, order) for order in ORDERS]
        scores = [policy.score(policy.answer(model, prompts_bp, None)[0]).mean() for prompts_bp in examples]
        score = dict(zip(ORDERS, mean_over_ranks(*scores), strict=True))
        indices = _shuffled(len(tokens_bs), generator)
        microbatches = (
            {"tokens": tokens_bs[index], "teachers": targets and [targets[i] for i in index.tolist()]}
            for index in indices
        )
        steps = [_MICROBATCHES_PER_STEP] * _STEPS
        train(model, optimizer, microbatches, steps, len(indices[0]), distillation_loss)
        yield DistillationRollout(reverse_kl, score, float(size), _STEPS)


def scores_of_teachers(teachers: Teachers, seed: int) -> dict[str, float]:
    """Return the fraction of digits of its own order that each teacher gets right, by order."""
    generator = policy.make_generator(teachers.model, seed)
    examples = [policy.prompts(8 * _EXAMPLES, generator, order) for order in ORDERS]
    return dict(zip(ORDERS, mean_over_ranks(*map(teachers.score, ORDERS, examples)), strict=True))


def _targets(
    distributions: dict[str, list[Any]], tokens_bs: torch.Tensor, target: str
) -> list[Distribution] | None:
    """Return what each answer is drawn towards on the last pipeline stage, ``None`` on the others."""
    if not distributions:
        return None
    names = [ORDERS[index] for index in policy.order_of(tokens_bs).tolist()]
    if target == "routed":
        return route_teachers(names, distributions)
    first, second = ORDERS
    weights = {first: (_OWN, _OTHER), second: (_OTHER, _OWN)}
    pairs = zip(distributions[first], distributions[second], strict=True)
    return [mix_teachers(pair, weights[name]) for name, pair in zip(names, pairs, strict=True)]


def _reverse_kl(
    model: Sequence[Any], teachers: Teachers, tokens_bs: torch.Tensor, target: str
) -> dict[str, float]:
    """Return the student's reverse KL divergence from the targets per token, in nats, by order."""
    # A top-k of as many tokens as there are is the whole distribution.
    student = policy.topk(model, policy.microbatch(tokens_bs), policy.VOCABULARY)
    targets = _targets(teachers.topk(tokens_bs, student), tokens_bs, target)
    means = torch.zeros(len(ORDERS), device=tokens_bs.device)
    if student is not None and targets is not None:
        buckets = TopKDistribution.cat(student)
        whole = TopKDistribution.cat(cast("list[TopKDistribution]", targets))
        kl_n = reverse_kl(buckets.log_probs, buckets.tail_log_prob, whole)
        kl_b = kl_n.view(-1, DIGITS).mean(1)
        for index in range(len(ORDERS)):
            means[index] = kl_b[policy.order_of(tokens_bs) == index].mean()
    policy.broadcast_from_last_stage(means)
    return dict(zip(ORDERS, mean_over_ranks(*means), strict=True))
