"""What frameworks take besides a model (arguments, a scheduler, batches, a disk), and how each is called.

Every :class:`Job` is a tiny GPT on real megatron-core with overlapped communication, driven through the
functions of one framework, a stand-in or the real one. Import this on ranks only, inside ``cpu_backend()``,
with the framework on the path.
"""

import copy
import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import num_microbatches_calculator
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import get_model_config
from megatron.training import checkpointing, global_vars

from megatron_rl_patches.testing import TinyModel, tiny_models
from tests.frameworks.loss_jobs import Arguments, call
from tests.references import tiny_gpt
from tests.references.live_bytes import reachable_bytes

MICROBATCHES = 2  # per step
SAMPLES = MICROBATCHES * tiny_gpt.BATCH  # per step and replica
ROLLOUTS = 1000
OVERLAP = ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")
ITERATION = 7  # of checkpoints
CONSUMED = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
WEIGHTS = Path(f"iter_{ITERATION:07d}", "mp_rank_00", "model_optim_rng.pt")


def arguments(**values: Any) -> Arguments:
    """Arguments of a framework and of Megatron-LM, for the tiny model."""
    defaults = {
        **dict.fromkeys(OVERLAP, True),
        **dict.fromkeys(("bf16", "finetune", "no_load_optim", "no_load_rng"), False),
        **dict.fromkeys(CONSUMED, 0),
        "ddp_bucket_size": tiny_models.BUCKET,
        "hidden_size": tiny_gpt.HIDDEN,
        "seq_length": tiny_gpt.SEQUENCE,
        "micro_batch_size": tiny_gpt.BATCH,
        "global_batch_size": SAMPLES,
        "num_rollout": ROLLOUTS,
        "qkv_format": "thd",
        "entropy_coef": 0.0,
        "opd_beta": 0.5,
        "forward_step_func": tiny_gpt.forward_step,
        "lr": 5e-3,
        "min_lr": 0.0,
        "timing_log_level": 0,
    }
    return Arguments(**{**defaults, **values})


def train_rollout(module: ModuleType, state: Sequence[Any], iterator: Any, steps: int, samples: int) -> Any:
    """One call of ``train`` of slime, vime or miles, with ``(model, optimizer, scheduler)``."""
    model, optimizer, scheduler = state
    return call(
        module.train,
        rollout_id=0,
        model=model,
        optimizer=optimizer,
        opt_param_scheduler=scheduler,
        data_iterator=[iterator],
        num_microbatches=[MICROBATCHES] * steps,
        global_batch_sizes=[samples] * steps,
        num_rollouts=[samples] * steps,
        witness_info=None,
        attempt=0,
    )


class Batches(tiny_gpt.SyntheticData):
    def seek(self, number: int) -> None:
        self._microbatch = number

    def reset(self) -> None:
        """Called by slime and miles at the beginning of a rollout: here the stream just goes on."""


class Disk:
    """Takes checkpoints, and notes whether the forward pre-hooks were on while saving."""

    def __init__(self) -> None:
        self.checksums: list[str] = []
        self.hooks_were_on: list[bool] = []

    def write(self, iteration: int, model: Sequence[Any], *unused: Any, **unused_too: Any) -> None:
        self.hooks_were_on.append(hooks_are_on(model))
        self.checksums.append(tiny_gpt.checksum(model, SimpleNamespace(param_groups=())))


def hooks_are_on(model: Sequence[Any]) -> bool:
    [on] = {bool(chunk.remove_forward_pre_hook_handles) for chunk in model}
    return on


def scheduler_for(optimizer: Any, args: Any) -> OptimizerParamScheduler:
    """A learning rate that changes with every step, so that a step too many or too few shows."""
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = args.lr, args.min_lr
    steps = args.num_rollout * args.global_batch_size
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=0,
        lr_decay_steps=steps,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=True,
    )


