"""Log-probabilities and most probable tokens, computed through Megatron's pipeline schedules."""
