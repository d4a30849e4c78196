"""The public API as users write it: names, parameters, results. mypy checks this file, and nobody runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_rl_patches as mrp
from megatron_rl_patches import inference, losses, testing
from megatron_rl_patches.hooks import on_megatron_init, pre_wrap
from megatron_rl_patches.reentry import TrainGuard, preserved_hooks, reentrant_train

Model = Sequence[torch.nn.Module]


def patches() -> None:
    settings = mrp.Settings(strict=True, train_functions=("my_rl.loop:train",), warn=False)
    for site in mrp.apply("reentrant-train", exclude=["lean-loss"], settings=settings, strict=False):
        names: tuple[str, str, str] = site.patch, site.framework, site.target
        print(*names, site.state, site.reason)
    with mrp.applied(settings=settings) as sites:
        print([site.is_fault for site in sites])
    try:
        mrp.verify_ranks()
        mrp.verify_ranks(dist.group.WORLD)
    except mrp.PatchError as error:
        base: mrp.MegatronRLPatchesError = error
        raise base from None
    summaries: dict[str, str] = mrp.available()
    version: str = mrp.__version__
    mrp.revert("lean-loss")
    mrp.revert()
    states: list[mrp.SiteStatus] = mrp.status()
    print(summaries, version, [one.state for one in states])


def a_patch() -> mrp.Patch:
    def is_quiet(target: mrp.TargetSource) -> str | None:
        return "it is quiet" if target.calls("get_logger") else None

    patch = mrp.Patch("my-patch", "what it does", upstream=("owner/repository#1",))

    @patch.wrap("framework.loop", "evaluate", skip_if=is_quiet)
    def evaluate(call: mrp.Call) -> Any:
        return call(model=call["model"])

    sites: Sequence[mrp.Site] = patch.sites
    print(sites, evaluate)
    return patch


def hooks(args: Any, model: list[Any]) -> list[Any]:
    on_megatron_init()
    on_megatron_init(args)
    chunks: list[Any] = pre_wrap(model)
    return chunks


def own_loop(model: Model, optimizer: Any, step: Callable[[], float]) -> Iterator[float]:
    with reentrant_train(model, optimizer=optimizer):
        yield step()
    with preserved_hooks(model), TrainGuard(model, optimizer):
        pass


@reentrant_train
def train(model: Model, optimizer: Any) -> list[float]:
    return []


def decorate(loop: Callable[[Model], float], optimizer: Any) -> Callable[[Model], float]:
    return reentrant_train(loop, optimizer=optimizer)


def own_models(provider: Callable[..., torch.nn.Module], config: Any, path: Path) -> None:
    model: list[torch.nn.Module] = inference.build_inference_model(
        provider, config, dtype="bf16", device="cuda"
    )
    inference.build_inference_model(
        provider, config, pre_wrap=lambda chunks: None, perform_initialization=True
    )
    iteration: int = inference.load_inference_checkpoint(model, path, ckpt_step=7, exact=True)
    inference.load_inference_checkpoint(model[0], str(path))
    microbatches = [{"tokens": torch.zeros(2, 4, dtype=torch.int64), "lengths": [4, 3]}]
    scores: inference.Scores | None = inference.forward_log_probs(
        model, microbatches, with_entropy=True, temperature=0.7, vocab_size=50_000
    )
    if scores is not None:
        log_probs: list[Tensor] = scores.log_probs
        entropy: list[Tensor] | None = scores.entropy
        print(log_probs, entropy)
    topk: list[losses.TopKDistribution] | None = inference.forward_topk(
        model, microbatches, 64, progress=False
    )
    if topk is not None:
        inference.forward_topk(model, microbatches, at=topk)
        inference.forward_topk(model, microbatches, at=[distribution.indices for distribution in topk])
    hidden: list[Tensor] | None = inference.forward_hidden_states(model, microbatches, output_device="cpu")
    values: list[Tensor] | None = inference.forward_values(model, microbatches, progress=False)
    head: losses.OutputHead | None = inference.output_head(model)
    if hidden is not None and head is not None:
        one = losses.FullDistribution.from_hidden(torch.cat(hidden), head)
        parts: list[losses.FullDistribution] = one.split([3, 4])
        whole: losses.FullDistribution = losses.FullDistribution.cat(parts)
        print(whole.nbytes, iteration, values)

    pool = inference.TeacherPool(model)
    pool.add("math", path)
    pool.add("code", lambda chunks: None)
    with pool.use("math"):
        resident: str | None = pool.resident
    of_pool: losses.OutputHead | None = pool.head("code")
    names: list[str] = pool.names
    pool.remove("code")
    sizes: int = pool.host_bytes + pool.head_bytes + len(pool)
    report: inference.MemoryReport = inference.memory_report(pool=pool)
    print("math" in pool, resident, of_pool, names, sizes, report.teachers)
    described = inference.estimate_memory(
        {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
        vocab_size=100,
        data_parallel_size=2,
        optimizer=inference.OptimizerSettings(),
    )
    arguments = inference.GPTArguments(vocab_size=100)
    print(arguments.share_embeddings_and_output_weights)
    estimates: list[inference.MemoryEstimate] = [
        described,
        inference.estimate_memory(model, teachers=2, teacher_heads=True),
    ]
    for stage in estimates[0].stages:
        total: int = stage.training.total - stage.inference_only.total
        print(total)


def log_probs(logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> None:
    rows = torch.arange(4)
    values: Tensor = losses.vocab_parallel_log_probs(
        logits, targets, tp_group=group, rows=rows, temperature=0.7
    )
    both: tuple[Tensor, Tensor] = losses.vocab_parallel_log_probs_and_entropy(
        logits, targets, rows=slice(2, 6), keep_mask=logits > 0, entropy_grad=False, inplace_backward=True
    )
    topk: losses.TopKDistribution = losses.vocab_parallel_topk(logits, 64, tp_group=group)
    at = losses.vocab_parallel_log_probs_at(logits, topk.indices, with_tail=True)
    tensors: tuple[Tensor, Tensor, Tensor] = topk.indices, topk.log_probs, topk.tail_log_prob
    parts: list[losses.TopKDistribution] = topk.split([2, 2])
    whole: losses.TopKDistribution = losses.TopKDistribution.cat(parts)
    lean: losses.DeferredLogits = losses.deferred_logits(
        torch.zeros(8, 2, 4), torch.zeros(10, 4), bias=None, tp_group=group, sequence_parallel=True
    )
    is_deferred: bool = lean.is_deferred
    print(values, both, at, tensors, whole.k, len(whole), whole[1:], is_deferred)


def layouts(logits: Tensor, tokens: list[Tensor]) -> None:
    layout = losses.SequenceLayout.build([6, 9], [3, 5], cp_rank=0, cp_size=2, allgather_cp=True)
    losses.SequenceLayout.build([6, 9], [3, 5], qkv_format="bshd", max_seq_lens=[9, 9])
    log_probs, entropies = losses.packed_log_probs_and_entropy(logits, tokens, layout, temperature=0.7)
    no_entropies: list[Tensor] | None = entropies
    rows: Tensor = layout.response_rows
    parts: list[Tensor] = layout.split_responses(torch.zeros(8))
    gathered: list[Tensor] = layout.gather_responses(parts, dist.group.WORLD)
    zigzag: list[Tensor] = layout.to_zigzag(gathered)
    print(log_probs, no_entropies, rows, zigzag, layout.response_targets(tokens))


def policy(logits: Tensor, tokens: list[Tensor], layout: losses.SequenceLayout) -> dict[str, float]:
    masks = [torch.ones(3), torch.ones(5)]
    # One advantage per response, as the documentation has it; the annotation knows one per token only.
    batch = losses.PolicyBatch(torch.tensor([1.0, -1.0]), masks, old_log_probs=masks)  # type: ignore[arg-type]
    options = losses.PolicyOptions(
        objective="gspo", clip_high=0.28, normalization="sequence", kl_estimator="k3"
    )
    loss, count, metrics = losses.policy_loss(masks, batch, options, entropies=masks)
    normalizer: float = losses.mean_count(masks, 4, "token")
    loss_func = losses.make_loss_func(tokens, layout, batch, options, recompute=True, normalizer=normalizer)
    of_func: tuple[Tensor, Tensor, dict[str, Tensor]] = loss_func(logits)
    weights, number = losses.token_weights(masks, "constant", constant_length=8)
    advantages: Tensor = losses.group_advantages(torch.ones(4), torch.zeros(4), divide_by_std=False)
    kl: Tensor = losses.estimate_kl(torch.zeros(3), "k2")
    print(loss, count, of_func, weights, number, advantages, kl)
    return losses.average_metrics([metrics])


def distillation(
    logits: Tensor, teacher: list[losses.TopKDistribution], layout: losses.SequenceLayout
) -> None:
    options = losses.DistillationOptions("jensen_shannon", beta=0.3, teacher_weights=(3.0, 1.0))
    masks = [torch.ones(3), torch.ones(5)]
    batch = losses.DistillationBatch([teacher, teacher], masks, old=teacher)
    loss_func = losses.make_distillation_loss_func(layout, batch, options, temperature=0.7)
    of_func: tuple[Tensor, Tensor, dict[str, Tensor]] = loss_func(logits)
    loss, count, metrics = losses.distillation_loss(masks, masks, batch, options)
    routed: list[losses.TopKDistribution] = losses.route_teachers(
        ["math", "code"], {"math": teacher, "code": {1: teacher[1]}}
    )
    mixed: losses.TopKDistribution = losses.mix_teachers(teacher, [0.2, 0.8])
    one = teacher[0]
    divergences: list[Tensor] = [
        losses.reverse_kl(masks[0], masks[0], one),
        losses.forward_kl(masks[0], masks[0], one),
        losses.generalized_kl(masks[0], masks[0], one),
        losses.jensen_shannon(masks[0], masks[0], one, beta=0.1),
        losses.importance_weighted_reverse_kl(masks[0], masks[0], one, one),
        losses.opd_advantages(masks[0], masks[0]),
        losses.full_vocabulary_divergence(
            logits, [logits, logits], divergence="forward_kl", teacher_weights=[1, 2]
        ),
    ]
    print(of_func, loss, count, metrics, routed, mixed, divergences)


@losses.checkpointed
def loss_of(logits: Tensor, scale: float) -> Tensor:
    return logits.sum() * scale


@losses.checkpointed(early_stop=False, preserve_rng_state=True)
def other_loss_of(logits: Tensor) -> Tensor:
    return logits.sum()


def recomputed(logits: Tensor) -> Tensor:
    return loss_of(logits, scale=2.0) + other_loss_of(logits)


def a_loss(
    microbatch: testing.Microbatch, logits: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return logits.sum() / microbatch.num_microbatches / len(microbatch.samples), {}


def on_a_rank(number: int, scale: float = 1.0) -> float:
    with testing.cpu_backend():
        return number * scale


def tiny() -> None:
    described: testing.TinyModel = testing.tiny_model(
        "moe", tp=2, overlap_param_gather=False, config={"num_layers": 2}
    )
    described.initialize()
    chunks: list[Any] = described.chunks()
    model, optimizer = described.build()
    print(chunks, model, optimizer, described.provider, described.positions(), described.dtype)


def unit_tests() -> None:
    try:
        results: list[Any] = testing.spawn_ranks(
            on_a_rank, 2, 3, scale=2.0, timeout=60, env={"NAME": "value"}
        )
    except testing.RanksFailed as failed:
        ranks: tuple[int, ...] = failed.ranks
        raise SystemExit(ranks) from failed
    splits: dict[str, testing.Split] = {
        **testing.SPLITS,
        "DP 2, CP 2": testing.Split(dp=2, cp=2, microbatches=3, even=False),
    }
    report: testing.NormalizationReport = testing.check_normalization(
        a_loss, [], splits, calculate_per_token_loss=True
    )
    names: list[str] = report.different
    print(report.same, names, report.differences["DP 2"])
    module = testing.MockModule(testing.MockModule(params=1), testing.MockModule(params=1, expert=True))
    ddp = testing.MockDDP(
        testing.MockConfig(),
        testing.MockDDPConfig(),
        testing.MockFloat16Module(module),
        overlap_param_gather=True,
    )
    optimizer = testing.MockOptimizer([ddp])
    groups: list[testing.MockBucketGroup] = ddp.bucket_groups
    print(results, optimizer.calls, groups, testing.MockDDPConfig(overlap_grad_reduce=False))
