"""``expert-norm`` on real optimizers: norm, clipping and zeros against a dense sum in float64."""

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_rl_patches import applied, status
from megatron_rl_patches.common.chunks import unwrap
from megatron_rl_patches.testing import TinyModel, tiny_model
from tests.ranks import everywhere, on_ranks
from tests.worlds.model import NO_OVERLAP, World

CLIP = 1.0


class TELinear(torch.nn.Linear):
    """A layer as Megatron's ``TELinear`` with ``parallel_mode="duplicated"`` is up to 0.16."""

    parallel_mode = None

    def __init__(self, width: int, features: int) -> None:
        super().__init__(width, features, bias=False)
        divided = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
        vars(self.weight).update(divided, allreduce=True, sequence_parallel=False)


def needs_the_patch() -> None:
    """Skip the test where Megatron itself counts right; the patch is then left alone."""
    import_module("megatron.core.optimizer")  # one of its functions is patched
    with applied("expert-norm"):
        [state] = {site.state for site in status() if site.patch == "expert-norm"}
    if state == "not needed":
        pytest.skip("this release counts experts by their own group")
    assert state == "applied"


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


class Step(World):
    """A model before a step, with gradients as if they were reduced, and their norm as a dense sum.

    The gradients are small whole numbers, so sums of squares have no rounding.
    """

    def __init__(self, tiny: TinyModel, change: Callable[[Any], None] = lambda chunk: None) -> None:
        #: What each parameter is a part of: equal keys on two ranks are the same numbers.
        self.keys: dict[str, tuple[str, int, int]] = {}

        def prepare(chunk: torch.nn.Module) -> None:
            self.keys |= {name: self._key(name, p) for name, p in unwrap(chunk).named_parameters()}
            change(chunk)

        super().__init__(tiny, change=prepare)
        for part in self.optimizer.chained_optimizers:
            part.config.log_num_zeros_in_grad, part.config.clip_grad = True, CLIP
        own = {}
        for name, parameter in self.parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(repr(self.keys[name]).encode()))
            own[self.keys[name]] = torch.randint(-3, 4, parameter.shape, generator=generator).float()
            parameter.main_grad.copy_(own[self.keys[name]])
        #: Of all ranks, by their keys.
        self.dense = {key: value for values in everywhere(own) for key, value in values.items()}
        self.norm = math.sqrt(sum(float(each.double().square().sum()) for each in self.dense.values()))

    def _key(self, name: str, parameter: Any) -> tuple[str, int, int]:
        is_expert = ".experts." in name
        is_divided = getattr(parameter, "tensor_model_parallel", False) and "_down_proj" not in name
        tp_rank = mpu.get_expert_tensor_parallel_rank() if is_expert else mpu.get_tensor_model_parallel_rank()
        return name, tp_rank * is_divided, mpu.get_expert_model_parallel_rank() * is_expert

    def parameters(self) -> Iterator[tuple[str, Any]]:
        return unwrap(self.model[0]).named_parameters()  # type: ignore[no-any-return]


def check(tiny: TinyModel, *changes: Any) -> None:
    """Compare norm, zeros and clipped gradients of a step with a dense sum."""
    step = Step(tiny, *changes)
    succeeded, norm, zeros = step.optimizer.step()
    assert succeeded
    assert norm == pytest.approx(step.norm, rel=1e-6)
    assert zeros == sum(int((gradient == 0).sum()) for gradient in step.dense.values())
    if dist.get_world_size() == tiny.tp:  # each rank clips all that it holds
        for name, parameter in step.parameters():
            clipped = step.dense[step.keys[name]] * (CLIP / (step.norm + 1e-6))
            torch.testing.assert_close(parameter.main_grad, clipped, rtol=1e-5, atol=0)


def check_nan_in_an_expert(tiny: TinyModel) -> None:
    """Step with a NaN in an expert of the last expert-parallel rank: no rank takes the step."""
    step = Step(tiny, without_marks)
    before = step.state()
    if mpu.get_expert_model_parallel_rank() == 1:
        next(p for name, p in step.parameters() if ".experts." in name).main_grad[0] = math.nan
    succeeded, norm, _ = step.optimizer.step()
    assert not succeeded and math.isnan(norm)
    assert all(map(torch.equal, before, step.state()))


def ratio(tiny: TinyModel, change: Any) -> float:
    """Return the norm of Megatron's optimizer in units of the dense one."""
    step = Step(tiny, change)
    return float(step.optimizer.step()[1]) / step.norm


def experts(expert_tp: int, **options: Any) -> TinyModel:
    """Describe a model whose experts have biases where Megatron allows it, as with expert TP 1."""
    for has_bias in (True, False):
        config = {"add_bias_linear": has_bias, "num_layers": 1}
        tiny = tiny_model("moe", **{"tp": 2, "expert_tp": expert_tp, **NO_OVERLAP, **options}, config=config)
        with contextlib.suppress(AssertionError):
            tiny.transformer_config()
            break
    return tiny


@on_ranks(2)
def test_experts_that_tensor_parallel_ranks_have_of_their_own() -> None:
    needs_the_patch()
    sizes: dict[str, Any] = {"expert_tp": 1, "ep": 2, "sequence_parallel": True}
    assert ratio(experts(**sizes), without_marks) < 0.9
    with applied("expert-norm", "finite-step"):
        for setting in (True, False):
            tiny = experts(**sizes, bf16=setting, use_distributed_optimizer=setting)
            check(tiny, without_marks)
            check_nan_in_an_expert(tiny)


@on_ranks(2)
def test_parameters_that_are_duplicated_and_marked_as_divided_count_once() -> None:
    needs_the_patch()
    tiny = tiny_model("mla", tp=2, bf16=True, config={"num_layers": 1}, **NO_OVERLAP)
    with applied("expert-norm"):
        check(tiny, with_duplicates)
    assert ratio(tiny, with_duplicates) > 1.01


@on_ranks(2)
def test_elsewhere_the_bits_are_as_before() -> None:
    for tiny in (experts(2, ep=1), experts(1, tp=1, ep=2)):
        results = []
        for patch in ("expert-norm", "finite-step"):
            with applied(patch):
                step = Step(tiny)
                results.append([torch.tensor(step.optimizer.step()[1:]), *step.state()])
        assert all(map(torch.equal, *results))


@pytest.mark.slow
@pytest.mark.parametrize("expert_tp", [1, pytest.param(2, marks=pytest.mark.nightly)])
@on_ranks(4, timeout=240)
def test_more_ranks_and_data_parallelism(expert_tp: int) -> None:
    needs_the_patch()
    with applied("expert-norm", "finite-step"):
        for bf16, distributed in product((True, False), repeat=2):
            options = {"bf16": bf16, "use_distributed_optimizer": distributed, "sequence_parallel": True}
            tiny = experts(expert_tp, ep=2, **options)
            check(tiny)
            check(tiny, without_marks)
            check_nan_in_an_expert(tiny)
