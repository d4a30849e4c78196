"""Weights for a model that only scores: from Megatron's checkpoints, weights only, all or nothing."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from ...common.chunks import as_chunks, unwrap
from ...common.ranks import is_rank_0
from ...errors import CheckpointError, InvalidInputError, first, one_line
from ..weights import Differences, describe, differences
from .location import FORMATS, TORCH, Location, detect_format, locate
from .pickles import EXTRA_STATE, load_dict, without_inert_extra_states

_log = logging.getLogger("megatron_rl_patches")
_AS_BEFORE = "Nothing was loaded; the weights are as before."
_TORCH_FILE = "model_optim_rng.pt"
_MTP = "mtp."
_State = dict[str, Any]


def load_inference_checkpoint(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    path: str | os.PathLike[str],
    *,
    format: str = "auto",
    ckpt_step: int | None = None,
    exact: bool = False,
) -> int:
    """Load the weights of a Megatron checkpoint, and nothing else of it, into a model.

    It works on megatron-core alone and changes no global state. The optimizer's shards are neither read nor
    checked, and may be absent. TP and PP sizes may change even where Megatron-LM's ``load_checkpoint``
    refuses that because of the optimizer's format (``megatron/training/checkpointing.py``).

    A collective: every rank of the default process group calls it, and either all of them load or all of
    them raise. Keys, shapes and file sizes are checked before any tensor is read, and all tensors are read
    before the first weight is written. Bytes that changed within a stored tensor go unnoticed, since torch
    does not verify its checksums.

    Weights are written in place: storages, dtypes, ``requires_grad`` and train/eval mode of the model stay.
    Another dtype in the checkpoint is converted. Vocabulary padding may differ, by less than 2,048 rows, with
    a warning: rows beyond those stored become zero, and ``vocab_size`` of :func:`forward_log_probs` leaves
    them out. ``_extra_state`` entries (scales of Transformer Engine) are loaded where both sides have
    them. No code runs that the files name; a file that asks for it is refused.

    It takes no device memory. From ``torch_dist``, every rank holds its own weights once in host memory, and
    twice while it joins those that Megatron splits for storage (gated MLP). From ``torch``, tensors are
    mapped, and copied one by one.

    Args:
        model: model chunks of this rank as Megatron's ``get_model`` returns them, or one of them; in
            ``Float16Module`` or DDP, or bare.
        path: a checkpoint root with ``latest_checkpointed_iteration.txt``, an ``iter_XXXXXXX`` or
            ``release`` folder, or any folder written by ``megatron.core.dist_checkpointing``.
        format: ``"torch_dist"`` (any TP, PP, VPP and EP sizes), ``"torch"`` (the sizes of the checkpoint),
            or ``"auto"``, whichever of them it is.
        ckpt_step: the iteration to take from a root instead of the latest, as ``--ckpt-step``.
        exact: refuse other dtypes and another padding of the vocabulary too.

    Returns:
        The iteration at which the checkpoint was saved; 0 for a release, as in Megatron, and if the
        checkpoint does not hold it.

    Raises:
        InvalidInputError: no chunks, a chunk on the meta device, or an unknown format.
        CheckpointError: the checkpoint is missing, partial, corrupt, hostile, of another model or format.
            Every rank raises it, it names the ranks that failed, and all weights are bit for bit as before.
    """
    if format not in ("auto", *FORMATS):
        raise InvalidInputError(f"format={format!r}: expected 'auto', {' or '.join(map(repr, FORMATS))}")
    chunks = _bare_chunks(model)
    with _on_all_ranks_or_none(f"cannot load {os.fspath(path)}"):
        location = locate(path, ckpt_step)
        stored_format = detect_format(location.folder)
        if format not in ("auto", stored_format):
            raise CheckpointError(f"{location.folder} is in the format {stored_format}, not {format}")
    names = _gather(location.folder.name)
    if len(set(names)) > 1:  # while a run is saving, ranks may read different iterations from the tracker
        each = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise CheckpointError(f"ranks see different checkpoints ({each}). {_AS_BEFORE}")

    if stored_format == TORCH:
        with _on_all_ranks_or_none(f"cannot load {location.folder}"):
            content, states = _read_torch(chunks, location.folder)
    else:
        content, states = _read_torch_dist(chunks, location.folder, exact)
    with _on_all_ranks_or_none(f"cannot load {location.folder}"):
        iteration = _iteration(location, content)
        states = [without_inert_extra_states(state, location.folder) for state in states]
        for chunk, state in zip(chunks, states, strict=True):
            _refuse(_compare(chunk, state, exact))
    # From here on only an extra state can refuse, or a device can fail.
    outcome = "Some weights may be new and others not; build the model again."
    with _on_all_ranks_or_none(f"writing the weights of {location.folder}", outcome):
        for chunk, state in zip(chunks, states, strict=True):
            chunk.load_state_dict(state, strict=False)
    return iteration


def read_iteration(path: str | os.PathLike[str], ckpt_step: int | None = None) -> int:
    """Return the iteration of the checkpoint that :func:`load_inference_checkpoint` would load.

    Reads no weights. Not a collective, and needs no process group.
    """
    location = locate(path, ckpt_step)
    if location.iteration is not None:
        return location.iteration
    if detect_format(location.folder) == TORCH:
        return _iteration(location, load_dict(min(location.folder.glob("mp_rank_*")) / _TORCH_FILE))
    from .torch_dist import TorchDistCheckpoint

    return _iteration(location, TorchDistCheckpoint(location.folder).common)


def _read_torch_dist(
    chunks: Sequence[torch.nn.Module], folder: Path, exact: bool
) -> tuple[_State, list[_State]]:
    """Return what is not sharded, and the state dicts of the chunks."""
    from .torch_dist import TorchDistCheckpoint, requested_tensors

    with _on_all_ranks_or_none(f"cannot load {folder}"):
        checkpoint = TorchDistCheckpoint(folder)
        request = checkpoint.request(chunks)
        requested = requested_tensors(request)
        checkpoint.check_files(requested)
        differing, paddings = checkpoint.compare(requested, exact)
    # Every stored tensor must be requested by some rank. Each rank sends one byte for each stored name: the
    # names themselves would be megabytes from each to each.
    names = checkpoint.names()
    flags = bytes(name in requested for name in names)
    all_flags, all_differing, all_paddings = zip(*_gather((flags, differing, paddings)), strict=True)
    if is_rank_0():
        for padding in sorted(set().union(*all_paddings)):
            # It might be another vocabulary, which shows nowhere else.
            _log.warning("%s has %d rows in the checkpoint and %d in the model", *padding)
    with _on_all_ranks_or_none(f"cannot load {folder}"):
        by_any_rank = {name for name, *by_rank in zip(names, *all_flags, strict=True) if any(by_rank)}
        unexpected = _without_mtp(set(names) - by_any_rank, by_any_rank)
        _refuse({("unexpected in the checkpoint", name) for name in unexpected}.union(*all_differing))
    with _on_all_ranks_or_none(f"cannot read {folder}"):
        states = checkpoint.read(request)
    return checkpoint.common, states


def _without_mtp(stored: set[str], requested: Iterable[str]) -> set[str]:
    """Return the names without those of multi-token prediction, unless the model has such layers.

    A model that only scores is built without them, and its policy's checkpoint has them.
    """
    mtp = {name for name in stored if name.startswith(_MTP)}
    if not mtp or any(name.startswith(_MTP) for name in requested):
        return stored
    if is_rank_0():
        message = "%d tensors of multi-token prediction (%s*) are not loaded: this model only scores"
        _log.info(message, len(mtp), _MTP)
    return stored - mtp


def _read_torch(chunks: Sequence[torch.nn.Module], folder: Path) -> tuple[_State, list[_State]]:
    """Return what was saved in the legacy format for this rank, and of it the state dicts of the chunks."""
    from megatron.core import parallel_state as mpu

    tp = mpu.get_tensor_model_parallel_world_size()
    pp = mpu.get_pipeline_model_parallel_world_size()
    ep = mpu.get_expert_model_parallel_world_size()

    def name(tp_rank: int, pp_rank: int, ep_rank: int) -> str:
        """Return the folder of a rank; it names only those groups that have several ranks."""
        return f"mp_rank_{tp_rank:02d}" + f"_{pp_rank:03d}" * (pp > 1) + f"_{ep_rank:03d}" * (ep > 1)

    expected = {name(*place) for place in itertools.product(range(tp), range(pp), range(ep))}
    stored = {entry.name for entry in folder.glob("mp_rank_*")}
    if stored != expected:
        raise CheckpointError(
            f"{folder} has {first(sorted(stored))}; this model (TP {tp}, PP {pp}, EP {ep}) needs "
            f"{first(sorted(expected))}. A checkpoint in the torch format loads only whole, and with the "
            "parallel sizes that it was saved with; save it as torch_dist to change them"
        )
    own = name(
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_expert_model_parallel_rank(),
    )
    content = load_dict(folder / own / _TORCH_FILE)
    states = _states_of_chunks(content, len(chunks))
    for chunk, state in zip(chunks, states, strict=True):
        for key in state.keys() - _without_mtp(set(state), chunk.state_dict()):
            del state[key]
    return content, states


def _states_of_chunks(content: _State, chunks: int) -> list[_State]:
    """Return the state dicts in a file of the legacy format."""
    version = content.get("checkpoint_version", 0)
    if version < 2.0:
        raise CheckpointError(
            f"checkpoint_version {version} orders query, key and value in another way; "
            "save it again with a Megatron-LM that writes version 3.0"
        )
    keys = ["model"] if chunks == 1 else [f"model{index}" for index in range(chunks)]
    stored = sorted(key for key in content if key.startswith("model"))
    if stored != sorted(keys):
        raise CheckpointError(
            f"the checkpoint was saved with {len(stored)} model chunks per rank ({', '.join(stored)}), "
            f"this model has {chunks} (virtual pipeline size)"
        )
    return [content[key] for key in keys]


def _iteration(location: Location, content: dict[str, Any]) -> int:
    stored = content.get("iteration", content.get("total_iters"))
    if location.folder.name == "release" or stored is None:
        return location.iteration or 0
    try:
        return int(stored)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{location.folder}: its iteration is {str(stored)[:40]}, expected a number"
        ) from error


def _bare_chunks(model: torch.nn.Module | Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    chunks = [unwrap(chunk) for chunk in as_chunks(model)]
    if not chunks:
        raise InvalidInputError("model has no chunks; expected what Megatron's get_model returns")
    for index, chunk in enumerate(chunks):
        meta = next((name for name, tensor in chunk.named_parameters() if tensor.is_meta), None)
        if meta is not None:
            raise InvalidInputError(
                f"chunk {index} is on the meta device ({meta}), with no memory to load into; "
                "materialize it first, as build_inference_model does"
            )
    return chunks


def _compare(chunk: torch.nn.Module, state: _State, exact: bool) -> Differences:
    """Return what ``load_state_dict`` would complain about only after it has loaded all other weights."""
    stored, model = _weights(state), _weights(chunk.state_dict(keep_vars=True))
    # Tied weights have several names, and one is enough.
    loaded = {id(model[name]) for name in model.keys() & stored.keys()}
    model = {name: weight for name, weight in model.items() if name in stored or id(weight) not in loaded}
    return differences(stored, model, "the checkpoint", dtypes=exact)


def _refuse(differing: Differences) -> None:
    if text := describe(differing):
        raise CheckpointError(f"the checkpoint is of another model; {text}")


def _weights(state: _State) -> dict[str, torch.Tensor]:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: tensor for name, tensor in tensors.items() if EXTRA_STATE not in name}


@contextmanager
def _on_all_ranks_or_none(action: str, outcome: str = _AS_BEFORE) -> Iterator[None]:
    """Raise ``CheckpointError`` on every rank if the body fails on any, naming those ranks."""
    error: Exception | None = None
    reason = None
    try:
        yield
    except Exception as raised:
        error = raised
        reason = str(error) if isinstance(error, CheckpointError) else one_line(error)
    reasons = _gather(reason)
    if any(reasons):
        raise CheckpointError(f"{action}: {_summary(reasons)}. {outcome}") from error


def _summary(reasons: Sequence[str | None]) -> str:
    """Join the reasons of all ranks, each once, with the ranks that have it."""
    parts = []
    for reason in dict.fromkeys(filter(None, reasons)):
        ranks = [str(rank) for rank, other in enumerate(reasons) if other == reason]
        listed = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
        parts.append(f"{'every rank' if len(ranks) == len(reasons) else listed}: {reason}")
    return "; ".join(parts)


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks; without a process group this rank's alone."""
    if not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
