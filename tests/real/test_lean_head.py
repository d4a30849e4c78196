"""``lean-head`` on a real Megatron GPT, on any layout: no logits, and the gradients of a run without it."""

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import get_attr_wrapped_model

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.losses import PolicyOptions, output_layer, vocab_parallel_log_probs
from megatron_rl_patches.losses.vocab import deferred
from megatron_rl_patches.testing.transformer_engine import attention
from tests.ranks import by_speed, everywhere, on_ranks
from tests.real.test_loss_func import Case, train_step
from tests.references import tiny_gpt
from tests.unit.losses.vocab.sizes import Sizes
from tests.worlds.model import NOT_DISTRIBUTED, RECOMPUTE, World

pytestmark = pytest.mark.runs("lean-head", ranks=[1, 2])


class Layout(NamedTuple):
    """``flags`` are options of :func:`World`.

    ``fused``: the weight's gradient goes into ``main_grad``, as with ``gradient_accumulation_fusion``. The
    layer's own way needs a CUDA kernel for that, so in the run without the patch it goes into ``grad``.
    ``allgather_cp``: context-parallel ranks hold one piece of the packed samples each.
    """

    ranks: int = 2
    flags: Mapping[str, Any] = MappingProxyType({})
    fused: bool = False
    allgather_cp: bool = False


FROZEN = {"change": lambda chunk: chunk.output_layer.requires_grad_(False)}
SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}
#: Beside those of ``test_models.py``.
LAYOUTS = {
    "1 rank": Layout(1),
    "1 rank, frozen": Layout(1, FROZEN),
    "1 rank, fused": Layout(1, fused=True),
    "1 rank, tied, fused, bf16": Layout(1, {"tied": True, "bf16": True}, fused=True),
    "DP 2": Layout(),
    "TP 2, frozen": Layout(2, {"tp": 2, **FROZEN}),
    "TP 2, sequence parallel": Layout(2, SEQUENCE_PARALLEL),
    "TP 2, sequence parallel, tied, bf16": Layout(2, {**SEQUENCE_PARALLEL, "tied": True, "bf16": True}),
    "PP 2, deallocated outputs": Layout(2, {"pp": 2, "config": {"deallocate_pipeline_outputs": True}}),
    "PP 2, tied": Layout(2, {"pp": 2, "tied": True, **NOT_DISTRIBUTED}),
    "CP 2, all-gather": Layout(2, {"cp": 2}, allgather_cp=True),
    "1 rank, recomputed": Layout(1, {"config": RECOMPUTE}),
}
FAST, NIGHTLY = ("1 rank", "TP 2, sequence parallel"), ("1 rank, frozen", "1 rank, fused")
CASES = {
    "PPO": Case(PolicyOptions(), True),
    "entropy bonus": Case(PolicyOptions(entropy_coef=0.1), True, recompute=True, inplace_backward=True),
}


