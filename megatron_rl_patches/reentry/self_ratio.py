"""The self-ratio check: log-probs of training against those that were scored with the same weights.

Before the first update all ratios are 1, or else clipping acts on differences that no update made. Nothing
here starts a collective, draws a random number or has a gradient; only ``report()`` waits for a device.
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

_MOST_PADDED = 2**18  # numbers; samples whose lengths differ so much that they take more are added in halves
#: What is summed over the tokens of a sample, and all numbers of a sample.
_SUMS = ("tokens", "not_finite", "above", "differs", "first", "rest", "late", "size", "ratio", "gap", "slope")
_NAMES = (*_SUMS, "gap_squared", "slope_squared", "product", "low", "high", "worst", "worst_at")


@dataclass(frozen=True)
class RatioReport:
    """By how much two sets of log-probs differ, at the tokens of this rank that count, in nats.

    ``not_finite`` tokens are infinite on one side alone, or NaN, and count as ``above`` the limit. ``ratio``
    is the least, mean and greatest ``exp(trained - scored)``. ``worst`` has the greatest difference of up to
    three samples, with the sample's number in the order of :meth:`SelfRatio.add`, and the token's within it.
    ``is_off``: the mean is above a tenth of the limit, more than one token in 200 is above the limit, or any
    is not finite. Then ``causes`` are those that fit, the best first.
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
        places = [f"{gap:+.2g} at token {token} of sample {sample}" for gap, sample, token in self.worst]
        worst = f"; worst: {', '.join(places).replace('+nan', 'NaN')}" if places else ""
        causes = f"; what fits: {', '.join(self.causes) or 'no known cause'}" if self.is_off else ""
        return (
            f"{self.mean:.2g} nats on average and {self.largest:.2g} at most, {self.above} of {self.tokens} "
            f"tokens above the limit, {self.not_finite} not finite; ratios from {self.ratio[0]:.3g} to "
            f"{self.ratio[2]:.3g}, {self.ratio[1]:.3g} on average{worst}{causes}"
        )


