"""Log-probabilities and entropy at the memory floor in the losses of hosts, without reentrant checkpointing.

Not patched: NeMo-RL, AReaL, SkyRL, ROLL and ms-swift, which compute in chunks already, verl's fused kernels,
and miles' ``true_on_policy_mode``, which reproduces the bits of its inference engine. No site is a function
that a host compiles: ``torch.compile`` would look through the wrapper.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..engine.arguments import bind, call
from ..engine.spec import Patch

if TYPE_CHECKING:
    from ..engine.facts import Facts
    from ..losses.hosts import Scoring

_SCORES = "calculate_log_probs_and_entropy"
#: Names under which the eras of slime, and miles, pass whether the entropy has a gradient.
_ENTROPY_GRAD = ("with_entropy_grad", "entropy_requires_grad", "need_entropy_grad")
#: Parameters of the hosts' function that compute; the last two matter to a way of miles' that is left alone.
_KNOWN = {"logits", "tokens", "tp_group", "with_entropy", "log_prob_keep_mask", "chunk_size", *_ENTROPY_GRAD}
_KNOWN |= {"true_on_policy", "vocab_size"}


# --- not needed: judged from the target's code


def _checkpoints_without_reentrance(facts: Facts) -> str | None:
    assert facts.function is not None
    calls = [node for node in ast.walk(facts.function) if isinstance(node, ast.Call)]
    checkpoints = [call for call in calls if _name_of(call.func) == "checkpoint"]
    if not checkpoints:
        return "it does not checkpoint the loss"
    says = all(any(keyword.arg == "use_reentrant" for keyword in call.keywords) for call in checkpoints)
    return "it says use_reentrant itself" if says else None


def _name_of(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _placeholder_follows_values(facts: Facts) -> str | None:
    """A placeholder that always requires grad has a backward that the other ranks may not have."""
    assert facts.function is not None
    always = any(
        keyword.arg == "requires_grad"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is True
        for call in ast.walk(facts.function)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
    )
    return None if always else "its placeholder requires grad when the values do"


def _scores_elsewhere(facts: Facts) -> str | None:
    """slime up to v0.1: the function that computes is in the module itself, without ``tp_group``."""
    assert facts.module is not None
    own = any(isinstance(node, ast.FunctionDef) and node.name == _SCORES for node in facts.module.body)
    return f"the module has a {_SCORES} of its own" if own else None


def _does_not_clone(facts: Facts) -> str | None:
    return None if "clone" in facts.names else "it does not clone the logits"


# --- what a host's function finds under a name, at the time of the call


def _global(function: Any, name: str) -> Any:
    return inspect.unwrap(function).__globals__.get(name)


def _is_ours(function: Any) -> bool:
    """Our layer, with nobody's on top of it who would see what we pass to it."""
    from ..engine.layer import Layer  # wrapt with it, which `list` and `doctor` do without

    return type(function) is Layer and function.is_on and function.path[0] == patch.name


# --- adapters


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Options are replaced in place, not in a copy: custom losses may keep something on ``args``."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _loss_function(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Checkpoints the whole function instead of the loss in it: the rest is a few numbers."""
    host_args = bind(wrapped, args, kwargs, defaults=True).arguments["args"]
    if not host_args.recompute_loss_function:
        return wrapped(*args, **kwargs)
    from ..losses import checkpointed

    def loss_function(*args: Any, **kwargs: Any) -> Any:
        with _replaced(host_args, "recompute_loss_function", False):
            return wrapped(*args, **kwargs)

    return checkpointed(loss_function, preserve_rng_state=True)(*args, **kwargs)


