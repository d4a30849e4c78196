"""Functions of TransformerEngine: permutations, rotary embeddings; and ``FusedAdam``."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from .base import positions_of
from .refusals import check_options, refuse, require

# --- permutations (``moe_permute_fusion``), after which rows of the same expert lie together


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: Any = -1, **others: Any
) -> tuple[Tensor, Tensor]:
    """Return a row for each token of each expert, and a map: of which expert and which token each row is."""
    check_options("moe_permute", others)
    require((len(inp) == len(routing_map), f"there are {len(inp)} tokens, and routes of {len(routing_map)}"))
    routes = int(routing_map.sum())
    if num_out_tokens != routes and inp.numel():  # the kernel would write past its output, or leave it unset
        refuse(f"num_out_tokens={num_out_tokens} for {routes} routes")
    row_map = routing_map.t().nonzero()
    return inp[row_map[:, 1]], row_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: Any = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of ``moe_permute``, the probability of each, and the map."""
    rows, row_map = moe_permute(inp, routing_map, num_out_tokens)
    return rows, probs.t()[tuple(row_map.t())], row_map


def moe_unpermute(
    inp: Tensor, row_id_map: Tensor, merging_probs: Any = None, restore_shape: Any = None, **others: Any
) -> Tensor:
    """Sum the rows of each token in float32, times their probabilities if there are any."""
    check_options("moe_unpermute", others)
    experts, tokens = row_id_map.unbind(1)
    rows = inp.float()
    if merging_probs is not None:
        rows = rows * merging_probs[tokens, experts, None].float()
    shape = inp.shape if restore_shape is None else restore_shape
    return rows.new_zeros(shape).index_add(0, tokens, rows).to(inp.dtype)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Cut rows into chunks and put these into another order."""
    require((len(split_sizes) == len(sorted_index), "split_sizes and sorted_index differ in length"))
    chunks = torch.split(inp, split_sizes.tolist())
    return torch.cat([chunks[index] for index in sorted_index.tolist()])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Do the same with the rows and with their probabilities."""
    order = split_sizes, sorted_index
    return moe_sort_chunks_by_index(inp, *order), moe_sort_chunks_by_index(probs, *order)


# --- rotary embeddings (``apply_rope_fusion``)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    *,
    interleaved: bool = False,
    cu_seqlens: Any = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    **others: Any,
) -> Tensor:
    """Rotate the first channels of each head by ``freqs``, ``[positions, 1, 1, channels]`` in float32.

    Packed samples (``thd``) start at position 0 each, and ranks have two pieces of each of them. What is not
    ``fused`` is computed in the type of ``t``.
    """
    check_options("apply_rotary_pos_emb", others)
    is_packed = tensor_format == "thd"
    size = len(t) if is_packed else t.shape[tensor_format.find("s")]
    require(
        (tensor_format in ("sbhd", "bshd", "thd"), f"tensor_format is {tensor_format!r}"),
        (not is_packed or cu_seqlens is not None, "packed samples have no cu_seqlens"),
        (is_packed or len(freqs) >= size, f"there are {len(freqs)} positions for {size} rows"),
    )
    if cp_size > 1 and not is_packed:
        refuse("rotary embeddings in context parallelism unless samples are packed")
    if is_packed:
        rows = (cu_seqlens.diff() // cp_size).tolist()
        places = torch.cat([positions_of(cp_rank, cp_size, length) for length in rows])
        # What follows the last sample is padding.
        freqs = freqs[torch.nn.functional.pad(places, (0, size - len(places)))][:, 0]
    else:
        freqs = freqs[:size] if tensor_format == "sbhd" else freqs[:size].transpose(0, 1)
    rotated, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    if interleaved:
        other = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), -1).flatten(-2)
    else:
        first, second = rotated.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    dtype = torch.float32 if others.get("fused") else t.dtype
    x = rotated.to(dtype) * freqs.cos().to(dtype) + other.to(dtype) * freqs.sin().to(dtype)
    return torch.cat((x.to(t.dtype), rest), -1)


# --- the optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Adam, or AdamW in ``adam_w_mode``, of parameters in float32, as Megatron's main parameters are.

    The count of steps is in the group of parameters; torch has one for each parameter.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        **options: Any,
    ) -> None:
        check_options("FusedAdam", options)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._update: Any = adamw if adam_w_mode else adam

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in (group for group in self.param_groups if group["params"]):
            group["step"] = group.get("step", 0) + 1
            for parameter, name in product(group["params"], _MOMENTS):
                if parameter.dtype != torch.float32:
                    refuse(f"FusedAdam of parameters in {parameter.dtype}")
                if name not in self.state[parameter]:
                    self.state[parameter][name] = torch.zeros_like(parameter)
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            grads = [parameter.grad for parameter in updated]
            moments = [[self.state[parameter][name] for parameter in updated] for name in _MOMENTS]
            steps = [torch.tensor(group["step"] - 1.0) for _ in updated]
            beta1, beta2 = group["betas"]
            options: dict[str, Any] = {name: group[name] for name in ("lr", "eps", "weight_decay")}
            options |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
            self._update(updated, grads, *moments, [], steps, **options)
        return loss
