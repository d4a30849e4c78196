"""Every error that callers may want to catch."""

from __future__ import annotations


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

    There are two exceptions. A refusal of ``inplace_backward``, for which each rank has reasons of its own,
    travels with the loss's collective: on a CPU all ranks raise after it; on a GPU that rank raises, and the
    kernels of the others stop with a device-side assertion. Kernels on a GPU also check the values of ids.
    """


class NonFiniteGradients(MegatronRLPatchesError, ArithmeticError):
    """Steps in a row were skipped, as their gradient norms were not finite; raised on every rank alike."""


class LogProbsDiffer(MegatronRLPatchesError, ArithmeticError):
    """Log-probs of training are not those scored with the same weights; raised on ranks that see it."""
