"""Finding and telling checkpoints apart; reading a file runs no code, and changes nothing, that it names."""

import copyreg
import functools
import io
import os
import pickle
import re
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._utils
import torch.distributed as dist
from pytest import LogCaptureFixture, MonkeyPatch
from torch.distributed.checkpoint import FileSystemWriter, metadata, save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from megatron_rl_patches.errors import CheckpointError, InvalidInputError
from megatron_rl_patches.inference.checkpoints import pickles
from megatron_rl_patches.inference.checkpoints.load import (
    check_format,
    iteration_of,
    load_inference_checkpoint,
    locate,
    read_iteration,
)
from megatron_rl_patches.inference.checkpoints.pickles import describe_tensor, read_metadata, unpickle_dict
from tests.worlds.files import write


class _CreatesAFile:
    """Creates a file when it is unpickled as itself."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch '{self.file}'",)


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    return tmp_path / "code of the checkpoint ran"


def _load(file: Path) -> dict[str, Any]:
    return unpickle_dict(file.read_bytes(), file)


def test_what_is_no_dict_of_todays_torch_save(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "empty.pt").touch()
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04 and no more")
    for file in tmp_path.iterdir():
        with pytest.raises(CheckpointError, match=rf"{file.name} is corrupt or truncated"):
            _load(file)
    torch.save((1, 2), tmp_path / "common.pt")
    with pytest.raises(CheckpointError, match="holds a tuple where Megatron saves a dict"):
        _load(tmp_path / "common.pt")


def _index(entries: Any, places: Any) -> Callable[[Path], bytes]:
    return lambda file: pickle.dumps(Metadata(entries, storage_data=places))


def _of_size(size: Any, dtype: Any = torch.float32, chunks: Any = ()) -> metadata.TensorStorageMetadata:
    return metadata.TensorStorageMetadata(metadata.TensorProperties(dtype), size, [*chunks])


WITHOUT_SIZES = ChunkStorageMetadata((0,), None)  # type: ignore[arg-type]
ONE_DIMENSION = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
#: Whoever hashes or prints it does so 2**60 times.
NESTED = functools.reduce(lambda inner, _: (inner, inner), range(60), ())


def _place(name: Any = "weight", file: Any = "__0_0.distcp", offset: Any = 0) -> Any:
    return {MetadataIndex(name): _StorageInfo(file, offset, 1)}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda file: pickle.dumps(_CreatesAFile(file)), r"it names posix\.system"),
        (lambda file: pickle.dumps(Metadata({}, _CreatesAFile(file))), r"it names posix\.system"),
        (lambda file: b"cpathlib\nPath.touch\n(Vtrue\ntR.", r"it names pathlib\.Path\.touch"),
        (lambda file: b"", "EOFError"),
        (_index(None, {}), "AttributeError"),
        (_index({1: metadata.BytesStorageMetadata()}, {}), "it holds 1 where torch saves a text"),
        (_index({"weight": _of_size((2, -2))}, {}), r"\[2, -2\] has negative numbers"),
        (_index({"weight": _of_size((2,), torch.Size)}, {}), "it holds the dtype Size"),
        (_index({"weight": _of_size((2,), chunks=[3])}, {}), "it holds 3, no ChunkStorageMetadata"),
        (_index({"weight": _of_size((2,), chunks=[WITHOUT_SIZES])}, {}), "TypeError"),
        (_index({"weight": _of_size((2, 2), chunks=[ONE_DIMENSION])}, {}), "have others"),
        (_index({"weight": NESTED}, {}), r"it holds \(\("),
        (lambda file: b"\x80\x02}" + pickle.dumps(NESTED, 2)[2:-1] + b"Ns.", r"it holds \{\(\("),
        (lambda file: b"\x80\x02})" + b"2\x86" * 60 + b"Ns.", "KeyError: 50"),
        (_index({}, {"weight": 3}), "it holds 3, no _StorageInfo"),
        (_index({}, _place(3)), "it holds 3 where torch saves a text"),
        (_index({}, _place(file=".metadata")), r"it names the file '\.metadata', expected \*\.distcp"),
        (_index({}, _place(file="../__0_0.distcp")), r"it names the file '\.\./__0_0\.distcp'"),
        (_index({}, _place(offset=-1)), r"\[-1, 1\] has negative numbers"),
    ],
)
def test_hostile_and_damaged_metadata(content: Any, reason: str, evidence: Path, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content(evidence))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/\.metadata is corrupt.*{reason}"):
        read_metadata(tmp_path)
    assert not evidence.exists()


@pytest.mark.parametrize("kind", [PermissionError, MemoryError])
def test_unreadable_is_no_damage(kind: type[Exception], tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    torch.save({}, tmp_path / "common.pt")
    (tmp_path / ".metadata").touch()
    monkeypatch.setattr(pickles._Unpickler, "load", Mock(side_effect=kind))
    with pytest.raises(CheckpointError, match=rf"common\.pt cannot be read: {kind.__name__}"):
        _load(tmp_path / "common.pt")
    with pytest.raises(CheckpointError, match=rf"\.metadata cannot be read: {kind.__name__}"):
        read_metadata(tmp_path)


def read_index(content: bytes, folder: Path) -> None:
    (folder / ".metadata").write_bytes(content)
    read_metadata(folder)


def described(content: bytes, folder: Path) -> torch.Tensor:
    return describe_tensor(io.BytesIO(content), len(content))


def read_shard(content: bytes, folder: Path, read: Callable[[bytes, Path], Any] = unpickle_dict) -> None:
    """Read a file of ``torch.save`` with a storage, and with another pickle."""
    torch.save({"weight": torch.ones(1)}, plain := io.BytesIO())
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(changed := io.BytesIO(), "w") as target:
        for name in source.namelist():
            target.writestr(name, content if name.endswith("/data.pkl") else source.read(name))
    read(changed.getvalue(), folder)


def _attributes() -> list[Any]:
    """Return what can be changed of our own class and of what the files name, members of enums included."""
    kind: Any = metadata._MEM_FORMAT_ENCODING
    watched = (pickles.Record, MetadataIndex, torch._utils._rebuild_tensor_v2, kind, *kind)
    return [(dict(vars(one)), getattr(one, "__defaults__", None), type(one)) for one in watched]


_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
_INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
_MEMORY_FORMATS = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
_CHANNELS_LAST = b"cbuiltins\ngetattr\n(" + _MEMORY_FORMATS + b"VTORCH_CHANNELS_LAST\ntR"
_ENTRY = b"(Va\nNdb"  # BUILD with {"a": None}
_STORAGE = b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nK\x01tQ"  # by its persistent id


def _attribute(name: str) -> bytes:
    """BUILD with ``(None, {name: None})``, which sets the attribute."""
    return f"(N(V{name}\nNdtb".encode()


HOSTILE: dict[str, tuple[Callable[[bytes, Path], None], bytes]] = {
    "attribute of a class": (read_index, _INDEX + _attribute("__hash__")),
    "attribute of a class, memorized": (read_index, _INDEX + b"q\x01(h\x01" + _attribute("__eq__") + b"t"),
    "attribute of a function": (read_shard, _REBUILD + _attribute("__defaults__")),
    "dict of a function": (read_shard, _REBUILD + _ENTRY),
    "attribute of a function's result": (read_shard, _REBUILD + b"(tR" + _attribute("__class__")),
    "storage of the file": (read_shard, _STORAGE + _ENTRY),
    "member of an enum": (read_index, _MEMORY_FORMATS + b"(K\x00tR" + _attribute("_value_")),
    "member of an enum, by its name": (read_index, _CHANNELS_LAST + _ENTRY),
    "new member of an enum": (read_index, b"\x80\x02" + _MEMORY_FORMATS + b"K\x00\x85\x81" + _ENTRY),
    "items of a class": (read_index, _INDEX + b"Va\nNs(Va\nNu"),
    "items of a function's result": (read_shard, b"\x80\x04" + _REBUILD + b"(tRVa\nNs(Va\nNuNa(NNe(N\x90"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_file_names_is_not_changed(name: str, tmp_path: Path) -> None:
    load, content = HOSTILE[name]
    before = _attributes()
    with pytest.raises(CheckpointError):
        load(content + b".", tmp_path)
    assert _attributes() == before


def test_no_class_comes_from_the_registry_of_extensions(tmp_path: Path) -> None:
    copyreg.add_extension("torch", "Size", 1)
    try:
        with pytest.raises(CheckpointError, match="extension"):
            read_shard(b"\x80\x02\x82\x01.", tmp_path)
    finally:
        copyreg.remove_extension("torch", "Size", 1)
        copyreg.clear_extension_cache()


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
        (read_iteration, {TRACKER: "1" * 400}, "holds '1{40}'; expected"),
        (read_iteration, {"iter_0000003/x": ""}, f"no {TRACKER}, .*it has iter_0000003: pass the folder of"),
        (read_iteration, HUGGING_FACE, r"is a Hugging Face checkpoint.*\(pre_wrap=\.\.\.\)"),
        (step(3), {META: "{}"}, "ckpt_step=3 chooses among the iterations of a checkpoint root"),
        (check_format, {META: '{"sharded_backend": "zarr"}'}, "format zarr, expected torch_dist; convert it"),
        (check_format, {META: "{}"}, "metadata.json is corrupt: KeyError"),
        (check_format, {META: "{"}, "metadata.json is corrupt: JSONDecodeError"),
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
    assert read_iteration(folder) == 7 and not (folder / "code ran").exists()
    with pytest.raises(InvalidInputError, match="init_process_group"):
        load_inference_checkpoint(_Embedding(), folder)
    for no_number in ("abc", "1" * 5000, [3], float("inf")):
        torch.save({"iteration": no_number}, folder / "common.pt")
        with pytest.raises(CheckpointError, match=rf"{folder} has an iteration that is no number"):
            read_iteration(folder)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _one_rank_checkpoint(folder: Path, weight: torch.Tensor | None = None) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        weights = {"weight": torch.ones(6, 2) if weight is None else weight}
        save(weights, storage_writer=FileSystemWriter(_torch_dist(folder)))
    foreign = Namespace(code=_CreatesAFile(folder / "code ran"))
    torch.save({"iteration": 7, "args": foreign, "rng": torch.ones(2)}, folder / "common.pt")
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


def refuse(folder: Path, message: str, model: _Embedding | None = None, **options: Any) -> None:
    """Load, which is refused, and changes no weight."""
    model = model or _Embedding()
    with pytest.raises(CheckpointError, match=message):
        load_inference_checkpoint(model, folder, **options)
    assert model.weight.eq(9).all()


def load(folder: Path) -> None:
    assert load_inference_checkpoint(model := _Embedding(), folder) == 7
    assert model.weight.eq(1).all()


def test_another_padding_of_the_vocabulary(folder: Path, caplog: LogCaptureFixture) -> None:
    padded = _Embedding(8, scales=3)
    with caplog.at_level("WARNING", "megatron_rl_patches"):
        assert load_inference_checkpoint(padded, folder) == 7
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.partition(". ")[0] for message in messages] == [
        "megatron_rl_patches: scales of Transformer Engine (_extra_state) are not loaded",
        "megatron_rl_patches: weight has 6 rows in the checkpoint and 8 in the model",
    ]
    assert padded.weight.tolist() == [[1.0, 1.0]] * 6 + [[0.0, 0.0]] * 2
    refuse(folder, r"every rank: the checkpoint is of another model; .*\[8, 3\]", _Embedding(8, 3))


def test_megatrons_loader_does_not_see_what_savers_planned(folder: Path, evidence: Path) -> None:
    """The allowed names of plans lead to others, by which Megatron's loader would run code."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = _CreatesAFile(evidence)
    content = pickle.dumps(metadata, protocol=3)
    content = b"\x80\x04" + content[2:].replace(
        f"c{os.system.__module__}\nsystem\n".encode(),
        b"cmegatron.core.dist_checkpointing.strategies.torch\nos.system\n",
    )
    (folder / ".metadata").write_bytes(content)
    pickle.loads(content)
    evidence.unlink()
    load(folder)
    assert not evidence.exists()


