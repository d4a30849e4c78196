"""The index of a ``torch_dist`` checkpoint, read without torch, which would run what ``.metadata`` names."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

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
from .pickles import Record, unpickle_metadata


def read_metadata(folder: Path) -> Metadata:
    """Read ``.metadata``, the index of a distributed checkpoint: shapes of all tensors, and where they lie.

    Runs no code that the file names, and needs no process group.
    """
    file = folder / ".metadata"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; the checkpoint is incomplete")
    with reading(file, "is corrupt, truncated or not safe to load:"), file.open("rb") as stream:
        fields = _fields(unpickle_metadata(stream), "Metadata")
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