class Job:
    """A model under training through one framework; subclasses call the framework's functions.

    Attributes:
        homes: modules that hold what is patched, the defining one first; the last one is called.
        patched: names of what is patched there.
    """

    homes: tuple[str, ...]
    patched: tuple[str, ...] = ("train", "save")

    def __init__(self, **options: Any) -> None:
        self.options = TinyModel(**options)
        self.batches = Batches()
        self.iterator = RerunDataIterator(self.batches)  # of loops that Megatron may run again
        self.disk = Disk()
        self.steps = 0
        self.module = importlib.import_module(self.homes[-1])
        self.args: Any = arguments(
            **{name: getattr(self.options, name) for name in OVERLAP},
            align_grad_reduce=True,
            manual_gc=True,
            num_rollout=250,
            num_microbatches=MICROBATCHES,
            timing_log_level=2,
            disk=self.disk,
        )
        self.state = self.model, self.optimizer, self.scheduler = self._setup()
        self.config = get_model_config(self.model[0])

    def train(self, steps: int = 2) -> Any:
        """One call of the framework's ``train``; ``self.steps`` counts the steps of calls that ended well."""
        result = self._train(steps)
        self.steps += steps
        return result

    def resume(self, steps_done: int) -> None:
        """After a call that broke off in step ``steps_done``: give it the batches of that step again."""
        self.steps = steps_done
        self.batches.seek(steps_done * MICROBATCHES)

    def checksum(self) -> str:
        return tiny_gpt.checksum(self.model, self.optimizer)

    @classmethod
    def functions(cls) -> dict[str, tuple[ModuleType, ...]]:
        """Return the modules that hold a function by its name."""
        return dict.fromkeys(cls.patched, tuple(map(importlib.import_module, cls.homes)))

    def _setup(self) -> tuple[Any, Any, Any]:
        """Build the model, its optimizer and scheduler, and install the arguments."""
        model, optimizer = self.options.build()
        global_vars.set_global_variables(self.args)
        return model, optimizer, scheduler_for(optimizer, self.args)

    def _train(self, steps: int) -> Any:
        raise NotImplementedError


class RolloutJob(Job):
    """slime, vime and miles. The actors of the stand-ins hold copies of the functions."""

    def save(self) -> None:
        self.module.save(self.steps, *self.state)

    def _train(self, steps: int) -> Any:
        return train_rollout(
            self.module, self.state, self._rollout(steps), steps, self.args.global_batch_size
        )

    def _rollout(self, steps: int) -> Any:
        return self.batches


class SlimeJob(RolloutJob):
    homes = ("slime.backends.megatron_utils.model", "slime.backends.megatron_utils.actor")


class MegatronJob(Job):
    """Megatron-LM: ``train`` counts iterations in ``args``, which its caller keeps up to date."""

    homes = ("megatron.training.training",)
    patched = ("train", "save_checkpoint_and_time")

    def save(self) -> None:
        self.module.save_checkpoint_and_time(self.steps, *self.state, 0.0, checkpointing_context=None)

    def _train(self, steps: int) -> Any:
        self.args.iteration, self.args.train_iters = self.steps, self.steps + steps
        iterators = self.iterator, self.iterator
        return self.module.train(tiny_gpt.forward_step, *self.state, *iterators, None, self.config, {}, None)


