"""Losses in bfloat16 on a GPU against the formulas in float64, and ``reentrant-train`` with NCCL.

In a dry run of ``make gpu`` all of it is on the CPU.
"""

import itertools
import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl_patches import losses
from megatron_rl_patches.losses.vocab.divergences import DIVERGENCES
from megatron_rl_patches.losses.vocab.output_layer import add_product
from megatron_rl_patches.testing import TinyModel
from tests.gpu import parameter_marks
from tests.lab.kernels.machine_code import digests, recorded_digests
from tests.lab.kernels.sources import CASES, generated_codes
from tests.lab.rehearsal import cases
from tests.lab.rehearsal.test_rehearsal import WAITS
from tests.ranks import on_ranks
from tests.real.test_reentry import check_rollouts
from tests.references.dense import dense_divergence, dense_log_probs_and_entropy, relative_error, selected
from tests.references.live_bytes import peak_bytes
from tests.references.losses import Inputs, measure
from tests.references.one_device import gpu_or_cpu

IS_DRY = bool(os.environ.get("GPU_DRY_RUN"))
#: Cases of the rehearsal in which nothing waits; one divergence of many, since each takes long to compile.
LEFT_OUT = {*WAITS, *DIVERGENCES} - {"jensen_shannon"}
WITHOUT_WAITS = [case for case in cases.LOSSES if case not in LEFT_OUT]
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
DEVICE = torch.device("cpu" if IS_DRY else "cuda")

pytestmark = [
    # Of torch about its own compiler, which differ from torch to torch.
    pytest.mark.filterwarnings("default"),
    pytest.mark.gpu,
    pytest.mark.skipif(not (IS_DRY or torch.cuda.is_available()), reason="there is no GPU"),
]
ROWS, HIDDEN, VOCABULARY = (64, 32, 2048) if IS_DRY else (512, 256, 32768)
TEMPERATURE = 0.8
log_probs_and_entropy = partial(losses.vocab_parallel_log_probs_and_entropy, temperature=TEMPERATURE)
# Gradients in bfloat16 have eight significant bits; those of hidden states and weight are sums of such.
ROUNDING, OF_SUMS = 2**-8, 0.02


def random(*shape: int, seed: int = 0) -> Tensor:
    """Return the same normal numbers on every device, in bfloat16."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def random_ids(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain operators": {"fused": False},
    "compiled": {"fused": True},
    "compiled, in place": {"fused": True, "inplace_backward": True},
    "in place": {"fused": False, "inplace_backward": True},
    "scattered rows": {"fused": True, "rows": True},
    "scattered rows, in place": {"fused": False, "rows": True, "inplace_backward": True},
    "kept columns": {"fused": True, "keep_mask": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_log_probs_entropies_and_their_gradient(name: str) -> None:
    options = dict(OPTIONS[name])
    if options.get("rows"):
        options["rows"] = torch.arange(ROWS, device=DEVICE).view(-1, 4)[:, :3].flatten()
    targets = random_ids(ROWS)[options.get("rows", slice(None))]
    if options.get("keep_mask"):
        options["keep_mask"] = random(len(targets), VOCABULARY, seed=2) > 0
    of_targets = {"rows": options.pop("rows", None), "keep_mask": options.pop("keep_mask", None)}
    inputs = Inputs(targets, targets[:, None], **of_targets)
    worst = measure("entropy", 2 * random(ROWS, VOCABULARY), inputs, temperature=TEMPERATURE, **options)
    assert worst.value < 5e-6
    assert worst.gradient < ROUNDING


def test_topk_and_log_probs_at_ids() -> None:
    logits = 2 * random(ROWS, VOCABULARY)
    of_responses = [slice(0, ROWS // 8), slice(ROWS // 4, ROWS)]
    for runs in (None, of_responses):
        indices = random_ids(len(selected(logits, runs)), 8)
        for name in ("at ids", "top-k"):  # many of bfloat16 logits are equal
            worst = measure(name, logits, Inputs(indices[:, 0], indices, runs))
            assert worst.value < 5e-6 and worst.gradient < ROUNDING, name


def weights_and_hidden() -> tuple[Tensor, Tensor]:
    return random(ROWS, HIDDEN), 3 * random(VOCABULARY, HIDDEN, seed=4) / HIDDEN**0.5


def reference_logits(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return float64 leaves, and logits that have the values which the device rounds to bfloat16.

    Gradients flow as if they had not been rounded.
    """
    hidden64, weight64 = (tensor.cpu().double().requires_grad_() for tensor in (hidden, weight))
    logits = hidden64 @ weight64.T
    rounded = torch.nn.functional.linear(hidden, weight).cpu().double()
    return hidden64, weight64, logits + (rounded - logits).detach()


@pytest.mark.parametrize("options", [{}, {"tile_bytes": 1 << 16}, {"keep_bytes": 1 << 30}], ids=str)
@pytest.mark.parametrize("trains_weight", [True, False], ids=["trained weight", "frozen weight"])
def test_deferred_logits(options: dict[str, Any], trains_weight: bool) -> None:
    hidden, weight = weights_and_hidden()
    targets, coefficients = random_ids(ROWS), random(2, ROWS, seed=3).float()
    trained = [hidden, weight] if trains_weight else [hidden]
    for tensor in trained:
        tensor.requires_grad_()
    logits = losses.deferred_logits(hidden, weight, **options)
    values = log_probs_and_entropy(logits, targets)
    gradients = torch.autograd.grad(values, trained, list(coefficients))

    *exact, logits = reference_logits(hidden.detach(), weight.detach())
    expected = dense_log_probs_and_entropy(logits, targets.cpu(), temperature=TEMPERATURE)
    weights = list(coefficients.cpu().double())
    expected_gradients = torch.autograd.grad(expected, exact[: len(trained)], weights)
    for found, value in zip(values, expected, strict=True):
        error = (found.cpu().double() - value).abs()
        # The products of tiles may add up in another order, so that a logit is rounded the other way.
        assert error.median() < 5e-4 and error.max() < 0.1
    for gradient, value in zip(gradients, expected_gradients, strict=True):
        assert relative_error(gradient.cpu(), value, value.abs().max()) < OF_SUMS


