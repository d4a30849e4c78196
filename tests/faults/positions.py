"""Where each token of a microbatch stands, found by writing the streams of all ranks down token by token."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from megatron_rl_patches.losses import SequenceLayout

Token = tuple[int, int]  # sample, position in it; a position behind the last token is padding
TAIL: Token = (-1, -1)


@dataclass(frozen=True)
class Microbatch:
    totals: tuple[int, ...]
    responses: tuple[int, ...]
    cp_size: int
    scheme: str  # "packed", "padded" or "all-gather"
    padded: tuple[int, ...]
    tail: int

    @classmethod
    def random(cls, choose: random.Random, cp_size: int | None = None, at_least: int = 0) -> Microbatch:
        """Prompts have ``at_least`` so many tokens; none is what a layout must refuse."""
        cp_size = cp_size or choose.randint(1, 8)
        scheme = choose.choice(["packed", "padded", "all-gather"])
        samples = choose.randint(1, 5)
        responses = [choose.choice([0, 1, choose.randint(0, 25)]) for _ in range(samples)]
        prompts = [choose.randint(at_least or choose.choice([0, 1, 1, 1]), 25) for _ in range(samples)]
        totals = [max(1, prompt + response) for prompt, response in zip(prompts, responses, strict=True)]
        multiple = 2 * cp_size if cp_size > 1 and scheme != "all-gather" else 1
        multiple *= choose.choice([1, 1, 2, 3])
        padded = [-(-total // multiple) * multiple for total in totals]
        if scheme == "padded":
            padded = [max(padded)] * samples
        tail = 0 if scheme == "padded" else choose.choice([0, 0, 1, 7])
        return cls(tuple(totals), tuple(responses), cp_size, scheme, tuple(padded), tail)

    @property
    def is_valid(self) -> bool:
        return all(response < total for total, response in zip(self.totals, self.responses, strict=True))

    def layout(self, cp_rank: int) -> SequenceLayout:
        options: dict[str, Any] = {"cp_rank": cp_rank, "cp_size": self.cp_size}
        if self.scheme == "padded":
            options |= {"qkv_format": "bshd", "max_seq_lens": self.padded}
        else:
            rows = -(-sum(self.padded) // self.cp_size) + self.tail
            options |= {"padded_lengths": self.padded, "num_rows": rows}
        return SequenceLayout.build(
            self.totals, self.responses, allgather_cp=self.scheme == "all-gather", **options
        )

    def streams(self) -> list[list[Token]]:
        """Of each rank, its rows in order: the token that stands there."""
        if self.scheme == "all-gather":
            stream = [(s, place) for s, length in enumerate(self.padded) for place in range(length)]
            rows = -(-len(stream) // self.cp_size) + self.tail
            stream += [TAIL] * (rows * self.cp_size - len(stream))
            return [stream[rank * rows : (rank + 1) * rows] for rank in range(self.cp_size)]
        return [zigzag(self.padded, rank, self.cp_size) + [TAIL] * self.tail for rank in range(self.cp_size)]

    def predictors(self) -> list[tuple[Token, int, int]]:
        """Of each response token, samples end to end: the token before it, its sample, its place there."""
        return [
            ((sample, total - response + place - 1), sample, place)
            for sample, (total, response) in enumerate(zip(self.totals, self.responses, strict=True))
            for place in range(response)
        ]


def zigzag(padded: tuple[int, ...], rank: int, cp_size: int) -> list[Token]:
    """Of each sample the chunks ``rank`` and ``2 * cp_size - 1 - rank``."""
    if cp_size == 1:
        return [(sample, place) for sample, length in enumerate(padded) for place in range(length)]
    stream = []
    for sample, length in enumerate(padded):
        size = length // (2 * cp_size)
        for chunk in (rank, 2 * cp_size - 1 - rank):
            stream += [(sample, place) for place in range(chunk * size, (chunk + 1) * size)]
    return stream
