"""Losses of slime and miles have the same gradient in every split, as ``docs/testing.md`` says."""

import importlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_rl_patches.testing import Microbatch, check_normalization
from tests.frameworks import import_stubs
from tests.real.test_normalization import VOCABULARY, global_batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.frameworks,
    pytest.mark.timeout(900),  # up to six starts of ranks, each of which imports a framework
    pytest.mark.runs("losses", ranks=[1, 2]),
]

ROLLOUT: dict[str, dict[str, Any]] = {
    "policy": {"loss_type": "policy_loss"},
    "value": {"loss_type": "value_loss"},
    "distillation": {
        "loss_type": "custom_loss",
        "custom_loss_function_path": "megatron_rl_patches.frameworks.distillation_loss.opd_loss",
    },
}


@dataclass
class RolloutLoss:
    """``loss_function`` of slime or miles, which their forward steps hand to Megatron.

    A rank finds the checkouts as it unpickles this. A value loss takes the first column of the logits for its
    values. Distillation is this package's custom loss, with the reduction of the framework.
    """

    framework: str
    paths: list[str]
    options: dict[str, Any]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # After the import of this module, as checkouts have packages called "tests", and before Megatron's.
        import_stubs.prepare(self.paths)

    def __call__(self, microbatch: Microbatch, logits: torch.Tensor) -> Any:
        from tests.frameworks.loss_jobs import LOSSES, LossJob, call

        masks = [sample["loss_mask"] for sample in microbatch.samples]
        samples = len(microbatch.batch)
        job = LossJob(
            self.framework,
            totals=tuple(len(sample["tokens"]) for sample in microbatch.samples),
            responses=tuple(map(len, masks)),
            vocabulary=VOCABULARY,
            calculate_per_token_loss=microbatch.calculate_per_token_loss,
            global_batch_size=samples,
            value_clip=100.0,
            **self.options,
        )
        vars(job.args).update(opd_divergence="forward_kl", opd_beta=0.5)  # of the patch, not of the parser
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
            **{
                name: job.local([sample[key] for sample in microbatch.samples])
                for name, key in columns.items()
            },
        }
        return call(
            importlib.import_module(LOSSES[self.framework]).loss_function,
            args=job.args,
            batch=batch,
            num_microbatches=microbatch.num_microbatches,
            step_global_batch_size=samples,
            num_rollouts=samples,
            logits=logits[..., :1] if job.args.loss_type == "value_loss" else logits,
            apply_megatron_loss_scaling=True,
        )


@pytest.mark.parametrize("of", ROLLOUT)
@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_rollout_losses(framework: str, of: str, paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # frameworks would compile small functions
    function = RolloutLoss(framework, paths, ROLLOUT[of])
    for setting in (False, True):
        report = check_normalization(function, global_batch(), calculate_per_token_loss=setting)
        # miles rounds gradients of logits to bfloat16, by Megatron's fused cross entropy.
        assert max(report.differences.values()) < 1e-2, report
