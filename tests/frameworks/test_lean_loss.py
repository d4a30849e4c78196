"""``lean-loss`` at the sites of the frameworks, on stand-ins and real megatron-core.

Every test runs in processes of its own. Unpatched, the stand-ins keep copies of the logits, lose gradients
under reentrant checkpointing, or hang; patched, they return the same things in the same shapes, with the
values and gradients of a dense float64 reference. ``test_real_lean_loss.py`` and ``test_real_verl.py`` check
the same of the frameworks themselves.
"""

import importlib
import inspect
import itertools
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron_rl_patches import applied, apply, revert, status
from megatron_rl_patches.engine.call import Call
from megatron_rl_patches.frameworks import slime_losses
from tests.device_thread import device_thread
from tests.frameworks.rollouts import states_of
from tests.lab.walks import get_parallel_state  # noqa: F401  # read by name, beside a framework's functions
from tests.ranks import on_ranks
from tests.references.live_bytes import live_bytes

pytestmark = pytest.mark.usefixtures("stand_ins_on_the_path")

PATCH = "lean-loss"
LOSS, UTILS = "slime.backends.megatron_utils.loss", "slime.utils.ppo_utils"
BFLOAT16 = 4e-3  # what Megatron's fused cross entropy rounds gradients to


def check_scores(framework: str, masked: bool = False, **options: Any) -> float:
    """Compare a framework's scores and gradients with the dense ones; return the error of unpatched ones.

    ``masked``: each token was sampled from a part of the vocabulary.
    """
    from tests.frameworks.loss_jobs import LossJob, distance

    worst = 0.0
    for entropy_coef, temperature in itertools.product((0.0, 0.1), (1.0, 0.7)):
        way = {"entropy_coef": entropy_coef, "rollout_temperature": temperature, "masked": masked, **options}
        way |= {"rollout_top_p": 0.9} if masked else {}
        apply(PATCH)
        patched, deferred = (LossJob(framework, deferred=kind, **way).result() for kind in (False, True))
        assert set(states_of(framework, patch=PATCH).values()) <= {"applied", "not needed", "waiting"}
        revert(PATCH)
        job = LossJob(framework, **way)
        unpatched, dense = job.result(), job.dense(temperature)
        for run in (patched, deferred):
            assert all(distance(run[key], dense[key]) < 1e-6 for key in dense), way
            assert run["returned"] == unpatched["returned"] and not run["made"]
            assert run["requires_grad"][1] == (entropy_coef != 0)
        if masked:
            without_mask = LossJob(framework, **{**way, "masked": False}).dense(temperature)
            assert (dense["log_probs"] - without_mask["log_probs"]).abs().max() > 0.1
        else:
            assert all(distance(patched[key], unpatched[key], 1.0) < 1e-5 for key in ("log_probs", "entropy"))
        worst = max(worst, *(distance(unpatched[key], dense[key]) for key in dense))
    return worst


def check_policy_loss(framework: str, tolerance: float = 1e-5, **options: Any) -> None:
    """Compare a framework's policy loss and its gradient with the dense ones, recomputed or not."""
    from tests.frameworks.loss_jobs import LossJob, distance

    for entropy_coef in (0.0, 0.1):
        options["entropy_coef"] = entropy_coef
        recomputing = {**options, "recompute_loss_function": True}
        dense = LossJob(framework, **options).loss(dense=True)
        unpatched = LossJob(framework, **options).loss()
        assert distance(unpatched["loss"], dense["loss"]) < 1e-5
        assert distance(unpatched["gradient"], dense["gradient"]) < BFLOAT16
        with warnings.catch_warnings(action="ignore"):  # that use_reentrant is not given
            assert LossJob(framework, **recomputing).loss()["returned"] == unpatched["returned"]
        apply(PATCH)
        for deferred in (False, True):
            for given in (options, recomputing):
                job = LossJob(framework, deferred=deferred, **given)
                run = job.loss()
                assert not run["made"]
                assert run["returned"] == unpatched["returned"]
                assert max(distance(run[key], dense[key]) for key in ("loss", "gradient")) < tolerance
                for key, value in dense["metrics"].items():
                    assert abs(run["metrics"][key] - value) < 1e-5
                assert bool(job.args.recompute_loss_function) is (given is recomputing)
        revert(PATCH)


