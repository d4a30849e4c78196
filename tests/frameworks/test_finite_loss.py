"""``finite-loss`` on a stand-in; ``test_real_lean_loss.py`` checks the same of frameworks themselves.

Unpatched, a masked token of which some number is not finite makes gradients NaN. Patched, the loss and the
gradient are bit for bit those of the batch in which that token is as good as the others.
"""

import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatron_rl_patches import applied, apply
from tests.frameworks.rollouts import states_of
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")

PATCH = "finite-loss"
KL = {"use_kl_loss": True, "kl_loss_type": "low_var_kl"}
KINDS = ("k1", "k2", "k3")
#: For all of them.
OPTIONS = {"kl_loss_coef": 0.1, "opsm_delta": 1e-4, "tis_clip": 2.0, "tis_clip_low": 0.0}
#: Options of the policy loss, by what they are about.
LOSSES: dict[str, dict[str, Any]] = {
    "policy gradient alone": {},
    "with the entropy": {"entropy_coef": 0.1},
    "KL with the coefficient 0": {**KL, "kl_loss_coef": 0.0},
    "low_var_kl": KL,
    **{kind: {**KL, "kl_loss_type": kind} for kind in KINDS},
    "unbiased KL": {**KL, "use_unbiased_kl": True, "entropy_coef": 0.1},
    **{f"unbiased {kind}": {**KL, "kl_loss_type": kind, "use_unbiased_kl": True} for kind in KINDS},
    "GSPO": {"advantage_estimator": "gspo", **KL},
    "CISPO": {"advantage_estimator": "cispo", **KL},
    "OPSM, dual clip": {"use_opsm": True, "eps_clip_c": 3.0},
    "TIS": {"use_tis": True, **KL, "use_unbiased_kl": True},
    "old policy of the rollout": {"use_rollout_logprobs": True, **KL, "use_unbiased_kl": True},
}
#: What the stand-in has.
IN_SHORT = ("with the entropy", "KL with the coefficient 0", "low_var_kl", "unbiased k3", "TIS")
NOT_COMPARABLE = (math.inf, -math.inf, math.nan, 101.0, -101.0, -1e30)
SCORES = ("log_probs", "ref_log_probs", "rollout_log_probs")
#: What may be wrong with masked tokens: values of tensors of the batch.
SPOILT = [
    *({name: value} for name, value in itertools.product(SCORES, NOT_COMPARABLE)),
    *({"advantages": value} for value in (math.inf, math.nan)),
]
SPOILT_TOGETHER = [
    {**dict(zip(SCORES, values, strict=True)), "advantages": math.nan}
    for values in zip(NOT_COMPARABLE, NOT_COMPARABLE[1:], NOT_COMPARABLE[2:], strict=False)
]
#: Response tokens: sample, place.
MASKED, COUNTED = [(0, 1), (1, 5), (2, 0)], [(1, 2)]
COUNTED_SPOILT = dict(zip(SCORES, (-500.0, 500.0, -500.0), strict=True))


def make_job(framework: str, **options: Any) -> Any:
    from tests.frameworks.loss_jobs import LossJob

    return LossJob(framework, **{**OPTIONS, **options})


def microbatch(job: Any) -> dict[str, Any]:
    """Return a batch with masked tokens, a sample that is wholly masked, and all log-probs."""
    batch: dict[str, Any] = job.batch()
    masks = [mask.clone() for mask in batch["loss_masks"]]
    masks[0][1] = masks[1][5] = 0
    masks[2][:] = 0
    batch["loss_masks"] = masks
    batch["rollout_mask_sums"] = [mask.sum().float() for mask in masks]
    batch["ref_log_probs"] = [values - 0.2 for values in batch["log_probs"]]
    batch["rollout_log_probs"] = [values + 0.1 for values in batch["log_probs"]]
    return batch


