"""Weights for a model that only scores: from Megatron's checkpoints, weights only, all or nothing."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ...common.agreement import all_or_none, gathered, world
from ...common.chunks import as_chunks, unwrap
from ...common.messages import Message, is_rank_0
from ...common.text import listed
from ...errors import CheckpointError, InvalidInputError
from ..weights import Differences, describe, is_of_output_head, named_weights
from .pickles import reading

_PADDED = Message(
    "{name} has {stored} rows in the checkpoint and {own} in the model",
    "This is harmless if the vocabulary is the same and only its padding differs.",
    "Compare the vocabularies, and pass the true vocab_size to scores and losses.",
)
_WITHOUT_MTP = Message(
    "{number} tensors of multi-token prediction ({prefix}*) are not loaded",
    "This is harmless: a model that only scores has no such layers.",
    "Ignore it.",
    logging.INFO,
)
_MTP = "mtp."
_TRACKER = "latest_checkpointed_iteration.txt"
_CONVERT = "convert it with Megatron-LM (--ckpt-convert-format torch_dist), or load it through the framework"
_State = dict[str, Any]
_AS_BEFORE = "Nothing was loaded; the weights are as before."
_on_all_ranks_or_none = partial(all_or_none, error=CheckpointError, outcome=_AS_BEFORE)


def load_inference_checkpoint(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    path: str | os.PathLike[str],
    *,
    ckpt_step: int | None = None,
    exact: bool = False,
    with_output_head: bool = True,
) -> int:
    """Load the weights of a Megatron checkpoint, and nothing else of it, into a model.

    Megatron-core's loader reads the tensors, after the index of the checkpoint was checked. No global state
    changes, and no code runs that the files name. The optimizer's shards may be absent. TP, PP, VPP and EP
    sizes may change even where Megatron-LM's ``load_checkpoint`` refuses that because of the optimizer.

    A collective: every rank of the default process group calls it, and either all of them load or all of
    them raise. Keys, shapes and what the files say of their tensors are checked before any tensor is read,
    and all tensors are read, into host memory, before the first weight is written.

    Weights are written in place: storages, dtypes, ``requires_grad`` and train/eval mode of the model stay.
    Vocabulary padding may differ, by less than 2,048 rows and in embeddings and output layer alike, with a
    warning: rows beyond those stored become zero, and ``vocab_size`` of scores and losses leaves them out.
    ``_extra_state`` entries (scales of Transformer Engine for delayed scaling) are not loaded, with a warning
    if the model has some.

    Args:
        model: model chunks of this rank, bare or as Megatron's ``get_model`` wraps them, or one of them.
        path: a checkpoint root with ``latest_checkpointed_iteration.txt``, an ``iter_XXXXXXX`` or
            ``release`` folder, or any folder written by ``megatron.core.dist_checkpointing``.
        ckpt_step: the iteration to take from a root instead of the latest, as ``--ckpt-step``.
        exact: refuse other dtypes and another padding of the vocabulary too.
        with_output_head: ``False`` leaves the output layer as it is, whichever the checkpoint has: for a
            critic from a policy's checkpoint, or a policy from a critic's.

    Returns:
        The iteration at which the checkpoint was saved; 0 for a release, and if there is none.

    Raises:
        InvalidInputError: no chunks, a chunk on the meta device, or no process group.
        CheckpointError: the checkpoint is missing, partial, corrupt, hostile, of another model or format; or
            an optimizer has main parameters, which its next step would write over the weights. Every rank
            raises it, it names the ranks that failed, and all weights are bit for bit as before.
    """
    if world() is None:
        raise InvalidInputError("loading needs a process group: call torch.distributed.init_process_group")
    chunks, source = [unwrap(chunk) for chunk in as_chunks(model)], os.fspath(path)
    if not chunks:
        raise InvalidInputError("model has no chunks; expected what Megatron's get_model returns")
    if meta := next((name for name, weight in named_weights(chunks) if weight.is_meta), None):
        raise InvalidInputError(
            f"{meta} is on the meta device, without memory: materialize it, as build_inference_model does"
        )
    iteration, states = _read(chunks, source, ckpt_step, exact, with_output_head)
    # From here on only a device can fail.
    outcome = "Some weights may be new and others not; build the model again."
    with _on_all_ranks_or_none(f"writing the weights of {source}", outcome=outcome):
        for index, chunk in enumerate(chunks):
            chunk.load_state_dict(states.get(str(index), {}), strict=False)
    return iteration


def read_iteration(path: str | os.PathLike[str], ckpt_step: int | None = None) -> int:
    """Return the iteration that :func:`load_inference_checkpoint` would load; no other rank takes part."""
    folder = locate(path, ckpt_step)
    if (iteration := iteration_of(folder.name)) is not None:
        return iteration
    check_format(folder)
    from .torch_dist import TorchDistCheckpoint

    return _iteration(folder, TorchDistCheckpoint(folder).common)


def _read(
    chunks: Sequence[torch.nn.Module], source: str, ckpt_step: int | None, exact: bool, with_output_head: bool
) -> tuple[int, _State]:
    """Return the iteration, and the state dicts of the chunks."""
    from .torch_dist import TorchDistCheckpoint

    with _on_all_ranks_or_none(f"cannot load {source}"):
        # With sharded optimizers, weights that another replica updates have a main parameter, too.
        if name := next((name for name, x in named_weights(chunks) if hasattr(x, "main_param")), None):
            raise CheckpointError(
                f"{name} has a main parameter, from which the optimizer's next step would write the old "
                "weight again: load before the optimizer is made, or with Megatron's load_checkpoint, "
                "which calls optimizer.reload_model_params(). If that optimizer is gone, delete the "
                "attribute main_param of each parameter"
            )
        folder = locate(source, ckpt_step)
        check_format(folder)
        checkpoint = TorchDistCheckpoint(folder)
        iteration = _iteration(folder, checkpoint.common)
        request = checkpoint.request(chunks, with_output_head)
        requested = request.by_name()
        differing, paddings = checkpoint.compare(requested, exact)
        for index, chunk in enumerate(chunks):
            loaded = {*request.tensors.get(str(index), {}), *request.others.get(str(index), {})}
            differing |= _missing(chunk, loaded, with_output_head)
    # Each stored tensor must be requested by a rank. Ranks send a byte for each: names would be megabytes.
    names = checkpoint.names(with_output_head)
    is_requested = bytes(name in requested for name in names)
    ranks = gathered((folder.name, is_requested, differing, paddings), world())
    folders, all_flags, all_differing, all_paddings = zip(*ranks, strict=True)
    if len(set(folders)) > 1:  # while a run is saving, ranks may read different iterations from the tracker
        each = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(folders))
        raise CheckpointError(f"ranks see different checkpoints ({each}). {_AS_BEFORE}")
    with ExitStack() as stack:
        with _on_all_ranks_or_none(f"cannot load {source}"):
            by_any_rank = {name for name, *by_rank in zip(names, *all_flags, strict=True) if any(by_rank)}
            unexpected = set(names) - by_any_rank
            mtp = {name for name in unexpected if name.startswith(_MTP)}  # which a policy's checkpoint has
            if mtp and not any(name.startswith(_MTP) for name in by_any_rank):
                unexpected -= mtp
                if is_rank_0():
                    _WITHOUT_MTP.log(number=len(mtp), prefix=_MTP)
            differing = {("unexpected in the checkpoint", name) for name in unexpected}.union(*all_differing)
            differing |= _other_heads(set().union(*all_paddings))
            if text := describe(differing):
                if any(is_of_output_head(text) for _, text in differing):
                    text += ". To load all but the output layer, pass with_output_head=False"
                raise CheckpointError(f"the checkpoint is of another model; {text}")
            links = Path(stack.enter_context(TemporaryDirectory(prefix="megatron_rl_patches_")))
            checkpoint.write_index(requested, links)
            checkpoint.check_pieces(request)
        with _on_all_ranks_or_none(f"cannot read {source}"):
            states = checkpoint.read(request, links)
    return iteration, states


def _other_heads(vocabularies: set[tuple[str, int, int]]) -> Differences:
    """Return heads of another kind, as a critic's is; warn of vocabularies with another padding.

    The argument has each vocabulary of any rank: its name, and its rows as stored and as in the model.
    """
    # Padding gives an output layer as many rows as the embeddings, which may be on another rank.
    rows = {(stored, own) for name, stored, own in vocabularies if name.endswith("word_embeddings.weight")}
    differing: Differences = set()
    for name, stored, own in sorted(x for x in vocabularies if x[1] != x[2]):
        if is_of_output_head(name) and rows and (stored, own) not in rows:
            text = f"{name} has {stored} rows in the checkpoint and {own} in the model, unlike the embeddings"
            differing.add(("of another kind", text))
        elif is_rank_0():
            # It might be another vocabulary, which shows nowhere else.
            _PADDED.log(name=name, stored=stored, own=own)
    return differing


def _iteration(folder: Path, content: _State) -> int:
    stored = content.get("iteration", content.get("total_iters"))
    if folder.name == "release" or stored is None:
        return iteration_of(folder.name) or 0
    with reading(folder, "has an iteration that is no number:"):
        return int(stored)


def _missing(chunk: torch.nn.Module, names: set[str], with_output_head: bool) -> Differences:
    """Return the weights that stay as they are when these are loaded, but are not left out on purpose."""
    weights = {name: x for name, x in chunk.state_dict(keep_vars=True).items() if "_extra_state" not in name}
    # Tied weights have several names, and one is enough.
    loaded = {id(weights[name]) for name in weights.keys() & names}
    missing = (name for name, x in weights.items() if isinstance(x, torch.Tensor) and id(x) not in loaded)
    wanted = (name for name in missing if with_output_head or not is_of_output_head(name))
    return {("missing in the checkpoint", name) for name in wanted}


# --- the folder and the format, found as ``checkpointing.py`` of Megatron-LM does


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
    elif not (tracker := root / _TRACKER).is_file():
        raise _no_checkpoint_in(root)
    elif (name := tracker.read_text(errors="replace").strip()) != "release":
        if not re.fullmatch("[0-9]{1,18}", name):  # file systems refuse longer names
            raise CheckpointError(f"{tracker} holds {name[:40]!r}; expected an iteration or 'release'")
        name = f"iter_{int(name):07d}"
    if not (root / name).is_dir():
        origin = f"{_TRACKER} points at" if ckpt_step is None else f"ckpt_step={ckpt_step} asks for"
        raise CheckpointError(f"{origin} {name}, which is not in {root}; it has {_iterations_in(root)}")
    return root / name


def check_format(folder: Path) -> None:
    """Refuse formats other than ``torch_dist``, which are known by the same files as in Megatron."""
    # Other entries are left out: reading a pipe would wait for its writer.
    names = {entry.name for entry in folder.iterdir() if not entry.is_fifo()}
    if "metadata.json" in names:
        with reading(folder / "metadata.json", "is corrupt:"):
            backend = str(json.loads((folder / "metadata.json").read_text())["sharded_backend"])
    elif any(name.startswith("mp_rank_") for name in names):
        backend = "torch"
    elif any(name in (".metadata", "common.pt") or name.endswith(".distcp") for name in names):
        # The formats without metadata.json look like a part of a torch_dist checkpoint without common.pt.
        raise CheckpointError(
            f"{folder} is a part of a torch_dist checkpoint (metadata.json, which is written last, is "
            "missing: the save did not finish, or the copy is incomplete), or in the format torch_dcp or "
            f"fsdp_dtensor; expected torch_dist; {_CONVERT}"
        )
    else:
        raise _no_checkpoint_in(folder)
    if backend != "torch_dist":
        raise CheckpointError(f"{folder} is in the format {backend}, expected torch_dist; {_CONVERT}")


def iteration_of(name: str) -> int | None:
    """Return the iteration that a folder has in its name; 0 for a release, as Megatron counts it."""
    match = re.fullmatch(r"release|iter_(\d{7,})", name)
    return int(match[1] or 0) if match else None


def _no_checkpoint_in(folder: Path) -> CheckpointError:
    names = sorted(entry.name for entry in folder.iterdir())
    if any(name.endswith(".safetensors") or name.startswith("pytorch_model") for name in names):
        return CheckpointError(
            f"{folder} is a Hugging Face checkpoint: load it through the framework or Megatron-Bridge, in "
            "build_inference_model(pre_wrap=...)"
        )
    if any(iteration_of(name) is not None for name in names):
        return CheckpointError(
            f"{folder} has no {_TRACKER}, so it does not say which iteration is the latest; "
            f"it has {_iterations_in(folder)}: pass the folder of one, or ckpt_step"
        )
    content = f"it contains {listed(names)}" if names else "it is empty"
    return CheckpointError(f"{folder} is not a Megatron checkpoint: {content}")


def _iterations_in(root: Path) -> str:
    names = sorted((e.name for e in root.iterdir() if iteration_of(e.name) is not None), reverse=True)
    return listed(names) or "no iteration at all"
