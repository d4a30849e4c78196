"""Memory, time and error of losses over logits: ours, the usual formulas, and those of other frameworks."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_rl_patches.losses import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy
from tests.references.dense import dense_log_probs_and_entropy

from . import candidates
from .candidates import NEMO_RL, Candidate, calls, checkout, revisions
from .logits import REFERENCE_ROWS, Logits, LogitsSetup
from .measure import TURNS, Call, Result, largest_error, left_out, on_ranks, rows
from .page import Benchmark, Parts, Table

LOG_PROBS, ENTROPY, ENTROPY_GRAD = MODES = ("log-probs", "+ entropy", "+ entropy with gradient")
ERRORS = dict.fromkeys(("gradient error", "log-prob error", "entropy error"), ".0e")
# The larger vocabulary and two ranks in float32 alone, so that a run takes a few minutes.
SETUPS = (
    LogitsSetup(1, 2048, 32768),
    LogitsSetup(1, 2048, 32768, torch.bfloat16),
    LogitsSetup(1, 1024, 151936),
    LogitsSetup(2, 2048, 32768),
)

Group = dist.ProcessGroup
#: Log-probs and, but for the first mode, entropies.
Values = tuple[Tensor, ...]
#: (logits [T, V / tp], targets [T] in the whole vocabulary, group, mode) -> values.
Loss = Callable[[Tensor, Tensor, Group, str], Values]


def ours(logits: Tensor, targets: Tensor, group: Group, mode: str, **options: Any) -> Values:
    if mode == LOG_PROBS:
        return (vocab_parallel_log_probs(logits, targets, tp_group=group, **options),)
    options["entropy_grad"] = mode == ENTROPY_GRAD
    return vocab_parallel_log_probs_and_entropy(logits, targets, tp_group=group, **options)


def naive(logits: Tensor, targets: Tensor, group: Group, mode: str) -> Values:
    log_p = torch.log_softmax(logits.float(), -1)
    log_probs = log_p.gather(1, targets[:, None]).squeeze(1)
    return _with_entropy(log_probs, lambda: -(log_p.exp() * log_p).sum(-1), mode)


def megatron_cross_entropy(logits: Tensor, targets: Tensor, group: Group, mode: str) -> Values:
    from megatron.core import tensor_parallel

    return (-tensor_parallel.vocab_parallel_cross_entropy(logits.float(), targets),)


def megatron_fused_cross_entropy(logits: Tensor, targets: Tensor, group: Group, mode: str) -> Values:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    return (-fused_vocab_parallel_cross_entropy(logits.float(), targets, group),)


def slime(
    module: Any, logits: Tensor, targets: Tensor, group: Group, mode: str, chunk_size: int = -1
) -> Values:
    log_probs, entropy = module.calculate_log_probs_and_entropy(
        logits.float(),  # as its Megatron model returns them
        targets,
        group,
        with_entropy=mode != LOG_PROBS,
        with_entropy_grad=mode == ENTROPY_GRAD,
        chunk_size=chunk_size,
    )
    return (log_probs.view(-1),) if mode == LOG_PROBS else (log_probs.view(-1), entropy)


def verl(module: Any, logits: Tensor, targets: Tensor, group: Group, mode: str) -> Values:
    """As its Megatron engine calls them: the entropy needs a copy, since the log-probs destroy the logits."""
    logits = logits.float()
    copy = logits if mode == LOG_PROBS else logits.clone()
    with torch.set_grad_enabled(mode == ENTROPY_GRAD):
        entropies = () if mode == LOG_PROBS else (module.vocab_parallel_entropy(logits),)
    return module.vocab_parallel_log_probs_from_logits(copy, targets), *entropies


def nemo_rl(module: Any, logits: Tensor, targets: Tensor, group: Group, mode: str, chunk_size: int) -> Values:
    start, batch = group.rank() * logits.shape[1], logits[None]
    place = (start, start + logits.shape[1])
    log_probs = module.ChunkedDistributedLogprob.apply(batch, targets[None], *place, chunk_size, group, False)

    def entropy() -> Tensor:
        return -module.ChunkedDistributedEntropy.apply(batch, chunk_size, group, False)[0]

    return _with_entropy(log_probs[0], entropy, mode)


def liger(module: Any, logits: Tensor, targets: Tensor, group: Group, mode: str) -> Values:
    return (-module.liger_cross_entropy(logits, targets, reduction="none"),)


def minimal(logits: Tensor, targets: Tensor, group: Group, mode: str) -> Values:
    """What our formulas cost at least on a CPU: compiled functions that do no more than they must."""
    log_prob, entropy = _Minimal.apply(logits, targets)  # type: ignore[no-untyped-call, unused-ignore]
    return log_prob, entropy


class _Minimal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Any:
        max_logit, sum_exp, sum_z_exp = _minimal_statistics(logits)
        log_sum, mean_z = sum_exp.log(), sum_z_exp / sum_exp
        ctx.save_for_backward(logits, targets, max_logit, sum_exp, mean_z)
        target_logit = logits.gather(1, targets[:, None])
        return (target_logit - max_logit - log_sum).squeeze(1), (log_sum - mean_z).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, targets, max_logit, sum_exp, mean_z = ctx.saved_tensors
        of_log_prob, of_entropy = (gradient[:, None] for gradient in gradients)
        a, b = (of_entropy * mean_z - of_log_prob) / sum_exp, -of_entropy / sum_exp
        gradient = _minimal_gradient(logits, max_logit, a, b)
        gradient[torch.arange(len(targets), device=targets.device), targets] += of_log_prob[:, 0]
        return gradient, None


@partial(torch.compile, dynamic=False)
def _minimal_statistics(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    max_logit = logits.float().amax(1, keepdim=True)
    z = logits - max_logit
    exp_z = (z * math.log2(math.e)).exp2()
    return max_logit, exp_z.sum(1, keepdim=True), (z * exp_z).sum(1, keepdim=True)


@partial(torch.compile, dynamic=False)
def _minimal_gradient(logits: Tensor, max_logit: Tensor, a: Tensor, b: Tensor) -> Tensor:
    z = logits - max_logit
    return ((z * math.log2(math.e)).exp2() * (a + b * z)).to(logits.dtype)


def _liger_module() -> Any:
    if not torch.cuda.is_available():
        raise RuntimeError("needs a GPU")
    return importlib.import_module("liger_kernel.transformers.functional")


def _with_entropy(log_probs: Tensor, entropy: Callable[[], Tensor], mode: str) -> Values:
    if mode == LOG_PROBS:
        return (log_probs,)
    with torch.set_grad_enabled(mode == ENTROPY_GRAD):
        return log_probs, entropy()


NAIVE, SLIME, PLAIN, COMPILED = "naive autograd", "slime", "ours, plain", "ours, compiled"
MINIMAL = "minimal, compiled"
COMPILED_IN_PLACE, PLAIN_IN_PLACE = f"{COMPILED}, in place", f"{PLAIN}, in place"
CANDIDATES = (
    Candidate(COMPILED, partial(ours, fused=True)),
    Candidate(COMPILED_IN_PLACE, partial(ours, fused=True, inplace_backward=True)),
    Candidate(PLAIN, partial(ours, fused=False)),
    Candidate(PLAIN_IN_PLACE, partial(ours, fused=False, inplace_backward=True)),
    Candidate(MINIMAL, minimal, splits_vocabulary=False, modes=(ENTROPY_GRAD,)),
    Candidate(NAIVE, naive, splits_vocabulary=False),
    Candidate(
        "naive, checkpointed", partial(checkpoint, naive, use_reentrant=False), splits_vocabulary=False
    ),
    Candidate("Megatron cross entropy", megatron_cross_entropy, modes=(LOG_PROBS,)),
    Candidate("Megatron fused cross entropy", megatron_fused_cross_entropy, modes=(LOG_PROBS,)),
    Candidate(SLIME, slime, candidates.SLIME),
    Candidate("slime, chunks of 1024", partial(slime, chunk_size=1024), candidates.SLIME),
    Candidate("verl (Megatron)", verl, checkout("verl", "verl.utils.megatron.tensor_parallel")),
    Candidate("NeMo-RL, chunks of 128", partial(nemo_rl, chunk_size=128), NEMO_RL),
    Candidate("Liger", liger, _liger_module, splits_vocabulary=False, modes=(LOG_PROBS,)),
)


def with_mode(mode: str) -> list[Candidate]:
    return [candidate for candidate in CANDIDATES if mode in (candidate.modes or MODES)]


class Inputs(Logits):
    """What a rank's losses are given."""

    def __init__(self, setup: LogitsSetup, group: Group) -> None:
        super().__init__(setup, group)
        self.targets = torch.randint(setup.vocab, (setup.rows,), **self.options)
        self.weights = torch.randn(2, setup.rows, **self.options)

    def both(self, mode: str, loss: Loss) -> Call:
        """Return the call of forward and backward."""
        return Call(
            lambda logits: self._gradient_and_values(loss, mode, logits),
            self.fresh,
            # Forward reads the logits. Backward reads them again and writes the gradient.
            least_bytes=3 * self.pristine.nbytes,
            details=lambda: self._errors(loss, mode),
        )

    def _gradient_and_values(self, loss: Loss, mode: str, logits: Tensor) -> tuple[Tensor, ...]:
        values = loss(logits, self.targets, self.group, mode)
        trained = [value for value in values if value.requires_grad]
        weights = [weight.to(value.dtype) for weight, value in zip(self.weights, trained, strict=False)]
        return torch.autograd.grad(trained, logits, weights)[0], *values

    def _errors(self, loss: Loss, mode: str) -> tuple[float, ...]:
        """Return the errors of the gradient, of the log-probs and of the entropy, of the first rows."""
        leaf = self.first_rows.double().requires_grad_()
        values = dense_log_probs_and_entropy(leaf, self.targets[:REFERENCE_ROWS].cpu())
        weights = self.weights[:, :REFERENCE_ROWS].cpu().double()
        trained = 2 if mode == ENTROPY_GRAD else 1
        [gradient] = torch.autograd.grad(values[:trained], leaf, list(weights[:trained]))
        measured = self._gradient_and_values(loss, mode, self.fresh())
        expected = (gradient[:, self.columns], *values)
        return tuple(largest_error(a[:REFERENCE_ROWS], b) for a, b in zip(measured, expected, strict=False))


