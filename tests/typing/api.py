"""The public API as users write it. mypy checks this file, and nobody runs it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_rl_patches as patches
from megatron_rl_patches import inference, losses, reentry, testing


def apply_and_revert() -> None:
    settings = patches.Settings(strict=True, train_functions=["my_rl.model:train"], opd_top_k=64)
    for site in patches.apply("lean-loss", exclude=("lean-head",), settings=settings, strict=True):
        line: str = f"{site.patch} {site.framework} {site.target} {site.state} {site.reason}"
    with patches.applied("reentrant-train") as sites:
        states: list[str] = [site.state for site in sites]
    summaries: dict[str, str] = patches.available()
    patches.verify_ranks()
    patches.revert("lean-loss")
    error: type[patches.MegatronRLPatchesError] = patches.PatchError
    del line, states, summaries, error, patches.status()[:]


patch = patches.Patch(name="mine", summary="one line")


@reentry.reentrant_train
def train(model: list[torch.nn.Module], optimizer: Any, batches: Iterator[Tensor]) -> float:
    return 0.0


def train_again(model: list[torch.nn.Module], batches: Iterator[Tensor]) -> float:
    with reentry.reentrant_train(model, optimizer=None), reentry.preserved_hooks(model):
        return train(model, None, batches)


def score(provider: Any, config: Any, group: dist.ProcessGroup) -> None:
    model = inference.build_inference_model(provider, config, dtype="bf16", device="cuda")
    inference.load_inference_checkpoint(model, "checkpoints/teacher")
    scores = inference.forward_log_probs(model, [], temperature=0.7, with_entropy=True)
    topk = inference.forward_topk(model, [], 64)
    hidden = inference.forward_hidden_states(model, [])
    pool = inference.TeacherPool(model)
    pool.add("math")
    with pool.use("math"):
        head = inference.output_head(model)
    memory = inference.estimate_memory(config)
    report = inference.memory_report()
    del scores, topk, hidden, head, memory, report


def loss(
    logits: Tensor, hidden: Tensor, weight: Tensor, tokens: list[Tensor], group: dist.ProcessGroup
) -> Any:
    targets = torch.cat(tokens)
    log_probs: Tensor = losses.vocab_parallel_log_probs(logits, targets, tp_group=group, temperature=0.7)
    with_entropy: tuple[Tensor, Tensor] = losses.vocab_parallel_log_probs_and_entropy(
        losses.deferred_logits(hidden, weight, tp_group=group), targets, tp_group=group
    )
    teacher: losses.TopKDistribution = losses.vocab_parallel_topk(logits, 64, tp_group=group)
    at_ids, tail = losses.vocab_parallel_log_probs_at(logits, teacher.indices, with_tail=True)
    divergence: Tensor = losses.reverse_kl(at_ids, tail, losses.mix_teachers([teacher, teacher], [0.3, 0.7]))
    exact: Tensor = losses.full_vocabulary_divergence(
        logits, [logits], divergence="skewed_forward_kl", beta=0.1
    )
    layout = losses.SequenceLayout.build([4, 7], [2, 3], cp_size=1)
    batch = losses.PolicyBatch(loss_masks=tokens, advantages=tokens)
    policy = losses.make_loss_func(
        tokens, layout, batch, losses.PolicyOptions(), tp_group=group, recompute=True
    )
    distillation = losses.make_distillation_loss_func(
        layout, losses.DistillationBatch([[teacher]], tokens), losses.DistillationOptions("jensen_shannon")
    )
    total, count, metrics = losses.checkpointed(policy)(logits)
    del log_probs, with_entropy, divergence, exact, total, count, metrics
    return distillation(logits)


def on_every_rank(tensor_parallel: int) -> int:
    with testing.cpu_backend():
        chunk = testing.MockDDP(testing.MockModule(), testing.MockConfig())
    return tensor_parallel + len(list(chunk.modules()))


def run_ranks() -> list[int]:
    try:
        return testing.spawn_ranks(on_every_rank, 2, 1, timeout=60)
    except testing.RanksFailed as failure:
        raise SystemExit(str(failure)) from failure
