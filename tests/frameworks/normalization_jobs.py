"""Losses of slime, miles and verl for ``check_normalization``, from checkouts that ``sys.path`` names first.

Ranks import this by its name. Frameworks are imported when the first loss is computed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
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
        import_stubs.prepare(self.paths)


def rollout_loss(
    framework: str, options: dict[str, Any], microbatch: Microbatch, logits: torch.Tensor
) -> Any:
    """``loss_function`` of slime or miles, which their forward steps hand to Megatron.

    A value loss takes the first column of the logits for its values. Distillation is this package's custom
    loss, with the reduction of the framework.
    """
    from tests.frameworks.loss_jobs import LOSSES, LossJob, call
    from tests.real.test_normalization import VOCABULARY

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
    columns = {name: name for name in ("advantages", "values", "returns")} | {
        "log_probs": "old_log_probs",
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
    from tests.frameworks import verl_jobs
    from tests.frameworks.verl_jobs import VERL_ENGINE, actor_config, distillation_loss

    options = dict(options)
    of, nested = options.pop("of", "policy"), options.pop("nested", False)
    engine = verl_jobs.make_engine(
        model, "ValueHead" if of == "value" else "LMHead", context_parallel_size=microbatches[0].split.cp
    )
    losses = importlib.import_module("verl.workers.utils.losses")
    if of == "policy":
        loss = partial(losses.ppo_loss, actor_config(**options))
    elif of == "distillation":
        loss = distillation_loss("forward_kl_topk", 4, **options)
    else:
        critic = importlib.import_module("verl.workers.config").CriticConfig
        own = {"strategy": "megatron", "ppo_micro_batch_size_per_gpu": 1, "cliprange_value": 100.0}
        loss = partial(losses.value_loss, critic(**own, **options))
    run_alone = partial(_isolated, model[0].module.forward, 1 if of == "value" else None)
    batch_of = partial(_verl_batch, nested=nested, is_distillation=of == "distillation")
    cut = partial(_cut_as_given, microbatches, batch_of)
    with (
        verl_jobs.on_the_cpu(),
        mock.patch.object(importlib.import_module(VERL_ENGINE), "prepare_micro_batches", cut),
        mock.patch.object(model[0].module, "forward", run_alone),
    ):
        engine.forward_backward_batch(batch_of(microbatches), loss)


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
    from tests.frameworks.verl_jobs import tensordict

    samples = [sample for microbatch in microbatches for sample in microbatch.samples]
    lengths = [len(sample["loss_mask"]) for sample in samples]
    longest = max(len(sample["loss_mask"]) for sample in microbatches[0].batch)
    tokens = [sample["tokens"] for sample in samples]
    jagged = {
        "input_ids": tokens,
        "prompts": [sample[:-length] for sample, length in zip(tokens, lengths, strict=True)],
        "responses": [sample[-length:] for sample, length in zip(tokens, lengths, strict=True)],
    }
    if is_distillation:
        jagged["teacher_logprobs"] = [_of_all_tokens(sample, "teacher_log_probs") for sample in samples]
        jagged["teacher_ids"] = [_of_all_tokens(sample, "teacher_ids").int() for sample in samples]
    names = ("loss_mask", "old_log_probs", "advantages", "values", "returns")
    columns = {name: [sample[name] for sample in samples] for name in names}
    columns["response_mask"] = columns["loss_mask"]
    numbers = {
        "calculate_entropy": False,
        "use_dynamic_bsz": False,
        "distillation_use_topk": is_distillation,
        "distillation_only": is_distillation,
        "global_batch_size": len(microbatches[0].batch),
    }
    temperature = torch.ones(len(samples))
    if nested:
        return tensordict(jagged | columns, numbers, temperature=temperature)
    padded = {
        name: torch.stack([torch.nn.functional.pad(value, (0, longest - len(value))) for value in values])
        for name, values in columns.items()
    }
    numbers["max_response_len"] = longest
    return tensordict(jagged, numbers, temperature=temperature, **padded)


def _of_all_tokens(sample: Any, name: str) -> torch.Tensor:
    """Return what is known of response tokens at the tokens before them, as verl's teacher server does."""
    value, total = sample[name], len(sample["tokens"])
    whole = value.new_zeros(total, *value.shape[1:])
    whole[total - len(value) - 1 : -1] = value
    return whole
