"""Our patches, beside those of megatron_rl_patches."""
