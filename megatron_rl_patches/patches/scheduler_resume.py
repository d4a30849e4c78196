"""After a resume the learning-rate schedule is at the step that the checkpoint says, not at twice that.

============  ====================================  =====================================  ===================
framework     function                              what runs around it                     left alone when
============  ====================================  =====================================  ===================
slime, miles  ``initialize_model_and_optimizer``    the step of loading is set at its end  it does not advance
                                                                                           the scheduler
slime, miles  ``load_checkpoint``                   that step is recorded
============  ====================================  =====================================  ===================

vime has slime's modules under its own name, and OpenClaw-RL vendors slime under slime's. The code around the
functions is in :mod:`..frameworks.resumed_scheduler`.

Not patched: Megatron-LM, which does not advance the schedule after loading it, and frameworks with the
opposite fault, which never restore a schedule that was saved.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from ..engine.spec import Patch
from ..frameworks import WITH_MEGATRON_UTILS
from ..frameworks.arguments import bind

if TYPE_CHECKING:
    from ..engine.target_source import TargetSource


def _leaves_the_schedule_alone(target: TargetSource) -> str | None:
    """Return why the site is left alone; ``None`` if it has the fault, ``opt_param_scheduler.step(...)``."""
    assert target.function is not None
    advances = any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "step"
        and isinstance(node.func.value, ast.Name)
        and "scheduler" in node.func.value.id
        for node in ast.walk(target.function)
    )
    return None if advances else "it does not advance the scheduler after loading"


def _initialize(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..frameworks.resumed_scheduler import keep_loaded_step

    with keep_loaded_step():
        return wrapped(*args, **kwargs)


def _load_checkpoint(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..frameworks.resumed_scheduler import record_loaded_step

    result = wrapped(*args, **kwargs)
    record_loaded_step(bind(wrapped, args, kwargs).arguments.get("opt_param_scheduler"))
    return result


patch = Patch(
    name="scheduler-resume",
    summary="the learning-rate schedule goes on where the checkpoint left it, not at twice that step",
    upstream=("THUDM/slime#1546", "THUDM/slime#1761", "THUDM/slime#1775", "radixark/miles#1627"),
)

for _framework in WITH_MEGATRON_UTILS:
    patch.wrap(
        f"{_framework}.backends.megatron_utils.model",
        "initialize_model_and_optimizer",
        skip_if=_leaves_the_schedule_alone,
    )(_initialize)
    patch.wrap(
        f"{_framework}.backends.megatron_utils.checkpoint",
        "load_checkpoint",
        parameters=("opt_param_scheduler",),
    )(_load_checkpoint)
