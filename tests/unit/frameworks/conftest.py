"""Megatron warns, while it is imported, of what is not installed; pytest would make errors of that."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt  # noqa: F401
