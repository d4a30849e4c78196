"""Building a Megatron model that only scores: no DDP, no gradient buffers, frozen, in eval mode."""
