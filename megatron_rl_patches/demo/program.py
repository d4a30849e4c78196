"""Reinforcement learning with Megatron-core: a small GPT learns to sort a row of digits.

A prompt is ``DIGITS`` random digits and a token that stands for an order; its answer is the same digits in
that order. A digit is right or wrong, and the reward is the fraction of digits that are right, so no reward
model is needed. The loss is GRPO's with a reward for each token: a digit is compared with the same digit of
the other answers to its prompt, and the policy is drawn towards a reference model, which is the policy as it
was before training.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from ..inference import build_inference_model, forward_log_probs
from ..losses import PolicyBatch, PolicyOptions, SequenceLayout, make_loss_func, vocab_parallel_topk

DIGITS = 3
PROMPT = DIGITS + 1
LENGTH = PROMPT + DIGITS
ASCENDING, DESCENDING, VOCABULARY = 10, 11, 12  # after ten digits

# Numbers per rank and rollout.
_PROMPTS, _ANSWERS_PER_PROMPT = 64, 8
_STEPS, _MICROBATCHES = 4, 2
_OPTIONS = PolicyOptions(kl_coef=0.005)
# In the first rollout. It falls linearly to zero, so that the last rollouts are the best.
_LEARNING_RATE = 2e-3
# Parameters per bucket. With a single bucket no communication would overlap with computation.
_BUCKET = 25_000


class Rollout(NamedTuple):
    """Results of one rollout before training on it, averaged over all ranks; ``kl`` is per token, in nats."""

    reward: float
    exact_match: float
    kl: float

    def __str__(self) -> str:
        # The estimate of a divergence next to zero may be negative.
        return f"reward {self.reward:.3f}  exact match {self.exact_match:.3f}  KL {max(0.0, self.kl):.3f}"


class Program:
    """The policy, its optimizer and its reference on this rank."""

    def __init__(self, seed: int) -> None:
        """Initialize Megatron's process groups and build the models. ``torch.distributed`` is initialized."""
        parallel_state.destroy_model_parallel()  # of another program in this process
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        torch.manual_seed(seed)
        options = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "calculate_per_token_loss": True}
        config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, **options)
        gather = {"use_distributed_optimizer": True, "overlap_param_gather": True}
        ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=_BUCKET, **gather)
        self.policy = [DDP(config, ddp_config, _provide(config).cuda())]
        self.policy[0].broadcast_params()
        optimizer_config = OptimizerConfig(optimizer="adam", lr=_LEARNING_RATE, **gather)
        self.optimizer = get_megatron_optimizer(optimizer_config, self.policy, use_gloo_process_groups=False)
        self.reference = build_inference_model(_provide, config, dtype="fp32")
        self.reference[0].load_state_dict(self.policy[0].module.state_dict())
        self.device = next(self.policy[0].parameters()).device
        self.generator = torch.Generator(self.device).manual_seed(seed + 1000 * torch.distributed.get_rank())

    def learn(self, count: int) -> Iterator[Rollout]:
        """Sample, score and train ``count`` times; yield the results before training on them."""
        for number in range(count):
            tokens_bs, old_log_probs_bd = self._answers()
            right_bd = (tokens_bs[:, PROMPT:] == _solved(tokens_bs[:, :PROMPT])).float()
            groups_pad = right_bd.view(_PROMPTS, _ANSWERS_PER_PROMPT, DIGITS)
            batch = {
                "tokens": tokens_bs,
                "advantages": (groups_pad - groups_pad.mean(dim=1, keepdim=True)).view_as(right_bd),
                "old_log_probs": old_log_probs_bd,
                "ref_log_probs": self._reference_log_probs(tokens_bs),
            }
            kl_bd = batch["old_log_probs"] - batch["ref_log_probs"]
            means = torch.stack([right_bd.mean(), right_bd.all(1).float().mean(), kl_bd.mean()])
            torch.distributed.all_reduce(means)
            yield Rollout(*(means / torch.distributed.get_world_size()).tolist())
            for group in self.optimizer.param_groups:
                group["lr"] = _LEARNING_RATE * (1 - number / count)
            order = torch.randperm(len(tokens_bs), generator=self.generator, device=self.device)
            chunks = order.chunk(_STEPS * _MICROBATCHES)
            microbatches = ({name: values[chunk] for name, values in batch.items()} for chunk in chunks)
            sizes = {
                "num_microbatches": _MICROBATCHES,
                "micro_batch_size": len(chunks[0]),
                "seq_length": LENGTH,
            }
            train(self.policy, self.optimizer, _forward_step, microbatches, _STEPS, **sizes)

    def memory(self) -> list[int]:
        """Return the bytes on this rank of the policy with its training state, and of the reference."""
        chunk, optimizers = self.policy[0], getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        states = [state for optimizer in optimizers for state in optimizer.optimizer.state.values()]
        moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        policy = [*chunk.parameters(), *(buffer.grad_data for buffer in chunk.buffers), *moments]
        return [sum(t.nbytes for t in tensors) for tensors in (policy, self.reference[0].parameters())]

    @torch.no_grad()
    def _answers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample answers at temperature 1; return prompts with answers and the answers' log-probs."""
        shape, where = (_PROMPTS, DIGITS), {"generator": self.generator, "device": self.device}
        digits_pd = torch.randint(10, shape, **where)
        order_p1 = torch.randint(ASCENDING, VOCABULARY, (_PROMPTS, 1), **where)
        tokens_bs = torch.cat([digits_pd, order_p1], 1).repeat_interleave(_ANSWERS_PER_PROMPT, 0)
        log_probs = []
        for _ in range(DIGITS):
            logits_bsv = self.policy[0].module(tokens_bs, _positions(tokens_bs), attention_mask=None)
            # All ids, the most probable first. Deferred logits, which lean-head makes, will do, too.
            ids = vocab_parallel_topk(logits_bsv[:, -1], VOCABULARY)
            choice_b1 = ids.log_probs.exp().multinomial(1, generator=self.generator)
            tokens_bs = torch.cat([tokens_bs, ids.indices.gather(1, choice_b1)], 1)
            log_probs.append(ids.log_probs.gather(1, choice_b1))
        return tokens_bs, torch.cat(log_probs, 1)

    def _reference_log_probs(self, tokens_bs: torch.Tensor) -> torch.Tensor:
        lengths, digits = [LENGTH] * len(tokens_bs), [DIGITS] * len(tokens_bs)
        microbatch = {"tokens": tokens_bs, "total_lengths": lengths, "response_lengths": digits}
        scores = forward_log_probs(self.reference, [microbatch], output_device=self.device, progress=False)
        assert scores is not None  # there is one pipeline stage
        return torch.stack(scores.log_probs)


