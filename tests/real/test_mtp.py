"""Multi-token prediction: policies are scored without it, and models that only score are built without it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_rl_patches.errors import CheckpointError
from megatron_rl_patches.inference import build_inference_model, forward_log_probs, load_inference_checkpoint
from megatron_rl_patches.testing import TinyModel, tiny_model
from tests.ranks import on_ranks
from tests.real import checkpoints

MICROBATCHES = [{"tokens": torch.arange(16).view(1, 16) % 32, "lengths": [16]}] * 2
LAYOUTS = [{}, {"tp": 2}, {"pp": 2}]


def scores(model: Any) -> list[torch.Tensor] | None:
    found = forward_log_probs(model, MICROBATCHES, progress=False)
    return None if found is None else found.log_probs


def inference_only(tiny: TinyModel, **options: Any) -> list[Any]:
    return build_inference_model(tiny.provider, tiny.transformer_config(), dtype="fp32", **options)


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@on_ranks(lambda sizes: 2 if sizes else 1)
def test_policy_and_teacher_are_scored_without_those_layers(sizes: dict[str, Any], tmp_path: Path) -> None:
    tiny = tiny_model("mtp", **sizes)
    tiny.initialize()
    policy = tiny.chunks()
    has_mtp = hasattr(policy[-1], "mtp")
    expected = scores(policy)
    # As before it was scored: it goes on training.
    assert policy[-1].config.mtp_num_layers == 1
    assert not has_mtp or policy[-1].mtp_process
    root = tmp_path / "checkpoints"
    checkpoints.save_torch_dist(policy, None, root, 3)

    teacher = inference_only(tiny)
    assert not [name for chunk in teacher for name in chunk.state_dict() if name.startswith("mtp.")]
    assert load_inference_checkpoint(teacher, root) == 3
    found = scores(teacher)
    assert (expected is None) == (found is None)
    assert expected is None or all(map(torch.equal, expected, found or ()))
    whole = inference_only(tiny, with_mtp=True)
    load_inference_checkpoint(whole, root)
    found = scores(whole)
    assert expected is None or all(map(torch.equal, expected, found or ()))


@on_ranks(1)
def test_what_is_not_loaded_is_said_and_others_stay_an_error(tmp_path: Path) -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("megatron_rl_patches")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    tiny = tiny_model("mtp")
    policy, optimizer = tiny.build()
    checkpoints.save_torch_dist(policy, optimizer, tmp_path, 3)
    load_inference_checkpoint(inference_only(tiny), tmp_path)
    [line] = [message for message in messages if "mtp." in message]
    assert "multi-token prediction (mtp.*) are not loaded" in line
    smaller: TransformerConfig = tiny.transformer_config()
    smaller.num_layers = 2
    with pytest.raises(CheckpointError, match="of another model"):
        load_inference_checkpoint(build_inference_model(tiny.provider, smaller, dtype="fp32"), tmp_path)
