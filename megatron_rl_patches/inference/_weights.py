"""The weights of a model as bytes: compared with others', copied to host memory and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ..errors import InvalidInputError

_SHOWN = 10
# Torch rounds pinned allocations up to powers of two: in one piece, a model could take twice its size.
_BLOCK_BYTES = 1 << 28

#: Name -> what must be equal, in words.
Description = dict[str, str]


class Layout(NamedTuple):
    """Parameters and persistent buffers of a model, and where they lie."""

    description: Description
    #: Versions of the tensors, which in-place functions raise.
    versions: list[int]
    #: uint8 ``[bytes]`` of every storage, once however many tensors share it.
    storages: list[torch.Tensor]


class Image:
    """A copy of a model's weights in host memory; it does not change."""

    def __init__(self, storages: Sequence[torch.Tensor]) -> None:
        """Copy the storages; when this returns the copy is complete."""
        gpus = {storage.device for storage in storages if storage.is_cuda}
        self.nbytes = sum(map(len, storages))
        sizes = [min(_BLOCK_BYTES, self.nbytes - start) for start in range(0, self.nbytes, _BLOCK_BYTES)]
        self._blocks = [
            torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=bool(gpus)) for size in sizes
        ]
        for storage, block in _aligned(storages, self._blocks):
            block.copy_(storage, non_blocking=True)
        for gpu in gpus:
            torch.cuda.current_stream(gpu).synchronize()

    def copy_to(self, storages: Sequence[torch.Tensor]) -> None:
        """Copy back, asynchronously on CUDA. The storages are as those that were copied."""
        for storage, block in _aligned(storages, self._blocks):
            storage.copy_(block, non_blocking=True)


def layout_of(chunks: Sequence[torch.nn.Module]) -> Layout:
    """The layout of a model.

    Raises:
        InvalidInputError: a weight without plain memory.
    """
    weights = list(named_weights(chunks))
    storages: dict[int, torch.Tensor] = {}
    for name, weight in weights:
        if weight.numel() == 0:
            continue
        address = _address(weight)
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
    return Layout(described(weights), [weight._version for _, weight in weights], [*storages.values()])


def named_weights(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by their names in ``state_dict``; shared ones by each name."""
    for prefix, chunk in zip(prefixes(len(chunks)), chunks, strict=True):
        while isinstance(wrapped := getattr(chunk, "module", None), torch.nn.Module):
            chunk = wrapped
        for path, module in chunk.named_modules(remove_duplicate=False):
            own = [*module.named_parameters(recurse=False, remove_duplicate=False)]
            own += [*module.named_buffers(recurse=False, remove_duplicate=False)]
            for name, weight in own:
                if name not in module._non_persistent_buffers_set:
                    yield f"{prefix}{path}{'.' * bool(path)}{name}", weight


def all_nan(chunks: Sequence[torch.nn.Module]) -> bool:
    """Is every parameter NaN throughout, as ``build_inference_model`` leaves them?"""
    return all(
        parameter.is_floating_point() and parameter.element_size() > 1 and bool(parameter.isnan().all())
        for chunk in chunks
        for parameter in chunk.parameters()
    )


def prefixes(chunks: int) -> list[str]:
    """What tells the names of one chunk from those of another."""
    return [""] if chunks == 1 else [f"chunk {index}: " for index in range(chunks)]


def described(weights: Iterable[tuple[str, torch.Tensor]]) -> Description:
    """Shape and dtype of each weight."""
    return {
        name: f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}" for name, weight in weights
    }


def difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """What differs, the first ten of each kind; empty if nothing does."""
    kinds = {
        "missing": [f"{name} ({what})" for name, what in expected.items() if name not in found],
        "unexpected": [f"{name} ({what})" for name, what in found.items() if name not in expected],
        "different": [
            f"{name} is {what}, expected {expected[name]}"
            for name, what in found.items()
            if expected.get(name, what) != what
        ],
    }
    return "; ".join(
        f"{kind} ({len(items)}): {', '.join(items[:_SHOWN])}{', ...' * (len(items) > _SHOWN)}"
        for kind, items in kinds.items()
        if items
    )


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # tensor classes that wrap others
        return 0


def _aligned(
    storages: Iterable[torch.Tensor], blocks: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same bytes of both, in pieces that end where one of the two ends."""
    remaining = iter(blocks)
    block = torch.empty(0, dtype=torch.uint8)
    for storage in storages:
        while len(storage):
            block = block if len(block) else next(remaining)
            size = min(len(storage), len(block))
            yield storage[:size], block[:size]
            storage, block = storage[size:], block[size:]
