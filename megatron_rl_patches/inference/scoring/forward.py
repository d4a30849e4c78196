"""What a model says of response tokens, through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...common.chunks import as_chunks, unwrap
from ...common.devices import each_on_device
from ...errors import InvalidInputError
from ...losses import (
    DeferredLogits,
    OutputHead,
    TopKDistribution,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_at,
    vocab_parallel_topk,
)
from ...losses.output_layer import is_column_parallel, logit_dtype_of
from ...losses.vocab.arguments import LogProbs, is_integer
from .microbatches import Forward, ScoreOptions, ScoringBatch, described, range_of_wrong_ids
from .plan import Model, Plan


class Scores(NamedTuple):
    """Scores of each sample, in the order of the microbatches: ``[response_length]``, float32, in nats."""

    log_probs: list[torch.Tensor]  #: The log-probability of each response token.
    entropy: list[torch.Tensor] | None  #: The entropy of the distribution that predicts it.

    @property
    def vocab_size(self) -> int | None:
        """Of how many token ids they are; also of ``log_probs``, so that losses over others refuse these."""
        return getattr(self.log_probs, "vocab_size", None)


def forward_log_probs(
    model: Model,
    microbatches: Sequence[Mapping[str, Any]],
    *,
    forward: Forward | None = None,
    with_entropy: bool = False,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    output_device: torch.device | str = "cpu",
    progress: bool = True,
) -> Scores | None:
    """Score response tokens with a model: forward only, without pipelining, with PP, or interleaved (VPP).

    All ranks of a tensor- and pipeline-parallel group of ``megatron.core.parallel_state`` call it with the
    same microbatches, each data-parallel replica with its own, as many as it has. Afterwards, also if it
    raises, modes and config of the model are as before. A model in DDP can be scored at any moment of a step:
    its parameters are gathered first, a collective over data-parallel ranks.

    Args:
        model: model chunk, or list of them, as Megatron's ``get_model`` returns, inference-only or in DDP.
        microbatches: mappings of

            * ``tokens``: int64 ``[b, s]``, padded on the right with any valid token; shapes may differ;
            * ``total_lengths``: ``b`` numbers of tokens, prompt and response together;
            * ``response_lengths``: ``b`` numbers of tokens to score at the end of each sample. Default: all
              but the first token, which nothing predicts.

            With ``forward``, ``tokens`` may be ``[1, t]`` with the samples packed one after the other.
        forward: runs a model chunk on one of ``microbatches`` and returns its output; on the last stage
            logits ``[b, s, vocabulary / tp]``, of whole sequences also under context parallelism. Default:
            ``chunk(tokens, positions, None)``, in which Megatron's own layer specs attend causally, so never
            to the padding; under context parallelism with this rank's two chunks of each sequence (zigzag).
        with_entropy: also return the entropy.
        temperature: logits are divided by it.
        vocab_size: ids from this number on are padding of the vocabulary and get probability zero. Default:
            all ids of the model count. Pass the same to the losses: they refuse scores of another vocabulary.
        output_device: where the results go.
        progress: show a progress bar on global rank 0.

    Returns:
        :class:`Scores` on the last pipeline stage, the same bits on all its tensor-parallel and
        context-parallel ranks; ``None`` on the other stages.

    Raises:
        InvalidInputError: on every rank that would wait, before the model runs, even if one rank alone passes
            what is wrong; for a wrong output of ``forward``, on all stages after the last microbatch.
    """

    def score(batch: ScoringBatch, logits_tv: torch.Tensor, how: Any) -> tuple[torch.Tensor, ...]:
        if with_entropy:
            return vocab_parallel_log_probs_and_entropy(logits_tv, batch.targets_n, **how)
        return (vocab_parallel_log_probs(logits_tv, batch.targets_n, **how),)

    own, name = {"with_entropy": bool(with_entropy)}, "forward_log_probs"
    options = ScoreOptions(name, forward, output_device, progress, vocab_size, temperature, own)
    plan = Plan(model, microbatches, options)
    if (scores := plan.run(score)) is None:
        return None
    # As a view, a value would take those of its microbatch along wherever it is sent.
    log_probs, *entropies = (list(map(torch.clone, values)) for values in zip(*scores, strict=True))
    return Scores(LogProbs(log_probs, plan.vocabulary), entropies[0] if with_entropy else None)


def forward_topk(
    model: Model,
    microbatches: Sequence[Mapping[str, Any]],
    k: int | None = None,
    *,
    at: Sequence[torch.Tensor | TopKDistribution] | None = None,
    forward: Forward | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    output_device: torch.device | str = "cpu",
    progress: bool = True,
) -> list[TopKDistribution] | None:
    """Return the distributions that predict response tokens: of their k most probable ids, or at given ids.

    For distillation on the student's own top-k::

        student_topk = forward_topk(student, microbatches, k=64)
        teacher_topk = forward_topk(teacher, microbatches, at=student_topk)

    Ranks, other arguments and the order of results are as in :func:`forward_log_probs`.

    Args:
        k: how many of the most probable tokens.
        at: in place of ``k``: token ids, int64 ``[response_length, K]``, of each sample, or distributions
            with such ids, in the order of the microbatches. Only the last stage reads it; others may
            pass ``None``, which is what this function returned to them.

    Returns:
        A :class:`~megatron_rl_patches.losses.TopKDistribution` per sample; ``None`` but on the last stage.

    Raises:
        InvalidInputError: also if ``at`` does not fit the samples; on all stages what the last one finds.
    """
    at_ids: Any = at
    if isinstance(at, Sequence):
        at_ids = [ids.indices if isinstance(ids, TopKDistribution) else ids for ids in at]

    def problem(plan: Plan) -> str | None:
        most = plan.vocabulary
        if k is None:
            return _problem_with_ids(at_ids, plan)
        is_valid = at is None and is_integer(k) and 1 <= k <= (k if most is None else most)
        return None if is_valid else f"k is {k!r}. Expected: 1 to {most}, the vocabulary, and no `at`."

    def score(batch: ScoringBatch, logits_tv: torch.Tensor, how: Any) -> tuple[torch.Tensor, ...]:
        if k is not None:
            return vocab_parallel_topk(logits_tv, k, **how).tensors
        ids_of_samples = at_ids[batch.first : batch.first + len(batch.samples)]
        ids_nk = torch.cat(batch.layout.local_parts(each_on_device(ids_of_samples, logits_tv.device)))
        return ids_nk, *vocab_parallel_log_probs_at(logits_tv, ids_nk, with_tail=True, **how)

    own, name = {"k": k, "ids of `at`": at_ids}, "forward_topk"
    options = ScoreOptions(name, forward, output_device, progress, vocab_size, temperature, own)
    plan = Plan(model, microbatches, options, problem)
    if (samples := plan.run(score)) is None:
        return None
    shared: dict[str, Any] = {"temperature": temperature, "vocab_size": plan.vocabulary}
    return [TopKDistribution(*map(torch.clone, one), **shared) for one in samples]


def forward_hidden_states(
    model: Model,
    microbatches: Sequence[Mapping[str, Any]],
    *,
    forward: Forward | None = None,
    output_device: torch.device | str = "cpu",
    progress: bool = True,
) -> list[torch.Tensor] | None:
    """Return what the output layer gets where it predicts response tokens, after the final norm.

    With that layer they are distributions over the whole vocabulary, in ``2 * h`` bytes per token::

        hidden = forward_hidden_states(teacher, microbatches)
        head = output_head(teacher)
        distributions = [FullDistribution.from_hidden(hidden_lh, head) for hidden_lh in hidden]

    Ranks, arguments and order of results are as in :func:`forward_log_probs`. No logits are materialized, and
    nothing of a microbatch stays on the device after it.

    Returns:
        Per sample ``[response_length, h]`` in the model's dtype; ``None`` on stages other than the last. In
        host memory they are pinned if the model is on a GPU. Those of a microbatch are views of one tensor:
        each keeps the memory of all, and takes it along when it is pickled, so clone what you send.

    Raises:
        InvalidInputError: also, after the last microbatch and on all stages, if the model's output layer is
            not Megatron's own, or its logits are not its product alone.
    """

    def score(batch: ScoringBatch, logits_tv: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
        return (hidden_states_of(logits_tv, batch.layout.response_rows),)

    options = ScoreOptions("forward_hidden_states", forward, output_device, progress)
    samples = Plan(model, microbatches, options).run(score)
    return None if samples is None else [hidden_lh for (hidden_lh,) in samples]


def forward_values(
    model: Model,
    microbatches: Sequence[Mapping[str, Any]],
    *,
    forward: Forward | None = None,
    output_device: torch.device | str = "cpu",
    progress: bool = True,
) -> list[torch.Tensor] | None:
    """Return what a head with one column says of each token of a sample, as of a reward model or a critic.

    A reward is usually the value at the last token; a critic's value for a response token, the one before::

        values = forward_values(reward_model, microbatches)
        rewards = [values_l[-1] for values_l in values]

    Ranks, arguments and results are as in :func:`forward_log_probs`, but ``response_lengths`` do not count.

    Returns:
        Per sample ``[length]``, float32, prompt and response; ``None`` on stages other than the last.

    Raises:
        InvalidInputError: also, after the last microbatch and on all stages, if the head has not one column.
    """

    def score(batch: ScoringBatch, values_t1: torch.Tensor, _: Any) -> tuple[torch.Tensor, ...]:
        if values_t1.shape[1] != 1:
            raise InvalidInputError(
                f"the model returned {values_t1.shape[1]} numbers per token. Expected: one, from a value or "
                "reward head in the place of the output layer."
            )
        return (values_t1[batch.layout.response_rows, 0].float(),)

    options = ScoreOptions("forward_values", forward, output_device, progress, every_token=True)
    samples = Plan(model, microbatches, options).run(score)
    return None if samples is None else [values_l for (values_l,) in samples]


def hidden_states_of(logits_tv: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the hidden states ``[n, h]`` whose product some rows of a model's deferred logits are."""
    if not isinstance(logits_tv, DeferredLogits) or logits_tv.divisor != 1 or not logits_tv.is_deferred:
        raise InvalidInputError(
            "the model's logits are not the product of hidden states with Megatron's own output layer, "
            "so that hidden states do not say what they are: use a top-k."
        )
    return logits_tv[rows].hidden_states()  # type: ignore[attr-defined]


