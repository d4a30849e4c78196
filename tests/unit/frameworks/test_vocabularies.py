"""Whether teachers have the student's vocabulary, as checkpoints say that may be damaged or hostile."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch

from megatron_rl_patches.errors import CheckpointError, InvalidInputError
from megatron_rl_patches.frameworks.distillation_arguments import check_vocabularies


def huggingface(folder: Path, size: int, nested: bool = False) -> str:
    folder.mkdir()
    config = {"vocab_size": size}
    (folder / "config.json").write_text(json.dumps({"text_config": config} if nested else config))
    return str(folder)


def megatron(root: Path, rows: int) -> str:
    from torch.distributed import checkpoint

    folder = root / "iter_0000005"
    folder.mkdir(parents=True)
    weights = {"embedding.word_embeddings.weight": torch.zeros(rows, 2), "output": torch.zeros(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        checkpoint.save(weights, checkpoint_id=folder)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return str(root)


def test_the_same_vocabulary_padded_or_not(tmp_path: Path) -> None:
    student = huggingface(tmp_path / "student", 1000)
    nested = huggingface(tmp_path / "hf", 1000, nested=True)
    most = megatron(tmp_path / "most", 1000 + 2047)  # as much padding as a checkpoint may have to load
    check_vocabularies({"hf": nested, "padded": megatron(tmp_path / "megatron", 1024), "most": most}, student)


def test_another_vocabulary(tmp_path: Path) -> None:
    student = huggingface(tmp_path / "student", 1000)
    (tmp_path / "empty").mkdir()
    for teacher, message in (
        (huggingface(tmp_path / "other", 1001), "'math' .* has a vocabulary of 1001, the student .* 1000"),
        (megatron(tmp_path / "fewer", 999), "'math' .* has a vocabulary of 999"),
        (megatron(tmp_path / "more", 1000 + 2048), "'math' .* has a vocabulary of 3048"),
        (str(tmp_path / "empty"), "cannot be loaded: .*empty"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            check_vocabularies({"math": teacher}, student)


@pytest.mark.parametrize(
    "text", ["[1000]", "{", '"text"', '{"vocab_size": "1000"}', '{"text_config": 3}', "\x00"]
)
def test_a_damaged_config_is_named(text: str, tmp_path: Path) -> None:
    student = huggingface(tmp_path / "student", 1000)
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"teacher/config\.json is damaged"):
        check_vocabularies({"math": str(tmp_path / "teacher")}, student)
    with pytest.raises(CheckpointError, match=r"teacher/config\.json is damaged"):
        check_vocabularies({"math": student}, tmp_path / "teacher")


class Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("touched"),)


def sized(size: object) -> bytes:
    from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

    entry = TensorStorageMetadata(TensorProperties(), size, [])  # type: ignore[arg-type]
    return pickle.dumps(Metadata({"embedding.word_embeddings.weight": entry}, storage_data={}))


@pytest.mark.parametrize(
    "index",
    [pickle.dumps(Hostile()), sized(None), sized(torch.Size())],
    ids=["hostile", "no size", "a scalar"],
)
def test_a_damaged_or_hostile_index_is_named(
    index: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    student = huggingface(tmp_path / "student", 1000)
    teacher = megatron(tmp_path / "teacher", 1024)
    (tmp_path / "teacher" / "iter_0000005" / ".metadata").write_bytes(index)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        check_vocabularies({"math": teacher}, student)
    assert not (tmp_path / "touched").exists()
