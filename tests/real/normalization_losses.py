"""Losses for ``check_normalization``: ranks import them by their names.

They import Megatron when they are called, as that of a framework may have to be found first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl_patches.losses import (
    PolicyBatch,
    PolicyOptions,
    SequenceLayout,
    make_loss_func,
    mean_count,
    packed_log_probs_and_entropy,
)
from megatron_rl_patches.testing import Microbatch

VOCABULARY = 32
#: Prompt and response of each sample: their numbers of tokens differ in every split.
LENGTHS = ((2, 9), (1, 7), (5, 1), (1, 4), (2, 2), (3, 1))


def global_batch(lengths: Sequence[tuple[int, int]] = LENGTHS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batch = []
    for prompt, response in lengths:
        mask = torch.ones(response, dtype=torch.int)
        if response > 3:
            mask[1] = 0  # the output of a tool
        batch.append(
            {
                "tokens": torch.randint(VOCABULARY, (prompt + response,), generator=generator),
                "loss_mask": mask,
                "advantages": torch.randn(response, generator=generator),
                "old_log_probs": -3.5 + 0.1 * torch.randn(response, generator=generator),
            }
        )
    return batch


def layout_of(microbatch: Microbatch) -> SequenceLayout:
    from megatron.core import parallel_state

    return SequenceLayout.build(
        [len(sample["tokens"]) for sample in microbatch.samples],
        [len(sample["loss_mask"]) for sample in microbatch.samples],
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
    )


def of_package(options: PolicyOptions, microbatch: Microbatch, logits: torch.Tensor) -> Any:
    """The loss of this package, as its documentation says for either value of calculate_per_token_loss."""
    from megatron.core import parallel_state

    names = [name for name in ("advantages", "loss_mask", "old_log_probs") if name in microbatch.batch[0]]
    columns = [[sample[name] for sample in microbatch.samples] for name in names]
    normalizer = None
    if not microbatch.calculate_per_token_loss:
        masks = [sample["loss_mask"] for sample in microbatch.batch]
        microbatches = microbatch.num_microbatches * microbatch.split.dp
        normalizer = mean_count(masks, microbatches, options.normalization)
    loss_func = make_loss_func(
        [sample["tokens"] for sample in microbatch.samples],
        layout_of(microbatch),
        PolicyBatch(*columns),
        options,
        cp_group=parallel_state.get_context_parallel_group() if microbatch.split.cp > 1 else None,
        normalizer=normalizer,
    )
    return loss_func(logits)


def _sums(microbatch: Microbatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Negative log-likelihood and number of the tokens of this rank, and the number on all CP ranks."""
    layout = layout_of(microbatch)
    log_probs, _ = packed_log_probs_and_entropy(
        logits, [sample["tokens"] for sample in microbatch.samples], layout, with_entropy=False
    )
    whole = torch.cat([sample["loss_mask"] for sample in microbatch.samples])
    mask = whole[layout.response_index]
    return -(torch.cat(log_probs) * mask).sum(), mask.sum(), whole.sum()


def over_the_step(microbatch: Microbatch, logits: torch.Tensor) -> Any:
    """Right: the sum, and its share of the number of tokens."""
    loss, count, _ = _sums(microbatch, logits)
    return loss, count.int(), {}


def over_its_microbatch(microbatch: Microbatch, logits: torch.Tensor) -> Any:
    """Wrong: the mean over the microbatch, which Megatron averages over microbatches."""
    loss, _, count = _sums(microbatch, logits)
    return loss / count.clamp(min=1), {}


def over_its_samples(microbatch: Microbatch, logits: torch.Tensor) -> Any:
    """Wrong: means of the samples, divided by their number in the microbatch."""
    layout = layout_of(microbatch)
    tokens = [sample["tokens"] for sample in microbatch.samples]
    log_probs, _ = packed_log_probs_and_entropy(logits, tokens, layout, with_entropy=False)
    masks = [sample["loss_mask"] for sample in microbatch.samples]
    weights = torch.cat([mask / mask.sum().clamp(min=1) for mask in masks])[layout.response_index]
    return -(torch.cat(log_probs) * weights).sum() / len(masks), {}


def without_context_parallelism(microbatch: Microbatch, logits: torch.Tensor) -> Any:
    """Wrong: the sum of this CP rank with the number of tokens of all."""
    loss, _, count = _sums(microbatch, logits)
    return loss, count.int(), {}


def over_its_rank(microbatch: Microbatch, logits: torch.Tensor) -> Any:
    """Wrong: each CP rank averages over its own tokens, so tokens of one sample weigh differently."""
    loss, count, _ = _sums(microbatch, logits)
    return loss / count.clamp(min=1) / microbatch.split.cp, {}


def mended(microbatch: Microbatch, logits: torch.Tensor) -> Any:
    """``over_its_microbatch`` with the correction that the report proposes."""
    loss, _, _ = _sums(microbatch, logits)
    tokens = sum(int(sample["loss_mask"].sum()) for sample in microbatch.batch)
    return loss / tokens * microbatch.num_microbatches * microbatch.split.dp, {}


def of_nothing(microbatch: Microbatch, logits: torch.Tensor) -> Any:
    return 0 * logits.sum(), {}


def train_step(model: list[Any], microbatches: list[Microbatch]) -> None:
    """Right: a training loop of its own, with the labels shifted."""
    from megatron.core.distributed import finalize_model_grads

    tokens = sum(int(sample["loss_mask"].sum()) for sample in microbatches[0].batch)
    for microbatch in microbatches:
        for sample in microbatch.samples:
            length = len(sample["tokens"])
            mask_ss = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
            logits_sv = model[0](sample["tokens"][None], torch.arange(length)[None], mask_ss)[0]
            log_probs = logits_sv[:-1].log_softmax(-1).gather(1, sample["tokens"][1:, None]).squeeze(1)
            response = log_probs[-len(sample["loss_mask"]) :]
            (-(response * sample["loss_mask"]).sum() / tokens).backward()
    finalize_model_grads(model)


def half_a_train_step(model: list[Any], microbatches: list[Microbatch]) -> None:
    """Wrong: it takes the average over the first microbatch for that over the step."""
    kept = microbatches[:1]
    train_step(model, [dataclasses.replace(kept[0], batch=kept[0].samples)])
