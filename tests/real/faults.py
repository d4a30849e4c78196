"""Exceptions at every stage of a step of :mod:`tests.references.tiny_gpt`, and a model that meets them."""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerLayer
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_rl_patches.testing import TinyModel
from tests.references import tiny_gpt

MICROBATCHES = 2

# Before the update, a retry of the step gives what an undisturbed run gives. In the step the update is half
# done, so that only equality across ranks is defined. After it, training goes on with the next one.
STAGES = (
    *("before forward", "forward 0", "forward 1", "backward 0", "backward 1", "before step"),
    *("in step", "after step"),
)
#: Of a mixture of experts, within the forward pass of the second microbatch.
STAGES_OF_EXPERTS = ("expert 1", "dispatcher 1")
#: Steps done by calls before, and step of the failing call: the very first batch, a first step, a later one.
PLACES = {"first batch": (0, 0), "first step": (1, 0), "later step": (1, 1)}


def steps_done(stage: str, failing_step: int) -> int:
    """Return how many steps a call had done when a fault ended it."""
    return failing_step + (stage in ("in step", "after step"))


class Checksums(NamedTuple):
    """Hashes of one rank's weights."""

    params: str  # which all data-parallel ranks share
    replicated: str  # those of them that all tensor-parallel and expert-parallel ranks share
    whole: str  # with the optimizer's shard


class Injected(Exception):
    """The fault."""


def raise_injected(stage: str) -> None:
    raise Injected(stage)


def interrupt(stage: str) -> None:
    """Send SIGINT to this process, as Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError(f"{stage}: no KeyboardInterrupt after SIGINT")


@contextmanager
def _striking_half_way_back(chunk: torch.nn.Module, strike: Callable[[str], None]) -> Iterator[None]:
    """Strike when later layers have their gradients and some bucket groups have dispatched, but not all."""
    layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]

    def hook(module: Any, inputs: Any, output: tuple[Any, ...]) -> None:
        output[0].register_hook(lambda gradient: strike("half way back"))

    handle = layers[len(layers) // 2 - 1].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _striking_among_experts(
    chunk: torch.nn.Module, kind: str, strike: Callable[[str], None]
) -> Iterator[None]:
    """Strike in the last layer, in its first expert or when the dispatcher has sent the tokens."""
    layer = [module for module in chunk.modules() if isinstance(module, MoELayer)][-1]
    with ExitStack() as stack:
        if kind == "expert":
            expert = layer.experts.local_experts[0]
            handle = expert.register_forward_pre_hook(lambda module, inputs: strike("in an expert"))
            stack.callback(handle.remove)
        else:
            dispatcher = layer.token_dispatcher
            name = "token_dispatch" if hasattr(dispatcher, "token_dispatch") else "token_permutation"
            send = getattr(dispatcher, name)

            def send_and_strike(*args: Any, **kwargs: Any) -> None:
                send(*args, **kwargs)
                strike("in the token dispatcher")

            stack.enter_context(mock.patch.object(dispatcher, name, send_and_strike))
        yield


@contextmanager
def fault(
    stage: str, step: int, optimizer: Any, strike: Callable[[str], None] = raise_injected
) -> Iterator[None]:
    """Call ``strike``, which raises, once: at ``stage`` of the ``step``-th step trained inside."""
    kind, _, number = stage.partition(" ")
    steps = microbatches = 0
    call_step, call_forward = tiny_gpt.train_step, tiny_gpt.forward_step

    def due() -> bool:
        return steps == step + 1

    def train_step(*args: Any) -> float:
        nonlocal steps, microbatches
        steps, microbatches = steps + 1, 0
        if due() and stage == "before forward":
            strike(stage)
        loss = call_step(*args)
        if due() and stage == "after step":
            strike(stage)
        return loss

    def forward_step(*args: Any) -> tuple[Any, Any]:
        nonlocal microbatches
        microbatches += 1
        now = due() and number == str(microbatches - 1)
        if now and kind == "backward":
            with _striking_half_way_back(args[-1], strike):
                return call_forward(*args)
        if now and kind in ("expert", "dispatcher"):
            with _striking_among_experts(args[-1], kind, strike):
                return call_forward(*args)
        outcome = call_forward(*args)
        if now:
            strike(stage)
        return outcome

    def striking(method: Any, after: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if due() and not after:
                strike(stage)
            result = method(*args, **kwargs)
            if due():
                strike(stage)
            return result

        return call

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(tiny_gpt, "train_step", train_step))
        stack.enter_context(mock.patch.object(tiny_gpt, "forward_step", forward_step))
        if stage == "before step":
            stack.enter_context(mock.patch.object(optimizer, "step", striking(optimizer.step, after=False)))
        if stage == "in step":
            # Shards and main parameters are new, and nobody has gathered them.
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                inner = part.optimizer
                stack.enter_context(mock.patch.object(inner, "step", striking(inner.step, after=True)))
        yield


@contextmanager
def same_process_groups() -> Iterator[None]:
    """Keep the process groups while models of one layout are built again and again.

    Every set of gloo groups would start fifty threads.
    """
    with (
        mock.patch.object(parallel_state, "destroy_model_parallel"),
        mock.patch.object(parallel_state, "initialize_model_parallel"),
    ):
        yield


@contextmanager
def counting_updates(optimizer: Any) -> Iterator[list[None]]:
    """Yield a list that gets an entry at every update of the weights."""
    updates: list[None] = []
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
    call_step = inner.step

    def step(*args: Any, **kwargs: Any) -> Any:
        value = call_step(*args, **kwargs)
        updates.append(None)
        return value

    with mock.patch.object(inner, "step", step):
        yield updates


class Trainee:
    """A model that is trained by several calls, each of which goes on after the steps done so far."""

    def __init__(self, options: TinyModel) -> None:
        self._options = options
        self.model, self.optimizer = options.build()
        self._data = tiny_gpt.data_iterators(options)
        self.done = 0
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        for iterator in self._data:
            iterator._microbatch = self.done * MICROBATCHES
        self.losses += tiny_gpt.train(
            self.model, self.optimizer, self._data, [MICROBATCHES] * steps, self._options
        )
        self.done += steps

    def fail(self, stage: str, step: int, strike: Callable[[str], None] = raise_injected) -> BaseException:
        """Train into a fault, check that its exception comes out unchanged, and return it."""
        try:
            with fault(stage, step, self.optimizer, strike):
                self.train(2)
        except (Injected, KeyboardInterrupt) as error:
            assert error.__cause__ is None and error.__context__ is None
            assert "recovery" not in "".join(traceback.format_exception(error))
            self.done += steps_done(stage, step)
            return error
        raise AssertionError(f"{stage} of step {step}: the fault was not raised")

    def checksums(self) -> Checksums:
        replicated = torch.nn.ParameterList(
            parameter
            for chunk in self.model
            for parameter in chunk.parameters()
            if not getattr(parameter, "tensor_model_parallel", False)
            and getattr(parameter, "allreduce", True)
        )
        no_optimizer = SimpleNamespace(param_groups=())
        return Checksums(
            tiny_gpt.checksum(self.model, no_optimizer),
            tiny_gpt.checksum([replicated], no_optimizer),
            tiny_gpt.checksum(self.model, self.optimizer),
        )

    def release(self) -> None:
        """Cut the references that keep Megatron's model alive, and with it its process groups."""
        for chunk in self.model:
            chunk.grad_accs.clear()
            tiny_gpt.get_model_config(chunk).grad_scale_func = None
        self.model, self.optimizer = [], None
        gc.collect()
