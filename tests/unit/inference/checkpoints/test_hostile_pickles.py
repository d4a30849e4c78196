"""A hostile file leaves every class, function and constant that it names bit for bit as it was."""

from __future__ import annotations

import collections
import copyreg
import io
import random
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any

import pytest
import torch
import torch._utils
from torch.distributed.checkpoint import filesystem, metadata

from megatron_rl_patches.errors import CheckpointError
from megatron_rl_patches.inference.checkpoints import pickles
from megatron_rl_patches.inference.checkpoints.pickles import read_metadata

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


def _metadata(content: bytes, folder: Path) -> None:
    (folder / ".metadata").write_bytes(content)
    read_metadata(folder)


def _shard(content: bytes, folder: Path) -> None:
    """Read a file of ``torch.save`` with a storage, and with another pickle."""
    torch.save({"weight": torch.ones(1)}, plain := io.BytesIO())
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(changed := io.BytesIO(), "w") as target:
        for name in source.namelist():
            target.writestr(name, content if name.endswith("/data.pkl") else source.read(name))
    pickles.unpickle_dict(changed.getvalue(), folder)


def _watched() -> Iterator[Any]:
    """Yield what a file names, the members of enums, the methods of classes, and our own class."""
    yield pickles.Record
    for value in NAMED.values():
        yield value
        if isinstance(value, type):
            yield from value if issubclass(value, Enum) else ()
            yield from (member for member in vars(value).values() if isinstance(member, FunctionType))


def _state() -> list[Any]:
    """Return what can be changed of all that is watched; items of dicts are copied."""
    # Reading annotations adds an empty dict, so they come first.
    names = ("__annotations__", "__dict__", "__defaults__", "__kwdefaults__", "__code__", "__class__")
    attributes = [getattr(value, name, None) for value in _watched() for name in names]
    return [_items(one) if isinstance(one, (dict, MappingProxyType)) else one for one in attributes]


def _items(values: Mapping[str, Any]) -> dict[str, Any]:
    # Python itself adds these when it pickles the first object of a class.
    return {name: value for name, value in values.items() if name != "__slotnames__"}


# -- what is written by hand

_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
_INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
_MEMORY_FORMATS = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
_ENTRY = b"(Va\nNdb"  # BUILD with {"a": None}
_STORAGE = b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nK\x01tQ"  # by its persistent id


def _attribute(name: str) -> bytes:
    """BUILD with ``(None, {name: None})``, which sets the attribute."""
    return f"(N(V{name}\nNdtb".encode()


HOSTILE: dict[str, tuple[Callable[[bytes, Path], None], bytes]] = {
    "attribute of a class": (_metadata, _INDEX + _attribute("__hash__") + b"."),
    "attribute of a class, memorized": (_metadata, _INDEX + b"q\x01(h\x01" + _attribute("__eq__") + b"t."),
    "attribute of a function": (_shard, _REBUILD + _attribute("__defaults__") + b"."),
    "dict of a function": (_shard, _REBUILD + _ENTRY + b"."),
    "attribute of a function's result": (_shard, _REBUILD + b"(tR" + _attribute("__class__") + b"."),
    "storage of the file": (_shard, _STORAGE + _ENTRY + b"."),
    "member of an enum": (_metadata, _MEMORY_FORMATS + b"(K\x00tR" + _attribute("_value_") + b"."),
    "member of an enum, by its name": (
        _metadata,
        b"cbuiltins\ngetattr\n(" + _MEMORY_FORMATS + b"VTORCH_CHANNELS_LAST\ntR" + _ENTRY + b".",
    ),
    "member of an enum, as a new object": (
        _metadata,
        b"\x80\x02" + _MEMORY_FORMATS + b"K\x00\x85\x81" + _ENTRY + b".",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_file_names_is_not_changed(name: str, tmp_path: Path) -> None:
    load, content = HOSTILE[name]
    before = _state()
    with pytest.raises(CheckpointError):
        load(content, tmp_path)
    assert _state() == before


def test_no_class_comes_from_the_registry_of_extensions(tmp_path: Path) -> None:
    copyreg.add_extension("torch", "Size", 1)
    try:
        with pytest.raises(CheckpointError, match="extension"):
            _shard(b"\x80\x02\x82\x01.", tmp_path)
    finally:
        copyreg.remove_extension("torch", "Size", 1)
        copyreg.clear_extension_cache()


# -- what is drawn by chance


class _Program:
    """A pickle of opcodes drawn at random: nearly all of them change an object that the pickle names."""

    def __init__(self, seed: int, names: list[tuple[str, str]]) -> None:
        self.random = random.Random(seed)
        self.names = names

    def content(self) -> bytes:
        changes = b"".join(self.change() + b"\x940" for _ in range(self.random.randint(1, 3)))  # MEMOIZE, POP
        return b"\x80\x04" + changes + self.target() + b"."

    def change(self) -> bytes:
        target, value = self.target(), self.random.choice([self.plain, self.target])
        changes = [
            self.state() + b"b",
            self.state() + b"b" + self.state() + b"b",
            self.attribute() + value() + b"s",
            b"(" + self.attribute() + value() + b"u",
            value() + b"a",
            b"(" + value() + value() + b"e",
            b"(" + self.plain() + b"\x90",
        ]
        return target + self.random.choices(changes, weights=[12, 4, 1, 1, 1, 1, 1])[0]

    def target(self) -> bytes:
        call = b"(" + b"".join(self.plain() for _ in range(self.random.randint(0, 2))) + b"t"
        targets = [
            self.name(),
            self.name() + call + self.random.choice([b"R", b"\x81"]),
            self.name() + b"(" + self.name() + self.plain() + b"tR",
            self.random.choice([b"h\x00", b"h\x01", b"]", b"}", b"\x8f", b")", _STORAGE]),
        ]
        return self.random.choices(targets, weights=[5, 3, 1, 1])[0]

    def state(self) -> bytes:
        items = b"".join(
            self.attribute() + self.random.choice([self.plain, self.name])()
            for _ in range(self.random.randint(1, 3))
        )
        return self.random.choice([b"(" + items + b"d", b"(N(" + items + b"dt", self.plain()])

    def attribute(self) -> bytes:
        names = "__defaults__ __kwdefaults__ __hash__ __eq__ __init__ __new__ __dict__ __setstate__ __class__"
        more = "__reduce_ex__ append extend fqn detach _value_"
        return f"V{self.random.choice(f'{names} {more}'.split())}\n".encode()

    def name(self) -> bytes:
        return "c{}\n{}\n".format(*self.random.choice(self.names)).encode()

    def plain(self) -> bytes:
        return self.random.choice([b"N", b"K\x00", b"K\x01", b"VTORCH_PRESERVE_FORMAT\n", b"]", b"}", b")"])


@pytest.mark.parametrize("load", [_metadata, _shard])
def test_random_pickles_change_nothing_of_the_process(load: Callable[..., None], tmp_path: Path) -> None:
    before = _state()
    for seed in range(PROGRAMS):
        content = _Program(seed, sorted([*NAMED, ("unknown", "unknown")])).content()
        with suppress(CheckpointError):
            load(content, tmp_path)
        assert _state() == before, f"seed {seed}: {content!r}"
