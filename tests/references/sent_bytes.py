"""The collectives that are called, and how many bytes each is given to send."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

# Where among its arguments a collective has what this rank sends; of the others nobody asks.
_SENT = {"all_reduce": 0, "all_gather": 1, "all_gather_into_tensor": 1}
_OTHERS = (
    *("all_gather_object", "all_to_all", "all_to_all_single", "barrier", "broadcast", "gather", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor"),
)


@contextmanager
def sent_bytes() -> Iterator[list[tuple[str, int]]]:
    sent: list[tuple[str, int]] = []

    def counted(name: str) -> Any:
        collective = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            sent.append((name, args[_SENT[name]].nbytes if name in _SENT else 0))
            return collective(*args, **options)

        return call

    with ExitStack() as stack:
        for name in (*_SENT, *_OTHERS):
            stack.enter_context(mock.patch.object(dist, name, counted(name)))
        yield sent
