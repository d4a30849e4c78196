"""Loading weights, and nothing else, from Megatron's checkpoints."""
