"""Unpickling that calls nothing and imports nothing: what a file names becomes a :class:`Record` of the name.

A file with millions of nested tuples can end the process, since Python frees them recursively.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import IO, Any

import torch

from ...errors import CheckpointError
from .location import reading

# What torch and Megatron write into ``.metadata``: the index, and the plans of the saving ranks, which
# megatron-core stores for its next save, and nobody needs for loading.
_IN_METADATA = re.compile(
    r"torch\.distributed\.checkpoint\.(metadata|filesystem|planner)\.\w+"
    r"|torch\.distributed\._shard\.sharded_tensor\.metadata\.\w+"
    r"|torch\.(Size|bool|[a-z]+\d\w*|serialization\._get_layout)"
    r"|(builtins|__builtin__)\.(getattr|set|frozenset|bytearray|slice)|collections\.OrderedDict"
    r"|pathlib(\._local)?\.PosixPath"
    r"|(megatron\.core\.dist_checkpointing|nvidia_resiliency_ext)\..*"
)


class Record:
    """Stands for an object of a class that a file names, or for what a function returns that it names."""

    #: The class or function, with its module; that of a subclass for each name in a file.
    qualified_name = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __call__(self, *args: Any, **kwargs: Any) -> Record:
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, *args: Any) -> None: ...

    __setitem__ = extend = add = append


class _Unpickler(pickle._Unpickler):
    """Puts no object on the stack that exists outside, so that pickle's opcodes can change none."""

    def __init__(self, stream: IO[bytes], allowed: re.Pattern[str]) -> None:
        super().__init__(stream)
        self._allowed, self._records = allowed, dict[str, type[Record]]()

    def find_class(self, module: str, name: str) -> Any:
        qualified_name = f"{module}.{name}"
        if not self._allowed.fullmatch(qualified_name):
            raise pickle.UnpicklingError(f"it names {qualified_name}, which does not belong in such a file")
        record = type("Record", (Record,), {"qualified_name": qualified_name})
        return self._records.setdefault(qualified_name, record)

    def persistent_load(self, pid: Any) -> Any:
        return Record()

    def get_extension(self, code: int) -> Any:
        raise pickle.UnpicklingError(f"it names {code} in the registry of extensions of this process")


def unpickle_metadata(stream: IO[bytes]) -> Any:
    """Unpickle an index; refuse names that do not belong in it."""
    return _Unpickler(stream, _IN_METADATA).load()


def unpickle_dict(content: bytes, file: Path) -> dict[str, Any]:
    """Return a dict saved by ``torch.save``; what is neither a number, a text nor a container is a record.

    It also holds the saving program's arguments, whose classes need not exist in this process.
    """
    with reading(file, "is corrupt or truncated:"):
        pickled = torch._C.PyTorchFileReader(io.BytesIO(content)).get_record("data.pkl")
        value = _Unpickler(io.BytesIO(pickled), re.compile(".*")).load()
    if isinstance(value, list) and len(value) == 1:  # as Megatron stores objects
        value = value[0]
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__} where Megatron saves a dict")
    return value
