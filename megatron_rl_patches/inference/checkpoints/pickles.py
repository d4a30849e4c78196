"""The pickled parts of a checkpoint, read without calling or importing anything that they name.

Torch and Megatron would run it. Here it becomes a :class:`Record` of the name. A file with millions of nested
tuples can end the process, since Python frees them recursively.
"""

from __future__ import annotations

import io
import itertools
import pickle
import re
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

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


def read_metadata(folder: Path) -> Metadata:
    """Read ``.metadata``, the index of a distributed checkpoint: shapes of all tensors, and where they lie.

    Runs no code that the file names, and needs no process group.
    """
    file = folder / ".metadata"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; the checkpoint is incomplete")
    with reading(file, "is corrupt, truncated or not safe to load:"), file.open("rb") as stream:
        fields = _fields(_Unpickler(stream, _IN_METADATA).load(), "Metadata")
        entries = {_text(name): _entry(value) for name, value in fields["state_dict_metadata"].items()}
        places = dict(itertools.starmap(_place, fields["storage_data"].items()))
        return Metadata(entries, storage_data=places)


def _fields(record: Any, name: str) -> dict[str, Any]:
    """Return the fields of a record of a class of torch's; raise some exception if it is none."""
    if not isinstance(record, Record) or record.qualified_name.rpartition(".")[2] != name:
        raise TypeError(f"it holds {getattr(record, 'qualified_name', repr(record)[:40])}, no {name}")
    return dict(record.state or {})


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if getattr(record, "qualified_name", "").endswith(".BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    dtype = fields["properties"].state[0].qualified_name.removeprefix("torch.")
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise TypeError(f"it holds the dtype {dtype}")
    return TensorStorageMetadata(
        TensorProperties(getattr(torch, dtype)),
        _size(fields["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _place(index: Any, place: Any) -> tuple[MetadataIndex, _StorageInfo]:
    fields, where = _fields(place, "_StorageInfo"), _fields(index, "MetadataIndex")
    file = _text(fields["relative_path"])
    if fields.get("transform_descriptors"):
        raise TypeError(f"{file} is compressed, which is not supported")
    if not file.endswith(".distcp"):  # beside the index that is written for Megatron's loader
        raise ValueError(f"it names the file {file!r:.40}, expected *.distcp")
    offset = where.get("offset")
    start, length = _size([fields["offset"], fields["length"]])
    return (
        MetadataIndex(_text(where["fqn"]), None if offset is None else _size(offset)),
        _StorageInfo(file, start, length),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"it holds {value!r:.40} where torch saves a text")
    return value


def _size(value: Any) -> torch.Size:
    size = torch.Size(*value.args) if isinstance(value, Record) else torch.Size(value)
    if min(size, default=0) < 0:
        raise ValueError(f"{[*size]} has negative numbers")
    return size
