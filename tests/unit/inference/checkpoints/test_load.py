"""Finding checkpoints and telling their formats apart; no Megatron needed."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytest import LogCaptureFixture
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megatron_rl_patches.errors import CheckpointError, InvalidInputError
from megatron_rl_patches.inference.checkpoints.load import load_inference_checkpoint, read_iteration
from megatron_rl_patches.inference.checkpoints.location import check_format, iteration_of, locate
from megatron_rl_patches.inference.checkpoints.pickles import read_metadata
from megatron_rl_patches.inference.weights import describe, differences
from tests.worlds.files import write

from .test_pickles import save_alone

TRACKER = "latest_checkpointed_iteration.txt"
META = "metadata.json"
HUGGING_FACE = {"config.json": "", "model.safetensors": ""}


def step(number: int) -> Any:
    return partial(read_iteration, ckpt_step=number)


def _torch_dist(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (folder / ".metadata").touch()
    return folder


def test_root_leads_to_the_latest_iteration_or_to_the_step_of_the_caller(tmp_path: Path) -> None:
    earlier, latest = (_torch_dist(tmp_path / f"iter_{step:07d}") for step in (5, 12_345_678))
    assert read_iteration(tmp_path, ckpt_step=5) == 5  # without a tracker
    (tmp_path / TRACKER).write_text("5")
    assert locate(tmp_path) == earlier  # the latest one is still being written
    (tmp_path / TRACKER).write_text("12345678\n")
    assert locate(tmp_path) == latest and iteration_of(latest.name) == 12_345_678
    assert locate(str(tmp_path), ckpt_step=5) == locate(earlier) == earlier
    assert read_iteration(tmp_path) == 12_345_678
    release = _torch_dist(tmp_path / "release")
    (tmp_path / TRACKER).write_text("release")
    assert locate(tmp_path) == release and iteration_of(release.name) == 0
    assert read_iteration(release) == 0
    bare = _torch_dist(tmp_path / "teacher")
    assert locate(bare) == bare and iteration_of(bare.name) is None
    for path, message in ((tmp_path / "nowhere", "no such folder"), (tmp_path / TRACKER, "not a folder")):
        with pytest.raises(CheckpointError, match=message):
            locate(path)


@pytest.mark.parametrize(
    ("look", "files", "message"),
    [
        (read_iteration, {}, "is not a Megatron checkpoint: it is empty"),
        (read_iteration, {"notes.txt": ""}, "is not a Megatron checkpoint: it contains notes.txt"),
        (read_iteration, {TRACKER: "7"}, f"{TRACKER} points at iter_0000007, .* it has no iteration at all"),
        (read_iteration, {TRACKER: "7", "iter_0000006/x": ""}, "at iter_0000007, .* it has iter_0000006"),
        (step(8), {TRACKER: "7", "iter_0000007/x": ""}, "=8 asks for iter_0000008, .* it has iter_0000007"),
        (read_iteration, {TRACKER: "seven"}, "holds 'seven'; expected an iteration or 'release'"),
        (read_iteration, {TRACKER: "-1"}, "holds '-1'; expected"),
        (read_iteration, {TRACKER: "1" * 400}, "holds '1{40}'; expected"),
        (read_iteration, {TRACKER: "1" * 5000}, "holds '1{40}'; expected"),
        (read_iteration, {"iter_0000003/x": ""}, f"no {TRACKER}, .*it has iter_0000003: pass the folder of"),
        (read_iteration, HUGGING_FACE, r"is a Hugging Face checkpoint.*\(pre_wrap=\.\.\.\)"),
        (step(3), {META: "{}"}, "ckpt_step=3 chooses among the iterations of a checkpoint root"),
        (check_format, {META: '{"sharded_backend": "zarr"}'}, "format zarr, expected torch_dist; convert it"),
        (check_format, {META: "{}"}, "metadata.json is corrupt: KeyError"),
        (check_format, {META: "{"}, "metadata.json is corrupt: JSONDecodeError"),
        (check_format, {META: '"torch_dist"'}, "metadata.json is corrupt"),
        (check_format, {".metadata": "", "__0_0.distcp": ""}, "format torch_dcp or fsdp_dtensor"),
        (check_format, {"mp_rank_00": ""}, "format torch, expected torch_dist; .*convert-format torch_dist"),
        (check_format, {"__0_0.distcp": ""}, "is a part of a torch_dist checkpoint"),
    ],
)
def test_what_is_there_instead(look: Any, files: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        look(write(tmp_path, files))


def test_without_a_process_group_the_iteration_of_a_bare_folder_is_read(tmp_path: Path) -> None:
    folder = _one_rank_checkpoint(tmp_path / "teacher")
    assert read_iteration(folder) == 7
    with pytest.raises(InvalidInputError, match="init_process_group"):
        load_inference_checkpoint(_Embedding(), folder)
    for no_number in ("abc", "1" * 5000, [3], float("inf")):
        torch.save({"iteration": no_number}, folder / "common.pt")
        with pytest.raises(CheckpointError, match=rf"{folder}: its iteration is .*, expected a number"):
            read_iteration(folder)


@pytest.fixture
def group() -> Iterator[None]:
    """Initialize a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _one_rank_checkpoint(folder: Path, weight: torch.Tensor | None = None) -> Path:
    save_alone({"weight": torch.ones(6, 2) if weight is None else weight}, _torch_dist(folder))
    torch.save({"iteration": 7}, folder / "common.pt")
    return folder


