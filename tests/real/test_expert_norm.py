"""``expert-norm`` on real optimizers: norm, clipping and zeros against a dense sum in float64."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl_patches import applied, status
from megatron_rl_patches.testing import TinyModel, tiny_model
from tests.ranks import everywhere, on_ranks

CLIP = 1.0
#: Whether main parameters are copies, and whether they are divided over data-parallel ranks.
OPTIMIZERS = [(bf16, distributed) for bf16 in (True, False) for distributed in (True, False)]
# The gradients are small whole numbers, so sums of squares have no rounding.
Gradients = dict[Any, torch.Tensor]


class TELinear(torch.nn.Linear):
    """A layer as Megatron's ``TELinear`` with ``parallel_mode="duplicated"`` is up to 0.16."""

    parallel_mode = None

    def __init__(self, width: int, features: int) -> None:
        super().__init__(width, features, bias=False)
        weight: Any = self.weight
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
        weight.allreduce, weight.sequence_parallel = True, False


def needs_the_patch() -> None:
    """Skip the test where Megatron itself counts right; the patch is then left alone."""
    with applied("expert-norm"):
        states = {site.state for site in status() if site.patch == "expert-norm"}
    assert states in ({"applied"}, {"not needed"})
    if states == {"not needed"}:
        pytest.skip("this release counts experts by their own group")


def keys_of(chunk: torch.nn.Module) -> dict[str, Any]:
    """Return what each parameter is a part of: equal keys on two ranks are the same numbers."""
    tp, experts_tp = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )
    keys: dict[str, Any] = {}
    for name, parameter in chunk.named_parameters():
        is_expert = ".experts." in name
        is_divided = getattr(parameter, "tensor_model_parallel", False) and "_down_proj" not in name
        part = (experts_tp if is_expert else tp) if is_divided else 0
        keys[name] = name, part, parallel_state.get_expert_model_parallel_rank() if is_expert else 0
    return keys


def without_marks(chunk: torch.nn.Module) -> None:
    """Leave expert parameters unmarked, as TransformerEngine's grouped layers do."""
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            vars(parameter).pop("tensor_model_parallel", None)


def with_duplicates(chunk: torch.nn.Module) -> None:
    """Mark the down-projections of latent attention as TransformerEngine does, and duplicate them."""
    for module in chunk.modules():
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(module, name):
                setattr(module, name, TELinear(32, 12))


