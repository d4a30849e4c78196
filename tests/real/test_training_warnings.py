"""What ``reentrant-train`` warns of, on real megatron-core: the number that is spoiled, and the message."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl_patches import Settings, applied
from megatron_rl_patches.testing import cpu_backend, spawn_ranks

PATHS = ("tests.real.test_training_warnings:train",)
TOKENS = (3, 11)  # of two microbatches


def train(
    model: Any,
    optimizer: Any = None,
    *,
    data_iterator: Any = None,
    tokens: tuple[int, ...] = TOKENS,
    hooks: str = "off",
) -> Any:
    """One step of a loop of one's own; its loss returns a number of tokens. Return the gradients."""
    import torch
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    from tests.real import tiny_gpt

    config = get_model_config(model[0])
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model[0].no_sync
    for chunk in model:
        chunk.zero_grad_buffer()
    microbatches = zip(tiny_gpt.SyntheticData(), tokens, strict=False)
    get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[microbatches],
        model=model,
        num_microbatches=len(tokens),
        seq_length=tiny_gpt.SEQUENCE,
        micro_batch_size=tiny_gpt.BATCH,
        forward_only=False,
    )
    gradients = torch.cat([p.main_grad.flatten() for chunk in model for p in chunk.parameters()]).clone()
    if optimizer is not None:
        optimizer.step()
    if hooks == "off":
        for chunk in model:
            chunk.disable_forward_pre_hook()
    return gradients


def _forward_step(microbatches: Iterator[Any], model: Any) -> tuple[Any, Any]:
    from tests.real import tiny_gpt

    batch, tokens = next(microbatches)
    losses_bs, _ = tiny_gpt.forward_step(iter([batch]), model)
    return losses_bs, partial(_loss, tokens=tokens)


def _loss(losses_bs: Any, tokens: int) -> tuple[Any, Any, dict[str, Any]]:
    """The sum over the first tokens of the first sample."""
    import torch

    return losses_bs[0, :tokens].sum(), torch.tensor(tokens), {}


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _warned(model: Any, *args: Any, warn: bool = True, **options: Any) -> tuple[Any, list[str]]:
    """Two calls of ``train`` with the patch; return what the first returns, and all that was logged."""
    from megatron_rl_patches import doctor
    from megatron_rl_patches.reentry import training_warnings

    training_warnings.forget()
    handler = _Lines()
    logger = logging.getLogger("megatron_rl_patches")
    logger.addHandler(handler)
    with applied("reentrant-train", settings=Settings(train_functions=PATHS, warn=warn)):
        result = train(model, *args, **options)
        train(model, *args, **options)
        assert doctor.notes_of(doctor.choice_of(), []) == training_warnings.reported()
    logger.removeHandler(handler)
    prefix = "megatron_rl_patches: "  # the summary of what is applied has another one
    lines = [line.removeprefix(prefix) for line in handler.lines if line.startswith(prefix)]
    assert set(lines) <= set(training_warnings.reported())
    return result, lines


# --- dropout ------------------------------------------------------------------------------------------------


def _dropout(rate: float) -> dict[str, Any]:
    with cpu_backend():
        from tests.real import tiny_gpt

        model, _ = tiny_gpt.build(tiny_gpt.Options(dropout=rate))
        batch = next(tiny_gpt.SyntheticData())
        losses = []
        for training in (True, False):
            model[0].train(training)
            losses.append(tiny_gpt.forward_step(iter([batch]), model[0])[0].detach())
        model[0].train()
        _, lines = _warned(model, tokens=(5, 5))
        return {"nats": (losses[0] - losses[1]).abs().mean().item(), "lines": lines}


def test_dropout() -> None:
    [off], [on] = (spawn_ranks(_dropout, 1, rate) for rate in (0.0, 0.1))
    assert off == {"nats": 0.0, "lines": []}
    assert on["nats"] > 0.01
    assert [line.split(": ")[0] for line in on["lines"]] == ["hidden_dropout=0.1", "attention_dropout=0.1"]
    assert "set --hidden-dropout 0" in on["lines"][0]


# --- the weight of a token ----------------------------------------------------------------------------------


def _token_weights(warn: bool) -> dict[str, Any]:
    with cpu_backend():
        from tests.real import tiny_gpt

        seen: dict[str, Any] = {}
        for per_token in (True, False):
            options = tiny_gpt.Options(calculate_per_token_loss=per_token)
            seen[per_token] = _warned(tiny_gpt.build(options)[0], warn=warn)
        [right, quiet], [wrong, lines] = seen[True], seen[False]
        seen = {"off by": ((wrong - right).norm() / right.norm()).item(), "quiet": quiet, "lines": lines}
        alike = tiny_gpt.Options(calculate_per_token_loss=False)
        seen["quiet"] += _warned(tiny_gpt.build(alike)[0], tokens=(5, 5), warn=warn)[1]
        return seen


