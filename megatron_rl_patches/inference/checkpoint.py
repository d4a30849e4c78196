"""Weights for a model that only scores: from Megatron's checkpoints, weights only, all or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.distributed.checkpoint.api import CheckpointException

from ..errors import CheckpointError, InvalidInputError
from . import _legacy
from ._checkpoint_layout import FORMATS, TORCH, Location, detect_format, in_short, locate
from ._mismatch import Mismatch

_AS_BEFORE = "Nothing was loaded; the weights are as before."
_Model = torch.nn.Module | Sequence[torch.nn.Module]
_State = dict[str, Any]


def load_inference_checkpoint(
    model: _Model,
    path: str | os.PathLike[str],
    *,
    format: str = "auto",
    ckpt_step: int | None = None,
    exact: bool = False,
) -> int:
    """Load the weights of a Megatron checkpoint, and nothing else of it, into a model.

    Works on megatron-core alone and changes no global state: arguments, random generators, the number of
    microbatches and the rerun state machine stay as they are, which Megatron-LM's ``load_checkpoint`` does
    not promise. That loader also refuses to change the TP or PP size unless the *optimizer* was saved in a
    fully reshardable format ("not supported for DistributedOptimizer with sharding type ...",
    ``megatron/training/checkpointing.py``), even where no optimizer is to be loaded. Here the optimizer is
    never asked for: its shards are neither read nor checked, and may be absent.

    A collective: every rank of the default process group calls it. The ranks agree after each step, so
    either all of them load or all of them raise. Keys, shapes and file sizes are checked before any tensor
    is read, and all tensors are read before the first weight is written. What stays unnoticed are bytes that
    changed within a stored tensor: torch does not verify its checksums.

    Weights are written in place: storages, dtypes, ``requires_grad`` and train/eval mode of the model stay.
    Another dtype in the checkpoint is converted. Vocabulary padding may differ, by less than 2,048 rows, with
    a warning: rows beyond those stored become zero, which :func:`forward_log_probs` leaves out if it is told
    ``vocab_size``. ``_extra_state`` entries (scales of Transformer Engine) are loaded where both sides have
    them.

    Memory: no device memory beyond the model's own. From ``torch_dist``, every rank holds its own weights
    once in host memory while loading, plus those that Megatron splits for storage (gated MLP) a second time
    while they are joined. From ``torch``, tensors are mapped from the file and copied one by one.

    Args:
        model: model chunks of this rank as Megatron's ``get_model`` returns them, or one of them; in
            ``Float16Module`` or DDP, or bare.
        path: a checkpoint root with ``latest_checkpointed_iteration.txt``, an ``iter_XXXXXXX`` or
            ``release`` folder, or any folder written by ``megatron.core.dist_checkpointing``.
        format: ``"torch_dist"`` (any TP, PP, VPP and EP sizes), ``"torch"`` (the sizes of the checkpoint),
            or ``"auto"``, to take what is there.
        ckpt_step: the iteration to take from a root instead of the latest, as ``--ckpt-step``.
        exact: refuse other dtypes and another padding of the vocabulary too.

    Returns:
        The iteration at which the checkpoint was saved; 0 for a release, as Megatron has it, and where the
        checkpoint does not tell.

    Raises:
        InvalidInputError: no chunks, a chunk on the meta device, or an unknown format.
        CheckpointError: the checkpoint is missing, partial, corrupt, of another model or in another format
            than supported; raised on every rank, and names the ranks that it went wrong on. The weights
            are bit for bit as before on all of them.
    """
    if format not in ("auto", *FORMATS):
        raise InvalidInputError(f"format={format!r}: expected 'auto', {' or '.join(map(repr, FORMATS))}")
    chunks = _bare_chunks(model)
    with _together(f"cannot load {os.fspath(path)}"):
        location = locate(path, ckpt_step)
        found = detect_format(location.folder)
        if format not in ("auto", found):
            raise CheckpointError(f"{location.folder} is in the format {found}, not {format}")
    _check_same_checkpoint(location)

    read = _read_legacy if found == TORCH else _read_torch_dist
    iteration, states = read(chunks, location, exact)
    with _together(f"cannot load {location.folder}"):
        for chunk, state in zip(chunks, states, strict=True):
            _compare(chunk, state, exact).check()
    # Nothing is left that could refuse but an extra state, or a device that fails.
    with _together(f"writing the weights of {location.folder}", "Weights may be partly new; build it again."):
        for chunk, state in zip(chunks, states, strict=True):
            chunk.load_state_dict(state, strict=False)
    return iteration


def read_iteration(path: str | os.PathLike[str], ckpt_step: int | None = None) -> int:
    """The iteration of the checkpoint that :func:`load_inference_checkpoint` would load; reads no weights.

    Not a collective, and needs no process group.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    location = locate(path, ckpt_step)
    if location.iteration is not None:
        return location.iteration
    if detect_format(location.folder) == TORCH:
        return _legacy.iteration(_legacy.open_any_file(location.folder)) or 0
    from ._torch_dist import TorchDistCheckpoint

    return TorchDistCheckpoint.open(location.folder).iteration or 0


