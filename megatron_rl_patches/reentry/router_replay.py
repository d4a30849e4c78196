"""megatron-core's router replay, kept to one model and to one step.

``RouterReplay`` lists the routers of a whole process, and queues the experts of each forward pass for a
recomputation in backward, whether one follows or not. These functions work on the routers of a model. A model
without them costs one look at its config.
"""

from __future__ import annotations

import weakref
from typing import Any

from ..common.chunks import as_chunks, distinct_configs
from ..errors import InvalidInputError

#: Attributes of a router's replay: its routes, which the pass that used them has marked, and those in the
#: queue that no backward pass will read unless a training pass shares them.
_MARKED = "_marked_routes"
_UNCLAIMED = "_unclaimed_routes"
#: Chunks whose routers are being cleared. A second Ctrl-C may interrupt that.
_unfinished: weakref.WeakSet[Any] = weakref.WeakSet()


def routers(model: Any) -> list[Any]:
    """Return the ``RouterReplay`` of each router of one or several chunks, in the order of their layers."""
    chunks = as_chunks(model)
    if not any(getattr(config, "moe_enable_routing_replay", False) for config in distinct_configs(chunks)):
        return []
    modules = (module for chunk in chunks for module in chunk.modules())
    return [module.router_replay for module in modules if getattr(module, "router_replay", None) is not None]


def leave_out(model: Any) -> None:
    """Take the model's routers off the list of the process: that of a policy goes on without a teacher's."""
    for replay in routers(model):
        remove(replay)


def replay_class() -> Any:
    """Return the class of routers' replays; ``None`` in releases of megatron-core that have none."""
    try:
        from megatron.core.transformer.moe.router_replay import RouterReplay
    except ImportError:
        return None
    return RouterReplay


def remove_with(router: Any) -> None:
    """Take the router's replay off the list of the process when the router is deleted."""
    if (replay := getattr(router, "router_replay", None)) is not None:
        weakref.finalize(router, remove, replay).atexit = False


def clear(model: Any) -> None:
    """Forget actions, targets, queues and records of the model's routers."""
    if not (replays := routers(model)):
        return
    chunks = as_chunks(model)
    _unfinished.update(chunks)
    for replay in replays:
        replay.clear_indices()
        replay.clear_router_replay_action()
        vars(replay).update({_MARKED: None, _UNCLAIMED: None})
    _unfinished.difference_update(chunks)


def finish_clearing(model: Any) -> None:
    """Clear the chunks whose clearing was interrupted; others may have routes for the next step by now."""
    clear([chunk for chunk in as_chunks(model) if chunk in _unfinished])


def is_recomputed(block: Any) -> bool:
    """Return whether the block runs in a recomputation, which takes its routes off the queue."""
    import torch

    actions = [getattr(replay.router_replay_action, "name", "") for replay in routers(block)]
    return torch.is_grad_enabled() and "REPLAY_BACKWARD" in actions


def end_forward(block: Any, failed: bool = False) -> None:
    """Note who has used the routes of a forward pass, and drop routes that no backward pass will read.

    Routes of a pass without gradients stay in the queue, since a training pass may share them, until a pass
    has used others. The same holds for a pass that failed, which may be tried again. The ``block`` has just
    run, and is no part of a recomputed one: there gradients are off, too, so a router cannot tell.
    """
    if not getattr(block.config, "moe_enable_routing_replay", False):
        return
    import torch

    for replay in routers(block):
        target = replay.target_topk_idx
        if target is None or getattr(replay.router_replay_action, "name", "") != "REPLAY_FORWARD":
            continue
        if target is not getattr(replay, _MARKED, None):
            # Routes that nobody will read leave the queues; newer ones follow them.
            unclaimed, older = getattr(replay, _UNCLAIMED, None), replay.replay_backward_list[:-1]
            places = [place for place, routes in enumerate(older) if routes is unclaimed is not None]
            for queue in _queues(replay) if places else ():
                del queue[places[-1]]
            setattr(replay, _UNCLAIMED, target)
            # An alias is the mark, so that the same tensor can be set again. Backward cannot use one that was
            # made in inference mode.
            with torch.inference_mode(False):
                replay.target_topk_idx = target.detach()
            setattr(replay, _MARKED, replay.target_topk_idx)
        if torch.is_grad_enabled() and not failed:
            setattr(replay, _UNCLAIMED, None)


def end_step(model: Any, forward_only: bool = False) -> None:
    """Empty the queues of backward: after the last backward pass of a step nothing will be recomputed.

    If no backward pass has run (``forward_only``), routes stay that a block has marked.
    """
    for replay in routers(model):
        if forward_only and replay.target_topk_idx is getattr(replay, _MARKED, None):
            continue
        setattr(replay, _UNCLAIMED, None)
        for queue in _queues(replay):
            queue.clear()


def check_not_fused(config: Any) -> None:
    """Raise :class:`InvalidInputError` for a fused router with a replay, which it would silently ignore."""
    if getattr(config, "moe_router_fusion", False) and getattr(config, "moe_enable_routing_replay", False):
        raise InvalidInputError(
            "moe_router_fusion=True with moe_enable_routing_replay=True: the fused router chooses experts "
            "itself and never looks at those that are replayed. Set moe_router_fusion=False "
            "(leave out --moe-router-fusion)"
        )


def remove(replay: Any) -> None:
    """Take a router's replay off the list of the process."""
    # In place, since the list is an attribute of the class that others may hold.
    listed = type(replay).global_router_replay_instances
    listed[:] = [other for other in listed if other is not replay]


def _queues(replay: Any) -> list[list[Any]]:
    """Return the queue of experts, and those of the same length that a subclass has."""
    return [value for name, value in vars(replay).items() if name.startswith("replay_backward_")]