def test_kept_and_recomputed_tiles_have_the_same_bits() -> None:
    hidden, weight = (x.requires_grad_() for x in weights_and_hidden())
    all_logits = ROWS * VOCABULARY * hidden.element_size()

    def step(keep_bytes: int) -> list[Tensor]:
        logits = losses.deferred_logits(hidden, weight, tile_bytes=all_logits // 4, keep_bytes=keep_bytes)
        values = log_probs_and_entropy(logits, random_ids(ROWS))
        return [*values, *torch.autograd.grad(sum(value.sum() for value in values), [hidden, weight])]

    recomputed = step(0)
    for keep_bytes in (all_logits, all_logits // 2, 0):
        assert all(map(torch.equal, recomputed, step(keep_bytes)))


@pytest.mark.parametrize("case", WITHOUT_WAITS)
def test_nothing_waits_for_the_gpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = cases.LOSSES[case]
    if IS_DRY:
        for name, value in {"GPU": DEVICE, "ROWS": 64, "HIDDEN": 32, "VOCABULARY": 2048}.items():
            monkeypatch.setattr(cases, name, value)
        run(torch.bfloat16)
        return
    run(torch.bfloat16)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_are_those_that_were_compiled_without_a_gpu() -> None:
    """Then what is said of their machine code holds here. Of other releases of torch there is no record."""
    recorded = recorded_digests()
    if IS_DRY or recorded is None or torch.cuda.get_device_capability() != (9, 0):
        return
    codes = generated_codes(CASES["head"])
    assert recorded <= set(itertools.chain(*map(digests, codes))), "\n".join(codes)


def test_divergence_from_a_teacher_in_host_memory() -> None:
    hidden, weight = weights_and_hidden()
    hidden.requires_grad_()
    teacher = random(ROWS, HIDDEN, seed=5), random(VOCABULARY, HIDDEN, seed=6) / HIDDEN**0.5
    if DEVICE.type == "cuda":
        teacher = teacher[0], teacher[1].cpu().pin_memory()
    student = losses.deferred_logits(hidden, weight)
    value = losses.full_vocabulary_divergence(student, losses.deferred_logits(*teacher))
    [gradient] = torch.autograd.grad(value.sum(), hidden)

    hidden64, _, student = reference_logits(hidden.detach(), weight)
    *_, of_teacher = reference_logits(teacher[0], teacher[1].to(DEVICE))
    log_q = of_teacher.detach().log_softmax(1)
    expected = dense_divergence("reverse_kl", student.log_softmax(1), log_q)
    [expected_gradient] = torch.autograd.grad(expected.sum(), hidden64)
    assert relative_error(value.cpu(), expected, expected.abs().max()) < 1e-3
    assert relative_error(gradient.cpu(), expected_gradient, expected_gradient.abs().max()) < OF_SUMS


def test_losses_take_little_beyond_logits_and_gradients() -> None:
    rows, hidden_size, vocabulary = (512, 32, 16384) if IS_DRY else (8192, 512, 131072)
    of_device: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
    sizes = (rows, hidden_size), (vocabulary, hidden_size)
    hidden, weight = (torch.randn(size, **of_device, requires_grad=True) for size in sizes)
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)
    options = {"tile_bytes": 1 << 20} if IS_DRY else {}

    def step() -> tuple[Tensor, ...]:
        logits = losses.deferred_logits(hidden, weight, **options)
        return torch.autograd.grad(losses.vocab_parallel_log_probs(logits, targets).sum(), [hidden, weight])

    step()  # compiles
    gradients = hidden.nbytes + weight.nbytes
    assert peak_bytes(step, not IS_DRY) - gradients < 0.5 * rows * vocabulary * hidden.element_size()

    logits = torch.randn(rows // 2, vocabulary, **of_device).requires_grad_() * 1

    def materialized() -> Tensor:
        log_probs = losses.vocab_parallel_log_probs(logits, targets[: rows // 2])
        return torch.autograd.grad(log_probs.sum(), logits)[0]

    materialized()  # compiles
    # A block of a GPU is 64 MiB or more, so that it counts beside logits of 1 GiB.
    assert peak_bytes(materialized, not IS_DRY) < 1.25 * logits.nbytes


def test_a_product_is_added_in_float32_without_a_second_sum() -> None:
    rows, columns = (4096, 64) if IS_DRY else (131072, 1024)  # of a weight's gradient
    a, b = random(rows, 16), random(16, columns, seed=1)
    total = torch.ones(rows, columns, device=DEVICE)
    assert peak_bytes(lambda: add_product(total, a, b), not IS_DRY) < 0.5 * total.nbytes
    expected = 1 + a[:512].cpu().double() @ b.cpu().double()
    total.fill_(1.0)
    add_product(total, a, b)
    assert relative_error(total[:512].cpu(), expected, expected.abs().max()) < 1e-6


@on_ranks(1, cpu_backend=False, fresh=True, env=VARIABLES)
def test_rollouts_equal_one_uninterrupted_run() -> None:
    with gpu_or_cpu() as device:
        assert device == DEVICE.type
        torch.use_deterministic_algorithms(True, warn_only=True)
        check_rollouts(TinyModel(bf16=True))


def test_parameters_carry_what_transformer_engines_do() -> None:
    """Without TransformerEngine there is nothing to compare with, and the test passes."""
    assert parameter_marks.main() == 0
