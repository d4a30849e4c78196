"""The public API as users write it: names, parameters, results. mypy checks this file, and nobody runs it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_rl_patches as mrp
from megatron_rl_patches import inference, losses, testing
from megatron_rl_patches.hooks import on_megatron_init, pre_wrap
from megatron_rl_patches.reentry import (
    OptimizerStep,
    RatioReport,
    SelfRatio,
    TrainGuard,
    preserved_hooks,
    reentrant_train,
)

Model = Sequence[torch.nn.Module]
LossResult = tuple[Tensor, Tensor, dict[str, Tensor]]
Pair = tuple[Tensor, Tensor]
TopK = losses.TopKDistribution
MASKS = [torch.ones(3), torch.ones(5)]


def patches() -> tuple[list[mrp.SiteStatus], dict[str, str], str]:
    settings = mrp.Settings(strict=True, train_functions=("my_rl.loop:train",), warn=False)
    for site in mrp.apply("reentrant-train", exclude=["lean-loss"], settings=settings, strict=False):
        names: tuple[str, str, str] = site.patch, site.framework, site.target
        print(*names, site.state, site.reason)
    with mrp.applied(settings=settings) as sites:
        print([(site.is_fault, site.word) for site in sites])
    try:
        mrp.verify_ranks(dist.group.WORLD)
    except mrp.PatchError as error:
        base: mrp.MegatronRLPatchesError = error
        raise base from None
    mrp.revert("lean-loss")
    return mrp.status(), mrp.available(), mrp.__version__


def a_patch() -> tuple[mrp.Patch, Sequence[mrp.Site]]:
    def is_quiet(target: mrp.TargetSource) -> str | None:
        return "it is quiet" if target.calls("get_logger") else None

    patch = mrp.Patch("my-patch", "what it does", upstream=("owner/repository#1",))

    @patch.wrap("framework.loop", "evaluate", skip_if=is_quiet)
    def evaluate(call: mrp.Call) -> Any:
        return call(model=call["model"])

    return patch, patch.sites


def hooks(args: Any, model: list[Any]) -> list[Any]:
    on_megatron_init(args)
    return pre_wrap(model)


@reentrant_train
def train(model: Model, optimizer: Any) -> list[float]:
    return []


def own_loop(loop: Callable[[Model], float], model: Model, optimizer: Any) -> Iterator[float]:
    with reentrant_train(model, optimizer=optimizer):
        yield loop(model)
    with preserved_hooks(model), TrainGuard(model, optimizer):
        decorated: Callable[[Model], float] = reentrant_train(loop, optimizer=optimizer)
        yield decorated(model) + sum(train(model, optimizer))
    with OptimizerStep(model, optimizer).begin(num_microbatches=3) as steps:
        yield sum(steps.forward_backward(num_microbatches=3, data_iterator=iter([]), seq_length=8))
        print(steps.step(), inference.memory_report(optimizer=optimizer).main_gradients)
        steps.abort()


def own_ratio(model: Model, trained: list[Tensor], scored: list[Tensor]) -> list[str]:
    ratio = SelfRatio(model, limit=0.01, vocab_size=50_000)
    ratio.add(trained, scored, entropies=None, prompts=[4] * len(trained))
    report: RatioReport | None = ratio.report()
    return [] if report is None else report.causes


def own_models(provider: Callable[..., torch.nn.Module], config: Any, path: Path) -> tuple[Model, int]:
    model = inference.build_inference_model(provider, config, dtype="bf16", device="cuda")
    return model, inference.load_inference_checkpoint(model, path, ckpt_step=7, exact=True)


def scores(model: Model) -> tuple[list[Tensor], list[Tensor] | None] | None:
    microbatches = [{"tokens": torch.zeros(2, 4, dtype=torch.int64), "total_lengths": [4, 3]}]
    topk: list[TopK] | None = inference.forward_topk(model, microbatches, 64, progress=False)
    inference.forward_topk(model, microbatches, at=topk)
    hidden: list[Tensor] | None = inference.forward_hidden_states(model, microbatches, output_device="cpu")
    values: list[Tensor] | None = inference.forward_values(model, microbatches, progress=False)
    head: losses.OutputHead | None = inference.output_head(model)
    if hidden is not None and head is not None:
        one = losses.FullDistribution.from_hidden(torch.cat(hidden), head)
        parts: list[losses.FullDistribution] = one.split([3, 4])
        print(losses.FullDistribution.cat(parts).nbytes, values)
    found: inference.Scores | None = inference.forward_log_probs(
        model, microbatches, with_entropy=True, temperature=0.7, vocab_size=50_000
    )
    return None if found is None else (found.log_probs, found.entropy)


def teachers(model: Model, path: Path) -> tuple[list[str], losses.OutputHead | None, inference.MemoryReport]:
    pool = inference.TeacherPool(model)
    pool.add("math", path)
    pool.add("code", lambda chunks: None)
    with pool.use("math"):
        resident: str | None = pool.resident
    pool.remove("code")
    print("math" in pool, resident, pool.host_bytes + pool.head_bytes + len(pool))
    return pool.names, pool.head("math"), inference.memory_report(pool=pool)


def memory(model: Model) -> tuple[list[inference.MemoryEstimate], list[int]]:
    layers = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    settings = inference.OptimizerSettings()
    described = inference.estimate_memory(layers, vocab_size=100, data_parallel_size=2, optimizer=settings)
    with inference.MemoryPhases(model, name="rollout") as phases, phases("save"):
        print(phases.peaks["save"] + (described.loss["lean-head"] if described.loss else 0))
    print(inference.GPTArguments(vocab_size=100).share_embeddings_and_output_weights)
    totals = [stage.training.total - stage.inference_only.total for stage in described.stages]
    return [described, inference.estimate_memory(model, teachers=2, teacher_heads=True)], totals


def of_logits(logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Pair]:
    topk: TopK = losses.vocab_parallel_topk(logits, 64, tp_group=group)
    at = losses.vocab_parallel_log_probs_at(logits, topk.indices, with_tail=True)
    tensors: tuple[Tensor, Tensor, Tensor] = topk.indices, topk.log_probs, topk.tail_log_prob
    whole: TopK = TopK.cat(topk.split([2, 2]))
    print(at, tensors, whole.k, len(whole), whole[1:])
    x, w = torch.zeros(8, 2, 4), torch.zeros(10, 4)
    lean: losses.DeferredLogits = losses.deferred_logits(
        x, w, bias=None, tp_group=group, sequence_parallel=True
    )
    lazy: bool = lean.is_deferred
    both = losses.vocab_parallel_log_probs_and_entropy(
        logits, targets, rows=slice(2, 6), keep_mask=logits > 0, entropy_grad=lazy, inplace_backward=True
    )
    rows = torch.arange(4)
    return losses.vocab_parallel_log_probs(logits, targets, tp_group=group, rows=rows, temperature=0.7), both


def layouts(logits: Tensor, tokens: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    layout = losses.SequenceLayout.build([6, 9], [3, 5], cp_rank=0, cp_size=2, allgather_cp=True)
    log_probs, entropies = losses.packed_log_probs_and_entropy(logits, tokens, layout, temperature=0.7)
    gathered = layout.gather_responses(layout.split_responses(torch.zeros(8)), dist.group.WORLD)
    print(log_probs, entropies, layout.response_targets(tokens))
    return layout.response_rows, gathered, layout.local_parts(gathered)


def policy(
    logits: Tensor, tokens: list[Tensor], layout: losses.SequenceLayout
) -> tuple[LossResult, dict[str, float]]:
    # One advantage per response, as the documentation has it; the annotation knows one per token only.
    sampled: Tensor = losses.group_log_probs(MASKS, MASKS, torch.zeros(2))
    batch = losses.PolicyBatch(torch.tensor([1.0, -1.0]), MASKS, group_log_probs=list(sampled))  # type: ignore[arg-type]
    options = losses.PolicyOptions(tis_clip=5.0, tis_clip_low=0.5, tis_level="group", tis_mask_level="token")
    print(sampled, losses.PolicyOptions(objective="gspo", normalization="sequence", kl_estimator="k3"))
    normalizer: float = losses.mean_count(MASKS, 4, "token")
    loss_func = losses.make_loss_func(tokens, layout, batch, options, recompute=True, normalizer=normalizer)
    weights, number = losses.token_weights(MASKS, "constant", constant_length=8)
    advantages: Tensor = losses.group_advantages(torch.ones(4), torch.zeros(4), divide_by_std=False)
    kl: Tensor = losses.estimate_kl(torch.zeros(3), "k2")
    print(weights, number, advantages, kl)
    _, _, metrics = losses.policy_loss(MASKS, batch, options, entropies=MASKS)
    return loss_func(logits), losses.average_metrics([metrics])


def distillation(
    logits: Tensor, teacher: list[TopK], layout: losses.SequenceLayout
) -> tuple[LossResult, LossResult, list[Tensor]]:
    options = losses.DistillationOptions("jensen_shannon", beta=0.3, teacher_weights=(3.0, 1.0))
    batch = losses.DistillationBatch([teacher, teacher], MASKS, old=teacher)
    loss_func = losses.make_distillation_loss_func(layout, batch, options, temperature=0.7)
    routed: list[TopK] = losses.route_teachers(["a", "b"], {"a": teacher, "b": {1: teacher[1]}})
    mixed: TopK = losses.mix_teachers(teacher, [0.2, 0.8])
    student = MASKS[0], MASKS[0]
    divergences = [
        losses.reverse_kl(*student, mixed),
        losses.forward_kl(*student, mixed),
        losses.generalized_kl(*student, mixed),
        losses.jensen_shannon(*student, mixed, beta=0.1),
        losses.importance_weighted_reverse_kl(*student, mixed, routed[0]),
        losses.opd_advantages(*student),
        losses.full_vocabulary_divergence(logits, [logits], divergence="forward_kl", teacher_weights=[1]),
    ]
    return loss_func(logits), losses.distillation_loss(MASKS, MASKS, batch, options), divergences


@losses.checkpointed
def loss_of(logits: Tensor, scale: float) -> Tensor:
    return logits.sum() * scale


def recomputed(logits: Tensor) -> Tensor:
    return losses.checkpointed(loss_of, early_stop=False, preserve_rng_state=True)(logits, scale=2.0)


def on_a_rank(number: int, scale: float = 1.0) -> float:
    with testing.cpu_backend():
        described: testing.TinyModel = testing.tiny_model("moe", tp=2, config={"num_layers": 2})
        described.initialize()
        chunks: list[Any] = described.chunks()
        model, optimizer = described.build()
        print(chunks, model, optimizer, described.provider)
        return number * scale


def unit_tests() -> list[Any]:
    try:
        return testing.spawn_ranks(on_a_rank, 2, 3, scale=2.0, timeout=60, env={"NAME": "value"})
    except testing.RanksFailed as failed:
        return [*failed.ranks]


def normalization() -> tuple[bool, list[str], float]:
    def loss(microbatch: testing.Microbatch, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return logits.sum() / microbatch.num_microbatches / len(microbatch.samples), {}

    split = testing.Split(dp=2, cp=2, microbatches=3, even=False)
    splits: dict[str, testing.Split] = {**testing.SPLITS, "DP 2, CP 2": split}
    report: testing.NormalizationReport = testing.check_normalization(loss, [], splits)
    return report.same, report.different, report.differences["DP 2"]


def mocks() -> list[testing.MockBucketGroup]:
    module = testing.MockModule(testing.MockModule(params=1), testing.MockModule(params=1, expert=True))
    config = testing.MockDDPConfig(overlap_grad_reduce=False)
    ddp = testing.MockDDP(testing.MockConfig(), config, module, overlap_param_gather=True)
    print(testing.MockOptimizer([ddp]).calls)
    return ddp.bucket_groups
