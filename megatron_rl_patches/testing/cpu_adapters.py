"""What a CPU calls in another way: ``torch.distributed``, Adam, and what megatron-core lacks without GPUs."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed
import wrapt
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from .cuda_redirect import Replacements, names_cuda

Arguments = dict[str, Any]


def _adapted(function: Callable[..., Any], change: Callable[[Arguments], None]) -> Callable[..., Any]:
    """Return the function with arguments that are changed before each call."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call_changed(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        change(call.arguments)
        return function(*call.args, **call.kwargs)

    return call_changed


def _on_cpu(name: str) -> Callable[[Arguments], None]:
    """Return a change of one argument: the CPU in the place of a GPU."""

    def change(call: Arguments) -> None:
        if names_cuda(call[name]):
            call[name] = "cpu"

    return change


# --- torch.distributed written for NCCL, on gloo


def _gloo_in_place_of_nccl(call: Arguments) -> None:
    if "nccl" in (call.get("backend") or ""):
        call["backend"] = "gloo"
    call.pop("pg_options", None)
    call.pop("device_id", None)


def _gloo_by_default(call: Arguments) -> None:
    # Without a name torch would make a group of NCCL's beside one of gloo's.
    call["backend"] = call.get("backend") or "gloo"
    _gloo_in_place_of_nccl(call)


def _without_device_ids(call: Arguments) -> None:
    call.pop("device_ids", None)


def _sending_a_view(call: Arguments) -> None:
    # Pipeline schedules free ``tensor.data`` right after an asynchronous send. NCCL's stream keeps the memory
    # alive until it is sent. Gloo would send what has replaced it (NaN in interleaved runs), unless it holds
    # a view of its own.
    call["tensor"] = call["tensor"].detach()


class _ScaledSum(NamedTuple):
    """Stands for NCCL's sum of tensors that are multiplied with a factor before."""

    factor: Any


def _scaling_first(call: Arguments) -> None:
    if isinstance(op := call.get("op"), _ScaledSum):
        call["op"] = torch.distributed.ReduceOp.SUM
        if "input" in call:
            call["input"] = call["input"] * op.factor
        else:
            call["tensor"].mul_(op.factor)


def _flat(call: Arguments) -> None:
    # NCCL counts elements, and gloo compares shapes.
    call["output_tensor"] = call["output_tensor"].view(-1)
    call["input_tensor"] = call["input_tensor"].reshape(-1)


def _with_listed_splits(call: Arguments) -> None:
    # Megatron makes lists of split sizes that are tensors on a GPU only.
    for name in ("output_split_sizes", "input_split_sizes"):
        if isinstance(sizes := call.get(name), torch.Tensor):
            call[name] = sizes.tolist()


# --- torch.optim.Adam in the place of the fused ones of TransformerEngine and apex


class _State(dict[str, Any]):
    """State of a parameter to which Megatron gives moments before the first step, but no count of steps."""

    def __missing__(self, key: str) -> Any:
        if key != "step":
            raise KeyError(key)
        self["step"] = torch.tensor(0.0)
        return self["step"]


def _loaded(values: dict[str, Any]) -> _State:
    state = _State(values)
    if isinstance(state.get("step"), torch.Tensor):
        # Megatron gives all parameters the same tensor, to which each of them would add.
        state["step"] = state["step"].clone()
    return state


