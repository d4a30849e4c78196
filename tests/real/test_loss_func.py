"""One training step of a real Megatron GPT with our loss, on any layout, against one big dense batch.

The reference knows nothing of pipelines, microbatches, replicas or pieces of sequences: the same weights in
one model, all samples of the step in one batch, whole rows of logits, and the transcribed formula.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import get_model_config
from torch.nn.functional import pad

from megatron_rl_patches import losses
from tests.ranks import by_speed, everywhere, on_ranks
from tests.references import tiny_gpt
from tests.unit.losses.objectives.test_policy import LIMIT, TIS, transcribed
from tests.worlds.model import NO_OVERLAP, World, by_global_name

pytestmark = pytest.mark.runs("losses", ranks=[1, 2])

MICROBATCHES, TEMPERATURE = 4, 0.8

#: Numbers of ranks, and options of the model.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1 rank": (1, {}),
    "PP 2, VPP 2": (2, {"pp": 2, "vpp": 2}),
    "TP 2": (2, {"tp": 2}),
    "CP 2": (2, {"cp": 2}),
    "DP 2, CP 2": (4, {"cp": 2}),
}
GSPO: dict[str, Any] = {"objective": "gspo", "clip_low": 0.05, "clip_high": 0.05, "normalization": "sequence"}


@dataclass(frozen=True)
class Case:
    options: losses.PolicyOptions
    calculate_per_token_loss: bool
    packed: bool = False
    allgather_cp: bool = False
    recompute: bool = False
    inplace_backward: bool = False


CASES = {
    "GRPO": Case(TIS(normalization="sequence", kl_coef=0.2, tis_mask_level="geometric"), True),
    "DAPO, entropy bonus": Case(losses.PolicyOptions(clip_high=0.3, entropy_coef=0.1), True, recompute=True),
    "DAPO, averaged by Megatron": Case(losses.PolicyOptions(dual_clip=1.1), False, inplace_backward=True),
    "GSPO, averaged by Megatron": Case(
        losses.PolicyOptions(**GSPO, entropy_coef=0.1), False, recompute=True, inplace_backward=True
    ),
    "CISPO, constant length": Case(
        losses.PolicyOptions(objective="cispo", normalization="constant", constant_length=LIMIT), True
    ),
}
# On every layout. Packed where one rank has all of a row: tiny_gpt's attention knows no borders of samples.
EVERYWHERE = {name: CASES[name] for name in ("GRPO", "GSPO, averaged by Megatron")}
PACKED = {name + ", packed": replace(case, packed=True) for name, case in EVERYWHERE.items()}


class Microbatch(NamedTuple):
    tokens: list[torch.Tensor]  # whole samples
    rows_bs: torch.Tensor  # the same, as the model reads them
    position_ids_bs: torch.Tensor
    response_lengths: list[int]
    batch: losses.PolicyBatch

    @property
    def lengths(self) -> list[int]:
        return [len(sample) for sample in self.tokens]


def microbatch(number: int, packed: bool) -> Microbatch:
    """A microbatch of the step, the same on any layout."""
    generator = torch.Generator().manual_seed(number)
    whole = tiny_gpt.SEQUENCE // 2 if packed else tiny_gpt.SEQUENCE
    lengths = [whole - number % 3, whole]
    # From no response to almost nothing but response.
    responses = [int(torch.randint(0, n, (), generator=generator)) for n in lengths]
    responses[0] = 0 if number == 1 else responses[0]
    tokens = [torch.randint(tiny_gpt.VOCABULARY, (n,), generator=generator) for n in lengths]
    rows_bs = torch.stack([pad(sample, (0, whole - len(sample))) for sample in tokens])
    position_ids_bs = torch.arange(whole).expand(tiny_gpt.BATCH, -1)

    def like_responses(offset: float, scale: float) -> list[torch.Tensor]:
        return [offset + scale * torch.randn(n, generator=generator) for n in responses]

    masks = [torch.rand(n, generator=generator) < 0.8 for n in responses]
    if number == 2:
        masks[1][:] = False
    old = like_responses(-3.5, 0.3)
    advantages, others = like_responses(0.0, 1.0), [like_responses(-3.5, 0.3) for _ in "ab"]
    batch = losses.PolicyBatch(advantages, masks, old, *others)
    if packed:  # one row, the padding at its end
        padding = (0, tiny_gpt.SEQUENCE - sum(lengths))
        rows_bs = pad(torch.cat(tokens), padding)[None]
        position_ids_bs = pad(torch.cat([*map(torch.arange, lengths)]), padding)[None]
    return Microbatch(tokens, rows_bs, position_ids_bs, responses, batch)


def loss_func_of(data: Microbatch, case: Case, normalizer: float | None) -> Any:
    cp_rank = parallel_state.get_context_parallel_rank()
    cp_size = parallel_state.get_context_parallel_world_size()
    rows, columns = data.rows_bs.shape
    shape: dict[str, Any] = {"qkv_format": "bshd", "max_seq_lens": [columns] * rows}
    if case.packed:
        shape = {"qkv_format": "thd", "num_rows": columns // (cp_size if case.allgather_cp else 1)}
    sizes = {"cp_rank": cp_rank, "cp_size": cp_size, "allgather_cp": case.allgather_cp}
    return losses.make_loss_func(
        data.tokens,
        losses.SequenceLayout.build(data.lengths, data.response_lengths, **sizes, **shape),
        data.batch,
        case.options,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group() if cp_size > 1 else None,
        temperature=TEMPERATURE,
        recompute=case.recompute,
        inplace_backward=case.inplace_backward,
        normalizer=normalizer,
    )


def train_step(case: Case, model: list[Any]) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Gradients into the buffers, by Megatron's own schedule; metrics, and the number of replicas."""
    replicas = parallel_state.get_data_parallel_world_size()
    first = parallel_state.get_data_parallel_rank() * MICROBATCHES
    step = [microbatch(first + i, case.packed) for i in range(MICROBATCHES)]
    normalizer = None
    if not case.calculate_per_token_loss:
        masks = [mask for data in step for mask in data.batch.loss_masks]
        group = parallel_state.get_data_parallel_group()
        kind = case.options.normalization
        normalizer = losses.mean_count(masks, MICROBATCHES, kind, data_parallel_group=group)
    columns = tiny_gpt.positions()

    def forward_step(data_iterator: Iterator[Microbatch], chunk: torch.nn.Module) -> tuple[Any, Any]:
        data = next(data_iterator)
        logits = chunk(data.rows_bs[:, columns], data.position_ids_bs[:, columns], causal_mask())
        return logits, loss_func_of(data, case, normalizer)

    get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
    size = 1 if case.packed else tiny_gpt.BATCH
    return tiny_gpt.backward(model, [iter(step) for _ in model], MICROBATCHES, forward_step, size), replicas


