"""Random programs on logits as data: drawn from a seed, printed as Python, shortened by hand.

A program makes logits ``[B, S, V]`` on tensor-parallel ranks, takes them apart and puts them together again,
writes to them, also where nothing counts it, reads them, and computes losses of what results. It is printed
as a call that makes it again: drop steps from it until what fails is short.
"""

import copy
import ctypes
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

B, S, H = 2, 8, 4

_KEEPS_VALUES = ("slice", "index", "rows", "cat", "reshape", "transpose", "split", "detach", "clone", "look")
_OFTEN = (*_KEEPS_VALUES[:-1], "divide", "divide", "convert", "columns", "columns")
_WRITES = ("write", "write alias", "write memory", "write memory", "divide in place")
_RARELY = (*_WRITES, "look", "hook", "function", "no_grad", "inference")
#: What one tensor-parallel rank may do alone: no rank waits for the others, or for their gradients.
_ALONE = ("columns", "divide", "clone", *_WRITES, "look", "hook", "function")
_MASKS = (-torch.inf, -1e5, torch.finfo(torch.float32).min)
DIVERGENCES = ("reverse_kl", "forward_kl", "forward_kl", "jensen_shannon")
DIVERGENCES += ("skewed_forward_kl", "skewed_reverse_kl")


def _last(x: Tensor) -> Tensor:
    """Return a mask of the last column, the padding of a vocabulary."""
    return torch.arange(x.shape[-1]) == x.shape[-1] - 1


def _changed(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def operation(x: Tensor) -> Tensor:
        change(x)
        return x

    return operation


def _overwritten(take: Callable[[Tensor, Tensor], Tensor], *other: float) -> Callable[[Tensor], Tensor]:
    """Return an operation with another tensor, which is overwritten afterwards."""

    def operation(x: Tensor) -> Tensor:
        tensor = torch.tensor(other if len(other) > 1 else other[0])
        result = take(x, tensor)
        tensor.zero_()
        return result

    return operation


#: Ways to an ordinary tensor in the memory of logits, to which no version counter counts the writes.
MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "data of columns": lambda x: x[..., 1:4].data,
    "data of a column": lambda x: x.select(-1, 1).data,
    "data of one dimension": lambda x: x.data.view(-1) if x.is_contiguous() else x[..., 2:].data,
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "numpy of columns": lambda x: torch.from_numpy(x.detach()[..., 1:].numpy()),
    "dlpack": lambda x: torch.from_dlpack(x.detach()),
    "storage": lambda x: x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride()),
    "shallow copy": lambda x: copy.copy(x.detach()),
    "shared memory": lambda x: torch.from_numpy(x.detach().share_memory_().numpy()),
    "address": lambda x: _at_address(x) if x.is_contiguous() else x[..., 2:].data,
    "unsafe split": lambda x: x.unsafe_split(2, -1)[0].data,
}
_alone: dict[int, Any] = {}


def _at_address(x: Tensor) -> Tensor:
    array = (ctypes.c_byte * max(x.nbytes, 1)).from_address(x.data_ptr())
    return torch.frombuffer(array, dtype=x.dtype, count=x.numel()).view(x.shape) if x.numel() else x


@torch.library.custom_op("megatron_rl_patches_tests::halve", mutates_args=())
def _halve(x: Tensor) -> Tensor:
    x.detach().numpy()[...] *= 0.5  # which its schema does not say
    return x.new_zeros(0)


