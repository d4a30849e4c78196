"""Megatron checkpoints written on real megatron-core, as Megatron-LM's ``save_checkpoint`` lays them out.

For ranks: call everything here inside ``cpu_backend()``, after :func:`tests.references.tiny_gpt.build`.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint import FileSystemReader

from megatron_rl_patches.common.chunks import unwrap
from megatron_rl_patches.testing import TinyModel
from tests.ranks import everywhere
from tests.references import tiny_gpt
from tests.worlds.passes import fill_at_random
from tests.worlds.scoring import by_global_name

TRACKER = "latest_checkpointed_iteration.txt"


class OfTheHost:
    """What frameworks keep in their arguments: an object of a class that torch does not know to be safe."""


def on_rank_0(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function on one rank, while the others wait."""
    dist.barrier()
    value = function(*args, **kwargs) if dist.get_rank() == 0 else None
    dist.barrier()
    return value


def trained(options: TinyModel) -> tuple[list[Any], Any]:
    """A model and an optimizer with states, after two steps."""
    model, optimizer = options.build()
    tiny_gpt.train(model, optimizer, tiny_gpt.data_iterators(options), [2, 2], options)
    return model, optimizer


def scoring(options: TinyModel) -> list[Any]:
    """A model that only scores, with weights of its own."""
    options.initialize()
    chunks = tiny_gpt.inference_model(options)
    fill_at_random(chunks, scale=1.0)
    return chunks


def save_torch_dist(chunks: Sequence[Any], optimizer: Any, root: Path, iteration: int) -> Path:
    """As with ``--ckpt-format torch_dist --ckpt-fully-parallel-save``, without optimizer if there is none.

    From 0.15 on, the optimizer is sharded in a way that Megatron-LM refuses to load into another layout; the
    one of before needs more process groups.
    """
    folder = root / f"iter_{iteration:07d}"
    on_rank_0(folder.mkdir, parents=True)
    args = Namespace(tensor_model_parallel_size=2, of_the_framework=OfTheHost())
    state = {"args": args, "checkpoint_version": 3.0, "iteration": iteration, **_sharded(chunks, optimizer)}
    rank = (dist.get_rank(),)
    state["rng_state"] = ShardedObject("rng_state", [rank], (dist.get_world_size(),), rank)
    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("torch_dist"),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    dist_checkpointing.save(state, str(folder), strategy, content_metadata=sharding())
    on_rank_0((root / TRACKER).write_text, str(iteration))
    return folder


def _sharded(chunks: Sequence[Any], optimizer: Any) -> dict[str, Any]:
    """The model's sharded state, and the optimizer's, if there is one."""
    state: dict[str, Any] = {}
    for key, chunk in _keyed(chunks):
        state[key] = chunk.sharded_state_dict(metadata=sharding())
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=sharding())
    return state


def sharding() -> dict[str, Any]:
    reshardable = hasattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats")
    kind = "dp_reshardable" if reshardable else "fully_sharded_model_space"
    return {"distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True}


def whole_weights(chunks: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Copies of all parameters of the model, from all ranks, by names that do not depend on the layout."""
    own = {}
    for chunk in map(unwrap, chunks):
        for name, parameter in by_global_name(chunk):
            own[name] = _whole(parameter, "linear_fc1" in name and chunk.config.gated_linear_unit)
    return {name: tensor for weights in everywhere(own) for name, tensor in weights.items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bit for bit, dtypes included."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def overwrite(folder: Path, part_of_name: str, *, only_rank: int | None = None) -> int:
    """Destroy every stored piece of entries with this in their name, or those that a rank has saved.

    Return the number of bytes.
    """
    count = 0
    for piece in _pieces(folder, part_of_name):
        saved_by = int(piece.relative_path.split("_")[2])
        if only_rank in (None, saved_by):
            with (folder / piece.relative_path).open("r+b") as file:
                file.seek(piece.offset)
                file.write(b"\xff" * piece.length)
            count += piece.length
    return count


def cut(file: Path, part_of_name: str) -> None:
    """Truncate a file within the last stored piece of entries with this in their name."""
    pieces = [each for each in _pieces(file.parent, part_of_name) if each.relative_path == file.name]
    os.truncate(file, max(piece.offset + piece.length for piece in pieces) - 1)


def _pieces(folder: Path, part_of_name: str) -> list[Any]:
    stored = FileSystemReader(folder).read_metadata().storage_data
    # Names of optimizer state end in the name of the weight.
    return [
        piece
        for index, piece in stored.items()
        if part_of_name in index.fqn and ("optimizer." in index.fqn) == ("optimizer." in part_of_name)
    ]


def _whole(parameter: torch.Tensor, gated: bool) -> torch.Tensor:
    tensor = parameter.detach().clone()
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return tensor
    shards = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(shards, tensor, group=group)
    axis = parameter.partition_dim  # type: ignore[attr-defined]
    # Each rank has a piece of the gate above its piece of the other half.
    halves = zip(*(shard.chunk(2, axis) if gated else (shard,) for shard in shards), strict=True)
    return torch.cat([piece for half in halves for piece in half], axis)


def _keyed(chunks: Sequence[Any]) -> list[tuple[str, Any]]:
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    return list(zip(names, map(unwrap, chunks), strict=True))
