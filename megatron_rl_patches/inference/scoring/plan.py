"""A model's pass over microbatches, forward only, through Megatron's pipeline schedules."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from tqdm import tqdm

from ...common.agreement import gathered, raise_on_all
from ...common.chunks import SYNC_FUNCTIONS, as_chunks, attribute_of, config_of, modules_with_modes, unwrap
from ...common.devices import copied_together, on_device
from ...common.messages import is_rank_0
from ...common.scopes import replaced
from ...errors import InvalidInputError
from ...losses.output_layer import deferring
from ...losses.vocab.arguments import VocabParallelOptions, is_integer
from ...reentry.forward_pre_hooks import gathered_parameters, why_not_gathered
from ..models.isolation import rng_tracker_is_seeded, rng_tracker_that_does_not_fork
from .microbatches import Limits, ScoreOptions, ScoringBatch, data_of, described, parse_microbatches

Model = torch.nn.Module | Sequence[torch.nn.Module]
#: Computes ``[n, ...]`` for ``n`` response tokens, from logits ``[T, V / tp]`` and arguments of all losses.
Score = Callable[[ScoringBatch, torch.Tensor, Mapping[str, Any]], tuple[torch.Tensor, ...]]
# Classes whose attribute scales an auxiliary loss in backward.
_LOSS_SCALERS = (
    ("megatron.core.transformer.moe.moe_utils", "MoEAuxLossAutoScaler"),
    ("megatron.core.transformer.multi_token_prediction", "MTPLossAutoScaler"),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossAutoScaler"),
)


class Plan:
    """One forward-only pass over this rank's microbatches; what a rank refuses is raised on all ranks.

    Attributes:
        vocabulary: number of token ids; ``None`` if neither the options nor the model give it.
        batches: this rank's microbatches.
        rounds: number of microbatches that run; those after ``batches`` are dropped.
        alike: process groups that connect this rank with the ranks that score the same samples.
    """

    def __init__(
        self,
        model: Model,
        microbatches: Sequence[Mapping[str, Any]],
        options: ScoreOptions,
        check: Callable[[Plan], str | None] = lambda _: None,
    ) -> None:
        """Check what the caller passed, and agree on it with the ranks that would wait for this one.

        ``check`` returns what is wrong with data that only the last stage has.
        """
        self.options, self.chunks = options, list(as_chunks(model))
        self.config = config_of(next(iter(self.chunks), None))
        # In this order, what differs between last stages alone reaches every rank that would wait, too.
        self.alike = [parallel_state.get_context_parallel_group(), parallel_state.get_model_parallel_group()]
        groups, experts = list(self.alike), None
        if getattr(self.config, "num_moe_experts", None) and self.config.expert_model_parallel_size > 1:
            experts = parallel_state.get_expert_model_parallel_group()
            groups.append(experts)
        if any(getattr(chunk, "use_forward_hook", False) for chunk in self.chunks):  # may have to gather
            groups.append(parallel_state.get_data_parallel_group(with_context_parallel=True))
        self._is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        problem = data = None
        try:  # Nothing may be raised before raise_on_all: ranks that have no problem would wait for this one.
            self._limits = self._checked()
            self.batches = parse_microbatches(microbatches, options, self._limits)
            problem = check(self) if self._is_last_stage else None
            data = None if problem else data_of(self.batches, options, self._is_last_stage)
        except InvalidInputError as error:
            problem = str(error)  # the error itself would keep this frame, and the model, in a cycle
        except Exception as error:
            with suppress(InvalidInputError):
                raise_on_all(f"{type(error).__name__}: {error}", groups)
            raise
        raise_on_all(problem, groups, data, self.alike)
        self.rounds = self._agreed_rounds(experts)

    def _checked(self) -> Limits:
        """Refuse wrong options, on all stages, and chunks that cannot be scored now; return the limits."""
        chunks, options = self.chunks, self.options
        virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        if len(chunks) != virtual:
            raise InvalidInputError(
                f"the model has {len(chunks)} chunks, parallel_state a virtual pipeline size of {virtual}: "
                "pass all chunks of this rank, built for the parallel groups that are initialized."
            )
        if self.config is None:
            kind = type(chunks[0]).__name__
            raise InvalidInputError(f"the model is a {kind}. Expected: a model of Megatron's, with a config.")
        if problem := why_not_gathered(chunks):
            raise InvalidInputError(problem)
        size, padded_size = options.vocab_size, attribute_of(chunks[0], "vocab_size")
        VocabParallelOptions(temperature=options.temperature)
        if options.forward is not None and not callable(options.forward):
            raise InvalidInputError(
                f"forward is {options.forward!r}. Expected: a function of a model chunk and a microbatch."
            )
        if size is not None and not (is_integer(size) and 0 < size <= (padded_size or size)):
            raise InvalidInputError(f"vocab_size is {size!r}. Expected: 1 to {padded_size}, the model's ids.")
        self.vocabulary = size or padded_size
        try:
            torch.device(options.output_device)
        except (RuntimeError, TypeError):
            problem = f"output_device is {options.output_device!r}. Expected: a device of torch."
            raise InvalidInputError(problem) from None
        is_own = options.forward is not None
        looks_up = not is_own and attribute_of(chunks[0], "position_embedding_type") == "learned_absolute"
        tp_size = parallel_state.get_tensor_model_parallel_world_size()
        return Limits(
            vocabulary=self.vocabulary,
            sequence_parallel_size=tp_size if self.config.sequence_parallel else 1,
            # A forward of the caller's gets and returns whole sequences.
            cp_rank=0 if is_own else parallel_state.get_context_parallel_rank(),
            cp_size=1 if is_own else parallel_state.get_context_parallel_world_size(),
            device=next(chunks[-1].parameters()).device,
            positions=attribute_of(chunks[0], "max_sequence_length") if looks_up else None,
        )

    def _agreed_rounds(self, experts: torch.distributed.ProcessGroup | None) -> int:
        """Return how many microbatches this rank runs: whole groups if interleaved, as many as its replicas.

        A replica with fewer would leave those that share its experts waiting in the token dispatcher. One
        collective, if there are such replicas.
        """
        group_size = self.config.microbatch_group_size_per_vp_stage if len(self.chunks) > 1 else 1
        own = [tuple(batch.tokens_bs.shape) for batch in self.batches]
        shapes = [own] if experts is None else gathered(own, experts)
        most = max(map(len, shapes))
        rounds = most + -most % group_size
        if len(shapes) > 1 and self.config.moe_token_dispatcher_type == "allgather":
            full = [of_rank + [min(of_rank, key=math.prod)] * (rounds - len(of_rank)) for of_rank in shapes]
            for number, of_round in enumerate(zip(*full, strict=True)):
                if len(set(of_round)) > 1:
                    raise InvalidInputError(
                        f"microbatch {number} has other shapes on other expert-parallel ranks, {of_round}, "
                        "and moe_token_dispatcher_type='allgather' needs the same: pad the tokens, give all "
                        "ranks as many microbatches, or use 'alltoall'"
                    )
        return rounds

    def run(self, score: Score) -> list[tuple[torch.Tensor, ...]] | None:
        """Return for each sample its part of each tensor of ``score``; ``None`` but on the last stage.

        What is wrong with an output, and an ``InvalidInputError`` of ``score``, is raised on all stages after
        the last microbatch.
        """
        problems: list[str] = []
        smallest = min(self.batches, key=lambda batch: batch.tokens_bs.numel())
        schedule = self.batches + [smallest] * (self.rounds - len(self.batches))
        size, width = self.batches[0].tokens_bs.shape
        shows = self.options.progress and is_rank_0()  # a hidden bar would leave a semaphore behind
        how = {"desc": "scoring", "unit": "microbatch", "leave": False}
        progress = tqdm(total=self.rounds, **how) if shows else nullcontext()
        with self._scoring_state(), progress as bar:

            def forward_step(batches: Iterator[ScoringBatch], chunk: torch.nn.Module) -> Any:
                return self._step(next(batches), chunk, score, problems, bar)

            collected = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=[iter(schedule) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=self.rounds,
                seq_length=width,
                micro_batch_size=size,
                forward_only=True,
                collect_non_loss_data=True,
            )
        device = torch.device(self._limits.device)
        if device.type == "cuda" and torch.device(self.options.output_device).type == "cpu":
            torch.cuda.current_stream(device).synchronize()  # once for all copies to host memory
        raise_on_all(problems[0] if problems else None, self.alike)
        if not self._is_last_stage:
            return None
        own = collected[: len(self.batches)]
        return [of_sample for kinds in own for of_sample in zip(*kinds, strict=True)]

    def _step(
        self, batch: ScoringBatch, chunk: torch.nn.Module, score: Score, problems: list[str], bar: Any
    ) -> tuple[torch.Tensor, Callable[..., Any] | None]:
        """Run a chunk on a microbatch; return what a schedule wants: an output, and what gives the scores."""
        is_last, group = attribute_of(chunk, "post_process", True), None
        if attribute_of(chunk, "parallel_output", True):
            group = parallel_state.get_tensor_model_parallel_group()
            group = group if group.size() > 1 else None
        output = self._forward(chunk, batch.fields)
        if bar is not None and chunk is self.chunks[-1]:
            bar.update()
        every_token = self.options.every_token
        if problem := _problem_with(output, batch, is_last, every_token):
            problems.append(problem)
            # Other ranks wait for this one: the next stage for an activation [s, b, h], others for a score.
            shape = *batch.tokens_bs.T.shape, self.config.hidden_size
            if is_last:
                vocabulary = 1 if every_token else attribute_of(chunk, "vocab_size") or 1
                shape = *batch.layout.logits_shape, -(-vocabulary // (group.size() if group else 1))
            output = next(chunk.parameters()).new_zeros(shape)
        if not is_last:
            return output, None
        how = {"temperature": self.options.temperature, "vocab_size": self.options.vocab_size}
        scores: list[tuple[torch.Tensor, ...]] = []
        try:
            rows = batch.layout.response_slices
            parts = score(batch, output.flatten(0, 1), {"tp_group": group, "rows": rows, **how})
            cp_group = parallel_state.get_context_parallel_group() if self._limits.cp_size > 1 else None
            responses = [torch.cat(batch.layout.gather_responses(part, cp_group)) for part in parts]
            # One copy for all: each block of pinned memory may make the GPU wait.
            copies = copied_together(responses, self.options.output_device)
            scores.extend(torch.split(copy, list(batch.layout.response_lengths)) for copy in copies)
        except InvalidInputError as error:  # the other stages wait for this one until the schedule ends
            problems.append(str(error))
        # Return a dummy: the schedule would keep the logits while the next microbatch runs.
        return output.new_zeros(1), lambda output, non_loss_data: scores

    def _forward(self, chunk: torch.nn.Module, fields: Mapping[str, Any]) -> Any:
        if self.options.forward is not None:
            return self.options.forward(chunk, fields)
        device, rank = next(chunk.parameters()).device, self._limits.cp_rank
        tokens_bs = on_device(fields["tokens"], device)
        inputs = [tokens_bs, torch.arange(tokens_bs.shape[1], device=device).expand_as(tokens_bs)]
        if self._limits.cp_size > 1:  # this rank's two pieces of each sequence, as ``get_batch`` cuts it
            pieces = [values_bs.chunk(2 * self._limits.cp_size, dim=1) for values_bs in inputs]
            inputs = [torch.cat([parts[rank], parts[-1 - rank]], dim=1) for parts in pieces]
        return chunk(*inputs, None, **_without_float32_copy(chunk))

    @contextmanager
    def _scoring_state(self) -> Iterator[None]:
        """Switch the model to eval mode and the settings of a forward-only pass; restore both at the end."""
        # If shapes differ, the stages tell each other every shape.
        variable = self.options.forward is not None or self.config.variable_seq_lengths
        variable = variable or len({batch.tokens_bs.shape for batch in self.batches}) > 1
        with torch.no_grad(), gathered_parameters(self.chunks), ExitStack() as stack:
            stack.callback(_restore_modes, self.chunks, modules_with_modes(self.chunks))
            for chunk in self.chunks:
                chunk.eval()
            # Megatron forks the RNG tracker for dropout, also in eval mode; an unseeded one cannot fork.
            if not rng_tracker_is_seeded():
                stack.enter_context(rng_tracker_that_does_not_fork())
            for model, config in [(unwrap(chunk), config_of(chunk)) for chunk in self.chunks]:
                stack.enter_context(deferring(model))
                # Multi-token prediction is left out: megatron-core up to 0.16 needs labels to run its layers.
                stack.enter_context(replaced(model, mtp_process=False))
                if config is not None:  # chunks may share one
                    stack.enter_context(replaced(config, mtp_num_layers=None))
            # Schedules call sync functions in ``no_sync``. Only a backward pass undoes some, and none comes.
            without = dict.fromkeys(("timers", *SYNC_FUNCTIONS))
            stack.enter_context(replaced(self.config, **without, variable_seq_lengths=variable))
            # Schedules set these scales for the whole process, forward only, too: in place, if they exist.
            for module, name in _LOSS_SCALERS:
                if (scaler := getattr(sys.modules.get(module), name, None)) is not None:
                    stack.enter_context(replaced(scaler, main_loss_backward_scale=None))
            yield


def _restore_modes(chunks: Sequence[torch.nn.Module], modes: Sequence[tuple[Any, bool]]) -> None:
    for module, training in modes:
        module.training = training
    for chunk in chunks:
        # The stage keeps the last activation that it received. This frees it.
        attribute_of(chunk, "set_input_tensor")([None])


def _without_float32_copy(chunk: Any) -> dict[str, bool]:
    """Return the argument, new in megatron-core 0.15, that saves a copy of all logits in float32."""
    while chunk is not None:
        if "fp32_output" in inspect.signature(chunk.forward).parameters:
            return {"fp32_output": False}
        chunk = getattr(chunk, "module", None)
    return {}


def _problem_with(output: Any, batch: ScoringBatch, is_last: bool, are_values: bool) -> str | None:
    """Say what is wrong with the output of a chunk or of ``options.forward``; ``None`` if nothing is."""
    if not isinstance(output, torch.Tensor):
        return f"`forward` returned {described(output)}. Expected: what the chunk returns."
    if is_last and (output.dim() != 3 or output.shape[:2] != batch.layout.logits_shape):
        return (
            f"`forward` returned {list(output.shape)} on the last stage. Expected: logits "
            f"[{', '.join(map(str, batch.layout.logits_shape))}, vocabulary / tp], as the tokens are."
        )
    if is_last and output.shape[2] == 1 and not are_values:
        return "the model returned one number per token, as a critic does, not logits: call forward_values"
    return None
