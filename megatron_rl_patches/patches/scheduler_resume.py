"""After a resume the learning-rate schedule is at the step that the checkpoint says, not at twice that.

Not patched: Megatron-LM, which loads the schedule and leaves it at that, and hosts in which a schedule that
was saved is never restored: the opposite fault.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from ..engine.arguments import bind
from ..engine.spec import Patch

if TYPE_CHECKING:
    from ..engine.facts import Facts


def _leaves_the_schedule_alone(facts: Facts) -> str | None:
    """``opt_param_scheduler.step(...)`` after loading is the fault."""
    assert facts.function is not None
    advances = any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "step"
        and isinstance(node.func.value, ast.Name)
        and "scheduler" in node.func.value.id
        for node in ast.walk(facts.function)
    )
    return None if advances else "it does not advance the scheduler after loading"


def _initialize(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..reentry.resumed_scheduler import as_loaded

    with as_loaded():
        return wrapped(*args, **kwargs)


def _load_checkpoint(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..reentry.resumed_scheduler import note_loaded

    result = wrapped(*args, **kwargs)
    note_loaded(bind(wrapped, args, kwargs).arguments.get("opt_param_scheduler"))
    return result


patch = Patch(
    name="scheduler-resume",
    summary="the learning-rate schedule goes on where the checkpoint left it, not at twice that step",
    upstream=("THUDM/slime#1546", "THUDM/slime#1761", "THUDM/slime#1775", "radixark/miles#1627"),
)

for _host in ("slime", "miles"):  # OpenClaw-RL vendors slime under its own name
    patch.wrap(
        f"{_host}.backends.megatron_utils.model",
        "initialize_model_and_optimizer",
        not_needed=_leaves_the_schedule_alone,
    )(_initialize)
    # Looks on, and changes nothing of its own; alone it is without effect.
    patch.wrap(
        f"{_host}.backends.megatron_utils.checkpoint", "load_checkpoint", uses=("opt_param_scheduler",)
    )(_load_checkpoint)
