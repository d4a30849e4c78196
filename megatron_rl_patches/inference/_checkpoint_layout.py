"""Where a Megatron checkpoint lies on disk, and in which format.

Follows ``_load_base_checkpoint``, ``get_checkpoint_name`` and ``_get_checkpoint_format`` of Megatron-LM's
``megatron/training/checkpointing.py``, which a program without Megatron-LM's global arguments cannot call.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from ..errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
TORCH_DIST, TORCH = "torch_dist", "torch"
FORMATS = (TORCH_DIST, TORCH)


@dataclass(frozen=True)
class Location:
    """The folder of one iteration.

    Attributes:
        folder: holds ``metadata.json`` or ``mp_rank_*``.
        iteration: by the folder's name; ``None`` when the name does not tell. Megatron counts a release as 0.
    """

    folder: Path
    iteration: int | None


def locate(path: str | os.PathLike[str], ckpt_step: int | None = None) -> Location:
    """Find the folder to load for a checkpoint root, the folder of an iteration, or a bare checkpoint.

    Raises:
        CheckpointError: nothing is there, or what is there is not a Megatron checkpoint.
    """
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(f"{root}: {'not a folder' if root.exists() else 'no such folder'}")
    if _holds_checkpoint(root):
        if ckpt_step is not None:
            raise CheckpointError(
                f"ckpt_step={ckpt_step} chooses among the iterations of a checkpoint root, "
                f"but {root} is the checkpoint of one iteration; give its parent, or no ckpt_step"
            )
        return Location(root, _iteration_of(root.name))
    if ckpt_step is not None:
        name = f"iter_{ckpt_step:07d}"
    elif (root / TRACKER).is_file():
        name = _tracked(root / TRACKER)
    else:
        raise _no_checkpoint_in(root)
    if not (root / name).is_dir():
        asked_by = f"{TRACKER} points at" if ckpt_step is None else f"ckpt_step={ckpt_step} asks for"
        raise CheckpointError(f"{asked_by} {name}, which is not in {root}; there: {_iterations_in(root)}")
    return Location(root / name, _iteration_of(name))


def detect_format(folder: Path) -> str:
    """``"torch_dist"`` or ``"torch"``, decided as Megatron does.

    Raises:
        CheckpointError: any other format, named where it can be told, or an unfinished save.
    """
    names = {entry.name for entry in folder.iterdir()}
    if "metadata.json" in names:
        backend = _sharded_backend(folder / "metadata.json")
        if backend != TORCH_DIST:
            raise _unsupported(folder, backend)
        return TORCH_DIST
    if any(name.startswith("mp_rank_") for name in names):
        return TORCH
    partial = (
        "a part of a torch_dist checkpoint (metadata.json, which is written last, is missing: the save did "
        "not finish, or the copy is incomplete)"
    )
    if "common.pt" in names or (".metadata" not in names and any(name.endswith(".distcp") for name in names)):
        raise CheckpointError(f"{folder} is {partial}")
    if ".metadata" in names:
        # From megatron-core 0.19 on, torch_dist has no common.pt to tell them apart.
        raise _unsupported(folder, f"torch_dcp or fsdp_dtensor, or it is {partial}")
    raise _no_checkpoint_in(folder)


@contextmanager
def unknown_classes_inert(file: Path) -> Iterator[None]:
    """Let ``torch.load(file, weights_only=True)`` pass over classes that torch does not know to be safe.

    Checkpoints hold the saving program's arguments, with enums and classes of modules that need not exist
    here. None of that is wanted: whatever is unknown becomes an :class:`_Inert` object, so that loading runs
    no foreign code and never fails for want of an import.
    """
    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    with torch.serialization.safe_globals([(_Inert, name) for name in unknown]):
        yield


def load_pickle(file: Path) -> dict[str, Any]:
    """A dict saved by ``torch.save``: tensors are mapped from the file, and read when they are used.

    Raises:
        CheckpointError: the file is missing or cannot be read.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; the checkpoint is incomplete")
    try:
        with unknown_classes_inert(file):
            content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{file} is corrupt or truncated: {in_short(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__} where Megatron saves a dict")
    return content


def in_short(error: BaseException) -> str:
    """Type and first line; the whole is chained to the ``CheckpointError`` that quotes it."""
    if isinstance(error, CheckpointException):
        error, _ = next(iter(error.failures.values()))
    # torch's text is a page of advice to switch its protection off.
    text = "" if isinstance(error, pickle.UnpicklingError) else str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


class _Inert:
    """Stands for an object whose class is not known to be safe; keeps nothing, does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _holds_checkpoint(folder: Path) -> bool:
    return any(
        entry.name in ("metadata.json", ".metadata", "common.pt")
        or entry.name.startswith("mp_rank_")
        or entry.name.endswith(".distcp")
        for entry in folder.iterdir()
    )


def _iteration_of(name: str) -> int | None:
    if name == "release":
        return 0
    match = re.fullmatch(r"iter_(\d{7,})", name)
    return int(match[1]) if match else None


def _tracked(tracker: Path) -> str:
    text = tracker.read_text(errors="replace").strip()
    if text == "release":
        return text
    if not text.isdecimal():
        raise CheckpointError(f"{tracker} holds {text[:40]!r}; expected an iteration or 'release'")
    return f"iter_{int(text):07d}"


def _sharded_backend(metadata_json: Path) -> str:
    try:
        return str(json.loads(metadata_json.read_text())["sharded_backend"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{metadata_json} is corrupt: {in_short(error)}") from error


def _unsupported(folder: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} is in the format {found}; supported: {' and '.join(FORMATS)}. "
        "Convert it with Megatron-LM (--ckpt-convert-format torch_dist), or load it through the host"
    )


def _no_checkpoint_in(folder: Path) -> CheckpointError:
    names = sorted(entry.name for entry in folder.iterdir())
    if any(name.endswith(".safetensors") or name.startswith("pytorch_model") for name in names):
        return CheckpointError(
            f"{folder} is a Hugging Face checkpoint; supported: {' and '.join(FORMATS)}. "
            "Load it through the host or Megatron-Bridge, in build_inference_model(pre_wrap=...)"
        )
    if any(_iteration_of(name) is not None for name in names):
        return CheckpointError(
            f"{folder} has no {TRACKER}, so it does not say which iteration is the latest; "
            f"there: {_iterations_in(folder)}; give the folder of one, or ckpt_step"
        )
    found = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return CheckpointError(f"{folder} holds no Megatron checkpoint; found: {found or 'nothing'}")


def _iterations_in(root: Path) -> str:
    names = sorted(entry.name for entry in root.iterdir() if _iteration_of(entry.name) is not None)
    if len(names) > 10:
        names = ["...", *names[-10:]]
    return ", ".join(names) or "no iteration at all"
