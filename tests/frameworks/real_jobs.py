"""The jobs of :mod:`tests.frameworks.jobs` on real frameworks: only the write of a checkpoint is replaced.

And models by role, by ``initialize_model_and_optimizer``: there the model provider is replaced, which wants
TransformerEngine. The writer and the loader of ``torch_dist`` checkpoints are the real ones.

Import this on ranks only, inside ``cpu_backend()``, with the checkouts first on the path.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from megatron.core import num_microbatches_calculator
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.training import arguments, checkpointing, global_vars

from megatron_rl_patches.testing import TinyModel
from tests.frameworks import jobs, loss_jobs
from tests.frameworks.loss_jobs import SCORES, Arguments, call, takes_packed_tokens
from tests.references import tiny_gpt

PROMPT = tiny_gpt.SEQUENCE // 2
#: Of a model whose floating-point operations are counted.
SIZES = {
    "num_layers": tiny_gpt.LAYERS,
    "hidden_size": tiny_gpt.HIDDEN,
    "num_attention_heads": tiny_gpt.HEADS,
}


class _RolloutJob(jobs.RolloutJob):
    """slime, vime and miles: supervised loss on the second half of each sequence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for chunk in self.model:
            takes_packed_tokens(chunk.module)
        self.module.save_checkpoint = self.disk.write  # type: ignore[attr-defined]

    def _set_global_variables(self) -> None:
        vars(self.args).update(
            SIZES,
            rollout_temperature=1.0,
            rollout_top_p=1.0,
            data_pad_size_multiplier=tiny_gpt.SEQUENCE,
            loss_type="sft_loss",
            log_probs_chunk_size=-1,
            manual_gc_interval=0,
            qkv_format="thd",
            calculate_per_token_loss=False,
            check_for_nan_in_loss_and_grad=True,
            global_batch_size=jobs.MICROBATCHES * mpu.get_data_parallel_world_size(),
        )
        global_vars.set_args(self.args)

    def use_policy_loss(self) -> None:
        """Train with the framework's policy loss from now on; the old policy is the uniform one."""
        clip = {"eps_clip": 0.2, "eps_clip_high": 0.2}
        vars(self.args).update(loss_type="policy_loss", advantage_estimator="grpo", entropy_coef=0.01, **clip)

    def log_probs(self) -> list[torch.Tensor]:
        """Of the responses of the next step, through ``forward_only`` as the actor calls it."""
        returned = call(
            self.module.forward_only,
            f=importlib.import_module(SCORES[self.homes[0].partition(".")[0]]).get_log_probs_and_entropy,
            args=self.args,
            model=self.model,
            data_iterator=[self._rollout(steps=1)],
            num_microbatches=[jobs.MICROBATCHES],
            rollout_id=0,
            store_prefix="old_",
        )
        values: list[torch.Tensor] = returned["old_log_probs"]
        return values

    def _rollout(self, steps: int) -> Any:
        samples = [[number] for number in range(steps * jobs.MICROBATCHES)]
        return self.module.DataIterator(self._rollout_data(len(samples)), micro_batch_indices=samples)

    def _rollout_data(self, samples: int) -> dict[str, Any]:
        self.batches.seek(self.steps * jobs.MICROBATCHES)
        response = tiny_gpt.SEQUENCE - PROMPT
        of_each = {
            "total_lengths": tiny_gpt.SEQUENCE,
            "response_lengths": response,
            "loss_masks": torch.ones(response, dtype=torch.int),
            "rollout_mask_sums": torch.tensor(float(response)),
            "advantages": torch.linspace(-1, 1, response),
            "log_probs": torch.full((response,), -math.log(tiny_gpt.VOCABULARY)),
        }
        tokens = [next(self.batches)["tokens"][0] for _ in range(samples)]
        return {"tokens": tokens, **{name: [value] * samples for name, value in of_each.items()}}


class RealSlimeJob(_RolloutJob):
    homes = ("slime.backends.megatron_utils.model",)


class RealVimeJob(_RolloutJob):
    homes = ("vime.backends.megatron_utils.model",)


