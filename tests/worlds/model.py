"""One tiny real model on ranks, in any layout: it trains, scores, is saved, loaded, and compared.

For ranks: use everything here inside ``cpu_backend()``, or on a GPU.
"""

import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import get_model_config

from megatron_rl_patches.common.chunks import unwrap
from megatron_rl_patches.inference import build_inference_model, forward_log_probs
from megatron_rl_patches.testing import TinyModel
from tests.ranks import everywhere
from tests.real import matrix
from tests.references import tiny_gpt

MICROBATCHES = 2  # of a step
NO_OVERLAP: dict[str, Any] = {"overlap_grad_reduce": False, "overlap_param_gather": False}
#: Every rank has all of the optimizer.
NOT_DISTRIBUTED: dict[str, Any] = {"use_distributed_optimizer": False, "overlap_param_gather": False}
#: Fields of the config: all layers are computed again in backward, or the experts alone.
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTE_EXPERTS = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


class World:
    """A model in DDP with its optimizer; each call of ``train()`` goes on after the steps done so far.

    Args:
        options: the model, by default :func:`matrix.tiny` of the flags.
        change: what is done to a chunk before it is wrapped in DDP.
        adam: further fields of the optimizer's config.
    """

    def __init__(
        self,
        options: TinyModel | None = None,
        *,
        change: Callable[[Any], None] | None = None,
        adam: Mapping[str, Any] | None = None,
        **flags: Any,
    ) -> None:
        self.options = options or matrix.tiny(**flags)
        self.options.initialize()
        config = self.options.transformer_config()
        chunks = self.options.chunks(config)
        if change:
            for chunk in chunks:
                change(chunk)
        self.model, self.optimizer = self.options.in_training(config, chunks)
        if adam:
            settings = replace(self.optimizer.config, **adam)
            self.optimizer = get_megatron_optimizer(settings, self.model, use_gloo_process_groups=False)
        self.data = tiny_gpt.data_iterators(self.options)
        self.done = 0
        self.losses: dict[int, float] = {}  # of steps by their number, but for those of calls that raised

    @property
    def config(self) -> Any:
        return get_model_config(self.model[0])

    def train(self, steps: int = 1, microbatches: int = MICROBATCHES, loop: Any = None) -> list[float]:
        """Call the loop once, by default :func:`tiny_gpt.train`; return the losses of its steps."""
        for iterator in self.data:
            iterator._microbatch = self.done * microbatches
        numbers = [microbatches] * steps
        call = loop or tiny_gpt.train
        losses: list[float] = call(self.model, self.optimizer, self.data, numbers, self.options)
        self.losses |= dict(enumerate(losses, self.done))
        self.done += steps
        return losses

    def scores(self, batches: Sequence[Any] | None = None) -> list[torch.Tensor]:
        return scores_of(self.model, batches)

    def weights(self) -> torch.Tensor:
        """Return all weights of this rank in one vector."""
        return torch.cat([p.detach().flatten() for chunk in self.model for p in chunk.parameters()])

    def state(self) -> list[torch.Tensor]:
        """Return copies of the weights, main parameters, moments and step counts of this rank."""
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        inner = [part.optimizer for part in parts if part.optimizer is not None]
        groups = [group for each in inner for group in each.param_groups]
        values = [parameter for chunk in self.model for parameter in chunk.parameters()]
        values += [parameter for group in groups for parameter in group["params"]]
        values += [value for each in inner for state in each.state.values() for value in state.values()]
        values += [float(group.get("step", 0)) for group in groups]
        return [torch.as_tensor(value).detach().clone() for value in values]

    def checksum(self) -> str:
        return tiny_gpt.checksum(self.model, self.optimizer)

    def save(self, root: Path, iteration: int = 3) -> Path:
        return save(self.model, root, iteration, self.optimizer)

    def load(self, folder: Path) -> None:
        """Load weights and the optimizer's state, as a run does that is resumed."""
        state = _sharded(self.model)
        metadata = _sharding()
        state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
        with torch.serialization.safe_globals([Namespace, OfTheHost]):
            state = dist_checkpointing.load(state, str(folder))
        unwrap(self.model[0]).load_state_dict(state["model"])
        with torch.no_grad():
            self.optimizer.load_state_dict(state["optimizer"])


def scoring(options: TinyModel) -> list[Any]:
    """Return a model that only scores, with weights of its own."""
    options.initialize()
    chunks = tiny_gpt.inference_model(options)
    fill_at_random(chunks, scale=1.0)
    return chunks


class ValueHead(torch.nn.Linear):
    """What frameworks put in the place of a GPTModel's output layer."""

    def __init__(self, hidden_size: int, sequence_parallel: bool) -> None:
        super().__init__(hidden_size, 1, bias=False)
        self.sequence_parallel = sequence_parallel

    def forward(self, hidden: torch.Tensor, *unused: Any, **options: Any) -> tuple[torch.Tensor, None]:
        values = super().forward(hidden)
        if self.sequence_parallel:
            values = tensor_parallel.gather_from_sequence_parallel_region(values)
        return values, None


