"""What ``reentrant-train`` warns of, on real megatron-core: the number that is spoiled, and the message."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from logging.handlers import BufferingHandler
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.utils import get_model_config

from megatron_rl_patches import Settings, applied, doctor
from megatron_rl_patches.reentry import reentrant_train, training_warnings
from megatron_rl_patches.testing import TinyModel
from tests.ranks import everywhere, on_ranks
from tests.references import tiny_gpt

PATHS = ("tests.real.test_training_warnings:train",)
TOKENS = (3, 11)  # of two microbatches


def train(
    model: Any,
    optimizer: Any = None,
    *,
    data_iterator: Any = None,
    tokens: tuple[int, ...] = TOKENS,
    hooks: str = "off",
    config: Any = None,
    reduces: str = "schedule",
    loss: Any = None,
) -> Any:
    """One step of a loop of one's own; its loss returns a number of tokens. Return the gradients."""
    if reduces == "schedule":
        (config or get_model_config(model[0])).finalize_model_grads_func = finalize_model_grads
    get_model_config(model[0]).no_sync_func = model[0].no_sync
    for chunk in model:
        chunk.zero_grad_buffer()
    microbatches = zip(tiny_gpt.SyntheticData(), tokens, strict=False)
    get_forward_backward_func()(
        forward_step_func=partial(_forward_step, loss=loss or _loss),
        data_iterator=[microbatches],
        model=model,
        num_microbatches=len(tokens),
        seq_length=tiny_gpt.SEQUENCE,
        micro_batch_size=tiny_gpt.BATCH,
        forward_only=False,
    )
    if reduces == "loop":
        finalize_model_grads(model)
    gradients = torch.cat([p.main_grad.flatten() for chunk in model for p in chunk.parameters()]).clone()
    if optimizer is not None:
        optimizer.step()
    if hooks == "off" and model[0].use_forward_hook:
        for chunk in model:
            chunk.disable_forward_pre_hook()
    return gradients


def _forward_step(microbatches: Iterator[Any], model: Any, loss: Any) -> tuple[Any, Any]:
    batch, tokens = next(microbatches)
    losses_bs, _ = tiny_gpt.forward_step(iter([batch]), model)
    return losses_bs, partial(loss, tokens=tokens)


def _loss(losses_bs: Any, tokens: int) -> tuple[Any, Any, dict[str, Any]]:
    """The sum over the first tokens of the first sample."""
    return losses_bs[0, :tokens].sum(), torch.tensor(tokens), {}


def _mean(losses_bs: Any, tokens: int) -> tuple[Any, dict[str, Any]]:
    """The mean over all tokens, which returns no number of tokens."""
    return losses_bs.mean(), {}


def _sum(losses_bs: Any, tokens: int) -> tuple[Any, Any, dict[str, Any]]:
    return losses_bs.sum(), torch.tensor(losses_bs.numel()), {}


@contextmanager
def _guarded(form: str, warn: bool) -> Iterator[Any]:
    """Yield the loop as the patch guards it, decorated where there is the patch, or decorated alone."""
    if form == "alone":
        yield reentrant_train(train, warn=warn)
        return
    paths = PATHS if "patched" in form else ()
    with applied("reentrant-train", settings=Settings(train_functions=paths, warn=warn)):
        # In this module, the name stands for the patched function now.
        yield reentrant_train(train, warn=warn) if "decorated" in form else train
        assert doctor.notes_of(doctor.choice_of(), []) == training_warnings.reported()


def _warned(
    model: Any, *args: Any, warn: bool = True, form: str = "patched", **options: Any
) -> tuple[Any, list[str]]:
    """Two calls of ``train``; return what the first returns, and all that was logged."""
    training_warnings.forget()
    handler = BufferingHandler(capacity=1000)
    logger = logging.getLogger("megatron_rl_patches")
    logger.addHandler(handler)
    with _guarded(form, warn) as guarded:
        result = guarded(model, *args, **options)
        guarded(model, *args, **options)
    logger.removeHandler(handler)
    messages = [record.getMessage() for record in handler.buffer]
    prefix = "megatron_rl_patches: "  # the summary of what is applied has another one
    lines = [message.removeprefix(prefix) for message in messages if message.startswith(prefix)]
    assert set(lines) <= set(training_warnings.reported())
    return result, lines