def _get_log_probs_and_entropy(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Has the options that :func:`_calculate` needs: the temperature, and whether the entropy matters."""
    from ..losses import hosts

    bound = bind(wrapped, args, kwargs, defaults=True)
    host_args = bound.arguments["args"]
    # A custom loss may well use the entropy whatever this coefficient is.
    is_metric = (
        getattr(host_args, "loss_type", None) == "policy_loss"
        and getattr(host_args, "entropy_coef", None) == 0
    )
    with hosts.scoring(entropy_grad=not is_metric) as scope:
        calculate = _global(wrapped, _SCORES)
        if (
            not _is_ours(calculate)
            or not _KNOWN.issuperset(inspect.signature(calculate).parameters)
            or getattr(host_args, "true_on_policy_mode", False)
        ):
            return wrapped(*args, **kwargs)
        temperature = getattr(host_args, "rollout_temperature", 1.0)
        if temperature == 1.0 or temperature <= 0:
            return _all_samples(wrapped, bound, scope)
        # The host would divide all logits, and keep the quotient beside them.
        scope.temperature = temperature
        with _replaced(host_args, "rollout_temperature", 1.0):
            return _all_samples(wrapped, bound, scope)


def _all_samples(wrapped: Any, bound: inspect.BoundArguments, scope: Scoring) -> Any:
    from ..losses.samples import at_once, only_slices

    uses_slices = "get_responses" in inspect.unwrap(wrapped).__code__.co_names
    if not uses_slices or not only_slices(_global(wrapped, "get_responses")):
        return call(wrapped, bound)
    logits = bound.arguments["logits"]
    return at_once(lambda numbers: call(wrapped, bound, logits=numbers), logits, scope)


def _calculate(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from ..losses import hosts

    bound = bind(wrapped, args, kwargs, defaults=True).arguments
    parameters = inspect.signature(wrapped).parameters
    unknown = [n for n in bound if n not in _KNOWN and bound[n] is not parameters[n].default]
    scope = hosts.current_scoring()
    entropy_grad = next((bound[name] for name in _ENTROPY_GRAD if name in bound), True)
    scope.entropy_grad = scope.entropy_grad and entropy_grad
    if unknown or bound.get("true_on_policy"):
        return wrapped(*args, **kwargs)
    logits, tokens, group = bound["logits"], bound["tokens"], bound["tp_group"]
    if scope.samples is not None:
        log_probs, entropy = scope.samples.score(logits, tokens, group, bound["with_entropy"])
    elif len(logits) == 0:
        return wrapped(*args, **kwargs)
    else:
        log_probs, entropy = hosts.score(
            logits,
            tokens,
            group,
            with_entropy=bound["with_entropy"],
            entropy_grad=scope.entropy_grad,
            keep_mask=bound.get("log_prob_keep_mask"),
            temperature=scope.temperature,
        )
    if entropy is not None and not any(name in bound for name in _ENTROPY_GRAD):
        # The eras without such an argument compute it in the dtype of the logits.
        entropy = entropy.to(logits.dtype if scope.samples is None else scope.samples.logits.dtype)
    return log_probs.unsqueeze(-1), entropy


def _redistribute(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """No backward of the entropy's all-reduce, on any rank, where the entropy has no gradient."""
    import torch

    from ..losses.hosts import current_scoring

    bound = bind(wrapped, args, kwargs, defaults=True)
    scope, res = current_scoring(), bound.arguments["res"]
    if scope.samples is not None and not scope.samples.are_computed:
        return
    entropy = {} if scope.entropy_grad or "entropy" not in res else {"entropy": res.pop("entropy")}
    call(wrapped, bound)
    with torch.no_grad():
        call(wrapped, bound, res=entropy)
    res.update(entropy)


# --- sites

patch = Patch(
    name="lean-loss",
    summary="log-probs and entropy of policy losses at the memory floor, without reentrant checkpointing",
    upstream=("THUDM/slime#1788", "THUDM/slime#1822", "THUDM/slime#2123", "THUDM/slime#2152"),
)

_SLIME = "slime.backends.megatron_utils.loss"  # OpenClaw-RL vendors slime under its own name
_MILES = "miles.backends.training_utils"

for _module in (_SLIME, f"{_MILES}.loss"):
    patch.wrap(
        _module,
        "loss_function",
        uses=("args",),
        mentions=("recompute_loss_function",),
        not_needed=_checkpoints_without_reentrance,
    )(_loss_function)

for _module in (_SLIME, f"{_MILES}.loss_hub.logit_processors"):
    patch.wrap(
        _module,
        "get_log_probs_and_entropy",
        uses=("args",),
        mentions=(_SCORES,),
        not_needed=_scores_elsewhere,
    )(_get_log_probs_and_entropy)

for _module in ("slime.utils.ppo_utils", f"{_MILES}.loss_hub.math_utils"):
    patch.wrap(
        _module,
        _SCORES,
        uses=("logits", "tokens", "tp_group", "with_entropy"),
        predates_without=_SCORES,
    )(_calculate)

for _module, _qualname in (
    (_SLIME, "_allgather_cp_redistribute"),
    (f"{_MILES}.cp_utils", "allgather_cp_redistribute"),
):
    patch.wrap(
        _module,
        _qualname,
        uses=("res",),
        mentions=("all_reduce",),
        not_needed=_placeholder_follows_values,
        predates_without="allgather_cp",
    )(_redistribute)


@patch.wrap(
    "slime.utils.ppo_utils",
    "compute_log_probs",
    uses=("logits", "tokens", "process_group"),
    mentions=("fused_vocab_parallel_cross_entropy",),
    predates_without="fused_vocab_parallel_cross_entropy",
)
def compute_log_probs(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Megatron's fused cross entropy overwrites float32 logits; top-k losses call this once per candidate."""
    from ..losses.hosts import score

    bound = bind(wrapped, args, kwargs, defaults=True).arguments
    log_probs, _ = score(bound["logits"], bound["tokens"], bound["process_group"])
    return log_probs.unsqueeze(1)


_VERL = "verl.utils.megatron.tensor_parallel"
_VERL_LOG_PROBS = "vocab_parallel_log_probs_from_logits"


@patch.wrap(
    _VERL,
    _VERL_LOG_PROBS,
    uses=("logits", "labels"),
    mentions=("vocab_parallel_cross_entropy",),
)
def verl_log_probs(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient may go into the logits: the host's function overwrites them as early as in forward."""
    from megatron.core import parallel_state

    from ..losses import hosts

    bound = bind(wrapped, args, kwargs, defaults=True).arguments
    scope = hosts.current_scoring()
    log_probs, scope.entropy = hosts.score(
        bound["logits"],
        bound["labels"],
        parallel_state.get_tensor_model_parallel_group(),
        with_entropy=scope.with_entropy,
        inplace_backward=True,
    )
    return log_probs


def _verl_entropy(wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from megatron.core import parallel_state

    from ..losses.hosts import entropy

    logits = bind(wrapped, args, kwargs, defaults=True).arguments["vocab_parallel_logits"]
    return entropy(logits, parallel_state.get_tensor_model_parallel_group()), logits.dtype


@patch.wrap(
    _VERL,
    "vocab_parallel_entropy",
    uses=("vocab_parallel_logits",),
    mentions=("_VocabParallelEntropy",),
)
def verl_entropy(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    entropy, dtype = _verl_entropy(wrapped, args, kwargs)
    return entropy.to(dtype)


@patch.wrap(
    _VERL,
    "vocab_parallel_entropy_with_chunking",
    uses=("vocab_parallel_logits",),
    mentions=("_VocabParallelEntropy",),
    predates_without="vocab_parallel_entropy_with_chunking",
)
def verl_entropy_with_chunking(
    wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """In float32, whatever the logits are, as the host puts its chunks together."""
    return _verl_entropy(wrapped, args, kwargs)[0]


@patch.wrap(
    "verl.workers.engine.megatron.transformer_impl",
    "MegatronEngineWithLMHead._lm_head_logits_processor",
    uses=("logits", "calculate_entropy", "distillation_only"),
    mentions=(_VERL_LOG_PROBS,),
    not_needed=_does_not_clone,
    predates_without="_lm_head_logits_processor",
)
def verl_logits_processor(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Entropy and log-probabilities in one pass, from logits that need not be cloned in between."""
    from ..losses.hosts import scoring

    bound = bind(wrapped, args, kwargs, defaults=True)
    given = bound.arguments
    lean = _is_ours(_global(wrapped, _VERL_LOG_PROBS))
    if not lean or not given["calculate_entropy"] or given["distillation_only"]:
        return wrapped(*args, **kwargs)
    with scoring(with_entropy=True) as scope:
        result = call(wrapped, bound, calculate_entropy=False)
    assert scope.entropy is not None
    in_float32 = getattr(instance.engine_config, "entropy_from_logits_with_chunking", False)
    return {**result, "entropy": scope.entropy if in_float32 else scope.entropy.to(given["logits"].dtype)}