class BridgeJob(Job):
    """Megatron-Bridge: everything hangs on a global state, which its caller keeps up to date."""

    homes = ("megatron.bridge.training.train",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        cfg = SimpleNamespace(model=self.config, ddp=self.model[0].ddp_config, train=self.args)
        state = {"timers": global_vars.get_timers(), "train_state": SimpleNamespace(step=0)}
        self.global_state = SimpleNamespace(cfg=cfg, **state)

    def pretrain(self, steps: int) -> None:
        setup = importlib.import_module("megatron.bridge.training.setup")
        ddp_config = self.model[0].ddp_config
        setup._update_model_config_funcs(self.model, self.config, ddp_config, self.optimizer)
        self._train(steps)

    def _train(self, steps: int) -> None:
        self.args.train_iters = self.global_state.train_state.step + steps
        iterators = self.iterator, None
        self.module.train(tiny_gpt.forward_step, *self.state, *iterators, self.global_state, None, None)


JOBS: dict[str, type[Job]] = {"slime": SlimeJob, "megatron.training": MegatronJob}


# --- models by role, and what a teacher costs


def provider(pre_process: bool = True, post_process: bool = True, **unused: Any) -> torch.nn.Module:
    """Draws its weights from the global generators, as real providers do; each model has a config."""
    args = global_vars.get_args()
    return TinyModel(bf16=args.bf16).provider()


def global_arguments(**values: Any) -> Arguments:
    args = arguments(**{"load": None, "model_provider": provider, **values})
    global_vars.set_global_variables(args)
    return args


def process(seed: int = 1234) -> None:
    """What a framework has initialized before it builds a model."""
    TinyModel(seed=seed).initialize()
    torch.manual_seed(seed)
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    # A global batch that grows with the samples consumed: 2, 4, ... 8.
    num_microbatches_calculator.init_num_microbatches_calculator(0, [2, 2, 64], 8, tiny_gpt.BATCH, 1)


def train(state: Sequence[Any], steps: int, batches: Batches) -> None:
    """One call of slime's ``train`` with ``(model, optimizer, scheduler)``."""
    train_rollout(slime_model(), state, batches, steps, SAMPLES)


def slime_model() -> ModuleType:
    return importlib.import_module("slime.backends.megatron_utils.model")


def checkpoints(folder: Path) -> tuple[str, str]:
    """Of a former policy and of a teacher, at the iteration, as the stand-in of Megatron-LM loads them."""
    for seed, name in ((5, "policy"), (6, "teacher")):
        process(seed)
        [chunk], _, scheduler = slime_model().setup_model_and_optimizer(global_arguments())
        consumed = ITERATION * SAMPLES
        state_dict = {
            "checkpoint_version": 3.0,
            "args": dict(zip(CONSUMED, (consumed, 1, 2), strict=True)),
            "model": chunk.module.state_dict(),
            "opt_param_scheduler": scheduler.state_dict() | {"num_steps": consumed},
            "rng_state": torch.Generator().manual_seed(99).get_state(),
        }
        (folder / name / WEIGHTS).parent.mkdir(parents=True)
        torch.save(state_dict, folder / name / WEIGHTS)
        (folder / name / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    process()
    return str(folder / "policy"), str(folder / "teacher")


def build_teacher(initialize: Callable[..., Any], args: Any, role: str) -> Any:
    """Build a patched framework's teacher: it costs its weights, is frozen, and leaves no trace."""
    before, bytes_before = globals_of(args), reachable_bytes()
    [chunk], *rest = initialize(args, role)
    assert rest == [None, None, ITERATION]
    weights = sum(parameter.nbytes for parameter in chunk.parameters())
    assert reachable_bytes() - bytes_before == pytest.approx(weights, rel=0.01)
    assert globals_of(args) == before
    assert not chunk.training and not any(p.requires_grad for p in chunk.parameters())
    return chunk


def has_weights(chunk: Any, state_dict: Mapping[str, Any]) -> bool:
    weights = ((name, value) for name, value in chunk.state_dict().items() if torch.is_tensor(value))
    return all(torch.equal(value, state_dict[name]) for name, value in weights)


def globals_of(args: Any) -> dict[str, Any]:
    """All that building and loading a second model must leave alone, as comparable values."""
    return copy.deepcopy(
        {
            "arguments": {name: value for name, value in vars(args).items() if name != "model_type"},
            "random": random.getstate(),
            "torch": torch.get_rng_state().tolist(),
            "tracker": {name: s.tolist() for name, s in get_cuda_rng_tracker().get_states().items()},
            "global batch": num_microbatches_calculator.get_current_global_batch_size(),
            "rerun": get_rerun_state_machine().state.name,
            "checkpoint version": checkpointing._CHECKPOINT_VERSION,
        }
    )
