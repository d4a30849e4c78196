"""Unpickling that calls only the functions and classes in the tables below, and no code of a file's author.

Torch's ``weights_only=True`` is not for ``.metadata``, and releases treat unknown classes differently.
A file with millions of nested tuples can end the process, since Python frees them recursively.
"""

from __future__ import annotations

import collections
import io
import os
import pathlib
import pickle
import sys
import zipfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, ClassVar

import torch
import torch._utils
from torch.distributed.checkpoint import filesystem, metadata

from ...errors import CheckpointError
from .location import reading

_Table = dict[tuple[str, str], Any]
#: In the names of what layers of TransformerEngine keep beside their weights.
EXTRA_STATE = "_extra_state"


def load_dict(file: Path) -> dict[str, Any]:
    """Load a dict saved by ``torch.save``: tensors are mapped from the file, and read when they are used.

    It also holds the saving program's arguments, whose classes need not exist in this process: those become
    :class:`Inert` objects.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; the checkpoint is incomplete")
    return as_dict(load_torch(file, file), file)


def load_torch(source: Path | IO[bytes], file: Path) -> Any:
    """Load a file, whose tensors are then mapped, or a stream of ``torch.save``, to the CPU."""
    if os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "").lower() in ("1", "y", "yes", "true"):
        raise CheckpointError(
            f"{file} needs the unpickler of this package, which torch refuses while "
            "TORCH_FORCE_WEIGHTS_ONLY_LOAD is set; unset it: that unpickler runs no code of the file either"
        )
    with reading(file, "is corrupt or truncated:"):
        _require_plain_archive(source)
        # Torch lets this module do the unpickling, and adds the storages.
        return torch.load(
            source,
            map_location="cpu",
            mmap=isinstance(source, Path),
            weights_only=False,
            pickle_module=_LENIENT_PICKLE,
        )


def as_dict(content: Any, file: Path) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__} where Megatron saves a dict")
    return content


def without_inert_extra_states(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a state dict whose extra states hold tensors and builtin containers only.

    TransformerEngine unpickles the extra states of its layers without any protection. So each is unpickled
    here and written anew. What has become an :class:`Inert` object is left out.
    """
    result = {}
    for name, value in state.items():
        if EXTRA_STATE in name and isinstance(value, torch.Tensor) and value.numel():
            content = value.cpu().numpy().tobytes()
            with reading(f"{folder}: {name}", "is a pickle that is not safe to load:"):
                content = pickle.dumps(_ExtraStateUnpickler(io.BytesIO(content)).load())
            value = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        elif EXTRA_STATE in name and isinstance(value, io.BytesIO):
            torch.save(load_torch(value, folder), stream := io.BytesIO())
            stream.seek(0)
            value = stream
        if not isinstance(value, Inert):
            result[name] = value
    return result