@pytest.mark.parametrize("rate", [0.0, 0.1])
@on_ranks(1)
def test_dropout(rate: float) -> None:
    model, _ = TinyModel(config={"attention_dropout": rate, "hidden_dropout": rate}).build()
    batch = next(tiny_gpt.SyntheticData())
    losses = []
    for training in (True, False):
        model[0].train(training)
        losses.append(tiny_gpt.forward_step(iter([batch]), model[0])[0].detach())
    model[0].train()
    _, lines = _warned(model, tokens=(5, 5))
    nats = (losses[0] - losses[1]).abs().mean().item()
    if not rate:
        assert (nats, lines) == (0.0, [])
    else:
        assert nats > 0.01
        assert [line.split(": ")[0] for line in lines] == ["hidden_dropout=0.1", "attention_dropout=0.1"]
        assert "set --hidden-dropout 0" in lines[0]


@pytest.mark.parametrize("form", ["patched", "decorated", "patched and decorated", "alone"])
@on_ranks(1)
def test_the_weight_of_a_token(form: str) -> None:
    original = schedules.forward_step
    # Hooks can be disabled twice only where the patch is.
    how = {"form": form, "hooks": "on" if form == "alone" else "off"}
    right_model, wrong_model = (
        TinyModel(config={"calculate_per_token_loss": per_token}).build()[0] for per_token in (True, False)
    )
    right, quiet = _warned(right_model, **how)
    wrong, [line] = _warned(wrong_model, **how)
    assert quiet == []
    assert (wrong - right).norm() / right.norm() > 0.2
    assert "calculate_per_token_loss=False" in line
    assert "Microbatches had 3 to 11 tokens" in line
    assert "counts 3.7 times as much" in line
    assert _warned(wrong_model, tokens=(5, 5), **how)[1] == []
    silenced, lines = _warned(wrong_model, warn=False, **how)
    assert torch.equal(silenced, wrong) and lines == []
    assert schedules.forward_step is original


AUXILIARY: dict[str, tuple[str, dict[str, Any]]] = {
    "moe_aux_loss_coeff": ("moe", {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}),
    "moe_z_loss_coeff": ("moe", {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.01}),
    "mtp_num_layers": ("mtp", {}),
}


@pytest.mark.parametrize("setting", [*AUXILIARY, None])
@on_ranks(1)
def test_the_weight_of_an_auxiliary_loss(setting: str | None) -> None:
    """Microbatches have the same number of tokens, so the option makes no difference.

    Some releases count the last token of a sequence for multi-token prediction, and others do not.
    """
    kind, config = AUXILIARY.get(str(setting), ("moe", {"moe_router_load_balancing_type": "none"}))
    gradients, lines = {}, {}
    for per_token in (True, False):
        for loss in (_sum, _mean):
            model = TinyModel(kind=kind, config={**config, "calculate_per_token_loss": per_token}).build()[0]
            key = per_token, loss.__name__
            gradients[key], lines[key] = _warned(model, tokens=(16, 16), loss=loss)
    right, wrong = gradients[False, "_mean"], gradients[True, "_mean"]
    assert (gradients[True, "_sum"] - right).norm() < (0.05 if kind == "mtp" else 1e-5) * right.norm()
    assert not any(lines[key] for key in lines if key != (True, "_mean"))
    if setting is None:
        assert lines[True, "_mean"] == []
        return
    assert (wrong - right).norm() > 0.5 * right.norm()
    [line] = lines[True, "_mean"]
    assert f"the auxiliary loss of {setting} by it" in line


