"""Backward as CUDA runs it: in a thread of autograd, which has none of the caller's context variables."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any
from unittest.mock import patch

import torch

from megatron_rl_patches.common.scopes import Scope


@contextmanager
def device_thread() -> Iterator[None]:
    """Let every backward, recomputations included, run in a thread of its own for the length of the block.

    On a CPU autograd runs in the caller's thread, where a ``Scope`` that is open has its value.

    Raises:
        AssertionError: backward asks for a ``Scope`` that is open in the caller's thread alone.
    """
    engine, get = torch.autograd._engine_run_backward, Scope.get  # type: ignore[attr-defined]
    callers: dict[int, Context] = {}
    missed: list[str] = []

    def seen(scope: Scope[Any]) -> Any:
        value, caller = get(scope), callers.get(threading.get_ident())
        if value is None and caller is not None and caller.get(scope._variable) is not None:
            missed.append(scope._variable.name)
        return value

    def run(*args: Any, **kwargs: Any) -> Any:
        caller, results, errors = copy_context(), list[Any](), list[BaseException]()

        def backward() -> None:
            callers[threading.get_ident()] = caller
            try:
                results.append(engine(*args, **kwargs))
            except BaseException as error:
                errors.append(error)
            finally:
                del callers[threading.get_ident()]

        thread = threading.Thread(target=Context().run, args=(backward,))
        thread.start()
        thread.join()
        for error in errors:
            raise error
        return results[0]

    with patch.object(torch.autograd, "_engine_run_backward", run), patch.object(Scope, "get", seen):
        yield
    assert not missed, f"on CUDA backward does not see {missed}"
