"""Two teachers and a student on real megatron-core: an on-policy distillation whose result can be scored.

A prompt is ``DIGITS`` random digits between two tokens that stand for an order; its answer is the same digits
in that order. Each teacher is good at one order, which it learns in a short supervised run. The student
answers, and its distribution at each token of an answer is drawn towards a teacher's.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from megatron.core import dist_checkpointing, parallel_state

from megatron_rl_patches import Settings, applied, inference, losses
from megatron_rl_patches.testing import TinyModel, cpu_backend, spawn_ranks
from megatron_rl_patches.testing.transformer_engine.base import positions_of
from tests.references.tiny_gpt import inference_model

TRAIN = "megatron_rl_patches.demo.program:train"
DIGITS = 5
PROMPT = DIGITS + 2
LENGTH = PROMPT + DIGITS
ORDERS = ("ascending", "descending")
VOCABULARY = 10 + len(ORDERS)
TEACHER_STEPS, TEACHER_BATCH = 150, 64
#: Prompts per rank and rollout, and those of each order that the score is measured on.
PROMPTS, EXAMPLES = 256, 64
#: Of a call of ``train()``.
STEPS, MICROBATCHES = 8, 2
K = 8
MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "calculate_per_token_loss": True}
#: Weights in the mixture: the teacher for a sample's order, and the other teacher.
OWN, OTHER = 3.0, 1.0

#: ``tokens`` [b, LENGTH]; to distill also ``teachers``, a distribution for each answer.
Batch = dict[str, Any]


def distill(
    sizes: dict[str, Any], target: str, way: str, folder: str, rollouts: int, timeout: float = 580
) -> torch.Tensor:
    """Distill a student for some rollouts on two ranks.

    Args:
        sizes: of the parallel groups: ``{"tp": 2}``.
        target: ``"routed"``: a sample learns from the teacher for its order; ``"mixture"``: from both.
        way: what a teacher is known by: ``"top-k"``, its probabilities of the ``K`` tokens that the student
            finds most probable, or ``"full"``, its hidden states and output layer.
        folder: of the teachers, which the first call trains and the others load.

    Returns:
        The student's score / that of the teacher for the order, before each rollout, ``[rollouts, orders]``.
        A score is the fraction of digits that are right if the most probable token is always taken.
    """
    first, second = spawn_ranks(_on_a_rank, 2, sizes, target, way, folder, rollouts, timeout=timeout)
    assert torch.equal(first, second)
    return torch.as_tensor(first)


def _on_a_rank(sizes: dict[str, Any], target: str, way: str, folder: str, rollouts: int) -> torch.Tensor:
    with cpu_backend(), applied(settings=Settings(train_functions=(TRAIN,))):
        tiny = TinyModel(**sizes, vocab_size=VOCABULARY, seq_length=LENGTH, lr=1e-3, config=MODEL)
        tiny.initialize()
        pool, of_teachers = inference.TeacherPool(inference_model(tiny)), []
        for seed, order in enumerate(ORDERS):
            if not (teacher := Path(folder, order)).exists():
                _train_teacher(tiny, order, seed, teacher)
            pool.add(order, teacher)
        generator = _generator(0)
        for order in ORDERS:
            with pool.use(order) as scorer:
                of_teachers.append(_score(scorer, _prompts(8 * EXAMPLES, generator, order)))
        scores = _distill(tiny, pool, target, way, rollouts)
        return _mean_over_ranks(scores) / _mean_over_ranks(torch.stack(of_teachers))


def _train_teacher(tiny: TinyModel, order: str, seed: int, folder: Path) -> None:
    model, optimizer = _build(tiny, seed)
    generator = _generator(seed)

    def solved_prompts() -> Iterator[Batch]:
        while True:
            prompts_bp = _prompts(TEACHER_BATCH, generator, order)
            yield {"tokens": torch.cat([prompts_bp, _solve(prompts_bp)], dim=1)}

    _train(model, optimizer, solved_prompts(), TEACHER_STEPS, 1, TEACHER_BATCH)
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save({"model": model[0].module.sharded_state_dict()}, str(folder))
    torch.distributed.barrier()


def _distill(
    tiny: TinyModel, pool: inference.TeacherPool, target: str, way: str, rollouts: int
) -> torch.Tensor:
    """Return the student's scores on this rank, ``[rollouts, orders]``."""
    model, optimizer = _build(tiny, seed=0)
    generator, scores = _generator(0), []
    for _ in range(rollouts):
        tokens_bs = _answer(model, _prompts(PROMPTS, generator), generator)
        targets = _targets(pool, model, tokens_bs, target, K if way == "top-k" else None)
        examples = [_prompts(EXAMPLES, generator, order) for order in ORDERS]
        scores.append(torch.stack([_score(model, prompts_bp) for prompts_bp in examples]))
        indices = torch.randperm(PROMPTS, generator=generator).chunk(STEPS * MICROBATCHES)
        microbatches = (
            {"tokens": tokens_bs[index], "teachers": targets and [targets[i] for i in index.tolist()]}
            for index in indices
        )
        _train(model, optimizer, microbatches, STEPS, MICROBATCHES, len(indices[0]))
    return torch.stack(scores)


