"""A step of the optimizer whose gradient norm is not finite is skipped, and reported.

megatron-core checks gradients before they are reduced (``check_for_nan_in_grad``), and under a loss scale.
Without either, it writes a NaN into every weight and returns success. This module checks their norm instead,
which ``step()`` computes and reduces for clipping and metrics, so that all ranks decide alike without another
collective. If nothing is clipped, each group of parameters with a norm of its own adds one collective. An
optimizer that is not chained and does not clip computes no norm, and its steps are not checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ..common.chunks import Model
from ..common.messages import Message, is_rank_0
from ..common.scopes import replaced
from ..common.text import one_line
from ..errors import NonFiniteGradients

_SKIPPED = Message(
    "step {step} skipped: the norm of its gradients is {norm} ({in_a_row} skipped in a row)",
    "Weights, optimizer state and schedule are as before the step.",
    "Look at the parameters that the ranks name, and at the data of this step.",
)
_BAD_GRADIENTS = Message(
    "on this rank, gradients of these parameters are not finite: {names}",
    "This step is skipped.",
    "Look at the losses and the data of this rank.",
)
#: After so many skipped steps in a row training ends.
LIMIT = 10
#: So many parameters with bad gradients are named on each rank.
_NAMED = 5
#: Attribute of an optimizer that has its :class:`History`.
_HISTORY = "_finite_step_history"


@dataclass
class History:
    """The steps of one optimizer."""

    taken: int = 0
    skipped: int = 0
    in_row: int = 0  # so many of the last steps were skipped because of their norm
    scheduled: tuple[int, int] = (0, 0)  # taken and skipped, when the schedule was last asked to advance
    chunks: Model = field(default=(), repr=False)  # whose parameters are named in messages


#: All steps of this process.
_total = History()


def step(optimizer: Any, original: Callable[[], Any] | None = None, limit: int = LIMIT) -> Any:
    """Step a Megatron optimizer, unless the norm of its gradients is not finite.

    A skipped step changes no weight, no main parameter and no moment, starts no gather of parameters, and
    returns ``(False, norm, num_zeros)``; gradients stay for the caller's ``zero_grad``. Rank 0 logs one line,
    and each rank one with the first parameters whose gradients are not finite there.

    Args:
        optimizer: with ``step_with_ready_grads``, and ``get_grad_norm`` or ``clip_grad_norm``, which its
            ``step`` calls.
        original: the optimizer's ``step``; by default that of its class.
        limit: after so many skips in a row it raises; 0: never.

    Raises:
        NonFiniteGradients: the limit is reached. The step has been skipped.
    """
    with _noted_norms(optimizer) as norms:
        result = (original or optimizer.step)()
    _count(optimizer, bool(result[0]), _first_bad(norms), limit)
    return result


def _count(optimizer: Any, is_taken: bool, bad: Any, limit: int) -> None:
    """Count a step, and report it if it has a bad norm."""
    history = history_of(optimizer)
    for each in (history, _total):
        each.taken += is_taken
        each.skipped += not is_taken
    if bad is not None:
        history.in_row += 1
        _report(optimizer, history, bad)
        if 0 < limit <= history.in_row:
            raise NonFiniteGradients(
                f"{history.in_row} steps in a row were skipped, as their gradient norms were not finite, the "
                f"last {bad}. The weights are those before the first of them. The log of each rank "
                "names parameters whose gradients are not finite there. finite_step_limit sets how many "
                "skips in a row are allowed (0: any number)"
            )
    elif is_taken:
        history.in_row = 0


@contextmanager
def _noted_norms(optimizer: Any) -> Iterator[list[Any]]:
    """Note the norms that a step computes, and let it change nothing if one of them is not finite."""
    norms: list[Any] = []
    get, clip, update = optimizer.get_grad_norm, optimizer.clip_grad_norm, optimizer.step_with_ready_grads

    def get_grad_norm() -> Any:
        norms.extend([*_norms_without_clipping(optimizer), get()])
        return norms[-1]

    def clip_grad_norm(*args: Any, **kwargs: Any) -> Any:
        norms.append(clip(*args, **kwargs))
        return norms[-1]

    def step_with_ready_grads() -> Any:
        norms.extend(getattr(optimizer, "grad_norms_by_group", {}).values())
        return _first_bad(norms) is None and update()

    functions = (get_grad_norm, clip_grad_norm, step_with_ready_grads)
    with replaced(optimizer, **{function.__name__: function for function in functions}):
        yield norms


def _first_bad(norms: list[Any]) -> Any:
    return next((norm for norm in norms if norm is not None and not math.isfinite(norm)), None)


def history_of(optimizer: Any) -> History:
    """Return what is known of the optimizer's steps."""
    history: History = vars(optimizer).setdefault(_HISTORY, History())
    return history


