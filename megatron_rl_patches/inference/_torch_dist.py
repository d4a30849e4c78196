"""Reading model weights from megatron-core's distributed checkpoints (``torch_dist``)."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ..errors import CheckpointError
from ._checkpoint_layout import in_short, load_pickle, unknown_classes_inert
from ._mismatch import Mismatch
from ._provider import virtual_rank

_log = logging.getLogger("megatron_rl_patches")

# What optimizers of every release put in front of the names of their tensors.
_OPTIMIZER_TENSOR = re.compile(r"(chained_\d+\.)?optimizer\.")
# Rows by which two paddings of one vocabulary differ at most: multiples of 128 × TP, for TP up to 16.
_MOST_PADDING = 128 * 16
# The common state when there is no common.pt, as from megatron-core 0.19 on.
_COMMON_STATE = "common_state/shard_0_1"


class Wanted(NamedTuple):
    """A tensor that some rank asks for, whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: not a tensor
    vocabulary: bool  # its first axis, which Megatron pads by a multiple of the TP size


@dataclass(frozen=True)
class TorchDistCheckpoint:
    """One opened checkpoint: its indexes are read, its tensors are not.

    Attributes:
        folder: holds ``metadata.json``, ``.metadata`` and the ``.distcp`` files.
        metadata: shapes of all tensors, and where their pieces lie.
        common: what is not sharded: iteration, arguments, content metadata.
    """

    folder: Path
    metadata: Metadata
    common: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> TorchDistCheckpoint:
        """Read the indexes.

        Raises:
            CheckpointError: one is missing or unreadable.
        """
        if not (folder / ".metadata").is_file():
            raise CheckpointError(f"{folder / '.metadata'} is missing; the checkpoint is incomplete")
        try:
            metadata = FileSystemReader(folder).read_metadata()
        except Exception as error:  # a damaged pickle may raise anything
            raise CheckpointError(
                f"{folder / '.metadata'} is corrupt or truncated: {in_short(error)}"
            ) from error
        return cls(folder, metadata, _common_state(folder, metadata))

    @property
    def iteration(self) -> int | None:
        iteration = self.common.get("iteration", self.common.get("total_iters"))
        return None if iteration is None else int(iteration)

    def request(self, chunks: Sequence[Any]) -> dict[str, Any]:
        """The sharded state dict of the model alone, laid out as Megatron's ``generate_state_dict`` does.

        Built with the content metadata of the checkpoint, which says how its saver named layers.
        Extra states (scales of Transformer Engine) that the checkpoint lacks are left out: a model built
        with other layers or another precision has others, and inference does without them.
        """
        request: dict[str, Any] = {}
        for index, chunk in enumerate(chunks):
            key = "model" if len(chunks) == 1 else f"model{index}"
            with virtual_rank(None if len(chunks) == 1 else index):
                request[key] = chunk.sharded_state_dict(metadata=self._content_metadata(chunk))
        _, request = extract_matching_values(request, self._is_absent_extra_state)
        return request

    def compare(self, wanted: dict[str, Wanted], exact: bool) -> Mismatch:
        """Compare what all ranks together ask for with what is stored.

        Unless ``exact``, other dtypes and another padding of the vocabulary are no mismatch.
        """
        stored = self.metadata.state_dict_metadata
        tensors = {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
        mismatch = Mismatch(
            missing=sorted(wanted.keys() - stored.keys()),
            unexpected=sorted(
                name for name in tensors.keys() - wanted.keys() if not _OPTIMIZER_TENSOR.match(name)
            ),
        )
        for name in sorted(wanted.keys() & tensors.keys()):
            found, expected = tuple(tensors[name].size), wanted[name].shape
            dtypes = tensors[name].properties.dtype, wanted[name].dtype
            if exact and dtypes[0] != dtypes[1]:
                mismatch.dtypes[name] = dtypes
            if not exact and wanted[name].vocabulary and _another_padding(found, expected):
                _tell_padding(name, found[0], expected[0])
            elif found != expected:
                mismatch.shapes[name] = (found, expected)
        return mismatch

    def check_files(self, names: Iterable[str]) -> None:
        """See that every piece of these tensors lies within an existing file.

        Raises:
            CheckpointError: files are missing or shorter than the index says; each is named.
        """
        _check_files(self.folder, self.metadata, set(names))

    def read(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Read this rank's shards into host memory; one state dict per chunk, ready for ``load_state_dict``.

        A collective over all ranks with megatron-core up to 0.18. Nothing of the model is written.
        """
        names = {key: list(state) for key, state in request.items()}
        common_file = self.folder / "common.pt"
        with unknown_classes_inert(common_file) if common_file.exists() else nullcontext():
            loaded = dist_checkpointing.load(
                _staged(request), str(self.folder), validate_access_integrity=False
            )
        # The result also holds the common state, which may have leftovers of the saver's under the same keys.
        return [
            {name: loaded[key][name] for name in chunk_names if name in loaded.get(key, ())}
            for key, chunk_names in names.items()
        ]

    def _content_metadata(self, chunk: Any) -> dict[str, Any]:
        metadata = dict(self.common.get("content_metadata") or {})
        group = getattr(getattr(chunk, "pg_collection", None), "dp_cp", None)
        if group is not None:
            # Megatron would ask its global groups otherwise, which such a model need not use.
            metadata["dp_cp_group"] = group
        return metadata

    def _is_absent_extra_state(self, value: Any) -> bool:
        return (
            isinstance(value, ShardedObject)
            and "_extra_state" in value.key
            and value.unique_key not in self.metadata.state_dict_metadata
        )


def wanted(request: dict[str, Any]) -> dict[str, Wanted]:
    """Every stored entry that a request of this rank touches, by its name in the checkpoint."""
    entries: dict[str, Wanted] = {}
    for value in _without_factories(request):
        if isinstance(value, ShardedTensor):
            entries[value.key] = Wanted(tuple(value.global_shape), value.dtype, value.allow_shape_mismatch)
        elif isinstance(value, ShardedObject):
            entries[value.unique_key] = Wanted((), None, False)
    return entries


def _common_state(folder: Path, metadata: Metadata) -> dict[str, Any]:
    if (folder / "common.pt").exists():
        return load_pickle(folder / "common.pt")
    if _COMMON_STATE not in metadata.state_dict_metadata:
        raise CheckpointError(f"{folder / 'common.pt'} is missing; the checkpoint is incomplete")
    _check_files(folder, metadata, {_COMMON_STATE})
    try:
        return dist_checkpointing.load_common_state_dict(str(folder))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"{folder} keeps its common state among the weights, as megatron-core does from 0.19 on; "
            f"the installed one cannot read it, or it is corrupt: {in_short(error)}"
        ) from error


def _check_files(folder: Path, metadata: Metadata, names: set[str]) -> None:
    ends: dict[str, int] = {}
    for index, piece in metadata.storage_data.items():
        if index.fqn in names:
            end = piece.offset + piece.length
            ends[piece.relative_path] = max(end, ends.get(piece.relative_path, 0))
    sizes = {entry.name: entry.stat().st_size for entry in folder.iterdir()}
    missing = sorted(ends.keys() - sizes.keys())
    short = sorted(name for name, end in ends.items() if sizes.get(name, end) < end)
    if missing or short:
        parts = [f"{len(missing)} missing ({', '.join(missing[:10])})"] if missing else []
        parts += [f"{len(short)} truncated ({', '.join(short[:10])})"] if short else []
        raise CheckpointError(f"{folder}: of {len(ends)} files that are needed, {' and '.join(parts)}")


def _another_padding(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return found[1:] == expected[1:] and 0 < abs(found[0] - expected[0]) < _MOST_PADDING


def _tell_padding(name: str, found: int, expected: int) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        # Right for another padding of one vocabulary, wrong for another vocabulary: no one here can tell.
        _log.warning("%s has %d rows in the checkpoint and %d in the model", name, found, expected)


def _without_factories(request: dict[str, Any]) -> Iterator[Any]:
    for value in nested_values(request):
        if isinstance(value, ShardedTensorFactory):
            yield from nested_values(value.build())
        else:
            yield value


def _staged(request: dict[str, Any]) -> dict[str, Any]:
    """Point a request at fresh host memory: megatron-core reads into the tensors that it is given."""
    for value in nested_values(request):
        if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
            value.data = torch.empty(value.data.shape, dtype=value.data.dtype, device="cpu")
    return request
