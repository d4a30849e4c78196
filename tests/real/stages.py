"""Where a training step can break off; importable where Megatron is not."""

from __future__ import annotations

#: Stages before the optimizer's update: a retry of the step gives what an undisturbed run gives.
BEFORE_UPDATE = ("before forward", "forward 0", "forward 1", "backward 0", "backward 1", "before step")
#: The update is half done: only equality across ranks is defined.
IN_STEP = ("in step",)
#: The step is done: training goes on with the next one.
AFTER_UPDATE = ("after step",)
STAGES = BEFORE_UPDATE + IN_STEP + AFTER_UPDATE
#: Steps done by calls before, and step of the failing call: the very first batch, a first step, a later one.
PLACES = {"first batch": (0, 0), "first step": (1, 0), "later step": (1, 1)}


def steps_done(stage: str, failing_step: int) -> int:
    """Return how many steps a call had done when a fault ended it."""
    return failing_step + (stage in AFTER_UPDATE + IN_STEP)
