"""The folder and the format of a checkpoint, found as ``checkpointing.py`` of Megatron-LM does."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...common.text import listed, one_line
from ...errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
_CONVERT = "convert it with Megatron-LM (--ckpt-convert-format torch_dist), or load it through the framework"
#: Two paddings of one vocabulary differ by fewer rows: Megatron pads to a multiple of 128 × TP, TP up to 16.
MAX_PADDING = 128 * 16


def locate(path: str | os.PathLike[str], ckpt_step: int | None = None) -> Path:
    """Find the folder to load for a checkpoint root, the folder of an iteration, or a bare checkpoint."""
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(f"{root}: {'not a folder' if root.exists() else 'no such folder'}")
    patterns = ("metadata.json", ".metadata", "common.pt", "mp_rank_*", "*.distcp")
    if any(entry.match(pattern) for entry in root.iterdir() for pattern in patterns):
        if ckpt_step is not None:
            raise CheckpointError(
                f"ckpt_step={ckpt_step} chooses among the iterations of a checkpoint root, "
                f"but {root} is the checkpoint of one iteration; pass its parent, or no ckpt_step"
            )
        return root
    if ckpt_step is not None:
        name = f"iter_{ckpt_step:07d}"
    elif (tracker := root / TRACKER).is_file():
        text = tracker.read_text(errors="replace").strip()
        if text != "release" and not re.fullmatch("[0-9]{1,18}", text):  # file systems refuse longer names
            raise CheckpointError(f"{tracker} holds {text[:40]!r}; expected an iteration or 'release'")
        name = text if text == "release" else f"iter_{int(text):07d}"
    else:
        raise _no_checkpoint_in(root)
    if not (root / name).is_dir():
        origin = f"{TRACKER} points at" if ckpt_step is None else f"ckpt_step={ckpt_step} asks for"
        raise CheckpointError(f"{origin} {name}, which is not in {root}; it has {_iterations_in(root)}")
    return root / name


def check_format(folder: Path) -> None:
    """Refuse formats other than ``torch_dist``, which are known by the same files as in Megatron."""
    # Other entries are left out: reading a pipe would wait for its writer.
    names = {entry.name for entry in folder.iterdir() if not entry.is_fifo()}
    if "metadata.json" in names:
        with reading(folder / "metadata.json", "is corrupt:"):
            backend = str(json.loads((folder / "metadata.json").read_text())["sharded_backend"])
        if backend != "torch_dist":
            raise CheckpointError(f"{folder} is in the format {backend}, expected torch_dist; {_CONVERT}")
    elif any(name.startswith("mp_rank_") for name in names):
        raise CheckpointError(f"{folder} is in the legacy format torch, expected torch_dist; {_CONVERT}")
    elif any(name in (".metadata", "common.pt") or name.endswith(".distcp") for name in names):
        # The formats without metadata.json look like a part of a torch_dist checkpoint without common.pt.
        raise CheckpointError(
            f"{folder} is a part of a torch_dist checkpoint (metadata.json, which is written last, is "
            "missing: the save did not finish, or the copy is incomplete), or in the format torch_dcp or "
            f"fsdp_dtensor; expected torch_dist; {_CONVERT}"
        )
    else:
        raise _no_checkpoint_in(folder)


@contextmanager
def reading(file: object, fault: str) -> Iterator[None]:
    """Raise ``CheckpointError`` for whatever the body raises; ``fault`` says what is wrong with the file."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise CheckpointError(f"{file} cannot be read: {one_line(error)}") from error
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(f"{file} {fault} {one_line(error)}") from error


def iteration_of(name: str) -> int | None:
    """Return the iteration that a folder has in its name; 0 for a release, as Megatron counts it."""
    if name == "release":
        return 0
    match = re.fullmatch(r"iter_(\d{7,})", name)
    return int(match[1]) if match else None


def _no_checkpoint_in(folder: Path) -> CheckpointError:
    names = sorted(entry.name for entry in folder.iterdir())
    if any(name.endswith(".safetensors") or name.startswith("pytorch_model") for name in names):
        return CheckpointError(
            f"{folder} is a Hugging Face checkpoint: load it through the framework or Megatron-Bridge, in "
            "build_inference_model(pre_wrap=...)"
        )
    if any(iteration_of(name) is not None for name in names):
        return CheckpointError(
            f"{folder} has no {TRACKER}, so it does not say which iteration is the latest; "
            f"it has {_iterations_in(folder)}: pass the folder of one, or ckpt_step"
        )
    content = f"it contains {listed(names)}" if names else "it is empty"
    return CheckpointError(f"{folder} is not a Megatron checkpoint: {content}")


def _iterations_in(root: Path) -> str:
    names = sorted((e.name for e in root.iterdir() if iteration_of(e.name) is not None), reverse=True)
    return listed(names) or "no iteration at all"
