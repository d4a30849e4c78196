"""Reading model weights from Megatron's legacy checkpoints (``torch``): a pickle per model-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ._checkpoint_layout import load_pickle

FILE = "model_optim_rng.pt"


def open_own_file(folder: Path) -> dict[str, Any]:
    """What was saved for this rank's place in the model; tensors are mapped, not read.

    Raises:
        CheckpointError: the checkpoint was saved with other parallel sizes, or the file is damaged.
    """
    from megatron.core import parallel_state as mpu

    tp, pp, ep = (
        mpu.get_tensor_model_parallel_world_size(),
        mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_expert_model_parallel_world_size(),
    )
    expected = {
        _name(t, p if pp > 1 else None, e if ep > 1 else None)
        for t in range(tp)
        for p in range(pp)
        for e in range(ep)
    }
    found = {entry.name for entry in folder.glob("mp_rank_*")}
    if found != expected:
        raise CheckpointError(
            f"{folder} has {_listed(found)}; this model (TP {tp}, PP {pp}, EP {ep}) needs "
            f"{_listed(expected)}. A checkpoint in the torch format loads only whole, and with the parallel "
            "sizes that it was saved with; save it as torch_dist to change them"
        )
    own = _name(
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank() if pp > 1 else None,
        mpu.get_expert_model_parallel_rank() if ep > 1 else None,
    )
    return load_pickle(folder / own / FILE)


def open_any_file(folder: Path) -> dict[str, Any]:
    """The file of the first rank, for what all of them hold alike."""
    return load_pickle(min(folder.glob("mp_rank_*")) / FILE)


def iteration(content: dict[str, Any]) -> int | None:
    value = content.get("iteration", content.get("total_iters"))
    return None if value is None else int(value)


def model_states(content: dict[str, Any], chunks: Sequence[torch.nn.Module]) -> list[dict[str, Any]]:
    """One state dict per chunk.

    Raises:
        CheckpointError: saved with another number of virtual pipeline stages.
    """
    version = content.get("checkpoint_version", 0)
    if version < 2.0:
        raise CheckpointError(
            f"checkpoint_version {version} orders query, key and value in another way; "
            "save it again with a Megatron-LM that writes version 3.0"
        )
    keys = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    found = sorted(key for key in content if key.startswith("model"))
    if found != sorted(keys):
        raise CheckpointError(
            f"the checkpoint was saved with {len(found)} model chunks per rank ({', '.join(found)}), "
            f"this model has {len(chunks)} (virtual pipeline size)"
        )
    return [content[key] for key in keys]


def _name(tp: int, pp: int | None, ep: int | None) -> str:
    return f"mp_rank_{tp:02d}" + "".join(f"_{rank:03d}" for rank in (pp, ep) if rank is not None)


def _listed(names: set[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:8]) + (f", ... ({len(ordered)})" if len(ordered) > 8 else "")
