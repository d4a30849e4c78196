"""What frameworks need to build models by role: arguments, a provider, a checkpoint.

And what a teacher costs, in a stand-in or in a framework itself. Import it on ranks only, inside
``cpu_backend()``, with one of them on the path.
"""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    get_current_global_batch_size,
    init_num_microbatches_calculator,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.training import checkpointing, global_vars

from megatron_rl_patches.testing import TinyModel, tiny_models
from tests.frameworks.jobs import MICROBATCHES, Batches
from tests.frameworks.loss_jobs import Arguments
from tests.references import tiny_gpt
from tests.references.live_bytes import reachable_bytes

ITERATION, SAMPLES_PER_ITERATION, ROLLOUTS = 7, MICROBATCHES * tiny_gpt.BATCH, 1000


def provider(pre_process: bool = True, post_process: bool = True, **unused: Any) -> torch.nn.Module:
    """Draws its weights from the global generators, as real providers do; each model has a config."""
    args = global_vars.get_args()
    return TinyModel(bf16=args.bf16, **(args.tiny_model or {})).provider()


def arguments(**values: Any) -> Arguments:
    """A fresh process' global arguments, installed."""
    args = Arguments(
        load=None,
        finetune=False,
        no_load_optim=False,
        no_load_rng=False,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        use_checkpoint_opt_param_scheduler=True,
        debug_disable_optimizer=False,
        model_provider=provider,
        hidden_size=tiny_gpt.HIDDEN,
        num_rollout=ROLLOUTS,
        global_batch_size=SAMPLES_PER_ITERATION,
        micro_batch_size=tiny_gpt.BATCH,
        seq_length=tiny_gpt.SEQUENCE,
        forward_step_func=tiny_gpt.forward_step,
        lr=5e-3,
        min_lr=0.0,
        bf16=False,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        use_distributed_optimizer=True,
        ddp_bucket_size=tiny_models.BUCKET,
        timing_log_level=0,
    )
    vars(args).update(values)
    global_vars.set_global_variables(args)
    return args


def process(seed: int = 1234) -> None:
    """What a framework has initialized before it builds a model."""
    TinyModel(seed=seed).initialize()
    torch.manual_seed(seed)
    destroy_num_microbatches_calculator()
    # A global batch that grows with the samples consumed: 2, 4, ... 8.
    init_num_microbatches_calculator(0, [2, 2, 64], 8, tiny_gpt.BATCH, 1)


def framework_model(framework: str) -> ModuleType:
    return importlib.import_module(f"{framework}.backends.megatron_utils.model")


def train(framework: str, state: Sequence[Any], steps: int, batches: Batches) -> None:
    """One call of the framework's ``train`` with ``(model, optimizer, scheduler)``."""
    further: dict[str, tuple[Any, ...]] = {
        "slime": ([SAMPLES_PER_ITERATION] * steps,),
        "miles": ([SAMPLES_PER_ITERATION] * steps, None, 0),
    }
    framework_model(framework).train(0, *state, [batches], [MICROBATCHES] * steps, *further[framework])


def save(folder: Path, model: Sequence[Any], optimizer: Any, scheduler: Any, iteration: int) -> Path:
    """A checkpoint of a run that has come to the iteration, as the stand-in of Megatron-LM loads it."""
    home = folder / f"iter_{iteration:07d}" / "mp_rank_00"
    home.mkdir(parents=True)
    consumed = iteration * SAMPLES_PER_ITERATION
    state_dict = {
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "args": SimpleNamespace(
            hidden_size=tiny_gpt.HIDDEN,
            consumed_train_samples=consumed,
            consumed_valid_samples=1,
            skipped_train_samples=2,
        ),
        "model": model[0].module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "opt_param_scheduler": scheduler.state_dict() | {"num_steps": consumed},
        "rng_state": torch.Generator().manual_seed(99).get_state(),
    }
    torch.save(state_dict, home / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def checkpoints(framework: str, folder: Path) -> tuple[str, str]:
    """Of a former policy and of a teacher."""
    paths = []
    for seed, name in ((5, "policy"), (6, "teacher")):
        process(seed)
        arguments()
        state = framework_model(framework).setup_model_and_optimizer(arguments())
        # Adam's moments are there from the first step on.
        train(framework, state, 1, Batches())
        paths.append(str(save(folder / name, *state, ITERATION)))
    process()
    return paths[0], paths[1]


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
    return all(
        torch.equal(value, state_dict[name])
        for name, value in chunk.state_dict().items()
        if torch.is_tensor(value)
    )


def globals_of(args: Any) -> dict[str, Any]:
    """All that building and loading a second model must leave alone, as comparable values."""
    return copy.deepcopy(
        {
            "arguments": {name: value for name, value in vars(args).items() if name != "model_type"},
            "random": random.getstate(),
            "torch": torch.get_rng_state().tolist(),
            "tracker": {name: s.tolist() for name, s in get_cuda_rng_tracker().get_states().items()},
            "global batch": get_current_global_batch_size(),
            "rerun": get_rerun_state_machine().state.name,
            "checkpoint version": checkpointing._CHECKPOINT_VERSION,
        }
    )
