"""Do teachers speak of the same token ids as the student? Told from what is on disk, before anything starts.

Megatron pads a vocabulary as its tensor parallelism asks for, and so loads an embedding of another size
without a word: a teacher of another vocabulary would score, and its scores would mean nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import CheckpointError, InvalidInputError

_EMBEDDING = "embedding.word_embeddings.weight"
_MOST_PADDING = 128 * 64


def check_vocabularies(teachers: Mapping[str, str], student: str | os.PathLike[str]) -> None:
    """Raise :class:`InvalidInputError` for a teacher that has another vocabulary.

    Args:
        teachers: checkpoints by name, of Megatron (``torch_dist``) or Hugging Face; of any other format
            nothing is known, and nothing said.
        student: Hugging Face checkpoint of the student, as hosts are given for its tokenizer.
    """
    expected = _of_huggingface(Path(student))
    if expected is None:
        return
    for name, path in teachers.items():
        found = _of_huggingface(Path(path))
        padding = 0
        if found is None:
            found, padding = _of_torch_dist(path), _MOST_PADDING
        if found is not None and not expected <= found <= expected + padding:
            raise InvalidInputError(
                f"teacher {name!r} ({path}) has a vocabulary of {found}, the student ({student}) one of "
                f"{expected}: token ids would not mean the same; distil from a teacher of the same vocabulary"
            )


def _of_huggingface(folder: Path) -> int | None:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    size: int | None = config.get("text_config", config).get("vocab_size")
    return size


def _of_torch_dist(path: str) -> int | None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from ._checkpoint_layout import TORCH_DIST, detect_format, locate

    try:
        folder = locate(path).folder
        if detect_format(folder) != TORCH_DIST:
            return None
    except CheckpointError as error:
        raise InvalidInputError(f"a teacher cannot be loaded: {error}") from error
    tensors = FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name.endswith(_EMBEDDING) and isinstance(tensor, TensorStorageMetadata):
            return tensor.size[0]
    return None
