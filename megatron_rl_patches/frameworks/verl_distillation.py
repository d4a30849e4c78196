"""Distillation in verl's Megatron workers: a top-k with its tail, and further objectives.

verl names a loss by ``distillation.distillation_loss.loss_mode``. Its own ``forward_kl_topk`` counts the tail
here. Further names, all of which begin with :data:`OURS`, go into verl's registry; they are those of
:data:`MODES`.

A teacher is a server, which gives the log-probabilities of *its* k most probable ids. What else an objective
needs is computed on the workers before they train, and takes the place of these log-probabilities in the
batch, so that verl cuts it into microbatches and context-parallel parts as it does them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..common.agreement import raise_on_all
from ..common.chunks import as_chunks, attribute_of
from ..common.messages import Message, is_first_of_stage
from ..common.scopes import Scope, replaced
from ..common.text import listed
from ..engine.call import Call
from ..errors import InvalidInputError
from ..losses import DeferredLogits, TopKDistribution, vocab_parallel_log_probs_at, vocab_parallel_topk
from ..losses.objectives.distributions import NO_ENTRY
from ..losses.objectives.topk_divergences import bucket_divergence
from ..losses.vocab.divergences import RULED_OUT, Divergence, divergence_named
from .distillation_loss import LARGEST_SUM, with_tail
from .verl_losses import tensor_parallel_group

_NEGATIVE_SUM = Message(
    "{name} counts the tail and is {loss:.4g} nats per token; without the patch verl sums over the top-k "
    "only, replaces negative sums by zero, and gets {truncated:.4g}",
    "Without the patch {share:.0f}% of the tokens have a negative sum, so they have no gradient.",
    "Do not compare this loss with runs without the patch.",
)
#: verl's own name, and what the others begin with.
FORWARD_KL, OURS = "forward_kl_topk", "megatron_rl_patches."
# The columns of a batch that verl cuts into microbatches and context-parallel parts.
_LOG_PROBS, _IDS = "teacher_logprobs", "teacher_ids"
# An output of the logits processor: the loss of verl itself, without gradient.
_TRUNCATED = "truncated_losses"
#: ``loss_mode`` -> what it computes.
MODES = {
    FORWARD_KL: divergence_named("forward_kl"),
    f"{OURS}reverse_kl_topk": divergence_named("reverse_kl"),
    f"{OURS}jsd_topk": divergence_named("jensen_shannon"),
    f"{OURS}skewed_kl_topk": divergence_named("skewed_forward_kl", 0.1),
    f"{OURS}importance_weighted_reverse_kl_topk": divergence_named("importance_weighted_reverse_kl"),
}
# Whether the policy loss reads the logits, too.
_shares_logits: Scope[bool] = Scope("verl_policy_loss")
_logged: list[bool] = []


# --- names and losses in verl's registry


def settings_of(call: Call) -> Any:
    """Return verl's settings of a loss; our names are in its registry from now on."""
    _register(call)
    return call()


def loss_of(call: Call) -> Any:
    """Return the function from what the model has put out to the losses of tokens."""
    _register(call)
    own = call()
    return partial(_losses, own, FORWARD_KL) if call["loss_name"] == FORWARD_KL else own


def _register(call: Call) -> None:
    verl = inspect.unwrap(call.function).__globals__
    registry = verl["DISTILLATION_LOSS_REGISTRY"]
    for name in MODES.keys() - registry.keys():
        settings = verl["DistillationLossSettings"](names=[name], use_topk=True)
        verl["register_distillation_loss"](settings)(partial(_losses, registry[FORWARD_KL], name))