def _halve_by_a_collective(x: Tensor) -> None:
    """Let a collective of this rank alone write to logits."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    if rank not in _alone:
        _alone[rank] = dist.new_group([rank], use_local_synchronization=True)
    if x.is_contiguous():
        _alone[rank].allgather([[x.detach()]], [x.detach() / 2]).wait()
        _alone[rank].allgather([[x.detach().view(-1)]], [x.detach().view(-1) / 2]).wait()


WRITTEN = {
    **{f"written by {way}": _changed(lambda x, way=way: MEMORY[way](x).mul_(0.5)) for way in MEMORY},
    "written by a collective": _changed(_halve_by_a_collective),
    "written by an operation": _changed(lambda x: _halve(x.detach())),
}


def _past_the_graph(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.view(x.shape)[:]


#: Of logits without a graph: torch keeps the other tensor for the gradient.
OVERWRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": _overwritten(lambda x, rows: x[rows], 1, 0, 1),
    "mask": _overwritten(lambda x, mask: x[mask], False, True),
    "index_select": _overwritten(lambda x, rows: x.index_select(0, rows), 1, 1),
    "divisor": _overwritten(lambda x, divisor: x / divisor, 2.0),
    "divisor in place": _overwritten(lambda x, divisor: x.div_(divisor), 2.0),
}
#: What makes deferred logits ordinary, takes rows of them, or gives them another scale. Nobody draws these.
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_fill": lambda x: x.masked_fill(_last(x), -torch.inf),
    "divided twice": lambda x: x / 1.7 / 1.7,
    "written": _changed(lambda x: x[..., -1:].fill_(-torch.inf)),
    "written, then divided": lambda x: _changed(lambda x: x[:1].mul_(1.1))(x) / 1.3,
    "hooked": _changed(lambda x: x.register_hook(lambda gradient: 2 * gradient)),
    "function of its own": lambda x: _ThreeTimes.apply(x),
    "function of some rows": lambda x: torch.cat([_ThreeTimes.apply(x[0])[None][:, :5], x[1:, :5]]) / 2,
    "detached rows beside others": lambda x: torch.cat([x[:1].detach(), x[1:]]),
    "rows of another scale beside others": lambda x: torch.cat([x[:1] / 1.7, x[1:]]),
    "past the graph": _past_the_graph,
    "past the graph beside others": lambda x: torch.cat([_past_the_graph(x)[1:], x[:1]]),
    "where": lambda x: torch.where(_last(x), x.new_tensor(-30.0), x),
    "divided per row": lambda x: x / torch.linspace(1, 2, x.shape[1], dtype=x.dtype)[:, None],
    "divided in place": _changed(lambda x: x.div_(1.7)),
    "masked in place": _changed(lambda x: x.masked_fill_(_last(x), -torch.inf)),
    "clamped": lambda x: x.clamp(min=-1.5),
    "other strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "retain_grad": _changed(lambda x: x.retain_grad()),
    "nan_to_num in place": _changed(lambda x: x.nan_to_num_()),
    "read": _changed(lambda x: x.exp().sum()),
    "columns read": _changed(lambda x: x[..., :3].sum()),
    "stored": _changed(lambda x: x.detach().tolist()),
    "no operation": lambda x: x,
    **OVERWRITTEN,
    **WRITTEN,
}
#: These have another number of rows, which no rank may have alone.
RESHAPING = ("function of some rows", "numbers", "mask")


class Step(NamedTuple):
    """Appends a tensor made of one before, or changes one.

    Attributes:
        of: which tensor, modulo their number; -1 is the last.
        draw: seed of what is drawn: which rows, which columns, which number.
        alone: the tensor-parallel rank that does it; the others go on with the tensor itself.
    """

    kind: str
    of: int
    draw: int
    alone: int | None = None


class Loss(NamedTuple):
    """A loss of one tensor.

    Attributes:
        kind: ``scores``, ``at``, ``topk``, ``divergence``, ``sum``. Nobody draws ``alone``, log-probabilities
            without entropies, ``kept``, those of some columns, ``mutual``, a divergence from other rows of
            the same logits, ``mixture``, and with ``labels`` or ``samples``, scores as frameworks have them.
        of: which tensor, as in a step.
        draw: seed of targets, ids, masks and teachers.
        within: ``checkpointed`` or ``reentrant``, the function that computes it again in backward.
    """

    kind: str
    of: int
    draw: int
    temperature: float = 1.0
    divergence: str = "reverse_kl"
    within: str = ""


@dataclass(frozen=True)
class Program:
    """Logits, steps and losses.

    Attributes:
        seed: of hidden states and weights.
        tp: number of tensor-parallel ranks.
        made: ``deferred`` or ``ordinary``.
        within: the checkpoint in which the logits are made: ``checkpointed``, ``reentrant``.
        masked: what the bias of the second half of the vocabulary is, if not zero.
        single: float32, whose roundings count.
        fewest_columns: how many columns a tile has before it has fewer rows; few in a vocabulary of ten.
        written_after: one rank writes to the memory of deferred logits between forward and backward, which a
            loss does not read again.
        sequence_parallel: each tensor-parallel rank has a part of the hidden states.
        gradients: whether hidden states, weight and bias require one.
    """

    seed: int
    tp: int = 1
    made: str = "deferred"
    within: str = ""
    masked: float = 0.0
    single: bool = False
    sequence_parallel: bool = False
    tile_bytes: int = 128
    fewest_columns: int = 1024
    written_after: bool = False
    gradients: tuple[bool, bool, bool] = (True, True, True)
    steps: tuple[Step, ...] = ()
    losses: tuple[Loss, ...] = ()

    @property
    def width(self) -> int:
        """Columns of one rank."""
        return 10 // self.tp


def drawn(seed: int, tp: int = 1) -> Program:
    draw = random.Random(seed * 8 + tp)

    def which() -> int:
        return draw.choice([-1, draw.randrange(8)])

    def step() -> Step:
        kind = draw.choice(_OFTEN * 2 + _RARELY)
        alone = draw.randrange(tp) if kind in _ALONE and tp > 1 and draw.random() < 0.5 else None
        return Step(kind, which(), draw.randrange(1000), alone)

    def loss() -> Loss:
        kind = draw.choice(["scores", "at", "topk", "divergence"] * 2 + ["sum"] * (tp == 1))
        numbers = which(), draw.randrange(1000), draw.choice([1.0, 0.7, 0.6, 2.0])
        divergence, within = draw.choice(DIVERGENCES), draw.choice(["", "", "checkpointed", "reentrant"])
        return Loss(kind, *numbers, divergence, within)

    made = draw.choice(["deferred"] * 3 + ["ordinary"] * 2)
    gradients = tuple(draw.random() < 0.8 for _ in range(3))
    within = draw.choice(["", "", "checkpointed", "reentrant"]) if gradients[0] else ""
    return Program(
        seed,
        tp,
        made=made,
        within=within,
        masked=draw.choice(_MASKS) if draw.random() < 0.3 else 0.0,
        tile_bytes=draw.choice([128, 128, 512, 1 << 20]),
        fewest_columns=draw.choice([1024, 2]),
        written_after=draw.random() < 0.3,
        gradients=gradients,
        steps=tuple(step() for _ in range(draw.randrange(0, 8))),
        losses=tuple(loss() for _ in range(draw.randrange(1, 3))),
    )


class _ThreeTimes(torch.autograd.Function):
    """Rows whose gradient is three times what it is, as no known operation's is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


