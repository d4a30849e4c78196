"""Runs what patches bring along, which other packages may have written, so that it cannot end training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from _megatron_rl_patches_startup import is_interrupt

from ..common.text import one_line
from ..errors import PatchError


@contextmanager
def third_party(what: str, passing: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Raise ``PatchError`` in place of whatever the block raises, ``sys.exit()`` included.

    Ctrl-C, and what the handler of a signal raises, ends the program as ever. An adapter is not run in such a
    block: it runs in a call of the framework, which gets what it raises.

    Args:
        what: what the block does; the message is ``{what} raised SystemExit: 0``.
        passing: exceptions that stay as they are.
    """
    try:
        yield
    except BaseException as error:
        if is_interrupt(error) or isinstance(error, passing):
            raise
        raise PatchError(f"{what} raised {one_line(error)}") from error