class RealMilesJob(_RolloutJob):
    homes = ("miles.backends.megatron_utils.model",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        dumper = importlib.import_module("sglang.srt.debug_utils.dumper")
        if not hasattr(dumper.DumperConfig, "_kv_pairs_to_dict"):  # a stub
            dumper.DumperConfig._kv_pairs_to_dict = staticmethod(lambda pairs: {})
        loss_jobs.set_parallel_state_of_miles()


class RealMegatronJob(jobs.MegatronJob):
    """Megatron-LM's own training loop, with the defaults of its command line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.module.save_checkpoint = self.disk.write  # type: ignore[attr-defined]

    def _set_global_variables(self) -> None:
        of_job = {
            **vars(self.args),
            "ffn_hidden_size": 4 * tiny_gpt.HIDDEN,
            "num_query_groups": tiny_gpt.HEADS,
            "kv_channels": tiny_gpt.HIDDEN // tiny_gpt.HEADS,
            "global_batch_size": jobs.MICROBATCHES * tiny_gpt.BATCH * mpu.get_data_parallel_world_size(),
            "expert_tensor_parallel_size": 1,
            "num_floating_point_operations_so_far": 0,
            "iteration": 0,
            "log_interval": 1000,
            "eval_iters": 1,
            "params_dtype": torch.float32,
        }
        self.args = set_megatron_arguments(**of_job)
        global_vars._set_timers(self.args)
        if hasattr(global_vars, "_set_energy_monitor"):
            global_vars._set_energy_monitor(self.args)


def set_megatron_arguments(**values: Any) -> Arguments:
    """Set Megatron-LM's global arguments: those of its command line, of the tiny model, and these."""
    with mock.patch.object(sys, "argv", ["train"]):
        args = Arguments(**vars(arguments.parse_args(ignore_unknown_args=True)))
    replicas = mpu.get_data_parallel_world_size()
    of_model = {
        **SIZES,
        "max_position_embeddings": tiny_gpt.SEQUENCE,
        "padded_vocab_size": tiny_gpt.VOCABULARY,
        "micro_batch_size": tiny_gpt.BATCH,
        **dict.fromkeys(jobs.CONSUMED, 0),
        "data_parallel_size": replicas,
        "gtp_weight_remat_size": 1,
    }
    vars(args).update({**of_model, **values})
    global_vars.unset_global_variables()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    batch = args.global_batch_size, args.micro_batch_size
    num_microbatches_calculator.init_num_microbatches_calculator(
        torch.distributed.get_rank(), None, *batch, replicas
    )
    global_vars.set_args(args)
    return args


JOBS: dict[str, Any] = {
    "slime": RealSlimeJob,
    "vime": RealVimeJob,
    "miles": RealMilesJob,
    "megatron.training": RealMegatronJob,
}


# --- models by role

GLOBAL_BATCH = 4


def model_of(framework: str) -> ModuleType:
    model = importlib.import_module(f"{framework}.backends.megatron_utils.model")
    if framework == "miles":
        loss_jobs.set_parallel_state_of_miles()
    model.get_model_provider_func = lambda args, role: jobs.provider  # type: ignore[attr-defined]
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
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "accumulate_allreduce_grads_in_fp32": True,
        # The distributed one stores no state of the Adam of torch, only of fused ones.
        "use_distributed_optimizer": False,
        "overlap_grad_reduce": True,
        "use_dist_ckpt": True,
        "global_batch_size": GLOBAL_BATCH,
        "rollout_batch_size": GLOBAL_BATCH,
        "n_samples_per_prompt": 1,
        "num_rollout": jobs.ROLLOUTS,
        "lr": 5e-3,
        "min_lr": 0.0,
        "start_weight_decay": 0.0,
        "end_weight_decay": 0.0,
        "use_checkpoint_opt_param_scheduler": True,
        "enable_gloo_process_groups": False,
        "world_size": torch.distributed.get_world_size(),
        "rank": torch.distributed.get_rank(),
        "rollout_top_p": 1.0,
        "megatron_to_hf_mode": "raw",
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
    model, optimizer, scheduler = model_of(framework).setup_model_and_optimizer(args, "actor")
    model[0].zero_grad_buffer()
    optimizer.step()  # Adam's moments are there from the first step on
    scheduler.step(increment=jobs.ITERATION * GLOBAL_BATCH)
    args.consumed_train_samples = jobs.ITERATION * GLOBAL_BATCH
    checkpointing.save_checkpoint(jobs.ITERATION, model, optimizer, scheduler, 0)
    process(**options)
    return folder