def _losses(own: Callable[..., Any], name: str, **arguments: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return losses ``[b, response]``, and metrics of verl's ``own``, which sets negative losses to zero."""
    output, data = arguments["model_output"], arguments["data"]
    if _TRUNCATED not in output and name != FORWARD_KL:
        raise InvalidInputError(
            f"loss_mode={name} is for Megatron workers, and the patch `distillation` has to be selected in "
            "their environment, too: MEGATRON_RL_PATCHES=1,distillation; or choose another loss_mode"
        )
    losses, metrics = own(**arguments)
    if _TRUNCATED in output:
        losses, truncated = _of_responses(data, output["distillation_losses"], output[_TRUNCATED])
        if name == FORWARD_KL and not _logged and is_first_of_stage() and (mask := _mask(data)).any():
            _logged.append(True)
            truncated = truncated[mask]
            _NEGATIVE_SUM.log(
                name=FORWARD_KL,
                loss=losses.detach()[mask].mean(),
                truncated=truncated.clamp(min=0.0).mean(),
                share=100 * (truncated < 0).float().mean(),
            )
    return losses, metrics


def _of_responses(data: Any, *values: Tensor) -> list[Tensor]:
    """Return values ``[tokens, ...]`` of whole sequences as ``[b, response, ...]``."""
    padded = importlib.import_module("verl.workers.utils.padding").no_padding_2_padding
    return [padded(one, data) for one in values]


def _mask(data: Any) -> Tensor:
    mask: Tensor = data["response_mask"]
    return mask.bool().to_padded_tensor(False) if mask.is_nested else mask.bool()


# --- the loss of each row of the logits


def token_losses(call: Call) -> dict[str, Tensor]:
    """Return what verl's ``compute_forward_kl_topk`` does, for the objective that ``loss_mode`` names.

    The gradient overwrites the logits. If the policy loss reads and overwrites them, too, this takes a copy.
    """
    config, logits = call["config"].distillation_loss, call["student_logits"]
    divergence = MODES.get(config.loss_mode)
    if divergence is None:
        return call()
    copies = _shares_logits.get() is not False and not isinstance(logits, DeferredLogits)
    rows = (logits.clone() if copies else logits).flatten(0, 1)
    names = ("teacher_topk_log_probs", "teacher_topk_ids")
    columns, ids = (_cut(call[name], call["data_format"], logits) for name in names)
    outputs = _topk(rows, columns, ids.long(), divergence, config.log_prob_min_clamp)
    return {name: values.view(logits.shape[:2]) for name, values in outputs.items()}


def _cut(nested: Tensor, data_format: str, logits: Tensor) -> Tensor:
    """Return the values ``[n, ...]`` of this rank's rows of the logits; zeros where these are padding.

    verl may pad the logits of ``bshd`` to the longest sequence of the mini-batch, and not what teachers said.
    """
    util = importlib.import_module("verl.models.mcore.util")
    rows: Tensor = getattr(util, f"preprocess_{data_format}_engine")(nested, pre_process=True)[0]
    return pad(rows, (0, 0, 0, max(0, logits.shape[1] - rows.shape[1]))).flatten(0, 1)


def _topk(
    rows: Tensor, columns: Tensor, ids: Tensor, divergence: Divergence, floor: float | None
) -> dict[str, Tensor]:
    """Compare at ``ids`` ``[n, k]`` and in the tail; the gradient overwrites ``rows``.

    ``columns`` are those of the teacher ``[n, k]``; then, where the divergence needs it, ``[n, k + 1]`` of
    the policy that sampled, its tail last. ``floor`` is verl's ``log_prob_min_clamp``.
    """
    k, tp_group = ids.shape[1], tensor_parallel_group()
    at_ids, of_old, old_tail = columns[:, :k].float(), columns[:, k : 2 * k], columns[:, 2 * k :]
    teacher, is_known = with_tail(ids, at_ids)
    ids = ids.masked_fill(~is_known[:, None], NO_ENTRY)
    lowest = RULED_OUT if floor is None else floor

    def distribution(log_probs: Tensor, tail: Tensor) -> TopKDistribution:
        log_probs, tail = log_probs.where(is_known[:, None], 0.0), tail.where(is_known, 0.0)
        return TopKDistribution(ids, log_probs.clamp(min=lowest), tail.clamp(min=lowest))

    teacher = distribution(teacher.log_probs, teacher.tail_log_prob)
    old = distribution(of_old, old_tail[:, 0]) if divergence.needs_old else None
    log_probs, tail = vocab_parallel_log_probs_at(
        rows, ids, with_tail=True, tp_group=tp_group, inplace_backward=True
    )
    masses = {"student_mass": log_probs.detach().exp().sum(1), "teacher_mass": at_ids.exp().sum(1)}
    log_probs, tail = log_probs.clamp(min=lowest), tail.clamp(min=lowest)
    losses = bucket_divergence(divergence, log_probs, tail, teacher, old)
    of_ids = teacher.log_probs.exp() * (teacher.log_probs - log_probs.detach())
    most_probable = vocab_parallel_topk(rows.detach(), k, tp_group=tp_group).indices
    overlap = (ids[:, :, None] == most_probable[:, None]).any(2)
    outputs = {
        "distillation_losses": losses,
        **masses,  # before the clamp, as since verl#7723
        "overlap_count": overlap.sum(1),
        "overlap_token_advantage": -(of_ids * overlap).sum(1) / overlap.sum(1).clamp(min=1),
        _TRUNCATED: of_ids.sum(1),
    }
    return {name: values.where(is_known, torch.zeros_like(values)) for name, values in outputs.items()}


# --- before an update


def train(call: Call) -> Any:
    """Check what the teachers said, and compute what else the objective needs; then train.

    Where no loss can be computed of the data of some rank, every rank raises :class:`InvalidInputError`,
    before anything is forwarded.
    """
    worker, data = call.instance, call["data"]
    config = getattr(worker.loss_fn, "keywords", {}).get("distillation_config")
    if config is None or not config.enabled or worker.engine_config.strategy != "megatron":
        return call()
    divergence = MODES.get(config.distillation_loss.loss_mode)
    if divergence is None:  # the loss is left to verl
        return call()
    raise_on_all(_problem(data, attribute_of(as_chunks(worker.engine.module)[0], "vocab_size")))
    tu = importlib.import_module("verl.utils.tensordict_utils")
    if divergence.needs_old and (old := _at_ids(worker, data, tu)) is not None:
        data, offsets = data.clone(recurse=False), data["input_ids"].offsets()
        both = torch.cat([data[_LOG_PROBS].values(), old], 1)
        data[_LOG_PROBS] = torch.nested.nested_tensor_from_jagged(both, offsets=offsets)
    has_policy_loss = not tu.get_non_tensor_data(data, "distillation_only", False)
    with _shares_logits.enter(has_policy_loss):
        return call(data=data)


def _problem(data: Any, vocabulary: int | None) -> str | None:
    """Say why no loss can be computed of what the teachers said of this rank's samples."""
    if not {_LOG_PROBS, _IDS} <= set(data.keys()):
        return f"the batch has no {_LOG_PROBS} and {_IDS}: verl's trainer adds them with distillation.enabled"
    log_probs, ids = (values[_mask(data)] for values in _of_responses(data, data[_LOG_PROBS], data[_IDS]))
    k, most = ids.shape[-1], vocabulary or torch.iinfo(ids.dtype).max
    if k > most:
        return f"topk is {k}, but the student's vocabulary has {most} ids: choose a smaller topk"
    if wrong := ids[(ids < 0) | (ids >= most)].tolist():
        return (
            f"a teacher names the ids {listed(wrong)}, expected 0 to {most - 1}: its vocabulary must be the "
            "student's"
        )
    sums = log_probs.float().exp().sum(-1)
    if wrong := sums[~(sums <= LARGEST_SUM)].tolist():
        return (
            f"the probabilities of a teacher's {k} ids add up to {listed(wrong)}, expected at most 1: look "
            "for NaN or missing log-probabilities in what its server returns"
        )
    ordered = ids.sort(-1).values
    if twice := torch.unique(ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]]).tolist():
        return f"a teacher names the ids {listed(twice)} twice for a token, expected each at most once"
    return None


