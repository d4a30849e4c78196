"""Model weights from ``torch_dist`` checkpoints, by Megatron's loader.

In all releases it unpickles ``.metadata`` and objects that are no tensors without protection. So it gets a
folder with links to the shards and an index that was checked and written anew, and loads tensors only.
"""

from __future__ import annotations

import itertools
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from ...common.messages import Message, is_rank_0
from ...common.text import one_line
from ...errors import CheckpointError
from ..weights import MAX_PADDING, Differences, differences, is_of_output_head
from .pickles import describe_tensor, read_metadata, reading, unpickle_dict

# What optimizers of every release put in front of the names of their tensors.
_OPTIMIZER_TENSOR = re.compile(r"(chained_\d+\.)?optimizer\.")
# The common state when there is no common.pt, as from megatron-core 0.19 on.
_COMMON_STATE = "common_state/shard_0_1"
_State = dict[str, Any]
_WITHOUT_SCALES = Message(
    "scales of Transformer Engine (_extra_state) are not loaded",
    "The model keeps its own scales, which is harmless unless it computes in FP8.",
    "For FP8, load the model with Megatron's own loader.",
)


class Request(NamedTuple):
    """What a rank asks Megatron's loader for: under ``"0"``, ``"1"``, … what the chunks need."""

    tensors: _State
    others: _State  # what is not stored
    factories: _State  # what joins weights that Megatron splits for storage

    def by_name(self) -> dict[str, ShardedTensor]:
        """Return every tensor of the request, by its name in the checkpoint."""
        return {tensor.key: tensor for tensor in nested_values(self.tensors)}