class Inert:
    """Stands for an object of a class that is not in the table; keeps nothing, does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __call__(self, *args: object, **kwargs: object) -> Inert:
        return self

    def append(self, *args: object) -> None: ...

    __setstate__ = __setitem__ = extend = add = append


def _enum_member(owner: Any, name: Any) -> Any:
    """Stand in for ``getattr``, with which some releases of Python pickle the members of an enum."""
    if owner is Inert:
        return Inert()
    if not (isinstance(owner, type) and issubclass(owner, Enum)):
        raise pickle.UnpicklingError(f"it asks for an attribute of {owner!r}, which is no enum")
    return owner[name]


def _existing(module: Any, *names: str) -> _Table:
    return {(module.__name__, name): getattr(module, name) for name in names if hasattr(module, name)}


_BUILTINS: _Table = {
    (module, builtin.__name__): builtin
    for module in ("builtins", "__builtin__")
    for builtin in (set, frozenset, bytearray, complex, list, dict, tuple, int, bool, slice)
}
_BUILTINS |= {
    ("collections", "OrderedDict"): collections.OrderedDict,
    # With this, old protocols pickle bytes.
    ("_codecs", "encode"): lambda text, encoding: text.encode("latin1"),
}
_TORCH: _Table = {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_TORCH |= {("torch", "Size"): torch.Size, ("torch", "device"): torch.device}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}

_IN_METADATA: _Table = {
    **_BUILTINS,
    **_TORCH,
    ("builtins", "getattr"): _enum_member,
    ("__builtin__", "getattr"): _enum_member,
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    **_existing(metadata, "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
    **_existing(metadata, "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    **_existing(filesystem, "_StorageInfo"),
}
_IN_OLDER_TORCH = "torch.distributed._shard.sharded_tensor.metadata"
for _name in ("TensorProperties", "MEM_FORMAT_ENCODING"):
    if _class := getattr(metadata, _name, None) or getattr(metadata, f"_{_name}", None):
        _IN_METADATA[_IN_OLDER_TORCH, _name] = _class

_IN_TENSORS: _Table = {
    **_BUILTINS,
    **_TORCH,
    ("_io", "BytesIO"): io.BytesIO,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    # Dtypes without a storage class of their own, such as float8 and uint16, are saved with this one.
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    **_existing(torch._utils, "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
}
_IN_EXTRA_STATES: _Table = {
    **_IN_TENSORS,
    ("torch.storage", "_load_from_bytes"): lambda content: torch.load(
        io.BytesIO(content), map_location="cpu", weights_only=True
    ),
}

# Plans of the saving ranks, which megatron-core stores for its next save, and nobody needs for loading.
_PLANS = (
    "megatron.core.dist_checkpointing.",
    "nvidia_resiliency_ext.",
    "torch.distributed.checkpoint.planner",
)
_RECIPES = "transformer_engine.common.recipe"


def _allowed(table: _Table, module: str, name: str) -> Any:
    if (module, name) not in table:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in such a file")
    return table[module, name]


#: Opcodes that change an object, and where on the stack it is; 0: it is the last one below the mark.
_CHANGES = {pickle.BUILD: 2, pickle.SETITEM: 3, pickle.APPEND: 2}
_CHANGES |= dict.fromkeys((pickle.SETITEMS, pickle.APPENDS, pickle.ADDITEMS), 0)


def _checked(opcode: bytes, depth: int) -> Callable[[Any], None]:
    """Return what pickle does for an opcode, after a check of the object that it changes."""
    change = pickle._Unpickler.dispatch[opcode[0]]

    def check_and_change(unpickler: Any) -> None:
        target = unpickler.stack[-depth] if depth else unpickler.metastack[-1][-1]
        if type(target) not in unpickler.own_classes:
            name = getattr(target, "__qualname__", type(target).__qualname__)
            raise pickle.UnpicklingError(f"it changes {name}, which it has not made")
        change(unpickler)

    return check_and_change


class _Unpickler(pickle._Unpickler):
    """Changes no object but instances of builtin containers and of classes that the file names.

    The file has made these itself, members of enums excepted. Whatever else it can put on the stack belongs
    to the whole process: classes, functions, dtypes. Pickle's own opcodes would change that, too. Python's
    own implementation has methods for them, the one in C has not.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **pickle._Unpickler.dispatch,
        **{opcode[0]: _checked(opcode, depth) for opcode, depth in _CHANGES.items()},
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own_classes: set[type] = {dict, list, set}

    def find_class(self, module: str, name: str) -> Any:
        value = self.lookup(module, name)
        if isinstance(value, type) and not issubclass(value, Enum):
            self.own_classes.add(value)
        return value

    def lookup(self, module: str, name: str) -> Any:
        """Return what stands for a name in the file; raise if the file must not name it."""
        raise NotImplementedError

    def get_extension(self, code: int) -> Any:
        raise pickle.UnpicklingError(f"it names {code} in the registry of extensions of this process")


class MetadataUnpickler(_Unpickler):
    """For the index of a distributed checkpoint: refuses what is neither in the table nor part of a plan."""

    def lookup(self, module: str, name: str) -> Any:
        return Inert if module.startswith(_PLANS) else _allowed(_IN_METADATA, module, name)


class _ExtraStateUnpickler(_Unpickler):
    """For extra states, which also hold recipes of TransformerEngine: classes of enums and dataclasses.

    Nothing becomes an :class:`Inert` object here, because TransformerEngine unpickles the bytes again.
    """

    def lookup(self, module: str, name: str) -> Any:
        recipe = getattr(sys.modules.get(module), name, None) if module == _RECIPES else None
        if isinstance(recipe, type) and recipe.__module__ == _RECIPES:
            return recipe
        return _allowed(_IN_EXTRA_STATES, module, name)


class _Lenient(_Unpickler):
    """For ``torch.load``: puts :class:`Inert` in place of what is not in the table."""

    def lookup(self, module: str, name: str) -> Any:
        return _IN_TENSORS.get((module, name), Inert)


def _require_plain_archive(source: Path | IO[bytes]) -> None:
    """Refuse older formats and TorchScript, which ``torch.load`` would read without our unpickler."""
    with zipfile.ZipFile(source) as archive:
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise pickle.UnpicklingError("it is a TorchScript archive")
    if not isinstance(source, Path):
        source.seek(0)


# What torch.load uses of a pickle module.
_LENIENT_PICKLE: Any = SimpleNamespace(__name__=__name__, Unpickler=_Lenient, load=None)
