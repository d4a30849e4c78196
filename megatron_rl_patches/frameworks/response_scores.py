"""Log-probabilities and entropies of the responses of a microbatch, in one pass and with one gradient.

It takes the place of ``get_log_probs_and_entropy`` of slime, OpenClaw-RL and miles. Their code divides the
logits by the temperature, which copies them, and some releases score sample after sample, where autograd
expands the gradient of each sample to the size of all logits.

A fork may compute something else, so the framework's function is tried first: on a small microbatch, once for
each function and its options. Where its values or gradients differ from those of this module, it stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.agreement import gathered
from ..common.messages import Message, is_rank_0
from ..engine.call import Call
from ..errors import InvalidInputError
from ..losses.sequences import SequenceLayout
from .log_probs import log_probs_and_entropy
from .microbatch_layout import Groups, groups_of, layout_of

_OTHER_SCORES = Message(
    "lean-loss does not replace {function}, whose results on a small microbatch at temperature "
    "{temperature:g} are not those of lean-loss",
    "The framework's own function runs, and no memory is saved.",
    "Set another temperature if it is 0. If you changed that function, ignore this; else report it.",
)
_NEEDED = {"logits", "args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy"}
#: A call that passes anything else runs the framework's own code.
_KNOWN = _NEEDED | {"non_loss_data", "max_seq_lens", "entropy_requires_grad"}
#: Options of the framework that decide what its function computes.
_OPTIONS = ("rollout_temperature", "qkv_format", "entropy_coef", "loss_type")
#: Standard deviation of random logits in most rows, and in every fourth one, where a clamp at 50 shows.
_SPREAD, _WIDE_SPREAD = 8.0, 60.0


class _Form(NamedTuple):
    """How the framework returns its scores: beside an empty tensor, and with which entropies."""

    is_pair: bool
    entropy_grad: bool


#: By functions and options that were tried; ``None`` where the framework's own code runs.
forms: dict[Any, _Form | None] = {}


def response_scores(call: Call) -> Any:
    """Return what the framework's function returns; ``None`` if its own code has to run.

    All ranks of the tensor and context parallel groups have the same answer.
    """
    arguments = call.arguments
    is_known = arguments.keys() >= _NEEDED and not call.changed() - _KNOWN and call.get("non_loss_data", True)
    # What wraps the function, such as another patch, would be left out.
    if not is_known or hasattr(call.function, "__wrapped__"):
        return None
    groups, args, logits = groups_of(call.function), arguments["args"], arguments["logits"]
    if getattr(args, "true_on_policy_mode", False):  # miles reproduces the bits of its inference engine
        return None
    if getattr(args, "allgather_cp", False) and groups.cp_size > 1:  # ranks exchange scores
        return None
    try:
        layout = layout_of(args, arguments, groups, logits.shape[1], logits.device)
        targets = _targets(arguments, layout)
        layout.rows_of(logits)
    except InvalidInputError:
        return None  # lengths that the framework knows what to do with, or says what is wrong with
    options = [getattr(args, name, None) for name in _OPTIONS]
    options += [arguments["with_entropy"], call.get("entropy_requires_grad")]
    key = (call.function, *options, logits.dtype, groups.cp_size)
    if key not in forms:
        forms[key] = _tried(call, groups)
    if (form := forms[key]) is None:
        return None
    scores = _scores(arguments, layout, targets, groups, form.entropy_grad)
    return (logits.new_empty((0,)), scores) if form.is_pair else scores


def _targets(arguments: Mapping[str, Any], layout: SequenceLayout) -> Tensor:
    """Return the tokens of the responses, on the device of the logits."""
    device = arguments["logits"].device
    return layout.response_targets([tokens.to(device) for tokens in arguments["unconcat_tokens"]])


def _scores(
    arguments: Mapping[str, Any], layout: SequenceLayout, targets: Tensor, groups: Groups, entropy_grad: bool
) -> dict[str, list[Tensor]]:
    log_probs, entropies = log_probs_and_entropy(
        layout.rows_of(arguments["logits"]),
        targets,
        groups.tp_group,
        rows=layout.response_slices,
        entropy_grad=entropy_grad if arguments["with_entropy"] else None,
        temperature=getattr(arguments["args"], "rollout_temperature", 1.0),
    )
    scores = {"log_probs": log_probs} if entropies is None else {"log_probs": log_probs, "entropy": entropies}
    # A caller may write to one of them, which autograd forbids for views of one tensor.
    return {name: [part.clone() for part in layout.split_responses(x)] for name, x in scores.items()}


# --- the framework's function on a small microbatch


def _tried(call: Call, groups: Groups) -> _Form | None:
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
    for group in (groups.tp_group, groups.cp_group):
        form = form if all(gathered(form is not None, group)) else None
    if form is None and is_rank_0():
        function = f"{call.function.__module__}.{call.function.__qualname__}"
        temperature = getattr(call["args"], "rollout_temperature", 1.0)
        _OTHER_SCORES.log(function=function, temperature=temperature)
    return form


def _compared(call: Call, groups: Groups) -> _Form | None:
    arguments = {**call.arguments, **_small_microbatch(call.arguments, groups)}
    layout = layout_of(arguments["args"], arguments, groups, None, call["logits"].device)
    # Two tensors, since a fork may write to its logits.
    leaf, own_leaf = (_logits_like(call["logits"], layout, groups) for _ in range(2))
    returned = call(**{**arguments, "logits": leaf * 1})
    is_pair = isinstance(returned, tuple)
    if is_pair and (len(returned) != 2 or returned[0].numel()):
        return None
    theirs = returned[1] if is_pair else returned
    entropy_grad = any(values.requires_grad for values in theirs.get("entropy", ()))
    ours = _scores(
        {**arguments, "logits": own_leaf * 1}, layout, _targets(arguments, layout), groups, entropy_grad
    )
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


def _small_microbatch(arguments: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    """Return lengths and tokens of three samples, of which every rank has a part of the response."""
    cp_size, logits = groups.cp_size, arguments["logits"]
    # Padded for zigzag, these are 16, 14 and 12 times the size.
    totals = [16 * cp_size - 1, 12 * cp_size + 1, 10 * cp_size + 1]
    tp_size = 1 if groups.tp_group is None else dist.get_world_size(groups.tp_group)
    ids = torch.linspace(0, logits.shape[-1] * tp_size - 1, sum(totals), dtype=torch.float64, device="cpu")
    tokens = ids.long().flip(0).to(logits.device)
    is_padded = arguments.get("max_seq_lens") is not None
    return {
        "unconcat_tokens": [part.clone() for part in tokens.split_with_sizes(totals)],
        "total_lengths": totals,
        "response_lengths": [total - prompt for total, prompt in zip(totals, (1, 3, 4), strict=True)],
        **({"max_seq_lens": [16 * cp_size] * len(totals)} if is_padded else {}),
    }


def _logits_like(logits: Tensor, layout: SequenceLayout, groups: Groups) -> Tensor:
    """Return a leaf of random logits for the layout, the same at each call, and others on each TP rank."""
    shape = *layout.logits_shape, logits.shape[-1]
    rank = 0 if groups.tp_group is None else dist.get_rank(groups.tp_group)
    values = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(rank), device="cpu")
    values.flatten(0, 1)[::4] *= _WIDE_SPREAD / _SPREAD
    return (_SPREAD * values).to(logits.device, logits.dtype).requires_grad_()
