"""The jobs of :mod:`tests.frameworks.jobs` on real frameworks: only the write of a checkpoint is replaced.

And models by role, by ``initialize_model_and_optimizer``. The writer and the loader of ``torch_dist``
checkpoints are the real ones. **Arguments are those that a framework's own parser makes of a command line**,
and no test changes them afterwards: a flag sets all that it sets in the framework.

Import this on ranks only, inside ``cpu_backend()``, with the checkouts first on the path.
"""

import importlib
import math
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import num_microbatches_calculator
from megatron.core import parallel_state as mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.utils import unwrap_model
from megatron.training import arguments, checkpointing, global_vars

from megatron_rl_patches.testing import TinyModel, tiny_models
from tests.frameworks import jobs, loss_jobs
from tests.frameworks.loss_jobs import SCORES, call, takes_packed_tokens
from tests.references import tiny_gpt

PROMPT, TOP_K = tiny_gpt.SEQUENCE // 2, 30
#: The framework's policy loss; the old policy is the uniform one.
POLICY = {"loss_type": "policy_loss", "advantage_estimator": "grpo", "entropy_coef": 0.01}


class _OfCommandLine(jobs.Job):
    """The framework reads a command line, which also has ``flags``, and builds the model."""

    def __init__(self, flags: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.flags = flags or {}
        super().__init__(**options)
        self.module.save_checkpoint = self.disk.write  # type: ignore[attr-defined]


class _RolloutJob(_OfCommandLine, jobs.RolloutJob):
    """slime, vime and miles: supervised loss on the second half of each sequence.

    With layers of TransformerEngine its microbatches are packed samples.
    """

    @property
    def samples(self) -> int:
        """Of a microbatch."""
        return 1 if self.options.layers == "local" else tiny_gpt.BATCH

    def _setup(self) -> tuple[Any, Any, Any]:
        self.options.initialize()
        self.packed = self.samples  # in a microbatch
        samples = jobs.MICROBATCHES * self.samples * mpu.get_data_parallel_world_size()
        framework = self.homes[0].partition(".")[0]
        self.args = parse_arguments(framework, self.options, samples, **self.flags)
        built: tuple[Any, Any, Any] = self.module.setup_model_and_optimizer(self.args, "actor")
        if self.options.layers == "local":
            for chunk in built[0]:
                takes_packed_tokens(unwrap_model(chunk))
        return built

    def log_probs(self) -> list[torch.Tensor]:
        """Of the responses of the next step, through ``forward_only`` as the actor calls it."""
        returned = call(
            self.module.forward_only,
            f=importlib.import_module(SCORES[self.homes[0].partition(".")[0]]).get_log_probs_and_entropy,
            args=self.args,
            model=self.model,
            data_iterator=[self._rollout(steps=1)],
            num_microbatches=[jobs.MICROBATCHES * self.samples // self.packed],
            rollout_id=0,
            store_prefix="old_",
            use_rollout_top_p_replay=True,
        )
        values: list[torch.Tensor] = returned["old_log_probs"]
        return values

    def _rollout(self, steps: int) -> Any:
        numbers = torch.arange(steps * jobs.MICROBATCHES * self.samples)
        indices = numbers.view(-1, self.packed).tolist()
        return self.module.DataIterator(self._rollout_data(len(numbers)), micro_batch_indices=indices)

    def _rollout_data(self, samples: int) -> dict[str, Any]:
        self.batches.seek(self.steps * jobs.MICROBATCHES * self.samples)
        tokens = [next(self.batches)["tokens"][0] for _ in range(samples)]
        # Samples that are packed together differ in length.
        tokens = [sample[: len(sample) - 3 * (n % self.samples)] for n, sample in enumerate(tokens)]
        responses = [len(sample) - PROMPT for sample in tokens]
        nuclei = [(sample[PROMPT:, None] + torch.arange(TOP_K)) % tiny_gpt.VOCABULARY for sample in tokens]
        return {
            "tokens": tokens,
            "rollout_top_p_token_ids": [ids.flatten() for ids in nuclei],
            "rollout_top_p_token_offsets": [torch.arange(length + 1) * TOP_K for length in responses],
            "total_lengths": list(map(len, tokens)),
            "response_lengths": responses,
            "loss_masks": [torch.ones(length, dtype=torch.int) for length in responses],
            "rollout_mask_sums": [torch.tensor(float(length)) for length in responses],
            "advantages": [torch.linspace(-1, 1, length) for length in responses],
            "log_probs": [torch.full((length,), -math.log(tiny_gpt.VOCABULARY)) for length in responses],
        }


class RealMilesJob(_RolloutJob):
    homes = ("miles.backends.megatron_utils.model",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        dumper = importlib.import_module("sglang.srt.debug_utils.dumper")
        if not hasattr(dumper.DumperConfig, "_kv_pairs_to_dict"):  # a stub
            dumper.DumperConfig._kv_pairs_to_dict = staticmethod(lambda pairs: {})
        loss_jobs.set_parallel_state_of_miles()


class RealMegatronJob(_OfCommandLine, jobs.MegatronJob):
    """Megatron-LM's own training loop, with the defaults of its command line."""

    def _setup(self) -> tuple[Any, Any, Any]:
        self.options.initialize()
        samples = jobs.MICROBATCHES * tiny_gpt.BATCH * mpu.get_data_parallel_world_size()
        self.args = parse_arguments("megatron.training", self.options, samples, **self.flags)
        built: tuple[Any, Any, Any] = call(
            self.module.setup_model_and_optimizer,  # type: ignore[attr-defined]
            model_provider_func=self.options.provider,
            model_type=ModelType.encoder_or_decoder,
        )
        return built


def parse_arguments(framework: str, model: TinyModel, global_batch_size: int, **flags: Any) -> Any:
    """Let a framework read and check its own command line; its result becomes the global arguments.

    The command line is that of a model like Qwen3, as in the framework's scripts. It names
    ``--transformer-impl`` for local layers only, as others are the default. A flag that is ``None`` or
    ``False`` is left out.
    """
    config, is_local = model.transformer_config(), model.layers == "local"
    values = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "seq_length": model.seq_length,
        "max_position_embeddings": model.seq_length,
        "vocab_size": model.vocab_size,
        "make_vocab_size_divisible_by": 1,
        "tensor_model_parallel_size": model.tp,
        "context_parallel_size": model.cp,
        "sequence_parallel": model.sequence_parallel,
        "expert_model_parallel_size": model.ep,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "tokenizer_type": "NullTokenizer",
        "micro_batch_size": 1,
        "global_batch_size": global_batch_size,
        "lr": model.lr,
        "ddp_bucket_size": tiny_models.BUCKET,
        "overlap_grad_reduce": model.overlap_grad_reduce,
        "overlap_param_gather": model.overlap_param_gather,
        "mtp_num_layers": config.mtp_num_layers,
        **dict.fromkeys(_FLAGS, True),
        **(dict.fromkeys(_LOCAL, True) | {"transformer_impl": "local"} if is_local else {}),
    }
    if config.num_moe_experts:
        values |= {
            "num_experts": config.num_moe_experts,
            "moe_ffn_hidden_size": config.hidden_size,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": not is_local,
            "moe_permute_fusion": not is_local,
            "moe_router_dtype": "fp32",
        }
    if framework == "megatron.training":
        values |= {
            "micro_batch_size": tiny_gpt.BATCH,
            "train_iters": jobs.ROLLOUTS,
            "use_distributed_optimizer": model.use_distributed_optimizer,
            "bf16": model.bf16,
        }
    else:
        values |= {
            "tokenizer_model": "none",
            "pretrained_checkpoint": "none",
            "data_pad_size_multiplier": model.seq_length,
            "rollout_batch_size": global_batch_size,
            "n_samples_per_prompt": 1,
            "num_rollout": jobs.ROLLOUTS,
            "loss_type": "sft_loss",
            "actor_num_nodes": 1,
            "actor_num_gpus_per_node": torch.distributed.get_world_size(),
            "debug_train_only": True,
            "spec": "tests.frameworks.real_jobs local_layers" if framework == "miles" and is_local else None,
        }
    if flags.get("allgather_cp") and framework == "slime":
        values["hf_checkpoint"] = "none"
    words = [
        word
        for name, value in {**values, **flags}.items()
        for word in (f"--{name.replace('_', '-')}", *([] if value is True else str(value).split()))
        if value is not False and value is not None
    ]
    with (
        mock.patch.object(sys, "argv", ["train.py", *words]),
        mock.patch.dict("os.environ", CUDA_DEVICE_MAX_CONNECTIONS="1"),
    ):
        args = _parse(framework)
    args.rank = torch.distributed.get_rank()
    global_vars.unset_global_variables()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    global_vars.set_global_variables(args)
    return args


def local_layers(args: Any, config: Any, vp_stage: int | None) -> Any:
    """Return what miles builds for ``--transformer-impl local`` in the Megatron of its image."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False)


class _Linear(ColumnParallelLinear):
    def __init__(self, *sizes: Any, parallel_mode: str, **options: Any) -> None:
        super().__init__(*sizes, **options)


def sparse_layers(args: Any, config: Any, vp_stage: int | None) -> Any:
    """Return Megatron's sparse attention, without the kernel that rotates both queries and keys."""
    dsa = importlib.import_module("megatron.core.transformer.experimental_attention_variant.dsa")
    dsa.hadamard_transform = lambda values, scale: values  # type: ignore[attr-defined]
    config.experimental_attention_variant, config.dsa_indexer_loss_coeff = "dsa", 0.0
    config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, config.dsa_indexer_topk = 2, 128, 4
    layer = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    of_layer, spec = layer.submodules, type(layer)
    indexer = dsa.DSAIndexerSubmodules(_Linear, _Linear, of_layer.input_layernorm, _Linear)
    attention = dsa.DSAttentionSubmodules(spec(dsa.DSAIndexer, submodules=indexer))
    of_layer.self_attention.submodules.core_attention = spec(dsa.DSAttention, submodules=attention)
    return layer


_FLAGS = (
    *("swiglu", "disable_bias_linear", "qk_layernorm", "untie_embeddings_and_output_weights"),
    *("accumulate_allreduce_grads_in_fp32", "attention_softmax_in_fp32", "disable_gloo_process_groups"),
)
#: What local layers have no kernel for.
_LOCAL = (
    *("no_persist_layer_norm", "no_rope_fusion", "no_masked_softmax_fusion"),
    "no_gradient_accumulation_fusion",
)


def _parse(framework: str) -> Any:
    if framework == "megatron.training":
        args = arguments.parse_args()
        arguments.validate_args(args)
        return args
    home = importlib.import_module(f"{framework}.utils.arguments")
    of_megatron = importlib.import_module(f"{framework}.backends.megatron_utils.arguments")
    model = SimpleNamespace(architectures=["GlmMoeDsaForCausalLM"])  # --allgather-cp is for such models alone
    configs = SimpleNamespace(from_pretrained=lambda *unused, **unused_too: model)
    with (
        mock.patch.object(home, "sglang_validate_args", lambda args: None),  # of a stub
        mock.patch.object(of_megatron, "AutoConfig", configs, create=True),
    ):
        return home.parse_args()


_MODEL = "backends.megatron_utils.model"
JOBS: dict[str, Any] = {
    **{name: type(name, (_RolloutJob,), {"homes": (f"{name}.{_MODEL}",)}) for name in ("slime", "vime")},
    "miles": RealMilesJob,
    "megatron.training": RealMegatronJob,
}


# --- models by role

GLOBAL_BATCH = 4


def model_of(framework: str) -> ModuleType:
    if framework == "miles":
        loss_jobs.set_parallel_state_of_miles()
    return importlib.import_module(f"{framework}.backends.megatron_utils.model")


def role_arguments(framework: str, tiny_model: Mapping[str, Any], **flags: Any) -> Any:
    """Set global arguments for models of this kind."""
    return parse_arguments(framework, TinyModel(**tiny_model), GLOBAL_BATCH, **flags)


def process(seed: int = 1234, **options: Any) -> None:
    TinyModel(seed=seed, **options).initialize()
    torch.manual_seed(seed)


def save(framework: str, folder: str, seed: int, **options: Any) -> str:
    """A checkpoint of a run that has come to the iteration, by Megatron-LM's writer.

    ``options`` are those of the model, whose groups are initialized afterwards.
    """
    process(seed, **options)
    args = role_arguments(framework, options, load=folder, save=folder, save_interval=1)
    model, optimizer, scheduler = model_of(framework).setup_model_and_optimizer(args, "actor")
    model[0].zero_grad_buffer()
    optimizer.step()  # Adam's moments are there from the first step on
    scheduler.step(increment=jobs.ITERATION * GLOBAL_BATCH)
    args.consumed_train_samples = jobs.ITERATION * GLOBAL_BATCH
    checkpointing.save_checkpoint(jobs.ITERATION, model, optimizer, scheduler, 0)
    process(**options)
    return folder
