"""When an output layer defers its logits; tests/real/test_lean_head.py trains a model with such logits."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, layers
from torch.distributed.fsdp import FSDPModule

from megatron_rl_patches.losses import DeferredLogits, output_layer
from megatron_rl_patches.losses.output_layer import column_parallel_forward, deferring, language_model_forward
from megatron_rl_patches.losses.vocab.deferred import dense

HIDDEN = torch.ones(3, 1, 4)
OWN = object()  # what the layer's own forward returns
Change = Callable[[Any], object]


@pytest.fixture(autouse=True)
def _no_warning_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "_warned_reasons", set())


def make_layer(kind: Any = ColumnParallelLinear) -> Any:
    """Megatron's own layer; it needs no process group."""
    config = ModelParallelConfig(use_cpu_initialization=True)
    return kind(4, 6, config=config, init_method=torch.nn.init.normal_, bias=False)


def defers(layer: Any, *, model: Any = None, arguments: Any = None, **options: Any) -> bool:
    """Call the layer in the forward of a model, as the patch does; return whether the logits are deferred."""

    def forward() -> Any:
        return column_parallel_forward(lambda: OWN, layer, HIDDEN, **options)

    model = model or SimpleNamespace(output_layer=layer)
    output = language_model_forward(forward, model, arguments or {})
    assert output is OWN or is_deferred(output)
    return output is not OWN


def is_deferred(output: Any) -> bool:
    return isinstance(output[0], DeferredLogits) and output[0].is_deferred


def _set(path: str, value: Any) -> Change:
    """Set an attribute of a layer, or of its config or weight."""
    owner, _, name = path.rpartition(".")
    return lambda layer: setattr(getattr(layer, owner) if owner else layer, name, value)


def _of_class(name: str, *bases: type) -> Change:
    """Change the class of a layer, as torch's ``fully_shard`` does."""
    return _set("__class__", type(name, (*bases, ColumnParallelLinear), {}))


def another_product(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


class QuantizedParameter(torch.nn.Parameter):
    pass


#: What a layer is like, and why it does not only multiply.
LAYERS: list[tuple[Change, str]] = [
    (lambda layer: None, ""),
    (_set("output_dtype", HIDDEN.dtype), ""),
    (_set("gtp_remat_size", 1), ""),
    (_set("_forward_impl", layers.linear_with_frozen_weight), ""),
    (_set("config.defer_embedding_wgrad_compute", True), "defer_embedding_wgrad_compute is set"),
    (_set("disable_grad_reduce", True), "disable_grad_reduce is set"),
    (_set("explicit_expert_comm", True), "explicit_expert_comm is set"),
    (_set("output_dtype", torch.bfloat16), "output_dtype is torch.bfloat16"),
    (_set("config.use_mup", True), "use_mup is set"),
    (_set("gtp_remat_size", 2), "gtp_remat_size is set"),
    (_set("_forward_impl", another_product), "multiplies with <function another_product"),
    (_set("weight", QuantizedParameter(torch.ones(6, 4))), "weight is a QuantizedParameter"),
    (_set("weight.__fsdp_param__", True), "weight is a Parameter that may be gone"),
    (_of_class("FSDPColumnParallelLinear", FSDPModule), "weight is sharded"),
    (_of_class("FullyShardedDataParallel"), "weight is sharded"),
    (lambda layer: layer.bfloat16(), "weight is torch.bfloat16 on cpu"),
    (lambda layer: layer.to("meta"), "weight is torch.float32 on meta"),
]


@pytest.mark.parametrize(("change", "reason"), LAYERS)
def test_a_layer_that_does_more_than_multiply_materializes_its_logits_and_says_why_once(
    change: Change, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer = make_layer()
    change(layer)
    assert defers(layer) is (not reason)
    assert defers(layer) is (not reason)
    assert len(caplog.records) == bool(reason) and reason in caplog.text


def test_a_layer_that_gathers_from_other_ranks_materializes_its_logits() -> None:
    layer = make_layer()
    layer.tp_group = object()
    for ranks, of_layer, of_call, deferred in (
        *((2, False, None, True), (2, True, None, False), (2, False, True, False), (2, True, False, True)),
        (1, True, None, True),
    ):
        layer.gather_output = of_layer
        with mock.patch("torch.distributed.get_world_size", return_value=ranks):
            assert defers(layer, runtime_gather_output=of_call) is deferred


def a_gpu(captures: bool) -> Any:
    return mock.patch.multiple(
        torch.cuda, is_available=lambda: True, is_current_stream_capturing=lambda: captures
    )


def test_recorded_or_converted_operations_materialize_the_logits() -> None:
    for context in (
        torch.autocast("cpu", torch.bfloat16),
        mock.patch("torch.is_autocast_enabled", lambda device="cuda": device == "cuda"),
        mock.patch("torch.compiler.is_compiling", return_value=True),
        a_gpu(captures=True),
    ):
        with context:
            assert not defers(make_layer())
    with a_gpu(captures=False):
        assert defers(make_layer())


@pytest.mark.parametrize("name", ["labels", "inference_context", "inference_params", "output_processor"])
def test_calls_that_return_no_logits_or_other_ones(name: str) -> None:
    layer = make_layer()
    assert defers(layer, arguments={name: None})
    with deferring(SimpleNamespace(output_layer=layer)):
        assert not defers(layer, arguments={name: object()})
    assert not defers(layer, unknown_option=None)
    layer.weight = None
    assert defers(layer, weight=torch.ones(6, 4))


class Adapter(ColumnParallelLinear):
    """Adds to the product, as LoRA does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, bias = super().forward(*args, **kwargs)
        return logits + 1, bias


def test_adapters() -> None:
    around = SimpleNamespace(output_layer=torch.nn.Sequential(make_layer()))
    assert not defers(around.output_layer[0], model=around)
    with_its_own_forward = make_layer()
    with_its_own_forward.forward = Adapter.forward.__get__(make_layer(Adapter))
    for layer in (around.output_layer, make_layer(Adapter), with_its_own_forward):
        own = layer(HIDDEN)
        with deferring(SimpleNamespace(output_layer=layer)):
            output = layer(HIDDEN)
        assert not is_deferred(output)
        torch.testing.assert_close(output, own)


@pytest.mark.parametrize("is_of_megatron", [False, True])
def test_a_layer_defers_for_the_length_of_a_block(is_of_megatron: bool) -> None:
    """In newer releases Megatron's output layer is a subclass that also knows the cross entropy of labels."""
    own_forward = {"forward": lambda self, *args: ColumnParallelLinear.forward(self, *args)}
    subclass = type("LinearCrossEntropyModule", (ColumnParallelLinear,), own_forward)
    subclass.__module__ = "megatron.core.transformer.linear_cross_entropy"
    layer = make_layer(subclass if is_of_megatron else ColumnParallelLinear)
    with deferring(SimpleNamespace(output_layer=layer)):
        deferred = layer(HIDDEN)
    own = layer(HIDDEN)
    assert [is_deferred(deferred), is_deferred(own)] == [True, False]
    torch.testing.assert_close(dense(deferred[0]), own[0])
    assert column_parallel_forward(lambda: OWN, layer, HIDDEN) is OWN
