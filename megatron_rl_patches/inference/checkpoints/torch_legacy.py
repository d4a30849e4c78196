"""Reading model weights from Megatron's legacy checkpoints (``torch``): a pickle per model-parallel rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, first
from .pickles import load_dict

FILE = "model_optim_rng.pt"


def open_own_file(folder: Path) -> dict[str, Any]:
    """Return what was saved for this rank's place in the model; tensors are mapped, not read."""
    from megatron.core import parallel_state as mpu

    tp, pp, ep = (
        mpu.get_tensor_model_parallel_world_size(),
        mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_expert_model_parallel_world_size(),
    )
    places = itertools.product(range(tp), range(pp) if pp > 1 else [None], range(ep) if ep > 1 else [None])
    expected = {_name(*place) for place in places}
    stored = {entry.name for entry in folder.glob("mp_rank_*")}
    if stored != expected:
        raise CheckpointError(
            f"{folder} has {first(sorted(stored))}; this model (TP {tp}, PP {pp}, EP {ep}) needs "
            f"{first(sorted(expected))}. A checkpoint in the torch format loads only whole, and with the "
            "parallel sizes that it was saved with; save it as torch_dist to change them"
        )
    own = _name(
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank() if pp > 1 else None,
        mpu.get_expert_model_parallel_rank() if ep > 1 else None,
    )
    return load_dict(folder / own / FILE)


def open_any_file(folder: Path) -> dict[str, Any]:
    """Return the file of the first rank, for what is the same in all of them."""
    return load_dict(min(folder.glob("mp_rank_*")) / FILE)


def model_states(content: dict[str, Any], chunks: Sequence[torch.nn.Module]) -> list[dict[str, Any]]:
    """Return one state dict per chunk."""
    version = content.get("checkpoint_version", 0)
    if version < 2.0:
        raise CheckpointError(
            f"checkpoint_version {version} orders query, key and value in another way; "
            "save it again with a Megatron-LM that writes version 3.0"
        )
    keys = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    stored = sorted(key for key in content if key.startswith("model"))
    if stored != sorted(keys):
        raise CheckpointError(
            f"the checkpoint was saved with {len(stored)} model chunks per rank ({', '.join(stored)}), "
            f"this model has {len(chunks)} (virtual pipeline size)"
        )
    return [content[key] for key in keys]


def _name(tp: int, pp: int | None, ep: int | None) -> str:
    return f"mp_rank_{tp:02d}" + "".join(f"_{rank:03d}" for rank in (pp, ep) if rank is not None)
