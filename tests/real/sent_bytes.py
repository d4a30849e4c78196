"""What collectives are given to send, by name and in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

# Where among its arguments a collective has what this rank sends.
_SENT = {"all_reduce": 0, "all_gather": 1, "all_gather_into_tensor": 1}


@contextmanager
def sent_bytes() -> Iterator[list[tuple[str, int]]]:
    sent: list[tuple[str, int]] = []

    def counted(name: str, place: int) -> Any:
        collective = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            sent.append((name, args[place].nbytes))
            return collective(*args, **options)

        return call

    with ExitStack() as stack:
        for name, place in _SENT.items():
            stack.enter_context(mock.patch.object(dist, name, counted(name, place)))
        yield sent
