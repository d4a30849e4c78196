"""The weights of a model by name, how those of two models differ, and checksums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..common.chunks import unwrap
from ..common.text import listed

_SUMMED_BYTES = 1 << 28  # at a time
_STRETCH_BYTES = 512
_MULTIPLIER = 0x1E3779B97F4A7C15  # any large odd number

#: The method by which a router of Megatron turns back to float32 what ``Float16Module`` has rounded.
TURNS_TO_FLOAT32 = "_maintain_float32_expert_bias"
#: Two paddings of one vocabulary differ by fewer rows: Megatron pads to a multiple of 128 × TP, TP up to 16.
MAX_PADDING = 128 * 16
#: Weights of one of these dtypes may be loaded into another; a quantized weight would lack its scales.
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

#: How weights differ: pairs of a kind of difference and a text that begins with the name of the weight.
Differences = set[tuple[str, str]]


def differences(
    source: Mapping[str, Any], model: Mapping[str, Any], where: str, *, dtypes: bool = True
) -> Differences:
    """Compare tensors by name, shape and dtype; ``where`` names the source.

    Without ``dtypes``, floating-point dtypes of 16, 32 or 64 bits are no difference.
    """
    result = {(f"missing in {where}", name) for name in model.keys() - source.keys()}
    result |= {(f"unexpected in {where}", name) for name in source.keys() - model.keys()}
    text = "{} is {} in {} and {} in the model"
    for name in model.keys() & source.keys():
        theirs, own = source[name], model[name]
        if theirs.shape != own.shape:
            result.add(("of another shape", text.format(name, [*theirs.shape], where, [*own.shape])))
        if theirs.dtype != own.dtype and (dtypes or not {theirs.dtype, own.dtype} <= _FLOATS):
            result.add(("of another dtype", text.format(name, theirs.dtype, where, own.dtype)))
    return result


def describe(differing: Differences) -> str:
    """Return the first ten of each kind; empty if nothing differs."""
    texts: dict[str, list[str]] = {}
    for kind, text in sorted(differing):
        texts.setdefault(kind, []).append(text)
    return "; ".join(f"tensors {kind} ({len(some)}): {listed(some)}" for kind, some in texts.items())


def is_of_output_head(name: str) -> bool:
    """Return whether a weight has the name that Megatron gives to those of an output layer."""
    return ".output_layer." in f".{name}"


def checksum(tensors: Sequence[torch.Tensor], stretch: int = _STRETCH_BYTES) -> list[int]:
    """Return for each tensor a sum, modulo 2**64, of stretches of so many bytes, a multiple of 8.

    Each stretch is multiplied by an odd number of its own, so that stretches which change places are noticed.
    """
    sums = []
    for tensor in tensors:
        storage = tensor.contiguous().flatten().view(torch.uint8)
        total = storage.new_zeros((), dtype=torch.int64)
        for start in range(0, len(storage), _SUMMED_BYTES):
            block = storage[start : start + _SUMMED_BYTES]
            whole = len(block) // stretch * stretch
            stretches = block[:whole].view(torch.int64).view(-1, stretch // 8).sum(1)
            number = start // stretch
            places = torch.arange(number, number + len(stretches), device=storage.device)
            total += (stretches * (places * _MULTIPLIER | 1)).sum() + block[whole:].sum()
        sums.append(total)
    # Together, so that the CPU waits for the GPU once.
    return torch.stack([total.to(sums[0].device) for total in sums]).tolist() if sums else []


def named_weights(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers by their names in ``state_dict``; shared ones by each name."""
    for index, chunk in enumerate(chunks):
        prefix = f"chunk {index}: " if len(chunks) > 1 else ""
        for path, module in unwrap(chunk).named_modules(remove_duplicate=False):
            for name, weight in {**module._parameters, **module._buffers}.items():
                if weight is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}{path}{'.' * bool(path)}{name}", weight
