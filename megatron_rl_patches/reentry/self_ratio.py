"""The self-ratio check: log-probs of training against those that were scored with the same weights.

Until weights step, their ratio is 1 for each token, or clipping and importance weights act on what no update
has changed (NVIDIA/Megatron-LM#2370, #7169, alibaba/ROLL#284). Nothing here starts a collective, draws a
random number or has a gradient, and only :meth:`SelfRatio.report` waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..common.chunks import as_chunks, attribute_of, distinct_configs, has_base
from ..errors import InvalidInputError

if TYPE_CHECKING:
    from torch import Tensor

#: Sums over a sample's tokens: d is the difference, and x the scored log-prob, plus the entropy if that is
#: known. Next to T = 1, d is (T - 1) x for scores at T times the temperature of training.
_SUMS = ("tokens", "not_finite", "above", "differ", "size", "late", "d", "dd", "ratio", "x", "xx", "xd")
_NAMES = (*_SUMS, "low", "high", "worst", "at", "first", "after")


@dataclass(frozen=True)
class RatioReport:
    """By how much two sets of log-probs differ, at the tokens of this rank that count, in nats.

    ``ratio`` is the least, mean and greatest ``exp(trained - scored)``; ``worst`` has differences with sample
    and token; tokens that are ``not_finite`` on one side alone are ``above`` the limit, too; ``causes`` fit,
    the best first. ``is_off``: the mean is above a tenth of the limit, a token in 200 above it, or any is not
    finite. What bfloat16 does to samples that are packed in another way should stay below.
    """

    tokens: int
    above: int
    not_finite: int
    mean: float
    largest: float
    ratio: tuple[float, float, float]
    worst: list[tuple[float, int, int]]
    causes: list[str]
    is_off: bool

    def __str__(self) -> str:
        worst = ", ".join(f"{d:+.2g} at token {at} of sample {i}" for d, i, at in self.worst)
        causes = f"; worst: {worst}; what fits: {', or '.join(self.causes) or 'no known cause'}"
        return (
            f"{self.mean:.2g} nats on average and {self.largest:.2g} at most, {self.above} of {self.tokens} "
            f"tokens above the limit, {self.not_finite} not finite; ratios from {self.ratio[0]:.3g} to "
            f"{self.ratio[2]:.3g}, {self.ratio[1]:.3g} on average{causes if worst else ''}"
        )


@dataclass
class SelfRatio:
    """Compares the log-probs of a step, whose microbatches :meth:`add` reduces to a few numbers per sample.

    What is known of ``model``, chunks as they are in training, rules causes out, as do ``vocab_size`` without
    padding, ``top_p`` of the rollout, and whether it ``replays_routes``. For ``limit``, in nats, see
    :class:`RatioReport`.
    """

    model: Any = None
    limit: float = 0.1
    vocab_size: int | None = None
    top_p: float | None = None
    replays_routes: bool | None = None
    _added: list[Tensor] = field(default_factory=list, init=False)  # [names, samples], float64
    _prompts: list[int | None] = field(default_factory=list, init=False)

    def add(
        self,
        trained: Sequence[Tensor],
        scored: Sequence[Tensor],
        masks: Sequence[Tensor] | None = None,
        entropies: Sequence[Tensor] | None = None,
        prompts: Sequence[int] | None = None,
    ) -> None:
        """Add a microbatch: for each sample ``[n]``, its response or this rank's part of that.

        ``masks`` are not 0 at tokens that count, by default all; ``entropies`` are those of training;
        ``prompts`` are their lengths, if responses are whole. If lengths differ, InvalidInputError is raised.
        """
        import torch

        def padded(values: Sequence[Tensor]) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence([*values], batch_first=True).double()

        masks = [torch.ones_like(each) for each in trained] if masks is None else masks
        of_all = trained, scored, masks, trained if entropies is None else entropies
        lengths = [list(map(len, values)) for values in of_all]
        if any(each != lengths[0] for each in lengths):
            raise InvalidInputError(f"lengths of trained, scored, masks and entropies differ: {lengths}")
        if not sum(lengths[0]):
            return
        with torch.no_grad():
            a, b, counted = padded(trained), padded(scored), padded(masks) != 0
            is_finite = a.isfinite() & b.isfinite()
            bad, counted = counted & ~is_finite & (a != b), counted & is_finite
            d = torch.where(counted, a - b, 0.0)
            x = torch.where(counted, b if entropies is None else b + padded(entropies), 0.0)
            size, place = d.abs(), counted.cumsum(1)
            differ, late = size > self.limit / 1000, size * (2 * place > place[:, -1:])
            sums = [counted, bad, (size > self.limit) | bad, differ, size, late, d, d * d, d.expm1(), x]
            at = torch.where(bad, math.inf, size).argmax(1, keepdim=True)
            first = differ.byte().argmax(1, keepdim=True)  # of several maxima torch returns the first
            after = place[:, -1:] - place.gather(1, first) + 1
            columns = [d.amin(1, True), d.amax(1, True), torch.where(bad, math.inf, d).gather(1, at)]
            columns = [each.T.double() for each in (*columns, at, first, after)]
            self._added.append(torch.cat([torch.stack([*sums, x * x, x * d]).sum(2), *columns]))
        self._prompts += [None] * len(d) if prompts is None else prompts

    def report(self) -> RatioReport | None:
        """Return what was added so far, in one read from the device; ``None`` without a token that counts."""
        import torch

        numbers = torch.cat(self._added, 1).tolist() if self._added else [[0.0]] * len(_NAMES)
        n = dict(zip(_NAMES, numbers, strict=True))
        tokens, bad, above = (int(sum(n[name])) for name in _SUMS[:3])
        if not tokens + bad:
            return None
        mean = {name: sum(n[name]) / max(tokens, 1) for name in _SUMS}
        low, high, size = min(n["low"]), max(n["high"]), mean["size"]
        ratio = math.exp(low), 1 + mean["ratio"], math.exp(min(high, 700))
        worst = [(d, i, int(at)) for i, (d, at) in enumerate(zip(n["worst"], n["at"], strict=True)) if d]
        worst = sorted(worst, key=lambda sample: -abs(sample[0]))[:3]
        causes = self._causes(n, mean) if worst else []
        is_off = bad > 0 or size > self.limit / 10 or above > (tokens + bad) / 200
        return RatioReport(tokens + bad, above, bad, size, max(high, -low), ratio, worst, causes, is_off)

    def _causes(self, n: dict[str, list[float]], mean: dict[str, float]) -> list[str]:
        """Return the causes that neither the configuration nor the numbers rule out, the best fit first."""
        chunks = as_chunks(self.model)
        configs = distinct_configs(chunks)

        def most(*names: str) -> Any:
            return max((getattr(config, name, 0) or 0 for config in configs for name in names), default=0)

        training = [module for chunk in chunks for module in chunk.modules() if module.training]
        rates = [module.p for module in training if has_base(module, "Dropout")]
        rate = max([*rates, most("hidden_dropout", "attention_dropout") if training else 0])
        logits = max((attribute_of(chunk, "vocab_size", 0) for chunk in chunks), default=0)
        padding = math.log(logits / self.vocab_size) if logits and self.vocab_size else math.inf
        replays, topk = self.replays_routes or most("moe_enable_routing_replay"), most("dsa_indexer_topk")
        is_low = not chunks or most("bf16", "fp16")

        low, high, same, tokens = min(n["low"]), max(n["high"]), self.limit / 1000, max(sum(n["tokens"]), 1)
        one_sign, infinite = min(high, -low) <= same, any(n["not_finite"])
        variance, covariance = mean["xx"] - mean["x"] ** 2, mean["xd"] - mean["x"] * mean["d"]
        explained = covariance**2 / (variance * (mean["dd"] - mean["d"] ** 2) or math.inf)
        is_linear = explained > 0.2 + 4 / tokens and not one_sign
        is_noise = mean["differ"] > 0.9 and not is_linear and not one_sign
        is_few = mean["size"] ** 2 < 0.3 * mean["dd"]
        is_rounding = mean["dd"] < 0.05**2 and mean["d"] ** 2 < (0.04 + 4 / tokens) * mean["dd"]
        is_rounding = is_rounding and mean["late"] < 0.75 * mean["size"]  # it does not grow with the position
        is_mask = one_sign and max(high, -low) <= same - math.log(self.top_p or 1e-300)
        samples = [*zip(n["differ"], n["after"], n["first"], self._prompts, strict=True)]
        changed = [sample for sample in samples if sample[0]]
        is_rest = len(changed) < len(samples) and all(many > 0.9 * after for many, after, *_ in changed)
        is_late = all(prompt is None or prompt + first >= topk for *_, first, prompt in changed)
        causes = (  # how much a cause says, whether it fits, and its name
            (4, is_linear, f"temperature, {1 + covariance / (variance or 1):.3g} times as high in scoring"),
            (3, is_noise and rate, f"dropout, at a rate of {rate:g}"),
            (3, changed and topk and is_late, f"sparse attention to the top {topk}"),
            (
                3 if padding < math.inf else 1,
                one_sign and not infinite and mean["size"] < 3 * padding,
                f"padded vocabulary, of {logits or 'unknown'} logits",
            ),
            (2 if infinite else 1, is_mask and self.top_p != 1, "mask of top-p or top-k"),
            (2, most("num_moe_experts") and (is_few or replays), "router replay"),
            (2, changed and is_rest, "changed packing"),
            (1, is_noise and is_rounding and is_low, "precision of the head"),
            (0, is_noise and not chunks, "dropout"),
        )
        return [cause for _, fits, cause in sorted(causes, key=lambda each: -each[0]) if fits]
