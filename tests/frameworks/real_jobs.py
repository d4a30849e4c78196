"""The jobs of :mod:`tests.frameworks.jobs` on real frameworks: only the write of a checkpoint is replaced.

Import this on ranks only, inside ``cpu_backend()``, with the checkouts first on the path.
"""

from __future__ import annotations

import importlib
import math
import sys
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.training import arguments, global_vars

from tests.frameworks.jobs import MICROBATCHES, Job, MegatronJob
from tests.frameworks.loss_jobs import (
    SCORES,
    Arguments,
    call,
    set_parallel_state_of_miles,
    takes_packed_tokens,
)
from tests.references import tiny_gpt

PROMPT = tiny_gpt.SEQUENCE // 2


def _write(job: Job, iteration: int, model: Any, *unused: Any, **options: Any) -> None:
    job.disk.write(
        iteration, [parameter.detach().clone() for chunk in model for parameter in chunk.parameters()]
    )


class _RolloutJob(Job):
    """slime, vime and miles: supervised loss on the second half of each sequence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for chunk in self.model:
            takes_packed_tokens(chunk.module)
        [self.module] = map(importlib.import_module, self.homes)
        self.module.save_checkpoint = partial(_write, self)

    def save(self) -> None:
        self.module.save(self.steps, self.model, self.optimizer, self.scheduler)

    def _set_global_variables(self) -> None:
        self.args = Arguments(
            **vars(self.args),
            rollout_temperature=1.0,
            rollout_top_p=1.0,
            data_pad_size_multiplier=tiny_gpt.SEQUENCE,
            loss_type="sft_loss",
            log_probs_chunk_size=-1,
            manual_gc_interval=0,
            qkv_format="thd",
            calculate_per_token_loss=False,
            check_for_nan_in_loss_and_grad=True,
            global_batch_size=MICROBATCHES * mpu.get_data_parallel_world_size(),
            # of a model whose floating-point operations are counted
            num_layers=tiny_gpt.LAYERS,
            hidden_size=tiny_gpt.HIDDEN,
            num_attention_heads=tiny_gpt.HEADS,
        )
        self.args.overlap_param_gather = self.options.overlap_param_gather
        global_vars.set_args(self.args)

    def log_probs(self) -> list[torch.Tensor]:
        """Of the responses of the next step, through ``forward_only`` as the actor calls it."""
        returned = call(
            self.module.forward_only,
            f=importlib.import_module(SCORES[self.homes[0].partition(".")[0]]).get_log_probs_and_entropy,
            args=self.args,
            model=self.model,
            data_iterator=[self._rollout(steps=1)],
            num_microbatches=[MICROBATCHES],
            rollout_id=0,
            store_prefix="old_",
        )
        values: list[torch.Tensor] = returned["old_log_probs"]
        return values

    def _train(self, steps: int) -> Any:
        samples_per_step = [self.args.global_batch_size] * steps
        return call(
            self.module.train,
            rollout_id=0,
            model=self.model,
            optimizer=self.optimizer,
            opt_param_scheduler=self.scheduler,
            data_iterator=[self._rollout(steps)],
            num_microbatches=[MICROBATCHES] * steps,
            global_batch_sizes=samples_per_step,
            num_rollouts=samples_per_step,
            witness_info=None,
            attempt=0,
        )

    def _rollout(self, steps: int) -> Any:
        microbatches = steps * MICROBATCHES
        self.batches.seek(self.steps * MICROBATCHES)
        tokens = [next(self.batches)["tokens"][0] for _ in range(microbatches)]
        response = tiny_gpt.SEQUENCE - PROMPT
        rollout = {
            "tokens": tokens,
            "total_lengths": [tiny_gpt.SEQUENCE] * microbatches,
            "response_lengths": [response] * microbatches,
            "loss_masks": [torch.ones(response, dtype=torch.int)] * microbatches,
            "rollout_mask_sums": [torch.tensor(float(response))] * microbatches,
        }
        return self._data_iterator(rollout, [[number] for number in range(microbatches)])

    def _data_iterator(self, rollout: dict[str, Any], indices: list[list[int]]) -> Any:
        return self.module.DataIterator(rollout, micro_batch_indices=indices)


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
        set_parallel_state_of_miles()


def with_policy_loss(framework: str) -> type[Job]:
    """Return the job of slime, vime or miles with their policy loss; its old policy is the uniform one."""

    class PolicyJob(JOBS[framework]):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            vars(self.args).update(
                loss_type="policy_loss",
                advantage_estimator="grpo",
                eps_clip=0.2,
                eps_clip_high=0.2,
                entropy_coef=0.01,
            )

        def _data_iterator(self, rollout: dict[str, Any], indices: list[list[int]]) -> Any:
            lengths = rollout["response_lengths"]
            rollout["advantages"] = [torch.linspace(-1, 1, length) for length in lengths]
            old = -math.log(tiny_gpt.VOCABULARY)
            rollout["log_probs"] = [torch.full((length,), old) for length in lengths]
            return super()._data_iterator(rollout, indices)

    return PolicyJob


class RealMegatronJob(MegatronJob):
    """Megatron-LM's own training loop, with the defaults of its command line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.training.save_checkpoint = partial(_write, self)

    def _set_global_variables(self) -> None:
        replicas = mpu.get_data_parallel_world_size()
        self.args = set_megatron_arguments(
            **vars(self.args),
            ffn_hidden_size=4 * tiny_gpt.HIDDEN,
            num_query_groups=tiny_gpt.HEADS,
            kv_channels=tiny_gpt.HIDDEN // tiny_gpt.HEADS,
            global_batch_size=MICROBATCHES * tiny_gpt.BATCH * replicas,
            expert_tensor_parallel_size=1,
            num_floating_point_operations_so_far=0,
            iteration=0,
            log_interval=1000,
            eval_iters=1,
            do_valid=False,
            use_megatron_fsdp=False,
            params_dtype=torch.float32,
        )
        global_vars._set_timers(self.args)
        if hasattr(global_vars, "_set_energy_monitor"):
            global_vars._set_energy_monitor(self.args)


def set_megatron_arguments(**values: Any) -> Arguments:
    """Set Megatron-LM's global arguments: those of its command line, of the tiny model, and these."""
    with mock.patch.object(sys, "argv", ["train"]):
        args = Arguments(**vars(arguments.parse_args(ignore_unknown_args=True)))
    replicas = mpu.get_data_parallel_world_size()
    vars(args).update(
        num_layers=tiny_gpt.LAYERS,
        hidden_size=tiny_gpt.HIDDEN,
        num_attention_heads=tiny_gpt.HEADS,
        max_position_embeddings=tiny_gpt.SEQUENCE,
        padded_vocab_size=tiny_gpt.VOCABULARY,
        micro_batch_size=tiny_gpt.BATCH,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        data_parallel_size=replicas,
        gtp_weight_remat_size=1,
    )
    vars(args).update(values)
    global_vars.unset_global_variables()
    destroy_num_microbatches_calculator()
    init_num_microbatches_calculator(
        torch.distributed.get_rank(), None, args.global_batch_size, args.micro_batch_size, replicas
    )
    global_vars.set_args(args)
    return args


JOBS: dict[str, type[Job]] = {
    "slime": RealSlimeJob,
    "vime": RealVimeJob,
    "miles": RealMilesJob,
    "megatron.training": RealMegatronJob,
}
