"""verl's own Megatron engine, with a tiny GPT in the place of the model that it would load.

Import this on ranks only, inside ``cpu_backend()``, with verl and tensordict on the path.
"""

from __future__ import annotations

import importlib
import math
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_rl_patches.testing import TinyModel
from tests.frameworks.loss_jobs import VERL_ENGINE, Arguments, takes_packed_tokens
from tests.references import tiny_gpt

SAMPLES = 2
TEMPERATURE = 0.7


def make_engine(model: list[Any], of: str = "LMHead", **config: Any) -> Any:
    """Return the engine around a model, with options of its ``McoreEngineConfig``."""
    engine = object.__new__(getattr(importlib.import_module(VERL_ENGINE), f"MegatronEngineWith{of}"))
    engine.module, engine.tf_config = model, get_model_config(model[0])
    engine.engine_config = importlib.import_module("verl.workers.config").McoreEngineConfig(**config)
    engine.enable_routing_replay = False
    engine.model_config = SimpleNamespace(
        mtp=Arguments(),
        hf_config=SimpleNamespace(architectures=["GPT"]),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    return engine


def on_the_cpu() -> Any:
    """A TensorDict does not know that the GPU's index means the CPU."""
    return mock.patch.object(importlib.import_module(VERL_ENGINE), "get_device_id", lambda: "cpu")


def tensordict(
    jagged: dict[str, list[torch.Tensor]], numbers: dict[str, Any], **columns: torch.Tensor
) -> Any:
    """A batch of samples; those of the first columns have lengths of their own, and no padding."""
    for name, values in jagged.items():
        columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return importlib.import_module("verl.utils.tensordict_utils").get_tensordict(columns, numbers)


def actor_config(**options: Any) -> Any:
    config = importlib.import_module("verl.workers.config")
    return config.ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)


def distillation_loss(loss_mode: str, topk: int, policy: bool = False, **options: Any) -> Any:
    """verl's ``distillation_ppo_loss``; ``policy`` adds the policy loss."""
    config = importlib.import_module("verl.workers.config")
    distillation = config.DistillationConfig(
        distillation_loss=config.DistillationLossConfig(
            loss_mode=loss_mode,
            topk=topk,
            use_task_rewards=policy,
            use_policy_gradient=False,
            loss_max_clamp=None,
            log_prob_min_clamp=None,
        )
    )
    object.__setattr__(distillation, "enabled", True)  # its constructor would look for servers
    loss = importlib.import_module("verl.trainer.distillation.losses").distillation_ppo_loss
    return partial(loss, config=actor_config(**options), distillation_config=distillation)


class EngineJob:
    """``train_batch`` and ``infer_batch`` with PPO's loss, the entropy and a temperature."""

    def __init__(self, packed: bool = True, **sizes: Any) -> None:
        self.module = importlib.import_module(VERL_ENGINE)
        model, optimizer = TinyModel(**sizes, overlap_param_gather=False).build()
        utils = importlib.import_module("verl.utils.megatron_utils")
        utils.register_megatron_training_hooks(model, optimizer)
        for chunk in model:
            takes_packed_tokens(chunk.module)
        self.engine = make_engine(
            model,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            use_remove_padding=packed,
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=1,
            infer_micro_batch_size_per_gpu=1,
        )
        self.engine.optimizer, self.batches = optimizer, tiny_gpt.SyntheticData()
        ppo_loss = importlib.import_module("verl.workers.utils.losses").ppo_loss
        self.loss = partial(ppo_loss, actor_config(entropy_coeff=0.1))

    def scores(self) -> list[torch.Tensor]:
        """Log-probabilities and entropies of the next batch, without gradients."""
        with on_the_cpu(), self.engine.eval_mode(disable_auto_offload=True):
            output = self.engine.infer_batch(self.data())["model_output"]
        return [output[name].values() for name in ("log_probs", "entropy")]

    def train(self) -> list[float]:
        """Return the losses of the microbatches, and the gradient norm."""
        with on_the_cpu(), self.engine.train_mode(disable_auto_offload=True):
            output = self.engine.train_batch(self.data(), self.loss)
            norm = output["metrics"].get("grad_norm", 0.0)  # on one rank of the model only
        return [*output["loss"], float(norm)]

    def data(self) -> Any:
        prompt = tiny_gpt.SEQUENCE // 2
        tokens = [next(self.batches)["tokens"][0] for _ in range(SAMPLES)]
        # Samples have lengths of their own.
        tokens = [sample[: len(sample) - 2 * number] for number, sample in enumerate(tokens)]
        responses = [sample[prompt:] for sample in tokens]
        log_prob = -math.log(tiny_gpt.VOCABULARY)
        jagged = {
            "input_ids": tokens,
            "prompts": [sample[:prompt] for sample in tokens],
            "responses": responses,
            "loss_mask": [torch.ones_like(response) for response in responses],
            "response_mask": [torch.ones_like(response) for response in responses],
            "old_log_probs": [torch.full(response.shape, log_prob) for response in responses],
            "advantages": [torch.linspace(-1, 1, len(response)) for response in responses],
        }
        numbers = {
            "calculate_entropy": True,
            "global_batch_size": SAMPLES,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 1,
        }
        return tensordict(jagged, numbers, temperature=torch.full((SAMPLES,), TEMPERATURE))
