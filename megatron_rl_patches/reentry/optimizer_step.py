"""One step of the optimizer whose microbatches run in several calls of Megatron's schedules."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from importlib import import_module
from numbers import Integral
from typing import Any

from ..common.chunks import as_chunks, bucket_groups, distinct_configs
from ..common.scopes import replaced
from ..errors import InvalidInputError, MegatronRLPatchesError
from .forward_pre_hooks import synchronize
from .guard import TrainGuard
from .recovery import fill_mxfp8_gather_buffer

_open: weakref.WeakSet[OptimizerStep] = weakref.WeakSet()
_NOT_OPEN = "no step is open, or an exception has ended it: call begin() first"


class OptimizerStep:
    """Steps of an optimizer with several calls of Megatron's schedule each, as training services need them.

    The model is one or several chunks in Megatron's DDP that share one config. A step is :meth:`begin`, any
    number of :meth:`forward_backward`, and :meth:`step` or :meth:`abort`; ``with steps.begin(...):`` aborts a
    step that its block leaves open. Losses, gradients and weights have the bits of one call with all
    microbatches. Otherwise each call reduces gradients over data-parallel ranks, and later ones add to them
    (SkyRL#2146, NeMo-RL#2683).

    Methods may run in different threads; while a schedule runs, use neither model nor config elsewhere. An
    exception from a schedule or the optimizer ends the step, as :class:`.TrainGuard` ends a ``train()``; call
    :meth:`abort` on all other ranks.

    Raises:
        MegatronRLPatchesError: other chunks, a method out of turn, or a number of microbatches that does not
            fit (in begin(): InvalidInputError). All ranks raise alike, before collectives; steps stay open.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._chunks, self._optimizer, self._arguments = list(as_chunks(model)), optimizer, dict[str, Any]()
        in_ddp = all(isinstance(getattr(chunk, "bucket_groups", None), list) for chunk in self._chunks)
        _check(in_ddp, "a chunk is not wrapped in Megatron's DistributedDataParallel; FSDP is not supported")
        configs = distinct_configs(self._chunks)
        _check(len(configs) == 1, f"the chunks have {len(configs)} configs: build them with the same object")
        self._config = configs[0]

    def begin(self, num_microbatches: int | None = None) -> OptimizerStep:
        """Zero the gradients. With ``overlap_param_gather`` all-reduce one integer over data-parallel ranks.

        Losses are divided by ``num_microbatches``, which counts those of all calls on this rank. Reduction
        overlaps with the last one. With ``config.calculate_per_token_loss`` the number may be left out.
        """
        number: Any = num_microbatches
        is_optional = number is None and getattr(self._config, "calculate_per_token_loss", False)
        is_count = isinstance(number, Integral) and number is not True and int(number) > 0
        problem = f"num_microbatches of begin() is {number!r}; expected an integer above 0, of the whole step"
        _check(is_count or is_optional, problem, InvalidInputError)
        is_free = not any(chunk in step._chunks for step in _open for chunk in self._chunks)
        _check(is_free, "a step of this model is open: call its step() or abort() first")
        with ExitStack() as stack:
            stack.enter_context(TrainGuard(self._chunks, self._optimizer, installs=False))
            stack.callback(_open.discard, self)
            _open.add(self)
            self._total, self._done, self._tokens = number, 0, None
            self._optimizer.zero_grad()
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
                fill_mxfp8_gather_buffer(chunk, self._optimizer)
            self._stack = stack.pop_all()
        return self

    def forward_backward(self, *, num_microbatches: int, schedule: Any = None, **arguments: Any) -> Any:
        """Run some of the microbatches, accumulate their gradients, and return what the schedule returns.

        The schedule, by default that of ``get_forward_backward_func()``, gets all arguments and the model.
        """
        _check(self in _open, _NOT_OPEN)
        done, total = self._done + num_microbatches, self._total
        fits = self._done < done <= (total or done) and not arguments.get("forward_only")
        _check(fits, f"{done} of {total or 'any'} microbatches: begin() needs the sum over calls that train")
        schedule = schedule or import_module("megatron.core.pipeline_parallel").get_forward_backward_func()
        number, is_last = _Microbatches(num_microbatches), done == total
        number.of_step = total or num_microbatches
        config, no_syncs = self._config, [chunk.no_sync for chunk in self._chunks]
        functions = {
            "finalize_model_grads_func": self._note_finalize,
            "grad_scale_func": config.grad_scale_func or self._optimizer.scale_loss,
            "param_sync_func": None if self._done else config.param_sync_func,  # the first call gathers
            # Within no_sync(), and without functions for it, a schedule reduces nothing.
            "grad_sync_func": config.grad_sync_func if is_last else None,
            "no_sync_func": (no_syncs if no_syncs[1:] else no_syncs[0]) if is_last else None,
        }
        with self._stack as stack, replaced(config, **functions), ExitStack() as unreduced:
            for no_sync in () if is_last else no_syncs:
                unreduced.enter_context(no_sync())
            result = schedule(model=self._chunks, num_microbatches=number, **arguments)
            self._done, self._stack = done, stack.pop_all()
        return result

    def step(self) -> Any:
        """Reduce and finalize gradients, step, and gather weights; return the optimizer's result."""
        _check(self in _open, _NOT_OPEN)
        is_whole = 0 < self._done == (self._total or self._done)
        _check(is_whole, f"{self._done} of {self._total or 'any'} microbatches ran: call forward_backward()")
        with self._stack:
            for group in (group for chunk in self._chunks for group in bucket_groups(chunk)):
                # finalize_model_grads() waits for reductions. It begins those of the very first batch alone.
                overlaps = not self._total and group.ddp_config.overlap_grad_reduce
                if overlaps and not getattr(group, "is_first_batch", False):
                    group.start_grad_sync()
            finalize = self._config.finalize_model_grads_func
            finalize = finalize or import_module("megatron.core.distributed").finalize_model_grads
            finalize(self._chunks, self._tokens, **self._arguments)
            result = self._optimizer.step()
            for chunk in self._chunks:
                synchronize(chunk)
        return result

    def abort(self) -> None:
        """End the step without an update, if one is open."""
        if self in _open:
            error = MegatronRLPatchesError("the step was aborted")
            self._stack.__exit__(type(error), error, None)

    def __enter__(self) -> OptimizerStep:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        was_open = self in _open
        self.abort()
        _check(error or not was_open, "the block of begin() ended without step(): call it, or abort()")

    def _note_finalize(self, model: Any, num_tokens: Any = None, **arguments: Any) -> None:
        # In place of finalize_model_grads().
        self._tokens = num_tokens if self._tokens is None else self._tokens + num_tokens
        self._arguments = arguments


class _Microbatches(int):
    """The number of microbatches of one call. Tensors are divided by that of the whole step in its place.

    Schedules divide losses by it, and the scales of those of MoE and MTP. A factor would change last bits.
    """

    of_step: int

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map_only

        is_division = "div" in getattr(function, "__name__", "")
        args = tree_map_only(cls, lambda n: n.of_step if is_division else int(n), (args, kwargs or {}))
        return function(*args[0], **args[1])


def _check(condition: object, message: str, error: type[Exception] = MegatronRLPatchesError) -> None:
    if not condition:
        raise error(message)