@dataclass
class SelfRatio:
    """Compares the log-probs of a step, whose microbatches :meth:`add` reduces to a few numbers per sample.

    What is known rules causes out: the configuration of ``model``, chunks in the mode of training;
    ``vocab_size`` without padding; ``top_p`` of the rollout; whether the job ``replays_routes``. For
    ``limit``, in nats and above 0, see :class:`RatioReport`.
    """

    model: Any = None
    limit: float = 0.1
    vocab_size: int | None = None
    top_p: float | None = None
    replays_routes: bool | None = None
    _added: list[Tensor] = field(default_factory=list, init=False)  # [names, samples], float64
    _prompts: list[int | None] = field(default_factory=list, init=False)
    _has_entropies: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise InvalidInputError(f"limit is {self.limit}; expected nats above 0")

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

        self._has_entropies &= entropies is not None
        masks = [torch.ones_like(each) for each in trained] if masks is None else masks
        entropies = [torch.zeros_like(each) for each in trained] if entropies is None else entropies
        columns = trained, scored, masks, entropies
        lengths = [[*map(len, values)] for values in columns]
        count, total, longest = len(trained), sum(lengths[0]), max(lengths[0], default=0)
        if any(each != lengths[0] for each in lengths):
            raise InvalidInputError(f"lengths of trained, scored, masks, entropies differ: {lengths}")
        if prompts is not None and len(prompts) != count:
            raise InvalidInputError(f"prompts has {len(prompts)} lengths, expected one per sample: {count}")
        if count * longest > max(_MOST_PADDED, 2 * total):
            for half in slice(count // 2), slice(count // 2, None):
                self.add(trained[half], scored[half], masks[half], entropies[half], prompts and prompts[half])
        elif count:
            self._added.append(self._numbers(*columns))
            self._prompts += [None] * count if prompts is None else prompts

    def _numbers(self, *columns: Sequence[Tensor]) -> Tensor:
        """Return what ``_NAMES`` names ``[names, samples]``, of the first four arguments of :meth:`add`."""
        import torch

        joined = (torch.nn.utils.rnn.pad_sequence([*each], batch_first=True).double() for each in columns)
        # There may be no token, so that one that does not count is appended.
        trained, scored, masks, entropies = (torch.nn.functional.pad(x.detach(), (0, 1)) for x in joined)
        is_finite, counted = trained.isfinite() & scored.isfinite(), masks != 0
        not_finite, counted = counted & ~is_finite & (trained != scored), counted & is_finite
        gap = torch.where(counted, trained - scored, 0.0)
        # With entropies: scores at T times the temperature of training make a gap of about (T - 1) * slope.
        slope = torch.where(counted, scored + entropies, 0.0)
        size, place = gap.abs(), counted.cumsum(1)
        above, differs = (size > self.limit) | not_finite, size > self.limit / 1000
        first = differs.cumsum(1) == 0  # tokens before the first that differs, so that the sum is its place
        rest, late = counted & ~first, size * (2 * place > place[:, -1:])
        sums = [counted, not_finite, above, differs, first, rest, late, size, gap.expm1(), gap, slope]
        each_gap = torch.where(not_finite, trained - scored, gap)
        at = each_gap.abs().argmax(1, keepdim=True)  # NaN, if there is one
        low, high = torch.where(counted, gap, math.inf).amin(1), torch.where(counted, gap, -math.inf).amax(1)
        summed = torch.stack([*sums, gap * gap, slope * slope, slope * gap]).sum(2)
        return torch.cat([summed, torch.stack([low, high, each_gap.gather(1, at)[:, 0], at[:, 0].double()])])

    def report(self) -> RatioReport | None:
        """Return what was added so far, in one read from the device; ``None`` without a token that counts."""
        import torch

        numbers = torch.cat(self._added, 1).tolist() if self._added else [[0.0]] * len(_NAMES)
        by_sample: dict[str, list[float]] = dict(zip(_NAMES, numbers, strict=True))
        tokens, not_finite, above = (int(sum(by_sample[name])) for name in ("tokens", "not_finite", "above"))
        if not (counted := tokens + not_finite):
            return None
        mean = {name: sum(each) / max(tokens, 1) for name, each in by_sample.items()}
        low, high = (min(by_sample["low"]), max(by_sample["high"])) if tokens else (0.0, 0.0)
        size, largest = mean["size"], max(high, -low)
        ratio = math.exp(low), 1 + mean["ratio"], math.exp(min(high, 700))
        samples = zip(by_sample["worst"], by_sample["worst_at"], strict=True)
        worst = [(gap, i, int(at)) for i, (gap, at) in enumerate(samples) if gap]
        worst.sort(key=lambda each: (each[0] == each[0], -abs(each[0])))  # NaN is the first
        is_off = not_finite > 0 or size > self.limit / 10 or above > counted / 200
        causes = self._causes(by_sample, mean) if is_off else []
        return RatioReport(counted, above, not_finite, size, largest, ratio, worst[:3], causes, is_off)

    def _causes(self, by_sample: dict[str, list[float]], mean: dict[str, float]) -> list[str]:
        """Return the causes that neither the configuration nor the numbers rule out, the best fit first."""
        chunks, has_nan = as_chunks(self.model), any(map(math.isnan, by_sample["worst"]))
        configs = distinct_configs(chunks)

        def most(*names: str) -> Any:
            return max((getattr(config, name, 0) or 0 for config in configs for name in names), default=0)

        training = [module for chunk in chunks for module in chunk.modules() if module.training]
        rates = [module.p for module in training if has_base(module, "Dropout")]
        rate = max([*rates, most("hidden_dropout", "attention_dropout") if training else 0])
        logits = max((attribute_of(chunk, "vocab_size", 0) for chunk in chunks), default=0)
        padding = math.log(logits / self.vocab_size) if logits and self.vocab_size else math.inf
        replays = self.replays_routes or most("moe_enable_routing_replay", "enable_routing_replay")
        topk = max([most("dsa_indexer_topk"), *(getattr(each, "index_topk", 0) or 0 for each in training)])

        same, size, squared = self.limit / 1000, mean["size"], mean["gap_squared"]
        low, high, tokens = min(by_sample["low"]), max(by_sample["high"]), max(sum(by_sample["tokens"]), 1)
        one_sign, infinite, largest = min(high, -low) <= same, any(by_sample["not_finite"]), max(high, -low)
        variance = mean["slope_squared"] - mean["slope"] ** 2
        covariance = mean["product"] - mean["slope"] * mean["gap"]
        explained = covariance**2 / (variance * (squared - mean["gap"] ** 2) or math.inf)
        is_linear = explained > (0.8 if one_sign else 0.2) + 4 / tokens  # other causes have one sign, too
        is_noise = mean["differs"] > 0.9 and not is_linear and (not one_sign or tokens < 8)
        is_rounding = squared < 0.05**2 and mean["gap"] ** 2 < (0.04 + 4 / tokens) * squared
        is_rounding = is_rounding and mean["late"] < 0.75 * size  # it does not grow with the position
        is_mask = one_sign and largest <= same - math.log(self.top_p or 1e-300) and self.top_p != 1
        columns = (by_sample[name] for name in ("tokens", "differs", "rest", "first"))
        samples = [sample for sample in zip(*columns, self._prompts, strict=True) if sample[0]]
        changed = [sample for sample in samples if sample[1]]
        is_rest = len(changed) < len(samples) and all(each[1] > 0.9 * each[2] for each in changed)
        is_late = all(prompt is None or prompt + first >= topk for *_, first, prompt in changed)
        temperature = f"temperature, {1 + covariance / (variance or 1):.3g} times as high in scoring"
        vocabulary = f"padded vocabulary, of {logits} logits" if logits else "padded vocabulary"
        causes = (  # how much a cause says, whether it fits, and its name
            (4, is_linear, temperature if self._has_entropies else "temperature"),
            (3, is_noise and rate, f"dropout, at a rate of {rate:g}"),
            (3, changed and topk and is_late, f"sparse attention to the top {topk}"),
            (3 if padding < math.inf else 1, one_sign and not infinite and size < 3 * padding, vocabulary),
            (2 if infinite else 1, is_mask and not has_nan, "mask of top-p or top-k"),
            (2, most("num_moe_experts") and (size**2 < 0.3 * squared or replays), "router replay"),
            (2, changed and is_rest, "changed packing"),
            (1, is_noise and is_rounding and (not chunks or most("bf16", "fp16")), "precision of the head"),
            (0, is_noise and not chunks, "dropout"),
        )
        return [cause for _, fits, cause in sorted(causes, key=lambda each: -each[0]) if fits]