class TorchDistCheckpoint:
    """One opened checkpoint: its indexes are read, its tensors are not."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.metadata = folder, read_metadata(folder)
        self.entries = self.metadata.state_dict_metadata
        file, place = folder / "common.pt", self.metadata.storage_data.get(MetadataIndex(_COMMON_STATE))
        if file.is_file():
            content = file.read_bytes()
        elif place is not None:
            file = folder / place.relative_path
            with self._opened(place) as stream:
                content = stream.read()
        else:
            raise CheckpointError(f"{file} is missing; the checkpoint is incomplete")
        #: What is not sharded: iteration, arguments, content metadata.
        self.common = unpickle_dict(content, file)

    def request(self, chunks: Sequence[Any], with_output_head: bool) -> Request:
        """Ask for the sharded state dict of the model alone, as Megatron's ``generate_state_dict`` does.

        Tensors get host memory, into which the loader writes instead of into the model. Objects are left out,
        which Megatron would unpickle without protection: extra states of Transformer Engine.
        """
        metadata = self.common.get("content_metadata") or {}  # it says how the saver named layers
        states: _State = {str(n): c.sharded_state_dict(metadata={**metadata}) for n, c in enumerate(chunks)}
        objects, states = extract_matching_values(states, lambda value: isinstance(value, ShardedObject))
        if is_rank_0() and any(getattr(value.data, "nbytes", 0) for value in nested_values(objects)):
            _WITHOUT_SCALES.log()
        if not with_output_head:  # embeddings that serve as one stay
            _, states = extract_matching_values(
                states, lambda value: isinstance(value, ShardedTensor) and is_of_output_head(value.key)
            )
        for value in nested_values(states):
            if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
                value.data = torch.empty(value.data.shape, dtype=value.data.dtype, device="cpu")
        return Request(*load_preprocess(states))

    def compare(
        self, requested: Mapping[str, ShardedTensor], exact: bool
    ) -> tuple[Differences, set[tuple[str, int, int]]]:
        """Compare what this rank asks for with what is stored; return differences, and padded vocabularies.

        Unless ``exact``, other floating-point dtypes and other paddings are no difference. The second result
        has the name of each vocabulary, and its rows as stored and as requested.
        """
        expected = {name: _shaped(tensor.global_shape, tensor.dtype) for name, tensor in requested.items()}
        stored, paddings = {}, set()
        for name in sorted(requested.keys() & self.entries.keys()):
            entry, shape = self.entries[name], expected[name].shape
            stored[name] = _shaped((), torch.uint8)  # an object
            if isinstance(entry, TensorStorageMetadata):
                is_padding = requested[name].allow_shape_mismatch and not exact
                is_padding = is_padding and len(entry.size) == len(shape) and entry.size[1:] == shape[1:]
                if is_padding and abs(entry.size[0] - shape[0]) < MAX_PADDING:
                    paddings.add((name, entry.size[0], shape[0]))
                else:
                    shape = entry.size
                stored[name] = _shaped(shape, entry.properties.dtype)
        return differences(stored, expected, "the checkpoint", dtypes=exact), paddings

    def names(self, with_output_head: bool) -> list[str]:
        """Return the sorted names of all tensors but the optimizer's: the same list on every rank."""
        tensors = (name for name, x in self.entries.items() if isinstance(x, TensorStorageMetadata))
        of_model = (name for name in tensors if not _OPTIMIZER_TENSOR.match(name))
        return sorted(name for name in of_model if with_output_head or not is_of_output_head(name))

    def write_index(self, names: Iterable[str], folder: Path) -> None:
        """Write an index of tensors that :meth:`compare` takes, and links to their files, into a folder.

        Refused are elements that lie in no piece or in several, and bytes that belong to several pieces.
        """
        places: dict[MetadataIndex, Any] = {}
        for name in names:
            entry: Any = self.entries[name]
            whole = [((0,) * len(entry.size), entry.size)]
            if _corners((chunk.offsets, chunk.sizes) for chunk in entry.chunks) != _corners(whole):
                raise CheckpointError(f"{self.folder}: {name} is not stored as a whole, once")
            indices = [MetadataIndex(name, chunk.offsets) for chunk in entry.chunks]
            if not self.metadata.storage_data.keys() >= {*indices}:
                raise CheckpointError(f"{self.folder}: a piece of {name} is not stored")
            places |= {index: self.metadata.storage_data[index] for index in indices}
        ranges = sorted((p.relative_path, p.offset, p.offset + p.length) for p in places.values())
        for (file, _, end), (other, start, _) in itertools.pairwise(ranges):
            if file == other and start < end:
                raise CheckpointError(f"{self.folder / file}: pieces overlap")
        for file in {place.relative_path for place in places.values()}:
            (folder / file).symlink_to(self.folder.absolute() / file)
        entries = {index.fqn: self.entries[index.fqn] for index in places}
        (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=places)))

    @contextmanager
    def _opened(self, place: Any) -> Iterator[IO[bytes]]:
        """Yield a stored piece as a file; what goes wrong with it is a ``CheckpointError``."""
        file = self.folder / place.relative_path
        if not file.is_file():  # reading a pipe would wait for its writer
            raise CheckpointError(f"{file} is missing; the checkpoint is incomplete")
        with reading(file, "is corrupt or truncated:"), file.open("rb") as stream:
            yield cast(IO[bytes], _create_file_view(stream, place.offset, place.length))

    def check_pieces(self, request: Request) -> None:
        """Refuse what this rank reads if it is corrupt, or of another dtype or shape than the index says."""
        checked = set[MetadataIndex]()
        for tensor in nested_values(request.tensors):
            entry: Any = self.entries[tensor.key]
            sizes = (*[1] * tensor.prepend_axis_num, *tensor.local_shape)
            for chunk in entry.chunks:
                index = MetadataIndex(tensor.key, chunk.offsets)
                axes = zip(tensor.global_offset, sizes, chunk.offsets, chunk.sizes, strict=True)
                if index in checked or not all(a < b + size and b < a + own for a, own, b, size in axes):
                    continue
                checked.add(index)
                place = self.metadata.storage_data[index]
                with self._opened(place) as stream:
                    piece = describe_tensor(stream, place.length)
                stored, indexed = (piece.shape, piece.dtype), (chunk.sizes, entry.properties.dtype)
                if stored != indexed:
                    actual, expected = (f"{[*shape]} of {dtype}" for shape, dtype in (stored, indexed))
                    piece_of = f"{self.folder / place.relative_path}: a piece of {tensor.key}"
                    raise CheckpointError(f"{piece_of} is {actual}, and the index says {expected}")

    def read(self, request: Request, folder: Path) -> _State:
        """Read this rank's shards into host memory, a state dict for each chunk, by the index in ``folder``.

        Up to megatron-core 0.17 the loader runs collectives of the default process group.
        """
        try:
            states = TorchDistLoadShardedStrategy().load(request.tensors, folder)
        except (Exception, CheckpointException) as error:
            # It may be another rank's failure. After the first sentence, torch advises to load without care.
            [(failure, _), *_] = getattr(error, "failures", {}).values() or [(error, None)]
            raise CheckpointError(f"Megatron's loader fails: {one_line(failure).split('. ')[0]}") from error
        merge(states, request.others)
        return apply_factory_merges(states, request.factories)


def _shaped(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _corners(boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> dict[tuple[int, ...], int]:
    """Count corners with signs: only boxes that cover every element equally often have the same counts."""
    counts = Counter[tuple[int, ...]]()
    for start, size in boxes:
        for ends in itertools.product((0, 1), repeat=len(start)):
            corner = tuple(a + end * length for a, end, length in zip(start, ends, size, strict=True))
            counts[corner] += (-1) ** sum(ends)
    return {corner: count for corner, count in counts.items() if count}
