"""Reading a pickle of random opcodes changes nothing of the process."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._utils
from torch.distributed.checkpoint import filesystem, metadata

from megatron_rl_patches.errors import CheckpointError

from .test_checkpoints import STORAGE, read_index, read_shard, state_of

PROGRAMS = 200

# What real files name.
NAMED: dict[tuple[str, str], Any] = {
    (value.__module__, value.__name__): value
    for module in (metadata, filesystem)
    for value in vars(module).values()
    if isinstance(value, type) and value.__module__ == module.__name__
}
NAMED |= {
    ("builtins", "getattr"): getattr,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "float32"): torch.float32,
    ("torch", "FloatStorage"): torch.FloatStorage,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("torch.storage", "_load_from_bytes"): torch.storage._load_from_bytes,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
}


def _program(draw: random.Random) -> bytes:
    """Return opcodes drawn at random: nearly all of them change an object that the pickle names."""

    def name() -> bytes:
        return "c{}\n{}\n".format(*draw.choice(sorted([*NAMED, ("unknown", "unknown")]))).encode()

    def plain() -> bytes:
        return draw.choice([b"N", b"K\x00", b"K\x01", b"VTORCH_PRESERVE_FORMAT\n", b"]", b"}", b")"])

    def attribute() -> bytes:
        names = "__defaults__ __kwdefaults__ __hash__ __eq__ __init__ __new__ __dict__ __setstate__ __class__"
        more = "__reduce_ex__ append extend fqn detach _value_"
        return f"V{draw.choice(f'{names} {more}'.split())}\n".encode()

    def target() -> bytes:
        call = b"(" + b"".join(plain() for _ in range(draw.randint(0, 2))) + b"t"
        targets = [
            name(),
            name() + call + draw.choice([b"R", b"\x81"]),
            name() + b"(" + name() + plain() + b"tR",
            draw.choice([b"h\x00", b"h\x01", b"]", b"}", b"\x8f", b")", STORAGE]),
        ]
        return draw.choices(targets, weights=[5, 3, 1, 1])[0]

    def state() -> bytes:
        items = b"".join(attribute() + draw.choice([plain, name])() for _ in range(draw.randint(1, 3)))
        return draw.choice([b"(" + items + b"d", b"(N(" + items + b"dt", plain()])

    def change() -> bytes:
        value = draw.choice([plain, target])
        changes = [
            state() + b"b",
            state() + b"b" + state() + b"b",
            attribute() + value() + b"s",
            b"(" + attribute() + value() + b"u",
            value() + b"a",
            b"(" + value() + value() + b"e",
            b"(" + plain() + b"\x90",
        ]
        return target() + draw.choices(changes, weights=[12, 4, 1, 1, 1, 1, 1])[0] + b"\x940"  # MEMOIZE, POP

    return b"\x80\x04" + b"".join(change() for _ in range(draw.randint(1, 3))) + target() + b"."


@pytest.mark.parametrize("load", [read_index, read_shard])
def test_random_pickles_change_nothing_of_the_process(load: Callable[..., None], tmp_path: Path) -> None:
    before = state_of(NAMED.values())
    for seed in range(PROGRAMS):
        content = _program(random.Random(seed))
        with suppress(CheckpointError):
            load(content, tmp_path)
        assert state_of(NAMED.values()) == before, f"seed {seed}: {content!r}"
