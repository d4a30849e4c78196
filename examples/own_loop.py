"""Three train() calls in one process, as reinforcement learning needs them. Megatron-core expects one call.

python own_loop.py              # two ranks on the CPU, both overlaps, distributed optimizer
python own_loop.py --plain      # without the package: the second call fails
"""

import sys

from megatron_rl_patches.reentry import reentrant_train
from megatron_rl_patches.testing import cpu_backend, spawn_ranks, tiny_model

STEPS, MICROBATCHES, SAMPLES = 2, 2, 4
QUIET = {"PYTHONWARNINGS": "ignore"}  # Megatron warns of optional packages that are not installed


def train(model, optimizer, rollout):
    """An ordinary Megatron-core loop, as Megatron-LM and slime write it."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    [chunk], losses = model, []
    config = chunk.config
    assert config.no_sync_func is None, "a custom no_sync_func is not supported"
    config.no_sync_func = chunk.no_sync
    config.grad_sync_func = chunk.start_grad_sync
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss

    # The first step runs without the hooks that gather parameters, as in Megatron-LM.
    chunk.disable_forward_pre_hook(param_sync=False)
    for step in range(STEPS):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(rollout[step]),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=rollout[step][0].shape[1] - 1,
            micro_batch_size=SAMPLES,
        )
        optimizer.step()
        losses += [float(report["loss"]) for report in reports]
        if step == 0:
            chunk.enable_forward_pre_hook()
    chunk.disable_forward_pre_hook()
    return sum(losses) / len(losses)


def forward_step(data_iterator, chunk):
    """Megatron's forward step: predict each token of a microbatch [SAMPLES, length + 1] from those before."""
    import torch

    tokens = next(data_iterator)
    length = tokens.shape[1] - 1
    positions = torch.arange(length).expand(SAMPLES, length)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)  # True: must not be seen
    losses = chunk(tokens[:, :-1], positions, causal, labels=tokens[:, 1:])
    return losses, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


def generate(tiny, seed):
    """Take the place of the rollout engine: return microbatches of ascending tokens, a list for each step."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(tiny.vocab_size, (STEPS, MICROBATCHES, SAMPLES, 1), generator=generator)
    tokens = (start + torch.arange(tiny.seq_length + 1)) % tiny.vocab_size
    return [list(step) for step in tokens]


def run(plain):
    """Run on each rank; return the mean loss of each rollout."""
    with cpu_backend():
        from torch.distributed import get_rank

        tiny = tiny_model("dense")
        model, optimizer = tiny.build()
        # Guarded, the loop can install no_sync_func again, and disable hooks that are off.
        loop = train if plain else reentrant_train(train)
        return [loop(model, optimizer, generate(tiny, 10 * rollout + get_rank())) for rollout in range(3)]


if __name__ == "__main__":
    for rank, losses in enumerate(spawn_ranks(run, 2, "--plain" in sys.argv, timeout=300, env=QUIET)):
        print(f"rank {rank}:", *(f"{loss:.3f}" for loss in losses))
