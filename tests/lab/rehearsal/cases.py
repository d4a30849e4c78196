"""What is rehearsed: ``python -m tests.lab.rehearsal.cases PART`` prints a part of :data:`PARTS` as JSON.

A case gets a dtype, and runs forward and backward. In those of :data:`CONDITIONS_HOLD` the GPU's answer is
that conditions hold: there are ties, an id is ruled out, tokens count, or another rank was interrupted. What
the head takes at sizes that others have published is counted, as a file beside its page.
"""

import importlib.util
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl_patches import losses
from megatron_rl_patches.common.devices import on_device
from megatron_rl_patches.losses.vocab.divergences import DIVERGENCES
from megatron_rl_patches.losses.vocab.output_layer import add_product
from tests.lab.rehearsal.recorder import Recorder, recording
from tests.references.heads import ALL_KEPT, BASE, DEFERRED, NOT_IN_PLACE, QUARTER, STOCK, Setup

SETUPS = (
    Setup(8192, 4096, 151936, torch.bfloat16),
    Setup(8192, 4096, 131072, torch.bfloat16),
    Setup(4096, 4096, 131072, torch.bfloat16),
    *(Setup(8192, 4096, size, torch.bfloat16) for size in (32768, 65536, 98304, 196608, 262144)),
)

ROWS, HIDDEN, VOCABULARY = 1024, 512, 32768
LOGITS_OF_TILE = ROWS * VOCABULARY // 4
GPU = torch.device("cuda")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Case = Callable[[torch.dtype], Any]


def keeping_all(hidden: Tensor, weight: Tensor) -> Tensor:
    keep_bytes = len(hidden) * len(weight) * weight.element_size()
    return losses.deferred_logits(hidden, weight, keep_bytes=keep_bytes)


def materialized(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden @ weight.T).float()  # as Megatron returns them


def stock(logits: Tensor, _: Tensor, rows: Any = slice(None), **__: Any) -> list[Tensor]:
    """Return what slime's own function computes of all rows at temperature 1, at some of them."""
    function = importlib.import_module("slime.utils.ppo_utils").calculate_log_probs_and_entropy
    return [x[rows] for x in function(logits, ids(len(logits)), None, with_entropy=True)]


PLAIN_OPERATORS, A_QUARTER = f"{DEFERRED}, plain operators", {"rows": slice(0, None, 4)}
HEADS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], dict[str, Any]]] = {
    BASE: (materialized, {"inplace_backward": True}),
    NOT_IN_PLACE: (materialized, {}),
    f"{NOT_IN_PLACE}{QUARTER}": (materialized, A_QUARTER),
    DEFERRED: (losses.deferred_logits, {}),
    f"{DEFERRED}{QUARTER}": (losses.deferred_logits, A_QUARTER),
    PLAIN_OPERATORS: (losses.deferred_logits, {"fused": False}),
    ALL_KEPT: (keeping_all, {}),
    STOCK: (materialized, {}),
    f"{STOCK}{QUARTER}": (materialized, A_QUARTER),
}


# --- what the head takes


def count(setup: Setup, head: str) -> tuple[Recorder, int, int]:
    """Count log-probabilities and entropies at a temperature, forward and backward, of all rows.

    Return the record, the bytes of the inputs, and those at the peak beyond inputs and gradients.
    """
    make, options = HEADS[head]
    function = stock if head.startswith(STOCK) else losses.vocab_parallel_log_probs_and_entropy
    with recording() as recorder:
        hidden, weight = layer(setup.dtype, setup.hidden, rows=setup.rows, columns=setup.vocabulary)
        rows = range(setup.rows)[options.get("rows", slice(None))]
        targets = ids(len(rows))  # which the caller holds until the end
        options = {"temperature": 0.8, **options}
        values = function(make(hidden, weight), targets, **options)
        sum(value.sum() for value in values).backward()
        assert not recorder.waits
        inputs = hidden.nbytes + weight.nbytes
        return recorder, inputs, recorder.peak - 2 * inputs


