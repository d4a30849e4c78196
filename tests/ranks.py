"""Tests that run on ranks: ``@on_ranks(2)`` runs the body of a test on each of two gloo ranks."""

import functools
import gc
import inspect
import pprint
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import pytest
import torch.distributed as dist

from megatron_rl_patches import testing
from megatron_rl_patches.testing import cpu_backend, spawn_ranks
from tests import layers as layers  # before Megatron


def on_ranks(
    ranks: int | Callable[..., int],
    *,
    megatron: bool = True,
    transformer_engine: bool | str = False,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    **sizes: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test in processes of its own, with a gloo group, inside ``cpu_backend()``.

    Fixtures and parameters of the test must be picklable. Where an assertion fails, the variables of its
    function are shown, since asserts are not rewritten on ranks.

    Args:
        ranks: how many, or a function of parameters of the test that returns it.
        megatron: run inside ``cpu_backend()``.
        transformer_engine: the option of ``cpu_backend()``, which is also on if the test has a parameter
            ``layers`` with the value ``"transformer_engine"``. Ranks then have new interpreters: forked ones
            have imported Megatron, and the stand-in has to be in place before.
        timeout: in seconds.
        env: environment variables, which need new interpreters instead of forks.
        sizes: options of ``tiny_model()``; with any of them, Megatron's groups are initialized.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            count = ranks
            if callable(ranks):
                count = ranks(**{name: arguments[name] for name in inspect.signature(ranks).parameters})
            stand_in = transformer_engine or arguments.get("layers") == "transformer_engine"
            variables = env or ({"PYTHONWARNINGS": "ignore"} if stand_in else None)
            options = {"transformer_engine": stand_in} if megatron else None
            name = test.__module__, test.__qualname__
            skipped = spawn_ranks(
                _run_test, count, *name, arguments, options, sizes, timeout=timeout, env=variables
            )
            if skipped[0]:
                pytest.skip(skipped[0])

        return run

    return decorate


def by_speed(cases: Iterable[str], fast: Container[str], nightly: Container[str] = ()) -> list[Any]:
    """Return names of cases for ``parametrize``: all but the fast ones are slow tests, or nightly ones."""
    marks = pytest.mark.slow, pytest.mark.nightly
    return [pytest.param(name, marks=[] if name in fast else marks[name in nightly]) for name in cases]


def everywhere(value: Any, group: Any = None) -> list[Any]:
    """Return the values of all ranks of a group, on each of them."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _run_test(
    module: str, name: str, arguments: dict[str, Any], backend: dict[str, Any] | None, sizes: dict[str, Any]
) -> str:
    """Run the test in the process of a rank; return why it is skipped, if it is."""
    with ExitStack() as stack:
        if backend is not None:
            stack.enter_context(cpu_backend(**backend))
        if sizes:
            testing.tiny_model(**sizes).initialize()
        test = getattr(import_module(module), name).__wrapped__
        gc.freeze()  # what is imported is no garbage: collections take a fraction of the time
        try:
            test(**arguments)
        except pytest.skip.Exception as skipped:
            return str(skipped)
        except AssertionError as error:
            raise AssertionError(f"{error}\nwith {_variables_of(error)}") from error
    return ""


def _variables_of(error: AssertionError) -> str:
    """Return the variables of the innermost function of the tests that the error has passed."""
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_globals["__name__"].startswith("tests."):
            frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return pprint.pformat(frames[-1].f_locals, compact=True)[:4000]
