"""Every error that callers may want to catch."""


class MegatronRLPatchesError(Exception):
    """Base of all errors that this package raises on purpose."""


class PatchError(MegatronRLPatchesError, RuntimeError):
    """A patch that was asked for could not take effect.

    Derives from ``RuntimeError`` and never from ``ImportError``: frameworks swallow the latter around
    optional imports, and a required patch that silently stays away is the failure this error exists to show.
    """
