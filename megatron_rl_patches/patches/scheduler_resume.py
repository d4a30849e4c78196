"""After a resume the learning-rate schedule is at the step that the checkpoint says, not at twice that.

============  ====================================  =====================================  ===================
framework     function                              what runs around it                     left alone when
============  ====================================  =====================================  ===================
slime, miles  ``initialize_model_and_optimizer``    the step of loading is set at its end  it does not advance
                                                                                           the scheduler
slime, miles  ``load_checkpoint``                   that step is recorded
============  ====================================  =====================================  ===================

vime has slime's modules under its own name, and OpenClaw-RL vendors slime under slime's. The code around the
functions is in :mod:`..frameworks.scheduler_resume`.

Not patched: Megatron-LM, which does not advance the schedule after loading it, and frameworks with the
opposite fault, which never restore a schedule that was saved.
"""

from __future__ import annotations

from ..engine.patch import Patch
from ..engine.target_source import TargetSource
from ..frameworks import WITH_MEGATRON_UTILS

_UTILS = [f"{framework}.backends.megatron_utils" for framework in WITH_MEGATRON_UTILS]


def _leaves_the_schedule_alone(target: TargetSource) -> str | None:
    """Return why the site is left alone; ``None`` if it has the fault, ``opt_param_scheduler.step(...)``."""
    advances = any("scheduler" in call.function for call in target.calls("step"))
    return None if advances else "it does not advance the scheduler after loading"


patch = Patch(
    name="scheduler-resume",
    summary="after a resume, the learning rate continues where the checkpoint left it",
    upstream=("THUDM/slime#1546", "THUDM/slime#1761", "THUDM/slime#1775", "radixark/miles#1627"),
)

patch.wrap(
    [f"{utils}.model" for utils in _UTILS],
    "initialize_model_and_optimizer",
    ".frameworks.scheduler_resume:initialize_model_and_optimizer",
    skip_if=_leaves_the_schedule_alone,
)
patch.wrap(
    [f"{utils}.checkpoint" for utils in _UTILS],
    "load_checkpoint",
    ".frameworks.scheduler_resume:load_checkpoint",
    parameters=("opt_param_scheduler",),
    helps=("initialize_model_and_optimizer",),
)
