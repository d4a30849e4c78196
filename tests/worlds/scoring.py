"""Models with the same weights on every layout, microbatches to score, and their scores in float64."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_rl_patches.common.chunks import unwrap
from megatron_rl_patches.inference import forward_log_probs
from megatron_rl_patches.testing import TinyModel
from tests.ranks import everywhere
from tests.references import tiny_gpt

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "EP 2": (2, {"kind": "moe", "ep": 2}),
    "TP 2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "CP 2": (2, {"cp": 2}),
    "PP 2": (2, {"pp": 2}),
    "PP 2, VPP 2": (2, {"pp": 2, "vpp": 2}),
}
TEMPERATURE = 0.7


def ranks_of(layout: str) -> int:
    return LAYOUTS[layout][0]


def is_last_stage() -> bool:
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def microbatches() -> list[dict[str, Any]]:
    """Return microbatches of seven samples."""
    generator = torch.Generator().manual_seed(3)
    wide, narrow, other = (
        torch.randint(32, size, generator=generator) for size in ((3, 16), (2, 8), (2, 12))
    )
    of_wide: dict[str, Any] = {"lengths": torch.tensor([16, 9, 2]), "response_lengths": [5, 8, 1]}
    return [
        {"tokens": wide, **of_wide},
        {"tokens": narrow, "lengths": torch.tensor([3, 8]), "response_lengths": [0, 7]},
        {"tokens": other, "lengths": torch.tensor([12, 7]), "response_lengths": [11, 3]},
    ]


def scores_of(model: Any, batches: Sequence[Any] | None = None) -> list[torch.Tensor]:
    """Return log-probabilities of each sample, by default of two microbatches; none if no last stage."""
    if batches is None:
        batches = [{"tokens": torch.arange(32).view(2, 16), "lengths": [16, 12]}] * 2
    return getattr(forward_log_probs(model, batches, progress=False), "log_probs", [])


def by_global_name(chunk: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a chunk by names that are the same on every layout."""
    chunk = unwrap(chunk)
    ranks, rank = (
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    first_expert = rank * (chunk.config.num_moe_experts or 0) // ranks
    offsets = {"decoder.layers.": chunk.decoder.layers[0].layer_number - 1, "local_experts.": first_expert}
    for name, parameter in chunk.named_parameters():
        for container, offset in offsets.items():
            before, found, after = name.partition(container)
            number, dot, rest = after.partition(".")
            name = f"{before}{found}{int(number) + offset}{dot}{rest}" if found else name
        yield name, parameter


def fill_by_name(model: Sequence[Any]) -> None:
    """Give each weight values that follow from its name, cut as Megatron cuts it."""
    group = parallel_state.get_tensor_model_parallel_group()
    for name, parameter in [named for chunk in model for named in by_global_name(chunk)]:
        shape, is_cut = list(parameter.shape), getattr(parameter, "tensor_model_parallel", False)
        if is_cut:
            shape[parameter.partition_dim] *= group.size()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=generator) * 0.2 + ("norm" in name and "weight" in name)
        if is_cut:
            whole = whole.chunk(group.size(), parameter.partition_dim)[group.rank()]
        parameter.data.copy_(whole)


def filled(options: TinyModel) -> tuple[list[Any], list[Any]]:
    """Return a model in DDP and one that only scores, with the same weights on every layout."""
    ddp, _ = options.build()
    model = tiny_gpt.inference_model(options)
    fill_by_name([*ddp, *model])
    return ddp, model


def dense_log_probs(model: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return log-softmax, in float64, and tokens of each response, of a model that each rank has alone."""
    samples = []
    for batch in microbatches():
        tokens_bs = batch["tokens"]
        with torch.no_grad():
            mask = torch.ones(1, 1, tokens_bs.shape[1], tokens_bs.shape[1], dtype=torch.bool).triu(1)
            logits_bsv = model[0](tokens_bs, torch.arange(tokens_bs.shape[1]).expand_as(tokens_bs), mask)
        log_p_bsv = (logits_bsv.double() / TEMPERATURE).log_softmax(-1)
        lengths = zip(batch["lengths"].tolist(), batch["response_lengths"], strict=True)
        for row, (end, response) in enumerate(lengths):
            start = end - response
            samples.append((log_p_bsv[row, start - 1 : end - 1], tokens_bs[row, start:end]))
    return samples


def assert_same_everywhere(tensors: Sequence[torch.Tensor] | None) -> None:
    """On all ranks of the last stage, bit for bit."""
    for other in everywhere(tensors):
        assert tensors is None or other is None or all(map(torch.equal, tensors, other))


def state_of(model: Sequence[Any]) -> tuple[Any, ...]:
    """Return modes and config of the model, and the random stream."""
    modes = [module.training for chunk in model for module in chunk.modules()]
    return modes, dict(vars(get_model_config(model[0]))), torch.get_rng_state().tolist()
