"""Where routes are replayed: in megatron-core, and in the frameworks' own managers of routes."""

from __future__ import annotations

import importlib
import os
from typing import Any

from ..common.scopes import replaced
from ..engine.call import Call
from ..reentry import router_replay

#: slime tells its routers by this variable whether they record or replay.
_STAGE = "ROUTING_REPLAY_STAGE"


def initialize_block(call: Call) -> Any:
    """Build a block of layers, unless its router would ignore the routes that are replayed."""
    router_replay.check_not_fused(call["config"])
    return call()


def initialize_router(call: Call) -> None:
    """Build a router whose replay is freed with it."""
    call()
    router_replay.remove_with(call.instance)


def forward(call: Call) -> Any:
    """Run a block of layers, and note whether a backward pass will need its routes.

    A stack in multi-token prediction would be recomputed as a whole, and inside of that layer by layer. Both
    would take routes off the queue, so the recomputation of the layers is left out.
    """
    block = call.instance
    is_inner = getattr(block, "is_mtp_layer", False) and router_replay.is_recomputed(block)
    failed = True
    try:
        with replaced(block, **({"training": False} if is_inner else {})):
            result = call()
        failed = False
    finally:
        router_replay.end_forward(block, failed)
    return result


def forward_backward(call: Call) -> Any:
    """Run the forward and backward passes of a step, which leave nothing for the next step."""
    try:
        return call()
    finally:
        router_replay.end_step(call["model"], bool(call.get("forward_only")))


def train_actor(call: Call) -> Any:
    """Train one rollout of slime, vime or miles, without routes of a rollout that broke off.

    They are cleared where that call ends, and again here, as another call may have recorded some since.
    """
    framework = type(call.instance).__module__.partition(".")[0]
    stage = os.environ.get(_STAGE)
    _clear_routes(framework)
    try:
        return call()
    except BaseException:
        _clear_routes(framework)
        if stage is not None:
            os.environ[_STAGE] = stage
        raise


def _clear_routes(framework: str) -> None:
    if framework == "miles":
        for manager in importlib.import_module("miles.utils.replay_base").all_replay_managers:
            manager.clear_all()
            manager.stage = "fallthrough"
    else:
        importlib.import_module(f"{framework}.utils.routing_replay").RoutingReplay.clear_all()


def verl_forward_backward_batch(call: Call) -> Any:
    """Run a batch of verl's engine, and clear routes and actions also where that raises."""
    try:
        return call()
    except BaseException:
        replay = importlib.import_module("verl.utils.megatron.router_replay_patch").RouterReplay
        replay.clear_global_indices()
        replay.clear_global_router_replay_action()
        raise