def _targets(
    pool: inference.TeacherPool, model: Any, tokens_bs: torch.Tensor, target: str, k: int | None
) -> list[Any] | None:
    """Return what each answer is drawn towards on the last pipeline stage, ``None`` on the others.

    ``k`` is the number of the student's tokens at which the teachers are known; ``None``: in full.
    """
    student = _topk(model, tokens_bs, k) if k else None
    of_teachers = {}
    for order in ORDERS:
        with pool.use(order) as teacher:
            if k:
                of_teachers[order] = _topk(teacher, tokens_bs, at=student)
            elif hidden := inference.forward_hidden_states(teacher, [_microbatch(tokens_bs)], progress=False):
                head: Any = pool.head(order)
                full = [losses.FullDistribution.from_hidden(hidden_dh, head) for hidden_dh in hidden]
                of_teachers[order] = full
    if not parallel_state.is_pipeline_last_stage():
        return None
    own = [token - 10 for token in tokens_bs[:, 0].tolist()]
    if target == "routed":
        return losses.route_teachers([ORDERS[number] for number in own], of_teachers)
    weights = ((OWN, OTHER), (OTHER, OWN))
    pairs = zip(*of_teachers.values(), strict=True)
    return [losses.mix_teachers(pair, weights[number]) for number, pair in zip(own, pairs, strict=True)]


# --- the task


def _generator(seed: int) -> torch.Generator:
    """Return a generator for prompts and sampling; ranks of the same replica have the same."""
    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    return torch.Generator().manual_seed(seed * replicas + replica)


def _prompts(count: int, generator: torch.Generator, order: str | None = None) -> torch.Tensor:
    """Return random prompts, ``[count, PROMPT]``, of one order or of all."""
    digits_bd = torch.randint(10, (count, DIGITS), generator=generator)
    first, last = (0, len(ORDERS) - 1) if order is None else [ORDERS.index(order)] * 2
    order_b1 = torch.randint(10 + first, 11 + last, (count, 1), generator=generator)
    return torch.cat([order_b1, digits_bd, order_b1], dim=1)


def _solve(prompts_bp: torch.Tensor) -> torch.Tensor:
    """Return the right answers, ``[b, DIGITS]``."""
    ascending_bd = prompts_bp[:, 1:-1].sort(dim=1).values
    return torch.where(prompts_bp[:, :1] == 10, ascending_bd, ascending_bd.flip(1))


def _score(model: Any, prompts_bp: torch.Tensor) -> torch.Tensor:
    answers_bd = _answer(model, prompts_bp, None)[:, PROMPT:]
    return (answers_bd == _solve(prompts_bp)).float().mean()


def _mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(values)
    return values / torch.distributed.get_world_size()


# --- the models


def _build(tiny: TinyModel, seed: int) -> tuple[list[Any], Any]:
    """Build a model in DDP, and its optimizer, in the groups that there are."""
    torch.manual_seed(seed)
    config = tiny.transformer_config()
    return tiny.in_training(config, tiny.chunks(config))