def spoilt(job: Any, values: dict[str, float], places: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the batch with other values at response tokens, on the ranks that have them."""
    batch = microbatch(job)
    marks = [torch.zeros(length) for length in job.responses]
    for sample, place in places:
        marks[sample][place] = 1
    for name, value in values.items():
        parts = zip(job.local(marks), batch[name], strict=True)
        batch[name] = [torch.where(mark == 1, value, part) for mark, part in parts]
    return batch


def is_finite(run: dict[str, Any]) -> bool:
    return bool(run["gradient"].isfinite().all() and run["loss"].isfinite())


def is_same(run: dict[str, Any], other: dict[str, Any]) -> bool:
    """Bit for bit, metrics included."""
    same = all(torch.equal(run[name], other[name]) for name in ("gradient", "loss"))
    return same and run["metrics"] == other["metrics"]


def check_masked_tokens(
    framework: str, losses: dict[str, Any] = LOSSES, spoilt_by: Any = SPOILT_TOGETHER, **layout: Any
) -> int:
    """Check all losses and all values of masked tokens; return how many were not finite without the patch."""
    jobs = [make_job(framework, **layout, **options) for options in losses.values()]
    batches = [[spoilt(job, values, MASKED) for values in spoilt_by] for job in jobs]
    unpatched = [job.loss(batch=microbatch(job)) for job in jobs]
    poisoned = sum(
        not is_finite(job.loss(batch=dict(batch)))
        for job, of_job in zip(jobs, batches, strict=True)
        for batch in of_job
    )
    with applied(PATCH):
        for label, job, of_job, expected in zip(losses, jobs, batches, unpatched, strict=True):
            for batch in [microbatch(job), *of_job]:
                assert is_same(job.loss(batch=batch), expected), label
    return poisoned


def check_policy(
    framework: str, with_lean_loss: bool, losses: dict[str, Any] = LOSSES, **layout: Any
) -> None:
    """The policy itself gives masked tokens a log-prob of -101 or of minus infinity.

    slime's own entropy of logits that are minus infinity has no gradient but NaN; that of ``lean-loss`` has.
    """
    cases = []
    with applied("lean-loss") if with_lean_loss else nullcontext():
        for label, options in losses.items():
            for value in (
                (-101.0, -math.inf) if with_lean_loss or "entropy_coef" not in options else (-101.0,)
            ):
                job = make_job(framework, **layout, **options)
                batch = microbatch(job)
                cases.append(((label, value), job, batch, job.loss(batch=batch)))
                ends = torch.tensor(job.totals).cumsum(0).tolist()
                for i, place in MASKED:
                    row = ends[i] - job.responses[i] - 1 + place
                    job.whole[row, job.tokens[i][place - job.responses[i]]] = value
        with applied(PATCH):
            for case, job, batch, clean in cases:
                run = job.loss(batch=batch)
                assert torch.equal(run["gradient"], clean["gradient"]), case
                if not layout.get("allgather_cp"):  # slime then adds the sum of all logits, times zero
                    assert torch.equal(run["loss"], clean["loss"]), case


def check_counted_tokens(framework: str, losses: dict[str, Any] = LOSSES, **layout: Any) -> None:
    """A ratio that overflows at a token that counts is bounded there, and changes nothing elsewhere."""
    jobs = {label: make_job(framework, **layout, **options) for label, options in losses.items()}
    clean = {label: job.loss(batch=microbatch(job)) for label, job in jobs.items()}
    with applied(PATCH):
        for (label, job), (name, value) in itertools.product(jobs.items(), COUNTED_SPOILT.items()):
            run = job.loss(batch=spoilt(job, {name: value}, COUNTED))
            assert is_finite(run), (label, name)
            if label not in ("GSPO", "OPSM, dual clip"):  # in which tokens share a ratio or a mask
                changed = (run["gradient"] != clean[label]["gradient"]).any(-1)
                assert changed.sum() <= len(COUNTED), (label, name)


def check_metrics(
    framework: str, losses: dict[str, Any] = LOSSES, spoils_entropy: bool = False, **layout: Any
) -> None:
    """Each number that a loss reports is the framework's own, whichever patch computes it again.

    With ``spoils_entropy`` the framework reads logits that it has overwritten, where it trains on no entropy.
    """
    for label, options in losses.items():
        job = make_job(framework, **layout, **options)
        expected, entropy = job.loss(batch=microbatch(job))["metrics"], None
        if spoils_entropy and not job.args.entropy_coef:
            job = make_job(framework, **layout, **options)
            entropy = job.loss(batch=microbatch(job), dense=True)["metrics"]["entropy_loss"]
        for patches in ([PATCH], ["lean-loss"], ["lean-loss", PATCH]):
            if entropy is not None and "lean-loss" in patches:
                expected["entropy_loss"] = entropy
            with applied(*patches):
                job = make_job(framework, deferred=len(patches) == 2, **layout, **options)
                metrics = job.loss(batch=microbatch(job))["metrics"]
            assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6), (label, patches)


def check_value_loss(framework: str) -> None:
    """Returns and old values of masked tokens may be anything."""
    job = make_job(framework, vocabulary=1, loss_type="value_loss", value_clip=0.2)

    def run(spoilt_value: float | None = None) -> dict[str, Any]:
        batch = microbatch(job) | {name: [w.clone() for w in job.weights] for name in ("returns", "values")}
        for name, (sample, place) in itertools.product(("returns", "values"), MASKED):
            if spoilt_value is not None:
                batch[name][sample][place] = spoilt_value
        return job.loss(batch=batch)

    clean = run()
    for value in (math.inf, math.nan):
        assert not is_finite(run(value))
        with applied(PATCH):
            assert is_same(run(value), clean)
            assert is_same(run(), clean)


@on_ranks(1)
def test_tokens() -> None:
    from tests.frameworks.loss_jobs import initialize

    initialize()
    losses = {name: LOSSES[name] for name in IN_SHORT}
    assert check_masked_tokens("slime", losses) > 5
    check_policy("slime", True, losses)
    check_counted_tokens("slime", losses)
    check_metrics("slime", losses)
    with applied("lean-loss"):
        check_masked_tokens("slime", {"TIS": LOSSES["TIS"]}, deferred=True, recompute_loss_function=True)
    check_value_loss("slime")
    apply(PATCH)
    assert set(states_of("slime", patch=PATCH).values()) == {"applied"}
