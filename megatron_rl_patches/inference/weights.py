"""The weights of a model: by name, to compare them, and as bytes, to copy them to host memory and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..common.chunks import unwrap
from ..errors import InferenceOnlyError, InvalidInputError, first

# Torch rounds pinned allocations up to powers of two: in one piece, a model could take twice its size.
_BLOCK_BYTES = 1 << 28
_SUMMED_BYTES = 1 << 28  # at a time
_STRETCH_BYTES = 512
_MULTIPLIER = 0x1E3779B97F4A7C15  # any large odd number

#: How the weights of a source differ from those of the model: kind -> name -> both sides in words.
Differences = dict[str, dict[str, str]]


def differences(
    source: Mapping[str, Any], model: Mapping[str, Any], where: str, *, dtypes: bool = True
) -> Differences:
    """Compare tensors, or what has shape and dtype, by name, shape and, with ``dtypes``, dtype.

    ``where`` is the name of the source for messages.
    """
    shapes: dict[str, str] = {}
    other_dtypes: dict[str, str] = {}
    for name in model.keys() & source.keys():
        theirs, own = source[name], model[name]
        if theirs.shape != own.shape:
            shapes[name] = f"{name} is {[*theirs.shape]} in {where} and {[*own.shape]} in the model"
        if dtypes and theirs.dtype != own.dtype:
            other_dtypes[name] = f"{name} is {theirs.dtype} in {where} and {own.dtype} in the model"
    return {
        f"missing in {where}": {name: name for name in model.keys() - source.keys()},
        f"unexpected in {where}": {name: name for name in source.keys() - model.keys()},
        "of another shape": shapes,
        "of another dtype": other_dtypes,
    }


def describe(*parts: Differences) -> str:
    """Return the first ten of each kind, each name once; empty if nothing differs."""
    merged: Differences = {}
    for part in parts:
        for kind, items in part.items():
            merged.setdefault(kind, {}).update(items)
    return "; ".join(
        f"tensors {kind} ({len(items)}): {first([items[name] for name in sorted(items)])}"
        for kind, items in merged.items()
        if items
    )


class Layout(NamedTuple):
    """Parameters and persistent buffers of a model, and where they lie."""

    weights: dict[str, torch.Tensor]
    #: Version counters of the tensors, which in-place functions increase.
    versions: list[int]
    #: uint8 ``[bytes]`` of every storage, once however many tensors share it.
    storages: list[torch.Tensor]


class HostCopy:
    """A copy of a model's weights in host memory; it does not change."""

    def __init__(self, storages: Sequence[torch.Tensor]) -> None:
        gpus = {storage.device for storage in storages if storage.is_cuda}
        self.nbytes = sum(map(len, storages))
        self.checksum = checksum(storages)
        sizes = [min(_BLOCK_BYTES, self.nbytes - start) for start in range(0, self.nbytes, _BLOCK_BYTES)]
        self._blocks = [
            torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=bool(gpus)) for size in sizes
        ]
        for storage, block in _aligned(storages, self._blocks):
            block.copy_(storage, non_blocking=True)
        for gpu in gpus:  # when this returns the copy is complete
            torch.cuda.current_stream(gpu).synchronize()

    def copy_to(self, storages: Sequence[torch.Tensor]) -> None:
        """Copy back, asynchronously on CUDA, into storages as large as those that were copied."""
        for storage, block in _aligned(storages, self._blocks):
            storage.copy_(block, non_blocking=True)


def checksum(storages: Sequence[torch.Tensor]) -> list[int]:
    """Return for each storage a sum, modulo 2**64, of its bytes and of where they are.

    It is the sum of stretches of 64 words, each times an odd number of its own, so that rows which have
    changed places are noticed. Each word is read once.
    """
    sums = []
    for storage in storages:
        total = storage.new_zeros((), dtype=torch.int64)
        for start in range(0, len(storage), _SUMMED_BYTES):
            block = storage[start : start + _SUMMED_BYTES]
            whole = len(block) // _STRETCH_BYTES * _STRETCH_BYTES
            stretches = block[:whole].view(torch.int64).view(-1, _STRETCH_BYTES // 8).sum(1)
            number = start // _STRETCH_BYTES
            places = torch.arange(number, number + len(stretches), device=storage.device)
            total += (stretches * (places * _MULTIPLIER | 1)).sum() + block[whole:].sum()
        sums.append(total)
    return [int(total) for total in sums]


def layout_of(chunks: Sequence[torch.nn.Module]) -> Layout:
    """Return the layout of a model; weights that train and weights without plain memory are refused."""
    weights = dict(named_weights(chunks))
    storages: dict[int, torch.Tensor] = {}
    for name, weight in weights.items():
        if weight.requires_grad:
            raise InferenceOnlyError(
                f"{name} requires grad: a pool overwrites the weights of its model, which must be one that "
                "does not train. Freeze it (requires_grad_(False)), or pass a model of its own."
            )
        if weight.numel() == 0:
            continue
        try:
            address = weight.untyped_storage().data_ptr()
        except RuntimeError:  # tensor classes that wrap others
            address = 0
        if address == 0:
            raise InvalidInputError(
                f"{name} ({type(weight).__name__} on {weight.device}) has no plain memory to copy: a pool "
                "takes models on real devices, without quantized weights."
            )
        if weight.is_inference():
            raise InvalidInputError(
                f"{name} was made under torch.inference_mode(), so that a pool cannot notice who changes it: "
                "build the model outside of it."
            )
        if address not in storages:
            empty = torch.empty(0, dtype=torch.uint8, device=weight.device)
            storages[address] = empty.set_(weight.untyped_storage())
    return Layout(weights, [weight._version for weight in weights.values()], [*storages.values()])


def named_weights(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers by their names in ``state_dict``; shared ones by each name."""
    for prefix, chunk in zip(prefixes(len(chunks)), chunks, strict=True):
        for path, module in unwrap(chunk).named_modules(remove_duplicate=False):
            for name, weight in {**module._parameters, **module._buffers}.items():
                if weight is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}{path}{'.' * bool(path)}{name}", weight


def prefixes(chunks: int) -> list[str]:
    """Return prefixes that make the names of several chunks different."""
    return [""] if chunks == 1 else [f"chunk {index}: " for index in range(chunks)]


def _aligned(
    storages: Iterable[torch.Tensor], blocks: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same bytes of both, in pieces that end where a storage or a block ends."""
    remaining = iter(blocks)
    block = torch.empty(0, dtype=torch.uint8)
    for storage in storages:
        while len(storage):
            block = block if len(block) else next(remaining)
            size = min(len(storage), len(block))
            yield storage[:size], block[:size]
            storage, block = storage[size:], block[size:]