def _as_fused(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def on_cpu(self: Any, params: Any, lr: Any = 1e-3, *args: Any, **kwargs: Any) -> None:
        # Megatron sets the rate before the first step, and fused ones need none until then.
        init(self, params, 0.0 if lr is None else lr, *args, **kwargs)
        self.state = defaultdict(_State)

    return on_cpu


def _with_steps(call: Arguments) -> None:
    if "state" in call["state"]:
        states = {parameter: _loaded(values) for parameter, values in call["state"]["state"].items()}
        call["state"] = {**call["state"], "state": defaultdict(_State, states)}


def replacements() -> list[Replacements]:
    """Return the functions that are adapted while the redirect is on."""
    changes = {
        "init_process_group": _gloo_by_default,
        "new_group": _gloo_in_place_of_nccl,
        "barrier": _without_device_ids,
        "isend": _sending_a_view,
        "all_reduce": _scaling_first,
        "reduce_scatter_tensor": _scaling_first,
        "all_gather_into_tensor": _flat,
        "all_to_all_single": _with_listed_splits,
    }
    adapted = {name: _adapted(getattr(distributed_c10d, name), change) for name, change in changes.items()}
    adapted["_make_nccl_premul_sum"] = _ScaledSum
    # P2POp compares its operation with the defining module's by identity, so all modules get the same one.
    modules = (torch.distributed, distributed_c10d, device_mesh)
    replaced: list[Replacements] = [(module, adapted) for module in modules]
    replaced.append((DeviceMesh, {"__init__": _adapted(DeviceMesh.__init__, _on_cpu("device_type"))}))
    # torch adds a default device after the redirect.
    set_default = _adapted(torch.set_default_device, _on_cpu("device"))
    # What torch.load puts on a GPU because of the file, or of ``map_location``.
    restore = _adapted(torch.serialization.default_restore_location, _on_cpu("location"))
    replaced.append((torch, {"set_default_device": set_default}))
    replaced.append((torch.serialization, {"default_restore_location": restore}))
    # In torch 2.6 AdamW, which Megatron uses, does not derive from Adam.
    adam, adam_w = torch.optim.Adam, torch.optim.AdamW
    owners: list[Any] = [adam] if issubclass(adam_w, adam) else [adam, adam_w]
    # torch's load_state_dict() calls __setstate__.
    for owner in owners:
        set_state = _adapted(owner.__setstate__, _with_steps)
        replaced.append((owner, {"__init__": _as_fused(owner.__init__), "__setstate__": set_state}))
    return replaced


# --- faults of megatron-core where TransformerEngine is not installed


def _known_te_version(original: Any) -> Any:
    if original is not None or find_spec("transformer_engine") is not None:
        return original
    from packaging.version import Version

    return Version("0.0.0")


def _if_te_is_installed(original: Any) -> bool:
    return bool(original) and find_spec("transformer_engine") is not None


def _keeping_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_states(self: Any, parameter: Any, tensors: dict[str, Any]) -> Any:
        group, position = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][position]]
        return original(self, parameter, {**tensors, "step": state["step"]} if "step" in state else tensors)

    return set_states


def _with_states(state_dict: Callable[..., Any]) -> Callable[..., Any]:
    def state_dict_of(self: Any) -> Any:
        if self.init_state_fn is not None and not self.optimizer.state:
            self.init_state_fn(self.optimizer, self.config)
        return state_dict(self)

    return state_dict_of


class _Gap(NamedTuple):
    module: str
    attribute: str
    adapt: Callable[[Any], Any]  # makes the new value from the attribute's value, None if it is missing


_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_GAPS = (
    # Up to megatron-core 0.18, is_te_min_version compares _te_version with a version even if it is None.
    _Gap("megatron.core.utils", "_te_version", _known_te_version),
    # The router compares te_general_gemm with None, but the failed import has left the name undefined.
    _Gap("megatron.core.transformer.moe.moe_utils", "te_general_gemm", lambda original: original),
    # In megatron-core 0.16 to 0.18 it is true without TransformerEngine, whose classes are mocks then.
    _Gap("megatron.core.transformer.multi_latent_attention", "HAVE_TE", _if_te_is_installed),
    # Before the first optimizer step the state has no count of steps, and loading a checkpoint needs one.
    _Gap(_DISTRIBUTED_OPTIMIZER, "DistributedOptimizer.state_dict", _with_states),
    # This method reads the count of steps from the checkpoint, which may lack it or have an old one. The
    # state already has the right count, so that one is passed on.
    _Gap(_DISTRIBUTED_OPTIMIZER, "DistributedOptimizer._set_main_param_and_optimizer_states", _keeping_steps),
)
_undo: ExitStack | None = None  # while the gaps are filled


def _fill(module: ModuleType) -> None:
    if _undo is None:
        return
    for gap in _GAPS:
        if gap.module == module.__name__:
            *owners, name = gap.attribute.split(".")
            owner = functools.reduce(getattr, owners, module)
            value = gap.adapt(getattr(owner, name, None))
            _undo.enter_context(mock.patch.object(owner, name, value, create=True))


_MODULES = {gap.module for gap in _GAPS}
for _name in _MODULES:
    wrapt.register_post_import_hook(_fill, _name)


@contextmanager
def filled_gaps() -> Iterator[None]:
    """Fill the gaps of modules that are imported, and of those that will be while the context lasts."""
    global _undo
    with ExitStack() as _undo:
        for name in _MODULES & sys.modules.keys():
            _fill(sys.modules[name])
        try:
            yield
        finally:
            _undo = None