def test_a_dangling_link_is_no_part_of_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    (folder / "notes").symlink_to("nowhere")
    load(folder)
    (folder / "__0_0.distcp").rename(tmp_path / "moved")
    (folder / "__0_0.distcp").symlink_to("nowhere")
    refuse(folder, r"__0_0\.distcp is missing")


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
    refuse(folder, "weight is not stored as a whole", _Embedding(6 + 2 * is_padded, is_padded=is_padded))


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        *((torch.ones(shape), f"a piece of weight is {shape}") for shape in ([5, 2], [12, 2], [6, 4], [12])),
        *((torch.ones(6, 2).to(dtype), str(dtype)) for dtype in (torch.bool, torch.int8, torch.bfloat16)),
        *((torch.ones(6, 2).to(dtype), str(dtype)) for dtype in (torch.float64, torch.complex64)),
        (torch.nn.Parameter(torch.ones(6, 2)), "_rebuild_parameter, which does not belong"),
        ([1.0] * 600, "corrupt or truncated"),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_a_piece_that_is_not_what_the_index_says(piece: Any, message: str, exact: bool, folder: Path) -> None:
    _store_pieces(folder, [(_rows(0, 6), piece)])
    refuse(folder, re.escape(message), exact=exact)


def test_pieces_in_any_memory_layout_and_none_in_the_bytes_of_another(folder: Path) -> None:
    weight = torch.arange(12.0).view(6, 2)
    pieces = [(_rows(0, 3), weight[:3].T.contiguous().T), (_rows(3, 3), weight[3:])]  # the second is a view
    _store_pieces(folder, pieces)
    model = _Embedding()
    load_inference_checkpoint(model, folder, exact=True)
    assert torch.equal(model.weight, weight)
    index = read_metadata(folder)
    index.storage_data = dict.fromkeys(index.storage_data, min(index.storage_data.values(), key=str))
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    refuse(folder, r"__0_0\.distcp: pieces overlap")


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (b"(K\x02t(K\x01t", r"it has 4 bytes for \[2\] of torch.float32"),  # more than the storage has
        (b"(J\xff\xff\xff\xfft(K\x01t", "has negative numbers"),
        (b"(K\x01t", "not enough values"),
    ],
)
def test_tensors_that_their_storage_does_not_hold(size: bytes, reason: str, tmp_path: Path) -> None:
    content = b"\x80\x02" + _REBUILD + b"(" + _STORAGE + b"K\x00" + size + b"\x89NtR."
    with pytest.raises((ValueError, CheckpointError), match=reason):
        read_shard(content, tmp_path, described)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.complex64])
def test_weights_of_another_kind_of_number(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = _one_rank_checkpoint(tmp_path / "iter_0000007", torch.ones(6, 2).to(dtype))
    refuse(folder, f"weight is {dtype} in the checkpoint and torch.float32")


@pytest.mark.parametrize("name", ["metadata.json", "__0_0.distcp", "common.pt", ".metadata"])
def test_a_pipe_is_not_read(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refuse(folder, rf"{re.escape(name)}.* is missing")
