"""Whether teachers have the student's vocabulary, read from their checkpoints before anything starts.

Megatron pads vocabularies for tensor parallelism, and so loads an embedding of another size without an error:
a teacher of another vocabulary would score, and its scores would mean nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import CheckpointError, InvalidInputError
from ..inference.checkpoints.location import MAX_PADDING

_EMBEDDING = "embedding.word_embeddings.weight"


def check_vocabularies(teachers: Mapping[str, str], student: str | os.PathLike[str]) -> None:
    """Refuse teachers whose vocabulary is not the student's.

    Args:
        teachers: checkpoints by name, of Megatron (``torch_dist``) or Hugging Face. Those of other formats
            are not checked.
        student: Hugging Face checkpoint of the student, which frameworks get for its tokenizer.

    Raises:
        InvalidInputError: a teacher has another vocabulary, or is not a checkpoint.
        CheckpointError: a checkpoint is damaged.
    """
    expected = _huggingface_vocabulary(Path(student))
    if expected is None:
        return
    for name, path in teachers.items():
        size, sizes = _huggingface_vocabulary(Path(path)), range(expected, expected + 1)
        if size is None:
            size, sizes = _embedding_rows(path), range(expected, expected + MAX_PADDING)
        if size is not None and size not in sizes:
            raise InvalidInputError(
                f"teacher {name!r} ({path}) has a vocabulary of {size}, the student ({student}) one of "
                f"{expected}: token ids would not mean the same; distill from a teacher of the same "
                "vocabulary"
            )


def _huggingface_vocabulary(folder: Path) -> int | None:
    """Return the size in ``config.json``, or ``None`` where there is no such file, or no size in it."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text())
        size = config.get("text_config", config).get("vocab_size")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is damaged, expected a JSON object with vocab_size: {error}"
        ) from error
    if size is not None and not isinstance(size, int):
        raise CheckpointError(f"{file} is damaged: vocab_size is {size!r}, expected a number")
    return size


def _embedding_rows(path: str) -> int | None:
    """Return the rows of the embedding in a ``torch_dist`` checkpoint, or ``None`` for other formats."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from ..inference.checkpoints.location import TORCH_DIST, detect_format, locate
    from ..inference.checkpoints.torch_dist import read_metadata

    try:
        folder = locate(path).folder
        is_torch_dist = detect_format(folder) == TORCH_DIST
    except CheckpointError as error:
        raise InvalidInputError(f"a teacher cannot be loaded: {error}") from error
    tensors = read_metadata(folder).state_dict_metadata if is_torch_dist else {}
    for name, tensor in tensors.items():
        if name.endswith(_EMBEDDING) and isinstance(tensor, TensorStorageMetadata):
            if len(tensor.size) == 0:
                raise CheckpointError(f"{folder / '.metadata'} is damaged: {name} has no dimension")
            return tensor.size[0]
    return None