@pytest.fixture
def folder(group: None, tmp_path: Path) -> Path:
    """Return the folder of a checkpoint of one weight, of six rows."""
    return _one_rank_checkpoint(tmp_path / "iter_0000007")


class _Embedding(torch.nn.Module):
    """A model of one weight, whose rows Megatron pads."""

    def __init__(self, rows: int = 6, width: int = 2, is_padded: bool = True, scales: int = 0) -> None:
        super().__init__()
        self.is_padded, self.scales = is_padded, torch.zeros(scales)
        self.weight = torch.nn.Parameter(torch.full((rows, width), 9.0))

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

        padded = {"allow_shape_mismatch": self.is_padded}
        weight = ShardedTensor.from_rank_offsets("weight", self.weight.data, **padded)
        return {"weight": weight, "_extra_state": ShardedObject("_extra_state", self.scales, (1,), (0,))}


def test_another_padding_of_the_vocabulary(folder: Path, caplog: LogCaptureFixture) -> None:
    padded, wider = _Embedding(8, scales=3), _Embedding(8, 3)
    with caplog.at_level("WARNING", "megatron_rl_patches"):
        assert load_inference_checkpoint(padded, folder) == 7
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert messages == [
        "scales of Transformer Engine (_extra_state) are not loaded: the model keeps its own",
        "weight has 6 rows in the checkpoint and 8 in the model",
    ]
    assert padded.weight.tolist() == [[1.0, 1.0]] * 6 + [[0.0, 0.0]] * 2
    with pytest.raises(CheckpointError, match=r"every rank: the checkpoint is of another model; .*\[8, 3\]"):
        load_inference_checkpoint(wider, folder)
    assert wider.weight.eq(9).all()


def test_megatrons_loader_does_not_see_what_savers_planned(folder: Path, tmp_path: Path) -> None:
    """The allowed names of plans lead to others, by which Megatron's loader would run code."""
    evidence = tmp_path / "code ran"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = _Runs(f"touch '{evidence}'")
    content = pickle.dumps(metadata, protocol=3)
    content = b"\x80\x04" + content[2:].replace(
        f"c{os.system.__module__}\nsystem\n".encode(),
        b"cmegatron.core.dist_checkpointing.strategies.torch\nos.system\n",
    )
    (folder / ".metadata").write_bytes(content)
    pickle.loads(content)
    evidence.unlink()
    model = _Embedding()
    assert load_inference_checkpoint(model, folder) == 7
    assert model.weight.eq(1).all() and not evidence.exists()


