"""Exceptions at every stage of a step of :mod:`tests.references.tiny_gpt`, and a model that meets them."""

import gc
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core.transformer import TransformerLayer
from megatron.core.transformer.moe.moe_layer import MoELayer

from tests.ranks import everywhere
from tests.references import tiny_gpt
from tests.worlds.model import World

Strike = Callable[[str], None]  # raises, and gets the stage

# Before the update, a retry of the step gives what an undisturbed run gives. In the step the update is half
# done, so that only equality across ranks is defined. After it, training goes on with the next one.
STAGES = ("before forward", "forward 0", "forward 1", "backward 0", "backward 1", "before step", "in step")
STAGES += ("after step",)
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
def _striking_within(chunk: torch.nn.Module, kind: str, strike: Strike) -> Iterator[None]:
    """Strike half way back, where some bucket groups have dispatched, or in an expert of the last layer."""
    if kind == "backward":
        layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]

        def hook(module: Any, inputs: Any, output: tuple[Any, ...]) -> None:
            output[0].register_hook(lambda gradient: strike("half way back"))

        with layers[len(layers) // 2 - 1].register_forward_hook(hook):
            yield
        return
    moe = [module for module in chunk.modules() if isinstance(module, MoELayer)][-1]
    expert = moe.experts.local_experts[0]
    with expert.register_forward_hook(lambda *unused: strike("in an expert")):
        yield


@contextmanager
def fault(stage: str, step: int, optimizer: Any, strike: Strike = raise_injected) -> Iterator[None]:
    """Call ``strike``, which raises, once: at ``stage`` of the ``step``-th step trained inside."""
    kind, _, microbatch = stage.partition(" ")
    steps = microbatches = 0
    call_step, call_forward = tiny_gpt.train_step, tiny_gpt.forward_step

    def reach(place: str) -> None:
        if steps == step + 1 and place == stage:
            strike(stage)

    def train_step(*args: Any) -> float:
        nonlocal steps, microbatches
        steps, microbatches = steps + 1, 0
        reach("before forward")
        loss = call_step(*args)
        reach("after step")
        return loss

    def forward_step(*args: Any) -> tuple[Any, Any]:
        nonlocal microbatches
        number, microbatches = microbatches, microbatches + 1
        is_within = steps == step + 1 and microbatch == str(number) and kind != "forward"
        with _striking_within(args[-1], kind, strike) if is_within else nullcontext():
            outcome = call_forward(*args)
        reach(f"forward {number}")
        return outcome

    def reaching(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            reach("before step")
            result = method(*args, **kwargs)
            reach("in step")
            return result

        return call

    # In the step, shards and main parameters are new, and nobody has gathered them.
    parts = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(tiny_gpt, "train_step", train_step))
        stack.enter_context(mock.patch.object(tiny_gpt, "forward_step", forward_step))
        for owner in {"before step": [optimizer], "in step": parts}.get(stage, []):
            stack.enter_context(mock.patch.object(owner, "step", reaching(owner.step)))
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


class Trainee(World):
    """A model that is trained by several calls, one of which may end with a fault."""

    def fail(self, stage: str, step: int, strike: Strike = raise_injected) -> BaseException:
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
            self.checksum(),
        )

    def assert_as_undisturbed(self) -> None:
        """Assert that losses, weights and optimizer are those of a run that nothing has disturbed."""
        undisturbed = Trainee(self.options)
        undisturbed.train(self.done)
        assert self.losses.items() <= undisturbed.losses.items()
        assert self.checksums() == undisturbed.checksums()
        first, *others = everywhere((list(self.losses), self.checksums().params))
        assert others == [first] * len(others)

    def release(self) -> None:
        """Cut the references that keep Megatron's model alive, and with it its process groups."""
        for chunk in self.model:
            chunk.grad_accs.clear()
            tiny_gpt.get_model_config(chunk).grad_scale_func = None
        self.model, self.optimizer = [], None
        gc.collect()