def _read_torch_dist(
    chunks: Sequence[torch.nn.Module], location: Location, exact: bool
) -> tuple[int, list[_State]]:
    from ._torch_dist import TorchDistCheckpoint, wanted

    with _together(f"cannot load {location.folder}"):
        checkpoint = TorchDistCheckpoint.open(location.folder)
        request = checkpoint.request(chunks)
        own = wanted(request)
        checkpoint.check_files(own)
    # No rank alone knows whether a tensor of the checkpoint has a place in the model.
    everywhere = {name: entry for of_rank in _gather(own) for name, entry in of_rank.items()}
    with _together(f"cannot load {location.folder}"):
        checkpoint.compare(everywhere, exact).check()
    with _together(f"cannot read {location.folder}"):
        states = checkpoint.read(request)
    return _iteration(location, checkpoint.iteration), states


def _read_legacy(
    chunks: Sequence[torch.nn.Module], location: Location, exact: bool
) -> tuple[int, list[_State]]:
    with _together(f"cannot load {location.folder}"):
        content = _legacy.open_own_file(location.folder)
        states = _legacy.model_states(content, chunks)
    return _iteration(location, _legacy.iteration(content)), states


def _iteration(location: Location, stored: int | None) -> int:
    if location.folder.name == "release" or stored is None:
        return location.iteration or 0
    return stored


def _bare_chunks(model: _Model) -> list[torch.nn.Module]:
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    if not chunks:
        raise InvalidInputError("model has no chunks; expected what Megatron's get_model returns")
    chunks = [_unwrap(chunk) for chunk in chunks]
    for index, chunk in enumerate(chunks):
        meta = next((name for name, tensor in chunk.named_parameters() if tensor.is_meta), None)
        if meta is not None:
            raise InvalidInputError(
                f"chunk {index} is on the meta device ({meta}), with no memory to load into; "
                "materialise it first, as build_inference_model does"
            )
    return chunks


def _unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """By the kind of wrapper, as Megatron does: a model's own submodule may be called ``module`` too."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    while isinstance(chunk, (DistributedDataParallel, Float16Module)):
        chunk = chunk.module
    return chunk


def _compare(chunk: torch.nn.Module, state: _State, exact: bool) -> Mismatch:
    """What ``load_state_dict`` would complain about, after it has loaded the rest."""
    own = {name: tensor for name, tensor in chunk.state_dict(keep_vars=True).items() if _is_weight(name)}
    given = {name: tensor for name, tensor in state.items() if _is_weight(name)}
    # Tied weights have several names, and one is enough.
    reached = {id(own[name]) for name in own.keys() & given.keys()}
    return Mismatch(
        missing=[name for name, tensor in own.items() if id(tensor) not in reached],
        unexpected=[name for name in given if name not in own],
        shapes={
            name: (tuple(given[name].shape), tuple(own[name].shape))
            for name in own
            if name in given and given[name].shape != own[name].shape
        },
        dtypes={
            name: (given[name].dtype, own[name].dtype)
            for name in own
            if exact and name in given and given[name].dtype != own[name].dtype
        },
    )


def _is_weight(name: str) -> bool:
    return "_extra_state" not in name


def _check_same_checkpoint(location: Location) -> None:
    """Refuse a mix: while a run is saving, ranks may read different iterations from the tracker."""
    names = _gather(location.folder.name)
    if len(set(names)) > 1:
        each = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
        raise CheckpointError(f"ranks see different checkpoints ({each}). {_AS_BEFORE}")


@contextmanager
def _together(doing: str, outcome: str = _AS_BEFORE) -> Iterator[None]:
    """The body succeeds on all ranks, or all raise a ``CheckpointError`` that names those that failed."""
    error: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as raised:
        error = raised
    reports = {rank: report for rank, report in enumerate(_gather(error and _report(error))) if report}
    if reports:
        raise CheckpointError(f"{doing}: {_summary(reports)}. {outcome}") from error


class _Report(NamedTuple):
    """What a rank has to say about an exception."""

    text: str
    at_fault: bool


def _report(error: BaseException) -> _Report:
    if isinstance(error, CheckpointException):
        # Where torch reads collectively it raises this on every rank; where it does not, it says rank 0.
        own = error.failures.get(torch.distributed.get_rank())
        return _Report(in_short(own[0] if own else error), at_fault=own is not None)
    return _Report(str(error) if isinstance(error, CheckpointError) else in_short(error), at_fault=True)


def _summary(reports: dict[int, _Report]) -> str:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    at_fault = {rank: report for rank, report in reports.items() if report.at_fault} or reports
    ranks_by_text: dict[str, list[int]] = {}
    for rank, report in at_fault.items():
        ranks_by_text.setdefault(report.text, []).append(rank)
    return "; ".join(f"{_named(ranks, world)}: {text}" for text, ranks in ranks_by_text.items())


def _named(ranks: list[int], world: int) -> str:
    if len(ranks) == world:
        return "every rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _gather(value: Any) -> list[Any]:
    if not torch.distributed.is_initialized():
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values
