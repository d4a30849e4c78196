"""The reinforcement-learning program: the model answers, a checker and a teacher score, ``train()`` learns.

The teacher takes part by on-policy distillation: ``log p_teacher - log p`` of a token is added to its
advantage, with a weight. That is the policy gradient of the reverse KL divergence from the teacher (Thinking
Machines, "On-Policy Distillation", 2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.core import parallel_state

from . import digits
from .policy import answer, build, make_generator, mean_over_ranks
from .teachers import Teachers
from .training import policy_loss, shuffled, train

# Numbers per rank and rollout.
_PROMPTS, _ANSWERS_PER_PROMPT = 64, 8
_STEPS, _MICROBATCHES_PER_STEP = 8, 2
_MICROBATCH = _PROMPTS * _ANSWERS_PER_PROMPT // (_STEPS * _MICROBATCHES_PER_STEP)
_DISTILLATION_WEIGHT = 0.3


class Rollout(NamedTuple):
    """Results of one rollout, averaged over all ranks; ``reverse_kl`` is per token, in nats."""

    reward: float
    exact_match: float
    reverse_kl: float
    steps: int


def logits_bytes() -> int:
    """Return the size of a microbatch's logits in float32 on one rank of the last pipeline stage."""
    ranks: int = parallel_state.get_tensor_model_parallel_world_size()
    return 4 * _MICROBATCH * digits.LENGTH * digits.VOCABULARY // ranks


def rollouts(count: int, seed: int, teachers: Teachers) -> Iterator[Rollout]:
    """Run the program on this rank and yield after each ``train()``. Megatron must be initialized."""
    model, optimizer = build(seed)
    generator = make_generator(model, seed)
    for _ in range(count):
        prompts_bp = digits.prompts(_PROMPTS, generator).repeat_interleave(_ANSWERS_PER_PROMPT, dim=0)
        tokens_bs, log_probs_bd = answer(model, prompts_bp, generator)
        scores_bd = digits.score(tokens_bs)
        reverse_kl_bd = log_probs_bd - teachers(tokens_bs)
        # The score of each digit minus its mean over all answers to the same prompt.
        groups_pad = scores_bd.view(_PROMPTS, _ANSWERS_PER_PROMPT, digits.DIGITS)
        advantages_bd = (groups_pad - groups_pad.mean(dim=1, keepdim=True)).view_as(scores_bd)
        advantages_bd -= _DISTILLATION_WEIGHT * reverse_kl_bd
        batch = {"tokens": tokens_bs, "log_probs": log_probs_bd, "advantages": advantages_bd}
        indices = shuffled(len(tokens_bs), _STEPS * _MICROBATCHES_PER_STEP, generator)
        microbatches = ({name: values[index] for name, values in batch.items()} for index in indices)
        train(model, optimizer, microbatches, [_MICROBATCHES_PER_STEP] * _STEPS, _MICROBATCH, policy_loss)
        exact_match_b = scores_bd.all(dim=1).float()
        means = mean_over_ranks(scores_bd.mean(), exact_match_b.mean(), reverse_kl_bd.mean())
        reward, exact_match, reverse_kl = means
        yield Rollout(reward, exact_match, reverse_kl, _STEPS)
