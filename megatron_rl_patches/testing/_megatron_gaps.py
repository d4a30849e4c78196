"""Names that, without TransformerEngine, megatron-core leaves undefined or calls although it should not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest import mock

import wrapt


def _accepting_no_parameters(original: Callable[..., Any] | None) -> Callable[..., Any] | None:
    if original is None:
        return None

    def quantize(model_params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return original(model_params, *args, **kwargs) if model_params else None

    return quantize


def _known_te_version(original: Any) -> Any:
    if original is not None or find_spec("transformer_engine") is not None:
        return original
    from packaging.version import Version

    return Version("0.0.0")


# Module -> an attribute, and what takes the place of its value; an attribute that is missing counts as None.
_GAPS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    # megatron-core 0.12 calls this without parameters in every optimizer step, and it raises.
    "megatron.core.fp8_utils": ("_quantize_param_shard_impl", _accepting_no_parameters),
    # Up to megatron-core 0.18, is_te_min_version compares it with a version, also if it is None.
    "megatron.core.utils": ("_te_version", _known_te_version),
    # The router compares it with None, but the import that failed has left it undefined.
    "megatron.core.transformer.moe.moe_utils": ("te_general_gemm", lambda original: original),
}
_undo: ExitStack | None = None  # while the gaps are filled


def _fill(module: ModuleType) -> None:
    if _undo is not None:
        name, adapt = _GAPS[module.__name__]
        value = adapt(getattr(module, name, None))
        _undo.enter_context(mock.patch.object(module, name, value, create=True))


for _name in _GAPS:
    wrapt.register_post_import_hook(_fill, _name)


@contextmanager
def filled() -> Iterator[None]:
    """Fill the gaps of modules that are imported, and of those that will be while the context lasts."""
    global _undo
    with ExitStack() as _undo:
        for name in _GAPS.keys() & sys.modules.keys():
            _fill(sys.modules[name])
        try:
            yield
        finally:
            _undo = None