def _at_ids(worker: Any, data: Any, tu: Any) -> Tensor | None:
    """Return the policy's log-probabilities at the teachers' ids and in the tail, ``[tokens, k + 1]``.

    verl's own engine forwards the data of the update, whose first weights are those that sampled. The result
    is on the host; ``None`` before the last pipeline stage.
    """
    engine, config, data = worker.engine, worker.engine_config, data.clone(recurse=False)
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=config.use_dynamic_bsz,
        max_token_len_per_gpu=config.infer_max_token_len_per_gpu,
        micro_batch_size_per_gpu=config.infer_micro_batch_size_per_gpu,
        calculate_entropy=False,
        distillation_use_topk=True,
        distillation_only=True,
    )

    def compare(student_logits: Tensor, data: Any, data_format: str) -> dict[str, Tensor]:
        ids, rows = _cut(data[_IDS], data_format, student_logits).long(), student_logits.flatten(0, 1)
        group = tensor_parallel_group()
        values, tail = vocab_parallel_log_probs_at(rows, ids, with_tail=True, tp_group=group)
        return {"old": torch.cat([values, tail[:, None]], 1).view(*student_logits.shape[:2], -1)}

    own = engine._lm_head_logits_processor

    def process(logits: Tensor, **arguments: Any) -> Any:
        return own(logits, **{**arguments, "logits_processor_func": compare})

    with engine.eval_mode(), replaced(engine, _lm_head_logits_processor=process):
        old = engine.infer_batch(data).get("model_output", {}).get("old")
    return None if old is None else old.values().to("cpu")
