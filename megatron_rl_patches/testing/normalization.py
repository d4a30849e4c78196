"""Check that a loss weighs tokens and samples the same, however Megatron cuts the global batch.

The real schedule, ``DistributedDataParallel`` and ``finalize_model_grads`` run on a tiny GPT, on gloo ranks.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidInputError, first
from .cpu_backend import cpu_backend
from .ranks import spawn_ranks

Sample = Mapping[str, Any]
#: Gradients that differ by less than this are the same: float32 leaves a tenth of it.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Split:
    """How a global batch is cut into microbatches.

    Attributes:
        dp, cp: data-parallel and context-parallel size; the split runs on ``dp * cp`` ranks.
        microbatches: number of microbatches per replica, all with the same number of samples.
        token_budget: cut by a dynamic batch size instead: a microbatch has as many samples as fit into so
            many tokens, or into as many as the ``"longest"`` sample has. Replicas have about the same number
            of tokens, and the same number of microbatches.
        without_masked: leave out the samples in which every token is masked. A loss that counts them, as
            samples or as tokens, gives the other samples less weight.
    """

    dp: int = 1
    cp: int = 1
    microbatches: int = 1
    token_budget: int | Literal["longest"] | None = None
    without_masked: bool = False

    def of(self, batch: Sequence[Sample]) -> list[Sample]:
        """Return the samples of the batch that this split has."""
        return [sample for sample in batch if not self.without_masked or sample["loss_mask"].any()]

    def cut(self, batch: Sequence[Sample]) -> list[list[list[Sample]]]:
        """Return the samples of each microbatch of each replica.

        Raises:
            InvalidInputError: the batch cannot be cut like this.
        """
        batch = self.of(batch)
        if self.token_budget is None:
            size, rest = divmod(len(batch), self.dp * self.microbatches)
            if rest or not size:
                raise InvalidInputError(
                    f"the batch has {len(batch)} samples, and {self} needs a multiple of "
                    f"{self.dp * self.microbatches}; pass another number of samples or a token_budget"
                )
            pieces = [list(batch[i : i + size]) for i in range(0, len(batch), size)]
            return [pieces[i : i + self.microbatches] for i in range(0, len(pieces), self.microbatches)]
        lengths = [len(sample["tokens"]) for sample in batch]
        budget = max(lengths) if self.token_budget == "longest" else self.token_budget
        replicas: list[list[list[Sample]]] = [[] for _ in range(self.dp)]
        end = 0
        for sample, length in zip(batch, lengths, strict=True):
            replica = replicas[int(self.dp * (end + length / 2) / sum(lengths))]
            end += length
            if not replica or sum(len(other["tokens"]) for other in replica[-1]) + length > budget:
                replica.append([])
            replica[-1].append(sample)
        most = max(map(len, replicas))
        for replica in replicas:
            while len(replica) < most:  # the largest microbatch is halved
                largest = max(replica, key=len, default=[])
                if len(largest) < 2:
                    raise InvalidInputError(f"the batch has too few samples for {self}; pass more")
                place, half = replica.index(largest), len(largest) // 2
                replica[place : place + 1] = [largest[:half], largest[half:]]
        return replicas


#: The splits that :func:`check_normalization` compares by default.
SPLITS: Mapping[str, Split] = {
    "2 microbatches": Split(microbatches=2),
    "token budget": Split(token_budget="longest"),
    "DP 2": Split(dp=2),
    "DP 2, token budget": Split(dp=2, token_budget="longest"),
    "CP 2": Split(cp=2),
    "CP 2, token budget": Split(cp=2, token_budget="longest"),
    "without masked samples": Split(without_masked=True),
}


@dataclass(frozen=True)
class Microbatch:
    """What a loss function sees of a step, besides the logits.

    Attributes:
        samples: the whole samples of this microbatch, the same on all context-parallel ranks.
        batch: all samples of the step that the split has, for numbers that belong to the global batch.
        num_microbatches: number of microbatches of this replica in this step.
        split: sizes of the parallel groups.
        calculate_per_token_loss: as in the model's config.
    """

    samples: Sequence[Sample]
    batch: Sequence[Sample]
    num_microbatches: int
    split: Split
    calculate_per_token_loss: bool


class SplitResult(NamedTuple):
    """What :func:`check_normalization` says about one split.

    Attributes:
        split: its name.
        same: the gradient is that of the undivided batch.
        factor: number by which the gradient of the undivided batch comes closest to this one.
        residual: norm of what is left then, relative to this gradient. It is about zero if all tokens have
            the same factor.
    """

    split: str
    same: bool
    factor: float
    residual: float

    @property
    def is_uniform(self) -> bool:
        """Whether all tokens have the same factor."""
        return self.residual < _TOLERANCE

    def __str__(self) -> str:
        text = "yes"
        if not self.same:
            uniform, other = f"{self.factor:.4g} times as large", "tokens have other weights"
            text = f"no: {uniform if self.is_uniform else other}"
        return f"{self.split:<24}{self.factor:<8.4g}{self.residual:<9.1e}{text}"


@dataclass(frozen=True)
class NormalizationReport:
    """The result of :func:`check_normalization`; ``str()`` of it is a table.

    Attributes:
        rows: one per split.
    """

    rows: tuple[SplitResult, ...]

    @property
    def same(self) -> bool:
        """Whether the gradient is the same for every split."""
        return all(row.same for row in self.rows)

    def __str__(self) -> str:
        heading = f"{'split':<24}{'factor':<8}{'residual':<9}same as undivided"
        return "\n".join([heading, *map(str, self.rows)])


def check_normalization(
    loss_func_or_train_step: Callable[..., Any],
    batch: Sequence[Sample],
    splits: Mapping[str, Split] = SPLITS,
    *,
    calculate_per_token_loss: bool = False,
    is_train_step: bool = False,
    vocab_size: int = 32,
    timeout: float = 300.0,
) -> NormalizationReport:
    """Say whether the gradient of a global batch is the same, however the batch is cut.

    Each split runs on ranks of its own, on the CPU, with the same weights, and its gradient after
    ``finalize_model_grads`` is compared with that of the undivided batch: one microbatch on one rank. Call it
    in a unit test, outside of ranks, and assert ``report.same``.

    A batch with samples in which every token is masked also shows whether these count. A split that leaves
    them out does not appear in the report where the batch has none.

    Args:
        loss_func_or_train_step: a loss function ``(microbatch, logits) -> (loss, metrics)`` or
            ``(loss, num_tokens, metrics)``, of which Megatron's schedule gets ``partial(loss_func,
            microbatch)``. Logits are ``[1, rows, vocab_size]`` in float32, the packed samples of a
            :class:`Microbatch` as Megatron's ``thd`` has them: under context parallelism each sample is
            padded to a multiple of ``2 * cp``, and a rank has a piece from either end; padding is at no other
            place. It is a module-level function or a ``partial`` of one, as ranks import it by its name, and
            finds its process groups in ``parallel_state``.
            With ``is_train_step`` it is ``(model, microbatches) -> None``: it gets the chunks in
            ``DistributedDataParallel`` and the :class:`Microbatch` es of this replica, and runs forward,
            backward and ``finalize_model_grads`` itself.
        batch: samples, each with the int64 ``tokens`` ``[total_length]``, the ``loss_mask``
            ``[response_length]`` of the response that ends it, and whatever else the loss function reads.
        splits: names and splits to compare. A split of four ranks is ``Split(dp=2, cp=2)``.
        calculate_per_token_loss: as in the model's config, and in :class:`Microbatch`.
        is_train_step: the function is a train step.
        vocab_size: vocabulary size of the tiny model.
        timeout: seconds for the ranks of one size.

    Raises:
        InvalidInputError: batch, splits or function are not of these forms, before a rank starts; or the
            undivided batch has no gradient.
        RanksFailed: the function raised, or the ranks hang.
    """
    splits = {name: split for name, split in splits.items() if not split.without_masked or _has_masked(batch)}
    _check(loss_func_or_train_step, batch, splits, vocab_size)
    multiple = 2 * max(split.cp for split in splits.values())
    length = math.ceil(max(len(sample["tokens"]) for sample in batch) / multiple) * multiple
    run = partial(_run, loss_func_or_train_step, is_train_step, (vocab_size, length), timeout)
    whole, *gradients = run(
        [(split, batch) for split in [Split(), *splits.values()]], calculate_per_token_loss
    )
    if not 0 < whole.norm() < math.inf:
        raise InvalidInputError(
            f"the gradient of the undivided batch has the norm {whole.norm():g}; pass a batch with a loss"
        )
    rows = []
    for name, gradient in zip(splits, gradients, strict=True):
        factor = (gradient @ whole / whole.square().sum()).item()
        residual = ((gradient - factor * whole).norm() / gradient.norm().clamp(min=1e-30)).item()
        rows.append(SplitResult(name, max(residual, abs(factor - 1)) < _TOLERANCE, factor, residual))
    return NormalizationReport(tuple(rows))


def _has_masked(batch: Sequence[Sample]) -> bool:
    return any("loss_mask" in sample and not sample["loss_mask"].any() for sample in batch)


def _check(function: Any, batch: Sequence[Sample], splits: Mapping[str, Split], vocab_size: int) -> None:
    if not batch or not splits:
        raise InvalidInputError("batch and splits must not be empty")
    for number, sample in enumerate(batch):
        tokens, mask = sample.get("tokens"), sample.get("loss_mask")
        if tokens is None or mask is None or tokens.dim() != 1 or not 0 < len(mask) < len(tokens):
            raise InvalidInputError(
                f"sample {number} of the batch needs tokens [total_length] and loss_mask [response_length], "
                "with at least one token of a prompt and one of a response"
            )
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise InvalidInputError(f"sample {number} has tokens beyond vocab_size={vocab_size}")
    if len({int((sample["loss_mask"] != 0).sum()) for sample in batch}) == 1:
        raise InvalidInputError(
            "all samples of the batch have the same number of unmasked tokens, which hides wrong weights; "
            "pass responses of different lengths"
        )
    for name, split in splits.items():
        if min(split.dp, split.cp, split.microbatches) < 1:
            raise InvalidInputError(f"split {name!r}: sizes must be positive, and they are {split}")
        split.cut(batch)
        if missing := {*range(split.cp)} - _cp_ranks_of(batch, split.cp):
            raise InvalidInputError(
                f"split {name!r}: no unmasked token is on context-parallel rank {first(missing)}; pass "
                "longer responses"
            )
    try:
        pickle.dumps(function)
    except Exception as error:
        raise InvalidInputError(
            f"ranks cannot import {function!r}; pass a module-level function or a partial of one"
        ) from error


def _cp_ranks_of(batch: Sequence[Sample], cp: int) -> set[int]:
    """Return the context-parallel ranks whose logits predict an unmasked token."""
    ranks: set[int] = set()
    for sample in batch:
        length, mask = len(sample["tokens"]), sample["loss_mask"]
        piece = (mask.nonzero().flatten() + length - len(mask) - 1) // math.ceil(length / (2 * cp))
        ranks.update(torch.minimum(piece, 2 * cp - 1 - piece).tolist())
    return ranks


def _run(
    function: Callable[..., Any],
    is_train_step: bool,
    sizes: tuple[int, int],
    timeout: float,
    jobs: Sequence[tuple[Split, Sequence[Sample]]],
    per_token: bool,
) -> list[Tensor]:
    """Return the gradient of each job, float64 ``[parameters]``; jobs on as many ranks share these."""
    gradients: dict[int, Tensor] = {}
    for ranks in sorted({split.dp * split.cp for split, _ in jobs}):
        chosen = {i: job for i, job in enumerate(jobs) if job[0].dp * job[0].cp == ranks}
        arguments = function, is_train_step, sizes, list(chosen.values()), per_token
        gradients.update(
            zip(chosen, spawn_ranks(_on_rank, ranks, *arguments, timeout=timeout)[0], strict=True)
        )
    return [gradients[i] for i in range(len(jobs))]


def _on_rank(
    function: Callable[..., Any],
    is_train_step: bool,
    sizes: tuple[int, int],
    jobs: list[tuple[Split, Sequence[Sample]]],
    per_token: bool,
) -> list[Tensor]:
    with cpu_backend():
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.utils import get_model_config

        from .tiny_models import TinyModel

        tiny = TinyModel(
            vocab_size=sizes[0],
            seq_length=sizes[1],
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            use_distributed_optimizer=False,  # leaves whole gradients on every rank
            config={"calculate_per_token_loss": per_token},
        )
        train_step = function if is_train_step else partial(_train_step, function)
        built, gradients = None, []
        for split, batch in jobs:
            if built != (split.dp, split.cp):
                model, _ = replace(tiny, cp=split.cp).build()
                get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
                built = split.dp, split.cp
            mine = split.cut(batch)[parallel_state.get_data_parallel_rank()]
            model[0].zero_grad_buffer()
            train_step(model, [Microbatch(s, split.of(batch), len(mine), split, per_token) for s in mine])
            main_grads = [parameter.main_grad for parameter in model[0].parameters()]
            gradients.append(torch.cat([gradient.double().flatten() for gradient in main_grads]))
        return gradients


def _train_step(loss_func: Callable[..., Any], model: list[Any], microbatches: list[Microbatch]) -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data_iterator: Any, chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        microbatch = next(data_iterator)
        return _packed_logits(chunk, microbatch), partial(loss_func, microbatch)

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=model,
        num_microbatches=len(microbatches),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )


def _packed_logits(chunk: torch.nn.Module, microbatch: Microbatch) -> Tensor:
    """Return logits of packed samples; each runs alone, as packed attention needs TransformerEngine."""
    from .tiny_models import TinyModel

    cp = microbatch.split.cp
    multiple = 2 * cp if cp > 1 else 1
    logits = []
    for sample in microbatch.samples:
        length = math.ceil(len(sample["tokens"]) / multiple) * multiple
        tokens_s = torch.nn.functional.pad(sample["tokens"], (0, length - len(sample["tokens"])))
        positions_s = TinyModel(cp=cp, seq_length=length).positions()
        mask_ss = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        logits.append(chunk(tokens_s[None, positions_s], positions_s[None], mask_ss))
    return torch.cat(logits, dim=1)
