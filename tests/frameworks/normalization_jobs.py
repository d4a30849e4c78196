"""Losses of slime, miles and verl for ``check_normalization``, from checkouts that ``sys.path`` names first.

Ranks import this by its name. Frameworks are imported when the first loss is computed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron_rl_patches.testing import Microbatch
from tests.frameworks import import_stubs


@dataclass
class OfFramework:
    """A function that gets the framework and options first; a rank finds the checkouts as it unpickles it."""

    function: Callable[..., Any]
    framework: str
    paths: list[str]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *arguments: Any) -> Any:
        return self.function(self.framework, self.options, *arguments)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # After the import of this module, as checkouts have packages called "tests", and before Megatron's.
        importlib.import_module("torch._dynamo")  # tensordict imports it, and it fails with a stub of triton.
        sys.path[:0] = self.paths
        import_stubs.install(
            [*import_stubs.PACKAGES, "accelerate", "cloudpickle", "datasets", "pandas", "peft"]
        )


def rollout_loss(
    framework: str, options: dict[str, Any], microbatch: Microbatch, logits: torch.Tensor
) -> Any:
    """``loss_function`` of slime or miles, which their forward steps hand to Megatron."""
    from tests.frameworks.loss_jobs import LOSSES, LossJob, call
    from tests.real.normalization_losses import VOCABULARY

    masks = [sample["loss_mask"] for sample in microbatch.samples]
    samples = len(microbatch.batch)
    job = LossJob(
        framework,
        totals=tuple(len(sample["tokens"]) for sample in microbatch.samples),
        responses=tuple(map(len, masks)),
        vocabulary=VOCABULARY,
        calculate_per_token_loss=microbatch.calculate_per_token_loss,
        global_batch_size=samples,
        **options,
    )
    tensors = {
        name: job.local([sample[name] for sample in microbatch.samples])
        for name in ("advantages", "old_log_probs")
    }
    denominators = [mask.sum().float() for mask in masks]
    batch = {
        "unconcat_tokens": [sample["tokens"] for sample in microbatch.samples],
        "total_lengths": list(job.totals),
        "response_lengths": list(job.responses),
        "loss_masks": masks,
        "rollout_mask_sums": denominators,
        "group_mask_sums": denominators,
        "advantages": tensors["advantages"],
        "log_probs": tensors["old_log_probs"],
    }
    return call(
        importlib.import_module(LOSSES[framework]).loss_function,
        args=job.args,
        batch=batch,
        num_microbatches=microbatch.num_microbatches,
        step_global_batch_size=samples,
        num_rollouts=samples,
        logits=logits,
        apply_megatron_loss_scaling=True,
    )


def verl_train_step(
    framework: str, options: dict[str, Any], model: list[Any], microbatches: list[Microbatch]
) -> None:
    """``forward_backward_batch`` of verl's Megatron engine with its PPO loss."""
    from megatron.core.utils import get_model_config

    from tests.frameworks.loss_jobs import VERL_ENGINE, Arguments

    options = dict(options)
    nested = options.pop("nested", False)
    module = importlib.import_module(VERL_ENGINE)
    config = importlib.import_module("verl.workers.config")
    engine = object.__new__(module.MegatronEngineWithLMHead)
    engine.module, engine.tf_config = model, get_model_config(model[0])
    split = microbatches[0].split
    engine.engine_config = config.McoreEngineConfig(context_parallel_size=split.cp)
    engine.enable_routing_replay = False
    engine.model_config = SimpleNamespace(
        mtp=Arguments(),
        hf_config=SimpleNamespace(architectures=["GPT"]),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    actor = config.ActorConfig(
        strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.0, **options
    )
    ppo_loss = importlib.import_module("verl.workers.utils.losses").ppo_loss
    with (
        mock.patch.object(module, "get_device_id", lambda: "cpu"),
        mock.patch.object(module, "prepare_micro_batches", partial(_cut_as_given, microbatches, nested)),
        mock.patch.object(model[0].module, "forward", partial(_isolated, model[0].module.forward)),
    ):
        engine.forward_backward_batch(_verl_batch(microbatches, nested=nested), partial(ppo_loss, actor))


def _cut_as_given(
    microbatches: list[Microbatch], nested: bool, data: Any, **unused: Any
) -> tuple[list[Any], None]:
    """Return verl's batches of these microbatches, with the numbers that its engine has given the whole."""
    tu = importlib.import_module("verl.utils.tensordict_utils")
    pieces = [_verl_batch([microbatch], nested=nested) for microbatch in microbatches]
    for piece in pieces:
        names = set(data.keys()) - set(piece.keys())
        tu.assign_non_tensor(piece, **{name: tu.get_non_tensor_data(data, name, None) for name in names})
    return pieces, None


def _isolated(forward: Any, input_ids: torch.Tensor, packed_seq_params: Any, **unused: Any) -> torch.Tensor:
    """Run each packed sample alone, as packed attention needs TransformerEngine."""
    from megatron.core import parallel_state

    from megatron_rl_patches.testing import TinyModel

    cp = parallel_state.get_context_parallel_world_size()
    logits = []
    for start, end in pairwise(packed_seq_params.cu_seqlens_q_padded.tolist()):
        positions_s = TinyModel(cp=cp, seq_length=end - start).positions()
        mask_ss = torch.ones(1, 1, end - start, end - start, dtype=torch.bool).triu(1)
        logits.append(forward(input_ids[:, start // cp : end // cp], positions_s[None], mask_ss))
    return torch.cat(logits, dim=1)


def _verl_batch(microbatches: list[Microbatch], *, nested: bool) -> Any:
    """Samples without padding; masks and log-probs padded to the longest response, as ray_trainer.py does.

    ``nested``: these have no padding either.
    """
    tu = importlib.import_module("verl.utils.tensordict_utils")
    samples = [sample for microbatch in microbatches for sample in microbatch.samples]
    longest = max(len(sample["loss_mask"]) for sample in microbatches[0].batch)
    tokens = [(sample["tokens"], len(sample["loss_mask"])) for sample in samples]
    unpadded = {
        "input_ids": [sample["tokens"] for sample in samples],
        "prompts": [sample[:-response] for sample, response in tokens],
        "responses": [sample[-response:] for sample, response in tokens],
    }
    names = {"loss_mask": "loss_mask", "response_mask": "loss_mask"}
    names |= {"old_log_probs": "old_log_probs", "advantages": "advantages"}
    columns = {name: [sample[key] for sample in samples] for name, key in names.items()}
    padded = {}
    if nested:
        unpadded |= columns
    else:
        padded = {
            name: torch.stack([torch.nn.functional.pad(value, (0, longest - len(value))) for value in values])
            for name, values in columns.items()
        }
    jagged = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged) for name, values in unpadded.items()
    }
    numbers = {"calculate_entropy": False, "use_dynamic_bsz": False}
    numbers["global_batch_size"] = len(microbatches[0].batch)
    if not nested:
        numbers["max_response_len"] = longest
    return tu.get_tensordict({"temperature": torch.ones(len(samples)), **jagged, **padded}, numbers)


def reference_loss(
    framework: str, options: dict[str, Any], microbatch: Microbatch, logits: torch.Tensor
) -> Any:
    """PPO's loss of this package, in which it is known what a token weighs."""
    from megatron_rl_patches.losses import PolicyOptions
    from tests.real.normalization_losses import of_package

    return of_package(PolicyOptions(**options), microbatch, logits)


def plain_loss(framework: str, options: dict[str, Any], *arguments: Any) -> Any:
    """A function of :mod:`tests.real.normalization_losses`."""
    losses = importlib.import_module("tests.real.normalization_losses")
    return getattr(losses, options["name"])(*arguments)
