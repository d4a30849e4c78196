"""Log-probabilities and entropy of target tokens from logits that are split over the vocabulary.

For logits ``x`` of a row and a temperature ``T``::

    log_prob = log_softmax(x / T)[target]        d log_prob / dx = (onehot(target) - p) / T
    entropy  = -sum(p * log p)                   d entropy / dx  = -p * (log p + entropy) / T

Beyond the caller's logits nothing of their size is allocated but the gradient, and with ``inplace_backward``
not even that: forward keeps a few numbers per row, backward computes the softmax again, a block of rows at a
time. Tensor parallel ranks exchange these few numbers once in forward and nothing in backward.

Frameworks keep one to three softmaxes and use three to six collectives: slime's
``_VocabParallelLogProbEntropy``, verl's ``vocab_parallel_entropy``, Megatron's
``vocab_parallel_cross_entropy`` (which overwrites its input).
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from .arguments import checked_source, valid_targets
from .log_probs_autograd import LogProbsAndEntropy, Targets
from .options import VocabParallelOptions
from .slices import Rows


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Rows = None,
    temperature: float = 1.0,
    keep_mask: Tensor | None = None,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
    fused: bool | str = "auto",
    ignore_index: int = -100,
) -> Tensor:
    """Return the log-probability of a target token in each selected row.

    Args:
        logits: ``[T, V / tp]`` in float32, bfloat16, float16 or float64: on rank ``r`` of the group the
            columns from ``r * V / tp`` on of the whole vocabulary. Forward does not change them.
        targets: token ids ``[n]`` in the whole vocabulary, of the selected rows.
        tp_group: ranks that hold the other columns; ``None``: there are none. All ranks call with the same
            arguments but for their columns, also when there are no rows.
        rows: which ``n`` of the ``T`` rows: a slice, several of them in order, or row numbers (int64), each
            at most once; ``None``: all of them. The others are not read, and their gradient is zero. Slices
            take less time than numbers, but for long runs of numbers on the CPU.
        temperature: logits are divided by it, as they were when the tokens were sampled.
        keep_mask: bool ``[n, V / tp]``, the columns that sampling chose from (top-p, top-k). The others have
            probability zero, except the target, which was sampled. The entropy does not see the mask.
        inplace_backward: write the gradient into the storage of the logits. They must fill that storage: a
            reshaped view of a whole tensor does, a part of one does not, and neither may it be a leaf that
            requires grad. Other operations that saved the logits for their backward raise, and so do these
            functions if they are given the logits after backward; any other read sees the gradient.
        block_bytes: size of the scratch memory for a block of rows. Default: on a CPU 2 MiB per thread but
            at most 1% of the logits, on a GPU 64 MiB or 1%, whichever is more.
        fused: ``True``: the functions that work on a block are compiled, and what the compiler raises is
            raised; ``False``: they run as plain operators; ``"auto"``: they are compiled for large logits
            where there is a compiler, and run as plain operators if it fails. Nothing is compiled while torch
            forbids it, or while a dispatch mode such as ``FlopCounterMode`` is on.
        ignore_index: a row with this target has log-probability and entropy 0 and no gradient.

    Returns:
        ``[n]`` in float32 (float64 for float64 logits), bitwise equal on all ranks of ``tp_group``. The
        gradient has the dtype of the logits, and cannot be differentiated again.

        NaN and +inf make NaN of the values and the gradient of their own row, and of no other. A row whose
        values get a gradient of zero, as one that a loss mask leaves out, has a gradient of zero whatever
        its logits are.

    Raises:
        InvalidInputError: arguments do not fit; raised on every rank alike and before the one collective
            (an all-gather of a few numbers per row over ``tp_group``). Each rank decides whether its own
            logits can be overwritten, and its refusal travels with the collective: on a CPU all ranks raise
            after it, on a GPU that rank does, and the other ranks' kernels stop with a device-side assertion.
            So do kernels on a GPU where *values* of ``targets`` or ``rows`` do not fit. In backward: the
            logits were overwritten since forward.
    """
    options = VocabParallelOptions(tp_group, temperature, inplace_backward, block_bytes, fused, ignore_index)
    return log_probs_and_entropy(logits, targets, rows, keep_mask, options)[0]


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Rows = None,
    temperature: float = 1.0,
    keep_mask: Tensor | None = None,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
    fused: bool | str = "auto",
    ignore_index: int = -100,
    entropy_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of a target token, and the entropy in nats, of each selected row.

    Both come from the same pass over the logits and the same collective. The arguments are those of
    :func:`vocab_parallel_log_probs`; a keep-mask costs a second pass.

    Args:
        entropy_grad: ``False``: the entropy does not require grad (a metric, or a coefficient of zero), and
            backward costs what it does without.

    Returns:
        Log-probabilities ``[n]`` and entropies ``[n]``.
    """
    options = VocabParallelOptions(
        tp_group, temperature, inplace_backward, block_bytes, fused, ignore_index, True, entropy_grad
    )
    log_probs, entropies = log_probs_and_entropy(logits, targets, rows, keep_mask, options)
    assert entropies is not None
    return log_probs, entropies


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    rows: Rows,
    keep_mask: Tensor | None,
    options: VocabParallelOptions,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities and entropies, or ``None``, of selected rows; see the functions above."""
    source = checked_source(logits, rows, options, keep_mask)
    scored = Targets.from_ids(valid_targets(targets, source), keep_mask, source)
    log_probs, entropies = LogProbsAndEntropy(source.claim()).apply(source, **scored._asdict())
    if entropies is not None and not options.entropy_grad:
        entropies = entropies.detach()
    return log_probs, entropies