def critic(options: TinyModel) -> list[Any]:
    """Return a model of values, with weights of its own."""

    def provide(*args: Any, **kwargs: Any) -> Any:
        chunk = options.provider(*args, **kwargs)
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config.hidden_size, options.sequence_parallel)
        return chunk

    options.initialize()
    chunks = build_inference_model(provide, options.transformer_config(), dtype="fp32")
    fill_at_random(chunks, scale=1.0)
    return chunks


def scores_of(model: Any, batches: Sequence[Any] | None = None) -> list[torch.Tensor]:
    """Return log-probabilities of each sample, by default of two microbatches; none if no last stage."""
    if batches is None:
        batches = [{"tokens": torch.arange(32).view(2, 16), "total_lengths": [16, 12]}] * 2
    return getattr(forward_log_probs(model, batches, progress=False), "log_probs", [])


def gradients_of(model: Sequence[Any]) -> torch.Tensor:
    return torch.cat([p.main_grad.flatten() for chunk in model for p in chunk.parameters()]).clone()


# --- Weights that can be compared across layouts.


def fill_at_random(model: Sequence[Any], seed: int = 0, scale: float = 0.1) -> None:
    """Give every weight of this rank a random value."""
    generator = torch.Generator().manual_seed(seed)
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def by_global_name(model: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of this rank by names that are the same on every layout."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    rank = parallel_state.get_expert_model_parallel_rank()
    for chunk in map(unwrap, model):
        first_expert = rank * (chunk.config.num_moe_experts or 0) // ranks
        offsets = {
            "decoder.layers.": chunk.decoder.layers[0].layer_number - 1,
            "local_experts.": first_expert,
        }
        for name, parameter in chunk.named_parameters():
            for container, offset in offsets.items():
                before, found, after = name.partition(container)
                number, dot, rest = after.partition(".")
                name = f"{before}{found}{int(number) + offset}{dot}{rest}" if found else name
            yield name, parameter


def fill_by_name(model: Sequence[Any]) -> None:
    """Give each weight values that follow from its name, cut as Megatron cuts it."""
    group = parallel_state.get_tensor_model_parallel_group()
    for name, parameter in by_global_name(model):
        shape, is_cut = list(parameter.shape), getattr(parameter, "tensor_model_parallel", False)
        if is_cut:
            shape[parameter.partition_dim] *= group.size()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=generator) * 0.2 + ("norm" in name and "weight" in name)
        if is_cut:
            whole = whole.chunk(group.size(), parameter.partition_dim)[group.rank()]
        parameter.data.copy_(whole)


def whole_weights(model: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return copies of all parameters of the model, from all ranks, by names of every layout."""
    is_gated = get_model_config(model[0]).gated_linear_unit
    own = {name: _whole(p, "linear_fc1" in name and is_gated) for name, p in by_global_name(model)}
    return {name: tensor for weights in everywhere(own) for name, tensor in weights.items()}


def _whole(parameter: torch.Tensor, gated: bool) -> torch.Tensor:
    tensor = parameter.detach().clone()
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return tensor
    axis = parameter.partition_dim  # type: ignore[attr-defined]
    # Each rank has a piece of the gate above its piece of the other half.
    shards = everywhere(tensor, group)
    halves = zip(*(shard.chunk(2, axis) if gated else (shard,) for shard in shards), strict=True)
    return torch.cat([piece for half in halves for piece in half], axis)


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Return whether two dicts have the same tensors, bit for bit, dtypes included."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


# --- Checkpoints, as Megatron-LM's ``save_checkpoint`` lays them out.


class OfTheHost:
    """What frameworks keep in their arguments: an object of a class that torch does not know to be safe."""


def on_rank_0(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function on one rank, while the others wait."""
    dist.barrier()
    value = function(*args, **kwargs) if dist.get_rank() == 0 else None
    dist.barrier()
    return value


def save(model: Sequence[Any], root: Path, iteration: int = 3, optimizer: Any = None) -> Path:
    """Save as with ``--ckpt-format torch_dist --ckpt-fully-parallel-save``; return the iteration's folder."""
    folder = root / f"iter_{iteration:07d}"
    on_rank_0(folder.mkdir, parents=True)
    args, rank = Namespace(tensor_model_parallel_size=2, of_the_framework=OfTheHost()), (dist.get_rank(),)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": iteration, **_sharded(model)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=_sharding())
    state["rng_state"] = ShardedObject("rng_state", [rank], (dist.get_world_size(),), rank)
    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy("torch_dist"),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    dist_checkpointing.save(state, str(folder), strategy, content_metadata=_sharding())
    on_rank_0((root / "latest_checkpointed_iteration.txt").write_text, str(iteration))
    return folder


def _sharded(model: Sequence[Any]) -> dict[str, Any]:
    names = ["model"] if len(model) == 1 else [f"model{index}" for index in range(len(model))]
    shards = (unwrap(chunk).sharded_state_dict(metadata=_sharding()) for chunk in model)
    return dict(zip(names, shards, strict=True))


def _sharding() -> dict[str, Any]:
    """Return how the optimizer is sharded.

    From 0.15 on, Megatron-LM refuses to load what that is into another layout; the way of before needs more
    process groups.
    """
    reshardable = hasattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats")
    kind = "dp_reshardable" if reshardable else "fully_sharded_model_space"
    return {"distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True}
