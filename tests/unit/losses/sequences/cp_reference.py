"""Reference for the layouts: a microbatch as frameworks lay it out, made by slicing whole samples."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import example
from hypothesis import strategies as st

from megatron_rl_patches.losses.sequences import SequenceLayout
from tests.references.dense import dense_log_probs_and_entropy

Tensors = list[torch.Tensor]
VOCAB = 6


@dataclass(frozen=True)
class Case:
    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    cp_size: int = 1
    scheme: str = "packed"  # "packed", "padded" or "all-gather"
    sample_padding: int = 0  # chunks, or tokens without zigzag, added to every sample
    tail: int = 0  # rows added after the last sample of a packed stream

    @property
    def totals(self) -> list[int]:
        return [prompt + response for prompt, response in zip(self.prompts, self.responses, strict=True)]

    @property
    def zigzag(self) -> bool:
        return self.cp_size > 1 and self.scheme != "all-gather"

    @property
    def max_seq_len(self) -> int:
        return max(self.totals) + self.sample_padding

    def padded(self) -> list[int]:
        multiple = 2 * self.cp_size if self.zigzag else 1
        if self.scheme == "padded":
            return [-(-self.max_seq_len // multiple) * multiple] * len(self.totals)
        return [(-(-total // multiple) + self.sample_padding) * multiple for total in self.totals]

    def num_rows(self) -> int:
        return -(-sum(self.padded()) // self.cp_size) + self.tail

    def layout(self, cp_rank: int) -> SequenceLayout:
        options: dict[str, Any] = {"cp_rank": cp_rank, "cp_size": self.cp_size}
        if self.scheme == "padded":
            options |= {"qkv_format": "bshd", "max_seq_lens": [self.max_seq_len] * len(self.totals)}
        if self.scheme == "all-gather":
            options["allgather_cp"] = True
        if self.sample_padding and self.scheme != "padded":
            options["padded_lengths"] = self.padded()
        if self.tail:
            options["num_rows"] = self.num_rows()
        return SequenceLayout.build(self.totals, self.responses, **options)

    def layouts(self) -> list[SequenceLayout]:
        return [self.layout(rank) for rank in range(self.cp_size)]

    def shard(self, samples: Tensors, cp_rank: int) -> torch.Tensor:
        """What the model of one rank sees of whole samples ``[total, ...]``: ``[*logits_shape, ...]``."""
        samples = [_pad(sample, length) for sample, length in zip(samples, self.padded(), strict=True)]
        if self.zigzag:
            chunks = 2 * self.cp_size
            mine = [cp_rank, chunks - 1 - cp_rank]
            samples = [sample.unflatten(0, (chunks, -1))[mine].flatten(0, 1) for sample in samples]
        if self.scheme == "padded":
            return torch.stack(samples)
        if not self.zigzag:
            stream = _pad(torch.cat(samples), self.num_rows() * self.cp_size)
            return stream.chunk(self.cp_size)[cp_rank][None]
        return _pad(torch.cat(samples), self.num_rows())[None]

    def of_predictors(self, samples: Tensors) -> Tensors:
        """Rows from which the response tokens are predicted."""
        return [sample[prompt - 1 : -1] for sample, prompt in zip(samples, self.prompts, strict=True)]


def _pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])


@st.composite
def cases(draw: st.DrawFn, cp_sizes: tuple[int, ...] = tuple(range(1, 9))) -> Case:
    size = draw(st.integers(1, 4))
    scheme = draw(st.sampled_from(["packed", "padded", "all-gather"]))
    return Case(
        prompts=tuple(draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))),
        responses=tuple(draw(st.lists(st.integers(0, 12), min_size=size, max_size=size))),
        cp_size=draw(st.sampled_from(cp_sizes)),
        scheme=scheme,
        sample_padding=draw(st.integers(0, 2)),
        tail=0 if scheme == "padded" else draw(st.integers(0, 5)),
    )


# What random cases hit now and then, always.
CORNERS = {
    "zero-length response": Case((3, 2, 4), (5, 0, 6), cp_size=2),
    "only zero-length responses": Case((3, 2), (0, 0), cp_size=2, scheme="all-gather"),
    "prompts shorter than a chunk": Case((1, 2), (30, 25), cp_size=2),
    "ranks without response tokens": Case((40, 1), (2, 1), cp_size=4, scheme="all-gather"),
    "ranks without response tokens, zigzag": Case((16,), (1,), cp_size=4),
    "ranks with padding only": Case((2,), (1,), cp_size=4, scheme="all-gather", tail=9),
    "one row to a chunk": Case((1,), (7,), cp_size=4),
    "padded": Case((3, 1), (4, 9), cp_size=2, scheme="padded", sample_padding=3),
}


def corners(test: Any) -> Any:
    for case in CORNERS.values():
        test = example(case)(test)
    return test


def microbatch(case: Case) -> tuple[Tensors, Tensors]:
    """Logits and tokens of whole samples."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(n, VOCAB, generator=generator, dtype=torch.float64) for n in case.totals]
    tokens = [torch.randint(VOCAB, (n,), generator=generator) for n in case.totals]
    return [sample.requires_grad_() for sample in logits], tokens


def dense(case: Case, logits: Tensors, tokens: Tensors, temperature: float = 1.0) -> tuple[Tensors, Tensors]:
    """Log-probs and entropies of full responses."""
    pairs = [
        dense_log_probs_and_entropy(rows, sample[prompt:], temperature=temperature)
        for rows, sample, prompt in zip(case.of_predictors(logits), tokens, case.prompts, strict=True)
    ]
    log_probs, entropies = zip(*pairs, strict=True)
    return list(log_probs), list(entropies)


def weighted(parts: Tensors, factor: float) -> torch.Tensor:
    """A loss whose gradient differs from token to token."""
    return factor * sum((part**2).sum() for part in parts)
