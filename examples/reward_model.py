"""A reward model or a critic, without DDP and optimizer: its output layer is a head with one column.

python reward_model.py      # two pipeline stages on the CPU
"""

from megatron_rl_patches.testing import cpu_backend, spawn_ranks, tiny_model

QUIET = {"PYTHONWARNINGS": "ignore"}  # Megatron warns of optional packages that are not installed


def provider_with_head(tiny):
    """Return a model provider whose last stage ends in a head, as frameworks build their critics."""
    import torch

    class ValueHead(torch.nn.Linear):
        """Map [s, b, h] to [s, b, 1]. GPTModel expects that its output layer returns a pair with a bias."""

        def forward(self, hidden, weight=None, runtime_gather_output=None):
            return super().forward(hidden), None

    def provide(pre_process=True, post_process=True, config=None, vp_stage=None, **options):
        model = tiny.provider(pre_process, post_process, config, vp_stage)
        if post_process:
            model.output_layer = ValueHead(model.config.hidden_size, 1, bias=False)
        return model

    return provide


def run():
    """Run on each rank; return the rewards on the last pipeline stage, None on the others."""
    with cpu_backend():
        import torch

        from megatron_rl_patches.inference import build_inference_model, forward_values

        tiny = tiny_model("dense", pp=2)
        tiny.initialize()
        model = build_inference_model(provider_with_head(tiny), tiny.transformer_config(), dtype="fp32")
        # In your job: load_inference_checkpoint(model, "checkpoints/reward"). Here the weights are random.
        for number, parameter in enumerate(model[0].parameters()):
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))

        # Two samples in one microbatch, padded on the right with any token, and one in another.
        microbatches = [
            {"tokens": torch.tensor([[7, 3, 9, 4, 0, 0], [5, 1, 8, 2, 6, 9]]), "total_lengths": [4, 6]},
            {"tokens": torch.tensor([[1, 2, 3, 0]]), "total_lengths": [3]},
        ]
        values = forward_values(model, microbatches, progress=False)  # per sample [length], float32
        if values is None:
            return None
        rewards = [round(float(values_l[-1]), 3) for values_l in values]  # at the last token
        return rewards, [len(values_l) for values_l in values]


if __name__ == "__main__":
    *others, (rewards, lengths) = spawn_ranks(run, 2, timeout=300, env=QUIET)
    assert others == [None]
    for sample, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        print(f"sample {sample}: {length} values, reward {reward}")
