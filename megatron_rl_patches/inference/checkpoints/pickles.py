"""The pickled parts of a checkpoint; what they name becomes a :class:`Record`, and is never imported or run.

A file with millions of nested tuples can end the process, since Python frees them recursively.
"""

from __future__ import annotations

import io
import itertools
import pickle
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar

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

from ...common.text import one_line
from ...errors import CheckpointError

# What torch and Megatron write into ``.metadata``: the index, and plans for the next save.
_IN_METADATA = re.compile(
    r"torch\.distributed\.checkpoint\.(metadata|filesystem|planner)\.\w+"
    r"|torch\.distributed\._shard\.sharded_tensor\.metadata\.\w+"
    r"|torch\.(Size|bool|[a-z]+\d\w*|serialization\._get_layout)"
    r"|(builtins|__builtin__)\.(getattr|set|frozenset|bytearray|slice)|collections\.OrderedDict"
    r"|pathlib(\._local)?\.PosixPath"
    r"|(megatron\.core\.dist_checkpointing|nvidia_resiliency_ext)\..*"
)
_IN_PIECE = re.compile(r"torch\.(_utils\._rebuild_tensor_v[23]|(storage\.)?\w+)|collections\.OrderedDict")


class Record:
    """Stands for an object of a class that a file names, or for what a function returns that it names."""

    #: The class or function, with its module. Each name in a file gets a subclass.
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


class _Memo(dict[int, Any]):
    """What a pickle may refer to again: no tuples of tuples, which would take time 2**depth to be hashed."""

    def __getitem__(self, number: int) -> Any:
        value = super().__getitem__(number)
        is_nested = isinstance(value, tuple) and any(isinstance(item, tuple) for item in value)
        return Record() if is_nested else value


class _Unpickler(pickle._Unpickler):
    """Puts no object on the stack that exists outside, so that pickle's opcodes can change none."""

    # No pickle is saved with DUP, which refers again to an object without the memo.
    dispatch: ClassVar = {k: load for k, load in pickle._Unpickler.dispatch.items() if k != pickle.DUP[0]}

    def __init__(self, stream: IO[bytes], allowed: re.Pattern[str]) -> None:
        super().__init__(stream)
        self._allowed, self._records, self.memo = allowed, dict[str, type[Record]](), _Memo()

    def find_class(self, module: str, name: str) -> Any:
        qualified_name = f"{module}.{name}"
        if not self._allowed.fullmatch(qualified_name):
            raise pickle.UnpicklingError(f"it names {qualified_name}, which does not belong in such a file")
        record = type("Record", (Record,), {"qualified_name": qualified_name})
        return self._records.setdefault(qualified_name, record)

    def persistent_load(self, pid: Any) -> Any:
        return Record(pid)

    def get_extension(self, code: int) -> Any:
        raise pickle.UnpicklingError(f"it names {code} in the registry of extensions of this process")


@contextmanager
def reading(file: object, fault: str) -> Iterator[None]:
    """Raise ``CheckpointError`` for whatever the body raises; ``fault`` says what is wrong with the file."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"{file} cannot be read: {one_line(error)}") from error
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(f"{file} {fault} {one_line(error)}") from error


def unpickle_dict(content: bytes, file: Path) -> dict[str, Any]:
    """Return a dict saved by ``torch.save``; what is neither a number, a text nor a container is a record."""
    with reading(file, "is corrupt or truncated:"):
        value = _unpickle(io.BytesIO(content), re.compile(".*"))
    if isinstance(value, list) and len(value) == 1:  # as Megatron stores objects
        value = value[0]
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__} where Megatron saves a dict")
    return value


def describe_tensor(stream: Any, nbytes: int) -> torch.Tensor:
    """Return the tensor in a ``torch.save`` file, on meta; raise if its storage is not within ``nbytes``."""
    record = _unpickle(stream, _IN_PIECE)
    storage, start, size, stride, _, _, *others = record.args
    _, kind, _, _, stored = storage.args[0]
    start, stored = _size([start, stored])
    if record.qualified_name.endswith("_v3"):
        dtype, unit = getattr(torch, others[0].qualified_name.removeprefix("torch.")), 1
    else:
        dtype = torch.storage._storage_type_to_dtype_map()[kind.qualified_name.removeprefix("torch.")]
        unit = dtype.itemsize
    tensor = torch.empty_strided(_size(size), _size(stride), dtype=dtype, device="meta")
    if not start * dtype.itemsize + tensor.untyped_storage().nbytes() <= stored * unit <= nbytes:
        raise ValueError(f"it has {stored * unit} bytes for {[*tensor.shape]} of {dtype} in {nbytes} bytes")
    return tensor


def _unpickle(stream: Any, allowed: re.Pattern[str]) -> Any:
    pickled = torch._C.PyTorchFileReader(stream).get_record("data.pkl")
    return _Unpickler(io.BytesIO(pickled), allowed).load()


def read_metadata(folder: Path) -> Metadata:
    """Read ``.metadata``, the index of a checkpoint: the shapes of all tensors, and where they lie."""
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
        raise TypeError(f"it holds {getattr(record, 'qualified_name', reprlib.repr(record))}, no {name}")
    return dict(record.state or {})


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if getattr(record, "qualified_name", "").endswith(".BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    size = _size(fields["size"])
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    boxes = [(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
    if any(len(numbers) != len(size) for box in boxes for numbers in box):
        raise ValueError(f"pieces of a tensor with {len(size)} dimensions have others")
    dtype = fields["properties"].state[0].qualified_name.removeprefix("torch.")
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise TypeError(f"it holds the dtype {dtype}")
    properties = TensorProperties(getattr(torch, dtype))
    return TensorStorageMetadata(properties, size, list(itertools.starmap(ChunkStorageMetadata, boxes)))


def _place(index: Any, place: Any) -> tuple[MetadataIndex, _StorageInfo]:
    fields, where = _fields(place, "_StorageInfo"), _fields(index, "MetadataIndex")
    file = _text(fields["relative_path"])
    if fields.get("transform_descriptors"):
        raise TypeError(f"{file} is compressed, which is not supported")
    if "/" in file or not file.endswith(".distcp"):  # beside the index that is written for Megatron's loader
        raise ValueError(f"it names the file {file!r:.40}, expected *.distcp")
    offset = None if where.get("offset") is None else _size(where["offset"])
    start, length = _size([fields["offset"], fields["length"]])
    return MetadataIndex(_text(where["fqn"]), offset), _StorageInfo(file, start, length)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"it holds {reprlib.repr(value)} where torch saves a text")
    return value


def _size(value: Any) -> torch.Size:
    size = torch.Size(*value.args) if isinstance(value, Record) else torch.Size(value)
    if min(size, default=0) < 0:
        raise ValueError(f"{[*size]} has negative numbers")
    return size
