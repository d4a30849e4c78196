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
    """slime, vime and miles: supervised loss on the second half of each sequence.

    With ``layers="transformer_engine"`` the framework reads its own command line, which has these layers by
    default, and builds the model. Its microbatches are packed samples then.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.module.save_checkpoint = self.disk.write  # type: ignore[attr-defined]

    @property
    def samples(self) -> int:
        """Of a microbatch."""
        return 1 if self.options.layers == "local" else tiny_gpt.BATCH

    def _setup(self) -> tuple[Any, Any, Any]:
        if self.options.layers == "local":
            model, *others = super()._setup()
            for chunk in model:
                takes_packed_tokens(chunk.module)
            return model, *others
        self.options.initialize()
        samples = jobs.MICROBATCHES * self.samples * mpu.get_data_parallel_world_size()
        framework = self.homes[0].partition(".")[0]
        self.args = parse_arguments(framework, self.options, samples)
        built: tuple[Any, Any, Any] = self.module.setup_model_and_optimizer(self.args, "actor")
        return built

    def _set_global_variables(self) -> None:
        if self.options.layers != "local":  # parse_arguments has done it
            return
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
        numbers = torch.arange(steps * jobs.MICROBATCHES * self.samples)
        indices = numbers.view(-1, self.samples).tolist()
        return self.module.DataIterator(self._rollout_data(len(numbers)), micro_batch_indices=indices)

    def _rollout_data(self, samples: int) -> dict[str, Any]:
        self.batches.seek(self.steps * jobs.MICROBATCHES * self.samples)
        tokens = [next(self.batches)["tokens"][0] for _ in range(samples)]
        # Samples that are packed together differ in length.
        tokens = [sample[: len(sample) - 3 * (n % self.samples)] for n, sample in enumerate(tokens)]
        responses = [len(sample) - PROMPT for sample in tokens]
        return {
            "tokens": tokens,
            "total_lengths": list(map(len, tokens)),
            "response_lengths": responses,
            "loss_masks": [torch.ones(length, dtype=torch.int) for length in responses],
            "rollout_mask_sums": [torch.tensor(float(length)) for length in responses],
            "advantages": [torch.linspace(-1, 1, length) for length in responses],
            "log_probs": [torch.full((length,), -math.log(tiny_gpt.VOCABULARY)) for length in responses],
        }


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
    _install(args)
    return args


def _install(args: Any) -> None:
    """Make these the global arguments."""
    global_vars.unset_global_variables()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    batch = args.global_batch_size, args.micro_batch_size, mpu.get_data_parallel_world_size()
    num_microbatches_calculator.init_num_microbatches_calculator(torch.distributed.get_rank(), None, *batch)
    global_vars.set_args(args)


def parse_arguments(framework: str, model: TinyModel, global_batch_size: int, **options: Any) -> Any:
    """Let a framework read and check its own command line; its result becomes the global arguments.

    The command line is that of a model like Qwen3, as in the framework's scripts. It does not name
    ``--transformer-impl``.
    """
    config = model.transformer_config()
    values = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "seq_length": model.seq_length,
        "max_position_embeddings": model.seq_length,
        "vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "tensor_model_parallel_size": model.tp,
        "sequence_parallel": model.sequence_parallel,
        "expert_model_parallel_size": model.ep,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "tokenizer_type": "NullTokenizer",
        "tokenizer_model": "none",
        "pretrained_checkpoint": "none",
        "micro_batch_size": 1,
        "data_pad_size_multiplier": model.seq_length,
        "global_batch_size": global_batch_size,
        "rollout_batch_size": global_batch_size,
        "n_samples_per_prompt": 1,
        "num_rollout": jobs.ROLLOUTS,
        "loss_type": "sft_loss",
        "lr": 5e-3,
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": torch.distributed.get_world_size(),
        **options,
    }
    if config.num_moe_experts:
        values |= {
            "num_experts": config.num_moe_experts,
            "moe_ffn_hidden_size": config.hidden_size,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
            "moe_permute_fusion": True,
            "moe_router_dtype": "fp32",
        }
    flags = (
        *("swiglu", "disable_bias_linear", "qk_layernorm", "untie_embeddings_and_output_weights"),
        *("overlap_grad_reduce", "overlap_param_gather", "accumulate_allreduce_grads_in_fp32"),
        *("attention_softmax_in_fp32", "disable_gloo_process_groups", "debug_train_only"),
    )
    words = [
        word
        for name, value in {**values, **dict.fromkeys(flags, True)}.items()
        for word in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
        if value is not False
    ]
    home = importlib.import_module(f"{framework}.utils.arguments")
    with (
        mock.patch.object(sys, "argv", ["train.py", *words]),
        mock.patch.dict("os.environ", CUDA_DEVICE_MAX_CONNECTIONS="1"),
        mock.patch.object(home, "sglang_validate_args", lambda args: None),  # of a stub
    ):
        args = home.parse_args()
    args.rank = torch.distributed.get_rank()
    _install(args)
    return args


JOBS: dict[str, Any] = {
    "slime": RealSlimeJob,
    "vime": RealVimeJob,
    "miles": RealMilesJob,
    "megatron.training": RealMegatronJob,
}


# --- models by role

GLOBAL_BATCH = 4
#: Ranks have all weights and all states of the optimizer, so that their checksums are the same.
UNSHARDED = {"use_distributed_optimizer": False, "overlap_param_gather": False}


def model_of(framework: str, layers: str = "local") -> ModuleType:
    model = importlib.import_module(f"{framework}.backends.megatron_utils.model")
    if framework == "miles":
        loss_jobs.set_parallel_state_of_miles()
    if layers == "local":
        model.get_model_provider_func = lambda args, role: jobs.provider  # type: ignore[attr-defined]
    return model


def role_arguments(framework: str, tiny_model: dict[str, Any], **values: Any) -> Any:
    """Set global arguments for models of this kind: the framework's own ones if it builds them itself."""
    options = TinyModel(**tiny_model)
    if options.layers == "local":
        return global_arguments(tiny_model=tiny_model, **values)
    args = parse_arguments(framework, options, GLOBAL_BATCH, **values)
    vars(args).update(UNSHARDED)
    return args


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
        **UNSHARDED,
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
    args = role_arguments(framework, options, load=folder, save=folder, save_interval=1)
    layers = TinyModel(**options).layers
    model, optimizer, scheduler = model_of(framework, layers).setup_model_and_optimizer(args, "actor")
    model[0].zero_grad_buffer()
    optimizer.step()  # Adam's moments are there from the first step on
    scheduler.step(increment=jobs.ITERATION * GLOBAL_BATCH)
    args.consumed_train_samples = jobs.ITERATION * GLOBAL_BATCH
    checkpointing.save_checkpoint(jobs.ITERATION, model, optimizer, scheduler, 0)
    process(**options)
    return folder