def gradient_of(key: Any, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randint(-3, 4, shape, generator=generator).float()


def fill(chunk: Any, keys: dict[str, Any]) -> Gradients:
    """Fill the gradient buffers as if they were reduced; return the gradients of all ranks by their keys."""
    own: Gradients = {}
    for name, parameter in chunk.module.named_parameters():
        key = keys[name]
        own[key] = gradient_of(key, parameter.shape)
        parameter.main_grad.copy_(own[key])
    return {key: gradient for gradients in everywhere(own) for key, gradient in gradients.items()}


def norm_of(gradients: Gradients) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def trained(tiny: TinyModel, change: Any = None) -> tuple[Any, Any, dict[str, Any]]:
    """Return the model in DDP, its optimizer and the keys of its parameters."""
    tiny.initialize()
    config = tiny.transformer_config()
    [chunk] = tiny.chunks(config)
    keys = keys_of(chunk)
    if change:
        change(chunk)
    [model], optimizer = tiny.in_training(config, [chunk])
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.config.log_num_zeros_in_grad = True
        part.config.clip_grad = CLIP
    return model, optimizer, keys


def weights_of(model: Any, optimizer: Any) -> Iterator[torch.Tensor]:
    yield from (parameter.detach().clone() for parameter in model.parameters())
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield from (parameter.detach().clone() for parameter in part.get_parameters())


def check(tiny: TinyModel, change: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Compare norm, zeros and clipped gradients of a step with a dense sum; return what was trained."""
    model, optimizer, keys = trained(tiny, change)
    gradients = fill(model, keys)
    norm = norm_of(gradients)
    zeros = sum(int((gradient == 0).sum()) for gradient in gradients.values())
    succeeded, counted, counted_zeros = optimizer.step()
    assert succeeded
    assert counted == pytest.approx(norm, rel=1e-6)
    assert counted_zeros == zeros
    if dist.get_world_size() == tiny.tp:  # each rank clips all that it holds
        for name, parameter in model.module.named_parameters():
            clipped = gradients[keys[name]] * (CLIP / (norm + 1e-6))
            torch.testing.assert_close(parameter.main_grad, clipped, rtol=1e-5, atol=0)
    return model, optimizer, keys


def check_nan_in_an_expert(model: Any, optimizer: Any, keys: dict[str, Any]) -> None:
    """Step with a NaN in an expert of the last expert-parallel rank: no rank takes the step."""
    fill(model, keys)
    before = [*weights_of(model, optimizer)]
    if parallel_state.get_expert_model_parallel_rank() == 1:
        expert = next(p for name, p in model.named_parameters() if ".experts." in name)
        expert.main_grad.view(-1)[0] = math.nan
    succeeded, norm, _ = optimizer.step()
    assert not succeeded and math.isnan(norm)
    assert all(map(torch.equal, before, weights_of(model, optimizer)))


def ratio_without_the_patch(tiny: TinyModel, change: Any) -> float:
    """Return the norm of Megatron's optimizer in units of the dense one."""
    model, optimizer, keys = trained(tiny, change)
    gradients = fill(model, keys)
    return float(optimizer.step()[1]) / norm_of(gradients)


def experts(expert_tp: int, **options: Any) -> TinyModel:
    """Describe a model whose experts have biases where Megatron allows it, as with expert TP 1."""
    off = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    for has_bias in (True, False):
        config = {"add_bias_linear": has_bias, "num_layers": 1}
        tiny = tiny_model("moe", **{"tp": 2, "expert_tp": expert_tp, **off, **options}, config=config)
        with contextlib.suppress(AssertionError):
            tiny.transformer_config()
            break
    return tiny


@on_ranks(2)
def test_experts_that_tensor_parallel_ranks_have_of_their_own() -> None:
    needs_the_patch()
    sizes: dict[str, Any] = {"expert_tp": 1, "ep": 2, "sequence_parallel": True}
    assert ratio_without_the_patch(experts(**sizes), without_marks) < 0.9
    with applied("expert-norm", "finite-step"):
        for bf16, distributed in ((True, True), (False, False)):
            tiny = experts(**sizes, bf16=bf16, use_distributed_optimizer=distributed)
            check_nan_in_an_expert(*check(tiny, without_marks))


@on_ranks(2)
def test_parameters_that_are_duplicated_and_marked_as_divided_count_once() -> None:
    needs_the_patch()
    config = {"num_layers": 1}
    tiny = tiny_model(
        "mla", tp=2, bf16=True, overlap_grad_reduce=False, overlap_param_gather=False, config=config
    )
    with applied("expert-norm"):
        check(tiny, with_duplicates)
    assert ratio_without_the_patch(tiny, with_duplicates) > 1.01


@on_ranks(2)
def test_elsewhere_the_bits_are_as_before() -> None:
    for tiny in (experts(2, ep=1), experts(1, tp=1, ep=2)):
        steps = []
        for patch in ("expert-norm", "finite-step"):
            with applied(patch):
                model, optimizer, keys = trained(tiny)
                fill(model, keys)
                result = optimizer.step()
                steps.append([torch.tensor(result[1:]), *weights_of(model, optimizer)])
        assert all(map(torch.equal, *steps))


@pytest.mark.slow
@pytest.mark.parametrize("expert_tp", [1, 2])
@on_ranks(4, timeout=240)
def test_more_ranks_and_data_parallelism(expert_tp: int) -> None:
    needs_the_patch()
    with applied("expert-norm", "finite-step"):
        for bf16, distributed in OPTIMIZERS:
            options = {"bf16": bf16, "use_distributed_optimizer": distributed, "sequence_parallel": True}
            tiny = experts(expert_tp, ep=2, **options)
            check(tiny, None)
            check_nan_in_an_expert(*check(tiny, without_marks))
