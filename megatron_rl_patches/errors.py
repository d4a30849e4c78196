"""Every error that callers may want to catch, and parts of messages."""

from __future__ import annotations

from collections.abc import Collection


class MegatronRLPatchesError(Exception):
    """Base of all errors that this package raises on purpose."""


class PatchError(MegatronRLPatchesError, RuntimeError):
    """A patch that was asked for could not take effect.

    Derives from ``RuntimeError`` and never from ``ImportError``: frameworks swallow the latter around
    optional imports, and a required patch that silently stays away is the failure this error exists to show.
    """


class InferenceOnlyError(MegatronRLPatchesError, RuntimeError):
    """A model that only scores was asked to train, or a model that trains was given where one only scores."""


class CheckpointError(MegatronRLPatchesError, RuntimeError):
    """A checkpoint is missing, partial, corrupt, or of another model; nothing of it was loaded."""


class InvalidInputError(MegatronRLPatchesError, ValueError):
    """Arguments that do not fit together; raised on every rank alike, before any collective.

    There are two exceptions. What one rank alone can know, such as that it refuses ``inplace_backward``,
    travels with a collective: on a CPU all ranks raise after it; on a GPU that rank raises, and the kernels
    of the others stop with a device-side assertion. Values of ids too are checked on a GPU by such a one.
    """


class NonFiniteGradients(MegatronRLPatchesError, ArithmeticError):
    """Steps in a row were skipped, as their gradient norms were not finite; raised on every rank alike."""


def first(items: Collection[object], count: int = 10) -> str:
    """Join the first items with commas, and say how many more there are: ``a, b and 7 more``."""
    shown = [str(item) for item, _ in zip(items, range(count), strict=False)]
    more = len(items) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def one_line(error: BaseException) -> str:
    """Return type and first line of an exception; the whole is chained to the error that quotes it."""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
