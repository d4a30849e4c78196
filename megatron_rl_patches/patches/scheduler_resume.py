"""After a resume the learning-rate schedule is at the step that the checkpoint says, not at twice that.

What is around each function is in :mod:`..frameworks.optimizer_steps`.

Not patched: Megatron-LM, which does not advance the schedule after loading it, and frameworks with the
opposite fault, which never restore a schedule that was saved.
"""

from __future__ import annotations

from ..engine.patch import Patch
from ..engine.target_source import TargetSource
from ..frameworks import megatron_utils


def _leaves_the_schedule_alone(target: TargetSource) -> str | None:
    advances = any("scheduler" in call.function for call in target.calls("step"))
    return None if advances else "it does not advance the scheduler after loading"


patch = Patch(
    name="scheduler-resume",
    summary="after a resume, the learning rate continues where the checkpoint left it",
    upstream=("THUDM/slime#1546", "THUDM/slime#1761", "THUDM/slime#1775", "radixark/miles#1627"),
)

patch.wrap(
    megatron_utils("model"),
    "initialize_model_and_optimizer",
    ".frameworks.optimizer_steps:initialize_model_and_optimizer",
    skip_if=_leaves_the_schedule_alone,
)
patch.wrap(
    megatron_utils("checkpoint"),
    "load_checkpoint",
    ".frameworks.optimizer_steps:load_checkpoint",
    parameters=("opt_param_scheduler",),
    helps=("initialize_model_and_optimizer",),
)