def summary() -> str:
    """Return how many steps of this process were skipped; empty if none was."""
    return f"{_total.skipped} of {_total.taken + _total.skipped} steps skipped" if _total.skipped else ""


@contextmanager
def skips_as_successes(optimizer: Any, limit: int = LIMIT) -> Iterator[None]:
    """Let ``optimizer.step`` return success for a step that was skipped, for callers that assert it.

    If the loss scaler skips the step, no norm exists, and NaN is returned for it. A caller that computes the
    norm itself takes no step if the norm is not finite. That counts as a skipped step, up to ``limit``, too.
    """
    take, get = optimizer.step, optimizer.get_grad_norm

    def call(*args: Any, **kwargs: Any) -> Any:
        with replaced(optimizer, get_grad_norm=get):
            updated, norm, num_zeros = take(*args, **kwargs)
        return True, math.nan if norm is None and not updated else norm, num_zeros

    def get_grad_norm() -> Any:
        if _first_bad([norm := get()]) is not None:
            _count(optimizer, False, norm, limit)
        return norm

    with replaced(optimizer, step=call, get_grad_norm=get_grad_norm):
        yield


@contextmanager
def schedule_waits(scheduler: Any, optimizer: Any) -> Iterator[None]:
    """Let ``scheduler.step`` do nothing if all steps of the optimizer since its last call were skipped."""
    history, advance = history_of(optimizer), scheduler.step

    def call(*args: Any, **kwargs: Any) -> Any:
        (taken, skipped), history.scheduled = history.scheduled, (history.taken, history.skipped)
        if history.taken == taken and history.skipped > skipped:
            return None
        return advance(*args, **kwargs)

    with replaced(scheduler, step=call):
        yield


def _norms_without_clipping(optimizer: Any) -> list[Any]:
    """Return the norms of parameters that have one of their own, if Megatron does not compute them.

    From 0.19 on the norm leaves out some parameters, such as those of MTP with detached heads. Megatron
    computes theirs for clipping alone. Which ranks clip follows from the configuration.
    """
    compute = getattr(optimizer, "_compute_grad_norms_by_group", None)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if compute is None or any(part.config.clip_grad > 0 for part in parts):
        return []
    with replaced(optimizer, grad_norms_by_group={}):
        return list(compute().values())


def _report(optimizer: Any, history: History, norm: Any) -> None:
    if is_rank_0():
        _SKIPPED.log(step=history.taken + history.skipped, norm=norm, in_a_row=history.in_row)
    try:
        chunks = history.chunks or getattr(optimizer, "model_chunks", ())
        names = ", ".join(islice(_names_of_bad_gradients(chunks), _NAMED))
    except Exception as error:  # other ranks go on, so this one has to
        names = f"unknown, as looking for them raised {one_line(error)}"
    if names:
        _BAD_GRADIENTS.log(names=names)


def _names_of_bad_gradients(chunks: Model) -> Iterator[str]:
    for number, chunk in enumerate(chunks):
        prefix = f"chunk {number}: " if len(chunks) > 1 else ""
        for name, parameter in chunk.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            gradient = getattr(gradient, "_local_tensor", gradient)  # of a DTensor, without a collective
            if gradient is not None and not gradient.isfinite().all():
                yield prefix + re.sub(r"^(module\.)+", "", name)  # without the names of wrappers
