"""``vocab_size=``: ids of the padding have no probability, on whichever tensor-parallel rank they lie."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from megatron_rl_patches.inference import forward_hidden_states, forward_log_probs, forward_topk, output_head
from megatron_rl_patches.losses import FullDistribution, full_vocabulary_divergence
from megatron_rl_patches.testing import TinyModel
from tests.ranks import on_ranks
from tests.real.test_scoring import filled

#: The model has 32 ids. The padding begins on the first rank, on the second, and between the two.
SIZES = (7, 16, 20)


def _scores(tp: int, size: int) -> list[torch.Tensor]:
    _, model = filled(TinyModel(tp=tp))
    group = parallel_state.get_tensor_model_parallel_group()
    tokens = torch.randint(size, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = [{"tokens": tokens, "lengths": [9, 6]}]
    how: dict[str, Any] = {"vocab_size": size, "progress": False}
    scores = forward_log_probs(model, batch, with_entropy=True, **how)
    topk = forward_topk(model, batch, 5, **how)
    at = forward_topk(model, batch, at=[of_sample.indices for of_sample in topk], **how)
    hidden = torch.cat(forward_hidden_states(model, batch, progress=False))
    (logits,) = FullDistribution.from_hidden(hidden, output_head(model)).logits()
    turned = logits[torch.arange(len(logits)).flip(0)]
    results = [*scores.log_probs, *scores.entropy]
    results.append(full_vocabulary_divergence(logits, turned, num_ids=size, tp_group=group))
    for distribution in (*topk, *at):
        results += [distribution.indices, distribution.log_probs, distribution.tail_log_prob]
    return results


@on_ranks(2)
def test_tensor_parallel_ranks_score_as_one_rank_does() -> None:
    for size in SIZES:
        for mine, whole in zip(_scores(2, size), _scores(1, size), strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-5, atol=2e-6, msg=f"vocab_size={size}")
