"""Log-probabilities and entropies of the responses of a microbatch, in one pass and with one gradient.

It takes the place of ``get_log_probs_and_entropy`` of slime, OpenClaw-RL and miles. Their code divides the
logits by the temperature, which copies them, and some releases score sample after sample, where autograd
expands the gradient of each sample to the size of all logits.

A fork may compute something else, so the framework's function is tried first: on a small microbatch, once for
each function and its options. Where its values or gradients differ from those of this module, it stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.call import Call
from ..errors import InvalidInputError
from ..losses.logits.log_probs import log_probs_and_entropy
from ..losses.logits.options import VocabParallelOptions, in_float32
from ..losses.sequences.layout import SequenceLayout
from .log_probs import NO_TOKEN, in_vocabulary

_NEEDED = {"logits", "args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy"}
#: Parameters that may have any value; a call that sets others runs the framework's own code.
_KNOWN = _NEEDED | {"non_loss_data", "max_seq_lens", "entropy_requires_grad"}
#: Options of the framework that decide what its function computes.
_OPTIONS = (
    "rollout_temperature",
    "qkv_format",
    "entropy_coef",
    "loss_type",
    "true_on_policy_mode",
)

#: Their logits have this standard deviation, at which a cap of 50 shows.
_LOGITS = 8.0


class _Form(NamedTuple):
    """How the framework returns its scores: beside an empty tensor, and with which entropies."""

    is_pair: bool
    entropy_grad: bool


class _Groups(NamedTuple):
    cp_rank: int
    cp_size: int
    tp_group: dist.ProcessGroup | None


#: By functions and options that were tried; ``None`` where the framework's own code runs.
forms: dict[Any, _Form | None] = {}


def response_scores(call: Call) -> Any:
    """Return what the framework's function returns; ``None`` if its own code has to run.

    All ranks of the tensor parallel group have the same answer. Ranks that share a sequence may differ in it:
    without all-gather context parallelism, which is left to the framework, they exchange nothing here.
    """
    arguments = call.arguments
    if not arguments.keys() >= _NEEDED or call.changed() - _KNOWN:
        return None
    groups = _groups_of(call.function)
    if getattr(arguments["args"], "allgather_cp", False) and groups.cp_size > 1:
        return None
    try:
        layout = _layout(arguments, groups, arguments["logits"].shape[1])
        layout.rows_of(arguments["logits"])
        layout.targets(arguments["unconcat_tokens"])
    except InvalidInputError:
        return None  # lengths that the framework knows what to do with, or says what is wrong with
    options = [getattr(arguments["args"], name, None) for name in _OPTIONS]
    key = (call.function, *options, arguments["with_entropy"], arguments["logits"].dtype, groups.cp_size)
    if key not in forms:
        forms[key] = _tried(call, groups)
    form = forms[key]
    if form is None:
        return None
    scores = _scores(arguments, layout, groups, form.entropy_grad)
    return (arguments["logits"].new_empty((0,)), scores) if form.is_pair else scores


def _groups_of(function: Callable[..., Any]) -> _Groups:
    """Return the groups of the framework's function; those of miles are its own under FSDP."""
    own = getattr(inspect.unwrap(function), "__globals__", {}).get("get_parallel_state")
    if own is not None:
        cp, tp = own().cp, own().tp
        return _Groups(cp.rank, cp.size, tp.group)
    from megatron.core import parallel_state as state

    return _Groups(
        state.get_context_parallel_rank(),
        state.get_context_parallel_world_size(),
        state.get_tensor_model_parallel_group(),
    )


def _layout(arguments: Mapping[str, Any], groups: _Groups, num_rows: int | None) -> SequenceLayout:
    is_padded = getattr(arguments["args"], "qkv_format", None) == "bshd"
    return SequenceLayout.build(
        arguments["total_lengths"],
        arguments["response_lengths"],
        qkv_format="bshd" if is_padded else "thd",
        max_seq_lens=arguments.get("max_seq_lens") if is_padded else None,
        num_rows=None if is_padded else num_rows,
        cp_rank=groups.cp_rank,
        cp_size=groups.cp_size,
        device=arguments["logits"].device,
    )


