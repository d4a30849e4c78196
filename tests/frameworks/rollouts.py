"""Rollouts with saves between them, through ``train`` and ``save`` of a stand-in or of a framework itself."""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from megatron_rl_patches import apply, revert, status
from tests.ranks import everywhere

PATCH = "reentrant-train"
NO_SYNC = "AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be None"
TIMER = "AssertionError: timer has already been started"
FINE = "fine"
LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
STAND_IN = "megatron_rl_patches.testing.transformer_engine"
GROUPED = {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}


def with_layers(suite: str, **ranks: int) -> Any:
    """Run a test of a suite with local layers, and as another suite with TransformerEngine's."""
    suites = {LOCAL: suite, TRANSFORMER_ENGINE: "TransformerEngine layers"}
    return pytest.mark.parametrize(
        "layers",
        [pytest.param(name, marks=pytest.mark.runs(named, **ranks)) for name, named in suites.items()],
    )


def outcome(call: Callable[..., object], *args: Any) -> str:
    try:
        call(*args)
    except KeyError as error:
        return f"KeyError: {type(error.args[0]).__name__}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return FINE


def states_of(*frameworks: str, patch: str = PATCH) -> dict[str, str]:
    return {s.target: s.state for s in status() if s.framework in frameworks and s.patch == patch}


@contextmanager
def results_of(module: ModuleType, function: str) -> Iterator[list[Any]]:
    """Note what a function of a module returns."""
    own, results = getattr(module, function), []

    def noting(*args: Any, **kwargs: Any) -> Any:
        results.append(own(*args, **kwargs))
        return results[-1]

    with mock.patch.object(module, function, noting):
        yield results


def spoil_forward(chunk: Any, number: int) -> None:
    """Make the output of one forward pass NaN; 0 is of none."""
    passes = count(1)
    chunk.module.register_forward_hook(
        lambda module, arguments, output: output * math.nan if next(passes) == number else output
    )


def check_layers(model: Sequence[Any], options: Any) -> None:
    """Check that layers come from the stand-in of TransformerEngine if these were asked for, or else none."""
    classes = {type(module) for chunk in model for module in chunk.modules()}
    names = {
        of.__name__ for of in classes if any(base.__module__.startswith(STAND_IN) for base in of.__mro__)
    }
    expected: set[str] = set()
    if options.layers == TRANSFORMER_ENGINE:
        expected = {"TELayerNormColumnParallelLinear", "TEDotProductAttention", "TERowParallelLinear"}
        expected |= GROUPED if options.kind == "moe" else set()
    assert names - {"LayerNorm", "RMSNorm"} == expected


def check_rollouts(job_type: Any, framework: str, **options: Any) -> None:
    """Apply the patch, train and save three times, and revert it.

    ``job_type`` is a class of jobs, and ``options`` are those of its model.

    Weights and, where a framework scores, log-probabilities are those of one call that needs no patch.
    """
    from tests.frameworks.jobs import hooks_are_on
    from tests.references.tiny_gpt import counting_overlap

    functions = job_type.functions()
    uninterrupted = job_type(**options)
    check_layers(uninterrupted.model, uninterrupted.options)
    initial = uninterrupted.checksum()
    uninterrupted.train(6)
    checksum = uninterrupted.checksum()
    assert checksum != initial
    # Before was before: what is called then is patched already, and says what it wraps.
    originals = {name: getattr(homes[0], name) for name, homes in functions.items()}
    originals = {name: getattr(function, "__wrapped__", function) for name, function in originals.items()}
    gc.enable()  # unpatched, train() leaves it off
    apply(PATCH)

    job = job_type(**options)
    scores = hasattr(job, "log_probs")
    assert hooks_are_on(job.model)
    with counting_overlap() as overlap:
        for _ in range(3):
            if scores:
                job.log_probs()
            job.train(2)
            assert not hooks_are_on(job.model)
            job.save()
            assert not hooks_are_on(job.model)
    assert job.checksum() == checksum
    assert overlap.param_gathers > 0 and overlap.grad_reduces > 0
    if scores:
        pairs = zip(job.log_probs(), uninterrupted.log_probs(), strict=True)
        assert all(same.equal(other) for same, other in pairs)
    # What is saved is whole: the same on each replica. Ranks have experts and parts of tensors of their own.
    assert len(set(job.disk.checksums)) == 3
    different = {tuple(checksums) for checksums in everywhere(job.disk.checksums)}
    assert len(different) == job.options.ep * job.options.tp
    assert job.disk.hooks_were_on == [False] * 3
    assert gc.isenabled()
    states = states_of(framework, "megatron.core")
    assert set(states.values()) <= {"applied", "not needed"}
    assert [state for target, state in states.items() if target.endswith(".train")] == ["applied"]
    for name, homes in functions.items():
        assert len({id(getattr(home, name)) for home in homes}) == 1, f"a copy of {name} is not patched"

    installed, job.config.no_sync_func = job.config.no_sync_func, nullcontext
    assert outcome(job.train).startswith(NO_SYNC)
    assert job.config.no_sync_func is nullcontext
    job.config.no_sync_func = installed
    revert(PATCH)
    for name, homes in functions.items():
        assert all(getattr(home, name) is originals[name] for home in homes)
    assert outcome(job.train).startswith(NO_SYNC)