class _Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def test_a_dangling_link_is_no_part_of_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    model = _Embedding()
    (folder / "notes").symlink_to("nowhere")
    assert load_inference_checkpoint(model, folder) == 7
    assert model.weight.eq(1).all()
    (folder / "__0_0.distcp").rename(tmp_path / "moved")
    (folder / "__0_0.distcp").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"1 missing \(__0_0\.distcp\)"):
        load_inference_checkpoint(model, folder)


def _store_pieces(folder: Path, pieces: list[tuple[ChunkStorageMetadata, Any]]) -> None:
    """Replace the weight of the checkpoint by these pieces, each with what its index says."""
    metadata = read_metadata(folder)
    [place] = metadata.storage_data.values()
    metadata.state_dict_metadata["weight"].chunks = [chunk for chunk, _ in pieces]
    metadata.storage_meta, metadata.storage_data = None, {}
    with (folder / place.relative_path).open("wb") as file:
        for chunk, content in pieces:
            torch.save(content, stream := io.BytesIO())
            index = MetadataIndex("weight", chunk.offsets)
            metadata.storage_data[index] = replace(place, offset=file.tell(), length=len(stream.getvalue()))
            file.write(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _rows(start: int, size: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([size, 2]))


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("rows", [((0, 3), (0, 3)), ((0, 4), (1, 2)), ((3, 3),)])
def test_every_row_must_be_stored(rows: tuple[tuple[int, int], ...], is_padded: bool, folder: Path) -> None:
    _store_pieces(folder, [(_rows(start, size), torch.ones(size, 2)) for start, size in rows])
    with pytest.raises(CheckpointError, match="weight is not stored as a whole"):
        load_inference_checkpoint(_Embedding(6 + 2 * is_padded, is_padded=is_padded), folder)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (torch.ones(5, 2), "Megatron's loader fails"),
        (torch.ones(600, 1), "a piece of weight is not stored as a whole"),
        (torch.ones(600, 2, dtype=torch.bool), "a piece of weight is not stored as a whole"),
        (torch.ones(600, 2, dtype=torch.bfloat16), "a piece of weight is not stored as a whole"),
        ([1.0] * 600, "Megatron's loader fails"),
    ],
)
def test_a_piece_that_is_not_what_the_index_says(piece: Any, message: str, tmp_path: Path) -> None:
    rows = max(6, len(piece))
    folder = _one_rank_checkpoint(tmp_path / "iter_0000007", torch.ones(rows, 2))
    model = _Embedding(rows)
    _store_pieces(folder, [(_rows(0, rows), piece)])
    with pytest.raises(CheckpointError, match=message):
        load_inference_checkpoint(model, folder)
    assert model.weight.eq(9).all()


@pytest.mark.usefixtures("group")
def test_weights_of_another_kind_of_number(tmp_path: Path) -> None:
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64):
        folder = _one_rank_checkpoint(tmp_path / str(dtype) / "iter_0000007", torch.ones(6, 2).to(dtype))
        with pytest.raises(CheckpointError, match=f"weight is {dtype} in the checkpoint and torch.float32"):
            load_inference_checkpoint(_Embedding(), folder)


@pytest.mark.parametrize("name", ["metadata.json", "__0_0.distcp", "common.pt", ".metadata"])
def test_a_pipe_is_not_read(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        load_inference_checkpoint(_Embedding(), folder)


def test_differences_show_the_first_ten_of_each_kind_and_their_number() -> None:
    model = {f"m{n:02}": torch.ones(1) for n in range(12)} | {"s": torch.ones(2, 4)}
    differing = differences({"u": torch.ones(1), "s": torch.ones(2, 3)}, model, "the checkpoint")
    text = describe(differing)
    names = ", ".join(f"m{n:02}" for n in range(10))
    assert f"missing in the checkpoint (12): {names} and 2 more;" in text
    assert "unexpected in the checkpoint (1): u" in text
    assert "s is [2, 3] in the checkpoint and [2, 4] in the model" in text
    assert describe(differences(model, model, "the checkpoint")) == ""
    halves = {name: value.half() for name, value in model.items()}
    assert not differences(halves, model, "the checkpoint", dtypes=False)
    assert len(differences(halves, model, "the checkpoint")) == len(model)
