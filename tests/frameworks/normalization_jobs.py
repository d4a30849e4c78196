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
    """``loss_function`` of slime or miles, which their forward steps hand to Megatron.

    A value loss takes the first column of the logits for its values. Distillation is this package's custom
    loss, with the reduction of the framework.
    """
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
        value_clip=100.0,
        opd_divergence="forward_kl",
        opd_beta=0.5,
        **options,
    )
    columns = {
        "advantages": "advantages",
        "log_probs": "old_log_probs",
        "values": "values",
        "returns": "returns",
        "teacher_topk_indices": "teacher_ids",
        "teacher_topk_log_probs": "teacher_log_probs",
        "teacher_topk_tail": "teacher_tail",
    }
    denominators = [mask.sum().float() for mask in masks]
    batch = {
        "unconcat_tokens": [sample["tokens"] for sample in microbatch.samples],
        "total_lengths": list(job.totals),
        "response_lengths": list(job.responses),
        "loss_masks": masks,
        "rollout_mask_sums": denominators,
        "group_mask_sums": denominators,
        **{name: job.local([sample[key] for sample in microbatch.samples]) for name, key in columns.items()},
    }
    return call(
        importlib.import_module(LOSSES[framework]).loss_function,
        args=job.args,
        batch=batch,
        num_microbatches=microbatch.num_microbatches,
        step_global_batch_size=samples,
        num_rollouts=samples,
        logits=logits[..., :1] if job.args.loss_type == "value_loss" else logits,
        apply_megatron_loss_scaling=True,
    )


def verl_train_step(
    framework: str, options: dict[str, Any], model: list[Any], microbatches: list[Microbatch]
) -> None:
    """``forward_backward_batch`` of verl's Megatron engine.

    Options:
        of: the loss, which is ``"policy"``, ``"value"`` or ``"distillation"``. The first column of the logits
            stands for a value head.
        nested: masks, advantages and so on are nested tensors.
        others: those of verl's config of the actor or critic.
    """
    from megatron.core.utils import get_model_config

    from tests.frameworks.loss_jobs import VERL_ENGINE, Arguments

    options = dict(options)
    of, nested = options.pop("of", "policy"), options.pop("nested", False)
    module = importlib.import_module(VERL_ENGINE)
    config = importlib.import_module("verl.workers.config")
    engine = object.__new__(
        module.MegatronEngineWithValueHead if of == "value" else module.MegatronEngineWithLMHead
    )
    engine.module, engine.tf_config = model, get_model_config(model[0])
    split = microbatches[0].split
    engine.engine_config = config.McoreEngineConfig(context_parallel_size=split.cp)
    engine.enable_routing_replay = False
    engine.model_config = SimpleNamespace(
        mtp=Arguments(),
        hf_config=SimpleNamespace(architectures=["GPT"]),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    loss = _verl_loss(of, {"strategy": "megatron", "ppo_micro_batch_size_per_gpu": 1, **options})
    run_alone = partial(_isolated, model[0].module.forward, 1 if of == "value" else None)
    batch_of = partial(_verl_batch, nested=nested, is_distillation=of == "distillation")
    with (
        mock.patch.object(module, "get_device_id", lambda: "cpu"),
        mock.patch.object(module, "prepare_micro_batches", partial(_cut_as_given, microbatches, batch_of)),
        mock.patch.object(model[0].module, "forward", run_alone),
    ):
        engine.forward_backward_batch(batch_of(microbatches), loss)


def _verl_loss(of: str, options: dict[str, Any]) -> Callable[..., Any]:
    config = importlib.import_module("verl.workers.config")
    losses = importlib.import_module("verl.workers.utils.losses")
    if of == "value":
        return partial(losses.value_loss, config.CriticConfig(cliprange_value=100.0, **options))
    actor = config.ActorConfig(rollout_n=1, entropy_coeff=0.0, **options)
    if of == "policy":
        return partial(losses.ppo_loss, actor)
    distillation = config.DistillationConfig(
        distillation_loss=config.DistillationLossConfig(
            loss_mode="forward_kl_topk",
            topk=4,
            use_task_rewards=False,
            use_policy_gradient=False,
            loss_max_clamp=None,
            log_prob_min_clamp=None,
        )
    )
    loss = importlib.import_module("verl.trainer.distillation.losses").distillation_ppo_loss
    return partial(loss, config=actor, distillation_config=distillation)


def _cut_as_given(
    microbatches: list[Microbatch], batch_of: Callable[..., Any], data: Any, **unused: Any
) -> tuple[list[Any], None]:
    """Return verl's batches of these microbatches, with the numbers that its engine has given the whole."""
    tu = importlib.import_module("verl.utils.tensordict_utils")
    pieces = [batch_of([microbatch]) for microbatch in microbatches]
    for piece in pieces:
        names = set(data.keys()) - set(piece.keys())
        tu.assign_non_tensor(piece, **{name: tu.get_non_tensor_data(data, name, None) for name in names})
    return pieces, None


def _isolated(
    forward: Any, columns: int | None, input_ids: torch.Tensor, packed_seq_params: Any, **unused: Any
) -> torch.Tensor:
    """Run each packed sample alone, as packed attention needs TransformerEngine; return the first columns."""
    from megatron.core import parallel_state

    from megatron_rl_patches.testing import TinyModel

    cp = parallel_state.get_context_parallel_world_size()
    logits = []
    for start, end in pairwise(packed_seq_params.cu_seqlens_q_padded.tolist()):
        positions_s = TinyModel(cp=cp, seq_length=end - start).positions()
        mask_ss = torch.ones(1, 1, end - start, end - start, dtype=torch.bool).triu(1)
        logits.append(forward(input_ids[:, start // cp : end // cp], positions_s[None], mask_ss))
    return torch.cat(logits, dim=1)[..., :columns]


def _verl_batch(microbatches: list[Microbatch], *, nested: bool, is_distillation: bool) -> Any:
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
    names |= {name: name for name in ("old_log_probs", "advantages", "values", "returns")}
    columns = {name: [sample[key] for sample in samples] for name, key in names.items()}
    if is_distillation:
        unpadded["teacher_logprobs"] = [_of_all_tokens(sample, "teacher_log_probs") for sample in samples]
        unpadded["teacher_ids"] = [_of_all_tokens(sample, "teacher_ids").int() for sample in samples]
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
    numbers |= {"distillation_use_topk": is_distillation, "distillation_only": is_distillation}
    numbers["global_batch_size"] = len(microbatches[0].batch)
    if not nested:
        numbers["max_response_len"] = longest
    return tu.get_tensordict({"temperature": torch.ones(len(samples)), **jagged, **padded}, numbers)


def _of_all_tokens(sample: Any, name: str) -> torch.Tensor:
    """Return what is known of response tokens at the tokens before them, as verl's teacher server does."""
    value, total = sample[name], len(sample["tokens"])
    whole = value.new_zeros(total, *value.shape[1:])
    whole[total - len(value) - 1 : -1] = value
    return whole
