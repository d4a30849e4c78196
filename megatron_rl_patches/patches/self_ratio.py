"""The first training step after scoring is compared with the scores, which have the same weights.

What is compared, and what is reported, is in :mod:`..frameworks.self_ratio` and :mod:`..reentry.self_ratio`.

Not patched: value and supervised losses, and custom losses, which need no old log-probs or have their own;
NeMo-RL, Megatron-LM and Megatron-Bridge.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ..engine.patch import Patch
from ..errors import PatchError
from ..frameworks import SLIME_LOSSES, megatron_utils, miles_losses, own_options

_ADAPTERS = ".frameworks.self_ratio"
_VERL = "verl.workers.engine_workers"


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
            raise PatchError(
                f"self_ratio_limit is {self.self_ratio_limit}; expected a number of nats above 0"
            )


# --- sites

patch = Patch(
    name="self-ratio",
    summary="the first training step is compared with log-probs that were scored with the same weights",
    upstream=("NVIDIA/Megatron-LM#2370", "NVIDIA/Megatron-LM#7169", "alibaba/ROLL#284"),
    options=SelfRatioOptions,
    last=True,  # lean-loss replaces get_log_probs_and_entropy, unless something wraps it already
)

for _modules, _name, _parameters in (
    (megatron_utils("model"), "train_one_step", ("args", "step_id", "model")),
    ([*SLIME_LOSSES, *miles_losses("losses")], "policy_loss_function", ("batch", "sum_of_sample_mean")),
    ([*SLIME_LOSSES, *miles_losses("logit_processors")], "get_log_probs_and_entropy", ()),
    (_VERL, "TrainingWorker.infer_batch", ("data",)),
    (_VERL, "TrainingWorker.train_batch", ()),
    ("verl.trainer.ppo.core_algos", "get_policy_loss_fn", ()),
):
    patch.wrap(
        _modules,
        _name,
        f"{_ADAPTERS}:{'verl_' * ('verl' in _modules[:4])}{_name.rpartition('.')[2]}",
        parameters=_parameters,
        detail=partial(own_options.get, "self-ratio", "") if "train" in _name else None,
    )
