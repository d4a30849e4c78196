"""Model weights from megatron-core's distributed checkpoints, without the unprotected unpickling there."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ...errors import CheckpointError, first
from ..weights import Differences, differences
from .location import MAX_PADDING, reading
from .pickles import EXTRA_STATE, MetadataUnpickler, as_dict, load_dict, load_torch

# What optimizers of every release put in front of the names of their tensors.
_OPTIMIZER_TENSOR = re.compile(r"(chained_\d+\.)?optimizer\.")
# The common state when there is no common.pt, as from megatron-core 0.19 on.
_COMMON_STATE = "common_state/shard_0_1"


def read_metadata(folder: Path) -> Metadata:
    """Read ``.metadata``, the index of a distributed checkpoint: shapes of all tensors, and where they lie.

    Runs no code that the file names, and needs no process group.
    """
    file = folder / ".metadata"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; the checkpoint is incomplete")
    with reading(file, "is corrupt, truncated or not safe to load:"), file.open("rb") as stream:
        return _checked(MetadataUnpickler(stream).load())


def _checked(metadata: Any) -> Metadata:
    """Return what was unpickled if it is an index as torch writes it; otherwise raise some exception."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it holds a {type(metadata).__name__}")
    for name, entry in metadata.state_dict_metadata.items():
        if not (isinstance(name, str) and isinstance(entry, (TensorStorageMetadata, BytesStorageMetadata))):
            raise TypeError(f"entry {name!r} is a {type(entry).__name__}")
        torch.Size(getattr(entry, "size", ()))  # this raises where it is no sequence of numbers
    for index, piece in metadata.storage_data.items():
        is_named = isinstance(index.fqn, str) and isinstance(piece.relative_path, str)
        if not is_named or min(piece.offset, piece.length) < 0:
            raise TypeError(f"the place of {index!r} is {piece!r}")
    return metadata


class RequestedTensor(NamedTuple):
    """An entry of the checkpoint that a rank asks for, with its size over all ranks."""

    shape: tuple[int, ...]
    #: ``None`` if it is an object, not a tensor.
    dtype: torch.dtype | None
    #: Megatron pads its first axis to a multiple of the TP size.
    is_vocabulary: bool