@pytest.mark.slow
@on_ranks(4)
def test_one_rank_of_the_last_stage_warns() -> None:
    options = TinyModel(tp=2, pp=2)
    _, lines = _warned(options.build()[0])
    assert everywhere(len(training_warnings.reported())) == [0, 0, 1, 1]
    assert everywhere(len(lines)) == [0, 0, 1, 0]


@pytest.mark.parametrize(("hooks", "form"), [("off", "patched"), ("on", "patched"), ("on", "alone")])
@on_ranks(2)
def test_parameters_that_are_not_gathered(hooks: str, form: str) -> None:
    model, optimizer = TinyModel(config={"calculate_per_token_loss": True}).build()
    _, lines = _warned(model, optimizer, hooks=hooks, form=form)
    sent = torch.cat([p.detach().flatten() for p in model[0].parameters()])
    if hooks == "on":
        model[0].disable_forward_pre_hook()
    stale = int((sent != torch.cat([p.detach().flatten() for p in model[0].parameters()])).sum())
    if hooks == "off":
        assert (stale, lines) == (0, [])
    else:
        assert stale > len(sent) / 4  # the other rank's share
        first, second = everywhere(lines)
        assert len(first) == 1 and second == []
        assert "overlap_param_gather=True" in first[0]
        assert "disable_forward_pre_hook()" in first[0]


@pytest.mark.parametrize(
    ("distributed", "overlap"), [(True, False), (True, True), (False, False), (False, True)]
)
@on_ranks(2)
def test_gradients_that_nobody_reduces(distributed: bool, overlap: bool) -> None:
    """The loop reduces them with the schedule, itself, on a copy of the model's config only, or never."""
    options = TinyModel(
        use_distributed_optimizer=distributed, overlap_grad_reduce=overlap, overlap_param_gather=False
    )
    weights, lines = {}, {}
    # Old releases raise in the next step if a step has begun reductions that nobody finishes.
    [chunk], _ = options.build()
    raises = overlap and not hasattr(chunk.bucket_groups[0], "is_first_batch")
    unreduced = () if raises else ("copy", "never")
    for reduces in ("schedule", "loop", *unreduced):
        model, optimizer = options.build()
        copied = {"config": copy.copy(get_model_config(model[0])), "reduces": "schedule"}
        how = copied if reduces == "copy" else {"reduces": reduces}
        _, lines[reduces] = _warned(model, optimizer, tokens=(5, 5), **how)
        weights[reduces] = torch.cat([p.detach().flatten() for p in model[0].parameters()])
    assert lines["schedule"] == lines["loop"] == []
    assert torch.equal(weights["schedule"], weights["loop"])
    for reduces in unreduced:
        assert not torch.allclose(weights["schedule"], weights[reduces], rtol=1e-3)
        if reduces == "never" and not distributed and not overlap:
            assert lines[reduces] == []  # a loop that reduces in a way of its own looks the same
            continue
        first, second = everywhere(lines[reduces])
        assert second == [] and len(first) == 1
        assert "finalize_model_grads_func=None" in first[0] and "2 data-parallel ranks" in first[0]
        assert ("the model has a copy" in first[0]) is (reduces == "copy")


@pytest.mark.parametrize("steps", [0, 3])
@on_ranks(1)
def test_log_probs_of_the_rollout(steps: int) -> None:
    """The weights that sample are those of some steps ago, as if the newer ones had never been sent."""
    options = TinyModel(lr=0.03)
    model, optimizer = options.build()
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
    _, lines = _warned(model, data_iterator=[SimpleNamespace(rollout_data=rollout)], tokens=(5, 5))
    differences = torch.cat([(a - b)[4 + 1 :].abs() for a, b in zip(trained, sampled, strict=True)])
    nats = differences.mean().item()
    if not steps:
        assert (nats, lines) == (0.0, [])
    else:
        assert nats > 0.1
        [line] = lines
        assert f"differ by {nats:.2g} nats per token on average" in line
        assert f"on {len(differences)} tokens" in line