def causal_mask() -> torch.Tensor:
    return torch.ones(1, 1, tiny_gpt.SEQUENCE, tiny_gpt.SEQUENCE, dtype=torch.bool).triu(1)


def weights_and_gradients(model: list[Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of all stages of the pipeline, under the names that they have in a model of one stage."""
    mine = {name: (p.detach().clone(), p.main_grad.clone()) for name, p in by_global_name(model)}
    stages = everywhere(mine, parallel_state.get_pipeline_model_parallel_group())
    return {name: tensors for stage in stages for name, tensors in stage.items()}


def dense_gradients(case: Case, gpt: torch.nn.Module, count: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss of all samples of the step as one batch, and the gradients of a model without any splitting."""
    log_probs, entropies, batches = [], [], []
    for number in range(count):
        data = microbatch(number, case.packed)
        output = gpt(data.rows_bs, data.position_ids_bs, causal_mask())
        logits_bsv = gather_from_tensor_model_parallel_region(output) / TEMPERATURE
        logits = logits_bsv[0, : sum(data.lengths)].split(data.lengths) if case.packed else logits_bsv
        for logits_sv, tokens, response in zip(logits, data.tokens, data.response_lengths, strict=True):
            prompt = len(tokens) - response
            log_softmax = logits_sv[prompt - 1 : len(tokens) - 1].log_softmax(dim=-1)
            log_probs.append(log_softmax.gather(1, tokens[prompt:, None]).squeeze(1))
            entropies.append(-(log_softmax.exp() * log_softmax).sum(dim=-1))
        batches.append({name: values for name, values in vars(data.batch).items() if values})
    batch = losses.PolicyBatch(**{name: [x for b in batches for x in b[name]] for name in batches[0]})
    loss = transcribed(log_probs, entropies, batch, case.options)
    names, parameters = zip(*gpt.named_parameters(), strict=True)
    return loss.item(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


@pytest.mark.parametrize("layout", by_speed(list(LAYOUTS), fast=("1 rank", "PP 2, VPP 2", "TP 2")))
@on_ranks(lambda layout: LAYOUTS[layout][0], timeout=240)
def test_gradients_are_those_of_one_dense_batch(layout: str) -> None:
    cases = {"1 rank": {**CASES, **PACKED}, "TP 2": PACKED}.get(layout, EVERYWHERE)
    for name, case in cases.items():
        _compare(LAYOUTS[layout][1], name, case)


def _compare(sizes: dict[str, Any], name: str, case: Case) -> None:
    # The optimizer leaves whole gradients on every rank.
    flags: dict[str, Any] = {"config": {"calculate_per_token_loss": case.calculate_per_token_loss}}
    flags |= {**NO_OVERLAP, "use_distributed_optimizer": False}
    world = World(**sizes, **flags)
    reports, replicas = train_step(case, world.model)
    replicas_and_pieces = parallel_state.get_data_parallel_group(with_context_parallel=True)
    averages = losses.average_metrics(reports, replicas_and_pieces)
    trained = weights_and_gradients(world.model)

    gpt = World(tp=world.options.tp, **flags).model[0].module
    for parameter_name, parameter in gpt.named_parameters():
        parameter.data.copy_(trained[parameter_name][0])
    dense_loss, dense = dense_gradients(case, gpt, MICROBATCHES * replicas)
    assert dense.keys() == trained.keys()
    for parameter_name, gradient in dense.items():
        error = (trained[parameter_name][1] - gradient).norm()
        assert error < 1e-5 * gradient.norm(), (name, parameter_name)
    if "loss" in averages:  # on the last stage
        assert averages["loss"] == pytest.approx(dense_loss, rel=1e-5), name
