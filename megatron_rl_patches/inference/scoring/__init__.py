"""What a model says of tokens, computed through Megatron's pipeline schedules."""
