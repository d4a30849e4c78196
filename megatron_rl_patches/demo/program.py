"""The reinforcement-learning program: the model writes, the checker and a teacher score, ``train()`` learns.

The teacher's part is token-level on-policy distillation: the advantage of a token grows by how much more
likely the teacher finds it than the policy does, which is the policy gradient of the reverse KL divergence
from the teacher (Thinking Machines, "On-Policy Distillation", 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from . import digits
from .objectives import policy_loss
from .policy import answer, build, generator_beside, mean_over_ranks
from .training import Batch, shuffled, train

#: Prompts with answers, ``[b, PROMPT + DIGITS]``, in; the teacher's log-probabilities, ``[b, DIGITS]``, out.
Teacher = Callable[[torch.Tensor], torch.Tensor]

# Per rank and rollout.
_PROMPTS, _ANSWERS_PER_PROMPT = 64, 8
_STEPS, _MICROBATCHES_PER_STEP = 8, 2
_MICROBATCH = _PROMPTS * _ANSWERS_PER_PROMPT // (_STEPS * _MICROBATCHES_PER_STEP)
_DISTILLATION = 0.3


@dataclass(frozen=True)
class Rollout:
    """What came out of one rollout, over all ranks.

    Attributes:
        reward: share of digits that are right; 0.1 or less by chance.
        solved: share of answers with all digits right.
        divergence: reverse KL divergence from the teacher per token, in nats, estimated on the answers.
        steps: optimizer steps that ``train()`` then made.
    """

    reward: float
    solved: float
    divergence: float
    steps: int


def rollouts(count: int, seed: int, teacher: Teacher) -> Iterator[Rollout]:
    """Run the program on this rank, Megatron being initialised; yield after each ``train()``."""
    model, optimizer = build(seed)
    generator = generator_beside(model, seed)
    for _ in range(count):
        prompts_bp = digits.prompts(_PROMPTS, generator).repeat_interleave(_ANSWERS_PER_PROMPT, dim=0)
        tokens_bs, log_probs_bd = answer(model, prompts_bp, generator)
        scores_bd = digits.score(tokens_bs)
        distance_bd = log_probs_bd - teacher(tokens_bs)
        advantages_bd = _advantages(scores_bd) - _DISTILLATION * distance_bd
        batch = {"tokens": tokens_bs, "log_probs": log_probs_bd, "advantages": advantages_bd}
        microbatches = _microbatches(batch, generator)
        train(model, optimizer, microbatches, [_MICROBATCHES_PER_STEP] * _STEPS, _MICROBATCH, policy_loss)
        solved_b = scores_bd.all(dim=1).float()
        reward, solved, divergence = mean_over_ranks(scores_bd.mean(), solved_b.mean(), distance_bd.mean())
        yield Rollout(reward, solved, divergence, _STEPS)


def _advantages(scores_bd: torch.Tensor) -> torch.Tensor:
    """How much better each digit is than that digit in the other answers to the same prompt."""
    groups_pad = scores_bd.view(_PROMPTS, _ANSWERS_PER_PROMPT, digits.DIGITS)
    return (groups_pad - groups_pad.mean(dim=1, keepdim=True)).view_as(scores_bd)


def _microbatches(batch: Batch, generator: torch.Generator) -> Iterator[Batch]:
    for chosen in shuffled(len(batch["tokens"]), _STEPS * _MICROBATCHES_PER_STEP, generator):
        yield {name: values[chosen] for name, values in batch.items()}
