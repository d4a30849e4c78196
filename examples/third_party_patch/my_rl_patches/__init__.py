"""Our patches, in addition to those of megatron_rl_patches."""
