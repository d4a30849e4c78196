"""Names that megatron-core forgets to define, or calls in vain, where TransformerEngine is not installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock


def _quantizing_nothing_is_fine(original: Callable[..., Any]) -> Callable[..., Any]:
    # Core 0.12 calls this with no FP8 parameters in every optimizer step, and it raises.
    def quantize(model_params: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        return original(model_params, *args, **kwargs) if model_params else None

    return quantize


def _fill_fp8_utils(module: ModuleType, stack: ExitStack) -> None:
    name = "_quantize_param_shard_impl"
    if hasattr(module, name):
        quantize = _quantizing_nothing_is_fine(getattr(module, name))
        stack.enter_context(mock.patch.object(module, name, quantize))


def _fill_moe_utils(module: ModuleType, stack: ExitStack) -> None:
    # The router tests it against None, but the import that failed left it undefined.
    if not hasattr(module, "te_general_gemm"):
        stack.enter_context(mock.patch.object(module, "te_general_gemm", None, create=True))


_GAPS = {
    "megatron.core.fp8_utils": _fill_fp8_utils,
    "megatron.core.transformer.moe.moe_utils": _fill_moe_utils,
}


class _FillOnImport(MetaPathFinder):
    """Fills the gaps of a module right after its import; finds nothing by itself."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _GAPS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_fill(module: ModuleType) -> None:
                execute(module)
                _GAPS[fullname](module, self._stack)

            spec.loader.exec_module = execute_and_fill  # type: ignore[method-assign]
        return spec


@contextmanager
def filled() -> Iterator[None]:
    """Fill the gaps of modules that are imported, and of those that will be while the context lasts."""
    with ExitStack() as stack:
        for name, fill in _GAPS.items():
            if name in sys.modules:
                fill(sys.modules[name], stack)
        finder = _FillOnImport(stack)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield
