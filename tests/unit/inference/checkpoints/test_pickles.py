"""Reading a file of a checkpoint runs no code that the file names, and changes nothing of what it names."""

from __future__ import annotations

import copyreg
import io
import pickle
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch._utils
from pytest import MonkeyPatch
from torch.distributed.checkpoint import FileSystemWriter, metadata, save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from megatron_rl_patches.errors import CheckpointError
from megatron_rl_patches.inference.checkpoints import pickles
from megatron_rl_patches.inference.checkpoints.pickles import read_metadata, unpickle_dict


class _CreatesAFile:
    """Creates a file when it is unpickled as itself."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


class _OfAFramework:
    def __init__(self) -> None:
        self.value = 1


class _Kind(Enum):
    ONE = 1


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    return tmp_path / "code of the checkpoint ran"


def _load(file: Path) -> dict[str, Any]:
    return unpickle_dict(file.read_bytes(), file)


def test_dicts_load_without_foreign_classes(evidence: Path, tmp_path: Path) -> None:
    content = {
        "args": Namespace(framework=_OfAFramework(), code=_CreatesAFile(evidence), kind=_Kind.ONE, sizes={1}),
        "iteration": 3,
        "content_metadata": {"chained_optim_avoid_prefix": True, "kind": "dp_reshardable"},
        "weight": torch.arange(4.0),
    }
    torch.save(content, tmp_path / "common.pt")
    loaded = _load(tmp_path / "common.pt")
    assert loaded["iteration"] == 3
    assert loaded["content_metadata"] == content["content_metadata"]
    assert not evidence.exists()


def test_what_is_no_dict_of_todays_torch_save(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for number, content in enumerate((b"", b"garbage", b"PK\x03\x04 and no more", pickle.dumps({}))):
        (tmp_path / f"{number}.pt").write_bytes(content)
    for file in tmp_path.iterdir():
        with pytest.raises(CheckpointError, match=rf"{file.name} is corrupt or truncated"):
            _load(file)
    torch.save((1, 2), tmp_path / "common.pt")
    with pytest.raises(CheckpointError, match="holds a tuple where Megatron saves a dict"):
        _load(tmp_path / "common.pt")


def save_alone(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save(state, storage_writer=FileSystemWriter(folder))


def _index(entries: Any, places: Any) -> Callable[[Path], bytes]:
    return lambda file: pickle.dumps(Metadata(entries, storage_data=places))


def _of_size(size: Any, dtype: Any = torch.float32, chunks: Any = ()) -> TensorStorageMetadata:
    return TensorStorageMetadata(metadata.TensorProperties(dtype), size, [*chunks])


WITHOUT_SIZES = metadata.ChunkStorageMetadata((0,), None)  # type: ignore[arg-type]


def _place(name: Any = "weight", file: Any = "__0_0.distcp", offset: Any = 0) -> Any:
    return {MetadataIndex(name): _StorageInfo(file, offset, 1)}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda file: pickle.dumps(_CreatesAFile(file)), r"it names pathlib\.Path\.touch"),
        (lambda file: pickle.dumps(Metadata({}, _CreatesAFile(file))), r"it names pathlib\.Path\.touch"),
        (lambda file: b"cos\nsystem\n(Vtrue\ntR.", r"it names (os|posix)\.system"),
        (lambda file: b"\x80garbage", ""),
        (lambda file: b"", "EOFError"),
        (lambda file: pickle.dumps({}), "it holds {}, no Metadata"),
        (lambda file: pickle.dumps(MetadataIndex("a")), r"it holds torch\..*\.MetadataIndex, no Metadata"),
        (_index(None, {}), "AttributeError"),
        (_index([], {}), "AttributeError"),
        (_index({1: metadata.BytesStorageMetadata()}, {}), "it holds 1 where torch saves a text"),
        (_index({"weight": {}}, {}), "it holds {}, no TensorStorageMetadata"),
        (_index({"weight": _of_size(None)}, {}), "TypeError"),
        (_index({"weight": _of_size((2, None))}, {}), "TypeError"),
        (_index({"weight": _of_size((2, -2))}, {}), r"\[2, -2\] has negative numbers"),
        (_index({"weight": _of_size((2,), torch.Size)}, {}), "it holds the dtype Size"),
        (_index({"weight": _of_size((2,), chunks=[3])}, {}), "it holds 3, no ChunkStorageMetadata"),
        (_index({"weight": _of_size((2,), chunks=[WITHOUT_SIZES])}, {}), "TypeError"),
        (_index({}, None), "AttributeError"),
        (_index({}, {"weight": 3}), "it holds 3, no _StorageInfo"),
        (_index({}, _place(3)), "it holds 3 where torch saves a text"),
        (_index({}, _place(file=3)), "it holds 3 where torch saves a text"),
        (_index({}, _place(file=".metadata")), r"it names the file '\.metadata', expected \*\.distcp"),
        (_index({}, _place(offset=-1)), r"\[-1, 1\] has negative numbers"),
        (_index({}, _place(offset=1.5)), "TypeError"),
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


def _metadata(content: bytes, folder: Path) -> None:
    (folder / ".metadata").write_bytes(content)
    read_metadata(folder)


def _shard(content: bytes, folder: Path) -> None:
    """Read a file of ``torch.save`` with a storage, and with another pickle."""
    torch.save({"weight": torch.ones(1)}, plain := io.BytesIO())
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(changed := io.BytesIO(), "w") as target:
        for name in source.namelist():
            target.writestr(name, content if name.endswith("/data.pkl") else source.read(name))
    unpickle_dict(changed.getvalue(), folder)


def _state() -> list[Any]:
    """Return what can be changed of our own class and of what a file names: of members and methods, too."""
    kinds = metadata._MEM_FORMAT_ENCODING
    watched: list[Any] = [pickles.Record, MetadataIndex, torch._utils._rebuild_tensor_v2, kinds, *kinds]
    watched += [value for value in vars(MetadataIndex).values() if isinstance(value, FunctionType)]
    # Reading annotations adds an empty dict, so they come first.
    names = ("__annotations__", "__dict__", "__defaults__", "__kwdefaults__", "__code__", "__class__")
    attributes = [getattr(value, name, None) for value in watched for name in names]
    return [_items(one) if isinstance(one, (dict, MappingProxyType)) else one for one in attributes]


def _items(values: Mapping[str, Any]) -> dict[str, Any]:
    # Python itself adds these when it pickles the first object of a class.
    return {name: value for name, value in values.items() if name != "__slotnames__"}


_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
_INDEX = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
_MEMORY_FORMATS = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
_ENTRY = b"(Va\nNdb"  # BUILD with {"a": None}
_STORAGE = b"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nK\x01tQ"  # by its persistent id


def _attribute(name: str) -> bytes:
    """BUILD with ``(None, {name: None})``, which sets the attribute."""
    return f"(N(V{name}\nNdtb".encode()


def _named(attribute: str) -> bytes:
    return b"cbuiltins\ngetattr\n(" + _MEMORY_FORMATS + f"V{attribute}\ntR".encode()


HOSTILE: dict[str, tuple[Callable[[bytes, Path], None], bytes]] = {
    "attribute of a class": (_metadata, _INDEX + _attribute("__hash__")),
    "attribute of a class, memorized": (_metadata, _INDEX + b"q\x01(h\x01" + _attribute("__eq__") + b"t"),
    "attribute of a function": (_shard, _REBUILD + _attribute("__defaults__")),
    "dict of a function": (_shard, _REBUILD + _ENTRY),
    "attribute of a function's result": (_shard, _REBUILD + b"(tR" + _attribute("__class__")),
    "storage of the file": (_shard, _STORAGE + _ENTRY),
    "member of an enum": (_metadata, _MEMORY_FORMATS + b"(K\x00tR" + _attribute("_value_")),
    "member of an enum, by its name": (_metadata, _named("TORCH_CHANNELS_LAST") + _ENTRY),
    "new member of an enum": (_metadata, b"\x80\x02" + _MEMORY_FORMATS + b"K\x00\x85\x81" + _ENTRY),
    "items of a class": (_metadata, _INDEX + b"Va\nNs(Va\nNu"),
    "items of a function's result": (_shard, b"\x80\x04" + _REBUILD + b"(tRVa\nNs(Va\nNuNa(NNe(N\x90"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_file_names_is_not_changed(name: str, tmp_path: Path) -> None:
    load, content = HOSTILE[name]
    before = _state()
    with pytest.raises(CheckpointError):
        load(content + b".", tmp_path)
    assert _state() == before


def test_no_class_comes_from_the_registry_of_extensions(tmp_path: Path) -> None:
    copyreg.add_extension("torch", "Size", 1)
    try:
        with pytest.raises(CheckpointError, match="extension"):
            _shard(b"\x80\x02\x82\x01.", tmp_path)
    finally:
        copyreg.remove_extension("torch", "Size", 1)
        copyreg.clear_extension_cache()