def output_head(model: Model) -> OutputHead | None:
    """Return this rank's part of a model's output layer; ``None`` on stages other than the last.

    It is the model's own memory, not a copy: see :meth:`.TeacherPool.head` for teachers that are swapped.

    Raises:
        InvalidInputError: the output layer is not Megatron's own.
    """
    chunk = unwrap(as_chunks(model)[-1])
    if not getattr(chunk, "post_process", True):
        return None
    layer = getattr(chunk, "output_layer", None)
    if layer is None or not is_column_parallel(layer):
        actual = f"the output layer of {type(chunk).__name__} is {type(layer).__name__}"
        raise InvalidInputError(f"{actual}. Expected: Megatron's ColumnParallelLinear.")
    weight = chunk.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
    bias = None if layer.skip_bias_add or layer.bias is None else layer.bias.detach()
    return OutputHead(weight.detach(), bias, logit_dtype_of(layer, weight))


def _problem_with_ids(at: Any, plan: Plan) -> str | None:
    """Say what is wrong with ids ``[response_length, K]`` of all samples; ``None``: nothing."""
    if at is None:
        return "pass k or `at`: they say which tokens of the vocabulary to score."
    if not isinstance(at, Sequence):
        return f"`at` is a {type(at).__name__}. Expected: a list of ids or distributions, one per sample."
    lengths = [length for batch in plan.batches for length in batch.layout.response_lengths]
    if len(at) != len(lengths):
        return f"`at` has ids for {len(at)} samples, and the microbatches have {len(lengths)}."
    for index, ids_nk in enumerate(at):
        are_ids = isinstance(ids_nk, torch.Tensor) and ids_nk.dtype == torch.int64 and ids_nk.dim() == 2
        if not are_ids or len(ids_nk) != lengths[index] or ids_nk.shape[1] != at[0].shape[1]:
            return (
                f"`at` of sample {index} is {described(ids_nk)}. Expected: int64 [{lengths[index]}, K], "
                "token ids for the tokens of its response, with the same K for all samples."
            )
        if wrong := range_of_wrong_ids(ids_nk, plan.vocabulary):
            return f"`at` of sample {index} has ids {wrong}."
    return None