def heads() -> dict[str, list[dict[str, str]]]:
    """Return what each head takes, and the products of deferred logits; stock code needs slime."""
    memory, products = dict[str, list[dict[str, str]]](), []
    for setup, head in product(SETUPS, HEADS if importlib.util.find_spec("slime") else [*HEADS][:-2]):
        record, inputs, peak = count(setup, head)
        sizes = {"beyond gradients": peak, "with gradients": peak + inputs}
        sizes["with inputs and gradients"] = peak + 2 * inputs
        passes = ", ".join(f"{n} × `{name}`" for name, n in record.row_passes.items())
        memory.setdefault("stock" if head.startswith(STOCK) else "heads", []).append(
            {"set-up": str(setup), "head": head, "products": str(record.products.total())}
            | {"small operations": str(record.small_operations)}
            | {name: f"{n / 2**30:.2f} GiB, {n / setup.logits_bytes:.3f}" for name, n in sizes.items()}
            | {"row passes": passes}
        )
        for name, number in record.products.items() if head == DEFERRED else ():
            products.append({"set-up": str(setup), "products, deferred": name, "how often": str(number)})
    return {**memory, "products": products}


def with_64_ids() -> dict[str, dict[str, int]]:
    """Return what selecting ids takes, and log-probabilities at ids, forward and backward."""
    setup, k = SETUPS[1], 64
    of_responses = [slice(0, 1000), slice(1000, setup.rows)]  # the first one is shorter than a block

    def selection(logits: Tensor) -> None:
        losses.vocab_parallel_topk(logits.detach(), k, rows=of_responses)

    def log_probs_at(logits: Tensor) -> None:
        options: dict[str, Any] = {"rows": of_responses, "with_tail": True}
        backward(logits, *losses.vocab_parallel_log_probs_at(logits, ids(setup.rows, k), **options))

    counts = {}
    for function in (selection, log_probs_at):
        with recording() as recorder:
            size = setup.rows, setup.vocabulary
            function(torch.empty(size, device=GPU, dtype=setup.dtype, requires_grad=True))
        of_all = {"small operations": recorder.small_operations, "bytes": recorder.moved}
        counts[function.__name__] = of_all | recorder.row_passes
    return counts


# --- cases


def layer(
    dtype: torch.dtype, width: int = HIDDEN, trains: bool = True, rows: int = ROWS, columns: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    """Return hidden states, which train, and the weight of an output layer."""
    hidden = torch.empty(rows, width, requires_grad=True, device=GPU, dtype=dtype)
    return hidden, torch.empty(columns, width, requires_grad=trains, device=GPU, dtype=dtype)


def logits_of(hidden: Tensor, weight: Tensor, is_deferred: bool = True) -> Tensor:
    return losses.deferred_logits(hidden, weight) if is_deferred else hidden @ weight.T


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, device=GPU, dtype=torch.int64)


def backward(hidden: Tensor, *values: Tensor) -> None:
    for value in values:
        assert value.device == hidden.device and value.dtype == torch.float32, value
    torch.stack([value.sum() for value in values]).sum().backward()
    assert hidden.grad is not None
    assert (hidden.grad.dtype, hidden.grad.device) == (hidden.dtype, hidden.device)


def log_probs(
    dtype: torch.dtype,
    *,
    deferred: dict[str, Any] | None = None,
    some_rows: bool = False,
    mask: bool = False,
    trains: bool = True,
    entropy: bool = True,
    **options: Any,
) -> None:
    hidden, weight = layer(dtype, trains=trains)
    n = ROWS
    if some_rows:  # from host memory, as the rows of responses are
        options["rows"], n = on_device(torch.arange(0, ROWS, 2), GPU), ROWS // 2
    if mask:
        options["keep_mask"] = torch.empty(n, VOCABULARY, dtype=torch.bool, device=GPU)
    if deferred is None:
        logits, options["temperature"] = hidden @ weight.T, 0.8
    else:
        logits = losses.deferred_logits(hidden, weight, **deferred)
    if entropy:
        backward(hidden, *losses.vocab_parallel_log_probs_and_entropy(logits, ids(n), **options))
    else:
        backward(hidden, losses.vocab_parallel_log_probs(logits, ids(n), **options))
    assert (weight.grad is not None and weight.grad.dtype == dtype) == trains


def log_probs_of_kept_tiles(dtype: torch.dtype) -> None:
    log_probs(dtype, deferred={"keep_bytes": 1 << 30, "tile_bytes": LOGITS_OF_TILE * dtype.itemsize})


@torch.no_grad()
def scoring(dtype: torch.dtype) -> None:
    losses.vocab_parallel_log_probs_and_entropy(logits_of(*layer(dtype)), ids(ROWS))


def main_grad(dtype: torch.dtype) -> None:
    """The product that adds a tile's gradient to ``main_grad``, which is in float32."""
    (hidden, weight), gradient = layer(dtype), torch.empty(ROWS, VOCABULARY, device=GPU, dtype=dtype)
    add_product(torch.zeros(weight.shape, device=GPU), gradient.T, hidden.detach())