def _scores(
    arguments: Mapping[str, Any], layout: SequenceLayout, groups: _Groups, entropy_grad: bool
) -> dict[str, list[Tensor]]:
    logits = layout.rows_of(arguments["logits"])
    with_entropy = bool(arguments["with_entropy"])
    options = VocabParallelOptions(
        groups.tp_group,
        _temperature(arguments["args"]),
        ignore_index=NO_TOKEN,
        with_entropy=with_entropy,
        entropy_grad=with_entropy and entropy_grad,
    )
    targets = layout.response_targets(arguments["unconcat_tokens"])
    targets = in_vocabulary(targets, logits.shape[-1] * options.tp_size)
    log_probs, entropies = log_probs_and_entropy(logits, targets, layout.response_slices, None, options)
    scores = {"log_probs": log_probs} if entropies is None else {"log_probs": log_probs, "entropy": entropies}
    return {name: layout.split_responses(values) for name, values in scores.items()}


def _temperature(framework_args: Any) -> float:
    temperature = getattr(framework_args, "rollout_temperature", 1.0)
    return temperature if in_float32(temperature) else 1.0


# --- the framework's function on a small microbatch


def _tried(call: Call, groups: _Groups) -> _Form | None:
    """Return the form of the framework's scores, or ``None`` if they are not those of this module."""
    form = None
    try:
        # Checkpointing must not count the tensors that are saved here.
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.inference_mode(False), torch.enable_grad(), hooks:
            form = _compared(call, groups)
    except (torch.OutOfMemoryError, dist.DistError):
        raise
    except Exception:
        pass  # on all ranks, which do the same: their code takes no such microbatch
    return form if _all_agree(form is not None, groups.tp_group, call["logits"].device) else None


def _compared(call: Call, groups: _Groups) -> _Form | None:
    arguments = {**call.arguments, **_small_microbatch(call.arguments, groups.cp_size)}
    layout = _layout(arguments, groups, None)
    # Two tensors, since a fork may write to its logits.
    leaf, own_leaf = (_logits_like(call["logits"], layout) for _ in range(2))
    returned = call(**{**arguments, "logits": leaf * 1})
    is_pair = isinstance(returned, tuple)
    theirs = returned[1] if is_pair else returned
    entropy_grad = any(values.requires_grad for values in theirs.get("entropy", ()))
    ours = _scores({**arguments, "logits": own_leaf * 1}, layout, groups, entropy_grad)
    pairs = [(_gradient(theirs, leaf), _gradient(ours, own_leaf))]
    if theirs.keys() != ours.keys():
        return None
    for name, values in ours.items():
        pairs += zip(theirs[name], values, strict=True)
    return _Form(is_pair, entropy_grad) if all(_is_close(*pair) for pair in pairs) else None


def _is_close(a: Tensor, b: Tensor) -> bool:
    alike = (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
    return alike and torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def _gradient(scores: Mapping[str, Sequence[Tensor]], leaf: Tensor) -> Tensor:
    parts = [part for name in sorted(scores) for part in scores[name] if part.requires_grad]
    values = torch.cat(parts)
    weights = torch.linspace(0.5, 1.5, len(values), dtype=values.dtype, device=values.device)
    return torch.autograd.grad((weights * values).sum(), leaf)[0]


def _small_microbatch(arguments: Mapping[str, Any], cp_size: int) -> dict[str, Any]:
    """Return lengths and tokens of two samples, of which every rank has a part of the response."""
    first, second = 16 * cp_size, 14 * cp_size
    tokens = torch.arange(first, device=arguments["logits"].device) % arguments["logits"].shape[-1]
    is_padded = arguments.get("max_seq_lens") is not None
    return {
        "unconcat_tokens": [tokens, tokens[:second]],
        "total_lengths": [first, second],
        "response_lengths": [first - 1, second - 3],
        **({"max_seq_lens": [first, first]} if is_padded else {}),
    }


def _logits_like(logits: Tensor, layout: SequenceLayout) -> Tensor:
    """Return a leaf of random logits for the layout, the same at each call."""
    shape = *layout.logits_shape, logits.shape[-1]
    values = _LOGITS * torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return values.to(logits.device, logits.dtype).requires_grad_()


def _all_agree(agrees: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    if group is None or dist.get_world_size(group) == 1:
        return agrees
    vote = torch.full((), int(agrees), dtype=torch.int32, device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group)
    return bool(vote.item())
