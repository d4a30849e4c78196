"""What ``forward_only`` of each release of slime collects."""

from __future__ import annotations

import torch

from megatron_rl_patches.inference.host_topk import Trainer
from megatron_rl_patches.losses.topk_distribution import TopKDistribution


def test_a_pair_for_a_loss_and_the_lists_alone_for_what_is_none() -> None:
    log_probs = torch.tensor([[0.5, 0.25], [0.5, 0.5], [0.9, 0.1]]).log()
    found = TopKDistribution(torch.zeros(3, 2, dtype=torch.long), log_probs, torch.zeros(3))
    loss, collected = Trainer._result(found, [2, 1], non_loss_data=False)
    alone = Trainer._result(found, [2, 1], non_loss_data=True)
    assert loss == 0
    assert alone.keys() == collected.keys() == {"topk"}
    for samples in (alone["topk"], collected["topk"]):
        assert [sample.log_probs.tolist() for sample in samples] == [
            log_probs[:2].tolist(),
            log_probs[2:].tolist(),
        ]