def top_k(dtype: torch.dtype, is_deferred: bool = False) -> None:
    hidden, weight = (x.detach() for x in layer(dtype))
    chosen = losses.vocab_parallel_topk(logits_of(hidden, weight, is_deferred), 8)
    assert chosen.indices.device == hidden.device and chosen.indices.shape == (ROWS, 8)


def at_ids(dtype: torch.dtype, is_deferred: bool = False) -> None:
    hidden, weight = layer(dtype)
    logits = logits_of(hidden, weight, is_deferred)
    backward(hidden, *losses.vocab_parallel_log_probs_at(logits, ids(ROWS, 8), with_tail=True))


def divergence(dtype: torch.dtype, name: Any) -> None:
    hidden, weight = layer(dtype)
    teacher, student = logits_of(*layer(dtype, HIDDEN // 2)), logits_of(hidden, weight)
    old = logits_of(*layer(dtype)) if DIVERGENCES[name].needs_old else None
    backward(hidden, losses.full_vocabulary_divergence(student, teacher, divergence=name, old=old))


def host_memory(dtype: torch.dtype) -> None:
    """A teacher's hidden states and output layer wait in host memory."""
    hidden, weight = layer(dtype)
    of_teacher, its_weight = (x.detach() for x in layer(dtype, HIDDEN // 2))
    head = losses.OutputHead(its_weight).copied_to("cpu")
    waiting = losses.FullDistribution.from_hidden(of_teacher, head).to("cpu")
    assert not waiting.hidden[0].is_cuda and not waiting.heads[0].weight.is_cuda
    teacher = waiting.to(GPU).logits()
    backward(hidden, losses.full_vocabulary_divergence(logits_of(hidden, weight), teacher))


def microbatch(dtype: torch.dtype) -> tuple[Tensor, Tensor, losses.SequenceLayout, list[Tensor]]:
    """Return hidden states, logits ``[1, T, V]``, and layout and masks of two responses."""
    hidden, weight = layer(dtype)
    layout = losses.SequenceLayout.build([ROWS // 2] * 2, [ROWS // 4] * 2, device=GPU)
    masks = [torch.ones(length) for length in layout.response_lengths]
    return hidden, losses.deferred_logits(hidden[None], weight), layout, masks


def policy(dtype: torch.dtype) -> None:
    """A policy loss, whose batch is on the GPU already."""
    hidden, logits, layout, masks = microbatch(dtype)
    of_tokens = [on_device(mask, GPU) for mask in masks]
    batch = losses.PolicyBatch(*[of_tokens] * 5)
    options = losses.PolicyOptions(entropy_coef=0.1, kl_coef=0.1, tis_clip=2.0)
    backward(hidden, losses.make_loss_func([ids(ROWS // 2)] * 2, layout, batch, options)(logits)[0])


def distillation(dtype: torch.dtype, is_full: bool) -> None:
    """A distillation loss, whose teacher and masks come from host memory."""
    hidden, logits, layout, masks = microbatch(dtype)
    if is_full:
        head = losses.OutputHead(torch.empty(VOCABULARY, HIDDEN, device=GPU, dtype=dtype)).copied_to("cpu")
        teacher: Any = losses.FullDistribution.from_hidden(torch.empty(ROWS // 2, HIDDEN, dtype=dtype), head)
    else:
        k_ids = torch.arange(8).expand(ROWS // 2, -1)
        teacher = losses.TopKDistribution(k_ids, torch.zeros(k_ids.shape), torch.zeros(len(k_ids)))
    batch = losses.DistillationBatch([teacher.split(layout.response_lengths)], masks)
    backward(hidden, losses.make_distillation_loss_func(layout, batch)(logits)[0])


def mixture_of_top_k(dtype: torch.dtype) -> None:
    known = torch.zeros(ROWS, 8, device=GPU), torch.zeros(ROWS, device=GPU)
    teachers = [losses.TopKDistribution(ids(ROWS, 8), *known) for _ in range(2)]
    assert losses.TopKDistribution.mixture(teachers, [1.0, 2.0]).log_probs.is_cuda


def tensor_parallel(dtype: torch.dtype) -> None:
    """Log-probs, top-k and a divergence on the first of two ranks; what the other one sends is missing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        (hidden, weight), group = layer(dtype), dist.group.WORLD
        logits = logits_of(hidden, weight)
        backward(hidden, *losses.vocab_parallel_log_probs_and_entropy(logits, ids(ROWS), tp_group=group))
        chosen = losses.vocab_parallel_topk(logits.detach(), 8, tp_group=group).indices
        backward(hidden, *losses.vocab_parallel_log_probs_at(logits, chosen, with_tail=True, tp_group=group))
        teacher = logits_of(*layer(dtype))
        backward(hidden, losses.full_vocabulary_divergence(logits, teacher, tp_group=group))
    finally:
        dist.destroy_process_group()


def on_model(dtype: torch.dtype, case: str) -> None:
    from tests.lab.rehearsal import models  # which needs megatron-core, and not only to name the cases

    getattr(models, case)(dtype)


OF_DIVERGENCES = {n: 8 for n in DIVERGENCES if n != "generalized_kl"} | {"reverse_kl": 6, "forward_kl": 6}
#: What is run, and how many products of all rows and columns it takes, with that of materialized logits and
#: its two in backward. Small tiles multiply more often in float32, and an old torch twice for ``main_grad``.
LOSSES: dict[str, tuple[Case, int | None]] = {
    "log-probs and entropy": (log_probs, 3),
    "log-probs and entropy, in place": (partial(log_probs, inplace_backward=True), 3),
    "log-probs and entropy, plain operators": (partial(log_probs, fused=False), 3),
    "keep-mask": (partial(log_probs, mask=True), 3),
    "scattered rows": (partial(log_probs, some_rows=True), 3),
    "scattered rows, in place": (partial(log_probs, some_rows=True, inplace_backward=True), 3),
    "deferred": (partial(log_probs, deferred={}), 3),
    "deferred, some rows": (partial(log_probs, deferred={}, some_rows=True), 3),
    "deferred, small tiles": (partial(log_probs, deferred={"tile_bytes": 1 << 23}), None),
    "deferred, tiles kept": (log_probs_of_kept_tiles, 4 * 3),
    "deferred, frozen": (partial(log_probs, deferred={}, trains=False), 2),
    "deferred, frozen, no entropy": (partial(log_probs, deferred={}, trains=False, entropy=False), 2),
    "deferred, scoring": (scoring, 1),
    "main_grad": (main_grad, None),
    "top-k": (top_k, 1),
    "top-k, deferred": (partial(top_k, is_deferred=True), 1),
    "top-k, ties": (top_k, 1),
    "mixture of top-k": (mixture_of_top_k, 0),
    "log-probs at ids": (at_ids, 3),
    "log-probs at ids, deferred": (partial(at_ids, is_deferred=True), 3),
    **{name: (partial(divergence, name=name), n) for name, n in OF_DIVERGENCES.items()},
    "reverse_kl, ids ruled out": (partial(divergence, name="reverse_kl"), 8),
    "host memory": (host_memory, 6),
    "policy loss": (policy, 3),
    "distillation, top-k": (partial(distillation, is_full=False), 3),
    "distillation, whole vocabulary": (partial(distillation, is_full=True), 8),
    "tensor parallel": (tensor_parallel, 3 + 1 + 3 + 6),
}
MODELS: dict[str, tuple[Case, int | None]] = {
    "lean-head, main_grad of DDP": (partial(on_model, case="lean_head"), None),
    "re-entry": (partial(on_model, case="re_entry"), None),
    "re-entry, another rank broke off": (partial(on_model, case="re_entry"), None),
    "TeacherPool": (partial(on_model, case="teachers"), None),
}
CASES = LOSSES | MODELS
#: In these nothing is compiled; a model of the tests has too few logits.
PLAIN = {"log-probs and entropy, plain operators", "lean-head, main_grad of DDP", "TeacherPool"}
CONDITIONS_HOLD = {
    "top-k, ties",
    "mixture of top-k",
    "reverse_kl, ids ruled out",
    "distillation, whole vocabulary",
    "re-entry, another rank broke off",
}


def records(cases: dict[str, tuple[Case, int | None]]) -> dict[str, dict[str, Any]]:
    found = {}
    for (name, (case, _)), (key, dtype) in product(cases.items(), DTYPES.items()):
        error = ""
        with recording(name in CONDITIONS_HOLD) as recorder:
            try:
                case(dtype)
            except Exception:
                error = traceback.format_exc()
        counts = {"products": recorder.products.total(), "plain passes": recorder.plain_passes.total()}
        found[f"{name}, {key}"] = {"error": error, "waits": recorder.waits, **counts}
    return found


PARTS: dict[str, Callable[[], Any]] = {
    "losses": partial(records, LOSSES),
    "models": partial(records, MODELS),
    "counted": heads,
    "with 64 ids": with_64_ids,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(PARTS[sys.argv[1]]()), flush=True)
    os._exit(0)  # an orderly end would release streams that are not there
