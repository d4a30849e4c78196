"""A training service on two CPU ranks: a client sends gradients in as many requests as it likes, then a step.

python training_service.py
"""

import random

from megatron_rl_patches.reentry import OptimizerStep
from megatron_rl_patches.testing import cpu_backend, spawn_ranks, tiny_model

QUIET = {"PYTHONWARNINGS": "ignore"}  # Megatron warns of optional packages that are not installed


class Service:
    """One rank of the service. All ranks get the same requests, each with its own share of the data."""

    def __init__(self):
        # The loss is a mean over the tokens of a step, whose number is known when the last request is there.
        tiny = tiny_model("dense", config={"calculate_per_token_loss": True})
        self.model, optimizer = tiny.build()
        self.steps = OptimizerStep(self.model, optimizer)
        self.steps.begin()

    def forward_backward(self, microbatches):
        """Accumulate gradients of microbatches [samples, length + 1]; return the loss per token of each."""
        reports = self.steps.forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            num_microbatches=len(microbatches),
            seq_length=microbatches[0].shape[1] - 1,
            micro_batch_size=len(microbatches[0]),
        )
        return [report["loss"] for report in reports]

    def optimizer_step(self):
        """Step on all gradients since the last one; return their norm. The weights may be sent then."""
        _, norm, _ = self.steps.step()
        self.steps.begin()
        return norm


def forward_step(data_iterator, chunk):
    """Megatron's forward step: predict each token from those before."""
    import torch

    tokens = next(data_iterator)
    samples, length = tokens.shape[0], tokens.shape[1] - 1
    positions = torch.arange(length).expand(samples, length)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)  # True: must not be seen
    losses = chunk(tokens[:, :-1], positions, causal, labels=tokens[:, 1:])
    number = torch.tensor(losses.numel(), dtype=torch.int)
    return losses, lambda losses: (losses.sum(), number, {"loss": float(losses.mean())})


def serve():
    """Run on each rank; return loss and norm of four steps, whose requests differ in number and size."""
    with cpu_backend():
        import torch

        service, steps = Service(), []
        rank = torch.distributed.get_rank()
        generator, requests = torch.Generator().manual_seed(rank), random.Random(0)
        for _ in range(4):
            losses = []
            for _ in range(requests.randint(1, 3)):
                starts = torch.randint(32, (requests.randint(1, 2), 4, 1), generator=generator)
                losses += service.forward_backward(list((starts + torch.arange(17)) % 32))
            steps.append((sum(losses) / len(losses), service.optimizer_step()))
        return steps


if __name__ == "__main__":
    for rank, steps in enumerate(spawn_ranks(serve, 2, timeout=300, env=QUIET)):
        print(f"rank {rank}:", *(f"loss {loss:.3f} norm {norm:.6f}" for loss, norm in steps))