def run_step(step: Step, tensors: list[Tensor], rank: int) -> None:
    x, kind, draw = tensors[step.of % len(tensors)], step.kind, random.Random(step.draw)
    if step.alone not in (None, rank):
        tensors.append(x)
        return
    without_graph = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    with without_graph.get(kind, nullcontext)():
        if kind in without_graph:
            kind = draw.choice(["slice", "index", "clone", "reshape"])
        tensors.append(_result(kind, x, tensors, draw, rank))


def _result(kind: str, x: Tensor, tensors: list[Tensor], draw: random.Random, rank: int) -> Tensor:
    rows, size, width = x.dim() - 1, x.shape[0], x.shape[-1]
    if kind in OPERATIONS:
        return OPERATIONS[kind](x)
    if kind == "slice":
        dim = draw.randrange(rows)
        start, stop = sorted(draw.choices(range(x.shape[dim] + 1), k=2))
        return x.narrow(dim, start, stop - start)[:: draw.choice([1, 1, 2])]
    if kind == "index":
        numbers = torch.tensor([draw.randrange(size) for _ in range(draw.randrange(4))] if size else [])
        return x[numbers.long()] if draw.random() < 0.5 else x.index_select(0, numbers.long())
    if kind == "rows":
        return x[torch.tensor([draw.random() < 0.6 for _ in range(size)], dtype=torch.bool)]
    if kind == "columns":
        first = draw.choice([0, 1, width // 2]) or (rank == 0)  # the first id of all stays
        masked = (torch.arange(width) >= first) & (torch.arange(width) < draw.choice([width, width - 1]))
        return x.masked_fill(masked, draw.choice(_MASKS))
    if kind == "cat":
        others = [other for other in tensors if other.shape[1:] == x.shape[1:]]
        return torch.cat([x, *draw.choices(others, k=draw.randrange(1, 3))])
    if kind == "reshape":
        return x.reshape(-1, width) if draw.random() < 0.7 else x.unsqueeze(draw.randrange(rows))
    if kind == "transpose":
        return x.transpose(0, rows - 1).contiguous() if draw.random() < 0.5 else x.transpose(0, rows - 1)
    if kind == "split":
        return draw.choice(x.split(max(size // 2, 1))) if size else x
    if kind == "divide":
        number = draw.choice([2.0, 0.7, 1.0])
        return x / (torch.tensor(number, dtype=x.dtype) if draw.random() < 0.3 else number)
    if kind == "detach":
        return x.detach()
    if kind == "clone":
        return x.clone()
    if kind == "convert":
        return x.to(torch.float64)
    if kind == "function":
        return _ThreeTimes.apply(x)
    if kind == "divide in place" and x.numel():
        x.div_(draw.choice([2.0, 0.7]))
    elif kind == "write" and size:
        x[draw.randrange(size)] = draw.random()
    elif kind == "write alias" and x.numel():
        x[..., width // 4 : width // 2].mul_(1.5)
    elif kind == "write memory" and x.numel():
        draw.choice(list(WRITTEN.values()))(x)
    elif kind == "look":
        draw.choice([lambda: x.detach().abs().max(), lambda: x.detach().sum(), lambda: x.exp().sum()])()
    elif kind == "hook" and x.grad_fn is not None:
        x.register_hook(lambda gradient: 2 * gradient)
    return x
