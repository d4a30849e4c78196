"""Known causes in a bare model of Megatron; ``tests/frameworks/test_real_self_ratio.py`` has all of them."""

from typing import Any

import torch

from megatron_rl_patches.reentry import SelfRatio
from megatron_rl_patches.testing import TinyModel
from tests.ranks import on_ranks

LENGTH, TOTAL = 48, 3 * 48
AT = torch.arange(TOTAL)
OWN = (AT[:, None] >= AT) & (AT[:, None] // LENGTH == AT // LENGTH)  # packed samples


def causes(sees: Any = OWN, ids: int = 32, temperature: float = 1, topk: int = 0, **config: Any) -> list[str]:
    """Score in eval mode, with an attention, a vocabulary and a temperature, and compare with train mode."""
    options = TinyModel(vocab_size=32, seq_length=TOTAL, config=config)
    options.initialize()
    [model] = options.chunks()
    model.output_layer.weight.data *= 25  # probabilities differ as those of a trained model do
    model.decoder.index_topk = topk  # as slime's modules have it
    tokens = torch.randint(26, (1, TOTAL), generator=torch.Generator().manual_seed(0))
    scored, trained = (
        model.train(mode)(tokens, AT[None], ~seen[None, None]).view(3, LENGTH, -1)[:, :-1].log_softmax(-1)
        for mode, seen in ((False, sees), (True, OWN))
    )
    scored = (scored[..., :ids] / temperature).log_softmax(-1)
    labels, ratio = tokens.view(3, LENGTH)[:, 1:, None], SelfRatio([model], vocab_size=ids, top_p=1.0)
    log_probs = [values.gather(-1, labels)[..., 0] for values in (trained, scored)]
    ratio.add(*log_probs, entropies=-(trained * trained.exp()).sum(-1), prompts=[1] * 3)
    report = ratio.report()
    assert report is not None and report.is_off == bool(report.causes)
    return report.causes


@on_ranks(1)
@torch.no_grad()
def test_causes() -> None:
    assert causes() == []
    assert causes(temperature=1.2) == ["temperature, 1.2 times as high in scoring"]
    assert causes(ids=26) == ["padded vocabulary, of 32 logits"]
    assert causes(sees=AT[:, None] >= AT) == ["changed packing"]
    assert causes(sees=OWN & (AT[:, None] - AT < 12), topk=12) == ["sparse attention to the top 12"]
    assert causes(attention_dropout=0.1) == ["dropout, at a rate of 0.1"]
