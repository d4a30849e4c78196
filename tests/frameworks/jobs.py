"""What frameworks take besides a model (arguments, a scheduler, batches, a disk), and how each is called.

Every :class:`Job` is a tiny GPT on real megatron-core with overlapped communication, driven through the
functions of one stand-in. Import it on ranks only, inside ``cpu_backend()``, with the stand-ins on the path.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_model_config
from megatron.training.global_vars import get_timers, set_global_variables

from megatron_rl_patches.testing import TinyModel
from tests.references import tiny_gpt

MICROBATCHES = 2  # per step


class BrokenBatch(Exception):
    """What a data loader, a reward or a loss function raises in the middle of a step."""


class Batches(tiny_gpt.SyntheticData):
    """An endless stream of batches that raises on request."""

    _error: Exception | None = None
    _break_at = -1

    def break_with(self, error: Exception, at: int) -> None:
        """Raise ``error``, once, in place of batch number ``at``."""
        self._error, self._break_at = error, at

    def seek(self, number: int) -> None:
        self._microbatch = number

    def reset(self) -> None:
        """Called by slime and miles at the beginning of a rollout: here the stream just goes on."""

    def __next__(self) -> dict[str, torch.Tensor]:
        if self._error is not None and self._microbatch == self._break_at:
            error, self._error = self._error, None
            raise error
        return super().__next__()


class Disk:
    """Takes checkpoints, and notes whether the forward pre-hooks were on while saving."""

    def __init__(self, model: Sequence[Any]) -> None:
        self.checksums: list[str] = []
        self.hooks_were_on: list[bool] = []
        self._model = model

    def write(self, iteration: int, parameters: Sequence[torch.Tensor]) -> None:
        self.hooks_were_on.append(hooks_are_on(self._model))
        digest = hashlib.sha256()
        for parameter in parameters:
            digest.update(parameter.contiguous().view(torch.uint8).numpy().tobytes())
        self.checksums.append(digest.hexdigest())


def hooks_are_on(model: Sequence[Any]) -> bool:
    [on] = {bool(chunk.remove_forward_pre_hook_handles) for chunk in model}
    return on


def scheduler_for(optimizer: Any) -> OptimizerParamScheduler:
    """A learning rate that changes with every step, so that a step too many or too few shows."""
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = 5e-3, 1e-3
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=5e-3,
        min_lr=1e-3,
        lr_warmup_steps=0,
        lr_decay_steps=1000,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1000,
        wd_incr_style="constant",
    )


class Job:
    """A model under training through one framework; subclasses call the framework's functions.

    Attributes:
        homes: modules that hold what is patched, the defining one first.
        patched: names of what is patched there.
    """

    homes: tuple[str, ...]
    patched: tuple[str, ...] = ("train", "save")

    def __init__(self, **options: Any) -> None:
        self.options = TinyModel(**options)
        self.model, self.optimizer = self.options.build()
        self.scheduler = scheduler_for(self.optimizer)
        self.config = get_model_config(self.model[0])
        self.batches = Batches()
        self.disk = Disk(self.model)
        self.steps = 0
        self.args: Any = SimpleNamespace(
            overlap_grad_reduce=self.options.overlap_grad_reduce,
            overlap_param_gather=self.options.overlap_param_gather,
            use_distributed_optimizer=self.options.use_distributed_optimizer,
            align_grad_reduce=True,
            align_param_gather=False,
            manual_gc=True,
            seq_length=tiny_gpt.SEQUENCE,
            micro_batch_size=tiny_gpt.BATCH,
            num_microbatches=MICROBATCHES,
            timing_log_level=2,
            forward_step_func=tiny_gpt.forward_step,
            eval_interval=0,
            save_interval=0,
            disk=self.disk,
        )
        self._set_global_variables()

    def train(self, steps: int = 2) -> Any:
        """One call of the framework's ``train``; ``self.steps`` counts the steps of calls that ended well."""
        result = self._train(steps)
        self.steps += steps
        return result

    def resume(self, steps_done: int) -> None:
        """After a call that broke off in step ``steps_done``: give it the batches of that step again."""
        self.steps = steps_done
        self.batches.seek(steps_done * MICROBATCHES)

    def save(self) -> None:
        raise NotImplementedError

    @property
    def hooks_on(self) -> bool:
        return hooks_are_on(self.model)

    def checksum(self) -> str:
        return tiny_gpt.checksum(self.model, self.optimizer)

    @classmethod
    def functions(cls) -> dict[str, tuple[ModuleType, ...]]:
        """Return the modules that hold a function by its name."""
        return dict.fromkeys(cls.patched, tuple(map(importlib.import_module, cls.homes)))

    def _set_global_variables(self) -> None:
        set_global_variables(self.args)

    def _train(self, steps: int) -> Any:
        raise NotImplementedError


class _ActorJob(Job):
    """slime and miles: through the actor, which holds copies of the functions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        actor = importlib.import_module(self.homes[1])
        self.actor = actor.MegatronTrainRayActor(self.args, self.model, self.optimizer, self.scheduler)

    def save(self) -> None:
        self.actor.save_model(self.steps)

    def _train(self, steps: int) -> Any:
        return self.actor.train(0, [self.batches], [MICROBATCHES] * steps)


class SlimeJob(_ActorJob):
    homes = ("slime.backends.megatron_utils.model", "slime.backends.megatron_utils.actor")


class MilesJob(_ActorJob):
    homes = ("miles.backends.megatron_utils.model", "miles.backends.megatron_utils.actor")


class MegatronJob(Job):
    """Megatron-LM: ``train`` counts iterations in ``args``, which its caller keeps up to date."""

    homes = ("megatron.training.training",)
    patched = ("train", "save_checkpoint_and_time")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        [self.training] = map(importlib.import_module, self.homes)
        self.iterator = RerunDataIterator(self.batches)

    @property
    def timers_running(self) -> list[str]:
        return [name for name, timer in get_timers()._timers.items() if timer._started]

    def save(self) -> None:
        self.training.save_checkpoint_and_time(
            self.steps, self.model, self.optimizer, self.scheduler, 0.0, checkpointing_context=None
        )

    def _train(self, steps: int) -> Any:
        self.args.iteration, self.args.train_iters = self.steps, self.steps + steps
        state = self.model, self.optimizer, self.scheduler
        iterators = self.iterator, self.iterator
        return self.training.train(tiny_gpt.forward_step, *state, *iterators, None, self.config, {}, None)


class BridgeJob(Job):
    """Megatron-Bridge: everything hangs on a global state, which its caller keeps up to date."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.iterator = RerunDataIterator(self.batches)
        self.state = SimpleNamespace(
            cfg=SimpleNamespace(
                model=self.config,
                ddp=self.model[0].ddp_config,
                train=self.args,
            ),
            timers=get_timers(),
            train_state=SimpleNamespace(step=0),
        )

    def pretrain(self, steps: int) -> None:
        """Setup and training."""
        setup = importlib.import_module("megatron.bridge.training.setup")
        ddp_config = self.model[0].ddp_config
        setup._update_model_config_funcs(self.model, self.config, ddp_config, self.optimizer)
        self._train(steps)

    def _train(self, steps: int) -> None:
        self.args.train_iters = self.state.train_state.step + steps
        train = importlib.import_module("megatron.bridge.training.train")
        state = self.model, self.optimizer, self.scheduler
        train.train(tiny_gpt.forward_step, *state, self.iterator, None, self.state, None, None)


JOBS: dict[str, type[Job]] = {
    "slime": SlimeJob,
    "miles": MilesJob,
    "megatron.training": MegatronJob,
}