@pytest.mark.parametrize(("order", "tp"), [("before", 2), ("after", 1)])
@on_ranks(lambda tp: tp)
def test_values_and_gradients(order: str, tp: int) -> None:
    from tests.frameworks.loss_jobs import LOSSES, initialize

    initialize(tp=tp)
    if order == "before":
        apply(PATCH)
    homes = [importlib.import_module(name) for name in (LOSSES["slime"], UTILS)] * (order == "after")
    names = [dict(vars(home)) for home in homes]
    assert 1e-4 < check_scores("slime") < BFLOAT16
    assert [dict(vars(home)) for home in homes] == names


@on_ranks(1)
def test_policy_loss() -> None:
    from megatron.core import parallel_state

    from tests.frameworks.loss_jobs import LOSSES, LossJob, distance, initialize

    initialize()
    check_policy_loss("slime", tolerance=1e-6)
    apply(PATCH)
    recomputing, module = {"recompute_loss_function": True}, importlib.import_module(LOSSES["slime"])
    own = module.policy_loss_function
    with mock.patch.object(module, "policy_loss_function", wraps=own) as policy_loss:
        run = LossJob("slime", **recomputing).loss()
        assert policy_loss.call_count == 2
        for deferred in (False, True):
            job = LossJob("slime", deferred=deferred, **recomputing)
            with device_thread():  # where CUDA recomputes
                again = job.loss()
            assert distance(again["gradient"], run["gradient"]) < 1e-6
    assert policy_loss.call_count == 6

    # Candidates of a top-k loss are scored, too.
    logits = LossJob("slime").logits()[0].detach()
    for candidate in (3, 5, 7):
        tokens, expected = torch.full((len(logits),), candidate), logits.log_softmax(-1)[:, [candidate]]
        log_probs = importlib.import_module(UTILS).compute_log_probs(
            logits, tokens, parallel_state.get_tensor_model_parallel_group()
        )
        assert (log_probs - expected).abs().max() < 1e-6


@on_ranks(2)
def test_all_gather_cp() -> None:
    from tests.frameworks.loss_jobs import LossJob, distance, initialize

    initialize(cp=2)
    layouts = ({"totals": (24,), "responses": (6,)}, {})  # in the second one each rank lacks a sample
    # Unpatched, the rank that has the response has no backward, and the other one waits for it.
    without_response = torch.distributed.get_rank() == 0
    unpatched = LossJob("slime", allgather_cp=True, **layouts[0]).result(backward=False)
    assert unpatched["requires_grad"] == [True, without_response]
    apply(PATCH)
    for layout, entropy_coef in itertools.product(layouts, (0.0, 0.1)):
        job = LossJob("slime", allgather_cp=True, entropy_coef=entropy_coef, **layout)
        result, dense = job.result(), job.dense()
        assert all(distance(result[key], dense[key]) < 1e-6 for key in dense)
        assert result["requires_grad"] == [True, entropy_coef != 0]


# --- the responses of a microbatch, and forks that change what is computed


def scores_of(job: Any, logits: torch.Tensor, **padding: Any) -> list[torch.Tensor]:
    """Return the log-probs of each response."""
    return job.scored(logits, **padding)[1]["log_probs"]  # type: ignore[no-any-return]


@on_ranks(1)
def test_scores_of_a_microbatch() -> None:
    from megatron_rl_patches.frameworks.response_scores import forms
    from tests.frameworks.loss_jobs import LossJob, distance, initialize

    initialize()
    large = LossJob("slime", totals=(33,) * 8, responses=(32,) * 8, vocabulary=8192)
    logits = large.logits()

    def peak() -> float:
        """Return that of all responses beyond the logits, in units of the logits."""
        gradient = live_bytes(lambda: torch.autograd.grad(torch.cat(scores_of(large, logits)).sum(), logits))
        return gradient.peak / logits.nbytes

    assert peak() > 2
    # The first token of a response without a prompt is predicted by no row, and no layout has such lengths.
    without_prompt = LossJob("slime", responses=(4, 6, 4))
    expected = without_prompt.result()
    apply("finite-loss", PATCH)  # inside, it would keep the framework's function from being replaced
    assert peak() < 1.2
    assert len(forms) == 1 and all(forms.values())
    with torch.inference_mode():
        assert LossJob("slime").result(backward=False)["requires_grad"] == [False, False]
    scores = scores_of(large, logits)
    scores[0].mul_(2)  # as a caller may
    torch.cat(scores).sum().backward()

    forms.clear()
    assert distance(without_prompt.result()["log_probs"], expected["log_probs"]) < 1e-5
    # A kernel that does what the patch does reads memory, which deferred logits do not have.
    job = LossJob("slime", deferred=True, log_probs_backend="fused")
    assert job.result()["made"]
    assert "not needed with --log-probs-backend fused" in [site.detail for site in status()]
    assert not forms


