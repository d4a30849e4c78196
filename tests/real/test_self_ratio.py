"""Each known cause in a real tiny model is caught by the self-ratio check, and the run without it is silent.

A pass in eval mode scores, and another one with the same weights computes log-probs in train mode.
"""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_rl_patches.reentry import RatioReport, SelfRatio
from megatron_rl_patches.testing import TinyModel
from tests.ranks import on_ranks

SAMPLES, LENGTH, PROMPT = 3, 48, 4
VOCABULARY, PADDED, TOPK = 26, 32, 12
TOTAL = SAMPLES * LENGTH
SPARSE = f"sparse attention to the top {TOPK}"


class Passes:
    """Passes over packed samples, whose tokens are those of a vocabulary that the model pads."""

    def __init__(self, kind: str = "dense", bf16: bool = False, **config: Any) -> None:
        options = TinyModel(kind=kind, bf16=bf16, vocab_size=PADDED, seq_length=TOTAL, config=config)
        options.initialize()
        [self.model] = options.chunks()
        self.gpt = self.model.module if bf16 else self.model
        self.gpt.output_layer.weight.data *= 25  # probabilities differ as those of a trained model do
        self.tokens = torch.randint(VOCABULARY, (1, TOTAL), generator=torch.Generator().manual_seed(0))
        at = self.at = torch.arange(TOTAL)
        self.own = (at[:, None] >= at) & (at[:, None] // LENGTH == at // LENGTH)

    def logits(self, sees: Tensor | None = None, train: bool = False) -> Tensor:
        """Return logits ``[samples, response, V]``; by default, tokens see those of their own sample."""
        hides = ~(self.own if sees is None else sees)
        logits: Tensor = self.model.train(train)(self.tokens, self.at[None], hides[None, None])
        return logits.view(SAMPLES, LENGTH, -1)[:, PROMPT - 1 : -1]

    def exact_logits(self) -> Tensor:
        """Return logits that are not rounded to the type of the head."""
        states: list[Tensor] = []
        hook = self.gpt.output_layer.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
        self.logits()
        hook.remove()
        logits = states[0][:, 0].float() @ self.gpt.output_layer.weight.float().T
        return logits.view(SAMPLES, LENGTH, -1)[:, PROMPT - 1 : -1]

    def log_probs(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        ids = self.tokens.view(SAMPLES, LENGTH)[:, PROMPT:, None]
        return (logits.float() / temperature).log_softmax(-1).gather(-1, ids)[..., 0]

    def report(self, scored: Tensor, limit: float = 0.1, **known: Any) -> RatioReport:
        logits = self.logits(train=True).float()
        ratio = SelfRatio([self.model], limit, **{"vocab_size": PADDED, "top_p": 1.0, **known})
        entropies = torch.distributions.Categorical(logits=logits).entropy()
        ratio.add(self.log_probs(logits), scored, entropies=entropies, prompts=[PROMPT] * SAMPLES)
        report = ratio.report()
        assert report is not None
        return report

    def check(self, cause: str, logits: Tensor, temperature: float = 1.0, **known: Any) -> None:
        """Check that scores of these logits are off, for this one cause."""
        report = self.report(self.log_probs(logits, temperature), **known)
        assert report.is_off and report.causes == [cause], report

    def check_silent(self, **known: Any) -> None:
        report = self.report(self.log_probs(self.logits()), **known)
        assert (report.largest, report.ratio, report.causes, report.is_off) == (0, (1, 1, 1), [], False)


def mask_of_top_p(logits: Tensor, top_p: float) -> Tensor:
    values, ids = logits.sort(descending=True)
    probs = values.softmax(-1)
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, probs.cumsum(-1) - probs < top_p)
    return logits.masked_fill(~kept, -torch.inf)


@on_ranks(1)
@torch.no_grad()
def test_causes() -> None:
    dense = Passes()
    dense.check_silent()
    logits = dense.logits()
    dense.check("temperature, 0.7 times as high in scoring", logits, temperature=0.7)
    dense.check("temperature, 1.2 times as high in scoring", logits, temperature=1.2)
    vocabulary = {"vocab_size": VOCABULARY}
    dense.check("padded vocabulary, of 32 logits", logits[..., :VOCABULARY], **vocabulary)
    dense.check("mask of top-p or top-k", mask_of_top_p(logits, 0.9), top_p=0.9)
    dense.check("changed packing", dense.logits(sees=torch.ones_like(dense.own).tril()))
    with mock.patch.object(dense.model.config, "dsa_indexer_topk", TOPK, create=True):
        dense.check_silent()
        dense.check(SPARSE, dense.logits(sees=dense.own & (dense.at[:, None] - dense.at < TOPK)))

    for name in ("hidden_dropout", "attention_dropout"):
        passes = Passes(**{name: 0.1})
        passes.check("dropout, at a rate of 0.1", passes.logits())

    rounded = Passes(bf16=True)
    rounded.check_silent(limit=0.01)
    rounded.check("precision of the head", rounded.exact_logits(), limit=0.01)

    moe = Passes("moe")
    moe.check_silent()
    *_, router = (module for module in moe.model.modules() if type(module).__name__ == "TopKRouter")
    hook = router.register_forward_hook(_with_other_routes)
    logits = moe.logits()
    hook.remove()
    moe.check("router replay", logits)


def _with_other_routes(_: Any, __: Any, chosen: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Send each 40th token to other experts."""
    rows = torch.arange(len(chosen[0])) % 40 == 0
    return tuple(torch.where(rows[:, None], each.roll(1, -1), each) for each in chosen)
