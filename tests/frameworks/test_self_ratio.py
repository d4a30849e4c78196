"""``self-ratio`` on a stand-in of slime; ``test_real_self_ratio.py`` has frameworks themselves."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.common.messages import Message
from megatron_rl_patches.errors import LogProbsDiffer
from megatron_rl_patches.frameworks import own_options, self_ratio
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")

PATCH = "self-ratio"
#: Without lean-loss, which compiles.
PATCHES = "reentrant-train", "finite-loss"


def warnings_of(run: Callable[[], object], *patches: str, **options: Any) -> list[str]:
    """Return reports that a run warns of, as the first of its process, by default with all repairs."""
    own_options.pop(PATCH, None)
    settings = Settings(**{f"self_ratio_{name}": value for name, value in options.items()})
    with mock.patch.object(Message, "log", autospec=True) as log, applied(*patches, settings=settings):
        run()
    return [str(call.kwargs["report"]) for call in log.call_args_list if call.args[0] is self_ratio._OFF]


def make_job(**config: Any) -> Any:
    """Return a job whose rollouts train with the policy loss, on what the model has scored before."""
    from slime.backends.megatron_utils import loss
    from slime.backends.megatron_utils.model import logits_of

    from tests.frameworks.jobs import MICROBATCHES, SlimeJob
    from tests.references import tiny_gpt

    class PolicyJob(SlimeJob):
        def _rollout(self, steps: int) -> Any:
            generator = torch.Generator().manual_seed(self.steps)
            shape = steps * MICROBATCHES, 1, tiny_gpt.SEQUENCE
            batches = map(self._batch, torch.randint(tiny_gpt.VOCABULARY, shape, generator=generator))
            return SimpleNamespace(reset=lambda: None, batches=iter([*batches]))

        @torch.no_grad()
        def _batch(self, tokens: torch.Tensor) -> dict[str, Any]:
            lengths = {"total_lengths": [tokens.numel()], "response_lengths": [10]}
            batch = {"unconcat_tokens": [tokens[0]], **lengths}
            logits = logits_of(self.model[0].eval(), tokens)
            log_probs = loss.get_log_probs_and_entropy(logits, args=self.args, **batch)[1]["log_probs"]
            batch |= {"loss_masks": [torch.ones(10)], "advantages": [torch.linspace(-1, 1, 10)]}
            name = "rollout_log_probs" if self.args.use_rollout_logprobs else "log_probs"
            return {**batch, name: log_probs}

    def policy_step(data: Any, chunk: Any) -> Any:
        batch = next(data.batches)
        function = partial(loss.loss_function, job.args, batch, MICROBATCHES)
        return logits_of(chunk, batch["unconcat_tokens"][0][None]), function

    job = PolicyJob(config=config)
    options = {"loss_type": "policy_loss", "forward_step_func": policy_step}
    vars(job.args).update(options, rollout_temperature=1.0, eps_clip=0.2, eps_clip_high=0.2)
    return job


@on_ranks(1)
def test_first_steps() -> None:
    clean, unpatched, job = make_job(), make_job(), make_job(hidden_dropout=0.1)
    assert warnings_of(lambda: [clean.train(), clean.train()], *PATCHES, PATCH) == []
    assert own_options[PATCH].startswith("fine: 0 nats on average and 0 at most, 0 of 20 tokens")
    with applied(*PATCHES):
        unpatched.train(), unpatched.train()
    assert clean.checksum() == unpatched.checksum()

    rollouts: Any = lambda: [job.train(), job.train()], *PATCHES, PATCH
    for options, number in (({}, 1), ({"every": True}, 2), ({"limit": 50.0}, 0)):
        reports = warnings_of(*rollouts, **options)
        assert len(reports) == number
        assert all("of 20 tokens" in report and "dropout, at a rate of 0.1" in report for report in reports)
    with pytest.raises(LogProbsDiffer, match="dropout"):
        warnings_of(*rollouts, raises=True)
    job.args.recompute_loss_function = True
    reports = warnings_of(*rollouts, every=True)
    assert len(reports) == 2 and all("of 20 tokens" in report for report in reports)  # each counts once
    # Without scores of the trainer, or with those of another model, nothing is compared.
    for name in ("use_rollout_logprobs", "keep_old_actor"):
        vars(job.args).update({"use_rollout_logprobs": False, name: True})
        assert warnings_of(*rollouts) == [] and PATCH not in own_options
