"""What ``reentrant-train`` warns of, on real megatron-core: the number that is spoiled, and the message."""

import copy
import logging
from contextlib import nullcontext
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer import multi_token_prediction
from megatron.core.utils import get_model_config

from megatron_rl_patches import Settings, applied, doctor, status
from megatron_rl_patches.errors import MegatronRLPatchesError
from megatron_rl_patches.reentry import reentrant_train, training_warnings
from megatron_rl_patches.testing import TinyModel
from tests.ranks import everywhere, on_ranks
from tests.references import tiny_gpt
from tests.worlds.model import NO_OVERLAP, World, fill_at_random, gradients_of

PATHS = ("tests.real.test_training_warnings:train",)


def train(
    model: Any,
    optimizer: Any = None,
    *,
    data_iterator: Any = None,
    microbatches: int = 2,
    hooks: str = "off",
    config: Any = None,
    reduces: str = "schedule",
) -> Any:
    """One step of a loop of one's own. Return the gradients."""
    if reduces == "schedule":
        (config or get_model_config(model[0])).finalize_model_grads_func = finalize_model_grads
    get_model_config(model[0]).no_sync_func = model[0].no_sync
    model[0].zero_grad_buffer()
    tiny_gpt.run_schedule(model, [tiny_gpt.SyntheticData()], microbatches)
    if reduces == "loop":
        finalize_model_grads(model)
    gradients = gradients_of(model)
    if optimizer is not None:
        optimizer.step()
    if hooks == "off" and model[0].use_forward_hook:
        model[0].disable_forward_pre_hook()
    return gradients


def _warned(
    world: World, *, steps: bool = False, warn: bool = True, form: str = "patched", **options: Any
) -> tuple[Any, list[str]]:
    """Call ``train`` twice; return what the first call returns, and all that was logged.

    Args:
        steps: whether the loop changes weights.
        form: whether the patch guards the loop, it is decorated where there is the patch, or decorated alone.
    """
    training_warnings.messages.clear()
    handler = BufferingHandler(capacity=1000)
    logger = logging.getLogger("megatron_rl_patches")
    logger.addHandler(handler)
    settings = Settings(train_functions=PATHS if "patched" in form else (), warn=warn)
    with nullcontext() if form == "alone" else applied("reentrant-train", settings=settings):
        # In this module, the name stands for the patched function now.
        guarded = train if form == "patched" else reentrant_train(train, warn=warn)
        result, _ = (guarded(world.model, world.optimizer if steps else None, **options) for _ in range(2))
        assert form == "alone" or doctor.notes_of(doctor.choice_of(), []) == training_warnings.reported()
    logger.removeHandler(handler)
    messages = [record.getMessage().removeprefix("megatron_rl_patches: ") for record in handler.buffer]
    lines = [message for message in messages if not message.startswith("megatron_rl_patches ")]
    assert set(lines) <= set(training_warnings.reported())
    return result, lines


@on_ranks(1)
def test_dropout() -> None:
    for rate in (0.0, 0.1):
        world = World(config={"attention_dropout": rate, "hidden_dropout": rate})
        batch = next(tiny_gpt.SyntheticData())
        evaluated, trained = (
            tiny_gpt.forward_step(iter([batch]), world.model[0].train(training))[0].detach()
            for training in (False, True)
        )
        nats = (trained - evaluated).abs().mean().item()
        assert nats > 0.01 if rate else nats == 0.0, rate
        _, lines = _warned(world)
        names = ["hidden_dropout=0.1", "attention_dropout=0.1"] if rate else []
        assert [line.split(": ")[0] for line in lines] == names
    assert "set --hidden-dropout 0" in lines[0]


@pytest.mark.slow
@on_ranks(4)
def test_one_rank_of_the_last_stage_warns() -> None:
    world = World(kind="mtp", tp=2, pp=2, sequence_parallel=True)
    _, lines = _warned(world)
    assert everywhere(len(training_warnings.reported())) == [0, 0, 1, 1]
    assert everywhere(len(lines)) == [0, 0, 1, 0]


@pytest.mark.parametrize(("hooks", "form"), [("off", "patched"), ("on", "patched"), ("on", "alone")])
@on_ranks(2)
def test_parameters_that_are_not_gathered(hooks: str, form: str) -> None:
    world = World()
    _, lines = _warned(world, steps=True, hooks=hooks, form=form)
    sent = world.weights()
    if hooks == "on":
        world.model[0].disable_forward_pre_hook()
    stale = int((sent != world.weights()).sum())
    if hooks == "off":
        assert (stale, lines) == (0, [])
        return
    assert stale > len(sent) / 4  # the other rank's share
    [line], second = everywhere(lines)
    assert second == []
    assert "overlap_param_gather=True" in line and "disable_forward_pre_hook()" in line


