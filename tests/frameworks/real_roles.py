"""A policy and a teacher from a real checkpoint, by the frameworks' ``initialize_model_and_optimizer``.

What is replaced: the framework's model provider, which wants TransformerEngine. DDP, optimizer, scheduler and
Megatron-LM's writer and loader of ``torch_dist`` checkpoints are the real ones.

Import this on ranks only, inside ``cpu_backend()``, with the checkouts first on the path.
"""

from __future__ import annotations

import dataclasses
import importlib
from types import ModuleType
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.training import checkpointing

from megatron_rl_patches.testing import TinyModel
from tests.frameworks.jobs import ROLLOUTS
from tests.frameworks.loss_jobs import Arguments, set_parallel_state_of_miles
from tests.frameworks.real_jobs import set_megatron_arguments
from tests.frameworks.role_jobs import ITERATION, provider

GLOBAL_BATCH = 4


def framework_model(framework: str) -> ModuleType:
    model = importlib.import_module(f"{framework}.backends.megatron_utils.model")
    if framework == "miles":
        set_parallel_state_of_miles()
    model.get_model_provider_func = lambda args, role: provider  # type: ignore[attr-defined]
    return model


def global_arguments(**values: Any) -> Arguments:
    """Megatron-LM's defaults, and those that a framework's command line adds."""
    # Frameworks and Megatron-LM fill these from the arguments that there are; here, all seem to be.
    defaults = {
        field.name: field.default
        for config in (OptimizerConfig, DistributedDataParallelConfig)
        for field in dataclasses.fields(config)
        if field.default is not dataclasses.MISSING
    }
    options = {
        "position_embedding_type": "learned_absolute",
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "accumulate_allreduce_grads_in_fp32": True,
        # The distributed one stores no state of the Adam of torch, only of fused ones.
        "use_distributed_optimizer": False,
        "overlap_grad_reduce": True,
        "check_for_nan_in_loss_and_grad": True,
        "use_dist_ckpt": True,
        "ckpt_format": "torch_dist",
        "global_batch_size": GLOBAL_BATCH,
        "rollout_batch_size": GLOBAL_BATCH,
        "n_samples_per_prompt": 1,
        "num_rollout": ROLLOUTS,
        "lr": 5e-3,
        "min_lr": 0.0,
        "lr_decay_style": "linear",
        "lr_warmup_iters": 0,
        "lr_warmup_init": 0.0,
        "start_weight_decay": 0.0,
        "end_weight_decay": 0.0,
        "weight_decay_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": True,
        "enable_gloo_process_groups": False,
        "world_size": torch.distributed.get_world_size(),
        "rank": torch.distributed.get_rank(),
        "rollout_top_p": 1.0,
        "megatron_to_hf_mode": "raw",
        "debug_disable_optimizer": False,
        "lora_rank": 0,
    }
    return set_megatron_arguments(**{**defaults, **options, **values})


def process(seed: int = 1234, **options: Any) -> None:
    torch.serialization.add_safe_globals([Arguments])  # of a checkpoint
    TinyModel(seed=seed, **options).initialize()
    torch.manual_seed(seed)


def save(framework: str, folder: str, seed: int, **options: Any) -> str:
    """A checkpoint of a run that has come to the iteration, by Megatron-LM's writer.

    ``options`` are those of the model, whose groups are initialized afterwards.
    """
    process(seed, **options)
    args = global_arguments(load=folder, save=folder, tiny_model=options)
    model, optimizer, scheduler = framework_model(framework).setup_model_and_optimizer(args, "actor")
    model[0].zero_grad_buffer()
    optimizer.step()  # Adam's moments are there from the first step on
    scheduler.step(increment=ITERATION * GLOBAL_BATCH)
    args.consumed_train_samples = ITERATION * GLOBAL_BATCH
    checkpointing.save_checkpoint(ITERATION, model, optimizer, scheduler, 0)
    process(**options)
    return folder