class TorchDistCheckpoint:
    """One opened checkpoint: its indexes are read, its tensors are not.

    Attributes:
        common: what is not sharded: iteration, arguments, content metadata.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.metadata = folder, read_metadata(folder)
        self.common = self._common_state()

    def request(self, chunks: Sequence[Any]) -> dict[str, Any]:
        """Return the sharded state dict of the model alone, as Megatron's ``generate_state_dict`` does.

        Extra states that the checkpoint lacks are left out: a model of another precision has others.
        """
        request: dict[str, Any] = {}
        for index, chunk in enumerate(chunks):
            key = "model" if len(chunks) == 1 else f"model{index}"
            # The content metadata says how the saver named layers.
            metadata = dict(self.common.get("content_metadata") or {})
            if (group := getattr(getattr(chunk, "pg_collection", None), "dp_cp", None)) is not None:
                # Megatron would ask its global groups otherwise, which such a model need not use.
                metadata["dp_cp_group"] = group
            request[key] = chunk.sharded_state_dict(metadata=metadata)
        _, request = extract_matching_values(request, self._is_absent_extra_state)
        return request

    def compare(
        self, requested: Mapping[str, RequestedTensor], exact: bool
    ) -> tuple[Differences, set[tuple[str, int, int]]]:
        """Compare what this rank asks for with what is stored.

        Unless ``exact``, other floating-point dtypes are no difference, nor are vocabularies that differ as
        two paddings of one may; the second result has their names, and their rows as stored and as requested.
        """
        stored, paddings = {}, set()
        for name in sorted(requested.keys() & self.metadata.state_dict_metadata.keys()):
            entry, stored[name] = self.metadata.state_dict_metadata[name], requested[name]
            if isinstance(entry, TensorStorageMetadata):
                shape, expected = tuple(entry.size), requested[name].shape
                same_width = len(shape) == len(expected) and shape[1:] == expected[1:]
                is_padding = same_width and requested[name].is_vocabulary and not exact
                if is_padding and 0 < abs(shape[0] - expected[0]) < MAX_PADDING:
                    paddings.add((name, shape[0], expected[0]))
                    shape = expected
                stored[name] = RequestedTensor(shape, entry.properties.dtype, False)
        return differences(stored, requested, "the checkpoint", dtypes=exact), paddings

    def names(self) -> list[str]:
        """Return the sorted names of all tensors but the optimizer's: the same list on every rank."""
        return sorted(
            name
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not _OPTIMIZER_TENSOR.match(name)
        )

    def check_files(self, names: Iterable[str]) -> None:
        """See that every piece of these entries lies within an existing file."""
        needed, ends = set(names), dict[str, int]()
        for index, piece in self.metadata.storage_data.items():
            if index.fqn in needed:
                end = piece.offset + piece.length
                ends[piece.relative_path] = max(end, ends.get(piece.relative_path, 0))
        files = [file for file in self.folder.iterdir() if file.name in ends and file.is_file()]
        sizes = {file.name: file.stat().st_size for file in files}
        missing = sorted(ends.keys() - sizes.keys())
        short = sorted(name for name, end in ends.items() if sizes.get(name, end) < end)
        parts = [f"{len(missing)} missing ({first(missing)})"] * bool(missing)
        parts += [f"{len(short)} truncated ({first(short)})"] * bool(short)
        if parts:
            raise CheckpointError(
                f"{self.folder}: of {len(ends)} files that are needed, {' and '.join(parts)}"
            )

    def read(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Read this rank's shards into host memory, as one state dict per chunk."""
        return [dict_list_map_outplace(self._read, state) for state in request.values()]

    def _read(self, value: Any) -> Any:
        if isinstance(value, ShardedTensorFactory):
            # Megatron splits some weights for storage (gated MLP): the factory builds the parts, then joins.
            value.data = torch.empty(value.data.shape, dtype=value.data.dtype)
            return value.merge_fn(dict_list_map_outplace(self._read, value.build()))
        if isinstance(value, ShardedTensor):
            return self._read_tensor(value)
        if isinstance(value, ShardedObject):
            return self._read_object(value.unique_key)
        return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value

    def _read_tensor(self, requested: ShardedTensor) -> torch.Tensor:
        """Read every stored piece that overlaps this rank's shard, and copy the overlaps."""
        entry = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[requested.key])
        tensor = torch.empty(requested.data.shape, dtype=requested.data.dtype)
        # Layers that are stored as one tensor have a leading axis that those of the model lack.
        target = tensor[(None,) * getattr(requested, "prepend_axis_num", 0)]
        is_read = torch.zeros_like(target, dtype=torch.bool)
        if requested.allow_shape_mismatch:
            # Padding of the vocabulary is zero.
            stored_rows = max(0, entry.size[0] - requested.global_offset[0])
            target[stored_rows:], is_read[stored_rows:] = 0, True
        for chunk in entry.chunks:
            overlap = _overlap(requested.global_offset, target.shape, chunk.offsets, chunk.sizes)
            if overlap is not None:
                in_target, in_piece = overlap
                piece = self._read_piece(MetadataIndex(requested.key, chunk.offsets))
                self._check_piece(piece, requested.key, chunk.sizes, entry.properties.dtype)
                target[in_target].copy_(piece[in_piece])
                is_read[in_target] = True
        if not is_read.all():
            raise CheckpointError(f"{self.folder}: {requested.key} is not stored as a whole")
        return tensor

    def _check_piece(self, piece: Any, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise unless a piece is what the index says; a copy would broadcast, cut or convert it."""
        if not isinstance(piece, torch.Tensor):
            raise CheckpointError(f"{self.folder}: a piece of {name} is a {type(piece).__name__}, no tensor")
        if (piece.shape, piece.dtype) != (torch.Size(shape), dtype):
            raise CheckpointError(
                f"{self.folder}: a piece of {name} is {[*piece.shape]} {piece.dtype}, and its index says "
                f"{[*shape]} {dtype}; the checkpoint is damaged"
            )

    def _common_state(self) -> dict[str, Any]:
        if (self.folder / "common.pt").exists():
            return load_dict(self.folder / "common.pt")
        if _COMMON_STATE not in self.metadata.state_dict_metadata:
            raise CheckpointError(f"{self.folder / 'common.pt'} is missing; the checkpoint is incomplete")
        self.check_files({_COMMON_STATE})
        return as_dict(self._read_object(_COMMON_STATE), self.folder / _COMMON_STATE)

    def _read_object(self, name: str) -> Any:
        """Read an object that is no tensor; Megatron stores it in a list of one."""
        if not isinstance(self.metadata.state_dict_metadata[name], BytesStorageMetadata):
            raise CheckpointError(f"{self.folder}: {name} is a tensor where Megatron saves an object")
        content = self._read_piece(MetadataIndex(name))
        return content[0] if isinstance(content, list) and len(content) == 1 else content

    def _read_piece(self, index: MetadataIndex) -> Any:
        if (place := self.metadata.storage_data.get(index)) is None:
            raise CheckpointError(f"{self.folder}: {index.fqn} is not stored as a whole")
        file = self.folder / place.relative_path
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{file} is compressed ({first(place.transform_descriptors)}): not supported"
            )
        with reading(file, "is corrupt or truncated:"), file.open("rb") as stream:
            stream.seek(place.offset)
            content = stream.read(place.length)
        return load_torch(io.BytesIO(content), file)

    def _is_absent_extra_state(self, value: Any) -> bool:
        return (
            isinstance(value, ShardedObject)
            and EXTRA_STATE in value.key
            and value.unique_key not in self.metadata.state_dict_metadata
        )


def requested_tensors(request: dict[str, Any]) -> dict[str, RequestedTensor]:
    """Return every entry that a request of this rank touches, by its name in the checkpoint."""
    entries: dict[str, RequestedTensor] = {}
    for value in nested_values(request):
        if isinstance(value, ShardedTensorFactory):
            entries |= requested_tensors(value.build())
        elif isinstance(value, ShardedTensor):
            shape = tuple(value.global_shape)
            entries[value.key] = RequestedTensor(shape, value.dtype, value.allow_shape_mismatch)
        elif isinstance(value, ShardedObject):
            entries[value.unique_key] = RequestedTensor((), None, False)
    return entries


def _overlap(
    start: Sequence[int], shape: Sequence[int], other_start: Sequence[int], other_shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where two boxes overlap, in the coordinates of the one and of the other; ``None``: nowhere."""
    in_one, in_other = [], []
    for a, size, b, other_size in zip(start, shape, other_start, other_shape, strict=True):
        low, high = max(a, b), min(a + size, b + other_size)
        if low >= high:
            return None
        in_one.append(slice(low - a, high - a))
        in_other.append(slice(low - b, high - b))
    return tuple(in_one), tuple(in_other)
