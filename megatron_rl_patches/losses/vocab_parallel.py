"""Log-probabilities and entropy of target tokens from logits that are split over the vocabulary.

For logits ``x`` of a row and a temperature ``T``::

    log_prob = log_softmax(x / T)[target]        d log_prob / dx = (onehot(target) - p) / T
    entropy  = -sum(p * log p)                   d entropy / dx  = -p * (log p + entropy) / T

Beyond the caller's logits nothing of their size is allocated but the gradient, and with ``inplace_backward``
not even that: forward keeps a few numbers per row, backward computes the softmax again, a block of rows at a
time. Tensor parallel ranks exchange these few numbers once in forward and nothing in backward.

Hosts keep one to three softmaxes, and use three to six collectives: slime's ``_VocabParallelLogProbEntropy``,
verl's ``vocab_parallel_entropy``, Megatron's ``vocab_parallel_cross_entropy`` (which overwrites its input).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ._function import LogProbsAndEntropy, Options
from ._inputs import check_fused, checked_shard, checked_targets, position_in
from ._ownership import lend, refuse_overwritten
from ._shard import Shard


def vocab_parallel_log_probs(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Tensor | slice | None = None,
    temperature: float = 1.0,
    keep_mask: Tensor | None = None,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
    fused: bool | str = "auto",
    ignore_index: int = -100,
) -> Tensor:
    """Log-probability of a target token in each selected row.

    Args:
        logits: ``[T, V / tp]`` in float32, bfloat16, float16 or float64: on rank ``r`` of the group the
            columns from ``r * V / tp`` on of the whole vocabulary. Forward does not change them.
        targets: token ids ``[n]`` in the whole vocabulary, of the selected rows.
        tp_group: the ranks that hold the other columns; ``None``: there are none. All of them call with the
            same targets and rows, also when these are empty.
        rows: which ``n`` of the ``T`` rows: a slice, or row numbers (int64), each at most once; ``None``: all
            of them. The others are not read, and their gradient is zero.
        temperature: of the rollout; logits are divided by it.
        keep_mask: bool ``[n, V / tp]``, the columns that sampling chose from (top-p, top-k). The others have
            probability zero, except the target, which was sampled. The entropy does not see the mask.
        inplace_backward: write the gradient into the storage of the logits, which must be theirs alone: a
            reshaped view of a whole tensor, but neither a part of one nor a leaf that requires grad. Whatever
            else saved the logits for its backward, or gives them to these functions later, raises; any other
            read after backward sees the gradient.
        block_bytes: scratch memory of plain operators. Default: on a CPU 2 MiB per thread but at most 1% of
            the logits, on a GPU 64 MiB or 1%, whichever is more.
        fused: ``True``: kernels of ``torch.compile``, or an error; ``False``: plain operators on blocks of
            rows; ``"auto"``: kernels for large logits, where a compiler is at hand.
        ignore_index: a row with this target has log-probability and entropy 0 and no gradient.

    Returns:
        ``[n]`` in float32 (float64 for float64 logits), bitwise equal on all ranks of ``tp_group``. The
        gradient has the dtype of the logits, and cannot be differentiated again.

        NaN and +inf spoil their own row, values and gradient, and no other. A row into which nothing flows in
        backward, as where a loss mask leaves it out, has a gradient of zero whatever its logits are.

    Raises:
        InvalidInputError: arguments that do not fit, on every rank alike and before the one collective (an
            all-gather of a few numbers per row over ``tp_group``). On a GPU the *values* of ``targets`` and
            ``rows`` are checked by the device, as those of an index are. In backward: the logits were
            overwritten since forward.
    """
    shard = checked_shard(logits, rows, keep_mask, temperature, block_bytes)
    options = (tp_group, inplace_backward, fused, ignore_index)
    return _apply(logits, targets, shard, *options, entropy=False, entropy_grad=False)[0]


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    tp_group: dist.ProcessGroup | None = None,
    rows: Tensor | slice | None = None,
    temperature: float = 1.0,
    keep_mask: Tensor | None = None,
    inplace_backward: bool = False,
    block_bytes: int | None = None,
    fused: bool | str = "auto",
    ignore_index: int = -100,
    entropy_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability of a target token, and entropy in nats, of each selected row.

    In the same passes over the logits and the same collective as :func:`vocab_parallel_log_probs`, whose
    arguments these are; a keep-mask costs a second ``exp``.

    Args:
        entropy_grad: ``False``: the entropy does not require grad (a metric, or a coefficient of zero), and
            backward costs what it does without.

    Returns:
        Two of ``[n]``, log-probabilities and entropies.
    """
    shard = checked_shard(logits, rows, keep_mask, temperature, block_bytes)
    options = (tp_group, inplace_backward, fused, ignore_index)
    log_probs, entropies = _apply(logits, targets, shard, *options, entropy=True, entropy_grad=entropy_grad)
    assert entropies is not None
    return log_probs, entropies


def _apply(
    logits: Tensor,
    targets: Tensor,
    shard: Shard,
    tp_group: dist.ProcessGroup | None,
    inplace_backward: bool,
    fused: bool | str,
    ignore_index: int,
    entropy: bool,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    tp_rank, tp_size = position_in(tp_group)
    width = logits.shape[1]
    targets = checked_targets(targets, shard, width * tp_size, ignore_index)
    check_fused(fused, shard, inplace_backward)
    refuse_overwritten(logits)
    needs_grad = torch.is_grad_enabled() and logits.requires_grad
    loan = lend(logits) if inplace_backward and needs_grad else None

    counts = targets != ignore_index
    column = targets - tp_rank * width
    column = torch.where(counts & (column >= 0) & (column < width), column, -1)
    options = Options(tp_group, fused, entropy, entropy_grad, loan)
    return LogProbsAndEntropy.apply(  # type: ignore[no-untyped-call]
        logits, shard, column, counts, options
    )
