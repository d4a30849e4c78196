"""What parameters of TransformerEngine's layers carry, against those of the stand-in.

    python -m tests.gpu.parameter_marks

Layers are made as Megatron makes them, and all attributes of their parameters are compared with those that
the stand-in sets when it stands for the installed release. The exit code is 1 if any differ.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from megatron_rl_patches.testing.transformer_engine import layers, refusals

_SIZES = {"Linear": (8, 16), "LayerNormLinear": (8, 16), "GroupedLinear": (2, 8, 16)}
STAND_IN = SimpleNamespace(**{name: getattr(layers, name) for name in ("LayerNorm", "RMSNorm", *_SIZES)})


def _cases() -> Iterator[tuple[str, tuple[int, ...], dict[str, Any]]]:
    """Yield the name of a layer, its sizes, and its options.

    Without a mode, the layer is duplicated, or has experts between which Megatron communicates itself.
    """
    for name, mode in product(_SIZES, ("column", "row", None)):
        for tp_size, sequence_parallel, bias in product((1, 2), (False, True), (False, True)):
            if name == "GroupedLinear" and tp_size > 1 and bias:
                continue  # TransformerEngine refuses it
            options = {"parallel_mode": mode, "tp_size": tp_size, "sequence_parallel": sequence_parallel}
            kinds = ("LayerNorm", "RMSNorm") if name == "LayerNormLinear" else ()
            for more in [{"normalization": kind} for kind in kinds] or [{}]:
                yield name, _SIZES[name], {**options, "bias": bias, "return_bias": bias, **more}
    for name, sequence_parallel in product(("LayerNorm", "RMSNorm"), (None, False, True)):
        yield name, (8,), {"sequence_parallel": sequence_parallel}


def table(layers: Any) -> dict[str, dict[str, Any]]:
    """Return shapes and attributes of the parameters of a module's layers."""
    device, marks = "cuda" if torch.cuda.is_available() else "cpu", {}
    for name, sizes, options in _cases():
        layer = getattr(layers, name)(*sizes, **options, params_dtype=torch.float32, device=device)
        case = f"{name}({', '.join(f'{key}={value}' for key, value in options.items())})"
        for key, parameter in layer.named_parameters():
            marks[f"{case}.{key}"] = {"shape": list(parameter.shape), **vars(parameter)}
    return marks


def main() -> int:
    try:
        real = import_module("transformer_engine.pytorch")
    except ModuleNotFoundError:
        print("TransformerEngine is not installed: there is nothing to compare with")
        return 0
    release = import_module("transformer_engine").__version__
    with mock.patch.object(refusals, "current", release):
        theirs, ours = table(real), table(STAND_IN)
    wrong = [name for name in theirs | ours if theirs.get(name) != ours.get(name)]
    print(f"TransformerEngine {release}: {len(ours)} parameters, of which {len(wrong)} differ")
    for name in wrong:
        print(f"{name}: TransformerEngine {theirs.get(name)}; the stand-in {ours.get(name)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
