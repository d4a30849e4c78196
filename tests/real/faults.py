"""Exceptions at every stage of a training step of :mod:`tests.real.tiny_gpt`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer import TransformerLayer

from tests.real import tiny_gpt

#: Stages before the optimizer's update: a retry of the step gives what an undisturbed run gives.
BEFORE_UPDATE = ("before forward", "forward 0", "forward 1", "backward 0", "backward 1", "before step")
#: The update is half done: only equality across ranks is defined.
IN_STEP = ("in step",)
#: The step is done: training goes on with the next one.
AFTER_UPDATE = ("after step",)
STAGES = BEFORE_UPDATE + IN_STEP + AFTER_UPDATE


class Injected(Exception):
    """The fault."""


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise Injected("half way back")


@contextmanager
def _raising_half_way_back(chunk: torch.nn.Module) -> Iterator[None]:
    """Later layers have their gradients, some bucket groups have dispatched; earlier layers have not."""
    layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]

    def hook(module: Any, inputs: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_RaiseInBackward.apply(output[0]), *output[1:])

    handle = layers[len(layers) // 2 - 1].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def fault(stage: str, step: int, optimizer: Any) -> Iterator[None]:
    """Raise :class:`Injected` once, at ``stage`` of the ``step``-th step trained inside."""
    kind, _, number = stage.partition(" ")
    steps = microbatches = 0
    call_step, call_forward = tiny_gpt.train_step, tiny_gpt.forward_step

    def due() -> bool:
        return steps == step + 1

    def train_step(*args: Any) -> float:
        nonlocal steps, microbatches
        steps, microbatches = steps + 1, 0
        if due() and stage == "before forward":
            raise Injected(stage)
        loss = call_step(*args)
        if due() and stage == "after step":
            raise Injected(stage)
        return loss

    def forward_step(*args: Any) -> tuple[Any, Any]:
        nonlocal microbatches
        microbatches += 1
        now = due() and number == str(microbatches - 1)
        if now and kind == "backward":
            with _raising_half_way_back(args[-1]):
                return call_forward(*args)
        outcome = call_forward(*args)
        if now:
            raise Injected(stage)
        return outcome

    def raising(method: Any, after: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if due() and not after:
                raise Injected(stage)
            result = method(*args, **kwargs)
            if due():
                raise Injected(stage)
            return result

        return call

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(tiny_gpt, "train_step", train_step))
        stack.enter_context(mock.patch.object(tiny_gpt, "forward_step", forward_step))
        if stage == "before step":
            stack.enter_context(mock.patch.object(optimizer, "step", raising(optimizer.step, after=False)))
        if stage == "in step":
            # Shards and main parameters are new, and nobody has gathered them.
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                inner = part.optimizer
                stack.enter_context(mock.patch.object(inner, "step", raising(inner.step, after=True)))
        yield