def same(values: Any) -> Any:
    return values


@contextmanager
def forked(patched: bool, logits: Any = same, scores: Any = same) -> Iterator[list[Any]]:
    """Let slime's stand-in take other logits, and return other scores; note its calls.

    Its function returns the scores alone, and takes padded samples too, as that of miles.
    """
    change, finish, calls = logits, scores, []
    module = importlib.import_module(LOSS)
    own = inspect.unwrap(module.get_log_probs_and_entropy)

    def get_log_probs_and_entropy(
        logits: torch.Tensor,
        *,
        args: Any,
        unconcat_tokens: list[torch.Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
        with_entropy: bool = False,
        max_seq_lens: list[int] | None = None,
        top_p: float = 1.0,
    ) -> Any:
        calls.append(logits.shape)
        if max_seq_lens is not None:
            logits = torch.cat([rows[:n] for rows, n in zip(logits, total_lengths, strict=True)])[None]
        lengths = {"total_lengths": total_lengths, "response_lengths": response_lengths}
        _, scores = own(
            change(logits), args=args, unconcat_tokens=unconcat_tokens, with_entropy=with_entropy, **lengths
        )
        return {name: list(map(finish, values)) for name, values in scores.items()}

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return slime_losses.get_log_probs_and_entropy(Call(get_log_probs_and_entropy, args, kwargs))

    function = replaced if patched else get_log_probs_and_entropy
    with applied(*[PATCH] * patched), mock.patch.object(module, "get_log_probs_and_entropy", function):
        yield calls


#: What a fork may do that changes values or gradients.
FORKS: dict[str, dict[str, Any]] = {
    "scaled": {"logits": lambda logits: logits * 1.25},
    "written to": {"logits": lambda logits: logits.div_(2)},
    "clamped": {"logits": lambda logits: logits.clamp(-50, 50)},
    "a gradient alone": {"logits": lambda logits: logits.detach() + 0 * logits},
    "an error with other rows": {"logits": lambda logits: logits if logits.shape[1] == 24 else logits[99]},
    "clamped scores": {"scores": lambda values: values.clamp(min=-3)},
}


@on_ranks(1)
def test_a_fork_gets_what_it_computes() -> None:
    from tests.frameworks.loss_jobs import LossJob, distance, initialize

    initialize()
    logger = logging.getLogger("megatron_rl_patches")
    for name, fork in FORKS.items():
        with forked(patched=False, **fork):
            expected = LossJob("slime").result()
        with forked(patched=True, **fork) as calls, mock.patch.object(logger, "log") as log:
            result = LossJob("slime").result()
        for key in ("log_probs", "entropy", "gradient"):
            assert distance(result[key], expected[key], 1.0) < BFLOAT16, (name, key)
        assert len(calls) == 2  # it was tried, and then its own code has run
        assert "on a small microbatch at temperature 1 are not" in str(log.call_args_list), name
    with forked(patched=True), mock.patch.object(logger, "log") as log:
        LossJob("slime", rollout_temperature=0.0).result(backward=False)
        assert "on a small microbatch at temperature 0 are not" in str(log.call_args_list)


@on_ranks(1)
def test_padded_samples_and_arguments_that_are_not_known() -> None:
    from megatron_rl_patches.frameworks.response_scores import forms
    from tests.frameworks.loss_jobs import LossJob, distance, initialize

    initialize()
    with forked(patched=True) as calls:
        job = LossJob("slime", qkv_format="bshd")
        packed, longest = job.logits(), max(job.totals)
        padded = torch.stack(
            [F.pad(rows, (0, 0, 0, longest - len(rows))) for rows in packed[0].split(job.totals)]
        )
        log_probs = torch.cat(scores_of(job, padded, max_seq_lens=[longest] * len(job.totals)))
        assert len(calls) == 1 and all(forms.values())  # it was tried, and its own code has not run
        assert distance(log_probs, job.dense()["log_probs"]) < 1e-6
        forms.clear()
        scores_of(job, packed, top_p=0.9)
        assert len(calls) == 2 and not forms