def measure(quick: bool) -> list[Result]:
    setups = [replace(setup, rows=128) for setup in SETUPS[::3]] if quick else SETUPS
    return on_ranks(_measure, setups, turns=1 if quick else TURNS)


def _measure(setup: LogitsSetup, turns: int) -> Result:
    warnings.simplefilter("ignore")  # of frameworks and of megatron-core, about what is not installed
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=setup.tp_size)
    inputs = Inputs(setup, parallel_state.get_tensor_model_parallel_group())
    result = Result(setup)
    for mode in MODES:
        compared = calls(with_mode(mode), partial(inputs.both, mode), result.left_out, setup.tp_size)
        result.measure(mode, inputs.copy() | compared, turns)
    return result


#: The most memory of ours, in that of the logits.
MEMORY = {COMPILED: 1.02, PLAIN: 1.02, COMPILED_IN_PLACE: 0.02, PLAIN_IN_PLACE: 0.02}
#: Without AVX-512 an exponential costs more, and slime, which keeps its softmax, takes none in backward.
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
#: The most time of ours in that of others, by mode.
TIME = {
    (COMPILED, MINIMAL): (1.05, 1.05, 1.05),
    (COMPILED, SLIME): (1 / 1.5, 1 / 1.8, 1 / (3.5 if HAS_AVX512 else 2.0)),
    (COMPILED_IN_PLACE, SLIME): (0.5, 0.5, 0.5),
    (COMPILED, NAIVE): (1 / 0.9, 0.5, 0.4),
    (PLAIN, NAIVE): (1 / 0.9, 1 / 0.9, 1 / 0.9),
}