@torch.no_grad()
def _answer(model: Any, prompts_bp: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Return prompts with answers, ``[b, LENGTH]``, the same on all ranks of a replica.

    ``generator``, in the same state on all of them, samples at temperature 1; ``None`` always takes the most
    probable token.
    """
    tokens_bs = torch.nn.functional.pad(prompts_bp, (0, DIGITS))
    for number in range(PROMPT, LENGTH):
        # The most probable token after division by exponential noise is a sample.
        noise_bv = torch.ones(len(tokens_bs), VOCABULARY)
        if generator is not None:  # on all ranks of a replica, so that their generators stay in step
            noise_bv.exponential_(generator=generator)
        # The last token is a placeholder: it stands for the distribution from which it comes.
        if distributions := inference.forward_topk(
            model, [_microbatch(tokens_bs, number + 1, 1)], VOCABULARY, progress=False
        ):
            vocabulary = losses.TopKDistribution.cat(distributions)
            choice_b1 = (vocabulary.log_probs.exp() / noise_bv).argmax(1, keepdim=True)
            tokens_bs[:, number] = vocabulary.indices.gather(1, choice_b1)[:, 0]
        last_rank = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast(tokens_bs, last_rank, parallel_state.get_pipeline_model_parallel_group())
    return tokens_bs


def _microbatch(tokens_bs: torch.Tensor, length: int = LENGTH, response_length: int = DIGITS) -> Batch:
    n = len(tokens_bs)
    return {"tokens": tokens_bs, "total_lengths": [length] * n, "response_lengths": [response_length] * n}


def _topk(model: Any, tokens_bs: torch.Tensor, k: int | None = None, at: Any = None) -> Any:
    return inference.forward_topk(model, [_microbatch(tokens_bs)], k, at=at, progress=False)


# --- training


def _train(
    model: Any, optimizer: Any, microbatches: Iterator[Batch], steps: int, number: int, size: int
) -> None:
    """Train some steps, each of a number of microbatches of some size."""
    from megatron_rl_patches.demo.program import train

    tp_group = parallel_state.get_tensor_model_parallel_group()
    cp_group = parallel_state.get_context_parallel_group()
    options = {"tp_group": tp_group, "cp_group": cp_group, "recompute": True}
    cp = {"cp_rank": cp_group.rank(), "cp_size": cp_group.size()}
    lengths = [LENGTH] * size
    layout = losses.SequenceLayout.build(
        lengths, [DIGITS] * size, qkv_format="bshd", max_seq_lens=lengths, **cp
    )
    positions_s = positions_of(cp_group.rank(), cp_group.size(), LENGTH // cp_group.size())

    def forward_step(data_iterator: Iterator[Batch], chunk: Any) -> tuple[torch.Tensor, Any]:
        batch = next(data_iterator)
        inputs = batch["tokens"][:, positions_s], positions_s.expand(size, -1)
        return chunk(*inputs, attention_mask=None), partial(_loss, batch, layout, options)

    sizes = {"num_microbatches": number, "micro_batch_size": size, "seq_length": LENGTH}
    train(model, optimizer, forward_step, microbatches, steps, **sizes)


def _loss(batch: Batch, layout: losses.SequenceLayout, options: Any, logits: torch.Tensor) -> Any:
    """Return the reverse KL divergence of a batch from its teachers; the last pipeline stage calls it.

    Without teachers, a loss with the gradient of the negative log-likelihood: PPO's at advantage 1.
    """
    ones = list(torch.ones(len(batch["tokens"]), DIGITS))
    if "teachers" in batch:
        distillation = losses.DistillationBatch([batch["teachers"]], ones)
        return losses.make_distillation_loss_func(layout, distillation, **options)(logits)
    tokens, policy = list(batch["tokens"]), losses.PolicyBatch(ones, ones)
    return losses.make_loss_func(tokens, layout, policy, with_entropy=False, **options)(logits)
