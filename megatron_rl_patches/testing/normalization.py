"""Compare the gradients of one global batch that is cut into microbatches and ranks in several ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..errors import InvalidInputError
from .cpu_backend import cpu_backend
from .ranks import spawn_ranks
from .tiny_models import TinyModel
from .transformer_engine.base import positions_of

Sample = Mapping[str, Any]


@dataclass(frozen=True)
class Split:
    """How a global batch is cut into microbatches.

    Attributes:
        dp, cp: data-parallel and context-parallel size; the split runs on ``dp * cp`` ranks.
        microbatches: number of microbatches per replica.
        even: all microbatches have the same number of samples. Otherwise each has one, and the last one of
            the last replica has the rest: as different as a dynamic batch size can make them.
    """

    dp: int = 1
    cp: int = 1
    microbatches: int = 1
    even: bool = True

    def cut(self, batch: Sequence[Sample]) -> list[list[Sequence[Sample]]]:
        """Return the samples of each microbatch of each replica.

        Raises:
            InvalidInputError: the batch cannot be cut like this.
        """
        count = self.dp * self.microbatches
        if min(self.dp, self.cp, self.microbatches) < 1:
            raise InvalidInputError(f"sizes must be positive, and they are {self}")
        if len(batch) < count or (self.even and len(batch) % count):
            raise InvalidInputError(
                f"the batch has {len(batch)} samples, and {self} needs a multiple of {count}, or as many at "
                "least if it is not even; pass another number of samples"
            )
        size = len(batch) // count if self.even else 1
        last = size * (count - 1)
        pieces = [*(batch[start : start + size] for start in range(0, last, size)), batch[last:]]
        return [pieces[i : i + self.microbatches] for i in range(0, count, self.microbatches)]


#: The splits that :func:`check_normalization` compares by default.
SPLITS: Mapping[str, Split] = {
    "2 microbatches": Split(microbatches=2),
    "uneven microbatches": Split(microbatches=4, even=False),
    "DP 2": Split(dp=2),
    "DP 2, uneven": Split(dp=2, microbatches=2, even=False),
    "CP 2": Split(cp=2),
    "CP 2, uneven": Split(cp=2, microbatches=4, even=False),
}


@dataclass(frozen=True)
class Microbatch:
    """What a loss function sees of a step, besides the logits.

    Attributes:
        samples: the whole samples of this microbatch, the same on all context-parallel ranks.
        batch: all samples of the step, for numbers that belong to the global batch.
        num_microbatches: how many this replica has in this step.
        split: sizes of the parallel groups.
        calculate_per_token_loss: as in the model's config.
    """

    samples: Sequence[Sample]
    batch: Sequence[Sample]
    num_microbatches: int
    split: Split
    calculate_per_token_loss: bool


@dataclass(frozen=True)
class NormalizationReport:
    """The result of :func:`check_normalization`; ``str()`` of it is a table.

    Attributes:
        differences: by the name of the split, the norm of the difference between its gradient and that of
            the undivided batch, relative to the latter. With twice the gradient it is 1.
    """

    differences: Mapping[str, float]

    @property
    def different(self) -> list[str]:
        """The splits whose difference is 1e-4 or more: float32 leaves a tenth of that."""
        return [name for name, difference in self.differences.items() if not difference < 1e-4]

    @property
    def same(self) -> bool:
        """Whether the gradient is the same for every split."""
        return not self.different

    def __str__(self) -> str:
        rows = [f"{name:<24}{difference:.1e}" for name, difference in self.differences.items()]
        return "\n".join([f"{'split':<24}relative difference from the undivided batch", *rows])


def check_normalization(
    loss_func: Callable[..., Any],
    batch: Sequence[Sample],
    splits: Mapping[str, Split] = SPLITS,
    *,
    calculate_per_token_loss: bool = False,
    timeout: float = 300.0,
) -> NormalizationReport:
    """Say whether the gradient of a global batch is the same, however the batch is cut.

    Each split runs on gloo ranks on the CPU: a tiny GPT, with the same weights each time, in Megatron's DDP,
    schedule and ``finalize_model_grads``. Its gradient is compared with that of the undivided batch, which
    is one microbatch on one rank. Call this in a unit test, outside of ranks, and assert ``report.same``.

    Args:
        loss_func: a module-level function ``(microbatch, logits) -> (loss, metrics)`` or ``(loss, num_tokens,
            metrics)``, of which Megatron's schedule gets ``partial(loss_func, microbatch)``. It finds its
            process groups in ``parallel_state``. Logits are float32 ``[1, rows, vocabulary]``, packed as
            Megatron's ``thd``, for 32 ids or as many as the tokens need. Only under context parallelism are
            samples padded: each to a multiple of ``2 * cp``, of which a rank has a piece from either end.
        batch: samples, each with the int64 ``tokens`` ``[total_length]``, the ``loss_mask``
            ``[response_length]`` of the response that ends it, and whatever else the loss function reads.
        splits: names and splits to compare. A split of four ranks is ``Split(dp=2, cp=2)``.
        calculate_per_token_loss: as in the model's config.
        timeout: seconds for the ranks of one size.

    Raises:
        InvalidInputError: batch or splits are not of these forms, before a rank starts; or the undivided
            batch has no gradient.
        RanksFailed: the function raised, or the ranks hang.
    """
    _check(batch, splits)
    tiny = TinyModel(
        vocab_size=max(32, *(1 + int(sample["tokens"].max()) for sample in batch)),
        # One size for all splits, as weights depend on it: the longest sample with the padding of any split.
        seq_length=max(len(sample["tokens"]) for sample in batch) + 2 * max(s.cp for s in splits.values()),
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        use_distributed_optimizer=False,  # leaves whole gradients on every rank
        config={"calculate_per_token_loss": calculate_per_token_loss},
    )
    chosen, gradients = [Split(), *splits.values()], dict[Split, torch.Tensor]()
    for ranks in {split.dp * split.cp for split in chosen}:
        of_size = [split for split in chosen if split.dp * split.cp == ranks]
        gradients |= spawn_ranks(_gradients, ranks, loss_func, batch, of_size, tiny, timeout=timeout)[0]
    whole = gradients[Split()]
    norm = whole.norm()
    if not 0 < norm < float("inf"):
        message = f"the gradient of the undivided batch has the norm {norm:g}; pass a batch with a loss"
        raise InvalidInputError(message)
    errors = {name: float((gradients[split] - whole).norm() / norm) for name, split in splits.items()}
    return NormalizationReport(errors)


def _check(batch: Sequence[Sample], splits: Mapping[str, Split]) -> None:
    if not batch or not splits:
        raise InvalidInputError("batch and splits must not be empty")
    for number, sample in enumerate(batch):
        tokens, mask = sample.get("tokens"), sample.get("loss_mask")
        if tokens is None or mask is None or tokens.dim() != 1 or not 0 < len(mask) < len(tokens):
            raise InvalidInputError(
                f"sample {number} of the batch needs tokens [total_length] and loss_mask [response_length], "
                "with at least one token of a prompt and one of a response"
            )
    if len({int((sample["loss_mask"] != 0).sum()) for sample in batch}) == 1:
        raise InvalidInputError(
            "all samples of the batch have the same number of unmasked tokens, which hides wrong weights; "
            "pass responses of different lengths"
        )
    for split in splits.values():
        split.cut(batch)


def _gradients(
    loss_func: Callable[..., Any], batch: Sequence[Sample], splits: Sequence[Split], tiny: TinyModel
) -> dict[Split, torch.Tensor]:
    """Return on a rank the whole gradient of each split, float64 ``[parameters]``."""
    with cpu_backend():
        from megatron.core import distributed, parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(microbatches: Iterator[Microbatch], chunk: Any) -> tuple[torch.Tensor, Any]:
            microbatch, logits, cp = next(microbatches), [], split.cp
            for sample in microbatch.samples:  # each alone, as packed attention needs TransformerEngine
                padding = -len(sample["tokens"]) % (2 * cp) if cp > 1 else 0
                tokens_s = torch.nn.functional.pad(sample["tokens"], (0, padding))
                rank = parallel_state.get_context_parallel_rank()
                positions_s = positions_of(rank, cp, len(tokens_s) // cp)
                logits.append(chunk(tokens_s[None, positions_s], positions_s[None], None))
            return torch.cat(logits, dim=1), partial(loss_func, microbatch)

        gradients = {}
        for split in splits:
            [model], _ = replace(tiny, cp=split.cp).build()
            model.config.finalize_model_grads_func = distributed.finalize_model_grads
            mine = split.cut(batch)[parallel_state.get_data_parallel_rank()]
            step = len(mine), split, tiny.config["calculate_per_token_loss"]
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=(Microbatch(samples, batch, *step) for samples in mine),
                model=model,
                num_microbatches=len(mine),
                seq_length=1,
                micro_batch_size=1,
            )
            gradients[split] = torch.cat([p.main_grad.double().flatten() for p in model.parameters()])
        return gradients