def claims(results: Sequence[Result]) -> Iterator[dict[str, str]]:
    """Compare memory and speed of float32 logits on one rank with what is claimed."""

    def row(claim: str, result: Result, of: str, measured: float, most: float) -> dict[str, str]:
        numbers = {"measured": f"{measured:.3f}", "limit": f"<= {most:.3g}"}
        reached = "yes" if measured <= most else "no"
        return {"claim": claim, "set-up": f"{result.setup}, {of}", **numbers, "met": reached}

    for result in (r for r in results if r.setup.dtype == torch.float32 and r.setup.tp_size == 1):
        for mode, (name, most) in product(MODES, MEMORY.items()):
            yield row(f"{name}: memory, × logits", result, mode, result.memory(mode, name), most)
        for (name, other), of_modes in TIME.items():
            for mode, most in zip(MODES, of_modes, strict=True):
                if result.cost(mode, other):
                    ratio = result.duration(mode, name) / result.duration(mode, other)
                    yield row(f"{name}: time, × {other}", result, mode, ratio, most)


def parts(results: Sequence[Result]) -> Parts:
    return {
        "peers": revisions("Compared with", "slime", "verl", "nemo-rl", "liger-kernel"),
        "claims": Table(2, [*claims(results)]),
        "losses": rows(results, "mode", "loss", ERRORS),
        "left out": left_out(results),
    }


BENCHMARK = Benchmark(
    measure, parts, is_met=lambda results: all(claim["met"] == "yes" for claim in claims(results))
)
