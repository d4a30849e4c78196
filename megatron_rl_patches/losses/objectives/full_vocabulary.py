"""The exact divergence of a student from its teachers, over the whole vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor

from ...errors import InvalidInputError
from ..logits.arguments import VocabParallelOptions, check_integer
from ..logits.deferred import checked_source
from ..logits.divergences import DivergenceName, divergence_named
from ..logits.full_divergence import DivergenceOptions, Logits, divergence_of
from ..logits.rows import SelectedRows
from .teachers import weighted


def full_vocabulary_divergence(
    student: Tensor,
    teacher: Tensor | Sequence[Tensor],
    *,
    divergence: DivergenceName = "reverse_kl",
    beta: float = 0.5,
    teacher_weights: Sequence[float] | None = None,
    old: Tensor | None = None,
    rows: Tensor | slice | None = None,
    temperature: float = 1.0,
    num_ids: int | None = None,
    tp_group: dist.ProcessGroup | None = None,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
) -> Tensor:
    """Return the divergence of the student's next-token distributions from the teacher's, per row, in nats.

    The divergences are those of :mod:`..logits.divergences`, summed over all ids instead of k ids and a tail;
    all but ``"generalized_kl"``.

    Args:
        student: logits or :class:`.DeferredLogits` ``[T, V / tp]``. Only these have a gradient.
        teacher: logits or deferred logits ``[n, V / tp]``, one row for each selected row of the student. The
            hidden sizes may differ. Several teachers are a mixture: their probabilities are averaged.
        divergence: its name.
        beta: weight of the teacher in the mixture of those that have one.
        teacher_weights: weights of the mixture, not negative; they are divided by their sum. ``None`` weights
            all teachers alike.
        old: logits or deferred logits ``[n, V / tp]`` of the policy that sampled, for
            ``"importance_weighted_reverse_kl"``.
        rows: which ``n`` of the ``T`` rows of the student; see :func:`.vocab_parallel_log_probs`, as for
            ``tp_group``, ``inplace_backward`` and ``block_bytes``.
        temperature: the logits of all are divided by it.
        num_ids: size of the vocabulary without padding. The distributions are those over the first so many
            ids. With it, and without tensor parallelism, the logits may be padded to different widths; with
            tensor parallelism see :meth:`.OutputHead.resharded`.

    Returns:
        ``[n]`` in float32 (float64 for float64 logits of the student), the same bits on all ranks of
        ``tp_group``. A log-probability of -inf counts as -10,000. NaN and +inf make NaN of their own row. A
        row whose value gets a gradient of zero has a gradient of zero, whatever its logits are.

    Raises:
        InvalidInputError: arguments do not fit; on every rank alike, before any collective. There is one
            all-gather of up to six numbers per row, and a second one of two or three numbers for divergences
            from a mixture of student and teacher, for a mixture of teachers, and where only some of the
            distributions rule an id out.
    """
    teachers = [teacher] if isinstance(teacher, Tensor) else list(teacher)
    measure = divergence_named(divergence, beta)
    if not measure.counts_tail:
        raise InvalidInputError(f"divergence is {divergence!r}, which is over k ids: use 'reverse_kl'")
    if not teachers:
        raise InvalidInputError("there are no teachers; pass at least one")
    if measure.needs_old and old is None:
        raise InvalidInputError(f"divergence is {divergence!r}: old is needed, and missing")
    counted = weighted([(f"teacher {n}", logits) for n, logits in enumerate(teachers)], teacher_weights)
    options = VocabParallelOptions(
        tp_group=tp_group,
        temperature=temperature,
        inplace_backward=inplace_backward,
        block_bytes=block_bytes,
    )
    source, student_options = checked_source(student, rows, None, options)
    named = [teacher for _, teacher in counted]
    if measure.needs_old and old is not None:
        named.append(("old", old))
    others = []
    for name, logits in named:
        of_other, other_options = checked_source(
            logits.detach(), None, None, replace(options, inplace_backward=False)
        )
        fits = of_other.width == source.width or (num_ids is not None and options.tp_size == 1)
        if of_other.n != source.n or of_other.device != source.device or not fits:
            raise InvalidInputError(
                f"{name} is {list(logits.shape)} on {logits.device}, expected {source.n} rows of "
                f"{source.width} logits on {source.device}, as the student has; logits that are padded to "
                "another width need num_ids, and under tensor parallelism OutputHead.resharded, too"
            )
        if inplace_backward and isinstance(of_other, SelectedRows) and _share_memory(logits, student):
            raise InvalidInputError(
                f"{name} is in the memory of the student's logits, which inplace_backward overwrites before "
                "it is read: pass a copy, or inplace_backward=False"
            )
        others.append(Logits(of_other, other_options.temperature))
    most = min(source.width, *(other.source.width for other in others)) * options.tp_size
    if num_ids is not None:
        expected = f"from 1 to {most}, which all logits have"
        num_ids = check_integer("num_ids", num_ids, 1, expected, highest=most)
    return divergence_of(
        Logits(source.sharing(1 + len(others)), student_options.temperature),
        others,
        DivergenceOptions(
            measure,
            tuple(math.log(weight) for weight, _ in counted),
            source.width * options.tp_size if num_ids is None else num_ids,
            tp_group,
        ),
    )


def _share_memory(a: Tensor, b: Tensor) -> bool:
    # Every tensor without elements is at address 0.
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
