"""Loading a file of a checkpoint runs no code that the file names."""

from __future__ import annotations

import io
import pickle
import warnings
from argparse import Namespace
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rl_patches.errors import CheckpointError
from megatron_rl_patches.inference.checkpoints.pickles import (
    MetadataUnpickler,
    load_dict,
    without_inert_extra_states,
)
from megatron_rl_patches.inference.checkpoints.torch_dist import (
    TorchDistCheckpoint,
    read_metadata,
    requested_tensors,
)

_ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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


@pytest.mark.parametrize("without", [(), ("get_unsafe_globals_in_checkpoint", "safe_globals")])
def test_dicts_load_without_foreign_classes_on_every_torch(
    without: tuple[str, ...], evidence: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in without:  # as in older releases
        monkeypatch.delattr(torch.serialization, name)
    content = {
        "args": Namespace(framework=_OfAFramework(), code=_CreatesAFile(evidence), kind=_Kind.ONE, sizes={1}),
        "iteration": 3,
        "model": {"weight": torch.arange(4.0), "scale": torch.nn.Parameter(torch.ones(1))},
        "newer": [torch.ones(3).to(dtype) for dtype in (torch.float8_e4m3fn, torch.uint16, torch.uint32)],
    }
    torch.save(content, tmp_path / "common.pt")
    loaded = load_dict(tmp_path / "common.pt")
    assert loaded["iteration"] == 3
    assert torch.equal(loaded["model"]["weight"], torch.arange(4.0))
    assert loaded["model"]["scale"] == 1
    assert [(one.dtype, one.float().tolist()) for one in loaded["newer"]] == [
        (one.dtype, [1.0] * 3) for one in content["newer"]
    ]
    assert not evidence.exists()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_what_is_no_file_of_todays_torch_save(tmp_path: Path) -> None:
    # Torch would read these two without our unpickler.
    torch.save({}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.jit.script(torch.nn.Linear(1, 1)).save(tmp_path / "script.pt")
    for number, content in enumerate((b"", b"garbage", b"PK\x03\x04 and no more", pickle.dumps({}))):
        (tmp_path / f"{number}.pt").write_bytes(content)
    for file in tmp_path.iterdir():
        with pytest.raises(CheckpointError, match=rf"{file.name} is corrupt or truncated"):
            load_dict(file)


def test_something_else_than_a_dict(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "common.pt")
    with pytest.raises(CheckpointError, match="holds a list where Megatron saves a dict"):
        load_dict(tmp_path / "common.pt")


def save_alone(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save(state, storage_writer=FileSystemWriter(folder))


def _index(entries: Any, places: Any) -> Callable[[Path], bytes]:
    return lambda file: pickle.dumps(Metadata(entries, storage_data=places))


def _of_size(size: Any) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(), size, [])


def _names_what_an_enum_is_not(evidence: Path) -> bytes:
    return b"cbuiltins\ngetattr\n(ctorch\nSize\nV__class__\ntR."


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (lambda file: pickle.dumps(_CreatesAFile(file)), r"it names pathlib\.Path\.touch"),
        (lambda file: pickle.dumps(Metadata({}, _CreatesAFile(file))), r"it names pathlib\.Path\.touch"),
        (lambda file: b"cos\nsystem\n(Vtrue\ntR.", r"it names (os|posix)\.system"),
        (_names_what_an_enum_is_not, r"it asks for an attribute of .*Size"),
        (lambda file: b"\x80garbage", ""),
        (lambda file: b"", "EOFError"),
        (lambda file: pickle.dumps({}), "it holds a dict"),
        (_index(None, {}), "AttributeError"),
        (_index([], {}), "AttributeError"),
        (_index({1: BytesStorageMetadata()}, {}), "entry 1 is a BytesStorage"),
        (_index({"weight": {}}, {}), "entry 'weight' is a dict"),
        (_index({"weight": _of_size(None)}, {}), "TypeError"),
        (_index({"weight": _of_size((2, None))}, {}), "TypeError"),
        (_index({}, None), "AttributeError"),
        (_index({}, {"weight": 3}), "AttributeError"),
    ],
)
def test_hostile_and_damaged_metadata(content: Any, reason: str, evidence: Path, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(content(evidence))
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/\.metadata is corrupt.*{reason}"):
        read_metadata(tmp_path)
    assert not evidence.exists()


@_ALONE
def test_a_stored_object_runs_no_code(evidence: Path, tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    name = ShardedObject("layer._extra_state", None, (1,), (0,)).unique_key
    save_alone({name: _CreatesAFile(evidence)}, tmp_path)
    torch.save({}, tmp_path / "common.pt")
    checkpoint = TorchDistCheckpoint(tmp_path)
    request = {"model": {"layer._extra_state": ShardedObject("layer._extra_state", None, (1,), (0,))}}
    checkpoint.check_files(requested_tensors(request))
    checkpoint.read(request)
    assert not evidence.exists()


def test_extra_states_that_layers_would_unpickle(evidence: Path, tmp_path: Path) -> None:
    """They are written anew: layers unpickle them without protection, perhaps not as they are read here."""

    def packed(value: object) -> torch.Tensor:
        return torch.frombuffer(bytearray(pickle.dumps(value) + b"and more"), dtype=torch.uint8)

    stream = io.BytesIO()
    torch.save({"scale": torch.ones(1), "code": _CreatesAFile(evidence)}, stream)
    stream.seek(0)
    state = {
        "weight": torch.ones(1),
        "empty._extra_state": torch.empty(0, dtype=torch.uint8),
        "new._extra_state": packed({"scale": torch.ones(2), "variables": [1, "a"]}),
        "old._extra_state": stream,
    }
    states = without_inert_extra_states(state, tmp_path)
    assert states.keys() == state.keys()
    written = states["new._extra_state"].numpy().tobytes()
    assert b"and more" not in written
    assert str(pickle.loads(written)) == str({"scale": torch.ones(2), "variables": [1, "a"]})
    with pytest.raises(
        CheckpointError, match=r"bad\._extra_state is a pickle that is not safe to load: .*Path"
    ):
        without_inert_extra_states({"bad._extra_state": packed(_CreatesAFile(evidence))}, tmp_path)
    # The plans of savers may stand in an index, which nobody unpickles again.
    plan = b"\x80\x04cmegatron.core.dist_checkpointing.mapping\nlogging.os\n."
    state = torch.frombuffer(bytearray(plan), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"it names megatron\.core\.dist_checkpointing\.mapping\.logg"):
        without_inert_extra_states({"bad._extra_state": state}, tmp_path)
    assert not evidence.exists()


def test_a_torch_that_refuses_our_unpickler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({}, tmp_path / "common.pt")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(
        CheckpointError, match=r"common\.pt needs .* while TORCH_FORCE_WEIGHTS_ONLY_LOAD is set"
    ):
        load_dict(tmp_path / "common.pt")


@pytest.mark.parametrize("kind", [PermissionError, MemoryError])
def test_what_keeps_a_file_from_being_read_is_no_damage(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({}, tmp_path / "common.pt")
    (tmp_path / ".metadata").touch()

    def fail(*args: Any, **options: Any) -> Any:
        raise kind

    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr(MetadataUnpickler, "load", fail)
    with pytest.raises(CheckpointError, match=rf"common\.pt cannot be read: {kind.__name__}"):
        load_dict(tmp_path / "common.pt")
    with pytest.raises(CheckpointError, match=rf"\.metadata cannot be read: {kind.__name__}"):
        read_metadata(tmp_path)
