"""A host's own function, told to build a model that only scores.

Hosts build every model alike: DDP, its gradient buffers, Adam. Inside :func:`building`, Megatron's
``get_model`` leaves out DDP and the factories leave out optimizer and scheduler; what the patch
``inference-only`` puts around those functions asks here what to do. All else follows from a ``get_model``
that really did without DDP: a host that builds in some other way is left to build as ever.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from .builder import freeze, without_training
from .global_state import preserved_rng
from .untrainable import refuse_to_train, refuse_training

_log = logging.getLogger("megatron_rl_patches")
_scope: ContextVar[Scope | None] = ContextVar("inference_only_scope", default=None)

SETTING = "Settings.inference_roles (MEGATRON_RL_PATCHES_INFERENCE_ROLES)"
# Arguments and parameters that say that the wrapper holds the parameters themselves, in shards.
_SHARDED = ("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")


@dataclass
class Scope:
    """One model in the making.

    Attributes:
        role: whose it is, in the host's words.
        built: ``get_model`` has made it without DDP, so nothing else of training is wanted either.
        when_built: called at that moment.
        why_not: why ``get_model`` was left alone.
    """

    role: str
    built: bool = False
    when_built: Callable[[], None] | None = None
    why_not: str = "megatron.training.training.get_model was not called; status() tells whether it is patched"


@contextmanager
def building(role: str, when_built: Callable[[], None] | None = None) -> Iterator[Scope]:
    """Until the end of the block, this thread builds the model of a role that only scores."""
    token = _scope.set(scope := Scope(role, when_built=when_built))
    try:
        yield scope
    finally:
        _scope.reset(token)


def initialize(
    build: Callable[[], tuple[Any, Any, Any, int]], role: str, when_built: Callable[[], None] | None = None
) -> tuple[Any, Any, Any, int]:
    """The host's ``initialize_model_and_optimizer`` for a role that only scores.

    Args:
        build: the host's function; gives model chunks, optimizer, scheduler, iteration.
        role: its role.
        when_built: called once the model is there, to have the host skip what it would do for training.

    Returns:
        ``(model, None, None, iteration)``, with the chunks frozen (:func:`retire`); with a warning, what the
        host returns, if it built the model in a way that could not be intercepted.
    """
    with building(role, when_built) as scope, preserved_rng():
        model, optimizer, scheduler, iteration = build()
    if not scope.built:
        _log.warning("the model of role %r was built for training, as ever: %s", role, scope.why_not)
        return model, optimizer, scheduler, iteration
    retire(model, role)
    return model, None, None, iteration


def retire(model: Sequence[torch.nn.Module], role: str, setting: str = SETTING) -> None:
    """Freeze chunks that have no DDP, give them a config of their own, and have them refuse to train.

    Args:
        model: chunks as ``get_model(..., wrap_with_ddp=False)`` returns them.
        role: what errors call it.
        setting: what errors say made it so.
    """
    _give_own_config(model)
    freeze(model)
    refuse_training(model, role, setting)


def _give_own_config(model: Sequence[torch.nn.Module]) -> None:
    """On a policy's config this model would run inside the policy's ``no_sync``."""
    copies: dict[int, tuple[Any, Any]] = {}
    for module in (module for chunk in model for module in chunk.modules()):
        config = vars(module).get("config")
        if hasattr(config, "no_sync_func"):
            if id(config) not in copies:
                copies[id(config)] = config, without_training(config)
            module.config = copies[id(config)][1]


# --- what stands around Megatron's functions


def get_model(
    build: Callable[..., Any], arguments: inspect.BoundArguments, args: Any = None
) -> Sequence[torch.nn.Module]:
    """``get_model``, without DDP where the model only scores; an explicit ``wrap_with_ddp`` is obeyed.

    Args:
        build: a ``get_model`` that takes ``wrap_with_ddp``.
        arguments: what it is called with.
        args: Megatron's global arguments, if they have a say in how chunks are wrapped.
    """
    scope = _scope.get()
    if scope is not None and (scope_why_not := _why_wrapped(arguments, args)):
        scope.why_not = scope_why_not
    elif scope is not None:
        arguments.arguments["wrap_with_ddp"] = False
        scope.built = True
        if scope.when_built is not None:
            scope.when_built()
    model: Sequence[torch.nn.Module] = build(*arguments.args, **arguments.kwargs)
    return model


def _why_wrapped(arguments: inspect.BoundArguments, args: Any) -> str:
    given = arguments.arguments
    if given.get("wrap_with_ddp"):
        return "the host passes wrap_with_ddp itself"
    # Without the wrapper every rank would hold all the parameters.
    sharded = [name for name in _SHARDED if given.get(name) or getattr(args, name, None)]
    return f"its parameters are sharded ({', '.join(sharded)})" if sharded else ""


def optimizer(build: Callable[[], Any], model: Any) -> Any:
    """An optimizer factory: nothing to optimise where the model only scores.

    Raises:
        InferenceOnlyError: outside, for chunks that only score.
    """
    if is_built():
        return NullOptimizer()
    refuse_to_train(model, "get_megatron_optimizer")
    return build()


def scheduler(build: Callable[[], Any]) -> Any:
    """A scheduler factory: nothing to schedule where the model only scores."""
    return NullScheduler() if is_built() else build()


def is_building() -> bool:
    return _scope.get() is not None


def is_built() -> bool:
    """Is this inside :func:`building`, with the model there and without DDP?"""
    scope = _scope.get()
    return scope is not None and scope.built


class NullOptimizer:
    """What hosts do with an optimizer between making it and returning it, done to nothing."""

    is_stub_optimizer = True
    chained_optimizers: tuple[()] = ()
    param_groups: tuple[()] = ()

    def reload_model_params(self, *args: Any, **kwargs: Any) -> None: ...


class NullScheduler:
    """Likewise for a scheduler: OpenClaw-RL and miles advance it after loading."""

    num_steps = 0

    def step(self, increment: int = 0) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
