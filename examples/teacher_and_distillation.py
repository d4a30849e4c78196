"""A teacher without DDP and optimizer, and a student that learns its next-token distributions.

    python teacher_and_distillation.py      # two tensor-parallel ranks on the CPU
    python teacher_and_distillation.py 24   # the same with a top-k of 24 of the 32 tokens

In each rollout, the teacher scores the student's tokens, and the student trains one step on the reverse KL
divergence. The divergence is over the whole vocabulary, or over the student's k most probable tokens and the
tail of all others. No logits are in memory: the teacher returns its hidden states, or the probabilities of
the k tokens, and the patch `lean-head` makes the student's logits deferred.
"""

import sys

import megatron_rl_patches
from megatron_rl_patches.testing import cpu_backend, spawn_ranks, tiny_model

ROLLOUTS, SAMPLES, PROMPT, RESPONSE = 30, 8, 4, 12
LENGTH = PROMPT + RESPONSE
QUIET = {"PYTHONWARNINGS": "ignore"}  # Megatron warns of optional packages that are not installed


def build_teacher(tiny):
    """Return the chunks of a teacher: no DDP, no gradient buffer, no optimizer."""
    from megatron_rl_patches.inference import build_inference_model

    teacher = build_inference_model(tiny.provider, tiny.transformer_config(), dtype="fp32")
    # In your job: load_inference_checkpoint(teacher, "checkpoints/math"). Here the weights are random.
    [weights] = tiny_model("dense", tp=tiny.tp, seed=99, config={"init_method_std": 0.3}).chunks()
    teacher[0].load_state_dict(weights.state_dict())
    return teacher


def distributions_of(teacher, student, tokens, k):
    """Return the teacher's distributions for each response: over k tokens, or over the whole vocabulary."""
    from megatron_rl_patches.inference import forward_hidden_states, forward_topk, output_head
    from megatron_rl_patches.losses import FullDistribution

    # One entry per microbatch. "total_lengths" counts whole samples, "response_lengths" the tokens to score.
    microbatches = [
        {"tokens": tokens, "total_lengths": [LENGTH] * SAMPLES, "response_lengths": [RESPONSE] * SAMPLES}
    ]
    if k:
        at_students_ids = forward_topk(student, microbatches, k, progress=False)
        return forward_topk(teacher, microbatches, at=at_students_ids, progress=False)
    hidden = forward_hidden_states(teacher, microbatches, progress=False)  # [RESPONSE, h] per sample
    head = output_head(teacher)
    return [FullDistribution.from_hidden(hidden_lh, head) for hidden_lh in hidden]


def make_forward_step(distributions):
    """Return Megatron's forward step for a microbatch. The distributions are those of the teacher."""
    import torch
    from megatron.core import parallel_state

    from megatron_rl_patches.losses import (
        DistillationBatch,
        DistillationOptions,
        SequenceLayout,
        make_distillation_loss_func,
    )

    layout = SequenceLayout.build(
        [LENGTH] * SAMPLES, [RESPONSE] * SAMPLES, qkv_format="bshd", max_seq_lens=[LENGTH] * SAMPLES
    )
    batch = DistillationBatch([distributions], [torch.ones(RESPONSE)] * SAMPLES)
    loss_func = make_distillation_loss_func(
        layout,
        batch,
        DistillationOptions("reverse_kl"),
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )

    def forward_step(data_iterator, chunk):
        tokens = next(data_iterator)
        positions = torch.arange(LENGTH).expand(SAMPLES, LENGTH)
        causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        return chunk(tokens, positions, causal), loss_func

    return forward_step


def run(k):
    """Run on each rank; return the divergence of each rollout, in nats per token."""
    with cpu_backend():
        import torch
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        megatron_rl_patches.apply("lean-head")
        tiny = tiny_model("dense", tp=2, lr=1e-2, config={"calculate_per_token_loss": True})
        student, optimizer = tiny.build()
        student[0].config.finalize_model_grads_func = finalize_model_grads
        teacher = build_teacher(tiny)
        generator = torch.Generator().manual_seed(0)
        divergences = []
        for _ in range(ROLLOUTS):
            tokens = torch.randint(tiny.vocab_size, (SAMPLES, LENGTH), generator=generator)  # your rollout
            student[0].zero_grad_buffer()
            optimizer.zero_grad()
            [report] = get_forward_backward_func()(
                forward_step_func=make_forward_step(distributions_of(teacher, student, tokens, k)),
                data_iterator=iter([tokens]),
                model=student,
                num_microbatches=1,
                seq_length=LENGTH,
                micro_batch_size=SAMPLES,
            )
            optimizer.step()
            total, count = report["loss"].tolist()  # metrics are [sum, number of tokens]
            divergences.append(total / count)
        return divergences


if __name__ == "__main__":
    k = int(sys.argv[1]) if sys.argv[1:] else None
    [divergences, _] = spawn_ranks(run, 2, k, timeout=300, env=QUIET)
    for rollout in range(0, ROLLOUTS, 5):
        print(f"rollout {rollout:2}: {divergences[rollout]:.4f} nats per token from the teacher")
    print(f"rollout {ROLLOUTS - 1:2}: {divergences[-1]:.4f}")