def train(
    model: list[DDP], optimizer: Any, forward_step: Any, data_iterator: Any, steps: int, **sizes: int
) -> None:
    """Train on one rollout, as Megatron-LM and frameworks do; the sizes are those of Megatron's schedule."""
    [chunk] = model
    assert chunk.config.no_sync_func is None, (
        "When overlap_grad_reduce is True, config.no_sync_func must be None; "
        "a custom no_sync_func is not supported when overlapping grad-reduce"
    )
    chunk.config.no_sync_func = chunk.no_sync
    chunk.config.finalize_model_grads_func = finalize_model_grads
    chunk.config.grad_scale_func = optimizer.scale_loss
    # As upstream: the first step runs without hooks, so that it shows errors of loading and building.
    chunk.disable_forward_pre_hook(param_sync=False)
    for step in range(steps):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data_iterator, model=model, **sizes
        )
        optimizer.step()
        if step == 0:
            chunk.enable_forward_pre_hook()
    chunk.disable_forward_pre_hook()


def _provide(config: TransformerConfig, pre_process: bool = True, post_process: bool = True) -> GPTModel:
    """Build the model, as a Megatron model provider does."""
    return GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, pre_process, post_process)


def _positions(tokens_bs: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens_bs.shape[1], device=tokens_bs.device).expand_as(tokens_bs)


def _solved(prompts_bp: torch.Tensor) -> torch.Tensor:
    """Return the right answers, ``[b, DIGITS]``."""
    ascending_bd = prompts_bp[:, :-1].sort(dim=1).values
    return torch.where(prompts_bp[:, -1:] == ASCENDING, ascending_bd, ascending_bd.flip(1))


def _forward_step(data_iterator: Iterator[Any], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """Return the logits of a microbatch, and the function that computes the loss from them."""
    batch = next(data_iterator)
    tokens_bs, count = batch["tokens"], len(batch["tokens"])
    lengths, digits, device = [LENGTH] * count, [DIGITS] * count, tokens_bs.device
    layout = SequenceLayout.build(lengths, digits, qkv_format="bshd", max_seq_lens=lengths, device=device)
    masks = torch.ones(count, DIGITS, device=device)
    log_probs = {name: list(batch[name]) for name in ("old_log_probs", "ref_log_probs")}
    policy_batch = PolicyBatch(list(batch["advantages"]), list(masks), **log_probs)
    loss_func = make_loss_func(list(tokens_bs), layout, policy_batch, _OPTIONS, with_entropy=False)
    return chunk(tokens_bs, _positions(tokens_bs), attention_mask=None), loss_func