class Outcome(NamedTuple):
    """Of one rank: losses of two steps, and the gradients of the first."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    deferred: int  # calls of the output layer
    made: int  # calls whose logits were made after all
    gathers: int  # of parameters, by hooks of the forward pass


def _train(layout: Layout, case: Case, lean: bool, tile_bytes: int = 256) -> Outcome:
    settings = Settings(lean_head_tile_bytes=tile_bytes)
    with (
        applied("lean-head", settings=settings) if lean else nullcontext(),
        mock.patch.object(output_layer, "defer", wraps=output_layer.defer) as deferrals,
        mock.patch.object(deferred, "_warn", wraps=deferred._warn) as made,
        tiny_gpt.counting_overlap() as overlap,
    ):
        config = {"calculate_per_token_loss": case.calculate_per_token_loss, **layout.flags.get("config", {})}
        lengths = {"vocab_size": tiny_gpt.VOCABULARY, "seq_length": tiny_gpt.SEQUENCE}
        world = World(**{**layout.flags, **lengths, "config": config})
        model = world.model
        no_sync = [chunk.no_sync for chunk in model]
        world.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        if layout.fused and lean:
            get_attr_wrapped_model(model[0], "output_layer").gradient_accumulation_fusion = True
        reports, _ = train_step(case, model)
        gradients = {
            f"{number}.{name}": parameter.main_grad.clone()
            for number, chunk in enumerate(model)
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad
        }
        world.optimizer.step()
        reports += train_step(case, model)[0]
        losses = [float(report["loss"][0]) for report in reports]
        return Outcome(losses, gradients, deferrals.call_count, made.call_count, overlap.param_gathers)


@pytest.mark.parametrize("name", by_speed(LAYOUTS, FAST, NIGHTLY))
@on_ranks(lambda name: LAYOUTS[name].ranks, timeout=240)
def test_trains_as_without(name: str) -> None:
    cases = CASES if name == "1 rank" else {"entropy bonus": CASES["entropy bonus"]}
    check_gradients(name, LAYOUTS[name], cases)


def check_gradients(name: str, layout: Layout, cases: dict[str, Case]) -> None:
    """Train two steps with and without deferred logits, and compare losses and gradients."""
    if layout.allgather_cp:
        cases = {key: replace(case, packed=True, allgather_cp=True) for key, case in cases.items()}
    # In bf16, too, the log-probs are those of the model's own logits, so losses of the first step agree: to
    # the bit where this was measured. The gradients may differ by a rounding to bf16, and then the losses of
    # the second step do: by 2.4e-3 and 8e-4; in float32 by 6e-7 and 3e-6. The loss of a microbatch is a sum
    # of terms of either sign, however small it is, and may differ by a tenth of the bound of the largest.
    bound_of_first, bound = (1e-4, 2**-8) if layout.flags.get("bf16") else (1e-5, 1e-5)
    for key, case in cases.items():
        with ExitStack() as stack:
            for module in (tiny_gpt, attention) if layout.allgather_cp else ():
                one_piece = lambda rank, size, rows: torch.arange(size * rows).chunk(size)[rank]  # noqa: E731
                stack.enter_context(mock.patch.object(module, "positions_of", one_piece))
            without, lean = (_train(layout, case, lean) for lean in (False, True))
        first, largest = len(without.losses) // 2, max(map(abs, without.losses), default=0.0)
        for step, allowed in ((slice(first), bound_of_first), (slice(first, None), bound)):
            expected_losses = pytest.approx(without.losses[step], rel=allowed, abs=allowed / 10 * largest)
            assert lean.losses[step] == expected_losses, key
        assert lean.gathers == without.gathers and (lean.gathers > 0 or name != "DP 2"), key
        assert (without.deferred, lean.made) == (0, 0), key
        assert any(everywhere(lean.deferred)), key
        for parameter, expected in without.gradients.items():
            error = (lean.gradients[parameter] - expected).norm()
            assert error <= bound * expected.norm() + 1e-9, (key, parameter)


@on_ranks(1)
def test_an_output_layer_with_float32_logits_of_bfloat16_weights() -> None:
    """As megatron-core 0.19 builds it for ``GPTModel(logit_dtype=torch.float32)``."""
    with applied("lean-head", settings=Settings(lean_head_tile_bytes=4096)):
        model = World(bf16=True).model
        layer = get_attr_wrapped_model(model[0], "output_layer")
        layer.output_dtype = torch.float32
        inputs: list[torch.Tensor] = []
        layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0].detach()))
        tokens = torch.randint(tiny_gpt.VOCABULARY, (1, tiny_gpt.SEQUENCE), generator=torch.Generator())
        logits = model[0](tokens, torch.arange(tiny_gpt.SEQUENCE)[None], None)[0]
        assert logits.dtype == torch.float32 and logits.is_deferred
        log_probs = vocab_parallel_log_probs(logits, tokens[0])
        log_probs.sum().backward()
    product = inputs[0][:, 0].double() @ layer.weight.detach().double().T
    exact = product.log_softmax(1)[torch.arange(tiny_gpt.SEQUENCE), tokens[0]]
    torch.testing.assert_close(log_probs.detach().double(), exact, rtol=1e-6, atol=1e-6)
    assert layer.weight.main_grad.isfinite().all() and layer.weight.main_grad.any()


class RowsOfTheLoss(GPTModel):  # type: ignore[misc]
    """In the shape of THUDM/slime#2310: the output layer gets those rows only that the loss counts."""

    def _postprocess(self, *, hidden_states: torch.Tensor, loss_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        layer, is_split = self.output_layer, self.output_layer.sequence_parallel
        if is_split:  # its own gather, since the rows are those of the whole sequence
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        try:
            layer.sequence_parallel = False
            logits: torch.Tensor = layer(hidden_states[loss_mask[0].bool()])[0]
        finally:
            layer.sequence_parallel = is_split
        return logits.transpose(0, 1).contiguous()


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2, timeout=120)
def test_a_subclass_that_selects_rows_before_the_output_layer(sequence_parallel: bool) -> None:
    tokens = torch.randint(tiny_gpt.VOCABULARY, (1, tiny_gpt.SEQUENCE), generator=torch.Generator())
    counted = torch.arange(tiny_gpt.SEQUENCE)[None] % 3 == 1

    def trained(lean: bool) -> list[torch.Tensor]:
        with applied("lean-head", settings=Settings(lean_head_tile_bytes=256)) if lean else nullcontext():
            model = World(tp=2, sequence_parallel=sequence_parallel).model
            get_attr_wrapped_model(model[0], "output_layer", return_model_obj=True).__class__ = RowsOfTheLoss
            positions = torch.arange(tiny_gpt.SEQUENCE)[None]
            logits = model[0](tokens, positions, None, loss_mask=counted)[0]
            assert len(logits) == counted.sum() and getattr(logits, "is_deferred", False) == lean
            group = parallel_state.get_tensor_model_parallel_group()
            log_probs = vocab_parallel_log_probs(logits, tokens[counted], tp_group=group)
            (torch.linspace(0.5, 1.5, len(log_probs)) * log_probs).sum().backward()
            assert not lean or logits.is_deferred
            return [log_probs.detach(), *(p.main_grad.clone() for p in model[0].parameters())]

    torch.testing.assert_close(trained(True), trained(False), rtol=1e-5, atol=1e-6)


@on_ranks(1, timeout=240)
def test_no_tensor_of_rows_and_vocabulary() -> None:
    # With these sizes the logits of a microbatch have more than twice the elements of the next largest
    # tensor, which is DDP's buffer of all parameters.
    with mock.patch.multiple(tiny_gpt, VOCABULARY=2048, SEQUENCE=128):
        elements = []
        for lean in (False, True):
            with Sizes() as sizes:
                _train(LAYOUTS["1 rank"], CASES["entropy bonus"], lean, tile_bytes=2**17)
            elements.append(sizes.largest)
        logits = tiny_gpt.BATCH * tiny_gpt.SEQUENCE * tiny_gpt.VOCABULARY
    assert elements[0] >= logits > 2 * elements[1]
