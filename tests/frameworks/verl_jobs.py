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
from megatron.core.utils import get_model_config

from megatron_rl_patches.testing import TinyModel
from tests.frameworks.loss_jobs import VERL_ENGINE, Arguments, takes_packed_tokens
from tests.references import tiny_gpt

SAMPLES = 2


class EngineJob:
    """``train_batch`` and ``infer_batch`` with PPO's loss, the entropy and a temperature."""

    def __init__(self, **sizes: Any) -> None:
        self.module = importlib.import_module(VERL_ENGINE)
        config = importlib.import_module("verl.workers.config")
        utils = importlib.import_module("verl.utils.megatron_utils")
        tiny = TinyModel(**sizes, overlap_param_gather=False)
        model, optimizer = tiny.build()
        utils.register_megatron_training_hooks(model, optimizer)
        for chunk in model:
            takes_packed_tokens(chunk.module)
        engine = object.__new__(self.module.MegatronEngineWithLMHead)
        engine.module, engine.optimizer = model, optimizer
        engine.tf_config = get_model_config(model[0])
        engine.engine_config = config.McoreEngineConfig(tensor_model_parallel_size=tiny.tp)
        engine.enable_routing_replay = False
        engine.model_config = SimpleNamespace(
            mtp=Arguments(),
            hf_config=SimpleNamespace(architectures=["GPT"]),
            tokenizer=SimpleNamespace(pad_token_id=0),
        )
        self.engine, self.batches = engine, tiny_gpt.SyntheticData()
        ppo_loss = importlib.import_module("verl.workers.utils.losses").ppo_loss
        self.loss = partial(
            ppo_loss,
            config.ActorConfig(
                strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.1
            ),
        )

    def scores(self) -> list[torch.Tensor]:
        """Log-probabilities and entropies of the next batch, without gradients."""
        with self._on_the_cpu(), self.engine.eval_mode(disable_auto_offload=True):
            output = self.engine.infer_batch(self._data())["model_output"]
        return [output[name].values() for name in ("log_probs", "entropy")]

    def train(self) -> list[float]:
        """Return the losses of the microbatches, and the gradient norm."""
        with self._on_the_cpu(), self.engine.train_mode(disable_auto_offload=True):
            output = self.engine.train_batch(self._data(), self.loss)
            norm = output["metrics"].get("grad_norm", 0.0)  # on one rank of the model only
        return [*output["loss"], float(norm)]

    def _on_the_cpu(self) -> Any:
        """A TensorDict does not know that the GPU's index means the CPU."""
        return mock.patch.object(self.module, "get_device_id", lambda: "cpu")

    def _data(self) -> Any:
        tu = importlib.import_module("verl.utils.tensordict_utils")
        prompt = tiny_gpt.SEQUENCE // 2
        tokens = [next(self.batches)["tokens"][0] for _ in range(SAMPLES)]
        # Samples have lengths of their own, and no padding.
        tokens = [sample[: len(sample) - 2 * number] for number, sample in enumerate(tokens)]
        responses = [sample[prompt:] for sample in tokens]
        log_prob = -math.log(tiny_gpt.VOCABULARY)
        columns = {
            "input_ids": tokens,
            "prompts": [sample[:prompt] for sample in tokens],
            "responses": responses,
            "loss_mask": [torch.ones_like(response) for response in responses],
            "response_mask": [torch.ones_like(response) for response in responses],
            "old_log_probs": [torch.full(response.shape, log_prob) for response in responses],
            "advantages": [torch.linspace(-1, 1, len(response)) for response in responses],
        }
        return tu.get_tensordict(
            {
                "temperature": torch.full((SAMPLES,), 0.7),
                **{
                    name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
                    for name, values in columns.items()
                },
            },
            {
                "calculate_entropy": True,
                "global_batch_size": SAMPLES,
                "use_dynamic_bsz": False,
                "micro_batch_size_per_gpu": 1,
            },
        )