def test_the_weight_of_a_token() -> None:
    [seen] = spawn_ranks(_token_weights, 1, True)
    assert seen["off by"] > 0.2
    assert seen["quiet"] == []
    [line] = seen["lines"]
    assert "calculate_per_token_loss=False" in line
    assert "Microbatches had 3 to 11 tokens" in line
    assert "counts 3.7 times as much" in line
    [silent] = spawn_ranks(_token_weights, 1, False)
    assert silent["off by"] == seen["off by"]
    assert silent["lines"] == []


def _speakers() -> dict[str, Any]:
    with cpu_backend():
        from megatron_rl_patches.reentry import training_warnings
        from tests.real import tiny_gpt

        options = tiny_gpt.Options(parallelism=tiny_gpt.Parallelism(tp=2, pp=2))
        _, lines = _warned(tiny_gpt.build(options)[0])
        return {"found": len(training_warnings.reported()), "lines": len(lines)}


@pytest.mark.slow
def test_one_rank_of_the_last_stage_warns() -> None:
    seen = spawn_ranks(_speakers, 4, timeout=120)
    assert [each["found"] for each in seen] == [0, 0, 1, 1]
    assert [each["lines"] for each in seen] == [0, 0, 1, 0]


# --- parameters that are not gathered -----------------------------------------------------------------------


def _gathered(hooks: str) -> dict[str, Any]:
    with cpu_backend():
        import torch

        from tests.real import tiny_gpt

        model, optimizer = tiny_gpt.build(tiny_gpt.Options(calculate_per_token_loss=True))
        _, lines = _warned(model, optimizer, hooks=hooks)
        sent = torch.cat([p.detach().flatten() for p in model[0].parameters()])
        if hooks == "on":
            model[0].disable_forward_pre_hook()
        trained = torch.cat([p.detach().flatten() for p in model[0].parameters()])
        return {"stale": int((sent != trained).sum()), "of": len(trained), "lines": lines}


def test_parameters_that_are_not_gathered() -> None:
    off, on = (spawn_ranks(_gathered, 2, hooks) for hooks in ("off", "on"))
    assert [seen["stale"] for seen in off] == [0, 0]
    assert [seen["lines"] for seen in off] == [[], []]
    assert all(seen["stale"] > seen["of"] / 4 for seen in on)  # the other rank's share
    [line] = on[0]["lines"]
    assert "overlap_param_gather=True" in line
    assert "disable_forward_pre_hook()" in line
    assert on[1]["lines"] == []


# --- log-probs of the rollout -------------------------------------------------------------------------------


def _rollout_log_probs(steps: int) -> dict[str, Any]:
    """The weights that sample are those of some steps ago, as if the newer ones had never been sent."""
    with cpu_backend():
        import torch

        from tests.real import tiny_gpt

        options = tiny_gpt.Options(lr=0.03)
        model, optimizer = tiny_gpt.build(options)
        batch = next(tiny_gpt.SyntheticData())

        def score() -> list[Any]:
            with torch.no_grad():
                return [*-tiny_gpt.forward_step(iter([batch]), model[0])[0]]

        sampled = score()
        if steps:
            tiny_gpt.train(model, optimizer, tiny_gpt.data_iterators(options), [1] * steps, options)
        trained = score()
        masks = [torch.arange(tiny_gpt.SEQUENCE) > 4] * len(sampled)
        rollout = {"log_probs": trained, "rollout_log_probs": sampled, "loss_masks": masks}
        iterator = SimpleNamespace(rollout_data=rollout)
        _, lines = _warned(model, data_iterator=[iterator], tokens=(5, 5))
        differences = torch.cat([(a - b)[4 + 1 :].abs() for a, b in zip(trained, sampled, strict=True)])
        return {"nats": differences.mean().item(), "tokens": len(differences), "lines": lines}


def test_log_probs_of_the_rollout() -> None:
    [same], [stale] = (spawn_ranks(_rollout_log_probs, 1, steps) for steps in (0, 3))
    assert same["nats"] == 0
    assert same["lines"] == []
    assert stale["nats"] > 0.1
    [line] = stale["lines"]
    assert f"differ by {stale['nats']:.2g} nats per token on average" in line
    assert f"on {stale['tokens']} tokens" in line
