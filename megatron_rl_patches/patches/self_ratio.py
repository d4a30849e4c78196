"""The first training step after scoring is compared with the scores, which have the same weights.

What is compared, and what is reported, is in :mod:`..frameworks.self_ratio` and :mod:`..reentry.self_ratio`.

Not patched: value and supervised losses, and custom losses, which need no old log-probs or have their own;
NeMo-RL, Megatron-LM and Megatron-Bridge.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ..engine.patch import Patch
from ..errors import PatchError
from ..frameworks import SLIME_LOSSES, megatron_utils, miles_losses, own_options


@dataclass(frozen=True)
class SelfRatioOptions:
    """Options of the patch.

    Attributes:
        self_ratio_limit: by how many nats the log-probs of a token may differ.
        self_ratio_every: compare the first step after each scoring, not only once per process.
        self_ratio_raises: end training with ``LogProbsDiffer`` after a step that is off.

    Raises:
        PatchError: the limit is not positive.
    """

    self_ratio_limit: float = 0.1
    self_ratio_every: bool = False
    self_ratio_raises: bool = False

    def __post_init__(self) -> None:
        if not self.self_ratio_limit > 0:
            raise PatchError(f"self_ratio_limit is {self.self_ratio_limit}; expected nats above 0")


# --- sites

patch = Patch(
    name="self-ratio",
    summary="the first training step is compared with log-probs that were scored with the same weights",
    upstream=("NVIDIA/Megatron-LM#2370", "NVIDIA/Megatron-LM#7169", "alibaba/ROLL#284"),
    options=SelfRatioOptions,
    last=True,  # lean-loss replaces get_log_probs_and_entropy, unless something wraps it already
)

_SHOWS: dict[str, Any] = {"detail": partial(own_options.get, "self-ratio", "")}
_WORKER = "verl.workers.engine_workers"
_STEPS = ("TrainingWorker.infer_batch", "TrainingWorker.train_batch")
_READ = ("batch", "sum_of_sample_mean")
for _modules, _name, _options in (
    (megatron_utils("model"), "train_one_step", {"parameters": ("args", "step_id", "model"), **_SHOWS}),
    ([*SLIME_LOSSES, *miles_losses("losses")], "policy_loss_function", {"parameters": _READ}),
    ([*SLIME_LOSSES, *miles_losses("logit_processors")], "get_log_probs_and_entropy", {}),
    (_WORKER, _STEPS[0], {"parameters": ("data",), "optional_module": True}),
    (_WORKER, _STEPS[1], {"optional_module": True, **_SHOWS}),
    ("verl.trainer.ppo.core_algos", "get_policy_loss_fn", {"helps": _STEPS}),
):
    patch.wrap(_modules, _name, f".frameworks.self_ratio:{_name.rpartition('.')[2]}", **_options)