@pytest.mark.parametrize(
    ("distributed", "overlap"),
    [
        (False, True),
        (False, False),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.nightly),
    ],
)
@on_ranks(2)
def test_gradients_that_nobody_reduces(distributed: bool, overlap: bool) -> None:
    """The loop reduces them with the schedule, itself, on a copy of the model's config only, or never."""
    overlaps = {"overlap_grad_reduce": overlap, "overlap_param_gather": False}
    options = TinyModel(use_distributed_optimizer=distributed, **overlaps)
    weights, lines = {}, {}
    # Old releases raise in the next step if a step has begun reductions that nobody finishes.
    raises = overlap and not hasattr(World(options).model[0].bucket_groups[0], "is_first_batch")
    unreduced = () if raises else ("copy", "never")
    for reduces in ("schedule", "loop", *unreduced):
        world = World(options)
        how = {"config": copy.copy(world.config)} if reduces == "copy" else {"reduces": reduces}
        _, lines[reduces] = _warned(world, steps=True, **how)
        weights[reduces] = world.weights()
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
        assert ("(another config has one)" in first[0]) is (reduces == "copy")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("moe", {"bf16": True}),
        ("dense", {"bf16": True, "use_distributed_optimizer": False, "overlap_param_gather": False}),
        ("dense", {}),
    ],
)
@on_ranks(2)
def test_weights_that_were_loaded_alone(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """One loads weights into a policy that trains in 16 bits; in 32 bits there is one copy of them."""
    tiny = TinyModel(kind=kind, lr=1e-6, **options)
    first, world = World(tiny), World(tiny)
    assert _warned(first, steps=True)[1] == []
    world.load(first.save(tmp_path))
    assert _warned(world, steps=True)[1] == []
    for is_reloaded in (True, False):
        fill_at_random(world.model, seed=int(is_reloaded))
        loaded_weights = world.weights()
        if is_reloaded:
            world.optimizer.reload_model_params()
        _, lines = _warned(world, steps=True)
        is_put_back = (world.weights() - loaded_weights).abs().max().item() > 0.01
        assert is_put_back is (tiny.bf16 and not is_reloaded)
        assert [len(each) for each in everywhere(lines)] == [int(is_put_back)] * 2
    assert not lines or "optimizer.reload_model_params()" in lines[0]
    world.optimizer.reload_model_params()
    with torch.no_grad():  # one tensor, all of which one rank updates
        next(iter(world.model[0].parameters())).add_(1)
    assert any(everywhere(_warned(world, steps=True)[1])) is tiny.bf16


@pytest.mark.parametrize("form", ["patched", "decorated", "patched and decorated", "alone"])
@on_ranks(1)
def test_multi_token_prediction_without_a_mask(form: str) -> None:
    world = World(kind="mtp")
    _, [line] = _warned(world, form=form)  # the forward step passes labels alone
    assert line.startswith("mtp_num_layers=1: the model trains without a loss_mask")
    assert _warned(world, warn=False, form=form)[1] == []


@pytest.mark.parametrize("patched", [False, True])
@on_ranks(1)
def test_multi_token_prediction_without_a_token_that_counts(patched: bool) -> None:
    """Before core 0.17, a microbatch whose mask is zero makes gradients NaN, which one patch repairs."""
    world = World(kind="mtp", **NO_OVERLAP)
    [chunk], length = world.model, world.options.seq_length
    tokens, mask_ss = torch.arange(length)[None], torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    gradients = []
    with applied("all", exclude=() if patched else ["finite-loss"]):
        is_repaired = any("roll_tensor" in s.target and s.state == "applied" for s in status())
        for counted, scale in ((0, 0.1), (1, 0.0), (8, 0.1)):
            chunk.config.mtp_loss_scaling_factor = scale
            chunk.zero_grad_buffer()
            mask = (tokens < 1 + counted).float()  # of the next token
            losses = chunk(tokens, tokens, mask_ss, labels=tokens.roll(-1, 1), loss_mask=mask)
            losses.sum().backward()
            gradients.append(gradients_of(world.model))
    none, main, some = gradients
    divides = getattr(multi_token_prediction, "process_mtp_loss", None) is None
    assert is_repaired is (patched and divides)
    assert torch.equal(none, main) if patched or not divides else not none.isfinite().all()
    assert some.isfinite().all() and not torch.equal(some, main)


@pytest.mark.parametrize("kind", ["dense", "moe"])
@on_ranks(1)
def test_training_while_memory_is_freed(kind: str) -> None:
    """The loop itself may restore it. Without a guard the process ends with a segmentation fault."""
    world = World(kind=kind)
    model, (right, _) = world.model, _warned(world)
    for part in ("grad_data", "param_data"):
        memory = getattr((model[0].expert_parallel_buffers or model[0].buffers)[0], part)
        content = memory.clone()

        def restore(memory: Any = memory, content: Any = content) -> None:
            memory.untyped_storage().resize_(content.nbytes)
            memory.copy_(content)

        memory.untyped_storage().resize_(0)
        with reentrant_train(model):
            restore()
            assert torch.equal(train(model), right)
        memory.untyped_storage().resize_(0)
        for _ in range(2):
            with pytest.raises(MegatronRLPatchesError, match=f"{part} .* is freed: .* restore_grad_buffers"):
                reentrant_train(train)(model)
        restore()
        assert torch.equal(reentrant_train(train)(model), right)


@on_ranks(1)
def test_log_probs_of_the_rollout() -> None:
    """The weights that sample are those of some steps ago, as if the newer ones had never been sent."""

    def score() -> list[Any]:
        batch = next(tiny_gpt.SyntheticData())
        with torch.no_grad():
            return [*-tiny_gpt.forward_step(iter([batch]), world.model[0])[0]]

    for steps in (0, 3):
        world = World(lr=0.03)
        sampled = score()
        if steps:
            world.train(steps, microbatches=1)
        trained = score()
        masks = [torch.arange(tiny_gpt.SEQUENCE) > 4] * len(sampled)
        rollout = {"log_probs": trained, "rollout_log_probs": sampled, "loss_masks": masks}
        _, lines = _warned(world, data_iterator=[SimpleNamespace(rollout_data=rollout)])
        differences = torch.cat([(a - b)[4 + 1 :].abs() for a, b in zip(trained, sampled, strict=True)])
        nats = differences.mean().item()
        assert nats > 0.1 if steps else (nats, lines) == (0.0, [])
    [line] = lines
    assert f"differ by {nats:.2g} nats per token on average" in line
    assert f"on {len(differences)} tokens" in line
